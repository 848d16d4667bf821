//! POST /api/chat, /api/generate, /api/embed and /api/embeddings: ollama's API, as far as it is about the loaded model.

use super::chat::effort;
use super::dialogue::Dialogue;
use super::embeddings::EmbeddingRequest;
use super::error::{ApiError, refuse};
use super::fields::{Item, TextOr};
use super::infill;
use super::messages::{CalledFunction, ChatMessage, PastCall};
use super::model::ServedModel;
use super::ollama_options::Options;
use super::request::{Asker, Common, Conversing, Generates, JsonSchema, ResponseFormat, fields, room};
use super::stream::{Prepared, Wire};
use super::tools::Tools;
use super::unknown::{Given, open_object};
use crate::error::excerpt;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::sync::Arc;

fields! {
    /// Body of POST /api/chat. A field that is not listed is refused by name; `None` is a field that was left out.
    OllamaChatRequest, OLLAMA_CHAT_FIELDS {
        /// Name of the model. `None`: whichever is loaded.
        model: String,
        /// The conversation so far, oldest first. `None` or none: only that the model is loaded is answered.
        messages: Vec<OllamaMessage>,
        /// Functions that the answer may call, as a chat has them.
        #[serde(deserialize_with = "super::fields::tree")]
        tools: Value,
        /// `json`, or the JSON schema of the answer.
        #[serde(deserialize_with = "super::fields::tree")]
        format: Value,
        /// How the answer is drawn.
        options: Options,
        /// Whether the answer is sent in lines while it is generated. `None`: yes.
        stream: bool,
        /// Whether the model thinks, or how much; `None`: as its template has it.
        #[serde(deserialize_with = "super::fields::tree")]
        think: Value,
        /// How long the model is kept ([`super::keep_alive::Keep`]).
        keep_alive: Given,
        /// Refused if it says anything, as the fields that follow.
        logprobs: Given,
        /// Goes with `logprobs`.
        top_logprobs: Given,
        /// Whether old messages are left out where the context is full.
        truncate: Given,
        /// Whether the context is shifted once it is full.
        shift: Given,
    }
}

fields! {
    /// Body of POST /api/generate. A field that is not listed is refused by name; `None` is a field that was left out.
    OllamaGenerateRequest, OLLAMA_GENERATE_FIELDS {
        /// As in [`OllamaChatRequest`].
        model: String,
        /// What the user says. `None` or empty: only that the model is loaded is answered.
        prompt: String,
        /// The system message.
        system: String,
        /// Whether the prompt is continued as it is, without the chat template. `None`: no.
        raw: bool,
        /// As in [`OllamaChatRequest`].
        #[serde(deserialize_with = "super::fields::tree")]
        format: Value,
        /// As in [`OllamaChatRequest`].
        options: Options,
        /// As in [`OllamaChatRequest`].
        stream: bool,
        /// As in [`OllamaChatRequest`].
        #[serde(deserialize_with = "super::fields::tree")]
        think: Value,
        /// How long the model is kept ([`super::keep_alive::Keep`]).
        keep_alive: Given,
        /// The text behind the prompt: the answer is the middle between both.
        suffix: String,
        /// Refused if it says anything, as the fields that follow: only text can be read.
        images: Given,
        /// The model has its own.
        template: Given,
        /// The tokens of an earlier answer.
        context: Given,
        /// Log probabilities.
        logprobs: Given,
        /// Goes with `logprobs`.
        top_logprobs: Given,
        /// Whether the prompt is cut where the context is full.
        truncate: Given,
        /// Whether the context is shifted once it is full.
        shift: Given,
    }
}

fields! {
    /// Body of POST /api/embed. A field that is not listed is refused by name; `None` is a field that was left out.
    OllamaEmbedRequest, OLLAMA_EMBED_FIELDS {
        /// As in [`OllamaChatRequest`].
        model: String,
        /// A text or texts, as POST /v1/embeddings takes them.
        input: TextOr<String>,
        /// Refused unless it is the model's own.
        dimensions: usize,
        /// Accepted and ignored, as the fields that follow: a text that is longer than the context is refused.
        truncate: Given,
        /// Nothing is drawn.
        options: Given,
        /// As in [`OllamaChatRequest`].
        keep_alive: Given,
    }
}

fields! {
    /// Body of POST /api/embeddings, the older form of [`OllamaEmbedRequest`].
    OllamaEmbeddingsRequest, OLLAMA_EMBEDDINGS_FIELDS {
        /// As in [`OllamaChatRequest`].
        model: String,
        /// The text.
        prompt: String,
        /// Accepted and ignored: nothing is drawn.
        options: Given,
        /// How long the model is kept ([`super::keep_alive::Keep`]).
        keep_alive: Given,
    }
}

