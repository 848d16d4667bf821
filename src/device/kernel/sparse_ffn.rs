//! The neurons in slots, for a few columns.

use super::host::{HostMemory, bytes, numbers, words};
use super::launch::{
    Addresses, Launch, Launches, RowKind, SCRATCH_ALIGN, WARP, activation_words, for_quants_and_widths, types_word,
    width,
};
use super::quantize::{codes_bytes, input};
use super::{DeviceKernel, Function, KernelWork, NONE, Operand, View};
use crate::cpu::aligned::Aligned;
use crate::cpu::{Columns, Kernels, MAX_COLUMNS, Rows};
use crate::device::Buffer;
use crate::formats::rows::{self, Quant};
use crate::model::block::{BlockLayout, BlockPart};
use crate::model::config::{Activation, Ffn};

pub(super) const FUNCTIONS: &[&[&str]] =
    &[for_quants_and_widths!("ffn_neurons"), for_quants_and_widths!("ffn_down"), &["ffn_merge"]];
const NEURONS: Function = Function::named("ffn_neurons_f32_1");
const DOWN: Function = Function::named("ffn_down_f32_1");
const MERGE: Function = Function::named("ffn_merge");

/// Slots of a chunk: each thread of a warp looks at one.
const CHUNK: usize = 32;
/// Warps of a block of `ffn_down`, and chunks of a split: a thread has one each.
const DOWN_WARPS: usize = 8;
const SPLIT_CHUNKS: usize = DOWN_WARPS * WARP;
/// Blocks that the product with down is split into at least: two to four for each multiprocessor of a consumer card. More would write more
/// partial sums: 8 bytes a number of the output and split, there and back.
const DOWN_BLOCKS: usize = 256;

/// The resident neurons' part of one layer's FFN for n tokens (DynamicInfer C.2): for every slot whose neuron some token wants, gate,
/// then up and down where the gate lets it through.
#[derive(Clone, Copy, Debug)]
pub struct SparseFfn {
    /// What a neuron's block holds, and where. Gate and up both take f32 inputs, or both int8.
    pub layout: BlockLayout,
    /// Which rows a neuron has.
    pub kind: Ffn,
    /// The activation function of the gate, or of up where there is no gate.
    pub activation: Activation,
    /// Activation threshold: a neuron is active when |act(gate)| is above this (plain FFNs: |act(up)|).
    pub activation_threshold: f32,
    /// Numbers of a row.
    pub hidden: usize,
    /// Neurons of the layer; of a mixture those of all experts, one expert after the other.
    pub ffn: usize,
    /// What the layer is a mixture of; `None`: it is none.
    pub mixture: Option<Mixture>,
    /// Slots of the layer.
    pub slots: usize,
    /// Columns, 1 to 32.
    pub n: usize,
    /// The rows of the neurons in slots (`formats::rows`).
    pub blocks: SlotBlocks,
    /// `gpu_bucket`, `[slots]` u32: the neuron in each slot, or [`NONE`].
    pub bucket: Buffer,
    /// `[ffn]` f32, the bias of up; a buffer of no bytes where there is none.
    pub up_bias: Buffer,
    /// Normalised input, `[n, hidden]` f32, then the choice, u32: `[ffn]` masks, whose bit b says that column b wants the neuron. Of a mixture
    /// ([`Mixture`]) the choice is: for each expert which of the rows of masks is its own, or [`NONE`], `[experts]`; the weight of its output for
    /// each column, `[experts, n]` f32; and the masks of the experts that some column has, `[rows, ffn / experts]`.
    pub input: Buffer,
    /// What these neurons add to the FFN's output, `[n, hidden]` f32, then `[n, ceil(slots / 32)]` u32 with a bit for each slot: its neuron
    /// was active for that column.
    pub output: Buffer,
}

/// The experts that a layer's neurons belong to, and how many of them this call is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixture {
    /// Experts of the layer.
    pub experts: usize,
    /// Rows of masks that are sent: experts that some column has.
    pub rows: usize,
}

