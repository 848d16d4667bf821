//! Anthropic's API: what its clients send, what they get, and what they send back.

use crate::daemon::{Answer, Daemon, PATIENCE, forecast, read_all, request};
use crate::native::TEMPLATE;
use crate::templates::serve;
use serde_json::{Value as Json, json};
use std::io::Write;
use std::net::TcpStream;

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

fn weather() -> Json {
    json!({"name": "weather", "description": "The forecast.", "input_schema": forecast()})
}

fn clock() -> Json {
    json!({"name": "clock", "input_schema": {"type": "object", "properties": {}, "required": []}})
}

fn user(content: impl Into<Json>) -> Json {
    json!({"role": "user", "content": content.into()})
}

fn with(mut ask: Json, more: Json) -> Json {
    ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ask
}

fn message(daemon: &Daemon, ask: &Json) -> Json {
    let answer = daemon.post(MESSAGES, ask);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// The events of a stream, each with its name before it.
fn events(stream: &Answer) -> Vec<Json> {
    assert_eq!(stream.status, 200, "{}", stream.text());
    let text = stream.text();
    assert!(stream.whole && text.ends_with("\n\n"), "{text}");
    let event = |event: &str| {
        let (name, data) = event.split_once("\ndata: ").unwrap_or_else(|| panic!("{event}"));
        let event: Json = serde_json::from_str(data).unwrap();
        assert_eq!(event["type"].as_str(), name.strip_prefix("event: "));
        event
    };
    text.trim_end().split("\n\n").map(event).collect()
}

/// The message that a client makes of a stream, and the kinds of its events without repetitions.
fn collected(events: &[Json]) -> (Json, Vec<String>) {
    let mut message = events[0]["message"].clone();
    let mut kinds: Vec<String> = Vec::new();
    let mut inputs: Vec<String> = Vec::new();
    for event in events {
        let kind = event["type"].as_str().unwrap();
        let index = event["index"].as_u64().unwrap_or(0) as usize;
        let content = message["content"].as_array_mut().unwrap();
        match kind {
            "content_block_start" => {
                assert_eq!(index, content.len());
                content.push(event["content_block"].clone());
                inputs.push(String::new());
            }
            "content_block_delta" => {
                // Deltas are about the block that has begun last.
                assert_eq!(index + 1, content.len());
                let delta = &event["delta"];
                let mut add = |field: &str, more: &str| {
                    content[index][field] = (content[index][field].as_str().unwrap().to_owned() + more).into();
                };
                match delta["type"].as_str().unwrap() {
                    "text_delta" => add("text", delta["text"].as_str().unwrap()),
                    "thinking_delta" => add("thinking", delta["thinking"].as_str().unwrap()),
                    "input_json_delta" => inputs[index].push_str(delta["partial_json"].as_str().unwrap()),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" if content[index]["type"] == "tool_use" => {
                content[index]["input"] = serde_json::from_str(&inputs[index]).unwrap();
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                assert_eq!(message["usage"]["input_tokens"], event["usage"]["input_tokens"]);
                message["usage"] = event["usage"].clone();
            }
            _ => {}
        }
        let kind = match event["content_block"]["type"].as_str().or(event["delta"]["type"].as_str()) {
            Some(what) => format!("{kind} {what}"),
            None => kind.to_owned(),
        };
        if kinds.last() != Some(&kind) {
            kinds.push(kind);
        }
    }
    (message, kinds)
}

/// Streams a request; the message is the whole answer's, but for its ids. Returns it with the kinds of events.
fn streamed(daemon: &Daemon, ask: &Json) -> (Json, Vec<String>) {
    let whole = message(daemon, ask);
    let (mut message, kinds) = collected(&events(&daemon.post(MESSAGES, &with(ask.clone(), json!({"stream": true})))));
    let mut plain = whole.clone();
    for answer in [&mut message, &mut plain] {
        answer["id"] = Json::Null;
        answer["content"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .for_each(|block| _ = block.as_object_mut().unwrap().remove("id"));
    }
    assert_eq!(message, plain);
    (whole, kinds)
}

/// That the prompt of a request is this text, as it is counted and as it is answered.
fn is_told(daemon: &Daemon, ask: &Json, text: &str) {
    let tokens = daemon.post("/tokenize", &json!({"content": text, "parse_special": true})).json();
    let counted = daemon.post(COUNT, ask);
    assert_eq!(counted.status, 200, "{}", counted.text());
    assert_eq!(counted.json(), json!({"input_tokens": tokens["count"]}), "{text}");
    let answer = message(daemon, &with(ask.clone(), json!({"max_tokens": 1})));
    assert_eq!(answer["usage"]["input_tokens"], tokens["count"], "{text}");
}

#[test]
fn a_message_says_what_a_chat_says_whole_and_as_events() {
    let daemon = Daemon::start(&[]);
    let ask = json!({"model": "demo", "system": "Tell a story.", "messages": [user("Once upon a time")], "max_tokens": 24, "temperature": 0});
    let chat = json!({"messages": [{"role": "system", "content": "Tell a story."}, user("Once upon a time")], "max_tokens": 24, "temperature": 0});
    let chat = daemon.post("/v1/chat/completions", &chat).json();
    let (whole, kinds) = streamed(&daemon, &ask);
    assert_eq!(whole["content"], json!([{"type": "text", "text": chat["choices"][0]["message"]["content"]}]));
    assert_eq!(
        (&whole["type"], &whole["role"], &whole["model"], &whole["stop_reason"], &whole["stop_sequence"]),
        (&json!("message"), &json!("assistant"), &json!("demo"), &json!("max_tokens"), &Json::Null)
    );
    assert_eq!(whole["usage"], json!({"input_tokens": chat["usage"]["prompt_tokens"], "output_tokens": 24}));
    assert!(whole["id"].as_str().unwrap().starts_with("msg_"), "{whole}");
    assert_eq!(
        kinds,
        [
            "message_start",
            "content_block_start text",
            "content_block_delta text_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    assert_eq!(daemon.post(COUNT, &ask).json()["input_tokens"], whole["usage"]["input_tokens"]);
    // Texts in blocks are the same texts; an answer goes back as it came, and hints change nothing.
    let blocks = with(
        ask.clone(),
        json!({
        "system": [{"type": "text", "text": "Tell a story.", "cache_control": {"type": "ephemeral"}}],
        "messages": [user(json!([{"type": "text", "text": "Once upon a time", "cache_control": {"type": "ephemeral"}, "citations": null}]))],
        "metadata": {"user_id": "me"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "mcp_servers": [],
        "container": null, "tools": [], "stop_sequences": [], "thinking": {"type": "disabled"}}),
    );
    assert_eq!(message(&daemon, &blocks)["content"], whole["content"]);
    let back = with(
        ask,
        json!({"messages": [user("Once upon a time"), {"role": "assistant", "content": whole["content"]}, user("And then")]}),
    );
    assert_eq!(message(&daemon, &back)["type"], "message");
    let answer = daemon.post(MESSAGES, &back);
    let id = |name: &str| answer.headers.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned)).unwrap();
    assert_eq!(id("request-id: "), id("x-request-id: "));
}

#[test]
fn the_stop_sequence_that_ended_an_answer_is_named() {
    let daemon = Daemon::start(&[]);
    let ask = json!({"messages": [user("Once upon a time")], "max_tokens": 40, "temperature": 0});
    let text = message(&daemon, &ask)["content"][0]["text"].as_str().unwrap().to_owned();
    let (first, later) = (text[9..14].to_owned(), text[20..24].to_owned());
    assert!(text.find(&first) < text.find(&later), "{text}");
    for stops in [json!([first]), json!(["nowhere", later, first])] {
        let (whole, _) = streamed(&daemon, &with(ask.clone(), json!({"stop_sequences": stops})));
        assert_eq!(
            (&whole["stop_reason"], &whole["stop_sequence"]),
            (&json!("stop_sequence"), &json!(first)),
            "{whole}"
        );
        assert_eq!(whole["content"][0]["text"], text[..text.find(&first).unwrap()]);
    }
}

#[test]
fn calls_stream_in_anthropics_order_and_results_go_back_in() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path(), TEMPLATE);
    let told = "Tweather:[\"place\", \"days\"]\nTclock:[]\nuser: Rain?<end>\nassistant:";
    let ask = json!({"messages": [user("Rain?")], "tools": [weather(), clock()]});
    is_told(&daemon, &ask, told);
    is_told(&daemon, &with(ask.clone(), json!({"tool_choice": {"type": "auto"}})), told);
    is_told(&daemon, &with(ask.clone(), json!({"tool_choice": {"type": "none"}})), "user: Rain?<end>\nassistant:");
    let one = json!({"tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": true}, "temperature": 0, "max_tokens": 200});
    let (whole, kinds) = streamed(&daemon, &with(ask.clone(), one));
    let call = |kinds: &mut Vec<&str>| {
        kinds.extend(["content_block_start tool_use", "content_block_delta input_json_delta", "content_block_stop"]);
    };
    let mut wanted = vec!["message_start"];
    call(&mut wanted);
    wanted.extend(["message_delta", "message_stop"]);
    assert_eq!(kinds, wanted);
    let content = whole["content"].as_array().unwrap();
    assert_eq!((content.len(), &content[0]["name"], &whole["stop_reason"]), (1, &json!("weather"), &json!("tool_use")));
    let input = &content[0]["input"];
    assert!((1..=9).contains(&input["days"].as_i64().unwrap()) && input["place"].is_string(), "{whole}");
    assert!(content[0]["id"].as_str().unwrap().starts_with("toolu_"), "{whole}");
    // With one seed or another this model calls several times.
    let several = |seed: u64| {
        let more = json!({"tool_choice": {"type": "any"}, "temperature": 1.5, "seed": seed, "max_tokens": 300});
        with(ask.clone(), more)
    };
    let calls_twice = |ask: &Json| {
        let said = message(&daemon, ask);
        said["stop_reason"] == "tool_use" && said["content"].as_array().unwrap().len() > 1
    };
    let twice = (0..60).map(several).find(calls_twice).expect("an answer with two calls");
    let (two, kinds) = streamed(&daemon, &twice);
    let content = two["content"].as_array().unwrap().clone();
    let mut wanted = vec!["message_start"];
    content.iter().for_each(|_| call(&mut wanted));
    wanted.extend(["message_delta", "message_stop"]);
    assert_eq!(kinds, wanted);
    assert_ne!(content[0]["id"], content[1]["id"]);
    // What was called, letter by letter, and what it returned, are rendered as the template has them.
    let history = json!([
        user("Rain?"),
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "1", "name": "weather", "input": {"place": "Rome"}},
            {"type": "tool_use", "id": "2", "name": "clock", "input": {}}]},
        user(json!([
            {"type": "tool_result", "tool_use_id": "1", "content": "sun"},
            {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "late"}], "is_error": true},
            {"type": "text", "text": "So?"}]))]);
    is_told(
        &daemon,
        &json!({"messages": history}),
        "user: Rain?<end>\nassistant: Well.<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\":\"Rome\"}}\n</tool_call><tool_call>\n\
         {\"name\": \"clock\", \"arguments\": {}}\n</tool_call><end>\n<tool_response>sun</tool_response>\n\
         <tool_response>Error: late</tool_response>\nuser: So?<end>\nassistant:",
    );
    let results: Vec<Json> =
        content.iter().map(|call| json!({"type": "tool_result", "tool_use_id": call["id"], "content": "x"})).collect();
    let next = json!({"messages": [user("Rain?"), {"role": "assistant", "content": content}, user(json!(results))],
        "tools": [weather(), clock()], "max_tokens": 4});
    assert_eq!(message(&daemon, &next)["role"], "assistant");
}

