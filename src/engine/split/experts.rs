//! A mixture's FFN on host and device: the host routes, the device computes the chosen experts that are in slots, and the CPU the others
//! at the same time. Nothing waits for an expert: one that is on its way is computed by the CPU. A prompt's chunk has experts copied,
//! too (`expert_chunk.rs`).

use super::pass::GraphSection;
use super::scheduling::{Beside, HostShare};
use super::state::{Begun, Split};
use super::weights::{expert_parts, norm};
use super::workspace::{ExchangeLayout, ExpertSplit};
use crate::cache::{Location, Tier};
use crate::cpu::MAX_COLUMNS;
use crate::device::{Add, Call, ExpertFfn, NONE, Note, Stage, Stream, View};
use crate::engine::ffn::{self, Chosen, Compute, ExpertsRead, Selection};
use crate::engine::forward::Pass;
use crate::engine::mixture::{foresee_experts, mixture, route};
use crate::engine::routing::Routed;
use crate::engine::sparsity::Wanted;
use crate::model::ExpertWeights;
use crate::model::config::{Activation, Ffn, ModelConfig};
use crate::model::layer::{Experts, RouterInput};

impl Split {
    /// Puts the copy of the residual on the stream, which the layer's router reads.
    pub(super) fn fetch_residual(&mut self, c: &ModelConfig, n: usize) {
        let residual = self.at(ExchangeLayout::new(n, c).residual());
        let to = &mut self.experts.layer_input[..n * c.hidden];
        let (to, bytes) = (to.as_mut_ptr().cast(), size_of_val(to));
        // SAFETY: looked at after an event behind the copy.
        unsafe { self.device.copy_out(Stream::Compute, residual.buffer, residual.at, to, bytes) };
    }

    /// Norms the FFN's input, has it come to the host, and chooses the experts of each token.
    pub(super) fn route(&mut self, pass: &mut Pass<'_, '_>, l: usize) -> Wanted {
        let (c, n) = (&pass.model.config, pass.n());
        let (experts, _) = mixture(pass, l);
        self.begun = Begun::default();
        self.note(Note::Compute(Some(Stage::Exchange)));
        self.commit(pass, l);
        self.begin_section(l, GraphSection::Exchange);
        self.norm_ffn_input(c, l);
        let (layout, to) = (ExchangeLayout::new(n, c), self.host.received.as_mut_ptr().cast());
        // A chunk does not need the residual.
        let numbers = if pass.is_chunk() { layout.masks() } else { layout.scores() };
        // SAFETY: looked at after the event that is recorded behind the copy.
        unsafe { self.device.copy_out(Stream::Compute, self.workspace.exchange, 0, to, numbers * 4) };
        let needs_residual = pass.is_chunk() && experts.reads == RouterInput::Own;
        if needs_residual {
            self.fetch_residual(c, n);
        }
        self.device.end_sequence();
        self.device.record(Stream::Compute, self.marks[l].exchanged);
        self.device.synchronize_event(self.marks[l].exchanged);
        if needs_residual || experts.reads == RouterInput::Layer {
            pass.buffers.x.copy_from_slice(bytemuck::cast_slice(&self.experts.layer_input[..n * c.hidden]));
        }
        if experts.reads == RouterInput::Layer {
            route(pass, l, experts);
        }
        if pass.is_chunk() {
            pass.probe.lap(Stage::Attention);
            pass.buffers.normed.copy_from_slice(bytemuck::cast_slice(&self.host.received[..n * c.hidden]));
        } else {
            self.receive(pass);
        }
        if experts.reads != RouterInput::Layer {
            route(pass, l, experts);
        }
        if !pass.is_chunk() {
            foresee_experts(pass, l);
        }
        pass.probe.lap(Stage::Predictor);
        self.note(Note::Host(Stage::Predictor));
        Wanted::Experts
    }

