//! Qwen2: Llama with biases on queries, keys and values.

use super::json::{Fields, in_layers};
use super::names::GGUF;
use super::{Activated, Family, llama};
use crate::error::Result;
use crate::model::config::ModelConfig;
use crate::model::layer::LayerForm;

pub(super) const FAMILY: Family =
    Family { name: "qwen2", known_as: "qwen2", config_json, gguf_tensors: |_| GGUF, ..llama::FAMILY };

fn config_json(c: &Fields) -> Result<ModelConfig> {
    let config = windowed(c, c.llama("qwen2", Activated::SILU)?)?;
    Ok(ModelConfig { attention_bias: true, output_bias: false, ..config })
}

/// The same with the window where Qwen's files say it is: they name one even where it is not used; where it is, it is used from layer
/// `max_window_layers` on, unless `layer_types` says which layers have it.
pub(super) fn windowed(c: &Fields, config: ModelConfig) -> Result<ModelConfig> {
    let slides = c.flag("use_sliding_window")?.unwrap_or(false);
    let first = c.optional_size("max_window_layers")?.unwrap_or(28);
    let (window, windowed) = match (slides, c.json["layer_types"].is_array()) {
        (false, _) => (None, Vec::new()),
        (true, true) => (config.window, config.form.windowed),
        (true, false) => in_layers(config.window, (0..config.layers).map(|layer| layer >= first).collect()),
    };
    Ok(ModelConfig { window, form: LayerForm { windowed, ..config.form }, ..config })
}
