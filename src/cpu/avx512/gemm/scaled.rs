//! Products that are summed over rows of weights, for few columns: the codes stay as they are, and the columns get the rows' scales.
//!
//! A row's scales differ along its numbers, so a column is rounded again for each group of 32 numbers. That has to be cheap: of 32 rows a
//! column's numbers, each times the row's largest scale of the pack, become 12 bits with one step for all, and a product of 16 bits with the group's
//! share of that scale makes codes of eight bits. The codes of the rows' 512 numbers are put so that a lane of 32 bits holds four rows' codes of
//! one number.

// Loops over registers stay loops: what copies slices goes through memory.
#![allow(clippy::needless_range_loop)]

use super::LANES;
use crate::cpu::arch::*;
use crate::cpu::avx512::blocks::{Unpack, scales_of_k};
use crate::cpu::avx512::prefetch;
use crate::cpu::gemm::{MAX_NUMBER, MAX_SHARE, SCALED_LANES as WIDE, SCALED_ROWS as ROWS};
use crate::formats::blocks;
use crate::formats::rows::{GROUP, PACK};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Rows whose codes share a lane.
const TOGETHER: usize = 4;

/// Columns that are multiplied at a time. Of eight 12 columns took a tenth longer, being eight and four.
const WIDTH: usize = 6;

/// A pack of numbers of some rows.
#[repr(C, align(64))]
struct Block {
    /// Unsigned codes by group, four rows and half of the group: number i of the half in lane i.
    codes: [[[__m512i; 2]; ROWS / TOGETHER]; PACK / GROUP],
    /// By row, the scale of each group as a share of `tops`, times [`MAX_SHARE`].
    shares: [[i16; PACK / GROUP]; ROWS],
    /// By row, the largest of the scales.
    tops: [f32; ROWS],
    /// By row, of each group, where there are minima.
    mins: [[f32; PACK / GROUP]; ROWS],
}

/// Up to 32 columns.
#[repr(C, align(64))]
struct Rounded {
    /// By row, its number of each column times the row's largest scale, in steps of which [`MAX_NUMBER`] make the column's largest. In each
    /// 128 bits are four of the first 16 columns and four of the others: turned into codes, they lie in the order of columns.
    numbers: [__m512i; ROWS],
    /// What a column's sums are multiplied by.
    steps: [f32; WIDE],
    /// For one group, by four rows: of each column four signed codes.
    codes: [[i32; WIDE]; ROWS / TOGETHER],
    /// For one group, what each column's sums begin with: it takes out that codes of rows are not signed.
    start: [i32; WIDE],
    /// For one group, what is taken from each column's products: those with the minima.
    less: [f32; WIDE],
}

/// A type of rows.
///
/// # Safety
/// For all functions: the row is a whole one, and the CPU has the instructions.
pub(in crate::cpu) trait Row {
    /// What is too much in each code, which is not signed.
    const LESS: i32;
    /// Whether there are minima beside scales.
    const MINS: bool;
    /// Whether codes come as in our own packs; otherwise in their order.
    const PACKS: bool;

    /// Codes: register `i` of the eight of a pack.
    unsafe fn codes(row: *const u8, pack: usize, i: usize) -> __m512i;

    /// Scales of a pack's groups, and minima.
    unsafe fn scales(row: *const u8, cols: usize, pack: usize) -> [__m512; 2];

    /// Where a pack's bytes lie in a row.
    fn bytes(cols: usize, pack: usize) -> [Range<usize>; 2];
}

/// Our own q4_0 (`FOUR`) and q8_0.
pub(in crate::cpu) struct Packs<const FOUR: bool>;

impl<const FOUR: bool> Packs<FOUR> {
    /// Bytes of a pack's codes.
    const BYTES: usize = if FOUR { PACK / 2 } else { PACK };

    /// Where the scales of a pack stand.
    const fn scales_at(cols: usize, pack: usize) -> usize {
        cols / PACK * Self::BYTES + pack * (PACK / GROUP) * 2
    }
}

