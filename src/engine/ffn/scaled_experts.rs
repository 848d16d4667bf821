//! Experts of a prompt's chunk, whose `down` is stored by neuron, of which most neurons fire for one of the tokens: all are computed, gate and up
//! as matrices, and `down` by kernels that give the scales of its rows to the activations ([`ScaledAcross`]).
//!
//! Two parallel calls: each expert's activations, and its outputs pack by pack.

use super::chosen::{Chosen, tokens_of};
use crate::cpu::aligned::{Aligned, LINE};
use crate::cpu::gemm::{SCALED_LANES, SCALED_ROWS, ScaledAcross};
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Kernels, MAX_COLUMNS, ThreadPool};
use crate::formats::rows::PACK;
use crate::model::config::ModelConfig;
use crate::ops::math;

/// The share of an expert's neurons that fire from which on all are computed (runs/2026-11-26-packed-prompts).
const MAX_SHARE: f64 = 0.5;

/// With more tokens it is faster to round the weights.
const MAX_TOKENS: usize = 96;

/// Numbers of an output that a thread adds at a time; a pack is a multiple of it.
const ADDED: usize = 256;

/// Rows whose addresses are listed at a time.
const MAX_ROWS: usize = 1024;

/// What such experts work with.
#[derive(Default)]
pub struct ScaledBuffers {
    pieces: Vec<Piece>,
    /// By piece `[ffn, tokens]`, both filled up as [`ScaledAcross`] wants it: activations times the expert's weight for the token.
    inputs: Aligned,
    /// By piece `[tokens, hidden]`.
    outputs: Vec<f32>,
}

/// Tokens of a group that are multiplied together, and where their numbers begin.
#[derive(Clone, Copy)]
struct Piece {
    group: usize,
    /// Place of the first among those of all groups.
    first: usize,
    tokens: usize,
    kernel: ScaledAcross,
    input: usize,
    output: usize,
}

impl Piece {
    /// Places for its tokens.
    fn lanes(&self) -> usize {
        self.tokens.next_multiple_of(LINE)
    }
}

impl ScaledBuffers {
    /// Chooses groups of a chunk by how many of their neurons fire, `counts`, and sets their counts to 0; without counts none.
    pub(super) fn choose(
        &mut self,
        kernels: &Kernels,
        config: &ModelConfig,
        chosen: &Chosen<'_>,
        counts: &mut [usize],
    ) {
        self.pieces.clear();
        let (mut input, mut output) = (0, 0);
        for (number, (group, count)) in chosen.groups.iter().zip(counts).enumerate() {
            let down = &chosen.expert(group).down;
            let Some(kernel) = kernels.scaled_across(down.quant, down.cols) else { continue };
            let is_whole = group.tokens > MAX_COLUMNS || *count as f64 > MAX_SHARE * chosen.width() as f64;
            if !is_whole || group.tokens > MAX_TOKENS {
                continue;
            }
            *count = 0;
            for first in tokens_of(group).step_by(SCALED_LANES) {
                let tokens = SCALED_LANES.min(tokens_of(group).end - first);
                let piece = Piece { group: number, first, tokens, kernel, input, output };
                input += chosen.width().next_multiple_of(SCALED_ROWS) * piece.lanes();
                output += tokens * config.hidden;
                self.pieces.push(piece);
            }
        }
        self.inputs.resize(self.inputs.len().max(input));
        self.outputs.resize(self.outputs.len().max(output), 0.0);
    }

    /// Whether no group was chosen, as where answers are decoded.
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Whether the group was chosen.
    pub(super) fn has(&self, number: usize) -> bool {
        self.pieces.binary_search_by_key(&number, |piece| piece.group).is_ok()
    }

