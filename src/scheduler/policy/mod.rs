//! Which neurons come to the device, and which they replace: one file per policy, behind one trait.
//!
//! A new policy is a file here and a line in the list below. Everything else comes from that list: the names that options, experiments and
//! the daemon accept, their help, the replay and the simulator.

pub mod greedy;

use super::forecast::Forecast;
use super::importance::importance;
use super::thresholds::MAX_MORE;
use crate::cache::{PerTier, Slot};
use crate::ids::StoreId;
use crate::prng::Prng;
use greedy::{Lists, Move};

/// Declares the policies: for each its name in the code and its file.
macro_rules! policies {
    ($($(#[$about:meta])* $name:ident in $file:ident,)*) => {
        $(mod $file;)*

        /// The name of a policy; [`Policy::start`] makes one that works.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(into = "&'static str", try_from = "String")]
        pub enum Policy {
            $($(#[$about])* $name,)*
        }

        impl Policy {
            /// Every policy, in the order of tables.
            pub const ALL: [Policy; [$(Policy::$name),*].len()] = [$(Policy::$name),*];

            const fn entry(self) -> &'static Entry {
                match self {
                    $(Policy::$name => &$file::ENTRY,)*
                }
            }
        }
    };
}

policies! {
    /// The plan's placement stays; nothing moves (PowerInfer).
    Static in r#static,
    /// Brings the neurons that the coming token is predicted to need (DynamicInfer 4.3).
    Micro in micro,
    /// As micro, and also counts how often neurons were active in the sequence (DynamicInfer E.3.1, E.3.3).
    Macro in r#macro,
    /// As macro, and also gives device and CPU thresholds of their own (DynamicInfer E.4).
    #[default]
    Full in full,
    /// A needed neuron that is missing replaces the one computed longest ago.
    Lru in lru,
    /// A needed neuron that is missing replaces a random one.
    Random in random,
    /// A needed neuron that is missing replaces the one computed least often of late.
    Lfu in lfu,
    /// A needed neuron that is missing replaces the oldest one that was not computed since the search last passed it (SIEVE, NSDI 2024).
    Sieve in sieve,
    /// A needed neuron that is missing replaces the oldest one that was computed only once since it came (PowerInfer-2 4.2).
    TwoQueues in two_queues,
}

/// What a policy's file declares.
struct Entry {
    /// As users type and see it.
    name: &'static str,
    /// One line of help.
    about: &'static str,
    rules: Rules,
    /// Makes one for a number of layers and of neurons per layer, with these rules.
    start: fn(usize, usize, &Rules) -> Box<dyn ChooseMoves>,
}

/// A policy at work on all layers. It gets every token that is decoded and chooses what moves.
pub trait ChooseMoves: Send {
    /// A decoding pass has computed these neurons of a layer, ascending; prompts are left out.
    fn computed(&mut self, _at: &LayerState<'_>, _neurons: &[StoreId]) {}

    /// Writes at most `most` moves for the coming use of a layer to `moves`, which is empty; the most urgent first.
    fn choose(&mut self, at: &LayerState<'_>, most: usize, scratch: &mut Scratch, moves: &mut Vec<Move>);
}

/// What is known of a layer when a policy chooses.
#[derive(Clone, Copy)]
pub struct LayerState<'a> {
    /// The layer's number, from 0.
    pub layer: usize,
    /// What each slot holds.
    pub slots: &'a [Slot],
    /// Probabilities of the layer's coming use, times 255, `[ffn]`; `None` if it was not predicted.
    pub probabilities: Option<&'a [u8]>,
    /// How often each neuron was active lately in the sequences that are decoded, 0 to 1, `[ffn]`.
    pub frequencies: &'a [f32],
    /// Token at which each neuron was computed last, `[ffn]`; 0 for never.
    pub last: &'a [u32],
    /// Number of the token that is being decoded, from 1 on.
    pub token: u32,
    /// What a move costs in hits: the share of the time, 0 to 1, in which the CPU's part reads memory.
    pub move_cost: f32,
    /// The fixed time of the host's share of a layer, in hits; 0 if it is not known.
    pub host_fixed: f32,
    /// The numbers and switches in force.
    pub rules: &'a Rules,
}

impl LayerState<'_> {
    /// Whether the coming use needs this neuron: its probability is one half or more, or, without a prediction, the last token computed it.
    pub fn needs(&self, neuron: StoreId) -> bool {
        match self.probabilities {
            Some(p) => p[neuron.index()] >= FORESEEN,
            None => self.last[neuron.index()] == self.token,
        }
    }
}

/// Memory for choosing, kept between calls, and the policies' random numbers.
pub struct Scratch {
    /// What each neuron is worth on the device, `[ffn]`.
    pub worth: Vec<f32>,
    /// Memory of [`greedy::choose`].
    pub lists: Lists,
    /// For policies that draw.
    pub prng: Prng,
}

impl Scratch {
    /// For layers of `ffn` neurons: nothing is allocated later.
    pub fn new(ffn: usize, seed: u64) -> Scratch {
        Scratch { worth: Vec::with_capacity(ffn), lists: Lists::new(ffn), prng: Prng::new(seed) }
    }
}

impl Policy {
    /// The policy's name as users type and see it.
    pub const fn name(self) -> &'static str {
        self.entry().name
    }

    /// What it does, in a line.
    pub const fn about(self) -> &'static str {
        self.entry().about
    }

    /// The rules that it has unless they are changed.
    pub fn rules(self) -> Rules {
        self.entry().rules
    }

    /// A policy that has seen no token, for `layers` layers of `ffn` neurons, or clusters of them where `rules` says so.
    pub fn start(self, layers: usize, ffn: usize, rules: &Rules) -> Box<dyn ChooseMoves> {
        (self.entry().start)(layers, ffn, rules)
    }
}

impl From<Policy> for &'static str {
    fn from(policy: Policy) -> &'static str {
        policy.name()
    }
}

