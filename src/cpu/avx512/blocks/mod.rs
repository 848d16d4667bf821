//! Dots and axpys over GGUF's blocks as they lie in the file.
//!
//! Every type is numbers `scale * code - min`, with a scale and a minimum for 16 or 32 numbers and codes that are, or are made, unsigned.
//! A type says how 256 of its numbers become registers ([`Unpack`]); the rest is written once. In a dot each lane of 32 bits belongs to one
//! group of 16 numbers (`LaneBlock`), so the products of 256 numbers add up in four instructions before they are scaled.

mod by_32;
mod iq4_nl;
mod iq4_xs;
mod k_scales;
mod levels;
mod mxfp4;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod small;

pub(super) use k_scales::eight as scales_of_k;

use super::axpy::axpy_bf16;
use super::{AHEAD, BF16, BLOCKS_AHEAD, DEPTH, dot_float, prefetch, reduce};
use crate::cpu::arch::*;
use crate::cpu::columns::{BLOCK, BLOCK_GROUP, LaneBlock, group_of_lane};
use crate::cpu::{Axpy, Columns, Dot, Rows, portable, whole_rows};
use crate::formats::blocks::{self, Block, BlockType};
use std::hint::black_box;
use std::mem::MaybeUninit;

/// The products of a row with some columns from `first` on, which go to `y` and `stride` numbers behind it; bytes ahead as in [`Rows`].
///
/// # Safety
/// As [`Dot`], for one row.
pub(super) type Few = unsafe fn(row: *const u8, x: &Columns, first: usize, ahead: usize, y: *mut f32, stride: usize);

/// A block type as registers of 256 numbers: one block, or eight of 32.
///
/// # Safety
/// For all functions: at `at` stand blocks of 256 numbers, and the CPU has the instructions.
pub(super) trait Unpack: Block + Sized {
    /// Bytes of 256 numbers.
    const STEP: usize = BLOCK / Self::NUMBERS * Self::BYTES;

    /// If the minimum of each group is this many times its scale: what a number's code is more than the number is scales.
    const BIAS: Option<i8> = None;

    /// By how much codes are too large, where scales and minima amount to that and no more.
    const EXCESS: Option<i8> = Self::BIAS;

    /// The products with one to four columns, each with the same bits however many there are.
    const FEW: [Few; 4] = [dot_row::<Self, 1>, dot_row::<Self, 2>, dot_row::<Self, 3>, dot_row::<Self, 4>];

    /// Whether each 16 numbers have a scale of their own.
    const BY_16: bool = false;

    /// Whether scales may be beyond what f16 times a byte can be.
    const WIDE_SCALES: bool = false;

    /// Scales and minima.
    unsafe fn scales(at: *const u8) -> Scales;

    /// The codes as unsigned bytes in their own order.
    unsafe fn codes(at: *const u8) -> [__m512i; 4];

    /// Where the codes lie if they have four bits: for products with many columns rows are turned before such codes are taken apart.
    const NIBBLES: Option<Nibbles> = None;

    /// Whether scales by 16 can be put into the codes, as [`Unpack::signed`] then does, so that minima alone are by 16.
    const FOLDS: bool = false;

    /// Codes without their excess, in their own order, and what they are multiplied by, for products with many columns.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn signed(at: *const u8) -> ([__m512i; 4], Scales) {
        // SAFETY: the caller's promises.
        let (mut codes, scales) = unsafe { (Self::codes(at), Self::scales(at)) };
        if let Some(excess) = Self::EXCESS {
            for k in 0..4 {
                codes[k] = _mm512_sub_epi8(codes[k], _mm512_set1_epi8(excess));
            }
        }
        (codes, scales)
    }

    /// The codes by lane, as [`LaneBlock::codes`].
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn lanes(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        by_lane(unsafe { Self::codes(at) })
    }

    /// Adds the numbers times `a` to 256 numbers at `out`.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn add(at: *const u8, a: __m512, out: *mut f32) {
        // SAFETY: the caller's promises.
        unsafe {
            let mut codes = Self::codes(at);
            if let Some(bias) = Self::BIAS {
                codes = codes.map(|codes| _mm512_sub_epi8(codes, _mm512_set1_epi8(bias)));
            }
            let scales = Self::scales(at).times(a);
            // From memory, where a broadcast costs nothing: of registers the compiler would make shuffles.
            let (codes, scales) = black_box((&codes, &scales));
            for g in 0..BLOCK / BLOCK_GROUP {
                let out = out.add(g * BLOCK_GROUP);
                let bytes = codes.as_ptr().cast::<__m128i>().add(g);
                add_codes::<Self>(bytes, g, scales, out);
            }
        }
    }
}

