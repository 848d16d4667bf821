//! Kernels for our own quantised types.
//!
//! Without VNNI, byte products go through `maddubs`, whose 16-bit sums would overflow for full-range unsigned weights.
//! q8_0 therefore multiplies |w| by x carrying w's sign (both within 127); q4_0 codes are at most 15, so they stay
//! unsigned, the products of a whole pack fit 16 bits, and eight times the input sum is taken out at the end.

use super::{Columns, FEW, GROUPED_AHEAD, Rows, f16_at, load_f16, prefetch, sum1, whole_rows};
use crate::cpu::arch::*;
use crate::formats::rows::{GROUP, PACK};

/// Pointers to the codes, steps and sums of a column.
type Input = (*const i8, *const f32, *const f32);

fn inputs<const N: usize>(x: &Columns, first: usize) -> [Input; N] {
    std::array::from_fn(|b| (x.codes(first + b).as_ptr(), x.steps(first + b).as_ptr(), x.sums(first + b).as_ptr()))
}

/// The dot kernel for q8_0 rows; with FOUR for q4_0 rows.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn dot_grouped<const FOUR: bool>(rows: Rows, count: usize, x: &Columns, y: *mut f32, stride: usize) {
    if x.n <= FEW {
        let rows = Rows { ahead: whole_rows(rows.ahead, GROUPED_AHEAD), ..rows };
        // One tile, whatever n is: rows are read from memory once.
        tiles!(x.n, [4, 3, 2, 1], |N, b| {
            // SAFETY: the caller's promises.
            unsafe { grouped_rows::<FOUR, N>(rows, count, x.cols, inputs(x, b), y.add(b * stride), stride) };
        });
        return;
    }
    tiles!(x.n, [4, 2, 1], |N, b| {
        tiles!(count, [2, 1], |R, r| {
            // SAFETY: the caller's promises.
            unsafe {
                let sums = grouped_tile::<FOUR, false, R, N>(rows.from(r), x.cols, inputs(x, b));
                for (k, sums) in sums.iter().enumerate() {
                    for (c, sum) in sums.iter().enumerate() {
                        *y.add((b + c) * stride + r + k) = *sum;
                    }
                }
            }
        });
    });
}

/// Rows one after the other. A function of its own, because so short a loop is slower inside of a long function: a predictor's rows of
/// q8_0 took 1.02 ms a token there and take 0.68 here (runs/2026-11-22-avx2-sparse).
#[inline(never)]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn grouped_rows<const FOUR: bool, const N: usize>(
    rows: Rows,
    count: usize,
    cols: usize,
    inputs: [Input; N],
    y: *mut f32,
    stride: usize,
) {
    for r in 0..count {
        // SAFETY: the caller's promises.
        unsafe {
            let sums = grouped_tile::<FOUR, true, 1, N>(rows.from(r), cols, inputs)[0];
            sums.iter().enumerate().for_each(|(c, sum)| *y.add(c * stride + r) = *sum);
        }
    }
}

