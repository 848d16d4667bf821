//! A strip's panel, and its product with a panel of columns.

use super::{HIGH, LANES, WIDTH};
use crate::cpu::arch::*;
#[cfg(doc)]
use crate::cpu::gemm::{DEPTH, MAGIC};
use crate::cpu::gemm::{GROUPS, HALVES, MINS, Out, WIDE, words};
use crate::formats::rows::GROUP;
use std::ops::Range;

/// How codes are multiplied, which decides how they lie in a panel. Four at a time by AVX-VNNI, with sums of 32 bits.
pub const FOURS: u8 = 0;
/// Two at a time, with sums of 16 bits.
pub const PAIRS: u8 = 1;
/// As numbers of 16 bits, two at a time, with sums of 32 bits: for codes of eight bits, two products of which do not fit in 16.
pub const NUMBERS: u8 = 2;
/// Codes of eight bits two at a time with inputs of seven, with sums of two such pairs in 16 bits.
pub const SEVENS: u8 = 3;

/// As [`SEVENS`], beginnings of sums in a group: one for each two fours.
pub const SEVENS_STARTS: usize = GROUP / 8;

/// A kind beside those that all instruction sets share: sums of a whole group do not fit in 16 bits, those of its halves do.
pub const SPLIT: u8 = 8;

/// Codes of each of 32 rows: up to [`DEPTH`], and as [`NUMBERS`] or [`SEVENS`] half as many. A lane is a row. Where groups of 32 have one scale the second
/// of their halves is not used.
#[repr(C, align(64))]
pub struct Panel {
    /// By group and within it, four signed codes of each row. As [`NUMBERS`] a group takes the place of two, each register of it that of two:
    /// numbers 4 k and 4 k + 2 of each row, then 4 k + 1 and 4 k + 3. As [`SEVENS`] it takes the place of two as well: register k of the second is
    /// what the sums of fours 2 k and 2 k + 1 begin with, less 64 times their codes in 16 bits.
    pub codes: [[[__m256i; HIGH]; GROUP / 4]; GROUPS],
    /// By half and group, what becomes of its products.
    pub scaling: [[Scaling; GROUPS]; 2],
}

/// What becomes of the products of a group, or of half of it, with 32 rows. All of it lies together: in arrays of 4 KiB for each field the
/// fields of a group had their places in L1 in common with each other and with codes.
#[repr(C, align(64))]
pub struct Scaling {
    /// What their sum begins with: less 128 times the sum of the codes. As [`PAIRS`] that is two sums in 16 bits, and as [`FOURS`] it has the bits
    /// of [`MAGIC`] besides, but for kinds that are [`WIDE`].
    pub start: [__m256i; HIGH],
    /// What the sum is multiplied by.
    pub scale: [__m256; HIGH],
    /// What is added for each number of the column.
    pub added: [__m256; HIGH],
    /// As [`FOURS`], the scales times [`MAGIC`].
    pub magic: [__m256; HIGH],
}

/// Sums of a strip and a panel of columns, between two pieces of the rows.
pub type Sums = [[__m256; WIDTH]; HIGH];

/// Products of a strip, `groups` groups of 32 of its rows, with a panel of columns, whose words begin at the pointer.
pub type Tile = unsafe fn(&Panel, usize, *const f32, Out<Sums>);

/// The tile of a kind for codes in a form.
pub const fn tile(form: u8, kind: u8) -> Tile {
    const BOTH: u8 = HALVES | MINS;
    const SPLIT_MINS: u8 = SPLIT | MINS;
    match (form, kind) {
        (FOURS, 0) => by_fours::<0>,
        (FOURS, HALVES) => by_fours::<HALVES>,
        (FOURS, MINS | SPLIT_MINS) => by_fours::<MINS>,
        (FOURS, WIDE) => by_fours::<WIDE>,
        (FOURS, BOTH) => by_fours::<BOTH>,
        (PAIRS, 0 | WIDE) => by_two::<PAIRS, 0>,
        (PAIRS, MINS) => by_two::<PAIRS, MINS>,
        (PAIRS, SPLIT_MINS) => by_two::<PAIRS, SPLIT_MINS>,
        (PAIRS, HALVES) => by_two::<PAIRS, HALVES>,
        (PAIRS, BOTH) => by_two::<PAIRS, BOTH>,
        (NUMBERS, 0) => by_two::<NUMBERS, 0>,
        (SEVENS, 0) => by_two::<SEVENS, 0>,
        _ => panic!("no type is of this kind"),
    }
}

/// Adds in the order in which the calls stand. The compiler would add up products first, and keep them in memory for that.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
pub fn in_order(#[cfg_attr(emulated, allow(unused_mut))] mut sum: __m256i) -> __m256i {
    // SAFETY: no instruction at all.
    #[cfg(not(emulated))]
    unsafe {
        std::arch::asm!("/* {} */", inout(ymm_reg) sum, options(nomem, nostack, preserves_flags))
    };
    sum
}

