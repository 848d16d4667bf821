//! Gemma 3: norms before and behind attention and FFN, normed queries and keys, GeGLU. Five of six layers have a window and a rotation of
//! their own.

use super::json::{Fields, in_layers};
use super::keys::Keys;
use super::names::{GGUF, LLAMA, Names};
use super::{Activated, Family};
use crate::error::Result;
use crate::model::Description;
use crate::model::config::{Activation, RopeScaling, rope_frequencies};
use crate::model::layer::{CommonForm, Norms, OwnForm};
use crate::model::role::Role;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    name: "gemma3",
    known_as: "gemma3",
    config_json,
    gguf: Some(gguf),
    tensors: |_, _| NAMES,
    gguf_tensors: |_| GGUF,
};

/// The same by the name of its text alone.
pub(super) const TEXT: Family = Family { name: "gemma3_text", known_as: "gemma3_text", gguf: None, ..FAMILY };

/// A directory's weights of norms are those by which 1 is exceeded.
const NAMES: Names = {
    let names = LLAMA
        .with(Role::FfnNorm, "pre_feedforward_layernorm")
        .with(Role::AttnPostNorm, "post_attention_layernorm")
        .with(Role::FfnPostNorm, "post_feedforward_layernorm");
    Names { norm_offset: 1.0, ..names }
};

/// Neither its config.json nor its GGUFs name it by the key of other families.
const GEGLU: Activated = Activated { unsaid: Activation::GeluTanh, gated: true, both: false };

/// One layer of so many sees all positions.
pub(super) const EVERY: usize = 6;
/// Base of the rotation of layers with a window.
const LOCAL_THETA: f64 = 10_000.0;

/// What a directory leaves out, as the family's own code has it.
fn defaults() -> Value {
    json!({
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true,
    })
}

fn config_json(c: &Fields) -> Result<Description> {
    // A model that sees pictures has its text's part by itself.
    let text = if c.json["text_config"].is_object() { &c.json["text_config"] } else { c.json };
    let mut all = defaults();
    if let (Some(all), Some(text)) = (all.as_object_mut(), text.as_object()) {
        all.extend(text.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.clone(), value.clone())));
        all.insert("hidden_act".into(), all["hidden_activation"].clone());
        all.insert("_name_or_path".into(), c.json["_name_or_path"].clone());
    }
    // Since transformers 5 each kind of layer has parameters of its own.
    let parameters = all["rope_parameters"].take();
    let (full, local) = (&parameters["full_attention"], &parameters["sliding_attention"]);
    if full.is_object() || parameters.is_object() {
        all["rope_parameters"] = if full.is_object() { full.clone() } else { parameters.clone() };
    }
    let c = &Fields { json: &all, ..*c };
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(other) = c.number(key)? {
            return Err(c.bad(key, format!("is {other}; no softcap is supported for gemma3")));
        }
    }
    c.refuse_unless_default("use_bidirectional_attention", &Value::Bool(false))?;
    let config = c.llama("gemma3", GEGLU)?;
    let theta = match local["rope_theta"].as_f64() {
        Some(theta) => theta,
        None => c.number("rope_local_base_freq")?.unwrap_or(LOCAL_THETA),
    };
    let every = c.optional_size("sliding_window_pattern")?.or(c.optional_size("_sliding_window_pattern")?);
    let windowed = windowed(c, &config, every.unwrap_or(EVERY));
    let scalar = c.required_number("query_pre_attn_scalar")?;
    Ok(gemma(config, windowed, theta, scalar))
}

fn gguf(k: &Keys) -> Result<Description> {
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(other) = k.number(key)?.filter(|&cap| cap != 0.0) {
            return Err(k.bad(key, format!("is {other}; no softcap is supported for gemma3")));
        }
    }
    // Files of another converter have other keys, and lack what they do not say.
    for key in ["rope.freq_base", "attention.layer_norm_rms_epsilon"] {
        if k.number(key)?.is_none() {
            return Err(k.bad(key, "missing: take a GGUF that llama.cpp's convert_hf_to_gguf.py has made"));
        }
    }
    let config = k.common(k.rms_norm()?, None, GEGLU)?;
    let key = "attention.sliding_window";
    if config.window.is_none() {
        return Err(k.bad(key, "missing: most layers of gemma3 have a window"));
    }
    let every = k.size("attention.sliding_window_pattern")?.unwrap_or(EVERY);
    let key = "rope.freq_base_swa";
    let theta = k.number(key)?.map_or(LOCAL_THETA, f64::from);
    if !(theta.is_finite() && theta > 0.0) {
        return Err(k.bad(key, format!("{theta} is not a positive number")));
    }
    // Only the largest divides by another number than the root of a head's size, and no key says so.
    let scalar = if config.layers == 62 { config.hidden / config.heads } else { config.head_dim };
    let windowed = pattern(config.layers, every);
    Ok(gemma(config, windowed, theta, scalar as f64))
}

/// Which layers have a window: by a list of the file, or all but one of `every`.
pub(super) fn windowed(c: &Fields, config: &Description, every: usize) -> Vec<bool> {
    match c.json["layer_types"].is_array() {
        true if config.form.windowed.is_empty() => vec![config.window.is_some(); config.layers],
        true => config.form.windowed.clone(),
        false => pattern(config.layers, every),
    }
}

/// One layer of `every` sees all positions: the last of them.
fn pattern(layers: usize, every: usize) -> Vec<bool> {
    (1..=layers).map(|number| every == 0 || number % every != 0).collect()
}

/// The family's layers: those with a window rotate by `theta`, and queries are divided by the root of `scalar`.
fn gemma(config: Description, windowed: Vec<bool>, theta: f64, scalar: f64) -> Description {
    let layers: Vec<usize> = (0..config.layers).filter(|&layer| windowed.get(layer) == Some(&true)).collect();
    let local = rope_frequencies(config.head_dim.min(1 << 12), theta, &RopeScaling::None);
    let own = match layers.is_empty() {
        true => Vec::new(),
        false => vec![OwnForm { layers, frequencies: Some(local), ..OwnForm::default() }],
    };
    let (window, windowed) = in_layers(config.window, windowed);
    let query_scale = (config.head_dim as f64 / scalar).sqrt() as f32;
    let form = CommonForm { norms: Norms::Around, qk_norm: true, query_scale, windowed, own, ..config.form };
    Description { window, form, embedding_scale: (config.hidden as f64).sqrt() as f32, ..config }
}
