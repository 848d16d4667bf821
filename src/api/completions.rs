//! POST /v1/completions.

use super::error::ApiError;
use super::fields::{Item, TextOr};
use super::model::ServedModel;
use super::request::{Asker, Biases, MOST_CHOICES, ResponseFormat, StreamOptions, request, room};
use super::stream::{Prepared, Wire};
use serde::Deserialize;
use std::sync::Arc;

/// OpenAI's default of this older API.
const DEFAULT_MAX_TOKENS: u64 = 16;
const MOST_LOGPROBS: u64 = 20;

request! {
    /// The request. A field that is not here is refused by its name.
    CompletionRequest, COMPLETION_FIELDS {
        model: String,
        prompt: Item,
        stream: bool,
        stream_options: StreamOptions,
        max_tokens: u64,
        temperature: f32,
        top_p: f32,
        top_k: u64,
        min_p: f32,
        repeat_penalty: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
        seed: i64,
        stop: TextOr<String>,
        n: u64,
        logprobs: u64,
        logit_bias: Biases,
        response_format: ResponseFormat,
        ignore_eos: bool,
        /// Refused unless they change nothing.
        best_of: u64,
        echo: bool,
        suffix: String,
        /// Taken and without effect.
        user: String,
    }
}

/// The tokens of each prompt: texts as they stand, or token ids.
fn prompts(prompt: Item, model: &ServedModel) -> Result<Vec<Vec<u32>>, ApiError> {
    let checked = |ids| model.check_tokens("prompt", ids);
    // Counted before any is tokenised.
    let several = |n: usize| match n {
        1..=MOST_CHOICES => Ok(()),
        n => Err(ApiError::field("prompt", format!("there are {n} prompts; give 1 to {MOST_CHOICES}"))),
    };
    match prompt {
        Item::Text(text) => Ok(vec![model.tokens("prompt", &text)?]),
        Item::Token(_) | Item::Other => Err(ApiError::field(
            "prompt",
            "the prompt is neither a text, nor texts, nor token ids (whole numbers from 0)",
        )),
        Item::Tokens(ids) => several(usize::from(!ids.is_empty())).and_then(|()| Ok(vec![checked(ids)?])),
        Item::Texts(texts) => {
            several(texts.len())?;
            texts.iter().map(|text| model.tokens("prompt", text)).collect()
        }
        Item::Lists(lists) => {
            several(lists.len())?;
            lists.into_iter().map(checked).collect()
        }
    }
}

impl CompletionRequest {
    /// # Errors
    /// 400 with the field that cannot be; 404 for another model.
    pub fn prepare(
        mut self,
        model: &Arc<ServedModel>,
        asker: &Asker,
        id: String,
        fresh_seed: u64,
    ) -> Result<Prepared, ApiError> {
        model.check_name(self.model.as_deref())?;
        if self.echo == Some(true) {
            return Err(ApiError::field("echo", "echo is not supported; put the prompt before the answer yourself"));
        }
        if self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::field(
                "suffix",
                "suffix is not supported: the model continues a text, it fills no gap",
            ));
        }
        if let Some(best_of) = self.best_of.filter(|&best| best != self.n.unwrap_or(1)) {
            return Err(ApiError::field("best_of", format!("best_of is {best_of}; only as many as n are supported")));
        }
        if let Some(top) = self.logprobs.filter(|&top| top > MOST_LOGPROBS) {
            return Err(ApiError::field("logprobs", format!("logprobs is {top}; take 0 to {MOST_LOGPROBS}")));
        }
        let plan = self.common().check(model, fresh_seed)?;
        let prompt = self.prompt.take().ok_or_else(|| ApiError::field("prompt", "the prompt is missing"))?;
        let mut jobs = Vec::new();
        for prompt in prompts(prompt, model)? {
            let max_tokens =
                room("max_tokens", Some(self.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS)), prompt.len(), model.context)?;
            jobs.extend(plan.jobs(model, asker, prompt, max_tokens, self.logprobs.map(|top| top as usize), false)?);
        }
        Ok(plan.prepared(Wire::Text, format!("cmpl-{id}"), model, jobs))
    }
}
