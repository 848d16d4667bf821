//! Predicting on host and device: a layer from its own residual, and layers ahead of it. Scores that the device makes ahead stay there
//! until it chooses by them; those that the scheduler looks at come to the host with the exchange.

use super::migrator::Migrator;
use super::scorers::{Lookahead, Scorer, Scorers};
use super::state::Split;
use super::weights::norm;
use super::workspace::ExchangeLayout;
use crate::cache::PerTier;
use crate::device::{Call, Note, Select, SignScores, Stage, Stream, Then, View};
use crate::engine::ffn::Selection;
use crate::engine::forward::Pass;
use crate::engine::sparsity::Sparsity;
use crate::model::config::{ModelConfig, Norm as NormKind};
use crate::predictor::Tools;
use std::sync::Arc;

/// Whether the engine chooses the neurons of a layer by this prediction.
fn is_chosen_by(sparsity: &Sparsity, from: &Lookahead, layer: usize) -> bool {
    sparsity.predictor(layer).is_some_and(|(predictor, ahead)| Arc::ptr_eq(predictor, &from.0) && ahead == from.1)
}

impl Split {
    /// Whether scores of the device are copied to the host.
    pub(super) fn wants_scores(&self) -> bool {
        self.migrator.as_ref().is_some_and(|migrator| migrator.wants_scores())
    }

    /// Fills the selections of this layer and of those that are predicted from it: as the device has chosen, or by the host.
    pub(super) fn predict(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let Pass { model, pool, kernels, sparsity, buffers: b, probe, .. } = pass;
        let (c, n) = (&model.config, b.positions.len());
        let mut tools = Tools { model, pool, kernels, scratch: &mut b.scratch };
        // Places are made before anything is put there.
        b.predicted.look_ahead(self.begun.ahead.map_or(0, |later| later - l).max(sparsity.ahead()));
        sparsity.predict(&mut tools, l, &b.x, Some(&self.cache), self.begun.scored, &mut b.predicted);
        probe.lap(Stage::Predictor);
        self.device.note(Note::Host(Stage::Predictor));
        b.columns.set_for(&b.normed, n, model.layers[l].ffn.input_quants());
        b.predicted.selections.resize_with(c.layers().len(), Selection::default);
        if let Some(later) = self.begun.ahead {
            let count = n * c.width(later);
            b.predicted.scores_mut(later, count).copy_from_slice(bytemuck::cast_slice(&self.host.ahead[..count]));
        }
        if !self.begun.scored.own {
            return;
        }
        let layout = ExchangeLayout::new(n, c);
        b.predicted.selections[l].set_masks(&self.host.received[layout.masks()..][..c.width(l)]);
        if self.scorers.chooses(l) == Some(0) && self.wants_scores() {
            let count = n * c.width(l);
            let scores = b.predicted.scores_mut(l, count);
            scores.copy_from_slice(bytemuck::cast_slice(&self.host.received[layout.scores()..][..count]));
        }
    }

    /// Has the device choose among a layer's neurons, by scores that it makes now or has made some layers before. Returns whether it has
    /// the predictor.
    pub(super) fn choose(&mut self, c: &ModelConfig, l: usize, n: usize, min_scores: PerTier<f32>) -> bool {
        let Some(ahead) = self.scorers.chooses(l) else { return false };
        let layout = ExchangeLayout::new(n, c);
        let (masks, own) = (self.at(layout.masks()), self.at(layout.scores()));
        let scores = if ahead == 0 { own } else { self.scorers.scores(l, c.widest_ffn()) };
        if ahead == 0 {
            self.score(c, l, 0, n, scores);
        }
        let at = &self.cache.layers[l];
        let (bucket, slots, min_scores) = (at.bucket, at.table.slots().len(), min_scores.into_array());
        self.launch(Call::Select(Select { ffn: c.width(l), n, slots, min_scores, bucket, scores, masks }));
        true
    }

