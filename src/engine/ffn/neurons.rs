//! The FFN over neuron blocks: gate, up and down of a neuron are read together, all neurons' or some neurons' only.
//!
//! Each unit of work is a fixed range of neurons (of all, or of the list) with an output buffer of its own; the buffers are
//! added in order. So the result does not depend on how many threads there are or which one was faster.

use super::buffers::FfnBuffers;
use super::compute::Compute;
use super::many::{down, products};
use super::units::{add_units, unit_buffers};
use super::whole;
use super::work::{Counts, Neurons, Selection, SharedCounts, Work, rows_of};
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, Kernels, MAX_AXPY_ROWS, MAX_COLUMNS, Rows};
use crate::engine::inputs::Input;
use crate::formats::rows::{self, Quant};
use crate::host_cache::units_of;
use crate::model::block::BlockPart;
use crate::model::config::{Ffn, ModelConfig};
use crate::model::ffn_weights::{FfnWeights, NeuronBlocks};
use crate::model::weights::Layer;
use std::ops::Range;

/// hidden += FFN(x). `x` is the normalised input, set for the type of `layer.ffn`; `hidden` is `[n, hidden]`. A neuron is
/// active for a column when |act(gate)| (plain FFNs: |act(up)|) is above `activation_threshold`: 0 for ReLU models, a CATS threshold for
/// others. [`Work::All`] has no threshold.
pub fn ffn(
    mut compute: Compute<'_>,
    layer: &Layer,
    x: &Columns,
    work: Work,
    activation_threshold: f32,
    buffers: &mut FfnBuffers,
    hidden: &mut [f32],
) -> Counts {
    if let FfnWeights::Matrices(weights) = &layer.ffn {
        assert!(matches!(work, Work::All), "whole matrices are computed for every token");
        return whole::ffn(compute, layer, weights, x, buffers, hidden);
    }
    let config = compute.config;
    let FfnBuffers { partial, gates, activations: acts, fired, active, columns, inputs, .. } = buffers;
    let list = match work {
        Work::All | Work::Some(_) if x.n > MAX_COLUMNS => {
            let neurons = if let Work::Some(list) = work { Neurons::Some(list) } else { Neurons::All(layer.width) };
            gates.resize(x.n * neurons.len(), 0.0);
            acts.resize(x.n * neurons.len(), 0.0);
            products(compute.again(), layer, x, neurons, gates, acts);
            columns.scale = inputs.take(Input::Down, acts);
            down(compute, layer, neurons, acts, x.n, columns, hidden);
            return rows_of(config, neurons.len());
        }
        Work::All => None,
        Work::Some(_) => unreachable!("only for more than {MAX_COLUMNS} columns"),
        Work::Selected(selection) => Some((selection, None)),
        Work::Gates(known) => {
            fired.fired(config, known, (x.n, layer.width), activation_threshold);
            Some((&*fired, Some(known)))
        }
    };
    assert!(x.n <= MAX_COLUMNS);
    let Compute { pool, kernels, .. } = compute;
    let sparse = list.map(|(list, known)| Sparse { kernels, config, layer, x, list, known, activation_threshold });
    let neurons = list.map_or(layer.width, |(list, _)| list.neurons.len());

    let units = units_of(neurons, layer.block().bytes());
    let (size, partial) = unit_buffers(partial, config, layer, x.n, units);
    let parts = Parts::new(partial);
    let counts = SharedCounts::default();
    active.clear();
    // Taken for all neurons, so that a longer list later allocates nothing.
    active.reserve(layer.width);
    active.resize(list.map_or(0, |_| neurons), 0);
    let active = Parts::new(active);
    pool.run(units, |_, unit| {
        // SAFETY: each unit has its own part.
        let out = unsafe { parts.part(unit * size..(unit + 1) * size) };
        out.fill(0.0);
        let out = &mut out[..x.n * config.hidden];
        let range = unit * neurons / units..(unit + 1) * neurons / units;
        match &sparse {
            None => run_blocks(kernels, config, layer, x, range, out),
            Some(sparse) => {
                // SAFETY: each unit has its own neurons.
                counts.add(sparse.run(range.clone(), out, unsafe { active.part(range) }));
            }
        }
    });
    add_units(pool, partial, size, config, layer, hidden);
    if sparse.is_none() { rows_of(config, layer.width) } else { counts.sum() }
}

