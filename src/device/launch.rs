//! From a call to what is launched: kernels, grids and argument words. Pure: no driver, no memory, the same for a GPU and for
//! the CPU shim of `tools/cuda_on_cpu`.
//!
//! A call of given shapes always makes the same launches, in order and on one stream, so that they can be recorded once. Nothing
//! waits for the host between them. How sums are split follows from shapes alone, never from the card: so do results.

use super::Buffer;
use super::calls::{Add, Append, Attend, Call, Heads, Linear, Norm, Select, SignScores, SparseFfn, Then, View};
use crate::cpu::sign;
use crate::formats::rows::{GROUP, PACK, Quant};
use crate::model::config::{Activation, Ffn, Norm as NormKind};

/// Where scratch begins: what every vector load of the kernels is content with.
pub const SCRATCH_ALIGN: u64 = 256;
/// Launches of a call, and arguments of a kernel, at most.
pub const MAX_LAUNCHES: usize = 4;
pub const MAX_ARGUMENTS: usize = 16;

const WARP: usize = 32;
/// Slots of a chunk of the sparse FFN: a warp asks for one each.
const CHUNK: usize = 32;
/// Warps of a block of `ffn_down`, and chunks of a split: a thread has one each.
const DOWN_WARPS: usize = 8;
const SPLIT_CHUNKS: usize = DOWN_WARPS * WARP;
/// Blocks that the down half is split into at least: two to four for each multiprocessor of a consumer card, and partial sums of a
/// few per cent of the bytes of the rows.
const DOWN_BLOCKS: usize = 256;
/// Columns up to which a matrix is read by rows, eight columns at a time; beyond, tiles share what they read.
const ROW_COLUMNS: usize = 8;
/// Positions of a split of attention.
const SPLIT_POSITIONS: usize = 128;

/// The kernels by family; [`Kernel::names`] has them one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
enum Family {
    Quantize,
    Normalise,
    Add,
    CopyBytes,
    Linear,
    Neurons,
    Down,
    Merge,
}

/// `name_<quant>_<columns>`, as `FOR_QUANTS_AND_WIDTHS` of `kernels/rows.cuh` makes them.
macro_rules! family {
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
        ]
    };
}

/// In the order of [`Family`].
const FAMILIES: [&[&str]; 8] = [
    &["quantize"],
    &["normalise"],
    &["add"],
    &["copy_bytes"],
    family!("linear"),
    family!("ffn_neurons"),
    family!("ffn_down"),
    &["ffn_merge"],
];

/// A kernel of `kernels/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel(u16);

impl Kernel {
    const fn new(family: Family, member: usize) -> Kernel {
        let (mut before, mut f) = (0, 0);
        while f < family as usize {
            before += FAMILIES[f].len();
            f += 1;
        }
        Kernel((before + member) as u16)
    }

    /// The member for rows of a type and `width` columns at once: 1, 2, 4 or 8.
    const fn of_rows(family: Family, quant: Quant, width: usize) -> Kernel {
        Kernel::new(family, quant as usize * 4 + width.trailing_zeros() as usize)
    }

    /// Its place in [`Kernel::names`]: what a table of loaded functions is indexed by.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    pub fn name(self) -> &'static str {
        Kernel::names().nth(self.index()).expect("made by new")
    }

    pub fn names() -> impl Iterator<Item = &'static str> {
        FAMILIES.iter().flat_map(|family| family.iter().copied())
    }
}

/// One launch. Blocks have one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub kernel: Kernel,
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    words: [u64; MAX_ARGUMENTS],
    count: usize,
}

impl Launch {
    fn new(kernel: Kernel, grid: [usize; 3], warps: usize, shared_bytes: usize) -> Launch {
        let grid = grid.map(|g| u32::try_from(g).expect("shapes are bounded by the model"));
        let (block, shared_bytes) = ((warps * WARP) as u32, shared_bytes as u32);
        Launch { kernel, grid, block, shared_bytes, words: [0; MAX_ARGUMENTS], count: 0 }
    }

    /// The arguments in the low bytes of a word each: the driver is given their addresses.
    pub fn arguments(&self) -> &[u64] {
        &self.words[..self.count]
    }

    fn word(mut self, word: u64) -> Launch {
        self.words[self.count] = word;
        self.count += 1;
        self
    }

    fn address(self, address: u64) -> Launch {
        self.word(address)
    }

    fn int(self, value: usize) -> Launch {
        self.word(u64::from(u32::try_from(value).expect("counts of a kernel fit 31 bits")))
    }

