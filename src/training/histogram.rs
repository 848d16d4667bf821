//! A predictor's scores compared with which neurons were active: counts by score, and the thresholds and calibration that follow from them.

use crate::cpu::{Kernels, MAX_COLUMNS, ThreadPool};
use crate::error::Result;
use crate::model::Model;
use crate::predictor::mlp::Measured;
use crate::predictor::{Calibration, Kind, Predictor, Scratch, Tools};
use crate::training::samples::Samples;
use half::slice::HalfFloatSliceExt;
use std::ops::Range;

/// Range and number of bins for logits, which lie within about 15 of zero: bins of a hundredth, since the scores that are compared with
/// thresholds are sums of thousands of numbers.
const LOGITS: (f32, f32, usize) = (-20.0, 20.0, 4000);

/// How often each score occurred, and how often the neuron was active then.
#[derive(Clone, Debug)]
pub struct Histogram {
    low: f32,
    per_unit: f32,
    /// The score that a bin stands for.
    scores: Vec<f32>,
    /// (all, active) of each bin.
    bins: Vec<(u64, u64)>,
}

impl Histogram {
    /// An empty histogram for the logits of a network.
    pub fn of_logits() -> Histogram {
        let (low, high, bins) = LOGITS;
        let per_unit = bins as f32 / (high - low);
        let scores = (0..=bins).map(|i| low + i as f32 / per_unit).collect();
        Histogram { low, per_unit, scores, bins: vec![(0, 0); bins + 1] }
    }

    /// An empty histogram for the scores of the sign predictor: `hidden` signs give `hidden` + 1 scores, each with a bin of its own whose
    /// score is exactly the number that the kernel computes.
    pub fn of_signs(hidden: usize) -> Histogram {
        let share = 1.0 / hidden as f32;
        let scores = (0..=hidden).map(|same| (2 * same as i64 - hidden as i64) as f32 * share).collect();
        Histogram { low: -1.0, per_unit: hidden as f32 / 2.0, scores, bins: vec![(0, 0); hidden + 1] }
    }

    /// Counts one neuron of one token; a score outside the range counts in the first or last bin.
    pub fn add(&mut self, score: f32, active: bool) {
        let bin = ((score - self.low) * self.per_unit + 0.5).clamp(0.0, (self.bins.len() - 1) as f32) as usize;
        self.bins[bin].0 += 1;
        self.bins[bin].1 += u64::from(active);
    }

    /// Adds the counts of a histogram with the same bins.
    pub fn merge(&mut self, other: &Histogram) {
        self.bins.iter_mut().zip(&other.bins).for_each(|(a, b)| *a = (a.0 + b.0, a.1 + b.1));
    }

    /// The table from scores to probabilities of being active that these counts suggest.
    pub fn calibration(&self) -> Calibration {
        let bin = |(i, &(all, active)): (usize, &(u64, u64))| (self.scores[i], active as f64, all as f64);
        Calibration::fit(&self.bins.iter().enumerate().map(bin).collect::<Vec<_>>())
    }

    /// Number of (neuron, token) pairs that were active.
    pub fn active(&self) -> u64 {
        self.bins.iter().map(|b| b.1).sum()
    }

    /// Number of (neuron, token) pairs.
    pub fn all(&self) -> u64 {
        self.bins.iter().map(|b| b.0).sum()
    }

    /// Neurons with at least this score: (all, active).
    fn reaching(&self, least: f32) -> (u64, u64) {
        self.bins[self.scores.partition_point(|score| *score < least)..]
            .iter()
            .fold((0, 0), |sum, b| (sum.0 + b.0, sum.1 + b.1))
    }

    /// Recall, precision and computed share if the neurons with at least this score are computed.
    pub fn measured(&self, least: f32) -> Measured {
        let (predicted, hit) = self.reaching(least);
        let share = |part: u64, of: u64, none: f32| if of == 0 { none } else { (part as f64 / of as f64) as f32 };
        Measured {
            recall: share(hit, self.active(), 1.0),
            precision: share(hit, predicted, 1.0),
            computed_share: share(predicted, self.all(), 0.0),
        }
    }

    /// The smallest share of neurons, 0 to 1, that must be computed, those of the highest scores first, to reach `recall`.
    pub fn share_at(&self, recall: f64) -> f64 {
        let wanted = (self.active() as f64 * recall).ceil() as u64;
        let (mut predicted, mut hit) = (0, 0);
        for &(all, active) in self.bins.iter().rev() {
            if hit >= wanted {
                break;
            }
            (predicted, hit) = (predicted + all, hit + active);
        }
        predicted as f64 / self.all().max(1) as f64
    }
}

