//! The sign predictor.

use super::host::{HostMemory, numbers, put};
use super::launch::{Addresses, Launch, Launches};
use super::{DeviceKernel, Function, KernelWork, Operand, View};
use crate::cpu::Kernels;
use crate::cpu::sign::{self, BitLine};
use crate::device::Buffer;

pub(super) const FUNCTIONS: &[&[&str]] = &[&["sign_pack"], &["sign_scores"]];
const PACK: Function = Function::named("sign_pack");
const SCORES: Function = Function::named("sign_scores");

/// Columns that `sign_scores` works on at once.
const COLUMNS: usize = 4;

/// scores = (matching - differing signs) / hidden of each neuron's bits and each column (SparseInfer IV).
#[derive(Clone, Copy, Debug)]
pub struct SignScores {
    /// Numbers of a column.
    pub hidden: usize,
    /// Neurons.
    pub ffn: usize,
    /// Columns.
    pub n: usize,
    /// `[ffn, cpu::sign::lines(hidden)]` lines of 64 bytes: bit i is 1 where number i of the row is negative.
    pub bits: Buffer,
    /// `[n, hidden]`, normalised. Zero counts as positive, whatever its sign bit.
    pub x: View,
    /// `[n, ffn]`
    pub scores: View,
}

/// Buffers of a run on the host.
#[derive(Default)]
pub struct Scratch {
    /// Of the columns, `[n, lines]`.
    bits: Vec<BitLine>,
    /// `[n, ffn]`
    scores: Vec<f32>,
}

const fn line_bytes(hidden: usize) -> usize {
    sign::lines(hidden) * size_of::<BitLine>()
}

impl DeviceKernel for SignScores {
    type Scratch = Scratch;

    fn operands(&self, see: &mut dyn FnMut(Operand)) {
        let &SignScores { hidden, ffn, n, bits, x, scores } = self;
        see(Operand::read(bits, ffn * line_bytes(hidden)));
        see(Operand::read(x, n * hidden * 4));
        see(Operand::written(scores, n * ffn * 4));
    }

    fn run(&self, at: &dyn HostMemory, kernels: &Kernels, Scratch { bits, scores }: &mut Scratch) -> KernelWork {
        let &SignScores { hidden, ffn, n, .. } = self;
        let lines = sign::lines(hidden);
        bits.clear();
        bits.resize(n * lines, BitLine::default());
        let x = numbers(at, self.x, n * hidden);
        x.chunks_exact(hidden).zip(bits.chunks_exact_mut(lines)).for_each(|(x, bits)| sign::pack(x, bits));
        scores.clear();
        scores.resize(n * ffn, 0.0);
        let rows: &[BitLine] = &bytemuck::cast_slice(at.of(self.bits))[..ffn * lines];
        sign::scores(kernels.isa, rows, bits, hidden, scores, ffn);
        // Of bits, which are counted by words: it is reading that takes time.
        KernelWork { bytes: size_of_val(rows) as u64, operations: 0 }
    }

    fn store(&self, scratch: &Scratch, at: &mut dyn HostMemory) {
        put(at, self.scores, &scratch.scores);
    }

    fn launch(&self, at: &Addresses<'_>, scratch: u64, out: &mut Launches) {
        const WARPS: usize = 8;
        let &SignScores { hidden, ffn, n, .. } = self;
        let words = line_bytes(hidden) / 4;
        let pack = Launch::new(PACK, [words.div_ceil(WARPS), n, 1], WARPS, 0);
        out.push(pack.words([at.view(self.x), scratch]).ints([hidden, words]));
        let grid = [ffn.div_ceil(8 * WARPS), n.div_ceil(COLUMNS), 1];
        let operands = [at.buffer(self.bits), scratch, at.view(self.scores)];
        out.push(Launch::new(SCORES, grid, WARPS, 0).words(operands).ints([hidden, ffn, n]));
    }

    /// The columns' bits.
    fn scratch_bytes(&self) -> u64 {
        (self.n * line_bytes(self.hidden)) as u64
    }

    fn weight_bytes(&self) -> u64 {
        (self.ffn * line_bytes(self.hidden)) as u64
    }
}
