//! Products with many columns, as those of `avx512/gemm` with registers of half the size.
//!
//! Weights are signed, inputs unsigned and 128 too large, those of seven bits 64. With AVX-VNNI four products are added at once. Without it
//! two are, in 16 bits, where sums of codes up to 32 fit; codes of eight bits become numbers of 16 bits, whose products are added in 32, or
//! meet inputs of seven bits.

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
pub(in crate::cpu) use across::across;
use scaled::{Packs as PackRows, scaled};
use source::{Packs, Source};
use std::mem::MaybeUninit;
use std::ops::Range;
pub(super) use tile::in_order;
use tile::{FOURS, NUMBERS, PAIRS, Panel, SEVENS, Sums};

/// Columns of a panel, and of a tile.
pub(in crate::cpu) const WIDTH: usize = 6;

/// Registers of rows in a strip.
const HIGH: usize = 4;

/// Rows of a register.
const LANES: usize = 8;

/// The [`gemm::ScaledAcross`] of the types that have one.
pub(in crate::cpu) const SCALED: [Option<ScaledAcross>; Quant::COUNT] = {
    let mut all: [Option<ScaledAcross>; Quant::COUNT] = [None; Quant::COUNT];
    all[Quant::Q4.index()] = Some(scaled::<PackRows>);
    // What `down` of a mix is coded in.
    all[Quant::Block(BlockType::Q5_K).index()] = Some(scaled::<blocks::Q5_K>);
    all
};

/// As [`gemm::fill`].
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
pub(in crate::cpu) unsafe fn fill(columns: &[&[f32]], width: usize, given: f32, bits: Bits, out: &mut [u32]) {
    gemm::fill_up(columns.len(), width, bits, out);
    for (c, column) in columns.iter().enumerate() {
        for (group, values) in out.chunks_exact_mut(words(width)).zip(column.as_chunks::<GROUP>().0) {
            // SAFETY: 32 numbers.
            let numbers = [0, 1, 2, 3].map(|i| unsafe { _mm256_loadu_ps(values.as_ptr().add(i * LANES)) });
            let sizes = numbers.map(|v| _mm256_andnot_ps(_mm256_set1_ps(-0.0), v));
            let tops = _mm256_max_ps(_mm256_max_ps(sizes[0], sizes[1]), _mm256_max_ps(sizes[2], sizes[3]));
            let tops = _mm_max_ps(_mm256_castps256_ps128(tops), _mm256_extractf128_ps::<1>(tops));
            let tops = _mm_max_ps(tops, _mm_movehl_ps(tops, tops));
            let top = _mm_cvtss_f32(_mm_max_ss(tops, _mm_movehdup_ps(tops)));
            let step = if given > 0.0 { given } else { top / bits.most() };
            let inverse = _mm256_set1_ps(if step > 0.0 { 1.0 / step } else { 0.0 });
            let most = bits.most();
            let [a, b, c_, d] = numbers.map(|v| {
                let scaled = _mm256_min_ps(_mm256_mul_ps(v, inverse), _mm256_set1_ps(most));
                _mm256_cvtps_epi32(_mm256_max_ps(scaled, _mm256_set1_ps(-most)))
            });
            // Four codes of each of the four registers' low halves, then of their high halves.
            let codes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c_, d));
            let raised = _mm256_add_epi8(codes, _mm256_set1_epi8(bits.raised() as i8));
            let sums = _mm256_sad_epu8(raised, _mm256_setzero_si256());
            let sums = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
            let raised_by = i32::from(bits.raised()) * (GROUP / 2) as i32;
            let [low, high] = [_mm_cvtsi128_si32(sums), _mm_extract_epi32::<2>(sums)].map(|sum| sum - raised_by);
            let mut fours = [0u32; GROUP / 4];
            // SAFETY: as many bytes.
            unsafe { _mm256_storeu_si256(fours.as_mut_ptr().cast(), raised) };
            for (k, four) in [0, 4, 1, 5, 2, 6, 3, 7].into_iter().enumerate() {
                group[k * width + c] = fours[four];
            }
            group[8 * width + c] = step.to_bits();
            for (k, sum) in [low + high, low, high].into_iter().enumerate() {
                group[(9 + k) * width + c] = (step * sum as f32).to_bits();
            }
        }
    }
}

