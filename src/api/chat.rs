//! POST /v1/chat/completions.

use super::error::ApiError;
use super::fields::TextOr;
use super::model::ServedModel;
use super::request::{Asker, Biases, Generates, MAX_TOP_LOGPROBS, ResponseFormat, StreamOptions, request, room};
use super::stream::{Prepared, Wire};
use super::tools::{FunctionCall, Tools, check_name};
use crate::engine::sampler::SamplingParams;
use crate::tokenizer::chat_template::Message;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use std::collections::HashMap;
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
        /// Whether generation continues after the model's end-of-text token. `None`: no.
        ignore_eos: bool,
        /// Functions that the answer may call, 128 at most ([`super::tools`]).
        #[serde(deserialize_with = "super::fields::tree")]
        tools: Value,
        /// `auto`, `none`, `required`, or the function to call. `None`: `auto`.
        #[serde(deserialize_with = "super::fields::tree")]
        tool_choice: Value,
        /// Variables of the model's chat template, such as `enable_thinking`: an object. A model without a template has none.
        #[serde(deserialize_with = "super::fields::tree")]
        chat_template_kwargs: Value,
        /// Accepted and ignored: the template decides how long a model thinks.
        reasoning_effort: IgnoredAny,
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
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
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
    /// Refused unless null: only text can be read.
    pub audio: Option<IgnoredAny>,
    /// Refused unless null: `tool_calls` has taken its place.
    pub function_call: Option<IgnoredAny>,
    /// Accepted and ignored: clients send back all of an answer, and this is about its text and no part of it.
    #[serde(rename = "annotations")]
    pub _annotations: Option<IgnoredAny>,
    /// Accepted and ignored: the text once more, as a client's library read it.
    #[serde(rename = "parsed")]
    pub _parsed: Option<IgnoredAny>,
}

/// A call of a function in an earlier message.
#[derive(Debug, Deserialize)]
pub struct PastCall {
    /// As the answer had it.
    pub id: String,
    /// The function and its arguments.
    pub function: CalledFunction,
}

/// The function of a call.
#[derive(Debug, Deserialize)]
pub struct CalledFunction {
    /// Its name.
    pub name: String,
    /// Its arguments, as JSON.
    pub arguments: String,
}

/// A part of a message's content.
#[derive(Debug, Deserialize)]
pub struct ContentPart {
    /// `text` or `refusal`; in the responses API `input_text` or `output_text`. Nothing else is supported.
    #[serde(rename = "type")]
    pub kind: String,
    /// The part's text.
    pub text: Option<String>,
    /// The text of a refusal.
    pub refusal: Option<String>,
}

