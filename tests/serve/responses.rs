//! The newer API with functions, as agents use it: what they send, what they get, and what they send back.

use crate::daemon::{Answer, Daemon, forecast};
use serde_json::{Value as Json, json};

const RESPONSES: &str = "/v1/responses";

fn weather() -> Json {
    let parameters = forecast();
    json!({"type": "function", "name": "weather", "description": "The forecast.", "parameters": parameters, "strict": true})
}

fn clock() -> Json {
    json!({"type": "function", "name": "clock", "parameters": null})
}

/// The events of a stream, each with its name before it and its number in it.
fn events(stream: &Answer) -> Vec<Json> {
    assert_eq!(stream.status, 200, "{}", stream.text());
    let text = stream.text();
    let events = text.split("\n\n").filter_map(|event| event.split_once("\ndata: ")).map(|(name, data)| {
        let event: Json = serde_json::from_str(data).unwrap();
        assert_eq!(event["type"].as_str(), name.strip_prefix("event: "));
        event
    });
    let events: Vec<Json> = events.collect();
    assert!(stream.whole && events.iter().enumerate().all(|(i, event)| event["sequence_number"] == i), "{text}");
    events
}

fn kinds(events: &[Json]) -> Vec<&str> {
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    kinds
}

#[test]
fn a_call_streams_in_openais_order_and_its_output_goes_back_in() {
    let daemon = Daemon::start(&[]);
    let mut ask = json!({
        "instructions": "Be brief.", "input": [{"role": "user", "content": "Will it rain?"}], "tools": [weather(), clock()],
        "tool_choice": {"type": "function", "name": "weather"}, "temperature": 0, "max_output_tokens": 100});
    let whole = daemon.post(RESPONSES, &ask);
    assert_eq!(whole.status, 200, "{}", whole.text());
    let whole = whole.json();
    assert_eq!((&whole["status"], &whole["tools"]), (&json!("completed"), &json!([weather(), clock()])));
    let [call] = &whole["output"].as_array().unwrap()[..] else { panic!("{whole}") };
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("weather")));
    let arguments: Json = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(["Rome", "Oslo"].contains(&arguments["place"].as_str().unwrap()), "{arguments}");
    ask["stream"] = true.into();
    let stream = events(&daemon.post(RESPONSES, &ask));
    assert_eq!(
        kinds(&stream),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let added = &stream[2]["item"];
    assert_eq!(
        (&added["status"], &added["arguments"], &added["name"]),
        (&json!("in_progress"), &json!(""), &json!("weather"))
    );
    let pieces = stream.iter().filter(|event| event["type"] == "response.function_call_arguments.delta");
    assert!(pieces.clone().all(|piece| piece["item_id"] == added["id"] && piece["output_index"] == 0));
    let pieces: String = pieces.map(|piece| piece["delta"].as_str().unwrap()).collect();
    let done = stream.iter().find(|event| event["type"] == "response.output_item.done").unwrap();
    assert_eq!((done["item"]["arguments"].as_str(), pieces.as_str()), (call["arguments"].as_str(), pieces.as_str()));
    assert_eq!(stream.last().unwrap()["response"]["output"][0], done["item"]);
    // The next turn has the call as it came, thoughts before it, and what the function returned, as a text or in parts.
    for output in [json!("sunny"), json!([{"type": "input_text", "text": "sunny"}])] {
        let thoughts = json!({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": null,
            "content": [{"type": "reasoning_text", "text": "Rain?"}]});
        let result = json!({"type": "function_call_output", "call_id": call["call_id"], "output": output});
        let next = json!({
            "input": [{"role": "user", "content": "Will it rain?"}, thoughts, call, result], "tools": [weather()],
            "max_output_tokens": 5});
        let said = daemon.post(RESPONSES, &next);
        assert_eq!(said.status, 200, "{}", said.text());
        assert_eq!(said.json()["output"][0]["type"], "message");
    }
    for (input, param) in [
        (json!([{"type": "function_call_output", "call_id": "none", "output": "x"}]), "input.0.call_id"),
        (json!([{"type": "function_call", "call_id": "1", "name": "a b", "arguments": "{}"}]), "input.0.name"),
        (json!([{"type": "message", "content": "x"}]), "input.0"),
        (json!([{"role": "user", "content": "x"}, {"type": "item_reference", "id": "x"}]), "input.1"),
    ] {
        let answer = daemon.post(RESPONSES, &json!({"input": input}));
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(param)), "{}", answer.text());
    }
}

