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
