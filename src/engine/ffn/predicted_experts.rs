//! Which neurons of the chosen experts fire, where a trained network says which may: only their gates are read. These are the two levels of
//! PowerInfer-2 (section 4.1.2): the router chooses experts, the network neurons inside them.
//!
//! One parallel call: the scores of some neurons of an expert, and the gates of those whose score is high enough, in pieces that depend on
//! nothing but the expert's size.

use super::ahead;
use super::chosen::Chosen;
use super::compute::Compute;
use crate::cache::SlotTable;
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, Kernels, MAX_COLUMNS, Rows};
use crate::engine::routing::Group;
use crate::ids::StoreId;
use crate::model::config::ModelConfig;
use std::ops::Range;

/// Neurons of an expert that a task scores: the first gates of each are waited for, so it has some tens of them.
const PIECE: usize = 384;

/// How many neurons of a piece fire for some token, how many gates are computed here, and for how many pairs of neuron and token anywhere.
#[derive(Clone, Copy, Default)]
struct Found {
    fired: usize,
    listed: usize,
    pairs: u64,
}

/// What scoring works with.
#[derive(Default)]
pub(super) struct ScoreBuffers {
    /// Hidden values of each group's tokens; only the first where there is one token.
    columns: Vec<Columns>,
    values: Vec<f32>,
    found: Vec<Found>,
}

/// The neurons of each group that may fire, of whom those that do are listed.
pub(super) struct Lists<'a> {
    /// `[groups, ffn]` each.
    pub neurons: &'a mut [u32],
    pub masks: &'a mut [u32],
    /// How many fire, `[groups]`.
    pub counts: &'a mut [usize],
    /// How many gates were computed, `[groups]`.
    pub gates: &'a mut [usize],
    /// `[tokens of all groups, 2 ffn]`: the gates of those that were computed.
    pub products: &'a mut [f32],
}

/// Neurons that are not computed here because a device has them.
pub struct OnDevice<'a> {
    /// Where the layer's neurons lie.
    pub table: &'a SlotTable,
    /// Of each group's neurons that the device has, a bit for each token of the group for which it is to compute them; 0 for the others:
    /// `[groups, ffn]`.
    pub masks: &'a mut [u32],
}

impl ScoreBuffers {
    /// Fills `lists` by what the network says. `input` is what each group's gates read. Returns for how many pairs of neuron and token a
    /// gate was computed.
    pub fn list<'i>(
        &mut self,
        Compute { pool, kernels, config, .. }: Compute<'_>,
        chosen: &Chosen<'_>,
        input: &(dyn Fn(usize) -> &'i Columns + Sync),
        mut lists: Lists<'_>,
    ) -> u64 {
        let (distinct, pieces) = (self.take(chosen), chosen.width().div_ceil(PIECE));
        let (columns, of) = self.pieces(kernels, config, chosen, &mut lists);
        pool.run(pieces * chosen.groups.len(), |_, task| {
            of.may_fire(task, columns, distinct);
            of.fire(task, input);
        });
        self.join(chosen.width(), lists)
    }

    /// Lists the neurons that may fire, all of them without a network, but for those that a device has. Returns how many pairs of neuron and
    /// token may.
    pub fn list_wanted(
        &mut self,
        Compute { pool, kernels, config, .. }: Compute<'_>,
        chosen: &Chosen<'_>,
        on_device: OnDevice<'_>,
        mut lists: Lists<'_>,
    ) -> u64 {
        let (distinct, pieces) = (self.take(chosen), chosen.width().div_ceil(PIECE));
        let (columns, of) = self.pieces(kernels, config, chosen, &mut lists);
        let (table, device) = (on_device.table, Parts::new(on_device.masks));
        pool.run(pieces * chosen.groups.len(), |_, task| {
            of.may_fire(task, columns, distinct);
            // SAFETY: each task has its own piece.
            of.leave_to_device(task, table, unsafe { device.part(of.place(task)) });
        });
        self.found.iter().map(|found| found.pairs).sum()
    }

