//! POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as far as it is text, thoughts and calls of functions.

use super::anthropic_stream::{INPUT_TOKENS, OMITS_THOUGHTS, STOPS};
use super::chat::effort;
use super::dialogue::Dialogue;
use super::error::{ApiError, refuse};
use super::fields::TextOr;
use super::messages::{CalledFunction, ChatMessage, ContentPart, PastCall};
use super::model::ServedModel;
use super::reading::Thoughts;
use super::request::{Asker, Common, Conversing, Generates, JsonSchema, ResponseFormat, fields};
use super::stream::{Prepared, Wire};
use super::tools::{Tools, check_name};
use super::unknown::{Given, open_object};
use crate::error::excerpt;
use crate::generation::ThoughtBudget;
use crate::tokenizer::Special;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use std::sync::Arc;

fields! {
    /// Body of POST /v1/messages, and of /v1/messages/count_tokens. A field that is not listed is refused by name; `None` is a field that was
    /// left out. Those that chat has, too, mean the same ([`super::chat::ChatRequest`]).
    MessagesRequest, MESSAGES_FIELDS {
        /// Name of the loaded model, or empty. `None`: whichever is loaded.
        model: String,
        /// The conversation so far, oldest first.
        messages: Vec<InputMessage>,
        /// The system message.
        system: TextOr<Block>,
        /// Tokens of the answer at most, 1 or more. `None`: as many as the context has room for.
        max_tokens: u64,
        /// Whether the answer is sent as server-sent events while it is generated. `None`: no.
        stream: bool,
        /// As in a chat.
        temperature: f32,
        /// As in a chat.
        top_p: f32,
        /// As in a chat.
        top_k: u64,
        /// As in a chat; Anthropic's own API has it not, as the field that follows.
        min_p: f32,
        /// As in a chat.
        seed: i64,
        /// The answer ends before the first of these texts.
        stop_sequences: Vec<String>,
        /// Functions that the answer may call; tools of Anthropic's own are left out ([`Tools::read_messages`]).
        #[serde(deserialize_with = "super::fields::tree")]
        tools: Value,
        /// `auto`, `any`, `none`, or `tool` with a name.
        tool_choice: ToolChoice,
        /// Whether the model thinks, where its template can be told. `None`: as the template has it.
        thinking: Thinking,
        /// How much the model thinks, and the form of the answer.
        output_config: OutputConfig,
        /// The form of the answer under its older name.
        output_format: OutputFormat,
        /// What is left out of old messages: thoughts always are, and nothing else can be.
        context_management: ContextManagement,
        /// Accepted and ignored, as the fields that follow up to `speed`.
        metadata: Given,
        /// Keys and values of prompts are kept without being asked for.
        cache_control: Given,
        /// There is one service.
        service_tier: Given,
        /// There is one place.
        inference_geo: Given,
        /// About the client.
        diagnostics: Given,
        /// There is one speed.
        speed: Given,
        /// Refused if it says anything, as the field that follows.
        container: Given,
        /// Servers of tools that Anthropic's servers would ask.
        mcp_servers: Given,
    }
}

/// One message of a conversation.
#[derive(Debug, Deserialize)]
pub struct InputMessage {
    /// `user` or `assistant`.
    role: String,
    content: TextOr<Block>,
}

open_object! {
    /// A block of a message's content; those of an answer can be sent back as they are.
    pub Block {
        /// `text`, `tool_use`, `tool_result`, `thinking` or `redacted_thinking`.
        kind as "type": String,
        /// The text of a text.
        text as "text": String,
        /// The id of a call.
        id as "id": String,
        /// The function of a call.
        name as "name": String,
        /// The arguments of a call, an object.
        input as "input": Box<RawValue>,
        /// The id of the call that a result is of.
        tool_use_id as "tool_use_id": String,
        /// What the function returned.
        content as "content": TextOr<Block>,
        /// Whether it failed.
        is_error as "is_error": bool,
    }
}

/// The field `tool_choice`.
#[derive(Debug, Deserialize)]
pub struct ToolChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

