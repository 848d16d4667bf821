//! Attention over the KV cache.

use super::positions::TokenPosition;
use crate::cpu::attend::{AttendScratch, Head, MANY_QUERIES, QUERIES};
use crate::cpu::thread_pool::Parts;
use crate::cpu::{FEW_COLUMNS, Kernels, MAX_COLUMNS, ThreadPool};
use crate::model::KvCache;
use crate::model::config::ModelConfig;
use crate::model::layer::Attention;
use crate::model::weights::Layer;
use crate::ops::math;

/// Norms and rotates the queries and keys of `qkv`, `[n, qkv_dim]`, and norms values, in layers that do so, and writes keys and values to the
/// caches.
pub(super) fn rotate_and_put(
    (config, a): (&ModelConfig, Attention),
    weights: &Layer,
    caches: &mut [KvCache],
    layer: usize,
    positions: &[TokenPosition],
    qkv: &mut [f32],
    cos_sin: &mut Vec<(f32, f32)>,
) {
    for (&TokenPosition { sequence, position }, qkv) in positions.iter().zip(qkv.chunks_exact_mut(a.qkv_dim())) {
        if let Some(latent) = a.latent {
            // Queries are made once their own latents are multiplied out.
            let key = &mut qkv[a.query_rows()..];
            let (latent, rotated) = key.split_at_mut(latent.rank);
            math::norm_in_place(config.norm, &weights.latent.as_ref().expect("its weights").norm, latent);
            math::angles(position, config.rotary(&a), a.rotary_scale, cos_sin);
            math::rope_neighbours(rotated, cos_sin);
            caches[sequence].put(layer, 0, position, key);
            continue;
        }
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
                heads.chunks_exact_mut(a.normed_dims()[number]).for_each(|head| match is_normed {
                    true => math::scale_by(head, &norm.weight),
                    false => math::norm_in_place(config.norm, norm, head),
                });
            }
        }
        if a.rotation.is_some() {
            math::angles(position, config.rotary(&a), a.rotary_scale, cos_sin);
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
    (config, a): (&ModelConfig, Attention),
    caches: &mut [KvCache],
    (layer, sequence, position): (usize, usize, usize),
    values: &mut [f32],
) {
    if a.value_norm {
        values.chunks_exact_mut(a.head_dim).for_each(|head| math::unit_norm(config.norm, head));
    }
    caches[sequence].put(layer, 1, position, values);
}

/// The queries of some tokens.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    /// Each token's numbers begin with its queries, rotated, `[q_dim]`.
    pub numbers: &'a [f32],
    /// Numbers of a token.
    pub stride: usize,
}

/// Query heads over one latent that a task takes of a token: in as many tasks as this makes, few enough that many threads have some.
const OF_LATENT: usize = 5;