/// Without AVX-VNNI, column by column with four registers of rows. As [`PAIRS`] products are added in 16 bits, where sums wrap around: only the
/// last has to fit, which is 16 products (of half a group 8) of codes up to 127 of the column with codes up to 16 (32). Two products before,
/// of raised codes up to 255, fit for codes up to 64.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn by_two<const FORM: u8, const KIND: u8>(w: &Panel, groups: usize, x: *const f32, out: Out<Sums>) {
    let parts = if KIND & (HALVES | SPLIT) != 0 { 2 } else { 1 };
    for c in 0..out.columns {
        let mut sums = [_mm256_setzero_ps(); HIGH];
        for r in 0..HIGH {
            if !out.is_first {
                // SAFETY: the caller promises the sums of the piece before.
                sums[r] = unsafe { (*out.sums)[r][c] };
            }
        }
        for g in 0..groups {
            // SAFETY: the caller promises `groups` groups of either.
            unsafe {
                let x = x.add(g * words(WIDTH) + c);
                let step = _mm256_broadcast_ss(&*x.add(8 * WIDTH));
                let mut before = [_mm256_setzero_si256(); HIGH];
                for part in 0..parts {
                    let range = part * 8 / parts..(part + 1) * 8 / parts;
                    let dots = match FORM {
                        SEVENS => products_of_sevens(w, g, x.cast()),
                        _ => products::<FORM>(w, g, x.cast(), range, w.scaling[part][g].start),
                    };
                    if KIND & SPLIT != 0 && part == 0 {
                        before = dots;
                        continue;
                    }
                    let half = if KIND & HALVES != 0 { part } else { 0 };
                    let scaling = &w.scaling[half][g];
                    for r in 0..HIGH {
                        let dot = if KIND & SPLIT != 0 { _mm256_add_epi32(before[r], dots[r]) } else { dots[r] };
                        let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), scaling.scale[r]);
                        sums[r] = _mm256_fmadd_ps(scaled, step, sums[r]);
                        if KIND & MINS != 0 {
                            // All of a group, or the first or second half of it.
                            let which = if KIND & HALVES != 0 { 10 + part } else { 9 };
                            let total = _mm256_broadcast_ss(&*x.add(which * WIDTH));
                            sums[r] = _mm256_fmadd_ps(scaling.added[r], total, sums[r]);
                        }
                    }
                }
            }
        }
        for r in 0..HIGH {
            // SAFETY: the caller promises the output.
            unsafe { finish(sums[r], r, c, &out) };
        }
    }
}

/// `start` plus the products of the fours `range` of group `g` with a column, whose fours lie [`WIDTH`] words apart.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn products<const FORM: u8>(
    w: &Panel,
    g: usize,
    x: *const i32,
    range: Range<usize>,
    start: [__m256i; HIGH],
) -> [__m256i; HIGH] {
    let mut sums = start;
    for k in range {
        // SAFETY: the caller promises the group.
        let four = _mm256_set1_epi32(unsafe { *x.add(k * WIDTH) });
        if FORM == PAIRS {
            for r in 0..HIGH {
                let pair = _mm256_maddubs_epi16(four, w.codes[g][k][r]);
                sums[r] = in_order(_mm256_add_epi16(sums[r], pair));
            }
        } else {
            let numbers = [_mm256_and_si256(four, _mm256_set1_epi16(255)), _mm256_srli_epi16::<8>(four)];
            for i in 0..2 {
                for r in 0..HIGH {
                    let pair = _mm256_madd_epi16(numbers[i], w.codes[2 * g + k / 4][2 * (k % 4) + i][r]);
                    sums[r] = in_order(_mm256_add_epi32(sums[r], pair));
                }
            }
        }
    }
    if FORM == PAIRS {
        for r in 0..HIGH {
            sums[r] = _mm256_madd_epi16(sums[r], _mm256_set1_epi16(1));
        }
    }
    sums
}

/// The products of group `g` as [`SEVENS`] with a column, as [`products`]. Raised codes of 1 to 127 times codes of eight bits: two products fit
/// into 16 bits. Four need not, but sums wrap around, and less what raised inputs add they are at most 4 * 63 * 128, which fits.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn products_of_sevens(w: &Panel, g: usize, x: *const i32) -> [__m256i; HIGH] {
    let (codes, starts) = (&w.codes[2 * g], &w.codes[2 * g + 1]);
    let mut sums = [_mm256_setzero_si256(); HIGH];
    for k in 0..SEVENS_STARTS {
        // SAFETY: the caller promises the group.
        let fours = [2 * k, 2 * k + 1].map(|k| _mm256_set1_epi32(unsafe { *x.add(k * WIDTH) }));
        for r in 0..HIGH {
            let pairs = [0, 1].map(|i| _mm256_maddubs_epi16(fours[i], codes[2 * k + i][r]));
            let sum = in_order(_mm256_add_epi16(pairs[0], starts[k][r]));
            let sum = _mm256_madd_epi16(_mm256_add_epi16(sum, pairs[1]), _mm256_set1_epi16(1));
            sums[r] = if k == 0 { sum } else { in_order(_mm256_add_epi32(sums[r], sum)) };
        }
    }
    sums
}

