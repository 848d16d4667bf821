//! Phi-3, Phi-3.5 and Phi-4: Llama with queries, keys and values in one tensor, and gate and up in another. Rotations of longer texts have
//! divisors of their own; a model runs in the first positions, whose divisors are others.

use super::json::Fields;
use super::keys::Keys;
use super::names::{GGUF, LLAMA, Names, QkvRows};
use super::{Activated, Family, glm4, yarn};
use crate::error::{Error, Result, excerpt};
use crate::model::Description;
use crate::model::config::{Positions, RopeScaling, rope_frequencies};
use crate::model::layer::CommonForm;
use crate::model::role::Role;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "phi3",
    known_as: "phi3 (also Phi-4)",
    config_json,
    gguf: Some(gguf),
    tensors: |config, _| names(LLAMA, "self_attn.qkv_proj", config),
    gguf_tensors: |config| names(GGUF, "attn_qkv", config),
};

fn names(names: Names, qkv: &'static str, config: &Description) -> Names {
    let names = names.with(Role::Q, qkv).with(Role::K, qkv).with(Role::V, qkv);
    let rows = match glm4::halves(config) {
        QkvRows::Partial { rotated } => QkvRows::JoinedPartial { rotated },
        _ => QkvRows::Joined,
    };
    Names { qkv: rows, ..names }
}

/// How the first positions are rotated.
struct Rotation {
    /// Numbers of a head that are rotated, the first ones.
    rotated: usize,
    theta: f64,
    /// A divisor for each pair, and how many positions they are for.
    divided: Option<(Vec<f32>, usize)>,
    /// Rotated numbers are multiplied by this.
    scale: f32,
}

impl Rotation {
    /// Positions of heads of `head_dim` numbers.
    fn positions(&self, head_dim: usize) -> Result<Positions, String> {
        let rotated = self.rotated;
        if rotated == 0 || rotated > head_dim || !rotated.is_multiple_of(2) {
            return Err(format!(
                "rotates {rotated} numbers of a head; it must be even, above 0 and at most the head dimension {head_dim}"
            ));
        }
        let scaling = match &self.divided {
            None => RopeScaling::None,
            Some((divisors, _)) if divisors.len() == rotated / 2 => RopeScaling::Factors(divisors.clone()),
            Some((divisors, _)) => {
                return Err(format!("has {} divisors for {} rotated pairs", divisors.len(), rotated / 2));
            }
        };
        let mut frequencies = rope_frequencies(rotated.min(1 << 12), self.theta, &scaling);
        frequencies.resize(head_dim.min(1 << 12) / 2, 0.0);
        Ok(Positions::Rope { frequencies })
    }

    /// The model with this rotation, and with no more positions than its divisors are for.
    fn of(self, config: Description) -> Result<Description, String> {
        let positions = self.positions(config.head_dim)?;
        let context = self.divided.map_or(config.context, |(_, first)| config.context.min(first));
        let form = CommonForm { rotary_scale: self.scale, ..config.form };
        Ok(Description { positions, context, form, ..config })
    }
}

/// What rotated numbers are multiplied by in a model that was stretched from `first` positions to `all`.
fn stretched(first: usize, all: usize) -> f32 {
    let factor = all as f64 / first as f64;
    if factor > 1.0 { (1.0 + factor.ln() / (first as f64).ln()).sqrt() as f32 } else { 1.0 }
}

fn config_json(c: &Fields) -> Result<Description> {
    let (key, said) = yarn::said(c);
    let within = Fields { json: said, ..*c };
    let partial = "partial_rotary_factor";
    let share = c.number(partial)?.or(within.number(partial)?).unwrap_or(1.0);
    let at = |part: &str| format!("{key}.{part}");
    let kind = within.text("rope_type")?.or(within.text("type")?);
    let (mut divided, mut scale) = (None, 1.0);
    match kind {
        None | Some("default") if within.number("factor")?.is_none() => {}
        // The older name is of the same scaling.
        Some("longrope" | "su") => {
            let original = "original_max_position_embeddings";
            let first = match within.optional_size(original)? {
                Some(first) => first,
                None => c.size(original)?,
            };
            if first < 2 {
                return Err(c.bad(original, format!("is {first}; it must be 2 or more")));
            }
            let divisors = &said["short_factor"];
            let numbers = divisors.as_array().map(|list| list.iter().map(|number| number.as_f64().map(|n| n as f32)));
            let numbers: Option<Vec<f32>> = numbers.and_then(Iterator::collect);
            let positive = |list: &Vec<f32>| list.iter().all(|divisor| divisor.is_finite() && *divisor > 0.0);
            let why = "is no list of positive numbers";
            let divisors = numbers.filter(positive).ok_or_else(|| c.bad(&at("short_factor"), why))?;
            let all = c.optional_size("max_position_embeddings")?.unwrap_or(first);
            scale = match within.number("attention_factor")? {
                Some(scale) => scale as f32,
                None => stretched(first, all),
            };
            divided = Some((divisors, first));
        }
        other => {
            let other = excerpt(other.unwrap_or("not named"));
            return Err(c.bad(&at("rope_type"), format!("is '{other}'; only longrope is supported for phi3")));
        }
    }
    // As of a model whose rotation is not scaled; how it is rotated is said below.
    let theta = c.rope_theta()?;
    let mut all = c.json.clone();
    for key in [partial, "rope_scaling", "rope_parameters"] {
        all[key] = Value::Null;
    }
    let config = Fields { json: &all, ..*c }.llama("phi3", Activated::SILU)?;
    let rotated = (config.head_dim as f64 * share) as usize;
    Rotation { rotated, theta, divided, scale }.of(config).map_err(|why| c.bad(key, why))
}

fn gguf(k: &Keys) -> Result<Description> {
    let heads = k.required("attention.head_count")?.max(1);
    let head_dim = k.whole_head_dim(k.required("embedding_length")? / heads)?;
    let (kind, key) = ("rope.scaling.type", "rope.dimension_count");
    if let Some(other) = k.gguf.metadata.str(&format!("{}.{kind}", k.arch))?.filter(|kind| *kind != "none") {
        // Files with divisors do not name their kind.
        if other != "longrope" {
            return Err(k.bad(kind, format!("is '{}'; only longrope is supported for phi3", excerpt(other))));
        }
    }
    let scale_key = "rope.scaling.attn_factor";
    let (divided, scale) = match &k.rope_factors {
        None => (None, 1.0),
        Some(divisors) => {
            let first = k.required("rope.scaling.original_context_length")?;
            if divisors.iter().any(|divisor| !(divisor.is_finite() && *divisor > 0.0)) {
                return Err(Error::bad(k.path, "rope_factors_short.weight", "is not of positive numbers"));
            }
            (Some((divisors.clone(), first)), k.number(scale_key)?.unwrap_or(1.0))
        }
    };
    let rotated = k.size(key)?.unwrap_or(head_dim);
    let rotation = Rotation { rotated, theta: k.rope_base()?, divided, scale };
    let positions = rotation.positions(head_dim).map_err(|why| k.bad(key, why))?;
    let config = k.common(k.rms_norm()?, Some(positions), Activated::SILU)?;
    rotation.of(config).map_err(|why| k.bad(key, why))
}
