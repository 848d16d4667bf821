//! From a call to what is launched: kernels, grids and argument words. Pure: no driver, no memory, the same for a GPU and for
//! the CPU shim of `tools/cuda_on_cpu`.
//!
//! A call of given shapes always makes the same launches, in order and on one stream, so that they can be recorded once. Nothing
//! waits for the host between them. How sums are split follows from shapes alone, never from the card: so do results.

use super::Buffer;
use super::calls::{Add, Append, Attend, Call, DenseFfn, Linear, Norm, Select, SignScores, SparseFfn, Then, View};
use crate::cpu::sign::{self, BitLine};
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
/// Blocks that the down half is split into at least: two to four for each multiprocessor of a consumer card. More would write more
/// partial sums: 8 bytes a number of the output and split, there and back.
const DOWN_BLOCKS: usize = 256;
/// Columns up to which a matrix is read by rows, eight columns at a time; beyond, tiles share what they read.
const ROW_COLUMNS: usize = 8;
/// Columns from which on a tile has 64 of them and twice the rows: with fewer there would be too few tiles for a card.
const WIDE_COLUMNS: usize = 33;
/// Positions of a split of attention, and warps of its blocks.
const SPLIT_POSITIONS: usize = 128;
const ATTEND_WARPS: usize = 4;
/// Shared memory that every card gives a block without being asked.
const SHARED_BYTES: usize = 48 << 10;
/// Columns that `sign_scores` works on at once.
const SIGN_COLUMNS: usize = 4;
/// Numbers of a part of [`top`] and [`softmax`], and the largest numbers that can be asked for at most.
pub const PART: usize = 2048;

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
    Matmul,
    DenseNeurons,
    DenseDown,
    Append,
    Attend,
    AttendMerge,
    SignPack,
    SignScores,
    SelectAll,
    SelectResident,
    Gather,
    TopLogits,
    TopKeys,
    SoftmaxParts,
    SoftmaxMerge,
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
const FAMILIES: [&[&str]; 23] = [
    &["quantize"],
    &["normalise"],
    &["add"],
    &["copy_bytes"],
    family!("linear"),
    family!("ffn_neurons"),
    family!("ffn_down"),
    &["ffn_merge"],
    &["matmul_f32", "matmul_f16", "matmul_q8_0", "matmul_q4_0", "matmul_wide_f32", "matmul_wide_f16"],
    &["dense_neurons_f32", "dense_neurons_f16", "dense_neurons_q8_0", "dense_neurons_q4_0"],
    &["dense_down_f32", "dense_down_f16", "dense_down_q8_0", "dense_down_q4_0"],
    &["append"],
    &["attend_1_8", "attend_4_8", "attend_8_8", "attend_1_2", "attend_4_2", "attend_8_2"],
    &["attend_merge"],
    &["sign_pack"],
    &["sign_scores"],
    &["select_all"],
    &["select_resident"],
    &["gather"],
    &["top_logits"],
    &["top_keys"],
    &["softmax_parts"],
    &["softmax_merge"],
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
        Call::DenseFfn(c) => codes_bytes(c.quant, c.n, c.hidden),
        Call::Attend(c) => c.n * c.heads.heads * attend_splits(c) * (c.heads.head_dim + 2) * 4,
        Call::SignScores(c) => c.n * sign_line_bytes(c.hidden),
        Call::Norm(_) | Call::Append(_) | Call::Select(_) | Call::Add(_) => 0,
    };
    bytes as u64
}

/// Weights that a call reads whole, bytes. What [`SparseFfn`] reads depends on its operands.
pub fn weight_bytes(call: &Call) -> u64 {
    let bytes = match call {
        Call::Linear(c) => c.rows * c.quant.row_bytes(c.cols),
        Call::SignScores(c) => c.ffn * sign::lines(c.hidden) * size_of::<BitLine>(),
        _ => 0,
    };
    bytes as u64
}

