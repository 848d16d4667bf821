//! Gemma 4: Gemma 3's norms around attention and FFN, with layers of two kinds that differ in more: those with a window have heads and a rotation
//! of their own, those without rotate a part of a larger head and may take values from the keys' matrix. Some are mixtures with an FFN beside the
//! experts, which has norms of its own. E2B and E4B have embeddings for each layer, and last layers that read the keys and values of others.

use super::json::{Fields, Routing, in_layers};
use super::keys::Keys;
use super::names::{ExpertNames, GGUF, LLAMA, Names};
use super::{Activated, Family, gemma3};
use crate::error::{Result, excerpt};
use crate::model::Description;
use crate::model::config::{Activation, Positions, RopeScaling, rope_frequencies};
use crate::model::layer::{CommonForm, Experts, Norms, OwnForm, RouterInput, SharedForm};
use crate::model::role::Role;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    name: "gemma4",
    known_as: "gemma4",
    config_json,
    gguf: Some(gguf),
    tensors: |config, _| if config.form.experts.is_some() { MIXTURE_NAMES } else { NAMES },
    gguf_tensors: |config| if config.form.experts.is_some() { MIXTURE_GGUF_NAMES } else { GGUF },
};

/// The same by the name of its text alone.
pub(super) const TEXT: Family = Family { name: "gemma4_text", known_as: "gemma4_text", gguf: None, ..FAMILY };

/// What drafts tokens for one of them is no model by itself.
pub(super) const ASSISTANT: Family = Family {
    name: "gemma4-assistant",
    known_as: "gemma4-assistant (refused)",
    config_json: |c| Err(c.bad("model_type", DRAFTS)),
    gguf: Some(|k| Err(k.bad("block_count", DRAFTS))),
    ..FAMILY
};

const DRAFTS: &str = "is of a draft head, which reads the keys and values of another model and answers nothing by itself; take the \
                      model that it was made for";

const NAMES: Names = LLAMA
    .with(Role::FfnNorm, "pre_feedforward_layernorm")
    .with(Role::AttnPostNorm, "post_attention_layernorm")
    .with(Role::FfnPostNorm, "post_feedforward_layernorm")
    .with(Role::OutputScale, "layer_scalar")
    .with(Role::PerLayerGate, "per_layer_input_gate")
    .with(Role::PerLayerOut, "per_layer_projection")
    .with(Role::PerLayerPostNorm, "post_per_layer_input_norm")
    .with_per_layer(["embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"]);

/// A mixture's dense part stands where other models have their FFN, and what its experts have is numbered.
const MIXTURE_NAMES: Names = {
    let names = NAMES
        .with(Role::FfnNorm, "pre_feedforward_layernorm_2")
        .with(Role::SharedNorm, "pre_feedforward_layernorm")
        .with(Role::SharedPostNorm, "post_feedforward_layernorm_1")
        .with(Role::ExpertsPostNorm, "post_feedforward_layernorm_2")
        .with(Role::Router, "router.proj")
        .with(Role::RouterScale, "router.scale")
        .with(Role::ExpertScales, "router.per_expert_scale");
    const EACH: &str = "experts.";
    let experts = ExpertNames {
        each: [[EACH, ".gate_proj"], [EACH, ".up_proj"], [EACH, ".down_proj"]],
        all: ["", "", "experts.down_proj"],
        gate_and_up: "experts.gate_up_proj",
    };
    Names { shared: ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", ""], experts, ..names }
};

const MIXTURE_GGUF_NAMES: Names = {
    let names = GGUF.with(Role::FfnNorm, "pre_ffw_norm_2").with(Role::SharedNorm, "ffn_norm");
    Names { shared: ["ffn_gate", "ffn_up", "ffn_down", ""], ..names }
};

/// A softmax over all experts; the router norms the residual by itself.
const ROUTING: Routing = Routing { reads: RouterInput::Own, ..Routing::SOFTMAX };

/// Neither its config.json nor its GGUFs name it by the key of other families.
const GEGLU: Activated = Activated { unsaid: Activation::GeluTanh, gated: true, both: false };

/// What a directory leaves out, as the family's own code has it.
fn defaults() -> Value {
    json!({
        "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131_072, "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": true, "hidden_size_per_layer_input": 256,
    })
}

/// How layers of one kind attend.
struct Kind {
    kv_heads: usize,
    head_dim: usize,
    /// Radians per position of each pair, `[head_dim / 2]`.
    frequencies: Vec<f32>,
    /// Values are the products of the keys' matrix.
    values_from_keys: bool,
}

/// The kinds of layers, and which layers are of which.
struct Kinds {
    /// Those that see all positions.
    global: Kind,
    /// Those with a window.
    local: Kind,
    /// Whether each layer has a window, `[layers]`.
    windowed: Vec<bool>,
    /// So many layers, the last ones, read the keys and values of the last one of their kind before them.
    reading: usize,
}

/// What a directory says of the text's part, with what it leaves out.
fn text_of(c: &Fields) -> Value {
    // A model that sees pictures has its text's part by itself.
    let text = if c.json["text_config"].is_object() { &c.json["text_config"] } else { c.json };
    let mut all = defaults();
    if let (Some(all), Some(text)) = (all.as_object_mut(), text.as_object()) {
        all.extend(text.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.clone(), value.clone())));
        // Without embeddings for each layer.
        if text.get("hidden_size_per_layer_input").is_some_and(Value::is_null) {
            all.insert("hidden_size_per_layer_input".into(), Value::from(0));
        }
        all.insert("hidden_act".into(), all["hidden_activation"].clone());
        all.insert("_name_or_path".into(), c.json["_name_or_path"].clone());
    }
    all
}

