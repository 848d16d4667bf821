//! Q8_0.

use super::{Scales, Unpack, add_codes, small};
use crate::cpu::arch::*;
use crate::formats::blocks::Q8_0;
use std::hint::black_box;

impl Unpack for Q8_0 {
    const BIAS: Option<i8> = Some(i8::MIN);

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(at: *const u8) -> Scales {
        // SAFETY: the caller's promises.
        small::biased(small::low_f16(unsafe { small::Eight::<34>(at).heads() }), 128.0)
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(at: *const u8) -> [__m512i; 4] {
        let mut codes = [_mm512_setzero_si512(); 4];
        for k in 0..4 {
            // SAFETY: the caller's promises.
            let (first, second) = unsafe {
                let of = |i: usize| _mm256_loadu_si256(at.add(i * 34 + 2).cast());
                (of(2 * k), of(2 * k + 1))
            };
            let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
            // Signed codes plus 128.
            codes[k] = _mm512_xor_si512(both, _mm512_set1_epi8(-128));
        }
        codes
    }

    /// The codes are signed bytes as they lie there.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn add(at: *const u8, a: __m512, out: *mut f32) {
        // SAFETY: the caller's promises.
        unsafe {
            let scales = Self::scales(at).times(a);
            let scales = black_box(&scales);
            for g in 0..16 {
                add_codes::<Self>(at.add(g / 2 * 34 + 2 + g % 2 * 16).cast(), g, scales, out.add(16 * g));
            }
        }
    }
}
