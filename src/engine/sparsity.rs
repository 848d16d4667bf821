//! Which neurons each layer's FFN computes: a predictor for each layer, its threshold, and how many layers ahead it predicts.

use super::ffn::Selection;
use crate::cache::{NeuronCache, PerTier, Tier};
use crate::formats::MappedFile;
use crate::ids::StoreId;
use crate::predictor::{Calibration, Kind, NetworkWeights, Predictor, Tools};
use std::sync::Arc;

/// What one layer's FFN computes, as the user asks for it.
#[derive(Clone)]
pub enum Choice {
    /// Every neuron.
    Dense,
    /// The gates of all neurons are computed first, then the rest of the neurons that fire.
    Exact {
        /// A neuron fires if |act(gate)| is above this: 0 for ReLU models.
        activation_threshold: f32,
    },
    /// Only neurons that are predicted are computed, and up and down only of those that then fire.
    Predicted {
        /// Scores the layer's neurons.
        predictor: Arc<dyn Predictor>,
        /// A neuron is computed if its predicted probability, 0 to 1, reaches this.
        threshold: f32,
        /// A neuron fires if |act(gate)| is above this: 0 for ReLU models.
        activation_threshold: f32,
    },
}

/// A layer's choice, with its threshold turned into scores.
enum Rule {
    Dense,
    Exact,
    /// `threshold` is what was set. `used` are the probabilities, and `scores` the scores, from which on a neuron is computed now: on the
    /// CPU, and on the device.
    Predicted {
        predictor: Arc<dyn Predictor>,
        ahead: usize,
        threshold: f32,
        used: PerTier<f32>,
        scores: PerTier<f32>,
    },
}

/// What each layer computes.
pub struct Sparsity {
    rules: Vec<Rule>,
    activation_thresholds: Vec<f32>,
    gates_chunks: bool,
}

/// Which neurons of a layer its FFN computes, in one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// All.
    All,
    /// Those that fire for some token; all gates are computed first.
    Gates,
    /// Those in the layer's selection, which was predicted.
    Selected,
    /// Those of the experts that the router has chosen.
    Experts,
}

/// What predictors have found.
#[derive(Default)]
pub struct Predicted {
    /// The last scores of some layers, each `[n, ffn]`: of layer l at `l % scores.len()`, one for each layer from that which is computed to
    /// the last that is looked ahead to.
    scores: Vec<Vec<f32>>,
    /// For each layer, what was predicted for it last.
    pub selections: Vec<Selection>,
}

impl Predicted {
    /// Makes place for layers up to `ahead` after the one that is computed.
    pub fn look_ahead(&mut self, ahead: usize) {
        if self.scores.len() <= ahead {
            self.scores.resize_with(ahead + 1, Vec::new);
        }
    }

    /// The scores that a layer was given last, `[n, ffn]`.
    pub fn scores(&self, layer: usize) -> &[f32] {
        &self.scores[layer % self.scores.len()]
    }

    /// The same to be written to, `count` numbers.
    pub fn scores_mut(&mut self, layer: usize, count: usize) -> &mut [f32] {
        let places = self.scores.len();
        let scores = &mut self.scores[layer % places];
        scores.resize(count, 0.0);
        scores
    }
}

/// What the device has scored already, of what is predicted at one layer.
#[derive(Clone, Copy, Default)]
pub struct Scored {
    /// The layer itself is divided.
    pub own: bool,
    /// A later layer has its scores.
    pub ahead: bool,
}

impl Sparsity {
    /// Every neuron of every layer.
    pub fn dense(layers: usize) -> Sparsity {
        Sparsity {
            rules: (0..layers).map(|_| Rule::Dense).collect(),
            activation_thresholds: vec![0.0; layers],
            gates_chunks: false,
        }
    }