/// Products of R rows with N columns.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn grouped_tile<const FOUR: bool, const AHEAD: bool, const R: usize, const N: usize>(
    rows: Rows,
    cols: usize,
    inputs: [Input; N],
) -> [[f32; N]; R] {
    let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let number_bytes = if FOUR { cols / 2 } else { cols };
    let scales: [*const u16; R] = std::array::from_fn(|r| rows.row(r).wrapping_add(number_bytes).cast());
    let mut sums = [[_mm256_setzero_ps(); N]; R];
    // For q4_0: scale times the sum of the inputs, of which the products hold eight times too much.
    let mut bias = [[_mm256_setzero_ps(); N]; R];
    // SAFETY: the caller's promises; a prefetch may name any address.
    unsafe {
        for pack in 0..cols / PACK {
            // Lanes are groups: eight of the sixteen at a time.
            for part in 0..2 {
                let mut dots = [[_mm256_setzero_si256(); N]; R];
                // Pairs of registers of codes: of q4_0 both are in one register of the row.
                for pair in 0..4 {
                    if FOUR {
                        let at = pack * (PACK / 2) + pair * 64 + part * 32;
                        if AHEAD && part == 0 {
                            prefetch(rows.row(0).wrapping_add(at + rows.ahead));
                        }
                        let mut codes = [[_mm256_setzero_si256(); 2]; R];
                        for r in 0..R {
                            let w = _mm256_loadu_si256(rows.row(r).add(at).cast());
                            codes[r] = [_mm256_and_si256(w, low), _mm256_and_si256(_mm256_srli_epi16::<4>(w), low)];
                        }
                        for half in 0..2 {
                            for b in 0..N {
                                let at = pack * PACK + pair * 128 + half * 64 + part * 32;
                                let v = _mm256_loadu_si256(inputs[b].0.add(at).cast());
                                for r in 0..R {
                                    // Eight sums of two products of at most 15 * 127 stay within 16 bits.
                                    dots[r][b] = _mm256_add_epi16(dots[r][b], _mm256_maddubs_epi16(codes[r][half], v));
                                }
                            }
                        }
                    } else {
                        for k in [2 * pair, 2 * pair + 1] {
                            let at = pack * PACK + k * 64 + part * 32;
                            if AHEAD && part == 0 {
                                prefetch(rows.row(0).wrapping_add(at + rows.ahead));
                            }
                            for r in 0..R {
                                let w = _mm256_loadu_si256(rows.row(r).add(at).cast());
                                let size = _mm256_abs_epi8(w);
                                for b in 0..N {
                                    let v = _mm256_loadu_si256(inputs[b].0.add(at).cast());
                                    let pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(v, w));
                                    dots[r][b] = _mm256_add_epi32(dots[r][b], _mm256_madd_epi16(pairs, ones));
                                }
                            }
                        }
                    }
                }
                let groups = pack * 16 + part * 8;
                for r in 0..R {
                    let scale = load_f16(scales[r].add(groups));
                    for b in 0..N {
                        let (_, steps, totals) = inputs[b];
                        let dot = if FOUR { _mm256_madd_epi16(dots[r][b], ones) } else { dots[r][b] };
                        let step = _mm256_mul_ps(scale, _mm256_loadu_ps(steps.add(groups)));
                        sums[r][b] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), step, sums[r][b]);
                        if FOUR {
                            bias[r][b] = _mm256_fmadd_ps(scale, _mm256_loadu_ps(totals.add(groups)), bias[r][b]);
                        }
                    }
                }
            }
        }
        if AHEAD {
            prefetch_scales(scales[0].cast(), cols, rows.ahead);
        }
        let (sums, rest) = last_groups::<FOUR, R, N>(rows, cols, inputs, sums);
        let mut out = [[0f32; N]; R];
        for r in 0..R {
            for b in 0..N {
                let less = _mm256_fnmadd_ps(_mm256_set1_ps(8.0), bias[r][b], sums[r][b]);
                out[r][b] = sum1(if FOUR { less } else { sums[r][b] }) - 8.0 * rest[r][b];
            }
        }
        out
    }
}

/// Adds the products of the groups behind the last whole pack to `sums`; for q4_0 also returns scales times sums of inputs. Takes and
/// returns them by value, so that [`grouped_tile`] keeps its sums in registers.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn last_groups<const FOUR: bool, const R: usize, const N: usize>(
    rows: Rows,
    cols: usize,
    inputs: [Input; N],
    mut sums: [[__m256; N]; R],
) -> ([[__m256; N]; R], [[f32; N]; R]) {
    let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let number_bytes = if FOUR { cols / 2 } else { cols };
    let mut rest = [[0f32; N]; R];
    for r in 0..R {
        let scales: *const u16 = rows.row(r).wrapping_add(number_bytes).cast();
        for b in 0..N {
            let (codes, steps, totals) = inputs[b];
            for g in cols / PACK * (PACK / GROUP)..cols / GROUP {
                // SAFETY: the caller's promises.
                unsafe {
                    let (v, scale) = (_mm256_loadu_si256(codes.add(g * GROUP).cast()), f16_at(scales.add(g)));
                    let pairs = if FOUR {
                        let bytes = _mm_loadu_si128(rows.row(r).add(g * GROUP / 2).cast());
                        let w = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes), low);
                        rest[r][b] += scale * *totals.add(g);
                        _mm256_maddubs_epi16(w, v)
                    } else {
                        let w = _mm256_loadu_si256(rows.row(r).add(g * GROUP).cast());
                        _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(v, w))
                    };
                    let (dot, step) = (_mm256_madd_epi16(pairs, ones), _mm256_set1_ps(scale * *steps.add(g)));
                    sums[r][b] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), step, sums[r][b]);
                }
            }
        }
    }
    (sums, rest)
}

