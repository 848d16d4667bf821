//! The experts in slots, for a few columns.

use super::host::{HostMemory, add, bytes, numbers, put, words};
use super::launch::{Addresses, Launch, Launches, RowKind, SCRATCH_ALIGN, activation_words};
use super::quantize::{codes_bytes, input};
use super::{DeviceKernel, Function, KernelWork, NONE, Operand, View};
use crate::cpu::{Columns, Kernels, MAX_COLUMNS, Rows};
use crate::device::Buffer;
use crate::formats::rows::Quant;
use crate::model::config::{Activation, Ffn};

pub(super) const FUNCTIONS: &[&[&str]] = &[&["expert_gates", "expert_down"]];
const GATES: Function = Function::named("expert_gates");
const DOWN: Function = Function::named("expert_down");
/// Slots, and experts of a layer, are fewer than this (`model::config`): a word has room for one of each.
const NUMBERS: u32 = 1 << 16;

/// The resident experts' part of one layer's mixture for n tokens: for each token those of its experts that are in slots, each output
/// times the weight that the router gave it.
#[derive(Clone, Copy, Debug)]
pub struct ExpertFfn {
    /// The types of gate, up and down. Gate and up both take f32 inputs, or both int8.
    pub quants: [Quant; 3],
    /// How gate and up are joined: there is a gate.
    pub kind: Ffn,
    /// The activation function of the gate.
    pub activation: Activation,
    /// Numbers of a token, a multiple of 8.
    pub hidden: usize,
    /// Neurons of an expert, a multiple of 8.
    pub ffn: usize,
    /// Slots of the layer.
    pub slots: usize,
    /// Experts of a token.
    pub used: usize,
    /// Columns, 1 to 32.
    pub n: usize,
    /// In each slot an expert: gate and up, `[ffn]` rows of `hidden` numbers each, and down, `[hidden]` rows of `ffn`. Rows have no padding. Gate
    /// and up may be the same.
    pub blocks: [Buffer; 3],
    /// Biases of all the layer's experts: of gate and up, `[experts, 2 ffn]` f32, and of down, `[experts, hidden]`; no bytes where there are none.
    pub biases: [Buffer; 2],
    /// `[n, used]` pairs of an expert's slot and number ([`ExpertFfn::choice`]), or [`NONE`], and its weight.
    pub chosen: View,
    /// Normalised input, `[n, hidden]` f32.
    pub input: View,
    /// What these experts add to the FFN's output, `[n, hidden]` f32.
    pub output: View,
}

/// Buffers of a run on the host.
#[derive(Default)]
pub struct Scratch {
    /// What an expert reads, and what its `down` reads.
    columns: [Columns; 2],
    /// Its tokens and their weights.
    tokens: Vec<(usize, f32)>,
    /// Number of the expert.
    expert: usize,
    gathered: Vec<f32>,
    /// Products of gate, of up, and of down.
    products: [Vec<f32>; 3],
    /// `[n, hidden]`
    sum: Vec<f32>,
}

impl ExpertFfn {
    /// Words of [`ExpertFfn::chosen`].
    pub const fn chosen_words(n: usize, used: usize) -> usize {
        2 * n * used
    }

    /// The word for an expert in [`ExpertFfn::chosen`].
    pub const fn choice(slot: u32, expert: usize) -> u32 {
        assert!(slot < NUMBERS && expert < NUMBERS as usize);
        slot | (expert as u32) << NUMBERS.trailing_zeros()
    }

    /// Whether gate and up are the same, which is read and multiplied once.
    fn is_its_own_gate(&self) -> bool {
        self.blocks[0] == self.blocks[1]
    }

    /// Bytes of a row of each part.
    fn row_bytes(&self) -> [usize; 3] {
        let [gate, up, down] = self.quants;
        [gate.number_bytes(self.hidden), up.number_bytes(self.hidden), down.number_bytes(self.ffn)]
    }

    /// Bytes of each part in a slot.
    fn slot_bytes(&self) -> [usize; 3] {
        let [gate, up, down] = self.row_bytes();
        [self.ffn * gate, self.ffn * up, self.hidden * down]
    }

