//! Host and device together: attention, head and predictors run on the device, and so do the neurons that are in its slots; the CPU
//! computes the other neurons at the same time (PowerInfer 5.3). One copy out and one copy in per layer.

mod allocator;
mod attention;
mod attention_streaming;
mod chunk;
mod expert_chunk;
mod experts;
mod fired;
mod inside;
mod inside_chunk;
mod kv;
mod measure;
mod migrator;
pub mod parts;
mod pass;
mod planning;
mod predict;
mod scheduling;
mod scorers;
mod scratch;
mod state;
pub mod streaming;
mod weights;
mod workspace;

pub use attention_streaming::{layer_bytes as attention_layer_bytes, made_bytes as attention_made_bytes};
pub use fired::Fired;
pub use migrator::{DividedLayer, Migrator, MigratorCounts};
pub use scorers::{Lookahead, predictor_bytes};
pub use scratch::ChunkCounts;
pub use state::{Split, pinned_bytes};
pub use workspace::workspace_bytes;
