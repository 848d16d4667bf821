//! Chats by the templates of models: what a template cannot do is done for it, and what it does wrong is not the client's fault.

use crate::daemon::Daemon;
use serde_json::{Value, json};
use std::path::Path;

const CHAT: &str = "/v1/chat/completions";

/// A daemon with a tiny model that has this chat template.
pub fn serve(dir: &Path, template: &str) -> Daemon {
    let model = dir.join("model");
    std::fs::create_dir(&model).unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/qwen2");
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture.join(file), model.join(file)).unwrap();
    }
    std::fs::write(model.join("chat_template.jinja"), template).unwrap();
    // Longer than the model was trained for, because its tokens are short.
    let mut daemon = Daemon::spawn(dir, &["serve", model.to_str().unwrap(), "--ctx-size", "2048"], &[]);
    daemon.wait_for("is ready");
    daemon
}

/// The tokens of the prompt that a chat's messages become, and the greedy answer.
fn prompt(daemon: &Daemon, messages: Value, more: Value) -> (u64, String) {
    let mut body = json!({"messages": messages, "max_tokens": 4, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = daemon.post(CHAT, &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned();
    (answer["usage"]["prompt_tokens"].as_u64().unwrap(), text)
}

/// `tools` put a system message before the conversation, and 22 published templates take none: every request with tools was 400.
#[test]
fn functions_can_be_called_where_the_template_takes_no_system_message() {
    let tools =
        json!({"tools": [{"type": "function", "function": {"name": "clock", "description": "Tells the time."}}]});
    for template in [
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
         {{ m.role }}: {{ m.content }}\n{% endfor %}",
        // It is not refused here, and yet the model would never see it.
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let daemon = serve(dir.path(), template);
        let user = json!([{"role": "user", "content": "x"}]);
        let (without, _) = prompt(&daemon, user.clone(), json!({}));
        let (with, _) = prompt(&daemon, user, tools.clone());
        assert!(with > without + 100, "{with} tokens with a function, {without} without");
        // The template decides whether it takes a system message of the client's.
        let system = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]);
        let answer = daemon.post(CHAT, &json!({"messages": system, "max_tokens": 1}));
        assert_eq!(answer.status, if template.contains("raise") { 400 } else { 200 }, "{}", answer.text());
    }
}

/// Parts were joined by nothing, whatever the template does with them: words ran together.
#[test]
fn text_parts_are_joined_as_the_template_joins_them() {
    for (template, between) in [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "\n"),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}\
             {% endfor %}{% endif %}{% endfor %}",
            "",
        ),
        (
            "{% for m in messages %}{{ m.content if m.content is string else m.content|map(attribute='text')|join(' ') }}{% endfor %}",
            " ",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let daemon = serve(dir.path(), template);
        let part = |text: &str| json!({"type": "text", "text": text});
        let parts = prompt(&daemon, json!([{"role": "user", "content": [part("one"), part("two")]}]), json!({}));
        let joined = format!("one{between}two");
        assert_eq!(parts, prompt(&daemon, json!([{"role": "user", "content": joined}]), json!({})), "{between:?}");
    }
}

/// A template that cannot be rendered was 400, with the path of its file for every client to read.
#[test]
fn a_broken_template_is_not_the_requests_fault_and_only_the_log_names_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = serve(dir.path(), "{{ nothing.here }}");
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
    let answer = daemon.post(CHAT, &body);
    assert_eq!(answer.status, 500, "{}", answer.text());
    assert_eq!(answer.json()["error"]["code"], "bad_chat_template");
    assert!(answer.text().contains("undefined value"), "{}", answer.text());
    // The packed model in the cache.
    assert!(!answer.text().contains("serve-cache"), "{}", answer.text());
    assert!(daemon.wait_for("the chat template cannot be rendered").contains("serve-cache"));
}

/// The system kills the largest process where memory runs out. Where that was the renderer, the client was told that its request is wrong.
#[test]
fn a_renderer_that_is_killed_is_for_a_while() {
    let dir = tempfile::tempdir().unwrap();
    // Longer than the processor time that it may take, in few instructions: what ran out of those first was not killed in time.
    let forever = "{% for i in range(9999) %}{% set _ = range(9999)|map('string')|sort|join %}{% endfor %}";
    let daemon = serve(dir.path(), &format!("{{% if messages[0].content == 'x' %}}{forever}{{% endif %}}z"));
    let chat =
        |text: &str| daemon.post(CHAT, &json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1}));
    let answer = std::thread::scope(|scope| {
        let asked = scope.spawn(|| chat("x"));
        // A renderer that waits for a request has used no time to speak of.
        while !daemon.kill_busy_child(15) && !asked.is_finished() {
            std::thread::yield_now();
        }
        asked.join().unwrap()
    });
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert!(answer.headers.contains("\nretry-after: "), "{}", answer.headers);
    assert!(answer.text().contains("killed by signal 9"), "{}", answer.text());
    assert_eq!(chat("y").status, 200);
}