/// A list of neurons and what is needed to compute them.
pub(super) struct Sparse<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) config: &'a ModelConfig,
    pub(super) layer: &'a Layer,
    pub(super) x: &'a Columns,
    pub(super) list: &'a Selection,
    pub(super) known: Option<&'a [f32]>,
    pub(super) activation_threshold: f32,
}

impl Sparse<'_> {
    /// Adds to `out`, `[n, hidden]`, what neurons `range` of the list contribute, and sets the bits of those that are active in
    /// `active`, which has a zero for each.
    fn run(&self, range: Range<usize>, out: &mut [f32], active: &mut [u32]) -> Counts {
        if self.streams(&range) {
            return self.stream(range, out, active);
        }
        let Sparse { config, layer, x, list, activation_threshold, .. } = *self;
        let (n, plain, block_bytes) = (x.n, config.ffn_kind == Ffn::Plain, layer.block().bytes());
        let (gate_or_up, up_part, down) = (layer.block().gate_or_up(), layer.block().up(), layer.block().down());
        // Where what is read of a neuron begins in its block.
        let first = if self.known.is_some() { up_part.offset } else { 0 };
        let mut downs = Downs::of(self.kernels, layer, n);
        let mut counts = Counts::default();
        let (mut gate, mut up, mut a) = ([0f32; MAX_COLUMNS], [0f32; MAX_COLUMNS], [0f32; MAX_COLUMNS]);
        for i in range.clone() {
            let (neuron, wanted) = (list.neurons[i].index(), list.masks[i]);
            let block = layer.neurons().ptr(neuron);
            // Bytes to the block of the next one, or where all that is read fires, of one behind it.
            let later = (i + self.lookahead()).min(range.end - 1);
            let next = (list.neurons[later].index() - neuron) * block_bytes;
            // What to prefetch while this part is read: the same part of the next block, where what is read of it lies apart.
            let apart = next + first > block_bytes;
            let ahead = |part: BlockPart| if apart { next } else { part.quant.ahead(part.bytes) };
            let bias = layer.up_bias.get(neuron).copied().unwrap_or(0.0);
            match self.known {
                Some(known) => (0..n).for_each(|b| gate[b] = known[b * layer.width + neuron]),
                None => {
                    self.dot(gate_or_up, block, ahead(gate_or_up), &mut gate);
                    *if plain { &mut counts.ups } else { &mut counts.gates } += 1;
                    if plain {
                        gate[..n].iter_mut().for_each(|gate| *gate += bias);
                    }
                }
            }
            let fires =
                |b: usize| wanted >> b & 1 == 1 && config.activation.apply(gate[b]).abs() > activation_threshold;
            let mask = (0..n).fold(0u32, |mask, b| mask | (fires(b) as u32) << b);
            if mask == 0 {
                continue;
            }
            if plain {
                up = gate;
            } else {
                self.dot(up_part, block, ahead(up_part), &mut up);
                counts.ups += 1;
                up[..n].iter_mut().for_each(|up| *up += bias);
            }
            for b in 0..n {
                let fires = mask >> b & 1 == 1;
                a[b] = if fires { config.ffn_kind.activation(config.activation, gate[b], up[b]) } else { 0.0 };
            }
            let fired = a[..n].iter().enumerate().fold(0, |bits, (b, &a)| bits | u32::from(a != 0.0) << b);
            if fired == 0 {
                continue;
            }
            active[i - range.start] = fired;
            counts.active += u64::from(fired.count_ones());
            downs.add(block, ahead(down), &a[..n], out);
            counts.downs += 1;
        }
        downs.flush(out);
        counts
    }

    /// How many neurons of the list further rows are prefetched. Where gates are known, all that is read of a neuron is used, and its rows
    /// are short.
    const fn lookahead(&self) -> usize {
        if self.known.is_some() { 2 } else { 1 }
    }

    /// Whether so many neurons of the range are listed that reading those between them, too, is faster than leaving them out. Only
    /// where what is listed fires: of a ReLU's neurons most rows would be read for nothing.
    fn streams(&self, range: &Range<usize>) -> bool {
        let Sparse { config, layer, list, .. } = *self;
        // Kernels that prefetch far ahead read the list as fast (runs/2026-11-22-avx2-sparse), and the others do so in floats.
        let floats = layer.block().down().quant.input() == rows::Input::Floats;
        let as_fast = floats || self.kernels.lists_as_fast || config.activation.is_sparse();
        if range.is_empty() || self.known.is_some() || as_fast {
            return false;
        }
        // With AVX-512: below this share of neurons left out the list was slower (runs/2026-11-24-avx512-amd).
        let left_out = 35;
        let span = list.neurons[range.end - 1].index() - list.neurons[range.start].index() + 1;
        range.len() * 100 > span * (100 - left_out)
    }

    /// As [`Sparse::run`], reading every row from the first neuron of the range to the last.
    fn stream(&self, range: Range<usize>, out: &mut [f32], active: &mut [u32]) -> Counts {
        let Sparse { kernels, config, layer, x, list, activation_threshold, .. } = *self;
        let (n, dots) = (x.n, layer.block().parts().len() - 1);
        let (mut products, mut a) = ([0f32; 2 * MAX_COLUMNS], [0f32; MAX_COLUMNS]);
        let mut downs = Downs::of(kernels, layer, n);
        let ahead = dense_ahead(kernels, layer.block().down());
        let span = list.neurons[range.start].0..list.neurons[range.end - 1].0 + 1;
        let (read, mut pairs, mut at) = (span.len() as u64, 0, range.start);
        for neuron in span {
            let listed = list.neurons[at].0 == neuron;
            let wanted = if listed { list.masks[at] } else { 0 };
            let mut fired = 0;
            // SAFETY: the rows are inside the section; the kernel is for this machine.
            unsafe { input_products(kernels, layer.neurons(), neuron as usize, x, &mut products) };
            let bias = layer.up_bias.get(neuron as usize).copied().unwrap_or(0.0);
            for (b, (a, products)) in a.iter_mut().zip(products.chunks_exact(dots)).take(n).enumerate() {
                let (gate, up) = (products[0] + if dots == 1 { bias } else { 0.0 }, products[dots - 1] + bias);
                let fires = wanted >> b & 1 == 1 && config.activation.apply(gate).abs() > activation_threshold;
                *a = if fires { config.ffn_kind.activation(config.activation, gate, up) } else { 0.0 };
                fired |= u32::from(*a != 0.0) << b;
            }
            active[at - range.start] |= fired;
            at = (at + usize::from(listed)).min(range.end - 1);
            pairs += u64::from(fired.count_ones());
            downs.add(layer.neurons().ptr(neuron as usize), ahead, &a[..n], out);
        }
        downs.flush(out);
        Counts { gates: if dots == 1 { 0 } else { read }, ups: read, downs: read, active: pairs }
    }

    /// out[b] = a part of the block at `block` times column b. `ahead` bytes further is what will be read next.
    pub(super) fn dot(&self, part: BlockPart, block: *const u8, ahead: usize, out: &mut [f32; MAX_COLUMNS]) {
        let rows = Rows { first: block.wrapping_add(part.offset), stride: part.bytes, ahead };
        // SAFETY: the row is inside the section; the kernel is for this machine; there are at most MAX_COLUMNS columns.
        unsafe { self.kernels.dot(part.quant)(rows, 1, self.x, out.as_mut_ptr(), 1) };
    }
}

