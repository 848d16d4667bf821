//! Qwen3.5, 3.6 and Qwen3-Next: most layers have a gated delta net, the others attention with a gate and a part of each head rotated. Some are
//! mixtures with a shared expert.

use super::json::{Fields, Routing};
use super::keys::Keys;
use super::names::{DeltaRows, GGUF, LLAMA, Names};
use super::{Activated, Family, glm4, leading, qwen2};
use crate::error::Result;
use crate::model::Description;
use crate::model::described::check_layers;
use crate::model::layer::{CommonForm, LinearAttention, OwnForm, StateRule};
use crate::model::role::Role;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "qwen35",
    known_as: "qwen35",
    config_json: |c| Err(c.bad("model_type", "is the name of GGUFs; a directory's is qwen3_5")),
    gguf: Some(gguf),
    tensors: |config, _| names(config),
    gguf_tensors: |config| gguf_names(config, DeltaRows::Apart),
};

pub(super) const MIXTURE: Family = Family {
    name: "qwen35moe",
    known_as: "qwen35moe",
    config_json: |c| Err(c.bad("model_type", "is the name of GGUFs; a directory's is qwen3_5_moe")),
    ..FAMILY
};

/// The same by the names that its config.json has for it, with and without the part that sees pictures.
pub(super) const DIRECTORY: Family =
    Family { name: "qwen3_5", known_as: "qwen3_5", config_json: |c| config_json(c, "qwen3_5"), gguf: None, ..FAMILY };
pub(super) const TEXT: Family = Family { name: "qwen3_5_text", known_as: "qwen3_5_text", ..DIRECTORY };
pub(super) const DIRECTORY_MIXTURE: Family = Family {
    name: "qwen3_5_moe",
    known_as: "qwen3_5_moe",
    config_json: |c| config_json(c, "qwen3_5_moe"),
    ..DIRECTORY
};
pub(super) const TEXT_MIXTURE: Family =
    Family { name: "qwen3_5_moe_text", known_as: "qwen3_5_moe_text", ..DIRECTORY_MIXTURE };

pub(super) const NEXT: Family = Family {
    name: "qwen3_next",
    known_as: "qwen3_next",
    config_json: |c| config_json(c, "qwen3_next"),
    tensors: |config, _| {
        let names = names(config)
            .with(Role::MixerIn, "linear_attn.in_proj_qkvz")
            .with(Role::DeltaGate, "linear_attn.in_proj_qkvz")
            .with(Role::DeltaBeta, "linear_attn.in_proj_ba")
            .with(Role::DeltaAlpha, "linear_attn.in_proj_ba");
        Names { delta: DeltaRows::Joined, ..names }
    },
    ..DIRECTORY
};
/// The same by the name that GGUFs have for it.
pub(super) const NEXT_GGUF: Family = Family {
    name: "qwen3next",
    known_as: "qwen3next",
    config_json: |c| Err(c.bad("model_type", "is the name of GGUFs; a directory's is qwen3_next")),
    gguf_tensors: |config| {
        let names = gguf_names(config, DeltaRows::BetaAlpha);
        names.with(Role::DeltaBeta, "ssm_ba").with(Role::DeltaAlpha, "ssm_ba")
    },
    ..FAMILY
};

/// One layer of so many has attention where a file does not say it.
const EVERY: usize = 4;
/// Of a head this part is rotated where a file does not say it.
const ROTATED: f64 = 0.25;

/// A directory's weights of norms are those by which 1 is exceeded, but for the norm of what a delta net's heads make.
fn names(config: &Description) -> Names {
    let names = LLAMA
        .with(Role::MixerIn, "linear_attn.in_proj_qkv")
        .with(Role::DeltaGate, "linear_attn.in_proj_z")
        .with(Role::DeltaBeta, "linear_attn.in_proj_b")
        .with(Role::DeltaAlpha, "linear_attn.in_proj_a")
        .with(Role::Taps, "linear_attn.conv1d")
        .with(Role::StepBias, "linear_attn.dt")
        .with(Role::Decay, "linear_attn.A_log")
        .with(Role::StateNorm, "linear_attn.norm")
        .with(Role::MixerOut, "linear_attn.out_proj");
    Names { qkv: glm4::halves(config), norm_offset: 1.0, ..names }
}

fn gguf_names(config: &Description, delta: DeltaRows) -> Names {
    let names = GGUF
        .with(Role::FfnNorm, "post_attention_norm")
        .with(Role::MixerIn, "attn_qkv")
        .with(Role::Taps, "ssm_conv1d")
        .with(Role::MixerOut, "ssm_out");
    Names { qkv: glm4::halves(config), delta, ..names }
}

