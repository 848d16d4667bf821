//! Compares a device's kernels with the CPU's and times them: what `gpu-check` shows.

use crate::clock;
use crate::cpu::{MAX_COLUMNS, sign};
use crate::device::{
    Add, Append, Attend, Buffer, Call, DenseFfn, Device, Heads, Linear, NONE, Norm, OutOfMemory, Rates, Select,
    SignScores, SparseFfn, Stream, Then, VirtualDevice,
};
use crate::engine::session::CHUNK;
use crate::error::{Error, Result};
use crate::formats::rows::{self, Quant};
use crate::model::BlockLayout;
use crate::model::config::{Activation, Ffn, Norm as NormKind};
use crate::prng::Prng;
use serde::Serialize;

/// How far a kernel's result is from the CPU's on the same operands.
#[derive(Clone, Debug, Serialize)]
pub struct Agreement {
    /// Name of the kernel, and the type of its rows if it has several.
    pub kernel: String,
    /// Tokens of the call.
    pub columns: usize,
    /// Largest difference / largest number of the CPU's result; infinite where a number is NaN or the result depends on how it was started.
    pub off: f32,
    /// Largest `off` that is right.
    pub most: f32,
}

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

/// Allowed difference of sums in another order, as a share of the largest number; a wrong kernel differs by far more.
const MOST: f32 = 2e-4;

/// Copies operands to a device and results back, and frees them at the end.
struct Bench<'a> {
    device: &'a mut dyn Device,
    buffers: Vec<Buffer>,
    /// Whether each kernel is launched as a sequence; a recorded one is then launched again with other kernels in it.
    sequences: bool,
}

impl Bench<'_> {
    fn alloc(&mut self, bytes: usize) -> Result<Buffer> {
        let full = |e: OutOfMemory| {
            Error::Memory(format!("the device has {} bytes left and this check needs {} more", e.left, e.asked))
        };
        let buffer = self.device.alloc(bytes as u64).map_err(full)?;
        self.buffers.push(buffer);
        Ok(buffer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.alloc(bytes.len())?;
        if !bytes.is_empty() {
            // SAFETY: waited for before anything else happens to `bytes`.
            unsafe { self.device.copy_in(Stream::Compute, bytes.as_ptr(), bytes.len(), buffer, 0) };
            self.device.synchronize(Stream::Compute);
        }
        Ok(buffer)
    }

    fn numbers(&mut self, values: &[f32]) -> Result<Buffer> {
        self.put(bytemuck::cast_slice(values))
    }

    fn words(&mut self, values: &[u32]) -> Result<Buffer> {
        self.put(bytemuck::cast_slice(values))
    }

    fn get(&mut self, buffer: Buffer) -> Result<Vec<u32>> {
        let mut out = vec![0u32; buffer.bytes as usize / 4];
        // SAFETY: waited for before `out` is looked at.
        unsafe { self.device.copy_out(Stream::Compute, buffer, 0, out.as_mut_ptr().cast(), out.len() * 4) };
        self.device.synchronize(Stream::Compute);
        match self.device.fault() {
            Some(fault) => Err(Error::Fatal(fault.0.clone())),
            None => Ok(out),
        }
    }

    fn launch(&mut self, call: &Call) -> Result<()> {
        self.device.prepare(call).map_err(|e| Error::Memory(format!("{} bytes of scratch are refused", e.asked)))?;
        if self.sequences {
            self.device.begin_sequence(0);
        }
        self.device.launch(Stream::Compute, call);
        self.device.end_sequence();
        Ok(())
    }
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        self.buffers.drain(..).for_each(|buffer| self.device.free(buffer));
    }
}

fn random(prng: &mut Prng, count: usize) -> Vec<f32> {
    (0..count).map(|_| prng.next_f64() as f32 * 2.0 - 1.0).collect()
}

fn matrix(prng: &mut Prng, quant: Quant, rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes = vec![0; rows * quant.row_bytes(cols)];
    bytes.chunks_exact_mut(quant.row_bytes(cols)).for_each(|row| rows::encode(quant, &random(prng, cols), row));
    bytes
}

/// Shape of the checks: hidden size and neurons, deliberately not powers of two.
const HIDDEN: usize = 1056;
const FFN: usize = 176;

/// One kernel on random operands.
struct Case<'a> {
    bench: Bench<'a>,
    prng: Prng,
    quant: Quant,
    n: usize,
}

