//! Products that are summed over rows of weights: weights whose scales run across the sum get other scales for it.

// Loops over registers stay loops: what copies slices goes through memory.
#![allow(clippy::needless_range_loop)]

use super::tile::{self, Panel};
use super::{HIGH, LANES, WIDTH};
use crate::cpu::arch::*;
use crate::cpu::gemm::{MAGIC, Out, Panels, words};
use crate::formats::rows::GROUP;
use std::mem::MaybeUninit;

/// As [`crate::cpu::gemm::Across`].
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(in crate::cpu) unsafe fn across(
    strip: *const f32,
    depth: usize,
    x: &Panels,
    first: usize,
    y: *mut f32,
    stride: usize,
    rows: usize,
) {
    debug_assert!(x.width == WIDTH && first.is_multiple_of(GROUP) && depth.is_multiple_of(GROUP));
    let mut panel: MaybeUninit<Panel> = MaybeUninit::uninit();
    let (groups, high) = (depth / GROUP, rows.div_ceil(LANES));
    for i in 0..high {
        for g in 0..groups {
            // SAFETY: the caller's promises; the panel has as many groups.
            unsafe { round_group(strip.add(g * GROUP * HIGH * LANES + i * LANES), panel.as_mut_ptr(), g, i) };
        }
    }
    let tiles = const { tile::tiles(0) }[high - 1];
    for p in 0..x.n.div_ceil(WIDTH) {
        let input = x.panel(p, first / GROUP);
        debug_assert!(input.len() >= groups * words(WIDTH));
        let columns = WIDTH.min(x.n - p * WIDTH);
        // SAFETY: the caller's promises; these registers of rows were written.
        unsafe {
            let y = y.add(p * WIDTH * stride);
            let out =
                Out { sums: std::ptr::null_mut(), y, stride, rows, columns, is_first: true, is_last: true, adds: true };
            tiles[columns.div_ceil(2) - 1](panel.assume_init_ref(), groups, input.as_ptr(), &[], out);
        }
    }
}

/// Rounds 32 numbers of 16 rows, which lie as a strip does, to codes with one scale for each row.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn round_group(numbers: *const f32, to: *mut Panel, g: usize, i: usize) {
    // SAFETY: the caller promises the numbers and the place.
    unsafe {
        let at = |k: usize| _mm512_load_ps(numbers.add(k * HIGH * LANES));
        let mut tops = _mm512_setzero_ps();
        for k in 0..GROUP {
            tops = _mm512_max_ps(tops, _mm512_abs_ps(at(k)));
        }
        let inverse = _mm512_maskz_div_ps(
            _mm512_cmp_ps_mask::<_CMP_GT_OQ>(tops, _mm512_setzero_ps()),
            _mm512_set1_ps(127.0),
            tops,
        );
        let mut sums = _mm512_setzero_si512();
        let low = _mm512_set1_epi32(255);
        for k in 0..GROUP / 4 {
            let code = |j: usize| _mm512_cvtps_epi32(_mm512_mul_ps(at(4 * k + j), inverse));
            let two =
                _mm512_or_si512(_mm512_and_si512(code(0), low), _mm512_slli_epi32::<8>(_mm512_and_si512(code(1), low)));
            let three = _mm512_or_si512(two, _mm512_slli_epi32::<16>(_mm512_and_si512(code(2), low)));
            let four = _mm512_or_si512(three, _mm512_slli_epi32::<24>(code(3)));
            (*to).codes[g][k][i] = four;
            sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(-128), four);
        }
        // Of 22 bits, as a tile wants them.
        let scale = _mm512_mul_ps(tops, _mm512_set1_ps(1.0 / 127.0));
        let scale = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(scale), _mm512_set1_epi32(!3)));
        (*to).start[g][0][i] = _mm512_sub_epi32(_mm512_set1_epi32(MAGIC.to_bits() as i32), sums);
        (*to).scale[g][0][i] = scale;
        (*to).magic[g][0][i] = _mm512_mul_ps(scale, _mm512_set1_ps(MAGIC));
    }
}