/// What a call launches, in order. `address` says where a buffer begins; `scratch` is [`scratch_bytes`] at a multiple of
/// [`SCRATCH_ALIGN`].
pub fn launches(call: &Call, address: impl Fn(Buffer) -> u64, scratch: u64) -> Launches {
    debug_assert!(scratch.is_multiple_of(SCRATCH_ALIGN));
    let mut out = Launches::default();
    let at = Addresses { address: &address };
    match call {
        Call::Norm(c) => out.push(norm(c, &at)),
        Call::Linear(c) => linear(c, &at, scratch, &mut out),
        Call::SparseFfn(c) => sparse_ffn(c, &at, scratch, &mut out),
        Call::DenseFfn(c) => dense_ffn(c, &at, scratch, &mut out),
        Call::Add(c) => out.push(add(c, &at)),
        Call::Append(c) => out.push(append(c, &at)),
        Call::Attend(c) => attend(c, &at, scratch, &mut out),
        Call::SignScores(c) => sign_scores(c, &at, scratch, &mut out),
        Call::Select(c) => select(c, &at, &mut out),
    }
    out
}

/// Copies `bytes`, a multiple of 16, from one address that the card sees to another: what its copy rate is measured by.
pub fn copy(from: u64, to: u64, bytes: u64) -> Launch {
    let vectors = bytes / 16;
    let blocks = copy_blocks(vectors, 4096);
    Launch::new(Kernel::new(Family::CopyBytes, 0), [blocks, 1, 1], 8, 0).address(from).address(to).word(vectors)
}

/// Copies `count` blocks of `bytes`, a multiple of 16, into slots that begin at `slots`. `moves` is where `[count]` pairs of u64
/// lie: the address of a block, as the card sees it, and its slot.
pub fn gather(moves: u64, count: usize, slots: u64, bytes: u64) -> Launch {
    // The link is slow: a few blocks of threads for each move ask for enough of it at once.
    let blocks = copy_blocks(bytes / 16, 16);
    Launch::new(Kernel::new(Family::Gather, 0), [blocks, count, 1], 8, 0).address(moves).address(slots).word(bytes)
}

/// Blocks of 256 threads with four vectors each, up to `most`.
fn copy_blocks(vectors: u64, most: usize) -> usize {
    (vectors as usize).div_ceil(256 * 4).clamp(1, most)
}

/// The `k` largest of each of `n` columns of `count` numbers at `logits`, as `[n, k]` u64 at the address returned with the launches:
/// the order of sizes in the upper half, the complement of the place in the lower ([`key_place`]). Zeros where there are fewer
/// numbers. `scratch` holds [`top_bytes`].
///
/// # Panics
/// If k is 0 or more than half of [`PART`].
pub fn top(logits: u64, n: usize, count: usize, k: usize, scratch: u64) -> (u64, Vec<Launch>) {
    assert!((1..=PART / 2).contains(&k), "{k} of the largest numbers; 1 to {} can be found", PART / 2);
    let shared = PART * 8;
    let mut parts = count.div_ceil(PART);
    // Two rooms in turns.
    let rooms = [scratch, scratch + (n * parts * k * 8) as u64];
    let launch = |family, parts| Launch::new(Kernel::new(family, 0), [parts, n, 1], 8, shared);
    let mut launches = vec![launch(Family::TopLogits, parts).address(logits).address(rooms[0]).int(count).int(k)];
    let mut from = 0;
    while parts > 1 {
        let keys = parts * k;
        parts = keys.div_ceil(PART);
        let next = launch(Family::TopKeys, parts).address(rooms[from]).address(rooms[1 - from]).int(keys).int(k);
        launches.push(next);
        from = 1 - from;
    }
    (rooms[from], launches)
}

pub fn top_bytes(n: usize, count: usize, k: usize) -> u64 {
    (2 * n * count.div_ceil(PART) * k * 8) as u64
}