impl<const FOUR: bool> Row for Packs<FOUR> {
    const LESS: i32 = if FOUR { 8 } else { 128 };
    const MINS: bool = false;
    const PACKS: bool = true;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(row: *const u8, pack: usize, i: usize) -> __m512i {
        // SAFETY: the caller's promises.
        unsafe {
            let codes = row.add(pack * Self::BYTES);
            if !FOUR {
                return _mm512_xor_si512(_mm512_loadu_si512(codes.add(i * 64).cast()), _mm512_set1_epi8(-128));
            }
            let two = _mm512_loadu_si512(codes.add(i / 2 * 64).cast());
            let one = if i.is_multiple_of(2) { two } else { _mm512_srli_epi16::<4>(two) };
            _mm512_and_si512(one, _mm512_set1_epi8(15))
        }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(row: *const u8, cols: usize, pack: usize) -> [__m512; 2] {
        // SAFETY: the caller's promises.
        let scales = unsafe { _mm256_loadu_si256(row.add(Self::scales_at(cols, pack)).cast()) };
        [_mm512_cvtph_ps(scales), _mm512_setzero_ps()]
    }

    fn bytes(cols: usize, pack: usize) -> [Range<usize>; 2] {
        let scales = Self::scales_at(cols, pack);
        [pack * Self::BYTES..(pack + 1) * Self::BYTES, scales..scales + PACK / GROUP * 2]
    }
}

/// Bytes of a block of Q5_K, of 256 numbers.
const Q5_K_BYTES: usize = 176;

impl Row for blocks::Q5_K {
    const LESS: i32 = 0;
    const MINS: bool = true;
    const PACKS: bool = false;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(row: *const u8, pack: usize, i: usize) -> __m512i {
        // SAFETY: the caller's promises.
        unsafe { <blocks::Q5_K as Unpack>::codes(row.add((pack * 2 + i / 4) * Q5_K_BYTES))[i % 4] }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(row: *const u8, _: usize, pack: usize) -> [__m512; 2] {
        // SAFETY: the caller's promises.
        unsafe {
            let first = scales_of_k(row.add(pack * 2 * Q5_K_BYTES));
            let second = scales_of_k(row.add((pack * 2 + 1) * Q5_K_BYTES));
            let both = |i: usize| _mm512_insertf32x8::<1>(_mm512_castps256_ps512(first[i]), second[i]);
            [both(0), both(1)]
        }
    }

    fn bytes(_: usize, pack: usize) -> [Range<usize>; 2] {
        [pack * 2 * Q5_K_BYTES..(pack + 1) * 2 * Q5_K_BYTES, 0..0]
    }
}

/// As [`crate::cpu::gemm::ScaledAcross`].
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(in crate::cpu) unsafe fn scaled<R: Row>(
    rows: &[*const u8],
    cols: usize,
    pack: usize,
    x: *const f32,
    n: usize,
    y: *mut f32,
    stride: usize,
) {
    debug_assert!(!rows.is_empty() && (pack + 1) * PACK <= cols && (1..=WIDE).contains(&n));
    let mut block: MaybeUninit<Block> = MaybeUninit::uninit();
    let mut rounded: MaybeUninit<Rounded> = MaybeUninit::uninit();
    let (last, lanes) = (rows.len() - 1, n.next_multiple_of(LANES));
    for first in (0..rows.len()).step_by(ROWS) {
        // Behind the last row columns are zero, and any row will do.
        let row = |k: usize| rows[(first + k).min(last)];
        for q in 0..ROWS / TOGETHER {
            let four = [row(q * TOGETHER), row(q * TOGETHER + 1), row(q * TOGETHER + 2), row(q * TOGETHER + 3)];
            // SAFETY: the caller's promises.
            unsafe { open::<R>(&four, cols, pack, q, block.as_mut_ptr()) };
        }
        // SAFETY: the caller's promises; the block was written.
        unsafe { take(x.add(first * lanes), lanes, block.assume_init_ref(), rounded.as_mut_ptr()) };
        for g in 0..PACK / GROUP {
            // A few at a time: of many at once most were dropped, and few columns took a third longer.
            ask::<R>(row(ROWS + 2 * g), cols, pack);
            ask::<R>(row(ROWS + 2 * g + 1), cols, pack);
            // SAFETY: as above.
            unsafe {
                let block = block.assume_init_ref();
                round::<R>(block, g, x.add(first * lanes), lanes, rounded.as_mut_ptr());
                for c in (0..n).step_by(WIDTH) {
                    let y = y.add(c * stride + g * GROUP);
                    TILES[(n - c).min(WIDTH) - 1](block, g, rounded.assume_init_ref(), c, y, stride);
                }
            }
        }
    }
}

/// Prefetches a pack of a row.
#[inline]
fn ask<R: Row>(row: *const u8, cols: usize, pack: usize) {
    for bytes in R::bytes(cols, pack) {
        bytes.step_by(64).for_each(|byte| prefetch(row.wrapping_add(byte)));
    }
}

/// Puts a pack of four rows into the block.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn open<R: Row>(rows: &[*const u8; TOGETHER], cols: usize, pack: usize, q: usize, block: *mut Block) {
    // SAFETY: the caller promises whole rows and the place.
    unsafe {
        for r in 0..TOGETHER {
            let [scales, mins] = R::scales(rows[r], cols, pack);
            let top = _mm512_reduce_max_ps(_mm512_abs_ps(scales));
            let inverse = if top > 0.0 { MAX_SHARE / top } else { 0.0 };
            let shares = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(scales, _mm512_set1_ps(inverse))));
            _mm256_storeu_si256((&raw mut (*block).shares[q * TOGETHER + r]).cast(), shares);
            (*block).tops[q * TOGETHER + r] = top;
            if R::MINS {
                _mm512_store_ps((&raw mut (*block).mins[q * TOGETHER + r]).cast(), mins);
            }
        }
        let codes = &mut (*block).codes;
        for half in 0..2 {
            let mut turned = [[_mm512_setzero_si512(); 4]; 4];
            for k in 0..4 {
                let mut v = [_mm512_setzero_si512(); TOGETHER];
                for r in 0..TOGETHER {
                    v[r] = R::codes(rows[r], pack, half * 4 + k);
                }
                let low = [_mm512_unpacklo_epi8(v[0], v[1]), _mm512_unpacklo_epi8(v[2], v[3])];
                let high = [_mm512_unpackhi_epi8(v[0], v[1]), _mm512_unpackhi_epi8(v[2], v[3])];
                turned[k][0] = _mm512_unpacklo_epi16(low[0], low[1]);
                turned[k][1] = _mm512_unpackhi_epi16(low[0], low[1]);
                turned[k][2] = _mm512_unpacklo_epi16(high[0], high[1]);
                turned[k][3] = _mm512_unpackhi_epi16(high[0], high[1]);
            }
            for m in 0..4 {
                if R::PACKS {
                    // In quarters of registers are four groups, of which each register has four numbers.
                    let quarters = quarters([turned[0][m], turned[1][m], turned[2][m], turned[3][m]]);
                    for i in 0..4 {
                        codes[4 * i + m][q][half] = quarters[i];
                    }
                } else {
                    let quarters = quarters(turned[m]);
                    for i in 0..4 {
                        codes[2 * (4 * half + m) + i / 2][q][i % 2] = quarters[i];
                    }
                }
            }
        }
    }
}

