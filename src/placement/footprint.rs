//! Bytes of a model's parts, and of what runs it, as a plan is told of them.

use crate::engine::session::{CHUNK, CHUNKS};
use crate::engine::{attention_layer_bytes, attention_made_bytes, pinned_bytes, workspace_bytes};
use crate::formats::rows::Quant;
use crate::model::config::{ModelConfig, Norm};
use crate::model::latent::LatentWeights;
use crate::model::layer::{Attention, Experts, LayerForm, Mixer};
use crate::model::{BlockLayout, ExpertWeights, KvCache, KvType, Matrix, Model};

/// Shape of a model and bytes of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Number of layers.
    pub layers: usize,
    /// Hidden size.
    pub hidden: usize,
    /// What is placed of each layer: its neurons, or the experts of a mixture.
    pub ffn: usize,
    /// Layers of which something is placed: not those without experts in a mixture.
    pub placed_layers: usize,
    /// Of a mixture, how many experts a token uses; `None` where neurons are placed.
    pub experts_used: Option<usize>,
    /// Bytes of one neuron block, or of one expert; of the largest where they differ from layer to layer.
    pub block_bytes: u64,
    /// Bytes of the query, key, value and output matrices of all layers, with all their norms and biases, and of a mixture's shared experts,
    /// which lie beside them.
    pub attention_bytes: u64,
    /// Bytes of the query, key, value and output matrices of the layer that has the fewest, and of room for those of any layer.
    pub attention_layer_bytes: [u64; 2],
    /// Bytes of host memory that copying a layer's matrices for every pass takes beside the model's own: 0 where they lie there as on a device.
    pub attention_made_bytes: u64,
    /// Weights of these matrices: each is a multiplication and an addition for a token.
    pub attention_weights: u64,
    /// Bytes of the embedding and learned positions; with tied embeddings of the positions alone.
    pub embeddings_bytes: u64,
    /// Bytes of what the host computes in any case: shared experts beside experts by neuron, and matrices between latents and heads.
    pub host_shared_bytes: u64,
    /// Bytes of the head and its norm.
    pub head_bytes: u64,
    /// Bytes of working memory for a prompt's chunk of [`CHUNK`] tokens, and of the tables of slots.
    pub buffers_bytes: u64,
    /// Bytes of working memory that chunks of each of [`CHUNKS`] tokens take beyond the first.
    pub chunk_bytes: [u64; CHUNKS.len()],
    /// Bytes of host memory that a process takes for chunks of each of [`CHUNKS`] tokens: its working memory, and what host and device exchange.
    /// Where no keys and values lie on the device, and where some do.
    pub host_chunk_bytes: [[u64; 2]; CHUNKS.len()],
    /// Bytes of the keys and values of one sequence with a full context on a device, which keeps all of them.
    pub kv_bytes: u64,
    /// The same in host memory, where layers with a window keep less.
    pub host_kv_bytes: u64,
    /// Bytes of the keys and values of one position, wherever they are.
    pub position_bytes: u64,
    /// Layers in which host and device wait for each other once more for attention on the host.
    pub attention_waits: usize,
    /// Bytes of the states that layers without attention have of one sequence, in host memory; a token reads and writes all of them.
    pub state_bytes: u64,
    /// Weights of one neuron block, or of one expert: each is a multiplication and an addition for a token.
    pub block_weights: u64,
}

/// Bits that a weight takes, scales included, where a model is of several types.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bits {
    /// Of experts or neurons.
    pub experts: f64,
    /// Of attention.
    pub others: f64,
    /// Of embedding and head.
    pub edges: f64,
}

impl Footprint {
    /// The sizes of a packed model, with keys and values of type `kv` for `context` tokens.
    pub fn of_model(model: &Model, context: usize, kv: KvType) -> Footprint {
        let layers = model.layers.iter();
        Footprint {
            // Where types differ from layer to layer, the largest: a plan that fits has room for them all.
            block_bytes: model.layers.iter().map(|l| l.ffn.movable_bytes()).max().unwrap_or(0),
            attention_bytes: layers
                .flat_map(|l| l.qkv.parts().iter().chain([&l.o]))
                .map(Matrix::padded_bytes)
                .sum::<u64>()
                + if model.config.neurons_inside() { 0 } else { shared_bytes(model) }
                + small_bytes(&model.config),
            attention_layer_bytes: attention_layer_bytes(model),
            attention_made_bytes: attention_made_bytes(model),
            embeddings_bytes: if model.config.tied { 0 } else { model.embed.bytes() }
                + model.positions.map_or(0, |p| p.bytes()),
            host_shared_bytes: if model.config.neurons_inside() { shared_bytes(model) } else { 0 }
                + latent_bytes(model),
            head_bytes: model.head.padded_bytes() + norm_bytes(&model.config),
            ..Footprint::of_shape(&model.config, model.quant, context, kv)
        }
    }

