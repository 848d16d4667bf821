//! Models: their shapes and families, the published files that they come from, and their weights as the engine reads them.

pub mod block;
pub mod config;
pub mod families;
pub mod ffn_weights;
mod fingerprint;
pub mod form;
mod form_checks;
pub mod in_place;
pub mod kv_cache;
mod kv_type;
pub mod layer;
pub mod matrix;
mod norm_weights;
pub mod per_layer;
mod positions;
pub mod recurrence;
mod recurrent;
pub mod role;
pub mod source;
mod source_checks;
pub mod source_vectors;
pub mod stacked;
pub mod weights;

pub use block::{BlockLayout, BlockPart};
pub use config::{Activation, Ffn, ModelConfig, NamedActivation, Norm, Positions};
pub use ffn_weights::{ExpertBiases, ExpertWeights, FfnMatrices, FfnWeights, NeuronBlocks, SharedExpert};
pub use kv_cache::KvCache;
pub use kv_type::KvType;
pub use matrix::Matrix;
pub use recurrent::Turn;
pub use stacked::Stacked;
pub use weights::Model;
