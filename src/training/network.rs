//! Training of one predictor network: binary cross-entropy on logits, AdamW, with hand-written gradients on top of a GEMM library.
//!
//! Neurons are divided into fixed slices. A slice holds its rows of `outer`, the logits of its neurons for the batch and its own optimiser
//! state, so that forward, loss, backward and update of a slice are one task without shared writes. The slices' gradients of the hidden
//! layer are added in the order of the slices: the result does not depend on the number of threads.

use crate::error::Result;
use crate::prng::Prng;
use crate::training::histogram::Histogram;
use crate::training::samples::Pairs;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;
use std::ops::Range;

/// Tokens of a training step. Their logits for a slice fit into a core's L2 cache.
pub const BATCH: usize = 256;
/// Neurons of a slice; a multiple of 64, so that a token's labels for it are whole words.
const SLICE: usize = 512;
/// Rows of `inner` that a task updates, and tokens whose hidden values a task computes.
const INNER_ROWS: usize = 32;
const TASK_TOKENS: usize = 64;
/// Largest learning rate, and the hidden size at which it was found. Adam changes every weight by about the same amount, so the effect on a
/// row grows with its length, and rows of `inner` are as long as the hidden size.
const RATE: f32 = 2e-3;
const RATE_AT_HIDDEN: f32 = 256.0;
/// Share of the steps during which the learning rate rises.
const WARM_UP: f32 = 0.05;
const BETA1: f32 = 0.9;
const BETA2: f32 = 0.99;
const EPSILON: f32 = 1e-8;
const DECAY: f32 = 1e-2;

/// Log-odds that each neuron is active, `[ffn]`, from its count in `tokens` tokens; half a count is added to either side so that they are
/// finite. It is the best prediction that ignores the input.
pub fn log_odds(counts: &[u64], tokens: usize) -> Vec<f32> {
    let odds = |&count: &u64| ((count as f64 + 0.5) / (tokens as f64 - count as f64 + 0.5)).ln() as f32;
    counts.iter().map(odds).collect()
}

/// Weights with the running means of gradient and squared gradient.
struct Trained {
    weights: Vec<f32>,
    gradient: Vec<f32>,
    mean: Vec<f32>,
    square: Vec<f32>,
}

/// Learning rate and bias corrections of one step.
#[derive(Clone, Copy)]
struct UpdateStep {
    rate: f32,
    decay: f32,
    /// 1 / (1 - beta^t)
    correct1: f32,
    correct2: f32,
}

impl Trained {
    fn new(weights: Vec<f32>) -> Trained {
        let zeros = || vec![0.0; weights.len()];
        Trained { gradient: zeros(), mean: zeros(), square: zeros(), weights }
    }

    /// AdamW (Loshchilov and Hutter, 2019).
    fn update(&mut self, s: UpdateStep) {
        let state = self.mean.iter_mut().zip(&mut self.square).zip(&self.gradient);
        for (w, ((m, v), &g)) in self.weights.iter_mut().zip(state) {
            *m = BETA1 * *m + (1.0 - BETA1) * g;
            *v = BETA2 * *v + (1.0 - BETA2) * g * g;
            *w -= s.rate * (*m * s.correct1 / ((*v * s.correct2).sqrt() + EPSILON) + s.decay * *w);
        }
    }
}

/// Rows of `inner` with their biases.
struct InnerRows {
    rows: usize,
    weights: Trained,
    bias: Trained,
}

/// A slice of an expert's neurons.
struct Slice {
    expert: usize,
    first: usize,
    neurons: usize,
    /// Which tokens of the batch have the expert, by their place in it.
    tokens: Vec<usize>,
    /// Their hidden values, `[tokens, rank]`, where not all have it.
    values: Vec<f32>,
    /// `[neurons, rank]`
    weights: Trained,
    bias: Trained,
    /// Logits, then their gradients, `[tokens, neurons]`.
    logits: Vec<f32>,
    /// This slice's part of the gradient of the tokens' hidden values, `[tokens, rank]`.
    back: Vec<f32>,
}

/// A network in training.
pub struct Training {
    hidden: usize,
    neurons: usize,
    rank: usize,
    inner: Vec<InnerRows>,
    slices: Vec<Slice>,
    /// `[BATCH, hidden]`, `[BATCH, rank]` each.
    input: Vec<f32>,
    values: Vec<f32>,
    gradient: Vec<f32>,
}

