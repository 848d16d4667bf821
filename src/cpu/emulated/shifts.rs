//! Shifts and rotations of whole numbers. A count that is not below the bits of a lane leaves zeros, or the sign.

use super::{__m128i, __m256i, __m512i, Lanes, by_mask, lanewise};

lanewise! {
    __m128i as [u32; 4] {
        _mm_srlv_epi32 |a, count| a.checked_shr(count).unwrap_or(0);
    }
    __m128i as [u64; 2] {
        _mm_srlv_epi64 |a, count| right(a, count);
    }
    __m256i as [u32; 8] {
        _mm256_sllv_epi32 |a, count| a.checked_shl(count).unwrap_or(0);
        _mm256_srlv_epi32 |a, count| a.checked_shr(count).unwrap_or(0);
    }
    __m256i as [u64; 4] {
        _mm256_srlv_epi64 |a, count| right(a, count);
    }
    __m512i as [u32; 16] {
        _mm512_rolv_epi32 |a, count| a.rotate_left(count % 32);
        _mm512_rorv_epi32 |a, count| a.rotate_right(count % 32);
        _mm512_srlv_epi32 |a, count| a.checked_shr(count).unwrap_or(0);
    }
}

#[inline]
fn right(a: u64, count: u64) -> u64 {
    if count < 64 { a >> count } else { 0 }
}

/// Shifts by a count that stands in the instruction.
macro_rules! by_constant {
    ($($name:ident<$imm:ty>($v:ident as [$t:ty; $n:tt]) |$a:ident, $count:ident| $e:expr;)*) => {$(
        #[inline]
        pub fn $name<const IMM8: $imm>(a: $v) -> $v {
            let lanes: [$t; $n] = a.lanes();
            let $count = IMM8 as u32;
            $v::of(lanes.map(|$a| $e))
        }
    )*};
}
by_constant! {
    _mm_slli_epi16<i32>(__m128i as [u16; 8]) |a, count| a.checked_shl(count).unwrap_or(0);
    _mm_srli_epi16<i32>(__m128i as [u16; 8]) |a, count| a.checked_shr(count).unwrap_or(0);
    _mm_srli_epi32<i32>(__m128i as [u32; 4]) |a, count| a.checked_shr(count).unwrap_or(0);
    _mm256_slli_epi16<i32>(__m256i as [u16; 16]) |a, count| a.checked_shl(count).unwrap_or(0);
    _mm256_slli_epi32<i32>(__m256i as [u32; 8]) |a, count| a.checked_shl(count).unwrap_or(0);
    _mm256_srai_epi16<i32>(__m256i as [i16; 16]) |a, count| a >> count.min(15);
    _mm256_srli_epi16<i32>(__m256i as [u16; 16]) |a, count| a.checked_shr(count).unwrap_or(0);
    _mm256_srli_epi32<i32>(__m256i as [u32; 8]) |a, count| a.checked_shr(count).unwrap_or(0);
    _mm512_slli_epi16<u32>(__m512i as [u16; 32]) |a, count| a.checked_shl(count).unwrap_or(0);
    _mm512_slli_epi32<u32>(__m512i as [u32; 16]) |a, count| a.checked_shl(count).unwrap_or(0);
    _mm512_srai_epi32<u32>(__m512i as [i32; 16]) |a, count| a >> count.min(31);
    _mm512_srli_epi16<u32>(__m512i as [u16; 32]) |a, count| a.checked_shr(count).unwrap_or(0);
    _mm512_srli_epi32<u32>(__m512i as [u32; 16]) |a, count| a.checked_shr(count).unwrap_or(0);
}

#[inline]
pub fn _mm512_mask_srli_epi32<const IMM8: u32>(src: __m512i, k: u16, a: __m512i) -> __m512i {
    __m512i::of(by_mask::<u32, 16>(k.into(), _mm512_srli_epi32::<IMM8>(a).lanes(), src.lanes()))
}

/// Shifts by the lower half of a register.
macro_rules! by_register {
    ($($name:ident([$t:ty; $n:tt]) |$a:ident, $count:ident| $e:expr;)*) => {$(
        #[inline]
        pub fn $name(a: __m256i, count: __m128i) -> __m256i {
            let (lanes, [count, _]): ([$t; $n], [u64; 2]) = (a.lanes(), count.lanes());
            let $count = count.min(64) as u32;
            __m256i::of(lanes.map(|$a| $e))
        }
    )*};
}
by_register! {
    _mm256_sll_epi16([u16; 16]) |a, count| a.checked_shl(count).unwrap_or(0);
    _mm256_sll_epi32([u32; 8]) |a, count| a.checked_shl(count).unwrap_or(0);
    _mm256_srl_epi16([u16; 16]) |a, count| a.checked_shr(count).unwrap_or(0);
}
