//! Inputs in int8 with one fixed step, and what lies beyond it, computed beside them in f32: shadow outliers (mllm-NPU 3.3, equation 1).
//!
//! An input x is cut into what the step holds, at most 127 of it, and the rest: x = clamp(x) + rest. Products are linear, so those of the
//! rest, which few channels have, are added to those of the codes. The paper's rest is a multiple of 128 steps; ours is exact.

use super::rounding::top;
use crate::formats::rows::{self, PACK, Quant};
use std::ops::Range;

/// How one input becomes int8 with a step for all of its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// What a code is multiplied by.
    pub step: f32,
    /// Whether what lies beyond 127 steps is computed beside the codes; otherwise it is lost.
    pub extracts: bool,
}

/// What lies beyond the step, by channel.
#[derive(Default, Debug)]
pub struct Shadow {
    /// The channels that have such numbers, ascending.
    channels: Vec<usize>,
    /// `[n, channels]`
    rest: Vec<f32>,
    /// Numbers beyond a step so far, and all numbers.
    pub counted: [u64; 2],
}

impl Shadow {
    /// Takes what of `values`, `[n, cols]`, lies beyond `scale`.
    pub fn set(&mut self, scale: Scale, values: &[f32], n: usize) {
        let (cols, most) = (values.len() / n, 127.0 * scale.step);
        self.clear();
        self.counted[1] += values.len() as u64;
        if !scale.extracts {
            return;
        }
        let mut beyond = vec![false; cols];
        for column in values.chunks_exact(cols) {
            beyond.iter_mut().zip(column).for_each(|(beyond, value)| *beyond |= value.abs() > most);
        }
        self.channels.extend((0..cols).filter(|&c| beyond[c]));
        for column in values.chunks_exact(cols) {
            self.rest.extend(self.channels.iter().map(|&c| column[c] - column[c].clamp(-most, most)));
        }
        self.counted[0] += self.rest.iter().filter(|rest| **rest != 0.0).count() as u64;
    }

    /// Leaves nothing to add.
    pub fn clear(&mut self) {
        self.channels.clear();
        self.rest.clear();
    }

    /// `y[b * stride + r] +=` row r times the rest of column b.
    ///
    /// # Safety
    /// As [`super::Dot`], of which each pointer is a row.
    pub(super) unsafe fn add_rows(&self, quant: Quant, rows: &[*const u8], cols: usize, y: *mut f32, stride: usize) {
        if self.channels.is_empty() {
            return;
        }
        let bytes = if quant.is_grouped() { quant.row_bytes(cols) } else { quant.number_bytes(cols) };
        let mut weights = vec![0.0; self.channels.len()];
        let mut piece = [0.0; PACK];
        for (r, row) in rows.iter().enumerate() {
            // SAFETY: the caller's promise.
            let row = unsafe { std::slice::from_raw_parts(*row, bytes) };
            let mut decoded = usize::MAX;
            for (weight, &channel) in weights.iter_mut().zip(&self.channels) {
                let start = channel / PACK * PACK;
                if start != decoded {
                    rows::decode_range(quant, row, cols, start, &mut piece[..PACK.min(cols - start)]);
                    decoded = start;
                }
                *weight = piece[channel - start];
            }
            for (b, rest) in self.rest.chunks_exact(weights.len()).enumerate() {
                let sum: f32 = weights.iter().zip(rest).map(|(weight, rest)| weight * rest).sum();
                // SAFETY: the caller's promise.
                unsafe { *y.add(b * stride + r) += sum };
            }
        }
    }

    /// `y[b * stride + j] +=` the sum over channels of the rest of column b times number `range.start + j` of the channel's row.
    ///
    /// # Safety
    /// As [`super::floats::Tiles::across`].
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn add_across<'a>(
        &self,
        quant: Quant,
        row: impl Fn(usize) -> &'a [u8],
        cols: usize,
        range: Range<usize>,
        y: *mut f32,
        stride: usize,
    ) {
        let mut numbers = vec![0.0; if self.channels.is_empty() { 0 } else { range.len() }];
        for (i, &channel) in self.channels.iter().enumerate() {
            rows::decode_range(quant, row(channel), cols, range.start, &mut numbers);
            for (b, rest) in self.rest.chunks_exact(self.channels.len()).enumerate().filter(|(_, rest)| rest[i] != 0.0)
            {
                // SAFETY: the caller's promise.
                let y = unsafe { std::slice::from_raw_parts_mut(y.add(b * stride), range.len()) };
                y.iter_mut().zip(&numbers).for_each(|(y, number)| *y += rest[i] * number);
            }
        }
    }
}

/// How often magnitudes occurred at an input: what a fixed step is chosen from.
#[derive(Clone, Debug)]
pub struct Magnitudes {
    /// By eighths of octaves from 2^-20 up.
    counts: Vec<u64>,
    /// The largest.
    pub top: f32,
}

/// Bins of an octave, and octaves: what is beyond them counts as the last.
const BINS: usize = 8;
const OCTAVES: usize = 40;
const MIN_VALUE: f32 = 1.0 / (1 << 20) as f32;

impl Default for Magnitudes {
    fn default() -> Magnitudes {
        Magnitudes { counts: vec![0; BINS * OCTAVES], top: 0.0 }
    }
}

impl Magnitudes {
    /// Counts numbers.
    pub fn add(&mut self, values: &[f32]) {
        for value in values {
            let bin = ((value.abs() / MIN_VALUE).max(1.0).log2() * BINS as f32) as usize;
            self.counts[bin.min(BINS * OCTAVES - 1)] += 1;
        }
        self.top = self.top.max(top(values));
    }

    /// The largest magnitude of all but a share of the numbers, about: the upper end of its bin, or the top.
    pub fn all_but(&self, share: f64) -> f32 {
        let all: u64 = self.counts.iter().sum();
        let mut left = (all as f64 * share) as u64;
        for (bin, &count) in self.counts.iter().enumerate().rev() {
            if count > left {
                return (MIN_VALUE * ((bin + 1) as f32 / BINS as f32).exp2()).min(self.top);
            }
            left -= count;
        }
        self.top
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_numbers_is_beyond_what_is_chosen() {
        let mut seen = Magnitudes::default();
        let values: Vec<f32> = (1..=10_000).map(|i| i as f32 / 1000.0 * if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
        seen.add(&values);
        assert_eq!((seen.top, seen.all_but(0.0)), (10.0, 10.0));
        for share in [0.001, 0.01, 0.1] {
            let beyond = values.iter().filter(|v| v.abs() > seen.all_but(share)).count() as f64 / values.len() as f64;
            assert!(
                beyond <= share + 1e-9 && seen.all_but(share) < 10.0 * 1.1 * (1.0 - share) as f32,
                "{share}: {beyond}"
            );
        }
        assert_eq!(Magnitudes::default().all_but(0.1), 0.0);
    }

    #[test]
    fn only_what_lies_beyond_the_step_is_taken() {
        let mut shadow = Shadow::default();
        let values = [1.0, 200.0, -3.0, 0.0, 127.0, -128.5, 0.0, 1.0];
        shadow.set(Scale { step: 1.0, extracts: true }, &values, 2);
        assert_eq!((&shadow.channels[..], &shadow.rest[..]), (&[1][..], &[73.0, -1.5][..]));
        assert_eq!(shadow.counted, [2, 8]);
        shadow.set(Scale { step: 1.0, extracts: false }, &values, 2);
        assert!(shadow.channels.is_empty());
        assert_eq!(shadow.counted, [2, 16]);
    }
}
