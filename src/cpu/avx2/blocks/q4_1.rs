//! Q4_1: `d f16 | m f16 | q u8[16]`.

use super::short::{halves, nibbles};
use super::source::{Factors, Source, span_bytes};
use crate::cpu::arch::*;
use crate::formats::blocks::{Block, Q4_1};

impl Source for Q4_1 {
    const SPAN: usize = span_bytes::<Q4_1>();

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn factors(at: *const u8, last: usize) -> Factors {
        // SAFETY: the caller's promises.
        let (scales, mins) = unsafe { (halves::<Q4_1>(at, 0, last), halves::<Q4_1>(at, 2, last)) };
        Factors { scales: [scales; 2], mins: Some([mins; 2]) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(at: *const u8, k: usize) -> __m256i {
        // SAFETY: the caller's promises.
        unsafe { nibbles(at.add(k * Q4_1::BYTES + 4)) }
    }
}
