//! Products with many columns in f32: for weights that are floats, for prompts that are to be exact, for keys and values, and for what is
//! summed over rows and not within them.
//!
//! A tile multiplies a strip of rows, turned so that a lane is a row, by a few columns, turned so that the numbers which meet a register
//! of weights are broadcasts from memory. Each instruction set has the tile and the turning; what is here is the order in which they are
//! called. A number of the result is a sum in the order of the numbers that were multiplied, [`DEPTH`] at a time: it depends neither on
//! the rows and columns beside it nor on the threads.

use super::Panels;
use super::aligned::Aligned;
use super::gemm::Across;
use super::thread_pool::{Parts, ThreadPool};
use crate::formats::blocks::BlockType;
use crate::formats::rows::{self, Quant};
use half::slice::HalfFloatSliceExt;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Numbers of a row that are turned at a time: a pack, which is the least that can be decoded by itself.
pub const DEPTH: usize = rows::PACK;

/// Numbers of a sum that a tile adds at a time: a strip's then stay in L1 with those of the columns.
pub const TILE_DEPTH: usize = 256;

/// Most rows of a strip.
const MAX_HIGH: usize = 32;

/// Most columns of a tile.
const MAX_WIDTH: usize = 16;

/// Rows that [`Turn`] takes at a time.
pub const TURNED: usize = 16;

/// How the floats of a row lie in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// 4 bytes a number.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
}

impl Form {
    /// Bytes of a number.
    pub const fn bytes(self) -> usize {
        match self {
            Form::F32 => 4,
            Form::F16 | Form::Bf16 => 2,
        }
    }

    /// The form of a type whose rows are floats.
    pub const fn of(quant: Quant) -> Option<Form> {
        match quant {
            Quant::F32 => Some(Form::F32),
            Quant::F16 => Some(Form::F16),
            Quant::Block(BlockType::BF16) => Some(Form::Bf16),
            _ => None,
        }
    }
}

/// `to[k * stride + i]` = number k of row i, for `count` numbers of at most [`TURNED`] rows; 0 for lanes from there up to `lanes`.
///
/// # Safety
/// `count` numbers of each row can be read and what is named can be written; the CPU has the instructions.
pub type Turn = unsafe fn(form: Form, rows: &[*const u8], count: usize, to: *mut f32, stride: usize, lanes: usize);

/// Where a tile's products go.
#[derive(Clone, Copy)]
pub struct Out {
    /// Row 0 of column 0.
    pub y: *mut f32,
    /// Numbers from one column to the next.
    pub stride: usize,
    /// How many rows there are.
    pub rows: usize,
    /// How many columns there are.
    pub columns: usize,
    /// Whether products are added to what stands there.
    pub adds: bool,
}

/// Row r of column c becomes, or is added, the sum over k below `depth` of `w[k * high + r] * x[k * width + c]`.
///
/// # Safety
/// What is named can be read and written, `w` in whole [`TURNED`] rows or, where a strip is less, whole strips; the CPU has the
/// instructions.
pub type Multiply = unsafe fn(w: *const f32, depth: usize, x: *const f32, out: Out);

/// As [`Tiles::rows`], of an instruction set that does not turn rows.
///
/// # Safety
/// As [`Tiles::rows`].
pub type ByRows = unsafe fn(quant: Quant, rows: &[*const u8], x: &FloatPanels, y: *mut f32, stride: usize);

/// The products of an instruction set.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// Columns of a tile.
    pub width: usize,
    /// Rows of a strip.
    pub high: usize,
    /// Turns columns, and rows where there is no `by_rows`.
    pub turn: Turn,
    /// Products by rows as they lie.
    pub by_rows: Option<ByRows>,
    /// The tile.
    pub multiply: Multiply,
}

/// Columns of numbers, turned, by pieces of [`TILE_DEPTH`] numbers of all panels, which lie one behind the other: number k of the column at
/// place c of panel p of the piece that begins at number f, and has d numbers, is `numbers[(f * panels + p * d + k) * width + c]`.
#[derive(Default, Debug)]
pub struct FloatPanels {
    /// How many columns there are.
    pub n: usize,
    /// Numbers of a column.
    pub cols: usize,
    width: usize,
    numbers: Aligned,
}

