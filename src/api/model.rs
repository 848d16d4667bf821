//! What a request needs to know of the model that will answer it.

use super::error::{ApiError, TOO_LONG};
use super::schema::Schemas;
use crate::child::this_program;
use crate::generation::Grammars;
use crate::tokenizer::chat_template::{Input, Message, Renderer};
use crate::tokenizer::{Special, Tokenizer};
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};

/// Bytes per token that no prompt exceeds: a longer one is refused without counting.
const MOST_BYTES_PER_TOKEN: usize = 16;
/// Contexts that are shorter count as this long, so that messages about a prompt that is a little too long tell its tokens.
const LEAST_CONTEXT: usize = 1024;
/// Bytes that /tokenize takes whatever the context: a book is counted chapter by chapter.
const TOKENIZED_BYTES: usize = 1 << 20;
/// Bytes of the text that a token of /detokenize stands for in the mean, at most.
const TEXT_BYTES_PER_TOKEN: usize = 8;

pub struct ServedModel {
    /// What requests call it.
    pub name: String,
    pub tokenizer: Arc<Tokenizer>,
    pub vocab: usize,
    /// Positions of each answer with its prompt.
    pub context: usize,
    /// Seconds since 1970: when it was loaded.
    pub created: u64,
    pub fingerprint: String,
    pub schemas: Schemas,
    grammars: OnceLock<Result<Grammars, String>>,
    renderer: Renderer,
}

