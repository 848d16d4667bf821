//! Q4_0: `d f16 | q u8[16]`; code v means v - 8.

use super::short::{halves, nibbles};
use super::source::{Factors, Source, span_bytes};
use crate::cpu::arch::*;
use crate::formats::blocks::{Block, Q4_0};

impl Source for Q4_0 {
    const SPAN: usize = span_bytes::<Q4_0>();
    const OFFSET: i8 = 8;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn factors(at: *const u8, last: usize) -> Factors {
        // SAFETY: the caller's promises.
        let scales = unsafe { halves::<Q4_0>(at, 0, last) };
        Factors { scales: [scales; 2], mins: None }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(at: *const u8, k: usize) -> __m256i {
        // SAFETY: the caller's promises.
        unsafe { nibbles(at.add(k * Q4_0::BYTES + 2)) }
    }
}
