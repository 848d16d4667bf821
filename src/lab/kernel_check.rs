//! A device's kernels beside the CPU's, and how fast they read: what `gpu-check` shows.

use crate::clock;
use crate::cpu::{MAX_COLUMNS, sign};
use crate::device::{
    Add, Append, Attend, Buffer, Call, DenseFfn, Device, Heads, Linear, NONE, Norm, OutOfMemory, Rates, Select,
    SignScores, SparseFfn, Stream, Then, VirtualDevice,
};
use crate::engine::session::CHUNK;
use crate::error::{Error, Result};
use crate::formats::rows::{self, Quant};
use crate::model::config::{Activation, Ffn, Norm as NormKind};
use crate::prng::Prng;
use serde::Serialize;

/// A kernel beside the CPU's on the same operands.
#[derive(Clone, Debug, Serialize)]
pub struct Agreement {
    pub kernel: String,
    pub columns: usize,
    /// The largest difference, by the largest number of the CPU's.
    pub off: f32,
    pub most: f32,
}

/// How fast a kernel reads what it must, and computes.
#[derive(Clone, Debug, Serialize)]
pub struct Speed {
    pub kernel: String,
    pub shape: &'static str,
    pub columns: usize,
    /// Bytes of weights, keys and values that one launch reads.
    pub bytes: u64,
    pub us: f64,
    pub gb_s: f64,
    /// 10^12 multiplications and additions a second, each counted.
    pub tflop_s: f64,
}

/// What it takes to start a token's kernels.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Launching {
    /// Calls of a layer, and the time from the first to the end of the last: put on the stream by themselves, and as sequences.
    pub calls: usize,
    pub one_by_one_us: f64,
    pub graphs_us: f64,
}

/// Sums in another order differ by this share of the largest, at most; a wrong kernel by far more.
const MOST: f32 = 2e-4;

/// Puts numbers on a device and gets them back.
struct Bench<'a> {
    device: &'a mut dyn Device,
    buffers: Vec<Buffer>,
    /// Whether each call is a sequence, whose kernels then are those of another call than the last time.
    sequences: bool,
}

