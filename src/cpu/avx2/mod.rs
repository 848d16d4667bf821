//! Kernels for AVX2 with FMA and F16C.

#![cfg(target_arch = "x86_64")]
// Tiles of registers are indexed: iterators over them do not stay in registers.
#![allow(clippy::needless_range_loop)]

/// Defines an axpy from `$add::<$flag, R>(a, rows, out, cols)` over R rows and one column.
macro_rules! axpys {
    ($name:ident, $add:ident, $flag:expr, $least:ident) => {
        #[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
        pub(super) unsafe fn $name(rows: &[*const u8], ahead: usize, a: &[f32], cols: usize, out: &mut [f32]) {
            let n = out.len() / cols;
            tiles!(rows.len(), [4, 2, 1], |R, r| {
                let rows: [*const u8; R] = std::array::from_fn(|k| rows[r + k]);
                for (b, out) in out.chunks_exact_mut(cols).enumerate() {
                    let a: [f32; R] = std::array::from_fn(|k| a[(r + k) * n + b]);
                    let ahead = if b == 0 { whole_rows(ahead, $least) } else { 0 };
                    // SAFETY: the caller's promises.
                    unsafe { $add::<{ $flag }, R>(a, rows, ahead, out.as_mut_ptr(), cols) };
                }
            });
        }
    };
}

#[macro_use]
mod blocks;
mod by_rows;
mod floats;
mod gemm;
mod grouped;
mod sixteen;
mod tiles;

use super::{Columns, Isa, Kernels, Prefill, Rows, by_type, prefetch, whole_rows};
use crate::cpu::arch::*;
use crate::cpu::floats::Tiles;
use crate::formats::blocks::BlockType;
use crate::formats::rows::Quant;
use floats::{axpy_f16, axpy_f32, dot_float};
use grouped::{axpy_q4, axpy_q8, dot_grouped};

pub const KERNELS: Kernels = Kernels {
    isa: Isa::Avx2,
    dots: by_type(
        [dot_float::<{ floats::F32 }>, dot_float::<{ floats::F16 }>, dot_grouped::<false>, dot_grouped::<true>],
        blocks::DOTS,
    ),
    axpys: by_type([axpy_f32, axpy_f16, axpy_q8, axpy_q4], blocks::AXPYS),
    gemms: gemm::GEMMS,
    gemms_seven: gemm::SEVEN_BITS,
    fewest_codes: gemm::MIN_CODES,
    panel_width: gemm::WIDTH,
    fill_panel: gemm::fill,
    across: None,
    scaled: gemm::SCALED,
    sixteen: Some(sixteen::SIXTEEN),
    tiles: Tiles { by_rows: Some(by_rows::by_rows), ..tiles::TILES },
    recurrences: super::recurrence::AVX2,
    prefill: Prefill::Int8,
    rounds_floats: false,
    seven_bits: false,
    touch: super::touch_nothing,
    adds_as_read: [true; Quant::COUNT],
    lists_as_fast: true,
    rows_together: by_type([1; 4], [1; BlockType::COUNT]),
};

/// The same where there is AVX-VNNI.
pub const KERNELS_VNNI: Kernels = Kernels {
    isa: Isa::AvxVnni,
    gemms: gemm::GEMMS_VNNI,
    gemms_seven: [None; Quant::COUNT],
    across: Some(gemm::across),
    sixteen: Some(sixteen::SIXTEEN_VNNI),
    ..KERNELS
};

/// Up to this many columns rows are read one after the other, as for one column.
const FEW: usize = 4;

/// How many bytes ahead rows are prefetched where the caller leaves it to the kernel. On a Zen 3 one thread read f16 rows at 14.2 GB/s
/// without it and at 15.7 with it, two threads at 25.5 and 27.1, where loads alone reach 17.7 and 29.7 (24 lines gained nothing, 32
/// lost). Grouped types need more arithmetic per byte, and the hardware prefetches less far ahead of it: two threads read rows of q8_0 at
/// 17.7 GB/s without it and at 23.6 with 2 KiB, rows of q4_0 at 21.1 with 1 KiB and 23.4 with 2 KiB, where loads reach 25 and 27; up to
/// 3 KiB made no difference.
const FLOATS_AHEAD: usize = 1024;
const GROUPED_AHEAD: usize = 2048;

#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,f16c"))]
unsafe fn load_f16(at: *const u16) -> __m256 {
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.cast()) })
}

#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "f16c"))]
unsafe fn f16_at(at: *const u16) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(unsafe { at.read() } as i32)))
}

#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
fn sum4(s: [__m256; 4]) -> f32 {
    sum1(_mm256_add_ps(_mm256_add_ps(s[0], s[1]), _mm256_add_ps(s[2], s[3])))
}

#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
fn sum1(s: __m256) -> f32 {
    let halves = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps::<1>(s));
    let pairs = _mm_add_ps(halves, _mm_movehl_ps(halves, halves));
    _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)))
}