    /// The chosen experts of a layer: those in slots on the device, the others on the CPU meanwhile.
    pub(super) fn expert_ffn(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        match (pass.is_chunk(), pass.model.config.neurons_inside()) {
            (true, true) => return self.inside_chunk(pass, l),
            (true, false) => return self.expert_chunk(pass, l),
            (false, true) => return self.inside_ffn(pass, l),
            (false, false) => {}
        }
        let (n, c) = (pass.n(), &pass.model.config);
        let (experts, weights) = mixture(pass, l);
        self.divide_experts(pass, l, experts);
        self.begin_host_experts(pass, l);
        self.send_chosen(c, l, n);
        self.launch_shared(pass, l, weights);
        self.launch_experts(c, l, n, weights);
        pass.probe.show_experts(c, pass.buffers, l, experts);
        let pairs = self.experts.on_host.tokens.len() as u64;
        pass.buffers.predicted.selections.resize_with(c.layers().len(), Selection::default);
        pass.buffers.routes.select(&mut pass.buffers.predicted.selections[l]);
        self.cache.counters.computed[Tier::Host] += pairs;
        self.cache.layers[l].computed[Tier::Host] += pairs;
        let needed = pairs > 0;
        let shares = needed || pass.cached.is_some();
        let beside = Beside::Scheduling(Wanted::Experts);
        let read = if shares { self.host_experts(pass, l, weights, beside) } else { 0 };
        self.merge(c, l, n, needed);
        if !shares {
            self.schedule(pass, l, Wanted::Experts);
        }
        // Every expert that was chosen is active.
        self.fired.set(l, &pass.buffers.predicted.selections[l], &self.sequences);
        let read = ExpertsRead { bytes: read + weights.router_bytes(), ..ExpertsRead::default() };
        pass.probe.report.add_experts(l, c, pass.buffers.routes.tokens.len(), read);
    }

    /// Tells the scheduler how many tokens of a prompt's chunk have each expert.
    pub(super) fn teach(&mut self, pass: &Pass<'_, '_>, l: usize) {
        let (Some(migrator), ExpertSplit { counts, .. }) = (&mut self.migrator, &mut self.experts) else { return };
        pass.buffers.routes.counts(pass.model.config.clusters(), counts);
        let first = pass.buffers.positions[0];
        migrator.prompt(l, first.position, pass.n(), pass.caches[first.sequence].id(), counts);
    }

    /// Finds the slots of the chosen experts, those that are in none, and the weights of the shared one.
    pub(super) fn divide_experts(&mut self, pass: &Pass<'_, '_>, l: usize, experts: Experts) {
        let (n, routes, (_, weights)) = (pass.n(), &pass.buffers.routes, mixture(pass, l));
        let Split { experts: ExpertSplit { on_host, chosen, .. }, cache, device, .. } = self;
        let table = &cache.layers[l].table;
        let location = |expert: usize| table.location(crate::ids::StoreId::new(expert));
        on_host.take(routes, |expert| !location(expert).is_device());
        let (chosen, of_shared) = chosen.split_at_mut(ExpertFfn::chosen_words(n, experts.used));
        chosen.fill(NONE);
        if let Some(shared) = weights.shared.as_ref() {
            let normed = pass.buffers.normed.chunks_exact(pass.model.config.hidden);
            for (pair, normed) in of_shared.chunks_exact_mut(2).zip(normed) {
                pair.copy_from_slice(&[0, ffn::shared_weight(shared, normed).to_bits()]);
            }
        }
        for group in &routes.groups {
            let Location::Device(slot) = location(group.expert) else { continue };
            let tokens = &routes.tokens[group.first..group.first + group.tokens];
            choose(chosen, experts.used, tokens, ExpertFfn::choice(slot.0, group.expert));
        }
        device.note(Note::Host(Stage::Drive));
        let all = routes.groups.len();
        self.wanted[l] = all - on_host.groups.len();
        self.active[l] = (routes.tokens.len() - on_host.tokens.len()) as u64;
        self.current[l].neurons[Tier::Host] = on_host.groups.len() as u64;
        self.current[l].ffn_ns[Tier::Host] = 0;
    }

