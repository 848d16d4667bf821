//! Counts active neurons while a model runs over a window of text. A run has one accumulator; a window's sums are added to its
//! text when the window is complete, so an interrupted run has counted whole windows only.

use super::counts::Extras;
use super::magnitude;
use crate::formats::profile_file::{AHEADS, BINS, Header, Inputs, LayerSums, Text};
use crate::ids::Permutation;
use crate::model::Activation;

/// Layers whose residuals are kept: as many as the furthest look-ahead needs.
const KEPT: usize = AHEADS[AHEADS.len() - 1] + 1;

/// Counts and sums of the window at hand, before they are added to their text.
pub struct Accumulator {
    hidden: usize,
    ffn: usize,
    /// Activation thresholds, `[layers]`, and the activation function: a neuron is active where |act(gate)| is above its layer's; `None`
    /// for ReLU models, where it is active if its activation is not zero.
    activation_thresholds: Option<(Vec<f32>, Activation)>,
    /// Tokens of the window for which each neuron was active, in the store's order, `[layers, ffn]`.
    counts: Vec<u32>,
    /// `[layers]`
    sums: Vec<LayerSums>,
    /// `[layers, BINS]`, or empty.
    magnitudes: Vec<u64>,
    /// Numbers that attention's output matrix reads, and sums of the squares of inputs as in [`Inputs::squares`]; `None` where they are not
    /// counted.
    inputs: Option<Inputs>,
    /// As [`Text::inside`]; `None` where it is not counted.
    inside: Option<Vec<u32>>,
    /// Active neurons of the last token so far, as bits, `[layers][ffn / 64]`; empty at the beginning of a window.
    last: Vec<Vec<u64>>,
    /// Active neurons of the token at hand, and its magnitudes, `[ffn]`.
    now: Vec<u64>,
    values: Vec<f32>,
    /// Residuals of the last layers, at index layer modulo [`KEPT`].
    kept: [Kept; KEPT],
}

/// Residuals of a chunk of tokens after a layer's attention.
#[derive(Default)]
struct Kept {
    /// `[n, hidden]`
    residual: Vec<f32>,
    /// `[n]`
    norms: Vec<f64>,
}

/// Matrices of a layer that read one input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// Queries, keys and values.
    Qkv,
    /// Attention's output matrix.
    Output,
    /// Gate and up.
    Ffn,
}

impl Accumulator {
    /// An empty accumulator for a profile with this header; `activation` is the model's.
    pub fn new(header: &Header, activation: Activation, Extras { q_dim, inside }: Extras) -> Accumulator {
        let (layers, ffn) = (header.layers, header.ffn);
        let magnitudes = header.sparsity.is_some();
        Accumulator {
            hidden: header.hidden,
            ffn,
            activation_thresholds: magnitudes.then(|| (header.activation_thresholds.clone(), activation)),
            counts: vec![0; layers * ffn],
            sums: vec![LayerSums::default(); layers],
            magnitudes: vec![0; if magnitudes { layers * BINS } else { 0 }],
            inputs: q_dim.map(|q_dim| Inputs { q_dim, squares: vec![0.0; layers * (2 * header.hidden + q_dim)] }),
            inside: inside.map(|each| vec![0; layers * ffn * each]),
            last: vec![Vec::new(); layers],
            now: vec![0; ffn.div_ceil(64)],
            values: vec![0.0; ffn],
            kept: Default::default(),
        }
    }

    /// Begins a window; sums that were not added to a text are dropped.
    pub fn begin_window(&mut self) {
        self.counts.fill(0);
        self.sums.fill(LayerSums::default());
        self.magnitudes.fill(0);
        self.inputs.iter_mut().for_each(|inputs| inputs.squares.fill(0.0));
        self.inside.iter_mut().for_each(|inside| inside.fill(0));
        self.last.iter_mut().for_each(Vec::clear);
    }

    /// Whether neurons inside experts are counted.
    pub fn looks_inside(&self) -> bool {
        self.inside.is_some()
    }

    /// Counts, for one token that has the expert, which of its neurons are active.
    pub fn inside(&mut self, layer: usize, expert: usize, active: impl Iterator<Item = bool>) {
        let Some(inside) = &mut self.inside else { return };
        let each = inside.len() / (self.sums.len() * self.ffn);
        let counts = &mut inside[(layer * self.ffn + expert) * each..][..each];
        counts.iter_mut().zip(active).for_each(|(count, active)| *count += u32::from(active));
    }

