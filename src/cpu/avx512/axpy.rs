//! The axpy kernels for AVX-512, and `touch`, which reads a row before it is added.

use super::{AHEAD, BF16, F16, F32, bytes_of, f16_at, load_floats, prefetch, prefetch_scales, tail_mask};
use crate::cpu::arch::*;
use crate::cpu::whole_rows;
use crate::formats::rows::{GROUP, PACK};

/// Defines an axpy from `$add::<$flag, R>(a, rows, ahead, out, cols)` over R rows and one column; an `ahead` of 0 asks for nothing.
macro_rules! axpys {
    ($name:ident, $add:ident, $flag:expr) => {
        #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
        pub(super) unsafe fn $name<const FAR: bool>(
            rows: &[*const u8],
            ahead: usize,
            a: &[f32],
            cols: usize,
            out: &mut [f32],
        ) {
            let n = out.len() / cols;
            // Rows for several columns have been read by `touch`.
            let ahead = if FAR && n == 1 { whole_rows(ahead, AHEAD) } else { 0 };
            tiles!(rows.len(), [4, 2, 1], |R, r| {
                let rows: [*const u8; R] = std::array::from_fn(|k| rows[r + k]);
                for (b, out) in out.chunks_exact_mut(cols).enumerate() {
                    let mut coefficients = [_mm512_setzero_ps(); R];
                    for k in 0..R {
                        coefficients[k] = _mm512_set1_ps(a[(r + k) * n + b]);
                    }
                    unsafe { $add::<{ $flag }, R>(coefficients, rows, ahead, out.as_mut_ptr(), cols) };
                }
            });
        }
    };
}

axpys!(axpy_f32, add_floats, F32);
axpys!(axpy_f16, add_floats, F16);
axpys!(axpy_bf16, add_floats, BF16);
axpys!(axpy_q8, add_grouped, false);
axpys!(axpy_q4, add_grouped, true);

#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn add_floats<const KIND: u8, const R: usize>(
    a: [__m512; R],
    rows: [*const u8; R],
    ahead: usize,
    out: *mut f32,
    n: usize,
) {
    let mut i = 0;
    unsafe {
        while i + 16 <= n {
            // Each line once: of two bytes each it holds 32 numbers.
            if ahead != 0 && bytes_of::<KIND>(i).is_multiple_of(64) {
                prefetch(rows[R - 1].wrapping_add(bytes_of::<KIND>(i) + ahead));
            }
            let mut sum = _mm512_loadu_ps(out.add(i));
            for r in 0..R {
                sum = _mm512_fmadd_ps(a[r], load_floats::<KIND>(rows[r], i, u16::MAX), sum);
            }
            _mm512_storeu_ps(out.add(i), sum);
            i += 16;
        }
        if i < n {
            let mask = tail_mask(n - i);
            let mut sum = _mm512_maskz_loadu_ps(mask, out.add(i));
            for r in 0..R {
                sum = _mm512_fmadd_ps(a[r], load_floats::<KIND>(rows[r], i, mask), sum);
            }
            _mm512_mask_storeu_ps(out.add(i), mask, sum);
        }
    }
}

/// (a & b) ^ c as a ternary logic function.
const AND_XOR: i32 = 0x6A;

