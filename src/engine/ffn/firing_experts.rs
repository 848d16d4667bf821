//! Experts whose `down` is stored by neuron: of the experts that the router has chosen, up and down are read of those neurons only that
//! fire. These are the two levels of PowerInfer-2 (section 4.1.2): the router chooses experts, the gates choose neurons inside them.
//!
//! Two parallel calls after the gates: which neurons of each expert fire, and their up and down rows, in units that depend on nothing but
//! how many there are. In a prompt's chunk most neurons fire for one of an expert's tokens: such an expert is computed whole, as
//! [`super::scaled_experts`] does, or with more tokens than row kernels take as a chunk's FFN is.

use super::ahead;
use super::chosen::{Chosen, tokens_of};
use super::compute::Compute;
use super::many;
use super::neurons::Downs;
use super::predicted_experts::{Lists, OnDevice, ScoreBuffers};
use super::scaled_experts::ScaledBuffers;
use super::work::activate_gated;
use crate::cpu::aligned::{Aligned, LINE};
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, Kernels, MAX_COLUMNS, Rows, ThreadPool};
use crate::engine::routing::{Group, Routed};
use crate::formats::rows;
use crate::host_cache::units_of;
use crate::model::block::BlockPart;
use crate::model::config::ModelConfig;
use crate::model::{FfnMatrices, Matrix};

/// Units of an expert at most. Few, because an expert is one of several, and each unit has a buffer that is written and added.
const MAX_UNITS: usize = 16;
/// Units of all experts of a prompt's chunk, about: it has many experts, each with outputs for many tokens. With 16 of each they took 100 MiB.
const CHUNK_UNITS: usize = 64;

/// What experts by neuron work with.
#[derive(Default)]
pub struct FiringBuffers {
    /// Neurons that fire for some token, ascending, and a bit for each token: of the group at place i from `i * ffn` on.
    neurons: Vec<u32>,
    masks: Vec<u32>,
    /// How many there are of each group, but for those that are computed whole.
    counts: Vec<usize>,
    /// How many gates of each group were computed.
    gates: Vec<usize>,
    scores: ScoreBuffers,
    units: Vec<Unit>,
    /// Outputs of the units, one after the other, `[tokens of the group, hidden]` each.
    outputs: Aligned,
    /// Of a group with many tokens: what `down` reads, and what it gives, `[tokens, hidden]`.
    columns: Columns,
    product: Vec<f32>,
    /// Of groups with some tokens.
    scaled: ScaledBuffers,
}

/// Some of the neurons of an expert that fire.
#[derive(Clone, Copy)]
struct Unit {
    group: usize,
    /// First and last but one of them, in the group's list.
    first: usize,
    end: usize,
    /// Where its output begins.
    at: usize,
}

/// What is needed to compute experts whose gates are known.
pub(super) struct Firing<'a, 'c> {
    pub kernels: &'a Kernels,
    pub config: &'a ModelConfig,
    pub chosen: &'a Chosen<'c>,
    /// Whether the tokens are a prompt's chunk.
    pub is_chunk: bool,
    /// Gates of each group's tokens and, of groups with many, ups: `[tokens of all groups, 2 ffn]`.
    pub products: &'a [f32],
    /// `[tokens of all groups, ffn]`, workspace.
    pub activations: &'a mut [f32],
}

impl FiringBuffers {
    /// Lists the neurons of each group that fire, by `products`, whose gates are known. In a prompt's chunk it chooses which groups are computed
    /// whole instead.
    pub(super) fn list(
        &mut self,
        Compute { pool, kernels, config, .. }: Compute<'_>,
        chosen: &Chosen<'_>,
        products: &[f32],
        is_chunk: bool,
    ) {
        let (ffn, groups) = (chosen.width(), chosen.groups);
        self.clear(groups.len(), ffn);
        let FiringBuffers { neurons, masks, counts, gates, scaled, .. } = self;
        gates.fill(ffn);
        let (neurons, masks, parts) = (Parts::new(neurons), Parts::new(masks), Parts::new(counts));
        pool.run(groups.len(), |_, number| {
            let group = &groups[number];
            if group.tokens > MAX_COLUMNS {
                return;
            }
            // SAFETY: each task has its own group.
            let (neurons, masks, count) = unsafe {
                let all = number * ffn..(number + 1) * ffn;
                (neurons.part(all.clone()), masks.part(all), &mut parts.part(number..number + 1)[0])
            };
            let products = &products[group.first * 2 * ffn..tokens_of(group).end * 2 * ffn];
            let act = config.activation;
            for neuron in 0..ffn {
                let fires = |token: usize| u32::from(act.apply(products[token * 2 * ffn + neuron]) != 0.0);
                let mask = (0..group.tokens).fold(0, |mask, token| mask | fires(token) << token);
                // Written without branches: which neurons fire is hard to guess.
                neurons[*count] = neuron as u32;
                masks[*count] = mask;
                *count += usize::from(mask != 0);
            }
        });
        scaled.choose(kernels, config, chosen, if is_chunk { counts } else { &mut [] });
    }