    /// Counts the next n tokens of the window in one layer; layers come in order. `residual` is that after attention, `[n, hidden]`;
    /// `gates` are before the activation function, `gates` and `activations` are `[n, ffn]`.
    pub fn layer(&mut self, layer: usize, residual: &[f32], gates: &[f32], activations: &[f32]) {
        self.similarity(layer, residual);
        let ffn = self.ffn;
        let counts = &mut self.counts[layer * ffn..(layer + 1) * ffn];
        for (gates, activations) in gates.chunks_exact(ffn).zip(activations.chunks_exact(ffn)) {
            match &self.activation_thresholds {
                None => mark(activations, 0.0, &mut self.now, counts),
                Some((activation_thresholds, activation)) => {
                    let bins = &mut self.magnitudes[layer * BINS..(layer + 1) * BINS];
                    for (value, &gate) in self.values.iter_mut().zip(gates) {
                        *value = activation.apply(gate).abs();
                        bins[magnitude::bin(*value)] += 1;
                    }
                    mark(&self.values, activation_thresholds[layer], &mut self.now, counts);
                }
            }
            let last = &mut self.last[layer];
            if !last.is_empty()
                && let Some(distance) = jaccard_distance(last, &self.now)
            {
                self.sums[layer].pairs += 1;
                self.sums[layer].jaccard += distance;
            }
            last.clone_from(&self.now);
        }
    }

    /// How many tokens these residuals are of, `[n, hidden]`.
    pub fn tokens_of(&self, residuals: &[f32]) -> usize {
        residuals.len() / self.hidden
    }

    /// Adds what matrices of one layer read for the next `n` tokens of the window, `[n, hidden]` or for the output matrix `[n, q_dim]`, or less in
    /// layers whose output matrix reads less.
    pub fn inputs(&mut self, layer: usize, reader: Reader, (n, input): (usize, &[f32])) {
        let Some(Inputs { q_dim, squares }) = &mut self.inputs else { return };
        let (h, q) = (self.hidden, *q_dim);
        let here = &mut squares[layer * (2 * h + q)..(layer + 1) * (2 * h + q)];
        let here = match reader {
            Reader::Qkv => &mut here[..h],
            Reader::Output => &mut here[h..h + q],
            Reader::Ffn => &mut here[h + q..],
        };
        for row in input.chunks_exact(input.len() / n.max(1)) {
            here.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
        }
    }

    /// Adds the cosines between these residuals and those of earlier layers.
    fn similarity(&mut self, layer: usize, residual: &[f32]) {
        let h = self.hidden;
        let mut here = std::mem::take(&mut self.kept[layer % KEPT]);
        here.residual.clear();
        here.residual.extend_from_slice(residual);
        here.norms.clear();
        here.norms.extend(residual.chunks_exact(h).map(|x| dot(x, x).sqrt()));
        for (i, ahead) in AHEADS.into_iter().enumerate().filter(|(_, ahead)| *ahead <= layer) {
            let before = &self.kept[(layer - ahead) % KEPT];
            let rows = here.residual.chunks_exact(h).zip(before.residual.chunks_exact(h));
            let norms = here.norms.iter().zip(&before.norms).map(|(a, b)| a * b);
            let cosines = rows.zip(norms).map(|((a, b), norm)| if norm == 0.0 { 0.0 } else { dot(a, b) / norm });
            self.sums[layer - ahead].cosines[i] += cosines.sum::<f64>();
        }
        self.kept[layer % KEPT] = here;
    }

