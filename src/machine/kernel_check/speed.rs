//! How fast kernels are, at the shapes of real models.

use super::operands::{Bench, matrix, random};
use crate::clock;
use crate::cpu::MAX_COLUMNS;
use crate::device::{Add, Buffer, Call, DenseFfn, Device, Linear, Norm, Select, SparseFfn, Stream, Then, Tiles};
use crate::engine::session::CHUNK;
use crate::error::{Error, Result};
use crate::formats::rows::Quant;
use crate::model::BlockLayout;
use crate::model::config::{Activation, Ffn, Norm as NormKind};
use crate::prng::Prng;
use serde::Serialize;

/// How fast a kernel reads its operands and computes.
#[derive(Clone, Debug, Serialize)]
pub struct Speed {
    /// Name of the kernel, and what it computed.
    pub kernel: String,
    /// Model and type whose shapes it was timed at.
    pub shape: &'static str,
    /// Tokens of the call.
    pub columns: usize,
    /// Bytes of weights, keys and values that one launch reads.
    pub bytes: u64,
    /// Time of one launch, us.
    pub us: f64,
    /// `bytes` per time, GB/s.
    pub gb_s: f64,
    /// 10^12 multiplications and additions a second, each counted.
    pub tflop_s: f64,
}

/// Time per layer to start a token's kernels.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Launching {
    /// Kernels of a layer.
    pub calls: usize,
    /// Time per layer from the first call to the end of the last, with the kernels launched one by one, us.
    pub one_by_one_us: f64,
    /// The same with the kernels launched as recorded sequences (CUDA graphs), us.
    pub graphs_us: f64,
}

/// A shape whose kernels are timed: name, type, hidden, FFN, rows of q, k and v.
type Shape = (&'static str, Quant, usize, usize, usize);

const SHAPES: [Shape; 3] = [
    ("7B f16", Quant::F16, 4096, 11008, 3 * 4096),
    ("13B f16", Quant::F16, 5120, 13824, 3 * 5120),
    ("70B q4_0", Quant::Q4, 8192, 28672, 8192 + 2 * 1024),
];

/// Launches that are timed together, and number of such passes, of which the fastest counts.
const LAUNCHES: usize = 8;
const PASSES: usize = 5;

/// Times matrices and FFNs at the shapes of real models. `l2_bytes` is the size of the card's L2 cache: launches take turns over operands
/// of more than twice as many bytes, so that all are read from memory. `tiles` are those that the device multiplies by: with tensor cores
/// only what they have a part in is timed. `scale` divides the shapes, for tests.
///
/// # Errors
/// [`Error::Memory`] where the device has too little memory, [`Error::Fatal`] if it fails.
pub fn speeds(device: &mut dyn Device, tiles: Tiles, l2_bytes: u64, scale: usize) -> Result<Vec<Speed>> {
    let mut speeds = Vec::new();
    let (columns, by): (&[usize], _) = match tiles {
        Tiles::Lanes => (&[1, 4, CHUNK], ""),
        Tiles::Exact | Tiles::TensorCores => (&[CHUNK], ", tensor cores"),
    };
    for (shape, quant, hidden, ffn, qkv) in SHAPES {
        let (hidden, ffn, qkv) = (hidden / scale, ffn / scale / 32 * 32, qkv / scale);
        for &n in columns {
            // A few random rows are repeated: speed does not depend on the numbers.
            let rows = matrix(&mut Prng::new(1), quant, 64, hidden);
            let mut timing = Timing { device: &mut *device, shape, quant, hidden, ffn, n, l2_bytes, rows };
            speeds.push(timing.linear(&format!("linear{by}"), qkv)?);
            if n > MAX_COLUMNS {
                speeds.push(timing.dense_ffn(&format!("dense_ffn{by}"))?);
                continue;
            }
            // With a tenth of the neurons wanted, spread out, and with all; every one of them fires.
            speeds.push(timing.sparse_ffn("sparse_ffn, a tenth", 10)?);
            speeds.push(timing.sparse_ffn("sparse_ffn, all", 1)?);
        }
    }
    Ok(speeds)
}

/// Times kernels at one shape.
struct Timing<'a> {
    device: &'a mut dyn Device,
    shape: &'static str,
    quant: Quant,
    hidden: usize,
    ffn: usize,
    n: usize,
    l2_bytes: u64,
    /// Some rows of `hidden` numbers.
    rows: Vec<u8>,
}

