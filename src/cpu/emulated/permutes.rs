//! Lanes at other places: interleaved, chosen, broadcast, packed; quarters and halves of registers.

use super::{__m128, __m128i, __m256, __m256d, __m256i, __m512, __m512i, Lanes, by_mask};

/// Lanes of the type in a quarter of 128 bits, within which most instructions stay.
const fn per_quarter<T>() -> usize {
    16 / size_of::<T>()
}

/// Lanes of the lower or the upper half of each quarter, those of `a` and `b` in turns.
#[inline]
fn interleaved<T: Copy, const N: usize>(upper: bool, a: [T; N], b: [T; N]) -> [T; N] {
    let all = per_quarter::<T>();
    std::array::from_fn(|i| {
        let from = i / all * all + i % all / 2 + if upper { all / 2 } else { 0 };
        if i % 2 == 0 { a[from] } else { b[from] }
    })
}

macro_rules! unpack {
    ($($v:ident as [$t:ty; $n:tt]: $low:ident, $high:ident;)*) => {$(
        #[inline]
        pub fn $low(a: $v, b: $v) -> $v {
            $v::of(interleaved::<$t, $n>(false, a.lanes(), b.lanes()))
        }
        #[inline]
        pub fn $high(a: $v, b: $v) -> $v {
            $v::of(interleaved::<$t, $n>(true, a.lanes(), b.lanes()))
        }
    )*};
}
unpack! {
    __m128i as [u64; 2]: _mm_unpacklo_epi64, _mm_unpackhi_epi64;
    __m256i as [u8; 32]: _mm256_unpacklo_epi8, _mm256_unpackhi_epi8;
    __m256i as [u16; 16]: _mm256_unpacklo_epi16, _mm256_unpackhi_epi16;
    __m256i as [u32; 8]: _mm256_unpacklo_epi32, _mm256_unpackhi_epi32;
    __m256i as [u64; 4]: _mm256_unpacklo_epi64, _mm256_unpackhi_epi64;
    __m256 as [f32; 8]: _mm256_unpacklo_ps, _mm256_unpackhi_ps;
    __m256d as [f64; 4]: _mm256_unpacklo_pd, _mm256_unpackhi_pd;
    __m512i as [u8; 64]: _mm512_unpacklo_epi8, _mm512_unpackhi_epi8;
    __m512i as [u16; 32]: _mm512_unpacklo_epi16, _mm512_unpackhi_epi16;
    __m512i as [u32; 16]: _mm512_unpacklo_epi32, _mm512_unpackhi_epi32;
    __m512i as [u64; 8]: _mm512_unpacklo_epi64, _mm512_unpackhi_epi64;
}

/// Bytes of the same quarter, chosen by their numbers; zero where a number's top bit is set.
#[inline]
fn chosen_bytes<const N: usize>(a: [u8; N], places: [u8; N]) -> [u8; N] {
    std::array::from_fn(|i| if places[i] & 0x80 != 0 { 0 } else { a[i / 16 * 16 + usize::from(places[i] & 15)] })
}

#[inline]
pub fn _mm_shuffle_epi8(a: __m128i, b: __m128i) -> __m128i {
    __m128i::of(chosen_bytes::<16>(a.lanes(), b.lanes()))
}

#[inline]
pub fn _mm256_shuffle_epi8(a: __m256i, b: __m256i) -> __m256i {
    __m256i::of(chosen_bytes::<32>(a.lanes(), b.lanes()))
}

#[inline]
pub fn _mm512_shuffle_epi8(a: __m512i, b: __m512i) -> __m512i {
    __m512i::of(chosen_bytes::<64>(a.lanes(), b.lanes()))
}

/// Part i of the two bits that choose one of four.
#[inline]
const fn two_bits(control: i32, i: usize) -> usize {
    (control >> (2 * i) & 3) as usize
}

#[inline]
pub fn _mm_shuffle_epi32<const IMM8: i32>(a: __m128i) -> __m128i {
    let a: [u32; 4] = a.lanes();
    __m128i::of(std::array::from_fn::<u32, 4, _>(|i| a[two_bits(IMM8, i)]))
}

/// In each quarter two lanes of `a`, then two of `b`.
#[inline]
pub fn _mm256_shuffle_ps<const MASK: i32>(a: __m256, b: __m256) -> __m256 {
    let (a, b): ([f32; 8], [f32; 8]) = (a.lanes(), b.lanes());
    __m256::of(std::array::from_fn::<f32, 8, _>(|i| {
        let from = i / 4 * 4 + two_bits(MASK, i % 4);
        if i % 4 < 2 { a[from] } else { b[from] }
    }))
}