    /// The rows of a part in a slot.
    fn rows(&self, at: &dyn HostMemory, part: usize, slot: usize) -> Rows {
        let all = bytes(at, self.blocks[part], self.blocks[part].bytes as usize / 4 * 4);
        Rows { first: all[slot * self.slot_bytes()[part]..].as_ptr(), stride: self.row_bytes()[part], ahead: 0 }
    }

    /// The biases of an expert, of gate and up and of down; empty where there are none.
    fn biases<'a>(&self, at: &'a dyn HostMemory, expert: usize) -> [&'a [f32]; 2] {
        let each = [2 * self.ffn, self.hidden];
        std::array::from_fn(|part| {
            let (buffer, each) = (self.biases[part], each[part]);
            let all = numbers(at, buffer, buffer.bytes as usize / 4);
            all.get(expert * each..(expert + 1) * each).unwrap_or_default()
        })
    }

    /// Adds the expert in one slot for its tokens, `scratch.tokens`, to the sum.
    fn expert(&self, at: &dyn HostMemory, kernels: &Kernels, slot: usize, x: &[f32], scratch: &mut Scratch) {
        let &ExpertFfn { quants: [gate, up, down], kind, activation, hidden, ffn, .. } = self;
        let Scratch { columns: [inputs, inner], tokens, expert, gathered, products: [gates, ups, downs], sum } =
            scratch;
        let (m, [of_input, of_down]) = (tokens.len(), self.biases(at, *expert));
        gathered.clear();
        tokens.iter().for_each(|&(token, _)| gathered.extend_from_slice(&x[token * hidden..(token + 1) * hidden]));
        inputs.set_for(gathered, m, [gate, up]);
        gates.resize(m * ffn, 0.0);
        ups.resize(m * ffn, 0.0);
        downs.resize(m * hidden, 0.0);
        // SAFETY: the slot holds the rows, the results have room for all columns; the kernels are for this machine.
        unsafe {
            kernels.dot(gate)(self.rows(at, 0, slot), ffn, inputs, gates.as_mut_ptr(), ffn);
            match self.is_its_own_gate() {
                true => ups.copy_from_slice(gates),
                false => kernels.dot(up)(self.rows(at, 1, slot), ffn, inputs, ups.as_mut_ptr(), ffn),
            }
        }
        if !of_input.is_empty() {
            let (of_gates, of_ups) = of_input.split_at(ffn);
            gates.chunks_exact_mut(ffn).for_each(|gates| add(gates, of_gates));
            ups.chunks_exact_mut(ffn).for_each(|ups| add(ups, of_ups));
        }
        for (gate, &up) in gates.iter_mut().zip(&*ups) {
            *gate = kind.activation(activation, *gate, up);
        }
        inner.set_for(gates, m, [down, down]);
        // SAFETY: as above.
        unsafe { kernels.dot(down)(self.rows(at, 2, slot), hidden, inner, downs.as_mut_ptr(), hidden) };
        for (&(token, weight), out) in tokens.iter().zip(downs.chunks_exact_mut(hidden)) {
            add(out, of_down);
            let sum = &mut sum[token * hidden..(token + 1) * hidden];
            sum.iter_mut().zip(&*out).for_each(|(sum, out)| *sum += weight * out);
        }
    }
}

impl DeviceKernel for ExpertFfn {
    type Scratch = Scratch;

    fn operands(&self, see: &mut dyn FnMut(Operand)) {
        let &ExpertFfn { slots, used, n, hidden, .. } = self;
        for (buffer, bytes) in self.blocks.into_iter().zip(self.slot_bytes()) {
            see(Operand::read(buffer, slots * bytes));
        }
        self.biases.iter().for_each(|&biases| see(Operand::read(biases, biases.bytes as usize)));
        see(Operand::read(self.chosen, ExpertFfn::chosen_words(n, used) * 4));
        see(Operand::read(self.input, n * hidden * 4));
        see(Operand::written(self.output, n * hidden * 4));
    }

