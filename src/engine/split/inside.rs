//! A mixture's FFN on host and device where its experts are packed by neuron: the slots hold neurons of any expert, the host routes and finds
//! which neurons of the chosen experts tokens want, the device computes those in slots, and the CPU the others at the same time. These are
//! the two levels of PowerInfer-2 (section 4.1.2) over DynamicInfer's slots. A prompt's chunk has experts copied
//! ([`super::inside_chunk`]).

use super::scheduling::{Beside, HostShare};
use super::state::Split;
use super::workspace::ExchangeLayout;
use crate::cache::Tier;
use crate::device::{Call, Mixture, NONE, Note, SlotBlocks, SparseFfn, Stage, Stream};
use crate::engine::ffn::{self, Chosen, Compute, ExpertsRead, OnDevice, Scorer, Selection};
use crate::engine::forward::Pass;
use crate::engine::mixture::{look_inside, mixture};
use crate::engine::routing::Routed;
use crate::engine::sparsity::Wanted;
use crate::ids::StoreId;
use crate::model::ExpertWeights;
use crate::model::config::ModelConfig;

impl Split {
    /// The chosen experts of a layer, neuron by neuron.
    pub(super) fn inside_ffn(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let (n, c) = (pass.n(), &pass.model.config);
        let (experts, weights) = mixture(pass, l);
        pass.probe.show_experts(c, pass.buffers, l, experts);
        if weights.experts.is_empty() {
            self.experts.on_host.take(&pass.buffers.routes, |_| true);
            let needed = weights.shared.is_some();
            let beside = Beside::Scheduling(Wanted::Experts);
            let bytes = if needed { self.host_experts(pass, l, weights, beside) } else { 0 };
            (self.wanted[l], self.current[l].neurons[Tier::Host]) = (0, 0);
            self.merge(c, l, n, needed);
            if !needed {
                self.schedule(pass, l, Wanted::Experts);
            }
            return pass.probe.report.add_experts(l, c, 0, ExpertsRead { bytes, ..ExpertsRead::default() });
        }
        look_inside(pass, l);
        let pairs = self.divide_inside(pass, l, weights);
        let predicted = pass.sparsity.inside(l).is_some();
        pass.probe.show_inside(pass.buffers, l, c.ffn_kind, predicted);
        self.launch_inside(pass, l, weights);
        if pass.sparsity.inside(l).is_none() && self.migrator.is_some() {
            // Which neurons fire is not known yet, and that all of the experts' gates are computed says nothing of a neuron: those of the
            // pass before stand for them.
            pass.buffers.predicted.selections.resize_with(c.layers().len(), Selection::default);
            let (selection, before) = (&mut pass.buffers.predicted.selections[l], &self.fired_before[l]);
            selection.clear(c.neurons());
            selection.neurons.extend_from_slice(&before.neurons);
            selection.masks.extend_from_slice(&before.masks);
        }
        let (bytes, fired) = self.host_inside(pass, l, weights);
        self.cache.counters.computed[Tier::Host] += fired;
        self.cache.layers[l].computed[Tier::Host] += fired;
        self.merge(c, l, n, true);
        // Without a network those count that fire; what has fired on the device is counted when the pass is over.
        let neurons = if predicted { pairs } else { fired };
        let routed = pass.buffers.routes.tokens.len();
        let read = ExpertsRead { bytes: bytes + weights.router_bytes(), neurons, of: (routed * c.width(l)) as u64 };
        pass.probe.report.add_experts(l, c, routed, read);
    }

    /// Finds which neurons of the chosen experts some token wants, and writes down for the device those that it has ([`SparseFfn::input`]).
    /// Returns the pairs of neuron and token that are wanted.
    fn divide_inside(&mut self, pass: &mut Pass<'_, '_>, l: usize, weights: &ExpertWeights) -> u64 {
        let n = pass.n();
        let Pass { model, pool, kernels, sparsity, buffers: b, .. } = pass;
        let (c, groups) = (&model.config, b.routes.groups.len());
        let mixture = Mixture { experts: weights.experts.len(), rows: groups };
        let choice = &mut self.experts.chosen[..mixture.choice_words(n, c.neurons())];
        let (of_experts, masks) = choice.split_at_mut(mixture.masks(n));
        let (rows, by_token) = of_experts.split_at_mut(mixture.experts);
        rows.fill(NONE);
        for (row, group) in b.routes.groups.iter().enumerate() {
            rows[group.expert] = row as u32;
            by_token[group.expert * n..(group.expert + 1) * n].fill(0);
            for routed in &b.routes.tokens[group.first..group.first + group.tokens] {
                by_token[group.expert * n + routed.token] = routed.weight.to_bits();
            }
        }
        // Lent to the scorer, beside the rest.
        let values = std::mem::take(&mut b.experts.values);
        let scorer = sparsity.inside(l).map(|(network, least)| Scorer { network, values: &values, least });
        let chosen = Chosen::all(weights, &b.routes, scorer);
        let on_device = OnDevice { table: &self.cache.layers[l].table, masks };
        let compute = Compute { pool, kernels, config: c, tiles: &mut b.tiles };
        let pairs = ffn::experts_wanted(compute, &chosen, &b.normed, &mut b.experts, on_device);
        b.experts.values = values;
        if self.migrator.is_some() && sparsity.inside(l).is_some() {
            b.predicted.selections.resize_with(c.layers().len(), Selection::default);
            let selection = &mut b.predicted.selections[l];
            selection.clear(c.neurons());
            for (number, group) in b.routes.groups.iter().enumerate() {
                let tokens = &b.routes.tokens[group.first..group.first + group.tokens];
                let all = b.experts.wanted(number, c.width(l), &masks[number * c.width(l)..][..c.width(l)]);
                for (neuron, mask) in all {
                    selection.neurons.push(StoreId::new(group.expert * c.width(l) + neuron as usize));
                    selection.masks.push(in_pass(mask, tokens));
                }
            }
        }
        self.wanted[l] = masks.iter().filter(|mask| **mask != 0).count();
        if n > 1 {
            for (group, masks) in b.routes.groups.iter().zip(masks.chunks_exact_mut(c.width(l))) {
                let tokens = &b.routes.tokens[group.first..group.first + group.tokens];
                masks.iter_mut().filter(|mask| **mask != 0).for_each(|mask| *mask = in_pass(*mask, tokens));
            }
        }
        self.current[l].neurons[Tier::Host] = b.experts.listed() as u64;
        self.current[l].ffn_ns[Tier::Host] = 0;
        self.device.note(Note::Host(Stage::Drive));
        pairs
    }

