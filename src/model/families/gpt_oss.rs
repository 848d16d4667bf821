//! gpt-oss: a mixture whose router and experts have biases, with a clamped SwiGLU of its own. Its attention has sinks and YaRN, and a window
//! in every other layer.

use super::json::{Fields, Routing};
use super::keys::Keys;
use super::names::{GGUF, LLAMA, Names};
use super::{Activated, Family};
use crate::error::Result;
use crate::model::Description;
use crate::model::config::{Activation, Ffn, Positions, RopeScaling, rope_frequencies};
use crate::model::layer::{CommonForm, Experts};
use crate::model::role::Role;

pub(super) const FAMILY: Family = Family {
    name: "gpt-oss",
    known_as: "gpt-oss (as a GGUF)",
    config_json: refuse_directory,
    gguf: Some(gguf),
    tensors: |_, _| LLAMA,
    gguf_tensors: |_| NAMES,
};

/// The same by the name that its config.json has for it.
pub(super) const DIRECTORY: Family = Family { name: "gpt_oss", known_as: "gpt_oss (as a GGUF)", gguf: None, ..FAMILY };

const NAMES: Names = {
    let mut names = GGUF;
    names.inside[Role::FfnNorm as usize - Role::AttnNorm as usize] = "post_attention_norm";
    names
};

/// Neither its config.json nor its GGUFs say that their function is another than SiLU.
const CLAMPED: Activated = Activated { unsaid: Activation::ClampedSwish, gated: true, both: false };

/// A directory has gate and up of an expert in turns, and their scales apart from their blocks.
fn refuse_directory(c: &Fields) -> Result<Description> {
    let why = "gpt-oss is read as a GGUF only: its safetensors files hold gate and up in turns and scales apart from their numbers, which \
               cannot be read where they lie; take a GGUF of it, or make one: llama.cpp's convert_hf_to_gguf.py DIRECTORY";
    Err(c.bad("model_type", why))
}

fn gguf(k: &Keys) -> Result<Description> {
    if k.given.is_some() {
        return Err(k.bad("hidden_act", "gpt-oss has an activation of its own: leave --activation out"));
    }
    // 3: the softmax of the products of those that were chosen.
    if let Some(other) = k.size("expert_gating_func")?.filter(|&function| function != 3) {
        return Err(k.bad("expert_gating_func", format!("is {other}; only 3 (softmax over the chosen) is supported")));
    }
    let key = "attention.sliding_window_pattern";
    if let Some(other) = k.size(key)?.filter(|&every| every != 2) {
        return Err(k.bad(key, format!("is {other}; only 2 (a window in every other layer) is supported")));
    }
    let key = "attention.sliding_window";
    if k.size(key)?.is_none_or(|window| window == 0) {
        return Err(k.bad(key, "missing: every other layer of gpt-oss has a window"));
    }
    let heads = k.required("attention.head_count")?.max(1);
    let head_dim = k.head_dim(k.required("embedding_length")? / heads)?;
    let (scaling, theta) = (scaling(k)?, k.rope_base()?);
    if let Some(other) = k.number("rope.freq_base_swa")?.filter(|&base| f64::from(base) != theta) {
        return Err(
            k.bad("rope.freq_base_swa", format!("is {other}; only the base of all layers, {theta}, is supported"))
        );
    }
    let frequencies = rope_frequencies(head_dim.min(1 << 12), theta, &scaling);
    let own = Keys { given: Some(Activation::ClampedSwish.into()), rope_factors: None, ..*k };
    let config = own.mixture(Some(Positions::Rope { frequencies }), CLAMPED, Routing::SOFTMAX)?;
    let experts = config.form.experts.map(|experts| Experts { biases: true, ..experts });
    let windowed = (0..config.layers).map(|layer| layer % 2 == 0).collect();
    let form = CommonForm { experts, sinks: true, windowed, rotary_scale: scaling.of_rotated(), ..config.form };
    Ok(Description { ffn_kind: Ffn::GatedClamped, attention_bias: true, output_bias: true, form, ..config })
}

fn scaling(k: &Keys) -> Result<RopeScaling> {
    let kind_key = "rope.scaling.type";
    match k.gguf.metadata.str(&format!("{}.{kind_key}", k.arch))? {
        Some("yarn") => {}
        other => {
            let other = other.unwrap_or("missing");
            return Err(k.bad(kind_key, format!("is {other}; gpt-oss has yarn, and nothing else is supported for it")));
        }
    }
    k.yarn(false)
}
