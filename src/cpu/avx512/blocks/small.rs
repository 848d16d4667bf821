//! What the types of 32 numbers a block share: eight blocks make 256 numbers.

use super::{Scales, add_nibbles, lanes, of_group};
use crate::cpu::arch::*;
use crate::cpu::columns::group_of_lane;
use std::hint::black_box;

/// Eight blocks of `BYTES` each.
#[derive(Clone, Copy)]
pub(super) struct Eight<const BYTES: usize>(pub *const u8);

impl<const BYTES: usize> Eight<BYTES> {
    /// The first four bytes of each block, in the lanes of its two groups.
    ///
    /// # Safety
    /// As all functions here: the blocks can be read.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    pub(super) unsafe fn heads(self) -> __m512i {
        // SAFETY: the caller's promises.
        unsafe {
            let head = |i: usize| self.0.add(i * BYTES).cast::<i32>().read_unaligned();
            // The groups of block i are 2i and 2i + 1, and so their lanes 4 apart: a masked broadcast from memory is one instruction.
            let mut heads = _mm512_set1_epi32(head(0));
            for i in 1..8 {
                let lanes = 1 << group_of_lane(2 * i) | 1 << group_of_lane(2 * i + 1);
                heads = _mm512_mask_set1_epi32(heads, lanes, head(i));
            }
            heads
        }
    }

    /// Codes of 4 bits, `at` bytes from the beginning of each block: number j in the low and 16 + j in the high half of byte j.
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    pub(super) unsafe fn nibbles(self, at: usize) -> [__m512i; 4] {
        let mut codes = [_mm512_setzero_si512(); 4];
        for k in 0..4 {
            // SAFETY: the caller's promises.
            let (first, second) = unsafe {
                let of = |i: usize| _mm_loadu_si128(self.0.add(i * BYTES + at).cast());
                (of(2 * k), of(2 * k + 1))
            };
            let both = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(first), 0xFF00, second);
            let halves = _mm512_srlv_epi32(both, lanes!(|lane| lane / 4 % 2 * 4));
            codes[k] = _mm512_and_si512(halves, _mm512_set1_epi8(15));
        }
        codes
    }

    /// The same codes by lane. The bytes of four blocks fill a register, and each register of codes is a choice of eight places of four
    /// bytes from two of them.
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    pub(super) unsafe fn nibbles_by_lane(self, at: usize) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        let four = |first: usize| unsafe {
            let of = |i: usize| self.0.add((first + i) * BYTES + at);
            if BYTES == 16 {
                return _mm512_loadu_si512(of(0).cast());
            }
            let bytes = |i: usize| _mm_loadu_si128(of(i).cast());
            let two = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(bytes(0)), 0x00F0, bytes(1));
            let three = _mm512_mask_broadcast_i32x4(two, 0x0F00, bytes(2));
            _mm512_mask_broadcast_i32x4(three, 0xF000, bytes(3))
        };
        let (first, last) = (four(0), four(4));
        let places = lanes!(|lane| group_of_lane(lane) / 2 * 4);
        let down = lanes!(|lane| group_of_lane(lane) % 2 * 4);
        let mut codes = [_mm512_setzero_si512(); 4];
        for k in 0..4 {
            let places = _mm512_add_epi32(places, _mm512_set1_epi32(k as i32));
            let bytes = _mm512_permutex2var_epi32(first, places, last);
            codes[k] = _mm512_and_si512(_mm512_srlv_epi32(bytes, down), _mm512_set1_epi8(15));
        }
        codes
    }

    /// The first two bytes of each block in its lanes, of blocks of at most 20 bytes: fewer instructions than [`Eight::heads`].
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    pub(super) unsafe fn short_heads(self) -> __m256i {
        const { assert!(BYTES.is_multiple_of(2) && 3 * BYTES + 2 <= 64 && 4 * BYTES >= 64) };
        // SAFETY: the caller's promises; the second load ends within the eight blocks.
        let (first, last) =
            unsafe { (_mm512_loadu_si512(self.0.cast()), _mm512_loadu_si512(self.0.add(4 * BYTES).cast())) };
        // Words of the first four blocks from the first register, those of the others from the second.
        let words = const {
            let (mut words, mut lane) = ([0i16; 32], 0);
            while lane < 16 {
                let block = group_of_lane(lane) / 2;
                words[lane] = (block / 4 * 32 + block % 4 * BYTES / 2) as i16;
                lane += 1;
            }
            words
        };
        // SAFETY: 64 bytes.
        let words = unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
        _mm512_castsi512_si256(_mm512_permutex2var_epi16(first, words, last))
    }

    /// A word of each block, `BYTE` bytes behind its beginning, of blocks of at most 20 bytes.
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    unsafe fn words<const BYTE: usize>(self) -> __m128i {
        const { assert!(3 * BYTES + 4 <= 64 && 4 * BYTES >= 64) };
        let places = const {
            let (mut places, mut i) = ([0i16; 32], 0);
            while i < 8 {
                places[i] = (i / 4 * 32 + (i % 4 * BYTES + BYTE) / 2) as i16;
                i += 1;
            }
            places
        };
        // SAFETY: the caller's promises; the second load ends within the eight blocks.
        unsafe {
            let (first, last) = (_mm512_loadu_si512(self.0.cast()), _mm512_loadu_si512(self.0.add(4 * BYTES).cast()));
            let places = _mm512_loadu_si512(places.as_ptr().cast());
            _mm512_castsi512_si128(_mm512_permutex2var_epi16(first, places, last))
        }
    }

    /// The f16 with which each block begins, of blocks of at most 20 bytes.
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    pub(super) unsafe fn first_words(self) -> __m256 {
        // SAFETY: the caller's promises.
        _mm256_cvtph_ps(unsafe { self.words::<0>() })
    }

    /// The same, and the f16 behind it.
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    pub(super) unsafe fn two_words(self) -> [__m256; 2] {
        // SAFETY: the caller's promises.
        unsafe { [_mm256_cvtph_ps(self.words::<0>()), _mm256_cvtph_ps(self.words::<2>())] }
    }

    /// The scales of MXFP4, of blocks that begin with an exponent.
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    pub(super) unsafe fn exponents(self) -> __m256 {
        // Every second block begins in the middle of a word.
        let up = _mm256_setr_epi32(23, 15, 23, 15, 23, 15, 23, 15);
        // SAFETY: the caller's promises.
        let up = _mm256_sllv_epi32(_mm256_cvtepu16_epi32(unsafe { self.words::<0>() }), up);
        let exponents = _mm256_and_si256(up, _mm256_set1_epi32(0x7F80_0000));
        _mm256_mul_ps(_mm256_castsi256_ps(exponents), _mm256_set1_ps(0.5))
    }

    /// Adds the numbers to 256 at `out`, of codes of 4 bits that stand for the 16 `levels`.
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    pub(super) unsafe fn add_nibbles(self, at: usize, levels: __m512, scales: Scales, out: *mut f32) {
        // SAFETY: the caller's promises.
        unsafe {
            let Scales { scale, min } = black_box(&scales);
            for i in 0..8 {
                let table = _mm512_fmsub_ps(levels, of_group(scale, 2 * i), of_group(min, 2 * i));
                let out = out.add(32 * i);
                add_nibbles(self.0.add(i * BYTES + at), [table; 2], out, out.add(16));
            }
        }
    }

    /// Codes of 4 bits at `at` with a fifth bit for each in the four bytes at `fifths`.
    ///
    /// # Safety
    /// As above.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
    pub(super) unsafe fn codes_of_five(self, fifths: usize, at: usize) -> [__m512i; 4] {
        // SAFETY: the caller's promises.
        unsafe {
            let mut codes = self.nibbles(at);
            for k in 0..4 {
                let bits = |i: usize| u64::from(self.0.add(i * BYTES + fifths).cast::<u32>().read_unaligned());
                let fifths = bits(2 * k) | bits(2 * k + 1) << 32;
                codes[k] = _mm512_mask_add_epi8(codes[k], fifths, codes[k], _mm512_set1_epi8(16));
            }
            codes
        }
    }
}

/// The f16 in the low half of each lane.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(super) fn low_f16(lanes: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(lanes))
}

/// Scales for codes that are `bias` scales above their numbers.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(super) fn biased(scale: __m512, bias: f32) -> Scales {
    Scales { scale, min: _mm512_mul_ps(scale, _mm512_set1_ps(bias)) }
}

/// Scales from f16 in the low halves of lanes and what is added to all numbers from f16 in the high halves.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(super) fn with_minimum(heads: __m512i) -> Scales {
    let minimum = low_f16(_mm512_srli_epi32::<16>(heads));
    Scales { scale: low_f16(heads), min: _mm512_xor_ps(minimum, _mm512_set1_ps(-0.0)) }
}

/// 0, 1, 2 and so on: the levels of codes that are numbers themselves.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(super) fn whole_numbers() -> __m512 {
    _mm512_cvtepi32_ps(lanes!(|lane| lane))
}
