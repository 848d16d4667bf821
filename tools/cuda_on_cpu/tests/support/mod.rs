//! Device memory with guards, and calls run by the shim in both orders.

// Each test program uses its own part of this.
#![allow(dead_code)]

use cuda_on_cpu::{Kernel, Order};
use dynamicinfer::cpu::{Columns, Kernels};
use dynamicinfer::device::kernel::{HostMemory, HostScratch, Launch, SCRATCH_ALIGN};
use dynamicinfer::device::{Buffer, Call, NONE, SlotBlocks, Tiles};
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::rows::{self, Input, Quant};
use dynamicinfer::model::BlockLayout;
use dynamicinfer::model::config::{Activation, Ffn};
use dynamicinfer::prng::Prng;
use half::f16;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use std::ptr;

const PAGE: usize = 4096;
/// What kernels may take for granted about where a buffer begins.
const ALIGN: usize = 64;
/// In memory that nobody has written to: as f32 and f16 it is NaN, as an index far away.
const RUBBISH: u8 = 0xff;

pub const KINDS: [Ffn; 3] = [Ffn::Gated, Ffn::GatedBoth, Ffn::Plain];
pub const ACTIVATIONS: [Activation; 6] = [
    Activation::Relu,
    Activation::Fatrelu(0.3),
    Activation::Relu2,
    Activation::Silu,
    Activation::Gelu,
    Activation::GeluTanh,
];

