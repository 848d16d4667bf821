//! Each kernel's results beside the CPU's.

use super::operands::{Bench, matrix, random};
use crate::cpu::{MAX_COLUMNS, sign};
use crate::device::{
    Add, Append, Attend, Buffer, Call, ColumnWeights, DenseFfn, Device, ExpertFfn, Heads, Linear, Mixture, NONE, Norm,
    Rates, Select, SignScores, SlotBlocks, SparseFfn, Then, Tiles, View, VirtualDevice,
};
use crate::error::Result;
use crate::formats::rows::Quant;
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

/// Allowed difference of sums in another order, as a share of the largest number; a wrong kernel differs by far more.
const MAX_ERROR: f32 = 2e-4;
/// The same where tensor cores take inputs rounded to f16: each is off by up to 5e-4 of itself, a sum of many by less, but an FFN rounds twice.
const MAX_ERROR_OF_HALVES: f32 = 2e-3;

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
pub(super) struct Check {
    pub kernel: &'static str,
    quants: &'static [Quant],
    columns: &'static [usize],
    run: Run,
}

const ONE: &[Quant] = &[Quant::F32];
/// Types that files have without padding, and for which activations are not rounded between the kernels.
const FLOATS: &[Quant] = &[Quant::F32, Quant::F16];
const FEW: &[usize] = &[1, 2, 5, 32];
#[rustfmt::skip]
pub(super) const CHECKS: &[Check] = &[
    Check { kernel: "norm", quants: ONE, columns: FEW, run: norm },
    Check { kernel: "linear", quants: &Quant::OWN, columns: &[1, 2, 5, 32, 200], run: linear },
    Check { kernel: "append", quants: ONE, columns: FEW, run: append },
    Check { kernel: "attend", quants: ONE, columns: FEW, run: attend },
    Check { kernel: "sign_scores", quants: ONE, columns: FEW, run: sign_scores },
    Check { kernel: "select", quants: ONE, columns: FEW, run: select },
    Check { kernel: "sparse_ffn", quants: &Quant::OWN, columns: FEW, run: sparse_ffn },
    Check { kernel: "dense_ffn", quants: &Quant::OWN, columns: &[33, 200], run: dense_ffn },
    Check { kernel: "expert_ffn", quants: FLOATS, columns: FEW, run: expert_ffn },
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
    c.bench.launch(&Call::Add(Add { count: c.n * HIDDEN, from: from.into(), to: to.into(), scale: 0.75 }))?;
    c.bench.get(to)
}

/// A KV cache of random keys and values; random queries, keys and values of `n` tokens at the end of a sequence; and the tokens' positions.
fn heads(c: &mut Case<'_>) -> Result<(Heads, Buffer, Buffer)> {
    let (heads, kv_heads, head_dim, layers, context) = (8, 2, 64, 2, 300);
    let layer = 2 * kv_heads * context * head_dim;
    let before = random(&mut c.prng, 2 * layers * 2 * kv_heads * context * head_dim / 2);
    let before: Vec<half::f16> = before.into_iter().map(half::f16::from_f32).collect();
    let cache = c.bench.put(bytemuck::cast_slice(&before))?;
    let heads = Heads { heads, kv_heads, head_dim, context, cache: View { buffer: cache, at: layer as u64 * 2 } };
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
        n: c.n,
        qkv: qkv.into(),
        angles: angles.into(),
        positions: positions.into(),
        norms,
        epsilon: 1e-5,
        value_norm: true,
    }))?;
    let mut out = c.bench.get(qkv)?;
    let cache = c.bench.get(heads.cache.buffer)?;
    let halves: &[half::f16] = bytemuck::cast_slice(&cache);
    out.extend(halves.iter().map(|half| half.to_f32().to_bits()));
    Ok(out)
}

