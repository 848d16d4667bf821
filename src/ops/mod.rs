//! Operators that the engine and the predictors share: matrix products on the thread pool, gates, norms, RoPE, the choice of experts.

pub mod gates;
pub mod linear;
pub mod math;
pub mod router;