impl TryFrom<String> for Policy {
    type Error = String;
    fn try_from(text: String) -> Result<Policy, String> {
        text.parse()
    }
}

impl std::str::FromStr for Policy {
    type Err = String;
    fn from_str(text: &str) -> Result<Policy, String> {
        let found = Policy::ALL.into_iter().find(|p| p.name().eq_ignore_ascii_case(text));
        found.ok_or_else(|| {
            let [names @ .., last] = &Policy::ALL.map(Policy::name);
            format!("'{text}' is not a policy; take {} or {last}", names.join(", "))
        })
    }
}

/// Tokens for which a cluster that has come is taken to stay where moves cost nothing, so that what has gone can come again; where one
/// costs a hit or more, twice as many.
const STAYS: f32 = 3.0;

/// What a neuron is worth more where it completes its layer: more than any other neuron is.
const COMPLETES: f32 = 1e3;

/// Numbers and switches of a policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Whether anything moves.
    pub moves: bool,
    /// lambda: the weight of a neuron's frequency, next to its current activation (DynamicInfer E.3.1), where a move costs nothing.
    pub lambda: f32,
    /// Of neurons: how many lambdas a hit that a move costs adds to the weight of a frequency.
    pub dearer: f32,
    /// Of neurons: where so many times as many are foreseen and missing as the link brings in time, it is as scarce as can be; up to 1 it always is.
    pub scarce: f32,
    /// Of neurons: whether all that are foreseen and missing come, whatever they replace, where the link can bring them all and the host's fixed part
    /// pays for it: a layer of which the host has nothing to compute is worth more than its neurons are.
    pub completes: bool,
    /// phi_high: a resident of at least this frequency stays (E.3.3); infinite for none.
    pub pinned: f32,
    /// How much of a frequency is left a token later, 0 to 1.
    pub decay: f32,
    /// How much more a newcomer must be worth than the neuron it replaces.
    pub margin: f32,
    /// Whether moving stops while it does not pay ([`super::gain`]).
    pub gain: bool,
    /// Length of the link's queue, in times what the link carries during the layers of look-ahead. The paper's is 1, but what is decided while a
    /// layer is computed is sent with the next: a queue of that length comes late for its layer.
    pub window: f32,
    /// Whether device and CPU have thresholds of their own (E.4).
    pub thresholds: bool,
    /// Neurons that a pair of thresholds may have computed beyond those of the single threshold, as a share of the layer's.
    pub max_more: f64,
    /// A pair of thresholds for all layers, instead of balancing them; for experiments.
    pub pair: Option<PerTier<f32>>,
    /// What a move costs, in neurons that the CPU could compute meanwhile; `None` for what is measured
    /// ([`Rates::move_cost`](super::rates::Rates::move_cost)).
    pub move_cost: Option<f64>,
    /// The numbers are of clusters of neurons, the experts of a mixture: few, each large, and exactly so many for a token. What they are
    /// worth is then forecast ([`super::forecast`]).
    pub clusters: bool,
    /// Only what the coming token needs may come, and it stays for it: where neurons are read because they are needed, and for nothing else.
    pub on_demand: bool,
}

