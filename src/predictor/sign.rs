//! The sign predictor (SparseInfer IV): a neuron is likely active if most products of its gate row and the input are positive, and the sign
//! of a product needs one bit of each factor. There is nothing to train: the bits are the signs of the model's own weights.
//!
//! score = (matching - differing signs) / hidden, in -1..=1. SparseInfer skips a neuron if alpha * matching < differing, that is below the
//! score (1 - alpha) / (1 + alpha); so an alpha per layer is the same as a score per layer.

use super::{Calibration, Form, Kind, Predictor, Tools};
use crate::cpu::sign::{self, BitLine};
use crate::cpu::thread_pool::Parts;
use crate::formats::rows;
use crate::model::Model;
use crate::ops::math;
use memmap2::{Advice, MmapMut};
use rayon::prelude::*;
use std::collections::HashMap;

/// The paper's setting (V): a little more is computed in the first part of the model, where signs tell less. The paper gives 20 layers of
/// 32 and of 40; half of the layers lies near both.
const ALPHA_FIRST_HALF: f32 = 1.03;
/// Alpha of the other layers.
const ALPHA: f32 = 1.0;
/// The probability threshold that stands for these alphas.
const UNCALIBRATED: f32 = 0.5;

/// Bytes of signs that a thread takes at a time: a few microseconds of reading.
const PIECE_BYTES: usize = 64 << 10;

/// The score from which on SparseInfer's alpha computes a neuron.
pub fn score_of_alpha(alpha: f32) -> f32 {
    (1.0 - alpha) / (1.0 + alpha)
}

/// The inverse of [`score_of_alpha`]; infinite if every neuron is computed.
pub fn alpha_of_score(score: f32) -> f32 {
    if score <= -1.0 { f32::INFINITY } else { (1.0 - score.min(1.0)) / (1.0 + score.min(1.0)) }
}

/// Calibration and threshold by layer and look-ahead.
pub type Tables = HashMap<(usize, usize), (Calibration, f32)>;

/// Predicts from the signs of the model's gate rows.
pub struct Sign {
    /// The signs of each layer's gate rows (OPT: up rows) in the store's order, `[layers, ffn, lines]`; one allocation, for huge pages.
    bits: MmapMut,
    layers: usize,
    tables: Tables,
}

impl Sign {
    /// Without a calibration: threshold 0.5 stands for the paper's alphas. Looks ahead as far as there are layers.
    pub fn uncalibrated(model: &Model) -> Sign {
        let layers = model.config.layers().len();
        let alpha = |layer| if 2 * layer < layers { ALPHA_FIRST_HALF } else { ALPHA };
        // The step computes what lies above it; a neuron at alpha's score is computed.
        let table = |layer| Calibration::step(score_of_alpha(alpha(layer)).next_down());
        let tables =
            (0..layers).flat_map(|l| (0..=l).map(move |ahead| ((l, ahead), (table(l), UNCALIBRATED)))).collect();
        Sign::new(model, tables)
    }

    /// Packs the signs of `model`; it can predict what `tables` has. Panics if there is no memory for the signs.
    pub fn new(model: &Model, tables: Tables) -> Sign {
        let c = &model.config;
        let lines = sign::lines(c.hidden);
        let mut bits = MmapMut::map_anon(c.layers().len() * c.widest_ffn() * lines * size_of::<BitLine>())
            .expect("memory for the signs");
        // Advice only: small pages are slower.
        let _ = bits.advise(Advice::HugePage);
        bytemuck::cast_slice_mut::<u8, BitLine>(&mut bits).par_chunks_exact_mut(lines).enumerate().for_each_init(
            || vec![0.0; c.hidden],
            |values, (row, bits)| {
                let (layer, neuron) = (&model.layers[row / c.widest_ffn()], row % c.widest_ffn());
                if neuron >= layer.neurons().count {
                    return;
                }
                let part = layer.block().gate_or_up();
                rows::decode(part.quant, layer.neurons().part(part, neuron), values);
                sign::pack(values, bits);
            },
        );
        Sign { bits, layers: c.layers().len(), tables }
    }

    fn layer(&self, layer: usize) -> &[BitLine] {
        let size = self.bits.len() / self.layers;
        bytemuck::cast_slice(&self.bits[layer * size..(layer + 1) * size])
    }
}

impl Predictor for Sign {
    fn kind(&self) -> Kind {
        Kind::Sign
    }

    fn threshold(&self, layer: usize, ahead: usize) -> f32 {
        self.tables.get(&(layer, ahead)).map_or(UNCALIBRATED, |table| table.1)
    }

    fn calibration(&self, layer: usize, ahead: usize) -> Option<&Calibration> {
        self.tables.get(&(layer, ahead)).map(|table| &table.0)
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
        let (h, ffn) = (model.config.hidden, model.config.widest_ffn());
        assert_eq!((residual.len(), scores.len()), (n * h, n * ffn));
        if model.layers[layer].neurons().count == 0 {
            return scores.fill(f32::NEG_INFINITY);
        }
        let lines = sign::lines(h);
        scratch.normed.resize(h, 0.0);
        scratch.bits.resize(n * lines, BitLine::default());
        for (x, bits) in residual.chunks_exact(h).zip(scratch.bits.chunks_exact_mut(lines)) {
            math::norm(model.config.norm, &model.layers[layer].ffn_norm, x, &mut scratch.normed);
            sign::pack(&scratch.normed, bits);
        }
        let (rows, columns, kernel) = (self.layer(layer), &scratch.bits, sign::kernel(kernels.isa));
        let per_task = (PIECE_BYTES / (lines * size_of::<BitLine>())).clamp(1, ffn.div_ceil(pool.threads()));
        let out = Parts::new(scores);
        pool.run(ffn.div_ceil(per_task), |_, task| {
            let range = task * per_task..ffn.min((task + 1) * per_task);
            let rows = &rows[range.start * lines..range.end * lines];
            // SAFETY: `rows` and `columns` hold whole rows; each task writes its own neurons of each column, the last index
            // is (n - 1) * ffn + ffn - 1; the kernel is for this machine.
            unsafe {
                let scores = out.start().add(range.start);
                kernel(rows.as_ptr(), range.len(), columns.as_ptr(), n, h, scores, ffn)
            };
        });
    }

    fn form(&self, layer: usize, _ahead: usize) -> Option<Form<'_>> {
        Some(Form::Sign { bits: self.layer(layer) })
    }

    fn weight_bytes(&self, layer: usize, _ahead: usize) -> u64 {
        size_of_val(self.layer(layer)) as u64
    }
}
