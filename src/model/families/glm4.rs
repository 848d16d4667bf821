//! GLM-4 0414; and GLM-4.5 to 4.7, a mixture of DeepSeek's kind with biases on queries, keys and values, and half of each head rotated.

use super::json::Fields;
use super::leading::{self, Router};
use super::names::{GGUF, LLAMA, Names, QkvRows};
use super::{Activated, Family};
use crate::error::Result;
use crate::model::Description;
use crate::model::config::Positions;
use crate::model::layer::{CommonForm, Norms, Scoring};
use crate::model::role::Role;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "glm4moe",
    known_as: "glm4moe",
    config_json: |c| Err(c.bad("model_type", "is the name of GGUFs; a directory's is glm4_moe")),
    gguf: Some(|k| leading::gguf(k, ROUTER, Some(leading::partial_rotary(k)?))),
    tensors: |config, _| names(config),
    gguf_tensors: |config| {
        let names = GGUF.with(Role::FfnNorm, "post_attention_norm");
        Names { qkv: halves(config), ..names }
    },
};

/// The same by the name that its config.json has for it.
pub(super) const DIRECTORY: Family =
    Family { name: "glm4_moe", known_as: "glm4_moe", config_json, gguf: None, ..FAMILY };

/// GLM-4 0414, with one FFN: norms on both sides, and pairs of neighbours.
pub(super) const DENSE: Family = Family {
    name: "glm4",
    known_as: "glm4",
    config_json: |c| {
        let config = partly_rotated(c, "glm4", |c| c.llama("glm4", Activated::SILU))?;
        let attention_bias = c.flag("attention_bias")?.unwrap_or(true);
        Ok(around(Description { attention_bias, output_bias: false, ..config }))
    },
    gguf: Some(|k| {
        let key = "rope.dimension_sections";
        if k.gguf.metadata.i32s(&format!("{}.{key}", k.arch))?.is_some() {
            return Err(k.bad(key, "is of a model that sees pictures, which is not supported for glm4"));
        }
        Ok(around(k.common(k.rms_norm()?, Some(leading::partial_rotary(k)?), Activated::SILU)?))
    }),
    tensors: |config, _| {
        let names = LLAMA.with(Role::AttnPostNorm, "post_self_attn_layernorm");
        Names { qkv: neighbours(config), ..names.with(Role::FfnPostNorm, "post_mlp_layernorm") }
    },
    gguf_tensors: |config| Names { qkv: neighbours(config), ..GGUF },
};

fn around(config: Description) -> Description {
    Description { form: CommonForm { norms: Norms::Around, ..config.form }, ..config }
}

/// The rotated numbers of a head stand first, in pairs.
fn neighbours(config: &Description) -> QkvRows {
    match halves(config) {
        QkvRows::Partial { rotated } => QkvRows::InterleavedPartial { rotated },
        _ => QkvRows::Interleaved,
    }
}

const ROUTER: Router = Router::usually(Scoring::Sigmoid);

/// Of a head this part is rotated where the file does not say it.
const ROTATED: f64 = 0.5;

fn config_json(c: &Fields) -> Result<Description> {
    let config = partly_rotated(c, "glm4_moe", |c| leading::config_json(c, "glm4_moe", ROUTER))?;
    // The biases that the file speaks of are those of queries, keys and values.
    Ok(Description { output_bias: false, ..config })
}

/// The model of `family` that `whole` reads of fields which rotate whole heads, with the first numbers of a head rotated, as many as the file says.
pub(super) fn partly_rotated(
    c: &Fields,
    family: &str,
    whole: impl FnOnce(&Fields) -> Result<Description>,
) -> Result<Description> {
    c.refuse_unless_default("rope_scaling", &Value::Null)?;
    let (key, parameters) = ("partial_rotary_factor", &c.json["rope_parameters"]);
    if parameters["rope_type"].as_str().is_some_and(|kind| kind != "default") {
        return Err(c.bad("rope_parameters", format!("is {parameters}; scaling is not supported for {family}")));
    }
    let within = Fields { json: parameters, ..*c };
    let factor = c.number(key)?.or(within.number(key)?).unwrap_or(ROTATED);
    let mut all = c.json.clone();
    all[key] = Value::Null;
    let c = &Fields { json: &all, ..*c };
    let config = whole(c)?;
    let rotated = (config.head_dim as f64 * factor) as usize;
    let positions = leading::rotation(config.head_dim, rotated, c.rope_theta()?).map_err(|why| c.bad(key, why))?;
    Ok(Description { positions, ..config })
}

fn names(config: &Description) -> Names {
    let names = LLAMA.with(Role::SelectionBias, "mlp.gate.e_score_correction");
    Names { qkv: halves(config), shared: leading::SHARED, ..names }
}

/// The rotated numbers of a head stand first, in halves.
pub(super) fn halves(config: &Description) -> QkvRows {
    let Positions::Rope { frequencies } = &config.positions else { return QkvRows::Apart };
    match 2 * frequencies.iter().filter(|frequency| **frequency > 0.0).count() {
        rotated if rotated < config.head_dim => QkvRows::Partial { rotated },
        _ => QkvRows::Apart,
    }
}
