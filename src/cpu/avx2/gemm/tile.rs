//! A strip's panel, and the product of a register of its rows with a panel of columns.

use super::{HIGH, LANES, WIDTH};
use crate::cpu::gemm::{GROUPS, HALVES, MINS, Out, WIDE, words};
use crate::formats::rows::GROUP;
use std::arch::x86_64::*;

/// Up to [`DEPTH`] numbers of each of 32 rows. A lane is a row. Where groups of 32 have one scale the second of their halves is not used.
#[repr(C, align(64))]
pub struct Panel {
    /// By group and within it, four signed codes of each row.
    pub codes: [[[__m256i; HIGH]; GROUP / 4]; GROUPS],
    /// By group and half, what sums of products begin with.
    pub start: [[[__m256i; HIGH]; 2]; GROUPS],
    /// By group and half, the scales.
    pub scale: [[[__m256; HIGH]; 2]; GROUPS],
    /// The scales times [`MAGIC`].
    pub magic: [[[__m256; HIGH]; 2]; GROUPS],
    /// What is added to each number.
    pub added: [[[__m256; HIGH]; 2]; GROUPS],
}

/// Sums of a register of rows and a panel of columns, between two pieces of the rows.
pub type Sums = [__m256; WIDTH];

/// Products of register `i` of rows with a panel of columns, whose words begin at the pointer.
pub type Tile = unsafe fn(&Panel, usize, usize, *const f32, Out<Sums>);

/// The tile of a kind with AVX-VNNI.
pub const fn with_vnni(kind: u8) -> Tile {
    match kind {
        0 => tile_vnni::<0, 0>,
        HALVES => tile_vnni::<HALVES, 0>,
        MINS => tile_vnni::<MINS, 0>,
        WIDE => tile_vnni::<WIDE, 0>,
        3 => tile_vnni::<{ HALVES | MINS }, 0>,
        _ => panic!("no type is of this kind"),
    }
}

/// The tile of a kind without it, for codes up to `largest`: 16 bits hold 64 / `largest` sums of two products.
pub const fn without_vnni(kind: u8, largest: usize) -> Tile {
    match (kind, 64 / largest) {
        (0, 8..) => tile_plain::<0, 8>,
        (0, 4..) => tile_plain::<0, 4>,
        (WIDE, 4..) => tile_plain::<WIDE, 4>,
        (MINS, 4..) => tile_plain::<MINS, 4>,
        (MINS, 2..) => tile_plain::<MINS, 2>,
        (HALVES, 4..) => tile_plain::<HALVES, 4>,
        (HALVES, 2..) => tile_plain::<HALVES, 2>,
        _ => panic!("no type is of this kind"),
    }
}

/// Defines a tile: how it adds the products of codes `$from..$to` of group `$g` with three columns from `$c` on.
macro_rules! tile {
    ($name:ident, $features:literal, $add:ident) => {
        #[target_feature(enable = $features)]
        unsafe fn $name<const KIND: u8, const STEPS: usize>(
            w: &Panel,
            i: usize,
            groups: usize,
            x: *const f32,
            out: Out<Sums>,
        ) {
            let mut sums = [_mm256_setzero_ps(); WIDTH];
            if !out.is_first {
                // SAFETY: the caller promises the sums of the piece before.
                sums = unsafe { *out.sums };
            }
            let parts = if KIND & HALVES != 0 { 2 } else { 1 };
            for g in 0..groups {
                // SAFETY: the caller promises `groups` groups of either.
                unsafe {
                    let x = x.add(g * words(WIDTH));
                    for part in 0..parts {
                        let start = w.start[g][part][i];
                        let range = (part * 8 / parts, (part + 1) * 8 / parts);
                        let dots = [
                            $add::<STEPS>(w, i, g, x.cast(), range, start),
                            $add::<STEPS>(w, i, g, x.cast::<i32>().add(3), range, start),
                        ];
                        for c in 0..WIDTH {
                            let dot = dots[c / 3][c % 3];
                            let scaled = if KIND & WIDE != 0 {
                                _mm256_mul_ps(_mm256_cvtepi32_ps(dot), w.scale[g][part][i])
                            } else {
                                _mm256_fmsub_ps(_mm256_castsi256_ps(dot), w.scale[g][part][i], w.magic[g][part][i])
                            };
                            let step = _mm256_broadcast_ss(&*x.add(8 * WIDTH + c));
                            sums[c] = _mm256_fmadd_ps(scaled, step, sums[c]);
                            if KIND & MINS != 0 {
                                // All of a group, or the first or second half of it.
                                let which = if parts == 1 { 9 } else { 10 + part };
                                let total = _mm256_broadcast_ss(&*x.add(which * WIDTH + c));
                                sums[c] = _mm256_fmadd_ps(w.added[g][part][i], total, sums[c]);
                            }
                        }
                    }
                }
            }
            // SAFETY: the caller promises these rows and columns of the output.
            unsafe {
                if out.is_last {
                    store(sums, out);
                } else {
                    *out.sums = sums;
                }
            }
        }
    };
}
tile!(tile_plain, "avx2,fma,f16c", add_pairs);
tile!(tile_vnni, "avx2,fma,f16c,avxvnni", add_fours);

/// `start` plus the products of codes `from..to` of a group with three columns, of which `x` has the codes. STEPS products of two stay in 16
/// bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_pairs<const STEPS: usize>(
    w: &Panel,
    i: usize,
    g: usize,
    x: *const i32,
    (from, to): (usize, usize),
    start: __m256i,
) -> [__m256i; 3] {
    let mut sums = [start; 3];
    let mut k = from;
    while k < to {
        let mut pairs = [_mm256_setzero_si256(); 3];
        for step in 0..STEPS {
            let four = w.codes[g][k + step][i];
            for c in 0..3 {
                // SAFETY: the caller promises the group.
                let input = _mm256_set1_epi32(unsafe { *x.add((k + step) * WIDTH + c) });
                let pair = _mm256_maddubs_epi16(input, four);
                pairs[c] = if step == 0 { pair } else { _mm256_add_epi16(pairs[c], pair) };
            }
        }
        for c in 0..3 {
            sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(pairs[c], _mm256_set1_epi16(1)));
        }
        k += STEPS;
    }
    sums
}

/// The same by AVX-VNNI.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn add_fours<const STEPS: usize>(
    w: &Panel,
    i: usize,
    g: usize,
    x: *const i32,
    (from, to): (usize, usize),
    start: __m256i,
) -> [__m256i; 3] {
    let mut sums = [start; 3];
    for k in from..to {
        let four = w.codes[g][k][i];
        for c in 0..3 {
            // SAFETY: the caller promises the group.
            let input = _mm256_set1_epi32(unsafe { *x.add(k * WIDTH + c) });
            sums[c] = _mm256_dpbusd_avx_epi32(sums[c], input, four);
        }
    }
    sums
}

/// Writes a tile's sums.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store(sums: Sums, out: Out<Sums>) {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(out.rows as i32), lanes);
    for (c, sum) in sums.into_iter().enumerate().take(out.columns) {
        // SAFETY: the caller promises these rows and columns.
        unsafe {
            let y = out.y.add(c * out.stride);
            let sum = if out.adds { _mm256_add_ps(_mm256_maskload_ps(y, mask), sum) } else { sum };
            if out.rows == LANES {
                _mm256_storeu_ps(y, sum);
            } else {
                _mm256_maskstore_ps(y, mask, sum);
            }
        }
    }
}
