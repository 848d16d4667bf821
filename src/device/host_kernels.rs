//! Every [`Call`] with the CPU's kernels: what a device's kernels have to compute, and what the virtual device runs.

use super::dense_ffn;
use super::sparse_ffn::{self, Operands};
use super::{
    Add, Append, Attend, Buffer, Call, DenseFfn, Linear, NONE, Norm, Select, SignScores, SparseFfn, Then, View,
};
use crate::cpu::attend::{AttendRoom, Head};
use crate::cpu::sign::{self, BitLine};
use crate::cpu::{Columns, Kernels, Rows};
use crate::formats::rows::Quant;
use crate::model::config::Norm as NormKind;
use half::f16;

/// What a run left, until it is written down. Kept between runs, so that nothing is allocated once it is warm.
#[derive(Default)]
pub struct Room {
    ffn: sparse_ffn::Room,
    dense: dense_ffn::Room,
    columns: Columns,
    /// The call's output, in the order of its views.
    values: Vec<f32>,
    attend: AttendRoom,
    bits: Vec<BitLine>,
}

/// A device's memory: buffers begin at multiples of 64 bytes and are whole numbers of 4 bytes.
pub trait Memory {
    fn of(&self, buffer: Buffer) -> &[f32];

    fn of_mut(&mut self, buffer: Buffer) -> &mut [f32];
}

/// `count` numbers from a view on.
fn numbers(at: &dyn Memory, view: View, count: usize) -> &[f32] {
    &at.of(view.buffer)[view.at as usize / 4..][..count]
}

fn words(at: &dyn Memory, view: View, count: usize) -> &[u32] {
    bytemuck::cast_slice(numbers(at, view, count))
}

/// Runs a call on what the memory holds now and keeps its result in `room`. Returns the bytes of weights, keys and values that
/// it read.
pub fn run(call: &Call, at: &dyn Memory, kernels: &Kernels, room: &mut Room) -> u64 {
    let Room { ffn, dense, columns, values, attend: attend_room, bits } = room;
    match call {
        Call::Norm(c) => norm(c, at, values),
        Call::Linear(c) => linear(c, at, kernels, columns, values),
        Call::Append(c) => append(c, at, values),
        Call::Attend(c) => attend(c, at, kernels, attend_room, values),
        Call::SignScores(c) => sign_scores(c, at, kernels, bits, values),
        Call::Select(c) => select(c, at, values),
        Call::SparseFfn(c) => {
            let (input, masks) = at.of(c.input)[..c.n * c.hidden + c.ffn].split_at(c.n * c.hidden);
            let operands = Operands {
                blocks: bytemuck::cast_slice(at.of(c.blocks)),
                bucket: bytemuck::cast_slice(at.of(c.bucket)),
                up_bias: at.of(c.up_bias),
                input,
                masks: bytemuck::cast_slice(masks),
            };
            sparse_ffn::run(c, operands, kernels, ffn)
        }
        Call::DenseFfn(c) => {
            let operands = dense_ffn::Operands {
                blocks: bytemuck::cast_slice(numbers(at, c.blocks, c.slots * c.block_bytes() / 4)),
                bucket: words(at, c.bucket, c.slots),
                up_bias: at.of(c.up_bias),
                x: numbers(at, c.x, c.n * c.hidden),
                counts: words(at, c.counts.into(), DenseFfn::parts(c.quant, c.n) * c.ffn),
                out: numbers(at, c.out, c.n * c.hidden),
            };
            dense_ffn::run(c, operands, kernels, dense)
        }
        Call::Add(Add { count, from, to }) => {
            let sum = numbers(at, *from, *count).iter().zip(numbers(at, *to, *count)).map(|(a, b)| a + b);
            values.clear();
            values.extend(sum);
            0
        }
    }
}