    /// Has the device score the later layers that are predicted from this one's residual. Returns whether it has scored the one whose
    /// neurons the engine chooses by that.
    pub(super) fn score_ahead(&mut self, c: &ModelConfig, l: usize, n: usize) -> bool {
        let (mut chooses, wanted) = (false, self.migrator.as_ref().and_then(|migrator| migrator.lookahead().cloned()));
        for ahead in self.scorers.aheads().filter(|ahead| l + ahead < c.layers().len()) {
            let chosen = self.scorers.chooses(l + ahead) == Some(ahead);
            let is_wanted = |from: &Lookahead| from.1 == ahead && self.scorers.get_as(l + ahead, from).is_some();
            if chosen || wanted.as_ref().is_some_and(is_wanted) {
                self.score(c, l + ahead, ahead, n, self.scorers.scores(l + ahead, c.widest_ffn()));
            }
            chooses |= chosen;
        }
        chooses
    }

    /// Has the device score a layer, from the residual `ahead` layers before, which is the current layer's.
    fn score(&mut self, c: &ModelConfig, l: usize, ahead: usize, n: usize, scores: View) {
        let (input, residual) = (self.at(0), self.at(ExchangeLayout::new(n, c).residual()));
        let x = self.workspace.partial.into();
        match self.scorers.get(l, ahead) {
            None => {}
            Some(Scorer::Sign { bits }) => {
                // The input of the current layer's FFN has its own norm.
                if ahead > 0 {
                    self.norm_into(c, l, self.weights.layers[l].ffn_norm, n, residual, x);
                }
                let x = if ahead > 0 { x } else { input };
                self.launch(Call::SignScores(SignScores { hidden: c.hidden, ffn: c.width(l), n, bits, x, scores }));
            }
            Some(Scorer::Mlp { inner, outer, epsilon }) => {
                let room = self.scorers.inner.expect("made with the first network").into();
                self.launch(Call::Norm(norm(NormKind::Rms(epsilon), self.weights.plain, c.hidden, n, residual, x)));
                self.launch(Call::Linear(inner.call(n, x, room, Then::Relu)));
                self.launch(Call::Linear(outer.call(n, room, scores, Then::Store)));
            }
        }
    }

    /// Has the scores that the migrator wants copied out. Returns their layer.
    pub(super) fn send_ahead(&mut self, c: &ModelConfig, l: usize, n: usize) -> Option<usize> {
        let from = self.migrator.as_ref()?.lookahead()?;
        let later = Some(l + from.1).filter(|&later| later < c.layers().len())?;
        self.scorers.get_as(later, from)?;
        let (from, bytes) = (self.scorers.scores(later, c.widest_ffn()), n * c.width(later) * 4);
        let to = self.host.ahead.as_mut_ptr().cast();
        unsafe { self.device.copy_out(Stream::Compute, from.buffer, from.at, to, bytes) };
        Some(later)
    }
}

impl Scorers {
    /// Whether the host has the scores by which the neurons of layer `l` were chosen.
    pub(super) fn are_on_host(&self, migrator: &dyn Migrator, sparsity: &Sparsity, l: usize) -> bool {
        match self.chooses(l) {
            None => true,
            Some(0) => migrator.wants_scores(),
            // They came when they were made, if the migrator looks ahead by the same predictor.
            Some(_) => migrator.lookahead().is_some_and(|from| is_chosen_by(sparsity, from, l)),
        }
    }

    /// The layer, of so many, that `migrator` looks ahead to from layer `l`, if the host has its scores; those of `came` came with the exchange.
    pub(super) fn scored_for(
        &self,
        migrator: &dyn Migrator,
        sparsity: &Sparsity,
        l: usize,
        came: Option<usize>,
        layers: usize,
    ) -> Option<usize> {
        let from = migrator.lookahead()?;
        let later = Some(l + from.1).filter(|&later| later < layers)?;
        let on_host = is_chosen_by(sparsity, from, later) && self.get_as(later, from).is_none();
        (on_host || came == Some(later)).then_some(later)
    }
}
