//! Matrix times columns: rows shared out over the team.
//!
//! With one column the row kernels read each weight once from memory and are bound by it; with a prompt's many they hold
//! tiles of rows and columns in registers and are bound by arithmetic. Grouped types multiply int8 by int8.

use crate::cpu::team::Parts;
use crate::cpu::{Columns, Kernels, Team};
use crate::formats::rows;
use crate::model::Matrix;

/// Weight bytes a thread takes at a time: some tens of microseconds of reading, so that a core which is taken away
/// holds back little and taking costs nothing. With many columns it stays in a core's L2 beside their inputs.
const PIECE_BYTES: usize = 256 << 10;

/// out[b * rows + r] = matrix row r · input[b]. `input` is `[n, cols]`, `out` `[n, rows]`.
pub fn linear(
    team: &mut Team,
    kernels: &Kernels,
    matrix: &Matrix,
    input: &[f32],
    n: usize,
    columns: &mut Columns,
    out: &mut [f32],
) {
    assert_eq!((input.len(), out.len()), (n * matrix.cols, n * matrix.rows));
    columns.set(input, n, matrix.quant);
    let (x, dot) = (&*columns, kernels.dot(matrix.quant));
    // Four rows at a time is what the tiles of the kernels take.
    let per_piece = (PIECE_BYTES / matrix.row_bytes).clamp(1, matrix.rows.div_ceil(team.threads())).next_multiple_of(4);
    // The last piece of each thread comes in quarters, so that none waits long for another at the end.
    let (large, small) =
        ((matrix.rows / per_piece).saturating_sub(team.threads()), (per_piece / 4).next_multiple_of(4));
    let start = |piece: usize| large.min(piece) * per_piece + piece.saturating_sub(large) * small;
    let out = Parts::new(out);
    team.run(large + (matrix.rows - start(large)).div_ceil(small), |_, piece| {
        let range = start(piece)..start(piece + 1).min(matrix.rows);
        // SAFETY: the rows are inside the section; `kernels` are for this machine; each piece writes its own rows of `out`,
        // whose last index is (n - 1) * rows + rows - 1.
        unsafe { dot(matrix.rows_from(range.start, 1), range.len(), x, out.start().add(range.start), matrix.rows) };
    });
}

/// One row as numbers (an embedding).
pub fn read_row(matrix: &Matrix, r: usize, out: &mut [f32]) {
    rows::decode(matrix.quant, matrix.row(r), out);
}
