//! DeepSeek V2 and V3, Kimi K2, Moonlight and GLM-4.7-Flash: mixtures whose attention keeps one latent of each position in the place of keys and
//! values.

use super::Family;
use super::json::Fields;
use super::keys::Keys;
use super::leading::{self, Router};
use super::names::{GGUF, LLAMA, Names};
use super::yarn::{self, magnitude};
use crate::error::{Result, excerpt};
use crate::model::Description;
use crate::model::config::{Positions, RopeScaling, rope_frequencies};
use crate::model::layer::{CommonForm, Experts, Groups, Latent, OwnForm, Scoring};
use crate::model::role::Role;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "deepseek2",
    known_as: "deepseek2 (as a GGUF)",
    config_json: |c| Err(c.bad("model_type", "is the name of GGUFs; a directory's is deepseek_v2 or deepseek_v3")),
    gguf: Some(gguf),
    tensors: |config, _| names(config),
    gguf_tensors: gguf_names,
};

pub(super) const V2: Family = Family {
    name: "deepseek_v2",
    known_as: "deepseek_v2",
    config_json: |c| config_json(c, &V2_FORM),
    gguf: None,
    ..FAMILY
};
pub(super) const V3: Family = Family {
    name: "deepseek_v3",
    known_as: "deepseek_v3",
    config_json: |c| config_json(c, &V3_FORM),
    gguf: None,
    ..FAMILY
};
/// DeepSeek V3 by another name.
pub(super) const KIMI: Family =
    Family { name: "kimi_k2", known_as: "kimi_k2", config_json: |c| config_json(c, &KIMI_FORM), gguf: None, ..FAMILY };
pub(super) const GLM_LITE: Family = Family {
    name: "glm4_moe_lite",
    known_as: "glm4_moe_lite",
    config_json: |c| config_json(c, &GLM_FORM),
    gguf: None,
    ..FAMILY
};

/// What the directories of one kind say, or leave out.
struct Form {
    name: &'static str,
    /// Of a router; the only kind that its files may name.
    scoring: (Scoring, &'static str),
    /// The ways to choose experts that a file may name, the one that it means without a word first, and whether each has groups.
    methods: &'static [(&'static str, bool)],
    /// Leading layers without experts where nothing says how many.
    leading: Option<usize>,
}

const V3_FORM: Form =
    Form { name: "deepseek_v3", scoring: (Scoring::Sigmoid, "sigmoid"), methods: &[("noaux_tc", true)], leading: None };
const KIMI_FORM: Form = Form { name: "kimi_k2", ..V3_FORM };
const GLM_FORM: Form = Form { name: "glm4_moe_lite", leading: Some(1), ..V3_FORM };
const V2_FORM: Form = Form {
    name: "deepseek_v2",
    scoring: (Scoring::Softmax, "softmax"),
    methods: &[("greedy", false), ("group_limited_greedy", true)],
    leading: Some(0),
};

fn names(config: &Description) -> Names {
    let query = if of_queries(config) { "self_attn.q_a_proj" } else { "self_attn.q_proj" };
    let names = LLAMA
        .with(Role::Q, query)
        .with(Role::K, "self_attn.kv_a_proj_with_mqa")
        .with(Role::QueryLatentNorm, "self_attn.q_a_layernorm")
        .with(Role::QueryUp, "self_attn.q_b_proj")
        .with(Role::LatentNorm, "self_attn.kv_a_layernorm")
        .with(Role::KeysAndValues, "self_attn.kv_b_proj")
        .with(Role::SelectionBias, "mlp.gate.e_score_correction");
    Names { shared: leading::SHARED, ..names }
}

fn gguf_names(config: &Description) -> Names {
    GGUF.with(Role::Q, if of_queries(config) { "attn_q_a" } else { "attn_q" }).with(Role::K, "attn_kv_a_mqa")
}

/// Whether queries are made of a latent.
fn of_queries(config: &Description) -> bool {
    config.form.own.iter().filter_map(|own| own.latent).any(|latent| latent.queries > 0)
}

/// What is kept of a position, and how it is rotated.
struct Attends {
    latent: Latent,
    theta: f64,
    scaling: RopeScaling,
    /// Rotated numbers are multiplied by this.
    rotary_scale: f32,
}

impl Attends {
    /// The positions of a model all of whose heads were as large as what is kept.
    fn positions(&self) -> Positions {
        let mut frequencies = rope_frequencies(self.latent.rope, self.theta, &self.scaling);
        frequencies.resize(self.latent.kept() / 2, 0.0);
        Positions::Rope { frequencies }
    }

