//! The scheduler's side: predicts layers ahead, and lets [`Scheduler::step`] decide.

use super::learnt::Learner;
use super::message::{Position, SentDecision, SentObservation};
use super::options::{BackgroundOptions, Tune};
use crate::cache::Slot;
use crate::cpu::{Kernels, ThreadPool};
use crate::model::Model;
use crate::predictor::{Bytes, Calibration, Predictor, Scratch, Tools};
use crate::scheduler::{Decision, DeviceState, Fired, LayerObservation, Policy, Prompt, Scheduler, SchedulerOptions};
use std::sync::Arc;

/// Decides, from observations that come layer by layer.
pub struct Worker {
    model: Arc<Model>,
    /// What decides.
    pub scheduler: Scheduler,
    /// Counts for the next start.
    pub learner: Option<Learner>,
    policy: Policy,
    tune: Tune,
    ahead: usize,
    predictor: Option<Arc<dyn Predictor>>,
    kernels: Kernels,
    /// By layer, the calibration of scores from its own residual, where its thresholds are balanced.
    own_tables: Vec<Option<Bytes>>,
    /// By layer, the calibration of scores from the residual `ahead` layers before.
    tables: Vec<Option<Bytes>>,
    pool: ThreadPool,
    scratch: Scratch,
    /// By layer, what its slots hold, as far as that was told.
    slots: Vec<Vec<Slot>>,
    scores: Vec<f32>,
    /// Probabilities of the observed layer's neurons, times 255, `[ffn]`.
    own: Vec<u8>,
    /// The same of the layer `ahead` of it.
    probabilities: Vec<u8>,
}

impl Worker {
    /// Nothing seen yet.
    pub fn new(model: Arc<Model>, block_bytes: usize, options: BackgroundOptions) -> Worker {
        let (ffn, sequences, ahead) = (model.config.movable(), options.sequences.max(1), options.ahead.max(1));
        let own_tables = options.thresholds.iter().map(|own| own.as_ref().map(|(_, table)| table.bytes())).collect();
        let table = |layer| options.predictor.as_ref()?.calibration(layer, ahead).map(Calibration::bytes);
        let layers = model.config.layers().len();
        let tables = (0..layers).map(table).collect();
        let scheduler = Scheduler::new(SchedulerOptions {
            policy: options.policy,
            rules: (options.tune)(options.policy.rules()),
            loss: options.weight,
            ahead,
            predicts: options.predictor.is_some(),
            block_bytes,
            history: options.history,
            placed: options.placed,
            thresholds: options.thresholds.iter().map(|own| own.as_ref().map(|(own, _)| *own)).collect(),
            link_gb_s: options.link_gb_s,
            seed: 1,
        });
        Worker {
            model,
            scheduler,
            learner: None,
            policy: options.policy,
            tune: options.tune,
            ahead,
            predictor: options.predictor,
            kernels: options.kernels,
            own_tables,
            tables,
            pool: ThreadPool::new(1),
            scratch: Scratch::default(),
            slots: (0..layers).map(|_| Vec::with_capacity(ffn)).collect(),
            scores: vec![0.0; ffn * sequences],
            own: Vec::with_capacity(ffn),
            probabilities: Vec::with_capacity(ffn),
        }
    }

    /// Takes the predictor's memory, for all sequences, by predicting once. Later, observations that come too late are not predicted from, so
    /// that the first prediction may come at any time.
    pub fn warm(&mut self) {
        if let Some(target) = self.tables.iter().position(Option::is_some) {
            let sequences = self.scores.len() / self.model.config.movable();
            let residual = vec![0.0; sequences * self.model.config.hidden];
            self.predict(target, &SentObservation { residual, ..SentObservation::default() });
        }
    }

    /// Whether an observation comes too late for moves while the engine stands at `now`: the neurons of the layer that they would be for
    /// have been divided.
    pub fn is_late(&self, seen: &SentObservation, now: Position) -> bool {
        let is_before = seen.layer.index() + self.ahead < self.tables.len();
        is_before && !seen.residual.is_empty() && now >= seen.position.later(self.ahead)
    }

    /// Bytes of weights that are read to predict from an observation.
    pub fn predictor_bytes(&self, seen: &SentObservation) -> u64 {
        let target = seen.layer.index() + self.ahead;
        if seen.residual.is_empty() || !seen.ahead_scores.is_empty() {
            return 0;
        }
        let table = self.tables.get(target).and_then(Option::as_ref);
        self.predictor.as_ref().filter(|_| table.is_some()).map_or(0, |p| p.weight_bytes(target, self.ahead))
    }