/// What codex sends by default: a developer's message, tools that OpenAI's servers run among its own, and hints.
#[test]
fn what_agents_send_by_default_is_taken() {
    let daemon = Daemon::start(&["--ctx-size", "2048"]);
    let text = |role: &str, text: &str| json!({"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]});
    let codex = json!({
        "model": "demo", "instructions": "You are a coding agent.",
        "input": [text("developer", "Sandboxed."), text("user", "<environment_context/>"), text("user", "Hello")],
        "tools": [weather(), {"type": "web_search", "external_web_access": false}, clock()],
        "tool_choice": "auto", "parallel_tool_calls": false, "reasoning": {"effort": "medium", "summary": "auto"},
        "store": false, "stream": true, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0190",
        "client_metadata": {"session": "1"}, "text": {"verbosity": "low"}, "service_tier": null,
        "max_output_tokens": 8, "temperature": 0});
    let stream = daemon.post(RESPONSES, &codex);
    assert_eq!(kinds(&events(&stream)).last(), Some(&"response.incomplete"));
    // The tool that nothing here runs is not offered, and the answer says so.
    assert!(stream.headers.contains("x-dynamicinfer-unenforced: /tools/1"), "{}", stream.headers);
    let mut forced = codex.clone();
    forced["tool_choice"] = json!({"type": "web_search"});
    assert_eq!(daemon.post(RESPONSES, &forced).json()["error"]["param"], "tool_choice");
    // The Agents SDK sends what it leaves out as null or empty.
    let agents = json!({
        "model": "demo", "input": "Hello", "instructions": null, "tools": [weather()], "include": [], "metadata": null,
        "previous_response_id": null, "conversation": null, "prompt": null, "truncation": null, "tool_choice": null,
        "parallel_tool_calls": null, "max_output_tokens": 4, "text": null, "reasoning": {}, "top_logprobs": null});
    let answer = daemon.post(RESPONSES, &agents);
    assert_eq!(answer.status, 200, "{}", answer.text());
    // Only the functions that are allowed are offered.
    let mut allowed = agents;
    allowed["tools"] = json!([weather(), clock()]);
    allowed["max_output_tokens"] = 60.into();
    allowed["tool_choice"] =
        json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]});
    assert_eq!(daemon.post(RESPONSES, &allowed).json()["output"][0]["name"], "clock");
}