/// The base of the rotation of layers of a kind, and the share of a head's pairs that turn; `usual` is what they are where nothing says it.
fn rotation(c: &Fields, parameters: &Value, kind: &str, usual: (f64, f64)) -> Result<(f64, f64)> {
    let of_kind = Fields { json: &parameters[kind], ..*c };
    let key = |key: &str| format!("rope_parameters.{kind}.{key}");
    match of_kind.text("rope_type")? {
        None | Some("default") => {}
        Some("proportional") if kind == "full_attention" => {}
        Some(other) => {
            let why = format!("is '{}', which is not supported for gemma4", excerpt(other));
            return Err(c.bad(&key("rope_type"), why));
        }
    }
    let theta = of_kind.number("rope_theta")?.unwrap_or(usual.0);
    if theta <= 0.0 {
        return Err(c.bad(&key("rope_theta"), format!("{theta} is not a positive number")));
    }
    let share = of_kind.number("partial_rotary_factor")?.unwrap_or(usual.1);
    if !(share > 0.0 && share <= 1.0) {
        return Err(c.bad(&key("partial_rotary_factor"), format!("is {share}; it must be above 0 and at most 1")));
    }
    Ok((theta, share))
}

fn config_json(c: &Fields) -> Result<Description> {
    let mut all = text_of(c);
    let parameters = all["rope_parameters"].take();
    let said = Fields { json: &all.clone(), ..*c };
    if all["use_bidirectional_attention"] == "all" {
        said.refuse_unless_default("use_bidirectional_attention", &Value::from("vision"))?;
    }
    let k_is_v = said.flag("attention_k_eq_v")?.unwrap_or(false);
    let kv_heads = said.size("num_key_value_heads")?;
    let of_global = said.optional_size("num_global_key_value_heads")?.filter(|_| k_is_v).unwrap_or(kv_heads);
    let (local_dim, global_dim) = (said.size("head_dim")?, said.size("global_head_dim")?);
    let global = rotation(c, &parameters, "full_attention", (1e6, 0.25))?;
    let local = rotation(c, &parameters, "sliding_attention", (1e4, 1.0))?;
    // As of a family whose layers are all of the first kind.
    all["head_dim"] = Value::from(global_dim);
    all["num_key_value_heads"] = Value::from(of_global);
    let c = &Fields { json: &all, ..*c };
    let config = match c.flag("enable_moe_block")?.unwrap_or(false) {
        true => {
            let keys = ["num_experts", "top_k_experts", "moe_intermediate_size"];
            beside_experts(c.mixture("gemma4", GEGLU, keys, ROUTING)?, c.size("intermediate_size")?)
        }
        false => c.llama("gemma4", GEGLU)?,
    };
    let mut windowed = gemma3::windowed(c, &config, gemma3::EVERY);
    // The family's own code sees to it.
    windowed.last_mut().into_iter().for_each(|last| *last = false);
    let key = "num_kv_shared_layers";
    let reading = c.optional_size(key)?.unwrap_or(0);
    let kind = |kv_heads, head_dim, (theta, share), values_from_keys| Kind {
        kv_heads,
        head_dim,
        frequencies: proportional(head_dim, theta, share),
        values_from_keys,
    };
    let kinds = Kinds {
        global: kind(of_global, global_dim, global, k_is_v),
        local: kind(kv_heads, local_dim, local, false),
        windowed,
        reading,
    };
    let logit_cap = c.number("final_logit_softcapping")?.unwrap_or(0.0) as f32;
    let config = kinds.gemma(Description { logit_cap, ..config }).map_err(|why| c.bad(key, why))?;
    let per_layer = c.size("hidden_size_per_layer_input")?;
    let widths = match c.flag("use_double_wide_mlp")?.unwrap_or(false) && reading > 0 {
        true => {
            let times = |layer| if layer < config.layers - reading { 1 } else { 2 };
            (0..config.layers).map(|layer| config.ffn * times(layer)).collect()
        }
        false => Vec::new(),
    };
    let ffn = widths.last().copied().unwrap_or(config.ffn);
    Ok(Description { ffn, form: CommonForm { per_layer, widths, ..config.form }, ..config })
}