    fn float(self, value: f32) -> Launch {
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
    fn push(&mut self, launch: Launch) {
        // What has nothing to do is not launched: a grid of no blocks is an error.
        if launch.grid.iter().all(|&g| g > 0) {
            self.launches[self.count] = Some(launch);
            self.count += 1;
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Launch> {
        self.launches[..self.count].iter().flatten()
    }
}

/// Scratch of a call, bytes: what its launches hand to each other. The next call on the stream may use the same.
pub fn scratch_bytes(call: &Call) -> u64 {
    let bytes = match call {
        Call::Linear(c) => codes_bytes(c.quant, c.n, c.cols),
        Call::SparseFfn(c) => FfnScratch::of(c, 0).end as usize,
        _ => 0,
    };
    bytes as u64
}

/// What a call launches. `address` says where a buffer begins; `scratch` is [`scratch_bytes`] at a multiple of
/// [`SCRATCH_ALIGN`].
pub fn launches(call: &Call, address: impl Fn(Buffer) -> u64, scratch: u64) -> Launches {
    debug_assert!(scratch.is_multiple_of(SCRATCH_ALIGN));
    let mut out = Launches::default();
    let at = Addresses { address: &address };
    match call {
        Call::Norm(c) => out.push(norm(c, &at)),
        Call::Linear(c) => linear(c, &at, scratch, &mut out),
        Call::SparseFfn(c) => sparse_ffn(c, &at, scratch, &mut out),
        Call::Add(c) => out.push(add(c, &at)),
        Call::Append(_) | Call::Attend(_) | Call::SignScores(_) | Call::Select(_) => panic!("no kernel"),
    }
    out
}

/// Copies `bytes`, a multiple of 16, from one device-visible address to another with all of the card: what its copy rate is measured by.
pub fn copy(from: u64, to: u64, bytes: u64) -> Launch {
    let vectors = bytes / 16;
    // Enough threads for any card, each with several vectors.
    let blocks = (vectors as usize).div_ceil(256 * 4).clamp(1, 4096);
    Launch::new(Kernel::new(Family::CopyBytes, 0), [blocks, 1, 1], 8, 0).address(from).address(to).word(vectors)
}

struct Addresses<'a> {
    address: &'a dyn Fn(Buffer) -> u64,
}

impl Addresses<'_> {
    fn view(&self, view: View) -> u64 {
        (self.address)(view.buffer) + view.at
    }

    /// Zero for a buffer of no bytes.
    fn optional(&self, buffer: Buffer) -> u64 {
        if buffer.bytes == 0 { 0 } else { (self.address)(buffer) }
    }

    fn buffer(&self, buffer: Buffer) -> u64 {
        (self.address)(buffer)
    }
}

/// Columns that a kernel over rows works on at once.
const fn width(n: usize) -> usize {
    match n {
        0..=2 => n,
        3 | 4 => 4,
        _ => ROW_COLUMNS,
    }
}

/// Bytes that `quantize` fills: codes, then steps.
const fn codes_bytes(quant: Quant, n: usize, cols: usize) -> usize {
    if quant.is_grouped() { n * (cols.next_multiple_of(PACK) + cols.next_multiple_of(PACK) / GROUP * 4) } else { 0 }
}

/// Where the input of rows of a type lies: itself, or what `quantize` makes of it in `scratch`.
fn input(quant: Quant, x: u64, scratch: u64, n: usize, cols: usize, out: &mut Launches) -> u64 {
    if !quant.is_grouped() {
        return x;
    }
    out.push(quantize(x, scratch, n, cols));
    scratch
}

/// int8 codes of `[n, cols]` f32 at `x` in the order of a q8_0 row, then their steps, at `to`: `cols` rounded up to a pack, and an
/// eighth of that, bytes a column.
pub fn quantize(x: u64, to: u64, n: usize, cols: usize) -> Launch {
    const WARPS: usize = 8;
    let grid = [(cols / GROUP).div_ceil(WARPS), n, 1];
    Launch::new(Kernel::new(Family::Quantize, 0), grid, WARPS, 0).address(x).address(to).int(cols).int(n)
}

fn norm(c: &Norm, at: &Addresses<'_>) -> Launch {
    let (epsilon, centred) = match c.kind {
        NormKind::Rms(epsilon) => (epsilon, 0),
        NormKind::Layer(epsilon) => (epsilon, 1),
    };
    // Few columns, one block each: as many threads as there are numbers for.
    let warps = c.hidden.div_ceil(WARP * 4).clamp(1, 32);
    Launch::new(Kernel::new(Family::Normalise, 0), [c.n, 1, 1], warps, warps * 4)
        .address(at.view(c.x))
        .address(at.optional(c.weight))
        .address(at.optional(c.bias))
        .address(at.view(c.out))
        .int(c.hidden)
        .float(epsilon)
        .int(centred)
}

fn add(c: &Add, at: &Addresses<'_>) -> Launch {
    let blocks = c.count.div_ceil(4 * 256).clamp(1, 1024);
    Launch::new(Kernel::new(Family::Add, 0), [blocks, 1, 1], 8, 0)
        .address(at.view(c.from))
        .address(at.view(c.to))
        .int(c.count)
}

fn linear(c: &Linear, at: &Addresses<'_>, scratch: u64, out: &mut Launches) {
    let x = input(c.quant, at.view(c.x), scratch, c.n, c.cols, out);
    let then = match c.then {
        Then::Store => 0,
        Then::Relu => 1,
        Then::Add => 2,
    };
    const WARPS: usize = 4;
    let width = width(c.n);
    let grid = [c.rows.div_ceil(2 * WARPS), c.n.div_ceil(width), 1];
    let launch = Launch::new(Kernel::of_rows(Family::Linear, c.quant, width), grid, WARPS, 0);
    let launch = launch.address(at.buffer(c.weights)).address(x).address(at.optional(c.bias)).address(at.view(c.out));
    out.push(launch.int(c.rows).int(c.cols).int(c.n).int(then));
}

/// Where the parts of the sparse FFN's scratch begin.
struct FfnScratch {
    codes: u64,
    products: u64,
    list: u64,
    counts: u64,
    partial: u64,
    end: u64,
    chunks: usize,
    /// Blocks along a row, and along the list of neurons.
    tiles: usize,
    splits: usize,
}

impl FfnScratch {
    fn of(c: &SparseFfn, start: u64) -> FfnScratch {
        let chunks = c.slots.div_ceil(CHUNK);
        let tiles = c.quant.number_bytes(c.hidden).div_ceil(4 * down_words(c.quant, width(c.n)) * WARP);
        let splits = DOWN_BLOCKS.div_ceil(tiles).max(chunks.div_ceil(SPLIT_CHUNKS)).min(chunks);
        let mut at = start;
        let mut take = |bytes: usize| {
            let here = at;
            at += (bytes as u64).next_multiple_of(SCRATCH_ALIGN);
            here
        };
        let codes = take(codes_bytes(c.quant, c.n, c.hidden));
        let products = take(chunks * CHUNK * c.n * 4);
        let list = take(chunks * CHUNK * 4);
        let counts = take(chunks * 8);
        let partial = take(splits * c.n * c.hidden * 4);
        FfnScratch { codes, products, list, counts, partial, end: at, chunks, tiles, splits }
    }
}

/// Words of a row that a thread of `ffn_down` adds up, and numbers in them (`Share` of `kernels/sparse_ffn.cu`).
const fn down_words(quant: Quant, width: usize) -> usize {
    match quant {
        Quant::F32 | Quant::F16 => 4,
        Quant::Q8 => {
            if width <= 2 {
                4
            } else {
                2
            }
        }
        Quant::Q4 => {
            if width <= 2 {
                2
            } else {
                1
            }
        }
    }
}

const fn down_numbers(quant: Quant, width: usize) -> usize {
    let words = down_words(quant, width);
    match quant {
        Quant::F32 => words,
        Quant::F16 => words * 2,
        Quant::Q8 => words * 4,
        Quant::Q4 => words * 8,
    }
}

fn sparse_ffn(c: &SparseFfn, at: &Addresses<'_>, scratch: u64, out: &mut Launches) {
    let s = FfnScratch::of(c, scratch);
    let width = width(c.n);
    let (given, output) = (at.buffer(c.input), at.buffer(c.output));
    let masks = given + (c.n * c.hidden * 4) as u64;
    let kind = match c.kind {
        Ffn::Gated => 0,
        Ffn::GatedBoth => 1,
        Ffn::Plain => 2,
    };
    let (activation, parameter) = match c.activation {
        Activation::Relu => (0, 0.0),
        Activation::Fatrelu(threshold) => (1, threshold),
        Activation::Relu2 => (2, 0.0),
        Activation::Silu => (3, 0.0),
        Activation::Gelu => (4, 0.0),
        Activation::GeluTanh => (5, 0.0),
    };
    if s.chunks > 0 {
        let x = input(c.quant, given, s.codes, c.n, c.hidden, out);
        const WARPS: usize = 8;
        let neurons = Kernel::of_rows(Family::Neurons, c.quant, width);
        let launch = Launch::new(neurons, [s.chunks, 1, 1], WARPS, CHUNK * 4);
        let launch = launch.address(at.buffer(c.blocks)).address(at.buffer(c.bucket)).address(at.optional(c.up_bias));
        let launch = launch.address(x).address(masks).address(s.products).address(s.list).address(s.counts);
        let launch = launch.int(c.hidden).int(c.slots).int(c.n).int(kind).int(activation);
        out.push(launch.float(parameter).float(c.cut));

        let entries = s.chunks.div_ceil(s.splits) * CHUNK * 4;
        let sums = DOWN_WARPS / 2 * WARP * 4 * width * down_numbers(c.quant, width);
        let down = Kernel::of_rows(Family::Down, c.quant, width);
        let grid = [s.tiles, s.splits, c.n.div_ceil(width)];
        let launch = Launch::new(down, grid, DOWN_WARPS, entries.max(sums));
        let launch = launch.address(at.buffer(c.blocks)).address(s.products).address(s.list).address(s.counts);
        let launch = launch.address(s.partial).int(c.hidden).int(c.n).int(c.kind.rows());
        out.push(launch.int(s.chunks));
    }
    const WARPS: usize = 8;
    let count = c.n * c.hidden;
    let merge = Launch::new(Kernel::new(Family::Merge, 0), [count.div_ceil(WARPS * WARP), 1, 1], WARPS, WARPS * 4);
    let merge = merge.address(s.partial).address(s.counts).address(output);
    out.push(merge.int(count).int(s.splits).int(s.chunks));
}