/// Types of gate, up and down: one for all, and mixes, among them those that `pack` makes of Q4_K_M and of smaller files.
pub fn types() -> Vec<[Quant; 3]> {
    use BlockType::{BF16, IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    let mixes = [
        [Quant::Block(Q4_K), Quant::Block(Q4_K), Quant::Block(Q5_K)],
        [Quant::Block(Q2_K), Quant::Block(Q3_K), Quant::Block(Q6_K)],
        [Quant::Block(IQ4_XS), Quant::Q8, Quant::Block(Q5_0)],
        [Quant::Q4, Quant::Block(IQ4_NL), Quant::F32],
        [Quant::Block(Q4_1), Quant::Block(Q5_1), Quant::Q8],
        [Quant::Block(Q8_0), Quant::Block(Q4_0), Quant::Q4],
        [Quant::F16, Quant::Block(BF16), Quant::Block(MXFP4)],
    ];
    Quant::all().map(|quant| [quant; 3]).chain(mixes).collect()
}

/// The layout of neurons of these types.
pub fn layout_of(types: [Quant; 3], kind: Ffn, hidden: usize) -> BlockLayout {
    BlockLayout::mixed(&types[3 - kind.rows()..], hidden)
}

/// A row's length of up to about `most`, as the types want it: any number for f32 and f16 alone.
pub fn hidden_of(rng: &mut Prng, types: [Quant; 3], most: usize) -> usize {
    let unit = types.map(Quant::unit).into_iter().max().unwrap_or(1);
    let unit = if types[0] != types[2] || types[0] == Quant::Block(BlockType::BF16) { unit.max(8) } else { unit };
    if unit == 1 { 2 + below(rng, most) } else { unit * (1 + below(rng, most.div_ceil(unit))) }
}

/// Blocks and names of slots, a share of which holds random neurons of `ffn`. What lies in the others is rubbish: nothing may come of it.
pub fn slots_of(
    rng: &mut Prng,
    (layout, hidden): (&BlockLayout, usize),
    ffn: usize,
    slots: usize,
    filled: f64,
) -> (Vec<u8>, Vec<u32>) {
    let block_bytes = layout.bytes();
    let mut blocks = vec![0xffu8; slots * block_bytes];
    let mut neurons: Vec<u32> = (0..ffn as u32).collect();
    let mut bucket = vec![NONE; slots];
    for (slot, block) in blocks.chunks_exact_mut(block_bytes).enumerate() {
        if neurons.is_empty() || rng.next_f64() >= filled {
            continue;
        }
        bucket[slot] = neurons.swap_remove(below(rng, neurons.len()));
        for part in layout.parts() {
            let values: Vec<f32> = normal(rng, hidden).iter().map(|v| v / (hidden as f32).sqrt()).collect();
            rows::encode(part.quant, &values, part.of_mut(block));
        }
    }
    (blocks, bucket)
}

/// Neuron blocks as they are, or each of their parts by itself.
pub fn put_slots(memory: &mut Memory, layout: &BlockLayout, blocks: &[u8], apart: bool) -> SlotBlocks {
    if !apart {
        return memory.put(blocks).into();
    }
    SlotBlocks::Apart(std::array::from_fn(|index| {
        let part = layout.parts()[index];
        let rows: Vec<u8> = blocks.chunks_exact(layout.bytes()).flat_map(|block| part.of(block).to_vec()).collect();
        memory.put(&rows).into()
    }))
}

/// Bytes that end at a page which nobody may touch: reading or writing behind them ends the test program.
struct Guarded {
    map: *mut u8,
    map_bytes: usize,
    start: *mut u8,
    bytes: usize,
}

impl Guarded {
    fn new(bytes: usize) -> Guarded {
        let room = bytes.next_multiple_of(ALIGN).next_multiple_of(PAGE).max(PAGE);
        let map_bytes = room + PAGE;
        // SAFETY: fresh memory; its last page is taken away before anyone has it.
        let map = unsafe {
            let map = mmap_anonymous(ptr::null_mut(), map_bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
                .expect("memory");
            mprotect(map.cast::<u8>().add(room).cast(), PAGE, MprotectFlags::empty()).expect("a guard page");
            map.cast::<u8>()
        };
        // SAFETY: inside the map.
        let start = unsafe {
            map.write_bytes(RUBBISH, room);
            map.add(room - bytes.next_multiple_of(ALIGN))
        };
        Guarded { map, map_bytes, start, bytes }
    }

    fn content(&self) -> &[u8] {
        // SAFETY: the bytes are inside the map, and no kernel runs.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    fn content_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// What lies before the bytes, and between them and the guard page, is as it was.
    fn is_whole(&self) -> bool {
        let before = self.start as usize - self.map as usize;
        // SAFETY: inside the map.
        let (before, behind) = unsafe {
            (
                std::slice::from_raw_parts(self.map, before),
                std::slice::from_raw_parts(self.start.add(self.bytes), self.bytes.next_multiple_of(ALIGN) - self.bytes),
            )
        };
        before.iter().chain(behind).all(|&b| b == RUBBISH)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        unsafe { munmap(self.map.cast(), self.map_bytes).expect("it was mapped") };
    }
}

/// The buffers of a test.
#[derive(Default)]
pub struct Memory(Vec<Guarded>);

impl Memory {
    /// Rubbish.
    pub fn alloc(&mut self, bytes: usize) -> Buffer {
        self.0.push(Guarded::new(bytes));
        Buffer { id: (self.0.len() - 1) as u32, bytes: bytes as u64 }
    }

    pub fn put<T: bytemuck::Pod>(&mut self, values: &[T]) -> Buffer {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let buffer = self.alloc(bytes.len());
        self.0[buffer.id as usize].content_mut().copy_from_slice(bytes);
        buffer
    }

    pub fn get<T: bytemuck::Pod>(&self, buffer: Buffer) -> Vec<T> {
        bytemuck::pod_collect_to_vec(self.0[buffer.id as usize].content())
    }

    pub fn address(&self, buffer: Buffer) -> u64 {
        self.0[buffer.id as usize].start as u64
    }

    fn contents(&self) -> Vec<Vec<u8>> {
        self.0.iter().map(|g| g.content().to_vec()).collect()
    }

    fn restore(&mut self, contents: &[Vec<u8>]) {
        self.0.iter_mut().zip(contents).for_each(|(g, bytes)| g.content_mut().copy_from_slice(bytes));
    }

    /// Runs launches forward, then again from the same memory backward on two threads: every byte has to be the same.
    pub fn run(&mut self, launches: &[Launch]) {
        let before = self.contents();
        self.run_in(launches, Order::Forward, 1);
        let forward = self.contents();
        self.restore(&before);
        self.run_in(launches, Order::Backward, 2);
        for (i, (forward, backward)) in forward.iter().zip(self.contents()).enumerate() {
            let at = forward.iter().zip(&backward).position(|(a, b)| a != b);
            let names: Vec<_> = launches.iter().map(|l| l.function.name()).collect();
            assert!(at.is_none(), "{names:?}: the order of fibers changes buffer {i} at byte {at:?}");
        }
    }

    fn run_in(&self, launches: &[Launch], order: Order, threads: usize) {
        for launch in launches {
            let name = launch.function.name();
            let kernel = Kernel::find(name).unwrap_or_else(|| panic!("kernels/ has no {name}"));
            // What every card gives a block without asking.
            assert!(launch.shared_bytes <= 48 << 10, "{name}: {} bytes of shared memory", launch.shared_bytes);
            let (block, shared) = ([launch.block, 1, 1], launch.shared_bytes as usize);
            // SAFETY: the launch is made for these buffers; memory behind them is guarded.
            let ran = unsafe { kernel.launch(launch.grid, block, shared, launch.arguments(), threads, order) };
            ran.unwrap_or_else(|what| panic!("{what}"));
            assert!(self.0.iter().all(Guarded::is_whole), "{name} writes beside its buffers");
        }
    }

    /// Runs a call as a device would.
    pub fn call(&mut self, call: &Call) {
        self.call_by(call, Tiles::Lanes);
    }

    /// Runs a call as a device that multiplies by these tiles would.
    pub fn call_by(&mut self, call: &Call, tiles: Tiles) {
        let bytes = call.scratch_bytes() as usize;
        // Scratch begins where the driver lets memory begin, and its end is guarded, too.
        let scratch = self.alloc(bytes + SCRATCH_ALIGN as usize);
        let end = self.address(scratch) + scratch.bytes;
        let start = (end - bytes as u64) / SCRATCH_ALIGN * SCRATCH_ALIGN;
        let launches: Vec<Launch> = call.launches(|b| self.address(b), start, tiles).iter().copied().collect();
        self.run(&launches);
    }
}

/// Buffers are whole numbers of f32 wherever the CPU's kernels run on them.
impl HostMemory for Memory {
    fn of(&self, buffer: Buffer) -> &[f32] {
        bytemuck::cast_slice(self.0[buffer.id as usize].content())
    }

    fn of_mut(&mut self, buffer: Buffer) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.0[buffer.id as usize].content_mut())
    }
}

impl Memory {
    /// Runs a call as the virtual device would.
    pub fn call_on_host(&mut self, call: &Call) {
        let mut scratch = HostScratch::default();
        call.run(self, &Kernels::best(), &mut scratch);
        call.store(&scratch, self);
    }
}

pub fn normal(rng: &mut Prng, n: usize) -> Vec<f32> {
    (0..n).map(|_| (0..4).map(|_| rng.next_f64() as f32 * 2.0 - 1.0).sum::<f32>()).collect()
}

pub fn below(rng: &mut Prng, n: usize) -> usize {
    rng.below(n as u64) as usize
}

/// What an int8 code stands for, in the order of numbers.
pub fn as_codes(x: &[f32], n: usize, quant: Quant) -> Vec<f32> {
    if quant.input() == Input::Floats {
        return x.to_vec();
    }
    let mut columns = Columns::default();
    // Codes for GGUF's blocks are the same in another order.
    columns.set(x, n, Quant::Q8);
    let cols = columns.cols;
    (0..n)
        .flat_map(|b| {
            let (codes, steps) = (columns.codes(b), columns.steps(b));
            (0..cols).map(move |i| f32::from(codes[rows::code_position(i, cols)]) * steps[i / 32])
        })
        .collect()
}

/// Whether a call is computed by other kernels where the device multiplies by tensor cores.
pub fn has_tensor_tiles(call: &Call) -> bool {
    let by = |tiles| call.launches(|_| 0, 0, tiles).iter().any(|l| l.function.name().contains("tensor"));
    assert!(!by(Tiles::Lanes), "{call:?}");
    by(Tiles::TensorCores)
}

/// Inputs as tensor cores take them beside f16 rows: rounded to f16, each column times a power of two that brings its largest number to
/// 2^14 or above.
pub fn as_halves(x: &[f32], n: usize) -> Vec<f32> {
    let rounded = |column: &[f32]| {
        let most = column.iter().fold(0f32, |most, v| most.max(v.abs()));
        let exponent = (most.to_bits() >> 23) as i32 - 127;
        let scale = 2f32.powi((14 - exponent).min(126));
        column.iter().map(|v| f16::from_f32(v * scale).to_f32() / scale).collect::<Vec<_>>()
    };
    x.chunks_exact(x.len() / n).flat_map(rounded).collect()
}

/// Values and truths side by side, `bound` each in units of its scale.
pub fn assert_close(what: &str, got: &[f32], truth: &[f64], scale: &[f64], bound: f64) {
    assert_eq!((got.len(), got.len()), (truth.len(), scale.len()), "{what}");
    for (i, ((got, truth), scale)) in got.iter().zip(truth).zip(scale).enumerate() {
        let error = (f64::from(*got) - truth).abs();
        assert!(error <= bound * scale + 1e-30, "{what}: number {i} is {got}, truth {truth}, scale {scale}");
    }
}