    /// Sends the device the slots and weights of the chosen experts and of the shared one, if it has any of them.
    pub(super) fn send_chosen(&mut self, c: &ModelConfig, l: usize, n: usize) {
        if self.cache.layers[l].table.slots().is_empty() && self.weights.layers[l].shared.is_none() {
            return;
        }
        let layout = ExchangeLayout::new(n, c);
        let chosen = &self.experts.chosen[..layout.choice];
        let (from, bytes, to) = (chosen.as_ptr().cast(), size_of_val(chosen), self.at(layout.masks()));
        // SAFETY: the words change again only after the layer's use, which ends with the stream being waited for.
        unsafe { self.device.copy_in(Stream::Compute, from, bytes, to.buffer, to.at) };
    }

    /// Has the device compute those of the chosen experts that are in slots.
    pub(super) fn launch_experts(&mut self, c: &ModelConfig, l: usize, n: usize, weights: &ExpertWeights) {
        let slots = self.cache.layers[l].table.slots().len();
        if slots > 0 {
            let all = self.expert_call(c, l, n, weights, slots);
            by_columns(all).for_each(|call| self.launch_ffn_call(l, Call::ExpertFfn(call)));
        }
    }

    /// Has the device compute the shared expert, if there is one, and add it to the residual.
    pub(super) fn launch_shared(&mut self, pass: &Pass<'_, '_>, l: usize, weights: &ExpertWeights) {
        let (c, n) = (&pass.model.config, pass.n());
        let Some(mut call) = self.shared_call(c, l, n, weights) else { return };
        self.note(Note::Compute(Some(Stage::Ffn)));
        self.begin_section(l, GraphSection::Shared);
        let (norms, beside) = (self.weights.layers[l].shared_norms, self.workspace.beside.into());
        if let Some([input, ..]) = norms {
            let residual = self.at(ExchangeLayout::new(n, c).residual());
            self.launch(Call::Norm(norm(c.norm, input, c.hidden, n, residual, beside)));
            call.input = beside;
        }
        by_columns(call).for_each(|call| self.launch(Call::ExpertFfn(call)));
        match norms {
            // It is added once the others' sum is normed, too.
            Some([_, output, _]) => {
                let made = self.workspace.output.into();
                self.launch(Call::Norm(norm(c.norm, output, c.hidden, n, made, beside)));
            }
            None => self.add_output(c, n),
        }
        self.device.end_sequence();
        self.note(Note::Compute(None));
    }

    /// Ends a layer's FFN, all parts of which are in the sum: norms it and adds it to the residual, where the layer does so; of a shared
    /// expert with norms, the sum of the others first.
    pub(super) fn end_sum(&mut self, c: &ModelConfig, l: usize) {
        if let Some([.., experts]) = self.weights.layers[l].shared_norms {
            let (n, sum, beside) = (self.rows.n, self.sum(c), self.workspace.beside.into());
            self.launch(Call::Norm(norm(c.norm, experts, c.hidden, n, sum, sum)));
            self.launch(Call::Add(Add { count: n * c.hidden, from: beside, to: sum, scale: 1.0 }));
        }
        self.add_sum(c, self.ffn_post_norm(l));
    }

    /// The shared expert of a layer for all tokens of a pass, as the one expert that each of them has, in the only slot.
    pub(super) fn shared_call(
        &self,
        c: &ModelConfig,
        l: usize,
        n: usize,
        weights: &ExpertWeights,
    ) -> Option<ExpertFfn> {
        let (shared, blocks) = (weights.shared.as_ref()?, self.weights.layers[l].shared?);
        let [gate, up] = shared.ffn.input_quants();
        let routed = self.expert_call(c, l, n, weights, 0);
        let chosen =
            View { at: routed.chosen.at + 4 * ExpertFfn::chosen_words(n, routed.used) as u64, ..routed.chosen };
        let (quants, ffn) = ([gate, up, shared.ffn.down.quant], shared.ffn.down.cols);
        let biases = [self.weights.plain[0]; 2];
        Some(ExpertFfn { quants, ffn, slots: 1, used: 1, blocks, biases, chosen, ..routed })
    }

