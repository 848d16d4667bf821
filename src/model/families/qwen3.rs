//! Qwen3: Llama with normed queries and keys; and the same with a mixture of experts in the place of each FFN.

use super::json::{Fields, Routing};
use super::keys::Keys;
use super::names::GGUF;
use super::{Activated, Family, llama, qwen2};
use crate::error::Result;
use crate::model::Description;
use crate::model::layer::CommonForm;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "qwen3",
    known_as: "qwen3",
    config_json: |c| qwen2::windowed(c, normed(c.llama("qwen3", Activated::SILU)?)),
    gguf: Some(|k| Ok(normed(k.common(k.rms_norm()?, None, Activated::SILU)?))),
    gguf_tensors: |_| GGUF,
    ..llama::FAMILY
};

pub(super) const MIXTURE: Family =
    Family { name: "qwen3_moe", known_as: "qwen3_moe", config_json: mixture_json, gguf: None, ..FAMILY };

/// The same by the name that GGUFs have for it.
pub(super) const MIXTURE_GGUF: Family = Family {
    name: "qwen3moe",
    known_as: "qwen3moe",
    config_json: mixture_json,
    gguf: Some(|k: &Keys| Ok(normed(k.mixture(None, Activated::SILU, Routing::SOFTMAX)?))),
    ..FAMILY
};

fn normed(config: Description) -> Description {
    Description { form: CommonForm { qk_norm: true, ..config.form }, ..config }
}

fn mixture_json(c: &Fields) -> Result<Description> {
    c.refuse_unless_default("decoder_sparse_step", &Value::from(1))?;
    c.refuse_unless_default("mlp_only_layers", &Value::Array(Vec::new()))?;
    let keys = ["num_experts", "num_experts_per_tok", "moe_intermediate_size"];
    let rule = Routing { normalised: c.flag("norm_topk_prob")?.unwrap_or(false), ..Routing::SOFTMAX };
    qwen2::windowed(c, normed(c.mixture("qwen3_moe", Activated::SILU, keys, rule)?))
}
