//! From texts to profiles and predictors: what a model did on them, and the networks that learn it.

pub mod histogram;
pub mod network;
pub mod profile;
pub mod samples;
pub mod train;
