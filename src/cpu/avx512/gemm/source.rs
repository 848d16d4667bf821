//! From rows of weights to a strip's panel.

use super::LANES;
use super::tile::{HALF_MINS, Panel};
use crate::cpu::arch::*;
use crate::cpu::avx512::blocks::{self as units, MAX_STEP, Nibbles, Unpack, by_lane};
use crate::cpu::columns::{BLOCK, group_of_lane};
use crate::cpu::gemm::{self, DEPTH, GROUPS, MAGIC};
use crate::formats::rows::{GROUP, PACK};
use std::ops::Range;

/// [`DEPTH`] numbers of 16 rows, unpacked row by row.
#[repr(C, align(64))]
pub struct Opened {
    /// Signed codes.
    codes: [[__m512i; DEPTH / 64]; LANES],
    scales: [[__m512; 2]; LANES],
    mins: [[__m512; 2]; LANES],
}

/// A type of weights.
///
/// # Safety
/// For all functions: what is named of the row can be read, and the CPU has the instructions.
pub trait Source {
    /// Whether each 16 numbers have a scale of their own; otherwise each 32.
    const HALVES: bool;
    /// Whether each 16 numbers have a minimum of their own but not a scale.
    const HALF_MINS: bool;
    /// Whether there are minima beside scales.
    const MINS: bool;
    /// Whether scales may be so large that their products with [`MAGIC`] are beyond f32.
    const WIDE: bool;

    /// Where the bytes of numbers `start..start + DEPTH` of a row of `cols` lie, without what lies apart from them.
    fn piece(cols: usize, start: usize) -> Range<usize>;

    /// Unpacks numbers from `start` on into row `r`, or with `only_scales` no codes; what is behind the row's end becomes anything finite.
    unsafe fn open(row: *const u8, cols: usize, start: usize, to: *mut Opened, r: usize, only_scales: bool);

    /// Whether codes have four bits, so that `nibbles` can be asked about a piece of a row: 16 rows are turned as they lie, which is half as much
    /// as their codes.
    fn has_nibbles(cols: usize, start: usize) -> bool;

    /// Where in a row of [`DEPTH`] numbers from `start` on 16 bytes `i` of 16 stand.
    fn nibbles(start: usize, i: usize) -> usize;

    /// Where the low (0) or high (1) halves of four bytes `j` of 16 bytes `i` belong, as [`Source::place`].
    fn place_of_nibbles(i: usize, j: usize, high: usize) -> (usize, usize);

    /// Signed codes of nibbles.
    unsafe fn of_nibbles(nibbles: __m512i) -> __m512i;

    /// Where the four codes at lane `lane` of register `m` belong: their group, and their place among its eight.
    fn place(cols: usize, start: usize, m: usize, lane: usize) -> (usize, usize);

    /// To which group and half the scale at lane `lane` of register `m` belongs; `None` for one that is the same as another.
    fn place_of_scale(cols: usize, start: usize, m: usize, lane: usize) -> Option<(usize, usize)>;
}

/// Which kind of tile a type takes.
pub const fn kind<T: Source>() -> u8 {
    let halves = if T::HALVES { gemm::HALVES } else { 0 };
    let mins = if T::MINS { gemm::MINS } else { 0 };
    let half_mins = if T::HALF_MINS { HALF_MINS } else { 0 };
    halves | mins | half_mins | if T::WIDE { gemm::WIDE } else { 0 }
}

impl<T: Unpack> Source for T {
    const HALVES: bool = T::BY_16 && !T::FOLDS;
    const HALF_MINS: bool = T::FOLDS;
    const MINS: bool = T::EXCESS.is_none();
    const WIDE: bool = T::WIDE_SCALES;