impl Mixture {
    /// Words of the choice of a layer of `ffn` neurons for n columns.
    pub const fn choice_words(self, n: usize, ffn: usize) -> usize {
        self.masks(n) + self.rows * (ffn / self.experts)
    }

    /// Where the masks begin in the choice.
    pub const fn masks(self, n: usize) -> usize {
        self.experts * (1 + n)
    }
}

/// Where the rows of the neurons in slots lie.
#[derive(Clone, Copy, Debug)]
pub enum SlotBlocks {
    /// `[slots]` neuron blocks: the rows of each, one after the other.
    Together(View),
    /// For each part of a block the rows of all slots, `[slots]`: of gate, up and down, or of up, down and nothing more.
    Apart([View; 3]),
}

impl From<View> for SlotBlocks {
    fn from(blocks: View) -> SlotBlocks {
        SlotBlocks::Together(blocks)
    }
}

impl From<Buffer> for SlotBlocks {
    fn from(blocks: Buffer) -> SlotBlocks {
        SlotBlocks::Together(blocks.into())
    }
}

impl SlotBlocks {
    /// The rows of each part by themselves: three parts, or two.
    pub fn apart(parts: &[Buffer]) -> SlotBlocks {
        SlotBlocks::Apart(SlotBlocks::three(parts))
    }

    /// The rows of the parts in their order, of which the last stands for what is not there: up, down and down where there is no gate.
    pub fn three(parts: &[Buffer]) -> [View; 3] {
        std::array::from_fn(|index| parts[index.min(parts.len() - 1)].into())
    }

    /// Where part `index` of the first slot begins, and the bytes from one slot to the next.
    pub(super) fn rows(self, layout: &BlockLayout, index: usize) -> (View, usize) {
        let part = layout.parts()[index];
        match self {
            SlotBlocks::Together(blocks) => (View { at: blocks.at + part.offset as u64, ..blocks }, layout.bytes()),
            SlotBlocks::Apart(parts) => (parts[index], part.bytes),
        }
    }

    /// Shows what is read of so many slots.
    pub(super) fn operands(self, layout: &BlockLayout, slots: usize, see: &mut dyn FnMut(Operand)) {
        match self {
            SlotBlocks::Together(blocks) => see(Operand::read(blocks, slots * layout.bytes())),
            SlotBlocks::Apart(parts) => {
                let parts = parts.into_iter().zip(layout.parts());
                parts.for_each(|(first, part)| see(Operand::read(first, slots * part.bytes)));
            }
        }
    }

    /// The rows in the host's memory; those of down stand for a part that there is not.
    pub(super) fn here<'a>(self, at: &'a dyn HostMemory, layout: &BlockLayout, slots: usize) -> PartRows<'a> {
        std::array::from_fn(|index| {
            let index = index.min(layout.parts().len() - 1);
            let (first, stride) = self.rows(layout, index);
            match slots {
                0 => (&[][..], stride),
                _ => (bytes(at, first, (slots - 1) * stride + layout.parts()[index].bytes), stride),
            }
        })
    }
}

/// The rows of the parts of blocks in slots, in the host's memory: the first slot's begin there, and so many bytes lie from one slot to the
/// next.
pub(super) type PartRows<'a> = [(&'a [u8], usize); 3];

/// Buffers of a run on the host.
#[derive(Default)]
pub struct Scratch {
    columns: Columns,
    /// `[n, hidden]`, in the order of axpys.
    sum: Aligned,
    /// A bit for each slot: its neuron was active, `[n, ceil(slots / 32)]`.
    fired: Vec<u32>,
    /// For one neuron a number for each column: gate, up, and what the down row is multiplied by.
    gate: PerColumn,
    up: PerColumn,
    product: PerColumn,
}

type PerColumn = [f32; MAX_COLUMNS];

