//! The activation of a family's FFN, and what files say of it.

use crate::error::{Error, Result};
use crate::model::config::{Activation, NamedActivation};
use std::path::Path;

/// The two activations that files call `relu`, for messages.
pub(super) const RELU_OR_DRELU: &str = "relu is ReGLU, relu(gate) * up, as in ReluLLaMA and ProSparse; drelu is dReLU, relu(gate) * relu(up), \
                             as in TurboSparse and Bamboo";

/// What is known of a family's FFN before its files are read.
#[derive(Clone, Copy)]
pub(super) struct Activated {
    /// The activation of a GGUF that does not name one.
    pub unsaid: Activation,
    pub gated: bool,
    /// The activation is dReLU, whatever a file calls it.
    pub both: bool,
}

impl Activated {
    pub const SILU: Activated = Activated { unsaid: Activation::Silu, gated: true, both: false };
    pub const DRELU: Activated = Activated { unsaid: Activation::Relu, gated: true, both: true };
    pub const RELU_UNGATED: Activated = Activated { unsaid: Activation::Relu, gated: false, both: false };
    pub const RELU2_UNGATED: Activated = Activated { unsaid: Activation::Relu2, gated: false, both: false };
    pub const GELU_TANH_UNGATED: Activated = Activated { unsaid: Activation::GeluTanh, gated: false, both: false };
    pub const GELU_UNGATED: Activated = Activated { unsaid: Activation::Gelu, gated: false, both: false };
}

/// Whether a model's name is that of a dReLU model: TurboSparse or Bamboo.
pub fn says_drelu(name: &str) -> bool {
    let name = name.to_lowercase().replace(['-', '_', ' '], "");
    name.contains("turbosparse") || name.contains("bamboo")
}

pub(super) fn wants_drelu(path: &Path, key: &str) -> Error {
    let why = format!(
        "the name says TurboSparse or Bamboo, which are dReLU models, and nothing in the file says that up passes through \
         the ReLU as well as the gate; name it: --activation drelu; {RELU_OR_DRELU}"
    );
    Error::bad(path, key, why)
}

/// The activation of a family whose FFN has no gate; dReLU is refused, because it needs one.
pub(super) fn ungated(path: &Path, key: &str, named: NamedActivation, family: &str) -> Result<Activation> {
    if !named.both {
        return Ok(named.function);
    }
    let family = family.to_uppercase();
    let why = format!("drelu is relu(gate) * relu(up), and {family} has no gate; name another function, relu say");
    Err(Error::bad(path, key, why))
}

/// The largest of the layers' sizes, and the list of all of them, which is empty where they are the same.
pub(super) fn common_width(sizes: Vec<usize>) -> (usize, Vec<usize>) {
    let most = sizes.iter().copied().max().unwrap_or(0);
    if sizes.iter().all(|&size| size == most) { (most, Vec::new()) } else { (most, sizes) }
}