/// Two quarters of `a`, then two of `b`.
#[inline]
fn chosen_quarters(control: i32, a: __m512i, b: __m512i) -> __m512i {
    let (a, b): ([u128; 4], [u128; 4]) = (a.lanes(), b.lanes());
    __m512i::of(std::array::from_fn::<u128, 4, _>(|i| if i < 2 { a } else { b }[two_bits(control, i)]))
}

#[inline]
pub fn _mm512_shuffle_i32x4<const MASK: i32>(a: __m512i, b: __m512i) -> __m512i {
    chosen_quarters(MASK, a, b)
}

#[inline]
pub fn _mm512_shuffle_i64x2<const MASK: i32>(a: __m512i, b: __m512i) -> __m512i {
    chosen_quarters(MASK, a, b)
}

/// Each half is one of the four of `a` and `b`, or zero.
#[inline]
fn chosen_halves(control: i32, a: [u128; 2], b: [u128; 2]) -> [u128; 2] {
    std::array::from_fn(|i| {
        let control = control >> (4 * i);
        if control & 8 != 0 { 0 } else { [a[0], a[1], b[0], b[1]][two_bits(control, 0)] }
    })
}

#[inline]
pub fn _mm256_permute2x128_si256<const IMM8: i32>(a: __m256i, b: __m256i) -> __m256i {
    __m256i::of(chosen_halves(IMM8, a.lanes(), b.lanes()))
}

#[inline]
pub fn _mm256_permute2f128_ps<const IMM8: i32>(a: __m256, b: __m256) -> __m256 {
    __m256::of(chosen_halves(IMM8, a.lanes(), b.lanes()))
}

#[inline]
pub fn _mm256_permute4x64_epi64<const IMM8: i32>(a: __m256i) -> __m256i {
    let a: [u64; 4] = a.lanes();
    __m256i::of(std::array::from_fn::<u64, 4, _>(|i| a[two_bits(IMM8, i)]))
}

/// Lanes of the whole register by their numbers, of which only so many bits count as there are lanes for.
#[inline]
fn permuted<T: Copy, const N: usize>(a: [T; N], places: [u32; N]) -> [T; N] {
    places.map(|place| a[place as usize % N])
}

#[inline]
pub fn _mm256_permutevar8x32_epi32(a: __m256i, idx: __m256i) -> __m256i {
    __m256i::of(permuted::<u32, 8>(a.lanes(), idx.lanes()))
}

#[inline]
pub fn _mm256_permutevar8x32_ps(a: __m256, idx: __m256i) -> __m256 {
    __m256::of(permuted::<f32, 8>(a.lanes(), idx.lanes()))
}

#[inline]
pub fn _mm512_permutexvar_epi32(idx: __m512i, a: __m512i) -> __m512i {
    __m512i::of(permuted::<u32, 16>(a.lanes(), idx.lanes()))
}

#[inline]
pub fn _mm512_permutexvar_epi64(idx: __m512i, a: __m512i) -> __m512i {
    let (a, places): ([u64; 8], [u64; 8]) = (a.lanes(), idx.lanes());
    __m512i::of(places.map(|place| a[place as usize % 8]))
}

#[inline]
pub fn _mm512_permutexvar_ps(idx: __m512i, a: __m512) -> __m512 {
    __m512::of(permuted::<f32, 16>(a.lanes(), idx.lanes()))
}

#[inline]
pub fn _mm512_permutex2var_epi16(a: __m512i, idx: __m512i, b: __m512i) -> __m512i {
    let (a, b, places): ([u16; 32], [u16; 32], [u16; 32]) = (a.lanes(), b.lanes(), idx.lanes());
    __m512i::of(places.map(|place| if place & 32 == 0 { a } else { b }[usize::from(place % 32)]))
}

#[inline]
pub fn _mm512_permutex2var_epi32(a: __m512i, idx: __m512i, b: __m512i) -> __m512i {
    let (a, b, places): ([u32; 16], [u32; 16], [u32; 16]) = (a.lanes(), b.lanes(), idx.lanes());
    __m512i::of(places.map(|place| if place & 16 == 0 { a } else { b }[place as usize % 16]))
}

