//! The interface between the engine and what decides which neurons move.

use crate::cache::NeuronCache;
use crate::device::Device;
use crate::engine::ffn::Selection;
use crate::engine::sparsity::Sparsity;
use crate::scheduler::Policy;

/// A layer whose neurons have been divided between host and device, before its FFN: what the engine knows of it.
pub struct DividedLayer<'a> {
    /// The layer's number, from 0.
    pub layer: usize,
    /// Position of the first token in its sequence.
    pub first: usize,
    /// Tokens of the pass.
    pub n: usize,
    /// The tokens continue several sequences, and are not a chunk of one.
    pub batch: bool,
    /// Residual that the FFN reads, `[n, hidden]`: after attention, or before it where the two stand side by side.
    pub residual: &'a [f32],
    /// Which neurons will be computed; `None` for all.
    pub selection: Option<&'a Selection>,
    /// The layer's threshold as it was set and its own predictor's scores, `[n, ffn]`; `None` if it is not predicted from its own residual.
    pub own: Option<(f32, &'a [f32])>,
}

/// Decides, between layers, which neurons move to the device and from which probability on they are computed.
pub trait Migrator: Send {
    /// Begins the moves that were decided since the last call. Called on the engine's thread when a layer begins, so that copies for it can
    /// arrive during its attention, and again before its FFN; must not wait.
    fn apply(&mut self, device: &mut dyn Device, cache: &mut NeuronCache, sparsity: &mut Sparsity);

    /// Is given a layer before its FFN, once it is decided which neurons are computed where; must not wait.
    fn tell(&mut self, _at: &DividedLayer<'_>, _device: &dyn Device, _cache: &NeuronCache) {}

    /// Is told of a layer of a prompt's chunk, which was computed dense: `tokens` tokens from position `first` on, and for how many of them
    /// each neuron was active, `[ffn]`.
    fn prompt(&mut self, _layer: usize, _first: usize, _tokens: usize, _counts: &[u32]) {}

    /// The policy in force; `None` if it has none.
    fn policy(&self) -> Option<Policy> {
        None
    }

    /// Changes the policy from the next layer on, and resets thresholds that the new one does not balance; `false` if it cannot.
    fn set_policy(&mut self, _policy: Policy, _sparsity: &mut Sparsity) -> bool {
        false
    }

    /// What it did so far.
    fn counts(&self) -> MigratorCounts {
        MigratorCounts::default()
    }

    /// Ends it. Returns how often each neuron was active, 0 to 1, `[layers][ffn]`; `None` if it has not learnt that.
    fn finish(self: Box<Self>) -> Option<Vec<Vec<f32>>> {
        None
    }
}

/// What a migrator did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MigratorCounts {
    /// Observations of layers that the engine sent.
    pub told: u64,
    /// Of these, observations that were lost because too many waited.
    pub untold: u64,
    /// Observations that were handled.
    pub decided: u64,
    /// Decisions that were lost because too many waited for the engine.
    pub dropped: u64,
    /// Moves that the cache refused, because the slot or the neuron had changed meanwhile.
    pub refused: u64,
    /// Whether neurons move now; `false` while the static placement is kept because moving does not pay.
    pub moving: bool,
}
