//! Q4_K.

use super::by_32::{By32, Sixteenfold};
use super::{Few, Nibbles, Scales, Unpack, add_nibbles, by_32, k_scales, lanes, of_group, twice};
use crate::cpu::arch::*;
use crate::formats::blocks::Q4_K;
use std::hint::black_box;

impl Unpack for Q4_K {
    const FEW: [Few; 4] = by_32::few::<Self>();
    const NIBBLES: Option<Nibbles> = Some(Nibbles { next_group: true, ..Nibbles::by_32(16, 16) });

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(at: *const u8) -> Scales {
        // SAFETY: the caller's promises.
        unsafe { k_scales::scales(at) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(at: *const u8) -> [__m512i; 4] {
        let mut codes = [_mm512_setzero_si512(); 4];
        for k in 0..4 {
            // SAFETY: the caller's promises.
            let bytes = unsafe { twice(at.add(16 + 32 * k)) };
            let halves = _mm512_srlv_epi32(bytes, lanes!(|lane| lane / 8 * 4));
            codes[k] = _mm512_and_si512(halves, _mm512_set1_epi8(15));
        }
        codes
    }

    /// Each register's numbers stand in eight places of four bytes, which a permutation of all 128 takes out at once.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn lanes(at: *const u8) -> [__m512i; 4] {
        use crate::cpu::columns::group_of_lane;
        // SAFETY: the caller's promises.
        let (first, last) = unsafe { (_mm512_loadu_si512(at.add(16).cast()), _mm512_loadu_si512(at.add(80).cast())) };
        // Four groups of 16 share 32 bytes: two in the low halves, two in the high ones.
        let places = lanes!(|lane| group_of_lane(lane) / 4 * 8 + group_of_lane(lane) % 2 * 4);
        let down = lanes!(|lane| group_of_lane(lane) % 4 / 2 * 4);
        let mut codes = [_mm512_setzero_si512(); 4];
        for k in 0..4 {
            let places = _mm512_add_epi32(places, _mm512_set1_epi32(k as i32));
            let bytes = _mm512_permutex2var_epi32(first, places, last);
            codes[k] = _mm512_and_si512(_mm512_srlv_epi32(bytes, down), _mm512_set1_epi8(15));
        }
        codes
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn add(at: *const u8, a: __m512, out: *mut f32) {
        let codes = _mm512_cvtepi32_ps(lanes!(|lane| lane));
        // SAFETY: the caller's promises.
        unsafe {
            let scales = Self::scales(at).times(a);
            let Scales { scale, min } = black_box(&scales);
            for k in 0..4 {
                let table = |group: usize| _mm512_fmsub_ps(codes, of_group(scale, 2 * group), of_group(min, 2 * group));
                let tables = [table(2 * k), table(2 * k + 1)];
                for half in 0..2 {
                    let out = out.add(64 * k + 16 * half);
                    add_nibbles(at.add(16 + 32 * k + 16 * half), tables, out, out.add(32));
                }
            }
        }
    }
}

impl By32 for Q4_K {
    const SIXTEENFOLD: Sixteenfold = Sixteenfold::OddGroups;
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
        // SAFETY: the caller's promises.
        unsafe {
            // A group's two runs stand side by side, in the low halves those of even and in the high ones those of odd groups.
            let [first, second] = by_32::by_turns(at.add(16));
            let [a, c] = [0x0F, -0x10].map(|mask| _mm512_and_si512(first, _mm512_set1_epi8(mask)));
            let [b, d] = [0x0F, -0x10].map(|mask| _mm512_and_si512(second, _mm512_set1_epi8(mask)));
            [a, b, c, d]
        }
    }
}