/// The place of the number that a key of [`top`] stands for.
pub fn key_place(key: u64) -> Option<u32> {
    (key != 0).then_some(!(key as u32))
}

/// `[n]` pairs at `out`: the largest of `count` numbers of each column at `logits`, and the sum of exp((x - largest) *
/// inverse_temperature). `scratch` holds [`softmax_bytes`].
pub fn softmax(logits: u64, n: usize, count: usize, inverse_temperature: f32, out: u64, scratch: u64) -> [Launch; 2] {
    const WARPS: usize = 8;
    let count_parts = count.div_ceil(PART);
    let parts = Launch::new(Kernel::new(Family::SoftmaxParts, 0), [count_parts, n, 1], WARPS, WARPS * 4);
    let merge = Launch::new(Kernel::new(Family::SoftmaxMerge, 0), [n, 1, 1], 1, 0);
    [
        parts.address(logits).address(scratch).int(count).float(inverse_temperature),
        merge.address(scratch).address(out).int(count_parts).float(inverse_temperature),
    ]
}

pub fn softmax_bytes(n: usize, count: usize) -> u64 {
    (n * count.div_ceil(PART) * 8) as u64
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

/// Room for what `quantize` makes of `n` columns, and for those that kernels read beside them without using them.
fn codes_bytes(quant: Quant, n: usize, cols: usize) -> usize {
    if quant.is_grouped() && n > 0 { n.next_multiple_of(width(n)) * coded_bytes(cols) } else { 0 }
}

/// Bytes of a column's codes: packs of 512, each with the steps of its 16 groups behind it (`kernels/rows.cuh`).
pub const fn coded_bytes(cols: usize) -> usize {
    cols.div_ceil(PACK) * (PACK + PACK / GROUP * 4)
}

/// Where the input of rows of a type lies: itself, or what `quantize` makes of it in `scratch`.
fn input(quant: Quant, x: u64, scratch: u64, n: usize, cols: usize, out: &mut Launches) -> u64 {
    if !quant.is_grouped() {
        return x;
    }
    out.push(quantize(x, scratch, n, cols));
    scratch
}

/// int8 codes of `[n, cols]` f32 at `x` and their steps, [`coded_bytes`] a column, at `to`.
pub fn quantize(x: u64, to: u64, n: usize, cols: usize) -> Launch {
    const WARPS: usize = 8;
    let grid = [(cols / GROUP).div_ceil(WARPS), n, 1];
    Launch::new(Kernel::new(Family::Quantize, 0), grid, WARPS, 0).address(x).address(to).int(cols)
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
    let launch = if c.n <= ROW_COLUMNS {
        const WARPS: usize = 4;
        let grid = [c.rows.div_ceil(2 * WARPS), 1, 1];
        Launch::new(Kernel::of_rows(Family::Linear, c.quant, width(c.n)), grid, WARPS, 0)
    } else {
        // A tile and its shared memory, as `kernels/matmul.cu` has them.
        let (member, rows, columns, shared) = match c.quant {
            Quant::Q8 | Quant::Q4 => (c.quant as usize, 32, 32, GROUPED_TILE_BYTES),
            Quant::F32 | Quant::F16 if c.n >= WIDE_COLUMNS => (4 + c.quant as usize, 128, 64, WIDE_TILE_BYTES),
            Quant::F32 | Quant::F16 => (c.quant as usize, 64, 32, 13312),
        };
        let grid = [c.rows.div_ceil(rows), c.n.div_ceil(columns), 1];
        Launch::new(Kernel::new(Family::Matmul, member), grid, 8, shared)
    };
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

/// Kind, activation and its parameter as the kernels number them (`kernels/activation.cuh`).
const fn activation_words(kind: Ffn, activation: Activation) -> (usize, usize, f32) {
    let kind = match kind {
        Ffn::Gated => 0,
        Ffn::GatedBoth => 1,
        Ffn::Plain => 2,
    };
    let (activation, parameter) = match activation {
        Activation::Relu => (0, 0.0),
        Activation::Fatrelu(threshold) => (1, threshold),
        Activation::Relu2 => (2, 0.0),
        Activation::Silu => (3, 0.0),
        Activation::Gelu => (4, 0.0),
        Activation::GeluTanh => (5, 0.0),
    };
    (kind, activation, parameter)
}

/// Shared memory of tiles of 32 grouped rows by 32 columns, and of 128 others by 64 (`kernels/tiles.cuh`).
const GROUPED_TILE_BYTES: usize = 37888;
const WIDE_TILE_BYTES: usize = 26112;

fn dense_ffn(c: &DenseFfn, at: &Addresses<'_>, scratch: u64, out: &mut Launches) {
    if c.slots == 0 {
        return;
    }
    const WARPS: usize = 8;
    let x = input(c.quant, at.view(c.x), scratch, c.n, c.hidden, out);
    let (kind, activation, parameter) = activation_words(c.kind, c.activation);
    let (blocks, bucket, products) = (at.view(c.blocks), at.view(c.bucket), at.buffer(c.products));
    // A tile has two rows of a neuron, or one of twice as many.
    let (neurons, shared) = if c.quant.is_grouped() { (16, GROUPED_TILE_BYTES) } else { (64, WIDE_TILE_BYTES) };
    let neurons = if c.kind == Ffn::Plain { 2 * neurons } else { neurons };
    let grid = [c.slots.div_ceil(neurons), DenseFfn::parts(c.quant, c.n), 1];
    let launch = Launch::new(Kernel::new(Family::DenseNeurons, c.quant as usize), grid, WARPS, shared);
    let launch = launch.address(blocks).address(bucket).address(at.optional(c.up_bias)).address(x).address(products);
    let launch = launch.address(at.buffer(c.counts)).int(c.hidden).int(c.slots).int(c.n).int(c.ffn);
    out.push(launch.int(kind).int(activation).float(parameter).float(c.cut));
    let grid = [c.hidden.div_ceil(128), c.n.div_ceil(64), 1];
    let launch = Launch::new(Kernel::new(Family::DenseDown, c.quant as usize), grid, WARPS, WIDE_TILE_BYTES);
    let launch = launch.address(blocks).address(bucket).address(products).address(at.view(c.out));
    out.push(launch.int(c.hidden).int(c.slots).int(c.n).int(c.kind.rows()));
}

fn sparse_ffn(c: &SparseFfn, at: &Addresses<'_>, scratch: u64, out: &mut Launches) {
    let s = FfnScratch::of(c, scratch);
    let width = width(c.n);
    let (given, output) = (at.buffer(c.input), at.buffer(c.output));
    let masks = given + (c.n * c.hidden * 4) as u64;
    let (kind, activation, parameter) = activation_words(c.kind, c.activation);
    if s.chunks > 0 {
        let x = input(c.quant, given, s.codes, c.n, c.hidden, out);
        const WARPS: usize = 4;
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

fn append(c: &Append, at: &Addresses<'_>) -> Launch {
    let h = &c.heads;
    let warps = (h.head_dim / 2).div_ceil(WARP).clamp(1, 8);
    let grid = [h.heads + 2 * h.kv_heads, c.n, 1];
    let launch = Launch::new(Kernel::new(Family::Append, 0), grid, warps, 0);
    let launch = launch.address(at.view(c.qkv)).address(at.optional(c.angles)).address(at.view(c.places));
    let launch = launch.address(at.buffer(h.cache)).int(h.heads).int(h.kv_heads).int(h.head_dim);
    launch.int(h.layers).int(c.layer).int(h.context)
}

/// Splits of the positions that some column sees; one more where a window may begin inside of one.
fn attend_splits(c: &Attend) -> usize {
    c.most.div_ceil(SPLIT_POSITIONS) + usize::from(c.window.is_some())
}

fn attend(c: &Attend, at: &Addresses<'_>, scratch: u64, out: &mut Launches) {
    let (h, dim, splits) = (&c.heads, c.heads.head_dim, attend_splits(c));
    // Pairs are rotated, and loaded.
    assert!(dim.is_multiple_of(2), "heads of {dim} numbers");
    let shared = h.heads / h.kv_heads;
    let (units, numbers) = if dim.is_multiple_of(8) { (0, 8) } else { (3, 2) };
    let shared_bytes = |at_once: usize| at_once * (dim + SPLIT_POSITIONS + ATTEND_WARPS * numbers * WARP) * 4;
    // Query heads that share their keys; fewer at once where heads are very wide.
    let (member, at_once) = [(2, 8), (1, 4), (0, 1)]
        .into_iter()
        .find(|&(_, at_once)| at_once == 1 || 2 * shared > at_once && shared_bytes(at_once) <= SHARED_BYTES)
        .expect("the last one fits");
    let mix = scratch;
    let peaks = scratch + (c.n * h.heads * splits * dim * 4) as u64;
    let grid = [h.kv_heads * shared.div_ceil(at_once), splits, c.n];
    let kernel = Kernel::new(Family::Attend, units + member);
    let launch = Launch::new(kernel, grid, ATTEND_WARPS, shared_bytes(at_once));
    let launch = launch.address(at.view(c.qkv)).address(at.buffer(h.cache)).address(at.view(c.places));
    let launch = launch.address(mix).address(peaks).int(h.heads).int(h.kv_heads).int(dim).int(h.layers);
    // A window of all positions is none.
    out.push(launch.int(c.layer).int(h.context).int(c.window.unwrap_or(0)));
    let warps = dim.div_ceil(WARP).clamp(1, 4);
    let merge = Launch::new(Kernel::new(Family::AttendMerge, 0), [h.heads, c.n, 1], warps, 0);
    out.push(merge.address(mix).address(peaks).address(at.view(c.out)).int(h.heads).int(dim).int(splits));
}

const fn sign_line_bytes(hidden: usize) -> usize {
    sign::lines(hidden) * size_of::<BitLine>()
}

fn sign_scores(c: &SignScores, at: &Addresses<'_>, scratch: u64, out: &mut Launches) {
    const WARPS: usize = 8;
    let (x, words) = (at.view(c.x), sign_line_bytes(c.hidden) / 4);
    let pack = Launch::new(Kernel::new(Family::SignPack, 0), [words.div_ceil(WARPS), c.n, 1], WARPS, 0);
    out.push(pack.address(x).address(scratch).int(c.hidden).int(words));
    let grid = [c.ffn.div_ceil(8 * WARPS), c.n.div_ceil(SIGN_COLUMNS), 1];
    let scores = Launch::new(Kernel::new(Family::SignScores, 0), grid, WARPS, 0);
    let scores = scores.address(at.buffer(c.bits)).address(scratch).address(at.view(c.scores));
    out.push(scores.int(c.hidden).int(c.ffn).int(c.n));
}

fn select(c: &Select, at: &Addresses<'_>, out: &mut Launches) {
    const WARPS: usize = 8;
    let (scores, masks) = (at.view(c.scores), at.view(c.masks));
    let launch = |family, count: usize| {
        Launch::new(Kernel::new(family, 0), [count.div_ceil(WARPS * WARP), 1, 1], WARPS, 0).address(scores)
    };
    let all = launch(Family::SelectAll, c.ffn).address(masks);
    out.push(all.int(c.ffn).int(c.n).float(c.least[0]));
    let resident = launch(Family::SelectResident, c.slots).address(at.buffer(c.bucket)).address(masks);
    out.push(resident.int(c.ffn).int(c.slots).int(c.n).float(c.least[1]));
}
