//! MiniCPM and MiniCPM-S: Llama with scales on embeddings, on what attention and FFN add to the residual, and on the head's input.

use super::json::Fields;
use super::keys::Keys;
use super::{Activated, Family, llama};
use crate::error::Result;
use crate::model::Description;
use crate::model::layer::CommonForm;

pub(super) const FAMILY: Family =
    Family { name: "minicpm", known_as: "minicpm (also MiniCPM-S)", config_json, gguf: Some(gguf), ..llama::FAMILY };

fn config_json(c: &Fields) -> Result<Description> {
    let config = c.llama("minicpm", Activated::SILU)?;
    let residual = c.required_number("scale_depth")? / (config.layers as f64).sqrt();
    let logits = c.required_number("dim_model_base")? / config.hidden as f64;
    // MiniCPM's own class ties embedding and head where the file does not say.
    let tied = c.flag("tie_word_embeddings")?.unwrap_or(true);
    Ok(scaled(Description { tied, ..config }, c.required_number("scale_emb")?, residual, logits))
}

/// llama.cpp's converter writes three keys for the scales. Older files have none: their readers have the published models' numbers built
/// in.
fn gguf(k: &Keys) -> Result<Description> {
    let config = k.common(k.rms_norm()?, None, Activated::SILU)?;
    let scale = |key: &str| {
        let why = "missing: the file was made by an old converter; convert the model again, or take its directory";
        k.number(key)?.map(f64::from).ok_or_else(|| k.bad(key, why))
    };
    Ok(scaled(config, scale("embedding_scale")?, scale("residual_scale")?, 1.0 / scale("logit_scale")?))
}

fn scaled(config: Description, embedding: f64, residual: f64, logits: f64) -> Description {
    let form = CommonForm { residual_scale: residual as f32, ..config.form };
    Description { form, embedding_scale: embedding as f32, logit_scale: logits as f32, ..config }
}
