//! Products of rows of floats with many columns, which are what a lane is: rows are read as they lie, one after the other, and only become
//! f32. Turning them instead, so that a lane is a row, took a tenth of the time with 128 columns: of rows a power of two apart, as most are,
//! all lines have the same place in L1.

use super::load_f16;
use super::tiles::{LANES, WIDTH};
use crate::cpu::FloatPanels;
use crate::cpu::arch::*;
use crate::cpu::floats::{self, Ahead, DEPTH, Form, TILE_DEPTH};
use crate::formats::rows::Quant;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Rows that become f32 at a time: [`DEPTH`] numbers of each stay in L2 with the sums of all columns.
const ROWS: usize = 48;

/// Rows of a tile: by two registers of columns twelve sums.
const HIGH: usize = 6;

/// Panels of columns whose sums wait while the next piece of the rows becomes f32: 256 columns.
const PANELS: usize = 16;

/// Registers of columns in a panel.
const WIDE: usize = WIDTH / LANES;

/// Rows as f32, and sums by panel and row.
#[repr(C, align(64))]
struct Buffers {
    numbers: [[f32; DEPTH]; ROWS],
    sums: [[[f32; WIDTH]; ROWS]; PANELS],
}

/// As [`floats::ByRows`].
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn by_rows(quant: Quant, rows: &[*const u8], x: &FloatPanels, y: *mut f32, stride: usize) {
    let mut buffers = MaybeUninit::<Buffers>::uninit();
    let all = x.n.div_ceil(WIDTH);
    for (i, here) in rows.chunks(ROWS).enumerate() {
        let later = &rows[rows.len().min((i + 1) * ROWS)..];
        for first in (0..all).step_by(PANELS) {
            let panels = first..all.min(first + PANELS);
            // SAFETY: the caller's promises; all sums that are written out were written.
            unsafe {
                for start in (0..x.cols).step_by(DEPTH) {
                    let is_last = start + DEPTH >= x.cols;
                    let next = if is_last { (&later[..later.len().min(ROWS)], 0) } else { (here, start + DEPTH) };
                    add_piece(quant, here, x, panels.clone(), start, next, buffers.as_mut_ptr());
                }
                let y = y.add(first * WIDTH * stride + i * ROWS);
                let columns = x.n - first * WIDTH;
                write_out(&(*buffers.as_ptr()).sums, here.len(), columns.min(PANELS * WIDTH), y, stride);
            }
        }
    }
}

/// Adds the products of numbers `start..start + DEPTH` to the sums, which begin with the first. `next` are the rows that come then, and from
/// which number on.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn add_piece(
    quant: Quant,
    rows: &[*const u8],
    x: &FloatPanels,
    panels: Range<usize>,
    start: usize,
    next: (&[*const u8], usize),
    to: *mut Buffers,
) {
    let count = DEPTH.min(x.cols - start);
    let tiles = panels.len() * rows.len().div_ceil(HIGH) * count.div_ceil(TILE_DEPTH);
    let bytes = Form::of(quant).map_or(0, Form::bytes);
    let mut ahead = Ahead::of(bytes, x.cols, next, tiles);
    // SAFETY: the caller's promises; the numbers that are multiplied were written.
    unsafe {
        let numbers = (&raw mut (*to).numbers).cast::<f32>();
        for (r, &row) in rows.iter().enumerate() {
            let to = numbers.add(r * DEPTH);
            match Form::of(quant) {
                Some(form) => open(form, row.add(start * form.bytes()), count, to),
                None => floats::decode(quant, row, x.cols, start, count, to),
            }
        }
        for first in (0..count).step_by(TILE_DEPTH) {
            let depth = TILE_DEPTH.min(count - first);
            for (place, panel) in panels.clone().enumerate() {
                let input = x.panel(panel, start + first);
                debug_assert!(input.len() >= depth * WIDTH);
                let mut r = 0;
                while r < rows.len() {
                    ahead.ask();
                    let (w, left) = (numbers.add(r * DEPTH + first), rows.len() - r);
                    let sums = (&raw mut (*to).sums[place][r]).cast();
                    let begins = start + first == 0;
                    // Fewer than eight sums wait for each other: eight rows are four and four.
                    r += match left {
                        4 | 5 | 8 => tile::<4>(w, depth, input.as_ptr(), sums, begins),
                        HIGH.. => tile::<HIGH>(w, depth, input.as_ptr(), sums, begins),
                        3 => tile::<3>(w, depth, input.as_ptr(), sums, begins),
                        2 => tile::<2>(w, depth, input.as_ptr(), sums, begins),
                        _ => tile::<1>(w, depth, input.as_ptr(), sums, begins),
                    };
                }
            }
        }
    }
}

/// Makes `count` floats f32.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn open(form: Form, at: *const u8, count: usize, to: *mut f32) {
    // SAFETY: the caller promises the numbers, and room.
    unsafe {
        if form == Form::F32 {
            return at.copy_to_nonoverlapping(to.cast(), count * 4);
        }
        let wide = |eight: *const u16| {
            if form == Form::F16 {
                return load_f16(eight);
            }
            let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(eight.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
        };
        let (at, whole) = (at.cast::<u16>(), count / LANES * LANES);
        for k in (0..whole).step_by(LANES) {
            _mm256_storeu_ps(to.add(k), wide(at.add(k)));
        }
        if whole < count {
            let (mut last, mut numbers) = ([0u16; LANES], [0f32; LANES]);
            at.add(whole).copy_to_nonoverlapping(last.as_mut_ptr(), count - whole);
            _mm256_storeu_ps(numbers.as_mut_ptr(), wide(last.as_ptr()));
            numbers.as_ptr().copy_to_nonoverlapping(to.add(whole), count - whole);
        }
    }
}

/// Adds the products of R rows, [`DEPTH`] numbers apart, with a panel of columns to their sums, or begins with them; returns R.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn tile<const R: usize>(
    w: *const f32,
    depth: usize,
    x: *const f32,
    to: *mut [[f32; LANES]; WIDE],
    begins: bool,
) -> usize {
    let mut sums = [[_mm256_setzero_ps(); WIDE]; R];
    // SAFETY: the caller promises `depth` numbers of each, and the sums.
    unsafe {
        for k in 0..depth {
            let columns = [_mm256_load_ps(x.add(k * WIDTH)), _mm256_load_ps(x.add(k * WIDTH + LANES))];
            for r in 0..R {
                let number = _mm256_broadcast_ss(&*w.add(r * DEPTH + k));
                for c in 0..WIDE {
                    sums[r][c] = _mm256_fmadd_ps(number, columns[c], sums[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..WIDE {
                let at = (*to.add(r))[c].as_mut_ptr();
                let before = if begins { _mm256_setzero_ps() } else { _mm256_load_ps(at) };
                _mm256_store_ps(at, _mm256_add_ps(before, sums[r][c]));
            }
        }
    }
    R
}

/// Writes the sums of so many rows and columns to their places in the output.
#[cfg_attr(not(emulated), target_feature(enable = "avx2,fma,f16c"))]
unsafe fn write_out(sums: &[[[f32; WIDTH]; ROWS]; PANELS], rows: usize, columns: usize, y: *mut f32, stride: usize) {
    for b in 0..columns {
        let panel = &sums[b / WIDTH];
        for (r, sums) in panel[..rows].iter().enumerate() {
            // SAFETY: the caller promises these rows and columns.
            unsafe { *y.add(b * stride + r) = sums[b % WIDTH] };
        }
    }
}
