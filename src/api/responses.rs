//! POST /v1/responses: OpenAI's newer API, as far as it is text. Nothing is stored, so a conversation is sent whole with each request.

use super::error::ApiError;
use super::fields::{Counted, Item, TextOr};
use super::messages::{ChatMessage, ContentPart, conversation, join_parts};
use super::model::ServedModel;
use super::request::{Asker, Common, Generates, JsonSchema, ResponseFormat, refuse, room};
use super::stream::{Prepared, Wire};
use super::unknown::Given;
use crate::tokenizer::chat_template::Message;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The names of all fields of the request.
pub const RESPONSES_FIELDS: &[&str] = &[
    "model",
    "input",
    "instructions",
    "stream",
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "text",
    "tools",
    "tool_choice",
    "include",
    "truncation",
    "previous_response_id",
    "background",
    "reasoning",
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "stream_options",
];

/// Body of POST /v1/responses. A field that is not listed is refused by name; `None` is a field that was left out. Those that chat has, too,
/// mean the same ([`super::chat::ChatRequest`]).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ResponsesRequest {
    model: Option<String>,
    /// The user's message, or the conversation so far.
    input: Option<TextOr<InputMessage>>,
    /// The system message.
    instructions: Option<String>,
    stream: Option<bool>,
    /// Tokens of the answer at most, 1 or more. `None`: as many as the context has room for.
    max_output_tokens: Option<u64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u64>,
    min_p: Option<f32>,
    seed: Option<i64>,
    /// The form of the answer.
    text: Option<TextOptions>,
    /// Refused unless empty: functions are called by chat completions.
    tools: Option<Counted>,
    /// Refused unless `none` or `auto`.
    tool_choice: Option<Item>,
    /// Refused unless empty.
    include: Option<Counted>,
    /// Refused unless `disabled`.
    truncation: Option<String>,
    /// Refused: nothing is stored.
    previous_response_id: Option<String>,
    /// Refused if true.
    background: Option<bool>,
    /// Accepted and ignored, as the fields that follow.
    #[serde(rename = "reasoning")]
    _reasoning: Option<Given>,
    #[serde(rename = "user")]
    _user: Option<Given>,
    #[serde(rename = "metadata")]
    _metadata: Option<Given>,
    #[serde(rename = "store")]
    _store: Option<Given>,
    #[serde(rename = "service_tier")]
    _service_tier: Option<Given>,
    #[serde(rename = "parallel_tool_calls")]
    _parallel_tool_calls: Option<Given>,
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: Option<Given>,
    #[serde(rename = "safety_identifier")]
    _safety_identifier: Option<Given>,
    #[serde(rename = "stream_options")]
    _stream_options: Option<Given>,
}

/// One message of the conversation; an answer's `output` can be sent back as it is.
#[derive(Debug, Deserialize)]
struct InputMessage {
    /// `None` is `message`, the only one that is taken.
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    content: Option<TextOr<ContentPart>>,
    /// Accepted and ignored.
    #[serde(rename = "id")]
    _id: Option<Given>,
    /// Accepted and ignored.
    #[serde(rename = "status")]
    _status: Option<Given>,
}

#[derive(Debug, Deserialize)]
struct TextOptions {
    format: Option<TextFormat>,
    /// Accepted and ignored.
    #[serde(rename = "verbosity")]
    _verbosity: Option<Given>,
}

/// As `response_format` of a chat, with the schema next to its name.
#[derive(Debug, Deserialize)]
struct TextFormat {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default, deserialize_with = "super::fields::tree")]
    schema: Option<Value>,
    #[serde(rename = "name")]
    _name: Option<String>,
    #[serde(rename = "description")]
    _description: Option<String>,
    strict: Option<bool>,
}

impl TextFormat {
    fn response_format(self) -> ResponseFormat {
        let named = self.kind == "json_schema";
        ResponseFormat { kind: self.kind, json_schema: named.then(|| JsonSchema::of(self.schema, self.strict)) }
    }
}

impl Generates for ResponsesRequest {
    const FIELDS: &'static [&'static str] = RESPONSES_FIELDS;

    fn prepare(mut self, model: &Arc<ServedModel>, asker: &Asker) -> Result<Prepared, ApiError> {
        let Asker { client, id, fresh_seed, wanted, .. } = asker;
        model.check_name(self.model.as_deref())?;
        self.refuse()?;
        let said = match self.input.take() {
            None => return Err(ApiError::field("input", "the input is missing; give a text or a list of messages")),
            Some(TextOr::Text(text)) => vec![Message::new("user", &text)],
            Some(TextOr::List(list)) => {
                let mut list = list.into_iter().enumerate().map(InputMessage::said).collect::<Result<Vec<_>, _>>()?;
                join_parts(&mut list, model)?;
                conversation("input", &list)?
            }
        };
        let system = self.instructions.iter().map(|text| Message::new("system", text));
        let messages: Vec<Message> = system.chain(said).collect();
        let common = Common {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed,
            stream: self.stream,
            response_format: self.text.and_then(|text| text.format).map(TextFormat::response_format),
            ..Common::default()
        };
        let plan = common.check(model, *fresh_seed)?;
        let prompt = model.conversation(&messages, Map::new(), wanted).map_err(|e| match e.param.as_deref() {
            Some("messages") => ApiError { param: Some("input".into()), ..e },
            _ => e,
        })?;
        let max_tokens = room("max_output_tokens", self.max_output_tokens, prompt.len(), model.context)?;
        let whole = model.tokenizer.chat_template().is_some() && model.tokenizer.drops_leading_space();
        let jobs = plan.jobs(*client, prompt, max_tokens, None, whole);
        let mut prepared = plan.prepared(Wire::Responses, format!("resp_{id}"), model, jobs)?;
        prepared.answer.echo = json!({
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        });
        Ok(prepared)
    }
}

impl ResponsesRequest {
    /// Refuses what could change the answer and is not supported.
    fn refuse(&self) -> Result<(), ApiError> {
        let choice = self.tool_choice.as_ref();
        let chosen = choice.is_some_and(|c| !matches!(c, Item::Text(word) if word == "none" || word == "auto"));
        let refused = [
            (
                "tools",
                self.tools.is_some_and(|tools| tools.0 > 0) || chosen,
                "tools are supported by /v1/chat/completions only; leave them out",
            ),
            ("include", self.include.is_some_and(|list| list.0 > 0), "include has no values here; leave it out"),
            (
                "truncation",
                self.truncation.as_ref().is_some_and(|how| how != "disabled"),
                "truncation is not supported; use disabled, and leave out old messages yourself",
            ),
            (
                "previous_response_id",
                self.previous_response_id.is_some(),
                "nothing is stored; send the whole conversation as input",
            ),
            ("background", self.background == Some(true), "answers in the background are not supported; leave it out"),
        ];
        refuse(refused)
    }
}

impl InputMessage {
    /// The same as a message of a chat.
    fn said((i, message): (usize, InputMessage)) -> Result<ChatMessage, ApiError> {
        let kind = message.kind.as_deref().unwrap_or("message");
        match message.role {
            Some(role) if kind == "message" => Ok(ChatMessage::new(role, message.content)),
            _ => {
                let kind = crate::error::excerpt(kind);
                let why = format!("an item of type '{kind}' cannot be read; only messages with a role can");
                Err(ApiError::field(format!("input.{i}"), why))
            }
        }
    }
}
