//! Predicts which neurons of a layer will be active, before its FFN runs (PowerInfer 5.1, SparseInfer IV, DynamicInfer 4.2.1).
//!
//! A predictor gives every neuron of a layer a *score*, from the residual after the attention (before it where attention and FFN stand side
//! by side) of that layer or of one `ahead` layers before it. A [`Calibration`] per layer and look-ahead turns scores into probabilities,
//! so that one threshold means the same for every kind of predictor; the hot path turns the threshold into a score once and compares
//! scores.

mod calibration;
pub mod exact;
mod interface;
mod load;
pub mod mlp;
pub mod router;
pub mod sign;

pub use calibration::{Bytes, Calibration};
pub use exact::Exact;
pub use interface::{Form, Kind, NetworkWeights, Predictor, Scratch, Tools};
pub use load::open;
pub use mlp::Mlp;
pub use router::Router;
pub use sign::Sign;
