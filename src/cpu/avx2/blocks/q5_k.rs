//! Q5_K: `d f16 | dmin f16 | scales u8[12] | fifth bits u8[32] | q u8[128]`; as Q4_K, with bit k of the fifth bits for group k.

use super::k_scales::k_factors;
use super::source::{Factors, Source, shift_left, shift_right, span_bytes};
use crate::cpu::arch::*;
use crate::formats::blocks::Q5_K;

impl Source for Q5_K {
    const SPAN: usize = span_bytes::<Q5_K>();

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn factors(at: *const u8, _: usize) -> Factors {
        // SAFETY: the caller's promises.
        unsafe { k_factors(at) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(at: *const u8, k: usize) -> __m256i {
        // SAFETY: the caller's promises.
        let (q, fifth) =
            unsafe { (_mm256_loadu_si256(at.add(48 + k / 2 * 32).cast()), _mm256_loadu_si256(at.add(16).cast())) };
        let q = if k.is_multiple_of(2) { q } else { _mm256_srli_epi16::<4>(q) };
        let fifth = if k < 4 { shift_left(fifth, 4 - k) } else { shift_right(fifth, k - 4) };
        _mm256_or_si256(_mm256_and_si256(q, _mm256_set1_epi8(15)), _mm256_and_si256(fifth, _mm256_set1_epi8(16)))
    }
}
