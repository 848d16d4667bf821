//! Dots with several columns: spans are unpacked into L1, once for all columns.
//!
//! There each lane of 32 bits belongs to one group of 16 numbers, as in the input ([`LaneBlock`]). So the products of 128 numbers add up as
//! whole numbers before they are scaled.

use super::source::{Source, added, blocks_left, there};
use crate::cpu::arch::*;
use crate::cpu::avx2::{FEW, prefetch, sum1};
use crate::cpu::columns::{BLOCK, LaneBlock};
use crate::cpu::{Columns, Rows};
use crate::formats::blocks::Block;
use std::mem::MaybeUninit;

/// Rows that are unpacked at a time, so many spans of each: they and the inputs of four columns fit in L1.
const ROWS: usize = 4;
const SPANS: usize = 8;

/// An unpacked span, laid out as [`LaneBlock`].
#[repr(C, align(64))]
struct Span {
    codes: [[__m256i; 2]; 4],
    scales: [__m256; 2],
    /// What is added to the products; set where the type has it.
    added: [__m256; 2],
}

/// Any number of columns: few by one row after the other, or memory would be read from several places by turns.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
pub unsafe fn dot<T: Source + Block>(rows: Rows, count: usize, x: &Columns, y: *mut f32, stride: usize) {
    let (all, together) = (x.cols.div_ceil(BLOCK), if x.n <= FEW { 1 } else { ROWS });
    let mut unpacked: MaybeUninit<[[Span; SPANS]; ROWS]> = MaybeUninit::uninit();
    let unpacked: *mut Span = unpacked.as_mut_ptr().cast();
    for first in (0..count).step_by(together) {
        let some = together.min(count - first);
        for start in (0..all).step_by(SPANS) {
            let spans = SPANS.min(all - start);
            // SAFETY: the caller's promises; what is read from `unpacked` was written before.
            unsafe {
                for r in 0..some {
                    let (row, to) = (rows.row(first + r).add(start * T::SPAN), unpacked.add(r * SPANS));
                    for i in 0..spans {
                        let (at, to) = (row.add(i * T::SPAN), to.add(i));
                        let whole = T::NUMBERS == BLOCK || (start + i + 1) * BLOCK <= x.cols;
                        let eighths = if whole { 8 } else { blocks_left::<T>(x.cols) };
                        (0..T::SPAN / 8 * eighths)
                            .step_by(64)
                            .for_each(|line| prefetch(at.wrapping_add(line + rows.ahead)));
                        if whole {
                            unpack::<T>(at, 7, to);
                        } else {
                            unpack_last::<T>(at, eighths - 1, to);
                        }
                    }
                }
                tiles!(x.n, [4, 2, 1], |N, b| {
                    let inputs: [*const LaneBlock; N] = std::array::from_fn(|i| x.lane_blocks(b + i)[start..].as_ptr());
                    for r in 0..some {
                        let sums = tile_of::<T, N>(unpacked.add(r * SPANS), spans, inputs);
                        for (c, sum) in sums.iter().enumerate() {
                            let y = y.add((b + c) * stride + first + r);
                            *y = if start == 0 { *sum } else { *y + *sum };
                        }
                    }
                });
            }
        }
    }
}

/// The tile for a type's kind of codes.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn tile_of<T: Source, const N: usize>(
    row: *const Span,
    spans: usize,
    inputs: [*const LaneBlock; N],
) -> [f32; N] {
    // SAFETY: the caller's promises.
    unsafe {
        match () {
            _ if T::SIGNED => tile::<SIGNED, N>(row, spans, inputs),
            _ if T::TOP > 31 => tile::<TO_63, N>(row, spans, inputs),
            _ => tile::<TO_31, N>(row, spans, inputs),
        }
    }
}

/// Kinds of codes.
const SIGNED: u8 = 0;
const TO_31: u8 = 1;
const TO_63: u8 = 2;

