//! Nemotron-H, Nemotron Nano 2 and 3: blocks of one part each, by which a mixer (Mamba-2, or attention without positions) and the FFN behind it make
//! a layer. An FFN has no gate and ReLU squared; in some models it is a mixture of experts.

use super::json::{Fields, Routing};
use super::keys::Keys;
use super::leading::Beside;
use super::names::{DeltaRows, ExpertNames, GGUF, LLAMA, Names};
use super::{Activated, Family};
use crate::error::Result;
use crate::model::Description;
use crate::model::config::{Ffn, Positions};
use crate::model::layer::{CommonForm, LinearAttention, OwnFfn, OwnForm, RouterInput, Scoring, StateRule};
use crate::model::role::Role;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "nemotron_h",
    known_as: "nemotron_h",
    config_json,
    gguf: Some(gguf),
    tensors: |_, _| NAMES,
    gguf_tensors: |_| GGUF_NAMES,
};

/// The mixtures by the name that GGUFs have for them.
pub(super) const MIXTURE_GGUF: Family = Family {
    name: "nemotron_h_moe",
    known_as: "nemotron_h_moe",
    config_json: |c| Err(c.bad("model_type", "is the name of GGUFs; a directory's is nemotron_h")),
    ..FAMILY
};

const RELU2: Activated = Activated::RELU2_UNGATED;
const ROUTING: Routing = Routing { scoring: Scoring::Sigmoid, normalised: true, reads: RouterInput::FfnNorm };

const NAMES: Names = {
    let mut names = LLAMA;
    names.outer = "backbone.";
    names.outside = ["embeddings", "lm_head", "", "norm_f"];
    names.inside = [
        "norm",
        "mixer.q_proj",
        "mixer.k_proj",
        "mixer.v_proj",
        "mixer.o_proj",
        "norm",
        "",
        "mixer.up_proj",
        "mixer.down_proj",
    ];
    names.shared = ["", "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj", ""];
    const EACH: &str = "mixer.experts.";
    names.experts = ExpertNames {
        each: [[EACH, ""], [EACH, ".up_proj"], [EACH, ".down_proj"]],
        all: ["", "mixer.experts.up_proj", "mixer.experts.down_proj"],
        gate_and_up: "",
    };
    names = names
        .with(Role::QNorm, "")
        .with(Role::KNorm, "")
        .with(Role::AttnGate, "")
        .with(Role::Router, "mixer.gate")
        .with(Role::SelectionBias, "mixer.gate.e_score_correction")
        .with(Role::MixerIn, "mixer.in_proj")
        .with(Role::DeltaGate, "mixer.in_proj")
        .with(Role::DeltaAlpha, "mixer.in_proj")
        .with(Role::Taps, "mixer.conv1d")
        .with(Role::StepBias, "mixer.dt")
        .with(Role::Decay, "mixer.A_log")
        .with(Role::Skip, "mixer.D")
        .with(Role::StateNorm, "mixer.norm")
        .with(Role::MixerOut, "mixer.out_proj");
    names.delta = DeltaRows::Whole;
    names.apart = true;
    names
};

const GGUF_NAMES: Names = {
    let mut names = GGUF
        .with(Role::FfnNorm, "attn_norm")
        .with(Role::MixerIn, "ssm_in")
        .with(Role::DeltaGate, "ssm_in")
        .with(Role::DeltaAlpha, "ssm_in")
        .with(Role::Taps, "ssm_conv1d")
        .with(Role::MixerOut, "ssm_out");
    names.delta = DeltaRows::Whole;
    names.apart = true;
    names
};

/// What a block of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Mamba,
    Attention,
    /// One FFN, or a mixture.
    Ffn,
}

