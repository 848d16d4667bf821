//! Matrix times columns: rows shared out over the team.
//!
//! Up to [`MAX_COLUMNS`] columns the row kernels read each weight once from memory and are bound by it. With more, the
//! arithmetic binds: tiles of rows are made f32 and multiplied by a GEMM library.

use crate::cpu::team::Parts;
use crate::cpu::{Columns, Kernels, MAX_COLUMNS, Team};
use crate::formats::rows::{self, Quant};
use crate::model::Matrix;
use faer::{Accum, MatMut, MatRef, Par};

/// Weight bytes a thread takes at a time: some tens of microseconds of reading, so that a core which is taken away
/// holds back little and taking costs nothing.
pub const PIECE_BYTES: usize = 256 << 10;

/// Weight numbers that a GEMM tile holds: 1 MiB of f32, which stays in a core's L2 between unpacking and multiplying.
const TILE_NUMBERS: usize = 256 << 10;

/// A thread's room for unpacked weights.
pub type Tile = Vec<f32>;

/// out[b * stride + r] = matrix row r · input[b]. `input` is `[n, cols]`, `out` `[n, rows]`.
pub fn linear(
    team: &mut Team,
    kernels: &Kernels,
    matrix: &Matrix,
    input: &[f32],
    n: usize,
    columns: &mut Columns,
    tiles: &mut [Tile],
    out: &mut [f32],
) {
    debug_assert_eq!((input.len(), out.len()), (n * matrix.cols, n * matrix.rows));
    if n <= MAX_COLUMNS {
        columns.set(input, n, matrix.quant);
        dot_rows(team, kernels, matrix, columns, out);
    } else {
        gemm(team, matrix, input, n, tiles, out);
    }
}

fn dot_rows(team: &mut Team, kernels: &Kernels, matrix: &Matrix, x: &Columns, out: &mut [f32]) {
    let dot = kernels.dot(matrix.quant);
    let rows_per_piece = (PIECE_BYTES / matrix.row_bytes).clamp(1, matrix.rows.div_ceil(team.threads()));
    debug_assert_eq!(out.len(), x.n * matrix.rows);
    let out = Parts::new(out);
    team.run(matrix.rows.div_ceil(rows_per_piece), |_, piece| {
        let range = piece * rows_per_piece..matrix.rows.min((piece + 1) * rows_per_piece);
        // SAFETY: the rows are inside the section; `kernels` are for this machine; each piece writes its own rows of `out`,
        // whose last index is (n - 1) * rows + rows - 1.
        unsafe { dot(matrix.row_ptr(range.start), range.len(), x, out.start().add(range.start), matrix.rows) };
    });
}

fn gemm(team: &mut Team, matrix: &Matrix, input: &[f32], n: usize, tiles: &mut [Tile], out: &mut [f32]) {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let per_tile = (TILE_NUMBERS / cols).clamp(8, rows.div_ceil(team.threads()).max(8));
    let (out, tiles) = (Parts::new(out), Parts::new(tiles));
    team.run(rows.div_ceil(per_tile), |thread, piece| {
        let range = piece * per_tile..rows.min((piece + 1) * per_tile);
        // SAFETY: one tile per thread.
        let tile = &mut unsafe { tiles.part(thread..thread + 1) }[0];
        tile.resize(per_tile * cols, 0.0);
        for (r, values) in range.clone().zip(tile.chunks_exact_mut(cols)) {
            rows::decode(matrix.quant, matrix.row(r), values);
        }
        // SAFETY: in bounds: n rows of `rows` numbers, of which this piece alone writes columns `range`.
        unsafe {
            let first = out.part(range.start..range.start + 1).as_mut_ptr();
            let dst = MatMut::from_raw_parts_mut(first, n, range.len(), rows as isize, 1);
            let x = MatRef::from_raw_parts(input.as_ptr(), n, cols, cols as isize, 1);
            let w = MatRef::from_raw_parts(tile.as_ptr(), cols, range.len(), 1, cols as isize);
            faer::linalg::matmul::matmul(dst, Accum::Replace, x, w, 1.0, Par::Seq);
        }
    });
}

/// One row as numbers (an embedding).
pub fn read_row(matrix: &Matrix, r: usize, out: &mut [f32]) {
    rows::decode(matrix.quant, matrix.row(r), out);
}

/// Whether weights of this type are worth a GEMM tile as they are.
pub fn is_f32(matrix: &Matrix) -> bool {
    matrix.quant == Quant::F32
}
