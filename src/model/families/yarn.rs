//! YaRN as a config.json says it.

use super::json::Fields;
use crate::error::Result;
use crate::model::config::RopeScaling;
use serde_json::Value;

/// A scaling, and what follows from the factor by which it stretches positions.
pub(super) struct Yarn {
    pub scaling: RopeScaling,
    /// Rotated queries and keys are multiplied by this.
    pub of_rotated: f32,
    /// Scores are multiplied by this in models that say `mscale_all_dim`.
    pub of_scores: f32,
}

/// 1 + 0.1 times a multiplier times the logarithm of the factor by which positions are stretched.
pub(super) fn magnitude(factor: f64, multiplier: f64) -> f64 {
    if factor > 1.0 { 1.0 + 0.1 * multiplier * factor.ln() } else { 1.0 }
}

/// The field that says how a rotation is scaled, and its value.
pub(super) fn said<'a>(c: &Fields<'a>) -> (&'static str, &'a Value) {
    match &c.json["rope_scaling"] {
        Value::Null => ("rope_parameters", &c.json["rope_parameters"]),
        said => ("rope_scaling", said),
    }
}

/// What a field that names yarn as its kind says; `said` is its name and its value.
pub(super) fn config_json(c: &Fields, said: (&str, &Value)) -> Result<Yarn> {
    let within = Fields { json: said.1, ..*c };
    let at = |part: &str| format!("{}.{part}", said.0);
    let number = |part: &str, usual: Option<f64>| match within.number(part)?.or(usual) {
        Some(number) if number > 0.0 => Ok(number),
        Some(number) => Err(c.bad(&at(part), format!("{number} is not a positive number"))),
        None => Err(c.bad(&at(part), "missing")),
    };
    let factor = number("factor", None)?;
    let of_all = within.number("mscale_all_dim")?.filter(|&multiplier| multiplier != 0.0);
    let of_rotated = match (within.number("attention_factor")?, within.number("mscale")?, of_all) {
        (Some(said), ..) => said,
        (None, Some(own), Some(all)) if own != 0.0 => magnitude(factor, own) / magnitude(factor, all),
        _ => magnitude(factor, 1.0),
    };
    let scaling = RopeScaling::Yarn {
        factor,
        fast: number("beta_fast", Some(32.0))?,
        slow: number("beta_slow", Some(1.0))?,
        original: number("original_max_position_embeddings", None)?,
        rounded: within.flag("truncate")?.unwrap_or(true),
    };
    let of_scores = magnitude(factor, of_all.unwrap_or(0.0)).powi(2) as f32;
    Ok(Yarn { scaling, of_rotated: of_rotated as f32, of_scores })
}