/// Quarter i of each register.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f"))]
fn quarters([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let firsts = [_mm512_shuffle_i32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_i32x4::<0b01_00_01_00>(c, d)];
    let lasts = [_mm512_shuffle_i32x4::<0b11_10_11_10>(a, b), _mm512_shuffle_i32x4::<0b11_10_11_10>(c, d)];
    [
        _mm512_shuffle_i32x4::<0b10_00_10_00>(firsts[0], firsts[1]),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(firsts[0], firsts[1]),
        _mm512_shuffle_i32x4::<0b10_00_10_00>(lasts[0], lasts[1]),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(lasts[0], lasts[1]),
    ]
}

/// Takes 32 rows' numbers of the columns, of which there are `lanes`, 16 or 32.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn take(x: *const f32, lanes: usize, block: &Block, to: *mut Rounded) {
    let zero = _mm512_setzero_ps();
    // SAFETY: the caller promises the numbers and the place.
    unsafe {
        let number = |k: usize, half: usize| match half * LANES < lanes {
            true => _mm512_mul_ps(_mm512_set1_ps(block.tops[k]), _mm512_load_ps(x.add(k * lanes + half * LANES))),
            false => zero,
        };
        let mut inverse = [zero; 2];
        for half in 0..2 {
            let mut top = zero;
            for k in 0..ROWS {
                top = _mm512_max_ps(top, _mm512_abs_ps(number(k, half)));
            }
            let some = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(top, zero);
            inverse[half] = _mm512_maskz_div_ps(some, _mm512_set1_ps(MAX_NUMBER), top);
            let step = _mm512_mul_ps(top, _mm512_set1_ps(1.0 / 127.0));
            _mm512_store_ps((&raw mut (*to).steps).cast::<f32>().add(half * LANES), step);
        }
        for k in 0..ROWS {
            let whole = |half: usize| _mm512_cvtps_epi32(_mm512_mul_ps(number(k, half), inverse[half]));
            (*to).numbers[k] = _mm512_packs_epi32(whole(0), whole(1));
        }
    }
}

