//! Neuron blocks for all columns of a prompt's chunk.

use super::host::{HostMemory, numbers, put, words};
use super::launch::{
    Addresses, GROUPED_TILE_BYTES, Launch, Launches, RowKind, WIDE_TILE_BYTES, activation_words, types_word,
};
use super::quantize::{codes_bytes, halved_input, halves_bytes, input};
use super::sparse_ffn::{PartRows, SlotBlocks};
use super::{DeviceKernel, Function, KernelWork, NONE, Operand, View};
use crate::cpu::{Columns, Kernels, Rows};
use crate::device::Buffer;
use crate::formats::rows;
use crate::model::block::BlockLayout;
use crate::model::config::{Activation, Ffn};

pub(super) const FUNCTIONS: &[&[&str]] = &[
    &["dense_neurons_f32", "dense_neurons_f16", "dense_neurons_q8_0", "dense_neurons_q4_0", "dense_neurons_any"],
    &["dense_neurons_tensor_f16", "dense_neurons_tensor_q8_0", "dense_neurons_tensor_q4_0"],
    &["dense_down_f32", "dense_down_f16", "dense_down_q8_0", "dense_down_q4_0", "dense_down_any"],
    &["dense_down_tensor_f16"],
];
/// By type.
const NEURONS: Function = Function::named("dense_neurons_f32");
const TENSOR_NEURONS: Function = Function::named("dense_neurons_tensor_f16");
const DOWN: Function = Function::named("dense_down_f32");
const TENSOR_DOWN: Function = Function::named("dense_down_tensor_f16");

/// What the neurons of some blocks add to one layer's FFN for a chunk of a prompt. All of them are computed for every column (PowerInfer
/// 8.2: long prompts run dense), and it is counted in how many columns each neuron was active.
#[derive(Clone, Copy, Debug)]
pub struct DenseFfn {
    /// What a neuron's block holds, and where. Gate and up both take f32 inputs, or both int8.
    pub layout: BlockLayout,
    /// Which rows a neuron has.
    pub kind: Ffn,
    /// The activation function of the gate, or of up where there is no gate.
    pub activation: Activation,
    /// Activation threshold: above zero a neuron is active when |act(gate)| is above it (plain FFNs: |act(up)|); else when its product
    /// is not zero.
    pub activation_threshold: f32,
    /// Numbers of a row.
    pub hidden: usize,
    /// Neurons of the layer; of a mixture those of all experts, one expert after the other.
    pub ffn: usize,
    /// Blocks.
    pub slots: usize,
    /// Columns.
    pub n: usize,
    /// The rows of the neurons (`formats::rows`).
    pub blocks: SlotBlocks,
    /// Of a mixture, what each expert's neurons count for each column; `None`: as they are.
    pub weights: Option<ColumnWeights>,
    /// `[slots]` u32: the neuron in each, or [`NONE`].
    pub bucket: View,
    /// `[ffn]` f32, the bias of up; a buffer of no bytes where there is none.
    pub up_bias: Buffer,
    /// Normalised input, `[n, hidden]`.
    pub x: View,
    /// Scratch memory for the neurons' products, `[n, slots]` f32.
    pub products: Buffer,
    /// `[parts, ffn]` u32; of the neurons that are here: in how many columns each was active, as a sum over parts.
    pub counts: View,
    /// `[n, hidden]`, to which the share is added.
    pub out: View,
}

/// What the outputs of a mixture's experts are multiplied by, `[experts, n]` f32; 0 for columns that do not have an expert, of which its neurons are
/// not active.
#[derive(Clone, Copy, Debug)]
pub struct ColumnWeights {
    /// Where they lie.
    pub at: View,
    /// Experts of the layer.
    pub experts: usize,
}

/// Buffers of a run on the host.
#[derive(Default)]
pub struct Scratch {
    columns: Columns,
    /// Gates and ups, `[n, slots]` each.
    gates: Vec<f32>,
    ups: Vec<f32>,
    /// A down row, `[hidden]`.
    row: Vec<f32>,
    /// `[n, hidden]`
    out: Vec<f32>,
    /// `[parts, ffn]`
    counts: Vec<u32>,
}

