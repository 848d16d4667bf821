//! One step of the scheduler: takes an observation of a layer, and gives what moves and from which probability on neurons are computed. The
//! thread beside the engine, a replay and the simulator all call [`Scheduler::step`], and nothing else decides.

use super::gain::Gain;
use super::importance::Frequencies;
use super::log::{self, RatesLog};
use super::policy::greedy::{self, Move};
use super::policy::{ChooseMoves, LayerState, Policy, Rules, Scratch};
use super::rates::Rates;
use super::thresholds::{BALANCE_EVERY, Balancer, LossWeight, probabilities, to_bin};
use super::window::Window;
use crate::cache::{PerTier, Slot};
use crate::device::Totals;
use crate::ids::{LayerId, StoreId};

/// Share that a sequence has in the history with which the next one starts.
const HISTORY_SHARE: f32 = 0.2;

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
    /// What merging the halves of an FFN takes, ns.
    pub sync_ns: f64,
    /// What a move costs, in neurons that the CPU could compute meanwhile; `None` for the measured share of the time in which the CPU reads
    /// memory.
    pub move_cost: Option<f64>,
    /// Seed of policies that draw random numbers.
    pub seed: u64,
}

/// What is known of a layer once its neurons have been chosen.
#[derive(Clone, Copy, Debug)]
pub struct LayerObservation<'a> {
    /// The layer.
    pub layer: LayerId,
    /// This is the first layer of the first pass of a text.
    pub begins: bool,
    /// Neurons that are computed for some token of the pass, ascending. In a batch a neuron counts once, however many tokens need it,
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
    /// Predicted probabilities of the neurons of the layer [`SchedulerOptions::ahead`] after this one, times 255, `[ffn]`; `None` if it was not
    /// predicted.
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
    /// Neurons of all layers whose copies have not arrived, or have and their layer was not used since.
    pub in_flight: u64,
    /// What the device has counted so far.
    pub totals: Totals,
    /// Active neurons times tokens computed so far, by where.
    pub computed: PerTier<u64>,
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
    f: Frequencies,
    /// Whether the neuron is in the static placement, `[ffn]`.
    is_static: Vec<bool>,
    /// Token at which the neuron was computed last, `[ffn]`; 0 for never.
    last: Vec<u32>,
    /// The single threshold and what balances it, if thresholds are balanced.
    balancer: Option<(f32, Balancer)>,
}