fn attend(c: &mut Case<'_>) -> Result<Vec<u32>> {
    let (n, (heads, qkv, positions)) = (c.n, heads(c)?);
    let out = c.bench.alloc(n * heads.q_dim() * 4)?;
    let (window, most, qkv, positions) = (None, heads.context, qkv.into(), positions.into());
    let sinks = random(&mut c.prng, heads.heads);
    let sinks = c.bench.put(bytemuck::cast_slice(&sinks))?;
    c.bench.launch(&Call::Attend(Attend { heads, n, window, most, qkv, positions, sinks, out: out.into() }))?;
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

/// Of a plain FFN, and of a mixture's experts that are packed by neuron.
fn sparse_ffn(c: &mut Case<'_>) -> Result<Vec<u32>> {
    let (blocks, bucket) = slots(c)?;
    let mut out = neurons_in_slots(c, blocks.into(), bucket, None)?;
    let apart = [c.rows(SLOTS)?, c.rows(SLOTS)?, c.rows(SLOTS)?].map(View::from);
    // Every second expert is wanted by some token.
    let mixture = Mixture { experts: FFN / 8, rows: FFN / 16 };
    out.extend(neurons_in_slots(c, SlotBlocks::Apart(apart), bucket, Some(mixture))?);
    Ok(out)
}

fn neurons_in_slots(
    c: &mut Case<'_>,
    blocks: SlotBlocks,
    bucket: Buffer,
    mixture: Option<Mixture>,
) -> Result<Vec<u32>> {
    let n = c.n;
    let x = random(&mut c.prng, n * HIDDEN);
    let choice = match mixture {
        None => masks(c, FFN),
        Some(Mixture { experts, rows }) => {
            let row = |expert: usize| if expert % 2 == 1 { NONE } else { (expert / 2) as u32 };
            let weights = random(&mut c.prng, experts * n).into_iter().map(f32::to_bits);
            let of_experts: Vec<u32> = (0..experts).map(row).chain(weights).collect();
            of_experts.into_iter().chain(masks(c, rows * (FFN / experts))).collect()
        }
    };
    let input: Vec<u32> = x.iter().map(|v| v.to_bits()).chain(choice).collect();
    let (input, output) = (c.bench.words(&input)?, c.bench.alloc(SparseFfn::output_bytes(n, HIDDEN, SLOTS))?);
    let (layout, kind) = (BlockLayout::new(Ffn::Gated, c.quant, HIDDEN), Ffn::Gated);
    let (activation, activation_threshold) = (Activation::Relu, 0.0);
    let (hidden, ffn, slots, up_bias) = (HIDDEN, FFN, SLOTS, c.bench.alloc(0)?);
    #[rustfmt::skip]
    let call = SparseFfn { layout, kind, activation, activation_threshold, hidden, ffn, mixture, slots, n, blocks, bucket, up_bias, input, output };
    c.bench.launch(&Call::SparseFfn(call))?;
    let mut out = c.bench.get(output)?;
    // A bit that differs is a number that is off by a thousandth.
    let active: u32 = out.drain(n * HIDDEN..).map(|bits| bits.count_ones()).sum();
    out.push((active as f32 / 1e3).to_bits());
    Ok(out)
}

/// Which columns want each of so many neurons.
fn masks(c: &mut Case<'_>, count: usize) -> Vec<u32> {
    (0..count).map(|_| c.prng.next_u64() as u32 & (u32::MAX >> (32 - c.n))).collect()
}

/// Of a plain FFN, and of a mixture's experts that are packed by neuron.
fn dense_ffn(c: &mut Case<'_>) -> Result<Vec<u32>> {
    let (blocks, bucket) = slots(c)?;
    let mut out = neurons_for_all(c, blocks.into(), bucket, None)?;
    let apart = [c.rows(SLOTS)?, c.rows(SLOTS)?, c.rows(SLOTS)?].map(View::from);
    let experts = FFN / 8;
    // Half of the tokens do not have the expert.
    let weights = random(&mut c.prng, experts * c.n).into_iter().map(|weight| weight.max(0.0)).collect::<Vec<_>>();
    let weights = ColumnWeights { at: c.bench.numbers(&weights)?.into(), experts };
    out.extend(neurons_for_all(c, SlotBlocks::Apart(apart), bucket, Some(weights))?);
    Ok(out)
}

fn neurons_for_all(
    c: &mut Case<'_>,
    blocks: SlotBlocks,
    bucket: Buffer,
    weights: Option<ColumnWeights>,
) -> Result<Vec<u32>> {
    let n = c.n;
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
        blocks,
        weights,
        bucket: bucket.into(),
        up_bias,
        x: x.into(),
        products,
        counts: counts.into(),
        out: out.into(),
    }))?;
    let (mut out, counts) = (c.bench.get(out)?, c.bench.get(counts)?);
    let active = |i: usize| counts.iter().skip(i).step_by(FFN).sum::<u32>() as f32 / 1e3;
    out.extend((0..FFN).map(|i| active(i).to_bits()));
    Ok(out)
}