    /// The model with this attention in all its layers.
    fn of(self, config: Description) -> Description {
        let latent = Some(self.latent);
        let mut own: Vec<OwnForm> = config.form.own.into_iter().map(|own| OwnForm { latent, ..own }).collect();
        let rest: Vec<usize> = (0..config.layers).filter(|&layer| own.iter().all(|own| !own.has(layer))).collect();
        if !rest.is_empty() {
            own.push(OwnForm { layers: rest, latent, ..OwnForm::default() });
        }
        // The best of a group is enough where scores are shares, as in V2.
        let of_best = |groups| Groups { best: 1, ..groups };
        let grouped = |experts: Experts| match experts.scoring {
            Scoring::Softmax => Experts { groups: experts.groups.map(of_best), ..experts },
            _ => experts,
        };
        let experts = config.form.experts.map(grouped);
        let form = CommonForm { own, experts, rotary_scale: self.rotary_scale, ..config.form };
        Description { kv_heads: 1, head_dim: self.latent.kept(), window: None, form, ..config }
    }
}

/// The first of some sizes that is none that an attention over latents may have, with why.
fn wrong_size<'a>(sizes: &[(&'a str, usize)]) -> Option<(&'a str, String)> {
    let (key, size) = sizes.iter().find(|(_, size)| !(1..=Latent::MAX).contains(size))?;
    Some((key, format!("is {size}; it must be 1 to {}", Latent::MAX)))
}

fn config_json(c: &Fields, form: &Form) -> Result<Description> {
    let attends = attends(c)?;
    let mut all = c.json.clone();
    for (key, only) in [("rope_interleave", Value::Bool(true)), ("scoring_func", form.scoring.1.into())] {
        c.refuse_unless_default(key, &only)?;
    }
    let key = "topk_method";
    let method = c.text(key)?.unwrap_or(form.methods[0].0);
    let Some((_, grouped)) = form.methods.iter().find(|(name, _)| *name == method) else {
        return Err(c.bad(key, format!("is '{}', which is not supported for {}", excerpt(method), form.name)));
    };
    if !grouped {
        all["n_group"] = Value::Null;
    }
    let router = match form.scoring.0 {
        // The weights of V2 are not divided by their sum, whatever published code does where it is asked to.
        Scoring::Softmax => {
            c.refuse_unless_default("norm_topk_prob", &Value::Bool(false))?;
            Router::plainly(Scoring::Softmax)
        }
        scoring => Router::usually(scoring),
    };
    all["first_k_dense_replace"] = Value::from(leading(c, form)?);
    // As of a family whose heads are what is kept of a position; how it is rotated is said below.
    all["head_dim"] = Value::from(attends.latent.kept());
    all["num_key_value_heads"] = Value::from(1);
    for key in ["rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "layer_types"] {
        all[key] = Value::Null;
    }
    let config = leading::config_json(&Fields { json: &all, ..*c }, form.name, router)?;
    let positions = attends.positions();
    Ok(attends.of(Description { positions, ..config }))
}

/// How many layers, the first ones, have no experts.
fn leading(c: &Fields, form: &Form) -> Result<usize> {
    let (count_key, kinds_key) = ("first_k_dense_replace", "mlp_layer_types");
    let layers = c.layer_count()?;
    if let Some(count) = c.optional_size(count_key)? {
        return match count < layers {
            true => Ok(count),
            false => Err(c.bad(count_key, format!("is {count}; a layer of {layers} must have experts"))),
        };
    }
    let Value::Array(kinds) = &c.json[kinds_key] else {
        return form.leading.ok_or_else(|| c.bad(count_key, "missing"));
    };
    let dense = kinds.iter().take_while(|kind| *kind == "dense").count();
    match kinds.len() == layers && dense < layers && kinds[dense..].iter().all(|kind| kind == "sparse") {
        true => Ok(dense),
        false => Err(c.bad(kinds_key, format!("does not name {layers} layers, first dense, then sparse ones"))),
    }
}

/// The attention of a directory.
fn attends(c: &Fields) -> Result<Attends> {
    let queries = c.optional_size("q_lora_rank")?;
    let (rank, plain) = (c.size("kv_lora_rank")?, c.size("qk_nope_head_dim")?);
    let (rope, values) = (c.size("qk_rope_head_dim")?, c.size("v_head_dim")?);
    let sizes = [
        ("kv_lora_rank", rank),
        ("qk_nope_head_dim", plain),
        ("qk_rope_head_dim", rope),
        ("v_head_dim", values),
        ("q_lora_rank", queries.unwrap_or(1)),
    ];
    if let Some((key, why)) = wrong_size(&sizes) {
        return Err(c.bad(key, why));
    }
    let (key, said) = yarn::said(c);
    let within = Fields { json: said, ..*c };
    let kind = within.text("rope_type")?.or(within.text("type")?);
    let mut latent = Latent { queries: queries.unwrap_or(0), rank, plain, rope, values, scale: 1.0 };
    let theta = c.rope_theta()?;
    let is_said = said.is_object() && !said["factor"].is_null() || !(said.is_object() || said.is_null());
    let (scaling, rotary_scale) = match kind {
        None if is_said => return Err(c.bad(key, format!("is {said}, which does not name its rope_type"))),
        None | Some("default") => (RopeScaling::None, 1.0),
        Some("yarn") => {
            let yarn = yarn::config_json(c, (key, said))?;
            latent.scale = yarn.of_scores;
            (yarn.scaling, yarn.of_rotated)
        }
        Some(other) => {
            return Err(c.bad(&format!("{key}.rope_type"), format!("is '{}'; only yarn is supported", excerpt(other))));
        }
    };
    latent.check().map_err(|why| c.bad("kv_lora_rank", why))?;
    Ok(Attends { latent, theta, scaling, rotary_scale })
}

