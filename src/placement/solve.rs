//! The exact solution by dynamic programming, and an upper bound that shows how good any solution is.

use super::problem::{LayerProblem, Problem};

/// Batches of each layer that lie on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    /// Batches of each layer on the device, `[layers]`: 0 or at least the layer's `least`.
    pub batches: Vec<usize>,
    /// The objective: impact of all neurons on the device (powerinfer 6.3, equation 2).
    pub impact: u64,
}

/// The best placement within `budget_bytes`.
///
/// Within a layer the best batches come first, so a layer's value is a sum over a prefix, and the dynamic programme runs over layers with
/// "the best value of the layers so far in at most c batches" as its state. Prefix sums of falling numbers are concave, so the best
/// previous state never moves backwards as c grows: each layer takes O(c log c) steps instead of c times its batches. Of equally good
/// placements the one with more neurons is taken, then the one that spreads them more evenly, then that of earlier layers: the same input
/// always gives the same placement.
pub fn solve(problem: &Problem, budget_bytes: u64) -> Solution {
    let capacity = problem.capacity(budget_bytes);
    let (impact_weight, batch_weight) = problem.weights().expect("Problem::new checked the range");
    let mut best = vec![0i128; capacity + 1];
    // [layers, capacity + 1]: batches that the layer takes.
    let mut taken = vec![0u32; problem.layers.len() * (capacity + 1)];
    for (layer, taken) in problem.layers.iter().zip(taken.chunks_exact_mut(capacity + 1)) {
        if layer.min_neurons > capacity {
            continue;
        }
        let values = values(layer, impact_weight, batch_weight);
        let mut step =
            LayerStep { layer: &values, min_neurons: layer.min_neurons, before: &best, after: best.clone(), taken };
        step.rows(layer.min_neurons, capacity + 1, 0, capacity);
        best = step.after;
    }
    let mut batches = vec![0; problem.layers.len()];
    let mut left = capacity;
    for (l, taken) in taken.chunks_exact(capacity + 1).enumerate().rev() {
        batches[l] = taken[left] as usize;
        left -= batches[l];
    }
    let impact = problem.impact(&batches);
    Solution { batches, impact }
}

/// Value of the first n batches, `[batches + 1]`; concave.
fn values(layer: &LayerProblem, impact_weight: i128, batch_weight: i128) -> Vec<i128> {
    let mut impact = 0;
    let mut values = vec![0];
    for (n, v) in (1i128..).zip(&layer.impacts) {
        impact += *v as i128;
        values.push(impact * impact_weight + n * batch_weight - n * n);
    }
    values
}

/// One layer of the programme.
struct LayerStep<'a> {
    /// Value of the layer's first n batches.
    layer: &'a [i128],
    min_neurons: usize,
    /// Best value of the layers before in at most c batches.
    before: &'a [i128],
    /// Best value with this layer in at most c batches.
    after: Vec<i128>,
    taken: &'a mut [u32],
}

impl LayerStep<'_> {
    /// Fills the states `low..high`, whose best previous states lie in `from..=to`. The middle one is searched; the best previous states of
    /// those below it are no later than its own, of those above no earlier.
    fn rows(&mut self, low: usize, high: usize, from: usize, to: usize) {
        if low >= high {
            return;
        }
        let middle = low + (high - low) / 2;
        let first = from.max(middle.saturating_sub(self.layer.len() - 1));
        let last = to.min(middle - self.min_neurons);
        let (mut best, mut at) = (i128::MIN, first);
        for (state, value) in self.before.iter().enumerate().take(last + 1).skip(first) {
            let with = value + self.layer[middle - state];
            if with > best {
                (best, at) = (with, state);
            }
        }
        if best > self.before[middle] {
            self.after[middle] = best;
            self.taken[middle] = (middle - at) as u32;
        }
        self.rows(low, middle, from, at);
        self.rows(middle + 1, high, at, to);
    }
}

/// Upper bound of the impact of any placement within the budget: the optimum of the integer programme's linear relaxation (0 <= a <= y <= 1
/// instead of 0 or 1), rounded down, since an impact is a whole number.
///
/// With fractions a layer may take its first `least` batches in part, at their mean impact, then further batches at falling impacts: the
/// budget goes to the best shares of all layers, and of the last one only what fits is taken.
pub fn upper_bound(problem: &Problem, budget_bytes: u64) -> u64 {
    // Batches and impact of each share.
    let mut pieces: Vec<(u128, u128)> = Vec::new();
    for layer in &problem.layers {
        let (opening, single) = layer.impacts.split_at(layer.min_neurons);
        pieces.push((layer.min_neurons as u128, opening.iter().map(|&v| v as u128).sum()));
        pieces.extend(single.iter().map(|&v| (1, v as u128)));
    }
    // By falling impact per batch.
    pieces.sort_by(|a, b| (b.1 * a.0).cmp(&(a.1 * b.0)));
    let mut left = problem.capacity(budget_bytes) as u128;
    let mut bound = 0;
    for (batches, impact) in pieces {
        let part = batches.min(left);
        bound += impact * part / batches;
        left -= part;
    }
    bound as u64
}

/// (bound - reached) / bound, the share that `reached` lacks to the bound; 0 where the bound is 0.
pub fn gap(bound: u64, reached: u64) -> f64 {
    if bound == 0 { 0.0 } else { (bound as f64 - reached as f64) / bound as f64 }
}
