//! Linear attention ([`crate::model::layer::LinearAttention`]): convolution, gates, and the recurrence of each head.

use super::positions::{TokenPosition, runs};
use crate::cpu::recurrence::{Gates, LANES, Tokens};
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Kernels, ThreadPool};
use crate::exp::{sigmoid, silu};
use crate::model::layer::{LinearAttention, StateRule};
use crate::model::recurrence::Recurrence;
use crate::model::{KvCache, Turn};
use crate::ops::math;
use std::ops::Range;

const _: () = assert!(LinearAttention::LANES == LANES);

/// Queries and keys of a delta net are divided by their length, which this is added to the square of.
const EPSILON: f32 = 1e-6;

/// Working memory of linear attention.
#[derive(Default)]
pub(super) struct LinearRoom {
    /// Queries, keys and values behind the convolution, `[heads, n, numbers of the head]`: what a head reads lies together.
    convolved: Vec<f32>,
    /// `[value_heads, n]`
    gates: Vec<Gates>,
}

/// A layer's linear attention with its weights.
#[derive(Clone, Copy)]
pub(super) struct Net<'a> {
    /// Number of the layer.
    pub layer: usize,
    pub form: LinearAttention,
    pub weights: &'a Recurrence,
    /// Of the norm of what heads make.
    pub epsilon: f32,
}

impl Net<'_> {
    /// Where head number `head` of queries, keys and values stands among the channels.
    fn head(&self, head: usize) -> Range<usize> {
        let (form, of_keys) = (self.form, 2 * self.form.key_heads);
        let (first, each) = match head.checked_sub(of_keys) {
            None => (head * form.key_dim, form.key_dim),
            Some(head) => (of_keys * form.key_dim + head * form.head_dim, form.head_dim),
        };
        first..first + each
    }
}

/// out[t] = the linear attention of token t. `projected` is `[n, rows]`: q, k, v, z, beta (of a delta net) and alpha of each token; `out` is `[n, values]`. The
/// tokens of a sequence follow each other, and the caches' states go on with them until the pass is committed.
pub(super) fn linear_attention(
    (pool, kernels): (&mut ThreadPool, &Kernels),
    net: Net<'_>,
    caches: &mut [KvCache],
    positions: &[TokenPosition],
    projected: &[f32],
    room: &mut LinearRoom,
    out: &mut [f32],
) {
    let (form, rows) = (net.form, net.form.rows());
    for run in runs(positions) {
        let TokenPosition { sequence, position } = positions[run.start];
        let Turn { from, to } = caches[sequence].state(net.layer, position);
        let projected = &projected[run.start * rows..run.end * rows];
        room.convolved.resize(run.len() * form.channels(), 0.0);
        room.gates.resize(run.len() * form.value_heads, Gates::default());
        let columns = &from.unwrap_or(&*to)[..form.columns()];
        prepare((pool, kernels), net, columns, projected, room);
        keep_columns(form, from, to, projected);
        let out = &mut out[run.start * form.values()..run.end * form.values()];
        let states = (from.map(|from| &from[form.columns()..]), &mut to[form.columns()..]);
        recur((pool, kernels), net, states, projected, room, out);
    }
}

/// Queries, keys and values behind the convolution. `columns` are the inputs of the convolution before the tokens.
fn prepare(
    (pool, kernels): (&mut ThreadPool, &Kernels),
    net: Net<'_>,
    columns: &[f32],
    projected: &[f32],
    room: &mut LinearRoom,
) {
    let Net { form, weights, .. } = net;
    let LinearAttention { key_heads, value_heads, taps, .. } = form;
    let (channels, heads) = (form.channels(), 2 * key_heads + value_heads);
    let (n, rows) = (projected.len() / form.rows(), form.rows());
    // The inputs of the convolution at `taps - 1 - tap` positions before token t.
    let input = |t: usize, tap: usize| match (t + tap + 1).checked_sub(taps) {
        Some(t) => &projected[t * rows..][..channels],
        None => &columns[(t + tap) * channels..][..channels],
    };
    // Heads of a token are divided among threads where there are few tokens.
    let parts = if n < pool.threads() { pool.threads().min(heads) } else { 1 };
    let convolved = Parts::new(&mut room.convolved);
    pool.run(n * parts, |_, task| {
        let (t, part) = (task / parts, task % parts);
        for head in part * heads / parts..(part + 1) * heads / parts {
            let at = net.head(head);
            let (first, each) = (at.start * n + t * at.len(), at.len());
            // SAFETY: each task has heads of its own.
            let out = unsafe { convolved.part(first..first + each) };
            match weights.conv_bias.get(at.clone()) {
                Some(bias) => out.copy_from_slice(bias),
                None => out.fill(0.0),
            }
            for tap in 0..taps {
                let (x, w) = (&input(t, tap)[at.clone()], &weights.taps[tap * channels..][at.clone()]);
                out.iter_mut().zip(x).zip(w).for_each(|((out, x), w)| *out += x * w);
            }
            // SAFETY: the kernels are for this machine.
            unsafe { (kernels.recurrences.silu)(out) };
            if form.rule == StateRule::Delta && head < 2 * key_heads {
                let scale = if head < key_heads { 1.0 / (each as f32).sqrt() } else { 1.0 };
                let scale = scale / (math::sum(out.iter().map(|x| x * x)) + EPSILON).sqrt();
                out.iter_mut().for_each(|x| *x *= scale);
            }
        }
    });
}

