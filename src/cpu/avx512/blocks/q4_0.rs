//! Q4_0.

use super::by_32::{By32, Sixteenfold};
use super::{Few, Nibbles, Scales, Unpack, by_32, small};
use crate::cpu::arch::*;
use crate::formats::blocks::Q4_0;

impl Unpack for Q4_0 {
    const FEW: [Few; 4] = by_32::few::<Self>();
    const NIBBLES: Option<Nibbles> = Some(Nibbles::by_32(2, 18));
    const EXCESS: Option<i8> = Some(8);

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(at: *const u8) -> Scales {
        // SAFETY: the caller's promises.
        small::biased(_mm512_cvtph_ps(unsafe { small::Eight::<18>(at).short_heads() }), 8.0)
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        unsafe { small::Eight::<18>(at).nibbles(2) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn lanes(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        unsafe { small::Eight::<18>(at).nibbles_by_lane(2) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn add(at: *const u8, a: __m512, out: *mut f32) {
        // SAFETY: the caller's promises.
        unsafe {
            let scales = Self::scales(at).times(a);
            small::Eight::<18>(at).add_nibbles(2, small::whole_numbers(), scales, out);
        }
    }
}

impl By32 for Q4_0 {
    const SIXTEENFOLD: Sixteenfold = Sixteenfold::SecondRuns;
    const LESS: f32 = 8.0;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn eight(at: *const u8) -> [__m256; 2] {
        // SAFETY: the caller's promises.
        unsafe {
            let scales = small::Eight::<18>(at).first_words();
            [scales, scales]
        }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn units(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        unsafe { by_32::nibbles_in_place(by_32::of_blocks::<18, 2>(at)) }
    }
}