impl FloatPanels {
    /// Takes `values` (`[n * cols]`) for `tiles`, on the threads of a pool or on this one. The buffer is kept between calls.
    pub fn set(&mut self, pool: Option<&mut ThreadPool>, tiles: &Tiles, values: &[f32], n: usize) {
        assert!(n > 0 && values.len().is_multiple_of(n));
        (self.n, self.cols, self.width) = (n, values.len() / n, tiles.width);
        let (cols, width) = (self.cols, self.width);
        self.numbers.resize(n.div_ceil(width) * cols * width);
        let numbers = Parts::new(&mut self.numbers);
        let take = |_: usize, panel: usize| {
            let mut columns = [std::ptr::null(); MAX_WIDTH];
            let here = width.min(n - panel * width);
            for first in (0..cols).step_by(TILE_DEPTH) {
                let depth = TILE_DEPTH.min(cols - first);
                for (i, column) in columns[..here].iter_mut().enumerate() {
                    *column = values[(panel * width + i) * cols + first..][..depth].as_ptr().cast();
                }
                let start = (first * n.div_ceil(width) + panel * depth) * width;
                // SAFETY: a panel for each task; `depth` numbers of each column; the tiles are for this machine.
                unsafe {
                    let to = numbers.part(start..start + depth * width);
                    (tiles.turn)(Form::F32, &columns[..here], depth, to.as_mut_ptr(), width, width);
                }
            }
        };
        match pool {
            Some(pool) => pool.run(n.div_ceil(width), take),
            None => (0..n.div_ceil(width)).for_each(|panel| take(0, panel)),
        }
    }

    /// Makes room for `n` columns of `cols` numbers, so that nothing is allocated later.
    pub fn reserve(&mut self, tiles: &Tiles, n: usize, cols: usize) {
        self.numbers.resize(self.numbers.len().max(n.next_multiple_of(tiles.width) * cols));
    }

    /// Leaves nothing behind: to multiply by it is then a panic.
    pub fn clear(&mut self) {
        self.n = 0;
    }

    /// A panel's numbers of the piece that begins at number `first`.
    pub fn panel(&self, panel: usize, first: usize) -> &[f32] {
        debug_assert!(first.is_multiple_of(TILE_DEPTH));
        let depth = TILE_DEPTH.min(self.cols - first);
        let start = (first * self.n.div_ceil(self.width) + panel * depth) * self.width;
        &self.numbers[start..start + depth * self.width]
    }
}

/// A strip's numbers, turned.
#[repr(C, align(64))]
struct Strip([f32; DEPTH * MAX_HIGH]);

/// Numbers of rows that are no floats, decoded.
#[repr(C, align(64))]
struct Decoded([[f32; DEPTH]; TURNED]);

impl Tiles {
    /// `y[b * stride + r] = row r · column b of x`, for all rows, which are of type `quant`, and columns.
    ///
    /// # Safety
    /// As [`super::Dot`], of which each pointer is a row.
    pub unsafe fn rows(&self, quant: Quant, rows: &[*const u8], x: &FloatPanels, y: *mut f32, stride: usize) {
        assert!(x.n > 0 && x.width == self.width);
        if let Some(by_rows) = self.by_rows {
            // SAFETY: the caller's promises.
            return unsafe { by_rows(quant, rows, x, y, stride) };
        }
        let mut strip = MaybeUninit::<Strip>::uninit();
        let strip = strip.as_mut_ptr().cast::<f32>();
        for (i, here) in rows.chunks(self.high).enumerate() {
            for start in (0..x.cols).step_by(DEPTH) {
                let count = DEPTH.min(x.cols - start);
                for (part, rows) in here.chunks(TURNED).enumerate() {
                    // SAFETY: the caller's promises; the strip has `high` lanes.
                    unsafe { self.turn_rows(quant, rows, x.cols, start, count, strip.add(part * TURNED)) };
                }
                // SAFETY: the registers of rows that there are were written; the caller's promises.
                unsafe { self.columns(strip, start, count, x, y.add(i * self.high), stride, here.len(), start > 0) };
            }
        }
    }

    /// Turns numbers `start..start + count` of at most [`TURNED`] rows, of floats or of what has to be decoded.
    unsafe fn turn_rows(
        &self,
        quant: Quant,
        rows: &[*const u8],
        cols: usize,
        start: usize,
        count: usize,
        to: *mut f32,
    ) {
        let lanes = TURNED.min(self.high);
        let mut pointers = [std::ptr::null(); TURNED];
        if let Some(form) = Form::of(quant) {
            pointers.iter_mut().zip(rows).for_each(|(p, row)| *p = row.wrapping_add(start * form.bytes()));
            // SAFETY: the caller's promises.
            return unsafe { (self.turn)(form, &pointers[..rows.len()], count, to, self.high, lanes) };
        }
        let mut decoded = MaybeUninit::<Decoded>::uninit();
        let decoded = decoded.as_mut_ptr().cast::<f32>();
        for (i, (pointer, row)) in pointers.iter_mut().zip(rows).enumerate() {
            // SAFETY: whole rows; a row of `decoded` each.
            unsafe {
                let out = decoded.add(i * DEPTH);
                decode(quant, *row, cols, start, count, out);
                *pointer = out.cast_const().cast();
            }
        }
        // SAFETY: as above.
        unsafe { (self.turn)(Form::F32, &pointers[..rows.len()], count, to, self.high, lanes) };
    }

