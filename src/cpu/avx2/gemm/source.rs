//! From rows of weights to a strip's panel.

use super::LANES;
use super::tile::{FOURS, NUMBERS, PAIRS, Panel, SEVENS, SEVENS_STARTS, SPLIT};
use crate::cpu::arch::*;
use crate::cpu::avx2::blocks::source::{SLOTS, Source as Spans, blocks_left, there};
use crate::cpu::avx2::load_f16;
use crate::cpu::columns::BLOCK;
use crate::cpu::gemm::{self, DEPTH, GROUPS, MAGIC};
use crate::formats::blocks::{Block, BlockType};
use crate::formats::rows::{GROUP, PACK};
use std::mem::MaybeUninit;
use std::ops::Range;

/// [`DEPTH`] numbers of 8 rows, unpacked row by row.
#[repr(C, align(64))]
pub struct Opened {
    /// Signed codes.
    codes: [[__m256i; DEPTH / 32]; LANES],
    /// Scales as they come, and what is added.
    scales: [[__m256; 4]; LANES],
    added: [[__m256; 4]; LANES],
}

/// A type of weights.
///
/// # Safety
/// For all functions: what is named of the row can be read, and the CPU has AVX2, FMA and F16C.
pub trait Source {
    /// What it has, as `tile` counts it.
    const KIND: u8;

    /// Whether fewer than [`DEPTH`] numbers cannot be opened, but at a row's end.
    const PACKED: bool = false;

    /// Registers of scales for 256 numbers.
    const SCALES: usize;

    /// Where the bytes of `numbers` of a row of `cols` lie, without what lies apart from them.
    fn piece(cols: usize, numbers: Range<usize>) -> Range<usize>;

    /// Unpacks `numbers` into row `r`; what is behind the row's end becomes anything finite.
    unsafe fn open(row: *const u8, cols: usize, numbers: Range<usize>, to: *mut Opened, r: usize);

    /// Where the four codes at lane `lane` of register `m` of `numbers` belong: their group, and their place among its eight.
    fn place(cols: usize, numbers: &Range<usize>, m: usize, lane: usize) -> (usize, usize);

    /// To which group and half the scale at lane `lane` of register `m` belongs.
    fn place_of_scale(m: usize, lane: usize) -> (usize, usize);
}

impl<T: Spans + Block> Source for T {
    const KIND: u8 = {
        let halves = if T::HALVES { gemm::HALVES } else { 0 };
        let mins = if has_minima(T::TYPE) { gemm::MINS } else { 0 };
        let split = if matches!(T::TYPE, BlockType::Q5_1 | BlockType::Q5_K) { SPLIT } else { 0 };
        halves | mins | split | if matches!(T::TYPE, BlockType::MXFP4) { gemm::WIDE } else { 0 }
    };
    const SCALES: usize = if T::HALVES { 2 } else { 1 };

    #[inline]
    fn piece(_: usize, numbers: Range<usize>) -> Range<usize> {
        numbers.start / T::NUMBERS * T::BYTES..numbers.end / T::NUMBERS * T::BYTES
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn open(row: *const u8, cols: usize, numbers: Range<usize>, to: *mut Opened, r: usize) {
        for span in 0..numbers.len().div_ceil(BLOCK) {
            let whole = T::NUMBERS == BLOCK || numbers.start + (span + 1) * BLOCK <= cols;
            // SAFETY: the caller's promises.
            unsafe {
                let at = row.add((numbers.start / BLOCK + span) * T::SPAN);
                if whole {
                    open_span::<T>(at, 7, span, to, r);
                } else {
                    open_last::<T>(at, blocks_left::<T>(cols) - 1, span, to, r);
                }
            }
        }
    }

    #[inline]
    fn place(_: usize, _: &Range<usize>, m: usize, lane: usize) -> (usize, usize) {
        (m, lane)
    }

    #[inline]
    fn place_of_scale(m: usize, lane: usize) -> (usize, usize) {
        if T::HALVES { (m * 4 + lane / 2, lane % 2) } else { (m * 8 + SLOTS[lane], 0) }
    }
}

/// Whether a type's factors have minima.
const fn has_minima(kind: BlockType) -> bool {
    use BlockType::*;
    matches!(kind, Q4_1 | Q5_1 | Q2_K | Q4_K | Q5_K)
}

#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn open_span<T: Spans>(at: *const u8, last: usize, span: usize, to: *mut Opened, r: usize) {
    let offset = _mm256_set1_epi8(if T::SIGNED { 0 } else { T::OFFSET });
    // SAFETY: the caller's promises.
    unsafe {
        each_32!(|K| {
            (*to).codes[r][8 * span + K] = _mm256_sub_epi8(T::codes(at, there(K, last)), offset);
        });
        let factors = T::factors(at, last);
        let each = if T::HALVES { 2 } else { 1 };
        for half in 0..each {
            (*to).scales[r][each * span + half] = factors.scales[half];
            if let Some(mins) = factors.mins {
                (*to).added[r][each * span + half] = mins[half];
            }
        }
    }
}