    #[inline]
    fn piece(cols: usize, start: usize) -> Range<usize> {
        start / T::NUMBERS * T::BYTES..(start + DEPTH).min(cols) / T::NUMBERS * T::BYTES
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn open(row: *const u8, cols: usize, start: usize, to: *mut Opened, r: usize, only_scales: bool) {
        let mut tail = [0; MAX_STEP];
        for half in 0..(cols - start).min(DEPTH).div_ceil(BLOCK) {
            // SAFETY: the caller's promises.
            unsafe {
                let at = units::step::<T>(row, start / BLOCK + half, cols, &mut tail);
                let (codes, scales) = T::signed(at);
                for m in 0..4 {
                    if !only_scales {
                        (*to).codes[r][4 * half + m] = codes[m];
                    }
                }
                (*to).scales[r][half] = scales.scale;
                (*to).mins[r][half] = scales.min;
            }
        }
    }

    #[inline]
    fn has_nibbles(_: usize, _: usize) -> bool {
        T::NIBBLES.is_some()
    }

    #[inline]
    fn nibbles(start: usize, i: usize) -> usize {
        let of = const { layout::<T>() };
        of.head + (start / BLOCK + i / 8) * T::STEP + i % 8 * of.apart
    }

    #[inline]
    fn place_of_nibbles(i: usize, j: usize, high: usize) -> (usize, usize) {
        let of = const { layout::<T>() };
        if of.next_group { (i / 2 * 2 + high, i % 2 * 4 + j) } else { (i, 4 * high + j) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn of_nibbles(nibbles: __m512i) -> __m512i {
        match (T::NIBBLES, T::EXCESS) {
            (Some(Nibbles { levels: Some(levels), .. }), _) => {
                // SAFETY: 16 bytes.
                let table = unsafe { _mm_loadu_si128(levels.as_ptr().cast()) };
                _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles)
            }
            (_, Some(excess)) => _mm512_sub_epi8(nibbles, _mm512_set1_epi8(excess)),
            _ => nibbles,
        }
    }

    #[inline]
    fn place(_: usize, _: usize, m: usize, lane: usize) -> (usize, usize) {
        (2 * m + lane / 8, lane % 8)
    }

    #[inline]
    fn place_of_scale(_: usize, _: usize, m: usize, lane: usize) -> Option<(usize, usize)> {
        let group = 16 * m + group_of_lane(lane);
        (T::BY_16 || group.is_multiple_of(2)).then_some((group / 2, group % 2))
    }
}

/// Where a type's nibbles lie; of one without them anything.
const fn layout<T: Unpack>() -> Nibbles {
    match T::NIBBLES {
        Some(nibbles) => nibbles,
        None => Nibbles::by_32(0, 0),
    }
}

/// Rows of our own form, q8_0 or (FOUR) q4_0.
pub struct Packs<const FOUR: bool>;

impl<const FOUR: bool> Source for Packs<FOUR> {
    const HALVES: bool = false;
    const HALF_MINS: bool = false;
    const MINS: bool = false;
    const WIDE: bool = false;

    #[inline]
    fn piece(cols: usize, start: usize) -> Range<usize> {
        let bytes = |numbers: usize| if FOUR { numbers / 2 } else { numbers };
        bytes(start)..bytes((start + DEPTH).min(cols))
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn open(row: *const u8, cols: usize, start: usize, to: *mut Opened, r: usize, only_scales: bool) {
        let groups = (cols - start).min(DEPTH) / GROUP;
        // SAFETY: the caller's promises.
        unsafe {
            let codes = row.add(if FOUR { start / 2 } else { start });
            let scales = row.add(if FOUR { cols / 2 } else { cols } + start / GROUP * 2);
            let there = ((1u32 << groups) - 1) as u16;
            (*to).scales[r][0] = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, scales.cast()));
            for m in 0..if only_scales { 0 } else { groups.div_ceil(2) } {
                (*to).codes[r][m] = if !FOUR {
                    // The last group of a row may be half a register.
                    let lanes = if 2 * m + 1 < groups { u16::MAX } else { 0xff };
                    _mm512_maskz_loadu_epi32(lanes, codes.add(64 * m).cast())
                } else if groups == GROUPS {
                    let pair = _mm512_loadu_si512(codes.add(m / 2 * 64).cast());
                    let four = if m.is_multiple_of(2) { pair } else { _mm512_srli_epi16::<4>(pair) };
                    _mm512_sub_epi8(_mm512_and_si512(four, _mm512_set1_epi8(15)), _mm512_set1_epi8(8))
                } else {
                    let lanes = if 2 * m + 1 < groups { 0xff } else { 0xf };
                    let bytes = _mm512_castsi256_si512(_mm256_maskz_loadu_epi32(lanes, codes.add(32 * m).cast()));
                    let twice = _mm512_shuffle_i64x2::<0b01_01_00_00>(bytes, bytes);
                    let four = _mm512_mask_srli_epi32::<4>(twice, 0xf0f0, twice);
                    _mm512_sub_epi8(_mm512_and_si512(four, _mm512_set1_epi8(15)), _mm512_set1_epi8(8))
                };
            }
        }
    }

    #[inline]
    fn has_nibbles(cols: usize, start: usize) -> bool {
        FOUR && cols - start >= PACK
    }

    #[inline]
    fn nibbles(start: usize, i: usize) -> usize {
        start / 2 + 16 * i
    }

    /// Four times 16 bytes are the low and the high bits of one register of each group's fours.
    #[inline]
    fn place_of_nibbles(i: usize, j: usize, high: usize) -> (usize, usize) {
        (i % 4 * 4 + j, i / 4 * 2 + high)
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn of_nibbles(nibbles: __m512i) -> __m512i {
        _mm512_sub_epi8(nibbles, _mm512_set1_epi8(8))
    }

    #[inline]
    fn place(cols: usize, start: usize, m: usize, lane: usize) -> (usize, usize) {
        if cols - start >= PACK { (lane, m) } else { (2 * m + lane / 8, lane % 8) }
    }

    #[inline]
    fn place_of_scale(_: usize, _: usize, m: usize, lane: usize) -> Option<(usize, usize)> {
        (m == 0).then_some((lane, 0))
    }
}

/// Unpacks numbers `start..start + DEPTH` of at most 16 rows into registers `i` of the panel. Of missing rows it takes the last.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub unsafe fn unpack<T: Source>(rows: &[*const u8], cols: usize, start: usize, to: *mut Panel, i: usize) {
    let mut opened = std::mem::MaybeUninit::<Opened>::uninit();
    let opened = opened.as_mut_ptr();
    let groups = (cols - start).min(DEPTH) / GROUP;
    // SAFETY: the caller's promises; what is read of `opened` was written.
    unsafe {
        let by_nibbles = T::has_nibbles(cols, start);
        for r in 0..LANES {
            let row = rows[r.min(rows.len() - 1)];
            if by_nibbles {
                T::open(row, cols, start, opened, r, true);
            } else {
                T::open(row, cols, start, opened, r, false);
            }
        }
        if by_nibbles {
            turn_nibbles::<T>(rows, start, groups, &mut *to, i);
        } else {
            for m in 0..groups.div_ceil(2) {
                for quarter in 0..4 {
                    let four = transposed(|r| (&raw const (*opened).codes[r][m]).cast::<__m128i>().add(quarter));
                    for (j, four) in four.into_iter().enumerate() {
                        let (g, k) = T::place(cols, start, m, 4 * quarter + j);
                        (*to).codes[g][k][i] = four;
                    }
                }
            }
        }
        let parts = if T::HALVES { 2 } else { 1 };
        for g in 0..groups {
            for part in 0..parts {
                // Less the sum of the codes times 128.
                let mut sum = _mm512_setzero_si512();
                for k in part * 8 / parts..(part + 1) * 8 / parts {
                    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), (*to).codes[g][k][i]);
                }
                let begin = _mm512_set1_epi32(if T::WIDE { 0 } else { MAGIC.to_bits() as i32 });
                (*to).start[g][part][i] = _mm512_sub_epi32(begin, sum);
            }
        }
        for m in 0..groups.div_ceil(8) {
            for quarter in 0..4 {
                if T::place_of_scale(cols, start, m, 4 * quarter).is_none() {
                    continue;
                }
                let scales = transposed(|r| (&raw const (*opened).scales[r][m]).cast::<__m128i>().add(quarter));
                for (j, scale) in scales.into_iter().enumerate() {
                    let Some((g, part)) = T::place_of_scale(cols, start, m, 4 * quarter + j) else { continue };
                    let scale = _mm512_castsi512_ps(scale);
                    (*to).scale[g][part][i] = scale;
                    (*to).magic[g][part][i] = _mm512_mul_ps(scale, _mm512_set1_ps(MAGIC));
                }
                if T::MINS {
                    let mins = transposed(|r| (&raw const (*opened).mins[r][m]).cast::<__m128i>().add(quarter));
                    for (j, min) in mins.into_iter().enumerate() {
                        let Some((g, part)) = T::place_of_scale(cols, start, m, 4 * quarter + j) else { continue };
                        (*to).min[g][part][i] = _mm512_castsi512_ps(min);
                    }
                }
            }
        }
    }
}

