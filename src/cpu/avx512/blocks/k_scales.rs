//! The packed scales of Q4_K and Q5_K.

use super::{Scales, lanes};
use crate::cpu::columns::group_of_lane;
use std::arch::x86_64::*;

/// Scales and minima of the block at `at`, which begins `d f16 | dmin f16 | scales u8[12]`.
///
/// # Safety
/// 16 readable bytes at `at`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
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
