//! Replays a recorded trace under a policy and a link rate: which active neurons would have been on the device.
//!
//! Time is counted in layers: a layer takes one unit, attention a third of it and the FFN the rest, and the link carries a given
//! number of neurons per unit, one decision after the other. A neuron that arrives after its layer's neurons were chosen is a miss.
//! Scheduler, slot tables and the order of steps in a layer are those of the engine ([`super::trace_run`]). Device and CPU have
//! the same threshold, so that the policy `full` does what `macro` does, unless [`ReplayOptions::stage`] says what they take. What the tokens
//! would take is said by fixed costs ([`Outcome::stage_ns_by`]), which no policy sees otherwise.

pub use super::trace_run::active;
use super::trace_run::{Clock, Copies, OwnedDecision, TraceRun};
use crate::cache::{PerTier, Tier};
use crate::formats::trace_file::{Header, TraceFile, TraceSection};
use crate::ids::PublishedId;
use crate::profile::jaccard_distance;
use crate::scheduler::costs::{Lane, StageCosts, StageCounts};
use crate::scheduler::h200;
use crate::scheduler::thresholds::LossWeight;
use crate::scheduler::{self, LayerTimes, Policy, Rules};
use serde::Serialize;

/// Length of a unit on the scheduler's clock, ns: long enough that rounding to whole nanoseconds changes nothing.
const LAYER_NS: f64 = 1e6;
/// Attention's share of a layer's time: that of its weights, 4 of 12 hidden^2 (LLaMA 7B).
const ATTENTION: f64 = 1.0 / 3.0;

/// What to replay.
#[derive(Clone, Debug)]
pub struct ReplayOptions {
    /// Which neurons move to the device, and which they replace.
    pub policy: Policy,
    /// Which parts of the policy are on, and their constants.
    pub rules: Rules,
    /// Neuron slots of each layer on the device, `[layers]`.
    pub slots: Vec<usize>,
    /// Link rate: neurons per layer's time.
    pub link: f64,
    /// Neurons that are on the device at the beginning, `[layers]`, at most `slots` of each.
    pub placed: Vec<Vec<PublishedId>>,
    /// Frequency of each neuron that the scheduler knows at the beginning, `[layers][ffn]`, 0 to 1.
    pub history: Vec<Vec<f32>>,
    /// Probability from which on a neuron is computed, `[layers]`; the scheduler's frequencies count those of them that are active.
    pub thresholds: Vec<f32>,
    /// Cost of a move in hits, for clusters.
    pub cost: f64,
    /// Whether look-ahead is never wrong, to tell what its errors cost.
    pub foreseen: bool,
    /// What the FFN of a layer takes, under policies that balance thresholds; `None` has one threshold for device and CPU.
    pub stage: Option<StageCosts>,
    /// Seed of policies that draw random numbers.
    pub seed: u64,
    /// Number of texts at the beginning of the trace that are left out.
    pub skip: usize,
}

/// Result of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Number of active (neuron, token) pairs.
    pub active: u64,
    /// Those of them whose neuron was on the device.
    pub hits: u64,
    /// Number of moves to the device that were begun.
    pub moves: u64,
    /// Share of the tokens during which the scheduler was moving neurons, 0 to 1.
    pub moving: f64,
    /// Number of layers of all tokens.
    pub layers: u64,
    /// Those of them in which the CPU computed nothing.
    pub whole: u64,
    /// Number of (neuron, token) pairs that the CPU computed.
    pub host: u64,
    /// Those that the device computed.
    pub device: u64,
    /// Active pairs that were computed nowhere.
    pub lost: u64,
    /// Time of all FFNs by [`ReplayOptions::stage`], ns; 0 without.
    pub stage_ns: f64,
}

impl Outcome {
    /// Hits / active pairs, 0 to 1.
    pub fn gpu_share(&self) -> f64 {
        self.hits as f64 / self.active.max(1) as f64
    }

    /// Time of all FFNs by these costs, ns.
    pub fn stage_ns_by(&self, costs: &StageCosts) -> f64 {
        let Outcome { layers, whole, host, moves, .. } = *self;
        costs.for_counts(StageCounts { stages: layers, split: layers - whole, host, moves })
    }

    /// Adds a layer of a token that `run` has chosen neurons for. Returns how many each memory computes.
    fn add(&mut self, run: &TraceRun<'_>) -> PerTier<u64> {
        let here = |neurons: &[u32]| neurons.iter().map(|&n| usize::from(run.here[n as usize])).sum::<usize>() as u64;
        let (hits, same) = (here(&run.truth), run.computed == run.truth);
        let device = if same { hits } else { here(&run.computed) };
        let host = run.computed.len() as u64 - device;
        self.active += run.truth.len() as u64;
        self.hits += hits;
        self.layers += 1;
        self.whole += u64::from(host == 0);
        self.host += host;
        self.device += device;
        if !same {
            self.lost += run.truth.iter().filter(|n| run.computed.binary_search(n).is_err()).count() as u64;
        }
        PerTier::all(host).with(Tier::Device, device)
    }
}

