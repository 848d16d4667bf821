//! Tiles of [`crate::cpu::floats`]. By rows, which are not turned, they are in `by_rows.rs`; here are those for sums over rows, 16 numbers of a
//! row by 6 columns, and the turning of columns.

// Tiles of registers are indexed: iterators over them do not stay in registers.
#![allow(clippy::needless_range_loop)]

use crate::cpu::arch::*;
use crate::cpu::floats::{Form, Out, TURNED, Tiles};

/// Columns of a panel.
pub(super) const WIDTH: usize = 16;
/// Registers of rows in a strip.
const HIGH: usize = 2;
/// Rows, or columns, of a register.
pub(super) const LANES: usize = 8;

/// The products of AVX2, but for those by rows.
pub(super) const TILES: Tiles = Tiles { width: WIDTH, high: HIGH * LANES, turn, by_rows: None, multiply };

/// Bytes of a cache line.
const LINE: usize = 64;

/// Numbers of a line.
const EACH: usize = LINE / size_of::<f32>();

/// A cache line of each of 16 columns.
#[repr(C, align(64))]
struct Square([[f32; EACH]; TURNED]);

/// The first `count` lanes.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
fn first(count: usize) -> __m256i {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_cmpgt_epi32(_mm256_set1_epi32(count.min(LANES) as i32), lanes)
}

/// Turns columns; rows are taken as they lie. Lines are copied one by one first: columns a power of two apart have their places in L1 in common,
/// where no line would stay until all of it is turned.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn turn(form: Form, columns: &[*const u8], count: usize, to: *mut f32, stride: usize, lanes: usize) {
    assert!(form == Form::F32 && lanes == TURNED, "rows are taken as they lie");
    let mut square = Square([[0.0; EACH]; TURNED]);
    for start in (0..count).step_by(EACH) {
        let left = EACH.min(count - start);
        // SAFETY: the caller promises these numbers; missing columns stay zero.
        unsafe {
            for (column, line) in columns.iter().zip(&mut square.0) {
                let at = column.cast::<f32>().add(start);
                match left {
                    EACH => *line = at.cast::<[f32; EACH]>().read_unaligned(),
                    _ => at.copy_to_nonoverlapping(line.as_mut_ptr(), left),
                }
            }
            for half in 0..TURNED / LANES {
                for four in 0..left.div_ceil(4) {
                    let numbers = turned(&square, half * LANES, 4 * four);
                    for (j, numbers) in numbers.into_iter().enumerate().take(left - 4 * four) {
                        _mm256_storeu_ps(to.add((start + 4 * four + j) * stride + half * LANES), numbers);
                    }
                }
            }
        }
    }
}

/// Writes the first `count` lanes, or adds them to what stands there. A store under a mask takes a Zen 3 as long as a dozen plain ones, so it is
/// only for what is rare.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn store(to: *mut f32, numbers: __m256, count: usize, adds: bool) {
    // SAFETY: the caller promises `count` numbers.
    unsafe {
        let before = match (adds, count) {
            (false, _) => _mm256_setzero_ps(),
            (true, LANES..) => _mm256_loadu_ps(to),
            (true, _) => _mm256_maskload_ps(to, first(count)),
        };
        let numbers = _mm256_add_ps(before, numbers);
        match count {
            LANES.. => _mm256_storeu_ps(to, numbers),
            _ => _mm256_maskstore_ps(to, first(count), numbers),
        }
    }
}

/// Four numbers of eight columns, each a register with a lane for each column.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn turned(square: &Square, column: usize, number: usize) -> [__m256; 4] {
    // SAFETY: four numbers of each column.
    unsafe {
        let at = |c: usize| _mm_load_ps(square.0[column + c].as_ptr().add(number));
        let [a, b, c, d] = [0, 1, 2, 3].map(|c| _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(at(c)), at(c + 4)));
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

/// A panel's columns by six and four.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn multiply(w: *const f32, depth: usize, x: *const f32, out: Out) {
    let mut c = 0;
    while c < out.columns {
        let left = out.columns - c;
        // SAFETY: the caller's promises.
        unsafe {
            let (x, out) = (x.add(c), Out { y: out.y.add(c * out.stride), columns: left, ..out });
            c += match left {
                8 | 3..=5 => tile::<4>(w, depth, x, out),
                6.. => tile::<6>(w, depth, x, out),
                _ => tile::<2>(w, depth, x, out),
            };
        }
    }
}

/// Two registers of rows by the first N columns; returns N.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn tile<const N: usize>(w: *const f32, depth: usize, x: *const f32, out: Out) -> usize {
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
        let rows = out.rows.saturating_sub(r * LANES);
        for c in 0..N {
            if c < out.columns && rows > 0 {
                // SAFETY: the caller promises these rows and columns.
                unsafe { store(out.y.add(c * out.stride + r * LANES), sums[r][c], rows, out.adds) };
            }
        }
    }
    N
}
