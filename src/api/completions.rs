//! POST /v1/completions.

use super::error::ApiError;
use super::fields::{Item, TextOr};
use super::infill;
use super::model::ServedModel;
use super::request::{Asker, Biases, Generates, MAX_CHOICES, ResponseFormat, StreamOptions, request, room};
use super::stream::{Prepared, Wire};
use super::unknown::Given;
use serde::Deserialize;
use std::sync::Arc;

/// OpenAI's default of this older API.
const DEFAULT_MAX_TOKENS: u64 = 16;
/// Likeliest tokens reported at each position, at most.
const MAX_LOGPROBS: u64 = 20;

request! {
    /// Body of POST /v1/completions. A field that is not listed is refused by name; `None` is a field that was left out.
    CompletionRequest, COMPLETION_FIELDS {
        /// Name of the loaded model, or empty. `None`: whichever is loaded.
        model: String,
        /// A text, texts, token ids, or lists of token ids; at most 8 prompts.
        prompt: Item,
        /// Whether the answer is sent as server-sent events while it is generated. `None`: no.
        stream: bool,
        /// Only taken with `stream: true`.
        stream_options: StreamOptions,
        /// Tokens of each answer at most, 1 or more. `None`: 16.
        max_tokens: u64,
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
        /// Answers to each prompt, 1 to [`MAX_CHOICES`]. `None`: 1.
        n: u64,
        /// Reports the log probability of each token of the answer and of this many of the likeliest, 0 to 20. `None`: reports none.
        logprobs: u64,
        /// Added to the logits of single tokens: token id (as text) to a number from -100 to 100.
        logit_bias: Biases,
        /// Plain text, any JSON object, or JSON of a schema. `None`: plain text.
        response_format: ResponseFormat,
        /// Whether generation continues after the model's end-of-text token. `None`: no.
        ignore_eos: bool,
        /// Refused unless equal to `n`.
        best_of: u64,
        /// Refused if true.
        echo: bool,
        /// The text behind the prompt, which must be a text then: the answer is the middle between both.
        suffix: String,
        /// Accepted and ignored, as the fields that follow.
        user: Given,
        /// About the request.
        metadata: Given,
        /// Nothing is stored.
        store: Given,
        /// Keys and values of prompts are kept without being asked for.
        prompt_cache_key: Given,
        /// A hint.
        cache_prompt: Given,
        /// About the client's user.
        safety_identifier: Given,
    }
}

/// The tokens of each text in the field `field`, 1 to `most` of them: texts are tokenised without a template, token ids are checked.
///
/// # Errors
/// 400 for what is no text and no tokens, and for what [`ServedModel::tokens`] refuses.
pub fn prompts(field: &str, prompt: Item, most: usize, model: &ServedModel) -> Result<Vec<Vec<u32>>, ApiError> {
    let checked = |ids| model.check_tokens(field, ids);
    // Their number is checked before any is tokenised.
    let several = |n: usize| match n {
        n if (1..=most).contains(&n) => Ok(()),
        n => Err(ApiError::field(field, format!("the request has {n} {field}s; give 1 to {most}"))),
    };
    match prompt {
        Item::Text(text) => Ok(vec![model.tokens(field, &text)?]),
        Item::Token(_) | Item::Other => Err(ApiError::field(
            field,
            format!("the {field} must be a text, a list of texts, or token ids (whole numbers from 0)"),
        )),
        Item::Tokens(ids) => several(usize::from(!ids.is_empty())).and_then(|()| Ok(vec![checked(ids)?])),
        Item::Texts(texts) => {
            several(texts.len())?;
            texts.iter().map(|text| model.tokens(field, text)).collect()
        }
        Item::Lists(lists) => {
            several(lists.len())?;
            lists.into_iter().map(checked).collect()
        }
    }
}

impl Generates for CompletionRequest {
    const FIELDS: &'static [&'static str] = COMPLETION_FIELDS;

    fn prepare(mut self, model: &Arc<ServedModel>, asker: &Asker) -> Result<Prepared, ApiError> {
        let Asker { client, id, fresh_seed, .. } = asker;
        if self.echo == Some(true) {
            return Err(ApiError::field("echo", "echo is not supported; put the prompt before the answer yourself"));
        }
        if let Some(best_of) = self.best_of.filter(|&best| best != self.n.unwrap_or(1)) {
            return Err(ApiError::field("best_of", format!("best_of is {best_of}; it must equal n")));
        }
        if let Some(top) = self.logprobs.filter(|&top| top > MAX_LOGPROBS) {
            return Err(ApiError::field("logprobs", format!("logprobs is {top}; it must be 0 to {MAX_LOGPROBS}")));
        }
        let mut plan = self.common().check(model, *fresh_seed)?;
        let prompt = self.prompt.take().ok_or_else(|| ApiError::field("prompt", "the prompt is missing"))?;
        let mut jobs = Vec::new();
        let prompts = match (self.suffix.take().filter(|suffix| !suffix.is_empty()), prompt) {
            (None, prompt) => prompts("prompt", prompt, MAX_CHOICES, model)?,
            (Some(suffix), Item::Text(before)) => vec![infill::tokens(model, &mut plan, "prompt", &before, &suffix)?],
            (Some(_), _) => {
                return Err(ApiError::field(
                    "suffix",
                    "suffix goes with a prompt that is one text; give it so, or leave suffix out",
                ));
            }
        };
        for prompt in prompts {
            let max_tokens =
                room("max_tokens", Some(self.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS)), prompt.len(), model.context)?;
            jobs.extend(plan.jobs(*client, prompt, max_tokens, self.logprobs.map(|top| top as usize), false));
        }
        plan.prepared(Wire::Text, format!("cmpl-{id}"), model, jobs)
    }
}
