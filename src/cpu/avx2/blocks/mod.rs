//! Kernels for GGUF's blocks as they lie in the file; each type has a file.
//!
//! All work on spans of 256 numbers: one long block or eight short ones. A type says how a span's codes come into registers, 32 at a time in
//! their own order, and its scales and minima in f32 ([`source::Source`]): a number is its scale times its code, plus its minimum. The rest
//! is here. Minima are multiplied by the sums of the inputs.

#[macro_use]
pub(super) mod source;
mod axpy;
mod iq4_nl;
mod iq4_xs;
mod k_scales;
mod many;
mod mxfp4;
mod one;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod short;

use super::floats::{self, axpy_bf16, dot_float};
use super::whole_rows;
use crate::cpu::{Axpy, Columns, Dot, Rows, portable};
use crate::formats::blocks::{self, Block, BlockType};
use axpy::axpy;
use source::Source;

/// Dots and axpys by type. A type that is not named here has those of plain Rust.
macro_rules! kernels {
    ($($name:ident),*) => {
        /// The dots of all block types.
        pub(super) const DOTS: [Dot; BlockType::COUNT] = {
            let mut all = portable::BLOCK_DOTS;
            all[BlockType::BF16 as usize] = dot_float::<{ floats::BF16 }>;
            $(all[BlockType::$name as usize] = dot::<blocks::$name>;)*
            all
        };
        /// The axpys of all block types.
        pub(super) const AXPYS: [Axpy; BlockType::COUNT] = {
            let mut all = portable::BLOCK_AXPYS;
            all[BlockType::BF16 as usize] = axpy_bf16;
            $(all[BlockType::$name as usize] = axpy::<blocks::$name>;)*
            all
        };
    };
}
kernels!(Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4);

/// How many bytes ahead rows are prefetched where the caller leaves it to the kernel. On an Intel server core one thread read rows of Q4_K at
/// 0.62 of what loads alone reach with 1 KiB, at 0.76 with 2 and at 0.84 with 4; Q8_0 at 0.67, 0.79 and 0.90; with 8 KiB as with 4.
const BLOCKS_AHEAD: usize = 4096;

/// The dot kernel.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn dot<T: Source + Block>(rows: Rows, count: usize, x: &Columns, y: *mut f32, stride: usize) {
    let rows = Rows { ahead: whole_rows(rows.ahead, BLOCKS_AHEAD), ..rows };
    // SAFETY: the caller's promises.
    unsafe {
        if x.n == 1 {
            one::dot::<T>(rows, count, x, y);
        } else {
            many::dot::<T>(rows, count, x, y, stride);
        }
    }
}
