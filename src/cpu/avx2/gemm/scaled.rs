//! Products that are summed over rows of weights, for few columns, as those of `avx512/gemm/scaled.rs`, of codes of four and five bits: in 16 bits
//! 16 products of four bits and eight fit, and eight of five.

// Loops over registers stay loops: what copies slices goes through memory.
#![allow(clippy::needless_range_loop)]

use crate::cpu::arch::*;
use crate::cpu::avx2::blocks::source::{SLOTS, Source};
use crate::cpu::avx2::prefetch;
use crate::cpu::gemm::{MAX_NUMBER, MAX_SHARE, SCALED_LANES as WIDE, SCALED_ROWS as ROWS};
use crate::formats::blocks;
use crate::formats::rows::{GROUP, PACK};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Rows whose codes share a lane.
const TOGETHER: usize = 4;

/// Columns whose codes are in a register.
const LANES: usize = 8;

/// Columns that are multiplied at a time: their sums are half of the registers.
const WIDTH: usize = 2;

/// Registers of a group's codes of four rows.
const PARTS: usize = GROUP / LANES;

/// A pack of numbers of some rows.
#[repr(C, align(64))]
struct Block {
    /// Codes by group, four rows and quarter of the group: number i of the quarter in lane i.
    codes: [[[__m256i; PARTS]; ROWS / TOGETHER]; PACK / GROUP],
    /// By row, the scale of each group as a share of `tops`, times [`MAX_SHARE`].
    shares: [[i16; PACK / GROUP]; ROWS],
    /// By row, the largest of the scales.
    tops: [f32; ROWS],
    /// By row, of each group, what is added to its numbers.
    mins: [[f32; PACK / GROUP]; ROWS],
}

/// Up to 32 columns.
#[repr(C, align(64))]
struct Rounded {
    /// By row, its number of each column times the row's largest scale, in steps of which [`MAX_NUMBER`] make the column's largest. In each 16 columns
    /// they lie so that, turned into codes, they come in the order of columns.
    numbers: [[__m256i; WIDE / 16]; ROWS],
    /// What a column's sums are multiplied by.
    steps: [f32; WIDE],
    /// For one group, by four rows: of each column four signed codes.
    codes: [[i32; WIDE]; ROWS / TOGETHER],
    /// For one group, what is added to each column's products: minima, and what is too much in codes that are not signed.
    more: [f32; WIDE],
}

/// A type of rows.
///
/// # Safety
/// For all functions: the row is a whole one, and the CPU has the instructions.
pub(in crate::cpu) trait Row {
    /// What is too much in each code, which is not signed.
    const LESS: i8;
    /// Whether there are minima.
    const MINS: bool;
    /// Whether codes come as in our own packs; otherwise in their order.
    const PACKS: bool;
    /// Of how many times four rows the products fit into 16 bits.
    const FIT: usize;

    /// 32 codes: register `i` of the 16 of a pack.
    unsafe fn codes(row: *const u8, pack: usize, i: usize) -> __m256i;

    /// Scales of a pack's groups, and what is added to their numbers.
    unsafe fn scales(row: *const u8, cols: usize, pack: usize) -> [[__m256; 2]; 2];

    /// Where a pack's bytes lie in a row.
    fn bytes(cols: usize, pack: usize) -> [Range<usize>; 2];
}

/// Our own q4_0.
pub(in crate::cpu) struct Packs;

impl Row for Packs {
    const LESS: i8 = 8;
    const MINS: bool = false;
    const PACKS: bool = true;
    const FIT: usize = 8;

    /// Eight for the first eight groups, then eight for the others.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(row: *const u8, pack: usize, i: usize) -> __m256i {
        // SAFETY: the caller's promises.
        let two = unsafe { _mm256_loadu_si256(row.add(pack * PACK / 2 + i % 8 / 2 * 64 + i / 8 * 32).cast()) };
        let one = if i.is_multiple_of(2) { two } else { _mm256_srli_epi16::<4>(two) };
        _mm256_and_si256(one, _mm256_set1_epi8(15))
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn scales(row: *const u8, cols: usize, pack: usize) -> [[__m256; 2]; 2] {
        // SAFETY: the caller's promises.
        unsafe {
            let at = row.add(cols / 2 + pack * (PACK / GROUP) * 2).cast::<__m128i>();
            let scales = [_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at.add(1)))];
            [scales, [_mm256_setzero_ps(); 2]]
        }
    }

    fn bytes(cols: usize, pack: usize) -> [Range<usize>; 2] {
        let scales = cols / 2 + pack * (PACK / GROUP) * 2;
        [pack * PACK / 2..(pack + 1) * PACK / 2, scales..scales + PACK / GROUP * 2]
    }
}

