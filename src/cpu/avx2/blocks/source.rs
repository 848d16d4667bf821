//! What the loops over blocks take: a block type by spans.

use crate::cpu::arch::*;
use crate::cpu::columns::BLOCK;
use crate::formats::blocks::Block;

/// Groups of 32 of a span in the order in which their scales are kept: what stands twice among numbers by 16 then comes out of one
/// shuffle within lanes, and goes back by another. The order is its own inverse.
pub const SLOTS: [usize; 8] = [0, 1, 4, 5, 2, 3, 6, 7];

/// What the codes of a span are multiplied by and what is added then.
#[derive(Clone, Copy)]
pub struct Factors {
    /// By groups of 16; of groups of 32 only the first register, in the order of [`SLOTS`].
    pub scales: [__m256; 2],
    /// As `scales`, where the type has minima.
    pub mins: Option<[__m256; 2]>,
}

/// A block type by spans of [`BLOCK`] numbers. Short blocks of a row's last span may be missing: then `last` is below 7, and what stands for
/// them is anything finite, because the input is zero there.
pub trait Source {
    /// Bytes of a span.
    const SPAN: usize;
    /// Whether codes are signed.
    const SIGNED: bool = false;
    /// The largest code that is not signed: four products of 63 with an int8 fit in 16 bits, and eight of 31.
    const TOP: i32 = 31;
    /// What is to be taken off each code.
    const OFFSET: i8 = 0;
    /// Whether each 16 numbers have a scale; otherwise each 32.
    const HALVES: bool = false;

    /// Scales and minima of the span at `at`, of which eighths 0..=last are there.
    ///
    /// # Safety
    /// They are readable; the CPU has AVX2, FMA and F16C.
    unsafe fn factors(at: *const u8, last: usize) -> Factors;

    /// Codes 32 k .. 32 k + 32 of the span, in their own order.
    ///
    /// # Safety
    /// As [`Source::factors`]; eighth k is there.
    unsafe fn codes(at: *const u8, k: usize) -> __m256i;
}

/// Numbers shifted to the right; by a constant once this is inlined.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
pub fn shift_right(v: __m256i, bits: usize) -> __m256i {
    _mm256_srl_epi16(v, _mm_cvtsi32_si128(bits as i32))
}

/// Numbers shifted to the left; by a constant once this is inlined.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
pub fn shift_left(v: __m256i, bits: usize) -> __m256i {
    _mm256_sll_epi16(v, _mm_cvtsi32_si128(bits as i32))
}

/// Each of 16 signed bytes times a factor.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
pub fn by_16(bytes: __m128i, factor: __m256) -> [__m256; 2] {
    let numbers = [_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))];
    [_mm256_mul_ps(factor, _mm256_cvtepi32_ps(numbers[0])), _mm256_mul_ps(factor, _mm256_cvtepi32_ps(numbers[1]))]
}

/// The numbers with the other sign.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
pub fn negated(numbers: __m256) -> __m256 {
    _mm256_xor_ps(numbers, _mm256_set1_ps(-0.0))
}

/// Keeps numbers in memory, from where a lane fills a register without any arithmetic unit: the compiler would make shuffles of it.
#[inline(always)]
pub fn in_memory<T>(numbers: &mut T) {
    // SAFETY: no instruction at all.
    unsafe { std::arch::asm!("/* {} */", in(reg) numbers, options(nostack, preserves_flags)) };
}

/// What is added to a span's products of scales and codes, by groups as the scales: minima, or codes' offset times scales.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
pub fn added<S: Source>(factors: Factors) -> Option<[__m256; 2]> {
    let offset = _mm256_set1_ps(-f32::from(S::OFFSET));
    match factors.mins {
        None if S::OFFSET != 0 => Some(factors.scales.map(|scales| _mm256_mul_ps(scales, offset))),
        mins => mins,
    }
}

/// Bytes of a span of a block type.
pub const fn span_bytes<T: Block>() -> usize {
    BLOCK / T::NUMBERS * T::BYTES
}

/// How many blocks of 32 numbers stand behind the last whole span of a row of `cols` numbers.
#[inline]
pub const fn blocks_left<T: Block>(cols: usize) -> usize {
    if T::NUMBERS == BLOCK { 0 } else { cols % BLOCK / T::NUMBERS }
}

/// Eighth k of a span, in place of a missing one the last that is there: the input is zero where it stands.
#[inline(always)]
pub fn there(k: usize, last: usize) -> usize {
    k.min(last)
}

/// Runs the body for each 32 codes of a span, with constants.
macro_rules! each_32 {
    (|$k:ident| $body:block) => {
        each_32!(@ $k $body 0 1 2 3 4 5 6 7)
    };
    (@ $k:ident $body:block $($value:literal)*) => {
        $({
            const $k: usize = $value;
            $body
        })*
    };
}
