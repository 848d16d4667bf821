//! Q5_0.

use super::{Scales, Unpack, small};
use crate::cpu::arch::*;
use crate::formats::blocks::Q5_0;

impl Unpack for Q5_0 {
    const BIAS: Option<i8> = Some(16);

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(at: *const u8) -> Scales {
        // SAFETY: the caller's promises.
        small::biased(small::low_f16(unsafe { small::Eight::<22>(at).heads() }), 16.0)
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        unsafe { small::Eight::<22>(at).codes_of_five(2, 6) }
    }
}