    /// Layer l is predicted from the residual `ahead` layers before it; the first `ahead` layers from their own, because there is none
    /// before them (DynamicInfer 4.2.1).
    ///
    /// # Errors
    /// The layer and look-ahead for which a predictor has no table.
    pub fn new(choices: Vec<Choice>, ahead: usize) -> Result<Sparsity, String> {
        let (mut rules, mut activation_thresholds) = (Vec::new(), Vec::new());
        for (layer, choice) in choices.into_iter().enumerate() {
            let (rule, activation_threshold) = match choice {
                Choice::Dense => (Rule::Dense, 0.0),
                Choice::Exact { activation_threshold } => (Rule::Exact, activation_threshold),
                Choice::Predicted { predictor, threshold, activation_threshold } => {
                    let ahead = if layer < ahead { 0 } else { ahead };
                    let table = predictor.calibration(layer, ahead).ok_or_else(|| {
                        let kind = predictor.kind().name();
                        format!("the {kind} predictor has no table for layer {layer} from {ahead} layers before it")
                    })?;
                    let (used, scores) = (PerTier::all(threshold), PerTier::all(table.score_at(threshold)));
                    (Rule::Predicted { predictor, ahead, threshold, used, scores }, activation_threshold)
                }
            };
            rules.push(rule);
            activation_thresholds.push(activation_threshold);
        }
        Ok(Sparsity { rules, activation_thresholds, gates_chunks: false })
    }

    /// Whether passes of more than [`crate::cpu::MAX_COLUMNS`] tokens leave out what exact gates leave out of shorter ones.
    pub fn gates_chunks(&self) -> bool {
        self.gates_chunks
    }

    /// Sets [`Sparsity::gates_chunks`], where no layer is predicted; returns whether it is set. It is for measuring: all weights are read, and
    /// what is left out is left out of the sums.
    pub fn set_gates_chunks(&mut self, yes: bool) -> bool {
        let gates = self.rules.iter().all(|rule| matches!(rule, Rule::Dense | Rule::Exact));
        self.gates_chunks = yes && gates && !self.is_dense();
        self.gates_chunks
    }

    /// Whether every layer computes every neuron.
    pub fn is_dense(&self) -> bool {
        self.rules.iter().all(|rule| matches!(rule, Rule::Dense))
    }

    /// Which neurons of a layer are computed in passes of up to [`crate::cpu::MAX_COLUMNS`] tokens.
    pub fn wanted(&self, layer: usize) -> Wanted {
        match self.rules[layer] {
            Rule::Dense => Wanted::All,
            Rule::Exact => Wanted::Gates,
            Rule::Predicted { .. } => Wanted::Selected,
        }
    }

    /// The calibration of the scores by which a layer's neurons are chosen; `None` for a layer that is not predicted.
    pub fn calibration(&self, layer: usize) -> Option<&Calibration> {
        let (predictor, ahead) = self.predictor(layer)?;
        predictor.calibration(layer, ahead)
    }

    /// Sets the probabilities from which on a neuron of this layer is computed, by where it lies (DynamicInfer 4.4); nothing
    /// for a layer that is not predicted.
    pub fn set_thresholds(&mut self, layer: usize, probabilities: PerTier<f32>) {
        if let Rule::Predicted { predictor, ahead, used, scores, .. } = &mut self.rules[layer] {
            let table = predictor.calibration(layer, *ahead).expect("looked at when it was made");
            (*used, *scores) = (probabilities, probabilities.map(|p| table.score_at(p)));
        }
    }

    /// Gives CPU and device the same threshold again: each layer's own.
    pub fn one_threshold(&mut self) {
        tracing::debug!("one threshold for CPU and device");
        for layer in 0..self.rules.len() {
            if let Some(threshold) = self.threshold(layer) {
                self.set_thresholds(layer, PerTier::all(threshold));
            }
        }
    }

    /// The thresholds used now, by the CPU and by the device; `None` for a layer that is not predicted.
    pub fn used(&self, layer: usize) -> Option<PerTier<f32>> {
        match &self.rules[layer] {
            Rule::Predicted { used, .. } => Some(*used),
            Rule::Dense | Rule::Exact => None,
        }
    }

