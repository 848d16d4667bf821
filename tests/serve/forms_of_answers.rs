//! One answer with thoughts, text and two calls, as a model writes it, in the forms of Anthropic's and ollama's APIs.

use dynamicinfer::api::call_format::{Body, CallFormat};
use dynamicinfer::api::json_scan::Keys;
use dynamicinfer::api::reading::{Callable, Reading, Thoughts};
use dynamicinfer::api::stream::ChoiceStream;
use dynamicinfer::api::{Answer, Collector, ServedModel, Wire};
use dynamicinfer::generation::{Delta, Done, Event, Reason};
use dynamicinfer::tokenizer::{Tokenizer, from_hf_dir};
use serde_json::{Value as Json, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const SAID: &str = "<think>\nHm.\n</think>\nWell.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"days\": 2}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>";

fn answer(wire: Wire, echo: Json) -> Answer {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    let tokenizer = Arc::new(Tokenizer::new(from_hf_dir(&model).unwrap(), &model).unwrap());
    let keys = Keys { name: "name".into(), arguments: "arguments".into() };
    let format = CallFormat {
        open: "<tool_call>\n".into(),
        body: Body::Object(keys),
        join: Some("\n</tool_call>\n<tool_call>\n".into()),
        close: "\n</tool_call>".into(),
    };
    let callable = |name: &str| Callable { name: name.into(), arguments: json!({}) };
    let reading = Reading {
        calls: Some((format, vec![callable("weather"), callable("clock")])),
        thoughts: Some(Thoughts { open: "<think>".into(), close: "</think>".into() }),
        thinking: false,
    };
    let (vocab, context) = (3072, 512);
    Answer {
        wire,
        id: "msg_7".into(),
        created: 0,
        model: Arc::new(ServedModel::new("demo".into(), tokenizer, vocab, context, String::new())),
        reading: Arc::new(reading),
        usage: false,
        echo: Arc::new(echo),
        keep: None,
    }
}

fn done(reason: Reason, stopped_by: Option<usize>) -> Done {
    let time = Duration::from_nanos;
    Done {
        reason,
        stopped_by,
        prompt_tokens: 5,
        cached_tokens: 3,
        generated_tokens: 9,
        queued: time(1),
        prompt_time: time(20),
        generation_time: time(300),
    }
}

fn delta(text: &str) -> Delta {
    Delta { text: text.into(), ..Delta::default() }
}

/// The events of the answer if it comes in pieces of so many bytes.
fn events(answer: &Answer, said: &str, bytes: usize, done: &Done) -> Vec<Json> {
    let mut stream = ChoiceStream::new(answer, 0);
    let mut events = stream.begin();
    for piece in said.as_bytes().chunks(bytes) {
        events.extend(stream.delta(&delta(std::str::from_utf8(piece).unwrap())));
    }
    events.extend(stream.end(done));
    events
}

fn whole(answer: &Answer, said: &str, done: Done) -> Json {
    let mut collector = Collector::new(answer.clone(), 1, 1);
    collector.take(0, Event::Delta(delta(said))).unwrap();
    collector.take(0, Event::Done(done)).unwrap();
    collector.finish().unwrap()
}

#[test]
fn anthropics_events_are_in_its_order_however_the_answer_comes() {
    let answer = answer(Wire::Messages, json!({"input_tokens": 5, "stop_sequences": ["a", "b"]}));
    let end = done(Reason::Stop, None);
    let content = json!([
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "toolu_7_2", "name": "weather", "input": {"days": 2}},
        {"type": "tool_use", "id": "toolu_7_3", "name": "clock", "input": {}}]);
    let message = whole(&answer, SAID, end);
    assert_eq!((&message["content"], &message["stop_reason"]), (&content, &json!("tool_use")));
    for bytes in [1, 3, 1000] {
        let events = events(&answer, SAID, bytes, &end);
        let start = &events[0];
        assert_eq!((&start["type"], &start["message"]["content"]), (&json!("message_start"), &json!([])));
        assert_eq!(start["message"]["usage"], json!({"input_tokens": 5, "output_tokens": 0}));
        let mut at = 1;
        for (index, block) in content.as_array().unwrap().iter().enumerate() {
            let field = ["thinking", "text", "input"].into_iter().find(|field| block.get(field).is_some()).unwrap();
            let mut begun = block.clone();
            begun[field] = if field == "input" { json!({}) } else { json!("") };
            assert_eq!(events[at], json!({"type": "content_block_start", "index": index, "content_block": begun}));
            let mut pieces = String::new();
            at += 1;
            while events[at]["type"] == "content_block_delta" {
                let delta = &events[at]["delta"];
                let (kind, name) = match field {
                    "thinking" => ("thinking_delta", "thinking"),
                    "text" => ("text_delta", "text"),
                    _ => ("input_json_delta", "partial_json"),
                };
                assert_eq!((&events[at]["index"], &delta["type"]), (&json!(index), &json!(kind)));
                pieces += delta[name].as_str().unwrap();
                at += 1;
            }
            match &block[field] {
                Json::String(text) => assert_eq!(&pieces, text),
                input => assert_eq!(&serde_json::from_str::<Json>(&pieces).unwrap(), input),
            }
            assert_eq!(events[at], json!({"type": "content_block_stop", "index": index}));
            at += 1;
        }
        let usage = json!({"input_tokens": 5, "output_tokens": 9});
        let delta = json!({"stop_reason": "tool_use", "stop_sequence": null});
        assert_eq!(
            events[at..],
            [json!({"type": "message_delta", "delta": delta, "usage": usage}), json!({"type": "message_stop"})]
        );
    }
}