impl Timing<'_> {
    fn bench(&mut self) -> Bench<'_> {
        Bench { device: &mut *self.device, buffers: Vec::new(), sequences: false }
    }

    fn many(&self, rows: usize) -> Vec<u8> {
        self.rows.iter().copied().cycle().take(rows * self.quant.row_bytes(self.hidden)).collect()
    }

    fn x(&self) -> Vec<f32> {
        random(&mut Prng::new(2), self.n * self.hidden)
    }

    /// Number of operands that take turns, so that each is read from memory.
    fn turns(&self, bytes: u64) -> usize {
        (2 * self.l2_bytes / bytes + 2) as usize
    }

    fn linear(&mut self, name: &str, rows: usize) -> Result<Speed> {
        let (shape, quant, n, cols, x, then) = (self.shape, self.quant, self.n, self.hidden, self.x(), Then::Store);
        let bytes = (rows * quant.row_bytes(cols)) as u64;
        let (many, turns, mut b) = (self.many(rows), self.turns(bytes), self.bench());
        let (x, out, bias) = (b.numbers(&x)?.into(), b.alloc(n * rows * 4)?.into(), b.alloc(0)?);
        let call = |b: &mut Bench<'_>| -> Result<Call> {
            Ok(Call::Linear(Linear { quant, rows, cols, n, weights: b.put(&many)?, bias, x, out, stride: rows, then }))
        };
        let calls = (0..turns).map(|_| call(&mut b)).collect::<Result<Vec<_>>>()?;
        time(&mut b, name, shape, n, bytes, 2 * n * rows * cols, &calls)
    }

    fn dense_ffn(&mut self, name: &str) -> Result<Speed> {
        let (shape, quant, n, hidden, ffn, x) = (self.shape, self.quant, self.n, self.hidden, self.ffn, self.x());
        // As many slots as a prompt's chunk computes at a time.
        let slots = ffn.min(4096);
        let layout = BlockLayout::new(Ffn::Gated, quant, hidden);
        let bytes = (slots * layout.bytes()) as u64;
        let (blocks, turns, mut b) = (self.many(slots * 3), self.turns(bytes).min(4), self.bench());
        let (x, bucket) = (b.numbers(&x)?.into(), b.words(&(0..slots as u32).collect::<Vec<_>>())?.into());
        let (products, out) = (b.alloc(n * slots * 4)?, b.alloc(n * hidden * 4)?.into());
        let (counts, up_bias) = (b.alloc(DenseFfn::parts(&layout, n) * ffn * 4)?, b.alloc(0)?);
        let (kind, activation, activation_threshold) = (Ffn::Gated, Activation::Silu, 0.0);
        let call = |b: &mut Bench<'_>| -> Result<Call> {
            let blocks = b.put(&blocks)?.into();
            #[rustfmt::skip]
            let call = DenseFfn { layout, kind, activation, activation_threshold, hidden, ffn, slots, n, blocks, weights: None, bucket, up_bias, x, products, counts: counts.into(), out };
            Ok(Call::DenseFfn(call))
        };
        let calls = (0..turns).map(|_| call(&mut b)).collect::<Result<Vec<_>>>()?;
        time(&mut b, name, shape, n, bytes, 6 * n * slots * hidden, &calls)
    }

    /// Times the FFN of one neuron in `every`, wanted by all tokens.
    fn sparse_ffn(&mut self, name: &str, every: usize) -> Result<Speed> {
        let (shape, quant, n, hidden, ffn, x) = (self.shape, self.quant, self.n, self.hidden, self.ffn, self.x());
        let layout = BlockLayout::new(Ffn::Gated, quant, hidden);
        let bytes = (ffn.div_ceil(every) * layout.bytes()) as u64;
        let (blocks, turns, mut b) = (self.many(ffn * 3), self.turns(bytes).min(4), self.bench());
        let mask = |i: usize| if i.is_multiple_of(every) { u32::MAX >> (32 - n) } else { 0 };
        let input: Vec<u32> = x.iter().map(|v| v.to_bits()).chain((0..ffn).map(mask)).collect();
        let (input, bucket) = (b.words(&input)?, b.words(&(0..ffn as u32).collect::<Vec<_>>())?);
        let (output, up_bias) = (b.alloc(SparseFfn::output_bytes(n, hidden, ffn))?, b.alloc(0)?);
        let (kind, activation, activation_threshold, slots) = (Ffn::Gated, Activation::Silu, -1.0, ffn);
        let call = |b: &mut Bench<'_>| -> Result<Call> {
            let blocks = b.put(&blocks)?;
            #[rustfmt::skip]
            let call = SparseFfn { layout, kind, activation, activation_threshold, hidden, ffn, mixture: None, slots, n, blocks: blocks.into(), bucket, up_bias, input, output };
            Ok(Call::SparseFfn(call))
        };
        let calls = (0..turns).map(|_| call(&mut b)).collect::<Result<Vec<_>>>()?;
        time(&mut b, name, shape, n, bytes, 6 * n * ffn.div_ceil(every) * hidden, &calls)
    }
}

