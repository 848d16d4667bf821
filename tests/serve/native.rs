//! Functions and thoughts by the model's own chat template: what goes into the prompt, and what of the answer comes as calls and thoughts.

use crate::daemon::{Answer, Daemon, command, forecast};
use crate::templates::serve;
use serde_json::{Value as Json, json};
use std::io::Write;
use std::process::Stdio;

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";

/// As Qwen3 has it, in short: functions, calls, what they returned, and thoughts that can be turned off.
pub const TEMPLATE: &str = "{% for tool in tools or [] %}T{{ tool.function.name }}:{{ tool.function.parameters.required | tojson }}\n{% endfor %}\
{% for m in messages %}{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>\n\
{% else %}{{ m.role }}:{% if m.reasoning_content %} <think>{{ m.reasoning_content }}</think>{% endif %}{% if m.content %} {{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}\n<tool_call>\n\
{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}\n\
</tool_call>{% endfor %}<end>\n{% endif %}{% endfor %}\
{% if add_generation_prompt %}{% if reasoning_effort is defined %}Effort {{ reasoning_effort }}. {% endif %}assistant:\
{% if enable_thinking or reasoning_effort == 'max' %}<think>\n{% endif %}{% endif %}";

fn weather() -> Json {
    let parameters = forecast();
    json!({"type": "function", "function": {"name": "weather", "description": "The forecast.", "parameters": parameters}})
}

fn clock() -> Json {
    json!({"type": "function", "function": {"name": "clock"}})
}

fn user(text: &str) -> Json {
    json!({"role": "user", "content": text})
}

/// That a chat's prompt is this text.
fn is_told(daemon: &Daemon, ask: &Json, text: &str) {
    let mut ask = ask.clone();
    ask["max_tokens"] = 1.into();
    let answer = daemon.post(CHAT, &ask);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let tokens = daemon.post("/tokenize", &json!({"content": text, "parse_special": true})).json();
    assert_eq!(answer.json()["usage"]["prompt_tokens"], tokens["count"], "{text}");
}

fn chunks(stream: &Answer) -> Vec<Json> {
    assert_eq!(stream.status, 200, "{}", stream.text());
    stream.events().iter().filter_map(|event| serde_json::from_str(event).ok()).collect()
}

#[test]
fn functions_and_their_calls_go_through_the_template_and_answers_come_in_its_format() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path(), TEMPLATE);
    let mut ask = json!({"messages": [user("Rain?")], "tools": [weather(), clock()], "temperature": 0});
    is_told(&daemon, &ask, "Tweather:[\"place\", \"days\"]\nTclock:[]\nuser: Rain?<end>\nassistant:");
    // A call that is required is one in the template's format, with arguments of the schema, whole and streamed.
    ask["tool_choice"] = json!({"type": "function", "function": {"name": "weather"}});
    ask["max_tokens"] = 200.into();
    ask["parallel_tool_calls"] = false.into();
    let whole = daemon.post(CHAT, &ask);
    assert_eq!(whole.status, 200, "{}", whole.text());
    let choice = whole.json()["choices"][0].clone();
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &Json::Null),
        "{choice}"
    );
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let arguments: Json = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(calls.len() == 1 && (1..=9).contains(&arguments["days"].as_i64().unwrap()), "{choice}");
    ask["stream"] = true.into();
    let chunks = chunks(&daemon.post(CHAT, &ask));
    let pieces: Vec<&Json> =
        chunks.iter().flat_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array()).flatten().collect();
    assert_eq!((&pieces[0]["function"]["name"], &pieces[0]["index"]), (&json!("weather"), &json!(0)));
    let streamed: String = pieces.iter().map(|piece| piece["function"]["arguments"].as_str().unwrap()).collect();
    assert_eq!((Some(streamed.as_str()), pieces.len() > 3), (calls[0]["function"]["arguments"].as_str(), true));
    // What was called and what it returned are rendered as the template has them, with the arguments as they were written.
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let both =
        [call("1", "weather", "{\"place\":\"Rome\",\"days\": 123456789012345678901234567890}"), call("2", "clock", "")];
    let result = |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
    let history = json!([user("Rain?"), {"role": "assistant", "content": "Well.", "tool_calls": both}, result("1", "sun"), result("2", "noon")]);
    is_told(
        &daemon,
        &json!({"messages": history}),
        "user: Rain?<end>\nassistant: Well.<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\":\"Rome\",\"days\": \
         123456789012345678901234567890}}\n</tool_call><tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call><end>\n\
         <tool_response>sun</tool_response>\n<tool_response>noon</tool_response>\nassistant:",
    );
    // The newer API has the same calls.
    let flat = json!({"type": "function", "name": "weather", "parameters": weather()["function"]["parameters"]});
    let ask = json!({"input": "Rain?", "tools": [flat], "tool_choice": "required", "parallel_tool_calls": false,
        "temperature": 0, "max_output_tokens": 200});
    let output = daemon.post(RESPONSES, &ask).json()["output"].clone();
    assert_eq!((&output[0]["type"], &output[0]["name"]), (&json!("function_call"), &json!("weather")), "{output}");
    // Where nothing may be called, the template is told of nothing.
    let none = json!({"messages": [user("Rain?")], "tools": [weather()], "tool_choice": "none"});
    is_told(&daemon, &none, "user: Rain?<end>\nassistant:");
}