/// ln(1 + e^x)
fn softplus(x: f32) -> f32 {
    // Beyond this the sum is x to the last bit.
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// The inputs of the convolution at the last positions are kept for the next tokens.
fn keep_columns(form: LinearAttention, from: Option<&[f32]>, to: &mut [f32], projected: &[f32]) {
    let (channels, kept) = (form.channels(), form.taps - 1);
    let (n, rows) = (projected.len() / form.rows(), form.rows());
    // Those that are kept from before the tokens move to the front.
    let old = kept.saturating_sub(n);
    let before = (kept - old) * channels..kept * channels;
    match from {
        Some(from) => to[..old * channels].copy_from_slice(&from[before]),
        None => to.copy_within(before, 0),
    }
    for i in old..kept {
        let t = n + i - kept;
        to[i * channels..(i + 1) * channels].copy_from_slice(&projected[t * rows..][..channels]);
    }
}

/// The gates and the recurrence of each head over all tokens of a sequence, and the norm and the gate of what it makes.
fn recur(
    (pool, kernels): (&mut ThreadPool, &Kernels),
    net: Net<'_>,
    (from, to): (Option<&[f32]>, &mut [f32]),
    projected: &[f32],
    room: &mut LinearRoom,
    out: &mut [f32],
) {
    let Net { form, weights, epsilon, .. } = net;
    let LinearAttention { key_heads, value_heads, key_dim, head_dim: dim, .. } = form;
    let (channels, values) = (form.channels(), form.values());
    let (n, rows) = (projected.len() / form.rows(), form.rows());
    let (outs, to, tile) = (Parts::new(out), Parts::new(to), key_dim * LANES);
    let (convolved, gates) = (&room.convolved, Parts::new(&mut room.gates));
    let of_head = |head: usize| &convolved[net.head(head).start * n..net.head(head).end * n];
    let rule = match form.rule {
        StateRule::Delta => kernels.recurrences.delta_rule,
        StateRule::Mamba2 => kernels.recurrences.additive_rule,
    };
    pool.run(value_heads, |_, head| {
        let (queries, keys) = (of_head(form.key_head(head)), of_head(key_heads + form.key_head(head)));
        let numbers = of_head(2 * key_heads + head);
        // SAFETY: each task has gates of its own.
        let gates = unsafe { gates.part(head * n..(head + 1) * n) };
        let each = queries.chunks_exact(key_dim).zip(keys.chunks_exact(key_dim)).zip(projected.chunks_exact(rows));
        for (((query, key), projected), gates) in each.zip(&mut *gates) {
            let step = softplus(projected[rows - value_heads + head] + weights.step_bias[head]);
            let beta = match form.rule {
                StateRule::Delta => sigmoid(projected[rows - 2 * value_heads + head]),
                StateRule::Mamba2 => step,
            };
            let key_query = math::sum(query.iter().zip(key).map(|(q, k)| q * k));
            *gates = Gates { decay: (weights.decay[head] * step).exp(), beta, key_query };
        }
        for first in (0..dim).step_by(LANES) {
            let at = (head * dim + first) * key_dim..(head * dim + first) * key_dim + tile;
            // SAFETY: each task has a head's state and outputs of its own.
            let state = unsafe { to.part(at.clone()) };
            if let Some(from) = from {
                state.copy_from_slice(&from[at]);
            }
            let (stride, value_stride) = (key_dim, dim);
            let tokens = Tokens { queries, keys, values: &numbers[first..], stride, value_stride, gates };
            let state = state.as_chunks_mut::<LANES>().0;
            // SAFETY: as above; each token has `values` outputs, and the kernels are for this machine.
            unsafe { rule(state, tokens, n, outs.start().add(head * dim + first), values) };
        }
        for t in 0..n {
            // SAFETY: as above.
            let out = unsafe { outs.part(t * values + head * dim..t * values + (head + 1) * dim) };
            let gate = &projected[t * rows + channels + head * dim..][..dim];
            match form.rule {
                StateRule::Delta => {
                    norm(out, &weights.norm, epsilon);
                    out.iter_mut().zip(gate).for_each(|(out, z)| *out *= silu(*z));
                }
                StateRule::Mamba2 => {
                    let (value, skip) = (&numbers[t * dim..(t + 1) * dim], weights.skip[head]);
                    let each = out.iter_mut().zip(value).zip(gate);
                    each.for_each(|((out, x), z)| *out = (*out + skip * x) * silu(*z));
                }
            }
        }
    });
    if form.rule == StateRule::Mamba2 {
        pool.run(n, |_, t| {
            // SAFETY: each task has a token of its own.
            let out = unsafe { outs.part(t * values..(t + 1) * values) };
            let groups = out.chunks_exact_mut(form.normed()).zip(weights.norm.chunks_exact(form.normed()));
            groups.for_each(|(out, weights)| norm(out, weights, epsilon));
        });
    }
}

/// Divides by the root mean square, and multiplies by the weights.
fn norm(out: &mut [f32], weights: &[f32], epsilon: f32) {
    let scale = 1.0 / (math::sum(out.iter().map(|x| x * x)) / out.len() as f32 + epsilon).sqrt();
    out.iter_mut().zip(weights).for_each(|(out, w)| *out = *out * scale * w);
}
