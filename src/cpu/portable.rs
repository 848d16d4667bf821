//! Kernels in plain Rust, for CPUs without AVX2. The others have the same signatures and the same order of groups.

use super::columns::BLOCK;
use super::{Axpy, Columns, Dot, Isa, Kernels, MAX_COLUMNS, Prefill, Rows, by_type};
use crate::formats::blocks::{self, Block, BlockType, each_block_type};
use crate::formats::rows::{GROUP, Quant, axpy_position, code_position, q4_code, scales};
use half::f16;
use half::slice::HalfFloatSliceExt;

pub const KERNELS: Kernels = Kernels {
    isa: Isa::Portable,
    dots: by_type([dot_f32, dot_f16, dot_q8, dot_q4], BLOCK_DOTS),
    axpys: by_type([axpy::<F32>, axpy::<F16>, axpy::<Q8>, axpy::<Q4>], BLOCK_AXPYS),
    gemms: [None; Quant::COUNT],
    gemms_seven: [None; Quant::COUNT],
    fewest_codes: [MAX_COLUMNS + 1; Quant::COUNT],
    panel_width: 1,
    fill_panel: super::gemm::fill,
    across: None,
    scaled: [None; Quant::COUNT],
    sixteen: None,
    tiles: super::floats::PORTABLE,
    recurrences: super::recurrence::PORTABLE,
    prefill: Prefill::Int8,
    rounds_floats: false,
    seven_bits: false,
    touch: super::touch_nothing,
    adds_as_read: [false; Quant::COUNT],
    lists_as_fast: false,
    rows_together: by_type([1, 1, 1, 2], [1; BlockType::COUNT]),
};

macro_rules! block_kernels {
    ($($name:ident),*) => {
        /// Dots of all block types, derived from their decoders, with inputs in f32: slow, and the truth for tests of whole models.
        pub(super) const BLOCK_DOTS: [Dot; BlockType::COUNT] = [$(dot_blocks::<blocks::$name>),*];
        /// Axpys of all block types, derived from their decoders.
        pub(super) const BLOCK_AXPYS: [Axpy; BlockType::COUNT] = [$(axpy_blocks::<blocks::$name>),*];
    };
}
each_block_type!(block_kernels);

dot_rows!(dot_f32, dot_f32_row);
dot_rows!(dot_f16, dot_f16_row);
dot_rows!(dot_q8, dot_q8_row);
dot_rows!(dot_q4, dot_q4_row);

/// Sums are kept in this many lanes so that the compiler may use what vectors the target has.
const LANES: usize = 8;

unsafe fn bytes<'a>(row: *const u8, quant: Quant, cols: usize) -> &'a [u8] {
    let bytes = if quant.is_grouped() { quant.row_bytes(cols) } else { quant.number_bytes(cols) };
    // SAFETY: the caller of a kernel promises that many bytes.
    unsafe { std::slice::from_raw_parts(row, bytes) }
}

/// Adds the products of `a` and `b`, which are of one length, to the sums. If more is to be added afterwards, the length is a multiple of
/// [`LANES`].
fn add_products(lanes: &mut [f32; LANES], a: &[f32], b: &[f32]) {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        lanes.iter_mut().zip(a.iter().zip(b)).for_each(|(lane, (a, b))| *lane += a * b);
    }
    lanes.iter_mut().zip(a_rest.iter().zip(b_rest)).for_each(|(lane, (a, b))| *lane += a * b);
}

fn dot_lanes(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    add_products(&mut lanes, a, b);
    lanes.iter().sum()
}

unsafe fn dot_f32_row(row: *const u8, x: &Columns, b: usize) -> f32 {
    let row: &[f32] = bytemuck::cast_slice(&unsafe { bytes(row, Quant::F32, x.cols) }[..x.cols * 4]);
    dot_lanes(row, x.values(b))
}

unsafe fn dot_f16_row(row: *const u8, x: &Columns, b: usize) -> f32 {
    let row: &[f16] = bytemuck::cast_slice(&unsafe { bytes(row, Quant::F16, x.cols) }[..x.cols * 2]);
    let (mut lanes, mut numbers) = ([0f32; LANES], [0f32; BLOCK]);
    for (row, x) in row.chunks(BLOCK).zip(x.values(b).chunks(BLOCK)) {
        // Many at once: a call for each number takes longer than its product.
        row.convert_to_f32_slice(&mut numbers[..row.len()]);
        add_products(&mut lanes, &numbers[..row.len()], x);
    }
    lanes.iter().sum()
}

unsafe fn dot_q8_row(row: *const u8, x: &Columns, b: usize) -> f32 {
    let row = unsafe { bytes(row, Quant::Q8, x.cols) };
    dot_codes(x, b, scales(Quant::Q8, row, x.cols), |i| row[code_position(i, x.cols)] as i8 as i32)
}

unsafe fn dot_q4_row(row: *const u8, x: &Columns, b: usize) -> f32 {
    let row = unsafe { bytes(row, Quant::Q4, x.cols) };
    dot_codes(x, b, scales(Quant::Q4, row, x.cols), |i| q4_code(row, i, x.cols) as i32 - 8)
}

fn dot_codes(x: &Columns, b: usize, steps: &[f16], code: impl Fn(usize) -> i32) -> f32 {
    let group = |g: usize| -> i32 {
        (g * GROUP..(g + 1) * GROUP).map(|i| code(i) * x.codes(b)[code_position(i, x.cols)] as i32).sum()
    };
    steps.iter().zip(x.steps(b)).enumerate().map(|(g, (sw, sx))| group(g) as f32 * sw.to_f32() * sx).sum()
}

