//! ERNIE 4.5: Llama with rotation of neighbouring rows; and mixtures of DeepSeek's kind with a softmax router.

use super::json::Fields;
use super::leading::{self, Router};
use super::names::{GGUF_INTERLEAVED, LLAMA, Names, QkvRows};
use super::{Activated, Family};
use crate::error::Result;
use crate::model::Description;
use crate::model::layer::Scoring;
use crate::model::role::Role;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "ernie4_5",
    known_as: "ernie4_5",
    config_json: |c| without_bias(c)?.llama("ernie4_5", Activated::SILU),
    gguf: Some(|k| k.common(k.rms_norm()?, None, Activated::SILU)),
    tensors: |_, _| NAMES,
    gguf_tensors: |_| GGUF_INTERLEAVED,
};

pub(super) const MIXTURE: Family =
    Family { name: "ernie4_5_moe", known_as: "ernie4_5_moe", config_json: mixture_json, gguf: None, ..FAMILY };

/// The same by the name that GGUFs have for it.
pub(super) const MIXTURE_GGUF: Family = Family {
    name: "ernie4_5-moe",
    known_as: "ernie4_5-moe",
    config_json: mixture_json,
    gguf: Some(|k| leading::gguf(k, Router::usually(Scoring::Softmax), None)),
    ..FAMILY
};

/// Rows of queries and keys stand as they are rotated.
const NAMES: Names = {
    let names = LLAMA.with(Role::SelectionBias, "mlp.moe_statics.e_score_correction");
    Names { qkv: QkvRows::Interleaved, shared: leading::SHARED, ..names }
};

/// The same fields, unless they ask for biases.
fn without_bias<'a>(c: &'a Fields<'a>) -> Result<&'a Fields<'a>> {
    c.refuse_unless_default("use_bias", &Value::Bool(false))?;
    Ok(c)
}

fn mixture_json(c: &Fields) -> Result<Description> {
    let mut all = without_bias(c)?.json.clone();
    for (ours, theirs) in [
        ("moe_num_experts", "n_routed_experts"),
        ("moe_k", "num_experts_per_tok"),
        ("moe_num_shared_experts", "n_shared_experts"),
        ("moe_layer_start_index", "first_k_dense_replace"),
    ] {
        all[theirs] = all[ours].take();
    }
    let c = &Fields { json: &all, ..*c };
    c.refuse_unless_default("moe_layer_interval", &Value::from(1))?;
    let layers = c.layer_count()?;
    if c.json["moe_layer_end_index"].as_i64() != Some(-1) {
        c.refuse_unless_default("moe_layer_end_index", &Value::from(layers - 1))?;
    }
    leading::config_json(c, "ernie4_5_moe", Router::usually(Scoring::Softmax))
}
