//! The axpy of all block types.

use super::BLOCKS_AHEAD;
use super::source::{SLOTS, Source, blocks_left, in_memory};
use crate::cpu::arch::*;
use crate::cpu::avx2::{prefetch, whole_rows};
use crate::cpu::columns::BLOCK;
use crate::formats::blocks::Block;
use std::mem::MaybeUninit;

/// Adds multiples of rows; `out` is in the order of the row.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
pub unsafe fn axpy<T: Source + Block>(rows: &[*const u8], ahead: usize, a: &[f32], cols: usize, out: &mut [f32]) {
    let ahead = whole_rows(ahead, BLOCKS_AHEAD);
    // SAFETY: the caller's promises.
    unsafe {
        if out.len() == cols {
            rows.iter().zip(a).for_each(|(row, a)| add_row::<T>(*a, *row, ahead, cols, out.as_mut_ptr()));
        } else {
            tiles!(rows.len(), [4, 2, 1], |R, r| {
                let n = out.len() / cols;
                let rows: [*const u8; R] = std::array::from_fn(|k| rows[r + k]);
                add_rows::<T, R>(&a[r * n..], rows, ahead, cols, out);
            });
        }
    }
}

/// Adds a times one row to one column.
#[inline(never)]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn add_row<T: Source + Block>(a: f32, row: *const u8, ahead: usize, cols: usize, out: *mut f32) {
    // SAFETY: the caller's promises.
    unsafe {
        for span in 0..cols / BLOCK {
            add_span::<T, true, true>(a, row.add(span * T::SPAN), 8, ahead, out.add(span * BLOCK));
        }
        let (span, blocks) = (cols / BLOCK, blocks_left::<T>(cols));
        if blocks != 0 {
            add_last::<T, true>(a, row.add(span * T::SPAN), blocks, ahead, out.add(span * BLOCK));
        }
    }
}

/// Adds multiples of R rows to several columns: each span becomes f32 once.
#[inline(never)]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn add_rows<T: Source + Block, const R: usize>(
    a: &[f32],
    rows: [*const u8; R],
    ahead: usize,
    cols: usize,
    out: &mut [f32],
) {
    let n = out.len() / cols;
    let mut numbers: MaybeUninit<[[f32; BLOCK]; R]> = MaybeUninit::uninit();
    let numbers: *mut f32 = numbers.as_mut_ptr().cast();
    for span in 0..cols.div_ceil(BLOCK) {
        let some = BLOCK.min(cols - span * BLOCK);
        // SAFETY: the caller's promises; a prefetch may name any address; `numbers` are read after they are written.
        unsafe {
            for r in 0..R {
                let (at, to) = (rows[r].add(span * T::SPAN), numbers.add(r * BLOCK));
                if T::NUMBERS == BLOCK || some == BLOCK {
                    add_span::<T, false, true>(1.0, at, 8, ahead, to);
                } else {
                    add_last::<T, false>(1.0, at, blocks_left::<T>(cols), ahead, to);
                }
            }
            for (b, out) in out.chunks_exact_mut(cols).enumerate() {
                let out = out.as_mut_ptr().add(span * BLOCK);
                let a: [__m256; R] = std::array::from_fn(|r| _mm256_set1_ps(a[r * n + b]));
                for i in (0..some).step_by(8) {
                    let mut sum = _mm256_loadu_ps(out.add(i));
                    for r in 0..R {
                        sum = _mm256_fmadd_ps(a[r], _mm256_loadu_ps(numbers.add(r * BLOCK + i)), sum);
                    }
                    _mm256_storeu_ps(out.add(i), sum);
                }
            }
        }
    }
}

/// [`add_span`] for a span of which blocks are missing.
#[inline(never)]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn add_last<T: Source, const ADD: bool>(a: f32, at: *const u8, eighths: usize, ahead: usize, out: *mut f32) {
    // SAFETY: the caller's promises.
    unsafe { add_span::<T, ADD, false>(a, at, eighths, ahead, out) };
}

/// Adds a times a span, of which so many eighths are there, with WHOLE all, to `out`; without ADD writes them there.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn add_span<T: Source, const ADD: bool, const WHOLE: bool>(
    a: f32,
    at: *const u8,
    eighths: usize,
    ahead: usize,
    out: *mut f32,
) {
    let eighths = if WHOLE { 8 } else { eighths };
    // A code becomes a number at the top of its lane, where it has its sign. As a whole number it is 2^24 times too large, which the
    // coefficient makes up for without rounding.
    let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    let tops: [__m256i; 4] = std::array::from_fn(|j| {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| (4 * j as i32 + i) << 24 | 0x80_80_80);
        _mm256_setr_epi32(a, b, c, d, a, b, c, d)
    });
    let (mut scales, mut mins) = ([0f32; 16], [0f32; 16]);
    // SAFETY: the caller's promises.
    unsafe {
        let factors = T::factors(at, eighths - 1);
        let share = _mm256_set1_ps(a / (1 << 24) as f32);
        for i in 0..if T::HALVES { 2 } else { 1 } {
            _mm256_storeu_ps(scales.as_mut_ptr().add(8 * i), _mm256_mul_ps(share, factors.scales[i]));
            if let Some(of_codes) = factors.mins {
                _mm256_storeu_ps(mins.as_mut_ptr().add(8 * i), _mm256_mul_ps(_mm256_set1_ps(a), of_codes[i]));
            }
        }
        in_memory(&mut scales);
        if factors.mins.is_some() {
            in_memory(&mut mins);
        }
        each_32!(|K| {
            if K * 64 < T::SPAN / 8 * eighths {
                prefetch(at.wrapping_add(K * 64 + ahead));
            }
            if K < eighths {
                let codes = _mm256_sub_epi8(T::codes(at, K), _mm256_set1_epi8(T::OFFSET));
                // Lanes of four bytes by turns: each register of numbers takes one from either half.
                let codes = _mm256_permutevar8x32_epi32(codes, order);
                for j in 0..4 {
                    let to = out.add(K * 32 + j * 8);
                    let place = if T::HALVES { 2 * K + j / 2 } else { SLOTS[K] };
                    let mut sum = if ADD { _mm256_loadu_ps(to) } else { _mm256_setzero_ps() };
                    if factors.mins.is_some() {
                        sum = _mm256_add_ps(sum, _mm256_broadcast_ss(&mins[place]));
                    }
                    let number = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(codes, tops[j]));
                    _mm256_storeu_ps(to, _mm256_fmadd_ps(number, _mm256_broadcast_ss(&scales[place]), sum));
                }
            }
        });
    }
}
