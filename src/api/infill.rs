//! POST /infill in the form of llama.cpp's server, which editors ask, and `suffix` of other APIs: what is missing in a text.

use super::error::ApiError;
use super::fields::TextOr;
use super::model::ServedModel;
use super::reading::Part;
use super::request::{Asker, Common, Generates, Plan, fields, room};
use super::stream::{Prepared, Wire};
use super::unknown::{Given, open_object};
use super::writing::{Response, WritesParts};
use crate::clock::Duration;
use crate::generation::{Done, Reason};
use crate::tokenizer::infill::Infill;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Other files of a request, at most.
const MAX_FILES: usize = 256;
/// Of the context, what the prompt leaves for an answer whose length the request does not say.
const ANSWER: usize = 4;

fields! {
    /// Body of POST /infill. A field that is not listed is refused by name; `None` is a field that was left out.
    InfillRequest, INFILL_FIELDS {
        /// Name of the loaded model, or empty. `None`: whichever is loaded.
        model: String,
        /// The text before the gap.
        input_prefix: String,
        /// The text behind the gap.
        input_suffix: String,
        /// Other files, which come before both; the last ones are kept where not all fit.
        input_extra: Vec<ExtraFile>,
        /// What the missing text begins with, as far as it is there already.
        prompt: String,
        /// Tokens of the answer at most; 0: the prompt is read for the next request, and nothing is answered; below 0 or `None`: as many as
        /// the context has room for.
        n_predict: i64,
        /// Milliseconds from the first token after which an answer ends that has a line break; 0 or `None`: it takes as long as it takes.
        t_max_predict_ms: i64,
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
        /// Accepted and ignored, as the fields that follow: lines of any indentation are answered.
        n_indent: Given,
        /// Keys and values of prompts are kept without being asked for.
        cache_prompt: Given,
        /// Any free slot answers.
        id_slot: Given,
        /// The order of the ways to draw.
        samplers: Given,
        /// Prompts have no limit of time.
        t_max_prompt_ms: Given,
        /// The whole answer is sent.
        response_fields: Given,
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

/// The prompt for what is missing between two texts; `param` is the field of the text before it.
///
/// # Errors
/// 400 where the model has no tokens for that, and for texts that no context has room for.
pub fn between(
    model: &ServedModel,
    param: &str,
    files: &[(String, String)],
    before: &str,
    behind: &str,
) -> Result<Infill, ApiError> {
    let bytes = files.iter().map(|(name, text)| name.len() + text.len()).sum::<usize>() + before.len() + behind.len();
    model.check_length(param, bytes)?;
    let made = Infill::new(&model.tokenizer, files, before, behind);
    made.map_err(|e| ApiError::field(param, e.without_folder()))?.ok_or_else(|| {
        ApiError::field(
            "suffix",
            "this model has no tokens for filling in and only continues a text; leave the text behind the gap out, or ask a model of code",
        )
    })
}

/// The names of the tokens that end what was missing.
pub fn ends(model: &ServedModel) -> Vec<String> {
    let marks = model.tokenizer.infill_marks().into_iter().flat_map(|marks| &marks.ends);
    marks.filter_map(|&id| model.tokenizer.token_text(id)).map(str::to_owned).collect()
}

/// A whole prompt, which is refused where it does not fit the context, and what ends its answers.
///
/// # Errors
/// As [`between`], and 400 for a prompt that does not fit.
pub fn tokens(
    model: &ServedModel,
    plan: &mut Plan,
    param: &str,
    before: &str,
    behind: &str,
) -> Result<Vec<u32>, ApiError> {
    let infill = between(model, param, &[], before, behind)?;
    plan.stop_at(ends(model));
    model.check_tokens(param, infill.tokens())
}

impl Generates for InfillRequest {
    const FIELDS: &'static [&'static str] = INFILL_FIELDS;

    fn prepare(mut self, model: &Arc<ServedModel>, asker: &Asker) -> Result<Prepared, ApiError> {
        let files = self.input_extra.take().unwrap_or_default();
        if files.len() > MAX_FILES {
            let message = format!("the request has {} other files; give at most {MAX_FILES}", files.len());
            return Err(ApiError::field("input_extra", message));
        }
        let files = files.into_iter().map(|file| (file.filename.unwrap_or_default(), file.text.unwrap_or_default()));
        let texts = [self.input_prefix.take(), self.input_suffix.take(), self.prompt.take()];
        let [before, behind, begun] = texts.map(Option::unwrap_or_default);
        let mut infill = between(model, "input_prefix", &files.collect::<Vec<_>>(), &before, &behind)?;
        let begun = model.tokenize(&begun, crate::tokenizer::Special::AsText, false)?;
        // At most half of the context is kept for the answer.
        let asked = self.n_predict.and_then(|n| usize::try_from(n).ok());
        let kept = asked.map_or(model.context / ANSWER, |n| n.min(model.context / 2)).max(1) + begun.len();
        let truncated = infill.fit(model.context.saturating_sub(kept));
        let prompt = model.check_tokens("input_prefix", [infill.tokens(), begun].concat())?;
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
        let stops = plan.stops().to_vec();
        plan.stop_at(ends(model));
        let asked = asked.map(|n| n.max(1) as u64);
        let max_tokens = room("n_predict", asked, prompt.len(), model.context)?;
        let mut jobs = plan.jobs(asker.client, prompt, max_tokens, None, false);
        let max_time = self.t_max_predict_ms.and_then(|ms| u64::try_from(ms).ok()).filter(|&ms| ms > 0);
        jobs.iter_mut().for_each(|job| job.max_time = max_time.map(Duration::from_millis));
        let mut prepared = plan.prepared(Wire::Infill, format!("infill-{}", asker.id), model, jobs)?;
        let reads_only = self.n_predict == Some(0);
        prepared.answer.echo = Arc::new(json!({"stops": stops, "truncated": truncated, "reads_only": reads_only}));
        Ok(prepared)
    }
}

/// Writes an answer of POST /infill.
#[derive(Debug)]
pub struct InfillEvents;

fn object(of: &Response, text: &str) -> Value {
    let text = if of.echo["reads_only"] == true { "" } else { text };
    json!({"index": 0, "content": text, "tokens": [], "stop": false, "id_slot": -1, "model": of.model.name})
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// What the last object says of the whole answer.
fn ended(object: &mut Value, of: &Response, done: &Done) {
    let stops = of.echo["stops"].as_array().map_or(&[][..], Vec::as_slice);
    let word = done.stopped_by.and_then(|i| stops.get(i));
    object["stop"] = true.into();
    object["stop_type"] = match done.reason {
        Reason::Length => "limit",
        Reason::Stop if word.is_some() => "word",
        Reason::Stop => "eos",
    }
    .into();
    object["stopping_word"] = word.cloned().unwrap_or_else(|| "".into());
    object["truncated"] = of.echo["truncated"].clone();
    object["tokens_evaluated"] = done.prompt_tokens.into();
    object["tokens_cached"] = done.cached_tokens.into();
    object["tokens_predicted"] = done.generated_tokens.into();
    let rates = |name: &str, n: usize, time: Duration| {
        let (n, ms) = (n as f64, milliseconds(time));
        let per = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        [
            (format!("{name}_n"), n.into()),
            (format!("{name}_ms"), ms.into()),
            (format!("{name}_per_token_ms"), per(ms, n).into()),
            (format!("{name}_per_second"), per(n * 1e3, ms).into()),
        ]
    };
    let read = rates("prompt", done.prompt_tokens - done.cached_tokens, done.prompt_time);
    let written = rates("predicted", done.generated_tokens, done.generation_time);
    object["timings"] = read.into_iter().chain(written).collect::<serde_json::Map<String, Value>>().into();
}

impl WritesParts for InfillEvents {
    fn begin(&mut self, _of: &Response) -> Vec<Value> {
        Vec::new()
    }

    fn part(&mut self, of: &Response, part: &Part) -> Vec<Value> {
        let Part::Text(text) = part else { return Vec::new() };
        vec![object(of, text)]
    }

    fn end(&mut self, of: &Response, done: &Done) -> Vec<Value> {
        let mut last = object(of, "");
        ended(&mut last, of, done);
        vec![last]
    }

    fn whole(&mut self, of: &Response, parts: &[Part], done: &Done) -> Value {
        let text = |part: &Part| if let Part::Text(text) = part { text.clone() } else { String::new() };
        let mut whole = object(of, &parts.iter().map(text).collect::<String>());
        ended(&mut whole, of, done);
        whole
    }
}
