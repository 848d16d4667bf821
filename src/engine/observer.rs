//! Observing a model while it runs: what profilers, trainers and audits need of each layer.

use super::ffn::Selection;
use super::routing::{Group, Routed};
use crate::ids::StoreId;
use crate::model::Activation;
use crate::model::config::Ffn;

/// Is called for each layer once its activations are known, before its FFN is added to the residual.
pub trait Observer {
    /// Looks at what attention's matrices of one layer read, before [`Observer::layer`] is called for it; not in passes whose attention a
    /// device computes.
    fn attention(&mut self, _seen: &SeenAttention<'_>) {}

    /// Looks at one layer.
    fn layer(&mut self, seen: &Seen<'_>);

    /// Whether it wants to see the neurons inside a mixture's experts, too, which costs their computation.
    fn looks_inside(&self) -> bool {
        false
    }

    /// Looks at the neurons of a mixture's chosen experts, after [`Observer::layer`] was called for their layer; not where a device computes
    /// experts.
    fn inside(&mut self, _seen: &SeenExperts<'_>) {}

    /// The neurons of the layer that it looked at last that were active for some token and not computed, ascending; `None` if it does not
    /// keep them.
    fn missed(&self) -> Option<&[StoreId]> {
        None
    }
}

/// The chosen experts of one layer of a pass, and what their neurons do.
pub struct SeenExperts<'a> {
    /// The layer's number, from 0.
    pub layer: usize,
    /// Tokens of the pass.
    pub n: usize,
    /// The experts that some token has.
    pub groups: &'a [Group],
    /// The tokens of each group.
    pub tokens: &'a [Routed],
    /// True products of gate and up of all their neurons, `[tokens of all groups, 2 ffn]`; without gates up's stand in their places.
    pub products: &'a [f32],
    /// What becomes of the two.
    pub kind: Ffn,
    /// Which of these neurons were computed, `[tokens of all groups, ffn]`.
    pub computed: &'a [bool],
    /// Whether a network said which; otherwise all were.
    pub predicted: bool,
}

impl SeenExperts<'_> {
    /// Each expert with each of its tokens, and the products of gate and of up, `[2 ffn]`.
    pub fn each(&self) -> impl Iterator<Item = (Group, Routed, &[f32])> {
        let size = self.products.len() / self.tokens.len();
        let groups = self.groups.iter().flat_map(|group| (0..group.tokens).map(move |_| *group));
        groups.zip(self.tokens).zip(self.products.chunks_exact(size)).map(|((group, routed), of)| (group, *routed, of))
    }

    /// Of each neuron of each expert for each of its tokens: whether it is active, and whether it was computed.
    pub fn pairs(&self, by: Activation) -> impl Iterator<Item = (bool, bool)> {
        let ffn = self.computed.len() / self.tokens.len();
        let of_token = move |(_, _, products): (Group, Routed, &[f32])| {
            let (gates, ups) = products.split_at(ffn);
            gates.iter().zip(ups).map(|(gate, up)| self.active(by, *gate, *up)).collect::<Vec<_>>()
        };
        self.each().flat_map(of_token).zip(self.computed.iter().copied())
    }

    /// Whether a neuron with these products is active.
    pub fn active(&self, by: Activation, gate: f32, up: f32) -> bool {
        self.kind.of_expert(by, gate, up) != 0.0
    }
}

/// The inputs of attention's matrices in one layer of a pass, for n tokens.
pub struct SeenAttention<'a> {
    /// The layer's number, from 0.
    pub layer: usize,
    /// Output of attention's norm, which queries, keys and values are made from, `[n, hidden]`.
    pub input: &'a [f32],
    /// What attention's output matrix reads, `[n, heads * head_dim]`.
    pub attended: &'a [f32],
}

/// One layer of a pass, for n tokens. In a mixture of experts, the experts stand in the place of neurons: gates are then the router's
/// products, activations the weights of the chosen experts, `[n, experts]` each. Neurons are in the store's order (`Layer::order` gives
/// their published numbers).
pub struct Seen<'a> {
    /// The layer's number, from 0.
    pub layer: usize,
    /// Position of the first token in its sequence.
    pub first: usize,
    /// Tokens of the pass.
    pub n: usize,
    /// Residual after attention, before ffn_norm, `[n, hidden]`: what `mlp` predictors read. Where attention and FFN are parallel, it is
    /// without attention's output.
    pub residual: &'a [f32],
    /// Output of ffn_norm, `[n, hidden]`: what `sign` and `exact` predictors read.
    pub input: &'a [f32],
    /// True gate products of every neuron, before the activation function, `[n, ffn]`; in an FFN without gates, up products with their
    /// bias.
    pub gates: &'a [f32],
    /// True activations act(gate) * up of every neuron, `[n, ffn]`.
    pub activations: &'a [f32],
    /// Which neurons are computed; `None` for all, or as `only_active` says.
    pub selection: Option<&'a Selection>,
    /// Of all neurons those are computed for a token that are active for it.
    pub only_active: bool,
}

