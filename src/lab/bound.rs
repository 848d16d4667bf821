//! What no policy can exceed on a trace at a link rate, even one that knows the future: in hits, and in time.

use super::trace_run::{active, bin, chosen};
use crate::cache::{PerTier, Tier};
use crate::formats::trace_file::{TraceFile, TraceSection};
use crate::ids::PublishedId;
use crate::scheduler::costs::StageCosts;

/// Hits that no policy can exceed under this link rate, even one that knows the future: the dual of the min-cost-flow relaxation.
///
/// For a hit the neuron was either loaded, or kept since its last use (or since the beginning). The number of loads is at most what the
/// link carries in all. The number of kept uses is at most how many gaps between two uses of a neuron fit into the slots of its layer:
/// an interval packing with equal weights, solved exactly by evicting the neuron whose next use is furthest (Belady). With a price m per
/// load the dual is (1 - m) uses + m (kept + loads), linear in m in 0..1, so its smallest value is at an end: min(uses, kept + loads).
///
/// The first `skip` texts are left out; `slots` and `placed` are per layer, and `link` is in neurons per layer's time.
pub fn bound(trace: &TraceFile, skip: usize, slots: &[usize], placed: &[Vec<PublishedId>], link: f64) -> u64 {
    bound_of(trace, skip, slots, placed, link).0
}

/// [`bound`], and the number of active pairs.
pub fn bound_of(trace: &TraceFile, skip: usize, slots: &[usize], placed: &[Vec<PublishedId>], link: f64) -> (u64, u64) {
    let h = trace.header();
    let before: usize = h.texts[..skip].iter().map(|t| t.tokens).sum();
    let tokens = h.tokens() - before;
    let mut now = Vec::new();
    let (mut uses, mut kept, mut pairs) = (0u64, 0u64, 0u64);
    for layer in 0..h.layers {
        let mut keeping = Keeping::new(h.ffn, &placed[layer], slots[layer], tokens);
        for token in 0..tokens {
            active(trace.row(TraceSection::Active, layer, before + token), &mut now);
            uses += now.len().min(slots[layer]) as u64;
            pairs += now.len() as u64;
            keeping.token(token, &now);
        }
        kept += keeping.kept;
    }
    let loads = (link * (tokens * h.layers) as f64).floor() as u64;
    (uses.min(kept + loads), pairs)
}

/// How often the neurons that each layer of each token computes are used again after how long: all that the bound in time needs of a trace.
///
/// The bound is Lagrange's dual. A price for each load stands for the link, one for each slot and token for the device's memory. A neuron that is on the
/// device when it is used was loaded since its last use, or kept a slot since then, so it has cost the cheaper of the two; the host's fixed part is saved
/// only where a layer pays for all of its neurons. At any two prices, what is saved so is at most the sum over layers of the best that each could buy,
/// plus the link's loads and the slots' tokens at their prices. The prices that make it least are sought.
pub struct Uses {
    layers: usize,
    /// By layer, then token: neurons that are computed.
    counts: Vec<u32>,
    /// Weight of each of [`Uses::ends`] for them, `[layers][tokens][ends]`: a neuron's time since its last use lies between two ends, and has the weights
    /// that make it their mean. What such a neuron costs is a concave function of the time, which is no less than the mean of its values at the ends.
    weights: Vec<f32>,
    /// Times since a last use, in tokens, rising; the last is for neurons that were neither used before nor there at the beginning.
    ends: Vec<f64>,
}

/// Steps in which the best price is sought: each leaves 0.618 of what is left.
const STEPS: usize = 40;
/// Layers of tokens by which prices are chosen, at most: any price is valid.
const SAMPLE: usize = 4096;

impl Uses {
    /// Those of all texts but the first `skip`, where a neuron is computed from its layer's threshold on, `[layers]`, wherever it is, and the neurons of
    /// `placed` are on the device at the beginning.
    pub fn of(trace: &TraceFile, skip: usize, placed: &[Vec<PublishedId>], thresholds: &[f32]) -> Uses {
        let h = trace.header();
        let before: usize = h.texts[..skip].iter().map(|t| t.tokens).sum();
        let tokens = h.tokens() - before;
        let most = 2.0 * (tokens + 1) as f64;
        let powers = std::iter::successors(Some(1.0), |power| Some(2.0 * power)).take_while(|&power| power < most);
        let halves = |power: f64| [power, 1.5 * power].into_iter().filter(|end| end.fract() == 0.0);
        let ends = powers.flat_map(halves).chain([f64::INFINITY]).collect();
        let mut uses = Uses { layers: h.layers, counts: Vec::new(), weights: Vec::new(), ends };
        let (here, mut now, mut unpacked) = (vec![false; h.ffn], Vec::new(), Vec::new());
        for (layer, placed) in placed.iter().enumerate() {
            // Token of the last use, counted from 1; 0 for those that were there at the beginning.
            let mut last: Vec<Option<u32>> = vec![None; h.ffn];
            placed.iter().for_each(|n| last[n.index()] = Some(0));
            let least = PerTier::all(bin(thresholds[layer]));
            for token in 0..tokens {
                chosen(trace, layer, before + token, least, &here, &mut unpacked, &mut now);
                uses.add(token as u32 + 1, &now, &mut last);
            }
        }
        uses
    }