/// Codes of four bits: 16 bytes for each 32 numbers of a step.
pub(super) struct Nibbles {
    /// Where the first of them lie.
    pub(super) head: usize,
    /// Bytes from one to the next.
    pub(super) apart: usize,
    /// Whether the high halves of the bytes belong to the next group of 32, and not to the second half of the same.
    pub(super) next_group: bool,
    /// What they stand for, if not for themselves less their excess.
    pub(super) levels: Option<&'static [i8; 16]>,
}

impl Nibbles {
    /// Those of blocks of 32, whose head and size are given, and other types whose 16 bytes are one group.
    pub(super) const fn by_32(head: usize, apart: usize) -> Nibbles {
        Nibbles { head, apart, next_group: false, levels: None }
    }
}

/// Adds group `g` to 16 numbers at `out`. The codes stand at `bytes`, signed if the type has a bias.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn add_codes<T: Unpack>(bytes: *const __m128i, g: usize, scales: &Scales, out: *mut f32) {
    // SAFETY: the caller promises the numbers and that `g` is below 16.
    unsafe {
        let (bytes, sum) = (_mm_loadu_si128(bytes), _mm512_loadu_ps(out));
        let (codes, sum) = if T::BIAS.is_some() {
            (_mm512_cvtepi8_epi32(bytes), sum)
        } else {
            (_mm512_cvtepu8_epi32(bytes), _mm512_sub_ps(sum, of_group(&scales.min, g)))
        };
        _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes), of_group(&scales.scale, g), sum));
    }
}

/// What 16 groups of 16 numbers share, by lane (`columns::group_of_lane`): number = scale * code - min.
#[derive(Clone, Copy)]
pub(super) struct Scales {
    pub(super) scale: __m512,
    pub(super) min: __m512,
}

impl Scales {
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f"))]
    fn times(self, a: __m512) -> Scales {
        Scales { scale: _mm512_mul_ps(self.scale, a), min: _mm512_mul_ps(self.min, a) }
    }
}

/// 256 numbers, unpacked, with their codes by lane or in their own order.
#[derive(Clone, Copy)]
struct Weights {
    codes: [__m512i; 4],
    scales: Scales,
}

/// Transposes the 4 by 4 lanes in each quarter of four registers, which takes codes from their own order to that by lane.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f"))]
pub(super) fn by_lane([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
    let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(ab, cd),
        _mm512_unpackhi_epi64(ab, cd),
        _mm512_unpacklo_epi64(ab_high, cd_high),
        _mm512_unpackhi_epi64(ab_high, cd_high),
    ]
}

/// A constant register: an i32 for each of 16 lanes.
macro_rules! lanes {
    (|$lane:ident| $value:expr) => {
        const {
            let mut lanes = [0i32; 16];
            let mut $lane = 0usize;
            while $lane < 16 {
                lanes[$lane] = $value as i32;
                $lane += 1;
            }
            // SAFETY: both are 64 bytes without rules.
            unsafe { std::mem::transmute::<[i32; 16], __m512i>(lanes) }
        }
    };
}
use lanes;

macro_rules! block_kernels {
    ($($name:ident),*) => {
        /// The dots of all block types.
        pub(super) const fn dots<const FAR: bool>() -> [Dot; BlockType::COUNT] {
            let mut dots = portable::BLOCK_DOTS;
            dots[BlockType::BF16 as usize] = dot_float::<BF16, FAR>;
            $(dots[BlockType::$name as usize] = dot::<blocks::$name, FAR>;)*
            dots
        }

        /// The axpys of all block types.
        pub(super) const fn axpys<const FAR: bool>() -> [Axpy; BlockType::COUNT] {
            let mut axpys = portable::BLOCK_AXPYS;
            axpys[BlockType::BF16 as usize] = axpy_bf16::<FAR>;
            $(axpys[BlockType::$name as usize] = axpy::<blocks::$name, FAR>;)*
            axpys
        }
    };
}
block_kernels!(Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4);

/// Most bytes of 256 numbers: those of q8_0.
pub(super) const MAX_STEP: usize = 272;

