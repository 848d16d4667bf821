//! Falcon, ReluFalcon among it: attention and FFN side by side, after one norm (7B) or a norm each (40B); queries, keys and values in
//! one tensor; LayerNorm, rotation, no gate and no biases.

use super::json::{CONTEXT, Fields};
use super::keys::Keys;
use super::names::{GGUF, Names, QkvRows};
use super::{Activated, Family};
use crate::error::Result;
use crate::model::Description;
use crate::model::config::{Activation, Ffn, Norm};
use crate::model::layer::{CommonForm, Norms};
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "falcon",
    known_as: "falcon (also ReluFalcon)",
    config_json,
    gguf: Some(gguf),
    tensors: |config, _| names(config),
    gguf_tensors,
};

fn config_json(c: &Fields) -> Result<Description> {
    let (hidden, heads) = (c.size("hidden_size")?, c.size("num_attention_heads")?);
    let head_dim = hidden.checked_div(heads).unwrap_or(0);
    // Falcon RW: no rotation, one after the other, biases.
    c.refuse_unless_default("alibi", &Value::Bool(false))?;
    c.refuse_unless_default("bias", &Value::Bool(false))?;
    let new = c.flag("new_decoder_architecture")?.unwrap_or(false);
    if !new {
        c.refuse_unless_default("parallel_attn", &Value::Bool(true))?;
    }
    let kv_heads = match (new, c.flag("multi_query")?.unwrap_or(true)) {
        (false, true) => 1,
        _ => c.optional_size("num_kv_heads")?.unwrap_or(heads),
    };
    let two = new && c.optional_size("num_ln_in_parallel_attn")?.unwrap_or(2) == 2;
    Ok(Description {
        family: "falcon".into(),
        name: c.model_name()?,
        hidden,
        layers: c.layer_count()?,
        heads,
        kv_heads,
        head_dim,
        ffn: c.optional_size("ffn_hidden_size")?.unwrap_or(hidden.saturating_mul(4)),
        vocab: c.size("vocab_size")?,
        context: c.optional_size("max_position_embeddings")?.unwrap_or(CONTEXT),
        window: None,
        norm: Norm::Layer(c.number("layer_norm_epsilon")?.unwrap_or(1e-5) as f32),
        activation: activation(c)?,
        ffn_kind: Ffn::Plain,
        positions: c.rotary(head_dim)?,
        attention_bias: false,
        output_bias: false,
        ffn_bias: false,
        tied: c.flag("tie_word_embeddings")?.unwrap_or(true),
        form: form(two),
        embedding_scale: 1.0,
        logit_scale: 1.0,
        logit_cap: 0.0,
    })
}

/// Falcon's own field is `activation`; a file may say `hidden_act`, too, as long as it says the same.
fn activation(c: &Fields) -> Result<Activation> {
    let (ours, general) = (c.named_activation("activation")?, c.named_activation("hidden_act")?);
    if c.given.is_none() && ours.is_some() && general.is_some() && ours != general {
        return Err(c.bad("hidden_act", "says another function than activation; name it: --activation relu, say"));
    }
    let key = if ours.is_none() && general.is_some() { "hidden_act" } else { "activation" };
    c.ungated_activation("falcon", key, Activation::Gelu)
}

fn gguf(k: &Keys) -> Result<Description> {
    let config = k.common(k.layer_norm()?, None, Activated::GELU_UNGATED)?;
    Ok(Description {
        form: CommonForm { norms: form(k.has("blk.0.attn_norm_2.weight")).norms, ..config.form },
        ..config
    })
}

fn form(two_norms: bool) -> CommonForm {
    let norms = if two_norms { Norms::Parallel } else { Norms::ParallelShared };
    CommonForm { norms, ..CommonForm::default() }
}

fn names(config: &Description) -> Names {
    let qkv = "self_attention.query_key_value";
    let (attention, ffn) = match config.form.norms {
        Norms::ParallelShared => ("input_layernorm", ""),
        _ => ("ln_attn", "ln_mlp"),
    };
    Names {
        outer: "transformer.",
        outside: ["word_embeddings", "lm_head", "", "ln_f"],
        layer: "h.",
        inside: [attention, qkv, qkv, qkv, "self_attention.dense", ffn, "", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
        qkv: QkvRows::Grouped,
        ..super::names::LLAMA
    }
}

/// Where there are two norms, what llama.cpp calls `attn_norm` is the FFN's.
fn gguf_tensors(config: &Description) -> Names {
    let (attention, ffn) = match config.form.norms {
        Norms::ParallelShared => ("attn_norm", ""),
        _ => ("attn_norm_2", "attn_norm"),
    };
    let inside = [attention, "attn_qkv", "attn_qkv", "attn_qkv", "attn_output", ffn, "", "ffn_up", "ffn_down"];
    Names { inside, qkv: QkvRows::Joined, ..GGUF }
}
