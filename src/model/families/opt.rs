//! OPT: LayerNorm, learned positions, biases everywhere, no gate.

use super::json::{CONTEXT, Fields};
use super::keys::Keys;
use super::names::{GGUF, Names};
use super::{Activated, Family, ungated};
use crate::error::Result;
use crate::model::Description;
use crate::model::config::{Activation, Ffn, Norm, Positions};
use crate::model::layer::CommonForm;
use serde_json::Value;

/// The table of positions has two rows before that of position 0.
const POSITIONS: Positions = Positions::Learned { offset: 2 };

pub(super) const FAMILY: Family = Family {
    name: "opt",
    known_as: "opt",
    config_json,
    gguf: Some(gguf),
    tensors: |_, _| NAMES,
    gguf_tensors: |_| GGUF,
};

fn config_json(c: &Fields) -> Result<Description> {
    let hidden = c.size("hidden_size")?;
    let heads = c.size("num_attention_heads")?;
    c.refuse_unless_default("do_layer_norm_before", &Value::Bool(true))?;
    c.refuse_unless_default("enable_bias", &Value::Bool(true))?;
    c.refuse_unless_default("layer_norm_elementwise_affine", &Value::Bool(true))?;
    c.refuse_unless_default("_remove_final_layer_norm", &Value::Bool(false))?;
    c.refuse_unless_default("word_embed_proj_dim", &Value::from(hidden))?;
    let key = "activation_function";
    let activation = match c.given {
        Some(given) => given,
        None => c.named_activation(key)?.unwrap_or(Activation::Relu.into()),
    };
    Ok(Description {
        family: "opt".into(),
        name: c.model_name()?,
        hidden,
        layers: c.layer_count()?,
        heads,
        kv_heads: heads,
        head_dim: hidden.checked_div(heads).unwrap_or(0),
        ffn: c.size("ffn_dim")?,
        vocab: c.size("vocab_size")?,
        context: c.optional_size("max_position_embeddings")?.unwrap_or(CONTEXT),
        window: None,
        norm: Norm::Layer(1e-5),
        activation: ungated(c.path, key, activation, "opt")?,
        ffn_kind: Ffn::Plain,
        positions: POSITIONS,
        attention_bias: true,
        output_bias: true,
        ffn_bias: true,
        tied: c.flag("tie_word_embeddings")?.unwrap_or(true),
        form: CommonForm::default(),
        embedding_scale: 1.0,
        logit_scale: 1.0,
        logit_cap: 0.0,
    })
}

fn gguf(k: &Keys) -> Result<Description> {
    let config = k.common(k.layer_norm()?, Some(POSITIONS), Activated::RELU_UNGATED)?;
    Ok(Description { ffn_bias: true, ..config })
}

const NAMES: Names = Names {
    outer: "model.",
    outside: ["decoder.embed_tokens", "lm_head", "decoder.embed_positions", "decoder.final_layer_norm"],
    layer: "decoder.layers.",
    inside: [
        "self_attn_layer_norm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
        "final_layer_norm",
        "",
        "fc1",
        "fc2",
    ],
    ..super::names::LLAMA
};