impl DenseFfn {
    /// Parts that counts of `n` columns come in: one for the columns of each tile.
    pub fn parts(layout: &BlockLayout, n: usize) -> usize {
        if RowKind::of_block(layout).is_grouped() { DenseFfn::most_parts(n) } else { n.div_ceil(64) }
    }

    /// The same of the smallest tiles.
    pub const fn most_parts(n: usize) -> usize {
        n.div_ceil(32)
    }

    /// Gates and ups of all slots and columns; without a gate both are up's.
    fn dots(&self, rows: &PartRows<'_>, kernels: &Kernels, columns: &Columns, [gates, ups]: [&mut Vec<f32>; 2]) {
        let slots = self.slots;
        for (index, to) in [(0, gates), (self.kind.rows() - 2, ups)] {
            to.resize(self.n * slots, 0.0);
            let (part, (first, stride)) = (self.layout.parts()[index], rows[index]);
            let rows = Rows { first: first.as_ptr(), stride, ahead: 0 };
            // SAFETY: the slots hold the rows, `to` is [n, slots]; the kernels are for this machine.
            unsafe { kernels.dot(part.quant)(rows, slots, columns, to.as_mut_ptr(), slots) };
        }
    }

    /// What a neuron's down row is multiplied by, and whether it was active.
    fn product(&self, gate: f32, up: f32) -> (f32, bool) {
        // Without a gate, up takes its place.
        let value = self.activation.apply(if self.kind == Ffn::Plain { up } else { gate });
        let product = match self.kind {
            _ if value == 0.0 => 0.0,
            Ffn::Gated => value * up,
            Ffn::Plain => value,
            kind => kind.activation(self.activation, gate, up),
        };
        (
            product,
            if self.activation_threshold > 0.0 { value.abs() > self.activation_threshold } else { product != 0.0 },
        )
    }
}

impl DeviceKernel for DenseFfn {
    type Scratch = Scratch;

    fn operands(&self, see: &mut dyn FnMut(Operand)) {
        let &DenseFfn { hidden, ffn, slots, n, .. } = self;
        self.blocks.operands(&self.layout, slots, see);
        self.weights.into_iter().for_each(|of| see(Operand::read(of.at, of.experts * n * 4)));
        see(Operand::read(self.bucket, slots * 4));
        see(Operand::optional(self.up_bias, ffn * 4));
        see(Operand::read(self.x, n * hidden * 4));
        see(Operand::written(self.products, n * slots * 4));
        see(Operand::written(self.counts, DenseFfn::parts(&self.layout, n) * ffn * 4));
        see(Operand::written(self.out, n * hidden * 4));
    }

    fn run(&self, at: &dyn HostMemory, kernels: &Kernels, scratch: &mut Scratch) -> KernelWork {
        let &DenseFfn { ref layout, hidden, ffn, slots, n, .. } = self;
        let (block_bytes, down) = (layout.bytes(), layout.down());
        let rows = self.blocks.here(at, layout, slots);
        let weights = self.weights.map(|of| (numbers(at, of.at, of.experts * n), ffn / of.experts));
        let (bucket, up_bias) = (words(at, self.bucket, slots), at.of(self.up_bias));
        let Scratch { columns, gates, ups, row, out, counts } = scratch;
        columns.set_for(numbers(at, self.x, n * hidden), n, [layout.gate_or_up().quant, layout.up().quant]);
        if slots > 0 {
            self.dots(&rows, kernels, columns, [&mut *gates, &mut *ups]);
        }
        out.clear();
        out.extend_from_slice(numbers(at, self.out, n * hidden));
        counts.clear();
        counts.extend_from_slice(words(at, self.counts, DenseFfn::parts(layout, n) * ffn));
        row.resize(hidden, 0.0);
        let mut work = KernelWork::default();
        for (slot, &neuron) in bucket.iter().enumerate().filter(|(_, neuron)| **neuron != NONE) {
            let neuron = neuron as usize;
            assert!(neuron < ffn, "the bucket names neuron {neuron} of {ffn}");
            let (downs, stride) = rows[self.kind.rows() - 1];
            rows::decode(down.quant, &downs[slot * stride..][..down.bytes], row);
            let of_columns = weights.map(|(weights, each)| &weights[neuron / each * n..][..n]);
            work += KernelWork::products(block_bytes as u64, self.kind.rows() * hidden, n);
            let bias = up_bias.get(neuron).copied().unwrap_or(0.0);
            let mut count = 0;
            for (b, out) in out.chunks_exact_mut(hidden).enumerate() {
                let (mut product, mut active) = self.product(gates[b * slots + slot], ups[b * slots + slot] + bias);
                if let Some(weights) = of_columns {
                    product = if weights[b] == 0.0 { 0.0 } else { product * weights[b] };
                    active &= product != 0.0;
                }
                count += u32::from(active);
                if product != 0.0 {
                    out.iter_mut().zip(&*row).for_each(|(out, weight)| *out += product * weight);
                }
            }
            counts.iter_mut().skip(neuron).step_by(ffn).for_each(|count| *count = 0);
            counts[neuron] = count;
        }
        work
    }