/// Radians per position of the pairs of a head, of which the first `share` are rotated as if all were.
fn proportional(head_dim: usize, theta: f64, share: f64) -> Vec<f32> {
    let dim = head_dim.min(1 << 12);
    let rotated = (share * dim as f64 / 2.0) as usize;
    let mut frequencies = rope_frequencies(dim, theta, &RopeScaling::None);
    frequencies.iter_mut().skip(rotated).for_each(|frequency| *frequency = 0.0);
    frequencies
}

fn gguf(k: &Keys) -> Result<Description> {
    let key = "attn_logit_softcapping";
    if let Some(other) = k.number(key)?.filter(|&cap| cap != 0.0) {
        return Err(k.bad(key, format!("is {other}; no softcap of attention is supported for gemma4")));
    }
    let key = "expert_gating_func";
    if let Some(other) = k.size(key)?.filter(|&function| function > 1) {
        return Err(k.bad(key, format!("is {other}; only 1 (softmax) is supported for gemma4")));
    }
    let config = match k.experts()? {
        None => k.common(k.rms_norm()?, None, GEGLU)?,
        Some(_) => beside_experts(k.routed(None, GEGLU, ROUTING)?, k.required("feed_forward_length")?),
    };
    let windowed = windowed(k, &config)?;
    let key = "attention.key_length_swa";
    let local_dim = k.size(key)?.unwrap_or(config.head_dim);
    for key in ["attention.value_length_swa", "rope.dimension_count_swa"] {
        if let Some(other) = k.size(key)?.filter(|&other| other != local_dim) {
            return Err(k.bad(key, format!("is {other}; it must be {local_dim}, as attention.key_length_swa says")));
        }
    }
    let key = "rope.freq_base_swa";
    let theta = k.number(key)?.map_or(1e4, f64::from);
    if !(theta.is_finite() && theta > 0.0) {
        return Err(k.bad(key, format!("{theta} is not a positive number")));
    }
    let kv_heads = kv_heads(k, &config, &windowed)?;
    // What is divided by 1e30 does not turn.
    let mut global = match &config.positions {
        Positions::Rope { frequencies } => frequencies.clone(),
        Positions::Learned { .. } => Vec::new(),
    };
    global.iter_mut().filter(|frequency| **frequency < 1e-20).for_each(|frequency| *frequency = 0.0);
    let kind = |number: usize, head_dim, frequencies, values_from_keys| Kind {
        kv_heads: kv_heads[number],
        head_dim,
        frequencies,
        values_from_keys,
    };
    let first = windowed.iter().position(|&windowed| !windowed).unwrap_or(0);
    let kinds = Kinds {
        global: kind(0, config.head_dim, global, !k.has(&format!("blk.{first}.attn_v.weight"))),
        local: kind(1, local_dim, proportional(local_dim, theta, 1.0), false),
        windowed,
        reading: k.size("attention.shared_kv_layers")?.unwrap_or(0),
    };
    let output_scales = k.has("blk.0.layer_output_scale.weight");
    let cap = k.number("final_logit_softcapping")?.unwrap_or(0.0);
    let config = kinds.gemma(Description { logit_cap: cap, ..config });
    let config = config.map_err(|why| k.bad("attention.shared_kv_layers", why))?;
    let per_layer = k.size("embedding_length_per_layer_input")?.unwrap_or(0);
    Ok(Description { form: CommonForm { output_scales, per_layer, ..config.form }, ..config })
}

