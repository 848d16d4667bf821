//! IQ4_XS: `d f16 | high scale bits u16 | low scale bits u8[4] | q u8[128]`; scale v means v - 32, codes are as in IQ4_NL.

use super::iq4_nl::levels;
use super::short::nibbles;
use super::source::{Factors, Source, span_bytes};
use crate::cpu::arch::*;
use crate::formats::blocks::IQ4_XS;

impl Source for IQ4_XS {
    const SPAN: usize = span_bytes::<IQ4_XS>();
    const SIGNED: bool = true;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn factors(at: *const u8, _: usize) -> Factors {
        // SAFETY: the caller's promises.
        let (head, low) = unsafe { (at.cast::<i32>().read_unaligned(), at.add(4).cast::<i32>().read_unaligned()) };
        // Four low bits and, behind the 16 bits of d, two high ones of each group, in the order of `SLOTS`.
        let low = _mm256_srlv_epi32(_mm256_set1_epi32(low), _mm256_setr_epi32(0, 4, 16, 20, 8, 12, 24, 28));
        let high = _mm256_srlv_epi32(_mm256_set1_epi32(head), _mm256_setr_epi32(16, 18, 24, 26, 20, 22, 28, 30));
        let low = _mm256_and_si256(low, _mm256_set1_epi32(15));
        let high = _mm256_slli_epi32::<4>(_mm256_and_si256(high, _mm256_set1_epi32(3)));
        let scales = _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
        let d = _mm256_cvtph_ps(_mm_set1_epi16(head as i16));
        Factors { scales: [_mm256_mul_ps(d, _mm256_cvtepi32_ps(scales)); 2], mins: None }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(at: *const u8, k: usize) -> __m256i {
        // SAFETY: the caller's promises.
        unsafe { levels(nibbles(at.add(8 + 16 * k))) }
    }
}
