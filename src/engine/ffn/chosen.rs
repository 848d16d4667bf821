//! Experts that are computed together, and when what they consist of can be read.

use crate::engine::routing::{Group, Routed, Routes};
use crate::model::{ExpertWeights, FfnMatrices};
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
}

impl<'a> Chosen<'a> {
    /// All that the router has chosen, all of them in memory.
    pub fn all(weights: &'a ExpertWeights, routes: &'a Routes) -> Chosen<'a> {
        Chosen { weights, groups: &routes.groups, tokens: &routes.tokens, arrival: &InMemory }
    }

    /// Whether neurons that do not fire are left out.
    pub(super) fn by_neuron(&self) -> bool {
        self.weights.experts[0].down_by_neuron
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