    fn run(&self, at: &dyn HostMemory, kernels: &Kernels, scratch: &mut Scratch) -> KernelWork {
        let &ExpertFfn { slots, used, n, hidden, .. } = self;
        assert!(n <= MAX_COLUMNS);
        let chosen = words(at, self.chosen, ExpertFfn::chosen_words(n, used));
        let x = numbers(at, self.input, n * hidden);
        scratch.sum.clear();
        scratch.sum.resize(n * hidden, 0.0);
        let mut work = KernelWork::default();
        for slot in 0..slots {
            let pairs = chosen.chunks_exact(2).enumerate();
            let pairs = pairs.filter(|(_, pair)| pair[0] != NONE && (pair[0] % NUMBERS) as usize == slot);
            scratch.tokens.clear();
            for (i, pair) in pairs {
                scratch.tokens.push((i / used, f32::from_bits(pair[1])));
                scratch.expert = (pair[0] / NUMBERS) as usize;
            }
            if !scratch.tokens.is_empty() {
                self.expert(at, kernels, slot, x, scratch);
                let parts = &self.slot_bytes()[usize::from(self.is_its_own_gate())..];
                let bytes = parts.iter().sum::<usize>() as u64;
                work += KernelWork::products(bytes, parts.len() * hidden * self.ffn, scratch.tokens.len());
            }
        }
        assert!(
            chosen.chunks_exact(2).all(|pair| pair[0] == NONE || ((pair[0] % NUMBERS) as usize) < slots),
            "{chosen:?}"
        );
        work
    }

    fn store(&self, scratch: &Scratch, at: &mut dyn HostMemory) {
        put(at, self.output, &scratch.sum);
    }

    fn launch(&self, at: &Addresses<'_>, scratch: u64, out: &mut Launches) {
        const WARPS: usize = 4;
        let &ExpertFfn { quants: [gate, up, down], hidden, ffn, used, n, .. } = self;
        let s = DeviceScratch::of(self, scratch);
        let [gate_bytes, up_bytes, down_bytes] = self.row_bytes();
        let [gates, ups, downs] = self.blocks.map(|buffer| at.buffer(buffer));
        let (kind, activation, parameter) = activation_words(self.kind, self.activation);
        let [of_input, of_down] = self.biases.map(|biases| at.buffer(biases));
        let biased = usize::from(self.biases[0].bytes > 0);
        let x = input((RowKind::Any, gate), at.view(self.input), s.inputs, n, hidden, out);
        let launch = Launch::new(GATES, [ffn.div_ceil(WARPS), n * used, 1], WARPS, 0);
        let launch = launch.words([gates, ups, of_input, x, at.view(self.chosen), s.activations]);
        let launch = launch.ints([hidden, ffn, used, gate_bytes, up_bytes, up.index() << 8 | gate.index()]);
        out.push(launch.ints([biased, kind, activation]).float(parameter));
        // Those of experts that are in no slot are rounded, too, and never read.
        let activations = input((RowKind::Any, down), s.activations, s.rounded, n * used, ffn, out);
        let launch = Launch::new(DOWN, [hidden.div_ceil(WARPS), n, 1], WARPS, 0);
        let launch = launch.words([downs, of_down, activations, at.view(self.chosen), at.view(self.output)]);
        out.push(launch.ints([hidden, ffn, used, down_bytes, down.index(), biased]));
    }

    fn scratch_bytes(&self) -> u64 {
        DeviceScratch::of(self, 0).end
    }
}

/// Where the parts of the device's scratch begin.
struct DeviceScratch {
    inputs: u64,
    activations: u64,
    rounded: u64,
    end: u64,
}

impl DeviceScratch {
    fn of(c: &ExpertFfn, start: u64) -> DeviceScratch {
        let (pairs, mut at) = (c.n * c.used, start);
        let mut take = |bytes: u64| {
            let here = at;
            at += bytes.next_multiple_of(SCRATCH_ALIGN);
            here
        };
        let inputs = take(codes_bytes(RowKind::Any, c.quants[0], c.n, c.hidden));
        let activations = take((pairs * c.ffn * 4) as u64);
        let rounded = take(codes_bytes(RowKind::Any, c.quants[2], pairs, c.ffn));
        DeviceScratch { inputs, activations, rounded, end: at }
    }
}
