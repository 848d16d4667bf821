//! Kernels for GGUF's blocks as they lie in the file; each type has a file.
//!
//! All work on spans of 256 numbers: one long block or eight short ones. A type says how a span's codes come into registers, 32 at a time in
//! their own order, and its scales and minima in f32: a number is its scale times its code, plus its minimum. The rest is here. Minima
//! are multiplied by the sums of the inputs by 16.
//!
//! For few columns codes go from registers into the products. For more columns and for axpys, spans are first unpacked into L1
//! ([`source::Span`]), once for all columns, and all types share the loops that follow.

#[macro_use]
mod source;
mod axpy;
mod iq4_nl;
mod iq4_xs;
mod k_scales;
mod many;
mod mxfp4;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod short;

use super::floats::{self, axpy_bf16, dot_float};
use super::{FEW, prefetch, sum1, whole_rows};
use crate::cpu::columns::{BLOCK, BLOCK_GROUP};
use crate::cpu::{Axpy, Columns, Dot, Rows, portable};
use crate::formats::blocks::{self, Block, BlockType};
use axpy::axpy;
use source::{SLOTS, Source, added, in_memory};
use std::arch::x86_64::*;

/// Dots and axpys by type. A type that is not named here has those of plain Rust.
macro_rules! kernels {
    ($($name:ident),*) => {
        /// The dots of all block types.
        pub(super) const DOTS: [Dot; BlockType::COUNT] = {
            let mut all = portable::BLOCK_DOTS;
            all[BlockType::BF16 as usize] = dot_float::<{ floats::BF16 }>;
            $(all[BlockType::$name as usize] = dot::<blocks::$name>;)*
            all
        };
        /// The axpys of all block types.
        pub(super) const AXPYS: [Axpy; BlockType::COUNT] = {
            let mut all = portable::BLOCK_AXPYS;
            all[BlockType::BF16 as usize] = axpy_bf16;
            $(all[BlockType::$name as usize] = axpy::<blocks::$name>;)*
            all
        };
    };
}
kernels!(Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4);

/// How many bytes ahead rows are prefetched where the caller leaves it to the kernel.
const BLOCKS_AHEAD: usize = 2048;

/// Pointers to the codes, steps and sums of a column.
type Input = (*const i8, *const f32, *const f32);

/// The inputs of N columns from span `span` on.
fn inputs<const N: usize>(x: &Columns, first: usize, span: usize) -> [Input; N] {
    let (at, group) = (span * BLOCK, span * (BLOCK / BLOCK_GROUP));
    std::array::from_fn(|i| {
        let b = first + i;
        (x.block_codes(b)[at..].as_ptr(), x.block_steps(b)[group..].as_ptr(), x.block_sums(b)[group..].as_ptr())
    })
}

/// The dot kernel.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot<T: Source + Block>(rows: Rows, count: usize, x: &Columns, y: *mut f32, stride: usize) {
    if x.n <= FEW {
        let rows = Rows { ahead: whole_rows(rows.ahead, BLOCKS_AHEAD), ..rows };
        // One tile, whatever n is: rows are read from memory once.
        tiles!(x.n, [4, 3, 2, 1], |N, b| {
            // SAFETY: the caller's promises.
            unsafe { few::<T, N>(rows, count, x, b, y.add(b * stride), stride) };
        });
        return;
    }
    // SAFETY: the caller's promises.
    unsafe { many::dot_many::<T>(rows, count, x, y, stride) };
}

/// Rows one after the other times N columns. A function of its own, because so short a loop is slower inside of a long function.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn few<T: Source + Block, const N: usize>(
    rows: Rows,
    count: usize,
    x: &Columns,
    first: usize,
    y: *mut f32,
    stride: usize,
) {
    let (spans, inputs_) = (x.cols / BLOCK, inputs::<N>(x, first, 0));
    for r in 0..count {
        // SAFETY: the caller's promises.
        unsafe {
            let sums = tile::<T, true, 1, N>([rows.row(r)], spans, rows.ahead, inputs_)[0];
            sums.iter().enumerate().for_each(|(b, sum)| *y.add(b * stride + r) = *sum);
            if !x.cols.is_multiple_of(BLOCK) {
                let block = rest::<T>(rows.row(r), x.cols);
                let sums = tile::<T, false, 1, N>([block.as_ptr()], 1, 0, inputs(x, first, spans))[0];
                sums.iter().enumerate().for_each(|(b, sum)| *y.add(b * stride + r) += *sum);
            }
        }
    }
}

/// Bytes of the longest span: of Q8_0.
const LONGEST: usize = 272;

/// The blocks behind the last whole span of a row, and zeros to the end of the span: nothing behind the row is read.
#[inline]
unsafe fn rest<T: Block>(row: *const u8, cols: usize) -> [u8; LONGEST] {
    let mut span = [0; LONGEST];
    let (start, bytes) = (cols / BLOCK * (BLOCK / T::NUMBERS) * T::BYTES, cols % BLOCK / T::NUMBERS * T::BYTES);
    // SAFETY: the caller of a kernel promises that many bytes.
    span[..bytes].copy_from_slice(unsafe { std::slice::from_raw_parts(row.add(start), bytes) });
    span
}

