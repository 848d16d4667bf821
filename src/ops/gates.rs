//! Rows of every neuron's block times the input: gates, which the FFN and the exact predictor compute alike.

use crate::cpu::team::Parts;
use crate::cpu::{Columns, Kernels, Team};
use crate::model::config::{Ffn, ModelConfig};
use crate::model::weights::Layer;
use crate::ops::math;
use std::ops::Range;

/// Neurons that a thread takes at a time in a pass over all of them.
pub const TILE_NEURONS: usize = 128;

/// Gate pre-activations `[n, ffn]` of all neurons; of a plain FFN, which has no gates, up's with their bias.
pub fn gates(team: &mut Team, kernels: &Kernels, config: &ModelConfig, layer: &Layer, x: &Columns, gates: &mut [f32]) {
    assert_eq!(gates.len(), x.n * config.ffn);
    let gates = Parts::new(gates);
    team.run(config.ffn.div_ceil(TILE_NEURONS), |_, piece| first_rows(kernels, config, layer, x, piece, &gates));
}

/// Row 0 of each neuron of piece `piece` times the input, with up's bias where it is up's. `out` is `[n, ffn]`, and no other
/// piece has its neurons.
pub fn first_rows(kernels: &Kernels, config: &ModelConfig, layer: &Layer, x: &Columns, piece: usize, out: &Parts<f32>) {
    let range = tile(config, piece);
    row_dots(kernels, config, layer, x, range.clone(), 0, out);
    if config.ffn_kind == Ffn::Plain && !layer.up_bias.is_empty() {
        for b in 0..x.n {
            // SAFETY: each piece has its own neurons.
            let out = unsafe { out.part(b * config.ffn + range.start..b * config.ffn + range.end) };
            math::add(out, &layer.up_bias[range.clone()]);
        }
    }
}

/// out[b * ffn + neuron] = row k of the neuron's block times column b.
pub fn row_dots(
    kernels: &Kernels,
    config: &ModelConfig,
    layer: &Layer,
    x: &Columns,
    neurons: Range<usize>,
    k: usize,
    out: &Parts<f32>,
) {
    let per_block = config.ffn_kind.rows();
    let rows = layer.ffn.rows_from(neurons.start * per_block + k, per_block);
    // SAFETY: the rows are inside the section; the kernels are for this machine; each piece writes its own neurons of
    // `out`, which is [n, ffn].
    unsafe { kernels.dot(layer.ffn.quant)(rows, neurons.len(), x, out.start().add(neurons.start), config.ffn) };
}

/// The neurons of a piece of a pass over all of them.
pub fn tile(config: &ModelConfig, piece: usize) -> Range<usize> {
    piece * TILE_NEURONS..config.ffn.min((piece + 1) * TILE_NEURONS)
}