#[test]
fn an_answer_goes_on_from_a_last_message_of_the_assistant() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path(), TEMPLATE);
    let begun = |content: Json| json!({"messages": [user("Rain?"), {"role": "assistant", "content": content}], "max_tokens": 4});
    let text = json!([{"type": "text", "text": "It "}, {"type": "text", "text": "will"}]);
    is_told(&daemon, &begun("It will".into()), "user: Rain?<end>\nassistant:It will");
    is_told(&daemon, &begun(text), "user: Rain?<end>\nassistant:It will");
    is_told(&daemon, &begun("".into()), "user: Rain?<end>\nassistant:");
    let call = json!([{"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {}}]);
    let thinks = with(begun("It".into()), json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}));
    let formed = json!({"output_config": {"format": {"type": "json_schema", "schema": {"type": "integer"}}}});
    for (ask, why) in [
        (with(begun("It".into()), formed), "messages: an answer of a form begins anew"),
        (begun("It ".into()), "messages.1.content: the last message of the assistant ends with white space"),
        (begun(call), "messages.1.content.0: a block of type 'tool_use' cannot be read here"),
        (thinks, "thinking.type: an answer that goes on from"),
        (
            json!({"messages": [{"role": "assistant", "content": "It"}], "max_tokens": 4}),
            "messages: there are no messages",
        ),
    ] {
        let refused = daemon.post("/v1/messages", &ask);
        let message = refused.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(refused.status == 400 && message.starts_with(why), "{message}");
    }
}

