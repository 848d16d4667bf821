//! The vector instructions of x86-64 that kernels use, in plain Rust: slow, complete, and on every machine.
//!
//! Only a build with `cfg(emulated)` has this module; there [`super::arch`] names it in place of the standard library's. Names, signatures
//! and results are those of `std::arch::x86_64`: a law compares each with the processor's own instruction, where the machine at hand has it
//! (`tools/emulated`). A kernel that needs another instruction finds that it is missing here when tests are compiled.
//!
//! A register is an array of bytes and is read as lanes of any type that fits ([`Lanes`]).

// The names are the processor's.
#![allow(missing_docs, non_camel_case_types)]

mod conversions;
mod floats;
mod integers;
mod memory;
mod permutes;
mod shifts;

pub use conversions::*;
pub use floats::*;
pub use integers::*;
pub use memory::*;
pub use permutes::*;
pub use shifts::*;
// What processor this is, and numbers.
pub use std::arch::x86_64::{
    __cpuid, __mmask8, __mmask16, __mmask32, __mmask64, _CMP_EQ_OQ, _CMP_GE_OQ, _CMP_GT_OQ, _CMP_LE_OQ, _CMP_LT_OQ,
    _MM_HINT_T0, _MM_HINT_T1,
};

/// A hint that changes no result.
#[inline]
pub fn _mm_prefetch<const STRATEGY: i32>(_: *const i8) {}

/// A register as lanes of the array `A`, the lowest first.
pub trait Lanes<A>: Copy {
    /// What the lanes hold.
    fn lanes(self) -> A;
    /// The register whose lanes hold this.
    fn of(lanes: A) -> Self;
}

/// A type of registers of so many bytes, with the arrays that they are read as.
macro_rules! register {
    ($name:ident, $bytes:tt, $([$lane:ty; $n:tt])*) => {
        #[repr(C, align($bytes))]
        #[derive(Clone, Copy, Debug)]
        pub struct $name([u8; $bytes]);
        $(impl Lanes<[$lane; $n]> for $name {
            #[inline]
            fn lanes(self) -> [$lane; $n] {
                bytemuck::cast(self.0)
            }
            #[inline]
            fn of(lanes: [$lane; $n]) -> Self {
                $name(bytemuck::cast(lanes))
            }
        })*
    };
}
register!(__m128i, 16, [u8; 16] [i8; 16] [u16; 8] [i16; 8] [u32; 4] [i32; 4] [u64; 2] [i64; 2] [u128; 1]);
register!(__m256i, 32, [u8; 32] [i8; 32] [u16; 16] [i16; 16] [u32; 8] [i32; 8] [u64; 4] [i64; 4] [u128; 2]);
register!(__m512i, 64, [u8; 64] [i8; 64] [u16; 32] [i16; 32] [u32; 16] [i32; 16] [u64; 8] [i64; 8] [u128; 4]);
register!(__m128, 16, [f32; 4] [u32; 4] [u128; 1] [u8; 16]);
register!(__m256, 32, [f32; 8] [u32; 8] [u128; 2] [u8; 32]);
register!(__m512, 64, [f32; 16] [u32; 16] [u128; 4] [u8; 64]);
register!(__m256d, 32, [f64; 4] [u128; 2] [u8; 32]);

/// Instructions that compute each lane of the result from the same lane of all operands: the register, the lanes it is read as, and for each
/// instruction what it makes of the lanes.
macro_rules! lanewise {
    ($($v:ident as [$t:ty; $n:tt] { $($name:ident |$($x:ident),+| $e:expr;)* })*) => {$($(
        #[inline]
        pub fn $name($($x: $v),+) -> $v {
            $(let $x: [$t; $n] = $x.lanes();)+
            $v::of(std::array::from_fn::<$t, $n, _>(|i| {
                $(let $x = $x[i];)+
                $e
            }))
        }
    )*)*};
}
use lanewise;

/// `chosen[i]` where bit i of the mask is set, `other[i]` elsewhere.
#[inline]
fn by_mask<T: Copy, const N: usize>(mask: u64, chosen: [T; N], other: [T; N]) -> [T; N] {
    std::array::from_fn(|i| if mask >> i & 1 == 1 { chosen[i] } else { other[i] })
}