impl SparseFfn {
    /// Bytes of [`SparseFfn::input`].
    pub const fn input_bytes(n: usize, hidden: usize, ffn: usize) -> usize {
        (n * hidden + ffn) * 4
    }

    /// Bytes of [`SparseFfn::output`].
    pub const fn output_bytes(n: usize, hidden: usize, slots: usize) -> usize {
        (n * hidden + n * SparseFfn::fired_words(slots)) * 4
    }

    /// Words of the choice in [`SparseFfn::input`].
    fn choice_words(&self) -> usize {
        self.mixture.map_or(self.ffn, |mixture| mixture.choice_words(self.n, self.ffn))
    }

    /// Words of a bit for each slot.
    pub const fn fired_words(slots: usize) -> usize {
        slots.div_ceil(CHUNK)
    }

    /// The neuron of one slot, for the columns of `wanted`, each of which has a weight for its expert's output: its share is added to the sum.
    /// Returns bytes of rows that were read.
    fn neuron(
        &self,
        rows: &PartRows<'_>,
        (slot, bias): (usize, f32),
        (wanted, weights): (u32, Option<&[f32]>),
        kernels: &Kernels,
        scratch: &mut Scratch,
    ) -> u64 {
        let &SparseFfn { ref layout, kind, activation, hidden, n, .. } = self;
        let row = |index: usize| {
            let (first, stride) = rows[index];
            &first[slot * stride..][..layout.parts()[index].bytes]
        };
        let (ups, downs) = (self.kind.rows() - 2, self.kind.rows() - 1);
        let Scratch { columns, sum, fired, gate, up, product } = scratch;
        let mut read = 0;
        let mut dots = |index: usize, out: &mut PerColumn| {
            let part: BlockPart = layout.parts()[index];
            read += part.bytes as u64;
            let rows = Rows { first: row(index).as_ptr(), stride: part.bytes, ahead: 0 };
            // SAFETY: the slot holds the row; the kernels are for this machine; there are at most MAX_COLUMNS columns.
            unsafe { kernels.dot(part.quant)(rows, 1, columns, out.as_mut_ptr(), 1) };
        };
        // Without a gate, up takes its place.
        dots(0, gate);
        if kind == Ffn::Plain {
            gate[..n].iter_mut().for_each(|gate| *gate += bias);
        }
        let fires = |b: usize| wanted >> b & 1 == 1 && activation.apply(gate[b]).abs() > self.activation_threshold;
        let mask = (0..n).fold(0u32, |mask, b| mask | (fires(b) as u32) << b);
        if mask == 0 {
            return read;
        }
        if kind != Ffn::Plain {
            dots(ups, up);
            up[..n].iter_mut().for_each(|up| *up += bias);
        }
        for b in 0..n {
            let act = activation.apply(gate[b]);
            product[b] = match kind {
                _ if mask >> b & 1 == 0 || act == 0.0 => 0.0,
                Ffn::Gated => act * up[b],
                Ffn::Plain => act,
                kind => kind.activation(activation, gate[b], up[b]),
            };
            if let Some(weights) = weights.filter(|_| product[b] != 0.0) {
                product[b] *= weights[b];
            }
            fired[b * SparseFfn::fired_words(self.slots) + slot / CHUNK] |=
                u32::from(product[b] != 0.0) << (slot % CHUNK);
        }
        if product[..n].iter().all(|&a| a == 0.0) {
            return read;
        }
        let down = layout.down();
        // SAFETY: the slot holds the row; the kernels are for this machine.
        unsafe { kernels.axpy(down.quant)(&[row(downs).as_ptr()], 0, &product[..n], hidden, sum) };
        read + down.bytes as u64
    }
}

impl DeviceKernel for SparseFfn {
    type Scratch = Scratch;

    fn operands(&self, see: &mut dyn FnMut(Operand)) {
        let &SparseFfn { hidden, ffn, slots, n, .. } = self;
        self.blocks.operands(&self.layout, slots, see);
        see(Operand::read(self.bucket, slots * 4));
        see(Operand::optional(self.up_bias, ffn * 4));
        see(Operand::read(self.input, n * hidden * 4 + self.choice_words() * 4));
        see(Operand::written(self.output, SparseFfn::output_bytes(n, hidden, slots)));
    }

