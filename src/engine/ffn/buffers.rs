//! Working memory of the FFN.

use super::work::{Neurons, Selection};
use crate::cpu::Columns;
use crate::cpu::aligned::Aligned;
use crate::device::NONE;
use crate::engine::inputs::Inputs;
use crate::model::config::ModelConfig;

/// Working memory that the FFN keeps between calls.
#[derive(Default)]
pub struct FfnBuffers {
    /// `[units, n, hidden]`, each unit's part beginning a cache line.
    pub(super) partial: Aligned,
    /// `[n, ffn]`, for more than [`crate::cpu::MAX_COLUMNS`] columns.
    pub(super) gates: Vec<f32>,
    pub(super) activations: Vec<f32>,
    /// The neurons that fire, for [`super::Work::Gates`].
    pub(super) fired: Selection,
    /// For each neuron of the last list that was computed, bit b: it was active for column b.
    pub(super) active: Vec<u32>,
    /// What a chunk's down reads.
    pub(super) columns: Columns,
    pub(super) whole: WholeBuffers,
    /// The inputs of the layer's products.
    pub(in crate::engine) inputs: Inputs,
}

impl FfnBuffers {
    /// What `down` reads, in each of the FFN's forms.
    pub(in crate::engine) fn columns(&mut self) -> [&mut Columns; 2] {
        [&mut self.columns, &mut self.whole.columns]
    }

    /// For each neuron of the selection that was computed last, bit b: it was active for column b, `[neurons]`.
    pub fn active(&self) -> &[u32] {
        &self.active
    }

    /// For how many of the `n` tokens of the last dense pass over more than [`crate::cpu::MAX_COLUMNS`] each of `neurons`, which it computed, was
    /// active: `[ffn]`, [`NONE`] for all others.
    pub fn counts(
        &self,
        config: &ModelConfig,
        neurons: Neurons<'_>,
        n: usize,
        activation_threshold: f32,
        out: &mut Vec<u32>,
    ) {
        let len = neurons.len();
        out.clear();
        out.resize(config.widest_ffn(), NONE);
        (0..len).for_each(|i| out[neurons.store_index(i)] = 0);
        if len == 0 {
            return;
        }
        for (gates, activations) in self.gates.chunks_exact(len).zip(self.activations.chunks_exact(len)).take(n) {
            for (i, (&gate, &a)) in gates.iter().zip(activations).enumerate() {
                let active = if activation_threshold > 0.0 {
                    config.activation.apply(gate).abs() > activation_threshold
                } else {
                    a != 0.0
                };
                out[neurons.store_index(i)] += u32::from(active);
            }
        }
    }
}

/// What an FFN of whole matrices works with.
#[derive(Default)]
pub(super) struct WholeBuffers {
    /// Products of gate and up, `[n, 2 ffn]`, or of up alone.
    pub(super) products: Vec<f32>,
    /// `[n, ffn]`
    pub(super) activations: Vec<f32>,
    /// The activations as the kernels read them.
    pub(super) columns: Columns,
    /// `[n, hidden]`
    pub(super) out: Vec<f32>,
}
