//! The matrices of a synthetic model, row by row; a GGUF and a store of the same shape hold the same model.

use super::noise::{Noise, Stream};
use super::routing::{EMBEDDING, Planted};
use super::shape::Shape;
use super::sparse::Sparse;
use crate::error::Result;
use crate::model::config::ModelConfig;

/// The model's matrices, row by row.
pub(super) struct Weights {
    pub(super) config: ModelConfig,
    noise: Noise,
    pub(super) sparse: Option<Sparse>,
    planted: Option<Planted>,
    /// Channels that are larger than the others.
    outliers: Vec<usize>,
}

impl Weights {
    pub(super) fn new(shape: &Shape) -> Result<Weights> {
        let (config, noise) = (shape.config()?, Noise { seed: shape.seed });
        let sparse = shape.active.map(|active| Sparse::new(&config, noise, active));
        // Anywhere, and nowhere near each other.
        let place = |i: usize| (i * 2 + 1) * config.hidden / (2 * shape.outliers) + i % 7;
        let outliers = (0..shape.outliers).map(|i| place(i) % config.hidden).collect();
        let planted = shape.law()?.map(|law| Planted::new(&config, noise, law));
        Ok(Weights { config, noise, sparse, planted, outliers })
    }

    /// Row `r` of a matrix; `Down` has one row per neuron.
    pub(super) fn row(&self, stream: Stream, layer: usize, r: usize, out: &mut [f32]) {
        match (stream, &self.sparse) {
            (Stream::Embed, Some(sparse)) => sparse.embedding(self.noise, r, out),
            (Stream::Head, Some(sparse)) => sparse.head(self.noise, r, out),
            (Stream::Gate, Some(sparse)) => sparse.gate(self.noise, layer, r, out),
            (Stream::Router, Some(sparse)) => sparse.router(self.noise, layer, r, out),
            _ => {
                let deviation = self.deviation(stream);
                if !self.planted.as_ref().is_some_and(|planted| planted.row(stream, layer, r, deviation, out)) {
                    self.noise.fill(stream, layer, r, 0, deviation, out);
                }
            }
        }
        if matches!(stream, Stream::Q | Stream::K | Stream::V | Stream::Gate | Stream::Up | Stream::Router) {
            self.outliers.iter().enumerate().for_each(|(i, &channel)| out[channel] /= self.factor(layer, i));
        }
    }

    /// By how much the layer's outlier `i` is larger than other channels: 100 times for the first one in the first and last layer, 20 times in
    /// the middle, later ones between, as few channels and layers have most of it.
    fn factor(&self, layer: usize, i: usize) -> f32 {
        let (middle, far) = ((self.config.layers().len() - 1) as f32 / 2.0, layer as f32);
        let edge = if middle > 0.0 { (far - middle).abs() / middle } else { 1.0 };
        20.0 + 80.0 * edge * edge * edge / (1.0 + i as f32 / 4.0)
    }

    /// The weights of a layer's norms.
    pub(super) fn norm(&self, layer: usize) -> Vec<f32> {
        let mut weights = vec![1.0; self.config.hidden];
        self.outliers.iter().enumerate().for_each(|(i, &channel)| weights[channel] = self.factor(layer, i));
        weights
    }

    /// Rows `first..first + rows` of an expert's `down` (a model without experts has number 0) by output, `[rows, ffn]`; `first` is a
    /// multiple of [`super::noise::SEGMENT`] and there are at most that many.
    pub(super) fn down_by_output(&self, layer: usize, expert: usize, first: usize, out: &mut [f32]) {
        let ffn = self.config.widest_ffn();
        let mut segment = vec![0.0; out.len() / ffn];
        for neuron in 0..ffn {
            self.noise.fill(
                Stream::Down,
                layer,
                expert * ffn + neuron,
                first,
                self.deviation(Stream::Down),
                &mut segment,
            );
            segment.iter().enumerate().for_each(|(r, value)| out[r * ffn + neuron] = *value);
        }
    }

    /// Standard deviation of a matrix's numbers; without sparsity one that keeps a layer's outputs about as large as its inputs.
    fn deviation(&self, stream: Stream) -> f32 {
        let c = &self.config;
        match (stream, &self.sparse) {
            (Stream::Embed, None) if c.is_mixture() => EMBEDDING,
            (Stream::O, Some(sparse)) => sparse.o_deviation,
            (Stream::Down, Some(sparse)) => sparse.down_deviation,
            (Stream::O, None) => 1.0 / (c.mixer(0).cols() as f32).sqrt(),
            (Stream::Down, None) => 1.0 / (c.widest_ffn() as f32).sqrt(),
            _ => 1.0 / (c.hidden as f32).sqrt(),
        }
    }
}