/// Bytes of a block of Q5_K, of 256 numbers.
const Q5_K_BYTES: usize = 176;

impl Row for blocks::Q5_K {
    const LESS: i8 = 0;
    const MINS: bool = true;
    const PACKS: bool = false;
    const FIT: usize = 4;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(row: *const u8, pack: usize, i: usize) -> __m256i {
        // SAFETY: the caller's promises.
        unsafe { <blocks::Q5_K as Source>::codes(row.add((pack * 2 + i / 8) * Q5_K_BYTES), i % 8) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn scales(row: *const u8, _: usize, pack: usize) -> [[__m256; 2]; 2] {
        let slots = SLOTS.map(|slot| slot as i32);
        let mut both = [[_mm256_setzero_ps(); 2]; 2];
        for i in 0..2 {
            // SAFETY: the caller's promises.
            unsafe {
                let slots = _mm256_loadu_si256(slots.as_ptr().cast());
                let factors = <blocks::Q5_K as Source>::factors(row.add((pack * 2 + i) * Q5_K_BYTES), 0);
                both[0][i] = _mm256_permutevar8x32_ps(factors.scales[0], slots);
                let mins = factors.mins.map_or(_mm256_setzero_ps(), |mins| mins[0]);
                both[1][i] = _mm256_permutevar8x32_ps(mins, slots);
            }
        }
        both
    }

    fn bytes(_: usize, pack: usize) -> [Range<usize>; 2] {
        [pack * 2 * Q5_K_BYTES..(pack + 1) * 2 * Q5_K_BYTES, 0..0]
    }
}

/// As [`crate::cpu::gemm::ScaledAcross`].
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
pub(in crate::cpu) unsafe fn scaled<R: Row>(
    rows: &[*const u8],
    cols: usize,
    pack: usize,
    x: *const f32,
    n: usize,
    y: *mut f32,
    stride: usize,
) {
    debug_assert!(!rows.is_empty() && (pack + 1) * PACK <= cols && (1..=WIDE).contains(&n));
    let mut block: MaybeUninit<Block> = MaybeUninit::uninit();
    let mut rounded: MaybeUninit<Rounded> = MaybeUninit::uninit();
    let (last, lanes) = (rows.len() - 1, n.next_multiple_of(16));
    for first in (0..rows.len()).step_by(ROWS) {
        // Behind the last row columns are zero, and any row will do.
        let row = |k: usize| rows[(first + k).min(last)];
        for q in 0..ROWS / TOGETHER {
            let four = [row(q * TOGETHER), row(q * TOGETHER + 1), row(q * TOGETHER + 2), row(q * TOGETHER + 3)];
            // SAFETY: the caller's promises.
            unsafe { open::<R>(&four, cols, pack, q, block.as_mut_ptr()) };
        }
        // SAFETY: the caller's promises; the block was written.
        unsafe { take(x.add(first * lanes), lanes, block.assume_init_ref(), rounded.as_mut_ptr()) };
        for g in 0..PACK / GROUP {
            ask::<R>(row(ROWS + 2 * g), cols, pack);
            ask::<R>(row(ROWS + 2 * g + 1), cols, pack);
            // SAFETY: as above.
            unsafe {
                let block = block.assume_init_ref();
                round::<R>(block, g, x.add(first * lanes), lanes, rounded.as_mut_ptr());
                let rounded = rounded.assume_init_ref();
                for c in (0..n).step_by(WIDTH) {
                    let y = y.add(c * stride + g * GROUP);
                    match n - c {
                        1 => tile::<R, 1>(block, g, rounded, c, y, stride),
                        _ => tile::<R, WIDTH>(block, g, rounded, c, y, stride),
                    }
                }
            }
        }
    }
}

/// Prefetches a pack of a row.
#[inline]
fn ask<R: Row>(row: *const u8, cols: usize, pack: usize) {
    for bytes in R::bytes(cols, pack) {
        bytes.step_by(64).for_each(|byte| prefetch(row.wrapping_add(byte)));
    }
}

/// Puts a pack of four rows into the block.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn open<R: Row>(rows: &[*const u8; TOGETHER], cols: usize, pack: usize, q: usize, block: *mut Block) {
    // SAFETY: the caller promises whole rows and the place.
    unsafe {
        for r in 0..TOGETHER {
            let [scales, mins] = R::scales(rows[r], cols, pack);
            let tops = _mm256_max_ps(abs(scales[0]), abs(scales[1]));
            let tops = _mm_max_ps(_mm256_castps256_ps128(tops), _mm256_extractf128_ps::<1>(tops));
            let tops = _mm_max_ps(tops, _mm_movehl_ps(tops, tops));
            let top = _mm_cvtss_f32(_mm_max_ss(tops, _mm_movehdup_ps(tops)));
            let inverse = _mm256_set1_ps(if top > 0.0 { MAX_SHARE / top } else { 0.0 });
            let low = _mm256_cvtps_epi32(_mm256_mul_ps(scales[0], inverse));
            let high = _mm256_cvtps_epi32(_mm256_mul_ps(scales[1], inverse));
            let shares = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
            _mm256_storeu_si256((&raw mut (*block).shares[q * TOGETHER + r]).cast(), shares);
            (*block).tops[q * TOGETHER + r] = top;
            for half in 0..if R::MINS { 2 } else { 0 } {
                let to = (&raw mut (*block).mins[q * TOGETHER + r]).cast::<f32>();
                _mm256_storeu_ps(to.add(half * 8), mins[half]);
            }
        }
        let codes = &mut (*block).codes;
        for two in 0..8 {
            let mut turned = [[_mm256_setzero_si256(); 4]; 2];
            for odd in 0..2 {
                let mut v = [_mm256_setzero_si256(); TOGETHER];
                for r in 0..TOGETHER {
                    v[r] = R::codes(rows[r], pack, two * 2 + odd);
                }
                let low = [_mm256_unpacklo_epi8(v[0], v[1]), _mm256_unpacklo_epi8(v[2], v[3])];
                let high = [_mm256_unpackhi_epi8(v[0], v[1]), _mm256_unpackhi_epi8(v[2], v[3])];
                turned[odd][0] = _mm256_unpacklo_epi16(low[0], low[1]);
                turned[odd][1] = _mm256_unpackhi_epi16(low[0], low[1]);
                turned[odd][2] = _mm256_unpacklo_epi16(high[0], high[1]);
                turned[odd][3] = _mm256_unpackhi_epi16(high[0], high[1]);
            }
            if R::PACKS {
                // In halves of registers are two groups, of which each register has four numbers.
                for m in 0..4 {
                    let (a, b) = (turned[0][m], turned[1][m]);
                    codes[two / 4 * 8 + m][q][two % 4] = _mm256_permute2x128_si256::<0x20>(a, b);
                    codes[two / 4 * 8 + 4 + m][q][two % 4] = _mm256_permute2x128_si256::<0x31>(a, b);
                }
            } else {
                for odd in 0..2 {
                    let [a, b, c, d] = turned[odd];
                    codes[two * 2 + odd][q] = [
                        _mm256_permute2x128_si256::<0x20>(a, b),
                        _mm256_permute2x128_si256::<0x20>(c, d),
                        _mm256_permute2x128_si256::<0x31>(a, b),
                        _mm256_permute2x128_si256::<0x31>(c, d),
                    ];
                }
            }
        }
    }
}

#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
fn abs(v: __m256) -> __m256 {
    _mm256_andnot_ps(_mm256_set1_ps(-0.0), v)
}

/// Takes 32 rows' numbers of the columns, of which there are `lanes`, 16 or 32.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn take(x: *const f32, lanes: usize, block: &Block, to: *mut Rounded) {
    // SAFETY: the caller promises the numbers and the place.
    unsafe {
        for part in 0..lanes / 16 {
            let number = |k: usize, half: usize| {
                let numbers = _mm256_load_ps(x.add(k * lanes + part * 16 + half * LANES));
                _mm256_mul_ps(_mm256_set1_ps(block.tops[k]), numbers)
            };
            let mut inverse = [_mm256_setzero_ps(); 2];
            for half in 0..2 {
                let mut top = _mm256_setzero_ps();
                for k in 0..ROWS {
                    top = _mm256_max_ps(top, abs(number(k, half)));
                }
                let some = _mm256_cmp_ps::<_CMP_GT_OQ>(top, _mm256_setzero_ps());
                inverse[half] = _mm256_and_ps(some, _mm256_div_ps(_mm256_set1_ps(MAX_NUMBER), top));
                let step = _mm256_mul_ps(top, _mm256_set1_ps(1.0 / 127.0));
                _mm256_store_ps((&raw mut (*to).steps).cast::<f32>().add(part * 16 + half * LANES), step);
            }
            for k in 0..ROWS {
                let low = _mm256_cvtps_epi32(_mm256_mul_ps(number(k, 0), inverse[0]));
                let high = _mm256_cvtps_epi32(_mm256_mul_ps(number(k, 1), inverse[1]));
                (*to).numbers[k][part] = _mm256_packs_epi32(low, high);
            }
        }
    }
}

