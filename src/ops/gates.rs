//! Gate products of all neurons, which the FFN and the exact predictor compute alike.

use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, Kernels, ThreadPool};
use crate::model::config::{Ffn, ModelConfig};
use crate::model::weights::Layer;
use crate::ops::math;
use std::ops::Range;

/// Neurons that a thread takes at a time in a pass over all of them.
pub const TILE_NEURONS: usize = 128;

/// Computes the gates of all neurons before the activation function, `[n, ffn]`, for the n tokens of `x`, `[n, hidden]`; in a plain FFN,
/// which has no gates, the up products with their bias.
pub fn gates(
    pool: &mut ThreadPool,
    kernels: &Kernels,
    config: &ModelConfig,
    layer: &Layer,
    x: &Columns,
    gates: &mut [f32],
) {
    gates_of(pool, kernels, config, layer, x, 0..layer.width, gates);
}

/// The same for some neurons; what stands in `gates` of others stays.
pub fn gates_of(
    pool: &mut ThreadPool,
    kernels: &Kernels,
    config: &ModelConfig,
    layer: &Layer,
    x: &Columns,
    neurons: Range<usize>,
    gates: &mut [f32],
) {
    assert_eq!(gates.len(), x.n * layer.width);
    let (gates, part) = (Parts::new(gates), layer.block().gate_or_up());
    pool.run(neurons.len().div_ceil(TILE_NEURONS), |_, task| {
        let first = neurons.start + task * TILE_NEURONS;
        let range = first..neurons.end.min(first + TILE_NEURONS);
        let rows = layer.neurons().rows_apart(part, range.start);
        // SAFETY: the rows are inside the section; the kernels are for this machine; each task writes its own neurons of `gates`,
        // which is [n, ffn].
        unsafe { kernels.products(part.quant, rows, range.len(), x, gates.start().add(range.start), layer.width) };
        if config.ffn_kind == Ffn::Plain && !layer.up_bias.is_empty() {
            for b in 0..x.n {
                // SAFETY: each task has its own neurons.
                let out = unsafe { gates.part(b * layer.width + range.start..b * layer.width + range.end) };
                math::add(out, &layer.up_bias[range.clone()]);
            }
        }
    });
}
