//! Which neurons of the chosen experts fire, where a trained network says which may: only their gates are read. These are the two levels of
//! PowerInfer-2 (section 4.1.2): the router chooses experts, the network neurons inside them.
//!
//! One parallel call: the scores of some neurons of an expert, and the gates of those whose score is high enough, in pieces that depend on
//! nothing but the expert's size.

use super::ahead;
use super::chosen::{Chosen, Scorer};
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, Kernels, MAX_COLUMNS, Rows, ThreadPool};
use crate::model::config::ModelConfig;

/// Neurons of an expert that a task scores: the first gates of each are waited for, so it has some tens of them.
const PIECE: usize = 384;

/// How many neurons of a piece fire for some token, how many may, and for how many tokens, all together.
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

impl ScoreBuffers {
    /// Fills `lists` by what `scorer` says. `input` is what each group's gates read. Returns for how many pairs of neuron and token a
    /// gate was computed.
    pub fn list<'i>(
        &mut self,
        pool: &mut ThreadPool,
        (kernels, config): (&Kernels, &ModelConfig),
        (chosen, scorer): (&Chosen<'_>, &Scorer<'_>),
        input: &(dyn Fn(usize) -> &'i Columns + Sync),
        lists: Lists<'_>,
    ) -> u64 {
        let (ffn, groups) = (config.ffn, chosen.groups);
        let each = ffn.div_ceil(PIECE);
        let distinct = self.take(chosen, scorer);
        let ScoreBuffers { columns, found, .. } = self;
        found.clear();
        found.reserve(each * chosen.tokens.len());
        found.resize(each * groups.len(), Found::default());
        let Lists { neurons, masks, counts, gates, products } = lists;
        let (parts, out) = (Parts::new(found), Parts::new(products));
        let (lists, columns) = ((Parts::new(neurons), Parts::new(masks)), &*columns);
        pool.run(groups.len() * each, |_, task| {
            let (number, piece) = (task / each, task % each);
            let first = piece * PIECE;
            let range = first..ffn.min(first + PIECE);
            let group = &groups[number];
            let at = number * ffn + range.start..number * ffn + range.end;
            // SAFETY: each task has its own neurons of its group.
            let (neurons, masks, found) =
                unsafe { (lists.0.part(at.clone()), lists.1.part(at), &mut parts.part(task..task + 1)[0]) };
            // SAFETY: the gates of these neurons are written, and as scores the ups of no others, for the group's tokens alone.
            let row = |token: usize, of: usize| unsafe {
                let start = (group.first + token) * 2 * ffn + of * ffn;
                out.part(start + range.start..start + range.end)
            };
            if let Some(outer) = scorer.network.outer() {
                let columns = &columns[number.min(distinct - 1)];
                let rows = outer.rows_from(group.expert * ffn + first);
                let to = out.start().wrapping_add(group.first * 2 * ffn + ffn + first);
                // SAFETY: the rows are inside the matrix; `kernels` are for this machine; the scores are this task's own, as above.
                unsafe { kernels.products(outer.quant, rows, range.len(), columns, to, 2 * ffn) };
            } else {
                (0..group.tokens).for_each(|token| row(token, 1).fill(0.0));
            }
            let bias = &scorer.network.bias[group.expert * ffn..][range.clone()];
            masks.fill(0);
            for token in 0..group.tokens {
                for ((mask, score), bias) in masks.iter_mut().zip(row(token, 1)).zip(bias) {
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
            chosen.arrival.wait(number, 0);
            let gate = &chosen.expert(group).input.parts()[0];
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
                    row(token, 0)[neuron] = product;
                    mask |= (masks[i] >> token & u32::from(config.activation.apply(product) != 0.0)) << token;
                }
                (neurons[found.fired], masks[found.fired]) = ((first + neuron) as u32, mask);
                found.fired += usize::from(mask != 0);
            }
        });
        let mut pairs = 0;
        for (number, found) in found.chunks_exact(each).enumerate() {
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
    fn take(&mut self, chosen: &Chosen<'_>, scorer: &Scorer<'_>) -> usize {
        let Some(outer) = scorer.network.outer() else { return 1 };
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
