//! IQ4_XS.

use super::by_32::{By32, Sixteenfold};
use super::{Few, Nibbles, Scales, Unpack, by_32, f16_everywhere, lanes, levels, small};
use crate::cpu::arch::*;
use crate::cpu::columns::group_of_lane;
use crate::formats::blocks::{IQ4_LEVELS, IQ4_XS};

impl Unpack for IQ4_XS {
    const FEW: [Few; 4] = by_32::few::<Self>();
    const NIBBLES: Option<Nibbles> = Some(Nibbles { levels: Some(&IQ4_LEVELS), ..Nibbles::by_32(8, 16) });
    const EXCESS: Option<i8> = Some(levels::EXCESS);

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn scales(at: *const u8) -> Scales {
        // SAFETY: the caller's promises.
        let (d, first, low) = unsafe {
            let word = |i: usize| _mm512_set1_epi32(at.add(4 * i).cast::<i32>().read_unaligned());
            (f16_everywhere(at), word(0), word(1))
        };
        // Of each group of 32 four bits from the second word and two from the top half of the first.
        let low =
            _mm512_and_si512(_mm512_srlv_epi32(low, lanes!(|lane| group_of_lane(lane) / 2 * 4)), _mm512_set1_epi32(15));
        let high = _mm512_srlv_epi32(first, lanes!(|lane| group_of_lane(lane) / 2 * 2 + 12));
        let high = _mm512_and_si512(high, _mm512_set1_epi32(0x30));
        let scale = _mm512_sub_epi32(_mm512_or_si512(low, high), _mm512_set1_epi32(32));
        let scale = _mm512_mul_ps(_mm512_cvtepi32_ps(scale), d);
        Scales { scale, min: _mm512_mul_ps(scale, _mm512_set1_ps(levels::BIAS)) }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn codes(at: *const u8) -> [__m512i; 4] {
        // Eight runs of 16 bytes lie as the codes of eight small blocks would.
        // SAFETY: the caller's promises.
        levels::look_up(unsafe { small::Eight::<16>(at).nibbles(8) }, &levels::IQ4)
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn lanes(at: *const u8) -> [__m512i; 4] {
        // Eight runs of 16 bytes lie as the codes of eight small blocks would.
        // SAFETY: the caller's promises.
        levels::look_up(unsafe { small::Eight::<16>(at).nibbles_by_lane(8) }, &levels::IQ4)
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn add(at: *const u8, a: __m512, out: *mut f32) {
        // SAFETY: the caller's promises.
        unsafe {
            let scales = Self::scales(at).times(a);
            small::Eight::<16>(at).add_nibbles(8, levels::numbers(&levels::IQ4), scales, out);
        }
    }
}

impl By32 for IQ4_XS {
    const SIXTEENFOLD: Sixteenfold = Sixteenfold::None;
    const LESS: f32 = levels::BIAS;

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn eight(at: *const u8) -> [__m256; 2] {
        // SAFETY: the caller's promises.
        unsafe {
            // Of each group four bits from the second word and two from the top half of the first.
            let word = |i: usize| _mm256_set1_epi32(at.add(4 * i).cast::<i32>().read_unaligned());
            let low = _mm256_srlv_epi32(word(1), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
            let high = _mm256_srlv_epi32(word(0), _mm256_setr_epi32(12, 14, 16, 18, 20, 22, 24, 26));
            let (low, two_bits) = (_mm256_and_si256(low, _mm256_set1_epi32(15)), _mm256_set1_epi32(0x30));
            let whole = _mm256_ternarylogic_epi32::<0xCA>(two_bits, high, low);
            let d = _mm256_cvtph_ps(_mm_set1_epi16(at.cast::<i16>().read_unaligned()));
            let scales = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(whole, _mm256_set1_epi32(32))), d);
            [scales, scales]
        }
    }

    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn units(at: *const u8) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        unsafe { by_32::levels_of(by_32::by_turns(at.add(8)), &levels::IQ4) }
    }
}
