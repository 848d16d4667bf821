//! Tiles of [`crate::cpu::sixteen`]: two registers of lanes by six broadcasts, twelve sums.

use super::{BF16, F16, tail_mask};
use crate::cpu::arch::*;
use crate::cpu::floats::{DEPTH, Form};
use crate::cpu::sixteen::{
    Broadcasts, GROUP, HIGH, Out, ROW_WORDS, Sixteen, code_inputs, code_weights, powers_of, words,
};

/// Registers of lanes.
const WIDE: usize = 2;
/// Lanes of a register.
const LANES: usize = 16;
/// Lanes of a tile.
const WIDTH: usize = WIDE * LANES;

/// The products of AVX-512.
pub(super) const SIXTEEN: Sixteen =
    Sixteen { width: WIDTH, inputs, weights, open, rows: multiply::<1, ROW_WORDS>, across: multiply::<WIDTH, 1> };

#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn inputs(numbers: *const f32, to: *mut u32) {
    // SAFETY: the caller's promises.
    unsafe { code_inputs::<WIDTH>(numbers, to) };
}

#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn weights(numbers: *const f32, to: *mut u32) {
    // SAFETY: the caller's promises.
    unsafe { code_weights::<WIDTH>(numbers, to) };
}

#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn open(form: Form, row: *const u8, count: usize, codes: *mut i16, scales: *mut f32) {
    // SAFETY: the caller's promises.
    unsafe {
        match form {
            Form::F16 => open_as::<F16>(Form::F16, row.cast(), count, codes, scales),
            _ => open_as::<BF16>(Form::Bf16, row.cast(), count, codes, scales),
        }
    }
}

#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn open_as<const KIND: u8>(form: Form, row: *const i16, count: usize, codes: *mut i16, scales: *mut f32) {
    debug_assert!(count <= DEPTH);
    // Two halves of what is packed lane by lane, each in order.
    let order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    for start in (0..count).step_by(GROUP) {
        let there = |i: usize| (1u64 << (count - start).saturating_sub(32 * i).min(32)).wrapping_sub(1) as u32;
        // SAFETY: the caller promises these numbers, and whole groups.
        unsafe {
            let halves = [0, 1].map(|i| _mm512_maskz_loadu_epi16(there(i), row.add(start + 32 * i)));
            let mut numbers = [_mm512_setzero_ps(); GROUP / LANES];
            let mut squares = _mm512_setzero_ps();
            for i in 0..GROUP / LANES {
                let half = halves[i / 2];
                let half = if i % 2 == 0 { _mm512_castsi512_si256(half) } else { _mm512_extracti64x4_epi64::<1>(half) };
                numbers[i] = wide::<KIND>(half);
                squares = _mm512_fmadd_ps(numbers[i], numbers[i], squares);
            }
            let (inverse, step) = powers_of(form, largest(halves), _mm512_reduce_add_ps(squares));
            let inverse = _mm512_set1_ps(inverse);
            for i in 0..2 {
                let [low, high] = [2 * i, 2 * i + 1].map(|i| _mm512_cvtps_epi32(_mm512_mul_ps(numbers[i], inverse)));
                let packed = _mm512_permutexvar_epi64(order, _mm512_packs_epi32(low, high));
                _mm512_store_si512(codes.add(start + 32 * i).cast(), packed);
            }
            *scales.add(start / GROUP) = step;
        }
    }
}

/// The largest magnitude of floats of two bytes, as bits.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
fn largest(numbers: [__m512i; 2]) -> u32 {
    let [a, b] = numbers.map(|numbers| _mm512_and_si512(numbers, _mm512_set1_epi16(0x7fff)));
    let tops = _mm512_max_epu16(a, b);
    let tops = _mm256_max_epu16(_mm512_castsi512_si256(tops), _mm512_extracti64x4_epi64::<1>(tops));
    let tops = _mm_max_epu16(_mm256_castsi256_si128(tops), _mm256_extracti128_si256::<1>(tops));
    // There is an instruction for the least.
    let least = _mm_minpos_epu16(_mm_xor_si128(tops, _mm_set1_epi16(-1)));
    !_mm_cvtsi128_si32(least) as u32 & 0xffff
}