/// What to prefetch while a down row is added and every row is read: with AVX-512 the short rows of q4_0 do better with the whole next
/// row, the others with the next lines (`touch` in `cpu/avx512/axpy.rs`).
fn dense_ahead(kernels: &Kernels, down: BlockPart) -> usize {
    if down.quant == Quant::Q4 || kernels.adds_as_read(down.quant) { down.quant.ahead(down.bytes) } else { 0 }
}

/// Products of a neuron's gate and up with each column, `[columns, gate and up]`, or of up, `[columns]`.
///
/// # Safety
/// The kernels are for this machine; there are at most [`MAX_COLUMNS`] columns.
#[inline]
unsafe fn input_products(
    kernels: &Kernels,
    blocks: &NeuronBlocks,
    neuron: usize,
    x: &Columns,
    products: &mut [f32; 2 * MAX_COLUMNS],
) {
    let (layout, out) = (&blocks.layout, products.as_mut_ptr());
    let (first, up, dots) = (layout.gate_or_up(), layout.up(), layout.parts().len() - 1);
    // SAFETY: the rows are inside the blocks.
    unsafe {
        if first.quant == up.quant {
            kernels.dot(up.quant)(blocks.input_rows(neuron), dots, x, out, dots);
        } else {
            kernels.dot(first.quant)(blocks.part_rows(first, neuron), 1, x, out, dots);
            kernels.dot(up.quant)(blocks.part_rows(up, neuron), 1, x, out.add(1), dots);
        }
    }
}

