//! Messages of a conversation, as requests have them and as templates know them.

use super::error::{ApiError, refuse};
use super::fields::TextOr;
use super::model::ServedModel;
use super::probe::{self, CallHabits};
use super::tools::{FunctionCall, check_name};
use super::unknown::{Given, open_object};
use crate::tokenizer::chat_template::Message;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;

/// Messages in a request, at most.
const MAX_MESSAGES: usize = 4096;

/// One message of a conversation, as the request has it.
#[derive(Debug, Default, Deserialize)]
pub struct ChatMessage {
    /// Its place in the list, if it is not that of the message.
    #[serde(skip)]
    pub index: Option<usize>,
    /// `system`, `developer` (the same), `user`, `assistant` or `tool`.
    pub role: String,
    /// The text, whole or in parts; only an assistant's message that calls functions may be without it.
    pub content: Option<TextOr<ContentPart>>,
    /// Accepted and ignored.
    #[serde(rename = "name")]
    pub _name: Option<String>,
    /// Taken as the text where an assistant's message has no other.
    pub refusal: Option<String>,
    /// The calls of functions that the assistant's message was.
    pub tool_calls: Option<Vec<PastCall>>,
    /// The call that a tool's message answers.
    pub tool_call_id: Option<String>,
    /// What the assistant thought before its message: given to the model's template.
    pub reasoning_content: Option<String>,
    /// The same under another name that servers use.
    pub reasoning: Option<String>,
    /// Refused if it says anything: only text can be read.
    pub audio: Option<Given>,
    /// Refused if it says anything: `tool_calls` has taken its place.
    pub function_call: Option<Given>,
    /// Accepted and ignored: clients send back all of an answer, and this is about its text and no part of it.
    #[serde(rename = "annotations")]
    pub _annotations: Option<Given>,
    /// Accepted and ignored: the text once more, as a client's library read it.
    #[serde(rename = "parsed")]
    pub _parsed: Option<Given>,
    /// Accepted and ignored: what a client's library noted of the server that answered.
    #[serde(rename = "provider_specific_fields")]
    pub _provider_specific_fields: Option<Given>,
    /// Accepted and ignored: `reasoning_content` once more, in the form of other servers, as `thinking_blocks`.
    #[serde(rename = "reasoning_details")]
    pub _reasoning_details: Option<Given>,
    /// Accepted and ignored.
    #[serde(rename = "thinking_blocks")]
    pub _thinking_blocks: Option<Given>,
    /// Accepted and ignored: keys and values are kept without being asked for.
    #[serde(rename = "cache_control")]
    pub _cache_control: Option<Given>,
}

open_object! {
    /// A call of a function in an earlier message.
    pub PastCall {
        /// As the answer had it.
        id as "id": String,
        /// The function and its arguments.
        function as "function": CalledFunction,
    }
}

open_object! {
    /// The function of a call.
    pub CalledFunction {
        /// Its name.
        name as "name": String,
        /// Its arguments, as JSON.
        arguments as "arguments": String,
    }
}

open_object! {
    /// A part of a message's content.
    pub ContentPart {
        /// `text` or `refusal`; in the responses API `input_text` or `output_text`. Nothing else is supported.
        kind as "type": String,
        /// The part's text.
        text as "text": String,
        /// The text of a refusal.
        refusal as "refusal": String,
    }
}

/// A checked call of an earlier message.
struct CallOf<'a> {
    id: &'a str,
    name: &'a str,
    /// JSON as it was sent. Made into an object, it loses digits of numbers that 64 bits do not hold.
    arguments: &'a str,
}

impl CallOf<'_> {
    /// The call as a template takes it.
    fn json(&self, habits: &CallHabits) -> Value {
        let text = if self.arguments.trim().is_empty() { "{}" } else { self.arguments };
        let arguments = match habits.arguments_as_text {
            true => text.into(),
            false => text.parse().unwrap_or_else(|_| Value::from(text)),
        };
        let id = probe::id(self.id, habits.any_id);
        json!({"id": id, "type": "function", "function": {"name": self.name, "arguments": arguments}})
    }
}

