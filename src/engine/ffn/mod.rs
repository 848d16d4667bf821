//! The FFN over neuron blocks: gate, up and down of a neuron are read together, all neurons' or some neurons' only.
//!
//! Each unit of work is a fixed range of neurons (of all, or of the list) with an output buffer of its own; the buffers are
//! added in order. So the result does not depend on how many threads there are or which one was faster.

mod ahead;
mod cached;
mod chosen;
mod experts;
mod fired;
mod firing_experts;
mod many;
mod predicted_experts;
mod scaled_experts;
mod shared;
mod units;
mod whole;

use crate::cpu::aligned::Aligned;
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, Kernels, MAX_AXPY_ROWS, MAX_COLUMNS, Rows, ThreadPool};
use crate::device::NONE;
use crate::engine::inputs::{Input, Inputs};
use crate::exp::silu;
use crate::formats::rows::{self, Quant};
use crate::host_cache::units_of;
use crate::ids::StoreId;
use crate::model::block::BlockPart;
use crate::model::config::{Activation, Ffn, ModelConfig};
use crate::model::ffn_weights::{FfnWeights, NeuronBlocks};
use crate::model::weights::Layer;
use crate::ops::math;
pub(super) use cached::Tools as CachedTools;
pub use cached::{CachedFfn, HostBudget};
pub use chosen::{Chosen, Scorer};
pub use experts::{ExpertBuffers, ExpertsRead, experts, experts_left, experts_wanted};
pub use many::{Tile, activations, active, down, products};
pub use predicted_experts::OnDevice;
pub use shared::{shared_expert, shared_weight};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use units::{add_units, unit_buffers};

/// Working memory that the FFN keeps between calls.
#[derive(Default)]
pub struct FfnBuffers {
    /// `[units, n, hidden]`, each unit's part beginning a cache line.
    partial: Aligned,
    /// `[n, ffn]`, for more than [`MAX_COLUMNS`] columns.
    gates: Vec<f32>,
    activations: Vec<f32>,
    /// The neurons that fire, for [`Work::Gates`].
    fired: Selection,
    /// For each neuron of the last list that was computed, bit b: it was active for column b.
    active: Vec<u32>,
    /// What a chunk's down reads.
    columns: Columns,
    whole: whole::WholeBuffers,
    /// The inputs of the layer's products.
    pub(super) inputs: Inputs,
}

impl FfnBuffers {
    /// What `down` reads, in each of the FFN's forms.
    pub(super) fn columns(&mut self) -> [&mut Columns; 2] {
        [&mut self.columns, &mut self.whole.columns]
    }

    /// For each neuron of the selection that was computed last, bit b: it was active for column b, `[neurons]`.
    pub fn active(&self) -> &[u32] {
        &self.active
    }

    /// For how many of the `n` tokens of the last dense pass over more than [`MAX_COLUMNS`] each of `neurons`, which it computed, was
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
        out.resize(config.ffn, NONE);
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

/// Neurons of a layer that are computed for every column, ascending.
#[derive(Clone, Copy)]
pub enum Neurons<'a> {
    /// All neurons; how many there are.
    All(usize),
    /// These.
    Some(&'a [StoreId]),
}

impl Neurons<'_> {
    fn len(self) -> usize {
        match self {
            Neurons::All(ffn) => ffn,
            Neurons::Some(list) => list.len(),
        }
    }

    /// Id in the store of number `i`.
    fn store_index(self, i: usize) -> usize {
        match self {
            Neurons::All(_) => i,
            Neurons::Some(list) => list[i].index(),
        }
    }

    /// Calls `see(numbers, id of the first)` for each run of neighbours in the store.
    fn runs(self, numbers: Range<usize>, mut see: impl FnMut(Range<usize>, usize)) {
        let mut first = numbers.start;
        while first < numbers.end {
            let start = self.store_index(first);
            let mut end = first + 1;
            while end < numbers.end && self.store_index(end) == start + end - first {
                end += 1;
            }
            see(first..end, start);
            first = end;
        }
    }
}

/// Which neurons of a layer are computed for which column.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// The neurons, ascending.
    pub neurons: Vec<StoreId>,
    /// For each neuron, bit b: it is computed for column b.
    pub masks: Vec<u32>,
}

