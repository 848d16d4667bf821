//! The answers of POST /api/chat and /api/generate: whole, and as lines of a stream.

use super::reading::Part;
use super::writing::{Response, WritesParts, object};
use crate::clock::{Duration, rfc3339, unix_seconds};
use crate::generation::{Done, Reason};
use serde_json::{Value, json};

/// The lines of a streamed answer.
#[derive(Debug)]
pub struct AnswerLines {
    /// An answer to a conversation; else one to a prompt.
    chat: bool,
    /// A call as far as it has come: its function and its arguments.
    call: Option<(String, String)>,
    /// Calls that were written.
    calls: usize,
}

impl AnswerLines {
    /// An answer to a conversation (`chat`) or to a prompt.
    pub fn new(chat: bool) -> AnswerLines {
        AnswerLines { chat, call: None, calls: 0 }
    }

    /// A line with a piece of the answer: its text, and `more` of the message.
    fn line(&self, of: &Response, text: &str, more: Value) -> Value {
        let mut line = json!({"model": of.model.name, "created_at": rfc3339(unix_seconds()), "done": false});
        let place = match self.chat {
            true => {
                line["message"] = json!({"role": "assistant", "content": text});
                &mut line["message"]
            }
            false => {
                line["response"] = text.into();
                &mut line
            }
        };
        for (name, value) in more.as_object().into_iter().flatten() {
            place[name] = value.clone();
        }
        line
    }

    /// The call that has come, as an object. `None` if there is none, or if the answer ended within it: arguments are an object here, and
    /// half of one is none.
    fn called(&mut self, of: &Response) -> Option<Value> {
        let (name, arguments) = self.call.take()?;
        let (arguments, index) = (object(&arguments)?, self.calls);
        self.calls += 1;
        let id = format!("call_{}_{index}", of.number());
        Some(json!({"id": id, "function": {"index": index, "name": name, "arguments": arguments}}))
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// What the last line says of the whole answer. No request loads a model, so `load_duration` is the wait for a place.
fn ended(line: &mut Value, done: &Done) {
    line["done"] = true.into();
    line["done_reason"] = if done.reason == Reason::Length { "length" } else { "stop" }.into();
    line["total_duration"] = nanoseconds(done.queued + done.prompt_time + done.generation_time).into();
    line["load_duration"] = nanoseconds(done.queued).into();
    line["prompt_eval_count"] = done.prompt_tokens.into();
    line["prompt_eval_duration"] = nanoseconds(done.prompt_time).into();
    line["eval_count"] = done.generated_tokens.into();
    line["eval_duration"] = nanoseconds(done.generation_time).into();
}

impl WritesParts for AnswerLines {
    fn begin(&mut self, _of: &Response) -> Vec<Value> {
        Vec::new()
    }

    fn part(&mut self, of: &Response, part: &Part) -> Vec<Value> {
        if let Part::Arguments(more) = part {
            self.call.iter_mut().for_each(|(_, arguments)| arguments.push_str(more));
            return Vec::new();
        }
        let call = self.called(of).map(|call| self.line(of, "", json!({"tool_calls": [call]})));
        let mut lines: Vec<Value> = call.into_iter().collect();
        match part {
            Part::Thought(text) => lines.push(self.line(of, "", json!({"thinking": text}))),
            Part::Text(text) => lines.push(self.line(of, text, Value::Null)),
            Part::Call(name) => self.call = Some((name.clone(), String::new())),
            Part::Arguments(_) => {}
        }
        lines
    }

    fn end(&mut self, of: &Response, done: &Done) -> Vec<Value> {
        let call = self.called(of).map(|call| self.line(of, "", json!({"tool_calls": [call]})));
        let mut last = self.line(of, "", Value::Null);
        ended(&mut last, done);
        call.into_iter().chain([last]).collect()
    }

    fn whole(&mut self, of: &Response, parts: &[Part], done: &Done) -> Value {
        let (mut text, mut thoughts, mut calls) = (String::new(), String::new(), Vec::new());
        for part in parts {
            match part {
                Part::Thought(more) => thoughts.push_str(more),
                Part::Text(more) => text.push_str(more),
                Part::Call(name) => {
                    calls.extend(self.called(of));
                    self.call = Some((name.clone(), String::new()));
                }
                Part::Arguments(more) => self.call.iter_mut().for_each(|(_, arguments)| arguments.push_str(more)),
            }
        }
        calls.extend(self.called(of));
        let mut more = json!({});
        if !thoughts.is_empty() {
            more["thinking"] = thoughts.into();
        }
        if !calls.is_empty() {
            more["tool_calls"] = calls.into();
        }
        let mut whole = self.line(of, &text, more);
        ended(&mut whole, done);
        whole
    }

    /// A piece without text: a line must be one of the answer.
    fn idle(&self, of: &Response) -> Option<Value> {
        Some(self.line(of, "", Value::Null))
    }

    fn unasked(&self, of: &Response) -> Value {
        let mut line = self.line(of, "", Value::Null);
        line["done"] = true.into();
        line["done_reason"] = "load".into();
        line
    }
}
