//! Reads a config.json or a GGUF's metadata into a [`Description`], and knows what the files of a family call their tensors. Each family
//! is a file. Whatever is not known is refused by name: a model that ran with the wrong activation or without its scaling would give
//! wrong answers.

mod activated;
mod arcee;
mod bamboo;
mod deepseek2;
mod dots1;
mod ernie4_5;
mod falcon;
mod family;
mod gemma3;
mod gemma4;
mod glm4;
mod gpt_oss;
mod granite;
mod json;
mod keys;
mod leading;
mod lfm2;
mod llama;
mod minicpm;
mod mistral;
mod mixtral;
pub mod names;
mod nemotron;
mod nemotron_h;
mod olmo2;
mod opt;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen35;
mod smallthinker;
mod smollm3;
mod starcoder2;
mod yarn;

pub use activated::says_drelu;
pub use family::Family;

use super::config::NamedActivation;
use super::described::Description;
use crate::error::{Error, Result, excerpt};
use crate::formats::Tensors;
use crate::formats::gguf::Gguf;
use activated::{Activated, RELU_OR_DRELU, common_width, ungated, wants_drelu};
use json::Fields;
use keys::Keys;
use names::Names;
use serde_json::Value;
use std::path::Path;

const FAMILIES: [Family; 55] = [
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
    qwen35::FAMILY,
    qwen35::MIXTURE,
    qwen35::DIRECTORY,
    qwen35::TEXT,
    qwen35::DIRECTORY_MIXTURE,
    qwen35::TEXT_MIXTURE,
    qwen35::NEXT,
    qwen35::NEXT_GGUF,
    gpt_oss::FAMILY,
    gpt_oss::DIRECTORY,
    gemma3::FAMILY,
    gemma3::TEXT,
    gemma4::FAMILY,
    gemma4::TEXT,
    gemma4::ASSISTANT,
    glm4::DENSE,
    glm4::FAMILY,
    glm4::DIRECTORY,
    lfm2::FAMILY,
    lfm2::MIXTURE,
    lfm2::MIXTURE_GGUF,
    deepseek2::FAMILY,
    deepseek2::V2,
    deepseek2::V3,
    deepseek2::KIMI,
    deepseek2::GLM_LITE,
    dots1::FAMILY,
    ernie4_5::FAMILY,
    ernie4_5::MIXTURE,
    ernie4_5::MIXTURE_GGUF,
    nemotron::FAMILY,
    nemotron_h::FAMILY,
    nemotron_h::MIXTURE_GGUF,
    smollm3::FAMILY,
    arcee::FAMILY,
    granite::FAMILY,
    olmo2::FAMILY,
    phi3::FAMILY,
    starcoder2::FAMILY,
    smallthinker::FAMILY,
];

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
pub fn from_config_json(json: &Value, path: &Path, given: Option<NamedActivation>) -> Result<Description> {
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
) -> Result<Description> {
    let key = "general.architecture";
    let arch = gguf.metadata.str(key)?.ok_or_else(|| Error::bad(path, key, "missing"))?;
    let Some(read) = find(arch).and_then(|family| family.gguf) else {
        let why = format!("architecture '{}' is not supported; {}", excerpt(arch), known());
        return Err(Error::bad(path, key, why));
    };
    checked(read(&Keys { gguf, path, arch, rope_factors, given })?, path)
}

/// The names of the tensors in a Hugging Face directory with this configuration.
pub fn tensors(config: &Description, tensors: &Tensors) -> Names {
    (find(&config.family).expect("made by a family").tensors)(config, tensors).with_prefix_of(tensors)
}

/// The names of the tensors in a GGUF with this configuration.
pub fn gguf_tensors(config: &Description) -> Names {
    (find(&config.family).expect("made by a family").gguf_tensors)(config)
}

fn checked(config: Description, path: &Path) -> Result<Description> {
    config.check().map_err(|why| Error::bad(path, "", why))?;
    Ok(config)
}