/// What [`ffn`] computes. All but the first two take at most [`MAX_COLUMNS`] columns.
#[derive(Clone, Copy)]
pub enum Work<'a> {
    /// Every neuron: reads every row, whatever the input.
    All,
    /// All rows of these neurons only, ascending; for more than [`MAX_COLUMNS`] columns.
    Some(&'a [StoreId]),
    /// These neurons; their up and down rows are read only if the gate is above the activation threshold for some column.
    Selected(&'a Selection),
    /// Gate pre-activations `[n, ffn]` of all neurons are given; up and down rows are read of those that fire.
    Gates(&'a [f32]),
}

/// Rows that were read, and what they gave. A plain FFN has no gates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Gate rows.
    pub gates: u64,
    /// Up rows.
    pub ups: u64,
    /// Down rows.
    pub downs: u64,
    /// Neurons times columns whose activation was not zero; not counted by a dense pass.
    pub active: u64,
}

/// Counts that several threads add to.
#[derive(Default)]
struct SharedCounts([AtomicU64; 4]);

impl SharedCounts {
    fn add(&self, counts: Counts) {
        let Counts { gates, ups, downs, active } = counts;
        for (sum, n) in self.0.iter().zip([gates, ups, downs, active]) {
            sum.fetch_add(n, Ordering::Relaxed);
        }
    }

    fn sum(self) -> Counts {
        let [gates, ups, downs, active] = self.0.map(AtomicU64::into_inner);
        Counts { gates, ups, downs, active }
    }
}

impl Counts {
    /// All rows that were read.
    pub fn rows(&self) -> u64 {
        self.gates + self.ups + self.downs
    }

    /// Bytes of these rows, of the FFN with these weights; of whole matrices all rows were read.
    pub fn bytes(&self, weights: &FfnWeights) -> u64 {
        let FfnWeights::Neurons(NeuronBlocks { layout: block, .. }) = weights else { return weights.bytes() };
        let parts = [(self.gates, block.gate_or_up()), (self.ups, block.up()), (self.downs, block.down())];
        parts.into_iter().map(|(rows, part)| rows * part.bytes as u64).sum()
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.gates += other.gates;
        self.ups += other.ups;
        self.downs += other.downs;
        self.active += other.active;
    }
}

/// The activations of neurons from products of as many gates and ups. SiLU and what gpt-oss has are loops of their own, which vectorise.
pub fn activate_gated(kind: Ffn, act: Activation, gates: &[f32], ups: &[f32], out: &mut [f32]) {
    let all = out.iter_mut().zip(gates).zip(ups);
    match (kind, act) {
        (Ffn::Gated, Activation::Silu) => {
            for ((out, &gate), &up) in all {
                let g = silu(gate);
                *out = if g == 0.0 { 0.0 } else { g * up };
            }
        }
        (Ffn::GatedClamped, Activation::ClampedSwish) => {
            for ((out, &gate), &up) in all {
                *out = Ffn::GatedClamped.activation(Activation::ClampedSwish, gate, up);
            }
        }
        _ => {
            for ((out, &gate), &up) in all {
                *out = kind.activation(act, gate, up);
            }
        }
    }
}

/// hidden += FFN(x). `x` is the normalised input, set for the type of `layer.ffn`; `hidden` is `[n, hidden]`. A neuron is
/// active for a column when |act(gate)| (plain FFNs: |act(up)|) is above `activation_threshold`: 0 for ReLU models, a CATS threshold for
/// others. [`Work::All`] has no threshold.
#[allow(clippy::too_many_arguments)]
pub fn ffn(
    pool: &mut ThreadPool,
    kernels: &Kernels,
    config: &ModelConfig,
    layer: &Layer,
    x: &Columns,
    work: Work,
    activation_threshold: f32,
    tiles: &mut [Tile],
    buffers: &mut FfnBuffers,
    hidden: &mut [f32],
) -> Counts {
    if let FfnWeights::Matrices(weights) = &layer.ffn {
        assert!(matches!(work, Work::All), "whole matrices are computed for every token");
        return whole::ffn(pool, kernels, config, layer, weights, x, buffers, hidden);
    }
    let FfnBuffers { partial, gates, activations: acts, fired, active, columns, inputs, .. } = buffers;
    let list = match work {
        Work::All | Work::Some(_) if x.n > MAX_COLUMNS => {
            let neurons = if let Work::Some(list) = work { Neurons::Some(list) } else { Neurons::All(config.ffn) };
            gates.resize(x.n * neurons.len(), 0.0);
            acts.resize(x.n * neurons.len(), 0.0);
            products(pool, kernels, config, layer, x, neurons, gates, acts);
            columns.scale = inputs.take(Input::Down, acts);
            down(pool, kernels, config, layer, neurons, acts, x.n, tiles, columns, hidden);
            return rows_of(config, neurons.len());
        }
        Work::All => None,
        Work::Some(_) => unreachable!("only for more than {MAX_COLUMNS} columns"),
        Work::Selected(selection) => Some((selection, None)),
        Work::Gates(known) => {
            fired.fired(config, known, x.n, activation_threshold);
            Some((&*fired, Some(known)))
        }
    };
    assert!(x.n <= MAX_COLUMNS);
    let sparse = list.map(|(list, known)| Sparse { kernels, config, layer, x, list, known, activation_threshold });
    let neurons = list.map_or(config.ffn, |(list, _)| list.neurons.len());

    let units = units_of(neurons, layer.block().bytes());
    let (size, partial) = unit_buffers(partial, config, layer, x.n, units);
    let parts = Parts::new(partial);
    let counts = SharedCounts::default();
    active.clear();
    // Taken for all neurons, so that a longer list later allocates nothing.
    active.reserve(config.ffn);
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
    if sparse.is_none() { rows_of(config, config.ffn) } else { counts.sum() }
}

fn rows_of(config: &ModelConfig, neurons: usize) -> Counts {
    let n = neurons as u64;
    Counts { gates: if config.ffn_kind == Ffn::Plain { 0 } else { n }, ups: n, downs: n, active: 0 }
}

fn add_down_bias(layer: &Layer, hidden: &mut [f32]) {
    if !layer.down_bias.is_empty() {
        hidden.chunks_exact_mut(layer.down_bias.len()).for_each(|x| math::add(x, &layer.down_bias));
    }
}

/// A list of neurons and what is needed to compute them.
struct Sparse<'a> {
    kernels: &'a Kernels,
    config: &'a ModelConfig,
    layer: &'a Layer,
    x: &'a Columns,
    list: &'a Selection,
    known: Option<&'a [f32]>,
    activation_threshold: f32,
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
                Some(known) => (0..n).for_each(|b| gate[b] = known[b * config.ffn + neuron]),
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
    fn dot(&self, part: BlockPart, block: *const u8, ahead: usize, out: &mut [f32; MAX_COLUMNS]) {
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
fn run_blocks(
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
struct Downs<'a> {
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
    fn of(kernels: &'a Kernels, layer: &Layer, n: usize) -> Downs<'a> {
        Downs::new(kernels, layer.block().down(), layer.neurons().cols, n)
    }

    fn new(kernels: &'a Kernels, part: BlockPart, cols: usize, n: usize) -> Downs<'a> {
        // The output of several columns does not stay in L1 beside their inputs: it is loaded and stored once for some rows.
        let together = if n > 1 { MAX_AXPY_ROWS } else { kernels.rows_together(part.quant) };
        let a = [0.0; MAX_AXPY_ROWS * MAX_COLUMNS];
        Downs { kernels, part, cols, n, together, count: 0, ahead: 0, rows: [std::ptr::null(); MAX_AXPY_ROWS], a }
    }

    /// Where an axpy that waited for memory would hold back the stream, the row is read here, where it lies, and added later.
    fn add(&mut self, block: *const u8, ahead: usize, a: &[f32], out: &mut [f32]) {
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

    fn flush(&mut self, out: &mut [f32]) {
        let (rows, a) = (&self.rows[..self.count], &self.a[..self.count * self.n]);
        // SAFETY: as above; `add` keeps as many coefficients as the rows want.
        unsafe { self.kernels.axpy(self.part.quant)(rows, self.ahead, a, self.cols, out) };
        self.count = 0;
    }
}