/// By AVX-VNNI, two registers of rows by three columns at a time.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c,avxvnni"))]
unsafe fn by_fours<const KIND: u8>(w: &Panel, groups: usize, x: *const f32, out: Out<Sums>) {
    let high = out.rows.div_ceil(LANES);
    for first in (0..out.columns).step_by(THREE) {
        for i in (0..high).step_by(2) {
            // SAFETY: the caller's promises; panels of columns are filled up.
            unsafe {
                if i + 1 < high {
                    three_by_fours::<KIND, 2>(w, i, groups, x, first, &out);
                } else {
                    three_by_fours::<KIND, 1>(w, i, groups, x, first, &out);
                }
            }
        }
    }
}

/// Columns that AVX-VNNI takes at a time.
const THREE: usize = 3;

/// R registers of rows from `i` on by three columns from `first` on. One register loads more than two for what it multiplies, and three or
/// six columns with it take 1.1 to 1.4 times as long.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c,avxvnni"))]
unsafe fn three_by_fours<const KIND: u8, const R: usize>(
    w: &Panel,
    i: usize,
    groups: usize,
    x: *const f32,
    first: usize,
    out: &Out<Sums>,
) {
    let mut sums = [[_mm256_setzero_ps(); THREE]; R];
    for r in 0..R {
        for c in 0..THREE {
            if !out.is_first {
                // SAFETY: the caller promises the sums of the piece before.
                sums[r][c] = unsafe { (*out.sums)[i + r][first + c] };
            }
        }
    }
    let parts = if KIND & HALVES != 0 { 2 } else { 1 };
    for g in 0..groups {
        for part in 0..parts {
            // SAFETY: the caller promises `groups` groups of either.
            unsafe {
                let x = x.add(g * words(WIDTH) + first);
                let scaling = &w.scaling[part][g];
                let mut dots = [[_mm256_setzero_si256(); THREE]; R];
                for r in 0..R {
                    dots[r] = [scaling.start[i + r]; THREE];
                }
                for k in part * 8 / parts..(part + 1) * 8 / parts {
                    for c in 0..THREE {
                        let four = _mm256_set1_epi32(*x.cast::<i32>().add(k * WIDTH + c));
                        for r in 0..R {
                            let sum = _mm256_dpbusd_avx_epi32(dots[r][c], four, w.codes[g][k][i + r]);
                            dots[r][c] = in_order(sum);
                        }
                    }
                }
                for r in 0..R {
                    let scale = scaling.scale[i + r];
                    for c in 0..THREE {
                        let scaled = if KIND & WIDE != 0 {
                            _mm256_mul_ps(_mm256_cvtepi32_ps(dots[r][c]), scale)
                        } else {
                            _mm256_fmsub_ps(_mm256_castsi256_ps(dots[r][c]), scale, scaling.magic[i + r])
                        };
                        let step = _mm256_broadcast_ss(&*x.add(8 * WIDTH + c));
                        sums[r][c] = _mm256_fmadd_ps(scaled, step, sums[r][c]);
                        if KIND & MINS != 0 {
                            let which = if parts == 1 { 9 } else { 10 + part };
                            let total = _mm256_broadcast_ss(&*x.add(which * WIDTH + c));
                            sums[r][c] = _mm256_fmadd_ps(scaling.added[i + r], total, sums[r][c]);
                        }
                    }
                }
            }
        }
    }
    for r in 0..R {
        for c in 0..THREE {
            // SAFETY: the caller promises the output.
            unsafe { finish(sums[r][c], i + r, first + c, out) };
        }
    }
}

/// Keeps the sum of register `i` of rows and column `c` for the next piece, or writes it.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn finish(sum: __m256, i: usize, c: usize, out: &Out<Sums>) {
    // SAFETY: the caller promises these rows and columns of the output.
    unsafe {
        if !out.is_last {
            (*out.sums)[i][c] = sum;
            return;
        }
        let rows = out.rows.saturating_sub(i * LANES).min(LANES);
        if c >= out.columns || rows == 0 {
            return;
        }
        let y = out.y.add(c * out.stride + i * LANES);
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(rows as i32), lanes);
        let sum = if out.adds { _mm256_add_ps(_mm256_maskload_ps(y, mask), sum) } else { sum };
        if rows == LANES {
            _mm256_storeu_ps(y, sum);
        } else {
            _mm256_maskstore_ps(y, mask, sum);
        }
    }
}
