//! A matrix times columns.

use super::host::{HostMemory, bytes, numbers};
use super::launch::{Addresses, Launch, Launches, ROW_COLUMNS, RowKind, for_quants_and_widths, width};
use super::quantize::{codes_bytes, halved_input, halves_bytes, input};
use super::{DeviceKernel, Function, KernelWork, Operand, View, matmul};
use crate::cpu::{Columns, Kernels, Rows};
use crate::device::Buffer;
use crate::formats::rows::Quant;

pub(super) const FUNCTIONS: &[&[&str]] = &[for_quants_and_widths!("linear")];
const BY_ROWS: Function = Function::named("linear_f32_1");

/// out = x weights^T + bias, or out += that.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// Type of the weights.
    pub quant: Quant,
    /// Numbers of a column of `out`.
    pub rows: usize,
    /// Numbers of a column of `x`.
    pub cols: usize,
    /// Columns.
    pub n: usize,
    /// `[rows]` rows of `cols` numbers.
    pub weights: Buffer,
    /// `[rows]`, or a buffer of no bytes.
    pub bias: Buffer,
    /// `[n, cols]`
    pub x: View,
    /// `rows` numbers for each column.
    pub out: View,
    /// Numbers from one column of `out` to the next; more than `rows` where several matrices make one output.
    pub stride: usize,
    /// What is done with the sums.
    pub then: Then,
}

/// What [`Linear`] does with the sums that it has computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// They are stored in `out`.
    Store,
    /// Negative sums become zero: the hidden layer of a predictor.
    Relu,
    /// They are added to what `out` has.
    Add,
}

impl Linear {
    /// Numbers from the first of `out` to the last, those between columns included.
    fn out_numbers(&self) -> usize {
        (self.n - 1) * self.stride + self.rows
    }
}

/// Buffers of a run on the host.
#[derive(Default)]
pub struct Scratch {
    columns: Columns,
    /// `[n, rows]`
    out: Vec<f32>,
}

impl DeviceKernel for Linear {
    type Scratch = Scratch;

    fn operands(&self, see: &mut dyn FnMut(Operand)) {
        see(Operand::read(self.weights, self.weight_bytes() as usize));
        see(Operand::optional(self.bias, self.rows * 4));
        see(Operand::read(self.x, self.n * self.cols * 4));
        see(Operand::written(self.out, self.out_numbers() * 4));
    }

    fn run(&self, at: &dyn HostMemory, kernels: &Kernels, Scratch { columns, out }: &mut Scratch) -> KernelWork {
        let &Linear { quant, rows, cols, n, .. } = self;
        columns.set(numbers(at, self.x, n * cols), n, quant);
        let stride = quant.row_bytes(cols);
        let weights = bytes(at, self.weights, rows * stride);
        out.clear();
        out.resize(n * rows, 0.0);
        let first = Rows { first: weights.as_ptr(), stride, ahead: 0 };
        // SAFETY: the weights hold the rows, `out` the last index, (n - 1) * rows + rows - 1; the kernels are for this machine.
        unsafe { kernels.dot(quant)(first, rows, columns, out.as_mut_ptr(), rows) };
        let bias = at.of(self.bias);
        let before = numbers(at, self.out, self.out_numbers());
        for (out, before) in out.chunks_exact_mut(rows).zip(before.chunks(self.stride)) {
            out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
            match self.then {
                Then::Store => {}
                Then::Relu => out.iter_mut().for_each(|out| *out = out.max(0.0)),
                Then::Add => out.iter_mut().zip(before).for_each(|(out, before)| *out += before),
            }
        }
        KernelWork::products(weights.len() as u64, rows * cols, n)
    }

    fn store(&self, scratch: &Scratch, at: &mut dyn HostMemory) {
        let first = self.out.at as usize / 4;
        let out = at.of_mut(self.out.buffer)[first..].chunks_mut(self.stride);
        for (to, from) in out.zip(scratch.out.chunks_exact(self.rows)) {
            to[..self.rows].copy_from_slice(from);
        }
    }

    fn launch(&self, at: &Addresses<'_>, scratch: u64, out: &mut Launches) {
        let &Linear { quant, rows, cols, n, .. } = self;
        let kind = RowKind::of(quant);
        let tensor = at.tensor_tiles(kind).filter(|_| n >= matmul::WIDE_COLUMNS);
        let x = match tensor {
            Some(tiles) if tiles.halves => halved_input(at.view(self.x), scratch, n, cols, out),
            _ => input((kind, quant), at.view(self.x), scratch, n, cols, out),
        };
        let then = match self.then {
            Then::Store => 0,
            Then::Relu => 1,
            Then::Add => 2,
        };
        let launch = if n <= ROW_COLUMNS {
            const WARPS: usize = 4;
            let together = if kind == RowKind::Any { 1 } else { 2 };
            Launch::new(BY_ROWS.of_rows(kind, width(n)), [rows.div_ceil(together * WARPS), 1, 1], WARPS, 0)
        } else {
            matmul::tiles(quant, rows, n, tensor)
        };
        let operands = [at.buffer(self.weights), x, at.optional(self.bias), at.view(self.out)];
        out.push(launch.words(operands).ints([rows, cols, n, then, self.stride, quant.index()]));
    }

    fn scratch_bytes(&self) -> u64 {
        let kind = RowKind::of(self.quant);
        let halves = if self.n >= matmul::WIDE_COLUMNS { halves_bytes(kind, self.n, self.cols) } else { 0 };
        codes_bytes(kind, self.quant, self.n, self.cols).max(halves)
    }

    fn weight_bytes(&self) -> u64 {
        (self.rows * self.quant.row_bytes(self.cols)) as u64
    }
}