/// Writes down the result of the last run of `call`.
pub fn store(call: &Call, room: &Room, at: &mut dyn Memory) {
    let mut put = |view: View, values: &[f32]| {
        at.of_mut(view.buffer)[view.at as usize / 4..][..values.len()].copy_from_slice(values)
    };
    match call {
        Call::Norm(c) => put(c.out, &room.values),
        Call::Linear(c) => put(c.out, &room.values),
        Call::Attend(c) => put(c.out, &room.values),
        Call::SignScores(c) => put(c.scores, &room.values),
        Call::Select(c) => put(c.masks, &room.values),
        Call::Add(c) => put(c.to, &room.values),
        Call::SparseFfn(c) => sparse_ffn::store(c, &room.ffn, at.of_mut(c.output)),
        Call::DenseFfn(c) => {
            put(c.out, &room.dense.out);
            put(c.counts.into(), bytemuck::cast_slice(&room.dense.counts));
        }
        Call::Append(c) => {
            let h = &c.heads;
            let (qkv, places) = room.values.split_at(c.n * h.qkv_dim());
            put(c.qkv, qkv);
            let cache: &mut [f16] = bytemuck::cast_slice_mut(at.of_mut(h.cache));
            for (qkv, place) in qkv.chunks_exact(h.qkv_dim()).zip(places.chunks_exact(2)) {
                let [timeline, position] = [place[0], place[1]].map(|p| p.to_bits() as usize);
                for (i, new) in qkv[h.q_dim()..].chunks_exact(h.head_dim).enumerate() {
                    let to = &mut cache[h.start(timeline, c.layer, i) + position * h.head_dim..][..h.head_dim];
                    to.iter_mut().zip(new).for_each(|(to, &v)| *to = f16::from_f32(v));
                }
            }
        }
    }
}

fn norm(c: &Norm, at: &dyn Memory, out: &mut Vec<f32>) -> u64 {
    let x = numbers(at, c.x, c.n * c.hidden);
    let (weight, bias) = (at.of(c.weight), at.of(c.bias));
    out.clear();
    for x in x.chunks_exact(c.hidden) {
        let mean = |values: &mut dyn Iterator<Item = f32>| values.map(f64::from).sum::<f64>() / c.hidden as f64;
        let (centre, epsilon) = match c.kind {
            NormKind::Rms(epsilon) => (0.0, epsilon),
            NormKind::Layer(epsilon) => (mean(&mut x.iter().copied()) as f32, epsilon),
        };
        let square = mean(&mut x.iter().map(|v| (v - centre) * (v - centre))) as f32;
        let scale = 1.0 / (square + epsilon).sqrt();
        let of = |from: &[f32], i: usize, none: f32| from.get(i).copied().unwrap_or(none);
        out.extend(x.iter().enumerate().map(|(i, v)| (v - centre) * scale * of(weight, i, 1.0) + of(bias, i, 0.0)));
    }
    0
}

fn linear(c: &Linear, at: &dyn Memory, kernels: &Kernels, columns: &mut Columns, out: &mut Vec<f32>) -> u64 {
    columns.set(numbers(at, c.x, c.n * c.cols), c.n, c.quant);
    let stride = c.quant.row_bytes(c.cols);
    let weights = &bytemuck::cast_slice::<f32, u8>(at.of(c.weights))[..c.rows * stride];
    out.clear();
    out.resize(c.n * c.rows, 0.0);
    let rows = Rows { first: weights.as_ptr(), stride, ahead: 0 };
    // SAFETY: the weights hold the rows, `out` the last index, (n - 1) * rows + rows - 1; the kernels are for this machine.
    unsafe { kernels.dot(c.quant)(rows, c.rows, columns, out.as_mut_ptr(), c.rows) };
    let bias = at.of(c.bias);
    let before = numbers(at, c.out, c.n * c.rows);
    for (out, before) in out.chunks_exact_mut(c.rows).zip(before.chunks_exact(c.rows)) {
        out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
        match c.then {
            Then::Store => {}
            Then::Relu => out.iter_mut().for_each(|out| *out = out.max(0.0)),
            Then::Add => out.iter_mut().zip(before).for_each(|(out, before)| *out += before),
        }
    }
    weights.len() as u64
}

