//! Kernels for AVX-512 with VNNI.
//!
//! Integer dots use `vpdpbusd`, which multiplies unsigned by signed bytes and adds four neighbours: weights are made
//! unsigned (q8_0 by flipping the sign bit, that is +128; q4_0 codes are unsigned with 8 for zero) and the bias times the
//! sum of the inputs is taken out once per pack. A pack's lanes are its groups (`formats::rows`), so the sums of all eight
//! registers of a pack add up before they are scaled.

#![cfg(target_arch = "x86_64")]
// Tiles of registers are indexed: iterators over them do not stay in registers.
#![allow(clippy::needless_range_loop)]

mod axpy;
mod blocks;
mod floats;
mod gemm;
mod sixteen;

use super::columns::LONG;
use super::{Columns, Isa, Kernels, Prefill, Rows, by_type, prefetch, whole_rows};
use crate::cpu::arch::*;
use crate::formats::blocks::BlockType;
use crate::formats::rows::{GROUP, PACK, Quant, ROW_ALIGN};
use axpy::{axpy_f16, axpy_f32, axpy_q4, axpy_q8, touch};

/// The kernels for this processor's maker, whose hardware decides how rows are best prefetched.
///
/// Processors differ in how far ahead their hardware prefetches. On a Zen 4 rows of f16 came no faster with prefetches, and down rows came
/// faster when they were read before they were added. On an Intel server core one thread took 221 ms for a dense token of f16, and 148
/// with every line prefetched 4 KiB before it is read, down rows included; q8_0 took 85 and 63, q4_0 52 and 44. 2 KiB was slower, 8 KiB
/// as fast or slower, and leaving lines out was slower (runs/2026-11-22-avx512-intel).
pub fn kernels() -> Kernels {
    kinds()[0].1
}