/// The field `thinking`.
#[derive(Debug, Deserialize)]
pub struct Thinking {
    #[serde(rename = "type")]
    kind: String,
    /// Tokens after which thoughts are ended. `None`: they end by themselves.
    budget_tokens: Option<u64>,
    /// `omitted` leaves thoughts out of the answer.
    display: Option<String>,
}

/// The field `output_config`.
#[derive(Debug, Deserialize)]
pub struct OutputConfig {
    effort: Option<String>,
    format: Option<OutputFormat>,
}

/// The form of the answer.
#[derive(Debug, Deserialize)]
pub struct OutputFormat {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default, deserialize_with = "super::fields::tree")]
    schema: Option<Value>,
}

/// The field `context_management`.
#[derive(Debug, Deserialize)]
pub struct ContextManagement {
    edits: Option<Vec<Edit>>,
}

open_object! {
    /// What is to be left out of old messages.
    Edit {
        /// `clear_thinking_...`; nothing else is supported.
        kind as "type": String,
    }
}

impl OutputFormat {
    fn response_format(self, place: &'static str) -> ResponseFormat {
        let schema = (self.kind == "json_schema").then(|| JsonSchema::at(place, self.schema, None));
        ResponseFormat { kind: self.kind, json_schema: schema }
    }
}

impl Generates for MessagesRequest {
    const FIELDS: &'static [&'static str] = MESSAGES_FIELDS;

    fn prepare(mut self, model: &Arc<ServedModel>, asker: &Asker) -> Result<Prepared, ApiError> {
        let format = self.output_config.as_mut().and_then(|config| config.format.take());
        let newer = format.map(|format| format.response_format("/output_config/format/schema"));
        let older = || self.output_format.take().map(|format| format.response_format("/output_format/schema"));
        let common = Common {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed,
            stop: self.stop_sequences.clone().map(TextOr::List),
            stream: self.stream,
            response_format: newer.or_else(older),
            ..Common::default()
        };
        let omits = self.thinking.as_ref().is_some_and(|thinking| thinking.display.as_deref() == Some("omitted"));
        let (stops, limit) = (self.stop_sequences.take(), ("max_tokens", self.max_tokens));
        let json = common.response_format.as_ref().is_some_and(ResponseFormat::is_json);
        let dialogue = Dialogue { json, ..self.dialogue(asker)? };
        if json && !dialogue.begun.is_empty() {
            let why = "an answer of a form begins anew; leave out the last message, or the form";
            return Err(ApiError::field("messages", why));
        }
        let asked =
            Conversing { dialogue, limit, logprobs: None, wire: Wire::Messages, id: format!("msg_{}", asker.id) };
        let budget = self.thinking.filter(|thinking| thinking.kind == "enabled").and_then(|t| t.budget_tokens);
        let mut prepared = common.conversing(asked, model, asker)?;
        if let Some(tokens) = budget {
            limit_thoughts(&mut prepared, tokens as usize, model)?;
        }
        let tokens = prepared.jobs.first().map_or(0, |job| job.prompt.len());
        prepared.answer.echo = Arc::new(json!({INPUT_TOKENS: tokens, STOPS: stops, OMITS_THOUGHTS: omits}));
        Ok(prepared)
    }

    fn renamed(error: ApiError) -> ApiError {
        let param = error.param.map(|param| match param.as_str() {
            "stop" => "stop_sequences".into(),
            "response_format" | "response_format.json_schema.schema" => "output_config.format".into(),
            _ => param.replace(".tool_call_id", ".tool_use_id"),
        });
        let message =
            error.message.replace("a tool's message needs the id of a call", "a result needs the id of a tool_use");
        ApiError { param, message, ..error }
    }
}

/// Ends the thoughts of all answers after so many tokens, where the model writes them between marks.
fn limit_thoughts(prepared: &mut Prepared, tokens: usize, model: &ServedModel) -> Result<(), ApiError> {
    let reading = &prepared.answer.reading;
    let Some(Thoughts { open, close }) = &reading.thoughts else { return Ok(()) };
    let ending = model.tokenizer.encode(&format!("\n{close}\n\n"), Special::Parse);
    let ending = ending.map_err(|e| ApiError::field("thinking.budget_tokens", e.without_folder()))?;
    let budget = ThoughtBudget::new(tokens, (open, close), reading.thinking, ending);
    prepared.jobs.iter_mut().for_each(|job| job.thoughts = Some(budget.clone()));
    Ok(())
}