/// A desktop, whose memory decides. Assumed: the fixed parts of the H200, and neurons of the same bytes at the memory rate of
/// profiles/machines/rtx-4090.toml. A move reads the same memory as computing the neuron, beside the CPU for the FFN's share of the time.
pub fn desktop() -> StageCosts {
    let host = Lane::reading(h200::HOST_FIXED_NS, h200::NEURON_BYTES, 89.6);
    let of_card = h200::stage();
    StageCosts { lanes: of_card.lanes.with(Tier::Host, host), move_ns: (1.0 - ATTENTION) * host.neuron_ns, ..of_card }
}

/// Replays the texts of the trace.
pub fn replay(trace: &TraceFile, setting: &ReplayOptions) -> Outcome {
    replay_with(trace, setting, |_, _, _| ())
}

/// As [`replay`]. After each layer `decisions` is given the token, the layer and the decisions made.
pub fn replay_with(
    trace: &TraceFile,
    setting: &ReplayOptions,
    mut decisions: impl FnMut(usize, usize, &[OwnedDecision]),
) -> Outcome {
    let mut run = start(trace, setting);
    run.foreseen = setting.foreseen;
    let (mut outcome, mut clock) = (Outcome::default(), Clock::default());
    let (mut first, mut moving, mut all) = (0, 0u64, 0u64);
    for (i, text) in trace.header().texts.iter().enumerate() {
        let tokens = if i < setting.skip { 0 } else { text.tokens };
        for token in first..first + tokens {
            for layer in 0..trace.header().layers {
                run.apply();
                run.pass(ATTENTION * LAYER_NS);
                clock.now_ns += ATTENTION * LAYER_NS;
                run.choose(layer, token);
                let computed = outcome.add(&run);
                if let Some(stage) = &setting.stage {
                    outcome.stage_ns += stage.for_count(computed);
                    run.times[layer] = times(stage, computed);
                }
                let balances = setting.stage.is_some() && setting.rules.thresholds;
                // A policy that never moves anything need not know.
                let knows = setting.rules.moves || balances;
                let decided = if knows { run.observe(layer, token, token == first, clock, balances) } else { &[] };
                decisions(token, layer, decided);
                run.pass((1.0 - ATTENTION) * LAYER_NS);
                clock.now_ns += (1.0 - ATTENTION) * LAYER_NS;
            }
            moving += u64::from(run.scheduler.moving());
            all += 1;
        }
        first += text.tokens;
    }
    outcome.moves = run.moves;
    outcome.moving = moving as f64 / all.max(1) as f64;
    outcome
}

/// What a layer would have been measured to take.
fn times(stage: &StageCosts, neurons: PerTier<u64>) -> LayerTimes {
    let of = |ns: fn(Lane, u64) -> f64| PerTier::from_fn(|tier| ns(stage.lanes[tier], neurons[tier]) as u64);
    LayerTimes {
        ffn_ns: of(Lane::for_count),
        fixed_ns: of(|lane, _| lane.fixed_ns),
        neurons,
        merge_ns: 0,
        ..LayerTimes::default()
    }
}

/// The rules with which a policy works on what the trace has: neurons, or the experts of a mixture.
pub fn rules(policy: Policy, header: &Header) -> Rules {
    if header.experts_used.is_some() { policy.rules().for_clusters() } else { policy.rules() }
}

/// Share of the uses that are computed on the device where whole layers of experts lie there, as many as fit into the slots
/// (llama.cpp's `--n-cpu-moe`), 0 to 1: each layer has as many uses as any other.
pub fn whole_layers(header: &Header, slots: &[usize]) -> f64 {
    (slots.iter().sum::<usize>() / header.ffn) as f64 / header.layers as f64
}

