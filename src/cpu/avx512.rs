//! Kernels for AVX-512 with VNNI.
//!
//! Integer dots use `vpdpbusd`, which multiplies unsigned by signed bytes: weights are made unsigned (q8_0 by flipping
//! the sign bit, that is +128; q4_0 codes are unsigned with 8 for zero) and the bias times the sum of the inputs is
//! taken out once per 16 groups. One 512-bit product covers two groups of 32, so its 16 sums need the scale of the first
//! group in lanes 0-7 and of the second in lanes 8-15: a permutation of the 16 group scales that were loaded at once.

#![cfg(target_arch = "x86_64")]

use super::{Columns, Isa, Kernels, MAX_AXPY_ROWS};
use crate::formats::rows::{GROUP, PACK, Quant};
use std::arch::x86_64::*;

pub const KERNELS: Kernels = Kernels {
    isa: Isa::Avx512,
    dots: [dot_f32, dot_f16_rows, dot_q8, dot_q4],
    axpys: [axpy_f32_rows, axpy_f16_rows, axpy_q8_rows, axpy_q4_rows],
    dot_f16,
    axpy_f16,
};

/// Columns that share one pass over a row's registers.
const TILE: usize = 4;
/// Sums per column, added up at the end: an addition waits four cycles for the one before it.
const CHAINS: usize = 2;

/// Defines a dot over rows from one over a row: `$f::<N>(row, x, first column)` gives the products with N columns.
macro_rules! dot_rows {
    ($name:ident, $f:ident, $quant:expr) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
        unsafe fn $name(rows: *const u8, count: usize, x: &Columns, y: *mut f32, stride: usize) {
            let row_bytes = $quant.row_bytes(x.cols);
            for r in 0..count {
                let row = rows.wrapping_add(r * row_bytes);
                let y = y.wrapping_add(r);
                let mut b = 0;
                unsafe {
                    while b + TILE <= x.n {
                        for (k, sum) in $f::<TILE>(row, x, b).into_iter().enumerate() {
                            *y.add((b + k) * stride) = sum;
                        }
                        b += TILE;
                    }
                    while b < x.n {
                        *y.add(b * stride) = $f::<1>(row, x, b)[0];
                        b += 1;
                    }
                }
            }
        }
    };
}

dot_rows!(dot_f32, dot_f32_tile, Quant::F32);
dot_rows!(dot_f16_rows, dot_f16_tile, Quant::F16);
dot_rows!(dot_q8, dot_q8_tile, Quant::Q8);
dot_rows!(dot_q4, dot_q4_tile, Quant::Q4);

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
unsafe fn dot_f32_tile<const N: usize>(row: *const u8, x: &Columns, first: usize) -> [f32; N] {
    let row: *const f32 = row.cast();
    let xs: [*const f32; N] = std::array::from_fn(|b| x.values(first + b).as_ptr());
    let mut sums = [[_mm512_setzero_ps(); N]; CHAINS];
    for i in (0..x.cols).step_by(16 * CHAINS) {
        for (k, sums) in sums.iter_mut().enumerate() {
            let at = i + 16 * k;
            let mask = tail_mask(x.cols.saturating_sub(at));
            unsafe {
                let w = _mm512_maskz_loadu_ps(mask, row.wrapping_add(at));
                for (sum, x) in sums.iter_mut().zip(xs) {
                    *sum = _mm512_fmadd_ps(w, _mm512_maskz_loadu_ps(mask, x.wrapping_add(at)), *sum);
                }
            }
        }
    }
    std::array::from_fn(|b| _mm512_reduce_add_ps(_mm512_add_ps(sums[0][b], sums[1][b])))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
unsafe fn dot_f16_tile<const N: usize>(row: *const u8, x: &Columns, first: usize) -> [f32; N] {
    let row: *const u16 = row.cast();
    let xs: [*const f32; N] = std::array::from_fn(|b| x.values(first + b).as_ptr());
    let mut sums = [[_mm512_setzero_ps(); N]; CHAINS];
    let mut i = 0;
    unsafe {
        // One cache line of weights a turn: with more, their loads come in bursts that the hardware's prefetching does not
        // keep up with (15 instead of 27 GB/s on a Zen 4).
        while i + 32 <= x.cols {
            for (k, sums) in sums.iter_mut().enumerate() {
                let w = load_f16(row.add(i + 16 * k));
                for (sum, x) in sums.iter_mut().zip(xs) {
                    *sum = _mm512_fmadd_ps(w, _mm512_loadu_ps(x.add(i + 16 * k)), *sum);
                }
            }
            i += 32;
        }
        while i < x.cols {
            let mask = tail_mask(x.cols - i);
            let w = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, row.add(i).cast()));
            for (sum, x) in sums[0].iter_mut().zip(xs) {
                *sum = _mm512_fmadd_ps(w, _mm512_maskz_loadu_ps(mask, x.add(i)), *sum);
            }
            i += 16;
        }
    }
    std::array::from_fn(|b| _mm512_reduce_add_ps(_mm512_add_ps(sums[0][b], sums[1][b])))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
