//! A recorded trace run again under a policy and a link rate: which active neurons would have been on the device.
//!
//! Time is counted in layers: the link carries so many neurons while one layer is computed, first come, first served, and a neuron
//! that arrives after its layer's turn is a miss. The scheduler is the one that runs beside the engine.

use crate::device::NONE;
use crate::formats::trace_file::{Part, TraceFile};
use crate::scheduler::greedy::FILLING;
use crate::scheduler::window::Window;
use crate::scheduler::{Rules, Scheduler, View};
use serde::Serialize;
use std::collections::VecDeque;

/// What is given.
#[derive(Clone, Debug)]
pub struct Setting {
    pub rules: Rules,
    /// Neurons that the device has room for, per layer.
    pub slots: Vec<usize>,
    /// Neurons that the link carries while one layer is computed.
    pub link: f64,
    /// Neurons on the device to begin with, `[layers]`, no more than slots.
    pub placed: Vec<Vec<u32>>,
    /// Frequencies known beforehand, `[layers][ffn]`.
    pub history: Vec<Vec<f32>>,
    /// What a move costs in hits ([`crate::scheduler::gain`]).
    pub cost: f64,
    pub seed: u64,
    /// Texts at the beginning that are passed over.
    pub skip: usize,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Active neurons times tokens, and those of them on the device.
    pub active: u64,
    pub hits: u64,
    /// Moves begun.
    pub moves: u64,
    /// Share of the tokens at which neurons were on the move.
    pub moving: f64,
}

impl Outcome {
    /// hits / active
    pub fn gpu_share(&self) -> f64 {
        self.hits as f64 / self.active.max(1) as f64
    }
}

/// Neurons whose bits are set in a row of `Part::Active`.
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

/// A copy on the link.
struct Coming {
    layer: usize,
    slot: u32,
    neuron: u32,
}

/// Runs the texts of the trace.
pub fn replay(trace: &TraceFile, setting: &Setting) -> Outcome {
    let h = trace.header();
    let (layers, ahead) = (h.layers, h.ahead.min(h.layers));
    let bytes = h.block_bytes;
    let window = Window::new(setting.link * bytes as f64, ahead);
    let history = setting.history.clone();
    let mut scheduler = Scheduler::new(setting.rules, window, bytes, history, &setting.placed, setting.seed);
    let mut slots: Vec<Vec<u32>> = setting.slots.iter().map(|&n| vec![NONE; n]).collect();
    for (slots, placed) in slots.iter_mut().zip(&setting.placed) {
        slots.iter_mut().zip(placed).for_each(|(slot, &neuron)| *slot = neuron);
    }
    let mut link: VecDeque<Coming> = VecDeque::new();
    // What the link has carried of the first.
    let mut carried = 0.0;
    let (mut outcome, mut now, mut first) = (Outcome::default(), Vec::new(), 0);
    let (mut moving, mut all) = (0u64, 0u64);
    for (i, text) in h.texts.iter().enumerate() {
        let tokens = if i < setting.skip { 0 } else { text.tokens };
        scheduler.begin_sequence();
        for token in first..first + tokens {
            for layer in 0..layers {
                // What has arrived by now.
                while carried >= 1.0
                    && let Some(c) = link.pop_front()
                {
                    slots[c.layer][c.slot as usize] = c.neuron;
                    carried -= 1.0;
                }
                active(trace.row(Part::Active, layer, token), &mut now);
                scheduler.active(View { layer, slots: &slots[layer] }, &now);
                // For the layer that is predicted here; the first layers have nothing before them, and are planned for the next token.
                let targets = [(layer + ahead, true), (layer, false)];
                for (target, predicted) in targets {
                    if target >= layers || (!predicted && layer >= ahead) {
                        continue;
                    }
                    let p = predicted.then(|| trace.row(Part::Ahead, target, token));
                    let under_way = (link.len() as f64 - carried).max(0.0) * bytes as f64;
                    let view = View { layer: target, slots: &slots[target] };
                    for m in scheduler.plan(view, p, under_way as u64) {
                        link.push_back(Coming { layer: target, slot: m.slot, neuron: m.neuron });
                    }
                    for c in link.iter().rev().take_while(|c| c.layer == target) {
                        slots[target][c.slot as usize] = FILLING;
                    }
                }
                // An idle link saves nothing up.
                carried = if link.is_empty() { 0.0 } else { carried + setting.link };
            }
            moving += u64::from(scheduler.moving());
            all += 1;
            scheduler.token(setting.cost);
        }
        first += text.tokens;
    }
    let t = scheduler.totals;
    (outcome.active, outcome.hits, outcome.moves) = (t.active, t.hits, t.moves);
    outcome.moving = moving as f64 / all.max(1) as f64;
    outcome
}

