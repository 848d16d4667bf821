//! The tiles by which [`Linear`](super::Linear) multiplies many columns.

use super::Function;
use super::launch::{GROUPED_TILE_BYTES, Launch, RowKind, WIDE_TILE_BYTES};
use crate::formats::rows::Quant;

pub(super) const FUNCTIONS: &[&[&str]] =
    &[&["matmul_f32", "matmul_f16", "matmul_q8_0", "matmul_q4_0", "matmul_any", "matmul_wide_f32", "matmul_wide_f16"]];
const MATMUL: Function = Function::named("matmul_f32");
const WIDE: Function = Function::named("matmul_wide_f32");

/// Columns from which on a tile has 64 of them and twice the rows: with fewer there would be too few tiles for a card.
const WIDE_COLUMNS: usize = 33;

/// Tiles of `rows` of a type by `n` columns, without arguments: they are those of `linear.cu`.
pub(super) fn tiles(quant: Quant, rows: usize, n: usize) -> Launch {
    // A tile and its shared memory, as `kernels/matmul.cu` has them.
    let kind = RowKind::of(quant);
    let (first, [tile_rows, tile_columns], shared) = match kind {
        RowKind::Own(Quant::Q8 | Quant::Q4) => (MATMUL, [32, 32], GROUPED_TILE_BYTES),
        RowKind::Own(_) if n >= WIDE_COLUMNS => (WIDE, [128, 64], WIDE_TILE_BYTES),
        RowKind::Own(_) | RowKind::Any => (MATMUL, [64, 32], 13312),
    };
    let grid = [rows.div_ceil(tile_rows), n.div_ceil(tile_columns), 1];
    Launch::new(first.next(kind.index()), grid, 8, shared)
}
