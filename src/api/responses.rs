//! POST /v1/responses: OpenAI's newer API, as far as it is text and calls of functions. Nothing is stored, so a conversation is sent whole
//! with each request.

use super::chat::effort;
use super::dialogue::Dialogue;
use super::error::{ApiError, refuse};
use super::fields::{Item, TextOr};
use super::messages::{CalledFunction, ChatMessage, ContentPart, PastCall};
use super::model::ServedModel;
use super::request::{Asker, Common, Generates, JsonSchema, ResponseFormat, room};
use super::stream::{Prepared, Wire};
use super::tools::{Tools, check_name};
use super::unknown::{Given, open_object};
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
    /// Refused: nothing is stored.
    previous_response_id: Option<String>,
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
    #[serde(rename = "store")]
    _store: Option<Given>,
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

open_object! {
    /// One item of the conversation; an answer's `output` can be sent back as it is.
    InputItem {
        /// `None` is `message`.
        kind as "type": String,
        role as "role": String,
        content as "content": TextOr<ContentPart>,
        /// Of a call: its function, its arguments and its id, by which an output names it, too.
        name as "name": String,
        arguments as "arguments": String,
        call_id as "call_id": String,
        /// What a function returned.
        output as "output": TextOr<ContentPart>,
        /// Of thoughts, where they have no content.
        summary as "summary": Vec<ContentPart>,
    }
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
        let Asker { client, id, fresh_seed, wanted, unknown } = asker;
        model.check_name(self.model.as_deref())?;
        self.refuse()?;
        let (tools, choice) = (self.tools.take(), self.tool_choice.take());
        let echoed = json!({"tools": tools.clone().unwrap_or_else(|| json!([])), "tool_choice": choice});
        let tools = Tools::read_flat(tools, choice, unknown)?;
        let said = match self.input.take() {
            None => return Err(ApiError::field("input", "the input is missing; give a text or a list of items")),
            Some(TextOr::Text(text)) => vec![ChatMessage::new("user".into(), Some(TextOr::Text(text)))],
            Some(TextOr::List(items)) => said(items)?,
        };
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
            tools,
            parallel: self.parallel_tool_calls.unwrap_or(true),
            json: common.response_format.as_ref().is_some_and(ResponseFormat::is_json),
            variables,
        };
        let plan = common.check(model, *fresh_seed)?;
        let (prompt, talk) = dialogue.rendered(model, wanted).map_err(in_response)?;
        let plan = plan.with_talk(talk, model);
        let max_tokens = room("max_output_tokens", self.max_output_tokens, prompt.len(), model.context)?;
        let whole = model.tokenizer.chat_template().is_some() && model.tokenizer.drops_leading_space();
        let jobs = plan.jobs(*client, prompt, max_tokens, None, whole);
        let auto = json!("auto");
        let mut prepared = plan.prepared(Wire::Responses, format!("resp_{id}"), model, jobs)?;
        prepared.answer.echo = Arc::new(json!({
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "tools": echoed["tools"],
            "tool_choice": if echoed["tool_choice"].is_null() { &auto } else { &echoed["tool_choice"] },
        }));
        Ok(prepared)
    }
}

/// An error of the messages with the name that the field has here.
fn in_response(e: ApiError) -> ApiError {
    let param = e.param.map(|param| match param.as_str() {
        "messages" => "input".into(),
        _ => param.replace(".tool_call_id", ".call_id"),
    });
    ApiError { param, message: e.message.replace("a tool's message", "an output"), ..e }
}

impl ResponsesRequest {
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
            ("conversation", given(self.conversation), "nothing is stored; send the whole conversation as input"),
            ("prompt", given(self.prompt), "there are no stored prompts; send it as input"),
            ("context_management", given(self.context_management), "leave out old messages yourself"),
            ("top_logprobs", given(self.top_logprobs), "log probabilities are supported by chat completions only"),
            ("max_tool_calls", given(self.max_tool_calls), "nothing is called here; leave it out"),
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

/// The items of a request as messages of a chat: calls and thoughts belong to the assistant's message that they stand beside.
fn said(items: Vec<InputItem>) -> Result<Vec<ChatMessage>, ApiError> {
    let mut said: Vec<ChatMessage> = Vec::with_capacity(items.len());
    let mut thought: Option<String> = None;
    for (i, item) in items.into_iter().enumerate() {
        let kind = item.kind.as_deref().unwrap_or("message").to_owned();
        let message =
            |role: &str, content| ChatMessage { index: Some(i), ..ChatMessage::new(role.to_owned(), content) };
        match (kind.as_str(), item.role.as_deref()) {
            ("message", Some(role)) => {
                let reasoning_content = thought.take().filter(|_| role == "assistant");
                said.push(ChatMessage { reasoning_content, ..message(role, item.content) });
            }
            ("function_call", _) => {
                let InputItem { name, arguments, call_id: id, .. } = item;
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
            ("function_call_output", _) => {
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

    #[test]
    fn thoughts_that_follow_each_other_are_those_of_one_message() {
        let thought = |text: &str| json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]});
        let items = json!([thought("a"), {"type": "reasoning", "summary": []}, thought("b"), {"role": "assistant", "content": "x"}]);
        let messages = said(serde_json::from_value(items).unwrap()).unwrap();
        assert_eq!((messages.len(), messages[0].reasoning_content.as_deref()), (1, Some("a\n\nb")));
    }
}
