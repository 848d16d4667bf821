//! What a request needs to know of the model that will answer it.

use super::call_format::CallFormat;
use super::error::{ApiError, NOT_FOUND, TOO_LONG};
use super::habits::Habits;
use super::probe::{self, CallHabits, Probe, Render};
use super::reading::Thoughts;
use super::schema::Schemas;
use crate::child::{Wanted, this_program};
use crate::engine::sampler::SamplingParams;
use crate::tokenizer::chat_template::{Input, Message, Renderer};
use crate::tokenizer::{MAX_BYTES_PER_TOKEN, Special, Tokenizer, channels};
use serde_json::{Map, Value, json};
use std::sync::{Arc, OnceLock};

/// A shorter context counts as this many tokens in that check, so that a prompt that is a little too long is tokenised and its refusal can
/// tell the exact number.
const MIN_CONTEXT: usize = 1024;
/// Bytes that /tokenize accepts however short the context, for counting the tokens of long texts.
const TOKENIZED_BYTES: usize = 1 << 20;
/// Mean bytes of text per token that /detokenize accepts, at most.
const TEXT_BYTES_PER_TOKEN: usize = 8;

/// The loaded model as requests see it: its names, limits and tokenizer, and how chats and schemas are handled.
pub struct ServedModel {
    /// Its name in requests.
    pub name: String,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Token ids are below this: the number of logits of a position.
    pub vocab: usize,
    /// Tokens of a prompt and its answer together, at most.
    pub context: usize,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// 32 hex digits that identify the content of its file; `system_fingerprint` in answers.
    pub fingerprint: String,
    /// How tokens are drawn for requests that do not say it.
    pub sampling: SamplingParams,
    /// The system message of conversations that have none.
    pub system: Option<String>,
    /// Compiles the JSON schemas of requests.
    pub schemas: Arc<Schemas>,
    renderer: Renderer,
    habits: OnceLock<Habits>,
    calls: OnceLock<Option<CallHabits>>,
    thoughts: OnceLock<Option<Thoughts>>,
}

/// A conversation as the model's chat template has rendered it.
pub struct Prompt {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// How its text ends before what the answer goes on from, some characters of it.
    pub end: String,
}

/// Characters of [`Prompt::end`], at most.
const MAX_END: usize = 64;

impl ServedModel {
    /// `fingerprint` is the model file's. Starts a process for the first chat, if the model has a template.
    pub fn new(
        name: String,
        tokenizer: Arc<Tokenizer>,
        vocab: usize,
        context: usize,
        fingerprint: String,
    ) -> ServedModel {
        let (created, renderer) = (crate::clock::unix_seconds(), Renderer::new(this_program()));
        if tokenizer.chat_template().is_some() {
            renderer.prepare();
        }
        let schemas = Arc::new(Schemas::new(this_program(), tokenizer.clone(), vocab));
        let sampling = SamplingParams::default();
        ServedModel {
            name,
            tokenizer,
            vocab,
            context,
            created,
            fingerprint,
            sampling,
            system: None,
            schemas,
            renderer,
            habits: OnceLock::new(),
            calls: OnceLock::new(),
            thoughts: OnceLock::new(),
        }
    }

    /// The model with other defaults: how tokens are drawn, and the system message.
    #[must_use]
    pub fn with_defaults(self, sampling: SamplingParams, system: Option<String>) -> ServedModel {
        ServedModel { sampling, system, ..self }
    }

    /// The model's entry in GET /v1/models.
    pub fn card(&self) -> Value {
        json!({
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "dynamicinfer",
            "context_length": self.context,
            "fingerprint": self.fingerprint,
            "chat_template": self.tokenizer.chat_template().is_some(),
            "loaded": true,
        })
    }

