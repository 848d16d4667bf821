//! Q2_K.

use super::{Scales, Unpack, bytes_by_lane, f16_everywhere, lanes, twice};
use crate::cpu::arch::*;
use crate::formats::blocks::Q2_K;

impl Unpack for Q2_K {
    const BY_16: bool = true;
    const FOLDS: bool = true;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(at: *const u8) -> Scales {
        // SAFETY: the caller's promises.
        let (packed, d, dmin) = unsafe { (bytes_by_lane(at), f16_everywhere(at.add(80)), f16_everywhere(at.add(82))) };
        let packed = _mm512_cvtepu8_epi32(packed);
        let scale = _mm512_cvtepi32_ps(_mm512_and_si512(packed, _mm512_set1_epi32(15)));
        let min = _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(packed));
        Scales { scale: _mm512_mul_ps(scale, d), min: _mm512_mul_ps(min, dmin) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(at: *const u8) -> [__m512i; 4] {
        let mut codes = [_mm512_setzero_si512(); 4];
        for part in 0..2 {
            // SAFETY: the caller's promises.
            let bytes = unsafe { twice(at.add(16 + 32 * part)) };
            let (first, last) = (lanes!(|lane| lane / 8 * 2), lanes!(|lane| lane / 8 * 2 + 4));
            codes[2 * part] = _mm512_and_si512(_mm512_srlv_epi32(bytes, first), _mm512_set1_epi8(3));
            codes[2 * part + 1] = _mm512_and_si512(_mm512_srlv_epi32(bytes, last), _mm512_set1_epi8(3));
        }
        codes
    }

    /// A code times its scale is at most 45.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn signed(at: *const u8) -> ([__m512i; 4], Scales) {
        // SAFETY: the caller's promises.
        let (mut codes, min, packed, d) =
            unsafe { (Self::codes(at), Self::scales(at).min, _mm_loadu_si128(at.cast()), f16_everywhere(at.add(80))) };
        let scales = _mm512_cvtepu8_epi32(_mm_and_si128(packed, _mm_set1_epi8(15)));
        // Each group's scale times 0, 1, 2 and 3, in four bytes.
        let tables = _mm512_mullo_epi32(scales, _mm512_set1_epi32(0x0302_0100));
        for k in 0..4 {
            let group = _mm512_add_epi32(lanes!(|lane| lane / 4), _mm512_set1_epi32(4 * k as i32));
            codes[k] = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(group, tables), codes[k]);
        }
        (codes, Scales { scale: d, min })
    }
}
