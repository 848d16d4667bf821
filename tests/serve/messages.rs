//! Messages that clients send back as they got them, and what they tell the model's chat template.

use crate::daemon::{Daemon, changed_demo};
use serde_json::{Value as Json, json};
use std::path::Path;

const CHAT: &str = "/v1/chat/completions";

/// Each message with what it thought, and in front two variables.
const TEMPLATE: &str = "{% if enable_thinking is defined and not enable_thinking %}No thoughts. {% endif %}{{ style }}\
    {% for message in messages %}{% if message.reasoning_content %}({{ message.reasoning_content }}) {% endif %}\
    {{ message.content }}. {% endfor %}";

/// The demo model with a chat template, which it has not.
fn daemon(dir: &Path) -> Daemon {
    let model = changed_demo(dir, "tokenizer_config.json", |config| config["chat_template"] = TEMPLATE.into());
    let mut daemon = Daemon::spawn(dir, &["serve", model.to_str().unwrap()], &[]);
    daemon.wait_for("is ready");
    daemon
}

/// That a chat is answered as this text is continued.
fn is_told(daemon: &Daemon, mut ask: Json, text: &str) {
    ask["temperature"] = 0.into();
    ask["max_tokens"] = 6.into();
    let answer = daemon.post(CHAT, &ask);
    assert_eq!(answer.status, 200, "{ask}: {}", answer.text());
    let answer = answer.json();
    let plain = daemon.post("/v1/completions", &json!({"prompt": text, "temperature": 0, "max_tokens": 6})).json();
    let told = &answer["usage"]["prompt_tokens"];
    assert_eq!(
        (told, &answer["choices"][0]["message"]["content"]),
        (&plain["usage"]["prompt_tokens"], &plain["choices"][0]["text"]),
        "{ask}"
    );
}

/// A client that appends an answer to its messages sends all of its fields back, most of them null, and was refused.
#[test]
fn an_answer_is_taken_back_with_all_that_clients_libraries_put_into_it() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path());
    // What `model_dump()` of openai-python gives for an answer.
    let dumped = json!({
        "content": "Hello", "refusal": null, "role": "assistant", "annotations": null, "audio": null,
        "function_call": null, "tool_calls": null, "parsed": null});
    let with = |field: &str, value: Json| {
        let mut message = dumped.clone();
        message[field] = value;
        json!({"messages": [{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "And then"}]})
    };
    is_told(&daemon, with("role", "assistant".into()), "Hi. Hello. And then. ");
    is_told(&daemon, with("annotations", json!([])), "Hi. Hello. And then. ");
    let cited = json!([{"type": "url_citation", "url_citation": {"url": "https://example.org", "start_index": 0}}]);
    is_told(&daemon, with("annotations", cited), "Hi. Hello. And then. ");
    is_told(&daemon, with("parsed", json!({"hello": true})), "Hi. Hello. And then. ");
    // Thoughts go to the template, which says what becomes of them, and are no control tokens there.
    is_told(&daemon, with("reasoning_content", Json::Null), "Hi. Hello. And then. ");
    is_told(&daemon, with("reasoning_content", "A greeting".into()), "Hi. (A greeting) Hello. And then. ");
    is_told(&daemon, with("reasoning", "A greeting".into()), "Hi. (A greeting) Hello. And then. ");
    // A refusal is what was said.
    let refused = json!({"role": "assistant", "content": null, "refusal": "I will not"});
    let ask = json!({"messages": [refused, {"role": "user", "content": "Why"}]});
    is_told(&daemon, ask, "I will not. Why. ");
    let parts = json!([{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "will not"}]);
    is_told(&daemon, json!({"messages": [{"role": "assistant", "content": parts}]}), "I will not. ");
    // What would have to be heard or called, and what is unknown, is refused by its name.
    for (field, value, param) in [
        ("audio", json!({"id": "audio_1"}), "messages.1.audio"),
        ("function_call", json!({"name": "f", "arguments": "{}"}), "messages.1.function_call"),
        ("mood", json!("good"), "messages[1].mood"),
        ("reasoning_content", json!(5), "messages[1].reasoning_content"),
        ("refusal", json!(["no"]), "messages[1].refusal"),
    ] {
        let answer = daemon.post(CHAT, &with(field, value));
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(param)), "{}", answer.text());
    }
    let thinks = json!({"messages": [{"role": "user", "content": "Hi", "reasoning_content": "x"}]});
    assert_eq!(daemon.post(CHAT, &thinks).json()["error"]["param"], "messages.0.reasoning_content");
    let silent = json!({"messages": [{"role": "assistant", "content": null}]});
    assert_eq!(daemon.post(CHAT, &silent).json()["error"]["param"], "messages.0.content");
}