/// Rounds the columns for group `g`.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn round<R: Row>(block: &Block, g: usize, x: *const f32, lanes: usize, to: *mut Rounded) {
    // SAFETY: the caller promises the place, and that `take` was there.
    unsafe {
        let mut sums = [_mm512_setzero_si512(); 2];
        for q in 0..ROWS / TOGETHER {
            let mut codes = [_mm512_setzero_si512(); TOGETHER];
            for r in 0..TOGETHER {
                let share = _mm512_set1_epi16(block.shares[q * TOGETHER + r][g]);
                codes[r] = _mm512_mulhrs_epi16((*to).numbers[q * TOGETHER + r], share);
            }
            let [a, b, c, d] = codes;
            let low = _mm512_set1_epi16(255);
            let firsts = _mm512_or_si512(_mm512_and_si512(a, low), _mm512_slli_epi16::<8>(b));
            let lasts = _mm512_or_si512(_mm512_and_si512(c, low), _mm512_slli_epi16::<8>(d));
            let halves = [_mm512_unpacklo_epi16(firsts, lasts), _mm512_unpackhi_epi16(firsts, lasts)];
            for half in 0..2 {
                let at = (&raw mut (*to).codes[q]).cast::<i32>().add(half * LANES);
                _mm512_store_si512(at.cast(), halves[half]);
                sums[half] = _mm512_dpbusd_epi32(sums[half], _mm512_set1_epi8(1), halves[half]);
            }
        }
        for half in 0..2 {
            let start = _mm512_mullo_epi32(sums[half], _mm512_set1_epi32(-R::LESS));
            _mm512_store_si512((&raw mut (*to).start).cast::<i32>().add(half * LANES).cast(), start);
            let mut less = _mm512_setzero_ps();
            for k in 0..if R::MINS && half * LANES < lanes { ROWS } else { 0 } {
                let x = _mm512_load_ps(x.add(k * lanes + half * LANES));
                less = _mm512_fmadd_ps(x, _mm512_set1_ps(block.mins[k][g]), less);
            }
            _mm512_store_ps((&raw mut (*to).less).cast::<f32>().add(half * LANES), less);
        }
    }
}

type Tile = unsafe fn(&Block, usize, &Rounded, usize, *mut f32, usize);

/// By columns.
const TILES: [Tile; WIDTH] = [tile::<1>, tile::<2>, tile::<3>, tile::<4>, tile::<5>, tile::<6>];

/// Adds group `g` of `N` columns, from column `first` on, to `y`.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn tile<const N: usize>(block: &Block, g: usize, rounded: &Rounded, first: usize, y: *mut f32, stride: usize) {
    let mut sums = [[_mm512_setzero_si512(); 2]; N];
    for c in 0..N {
        sums[c] = [_mm512_set1_epi32(rounded.start[first + c]); 2];
    }
    for q in 0..ROWS / TOGETHER {
        let codes = &block.codes[g][q];
        for c in 0..N {
            let four = _mm512_set1_epi32(rounded.codes[q][first + c]);
            sums[c] =
                [_mm512_dpbusd_epi32(sums[c][0], codes[0], four), _mm512_dpbusd_epi32(sums[c][1], codes[1], four)];
        }
    }
    for c in 0..N {
        let (step, less) = (_mm512_set1_ps(rounded.steps[first + c]), _mm512_set1_ps(rounded.less[first + c]));
        for half in 0..2 {
            // SAFETY: the caller promises these places.
            unsafe {
                let at = y.add(c * stride + half * LANES);
                let sum = _mm512_fmsub_ps(_mm512_cvtepi32_ps(sums[c][half]), step, less);
                _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), sum));
            }
        }
    }
}