    /// The sizes that a model of this shape has when `pack` packs it as `quant`; its weights are not needed.
    pub fn of_shape(c: &ModelConfig, quant: Quant, context: usize, kv: KvType) -> Footprint {
        let edge = (c.vocab * quant.of_edges().row_bytes(c.hidden)) as u64;
        let rows = c.learned_positions.map_or(0, |offset| c.context + offset);
        let positions = rows * Quant::F32.row_bytes(c.hidden);
        let bytes = |m: &Mixer| m.rows() * quant.row_bytes(c.hidden) + c.hidden * quant.row_bytes(m.cols());
        let (attention, most) = (c.mixers().map(|m| bytes(&m)).sum::<usize>(), c.most_of_mixers(bytes));
        let inputs = c.ffn_kind.rows() - 1;
        let shared = |width: usize| inputs * width * quant.row_bytes(c.hidden) + c.hidden * quant.row_bytes(width);
        let shared: usize = shared_widths(c).map(shared).sum();
        let on_device = if c.neurons_inside() { 0 } else { shared };
        Footprint {
            layers: c.layers().len(),
            hidden: c.hidden,
            ffn: c.movable(),
            placed_layers: c.movable_layers(),
            experts_used: c.has_whole_experts().then(|| c.most_used_experts()),
            block_bytes: (BlockLayout::new(c.ffn_kind, quant, c.hidden).bytes() * of_cluster(c)) as u64,
            attention_bytes: (attention + on_device) as u64 + small_bytes(c),
            attention_layer_bytes: [most as u64; 2],
            attention_made_bytes: 0,
            attention_weights: attention_weights(c) as u64,
            embeddings_bytes: if c.tied { 0 } else { edge } + positions as u64,
            host_shared_bytes: if c.neurons_inside() { shared as u64 } else { 0 }
                + c.attentions().map(|a| quant.number_bytes(a.latent_weights()) as u64).sum::<u64>(),
            head_bytes: edge + norm_bytes(c),
            buffers_bytes: buffers_bytes(c),
            chunk_bytes: CHUNKS.map(|tokens| workspace_bytes(c, tokens) - workspace_bytes(c, CHUNK)),
            host_chunk_bytes: CHUNKS
                .map(|tokens| [false, true].map(|attends| working_bytes(c, tokens) + pinned_bytes(c, tokens, attends))),
            kv_bytes: KvCache::whole_bytes_for(c, context, kv),
            host_kv_bytes: KvCache::bytes_for(c, context, kv),
            position_bytes: KvCache::position_bytes(c, kv),
            attention_waits: (0..c.layers().len()).filter(|&l| !c.layer(l).norms.parallel()).count(),
            state_bytes: c.mixers().map(|m| m.kept() * size_of::<f32>()).sum::<usize>() as u64,
            block_weights: block_weights(c) as u64,
        }
    }

    /// The sizes of a model whose weights take so many bits, about: what a row is rounded up to is left out.
    pub fn of_bits(c: &ModelConfig, bits: Bits, context: usize, kv: KvType) -> Footprint {
        let bytes = |weights: usize, bits: f64| (weights as f64 * bits / 8.0).round() as u64;
        let edge = bytes(c.vocab * c.hidden, bits.edges);
        Footprint {
            block_bytes: bytes(block_weights(c), bits.experts),
            attention_bytes: bytes(attention_weights(c), bits.others) + small_bytes(c),
            attention_layer_bytes: [bytes(c.most_of_mixers(|m| m.weights(c.hidden)), bits.others); 2],
            embeddings_bytes: if c.tied { 0 } else { edge },
            head_bytes: edge + norm_bytes(c),
            ..Footprint::of_shape(c, Quant::Q8, context, kv)
        }
    }

    /// Sequences whose keys and values so many bytes of a device hold; none where no layer's attention is computed there.
    pub fn sequences_in(&self, bytes: u64) -> usize {
        bytes.checked_div(self.kv_bytes).unwrap_or(0) as usize
    }

    /// Device memory that a model needs beside predictors and neurons, with one sequence.
    pub fn least_bytes(&self) -> u64 {
        self.attention_bytes + self.head_bytes + self.buffers_bytes
    }

    /// Device memory that is saved if attention's matrices of so many layers stay in host memory, beside room for those of two layers, where they
    /// are copied for every pass; 0 if that is none.
    pub fn saved_by_streaming(&self, layers: usize) -> u64 {
        let [least, room] = self.attention_layer_bytes;
        (layers as u64 * least).saturating_sub(2 * room)
    }

