//! Gated delta nets ([`crate::model::layer::DeltaNet`]): convolution, gates, and the recurrence of each head.

use super::positions::{TokenPosition, runs};
use crate::cpu::recurrence::{Gates, LANES, Tokens};
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Kernels, ThreadPool};
use crate::exp::{sigmoid, silu};
use crate::model::layer::DeltaNet;
use crate::model::recurrence::Recurrence;
use crate::model::{KvCache, Turn};
use crate::ops::math;

const _: () = assert!(DeltaNet::LANES == LANES);

/// Queries and keys are divided by their length, which this is added to the square of.
const EPSILON: f32 = 1e-6;

/// Working memory of a delta net.
#[derive(Default)]
pub(super) struct DeltaRoom {
    /// Queries, keys and values behind the convolution, `[heads, n, head_dim]`: what a head reads lies together.
    convolved: Vec<f32>,
    /// `[value_heads, n]`
    gates: Vec<Gates>,
}

/// A layer's delta net with its weights.
#[derive(Clone, Copy)]
pub(super) struct Net<'a> {
    /// Number of the layer.
    pub layer: usize,
    pub form: DeltaNet,
    pub weights: &'a Recurrence,
    /// Of the norm of what heads make.
    pub epsilon: f32,
}

/// out[t] = the delta net of token t. `projected` is `[n, rows]`: q, k, v, z, beta and alpha of each token; `out` is `[n, values]`. The tokens of
/// a sequence follow each other, and the caches' states go on with them until the pass is committed.
pub(super) fn delta_net(
    (pool, kernels): (&mut ThreadPool, &Kernels),
    net: Net<'_>,
    caches: &mut [KvCache],
    positions: &[TokenPosition],
    projected: &[f32],
    room: &mut DeltaRoom,
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
    room: &mut DeltaRoom,
) {
    let Net { form, weights, .. } = net;
    let DeltaNet { key_heads, value_heads, head_dim: dim, taps, .. } = form;
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
            let at = head * dim..(head + 1) * dim;
            // SAFETY: each task has heads of its own.
            let out = unsafe { convolved.part((head * n + t) * dim..(head * n + t + 1) * dim) };
            out.fill(0.0);
            for tap in 0..taps {
                let (x, w) = (&input(t, tap)[at.clone()], &weights.taps[tap * channels..][at.clone()]);
                out.iter_mut().zip(x).zip(w).for_each(|((out, x), w)| *out += x * w);
            }
            // SAFETY: the kernels are for this machine.
            unsafe { (kernels.recurrences.silu)(out) };
            if head < 2 * key_heads {
                let scale = if head < key_heads { 1.0 / (dim as f32).sqrt() } else { 1.0 };
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
fn keep_columns(form: DeltaNet, from: Option<&[f32]>, to: &mut [f32], projected: &[f32]) {
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

/// The gates and the recurrence of each head over all tokens of a sequence, the norm of what it makes, and its gate.
fn recur(
    (pool, kernels): (&mut ThreadPool, &Kernels),
    net: Net<'_>,
    (from, to): (Option<&[f32]>, &mut [f32]),
    projected: &[f32],
    room: &mut DeltaRoom,
    out: &mut [f32],
) {
    let Net { form, weights, epsilon, .. } = net;
    let DeltaNet { key_heads, value_heads, head_dim: dim, .. } = form;
    let (channels, values) = (form.channels(), form.values());
    let (n, rows) = (projected.len() / form.rows(), form.rows());
    let (out, to, tile) = (Parts::new(out), Parts::new(to), dim * LANES);
    let (convolved, gates) = (&room.convolved, Parts::new(&mut room.gates));
    let of_head = |head: usize| &convolved[head * n * dim..(head + 1) * n * dim];
    pool.run(value_heads, |_, head| {
        let (queries, keys) = (of_head(form.key_head(head)), of_head(key_heads + form.key_head(head)));
        // SAFETY: each task has gates of its own.
        let gates = unsafe { gates.part(head * n..(head + 1) * n) };
        let each = queries.chunks_exact(dim).zip(keys.chunks_exact(dim)).zip(projected.chunks_exact(rows));
        for (((query, key), projected), gates) in each.zip(&mut *gates) {
            let [beta, alpha] = [2, 1].map(|last| projected[rows - last * value_heads + head]);
            let step = softplus(alpha + weights.step_bias[head]);
            let key_query = math::sum(query.iter().zip(key).map(|(q, k)| q * k));
            *gates = Gates { decay: (weights.decay[head] * step).exp(), beta: sigmoid(beta), key_query };
        }
        for first in (0..dim).step_by(LANES) {
            let at = head * dim * dim + first * dim..head * dim * dim + first * dim + tile;
            // SAFETY: each task has a head's state and outputs of its own.
            let state = unsafe { to.part(at.clone()) };
            if let Some(from) = from {
                state.copy_from_slice(&from[at]);
            }
            let tokens = Tokens { queries, keys, values: &of_head(2 * key_heads + head)[first..], stride: dim, gates };
            let state = state.as_chunks_mut::<LANES>().0;
            // SAFETY: as above; each token has `values` outputs, and the kernels are for this machine.
            unsafe {
                let out = out.start().add(head * dim + first);
                (kernels.recurrences.delta_rule)(state, tokens, n, out, values);
            }
        }
        for t in 0..n {
            // SAFETY: as above.
            let out = unsafe { out.part(t * values + head * dim..t * values + (head + 1) * dim) };
            let gate = &projected[t * rows + channels + head * dim..][..dim];
            let scale = 1.0 / (math::sum(out.iter().map(|x| x * x)) / dim as f32 + epsilon).sqrt();
            for ((out, w), z) in out.iter_mut().zip(&weights.norm).zip(gate) {
                *out = *out * scale * w * silu(*z);
            }
        }
    });
}
