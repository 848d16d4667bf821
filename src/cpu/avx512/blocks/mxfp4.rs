//! MXFP4.

use super::by_32::{By32, Sixteenfold};
use super::{Few, Nibbles, Scales, Unpack, by_32, levels, small};
use crate::cpu::arch::*;
use crate::formats::blocks::{MXFP4, MXFP4_LEVELS};

impl Unpack for MXFP4 {
    const FEW: [Few; 4] = by_32::few::<Self>();
    const NIBBLES: Option<Nibbles> = Some(Nibbles { levels: Some(&MXFP4_LEVELS), ..Nibbles::by_32(1, 17) });
    const EXCESS: Option<i8> = Some(levels::EXCESS);
    const WIDE_SCALES: bool = true;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(at: *const u8) -> Scales {
        // SAFETY: the caller's promises.
        let heads = unsafe { small::Eight::<17>(at).heads() };
        // The exponent e as that of a float, 2^(e - 127), of which the numbers, which are doubled, take half. An e of 0, with numbers below
        // 2^-124, gives 0.
        let exponent = _mm512_and_si512(_mm512_slli_epi32::<23>(heads), _mm512_set1_epi32(0x7F80_0000));
        let scale = _mm512_mul_ps(_mm512_castsi512_ps(exponent), _mm512_set1_ps(0.5));
        Scales { scale, min: _mm512_mul_ps(scale, _mm512_set1_ps(levels::BIAS)) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        levels::look_up(unsafe { small::Eight::<17>(at).nibbles(1) }, &levels::MXFP4)
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn lanes(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        levels::look_up(unsafe { small::Eight::<17>(at).nibbles_by_lane(1) }, &levels::MXFP4)
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn add(at: *const u8, a: __m512, out: *mut f32) {
        // SAFETY: the caller's promises.
        unsafe {
            let scales = Self::scales(at).times(a);
            small::Eight::<17>(at).add_nibbles(1, levels::numbers(&levels::MXFP4), scales, out);
        }
    }
}

impl By32 for MXFP4 {
    const SIXTEENFOLD: Sixteenfold = Sixteenfold::None;
    const LESS: f32 = levels::BIAS;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn eight(at: *const u8) -> [__m256; 2] {
        // SAFETY: the caller's promises.
        unsafe {
            let scales = small::Eight::<17>(at).exponents();
            [scales, scales]
        }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn units(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        unsafe { by_32::levels_of(by_32::of_blocks::<17, 1>(at), &levels::MXFP4) }
    }
}
