//! What is left of a model's sparsity if neurons are read in clusters of neighbours, the most frequent ones together.

use super::replay::active;
use crate::formats::trace_file::{TraceFile, TraceSection};

/// Share of the neurons that lie in a cluster with an active neuron, 0 to 1, mean over layers and tokens. Clusters are `size` neurons in
/// the order of their frequencies `history`, `[layers][ffn]`, highest first. The first `skip` texts are left out.
pub fn computed_share(trace: &TraceFile, history: &[Vec<f32>], skip: usize, size: usize) -> f64 {
    let h = trace.header();
    let first: usize = h.texts[..skip].iter().map(|text| text.tokens).sum();
    let (mut now, mut computed) = (Vec::new(), 0u64);
    for (layer, history) in history.iter().enumerate() {
        let mut order: Vec<usize> = (0..h.ffn).collect();
        order.sort_by(|&a, &b| history[b].total_cmp(&history[a]));
        let mut cluster_of = vec![0; h.ffn];
        order.iter().enumerate().for_each(|(rank, &neuron)| cluster_of[neuron] = rank / size);
        let neurons_of = |cluster: usize| size.min(h.ffn - cluster * size) as u64;
        // The token that last touched each cluster, counted from 1.
        let mut touched = vec![0; h.ffn.div_ceil(size)];
        for token in first..h.tokens() {
            active(trace.row(TraceSection::Active, layer, token), &mut now);
            for &neuron in &now {
                let cluster = cluster_of[neuron as usize];
                if std::mem::replace(&mut touched[cluster], token + 1) != token + 1 {
                    computed += neurons_of(cluster);
                }
            }
        }
    }
    let tokens = h.tokens() - first;
    computed as f64 / (tokens * h.layers * h.ffn).max(1) as f64
}
