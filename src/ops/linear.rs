//! Products of a matrix with the vectors of one or more tokens, its rows divided among the threads.
//!
//! For one token the row kernels read each weight once from memory, which limits them; for the many tokens of a prompt they hold
//! tiles of rows and tokens in registers and are limited by arithmetic. Grouped types multiply int8 by int8.

use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, Kernels, ThreadPool};
use crate::formats::rows;
use crate::model::Matrix;

/// Weight bytes that a thread takes at a time: some tens of microseconds of reading, so that a core that is taken away delays little and
/// taking a task costs nothing. With many tokens it stays in a core's L2 cache, together with their inputs.
const PIECE_BYTES: usize = 256 << 10;

/// `out[b * rows + r]` = matrix row r · `input[b]`, with `input` `[n, cols]` and `out` `[n, rows]`. `columns` is workspace for inputs in
/// the form that the kernels read.
pub fn linear(
    pool: &mut ThreadPool,
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
    // The kernels' tiles take four rows at a time.
    let per_task = (PIECE_BYTES / matrix.row_bytes).clamp(1, matrix.rows.div_ceil(pool.threads())).next_multiple_of(4);
    // The last task of each thread is divided into quarters, so that no thread waits long for another at the end.
    let (large, small) = ((matrix.rows / per_task).saturating_sub(pool.threads()), (per_task / 4).next_multiple_of(4));
    let start = |task: usize| large.min(task) * per_task + task.saturating_sub(large) * small;
    let out = Parts::new(out);
    pool.run(large + (matrix.rows - start(large)).div_ceil(small), |_, task| {
        let range = start(task)..start(task + 1).min(matrix.rows);
        // SAFETY: the rows are inside the section; `kernels` are for this machine; each task writes its own rows of `out`,
        // whose last index is (n - 1) * rows + rows - 1.
        unsafe { dot(matrix.rows_from(range.start), range.len(), x, out.start().add(range.start), matrix.rows) };
    });
}

/// Decodes row `r` into `out`, `[cols]`, such as the embedding of a token.
pub fn read_row(matrix: &Matrix, r: usize, out: &mut [f32]) {
    rows::decode(matrix.quant, matrix.row(r), out);
}