    /// Bytes of host memory for attention's matrices of so many layers.
    pub fn streamed_on_host(&self, layers: usize) -> u64 {
        layers as u64 * (self.attention_layer_bytes[0] + self.attention_made_bytes)
    }

    /// Bytes that the device reads or writes for every token beside predictors and neurons.
    pub fn always_bytes(&self) -> u64 {
        self.attention_bytes + self.head_bytes
    }

    /// Bytes of working memory that chunks of so many tokens, one of [`CHUNKS`], take beyond those of [`CHUNK`].
    ///
    /// # Panics
    /// For another number of tokens.
    pub fn for_chunks(&self, tokens: usize) -> u64 {
        self.chunk_bytes[length(tokens)]
    }

    /// Bytes of host memory that a process takes for chunks of so many tokens, one of [`CHUNKS`]; `attends` says whether keys and values lie on
    /// the device.
    ///
    /// # Panics
    /// For another number of tokens.
    pub fn on_host(&self, tokens: usize, attends: bool) -> u64 {
        self.host_chunk_bytes[length(tokens)][usize::from(attends)]
    }

    /// Of `ram` bytes what is left for [`Footprint::on_host`] beside all neurons, keys and values of so many sequences and the embedding. Where all of
    /// the model fits, the shortest chunks have theirs in any case.
    pub fn host_room(&self, ram: u64, sequences: usize) -> u64 {
        let weights = self.ffn_bytes() + self.host_shared_bytes + self.embeddings_bytes;
        let parts = weights + self.host_kv_bytes * sequences.max(1) as u64;
        let room = ram.saturating_sub(parts);
        let fits = room >= self.attention_bytes + self.head_bytes;
        if fits { room.max(self.on_host(CHUNK, true)) } else { room }
    }

    /// Bytes of all weights, and of keys and values of so many sequences.
    pub fn whole_bytes(&self, sequences: usize) -> u64 {
        let beside = self.attention_bytes + self.host_shared_bytes + self.head_bytes + self.embeddings_bytes;
        self.ffn_bytes() + beside + self.host_kv_bytes * sequences as u64
    }

    /// Bytes of all neuron blocks.
    pub fn ffn_bytes(&self) -> u64 {
        self.block_bytes * (self.ffn * self.placed_layers) as u64
    }
}

/// What a process takes at least beside weights, keys and values. Measured 45 to 60 MiB for models of 1 B.
const WORKING_BYTES: u64 = 64 << 20;
/// The part of it that does not grow with the model: tables of the cache, the program itself.
const PROGRAM_BYTES: u64 = 32 << 20;

/// What a process takes of host memory beside weights, keys and values, and what it exchanges with a device: the activations of a prompt's chunk,
/// above all. Of a mixture of 3.9 B that is read in place 88 MiB were measured (92 by this), packed by neuron 105 (112), of a dense model of
/// 0.95 B 42 (71).
pub fn working_bytes(c: &ModelConfig, chunk: usize) -> u64 {
    // Numbers of a token: the residual and what is made of it, and the FFN's gates, activations and what `down` reads.
    let ffn = match c.is_routed() {
        false => 2 * c.widest_ffn(),
        // Of each of its experts and of the shared one inputs, products and activations; packed by neuron, activations once more, filled up, and outputs.
        true => {
            let (ffn, h) = (c.widest_ffn(), c.hidden);
            let shared = shared_widths(c).max().map_or(0, |width| 4 * width + 2 * h);
            c.most_used_experts() * (3 * ffn + 2 * h + if c.neurons_inside() { 2 * ffn + h } else { 0 }) + shared
        }
    };
    let token = 8 * c.hidden + 2 * c.most_of_mixers(|m| m.rows()) + ffn;
    let of_latents = |a: &Attention| a.latent.map_or(0, |l| l.queries + a.heads * (l.query() + l.kept() + l.rank));
    let latents = chunk.min(CHUNK) * c.most_of_attention(of_latents);
    // Experts' biases, and their router's, are copied.
    let biases = c.movable_layers() * expert_biases(c) * size_of::<f32>();
    WORKING_BYTES.max(PROGRAM_BYTES + ((chunk * token + latents) * size_of::<f32>()) as u64) + biases as u64
}

fn length(tokens: usize) -> usize {
    CHUNKS.iter().position(|&length| length == tokens).expect("one of the lengths")
}

/// Neurons that are placed as one.
fn of_cluster(c: &ModelConfig) -> usize {
    if c.has_whole_experts() { c.widest_ffn() } else { 1 }
}