impl ChatMessage {
    /// Whether it has calls of functions, or what one returned.
    pub fn is_about_calls(&self) -> bool {
        self.role == "tool" || self.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty())
    }

    /// A message without calls.
    pub fn new(role: String, content: Option<TextOr<ContentPart>>) -> ChatMessage {
        ChatMessage { role, content, ..ChatMessage::default() }
    }

    /// The text of the message; `field` is its place in the request.
    fn text(&self, field: &str) -> Result<String, ApiError> {
        match &self.content {
            None if self.role == "assistant" && self.refusal.is_some() => Ok(self.refusal.clone().unwrap_or_default()),
            None if self.tool_calls.is_some() || self.thought().is_some() => Ok(String::new()),
            None => Err(ApiError::field(format!("{field}.content"), "the content is missing; give a string")),
            Some(TextOr::Text(text)) => Ok(text.clone()),
            Some(TextOr::List(parts)) => {
                let kind_of = |part: &ContentPart| part.kind.clone().unwrap_or_default();
                let piece = |(i, part): (usize, &ContentPart)| match (&part.text, &part.refusal, &*kind_of(part)) {
                    (Some(piece), _, "text" | "input_text" | "output_text") | (_, Some(piece), "refusal") => {
                        Ok(piece.clone())
                    }
                    (_, _, kind) => {
                        let kind = crate::error::excerpt(kind);
                        let message = format!("a part of type '{kind}' cannot be read; only text can");
                        Err(ApiError::field(format!("{field}.content.{i}"), message))
                    }
                };
                parts.iter().enumerate().map(piece).collect()
            }
        }
    }

    /// The assistant's thoughts before that message.
    fn thought(&self) -> Option<&String> {
        self.reasoning_content.as_ref().or(self.reasoning.as_ref())
    }

    /// Refuses what only an assistant's message may have, and what could change the answer and is not supported; `at` is its place in the
    /// request.
    fn refuse(&self, at: &str) -> Result<(), ApiError> {
        const THINKS: &str = "only the assistant has thoughts; leave it out";
        let other = self.role != "assistant";
        let calls = self.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
        let says = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let given = |field: Option<Given>| field.is_some_and(|field| field.0);
        let refused = refuse([
            ("tool_calls", other && calls, "only the assistant calls functions; leave it out"),
            ("reasoning_content", other && says(&self.reasoning_content), THINKS),
            ("reasoning", other && says(&self.reasoning), THINKS),
            ("audio", given(self.audio), "audio cannot be read; send its transcript as content"),
            ("function_call", given(self.function_call), "it is obsolete; send the call in tool_calls"),
        ]);
        refused.map_err(|e| ApiError { param: e.param.map(|field| format!("{at}.{field}")), ..e })
    }

    /// The calls that the assistant's message was, with their names checked.
    fn calls(&self, at: &str) -> Result<Vec<CallOf<'_>>, ApiError> {
        let mut calls = Vec::new();
        for (j, call) in self.tool_calls.iter().flatten().enumerate() {
            let function = call.function.as_ref();
            let name = function.and_then(|function| function.name.as_deref()).unwrap_or_default();
            // A name is repeated for each answer of its function, so a long one would multiply the body.
            check_name(&format!("{at}.tool_calls.{j}.function.name"), name)?;
            let arguments = function.and_then(|function| function.arguments.as_deref()).unwrap_or_default();
            calls.push(CallOf { id: call.id.as_deref().unwrap_or_default(), name, arguments });
        }
        Ok(calls)
    }

    /// The function that the message of a tool answers for; `called` has the functions by the ids of the calls before it.
    fn answers<'a>(&self, field: &str, called: &HashMap<&str, &'a str>) -> Result<&'a str, ApiError> {
        let name = self.tool_call_id.as_deref().and_then(|id| called.get(id).copied());
        name.ok_or_else(|| {
            ApiError::field(
                format!("{field}.tool_call_id"),
                "a tool's message needs the id of a call in a message before it",
            )
        })
    }
}