    fn store(&self, scratch: &Scratch, at: &mut dyn HostMemory) {
        put(at, self.out, &scratch.out);
        put(at, self.counts, bytemuck::cast_slice(&scratch.counts));
    }

    fn launch(&self, at: &Addresses<'_>, scratch: u64, out: &mut Launches) {
        let &DenseFfn { ref layout, hidden, ffn, slots, n, .. } = self;
        if slots == 0 {
            return;
        }
        let (rows, types) = (RowKind::of_block(layout), types_word(layout));
        const WARPS: usize = 8;
        let tensor = at.tensor_tiles(rows);
        // Down rows of grouped types have their scales across the sum: only those of f16 are the tensor cores'.
        let halves = tensor.filter(|tiles| tiles.halves);
        let x = match halves {
            Some(_) => halved_input(at.view(self.x), scratch, n, hidden, out),
            None => input((rows, layout.gate_or_up().quant), at.view(self.x), scratch, n, hidden, out),
        };
        let (kind, activation, parameter) = activation_words(self.kind, self.activation);
        let (bucket, products) = (at.view(self.bucket), at.buffer(self.products));
        let rows_of = |index: usize| {
            let (first, stride) = self.blocks.rows(layout, index);
            (at.view(first), stride)
        };
        let (gates, ups, downs) = (rows_of(0), rows_of(self.kind.rows() - 2), rows_of(self.kind.rows() - 1));
        let (weights, each) = self.weights.map_or((0, 1), |of| (at.view(of.at), ffn / of.experts));
        // A tile has two rows of a neuron, or one of twice as many.
        let (neurons, shared) = if rows.is_grouped() { (16, GROUPED_TILE_BYTES) } else { (64, WIDE_TILE_BYTES) };
        let neurons = if self.kind == Ffn::Plain { 2 * neurons } else { neurons };
        let grid = [slots.div_ceil(neurons), DenseFfn::parts(layout, n), 1];
        let counts = at.view(self.counts);
        let operands = [gates.0, ups.0, bucket, at.optional(self.up_bias), x, products, counts, weights];
        let (function, shared) = match tensor {
            Some(tiles) => (TENSOR_NEURONS.next(tiles.index), tiles.shared),
            None => (NEURONS.next(rows.index()), shared),
        };
        let launch = Launch::new(function, grid, WARPS, shared).words(operands);
        let launch = launch.ints([gates.1, ups.1, hidden, slots, n, ffn, kind, activation]);
        let launch = launch.float(parameter).float(self.activation_threshold).int(types);
        out.push(launch.ints([each]));
        let grid = [hidden.div_ceil(128), n.div_ceil(64), 1];
        let (function, products, shared) = match halves {
            // The input's scratch is free by then.
            Some(tiles) => (TENSOR_DOWN, halved_input(products, scratch, n, slots, out), tiles.shared),
            None => (DOWN.next(rows.index()), products, WIDE_TILE_BYTES),
        };
        let launch = Launch::new(function, grid, WARPS, shared);
        let launch = launch.words([downs.0, bucket, products, at.view(self.out)]);
        out.push(launch.ints([downs.1, hidden, slots, n, self.kind.rows(), types]));
    }

    fn scratch_bytes(&self) -> u64 {
        let rows = RowKind::of_block(&self.layout);
        let halves = halves_bytes(rows, self.n, self.hidden.max(self.slots));
        codes_bytes(rows, self.layout.gate_or_up().quant, self.n, self.hidden).max(halves)
    }
}
