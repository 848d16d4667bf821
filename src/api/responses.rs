//! POST /v1/responses: OpenAI's newer API, as far as it is text and calls of functions. A conversation is sent whole with each request, or goes
//! on from an answer that is kept ([`super::stored`]).

use super::chat::effort;
use super::dialogue::Dialogue;
use super::error::{ApiError, refuse};
use super::fields::{Item, TextOr};
use super::items::{InputItem, said};
use super::model::ServedModel;
use super::request::{Asker, Common, Conversing, Generates, JsonSchema, ResponseFormat};
use super::stored::{Keep, StoredResponses, Turn};
use super::stream::{Prepared, Wire};
use super::tools::Tools;
use super::unknown::Given;
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
    "client_metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "safety_identifier",
    "stream_options",
    "conversation",
    "prompt",
    "context_management",
    "top_logprobs",
    "max_tool_calls",
];

/// What `include` may name: an answer here has none of it.
const NOTHING_TO_INCLUDE: [&str; 7] = [
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
];

/// Body of POST /v1/responses. A field that is not listed is refused by name; `None` is a field that was left out. Those that chat has, too,
/// mean the same ([`super::chat::ChatRequest`]).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ResponsesRequest {
    model: Option<String>,
    /// The user's message, or the conversation so far.
    input: Option<TextOr<InputItem>>,
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
    /// Functions that the answer may call; other tools are left out ([`Tools::read_flat`]).
    #[serde(deserialize_with = "super::fields::tree")]
    tools: Option<Value>,
    /// `auto`, `none`, `required`, the function to call, or those that are allowed.
    #[serde(deserialize_with = "super::fields::tree")]
    tool_choice: Option<Value>,
    /// More of an answer that it is to tell: refused unless there is nothing of it.
    include: Option<Item>,
    /// Refused unless `disabled`.
    truncation: Option<String>,
    /// The answer that the conversation goes on from, with all that was before it but its instructions.
    previous_response_id: Option<String>,
    /// Whether the answer is kept, so that a request can go on from it. `None`: yes.
    store: Option<bool>,
    /// Refused if true.
    background: Option<bool>,
    /// How much a model thinks (`effort`), for templates that know it; whatever else it has is ignored.
    #[serde(deserialize_with = "super::fields::tree")]
    reasoning: Option<Value>,
    /// Whether an answer may have several calls, where the model's own format has them. `None`: yes.
    parallel_tool_calls: Option<bool>,
    /// Accepted and ignored, as the fields that follow.
    #[serde(rename = "user")]
    _user: Option<Given>,
    #[serde(rename = "metadata")]
    _metadata: Option<Given>,
    #[serde(rename = "client_metadata")]
    _client_metadata: Option<Given>,
    #[serde(rename = "service_tier")]
    _service_tier: Option<Given>,
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: Option<Given>,
    #[serde(rename = "prompt_cache_retention")]
    _prompt_cache_retention: Option<Given>,
    #[serde(rename = "prompt_cache_options")]
    _prompt_cache_options: Option<Given>,
    #[serde(rename = "safety_identifier")]
    _safety_identifier: Option<Given>,
    #[serde(rename = "stream_options")]
    _stream_options: Option<Given>,
    /// Refused if it says anything, as the fields that follow.
    conversation: Option<Given>,
    prompt: Option<Given>,
    context_management: Option<Given>,
    top_logprobs: Option<Given>,
    max_tool_calls: Option<Given>,
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
        ResponseFormat {
            kind: self.kind,
            json_schema: named.then(|| JsonSchema::at("/text/format/schema", self.schema, self.strict)),
        }
    }
}