/// Runs a kernel and returns what it wrote, each word the bits of an f32.
type Run = fn(&mut Case<'_>) -> Result<Vec<u32>>;

/// Types and numbers of tokens for which a kernel, named as in [`Call::NAMES`], is checked.
struct Check {
    kernel: &'static str,
    quants: &'static [Quant],
    columns: &'static [usize],
    run: Run,
}

const ONE: &[Quant] = &[Quant::F32];
const FEW: &[usize] = &[1, 2, 5, 32];
#[rustfmt::skip]
const CHECKS: &[Check] = &[
    Check { kernel: "norm", quants: ONE, columns: FEW, run: norm },
    Check { kernel: "linear", quants: &Quant::OWN, columns: &[1, 2, 5, 32, 200], run: linear },
    Check { kernel: "append", quants: ONE, columns: FEW, run: append },
    Check { kernel: "attend", quants: ONE, columns: FEW, run: attend },
    Check { kernel: "sign_scores", quants: ONE, columns: FEW, run: sign_scores },
    Check { kernel: "select", quants: ONE, columns: FEW, run: select },
    Check { kernel: "sparse_ffn", quants: &Quant::OWN, columns: FEW, run: sparse_ffn },
    Check { kernel: "dense_ffn", quants: &Quant::OWN, columns: &[33, 200], run: dense_ffn },
    Check { kernel: "add", quants: ONE, columns: FEW, run: add },
];

impl Case<'_> {
    /// Random numbers on the device.
    fn numbers(&mut self, count: usize) -> Result<Buffer> {
        self.bench.numbers(&random(&mut self.prng, count))
    }

    /// Rows of `HIDDEN` random numbers.
    fn rows(&mut self, rows: usize) -> Result<Buffer> {
        self.bench.put(&matrix(&mut self.prng, self.quant, rows, HIDDEN))
    }

    /// Normalised input, `[n, HIDDEN]`.
    fn x(&mut self) -> Result<Buffer> {
        self.numbers(self.n * HIDDEN)
    }
}

fn norm(c: &mut Case<'_>) -> Result<Vec<u32>> {
    let (n, x, weight) = (c.n, c.x()?, c.numbers(HIDDEN)?);
    let (out, bias) = (c.bench.alloc(n * HIDDEN * 4)?, c.bench.alloc(0)?);
    let (kind, hidden) = (NormKind::Rms(1e-5), HIDDEN);
    c.bench.launch(&Call::Norm(Norm { kind, hidden, n, weight, bias, x: x.into(), out: out.into() }))?;
    c.bench.get(out)
}

fn linear(c: &mut Case<'_>) -> Result<Vec<u32>> {
    let (quant, n, rows, cols, then) = (c.quant, c.n, FFN, HIDDEN, Then::Add);
    let (weights, bias, x, out) = (c.rows(rows)?, c.numbers(rows)?, c.x()?, c.numbers(n * rows)?);
    let call = Linear { quant, rows, cols, n, weights, bias, x: x.into(), out: out.into(), stride: rows, then };
    c.bench.launch(&Call::Linear(call))?;
    c.bench.get(out)
}

fn add(c: &mut Case<'_>) -> Result<Vec<u32>> {
    let (from, to) = (c.x()?, c.x()?);
    c.bench.launch(&Call::Add(Add { count: c.n * HIDDEN, from: from.into(), to: to.into() }))?;
    c.bench.get(to)
}

/// A KV cache of random keys and values; random queries, keys and values of `n` tokens at the end of a sequence; and the tokens' positions.
fn heads(c: &mut Case<'_>) -> Result<(Heads, Buffer, Buffer)> {
    let (heads, kv_heads, head_dim, layers, context) = (8, 2, 64, 2, 300);
    let before = random(&mut c.prng, 2 * layers * 2 * kv_heads * context * head_dim / 2);
    let before: Vec<half::f16> = before.into_iter().map(half::f16::from_f32).collect();
    let cache = c.bench.put(bytemuck::cast_slice(&before))?;
    let heads = Heads { heads, kv_heads, head_dim, layers, context, cache };
    let qkv = c.numbers(c.n * heads.qkv_dim())?;
    let positions: Vec<u32> = (0..c.n as u32).flat_map(|i| [0, context as u32 - c.n as u32 + i]).collect();
    Ok((heads, qkv, c.bench.words(&positions)?))
}

