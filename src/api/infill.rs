//! POST /infill in the form of llama.cpp's server, which editors ask, and `suffix` of other APIs: the middle of a text.

use super::error::ApiError;
use super::fields::TextOr;
use super::model::ServedModel;
use super::request::{Asker, Common, Generates, Plan, fields, room};
use super::stream::{Prepared, Wire};
use super::unknown::{Given, open_object};
use crate::clock::Duration;
use crate::generation::LineLimits;
use crate::tokenizer::infill::Infill;
use crate::tokenizer::{MAX_BYTES_PER_TOKEN, Special};
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;

/// Other files of a request, at most.
const MAX_FILES: usize = 256;
/// Names in `response_fields`, at most.
const MAX_RESPONSE_FIELDS: usize = 64;
/// The part of the context that other files may have. It does not depend on the request, so that the files of the next one stand where these do.
const SHARE_OF_FILES: usize = 2;
/// The part of the context that the answer has at least, if it may be as long.
const SHARE_OF_ANSWER: usize = 4;

fields! {
    /// Body of POST /infill. A field that is not listed is refused by name; `None` is a field that was left out.
    InfillRequest, INFILL_FIELDS {
        /// Name of the loaded model, or empty. `None`: whichever is loaded.
        model: String,
        /// The text before the middle; needed.
        input_prefix: String,
        /// The text behind the middle; needed.
        input_suffix: String,
        /// Other files, which come before both; the last ones are kept where not all fit.
        input_extra: Vec<ExtraFile>,
        /// The beginning of the middle, as far as it is there already.
        prompt: String,
        /// Tokens of the answer at most; 0: the prompt is read for the next request, and nothing is answered; below 0 or `None`: as many as
        /// the context has room for.
        n_predict: i64,
        /// Milliseconds from the first token, after which the answer ends with the next line break; 0 or `None`: no limit.
        t_max_predict_ms: i64,
        /// The answer ends before a line with less indentation, in characters; 0 or `None`: no limit.
        n_indent: u64,
        /// As in [`super::completions::CompletionRequest`], as the fields that follow.
        temperature: f32,
        /// Draws from this many of the likeliest tokens.
        top_k: u64,
        /// Draws from the likeliest tokens whose probabilities sum to this.
        top_p: f32,
        /// Draws from tokens at least this many times as likely as the likeliest.
        min_p: f32,
        /// Seed of the random draws; below 0: a new one.
        seed: i64,
        /// The answer ends before the first of these texts.
        stop: TextOr<String>,
        /// Against repetition.
        repeat_penalty: f32,
        /// Against repetition.
        presence_penalty: f32,
        /// Against repetition.
        frequency_penalty: f32,
        /// Whether the answer is sent as server-sent events while it is generated. `None`: no.
        stream: bool,
        /// The fields of the answer that are sent, as `timings/prompt_n`; empty or `None`: all.
        response_fields: Vec<String>,
        /// Accepted and ignored, as the fields that follow: keys and values of prompts are kept without being asked for.
        cache_prompt: Given,
        /// Any free slot answers.
        id_slot: Given,
        /// Tokens are drawn as for other requests.
        samplers: Given,
        /// Prompts have no limit of time.
        t_max_prompt_ms: Given,
    }
}

open_object! {
    /// A file beside the one with the gap.
    pub ExtraFile {
        /// Its name.
        filename as "filename": String,
        /// Its content.
        text as "text": String,
    }
}

/// The prompt for the middle between two texts; `param` is the field of the suffix.
///
/// # Errors
/// 400 where the model has no FIM tokens.
fn between(model: &ServedModel, param: &str, prefix: &str, suffix: &str) -> Result<Infill, ApiError> {
    let made = Infill::new(&model.tokenizer, prefix, suffix);
    made.map_err(|e| ApiError::field(param, e.without_folder()))?.ok_or_else(|| {
        let why = "this model has no FIM tokens and only continues a text; ask a model of code that has them, such as Qwen2.5-Coder";
        ApiError::field(param, why)
    })
}

/// The whole prompt for the middle between two texts, which is refused where it does not fit the context; the plan's answers end where a
/// middle does. `param` is the field of the prefix.
///
/// # Errors
/// 400 for a prompt that does not fit, and where the model has no FIM tokens.
pub fn tokens(
    model: &ServedModel,
    plan: &mut Plan,
    param: &str,
    prefix: &str,
    suffix: &str,
) -> Result<Vec<u32>, ApiError> {
    model.check_length(param, prefix.len() + suffix.len())?;
    let infill = between(model, "suffix", prefix, suffix)?;
    end_with_middle(model, plan);
    model.check_tokens(param, infill.tokens())
}