/// Where step `i` of a row of `cols` numbers can be read.
#[inline]
pub(super) unsafe fn step<T: Unpack>(row: *const u8, i: usize, cols: usize, tail: &mut [u8; MAX_STEP]) -> *const u8 {
    let at = row.wrapping_add(i * T::STEP);
    let left = cols - i * BLOCK;
    if T::NUMBERS == BLOCK || left >= BLOCK {
        return at;
    }
    let bytes = left / T::NUMBERS * T::BYTES;
    // SAFETY: what is left of the row; the caller promises it.
    unsafe { std::ptr::copy_nonoverlapping(at, tail.as_mut_ptr(), bytes) };
    tail.as_ptr()
}

/// Prefetches what lies `ahead` bytes behind step `i` of a row. It names some lines twice: to find out which ones took longer than that
/// (q4_k came at 77 instead of 82 % of what loads alone read).
#[inline]
fn prefetch_step<T: Unpack>(row: *const u8, i: usize, ahead: usize) {
    (0..T::STEP).step_by(64).for_each(|line| prefetch(row.wrapping_add(i * T::STEP + line + ahead)));
}

/// Up to so many columns a row is read from memory for the first four and from L1 for the others. From then on rows are unpacked into L1 for
/// all columns, with nothing asked for ahead: 8 columns of Q4_K_M took two threads of a Zen 4 56 ms and 71 that way, 5 columns 41 and 54.
const BY_ROW: usize = 8;

/// The dot kernel for rows of one block type.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn dot<T: Unpack, const FAR: bool>(rows: Rows, count: usize, x: &Columns, y: *mut f32, stride: usize) {
    if x.n > BY_ROW {
        // SAFETY: the caller's promises.
        return unsafe { dot_many::<T>(rows, count, x, y, stride) };
    }
    // Of neurons that were chosen the next one is known.
    let ahead = match rows.ahead {
        ahead if FAR => whole_rows(ahead, AHEAD),
        0 => BLOCKS_AHEAD,
        ahead => ahead,
    };
    for r in 0..count {
        tiles!(x.n, [4, 3, 2, 1], |N, b| {
            // SAFETY: the caller's promises.
            unsafe { (T::FEW[N - 1])(rows.row(r), x, b, ahead, y.add(b * stride + r), stride) };
        });
    }
}

/// The [`Few`] of N columns, of types without kernels of their own.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn dot_row<T: Unpack, const N: usize>(
    row: *const u8,
    x: &Columns,
    first: usize,
    ahead: usize,
    y: *mut f32,
    stride: usize,
) {
    let xs: [*const LaneBlock; N] = std::array::from_fn(|b| x.lane_blocks(first + b).as_ptr());
    let mut sums = [[_mm512_setzero_ps(); N]];
    let mut tail = [0; MAX_STEP];
    for i in 0..x.cols.div_ceil(BLOCK) {
        prefetch_step::<T>(row, i, ahead);
        // SAFETY: a step of the row, and columns are padded to whole steps.
        unsafe {
            let at = step::<T>(row, i, x.cols, &mut tail);
            let weights = Weights { codes: T::lanes(at), scales: T::scales(at) };
            multiply([&weights], xs, i, &mut sums);
        }
    }
    // SAFETY: the caller's promises.
    reduce(&sums)[0].iter().enumerate().for_each(|(b, sum)| unsafe { *y.add(b * stride) = *sum });
}

/// sums += products of 256 numbers of R rows with block `i` of N columns.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn multiply<const R: usize, const N: usize>(
    weights: [&Weights; R],
    xs: [*const LaneBlock; N],
    i: usize,
    sums: &mut [[__m512; N]; R],
) {
    let mut dots = [[_mm512_setzero_si512(); N]; R];
    // SAFETY: the caller promises block `i` of each column.
    unsafe {
        for k in 0..4 {
            for b in 0..N {
                let input = _mm512_load_si512((&raw const (*xs[b].add(i)).codes[k]).cast());
                for r in 0..R {
                    dots[r][b] = _mm512_dpbusd_epi32(dots[r][b], weights[r].codes[k], input);
                }
            }
        }
        for b in 0..N {
            let steps = _mm512_load_ps((&raw const (*xs[b].add(i)).steps).cast());
            let totals = _mm512_load_ps((&raw const (*xs[b].add(i)).sums).cast());
            for r in 0..R {
                let Scales { scale, min } = weights[r].scales;
                sums[r][b] = _mm512_fnmadd_ps(min, totals, sums[r][b]);
                sums[r][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][b]), _mm512_mul_ps(scale, steps), sums[r][b]);
            }
        }
    }
}

