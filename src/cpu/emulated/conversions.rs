//! Numbers of one type from those of another, registers of one kind or width from those of another, and registers from numbers.

use super::{__m128, __m128i, __m256, __m256d, __m256i, __m512, __m512i, Lanes, by_mask};

/// Registers whose lanes are those of another, converted: lanes behind the result's are left out.
macro_rules! converted {
    ($($name:ident($from:ident as [$t:ty; $n:tt]) -> $to:ident as [$u:ty; $m:tt] |$a:ident| $e:expr;)*) => {$(
        #[inline]
        pub fn $name(a: $from) -> $to {
            let lanes: [$t; $n] = a.lanes();
            $to::of(std::array::from_fn::<$u, $m, _>(|i| {
                let $a = lanes[i];
                $e
            }))
        }
    )*};
}
converted! {
    _mm256_cvtepi32_ps(__m256i as [i32; 8]) -> __m256 as [f32; 8] |a| a as f32;
    _mm512_cvtepi32_ps(__m512i as [i32; 16]) -> __m512 as [f32; 16] |a| a as f32;
    _mm256_cvtps_epi32(__m256 as [f32; 8]) -> __m256i as [i32; 8] |a| nearest(a);
    _mm512_cvtps_epi32(__m512 as [f32; 16]) -> __m512i as [i32; 16] |a| nearest(a);
    _mm256_cvtepi8_epi32(__m128i as [i8; 16]) -> __m256i as [i32; 8] |a| i32::from(a);
    _mm512_cvtepi8_epi32(__m128i as [i8; 16]) -> __m512i as [i32; 16] |a| i32::from(a);
    _mm256_cvtepu8_epi32(__m128i as [u8; 16]) -> __m256i as [i32; 8] |a| i32::from(a);
    _mm512_cvtepu8_epi32(__m128i as [u8; 16]) -> __m512i as [i32; 16] |a| i32::from(a);
    _mm256_cvtepu16_epi32(__m128i as [u16; 8]) -> __m256i as [i32; 8] |a| i32::from(a);
    _mm512_cvtepu16_epi32(__m256i as [u16; 16]) -> __m512i as [i32; 16] |a| i32::from(a);
    _mm512_cvtepi32_epi8(__m512i as [i32; 16]) -> __m128i as [i8; 16] |a| a as i8;
    _mm512_cvtepi32_epi16(__m512i as [i32; 16]) -> __m256i as [i16; 16] |a| a as i16;
    _mm512_cvtepi64_epi32(__m512i as [i64; 8]) -> __m256i as [i32; 8] |a| a as i32;
    _mm_cvtph_ps(__m128i as [u16; 8]) -> __m128 as [f32; 4] |a| half(a);
    _mm256_cvtph_ps(__m128i as [u16; 8]) -> __m256 as [f32; 8] |a| half(a);
    _mm512_cvtph_ps(__m256i as [u16; 16]) -> __m512 as [f32; 16] |a| half(a);
}

/// The nearest whole number, the even one of two; the smallest of all where there is none in 32 bits.
#[inline]
fn nearest(a: f32) -> i32 {
    let whole = a.round_ties_even();
    if (-2147483648.0..2147483648.0).contains(&whole) { whole as i32 } else { i32::MIN }
}

/// The number that these bits are as f16.
#[inline]
fn half(bits: u16) -> f32 {
    // A shift brings exponent and fraction to the places that f32 has for them; a product makes up for the other bias, exactly, numbers
    // without a leading one included.
    let (sign, rest) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff) << 13);
    let infinite = bits & 0x7c00 == 0x7c00;
    let size = if infinite { rest | 0x7f80_0000 } else { (f32::from_bits(rest) * 2f32.powi(112)).to_bits() };
    let quiet = if infinite && bits & 0x03ff != 0 { 0x0040_0000 } else { 0 };
    f32::from_bits(sign | size | quiet)
}

/// What a cast leaves undefined: no kernel may depend on it.
const UNDEFINED: u8 = 0xff;

/// The bytes of a register as one of another kind: cut, or followed by others.
macro_rules! cast {
    ($($name:ident($from:ident as $n:tt) -> $to:ident as $m:tt, $behind:expr;)*) => {$(
        #[inline]
        pub fn $name(a: $from) -> $to {
            let bytes: [u8; $n] = a.lanes();
            $to::of(std::array::from_fn::<u8, $m, _>(|i| *bytes.get(i).unwrap_or(&$behind)))
        }
    )*};
}
cast! {
    _mm256_castpd_ps(__m256d as 32) -> __m256 as 32, UNDEFINED;
    _mm256_castps_pd(__m256 as 32) -> __m256d as 32, UNDEFINED;
    _mm256_castps_si256(__m256 as 32) -> __m256i as 32, UNDEFINED;
    _mm256_castsi256_ps(__m256i as 32) -> __m256 as 32, UNDEFINED;
    _mm256_castps128_ps256(__m128 as 16) -> __m256 as 32, UNDEFINED;
    _mm256_castps256_ps128(__m256 as 32) -> __m128 as 16, UNDEFINED;
    _mm256_castsi256_si128(__m256i as 32) -> __m128i as 16, UNDEFINED;
    _mm512_castps_si512(__m512 as 64) -> __m512i as 64, UNDEFINED;
    _mm512_castsi512_ps(__m512i as 64) -> __m512 as 64, UNDEFINED;
    _mm512_castps128_ps512(__m128 as 16) -> __m512 as 64, UNDEFINED;
    _mm512_castps256_ps512(__m256 as 32) -> __m512 as 64, UNDEFINED;
    _mm512_castps512_ps256(__m512 as 64) -> __m256 as 32, UNDEFINED;
    _mm512_castsi128_si512(__m128i as 16) -> __m512i as 64, UNDEFINED;
    _mm512_castsi256_si512(__m256i as 32) -> __m512i as 64, UNDEFINED;
    _mm512_castsi512_si128(__m512i as 64) -> __m128i as 16, UNDEFINED;
    _mm512_castsi512_si256(__m512i as 64) -> __m256i as 32, UNDEFINED;
    _mm512_zextsi256_si512(__m256i as 32) -> __m512i as 64, 0;
}