/// A trained network's weights, in the layout of [`crate::predictor::mlp::Network`].
#[derive(Clone)]
pub struct Weights {
    /// First matrix, `[rank, hidden]`.
    pub inner: Vec<f32>,
    /// Bias of the hidden values, `[rank]`.
    pub inner_bias: Vec<f32>,
    /// Second matrix, `[ffn, rank]`.
    pub outer: Vec<f32>,
    /// Bias of the logits, `[ffn]`.
    pub outer_bias: Vec<f32>,
}

/// dst = a * b.
fn multiply(dst: MatMut<'_, f32>, a: MatRef<'_, f32>, b: MatRef<'_, f32>) {
    faer::linalg::matmul::matmul(dst, Accum::Replace, a, b, 1.0, Par::Seq);
}

fn matrix(values: &[f32], rows: usize, cols: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(&values[..rows * cols], rows, cols)
}

fn matrix_mut(values: &mut [f32], rows: usize, cols: usize) -> MatMut<'_, f32> {
    MatMut::from_row_major_slice_mut(&mut values[..rows * cols], rows, cols)
}

/// Uniform random numbers of standard deviation `scale`.
fn random(rng: &mut Prng, n: usize, scale: f32) -> Vec<f32> {
    (0..n).map(|_| (rng.next_f64() as f32 * 2.0 - 1.0) * 3f32.sqrt() * scale).collect()
}

/// 1 / (1 + e^-x) to about 1e-6, in operations that the compiler can vectorise.
#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to a whole number
    let y = (-x).clamp(-80.0, 80.0) * std::f32::consts::LOG2_E;
    let whole = (y + MAGIC) - MAGIC;
    let f = y - whole;
    // 2^f on -0.5..0.5: Taylor's to the sixth power.
    let p = 1.540_353e-4 * f + 1.333_355_8e-3;
    let p = p * f + 9.618_129e-3;
    let p = p * f + 5.550_411e-2;
    let p = p * f + 2.402_265e-1;
    let p = p * f + std::f32::consts::LN_2;
    let p = p * f + 1.0;
    let power = f32::from_bits((((whole + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32 + 127) << 23) as u32);
    1.0 / (1.0 + p * power)
}

impl Training {
    /// A network of rank `rank` whose output biases are `log_odds`, `[experts, ffn]`: untrained, it predicts how often each neuron is active.
    pub fn new(hidden: usize, rank: usize, log_odds: &[f32], experts: usize, seed: u64) -> Training {
        let (neurons, ffn) = (log_odds.len(), log_odds.len() / experts);
        let mut rng = Prng::new(seed);
        let inner = (0..rank).step_by(INNER_ROWS).map(|first| {
            let rows = INNER_ROWS.min(rank - first);
            // Inputs have a mean square of one, and hidden values begin at about that size.
            let weights = Trained::new(random(&mut rng, rows * hidden, (2.0 / hidden as f32).sqrt()));
            InnerRows { rows, weights, bias: Trained::new(vec![0.0; rows]) }
        });
        let inner = inner.collect();
        let firsts = (0..experts).flat_map(|expert| (0..ffn).step_by(SLICE).map(move |first| (expert, first)));
        let slices = firsts.map(|(expert, first)| {
            let neurons = SLICE.min(ffn - first);
            let weights = Trained::new(random(&mut rng, neurons * rank, 0.5 / (rank.max(1) as f32).sqrt()));
            let bias = Trained::new(log_odds[expert * ffn + first..][..neurons].to_vec());
            let back = vec![0.0; BATCH * rank];
            let (tokens, values, logits) = (Vec::new(), Vec::new(), Vec::new());
            Slice { expert, first, neurons, tokens, values, weights, bias, logits, back }
        });
        let slices = slices.collect();
        let values = || vec![0.0; BATCH * rank];
        Training {
            hidden,
            neurons,
            rank,
            inner,
            slices,
            input: vec![0.0; BATCH * hidden],
            values: values(),
            gradient: values(),
        }
    }

