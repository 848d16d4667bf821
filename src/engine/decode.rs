//! THE HOT PATH: tokens in, logits out.

use super::attention::attention;
use super::ffn::{FfnBuffers, Tile, Work, ffn};
use crate::cpu::team::Parts;
use crate::cpu::{Columns, Kernels, Team};
use crate::model::config::Positions;
use crate::model::{KvCache, Model};
use crate::ops::linear::{linear, read_row};
use crate::ops::math;

/// Which logits a forward pass makes: the head is as large as several layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: more of the prompt follows.
    None,
    /// Of the last token.
    Last,
    /// Of every token.
    All,
}

/// A model, the threads that run it and the room they need.
pub struct Engine {
    pub model: Model,
    pub kernels: Kernels,
    team: Team,
    buffers: Buffers,
}

/// Activations of the tokens in flight; grows to the largest batch seen.
#[derive(Default)]
struct Buffers {
    /// Residual stream, `[n, hidden]`.
    x: Vec<f32>,
    /// `[n, hidden]`
    normed: Vec<f32>,
    /// `[n, qkv_dim]`
    qkv: Vec<f32>,
    /// `[n, q_dim]`
    mixed: Vec<f32>,
    /// `[n, hidden]`
    projected: Vec<f32>,
    /// `[n or 1, vocab]`
    logits: Vec<f32>,
    columns: Columns,
    ffn: FfnBuffers,
    /// One per thread.
    tiles: Vec<Tile>,
    scores: Vec<Vec<f32>>,
    cos_sin: Vec<(f32, f32)>,
}

impl Engine {
    pub fn new(model: Model, threads: usize, kernels: Kernels) -> Engine {
        let team = Team::new(threads);
        let threads = team.threads();
        let buffers = Buffers {
            tiles: (0..threads).map(|_| Tile::new()).collect(),
            scores: (0..threads).map(|_| Vec::new()).collect(),
            ..Buffers::default()
        };
        Engine { model, kernels, team, buffers }
    }

    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// Runs `tokens` at the positions after those in `kv` and adds them to it. Returns logits, `[0, 1 or n, vocab]`.
    /// The tokens are below the vocabulary size and fit the cache: [`super::Session::check`] sees to both.
    pub fn forward(&mut self, kv: &mut KvCache, tokens: &[u32], want: Logits) -> &mut [f32] {
        let (n, first) = (tokens.len(), kv.len);
        assert!(n > 0 && first + n <= kv.context);
        let Engine { model, kernels, team, buffers } = self;
        let (c, b) = (&model.config, buffers);
        let h = c.hidden;
        b.x.resize(n * h, 0.0);
        b.normed.resize(n * h, 0.0);
        b.qkv.resize(n * c.qkv_dim(), 0.0);
        b.mixed.resize(n * c.q_dim(), 0.0);
        b.projected.resize(n * h, 0.0);

        // 0 embed
        for (t, (&token, x)) in tokens.iter().zip(b.x.chunks_exact_mut(h)).enumerate() {
            read_row(&model.embed, token as usize, x);
            if let (Some(table), Positions::Learned { offset }) = (&model.positions, &c.positions) {
                read_row(table, first + t + offset, &mut b.projected[..h]);
                math::add(x, &b.projected[..h]);
            }
        }
        for (l, layer) in model.layers.iter().enumerate() {
            // 1 attention: norm, qkv, rope, KV append, scores and mix, output, residual
            each(team, n, &mut b.normed, |t, out| math::norm(c.norm, &layer.attn_norm, &b.x[t * h..(t + 1) * h], out));
            linear(team, kernels, &layer.qkv, &b.normed, n, &mut b.columns, &mut b.qkv);
            for (t, qkv) in b.qkv.chunks_exact_mut(c.qkv_dim()).enumerate() {
                if !layer.qkv_bias.is_empty() {
                    math::add(qkv, &layer.qkv_bias);
                }
                let (qk, v) = qkv.split_at_mut(c.q_dim() + c.kv_dim());
                if let Positions::Rope { frequencies } = &c.positions {
                    math::angles(first + t, frequencies, &mut b.cos_sin);
                    math::rope(qk, c.head_dim, &b.cos_sin);
                }
                kv.put(l, 0, first + t, &qk[c.q_dim()..]);
                kv.put(l, 1, first + t, v);
            }
            attention(team, kernels, c, kv, l, first, &b.qkv, &mut b.scores, &mut b.mixed);
            linear(team, kernels, &layer.o, &b.mixed, n, &mut b.columns, &mut b.projected);
            math::add(&mut b.x, &b.projected);
            if !layer.o_bias.is_empty() {
                b.x.chunks_exact_mut(h).for_each(|x| math::add(x, &layer.o_bias));
            }
            // 2 FFN: norm, gate, up, activation, down, residual
            each(team, n, &mut b.normed, |t, out| math::norm(c.norm, &layer.ffn_norm, &b.x[t * h..(t + 1) * h], out));
            b.columns.set(&b.normed, n, layer.ffn.quant);
            ffn(team, kernels, c, layer, &b.columns, Work::All, 0.0, &mut b.tiles, &mut b.ffn, &mut b.x);
        }
        kv.len += n;
        // 3 head
        let from = match want {
            Logits::None => return &mut [],
            Logits::Last => n - 1,
            Logits::All => 0,
        };
        let x = &b.x[from * h..];
        let normed = &mut b.normed[from * h..];
        each(team, n - from, normed, |t, out| math::norm(c.norm, &model.out_norm, &x[t * h..(t + 1) * h], out));
        b.logits.resize((n - from) * c.vocab, 0.0);
        linear(team, kernels, &model.head, normed, n - from, &mut b.columns, &mut b.logits);
        &mut b.logits
    }
}

/// Calls `f(token, its part of out)` for each of n tokens, over the team if there are many.
fn each(team: &mut Team, n: usize, out: &mut [f32], f: impl Fn(usize, &mut [f32]) + Sync) {
    let size = out.len() / n;
    if n < 8 {
        out.chunks_exact_mut(size).enumerate().for_each(|(t, out)| f(t, out));
        return;
    }
    let parts = Parts::new(out);
    // SAFETY: each piece has its own part.
    team.run(n, |_, t| f(t, unsafe { parts.part(t * size..(t + 1) * size) }));
}
