//! Tiles of [`crate::cpu::floats`]: 32 rows by 12 columns, 24 sums.

use super::blocks::by_lane;
use crate::cpu::arch::*;
use crate::cpu::floats::{Form, Out, TURNED, Tiles};

/// Columns of a tile.
const WIDTH: usize = 12;
/// Registers of rows in a strip.
const HIGH: usize = 2;
/// Rows of a register.
const LANES: usize = 16;

/// The products of AVX-512.
pub(super) const TILES: Tiles = Tiles { width: WIDTH, high: HIGH * LANES, turn, by_rows: None, multiply };

/// Numbers of 16 rows that are turned at a time.
#[repr(C, align(64))]
struct Square([[f32; LANES]; TURNED]);

#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c"))]
unsafe fn turn(form: Form, rows: &[*const u8], count: usize, to: *mut f32, stride: usize, lanes: usize) {
    let written = ((1u32 << lanes.min(LANES)) - 1) as u16;
    let mut square = Square([[0.0; LANES]; TURNED]);
    for start in (0..count).step_by(LANES) {
        let left = (count - start).min(LANES);
        let there = ((1u32 << left) - 1) as u16;
        // SAFETY: the caller promises these numbers; missing rows stay zero.
        unsafe {
            for (row, numbers) in rows.iter().zip(&mut square.0) {
                let at = row.add(start * form.bytes());
                let loaded = match form {
                    Form::F32 => _mm512_maskz_loadu_ps(there, at.cast()),
                    Form::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, at.cast())),
                    Form::Bf16 => {
                        let wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, at.cast()));
                        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                    }
                };
                _mm512_store_ps(numbers.as_mut_ptr(), loaded);
            }
            for quarter in 0..left.div_ceil(4) {
                let fours = four(&square, quarter);
                for (j, four) in fours.into_iter().enumerate().take(left - 4 * quarter) {
                    let to = to.add((start + 4 * quarter + j) * stride);
                    _mm512_mask_storeu_ps(to, written, _mm512_castsi512_ps(four));
                }
            }
        }
    }
}

/// Four numbers of all rows, each a register with a lane for each row.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c"))]
unsafe fn four(square: &Square, quarter: usize) -> [__m512i; 4] {
    let mut lanes = [_mm512_setzero_si512(); 4];
    for r in 0..4 {
        // SAFETY: four numbers of each row.
        unsafe {
            let at = |i: usize| _mm_load_si128(square.0[r + 4 * i].as_ptr().add(4 * quarter).cast());
            let one = _mm512_castsi128_si512(at(0));
            let two = _mm512_mask_broadcast_i32x4(one, 0x00f0, at(1));
            let three = _mm512_mask_broadcast_i32x4(two, 0x0f00, at(2));
            lanes[r] = _mm512_mask_broadcast_i32x4(three, 0xf000, at(3));
        }
    }
    by_lane(lanes)
}

#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c"))]
unsafe fn multiply(w: *const f32, depth: usize, x: *const f32, out: Out) {
    // SAFETY: the caller's promises.
    unsafe {
        match (out.rows.div_ceil(LANES), out.columns.div_ceil(4)) {
            (1, 1) => tile::<1, 4>(w, depth, x, out),
            (1, 2) => tile::<1, 8>(w, depth, x, out),
            (1, _) => tile::<1, 12>(w, depth, x, out),
            (_, 1) => tile::<2, 4>(w, depth, x, out),
            (_, 2) => tile::<2, 8>(w, depth, x, out),
            _ => tile::<2, 12>(w, depth, x, out),
        }
    }
}

/// The first R registers of rows by the first N columns.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c"))]
unsafe fn tile<const R: usize, const N: usize>(w: *const f32, depth: usize, x: *const f32, out: Out) {
    let mut sums = [[_mm512_setzero_ps(); N]; R];
    for c in 0..N.min(out.columns) {
        // Asked for now, so that it is there when the sums are.
        _mm_prefetch::<_MM_HINT_T0>(out.y.wrapping_add(c * out.stride).cast());
        _mm_prefetch::<_MM_HINT_T0>(out.y.wrapping_add(c * out.stride + LANES).cast());
    }
    for k in 0..depth {
        // SAFETY: the caller promises `depth` numbers of each.
        unsafe {
            let mut rows = [_mm512_setzero_ps(); R];
            for r in 0..R {
                rows[r] = _mm512_load_ps(w.add((k * HIGH + r) * LANES));
            }
            for c in 0..N {
                let number = _mm512_set1_ps(*x.add(k * WIDTH + c));
                for r in 0..R {
                    sums[r][c] = _mm512_fmadd_ps(rows[r], number, sums[r][c]);
                }
            }
        }
    }
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