/// The rotated queries, keys and values, followed by the whole KV cache.
fn append(c: &mut Case<'_>) -> Result<Vec<u32>> {
    let (heads, qkv, positions) = heads(c)?;
    let angle = |i: usize| {
        let (sin, cos) = (i as f32 * 0.37).sin_cos();
        [cos, sin]
    };
    let angles: Vec<f32> = (0..c.n * heads.head_dim / 2).flat_map(angle).collect();
    let angles = c.bench.numbers(&angles)?;
    let norms = [c.numbers(heads.head_dim)?, c.numbers(heads.head_dim)?];
    c.bench.launch(&Call::Append(Append {
        heads,
        layer: 1,
        n: c.n,
        qkv: qkv.into(),
        angles,
        positions: positions.into(),
        norms,
        epsilon: 1e-5,
    }))?;
    let mut out = c.bench.get(qkv)?;
    let cache = c.bench.get(heads.cache)?;
    let halves: &[half::f16] = bytemuck::cast_slice(&cache);
    out.extend(halves.iter().map(|half| half.to_f32().to_bits()));
    Ok(out)
}

fn attend(c: &mut Case<'_>) -> Result<Vec<u32>> {
    let (n, (heads, qkv, positions)) = (c.n, heads(c)?);
    let out = c.bench.alloc(n * heads.q_dim() * 4)?;
    let (layer, window, most, qkv, positions) = (1, None, heads.context, qkv.into(), positions.into());
    c.bench.launch(&Call::Attend(Attend { heads, layer, n, window, most, qkv, positions, out: out.into() }))?;
    c.bench.get(out)
}

fn sign_scores(c: &mut Case<'_>) -> Result<Vec<u32>> {
    let (hidden, ffn, n, lines) = (HIDDEN, FFN, c.n, sign::lines(HIDDEN));
    let mut bits = vec![sign::BitLine::default(); ffn * lines];
    bits.chunks_exact_mut(lines).for_each(|row| sign::pack(&random(&mut c.prng, hidden), row));
    let (bits, x, scores) = (c.bench.put(bytemuck::cast_slice(&bits))?, c.x()?, c.bench.alloc(n * ffn * 4)?);
    c.bench.launch(&Call::SignScores(SignScores { hidden, ffn, n, bits, x: x.into(), scores: scores.into() }))?;
    c.bench.get(scores)
}

/// The bits of the masks as numbers, so that a single wrong bit shows.
fn select(c: &mut Case<'_>) -> Result<Vec<u32>> {
    let (ffn, n, scores) = (FFN, c.n, c.numbers(c.n * FFN)?);
    let bucket: Vec<u32> = (0..64).map(|i| if i % 5 == 0 { NONE } else { i * 2 }).collect();
    let (slots, bucket, masks) = (bucket.len(), c.bench.words(&bucket)?, c.bench.alloc(ffn * 4)?);
    let (min_scores, scores) = ([0.3, -0.2], scores.into());
    c.bench.launch(&Call::Select(Select { ffn, n, slots, min_scores, bucket, scores, masks: masks.into() }))?;
    let masks = c.bench.get(masks)?;
    Ok(masks.into_iter().flat_map(|m| (0..n as u32).map(move |i| ((m >> i & 1) as f32).to_bits())).collect())
}

/// Slots in the checks of the FFNs; one in seven is empty.
const SLOTS: usize = 100;

/// Random neuron blocks in slots, and the neuron of each slot.
fn slots(c: &mut Case<'_>) -> Result<(Buffer, Buffer)> {
    let bucket: Vec<u32> = (0..SLOTS as u32).map(|i| if i % 7 == 0 { NONE } else { i }).collect();
    Ok((c.rows(SLOTS * 3)?, c.bench.words(&bucket)?))
}