/// In each quarter the lanes of `a`, then those of `b`, each made narrower.
#[inline]
fn packed<T: Copy, U: Copy, const N: usize, const M: usize>(a: [T; N], b: [T; N], narrow: impl Fn(T) -> U) -> [U; M] {
    let all = per_quarter::<T>();
    std::array::from_fn(|i| {
        let from = i / (2 * all) * all + i % all;
        narrow(if i % (2 * all) < all { a[from] } else { b[from] })
    })
}

#[inline]
fn narrow_32(a: i32) -> i16 {
    a.clamp(i16::MIN.into(), i16::MAX.into()) as i16
}

#[inline]
pub fn _mm256_packs_epi16(a: __m256i, b: __m256i) -> __m256i {
    let narrow = |a: i16| a.clamp(i8::MIN.into(), i8::MAX.into()) as i8;
    __m256i::of(packed::<i16, i8, 16, 32>(a.lanes(), b.lanes(), narrow))
}

#[inline]
pub fn _mm256_packs_epi32(a: __m256i, b: __m256i) -> __m256i {
    __m256i::of(packed::<i32, i16, 8, 16>(a.lanes(), b.lanes(), narrow_32))
}

#[inline]
pub fn _mm512_packs_epi32(a: __m512i, b: __m512i) -> __m512i {
    __m512i::of(packed::<i32, i16, 16, 32>(a.lanes(), b.lanes(), narrow_32))
}

#[inline]
pub fn _mm_movehdup_ps(a: __m128) -> __m128 {
    let a: [f32; 4] = a.lanes();
    __m128::of([a[1], a[1], a[3], a[3]])
}

/// The upper half of `b`, then that of `a`.
#[inline]
pub fn _mm_movehl_ps(a: __m128, b: __m128) -> __m128 {
    let (a, b): ([f32; 4], [f32; 4]) = (a.lanes(), b.lanes());
    __m128::of([b[2], b[3], a[2], a[3]])
}

#[inline]
pub fn _mm256_broadcastss_ps(a: __m128) -> __m256 {
    let [a, ..]: [f32; 4] = a.lanes();
    __m256::of([a; 8])
}

#[inline]
pub fn _mm256_broadcastsi128_si256(a: __m128i) -> __m256i {
    let [a]: [u128; 1] = a.lanes();
    __m256i::of([a; 2])
}

#[inline]
pub fn _mm512_broadcast_i32x4(a: __m128i) -> __m512i {
    let [a]: [u128; 1] = a.lanes();
    __m512i::of([a; 4])
}

#[inline]
pub fn _mm512_mask_broadcast_i32x4(src: __m512i, k: u16, a: __m128i) -> __m512i {
    __m512i::of(by_mask::<u32, 16>(k.into(), _mm512_broadcast_i32x4(a).lanes(), src.lanes()))
}

#[inline]
pub fn _mm512_broadcast_i64x4(a: __m256i) -> __m512i {
    let [low, high]: [u128; 2] = a.lanes();
    __m512i::of([low, high, low, high])
}

/// The upper half comes first.
#[inline]
pub fn _mm256_set_m128i(hi: __m128i, lo: __m128i) -> __m256i {
    let ([low], [high]): ([u128; 1], [u128; 1]) = (lo.lanes(), hi.lanes());
    __m256i::of([low, high])
}

/// A part of a register, and a register with another part in its place: parts by their number.
macro_rules! parts {
    ($($v:ident as $n:tt, $part:ident as $m:tt: $($extract:ident)? / $($insert:ident)?;)*) => {$(
        $(#[inline]
        pub fn $extract<const PART: i32>(a: $v) -> $part {
            let a: [u128; $n] = a.lanes();
            $part::of(std::array::from_fn::<u128, $m, _>(|i| a[PART as usize * $m + i]))
        })?
        $(#[inline]
        pub fn $insert<const PART: i32>(a: $v, b: $part) -> $v {
            let (mut a, b): ([u128; $n], [u128; $m]) = (a.lanes(), b.lanes());
            a[PART as usize * $m..][..$m].copy_from_slice(&b);
            $v::of(a)
        })?
    )*};
}
parts! {
    __m256 as 2, __m128 as 1: _mm256_extractf128_ps / _mm256_insertf128_ps;
    __m256i as 2, __m128i as 1: _mm256_extracti128_si256 / ;
    __m512 as 4, __m256 as 2: _mm512_extractf32x8_ps / _mm512_insertf32x8;
    __m512i as 4, __m256i as 2: _mm512_extracti64x4_epi64 / _mm512_inserti64x4;
}
