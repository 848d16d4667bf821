//! Products of floats of two bytes with the many columns of a prompt, in whole numbers of 16 bits: two products an instruction and lane where
//! f32 has one, and the precision of the file is kept.
//!
//! Each [`GROUP`] numbers of a row or of a column have a scale, so that neither a code leaves 16 bits nor a sum of a group 32, which is sure where
//! the product of the roots of both sums of squares is below 2^31. That of weights is a power of two: a weight of f16 is exact where its code has
//! 11 bits or more, one of bf16 where it has eight, and a smaller one misses by half a code. Of even numbers a root mean square is 3000 to 6000
//! codes; beside a number that is far larger a code is 2^-15 of that. Sums of groups are f32.
//!
//! A tile multiplies two registers of lanes by a few broadcasts, two numbers each: a lane is a column and a broadcast a row where sums run along
//! rows, the other way round where they run across them. Each instruction set has the tile, and rows as f32; the rest is here.

// Lanes are indexed: iterators over several arrays at once are not made instructions of all lanes.
#![allow(clippy::needless_range_loop)]

use super::aligned::Aligned;
use super::floats::{Ahead, DEPTH, Form, Room, TILE_DEPTH, TURNED, Tiles};
use super::thread_pool::{Parts, ThreadPool};
use crate::formats::rows::Quant;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Numbers that have a scale together.
pub const GROUP: usize = 64;

/// Words of 32 bits that a group of one lane takes: codes, two a word, and what a code is multiplied by.
const WORDS: usize = GROUP / 2 + 1;

/// Broadcasts of a tile.
pub const HIGH: usize = 6;

/// Rows that become codes at a time: [`DEPTH`] numbers of each stay in L2 with the sums of all columns.
const ROWS: usize = 48;

/// Columns whose sums wait while the next piece of the rows becomes codes.
const COLUMNS: usize = 256;

/// Most lanes of a tile.
const MAX_WIDTH: usize = 32;

/// The most that the root of the sum of squares of a group's codes is, of inputs; of weights it is the root of 2^31. The product of both, which no
/// sum of products exceeds, is below 2^31 with what rounding adds, half of a code for each.
const INPUT_NORM: f32 = 46_300.0;

/// The largest code of an input.
const MAX_CODE: f32 = 32_767.0;

/// The words of a group of `width` lanes.
pub const fn words(width: usize) -> usize {
    WORDS * width
}

/// Where the broadcasts of a tile stand.
#[derive(Clone, Copy)]
pub struct Broadcasts {
    /// The first pair of the first group.
    pub codes: *const i32,
    /// The first scale.
    pub scales: *const f32,
    /// Words from one group's codes to the next one's.
    pub group: usize,
    /// Words from one group's scale to the next one's.
    pub scale: usize,
}

/// Where the sums of a tile go.
#[derive(Clone, Copy)]
pub struct Out {
    /// Lane 0 of the first broadcast.
    pub to: *mut f32,
    /// Numbers from one broadcast to the next.
    pub apart: usize,
    /// How many lanes there are.
    pub lanes: usize,
    /// How many broadcasts there are, at most [`HIGH`].
    pub count: usize,
    /// Whether they are added to what stands there.
    pub adds: bool,
}

/// Products of `groups` groups of lanes, [`words`] each, with the broadcasts.
///
/// # Safety
/// What is named can be read and written, lanes from a multiple of 64 bytes; the CPU has the instructions.
pub type Multiply = unsafe fn(lanes: *const u32, groups: usize, broadcasts: Broadcasts, out: Out);

/// Makes `count` floats of a row, of two bytes each, codes, which fill the last group up with zeros, and their scales. Codes lie from a multiple of
/// 64 bytes on.
///
/// # Safety
/// What is named can be read and written; the CPU has the instructions.
pub type Open = unsafe fn(form: Form, row: *const u8, count: usize, codes: *mut i16, scales: *mut f32);

