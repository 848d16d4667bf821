//! Q4_K: `d f16 | dmin f16 | scales u8[12] | q u8[128]`, groups 2p and 2p + 1 in the low and high halves of the same 32 bytes.

use super::k_scales::k_factors;
use super::source::{Factors, Source, span_bytes};
use crate::cpu::arch::*;
use crate::formats::blocks::Q4_K;

impl Source for Q4_K {
    const SPAN: usize = span_bytes::<Q4_K>();

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
        let q = unsafe { _mm256_loadu_si256(at.add(16 + k / 2 * 32).cast()) };
        _mm256_and_si256(if k.is_multiple_of(2) { q } else { _mm256_srli_epi16::<4>(q) }, _mm256_set1_epi8(15))
    }
}
