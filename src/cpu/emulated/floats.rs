//! Arithmetic, comparison and logic of floats.

use super::{
    __m128, __m256, __m512, _CMP_EQ_OQ, _CMP_GE_OQ, _CMP_GT_OQ, _CMP_LE_OQ, _CMP_LT_OQ, Lanes, by_mask, lanewise,
};

lanewise! {
    __m128 as [f32; 4] {
        _mm_add_ps |a, b| a + b;
        _mm_max_ps |a, b| max(a, b);
    }
    __m256 as [f32; 8] {
        _mm256_add_ps |a, b| a + b;
        _mm256_div_ps |a, b| a / b;
        _mm256_max_ps |a, b| max(a, b);
        _mm256_min_ps |a, b| min(a, b);
        _mm256_mul_ps |a, b| a * b;
    }
    __m256 as [u32; 8] {
        _mm256_and_ps |a, b| a & b;
        _mm256_andnot_ps |a, b| !a & b;
        _mm256_xor_ps |a, b| a ^ b;
    }
    __m512 as [f32; 16] {
        _mm512_abs_ps |a| a.abs();
        _mm512_add_ps |a, b| a + b;
        _mm512_max_ps |a, b| max(a, b);
        _mm512_min_ps |a, b| min(a, b);
        _mm512_mul_ps |a, b| a * b;
        _mm512_sub_ps |a, b| a - b;
    }
    __m512 as [u32; 16] {
        _mm512_xor_ps |a, b| a ^ b;
    }
}

/// The second number where neither is larger.
#[inline]
fn max(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The second number where neither is smaller.
#[inline]
fn min(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

/// `a * b + c`, rounded once.
///
/// In f64 the product is exact, and the sum, rounded to f64 and then to f32, differs from the sum that is rounded once only where it lies
/// half-way between two numbers of f32 or is too small to be a normal one. Those few go the slow way.
#[inline]
fn fma<const N: usize>(a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
    const MIN_SUM: f64 = 2.0 * f32::MIN_POSITIVE as f64;
    let sums: [f64; N] = std::array::from_fn(|i| f64::from(a[i]) * f64::from(b[i]) + f64::from(c[i]));
    let doubtful = |sum: f64| sum.to_bits() & 0x1fff_ffff == 0x1000_0000 || (sum != 0.0 && sum.abs() < MIN_SUM);
    if sums.iter().fold(false, |any, sum| any | doubtful(*sum)) {
        return std::array::from_fn(|i| a[i].mul_add(b[i], c[i]));
    }
    sums.map(|sum| sum as f32)
}

/// Products and sums that are rounded once: the register, its lanes, and what of `b` and `c` is turned over.
macro_rules! fused {
    ($($name:ident($v:ident as $n:tt) |$b:ident, $c:ident| $turned:expr;)*) => {$(
        #[inline]
        pub fn $name(a: $v, b: $v, c: $v) -> $v {
            let ($b, $c): ([f32; $n], [f32; $n]) = (b.lanes(), c.lanes());
            let (b, c) = $turned;
            $v::of(fma::<$n>(a.lanes(), b, c))
        }
    )*};
}
fused! {
    _mm256_fmadd_ps(__m256 as 8) |b, c| (b, c);
    _mm256_fmsub_ps(__m256 as 8) |b, c| (b, c.map(|c| -c));
    _mm256_fnmadd_ps(__m256 as 8) |b, c| (b.map(|b| -b), c);
    _mm512_fmadd_ps(__m512 as 16) |b, c| (b, c);
    _mm512_fmsub_ps(__m512 as 16) |b, c| (b, c.map(|c| -c));
    _mm512_fnmadd_ps(__m512 as 16) |b, c| (b.map(|b| -b), c);
}

#[inline]
pub fn _mm512_maskz_mul_ps(k: u16, a: __m512, b: __m512) -> __m512 {
    __m512::of(by_mask(k.into(), _mm512_mul_ps(a, b).lanes(), [0f32; 16]))
}

#[inline]
pub fn _mm512_maskz_div_ps(k: u16, a: __m512, b: __m512) -> __m512 {
    let (a, b): ([f32; 16], [f32; 16]) = (a.lanes(), b.lanes());
    __m512::of(by_mask(k.into(), std::array::from_fn(|i| a[i] / b[i]), [0f32; 16]))
}

/// The lowest lanes are added, the others are those of `a`.
#[inline]
pub fn _mm_add_ss(a: __m128, b: __m128) -> __m128 {
    let ([first, rest @ ..], [other, ..]): ([f32; 4], [f32; 4]) = (a.lanes(), b.lanes());
    __m128::of([first + other, rest[0], rest[1], rest[2]])
}

/// The larger of the lowest lanes; the others are those of `a`.
#[inline]
pub fn _mm_max_ss(a: __m128, b: __m128) -> __m128 {
    let ([first, rest @ ..], [other, ..]): ([f32; 4], [f32; 4]) = (a.lanes(), b.lanes());
    __m128::of([max(first, other), rest[0], rest[1], rest[2]])
}

/// Adds the upper half to the lower until one number is left, as the standard library does.
#[inline]
pub fn _mm512_reduce_add_ps(a: __m512) -> f32 {
    let mut lanes: [f32; 16] = a.lanes();
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[half + i];
        }
    }
    lanes[0]
}

#[inline]
pub fn _mm512_reduce_max_ps(a: __m512) -> f32 {
    let mut lanes: [f32; 16] = a.lanes();
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = max(lanes[i], lanes[half + i]);
        }
    }
    lanes[0]
}

/// Whether the comparison of this number holds.
#[inline]
fn holds(comparison: i32, a: f32, b: f32) -> bool {
    match comparison {
        _CMP_EQ_OQ => a == b,
        _CMP_LT_OQ => a < b,
        _CMP_LE_OQ => a <= b,
        _CMP_GT_OQ => a > b,
        _CMP_GE_OQ => a >= b,
        _ => panic!("comparison {comparison} is not emulated: write it here, and a row of the law for it"),
    }
}

#[inline]
pub fn _mm256_cmp_ps<const IMM5: i32>(a: __m256, b: __m256) -> __m256 {
    let (a, b): ([f32; 8], [f32; 8]) = (a.lanes(), b.lanes());
    __m256::of(std::array::from_fn::<u32, 8, _>(|i| if holds(IMM5, a[i], b[i]) { u32::MAX } else { 0 }))
}

#[inline]
pub fn _mm512_cmp_ps_mask<const IMM5: i32>(a: __m512, b: __m512) -> u16 {
    let (a, b): ([f32; 16], [f32; 16]) = (a.lanes(), b.lanes());
    (0..16).fold(0, |mask, i| mask | u16::from(holds(IMM5, a[i], b[i])) << i)
}
