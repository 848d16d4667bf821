//! Arithmetic, comparison and logic of whole numbers, and products of bytes and words.

use super::{__m128i, __m256i, __m512i, Lanes, by_mask, lanewise};

lanewise! {
    __m128i as [i8; 16] {
        _mm_add_epi8 |a, b| a.wrapping_add(b);
        _mm_sub_epi8 |a, b| a.wrapping_sub(b);
    }
    __m128i as [i64; 2] {
        _mm_add_epi64 |a, b| a.wrapping_add(b);
    }
    __m128i as [u64; 2] {
        _mm_and_si128 |a, b| a & b;
        _mm_or_si128 |a, b| a | b;
        _mm_xor_si128 |a, b| a ^ b;
    }
    __m128i as [u16; 8] {
        _mm_max_epu16 |a, b| a.max(b);
    }
    __m256i as [u16; 16] {
        _mm256_max_epu16 |a, b| a.max(b);
    }
    __m512i as [u16; 32] {
        _mm512_max_epu16 |a, b| a.max(b);
    }
    __m256i as [i8; 32] {
        _mm256_abs_epi8 |a| a.wrapping_abs();
        _mm256_add_epi8 |a, b| a.wrapping_add(b);
        _mm256_cmpeq_epi8 |a, b| if a == b { -1 } else { 0 };
        _mm256_sign_epi8 |a, b| match b.signum() {
            -1 => a.wrapping_neg(),
            0 => 0,
            _ => a,
        };
        _mm256_sub_epi8 |a, b| a.wrapping_sub(b);
    }
    __m256i as [i16; 16] {
        _mm256_add_epi16 |a, b| a.wrapping_add(b);
        _mm256_mulhrs_epi16 |a, b| high_rounded(a, b);
        _mm256_sub_epi16 |a, b| a.wrapping_sub(b);
    }
    __m256i as [i32; 8] {
        _mm256_add_epi32 |a, b| a.wrapping_add(b);
        _mm256_cmpgt_epi32 |a, b| if a > b { -1 } else { 0 };
        _mm256_max_epi32 |a, b| a.max(b);
        _mm256_sub_epi32 |a, b| a.wrapping_sub(b);
    }
    __m256i as [u64; 4] {
        _mm256_add_epi64 |a, b| a.wrapping_add(b);
        _mm256_and_si256 |a, b| a & b;
        _mm256_or_si256 |a, b| a | b;
        _mm256_xor_si256 |a, b| a ^ b;
    }
    __m512i as [i8; 64] {
        _mm512_add_epi8 |a, b| a.wrapping_add(b);
        _mm512_sub_epi8 |a, b| a.wrapping_sub(b);
    }
    __m512i as [i16; 32] {
        _mm512_mulhrs_epi16 |a, b| high_rounded(a, b);
    }
    __m512i as [i32; 16] {
        _mm512_add_epi32 |a, b| a.wrapping_add(b);
        _mm512_mullo_epi32 |a, b| a.wrapping_mul(b);
        _mm512_sub_epi32 |a, b| a.wrapping_sub(b);
    }
    __m512i as [u64; 8] {
        _mm512_add_epi64 |a, b| a.wrapping_add(b);
        _mm512_and_si512 |a, b| a & b;
        _mm512_or_si512 |a, b| a | b;
        _mm512_popcnt_epi64 |a| u64::from(a.count_ones());
        _mm512_xor_si512 |a, b| a ^ b;
    }
}

/// The upper 16 bits of twice the product, rounded.
#[inline]
fn high_rounded(a: i16, b: i16) -> i16 {
    ((((i32::from(a) * i32::from(b)) >> 14) + 1) >> 1) as i16
}

#[inline]
pub fn _mm512_mask_add_epi8(src: __m512i, k: u64, a: __m512i, b: __m512i) -> __m512i {
    __m512i::of(by_mask::<i8, 64>(k, _mm512_add_epi8(a, b).lanes(), src.lanes()))
}

#[inline]
pub fn _mm512_test_epi8_mask(a: __m512i, b: __m512i) -> u64 {
    let both: [u8; 64] = _mm512_and_si512(a, b).lanes();
    both.iter().enumerate().fold(0, |mask, (i, byte)| mask | u64::from(*byte != 0) << i)
}

/// A bit of the result is bit `a * 4 + b * 2 + c` of the table, for the bits of the operands at its place.
#[inline]
fn by_table<const N: usize>(table: i32, a: [u32; N], b: [u32; N], c: [u32; N]) -> [u32; N] {
    std::array::from_fn(|i| {
        (0..8).filter(|entry| table >> entry & 1 == 1).fold(0, |bits, entry| {
            let [a, b, c] = [(a[i], 4), (b[i], 2), (c[i], 1)].map(|(x, bit)| if entry & bit != 0 { x } else { !x });
            bits | a & b & c
        })
    })
}

