//! Q8_0: `d f16 | q i8[32]`.

use super::short::halves;
use super::source::{Factors, Source, span_bytes};
use crate::cpu::arch::*;
use crate::formats::blocks::{Block, Q8_0};

impl Source for Q8_0 {
    const SPAN: usize = span_bytes::<Q8_0>();
    const SIGNED: bool = true;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn factors(at: *const u8, last: usize) -> Factors {
        // SAFETY: the caller's promises.
        let scales = unsafe { halves::<Q8_0>(at, 0, last) };
        Factors { scales: [scales; 2], mins: None }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(at: *const u8, k: usize) -> __m256i {
        // SAFETY: the caller's promises.
        unsafe { _mm256_loadu_si256(at.add(k * Q8_0::BYTES + 2).cast()) }
    }
}