fn config_json(c: &Fields) -> Result<Description> {
    let blocks = blocks(c)?;
    let mut all = c.json.clone();
    // In the terms of other families. What stands there of a rotation is of no account.
    all["hidden_act"] = all["mlp_hidden_act"].take();
    all["rms_norm_eps"] = match &all["norm_eps"] {
        Value::Null => all["layer_norm_epsilon"].clone(),
        epsilon => epsilon.clone(),
    };
    all["num_hidden_layers"] = Value::from(blocks.len());
    for key in ["partial_rotary_factor", "rope_theta", "rope_scaling", "rope_parameters", "layer_types"] {
        all[key] = Value::Null;
    }
    let c = &Fields { json: &all, ..*c };
    for key in ["use_bias", "mamba_proj_bias"] {
        c.refuse_unless_default(key, &Value::Bool(false))?;
    }
    c.refuse_unless_default("use_conv_bias", &Value::Bool(true))?;
    c.refuse_unless_default("mamba_hidden_act", &Value::from("silu"))?;
    let limits = &all["time_step_limit"];
    if let Some(most) = limits[1].as_f64() {
        return Err(c.bad("time_step_limit", format!("ends steps at {most}, which is not supported")));
    }
    if let Some(least) = limits[0].as_f64().filter(|&least| least != 0.0) {
        return Err(c.bad("time_step_limit", format!("begins steps at {least}, which is not supported")));
    }
    no_latent(c.optional_size("moe_latent_size")?).map_err(|why| c.bad("moe_latent_size", why))?;
    let config = match c.optional_size("n_routed_experts")?.filter(|&count| count > 0) {
        None => c.llama(FAMILY.name, RELU2)?,
        Some(_) => {
            let keys = ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"];
            let normalised = c.flag("norm_topk_prob")?.unwrap_or(true);
            let config = c.mixture(FAMILY.name, RELU2, keys, Routing { normalised, ..ROUTING })?;
            let width = c.optional_size("moe_shared_expert_intermediate_size")?.unwrap_or(config.ffn);
            let beside = Beside {
                groups: [c.optional_size("n_group")?.unwrap_or(0), c.optional_size("topk_group")?.unwrap_or(0)],
                scale: c.number("routed_scaling_factor")?.unwrap_or(1.0) as f32,
                shared: c.optional_size("n_shared_experts")?.unwrap_or(0).saturating_mul(width),
                leading: 0,
                width: 0,
            };
            beside.of(config)
        }
    };
    let mamba = LinearAttention {
        rule: StateRule::Mamba2,
        key_heads: c.size("n_groups")?,
        value_heads: c.size("mamba_num_heads")?,
        key_dim: c.size("ssm_state_size")?,
        head_dim: c.size("mamba_head_dim")?,
        taps: c.size("conv_kernel")?,
        tiled: false,
    };
    layers(config, &blocks, mamba).map_err(|why| c.bad("hybrid_override_pattern", why))
}

/// The blocks of a directory: a letter each, or a list of names.
fn blocks(c: &Fields) -> Result<Vec<Block>> {
    let (pattern, list) = ("hybrid_override_pattern", "layers_block_type");
    let unknown = |key: &str, what: &dyn std::fmt::Display| {
        c.bad(key, format!("names {what}; known are Mamba-2, attention, and FFNs or experts"))
    };
    if let Value::Array(names) = &c.json[list] {
        let block = |name: &Value| match name.as_str() {
            Some("mamba" | "linear_attention") => Ok(Block::Mamba),
            Some("attention" | "full_attention") => Ok(Block::Attention),
            Some("mlp" | "moe") => Ok(Block::Ffn),
            _ => Err(unknown(list, name)),
        };
        return names.iter().map(block).collect();
    }
    let letters = c.text(pattern)?.ok_or_else(|| c.bad(pattern, "missing"))?;
    if letters.contains('-') && letters.contains('E') {
        return Err(c.bad(pattern, "names both FFNs and experts, which is not supported"));
    }
    let block = |letter| match letter {
        'M' => Ok(Block::Mamba),
        '*' => Ok(Block::Attention),
        '-' | 'E' => Ok(Block::Ffn),
        _ => Err(unknown(pattern, &letter)),
    };
    letters.chars().map(block).collect()
}

