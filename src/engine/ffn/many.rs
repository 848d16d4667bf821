//! The dense FFN over many columns, of a prompt's chunk: products of gate and up, then down as a matrix product.

use super::buffers::FfnBuffers;
use super::compute::Compute;
use super::whole;
use super::work::{Counts, Neurons, add_down_bias, rows_of};
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, Kernels, ManyForm};
use crate::engine::inputs::Input;
use crate::formats::rows::{PACK, Quant};
use crate::model::block::BlockPart;
use crate::model::config::Ffn;
use crate::model::ffn_weights::FfnWeights;
use crate::model::weights::Layer;
use crate::ops::gates::TILE_NEURONS;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Columns of `down` that a thread multiplies at a time, over tiles of neurons.
const TILE_HIDDEN: usize = 512;

/// Gate pre-activations (as `gates`) and activations of all neurons, `[n, ffn]` each: for an observer.
pub fn activations(compute: Compute<'_>, layer: &Layer, x: &Columns, gates: &mut [f32], activations: &mut [f32]) {
    if let FfnWeights::Matrices(weights) = &layer.ffn {
        return whole::activations(compute, layer, weights, x, gates, activations);
    }
    let neurons = Neurons::All(layer.width);
    products(compute, layer, x, neurons, gates, activations);
}

/// The same for `neurons` only, `[n, neurons]` each. Followed by [`down`] this is the dense FFN over many columns.
pub fn products(
    Compute { pool, kernels, config, .. }: Compute<'_>,
    layer: &Layer,
    x: &Columns,
    neurons: Neurons<'_>,
    gates: &mut [f32],
    activations: &mut [f32],
) {
    let (n, len, gate_or_up, up) = (x.n, neurons.len(), layer.block().gate_or_up(), layer.block().up());
    assert_eq!((gates.len(), activations.len()), (n * len, n * len));
    let (gates, activations) = (Parts::new(gates), Parts::new(activations));
    let gated = config.ffn_kind != Ffn::Plain;
    let rows = RowsOf { kernels, layer, neurons, x };
    pool.run(len.div_ceil(TILE_NEURONS), |_, task| {
        let range = task * TILE_NEURONS..len.min((task + 1) * TILE_NEURONS);
        // SAFETY: each task writes its own neurons of what is [n, neurons].
        unsafe {
            rows.by_columns(gate_or_up, range.clone(), gates.start());
            if gated {
                rows.by_columns(up, range.clone(), activations.start());
            }
        }
        for b in 0..n {
            let part = b * len + range.start..b * len + range.end;
            // SAFETY: each task has its own neurons.
            let (gates, out) = unsafe { (gates.part(part.clone()), activations.part(part)) };
            for ((out, gate), i) in out.iter_mut().zip(gates).zip(range.clone()) {
                let bias = if layer.up_bias.is_empty() { 0.0 } else { layer.up_bias[neurons.store_index(i)] };
                if !gated {
                    *gate += bias;
                }
                let up = if gated { *out + bias } else { *gate };
                *out = config.ffn_kind.activation(config.activation, *gate, up);
            }
        }
    });
}

/// Rows of the neurons of a list, and what they are multiplied by.
struct RowsOf<'a> {
    kernels: &'a Kernels,
    layer: &'a Layer,
    neurons: Neurons<'a>,
    x: &'a Columns,
}

impl RowsOf<'_> {
    /// Products of one part's rows of neurons `range` of the list with all columns, `[n, neurons]`. Neurons that lie apart have one tile as
    /// well as neighbours.
    ///
    /// # Safety
    /// `out` is writable at each of them.
    unsafe fn by_columns(&self, part: BlockPart, range: Range<usize>, out: *mut f32) {
        let RowsOf { kernels, layer, neurons, x } = *self;
        let stride = neurons.len();
        if x.form(kernels, part.quant) != ManyForm::Rows {
            let mut rows = [std::ptr::null(); TILE_NEURONS];
            let rows = &mut rows[..range.len()];
            for (i, row) in range.clone().zip(rows.iter_mut()) {
                *row = layer.neurons().part(part, neurons.store_index(i)).as_ptr();
            }
            // SAFETY: whole rows; the kernels are for this machine; the caller's promise.
            return unsafe { kernels.many(part.quant, rows, x, out.add(range.start), stride) };
        }
        neurons.runs(range, |run, first| {
            // SAFETY: as above.
            unsafe {
                let rows = layer.neurons().part_rows(part, first);
                kernels.dot(part.quant)(rows, run.len(), x, out.add(run.start), stride);
            }
        });
    }
}

