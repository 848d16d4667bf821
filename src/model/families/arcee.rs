//! Arcee's AFM: Llama without gates, with ReLU squared, and with YaRN.

use super::json::Fields;
use super::keys::Keys;
use super::names::{GGUF_INTERLEAVED, LLAMA};
use super::{Activated, Family, yarn};
use crate::error::Result;
use crate::model::Description;
use crate::model::config::{Activation, Ffn, Positions, RopeScaling, rope_frequencies};
use crate::model::layer::CommonForm;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "arcee",
    known_as: "arcee",
    config_json,
    gguf: Some(gguf),
    tensors: |_, _| LLAMA,
    gguf_tensors: |_| GGUF_INTERLEAVED,
};

fn config_json(c: &Fields) -> Result<Description> {
    let activation = c.ungated_activation("arcee", "hidden_act", Activation::Relu2)?;
    let of = |c: &Fields| {
        let config = c.llama("arcee", Activated::RELU2_UNGATED)?;
        Ok(Description { activation, ffn_kind: Ffn::Plain, ..config })
    };
    let (key, said) = yarn::said(c);
    let within = Fields { json: said, ..*c };
    if within.text("rope_type")?.or(within.text("type")?) != Some("yarn") {
        return of(c);
    }
    let (yarn, theta) = (yarn::config_json(c, (key, said))?, c.rope_theta()?);
    // As of a model whose rotation is not scaled; how it is rotated is said below.
    let mut all = c.json.clone();
    for key in ["rope_scaling", "rope_parameters"] {
        all[key] = Value::Null;
    }
    Ok(rotated(of(&Fields { json: &all, ..*c })?, theta, &yarn.scaling, yarn.of_rotated))
}

fn gguf(k: &Keys) -> Result<Description> {
    let kind = k.gguf.metadata.str(&format!("{}.rope.scaling.type", k.arch))?;
    if kind != Some("yarn") {
        return k.common(k.rms_norm()?, None, Activated::RELU2_UNGATED);
    }
    let key = "rope.scaling.yarn_log_multiplier";
    if let Some(other) = k.number(key)?.filter(|&multiplier| multiplier != 0.0) {
        return Err(k.bad(key, format!("is {other}; only 0 is supported")));
    }
    let heads = k.required("attention.head_count")?.max(1);
    let head_dim = k.head_dim(k.required("embedding_length")? / heads)?;
    let (scaling, theta) = (k.yarn(true)?, k.rope_base()?);
    let unscaled = Positions::Rope { frequencies: vec![0.0; head_dim.min(1 << 12) / 2] };
    let config = k.common(k.rms_norm()?, Some(unscaled), Activated::RELU2_UNGATED)?;
    Ok(rotated(config, theta, &scaling, scaling.of_rotated()))
}

/// The same with whole heads rotated by this scaling, and what is rotated multiplied by `scale`.
fn rotated(config: Description, theta: f64, scaling: &RopeScaling, scale: f32) -> Description {
    let positions = Positions::Rope { frequencies: rope_frequencies(config.head_dim.min(1 << 12), theta, scaling) };
    Description { positions, form: CommonForm { rotary_scale: scale, ..config.form }, ..config }
}
