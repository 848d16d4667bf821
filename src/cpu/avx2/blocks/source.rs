//! What the loops over blocks take: spans of a block type, or spans that were unpacked before.

use crate::cpu::columns::{BLOCK, BLOCK_GROUP};
use crate::formats::blocks::Block;
use std::arch::x86_64::*;

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

/// Spans of [`BLOCK`] numbers.
pub trait Source {
    /// Bytes of a span.
    const BYTES: usize;
    /// Whether codes are signed. Others are at most 63, so that four products with an int8 fit in 16 bits.
    const SIGNED: bool = false;
    /// What is to be taken off each code.
    const OFFSET: i8 = 0;
    /// Whether each 16 numbers have a scale; otherwise each 32.
    const HALVES: bool = false;

    /// Scales and minima of the span at `at`.
    ///
    /// # Safety
    /// The span's bytes are readable; the CPU has AVX2, FMA and F16C.
    unsafe fn factors(at: *const u8) -> Factors;

    /// Codes 32 k .. 32 k + 32 of the span, in their own order; k is below 8.
    ///
    /// # Safety
    /// As [`Source::factors`].
    unsafe fn codes(at: *const u8, k: usize) -> __m256i;
}

/// Numbers shifted to the right; by a constant once this is inlined.
#[inline]
#[target_feature(enable = "avx2")]
pub fn shift_right(v: __m256i, bits: usize) -> __m256i {
    _mm256_srl_epi16(v, _mm_cvtsi32_si128(bits as i32))
}

/// Numbers shifted to the left; by a constant once this is inlined.
#[inline]
#[target_feature(enable = "avx2")]
pub fn shift_left(v: __m256i, bits: usize) -> __m256i {
    _mm256_sll_epi16(v, _mm_cvtsi32_si128(bits as i32))
}

/// Each of 16 signed bytes times a factor.
#[inline]
#[target_feature(enable = "avx2")]
pub fn by_16(bytes: __m128i, factor: __m256) -> [__m256; 2] {
    let numbers = [_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))];
    [_mm256_mul_ps(factor, _mm256_cvtepi32_ps(numbers[0])), _mm256_mul_ps(factor, _mm256_cvtepi32_ps(numbers[1]))]
}

/// The numbers with the other sign.
#[inline]
#[target_feature(enable = "avx2")]
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
#[target_feature(enable = "avx2")]
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

/// An unpacked span.
#[repr(C, align(64))]
pub struct Span {
    pub codes: [u8; BLOCK],
    /// As in [`Factors`].
    pub scales: [f32; BLOCK / BLOCK_GROUP],
    /// What [`added`] returns, if anything.
    pub added: [f32; BLOCK / BLOCK_GROUP],
}

/// Unpacks the span at `at`.
///
/// # Safety
/// As [`Source::factors`]; `to` is writable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn unpack<T: Source>(at: *const u8, to: *mut Span) {
    // SAFETY: the caller's promises.
    unsafe {
        let factors = T::factors(at);
        let added = added::<T>(factors);
        for i in 0..if T::HALVES { 2 } else { 1 } {
            _mm256_store_ps((&raw mut (*to).scales).cast::<f32>().add(8 * i), factors.scales[i]);
            if let Some(added) = added {
                _mm256_store_ps((&raw mut (*to).added).cast::<f32>().add(8 * i), added[i]);
            }
        }
        let codes: *mut __m256i = (&raw mut (*to).codes).cast();
        each_32!(|K| { _mm256_store_si256(codes.add(K), T::codes(at, K)) });
    }
}

/// Unpacked spans. Of signed codes there are no minima: where a type has an offset, its codes are unsigned and the offset is a minimum.
pub struct Unpacked<const SIGNED: bool, const HALVES: bool>;

impl<const SIGNED: bool, const HALVES: bool> Source for Unpacked<SIGNED, HALVES> {
    const BYTES: usize = size_of::<Span>();
    const SIGNED: bool = SIGNED;
    const HALVES: bool = HALVES;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factors(at: *const u8) -> Factors {
        let span: *const Span = at.cast();
        // SAFETY: the caller's promises.
        unsafe {
            let pair = |at: *const f32| [_mm256_load_ps(at), _mm256_load_ps(at.add(8))];
            let scales = pair((&raw const (*span).scales).cast());
            let mins = if SIGNED { None } else { Some(pair((&raw const (*span).added).cast())) };
            Factors { scales, mins }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(at: *const u8, k: usize) -> __m256i {
        // SAFETY: the caller's promises.
        unsafe { _mm256_load_si256(at.cast::<__m256i>().add(k)) }
    }
}