/// Steps of a row that are unpacked before they meet all columns: three rows of them stay in L1.
const STEPS: usize = DEPTH / BLOCK;

/// [`dot`] for many columns: rows are unpacked once for all of them. Tiles of 3 by 4 and 4 by 3 hold their sums and products in registers
/// and are as fast; of two rows, which is what the FFN of a few columns has, the first are faster. Tiles of 4 by 4 took half as long again.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn dot_many<T: Unpack>(rows: Rows, count: usize, x: &Columns, y: *mut f32, stride: usize) {
    let steps = x.cols.div_ceil(BLOCK);
    for start in (0..steps).step_by(STEPS) {
        let range = (start, steps.min(start + STEPS));
        tiles!(count, [3, 2, 1], |R, r| {
            // SAFETY: the caller's promises; the tile sees only what was unpacked.
            unsafe {
                let mut weights = [[const { MaybeUninit::uninit() }; STEPS]; R];
                for (k, weights) in weights.iter_mut().enumerate() {
                    unpack_range::<T>(rows.row(r + k), range, x.cols, weights);
                }
                tiles!(x.n, [4, 3, 2, 1], |N, b| {
                    let sums = tile::<R, N>(&weights, x, b, range);
                    for (k, sums) in sums.iter().enumerate() {
                        for (c, sum) in sums.iter().enumerate() {
                            let y = y.add((b + c) * stride + r + k);
                            *y = if start == 0 { *sum } else { *y + *sum };
                        }
                    }
                });
            }
        });
    }
}

/// Steps `range` of a row, unpacked.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn unpack_range<T: Unpack>(
    row: *const u8,
    (start, end): (usize, usize),
    cols: usize,
    to: &mut [MaybeUninit<Weights>; STEPS],
) {
    let mut tail = [0; MAX_STEP];
    for (i, to) in (start..end).zip(to) {
        // SAFETY: a step of the row.
        unsafe {
            let at = step::<T>(row, i, cols, &mut tail);
            to.write(Weights { codes: T::lanes(at), scales: T::scales(at) });
        }
    }
}

/// Products of steps `range` of R rows with N columns.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn tile<const R: usize, const N: usize>(
    weights: &[[MaybeUninit<Weights>; STEPS]; R],
    x: &Columns,
    first: usize,
    (start, end): (usize, usize),
) -> [[f32; N]; R] {
    let xs: [*const LaneBlock; N] = std::array::from_fn(|b| x.lane_blocks(first + b).as_ptr());
    let mut sums = [[_mm512_setzero_ps(); N]; R];
    for i in start..end {
        // SAFETY: the caller has unpacked the range.
        unsafe {
            let weights = std::array::from_fn(|r| weights[r][i - start].assume_init_ref());
            multiply::<R, N>(weights, xs, i, &mut sums);
        }
    }
    reduce(&sums)
}

/// The axpy kernel for rows of one block type.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn axpy<T: Unpack, const FAR: bool>(rows: &[*const u8], ahead: usize, a: &[f32], cols: usize, out: &mut [f32]) {
    let n = out.len() / cols;
    // Rows for several columns have been read by `touch`.
    let ahead = if FAR && n == 1 { whole_rows(ahead, AHEAD) } else { 0 };
    if n == 1 {
        for (row, a) in rows.iter().zip(a) {
            // SAFETY: the caller's promises.
            unsafe { add_row::<T>(*row, ahead, *a, out) };
        }
        return;
    }
    tiles!(rows.len(), [4, 2, 1], |R, r| {
        let rows: [*const u8; R] = std::array::from_fn(|k| rows[r + k]);
        // SAFETY: the caller's promises.
        unsafe { add_rows_to_many::<T, R>(rows, &a[r * n..], cols, out) };
    });
}

/// out += a * row.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn add_row<T: Unpack>(row: *const u8, ahead: usize, a: f32, out: &mut [f32]) {
    let a = _mm512_set1_ps(a);
    let whole = out.len() / BLOCK;
    for i in 0..whole {
        if ahead != 0 {
            prefetch_step::<T>(row, i, ahead);
        }
        // SAFETY: a step of the row and its numbers.
        unsafe { T::add(row.add(i * T::STEP), a, out.as_mut_ptr().add(i * BLOCK)) };
    }
    let rest = &mut out[whole * BLOCK..];
    if !rest.is_empty() {
        let mut numbers = [0.0; BLOCK];
        numbers[..rest.len()].copy_from_slice(rest);
        let mut tail = [0; MAX_STEP];
        // SAFETY: what is left of the row, with zeros behind it.
        unsafe {
            let at = step::<T>(row, whole, whole * BLOCK + rest.len(), &mut tail);
            T::add(at, a, numbers.as_mut_ptr());
        }
        rest.copy_from_slice(&numbers[..rest.len()]);
    }
}