/// Leaves q, k and v, rotated, and the places.
fn append(c: &Append, at: &dyn Memory, out: &mut Vec<f32>) -> u64 {
    let (h, half) = (&c.heads, c.heads.head_dim / 2);
    out.clear();
    out.extend(numbers(at, c.qkv, c.n * h.qkv_dim()));
    let angles = at.of(c.angles);
    if !angles.is_empty() {
        for (qkv, angles) in out.chunks_exact_mut(h.qkv_dim()).zip(angles.chunks_exact(h.head_dim)) {
            // All heads but those of v.
            for head in qkv[..(h.heads + h.kv_heads) * h.head_dim].chunks_exact_mut(h.head_dim) {
                let (low, high) = head.split_at_mut(half);
                for ((a, b), angle) in low.iter_mut().zip(high).zip(angles.chunks_exact(2)) {
                    (*a, *b) = (*a * angle[0] - *b * angle[1], *b * angle[0] + *a * angle[1]);
                }
            }
        }
    }
    out.extend(numbers(at, c.places, c.n * 2));
    0
}

fn attend(c: &Attend, at: &dyn Memory, kernels: &Kernels, room: &mut AttendRoom, out: &mut Vec<f32>) -> u64 {
    let (h, dim) = (&c.heads, c.heads.head_dim);
    let (qkv, places) = (numbers(at, c.qkv, c.n * h.qkv_dim()), words(at, c.places, c.n * 2));
    let cache: &[f16] = bytemuck::cast_slice(at.of(h.cache));
    let group = h.heads / h.kv_heads * dim;
    let mut read = 0;
    out.clear();
    out.resize(c.n * h.q_dim(), 0.0);
    // Nothing is allocated later.
    room.reserve(h.heads / h.kv_heads, h.context, dim);
    for (b, place) in places.chunks_exact(2).enumerate() {
        let [timeline, position] = [place[0] as usize, place[1] as usize];
        assert!(position < c.most && c.most <= h.context, "position {position} of {}", c.most);
        let start = c.window.map_or(0, |w| (position + 1).saturating_sub(w));
        let seen = position + 1 - start;
        for kv_head in 0..h.kv_heads {
            let part = |head: usize| {
                let from = h.start(timeline, c.layer, head) + start * dim;
                bytemuck::cast_slice(&cache[from..from + seen * dim])
            };
            let head = Head { quant: Quant::F16, keys: part(kv_head), values: part(h.kv_heads + kv_head) };
            room.queries(group).copy_from_slice(&qkv[b * h.qkv_dim() + kv_head * group..][..group]);
            out[b * h.q_dim() + kv_head * group..][..group]
                .copy_from_slice(room.attend(kernels, head, dim, |_| 0..seen));
        }
        read += (2 * h.kv_heads * seen * dim * 2) as u64;
    }
    read
}

fn sign_scores(c: &SignScores, at: &dyn Memory, kernels: &Kernels, bits: &mut Vec<BitLine>, out: &mut Vec<f32>) -> u64 {
    let lines = sign::lines(c.hidden);
    bits.clear();
    bits.resize(c.n * lines, BitLine::default());
    for (x, bits) in numbers(at, c.x, c.n * c.hidden).chunks_exact(c.hidden).zip(bits.chunks_exact_mut(lines)) {
        sign::pack(x, bits);
    }
    out.clear();
    out.resize(c.n * c.ffn, 0.0);
    let rows: &[BitLine] = &bytemuck::cast_slice(at.of(c.bits))[..c.ffn * lines];
    sign::scores(kernels.isa, rows, bits, c.hidden, out, c.ffn);
    size_of_val(rows) as u64
}