    fn run(&self, at: &dyn HostMemory, kernels: &Kernels, scratch: &mut Scratch) -> KernelWork {
        let &SparseFfn { ref layout, hidden, ffn, mixture, slots, n, .. } = self;
        let rows = self.blocks.here(at, layout, slots);
        let input = numbers(at, self.input, n * hidden);
        let choice = words(at, View { buffer: self.input, at: (n * hidden * 4) as u64 }, self.choice_words());
        let (bucket, up_bias) = (words(at, self.bucket, slots), at.of(self.up_bias));
        assert!(n <= MAX_COLUMNS);
        scratch.columns.set_for(input, n, [layout.gate_or_up().quant, layout.up().quant]);
        scratch.sum.resize(n * hidden);
        scratch.sum.fill(0.0);
        scratch.fired.clear();
        scratch.fired.resize(n * SparseFfn::fired_words(slots), 0);
        let (mut work, first) = (KernelWork::default(), layout.gate_or_up().bytes as u64);
        let resident = bucket.iter().map(|&neuron| neuron as usize).enumerate().filter(|(_, n)| *n != NONE as usize);
        for (slot, neuron) in resident {
            assert!(neuron < ffn, "the bucket names neuron {neuron} of {ffn}");
            let (wanted, weights) = match mixture {
                None => (choice[neuron], None),
                Some(mixture) => of_expert(mixture, choice, n, neuron, ffn / mixture.experts),
            };
            if wanted != 0 {
                let bias = up_bias.get(neuron).copied().unwrap_or(0.0);
                let bytes = self.neuron(&rows, (slot, bias), (wanted, weights), kernels, scratch);
                let parts = if bytes == first { 1 } else { self.kind.rows() };
                work += KernelWork::products(bytes, parts * hidden, wanted.count_ones() as usize);
            }
        }
        work
    }

    fn store(&self, scratch: &Scratch, at: &mut dyn HostMemory) {
        let (values, rest) = at.of_mut(self.output).split_at_mut(self.n * self.hidden);
        values.fill(0.0);
        for (sum, out) in scratch.sum.chunks_exact(self.hidden).zip(values.chunks_exact_mut(self.hidden)) {
            rows::add_axpy(self.layout.down().quant, sum, out);
        }
        bytemuck::cast_slice_mut(rest)[..scratch.fired.len()].copy_from_slice(&scratch.fired);
    }

    fn launch(&self, at: &Addresses<'_>, scratch: u64, out: &mut Launches) {
        let &SparseFfn { ref layout, hidden, slots, n, .. } = self;
        let (rows, types) = (RowKind::of_block(layout), types_word(layout));
        let s = DeviceScratch::of(self, scratch);
        let width = width(n);
        let (given, output) = (at.buffer(self.input), at.buffer(self.output));
        let masks = given + (n * hidden * 4) as u64;
        let rows_of = |index: usize| {
            let (first, stride) = self.blocks.rows(layout, index);
            (at.view(first), stride)
        };
        let (ups, downs) = (rows_of(self.kind.rows() - 2), rows_of(self.kind.rows() - 1));
        if s.chunks > 0 {
            let x = input((rows, layout.gate_or_up().quant), given, s.codes, n, hidden, out);
            const WARPS: usize = 4;
            let (kind, activation, parameter) = activation_words(self.kind, self.activation);
            let (gates, bucket, up_bias) = (rows_of(0), at.buffer(self.bucket), at.optional(self.up_bias));
            let experts = self.mixture.map_or(0, |mixture| mixture.experts);
            let launch = Launch::new(NEURONS.of_rows(rows, width), [s.chunks, 1, 1], WARPS, CHUNK * 4);
            let launch = launch.words([gates.0, ups.0, bucket, up_bias, x, masks, s.products, s.list, s.counts]);
            let launch = launch.ints([gates.1, ups.1, hidden, slots, n, kind, activation]).float(parameter);
            let launch = launch.float(self.activation_threshold).int(types);
            out.push(launch.ints([experts, self.ffn / experts.max(1)]));

            let entries = s.chunks.div_ceil(s.splits) * CHUNK * 4;
            let sums = DOWN_WARPS / 2 * WARP * 4 * width * down_numbers(rows, width);
            let grid = [s.tiles, s.splits, n.div_ceil(width)];
            let launch = Launch::new(DOWN.of_rows(rows, width), grid, DOWN_WARPS, entries.max(sums));
            let launch = launch.words([downs.0, s.products, s.list, s.counts, s.partial]);
            out.push(launch.ints([downs.1, hidden, n, self.kind.rows(), s.chunks, types]));
        }
        const WARPS: usize = 8;
        let count = n * hidden;
        let merge = Launch::new(MERGE, [count.max(s.chunks).div_ceil(WARPS * WARP), 1, 1], WARPS, 0);
        out.push(merge.words([s.partial, s.products, s.list, s.counts, output]).ints([count, s.splits, s.chunks, n]));
    }

