//! The objects of POST /v1/responses: whole answers, and the events of a stream.

use super::reading::Part;
use super::tools::CUSTOM_INPUT;
use super::writing::{self, Response, WritesParts};
use crate::generation::{Done, Reason};
use crate::tokenizer::Special;
use serde_json::{Map, Value, json};

impl Response {
    /// The id of output item number `index`; `kind` is its beginning.
    fn item_id(&self, kind: &str, index: usize) -> String {
        format!("{kind}_{}_{index}", self.number())
    }

    /// Tokens of the thoughts in an output.
    fn reasoning_tokens(&self, output: &[Value]) -> usize {
        let thoughts = output.iter().filter(|item| item["type"] == "reasoning");
        let texts = thoughts.filter_map(|item| item["content"][0]["text"].as_str());
        texts.map(|text| self.model.tokenizer.encode(text, Special::AsText).map_or(0, |tokens| tokens.len())).sum()
    }
}

/// The response object; `done` is `None` until it is complete.
fn object(of: &Response, status: &str, output: &[Value], done: Option<&Done>) -> Value {
    let cut = done.is_some_and(|done| done.reason == Reason::Length);
    let usage = done.map(|done| {
        json!({
            "input_tokens": done.prompt_tokens,
            "input_tokens_details": {"cached_tokens": done.cached_tokens},
            "output_tokens": done.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": of.reasoning_tokens(output).min(done.generated_tokens)},
            "total_tokens": done.prompt_tokens + done.generated_tokens,
        })
    });
    let mut object = json!({
        "id": of.id,
        "object": "response",
        "created_at": of.created,
        "status": status,
        "error": null,
        "incomplete_details": if cut { json!({"reason": "max_output_tokens"}) } else { Value::Null },
        "instructions": null,
        "max_output_tokens": null,
        "model": of.model.name,
        "output": output,
        "parallel_tool_calls": false,
        "previous_response_id": null,
        "store": false,
        "temperature": null,
        "tool_choice": "none",
        "tools": [],
        "top_p": null,
        "truncation": "disabled",
        "usage": usage,
        "metadata": {},
    });
    for (field, value) in of.echo.as_object().into_iter().flatten() {
        object[field] = value.clone();
    }
    object
}

/// How a response ended.
fn status(done: &Done) -> &'static str {
    match done.reason {
        Reason::Stop => "completed",
        Reason::Length => "incomplete",
    }
}

/// An item of the output that is being written.
#[derive(Clone, Debug)]
struct Item {
    kind: Kind,
    /// Its text or arguments so far.
    text: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Reasoning,
    Message,
    /// A call of this function.
    Call(String),
    /// A call of this custom tool.
    Custom(String),
}

impl Kind {
    /// A call of what the request has under this name.
    fn call(of: &Response, name: &str) -> Kind {
        let mut tools = of.echo["tools"].as_array().into_iter().flatten();
        match tools.any(|tool| tool["type"] == "custom" && tool["name"] == name) {
            true => Kind::Custom(name.to_owned()),
            false => Kind::Call(name.to_owned()),
        }
    }
}

impl Item {
    fn id(&self, of: &Response, index: usize) -> String {
        let kind = match self.kind {
            Kind::Reasoning => "rs",
            Kind::Message => "msg",
            Kind::Call(_) => "fc",
            Kind::Custom(_) => "ctc",
        };
        of.item_id(kind, index)
    }

    /// The input of a custom tool, of which `text` are the arguments; what there is of it, where the answer was cut.
    fn input(&self) -> String {
        let closed = [&self.text, &format!("{}\"}}", self.text)].into_iter().find_map(|text| writing::object(text));
        closed.and_then(|arguments| arguments[CUSTOM_INPUT].as_str().map(str::to_owned)).unwrap_or_default()
    }

    /// Its content, where it has some.
    fn part(&self, text: &str) -> Value {
        match self.kind {
            Kind::Message => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
            _ => json!({"type": "reasoning_text", "text": text}),
        }
    }

    /// The item as it is in `status`; at its beginning it has no content.
    fn json(&self, of: &Response, index: usize, status: &str, begins: bool) -> Value {
        let id = self.id(of, index);
        let content = if begins { Vec::new() } else { vec![self.part(&self.text)] };
        match &self.kind {
            Kind::Message => {
                json!({"type": "message", "id": id, "status": status, "role": "assistant", "content": content})
            }
            Kind::Reasoning => {
                json!({"type": "reasoning", "id": id, "status": status, "summary": [], "content": content})
            }
            Kind::Call(name) => json!({
                "type": "function_call", "id": id, "call_id": of.item_id("call", index), "name": name,
                "arguments": self.text, "status": status,
            }),
            Kind::Custom(name) => json!({
                "type": "custom_tool_call", "id": id, "call_id": of.item_id("call", index), "name": name,
                "input": if begins { String::new() } else { self.input() }, "status": status,
            }),
        }
    }
}

/// The events of a streamed answer, each with its number.
#[derive(Debug, Default)]
pub struct ResponseEvents {
    number: u64,
    /// Complete items.
    output: Vec<Value>,
    item: Option<Item>,
}

