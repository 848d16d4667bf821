//! Products of quantised weights with the many columns of a prompt, int8 by int8: what the instruction sets' versions share.
//!
//! Rows are unpacked strip by strip into panels on the stack (a few tens of KiB, at most [`DEPTH`] numbers of each row at a time) in which
//! a lane belongs to one row, so that a register of products never has to be added up across its lanes. The input is repacked once, by
//! [`Panels::set`], so that the four codes that meet a register of weights are one broadcast from memory.

use super::Kernels;
use super::Prefill;
use super::aligned::Aligned;
use super::rounding::{Bits, round_by, round_to, sum, top};
use super::thread_pool::{Parts, ThreadPool};
use crate::formats::rows::GROUP;

/// Numbers of a row that are unpacked at a time: the panel of a strip then stays in L1 while all columns pass.
pub const DEPTH: usize = 512;

/// `y[b * stride + r] = row r · column b of x`, for all rows and columns. What a row gives does not depend on the rows beside it.
///
/// # Safety
/// As [`super::Dot`], of which each pointer is a row.
pub type Gemm = unsafe fn(rows: &[*const u8], x: &Panels, y: *mut f32, stride: usize);

/// `y[b * stride + r] += sum over k of number first + k of column b times strip[k * high + r]`, for `rows` rows and all columns, with the
/// numbers of each row rounded to int8 by 32. `first` and `depth` are multiples of 32, and `high` is that of the instruction set's
/// [`super::floats::Tiles`].
///
/// # Safety
/// What is named can be read and written, the strip from a multiple of 64 bytes; `depth` is at most [`DEPTH`]; the CPU has the
/// instructions.
pub type Across =
    unsafe fn(strip: *const f32, depth: usize, x: &Panels, first: usize, y: *mut f32, stride: usize, rows: usize);

/// Rows that [`ScaledAcross`] takes together: how many numbers of a column have a step together.
pub const SCALED_ROWS: usize = 32;

/// The most that a kernel of [`ScaledAcross`] makes of a share of a scale and of a number of a column. Their product, divided by 2^15, is the
/// most that a code is, 127.
#[cfg(target_arch = "x86_64")]
pub(super) const MAX_SHARE: f32 = 2048.0;
#[cfg(target_arch = "x86_64")]
pub(super) const MAX_NUMBER: f32 = 2032.0;

/// Most columns of [`ScaledAcross`].
pub const SCALED_LANES: usize = 32;

/// `y[b * stride + j] += sum over k of number k of column b times number pack * 512 + j of row k`, for `n` columns, at most [`SCALED_LANES`], and
/// the 512 numbers of a pack; the rows' scales are multiplied into the columns, which are then rounded to int8 by [`SCALED_ROWS`] rows.
/// Weights are not rounded. Number k of column b stands at `x[k * lanes + b]`, where `lanes` is `n` rounded up to a multiple of 16, and the
/// same for rows up to a multiple of [`SCALED_ROWS`]; what only fills up is zero.
///
/// # Safety
/// Rows are whole, of `cols` numbers, a multiple of 512; `x`, whose first number is at a multiple of 64 bytes, can be read and `y` be written at every index named; the CPU has
/// the instructions.
pub type ScaledAcross =
    unsafe fn(rows: &[*const u8], cols: usize, pack: usize, x: *const f32, n: usize, y: *mut f32, stride: usize);

/// Takes a panel's columns: group g of the column at place c of `width` goes to words `g * words(width)` and what follows. With a `step`
/// above 0 that is what all codes are multiplied by, and numbers beyond the largest code times it become that; otherwise each group has its
/// own.
///
/// # Safety
/// The CPU has the instructions.
pub type Fill = unsafe fn(columns: &[&[f32]], width: usize, step: f32, bits: Bits, out: &mut [u32]);

/// Words of 32 bits that a group of 32 numbers of `width` columns takes: codes, steps, sums of all and of either half.
pub const fn words(width: usize) -> usize {
    width * (GROUP / 4 + 1 + 3)
}

/// Columns of activations as int8 in groups of 32, in panels of so many columns as a tile of registers has.
///
/// A panel is its groups in their order. A group is, in words of 32 bits and by column within each: eight times four codes, raised
/// ([`Bits::raised`]), in their order; what a code is multiplied by; that times the sum of all codes, of the first 16 and of the last 16. Columns that only fill the last
/// panel up are zero.
#[derive(Default, Debug)]
pub struct Panels {
    /// How many columns (tokens) there are.
    pub n: usize,
    /// Numbers of a column: as many as a row of the matrix that it is multiplied with, a multiple of 32.
    pub cols: usize,
    /// Columns of a panel.
    pub width: usize,
    /// Bits of a code.
    pub bits: Bits,
    words: Aligned,
}

impl Panels {
    /// Takes `values` (`[n * cols]`) as the input of `kernels`, on the threads of a pool or on this one. The buffer is kept between calls.
    pub fn set(&mut self, pool: Option<&mut ThreadPool>, kernels: &Kernels, bits: Bits, values: &[f32], n: usize) {
        let step = if kernels.prefill == Prefill::Int8PerTensor { top(values) / bits.most() } else { 0.0 };
        self.set_by(pool, kernels, bits, values, n, step);
    }

