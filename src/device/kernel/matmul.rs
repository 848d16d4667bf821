//! The tiles by which [`Linear`](super::Linear) multiplies many columns.

use super::Function;
use super::launch::{GROUPED_TILE_BYTES, Launch, RowKind, TensorTiles, WIDE_TILE_BYTES};
use crate::formats::rows::Quant;

pub(super) const FUNCTIONS: &[&[&str]] = &[
    &["matmul_f32", "matmul_f16", "matmul_q8_0", "matmul_q4_0", "matmul_any", "matmul_wide_f32", "matmul_wide_f16"],
    &["matmul_tensor_f16", "matmul_tensor_q8_0", "matmul_tensor_q4_0"],
];
const MATMUL: Function = Function::named("matmul_f32");
const WIDE: Function = Function::named("matmul_wide_f32");
const TENSOR: Function = Function::named("matmul_tensor_f16");

/// Columns from which on a tile has 64 of them and twice the rows: with fewer there would be too few tiles for a card. With fewer there are
/// no tiles by tensor cores, either: so what is decoded together has the same bits whatever a card multiplies prompts by.
pub(super) const WIDE_COLUMNS: usize = 33;

/// Tiles of `rows` of a type by `n` columns, without arguments: they are those of `linear.cu`.
pub(super) fn tiles(quant: Quant, rows: usize, n: usize, tensor: Option<TensorTiles>) -> Launch {
    // A tile and its shared memory, as `kernels/matmul.cu` has them.
    let kind = RowKind::of(quant);
    let lanes = |first: Function, tile, shared| (first.next(kind.index()), tile, shared);
    let (function, [tile_rows, tile_columns], shared) = match (kind, tensor) {
        (_, Some(tiles)) => (TENSOR.next(tiles.index), if tiles.halves { [128, 64] } else { [32, 32] }, tiles.shared),
        (RowKind::Own(Quant::Q8 | Quant::Q4), None) => lanes(MATMUL, [32, 32], GROUPED_TILE_BYTES),
        (RowKind::Own(_), None) if n >= WIDE_COLUMNS => lanes(WIDE, [128, 64], WIDE_TILE_BYTES),
        (RowKind::Own(_) | RowKind::Any, None) => lanes(MATMUL, [64, 32], 13312),
    };
    Launch::new(function, [rows.div_ceil(tile_rows), n.div_ceil(tile_columns), 1], 8, shared)
}