/// Makes a group of lanes of `numbers[k * width + lane]`.
///
/// # Safety
/// What is named can be read and written; the CPU has the instructions.
pub type Lanes = unsafe fn(numbers: *const f32, to: *mut u32);

/// The products of an instruction set.
#[derive(Clone, Copy)]
pub struct Sixteen {
    /// Lanes of a tile: as many as a strip of its [`Tiles`] has rows.
    pub width: usize,
    /// Lanes of inputs.
    pub inputs: Lanes,
    /// Lanes of weights.
    pub weights: Lanes,
    /// Rows of weights.
    pub open: Open,
    /// The tile whose broadcasts are rows.
    pub rows: Multiply,
    /// The tile whose broadcasts are columns.
    pub across: Multiply,
}

/// Columns in codes of 16 bits: by panel of so many columns as a tile has lanes, by group, [`words`].
#[derive(Default, Debug)]
pub struct SixteenPanels {
    /// How many columns there are.
    pub n: usize,
    /// Numbers of a column.
    pub cols: usize,
    width: usize,
    words: Aligned<u32>,
}

/// Numbers of a panel, turned.
#[repr(C, align(64))]
struct Turned([f32; GROUP * MAX_WIDTH]);

impl SixteenPanels {
    /// Takes `values` (`[n * cols]`), on the threads of a pool or on this one. The buffer is kept between calls.
    pub fn set(&mut self, pool: Option<&mut ThreadPool>, tiles: &Tiles, sixteen: &Sixteen, values: &[f32], n: usize) {
        assert!(n > 0 && values.len().is_multiple_of(n));
        (self.n, self.cols, self.width) = (n, values.len() / n, sixteen.width);
        let (cols, width) = (self.cols, self.width);
        let each = cols.div_ceil(GROUP) * words(width);
        self.words.resize(n.div_ceil(width) * each);
        let all = Parts::new(&mut self.words);
        let take = |_: usize, panel: usize| {
            // SAFETY: a panel for each task.
            let out = unsafe { all.part(panel * each..(panel + 1) * each) };
            let here = &values[panel * width * cols..n.min((panel + 1) * width) * cols];
            for (g, out) in out.chunks_exact_mut(words(width)).enumerate() {
                let count = GROUP.min(cols - g * GROUP);
                let mut turned = Turned([0.0; GROUP * MAX_WIDTH]);
                for (part, columns) in here.chunks(TURNED * cols).enumerate() {
                    let mut pointers = [std::ptr::null(); TURNED];
                    let each = columns.chunks_exact(cols);
                    pointers.iter_mut().zip(each).for_each(|(p, column)| *p = column[g * GROUP..].as_ptr().cast());
                    let to = turned.0[part * TURNED..].as_mut_ptr();
                    let pointers = &pointers[..columns.len() / cols];
                    // SAFETY: `count` numbers of each column, and as many lanes; the tiles are for this machine.
                    unsafe { (tiles.turn)(Form::F32, pointers, count, to, width, TURNED) };
                }
                // SAFETY: a group of numbers, and of words.
                unsafe { (sixteen.inputs)(turned.0.as_ptr(), out.as_mut_ptr()) };
            }
        };
        match pool {
            Some(pool) => pool.run(n.div_ceil(width), take),
            None => (0..n.div_ceil(width)).for_each(|panel| take(0, panel)),
        }
    }

    /// Leaves nothing behind: to multiply by it is then a panic.
    pub fn clear(&mut self) {
        self.n = 0;
    }

    /// The words of a panel from number `first` on.
    fn panel(&self, panel: usize, first: usize) -> &[u32] {
        debug_assert!(first.is_multiple_of(GROUP));
        let each = self.cols.div_ceil(GROUP) * words(self.width);
        &self.words[panel * each + first / GROUP * words(self.width)..(panel + 1) * each]
    }
}

