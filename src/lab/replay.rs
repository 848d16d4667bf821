//! Replays a recorded trace under a policy and a link rate: which active neurons would have been on the device.
//!
//! Time is counted in layers: a layer takes one unit, attention a third of it and the FFN the rest, and the link carries a given
//! number of neurons per unit, one decision after the other. A neuron that arrives after its layer's neurons were chosen is a miss.
//! Scheduler, slot tables and the order of steps in a layer are those of the engine ([`super::trace_run`]). The times of device and
//! CPU are not known, so both have the same threshold, and the policy `full` does what `macro` does.

pub use super::trace_run::active;
use super::trace_run::{Clock, Copies, OwnedDecision, TraceRun};
use crate::formats::trace_file::{Header, TraceFile, TraceSection};
use crate::ids::PublishedId;
use crate::scheduler::thresholds::LossWeight;
use crate::scheduler::{self, Policy, Rules};
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
    /// Cost of a move in hits ([`crate::scheduler::gain`]).
    pub cost: f64,
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
}

impl Outcome {
    /// Hits / active pairs, 0 to 1.
    pub fn gpu_share(&self) -> f64 {
        self.hits as f64 / self.active.max(1) as f64
    }
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
                outcome.active += run.truth.len() as u64;
                outcome.hits += run.truth.iter().filter(|&&n| run.here[n as usize]).count() as u64;
                decisions(token, layer, run.observe(layer, token, token == first, clock, false));
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
        rules: setting.rules,
        loss: LossWeight::Probability,
        ahead: h.ahead.clamp(1, h.layers),
        predicts: true,
        block_bytes: h.block_bytes,
        history: setting.history.clone(),
        // A trace's neurons have their published numbers, and so have those of the scheduler that runs on it.
        placed: setting.placed.iter().map(|placed| bytemuck::cast_slice(placed).to_vec()).collect(),
        thresholds: vec![None; h.layers],
        link_gb_s: gb_s,
        move_cost: Some(setting.cost),
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

/// Mean Jaccard distances: between the active sets of neighbouring tokens of a text; and between the 40 % most active neurons of two texts,
/// `None` for a single text.
pub fn likeness(trace: &TraceFile) -> (f64, Option<f64>) {
    let h = trace.header();
    let (mut sum, mut pairs) = (0.0, 0usize);
    let (mut now, mut before) = (Vec::new(), vec![false; h.ffn]);
    for layer in 0..h.layers {
        let mut first = 0;
        for text in &h.texts {
            for token in first..first + text.tokens {
                let last = before.iter().filter(|&&b| b).count();
                active(trace.row(TraceSection::Active, layer, token), &mut now);
                let both = now.iter().filter(|&&n| before[n as usize]).count();
                let either = last + now.len() - both;
                if token > first && either > 0 {
                    sum += 1.0 - both as f64 / either as f64;
                    pairs += 1;
                }
                before.fill(false);
                now.iter().for_each(|&n| before[n as usize] = true);
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

/// Hits that no policy can exceed under this link rate, even one that knows the future: the dual of the min-cost-flow relaxation.
///
/// For a hit the neuron was either loaded, or kept since its last use (or since the beginning). The number of loads is at most what the
/// link carries in all. The number of kept uses is at most how many gaps between two uses of a neuron fit into the slots of its layer:
/// an interval packing with equal weights, solved exactly by evicting the neuron whose next use is furthest (Belady). With a price m per
/// load the dual is (1 - m) uses + m (kept + loads), linear in m in 0..1, so its smallest value is at an end: min(uses, kept + loads).
///
/// The first `skip` texts are left out; `slots` and `placed` are per layer, and `link` is in neurons per layer's time.
pub fn bound(trace: &TraceFile, skip: usize, slots: &[usize], placed: &[Vec<PublishedId>], link: f64) -> u64 {
    let h = trace.header();
    let before: usize = h.texts[..skip].iter().map(|t| t.tokens).sum();
    let tokens = h.tokens() - before;
    let mut now = Vec::new();
    let (mut uses, mut kept) = (0u64, 0u64);
    for layer in 0..h.layers {
        let mut of: Vec<Vec<u32>> = vec![Vec::new(); h.ffn];
        for token in 0..tokens {
            active(trace.row(TraceSection::Active, layer, before + token), &mut now);
            uses += now.len().min(slots[layer]) as u64;
            now.iter().for_each(|&n| of[n as usize].push(token as u32));
        }
        kept += keep(&of, &placed[layer], slots[layer], tokens);
    }
    let loads = (link * (tokens * h.layers) as f64).floor() as u64;
    uses.min(kept + loads)
}

/// The largest number of gaps between two uses of a neuron that can be bridged by keeping it in one of `slots` slots. `uses[n]` are the
/// rising times, below `times`, at which neuron n is used; neurons of `placed` are there at time 0.
pub fn keep(uses: &[Vec<u32>], placed: &[PublishedId], slots: usize, times: usize) -> u64 {
    // Ends of the gaps, by the time at which they begin.
    let mut begins: Vec<Vec<u32>> = vec![Vec::new(); times];
    let mut first = Vec::new();
    for (neuron, uses) in uses.iter().enumerate() {
        if placed.contains(&PublishedId::new(neuron))
            && let Some(&end) = uses.first()
        {
            first.push(end);
        }
        uses.windows(2).for_each(|gap| begins[gap[0] as usize].push(gap[1]));
    }
    // Number of the gaps being bridged, by their end. Whenever there are more than slots, the one that ends last is given up.
    let mut open: std::collections::BTreeMap<u32, usize> = std::collections::BTreeMap::new();
    let (mut len, mut kept) = (0, 0);
    let add = |ends: &[u32], open: &mut std::collections::BTreeMap<u32, usize>, len: &mut usize| {
        for &end in ends {
            *open.entry(end).or_default() += 1;
            *len += 1;
        }
        while *len > slots {
            let mut last = open.last_entry().expect("it is not empty");
            *last.get_mut() -= 1;
            if *last.get() == 0 {
                last.remove();
            }
            *len -= 1;
        }
    };
    add(&first, &mut open, &mut len);
    for (time, begins) in begins.iter().enumerate() {
        if let Some(ended) = open.remove(&(time as u32)) {
            kept += ended as u64;
            len -= ended;
        }
        add(begins, &mut open, &mut len);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    /// All that any policy can do, by trying everything: residents as a set of bits, at most `slots` of them and `loads` loads.
    fn brute(uses: &[Vec<u32>], placed: &[PublishedId], slots: usize, times: usize, loads: usize) -> u64 {
        let n = uses.len();
        let begin = placed.iter().fold(0usize, |set, n| set | 1 << n.0);
        // best[set][loads used]
        let mut best = vec![vec![None; loads + 1]; 1 << n];
        best[begin][0] = Some(0u64);
        for t in 0..times {
            let used = (0..n).filter(|&i| uses[i].contains(&(t as u32))).fold(0usize, |set, i| set | 1 << i);
            let mut next = vec![vec![None; loads + 1]; 1 << n];
            for (set, row) in best.iter().enumerate() {
                for (l, hits) in row.iter().enumerate() {
                    let Some(hits) = hits else { continue };
                    for (after, to) in next.iter_mut().enumerate() {
                        let new = (after & !set).count_ones() as usize;
                        if after.count_ones() as usize <= slots && l + new <= loads {
                            let hits = hits + (after & used).count_ones() as u64;
                            let to: &mut Option<u64> = &mut to[l + new];
                            *to = Some(to.map_or(hits, |old| old.max(hits)));
                        }
                    }
                }
            }
            best = next;
        }
        best.iter().flatten().flatten().copied().max().unwrap_or(0)
    }

    #[test]
    fn no_policy_exceeds_the_bound_and_without_loads_the_best_one_reaches_it() {
        for seed in 0..120 {
            let mut prng = Prng::new(seed);
            let (n, times) = (2 + prng.below(4) as usize, 2 + prng.below(7) as usize);
            let slots = 1 + prng.below(n as u64) as usize;
            let uses: Vec<Vec<u32>> =
                (0..n).map(|_| (0..times as u32).filter(|_| prng.below(3) == 0).collect()).collect();
            let placed: Vec<PublishedId> = (0..slots).map(PublishedId::new).collect();
            let all: u64 =
                (0..times).map(|t| uses.iter().filter(|u| u.contains(&(t as u32))).count().min(slots) as u64).sum();
            let kept = keep(&uses, &placed, slots, times);
            for loads in 0..4 {
                let best = brute(&uses, &placed, slots, times, loads);
                let bound = all.min(kept + loads as u64);
                assert!(best <= bound, "seed {seed}, {loads} loads: {best} above {bound}");
                if loads == 0 {
                    let static_best = uses[..slots].iter().map(|u| u.len() as u64).sum::<u64>();
                    assert_eq!(best, static_best, "seed {seed}");
                }
            }
        }
    }
}