    /// Multiplies a strip by all columns, from number `start` of them on.
    #[allow(clippy::too_many_arguments)]
    unsafe fn columns(
        &self,
        strip: *const f32,
        start: usize,
        count: usize,
        x: &FloatPanels,
        y: *mut f32,
        stride: usize,
        rows: usize,
        adds: bool,
    ) {
        for first in (0..count).step_by(TILE_DEPTH) {
            let depth = TILE_DEPTH.min(count - first);
            for panel in 0..x.n.div_ceil(self.width) {
                let columns = self.width.min(x.n - panel * self.width);
                let input = x.panel(panel, start + first);
                debug_assert!(input.len() >= depth * self.width);
                // SAFETY: the caller's promises.
                unsafe {
                    let y = y.add(panel * self.width * stride);
                    let out = Out { y, stride, rows, columns, adds: adds || first > 0 };
                    (self.multiply)(strip.add(first * self.high), depth, input.as_ptr(), out);
                }
            }
        }
    }

    /// `y[b * stride + j] += sum over k of number k of column b times number range.start + j of row k`, for j below the range's length:
    /// products of columns with as many rows as a column has numbers, which are of type `quant` and `cols` long. The range begins at a
    /// multiple of [`DEPTH`] and ends at one or with the rows. `room` is workspace, kept between calls.
    ///
    /// # Safety
    /// `y` is writable at every index named; the tiles are for this machine.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn across<'a>(
        &self,
        quant: Quant,
        row: impl Fn(usize) -> &'a [u8],
        cols: usize,
        range: Range<usize>,
        x: &FloatPanels,
        room: &mut Room,
        y: *mut f32,
        stride: usize,
    ) {
        assert!(x.n > 0 && x.width == self.width);
        self.strips(quant, row, x.cols, cols, range, room, |strip, k, i, rows| {
            // SAFETY: the caller's promises; the numbers of the strip are written.
            unsafe { self.columns(strip, k.start, k.len(), x, y.add(i * self.high), stride, rows, true) };
        });
    }

    /// Calls `see(strip, which rows it has numbers of, number of the strip, its numbers of each)` for each strip of numbers `range` of `count`
    /// rows.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn strips<'a>(
        &self,
        quant: Quant,
        row: impl Fn(usize) -> &'a [u8],
        count: usize,
        cols: usize,
        range: Range<usize>,
        room: &mut Room,
        see: impl Fn(*const f32, Range<usize>, usize, usize),
    ) {
        let (wide, high) = (range.len().next_multiple_of(self.high), self.high);
        room.resize(wide);
        for first in (0..count).step_by(TILE_DEPTH) {
            let depth = TILE_DEPTH.min(count - first);
            for k in 0..depth {
                rows::decode_range(quant, row(first + k), cols, range.start, &mut room.one[..range.len()]);
                for (strip, numbers) in room.strips.chunks_exact_mut(TILE_DEPTH * high).zip(room.one.chunks_exact(high))
                {
                    strip[k * high..(k + 1) * high].copy_from_slice(numbers);
                }
            }
            for (i, strip) in room.strips.chunks_exact(TILE_DEPTH * high).take(wide / high).enumerate() {
                see(strip.as_ptr(), first..first + depth, i, high.min(range.len() - i * high));
            }
        }
    }

    /// As [`Tiles::across`] for inputs in int8: weights are rounded to int8 with other scales, which run along the sum.
    ///
    /// # Safety
    /// As [`Tiles::across`].
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn across_codes<'a>(
        &self,
        multiply: Across,
        quant: Quant,
        row: impl Fn(usize) -> &'a [u8],
        cols: usize,
        range: Range<usize>,
        x: &Panels,
        room: &mut Room,
        y: *mut f32,
        stride: usize,
    ) {
        assert!(x.n > 0);
        self.strips(quant, row, x.cols, cols, range, room, |strip, k, i, rows| {
            // SAFETY: the caller's promises; the numbers of the strip are written.
            unsafe { multiply(strip, k.len(), x, k.start, y.add(i * self.high), stride, rows) };
        });
    }
}

/// Lines of what is read next, asked for a few with each tile: many at once are dropped.
pub(super) struct Ahead<'a> {
    rows: &'a [*const u8],
    /// From which byte of each row on, and how many lines.
    from: usize,
    lines: usize,
    /// How many were asked for, and are with each tile.
    asked: usize,
    each: usize,
}