fn sparse_ffn(c: &mut Case<'_>) -> Result<Vec<u32>> {
    let (n, (blocks, bucket)) = (c.n, slots(c)?);
    let x = random(&mut c.prng, n * HIDDEN);
    let masks = (0..FFN).map(|_| c.prng.next_u64() as u32 & (u32::MAX >> (32 - n)));
    let input: Vec<u32> = x.iter().map(|v| v.to_bits()).chain(masks).collect();
    let (input, output) = (c.bench.words(&input)?, c.bench.alloc(SparseFfn::output_bytes(n, HIDDEN, SLOTS))?);
    let (layout, kind) = (BlockLayout::new(Ffn::Gated, c.quant, HIDDEN), Ffn::Gated);
    let (activation, activation_threshold) = (Activation::Relu, 0.0);
    let (hidden, ffn, slots, up_bias) = (HIDDEN, FFN, SLOTS, c.bench.alloc(0)?);
    #[rustfmt::skip]
    let call = SparseFfn { layout, kind, activation, activation_threshold, hidden, ffn, slots, n, blocks, bucket, up_bias, input, output };
    c.bench.launch(&Call::SparseFfn(call))?;
    let mut out = c.bench.get(output)?;
    // A bit that differs is a number that is off by a thousandth.
    let active: u32 = out.drain(n * HIDDEN..).map(|bits| bits.count_ones()).sum();
    out.push((active as f32 / 1e3).to_bits());
    Ok(out)
}

fn dense_ffn(c: &mut Case<'_>) -> Result<Vec<u32>> {
    let (n, (blocks, bucket)) = (c.n, slots(c)?);
    let (x, out) = (c.x()?, c.numbers(n * HIDDEN)?);
    let (products, up_bias) = (c.bench.alloc(n * SLOTS * 4)?, c.bench.alloc(0)?);
    let layout = BlockLayout::new(Ffn::Gated, c.quant, HIDDEN);
    let counts = c.bench.alloc(DenseFfn::parts(&layout, n) * FFN * 4)?;
    c.bench.launch(&Call::DenseFfn(DenseFfn {
        layout,
        kind: Ffn::Gated,
        activation: Activation::Relu,
        activation_threshold: 0.0,
        hidden: HIDDEN,
        ffn: FFN,
        slots: SLOTS,
        n,
        blocks: blocks.into(),
        bucket: bucket.into(),
        up_bias,
        x: x.into(),
        products,
        counts,
        out: out.into(),
    }))?;
    let (mut out, counts) = (c.bench.get(out)?, c.bench.get(counts)?);
    let active = |i: usize| counts.iter().skip(i).step_by(FFN).sum::<u32>() as f32 / 1e3;
    out.extend((0..FFN).map(|i| active(i).to_bits()));
    Ok(out)
}

/// Compares every kernel with the CPU's, for all its types and numbers of tokens; started by itself and as a sequence it must give the same
/// bits.
///
/// # Errors
/// [`Error::Memory`] where the device has too little memory, [`Error::Fatal`] if it fails; a kernel that is wrong is only a row.
pub fn agreements(device: &mut dyn Device) -> Result<Vec<Agreement>> {
    let mut rows = Vec::new();
    for check in CHECKS {
        for &quant in check.quants {
            for &columns in check.columns {
                let name = check.kernel;
                let kernel = if check.quants.len() > 1 { format!("{name} {}", quant.name()) } else { name.into() };
                rows.push(Agreement { kernel, columns, off: off(check.run, quant, columns, device)?, most: MOST });
            }
        }
    }
    Ok(rows)
}