    /// Sends the device which of its neurons are wanted, and has it compute them.
    fn launch_inside(&mut self, pass: &Pass<'_, '_>, l: usize, weights: &ExpertWeights) {
        let (c, n) = (&pass.model.config, pass.n());
        let slots = self.cache.layers[l].table.slots().len();
        if slots == 0 {
            return;
        }
        let call = self.inside_call(c, l, n, (weights, pass.buffers.routes.groups.len()), slots);
        let words = call.mixture.map_or(0, |mixture| mixture.choice_words(n, c.neurons()));
        let choice = &self.experts.chosen[..words];
        let (from, bytes, to) =
            (choice.as_ptr().cast(), size_of_val(choice), self.at(ExchangeLayout::new(n, c).masks()));
        // SAFETY: the words change again only after the layer's use, which ends with the stream being waited for.
        unsafe { self.device.copy_in(Stream::Compute, from, bytes, to.buffer, to.at) };
        self.launch_ffn_call(l, Call::SparseFfn(call));
    }

    /// The device's part of a layer with so many slots, of whose experts the tokens of a pass have so many.
    pub(super) fn inside_call(
        &self,
        c: &ModelConfig,
        l: usize,
        n: usize,
        (weights, rows): (&ExpertWeights, usize),
        slots: usize,
    ) -> SparseFfn {
        let at = &self.cache.layers[l];
        SparseFfn {
            layout: weights.neuron_layout(),
            kind: c.ffn_kind,
            activation: c.activation,
            activation_threshold: 0.0,
            hidden: c.hidden,
            ffn: c.neurons(),
            mixture: Some(Mixture { experts: weights.experts.len(), rows }),
            slots,
            n,
            blocks: SlotBlocks::apart(&at.blocks),
            bucket: at.bucket,
            up_bias: at.up_bias,
            input: self.workspace.exchange,
            output: self.workspace.output,
        }
    }

    /// Computes the wanted neurons that are in no slot, for the device to add. Returns the bytes of weights that were read, and how many pairs
    /// of neuron and token have fired.
    fn host_inside(&mut self, pass: &mut Pass<'_, '_>, l: usize, weights: &ExpertWeights) -> (u64, u64) {
        let bytes = self.host_share(pass, l, Beside::Scheduling(Wanted::Experts), |pool, host| {
            let HostShare { model, kernels, routes, normed, tiles, experts, partial, .. } = host;
            let chosen = Chosen::all(weights, routes, None);
            let mut compute = Compute { pool, kernels, config: &model.config, tiles };
            if let Some(shared) = &weights.shared {
                ffn::shared_expert(compute.again(), shared, normed, &mut experts.shared, partial);
            }
            let bytes = weights.shared_bytes() + ffn::experts_left(compute, &chosen, experts, partial);
            ([bytes, 0], bytes)
        });
        let Pass { model, sparsity, buffers: b, .. } = pass;
        let c = &model.config;
        let fired = &mut self.fired;
        fired.begin(l, &self.sequences);
        fired.kept = self.migrator.is_some() && sparsity.inside(l).is_none();
        let mut pairs = 0;
        for (number, group) in b.routes.groups.iter().enumerate() {
            let tokens = &b.routes.tokens[group.first..group.first + group.tokens];
            for (neuron, mask) in b.experts.fired(number, c.width(l)).filter(|(_, mask)| *mask != 0) {
                fired.neurons.neurons.push(StoreId::new(group.expert * c.width(l) + neuron as usize));
                fired.neurons.masks.push(in_pass(mask, tokens));
                pairs += u64::from(mask.count_ones());
            }
        }
        (bytes, pairs)
    }
}

/// A bit for each token of a group as a bit for each token of the pass.
fn in_pass(mask: u32, tokens: &[Routed]) -> u32 {
    tokens.iter().enumerate().fold(0, |all, (i, routed)| all | (mask >> i & 1) << routed.token)
}
