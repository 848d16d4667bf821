//! Q5_1: `d f16 | m f16 | fifth bits u32 | q u8[16]`.

use super::short::{fifth_bits, halves, nibbles};
use super::source::{Factors, Source, span_bytes};
use crate::cpu::arch::*;
use crate::formats::blocks::{Block, Q5_1};

impl Source for Q5_1 {
    const SPAN: usize = span_bytes::<Q5_1>();

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn factors(at: *const u8, last: usize) -> Factors {
        // SAFETY: the caller's promises.
        let (scales, mins) = unsafe { (halves::<Q5_1>(at, 0, last), halves::<Q5_1>(at, 2, last)) };
        Factors { scales: [scales; 2], mins: Some([mins; 2]) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(at: *const u8, k: usize) -> __m256i {
        let block = at.wrapping_add(k * Q5_1::BYTES);
        // SAFETY: the caller's promises.
        unsafe { _mm256_or_si256(nibbles(block.add(8)), fifth_bits(block.add(4))) }
    }
}
