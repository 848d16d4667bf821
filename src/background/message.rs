//! What engine and scheduler hand each other.

use crate::cache::{PerTier, Slot, SlotTable};
use crate::cpu::MAX_COLUMNS;
use crate::device::Totals;
use crate::engine::Selection;
use crate::ids::{LayerId, SlotId, StoreId};
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

/// What a layer's slots hold, as far as the scheduler does not know it.
#[derive(Default)]
pub struct SentSlots {
    /// How many there are; `None` if nothing is told.
    count: Option<usize>,
    changed: Vec<(SlotId, Slot)>,
}

impl SentSlots {
    /// Becomes what has changed in the table, and all of it unless it is known.
    pub fn fill(&mut self, table: &mut SlotTable, is_known: &mut bool) {
        self.count = Some(table.slots().len());
        self.changed.clear();
        table.take_untold(|slot, held| self.changed.push((slot, held)));
        if !std::mem::replace(is_known, true) {
            self.changed.clear();
            self.changed.extend(table.slots().iter().enumerate().map(|(slot, &held)| (SlotId::new(slot), held)));
        }
    }

    /// Becomes nothing.
    pub fn clear(&mut self) {
        self.count = None;
    }

    /// Brings what was known of the layer up to date.
    pub fn tell(&mut self, known: &mut Vec<Slot>) {
        let Some(count) = self.count.take() else { return };
        known.resize(count, Slot::Free);
        self.changed.drain(..).for_each(|(slot, held)| known[slot.index()] = held);
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
            slots: SentSlots { count: None, changed: Vec::with_capacity(ffn) },
            ahead_slots: SentSlots { count: None, changed: Vec::with_capacity(ffn) },
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