/// hidden += what the active neurons add, for more than [`MAX_COLUMNS`](crate::cpu::MAX_COLUMNS) columns: those whose |act(gate)| is above
/// `least`. `activations` of all neurons, `[n, ffn]`, become zero where they are not.
pub fn active(
    compute: Compute<'_>,
    layer: &Layer,
    gates: &[f32],
    least: f32,
    activations: &mut [f32],
    buffers: &mut FfnBuffers,
    hidden: &mut [f32],
) -> Counts {
    let config = compute.config;
    let (n, fires) = (activations.len() / layer.width, AtomicU64::new(0));
    let out = Parts::new(activations);
    compute.pool.run(n, |_, b| {
        let range = b * layer.width..(b + 1) * layer.width;
        // SAFETY: each task has its own column.
        let column = unsafe { out.part(range.clone()) };
        for (a, &gate) in column.iter_mut().zip(&gates[range]) {
            *a = if config.activation.apply(gate).abs() > least { *a } else { 0.0 };
        }
        fires.fetch_add(column.iter().filter(|&&a| a != 0.0).count() as u64, Ordering::Relaxed);
    });
    let FfnBuffers { columns, inputs, .. } = buffers;
    columns.scale = inputs.take(Input::Down, activations);
    down(compute, layer, Neurons::All(layer.width), activations, n, columns, hidden);
    Counts { gates: 0, active: fires.into_inner(), ..rows_of(config, layer.width) }
}

/// hidden += down of `activations` (`[n, neurons]`) and its bias. The sum runs over neurons, whose rows become f32 for it, or other codes; `columns` is
/// workspace.
pub fn down(
    compute: Compute<'_>,
    layer: &Layer,
    neurons: Neurons<'_>,
    activations: &[f32],
    n: usize,
    columns: &mut Columns,
    hidden: &mut [f32],
) {
    let (len, part) = (neurons.len(), layer.block().down());
    assert_eq!((activations.len(), hidden.len()), (n * len, n * compute.config.hidden));
    if len > 0 {
        let row = |k: usize| layer.neurons().part(part, neurons.store_index(k));
        across(compute, part.quant, row, (activations, n), columns, hidden);
    }
    add_down_bias(layer, hidden);
}

/// `out[b] += sum over k of number k of activations b times row k`, for the n columns of `activations`, which has a number for each row;
/// the rows are of type `quant` and as long as a column of `out`.
pub(super) fn across<'a>(
    Compute { pool, kernels, tiles, .. }: Compute<'_>,
    quant: Quant,
    row: impl Fn(usize) -> &'a [u8] + Sync,
    (activations, n): (&[f32], usize),
    columns: &mut Columns,
    out: &mut [f32],
) {
    let cols = out.len() / n;
    columns.set_across(Some(pool), kernels, activations, n, quant);
    let (rooms, out) = (Parts::new(tiles), Parts::new(out));
    let per_slice = TILE_HIDDEN.min(cols.div_ceil(pool.threads()).next_multiple_of(PACK));
    pool.run(cols.div_ceil(per_slice), |thread, task| {
        let range = task * per_slice..cols.min((task + 1) * per_slice);
        // SAFETY: one scratch per thread; n rows of `cols` numbers, of which this task alone writes columns `range`; the kernels are for
        // this machine.
        unsafe {
            let room = &mut rooms.part(thread..thread + 1)[0].room;
            let to = out.start().add(range.start);
            kernels.across(quant, &row, cols, range, columns, room, to, cols);
        }
    });
}