/// Two experts of `FFN` neurons a token, of four slots; one token in three has one in no slot.
fn expert_ffn(c: &mut Case<'_>) -> Result<Vec<u32>> {
    const EXPERTS: usize = 4;
    let n = c.n;
    let part = |c: &mut Case<'_>, rows: usize, cols: usize| {
        let padded = matrix(&mut c.prng, c.quant, EXPERTS * rows, cols);
        let row_bytes = c.quant.row_bytes(cols);
        let rows = padded.chunks_exact(row_bytes).flat_map(|row| &row[..c.quant.number_bytes(cols)]);
        c.bench.put(&rows.copied().collect::<Vec<u8>>())
    };
    let blocks = [part(c, FFN, HIDDEN)?, part(c, FFN, HIDDEN)?, part(c, HIDDEN, FFN)?];
    // Expert `e` lies in slot `EXPERTS - 1 - e`.
    let choice = |expert: usize| ExpertFfn::choice((EXPERTS - 1 - expert) as u32, expert);
    let pair = |t: usize| {
        let second = if t.is_multiple_of(3) { NONE } else { choice((t + 1) % EXPERTS) };
        [choice(t % EXPERTS), 0.75f32.to_bits(), second, 0.25f32.to_bits()]
    };
    let mut bias = |numbers: usize| -> Result<Buffer> {
        let numbers = random(&mut c.prng, numbers);
        c.bench.put(bytemuck::cast_slice(&numbers))
    };
    let biases = [bias(EXPERTS * 2 * FFN)?, bias(EXPERTS * HIDDEN)?];
    let chosen = c.bench.words(&(0..n).flat_map(pair).collect::<Vec<u32>>())?.into();
    let (input, output) = (c.x()?.into(), c.bench.alloc(n * HIDDEN * 4)?);
    let (quants, kind, activation, hidden, ffn) = ([c.quant; 3], Ffn::Gated, Activation::Silu, HIDDEN, FFN);
    let (slots, used) = (EXPERTS, 2);
    #[rustfmt::skip]
    let call = ExpertFfn { quants, kind, activation, hidden, ffn, slots, used, n, blocks, biases, chosen, input, output: output.into() };
    c.bench.launch(&Call::ExpertFfn(call))?;
    c.bench.get(output)
}

/// Whether tensor cores have a part in a kernel of these rows and columns.
fn has_tensor_tiles(kernel: &str, quant: Quant, columns: usize) -> bool {
    let rows = matches!(quant, Quant::F16 | Quant::Q8 | Quant::Q4);
    rows && columns > MAX_COLUMNS && matches!(kernel, "linear" | "dense_ffn")
}

/// Compares every kernel with the CPU's, for all its types and numbers of tokens; started by itself and as a sequence it must give the same
/// bits. `tiles` are those that the device multiplies by: with tensor cores only what they have a part in is compared.
///
/// # Errors
/// [`crate::error::Error::Memory`] where the device has too little memory, [`crate::error::Error::Fatal`] if it fails; a kernel that is wrong is only
/// a row.
pub fn agreements(device: &mut dyn Device, tiles: Tiles) -> Result<Vec<Agreement>> {
    let mut rows = Vec::new();
    for check in CHECKS {
        for &quant in check.quants {
            for &columns in check.columns {
                let name = check.kernel;
                let mut kernel = if check.quants.len() > 1 { format!("{name} {}", quant.name()) } else { name.into() };
                let mut most = MAX_ERROR;
                if tiles != Tiles::Lanes {
                    if !has_tensor_tiles(name, quant, columns) {
                        continue;
                    }
                    kernel += ", tensor cores";
                    most = if quant == Quant::F16 { MAX_ERROR_OF_HALVES } else { MAX_ERROR };
                }
                rows.push(Agreement { kernel, columns, off: off(check.run, quant, columns, device)?, most });
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
    let rates = Rates {
        device_gb_s: 1.0,
        device_gflops: 6000.0,
        link_gb_s: 1.0,
        host_gb_s: 1.0,
        host_gflops: 1.0,
        call_us: 0.0,
        copy_us: 0.0,
        sync_us: 0.0,
    };
    let expected = result(&mut VirtualDevice::new(u64::MAX, rates), false)?;
    let number = |bits: &u32| f32::from_bits(*bits);
    let top = expected.iter().fold(f32::MIN_POSITIVE, |m, v| m.max(number(v).abs()));
    let apart = found.iter().zip(&expected).map(|(a, b)| (number(a) - number(b)).abs() / top);
    let off = apart.fold(0f32, |m, apart| if apart.is_nan() { f32::INFINITY } else { m.max(apart) });
    // However they are started, the same kernels on the same operands must give the same bits.
    Ok(if found == again { off } else { f32::INFINITY })
}
