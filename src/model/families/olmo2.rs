//! OLMo 2: Llama with norms behind attention and FFN in the place of those before them, queries of all heads normed together, and so keys.

use super::names::{GGUF, LLAMA, Names};
use super::{Activated, Family};
use crate::model::Description;
use crate::model::form::Norms;
use crate::model::layer::CommonForm;
use crate::model::role::Role;

pub(super) const FAMILY: Family = Family {
    name: "olmo2",
    known_as: "olmo2",
    config_json: |c| {
        let config = c.llama("olmo2", Activated::SILU)?;
        Ok(normed(config))
    },
    gguf: Some(|k| {
        // OLMo 3 has the name and a window in some layers, with a rotation of their own.
        let key = "attention.sliding_window";
        if let Some(window) = k.size(key)?.filter(|&window| window > 0) {
            return Err(k.bad(key, format!("is {window}; OLMo 3, which has windows, is not supported")));
        }
        Ok(normed(k.common(k.rms_norm()?, None, Activated::SILU)?))
    }),
    tensors: |_, _| NAMES,
    gguf_tensors: |_| GGUF.with(Role::AttnNorm, "").with(Role::FfnNorm, ""),
};

const NAMES: Names = LLAMA
    .with(Role::AttnNorm, "")
    .with(Role::FfnNorm, "")
    .with(Role::AttnPostNorm, "post_attention_layernorm")
    .with(Role::FfnPostNorm, "post_feedforward_layernorm");

fn normed(config: Description) -> Description {
    let form = CommonForm { norms: Norms::After, qk_norm: true, qk_norm_joined: true, ..config.form };
    Description { form, ..config }
}