#[test]
fn thoughts_are_blocks_of_their_own_and_are_dropped_when_they_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path(), TEMPLATE);
    let plain = "user: Hi<end>\nassistant:";
    let ask = |more: Json| with(json!({"messages": [user("Hi")], "temperature": 0, "max_tokens": 12}), more);
    for (more, prompt) in [
        (json!({}), plain.to_owned()),
        (json!({"thinking": {"type": "disabled"}}), plain.to_owned()),
        (json!({"thinking": {"type": "adaptive"}}), plain.to_owned()),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}), format!("{plain}<think>\n")),
        (json!({"output_config": {"effort": "high"}}), "user: Hi<end>\nEffort high. assistant:".to_owned()),
    ] {
        is_told(&daemon, &ask(more), &prompt);
    }
    // This model never comes to an end with its thoughts.
    let thinks = ask(json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}));
    let (whole, kinds) = streamed(&daemon, &thinks);
    let [thought] = &whole["content"].as_array().unwrap()[..] else { panic!("{whole}") };
    assert_eq!((&thought["type"], &thought["signature"]), (&json!("thinking"), &json!("")));
    assert!(!thought["thinking"].as_str().unwrap().is_empty(), "{whole}");
    assert_eq!(
        kinds[1..4],
        ["content_block_start thinking", "content_block_delta thinking_delta", "content_block_stop"]
    );
    // With a budget it does.
    let limited = with(ask(json!({"thinking": {"type": "enabled", "budget_tokens": 5}})), json!({"max_tokens": 40}));
    let (whole, _) = streamed(&daemon, &limited);
    let [thought, text] = &whole["content"].as_array().unwrap()[..] else { panic!("{whole}") };
    assert_eq!((&thought["type"], &text["type"]), (&json!("thinking"), &json!("text")));
    assert!(!text["text"].as_str().unwrap().is_empty() && whole["usage"]["output_tokens"] == 40, "{whole}");
    let omitted = ask(json!({"thinking": {"type": "enabled", "display": "omitted"}}));
    assert_eq!(streamed(&daemon, &omitted).0["content"], json!([]));
    let back =
        |content: Json| json!({"messages": [user("Hi"), {"role": "assistant", "content": content}, user("So?")]});
    let text = json!({"type": "text", "text": "Ho"});
    let told = "user: Hi<end>\nassistant: Ho<end>\nuser: So?<end>\nassistant:";
    is_told(&daemon, &back(json!([thought, text])), told);
    is_told(&daemon, &back(json!([{"type": "redacted_thinking", "data": "x"}, text])), told);
}

