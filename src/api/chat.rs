//! POST /v1/chat/completions.

use super::error::ApiError;
use super::fields::{Counted, Item, TextOr};
use super::model::ServedModel;
use super::request::{Asker, Biases, MOST_TOP_LOGPROBS, ResponseFormat, StreamOptions, request, room};
use super::stream::{Prepared, Wire};
use crate::tokenizer::chat_template::Message;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::sync::Arc;

/// A conversation of more turns is no conversation.
const MOST_MESSAGES: usize = 4096;

request! {
    /// The request. A field that is not here is refused by its name.
    ChatRequest, CHAT_FIELDS {
        model: String,
        messages: Vec<ChatMessage>,
        stream: bool,
        stream_options: StreamOptions,
        max_tokens: u64,
        /// Wins over `max_tokens`.
        max_completion_tokens: u64,
        temperature: f32,
        top_p: f32,
        top_k: u64,
        min_p: f32,
        repeat_penalty: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
        seed: i64,
        stop: TextOr<String>,
        n: u64,
        logprobs: bool,
        top_logprobs: u64,
        logit_bias: Biases,
        response_format: ResponseFormat,
        ignore_eos: bool,
        /// Refused unless empty.
        tools: Counted,
        tool_choice: Item,
        /// Taken and without effect.
        user: String,
        metadata: IgnoredAny,
        store: IgnoredAny,
        service_tier: IgnoredAny,
        parallel_tool_calls: IgnoredAny,
        prompt_cache_key: IgnoredAny,
        safety_identifier: IgnoredAny,
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
    pub role: String,
    pub content: Option<TextOr<Part>>,
    /// Taken and without effect.
    #[serde(rename = "name")]
    pub _name: Option<String>,
    #[serde(rename = "refusal")]
    pub _refusal: Option<IgnoredAny>,
    pub tool_calls: Option<Counted>,
    pub tool_call_id: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct Part {
    #[serde(rename = "type")]
    pub kind: String,
    pub text: Option<String>,
}

impl ChatMessage {
    fn check(&self, index: usize) -> Result<Message, ApiError> {
        let at = |field: &str| format!("messages.{index}.{field}");
        let role = match self.role.as_str() {
            // OpenAI's newer name of the same.
            "developer" => "system",
            role @ ("system" | "user" | "assistant") => role,
            "tool" | "function" => {
                return Err(ApiError::field(at("role"), "messages of tools are not supported: this server calls none"));
            }
            role => {
                let role = crate::error::excerpt(role);
                return Err(ApiError::field(
                    at("role"),
                    format!("the role '{role}' is unknown; take system, user or assistant"),
                ));
            }
        };
        if self.tool_calls.is_some_and(|calls| calls.0 > 0) || self.tool_call_id.is_some() {
            return Err(ApiError::field(at("tool_calls"), "calls of tools are not supported"));
        }
        let text = match &self.content {
            None => return Err(ApiError::field(at("content"), "the content is missing; give a string")),
            Some(TextOr::Text(text)) => text.clone(),
            Some(TextOr::List(parts)) => {
                let mut text = String::new();
                for (i, part) in parts.iter().enumerate() {
                    let (Some(piece), "text") = (&part.text, part.kind.as_str()) else {
                        let kind = crate::error::excerpt(&part.kind);
                        let message = format!("a part of type '{kind}' cannot be read; only text can");
                        return Err(ApiError::field(format!("messages.{index}.content.{i}"), message));
                    };
                    text.push_str(piece);
                }
                text
            }
        };
        Ok(Message::new(role, &text))
    }
}

impl ChatRequest {
    /// # Errors
    /// 400 with the field that cannot be; 404 for another model.
    pub fn prepare(
        mut self,
        model: &Arc<ServedModel>,
        asker: &Asker,
        id: String,
        fresh_seed: u64,
    ) -> Result<Prepared, ApiError> {
        model.check_name(self.model.as_deref())?;
        refuse_tools(self.tools.take(), self.tool_choice.take())?;
        let messages = self.messages.take().unwrap_or_default();
        if messages.is_empty() || messages.len() > MOST_MESSAGES {
            let n = messages.len();
            return Err(ApiError::field("messages", format!("there are {n} messages; give 1 to {MOST_MESSAGES}")));
        }
        let messages = messages.iter().enumerate().map(|(i, m)| m.check(i)).collect::<Result<Vec<_>, _>>()?;
        let logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs: true")),
            (true, top) => {
                let top = top.unwrap_or(0);
                if top > MOST_TOP_LOGPROBS as u64 {
                    let message = format!("top_logprobs is {top}; take 0 to {MOST_TOP_LOGPROBS}");
                    return Err(ApiError::field("top_logprobs", message));
                }
                Some(top as usize)
            }
        };
        let plan = self.common().check(model, fresh_seed)?;
        let prompt = model.conversation(&messages)?;
        let (param, asked) = match self.max_completion_tokens {
            Some(most) => ("max_completion_tokens", Some(most)),
            None => ("max_tokens", self.max_tokens),
        };
        let max_tokens = room(param, asked, prompt.len(), model.context)?;
        let whole = model.tokenizer.chat_template().is_some() && model.tokenizer.drops_leading_space();
        let jobs = plan.jobs(model, asker, prompt, max_tokens, logprobs, whole)?;
        Ok(plan.prepared(Wire::Chat, format!("chatcmpl-{id}"), model, jobs))
    }
}

/// No tool is ever called; a request that leaves the choice to nobody is taken.
fn refuse_tools(tools: Option<Counted>, choice: Option<Item>) -> Result<(), ApiError> {
    if tools.is_some_and(|tools| tools.0 > 0) {
        return Err(ApiError::field("tools", "calls of tools are not supported; leave tools out"));
    }
    match choice {
        None => Ok(()),
        Some(Item::Text(choice)) if choice == "none" || choice == "auto" => Ok(()),
        Some(_) => Err(ApiError::field("tool_choice", "calls of tools are not supported; leave tool_choice out")),
    }
}