    /// Computes the outputs of the groups that were chosen, of which `products` are gates and ups, `[tokens of all groups, 2 ffn]`.
    pub(super) fn compute(
        &mut self,
        pool: &mut ThreadPool,
        config: &ModelConfig,
        chosen: &Chosen<'_>,
        products: &[f32],
    ) {
        let (ffn, hidden) = (chosen.width(), config.hidden);
        let count = ffn.next_multiple_of(SCALED_ROWS);
        let ScaledBuffers { pieces, inputs, outputs } = self;
        let (pieces, packs) = (&*pieces, hidden / PACK);
        let parts = Parts::new(inputs);
        pool.run(pieces.len(), |_, task| {
            let piece = &pieces[task];
            let lanes = piece.lanes();
            // SAFETY: each task has its own piece.
            let to = unsafe { parts.part(piece.input..piece.input + count * lanes) };
            to.fill(0.0);
            let tokens = piece.first..piece.first + piece.tokens;
            for (i, token) in tokens.enumerate() {
                let weight = chosen.tokens[token].weight;
                let (gates, ups) = products[token * 2 * ffn..(token + 1) * 2 * ffn].split_at(ffn);
                for ((to, &gate), &up) in to[i..].iter_mut().step_by(lanes).zip(gates).zip(ups) {
                    *to = weight * config.ffn_kind.of_expert(config.activation, gate, up);
                }
            }
        });
        let (inputs, parts) = (&*inputs, Parts::new(outputs));
        pool.run(pieces.len() * packs, |_, task| {
            let (piece, pack) = (&pieces[task / packs], task % packs);
            let down = &chosen.expert(&chosen.groups[piece.group]).down;
            chosen.arrival.wait(piece.group, config.ffn_kind.rows() - 1);
            for token in 0..piece.tokens {
                let start = piece.output + token * hidden + pack * PACK;
                // SAFETY: each task has its own pack of a piece's outputs.
                unsafe { parts.part(start..start + PACK) }.fill(0.0);
            }
            let mut room = [std::ptr::null(); MAX_ROWS];
            for first in (0..ffn).step_by(MAX_ROWS) {
                let rows = &mut room[..MAX_ROWS.min(ffn - first)];
                rows.iter_mut().enumerate().for_each(|(k, row)| *row = down.row_ptr(first + k));
                let x = &inputs[piece.input + first * piece.lanes()..];
                // SAFETY: as above; whole rows, and as many numbers of columns as the kernel reads; it is for this machine.
                unsafe {
                    let y = parts.start().add(piece.output + pack * PACK);
                    (piece.kernel)(rows, hidden, pack, x.as_ptr(), piece.tokens, y, hidden);
                }
            }
        });
    }

    /// hidden += the outputs of the groups from number `first` on, as far as they follow one another and were chosen. Returns the number of
    /// the first group behind them: `first` if it was not chosen.
    pub(super) fn add(
        &self,
        pool: &mut ThreadPool,
        chosen: &Chosen<'_>,
        hidden: &mut [f32],
        size: usize,
        first: usize,
    ) -> usize {
        let start = self.pieces.partition_point(|piece| piece.group < first);
        let mut after = first;
        let follows = |piece: &&Piece| {
            after = after.max(if piece.group == after { piece.group + 1 } else { after });
            piece.group < after
        };
        let count = self.pieces[start..].iter().take_while(follows).count();
        let (pieces, out) = (&self.pieces[start..start + count], Parts::new(hidden));
        if count == 0 {
            return first;
        }
        pool.run(size / ADDED, |_, task| {
            for piece in pieces {
                let outputs = self.outputs[piece.output..].chunks_exact(size);
                for (routed, output) in chosen.tokens[piece.first..piece.first + piece.tokens].iter().zip(outputs) {
                    let part = task * ADDED..(task + 1) * ADDED;
                    // SAFETY: each task has its own numbers of every token.
                    let out = unsafe { out.part(routed.token * size + part.start..routed.token * size + part.end) };
                    math::add(out, &output[part]);
                }
            }
        });
        after
    }
}