/// Times the launches of a layer that is so small that they take all the time, with and without sequences.
///
/// # Errors
/// [`Error::Memory`] where the device has too little memory, [`Error::Fatal`] if it fails.
pub fn launching(device: &mut dyn Device) -> Result<Launching> {
    const LAYERS: usize = 8;
    let (quant, hidden, ffn, slots, n) = (Quant::F16, 256, 512, 64, 1);
    let (mut prng, mut b) = (Prng::new(1), Bench { device, buffers: Vec::new(), sequences: false });
    let weights = b.put(&matrix(&mut prng, quant, ffn, hidden))?;
    let (x, bucket) = (b.numbers(&random(&mut prng, ffn))?, b.words(&(0..slots as u32).collect::<Vec<_>>())?);
    let (none, room, scores) = (b.alloc(0)?, b.alloc(ffn * 4)?, b.alloc(ffn * 4)?);
    let (input, output) =
        (b.alloc(SparseFfn::input_bytes(n, hidden, ffn))?, b.alloc(SparseFfn::output_bytes(n, hidden, slots))?);
    let blocks = b.put(&matrix(&mut prng, quant, slots * 3, hidden))?;
    let norm = |x: Buffer, out: Buffer| {
        let (kind, weight, bias) = (NormKind::Rms(1e-5), none, none);
        Call::Norm(Norm { kind, hidden, n, weight, bias, x: x.into(), out: out.into() })
    };
    let linear = |rows: usize, out: Buffer| {
        let (cols, bias, x, then) = (hidden, none, x.into(), Then::Store);
        Call::Linear(Linear { quant, rows, cols, n, weights, bias, x, out: out.into(), stride: rows, then })
    };
    let add = |from: Buffer| Call::Add(Add { count: hidden, from: from.into(), to: room.into(), scale: 1.0 });
    let (kind, activation, activation_threshold, up_bias, min_scores) =
        (Ffn::Gated, Activation::Silu, 0.0, none, [0.0; 2]);
    let select = Select { ffn, n, slots, min_scores, bucket, scores: scores.into(), masks: room.into() };
    let layout = BlockLayout::new(kind, quant, hidden);
    #[rustfmt::skip]
    let half = SparseFfn { layout, kind, activation, activation_threshold, hidden, ffn, mixture: None, slots, n, blocks: blocks.into(), bucket, up_bias, input, output };
    // Grouped as in the engine: attention, selection, the device's part of the FFN, sum of the parts.
    let layer = [
        vec![norm(x, room), linear(ffn, scores), linear(hidden, room)],
        vec![norm(x, room), linear(ffn, scores), Call::Select(select)],
        vec![Call::SparseFfn(half)],
        vec![add(x), add(output)],
    ];
    layer.iter().flatten().try_for_each(|call| b.launch(call))?;
    let mut times = [f64::INFINITY; 2];
    // The first is for warming.
    for pass in 0..=PASSES {
        for (sequences, time) in times.iter_mut().enumerate() {
            b.device.synchronize(Stream::Compute);
            let began = clock::now();
            for (number, calls) in (0..LAYERS).flat_map(|l| layer.iter().enumerate().map(move |(i, c)| (4 * l + i, c)))
            {
                if sequences == 1 {
                    b.device.begin_sequence(number);
                }
                calls.iter().for_each(|call| b.device.launch(Stream::Compute, call));
                b.device.end_sequence();
            }
            b.device.synchronize(Stream::Compute);
            if pass > 0 {
                *time = time.min(began.elapsed().as_secs_f64() * 1e6 / LAYERS as f64);
            }
        }
    }
    match b.device.fault() {
        Some(fault) => Err(Error::Fatal(fault.0.clone())),
        None => Ok(Launching { calls: layer.iter().map(Vec::len).sum(), one_by_one_us: times[0], graphs_us: times[1] }),
    }
}

fn time(
    b: &mut Bench<'_>,
    kernel: &str,
    shape: &'static str,
    columns: usize,
    bytes: u64,
    flops: usize,
    calls: &[Call],
) -> Result<Speed> {
    let [from, to] = [b.device.timed_event(), b.device.timed_event()];
    let mut best = u64::MAX;
    for pass in 0..=PASSES {
        b.device.record(Stream::Compute, from);
        for i in 0..LAUNCHES {
            b.launch(&calls[i % calls.len()])?;
        }
        b.device.record(Stream::Compute, to);
        b.device.synchronize(Stream::Compute);
        if let Some(fault) = b.device.fault() {
            return Err(Error::Fatal(fault.0.clone()));
        }
        // The first is for warming.
        if pass > 0 {
            best = best.min(b.device.elapsed_ns(from, to).max(1));
        }
    }
    let ns = best as f64 / LAUNCHES as f64;
    let (gb_s, tflop_s) = (bytes as f64 / ns, flops as f64 / ns / 1e3);
    Ok(Speed { kernel: kernel.into(), shape, columns, bytes, us: ns / 1e3, gb_s, tflop_s })
}