fn end_with_middle(model: &ServedModel, plan: &mut Plan) {
    plan.end_with(model.tokenizer.fim_tokens().map_or(&[][..], |fim| &fim.ends));
}

/// The end of a text of at most so many bytes.
fn end(text: &str, most: usize) -> &str {
    &text[text.ceil_char_boundary(text.len().saturating_sub(most))..]
}

/// The beginning of a text of at most so many bytes.
fn begin(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

impl InfillRequest {
    /// The prompt, and whether a part of the request was left out of it.
    fn tokens(&mut self, model: &ServedModel) -> Result<(Vec<u32>, bool), ApiError> {
        let needed = |text: Option<String>, param: &str| {
            text.ok_or_else(|| ApiError::field(param, format!("{param} is missing; give the text, which may be empty")))
        };
        let prefix = needed(self.input_prefix.take(), "input_prefix")?;
        let suffix = needed(self.input_suffix.take(), "input_suffix")?;
        let files = self.input_extra.take().unwrap_or_default();
        if files.len() > MAX_FILES {
            let message = format!("the request has {} other files; give at most {MAX_FILES}", files.len());
            return Err(ApiError::field("input_extra", message));
        }
        let begun = self.prompt.take().unwrap_or_default();
        model.check_length("prompt", begun.len())?;
        let begun = model.tokenizer.encode(&begun, Special::AsText);
        let begun = begun.map_err(|e| ApiError::field("prompt", e.without_folder()))?;
        // What cannot fit is not tokenised.
        let most = model.context * MAX_BYTES_PER_TOKEN;
        let mut infill = between(model, "input_suffix", end(&prefix, most), begin(&suffix, most))?;
        let files: Vec<(String, String)> =
            files.into_iter().map(|file| (file.filename.unwrap_or_default(), file.text.unwrap_or_default())).collect();
        let all = infill.add_files(&model.tokenizer, &files, model.context / SHARE_OF_FILES);
        let all = all.map_err(|e| ApiError::field("input_extra", e.without_folder()))?;
        let share = model.context / SHARE_OF_ANSWER;
        let answer = self.limit().map_or(share, |n| n.min(share)).max(1);
        let kept = begun.len() + answer;
        if kept + infill.least() > model.context {
            return Err(ApiError::too_long("prompt", begun.len(), false, model.context));
        }
        let fits = infill.fit(model.context - kept) && prefix.len() <= most && suffix.len() <= most;
        Ok((model.check_tokens("input_prefix", [infill.tokens(), begun].concat())?, !(all && fits)))
    }

    /// Tokens of the answer at most.
    fn limit(&self) -> Option<usize> {
        self.n_predict.and_then(|n| usize::try_from(n).ok())
    }

    /// The names of the fields that are sent.
    fn sent(&mut self) -> Result<Vec<String>, ApiError> {
        let sent = self.response_fields.take().unwrap_or_default();
        match sent.len() {
            0..=MAX_RESPONSE_FIELDS => Ok(sent),
            n => {
                let message = format!("response_fields has {n} names; give at most {MAX_RESPONSE_FIELDS}");
                Err(ApiError::field("response_fields", message))
            }
        }
    }
}

impl Generates for InfillRequest {
    const FIELDS: &'static [&'static str] = INFILL_FIELDS;

    fn prepare(mut self, model: &Arc<ServedModel>, asker: &Asker) -> Result<Prepared, ApiError> {
        let sent = self.sent()?;
        let common = Common {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed.filter(|&seed| seed >= 0),
            stop: self.stop.take(),
            stream: self.stream,
            ..Common::default()
        };
        let mut plan = common.check(model, asker.fresh_seed)?;
        let (prompt, truncated) = self.tokens(model)?;
        end_with_middle(model, &mut plan);
        let asked = self.limit().map(|n| n.max(1) as u64);
        let max_tokens = room("n_predict", asked, prompt.len(), model.context)?;
        let time = self.t_max_predict_ms.and_then(|ms| u64::try_from(ms).ok()).filter(|&ms| ms > 0);
        let indent = usize::try_from(self.n_indent.unwrap_or(0)).unwrap_or(usize::MAX);
        let lines = LineLimits { time: time.map(Duration::from_millis), indent };
        let lines = (time.is_some() || indent > 0).then_some(lines);
        let mut jobs = plan.jobs(asker.client, prompt, max_tokens, None, false);
        jobs.iter_mut().for_each(|job| job.lines = lines);
        let echo = json!({
            "stops": plan.stops(),
            "truncated": truncated,
            "reads_only": self.limit() == Some(0),
            "sent": sent,
        });
        let mut prepared = plan.prepared(Wire::Infill, format!("infill-{}", asker.id), model, jobs)?;
        prepared.answer.echo = Arc::new(echo);
        Ok(prepared)
    }
}