/// As Qwen3.5 has it, in short: each argument stands between marks.
const BETWEEN_MARKS: &str = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}\
{% for call in m.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n\
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n\
{% endfor %}</function>\n</tool_call>{% if not loop.last %}\n{% endif %}{% endfor %}<end>\n{% endfor %}\
{% if add_generation_prompt %}assistant:{% endif %}";

/// A function whose arguments stand behind a reference was called without any, and nobody was told what its call is not kept to.
#[test]
fn arguments_between_marks_are_all_there_and_what_is_not_held_of_them_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path(), BETWEEN_MARKS);
    let ask = |more: Json, strict: bool| {
        let mut schema = json!({"$ref": "#/$defs/a", "$defs": {"a": forecast()}});
        schema["$defs"]["a"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let function = json!({"name": "weather", "parameters": schema, "strict": strict});
        let tools = json!([{"type": "function", "function": function}]);
        daemon.post(
            CHAT,
            &json!({"messages": [user("Rain?")], "tools": tools, "tool_choice": "required",
            "parallel_tool_calls": false, "temperature": 0, "max_tokens": 200}),
        )
    };
    for (more, left_out) in
        [(json!({}), ""), (json!({"anyOf": [{"required": ["place"]}]}), "/tools/0/function/parameters/$defs/a/anyOf")]
    {
        let answer = ask(more.clone(), false);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let call = &answer.json()["choices"][0]["message"]["tool_calls"][0]["function"];
        let arguments: Json = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!(["Rome", "Oslo"].contains(&arguments["place"].as_str().unwrap()), "{arguments}");
        assert!((1..=9).contains(&arguments["days"].as_i64().unwrap()), "{arguments}");
        let told = answer.headers.lines().find_map(|line| line.strip_prefix("x-dynamicinfer-unenforced: "));
        // Headers are kept in small letters here.
        assert_eq!(told.unwrap_or_default(), left_out.to_ascii_lowercase());
        let answer = ask(more, true);
        assert_eq!(answer.status, if left_out.is_empty() { 200 } else { 400 }, "{}", answer.text());
        assert!(answer.text().contains(left_out));
    }
}