fn start<'a>(trace: &'a TraceFile, setting: &ReplayOptions) -> TraceRun<'a> {
    let h = trace.header();
    let gb_s = setting.link * h.block_bytes as f64 / LAYER_NS;
    let scheduling = scheduler::SchedulerOptions {
        policy: setting.policy,
        // A layer takes as long wherever its neurons are: there is no time to see that moves lose.
        rules: Rules { gain: false, move_cost: Some(setting.cost), ..setting.rules },
        loss: LossWeight::Probability,
        ahead: h.ahead.clamp(1, h.layers),
        predicts: true,
        block_bytes: h.block_bytes,
        history: setting.history.clone(),
        // A trace's neurons have their published numbers, and so have those of the scheduler that runs on it.
        placed: setting.placed.iter().map(|placed| bytemuck::cast_slice(placed).to_vec()).collect(),
        thresholds: setting.thresholds.iter().map(|&own| setting.stage.map(|_| own)).collect(),
        link_gb_s: gb_s,
        seed: setting.seed,
    };
    // Experts are large enough to be sent one by one.
    let copies = Copies { block_bytes: h.block_bytes as f64, gb_s, start_ns: 0.0, apart: h.experts_used.is_some() };
    TraceRun::new(trace, scheduling, &setting.slots, setting.thresholds.clone(), copies)
}

/// Share of the tokens for which each neuron was active, `[layers][ffn]`, over the texts whose index `texts` accepts.
pub fn frequencies(trace: &TraceFile, texts: impl Fn(usize) -> bool) -> Vec<Vec<f32>> {
    let h = trace.header();
    let (mut counts, mut now, mut first, mut tokens) = (vec![vec![0f32; h.ffn]; h.layers], Vec::new(), 0, 0);
    for (i, text) in h.texts.iter().enumerate() {
        if texts(i) {
            tokens += text.tokens;
            for token in first..first + text.tokens {
                for (layer, counts) in counts.iter_mut().enumerate() {
                    active(trace.row(TraceSection::Active, layer, token), &mut now);
                    now.iter().for_each(|&n| counts[n as usize] += 1.0);
                }
            }
        }
        first += text.tokens;
    }
    counts.iter_mut().flatten().for_each(|c| *c /= tokens.max(1) as f32);
    counts
}

/// Divides slots for `share` of all neurons over the layers, `[layers]`: a layer gets as many as it has among the most frequent neurons of
/// all. `counts` are activations, `[layers][ffn]`.
pub fn slots(counts: &[Vec<u64>], share: f64) -> Vec<usize> {
    let mut all: Vec<(u64, usize)> =
        counts.iter().enumerate().flat_map(|(layer, counts)| counts.iter().map(move |&n| (n, layer))).collect();
    all.sort_unstable_by(|a, b| b.cmp(a));
    all.truncate((share * all.len() as f64).round() as usize);
    let mut slots = vec![0; counts.len()];
    all.iter().for_each(|&(_, layer)| slots[layer] += 1);
    slots
}

/// A row of bits in words of 64.
pub fn words(row: &[u8]) -> Vec<u64> {
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    row.chunks(8).map(word).collect()
}

/// Mean Jaccard distances: between the active sets of neighbouring tokens of a text; and between the 40 % most active neurons of two texts,
/// `None` for a single text.
pub fn likeness(trace: &TraceFile) -> (f64, Option<f64>) {
    let h = trace.header();
    let (mut sum, mut pairs) = (0.0, 0usize);
    for layer in 0..h.layers {
        let mut first = 0;
        for text in &h.texts {
            let mut before: Option<Vec<u64>> = None;
            for token in first..first + text.tokens {
                let now = words(trace.row(TraceSection::Active, layer, token));
                if let Some(distance) = before.and_then(|before| jaccard_distance(&before, &now)) {
                    sum += distance;
                    pairs += 1;
                }
                before = Some(now);
            }
            first += text.tokens;
        }
    }
    let hot = |text: usize| -> Vec<Vec<bool>> {
        let frequencies = frequencies(trace, |i| i == text);
        let of = |f: &Vec<f32>| {
            let mut order: Vec<usize> = (0..f.len()).collect();
            order.sort_by(|&a, &b| f[b].total_cmp(&f[a]));
            let mut hot = vec![false; f.len()];
            order[..f.len() * 2 / 5].iter().for_each(|&n| hot[n] = true);
            hot
        };
        frequencies.iter().map(of).collect()
    };
    let sets: Vec<_> = (0..h.texts.len()).map(hot).collect();
    let mut distances = Vec::new();
    for (i, a) in sets.iter().enumerate() {
        for b in &sets[..i] {
            for (a, b) in a.iter().zip(b) {
                let count = |f: &dyn Fn(bool, bool) -> bool| a.iter().zip(b).filter(|&(&a, &b)| f(a, b)).count() as f64;
                distances.push(1.0 - count(&|a, b| a && b) / count(&|a, b| a || b).max(1.0));
            }
        }
    }
    let texts = (!distances.is_empty()).then(|| distances.iter().sum::<f64>() / distances.len() as f64);
    (sum / pairs.max(1) as f64, texts)
}
