//! The packed scales of Q4_K and Q5_K.

use super::{Scales, lanes};
use crate::cpu::arch::*;
use crate::cpu::columns::group_of_lane;

/// Scales and minima of the eight groups of the block at `at`, which begins `d f16 | dmin f16 | scales u8[12]`.
///
/// # Safety
/// 16 readable bytes at `at`.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(in crate::cpu::avx512) unsafe fn eight(at: *const u8) -> [__m256; 2] {
    // Unpacked in whole words, which keeps the vector units free: scales 0 to 3 and minima 0 to 3 have six bits, and the others four bits
    // with two more above those.
    // SAFETY: 16 bytes.
    let (first, last) =
        unsafe { (at.add(4).cast::<u64>().read_unaligned(), at.add(12).cast::<u32>().read_unaligned()) };
    let low = first & 0x3F3F_3F3F_3F3F_3F3F;
    let four = (u64::from(last) | u64::from(last >> 4) << 32) & 0x0F0F_0F0F_0F0F_0F0F;
    let high = four | first >> 2 & 0x3030_3030_3030_3030;
    let scales = low & 0xFFFF_FFFF | high << 32;
    let minima = low >> 32 | high & 0xFFFF_FFFF_0000_0000;
    let floats = |bytes: u64| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64)));
    // SAFETY: two numbers.
    let both = _mm_cvtph_ps(_mm_cvtsi32_si128(unsafe { at.cast::<i32>().read_unaligned() }));
    let (d, dmin) = (_mm256_broadcastss_ps(both), _mm256_broadcastss_ps(_mm_movehdup_ps(both)));
    [_mm256_mul_ps(floats(scales), d), _mm256_mul_ps(floats(minima), dmin)]
}

/// The same by group, as [`super::Unpack::scales`].
///
/// # Safety
/// As [`eight`].
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(super) unsafe fn scales(at: *const u8) -> Scales {
    // Scales j of 0..8 in lanes 0..8, minima behind them. Each lane gets the byte with its low bits and, if it is one of the last four,
    // above it the byte whose top two bits are its high ones. 0x80 makes a zero.
    let bytes = lanes!(|lane| {
        let (j, min) = (lane % 8, lane / 8);
        let (low, high) = if j < 4 { (4 + j + 4 * min, 0x80) } else { (8 + j, j + 4 * min) };
        0x8080_0000 | high << 8 | low
    });
    let down = lanes!(|lane| if lane >= 12 { 4 } else { 0 });
    let low_bits = lanes!(|lane| if lane % 8 < 4 { 63 } else { 15 });
    // SAFETY: 16 bytes.
    let block = unsafe { _mm_loadu_si128(at.cast()) };
    let packed = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(block), bytes);
    let low = _mm512_and_si512(_mm512_srlv_epi32(packed, down), low_bits);
    let high = _mm512_and_si512(_mm512_srli_epi32::<10>(packed), _mm512_set1_epi32(0x30));
    let whole = _mm512_cvtepi32_ps(_mm512_or_si512(low, high));
    // d for the scales, dmin for the minima.
    let both = _mm512_castps128_ps512(_mm_cvtph_ps(block));
    let both = _mm512_mul_ps(whole, _mm512_permutexvar_ps(lanes!(|lane| lane / 8), both));
    Scales {
        scale: _mm512_permutexvar_ps(lanes!(|lane| group_of_lane(lane) / 2), both),
        min: _mm512_permutexvar_ps(lanes!(|lane| group_of_lane(lane) / 2 + 8), both),
    }
}