impl Rules {
    /// The paper's whole scheduler. phi, decay, margin and window are those of the least time over recorded and made-up traces
    /// (runs/2026-11-28-real-traces/sweep.csv); of lambda see [`Rules::lambda_at`].
    pub const PAPER: Rules = Rules {
        moves: true,
        lambda: 2.0,
        dearer: 3.0,
        scarce: 2.0,
        completes: true,
        pinned: 0.9,
        decay: 0.96,
        margin: 0.1,
        gain: true,
        window: 0.5,
        thresholds: true,
        max_more: MAX_MORE,
        pair: None,
        move_cost: None,
        clusters: false,
        on_demand: false,
    };
    /// Rules of policies that only choose which neuron a newcomer replaces.
    const REPLACING: Rules = Rules { thresholds: false, ..Rules::PAPER };

    /// Of neurons: the weight of a frequency where a move costs so many hits and the link carries the missing neurons of `1 - scarce` layers of all: what
    /// is dearer must be used for longer, at most for as long as a frequency remembers, and what can come whenever it is needed, for nothing, need not stay.
    /// With a scarce link it is 2 where moves are free and 8 where one costs a hit, the best of 2, 4 and 8 there
    /// (runs/2026-11-28-real-traces/sweep.csv).
    pub fn lambda_at(&self, move_cost: f32, scarce: f32) -> f32 {
        let (remembered, scarce) = (1.0 / (1.0 - self.decay), scarce.max(move_cost.min(1.0)));
        (self.lambda * (scarce + self.dearer * move_cost)).min(remembered.max(self.lambda))
    }

    /// The same policy for clusters: a move is long, so that what counts is how often the cluster will be used over many tokens, and a
    /// router's choice has no threshold.
    pub fn for_clusters(self) -> Rules {
        Rules {
            clusters: true,
            lambda: if self.lambda > 0.0 { STAYS } else { 0.0 },
            pinned: f32::INFINITY,
            // Not swept for clusters.
            window: 1.0,
            thresholds: false,
            ..self
        }
    }

    /// The same policy where needed neurons are read from a disk on demand, and the only question is which ones to keep. The read of a newcomer
    /// is paid already, so its use counts as one more in its frequency (lambda is 1 / (1 - decay)) and no more: with the paper's 2 nearly
    /// every neuron that was read displaced another one.
    pub fn on_demand(self) -> Rules {
        let (lambda, margin) = if self.lambda > 0.0 { (1.0 / (1.0 - self.decay), 0.3) } else { (0.0, self.margin) };
        // The paper's; not swept for disks.
        let pinned = if self.pinned.is_finite() { 0.7 } else { self.pinned };
        Rules { on_demand: true, gain: false, thresholds: false, lambda, margin, pinned, ..self }
    }
}

/// Static, micro, macro and full, each of which adds something to the one before (the ablation in DynamicInfer, figure 10): the neurons of
/// most importance, v = a + lambda f, replace those of least importance, and frequent ones stay.
struct ByImportance {
    /// Of clusters alone.
    forecast: Option<Forecast>,
    /// What it says of the layer, `[ffn]`.
    coming: Vec<f32>,
    /// How much of what was foreseen and missing of late the link did not carry in time, 0 to 1.
    scarce: f32,
}

/// Weight of a layer in the mean of what the link carries.
const FOLLOW: f32 = 0.02;

/// Probability, times 255, from which on a neuron is foreseen.
const FORESEEN: u8 = 128;

/// How many neurons are foreseen for the layer's coming use and neither there nor on their way.
fn missing(at: &LayerState<'_>, probabilities: &[u8]) -> usize {
    let likely = |n: usize| probabilities[n] >= FORESEEN;
    let here = |slot: &Slot| matches!(slot, Slot::Resident(n) | Slot::Filling(n) if likely(n.index()));
    let foreseen = (0..probabilities.len()).filter(|&n| likely(n)).count();
    foreseen - at.slots.iter().filter(|slot| here(slot)).count()
}

