//! Products with many columns.
//!
//! A strip is 32 rows, two registers of 16. A tile multiplies a strip by [`WIDTH`] columns: for each four numbers two loads of weights and
//! six broadcasts feed twelve instructions that multiply and add. Weights are signed and inputs unsigned, 128 too large; that is taken
//! out before it is added, by what the sums begin with.
//!
//! That beginning also has the bits of 1.5 * 2^23, so that the sum of a group, read as a float, is that number plus the sum, and one
//! multiplication and subtraction makes it the sum times its scale: scales have at most 22 bits, so that their products with 1.5 * 2^23
//! are exact and nothing but the result is rounded. A group of 32 then costs two instructions beside eight times the products.

mod across;
mod scaled;
mod source;
mod tile;

use super::prefetch;
use crate::cpu::arch::*;
use crate::cpu::gemm::{self, DEPTH, Gemm, Out, Panels, ScaledAcross, Waiting, words};
use crate::cpu::rounding::Bits;
use crate::formats::blocks::{self, BlockType};
use crate::formats::rows::{GROUP, Quant};
pub(super) use across::across;
use scaled::{Packs as PackRows, scaled};
use source::{Packs, Source};
use std::mem::MaybeUninit;
use std::ops::Range;
use tile::{Panel, Sums};

/// Columns of a tile.
pub(super) const WIDTH: usize = 6;

/// Registers of rows in a strip.
const HIGH: usize = 2;

/// Rows of a register.
const LANES: usize = 16;

/// Up to so many panels of columns the lines of the next piece are prefetched one by one between their groups: in a row most were dropped, and
/// 16 columns of Q8_0 took a thread of a Zen 4 a seventh longer. Of more columns fewer rows are asked for at a time.
const FEW_PANELS: usize = 3;

/// Most lines of a strip's next piece: those of [`DEPTH`] numbers in eight bits with their scales.
const MAX_LINES: usize = HIGH * LANES * 10;

/// As [`gemm::fill`].
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(super) unsafe fn fill(columns: &[&[f32]], width: usize, given: f32, bits: Bits, out: &mut [u32]) {
    gemm::fill_up(columns.len(), width, bits, out);
    for (c, column) in columns.iter().enumerate() {
        for (group, values) in out.chunks_exact_mut(words(width)).zip(column.as_chunks::<GROUP>().0) {
            // SAFETY: 32 numbers.
            let numbers = unsafe { [_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values.as_ptr().add(LANES))] };
            let top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(numbers[0]), _mm512_abs_ps(numbers[1])));
            let step = if given > 0.0 { given } else { top / bits.most() };
            let inverse = _mm512_set1_ps(if step > 0.0 { 1.0 / step } else { 0.0 });
            let (mut codes, mut total) = ([0; GROUP / 4], 0);
            for half in 0..2 {
                let scaled = _mm512_mul_ps(numbers[half], inverse);
                let most = bits.most();
                let scaled = _mm512_max_ps(_mm512_min_ps(scaled, _mm512_set1_ps(most)), _mm512_set1_ps(-most));
                let rounded = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(scaled));
                let raised = _mm_add_epi8(rounded, _mm_set1_epi8(bits.raised() as i8));
                // SAFETY: half the codes.
                unsafe { _mm_storeu_si128(codes.as_mut_ptr().add(half * GROUP / 8).cast(), raised) };
                let sums = _mm_sad_epu8(raised, _mm_setzero_si128());
                let sum = _mm_cvtsi128_si32(sums) + _mm_extract_epi32::<2>(sums);
                let sum = sum - i32::from(bits.raised()) * (GROUP / 2) as i32;
                total += sum;
                group[(10 + half) * width + c] = (step * sum as f32).to_bits();
            }
            for (k, four) in codes.into_iter().enumerate() {
                group[k * width + c] = four;
            }
            group[8 * width + c] = step.to_bits();
            group[9 * width + c] = (step * total as f32).to_bits();
        }
    }
}

