//! A strip's panel, and its product with a panel of columns.

use super::{HIGH, LANES, WIDTH};
use crate::cpu::gemm::{DEPTH, words};
use crate::formats::rows::GROUP;
use std::arch::x86_64::*;

/// Groups of a panel.
pub const GROUPS: usize = DEPTH / GROUP;

/// A float whose last bit is worth one, in the middle of those.
pub const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23

/// Up to [`DEPTH`] numbers of each of 32 rows. A lane is a row. Where groups of 32 have one scale the second of their halves is not used.
#[repr(C, align(64))]
pub struct Panel {
    /// By group and within it, four signed codes of each row.
    pub codes: [[[__m512i; HIGH]; GROUP / 4]; GROUPS],
    /// By group and half, what sums of products begin with.
    pub start: [[[__m512i; HIGH]; 2]; GROUPS],
    /// By group and half, the scales.
    pub scale: [[[__m512; HIGH]; 2]; GROUPS],
    /// The scales times [`MAGIC`].
    pub magic: [[[__m512; HIGH]; 2]; GROUPS],
    /// What is taken off each number.
    pub min: [[[__m512; HIGH]; 2]; GROUPS],
}

/// What a type has, as a number: a tile exists once for all types of a kind.
pub const HALVES: u8 = 1;
/// Minima beside scales.
pub const MINS: u8 = 2;
/// Scales whose products with [`MAGIC`] may be beyond f32.
pub const WIDE: u8 = 4;

/// Where a tile's products go.
#[derive(Clone, Copy)]
pub struct Out {
    /// Row 0 of column 0.
    pub y: *mut f32,
    /// Numbers from one column to the next.
    pub stride: usize,
    /// How many rows and columns there are.
    pub rows: usize,
    pub columns: usize,
    /// Whether the products are written; otherwise they are added to what is there.
    pub is_first: bool,
}

/// [`tile`] of a kind, for strips of one or two registers.
pub type Tile = unsafe fn(&Panel, usize, *const f32, Out);

/// The tiles of a kind.
pub const fn tiles(kind: u8) -> [Tile; HIGH] {
    match kind {
        0 => [tile::<0, 1>, tile::<0, 2>],
        HALVES => [tile::<HALVES, 1>, tile::<HALVES, 2>],
        MINS => [tile::<MINS, 1>, tile::<MINS, 2>],
        WIDE => [tile::<WIDE, 1>, tile::<WIDE, 2>],
        3 => [tile::<{ HALVES | MINS }, 1>, tile::<{ HALVES | MINS }, 2>],
        _ => panic!("no type is of this kind"),
    }
}

/// Products of the first R registers of rows with a panel of columns, whose words begin at `x`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
unsafe fn tile<const KIND: u8, const R: usize>(w: &Panel, groups: usize, x: *const f32, out: Out) {
    let mut sums = [[_mm512_setzero_ps(); WIDTH]; R];
    let parts = if KIND & HALVES != 0 { 2 } else { 1 };
    for g in 0..groups {
        // SAFETY: the caller promises `groups` groups of either.
        unsafe {
            let x = x.add(g * words(WIDTH));
            let (codes, steps, totals) = (x.cast::<i32>(), x.add(8 * WIDTH), x.add(9 * WIDTH));
            let (w_codes, start) = (&raw const w.codes[g], &raw const w.start[g]);
            let (scale, magic, min) = (&raw const w.scale[g], &raw const w.magic[g], &raw const w.min[g]);
            for part in 0..parts {
                let mut dots = [[_mm512_setzero_si512(); WIDTH]; R];
                for r in 0..R {
                    dots[r] = [(*start)[part][r]; WIDTH];
                }
                for k in part * 8 / parts..(part + 1) * 8 / parts {
                    let mut four = [_mm512_setzero_si512(); R];
                    for r in 0..R {
                        four[r] = (*w_codes)[k][r];
                    }
                    for c in 0..WIDTH {
                        let input = _mm512_set1_epi32(*codes.add(k * WIDTH + c));
                        for r in 0..R {
                            dots[r][c] = _mm512_dpbusd_epi32(dots[r][c], input, four[r]);
                        }
                    }
                }
                for r in 0..R {
                    for c in 0..WIDTH {
                        let scaled = if KIND & WIDE != 0 {
                            _mm512_mul_ps(_mm512_cvtepi32_ps(dots[r][c]), (*scale)[part][r])
                        } else {
                            let dot = _mm512_castsi512_ps(dots[r][c]);
                            _mm512_fmsub_ps(dot, (*scale)[part][r], (*magic)[part][r])
                        };
                        sums[r][c] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(*steps.add(c)), sums[r][c]);
                    }
                }
            }
            if KIND & MINS != 0 {
                for part in 0..parts {
                    for r in 0..R {
                        for c in 0..WIDTH {
                            let mut total = _mm512_set1_ps(*totals.add(part * WIDTH + c));
                            if KIND & HALVES == 0 {
                                total = _mm512_set1_ps(*totals.add(c) + *totals.add(WIDTH + c));
                            }
                            sums[r][c] = _mm512_fnmadd_ps((*min)[part][r], total, sums[r][c]);
                        }
                    }
                }
            }
        }
    }
    // SAFETY: the caller promises these rows and columns of the output.
    unsafe { store(sums, out) };
}

/// Writes a tile's sums or adds them to what is there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
unsafe fn store<const R: usize>(sums: [[__m512; WIDTH]; R], out: Out) {
    for r in 0..R {
        let left = out.rows.saturating_sub(r * LANES).min(LANES);
        let mask = ((1u32 << left) - 1) as u16;
        for c in 0..WIDTH {
            if c < out.columns {
                // SAFETY: the caller promises these rows and columns.
                unsafe {
                    let at = out.y.add(c * out.stride + r * LANES);
                    let sum = if out.is_first {
                        sums[r][c]
                    } else {
                        _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), sums[r][c])
                    };
                    _mm512_mask_storeu_ps(at, mask, sum);
                }
            }
        }
    }
}
