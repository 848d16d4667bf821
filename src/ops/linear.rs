//! Products of a matrix with the vectors of one or more tokens, its rows divided among the threads.
//!
//! For one token the row kernels read each weight once from memory, which limits them; for the many tokens of a prompt they hold
//! tiles of rows and tokens in registers and are limited by arithmetic. Grouped types multiply int8 by int8.

use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, Kernels, ManyForm, ThreadPool};
use crate::formats::rows;
use crate::model::{Matrix, Stacked};

/// Weight bytes that a thread takes at a time: some tens of microseconds of reading, so that a core that is taken away delays little and
/// taking a task costs nothing. With many tokens it stays in a core's L2 cache, together with their inputs.
pub const PIECE_BYTES: usize = 256 << 10;
/// Rows that the tiles of kernels take at a time, for few columns.
pub const DOT_ROWS: usize = 4;
/// The same for many columns.
pub const GEMM_ROWS: usize = 32;
/// Most parts of a stacked matrix: queries, keys, values and a gate.
const MAX_PARTS: usize = 4;

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
    assert_eq!(input.len(), n * matrix.cols);
    columns.set_many(pool, kernels, input, n, [matrix.quant]);
    products(pool, kernels, std::slice::from_ref(matrix), columns, out);
}

/// As [`linear`], with the rows of all parts in the order of the whole. `unordered` is workspace.
pub fn linear_stacked(
    pool: &mut ThreadPool,
    kernels: &Kernels,
    matrix: &Stacked,
    input: &[f32],
    columns: &mut Columns,
    unordered: &mut Vec<f32>,
    out: &mut [f32],
) {
    let n = input.len() / matrix.cols();
    assert_eq!(input.len(), n * matrix.cols());
    columns.set_many(pool, kernels, input, n, matrix.parts().iter().map(|part| part.quant));
    if matrix.is_in_order() {
        return products(pool, kernels, matrix.parts(), columns, out);
    }
    let rows = matrix.rows();
    unordered.resize(n * rows, 0.0);
    products(pool, kernels, matrix.parts(), columns, unordered);
    unordered.chunks_exact(rows).zip(out.chunks_exact_mut(rows)).for_each(|(from, to)| matrix.put_in_order(from, to));
}

/// How the rows of a matrix are divided into tasks.
#[derive(Clone, Copy, Default)]
struct Tasks {
    /// Rows of a large task, of which there are `large`; those of the others, up to the last.
    per_task: usize,
    large: usize,
    small: usize,
    count: usize,
}

impl Tasks {
    /// For tiles of `tile` rows.
    fn of(matrix: &Matrix, threads: usize, tile: usize, is_last: bool) -> Tasks {
        let per_task = (PIECE_BYTES / matrix.row_bytes).clamp(1, matrix.rows.div_ceil(threads)).next_multiple_of(tile);
        // The last task of each thread is divided into quarters, so that no thread waits long for another at the end.
        let quartered = if is_last { threads } else { 0 };
        let (large, small) =
            ((matrix.rows / per_task).saturating_sub(quartered), (per_task / 4).next_multiple_of(tile));
        let small = if is_last { small } else { per_task };
        Tasks { per_task, large, small, count: large + (matrix.rows - large * per_task).div_ceil(small) }
    }

    fn start(self, task: usize) -> usize {
        self.large.min(task) * self.per_task + task.saturating_sub(self.large) * self.small
    }
}

/// `out[b * rows + r]` = row r of the parts, one below the other, times column b of `x`, which was set for the types of all parts.
pub fn products(pool: &mut ThreadPool, kernels: &Kernels, parts: &[Matrix], x: &Columns, out: &mut [f32]) {
    let rows: usize = parts.iter().map(|part| part.rows).sum();
    assert!(parts.len() <= MAX_PARTS && out.len() == x.n * rows && parts.iter().all(|part| part.cols == x.cols));
    let by_rows = parts.iter().all(|part| x.form(kernels, part.quant) == ManyForm::Rows);
    let tile = if by_rows { DOT_ROWS } else { GEMM_ROWS };
    let mut tasks = [Tasks::default(); MAX_PARTS];
    for (i, (tasks, part)) in tasks.iter_mut().zip(parts).enumerate() {
        *tasks = Tasks::of(part, pool.threads(), tile, i + 1 == parts.len());
    }
    let out = Parts::new(out);
    pool.run(tasks.iter().map(|tasks| tasks.count).sum(), |_, mut task| {
        let mut first = 0;
        for (tasks, part) in tasks.iter().zip(parts) {
            if task < tasks.count {
                let range = tasks.start(task)..tasks.start(task + 1).min(part.rows);
                let (weights, to) = (part.rows_from(range.start), first + range.start);
                // SAFETY: the rows are inside the matrix; `kernels` are for this machine; each task writes its own rows of `out`,
                // whose last index is (n - 1) * rows + rows - 1.
                unsafe { kernels.products(part.quant, weights, range.len(), x, out.start().add(to), rows) };
                return;
            }
            (task, first) = (task - tasks.count, first + part.rows);
        }
    });
}

/// Decodes row `r` into `out`, `[cols]`, such as the embedding of a token.
pub fn read_row(matrix: &Matrix, r: usize, out: &mut [f32]) {
    rows::decode(matrix.quant, matrix.row(r), out);
}
