//! Q5_K.

use super::by_32::{By32, Sixteenfold};
use super::{Few, Scales, Unpack, by_32, k_scales, lanes, select, twice};
use crate::cpu::arch::*;
use crate::formats::blocks::Q5_K;

impl Unpack for Q5_K {
    const FEW: [Few; 4] = by_32::few::<Self>();

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(at: *const u8) -> Scales {
        // SAFETY: the caller's promises.
        unsafe { k_scales::scales(at) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
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

impl By32 for Q5_K {
    const SIXTEENFOLD: Sixteenfold = Sixteenfold::None;
    const LESS: f32 = 1.0;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn eight(at: *const u8) -> [__m256; 2] {
        // SAFETY: the caller's promises.
        unsafe { k_scales::eight(at) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn units(at: *const u8) -> [__m512i; 4] {
        // Of the groups of even places.
        let bits = lanes!(|lane| 0x0101_0101u32 << (lane / 4 * 2));
        // SAFETY: the caller's promises.
        unsafe {
            // As in Q4_K, and a fifth bit of each code in the byte of its place in the group.
            let runs = by_32::by_turns(at.add(48));
            let mut units = [_mm512_setzero_si512(); 4];
            for k in 0..4 {
                let bytes = if k < 2 { runs[k] } else { _mm512_srli_epi16::<4>(runs[k - 2]) };
                let low = _mm512_and_si512(bytes, _mm512_set1_epi8(15));
                let fifths = _mm512_broadcast_i32x4(_mm_loadu_si128(at.add(16 + k % 2 * 16).cast()));
                let bits = if k < 2 { bits } else { _mm512_add_epi8(bits, bits) };
                let has = _mm512_test_epi8_mask(fifths, bits);
                units[k] = _mm512_mask_add_epi8(low, has, low, _mm512_set1_epi8(16));
            }
            units
        }
    }
}