    /// Trains for `steps` steps of [`BATCH`] tokens, drawn from the tokens `range` in shuffled order, each pass over them shuffled anew.
    /// `step` is called after each.
    ///
    /// # Errors
    /// Those of `step`.
    pub fn run(
        &mut self,
        pairs: &Pairs<'_>,
        range: Range<usize>,
        steps: usize,
        seed: u64,
        mut step: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        if self.rank == 0 || range.is_empty() {
            return Ok(());
        }
        let mut rng = Prng::new(seed ^ 0x5DEE_CE66);
        let mut order: Vec<usize> = range.collect();
        let mut at = order.len();
        let mut batch = [0; BATCH];
        for t in 0..steps {
            for token in &mut batch {
                if at == order.len() {
                    (1..order.len()).rev().for_each(|i| order.swap(i, rng.below(i as u64 + 1) as usize));
                    at = 0;
                }
                *token = order[at];
                at += 1;
            }
            let progress = t as f32 / steps as f32;
            let rate = RATE * (progress / WARM_UP).min(1.0) * 0.5 * (1.0 + (progress * std::f32::consts::PI).cos());
            let n = t as i32 + 1;
            let correct = |beta: f32| 1.0 / (1.0 - beta.powi(n));
            self.step(
                pairs,
                &batch,
                UpdateStep { rate, decay: DECAY, correct1: correct(BETA1), correct2: correct(BETA2) },
            );
            step()?;
        }
        Ok(())
    }

    fn step(&mut self, pairs: &Pairs<'_>, batch: &[usize; BATCH], s: UpdateStep) {
        let (hidden, rank) = (self.hidden, self.rank);
        self.forward_inner(pairs, batch);
        let (values, input) = (&self.values, &self.input);
        self.slices.par_iter_mut().for_each(|slice| slice.step(pairs, batch, values, rank, s));
        // Gradient of the hidden values, through the relu.
        self.gradient.fill(0.0);
        for slice in &self.slices {
            for (back, at) in slice.back.chunks_exact(rank).zip(&slice.tokens) {
                crate::ops::math::add(&mut self.gradient[at * rank..(at + 1) * rank], back);
            }
        }
        self.gradient.iter_mut().zip(values).for_each(|(g, v)| *g = if *v > 0.0 { *g } else { 0.0 });
        let gradient = matrix(&self.gradient, BATCH, rank);
        let inner_rate = UpdateStep { rate: s.rate * (RATE_AT_HIDDEN / hidden as f32).sqrt(), ..s };
        self.inner.par_iter_mut().enumerate().for_each(|(i, part)| {
            let mine = gradient.subcols(i * INNER_ROWS, part.rows);
            let to = matrix_mut(&mut part.weights.gradient, part.rows, hidden);
            multiply(to, mine.transpose(), matrix(input, BATCH, hidden));
            part.weights.update(inner_rate);
            for (r, sum) in part.bias.gradient.iter_mut().enumerate() {
                *sum = (0..BATCH).map(|b| mine[(b, r)]).sum();
            }
            part.bias.update(UpdateStep { decay: 0.0, ..inner_rate });
        });
    }

    /// Input and hidden values of `batch`.
    fn forward_inner(&mut self, pairs: &Pairs<'_>, batch: &[usize]) {
        let (hidden, rank, inner) = (self.hidden, self.rank, &self.inner);
        let inputs = self.input.par_chunks_mut(TASK_TOKENS * hidden);
        let values = self.values.par_chunks_mut(TASK_TOKENS * rank);
        inputs.zip(values).zip(batch.par_chunks(TASK_TOKENS)).for_each(|((input, values), tokens)| {
            let n = tokens.len();
            input.chunks_exact_mut(hidden).zip(tokens).for_each(|(x, &token)| pairs.input(token, x));
            let mut out = matrix_mut(values, n, rank);
            for (i, part) in inner.iter().enumerate() {
                let to = out.as_mut().subcols_mut(i * INNER_ROWS, part.rows);
                multiply(to, matrix(input, n, hidden), matrix(&part.weights.weights, part.rows, hidden).transpose());
            }
            for values in values[..n * rank].chunks_exact_mut(rank) {
                let biases = inner.iter().flat_map(|part| &part.bias.weights);
                values.iter_mut().zip(biases).for_each(|(v, b)| *v = (*v + b).max(0.0));
            }
        });
    }

    /// Counts the scores of the tokens `range`, and whether each neuron was active.
    pub fn histogram(&mut self, pairs: &Pairs<'_>, range: Range<usize>) -> Histogram {
        let rank = self.rank;
        let mut sum = Histogram::of_logits();
        for first in range.clone().step_by(BATCH) {
            let tokens: Vec<usize> = (first..range.end.min(first + BATCH)).collect();
            if rank > 0 {
                self.forward_inner(pairs, &tokens);
            }
            let values = &self.values;
            let parts = self.slices.par_iter_mut().map(|slice| {
                let mut histogram = Histogram::of_logits();
                slice.forward(pairs, &tokens, values, rank);
                for (logits, &at) in slice.logits.chunks_exact(slice.neurons).zip(&slice.tokens) {
                    let labels = pairs.of_expert(tokens[at], slice.expert).expect("it was chosen for having it");
                    for (i, (&logit, bias)) in logits.iter().zip(&slice.bias.weights).enumerate() {
                        let neuron = slice.first + i;
                        histogram.add(logit + bias, labels[neuron / 64] >> (neuron % 64) & 1 == 1);
                    }
                }
                histogram
            });
            parts.collect::<Vec<_>>().iter().for_each(|part| sum.merge(part));
        }
        sum
    }

