//! A runtime-adaptive neuron-cache inference engine. `ARCHITECTURE.md` is the map of this crate.

pub mod error;
pub mod formats;
pub mod tokenizer;

pub use error::{Error, Result};
