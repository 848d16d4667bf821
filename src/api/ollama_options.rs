//! The field `options` of ollama's API: how an answer is drawn, and how ollama would run the model.

use super::error::{ApiError, refuse};
use super::fields::TextOr;
use super::model::ServedModel;
use super::request::Common;
use super::unknown::{Given, Unknown};
use serde::Deserialize;

/// The field `options`. Those that chat has, too, mean the same ([`super::chat::ChatRequest`]).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Options {
    /// Tokens of the answer at most; 0 or less: as many as the context has room for.
    num_predict: Option<i64>,
    temperature: Option<f32>,
    top_k: Option<u64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    seed: Option<i64>,
    stop: Option<TextOr<String>>,
    repeat_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    /// Refused if it is more than the context of the loaded model.
    num_ctx: Option<u64>,
    /// Refused unless it is what happens anyway, as the fields that follow.
    repeat_last_n: Option<i64>,
    mirostat: Option<Given>,
    tfs_z: Option<f32>,
    typical_p: Option<f32>,
    penalize_newline: Option<bool>,
    /// Accepted and ignored, as the fields that follow: without `mirostat` they mean nothing.
    #[serde(rename = "mirostat_tau")]
    _mirostat_tau: Option<Given>,
    #[serde(rename = "mirostat_eta")]
    _mirostat_eta: Option<Given>,
    /// No context is shifted.
    #[serde(rename = "num_keep")]
    _num_keep: Option<Given>,
    /// How the model is run, as the fields that follow: that was decided when it was loaded.
    #[serde(rename = "num_batch")]
    _num_batch: Option<Given>,
    #[serde(rename = "num_gpu")]
    _num_gpu: Option<Given>,
    #[serde(rename = "main_gpu")]
    _main_gpu: Option<Given>,
    #[serde(rename = "num_thread")]
    _num_thread: Option<Given>,
    #[serde(rename = "use_mmap")]
    _use_mmap: Option<Given>,
    #[serde(rename = "use_mlock")]
    _use_mlock: Option<Given>,
    #[serde(rename = "low_vram")]
    _low_vram: Option<Given>,
    #[serde(rename = "f16_kv")]
    _f16_kv: Option<Given>,
    #[serde(rename = "numa")]
    _numa: Option<Given>,
    #[serde(rename = "vocab_only")]
    _vocab_only: Option<Given>,
    #[serde(rename = "logits_all")]
    _logits_all: Option<Given>,
    #[serde(rename = "embedding_only")]
    _embedding_only: Option<Given>,
}

impl Options {
    /// Refuses what could change the answer and is not supported; where unknown fields are ignored, so is a larger context.
    ///
    /// # Errors
    /// 400 that names the field.
    pub fn refuse(&self, model: &ServedModel, unknown: &Unknown) -> Result<(), ApiError> {
        let last_n = model.sampling.repeat_last_n as i64;
        refuse([
            ("options.mirostat", self.mirostat.is_some_and(|given| given.0), "mirostat is not supported; leave it out"),
            (
                "options.tfs_z",
                self.tfs_z.is_some_and(|z| z != 1.0),
                "it is not supported; leave it out, or set it to 1",
            ),
            (
                "options.typical_p",
                self.typical_p.is_some_and(|p| p != 1.0),
                "it is not supported; leave it out, or set it to 1",
            ),
            (
                "options.repeat_last_n",
                self.repeat_last_n.is_some_and(|n| n != last_n),
                "penalties look back as far as the loaded model's settings say; leave it out",
            ),
            (
                "options.penalize_newline",
                self.penalize_newline == Some(false),
                "penalties hold for line breaks, too; leave it out",
            ),
        ])?;
        match self.num_ctx.filter(|&asked| asked > model.context as u64) {
            Some(asked) if !unknown.ignores("options.num_ctx") => {
                let context = model.context;
                let message = format!(
                    "num_ctx is {asked}, and the model was loaded with a context of {context} tokens; leave it out, or start \
                     the server with a larger --ctx-size"
                );
                Err(ApiError::field("options.num_ctx", message))
            }
            _ => Ok(()),
        }
    }

    /// Tokens of the answer at most; `None`: as many as the context has room for.
    pub fn limit(&self) -> Option<u64> {
        self.num_predict.and_then(|n| u64::try_from(n).ok()).filter(|&n| n > 0)
    }

    /// The fields that all APIs have.
    pub fn common(self) -> Common {
        Common {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
            stop: self.stop,
            ..Common::default()
        }
    }
}
