//! A runtime-adaptive neuron-cache inference engine. `ARCHITECTURE.md` is the map of this crate.

pub mod engine;
pub mod error;
pub mod formats;
pub mod prng;
pub mod tokenizer;

pub use error::{Error, Result};