    /// Adds the window of `tokens` tokens to its text. `orders` are those of the layers' neurons, `[layers]`.
    ///
    /// # Errors
    /// The first layer whose hidden states are not numbers, in words; nothing is added.
    pub fn end_window(&mut self, text: &mut Text, tokens: usize, orders: &[&Permutation]) -> Result<(), String> {
        if let Some(layer) = self.sums.iter().position(|s| s.cosines.iter().any(|c| !c.is_finite())) {
            return Err(format!("hidden states of layer {layer} or one after it are not numbers"));
        }
        if let Some(inputs) = &self.inputs
            && let Some(at) = inputs.squares.iter().position(|s| !s.is_finite())
        {
            let layer = at / (inputs.squares.len() / self.sums.len());
            return Err(format!("hidden states of layer {layer} or one before it are not numbers"));
        }
        text.info.tokens += tokens;
        let layers = self.counts.chunks_exact(self.ffn).zip(text.counts.chunks_exact_mut(self.ffn));
        for ((from, to), order) in layers.zip(orders) {
            to.iter_mut().zip(order.into_published(from)).for_each(|(sum, n)| *sum += n);
        }
        text.sums.iter_mut().zip(&self.sums).for_each(|(sum, s)| sum.add(s));
        text.magnitudes.iter_mut().zip(&self.magnitudes).for_each(|(sum, n)| *sum += n);
        // A text that was begun without these goes on without them.
        if let (Some(all), Some(inside)) = (&mut text.inside, &self.inside) {
            all.iter_mut().zip(inside).for_each(|(sum, n)| *sum += n);
        }
        if let (Some(all), Some(inputs)) = (&mut text.inputs, &self.inputs) {
            all.squares.iter_mut().zip(&inputs.squares).for_each(|(sum, s)| *sum += s);
        }
        Ok(())
    }
}

/// Sets the bit of each neuron with |value| > activation threshold, and counts it. Without branches, since which neurons fire is hard to
/// predict.
fn mark(values: &[f32], activation_threshold: f32, bits: &mut [u64], counts: &mut [u32]) {
    for ((values, counts), word) in values.chunks(64).zip(counts.chunks_mut(64)).zip(bits) {
        *word = 0;
        for (i, (value, count)) in values.iter().zip(counts).enumerate() {
            let active = value.abs() > activation_threshold;
            *word |= u64::from(active) << i;
            *count += u32::from(active);
        }
    }
}

/// Jaccard distance of two sets of bits, 1 - |both| / |either|; `None` where both are empty.
pub fn jaccard_distance(a: &[u64], b: &[u64]) -> Option<f64> {
    let (mut both, mut either) = (0, 0);
    for (a, b) in a.iter().zip(b) {
        both += (a & b).count_ones();
        either += (a | b).count_ones();
    }
    (either > 0).then(|| 1.0 - both as f64 / either as f64)
}

/// Dot product in f64, in eight lanes so that it is vectorised.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut lanes = [0f64; 8];
    let (head_a, tail_a) = a.as_chunks::<8>();
    let (head_b, tail_b) = b.as_chunks::<8>();
    for (a, b) in head_a.iter().zip(head_b) {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a as f64 * b as f64;
        }
    }
    let tail: f64 = tail_a.iter().zip(tail_b).map(|(&a, &b)| a as f64 * b as f64).sum();
    lanes.iter().sum::<f64>() + tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jaccard_distance_is_0_for_equals_1_for_strangers_and_nothing_for_nobody() {
        assert_eq!(jaccard_distance(&[0b1010, 1], &[0b1010, 1]), Some(0.0));
        assert_eq!(jaccard_distance(&[0b1010, 0], &[0b0101, 0]), Some(1.0));
        assert_eq!(jaccard_distance(&[0b0111, 0], &[0b1110, 0]), Some(0.5));
        assert_eq!(jaccard_distance(&[0, 0], &[0, 0]), None);
    }

    #[test]
    fn marks_are_those_above_the_cut_also_in_the_last_word() {
        let values: Vec<f32> = (0..70).map(|i| if i % 3 == 0 { -(i as f32) } else { 0.5 }).collect();
        let (mut bits, mut counts) = (vec![u64::MAX; 2], vec![1; 70]);
        mark(&values, 0.5, &mut bits, &mut counts);
        for i in 0..70 {
            let active = i % 3 == 0 && i > 0;
            assert_eq!((bits[i / 64] >> (i % 64) & 1 == 1, counts[i]), (active, 1 + u32::from(active)), "{i}");
        }
        assert_eq!(bits[1] >> 6, 0);
        mark(&[f32::NAN, f32::MIN_POSITIVE], 0.0, &mut bits[..1], &mut counts[..2]);
        assert_eq!(bits[0], 0b10);
    }
}