impl Generates for ResponsesRequest {
    const FIELDS: &'static [&'static str] = RESPONSES_FIELDS;

    fn prepare(mut self, model: &Arc<ServedModel>, asker: &Asker) -> Result<Prepared, ApiError> {
        let stored = &asker.stored;
        self.refuse()?;
        let (tools, choice) = (self.tools.take(), self.tool_choice.take());
        let echoed = json!({"tools": tools.clone().unwrap_or_else(|| json!([])), "tool_choice": choice});
        let tools = Tools::read_flat(tools, choice, &asker.unknown)?;
        let before = self.before(stored, asker.keeper)?;
        let asked = match self.input.take() {
            None => return Err(ApiError::field("input", "the input is missing; give a text or a list of items")),
            Some(TextOr::Text(text)) => {
                let (role, content) = (Some("user".into()), Some(TextOr::Text(text)));
                vec![InputItem { role, content, ..InputItem::default() }]
            }
            Some(TextOr::List(items)) => items,
        };
        let keep = (self.store != Some(false) && stored.keeps()).then(|| Keep {
            stored: stored.clone(),
            owner: asker.keeper,
            asked: asked.clone(),
            before: before.clone(),
        });
        let said = said(before.map_or(Vec::new(), |turn| turn.conversation()), asked)?;
        let mut variables = Map::new();
        let reasoning = self.reasoning.take().unwrap_or_default();
        effort(&mut variables, reasoning["effort"].as_str());
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
        let dialogue = Dialogue {
            field: "input",
            said,
            instructions: self.instructions.as_deref(),
            begun: String::new(),
            tools,
            parallel: self.parallel_tool_calls.unwrap_or(true),
            json: common.response_format.as_ref().is_some_and(ResponseFormat::is_json),
            variables,
        };
        let (limit, id) = (("max_output_tokens", self.max_output_tokens), format!("resp_{}", asker.id));
        let asked = Conversing { dialogue, limit, logprobs: None, wire: Wire::Responses, id };
        let mut prepared = common.conversing(asked, model, asker)?;
        let auto = json!("auto");
        prepared.answer.echo = Arc::new(json!({
            "previous_response_id": self.previous_response_id,
            "store": keep.is_some(),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "tools": echoed["tools"],
            "tool_choice": if echoed["tool_choice"].is_null() { &auto } else { &echoed["tool_choice"] },
        }));
        prepared.answer.keep = keep.map(Arc::new);
        Ok(prepared)
    }

    fn renamed(e: ApiError) -> ApiError {
        let param = e.param.map(|param| match param.as_str() {
            "messages" => "input".into(),
            "response_format" | "response_format.json_schema.schema" => "text.format".into(),
            _ => param.replace(".tool_call_id", ".call_id"),
        });
        ApiError { param, message: e.message.replace("a tool's message", "an output"), ..e }
    }
}

impl ResponsesRequest {
    /// The turn that the request goes on from.
    fn before(&self, stored: &StoredResponses, owner: u64) -> Result<Option<Arc<Turn>>, ApiError> {
        let Some(id) = &self.previous_response_id else { return Ok(None) };
        let gone = || {
            let why = "the answer is not kept, or not any more, or by another daemon or for another token; send the whole \
                       conversation as input (serve.responses_bytes and serve.responses_seconds say what is kept)";
            ApiError { param: Some("previous_response_id".into()), ..ApiError::new(404, why) }
                .code("previous_response_not_found")
        };
        stored.turn(id, owner, crate::clock::now()).map(Some).ok_or_else(gone)
    }

    /// Refuses what could change the answer and is not supported.
    fn refuse(&self) -> Result<(), ApiError> {
        let given = |field: Option<Given>| field.is_some_and(|field| field.0);
        let nothing = |names: &Item| match names {
            Item::Texts(names) => names.iter().all(|name| NOTHING_TO_INCLUDE.contains(&name.as_str())),
            names => *names == Item::Tokens(Vec::new()),
        };
        let refused = [
            (
                "include",
                self.include.as_ref().is_some_and(|names| !nothing(names)),
                "only what an answer here has none of can be named, such as reasoning.encrypted_content",
            ),
            ("conversation", given(self.conversation), "conversations are not supported; use previous_response_id"),
            ("prompt", given(self.prompt), "there are no stored prompts; send it as input"),
            ("context_management", given(self.context_management), "leave out old messages yourself"),
            ("top_logprobs", given(self.top_logprobs), "log probabilities are supported by chat completions only"),
            ("max_tool_calls", given(self.max_tool_calls), "nothing is called here; leave it out"),
            (
                "truncation",
                self.truncation.as_ref().is_some_and(|how| how != "disabled"),
                "truncation is not supported; use disabled, and leave out old messages yourself",
            ),
            ("background", self.background == Some(true), "answers in the background are not supported; leave it out"),
        ];
        refuse(refused)
    }
}
