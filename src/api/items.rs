//! The items that a conversation of `/v1/responses` consists of.

use super::error::ApiError;
use super::fields::TextOr;
use super::messages::{CalledFunction, ChatMessage, ContentPart, PastCall};
use super::tools::{CUSTOM_INPUT, check_name};
use super::unknown::open_object;
use serde_json::json;

open_object! {
    /// One item of the conversation; an answer's `output` can be sent back as it is.
    pub InputItem {
        /// `None` is `message`.
        kind as "type": String,
        /// Of a message: its author's role.
        role as "role": String,
        /// Of a message: its text or its parts.
        content as "content": TextOr<ContentPart>,
        /// Of a call: its function.
        name as "name": String,
        /// Of a call: its arguments, as JSON.
        arguments as "arguments": String,
        /// Of a call of a custom tool: its input.
        input as "input": String,
        /// Of a call: its id, by which an output names it, too.
        call_id as "call_id": String,
        /// What a function returned.
        output as "output": TextOr<ContentPart>,
        /// Of thoughts, where they have no content.
        summary as "summary": Vec<ContentPart>,
    }
}

/// The items of a conversation as messages of a chat: calls and thoughts belong to the assistant's message that they stand beside. Those of
/// `asked` are the request's.
///
/// # Errors
/// 400 that names the item.
pub fn said(before: Vec<InputItem>, asked: Vec<InputItem>) -> Result<Vec<ChatMessage>, ApiError> {
    let mut said: Vec<ChatMessage> = Vec::with_capacity(before.len() + asked.len());
    let mut thought: Option<String> = None;
    let first = before.len();
    for (i, item) in before.into_iter().chain(asked).enumerate() {
        // An error names the item by its place in the request.
        let i = i.saturating_sub(first);
        let kind = item.kind.as_deref().unwrap_or("message").to_owned();
        let message =
            |role: &str, content| ChatMessage { index: Some(i), ..ChatMessage::new(role.to_owned(), content) };
        match (kind.as_str(), item.role.as_deref()) {
            ("message", Some(role)) => {
                let reasoning_content = thought.take().filter(|_| role == "assistant");
                said.push(ChatMessage { reasoning_content, ..message(role, item.content) });
            }
            ("function_call" | "custom_tool_call", _) => {
                let InputItem { name, arguments, input, call_id: id, .. } = item;
                let custom = || input.map(|input| json!({(CUSTOM_INPUT): input}).to_string());
                let arguments = if kind == "custom_tool_call" { custom() } else { arguments };
                check_name(&format!("input.{i}.name"), name.as_deref().unwrap_or_default())?;
                let call = PastCall { id, function: Some(CalledFunction { name, arguments }) };
                match said.last_mut().filter(|last| last.role == "assistant" && thought.is_none()) {
                    Some(last) => last.tool_calls.get_or_insert_default().push(call),
                    None => {
                        let (tool_calls, reasoning_content) = (Some(vec![call]), thought.take());
                        said.push(ChatMessage { tool_calls, reasoning_content, ..message("assistant", None) });
                    }
                }
            }
            ("function_call_output" | "custom_tool_call_output", _) => {
                said.push(ChatMessage { tool_call_id: item.call_id, ..message("tool", item.output) });
            }
            ("reasoning", _) => {
                let parts = match item.content {
                    Some(TextOr::List(parts)) if !parts.is_empty() => parts,
                    _ => item.summary.unwrap_or_default(),
                };
                let before = thought.take().into_iter();
                let texts: Vec<String> = before.chain(parts.into_iter().filter_map(|part| part.text)).collect();
                thought = (!texts.is_empty()).then(|| texts.join("\n\n"));
            }
            _ => {
                let kind = crate::error::excerpt(kind);
                let why = format!(
                    "an item of type '{kind}' cannot be read; only messages with a role, calls of functions, their \
                     outputs and thoughts can"
                );
                return Err(ApiError::field(format!("input.{i}"), why));
            }
        }
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn thoughts_that_follow_each_other_are_those_of_one_message() {
        let thought = |text: &str| json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]});
        let items = json!([thought("a"), {"type": "reasoning", "summary": []}, thought("b"), {"role": "assistant", "content": "x"}]);
        let messages = said(Vec::new(), serde_json::from_value(items).unwrap()).unwrap();
        assert_eq!((messages.len(), messages[0].reasoning_content.as_deref()), (1, Some("a\n\nb")));
    }
}