/// Decides for all layers. Knows no thread, device or clock.
pub struct Scheduler {
    rules: Rules,
    policy: Box<dyn ChooseMoves>,
    loss: LossWeight,
    ahead: usize,
    predicts: bool,
    block_bytes: u64,
    move_cost: Option<f64>,
    window: Window,
    rates: Rates,
    rates_log: RatesLog,
    gain: Gain,
    layers: Vec<Layer>,
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
        let layer = |(l, (history, placed)): (usize, (Vec<f32>, &Vec<StoreId>))| {
            let mut is_static = vec![false; ffn];
            placed.iter().for_each(|&n| is_static[n.index()] = true);
            let own = setting.thresholds.get(l).copied().flatten();
            let balancer = own.map(|own| (own, Balancer::new(to_bin(own))));
            Layer { f: Frequencies::new(history), is_static, last: vec![0; ffn], balancer }
        };
        let ahead = setting.ahead.max(1);
        Scheduler {
            rules: setting.rules,
            policy: setting.policy.start(layers, ffn),
            loss: setting.loss,
            ahead,
            predicts: setting.predicts,
            block_bytes: setting.block_bytes as u64,
            move_cost: setting.move_cost,
            // Until rates are known, nothing is put on the link.
            window: Window::new(0.0, ahead),
            rates: Rates::new(setting.link_gb_s, setting.sync_ns),
            rates_log: RatesLog::default(),
            gain: Gain::default(),
            layers: setting.history.into_iter().zip(&setting.placed).enumerate().map(layer).collect(),
            token: 1,
            scratch: Scratch::new(ffn, setting.seed),
            moves: Vec::with_capacity(ffn),
            counts: vec![0; ffn],
            here: vec![false; ffn],
        }
    }

    /// Changes the policy from the next step on; frequencies are kept.
    pub fn set_policy(&mut self, policy: Policy, rules: Rules) {
        self.policy = policy.start(self.layers.len(), self.here.len());
        self.rules = rules;
        // The engine has gone back to single thresholds already.
        if !rules.thresholds {
            self.layers.iter_mut().filter_map(|l| l.balancer.as_mut()).for_each(|(_, balancer)| balancer.reset());
        }
    }

    /// Whether neurons move; `false` also while the static placement is kept because moving does not pay.
    pub fn moving(&self) -> bool {
        self.rules.moves && (!self.rules.gain || self.gain.moving())
    }

    /// Ends the last text. Returns how often each neuron was computed, 0 to 1, `[layers][ffn]`: the history of the next scheduler.
    pub fn finish(mut self) -> Vec<Vec<f32>> {
        self.begin_sequence();
        self.layers.iter().map(|layer| layer.f.history().to_vec()).collect()
    }

    /// Takes one layer of one pass, and calls `decide` with each decision. Every pass must be given layer by layer, in order.
    pub fn step(&mut self, seen: &LayerObservation<'_>, mut decide: impl FnMut(Decision<'_>)) {
        if seen.begins {
            self.begin_sequence();
        }
        match seen.prompt {
            None => self.decoded(seen),
            Some(prompt) => self.prompted(seen.layer.index(), seen.computed, prompt),
        }
        let Some(device) = &seen.device else { return };
        if let Some(thresholds) = self.balance(seen, device.slots) {
            decide(Decision { layer: seen.layer, moves: &[], thresholds: Some(thresholds) });
        }
        let (layer, under_way) = (seen.layer.index(), device.in_flight * self.block_bytes);
        let target = layer + self.ahead;
        if seen.ahead.is_some() && target < self.layers.len() {
            let moves = self.plan(target, device.ahead_slots, seen.ahead, under_way);
            decide(Decision { layer: LayerId::new(target), moves, thresholds: None });
        }
        // No layer stands far enough before the first ones to predict them, and layers without a prediction move by their frequencies.
        if layer < self.ahead || !self.predicts {
            let moves = self.plan(layer, device.slots, None, under_way);
            decide(Decision { layer: seen.layer, moves, thresholds: None });
        }
        if layer + 1 == self.layers.len() {
            self.gain.token(self.move_cost.unwrap_or(self.rates.cpu_share()));
            self.window.token();
            self.token = self.token.wrapping_add(1);
        }
    }

    /// Another text begins.
    fn begin_sequence(&mut self) {
        self.layers.iter_mut().for_each(|l| l.f.end_sequence(HISTORY_SHARE));
        self.window.begin_sequence();
    }

    /// A chunk of a prompt. The time that it took says nothing of decoding.
    fn prompted(&mut self, layer: usize, active: &[StoreId], prompt: Prompt<'_>) {
        self.rates.begin_anew();
        self.counts.fill(0);
        active.iter().zip(prompt.counts).for_each(|(&n, &count)| self.counts[n.index()] = count);
        self.layers[layer].f.prompt(&self.counts, prompt.tokens, self.rules.decay);
    }

    /// The next token of one sequence or of several.
    fn decoded(&mut self, seen: &LayerObservation<'_>) {
        let Some(device) = &seen.device else { return };
        if let Some(now) = self.rates.measure(device.totals, device.computed) {
            self.window.measured(now.layer_ns, now.link_gb_s);
            self.rates_log.measured(self.token, now, self.rates.times(), self.window.bytes_per_layer());
        }
        let Scheduler { layers, here, rules, token, policy, gain, .. } = self;
        let layer = &mut layers[seen.layer.index()];
        layer.f.token(seen.computed, rules.decay);
        seen.computed.iter().for_each(|&n| layer.last[n.index()] = *token);
        mark(here, device.slots);
        let hits = seen.computed.iter().filter(|n| here[n.index()]).count();
        let of_static = seen.computed.iter().filter(|n| layer.is_static[n.index()]).count();
        gain.layer(hits as u64, of_static as u64);
        let at = layer.state(seen.layer.index(), device.slots, None, *token, rules);
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
        mark(&mut self.here, slots);
        balancer.token(predicted, |n| self.here[n.index()]);
        if !self.token.wrapping_sub(1).is_multiple_of(BALANCE_EVERY) {
            return None;
        }
        let (before, times) = (balancer.thresholds(), self.rates.times()?);
        let now = balancer.update(times, self.loss);
        if now == before {
            return None;
        }
        let [before, now] = [before, now].map(|thresholds| probabilities(thresholds, *own));
        log::thresholds(self.token, seen.layer.index(), before, now, times);
        Some(now)
    }

    /// Moves for a layer that will be used. `probabilities`, times 255, are those of that use, if it was predicted; `under_way` are the
    /// bytes on the link.
    fn plan(&mut self, layer: usize, slots: &[Slot], probabilities: Option<&[u8]>, under_way: u64) -> &[Move] {
        self.moves.clear();
        if !self.rules.moves {
            return &self.moves;
        }
        let most = (self.window.room(under_way) / self.block_bytes) as usize;
        let moving = self.moving();
        let Scheduler { layers, policy, scratch, moves, token, rules, .. } = self;
        let at = layers[layer].state(layer, slots, probabilities, *token, rules);
        if moving {
            policy.choose(&at, most, scratch, moves);
        } else {
            // Back to the static placement.
            let v = &mut scratch.worth;
            v.clear();
            v.extend(layers[layer].is_static.iter().map(|&placed| f32::from(u8::from(placed))));
            greedy::choose(slots, v, most, 0.0, |_| false, |_| false, &mut scratch.lists, moves);
        }
        log::moves(&at, moving, most, moves);
        self.gain.moved(if moving { moves.len() } else { 0 });
        &self.moves
    }
}

impl Layer {
    fn state<'a>(
        &'a self,
        layer: usize,
        slots: &'a [Slot],
        probabilities: Option<&'a [u8]>,
        token: u32,
        rules: &'a Rules,
    ) -> LayerState<'a> {
        LayerState { layer, slots, probabilities, frequencies: self.f.now(), last: &self.last, token, rules }
    }
}

/// Sets `here` to which neurons are resident.
fn mark(here: &mut [bool], slots: &[Slot]) {
    here.fill(false);
    slots.iter().filter_map(|slot| slot.resident()).for_each(|n| here[n.index()] = true);
}