/// The types, how their codes are multiplied without AVX-VNNI (those of eight bits as numbers), and from how many columns on that is faster
/// than the row kernels: unpacking 32 rows has to cost less than it saves (runs/2026-11-25-avx2-prompts).
macro_rules! by_type {
    ($($name:ident $form:ident $fewest:literal),*) => {
        const fn all<const VNNI: bool>() -> [Option<Gemm>; Quant::COUNT] {
            let mut all: [Option<Gemm>; Quant::COUNT] = [None; Quant::COUNT];
            if VNNI {
                all[Quant::Q4.index()] = Some(multiply::<Packs<true>, FOURS>);
                all[Quant::Q8.index()] = Some(multiply::<Packs<false>, FOURS>);
                $(all[Quant::Block(BlockType::$name).index()] = Some(multiply::<blocks::$name, FOURS>);)*
            } else {
                all[Quant::Q4.index()] = Some(multiply::<Packs<true>, PAIRS>);
                all[Quant::Q8.index()] = Some(multiply::<Packs<false>, NUMBERS>);
                $(all[Quant::Block(BlockType::$name).index()] = Some(multiply::<blocks::$name, $form>);)*
            }
            all
        }

        /// As `fewest_codes` of the kernels.
        pub(in crate::cpu) const MIN_CODES: [usize; Quant::COUNT] = {
            let mut all = [usize::MAX; Quant::COUNT];
            all[Quant::Q4.index()] = 12;
            all[Quant::Q8.index()] = 24;
            $(all[Quant::Block(BlockType::$name).index()] = $fewest;)*
            all
        };
    };
}
by_type! {
    Q8_0 NUMBERS 12, Q4_0 PAIRS 12, Q4_1 PAIRS 12, Q5_0 PAIRS 9, Q5_1 PAIRS 16, Q2_K PAIRS 33, Q3_K PAIRS 12, Q4_K PAIRS 9, Q5_K PAIRS 16,
    Q6_K PAIRS 9, IQ4_NL NUMBERS 12, IQ4_XS NUMBERS 12, MXFP4 PAIRS 12
}

/// The products of AVX2.
pub(in crate::cpu) const GEMMS: [Option<Gemm>; Quant::COUNT] = all::<false>();

/// Those of AVX2 with inputs of seven bits, for types whose codes take eight.
pub(in crate::cpu) const SEVEN_BITS: [Option<Gemm>; Quant::COUNT] = {
    let mut all: [Option<Gemm>; Quant::COUNT] = [None; Quant::COUNT];
    all[Quant::Q8.index()] = Some(multiply::<Packs<false>, SEVENS>);
    all[Quant::Block(BlockType::Q8_0).index()] = Some(multiply::<blocks::Q8_0, SEVENS>);
    all[Quant::Block(BlockType::IQ4_NL).index()] = Some(multiply::<blocks::IQ4_NL, SEVENS>);
    all[Quant::Block(BlockType::IQ4_XS).index()] = Some(multiply::<blocks::IQ4_XS, SEVENS>);
    all
};

/// The products of AVX-VNNI.
pub(in crate::cpu) const GEMMS_VNNI: [Option<Gemm>; Quant::COUNT] = all::<true>();

/// The [`Gemm`] of one type, whose codes are multiplied in the form FORM.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn multiply<T: Source, const FORM: u8>(rows: &[*const u8], x: &Panels, y: *mut f32, stride: usize) {
    debug_assert!(x.width == WIDTH && x.bits == if FORM == SEVENS { Bits::Seven } else { Bits::Eight });
    gemm::strips(rows.len(), HIGH * LANES, x, |first, panels| {
        // SAFETY: the caller's promises.
        unsafe { strip::<T, FORM>(rows, first, x, panels, y, stride) };
    });
}

/// Products of the strip that begins at row `first` with some panels of columns.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn strip<T: Source, const FORM: u8>(
    rows: &[*const u8],
    first: usize,
    x: &Panels,
    panels: Range<usize>,
    y: *mut f32,
    stride: usize,
) {
    let mut panel: MaybeUninit<Panel> = MaybeUninit::uninit();
    let mut sums: Waiting<Sums> = MaybeUninit::uninit();
    let (here, later) = rows[first..].split_at((rows.len() - first).min(HIGH * LANES));
    let (tile, depth) =
        const { (tile::tile(FORM, T::KIND), if FORM == FOURS || T::PACKED { DEPTH } else { DEPTH / 2 }) };
    let piece = |start: usize| start..(start + depth).min(x.cols);
    for start in (0..x.cols).step_by(depth) {
        let numbers = piece(start);
        for i in 0..HIGH {
            // Registers that have no rows are those of the last row, too: a tile multiplies all.
            let some = here.chunks(LANES).nth(i).unwrap_or(&here[here.len() - 1..]);
            // SAFETY: the caller's promises.
            unsafe { source::unpack::<T, FORM>(some, x.cols, numbers.clone(), panel.as_mut_ptr(), i) };
        }
        // What is unpacked next is asked for while the columns pass, a few rows at a time.
        let is_last = numbers.end == x.cols;
        let (next, at) = if is_last { (&later[..later.len().min(HIGH * LANES)], 0) } else { (here, numbers.end) };
        let count = panels.len();
        for (place, p) in panels.clone().enumerate() {
            for row in &next[place * next.len() / count..(place + 1) * next.len() / count] {
                T::piece(x.cols, piece(at)).step_by(64).for_each(|byte| prefetch(row.wrapping_add(byte)));
            }
            let input = x.panel(p, start / GROUP);
            debug_assert!(input.len() >= numbers.len() / GROUP * words(WIDTH));
            // SAFETY: the caller's promises; sums of an earlier piece were written by it.
            unsafe {
                let out = Out {
                    sums: sums.as_mut_ptr().cast::<Sums>().add(place),
                    y: y.add(p * WIDTH * stride + first),
                    stride,
                    rows: here.len(),
                    columns: WIDTH.min(x.n - p * WIDTH),
                    is_first: start == 0,
                    is_last,
                    adds: false,
                };
                tile(panel.assume_init_ref(), numbers.len() / GROUP, input.as_ptr(), out);
            }
        }
    }
}
