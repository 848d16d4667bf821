//! Attention over latents ([`Latent`]): what is kept of a position, queries in its terms, and values of what was mixed of it.

use super::attention::{Queries, attention};
use super::positions::TokenPosition;
use crate::cpu::attend::AttendScratch;
use crate::cpu::floats;
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, Kernels, MAX_AXPY_ROWS, MAX_COLUMNS, ThreadPool};
use crate::model::config::ModelConfig;
use crate::model::latent::{LatentHeads, LatentWeights};
use crate::model::layer::{Attention, Latent};
use crate::model::weights::Layer;
use crate::model::{KvCache, Matrix};
use crate::ops::linear::linear;
use crate::ops::math;

/// Tokens of a prompt that a task takes for one head: enough that unpacking the head's rows is a small part of it.
const TOKENS: usize = 128;
const _: () = assert!(TOKENS > MAX_COLUMNS);

/// Tokens of a prompt whose queries are made at a time: of many heads each takes some hundred kilobytes.
const PART: usize = 256;

/// What a layer with latents has as weights.
const WEIGHTS: &str = "a layer with latents has their weights";

/// Working memory of attention over latents.
#[derive(Default)]
pub(super) struct LatentRoom {
    /// The normed latents of queries, `[n, queries]`.
    lowered: Vec<f32>,
    /// As kernels read them.
    columns: Columns,
    /// Queries, `[n, heads, query]`.
    queries: Vec<f32>,
    /// Queries in terms of what is kept of a position, `[n, heads, kept]`.
    absorbed: Vec<f32>,
    /// What the heads mix of latents, `[n, heads, rank]`.
    mixed: Vec<f32>,
    /// Cosine and sine of each token's pairs, `[n, rope / 2]`, and of one.
    angles: Vec<(f32, f32)>,
    angle: Vec<(f32, f32)>,
    /// One per thread.
    heads: Vec<HeadRoom>,
}

/// A thread's part of it.
#[derive(Default)]
struct HeadRoom {
    /// A head's numbers of a few tokens, one token behind the other.
    input: Vec<f32>,
    columns: Columns,
    sums: Vec<f32>,
    across: floats::Room,
}

/// out[t] = the values of all heads of token t, `[n, heads * values]`. `projected` is `[n, rows]`: queries, or their latent, and what was kept of
/// the token, which is in its cache.
#[allow(clippy::too_many_arguments)]
pub(super) fn latent_attention(
    (pool, kernels): (&mut ThreadPool, &Kernels),
    (c, layer, l): (&ModelConfig, &Layer, usize),
    (a, form): (Attention, Latent),
    caches: &[KvCache],
    positions: &[TokenPosition],
    projected: &[f32],
    (attend, room): (&mut [AttendScratch], &mut LatentRoom),
    out: &mut [f32],
) {
    let weights = layer.latent.as_ref().expect(WEIGHTS);
    room.heads.resize_with(pool.threads(), HeadRoom::default);
    let of_parts = projected.chunks(PART * a.qkv_dim()).zip(out.chunks_mut(PART * a.output_dim()));
    for (positions, (projected, out)) in positions.chunks(PART).zip(of_parts) {
        make_queries((pool, kernels), (c, weights), (a, form), projected, room);
        let LatentRoom { queries, absorbed, mixed, angles, angle, heads, .. } = room;
        angles.clear();
        for at in positions {
            math::angles(at.position, c.rotary(&a), a.rotary_scale, angle);
            angles.extend_from_slice(angle);
        }
        absorbed.resize(positions.len() * a.q_dim(), 0.0);
        mixed.resize(positions.len() * a.heads * form.rank, 0.0);
        absorb((pool, kernels), (weights, a, form), queries, angles, heads, absorbed);
        let absorbed = Queries { numbers: absorbed, stride: a.q_dim() };
        attention((pool, kernels), a, layer, caches, l, positions, absorbed, attend, mixed);
        make_values((pool, kernels), (weights, a, form), mixed, heads, out);
    }
}