impl Rules {
    /// How scarce a link is that brings `most` of `missing` neurons in time: 0 where it brings them all, 1 where they are [`Rules::scarce`] times as many.
    fn scarcity(&self, missing: usize, most: usize) -> f32 {
        let beyond = missing as f32 / most.max(1) as f32 - 1.0;
        if self.scarce > 1.0 { (beyond / (self.scarce - 1.0)).clamp(0.0, 1.0) } else { 1.0 }
    }
}

impl ByImportance {
    fn start(layers: usize, ffn: usize, rules: &Rules) -> Box<dyn ChooseMoves> {
        let forecast = rules.clusters.then(|| Forecast::new(layers, ffn));
        Box::new(ByImportance { forecast, coming: Vec::with_capacity(ffn), scarce: 1.0 })
    }
}

impl ChooseMoves for ByImportance {
    fn computed(&mut self, at: &LayerState<'_>, neurons: &[StoreId]) {
        if let Some(forecast) = &mut self.forecast {
            forecast.used(at.layer, neurons.iter().map(|n| n.index()));
        }
    }

    fn choose(&mut self, at: &LayerState<'_>, most: usize, scratch: &mut Scratch, moves: &mut Vec<Move>) {
        let (f, rules) = (at.frequencies, at.rules);
        if let Some(forecast) = &mut self.forecast {
            forecast.of(at.layer, f, &mut self.coming);
            let lambda = rules.lambda * (1.0 + at.move_cost.min(1.0));
            importance(at.probabilities, &self.coming, lambda, &mut scratch.worth);
            // A move must win more than it costs.
            let margin = rules.margin + at.move_cost;
            greedy::choose(at.slots, &scratch.worth, most, margin, |_| false, |_| false, &mut scratch.lists, moves);
            return;
        }
        let frequent = |n: StoreId| f[n.index()] >= rules.pinned;
        let needed = |n: StoreId| rules.on_demand && at.needs(n);
        // Capped below the number of slots: where nearly all would stay, nothing could come.
        let crowded = at.slots.iter().filter(|s| s.resident().is_some_and(frequent)).count() * 4 > at.slots.len() * 3;
        let stays = |n: StoreId| !crowded && frequent(n) || needed(n);
        let left_out = |n: StoreId| rules.on_demand && !needed(n);
        // Where nothing is foreseen, nothing can come when it is needed.
        let foreseen = at.probabilities.filter(|_| rules.lambda > 0.0 && !rules.on_demand);
        let missing = foreseen.map(|probabilities| missing(at, probabilities));
        if let Some(missing) = missing {
            self.scarce += FOLLOW * (rules.scarcity(missing, most) - self.scarce);
        }
        let scarce = if at.probabilities.is_some() { self.scarce } else { 1.0 };
        importance(at.probabilities, f, rules.lambda_at(at.move_cost, scarce), &mut scratch.worth);
        let pays = |&missing: &usize| missing <= most && missing as f32 * at.move_cost <= at.host_fixed;
        if let Some(probabilities) = foreseen.filter(|_| rules.completes && missing.as_ref().is_some_and(pays)) {
            let likely = scratch.worth.iter_mut().zip(probabilities).filter(|(_, p)| **p >= FORESEEN);
            likely.for_each(|(worth, _)| *worth += COMPLETES);
        }
        // A move must win more than it costs. By the coming use alone, it wins too little to say so.
        let margin = if rules.lambda > 0.0 { rules.margin + at.move_cost } else { rules.margin };
        greedy::choose(at.slots, &scratch.worth, most, margin, stays, left_out, &mut scratch.lists, moves);
    }
}

/// Neurons that are needed and missing replace the residents that are worth least and not needed. `worth` gives what each neuron is worth,
/// below 2; `v` is memory for it.
fn replace_least(
    at: &LayerState<'_>,
    most: usize,
    worth: impl Iterator<Item = f32>,
    v: &mut Vec<f32>,
    lists: &mut Lists,
    moves: &mut Vec<Move>,
) {
    v.clear();
    v.extend(worth);
    (0..v.len()).filter(|&n| at.needs(StoreId(n as u32))).for_each(|n| v[n] = 2.0);
    greedy::choose(at.slots, v, most, 0.0, |_| false, |n| !at.needs(n), lists, moves);
}

#[cfg(test)]
mod testing {
    use super::*;