fields! {
    /// Body of POST /api/show.
    OllamaShowRequest, OLLAMA_SHOW_FIELDS {
        /// As in [`OllamaChatRequest`].
        model: String,
        /// The same under its older name.
        name: String,
        /// Accepted and ignored: there is no more to tell.
        verbose: Given,
    }
}

/// One message of a conversation.
#[derive(Debug, Deserialize)]
pub struct OllamaMessage {
    /// `system`, `user`, `assistant` or `tool`.
    role: String,
    content: Option<String>,
    /// What the assistant thought before it.
    thinking: Option<String>,
    /// Refused if there are some.
    images: Option<Given>,
    /// The calls that the assistant's message was.
    tool_calls: Option<Vec<OllamaCall>>,
    /// The function that a tool's message is about.
    tool_name: Option<String>,
    /// The same under its older name.
    name: Option<String>,
    /// The call that it is about, where calls have ids.
    tool_call_id: Option<String>,
}

open_object! {
    /// A call of a function in an earlier message.
    pub OllamaCall {
        /// As the answer had it; calls of older servers have none.
        id as "id": String,
        /// The function and its arguments.
        function as "function": OllamaFunction,
    }
}

open_object! {
    /// The function of a call.
    pub OllamaFunction {
        /// Its name.
        name as "name": String,
        /// Its arguments, an object.
        arguments as "arguments": Box<RawValue>,
    }
}

/// What the model can do, by ollama's words.
///
/// # Errors
/// As [`ServedModel::thoughts`].
pub fn capabilities(model: &ServedModel) -> Result<Vec<&'static str>, ApiError> {
    let thinks = model.thoughts()?.is_some();
    let fills_in = model.tokenizer.fim_tokens().is_some();
    let more = [thinks.then_some("thinking"), fills_in.then_some("insert")];
    Ok(["completion", "tools"].into_iter().chain(more.into_iter().flatten()).collect())
}

/// The field `format`.
fn response_format(format: Option<Value>) -> Result<Option<ResponseFormat>, ApiError> {
    let of = |kind: &str, json_schema| Some(ResponseFormat { kind: kind.into(), json_schema });
    match format {
        None => Ok(None),
        Some(Value::String(word)) if word.is_empty() => Ok(None),
        Some(Value::String(word)) if word == "json" => Ok(of("json_object", None)),
        Some(schema @ Value::Object(_)) => Ok(of("json_schema", Some(JsonSchema::at("/format", Some(schema), None)))),
        Some(_) => Err(ApiError::field("format", "format must be json, or a JSON schema")),
    }
}

/// The field `think` as variables of the template.
fn variables(think: Option<Value>) -> Result<Map<String, Value>, ApiError> {
    let mut variables = Map::new();
    match think {
        None => {}
        Some(Value::Bool(thinks)) => _ = variables.insert("enable_thinking".into(), thinks.into()),
        Some(Value::String(much)) => effort(&mut variables, Some(&much)),
        Some(_) => return Err(ApiError::field("think", "think must be true, false, or a word such as high")),
    }
    Ok(variables)
}

/// An answer to a request that asks nothing of the model.
fn unasked(common: Common, wire: Wire, model: &Arc<ServedModel>, asker: &Asker) -> Result<Prepared, ApiError> {
    let plan = common.check(model, asker.fresh_seed)?;
    let prepared = plan.prepared(wire, id(asker), model, Vec::new())?;
    Ok(Prepared { stream: false, form: None, ..prepared })
}

/// The answer's id, which only its calls have.
fn id(asker: &Asker) -> String {
    format!("chat-{}", asker.id)
}

/// An error with the names that fields have in ollama's API.
fn renamed(error: ApiError) -> ApiError {
    const IN_OPTIONS: [&str; 9] = [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "stop",
        "repeat_penalty",
        "presence_penalty",
        "frequency_penalty",
    ];
    let param = error.param.map(|param| match param.as_str() {
        "response_format" | "response_format.json_schema.schema" => "format".into(),
        name if IN_OPTIONS.contains(&name) => format!("options.{name}"),
        _ => param.replace(".reasoning_content", ".thinking"),
    });
    ApiError { param, ..error }
}

