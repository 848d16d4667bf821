//! Kernels for AVX2 with FMA and F16C.
//!
//! Without VNNI, byte products go through `maddubs`, whose 16-bit sums would overflow for full-range unsigned weights.
//! q8_0 therefore multiplies |w| by x carrying w's sign (both within 127); q4_0 codes are at most 15, so they stay
//! unsigned and eight times the input sum is taken out at the end.

#![cfg(target_arch = "x86_64")]

use super::{Columns, Isa, Kernels, Rows};
use crate::formats::rows::{GROUP, PACK, Quant};
use half::f16;
use std::arch::x86_64::*;

pub const KERNELS: Kernels = Kernels {
    isa: Isa::Avx2,
    dots: [dot_f32, dot_f16_rows, dot_q8, dot_q4],
    axpys: [axpy_f32, axpy_f16_rows, axpy_q8, axpy_q4],
    dot_f16,
    axpy_f16,
    touch: super::touch_nothing,
};

dot_rows!(
    #[target_feature(enable = "avx2,fma,f16c")]
    dot_f32,
    dot_f32_row
);
dot_rows!(
    #[target_feature(enable = "avx2,fma,f16c")]
    dot_f16_rows,
    dot_f16_row
);
dot_rows!(
    #[target_feature(enable = "avx2,fma,f16c")]
    dot_q8,
    dot_q8_row
);
dot_rows!(
    #[target_feature(enable = "avx2,fma,f16c")]
    dot_q4,
    dot_q4_row
);

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_f32_row(row: *const u8, x: &Columns, b: usize) -> f32 {
    let row: *const f32 = row.cast();
    let x_b = x.values(b).as_ptr();
    let mut sums = [_mm256_setzero_ps(); 4];
    let whole = x.cols / 32 * 32;
    unsafe {
        for i in (0..whole).step_by(32) {
            for (k, sum) in sums.iter_mut().enumerate() {
                let at = i + 8 * k;
                *sum = _mm256_fmadd_ps(_mm256_loadu_ps(row.add(at)), _mm256_loadu_ps(x_b.add(at)), *sum);
            }
        }
        sum4(sums) + (whole..x.cols).map(|i| *row.add(i) * *x_b.add(i)).sum::<f32>()
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_f16_row(row: *const u8, x: &Columns, b: usize) -> f32 {
    unsafe { dot_f16(row.cast(), x.values(b).as_ptr(), x.cols) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_f16(a: *const u16, x: *const f32, n: usize) -> f32 {
    let mut sums = [_mm256_setzero_ps(); 4];
    let whole = n / 32 * 32;
    unsafe {
        for i in (0..whole).step_by(32) {
            for (k, sum) in sums.iter_mut().enumerate() {
                let at = i + 8 * k;
                *sum = _mm256_fmadd_ps(load_f16(a.add(at)), _mm256_loadu_ps(x.add(at)), *sum);
            }
        }
        sum4(sums) + (whole..n).map(|i| f16::from_bits(*a.add(i)).to_f32() * *x.add(i)).sum::<f32>()
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn axpy_f16(a: f32, x: *const u16, out: *mut f32, n: usize) {
    let whole = n / 8 * 8;
    let a8 = _mm256_set1_ps(a);
    unsafe {
        for i in (0..whole).step_by(8) {
            let sum = _mm256_fmadd_ps(a8, load_f16(x.add(i)), _mm256_loadu_ps(out.add(i)));
            _mm256_storeu_ps(out.add(i), sum);
        }
        for i in whole..n {
            *out.add(i) += a * f16::from_bits(*x.add(i)).to_f32();
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_q8_row(row: *const u8, x: &Columns, b: usize) -> f32 {
    let (codes, steps) = (x.codes(b).as_ptr(), x.steps(b).as_ptr());
    let scales: *const u16 = row.wrapping_add(x.cols).cast();
    let product = |at: usize| {
        // SAFETY: `at` is the start of 32 codes of row and input.
        let (w, v) = unsafe { (_mm256_loadu_si256(row.add(at).cast()), _mm256_loadu_si256(codes.add(at).cast())) };
        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(v, w));
        _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
    };
    let mut sum = _mm256_setzero_ps();
    for pack in 0..x.cols / PACK {
        // Lanes are groups: eight of the sixteen at a time.
        for part in 0..2 {
            let dot = (0..8).fold(_mm256_setzero_si256(), |dot, k| {
                _mm256_add_epi32(dot, product(pack * PACK + k * 64 + part * 32))
            });
            unsafe {
                let scale = load_f16(scales.add(pack * 16 + part * 8));
                let step = _mm256_mul_ps(scale, _mm256_loadu_ps(steps.add(pack * 16 + part * 8)));
                sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), step, sum);
            }
        }
    }
    for g in x.cols / PACK * (PACK / GROUP)..x.cols / GROUP {
        let step = unsafe { half(scales.add(g)) * *steps.add(g) };
        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(product(g * GROUP)), _mm256_set1_ps(step), sum);
    }
    sum1(sum)
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_q4_row(row: *const u8, x: &Columns, b: usize) -> f32 {
    let (codes, steps, totals) = (x.codes(b).as_ptr(), x.steps(b).as_ptr(), x.sums(b).as_ptr());
    let scales: *const u16 = row.wrapping_add(x.cols / 2).cast();
    let product = |w: __m256i, at: usize| {
        // SAFETY: `at` is the start of 32 codes of the input.
        let v = unsafe { _mm256_loadu_si256(codes.add(at).cast()) };
        let pairs = _mm256_maddubs_epi16(_mm256_and_si256(w, _mm256_set1_epi8(15)), v);
        _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
    };
    let mut sum = _mm256_setzero_ps();
    let mut bias = _mm256_setzero_ps();
    for pack in 0..x.cols / PACK {
        for part in 0..2 {
            let mut dot = _mm256_setzero_si256();
            unsafe {
                for p in 0..4 {
                    let w = _mm256_loadu_si256(row.add(pack * (PACK / 2) + p * 64 + part * 32).cast());
                    let at = pack * PACK + p * 128 + part * 32;
                    dot = _mm256_add_epi32(dot, product(w, at));
                    dot = _mm256_add_epi32(dot, product(_mm256_srli_epi16::<4>(w), at + 64));
                }
                let at = pack * 16 + part * 8;
                let scale = load_f16(scales.add(at));
                bias = _mm256_fmadd_ps(scale, _mm256_loadu_ps(totals.add(at)), bias);
                let step = _mm256_mul_ps(scale, _mm256_loadu_ps(steps.add(at)));
                sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), step, sum);
            }
        }
    }
    let mut tail_bias = 0.0;
    for g in x.cols / PACK * (PACK / GROUP)..x.cols / GROUP {
        unsafe {
            let bytes = _mm_loadu_si128(row.add(g * GROUP / 2).cast());
            let dot = product(_mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes), g * GROUP);
            let scale = half(scales.add(g));
            sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(scale * *steps.add(g)), sum);
            tail_bias += scale * *totals.add(g);
        }
    }
    sum1(_mm256_fnmadd_ps(_mm256_set1_ps(8.0), bias, sum)) - 8.0 * tail_bias
}

/// Defines an axpy that unpacks 32 numbers of the row at a time; `$load(row, i)` gives them as four registers.
macro_rules! axpy_floats {
    ($name:ident, $load:ident, $quant:expr) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(rows: &[*const u8], a: &[f32], cols: usize, out: &mut [f32]) {
            let (whole, n) = (cols / GROUP * GROUP, out.len() / cols);
            for (k, &a) in a.iter().enumerate() {
                let row = rows[k / n];
                let out = &mut out[k % n * cols..][..cols];
                for i in (0..whole).step_by(GROUP) {
                    for (k, w) in unsafe { $load(row, i) }.into_iter().enumerate() {
                        unsafe {
                            let out = out.as_mut_ptr().add(i + 8 * k);
                            _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_set1_ps(a), w, _mm256_loadu_ps(out)));
                        }
                    }
                }
                for (i, out) in out.iter_mut().enumerate().skip(whole) {
                    *out += a * unsafe { plain_number($quant, row, i) };
                }
            }
        }
    };
}