/// How often each neuron was active in these texts, per token, `[layers][ffn]`.
pub fn frequencies(trace: &TraceFile, texts: impl Fn(usize) -> bool) -> Vec<Vec<f32>> {
    let h = trace.header();
    let (mut counts, mut now, mut first, mut tokens) = (vec![vec![0f32; h.ffn]; h.layers], Vec::new(), 0, 0);
    for (i, text) in h.texts.iter().enumerate() {
        if texts(i) {
            tokens += text.tokens;
            for token in first..first + text.tokens {
                for (layer, counts) in counts.iter_mut().enumerate() {
                    active(trace.row(Part::Active, layer, token), &mut now);
                    now.iter().for_each(|&n| counts[n as usize] += 1.0);
                }
            }
        }
        first += text.tokens;
    }
    counts.iter_mut().flatten().for_each(|c| *c /= tokens.max(1) as f32);
    counts
}

/// Slots per layer for this share of all neurons: those of the most frequent ones, wherever they lie.
pub fn slots(counts: &[Vec<u64>], share: f64) -> Vec<usize> {
    let mut all: Vec<(u64, usize)> =
        counts.iter().enumerate().flat_map(|(layer, counts)| counts.iter().map(move |&n| (n, layer))).collect();
    all.sort_unstable_by(|a, b| b.cmp(a));
    all.truncate((share * all.len() as f64).round() as usize);
    let mut slots = vec![0; counts.len()];
    all.iter().for_each(|&(_, layer)| slots[layer] += 1);
    slots
}

/// Mean Jaccard distances: of the active sets of neighbouring tokens of a text, and of the 40 % most active neurons of two texts, if
/// there are two.
pub fn likeness(trace: &TraceFile) -> (f64, Option<f64>) {
    let h = trace.header();
    let (mut sum, mut pairs) = (0.0, 0usize);
    let (mut now, mut before) = (Vec::new(), vec![false; h.ffn]);
    for layer in 0..h.layers {
        let mut first = 0;
        for text in &h.texts {
            for token in first..first + text.tokens {
                let last = before.iter().filter(|&&b| b).count();
                active(trace.row(Part::Active, layer, token), &mut now);
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
/// A hit is either a load for it, or the neuron was kept from its last use (or from the beginning). Loads are bounded by what the link
/// carries in all; uses kept, by how many gaps between two uses of a neuron fit into the slots of its layer, which is an interval
/// packing of equal weights, solved exactly by evicting whose next use is furthest (Belady). With a price m per load the dual is
/// (1 - m) uses + m (kept + loads), linear in m in 0..1, so its least value is at an end: min(uses, kept + loads).
pub fn bound(trace: &TraceFile, skip: usize, slots: &[usize], placed: &[Vec<u32>], link: f64) -> u64 {
    let h = trace.header();
    let before: usize = h.texts[..skip].iter().map(|t| t.tokens).sum();
    let tokens = h.tokens() - before;
    let mut now = Vec::new();
    let (mut uses, mut kept) = (0u64, 0u64);
    for layer in 0..h.layers {
        let mut of: Vec<Vec<u32>> = vec![Vec::new(); h.ffn];
        for token in 0..tokens {
            active(trace.row(Part::Active, layer, before + token), &mut now);
            uses += now.len().min(slots[layer]) as u64;
            now.iter().for_each(|&n| of[n as usize].push(token as u32));
        }
        kept += keep(&of, &placed[layer], slots[layer], tokens);
    }
    let loads = (link * (tokens * h.layers) as f64).floor() as u64;
    uses.min(kept + loads)
}

/// The most gaps between a neuron's uses that can be bridged with `slots` residents. `uses[n]` are rising times below `times`;
/// neurons of `placed` are there at time 0.
pub fn keep(uses: &[Vec<u32>], placed: &[u32], slots: usize, times: usize) -> u64 {
    // Gaps by their end; each is wanted from its beginning.
    let mut begins: Vec<Vec<u32>> = vec![Vec::new(); times];
    let mut first = Vec::new();
    for (neuron, uses) in uses.iter().enumerate() {
        if placed.contains(&(neuron as u32))
            && let Some(&end) = uses.first()
        {
            first.push(end);
        }
        uses.windows(2).for_each(|gap| begins[gap[0] as usize].push(gap[1]));
    }
    // Ends of the gaps that are being bridged. Whenever there are too many, the one that ends last is given up.
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
    fn brute(uses: &[Vec<u32>], placed: &[u32], slots: usize, times: usize, loads: usize) -> u64 {
        let n = uses.len();
        let begin = placed.iter().fold(0usize, |set, n| set | 1 << n);
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
            let placed: Vec<u32> = (0..slots as u32).collect();
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