unsafe fn dot_f16(a: *const u16, x: *const f32, n: usize) -> f32 {
    let mut sums = [_mm512_setzero_ps(); 2];
    let mut i = 0;
    unsafe {
        while i + 32 <= n {
            let (x0, x1) = (_mm512_loadu_ps(x.add(i)), _mm512_loadu_ps(x.add(i + 16)));
            sums[0] = _mm512_fmadd_ps(load_f16(a.add(i)), x0, sums[0]);
            sums[1] = _mm512_fmadd_ps(load_f16(a.add(i + 16)), x1, sums[1]);
            i += 32;
        }
        while i < n {
            let mask = tail_mask(n - i);
            let w = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, a.add(i).cast()));
            sums[0] = _mm512_fmadd_ps(w, _mm512_maskz_loadu_ps(mask, x.add(i)), sums[0]);
            i += 16;
        }
    }
    _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
unsafe fn axpy_f16(a: f32, x: *const u16, out: *mut f32, n: usize) {
    let a = _mm512_set1_ps(a);
    let mut i = 0;
    unsafe {
        while i < n {
            let mask = tail_mask(n - i);
            let w = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, x.add(i).cast()));
            let o = _mm512_maskz_loadu_ps(mask, out.add(i));
            _mm512_mask_storeu_ps(out.add(i), mask, _mm512_fmadd_ps(a, w, o));
            i += 16;
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
unsafe fn dot_q8_tile<const N: usize>(row: *const u8, x: &Columns, first: usize) -> [f32; N] {
    let groups = x.cols / GROUP;
    let scales: *const u16 = unsafe { row.add(x.cols).cast() };
    let flip = _mm512_set1_epi8(-128);
    let lanes = pair_lanes();
    let mut sums = [[_mm512_setzero_ps(); CHAINS]; N];
    let mut biases = [_mm512_setzero_ps(); N];
    let mut g = 0;
    while g < groups {
        let here = (groups - g).min(16);
        unsafe {
            let steps = column_scales::<N>(scales.add(g), here, x, first, g, &mut biases);
            for (k, lane) in lanes.iter().enumerate().take(here.div_ceil(2)) {
                let at = (g + 2 * k) * GROUP;
                // An odd last group: the other half's weights are not ours to read, and its scale is zero.
                let mask = if 2 * k + 1 < here { u64::MAX } else { u32::MAX as u64 };
                let w = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, row.add(at).cast()), flip);
                for b in 0..N {
                    let codes = _mm512_loadu_si512(x.codes(first + b).as_ptr().add(at).cast());
                    let dot = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), w, codes));
                    let sum = &mut sums[b][k % CHAINS];
                    *sum = _mm512_fmadd_ps(dot, _mm512_permutexvar_ps(*lane, steps[b]), *sum);
                }
            }
        }
        g += 16;
    }
    std::array::from_fn(|b| {
        let sum = _mm512_add_ps(sums[b][0], sums[b][1]);
        _mm512_reduce_add_ps(_mm512_fnmadd_ps(_mm512_set1_ps(128.0), biases[b], sum))
    })
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
unsafe fn dot_q4_tile<const N: usize>(row: *const u8, x: &Columns, first: usize) -> [f32; N] {
    let groups = x.cols / GROUP;
    let packed = x.cols / PACK * (PACK / GROUP); // groups in whole packs
    let scales: *const u16 = unsafe { row.add(x.cols / 2).cast() };
    let nibble = _mm512_set1_epi8(15);
    let lanes = pair_lanes();
    let mut sums = [[_mm512_setzero_ps(); CHAINS]; N];
    let mut biases = [_mm512_setzero_ps(); N];
    let mut g = 0;
    while g < groups {
        let here = (groups - g).min(16);
        unsafe {
            let steps = column_scales::<N>(scales.add(g), here, x, first, g, &mut biases);
            let packs = packed.saturating_sub(g).min(16) / 4;
            for p in 0..packs {
                let at = (g + 4 * p) * GROUP;
                let codes = _mm512_loadu_si512(row.add(at / 2).cast());
                let low = _mm512_and_si512(codes, nibble);
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), nibble);
                for b in 0..N {
                    let input = x.codes(first + b).as_ptr().add(at);
                    let zero = _mm512_setzero_si512();
                    let d0 = _mm512_dpbusd_epi32(zero, low, _mm512_loadu_si512(input.cast()));
                    let d1 = _mm512_dpbusd_epi32(zero, high, _mm512_loadu_si512(input.add(64).cast()));
                    let (s0, s1) = (lanes[2 * p], lanes[2 * p + 1]);
                    let (s0, s1) = (_mm512_permutexvar_ps(s0, steps[b]), _mm512_permutexvar_ps(s1, steps[b]));
                    sums[b][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d0), s0, sums[b][0]);
                    sums[b][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d1), s1, sums[b][1]);
                }
            }
            for k in 4 * packs..here {
                let at = (g + k) * GROUP;
                let codes = _mm_loadu_si128(row.add(at / 2).cast());
                let low = _mm_and_si128(codes, _mm_set1_epi8(15));
                let high = _mm_and_si128(_mm_srli_epi16::<4>(codes), _mm_set1_epi8(15));
                let w = _mm512_zextsi256_si512(_mm256_set_m128i(high, low));
                let lane = _mm512_set1_epi32(k as i32);
                for b in 0..N {
                    let input = _mm256_loadu_si256(x.codes(first + b).as_ptr().add(at).cast());
                    let dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, _mm512_zextsi256_si512(input));
                    let step = _mm512_permutexvar_ps(lane, steps[b]);
                    sums[b][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), step, sums[b][0]);
                }
            }
        }
        g += 16;
    }
    std::array::from_fn(|b| {
        let sum = _mm512_add_ps(sums[b][0], sums[b][1]);
        _mm512_reduce_add_ps(_mm512_fnmadd_ps(_mm512_set1_ps(8.0), biases[b], sum))
    })
}