/// out += sum of a[r] * row r, in the order of `rows::axpy_place`.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn add_grouped<const FOUR: bool, const R: usize>(
    a: [__m512; R],
    rows: [*const u8; R],
    ahead: usize,
    out: *mut f32,
    cols: usize,
) {
    // A code becomes a number without a conversion: shifted to the top of a float's mantissa and given an exponent, q8_0
    // code v reads 384 + v (the sign bit flipped makes it v + 128, the leading one 256), q4_0 code v + 8 reads 24 + v. The
    // surplus is subtracted once per group.
    let (mask, ones, excess) =
        if FOUR { (15 << 19, 0x4180_0000, 24.0) } else { (255 << 15, 0x4380_0000 ^ 128 << 15, 384.0) };
    let (mask, ones, excess) = (_mm512_set1_epi32(mask), _mm512_set1_epi32(ones), _mm512_set1_ps(excess));
    let scales_at = if FOUR { cols / 2 } else { cols };
    // Adds each row's register, shifted and times the row's coefficient, to 16 numbers of the output.
    macro_rules! add {
        ($out:expr, $c:expr, $v:expr, $less:expr, $shift:ident, $bits:literal) => {{
            let mut sum = $less;
            for r in 0..R {
                let number = _mm512_ternarylogic_epi32::<AND_XOR>($shift::<$bits>($v[r]), mask, ones);
                sum = _mm512_fmadd_ps($c[r], _mm512_castsi512_ps(number), sum);
            }
            _mm512_storeu_ps($out, _mm512_add_ps(sum, _mm512_loadu_ps($out)));
        }};
    }
    for pack in 0..cols / PACK {
        unsafe {
            let out = out.add(pack * PACK);
            let (mut c, mut v) = ([_mm512_setzero_ps(); R], [_mm512_setzero_si512(); R]);
            let mut less = _mm512_setzero_ps();
            for r in 0..R {
                let scales = rows[r].add(scales_at + pack * 32).cast();
                c[r] = _mm512_mul_ps(a[r], _mm512_cvtph_ps(_mm256_loadu_si256(scales)));
                less = _mm512_fnmadd_ps(excess, c[r], less);
            }
            if FOUR {
                for p in 0..4 {
                    if ahead != 0 {
                        prefetch(rows[R - 1].wrapping_add(pack * (PACK / 2) + p * 64 + ahead));
                    }
                    for r in 0..R {
                        v[r] = _mm512_loadu_si512(rows[r].add(pack * (PACK / 2) + p * 64).cast());
                    }
                    let out = out.add(p * 128);
                    add!(out, c, v, less, _mm512_slli_epi32, 19);
                    add!(out.add(16), c, v, less, _mm512_slli_epi32, 11);
                    add!(out.add(32), c, v, less, _mm512_slli_epi32, 3);
                    add!(out.add(48), c, v, less, _mm512_srli_epi32, 5);
                    add!(out.add(64), c, v, less, _mm512_slli_epi32, 15);
                    add!(out.add(80), c, v, less, _mm512_slli_epi32, 7);
                    add!(out.add(96), c, v, less, _mm512_srli_epi32, 1);
                    add!(out.add(112), c, v, less, _mm512_srli_epi32, 9);
                }
            } else {
                for k in 0..8 {
                    if ahead != 0 {
                        prefetch(rows[R - 1].wrapping_add(pack * PACK + k * 64 + ahead));
                    }
                    for r in 0..R {
                        v[r] = _mm512_loadu_si512(rows[r].add(pack * PACK + k * 64).cast());
                    }
                    let out = out.add(k * 64);
                    add!(out, c, v, less, _mm512_slli_epi32, 15);
                    add!(out.add(16), c, v, less, _mm512_slli_epi32, 7);
                    add!(out.add(32), c, v, less, _mm512_srli_epi32, 1);
                    add!(out.add(48), c, v, less, _mm512_srli_epi32, 9);
                }
            }
        }
    }
    if ahead != 0 {
        prefetch_scales::<FOUR>(rows[R - 1], cols, ahead);
    }
    // SAFETY: the caller's promises.
    unsafe { add_last_groups::<FOUR, R>(a, rows, out, cols) };
}

/// The groups behind the last whole pack of [`add_grouped`].
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn add_last_groups<const FOUR: bool, const R: usize>(
    a: [__m512; R],
    rows: [*const u8; R],
    out: *mut f32,
    cols: usize,
) {
    let scales_at = if FOUR { cols / 2 } else { cols };
    // The values that q4_0 codes stand for, looked up by the low four bits of each lane.
    let values = _mm512_setr_ps(-8., -7., -6., -5., -4., -3., -2., -1., 0., 1., 2., 3., 4., 5., 6., 7.);
    for g in cols / PACK * (PACK / GROUP)..cols / GROUP {
        for r in 0..R {
            unsafe {
                let row = rows[r];
                let c = [_mm512_mul_ps(a[r], _mm512_set1_ps(f16_at(row.add(scales_at).cast::<u16>().add(g))))];
                let out = out.add(g * GROUP);
                let (low, high) = if FOUR {
                    let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(row.add(g * GROUP / 2).cast()));
                    (_mm512_permutexvar_ps(codes, values), _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), values))
                } else {
                    let at = row.add(g * GROUP);
                    let (low, high) = (_mm_loadu_si128(at.cast()), _mm_loadu_si128(at.add(16).cast()));
                    (_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low)), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high)))
                };
                _mm512_storeu_ps(out, _mm512_fmadd_ps(c[0], low, _mm512_loadu_ps(out)));
                _mm512_storeu_ps(out.add(16), _mm512_fmadd_ps(c[0], high, _mm512_loadu_ps(out.add(16))));
            }
        }
    }
}

/// Cache lines that a turn of [`touch`] reads and prefetches.
const TURN: usize = 4;

/// Without an `ahead`, each turn of four lines prefetches the next four, past L2, so that weights leave inputs and outputs in L1: a
/// dense token of f16 or q8_0 took 3 % less time in the median on a Zen 4. Prefetches into L2 gained nothing.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f"))]
pub(super) unsafe fn touch(row: *const u8, bytes: usize, ahead: usize) {
    let mut all = _mm512_setzero_si512();
    for at in (0..bytes).step_by(64) {
        if ahead != 0 {
            prefetch(row.wrapping_add(at + ahead));
        } else if at % (64 * TURN) == 0 {
            for line in TURN..2 * TURN {
                // SAFETY: a hint. Assembly, because the compiler moves the intrinsic behind the loads of its turn.
                unsafe {
                    let at = row.wrapping_add(at + 64 * line);
                    std::arch::asm!("prefetchnta [{}]", in(reg) at, options(nostack, preserves_flags));
                }
            }
        }
        all = _mm512_or_si512(all, unsafe { _mm512_loadu_si512(row.add(at).cast()) });
    }
    std::hint::black_box(all);
}
