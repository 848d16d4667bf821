//! Codes of 4 bits that stand for the numbers of a table.

use crate::cpu::arch::*;
use crate::formats::blocks::{IQ4_LEVELS, MXFP4_LEVELS};

/// What is added to a level to make it unsigned.
pub(super) const BIAS: f32 = EXCESS as f32;
/// [`BIAS`] as a code.
pub(super) const EXCESS: i8 = 127;
/// The levels of IQ4_NL and IQ4_XS, plus [`BIAS`].
pub(super) const IQ4: [u8; 16] = biased(IQ4_LEVELS);
/// The levels of MXFP4, plus [`BIAS`].
pub(super) const MXFP4: [u8; 16] = biased(MXFP4_LEVELS);

const fn biased(levels: [i8; 16]) -> [u8; 16] {
    let (mut biased, mut i) = ([0; 16], 0);
    while i < 16 {
        biased[i] = (levels[i] as i16 + BIAS as i16) as u8;
        i += 1;
    }
    biased
}

/// Each code's level.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(super) fn look_up(codes: [__m512i; 4], levels: &[u8; 16]) -> [__m512i; 4] {
    // SAFETY: 16 bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(levels.as_ptr().cast()) });
    let mut looked_up = codes;
    for k in 0..4 {
        looked_up[k] = _mm512_shuffle_epi8(table, codes[k]);
    }
    looked_up
}

/// The levels as floats.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(super) fn numbers(levels: &[u8; 16]) -> __m512 {
    // SAFETY: 16 bytes.
    _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(levels.as_ptr().cast()) }))
}
