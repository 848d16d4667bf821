//! Attention of a few queries, or of many, over one head's keys and values.

use super::floats::{DEPTH, Room};
use super::{Columns, FloatPanels, Kernels, MAX_AXPY_ROWS, Rows};
use crate::exp::exp;
use crate::formats::rows::Quant;
use std::ops::Range;

/// Queries that attend at once, so that keys and values are read once for all of them; the outputs of more would fill L1.
pub const QUERIES: usize = 8;

/// The same of a prompt, whose queries attend by tiles: with fewer, turning the keys takes a larger share; the scores of more, with those
/// turned, would not stay in L2 beside a few thousand positions.
pub const MANY_QUERIES: usize = 96;

/// Keys and values of one head.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    /// Type of the numbers: f16, f32 or a block type that a head is whole blocks of.
    pub quant: Quant,
    /// `[positions, dim]`
    pub keys: &'a [u8],
    /// `[positions, dim]`; they may be the keys.
    pub values: &'a [u8],
    /// How many numbers of a value, the first ones, are mixed: `dim`, or fewer where the keys have more.
    pub mixed: usize,
    /// A score of each query head that shares them, which takes part in the softmax of its queries and brings no value; query `b` is of head
    /// `b` modulo their number. Empty where there are none.
    pub sinks: &'a [f32],
}

/// One thread's buffers, kept between calls.
#[derive(Default)]
pub struct AttendScratch {
    /// `[n, dim]`
    queries: Vec<f32>,
    columns: Columns,
    /// `[n, positions]`
    scores: Vec<f32>,
    /// The scores of a few positions, position by position: `[up to MAX_AXPY_ROWS, n]`.
    weights: Vec<f32>,
    /// `[n, numbers of a value that are mixed]`
    mixed: Vec<f32>,
    /// Decoded keys or values of a few positions: `[up to DECODED, dim]`.
    decoded: Vec<f32>,
    /// The queries, and the scores, as tiles read them.
    panels: FloatPanels,
    score_panels: FloatPanels,
    room: Room,
}

/// Makes weights of each query's products with the keys, `[n, positions]`: the softmax over the positions that it sees and its head's sink, 0
/// elsewhere.
fn weigh(scores: &mut [f32], positions: usize, dim: usize, sinks: &[f32], sees: impl Fn(usize) -> Range<usize>) {
    let scale = 1.0 / (dim as f32).sqrt();
    for (b, scores) in scores.chunks_exact_mut(positions).enumerate() {
        let seen = sees(b);
        scores[..seen.start].fill(0.0);
        scores[seen.end..].fill(0.0);
        let sink = if sinks.is_empty() { None } else { Some(sinks[b % sinks.len()]) };
        softmax(&mut scores[seen], scale, sink);
    }
}

impl AttendScratch {
    /// Allocates what up to `queries` queries of `dim` numbers over `positions` positions need, so that nothing is allocated later.
    pub fn reserve(&mut self, queries: usize, positions: usize, dim: usize) {
        let room = |v: &mut Vec<f32>, numbers: usize| v.reserve(numbers.saturating_sub(v.len()));
        room(&mut self.scores, queries * positions);
        room(&mut self.weights, queries * MAX_AXPY_ROWS);
        room(&mut self.mixed, queries * dim);
        room(&mut self.decoded, DECODED * dim);
        if self.queries.capacity() < queries * dim {
            self.queries.resize(queries * dim, 0.0);
            self.columns.set(&self.queries, queries, Quant::F32);
        }
    }

    /// The buffer to write the queries to before [`AttendScratch::attend`], `[n, dim]`; `numbers` is its length.
    pub fn queries(&mut self, numbers: usize) -> &mut [f32] {
        self.queries.resize(numbers, 0.0);
        &mut self.queries
    }

    /// For each query the weighted sum of the values at the positions that it sees, `[n, head.mixed]`. The weights are the softmax of its
    /// products with the keys divided by the square root of `dim`, and of its head's sink. Query `b` sees the positions `sees(b)` of `head`; keys and values
    /// that no query sees may be anything finite.
    pub fn attend(
        &mut self,
        kernels: &Kernels,
        head: Head<'_>,
        dim: usize,
        sees: impl Fn(usize) -> Range<usize>,
    ) -> &[f32] {
        let AttendScratch { queries, columns, scores, weights, mixed, decoded, .. } = self;
        let (n, stride) = (queries.len() / dim, head.quant.number_bytes(dim));
        let positions = head.keys.len() / stride;
        assert!(!head.quant.is_grouped() && head.values.len() == head.keys.len());
        let (quant, stride, together) = match head.quant {
            Quant::Block(_) => (Quant::F32, dim * size_of::<f32>(), DECODED),
            quant => (quant, stride, positions),
        };
        columns.set(queries, n, quant);
        scores.resize(n * positions, 0.0);
        for first in (0..positions).step_by(together.max(1)) {
            let count = together.min(positions - first);
            let rows =
                Rows { first: numbers(kernels, head, head.keys, dim, first..first + count, decoded), stride, ahead: 0 };
            // SAFETY: each key has `dim` numbers; `scores` has a place for each of each query; the kernels are for this machine.
            unsafe { (kernels.dot(quant))(rows, count, columns, scores.as_mut_ptr().add(first), positions) };
        }
        weigh(scores, positions, dim, head.sinks, sees);
        mixed.clear();
        mixed.resize(n * head.mixed, 0.0);
        let add = kernels.axpy(quant);
        for start in (0..positions).step_by(together.max(1)) {
            let range = start..positions.min(start + together);
            let values = numbers(kernels, head, head.values, dim, range.clone(), decoded);
            for first in range.clone().step_by(MAX_AXPY_ROWS) {
                let count = MAX_AXPY_ROWS.min(range.end - first);
                let row = |r: usize| values.wrapping_add((first - start + r.min(count - 1)) * stride);
                let rows: [*const u8; MAX_AXPY_ROWS] = std::array::from_fn(row);
                let weights = if n == 1 {
                    &scores[first..first + count]
                } else {
                    weights.clear();
                    (0..count).for_each(|r| weights.extend((0..n).map(|b| scores[b * positions + first + r])));
                    &weights[..]
                };
                // SAFETY: each value has `dim` numbers, and each query's part of `mixed` as many as are mixed.
                unsafe { add(&rows[..count], MAX_AXPY_ROWS * stride, weights, head.mixed, mixed) };
            }
        }
        mixed
    }

