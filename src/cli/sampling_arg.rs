//! `--temp` and the sampler's other options.

use crate::engine::sampler::SamplingParams;
use crate::error::{Error, Result};
use crate::settings::Settings;
use clap::Args;
use serde_json::{Map, Value, json};

#[derive(Args, Clone, Default)]
pub struct SamplingArgs {
    /// Temperature; 0 always takes the likeliest token [default: 0.8]
    #[arg(long, value_name = "T", alias = "temperature", allow_negative_numbers = true)]
    temp: Option<f32>,
    /// Choose among the K likeliest tokens; 0: all [default: 40]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<usize>,
    /// Choose among the likeliest tokens of this total probability [default: 0.95]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Drop tokens below this share of the likeliest [default: 0.05]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Divide the logits of repeated tokens by this [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,
    /// Subtract this from the logits of repeated tokens [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Subtract this, times their count, from the logits of repeated tokens [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Seed of the sampler: the same seed repeats the text [default: random]
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,
    /// Stop before this text; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Continue after the model's end-of-text token
    #[arg(long)]
    pub ignore_eos: bool,
}

impl SamplingArgs {
    /// The options given, and defaults for the others, with a new seed.
    ///
    /// # Errors
    /// [`Error::Usage`] for a figure that is out of range.
    pub fn params(&self) -> Result<SamplingParams> {
        let d = SamplingParams::default();
        let params = SamplingParams {
            temperature: self.temp.unwrap_or(d.temperature),
            top_k: self.top_k.unwrap_or(d.top_k),
            top_p: self.top_p.unwrap_or(d.top_p),
            min_p: self.min_p.unwrap_or(d.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(d.repeat_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(d.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(d.frequency_penalty),
            seed: self.seed.unwrap_or_else(crate::config::fresh_seed),
            ..d
        };
        params.validate()?;
        Ok(params)
    }

    /// The options given, as fields of a request; the answering engine sets the others.
    ///
    /// # Errors
    /// [`Error::Usage`] for a figure that is out of range.
    pub fn fields(&self) -> Result<Map<String, Value>> {
        self.params()?;
        // The number as given, not the nearest f32 in twice as many digits.
        let number = |value: f32| json!(value.to_string().parse::<f64>().unwrap_or(value.into()));
        let typed = [
            ("temperature", self.temp.map(number)),
            ("top_k", self.top_k.map(|v| json!(v))),
            ("top_p", self.top_p.map(number)),
            ("min_p", self.min_p.map(number)),
            ("repeat_penalty", self.repeat_penalty.map(number)),
            ("presence_penalty", self.presence_penalty.map(number)),
            ("frequency_penalty", self.frequency_penalty.map(number)),
            ("seed", self.seed.map(|v| json!(v))),
            ("stop", (!self.stop.is_empty()).then(|| json!(self.stop))),
            ("ignore_eos", self.ignore_eos.then(|| json!(true))),
        ];
        Ok(typed.into_iter().filter_map(|(field, value)| Some((field.to_owned(), value?))).collect())
    }
}

/// The sampler's settings in the configuration files, for requests that do not set them.
///
/// # Errors
/// [`Error::Usage`] for a figure that is out of range.
pub fn defaults(settings: &Settings) -> Result<SamplingParams> {
    let number = |key: &str| settings.number(key) as f32;
    let params = SamplingParams {
        temperature: number("sampling.temperature"),
        top_k: settings.whole("sampling.top_k") as usize,
        top_p: number("sampling.top_p"),
        min_p: number("sampling.min_p"),
        repeat_penalty: number("sampling.repeat_penalty"),
        ..SamplingParams::default()
    };
    params.validate().map_err(|why| Error::Usage(format!("[sampling]: {why}")))?;
    Ok(params)
}