/// Rounds the columns for group `g`.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn round<R: Row>(block: &Block, g: usize, x: *const f32, lanes: usize, to: *mut Rounded) {
    // SAFETY: the caller promises the place, and that `take` was there.
    unsafe {
        for part in 0..lanes / 16 {
            let mut sums = [_mm256_setzero_si256(); 2];
            for q in 0..ROWS / TOGETHER {
                let mut codes = [_mm256_setzero_si256(); TOGETHER];
                for r in 0..TOGETHER {
                    let share = _mm256_set1_epi16(block.shares[q * TOGETHER + r][g]);
                    codes[r] = _mm256_mulhrs_epi16((*to).numbers[q * TOGETHER + r][part], share);
                }
                let [a, b, c, d] = codes;
                let low = _mm256_set1_epi16(255);
                let firsts = _mm256_or_si256(_mm256_and_si256(a, low), _mm256_slli_epi16::<8>(b));
                let lasts = _mm256_or_si256(_mm256_and_si256(c, low), _mm256_slli_epi16::<8>(d));
                let halves = [_mm256_unpacklo_epi16(firsts, lasts), _mm256_unpackhi_epi16(firsts, lasts)];
                for half in 0..2 {
                    let at = (&raw mut (*to).codes[q]).cast::<i32>().add(part * 16 + half * LANES);
                    _mm256_store_si256(at.cast(), halves[half]);
                    if R::LESS != 0 {
                        let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(R::LESS), halves[half]);
                        sums[half] = _mm256_add_epi16(sums[half], pairs);
                    }
                }
            }
            for half in 0..2 {
                let at = part * 16 + half * LANES;
                let step = _mm256_load_ps((&raw const (*to).steps).cast::<f32>().add(at));
                let sums = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums[half], _mm256_set1_epi16(1)));
                let mut more = _mm256_fnmadd_ps(sums, step, _mm256_setzero_ps());
                for k in 0..if R::MINS { ROWS } else { 0 } {
                    let x = _mm256_load_ps(x.add(k * lanes + at));
                    more = _mm256_fmadd_ps(x, _mm256_set1_ps(block.mins[k][g]), more);
                }
                _mm256_store_ps((&raw mut (*to).more).cast::<f32>().add(at), more);
            }
        }
    }
}

