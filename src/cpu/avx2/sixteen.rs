//! Tiles of [`crate::cpu::sixteen`], as those of `avx512/sixteen.rs` with registers of half the size. Without AVX-VNNI products are added by an
//! instruction of their own.

use super::gemm::in_order;
use super::sum1;
use super::tiles::{LANES, WIDTH, store};
use crate::cpu::arch::*;
use crate::cpu::floats::{DEPTH, Form};
use crate::cpu::sixteen::{
    Broadcasts, GROUP, HIGH, Out, ROW_WORDS, Sixteen, code_inputs, code_weights, powers_of, words,
};

/// Registers of lanes.
const WIDE: usize = WIDTH / LANES;

/// The products of AVX2.
pub(super) const SIXTEEN: Sixteen =
    Sixteen { width: WIDTH, inputs, weights, open, rows: multiply::<1, ROW_WORDS>, across: multiply::<WIDTH, 1> };

/// Those of AVX-VNNI.
pub(super) const SIXTEEN_VNNI: Sixteen =
    Sixteen { rows: multiply_vnni::<1, ROW_WORDS>, across: multiply_vnni::<WIDTH, 1>, ..SIXTEEN };

#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn inputs(numbers: *const f32, to: *mut u32) {
    // SAFETY: the caller's promises.
    unsafe { code_inputs::<WIDTH>(numbers, to) };
}

#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn weights(numbers: *const f32, to: *mut u32) {
    // SAFETY: the caller's promises.
    unsafe { code_weights::<WIDTH>(numbers, to) };
}

#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn open(form: Form, row: *const u8, count: usize, codes: *mut i16, scales: *mut f32) {
    // SAFETY: the caller's promises.
    unsafe {
        for start in (0..count).step_by(GROUP) {
            let (at, left) = (row.cast::<u16>().add(start), count - start);
            if left >= GROUP {
                *scales.add(start / GROUP) = open_group(form, at, codes.add(start));
            } else {
                let mut last = [0; GROUP];
                at.copy_to_nonoverlapping(last.as_mut_ptr(), left);
                *scales.add(start / GROUP) = open_group(form, last.as_ptr(), codes.add(start));
            }
        }
    }
}

/// Makes a group of floats codes, and returns their scale.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn open_group(form: Form, at: *const u16, codes: *mut i16) -> f32 {
    // SAFETY: the caller promises a group of either.
    unsafe {
        let halves = |i: usize| _mm_loadu_si128(at.add(i * LANES).cast());
        let wide = |i: usize| match form {
            Form::F16 => _mm256_cvtph_ps(halves(i)),
            _ => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves(i)))),
        };
        let (mut tops, mut squares) = (_mm_setzero_si128(), [_mm256_setzero_ps(); 2]);
        for i in 0..GROUP / LANES {
            tops = _mm_max_epu16(tops, _mm_and_si128(halves(i), _mm_set1_epi16(0x7fff)));
            squares[i % 2] = _mm256_fmadd_ps(wide(i), wide(i), squares[i % 2]);
        }
        // There is an instruction for the least.
        let least = _mm_minpos_epu16(_mm_xor_si128(tops, _mm_set1_epi16(-1)));
        let largest = !_mm_cvtsi128_si32(least) as u32 & 0xffff;
        let (inverse, step) = powers_of(form, largest, sum1(_mm256_add_ps(squares[0], squares[1])));
        let inverse = _mm256_set1_ps(inverse);
        for i in (0..GROUP / LANES).step_by(2) {
            let [low, high] = [i, i + 1].map(|i| _mm256_cvtps_epi32(_mm256_mul_ps(wide(i), inverse)));
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
            _mm256_store_si256(codes.add(i * LANES).cast(), packed);
        }
        step
    }
}

/// The tiles, with how two products of each lane are added to a sum.
macro_rules! tiles {
    ($features:literal, $multiply:ident, $tile:ident, |$sum:ident, $pairs:ident, $pair:ident| $add:expr) => {
        /// Broadcasts lie APART words from each other, their pairs NEXT.
        #[cfg_attr(not(emulated), target_feature(enable = $features))]
        unsafe fn $multiply<const NEXT: usize, const APART: usize>(
            lanes: *const u32,
            groups: usize,
            b: Broadcasts,
            out: Out,
        ) {
            // SAFETY: the caller's promises.
            unsafe {
                match out.count {
                    1 => $tile::<1, NEXT, APART>(lanes, groups, b, out),
                    2 => $tile::<2, NEXT, APART>(lanes, groups, b, out),
                    3 => $tile::<3, NEXT, APART>(lanes, groups, b, out),
                    4 => $tile::<4, NEXT, APART>(lanes, groups, b, out),
                    5 => $tile::<5, NEXT, APART>(lanes, groups, b, out),
                    _ => $tile::<HIGH, NEXT, APART>(lanes, groups, b, out),
                }
            }
        }

        /// N broadcasts.
        #[inline]
        #[cfg_attr(not(emulated), target_feature(enable = $features))]
        unsafe fn $tile<const N: usize, const NEXT: usize, const APART: usize>(
            lanes: *const u32,
            groups: usize,
            b: Broadcasts,
            out: Out,
        ) {
            // Of a row only so many numbers have scales of their own; columns have theirs beside each other.
            let scales_apart = if NEXT == 1 { DEPTH / GROUP } else { 1 };
            let mut sums = [[_mm256_setzero_ps(); WIDE]; N];
            for g in 0..groups {
                // SAFETY: the caller promises `groups` groups of either.
                unsafe {
                    let lanes = lanes.add(g * words(WIDTH));
                    let codes = b.codes.add(g * b.group);
                    let mut dots = [[_mm256_setzero_si256(); WIDE]; N];
                    for k in 0..GROUP / 2 {
                        let mut registers = [_mm256_setzero_si256(); WIDE];
                        for l in 0..WIDE {
                            registers[l] = _mm256_load_si256(lanes.add(k * WIDTH + l * LANES).cast());
                        }
                        for i in 0..N {
                            let $pair = _mm256_set1_epi32(*codes.add(k * NEXT + i * APART));
                            for l in 0..WIDE {
                                let ($sum, $pairs) = (dots[i][l], registers[l]);
                                dots[i][l] = in_order($add);
                            }
                        }
                    }
                    for l in 0..WIDE {
                        let steps = _mm256_load_ps(lanes.add(GROUP / 2 * WIDTH + l * LANES).cast());
                        for i in 0..N {
                            let scale = _mm256_broadcast_ss(&*b.scales.add(g * b.scale + i * scales_apart));
                            let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dots[i][l]), scale);
                            sums[i][l] = _mm256_fmadd_ps(scaled, steps, sums[i][l]);
                        }
                    }
                }
            }
            for l in 0..WIDE {
                let here = out.lanes.saturating_sub(l * LANES);
                for i in 0..N {
                    if here > 0 {
                        // SAFETY: the caller promises these lanes.
                        unsafe { store(out.to.add(i * out.apart + l * LANES), sums[i][l], here, out.adds) };
                    }
                }
            }
        }
    };
}

tiles!("avx2,fma,f16c", multiply, tile, |sum, pairs, pair| _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, pair)));
tiles!("avx2,fma,f16c,avxvnni", multiply_vnni, tile_vnni, |sum, pairs, pair| {
    _mm256_dpwssd_avx_epi32(sum, pairs, pair)
});
