//! Kernels for rows of floats: of f32, f16 or bf16, by a const parameter.

use super::{Columns, FEW, FLOATS_AHEAD, Rows, load_f16, prefetch, sum1, sum4, whole_rows};
use crate::cpu::arch::*;
use half::f16;

/// A tile of several columns works on so many numbers of each row before the next tile: the inputs of four columns then fill half of L1.
const DEPTH: usize = 1024;

/// Kinds of floats.
pub(super) const F32: u8 = 0;
pub(super) const F16: u8 = 1;
pub(super) const BF16: u8 = 2;

/// Bytes of a number.
const fn size(kind: u8) -> usize {
    if kind == F32 { 4 } else { 2 }
}

/// The dot kernel.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn dot_float<const KIND: u8>(rows: Rows, count: usize, x: &Columns, y: *mut f32, stride: usize) {
    if x.n <= FEW {
        let ahead = whole_rows(rows.ahead, FLOATS_AHEAD);
        for r in 0..count {
            let rows = Rows { ahead, ..rows.from(r) };
            // SAFETY: the caller's promises; a prefetch may name any address.
            unsafe {
                if x.n == 1 {
                    *y.add(r) = dot_one::<KIND, true>(rows.first, x.values(0).as_ptr(), x.cols, ahead);
                    continue;
                }
                tiles!(x.n, [4, 3, 2], |N, b| {
                    let sums = float_tile::<KIND, true, 1, N>(rows, x, b, (0, x.cols))[0];
                    sums.iter().enumerate().for_each(|(c, sum)| *y.add((b + c) * stride + r) = *sum);
                });
            }
        }
        return;
    }
    for start in (0..x.cols).step_by(DEPTH) {
        let range = (start, x.cols.min(start + DEPTH));
        tiles!(x.n, [4, 3, 2, 1], |N, b| {
            tiles!(count, [3, 2, 1], |R, r| {
                // SAFETY: the caller's promises.
                unsafe {
                    let sums = float_tile::<KIND, false, R, N>(rows.from(r), x, b, range);
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
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn float_tile<const KIND: u8, const AHEAD: bool, const R: usize, const N: usize>(
    rows: Rows,
    x: &Columns,
    first: usize,
    (start, end): (usize, usize),
) -> [[f32; N]; R] {
    let xs: [*const f32; N] = std::array::from_fn(|b| x.values(first + b).as_ptr());
    let size = size(KIND);
    let mut sums = [[_mm256_setzero_ps(); N]; R];
    let whole = start + (end - start) / 8 * 8;
    let mut i = start;
    // SAFETY: the caller's promises; a prefetch may name any address.
    unsafe {
        while i < whole {
            if AHEAD && (i * size).is_multiple_of(64) {
                prefetch(rows.row(0).wrapping_add(i * size + rows.ahead));
            }
            let mut w = [_mm256_setzero_ps(); R];
            for r in 0..R {
                w[r] = load_floats::<KIND>(rows.row(r), i);
            }
            for b in 0..N {
                let x = _mm256_loadu_ps(xs[b].add(i));
                for r in 0..R {
                    sums[r][b] = _mm256_fmadd_ps(w[r], x, sums[r][b]);
                }
            }
            i += 8;
        }
        let mut out = [[0f32; N]; R];
        for r in 0..R {
            for b in 0..N {
                let rest = (whole..end).map(|i| number::<KIND>(rows.row(r), i) * *xs[b].add(i));
                out[r][b] = rest.fold(sum1(sums[r][b]), |sum, product| sum + product);
            }
        }
        out
    }
}

/// Product of one row with one column, 32 numbers a turn: one cache line of f16.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn dot_one<const KIND: u8, const AHEAD: bool>(row: *const u8, x: *const f32, n: usize, ahead: usize) -> f32 {
    let mut sums = [_mm256_setzero_ps(); 4];
    let whole = n / 32 * 32;
    // SAFETY: the caller's promises; a prefetch may name any address.
    unsafe {
        for i in (0..whole).step_by(32) {
            if AHEAD {
                let at = row.wrapping_add(size(KIND) * i + ahead);
                prefetch(at);
                if KIND == F32 {
                    prefetch(at.wrapping_add(64));
                }
            }
            for k in 0..4 {
                let at = i + 8 * k;
                sums[k] = _mm256_fmadd_ps(load_floats::<KIND>(row, at), _mm256_loadu_ps(x.add(at)), sums[k]);
            }
        }
        sum4(sums) + (whole..n).map(|i| number::<KIND>(row, i) * *x.add(i)).sum::<f32>()
    }
}

axpys!(axpy_f32, add_floats, F32, FLOATS_AHEAD);
axpys!(axpy_f16, add_floats, F16, FLOATS_AHEAD);
axpys!(axpy_bf16, add_floats, BF16, FLOATS_AHEAD);

#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn add_floats<const KIND: u8, const R: usize>(
    a: [f32; R],
    rows: [*const u8; R],
    ahead: usize,
    out: *mut f32,
    n: usize,
) {
    let (whole, size) = (n / 8 * 8, size(KIND));
    // SAFETY: the caller's promises.
    unsafe {
        let mut i = 0;
        while i < n / 32 * 32 {
            if ahead != 0 {
                prefetch(rows[R - 1].wrapping_add(i * size + ahead));
                if KIND == F32 {
                    prefetch(rows[R - 1].wrapping_add(i * size + 64 + ahead));
                }
            }
            let mut sums = [_mm256_setzero_ps(); 4];
            for k in 0..4 {
                sums[k] = _mm256_loadu_ps(out.add(i + 8 * k));
            }
            for r in 0..R {
                for k in 0..4 {
                    sums[k] = _mm256_fmadd_ps(_mm256_set1_ps(a[r]), load_floats::<KIND>(rows[r], i + 8 * k), sums[k]);
                }
            }
            for k in 0..4 {
                _mm256_storeu_ps(out.add(i + 8 * k), sums[k]);
            }
            i += 32;
        }
        for i in (i..whole).step_by(8) {
            let mut sum = _mm256_loadu_ps(out.add(i));
            for r in 0..R {
                sum = _mm256_fmadd_ps(_mm256_set1_ps(a[r]), load_floats::<KIND>(rows[r], i), sum);
            }
            _mm256_storeu_ps(out.add(i), sum);
        }
        for i in whole..n {
            for r in 0..R {
                *out.add(i) += a[r] * number::<KIND>(rows[r], i);
            }
        }
    }
}

/// Numbers i..i+8 of a row.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,f16c"))]
unsafe fn load_floats<const KIND: u8>(row: *const u8, i: usize) -> __m256 {
    // SAFETY: the caller's promises.
    unsafe {
        match KIND {
            F32 => _mm256_loadu_ps(row.cast::<f32>().add(i)),
            F16 => load_f16(row.cast::<u16>().add(i)),
            _ => {
                let tops = _mm256_cvtepu16_epi32(_mm_loadu_si128(row.cast::<u16>().add(i).cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(tops))
            }
        }
    }
}

/// Number i of a row.
#[inline]
unsafe fn number<const KIND: u8>(row: *const u8, i: usize) -> f32 {
    // SAFETY: the caller's promises.
    unsafe {
        match KIND {
            F32 => row.cast::<f32>().add(i).read_unaligned(),
            F16 => f16::from_bits(row.cast::<u16>().add(i).read_unaligned()).to_f32(),
            _ => f32::from_bits(u32::from(row.cast::<u16>().add(i).read_unaligned()) << 16),
        }
    }
}