    /// In a list of slots' neurons: none.
    pub const FREE: u32 = u32::MAX;
    /// In a list of slots' neurons: one that has not arrived.
    pub const FILLING: u32 = u32::MAX - 1;

    /// Slots from the neurons that they hold.
    pub fn slots(held: &[u32]) -> Vec<Slot> {
        let slot = |&held: &u32| match held {
            FREE => Slot::Free,
            FILLING => Slot::Filling(StoreId(0)),
            neuron => Slot::Resident(StoreId(neuron)),
        };
        held.iter().map(slot).collect()
    }

    /// One layer under a policy whose moves land at once.
    pub struct Story {
        policy: Box<dyn ChooseMoves>,
        rules: Rules,
        slots: Vec<Slot>,
        last: Vec<u32>,
        token: u32,
        scratch: Scratch,
    }

    impl Story {
        pub fn new(policy: Policy, ffn: usize, held: &[u32]) -> Story {
            let (rules, scratch) = (policy.rules(), Scratch::new(ffn, 1));
            Story {
                policy: policy.start(1, ffn, &rules),
                rules,
                slots: slots(held),
                last: vec![0; ffn],
                token: 0,
                scratch,
            }
        }

        /// These are computed for the next token.
        pub fn token(&mut self, computed: &[u32]) {
            self.token += 1;
            computed.iter().for_each(|&n| self.last[n as usize] = self.token);
            let Story { policy, rules, slots, last, token, .. } = self;
            let frequencies = vec![0.0; last.len()];
            let at = LayerState {
                layer: 0,
                slots,
                probabilities: None,
                frequencies: &frequencies,
                last,
                token: *token,
                move_cost: 0.0,
                host_fixed: 0.0,
                rules,
            };
            policy.computed(&at, bytemuck::cast_slice(computed));
        }

