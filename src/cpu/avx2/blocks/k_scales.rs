//! The packed scales of Q4_K and Q5_K.

use super::source::{Factors, negated};
use crate::cpu::arch::*;

/// Scales and minima from `d f16 | dmin f16 | scales u8[12]`, the beginning of a block of either type.
///
/// # Safety
/// 16 bytes are readable; the CPU has AVX2 and F16C.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,f16c"))]
pub unsafe fn k_factors(at: *const u8) -> Factors {
    // SAFETY: the caller's promises.
    let head = unsafe { _mm_loadu_si128(at.cast()) };
    let d = _mm_cvtph_ps(head);
    let dmin = negated(_mm256_broadcastss_ps(_mm_movehdup_ps(d)));
    // Of the three words behind the first, a has scales 0..4 and b minima 0..4 in the low six bits of its bytes; the low
    // four bits of c are scales 4..8, the high four minima, and their upper two bits stand in the tops of a and b.
    let low = _mm_srlv_epi32(_mm_shuffle_epi32::<0b11_11_10_01>(head), _mm_setr_epi32(0, 0, 0, 4));
    let low = _mm_and_si128(low, _mm_setr_epi32(0x3f3f_3f3f, 0x3f3f_3f3f, 0x0f0f_0f0f, 0x0f0f_0f0f));
    let top = _mm_srli_epi32::<2>(_mm_shuffle_epi32::<0b10_01_10_01>(head));
    let top = _mm_and_si128(top, _mm_setr_epi32(0, 0, 0x3030_3030, 0x3030_3030));
    // Now scales 0..4, minima 0..4, scales 4..8, minima 4..8; and then both in the order of `SLOTS`.
    let order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    let bytes = _mm_shuffle_epi8(_mm_or_si128(low, top), order);
    let scales = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    let mins = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)));
    let (scales, mins) = (_mm256_mul_ps(_mm256_broadcastss_ps(d), scales), _mm256_mul_ps(dmin, mins));
    Factors { scales: [scales; 2], mins: Some([mins; 2]) }
}
