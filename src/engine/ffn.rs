//! The FFN over neuron blocks: gate, up and down of a neuron are read together.
//!
//! Each unit of work is a fixed range of neurons with an output buffer of its own; the buffers are added in order. So the
//! result does not depend on how many threads there are or which one was faster.

use crate::cpu::aligned::{Aligned, LINE};
use crate::cpu::team::Parts;
use crate::cpu::{Columns, Kernels, MAX_AXPY_ROWS, MAX_COLUMNS, Team};
use crate::formats::rows::{self, PACK, Quant};
use crate::model::config::{Activation, Ffn, ModelConfig};
use crate::model::weights::{Layer, Matrix};
use crate::ops::math;
use faer::{Accum, MatMut, MatRef, Par};

/// Units per layer at most. Their buffers are written and added once per token: 32 of them are below 1 % of the weights.
const MAX_UNITS: usize = 32;
/// Block bytes per unit at least, so that a small model does not drown in buffers.
const MIN_UNIT_BYTES: usize = 128 << 10;
/// Neurons of a GEMM tile, and columns of `down` that a thread multiplies at a time.
const TILE_NEURONS: usize = 128;
const TILE_HIDDEN: usize = 1024;

/// A thread's room for unpacked weights and products.
pub type Tile = Vec<f32>;

/// Room that the FFN keeps between calls.
#[derive(Default)]
pub struct FfnBuffers {
    /// `[units, n, hidden]`, each unit's part beginning a cache line.
    partial: Aligned,
    /// `[n, ffn]`, for more than [`MAX_COLUMNS`] columns.
    activations: Vec<f32>,
}

/// A neuron's activation from its dot products.
#[inline]
pub fn activation(kind: Ffn, act: Activation, gate: f32, up: f32) -> f32 {
    match kind {
        Ffn::Gated => {
            let g = act.apply(gate);
            if g == 0.0 { 0.0 } else { g * up }
        }
        Ffn::GatedBoth => act.apply(gate) * act.apply(up),
        Ffn::Plain => act.apply(up),
    }
}

/// hidden += FFN(input). `input` (normalised) and `hidden` are `[n, hidden]`.
#[allow(clippy::too_many_arguments)]
pub fn ffn(
    team: &mut Team,
    kernels: &Kernels,
    config: &ModelConfig,
    layer: &Layer,
    input: &[f32],
    n: usize,
    columns: &mut Columns,
    tiles: &mut [Tile],
    buffers: &mut FfnBuffers,
    hidden: &mut [f32],
) {
    columns.set(input, n, layer.ffn.quant);
    if n <= MAX_COLUMNS {
        by_blocks(team, kernels, config, layer, columns, &mut buffers.partial, hidden);
    } else {
        by_gemm(team, kernels, config, layer, columns, tiles, &mut buffers.activations, hidden);
    }
    if !layer.down_bias.is_empty() {
        hidden.chunks_exact_mut(config.hidden).for_each(|x| math::add(x, &layer.down_bias));
    }
}

fn by_blocks(
    team: &mut Team,
    kernels: &Kernels,
    config: &ModelConfig,
    layer: &Layer,
    x: &Columns,
    partial: &mut Aligned,
    hidden: &mut [f32],
) {
    let units = (layer.ffn.bytes() as usize / MIN_UNIT_BYTES).clamp(1, MAX_UNITS);
    let size = (x.n * config.hidden).next_multiple_of(LINE);
    partial.resize(units * size);
    let parts = Parts::new(partial);
    team.run(units, |_, unit| {
        // SAFETY: each unit has its own part.
        let out = unsafe { parts.part(unit * size..(unit + 1) * size) };
        out.fill(0.0);
        let neurons = unit * config.ffn / units..(unit + 1) * config.ffn / units;
        run_blocks(kernels, config, layer, x, neurons, &mut out[..x.n * config.hidden]);
    });
    let (sum, rest) = partial.split_at_mut(size);
    rest.chunks_exact(size).for_each(|part| math::add(sum, part));
    for (sum, hidden) in sum.chunks_exact(config.hidden).zip(hidden.chunks_exact_mut(config.hidden)) {
        rows::add_axpy(layer.ffn.quant, sum, hidden);
    }
}

/// out += the share of `neurons`; `out` is `[n, hidden]`.
fn run_blocks(
    kernels: &Kernels,
    config: &ModelConfig,
    layer: &Layer,
    x: &Columns,
    neurons: std::ops::Range<usize>,
    out: &mut [f32],
) {
    let (dot, axpy) = (kernels.dot(layer.ffn.quant), kernels.axpy(layer.ffn.quant));
    let per_block = config.ffn_kind.rows();
    let (n, down_bytes) = (x.n, layer.ffn.row_bytes);
    let dots = per_block - 1;
    // [columns, gate and up], or [columns, up].
    let mut products = [0f32; 2 * MAX_COLUMNS];
    let mut a = [0f32; MAX_AXPY_ROWS * MAX_COLUMNS];
    let together = rows_together(layer.ffn.quant);
    let mut first = neurons.start;
    while first < neurons.end {
        let count = together.min(neurons.end - first);
        for (k, a) in a.chunks_exact_mut(n).enumerate().take(count) {
            let neuron = first + k;
            // SAFETY: the rows are inside the section; the kernels are for this machine.
            unsafe {
                dot(layer.ffn.rows_from(neuron * per_block, 1), dots, x, products.as_mut_ptr(), dots);
                // The down rows are added together, but read here, where they lie: weights come fastest as one stream.
                if count > 1 {
                    (kernels.touch)(layer.ffn.row_ptr(neuron * per_block + dots), down_bytes);
                }
            }
            let bias = layer.up_bias.get(neuron).copied().unwrap_or(0.0);
            for (a, products) in a.iter_mut().zip(products.chunks_exact(dots)) {
                *a = activation(config.ffn_kind, config.activation, products[0], products[dots - 1] + bias);
            }
        }
        // Also where a is zero: skipping down rows breaks the stream, and what is left comes more slowly than all.
        // SAFETY: as above.
        unsafe {
            axpy(layer.ffn.rows_from(first * per_block + dots, per_block), count, &a[..count * n], config.hidden, out)
        };
        first += count;
    }
}

