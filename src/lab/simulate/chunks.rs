//! A prompt's chunks over an integer and a float unit, in order and out of order (mllm-NPU 3.4 and 4.6), on a clock made of assumed rates.
//!
//! The rates are the paper's own figures, of Qwen1.5-1.8B: matrix products of 256 tokens take the integer unit 315 ms, all else the float
//! unit half of that (3.4). How the times divide is not published: products by their weights; of the float unit's time a fifth for each of a
//! layer's two norms with quantisation, the rest for attention of a first chunk, which grows with the positions before it.

use crate::scheduler::chunks::{Graph, Needs, Order, Processor, Stage};
use serde::Serialize;

/// Layers, hidden size, neurons.
const SHAPE: [usize; 3] = [24, 2048, 5504];
/// Tokens of the chunk that the times are of, and those of all its products and of all else, ns.
const TOKENS: usize = 256;
const INTEGER_NS: f64 = 315e6;
const FLOAT_NS: f64 = INTEGER_NS / 2.0;
/// Share of the float unit's time for one of two norms.
const NORM: f64 = 0.2;

/// Prompts that the paper measures, and lengths of chunks.
const PROMPTS: [usize; 3] = [64, 256, 1024];
const CHUNKS: [usize; 3] = [32, 64, 256];

/// One prompt cut into chunks of one length.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Tokens of the prompt, and of each chunk.
    pub prompt: usize,
    /// Tokens of a chunk; a prompt that is shorter is padded.
    pub chunk: usize,
    /// Time, ms, by each of [`ORDERS`].
    pub ms: [f64; ORDERS.len()],
    /// Share of that time in which the integer unit does nothing.
    pub idle: [f64; ORDERS.len()],
}

/// The orders that are compared.
pub const ORDERS: [Order; 3] = [Order::InOrder, Order::EarliestChunk, Order::LargestContribution];

/// The subgraphs of a prompt of so many chunks of `tokens` tokens.
pub fn graph(chunks: usize, tokens: usize) -> Graph {
    let [layers, hidden, ffn] = SHAPE;
    let stage = |on, needs| Stage { on, needs, lead: None };
    let (float, integer) = (stage(Processor::Float, Needs::Own), stage(Processor::Integer, Needs::Own));
    let layer = [float, integer, stage(Processor::Float, Needs::Earlier), integer, float, integer];
    let weights = [3 * hidden * hidden, hidden * hidden, 3 * hidden * ffn].map(|n| n as f64);
    let all: f64 = weights.iter().sum();
    let of_layer = |chunk: usize| {
        let share = tokens as f64 / TOKENS as f64 / layers as f64;
        let norm = NORM * FLOAT_NS * share;
        // As many positions before the middle of this chunk as before the middle of the one that was measured.
        let positions = (chunk as f64 + 0.5) * tokens as f64 / (0.5 * TOKENS as f64);
        let attention = (1.0 - 2.0 * NORM) * FLOAT_NS * share * positions;
        let product = |i: usize| INTEGER_NS * share * weights[i] / all;
        [norm, product(0), attention, product(1), norm, product(2)].map(|ns| ns as u64)
    };
    let times = (0..chunks).map(|chunk| of_layer(chunk).repeat(layers)).collect();
    Graph { stages: layer.repeat(layers), times }
}

/// All prompts by all chunks that are not longer, but for the shortest prompt, which is padded.
pub fn table() -> Vec<Row> {
    let pairs = PROMPTS.into_iter().flat_map(|prompt| CHUNKS.map(|chunk| (prompt, chunk)));
    pairs
        .map(|(prompt, chunk)| {
            let graph = graph(prompt.div_ceil(chunk), chunk);
            let runs = ORDERS.map(|order| graph.run(order));
            let ms = runs.each_ref().map(|run| run.span as f64 / 1e6);
            let idle = runs.each_ref().map(|run| run.idle as f64 / run.span as f64);
            Row { prompt, chunk, ms, idle }
        })
        .collect()
}
