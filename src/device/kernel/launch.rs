//! Launches on a GPU: functions, grids and argument words, and the constants that host and CUDA sources share.

use super::{Function, View};
use crate::device::Buffer;
use crate::formats::rows::Quant;
use crate::model::block::BlockLayout;
use crate::model::config::{Activation, Ffn};

/// The scratch of a call begins at a multiple of so many bytes, which is enough for every vector load of the kernels.
pub const SCRATCH_ALIGN: u64 = 256;
/// Most launches of a call.
const MAX_LAUNCHES: usize = 4;
/// Most arguments of a function.
pub const MAX_ARGUMENTS: usize = 24;

/// Threads of a warp.
pub(super) const WARP: usize = 32;
/// Columns up to which a matrix is read by rows, eight columns at a time; beyond, tiles share what they read.
pub(super) const ROW_COLUMNS: usize = 8;
/// Shared memory of tiles of 32 grouped rows by 32 columns, and of 128 others by 64 (`kernels/tiles.cuh`).
pub(super) const GROUPED_TILE_BYTES: usize = 37888;
pub(super) const WIDE_TILE_BYTES: usize = 26112;
/// The same of tiles by tensor cores (`kernels/tensor_tiles.cuh`).
const TENSOR_GROUPED_TILE_BYTES: usize = 48128;
const TENSOR_HALF_TILE_BYTES: usize = 27648;

/// Functions `name_<quant>_<columns>`, as `FOR_QUANTS_AND_WIDTHS` of `kernels/rows.cuh` makes them, and those for rows of any type.
macro_rules! for_quants_and_widths {
    ($name:literal) => {
        &[
            concat!($name, "_f32_1"),
            concat!($name, "_f32_2"),
            concat!($name, "_f32_4"),
            concat!($name, "_f32_8"),
            concat!($name, "_f16_1"),
            concat!($name, "_f16_2"),
            concat!($name, "_f16_4"),
            concat!($name, "_f16_8"),
            concat!($name, "_q8_0_1"),
            concat!($name, "_q8_0_2"),
            concat!($name, "_q8_0_4"),
            concat!($name, "_q8_0_8"),
            concat!($name, "_q4_0_1"),
            concat!($name, "_q4_0_2"),
            concat!($name, "_q4_0_4"),
            concat!($name, "_q4_0_8"),
            concat!($name, "_any_1"),
            concat!($name, "_any_2"),
            concat!($name, "_any_4"),
            concat!($name, "_any_8"),
        ]
    };
}
pub(super) use for_quants_and_widths;

impl Function {
    /// Where this is the first of functions for all types and widths: the function for such rows and `width` columns at once, 1, 2, 4 or 8.
    pub(super) const fn of_rows(self, rows: RowKind, width: usize) -> Function {
        self.next(rows.index() * 4 + width.trailing_zeros() as usize)
    }
}

/// By what a card multiplies a prompt's columns. Rows for which there are no tiles by tensor cores are multiplied without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tiles {
    /// Each thread by itself: f32, and dp4a for grouped rows (`kernels/tiles.cuh`).
    #[default]
    Lanes,
    /// The tensor cores (`kernels/tensor_tiles.cuh`) where results are the same to the bit: for grouped rows.
    Exact,
    /// The tensor cores for f16 rows, too, whose inputs are then rounded to f16.
    TensorCores,
}

/// Tiles by tensor cores for some rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorTiles {
    /// Their place in lists of functions.
    pub index: usize,
    /// Whether they take inputs rounded to f16 ([`halves`](super::quantize::halves)).
    pub halves: bool,
    /// Shared memory of a block.
    pub shared: usize,
}

/// The rows that a function is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowKind {
    /// Of this type, one of our own.
    Own(Quant),
    /// Of types that are arguments (`kernels/blocks.cuh`): GGUF's blocks, and parts of neurons that differ in type.
    Any,
}

impl RowKind {
    pub(super) const fn of(quant: Quant) -> RowKind {
        match quant {
            Quant::Block(_) => RowKind::Any,
            own => RowKind::Own(own),
        }
    }

    pub(super) fn of_block(layout: &BlockLayout) -> RowKind {
        let first = layout.gate_or_up().quant;
        if layout.parts().iter().all(|part| part.quant == first) { RowKind::of(first) } else { RowKind::Any }
    }

    /// Its place in lists of functions.
    pub(super) const fn index(self) -> usize {
        match self {
            RowKind::Own(quant) => quant.index(),
            RowKind::Any => Quant::OWN.len(),
        }
    }

    /// What there is for it by tensor cores: f16, q8_0 and q4_0 of our own, in this order.
    pub(super) const fn tensor_tiles(self) -> Option<TensorTiles> {
        let (index, halves, shared) = match self {
            RowKind::Own(Quant::F16) => (0, true, TENSOR_HALF_TILE_BYTES),
            RowKind::Own(Quant::Q8) => (1, false, TENSOR_GROUPED_TILE_BYTES),
            RowKind::Own(Quant::Q4) => (2, false, TENSOR_GROUPED_TILE_BYTES),
            _ => return None,
        };
        Some(TensorTiles { index, halves, shared })
    }

