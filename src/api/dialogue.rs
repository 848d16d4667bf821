//! A conversation on its way to the model: with what can be called, by the model's chat template.

use super::call_format::CallFormat;
use super::call_grammar::NativeCalls;
use super::error::ApiError;
use super::messages::{ChatMessage, conversation, join_parts};
use super::model::ServedModel;
use super::reading::Reading;
use super::tools::Tools;
use crate::child::Wanted;
use crate::tokenizer::chat_template::Message;
use serde_json::{Map, Value};

/// A conversation as a request has it.
pub struct Dialogue<'a> {
    /// The name of the messages' list in the request.
    pub field: &'a str,
    /// The messages, oldest first.
    pub said: Vec<ChatMessage>,
    /// A system message that comes before them.
    pub instructions: Option<&'a str>,
    /// The text that the answer goes on from.
    pub begun: String,
    /// What the answer may call; `None`: nothing.
    pub tools: Option<Tools>,
    /// Whether it may call several functions.
    pub parallel: bool,
    /// Whether an answer that is no call is JSON.
    pub json: bool,
    /// Variables of the template.
    pub variables: Map<String, Value>,
}

/// How the answers to a conversation are written and read.
#[derive(Debug, Default)]
pub struct Talk {
    /// What they may call; `None`: nothing.
    pub tools: Option<Tools>,
    /// Their calls, where the model was trained for some.
    pub native: Option<NativeCalls>,
    /// How they are read.
    pub reading: Reading,
}

impl Dialogue<'_> {
    /// The prompt's tokens, and how its answers are written.
    ///
    /// # Errors
    /// 400 for messages that cannot be; else as [`ServedModel::conversation`].
    pub fn rendered(mut self, model: &ServedModel, wanted: &Wanted) -> Result<(Vec<u32>, Talk), ApiError> {
        join_parts(&mut self.said, model)?;
        let calls = self.tools.is_some() || self.said.iter().any(ChatMessage::is_about_calls);
        let habits = if calls { model.call_habits()? } else { None };
        let mut messages = conversation(self.field, &self.said, habits)?;
        if let Some(text) = self.instructions {
            match messages.first_mut().filter(|first| first.role == "system") {
                // Templates take one system message.
                Some(first) => first.content = format!("{text}\n\n{}", first.content),
                None => messages.insert(0, Message::new("system", text)),
            }
        }
        if let Some(system) = model.system.as_ref().filter(|_| messages.iter().all(|message| message.role != "system"))
        {
            messages.insert(0, Message::new("system", system));
        }
        if model.tokenizer.chat_template().is_some_and(|template| !template.contains("reasoning_content")) {
            // Harmony's templates refuse a message with calls that has both a text and thoughts.
            let may_think = |message: &&mut Message| message.tool_calls.is_empty() || message.content.is_empty();
            let thinks = messages.iter_mut().filter(may_think);
            thinks.for_each(|message| message.thinking.clone_from(&message.reasoning_content));
        }
        let mut native = None;
        if let Some(tools) = &self.tools {
            match habits {
                Some(habits) => {
                    self.variables.insert("tools".into(), tools.told());
                    let (format, callable) = (habits.format.clone(), tools.callable());
                    native = Some(NativeCalls { format, callable, parallel: self.parallel });
                }
                None => messages = tools.introduced(messages, self.json, model.habits()?.takes_system),
            }
        }
        let prompt = model.conversation(&messages, self.variables, &self.begun, wanted)?;
        let thoughts = model.thoughts()?.cloned();
        let thinking = thoughts.as_ref().is_some_and(|marks| prompt.end.trim_end().ends_with(&marks.open));
        if thinking && !self.begun.is_empty() {
            let why = "this model begins every answer with its thoughts, and cannot go on from a text; end with a message of the user";
            return Err(ApiError::field(self.field, why));
        }
        let format = native.as_ref().map_or_else(CallFormat::told, |native| native.format.clone());
        let calls = self.tools.as_ref().map(|tools| (format, tools.callable()));
        let reading = Reading { calls, thoughts, thinking };
        Ok((prompt.tokens, Talk { tools: self.tools, native, reading }))
    }
}