/// out[t] = attention of token t's queries over its own sequence; keys and values of all n tokens are in their caches, at their positions.
/// `out` is `[n, heads * mixed_dim]`; there is one of `rooms` per thread. A task is one kv head of one token, a part of the heads that share a
/// latent, or one kv head of a few neighbouring tokens of a prompt, which then share the reading of keys and values.
#[allow(clippy::too_many_arguments)]
pub(super) fn attention(
    (pool, kernels): (&mut ThreadPool, &Kernels),
    a: Attention,
    weights: &Layer,
    caches: &[KvCache],
    layer: usize,
    positions: &[TokenPosition],
    queries: Queries<'_>,
    rooms: &mut [AttendScratch],
    out: &mut [f32],
) {
    let (shared, each) = (a.sharing(), a.mixed_dim());
    let out_dim = a.heads * each;
    let Attention { kv_heads, head_dim: dim, window, .. } = a;
    let n = positions.len();
    assert_eq!(out.len(), n * out_dim);
    let follows = |two: &[TokenPosition]| two[0].sequence == two[1].sequence && two[0].position + 1 == two[1].position;
    let in_row = positions.windows(2).all(follows);
    // A prompt's chunk has enough queries for tiles.
    let many = in_row && n > MAX_COLUMNS;
    let together = if many { MANY_QUERIES } else { QUERIES };
    // Few tokens attend one by one, with the bits that they have alone.
    let tokens = if in_row && n > FEW_COLUMNS { (together / shared).max(1) } else { 1 };
    let parts = if many || a.latent.is_none() { 1 } else { shared.div_ceil(OF_LATENT) };
    let (out, rooms) = (Parts::new(out), Parts::new(rooms));
    pool.run(n.div_ceil(tokens) * kv_heads * parts, |thread, task| {
        let (task, part) = (task / parts, task % parts);
        let (first, kv_head) = (task / kv_heads * tokens, task % kv_heads);
        let mine = kv_head * shared + part * shared / parts..kv_head * shared + (part + 1) * shared / parts;
        let shared = mine.len();
        let positions = &positions[first..n.min(first + tokens)];
        let (kv, last) = (&caches[positions[0].sequence], positions[positions.len() - 1].position);
        let sees = |position: usize| window.map_or(0, |w| (position + 1).saturating_sub(w))..position + 1;
        let all = sees(positions[0].position).start..last + 1;
        // SAFETY: one scratch per thread; each task writes its own heads.
        let room = &mut unsafe { rooms.part(thread..thread + 1) }[0];
        let to = room.queries(positions.len() * shared * dim);
        for (t, to) in to.chunks_exact_mut(shared * dim).enumerate() {
            to.copy_from_slice(&queries.numbers[(first + t) * queries.stride + mine.start * dim..][..shared * dim]);
        }
        let [keys, values] = kv.head(a.keys_of.unwrap_or(layer), kv_head, all.clone());
        let sinks = weights.sinks.get(mine.clone()).unwrap_or_default();
        let head = Head { quant: kv.kind.quant(), keys, values, mixed: each, sinks };
        let sees = |b: usize| {
            let seen = sees(positions[b / shared].position);
            seen.start - all.start..seen.end - all.start
        };
        let mixed = match many {
            true => room.attend_many(kernels, head, dim, sees),
            false => room.attend(kernels, head, dim, sees),
        };
        for (t, mixed) in mixed.chunks_exact(shared * each).enumerate() {
            let at = (first + t) * out_dim + mine.start * each;
            unsafe { out.part(at..at + shared * each) }.copy_from_slice(mixed);
        }
    });
}

/// Bytes of keys and values in f16 that attention over these tokens reads, those of neighbours in a prompt once, and its multiplications and
/// additions, each counted: what a clock that is made of rates takes for it.
pub(super) fn work(a: &Attention, positions: &[TokenPosition]) -> (u64, u64) {
    let seen = |p: &TokenPosition| (p.position + 1).min(a.window.unwrap_or(usize::MAX)) as u64;
    let last = |i: usize| positions.get(i + 1).is_none_or(|next| next.sequence != positions[i].sequence);
    let read: u64 = (0..positions.len()).filter(|&i| last(i)).map(|i| seen(&positions[i])).sum();
    let operations = if positions.len() > MAX_COLUMNS { positions.iter().map(seen).sum::<u64>() } else { 0 };
    if a.latent.is_some() {
        // Each latent once, and the matrices between latents and heads as if in f16.
        let (tokens, weights) = (positions.len() as u64, a.latent_weights() as u64);
        let products = if positions.len() > MAX_COLUMNS { 2 * tokens * weights } else { 0 };
        return (read * 2 * a.kv_dim() as u64 + 2 * weights, operations * 2 * 2 * a.q_dim() as u64 + products);
    }
    (read * 2 * 2 * a.kv_dim() as u64, operations * 2 * 2 * a.q_dim() as u64)
}

/// Queries that a task computes at once, at most.
pub(super) fn queries(config: &ModelConfig) -> usize {
    QUERIES.max(config.most_of_attention(|a| a.sharing()))
}