/// The same mixture with an FFN of so many neurons beside its experts, each of which has a scale.
fn beside_experts(mut config: Description, width: usize) -> Description {
    let shared = Some(SharedForm { width, weighted: false, normed: true });
    config.form.experts = config.form.experts.map(|experts| Experts { scaled: true, shared, ..experts });
    config
}

/// Which layers of a GGUF have a window, `[layers]`.
fn windowed(k: &Keys, config: &Description) -> Result<Vec<bool>> {
    let key = "attention.sliding_window";
    if config.window.is_none() {
        return Err(k.bad(key, "missing: most layers of gemma4 have a window"));
    }
    let key = "attention.sliding_window_pattern";
    let Some(list) = k.gguf.metadata.bools(&format!("{}.{key}", k.arch))? else {
        return Err(k.bad(key, "missing, and which layers have a window is not known"));
    };
    match list.get(..config.layers) {
        Some(list) if list.contains(&false) => Ok(list.to_vec()),
        Some(_) => Err(k.bad(key, "names no layer without a window")),
        None => Err(k.bad(key, format!("names {} layers of {}", list.len(), config.layers))),
    }
}

/// Heads of keys and values of the layers without a window in a GGUF, and of those with one.
fn kv_heads(k: &Keys, config: &Description, windowed: &[bool]) -> Result<[usize; 2]> {
    let key = "attention.head_count_kv";
    let Ok(Some(list)) = k.gguf.metadata.i32s(&format!("{}.{key}", k.arch)) else { return Ok([config.kv_heads; 2]) };
    if list.len() < windowed.len() {
        return Err(k.bad(key, format!("names {} layers of {}", list.len(), windowed.len())));
    }
    let mut heads = [None; 2];
    for (&here, &windowed) in list.iter().zip(windowed) {
        let of_kind = heads[usize::from(windowed)].get_or_insert(here);
        if *of_kind != here || here <= 0 {
            let why = format!("is {here} in one layer and {of_kind} in another of its kind, which is not supported");
            return Err(k.bad(key, why));
        }
    }
    Ok(heads.map(|heads| heads.map_or(config.kv_heads, |heads| heads as usize)))
}

impl Kinds {
    /// The family's layers: those of the model's shape are without a window. The error says why the last ones cannot read others' keys.
    fn gemma(self, config: Description) -> std::result::Result<Description, String> {
        let Kinds { global, local, windowed, reading } = self;
        let Some(first_reading) = windowed.len().checked_sub(reading) else {
            return Err(format!("is {reading}, and there are {} layers", windowed.len()));
        };
        let mut own = Vec::new();
        for (is_local, reads) in [(true, false), (true, true), (false, false), (false, true)] {
            let of = |range: std::ops::Range<usize>| range.filter(|&layer| windowed[layer] == is_local);
            let layers: Vec<usize> = match reads {
                true => of(first_reading..windowed.len()).collect(),
                false => of(0..first_reading).collect(),
            };
            let keys_of = if reads { of(0..first_reading).next_back() } else { None };
            if reads && keys_of.is_none() && !layers.is_empty() {
                return Err(format!("is {reading}: no layer before them has keys of the kind of layer {}", layers[0]));
            }
            let values_from_keys = global.values_from_keys && !is_local;
            let like = OwnForm { layers, keys_of, values_from_keys, ..OwnForm::default() };
            own.push(match is_local {
                true => OwnForm {
                    kv_heads: Some(local.kv_heads),
                    head_dim: Some(local.head_dim),
                    frequencies: Some(local.frequencies.clone()),
                    ..like
                },
                false => like,
            });
        }
        own.retain(|own| {
            *own != OwnForm { layers: own.layers.clone(), ..OwnForm::default() } && !own.layers.is_empty()
        });
        let (window, windowed) = in_layers(config.window, windowed);
        let form = CommonForm {
            norms: Norms::Around,
            qk_norm: true,
            unscaled: true,
            value_norm: true,
            output_scales: true,
            windowed,
            own,
            ..config.form
        };
        Ok(Description {
            kv_heads: global.kv_heads,
            head_dim: global.head_dim,
            positions: Positions::Rope { frequencies: global.frequencies },
            window,
            form,
            embedding_scale: (config.hidden as f64).sqrt() as f32,
            ..config
        })
    }
}
