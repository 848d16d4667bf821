//! StarCoder2: LayerNorm, rotation, biases everywhere, and FFNs without gates.

use super::json::Fields;
use super::names::{GGUF, LLAMA};
use super::{Activated, Family};
use crate::error::Result;
use crate::model::Description;
use crate::model::config::{Activation, Ffn, Norm};
use crate::model::role::Role;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "starcoder2",
    known_as: "starcoder2",
    config_json,
    gguf: Some(|k| {
        let config = k.common(k.layer_norm()?, None, Activated::GELU_TANH_UNGATED)?;
        Ok(Description { ffn_bias: k.has("blk.0.ffn_up.bias"), ..config })
    }),
    tensors: |_, _| LLAMA.with(Role::Up, "mlp.c_fc").with(Role::Down, "mlp.c_proj"),
    gguf_tensors: |_| GGUF,
};

fn config_json(c: &Fields) -> Result<Description> {
    let activation = c.ungated_activation("starcoder2", "hidden_act", Activation::GeluTanh)?;
    c.refuse_unless_default("mlp_type", &Value::from("default"))?;
    c.refuse_unless_default("norm_type", &Value::from("layer_norm"))?;
    let bias = c.flag("use_bias")?.unwrap_or(true);
    let config = c.llama("starcoder2", Activated::GELU_TANH_UNGATED)?;
    Ok(Description {
        norm: Norm::Layer(c.number("norm_epsilon")?.unwrap_or(1e-5) as f32),
        activation,
        ffn_kind: Ffn::Plain,
        attention_bias: bias,
        output_bias: bias,
        ffn_bias: bias,
        tied: c.flag("tie_word_embeddings")?.unwrap_or(true),
        ..config
    })
}