/// Products of the weights' scales of groups g..g+here with the columns' steps; adds scale times input sum to `biases`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
unsafe fn column_scales<const N: usize>(
    scales: *const u16,
    here: usize,
    x: &Columns,
    first: usize,
    g: usize,
    biases: &mut [__m512; N],
) -> [__m512; N] {
    let mut steps = [_mm512_setzero_ps(); N];
    unsafe {
        let scale = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(tail_mask(here), scales.cast()));
        for b in 0..N {
            let sums = _mm512_loadu_ps(x.sums(first + b).as_ptr().add(g));
            biases[b] = _mm512_fmadd_ps(scale, sums, biases[b]);
            steps[b] = _mm512_mul_ps(scale, _mm512_loadu_ps(x.steps(first + b).as_ptr().add(g)));
        }
    }
    steps
}

/// Index vectors: k gives lane 2k to the lower and lane 2k+1 to the upper half.
#[inline]
#[target_feature(enable = "avx512f")]
fn pair_lanes() -> [__m512i; 8] {
    std::array::from_fn(|k| {
        let half = |lane: usize| _mm256_set1_epi32(lane as i32);
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(half(2 * k)), half(2 * k + 1))
    })
}

#[inline]
fn tail_mask(left: usize) -> u16 {
    if left >= 16 { u16::MAX } else { (1 << left) - 1 }
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
unsafe fn load_f16(at: *const u16) -> __m512 {
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(at.cast()) })
}

