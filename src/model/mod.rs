//! Models: their shapes and families, the published files that they come from, and their weights as the engine reads them.

pub mod block;
pub mod config;
pub mod families;
pub mod form;
pub mod kv_cache;
pub mod layer;
pub mod role;
pub mod source;
pub mod weights;

pub use block::{BlockLayout, BlockPart};
pub use config::{Activation, Ffn, ModelConfig, NamedActivation, Norm, Positions};
pub use kv_cache::{KvCache, KvType};
pub use weights::{Matrix, Model};