    /// The same for few tokens, whose gates are computed only where the network says that they may be active. Returns for how many pairs of
    /// neuron and token they were.
    pub(super) fn list_scored<'i>(
        &mut self,
        compute: Compute<'_>,
        chosen: &Chosen<'_>,
        input: &(dyn Fn(usize) -> &'i Columns + Sync),
        products: &mut [f32],
    ) -> u64 {
        self.clear(chosen.groups.len(), chosen.width());
        let (scores, lists) = self.lists(&compute, chosen, products);
        scores.list(compute, chosen, input, lists)
    }

    /// Lists the neurons of few tokens that may fire and lie on no device ([`ScoreBuffers::list_wanted`]).
    pub(super) fn list_wanted(
        &mut self,
        compute: Compute<'_>,
        chosen: &Chosen<'_>,
        on_device: OnDevice<'_>,
        products: &mut [f32],
    ) -> u64 {
        self.clear(chosen.groups.len(), chosen.width());
        let (scores, lists) = self.lists(&compute, chosen, products);
        scores.list_wanted(compute, chosen, on_device, lists)
    }

    /// Leaves of those the ones that fire.
    pub(super) fn list_firing<'i>(
        &mut self,
        compute: Compute<'_>,
        chosen: &Chosen<'_>,
        input: &(dyn Fn(usize) -> &'i Columns + Sync),
        products: &mut [f32],
    ) {
        let (scores, lists) = self.lists(&compute, chosen, products);
        scores.list_firing(compute, chosen, input, lists);
    }

    fn lists<'a>(
        &'a mut self,
        compute: &Compute<'_>,
        chosen: &Chosen<'_>,
        products: &'a mut [f32],
    ) -> (&'a mut ScoreBuffers, Lists<'a>) {
        let FiringBuffers { neurons, masks, counts, gates, scores, scaled, .. } = self;
        scaled.choose(compute.kernels, compute.config, chosen, &mut []);
        (scores, Lists { neurons, masks, counts, gates, products })
    }

    /// How many neurons [`FiringBuffers::list_wanted`] has listed.
    pub(super) fn listed(&self) -> usize {
        self.scores.listed()
    }

    /// The neurons of group `number` that it has found wanted, ascending, and a bit for each of its tokens: those that it has listed, and
    /// those of `on_device`, `[ffn]`.
    pub(super) fn wanted<'a>(
        &'a self,
        number: usize,
        ffn: usize,
        on_device: &'a [u32],
    ) -> impl Iterator<Item = (u32, u32)> + 'a {
        let of = number * ffn..(number + 1) * ffn;
        self.scores.wanted(number, (&self.neurons[of.clone()], &self.masks[of]), on_device)
    }

    /// Whether the neurons of group `number` are listed, and not all of them computed.
    pub(super) fn is_listed(&self, number: usize, group: &Group) -> bool {
        group.tokens <= MAX_COLUMNS && !self.is_scaled(number)
    }

    /// The listed neurons of group `number`, ascending, and a bit for each of its tokens to which they have added something.
    pub(super) fn fired(&self, number: usize, ffn: usize) -> impl Iterator<Item = (u32, u32)> {
        let of = number * ffn..number * ffn + self.counts[number];
        self.neurons[of.clone()].iter().copied().zip(self.masks[of].iter().copied())
    }

    /// Lists nothing, of so many groups.
    fn clear(&mut self, groups: usize, ffn: usize) {
        let FiringBuffers { neurons, masks, counts, gates, .. } = self;
        neurons.resize(neurons.len().max(groups * ffn), 0);
        masks.resize(masks.len().max(groups * ffn), 0);
        for numbers in [counts, gates] {
            numbers.clear();
            numbers.resize(groups, 0);
        }
    }

    /// Pairs of neuron and token that fire, of `groups` groups.
    pub(super) fn pairs(&self, groups: usize, ffn: usize) -> u64 {
        let of = |number: usize| &self.masks[number * ffn..number * ffn + self.counts[number]];
        (0..groups).flat_map(of).map(|mask| u64::from(mask.count_ones())).sum()
    }

    /// Whether the group is computed by [`super::scaled_experts`].
    pub(super) fn is_scaled(&self, number: usize) -> bool {
        self.scaled.has(number)
    }
}