/// Rows as codes, and sums by panel and row.
#[repr(C, align(64))]
struct Buffers {
    codes: [[i16; DEPTH]; ROWS],
    scales: [[f32; DEPTH / GROUP]; ROWS],
    sums: [[f32; COLUMNS]; ROWS],
}

/// A strip's lanes.
#[repr(C, align(64))]
struct Strip([u32; words(MAX_WIDTH) * TILE_DEPTH / GROUP]);

/// Words from row to row of a buffer of codes.
pub const ROW_WORDS: usize = DEPTH / 2;

impl Sixteen {
    /// `y[b * stride + r] = row r · column b of x`, for all rows, which are floats of two bytes, and columns.
    ///
    /// # Safety
    /// As [`super::Dot`], of which each pointer is a row.
    pub unsafe fn rows(&self, form: Form, rows: &[*const u8], x: &SixteenPanels, y: *mut f32, stride: usize) {
        assert!(x.n > 0 && x.width == self.width && form.bytes() == 2);
        let mut buffers = MaybeUninit::<Buffers>::uninit();
        let buffers = buffers.as_mut_ptr();
        for (i, here) in rows.chunks(ROWS).enumerate() {
            let later = &rows[rows.len().min((i + 1) * ROWS)..];
            for first in (0..x.n).step_by(COLUMNS) {
                let columns = first..x.n.min(first + COLUMNS);
                for start in (0..x.cols).step_by(DEPTH) {
                    let is_last = start + DEPTH >= x.cols;
                    let next = if is_last { (&later[..later.len().min(ROWS)], 0) } else { (here, start + DEPTH) };
                    // SAFETY: the caller's promises.
                    unsafe { self.add_piece(form, here, x, columns.clone(), start, next, buffers) };
                }
                for b in columns.clone() {
                    for r in 0..here.len() {
                        // SAFETY: the caller promises these rows and columns; their sums were written.
                        unsafe { *y.add(b * stride + i * ROWS + r) = (*buffers).sums[r][b - first] };
                    }
                }
            }
        }
    }

    /// Adds the products of numbers `start..start + DEPTH` to the sums, which begin with the first. `next` are the rows that come then, and from
    /// which number on.
    #[allow(clippy::too_many_arguments)]
    unsafe fn add_piece(
        &self,
        form: Form,
        rows: &[*const u8],
        x: &SixteenPanels,
        columns: Range<usize>,
        start: usize,
        next: (&[*const u8], usize),
        to: *mut Buffers,
    ) {
        let count = DEPTH.min(x.cols - start);
        let panels = columns.start / self.width..columns.end.div_ceil(self.width);
        let tiles = panels.len() * rows.len().div_ceil(HIGH) * count.div_ceil(TILE_DEPTH);
        let mut ahead = Ahead::of(form.bytes(), x.cols, next, tiles);
        // SAFETY: the caller's promises; what is multiplied was written.
        unsafe {
            for (r, row) in rows.iter().enumerate() {
                let codes = (&raw mut (*to).codes[r]).cast();
                (self.open)(form, row.add(start * 2), count, codes, (&raw mut (*to).scales[r]).cast());
            }
            for first in (0..count).step_by(TILE_DEPTH) {
                let groups = TILE_DEPTH.min(count - first).div_ceil(GROUP);
                for panel in panels.clone() {
                    let lanes = x.panel(panel, start + first);
                    debug_assert!(lanes.len() >= groups * words(self.width));
                    for r in (0..rows.len()).step_by(HIGH) {
                        ahead.ask();
                        let broadcasts = Broadcasts {
                            codes: (&raw const (*to).codes[r]).cast::<i32>().add(first / 2),
                            scales: (&raw const (*to).scales[r]).cast::<f32>().add(first / GROUP),
                            group: GROUP / 2,
                            scale: 1,
                        };
                        let out = Out {
                            to: (&raw mut (*to).sums[r]).cast::<f32>().add(panel * self.width - columns.start),
                            apart: COLUMNS,
                            lanes: self.width.min(x.n - panel * self.width),
                            count: HIGH.min(rows.len() - r),
                            adds: start + first > 0,
                        };
                        (self.rows)(lanes.as_ptr(), groups, broadcasts, out);
                    }
                }
            }
        }
    }

