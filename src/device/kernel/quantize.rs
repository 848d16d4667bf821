//! int8 codes of inputs, for rows of grouped types, and what they stand for, for rows of any type. On the host
//! [`Columns`](crate::cpu::Columns) makes them. And inputs rounded to f16, which only tensor cores take.

use super::Function;
use super::launch::{Launch, Launches, RowKind, width};
use crate::formats::rows::{GROUP, Input, PACK, Quant};

pub(super) const FUNCTIONS: &[&[&str]] = &[&["quantize", "round_inputs", "halves"]];
const QUANTIZE: Function = Function::named("quantize");
const ROUND: Function = Function::named("round_inputs");
const HALVES: Function = Function::named("halves");

/// int8 codes of `[n, cols]` f32 at `x` and their steps, [`coded_bytes`] a column, at `to`.
pub fn quantize(x: u64, to: u64, n: usize, cols: usize) -> Launch {
    const WARPS: usize = 8;
    Launch::new(QUANTIZE, [(cols / GROUP).div_ceil(WARPS), n, 1], WARPS, 0).words([x, to]).int(cols)
}

/// Bytes of a column's codes: packs of 512, each with the steps of its 16 groups behind it (`kernels/rows.cuh`).
pub const fn coded_bytes(cols: usize) -> usize {
    cols.div_ceil(PACK) * (PACK + PACK / GROUP * 4)
}

/// The same inputs as they are after rounding to int8: `[n, cols]` f32.
pub fn round_inputs(x: u64, to: u64, n: usize, cols: usize) -> Launch {
    const WARPS: usize = 8;
    Launch::new(ROUND, [(cols / GROUP).div_ceil(WARPS), n, 1], WARPS, 0).words([x, to]).int(cols)
}

/// `[n, cols]` f32 at `x` as f16, each column times a power of two, [`halved_bytes`] a column, at `to`.
pub fn halves(x: u64, to: u64, n: usize, cols: usize) -> Launch {
    const WARPS: usize = 8;
    Launch::new(HALVES, [n, 1, 1], WARPS, WARPS * 4).words([x, to]).int(cols)
}

/// Bytes of a column as f16: zeros up to a multiple of 32 numbers, and what undoes the power of two (`kernels/rows.cuh`).
pub const fn halved_bytes(cols: usize) -> usize {
    cols.next_multiple_of(32) * 2 + 16
}

/// Whether `quant` takes inputs that are rounded to int8, as on the host.
fn rounds(quant: Quant) -> bool {
    quant.input() != Input::Floats
}

/// Scratch for the codes of `n` columns, and for those that kernels read beside them without using them; or for rounded inputs. `quant` is
/// the type of rows that the columns are multiplied with, one of them if they differ.
pub(super) fn codes_bytes(rows: RowKind, quant: Quant, n: usize, cols: usize) -> u64 {
    match rows {
        RowKind::Own(quant) if quant.is_grouped() && n > 0 => (n.next_multiple_of(width(n)) * coded_bytes(cols)) as u64,
        RowKind::Any if rounds(quant) => (n * cols * 4) as u64,
        _ => 0,
    }
}

/// Where the input of rows of a type lies: at `x` itself, or in `scratch`, as codes or rounded.
pub(super) fn input(
    (rows, quant): (RowKind, Quant),
    x: u64,
    scratch: u64,
    n: usize,
    cols: usize,
    out: &mut Launches,
) -> u64 {
    match rows {
        RowKind::Own(quant) if quant.is_grouped() => out.push(quantize(x, scratch, n, cols)),
        RowKind::Any if rounds(quant) => out.push(round_inputs(x, scratch, n, cols)),
        _ => return x,
    }
    scratch
}

/// Scratch for `n` columns as f16, where tensor cores may multiply such rows by them.
pub(super) fn halves_bytes(rows: RowKind, n: usize, cols: usize) -> u64 {
    match rows.tensor_tiles() {
        Some(tiles) if tiles.halves => (n * halved_bytes(cols)) as u64,
        _ => 0,
    }
}

/// The same as [`input`] for tensor cores that take f16.
pub(super) fn halved_input(x: u64, scratch: u64, n: usize, cols: usize, out: &mut Launches) -> u64 {
    out.push(halves(x, scratch, n, cols));
    scratch
}
