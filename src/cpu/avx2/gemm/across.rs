//! Products that are summed over rows of weights, with AVX-VNNI, as those of `avx512/gemm/across.rs`.

// Loops over registers stay loops: what copies slices goes through memory.
#![allow(clippy::needless_range_loop)]

use super::tile::{self, Panel, Sums};
use super::{LANES, WIDTH};
use crate::cpu::arch::*;
use crate::cpu::avx2::tiles::TILES;
use crate::cpu::gemm::{MAGIC, Out, Panels, words};
use crate::formats::rows::GROUP;
use std::mem::MaybeUninit;

/// As [`crate::cpu::gemm::Across`].
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c,avxvnni"))]
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
            unsafe { round_group(strip.add(g * GROUP * TILES.high + i * LANES), panel.as_mut_ptr(), g, i) };
        }
    }
    let tile = const { tile::tile(tile::FOURS, 0) };
    for p in 0..x.n.div_ceil(WIDTH) {
        let input = x.panel(p, first / GROUP);
        debug_assert!(input.len() >= groups * words(WIDTH));
        // SAFETY: the caller's promises; these registers of rows were written.
        unsafe {
            let out: Out<Sums> = Out {
                sums: std::ptr::null_mut(),
                y: y.add(p * WIDTH * stride),
                stride,
                rows,
                columns: WIDTH.min(x.n - p * WIDTH),
                is_first: true,
                is_last: true,
                adds: true,
            };
            tile(panel.assume_init_ref(), groups, input.as_ptr(), out);
        }
    }
}

/// Rounds 32 numbers of 8 rows, which lie as a strip does, to codes with one scale for each row.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c,avxvnni"))]
unsafe fn round_group(numbers: *const f32, to: *mut Panel, g: usize, i: usize) {
    // SAFETY: the caller promises the numbers and the place.
    unsafe {
        let at = |k: usize| _mm256_load_ps(numbers.add(k * TILES.high));
        let mut tops = _mm256_setzero_ps();
        for k in 0..GROUP {
            tops = _mm256_max_ps(tops, _mm256_andnot_ps(_mm256_set1_ps(-0.0), at(k)));
        }
        let some = _mm256_cmp_ps::<_CMP_GT_OQ>(tops, _mm256_setzero_ps());
        let inverse = _mm256_and_ps(some, _mm256_div_ps(_mm256_set1_ps(127.0), tops));
        let mut sums = _mm256_setzero_si256();
        let low = _mm256_set1_epi32(255);
        for k in 0..GROUP / 4 {
            let code = |j: usize| _mm256_cvtps_epi32(_mm256_mul_ps(at(4 * k + j), inverse));
            let two =
                _mm256_or_si256(_mm256_and_si256(code(0), low), _mm256_slli_epi32::<8>(_mm256_and_si256(code(1), low)));
            let three = _mm256_or_si256(two, _mm256_slli_epi32::<16>(_mm256_and_si256(code(2), low)));
            let four = _mm256_or_si256(three, _mm256_slli_epi32::<24>(code(3)));
            (*to).codes[g][k][i] = four;
            sums = _mm256_dpbusd_avx_epi32(sums, _mm256_set1_epi8(-128), four);
        }
        // Of 22 bits, as a tile wants them.
        let scale = _mm256_mul_ps(tops, _mm256_set1_ps(1.0 / 127.0));
        let scale = _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(scale), _mm256_set1_epi32(!3)));
        (*to).scaling[0][g].start[i] = _mm256_sub_epi32(_mm256_set1_epi32(MAGIC.to_bits() as i32), sums);
        (*to).scaling[0][g].scale[i] = scale;
        (*to).scaling[0][g].magic[i] = _mm256_mul_ps(scale, _mm256_set1_ps(MAGIC));
    }
}