/// The codes of group `g`, of codes in their own order.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn codes_of_group(codes: &[__m512i; 4], g: usize) -> __m512 {
    // SAFETY: the caller promises that `g` is below 16.
    let codes = unsafe { _mm_load_si128((&raw const *codes).cast::<__m128i>().add(g)) };
    _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes))
}

/// What belongs to group `g` of scales by lane.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f"))]
unsafe fn of_group(by_lane: &__m512, g: usize) -> __m512 {
    // SAFETY: the caller promises that `g`, and so its lane, is below 16.
    _mm512_set1_ps(unsafe { *(&raw const *by_lane).cast::<f32>().add(group_of_lane(g)) })
}

/// out[b] += sum of a[r * n + b] * row r, for n columns.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn add_rows_to_many<T: Unpack, const R: usize>(rows: [*const u8; R], a: &[f32], cols: usize, out: &mut [f32]) {
    let n = out.len() / cols;
    let mut tail = [0; MAX_STEP];
    for i in 0..cols.div_ceil(BLOCK) {
        let mut weights = [const { MaybeUninit::uninit() }; R];
        // SAFETY: steps of the rows, and of the output only numbers that it has.
        unsafe {
            for r in 0..R {
                let at = step::<T>(rows[r], i, cols, &mut tail);
                weights[r].write(Weights { codes: T::codes(at), scales: T::scales(at) });
            }
            let weights = black_box(&weights).each_ref().map(|weights| weights.assume_init_ref());
            let start = i * BLOCK;
            for g in 0..(cols - start).min(BLOCK) / BLOCK_GROUP {
                let mut numbers = [_mm512_setzero_ps(); R];
                for r in 0..R {
                    let Scales { scale, min } = &weights[r].scales;
                    numbers[r] =
                        _mm512_fmsub_ps(codes_of_group(&weights[r].codes, g), of_group(scale, g), of_group(min, g));
                }
                for b in 0..n {
                    let out = out.as_mut_ptr().add(b * cols + start + g * BLOCK_GROUP);
                    let mut sum = _mm512_loadu_ps(out);
                    for r in 0..R {
                        sum = _mm512_fmadd_ps(_mm512_set1_ps(*a.get_unchecked(r * n + b)), numbers[r], sum);
                    }
                    _mm512_storeu_ps(out, sum);
                }
            }
        }
    }
}

/// The f16 at `at`, in all lanes.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn f16_everywhere(at: *const u8) -> __m512 {
    // SAFETY: the caller's promises.
    _mm512_cvtph_ps(_mm256_set1_epi16(unsafe { at.cast::<i16>().read_unaligned() }))
}

/// 16 bytes in the order of their groups' lanes.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn bytes_by_lane(at: *const u8) -> __m128i {
    // SAFETY: the caller's promises.
    let bytes = unsafe { _mm_loadu_si128(at.cast()) };
    _mm_shuffle_epi8(bytes, _mm512_cvtepi32_epi8(lanes!(|lane| group_of_lane(lane))))
}

/// 32 bytes in both halves.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn twice(at: *const u8) -> __m512i {
    // SAFETY: the caller's promises.
    _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(at.cast()) })
}

/// Adds what 16 bytes of two codes of 4 bits each mean to 16 numbers at `low` and 16 at `high`, from a table for either.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn add_nibbles(bytes: *const u8, tables: [__m512; 2], low: *mut f32, high: *mut f32) {
    // SAFETY: the caller's promises.
    unsafe {
        // A permutation sees the four lowest bits alone.
        let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.cast()));
        _mm512_storeu_ps(low, _mm512_add_ps(_mm512_loadu_ps(low), _mm512_permutexvar_ps(codes, tables[0])));
        let codes = _mm512_srli_epi32::<4>(codes);
        _mm512_storeu_ps(high, _mm512_add_ps(_mm512_loadu_ps(high), _mm512_permutexvar_ps(codes, tables[1])));
    }
}

/// For each bit: that of `yes` where `mask` has one, else that of `no`.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f"))]
fn select(mask: __m512i, yes: __m512i, no: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0xCA>(mask, yes, no)
}