    /// The |act(gate)| above which a neuron of this layer is active; 0 for ReLU models.
    pub fn activation_threshold(&self, layer: usize) -> f32 {
        self.activation_thresholds[layer]
    }

    /// [`Sparsity::activation_threshold`] of every layer.
    pub fn activation_thresholds(&self) -> &[f32] {
        &self.activation_thresholds
    }

    /// The threshold of a layer as it was set, a probability; `None` for a layer that is not predicted.
    pub fn threshold(&self, layer: usize) -> Option<f32> {
        match &self.rules[layer] {
            Rule::Predicted { threshold, .. } => Some(*threshold),
            Rule::Dense | Rule::Exact => None,
        }
    }

    /// Sets a layer's threshold, for CPU and device; `false` for a layer that is not predicted.
    pub fn set_threshold(&mut self, layer: usize, new: f32) -> bool {
        let Rule::Predicted { threshold, .. } = &mut self.rules[layer] else { return false };
        let before = std::mem::replace(threshold, new);
        tracing::debug!(layer, before, after = new, "threshold set");
        self.set_thresholds(layer, PerTier::all(new));
        true
    }

    /// The kind of a layer's predictor.
    pub fn kind(&self, layer: usize) -> Kind {
        match &self.rules[layer] {
            Rule::Dense => Kind::Dense,
            Rule::Exact => Kind::Exact,
            Rule::Predicted { predictor, .. } => predictor.kind(),
        }
    }

    /// The kinds of all layers in one word: `mlp`, or `dense@0,mlp@1-31`.
    pub fn name(&self) -> String {
        let layers = self.rules.len();
        let mut runs: Vec<(Kind, usize, usize)> = Vec::new();
        for layer in 0..layers {
            match runs.last_mut() {
                Some((kind, _, last)) if *kind == self.kind(layer) => *last = layer,
                _ => runs.push((self.kind(layer), layer, layer)),
            }
        }
        let name = |&(kind, first, last): &(Kind, usize, usize)| match (runs.len(), first == last) {
            (1, _) => kind.name().to_owned(),
            (_, true) => format!("{}@{first}", kind.name()),
            (_, false) => format!("{}@{first}-{last}", kind.name()),
        };
        runs.iter().map(name).collect::<Vec<_>>().join(",")
    }

    /// The files that its predictors read while they predict.
    pub fn files(&self) -> impl Iterator<Item = &MappedFile> {
        self.rules.iter().filter_map(|rule| match rule {
            Rule::Predicted { predictor, .. } => predictor.file(),
            Rule::Dense | Rule::Exact => None,
        })
    }

    /// Bytes of predictor weights that one token reads.
    pub fn predictor_bytes(&self) -> u64 {
        let bytes = |(layer, rule): (usize, &Rule)| match rule {
            Rule::Predicted { predictor, ahead, .. } => predictor.weight_bytes(layer, *ahead),
            Rule::Dense | Rule::Exact => 0,
        };
        self.rules.iter().enumerate().map(bytes).sum()
    }

    /// The predictor of a layer, and how many layers before it stands the residual that it reads; `None` for a layer that is not predicted.
    pub fn predictor(&self, layer: usize) -> Option<(&Arc<dyn Predictor>, usize)> {
        match &self.rules[layer] {
            Rule::Predicted { predictor, ahead, .. } => Some((predictor, *ahead)),
            Rule::Dense | Rule::Exact => None,
        }
    }

    /// The network that says which neurons of a layer's chosen experts may fire, and the score from which on they may; `None` where their gates
    /// say it. Of a mixture.
    pub fn inside(&self, layer: usize) -> Option<(NetworkWeights<'_>, f32)> {
        let (predictor, ahead) = self.predictor(layer)?;
        Some((predictor.network(layer, ahead)?, self.min_scores(layer)[Tier::Host]))
    }