/// [`open_span`] of which blocks are missing.
#[inline(never)]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn open_last<T: Spans>(at: *const u8, last: usize, span: usize, to: *mut Opened, r: usize) {
    // SAFETY: the caller's promises.
    unsafe { open_span::<T>(at, last, span, to, r) };
}

/// Where the whole pack begins of which these numbers of a row are all or a half: in a pack, even registers have the numbers of its first
/// half. `None` at the row's end, where there are fewer.
#[inline]
fn pack_of(cols: usize, numbers: &Range<usize>) -> Option<usize> {
    let pack = numbers.start / PACK * PACK;
    (cols - pack >= PACK).then_some(pack)
}

/// Rows of our own form, q8_0 or (FOUR) q4_0, of which less than a whole pack can be opened in q8_0 alone.
pub struct Packs<const FOUR: bool>;

impl<const FOUR: bool> Source for Packs<FOUR> {
    const KIND: u8 = 0;
    const PACKED: bool = FOUR;
    const SCALES: usize = 1;

    #[inline]
    fn piece(cols: usize, numbers: Range<usize>) -> Range<usize> {
        let bytes = |numbers: usize| if FOUR { numbers / 2 } else { numbers };
        match pack_of(cols, &numbers) {
            Some(pack) => bytes(pack)..bytes(pack + PACK),
            None => bytes(numbers.start)..bytes(numbers.end),
        }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn open(row: *const u8, cols: usize, numbers: Range<usize>, to: *mut Opened, r: usize) {
        let (start, groups, pack) = (numbers.start, numbers.len() / GROUP, pack_of(cols, &numbers));
        let (low, eight) = (_mm256_set1_epi8(15), _mm256_set1_epi8(8));
        // SAFETY: the caller's promises.
        unsafe {
            let codes = row.add(pack.unwrap_or(start) / if FOUR { 2 } else { 1 });
            let mut scales = [0u16; GROUPS];
            let from = row.add(if FOUR { cols / 2 } else { cols } + start / GROUP * 2).cast::<u16>();
            std::ptr::copy_nonoverlapping(from, scales.as_mut_ptr(), groups);
            (*to).scales[r][0] = load_f16(scales.as_ptr());
            (*to).scales[r][1] = load_f16(scales.as_ptr().add(8));
            for m in 0..groups {
                (*to).codes[r][m] = match pack {
                    Some(pack) if !FOUR => {
                        let m = if groups == GROUPS { m } else { 2 * m + (start - pack) / (PACK / 2) };
                        _mm256_loadu_si256(codes.add(32 * m).cast())
                    }
                    None if !FOUR => _mm256_loadu_si256(codes.add(32 * m).cast()),
                    Some(_) => {
                        // Registers of 64 bytes have two halves, and come in pairs of low and high bits.
                        let pair = _mm256_loadu_si256(codes.add(m / 4 * 64 + m % 2 * 32).cast());
                        let four = if (m / 2).is_multiple_of(2) { pair } else { _mm256_srli_epi16::<4>(pair) };
                        _mm256_sub_epi8(_mm256_and_si256(four, low), eight)
                    }
                    None => {
                        let bytes = _mm_loadu_si128(codes.add(16 * m).cast());
                        let four = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
                        _mm256_sub_epi8(_mm256_and_si256(four, low), eight)
                    }
                };
            }
        }
    }

    #[inline]
    fn place(cols: usize, numbers: &Range<usize>, m: usize, lane: usize) -> (usize, usize) {
        match pack_of(cols, numbers) {
            Some(_) if numbers.len() == PACK => (m % 2 * 8 + lane, m / 2),
            Some(_) => (lane, m),
            None => (m, lane),
        }
    }

    #[inline]
    fn place_of_scale(m: usize, lane: usize) -> (usize, usize) {
        (m * 8 + lane, 0)
    }
}

/// Unpacks `numbers` of at most 8 rows into registers `i` of the panel, in a form of `tile`. Of missing rows it takes the last.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
pub unsafe fn unpack<T: Source, const FORM: u8>(
    rows: &[*const u8],
    cols: usize,
    numbers: Range<usize>,
    to: *mut Panel,
    i: usize,
) {
    let mut opened = MaybeUninit::<Opened>::uninit();
    let opened = opened.as_mut_ptr();
    let groups = numbers.len() / GROUP;
    // SAFETY: the caller's promises; what is read of `opened` was written.
    unsafe {
        for r in 0..LANES {
            T::open(rows[r.min(rows.len() - 1)], cols, numbers.clone(), opened, r);
        }
        for m in 0..groups {
            for half in 0..2 {
                let fours = transposed((&raw const (*opened).codes[0][m]).cast::<__m128i>().add(half), DEPTH / 16);
                for (j, four) in fours.into_iter().enumerate() {
                    let (g, k) = T::place(cols, &numbers, m, 4 * half + j);
                    if FORM == NUMBERS {
                        let at = &mut (*to).codes[2 * g + k / 4];
                        at[2 * (k % 4)][i] = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(four));
                        at[2 * (k % 4) + 1][i] = _mm256_srai_epi16::<8>(four);
                    } else {
                        (*to).codes[if FORM == SEVENS { 2 * g } else { g }][k][i] = four;
                    }
                }
            }
        }
        for g in 0..groups {
            if FORM == SEVENS {
                begin_sevens(&mut *to, g, i);
            } else {
                begin::<FORM>(&mut *to, T::KIND, g, i);
            }
        }
        for m in 0..(T::SCALES * groups).div_ceil(8) {
            for half in 0..2 {
                let row = |of: *const [__m256; 4]| of.cast::<__m128i>().add(2 * m + half);
                let scales = transposed(row(&raw const (*opened).scales[0]), 8);
                for (j, scale) in scales.into_iter().enumerate() {
                    let (g, part) = T::place_of_scale(m, 4 * half + j);
                    let scale = _mm256_castsi256_ps(scale);
                    (*to).scaling[part][g].scale[i] = scale;
                    if FORM == FOURS {
                        (*to).scaling[part][g].magic[i] = _mm256_mul_ps(scale, _mm256_set1_ps(MAGIC));
                    }
                }
                if T::KIND & gemm::MINS != 0 {
                    let added = transposed(row(&raw const (*opened).added[0]), 8);
                    for (j, added) in added.into_iter().enumerate() {
                        let (g, part) = T::place_of_scale(m, 4 * half + j);
                        (*to).scaling[part][g].added[i] = _mm256_castsi256_ps(added);
                    }
                }
            }
        }
    }
}