/// Adds group `g` of `N` columns, from column `first` on, to `y`.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn tile<R: Row, const N: usize>(
    block: &Block,
    g: usize,
    rounded: &Rounded,
    first: usize,
    y: *mut f32,
    stride: usize,
) {
    let ones = _mm256_set1_epi16(1);
    let mut wide = [[_mm256_setzero_si256(); PARTS]; N];
    for start in (0..ROWS / TOGETHER).step_by(R::FIT) {
        let mut sums = [[_mm256_setzero_si256(); PARTS]; N];
        for q in start..start + R::FIT {
            let codes = &block.codes[g][q];
            for c in 0..N {
                let four = _mm256_set1_epi32(rounded.codes[q][first + c]);
                for part in 0..PARTS {
                    sums[c][part] = _mm256_add_epi16(sums[c][part], _mm256_maddubs_epi16(codes[part], four));
                }
            }
        }
        for c in 0..N {
            for part in 0..PARTS {
                wide[c][part] = _mm256_add_epi32(wide[c][part], _mm256_madd_epi16(sums[c][part], ones));
            }
        }
    }
    for c in 0..N {
        let (step, more) = (_mm256_set1_ps(rounded.steps[first + c]), _mm256_set1_ps(rounded.more[first + c]));
        for part in 0..PARTS {
            // SAFETY: the caller promises these places.
            unsafe {
                let at = y.add(c * stride + part * LANES);
                let sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(wide[c][part]), step, more);
                _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), sum));
            }
        }
    }
}
