//! Q5_K.

use super::{Scales, Unpack, k_scales, lanes, select, twice};
use crate::formats::blocks::Q5_K;
use std::arch::x86_64::*;

impl Unpack for Q5_K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
    unsafe fn scales(at: *const u8) -> Scales {
        // SAFETY: the caller's promises.
        unsafe { k_scales::scales(at) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
    unsafe fn codes(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        let fifths = unsafe { twice(at.add(16)) };
        let mut codes = [_mm512_setzero_si512(); 4];
        for k in 0..4 {
            // SAFETY: the caller's promises.
            let bytes = unsafe { twice(at.add(48 + 32 * k)) };
            let low = _mm512_srlv_epi32(bytes, lanes!(|lane| lane / 8 * 4));
            // Bit 2k, and 2k + 1 for the second half, turned to bit 4; what comes from neighbouring bytes is masked.
            let turn = _mm512_sub_epi32(lanes!(|lane| 4 - lane as i32 / 8), _mm512_set1_epi32(2 * k as i32));
            let code = select(_mm512_set1_epi8(15), low, _mm512_rolv_epi32(fifths, turn));
            codes[k] = _mm512_and_si512(code, _mm512_set1_epi8(31));
        }
        codes
    }
}
