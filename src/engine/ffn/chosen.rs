//! Experts that are computed together, and when what they consist of can be read.

use crate::engine::routing::{Group, Routed, Routes};
use crate::model::{ExpertWeights, FfnMatrices};
use crate::predictor::NetworkWeights;
use std::ops::Range;

/// Where experts come from, whose matrices (gate, up and down, or up and down) may still be on their way.
pub trait Arrival: Sync {
    /// Whether a matrix of the expert of group number `group` of those at hand can be read now.
    fn is_here(&self, group: usize, matrix: usize) -> bool;

    /// Waits for it.
    fn wait(&self, group: usize, matrix: usize);
}

/// They are all in memory.
pub struct InMemory;

impl Arrival for InMemory {
    fn is_here(&self, _: usize, _: usize) -> bool {
        true
    }

    fn wait(&self, _: usize, _: usize) {}
}

/// A layer's network, and what it has made of the tokens of a pass.
#[derive(Clone, Copy)]
pub struct Scorer<'a> {
    /// It scores the neurons of all experts, one expert after the other.
    pub network: NetworkWeights<'a>,
    /// Hidden values of the tokens, `[n, rank]`.
    pub values: &'a [f32],
    /// The score from which on a neuron may fire.
    pub least: f32,
}

/// Experts that are computed together, each for all of its tokens.
#[derive(Clone, Copy)]
pub struct Chosen<'a> {
    /// The matrices of all of the layer's experts.
    pub weights: &'a ExpertWeights,
    /// Those that are computed: groups of a pass's [`Routes`], one after the other.
    pub groups: &'a [Group],
    /// The tokens of all of the pass's groups.
    pub tokens: &'a [Routed],
    /// When their matrices can be read.
    pub arrival: &'a dyn Arrival,
    /// Says which of their neurons may fire, where `down` is stored by neuron and the pass is no prompt's chunk; `None`: their gates do.
    pub scorer: Option<Scorer<'a>>,
}

impl<'a> Chosen<'a> {
    /// All that the router has chosen, all of them in memory.
    pub fn all(weights: &'a ExpertWeights, routes: &'a Routes, scorer: Option<Scorer<'a>>) -> Chosen<'a> {
        Chosen { weights, groups: &routes.groups, tokens: &routes.tokens, arrival: &InMemory, scorer }
    }

    /// Whether neurons that do not fire are left out.
    pub(super) fn by_neuron(&self) -> bool {
        self.weights.by_neuron()
    }

    /// Neurons of an expert.
    pub(super) fn width(&self) -> usize {
        self.weights.width()
    }

    pub(super) fn expert(&self, group: &Group) -> &'a FfnMatrices {
        &self.weights.experts[group.expert]
    }

    pub(super) fn tokens_of(&self, group: &Group) -> &'a [Routed] {
        &self.tokens[tokens_of(group)]
    }
}

/// Places of a group's tokens among those of all groups.
pub(super) fn tokens_of(group: &Group) -> Range<usize> {
    group.first..group.first + group.tokens
}