axpy_floats!(axpy_f32, load_f32_group, Quant::F32);
axpy_floats!(axpy_f16_rows, load_f16_group, Quant::F16);

macro_rules! axpy_grouped {
    ($name:ident, $four:literal) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(rows: &[*const u8], a: &[f32], cols: usize, out: &mut [f32]) {
            let n = out.len() / cols;
            for (k, &a) in a.iter().enumerate() {
                unsafe { add_grouped::<$four>(a, rows[k / n], out[k % n * cols..][..cols].as_mut_ptr(), cols) };
            }
        }
    };
}

axpy_grouped!(axpy_q8, false);
axpy_grouped!(axpy_q4, true);

/// out += a * row, in the order of `rows::axpy_place`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_grouped<const FOUR: bool>(a: f32, row: *const u8, out: *mut f32, cols: usize) {
    let scales: *const u16 = row.wrapping_add(if FOUR { cols / 2 } else { cols }).cast();
    let add = |at: usize, coefficient: __m256, codes: __m256i| unsafe {
        let sum = _mm256_fmadd_ps(coefficient, _mm256_cvtepi32_ps(codes), _mm256_loadu_ps(out.add(at)));
        _mm256_storeu_ps(out.add(at), sum);
    };
    let (low, eight) = (_mm256_set1_epi32(15), _mm256_set1_epi32(8));
    for pack in 0..cols / PACK {
        for part in 0..2 {
            let c = unsafe { _mm256_mul_ps(_mm256_set1_ps(a), load_f16(scales.add(pack * 16 + part * 8))) };
            for k in 0..8 {
                let at = if FOUR { pack * (PACK / 2) + k / 2 * 64 } else { pack * PACK + k * 64 } + part * 32;
                let v = unsafe { _mm256_loadu_si256(row.add(at).cast()) };
                for byte in 0..4 {
                    let codes = if FOUR {
                        let shift = _mm_cvtsi32_si128((byte * 8 + k % 2 * 4) as i32);
                        _mm256_sub_epi32(_mm256_and_si256(_mm256_srl_epi32(v, shift), low), eight)
                    } else {
                        let shift = _mm_cvtsi32_si128(24 - 8 * byte as i32);
                        _mm256_srai_epi32::<24>(_mm256_sll_epi32(v, shift))
                    };
                    add(pack * PACK + (k * 4 + byte) * 16 + part * 8, c, codes);
                }
            }
        }
    }
    for g in cols / PACK * (PACK / GROUP)..cols / GROUP {
        let c = _mm256_set1_ps(a * unsafe { half(scales.add(g)) });
        for k in 0..4 {
            let codes = if FOUR {
                let bytes = unsafe { _mm_loadl_epi64(row.add(g * GROUP / 2 + k % 2 * 8).cast()) };
                let codes = _mm256_cvtepu8_epi32(bytes);
                let codes = if k < 2 { _mm256_and_si256(codes, low) } else { _mm256_srli_epi32::<4>(codes) };
                _mm256_sub_epi32(codes, eight)
            } else {
                _mm256_cvtepi8_epi32(unsafe { _mm_loadl_epi64(row.add(g * GROUP + k * 8).cast()) })
            };
            add(g * GROUP + k * 8, c, codes);
        }
    }
}