/// Products of so many spans of R rows with N columns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<S: Source, const AHEAD: bool, const R: usize, const N: usize>(
    rows: [*const u8; R],
    spans: usize,
    ahead: usize,
    inputs: [Input; N],
) -> [[f32; N]; R] {
    let ones = _mm256_set1_epi16(1);
    // Lanes of two groups by turns, each register of which holds two of them twice.
    let by_16 = [_mm256_setr_epi32(0, 2, 0, 2, 1, 3, 1, 3), _mm256_setr_epi32(4, 6, 4, 6, 5, 7, 5, 7)];
    // One sum would wait for itself; of a larger tile each waits for the others anyway.
    let mut sums = [[[_mm256_setzero_ps(); 2]; N]; R];
    // SAFETY: the caller's promises; a prefetch may name any address.
    unsafe {
        for span in 0..spans {
            let mut factors = [[Products { slots: [0.0; 8], halves: [_mm256_setzero_ps(); 2] }; N]; R];
            for r in 0..R {
                let of_row = S::factors(rows[r].add(span * S::BYTES));
                let added = added::<S>(of_row).map(|[low, high]| match S::HALVES {
                    true => [low, high],
                    false => [_mm256_unpacklo_ps(low, low), _mm256_unpackhi_ps(low, low)],
                });
                for b in 0..N {
                    let [low, high] = [0, 8].map(|i| _mm256_loadu_ps(inputs[b].1.add(span * 16 + i)));
                    if S::HALVES {
                        let [a, b_] = of_row.scales;
                        factors[r][b].halves = [_mm256_mul_ps(a, low), _mm256_mul_ps(b_, high)];
                    } else {
                        let steps = _mm256_shuffle_ps::<0b10_00_10_00>(low, high);
                        _mm256_storeu_ps(factors[r][b].slots.as_mut_ptr(), _mm256_mul_ps(of_row.scales[0], steps));
                    }
                    if let Some(mins) = added {
                        for i in 0..2 {
                            let inputs = _mm256_loadu_ps(inputs[b].2.add(span * 16 + 8 * i));
                            let to = if R * N == 1 { i } else { 0 };
                            sums[r][b][to] = _mm256_fmadd_ps(mins[i], inputs, sums[r][b][to]);
                        }
                    }
                }
            }
            if !S::HALVES && R == 1 {
                in_memory(&mut factors);
            }
            each_32!(|K| {
                if AHEAD && K * 64 < S::BYTES {
                    prefetch(rows[0].wrapping_add(span * S::BYTES + K * 64 + ahead));
                }
                if K.is_multiple_of(2) {
                    for r in 0..R {
                        let at = rows[r].add(span * S::BYTES);
                        let codes = [S::codes(at, K), S::codes(at, K + 1)];
                        for b in 0..N {
                            let at = inputs[b].0.add(span * BLOCK + K * 32);
                            let v = [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())];
                            let f = &factors[r][b];
                            if S::SIGNED {
                                for i in 0..2 {
                                    let pairs = _mm256_maddubs_epi16(
                                        _mm256_abs_epi8(codes[i]),
                                        _mm256_sign_epi8(v[i], codes[i]),
                                    );
                                    let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
                                    let factor = _mm256_broadcast_ss(&f.slots[SLOTS[K + i]]);
                                    let to = if R * N == 1 { i } else { 0 };
                                    sums[r][b][to] = _mm256_fmadd_ps(dot, factor, sums[r][b][to]);
                                }
                            } else {
                                let pairs = [0, 1].map(|i| _mm256_maddubs_epi16(codes[i], v[i]));
                                let low = _mm256_unpacklo_epi32(pairs[0], pairs[1]);
                                let high = _mm256_unpackhi_epi32(pairs[0], pairs[1]);
                                let dot = _mm256_madd_epi16(_mm256_add_epi16(low, high), ones);
                                let factor = if S::HALVES {
                                    _mm256_permutevar8x32_ps(f.halves[K / 4], by_16[K / 2 % 2])
                                } else {
                                    let pair = f.slots.as_ptr().add(SLOTS[K]).cast::<f64>();
                                    _mm256_castpd_ps(_mm256_set1_pd(pair.read_unaligned()))
                                };
                                let to = if R * N == 1 { K / 2 % 2 } else { 0 };
                                sums[r][b][to] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), factor, sums[r][b][to]);
                            }
                        }
                    }
                }
            });
        }
    }
    let mut out = [[0f32; N]; R];
    for r in 0..R {
        for b in 0..N {
            out[r][b] = sum1(_mm256_add_ps(sums[r][b][0], sums[r][b][1]));
        }
    }
    out
}

/// A span's scales times an input's steps: of groups of 32 in memory, in the order of [`SLOTS`]; of groups of 16 in registers.
#[derive(Clone, Copy)]
struct Products {
    slots: [f32; 8],
    halves: [__m256; 2],
}