#[inline]
pub fn _mm256_ternarylogic_epi32<const IMM8: i32>(a: __m256i, b: __m256i, c: __m256i) -> __m256i {
    __m256i::of(by_table(IMM8, a.lanes(), b.lanes(), c.lanes()))
}

#[inline]
pub fn _mm512_ternarylogic_epi32<const IMM8: i32>(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
    __m512i::of(by_table(IMM8, a.lanes(), b.lanes(), c.lanes()))
}

#[inline]
pub fn _mm256_madd_epi16(a: __m256i, b: __m256i) -> __m256i {
    let (a, b): ([i16; 16], [i16; 16]) = (a.lanes(), b.lanes());
    let product = |i: usize| i32::from(a[i]) * i32::from(b[i]);
    __m256i::of(std::array::from_fn::<i32, 8, _>(|i| product(2 * i).wrapping_add(product(2 * i + 1))))
}

/// The bytes of the first operand are unsigned, those of the second signed; the sums of two products stop at the ends of 16 bits.
#[inline]
pub fn _mm256_maddubs_epi16(a: __m256i, b: __m256i) -> __m256i {
    let (a, b): ([u8; 32], [i8; 32]) = (a.lanes(), b.lanes());
    let product = |i: usize| i16::from(a[i]) * i16::from(b[i]);
    __m256i::of(std::array::from_fn::<i16, 16, _>(|i| product(2 * i).saturating_add(product(2 * i + 1))))
}

/// Adds four products of unsigned and signed bytes to each sum.
#[inline]
fn four_products<const BYTES: usize, const N: usize>(src: [i32; N], a: [u8; BYTES], b: [i8; BYTES]) -> [i32; N] {
    let product = |i: usize| i32::from(i16::from(a[i]) * i16::from(b[i]));
    std::array::from_fn(|i| {
        src[i].wrapping_add(product(4 * i) + product(4 * i + 1) + product(4 * i + 2) + product(4 * i + 3))
    })
}

#[inline]
pub fn _mm256_dpbusd_avx_epi32(src: __m256i, a: __m256i, b: __m256i) -> __m256i {
    __m256i::of(four_products::<32, 8>(src.lanes(), a.lanes(), b.lanes()))
}

#[inline]
pub fn _mm512_dpbusd_epi32(src: __m512i, a: __m512i, b: __m512i) -> __m512i {
    __m512i::of(four_products::<64, 16>(src.lanes(), a.lanes(), b.lanes()))
}

/// Adds two products of words to each sum.
#[inline]
fn two_products<const WORDS: usize, const N: usize>(src: [i32; N], a: [i16; WORDS], b: [i16; WORDS]) -> [i32; N] {
    let product = |i: usize| i32::from(a[i]) * i32::from(b[i]);
    std::array::from_fn(|i| src[i].wrapping_add(product(2 * i)).wrapping_add(product(2 * i + 1)))
}

#[inline]
pub fn _mm256_dpwssd_avx_epi32(src: __m256i, a: __m256i, b: __m256i) -> __m256i {
    __m256i::of(two_products::<16, 8>(src.lanes(), a.lanes(), b.lanes()))
}

#[inline]
pub fn _mm512_dpwssd_epi32(src: __m512i, a: __m512i, b: __m512i) -> __m512i {
    __m512i::of(two_products::<32, 16>(src.lanes(), a.lanes(), b.lanes()))
}

/// The smallest word and behind it its place, the first of several.
#[inline]
pub fn _mm_minpos_epu16(a: __m128i) -> __m128i {
    let lanes: [u16; 8] = a.lanes();
    let place = (1..8).fold(0, |least, i| if lanes[i] < lanes[least] { i } else { least });
    __m128i::of([lanes[place], place as u16, 0, 0, 0, 0, 0, 0])
}

/// For each eight bytes the sum of the differences' sizes.
#[inline]
fn differences<const BYTES: usize, const N: usize>(a: [u8; BYTES], b: [u8; BYTES]) -> [u64; N] {
    std::array::from_fn(|i| (8 * i..8 * i + 8).map(|k| u64::from(a[k].abs_diff(b[k]))).sum())
}

#[inline]
pub fn _mm_sad_epu8(a: __m128i, b: __m128i) -> __m128i {
    __m128i::of(differences::<16, 2>(a.lanes(), b.lanes()))
}

#[inline]
pub fn _mm256_sad_epu8(a: __m256i, b: __m256i) -> __m256i {
    __m256i::of(differences::<32, 4>(a.lanes(), b.lanes()))
}
