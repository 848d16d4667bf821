//! The answers of POST /v1/messages: whole messages, and the events of a stream in Anthropic's order.

use super::reading::Part;
use super::writing::{Response, WritesParts, object};
use crate::generation::{Done, Reason};
use serde_json::{Value, json};

/// What an answer's echo has: tokens of the prompt, which the first event tells.
pub const INPUT_TOKENS: &str = "input_tokens";
/// The texts that end the answer, of which the last event names one.
pub const STOPS: &str = "stop_sequences";
/// Whether thoughts are left out.
pub const OMITS_THOUGHTS: &str = "omits_thoughts";

/// A block of a message's content.
#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Thinking,
    Text,
    /// A call of this function.
    Call(String),
}

impl Kind {
    /// The kind of block that a part begins; arguments begin none.
    fn of(part: &Part) -> Option<Kind> {
        match part {
            Part::Thought(_) => Some(Kind::Thinking),
            Part::Text(_) => Some(Kind::Text),
            Part::Call(name) => Some(Kind::Call(name.clone())),
            Part::Arguments(_) => None,
        }
    }

    /// The block number `index` with its text or the arguments of its call. Thoughts have no signature: nothing is signed here.
    fn block(&self, of: &Response, index: usize, text: &str, input: Value) -> Value {
        match self {
            Kind::Thinking => json!({"type": "thinking", "thinking": text, "signature": ""}),
            Kind::Text => json!({"type": "text", "text": text}),
            Kind::Call(name) => {
                json!({"type": "tool_use", "id": format!("toolu_{}_{index}", of.number()), "name": name, "input": input})
            }
        }
    }
}

/// Why an answer with so many calls ended, as `stop_reason` and `stop_sequence`.
fn ending(of: &Response, done: &Done, calls: usize) -> (&'static str, Value) {
    match (done.reason, done.stopped_by) {
        (Reason::Length, _) => ("max_tokens", Value::Null),
        (Reason::Stop, Some(stop)) => ("stop_sequence", of.echo[STOPS][stop].clone()),
        (Reason::Stop, None) if calls > 0 => ("tool_use", Value::Null),
        (Reason::Stop, None) => ("end_turn", Value::Null),
    }
}

/// The message object; `content` is empty until it is complete.
fn message(of: &Response, content: Vec<Value>, (reason, stop): (Option<&str>, Value), usage: (Value, usize)) -> Value {
    let (input, output) = usage;
    json!({
        "id": of.id,
        "type": "message",
        "role": "assistant",
        "model": of.model.name,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": {"input_tokens": input, "output_tokens": output},
    })
}

/// The events of a streamed message.
#[derive(Debug, Default)]
pub struct MessageEvents {
    /// Blocks that have begun.
    blocks: usize,
    calls: usize,
    /// The block that is being written.
    open: Option<Kind>,
}

impl MessageEvents {
    /// The number of the block that is being written.
    fn index(&self) -> usize {
        self.blocks.saturating_sub(1)
    }

    fn close(&mut self) -> Option<Value> {
        self.open.take().map(|_| json!({"type": "content_block_stop", "index": self.index()}))
    }
}

/// Whether the message has this part.
fn is_told(of: &Response, part: &Part) -> bool {
    !(matches!(part, Part::Thought(_)) && of.echo[OMITS_THOUGHTS] == true)
}

impl WritesParts for MessageEvents {
    fn begin(&mut self, of: &Response) -> Vec<Value> {
        let begun = message(of, Vec::new(), (None, Value::Null), (of.echo[INPUT_TOKENS].clone(), 0));
        vec![json!({"type": "message_start", "message": begun})]
    }

    fn part(&mut self, of: &Response, part: &Part) -> Vec<Value> {
        let mut events = Vec::new();
        if !is_told(of, part) {
            return events;
        }
        let goes_on = |open: &Kind| !matches!(part, Part::Call(_)) && Kind::of(part).is_none_or(|kind| kind == *open);
        if let Some(kind) = Kind::of(part).filter(|_| !self.open.as_ref().is_some_and(goes_on)) {
            events.extend(self.close());
            let block = kind.block(of, self.blocks, "", json!({}));
            events.push(json!({"type": "content_block_start", "index": self.blocks, "content_block": block}));
            self.calls += usize::from(matches!(kind, Kind::Call(_)));
            self.blocks += 1;
            self.open = Some(kind);
        }
        let delta = match part {
            Part::Thought(text) => json!({"type": "thinking_delta", "thinking": text}),
            Part::Text(text) => json!({"type": "text_delta", "text": text}),
            Part::Arguments(text) => json!({"type": "input_json_delta", "partial_json": text}),
            Part::Call(_) => return events,
        };
        events.push(json!({"type": "content_block_delta", "index": self.index(), "delta": delta}));
        events
    }

    fn end(&mut self, of: &Response, done: &Done) -> Vec<Value> {
        let (reason, stop) = ending(of, done, self.calls);
        let usage = json!({"input_tokens": done.prompt_tokens, "output_tokens": done.generated_tokens});
        let delta = json!({"stop_reason": reason, "stop_sequence": stop});
        let mut events: Vec<Value> = self.close().into_iter().collect();
        events.push(json!({"type": "message_delta", "delta": delta, "usage": usage}));
        events.push(json!({"type": "message_stop"}));
        events
    }

    fn whole(&mut self, of: &Response, parts: &[Part], done: &Done) -> Value {
        let mut blocks: Vec<(Kind, String)> = Vec::new();
        for part in parts.iter().filter(|part| is_told(of, part)) {
            let text = match part {
                Part::Thought(text) | Part::Text(text) | Part::Arguments(text) => text.as_str(),
                Part::Call(_) => "",
            };
            match (Kind::of(part), blocks.last_mut()) {
                (None, Some((_, said))) => said.push_str(text),
                (Some(kind), Some((open, said))) if kind == *open && !matches!(kind, Kind::Call(_)) => {
                    said.push_str(text);
                }
                (Some(kind), _) => blocks.push((kind, text.to_owned())),
                (None, None) => {}
            }
        }
        // A call that the limit of tokens cut off cannot be made.
        blocks.retain(|(kind, text)| !matches!(kind, Kind::Call(_)) || object(text).is_some());
        let calls = blocks.iter().filter(|(kind, _)| matches!(kind, Kind::Call(_))).count();
        let written = |(index, (kind, text)): (usize, &(Kind, String))| {
            kind.block(of, index, text, object(text).unwrap_or_default())
        };
        let content = blocks.iter().enumerate().map(written).collect();
        let (reason, stop) = ending(of, done, calls);
        message(of, content, (Some(reason), stop), (done.prompt_tokens.into(), done.generated_tokens))
    }

    fn idle(&self, _of: &Response) -> Option<Value> {
        Some(json!({"type": "ping"}))
    }
}