/// A live audit: in every so many decoding passes the true activations are computed and compared with the prediction.
#[derive(Clone, Debug)]
pub struct LiveAudit {
    every: u64,
    passes: u64,
    activation_thresholds: Vec<f32>,
    activation: Activation,
    /// Of the layer that was audited last: active for some token and not computed.
    missed: Vec<StoreId>,
    /// Whether each neuron of the layer is active for some token.
    any: Vec<bool>,
    /// What was found so far.
    pub counts: AuditCounts,
}

/// What audits have found so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct AuditCounts {
    /// Tokens of the audited passes.
    pub tokens: u64,
    /// Truly active neurons times tokens, of layers that compute a selection.
    pub active: u64,
    /// Of these, those that were computed.
    pub found: u64,
}

impl AuditCounts {
    /// The predictor's recall, 0 to 1: found / active. `None` before anything was audited.
    pub fn recall(&self) -> Option<f64> {
        (self.active > 0).then(|| self.found as f64 / self.active as f64)
    }
}

impl LiveAudit {
    /// Audits each `every`th decoding pass. `activation_thresholds`: for each layer the magnitude above which a neuron counts as active, 0
    /// for ReLU models.
    pub fn new(every: u64, activation: Activation, activation_thresholds: Vec<f32>) -> LiveAudit {
        LiveAudit {
            every: every.max(1),
            passes: 0,
            activation_thresholds,
            activation,
            missed: Vec::new(),
            any: Vec::new(),
            counts: AuditCounts::default(),
        }
    }

    /// Counts the coming pass, of `tokens` tokens, and says whether it is audited.
    pub(super) fn is_due(&mut self, tokens: u64) -> bool {
        self.passes += 1;
        let due = self.passes.is_multiple_of(self.every);
        self.counts.tokens += if due { tokens } else { 0 };
        due
    }
}

impl Observer for LiveAudit {
    fn layer(&mut self, seen: &Seen<'_>) {
        let Some(selection) = seen.selection else { return };
        let activation_threshold = self.activation_thresholds[seen.layer];
        let active = |n: usize| match activation_threshold > 0.0 {
            true => self.activation.apply(seen.gates[n]).abs() > activation_threshold,
            false => seen.activations[n] != 0.0,
        };
        self.counts.active += (0..seen.activations.len()).filter(|&n| active(n)).count() as u64;
        let ffn = seen.activations.len() / seen.n;
        self.any.clear();
        self.any.extend((0..ffn).map(|neuron| (0..seen.n).any(|token| active(token * ffn + neuron))));
        selection.neurons.iter().for_each(|neuron| self.any[neuron.index()] = false);
        self.missed.clear();
        self.missed.extend((0..ffn as u32).map(StoreId).filter(|neuron| self.any[neuron.index()]));
        for (&neuron, &mask) in selection.neurons.iter().zip(&selection.masks) {
            let computed = (0..seen.n).filter(|token| mask >> token & 1 == 1);
            self.counts.found += computed.filter(|token| active(token * ffn + neuron.index())).count() as u64;
        }
    }

    fn looks_inside(&self) -> bool {
        true
    }

    fn inside(&mut self, seen: &SeenExperts<'_>) {
        self.missed.clear();
        if !seen.predicted {
            return;
        }
        let ffn = seen.computed.len() / seen.tokens.len();
        for (at, (active, computed)) in seen.pairs(self.activation).enumerate() {
            self.counts.active += u64::from(active);
            self.counts.found += u64::from(active && computed);
            if active && !computed {
                let group = seen.groups.iter().rfind(|group| group.first <= at / ffn).expect("each token is a group's");
                self.missed.push(StoreId::new(group.expert * ffn + at % ffn));
            }
        }
        self.missed.sort_unstable();
        self.missed.dedup();
    }

    fn missed(&self) -> Option<&[StoreId]> {
        Some(&self.missed)
    }
}
