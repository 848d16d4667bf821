//! What the types of 32 numbers share: their scales lie apart, and two numbers of a byte 16 apart.

use super::source::SLOTS;
use crate::cpu::arch::*;
use crate::cpu::columns::BLOCK;
use crate::formats::blocks::Block;

/// The 16 bits at byte `at` of the blocks of a span, in the order of [`SLOTS`]; in place of blocks behind `last` that one.
///
/// # Safety
/// Blocks 0..=last are readable.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
unsafe fn words<T: Block>(span: *const u8, at: usize, last: usize) -> __m128i {
    const { assert!(T::NUMBERS * SLOTS.len() == BLOCK) };
    // SAFETY: the caller's promises.
    let word = |i: usize| unsafe { span.add(SLOTS[i].min(last) * T::BYTES + at).cast::<i16>().read_unaligned() };
    _mm_setr_epi16(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7))
}

/// The f16 at byte `at` of each block, in the order of [`SLOTS`].
///
/// # Safety
/// As [`super::source::Source::factors`].
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,f16c"))]
pub unsafe fn halves<T: Block>(span: *const u8, at: usize, last: usize) -> __m256 {
    // SAFETY: the caller's promises.
    _mm256_cvtph_ps(unsafe { words::<T>(span, at, last) })
}

/// The first byte of each block, in the order of [`SLOTS`].
///
/// # Safety
/// As [`super::source::Source::factors`].
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
pub unsafe fn first_bytes<T: Block>(span: *const u8, last: usize) -> __m256i {
    // SAFETY: the caller's promises.
    let words = unsafe { words::<T>(span, 0, last) };
    _mm256_cvtepu16_epi32(_mm_and_si128(words, _mm_set1_epi16(0xff)))
}

/// 32 codes of four bits: number j in the low, 16 + j in the high half of byte j.
///
/// # Safety
/// 16 bytes are readable.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
pub unsafe fn nibbles(at: *const u8) -> __m256i {
    // SAFETY: the caller's promises.
    let both = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(at.cast()) });
    _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15))
}

/// The bytes of which a bit is set among the 32 bits at `at`, as 16: the fifth bits of codes.
///
/// # Safety
/// Four bytes are readable.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
pub unsafe fn fifth_bits(at: *const u8) -> __m256i {
    // SAFETY: the caller's promises.
    let bits = _mm256_set1_epi32(unsafe { at.cast::<i32>().read_unaligned() });
    let byte_of = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
    let bit_of = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let set = _mm256_and_si256(_mm256_shuffle_epi8(bits, byte_of), bit_of);
    _mm256_and_si256(_mm256_cmpeq_epi8(set, bit_of), _mm256_set1_epi8(16))
}