impl Generates for OllamaChatRequest {
    const FIELDS: &'static [&'static str] = OLLAMA_CHAT_FIELDS;

    fn prepare(mut self, model: &Arc<ServedModel>, asker: &Asker) -> Result<Prepared, ApiError> {
        let given = |field: Option<Given>| field.is_some_and(|field| field.0);
        refuse([
            ("logprobs", given(self.logprobs), "log probabilities are supported by /v1/chat/completions only"),
            ("top_logprobs", given(self.top_logprobs), "log probabilities are supported by /v1/chat/completions only"),
            ("truncate", given(self.truncate), "leave out old messages yourself"),
            ("shift", given(self.shift), "an answer ends where the context is full; leave it out"),
        ])?;
        let options = self.options.take().unwrap_or_default();
        options.refuse(model, &asker.unknown)?;
        let limit = ("options.num_predict", options.limit());
        let response_format = response_format(self.format.take())?;
        let json = response_format.is_some();
        let common = Common { response_format, stream: Some(self.stream.unwrap_or(true)), ..options.common() };
        let tools = Tools::read(self.tools.take(), None, &asker.unknown)?;
        let variables = variables(self.think.take())?;
        let said = said(self.messages.take().unwrap_or_default())?;
        if said.is_empty() {
            return unasked(common, Wire::OllamaChat, model, asker);
        }
        let dialogue = Dialogue {
            field: "messages",
            said,
            instructions: None,
            begun: String::new(),
            tools,
            parallel: true,
            json,
            variables,
        };
        let asked = Conversing { dialogue, limit, logprobs: None, wire: Wire::OllamaChat, id: id(asker) };
        common.conversing(asked, model, asker)
    }

    fn renamed(error: ApiError) -> ApiError {
        renamed(error)
    }
}

impl OllamaGenerateRequest {
    /// Refuses what could change the answer and is not supported.
    fn refuse(&self) -> Result<(), ApiError> {
        let given = |field: Option<Given>| field.is_some_and(|field| field.0);
        let said = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let (system, suffix) = (said(&self.system), said(&self.suffix));
        refuse([
            ("images", given(self.images), "images cannot be read; leave them out"),
            ("template", given(self.template), "the model has its own; leave it out"),
            (
                "context",
                given(self.context),
                "tokens of earlier answers are not taken; send the conversation to /api/chat",
            ),
            ("system", system && self.raw == Some(true), "with raw the prompt is continued as it is; put it there"),
            (
                "suffix",
                suffix && self.raw == Some(true),
                "with raw the prompt is continued as it is; leave one of them out",
            ),
            ("system", system && suffix, "a middle is written without a system message; leave it out"),
            ("logprobs", given(self.logprobs), "log probabilities are supported by /v1/completions only"),
            ("top_logprobs", given(self.top_logprobs), "log probabilities are supported by /v1/completions only"),
            ("truncate", given(self.truncate), "send a shorter prompt"),
            ("shift", given(self.shift), "an answer ends where the context is full; leave it out"),
        ])
    }
}

impl Generates for OllamaGenerateRequest {
    const FIELDS: &'static [&'static str] = OLLAMA_GENERATE_FIELDS;

    fn prepare(mut self, model: &Arc<ServedModel>, asker: &Asker) -> Result<Prepared, ApiError> {
        const WIRE: Wire = Wire::OllamaGenerate;
        self.refuse()?;
        let options = self.options.take().unwrap_or_default();
        options.refuse(model, &asker.unknown)?;
        let limit = ("options.num_predict", options.limit());
        let response_format = response_format(self.format.take())?;
        let json = response_format.is_some();
        let common = Common { response_format, stream: Some(self.stream.unwrap_or(true)), ..options.common() };
        let variables = variables(self.think.take())?;
        let prompt = self.prompt.take().unwrap_or_default();
        let suffix = self.suffix.take().filter(|suffix| !suffix.is_empty());
        if prompt.is_empty() && suffix.is_none() {
            return unasked(common, WIRE, model, asker);
        }
        if self.raw == Some(true) || suffix.is_some() {
            let mut plan = common.check(model, asker.fresh_seed)?;
            let prompt = match suffix {
                Some(suffix) => infill::tokens(model, &mut plan, "prompt", &prompt, &suffix)?,
                None => model.tokens("prompt", &prompt)?,
            };
            let max_tokens = room(limit.0, limit.1, prompt.len(), model.context)?;
            let jobs = plan.jobs(asker.client, prompt, max_tokens, None, false);
            return plan.prepared(WIRE, id(asker), model, jobs);
        }
        let said = vec![ChatMessage::new("user".into(), Some(TextOr::Text(prompt)))];
        let instructions = self.system.as_deref().filter(|system| !system.is_empty());
        let dialogue = Dialogue {
            field: "prompt",
            said,
            instructions,
            begun: String::new(),
            tools: None,
            parallel: true,
            json,
            variables,
        };
        let asked = Conversing { dialogue, limit, logprobs: None, wire: WIRE, id: id(asker) };
        common.conversing(asked, model, asker)
    }

    fn renamed(error: ApiError) -> ApiError {
        let error = renamed(error);
        let param = error.param.map(|param| if param == "messages" { "prompt".into() } else { param });
        ApiError { param, ..error }
    }
}

