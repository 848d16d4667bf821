//! Tiles of [`crate::cpu::floats`]: 16 rows by 6 columns, 12 sums.

// Tiles of registers are indexed: iterators over them do not stay in registers.
#![allow(clippy::needless_range_loop)]

use crate::cpu::floats::{Form, Out, TURNED, Tiles};
use std::arch::x86_64::*;

/// Columns of a tile.
const WIDTH: usize = 6;
/// Registers of rows in a strip.
const HIGH: usize = 2;
/// Rows of a register.
const LANES: usize = 8;

/// The products of AVX2.
pub(super) const TILES: Tiles = Tiles { width: WIDTH, high: HIGH * LANES, turn, multiply };

/// Numbers of 16 rows that are turned at a time.
#[repr(C, align(64))]
struct Square([[f32; LANES]; TURNED]);

/// The first `count` lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn first(count: usize) -> __m256i {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_cmpgt_epi32(_mm256_set1_epi32(count.min(LANES) as i32), lanes)
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn turn(form: Form, rows: &[*const u8], count: usize, to: *mut f32, stride: usize, lanes: usize) {
    let mut square = Square([[0.0; LANES]; TURNED]);
    for start in (0..count).step_by(LANES) {
        let left = (count - start).min(LANES);
        // SAFETY: the caller promises these numbers; missing rows stay zero.
        unsafe {
            for (row, numbers) in rows.iter().zip(&mut square.0) {
                let at = row.add(start * form.bytes());
                let loaded = match form {
                    Form::F32 => _mm256_maskload_ps(at.cast(), first(left)),
                    Form::F16 => _mm256_cvtph_ps(halves(at.cast(), left)),
                    Form::Bf16 => {
                        let wide = _mm256_cvtepu16_epi32(halves(at.cast(), left));
                        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
                    }
                };
                _mm256_store_ps(numbers.as_mut_ptr(), loaded);
            }
            for half in 0..lanes.div_ceil(LANES) {
                let mask = first(lanes - half * LANES);
                for four in 0..left.div_ceil(4) {
                    let numbers = turned(&square, half * LANES, 4 * four);
                    for (j, numbers) in numbers.into_iter().enumerate().take(left - 4 * four) {
                        _mm256_maskstore_ps(to.add((start + 4 * four + j) * stride + half * LANES), mask, numbers);
                    }
                }
            }
        }
    }
}

/// Up to eight numbers of 16 bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn halves(at: *const u16, count: usize) -> __m128i {
    // SAFETY: the caller promises `count` numbers.
    unsafe {
        if count >= LANES {
            return _mm_loadu_si128(at.cast());
        }
        let mut numbers = [0u16; LANES];
        std::ptr::copy_nonoverlapping(at, numbers.as_mut_ptr(), count);
        _mm_loadu_si128(numbers.as_ptr().cast())
    }
}

/// Four numbers of eight rows, each a register with a lane for each row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn turned(square: &Square, row: usize, number: usize) -> [__m256; 4] {
    // SAFETY: four numbers of each row.
    unsafe {
        let at = |r: usize| _mm_load_ps(square.0[row + r].as_ptr().add(number));
        let [a, b, c, d] = [0, 1, 2, 3].map(|r| _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(at(r)), at(r + 4)));
        let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
        let (ab_high, cd_high) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
        [
            _mm256_shuffle_ps::<0x44>(ab, cd),
            _mm256_shuffle_ps::<0xee>(ab, cd),
            _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
            _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
        ]
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply(w: *const f32, depth: usize, x: *const f32, out: Out) {
    // SAFETY: the caller's promises.
    unsafe {
        match out.columns.div_ceil(2) {
            1 => tile::<2>(w, depth, x, out),
            2 => tile::<4>(w, depth, x, out),
            _ => tile::<6>(w, depth, x, out),
        }
    }
}

/// Two registers of rows by the first N columns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const N: usize>(w: *const f32, depth: usize, x: *const f32, out: Out) {
    let mut sums = [[_mm256_setzero_ps(); N]; HIGH];
    for k in 0..depth {
        // SAFETY: the caller promises `depth` numbers of each.
        unsafe {
            let rows = [_mm256_load_ps(w.add(k * HIGH * LANES)), _mm256_load_ps(w.add((k * HIGH + 1) * LANES))];
            for c in 0..N {
                let number = _mm256_broadcast_ss(&*x.add(k * WIDTH + c));
                for r in 0..HIGH {
                    sums[r][c] = _mm256_fmadd_ps(rows[r], number, sums[r][c]);
                }
            }
        }
    }
    for r in 0..HIGH {
        let mask = first(out.rows.saturating_sub(r * LANES));
        for c in 0..N {
            if c < out.columns {
                // SAFETY: the caller promises these rows and columns.
                unsafe {
                    let y = out.y.wrapping_add(c * out.stride + r * LANES);
                    let before = if out.adds { _mm256_maskload_ps(y, mask) } else { _mm256_setzero_ps() };
                    _mm256_maskstore_ps(y, mask, _mm256_add_ps(before, sums[r][c]));
                }
            }
        }
    }
}