fn select(c: &Select, at: &dyn Memory, out: &mut Vec<f32>) -> u64 {
    let scores = numbers(at, c.scores, c.n * c.ffn);
    let mask = |i: usize, least: f32| {
        let mask = (0..c.n).fold(0u32, |mask, b| mask | u32::from(scores[b * c.ffn + i] >= least) << b);
        f32::from_bits(mask)
    };
    out.clear();
    out.extend((0..c.ffn).map(|i| mask(i, c.least[0])));
    for &neuron in words(at, c.bucket.into(), c.slots).iter().filter(|&&neuron| neuron != NONE) {
        out[neuron as usize] = mask(neuron as usize, c.least[1]);
    }
    0
}

/// What a call reads and writes.
impl Call {
    /// Calls `see(view, bytes, written)` for each operand that is there.
    pub fn operands(&self, see: &mut dyn FnMut(View, u64, bool)) {
        let mut all = |operands: &[(View, usize, bool)]| {
            for &(view, bytes, written) in operands {
                see(view, bytes as u64, written);
            }
        };
        // Buffers of no bytes stand for what is not there.
        let given = |buffer: Buffer, bytes: usize| (buffer.into(), if buffer.bytes == 0 { 0 } else { bytes }, false);
        match *self {
            Call::Norm(Norm { hidden, n, weight, bias, x, out, .. }) => all(&[
                given(weight, hidden * 4),
                given(bias, hidden * 4),
                (x, n * hidden * 4, false),
                (out, n * hidden * 4, true),
            ]),
            Call::Linear(Linear { quant, rows, cols, n, weights, bias, x, out, .. }) => all(&[
                (weights.into(), rows * quant.row_bytes(cols), false),
                given(bias, rows * 4),
                (x, n * cols * 4, false),
                (out, n * rows * 4, true),
            ]),
            Call::Append(Append { heads, n, qkv, angles, places, .. }) => all(&[
                (heads.cache.into(), heads.timeline() * 2, true),
                (qkv, n * heads.qkv_dim() * 4, true),
                given(angles, n * heads.head_dim * 4),
                (places, n * 8, false),
            ]),
            Call::Attend(Attend { heads, n, qkv, places, out, .. }) => all(&[
                (heads.cache.into(), heads.timeline() * 2, false),
                (qkv, n * heads.qkv_dim() * 4, false),
                (places, n * 8, false),
                (out, n * heads.q_dim() * 4, true),
            ]),
            Call::SignScores(SignScores { hidden, ffn, n, bits, x, scores }) => all(&[
                (bits.into(), ffn * sign::lines(hidden) * size_of::<BitLine>(), false),
                (x, n * hidden * 4, false),
                (scores, n * ffn * 4, true),
            ]),
            Call::Select(Select { ffn, n, slots, bucket, scores, masks, .. }) => {
                all(&[(bucket.into(), slots * 4, false), (scores, n * ffn * 4, false), (masks, ffn * 4, true)])
            }
            Call::SparseFfn(c) => all(&[
                (c.blocks.into(), c.slots * c.block_bytes(), false),
                (c.bucket.into(), c.slots * 4, false),
                given(c.up_bias, c.ffn * 4),
                (c.input.into(), SparseFfn::input_bytes(c.n, c.hidden, c.ffn), false),
                (c.output.into(), SparseFfn::output_bytes(c.n, c.hidden), true),
            ]),
            Call::DenseFfn(c) => all(&[
                (c.blocks, c.slots * c.block_bytes(), false),
                (c.bucket, c.slots * 4, false),
                given(c.up_bias, c.ffn * 4),
                (c.x, c.n * c.hidden * 4, false),
                (c.products.into(), c.n * c.slots * 4, true),
                (c.counts.into(), DenseFfn::parts(c.quant, c.n) * c.ffn * 4, true),
                (c.out, c.n * c.hidden * 4, true),
            ]),
            Call::Add(Add { count, from, to }) => all(&[(from, count * 4, false), (to, count * 4, true)]),
        }
    }
}