    fn scratch_bytes(&self) -> u64 {
        DeviceScratch::of(self, 0).end
    }
}

/// Which columns want a neuron of an expert, and what the expert's output is multiplied by for each; `each` is the experts' neurons.
fn of_expert(mixture: Mixture, choice: &[u32], n: usize, neuron: usize, each: usize) -> (u32, Option<&[f32]>) {
    let (expert, row) = (neuron / each, choice[neuron / each]);
    if row == NONE {
        return (0, None);
    }
    assert!((row as usize) < mixture.rows, "row {row} of masks, of {}", mixture.rows);
    let weights = &choice[mixture.experts + expert * n..][..n];
    let masks = &choice[mixture.masks(n) + row as usize * each..][..each];
    (masks[neuron % each], Some(bytemuck::cast_slice(weights)))
}

/// Where the parts of the device's scratch begin.
struct DeviceScratch {
    codes: u64,
    products: u64,
    list: u64,
    counts: u64,
    partial: u64,
    end: u64,
    chunks: usize,
    /// Blocks along a row, and along the list of neurons.
    tiles: usize,
    splits: usize,
}

impl DeviceScratch {
    fn of(c: &SparseFfn, start: u64) -> DeviceScratch {
        let chunks = c.slots.div_ceil(CHUNK);
        let rows = RowKind::of_block(&c.layout);
        let tiles = c.hidden.div_ceil(down_numbers(rows, width(c.n)) * WARP);
        let splits = DOWN_BLOCKS.div_ceil(tiles).max(chunks.div_ceil(SPLIT_CHUNKS)).min(chunks);
        let mut at = start;
        let mut take = |bytes: usize| {
            let here = at;
            at += (bytes as u64).next_multiple_of(SCRATCH_ALIGN);
            here
        };
        let codes = take(codes_bytes(rows, c.layout.gate_or_up().quant, c.n, c.hidden) as usize);
        let products = take(chunks * CHUNK * c.n * 4);
        let list = take(chunks * CHUNK * 4);
        let counts = take(chunks * 4);
        let partial = take(splits * c.n * c.hidden * 4);
        DeviceScratch { codes, products, list, counts, partial, end: at, chunks, tiles, splits }
    }
}

/// Numbers of a row that a thread of `ffn_down` adds up (`Share` of `kernels/sparse_ffn.cu`).
fn down_numbers(rows: RowKind, width: usize) -> usize {
    match (rows, width) {
        (RowKind::Own(Quant::F32), _) => 4,
        (RowKind::Own(Quant::F16) | RowKind::Any, _) => 8,
        (RowKind::Own(_), ..=2) => 16,
        (RowKind::Own(_), _) => 8,
    }
}