/// Groups whose coefficients an axpy works out at a time: 2048 numbers.
const COEFFICIENT_GROUPS: usize = 64;

/// Defines an axpy. A row's coefficient is its `a` (times the group's scale, for grouped types); `$load::<FULL>(row, cols,
/// i, w)` gives the unscaled numbers of the step at i, `$width` of them when FULL, and says how many.
macro_rules! axpy_rows {
    ($name:ident, $tile:ident, $step:ident, $load:ident, $width:expr, $scales_at:expr) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
        unsafe fn $name(rows: &[*const u8], a: &[f32], cols: usize, out: &mut [f32]) {
            unsafe {
                match *rows {
                    [r0] => $tile::<1>([r0], a, cols, out),
                    [r0, r1] => $tile::<2>([r0, r1], a, cols, out),
                    [r0, r1, r2] => $tile::<3>([r0, r1, r2], a, cols, out),
                    [r0, r1, r2, r3] => $tile::<4>([r0, r1, r2, r3], a, cols, out),
                    _ => assert!(rows.is_empty(), "an axpy takes at most {MAX_AXPY_ROWS} rows"),
                }
            }
        }

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
        unsafe fn $tile<const R: usize>(rows: [*const u8; R], a: &[f32], cols: usize, out: &mut [f32]) {
            let n = out.len() / cols;
            for b in 0..n {
                let a = std::array::from_fn(|r| a[r * n + b]);
                let out = unsafe { out.as_mut_ptr().add(b * cols) };
                for start in (0..cols).step_by(COEFFICIENT_GROUPS * GROUP) {
                    let end = cols.min(start + COEFFICIENT_GROUPS * GROUP);
                    unsafe {
                        let by_group = coefficients(rows, $scales_at(cols), a, start, end);
                        let whole = start + (end - start) / $width * $width;
                        let mut i = start;
                        while i < whole {
                            i += $step::<R, true>(rows, &by_group, cols, start, i, out);
                        }
                        while i < end {
                            i += $step::<R, false>(rows, &by_group, cols, start, i, out);
                        }
                    }
                }
            }
        }

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
        unsafe fn $step<const R: usize, const FULL: bool>(
            rows: [*const u8; R],
            by_group: &[[f32; COEFFICIENT_GROUPS]; R],
            cols: usize,
            start: usize,
            i: usize,
            out: *mut f32,
        ) -> usize {
            const PIECES: usize = $width / 16;
            let out = out.wrapping_add(i);
            let mut here = $width;
            let mut w = [_mm512_setzero_ps(); PIECES];
            let mut sums = [_mm512_setzero_ps(); PIECES];
            if FULL {
                sums = std::array::from_fn(|k| unsafe { _mm512_loadu_ps(out.add(16 * k)) });
            }
            for (row, by_group) in rows.into_iter().zip(by_group) {
                here = unsafe { $load::<FULL>(row, cols, i, &mut w) };
                for (k, (sum, w)) in sums.iter_mut().zip(w).enumerate() {
                    let group = ((i - start) / GROUP + k / 2) % COEFFICIENT_GROUPS;
                    *sum = _mm512_fmadd_ps(_mm512_set1_ps(by_group[group]), w, *sum);
                }
            }
            for (k, sum) in sums.into_iter().enumerate() {
                unsafe {
                    if FULL {
                        _mm512_storeu_ps(out.add(16 * k), sum);
                    } else {
                        let mask = tail_mask(here.saturating_sub(16 * k));
                        let old = _mm512_maskz_loadu_ps(mask, out.wrapping_add(16 * k));
                        _mm512_mask_storeu_ps(out.wrapping_add(16 * k), mask, _mm512_add_ps(old, sum));
                    }
                }
            }
            here
        }
    };
}