fn config_json(c: &Fields, family: &str) -> Result<Description> {
    // A model that sees pictures has its text's part by itself.
    let text = if c.json["text_config"].is_object() { &c.json["text_config"] } else { c.json };
    let mut all = text.clone();
    for key in ["_name_or_path", "architectures", "tie_word_embeddings"] {
        if all[key].is_null() {
            all[key] = c.json[key].clone();
        }
    }
    let (kinds, factor) = (all["layer_types"].take(), "partial_rotary_factor");
    let parameters = all["rope_parameters"].clone();
    let within = Fields { json: &parameters, ..*c };
    let rotated = Fields { json: &all, ..*c }.number(factor)?.or(within.number(factor)?).unwrap_or(ROTATED);
    // As of a family that rotates whole heads; what is rotated is set below.
    all[factor] = Value::Null;
    let c = &Fields { json: &all, ..*c };
    c.refuse_unless_default("attn_output_gate", &Value::Bool(true))?;
    c.refuse_unless_default("decoder_sparse_step", &Value::from(1))?;
    c.refuse_unless_default("mlp_only_layers", &Value::Array(Vec::new()))?;
    let config = if all["num_experts"].is_null() {
        c.llama(family, Activated::SILU)?
    } else {
        let keys = ["num_experts", "num_experts_per_tok", "moe_intermediate_size"];
        let normalised = c.flag("norm_topk_prob")?.unwrap_or(true);
        let config = c.mixture(family, Activated::SILU, keys, Routing { normalised, ..Routing::SOFTMAX })?;
        qwen2::with_shared(config, c.size("shared_expert_intermediate_size")?)
    };
    let rotated = (config.head_dim as f64 * rotated) as usize;
    let positions = leading::rotation(config.head_dim, rotated, c.rope_theta()?).map_err(|why| c.bad(factor, why))?;
    let delta = LinearAttention {
        key_heads: c.size("linear_num_key_heads")?,
        rule: StateRule::Delta,
        value_heads: c.size("linear_num_value_heads")?,
        key_dim: c.size("linear_value_head_dim")?,
        head_dim: c.size("linear_value_head_dim")?,
        taps: c.size("linear_conv_kernel_dim")?,
        tiled: false,
    };
    c.refuse_unless_default("linear_key_head_dim", &Value::from(delta.head_dim))?;
    let key = "layer_types";
    let attends: Vec<bool> = match &kinds {
        Value::Array(kinds) => {
            let attends = |kind: &Value| match kind.as_str() {
                Some("full_attention") => Ok(true),
                Some("linear_attention") => Ok(false),
                _ => Err(c.bad(key, format!("names {kind}; known are full_attention and linear_attention"))),
            };
            kinds.iter().map(attends).collect::<Result<_>>()?
        }
        _ => every(config.layers, c.optional_size("full_attention_interval")?.unwrap_or(EVERY)),
    };
    if attends.len() != config.layers {
        return Err(c.bad(key, format!("names {} layers of {}", attends.len(), config.layers)));
    }
    Ok(hybrid(Description { positions, ..config }, &attends, delta))
}

fn gguf(k: &Keys) -> Result<Description> {
    let positions = Some(leading::partial_rotary(k)?);
    let config = match k.experts()? {
        None => k.common(k.rms_norm()?, positions, Activated::SILU)?,
        Some(_) => {
            let config = k.routed(positions, Activated::SILU, Routing::SOFTMAX)?;
            qwen2::with_shared(config, k.required("expert_shared_feed_forward_length")?)
        }
    };
    // A block that predicts later tokens stands behind the others.
    let more = k.size("nextn_predict_layers")?.unwrap_or(0);
    let layers = check_layers(config.layers.saturating_sub(more)).map_err(|why| k.bad("nextn_predict_layers", why))?;
    let (values, value_heads, head_dim) =
        (k.required("ssm.inner_size")?, k.required("ssm.time_step_rank")?, k.required("ssm.state_size")?);
    if Some(values) != value_heads.checked_mul(head_dim) {
        return Err(k.bad("ssm.inner_size", format!("is {values}; it must be {value_heads} heads of {head_dim}")));
    }
    let delta = LinearAttention {
        key_heads: k.required("ssm.group_count")?,
        rule: StateRule::Delta,
        value_heads,
        key_dim: head_dim,
        head_dim,
        taps: k.required("ssm.conv_kernel")?,
        tiled: k.arch != NEXT_GGUF.name,
    };
    let key = "attention.recurrent_layers";
    let attends = match k.gguf.metadata.bools(&format!("{}.{key}", k.arch))? {
        Some(recurs) => recurs.iter().map(|recurs| !recurs).collect(),
        None => every(layers, k.size("full_attention_interval")?.unwrap_or(EVERY)),
    };
    if attends.len() < layers {
        return Err(k.bad(key, format!("names {} layers of {layers}", attends.len())));
    }
    Ok(hybrid(Description { layers, ..config }, &attends[..layers], delta))
}

/// One layer of `every` has attention: the last of them.
fn every(layers: usize, every: usize) -> Vec<bool> {
    (1..=layers).map(|number| number.checked_rem(every) == Some(0)).collect()
}

/// The family's layers: attention with a gate in some, and a delta net in the others.
fn hybrid(config: Description, attends: &[bool], delta: LinearAttention) -> Description {
    let layers: Vec<usize> = (0..config.layers).filter(|&layer| !attends[layer]).collect();
    let own = match layers.is_empty() {
        true => Vec::new(),
        false => vec![OwnForm { layers, linear: Some(delta), ..OwnForm::default() }],
    };
    Description { form: CommonForm { qk_norm: true, gated: true, own, ..config.form }, ..config }
}