/// How far a device's result is from that of the CPU's kernels (see [`Agreement::off`]).
fn off(run: Run, quant: Quant, n: usize, device: &mut dyn Device) -> Result<f32> {
    let result = |device: &mut dyn Device, sequences: bool| {
        let bench = Bench { device, buffers: Vec::new(), sequences };
        run(&mut Case { bench, prng: Prng::new(n as u64 * 31 + quant.index() as u64), quant, n })
    };
    let (found, again) = (result(device, false)?, result(device, true)?);
    let rates = Rates { device_gb_s: 1.0, link_gb_s: 1.0, host_gb_s: 1.0, call_us: 0.0, copy_us: 0.0, sync_us: 0.0 };
    let expected = result(&mut VirtualDevice::new(u64::MAX, rates), false)?;
    let number = |bits: &u32| f32::from_bits(*bits);
    let top = expected.iter().fold(f32::MIN_POSITIVE, |m, v| m.max(number(v).abs()));
    let apart = found.iter().zip(&expected).map(|(a, b)| (number(a) - number(b)).abs() / top);
    let off = apart.fold(0f32, |m, apart| if apart.is_nan() { f32::INFINITY } else { m.max(apart) });
    // However they are started, the same kernels on the same operands must give the same bits.
    Ok(if found == again { off } else { f32::INFINITY })
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
/// of more than twice as many bytes, so that all are read from memory. `scale` divides the shapes, for tests.
///
/// # Errors
/// [`Error::Memory`] where the device has too little memory, [`Error::Fatal`] if it fails.
pub fn speeds(device: &mut dyn Device, l2_bytes: u64, scale: usize) -> Result<Vec<Speed>> {
    let mut speeds = Vec::new();
    for (shape, quant, hidden, ffn, qkv) in SHAPES {
        let (hidden, ffn, qkv) = (hidden / scale, ffn / scale / 32 * 32, qkv / scale);
        for n in [1, 4, CHUNK] {
            // A few random rows are repeated: speed does not depend on the numbers.
            let rows = matrix(&mut Prng::new(1), quant, 64, hidden);
            let mut timing = Timing { device: &mut *device, shape, quant, hidden, ffn, n, l2_bytes, rows };
            speeds.push(timing.linear(qkv)?);
            if n > MAX_COLUMNS {
                speeds.push(timing.dense_ffn()?);
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

    fn linear(&mut self, rows: usize) -> Result<Speed> {
        let (shape, quant, n, cols, x, then) = (self.shape, self.quant, self.n, self.hidden, self.x(), Then::Store);
        let bytes = (rows * quant.row_bytes(cols)) as u64;
        let (many, turns, mut b) = (self.many(rows), self.turns(bytes), self.bench());
        let (x, out, bias) = (b.numbers(&x)?.into(), b.alloc(n * rows * 4)?.into(), b.alloc(0)?);
        let call = |b: &mut Bench<'_>| -> Result<Call> {
            Ok(Call::Linear(Linear { quant, rows, cols, n, weights: b.put(&many)?, bias, x, out, stride: rows, then }))
        };
        let calls = (0..turns).map(|_| call(&mut b)).collect::<Result<Vec<_>>>()?;
        time(&mut b, "linear", shape, n, bytes, 2 * n * rows * cols, &calls)
    }

    fn dense_ffn(&mut self) -> Result<Speed> {
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
            let call = DenseFfn { layout, kind, activation, activation_threshold, hidden, ffn, slots, n, blocks, bucket, up_bias, x, products, counts, out };
            Ok(Call::DenseFfn(call))
        };
        let calls = (0..turns).map(|_| call(&mut b)).collect::<Result<Vec<_>>>()?;
        time(&mut b, "dense_ffn", shape, n, bytes, 6 * n * slots * hidden, &calls)
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
            let call = SparseFfn { layout, kind, activation, activation_threshold, hidden, ffn, slots, n, blocks, bucket, up_bias, input, output };
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
    let add = |from: Buffer| Call::Add(Add { count: hidden, from: from.into(), to: room.into() });
    let (kind, activation, activation_threshold, up_bias, min_scores) =
        (Ffn::Gated, Activation::Silu, 0.0, none, [0.0; 2]);
    let select = Select { ffn, n, slots, min_scores, bucket, scores: scores.into(), masks: room.into() };
    let layout = BlockLayout::new(kind, quant, hidden);
    #[rustfmt::skip]
    let half = SparseFfn { layout, kind, activation, activation_threshold, hidden, ffn, slots, n, blocks, bucket, up_bias, input, output };
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

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> VirtualDevice {
        let rates =
            Rates { device_gb_s: 100.0, link_gb_s: 1.0, host_gb_s: 1.0, call_us: 0.0, copy_us: 0.0, sync_us: 0.0 };
        VirtualDevice::new(u64::MAX, rates)
    }

    #[test]
    fn a_device_agrees_with_itself_and_gives_its_memory_back() {
        let mut device = device();
        let rows = agreements(&mut device).unwrap();
        assert!(rows.len() == 68 && rows.iter().all(|row| row.off == 0.0), "{rows:?}");
        assert_eq!(device.memory().used, 0);
    }

    #[test]
    fn every_kernel_is_checked() {
        let checked: Vec<&str> = CHECKS.iter().map(|check| check.kernel).collect();
        assert_eq!(checked, Call::NAMES);
    }

    #[test]
    fn a_device_with_a_known_rate_is_timed_at_that_rate() {
        let mut device = device();
        let speeds = speeds(&mut device, 1 << 16, 32).unwrap();
        assert_eq!(speeds.len(), 24);
        for s in speeds {
            // Launching takes some time, too.
            assert!(s.gb_s <= 100.0 && s.gb_s > 85.0, "{s:?}");
        }
        assert_eq!(device.memory().used, 0);
    }
}
