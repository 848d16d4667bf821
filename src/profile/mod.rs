//! Activation profiles: how often a model's neurons are active on text, and the figures that describe it (PowerInfer 3.1,
//! DynamicInfer 3 and E.1). This module only counts; `training::profile` runs the model.

mod accumulate;
mod counts;
mod importance;
pub mod magnitude;
pub mod statistics;

pub use accumulate::{Accumulator, Reader, jaccard_distance};
pub use counts::{Extras, Profile, empty_text};
pub use importance::Importance;
pub use statistics::{LayerStatistics, Statistics};
