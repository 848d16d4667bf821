//! Kernels for AVX2 with FMA and F16C.
//!
//! Without VNNI, byte products go through `maddubs`, whose 16-bit sums would overflow for full-range unsigned weights.
//! q8_0 therefore multiplies |w| by x carrying w's sign (both within 127); q4_0 codes are at most 15, so they stay
//! unsigned and eight times the input sum is taken out at the end.

#![cfg(target_arch = "x86_64")]

use super::{Columns, Isa, Kernels};
use crate::formats::rows::{GROUP, PACK, Quant};
use half::f16;
use std::arch::x86_64::*;

pub const KERNELS: Kernels = Kernels {
    isa: Isa::Avx2,
    dots: [dot_f32, dot_f16_rows, dot_q8, dot_q4],
    axpys: [axpy_f32, axpy_f16_rows, axpy_q8, axpy_q4],
    dot_f16,
    axpy_f16,
};

/// Defines a dot over rows from one over a row and all columns.
macro_rules! dot_rows {
    ($name:ident, $row:ident, $quant:expr) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(rows: *const u8, count: usize, x: &Columns, y: *mut f32, stride: usize) {
            for r in 0..count {
                for b in 0..x.n {
                    // SAFETY: the caller's promises.
                    unsafe { *y.add(b * stride + r) = $row(rows.add(r * $quant.row_bytes(x.cols)), x, b) };
                }
            }
        }
    };
}

dot_rows!(dot_f32, dot_f32_row, Quant::F32);
dot_rows!(dot_f16_rows, dot_f16_row, Quant::F16);
dot_rows!(dot_q8, dot_q8_row, Quant::Q8);
dot_rows!(dot_q4, dot_q4_row, Quant::Q4);

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
    let ones = _mm256_set1_epi16(1);
    let (codes, steps) = (x.codes(b).as_ptr(), x.steps(b));
    let mut sum = _mm256_setzero_ps();
    for (g, step) in steps.iter().enumerate().take(x.cols / GROUP) {
        unsafe {
            let w = _mm256_loadu_si256(row.add(g * GROUP).cast());
            let v = _mm256_loadu_si256(codes.add(g * GROUP).cast());
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(v, w));
            let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
            sum = _mm256_fmadd_ps(dot, _mm256_set1_ps(group_scale(row.add(x.cols), g) * step), sum);
        }
    }
    sum1(sum)
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_q4_row(row: *const u8, x: &Columns, b: usize) -> f32 {
    let (nibble, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let packed = x.cols / PACK * PACK;
    let scales = unsafe { row.add(x.cols / 2) };
    let (codes, steps, input_sums) = (x.codes(b).as_ptr(), x.steps(b), x.sums(b));
    let mut sum = _mm256_setzero_ps();
    let mut bias = 0f32;
    for g in 0..x.cols / GROUP {
        let start = g * GROUP;
        unsafe {
            let w = if start < packed {
                let (pack, within) = (start / PACK * (PACK / 2), start % PACK);
                let bytes = _mm256_loadu_si256(row.add(pack + within % (PACK / 2)).cast());
                if within < PACK / 2 { bytes } else { _mm256_srli_epi16::<4>(bytes) }
            } else {
                let bytes = _mm_loadu_si128(row.add(start / 2).cast());
                _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes)
            };
            let v = _mm256_loadu_si256(codes.add(start).cast());
            let pairs = _mm256_maddubs_epi16(_mm256_and_si256(w, nibble), v);
            let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
            let scale = group_scale(scales, g);
            sum = _mm256_fmadd_ps(dot, _mm256_set1_ps(scale * steps[g]), sum);
            bias += scale * input_sums[g];
        }
    }
    sum1(sum) - 8.0 * bias
}

/// Defines an axpy that unpacks 32 numbers of each row at a time; `$load(row, cols, i)` gives them as four registers.
macro_rules! axpy_rows {
    ($name:ident, $load:ident, $quant:expr) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(rows: &[*const u8], a: &[f32], cols: usize, out: &mut [f32]) {
            let n = out.len() / cols;
            let whole = cols / GROUP * GROUP;
            for i in (0..whole).step_by(GROUP) {
                for (r, &row) in rows.iter().enumerate() {
                    unsafe {
                        let w = $load(row, cols, i);
                        for b in 0..n {
                            let out = out.as_mut_ptr().add(b * cols + i);
                            let a = _mm256_set1_ps(*a.get_unchecked(r * n + b));
                            for (k, w) in w.into_iter().enumerate() {
                                let sum = _mm256_fmadd_ps(a, w, _mm256_loadu_ps(out.add(8 * k)));
                                _mm256_storeu_ps(out.add(8 * k), sum);
                            }
                        }
                    }
                }
            }
            for i in whole..cols {
                for (r, &row) in rows.iter().enumerate() {
                    let w = unsafe { plain_number($quant, row, i) };
                    for b in 0..n {
                        out[b * cols + i] += a[r * n + b] * w;
                    }
                }
            }
        }
    };
}

axpy_rows!(axpy_f32, load_f32_group, Quant::F32);
axpy_rows!(axpy_f16_rows, load_f16_group, Quant::F16);
axpy_rows!(axpy_q8, load_q8_group, Quant::Q8);
axpy_rows!(axpy_q4, load_q4_group, Quant::Q4);

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
unsafe fn load_f32_group(row: *const u8, _: usize, i: usize) -> [__m256; 4] {
    std::array::from_fn(|k| unsafe { _mm256_loadu_ps(row.cast::<f32>().add(i + 8 * k)) })
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_f16_group(row: *const u8, _: usize, i: usize) -> [__m256; 4] {
    std::array::from_fn(|k| unsafe { load_f16(row.cast::<u16>().add(i + 8 * k)) })
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_q8_group(row: *const u8, cols: usize, i: usize) -> [__m256; 4] {
    let scale = _mm256_set1_ps(unsafe { group_scale(row.add(cols), i / GROUP) });
    std::array::from_fn(|k| {
        let codes = unsafe { _mm_loadl_epi64(row.add(i + 8 * k).cast()) };
        _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)), scale)
    })
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_q4_group(row: *const u8, cols: usize, i: usize) -> [__m256; 4] {
    let scale = _mm256_set1_ps(unsafe { group_scale(row.add(cols / 2), i / GROUP) });
    let (low, high) = (_mm256_set1_epi32(15), _mm256_set1_epi32(8));
    let packed = i < cols / PACK * PACK;
    std::array::from_fn(|k| {
        // Where the eight codes lie: packs hold groups 0 and 1 in the low halves of 64 bytes, 2 and 3 in the high ones.
        let (at, shifted) = if packed {
            let within = i % PACK;
            (i / PACK * (PACK / 2) + within % (PACK / 2) + 8 * k, within >= PACK / 2)
        } else {
            (i / 2 + 8 * (k % 2), k >= 2)
        };
        let codes = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(row.add(at).cast()) });
        let codes = if shifted { _mm256_srli_epi32::<4>(codes) } else { _mm256_and_si256(codes, low) };
        _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(codes, high)), scale)
    })
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_f16(at: *const u16) -> __m256 {
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.cast()) })
}

#[inline]
#[target_feature(enable = "f16c")]
unsafe fn group_scale(scales: *const u8, group: usize) -> f32 {
    let bits = unsafe { scales.cast::<u16>().add(group).read() };
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits as i32)))
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