impl ServedModel {
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
        let (schemas, grammars) = (Schemas::new(this_program()), OnceLock::new());
        ServedModel { name, tokenizer, vocab, context, created, fingerprint, schemas, grammars, renderer }
    }

    /// As GET /v1/models shows it.
    pub fn card(&self) -> Value {
        json!({
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "dynamicinfer",
            "context_length": self.context,
            "fingerprint": self.fingerprint,
            "chat_template": self.tokenizer.chat_template().is_some(),
        })
    }

    /// Made when the first request wants one: a large vocabulary takes a while.
    pub fn grammars(&self) -> Result<&Grammars, String> {
        self.grammars.get_or_init(|| Grammars::new(&self.tokenizer, self.vocab)).as_ref().map_err(Clone::clone)
    }

    /// Whether a request that names `name` means this model; none and the empty name mean whichever is loaded.
    ///
    /// # Errors
    /// 404 that names what is loaded.
    pub fn check_name(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name {
            None | Some("") => Ok(()),
            Some(name) if name == self.name => Ok(()),
            Some(name) => {
                let message = format!("the model '{}' is not loaded; '{}' is", crate::error::excerpt(name), self.name);
                Err(ApiError { param: Some("model".into()), ..ApiError::new(404, message) }.code("model_not_found"))
            }
        }
    }

    /// Tokens of a prompt as it stands; text that looks like a control token is one.
    ///
    /// # Errors
    /// 400 if it is too long or empty.
    pub fn tokens(&self, param: &str, text: &str) -> Result<Vec<u32>, ApiError> {
        self.check_length(param, text.len())?;
        let tokens =
            self.tokenizer.encode_prompt(text, Special::Parse).map_err(|e| ApiError::field(param, e.to_string()))?;
        self.check_tokens(param, tokens)
    }

    /// Refuses what is too long for the context, and ids that are none.
    ///
    /// # Errors
    /// 400.
    pub fn check_tokens(&self, param: &str, tokens: Vec<u32>) -> Result<Vec<u32>, ApiError> {
        if tokens.is_empty() {
            return Err(ApiError::field(
                param,
                "the prompt is empty, and this model has no token to begin a text with",
            ));
        }
        if let Some(bad) = tokens.iter().find(|&&t| t as usize >= self.vocab) {
            let message = format!("token {bad} is not below the vocabulary size {}", self.vocab);
            return Err(ApiError::field(param, message));
        }
        if tokens.len() >= self.context {
            return Err(ApiError::too_long(param, tokens.len(), false, self.context));
        }
        Ok(tokens)
    }

    fn check_length(&self, param: &str, bytes: usize) -> Result<(), ApiError> {
        let least = bytes / MOST_BYTES_PER_TOKEN;
        if least >= self.context.max(LEAST_CONTEXT) {
            return Err(ApiError::too_long(param, least, true, self.context));
        }
        Ok(())
    }

    /// Bytes that are tokenised for their own sake, and tokens that are made text.
    fn most_tokenized(&self) -> usize {
        TOKENIZED_BYTES.max(MOST_BYTES_PER_TOKEN * self.context)
    }

    /// Tokens of a text that is no prompt.
    ///
    /// # Errors
    /// 400 for one that is many times the context.
    pub fn tokenize(&self, text: &str, special: Special, add_special: bool) -> Result<Vec<u32>, ApiError> {
        let (bytes, most) = (text.len(), self.most_tokenized());
        if bytes > most {
            let message = format!("the text has {bytes} bytes; at most {most} are tokenised at once: send it in parts");
            return Err(ApiError::field("content", message).code(TOO_LONG));
        }
        let tokens = match add_special {
            true => self.tokenizer.encode_prompt(text, special),
            false => self.tokenizer.encode(text, special),
        };
        tokens.map_err(|e| ApiError::field("content", e.to_string()))
    }

    /// The text of tokens that are no answer.
    ///
    /// # Errors
    /// 400 for ids that are none, and for more than a text could have that [`ServedModel::tokenize`] takes.
    pub fn detokenize(&self, tokens: &[u32]) -> Result<String, ApiError> {
        if let Some(bad) = tokens.iter().find(|&&t| t as usize >= self.vocab) {
            let message = format!("token {bad} is not below the vocabulary size {}", self.vocab);
            return Err(ApiError::field("tokens", message));
        }
        // A normaliser may add to a text.
        let most = 2 * self.most_tokenized();
        let bytes: usize = tokens.iter().map(|&id| self.tokenizer.token_bytes(id).map_or(0, <[u8]>::len)).sum();
        if tokens.len() > most || bytes > TEXT_BYTES_PER_TOKEN * most {
            let n = tokens.len();
            let message = format!("{n} tokens of {bytes} bytes; at most {most} are taken at once: send them in parts");
            return Err(ApiError::field("tokens", message).code(TOO_LONG));
        }
        Ok(self.tokenizer.decode(tokens))
    }

    /// Tokens of a conversation, by the model's chat template. A model without one continues the texts as they are,
    /// a line apart.
    ///
    /// # Errors
    /// 400 if the template does not take these messages, or they are too long; 503 if the system has no process to run it.
    pub fn conversation(&self, messages: &[Message]) -> Result<Vec<u32>, ApiError> {
        self.check_length("messages", messages.iter().map(|m| m.content.len()).sum())?;
        let refuse = |e: crate::Error| match e {
            // That is not the messages' doing.
            crate::Error::Memory(_) => ApiError::from(e).retry_after(1),
            e => ApiError::field("messages", e.to_string()),
        };
        let tokens = match self.tokenizer.chat_template() {
            Some(template) => {
                let safe = |m: &Message| Message::new(&m.role, &self.tokenizer.defuse(&m.content));
                let messages: Vec<Message> = messages.iter().map(safe).collect();
                let input = Input::of(template, &messages, &self.tokenizer);
                let text = self.renderer.render(&input, self.tokenizer.path()).map_err(refuse)?;
                // What a template adds is not the asker's, and is tokenised all the same.
                self.check_length("messages", text.len())?;
                self.tokenizer.encode(&text, Special::Parse)
            }
            None => {
                let texts: Vec<&str> = messages.iter().map(|m| m.content.as_str()).collect();
                self.tokenizer.encode_prompt(&texts.join("\n"), Special::AsText)
            }
        };
        self.check_tokens("messages", tokens.map_err(refuse)?)
    }

    /// How a token is written in log probabilities: its text, or its name where it has none.
    pub fn token_json(&self, id: u32) -> (String, Value) {
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        match bytes {
            [] => (self.tokenizer.token_text(id).unwrap_or_default().to_owned(), Value::Null),
            bytes => (String::from_utf8_lossy(bytes).into_owned(), bytes.into()),
        }
    }
}