    pub(super) const fn is_grouped(self) -> bool {
        matches!(self, RowKind::Own(quant) if quant.is_grouped())
    }
}

/// The types of a block's rows, a byte each in their order, as `type_of` of `kernels/blocks.cuh` takes them.
pub(super) fn types_word(layout: &BlockLayout) -> usize {
    layout.parts().iter().rev().fold(0, |types, part| types << 8 | part.quant.index())
}

/// Columns that a function over rows works on at once.
pub(super) const fn width(n: usize) -> usize {
    match n {
        0..=2 => n,
        3 | 4 => 4,
        _ => ROW_COLUMNS,
    }
}

/// Kind, activation and its parameter as the kernels number them (`kernels/activation.cuh`).
pub(super) const fn activation_words(kind: Ffn, activation: Activation) -> (usize, usize, f32) {
    let kind = match kind {
        Ffn::Gated => 0,
        Ffn::GatedBoth => 1,
        Ffn::Plain => 2,
        Ffn::GatedClamped => 3,
    };
    let (activation, parameter) = match activation {
        Activation::Relu => (0, 0.0),
        Activation::Fatrelu(threshold) => (1, threshold),
        Activation::Relu2 => (2, 0.0),
        Activation::Silu => (3, 0.0),
        Activation::Gelu => (4, 0.0),
        Activation::GeluTanh => (5, 0.0),
        Activation::ClampedSwish => (6, 0.0),
    };
    (kind, activation, parameter)
}

/// Blocks of 256 threads with four vectors of 16 bytes each, up to `most`.
pub(super) fn copy_blocks(bytes: u64, most: usize) -> usize {
    (bytes as usize / 16).div_ceil(256 * 4).clamp(1, most)
}

/// One launch. Blocks have one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// What is launched.
    pub function: Function,
    /// Blocks in each direction.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    words: [u64; MAX_ARGUMENTS],
    count: usize,
}

impl Launch {
    pub(super) fn new(function: Function, grid: [usize; 3], warps: usize, shared_bytes: usize) -> Launch {
        let grid = grid.map(|g| u32::try_from(g).expect("shapes are bounded by the model"));
        let (block, shared_bytes) = ((warps * WARP) as u32, shared_bytes as u32);
        Launch { function, grid, block, shared_bytes, words: [0; MAX_ARGUMENTS], count: 0 }
    }

    /// The arguments in the low bytes of a word each: the driver is given their addresses.
    pub fn arguments(&self) -> &[u64] {
        &self.words[..self.count]
    }

    /// Another argument: an address, or a number of 64 bits.
    pub(super) fn word(mut self, word: u64) -> Launch {
        self.words[self.count] = word;
        self.count += 1;
        self
    }

    pub(super) fn words<const N: usize>(self, words: [u64; N]) -> Launch {
        words.into_iter().fold(self, Launch::word)
    }

    pub(super) fn int(self, value: usize) -> Launch {
        self.word(u64::from(u32::try_from(value).expect("counts of a kernel fit 31 bits")))
    }

    pub(super) fn ints<const N: usize>(self, values: [usize; N]) -> Launch {
        values.into_iter().fold(self, Launch::int)
    }

    pub(super) fn float(self, value: f32) -> Launch {
        self.word(u64::from(value.to_bits()))
    }
}

/// The launches of a call, in their order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Launches {
    launches: [Option<Launch>; MAX_LAUNCHES],
    count: usize,
}

impl Launches {
    pub(super) fn push(&mut self, launch: Launch) {
        // A launch without blocks is left out: the driver refuses it.
        if launch.grid.iter().all(|&g| g > 0) {
            self.launches[self.count] = Some(launch);
            self.count += 1;
        }
    }

    /// First things first.
    pub fn iter(&self) -> impl Iterator<Item = &Launch> {
        self.launches[..self.count].iter().flatten()
    }
}

/// Where operands lie on the device, and by what it multiplies.
pub struct Addresses<'a> {
    of: &'a dyn Fn(Buffer) -> u64,
    tiles: Tiles,
}

impl Addresses<'_> {
    pub(super) fn new(of: &dyn Fn(Buffer) -> u64, tiles: Tiles) -> Addresses<'_> {
        Addresses { of, tiles }
    }

    /// Tiles by tensor cores for these rows, if the device is to take them and there are any.
    pub(super) fn tensor_tiles(&self, rows: RowKind) -> Option<TensorTiles> {
        rows.tensor_tiles().filter(|tiles| match self.tiles {
            Tiles::Lanes => false,
            Tiles::Exact => !tiles.halves,
            Tiles::TensorCores => true,
        })
    }

    pub(super) fn view(&self, view: View) -> u64 {
        self.buffer(view.buffer) + view.at
    }

    pub(super) fn buffer(&self, buffer: Buffer) -> u64 {
        (self.of)(buffer)
    }

    /// Zero for a buffer of no bytes.
    pub(super) fn optional(&self, view: impl Into<View>) -> u64 {
        let view = view.into();
        if view.buffer.bytes == 0 { 0 } else { self.view(view) }
    }
}