/// The queries of all heads, of their latent or as they were projected.
fn make_queries(
    (pool, kernels): (&mut ThreadPool, &Kernels),
    (c, weights): (&ModelConfig, &LatentWeights),
    (a, form): (Attention, Latent),
    projected: &[f32],
    room: &mut LatentRoom,
) {
    let (n, LatentRoom { lowered, columns, queries, .. }) = (projected.len() / a.qkv_dim(), room);
    let of_queries = projected.chunks_exact(a.qkv_dim()).map(|row| &row[..a.query_rows()]);
    queries.resize(n * a.heads * form.query(), 0.0);
    let Some((norm, up)) = &weights.queries else {
        of_queries.zip(queries.chunks_exact_mut(a.query_rows())).for_each(|(from, to)| to.copy_from_slice(from));
        return;
    };
    lowered.resize(n * form.queries, 0.0);
    of_queries.zip(lowered.chunks_exact_mut(form.queries)).for_each(|(from, to)| math::norm(c.norm, norm, from, to));
    linear(pool, kernels, up, lowered, n, columns, queries);
}

/// How tokens and heads are divided into tasks.
#[derive(Clone, Copy)]
struct Tasks {
    n: usize,
    heads: usize,
    /// Tokens of a task.
    each: usize,
}

impl Tasks {
    fn of(n: usize, heads: usize) -> Tasks {
        Tasks { n, heads, each: if n > MAX_COLUMNS { TOKENS } else { n } }
    }

    fn count(self) -> usize {
        self.n.div_ceil(self.each) * self.heads
    }

    /// The head of a task and its tokens.
    fn of_task(self, task: usize) -> (usize, std::ops::Range<usize>) {
        let first = task / self.heads * self.each;
        (task % self.heads, first..self.n.min(first + self.each))
    }
}

/// Brings the queries of each head into the terms of what is kept, so scaled that attention over so many numbers scales them as the head's own are.
fn absorb(
    (pool, kernels): (&mut ThreadPool, &Kernels),
    (weights, a, form): (&LatentWeights, Attention, Latent),
    queries: &[f32],
    angles: &[(f32, f32)],
    rooms: &mut [HeadRoom],
    out: &mut [f32],
) {
    let (query, kept, rank) = (form.query(), form.kept(), form.rank);
    let scale = form.scale * (kept as f32 / query as f32).sqrt();
    let (tasks, pairs) =
        (Tasks::of(queries.len() / (a.heads * query), a.heads), angles.len() * a.heads * query / queries.len());
    let (rooms, out) = (Parts::new(rooms), Parts::new(out));
    pool.run(tasks.count(), |thread, task| {
        let (head, tokens) = tasks.of_task(task);
        // SAFETY: one room per thread; each task writes its own head of its own tokens.
        let room = &mut unsafe { rooms.part(thread..thread + 1) }[0];
        let of = |t: usize| &queries[(t * a.heads + head) * query..][..query];
        room.input.clear();
        tokens.clone().for_each(|t| room.input.extend(of(t)[..form.plain].iter().map(|x| x * scale)));
        for t in tokens.clone() {
            let at = (t * a.heads + head) * kept;
            let [latent, rotated] = unsafe { [out.part(at..at + rank), out.part(at + rank..at + kept)] };
            latent.fill(0.0);
            rotated.iter_mut().zip(&of(t)[form.plain..]).for_each(|(to, x)| *to = x * scale);
            math::rope_neighbours(rotated, &angles[t * pairs..(t + 1) * pairs]);
        }
        let to = out.start().wrapping_add((tokens.start * a.heads + head) * kept);
        // SAFETY: the rows are the head's; what is written is the first `rank` numbers of each of its queries.
        unsafe {
            match &weights.heads {
                LatentHeads::Apart([keys, _]) => {
                    product(kernels, (keys, head * rank, rank), room, tokens.len(), to, a.q_dim());
                }
                LatentHeads::Joined(both) => {
                    let first = head * (form.plain + form.values);
                    sum_of_rows(kernels, (both, first, form.plain), room, tokens.len(), to, a.q_dim());
                }
            }
        }
    });
}