/// Turns the codes of `groups` groups of 32, four bits each, of 16 rows, and takes them apart then.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn turn_nibbles<T: Source>(rows: &[*const u8], start: usize, groups: usize, to: &mut Panel, i: usize) {
    for n in 0..groups {
        let at = T::nibbles(start, n);
        // SAFETY: the caller promises the rows' bytes.
        unsafe {
            let turned = transposed(|r| rows[r.min(rows.len() - 1)].add(at).cast());
            for (j, bytes) in turned.into_iter().enumerate() {
                for (high, nibbles) in [bytes, _mm512_srli_epi16::<4>(bytes)].into_iter().enumerate() {
                    let (g, k) = T::place_of_nibbles(n, j, high);
                    to.codes[g][k][i] = T::of_nibbles(_mm512_and_si512(nibbles, _mm512_set1_epi8(15)));
                }
            }
        }
    }
}

/// Four lanes of 16 rows, of which `of` says where row r has them, as four registers with a lane for each row.
#[inline(always)]
unsafe fn transposed(of: impl Fn(usize) -> *const __m128i) -> [__m512i; 4] {
    // SAFETY: the caller's promises.
    unsafe { transpose(std::array::from_fn(of)) }
}

#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn transpose(rows: [*const __m128i; LANES]) -> [__m512i; 4] {
    let mut lanes = [_mm512_setzero_si512(); 4];
    for r in 0..4 {
        // SAFETY: the caller promises 16 bytes of each row.
        unsafe {
            let at = |i: usize| _mm_loadu_si128(rows[r + 4 * i]);
            let one = _mm512_castsi128_si512(at(0));
            let two = _mm512_mask_broadcast_i32x4(one, 0x00f0, at(1));
            let three = _mm512_mask_broadcast_i32x4(two, 0x0f00, at(2));
            lanes[r] = _mm512_mask_broadcast_i32x4(three, 0xf000, at(3));
        }
    }
    by_lane(lanes)
}