impl ResponseEvents {
    fn event(&mut self, kind: &str, fields: Value) -> Value {
        let mut event = Map::new();
        event.insert("type".into(), format!("response.{kind}").into());
        event.insert("sequence_number".into(), self.number.into());
        self.number += 1;
        event.extend(fields.as_object().cloned().unwrap_or_default());
        event.into()
    }

    /// One about the item that is being written; `content`: about its only content.
    fn of_item(&mut self, of: &Response, kind: &str, content: bool, more: Value) -> Value {
        let index = self.output.len();
        let id = self.item.as_ref().map_or(String::new(), |item| item.id(of, index));
        let mut fields = json!({"item_id": id, "output_index": index});
        if content {
            fields["content_index"] = 0.into();
        }
        if kind.starts_with("output_text") {
            fields["logprobs"] = json!([]);
        }
        for (name, value) in more.as_object().into_iter().flatten() {
            fields[name] = value.clone();
        }
        self.event(kind, fields)
    }

    /// Begins an item.
    fn open(&mut self, of: &Response, kind: Kind) -> Vec<Value> {
        let (item, index) = (Item { kind, text: String::new() }, self.output.len());
        let (begun, part) = (item.json(of, index, "in_progress", true), item.part(""));
        let has_content = !matches!(item.kind, Kind::Call(_) | Kind::Custom(_));
        self.item = Some(item);
        let mut events = vec![self.event("output_item.added", json!({"output_index": index, "item": begun}))];
        if has_content {
            events.push(self.of_item(of, "content_part.added", true, json!({"part": part})));
        }
        events
    }

    /// Ends the item that is being written.
    fn close(&mut self, of: &Response, status: &str) -> Vec<Value> {
        let Some(item) = self.item.clone() else { return Vec::new() };
        let (index, text) = (self.output.len(), item.text.clone());
        let mut events = match &item.kind {
            Kind::Call(name) => {
                let whole = json!({"name": name, "arguments": text});
                vec![self.of_item(of, "function_call_arguments.done", false, whole)]
            }
            // Its arguments are JSON, of which its input is a text.
            Kind::Custom(_) => {
                let input = item.input();
                vec![
                    self.of_item(of, "custom_tool_call_input.delta", false, json!({"delta": input})),
                    self.of_item(of, "custom_tool_call_input.done", false, json!({"input": input})),
                ]
            }
            kind => {
                let name = if *kind == Kind::Message { "output_text.done" } else { "reasoning_text.done" };
                vec![
                    self.of_item(of, name, true, json!({"text": text})),
                    self.of_item(of, "content_part.done", true, json!({"part": item.part(&text)})),
                ]
            }
        };
        let whole = item.json(of, index, status, false);
        events.push(self.event("output_item.done", json!({"output_index": index, "item": whole})));
        self.output.push(whole);
        self.item = None;
        events
    }
}

impl WritesParts for ResponseEvents {
    fn begin(&mut self, of: &Response) -> Vec<Value> {
        let response = object(of, "in_progress", &[], None);
        vec![
            self.event("created", json!({"response": response})),
            self.event("in_progress", json!({"response": response})),
        ]
    }

    fn part(&mut self, of: &Response, part: &Part) -> Vec<Value> {
        let kind = match part {
            Part::Thought(_) => Some(Kind::Reasoning),
            Part::Text(_) => Some(Kind::Message),
            Part::Call(name) => Some(Kind::call(of, name)),
            Part::Arguments(_) => None,
        };
        let mut events = Vec::new();
        let goes_on =
            |item: &Item| matches!(part, Part::Thought(_) | Part::Text(_)) && Some(&item.kind) == kind.as_ref();
        if let Some(kind) = kind.as_ref().filter(|_| !self.item.as_ref().is_some_and(goes_on)) {
            events.extend(self.close(of, "completed"));
            events.extend(self.open(of, kind.clone()));
        }
        let (name, text) = match part {
            Part::Thought(text) => ("reasoning_text.delta", text),
            Part::Text(text) => ("output_text.delta", text),
            Part::Arguments(text) => ("function_call_arguments.delta", text),
            Part::Call(_) => return events,
        };
        if let Some(item) = &mut self.item {
            item.text.push_str(text);
            if matches!(item.kind, Kind::Custom(_)) {
                return events;
            }
        }
        events.push(self.of_item(of, name, !matches!(part, Part::Arguments(_)), json!({"delta": text})));
        events
    }

    fn end(&mut self, of: &Response, done: &Done) -> Vec<Value> {
        let mut events = Vec::new();
        // An answer has a message, even an empty one, unless it calls.
        if self.item.is_none() && self.output.is_empty() {
            events.extend(self.open(of, Kind::Message));
        }
        events.extend(self.close(of, status(done)));
        let response = object(of, status(done), &self.output, Some(done));
        if let Some(keep) = &of.keep {
            keep.put(&response);
        }
        events.push(self.event(status(done), json!({"response": response})));
        events
    }

    fn whole(&mut self, of: &Response, parts: &[Part], done: &Done) -> Value {
        parts.iter().for_each(|part| drop(self.part(of, part)));
        self.end(of, done).pop().map_or(Value::Null, |mut last| last["response"].take())
    }
}
