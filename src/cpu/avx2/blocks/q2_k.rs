//! Q2_K: `scales u8[16] | q u8[64] | d f16 | dmin f16`; a byte of scales is a scale and, in its high half, a minimum. Four runs of 32
//! numbers share 32 bytes.

use super::source::{Factors, Source, by_16, negated, shift_right, span_bytes};
use crate::cpu::arch::*;
use crate::formats::blocks::Q2_K;

impl Source for Q2_K {
    const SPAN: usize = span_bytes::<Q2_K>();
    const HALVES: bool = true;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn factors(at: *const u8, _: usize) -> Factors {
        let low = _mm_set1_epi8(15);
        // SAFETY: the caller's promises.
        unsafe {
            let packed = _mm_loadu_si128(at.cast());
            let d = _mm_cvtph_ps(_mm_cvtsi32_si128(at.add(80).cast::<i32>().read_unaligned()));
            let (scale, min) = (_mm256_broadcastss_ps(d), _mm256_broadcastss_ps(_mm_movehdup_ps(d)));
            Factors {
                scales: by_16(_mm_and_si128(packed, low), scale),
                mins: Some(by_16(_mm_and_si128(_mm_srli_epi16::<4>(packed), low), negated(min))),
            }
        }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(at: *const u8, k: usize) -> __m256i {
        // SAFETY: the caller's promises.
        let q = unsafe { _mm256_loadu_si256(at.add(16 + k / 4 * 32).cast()) };
        _mm256_and_si256(shift_right(q, k % 4 * 2), _mm256_set1_epi8(3))
    }
}
