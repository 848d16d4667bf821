//! Attention over the KV cache.

use super::decode::Place;
use crate::cpu::attend::{AttendRoom, Head, QUERIES};
use crate::cpu::team::Parts;
use crate::cpu::{Kernels, Team};
use crate::model::KvCache;
use crate::model::config::{ModelConfig, Positions};
use crate::ops::math;

/// Rotates the queries and keys of `qkv`, `[n, qkv_dim]`, where the family does so, and puts keys and values into the caches.
pub(super) fn rotate_and_put(
    config: &ModelConfig,
    caches: &mut [KvCache],
    layer: usize,
    places: &[Place],
    qkv: &mut [f32],
    cos_sin: &mut Vec<(f32, f32)>,
) {
    for (&Place { cache, position }, qkv) in places.iter().zip(qkv.chunks_exact_mut(config.qkv_dim())) {
        let (qk, v) = qkv.split_at_mut(config.q_dim() + config.kv_dim());
        if let Positions::Rope { frequencies } = &config.positions {
            math::angles(position, frequencies, cos_sin);
            math::rope(qk, config.head_dim, cos_sin);
        }
        caches[cache].put(layer, 0, position, &qk[config.q_dim()..]);
        caches[cache].put(layer, 1, position, v);
    }
}

/// out[t] = attention of column t's queries over its own timeline. `qkv` is `[n, qkv_dim]` with q first, rotated; keys and
/// values of all n columns are in their caches, at their places. `out` is `[n, q_dim]`; `rooms` are one per thread. One kv head of one
/// token is a piece; of a prompt's tokens that of a few, which then share the reading.
#[allow(clippy::too_many_arguments)]
pub(super) fn attention(
    team: &mut Team,
    kernels: &Kernels,
    config: &ModelConfig,
    caches: &[KvCache],
    layer: usize,
    places: &[Place],
    qkv: &[f32],
    rooms: &mut [AttendRoom],
    out: &mut [f32],
) {
    let (dim, q_dim, shared) = (config.head_dim, config.q_dim(), config.heads / config.kv_heads);
    let n = places.len();
    assert_eq!(out.len(), n * q_dim);
    let follows = |two: &[Place]| two[0].cache == two[1].cache && two[0].position + 1 == two[1].position;
    let tokens = if places.windows(2).all(follows) { (QUERIES / shared).max(1) } else { 1 };
    let (out, rooms) = (Parts::new(out), Parts::new(rooms));
    team.run(n.div_ceil(tokens) * config.kv_heads, |thread, piece| {
        let (first, kv_head) = (piece / config.kv_heads * tokens, piece % config.kv_heads);
        let places = &places[first..n.min(first + tokens)];
        let (kv, last) = (&caches[places[0].cache], places[places.len() - 1].position);
        let sees = |position: usize| config.window.map_or(0, |w| (position + 1).saturating_sub(w))..position + 1;
        let all = sees(places[0].position).start..last + 1;
        // SAFETY: one room per thread; each piece writes its own heads.
        let room = &mut unsafe { rooms.part(thread..thread + 1) }[0];
        let queries = room.queries(places.len() * shared * dim);
        let heads = |t: usize| kv_head * shared * dim + t..(kv_head + 1) * shared * dim + t;
        for (t, queries) in queries.chunks_exact_mut(shared * dim).enumerate() {
            queries.copy_from_slice(&qkv[heads((first + t) * config.qkv_dim())]);
        }
        let [keys, values] = kv.head(layer, kv_head, all.clone());
        let mixed = room.attend(kernels, Head { quant: kv.kind.quant(), keys, values }, dim, |b| {
            let seen = sees(places[b / shared].position);
            seen.start - all.start..seen.end - all.start
        });
        for (t, mixed) in mixed.chunks_exact(shared * dim).enumerate() {
            unsafe { out.part(heads((first + t) * q_dim)) }.copy_from_slice(mixed);
        }
    });
}

/// Queries that attend at once, at most.
pub(super) fn queries(config: &ModelConfig) -> usize {
    QUERIES.max(config.heads / config.kv_heads)
}