impl<'a> Ahead<'a> {
    /// Of a piece from a number on of rows of `cols` numbers of so many bytes, over so many tiles.
    pub fn of(bytes: usize, cols: usize, (rows, start): (&'a [*const u8], usize), tiles: usize) -> Ahead<'a> {
        let lines = (DEPTH.min(cols - start) * bytes).div_ceil(64);
        Ahead { rows, from: start * bytes, lines, asked: 0, each: (rows.len() * lines).div_ceil(tiles) }
    }

    #[inline]
    pub fn ask(&mut self) {
        let all = self.rows.len() * self.lines;
        for i in self.asked..all.min(self.asked + self.each) {
            super::prefetch(self.rows[i / self.lines].wrapping_add(self.from + i % self.lines * 64));
        }
        self.asked += self.each;
    }
}

/// Decodes numbers `start..start + count` of a row of `cols`; they begin at a multiple of [`DEPTH`].
///
/// # Safety
/// The row is a whole one, and `to` has room for `count` numbers.
pub(super) unsafe fn decode(quant: Quant, row: *const u8, cols: usize, start: usize, count: usize, to: *mut f32) {
    let bytes = if quant.is_grouped() { quant.row_bytes(cols) } else { quant.number_bytes(cols) };
    // SAFETY: the caller's promises; zeros are numbers.
    unsafe {
        to.write_bytes(0, count);
        let row = std::slice::from_raw_parts(row, bytes);
        rows::decode_range(quant, row, cols, start, std::slice::from_raw_parts_mut(to, count));
    }
}

/// What [`Tiles::across`] works with.
#[derive(Default)]
pub struct Room {
    /// `[strips, TILE_DEPTH, high]`
    strips: Aligned,
    /// One row's numbers.
    one: Aligned,
}

impl Room {
    fn resize(&mut self, wide: usize) {
        self.strips.resize(self.strips.len().max(TILE_DEPTH * wide));
        self.one.resize(self.one.len().max(wide));
    }

    /// Makes room for ranges of `numbers`, so that nothing is allocated later.
    pub fn reserve(&mut self, tiles: &Tiles, numbers: usize) {
        self.resize(numbers.next_multiple_of(tiles.high));
    }
}

/// Tiles in plain Rust.
pub const PORTABLE: Tiles = Tiles { width: 4, high: 16, turn, by_rows: None, multiply };

unsafe fn turn(form: Form, rows: &[*const u8], count: usize, to: *mut f32, stride: usize, lanes: usize) {
    for (i, row) in rows.iter().enumerate() {
        let mut numbers = [0f32; 64];
        for start in (0..count).step_by(numbers.len()) {
            let numbers = &mut numbers[..(count - start).min(64)];
            // SAFETY: the caller promises these numbers.
            unsafe {
                let bytes = std::slice::from_raw_parts(row.add(start * form.bytes()), numbers.len() * form.bytes());
                match form {
                    Form::F32 => bytemuck::cast_slice_mut(numbers).copy_from_slice(bytes),
                    Form::F16 => {
                        let halves: &[half::f16] = bytemuck::cast_slice(bytes);
                        halves.convert_to_f32_slice(numbers);
                    }
                    Form::Bf16 => {
                        for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks::<2>().0) {
                            *number = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
                        }
                    }
                }
                numbers.iter().enumerate().for_each(|(k, number)| *to.add((start + k) * stride + i) = *number);
            }
        }
    }
    for k in 0..count {
        // SAFETY: the caller promises these lanes.
        (rows.len()..lanes).for_each(|i| unsafe { *to.add(k * stride + i) = 0.0 });
    }
}

unsafe fn multiply(w: *const f32, depth: usize, x: *const f32, out: Out) {
    let mut sums = [[0f32; 16]; 4];
    for k in 0..depth {
        // SAFETY: the caller promises whole strips and columns.
        let (w, x) = unsafe { (&*w.add(k * 16).cast::<[f32; 16]>(), &*x.add(k * 4).cast::<[f32; 4]>()) };
        for (sums, x) in sums.iter_mut().zip(x) {
            sums.iter_mut().zip(w).for_each(|(sum, w)| *sum += w * x);
        }
    }
    for (c, sums) in sums.iter().take(out.columns).enumerate() {
        for (r, sum) in sums.iter().take(out.rows).enumerate() {
            // SAFETY: the caller promises these places.
            let y = unsafe { &mut *out.y.add(c * out.stride + r) };
            *y = if out.adds { *y + sum } else { *sum };
        }
    }
}