    /// Adds a layer of a token.
    fn add(&mut self, token: u32, neurons: &[u32], last: &mut [Option<u32>]) {
        let (n, begin) = (self.ends.len(), self.weights.len());
        self.counts.push(neurons.len() as u32);
        self.weights.resize(begin + n, 0.0);
        let weights = &mut self.weights[begin..];
        for &neuron in neurons {
            let Some(before) = last[neuron as usize].replace(token) else {
                weights[n - 1] += 1.0;
                continue;
            };
            let since = f64::from(token - before);
            let above = self.ends.partition_point(|end| *end < since);
            if self.ends[above] == since {
                weights[above] += 1.0;
            } else {
                let share = (since - self.ends[above - 1]) / (self.ends[above] - self.ends[above - 1]);
                weights[above] += share as f32;
                weights[above - 1] += 1.0 - share as f32;
            }
        }
    }

    /// Layers of all tokens.
    pub fn stages(&self) -> u64 {
        self.counts.len() as u64
    }

    /// A time, ns, that all stages together take at least, whatever moves: with `slots` slots in each layer, `[layers]`, a link that carries `link` neurons in
    /// a layer's time and fixed costs, whose device takes no time beside the host.
    pub fn least_ns(&self, slots: &[usize], link: f64, costs: &StageCosts) -> f64 {
        let (n, tokens) = (self.counts.len(), self.counts.len() / self.layers);
        let host = costs.lanes[Tier::Host];
        let all = n as f64 * host.fixed_ns + self.counts.iter().map(|&n| f64::from(n)).sum::<f64>() * host.neuron_ns;
        let loads = (link * n as f64).floor();
        let room = slots.iter().map(|&slots| (slots * tokens) as f64).sum::<f64>();
        // What is saved at most, by a load's price and that of a slot for a token; `every`-th layers stand for those between.
        let saved = |every: usize, load: f64, slot: f64| {
            // At no price for a slot, one that was never there costs a load: the smaller of a number and what is none.
            let price: Vec<f64> = self.ends.iter().map(|end| (load + costs.move_ns + slot).min(slot * end)).collect();
            let part: Vec<f32> = price.iter().map(|price| price.min(host.neuron_ns) as f32).collect();
            let whole: Vec<f32> = price.iter().map(|&price| price as f32).collect();
            let of = |at: usize| {
                let weights = &self.weights[at * self.ends.len()..][..self.ends.len()];
                let sum = |prices: &[f32]| f64::from(weights.iter().zip(prices).map(|(w, p)| w * p).sum::<f32>());
                let count = self.counts[at];
                let fits = count as usize <= slots[at / tokens];
                let whole = if fits { host.fixed_ns - sum(&whole) } else { f64::NEG_INFINITY };
                f64::from(count) * host.neuron_ns + whole.max(-sum(&part))
            };
            let sampled = (0..n).step_by(every).map(of).sum::<f64>() / n.div_ceil(every) as f64;
            sampled * n as f64 + load * loads + slot * room
        };
        let every = n.div_ceil(SAMPLE) | 1;
        // Nothing is bought beyond what a whole layer saves.
        let most = host.fixed_ns + self.counts.iter().max().map_or(0.0, |&n| f64::from(n)) * host.neuron_ns;
        let (load, _) = least(most, |load| least(most, |slot| saved(every, load, slot)).1);
        let (slot, _) = least(most, |slot| saved(every, load, slot));
        // Sums are of f32.
        const ROUNDED: f64 = 1e-5;
        n as f64 * costs.always_ns + (all - saved(1, load, slot) - ROUNDED * all).max(0.0)
    }
}

/// Where a convex function is least between 0 and `most`, and its value there; by the golden section.
fn least(most: f64, of: impl Fn(f64) -> f64) -> (f64, f64) {
    const SECTION: f64 = 0.618_033_988_749_895;
    let (mut low, mut high) = (0.0, most);
    let [mut a, mut b] = [high - SECTION * (high - low), SECTION * high].map(|at| (at, of(at)));
    for _ in 0..STEPS {
        if a.1 <= b.1 {
            (high, b) = (b.0, a);
            let at = high - SECTION * (high - low);
            a = (at, of(at));
        } else {
            (low, a) = (a.0, b);
            let at = low + SECTION * (high - low);
            b = (at, of(at));
        }
    }
    if a.1 <= b.1 { a } else { b }
}

