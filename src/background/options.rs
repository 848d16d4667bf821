//! Options of the scheduler beside the engine.

use crate::cpu::Kernels;
use crate::ids::StoreId;
use crate::predictor::{Calibration, Predictor};
use crate::scheduler::thresholds::LossWeight;
use crate::scheduler::{Policy, Rules};
use std::sync::Arc;

/// Changes the rules of a policy.
pub type Tune = Arc<dyn Fn(Rules) -> Rules + Send + Sync>;

/// What the thread works with.
pub struct BackgroundOptions {
    /// The policy to begin with.
    pub policy: Policy,
    /// Changes the rules of that policy, and of any that is set later.
    pub tune: Tune,
    /// What leaving out a neuron is taken to lose, for balancing thresholds.
    pub weight: LossWeight,
    /// Layers to look ahead, 1 or more.
    pub ahead: usize,
    /// Sequences that may be in one pass; memory for them is taken at the start.
    pub sequences: usize,
    /// Predicts what later layers will need; `None`: only frequencies count.
    pub predictor: Option<Arc<dyn Predictor>>,
    /// By layer: its single threshold and calibration table, if it is predicted from its own residual; such layers' thresholds are
    /// balanced.
    pub thresholds: Vec<Option<(f32, Calibration)>>,
    /// How often each neuron was active before, 0 to 1, `[layers][ffn]`, neurons in the store's order.
    pub history: Vec<Vec<f32>>,
    /// By layer, the neurons of the static placement, in the store's order.
    pub placed: Vec<Vec<StoreId>>,
    /// CPU kernels for the predictor.
    pub kernels: Kernels,
    /// Threads that compute the host's part of an FFN, of which the engine's is one.
    pub threads: usize,
    /// The link's rate in GB/s, until it has been measured.
    pub link_gb_s: f64,
    /// How long the scheduler takes for an observation on a virtual clock; `None` for a thread of its own, and the time that it takes.
    pub latency: Option<Latency>,
}

/// How long a scheduler of its own core takes for an observation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    /// Nanoseconds for each observation.
    pub observation_ns: f64,
    /// How fast it reads a predictor's weights, GB/s.
    pub gb_s: f64,
}
