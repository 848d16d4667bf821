//! Q3_K: `third bits u8[32] | q u8[64] | scales u8[12] | d f16`; scale v means v - 32, code v means v - 4. Four runs of 32 numbers share
//! 32 bytes of q, and bit k of the third bits belongs to run k of all.

use super::source::{Factors, Source, by_16, shift_left, shift_right, span_bytes};
use crate::cpu::arch::*;
use crate::formats::blocks::Q3_K;

impl Source for Q3_K {
    const SPAN: usize = span_bytes::<Q3_K>();
    const OFFSET: i8 = 4;
    const HALVES: bool = true;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn factors(at: *const u8, _: usize) -> Factors {
        // SAFETY: the caller's promises.
        // The last 16 bytes of the block, of which the scales are the third to the fourteenth.
        let (tail, d) = unsafe { (_mm_loadu_si128(at.add(94).cast()), at.add(108).cast::<i16>().read_unaligned()) };
        // Low bits of groups 0..8 and 8..16 in the halves of the first eight bytes; two high bits of groups i, 4 + i, 8 + i and 12 + i
        // in byte i of the other four.
        let low = _mm_shuffle_epi8(tail, _mm_setr_epi8(2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 6, 7, 8, 9));
        let low = _mm_and_si128(_mm_srlv_epi64(low, _mm_set_epi64x(4, 0)), _mm_set1_epi8(0x0f));
        let high = _mm_shuffle_epi8(tail, _mm_set1_epi32(0x0d0c_0b0a));
        let high =
            _mm_slli_epi16::<4>(_mm_and_si128(_mm_srlv_epi32(high, _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3)));
        let scales = _mm_sub_epi8(_mm_or_si128(low, high), _mm_set1_epi8(32));
        Factors { scales: by_16(scales, _mm256_cvtph_ps(_mm_set1_epi16(d))), mins: None }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(at: *const u8, k: usize) -> __m256i {
        // SAFETY: the caller's promises.
        let (third, q) = unsafe { (_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32 + k / 4 * 32).cast())) };
        let third = if k < 2 { shift_left(third, 2 - k) } else { shift_right(third, k - 2) };
        _mm256_or_si256(
            _mm256_and_si256(shift_right(q, k % 4 * 2), _mm256_set1_epi8(3)),
            _mm256_and_si256(third, _mm256_set1_epi8(4)),
        )
    }
}
