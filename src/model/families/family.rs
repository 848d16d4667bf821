//! One family of models: its names, and the functions that read its files.

use super::json::Fields;
use super::keys::Keys;
use super::names::Names;
use crate::error::Result;
use crate::formats::Tensors;
use crate::model::Description;

/// A family of models: how its files are read. A new one is a file in this folder and a line in `FAMILIES` (`mod.rs`).
pub struct Family {
    /// `model_type` of its config.json, and `general.architecture` of its GGUFs if it has any.
    pub(super) name: &'static str,
    /// How messages list it among the known families.
    pub(super) known_as: &'static str,
    pub(super) config_json: fn(&Fields) -> Result<Description>,
    pub(super) gguf: Option<fn(&Keys) -> Result<Description>>,
    /// The names of the tensors in a Hugging Face directory, with the usual prefix; `gguf_tensors` gives those in a GGUF.
    pub(super) tensors: fn(&Description, &Tensors) -> Names,
    pub(super) gguf_tensors: fn(&Description) -> Names,
}