/// out[t] = the values of what each head has mixed.
fn make_values(
    (pool, kernels): (&mut ThreadPool, &Kernels),
    (weights, a, form): (&LatentWeights, Attention, Latent),
    mixed: &[f32],
    rooms: &mut [HeadRoom],
    out: &mut [f32],
) {
    let (rank, stride) = (form.rank, a.output_dim());
    let tasks = Tasks::of(out.len() / stride, a.heads);
    let (rooms, out) = (Parts::new(rooms), Parts::new(out));
    pool.run(tasks.count(), |thread, task| {
        let (head, tokens) = tasks.of_task(task);
        // SAFETY: as in `absorb`.
        let room = &mut unsafe { rooms.part(thread..thread + 1) }[0];
        room.input.clear();
        tokens.clone().for_each(|t| room.input.extend_from_slice(&mixed[(t * a.heads + head) * rank..][..rank]));
        let (matrix, first) = weights.heads.values(form, head);
        let to = out.start().wrapping_add(tokens.start * stride + head * form.values);
        unsafe { product(kernels, (matrix, first, form.values), room, tokens.len(), to, stride) };
    });
}

/// `to[t * stride + r]` = row `first + r` of a matrix times the room's input of token t.
///
/// # Safety
/// There are so many rows, and `to` is writable at every index named.
unsafe fn product(
    kernels: &Kernels,
    (matrix, first, rows): (&Matrix, usize, usize),
    room: &mut HeadRoom,
    n: usize,
    to: *mut f32,
    stride: usize,
) {
    assert!(first + rows <= matrix.rows && room.input.len() == n * matrix.cols);
    room.columns.set_here(kernels, &room.input, n, [matrix.quant]);
    // SAFETY: the rows are the matrix's; the rest is the caller's promise.
    unsafe { kernels.products(matrix.quant, matrix.rows_from(first), rows, &room.columns, to, stride) };
}

/// `to[t * stride + j]`, which is 0, becomes the sum over r of number r of the room's input of token t times number j of row `first + r`.
///
/// # Safety
/// As [`product`].
unsafe fn sum_of_rows(
    kernels: &Kernels,
    (matrix, first, rows): (&Matrix, usize, usize),
    room: &mut HeadRoom,
    n: usize,
    to: *mut f32,
    stride: usize,
) {
    let HeadRoom { input, columns, sums, across } = room;
    let (quant, cols) = (matrix.quant, matrix.cols);
    assert!(first + rows <= matrix.rows && input.len() == n * rows && !quant.is_grouped());
    if n > MAX_COLUMNS {
        columns.set_across(None, kernels, input, n, quant);
        // SAFETY: the caller's promises.
        return unsafe { kernels.across(quant, |r| matrix.row(first + r), cols, 0..cols, columns, across, to, stride) };
    }
    sums.clear();
    sums.resize(n * cols, 0.0);
    let mut weights = [0.0; MAX_AXPY_ROWS * MAX_COLUMNS];
    for start in (0..rows).step_by(MAX_AXPY_ROWS) {
        let count = MAX_AXPY_ROWS.min(rows - start);
        let pointers: [*const u8; MAX_AXPY_ROWS] =
            std::array::from_fn(|r| matrix.row_ptr(first + start + r.min(count - 1)));
        for r in 0..count {
            (0..n).for_each(|t| weights[r * n + t] = input[t * rows + start + r]);
        }
        // SAFETY: each row has `cols` numbers, as has each token's part of the sums.
        unsafe { (kernels.axpy(quant))(&pointers[..count], 0, &weights[..count * n], cols, sums) };
    }
    for (t, sums) in sums.chunks_exact(cols).enumerate() {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(sums.as_ptr(), to.add(t * stride), cols) };
    }
}