impl MessagesRequest {
    /// Tokens of the prompt that an answer to this request would begin with.
    ///
    /// # Errors
    /// As [`Generates::prepare`].
    pub fn count(mut self, model: &ServedModel, asker: &Asker) -> Result<Value, ApiError> {
        let config = self.output_config.as_ref();
        let json = self.output_format.is_some() || config.is_some_and(|config| config.format.is_some());
        let (prompt, _) = Dialogue { json, ..self.dialogue(asker)? }.rendered(model, &asker.wanted)?;
        Ok(json!({"input_tokens": prompt.len()}))
    }

    /// The conversation.
    fn dialogue(&mut self, asker: &Asker) -> Result<Dialogue<'static>, ApiError> {
        self.refuse()?;
        let choice = self.tool_choice.take();
        let parallel = choice.as_ref().and_then(|choice| choice.disable_parallel_tool_use) != Some(true);
        let choice = choice.map(ToolChoice::chosen).transpose()?;
        let tools = Tools::read_messages(self.tools.take(), choice, &asker.unknown)?;
        let mut variables = Map::new();
        match self.thinking.as_ref().map(|thinking| thinking.kind.as_str()) {
            None | Some("adaptive") => {}
            Some(kind @ ("enabled" | "disabled")) => {
                variables.insert("enable_thinking".into(), (kind == "enabled").into());
            }
            Some(kind) => {
                let why = format!("unknown type '{}'; use enabled, disabled or adaptive", excerpt(kind));
                return Err(ApiError::field("thinking.type", why));
            }
        }
        effort(&mut variables, self.output_config.as_ref().and_then(|config| config.effort.as_deref()));
        let begun = self.begun()?;
        if begun.is_some() {
            // The answer goes on from a text, so that it cannot think first.
            variables.entry("enable_thinking").or_insert(false.into());
        }
        let said = said(self.system.take(), self.messages.take().unwrap_or_default())?;
        let begun = begun.unwrap_or_default();
        Ok(Dialogue { field: "messages", said, instructions: None, begun, tools, parallel, json: false, variables })
    }

    /// The text that the answer goes on from: that of a last message of the assistant, which is taken off.
    fn begun(&mut self) -> Result<Option<String>, ApiError> {
        let messages = self.messages.as_mut();
        let Some(last) = messages.and_then(|list| list.pop_if(|last| last.role == "assistant")) else {
            return Ok(None);
        };
        let at = format!("messages.{}.content", self.messages.as_ref().map_or(0, Vec::len));
        let text: String = texts(Some(last.content), &at)?.into_iter().filter_map(|part| part.text).collect();
        if self.thinking.as_ref().is_some_and(|thinking| thinking.kind == "enabled") {
            let why =
                "an answer that goes on from the assistant's last message cannot think first; leave one of the two out";
            return Err(ApiError::field("thinking.type", why));
        }
        if text.ends_with(char::is_whitespace) {
            let why =
                "the last message of the assistant ends with white space, which belongs to the next word; leave it out";
            return Err(ApiError::field(at, why));
        }
        Ok(Some(text).filter(|text| !text.is_empty()))
    }

    /// Refuses what could change the answer and is not supported.
    fn refuse(&self) -> Result<(), ApiError> {
        let given = |field: Option<Given>| field.is_some_and(|field| field.0);
        let edits = self.context_management.iter().flat_map(|context| context.edits.iter().flatten());
        // Thoughts are left out anyway.
        let other = |edit: &Edit| !edit.kind.as_ref().is_some_and(|kind| kind.starts_with("clear_thinking"));
        refuse([
            ("container", given(self.container), "nothing runs in containers here; leave it out"),
            ("mcp_servers", given(self.mcp_servers), "no servers of tools are asked here; leave it out"),
            ("context_management.edits", edits.into_iter().any(other), "leave out old messages yourself"),
        ])
    }
}

