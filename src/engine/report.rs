//! What the engine did: time by stage, neurons computed, bytes read.

use super::ffn::{Counts, ExpertsRead, Selection};
use super::sparsity::Wanted;
use crate::device::timeline::Stage;
use crate::host_cache::HostCacheCounts;
use crate::model::config::ModelConfig;
use crate::model::weights::Layer;

/// Sums since the report was last cleared ([`Report::clear`]).
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Forward passes.
    pub passes: u64,
    /// Tokens in these passes.
    pub tokens: u64,
    /// Nanoseconds in attention; the embedding counts as attention of the first layer.
    pub attention_ns: u64,
    /// Nanoseconds in predictors and in choosing neurons.
    pub predictor_ns: u64,
    /// Nanoseconds for sending observations to the scheduler and applying its decisions.
    pub scheduler_ns: u64,
    /// Nanoseconds in FFNs.
    pub ffn_ns: u64,
    /// Nanoseconds in the last norm and the head, which makes the logits.
    pub head_ns: u64,
    /// Bytes of FFN rows that the CPU read.
    pub ffn_bytes: u64,
    /// What the cache of neurons in host memory did, where not all of them fit.
    pub host_cache: HostCacheCounts,
    /// For each layer, neurons (of a mixture: experts) times tokens that were computed: all in dense layers, those that fired in exact ones, those that were
    /// selected in predicted ones.
    pub computed: Vec<u64>,
    /// In a mixture whose experts are packed by neuron: neurons times tokens that were computed, and all of the chosen experts, prompts' chunks
    /// left out; else zeros.
    pub inside: (u64, u64),
}

impl Report {
    /// Adds nanoseconds to the sum of a stage; parts without a sum of their own count as attention.
    pub fn add_ns(&mut self, stage: Stage, ns: u64) {
        *match stage {
            Stage::Predictor => &mut self.predictor_ns,
            Stage::Scheduler => &mut self.scheduler_ns,
            Stage::Ffn => &mut self.ffn_ns,
            Stage::Head => &mut self.head_ns,
            _ => &mut self.attention_ns,
        } += ns;
    }

    /// Adds what was computed and read of layer `l` for n tokens.
    pub fn add_layer(
        &mut self,
        (l, layer): (usize, &Layer),
        config: &ModelConfig,
        n: usize,
        wanted: Wanted,
        selection: Option<&Selection>,
        read: Counts,
    ) {
        self.computed.resize(config.layers().len(), 0);
        self.computed[l] += match (wanted, selection) {
            (Wanted::All, _) => (config.width(l) * n) as u64,
            (_, Some(selection)) => selection.pairs(),
            (_, None) => read.active,
        };
        let gates = if wanted == Wanted::Gates { (layer.width * layer.block().gate_or_up().bytes) as u64 } else { 0 };
        self.ffn_bytes += gates + read.bytes(&layer.ffn);
    }

    /// Adds the experts that were computed in layer `l`, for so many pairs of expert and token, and what was read for them.
    pub fn add_experts(&mut self, l: usize, config: &ModelConfig, pairs: usize, read: ExpertsRead) {
        self.computed.resize(config.layers().len(), 0);
        self.computed[l] += pairs as u64;
        self.ffn_bytes += read.bytes;
        self.inside = (self.inside.0 + read.neurons, self.inside.1 + read.of);
    }

    /// Sets all sums to 0, and keeps the memory.
    pub fn clear(&mut self) {
        let mut computed = std::mem::take(&mut self.computed);
        computed.fill(0);
        *self = Report { computed, ..Report::default() };
    }

    /// Neurons times tokens that were computed over all layers, and all of them; of a mixture experts, or the neurons of those experts that
    /// tokens have, where it is packed by neuron.
    pub fn neurons(&self, config: &ModelConfig) -> (u64, u64) {
        match self.inside {
            (_, 0) => (self.computed.iter().sum(), self.tokens * (config.clusters() * config.movable_layers()) as u64),
            inside => inside,
        }
    }

    /// The first of [`Report::neurons`] / the second, 0 to 1.
    pub fn computed_share(&self, config: &ModelConfig) -> f64 {
        let (computed, all) = self.neurons(config);
        computed as f64 / all.max(1) as f64
    }

    /// Nanoseconds of all parts together.
    pub fn total_ns(&self) -> u64 {
        self.attention_ns + self.predictor_ns + self.scheduler_ns + self.ffn_ns + self.head_ns
    }
}
