//! One step of the scheduler: takes an observation of a layer, and gives what moves and from which probability on neurons are computed. The
//! thread beside the engine, a replay and the simulator all call [`Scheduler::step`], and nothing else decides.

use super::costs::StageCosts;
use super::gain::{Comparison, Gain};
use super::log::{self, RatesLog};
use super::policy::greedy::{self, Move};
use super::policy::{ChooseMoves, LayerState, Policy, Rules, Scratch};
use super::rates::{LayerTimes, Rates};
use super::sequences::{Fired, Known, Sequences};
use super::thresholds::{Balancer, LossWeight, probabilities, to_bin};
use super::window::Window;
use crate::cache::{PerTier, Slot, Tier};
use crate::device::Totals;
use crate::ids::{LayerId, StoreId};

/// What a scheduler starts with. Where a trace is replayed, the store is in the published order.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// Chooses which neurons move.
    pub policy: Policy,
    /// The policy's numbers and switches.
    pub rules: Rules,
    /// What leaving out a neuron is taken to lose, for balancing thresholds.
    pub loss: LossWeight,
    /// Layers from a prediction to the layer that it is for, 1 or more.
    pub ahead: usize,
    /// Whether layers are predicted; if not, neurons move by their frequencies only.
    pub predicts: bool,
    /// Bytes of one neuron's block.
    pub block_bytes: usize,
    /// The frequencies with which the first sequence starts, 0 to 1, `[layers][ffn]`.
    pub history: Vec<Vec<f32>>,
    /// The neurons of the static placement, `[layers]`.
    pub placed: Vec<Vec<StoreId>>,
    /// The single threshold, a probability, of each layer whose thresholds are balanced, `[layers]`; `None` for the others.
    pub thresholds: Vec<Option<f32>>,
    /// The link's rate until it has been measured, GB/s.
    pub link_gb_s: f64,
    /// Seed of policies that draw random numbers.
    pub seed: u64,
}

/// What is known of a layer once its neurons have been chosen.
#[derive(Clone, Copy, Debug)]
pub struct LayerObservation<'a> {
    /// The layer.
    pub layer: LayerId,
    /// The sequence of each token of the pass, by numbers that no other sequence has; of a prompt's chunk one stands for all.
    pub sequences: &'a [u64],
    /// This is the first layer of the first pass of a text: the first of the sequences begins anew.
    pub begins: bool,
    /// Which neurons were active in a layer that was computed before this one: the device's part is known a layer late.
    pub fired: Option<Fired<'a>>,
    /// The pass is audited: neurons of this layer that were active for some token and not computed, ascending.
    pub missed: Option<&'a [StoreId]>,
    /// Neurons that are computed for some token of the pass, ascending; of a mixture whose gates choose inside its experts those that were active in
    /// the pass before, in no order. In a batch a neuron counts once, however many tokens need it,
    /// because it is read once.
    pub computed: &'a [StoreId],
    /// The pass is a chunk of a prompt; `None` for the next token of one sequence or of several.
    pub prompt: Option<Prompt<'a>>,
    /// The device's state; `None` if nothing is to move. A long prompt is no time to fill the link (E.3.3); what it showed is used from the
    /// first token on.
    pub device: Option<DeviceState<'a>>,
    /// For a layer whose thresholds are balanced: its single threshold now, and the predicted probabilities of its neurons, times 255,
    /// `[ffn]`.
    pub own: Option<(f32, &'a [u8])>,
    /// Predicted probabilities of the neurons of the layer [`SchedulerOptions::ahead`] after this one, times 255, `[ffn]`; `None` if it was
    /// not predicted.
    pub ahead: Option<&'a [u8]>,
}

/// A chunk of a prompt.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Its tokens.
    pub tokens: usize,
    /// For how many of its tokens each of [`LayerObservation::computed`] was active.
    pub counts: &'a [u32],
}

/// The device's state when the layer's neurons were divided between device and CPU.
#[derive(Clone, Copy, Debug)]
pub struct DeviceState<'a> {
    /// What the layer's slots hold.
    pub slots: &'a [Slot],
    /// What the slots of the layer [`SchedulerOptions::ahead`] after it hold; empty if there is no such layer.
    pub ahead_slots: &'a [Slot],
    /// Neurons of all layers whose copies have not arrived, or have and their layer was not used since ([`super::window::Window::room`] leaves
    /// out what the link must have carried).
    pub in_flight: u64,
    /// What the device has counted so far.
    pub totals: Totals,
    /// What this layer took in the pass before; no neurons if it is not known.
    pub times: LayerTimes,
}