/// Registers with the same number in every lane.
macro_rules! set1 {
    ($($name:ident($t:ty) -> $v:ident as $n:tt;)*) => {$(
        #[inline]
        pub fn $name(a: $t) -> $v {
            $v::of([a; $n])
        }
    )*};
}
set1! {
    _mm_set1_epi8(i8) -> __m128i as 16;
    _mm_set1_epi16(i16) -> __m128i as 8;
    _mm_set1_epi32(i32) -> __m128i as 4;
    _mm256_set1_epi8(i8) -> __m256i as 32;
    _mm256_set1_epi16(i16) -> __m256i as 16;
    _mm256_set1_epi32(i32) -> __m256i as 8;
    _mm256_set1_epi64x(i64) -> __m256i as 4;
    _mm256_set1_pd(f64) -> __m256d as 4;
    _mm256_set1_ps(f32) -> __m256 as 8;
    _mm512_set1_epi8(i8) -> __m512i as 64;
    _mm512_set1_epi16(i16) -> __m512i as 32;
    _mm512_set1_epi32(i32) -> __m512i as 16;
    _mm512_set1_ps(f32) -> __m512 as 16;
}

/// Registers of these numbers, the lowest lane first.
macro_rules! setr {
    ($($name:ident($t:ty: $($x:ident)+) -> $v:ident;)*) => {$(
        #[inline]
        #[allow(clippy::too_many_arguments)]
        pub fn $name($($x: $t),+) -> $v {
            $v::of([$($x),+])
        }
    )*};
}
setr! {
    _mm_setr_epi8(i8: a b c d e f g h i j k l m n o p) -> __m128i;
    _mm_setr_epi16(i16: a b c d e f g h) -> __m128i;
    _mm_setr_epi32(i32: a b c d) -> __m128i;
    _mm256_setr_epi8(i8: a b c d e f g h i j k l m n o p a2 b2 c2 d2 e2 f2 g2 h2 i2 j2 k2 l2 m2 n2 o2 p2) -> __m256i;
    _mm256_setr_epi32(i32: a b c d e f g h) -> __m256i;
    _mm256_setr_epi64x(i64: a b c d) -> __m256i;
    _mm512_setr_epi64(i64: a b c d e f g h) -> __m512i;
    _mm512_setr_ps(f32: a b c d e f g h i j k l m n o p) -> __m512;
}

/// The highest lane comes first.
#[inline]
pub fn _mm_set_epi64x(high: i64, low: i64) -> __m128i {
    __m128i::of([low, high])
}

#[inline]
pub fn _mm_setzero_si128() -> __m128i {
    _mm_set1_epi8(0)
}

#[inline]
pub fn _mm256_setzero_si256() -> __m256i {
    _mm256_set1_epi8(0)
}

#[inline]
pub fn _mm256_setzero_ps() -> __m256 {
    _mm256_set1_ps(0.0)
}

#[inline]
pub fn _mm512_setzero_si512() -> __m512i {
    _mm512_set1_epi8(0)
}

#[inline]
pub fn _mm512_setzero_ps() -> __m512 {
    _mm512_set1_ps(0.0)
}

#[inline]
pub fn _mm512_mask_set1_epi32(src: __m512i, k: u16, a: i32) -> __m512i {
    __m512i::of(by_mask(k.into(), [a; 16], src.lanes()))
}

#[inline]
pub fn _mm_cvtsi32_si128(a: i32) -> __m128i {
    __m128i::of([a, 0, 0, 0])
}

#[inline]
pub fn _mm_cvtsi64_si128(a: i64) -> __m128i {
    __m128i::of([a, 0])
}

#[inline]
pub fn _mm_cvtsi128_si32(a: __m128i) -> i32 {
    let [low, ..]: [i32; 4] = a.lanes();
    low
}

#[inline]
pub fn _mm_cvtsi128_si64(a: __m128i) -> i64 {
    let [low, _]: [i64; 2] = a.lanes();
    low
}

#[inline]
pub fn _mm_cvtss_f32(a: __m128) -> f32 {
    let [low, ..]: [f32; 4] = a.lanes();
    low
}

#[inline]
pub fn _mm_extract_epi32<const IMM8: i32>(a: __m128i) -> i32 {
    let lanes: [i32; 4] = a.lanes();
    lanes[IMM8 as usize]
}

#[inline]
pub fn _mm_extract_epi64<const IMM1: i32>(a: __m128i) -> i64 {
    let lanes: [i64; 2] = a.lanes();
    lanes[IMM1 as usize]
}