    /// Checks that the model a request names is this one; `None` and the empty name mean the loaded one. `:latest`, which other programs add
    /// to a name, has no meaning.
    ///
    /// # Errors
    /// 404 that names the loaded model.
    pub fn check_name(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name {
            None | Some("") => Ok(()),
            Some(name) if name == self.name || name.strip_suffix(":latest") == Some(&self.name) => Ok(()),
            Some(name) => {
                let message = format!(
                    "the model '{}' is not loaded; '{}' is, and GET /v1/models lists those that can be",
                    crate::error::excerpt(name),
                    self.name
                );
                Err(ApiError { param: Some("model".into()), ..ApiError::new(404, message) }.code(NOT_FOUND))
            }
        }
    }

    /// Tokenises a prompt, BOS first if the model wants it; text that looks like a control token becomes one. `param` is the field it came
    /// from.
    ///
    /// # Errors
    /// 400 if it is empty or does not fit the context.
    pub fn tokens(&self, param: &str, text: &str) -> Result<Vec<u32>, ApiError> {
        self.check_length(param, text.len())?;
        let tokens = self
            .tokenizer
            .encode_prompt(text, Special::Parse)
            .map_err(|e| ApiError::field(param, e.without_folder()))?;
        self.check_tokens(param, tokens)
    }

    /// Returns `tokens` if they can be a prompt. `param` is their field.
    ///
    /// # Errors
    /// 400 if there are none, if one is not in the vocabulary, or if they leave no room in the context.
    pub fn check_tokens(&self, param: &str, tokens: Vec<u32>) -> Result<Vec<u32>, ApiError> {
        if tokens.is_empty() {
            return Err(ApiError::field(
                param,
                "the prompt is empty, and this model has no token that begins a text; write a prompt",
            ));
        }
        if let Some(bad) = tokens.iter().find(|&&t| t as usize >= self.vocab) {
            let message = format!("token {bad} is outside the vocabulary of {} tokens", self.vocab);
            return Err(ApiError::field(param, message));
        }
        if tokens.len() >= self.context {
            return Err(ApiError::too_long(param, tokens.len(), false, self.context));
        }
        Ok(tokens)
    }

    /// Refuses a text so long that its tokens cannot fit the context, without tokenising it.
    ///
    /// # Errors
    /// 400.
    pub fn check_length(&self, param: &str, bytes: usize) -> Result<(), ApiError> {
        let least = bytes / MAX_BYTES_PER_TOKEN;
        if least >= self.context.max(MIN_CONTEXT) {
            return Err(ApiError::too_long(param, least, true, self.context));
        }
        Ok(())
    }

    /// Bytes of text that /tokenize accepts; /detokenize accepts twice as many tokens.
    fn most_tokenized(&self) -> usize {
        TOKENIZED_BYTES.max(MAX_BYTES_PER_TOKEN * self.context)
    }

    /// Tokens of a text that need not fit the context, with BOS if `add_special` and the model wants it.
    ///
    /// # Errors
    /// 400 for a text many times as long as the context.
    pub fn tokenize(&self, text: &str, special: Special, add_special: bool) -> Result<Vec<u32>, ApiError> {
        let (bytes, most) = (text.len(), self.most_tokenized());
        if bytes > most {
            let message = format!("the text has {bytes} bytes; the limit is {most}: send it in parts");
            return Err(ApiError::field("content", message).code(TOO_LONG));
        }
        let tokens = match add_special {
            true => self.tokenizer.encode_prompt(text, special),
            false => self.tokenizer.encode(text, special),
        };
        tokens.map_err(|e| ApiError::field("content", e.without_folder()))
    }

    /// The text of any tokens.
    ///
    /// # Errors
    /// 400 for an id that is not in the vocabulary, and for more tokens or text than a text that [`ServedModel::tokenize`] accepts can
    /// have.
    pub fn detokenize(&self, tokens: &[u32]) -> Result<String, ApiError> {
        if let Some(bad) = tokens.iter().find(|&&t| t as usize >= self.vocab) {
            let message = format!("token {bad} is outside the vocabulary of {} tokens", self.vocab);
            return Err(ApiError::field("tokens", message));
        }
        // Normalisation may lengthen a text.
        let most = 2 * self.most_tokenized();
        let bytes: usize = tokens.iter().map(|&id| self.tokenizer.token_bytes(id).map_or(0, <[u8]>::len)).sum();
        if tokens.len() > most || bytes > TEXT_BYTES_PER_TOKEN * most {
            let n = tokens.len();
            let message = format!(
                "the request has {n} tokens of {bytes} bytes; the limit is {most}: send them in \
                 parts"
            );
            return Err(ApiError::field("tokens", message).code(TOO_LONG));
        }
        Ok(self.tokenizer.decode(tokens))
    }