/// A row type as a source of f32 numbers.
trait Row {
    const QUANT: Quant;
    /// The row's numbers from number `from` on, at most [`BLOCK`] of them.
    fn numbers(row: &[u8], cols: usize, from: usize, numbers: &mut [f32]);
}
struct F32;
struct F16;
struct Q8;
struct Q4;
impl Row for F32 {
    const QUANT: Quant = Quant::F32;
    fn numbers(row: &[u8], _: usize, from: usize, numbers: &mut [f32]) {
        let (row, _) = row[from * 4..].as_chunks();
        numbers.iter_mut().zip(row).for_each(|(number, bytes)| *number = f32::from_le_bytes(*bytes));
    }
}
impl Row for F16 {
    const QUANT: Quant = Quant::F16;
    fn numbers(row: &[u8], _: usize, from: usize, numbers: &mut [f32]) {
        let (row, _) = row[from * 2..].as_chunks();
        let mut halves = [f16::ZERO; BLOCK];
        halves.iter_mut().zip(row).for_each(|(half, bytes)| *half = f16::from_le_bytes(*bytes));
        halves[..numbers.len()].convert_to_f32_slice(numbers);
    }
}
impl Row for Q8 {
    const QUANT: Quant = Quant::Q8;
    fn numbers(row: &[u8], cols: usize, from: usize, numbers: &mut [f32]) {
        let scales = scales(Quant::Q8, row, cols);
        for (i, number) in (from..).zip(numbers) {
            *number = row[code_position(i, cols)] as i8 as f32 * scales[i / GROUP].to_f32();
        }
    }
}
impl Row for Q4 {
    const QUANT: Quant = Quant::Q4;
    fn numbers(row: &[u8], cols: usize, from: usize, numbers: &mut [f32]) {
        let scales = scales(Quant::Q4, row, cols);
        for (i, number) in (from..).zip(numbers) {
            *number = (q4_code(row, i, cols) as f32 - 8.0) * scales[i / GROUP].to_f32();
        }
    }
}

unsafe fn axpy<R: Row>(rows: &[*const u8], _: usize, a: &[f32], cols: usize, out: &mut [f32]) {
    let n = out.len() / cols;
    let mut numbers = [0f32; BLOCK];
    for (row, a) in rows.iter().zip(a.chunks_exact(n)) {
        // SAFETY: the caller's promises.
        let row = unsafe { bytes(*row, R::QUANT, cols) };
        for from in (0..cols).step_by(BLOCK) {
            let numbers = &mut numbers[..BLOCK.min(cols - from)];
            R::numbers(row, cols, from, numbers);
            for (a, out) in a.iter().zip(out.chunks_exact_mut(cols)) {
                if R::QUANT.is_grouped() {
                    (from..).zip(&*numbers).for_each(|(i, number)| out[axpy_position(i, cols)] += a * number);
                } else {
                    out[from..].iter_mut().zip(&*numbers).for_each(|(out, number)| *out += a * number);
                }
            }
        }
    }
}

/// Calls `see(numbers, index of the first)` for each of a row's blocks, decoded.
unsafe fn decode_blocks<T: Block>(row: *const u8, cols: usize, mut see: impl FnMut(&[f32], usize)) {
    // SAFETY: the caller of a kernel promises that many bytes.
    let row = unsafe { std::slice::from_raw_parts(row, cols / T::NUMBERS * T::BYTES) };
    let mut numbers = [0.0; BLOCK];
    for (i, block) in row.chunks_exact(T::BYTES).enumerate() {
        T::decode(block, &mut numbers[..T::NUMBERS]);
        see(&numbers[..T::NUMBERS], i * T::NUMBERS);
    }
}

unsafe fn dot_blocks<T: Block>(rows: Rows, count: usize, x: &Columns, y: *mut f32, stride: usize) {
    for r in 0..count {
        let mut sums = [0f64; super::MAX_COLUMNS];
        // More columns than that come in runs.
        for first in (0..x.n).step_by(sums.len()) {
            let n = sums.len().min(x.n - first);
            sums.fill(0.0);
            // SAFETY: the caller's promises.
            unsafe {
                decode_blocks::<T>(rows.row(r), x.cols, |numbers, at| {
                    for (b, sum) in sums[..n].iter_mut().enumerate() {
                        let x = &x.values(first + b)[at..at + numbers.len()];
                        *sum += f64::from(dot_lanes(numbers, x));
                    }
                });
                sums[..n].iter().enumerate().for_each(|(b, sum)| *y.add((first + b) * stride + r) = *sum as f32);
            }
        }
    }
}

unsafe fn axpy_blocks<T: Block>(rows: &[*const u8], _: usize, a: &[f32], cols: usize, out: &mut [f32]) {
    let n = out.len() / cols;
    for (row, a) in rows.iter().zip(a.chunks_exact(n)) {
        // SAFETY: the caller's promises.
        unsafe {
            decode_blocks::<T>(*row, cols, |numbers, at| {
                for (a, out) in a.iter().zip(out.chunks_exact_mut(cols)) {
                    out[at..].iter_mut().zip(numbers).for_each(|(out, number)| *out += a * number);
                }
            });
        }
    }
}