/// What is decided for a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision<'a> {
    /// The layer that it is for.
    pub layer: LayerId,
    /// Moves for its slots, the most urgent first.
    pub moves: &'a [Move],
    /// Probabilities from which on its neurons are computed, by where they lie; `None` to leave them.
    pub thresholds: Option<PerTier<f32>>,
}

struct Layer {
    /// Whether the neuron is in the static placement, `[ffn]`.
    is_static: Vec<bool>,
    /// Token at which the neuron was computed last, `[ffn]`; 0 for never.
    last: Vec<u32>,
    /// Slots that it had last.
    slots: usize,
    /// The single threshold and what balances it, if thresholds are balanced.
    balancer: Option<(f32, Balancer)>,
}

/// How many times what it costs the CPU a cluster's move must win. It is on its way for about as long as a layer takes, mostly while the
/// CPU's part reads memory; it may come too late for the use that it was foreseen for; and for all that time its slot is of no use.
const CLUSTER_COST: f64 = 3.0;

/// Decides for all layers. Knows no thread, device or clock.
pub struct Scheduler {
    rules: Rules,
    policy: Box<dyn ChooseMoves>,
    loss: LossWeight,
    ahead: usize,
    predicts: bool,
    block_bytes: u64,
    window: Window,
    rates: Rates,
    rates_log: RatesLog,
    gain: Gain,
    layers: Vec<Layer>,
    sequences: Sequences,
    /// The layer that was observed last.
    observed: Option<LayerId>,
    /// Number of the current token, from 1 on.
    token: u32,
    scratch: Scratch,
    moves: Vec<Move>,
    /// For how many tokens of a prompt each neuron was active, `[ffn]`.
    counts: Vec<u32>,
    /// Whether each neuron of the current layer is resident, `[ffn]`.
    here: Vec<bool>,
}

impl Scheduler {
    /// A scheduler that has seen no token.
    pub fn new(setting: SchedulerOptions) -> Scheduler {
        let (layers, ffn) = (setting.history.len(), setting.history.first().map_or(0, Vec::len));
        let layer = |(l, placed): (usize, &Vec<StoreId>)| {
            let mut is_static = vec![false; ffn];
            placed.iter().for_each(|&n| is_static[n.index()] = true);
            let own = setting.thresholds.get(l).copied().flatten();
            let balancer = own.map(|own| (own, Balancer::new(to_bin(own))));
            Layer { is_static, last: vec![0; ffn], slots: 0, balancer }
        };
        let ahead = setting.ahead.max(1);
        Scheduler {
            rules: setting.rules,
            policy: setting.policy.start(layers, ffn, &setting.rules),
            loss: setting.loss,
            ahead,
            predicts: setting.predicts,
            block_bytes: setting.block_bytes as u64,
            // Until rates are known, nothing is put on the link.
            window: Window::new(0.0, ahead, setting.rules.window),
            rates: Rates::new(setting.link_gb_s, layers),
            rates_log: RatesLog::default(),
            gain: Gain::default(),
            layers: setting.placed.iter().enumerate().map(layer).collect(),
            sequences: Sequences::new(setting.history),
            observed: None,
            token: 1,
            scratch: Scratch::new(ffn, setting.seed),
            moves: Vec::with_capacity(ffn),
            counts: vec![0; ffn],
            here: vec![false; ffn],
        }
    }

    /// Changes the policy from the next step on; frequencies are kept.
    pub fn set_policy(&mut self, policy: Policy, rules: Rules) {
        self.policy = policy.start(self.layers.len(), self.here.len(), &rules);
        self.rules = rules;
        self.gain = Gain::default();
        // The engine has gone back to single thresholds already.
        if !rules.thresholds {
            self.layers.iter_mut().filter_map(|l| l.balancer.as_mut()).for_each(|(_, balancer)| balancer.reset());
        }
    }

    /// What the guard has found when it compared moving with the static placement last.
    pub fn gain(&self) -> Comparison {
        self.gain.last()
    }