    /// A copy of the weights as they are now.
    pub fn weights(&self) -> Weights {
        let join = |of: &dyn Fn(&Slice) -> Vec<f32>| self.slices.iter().flat_map(of).collect();
        let weights = Weights {
            inner: self.inner.iter().flat_map(|p| p.weights.weights.clone()).collect(),
            inner_bias: self.inner.iter().flat_map(|p| p.bias.weights.clone()).collect(),
            outer: join(&|s| s.weights.weights.clone()),
            outer_bias: join(&|s| s.bias.weights.clone()),
        };
        assert_eq!(weights.outer.len(), self.neurons * self.rank);
        weights
    }
}

impl Slice {
    /// Logits without bias of those of `batch` that have the expert.
    fn forward(&mut self, pairs: &Pairs<'_>, batch: &[usize], values: &[f32], rank: usize) {
        let Slice { expert, tokens, values: own, logits, .. } = self;
        tokens.clear();
        tokens.extend((0..batch.len()).filter(|&at| pairs.of_expert(batch[at], *expert).is_some()));
        logits.clear();
        logits.resize(tokens.len() * self.neurons, 0.0);
        if rank == 0 || tokens.is_empty() {
            return;
        }
        let values = match tokens.len() == batch.len() {
            true => values,
            false => {
                own.clear();
                tokens.iter().for_each(|at| own.extend_from_slice(&values[at * rank..(at + 1) * rank]));
                &own[..]
            }
        };
        let weights = matrix(&self.weights.weights, self.neurons, rank);
        let n = tokens.len();
        multiply(matrix_mut(logits, n, self.neurons), matrix(values, n, rank), weights.transpose());
    }

    fn step(&mut self, pairs: &Pairs<'_>, batch: &[usize; BATCH], values: &[f32], rank: usize, s: UpdateStep) {
        self.forward(pairs, batch, values, rank);
        // The loss is summed over neurons and averaged over tokens. Neurons do not share a loss, so a layer with more of them is no harder
        // to train.
        let share = 1.0 / BATCH as f32;
        self.bias.gradient.fill(0.0);
        for (logits, &at) in self.logits.chunks_exact_mut(self.neurons).zip(&self.tokens) {
            let labels = pairs.of_expert(batch[at], self.expert).expect("it was chosen for having it");
            let labels = &labels[self.first / 64..];
            let sums = self.bias.gradient.chunks_mut(64).zip(self.bias.weights.chunks(64));
            for ((logits, (sums, biases)), &word) in logits.chunks_mut(64).zip(sums).zip(labels) {
                for (i, (logit, (sum, bias))) in logits.iter_mut().zip(sums.iter_mut().zip(biases)).enumerate() {
                    let label = (word >> i & 1) as f32;
                    *logit = (sigmoid(*logit + bias) - label) * share;
                    *sum += *logit;
                }
            }
        }
        let n = self.tokens.len();
        let values = if n == BATCH { values } else { &self.values[..] };
        if n == 0 {
            self.back.fill(0.0);
            self.weights.gradient.fill(0.0);
        } else {
            let logits = matrix(&self.logits, n, self.neurons);
            let weights = matrix(&self.weights.weights, self.neurons, rank);
            multiply(matrix_mut(&mut self.back, n, rank), logits, weights);
            let gradient = matrix_mut(&mut self.weights.gradient, self.neurons, rank);
            multiply(gradient, logits.transpose(), matrix(values, n, rank));
        }
        self.weights.update(s);
        self.bias.update(UpdateStep { decay: 0.0, ..s });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fast_sigmoid_is_the_sigmoid() {
        for i in -4000..4000 {
            let x = i as f32 * 0.02;
            let exact = 1.0 / (1.0 + (-x as f64).exp());
            assert!((sigmoid(x) as f64 - exact).abs() < 1e-6, "{x}: {} {exact}", sigmoid(x));
        }
    }
}