#[test]
fn a_template_sees_the_variables_that_a_request_gives_it() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path());
    let ask =
        |variables: Json| json!({"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": variables});
    is_told(&daemon, ask(Json::Null), "Hi. ");
    is_told(&daemon, ask(json!({})), "Hi. ");
    is_told(&daemon, ask(json!({"enable_thinking": true, "other": [1, {"x": null}]})), "Hi. ");
    is_told(&daemon, ask(json!({"enable_thinking": false})), "No thoughts. Hi. ");
    is_told(&daemon, ask(json!({"style": "Sing! "})), "Sing! Hi. ");
    // The text of a control token is text, as in messages.
    let tokens =
        |style: &str| daemon.post(CHAT, &ask(json!({"style": style}))).json()["usage"]["prompt_tokens"].clone();
    assert!(tokens("</s>").as_u64().unwrap() > tokens("a").as_u64().unwrap());
    for (variables, param) in [
        (json!("x"), "chat_template_kwargs"),
        (json!([]), "chat_template_kwargs"),
        (json!({"messages": []}), "chat_template_kwargs.messages"),
        (json!({"tools": []}), "chat_template_kwargs.tools"),
        (json!({"bos_token": "x"}), "chat_template_kwargs.bos_token"),
    ] {
        let answer = daemon.post(CHAT, &ask(variables));
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(param)), "{}", answer.text());
    }
    // A model without a template has no variables, and nothing changes by them.
    let plain = Daemon::start(&[]);
    let tokens = |variables: Json| plain.post(CHAT, &ask(variables)).json()["usage"]["prompt_tokens"].clone();
    assert_eq!(tokens(json!({"enable_thinking": false, "style": "x"})), tokens(Json::Null));
}

/// The openai package gives back all fields that a type has; most agents and proxies add hints that change no answer.
#[test]
fn fields_that_change_no_answer_are_taken_and_others_are_refused_by_name() {
    let daemon = Daemon::start(&[]);
    let ask = json!({
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "Hello", "refusal": null, "annotations": [], "audio": null, "name": null,
             "function_call": null, "tool_calls": null, "provider_specific_fields": {"a": 1}, "thinking_blocks": null},
            {"role": "user", "content": "And", "tool_calls": [], "reasoning_content": "", "cache_control": null}],
        "max_tokens": 4, "temperature": 0});
    let alone = daemon.post(CHAT, &ask);
    assert_eq!(alone.status, 200, "{}", alone.text());
    let text = alone.json()["choices"][0]["message"]["content"].clone();
    for (field, value) in [
        ("metadata", json!({"run": "1"})),
        ("client_metadata", json!({"x": 1})),
        ("user", json!("me")),
        ("store", json!(true)),
        ("service_tier", json!("auto")),
        ("verbosity", json!("low")),
        ("parallel_tool_calls", json!(true)),
        ("prompt_cache_key", json!("k")),
        ("prompt_cache_retention", json!("24h")),
        ("cache_control", json!({"type": "ephemeral"})),
        ("safety_identifier", json!("s")),
        ("modalities", json!(["text"])),
        ("audio", Json::Null),
        ("prediction", Json::Null),
        ("functions", json!([])),
        ("function_call", json!("")),
        ("web_search_options", json!({})),
        ("tools", json!([])),
        ("tool_choice", Json::Null),
        ("stop", Json::Null),
        ("logit_bias", json!({})),
        ("response_format", Json::Null),
    ] {
        let mut with = ask.clone();
        with[field] = value;
        let answer = daemon.post(CHAT, &with);
        assert_eq!(answer.status, 200, "{field}: {}", answer.text());
        assert_eq!(answer.json()["choices"][0]["message"]["content"], text, "{field}");
    }
    for (field, value) in [
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "x", "format": "wav"})),
        ("prediction", json!({"type": "content", "content": "x"})),
        ("functions", json!([{"name": "f"}])),
        ("function_call", json!("auto")),
        ("web_search_options", json!({"search_context_size": "low"})),
        ("mood", json!("good")),
    ] {
        let mut with = ask.clone();
        with[field] = value;
        let answer = daemon.post(CHAT, &with);
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)), "{}", answer.text());
    }
}

#[test]
fn unknown_fields_are_ignored_where_the_setting_says_so_and_logged_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo"], &[("DYNAMICINFER_SERVE_UNKNOWN_FIELDS", "ignore")]);
    daemon.wait_for("is ready");
    let plain = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0});
    let text = |ask: &Json| {
        let answer = daemon.post(CHAT, ask);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["choices"][0]["message"]["content"].clone()
    };
    let wanted = text(&plain);
    let mut odd = plain.clone();
    odd["mood"] = json!({"good": [1, 2, {"x": null}]});
    odd["messages"][0]["colour"] = "red".into();
    assert_eq!((text(&odd), text(&odd)), (wanted.clone(), wanted));
    // One within a tool, too; what is known is checked as ever.
    let mut tools = plain.clone();
    tools["tools"] = json!([{"type": "function", "function": {"name": "f", "colour": "red"}, "shape": 1}]);
    text(&tools);
    let mut bad = plain;
    bad["temperature"] = (-1).into();
    assert_eq!(daemon.post(CHAT, &bad).json()["error"]["param"], "temperature");
    let embedded = daemon.post("/v1/embeddings", &json!({"input": "x", "mood": 1}));
    assert_eq!(embedded.status, 200, "{}", embedded.text());
    // Each client of the socket is its process: this one.
    let mut logged = Vec::new();
    while !logged.iter().any(|line: &String| line.contains("/v1/embeddings")) {
        logged.push(daemon.next_line().unwrap());
    }
    let ignored: Vec<&String> = logged.iter().filter(|line| line.contains("an unknown field is ignored")).collect();
    for field in ["\"mood\"", "\"messages[0].colour\"", "\"tools[0].shape\"", "\"tools[0].function.colour\""] {
        assert_eq!(ignored.iter().filter(|line| line.contains(field)).count(), 1, "{field}: {logged:?}");
    }
}
