//! What published clients send, recorded once by `tools/clients/record.py`: chats, streams, calls and their results, forms.

use crate::native::TEMPLATE;
use crate::templates::serve;
use serde_json::{Value as Json, json};
use std::path::Path;

/// The recorded requests: client, version, path and body.
fn recorded() -> Vec<(String, String, Json)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/clients");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 10, "{files:?}");
    let mut found = Vec::new();
    for file in files {
        let file: Json = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let client = format!("{} {}", file["client"].as_str().unwrap(), file["version"].as_str().unwrap());
        for (i, request) in file["requests"].as_array().unwrap().iter().enumerate() {
            let path = request["path"].as_str().unwrap().to_owned();
            found.push((format!("{client}, request {i}"), path, request["body"].clone()));
        }
    }
    found
}

#[test]
fn every_request_of_published_clients_is_answered_in_its_form() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path(), TEMPLATE);
    for (who, path, mut body) in recorded() {
        let is_chat = path == "/v1/chat/completions";
        let limit = match is_chat {
            true if body.get("max_completion_tokens").is_some() => "max_completion_tokens",
            true => "max_tokens",
            false => "max_output_tokens",
        };
        body["model"] = "model".into();
        body[limit] = 24.into();
        let answer = daemon.post(&path, &body);
        assert_eq!(answer.status, 200, "{who}: {}", answer.text());
        if body["stream"] != true {
            let said = answer.json();
            let object = if is_chat { "chat.completion" } else { "response" };
            assert_eq!(said["object"], object, "{who}: {said}");
            assert!(!said[if is_chat { "choices" } else { "output" }].as_array().unwrap().is_empty(), "{who}: {said}");
            continue;
        }
        let text = answer.text();
        let events: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        let end = *events.last().unwrap_or_else(|| panic!("{who}: {text}"));
        let ends = end == "[DONE]" || end.contains("response.completed") || end.contains("response.incomplete");
        assert!(ends, "{who}: {end}");
        let objects: Vec<Json> = events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
        assert!(
            objects.len() > 2 && objects.iter().all(|event| event.get("error").is_none_or(|e| *e == json!(null))),
            "{who}: {events:?}"
        );
    }
}
