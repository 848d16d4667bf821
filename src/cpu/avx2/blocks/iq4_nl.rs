//! IQ4_NL: `d f16 | q u8[16]`; a code is the place of a level.

use super::short::{halves, nibbles};
use super::source::{Factors, Source, span_bytes};
use crate::cpu::arch::*;
use crate::formats::blocks::{Block, IQ4_LEVELS, IQ4_NL};

impl Source for IQ4_NL {
    const SPAN: usize = span_bytes::<IQ4_NL>();
    const SIGNED: bool = true;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn factors(at: *const u8, last: usize) -> Factors {
        // SAFETY: the caller's promises.
        let scales = unsafe { halves::<IQ4_NL>(at, 0, last) };
        Factors { scales: [scales; 2], mins: None }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(at: *const u8, k: usize) -> __m256i {
        // SAFETY: the caller's promises.
        unsafe { levels(nibbles(at.add(k * IQ4_NL::BYTES + 2))) }
    }
}

/// The levels that codes of IQ4_NL and IQ4_XS stand for.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
pub fn levels(codes: __m256i) -> __m256i {
    // SAFETY: 16 bytes of a constant.
    let levels = unsafe { _mm_loadu_si128(IQ4_LEVELS.as_ptr().cast()) };
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(levels), codes)
}
