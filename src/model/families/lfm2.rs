//! LFM2 and LFM2.5: most layers have a short convolution in the place of attention. Some are mixtures whose first layers have one FFN.

use super::json::Fields;
use super::keys::Keys;
use super::leading::{self, Router};
use super::names::{ExpertNames, GGUF, LLAMA, Names};
use super::{Activated, Family};
use crate::error::Result;
use crate::model::Description;
use crate::model::layer::{CommonForm, OwnFfn, OwnForm, Scoring};
use crate::model::role::Role;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "lfm2",
    known_as: "lfm2",
    config_json: |c| config_json(c, "lfm2", |c| c.llama("lfm2", Activated::SILU)),
    gguf: Some(|k| gguf(k, k.common(k.rms_norm()?, None, Activated::SILU)?)),
    tensors: |_, _| NAMES,
    gguf_tensors: |_| GGUF_NAMES,
};

pub(super) const MIXTURE: Family = Family {
    name: "lfm2_moe",
    known_as: "lfm2_moe",
    config_json: |c| config_json(c, "lfm2_moe", |c| leading::config_json(c, "lfm2_moe", ROUTER)),
    gguf: None,
    ..FAMILY
};

/// The same by the name that GGUFs have for it.
pub(super) const MIXTURE_GGUF: Family = Family {
    name: "lfm2moe",
    known_as: "lfm2moe",
    // A scale of the experts' weights in the file is of no account there.
    gguf: Some(|k| {
        let mut config = gguf(k, leading::gguf(k, ROUTER, None)?)?;
        config.form.experts.iter_mut().for_each(|experts| experts.scale = 1.0);
        Ok(config)
    }),
    ..MIXTURE
};

const ROUTER: Router = Router::usually(Scoring::Sigmoid);

const NAMES: Names = {
    let mut names = LLAMA;
    names.outside[3] = "embedding_norm";
    names.inside = [
        "operator_norm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
        "ffn_norm",
        "feed_forward.w1",
        "feed_forward.w3",
        "feed_forward.w2",
    ];
    names = names
        .with(Role::QNorm, "self_attn.q_layernorm")
        .with(Role::KNorm, "self_attn.k_layernorm")
        .with(Role::Router, "feed_forward.gate")
        .with(Role::SelectionBias, "feed_forward.expert")
        .with(Role::MixerIn, "conv.in_proj")
        .with(Role::Taps, "conv.conv")
        .with(Role::MixerOut, "conv.out_proj");
    const EACH: &str = "feed_forward.experts.";
    names.experts = ExpertNames {
        each: [[EACH, ".w1"], [EACH, ".w3"], [EACH, ".w2"]],
        all: ["", "", "feed_forward.experts.down_proj"],
        gate_and_up: "feed_forward.experts.gate_up_proj",
    };
    names
};

/// The last norm has the name of one that other families have behind the embedding.
const GGUF_NAMES: Names = {
    let mut names = GGUF;
    names.outside[3] = "token_embd_norm";
    names
};

/// Positions that the convolution reads where a file does not say it.
const TAPS: usize = 3;

fn config_json(c: &Fields, family: &str, read: impl Fn(&Fields) -> Result<Description>) -> Result<Description> {
    let mut all = c.json.clone();
    // In the terms of other families.
    for (ours, theirs) in [
        ("norm_eps", "rms_norm_eps"),
        ("num_dense_layers", "first_k_dense_replace"),
        ("num_experts", "n_routed_experts"),
    ] {
        if !all[ours].is_null() {
            all[theirs] = all[ours].take();
        }
    }
    all["hidden_act"] = Value::from("silu");
    if all["rms_norm_eps"].is_null() {
        all["rms_norm_eps"] = Value::from(1e-5);
    }
    if !all["block_ff_dim"].is_null() {
        all["intermediate_size"] = all["block_ff_dim"].clone();
    }
    if all["rope_theta"].is_null() {
        all["rope_theta"] = Value::from(1e6);
    }
    let kinds = all["layer_types"].take();
    if let Some(tied) = all["tie_embedding"].as_bool().or(all["tie_word_embeddings"].is_null().then_some(true)) {
        all["tie_word_embeddings"] = Value::Bool(tied);
    }
    let c = &Fields { json: &all, ..*c };
    c.refuse_unless_default("conv_bias", &Value::Bool(false))?;
    let mut config = read(c)?;
    if family == "lfm2" {
        config.ffn = adjusted(c, config.ffn)?;
    }
    let key = "layer_types";
    let attends: Vec<bool> = match &kinds {
        Value::Array(kinds) => kinds.iter().map(|kind| kind == "full_attention").collect(),
        _ => {
            let Value::Array(numbers) = &all["full_attn_idxs"] else { return Err(c.bad(key, "missing")) };
            (0..config.layers).map(|layer| numbers.iter().any(|number| number.as_u64() == Some(layer as u64))).collect()
        }
    };
    if attends.len() != config.layers {
        return Err(c.bad(key, format!("names {} layers of {}", attends.len(), config.layers)));
    }
    Ok(convolved(config, &attends, c.optional_size("conv_L_cache")?.unwrap_or(TAPS)))
}

/// The neurons of an FFN of which the file says how they are reckoned.
fn adjusted(c: &Fields, ffn: usize) -> Result<usize> {
    if !c.flag("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(ffn);
    }
    let key = "block_ffn_dim_multiplier";
    let scaled = ((2 * ffn / 3) as f64 * c.number(key)?.unwrap_or(1.0)) as usize;
    let multiple = c.optional_size("block_multiple_of")?.unwrap_or(256).max(1);
    scaled.checked_next_multiple_of(multiple).ok_or_else(|| c.bad(key, "is too large"))
}

fn gguf(k: &Keys, config: Description) -> Result<Description> {
    let key = "attention.head_count_kv";
    let Some(kv_heads) = k.gguf.metadata.i32s(&format!("{}.{key}", k.arch))? else {
        return Err(k.bad(key, "is no list, and does not say which layers have attention"));
    };
    if kv_heads.len() < config.layers {
        return Err(k.bad(key, format!("names {} layers of {}", kv_heads.len(), config.layers)));
    }
    let attends: Vec<bool> = kv_heads[..config.layers].iter().map(|&heads| heads > 0).collect();
    Ok(convolved(config, &attends, k.size("shortconv.l_cache")?.unwrap_or(TAPS)))
}

/// The same with a convolution in the layers that have no attention.
fn convolved(config: Description, attends: &[bool], taps: usize) -> Description {
    let dense = config.form.own.iter().find_map(|own| own.ffn).filter(|ffn| matches!(ffn, OwnFfn::Dense(_)));
    let leads = |layer: usize| config.form.own.iter().any(|own| own.has(layer));
    // Layers with a convolution, with one FFN in the place of experts, and with both.
    let groups = [(false, true), (true, false), (true, true)].map(|(convolves, is_dense)| OwnForm {
        layers: (0..config.layers).filter(|&layer| attends[layer] != convolves && leads(layer) == is_dense).collect(),
        convolution: convolves.then_some(taps),
        ffn: dense.filter(|_| is_dense),
        ..OwnForm::default()
    });
    let own = groups.into_iter().filter(|own| !own.layers.is_empty()).collect();
    Description { form: CommonForm { qk_norm: true, own, ..config.form }, ..config }
}