    /// Changes to the policy that is now in force, if it is another.
    pub fn follow(&mut self, policy: Policy) {
        if policy != self.policy {
            self.policy = policy;
            self.scheduler.set_policy(policy, (self.tune)(policy.rules()));
        }
    }

    /// Takes an observation, while the engine stands at `now`, and calls `send` with what is decided. Returns whether it came too late for
    /// moves: then it only teaches.
    pub fn handle(
        &mut self,
        seen: &mut SentObservation,
        now: Position,
        mut send: impl FnMut(Position, Decision<'_>),
    ) -> bool {
        if let Some(learner) = &mut self.learner {
            learner.learnt.observe(seen);
        }
        let layer = seen.layer.index();
        let target = layer + self.ahead;
        seen.slots.tell(&mut self.slots[layer]);
        if let Some(ahead) = self.slots.get_mut(target) {
            seen.ahead_slots.tell(ahead);
        }
        let ahead = seen.position.later(self.ahead);
        let late = self.is_late(seen, now);
        let predicts = !late && !seen.residual.is_empty() && target < self.tables.len();
        let predicted = predicts && self.predict(target, seen);
        let own_table = self.own_tables[layer].as_ref().filter(|_| !seen.scores.is_empty());
        if let Some(table) = own_table {
            table.of(&seen.scores, &mut self.own);
        }
        let device = DeviceState {
            slots: &self.slots[layer],
            ahead_slots: self.slots.get(target).filter(|_| self.predictor.is_some()).map_or(&[], Vec::as_slice),
            in_flight: seen.in_flight,
            totals: seen.totals,
            times: seen.times,
        };
        let fired = seen.fired_layer.map(|layer| Fired {
            layer,
            neurons: &seen.fired.neurons,
            masks: &seen.fired.masks,
            sequences: &seen.fired_sequences,
        });
        let observation = LayerObservation {
            layer: seen.layer,
            sequences: &seen.sequences,
            begins: seen.begins,
            fired,
            missed: seen.audited.then_some(&seen.missed[..]),
            computed: &seen.computed,
            prompt: seen.prompt.map(|tokens| Prompt { tokens, counts: &seen.counts }),
            device: (!seen.residual.is_empty()).then_some(device),
            own: own_table.map(|_| (seen.own, &self.own[..])),
            ahead: predicted.then_some(&self.probabilities[..]),
        };
        // What is decided for this layer itself is for its next use.
        let next = seen.position.later(self.tables.len());
        self.scheduler.step(&observation, |decision| {
            send(if decision.layer == seen.layer { next } else { ahead }, decision);
        });
        late
    }

    /// Has what was learnt so far kept; `ends`: nothing more will come.
    pub fn keep_learnt(&mut self, ends: bool) {
        if let Some(Learner { learnt, keep }) = &mut self.learner {
            keep(learnt, ends);
        }
    }

    /// Predicts layer `target`, which is `ahead` layers after the one that is seen: by the scores that the engine has sent, else from the
    /// residual; for a batch, each neuron gets the highest of its scores. Returns whether there is a predictor for it.
    fn predict(&mut self, target: usize, seen: &SentObservation) -> bool {
        let Worker { model, predictor, kernels, tables, ahead, pool, scratch, scores, probabilities, .. } = self;
        let (Some(predictor), Some(table)) = (predictor, &tables[target]) else { return false };
        if !seen.ahead_scores.is_empty() {
            table.of(&seen.ahead_scores, probabilities);
            return true;
        }
        let residual = &seen.residual[..];
        let mut tools = Tools { model, pool, kernels, scratch };
        let (n, ffn) = (residual.len() / model.config.hidden, model.config.movable());
        scores.resize(n * ffn, 0.0);
        predictor.score(&mut tools, target, *ahead, residual, n, scores);
        table.of(highest(scores, ffn), probabilities);
        true
    }
}

/// Leaves in the first `ffn` of `scores`, `[n, ffn]`, the highest score of each neuron.
pub fn highest(scores: &mut [f32], ffn: usize) -> &[f32] {
    let (most, others) = scores.split_at_mut(ffn);
    for other in others.chunks_exact(ffn) {
        most.iter_mut().zip(other).for_each(|(most, other)| *most = most.max(*other));
    }
    most
}

/// Writes a decision over one that was sent earlier.
pub fn write(to: &mut SentDecision, until: Position, decision: &Decision<'_>) {
    (to.layer, to.until, to.thresholds) = (decision.layer, until, decision.thresholds);
    to.moves.clear();
    to.moves.extend_from_slice(decision.moves);
}