    /// `y[b * stride + j] += sum over k of number k of column b times number range.start + j of row k`, as [`Tiles::across`].
    ///
    /// # Safety
    /// As [`Tiles::across`].
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn across<'a>(
        &self,
        tiles: &Tiles,
        quant: Quant,
        row: impl Fn(usize) -> &'a [u8],
        cols: usize,
        range: Range<usize>,
        x: &SixteenPanels,
        room: &mut Room,
        y: *mut f32,
        stride: usize,
    ) {
        assert!(x.n > 0 && x.width == self.width);
        tiles.strips(quant, row, x.cols, cols, range, room, |strip, k, i, rows| {
            let (mut lanes, groups) = (MaybeUninit::<Strip>::uninit(), k.len().div_ceil(GROUP));
            let lanes = lanes.as_mut_ptr().cast::<u32>();
            for g in 0..groups {
                let count = GROUP.min(k.len() - g * GROUP);
                // SAFETY: the numbers of the strip are written, and the last group has zeros behind them.
                unsafe {
                    let numbers = strip.add(g * GROUP * self.width);
                    let mut filled = Turned([0.0; GROUP * MAX_WIDTH]);
                    let numbers = if count == GROUP {
                        numbers
                    } else {
                        numbers.copy_to_nonoverlapping(filled.0.as_mut_ptr(), count * self.width);
                        filled.0.as_ptr()
                    };
                    (self.weights)(numbers, lanes.add(g * words(self.width)));
                }
            }
            for b in (0..x.n).step_by(HIGH) {
                // Six columns of two panels are two tiles.
                let wide = self.width - b % self.width;
                for columns in [b..x.n.min(b + HIGH.min(wide)), b + wide..x.n.min(b + HIGH)] {
                    if columns.is_empty() {
                        continue;
                    }
                    let words_of = x.panel(columns.start / self.width, k.start);
                    let at = columns.start % self.width;
                    // SAFETY: the caller's promises.
                    unsafe {
                        let broadcasts = Broadcasts {
                            codes: words_of.as_ptr().add(at).cast(),
                            scales: words_of.as_ptr().add(GROUP / 2 * self.width + at).cast(),
                            group: words(self.width),
                            scale: words(self.width),
                        };
                        let to = y.add(columns.start * stride + i * self.width);
                        let out = Out { to, apart: stride, lanes: rows, count: columns.len(), adds: true };
                        (self.across)(lanes, groups, broadcasts, out);
                    }
                }
            }
        });
    }
}

/// A whole number is a float's bits less those of this one, which it was added to: rounding that vectorises.
const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23

/// The code of a number that was divided by its scale.
#[inline(always)]
fn code(scaled: f32) -> i32 {
    (scaled + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()) as i32
}

/// What divides by this; nothing is left of what is divided by next to nothing, or by what is not finite.
#[inline(always)]
fn inverse(step: f32) -> f32 {
    if step > 1e-37 { 1.0 / step } else { 0.0 }
}

/// What weights are multiplied by to become codes, and codes to become weights: powers of two, so that the largest code is below 2^15 and the sum
/// of squares below 2^31. `exponent` is the largest magnitude's, as f32 has it. A weight that is not finite makes all of its group's products that.
#[inline(always)]
fn powers(exponent: u32, squares: f32) -> (f32, f32) {
    let of_squares = squares.to_bits() >> 23;
    let exponent = (exponent as i32).max(16);
    // Of numbers whose squares are beyond f32 no more is known than that they are 64 of the largest at most.
    let by_squares = if (8..255).contains(&of_squares) { (157 - of_squares as i32) >> 1 } else { 138 - exponent };
    let power = by_squares.min(141 - exponent).max(-126);
    let scale = |power: i32| f32::from_bits(((127 + power) as u32) << 23);
    (scale(power), if exponent == 255 { f32::NAN } else { scale(-power) })
}

