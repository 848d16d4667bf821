//! Q6_K.

use super::{Scales, Unpack, bytes_by_lane, f16_everywhere, lanes, select, twice};
use crate::cpu::arch::*;
use crate::formats::blocks::Q6_K;

impl Unpack for Q6_K {
    const BIAS: Option<i8> = Some(32);
    const BY_16: bool = true;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(at: *const u8) -> Scales {
        // SAFETY: the caller's promises.
        let (packed, d) = unsafe { (bytes_by_lane(at.add(192)), f16_everywhere(at.add(208))) };
        let scale = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(packed)), d);
        Scales { scale, min: _mm512_mul_ps(scale, _mm512_set1_ps(32.0)) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(at: *const u8) -> [__m512i; 4] {
        let (low_bits, six_bits) = (_mm512_set1_epi8(15), _mm512_set1_epi8(63));
        let mut codes = [_mm512_setzero_si512(); 4];
        for part in 0..2 {
            // SAFETY: the caller's promises.
            let (low, top) = unsafe { (_mm512_loadu_si512(at.add(64 * part).cast()), twice(at.add(128 + 32 * part))) };
            // The top bits of four runs of 32 numbers, turned to bits 4 and 5; what comes from neighbouring bytes is masked.
            let tops = _mm512_rolv_epi32(top, lanes!(|lane| 4 - 2 * (lane / 8)));
            codes[2 * part] = _mm512_and_si512(select(low_bits, low, tops), six_bits);
            let tops = _mm512_rorv_epi32(top, lanes!(|lane| lane / 8 * 2));
            codes[2 * part + 1] = _mm512_and_si512(select(low_bits, _mm512_srli_epi32::<4>(low), tops), six_bits);
        }
        codes
    }
}