/// Products of a row's unpacked spans with N columns.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn tile<const KIND: u8, const N: usize>(
    row: *const Span,
    spans: usize,
    inputs: [*const LaneBlock; N],
) -> [f32; N] {
    let ones = _mm256_set1_epi16(1);
    let mut sums = [_mm256_setzero_ps(); N];
    for i in 0..spans {
        for half in 0..2 {
            // SAFETY: the caller's promises.
            unsafe {
                let span = &*row.add(i);
                let w = [0, 1, 2, 3].map(|k| span.codes[k][half]);
                for b in 0..N {
                    let input = inputs[b].add(i);
                    let v = [0, 1, 2, 3].map(|k| {
                        let codes: *const __m256i = (&raw const (*input).codes[k]).cast();
                        _mm256_load_si256(codes.add(half))
                    });
                    let at = |numbers: *const [f32; 16]| _mm256_load_ps(numbers.cast::<f32>().add(8 * half));
                    let dot = products::<KIND>(w, v, ones);
                    let step = _mm256_mul_ps(span.scales[half], at(&raw const (*input).steps));
                    sums[b] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), step, sums[b]);
                    if KIND != SIGNED {
                        sums[b] = _mm256_fmadd_ps(span.added[half], at(&raw const (*input).sums), sums[b]);
                    }
                }
            }
        }
    }
    let mut out = [0.0; N];
    for b in 0..N {
        out[b] = sum1(sums[b]);
    }
    out
}

/// Sums of the products of 16 codes by lane.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
fn products<const KIND: u8>(w: [__m256i; 4], v: [__m256i; 4], ones: __m256i) -> __m256i {
    if KIND == SIGNED {
        let product = |k: usize| _mm256_maddubs_epi16(_mm256_abs_epi8(w[k]), _mm256_sign_epi8(v[k], w[k]));
        let [a, b, c, d] = [0, 1, 2, 3].map(|k| _mm256_madd_epi16(product(k), ones));
        return _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
    }
    let [a, b, c, d] = [0, 1, 2, 3].map(|k| _mm256_maddubs_epi16(w[k], v[k]));
    let (low, high) = (_mm256_add_epi16(a, b), _mm256_add_epi16(c, d));
    if KIND == TO_31 {
        _mm256_madd_epi16(_mm256_add_epi16(low, high), ones)
    } else {
        _mm256_add_epi32(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones))
    }
}

/// [`unpack`] for a span of which blocks are missing.
#[inline(never)]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn unpack_last<T: Source>(at: *const u8, last: usize, to: *mut Span) {
    // SAFETY: the caller's promises.
    unsafe { unpack::<T>(at, last, to) };
}

/// Unpacks the span at `at`, of which eighths 0..=last are there.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn unpack<T: Source>(at: *const u8, last: usize, to: *mut Span) {
    // SAFETY: the caller's promises.
    unsafe {
        let factors = T::factors(at, last);
        (*to).scales = by_lane::<T>(factors.scales);
        if let Some(added) = added::<T>(factors) {
            (*to).added = by_lane::<T>(added);
        }
        // Groups 4 i and 4 i + 1 stand in the lanes of register 2 i, the other two in those of the next.
        let mut w = [_mm256_setzero_si256(); 8];
        each_32!(|K| { w[K] = T::codes(at, there(K, last)) });
        for half in 0..2 {
            let [a, b, c, d] = [w[half], w[half + 2], w[half + 4], w[half + 6]];
            let (low, low_) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
            let (high, high_) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
            (*to).codes[0][half] = _mm256_unpacklo_epi64(low, low_);
            (*to).codes[1][half] = _mm256_unpackhi_epi64(low, low_);
            (*to).codes[2][half] = _mm256_unpacklo_epi64(high, high_);
            (*to).codes[3][half] = _mm256_unpackhi_epi64(high, high_);
        }
    }
}

/// Numbers by group, as scales come, to numbers by lane.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
fn by_lane<T: Source>(v: [__m256; 2]) -> [__m256; 2] {
    let order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
    if T::HALVES {
        let [low, high] = v.map(|v| _mm256_castps_pd(_mm256_permutevar8x32_ps(v, order)));
        [_mm256_castpd_ps(_mm256_unpacklo_pd(low, high)), _mm256_castpd_ps(_mm256_unpackhi_pd(low, high))]
    } else {
        let v = _mm256_permutevar8x32_ps(v[0], order);
        [_mm256_permute2f128_ps::<0x00>(v, v), _mm256_permute2f128_ps::<0x11>(v, v)]
    }
}