    /// The same for many queries, by tiles.
    pub fn attend_many(
        &mut self,
        kernels: &Kernels,
        head: Head<'_>,
        dim: usize,
        sees: impl Fn(usize) -> Range<usize>,
    ) -> &[f32] {
        let AttendScratch { queries, scores, mixed, panels, score_panels, room, .. } = self;
        let (n, stride) = (queries.len() / dim, head.quant.number_bytes(dim));
        let positions = head.keys.len() / stride;
        assert!(!head.quant.is_grouped() && head.values.len() == head.keys.len());
        panels.set(None, &kernels.tiles, queries, n);
        scores.resize(n * positions, 0.0);
        let mut keys = [std::ptr::null(); MANY_KEYS];
        for first in (0..positions).step_by(MANY_KEYS) {
            let keys = &mut keys[..MANY_KEYS.min(positions - first)];
            keys.iter_mut().enumerate().for_each(|(i, key)| *key = head.keys[(first + i) * stride..].as_ptr());
            // SAFETY: each key has `dim` numbers; `scores` has a place for each of each query; the kernels are for this machine.
            unsafe { kernels.tiles.rows(head.quant, keys, panels, scores.as_mut_ptr().add(first), positions) };
        }
        weigh(scores, positions, dim, head.sinks, sees);
        score_panels.set(None, &kernels.tiles, &scores[..n * positions], n);
        // A part of a row that ends elsewhere cannot be decoded by itself.
        let wide = if head.mixed.is_multiple_of(DEPTH) { head.mixed } else { dim };
        mixed.clear();
        mixed.resize(n * wide, 0.0);
        let row = |position: usize| &head.values[position * stride..(position + 1) * stride];
        // SAFETY: each query has its own part of `mixed`; the kernels are for this machine.
        unsafe {
            kernels.tiles.across(head.quant, row, dim, 0..wide, score_panels, room, mixed.as_mut_ptr(), wide);
        }
        if wide > head.mixed {
            (1..n).for_each(|b| mixed.copy_within(b * wide..b * wide + head.mixed, b * head.mixed));
            mixed.truncate(n * head.mixed);
        }
        mixed
    }
}

/// Positions whose keys or values are decoded at a time: with the queries they stay in L1.
const DECODED: usize = 64;

/// Keys or values (`rows`, of `head`) of positions `range`, as floats: where they lie, or decoded.
fn numbers(
    kernels: &Kernels,
    head: Head<'_>,
    rows: &[u8],
    dim: usize,
    range: Range<usize>,
    decoded: &mut Vec<f32>,
) -> *const u8 {
    let stride = head.quant.number_bytes(dim);
    let rows = &rows[range.start * stride..range.end * stride];
    if !matches!(head.quant, Quant::Block(_)) {
        return rows.as_ptr();
    }
    // Heads are whole blocks, so their rows together are one long row, which once added to nothing is decoded.
    decoded.clear();
    decoded.resize(range.len() * dim, 0.0);
    // SAFETY: the numbers of a row are all that block types read; as many are in `decoded`.
    unsafe { (kernels.axpy(head.quant))(&[rows.as_ptr()], 0, &[1.0], decoded.len(), decoded) };
    decoded.as_ptr().cast()
}

/// Keys that are multiplied by a call of the tiles.
const MANY_KEYS: usize = 256;

/// Softmax of `scores` times `scale`, in place: weights that sum to one, with that of `sink`, which is not scaled, where there is one. In lanes,
/// so that it vectorises.
fn softmax(scores: &mut [f32], scale: f32, sink: Option<f32>) {
    const LANES: usize = 16;
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let (chunks, rest) = scores.as_chunks::<LANES>();
    let mut tops = [f32::NEG_INFINITY; LANES];
    chunks.iter().for_each(|chunk| tops.iter_mut().zip(chunk).for_each(|(top, &s)| *top = larger(*top, s)));
    let top = tops.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger);
    let (chunks, rest) = scores.as_chunks_mut::<LANES>();
    let mut sums = [0f32; LANES];
    for chunk in chunks {
        for (s, sum) in chunk.iter_mut().zip(&mut sums) {
            *s = exp((*s - top) * scale);
            *sum += *s;
        }
    }
    for (s, sum) in rest.iter_mut().zip(&mut sums) {
        *s = exp((*s - top) * scale);
        *sum += *s;
    }
    // Beside a sink far above all scores it is infinite, and their share is 0.
    let of_sink = sink.map_or(0.0, |sink| (sink - top * scale).exp());
    let share = 1.0 / (sums.iter().sum::<f32>() + of_sink);
    scores.iter_mut().for_each(|s| *s *= share);
}
