//! Reads a config.json or a GGUF's metadata into a [`ModelConfig`], and knows what the files of a family call their tensors. Each family
//! is a file. Whatever is not known is refused by name: a model that ran with the wrong activation or without its scaling would give
//! wrong answers.

mod bamboo;
mod falcon;
mod gpt_oss;
mod json;
mod keys;
mod llama;
mod minicpm;
mod mistral;
mod mixtral;
pub mod names;
mod opt;
mod qwen2;
mod qwen3;
mod smallthinker;

use super::config::{Activation, ModelConfig, NamedActivation};
use crate::error::{Error, Result, excerpt};
use crate::formats::Tensors;
use crate::formats::gguf::Gguf;
use json::Fields;
use keys::Keys;
use names::Names;
use serde_json::Value;
use std::path::Path;

/// The two activations that files call `relu`, for messages.
const RELU_OR_DRELU: &str = "relu is ReGLU, relu(gate) * up, as in ReluLLaMA and ProSparse; drelu is dReLU, relu(gate) * relu(up), \
                             as in TurboSparse and Bamboo";

/// A family of models: how its files are read. A new one is a file in this folder and a line in `FAMILIES`.
pub struct Family {
    /// `model_type` of its config.json, and `general.architecture` of its GGUFs if it has any.
    name: &'static str,
    /// How messages list it among the known families.
    known_as: &'static str,
    config_json: fn(&Fields) -> Result<ModelConfig>,
    gguf: Option<fn(&Keys) -> Result<ModelConfig>>,
    /// The names of the tensors in a Hugging Face directory, with the usual prefix; `gguf_tensors` gives those in a GGUF.
    tensors: fn(&ModelConfig, &Tensors) -> Names,
    gguf_tensors: fn(&ModelConfig) -> Names,
}

const FAMILIES: [Family; 18] = [
    llama::FAMILY,
    mistral::FAMILY,
    qwen2::FAMILY,
    qwen2::MIXTURE,
    qwen2::MIXTURE_GGUF,
    llama::PROSPARSE,
    bamboo::FAMILY,
    opt::FAMILY,
    falcon::FAMILY,
    minicpm::FAMILY,
    mixtral::FAMILY,
    mixtral::TURBOSPARSE,
    qwen3::FAMILY,
    qwen3::MIXTURE,
    qwen3::MIXTURE_GGUF,
    gpt_oss::FAMILY,
    gpt_oss::DIRECTORY,
    smallthinker::FAMILY,
];

/// What is known of a family's FFN before its files are read.
#[derive(Clone, Copy)]
struct Activated {
    /// The activation of a GGUF that does not name one.
    unsaid: Activation,
    gated: bool,
    /// The activation is dReLU, whatever a file calls it.
    both: bool,
}

impl Activated {
    const SILU: Activated = Activated { unsaid: Activation::Silu, gated: true, both: false };
    const DRELU: Activated = Activated { unsaid: Activation::Relu, gated: true, both: true };
    const RELU_UNGATED: Activated = Activated { unsaid: Activation::Relu, gated: false, both: false };
    const GELU_UNGATED: Activated = Activated { unsaid: Activation::Gelu, gated: false, both: false };
}

/// The family of this name, if it is known.
fn find(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.name == name)
}

fn known() -> String {
    let (last, others) = FAMILIES.split_last().expect("there are families");
    let others: Vec<_> = others.iter().map(|family| family.known_as).collect();
    format!("known are {} and {}", others.join(", "), last.known_as)
}

/// Reads a Hugging Face config.json. `given` is the activation that a user has named, which wins over the file's.
///
/// # Errors
/// [`Error::BadFile`] with the field that is missing, contradicts another or says what is not supported.
pub fn from_config_json(json: &Value, path: &Path, given: Option<NamedActivation>) -> Result<ModelConfig> {
    let fields = Fields { json, path, given };
    let name = fields
        .text("model_type")?
        .ok_or_else(|| fields.bad("model_type", format!("missing, so the model's family is not known; {}", known())))?;
    let family = find(name)
        .ok_or_else(|| fields.bad("model_type", format!("family '{}' is not supported; {}", excerpt(name), known())))?;
    checked((family.config_json)(&fields)?, path)
}

/// Reads a GGUF's metadata. `rope_factors` is its `rope_freqs.weight`, if it has one; `given` is the activation that a user has named,
/// which wins over the file's.
///
/// # Errors
/// As [`from_config_json`].
pub fn from_gguf(
    gguf: &Gguf,
    path: &Path,
    rope_factors: Option<Vec<f32>>,
    given: Option<NamedActivation>,
) -> Result<ModelConfig> {
    let key = "general.architecture";
    let arch = gguf.metadata.str(key)?.ok_or_else(|| Error::bad(path, key, "missing"))?;
    let Some(read) = find(arch).and_then(|family| family.gguf) else {
        let why = format!("architecture '{}' is not supported; {}", excerpt(arch), known());
        return Err(Error::bad(path, key, why));
    };
    checked(read(&Keys { gguf, path, arch, rope_factors, given })?, path)
}

/// The names of the tensors in a Hugging Face directory with this configuration.
pub fn tensors(config: &ModelConfig, tensors: &Tensors) -> Names {
    (find(&config.family).expect("made by a family").tensors)(config, tensors).with_prefix_of(tensors)
}

/// The names of the tensors in a GGUF with this configuration.
pub fn gguf_tensors(config: &ModelConfig) -> Names {
    (find(&config.family).expect("made by a family").gguf_tensors)(config)
}

fn checked(config: ModelConfig, path: &Path) -> Result<ModelConfig> {
    config.check().map_err(|why| Error::bad(path, "", why))?;
    Ok(config)
}

/// Whether a model's name is that of a dReLU model: TurboSparse or Bamboo.
pub fn says_drelu(name: &str) -> bool {
    let name = name.to_lowercase().replace(['-', '_', ' '], "");
    name.contains("turbosparse") || name.contains("bamboo")
}

fn wants_drelu(path: &Path, key: &str) -> Error {
    let why = format!(
        "the name says TurboSparse or Bamboo, which are dReLU models, and nothing in the file says that up passes through \
         the ReLU as well as the gate; name it: --activation drelu; {RELU_OR_DRELU}"
    );
    Error::bad(path, key, why)
}

/// The activation of a family whose FFN has no gate; dReLU is refused, because it needs one.
fn ungated(path: &Path, key: &str, named: NamedActivation, family: &str) -> Result<Activation> {
    if !named.both {
        return Ok(named.function);
    }
    let family = family.to_uppercase();
    let why = format!("drelu is relu(gate) * relu(up), and {family} has no gate; name another function, relu say");
    Err(Error::bad(path, key, why))
}

/// The largest of the layers' sizes, and the list of all of them, which is empty where they are the same.
fn common_width(sizes: Vec<usize>) -> (usize, Vec<usize>) {
    let most = sizes.iter().copied().max().unwrap_or(0);
    if sizes.iter().all(|&size| size == most) { (most, Vec::new()) } else { (most, sizes) }
}
