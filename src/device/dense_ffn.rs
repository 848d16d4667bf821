//! [`DenseFfn`] with the CPU's kernels: what a device's kernel has to compute, and what the virtual device runs.

use super::{DenseFfn, NONE};
use crate::cpu::{Columns, Kernels, Rows};
use crate::formats::rows;
use crate::model::config::Ffn;

/// What a run left, until it is asked for. Kept between runs.
#[derive(Default)]
pub struct Room {
    columns: Columns,
    /// Gates and ups, `[n, slots]` each.
    gates: Vec<f32>,
    ups: Vec<f32>,
    row: Vec<f32>,
    /// `[n, hidden]`
    pub out: Vec<f32>,
    /// `[parts, ffn]`
    pub counts: Vec<u32>,
}

/// The operands of a call, as the device holds them.
#[derive(Clone, Copy)]
pub struct Operands<'a> {
    /// Begins at a multiple of `rows::ROW_ALIGN`.
    pub blocks: &'a [u8],
    pub bucket: &'a [u32],
    /// Empty where there is none.
    pub up_bias: &'a [f32],
    pub x: &'a [f32],
    pub counts: &'a [u32],
    pub out: &'a [f32],
}

/// Runs a call and keeps its result in `room`. Returns the bytes of the rows that it read.
pub fn run(call: &DenseFfn, at: Operands<'_>, kernels: &Kernels, room: &mut Room) -> u64 {
    let &DenseFfn { quant, kind, activation, cut, hidden, ffn, slots, n, .. } = call;
    let (block_bytes, row_bytes) = (call.block_bytes(), quant.row_bytes(hidden));
    let Room { columns, gates, ups, row, out, counts } = room;
    columns.set(at.x, n, quant);
    let dots = |k: usize, to: &mut Vec<f32>| {
        to.resize(n * slots, 0.0);
        let rows = Rows { first: at.blocks[k * row_bytes..].as_ptr(), stride: block_bytes, ahead: 0 };
        // SAFETY: the blocks hold the rows, `to` is [n, slots]; the kernels are for this machine.
        unsafe { kernels.dot(quant)(rows, slots, columns, to.as_mut_ptr(), slots) };
    };
    if slots > 0 {
        dots(0, gates);
        dots(kind.rows() - 2, ups);
    }
    out.clear();
    out.extend_from_slice(at.out);
    counts.clear();
    counts.extend_from_slice(at.counts);
    row.resize(hidden, 0.0);
    let mut read = 0;
    for (slot, &neuron) in at.bucket.iter().enumerate().filter(|(_, neuron)| **neuron != NONE) {
        assert!((neuron as usize) < ffn, "the bucket names neuron {neuron} of {ffn}");
        let down = &at.blocks[slot * block_bytes + (kind.rows() - 1) * row_bytes..][..row_bytes];
        rows::decode(quant, down, row);
        read += block_bytes as u64;
        let bias = at.up_bias.get(neuron as usize).copied().unwrap_or(0.0);
        let mut active = 0;
        for (b, out) in out.chunks_exact_mut(hidden).enumerate() {
            let up = ups[b * slots + slot] + bias;
            // Without a gate, up takes its place.
            let value = activation.apply(if kind == Ffn::Plain { up } else { gates[b * slots + slot] });
            let product = match kind {
                _ if value == 0.0 => 0.0,
                Ffn::Gated => value * up,
                Ffn::GatedBoth => value * activation.apply(up),
                Ffn::Plain => value,
            };
            active += u32::from(if cut > 0.0 { value.abs() > cut } else { product != 0.0 });
            if product != 0.0 {
                out.iter_mut().zip(&*row).for_each(|(out, weight)| *out += product * weight);
            }
        }
        counts.iter_mut().skip(neuron as usize).step_by(ffn).for_each(|count| *count = 0);
        counts[neuron as usize] = active;
    }
    read
}