/// Prefetches the scales of a row, which lie behind its codes, after the codes: the hardware's prefetcher follows rising addresses.
/// (Prefetched first, they cost more than they gained.)
#[inline]
fn prefetch_scales(scales: *const u8, cols: usize, ahead: usize) {
    (0..cols / GROUP * 2).step_by(64).for_each(|line| prefetch(scales.wrapping_add(line + ahead)));
}

axpys!(axpy_q8, add_grouped, false, GROUPED_AHEAD);
axpys!(axpy_q4, add_grouped, true, GROUPED_AHEAD);

/// out += sum of a[r] * row r, in the order of `rows::axpy_place`.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn add_grouped<const FOUR: bool, const R: usize>(
    a: [f32; R],
    rows: [*const u8; R],
    ahead: usize,
    out: *mut f32,
    cols: usize,
) {
    // A code becomes a number at the top of its lane, where it has its sign (of q4_0 once the top bit is turned over: codes less
    // eight). As a whole number it is too large by a power of two, which the coefficient makes up for without rounding: so the sum
    // has the same bits however many rows are added together.
    let at_scales = if FOUR { cols / 2 } else { cols };
    let bits = if FOUR { 4 } else { 8 };
    let top = _mm256_set1_epi32(-1 << (32 - bits));
    let share = _mm256_set1_ps(1.0 / (1u32 << (32 - bits)) as f32);
    // SAFETY: the caller's promises.
    unsafe {
        for pack in 0..cols / PACK {
            for part in 0..2 {
                let mut c = [_mm256_setzero_ps(); R];
                for r in 0..R {
                    let scales = rows[r].add(at_scales).cast::<u16>().add(pack * 16 + part * 8);
                    c[r] = _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(a[r]), load_f16(scales)), share);
                }
                let out = out.add(pack * PACK + part * 8);
                for k in 0..if FOUR { 4 } else { 8 } {
                    let at = if FOUR { pack * (PACK / 2) } else { pack * PACK } + k * 64 + part * 32;
                    if ahead != 0 && part == 0 {
                        prefetch(rows[R - 1].wrapping_add(at + ahead));
                    }
                    let mut v = [_mm256_setzero_si256(); R];
                    for r in 0..R {
                        v[r] = _mm256_loadu_si256(rows[r].add(at).cast());
                        if FOUR {
                            v[r] = _mm256_xor_si256(v[r], _mm256_set1_epi8(-0x78));
                        }
                    }
                    // Codes of a lane, from its lowest bits: of q4_0 those of two registers take turns.
                    for i in 0..32 / bits {
                        let place = if FOUR { k * 8 + i % 2 * 4 + i / 2 } else { k * 4 + i };
                        let below_top = _mm_cvtsi32_si128((32 - bits - i * bits) as i32);
                        let to = out.add(place * 16);
                        let mut sum = _mm256_loadu_ps(to);
                        for r in 0..R {
                            let code = _mm256_and_si256(_mm256_sll_epi32(v[r], below_top), top);
                            sum = _mm256_fmadd_ps(c[r], _mm256_cvtepi32_ps(code), sum);
                        }
                        _mm256_storeu_ps(to, sum);
                    }
                }
            }
        }
    }
    if ahead != 0 {
        prefetch_scales(rows[R - 1].wrapping_add(at_scales), cols, ahead);
    }
    let (low, eight) = (_mm256_set1_epi32(15), _mm256_set1_epi32(8));
    for g in cols / PACK * (PACK / GROUP)..cols / GROUP {
        for r in 0..R {
            // SAFETY: the caller's promises.
            unsafe {
                let row = rows[r];
                let c = _mm256_set1_ps(a[r] * f16_at(row.add(at_scales).cast::<u16>().add(g)));
                for k in 0..4 {
                    let codes = if FOUR {
                        let bytes = _mm_loadl_epi64(row.add(g * GROUP / 2 + k % 2 * 8).cast());
                        let codes = _mm256_cvtepu8_epi32(bytes);
                        let codes = if k < 2 { _mm256_and_si256(codes, low) } else { _mm256_srli_epi32::<4>(codes) };
                        _mm256_sub_epi32(codes, eight)
                    } else {
                        _mm256_cvtepi8_epi32(_mm_loadl_epi64(row.add(g * GROUP + k * 8).cast()))
                    };
                    let to = out.add(g * GROUP + k * 8);
                    _mm256_storeu_ps(to, _mm256_fmadd_ps(c, _mm256_cvtepi32_ps(codes), _mm256_loadu_ps(to)));
                }
            }
        }
    }
}