#[test]
fn an_answer_has_the_form_that_output_config_asks_for() {
    let daemon = Daemon::start(&[]);
    let schema = json!({"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"], "additionalProperties": false});
    for field in ["output_config", "output_format"] {
        let format = json!({"type": "json_schema", "schema": schema});
        let value = if field == "output_config" { json!({"format": format}) } else { format };
        let ask = json!({"messages": [user("Where?")], "max_tokens": 60, "temperature": 0, field: value});
        let (whole, _) = streamed(&daemon, &ask);
        let text: Json = serde_json::from_str(whole["content"][0]["text"].as_str().unwrap()).unwrap();
        assert!(text["place"] == "Rome" || text["place"] == "Oslo", "{whole}");
        assert_eq!(whole["stop_reason"], "end_turn");
    }
    // Parts that are not kept to are told by their place.
    let odd = json!({"type": "json_schema", "schema": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": true}});
    let answer =
        daemon.post(MESSAGES, &json!({"messages": [user("x")], "max_tokens": 20, "output_config": {"format": odd}}));
    assert!(
        answer.headers.contains("x-dynamicinfer-unenforced: /output_config/format/schema/uniqueitems"),
        "{}",
        answer.headers
    );
}

/// What Claude Code sends, in short.
#[test]
fn what_agents_send_by_default_is_taken() {
    let daemon = Daemon::start(&["--ctx-size", "2048"]);
    let ask = json!({
        "model": "demo", "max_tokens": 8, "temperature": 1, "stream": true,
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [user(json!([{"type": "text", "text": "<system-reminder>x</system-reminder>"}, {"type": "text", "text": "Hello"}]))],
        "tools": [
            with(weather(), json!({"cache_control": {"type": "ephemeral"}, "eager_input_streaming": true, "type": "custom"})),
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": "user_1"}, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}});
    let stream = daemon.post("/v1/messages?beta=true", &ask);
    assert_eq!(events(&stream).last().unwrap()["type"], "message_stop");
    // The tool that nothing here runs is not offered, and the answer says so.
    assert!(stream.headers.contains("x-dynamicinfer-unenforced: /tools/1"), "{}", stream.headers);
    assert_eq!(daemon.post("/v1/messages/count_tokens?beta=true", &ask).status, 200);
}

#[test]
fn what_cannot_be_is_refused_by_name_in_anthropics_form() {
    let daemon = Daemon::start(&[]);
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}});
    let called = json!([{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a b", "input": {}}]}, user("x")]);
    let table: Vec<(&str, Json, &str)> = vec![
        ("messages", json!([]), "messages: there are no messages"),
        ("messages", json!("x"), "messages: invalid request"),
        ("messages", json!([{"role": "robot", "content": "x"}]), "messages.0.role: unknown role 'robot'"),
        ("messages", json!([{"role": "user"}]), "messages[0]: invalid request: missing field `content`"),
        ("messages", json!([user(json!([]))]), "messages.0.content: the content is empty"),
        ("messages", json!([user(json!([image]))]), "messages.0.content.0: a block of type 'image'"),
        (
            "messages",
            json!([user(json!([{"type": "document", "source": {}}]))]),
            "messages.0.content.0: a block of type 'document'",
        ),
        (
            "messages",
            json!([user(json!([{"type": "tool_result", "tool_use_id": "1", "content": [image]}]))]),
            "messages.0.content.0.content.0: ",
        ),
        (
            "messages",
            json!([user(json!([{"type": "tool_result", "tool_use_id": "1"}]))]),
            "messages.0.tool_use_id: a result needs",
        ),
        ("messages", called, "messages.0.content.0.name: 'a b'"),
        ("messages", json!([user("x ".repeat(3000))]), "messages: the prompt has"),
        ("system", json!([image]), "system.0: a block of type 'image'"),
        ("model", json!("claude-opus"), "model: the model 'claude-opus' is not loaded"),
        ("max_tokens", json!(0), "max_tokens is 0"),
        ("max_tokens", json!("5"), "max_tokens: invalid request"),
        ("temperature", json!(-1), "temperature is -1"),
        ("top_p", json!(1.5), "top_p"),
        ("stop_sequences", json!([""]), "stop_sequences: a stop string is empty"),
        ("tools", json!([{"name": "a b", "input_schema": {}}]), "tools.0.name: 'a b'"),
        ("tools", json!([{"name": "f", "input_schema": []}]), "tools.0.input_schema: input_schema must be"),
        ("tool_choice", json!({"type": "any"}), "tool_choice: a call is required"),
        ("tool_choice", json!({"type": "tool"}), "tool_choice.name: the name is missing"),
        ("tool_choice", json!({"type": "most"}), "tool_choice.type: unknown type 'most'"),
        ("thinking", json!({"type": "deep"}), "thinking.type: unknown type 'deep'"),
        ("output_config", json!({"format": {"type": "xml"}}), "output_config.format: unknown type 'xml'"),
        (
            "output_config",
            json!({"format": {"type": "json_schema"}}),
            "output_config.format: json_schema needs a schema",
        ),
        (
            "output_config",
            json!({"format": {"type": "json_schema", "schema": {"type": "strnig"}}}),
            "output_config.format: this schema",
        ),
        ("output_config", json!({"length": 1}), "output_config.length: unknown field 'length'"),
        ("context_management", json!({"edits": [{"type": "clear_tool_uses_20250919"}]}), "context_management.edits: "),
        ("container", json!("x"), "container: "),
        ("mcp_servers", json!([{"url": "x"}]), "mcp_servers: "),
        ("max_token", json!(1), "max_token: unknown field 'max_token'; did you mean 'max_tokens'?"),
    ];
    for (field, value, begins) in table {
        let mut ask = json!({"messages": [user("Once")], "max_tokens": 1});
        ask[field] = value;
        let answer = daemon.post(MESSAGES, &ask);
        let (status, kind) = if field == "model" { (404, "not_found_error") } else { (400, "invalid_request_error") };
        assert_eq!(answer.status, status, "{begins}: {}", answer.text());
        let answer = answer.json();
        let said = answer["error"]["message"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
        assert_eq!(answer, json!({"type": "error", "error": {"type": kind, "message": said}}));
        assert!(said.starts_with(begins) && said.len() < 600, "{begins}: {said}");
    }
    for path in [MESSAGES, COUNT] {
        let answer = daemon.call("POST", path, "nonsense");
        assert_eq!((answer.status, &answer.json()["type"]), (400, &json!("error")), "{}", answer.text());
        assert_eq!(daemon.call("GET", path, "").json()["error"]["type"], "invalid_request_error");
    }
    assert_eq!(daemon.call("POST", "/v1/messages/batches", "{}").json()["error"]["type"], "not_found_error");
    // Its own form ends where its addresses end.
    assert_eq!(daemon.call("POST", "/v1/messagesx", "{}").json()["error"]["param"], Json::Null);
}

#[test]
fn limits_hold_as_for_a_chat() {
    let dir = tempfile::tempdir().unwrap();
    let environment = [("DYNAMICINFER_SERVE_BODY_BYTES", "100000")];
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo"], &environment);
    daemon.wait_for("is ready");
    let large = json!({"messages": [user("x".repeat(200_000))], "max_tokens": 1});
    for path in [MESSAGES, COUNT] {
        let answer = daemon.post(path, &large);
        assert_eq!(
            (answer.status, &answer.json()["error"]["type"]),
            (413, &json!("request_too_large")),
            "{}",
            answer.text()
        );
        let deep = format!("{{\"messages\": {}", "[".repeat(50_000));
        assert_eq!(daemon.call("POST", path, &deep).status, 400);
        let deep = (0..200).fold(json!(1), |inner, _| json!({"x": inner}));
        let ask = json!({"messages": [user("x")], "max_tokens": 1, "tools": [{"name": "f", "input_schema": deep}]});
        assert_eq!(daemon.post(path, &ask).status, 400);
    }
    // What a model once called may be as deep as it was.
    let deep = format!("{}{}", "[".repeat(20_000), "]".repeat(20_000));
    let history = json!([user("x"), {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": "DEEP"}]},
        user(json!([{"type": "tool_result", "tool_use_id": "1", "content": "x"}]))]);
    let ask = json!({"messages": history, "max_tokens": 1}).to_string().replace("\"DEEP\"", &deep);
    let answer = daemon.call("POST", MESSAGES, &ask);
    assert!(answer.status == 400 && answer.text().contains("the context of 512"), "{}", answer.text());
    let encoded = "POST /v1/messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}";
    let answer = daemon.raw(encoded.as_bytes());
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (415, &json!("invalid_request_error")));
    daemon.post("/v1/x/models/unload", &json!({}));
    let answer = daemon.post(MESSAGES, &json!({"messages": [user("x")], "max_tokens": 1}));
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (503, &json!("api_error")), "{}", answer.text());
}

#[test]
fn the_token_may_come_in_the_header_of_anthropics_clients() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo", "--listen", "0"], &[]);
    let (address, token) = daemon.port();
    daemon.wait_for("is ready");
    let body = json!({"messages": [user("Once")], "max_tokens": 2}).to_string();
    let ask = |headers: &str| -> Answer {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let plain = String::from_utf8(request("POST", MESSAGES, &body)).unwrap();
        stream
            .write_all(plain.replacen("\r\n", &format!("\r\nanthropic-version: 2023-06-01\r\n{headers}"), 1).as_bytes())
            .unwrap();
        read_all(&mut stream)
    };
    let key = format!("X-Api-Key: {token}\r\n");
    let bearer = format!("Authorization: Bearer {token}\r\n");
    for good in [
        key.clone(),
        bearer.clone(),
        format!("{bearer}X-Api-Key: other\r\n"),
        format!("Authorization: Bearer x\r\n{key}"),
    ] {
        let answer = ask(&good);
        assert_eq!(answer.status, 200, "{good}: {}", answer.text());
    }
    for (bad, status, kind) in [
        (String::new(), 401, "authentication_error"),
        ("X-Api-Key: other\r\n".into(), 401, "authentication_error"),
        (format!("X-Api-Key: {token}0\r\n"), 401, "authentication_error"),
        (format!("{key}{key}"), 400, "invalid_request_error"),
        (format!("{key}Origin: http://evil.example\r\n"), 403, "permission_error"),
    ] {
        let answer = ask(&bad);
        assert_eq!(
            (answer.status, &answer.json()["error"]["type"]),
            (status, &json!(kind)),
            "{bad}: {}",
            answer.text()
        );
    }
}

#[test]
fn unknown_fields_are_ignored_where_the_setting_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo"], &[("DYNAMICINFER_SERVE_UNKNOWN_FIELDS", "ignore")]);
    daemon.wait_for("is ready");
    let ask = json!({"messages": [user("Hi")], "max_tokens": 4, "temperature": 0, "mood": {"good": [1]}, "tool_choice": {"type": "auto", "colour": 1}});
    assert_eq!(message(&daemon, &ask)["usage"]["output_tokens"], 4);
    assert_eq!(daemon.post(COUNT, &ask).status, 200);
    let mut logged = Vec::new();
    while !logged.iter().any(|line: &String| line.contains("count_tokens")) {
        logged.push(daemon.next_line().unwrap());
    }
    let ignored: Vec<&String> = logged.iter().filter(|line| line.contains("an unknown field is ignored")).collect();
    for field in ["\"mood\"", "\"tool_choice.colour\""] {
        assert_eq!(ignored.iter().filter(|line| line.contains(field)).count(), 1, "{field}: {logged:?}");
    }
}
