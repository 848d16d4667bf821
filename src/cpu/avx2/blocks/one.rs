//! Dots with one column: codes go from registers into the products.

use super::source::{SLOTS, Source, added, blocks_left, in_memory, there};
use crate::cpu::arch::*;
use crate::cpu::avx2::{prefetch, sum1};
use crate::cpu::columns::{BLOCK, BLOCK_GROUP};
use crate::cpu::{Columns, Rows};
use crate::formats::blocks::Block;

/// Pointers to the codes, steps and sums of the column.
type Input = (*const i8, *const f32, *const f32);

/// Rows one after the other.
#[inline(never)]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
pub unsafe fn dot<T: Source + Block>(rows: Rows, count: usize, x: &Columns, y: *mut f32) {
    let spans = x.cols / BLOCK;
    let input = |span: usize| {
        let group = span * (BLOCK / BLOCK_GROUP);
        let (steps, sums) = (x.block_steps(0)[group..].as_ptr(), x.block_sums(0)[group..].as_ptr());
        (x.block_codes(0)[span * BLOCK..].as_ptr(), steps, sums)
    };
    let (codes, steps, totals) = input(0);
    for r in 0..count {
        // One sum would wait for itself.
        let mut sums = [_mm256_setzero_ps(); 2];
        // SAFETY: the caller's promises.
        unsafe {
            let row = rows.row(r);
            for span in 0..spans {
                let group = span * (BLOCK / BLOCK_GROUP);
                let input = (codes.add(span * BLOCK), steps.add(group), totals.add(group));
                sums = products::<T>(row.add(span * T::SPAN), 8, rows.ahead, input, sums);
            }
            if blocks_left::<T>(x.cols) != 0 {
                sums = last_products::<T>(
                    row.add(spans * T::SPAN),
                    blocks_left::<T>(x.cols),
                    rows.ahead,
                    input(spans),
                    sums,
                );
            }
            *y.add(r) = sum1(_mm256_add_ps(sums[0], sums[1]));
        }
    }
}

/// [`products`] of the blocks behind the last whole span.
#[inline(never)]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn last_products<T: Source>(
    at: *const u8,
    blocks: usize,
    ahead: usize,
    input: Input,
    sums: [__m256; 2],
) -> [__m256; 2] {
    // SAFETY: the caller's promises.
    unsafe { products::<T>(at, blocks, ahead, input, sums) }
}

/// Adds the products of a span, of which so many eighths are there.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn products<T: Source>(
    at: *const u8,
    eighths: usize,
    ahead: usize,
    (codes, steps, totals): Input,
    mut sums: [__m256; 2],
) -> [__m256; 2] {
    let (ones, last) = (_mm256_set1_epi16(1), eighths - 1);
    // Lanes of two runs of 32 by turns: the factors of their halves.
    let by_16 = [_mm256_setr_epi32(0, 2, 0, 2, 1, 3, 1, 3), _mm256_setr_epi32(4, 6, 4, 6, 5, 7, 5, 7)];
    // SAFETY: the caller's promises; a prefetch may name any address.
    unsafe {
        let factors = T::factors(at, last);
        let [low, high] = [_mm256_loadu_ps(steps), _mm256_loadu_ps(steps.add(8))];
        if let Some([a, b]) = added::<T>(factors) {
            let [a, b] = if T::HALVES { [a, b] } else { [_mm256_unpacklo_ps(a, a), _mm256_unpackhi_ps(a, a)] };
            sums[0] = _mm256_fmadd_ps(a, _mm256_loadu_ps(totals), sums[0]);
            sums[1] = _mm256_fmadd_ps(b, _mm256_loadu_ps(totals.add(8)), sums[1]);
        }
        // Scales times steps: of groups of 16 in registers, of groups of 32 in memory in the order of `SLOTS`.
        let by_half = [_mm256_mul_ps(factors.scales[0], low), _mm256_mul_ps(factors.scales[1], high)];
        let mut slots = [0f32; 8];
        if !T::HALVES {
            let steps = _mm256_shuffle_ps::<0b10_00_10_00>(low, high);
            _mm256_storeu_ps(slots.as_mut_ptr(), _mm256_mul_ps(factors.scales[0], steps));
            in_memory(&mut slots);
        }
        each_32!(|K| {
            if K * 64 < T::SPAN / 8 * eighths {
                prefetch(at.wrapping_add(K * 64 + ahead));
            }
            if T::SIGNED {
                if K < eighths {
                    // Two products of codes' sizes with inputs that take their signs fit in 16 bits: 2 * 128 * 127.
                    let (w, v) = (T::codes(at, K), _mm256_loadu_si256(codes.add(K * 32).cast()));
                    let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(v, w));
                    let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
                    sums[K % 2] = _mm256_fmadd_ps(dot, _mm256_set1_ps(slots[SLOTS[K]]), sums[K % 2]);
                }
            } else if K.is_multiple_of(2) && K < eighths {
                let w = [T::codes(at, K), T::codes(at, there(K + 1, last))];
                let v =
                    [_mm256_loadu_si256(codes.add(K * 32).cast()), _mm256_loadu_si256(codes.add(K * 32 + 32).cast())];
                let pairs = [_mm256_maddubs_epi16(w[0], v[0]), _mm256_maddubs_epi16(w[1], v[1])];
                let (low, high) =
                    (_mm256_unpacklo_epi32(pairs[0], pairs[1]), _mm256_unpackhi_epi32(pairs[0], pairs[1]));
                let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_add_epi16(low, high), ones));
                let factor = if T::HALVES {
                    _mm256_permutevar8x32_ps(by_half[K / 4], by_16[K / 2 % 2])
                } else {
                    let pair = slots.as_ptr().add(SLOTS[K]).cast::<f64>();
                    _mm256_castpd_ps(_mm256_set1_pd(pair.read_unaligned()))
                };
                sums[K / 2 % 2] = _mm256_fmadd_ps(dot, factor, sums[K / 2 % 2]);
            }
        });
    }
    sums
}
