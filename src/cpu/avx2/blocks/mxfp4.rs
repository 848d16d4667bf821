//! MXFP4: `e u8 | q u8[16]`; a code is the place of a level.

use super::short::{first_bytes, nibbles};
use super::source::{Factors, Source, span_bytes};
use crate::cpu::arch::*;
use crate::formats::blocks::{Block, MXFP4, MXFP4_LEVELS};

/// Levels and their offset, so that they are unsigned.
const LEVELS: [i8; 16] = {
    let (mut levels, mut i) = (MXFP4_LEVELS, 0);
    while i < levels.len() {
        levels[i] += MXFP4::OFFSET;
        i += 1;
    }
    levels
};

impl Source for MXFP4 {
    const SPAN: usize = span_bytes::<MXFP4>();
    const OFFSET: i8 = 12;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn factors(at: *const u8, last: usize) -> Factors {
        // SAFETY: the caller's promises.
        let exponents = _mm256_slli_epi32::<23>(unsafe { first_bytes::<MXFP4>(at, last) });
        // As a float's exponent e gives 2^(e - 127), of which the scale is half; 0 gives 2^-127, too, before it is halved.
        let twice = _mm256_castsi256_ps(_mm256_max_epi32(exponents, _mm256_set1_epi32(0x0040_0000)));
        Factors { scales: [_mm256_mul_ps(twice, _mm256_set1_ps(0.5)); 2], mins: None }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(at: *const u8, k: usize) -> __m256i {
        // SAFETY: the caller's promises.
        unsafe {
            let levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(LEVELS.as_ptr().cast()));
            _mm256_shuffle_epi8(levels, nibbles(at.add(k * MXFP4::BYTES + 1)))
        }
    }
}
