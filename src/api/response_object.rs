//! The objects of POST /v1/responses: whole answers, and the events of a stream.

use crate::generation::{Done, Reason};
use serde_json::{Map, Value, json};

/// What all objects of one answer have in common.
#[derive(Clone, Debug)]
pub struct Response {
    /// `resp_...`
    pub id: String,
    /// When the request was accepted, in seconds since 1970.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// What is repeated of the request, by the names of its fields.
    pub echo: Value,
}

/// The response object: `text` is null until there is one, `done` until it is complete.
fn object(of: &Response, status: &str, output: Vec<Value>, done: Option<&Done>) -> Value {
    let cut = done.is_some_and(|done| done.reason == Reason::Length);
    let usage = done.map(|done| {
        json!({
            "input_tokens": done.prompt_tokens,
            "input_tokens_details": {"cached_tokens": done.cached_tokens},
            "output_tokens": done.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": done.prompt_tokens + done.generated_tokens,
        })
    });
    json!({
        "id": of.id,
        "object": "response",
        "created_at": of.created,
        "status": status,
        "error": null,
        "incomplete_details": if cut { json!({"reason": "max_output_tokens"}) } else { Value::Null },
        "instructions": of.echo["instructions"],
        "max_output_tokens": of.echo["max_output_tokens"],
        "model": of.model,
        "output": output,
        "parallel_tool_calls": false,
        "previous_response_id": null,
        "store": false,
        "temperature": of.echo["temperature"],
        "tool_choice": "none",
        "tools": [],
        "top_p": of.echo["top_p"],
        "truncation": "disabled",
        "usage": usage,
        "metadata": {},
    })
}

/// How a response ended.
fn status(done: &Done) -> &'static str {
    match done.reason {
        Reason::Stop => "completed",
        Reason::Length => "incomplete",
    }
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": []})
}

fn message(of: &Response, status: &str, content: Vec<Value>) -> Value {
    json!({"type": "message", "id": message_id(of), "status": status, "role": "assistant", "content": content})
}

fn message_id(of: &Response) -> String {
    of.id.replacen("resp", "msg", 1)
}

/// A whole of.
pub fn whole(of: &Response, text: &str, done: &Done) -> Value {
    object(of, status(done), vec![message(of, status(done), vec![part(text)])], Some(done))
}

/// The events of a streamed answer, each with its number.
#[derive(Debug, Default)]
pub struct ResponseEvents(u64);

impl ResponseEvents {
    fn event(&mut self, kind: &str, fields: Value) -> Value {
        let mut event = Map::new();
        event.insert("type".into(), format!("response.{kind}").into());
        event.insert("sequence_number".into(), self.0.into());
        self.0 += 1;
        event.extend(fields.as_object().cloned().unwrap_or_default());
        event.into()
    }

    /// Of the only content of the only message.
    fn of_part(&mut self, of: &Response, kind: &str, name: &str, value: Value) -> Value {
        let mut fields = json!({"item_id": message_id(of), "output_index": 0, "content_index": 0});
        fields[name] = value;
        if kind.starts_with("output_text") {
            fields["logprobs"] = json!([]);
        }
        self.event(kind, fields)
    }

    /// The events before the first piece.
    pub fn begin(&mut self, of: &Response) -> Vec<Value> {
        let response = object(of, "in_progress", Vec::new(), None);
        let item = message(of, "in_progress", Vec::new());
        vec![
            self.event("created", json!({"response": response})),
            self.event("in_progress", json!({"response": response})),
            self.event("output_item.added", json!({"output_index": 0, "item": item})),
            self.of_part(of, "content_part.added", "part", part("")),
        ]
    }

    /// A piece of the text.
    pub fn delta(&mut self, of: &Response, text: &str) -> Value {
        self.of_part(of, "output_text.delta", "delta", text.into())
    }

    /// The events after the last piece; `text` is the whole text.
    pub fn end(&mut self, of: &Response, text: &str, done: &Done) -> Vec<Value> {
        let item = message(of, status(done), vec![part(text)]);
        vec![
            self.of_part(of, "output_text.done", "text", text.into()),
            self.of_part(of, "content_part.done", "part", part(text)),
            self.event("output_item.done", json!({"output_index": 0, "item": item})),
            self.event(status(done), json!({"response": whole(of, text, done)})),
        ]
    }
}
