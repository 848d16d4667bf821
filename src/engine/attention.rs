//! Attention over the KV cache, one kv head of one token at a time.

use super::decode::Place;
use crate::cpu::team::Parts;
use crate::cpu::{Kernels, Team};
use crate::model::config::{ModelConfig, Positions};
use crate::model::kv_cache::{HeadView, KvCache};
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
/// values of all n columns are in their caches, at their places. `out` is `[n, q_dim]`; `scores` is a room per thread.
#[allow(clippy::too_many_arguments)]
pub(super) fn attention(
    team: &mut Team,
    kernels: &Kernels,
    config: &ModelConfig,
    caches: &[KvCache],
    layer: usize,
    places: &[Place],
    qkv: &[f32],
    scores: &mut [Vec<f32>],
    out: &mut [f32],
) {
    let (dim, q_dim, shared) = (config.head_dim, config.q_dim(), config.heads / config.kv_heads);
    let n = places.len();
    assert_eq!(out.len(), n * q_dim);
    let scale = 1.0 / (dim as f32).sqrt();
    let (out, scores) = (Parts::new(out), Parts::new(scores));
    team.run(n * config.kv_heads, |thread, piece| {
        let (t, kv_head) = (piece / config.kv_heads, piece % config.kv_heads);
        let (kv, position) = (&caches[places[t].cache], places[t].position);
        let start = config.window.map_or(0, |w| (position + 1).saturating_sub(w));
        let keys = kv.head(layer, 0, kv_head, start..position + 1);
        let values = kv.head(layer, 1, kv_head, start..position + 1);
        // SAFETY: one room per thread; each piece writes its own heads.
        let scores = &mut unsafe { scores.part(thread..thread + 1) }[0];
        for head in kv_head * shared..(kv_head + 1) * shared {
            let q = &qkv[t * config.qkv_dim() + head * dim..][..dim];
            let out = unsafe { out.part(t * q_dim + head * dim..t * q_dim + (head + 1) * dim) };
            attend(kernels, q, keys, values, scale, scores, out);
        }
    });
}

/// One query against the keys and values it sees, `[positions, dim]` each.
fn attend(
    kernels: &Kernels,
    q: &[f32],
    keys: HeadView<'_>,
    values: HeadView<'_>,
    scale: f32,
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    let dim = q.len();
    scores.clear();
    match keys {
        // SAFETY: each key has `dim` numbers; the kernels are for this machine.
        HeadView::F16(keys) => scores.extend(
            keys.chunks_exact(dim).map(|k| scale * unsafe { (kernels.dot_f16)(k.as_ptr().cast(), q.as_ptr(), dim) }),
        ),
        HeadView::F32(keys) => {
            scores.extend(keys.chunks_exact(dim).map(|k| scale * math::sum(k.iter().zip(q).map(|(k, q)| k * q))))
        }
    }
    math::softmax(scores);
    out.fill(0.0);
    match values {
        HeadView::F16(values) => {
            for (v, &s) in values.chunks_exact(dim).zip(scores.iter()) {
                // SAFETY: each value has `dim` numbers, as has `out`.
                unsafe { (kernels.axpy_f16)(s, v.as_ptr().cast(), out.as_mut_ptr(), dim) };
            }
        }
        HeadView::F32(values) => {
            for (v, &s) in values.chunks_exact(dim).zip(scores.iter()) {
                out.iter_mut().zip(v).for_each(|(o, v)| *o += s * v);
            }
        }
    }
}