impl Firing<'_, '_> {
    /// hidden += what the experts add, each times its weight for the token. Returns the bytes that were read.
    pub fn add<'i>(
        &mut self,
        mut compute: Compute<'_>,
        input: &(dyn Fn(usize) -> &'i Columns + Sync),
        buffers: &mut FiringBuffers,
        hidden: &mut [f32],
    ) -> u64 {
        self.cut(buffers);
        self.compute(compute.pool, input, buffers);
        if !buffers.scaled.is_empty() {
            buffers.scaled.compute(compute.pool, self.config, self.chosen, self.products);
        }
        // In the order of the groups: where experts come from disk, some of them at a time, the sums are the same.
        let (mut unit, mut bytes, mut added) = (0, 0, 0);
        for (number, group) in self.chosen.groups.iter().enumerate() {
            let expert = self.chosen.expert(group);
            if number >= added {
                added = buffers.scaled.add(compute.pool, self.chosen, hidden, self.config.hidden, number);
            }
            if number < added {
                bytes += expert.bytes();
                continue;
            }
            if group.tokens > MAX_COLUMNS {
                bytes += expert.bytes();
                self.add_dense(compute.again(), number, buffers, hidden);
                continue;
            }
            let mut rows = expert.parts().map(|matrix| matrix.row_bytes as u64);
            bytes += buffers.gates[number] as u64 * rows.next().expect("an expert has matrices");
            bytes += buffers.counts[number] as u64 * rows.sum::<u64>();
            while let Some(Unit { group: of, at, .. }) = buffers.units.get(unit).copied()
                && of == number
            {
                let output = &buffers.outputs[at..at + group.tokens * self.config.hidden];
                self.give(group, expert, output, hidden);
                unit += 1;
            }
        }
        bytes
    }

    /// Cuts the lists into units.
    fn cut(&self, buffers: &mut FiringBuffers) {
        let FiringBuffers { counts, units, outputs, .. } = buffers;
        units.clear();
        let most_units = match self.is_chunk {
            // By as many experts as a chunk has of all, not by those of them that are here now.
            true => {
                let experts = self.chosen.weights.experts.len().min(self.chosen.tokens.len());
                (CHUNK_UNITS / experts).clamp(1, MAX_UNITS)
            }
            false => MAX_UNITS,
        };
        let (mut at, mut most) = (0, 0);
        for (number, (group, &count)) in self.chosen.groups.iter().zip(&*counts).enumerate() {
            let expert = self.chosen.expert(group);
            let bytes = expert.parts().skip(1).map(|matrix| matrix.row_bytes).sum();
            let pieces_of = |neurons| units_of(neurons, bytes).min(most_units);
            let size = (group.tokens * self.config.hidden).next_multiple_of(LINE);
            // Taken for all neurons, so that longer lists later allocate nothing.
            most += size * pieces_of(self.chosen.width());
            let pieces = if count == 0 { 0 } else { pieces_of(count) };
            for piece in 0..pieces {
                let (first, end) = (piece * count / pieces, (piece + 1) * count / pieces);
                units.push(Unit { group: number, first, end, at });
                at += size;
            }
        }
        units.reserve(MAX_UNITS * counts.len());
        outputs.resize(outputs.len().max(if self.is_chunk { at } else { most }));
    }

    /// Computes the units' outputs.
    fn compute<'i>(
        &self,
        pool: &mut ThreadPool,
        input: &(dyn Fn(usize) -> &'i Columns + Sync),
        buffers: &mut FiringBuffers,
    ) {
        let FiringBuffers { neurons, masks, units, outputs, .. } = buffers;
        let (units, outputs, masks, ffn) = (&*units, Parts::new(outputs), Parts::new(masks), self.chosen.width());
        pool.run(units.len(), |_, number| {
            let unit = units[number];
            let group = &self.chosen.groups[unit.group];
            let part = unit.group * ffn + unit.first..unit.group * ffn + unit.end;
            // SAFETY: each unit has its own part, of both.
            let (out, masks) = unsafe {
                (outputs.part(unit.at..unit.at + group.tokens * self.config.hidden), masks.part(part.clone()))
            };
            out.fill(0.0);
            for matrix in 1..self.config.ffn_kind.rows() {
                self.chosen.arrival.wait(unit.group, matrix);
            }
            self.walk(group, &neurons[part], masks, input(unit.group), out);
        });
    }