    /// Computes the gates of what [`ScoreBuffers::list_wanted`] has listed, and leaves what fires.
    pub fn list_firing<'i>(
        &mut self,
        Compute { pool, kernels, config, .. }: Compute<'_>,
        chosen: &Chosen<'_>,
        input: &(dyn Fn(usize) -> &'i Columns + Sync),
        mut lists: Lists<'_>,
    ) {
        let pieces = chosen.width().div_ceil(PIECE);
        let (_, of) = self.parts(kernels, config, chosen, &mut lists);
        pool.run(pieces * chosen.groups.len(), |_, task| of.fire(task, input));
        self.join(chosen.width(), lists);
    }

    /// How many neurons [`ScoreBuffers::list_wanted`] has listed.
    pub fn listed(&self) -> usize {
        self.found.iter().map(|found| found.listed).sum()
    }

    /// The neurons of group `number` that it has found wanted, ascending, and their masks: those of the group's list, and those of
    /// `on_device`, `[ffn]`.
    pub fn wanted<'a>(
        &'a self,
        number: usize,
        (neurons, masks): (&'a [u32], &'a [u32]),
        on_device: &'a [u32],
    ) -> impl Iterator<Item = (u32, u32)> + 'a {
        let each = on_device.len().div_ceil(PIECE);
        let found = &self.found[number * each..(number + 1) * each];
        on_device.chunks(PIECE).zip(found).enumerate().flat_map(move |(piece, (on_device, found))| {
            let first = piece * PIECE;
            let mut listed = neurons[first..].iter().zip(&masks[first..]).take(found.listed).peekable();
            (0..).zip(on_device).filter_map(move |(neuron, &there)| {
                let here = listed.next_if(|(listed, _)| **listed == neuron);
                let mask = here.map_or(there, |(_, mask)| *mask);
                (mask != 0).then_some((first as u32 + neuron, mask))
            })
        })
    }

    /// The pieces of all groups, of which nothing is known yet, and the hidden values as scores are made from.
    fn pieces<'a>(
        &'a mut self,
        kernels: &'a Kernels,
        config: &'a ModelConfig,
        chosen: &'a Chosen<'a>,
        lists: &mut Lists<'_>,
    ) -> (&'a [Columns], Pieces<'a>) {
        let pieces = chosen.width().div_ceil(PIECE);
        self.found.clear();
        self.found.reserve(pieces * chosen.tokens.len());
        self.found.resize(pieces * chosen.groups.len(), Found::default());
        self.parts(kernels, config, chosen, lists)
    }

    /// The pieces as they are.
    fn parts<'a>(
        &'a mut self,
        kernels: &'a Kernels,
        config: &'a ModelConfig,
        chosen: &'a Chosen<'a>,
        lists: &mut Lists<'_>,
    ) -> (&'a [Columns], Pieces<'a>) {
        let ScoreBuffers { columns, found, .. } = self;
        let Lists { neurons, masks, products, .. } = lists;
        let pieces = Pieces {
            kernels,
            config,
            chosen,
            ffn: chosen.width(),
            neurons: Parts::new(neurons),
            masks: Parts::new(masks),
            found: Parts::new(found),
            products: Parts::new(products),
        };
        (columns, pieces)
    }

    /// Puts the lists of each group's pieces together. Returns for how many pairs of neuron and token a gate was computed.
    fn join(&mut self, ffn: usize, lists: Lists<'_>) -> u64 {
        let each = ffn.div_ceil(PIECE);
        let Lists { neurons, masks, counts, gates, .. } = lists;
        let mut pairs = 0;
        for (number, found) in self.found.chunks_exact(each).enumerate() {
            for (piece, found) in found.iter().enumerate() {
                let (from, to) = (number * ffn + piece * PIECE, number * ffn + counts[number]);
                neurons.copy_within(from..from + found.fired, to);
                masks.copy_within(from..from + found.fired, to);
                counts[number] += found.fired;
                gates[number] += found.listed;
                pairs += found.pairs;
            }
        }
        pairs
    }

    /// Takes the hidden values of each group's tokens as the kernels read them. Returns how many groups have their own; the others read the last one's.
    fn take(&mut self, chosen: &Chosen<'_>) -> usize {
        let Some((scorer, outer)) = chosen.scorer.as_ref().and_then(|of| Some((of, of.network.outer()?))) else {
            return 1;
        };
        let count = if scorer.values.len() == outer.cols { 1 } else { chosen.groups.len() };
        let ScoreBuffers { columns, values, .. } = self;
        columns.resize_with(columns.len().max(count), Columns::default);
        for (columns, group) in columns.iter_mut().zip(chosen.groups).take(count) {
            values.clear();
            for routed in chosen.tokens_of(group) {
                values.extend_from_slice(&scorer.values[routed.token * outer.cols..(routed.token + 1) * outer.cols]);
            }
            columns.set_for(values, group.tokens, [outer.quant]);
        }
        count
    }
}

