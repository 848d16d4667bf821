//! A strip's panel, and its product with a panel of columns.

// Loops over registers stay loops: what copies slices goes through memory.
#![allow(clippy::manual_memcpy)]

use super::{HIGH, LANES, WIDTH, prefetch};
use crate::cpu::arch::*;
#[cfg(doc)]
use crate::cpu::gemm::MAGIC;
use crate::cpu::gemm::{GROUPS, HALVES, MINS, Out, WIDE, words};
use crate::formats::rows::GROUP;

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

/// Minima by half a group beside scales by group.
pub const HALF_MINS: u8 = 8;
/// As they come together.
const FOLDED: u8 = MINS | HALF_MINS;

/// Sums of a strip and a panel of columns, between two pieces of the rows.
pub type Sums = [[__m512; WIDTH]; HIGH];

/// [`tile`] of a kind, for strips of one or two registers.
pub type Tile = unsafe fn(&Panel, usize, *const f32, &[*const u8], Out<Sums>);

/// The tiles of a kind, by registers of rows less one and, for a last panel that is not full, by pairs of columns less one.
pub const fn tiles(kind: u8) -> [[Tile; WIDTH / 2]; HIGH] {
    const fn of<const KIND: u8>() -> [[Tile; WIDTH / 2]; HIGH] {
        [
            [tile::<KIND, 1, 2>, tile::<KIND, 1, 4>, tile::<KIND, 1, 6>],
            [tile::<KIND, 2, 2>, tile::<KIND, 2, 4>, tile::<KIND, 2, 6>],
        ]
    }
    match kind {
        0 => of::<0>(),
        HALVES => of::<HALVES>(),
        MINS => of::<MINS>(),
        WIDE => of::<WIDE>(),
        FOLDED => of::<FOLDED>(),
        _ => panic!("no type is of this kind"),
    }
}

/// Products of the first R registers of rows with the first N columns of a panel, whose words begin at `x`. The lines of `ask` are prefetched
/// on the way, evenly spread: many in a row would be dropped.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn tile<const KIND: u8, const R: usize, const N: usize>(
    w: &Panel,
    groups: usize,
    x: *const f32,
    ask: &[*const u8],
    out: Out<Sums>,
) {
    let mut sums = [[_mm512_setzero_ps(); N]; R];
    for r in 0..R {
        for c in 0..N {
            // SAFETY: the caller promises the sums of the piece before.
            unsafe {
                if !out.is_first {
                    sums[r][c] = (*out.sums)[r][c];
                }
                if out.is_last {
                    // Asked for now, so that it is there when the sums are.
                    _mm_prefetch::<_MM_HINT_T0>(out.y.wrapping_add(c * out.stride + r * LANES).cast());
                }
            }
        }
    }
    let parts = if KIND & HALVES != 0 { 2 } else { 1 };
    let mut ask = ask.chunks(ask.len().div_ceil(groups.max(1)).max(1));
    for g in 0..groups {
        ask.next().unwrap_or(&[]).iter().for_each(|line| prefetch(*line));
        // SAFETY: the caller promises `groups` groups of either.
        unsafe { add_group::<KIND, R, N>(w, g, x.add(g * words(WIDTH)), parts, &mut sums) };
    }
    // SAFETY: the caller promises these rows and columns of the output.
    unsafe {
        if out.is_last {
            store(sums, out);
        } else {
            for r in 0..R {
                for c in 0..N {
                    (*out.sums)[r][c] = sums[r][c];
                }
            }
        }
    }
}

/// Adds the products of group `g`.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn add_group<const KIND: u8, const R: usize, const N: usize>(
    w: &Panel,
    g: usize,
    x: *const f32,
    parts: usize,
    sums: &mut [[__m512; N]; R],
) {
    // SAFETY: the caller promises the group.
    unsafe {
        let (codes, steps, totals) = (x.cast::<i32>(), x.add(8 * WIDTH), x.add(9 * WIDTH));
        let (w_codes, start) = (&raw const w.codes[g], &raw const w.start[g]);
        let (scale, magic, min) = (&raw const w.scale[g], &raw const w.magic[g], &raw const w.min[g]);
        for part in 0..parts {
            let mut dots = [[_mm512_setzero_si512(); N]; R];
            for r in 0..R {
                dots[r] = [(*start)[part][r]; N];
            }
            for k in part * 8 / parts..(part + 1) * 8 / parts {
                let mut four = [_mm512_setzero_si512(); R];
                four[..R].copy_from_slice(&(&(*w_codes)[k])[..R]);
                for c in 0..N {
                    let input = _mm512_set1_epi32(*codes.add(k * WIDTH + c));
                    for r in 0..R {
                        dots[r][c] = _mm512_dpbusd_epi32(dots[r][c], input, four[r]);
                    }
                }
            }
            for r in 0..R {
                for c in 0..N {
                    let scaled = if KIND & WIDE != 0 {
                        _mm512_mul_ps(_mm512_cvtepi32_ps(dots[r][c]), (*scale)[part][r])
                    } else {
                        let dot = _mm512_castsi512_ps(dots[r][c]);
                        _mm512_fmsub_ps(dot, (*scale)[part][r], (*magic)[part][r])
                    };
                    sums[r][c] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(*steps.add(c)), sums[r][c]);
                    if KIND & HALF_MINS != 0 {
                        for half in 0..2 {
                            let total = _mm512_set1_ps(*totals.add((1 + half) * WIDTH + c));
                            sums[r][c] = _mm512_fnmadd_ps((*min)[half][r], total, sums[r][c]);
                        }
                    } else if KIND & MINS != 0 {
                        let total = _mm512_set1_ps(*totals.add(c));
                        sums[r][c] = _mm512_fnmadd_ps((*min)[part][r], total, sums[r][c]);
                    }
                }
            }
        }
    }
}

/// Writes a tile's sums.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn store<const R: usize, const N: usize>(sums: [[__m512; N]; R], out: Out<Sums>) {
    for r in 0..R {
        let left = out.rows.saturating_sub(r * LANES).min(LANES);
        let mask = ((1u32 << left) - 1) as u16;
        for c in 0..N {
            if c < out.columns {
                // SAFETY: the caller promises these rows and columns.
                unsafe {
                    let y = out.y.add(c * out.stride + r * LANES);
                    let before = if out.adds { _mm512_maskz_loadu_ps(mask, y) } else { _mm512_setzero_ps() };
                    _mm512_mask_storeu_ps(y, mask, _mm512_add_ps(before, sums[r][c]));
                }
            }
        }
    }
}
