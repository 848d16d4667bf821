//! Operators that the engine and the predictors share: a matrix over the thread team, gates, norms, RoPE.

pub mod gates;
pub mod linear;
pub mod math;
