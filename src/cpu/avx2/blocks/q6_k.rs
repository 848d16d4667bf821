//! Q6_K: `low 4 bits u8[128] | high 2 bits u8[64] | scales i8[16] | d f16`; code v means v - 32. Of each half of a block, four runs of
//! 32 share 64 bytes of low and 32 of high bits.

use super::source::{Factors, Source, by_16, shift_left, shift_right, span_bytes};
use crate::cpu::arch::*;
use crate::formats::blocks::Q6_K;

impl Source for Q6_K {
    const SPAN: usize = span_bytes::<Q6_K>();
    const TOP: i32 = 63;
    const OFFSET: i8 = 32;
    const HALVES: bool = true;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn factors(at: *const u8, _: usize) -> Factors {
        // SAFETY: the caller's promises.
        unsafe {
            let d = _mm256_cvtph_ps(_mm_set1_epi16(at.add(208).cast::<i16>().read_unaligned()));
            Factors { scales: by_16(_mm_loadu_si128(at.add(192).cast()), d), mins: None }
        }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(at: *const u8, k: usize) -> __m256i {
        let (part, run) = (k / 4, k % 4);
        // SAFETY: the caller's promises.
        let (low, top) = unsafe {
            let (low, top) = (at.add(64 * part + 32 * (run % 2)), at.add(128 + 32 * part));
            (_mm256_loadu_si256(low.cast()), _mm256_loadu_si256(top.cast()))
        };
        let low = if run < 2 { low } else { _mm256_srli_epi16::<4>(low) };
        let top = if run < 2 { shift_left(top, 4 - 2 * run) } else { shift_right(top, 2 * run - 4) };
        let (low_bits, top_bits) = (_mm256_set1_epi8(0x0f), _mm256_set1_epi8(0x30));
        _mm256_or_si256(_mm256_and_si256(low, low_bits), _mm256_and_si256(top, top_bits))
    }
}
