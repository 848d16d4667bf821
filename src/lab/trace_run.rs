//! A recorded trace, the scheduler and the neuron cache's slot tables, without a device: what replay and simulator share. These two say
//! how much time passes; everything else is as in the engine.
//!
//! The steps of a layer are in the engine's order: the decisions made since the layer before are sent over the link ([`TraceRun::apply`]),
//! attention's time passes, neurons that have arrived for this layer become resident and the layer's neurons are chosen
//! ([`TraceRun::choose`]), the scheduler gets its observation ([`TraceRun::observe`]), the FFN's time passes. So the copies of a decision
//! for the next layer can arrive during that layer's attention, and those of one decision arrive together.

use super::link::{Copy, Link};
use crate::cache::{PerTier, Slot, SlotTable, Tier};
use crate::device::{Stream, Totals};
use crate::formats::trace_file::{TraceFile, TraceSection};
use crate::ids::{LayerId, SlotId, StoreId};
use crate::scheduler::thresholds::to_bin;
use crate::scheduler::{DeviceState, Fired, LayerObservation, LayerTimes, Move, Prompt, Scheduler, SchedulerOptions};

/// Replaces `out` by the neurons whose bits are set in a row of [`TraceSection::Active`] or of another one of bits, in rising order.
pub fn active(row: &[u8], out: &mut Vec<u32>) {
    out.clear();
    for (i, word) in row.chunks_exact(4).enumerate() {
        let mut word = u32::from_le_bytes(word.try_into().expect("four bytes"));
        while word != 0 {
            out.push(32 * i as u32 + word.trailing_zeros());
            word &= word - 1;
        }
    }
}

/// Replaces `out` by the neurons of a layer whose predicted probability, times 255, reaches the threshold of where they lie: those with `here[neuron]` on the
/// device. Returns whether probabilities were read as bits; `unpacked` is memory for them if not.
pub(super) fn chosen(
    trace: &TraceFile,
    layer: usize,
    token: usize,
    thresholds: PerTier<u8>,
    here: &[bool],
    unpacked: &mut Vec<u8>,
    out: &mut Vec<u32>,
) -> bool {
    // A probability of 0 reaches no threshold but 0.
    let by_bits = trace.has_bits(TraceSection::Own) && Tier::ALL.into_iter().all(|tier| thresholds[tier] > 0);
    if by_bits {
        active(trace.row(TraceSection::Own, layer, token), out);
    } else {
        let own = trace.probabilities(TraceSection::Own, layer, token, unpacked);
        let least = [Tier::Host, Tier::Device].map(|tier| thresholds[tier]);
        let reaches = own.iter().zip(here).enumerate().filter(|(_, (p, here))| **p >= least[usize::from(**here)]);
        out.clear();
        out.extend(reaches.map(|(n, _)| n as u32));
    }
    by_bits
}

/// A decision about a layer, which takes effect when the next layer begins.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnedDecision {
    /// The layer that it is about.
    pub layer: usize,
    /// Neurons to bring to the device, with their slots.
    pub moves: Vec<Move>,
    /// New probability thresholds of the CPU and of the device; `None` leaves them as they are.
    pub thresholds: Option<PerTier<f32>>,
}

/// What copies cost on the simulated link.
#[derive(Clone, Copy, Debug)]
pub struct Copies {
    /// Bytes of a neuron block.
    pub block_bytes: f64,
    /// Rate of the link, GB/s.
    pub gb_s: f64,
    /// Time to start the copy of a decision's blocks, or of each block where `apart` is set, ns.
    pub start_ns: f64,
    /// Whether each block is a copy of its own.
    pub apart: bool,
}

/// Simulated times since the beginning, ns.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock {
    /// Time that has passed.
    pub now_ns: f64,
    /// Time for which the device computed neurons.
    pub device_ns: f64,
    /// Time for which the CPU computed neurons.
    pub host_ns: f64,
}

/// One run over the texts of a trace.
pub struct TraceRun<'a> {
    trace: &'a TraceFile,
    /// Decides what moves.
    pub scheduler: Scheduler,
    ahead: usize,
    tables: Vec<SlotTable>,
    /// Whether each neuron is resident on the device, `[layers][ffn]`.
    resident: Vec<Vec<bool>>,
    /// Copies on their way to the device.
    pub link: Link,
    copies: Copies,
    /// Of each layer, the slots whose neurons have arrived since its last use.
    landed: Vec<Vec<SlotId>>,
    in_flight: u64,
    /// Number of moves begun.
    pub moves: u64,
    carried: (f64, f64),
    /// Threshold of each layer when device and CPU have the same.
    own: Vec<f32>,
    /// Probabilities, times 255, from which on a neuron is computed: on the CPU and on the device, `[layers]`.
    pub thresholds: Vec<PerTier<u8>>,
    decisions: Vec<OwnedDecision>,
    /// Whether look-ahead is never wrong: it says what will be active, whatever the trace's predictor said.
    pub foreseen: bool,
    /// Neurons that were truly active, in the layer and token that [`TraceRun::choose`] was last called for.
    pub truth: Vec<u32>,
    /// Neurons that are computed there, in rising order.
    pub computed: Vec<u32>,
    /// Whether each neuron was resident on the device then, `[ffn]`.
    pub here: Vec<bool>,
    slots: Vec<Slot>,
    ahead_slots: Vec<Slot>,
    /// Memory for probabilities that the trace has as bits: a layer's own, and those of a layer ahead.
    unpacked: [Vec<u8>; 2],
    /// Masks of a pass of one token: a one for each neuron.
    ones: Vec<u32>,
    /// What each layer took at its last use, as far as the run knows it.
    pub times: Vec<LayerTimes>,
    /// The layer that the scheduler got last, and the neurons that were active and computed there.
    fired: (Option<usize>, Vec<StoreId>),
}