/// Both kinds of kernels by name, that for this processor's maker first.
pub fn kinds() -> [(&'static str, Kernels); 2] {
    let vendor = __cpuid(0);
    let intel = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel";
    let (near, far) = (("near", of::<false>()), ("far", of::<true>()));
    if intel { [far, near] } else { [near, far] }
}

/// The kernels; with FAR they prefetch every line of a stream [`AHEAD`] bytes before it is read, otherwise only block types do,
/// [`BLOCKS_AHEAD`] bytes before it.
const fn of<const FAR: bool>() -> Kernels {
    Kernels {
        isa: Isa::Avx512,
        dots: by_type(
            [dot_float::<F32, FAR>, dot_float::<F16, FAR>, dot_grouped::<false, FAR>, dot_grouped::<true, FAR>],
            blocks::dots::<FAR>(),
        ),
        axpys: by_type([axpy_f32::<FAR>, axpy_f16::<FAR>, axpy_q8::<FAR>, axpy_q4::<FAR>], blocks::axpys::<FAR>()),
        gemms: gemm::GEMMS,
        gemms_seven: [None; Quant::COUNT],
        fewest_codes: gemm::MIN_CODES,
        panel_width: gemm::WIDTH,
        fill_panel: gemm::fill,
        across: Some(gemm::across),
        scaled: gemm::SCALED,
        sixteen: Some(sixteen::SIXTEEN),
        tiles: floats::TILES,
        recurrences: super::recurrence::AVX512,
        prefill: Prefill::Int8,
        rounds_floats: false,
        seven_bits: false,
        touch,
        adds_as_read: [FAR; Quant::COUNT],
        lists_as_fast: FAR,
        rows_together: by_type([1, 1, 1, 2], [1; BlockType::COUNT]),
    }
}

/// Bytes ahead that FAR kernels prefetch: the same for dots and axpys, or some lines between their rows would not be prefetched.
const AHEAD: usize = 4096;

/// The same of block types where not FAR, for rows that lie one behind the other. On a Zen 4 a thread decoded Q4_0 and Q4_K_M at 41.9 and
/// 37.8 tokens/s with it, at 35.5 and 32.4 with 4 KiB and without (runs/2026-11-25-zen4-blocks).
const BLOCKS_AHEAD: usize = 8192;

/// A tile of several columns works on so many numbers of each row before the next tile: the inputs of six columns then stay in L1 while
/// rows of weights pass.
const DEPTH: usize = 2048;

/// Up to this many columns rows are read one after the other, as for one column: several rows side by side halve what
/// comes from memory, and few columns do not make up for it (two in f16 on a Zen 4: 116 against 41 ms of FFN for one).
const FEW: usize = 4;

/// So far ahead rows of floats are prefetched that lie one behind the other and meet a column in f16, where not FAR: rows of 5632 numbers came
/// at 27 to 29 GB/s with and without, rows of 14336 at 24 to 28 instead of 16.
const HALVES_AHEAD: usize = 8192;

/// So many rows of f32, and of [`LONG`] columns that have no f16, are multiplied together, while the next are prefetched into L2 in the
/// order of memory. In f16 one thread of a Zen 4 read rows of 5632 numbers at 15 GB/s one by one and at 21 so, rows of 14336 at 11.5 and
/// 20.5; rows of 2048, one by one, at 22 (runs/2026-11-25-zen4-floats).
const TOGETHER: usize = 8;

/// The dot kernel for rows of floats.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn dot_float<const KIND: u8, const FAR: bool>(
    rows: Rows,
    count: usize,
    x: &Columns,
    y: *mut f32,
    stride: usize,
) {
    if x.n == 1 {
        let ahead = if FAR { whole_rows(rows.ahead, AHEAD) } else { rows.ahead };
        let one_behind_the_other = rows.stride < bytes_of::<KIND>(x.cols) + ROW_ALIGN;
        if let Some((halves, unit)) = x.halves().filter(|_| KIND != F32) {
            let ahead = if ahead == 0 && one_behind_the_other { HALVES_AHEAD } else { ahead };
            for r in 0..count {
                unsafe { *y.add(r) = unit * dot_halves::<KIND>(rows.row(r), halves, ahead) };
            }
            return;
        }
        let mut first = 0;
        if ahead == 0 && one_behind_the_other && x.cols > LONG {
            let rows = Rows { ahead: TOGETHER * rows.stride, ..rows };
            for r in (0..count / TOGETHER * TOGETHER).step_by(TOGETHER) {
                unsafe { *y.add(r).cast() = dot_one::<KIND, TOGETHER, true>(rows.from(r), x.values(0)) };
            }
            first = count / TOGETHER * TOGETHER;
        }
        for r in first..count {
            let rows = Rows { ahead, ..rows.from(r) };
            let sums = unsafe {
                if ahead == 0 {
                    dot_one::<KIND, 1, false>(rows, x.values(0))
                } else {
                    dot_one::<KIND, 1, true>(rows, x.values(0))
                }
            };
            unsafe { *y.add(r) = sums[0] };
        }
        return;
    }
    if x.n <= FEW {
        // With more work for each line, loads no longer run ahead by themselves. So lines are prefetched two rows ahead: an f16 matrix
        // times two columns took one thread of a Zen 4 21.5 ms that way, 26.5 ms one row ahead, and 35 ms within the same row.
        let ahead = if rows.ahead == 0 { 2 * rows.stride } else { rows.ahead };
        for r in 0..count {
            tiles!(x.n, [4, 3, 2, 1], |N, b| {
                unsafe {
                    let sums = dot_few::<KIND, N>(rows.row(r), x, b, ahead);
                    sums.iter().enumerate().for_each(|(c, sum)| *y.add((b + c) * stride + r) = *sum);
                }
            });
        }
        return;
    }
    for start in (0..x.cols).step_by(DEPTH) {
        let range = (start, x.cols.min(start + DEPTH));
        tiles!(x.n, [6, 4, 3, 2, 1], |N, b| {
            tiles!(count, [4, 1], |R, r| {
                unsafe {
                    let sums = float_tile::<KIND, R, N>(rows.from(r), x, b, range);
                    for (k, sums) in sums.iter().enumerate() {
                        for (c, sum) in sums.iter().enumerate() {
                            let y = y.add((b + c) * stride + r + k);
                            *y = if start == 0 { *sum } else { *y + *sum };
                        }
                    }
                }
            });
        });
    }
}