#[test]
fn an_answer_that_ends_within_a_call_does_not_call() {
    let cut = &SAID[..SAID.find("2}}").unwrap()];
    let message = whole(&answer(Wire::Messages, json!({})), cut, done(Reason::Length, None));
    let content = message["content"].as_array().unwrap();
    let kinds: Vec<&str> = content.iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!((kinds, &message["stop_reason"]), (vec!["thinking", "text"], &json!("max_tokens")));
    let echo = json!({"stop_sequences": ["a", "b"], "omits_thoughts": true});
    let message = whole(&answer(Wire::Messages, echo), cut, done(Reason::Stop, Some(1)));
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("stop_sequence"), &json!("b")));
    assert_eq!(message["content"], json!([{"type": "text", "text": "Well."}]));
    let line = whole(&answer(Wire::OllamaChat, Json::Null), cut, done(Reason::Length, None));
    assert_eq!(line["message"], json!({"role": "assistant", "content": "Well.", "thinking": "Hm."}));
}

#[test]
fn ollamas_lines_have_whole_calls_in_their_order() {
    let chat = answer(Wire::OllamaChat, Json::Null);
    let end = done(Reason::Stop, None);
    let call = |index: usize, name: &str, arguments: Json| json!({"id": format!("call_7_{index}"), "function": {"index": index, "name": name, "arguments": arguments}});
    let calls = json!([call(0, "weather", json!({"days": 2})), call(1, "clock", json!({}))]);
    let message = whole(&chat, SAID, end);
    assert_eq!(
        message["message"],
        json!({"role": "assistant", "content": "Well.", "thinking": "Hm.", "tool_calls": calls})
    );
    for bytes in [1, 3, 1000] {
        let lines = events(&chat, SAID, bytes, &end);
        let (mut thoughts, mut text, mut called) = (String::new(), String::new(), Vec::new());
        for line in &lines {
            let message = &line["message"];
            // Thoughts come first, then the text, then the calls.
            thoughts += message["thinking"].as_str().unwrap_or_default();
            assert!(message["thinking"].is_null() || text.is_empty(), "{line}");
            text += message["content"].as_str().unwrap();
            called.extend(message["tool_calls"].as_array().cloned().unwrap_or_default());
            assert!(called.is_empty() || message["content"] == "", "{line}");
        }
        assert_eq!((thoughts.as_str(), text.as_str(), json!(called)), ("Hm.", "Well.", calls.clone()));
        let (last, before) = lines.split_last().unwrap();
        assert!(before.iter().all(|line| line["done"] == false && line.get("done_reason").is_none()));
        let mut last = last.clone();
        last.as_object_mut().unwrap().remove("created_at").unwrap();
        assert_eq!(
            last,
            json!({
                "model": "demo", "done": true, "done_reason": "stop", "message": {"role": "assistant", "content": ""},
                "total_duration": 321, "load_duration": 1, "prompt_eval_count": 5, "prompt_eval_duration": 20,
                "eval_count": 9, "eval_duration": 300,
            })
        );
    }
    let generated = whole(&answer(Wire::OllamaGenerate, Json::Null), SAID, end);
    assert_eq!((&generated["response"], &generated["thinking"]), (&json!("Well."), &json!("Hm.")));
}
