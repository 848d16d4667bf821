//! Rotation, the cache and attention.

mod support;

use dynamicinfer::device::{Append, Attend, Call, Heads, View};
use dynamicinfer::ops::math;
use dynamicinfer::prng::Prng;
use half::f16;
use support::{Memory, assert_close, below, normal};

struct Shape {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    context: usize,
    window: Option<usize>,
    n: usize,
    rotates: bool,
}

const LAYERS: usize = 2;
const TIMELINES: usize = 3;

fn check(seed: u64, shape: &Shape) {
    let &Shape { heads, kv_heads, dim, context, window, n, rotates } = shape;
    let mut rng = Prng::new(seed);
    let mut memory = Memory::default();
    let layer = below(&mut rng, LAYERS);
    // Values of the cache as a run of earlier tokens left them; behind what was written there is NaN.
    let run = context * dim;
    let numbers = TIMELINES * LAYERS * 2 * kv_heads * run;
    // Columns of different sequences at different positions, or one after the other in one.
    let first = below(&mut rng, context - n + 1);
    let places: Vec<[u32; 2]> = (0..n)
        .map(|b| {
            if seed.is_multiple_of(2) {
                [1, (first + b) as u32]
            } else {
                [(b % TIMELINES) as u32, below(&mut rng, context) as u32]
            }
        })
        .collect();
    // Two columns at one place of one timeline would be a race: the last one of a place counts.
    let places: Vec<[u32; 2]> =
        places.iter().enumerate().filter(|(b, p)| !places[b + 1..].contains(p)).map(|(_, p)| *p).collect();
    let n = places.len();
    let most = places.iter().map(|p| p[1] as usize + 1).max().unwrap();
    let seen_most = window.map_or(most, |w| most.min(w));
    let mut cache: Vec<f16> = vec![f16::NAN; numbers];
    let at_layer = layer * TIMELINES * 2 * kv_heads * run;
    let at = |timeline: usize, part: usize, head: usize, position: usize| {
        ((((layer * TIMELINES + timeline) * 2 + part) * kv_heads + head) * context + position) * dim
    };
    for timeline in 0..TIMELINES {
        let end = places.iter().filter(|p| p[0] as usize == timeline).map(|p| p[1] as usize).max().unwrap_or(0);
        for (part, head, position) in
            (0..2).flat_map(|p| (0..kv_heads).flat_map(move |h| (0..=end).map(move |i| (p, h, i))))
        {
            let values = normal(&mut rng, dim);
            let to = &mut cache[at(timeline, part, head, position)..][..dim];
            to.iter_mut().zip(values).for_each(|(to, v)| *to = f16::from_f32(v));
        }
    }
    let qkv_dim = (heads + 2 * kv_heads) * dim;
    let qkv = normal(&mut rng, n * qkv_dim);
    let angles: Vec<[f32; 2]> = (0..n * dim / 2)
        .map(|_| {
            let (sin, cos) = (rng.next_f64() as f32 * 6.3).sin_cos();
            [cos, sin]
        })
        .collect();
    let cached = View { buffer: memory.put(&cache), at: 2 * at_layer as u64 };
    let shape = Heads { heads, kv_heads, head_dim: dim, context, cache: cached };
    let append = Append {
        heads: shape,
        n,
        qkv: memory.put(&qkv).into(),
        angles: if rotates { memory.put(&angles) } else { memory.put::<u8>(&[]) }.into(),
        positions: memory.put(&places).into(),
        norms: [memory.put::<u8>(&[]); 2],
        epsilon: 0.0,
        value_norm: false,
    };
    memory.call(&Call::Append(append));

    // The CPU's own rotation, bit for bit.
    let mut truth = qkv.clone();
    for (b, x) in truth.chunks_exact_mut(qkv_dim).enumerate() {
        if rotates {
            let angles: Vec<(f32, f32)> = angles[b * dim / 2..][..dim / 2].iter().map(|a| (a[0], a[1])).collect();
            math::rope(&mut x[..(heads + kv_heads) * dim], dim, &angles);
        }
        let [timeline, position] = places[b].map(|p| p as usize);
        for (i, values) in x[heads * dim..].chunks_exact(dim).enumerate() {
            let to = &mut cache[at(timeline, i / kv_heads, i % kv_heads, position)..][..dim];
            to.iter_mut().zip(values).for_each(|(to, v)| *to = f16::from_f32(*v));
        }
    }
    let what = format!("heads {heads}/{kv_heads} x {dim}, window {window:?}, places {places:?}, seed {seed}");
    assert_eq!(memory.get::<f32>(append.qkv.buffer), truth, "{what}");
    let bits = |cache: &[f16]| cache.iter().map(|v| v.to_bits()).collect::<Vec<u16>>();
    assert!(memory.get::<u16>(shape.cache.buffer) == bits(&cache), "cache: {what}");

    let out = memory.alloc(n * heads * dim * 4);
    let sinks: Vec<f32> = if rng.below(2) == 0 { Vec::new() } else { normal(&mut rng, heads) };
    let attend = Attend {
        heads: shape,
        n,
        window,
        most: seen_most,
        qkv: append.qkv,
        positions: append.positions,
        sinks: memory.put(&sinks),
        out: out.into(),
    };
    memory.call(&Call::Attend(attend));
    let (mut sums, mut scale) = (Vec::new(), Vec::new());
    for (b, x) in truth.chunks_exact(qkv_dim).enumerate() {
        let [timeline, position] = places[b].map(|p| p as usize);
        let start = window.map_or(0, |w| (position + 1).saturating_sub(w));
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let row = |part, p| cache[at(timeline, part, kv_head, p)..][..dim].iter().map(|v| f64::from(v.to_f32()));
            let scores: Vec<f64> = (start..=position)
                .map(|p| {
                    let q = x[head * dim..][..dim].iter().map(|&v| f64::from(v));
                    q.zip(row(0, p)).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt()
                })
                .collect();
            let sink = sinks.get(head).map(|&sink| f64::from(sink));
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().chain(&sink).map(|s| (s - top).exp()).sum();
            let (mut mix, mut size) = (vec![0.0; dim], vec![0.0; dim]);
            for (p, score) in (start..=position).zip(&scores) {
                let weight = (score - top).exp() / sum;
                for (i, v) in row(1, p).enumerate() {
                    mix[i] += weight * v;
                    size[i] += (weight * v).abs();
                }
            }
            sums.extend(mix);
            scale.extend(size);
        }
    }
    // A score of ten is off by a millionth of that, and its exponential by as much.
    assert_close(&what, &memory.get::<f32>(out), &sums, &scale, 2e-5);
}