/// Products of numbers `range` of R rows with N columns.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn float_tile<const KIND: u8, const R: usize, const N: usize>(
    rows: Rows,
    x: &Columns,
    first: usize,
    (start, end): (usize, usize),
) -> [[f32; N]; R] {
    let xs: [*const f32; N] = std::array::from_fn(|b| x.values(first + b).as_ptr());
    let mut sums = [[_mm512_setzero_ps(); N]; R];
    let whole = start + (end - start) / 16 * 16;
    let mut i = start;
    while i < whole {
        unsafe {
            let mut w = [_mm512_setzero_ps(); R];
            for r in 0..R {
                w[r] = load_floats::<KIND>(rows.row(r), i, u16::MAX);
            }
            for b in 0..N {
                let x = _mm512_loadu_ps(xs[b].add(i));
                for r in 0..R {
                    sums[r][b] = _mm512_fmadd_ps(w[r], x, sums[r][b]);
                }
            }
        }
        i += 16;
    }
    if whole < end {
        let mask = tail_mask(end - whole);
        for (r, sums) in sums.iter_mut().enumerate() {
            unsafe {
                let w = load_floats::<KIND>(rows.row(r), whole, mask);
                for (sum, x) in sums.iter_mut().zip(xs) {
                    *sum = _mm512_fmadd_ps(w, _mm512_maskz_loadu_ps(mask, x.add(whole)), *sum);
                }
            }
        }
    }
    reduce(&sums)
}

/// Prefetches the scales of a row, which lie behind its codes, after the codes: addresses then only rise.
#[inline]
fn prefetch_scales<const FOUR: bool>(row: *const u8, cols: usize, ahead: usize) {
    let scales = row.wrapping_add(if FOUR { cols / 2 } else { cols });
    (0..cols / GROUP * 2).step_by(64).for_each(|line| prefetch(scales.wrapping_add(line + ahead)));
}

/// Products of R rows with one column. With AHEAD what is read is prefetched, `rows.ahead` bytes before, in the order of memory.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn dot_one<const KIND: u8, const R: usize, const AHEAD: bool>(rows: Rows, x: &[f32]) -> [f32; R] {
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    let (n, x) = (x.len(), x.as_ptr());
    let mut i = 0;
    unsafe {
        // One cache line of f16 weights a turn: with more, their loads come in bursts that the hardware's prefetching does
        // not keep up with (15 instead of 25 GB/s from memory on a Zen 4).
        while i + 32 <= n {
            let (x0, x1) = (_mm512_loadu_ps(x.add(i)), _mm512_loadu_ps(x.add(i + 16)));
            for r in 0..R {
                if AHEAD {
                    prefetch(rows.first.wrapping_add(bytes_of::<KIND>(R * i + 32 * r) + rows.ahead));
                }
                let row = rows.row(r);
                sums[r][0] = _mm512_fmadd_ps(load_floats::<KIND>(row, i, u16::MAX), x0, sums[r][0]);
                sums[r][1] = _mm512_fmadd_ps(load_floats::<KIND>(row, i + 16, u16::MAX), x1, sums[r][1]);
            }
            i += 32;
        }
        while i < n {
            let mask = tail_mask(n - i);
            let x = _mm512_maskz_loadu_ps(mask, x.add(i));
            for r in 0..R {
                sums[r][0] = _mm512_fmadd_ps(load_floats::<KIND>(rows.row(r), i, mask), x, sums[r][0]);
            }
            i += 16;
        }
    }
    let mut products = [0.0; R];
    for r in 0..R {
        products[r] = _mm512_reduce_add_ps(_mm512_add_ps(sums[r][0], sums[r][1]));
    }
    products
}

/// The product of a row with a column in f16; prefetches `ahead` bytes before what is read.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn dot_halves<const KIND: u8>(row: *const u8, x: &[u16], ahead: usize) -> f32 {
    let (n, x) = (x.len(), x.as_ptr().cast());
    let mut sums = [_mm512_setzero_ps(); 2];
    let whole = n / 32 * 32;
    unsafe {
        for i in (0..whole).step_by(32) {
            prefetch(row.wrapping_add(bytes_of::<KIND>(i) + ahead));
            for (k, sum) in sums.iter_mut().enumerate() {
                let (i, all) = (i + 16 * k, u16::MAX);
                *sum = _mm512_fmadd_ps(load_floats::<KIND>(row, i, all), load_floats::<F16>(x, i, all), *sum);
            }
        }
        for i in (whole..n).step_by(16) {
            let mask = tail_mask(n - i);
            sums[0] = _mm512_fmadd_ps(load_floats::<KIND>(row, i, mask), load_floats::<F16>(x, i, mask), sums[0]);
        }
    }
    _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]))
}