    /// Adds to `out`, `[tokens, hidden]`, what these neurons of the group's expert add. Leaves in `masks` the tokens for which they add something.
    fn walk(&self, group: &Group, neurons: &[u32], masks: &mut [u32], x: &Columns, out: &mut [f32]) {
        let (n, c, expert) = (group.tokens, self.config, self.chosen.expert(group));
        let (ups, down) = (expert.input.parts().get(1), &expert.down);
        let ffn = self.chosen.width();
        let known = &self.products[group.first * 2 * ffn..];
        let tokens = self.chosen.tokens_of(group);
        let mut downs = Downs::new(self.kernels, part_of(down), c.hidden, n);
        let (mut products, mut a) = ([0f32; MAX_COLUMNS], [0f32; MAX_COLUMNS]);
        ups.into_iter().chain([down]).for_each(|rows| ahead::begin(self.kernels, rows, neurons, 0));
        for (i, (&neuron, mask)) in neurons.iter().zip(masks).enumerate() {
            let neuron = neuron as usize;
            if let Some(ups) = ups {
                let rows = Rows { ahead: ahead::bytes(neurons, i, ups), ..ups.rows_from(neuron) };
                // SAFETY: the row is inside the matrix; the kernel is for this machine; a group that is not dense has few tokens.
                unsafe { self.kernels.dot(ups.quant)(rows, 1, x, products.as_mut_ptr(), 1) };
            }
            let gates = known[neuron..].iter().step_by(2 * ffn);
            let (fires_for, mut adds) = (*mask, 0);
            for (b, (gate, Routed { weight, .. })) in gates.zip(tokens).enumerate() {
                let fires = fires_for >> b & 1 == 1;
                let value = if fires { c.ffn_kind.of_expert(c.activation, *gate, products[b]) } else { 0.0 };
                a[b] = weight * value;
                adds |= u32::from(a[b] != 0.0) << b;
            }
            *mask = adds;
            if adds != 0 {
                downs.add(down.row_ptr(neuron), ahead::bytes(neurons, i, down), &a[..n], out);
            }
        }
        downs.flush(out);
    }

    /// hidden += a group's expert, all of whose neurons are computed.
    fn add_dense(&mut self, compute: Compute<'_>, number: usize, buffers: &mut FiringBuffers, hidden: &mut [f32]) {
        let (group, c) = (&self.chosen.groups[number], self.config);
        let (expert, tokens, ffn) = (self.chosen.expert(group), tokens_of(group), self.chosen.width());
        let activations = &mut self.activations[tokens.start * ffn..tokens.end * ffn];
        let products = &self.products[tokens.start * 2 * ffn..tokens.end * 2 * ffn];
        let out = Parts::new(activations);
        compute.pool.run(group.tokens, |_, token| {
            // SAFETY: each task has its own token.
            let out = unsafe { out.part(token * ffn..(token + 1) * ffn) };
            let (gates, ups) = products[token * 2 * ffn..(token + 1) * 2 * ffn].split_at(ffn);
            activate_gated(c.ffn_kind, c.activation, gates, ups, out);
        });
        self.chosen.arrival.wait(number, c.ffn_kind.rows() - 1);
        buffers.product.clear();
        buffers.product.resize(group.tokens * c.hidden, 0.0);
        let row = |neuron: usize| expert.down.row(neuron);
        let FiringBuffers { columns, product, .. } = buffers;
        many::across(compute, expert.down.quant, row, (activations, group.tokens), columns, product);
        for (routed, product) in self.chosen.tokens_of(group).iter().zip(product.chunks_exact(c.hidden)) {
            let out = &mut hidden[routed.token * c.hidden..(routed.token + 1) * c.hidden];
            out.iter_mut().zip(product).for_each(|(out, product)| *out += routed.weight * product);
        }
    }

    /// hidden += a unit's output, in which each token's weight is.
    fn give(&self, group: &Group, expert: &FfnMatrices, output: &[f32], hidden: &mut [f32]) {
        let size = self.config.hidden;
        for (routed, output) in self.chosen.tokens_of(group).iter().zip(output.chunks_exact(size)) {
            rows::add_axpy(expert.down.quant, output, &mut hidden[routed.token * size..(routed.token + 1) * size]);
        }
    }
}

/// Rows of a matrix as a part of blocks that hold nothing else.
fn part_of(matrix: &Matrix) -> BlockPart {
    BlockPart { quant: matrix.quant, offset: 0, bytes: matrix.row_bytes }
}