/// The one sequence of a trace: its texts come one after the other.
const SEQUENCE: [u64; 1] = [1];

/// A probability times 255, as the trace stores them. One above 0 is not rounded to 0: most probabilities in a trace are 0, and all those
/// neurons would be computed.
pub(super) fn bin(threshold: f32) -> u8 {
    if threshold > 0.0 { to_bin(threshold).max(1) } else { 0 }
}

impl<'a> TraceRun<'a> {
    /// A run with `slots[l]` slots in each layer l, which hold the neurons of `setting.placed`. `thresholds` are the layers' probability
    /// thresholds, `[layers]`.
    pub fn new(
        trace: &'a TraceFile,
        setting: SchedulerOptions,
        slots: &[usize],
        thresholds: Vec<f32>,
        copies: Copies,
    ) -> TraceRun<'a> {
        let (h, ahead) = (trace.header(), setting.ahead);
        let table = |(&slots, placed): (&usize, &Vec<StoreId>)| {
            let mut table = SlotTable::new(slots, h.ffn);
            for (slot, &neuron) in (0..slots).map(SlotId::new).zip(placed) {
                table.fill(slot, neuron).expect("a placement has a neuron once");
                table.landed(slot);
            }
            table
        };
        let tables: Vec<SlotTable> = slots.iter().zip(&setting.placed).map(table).collect();
        let is_resident = |table: &SlotTable| (0..h.ffn).map(|n| table.location(StoreId::new(n)).is_device()).collect();
        TraceRun {
            trace,
            ahead,
            resident: tables.iter().map(is_resident).collect(),
            tables,
            scheduler: Scheduler::new(setting),
            link: Link::default(),
            copies,
            landed: vec![Vec::new(); h.layers],
            in_flight: 0,
            moves: 0,
            carried: (0.0, 0.0),
            thresholds: thresholds.iter().map(|&t| PerTier::all(bin(t))).collect(),
            own: thresholds,
            decisions: Vec::new(),
            foreseen: false,
            truth: Vec::new(),
            computed: Vec::new(),
            here: vec![false; h.ffn],
            slots: Vec::new(),
            ahead_slots: Vec::new(),
            unpacked: Default::default(),
            ones: vec![1; h.ffn],
            times: vec![LayerTimes::default(); h.layers],
            fired: (None, Vec::new()),
        }
    }

    /// A layer begins: the decisions made so far take effect, and their copies are put on the link.
    pub fn apply(&mut self) {
        for OwnedDecision { layer, moves, thresholds } in std::mem::take(&mut self.decisions) {
            if let Some(probabilities) = thresholds {
                self.thresholds[layer] = probabilities.map(bin);
            }
            let (table, resident) = (&mut self.tables[layer], &mut self.resident[layer]);
            let mut filled = Vec::with_capacity(moves.len());
            for m in &moves {
                let Ok(evicted) = table.fill(m.slot(), m.neuron()) else { continue };
                evicted.into_iter().for_each(|old| resident[old.index()] = false);
                filled.push(m.slot());
            }
            self.send(layer, filled);
        }
    }

    fn send(&mut self, layer: usize, slots: Vec<SlotId>) {
        if slots.is_empty() {
            return;
        }
        self.in_flight += slots.len() as u64;
        self.moves += slots.len() as u64;
        let Copies { block_bytes, gb_s, start_ns, apart } = self.copies;
        let groups: Vec<Vec<SlotId>> =
            if apart { slots.into_iter().map(|one| vec![one]).collect() } else { vec![slots] };
        for slots in groups {
            let bytes = block_bytes * slots.len() as f64;
            let ns = start_ns + bytes / gb_s;
            self.carried = (self.carried.0 + bytes, self.carried.1 + ns);
            self.link.put(Copy { layer, slots, bytes, ns });
        }
    }

    /// Lets `ns` nanoseconds pass. Returns for how much of that time the link was busy, ns.
    pub fn pass(&mut self, ns: f64) -> f64 {
        let landed = &mut self.landed;
        self.link.advance(ns, |copy| landed[copy.layer].extend(copy.slots))
    }

    /// Makes the neurons that have arrived for this layer resident and chooses the neurons to compute: those whose probability, predicted
    /// from the layer's own residual, reaches the threshold of CPU or device, wherever they lie.
    pub fn choose(&mut self, layer: usize, token: usize) {
        self.find(layer);
        let (trace, thresholds) = (self.trace, self.thresholds[layer]);
        let TraceRun { here, unpacked: [unpacked, _], computed, .. } = self;
        let by_bits = chosen(trace, layer, token, thresholds, here, unpacked, computed);
        let [truth, own] = [TraceSection::Active, TraceSection::Own].map(|part| trace.row(part, layer, token));
        // The exact predictor is right, and a copy is faster than a search of bits.
        if by_bits && truth == own {
            self.truth.clone_from(&self.computed);
        } else {
            active(truth, &mut self.truth);
        }
    }

    /// Finds which of a layer's neurons are resident, [`TraceRun::here`]: with those that have arrived.
    pub fn find(&mut self, layer: usize) {
        for slot in self.landed[layer].drain(..) {
            self.tables[layer].landed(slot);
            self.in_flight -= 1;
            let neuron = self.tables[layer].slots()[slot.index()].resident().expect("it has landed");
            self.resident[layer][neuron.index()] = true;
        }
        self.here.copy_from_slice(&self.resident[layer]);
    }

    /// Gives the scheduler a layer of a prompt's chunk of `tokens` tokens, of which so many have each neuron, `counts`. Nothing moves for it.
    pub fn prompted(&mut self, layer: usize, tokens: usize, begins: bool, counts: &[u32]) {
        let all: Vec<StoreId> = (0..counts.len()).map(StoreId::new).collect();
        let (fired_layer, neurons) = std::mem::take(&mut self.fired);
        let masks = &self.ones[..neurons.len()];
        let fired = fired_layer.map(|layer| Fired { layer, neurons: &neurons, masks, sequences: &SEQUENCE });
        let observation = LayerObservation {
            layer: LayerId::new(layer),
            sequences: &SEQUENCE,
            begins: begins && layer == 0,
            fired,
            missed: None,
            computed: &all,
            prompt: Some(Prompt { tokens, counts }),
            device: None,
            own: None,
            ahead: None,
        };
        self.scheduler.step(&observation, |_| unreachable!("without a device nothing is decided"));
    }

    /// Gives the scheduler the layer that was chosen for, and returns the decisions that wait to be applied. `begins` is whether
    /// `token` is the first of a text; thresholds are balanced if `balances` is set.
    pub fn observe(
        &mut self,
        layer: usize,
        token: usize,
        begins: bool,
        clock: Clock,
        balances: bool,
    ) -> &[OwnedDecision] {
        let (trace, target) = (self.trace, layer + self.ahead);
        self.slots.clear();
        self.slots.extend_from_slice(self.tables[layer].slots());
        self.ahead_slots.clear();
        if let Some(table) = self.tables.get(target) {
            self.ahead_slots.extend_from_slice(table.slots());
        }
        let mut totals = Totals { clock_ns: clock.now_ns as u64, host_ns: clock.host_ns as u64, ..Totals::default() };
        totals.busy_ns[Stream::Compute as usize] = clock.device_ns as u64;
        totals.busy_ns[Stream::Copy as usize] = self.carried.1 as u64;
        totals.migrated_bytes = self.carried.0 as u64;
        let device = DeviceState {
            slots: &self.slots,
            ahead_slots: &self.ahead_slots,
            in_flight: self.in_flight,
            totals,
            times: self.times[layer],
        };
        let (fired_layer, neurons) = &self.fired;
        let masks = &self.ones[..neurons.len()];
        let fired = fired_layer.map(|layer| Fired { layer, neurons, masks, sequences: &SEQUENCE });
        let [own, early] = &mut self.unpacked;
        let looked_ahead = if self.foreseen { TraceSection::Active } else { TraceSection::Ahead };
        let observation = LayerObservation {
            layer: LayerId::new(layer),
            sequences: &SEQUENCE,
            begins: begins && layer == 0,
            fired,
            missed: None,
            computed: bytemuck::cast_slice(&self.computed),
            prompt: None,
            device: Some(device),
            own: balances.then(|| (self.own[layer], trace.probabilities(TraceSection::Own, layer, token, own))),
            ahead: (target < self.tables.len()).then(|| trace.probabilities(looked_ahead, target, token, early)),
        };
        let decisions = &mut self.decisions;
        self.scheduler.step(&observation, |d| {
            decisions.push(OwnedDecision { layer: d.layer.index(), moves: d.moves.to_vec(), thresholds: d.thresholds });
        });
        // What is active is known once it is computed: with the next layer.
        let truth = trace.row(TraceSection::Active, layer, token);
        let (fired_layer, neurons) = &mut self.fired;
        *fired_layer = Some(layer);
        neurons.clear();
        if self.computed == self.truth {
            neurons.extend_from_slice(bytemuck::cast_slice(&self.truth));
        } else {
            let was_active = |n: &&u32| truth[**n as usize / 8] >> (**n % 8) & 1 == 1;
            neurons.extend(self.computed.iter().filter(was_active).map(|&n| StoreId(n)));
        }
        &self.decisions
    }
}