/// Tools of type `custom`, whose input is a text of any form, were left out.
#[test]
fn a_custom_tool_is_called_with_a_text() {
    let daemon = Daemon::start(&["--ctx-size", "1024"]);
    let grammar = json!({"type": "grammar", "syntax": "lark", "definition": "start: /.+/"});
    let tool = json!({"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": grammar});
    let ask = json!({
        "input": "Once", "tools": [tool], "tool_choice": {"type": "custom", "name": "apply_patch"}, "temperature": 0,
        "max_output_tokens": 200, "stream": true});
    let stream = daemon.post(RESPONSES, &ask);
    assert!(stream.headers.contains("x-dynamicinfer-unenforced: /tools/0/format"), "{}", stream.headers);
    let events = events(&stream);
    let expected = [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ];
    assert_eq!(kinds(&events)[2..6], expected);
    let (added, done) = (&events[2]["item"], &events[5]["item"]);
    assert_eq!(
        (&added["type"], &added["input"], &added["name"]),
        (&json!("custom_tool_call"), &json!(""), &json!("apply_patch"))
    );
    assert!(done["input"].as_str().is_some_and(|input| !input.is_empty()) && done.get("arguments").is_none(), "{done}");
    assert_eq!((&events[3]["delta"], &events[4]["input"]), (&done["input"], &done["input"]));
    // It comes back as it went out, with what it returned.
    let returned = json!({"type": "custom_tool_call_output", "call_id": done["call_id"], "output": "done"});
    let next = json!({"input": [{"role": "user", "content": "Once"}, done, returned], "tools": [tool], "max_output_tokens": 4});
    let answer = daemon.post(RESPONSES, &next);
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// `previous_response_id` was refused, which OpenAI's SDKs send for every turn but the first.
#[test]
fn a_conversation_goes_on_from_an_answers_id_as_if_it_were_sent_whole() {
    let daemon = Daemon::start(&[]);
    let ask = |input: Json, more: &[(&str, Json)]| {
        let mut ask = json!({"input": input, "temperature": 0, "max_output_tokens": 12});
        more.iter().for_each(|(field, value)| ask[field] = value.clone());
        daemon.post(RESPONSES, &ask)
    };
    let first = ask(json!("Once there was a king."), &[("instructions", json!("Tell."))]).json();
    let id = first["id"].as_str().unwrap();
    assert_eq!((&first["store"], &first["previous_response_id"]), (&json!(true), &Json::Null));
    // The same conversation sent whole, without the first turn's instructions.
    let mut whole = vec![json!({"role": "user", "content": "Once there was a king."})];
    whole.extend(first["output"].as_array().unwrap().iter().cloned());
    whole.push(json!({"role": "user", "content": "And then?"}));
    let wanted = ask(json!(whole), &[]).json();
    let second = ask(json!("And then?"), &[("previous_response_id", json!(id))]).json();
    assert_eq!(second["previous_response_id"], json!(id));
    assert_eq!(second["output"][0]["content"], wanted["output"][0]["content"]);
    assert_eq!(second["usage"]["input_tokens"], wanted["usage"]["input_tokens"]);
    // Streamed ones are kept when they are complete; a third turn has all before it.
    let more = [("previous_response_id", second["id"].clone()), ("stream", json!(true))];
    let stream = events(&ask(json!("And at last?"), &more));
    let third = &stream.last().unwrap()["response"];
    assert!(third["usage"]["input_tokens"].as_u64() > second["usage"]["input_tokens"].as_u64());
    let of = |id: &Json| format!("{RESPONSES}/{}", id.as_str().unwrap());
    assert_eq!(&daemon.get(&of(&third["id"])), third);
    // An output goes back to the call that was kept.
    let tools = [("tools", json!([clock()])), ("tool_choice", json!("required")), ("max_output_tokens", json!(100))];
    let called = ask(json!("What time is it?"), &tools).json();
    assert_eq!(called["output"][0]["type"], "function_call", "{called}");
    let call = called["output"][0]["call_id"].clone();
    let output = json!([{"type": "function_call_output", "call_id": call, "output": "noon"}]);
    let more = [("previous_response_id", called["id"].clone())];
    let answered = ask(output.clone(), &more);
    assert_eq!(answered.status, 200, "{}", answered.text());
    assert_eq!(ask(output, &[]).status, 400, "an output without its call");
    // A mistake in the request is named by its place there.
    let wrong = ask(json!([{"type": "web_search_call"}]), &more);
    assert_eq!((wrong.status, &wrong.json()["error"]["param"]), (400, &json!("input.0")));
    // What is forgotten, never kept or never was is 404.
    assert_eq!(daemon.call("DELETE", &of(&third["id"]), "").json()["deleted"], json!(true));
    let never = ask(json!("x"), &[("store", json!(false))]).json();
    assert_eq!(never["store"], json!(false));
    for id in [&third["id"], &never["id"], &json!("resp_0"), &json!("")] {
        let refused = ask(json!("And then?"), &[("previous_response_id", id.clone())]);
        let error = &refused.json()["error"];
        assert_eq!((refused.status, &error["code"]), (404, &json!("previous_response_not_found")), "{id}");
        assert!(["GET", "DELETE"].iter().all(|how| [404, 405].contains(&daemon.call(how, &of(id), "").status)), "{id}");
    }
    // Nothing is kept where settings say so.
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo"], &[("DYNAMICINFER_SERVE_RESPONSES_BYTES", "0")]);
    daemon.wait_for("is ready");
    let answer = daemon.post(RESPONSES, &json!({"input": "x", "max_output_tokens": 2, "store": true})).json();
    assert_eq!(answer["store"], json!(false));
    assert_eq!(daemon.call("GET", &of(&answer["id"]), "").status, 404);
}