    /// Tokens of a conversation, rendered by the model's chat template, which sees `variables`, too, with the text `begun` that the answer
    /// goes on from. A model without a template gets the texts joined by line breaks.
    ///
    /// # Errors
    /// 400 if the template refuses the messages or they are too long; 500 if the template itself is at fault; 503 if its process cannot be
    /// started or was killed.
    pub fn conversation(
        &self,
        messages: &[Message],
        variables: Map<String, Value>,
        begun: &str,
        wanted: &Wanted,
    ) -> Result<Prompt, ApiError> {
        let bytes = |m: &Message| m.content.len() + m.reasoning_content.as_ref().map_or(0, String::len);
        self.check_length("messages", messages.iter().map(bytes).sum::<usize>() + begun.len())?;
        let refuse = |e: crate::Error| match e {
            // Lack of memory is not the fault of the messages.
            crate::Error::Memory(_) => ApiError::from(e).retry_after(1),
            crate::Error::BadFile(bad) => broken_template(&bad),
            e => ApiError::field("messages", e.without_folder()),
        };
        let mut end = String::new();
        let tokens = match self.tokenizer.chat_template() {
            Some(template) => {
                let messages: Vec<Message> = messages.iter().map(|m| harmless(m, &self.tokenizer)).collect();
                let mut variables = Value::Object(variables);
                defuse(&mut variables, &self.tokenizer);
                let mut input = Input::of(template, &messages, &self.tokenizer);
                if let Value::Object(variables) = variables {
                    input.extras.extend(variables);
                }
                let text = self.renderer.render(&input, self.tokenizer.path(), wanted).map_err(refuse)?;
                // A template may add text of any length, which is tokenised as well.
                self.check_length("messages", text.len())?;
                end = text.chars().rev().take(MAX_END).collect::<Vec<_>>().into_iter().rev().collect();
                self.tokenizer.encode_chat(&(text + &self.tokenizer.defuse(begun)))
            }
            None => {
                let begun = Some(begun).filter(|begun| !begun.is_empty());
                let texts: Vec<&str> = messages.iter().map(|m| m.content.as_str()).chain(begun).collect();
                self.tokenizer.encode_prompt(&texts.join("\n"), Special::AsText)
            }
        };
        Ok(Prompt { tokens: self.check_tokens("messages", tokens.map_err(refuse)?)?, end })
    }

    /// How this model's template treats messages; it is rendered for that when this is called first.
    ///
    /// # Errors
    /// 503 if the process that renders cannot be started.
    pub fn habits(&self) -> Result<&Habits, ApiError> {
        if let Some(known) = self.habits.get() {
            return Ok(known);
        }
        let of = |messages| self.probed(Probe { messages, tools: Value::Null, prompt: true });
        let found = match self.tokenizer.chat_template() {
            None => Habits::plain(),
            Some(_) => Habits::of(&of).map_err(|error| ApiError::from(error).retry_after(1))?,
        };
        Ok(self.habits.get_or_init(|| found))
    }