/// Down rows that are added at a time. One at a time keeps the weights one stream. Four-bit rows are so short that storing
/// the output once per row binds; there two at a time won (14.6 became 16.6 GB/s a thread on a Zen 4; q8_0 lost 3).
const fn rows_together(quant: Quant) -> usize {
    match quant {
        Quant::Q4 => MAX_AXPY_ROWS,
        Quant::F32 | Quant::F16 | Quant::Q8 => 1,
    }
}

/// Many columns: activations of all neurons by the row kernels, then `down`, whose neurons are summed over, by a GEMM over
/// tiles of it that are made f32.
#[allow(clippy::too_many_arguments)]
fn by_gemm(
    team: &mut Team,
    kernels: &Kernels,
    config: &ModelConfig,
    layer: &Layer,
    x: &Columns,
    tiles: &mut [Tile],
    activations: &mut Vec<f32>,
    hidden: &mut [f32],
) {
    let (n, ffn, cols, per_block) = (x.n, config.ffn, config.hidden, config.ffn_kind.rows());
    let dot = kernels.dot(layer.ffn.quant);
    activations.resize(n * ffn, 0.0);
    let (acts, rooms) = (Parts::new(activations), Parts::new(tiles));
    team.run(ffn.div_ceil(TILE_NEURONS), |thread, piece| {
        let range = piece * TILE_NEURONS..ffn.min((piece + 1) * TILE_NEURONS);
        // SAFETY: one room per thread.
        let room = &mut unsafe { rooms.part(thread..thread + 1) }[0];
        let products = n * TILE_NEURONS;
        room.resize(room.len().max(2 * products), 0.0);
        let (gate, up) = room.split_at_mut(products);
        for (k, product) in [(0, &mut *gate), (per_block - 2, &mut *up)].into_iter().skip(3 - per_block) {
            let rows = layer.ffn.rows_from(range.start * per_block + k, per_block);
            // SAFETY: the rows are inside the section; a product has room for n columns of TILE_NEURONS.
            unsafe { dot(rows, range.len(), x, product.as_mut_ptr(), TILE_NEURONS) };
        }
        for b in 0..n {
            // SAFETY: each piece writes its own neurons.
            let out = unsafe { acts.part(b * ffn + range.start..b * ffn + range.end) };
            let at = b * TILE_NEURONS;
            for (i, out) in out.iter_mut().enumerate() {
                let bias = layer.up_bias.get(range.start + i).copied().unwrap_or(0.0);
                *out = activation(config.ffn_kind, config.activation, gate[at + i], up[at + i] + bias);
            }
        }
    });

    let activations = &activations[..n * ffn];
    let per_slice = TILE_HIDDEN.min(cols.div_ceil(team.threads()).next_multiple_of(PACK));
    let out = Parts::new(hidden);
    team.run(cols.div_ceil(per_slice), |thread, piece| {
        let range = piece * per_slice..cols.min((piece + 1) * per_slice);
        // SAFETY: one room per thread.
        let room = &mut unsafe { rooms.part(thread..thread + 1) }[0];
        let tile_neurons = 2 * TILE_NEURONS;
        room.resize(room.len().max(tile_neurons * range.len()), 0.0);
        for first in (0..ffn).step_by(tile_neurons) {
            let here = tile_neurons.min(ffn - first);
            for (neuron, values) in (first..first + here).zip(room.chunks_exact_mut(range.len())) {
                decode_down(&layer.ffn, neuron * per_block + per_block - 1, range.start, values);
            }
            // SAFETY: n rows of `cols` numbers, of which this piece alone writes columns `range`.
            unsafe {
                let dst = out.part(range.start..range.start + 1).as_mut_ptr();
                let dst = MatMut::from_raw_parts_mut(dst, n, range.len(), cols as isize, 1);
                let a = MatRef::from_raw_parts(activations.as_ptr().add(first), n, here, ffn as isize, 1);
                let w = MatRef::from_raw_parts(room.as_ptr(), here, range.len(), range.len() as isize, 1);
                faer::linalg::matmul::matmul(dst, Accum::Add, a, w, 1.0, Par::Seq);
            }
        }
    });
}

fn decode_down(ffn: &Matrix, row: usize, start: usize, values: &mut [f32]) {
    rows::decode_range(ffn.quant, ffn.row(row), ffn.cols, start, values);
}