/// The messages of a conversation as templates know them. `habits`: how the template takes calls; `None`: it takes none, so that calls are
/// told as text, and what functions gave is told by the user.
///
/// # Errors
/// 400 that names the bad message; `field` is the list's name in the request.
pub fn conversation(field: &str, said: &[ChatMessage], habits: Option<&CallHabits>) -> Result<Vec<Message>, ApiError> {
    let n = said.len();
    if n == 0 || n > MAX_MESSAGES {
        return Err(ApiError::field(field, format!("the request has {n} messages; give 1 to {MAX_MESSAGES}")));
    }
    let mut messages: Vec<Message> = Vec::with_capacity(n);
    let mut called: HashMap<&str, &str> = HashMap::new();
    for (i, message) in said.iter().enumerate() {
        let at = format!("{field}.{}", message.index.unwrap_or(i));
        message.refuse(&at)?;
        let text = message.text(&at)?;
        match message.role.as_str() {
            // OpenAI's newer name for the system role.
            "developer" => messages.push(Message::new("system", &text)),
            role @ ("system" | "user") => messages.push(Message::new(role, &text)),
            "assistant" => {
                let calls = message.calls(&at)?;
                called.extend(calls.iter().map(|call| (call.id, call.name)));
                let reasoning_content = message.thought().cloned();
                if let Some(habits) = habits {
                    let tool_calls = calls.iter().map(|call| call.json(habits)).collect();
                    messages.push(Message { reasoning_content, tool_calls, ..Message::new("assistant", &text) });
                    continue;
                }
                let calls = calls.iter().map(|call| FunctionCall::said(call.name, call.arguments));
                let text: Vec<String> = Some(text).filter(|text| !text.is_empty()).into_iter().chain(calls).collect();
                messages.push(Message { reasoning_content, ..Message::new("assistant", &text.join("\n")) });
            }
            "tool" => {
                let name = message.answers(&at, &called)?;
                if let Some(habits) = habits {
                    let tool_call_id = message.tool_call_id.as_deref().map(|id| probe::id(id, habits.any_id));
                    messages.push(Message { tool_call_id, name: Some(name.to_owned()), ..Message::new("tool", &text) });
                    continue;
                }
                let text = format!("The function {name} returned:\n{text}");
                match messages.last_mut().filter(|_| i > 0 && said[i - 1].role == "tool") {
                    // Templates want user and assistant in turn.
                    Some(before) => before.content.extend(["\n", &text]),
                    None => messages.push(Message::new("user", &text)),
                }
            }
            role => {
                let role = crate::error::excerpt(role);
                let message = format!("unknown role '{role}'; use system, user, assistant or tool");
                return Err(ApiError::field(format!("{at}.role"), message));
            }
        }
    }
    Ok(messages)
}

/// Joins the text parts of each message as the model's template does. Parts that are no text are left to be refused.
///
/// # Errors
/// As [`ServedModel::habits`].
pub fn join_parts(messages: &mut [ChatMessage], model: &ServedModel) -> Result<(), ApiError> {
    for message in messages {
        let Some(TextOr::List(parts)) = &mut message.content else { continue };
        let is_text = |part: &ContentPart| matches!(part.kind.as_deref(), Some("text" | "input_text" | "output_text"));
        if parts.len() > 1 && parts.iter().all(|part| is_text(part) && part.text.is_some()) {
            let texts: Vec<String> = parts.iter_mut().filter_map(|part| part.text.take()).collect();
            parts.truncate(1);
            parts[0].text = Some(texts.join(&model.habits()?.between_parts));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(messages: Value) -> Result<Vec<Message>, ApiError> {
        conversation("messages", &serde_json::from_value::<Vec<ChatMessage>>(messages).unwrap(), None)
    }

    fn call(id: &str, name: &str) -> Value {
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}})
    }

    /// One request with a name of megabytes and thousands of answers took as much memory as their product.
    #[test]
    fn an_earlier_call_of_what_is_no_functions_name_is_refused_by_its_field() {
        for bad in [String::new(), "a b".into(), "x".repeat(129), "x".repeat(1 << 20)] {
            let refused = said(json!([{"role": "assistant", "tool_calls": [call("1", "good"), call("2", &bad)]}]));
            let refused = refused.unwrap_err();
            assert_eq!(refused.param.as_deref(), Some("messages.0.tool_calls.1.function.name"));
            assert!(refused.status == 400 && refused.message.len() < 1000, "{}", refused.message);
        }
        assert!(said(json!([{"role": "assistant", "tool_calls": [call("1", &"x".repeat(64))]}])).is_ok());
    }

    #[test]
    fn answers_of_functions_that_follow_each_other_are_one_message_and_each_names_the_last_call_of_its_id() {
        let tool = |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
        let messages = said(json!([
            {"role": "assistant", "tool_calls": [call("1", "old"), call("2", "two")]},
            tool("1", "a"),
            {"role": "assistant", "tool_calls": [call("1", "new")]},
            tool("2", "b"),
            tool("1", "c"),
        ]));
        let texts: Vec<String> = messages.unwrap().into_iter().map(|message| message.content).collect();
        assert_eq!(texts[1], "The function old returned:\na");
        assert_eq!(texts[3..], ["The function two returned:\nb\nThe function new returned:\nc"]);
        let unknown = said(json!([tool("1", "a"), {"role": "assistant", "tool_calls": [call("1", "late")]}]));
        assert_eq!(unknown.unwrap_err().param.as_deref(), Some("messages.0.tool_call_id"));
    }
}
