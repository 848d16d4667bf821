//! Which neurons an FFN computes, and how much it has read; with what all of its forms share.

use crate::exp::silu;
use crate::ids::StoreId;
use crate::model::config::{Activation, Ffn, ModelConfig};
use crate::model::ffn_weights::{FfnWeights, NeuronBlocks};
use crate::model::weights::Layer;
use crate::ops::math;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Neurons of a layer that are computed for every column, ascending.
#[derive(Clone, Copy)]
pub enum Neurons<'a> {
    /// All neurons; how many there are.
    All(usize),
    /// These.
    Some(&'a [StoreId]),
}

impl Neurons<'_> {
    pub(super) fn len(self) -> usize {
        match self {
            Neurons::All(ffn) => ffn,
            Neurons::Some(list) => list.len(),
        }
    }

    /// Id in the store of number `i`.
    pub(super) fn store_index(self, i: usize) -> usize {
        match self {
            Neurons::All(_) => i,
            Neurons::Some(list) => list[i].index(),
        }
    }

    /// Calls `see(numbers, id of the first)` for each run of neighbours in the store.
    pub(super) fn runs(self, numbers: Range<usize>, mut see: impl FnMut(Range<usize>, usize)) {
        let mut first = numbers.start;
        while first < numbers.end {
            let start = self.store_index(first);
            let mut end = first + 1;
            while end < numbers.end && self.store_index(end) == start + end - first {
                end += 1;
            }
            see(first..end, start);
            first = end;
        }
    }
}

/// Which neurons of a layer are computed for which column.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// The neurons, ascending.
    pub neurons: Vec<StoreId>,
    /// For each neuron, bit b: it is computed for column b.
    pub masks: Vec<u32>,
}

/// What [`super::ffn`] computes. All but the first two take at most [`MAX_COLUMNS`](crate::cpu::MAX_COLUMNS) columns.
#[derive(Clone, Copy)]
pub enum Work<'a> {
    /// Every neuron: reads every row, whatever the input.
    All,
    /// All rows of these neurons only, ascending; for more than [`MAX_COLUMNS`](crate::cpu::MAX_COLUMNS) columns.
    Some(&'a [StoreId]),
    /// These neurons; their up and down rows are read only if the gate is above the activation threshold for some column.
    Selected(&'a Selection),
    /// Gate pre-activations `[n, ffn]` of all neurons are given; up and down rows are read of those that fire.
    Gates(&'a [f32]),
}

/// Rows that were read, and what they gave. A plain FFN has no gates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Gate rows.
    pub gates: u64,
    /// Up rows.
    pub ups: u64,
    /// Down rows.
    pub downs: u64,
    /// Neurons times columns whose activation was not zero; not counted by a dense pass.
    pub active: u64,
}

/// Counts that several threads add to.
#[derive(Default)]
pub(super) struct SharedCounts([AtomicU64; 4]);

impl SharedCounts {
    pub(super) fn add(&self, counts: Counts) {
        let Counts { gates, ups, downs, active } = counts;
        for (sum, n) in self.0.iter().zip([gates, ups, downs, active]) {
            sum.fetch_add(n, Ordering::Relaxed);
        }
    }

    pub(super) fn sum(self) -> Counts {
        let [gates, ups, downs, active] = self.0.map(AtomicU64::into_inner);
        Counts { gates, ups, downs, active }
    }
}

impl Counts {
    /// All rows that were read.
    pub fn rows(&self) -> u64 {
        self.gates + self.ups + self.downs
    }

    /// Bytes of these rows, of the FFN with these weights; of whole matrices all rows were read.
    pub fn bytes(&self, weights: &FfnWeights) -> u64 {
        let FfnWeights::Neurons(NeuronBlocks { layout: block, .. }) = weights else { return weights.bytes() };
        let parts = [(self.gates, block.gate_or_up()), (self.ups, block.up()), (self.downs, block.down())];
        parts.into_iter().map(|(rows, part)| rows * part.bytes as u64).sum()
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.gates += other.gates;
        self.ups += other.ups;
        self.downs += other.downs;
        self.active += other.active;
    }
}

/// The activations of neurons from products of as many gates and ups; without gates those of ups stand in their place. SiLU, ReLU squared and what
/// gpt-oss has are loops of their own, which vectorise.
pub fn activate_gated(kind: Ffn, act: Activation, gates: &[f32], ups: &[f32], out: &mut [f32]) {
    let all = out.iter_mut().zip(gates).zip(ups);
    match (kind, act) {
        (Ffn::Gated, Activation::Silu) => {
            for ((out, &gate), &up) in all {
                let g = silu(gate);
                *out = if g == 0.0 { 0.0 } else { g * up };
            }
        }
        (Ffn::GatedClamped, Activation::ClampedSwish) => {
            for ((out, &gate), &up) in all {
                *out = Ffn::GatedClamped.activation(Activation::ClampedSwish, gate, up);
            }
        }
        (Ffn::Plain, Activation::Relu2) => all.for_each(|((out, &up), _)| *out = Activation::Relu2.apply(up)),
        _ => {
            for ((out, &gate), &up) in all {
                *out = kind.of_expert(act, gate, up);
            }
        }
    }
}

/// The counts of a pass that reads every row of so many neurons.
pub(super) fn rows_of(config: &ModelConfig, neurons: usize) -> Counts {
    let n = neurons as u64;
    Counts { gates: if config.ffn_kind == Ffn::Plain { 0 } else { n }, ups: n, downs: n, active: 0 }
}

/// hidden += the bias of down, if the layer has one.
pub(super) fn add_down_bias(layer: &Layer, hidden: &mut [f32]) {
    if !layer.down_bias.is_empty() {
        hidden.chunks_exact_mut(layer.down_bias.len()).for_each(|x| math::add(x, &layer.down_bias));
    }
}