    /// How this model's template takes functions and their calls; `None` if it does not, or in no way that is known.
    ///
    /// # Errors
    /// As [`ServedModel::habits`].
    pub fn call_habits(&self) -> Result<Option<&CallHabits>, ApiError> {
        let in_channels = |habits: CallHabits| {
            let is_head = habits.format.marks().any(|mark| mark.trim() == channels::ARGUMENTS);
            is_head.then(|| CallHabits { format: CallFormat::in_channels(), ..habits })
        };
        let known = |render: &Render<'_>| {
            let found = CallHabits::of(render)?;
            Ok(if self.tokenizer.markers().is_some() { found.and_then(in_channels) } else { found })
        };
        self.found(&self.calls, &known)
    }

    /// How this model writes thoughts; `None` if it has none.
    ///
    /// # Errors
    /// As [`ServedModel::habits`].
    pub fn thoughts(&self) -> Result<Option<&Thoughts>, ApiError> {
        // Those in channels are told apart by their tokens.
        let in_text = |render: &Render<'_>| match self.tokenizer.markers() {
            Some(_) => Ok(None),
            None => probe::thoughts_of(render),
        };
        self.found(&self.thoughts, &in_text)
    }

    /// What rendering the template shows, found when it is asked for first.
    fn found<'a, T>(
        &self,
        known: &'a OnceLock<Option<T>>,
        of: &dyn Fn(&Render<'_>) -> crate::error::Result<Option<T>>,
    ) -> Result<Option<&'a T>, ApiError> {
        if known.get().is_none() {
            let found = match self.tokenizer.chat_template() {
                None => None,
                Some(_) => of(&|probe| self.probed(probe)).map_err(|error| ApiError::from(error).retry_after(1))?,
            };
            known.get_or_init(|| found);
        }
        Ok(known.get().and_then(Option::as_ref))
    }

    /// What the template makes of a probe.
    fn probed(&self, probe: Probe) -> crate::error::Result<String> {
        let Probe { messages, tools, prompt } = probe;
        let template = self.tokenizer.chat_template().unwrap_or_default();
        let mut input = Input { messages, add_generation_prompt: prompt, ..Input::of(template, &[], &self.tokenizer) };
        if !tools.is_null() {
            input.extras.insert("tools".into(), tools);
        }
        self.renderer.render(&input, self.tokenizer.path(), &Wanted::always())
    }

    /// How a token is written in log probabilities: its text and its bytes. A token without text, such as a control token, has its name and
    /// null.
    pub fn token_json(&self, id: u32) -> (String, Value) {
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        match bytes {
            [] => (self.tokenizer.token_text(id).unwrap_or_default().to_owned(), Value::Null),
            bytes => (String::from_utf8_lossy(bytes).into_owned(), bytes.into()),
        }
    }
}

/// 500 for a chat template that cannot be rendered: the request is not to blame. The file's path is in the log alone, because clients may
/// be strangers.
fn broken_template(bad: &crate::error::BadFile) -> ApiError {
    tracing::warn!(%bad, "the chat template cannot be rendered");
    let reason = crate::error::printable(&bad.reason);
    let message = format!("the model's chat template cannot be rendered: {reason}; the request is not at fault");
    ApiError::new(500, message).code("bad_chat_template")
}

/// A message in which no text is a control token.
fn harmless(message: &Message, tokenizer: &Tokenizer) -> Message {
    let mut tool_calls = Value::from(message.tool_calls.clone());
    defuse(&mut tool_calls, tokenizer);
    let safe = |text: &Option<String>| text.as_deref().map(|text| tokenizer.defuse(text));
    Message {
        role: message.role.clone(),
        content: tokenizer.defuse(&message.content),
        reasoning_content: safe(&message.reasoning_content),
        thinking: safe(&message.thinking),
        tool_calls: tool_calls.as_array().cloned().unwrap_or_default(),
        tool_call_id: safe(&message.tool_call_id),
        name: safe(&message.name),
    }
}

/// Makes all texts of a value harmless ([`Tokenizer::defuse`]).
fn defuse(value: &mut Value, tokenizer: &Tokenizer) {
    match value {
        Value::String(text) => *text = tokenizer.defuse(text),
        Value::Array(items) => items.iter_mut().for_each(|item| defuse(item, tokenizer)),
        Value::Object(map) => {
            for (name, mut inner) in std::mem::take(map) {
                defuse(&mut inner, tokenizer);
                map.insert(tokenizer.defuse(&name), inner);
            }
        }
        _ => {}
    }
}