/// Adds to `out`, `[n, hidden]`, what `neurons` contribute.
pub(super) fn run_blocks(
    kernels: &Kernels,
    config: &ModelConfig,
    layer: &Layer,
    x: &Columns,
    neurons: Range<usize>,
    out: &mut [f32],
) {
    let down = layer.block().down();
    let (n, dots) = (x.n, layer.block().parts().len() - 1);
    // [columns, gate and up], or [columns, up].
    let mut products = [0f32; 2 * MAX_COLUMNS];
    let mut a = [0f32; MAX_COLUMNS];
    let mut downs = Downs::of(kernels, layer, n);
    // With the arithmetic of several columns between them, lines have to be asked for, as the dots do.
    let ahead = if n > 1 { 2 * down.bytes } else { dense_ahead(kernels, down) };
    for neuron in neurons {
        // SAFETY: the rows are inside the section; the kernel is for this machine.
        unsafe { input_products(kernels, layer.neurons(), neuron, x, &mut products) };
        let bias = layer.up_bias.get(neuron).copied().unwrap_or(0.0);
        for (a, products) in a.iter_mut().zip(products.chunks_exact(dots)).take(n) {
            *a = config.ffn_kind.activation(config.activation, products[0], products[dots - 1] + bias);
        }
        // Also where a is zero: skipping down rows breaks the stream, and what is left comes more slowly than all.
        downs.add(layer.neurons().ptr(neuron), ahead, &a[..n], out);
    }
    downs.flush(out);
}

/// Down rows on their way to the output, some at a time.
pub(super) struct Downs<'a> {
    kernels: &'a Kernels,
    part: BlockPart,
    cols: usize,
    n: usize,
    together: usize,
    count: usize,
    /// Of the last row.
    ahead: usize,
    rows: [*const u8; MAX_AXPY_ROWS],
    a: [f32; MAX_AXPY_ROWS * MAX_COLUMNS],
}

impl<'a> Downs<'a> {
    pub(super) fn of(kernels: &'a Kernels, layer: &Layer, n: usize) -> Downs<'a> {
        Downs::new(kernels, layer.block().down(), layer.neurons().cols, n)
    }

    pub(super) fn new(kernels: &'a Kernels, part: BlockPart, cols: usize, n: usize) -> Downs<'a> {
        // The output of several columns does not stay in L1 beside their inputs: it is loaded and stored once for some rows.
        let together = if n > 1 { MAX_AXPY_ROWS } else { kernels.rows_together(part.quant) };
        let a = [0.0; MAX_AXPY_ROWS * MAX_COLUMNS];
        Downs { kernels, part, cols, n, together, count: 0, ahead: 0, rows: [std::ptr::null(); MAX_AXPY_ROWS], a }
    }

    /// Where an axpy that waited for memory would hold back the stream, the row is read here, where it lies, and added later.
    pub(super) fn add(&mut self, block: *const u8, ahead: usize, a: &[f32], out: &mut [f32]) {
        let row = block.wrapping_add(self.part.offset);
        if self.n > 1 || !self.kernels.adds_as_read(self.part.quant) {
            // SAFETY: the row is inside the section; the kernel is for this machine.
            unsafe { (self.kernels.touch)(row, self.part.bytes, ahead) };
        }
        self.ahead = ahead;
        self.rows[self.count] = row;
        self.a[self.count * self.n..(self.count + 1) * self.n].copy_from_slice(a);
        self.count += 1;
        if self.count == self.together {
            self.flush(out);
        }
    }

    pub(super) fn flush(&mut self, out: &mut [f32]) {
        let (rows, a) = (&self.rows[..self.count], &self.a[..self.count * self.n]);
        // SAFETY: as above; `add` keeps as many coefficients as the rows want.
        unsafe { self.kernels.axpy(self.part.quant)(rows, self.ahead, a, self.cols, out) };
        self.count = 0;
    }
}