    /// The largest number of layers that one is predicted ahead.
    pub fn ahead(&self) -> usize {
        (0..self.rules.len()).filter_map(|layer| self.predictor(layer)).map(|(_, ahead)| ahead).max().unwrap_or(0)
    }

    /// Scores from which on a neuron of this layer is computed, on the CPU and on the device; minus infinity for a layer that is not
    /// predicted.
    pub fn min_scores(&self, layer: usize) -> PerTier<f32> {
        match &self.rules[layer] {
            Rule::Predicted { scores, .. } => *scores,
            Rule::Dense | Rule::Exact => PerTier::all(f32::NEG_INFINITY),
        }
    }

    /// Whether a later layer is predicted from the residual of layer `here`.
    pub fn looks_ahead(&self, here: usize) -> bool {
        let from_here = |(layer, rule): (usize, &Rule)| matches!(rule, Rule::Predicted { ahead, .. } if *ahead > 0 && here + ahead == layer);
        self.rules.iter().enumerate().skip(here).any(from_here)
    }

    /// Fills the selection of every layer that is predicted from `residual`, `[n, hidden]`: the residual after the attention of layer
    /// `here`, but for what the device has `scored`. n is at most [`crate::cpu::MAX_COLUMNS`]. Neurons in `cache` have the device's
    /// threshold.
    pub fn predict(
        &self,
        tools: &mut Tools<'_>,
        here: usize,
        residual: &[f32],
        cache: Option<&NeuronCache>,
        scored: Scored,
        predicted: &mut Predicted,
    ) {
        let n = residual.len() / tools.model.config.hidden;
        predicted.selections.resize_with(self.rules.len(), Selection::default);
        predicted.look_ahead(self.ahead());
        for (layer, rule) in self.rules.iter().enumerate().skip(here) {
            let Rule::Predicted { predictor, ahead, threshold, scores: min_scores, .. } = rule else { continue };
            let scored = if *ahead == 0 { scored.own } else { scored.ahead };
            if here + ahead != layer || scored {
                continue;
            }
            predictor.score(
                tools,
                layer,
                *ahead,
                residual,
                n,
                predicted.scores_mut(layer, n * tools.model.config.widest_ffn()),
            );
            let Predicted { scores, selections } = &mut *predicted;
            let scores = &scores[layer % scores.len()];
            match (cache, min_scores.shared()) {
                (Some(cache), None) => {
                    let table = &cache.layers[layer].table;
                    selections[layer].reaching(scores, n, |neuron| min_scores[table.location(neuron).tier()]);
                }
                // A pass in which the device has no part: the balance between both is not about it.
                (None, None) => {
                    let table = predictor.calibration(layer, *ahead).expect("looked at when it was made");
                    let least = table.score_at(*threshold);
                    selections[layer].reaching(scores, n, |_| least);
                }
                // Without a device everything is the host's.
                _ => selections[layer].reaching(scores, n, |_| min_scores[Tier::Host]),
            }
        }
    }
}

/// What is foreseen of a layer whose turn has not come, so that what it needs can be brought in time: nothing is computed by it.
pub struct Foresight {
    predictor: Arc<dyn Predictor>,
    ahead: usize,
    scores: Vec<f32>,
    selection: Selection,
    /// The layer that `selection` is of; `None` before the first, and behind the last.
    layer: Option<usize>,
}

impl Foresight {
    /// By this predictor, which looks so many layers ahead.
    pub fn new(predictor: Arc<dyn Predictor>, ahead: usize) -> Foresight {
        Foresight { predictor, ahead, scores: Vec::new(), selection: Selection::default(), layer: None }
    }

    /// Number of layers that are looked ahead.
    pub fn ahead(&self) -> usize {
        self.ahead
    }