/// What the sums of group `g` begin with, as [`Scaling::start`] says.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
fn begin<const FORM: u8>(to: &mut Panel, kind: u8, g: usize, i: usize) {
    let parts = if kind & (gemm::HALVES | if FORM == PAIRS { SPLIT } else { 0 }) != 0 { 2 } else { 1 };
    for part in 0..parts {
        let with_magic = FORM == FOURS && kind & gemm::WIDE == 0;
        let mut sum = _mm256_set1_epi32(if with_magic { MAGIC.to_bits() as i32 } else { 0 });
        for k in part * 8 / parts..(part + 1) * 8 / parts {
            sum = match FORM {
                NUMBERS => {
                    let [even, odd] = [0, 1].map(|j| to.codes[2 * g + k / 4][2 * (k % 4) + j][i]);
                    let pairs = _mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(128));
                    _mm256_sub_epi32(sum, pairs)
                }
                _ => {
                    // Two codes of -128 are as large as they can be: 256.
                    let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), to.codes[g][k][i]);
                    match FORM {
                        PAIRS => _mm256_sub_epi16(sum, _mm256_slli_epi16::<7>(pairs)),
                        _ => _mm256_sub_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(128))),
                    }
                }
            };
        }
        to.scaling[part][g].start[i] = sum;
    }
}

/// What the sums of group `g` begin with as [`SEVENS`]: less 64 times the codes of each two fours.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
fn begin_sevens(to: &mut Panel, g: usize, i: usize) {
    for k in 0..SEVENS_STARTS {
        let pairs = |k: usize| _mm256_maddubs_epi16(_mm256_set1_epi8(1), to.codes[2 * g][k][i]);
        let sum = _mm256_add_epi16(pairs(2 * k), pairs(2 * k + 1));
        to.codes[2 * g + 1][k][i] = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16::<6>(sum));
    }
}

/// Four lanes of 8 rows, `stride` times 16 bytes apart, as four registers with a lane for each row.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn transposed(first: *const __m128i, stride: usize) -> [__m256i; 4] {
    // SAFETY: the caller promises 16 bytes of each row.
    let both = |r: usize| unsafe {
        _mm256_set_m128i(_mm_load_si128(first.add((r + 4) * stride)), _mm_load_si128(first.add(r * stride)))
    };
    let (a, b, c, d) = (both(0), both(1), both(2), both(3));
    let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
    let (ab_high, cd_high) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
    [
        _mm256_unpacklo_epi64(ab, cd),
        _mm256_unpackhi_epi64(ab, cd),
        _mm256_unpacklo_epi64(ab_high, cd_high),
        _mm256_unpackhi_epi64(ab_high, cd_high),
    ]
}
