//! Attention over the KV cache.

use super::positions::TokenPosition;
use crate::cpu::attend::{AttendScratch, Head, MANY_QUERIES, QUERIES};
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Kernels, MAX_COLUMNS, ThreadPool};
use crate::model::KvCache;
use crate::model::config::ModelConfig;
use crate::model::layer::Attention;
use crate::model::weights::Layer;
use crate::ops::math;

/// Norms and rotates the queries and keys of `qkv`, `[n, qkv_dim]`, and norms values, in layers that do so, and writes keys and values to the
/// caches.
pub(super) fn rotate_and_put(
    (config, a): (&ModelConfig, Attention<'_>),
    weights: &Layer,
    caches: &mut [KvCache],
    layer: usize,
    positions: &[TokenPosition],
    qkv: &mut [f32],
    cos_sin: &mut Vec<(f32, f32)>,
) {
    for (&TokenPosition { sequence, position }, qkv) in positions.iter().zip(qkv.chunks_exact_mut(a.qkv_dim())) {
        let (q, rest) = qkv.split_at_mut(a.q_dim());
        let (k, v) = rest[a.gate_dim()..].split_at_mut(a.key_rows());
        let mut heads = [&mut *q, &mut *k];
        if a.values_from_keys {
            // Keys are their values times the weights of the keys' norm.
            put_values((config, a), caches, (layer, sequence, position), heads[1]);
        }
        if let Some(norms) = &weights.qk_norm {
            let norms = norms.iter().zip(&mut heads).enumerate();
            for (number, (norm, heads)) in norms {
                let is_normed = number == 1 && a.values_from_keys && a.value_norm;
                heads.chunks_exact_mut(a.head_dim).for_each(|head| match is_normed {
                    true => math::scale_by(head, &norm.weight),
                    false => math::norm_in_place(config.norm, norm, head),
                });
            }
        }
        if !a.rotary.is_empty() {
            math::angles(position, a.rotary, a.rotary_scale, cos_sin);
            heads.into_iter().for_each(|heads| math::rope(heads, a.head_dim, cos_sin));
        }
        if a.keys_of.is_some() {
            continue;
        }
        caches[sequence].put(layer, 0, position, k);
        if !a.values_from_keys {
            put_values((config, a), caches, (layer, sequence, position), v);
        }
    }
}

/// Norms the values of a token's heads, in layers that do so, and writes them to its cache.
fn put_values(
    (config, a): (&ModelConfig, Attention<'_>),
    caches: &mut [KvCache],
    (layer, sequence, position): (usize, usize, usize),
    values: &mut [f32],
) {
    if a.value_norm {
        values.chunks_exact_mut(a.head_dim).for_each(|head| math::unit_norm(config.norm, head));
    }
    caches[sequence].put(layer, 1, position, values);
}

/// out[t] = attention of token t's queries over its own sequence. `qkv` is `[n, qkv_dim]` with q first, rotated; keys and values of all n
/// tokens are in their caches, at their positions. `out` is `[n, q_dim]`; there is one of `rooms` per thread. A task is one kv head of one
/// token, or of a few neighbouring tokens of a prompt, which then share the reading of keys and values.
#[allow(clippy::too_many_arguments)]
pub(super) fn attention(
    (pool, kernels): (&mut ThreadPool, &Kernels),
    a: Attention<'_>,
    weights: &Layer,
    caches: &[KvCache],
    layer: usize,
    positions: &[TokenPosition],
    qkv: &[f32],
    rooms: &mut [AttendScratch],
    out: &mut [f32],
) {
    let (q_dim, qkv_dim, shared) = (a.q_dim(), a.qkv_dim(), a.sharing());
    let Attention { kv_heads, head_dim: dim, window, .. } = a;
    let n = positions.len();
    assert_eq!(out.len(), n * q_dim);
    let follows = |two: &[TokenPosition]| two[0].sequence == two[1].sequence && two[0].position + 1 == two[1].position;
    let in_row = positions.windows(2).all(follows);
    // A prompt's chunk has enough queries for tiles.
    let many = in_row && n > MAX_COLUMNS;
    let together = if many { MANY_QUERIES } else { QUERIES };
    let tokens = if in_row { (together / shared).max(1) } else { 1 };
    let (out, rooms) = (Parts::new(out), Parts::new(rooms));
    pool.run(n.div_ceil(tokens) * kv_heads, |thread, task| {
        let (first, kv_head) = (task / kv_heads * tokens, task % kv_heads);
        let positions = &positions[first..n.min(first + tokens)];
        let (kv, last) = (&caches[positions[0].sequence], positions[positions.len() - 1].position);
        let sees = |position: usize| window.map_or(0, |w| (position + 1).saturating_sub(w))..position + 1;
        let all = sees(positions[0].position).start..last + 1;
        // SAFETY: one scratch per thread; each task writes its own heads.
        let room = &mut unsafe { rooms.part(thread..thread + 1) }[0];
        let queries = room.queries(positions.len() * shared * dim);
        let heads = |t: usize| kv_head * shared * dim + t..(kv_head + 1) * shared * dim + t;
        for (t, queries) in queries.chunks_exact_mut(shared * dim).enumerate() {
            queries.copy_from_slice(&qkv[heads((first + t) * qkv_dim)]);
        }
        let [keys, values] = kv.head(a.keys_of.unwrap_or(layer), kv_head, all.clone());
        let sinks = weights.sinks.get(kv_head * shared..(kv_head + 1) * shared).unwrap_or_default();
        let head = Head { quant: kv.kind.quant(), keys, values, sinks };
        let sees = |b: usize| {
            let seen = sees(positions[b / shared].position);
            seen.start - all.start..seen.end - all.start
        };
        let mixed = match many {
            true => room.attend_many(kernels, head, dim, sees),
            false => room.attend(kernels, head, dim, sees),
        };
        for (t, mixed) in mixed.chunks_exact(shared * dim).enumerate() {
            unsafe { out.part(heads((first + t) * q_dim)) }.copy_from_slice(mixed);
        }
    });
}

/// Bytes of keys and values in f16 that attention over these tokens reads, those of neighbours in a prompt once, and its multiplications and
/// additions, each counted: what a clock that is made of rates takes for it.
pub(super) fn work(a: &Attention<'_>, positions: &[TokenPosition]) -> (u64, u64) {
    let seen = |p: &TokenPosition| (p.position + 1).min(a.window.unwrap_or(usize::MAX)) as u64;
    let last = |i: usize| positions.get(i + 1).is_none_or(|next| next.sequence != positions[i].sequence);
    let read: u64 = (0..positions.len()).filter(|&i| last(i)).map(|i| seen(&positions[i])).sum();
    let operations = if positions.len() > MAX_COLUMNS { positions.iter().map(seen).sum::<u64>() } else { 0 };
    (read * 2 * 2 * a.kv_dim() as u64, operations * 2 * 2 * a.q_dim() as u64)
}

/// Queries that a task computes at once, at most.
pub(super) fn queries(config: &ModelConfig) -> usize {
    QUERIES.max(config.most_of_attention(|a| a.sharing()))
}
