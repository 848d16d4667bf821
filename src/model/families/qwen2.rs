//! Qwen2: Llama with biases on queries, keys and values; and the same with a mixture of experts in the place of each FFN, one of them shared.

use super::json::{Fields, Routing, in_layers};
use super::keys::Keys;
use super::names::GGUF;
use super::{Activated, Family, llama};
use crate::error::Result;
use crate::model::Description;
use crate::model::layer::{CommonForm, SharedForm};
use serde_json::Value;

pub(super) const FAMILY: Family =
    Family { name: "qwen2", known_as: "qwen2", config_json, gguf_tensors: |_| GGUF, ..llama::FAMILY };

pub(super) const MIXTURE: Family =
    Family { name: "qwen2_moe", known_as: "qwen2_moe", config_json: mixture_json, gguf: None, ..FAMILY };

/// The same by the name that GGUFs have for it.
pub(super) const MIXTURE_GGUF: Family =
    Family { name: "qwen2moe", known_as: "qwen2moe", config_json: mixture_json, gguf: Some(mixture_gguf), ..FAMILY };

/// Softmax over all experts; the weights of those that were chosen stay as they are.
const ROUTING: Routing = Routing { normalised: false, ..Routing::SOFTMAX };

fn config_json(c: &Fields) -> Result<Description> {
    let config = windowed(c, c.llama("qwen2", Activated::SILU)?)?;
    Ok(Description { attention_bias: true, output_bias: false, ..config })
}

fn mixture_json(c: &Fields) -> Result<Description> {
    c.refuse_unless_default("decoder_sparse_step", &Value::from(1))?;
    c.refuse_unless_default("mlp_only_layers", &Value::Array(Vec::new()))?;
    if !c.json["layer_types"].is_array() {
        // Without the list its readers disagree on which layers have the window.
        c.refuse_unless_default("use_sliding_window", &Value::Bool(false))?;
    }
    let keys = ["num_experts", "num_experts_per_tok", "moe_intermediate_size"];
    let rule = Routing { normalised: c.flag("norm_topk_prob")?.unwrap_or(false), ..ROUTING };
    let config = windowed(c, c.mixture("qwen2_moe", Activated::SILU, keys, rule)?)?;
    let attention_bias = c.flag("qkv_bias")?.unwrap_or(true);
    let config = Description { attention_bias, output_bias: false, ..config };
    Ok(with_shared(config, c.size("shared_expert_intermediate_size")?))
}

/// The first of its GGUFs have neither size of an expert: the shared one is as large as their FFN, and the chosen ones are together.
fn mixture_gguf(k: &Keys) -> Result<Description> {
    let config = k.mixture(None, Activated::SILU, ROUTING)?;
    let shared = match k.size("expert_shared_feed_forward_length")? {
        Some(width) => width,
        None => k.required("feed_forward_length")?,
    };
    let used = config.form.experts.map_or(1, |experts| experts.used).max(1);
    let ffn = if k.size("expert_feed_forward_length")?.is_some() { config.ffn } else { config.ffn / used };
    Ok(with_shared(Description { ffn, ..config }, shared))
}

/// The same mixture with a shared expert of so many neurons, whose output has a weight.
pub(super) fn with_shared(mut config: Description, width: usize) -> Description {
    config
        .form
        .experts
        .iter_mut()
        .for_each(|experts| experts.shared = Some(SharedForm { width, weighted: true, normed: false }));
    config
}

/// The same with the window where Qwen's files say it is: they name one even where it is not used; where it is, it is used from layer
/// `max_window_layers` on, unless `layer_types` says which layers have it.
pub(super) fn windowed(c: &Fields, config: Description) -> Result<Description> {
    let slides = c.flag("use_sliding_window")?.unwrap_or(false);
    let first = c.optional_size("max_window_layers")?.unwrap_or(28);
    let (window, windowed) = match (slides, c.json["layer_types"].is_array()) {
        (false, _) => (None, Vec::new()),
        (true, true) => (config.window, config.form.windowed),
        (true, false) => in_layers(config.window, (0..config.layers).map(|layer| layer >= first).collect()),
    };
    Ok(Description { window, form: CommonForm { windowed, ..config.form }, ..config })
}