/// Counts how many gaps between two uses of a neuron can be bridged at most by keeping it in a slot, as tokens come.
///
/// A slot keeps one neuron at a time, so gaps are intervals and slots are machines. Gaps are taken as they end, and each goes to the slot that
/// became free last before it began: no choice bridges more of them. Memory is that of the neurons and of a number for each token.
pub struct Keeping {
    /// Gaps that were bridged.
    pub kept: u64,
    /// When each neuron was used last, or was there from the beginning, counted from 1; 0 for neither.
    last: Vec<u32>,
    /// Number of slots that became free at each time, and which of these numbers are not 0, as bits.
    free: Vec<u32>,
    some: Vec<u64>,
    /// The first time at which a slot is free.
    first: usize,
}

impl Keeping {
    /// Before the first of `tokens` tokens: neurons of `placed` are in `slots` slots of a layer of `ffn` neurons.
    pub fn new(ffn: usize, placed: &[PublishedId], slots: usize, tokens: usize) -> Keeping {
        let mut last = vec![0; ffn];
        placed.iter().for_each(|n| last[n.index()] = 1);
        let mut free = vec![0; tokens + 2];
        let mut some = vec![0; free.len().div_ceil(64)];
        (free[1], some[0]) = (slots as u32, u64::from(slots > 0) << 1);
        Keeping { kept: 0, last, free, some, first: 1 }
    }

    /// The layer uses these neurons for token number `token`, from 0; tokens come in rising order.
    pub fn token(&mut self, token: usize, neurons: &[u32]) {
        let now = token + 2;
        let mut ended = 0;
        for &neuron in neurons {
            let began = std::mem::replace(&mut self.last[neuron as usize], now as u32) as usize;
            if began >= self.first
                && let Some(at) = self.latest(began)
            {
                self.free[at] -= 1;
                if self.free[at] == 0 {
                    self.some[at / 64] &= !(1 << (at % 64));
                    self.find_first(now);
                }
                ended += 1;
            }
        }
        if ended > 0 {
            self.kept += u64::from(ended);
            self.free[now] = ended;
            self.some[now / 64] |= 1 << (now % 64);
            self.first = self.first.min(now);
        }
    }

    /// The last time up to `began` at which a slot became free.
    fn latest(&self, began: usize) -> Option<usize> {
        let (mut word, last) = (began / 64, began % 64);
        let mut bits = self.some[word] & (u64::MAX >> (63 - last));
        while bits == 0 {
            word = word.checked_sub(1)?;
            bits = self.some[word];
        }
        Some(64 * word + 63 - bits.leading_zeros() as usize)
    }

    /// Moves [`Keeping::first`] on to a time at which a slot is free, at most to `now`.
    fn find_first(&mut self, now: usize) {
        while self.first < now && self.free[self.first] == 0 {
            self.first += 1;
        }
    }
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

    /// The same number by another way: of the gaps that are open the one that ends last is given up, which asks for the future.
    fn by_belady(uses: &[Vec<u32>], placed: &[PublishedId], slots: usize, times: usize) -> u64 {
        let mut begins = vec![Vec::new(); times + 1];
        for (neuron, uses) in uses.iter().enumerate() {
            if placed.contains(&PublishedId::new(neuron)) {
                begins[0].extend(uses.first().map(|&end| end + 1));
            }
            uses.windows(2).for_each(|gap| begins[gap[0] as usize + 1].push(gap[1] + 1));
        }
        let (mut open, mut kept) = (Vec::<u32>::new(), 0);
        for (time, begins) in begins.iter().enumerate() {
            kept += open.extract_if(.., |end| *end == time as u32).count() as u64;
            open.extend(begins);
            open.sort_unstable();
            open.truncate(slots);
        }
        kept
    }

    fn as_they_come(uses: &[Vec<u32>], placed: &[PublishedId], slots: usize, times: usize) -> u64 {
        let mut keeping = Keeping::new(uses.len(), placed, slots, times);
        for token in 0..times {
            let used = |&n: &usize| uses[n].contains(&(token as u32));
            let now: Vec<u32> = (0..uses.len()).filter(used).map(|n| n as u32).collect();
            keeping.token(token, &now);
        }
        keeping.kept
    }

    #[test]
    fn gaps_counted_as_they_end_are_those_of_who_knows_the_future() {
        for seed in 0..200 {
            let mut prng = Prng::new(seed);
            let (n, times) = (2 + prng.below(30) as usize, 2 + prng.below(150) as usize);
            let slots = prng.below(n as u64 + 1) as usize;
            let rare = 2 + prng.below(12);
            let uses: Vec<Vec<u32>> =
                (0..n).map(|_| (0..times as u32).filter(|_| prng.below(rare) == 0).collect()).collect();
            let placed: Vec<PublishedId> = (0..slots).map(PublishedId::new).collect();
            let [a, b] = [as_they_come, by_belady].map(|count| count(&uses, &placed, slots, times));
            assert_eq!(a, b, "seed {seed}: {n} neurons, {slots} slots, {times} tokens");
        }
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
            let kept = as_they_come(&uses, &placed, slots, times);
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
