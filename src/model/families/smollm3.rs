//! SmolLM3: Llama of which every fourth layer knows no positions.

use super::json::Fields;
use super::names::{GGUF_INTERLEAVED, LLAMA};
use super::{Activated, Family, qwen2};
use crate::error::Result;
use crate::model::Description;
use crate::model::layer::CommonForm;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "smollm3",
    known_as: "smollm3",
    config_json,
    gguf: Some(|k| Ok(rotated(k.common(k.rms_norm()?, None, Activated::SILU)?, EVERY))),
    tensors: |_, _| LLAMA,
    gguf_tensors: |_| GGUF_INTERLEAVED,
};

/// One layer of so many rotates nothing: the last of them.
const EVERY: usize = 4;

fn config_json(c: &Fields) -> Result<Description> {
    let mut all = c.json.clone();
    if all["tie_word_embeddings"].is_null() {
        all["tie_word_embeddings"] = Value::Bool(true);
    }
    let c = &Fields { json: &all, ..*c };
    let config = qwen2::windowed(c, c.llama("smollm3", Activated::SILU)?)?;
    let key = "no_rope_layers";
    let Value::Array(layers) = &c.json[key] else {
        return Ok(rotated(config, c.optional_size("no_rope_layer_interval")?.unwrap_or(EVERY)));
    };
    let flags = layers.iter().map(|layer| layer.as_u64().filter(|&flag| flag <= 1).map(|flag| flag == 1));
    let rotated = flags.collect::<Option<_>>().ok_or_else(|| c.bad(key, "is not a list of 0 and 1"))?;
    Ok(Description { form: CommonForm { rotated, ..config.form }, ..config })
}

fn rotated(config: Description, every: usize) -> Description {
    let rotated = (1..=config.layers).map(|number| every == 0 || number % every != 0).collect();
    Description { form: CommonForm { rotated, ..config.form }, ..config }
}