    /// The same with a step for all numbers, or 0 for one for each group.
    pub(super) fn set_by(
        &mut self,
        pool: Option<&mut ThreadPool>,
        kernels: &Kernels,
        bits: Bits,
        values: &[f32],
        n: usize,
        step: f32,
    ) {
        assert!(n > 0 && values.len().is_multiple_of(n * GROUP));
        (self.n, self.cols, self.width, self.bits) = (n, values.len() / n, kernels.panel_width, bits);
        let (cols, width, fill) = (self.cols, self.width, kernels.fill_panel);
        let each = cols / GROUP * words(width);
        self.words.resize(n.div_ceil(width) * each);
        let words = Parts::new(&mut self.words);
        let take = |_: usize, panel: usize| {
            let mut columns: [&[f32]; MAX_WIDTH] = [&[]; MAX_WIDTH];
            let here = width.min(n - panel * width);
            for (i, column) in columns[..here].iter_mut().enumerate() {
                *column = &values[(panel * width + i) * cols..][..cols];
            }
            // SAFETY: a panel for each task; `kernels` are for this machine.
            unsafe {
                let out = bytemuck::cast_slice_mut(words.part(panel * each..(panel + 1) * each));
                fill(&columns[..here], width, step, bits, out);
            }
        };
        match pool {
            Some(pool) => pool.run(n.div_ceil(width), take),
            None => (0..n.div_ceil(width)).for_each(|panel| take(0, panel)),
        }
    }

    /// The words of a panel, from group `first` on.
    #[inline]
    pub fn panel(&self, panel: usize, first: usize) -> &[f32] {
        let each = self.cols / GROUP * words(self.width);
        &self.words[panel * each + first * words(self.width)..(panel + 1) * each]
    }
}

/// A float whose last bit is worth one, in the middle of those: whole numbers below 2^22 in magnitude, added to its bits, are added to it.
#[cfg(target_arch = "x86_64")]
pub(super) const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23

/// Most columns of a panel.
pub const MAX_WIDTH: usize = 8;

/// Groups of a strip's panel.
#[cfg(target_arch = "x86_64")]
pub(super) const GROUPS: usize = DEPTH / GROUP;

/// Panels of columns whose sums wait on the stack while the next piece of a strip's rows is unpacked: 258 columns.
#[cfg(target_arch = "x86_64")]
const PANELS: usize = 43;
/// The same for the sums of one strip.
#[cfg(target_arch = "x86_64")]
pub(super) type Waiting<S> = std::mem::MaybeUninit<[S; PANELS]>;

/// What a type has, as a number: a tile exists once for all types of a kind. Here: scales for halves of groups.
#[cfg(target_arch = "x86_64")]
pub(super) const HALVES: u8 = 1;
/// Minima beside scales.
#[cfg(target_arch = "x86_64")]
pub(super) const MINS: u8 = 2;
/// Scales whose products with [`MAGIC`] may be beyond f32.
#[cfg(target_arch = "x86_64")]
pub(super) const WIDE: u8 = 4;

/// Where a tile's products go.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Out<S> {
    /// Where sums wait from piece to piece.
    pub sums: *mut S,
    /// Row 0 of column 0.
    pub y: *mut f32,
    /// Numbers from one column to the next.
    pub stride: usize,
    /// How many rows there are.
    pub rows: usize,
    /// How many columns there are.
    pub columns: usize,
    /// Whether this is the rows' first piece.
    pub is_first: bool,
    /// Whether it is their last.
    pub is_last: bool,
    /// Whether the sums are added to what stands there.
    pub adds: bool,
}

/// Calls `strip(first row, panels)` for each strip of `high` of these rows and as many panels of columns as have sums that can wait.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn strips(rows: usize, high: usize, x: &Panels, strip: impl Fn(usize, std::ops::Range<usize>)) {
    let all = x.n.div_ceil(x.width);
    for first in (0..rows).step_by(high) {
        for panel in (0..all).step_by(PANELS) {
            strip(first, panel..all.min(panel + PANELS));
        }
    }
}

/// Makes the columns of a panel behind the first `there` zero.
pub fn fill_up(there: usize, width: usize, bits: Bits, out: &mut [u32]) {
    let zeros = u32::from_ne_bytes([bits.raised(); 4]);
    for c in there..width {
        for group in out.chunks_exact_mut(words(width)) {
            (0..12).for_each(|i| group[i * width + c] = if i < 8 { zeros } else { 0 });
        }
    }
}

/// The [`Fill`] that says what all are.
pub(super) unsafe fn fill(columns: &[&[f32]], width: usize, given: f32, bits: Bits, out: &mut [u32]) {
    fill_up(columns.len(), width, bits, out);
    for (c, column) in columns.iter().enumerate() {
        for (group, values) in out.chunks_exact_mut(words(width)).zip(column.as_chunks::<GROUP>().0) {
            let (step, codes) =
                if given > 0.0 { (given, round_by(values, given, bits)) } else { round_to(values, bits) };
            let (low, high) = codes.split_at(GROUP / 2);
            group[8 * width + c] = step.to_bits();
            group[9 * width + c] = (step * sum(&codes)).to_bits();
            group[10 * width + c] = (step * sum(low)).to_bits();
            group[11 * width + c] = (step * sum(high)).to_bits();
            for (k, four) in codes.map(|code| (code as u8).wrapping_add(bits.raised())).as_chunks().0.iter().enumerate()
            {
                group[k * width + c] = u32::from_le_bytes(*four);
            }
        }
    }
}