fn gguf(k: &Keys) -> Result<Description> {
    let list = |key: &str| -> Result<Vec<i32>> {
        let numbers = k.gguf.metadata.i32s(&format!("{}.{key}", k.arch))?;
        numbers
            .map(|numbers| numbers.to_vec())
            .ok_or_else(|| k.bad(key, "is no list, and does not say what each block is"))
    };
    let (kv_key, ffn_key) = ("attention.head_count_kv", "feed_forward_length");
    let (kv_heads, widths) = (list(kv_key)?, list(ffn_key)?);
    // A block that predicts later tokens stands behind the others.
    let more = k.size("nextn_predict_layers")?.unwrap_or(0);
    let count = k.layer_count()?.saturating_sub(more);
    for (key, list) in [(kv_key, &kv_heads), (ffn_key, &widths)] {
        if list.len() < count {
            return Err(k.bad(key, format!("names {} blocks of {count}", list.len())));
        }
    }
    let blocks: Vec<Block> = (0..count)
        .map(|block| match (kv_heads[block] > 0, widths[block] > 0) {
            (true, _) => Block::Attention,
            (false, true) => Block::Ffn,
            (false, false) => Block::Mamba,
        })
        .collect();
    no_latent(k.size("moe_latent_size")?).map_err(|why| k.bad("moe_latent_size", why))?;
    let mut config = match k.experts()? {
        None => k.common(k.rms_norm()?, Some(no_rotation(k)?), RELU2)?,
        Some(_) => {
            let normalised = k.flag("expert_weights_norm")?.unwrap_or(true);
            let config = k.routed(Some(no_rotation(k)?), RELU2, Routing { normalised, ..ROUTING })?;
            let width = k.size("expert_shared_feed_forward_length")?.unwrap_or(config.ffn);
            let beside = Beside {
                groups: [k.size("expert_group_count")?.unwrap_or(0), k.size("expert_group_used_count")?.unwrap_or(0)],
                scale: k.number("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0),
                shared: k.size("expert_shared_count")?.unwrap_or(1).saturating_mul(width),
                leading: 0,
                width: 0,
            };
            beside.of(config)
        }
    };
    let ffns = widths[..count].iter().filter(|&&width| width > 0);
    if let Some(other) = ffns.copied().find(|&width| config.form.experts.is_none() && width as usize != config.ffn) {
        return Err(k.bad(ffn_key, format!("differs from block to block, such as {other}; only one size is supported")));
    }
    config.form.widths = Vec::new();
    let has_bias = |part: &str| (0..count).any(|block| k.has(&format!("blk.{block}.{part}.bias")));
    (config.attention_bias, config.output_bias) = (has_bias("attn_q"), has_bias("attn_output"));
    let (values, value_heads) = (k.required("ssm.inner_size")?, k.required("ssm.time_step_rank")?);
    let head_dim = values.checked_div(value_heads).filter(|each| each * value_heads == values);
    let mamba = LinearAttention {
        rule: StateRule::Mamba2,
        key_heads: k.required("ssm.group_count")?,
        value_heads,
        key_dim: k.required("ssm.state_size")?,
        head_dim: head_dim
            .ok_or_else(|| k.bad("ssm.inner_size", format!("is {values}, not a multiple of {value_heads} heads")))?,
        taps: k.required("ssm.conv_kernel")?,
        tiled: false,
    };
    layers(config, &blocks, mamba).map_err(|why| k.bad(ffn_key, why))
}

/// Positions that turn nothing.
fn no_rotation(k: &Keys) -> Result<Positions> {
    let heads = k.required("attention.head_count")?.max(1);
    let head_dim = k.whole_head_dim(k.required("embedding_length")? / heads)?;
    Ok(Positions::Rope { frequencies: vec![0.0; head_dim.min(1 << 12) / 2] })
}

/// Experts behind a projection to fewer numbers are not supported.
fn no_latent(size: Option<usize>) -> Result<(), String> {
    match size.filter(|&size| size > 0) {
        None => Ok(()),
        Some(size) => Err(format!(
            "says that experts read a projection to {size} numbers (Nemotron 3 Super and Ultra), which is not supported"
        )),
    }
}

/// The layers that the blocks make: a mixer each, and the FFN behind it where there is one.
fn layers(config: Description, blocks: &[Block], mamba: LinearAttention) -> Result<Description, String> {
    let mut parts: Vec<(Block, bool)> = Vec::new();
    for &block in blocks {
        match (block, parts.last_mut()) {
            (Block::Ffn, Some((_, has_ffn))) if !*has_ffn => *has_ffn = true,
            (Block::Ffn, _) => return Err("has an FFN that follows no mixer, which is not supported".into()),
            _ => parts.push((block, false)),
        }
    }
    let groups = [(true, true), (true, false), (false, false)].map(|(is_mamba, has_ffn)| OwnForm {
        layers: (0..parts.len()).filter(|&l| (parts[l].0 == Block::Mamba, parts[l].1) == (is_mamba, has_ffn)).collect(),
        linear: is_mamba.then_some(mamba),
        ffn: (!has_ffn).then_some(OwnFfn::Absent),
        ..OwnForm::default()
    });
    let own = groups.into_iter().filter(|own| !own.layers.is_empty()).collect();
    let form = CommonForm { own, rotated: vec![false; parts.len()], ..config.form };
    Ok(Description { layers: parts.len(), ffn_kind: Ffn::Plain, window: None, form, ..config })
}
