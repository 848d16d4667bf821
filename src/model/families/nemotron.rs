//! Nemotron and Minitron: LayerNorm with weights that are stored less 1, a part of each head rotated, and FFNs without gates, of ReLU squared.

use super::json::Fields;
use super::keys::Keys;
use super::names::{GGUF, LLAMA, Names};
use super::{Activated, Family, glm4, leading};
use crate::error::Result;
use crate::model::Description;
use crate::model::config::{Activation, Ffn, Norm};

pub(super) const FAMILY: Family = Family {
    name: "nemotron",
    known_as: "nemotron (also Minitron)",
    config_json,
    gguf: Some(gguf),
    tensors: |config, _| Names { qkv: glm4::halves(config), norm_offset: 1.0, ..LLAMA },
    // Converters have added the 1.
    gguf_tensors: |config| Names { qkv: glm4::halves(config), ..GGUF },
};

fn config_json(c: &Fields) -> Result<Description> {
    let activation = c.ungated_activation("nemotron", "hidden_act", Activation::Relu2)?;
    let norm = Norm::Layer(c.number("norm_eps")?.unwrap_or(1e-5) as f32);
    let config = glm4::partly_rotated(c, "nemotron", |c| c.llama("nemotron", Activated::RELU2_UNGATED))?;
    Ok(Description { norm, activation, ffn_kind: Ffn::Plain, ..config })
}

fn gguf(k: &Keys) -> Result<Description> {
    let config = k.common(k.layer_norm()?, Some(leading::partial_rotary(k)?), Activated::RELU2_UNGATED)?;
    Ok(Description { ffn_bias: k.has("blk.0.ffn_up.bias"), ..config })
}