impl Bench<'_> {
    fn room(&mut self, bytes: usize) -> Result<Buffer> {
        let full = |e: OutOfMemory| {
            Error::Memory(format!("the device has {} bytes left and this check needs {} more", e.left, e.asked))
        };
        let buffer = self.device.alloc(bytes as u64).map_err(full)?;
        self.buffers.push(buffer);
        Ok(buffer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.room(bytes.len())?;
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

/// One kernel on operands that come from `seed`; what it wrote, as f32 or, for masks, as words.
fn result(
    kernel: &str,
    quant: Quant,
    n: usize,
    seed: u64,
    device: &mut dyn Device,
    sequences: bool,
) -> Result<Vec<u32>> {
    let (mut prng, mut b) = (Prng::new(seed), Bench { device, buffers: Vec::new(), sequences });
    let (hidden, ffn) = (1056, 176);
    let none = b.room(0)?;
    let x = random(&mut prng, n * hidden);
    match kernel {
        "norm" => {
            let (x, weight) = (b.numbers(&x)?, b.numbers(&random(&mut prng, hidden))?);
            let out = b.room(n * hidden * 4)?;
            let kind = NormKind::Rms(1e-5);
            b.launch(&Call::Norm(Norm { kind, hidden, n, weight, bias: none, x: x.into(), out: out.into() }))?;
            b.get(out)
        }
        "linear" => {
            let weights = b.put(&matrix(&mut prng, quant, ffn, hidden))?;
            let (bias, x) = (b.numbers(&random(&mut prng, ffn))?, b.numbers(&x)?);
            let out = b.numbers(&random(&mut prng, n * ffn))?;
            let (x, to) = (x.into(), out.into());
            let call = Linear { quant, rows: ffn, cols: hidden, n, weights, bias, x, out: to, then: Then::Add };
            b.launch(&Call::Linear(call))?;
            b.get(out)
        }
        "attention" => {
            let (heads, kv_heads, head_dim, layers, context) = (8, 2, 64, 2, 300);
            let bytes = 2 * layers * 2 * kv_heads * context * head_dim;
            let before: Vec<half::f16> = random(&mut prng, bytes / 2).into_iter().map(half::f16::from_f32).collect();
            let cache = b.put(bytemuck::cast_slice(&before))?;
            let heads = Heads { heads, kv_heads, head_dim, layers, context, cache };
            let qkv = b.numbers(&random(&mut prng, n * heads.qkv_dim()))?;
            let angles: Vec<f32> = (0..n * head_dim / 2)
                .flat_map(|i| {
                    let (sin, cos) = (i as f32 * 0.37).sin_cos();
                    [cos, sin]
                })
                .collect();
            let angles = b.numbers(&angles)?;
            let places: Vec<u32> = (0..n as u32).flat_map(|i| [0, context as u32 - n as u32 + i]).collect();
            let (places, out) = (b.words(&places)?, b.room(n * heads.q_dim() * 4)?);
            let (layer, qkv, places) = (1, qkv.into(), places.into());
            b.launch(&Call::Append(Append { heads, layer, n, qkv, angles, places }))?;
            let (window, most) = (None, context);
            b.launch(&Call::Attend(Attend { heads, layer, n, window, most, qkv, places, out: out.into() }))?;
            b.get(out)
        }
        "dense_ffn" => {
            let slots = 100;
            let bucket: Vec<u32> = (0..slots as u32).map(|i| if i % 7 == 0 { NONE } else { i }).collect();
            let blocks = b.put(&matrix(&mut prng, quant, slots * 3, hidden))?;
            let (bucket, x, out) = (b.words(&bucket)?, b.numbers(&x)?, b.numbers(&random(&mut prng, n * hidden))?);
            let products = b.room(n * slots * 4)?;
            let parts = DenseFfn::parts(quant, n);
            let counts = b.room(parts * ffn * 4)?;
            b.launch(&Call::DenseFfn(DenseFfn {
                quant,
                kind: Ffn::Gated,
                activation: Activation::Relu,
                cut: 0.0,
                hidden,
                ffn,
                slots,
                n,
                blocks: blocks.into(),
                bucket: bucket.into(),
                up_bias: none,
                x: x.into(),
                products,
                counts,
                out: out.into(),
            }))?;
            let (mut out, counts) = (b.get(out)?, b.get(counts)?);
            let active = |i: usize| counts.iter().skip(i).step_by(ffn).sum::<u32>() as f32 / 1e3;
            out.extend((0..ffn).map(|i| active(i).to_bits()));
            Ok(out)
        }
        "sign_scores" => {
            let lines = sign::lines(hidden);
            let mut bits = vec![sign::BitLine::default(); ffn * lines];
            bits.chunks_exact_mut(lines).for_each(|row| sign::pack(&random(&mut prng, hidden), row));
            let (bits, x) = (b.put(bytemuck::cast_slice(&bits))?, b.numbers(&x)?);
            let scores = b.room(n * ffn * 4)?;
            let (x, to) = (x.into(), scores.into());
            b.launch(&Call::SignScores(SignScores { hidden, ffn, n, bits, x, scores: to }))?;
            b.get(scores)
        }
        "select" => {
            let scores = b.numbers(&random(&mut prng, n * ffn))?;
            let bucket: Vec<u32> = (0..64).map(|i| if i % 5 == 0 { NONE } else { i * 2 }).collect();
            let (slots, bucket, masks) = (bucket.len(), b.words(&bucket)?, b.room(ffn * 4)?);
            let (least, scores, to) = ([0.3, -0.2], scores.into(), masks.into());
            b.launch(&Call::Select(Select { ffn, n, slots, least, bucket, scores, masks: to }))?;
            let masks = b.get(masks)?;
            // As numbers, so that one bit is a difference.
            Ok(masks.into_iter().flat_map(|m| (0..n as u32).map(move |i| ((m >> i & 1) as f32).to_bits())).collect())
        }
        _ => {
            let slots = 100;
            let bucket: Vec<u32> = (0..slots as u32).map(|i| if i % 7 == 0 { NONE } else { i }).collect();
            let masks: Vec<u32> = (0..ffn).map(|_| prng.next_u64() as u32 & (u32::MAX >> (32 - n))).collect();
            let input: Vec<u32> = x.iter().map(|v| v.to_bits()).chain(masks).collect();
            let blocks = b.put(&matrix(&mut prng, quant, slots * 3, hidden))?;
            let (bucket, input) = (b.words(&bucket)?, b.words(&input)?);
            let output = b.room(SparseFfn::output_bytes(n, hidden))?;
            let (kind, activation) = (Ffn::Gated, Activation::Relu);
            let up_bias = none;
            b.launch(&Call::SparseFfn(SparseFfn {
                quant,
                kind,
                activation,
                cut: 0.0,
                hidden,
                ffn,
                slots,
                n,
                blocks,
                bucket,
                up_bias,
                input,
                output,
            }))?;
            let mut out = b.get(output)?;
            let active = out.pop().expect("the count") as f32;
            out.push((active / 1e3).to_bits());
            Ok(out)
        }
    }
}

/// Every kernel beside the CPU's, over types and columns; started by itself and as a sequence, with the same bits.
///
/// # Errors
/// If the device has no room or fails; a kernel that is off is a row.
pub fn agreements(device: &mut dyn Device) -> Result<Vec<Agreement>> {
    let rates = Rates { device_gb_s: 1.0, link_gb_s: 1.0, host_gb_s: 1.0, call_us: 0.0, copy_us: 0.0, sync_us: 0.0 };
    let mut rows = Vec::new();
    let few = &[1, 2, 5, 32][..];
    for (kernel, quants, widths) in [
        ("norm", &Quant::ALL[..1], few),
        ("linear", &Quant::ALL[..], &[1, 2, 5, 32, 200]),
        ("attention", &Quant::ALL[..1], few),
        ("sign_scores", &Quant::ALL[..1], few),
        ("select", &Quant::ALL[..1], few),
        ("sparse_ffn", &Quant::ALL[..], few),
        ("dense_ffn", &Quant::ALL[..], &[33, 200]),
    ] {
        for &quant in quants {
            for &columns in widths {
                let seed = columns as u64 * 31 + quant as u64;
                let found = result(kernel, quant, columns, seed, device, false)?;
                let again = result(kernel, quant, columns, seed, device, true)?;
                let reference = &mut VirtualDevice::new(u64::MAX, rates);
                let expected = result(kernel, quant, columns, seed, reference, false)?;
                let number = |bits: &u32| f32::from_bits(*bits);
                let top = expected.iter().fold(f32::MIN_POSITIVE, |m, v| m.max(number(v).abs()));
                let off = found.iter().zip(&expected).fold(0f32, |m, (a, b)| {
                    let apart = (number(a) - number(b)).abs() / top;
                    if apart.is_nan() { f32::INFINITY } else { m.max(apart) }
                });
                // The same kernels on the same operands, whoever starts them.
                let off = if found == again { off } else { f32::INFINITY };
                let name = if quants.len() > 1 { format!("{kernel} {}", quant.name()) } else { kernel.into() };
                rows.push(Agreement { kernel: name, columns, off, most: MOST });
            }
        }
    }
    Ok(rows)
}

/// A shape whose kernels are timed: name, type, hidden, FFN, rows of q, k and v.
type Shape = (&'static str, Quant, usize, usize, usize);

const SHAPES: [Shape; 3] = [
    ("7B f16", Quant::F16, 4096, 11008, 3 * 4096),
    ("13B f16", Quant::F16, 5120, 13824, 3 * 5120),
    ("70B q4_0", Quant::Q4, 8192, 28672, 8192 + 2 * 1024),
];

/// Launches that are timed together, and how often; the fastest counts.
const LAUNCHES: usize = 8;
const PASSES: usize = 5;

/// Times matrices and FFNs at the shapes of real models. `l2_bytes` is the card's: operands take turns over more than twice as much.
/// `scale` divides the shapes, for tests.
pub fn speeds(device: &mut dyn Device, l2_bytes: u64, scale: usize) -> Result<Vec<Speed>> {
    let mut speeds = Vec::new();
    for (shape, quant, hidden, ffn, qkv) in SHAPES {
        let (hidden, ffn, qkv) = (hidden / scale, ffn / scale / 32 * 32, qkv / scale);
        for n in [1, 4, CHUNK] {
            let mut b = Bench { device: &mut *device, buffers: Vec::new(), sequences: false };
            let (mut prng, row_bytes) = (Prng::new(1), quant.row_bytes(hidden));
            let x = b.numbers(&random(&mut prng, n * hidden))?;
            // Some random rows, again and again: what the numbers are does not matter to how fast they come.
            let some = matrix(&mut prng, quant, 64, hidden);
            let many = |rows: usize| -> Vec<u8> { some.iter().copied().cycle().take(rows * row_bytes).collect() };
            let turns = |bytes: u64| (2 * l2_bytes / bytes + 2) as usize;
            let (out, none) = (b.room(n * qkv * 4)?, b.room(0)?);
            let bytes = (qkv * row_bytes) as u64;
            let weights = many(qkv);
            let calls = (0..turns(bytes))
                .map(|_| {
                    let (weights, x, out) = (b.put(&weights)?, x.into(), out.into());
                    let (rows, cols, bias, then) = (qkv, hidden, none, Then::Store);
                    Ok(Call::Linear(Linear { quant, rows, cols, n, weights, bias, x, out, then }))
                })
                .collect::<Result<Vec<_>>>()?;
            speeds.push(time(&mut b, "linear", shape, n, bytes, 2 * n * qkv * hidden, &calls)?);
            drop(b);
            if n > MAX_COLUMNS {
                // As many slots as a prompt's chunk has computed at a time.
                let mut b = Bench { device: &mut *device, buffers: Vec::new(), sequences: false };
                let slots = ffn.min(4096);
                let (blocks, bucket) = (many(slots * 3), (0..slots as u32).collect::<Vec<_>>());
                let (x, bucket, up_bias) = (b.numbers(&random(&mut prng, n * hidden))?, b.words(&bucket)?, b.room(0)?);
                let (products, out) = (b.room(n * slots * 4)?, b.room(n * hidden * 4)?);
                let counts = b.room(DenseFfn::parts(quant, n) * ffn * 4)?;
                let bytes = (slots * 3 * row_bytes) as u64;
                let calls = (0..turns(bytes).min(4))
                    .map(|_| {
                        Ok(Call::DenseFfn(DenseFfn {
                            quant,
                            kind: Ffn::Gated,
                            activation: Activation::Silu,
                            cut: 0.0,
                            hidden,
                            ffn,
                            slots,
                            n,
                            blocks: b.put(&blocks)?.into(),
                            bucket: bucket.into(),
                            up_bias,
                            x: x.into(),
                            products,
                            counts,
                            out: out.into(),
                        }))
                    })
                    .collect::<Result<Vec<_>>>()?;
                speeds.push(time(&mut b, "dense_ffn", shape, n, bytes, 6 * n * slots * hidden, &calls)?);
                continue;
            }
            // A tenth of the neurons, spread out, and all of them; every one fires.
            for (kernel, every) in [("sparse_ffn, a tenth", 10), ("sparse_ffn, all", 1)] {
                let mut b = Bench { device: &mut *device, buffers: Vec::new(), sequences: false };
                let mask = |i: usize| if i.is_multiple_of(every) { u32::MAX >> (32 - n) } else { 0 };
                let input: Vec<u32> =
                    random(&mut prng, n * hidden).iter().map(|v| v.to_bits()).chain((0..ffn).map(mask)).collect();
                let bucket: Vec<u32> = (0..ffn as u32).collect();
                let (input, bucket) = (b.words(&input)?, b.words(&bucket)?);
                let (output, up_bias) = (b.room(SparseFfn::output_bytes(n, hidden))?, b.room(0)?);
                let bytes = (ffn.div_ceil(every) * 3 * row_bytes) as u64;
                let blocks = many(ffn * 3);
                let calls = (0..turns(bytes).min(4))
                    .map(|_| {
                        let (kind, activation, cut) = (Ffn::Gated, Activation::Silu, -1.0);
                        let (blocks, slots) = (b.put(&blocks)?, ffn);
                        Ok(Call::SparseFfn(SparseFfn {
                            quant,
                            kind,
                            activation,
                            cut,
                            hidden,
                            ffn,
                            slots,
                            n,
                            blocks,
                            bucket,
                            up_bias,
                            input,
                            output,
                        }))
                    })
                    .collect::<Result<Vec<_>>>()?;
                let flops = 6 * n * ffn.div_ceil(every) * hidden;
                speeds.push(time(&mut b, kernel, shape, n, bytes, flops, &calls)?);
            }
        }
    }
    Ok(speeds)
}

/// Times the calls of a layer that is so small that starting them is what takes the time, with and without sequences.
pub fn launching(device: &mut dyn Device) -> Result<Launching> {
    const LAYERS: usize = 8;
    let (quant, hidden, ffn, slots, n) = (Quant::F16, 256, 512, 64, 1);
    let (mut prng, mut b) = (Prng::new(1), Bench { device, buffers: Vec::new(), sequences: false });
    let weights = b.put(&matrix(&mut prng, quant, ffn, hidden))?;
    let (x, bucket) = (b.numbers(&random(&mut prng, ffn))?, b.words(&(0..slots as u32).collect::<Vec<_>>())?);
    let (none, room, scores) = (b.room(0)?, b.room(ffn * 4)?, b.room(ffn * 4)?);
    let (input, output) =
        (b.room(SparseFfn::input_bytes(n, hidden, ffn))?, b.room(SparseFfn::output_bytes(n, hidden))?);
    let blocks = b.put(&matrix(&mut prng, quant, slots * 3, hidden))?;
    let norm = |x: Buffer, out: Buffer| {
        let (kind, weight, bias) = (NormKind::Rms(1e-5), none, none);
        Call::Norm(Norm { kind, hidden, n, weight, bias, x: x.into(), out: out.into() })
    };
    let linear = |rows: usize, out: Buffer| {
        let (cols, bias, x, then) = (hidden, none, x.into(), Then::Store);
        Call::Linear(Linear { quant, rows, cols, n, weights, bias, x, out: out.into(), then })
    };
    let add = |from: Buffer| Call::Add(Add { count: hidden, from: from.into(), to: room.into() });
    let (kind, activation, cut, up_bias, least) = (Ffn::Gated, Activation::Silu, 0.0, none, [0.0; 2]);
    let select = Select { ffn, n, slots, least, bucket, scores: scores.into(), masks: room.into() };
    #[rustfmt::skip]
    let half = SparseFfn { quant, kind, activation, cut, hidden, ffn, slots, n, blocks, bucket, up_bias, input, output };
    // As the engine has them: attention, front, the device's half, the halves' sum.
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
        assert!(rows.len() == 60 && rows.iter().all(|row| row.off == 0.0), "{rows:?}");
        assert_eq!(device.memory().used, 0);
    }

    #[test]
    fn a_device_with_a_known_rate_is_timed_at_that_rate() {
        let mut device = device();
        let speeds = speeds(&mut device, 1 << 16, 32).unwrap();
        assert_eq!(speeds.len(), 24);
        for s in speeds {
            // Putting the launches on the stream takes its time, too.
            assert!(s.gb_s <= 100.0 && s.gb_s > 85.0, "{s:?}");
        }
        assert_eq!(device.memory().used, 0);
    }
}
