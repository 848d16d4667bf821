//! The exact solution by dynamic programming, and an upper bound that shows how good any solution is.

use super::problem::{LayerProblem, Problem};
use std::ops::Range;

/// Batches of each layer that lie on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    /// Batches of each layer on the device, `[layers]`: 0 or at least the layer's `least`.
    pub batches: Vec<usize>,
    /// Impact of all neurons on the device (powerinfer 6.3, equation 2).
    pub impact: u64,
    /// The objective: their value. It is the impact, or the time that they save.
    pub value: u64,
}

/// The best placement within `budget_bytes`.
///
/// Within a layer the best batches come first, so a layer's value depends on their number alone, and the dynamic programme runs over layers with
/// "the best value of the layers so far in at most c batches" as its state. Where a layer's values are concave, as sums of falling impacts are, the
/// best previous state never moves backwards as c grows: then a layer takes O(c log c) steps instead of c times its batches. Times are concave but
/// for the last batch, which spares the host's fixed part: each concave run of a layer's values is searched by itself. Of equally good
/// placements the one with more neurons is taken, then the one that spreads them more evenly, then that of earlier layers: the same input
/// always gives the same placement.
pub fn solve(problem: &Problem, budget_bytes: u64) -> Solution {
    let capacity = problem.capacity(budget_bytes);
    let (value_weight, batch_weight) = problem.weights().expect("Problem::new checked the range");
    let mut best = vec![0i128; capacity + 1];
    // [layers, capacity + 1]: batches that the layer takes.
    let mut taken = vec![0u32; problem.layers.len() * (capacity + 1)];
    for (layer, taken) in problem.layers.iter().zip(taken.chunks_exact_mut(capacity + 1)) {
        if layer.min_neurons > capacity {
            continue;
        }
        let values = values(layer, value_weight, batch_weight);
        let mut after = best.clone();
        for run in concave_runs(&values, layer.min_neurons) {
            if run.start <= capacity {
                let least = run.start;
                let mut step = LayerStep { layer: &values, run, before: &best, after: &mut after, taken };
                step.rows(least, capacity + 1, 0, capacity);
            }
        }
        best = after;
    }
    let mut batches = vec![0; problem.layers.len()];
    let mut left = capacity;
    for (l, taken) in taken.chunks_exact(capacity + 1).enumerate().rev() {
        batches[l] = taken[left] as usize;
        left -= batches[l];
    }
    Solution { impact: problem.impact(&batches), value: problem.value(&batches), batches }
}

/// Order of the first n batches, `[batches + 1]`: by value, then by number, then by an even spread.
fn values(layer: &LayerProblem, value_weight: i128, batch_weight: i128) -> Vec<i128> {
    let order = |(n, &v): (i128, &u64)| i128::from(v) * value_weight + n * batch_weight - n * n;
    (0i128..).zip(&layer.values).map(order).collect()
}

/// The numbers of batches from `least` on in runs, each as long as its values are concave.
fn concave_runs(values: &[i128], least: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for n in least..values.len() {
        let rises = |n: usize| values[n] - values[n - 1];
        match runs.last_mut() {
            Some(run) if run.len() < 2 || rises(n) <= rises(n - 1) => run.end = n + 1,
            _ => runs.push(n..n + 1),
        }
    }
    runs
}

/// One run of a layer's numbers of batches in the programme.
struct LayerStep<'a> {
    /// Value of the layer's first n batches.
    layer: &'a [i128],
    /// The numbers of batches that it may take.
    run: Range<usize>,
    /// Best value of the layers before in at most c batches.
    before: &'a [i128],
    /// Best value with this layer in at most c batches.
    after: &'a mut [i128],
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
        let first = from.max(middle.saturating_sub(self.run.end - 1));
        let last = to.min(middle - self.run.start);
        let (mut best, mut at) = (i128::MIN, first);
        for (state, value) in self.before.iter().enumerate().take(last + 1).skip(first) {
            let with = value + self.layer[middle - state];
            if with > best {
                (best, at) = (with, state);
            }
        }
        if best > self.after[middle] {
            self.after[middle] = best;
            self.taken[middle] = (middle - at) as u32;
        }
        self.rows(low, middle, from, at);
        self.rows(middle + 1, high, at, to);
    }
}

/// Upper bound of the value of any placement within the budget: the optimum of the problem's linear relaxation, rounded down, since a value is a
/// whole number.
///
/// With fractions a layer may have any mean of its placements, so its values are those of their concave hull: its first `least` batches in part,
/// at their mean value, then further ones at falling values. The budget goes to the best shares of all layers, and of the last one only what fits
/// is taken.
pub fn upper_bound(problem: &Problem, budget_bytes: u64) -> u64 {
    // Batches and value of each share.
    let mut pieces: Vec<(u128, u128)> = Vec::new();
    for layer in &problem.layers {
        let mut corners = vec![0];
        for n in layer.min_neurons..layer.values.len() {
            let rise = |from: usize, to: usize| ((to - from) as u128, (layer.values[to] - layer.values[from]) as u128);
            while let [.., before, last] = corners[..]
                && steeper(rise(last, n), rise(before, last))
            {
                corners.pop();
            }
            corners.push(n);
        }
        pieces.extend(corners.windows(2).map(|pair| {
            let [from, to] = [pair[0], pair[1]];
            ((to - from) as u128, (layer.values[to] - layer.values[from]) as u128)
        }));
    }
    // By falling value per batch.
    pieces.sort_by(|a, b| (b.1 * a.0).cmp(&(a.1 * b.0)));
    let mut left = problem.capacity(budget_bytes) as u128;
    let mut bound = 0;
    for (batches, value) in pieces {
        let part = batches.min(left);
        bound += value * part / batches;
        left -= part;
    }
    bound as u64
}

/// Whether a share is worth more per batch than another.
fn steeper(a: (u128, u128), b: (u128, u128)) -> bool {
    a.1 * b.0 > b.1 * a.0
}

/// (bound - reached) / bound, the share that `reached` lacks to the bound; 0 where the bound is 0.
pub fn gap(bound: u64, reached: u64) -> f64 {
    if bound == 0 { 0.0 } else { (bound as f64 - reached as f64) / bound as f64 }
}
