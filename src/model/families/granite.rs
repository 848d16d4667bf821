//! Granite: Llama with numbers by which embeddings, scores of attention, outputs and logits are scaled.

use super::json::Fields;
use super::keys::Keys;
use super::{Activated, Family, llama};
use crate::error::Result;
use crate::model::Description;
use crate::model::layer::CommonForm;

pub(super) const FAMILY: Family =
    Family { name: "granite", known_as: "granite", config_json, gguf: Some(gguf), ..llama::FAMILY };

/// The scales as files have them.
struct Scales {
    embedding: f64,
    residual: f64,
    /// Scores are products of queries and keys times this.
    scores: f64,
    /// Logits are divided by this.
    logits: f64,
}

fn config_json(c: &Fields) -> Result<Description> {
    let config = c.llama("granite", Activated::SILU)?;
    let scale = |key: &str| Ok(c.number(key)?.unwrap_or(1.0));
    let (scores, logits) = ("attention_multiplier", "logits_scaling");
    let scales = Scales {
        embedding: scale("embedding_multiplier")?,
        residual: scale("residual_multiplier")?,
        scores: scale(scores)?,
        logits: scale(logits)?,
    };
    scales.of(config).map_err(|(of_scores, why)| c.bad(if of_scores { scores } else { logits }, why))
}

/// Readers disagree on what a file without a scale of scores or logits means.
fn gguf(k: &Keys) -> Result<Description> {
    let key = "rope.scaling.finetuned";
    if k.flag(key)? == Some(false) {
        return Err(k.bad(key, "is false: a model without rotation, which is not supported for granite"));
    }
    let config = k.common(k.rms_norm()?, None, Activated::SILU)?;
    let scale = |key: &str| Ok(k.number(key)?.map_or(1.0, f64::from));
    let required = |key: &str| {
        k.number(key)?.map(f64::from).ok_or_else(|| {
            k.bad(key, "missing: readers disagree on what that means; convert the model again, or take its directory")
        })
    };
    let (scores, logits) = ("attention.scale", "logit_scale");
    let scales = Scales {
        embedding: scale("embedding_scale")?,
        residual: scale("residual_scale")?,
        scores: required(scores)?,
        logits: required(logits)?,
    };
    scales.of(config).map_err(|(of_scores, why)| k.bad(if of_scores { scores } else { logits }, why))
}

impl Scales {
    /// The model with all of them; the error says whether the scale of scores or that of logits is wrong, and why.
    fn of(self, config: Description) -> Result<Description, (bool, String)> {
        for (of_scores, scale) in [(true, self.scores), (false, self.logits)] {
            if !(1e-3..=1e3).contains(&scale) {
                return Err((of_scores, format!("is {scale}; it must be 0.001 to 1000")));
            }
        }
        // Queries and keys, all of whose numbers are rotated, have a share each; the engine divides by the root of a head's size.
        let of_rotated = (self.scores * (config.head_dim as f64).sqrt()).sqrt();
        let form = CommonForm { residual_scale: self.residual as f32, rotary_scale: of_rotated as f32, ..config.form };
        let (embedding_scale, logit_scale) = (self.embedding as f32, (1.0 / self.logits) as f32);
        Ok(Description { form, embedding_scale, logit_scale, ..config })
    }
}