/// Products of one row with N columns; reads the row as [`dot_one`] does.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn dot_few<const KIND: u8, const N: usize>(row: *const u8, x: &Columns, first: usize, ahead: usize) -> [f32; N] {
    let xs: [*const f32; N] = std::array::from_fn(|b| x.values(first + b).as_ptr());
    let mut sums = [[_mm512_setzero_ps(); N]; 2];
    let mut i = 0;
    unsafe {
        while i + 32 <= x.cols {
            prefetch(row.wrapping_add(bytes_of::<KIND>(i) + ahead));
            let w = [load_floats::<KIND>(row, i, u16::MAX), load_floats::<KIND>(row, i + 16, u16::MAX)];
            for b in 0..N {
                sums[0][b] = _mm512_fmadd_ps(w[0], _mm512_loadu_ps(xs[b].add(i)), sums[0][b]);
                sums[1][b] = _mm512_fmadd_ps(w[1], _mm512_loadu_ps(xs[b].add(i + 16)), sums[1][b]);
            }
            i += 32;
        }
        while i < x.cols {
            let mask = tail_mask(x.cols - i);
            let w = load_floats::<KIND>(row, i, mask);
            for b in 0..N {
                sums[0][b] = _mm512_fmadd_ps(w, _mm512_maskz_loadu_ps(mask, xs[b].add(i)), sums[0][b]);
            }
            i += 16;
        }
    }
    for b in 0..N {
        sums[0][b] = _mm512_add_ps(sums[0][b], sums[1][b]);
    }
    reduce(&[sums[0]])[0]
}

/// The dot kernel for q8_0 rows; with FOUR for q4_0 rows.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn dot_grouped<const FOUR: bool, const FAR: bool>(
    rows: Rows,
    count: usize,
    x: &Columns,
    y: *mut f32,
    stride: usize,
) {
    if x.n == 1 {
        let ahead = if FAR { whole_rows(rows.ahead, AHEAD) } else { rows.ahead };
        let rows = Rows { ahead, ..rows };
        for r in 0..count {
            let rows = rows.from(r);
            unsafe {
                *y.add(r) = if rows.ahead == 0 {
                    grouped_tile::<FOUR, false, 1, 1>(rows, x, 0)[0][0]
                } else {
                    grouped_tile::<FOUR, true, 1, 1>(rows, x, 0)[0][0]
                };
            }
            if rows.ahead != 0 {
                prefetch_scales::<FOUR>(rows.row(0), x.cols, rows.ahead);
            }
        }
        return;
    }
    if x.n <= FEW {
        for r in 0..count {
            tiles!(x.n, [4, 3, 2, 1], |N, b| {
                unsafe {
                    let sums = grouped_tile::<FOUR, true, 1, N>(rows.from(r), x, b)[0];
                    sums.iter().enumerate().for_each(|(c, sum)| *y.add((b + c) * stride + r) = *sum);
                }
            });
        }
        return;
    }
    tiles!(count, [4, 1], |R, r| {
        tiles!(x.n, [4, 2, 1], |N, b| {
            unsafe {
                let sums = grouped_tile::<FOUR, false, R, N>(rows.from(r), x, b);
                for (k, sums) in sums.iter().enumerate() {
                    for (c, sum) in sums.iter().enumerate() {
                        *y.add((b + c) * stride + r + k) = *sum;
                    }
                }
            }
        });
    });
}

