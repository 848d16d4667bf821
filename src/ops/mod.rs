//! Operators that the engine and the predictors share: a matrix over the thread team, norms, RoPE, softmax.

pub mod linear;
pub mod math;