    /// Whether neurons move; `false` also while the static placement is kept because moving does not pay.
    pub fn moving(&self) -> bool {
        self.rules.moves && (!self.rules.gain || self.gain.moving())
    }

    /// The frequencies of each sequence, which other threads may read.
    pub fn known(&self) -> Known {
        self.sequences.known()
    }

    /// Ends the last text. Returns how often each neuron was active, 0 to 1, `[layers][ffn]`: the history of the next scheduler.
    pub fn finish(self) -> Vec<Vec<f32>> {
        self.sequences.finish()
    }

    /// Takes one layer of one pass, and calls `decide` with each decision. Every pass must be given layer by layer, in order.
    pub fn step(&mut self, seen: &LayerObservation<'_>, mut decide: impl FnMut(Decision<'_>)) {
        if let Some(fired) = seen.fired {
            self.sequences.tokens(fired, self.rules.decay);
        }
        if let Some(missed) = seen.missed {
            self.sequences.audited(seen.layer.index(), missed);
        }
        // Dense layers are not told of, so that the first one of a pass may be any.
        if self.observed.is_none_or(|before| seen.layer <= before) {
            self.begin_pass(seen);
        }
        self.observed = Some(seen.layer);
        match seen.prompt {
            None => self.decoded(seen),
            Some(prompt) => self.prompted(seen, prompt),
        }
        let Some(device) = &seen.device else { return };
        if let Some(thresholds) = self.balance(seen, device.slots) {
            decide(Decision { layer: seen.layer, moves: &[], thresholds: Some(thresholds) });
        }
        let (layer, under_way) = (seen.layer.index(), device.in_flight * self.block_bytes);
        let target = layer + self.ahead;
        if seen.ahead.is_some() && target < self.layers.len() {
            let moves = self.plan(target, seen.sequences, device.ahead_slots, seen.ahead, under_way);
            decide(Decision { layer: LayerId::new(target), moves, thresholds: None });
        }
        // No layer stands far enough before the first ones to predict them, and layers without a prediction move by their frequencies.
        if layer < self.ahead || !self.predicts {
            let moves = self.plan(layer, seen.sequences, device.slots, None, under_way);
            decide(Decision { layer: seen.layer, moves, thresholds: None });
        }
        if layer + 1 == self.layers.len() {
            let ns =
                self.rates.token(device.totals.clock_ns).filter(|_| seen.prompt.is_none() && seen.missed.is_none());
            self.gain.token(ns, seen.sequences.len());
            self.window.token();
            self.token = self.token.wrapping_add(1);
        }
    }

    /// What a move costs in hits.
    fn cost(&self) -> f64 {
        let share = self.rules.move_cost.unwrap_or(self.rates.move_cost());
        if self.rules.clusters { CLUSTER_COST * share } else { share }
    }

    /// A pass begins.
    fn begin_pass(&mut self, seen: &LayerObservation<'_>) {
        if seen.begins {
            seen.sequences.first().into_iter().for_each(|&sequence| self.sequences.begin(sequence));
            self.window.begin_sequence();
        }
        self.sequences.touch(seen.sequences);
    }

    /// A chunk of a prompt. The time that it took says nothing of decoding.
    fn prompted(&mut self, seen: &LayerObservation<'_>, prompt: Prompt<'_>) {
        self.rates.begin_anew();
        self.counts.fill(0);
        seen.computed.iter().zip(prompt.counts).for_each(|(&n, &count)| self.counts[n.index()] = count);
        // Of few tokens the neurons that fired come by themselves.
        let Some(&sequence) = seen.sequences.first().filter(|_| seen.device.is_none()) else { return };
        self.sequences.prompt(sequence, seen.layer.index(), &self.counts, prompt.tokens, self.rules.decay);
    }

    /// The next token of one sequence or of several.
    fn decoded(&mut self, seen: &LayerObservation<'_>) {
        let Some(device) = &seen.device else { return };
        self.rates.layer(seen.layer.index(), device.times);
        if let Some(now) = self.rates.measure(device.totals) {
            self.window.measured(now.layer_ns, now.link_gb_s);
            let (costs, start_ns) = (self.rates.costs(0), self.rates.copy_start_ns());
            self.rates_log.measured(self.token, now, costs, start_ns, self.window.bytes_per_layer());
        }
        let Scheduler { layers, rules, token, policy, gain, .. } = self;
        let layer = &mut layers[seen.layer.index()];
        if std::mem::replace(&mut layer.slots, device.slots.len()) != device.slots.len() {
            gain.begin_anew();
        }
        seen.computed.iter().for_each(|&n| layer.last[n.index()] = *token);
        let at = layer.state(seen.layer.index(), device.slots, (None, &[]), *token, (0.0, 0.0), rules);
        policy.computed(&at, seen.computed);
    }

    /// New thresholds for this layer, if they are to change.
    fn balance(&mut self, seen: &LayerObservation<'_>, slots: &[Slot]) -> Option<PerTier<f32>> {
        let (own, balancer) = self.layers[seen.layer.index()].balancer.as_mut()?;
        let (set, predicted) = seen.own.filter(|_| self.rules.thresholds)?;
        // The user has set another threshold, which is used already.
        if set != *own {
            *own = set;
            balancer.rebase(to_bin(set));
        }
        if let Some(pair) = self.rules.pair {
            return balancer.set(pair.map(to_bin)).then_some(pair);
        }
        mark(&mut self.here, slots);
        balancer.token(self.token, predicted, |n| self.here[n.index()]);
        if !balancer.is_due(self.token) {
            return None;
        }
        let (before, costs) = (balancer.thresholds(), self.rates.costs(seen.layer.index())?);
        let now = balancer.update(self.token, &costs, self.loss, self.rules.max_more);
        if now == before {
            return None;
        }
        let [before, now] = [before, now].map(|thresholds| probabilities(thresholds, *own));
        log::thresholds(self.token, seen.layer.index(), before, now, &costs);
        Some(now)
    }

    /// Moves for a layer that will be used. `probabilities`, times 255, are those of that use, if it was predicted; `under_way` are the
    /// bytes on the link.
    fn plan(
        &mut self,
        layer: usize,
        sequences: &[u64],
        slots: &[Slot],
        probabilities: Option<&[u8]>,
        under_way: u64,
    ) -> &[Move] {
        self.moves.clear();
        if !self.rules.moves {
            return &self.moves;
        }
        let most = match self.rules.clusters {
            false => (self.window.room(under_way) / self.block_bytes) as usize,
            true => self.window.blocks(under_way, self.block_bytes),
        };
        let (moving, move_cost) = (self.moving(), self.cost() as f32);
        let fixed = |costs: StageCosts| costs.lanes[Tier::Host].fixed_ns / costs.lanes[Tier::Host].neuron_ns;
        let host_fixed = self.rates.costs(layer).map_or(0.0, fixed) as f32;
        let Scheduler { layers, policy, scratch, moves, token, rules, .. } = self;
        scratch.worth.clear();
        let f = self.sequences.frequencies(layer, sequences);
        let at = layers[layer].state(layer, slots, (probabilities, f), *token, (move_cost, host_fixed), rules);
        if moving {
            policy.choose(&at, most, scratch, moves);
        } else {
            // Back to the static placement.
            let v = &mut scratch.worth;
            v.clear();
            v.extend(layers[layer].is_static.iter().map(|&placed| f32::from(u8::from(placed))));
            greedy::choose(slots, v, most, 0.0, |_| false, |_| false, &mut scratch.lists, moves);
        }
        log::moves(&at, &scratch.worth, moving, most, moves);
        self.gain.moved(moves.len());
        self.window.sent(moves.len() as u64 * self.block_bytes);
        &self.moves
    }
}

impl Layer {
    fn state<'a>(
        &'a self,
        layer: usize,
        slots: &'a [Slot],
        (probabilities, frequencies): (Option<&'a [u8]>, &'a [f32]),
        token: u32,
        (move_cost, host_fixed): (f32, f32),
        rules: &'a Rules,
    ) -> LayerState<'a> {
        LayerState { layer, slots, probabilities, frequencies, last: &self.last, token, move_cost, host_fixed, rules }
    }
}

/// Sets `here` to which neurons are resident.
fn mark(here: &mut [bool], slots: &[Slot]) {
    here.fill(false);
    slots.iter().filter_map(|slot| slot.resident()).for_each(|n| here[n.index()] = true);
}
