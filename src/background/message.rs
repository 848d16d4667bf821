//! What engine and scheduler hand each other.

use crate::cache::{PerTier, Slot, SlotTable};
use crate::cpu::MAX_COLUMNS;
use crate::device::Totals;
use crate::engine::Selection;
use crate::ids::{LayerId, StoreId};
use crate::scheduler::{LayerTimes, Move};

/// Where the engine stands: in which layer of which pass of few tokens, and whether the layer's neurons have been divided between host and
/// device. After that nothing can arrive for this use of it. Later positions are larger.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Position(pub u64);

impl Position {
    /// Where layer `layer` of `layers` begins in pass `pass`.
    pub fn new(pass: u64, layer: usize, layers: usize) -> Position {
        Position(2 * (pass * layers as u64 + layer as u64))
    }

    /// Where the neurons of this layer have been divided.
    pub fn divided(self) -> Position {
        Position(self.0 | 1)
    }

    /// The beginning of the layer that comes so many layers later.
    pub fn later(self, layers: usize) -> Position {
        Position((self.0 & !1) + 2 * layers as u64)
    }
}

/// What a layer's slots hold, if the scheduler does not know it: most of the time nothing has moved since the layer was sent last.
#[derive(Default)]
pub struct SentSlots {
    changed: bool,
    slots: Vec<Slot>,
}

impl SentSlots {
    /// Becomes the table's slots, unless those of this version were sent before.
    pub fn fill(&mut self, table: &SlotTable, sent: &mut u64) {
        self.changed = *sent != table.version();
        if self.changed {
            *sent = table.version();
            self.slots.clear();
            self.slots.extend_from_slice(table.slots());
        }
    }

    /// Becomes nothing.
    pub fn clear(&mut self) {
        self.changed = false;
    }

    /// Replaces what was known of the layer, if something else was sent.
    pub fn tell(&mut self, known: &mut Vec<Slot>) {
        if std::mem::take(&mut self.changed) {
            std::mem::swap(known, &mut self.slots);
        }
    }
}

/// A [`crate::scheduler::LayerObservation`] on its way to the scheduler, before anything was predicted from it.
#[derive(Default)]
pub struct SentObservation {
    /// The layer.
    pub layer: LayerId,
    /// Where the engine stood when it was sent.
    pub position: Position,
    /// The sequence of each token.
    pub sequences: Vec<u64>,
    /// The first of the sequences begins anew.
    pub begins: bool,
    /// Tokens of a chunk of a prompt; `None` while decoding.
    pub prompt: Option<usize>,
    /// The residual after attention: of the last token, `[hidden]`, or of all tokens of a batch, `[n, hidden]`. Empty for a long prompt.
    pub residual: Vec<f32>,
    /// Neurons that are computed for some token.
    pub computed: Vec<StoreId>,
    /// For a long prompt, for how many of its tokens each of these was active.
    pub counts: Vec<u32>,
    /// The layer that `fired` is about; `None` before the first pass.
    pub fired_layer: Option<usize>,
    /// The neurons that were active in it, with the tokens for which they were.
    pub fired: Selection,
    /// The sequences of these tokens.
    pub fired_sequences: Vec<u64>,
    /// The pass is audited, and `missed` says what was active and not computed.
    pub audited: bool,
    /// Neurons of this layer that were active and not computed.
    pub missed: Vec<StoreId>,
    /// The highest score of each neuron of this layer over the tokens, where its thresholds are balanced.
    pub scores: Vec<f32>,
    /// The layer's own threshold, to go with `scores`.
    pub own: f32,
    /// The highest score of each neuron of the layer ahead over the tokens, if the engine has them.
    pub ahead_scores: Vec<f32>,
    /// What the layer's slots hold.
    pub slots: SentSlots,
    /// What the slots of the layer ahead hold.
    pub ahead_slots: SentSlots,
    /// Neurons on their way.
    pub in_flight: u64,
    /// What the device has counted.
    pub totals: Totals,
    /// What this layer took in the pass before.
    pub times: LayerTimes,
}

impl SentObservation {
    /// One with memory for a model of this size and so many sequences.
    pub fn new(hidden: usize, ffn: usize, sequences: usize) -> SentObservation {
        SentObservation {
            sequences: Vec::with_capacity(MAX_COLUMNS),
            residual: Vec::with_capacity(hidden * sequences),
            computed: Vec::with_capacity(ffn),
            counts: Vec::with_capacity(ffn),
            fired: Selection { neurons: Vec::with_capacity(ffn), masks: Vec::with_capacity(ffn) },
            fired_sequences: Vec::with_capacity(MAX_COLUMNS),
            missed: Vec::with_capacity(ffn),
            scores: Vec::with_capacity(ffn),
            ahead_scores: Vec::with_capacity(ffn),
            slots: SentSlots { changed: false, slots: Vec::with_capacity(ffn) },
            ahead_slots: SentSlots { changed: false, slots: Vec::with_capacity(ffn) },
            ..SentObservation::default()
        }
    }
}

/// A [`crate::scheduler::Decision`] on its way to the engine.
#[derive(Default)]
pub struct SentDecision {
    /// The layer that it is for.
    pub layer: LayerId,
    /// The use of the layer that moves are for: they are worth nothing once its neurons have been divided.
    pub until: Position,
    /// Moves, the most urgent first.
    pub moves: Vec<Move>,
    /// New thresholds, by where neurons lie.
    pub thresholds: Option<PerTier<f32>>,
}