impl ToolChoice {
    /// The same as a chat has it.
    fn chosen(self) -> Result<Value, ApiError> {
        match (self.kind.as_str(), self.name) {
            ("auto", _) => Ok(json!("auto")),
            ("any", _) => Ok(json!("required")),
            ("none", _) => Ok(json!("none")),
            ("tool", Some(name)) => Ok(json!({"type": "function", "name": name})),
            ("tool", None) => {
                Err(ApiError::field("tool_choice.name", "the name is missing; give that of one of the tools"))
            }
            (kind, _) => {
                let why = format!("unknown type '{}'; use auto, any, tool or none", excerpt(kind));
                Err(ApiError::field("tool_choice.type", why))
            }
        }
    }
}

fn text_part(text: String) -> ContentPart {
    ContentPart { kind: Some("text".into()), text: Some(text), refusal: None }
}

/// The text of a block of text; `at` is its place in the request.
fn text_of(block: Block, at: &str) -> Result<ContentPart, ApiError> {
    match (block.kind.as_deref(), block.text) {
        (Some("text"), Some(text)) => Ok(text_part(text)),
        (Some("text"), None) => Err(ApiError::field(format!("{at}.text"), "the text is missing")),
        (kind, _) => {
            let kind = excerpt(kind.unwrap_or_default());
            Err(ApiError::field(at, format!("a block of type '{kind}' cannot be read here; only text can")))
        }
    }
}

/// The texts of a content that is nothing but text.
fn texts(content: Option<TextOr<Block>>, at: &str) -> Result<Vec<ContentPart>, ApiError> {
    match content {
        None => Ok(Vec::new()),
        Some(TextOr::Text(text)) => Ok(vec![text_part(text)]),
        Some(TextOr::List(blocks)) => {
            blocks.into_iter().enumerate().map(|(i, block)| text_of(block, &format!("{at}.{i}"))).collect()
        }
    }
}

/// The messages of a chat. Those of one role that follow each other are one, as Anthropic's API has it.
fn said(system: Option<TextOr<Block>>, messages: Vec<InputMessage>) -> Result<Vec<ChatMessage>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field("messages", "there are no messages; give at least one"));
    }
    let mut said: Vec<ChatMessage> = Vec::with_capacity(messages.len() + 1);
    let system = texts(system, "system")?;
    if !system.is_empty() {
        said.push(ChatMessage::new("system".into(), Some(TextOr::List(system))));
    }
    for (i, InputMessage { role, content }) in messages.into_iter().enumerate() {
        let at = format!("messages.{i}");
        if role != "user" && role != "assistant" {
            let why = format!("unknown role '{}'; use user or assistant", excerpt(role));
            return Err(ApiError::field(format!("{at}.role"), why));
        }
        let blocks = match content {
            TextOr::Text(text) => vec![Block { kind: Some("text".into()), text: Some(text), ..Block::default() }],
            TextOr::List(blocks) => blocks,
        };
        if blocks.is_empty() {
            return Err(ApiError::field(format!("{at}.content"), "the content is empty; give a text or blocks"));
        }
        for (j, block) in blocks.into_iter().enumerate() {
            let place = format!("{at}.content.{j}");
            match (block.kind.as_deref(), role.as_str()) {
                (Some("tool_result"), "user") => said.push(result(block, i, &place)?),
                (Some("tool_use"), "assistant") => {
                    let call = call(block, &place)?;
                    turn(&mut said, &role, i).tool_calls.get_or_insert_default().push(call);
                }
                (Some("thinking" | "redacted_thinking"), "assistant") => _ = turn(&mut said, &role, i),
                _ => {
                    let part = text_of(block, &place)?;
                    if let Some(TextOr::List(parts)) = &mut turn(&mut said, &role, i).content {
                        parts.push(part);
                    }
                }
            }
        }
    }
    Ok(said)
}

/// The message of this role that is being said.
fn turn<'a>(said: &'a mut Vec<ChatMessage>, role: &str, index: usize) -> &'a mut ChatMessage {
    if said.last().is_none_or(|last| last.role != role) {
        let content = Some(TextOr::List(Vec::new()));
        said.push(ChatMessage { index: Some(index), ..ChatMessage::new(role.to_owned(), content) });
    }
    let last = said.len() - 1;
    &mut said[last]
}

