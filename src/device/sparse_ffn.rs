//! [`SparseFfn`] with the CPU's kernels: what a device's kernel has to compute, and what the virtual device runs.

use super::{NONE, SparseFfn};
use crate::cpu::aligned::Aligned;
use crate::cpu::{Columns, Kernels, MAX_COLUMNS, Rows};
use crate::formats::rows;
use crate::model::config::Ffn;

/// What a run left: its output in the order of axpys, until it is asked for. Kept between runs.
#[derive(Default)]
pub struct Room {
    columns: Columns,
    /// `[n, hidden]`
    sum: Aligned,
    active: u32,
}

/// The buffers of a call, as the device holds them.
#[derive(Clone, Copy)]
pub struct Operands<'a> {
    /// Begins at a multiple of `rows::ROW_ALIGN`.
    pub blocks: &'a [u8],
    pub bucket: &'a [u32],
    /// Empty where there is none.
    pub up_bias: &'a [f32],
    /// `[n, hidden]`
    pub input: &'a [f32],
    /// `[ffn]`
    pub masks: &'a [u32],
}

/// Runs a call and keeps its result in `room`. Returns the bytes of the rows that it read.
pub fn run(call: &SparseFfn, at: Operands<'_>, kernels: &Kernels, room: &mut Room) -> u64 {
    let &SparseFfn { quant, kind, activation, cut, hidden, ffn, n, .. } = call;
    let (block_bytes, row_bytes) = (call.block_bytes(), quant.row_bytes(hidden));
    assert!(n <= MAX_COLUMNS && at.blocks.len() >= call.slots * block_bytes);
    let Room { columns, sum, active } = room;
    columns.set(at.input, n, quant);
    sum.resize(n * hidden);
    sum.fill(0.0);
    *active = 0;
    let (dot, axpy) = (kernels.dot(quant), kernels.axpy(quant));
    let (mut gate, mut up, mut a) = ([0f32; MAX_COLUMNS], [0f32; MAX_COLUMNS], [0f32; MAX_COLUMNS]);
    let mut read = 0;
    for (block, &neuron) in at.blocks.chunks_exact(block_bytes).zip(&at.bucket[..call.slots]) {
        if neuron == NONE {
            continue;
        }
        assert!((neuron as usize) < ffn, "the bucket names neuron {neuron} of {ffn}");
        let wanted = at.masks[neuron as usize];
        if wanted == 0 {
            continue;
        }
        let mut product = |row: usize, out: &mut [f32; MAX_COLUMNS]| {
            read += row_bytes as u64;
            let rows = Rows { first: block[row * row_bytes..].as_ptr(), stride: row_bytes, ahead: 0 };
            // SAFETY: the block holds the row; the kernels are for this machine; there are at most MAX_COLUMNS columns.
            unsafe { dot(rows, 1, columns, out.as_mut_ptr(), 1) };
        };
        let bias = at.up_bias.get(neuron as usize).copied().unwrap_or(0.0);
        // Without a gate, up takes its place.
        product(0, &mut gate);
        if kind == Ffn::Plain {
            gate[..n].iter_mut().for_each(|gate| *gate += bias);
        }
        let fires = |b: usize| wanted >> b & 1 == 1 && activation.apply(gate[b]).abs() > cut;
        let mask = (0..n).fold(0u32, |mask, b| mask | (fires(b) as u32) << b);
        if mask == 0 {
            continue;
        }
        if kind != Ffn::Plain {
            product(1, &mut up);
            up[..n].iter_mut().for_each(|up| *up += bias);
        }
        for b in 0..n {
            let act = activation.apply(gate[b]);
            a[b] = match kind {
                _ if mask >> b & 1 == 0 || act == 0.0 => 0.0,
                Ffn::Gated => act * up[b],
                Ffn::GatedBoth => act * activation.apply(up[b]),
                Ffn::Plain => act,
            };
            *active += u32::from(a[b] != 0.0);
        }
        if a[..n].iter().all(|&a| a == 0.0) {
            continue;
        }
        read += row_bytes as u64;
        let down = block[(kind.rows() - 1) * row_bytes..].as_ptr();
        // SAFETY: the block holds the row; the kernels are for this machine.
        unsafe { axpy(&[down], 0, &a[..n], hidden, sum) };
    }
    read
}

/// Writes the result of the last run: `[n, hidden]` f32, then the count of active neurons times columns.
pub fn store(call: &SparseFfn, room: &Room, output: &mut [f32]) {
    let (values, rest) = output.split_at_mut(call.n * call.hidden);
    values.fill(0.0);
    for (sum, out) in room.sum.chunks_exact(call.hidden).zip(values.chunks_exact_mut(call.hidden)) {
        rows::add_axpy(call.quant, sum, out);
    }
    rest[0] = f32::from_bits(room.active);
}