impl ChatMessage {
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
                let piece = |(i, part): (usize, &ContentPart)| match (&part.text, &part.refusal, part.kind.as_str()) {
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
        let other = self.role != "assistant";
        let refused = [
            ("tool_calls", other && self.tool_calls.is_some(), "only the assistant calls functions; leave it out"),
            (
                "reasoning_content",
                other && self.reasoning_content.is_some(),
                "only the assistant has thoughts; \
                 leave it out",
            ),
            ("reasoning", other && self.reasoning.is_some(), "only the assistant has thoughts; leave it out"),
            ("audio", self.audio.is_some(), "audio cannot be read; send its transcript as content"),
            ("function_call", self.function_call.is_some(), "it is obsolete; send the call in tool_calls"),
        ];
        refused
            .into_iter()
            .find(|(_, is, _)| *is)
            .map_or(Ok(()), |(field, _, why)| Err(ApiError::field(format!("{at}.{field}"), why)))
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

/// The messages of a conversation as templates know them: what functions gave is told by the user, because few templates know a tool.
///
/// # Errors
/// 400 that names the bad message; `field` is the list's name in the request.
pub fn conversation(field: &str, said: &[ChatMessage]) -> Result<Vec<Message>, ApiError> {
    let n = said.len();
    if n == 0 || n > MAX_MESSAGES {
        return Err(ApiError::field(field, format!("the request has {n} messages; give 1 to {MAX_MESSAGES}")));
    }
    let mut messages: Vec<Message> = Vec::with_capacity(n);
    let mut called: HashMap<&str, &str> = HashMap::new();
    for (i, message) in said.iter().enumerate() {
        let at = format!("{field}.{i}");
        message.refuse(&at)?;
        let text = message.text(&at)?;
        match message.role.as_str() {
            // OpenAI's newer name for the system role.
            "developer" => messages.push(Message::new("system", &text)),
            role @ ("system" | "user") => messages.push(Message::new(role, &text)),
            "assistant" => {
                let calls = message.tool_calls.iter().flatten();
                for (j, call) in calls.clone().enumerate() {
                    // A name is repeated for each answer of its function, so a long one would multiply the body.
                    check_name(&format!("{at}.tool_calls.{j}.function.name"), &call.function.name)?;
                    called.insert(&call.id, &call.function.name);
                }
                let calls = calls.map(|call| FunctionCall::said(&call.function.name, &call.function.arguments));
                let text: Vec<String> = Some(text).filter(|text| !text.is_empty()).into_iter().chain(calls).collect();
                let reasoning_content = message.thought().cloned();
                messages.push(Message { reasoning_content, ..Message::new("assistant", &text.join("\n")) });
            }
            "tool" => {
                let text = format!("The function {} returned:\n{text}", message.answers(&at, &called)?);
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
        let is_text = |part: &ContentPart| matches!(part.kind.as_str(), "text" | "input_text" | "output_text");
        if parts.len() > 1 && parts.iter().all(|part| is_text(part) && part.text.is_some()) {
            let texts: Vec<String> = parts.iter_mut().filter_map(|part| part.text.take()).collect();
            parts.truncate(1);
            parts[0].text = Some(texts.join(&model.habits()?.between_parts));
        }
    }
    Ok(())
}

/// The field `chat_template_kwargs`: variables of the model's chat template.
///
/// # Errors
/// 400 for what is no object, and for variables that the request has in another place.
fn variables(given: Option<Value>) -> Result<Map<String, Value>, ApiError> {
    /// Where a request has what a template finds in them.
    const OWN: [(&str, &str); 6] = [
        ("messages", "the field messages has them"),
        ("tools", "the field tools has them"),
        ("add_generation_prompt", "a prompt always ends where the answer begins"),
        ("chat_template", "the model has its own"),
        ("bos_token", "the model has its own"),
        ("eos_token", "the model has its own"),
    ];
    const FIELD: &str = "chat_template_kwargs";
    match given {
        None => Ok(Map::new()),
        Some(Value::Object(given)) => match OWN.into_iter().find(|(name, _)| given.contains_key(*name)) {
            None => Ok(given),
            Some((name, why)) => {
                Err(ApiError::field(format!("{FIELD}.{name}"), format!("'{name}' cannot be set: {why}")))
            }
        },
        Some(_) => Err(ApiError::field(FIELD, format!("{FIELD} must be an object of names and values"))),
    }
}

impl ChatRequest {
    /// Checks the values of all fields that can be checked without the model and the messages.
    ///
    /// # Errors
    /// 400 that names the bad field.
    pub fn check_values(mut self) -> Result<(), ApiError> {
        for (field, asked) in [("max_tokens", self.max_tokens), ("max_completion_tokens", self.max_completion_tokens)] {
            room(field, asked, 0, usize::MAX)?;
        }
        variables(self.chat_template_kwargs.take())?;
        let mut common = self.common();
        common.sampling(SamplingParams::default(), 0)?;
        common.stops().map(drop)
    }
}

impl Generates for ChatRequest {
    const FIELDS: &'static [&'static str] = CHAT_FIELDS;

    fn prepare(mut self, model: &Arc<ServedModel>, asker: &Asker) -> Result<Prepared, ApiError> {
        let Asker { client, id, fresh_seed, wanted } = asker;
        model.check_name(self.model.as_deref())?;
        let tools = Tools::read(self.tools.take(), self.tool_choice.take())?;
        let mut said = self.messages.take().unwrap_or_default();
        join_parts(&mut said, model)?;
        let mut messages = conversation("messages", &said)?;
        if let Some(tools) = &tools {
            let json = self.response_format.as_ref().is_some_and(ResponseFormat::is_json);
            messages = tools.introduced(messages, json, model.habits()?.takes_system);
        }
        let logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs: true")),
            (true, top) => {
                let top = top.unwrap_or(0);
                if top > MAX_TOP_LOGPROBS as u64 {
                    let message = format!("top_logprobs is {top}; it must be 0 to {MAX_TOP_LOGPROBS}");
                    return Err(ApiError::field("top_logprobs", message));
                }
                Some(top as usize)
            }
        };
        let plan = self.common().check(model, *fresh_seed)?.with_tools(tools);
        let prompt = model.conversation(&messages, variables(self.chat_template_kwargs.take())?, wanted)?;
        let (param, asked) = match self.max_completion_tokens {
            Some(most) => ("max_completion_tokens", Some(most)),
            None => ("max_tokens", self.max_tokens),
        };
        let max_tokens = room(param, asked, prompt.len(), model.context)?;
        let whole = model.tokenizer.chat_template().is_some() && model.tokenizer.drops_leading_space();
        let jobs = plan.jobs(*client, prompt, max_tokens, logprobs, whole);
        plan.prepared(Wire::Chat, format!("chatcmpl-{id}"), model, jobs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn said(messages: Value) -> Result<Vec<Message>, ApiError> {
        conversation("messages", &serde_json::from_value::<Vec<ChatMessage>>(messages).unwrap())
    }

    fn call(id: &str, name: &str) -> Value {
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}})
    }

    /// One request with a name of megabytes and thousands of answers took as much memory as their product.
    #[test]
    fn an_earlier_call_of_what_is_no_functions_name_is_refused_by_its_field() {
        for bad in [String::new(), "a b".into(), "x".repeat(65), "x".repeat(1 << 20)] {
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