        /// These are foreseen: the neurons in the slots then.
        pub fn needs(&mut self, neurons: &[u32]) -> Vec<u32> {
            let Story { policy, rules, slots, last, token, scratch } = self;
            let mut probabilities = vec![0; last.len()];
            neurons.iter().for_each(|&n| probabilities[n as usize] = 255);
            let (frequencies, probabilities) = (vec![0.0; last.len()], Some(&probabilities[..]));
            let at = LayerState {
                layer: 0,
                slots,
                probabilities,
                frequencies: &frequencies,
                last,
                token: *token,
                move_cost: 0.0,
                host_fixed: 0.0,
                rules,
            };
            let mut moves = Vec::new();
            policy.choose(&at, usize::MAX, scratch, &mut moves);
            moves.iter().for_each(|m| slots[m.slot().index()] = Slot::Resident(m.neuron()));
            slots.iter().map(|slot| slot.resident().map_or(FREE, |neuron| neuron.0)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::slots;
    use super::*;

    /// Whether neuron 1, which is needed, gets the slot of neuron 0, which is not needed now; `frequencies` of both.
    fn comes(rules: &Rules, frequencies: [f32; 2]) -> bool {
        comes_at(rules, frequencies, 0.0)
    }

    /// The same where a move costs something.
    fn comes_at(rules: &Rules, frequencies: [f32; 2], move_cost: f32) -> bool {
        let slots = slots(&[0]);
        let (mut scratch, mut moves) = (Scratch::new(2, 1), Vec::new());
        let at = LayerState {
            layer: 0,
            slots: &slots,
            probabilities: Some(&[0, 255]),
            frequencies: &frequencies,
            last: &[0, 0],
            token: 1,
            move_cost,
            host_fixed: 0.0,
            rules,
        };
        Policy::Full.start(1, 2, rules).choose(&at, usize::MAX, &mut scratch, &mut moves);
        !moves.is_empty()
    }

    #[test]
    fn a_move_must_win_more_than_it_costs() {
        let rules = Rules { lambda: 2.0, margin: 0.1, ..Rules::PAPER };
        // It wins the coming use, and some tokens of a frequency that is lower by 0.1: two, and six for each hit that a move costs.
        assert!(comes_at(&rules, [0.1, 0.0], 0.4) && !comes_at(&rules, [0.1, 0.0], 0.5));
        // One that is used often enough for longer pays for a dear move, too; not for any.
        assert!(comes_at(&rules, [0.0, 0.5], 4.0) && !comes_at(&rules, [0.0, 0.1], 4.0));
        assert!(!comes_at(&rules, [0.0, 1.0], 30.0));
    }

    /// Six neurons are foreseen and missing, and two that are used often have the slots. They go where the link brings whatever is foreseen, and
    /// stay where it brings a third of it.
    #[test]
    fn what_is_frequent_stays_where_the_link_is_scarce() {
        let slots = slots(&[0, 1]);
        let stay = |most: usize| {
            let (mut scratch, mut moves) = (Scratch::new(8, 2), Vec::new());
            let mut policy = Policy::Full.start(1, 8, &Rules::PAPER);
            for token in 0..500 {
                let at = LayerState {
                    layer: 0,
                    slots: &slots,
                    probabilities: Some(&[0, 0, 255, 255, 255, 255, 255, 255]),
                    frequencies: &[0.6, 0.6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
                    last: &[0; 8],
                    token,
                    move_cost: 0.0,
                    host_fixed: 0.0,
                    rules: &Rules::PAPER,
                };
                policy.choose(&at, most, &mut scratch, &mut moves);
            }
            moves.is_empty()
        };
        assert!(!stay(6) && stay(2));
    }

    /// Two neurons that are used often have the slots, and two others are foreseen. They come where the link can bring both, and moving them costs no more
    /// than the host's fixed part, which is saved then; one of them would win less than it costs.
    #[test]
    fn a_layer_is_completed_where_the_link_can_and_its_fixed_part_pays_for_it() {
        let slots = slots(&[0, 1]);
        let moves = |most: usize, host_fixed: f32, completes: bool| {
            let (mut scratch, mut moves) = (Scratch::new(4, 2), Vec::new());
            let rules = Rules { completes, ..Rules::PAPER };
            let at = LayerState {
                layer: 0,
                slots: &slots,
                probabilities: Some(&[0, 0, 255, 255]),
                frequencies: &[0.6, 0.6, 0.0, 0.0],
                last: &[0; 4],
                token: 1,
                move_cost: 0.5,
                host_fixed,
                rules: &rules,
            };
            Policy::Full.start(1, 4, &rules).choose(&at, most, &mut scratch, &mut moves);
            moves.len()
        };
        assert_eq!((moves(2, 1.0, true), moves(1, 1.0, true), moves(2, 0.9, true), moves(2, 1.0, false)), (2, 0, 0, 0));
    }

    /// A layer without a prediction moves by frequency, also where the link has carried whatever was foreseen in others.
    #[test]
    fn a_layer_without_a_prediction_moves_by_frequency_alone() {
        let slots = slots(&[0]);
        let (mut scratch, mut moves) = (Scratch::new(2, 1), Vec::new());
        let mut policy = Policy::Full.start(1, 2, &Rules::PAPER);
        let state = |probabilities| LayerState {
            layer: 0,
            slots: &slots,
            probabilities,
            frequencies: &[0.1, 0.3],
            last: &[0; 2],
            token: 1,
            move_cost: 0.0,
            host_fixed: 0.0,
            rules: &Rules::PAPER,
        };
        for _ in 0..500 {
            policy.choose(&state(Some(&[255, 0])), 8, &mut scratch, &mut moves);
            assert!(moves.is_empty());
        }
        policy.choose(&state(None), 8, &mut scratch, &mut moves);
        assert_eq!(moves.len(), 1);
    }

    #[test]
    fn on_demand_one_use_does_not_displace_who_is_used_often_and_more_uses_do() {
        let (paper, on_demand) = (Rules::PAPER, Rules::PAPER.on_demand());
        // Before the device computes, the coming use is worth a move; from a disk it has been paid.
        assert!(comes(&paper, [0.1, 0.0]) && !comes(&on_demand, [0.1, 0.0]));
        assert!(comes(&on_demand, [0.4, 0.38]) && !comes(&on_demand, [0.4, 0.36]));
        // A neuron that is not needed gets no slot, however frequent it is.
        let slots = slots(&[0]);
        let (mut scratch, mut moves) = (Scratch::new(2, 1), Vec::new());
        let at = LayerState {
            layer: 0,
            slots: &slots,
            probabilities: Some(&[0, 0]),
            frequencies: &[0.1, 0.9],
            last: &[0, 0],
            token: 1,
            move_cost: 0.0,
            host_fixed: 0.0,
            rules: &on_demand,
        };
        Policy::Full.start(1, 2, &on_demand).choose(&at, usize::MAX, &mut scratch, &mut moves);
        assert!(moves.is_empty());
    }
}