    /// The device's part of the mixture of a layer with so many slots, for all tokens of a pass.
    pub(super) fn expert_call(
        &self,
        c: &ModelConfig,
        l: usize,
        n: usize,
        weights: &ExpertWeights,
        slots: usize,
    ) -> ExpertFfn {
        let (first, at) = (weights.any().expect("a layer with experts"), &self.cache.layers[l].blocks);
        let [gate, up] = first.input_quants();
        // ReLU squared of a product is that product's ReLU times the product: its own gate.
        let (kind, activation) = match c.ffn_kind {
            Ffn::Plain => (Ffn::Gated, Activation::Relu),
            kind => (kind, c.activation),
        };
        ExpertFfn {
            quants: [gate, up, first.down.quant],
            kind,
            activation,
            hidden: c.hidden,
            ffn: first.down.cols,
            slots,
            used: c.experts(l).map_or(0, |experts| experts.used),
            n,
            blocks: expert_parts(at),
            biases: self.weights.layers[l].expert_biases,
            chosen: self.at(ExchangeLayout::new(n, c).masks()),
            input: self.at(0),
            output: self.workspace.output.into(),
        }
    }

    /// Begins to read the experts that are left for the CPU, where they come from disk, and those that a later layer will need and that are
    /// not on the device.
    pub(super) fn begin_host_experts(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let Some(cached) = &mut pass.cached else { return };
        cached.begin_experts(l, &self.experts.on_host);
        cached.prefetch(|later, expert| self.cache.layers[later].table.location(expert).is_device());
    }

    /// Computes the experts that are left for the CPU, for the device to add. Returns the bytes of weights that were read.
    pub(super) fn host_experts(
        &mut self,
        pass: &mut Pass<'_, '_>,
        l: usize,
        weights: &ExpertWeights,
        beside: Beside,
    ) -> u64 {
        let n = pass.n();
        self.host_share(pass, l, beside, |pool, host| {
            let HostShare { model, kernels, normed, on_host: routes, tiles, experts, partial, cached, .. } = host;
            let c = &model.config;
            let mut compute = Compute { pool, kernels, config: c, tiles };
            let of_shared = weights.shared.as_ref().filter(|_| c.neurons_inside());
            if let Some(shared) = of_shared {
                ffn::shared_expert(compute.again(), shared, normed, &mut experts.shared, partial);
            }
            let read = match cached {
                Some(cached) => cached.experts(compute, l, (routes, None), normed, experts, partial),
                None => {
                    let chosen = Chosen::all(weights, routes, None);
                    ffn::experts(compute, &chosen, normed, experts, partial)
                }
            };
            // Of a few tokens reading an expert takes longer than computing it.
            let tokens = if n > MAX_COLUMNS { routes.tokens.len() } else { 0 };
            let operations = (2 * c.ffn_kind.rows() * c.hidden * c.width(l) * tokens) as u64;
            let bytes = read.bytes + of_shared.map_or(0, |_| weights.shared_bytes());
            ([bytes, operations], bytes)
        })
    }
}

/// Gives these tokens an expert in their chosen ones ([`ExpertFfn::chosen`]), `[n, used]` pairs: its word and the weight of each token.
pub(super) fn choose(chosen: &mut [u32], used: usize, tokens: &[Routed], choice: u32) {
    for routed in tokens {
        let mut places = chosen[2 * routed.token * used..].chunks_exact_mut(2);
        let free = places.find(|place| place[0] == NONE).expect("a token has so many experts at most");
        free.copy_from_slice(&[choice, routed.weight.to_bits()]);
    }
}

/// A call for all tokens of a pass as calls for as many of them as the kernel takes.
pub(super) fn by_columns(all: ExpertFfn) -> impl Iterator<Item = ExpertFfn> {
    (0..all.n).step_by(MAX_COLUMNS).map(move |first| {
        let mut call = ExpertFfn { n: MAX_COLUMNS.min(all.n - first), ..all };
        let (row, pairs) = ((first * all.hidden * 4) as u64, ExpertFfn::chosen_words(first, all.used) as u64 * 4);
        call.input.at += row;
        call.chosen.at += pairs;
        call.output.at += row;
        call
    })
}
