//! The tokens of a pass: their sequences and positions, and the activations computed for them.

use super::ffn::{ExpertBuffers, FfnBuffers, Tile};
use super::latent::LatentRoom;
use super::linear_attention::LinearRoom;
use super::positions::TokenPosition;
use super::routing::Routes;
use super::sparsity::Predicted;
use crate::cpu::Columns;
use crate::cpu::attend::AttendScratch;
use crate::model::KvCache;
use crate::predictor::Scratch;

/// Tokens of a prefill chunk: enough columns for the GEMM to be bound by arithmetic, few enough that its activations
/// stay in the tens of megabytes and Ctrl-C is answered soon.
pub const CHUNK: usize = 256;

/// The most tokens of a chunk. Of a mixture in memory 1024 tokens together were read 1.1 to 1.25 times as fast as 256 and 256, of one whose
/// experts come from disk up to 1.9 times; of other models no faster, but with a device to which a part is copied for every chunk.
pub const MAX_CHUNK: usize = 1024;
const _: () = assert!(MAX_CHUNK <= KvCache::MAX_TOKENS);

/// The lengths that chunks are planned for, tokens.
pub const CHUNKS: [usize; 3] = [CHUNK, MAX_CHUNK / 2, MAX_CHUNK];

/// Which logits a forward pass computes: the head is as large as several layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: more of the prompt follows.
    None,
    /// Of the last token of each sequence.
    Last,
    /// Of every token.
    All,
}

/// A token of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchToken {
    /// The sequence that it continues: index of its KV cache.
    pub sequence: usize,
    /// Its id.
    pub token: u32,
}

/// Activations of the tokens of a pass; they grow to the largest pass seen.
#[derive(Default)]
pub(super) struct Buffers {
    /// `[n]`
    pub tokens: Vec<u32>,
    /// `[n]`
    pub positions: Vec<TokenPosition>,
    /// The tokens whose logits are computed, ascending.
    pub logit_rows: Vec<usize>,
    /// Residual stream, `[n, hidden]`.
    pub x: Vec<f32>,
    /// The residual while an FFN's output that is normed before it is added stands in `x`, `[n, hidden]`; then that output.
    pub residual: Vec<f32>,
    /// `[n, hidden]`
    pub normed: Vec<f32>,
    /// What a layer's input matrices make, `[n, rows]` ([`crate::model::layer::Mixer::rows`]).
    pub qkv: Vec<f32>,
    /// Products in a file's order, `[n, rows]`.
    pub unordered: Vec<f32>,
    /// What a layer's output matrix reads, `[n, cols]`.
    pub attended: Vec<f32>,
    /// `[n, hidden]`
    pub projected: Vec<f32>,
    /// `[logit_rows, vocab]`
    pub logits: Vec<f32>,
    /// The input of a matrix product, as kernels read it.
    pub columns: Columns,
    /// Working memory of the FFN.
    pub ffn: FfnBuffers,
    /// Which experts the tokens have in the current layer.
    pub routes: Routes,
    /// Working memory of experts.
    pub experts: ExpertBuffers,
    /// What predictors have found.
    pub predicted: Predicted,
    /// Working memory of predictors.
    pub scratch: Scratch,
    /// Gate products of all neurons, `[n, ffn]`, in layers where all gates are computed first.
    pub gates: Vec<f32>,
    /// True gate products for an observer, `[n, ffn]`.
    pub true_gates: Vec<f32>,
    /// True activations for an observer, `[n, ffn]`.
    pub activations: Vec<f32>,
    /// For each neuron, in how many tokens of a prompt it was active, `[ffn]`.
    pub counts: Vec<u32>,
    /// Unpacked weights, one per thread.
    pub tiles: Vec<Tile>,
    /// Working memory of attention, one per thread.
    pub attend: Vec<AttendScratch>,
    /// Working memory of linear attention.
    pub linear_room: LinearRoom,
    /// Working memory of attention over latents.
    pub latent_room: LatentRoom,
    /// Working memory of embeddings for each layer.
    pub layer_inputs: LayerInputRoom,
    /// Cosine and sine of a token's rotation, `[head_dim / 2]`.
    pub cos_sin: Vec<(f32, f32)>,
}

/// Working memory of embeddings for each layer.
#[derive(Default)]
pub(super) struct LayerInputRoom {
    /// Each layer's own numbers of each token, `[n, layers, count]`.
    pub inputs: Vec<f32>,
    /// A token's row of the table, `[layers, count]`.
    pub row: Vec<f32>,
    /// What a layer's gate makes, `[n, count]`.
    pub gates: Vec<f32>,
}

impl Buffers {
    /// Buffers for `threads` threads.
    pub fn new(threads: usize) -> Buffers {
        Buffers {
            tiles: (0..threads).map(|_| Tile::default()).collect(),
            attend: (0..threads).map(|_| AttendScratch::default()).collect(),
            ..Buffers::default()
        }
    }

    /// Sequences that the tokens of the pass belong to.
    pub fn sequences(&self) -> usize {
        let first = |t: &usize| !self.positions[..*t].iter().any(|p| p.sequence == self.positions[*t].sequence);
        (0..self.positions.len()).filter(first).count()
    }

    /// Takes the tokens of the next pass, and decides whose logits are computed.
    pub fn set_tokens(&mut self, tokens: impl Iterator<Item = (u32, TokenPosition)>, want: Logits) {
        let Buffers { tokens: ids, positions, logit_rows, .. } = self;
        ids.clear();
        positions.clear();
        for (token, position) in tokens {
            ids.push(token);
            positions.push(position);
        }
        let n = positions.len();
        let is_last = |t: usize| !positions[t + 1..].iter().any(|later| later.sequence == positions[t].sequence);
        logit_rows.clear();
        match want {
            Logits::None => {}
            Logits::Last if positions.iter().all(|p| p.sequence == 0) => logit_rows.extend(n.checked_sub(1)),
            Logits::Last => logit_rows.extend((0..n).filter(|&t| is_last(t))),
            Logits::All => logit_rows.extend(0..n),
        }
    }
}
