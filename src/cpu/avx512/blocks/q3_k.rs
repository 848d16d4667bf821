//! Q3_K.

use super::{Scales, Unpack, f16_everywhere, lanes, select, twice};
use crate::cpu::arch::*;
use crate::cpu::columns::group_of_lane;
use crate::formats::blocks::Q3_K;

impl Unpack for Q3_K {
    const BIAS: Option<i8> = Some(4);
    const BY_16: bool = true;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(at: *const u8) -> Scales {
        // Each lane gets the byte with its low four bits and above it the one with its high two.
        let bytes = lanes!(|lane| {
            let group = group_of_lane(lane);
            0x8080_0000 | (10 + group % 4) << 8 | (2 + group % 8)
        });
        // SAFETY: the caller's promises. The 12 bytes of scales begin at the second of these 16.
        let (packed, d) = unsafe { (_mm_loadu_si128(at.add(94).cast()), f16_everywhere(at.add(108))) };
        let packed = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(packed), bytes);
        let low = _mm512_srlv_epi32(packed, lanes!(|lane| group_of_lane(lane) / 8 * 4));
        let high = _mm512_srlv_epi32(packed, lanes!(|lane| group_of_lane(lane) / 4 * 2 + 4));
        let low = _mm512_and_si512(low, _mm512_set1_epi32(15));
        let high = _mm512_and_si512(high, _mm512_set1_epi32(0x30));
        let scale = _mm512_sub_epi32(_mm512_or_si512(low, high), _mm512_set1_epi32(32));
        let scale = _mm512_mul_ps(_mm512_cvtepi32_ps(scale), d);
        Scales { scale, min: _mm512_mul_ps(scale, _mm512_set1_ps(4.0)) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        let thirds = unsafe { twice(at) };
        let mut codes = [_mm512_setzero_si512(); 4];
        for k in 0..4 {
            // SAFETY: the caller's promises.
            let bytes = unsafe { twice(at.add(32 + 32 * (k / 2))) };
            let down = _mm512_add_epi32(lanes!(|lane| lane / 8 * 2), _mm512_set1_epi32(4 * (k % 2) as i32));
            // Bit 2k, and 2k + 1 for the second half, turned to bit 2.
            let turn = _mm512_sub_epi32(lanes!(|lane| 2 - lane as i32 / 8), _mm512_set1_epi32(2 * k as i32));
            let code = select(_mm512_set1_epi8(3), _mm512_srlv_epi32(bytes, down), _mm512_rolv_epi32(thirds, turn));
            codes[k] = _mm512_and_si512(code, _mm512_set1_epi8(7));
        }
        codes
    }
}