fn gguf(k: &Keys) -> Result<Description> {
    for (key, what) in [
        ("attention.indexer.head_count", "a sparse indexer"),
        ("attention.temperature_length", "a temperature by position"),
        ("attention.sliding_window", "a window"),
    ] {
        if let Some(other) = k.size(key)?.filter(|&other| other > 0) {
            return Err(k.bad(key, format!("is {other}; {what} beside latents is not supported")));
        }
    }
    let (attends, heads) = (attends_of_keys(k)?, k.required("attention.head_count")?);
    // Files of V2 do not say what their router makes of its products; a bias for choosing came with sigmoids.
    let has_bias = k.gguf.tensors.iter().any(|tensor| tensor.name.contains(".exp_probs_b."));
    let router = Router::plainly(if has_bias { Scoring::Sigmoid } else { Scoring::Softmax });
    let config = leading::gguf(k, router, Some(attends.positions()))?;
    let key = "leading_dense_block_count";
    if k.size(key)?.is_some_and(|leading| leading >= config.layers) {
        return Err(k.bad(key, format!("leaves none of {} layers with experts", config.layers)));
    }
    Ok(attends.of(Description { heads, ..config }))
}

/// The attention of a GGUF. Where it has sizes of its heads beside those of what is kept, keys and values are apart.
fn attends_of_keys(k: &Keys) -> Result<Attends> {
    const RANK: &str = "attention.kv_lora_rank";
    const ROPE: &str = "rope.dimension_count";
    const KEY: &str = "attention.key_length";
    const VALUE: &str = "attention.value_length";
    const KV_HEADS: &str = "attention.head_count_kv";
    let (rank, rope, queries) = (k.required(RANK)?, k.required(ROPE)?, k.size("attention.q_lora_rank")?);
    let [key_key, value_key] = match k.size("attention.key_length_mla")? {
        Some(_) => ["attention.key_length_mla", "attention.value_length_mla"],
        None => [KEY, VALUE],
    };
    let (query, values) = (k.required(key_key)?, k.required(value_key)?);
    let sizes = [
        (RANK, rank),
        (ROPE, rope),
        (key_key, query),
        (value_key, values),
        ("attention.q_lora_rank", queries.unwrap_or(1)),
    ];
    if let Some((key, why)) = wrong_size(&sizes) {
        return Err(k.bad(key, why));
    }
    let plain = query.checked_sub(rope).filter(|&plain| plain > 0);
    let plain =
        plain.ok_or_else(|| k.bad(key_key, format!("is {query}, of which {rope} are rotated; it must be more")))?;
    if key_key != KEY {
        for (key, wanted) in [(KEY, rank + rope), (VALUE, rank), (KV_HEADS, 1)] {
            if let Some(other) = k.size(key)?.filter(|&other| other != wanted) {
                return Err(k.bad(key, format!("is {other}; beside {key_key} it must be {wanted}")));
            }
        }
    } else if let Some(other) =
        k.size(KV_HEADS)?.filter(|&other| k.size("attention.head_count").ok().flatten() != Some(other))
    {
        return Err(k.bad(KV_HEADS, format!("is {other}; without {KEY}_mla it must be the count of heads")));
    }
    let mut latent = Latent { queries: queries.unwrap_or(0), rank, plain, rope, values, scale: 1.0 };
    let kind_key = "rope.scaling.type";
    let scaling = match k.gguf.metadata.str(&format!("{}.{kind_key}", k.arch))? {
        None | Some("none") if k.rope_factors.is_none() => RopeScaling::None,
        Some("yarn") => {
            let scaling = k.yarn(true)?;
            let key = "rope.scaling.yarn_log_multiplier";
            let multiplier = k.number(key)?.unwrap_or(0.0);
            if !(0.0..=10.0).contains(&multiplier) {
                return Err(k.bad(key, format!("is {multiplier}; it must be 0 to 10")));
            }
            if let RopeScaling::Yarn { factor, .. } = scaling {
                // What the file has is a tenth of the multiplier of a directory.
                latent.scale = magnitude(factor, 10.0 * f64::from(multiplier)).powi(2) as f32;
            }
            scaling
        }
        other => {
            let other = excerpt(other.unwrap_or("rope_freqs.weight"));
            return Err(k.bad(kind_key, format!("is '{other}'; only yarn is supported")));
        }
    };
    latent.check().map_err(|why| k.bad(RANK, why))?;
    Ok(Attends { latent, theta: k.rope_base()?, scaling, rotary_scale: 1.0 })
}