/// The types, and from how many columns on their product is faster than the row kernels: unpacking 32 rows has to cost less than it saves
/// (runs/2026-11-25-turned-nibbles).
macro_rules! by_type {
    ($($name:ident $fewest:literal),*) => {
        /// The products of all types that have them.
        pub(super) const GEMMS: [Option<Gemm>; Quant::COUNT] = {
            let mut all: [Option<Gemm>; Quant::COUNT] = [None; Quant::COUNT];
            all[Quant::Q8.index()] = Some(multiply::<Packs<false>>);
            all[Quant::Q4.index()] = Some(multiply::<Packs<true>>);
            $(all[Quant::Block(BlockType::$name).index()] = Some(multiply::<blocks::$name>);)*
            all
        };

        /// As `fewest_codes` of the kernels.
        pub(super) const MIN_CODES: [usize; Quant::COUNT] = {
            let mut all = [9; Quant::COUNT];
            $(all[Quant::Block(BlockType::$name).index()] = $fewest;)*
            all
        };
    };
}
by_type! {
    Q8_0 9, Q4_0 8, Q4_1 8, Q5_0 9, Q5_1 9, Q2_K 9, Q3_K 9, Q4_K 9, Q5_K 9, Q6_K 9, IQ4_NL 8, IQ4_XS 8, MXFP4 8
}

/// The [`gemm::ScaledAcross`] of the types that have one.
pub(super) const SCALED: [Option<ScaledAcross>; Quant::COUNT] = {
    let mut all: [Option<ScaledAcross>; Quant::COUNT] = [None; Quant::COUNT];
    all[Quant::Q8.index()] = Some(scaled::<PackRows<false>>);
    all[Quant::Q4.index()] = Some(scaled::<PackRows<true>>);
    // What `down` of a mix is coded in.
    all[Quant::Block(BlockType::Q5_K).index()] = Some(scaled::<blocks::Q5_K>);
    all
};

/// The [`Gemm`] of one type.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn multiply<T: Source>(rows: &[*const u8], x: &Panels, y: *mut f32, stride: usize) {
    debug_assert_eq!(x.width, WIDTH);
    gemm::strips(rows.len(), HIGH * LANES, x, |first, panels| {
        // SAFETY: the caller's promises.
        unsafe { strip::<T>(rows, first, x, panels, y, stride) };
    });
}

/// Products of the strip that begins at row `first` with some panels of columns.
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn strip<T: Source>(
    rows: &[*const u8],
    first: usize,
    x: &Panels,
    panels: Range<usize>,
    y: *mut f32,
    stride: usize,
) {
    let mut panel: MaybeUninit<Panel> = MaybeUninit::uninit();
    let mut sums: Waiting<Sums> = MaybeUninit::uninit();
    let mut lines = [std::ptr::null(); MAX_LINES];
    let (here, later) = rows[first..].split_at((rows.len() - first).min(HIGH * LANES));
    let tiles = const { tile::tiles(source::kind::<T>()) }[here.len().div_ceil(LANES) - 1];
    for start in (0..x.cols).step_by(DEPTH) {
        let groups = (x.cols - start).min(DEPTH) / GROUP;
        for (i, rows) in here.chunks(LANES).enumerate() {
            // SAFETY: the caller's promises.
            unsafe { source::unpack::<T>(rows, x.cols, start, panel.as_mut_ptr(), i) };
        }
        // What is unpacked next is asked for while the columns pass, a few rows at a time, or a few lines where few columns pass.
        let is_last = start + DEPTH >= x.cols;
        let (next, at) = if is_last { (&later[..later.len().min(HIGH * LANES)], 0) } else { (here, start + DEPTH) };
        let (mut asked, count) = (0, panels.len());
        let one_by_one = count <= FEW_PANELS;
        for row in next.iter().filter(|_| one_by_one) {
            for (line, byte) in lines[asked..].iter_mut().zip(T::piece(x.cols, at).step_by(64)) {
                (*line, asked) = (row.wrapping_add(byte), asked + 1);
            }
        }
        for (i, p) in panels.clone().enumerate() {
            let ask = &lines[i * asked / count..(i + 1) * asked / count];
            for row in next[i * next.len() / count..(i + 1) * next.len() / count].iter().filter(|_| !one_by_one) {
                T::piece(x.cols, at).step_by(64).for_each(|byte| prefetch(row.wrapping_add(byte)));
            }
            let input = x.panel(p, start / GROUP);
            debug_assert!(input.len() >= groups * words(WIDTH));
            let columns = WIDTH.min(x.n - p * WIDTH);
            // SAFETY: the caller's promises; sums of an earlier piece were written by it.
            unsafe {
                let out = Out {
                    sums: sums.as_mut_ptr().cast::<Sums>().add(i),
                    y: y.add(p * WIDTH * stride + first),
                    stride,
                    rows: here.len(),
                    columns,
                    is_first: start == 0,
                    is_last,
                    adds: false,
                };
                tiles[columns.div_ceil(2) - 1](panel.assume_init_ref(), groups, input.as_ptr(), ask, out);
            }
        }
    }
}
