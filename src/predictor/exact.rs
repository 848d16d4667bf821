//! The true gate as a predictor: score = |act(gate)|. From the layer's own residual it is never wrong. From an earlier one it is the best
//! that a predictor can do that applies the target layer's weights to the residual so far.
//!
//! For a layer's own residual the engine computes gates itself and keeps them (`engine/host.rs`); this predictor is for looking ahead.

use super::{Calibration, Kind, Predictor, Tools};
use crate::model::Model;
use crate::ops::gates::gates;
use crate::ops::math;

/// Computes the gates of the target layer.
pub struct Exact {
    /// For each layer, a step at the magnitude above which a neuron counts as active.
    tables: Vec<Calibration>,
    /// For each layer, bytes of its gate rows.
    gate_bytes: Vec<u64>,
}

impl Exact {
    /// `activation_thresholds`: for each layer the magnitude above which a neuron counts as active, 0 for ReLU models.
    pub fn new(model: &Model, activation_thresholds: &[f32]) -> Exact {
        assert_eq!(activation_thresholds.len(), model.config.layers().len());
        Exact {
            tables: activation_thresholds
                .iter()
                .map(|&activation_threshold| Calibration::step(activation_threshold))
                .collect(),
            gate_bytes: model.layers.iter().map(|l| (l.width * l.block().gate_or_up().bytes) as u64).collect(),
        }
    }
}

impl Predictor for Exact {
    fn kind(&self) -> Kind {
        Kind::Exact
    }

    fn threshold(&self, _layer: usize, _ahead: usize) -> f32 {
        0.5
    }

    fn calibration(&self, layer: usize, ahead: usize) -> Option<&Calibration> {
        self.tables.get(layer).filter(|_| ahead <= layer)
    }

    fn score(
        &self,
        tools: &mut Tools<'_>,
        layer: usize,
        _ahead: usize,
        residual: &[f32],
        n: usize,
        scores: &mut [f32],
    ) {
        let Tools { model, pool, kernels, scratch } = tools;
        let (c, layer) = (&model.config, &model.layers[layer]);
        let h = c.hidden;
        assert_eq!((residual.len(), scores.len()), (n * h, n * c.widest_ffn()));
        if layer.neurons().count == 0 {
            return scores.fill(0.0);
        }
        scratch.normed.resize(n * h, 0.0);
        for (x, out) in residual.chunks_exact(h).zip(scratch.normed.chunks_exact_mut(h)) {
            math::norm(c.norm, &layer.ffn_norm, x, out);
        }
        scratch.columns.set_for(&scratch.normed[..n * h], n, layer.ffn.input_quants());
        gates(pool, kernels, c, layer, &scratch.columns, scores);
        scores.iter_mut().for_each(|score| *score = c.activation.apply(*score).abs());
    }

    fn weight_bytes(&self, layer: usize, _ahead: usize) -> u64 {
        self.gate_bytes[layer]
    }
}