#[test]
fn thoughts_come_apart_from_the_answer_and_the_template_is_told_how_much_to_think() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path(), TEMPLATE);
    let ask = |more: Json| {
        let mut ask = json!({"messages": [user("Hi")], "temperature": 0, "max_tokens": 12, "ignore_eos": true});
        ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ask
    };
    let plain = "user: Hi<end>\nassistant:";
    for (more, prompt) in [
        (json!({}), plain.to_owned()),
        (json!({"enable_thinking": true}), format!("{plain}<think>\n")),
        (json!({"chat_template_kwargs": {"enable_thinking": true}}), format!("{plain}<think>\n")),
        (json!({"enable_thinking": false}), plain.to_owned()),
        (json!({"reasoning_effort": "none"}), plain.to_owned()),
        (json!({"reasoning_effort": "high"}), "user: Hi<end>\nEffort high. assistant:".to_owned()),
    ] {
        is_told(&daemon, &ask(more), &prompt);
    }
    let message = |more: Json| daemon.post(CHAT, &ask(more)).json()["choices"][0]["message"].clone();
    let without = message(json!({}));
    assert!(without["reasoning_content"].is_null() && !without["content"].as_str().unwrap().is_empty(), "{without}");
    // This model never comes to an end with its thoughts.
    let thinks = json!({"enable_thinking": true});
    let thought = message(thinks.clone());
    assert!(!thought["reasoning_content"].as_str().unwrap().is_empty() && thought["content"] == "", "{thought}");
    let mut streamed = ask(thinks);
    streamed["stream"] = true.into();
    let chunks = chunks(&daemon.post(CHAT, &streamed));
    let pieces = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["reasoning_content"].as_str());
    assert_eq!(pieces.collect::<String>(), thought["reasoning_content"].as_str().unwrap());
    assert!(chunks.iter().all(|chunk| chunk["choices"][0]["delta"]["content"].as_str().is_none_or(str::is_empty)));
    // In the newer API thoughts are an item of their own, before any other, and are taken back.
    let mut ask = json!({"input": "Hi", "reasoning": {"effort": "max", "summary": "auto"}, "temperature": 0, "max_output_tokens": 12});
    let whole = daemon.post(RESPONSES, &ask).json();
    let item = &whole["output"][0];
    assert_eq!(
        (&item["type"], &item["content"][0]["type"]),
        (&json!("reasoning"), &json!("reasoning_text")),
        "{whole}"
    );
    let counted = whole["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!((1..=12).contains(&counted), "{whole}");
    ask["stream"] = true.into();
    let stream = daemon.post(RESPONSES, &ask).text();
    let mut kinds: Vec<&str> = stream.lines().filter_map(|line| line.strip_prefix("event: response.")).collect();
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "incomplete",
        ]
    );
    let next = json!({"input": [{"role": "user", "content": "Hi"}, item, {"role": "assistant", "content": "Ho"}], "max_output_tokens": 1});
    assert_eq!(daemon.post(RESPONSES, &next).status, 200);
}

/// Thoughts are no content any more, so `chat` would have shown nothing for as long as a model thinks.
#[test]
fn a_talk_shows_thoughts_here_and_from_a_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path(), &TEMPLATE.replace("{% if enable_thinking or", "{% if true or"));
    let chat = json!({"messages": [user("Hi")], "temperature": 0, "max_tokens": 12});
    let thought = daemon.post(CHAT, &chat).json()["choices"][0]["message"]["reasoning_content"].clone();
    let model = dir.path().join("model");
    for args in [&["chat"][..], &["chat", model.to_str().unwrap(), "--here"]] {
        let mut talk = command(dir.path(), &[args, &["--temp", "0", "-n", "12"]].concat());
        let mut talk = talk.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        talk.stdin.take().unwrap().write_all(b"Hi\n").unwrap();
        let said = talk.wait_with_output().unwrap();
        let letters = |text: &str| text.chars().filter(|c| c.is_ascii_alphanumeric()).collect::<String>();
        let shown = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(!letters(&shown).is_empty(), "{said:?}");
        assert_eq!(letters(&shown), letters(thought.as_str().unwrap()), "{said:?}");
    }
}