/// Products of R rows with N columns.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn grouped_tile<const FOUR: bool, const AHEAD: bool, const R: usize, const N: usize>(
    rows: Rows,
    x: &Columns,
    first: usize,
) -> [[f32; N]; R] {
    let ahead = rows.ahead;
    let bias = _mm512_set1_ps(if FOUR { -8.0 } else { -128.0 });
    let rows: [*const u8; R] = std::array::from_fn(|r| rows.row(r));
    let scales: [*const u16; R] = rows.map(|row| row.wrapping_add(if FOUR { x.cols / 2 } else { x.cols }).cast());
    let codes: [*const i8; N] = std::array::from_fn(|b| x.codes(first + b).as_ptr());
    let steps: [*const f32; N] = std::array::from_fn(|b| x.steps(first + b).as_ptr());
    let totals: [*const f32; N] = std::array::from_fn(|b| x.sums(first + b).as_ptr());
    let mut sums = [[_mm512_setzero_ps(); N]; R];
    for pack in 0..x.cols / PACK {
        let mut dots = [[_mm512_setzero_si512(); N]; R];
        unsafe {
            for k in 0..8 {
                if AHEAD && (!FOUR || k % 2 == 0) {
                    let at = if FOUR { pack * (PACK / 2) + k * 32 } else { pack * PACK + k * 64 };
                    prefetch(rows[0].wrapping_add(at + ahead));
                }
                let mut w = [_mm512_setzero_si512(); R];
                for r in 0..R {
                    w[r] = load_codes::<FOUR>(rows[r], pack, k);
                }
                for b in 0..N {
                    let input = _mm512_loadu_si512(codes[b].add(pack * PACK + k * 64).cast());
                    for r in 0..R {
                        dots[r][b] = _mm512_dpbusd_epi32(dots[r][b], w[r], input);
                    }
                }
            }
            for r in 0..R {
                let scale = _mm512_cvtph_ps(_mm256_loadu_si256(scales[r].add(pack * 16).cast()));
                for b in 0..N {
                    let step = _mm512_mul_ps(scale, _mm512_loadu_ps(steps[b].add(pack * 16)));
                    let total = _mm512_mul_ps(bias, _mm512_loadu_ps(totals[b].add(pack * 16)));
                    sums[r][b] = _mm512_fmadd_ps(scale, total, sums[r][b]);
                    sums[r][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][b]), step, sums[r][b]);
                }
            }
        }
    }
    for g in x.cols / PACK * (PACK / GROUP)..x.cols / GROUP {
        for r in 0..R {
            unsafe {
                let w = _mm512_zextsi256_si512(load_group::<FOUR>(rows[r], g));
                let scale = f16_at(scales[r].add(g));
                for b in 0..N {
                    let input = _mm512_zextsi256_si512(_mm256_loadu_si256(codes[b].add(g * GROUP).cast()));
                    let dot = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), w, input));
                    let total = _mm512_maskz_mul_ps(1, bias, _mm512_set1_ps(scale * *totals[b].add(g)));
                    let step = _mm512_set1_ps(scale * *steps[b].add(g));
                    sums[r][b] = _mm512_fmadd_ps(dot, step, _mm512_add_ps(sums[r][b], total));
                }
            }
        }
    }
    reduce(&sums)
}

/// Adds up the lanes of each register. (A closure over an array would be called, not inlined.)
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f"))]
fn reduce<const R: usize, const N: usize>(sums: &[[__m512; N]; R]) -> [[f32; N]; R] {
    let mut out = [[0.0; N]; R];
    for r in 0..R {
        for b in 0..N {
            out[r][b] = _mm512_reduce_add_ps(sums[r][b]);
        }
    }
    out
}

/// Register k of a pack as unsigned codes.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f"))]
unsafe fn load_codes<const FOUR: bool>(row: *const u8, pack: usize, k: usize) -> __m512i {
    unsafe {
        if FOUR {
            let pair = _mm512_loadu_si512(row.add(pack * (PACK / 2) + k / 2 * 64).cast());
            let codes = if k.is_multiple_of(2) { pair } else { _mm512_srli_epi32::<4>(pair) };
            _mm512_and_si512(codes, _mm512_set1_epi8(15))
        } else {
            _mm512_xor_si512(_mm512_loadu_si512(row.add(pack * PACK + k * 64).cast()), _mm512_set1_epi8(-128))
        }
    }
}

/// A plain group as unsigned codes.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512vl"))]
unsafe fn load_group<const FOUR: bool>(row: *const u8, g: usize) -> __m256i {
    unsafe {
        if FOUR {
            let bytes = _mm_loadu_si128(row.add(g * GROUP / 2).cast());
            let codes = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
            _mm256_and_si256(codes, _mm256_set1_epi8(15))
        } else {
            _mm256_xor_si256(_mm256_loadu_si256(row.add(g * GROUP).cast()), _mm256_set1_epi8(-128))
        }
    }
}

/// The kinds of floats that there are rows of.
const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// Bytes of so many floats.
#[inline(always)]
const fn bytes_of<const KIND: u8>(numbers: usize) -> usize {
    if KIND == F32 { 4 * numbers } else { 2 * numbers }
}

/// Numbers i..i+16 of a row of floats, those that `mask` names.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl"))]
unsafe fn load_floats<const KIND: u8>(row: *const u8, i: usize, mask: u16) -> __m512 {
    unsafe {
        match KIND {
            F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, row.cast::<i16>().add(i))),
            BF16 => {
                let upper = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row.cast::<i16>().add(i)));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(upper))
            }
            _ => _mm512_maskz_loadu_ps(mask, row.cast::<f32>().add(i)),
        }
    }
}

#[inline]
fn tail_mask(left: usize) -> u16 {
    if left >= 16 { u16::MAX } else { (1 << left) - 1 }
}

#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "f16c"))]
unsafe fn f16_at(at: *const u16) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(unsafe { at.read() } as i32)))
}