/// Neurons of what every token passes through in each layer of a mixture that has such a thing.
fn shared_widths(c: &ModelConfig) -> impl Iterator<Item = usize> {
    (0..c.layers().len()).filter_map(|layer| Some(c.experts(layer)?.shared?.width))
}

/// Bytes of the matrices between latents and heads of all layers.
fn latent_bytes(model: &Model) -> u64 {
    model.layers.iter().flat_map(|layer| &layer.latent).flat_map(LatentWeights::matrices).map(Matrix::bytes).sum()
}

/// Bytes of the shared experts of all layers.
fn shared_bytes(model: &Model) -> u64 {
    model.layers.iter().filter_map(|layer| layer.ffn.experts()).map(ExpertWeights::shared_bytes).sum()
}

/// Weights of attention's matrices and of the shared experts that lie beside them, of all layers.
fn attention_weights(c: &ModelConfig) -> usize {
    let shared: usize = if c.neurons_inside() { 0 } else { shared_widths(c).sum() };
    c.mixers().map(|m| m.weights(c.hidden)).sum::<usize>() + c.hidden * c.ffn_kind.rows() * shared
}

/// Weights of what is placed as one.
fn block_weights(c: &ModelConfig) -> usize {
    of_cluster(c) * c.ffn_kind.rows() * c.hidden
}

/// One norm: weight and, for LayerNorm, bias, in f32.
fn norm_bytes(c: &ModelConfig) -> u64 {
    (c.hidden * 4 * if matches!(c.norm, Norm::Layer(_)) { 2 } else { 1 }) as u64
}

/// Numbers of the biases of a layer's experts and of their router.
fn expert_biases(c: &ModelConfig) -> usize {
    let of = |e: Experts| usize::from(e.selection_bias) + if e.biases { 1 + 2 * c.widest_ffn() + c.hidden } else { 0 };
    c.most_of_experts(|experts| experts.count * of(*experts))
}

/// The norms, the biases, the sinks and the router of each layer, in f32.
fn small_bytes(c: &ModelConfig) -> u64 {
    let there = |yes: bool, numbers: usize| if yes { numbers } else { 0 };
    let of_attention = |a: Attention| {
        there(a.bias, a.qkv_dim())
            + there(a.output_bias, c.hidden)
            + there(a.qk_norm, a.normed_dims().into_iter().take(if a.keys_of.is_some() { 1 } else { 2 }).sum())
            + there(a.sinks, a.heads)
    };
    let (biases, of_experts) = (there(c.ffn_bias, c.widest_ffn() + c.hidden), expert_biases(c));
    let router = if c.is_routed() { c.clusters() * c.hidden } else { 0 };
    let attention = c.attentions().map(of_attention).sum::<usize>();
    // Norms before and behind attention and FFN, and where there are the latter the weights of one that makes zeros.
    let of_layer = |layer: &LayerForm| 2 * (u64::from(layer.norms.before()) + u64::from(layer.norms.after()));
    let beside = if c.has_normed_shared() { 3 * c.layers().len() as u64 } else { 0 };
    let norms = c.layers().iter().map(of_layer).sum::<u64>() + beside;
    let zeros = if c.norms_outputs() { norm_bytes(c) } else { 0 };
    let experts = c.movable_layers() as u64 * 4 * (of_experts + router) as u64;
    zeros + norms * norm_bytes(c) + c.layers().len() as u64 * 4 * biases as u64 + experts + 4 * attention as u64
}

/// Everything that a pass needs besides weights: the engine's workspace for a chunk of [`CHUNK`] tokens; room for neuron blocks
/// that are copied for a chunk; 4 bytes per neuron for `gpu_bucket` (dynamicinfer C.2), for the largest number of slots; and a second copy of
/// the biases of up, for neurons that are in no slot.
fn buffers_bytes(c: &ModelConfig) -> u64 {
    let biases = if c.ffn_bias { c.layers().len() * c.widest_ffn() } else { 0 };
    workspace_bytes(c, CHUNK) + streamed_bytes(c) + 4 * (c.layers().len() * c.movable() + biases) as u64
}

/// Bytes for blocks that are copied for a prompt's chunk: what the activations of [`CHUNK`] tokens would take if all were kept. That is a few hundred
/// blocks of a 7B model in f16, which the link copies in a fraction of a millisecond. 0 of whole experts: their plan says how many
/// ([`super::memory_plan::Plan::streamed_bytes`]).
pub fn streamed_bytes(c: &ModelConfig) -> u64 {
    if c.has_whole_experts() {
        return 0;
    }
    4 * (CHUNK * (c.ffn_kind.rows() - 1) * c.widest_ffn()) as u64
}
