//! Llama, ReluLLaMA among it, and ProSparse (`sparsellama`), which is Llama with FATReLU. The layers of most families are these.

use super::json::Routing;
use super::names::{GGUF_INTERLEAVED, LLAMA};
use super::{Activated, Family};

pub(super) const FAMILY: Family = Family {
    name: "llama",
    known_as: "llama (also ReluLLaMA)",
    config_json: |c| c.llama("llama", Activated::SILU),
    // Mixtral's GGUFs say that they are of this architecture, too.
    gguf: Some(|k| match k.experts()? {
        Some(_) => k.mixture(None, Activated::SILU, Routing::SOFTMAX),
        None => k.common(k.rms_norm()?, None, Activated::SILU),
    }),
    tensors: |_, _| LLAMA,
    gguf_tensors: |_| GGUF_INTERLEAVED,
};

/// Its GGUFs say that they are of the architecture `llama`.
pub(super) const PROSPARSE: Family = Family {
    name: "sparsellama",
    known_as: "sparsellama (ProSparse)",
    config_json: |c| c.llama("sparsellama", Activated::SILU),
    gguf: None,
    ..FAMILY
};