impl OllamaEmbedRequest {
    /// The same as POST /v1/embeddings has it.
    pub fn embedding(self) -> EmbeddingRequest {
        let input = self.input.map(|input| match input {
            TextOr::Text(text) => Item::Text(text),
            TextOr::List(texts) => Item::Texts(texts),
        });
        EmbeddingRequest::of(input, self.dimensions)
    }
}

impl OllamaEmbeddingsRequest {
    /// The same as [`OllamaEmbedRequest`].
    pub fn newer(self) -> OllamaEmbedRequest {
        OllamaEmbedRequest { model: self.model, input: self.prompt.map(TextOr::Text), ..Default::default() }
    }
}

/// A call that no message has answered yet.
struct Open {
    id: String,
    function: Option<String>,
}

/// The messages of a chat. Calls that have no ids get some, and a result belongs to the oldest call of its function that has none yet.
fn said(messages: Vec<OllamaMessage>) -> Result<Vec<ChatMessage>, ApiError> {
    let mut open: Vec<Open> = Vec::new();
    let mut said = Vec::with_capacity(messages.len());
    for (i, message) in messages.into_iter().enumerate() {
        let OllamaMessage { role, content, thinking, images, tool_calls, tool_name, name, tool_call_id } = message;
        if images.is_some_and(|images| images.0) {
            return Err(ApiError::field(format!("messages.{i}.images"), "images cannot be read; leave them out"));
        }
        let mut chat = ChatMessage::new(role, content.map(TextOr::Text));
        chat.reasoning_content = thinking;
        for (j, OllamaCall { id, function }) in tool_calls.into_iter().flatten().enumerate() {
            let id = id.filter(|id| !id.is_empty()).unwrap_or_else(|| format!("call_{i}_{j}"));
            let OllamaFunction { name, arguments } = function.unwrap_or_default();
            open.push(Open { id: id.clone(), function: name.clone() });
            let arguments = arguments.map(|arguments| arguments.get().to_owned());
            let call = PastCall { id: Some(id), function: Some(CalledFunction { name, arguments }) };
            chat.tool_calls.get_or_insert_default().push(call);
        }
        if chat.role == "tool" {
            let of = tool_name.or(name);
            chat.tool_call_id = Some(match tool_call_id.filter(|id| !id.is_empty()) {
                Some(id) => {
                    open.retain(|call| call.id != id);
                    id
                }
                None => answered(&mut open, of.as_deref()).ok_or_else(|| {
                    let of = of.map_or(String::new(), |name| format!(" of '{}'", excerpt(name)));
                    let message = format!("there is no call{of} before it that has no result yet");
                    ApiError::field(format!("messages.{i}.tool_name"), message)
                })?,
            });
        }
        said.push(chat);
    }
    Ok(said)
}

/// The oldest call of this function that has no result yet, which now has one.
fn answered(open: &mut Vec<Open>, function: Option<&str>) -> Option<String> {
    let is_it = |call: &Open| function.is_none_or(|name| call.function.as_deref() == Some(name));
    let at = open.iter().position(is_it)?;
    Some(open.remove(at).id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(messages: Value) -> Result<Vec<ChatMessage>, ApiError> {
        said(serde_json::from_value(messages).unwrap())
    }

    #[test]
    fn results_belong_to_the_oldest_open_call_of_their_function() {
        let call = |name: &str| json!({"function": {"name": name, "arguments": {"x": 1}}});
        let said = read(json!([
            {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b"), call("a")]},
            {"role": "tool", "content": "1", "tool_name": "b"},
            {"role": "tool", "content": "2", "tool_name": "a"},
            {"role": "tool", "content": "3"},
        ]))
        .unwrap();
        let ids: Vec<_> = said[1..].iter().map(|message| message.tool_call_id.as_deref().unwrap()).collect();
        assert_eq!(ids, ["call_0_1", "call_0_0", "call_0_2"]);
        let arguments = said[0].tool_calls.as_ref().unwrap()[0].function.as_ref().unwrap().arguments.clone();
        assert_eq!(arguments.as_deref(), Some("{\"x\":1}"));
        let none = read(json!([{"role": "tool", "content": "1", "tool_name": "b"}])).unwrap_err();
        assert_eq!((none.status, none.param.as_deref()), (400, Some("messages.0.tool_name")));
    }

    #[test]
    fn a_format_is_a_word_or_a_schema() {
        for none in [None, Some(json!(""))] {
            assert!(response_format(none).unwrap().is_none());
        }
        let kind = |format: Value| response_format(Some(format)).map(|format| format.unwrap().kind);
        assert_eq!(kind(json!("json")).unwrap(), "json_object");
        assert_eq!(kind(json!({"type": "object"})).unwrap(), "json_schema");
        for bad in [json!("xml"), json!(5), json!([])] {
            assert_eq!(kind(bad).unwrap_err().param.as_deref(), Some("format"));
        }
    }
}
