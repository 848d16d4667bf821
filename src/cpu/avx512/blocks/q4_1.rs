//! Q4_1.

use super::by_32::{By32, Sixteenfold};
use super::{Few, Nibbles, Scales, Unpack, by_32, small};
use crate::cpu::arch::*;
use crate::formats::blocks::Q4_1;

impl Unpack for Q4_1 {
    const FEW: [Few; 4] = by_32::few::<Self>();
    const NIBBLES: Option<Nibbles> = Some(Nibbles::by_32(4, 20));

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(at: *const u8) -> Scales {
        // SAFETY: the caller's promises.
        small::with_minimum(unsafe { small::Eight::<20>(at).heads() })
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        unsafe { small::Eight::<20>(at).nibbles(4) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn lanes(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        unsafe { small::Eight::<20>(at).nibbles_by_lane(4) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn add(at: *const u8, a: __m512, out: *mut f32) {
        // SAFETY: the caller's promises.
        unsafe {
            let scales = Self::scales(at).times(a);
            small::Eight::<20>(at).add_nibbles(4, small::whole_numbers(), scales, out);
        }
    }
}

impl By32 for Q4_1 {
    const SIXTEENFOLD: Sixteenfold = Sixteenfold::SecondRuns;
    const LESS: f32 = -1.0;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn eight(at: *const u8) -> [__m256; 2] {
        // SAFETY: the caller's promises.
        unsafe { small::Eight::<20>(at).two_words() }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn units(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        unsafe { by_32::nibbles_in_place(by_32::of_blocks::<20, 4>(at)) }
    }
}