/// A number after the last group of 32: only ungrouped types have any.
unsafe fn plain_number(quant: Quant, row: *const u8, i: usize) -> f32 {
    unsafe {
        match quant {
            Quant::F32 => row.cast::<f32>().add(i).read(),
            Quant::F16 => f16::from_bits(row.cast::<u16>().add(i).read()).to_f32(),
            Quant::Q8 | Quant::Q4 => unreachable!("grouped rows are whole groups"),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_f32_group(row: *const u8, i: usize) -> [__m256; 4] {
    std::array::from_fn(|k| unsafe { _mm256_loadu_ps(row.cast::<f32>().add(i + 8 * k)) })
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_f16_group(row: *const u8, i: usize) -> [__m256; 4] {
    std::array::from_fn(|k| unsafe { load_f16(row.cast::<u16>().add(i + 8 * k)) })
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_f16(at: *const u16) -> __m256 {
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.cast()) })
}

#[inline]
#[target_feature(enable = "f16c")]
unsafe fn half(at: *const u16) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(unsafe { at.read() } as i32)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum4(s: [__m256; 4]) -> f32 {
    sum1(_mm256_add_ps(_mm256_add_ps(s[0], s[1]), _mm256_add_ps(s[2], s[3])))
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum1(s: __m256) -> f32 {
    let halves = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps::<1>(s));
    let pairs = _mm_add_ps(halves, _mm_movehl_ps(halves, halves));
    _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)))
}
