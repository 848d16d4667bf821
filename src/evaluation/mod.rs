//! How fast and how good a model is as it runs here: speed, likelihood of texts, agreement with the dense model, timelines.

pub mod audit;
pub mod bench;
pub mod evaluate;
pub mod fit;
pub mod outliers;
pub mod timeline;
