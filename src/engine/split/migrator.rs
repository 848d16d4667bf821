//! The interface between the engine and what decides which neurons move.

use super::fired::Fired;
use super::scorers::Lookahead;
use crate::cache::{Frames, NeuronCache};
use crate::device::Device;
use crate::engine::ffn::Selection;
use crate::engine::sparsity::Sparsity;
use crate::ids::StoreId;
use crate::scheduler::{Comparison, LayerTimes, Policy};

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
    /// The layer's threshold as it was set and the scores by which its neurons were chosen, `[n, ffn]`; `None` if it is not predicted, or its
    /// scores have not left the device.
    pub own: Option<(f32, &'a [f32])>,
    /// The scores of the layer that the migrator looks ahead to, `[n, ffn]`, by its predictor; `None` if it has to predict them itself.
    pub ahead: Option<&'a [f32]>,
    /// The keys and values that each token goes to ([`crate::model::KvCache::id`]), `[n]`.
    pub sequences: &'a [u64],
    /// Which neurons were active in the layer before, of this pass or, for the first layer, of the pass before.
    pub fired: &'a Fired,
    /// In an audited pass, the neurons of this layer that are active for some token and not computed, ascending.
    pub missed: Option<&'a [StoreId]>,
    /// What this layer took in the pass of few tokens before; no neurons if there was none.
    pub times: LayerTimes,
}

/// Decides, between layers, which neurons move to the device and from which probability on they are computed.
pub trait Migrator: Send {
    /// Begins the moves that were decided since the last call. Called on the engine's thread when `layer` `begins`, so that copies for it
    /// can arrive during its attention, and again before its FFN; must not wait. Where not all neurons are in memory, those that are
    /// lie in `frames`.
    fn apply(
        &mut self,
        layer: usize,
        begins: bool,
        device: &mut dyn Device,
        cache: &mut NeuronCache,
        frames: Option<&mut dyn Frames>,
        sparsity: &mut Sparsity,
    );

    /// Whether it will use the scores of the layer that begins: they have to come from the device.
    fn wants_scores(&self) -> bool {
        true
    }

    /// The predictor by which it looks ahead now, and how many layers; `None` if it uses no prediction.
    fn lookahead(&self) -> Option<&Lookahead> {
        None
    }

    /// Is given a layer before its FFN, once it is decided which neurons are computed where; must not wait.
    fn observe(&mut self, _at: &DividedLayer<'_>, _device: &dyn Device, _cache: &mut NeuronCache) {}

    /// Is given a layer of a prompt's chunk, which was computed dense: `tokens` tokens from position `first` on, and for how many of them
    /// each neuron was active, `[ffn]`. The keys and values go to `sequence`.
    fn prompt(&mut self, _layer: usize, _first: usize, _tokens: usize, _sequence: u64, _counts: &[u32]) {}

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
    pub observed: u64,
    /// Of these, observations that were lost because too many waited.
    pub lost: u64,
    /// Observations that were handled.
    pub handled: u64,
    /// Of these, observations that came when the neurons of the layer to predict had been divided, and only taught what is frequent.
    pub late: u64,
    /// Decisions that were lost because too many waited for the engine.
    pub dropped: u64,
    /// Moves that were not begun because the use that they were for had passed.
    pub stale: u64,
    /// Moves that the cache refused, because the slot or the neuron had changed meanwhile.
    pub refused: u64,
    /// Sequences whose frequencies are kept.
    pub sequences: u64,
    /// Whether neurons move now; `false` while the static placement is kept because moving does not pay, or to compare it with moving.
    pub moving: bool,
    /// What the last comparison of the two has shown.
    #[serde(flatten)]
    pub gain: Comparison,
}