/// An earlier call.
fn call(block: Block, at: &str) -> Result<PastCall, ApiError> {
    check_name(&format!("{at}.name"), block.name.as_deref().unwrap_or_default())?;
    let arguments = block.input.map(|input| input.get().to_owned());
    Ok(PastCall { id: block.id, function: Some(CalledFunction { name: block.name, arguments }) })
}

/// What a function returned, as a tool's message. Templates know no failures, so the text says it.
fn result(block: Block, index: usize, at: &str) -> Result<ChatMessage, ApiError> {
    let mut parts = texts(block.content, &format!("{at}.content"))?;
    if block.is_error == Some(true) {
        match parts.first_mut().and_then(|first| first.text.as_mut()) {
            Some(text) => text.insert_str(0, "Error: "),
            None => parts.push(text_part("Error".into())),
        }
    }
    let message = ChatMessage::new("tool".into(), Some(TextOr::List(parts)));
    Ok(ChatMessage { index: Some(index), tool_call_id: block.tool_use_id, ..message })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::parse;

    fn read(messages: Value) -> Result<Vec<ChatMessage>, ApiError> {
        let body = json!({"messages": messages, "system": [{"type": "text", "text": "Be brief."}]}).to_string();
        let body = body.replace("\"MANY\"", "123456789012345678901234567890");
        let request: MessagesRequest = parse(body.as_bytes(), MESSAGES_FIELDS)?;
        said(request.system, request.messages.unwrap_or_default())
    }

    fn text(message: &ChatMessage) -> Vec<&str> {
        let Some(TextOr::List(parts)) = &message.content else { panic!("{message:?}") };
        parts.iter().map(|part| part.text.as_deref().unwrap_or_default()).collect()
    }

    #[test]
    fn blocks_become_messages_calls_and_results_and_thoughts_are_dropped() {
        let said = read(json!([
            {"role": "user", "content": "Rain?"},
            {"role": "user", "content": [{"type": "text", "text": "Or snow?", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Well."},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"place": "Rome", "days": "MANY"}, "caller": {}},
                {"type": "tool_use", "id": "2", "name": "clock", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "sun", "is_error": false},
                {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "late"}], "is_error": true},
                {"type": "tool_result", "tool_use_id": "2", "is_error": true},
                {"type": "text", "text": "And?"}]},
        ]))
        .unwrap();
        let roles: Vec<&str> = said.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "tool", "tool", "user"]);
        assert_eq!(text(&said[1]), ["Rain?", "Or snow?"]);
        let calls = said[2].tool_calls.as_ref().unwrap();
        // Letter by letter as it was sent.
        let arguments = calls[0].function.as_ref().and_then(|function| function.arguments.as_deref()).unwrap();
        assert!(arguments.contains("123456789012345678901234567890"), "{arguments}");
        assert_eq!((text(&said[2]), calls.len()), (vec!["Well."], 2));
        assert_eq!((text(&said[3]), text(&said[4]), text(&said[5])), (vec!["sun"], vec!["Error: late"], vec!["Error"]));
        assert_eq!(said[4].tool_call_id.as_deref(), Some("2"));
    }

    #[test]
    fn what_is_no_text_is_refused_by_its_place() {
        for (messages, param) in [
            (json!([]), "messages"),
            (json!([{"role": "system", "content": "x"}]), "messages.0.role"),
            (json!([{"role": "user", "content": []}]), "messages.0.content"),
            (
                json!([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "source": {}}]}]),
                "messages.0.content.1",
            ),
            (
                json!([{"role": "user", "content": [{"type": "document", "source": {}, "title": "x"}]}]),
                "messages.0.content.0",
            ),
            (
                json!([{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]),
                "messages.0.content.0",
            ),
            (
                json!([{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a b", "input": {}}]}]),
                "messages.0.content.0.name",
            ),
            (
                json!([{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]),
                "messages.0.content.0.content.0",
            ),
        ] {
            let refused = read(messages.clone()).unwrap_err();
            assert_eq!((refused.status, refused.param.as_deref()), (400, Some(param)), "{messages}");
        }
    }
}