/// The same where the largest magnitude of two bytes has these bits. All numbers of f16 below 2^-14 have one exponent.
#[inline(always)]
pub fn powers_of(form: Form, largest: u32, squares: f32) -> (f32, f32) {
    match form {
        Form::F16 if largest >= 0x7c00 => powers(255, squares),
        Form::F16 => powers((largest >> 10).max(1) + 112, squares),
        _ => powers(largest >> 7, squares),
    }
}

/// Lanes of inputs, `W` of them.
///
/// # Safety
/// As [`Lanes`].
#[inline(always)]
pub unsafe fn code_inputs<const W: usize>(numbers: *const f32, to: *mut u32) {
    // SAFETY: the caller promises a group.
    let numbers = unsafe { &*numbers.cast::<[[f32; W]; GROUP]>() };
    let mut tops = [0f32; W];
    for numbers in numbers {
        for lane in 0..W {
            let size = numbers[lane].abs();
            tops[lane] = if size > tops[lane] { size } else { tops[lane] };
        }
    }
    // By the largest first, or squares might be too small for f32, or too large.
    let (mut inverses, mut squares) = (tops.map(inverse), [0f32; W]);
    for numbers in numbers {
        for lane in 0..W {
            let scaled = numbers[lane] * inverses[lane];
            squares[lane] += scaled * scaled;
        }
    }
    let mut steps = [0f32; W];
    for lane in 0..W {
        let (of_all, of_top) = (squares[lane].sqrt() / INPUT_NORM, 1.0 / MAX_CODE);
        // What is not finite is in the squares.
        steps[lane] = tops[lane] * if of_top > of_all { of_top } else { of_all };
        inverses[lane] = inverse(steps[lane]);
    }
    // SAFETY: the caller promises a group.
    unsafe { pairs::<W>(numbers, &inverses, &steps, to) };
}

/// Lanes of weights, `W` of them.
///
/// # Safety
/// As [`Lanes`].
#[inline(always)]
pub unsafe fn code_weights<const W: usize>(numbers: *const f32, to: *mut u32) {
    // SAFETY: the caller promises a group.
    let numbers = unsafe { &*numbers.cast::<[[f32; W]; GROUP]>() };
    let (mut tops, mut squares) = ([0i32; W], [0f32; W]);
    for numbers in numbers {
        for lane in 0..W {
            tops[lane] = tops[lane].max((numbers[lane].to_bits() & 0x7fff_ffff) as i32);
            squares[lane] += numbers[lane] * numbers[lane];
        }
    }
    let (mut inverses, mut steps) = ([0f32; W], [0f32; W]);
    for lane in 0..W {
        (inverses[lane], steps[lane]) = powers(tops[lane] as u32 >> 23, squares[lane]);
    }
    // SAFETY: the caller promises a group.
    unsafe { pairs::<W>(numbers, &inverses, &steps, to) };
}

/// Writes a group of lanes.
#[inline(always)]
unsafe fn pairs<const W: usize>(numbers: &[[f32; W]; GROUP], inverses: &[f32; W], steps: &[f32; W], to: *mut u32) {
    // SAFETY: the caller promises a group.
    let to = unsafe { &mut *to.cast::<[[u32; W]; WORDS]>() };
    let (codes, scales) = to.split_at_mut(GROUP / 2);
    for (to, [first, second]) in codes.iter_mut().zip(numbers.as_chunks::<2>().0) {
        for lane in 0..W {
            let low = code(first[lane] * inverses[lane]) as u32 & 0xffff;
            to[lane] = low | (code(second[lane] * inverses[lane]) as u32) << 16;
        }
    }
    for lane in 0..W {
        scales[0][lane] = steps[lane].to_bits();
    }
}