/// 16 floats of two bytes as f32.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
fn wide<const KIND: u8>(numbers: __m256i) -> __m512 {
    if KIND == F16 {
        return _mm512_cvtph_ps(numbers);
    }
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(numbers)))
}

/// Broadcasts lie APART words from each other, their pairs NEXT.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn multiply<const NEXT: usize, const APART: usize>(lanes: *const u32, groups: usize, b: Broadcasts, out: Out) {
    // SAFETY: the caller's promises.
    unsafe {
        match (out.lanes <= LANES, out.count) {
            (true, 1) => tile::<1, 1, NEXT, APART>(lanes, groups, b, out),
            (true, 2) => tile::<1, 2, NEXT, APART>(lanes, groups, b, out),
            (true, 3) => tile::<1, 3, NEXT, APART>(lanes, groups, b, out),
            (true, 4) => tile::<1, 4, NEXT, APART>(lanes, groups, b, out),
            (true, 5) => tile::<1, 5, NEXT, APART>(lanes, groups, b, out),
            (true, _) => tile::<1, HIGH, NEXT, APART>(lanes, groups, b, out),
            (false, 1) => tile::<2, 1, NEXT, APART>(lanes, groups, b, out),
            (false, 2) => tile::<2, 2, NEXT, APART>(lanes, groups, b, out),
            (false, 3) => tile::<2, 3, NEXT, APART>(lanes, groups, b, out),
            (false, 4) => tile::<2, 4, NEXT, APART>(lanes, groups, b, out),
            (false, 5) => tile::<2, 5, NEXT, APART>(lanes, groups, b, out),
            (false, _) => tile::<2, HIGH, NEXT, APART>(lanes, groups, b, out),
        }
    }
}

/// W registers of lanes, and N broadcasts.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn tile<const W: usize, const N: usize, const NEXT: usize, const APART: usize>(
    lanes: *const u32,
    groups: usize,
    b: Broadcasts,
    out: Out,
) {
    // Of a row only so many numbers have scales of their own; columns have theirs beside each other.
    let scales_apart = if NEXT == 1 { DEPTH / GROUP } else { 1 };
    let mut sums = [[_mm512_setzero_ps(); W]; N];
    for g in 0..groups {
        // SAFETY: the caller promises `groups` groups of either.
        unsafe {
            let lanes = lanes.add(g * words(WIDTH));
            let codes = b.codes.add(g * b.group);
            let mut dots = [[_mm512_setzero_si512(); W]; N];
            for k in 0..GROUP / 2 {
                let mut pairs = [_mm512_setzero_si512(); W];
                for l in 0..W {
                    pairs[l] = _mm512_load_si512(lanes.add(k * WIDTH + l * LANES).cast());
                }
                for i in 0..N {
                    let pair = _mm512_set1_epi32(*codes.add(k * NEXT + i * APART));
                    for l in 0..W {
                        dots[i][l] = _mm512_dpwssd_epi32(dots[i][l], pairs[l], pair);
                    }
                }
            }
            for l in 0..W {
                let steps = _mm512_load_ps(lanes.add(GROUP / 2 * WIDTH + l * LANES).cast());
                for i in 0..N {
                    let scale = _mm512_set1_ps(*b.scales.add(g * b.scale + i * scales_apart));
                    let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[i][l]), scale);
                    sums[i][l] = _mm512_fmadd_ps(scaled, steps, sums[i][l]);
                }
            }
        }
    }
    for l in 0..W {
        let mask = tail_mask(out.lanes.saturating_sub(l * LANES));
        for i in 0..N {
            // SAFETY: the caller promises these lanes.
            unsafe {
                let to = out.to.add(i * out.apart + l * LANES);
                let before = if out.adds { _mm512_maskz_loadu_ps(mask, to) } else { _mm512_setzero_ps() };
                _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(before, sums[i][l]));
            }
        }
    }
}
