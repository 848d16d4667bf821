//! The outputs of the units into which an FFN is cut, and their sum.

use super::work::add_down_bias;
use crate::cpu::ThreadPool;
use crate::cpu::aligned::{Aligned, LINE};
use crate::cpu::thread_pool::Parts;
use crate::formats::rows;
use crate::host_cache::units_of;
use crate::model::config::ModelConfig;
use crate::model::weights::Layer;
use crate::ops::math;

/// A buffer for each unit of a pass of `n` columns, and numbers of one.
pub(super) fn unit_buffers<'a>(
    partial: &'a mut Aligned,
    config: &ModelConfig,
    layer: &Layer,
    n: usize,
    units: usize,
) -> (usize, &'a mut [f32]) {
    let size = (n * config.hidden).next_multiple_of(LINE);
    // Sized for all neurons, so that a longer list later allocates nothing.
    partial.resize(units_of(layer.width, layer.block().bytes()) * size);
    (size, &mut partial[..units * size])
}

/// Numbers that a thread adds over all units at a time: a page of each, and a cache line is one thread's alone.
const ADDED: usize = 1024;

/// Adds the units' buffers in order, and their sum with the bias of down to `hidden`. Each number's sum is one thread's.
pub(super) fn add_units(
    pool: &mut ThreadPool,
    partial: &mut [f32],
    size: usize,
    config: &ModelConfig,
    layer: &Layer,
    hidden: &mut [f32],
) {
    let (sum, rest) = partial.split_at_mut(size);
    if !rest.is_empty() {
        let sums = Parts::new(sum);
        pool.run(size.div_ceil(ADDED), |_, slice| {
            let range = slice * ADDED..size.min((slice + 1) * ADDED);
            // SAFETY: each slice is one task's.
            let sum = unsafe { sums.part(range.clone()) };
            rest.chunks_exact(size).for_each(|part| math::add(sum, &part[range.clone()]));
        });
    }
    for (sum, hidden) in sum.chunks_exact(config.hidden).zip(hidden.chunks_exact_mut(config.hidden)) {
        rows::add_axpy(layer.block().down().quant, sum, hidden);
    }
    add_down_bias(layer, hidden);
}