/// The largest probability threshold, common to all layers, at which they together reach `recall`. Of all choices of thresholds that do, it
/// computes the fewest neurons, because it demands the same probability in each layer.
pub fn threshold_for(layers: &[(&Histogram, &Calibration)], recall: f64) -> f32 {
    let active: u64 = layers.iter().map(|(h, _)| h.active()).sum();
    let reaches = |threshold: f32| {
        let hit: u64 = layers.iter().map(|(h, c)| h.reaching(c.score_at(threshold)).1).sum();
        hit as f64 >= recall * active as f64
    };
    let (mut low, mut high) = (0f32, 1f32);
    // 24 halvings exhaust the precision of an f32.
    for _ in 0..24 {
        let middle = 0.5 * (low + high);
        *(if reaches(middle) { &mut low } else { &mut high }) = middle;
    }
    low
}

/// Counts the scores that `predictor` gives layer `layer`, from the residual `ahead` layers before, on the tokens `range` of `samples`,
/// with whether each neuron was active. `step` is called after each batch of up to [`MAX_COLUMNS`] tokens.
///
/// # Errors
/// Those of `step`.
#[allow(clippy::too_many_arguments)]
pub fn measure(
    predictor: &dyn Predictor,
    model: &Model,
    kernels: &Kernels,
    pool: &mut ThreadPool,
    samples: &Samples,
    (layer, ahead): (usize, usize),
    range: Range<usize>,
    mut step: impl FnMut() -> Result<()>,
) -> Result<Histogram> {
    let e = samples.extent;
    let (mut scores, mut residual, mut scratch) = (Vec::new(), Vec::new(), Scratch::default());
    let mut histogram = match predictor.kind() {
        Kind::Sign => Histogram::of_signs(e.hidden),
        _ => Histogram::of_logits(),
    };
    let (order, pairs) = (&model.layers[layer].order, samples.pairs(layer, ahead));
    for first in range.clone().step_by(MAX_COLUMNS) {
        let n = MAX_COLUMNS.min(range.end - first);
        residual.resize(n * e.hidden, 0.0);
        let neurons = e.experts * e.ffn;
        scores.resize(n * neurons, 0.0);
        pairs.residuals[first * e.hidden..][..n * e.hidden].convert_to_f32_slice(&mut residual);
        let mut tools = Tools { model, pool: &mut *pool, kernels, scratch: &mut scratch };
        predictor.score(&mut tools, layer, ahead, &residual, n, &mut scores);
        for (token, scores) in (first..).zip(scores.chunks_exact(neurons)) {
            for (expert, labels) in pairs.of_token(token) {
                for (neuron, &score) in order.in_store_order(e.ffn).zip(&scores[expert * e.ffn..]) {
                    histogram.add(score, labels[neuron.index() / 64] >> (neuron.index() % 64) & 1 == 1);
                }
            }
        }
        step()?;
    }
    Ok(histogram)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores that are the log-odds of being active.
    fn honest(slope: f32) -> Histogram {
        let mut h = Histogram::of_logits();
        for i in 0..400 {
            let score = slope * (i as f32 / 200.0 - 1.0) * 4.0 - 2.0;
            let active = (1000.0 / (1.0 + (-score).exp())) as usize;
            (0..1000).for_each(|k| h.add(score, k < active));
        }
        h
    }

    #[test]
    fn one_threshold_for_all_layers_reaches_the_recall_with_the_fewest_neurons() {
        let (a, b) = (honest(1.0), honest(0.5));
        let (ca, cb) = (a.calibration(), b.calibration());
        let t = threshold_for(&[(&a, &ca), (&b, &cb)], 0.9);
        let (ma, mb) = (a.measured(ca.score_at(t)), b.measured(cb.score_at(t)));
        let hit = ma.recall as f64 * a.active() as f64 + mb.recall as f64 * b.active() as f64;
        let recall = hit / (a.active() + b.active()) as f64;
        assert!((0.9..0.91).contains(&recall), "recall {recall}");
        // Each layer reaching the recall by itself computes no fewer.
        let together = 0.5 * (ma.computed_share + mb.computed_share) as f64;
        let apart = 0.5 * (a.share_at(0.9) + b.share_at(0.9));
        assert!(together <= apart + 0.005, "{together} together, {apart} apart");
    }

    #[test]
    fn where_nothing_is_active_nothing_is_computed() {
        let mut h = Histogram::of_logits();
        (0..100).for_each(|i| h.add(i as f32 / 10.0 - 5.0, false));
        let c = h.calibration();
        assert_eq!(h.share_at(0.95), 0.0);
        let m = h.measured(c.score_at(0.1));
        assert_eq!((m.recall, m.computed_share), (1.0, 0.0));
    }
}