/// The neurons of all groups, in pieces, each of which is a task's.
struct Pieces<'a> {
    kernels: &'a Kernels,
    config: &'a ModelConfig,
    chosen: &'a Chosen<'a>,
    /// Neurons of an expert.
    ffn: usize,
    neurons: Parts<u32>,
    masks: Parts<u32>,
    found: Parts<Found>,
    products: Parts<f32>,
}

/// What a task has of its piece: the neurons and masks that it lists, counted from the piece's first neuron on, and how many there are.
type Piece<'a> = (&'a mut [u32], &'a mut [u32], &'a mut Found);

impl<'a> Pieces<'a> {
    /// The group of a task, and which of its expert's neurons are the task's.
    fn of(&self, task: usize) -> (usize, &'a Group, Range<usize>) {
        let (ffn, each) = (self.ffn, self.ffn.div_ceil(PIECE));
        let (number, first) = (task / each, task % each * PIECE);
        (number, &self.chosen.groups[number], first..ffn.min(first + PIECE))
    }

    /// Where the task's neurons stand among those of all groups.
    fn place(&self, task: usize) -> Range<usize> {
        let (number, _, range) = self.of(task);
        number * self.ffn + range.start..number * self.ffn + range.end
    }

    /// # Safety
    /// Only one thread has a task's piece.
    unsafe fn piece(&self, task: usize) -> Piece<'_> {
        let at = self.place(task);
        // SAFETY: the caller's promise.
        unsafe { (self.neurons.part(at.clone()), self.masks.part(at), &mut self.found.part(task..task + 1)[0]) }
    }

    /// Products of a token of a group with these neurons' gates (0) or, as scores, their ups (1).
    ///
    /// # Safety
    /// Only one thread has these neurons of the group.
    #[allow(clippy::mut_from_ref)]
    unsafe fn row(&self, group: &Group, range: &Range<usize>, token: usize, of: usize) -> &mut [f32] {
        let start = (2 * (group.first + token) + of) * self.ffn;
        // SAFETY: the caller's promise.
        unsafe { self.products.part(start + range.start..start + range.end) }
    }

    /// Lists the neurons of a piece whose score is high enough for some token; all of them where there is no network.
    fn may_fire(&self, task: usize, columns: &[Columns], distinct: usize) {
        let (number, group, range) = self.of(task);
        // SAFETY: each task has its own.
        let (neurons, masks, found) = unsafe { self.piece(task) };
        let Some(scorer) = &self.chosen.scorer else {
            neurons.iter_mut().enumerate().for_each(|(i, neuron)| *neuron = i as u32);
            masks.fill(u32::MAX >> (MAX_COLUMNS - group.tokens));
            *found = Found { fired: 0, listed: range.len(), pairs: (group.tokens * range.len()) as u64 };
            return;
        };
        let ffn = self.ffn;
        // SAFETY: as above; the ups of these neurons are not in use yet.
        let row = |token: usize| unsafe { self.row(group, &range, token, 1) };
        if let Some(outer) = scorer.network.outer() {
            let columns = &columns[number.min(distinct - 1)];
            let rows = outer.rows_from(group.expert * ffn + range.start);
            let to = self.products.start().wrapping_add(group.first * 2 * ffn + ffn + range.start);
            // SAFETY: the rows are inside the matrix; `kernels` are for this machine; the scores are this task's own, as above.
            unsafe { self.kernels.products(outer.quant, rows, range.len(), columns, to, 2 * ffn) };
        } else {
            (0..group.tokens).for_each(|token| row(token).fill(0.0));
        }
        let bias = &scorer.network.bias[group.expert * ffn..][range.clone()];
        masks.fill(0);
        for token in 0..group.tokens {
            for ((mask, score), bias) in masks.iter_mut().zip(row(token)).zip(bias) {
                *mask |= u32::from(*score + bias >= scorer.least) << token;
            }
        }
        for i in 0..range.len() {
            let mask = masks[i];
            // Written without branches: which neurons may fire is hard to guess.
            (neurons[found.listed], masks[found.listed]) = (i as u32, mask);
            found.listed += usize::from(mask != 0);
            found.pairs += u64::from(mask.count_ones());
        }
    }

    /// Takes those neurons of a piece's list away that lie on a device. `device` gets their masks, `[neurons of the piece]`.
    fn leave_to_device(&self, task: usize, table: &SlotTable, device: &mut [u32]) {
        let (_, group, range) = self.of(task);
        // SAFETY: each task has its own.
        let (neurons, masks, found) = unsafe { self.piece(task) };
        let first = group.expert * self.ffn + range.start;
        device.fill(0);
        let mut kept = 0;
        for i in 0..found.listed {
            let (neuron, mask) = (neurons[i], masks[i]);
            let is_there = table.location(StoreId::new(first + neuron as usize)).is_device();
            device[neuron as usize] = if is_there { mask } else { 0 };
            (neurons[kept], masks[kept]) = (neuron, mask);
            kept += usize::from(!is_there);
        }
        found.listed = kept;
    }

    /// Computes the gates of the listed neurons of a piece, and lists those that fire, counted from the expert's first neuron on.
    fn fire<'i>(&self, task: usize, input: &(dyn Fn(usize) -> &'i Columns + Sync)) {
        let (number, group, range) = self.of(task);
        // SAFETY: each task has its own.
        let (neurons, masks, found) = unsafe { self.piece(task) };
        let (kernels, first) = (self.kernels, range.start);
        self.chosen.arrival.wait(number, 0);
        let gate = &self.chosen.expert(group).input.parts()[0];
        let mut products = [0f32; MAX_COLUMNS];
        ahead::begin(kernels, gate, &neurons[..found.listed], first);
        for i in 0..found.listed {
            let neuron = neurons[i] as usize;
            let distance = ahead::bytes(&neurons[..found.listed], i, gate);
            let rows = Rows { ahead: distance, ..gate.rows_from(first + neuron) };
            // SAFETY: the row is inside the matrix; the kernel is for this machine; a group has at most MAX_COLUMNS tokens.
            unsafe { kernels.dot(gate.quant)(rows, 1, input(number), products.as_mut_ptr(), 1) };
            let mut mask = 0;
            for (token, &product) in products[..group.tokens].iter().enumerate() {
                // SAFETY: as above; gates are written here alone.
                unsafe { self.row(group, &range, token, 0)[neuron] = product };
                mask |= (masks[i] >> token & u32::from(self.config.activation.apply(product) != 0.0)) << token;
            }
            (neurons[found.fired], masks[found.fired]) = ((first + neuron) as u32, mask);
            found.fired += usize::from(mask != 0);
        }
    }
}
