//! Q5_1.

use super::{Scales, Unpack, small};
use crate::cpu::arch::*;
use crate::formats::blocks::Q5_1;

impl Unpack for Q5_1 {
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(at: *const u8) -> Scales {
        // SAFETY: the caller's promises.
        small::with_minimum(unsafe { small::Eight::<24>(at).heads() })
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        unsafe { small::Eight::<24>(at).codes_of_five(4, 8) }
    }
}