const fn no_scales(_: usize) -> Option<usize> {
    None
}
const fn q8_scales(cols: usize) -> Option<usize> {
    Some(cols)
}
const fn q4_scales(cols: usize) -> Option<usize> {
    Some(cols / 2)
}

axpy_rows!(axpy_f32_rows, axpy_f32_tile, axpy_f32_step, load_f32_step, 64, no_scales);
axpy_rows!(axpy_f16_rows, axpy_f16_tile, axpy_f16_step, load_f16_step, 64, no_scales);
axpy_rows!(axpy_q8_rows, axpy_q8_tile, axpy_q8_step, load_q8_step, 64, q8_scales);
axpy_rows!(axpy_q4_rows, axpy_q4_tile, axpy_q4_step, load_q4_step, PACK, q4_scales);

/// What each row's numbers start..end are multiplied by, group by group: `a`, times the group's scale if there are any
/// (their place in the row is `scales_at`).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn coefficients<const R: usize>(
    rows: [*const u8; R],
    scales_at: Option<usize>,
    a: [f32; R],
    start: usize,
    end: usize,
) -> [[f32; COEFFICIENT_GROUPS]; R] {
    let Some(scales_at) = scales_at else { return a.map(|a| [a; COEFFICIENT_GROUPS]) };
    let mut out = [[0f32; COEFFICIENT_GROUPS]; R];
    for ((out, row), a) in out.iter_mut().zip(rows).zip(a) {
        let scales = unsafe { row.add(scales_at).cast::<i16>().add(start / GROUP) };
        let groups = (end - start) / GROUP;
        for g in (0..groups).step_by(16) {
            unsafe {
                let scales = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(tail_mask(groups - g), scales.add(g)));
                _mm512_storeu_ps(out.as_mut_ptr().add(g), _mm512_mul_ps(scales, _mm512_set1_ps(a)));
            }
        }
    }
    out
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_f32_step<const FULL: bool>(row: *const u8, cols: usize, i: usize, w: &mut [__m512; 4]) -> usize {
    let here = if FULL { 64 } else { (cols - i).min(64) };
    for (k, w) in w.iter_mut().enumerate() {
        let mask = if FULL { u16::MAX } else { tail_mask(here.saturating_sub(16 * k)) };
        *w = unsafe { _mm512_maskz_loadu_ps(mask, row.cast::<f32>().wrapping_add(i + 16 * k)) };
    }
    here
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load_f16_step<const FULL: bool>(row: *const u8, cols: usize, i: usize, w: &mut [__m512; 4]) -> usize {
    let here = if FULL { 64 } else { (cols - i).min(64) };
    for (k, w) in w.iter_mut().enumerate() {
        let mask = if FULL { u16::MAX } else { tail_mask(here.saturating_sub(16 * k)) };
        let at = row.cast::<i16>().wrapping_add(i + 16 * k);
        *w = _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, at) });
    }
    here
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_q8_step<const FULL: bool>(row: *const u8, cols: usize, i: usize, w: &mut [__m512; 4]) -> usize {
    let here = if FULL { 64 } else { (cols - i).min(64) };
    for (k, w) in w.iter_mut().enumerate().take(here / 16) {
        let codes = unsafe { _mm_loadu_si128(row.add(i + 16 * k).cast()) };
        *w = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    }
    here
}

/// A whole pack of 128 numbers, or after the last pack one group of 32.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_q4_step<const FULL: bool>(row: *const u8, _: usize, i: usize, w: &mut [__m512; 8]) -> usize {
    // The 16 values a code stands for, looked up by the low four bits of each lane.
    let values = _mm512_setr_ps(-8., -7., -6., -5., -4., -3., -2., -1., 0., 1., 2., 3., 4., 5., 6., 7.);
    let here = if FULL { PACK } else { GROUP };
    let half = here / 32; // registers of 16 numbers in the low halves of the bytes
    for k in 0..half {
        let codes = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(row.add(i / 2 + 16 * k).cast()) });
        w[k] = _mm512_permutexvar_ps(codes, values);
        w[half + k] = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), values);
    }
    here
}