    /// Foresees what the layer `ahead` of layer `here` will compute, from the residual after the attention of layer `here`, `[n, hidden]`,
    /// or by what was `predicted` for it there already. n is at most [`crate::cpu::MAX_COLUMNS`].
    pub fn look(
        &mut self,
        tools: &mut Tools<'_>,
        sparsity: &Sparsity,
        here: usize,
        (residual, n): (&[f32], usize),
        predicted: &Predicted,
    ) {
        let layer = here + self.ahead;
        self.layer = None;
        let Some(Rule::Predicted { threshold, ahead, .. }) = sparsity.rules.get(layer) else { return };
        if *ahead == self.ahead {
            self.selection.neurons.clone_from(&predicted.selections[layer].neurons);
            self.layer = Some(layer);
            return;
        }
        let Some(table) = self.predictor.calibration(layer, self.ahead) else { return };
        self.scores.resize(n * tools.model.config.widest_ffn(), 0.0);
        self.predictor.score(tools, layer, self.ahead, residual, n, &mut self.scores);
        let least = table.score_at(*threshold);
        self.selection.reaching(&self.scores, n, |_| least);
        self.layer = Some(layer);
    }

    /// As [`Foresight::look`], for a mixture: the experts that the later layer's router would choose now. None for a prompt's chunk, which
    /// needs nearly all of them.
    pub fn look_at_experts(&mut self, tools: &mut Tools<'_>, here: usize, (residual, n): (&[f32], usize)) {
        let (layer, config) = (here + self.ahead, &tools.model.config);
        self.layer = None;
        if layer >= config.layers().len() || n > crate::cpu::MAX_COLUMNS {
            return;
        }
        self.scores.resize(n * config.clusters(), 0.0);
        self.predictor.score(tools, layer, self.ahead, residual, n, &mut self.scores);
        let least = self.predictor.threshold(layer, self.ahead);
        self.selection.reaching(&self.scores, n, |_| least);
        self.layer = Some(layer);
    }

    /// The layer that was foreseen last and its neurons, ascending; once.
    pub fn take(&mut self) -> Option<(usize, &[StoreId])> {
        Some((self.layer.take()?, &self.selection.neurons))
    }
}

impl Selection {
    /// Has no neurons, and room for so many: nothing is allocated later.
    pub(super) fn clear(&mut self, room: usize) {
        self.neurons.clear();
        self.masks.clear();
        self.neurons.reserve(room);
        self.masks.reserve(room);
    }

    /// Becomes the neurons that some column wants; `masks` is `[ffn]`.
    pub(super) fn set_masks(&mut self, masks: &[u32]) {
        self.clear(masks.len());
        for (neuron, &mask) in masks.iter().enumerate().filter(|(_, mask)| **mask != 0) {
            self.neurons.push(StoreId(neuron as u32));
            self.masks.push(mask);
        }
    }

    /// Becomes the neurons whose score reaches their `min_score` in some column; `scores` is `[n, ffn]`.
    fn reaching(&mut self, scores: &[f32], n: usize, min_score: impl Fn(StoreId) -> f32) {
        let ffn = scores.len() / n;
        // Written without branches: which neurons fire is hard to guess.
        self.neurons.resize(ffn, StoreId(0));
        self.masks.resize(ffn, 0);
        let mut len = 0;
        let mut put = |neuron: usize, mask: u32| {
            self.neurons[len] = StoreId(neuron as u32);
            self.masks[len] = mask;
            len += usize::from(mask != 0);
        };
        if n == 1 {
            scores
                .iter()
                .enumerate()
                .for_each(|(neuron, &score)| put(neuron, u32::from(score >= min_score(StoreId(neuron as u32)))));
        } else {
            for neuron in 0..ffn {
                let at_least = min_score(StoreId(neuron as u32));
                put(neuron, (0..n).fold(0, |mask, b| mask | u32::from(scores[b * ffn + neuron] >= at_least) << b));
            }
        }
        self.neurons.truncate(len);
        self.masks.truncate(len);
    }

    /// Neurons times columns that are computed.
    pub fn pairs(&self) -> u64 {
        self.masks.iter().map(|m| m.count_ones() as u64).sum()
    }
}