#[test]
fn attention_agrees_with_f64_over_shapes() {
    for seed in 0..70 {
        let mut rng = Prng::new(500 + seed);
        let kv_heads = 1 + below(&mut rng, 3);
        let heads = kv_heads * [1, 1, 2, 3, 4, 7, 8, 9, 16][below(&mut rng, 9)];
        let dim = [2, 6, 8, 16, 20, 40, 64, 80, 96, 128, 256][below(&mut rng, 11)];
        let context = 16 + below(&mut rng, 500);
        let window = (seed % 3 == 0).then(|| 1 + below(&mut rng, context));
        let (n, rotates) = (1 + below(&mut rng, 8), seed % 4 != 0);
        check(seed, &Shape { heads, kv_heads, dim, context, window, n, rotates });
    }
}

#[test]
fn thirty_two_columns_and_very_wide_heads_are_right() {
    check(2, &Shape { heads: 4, kv_heads: 2, dim: 64, context: 200, window: None, n: 32, rotates: true });
    check(3, &Shape { heads: 4, kv_heads: 4, dim: 128, context: 300, window: None, n: 32, rotates: true });
    check(4, &Shape { heads: 8, kv_heads: 1, dim: 512, context: 140, window: None, n: 2, rotates: true });
    check(5, &Shape { heads: 8, kv_heads: 1, dim: 128, context: 2000, window: Some(1000), n: 2, rotates: true });
}

/// Queries and keys by weights, values without, before keys and values go into the cache.
#[test]
fn heads_are_normed_before_they_are_kept() {
    for seed in 0..20 {
        let mut rng = Prng::new(900 + seed);
        let (heads, kv_heads, context) = (4, 2, 16);
        let (dim, n) = ([2, 20, 64, 512][below(&mut rng, 4)], 1 + below(&mut rng, 8));
        let (rows, value_norm, epsilon) = (heads + 2 * kv_heads, seed % 2 == 0, 1e-5);
        let mut memory = Memory::default();
        let (qkv, weights) = (normal(&mut rng, n * rows * dim), [normal(&mut rng, dim), normal(&mut rng, dim)]);
        let places: Vec<[u32; 2]> = (0..n as u32).map(|b| [0, b]).collect();
        let cache = memory.alloc(2 * kv_heads * context * dim * 2);
        let append = Append {
            heads: Heads { heads, kv_heads, head_dim: dim, context, cache: cache.into() },
            n,
            qkv: memory.put(&qkv).into(),
            angles: memory.put::<u8>(&[]).into(),
            positions: memory.put(&places).into(),
            norms: [memory.put(&weights[0]), memory.put(&weights[1])],
            epsilon,
            value_norm,
        };
        memory.call(&Call::Append(append));
        let mut truth = Vec::new();
        for (i, head) in qkv.chunks_exact(dim).enumerate() {
            let squares = head.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / dim as f64;
            let by = 1.0 / (squares + f64::from(epsilon)).sqrt();
            truth.extend(head.iter().enumerate().map(|(j, &v)| {
                let weight = match i % rows {
                    i if i < heads => by * f64::from(weights[0][j]),
                    i if i < heads + kv_heads => by * f64::from(weights[1][j]),
                    _ if value_norm => by,
                    _ => 1.0,
                };
                f64::from(v) * weight
            }));
        }
        let got: Vec<f32> = memory.get(append.qkv.buffer);
        let scale: Vec<f64> = truth.iter().map(|v| v.abs()).collect();
        assert_close(&format!("{dim} x {n}, seed {seed}"), &got, &truth, &scale, 1e-6);
        let cached: Vec<u16> = memory.get(cache);
        for (b, x) in got.chunks_exact(rows * dim).enumerate() {
            for (head, x) in x[heads * dim..].chunks_exact(dim).enumerate() {
                let kept = &cached[(head * context + b) * dim..][..dim];
                assert!(kept.iter().zip(x).all(|(kept, &x)| *kept == f16::from_f32(x).to_bits()), "seed {seed}");
            }
        }
    }
}
