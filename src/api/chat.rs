//! POST /v1/chat/completions.

use super::error::ApiError;
use super::fields::{Counted, Item, TextOr};
use super::model::ServedModel;
use super::request::{Asker, Biases, MAX_TOP_LOGPROBS, ResponseFormat, StreamOptions, request, room};
use super::stream::{Prepared, Wire};
use crate::tokenizer::chat_template::Message;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::sync::Arc;

/// Messages in a request, at most.
const MAX_MESSAGES: usize = 4096;

request! {
    /// Body of POST /v1/chat/completions. A field that is not listed is refused by name; `None` is a field that was left out.
    ChatRequest, CHAT_FIELDS {
        /// Name of the loaded model, or empty. `None`: whichever is loaded.
        model: String,
        /// The conversation so far, oldest first: 1 to 4096 messages.
        messages: Vec<ChatMessage>,
        /// Whether the answer is sent as server-sent events while it is generated. `None`: no.
        stream: bool,
        /// Only taken with `stream: true`.
        stream_options: StreamOptions,
        /// Tokens of the answer at most, 1 or more. `None`: as many as the context has room for.
        max_tokens: u64,
        /// The same under OpenAI's newer name; it wins over `max_tokens`.
        max_completion_tokens: u64,
        /// 0 takes the likeliest token; above it, divides the logits before drawing. `None`: 0.8.
        temperature: f32,
        /// Draws from the likeliest tokens whose probabilities sum to at least this, 0 to 1. `None`: 0.95.
        top_p: f32,
        /// Draws from this many of the likeliest tokens; 0 for all. `None`: 40.
        top_k: u64,
        /// Draws from tokens at least this many times as likely as the likeliest, 0 to 1. `None`: 0.05.
        min_p: f32,
        /// Divides the positive logits of recent tokens and multiplies the negative ones. `None`: 1, no penalty.
        repeat_penalty: f32,
        /// Subtracted from the logit of every recent token. `None`: 0.
        presence_penalty: f32,
        /// Subtracted from the logit of a recent token for each time it occurred. `None`: 0.
        frequency_penalty: f32,
        /// Seed of the random draws; answer i of a prompt takes `seed + i`. `None`: a new one for each request.
        seed: i64,
        /// The answer ends before the first of these texts. `None`: only the model ends it.
        stop: TextOr<String>,
        /// Answers to each prompt, 1 to [`MAX_CHOICES`](super::request::MAX_CHOICES). `None`: 1.
        n: u64,
        /// Whether the log probability of each token of the answer is reported. `None`: no.
        logprobs: bool,
        /// How many of the likeliest tokens are reported at each position, 0 to 20; needs `logprobs: true`.
        top_logprobs: u64,
        /// Added to the logits of single tokens: token id (as text) to a number from -100 to 100.
        logit_bias: Biases,
        /// Plain text, any JSON object, or JSON of a schema. `None`: plain text.
        response_format: ResponseFormat,
        /// Whether generation goes on after the model's end-of-text token. `None`: no.
        ignore_eos: bool,
        /// Refused unless empty: tool calls are not supported.
        tools: Counted,
        /// Refused unless `none` or `auto`.
        tool_choice: Item,
        /// Accepted and ignored.
        user: String,
        /// Accepted and ignored.
        metadata: IgnoredAny,
        /// Accepted and ignored.
        store: IgnoredAny,
        /// Accepted and ignored.
        service_tier: IgnoredAny,
        /// Accepted and ignored.
        parallel_tool_calls: IgnoredAny,
        /// Accepted and ignored.
        prompt_cache_key: IgnoredAny,
        /// Accepted and ignored.
        safety_identifier: IgnoredAny,
    }
}

/// One message of a conversation, as the request has it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
    /// `system`, `developer` (the same), `user` or `assistant`.
    pub role: String,
    /// The text, whole or in parts; a message without it is refused.
    pub content: Option<TextOr<ContentPart>>,
    /// Accepted and ignored.
    #[serde(rename = "name")]
    pub _name: Option<String>,
    /// Accepted and ignored.
    #[serde(rename = "refusal")]
    pub _refusal: Option<IgnoredAny>,
    /// Refused unless empty: tool calls are not supported.
    pub tool_calls: Option<Counted>,
    /// Refused if present: messages of tools are not supported.
    pub tool_call_id: Option<String>,
}

/// A part of a message's content.
#[derive(Debug, Deserialize)]
pub struct ContentPart {
    /// Only `text` is supported.
    #[serde(rename = "type")]
    pub kind: String,
    /// The part's text.
    pub text: Option<String>,
}

impl ChatMessage {
    fn check(&self, index: usize) -> Result<Message, ApiError> {
        let at = |field: &str| format!("messages.{index}.{field}");
        let role = match self.role.as_str() {
            // OpenAI's newer name for the system role.
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
    /// Checks the request, renders the conversation with the model's chat template and makes a job for each answer. `id` is the request's
    /// own, without its prefix; `fresh_seed` is used where the request names no seed.
    ///
    /// # Errors
    /// 400 that names the bad field; 404 if another model is asked for; 503 if the template's process cannot be started.
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
        if messages.is_empty() || messages.len() > MAX_MESSAGES {
            let n = messages.len();
            return Err(ApiError::field("messages", format!("there are {n} messages; give 1 to {MAX_MESSAGES}")));
        }
        let messages = messages.iter().enumerate().map(|(i, m)| m.check(i)).collect::<Result<Vec<_>, _>>()?;
        let logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs: true")),
            (true, top) => {
                let top = top.unwrap_or(0);
                if top > MAX_TOP_LOGPROBS as u64 {
                    let message = format!("top_logprobs is {top}; take 0 to {MAX_TOP_LOGPROBS}");
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

/// Refuses tools and every `tool_choice` that demands a call: no tool is ever called.
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
