//! The phases of a pass of few tokens on host and device. Those of a prompt's chunk are the same but for the FFN ([`super::chunk`]).

use super::scheduling::{Beside, HostShare};
use super::state::{Begun, Split, frames};
use super::weights::{LayerWeights, norm};
use super::workspace::ExchangeLayout;
use crate::cache::Tier;
use crate::cpu::MAX_COLUMNS;
use crate::device::{Add, Buffer, Call, Note, SparseFfn, Stage, Stream, Then, View};
use crate::engine::embed::embed;
use crate::engine::ffn::{self, CachedTools, Compute, Counts, Work};
use crate::engine::forward::{Executor, Pass, Phase, Step};
use crate::engine::positions::TokenPosition;
use crate::engine::probe::WillCompute;
use crate::engine::sparsity::{Scored, Wanted};
use crate::model::config::ModelConfig;
use crate::model::layer::{Norms, RouterInput};
use crate::model::weights::Layer;
use crate::ops::gates::gates;
use crate::ops::math;

/// Parts of a layer that come onto the device's stream in every pass nearly unchanged, and are recorded once
/// ([`crate::device::Device::begin_sequence`]).
#[derive(Clone, Copy)]
pub(super) enum GraphSection {
    Attention,
    Exchange,
    Ffn,
    Merge,
    Shared,
}
/// How many of them a layer has.
const SECTIONS: usize = GraphSection::Shared as usize + 1;

impl Executor for Split {
    fn order(&mut self, pass: &mut Pass<'_, '_>) {
        self.plan_parts(pass);
    }

    fn turn_to(&mut self, _pass: &mut Pass<'_, '_>, part: usize) {
        self.set_part(part);
    }

    fn begin(&mut self, pass: &mut Pass<'_, '_>) {
        embed(pass);
        pass.probe.lap(Stage::Attention);
        self.sequences.clear();
        self.records = !pass.is_chunk();
        self.pass_began_ns = self.device.totals().clock_ns;
        if pass.is_chunk() {
            // Another text may begin.
            self.fired.layer = None;
        } else {
            self.sequences.extend(pass.buffers.positions.iter().map(|p| pass.caches[p.sequence].id()));
        }
        if pass.is_chunk() || self.sequences != self.fired.sequences {
            self.forget_before();
        }
        if let Some(streaming) = &mut self.attention_streaming {
            streaming.begin(&mut *self.device);
        }
        self.measure_fixed(pass);
        self.upload(pass);
    }

    fn begin_layer(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        if pass.model.config.experts(l).is_some_and(|experts| experts.reads == RouterInput::Layer) {
            self.fetch_residual(&pass.model.config, pass.n());
        }
        if pass.is_chunk() {
            return;
        }
        self.note(Note::Layer(l));
    }

    fn project(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let (c, n) = (&pass.model.config, self.rows.n);
        self.attends_late = !self.attends_at(c, l) && !pass.is_chunk() && c.layer(l).norms.parallel();
        let Split { attention_streaming, device, weights, .. } = self;
        let at = &mut weights.layers[l];
        let streamed = attention_streaming.as_mut().is_some_and(|streaming| streaming.wait(&mut **device, l, at));
        // What is copied lies now here and now there.
        if self.attends_at(c, l) && !streamed {
            self.begin_section(l, GraphSection::Attention);
        }
        let (input, residual) = (self.input(c), self.residual(c));
        self.note(Note::Compute(Some(Stage::Attention)));
        self.norm_into(c, l, self.weights.layers[l].attn_norm, n, residual, input);
        let qkv = self.rows_of(self.workspace.qkv, c.mixer(l).rows());
        for i in 0..self.weights.layers[l].qkv.len() {
            self.launch(Call::Linear(self.weights.layers[l].qkv[i].call(n, input, qkv, Then::Store)));
        }
        if self.attends_at(c, l) {
            return self.append(c, l);
        }
        self.fetch_qkv(c, l);
        self.begin_moves(pass, l);
    }

    fn attention(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let c = &pass.model.config;
        let attends = self.attends_at(c, l);
        if attends {
            self.attend(pass, l);
        } else if !self.attends_late {
            self.attend_on_host(pass, l);
        }
        if !c.layer(l).norms.parallel() {
            self.add_attention(c, l);
        }
        self.device.end_sequence();
        if attends {
            self.begin_moves(pass, l);
        }
    }

    fn select(&mut self, pass: &mut Pass<'_, '_>, l: usize) -> Wanted {
        if pass.model.config.experts(l).is_some() {
            return self.route(pass, l);
        }
        if pass.is_chunk() {
            self.begin_chunk_ffn(pass, l);
            return Wanted::All;
        }
        let wanted = pass.sparsity.wanted(l);
        self.begin_ffn(pass, l, wanted);
        if self.attends_late || !self.begun.alone {
            self.device.synchronize_event(self.marks[l].exchanged);
        }
        if self.attends_late {
            self.note(Note::Compute(Some(Stage::Attention)));
            self.attend_on_host(pass, l);
            self.add_attention(&pass.model.config, l);
        }
        if !self.begun.alone {
            self.receive(pass);
            self.predict(pass, l);
        }
        wanted
    }

    fn copied(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        if pass.is_chunk() && pass.model.config.experts(l).is_none() {
            self.copied_neurons(pass, l);
            self.stream_attention();
        }
    }

    fn ffn(&mut self, pass: &mut Pass<'_, '_>, l: usize, wanted: Wanted) {
        if wanted == Wanted::Experts {
            return self.expert_ffn(pass, l);
        }
        if pass.is_chunk() {
            return self.chunk_ffn(pass, l);
        }
        if !self.begun.device_ffn {
            self.launch_selected(pass, l, wanted);
        }
        pass.show(l, if wanted == Wanted::All { WillCompute::All } else { WillCompute::Selection });
        self.divide(pass, l, wanted);
        // Together: the device computes its part while the CPU computes its own, and the scheduler is shown the layer meanwhile.
        let (n, c, layer) = (pass.n(), &pass.model.config, &pass.model.layers[l]);
        let needed = !self.host_selection.neurons.is_empty() || !layer.down_bias.is_empty();
        let read = if needed { self.host_ffn(pass, l, wanted) } else { Counts::default() };
        self.merge(c, l, n, needed);
        if !needed {
            self.schedule(pass, l, wanted);
        }
        if wanted != Wanted::All {
            self.host_fired(l, if needed { pass.buffers.ffn.active() } else { &[] });
        }
        self.cache.counters.computed[Tier::Host] += read.active;
        self.cache.layers[l].computed[Tier::Host] += read.active;
        if self.chose_alone[l] {
            return;
        }
        let selection = (wanted != Wanted::All).then(|| &pass.buffers.predicted.selections[l]);
        pass.probe.report.add_layer((l, layer), c, n, wanted, selection, read);
    }

    fn end_layer(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        self.stream_attention();
        if pass.is_chunk() && l > 0 {
            self.read_back(pass, l - 1);
        }
    }

    fn logits(&mut self, pass: &mut Pass<'_, '_>) {
        if pass.is_chunk() {
            for part in 0..self.parts.count {
                self.set_part(part);
                self.read_back(pass, pass.model.layers.len() - 1);
            }
        }
        self.head(pass);
        self.device.synchronize(Stream::Compute);
        if !pass.is_chunk() {
            self.cache.counters.pass_ns += self.device.totals().clock_ns - self.pass_began_ns;
            self.device_fired();
            self.count(pass);
            self.read_back_all(pass);
        }
        if let Some(kv) = self.kv.as_mut().filter(|_| self.attends) {
            kv.mark_synced(&pass.buffers.positions, pass.caches);
        }
    }

    /// The host is a layer behind a chunk: what of it is still on the stream reads and writes the host's memory, which the next pass uses. What the
    /// device has made of the chunk's keys and values lies behind those that count, as on the host. Moves go on as between any two passes.
    fn leave(&mut self) {
        self.device.synchronize(Stream::Compute);
    }

    fn done(&mut self, pass: &mut Pass<'_, '_>, step: Step) {
        match step.phase {
            // What is put on the stream before the host waits for it counts as attention; a chunk's selection is none.
            Phase::Begin | Phase::BeginLayer | Phase::Project | Phase::Attention | Phase::EndLayer => {}
            // Its own laps stand where the host has seen the residual and where it has predicted.
            Phase::Select | Phase::Copied => {}
            Phase::Ffn if !pass.is_chunk() && self.begun.alone => pass.probe.lap(Stage::Attention),
            Phase::Ffn => pass.probe.lap(Stage::Ffn),
            Phase::Logits => pass.probe.lap(Stage::Head),
        }
    }
}

impl Split {
    /// Begins a section of the stream, up to `end_sequence`, that comes again in the next pass. The host has no part in it.
    pub(super) fn begin_section(&mut self, l: usize, section: GraphSection) {
        if self.records {
            self.device.begin_sequence(SECTIONS * l + section as usize);
        }
    }

    /// Uploads the residual, the tokens' positions, and the keys and values that the device lacks, if there is room for them.
    fn upload(&mut self, pass: &Pass<'_, '_>) {
        let (c, b) = (&pass.model.config, &pass.buffers);
        let (to, device) = (self.at(ExchangeLayout::new(b.positions.len(), c).residual()), &mut self.device);
        // SAFETY: here and below, what is copied in or out lives as long as the pass, and is touched again only after the compute
        // stream was synchronised, or an event that was recorded behind the copy.
        unsafe { device.copy_in(Stream::Compute, b.x.as_ptr().cast(), size_of_val(&b.x[..]), to.buffer, to.at) };
        self.attends = self.kv.as_ref().is_some_and(|kv| kv.takes(&b.positions, pass.caches));
        let Some(kv) = self.kv.as_mut().filter(|_| self.attends) else { return };
        kv.upload(&mut **device, &b.positions, pass.caches);
        let workspace = &self.workspace;
        let angles: &mut [f32] = bytemuck::cast_slice_mut(&mut self.host.angles);
        for (t, &TokenPosition { sequence, position }) in b.positions.iter().enumerate() {
            let index = kv.index_of(&pass.caches[sequence]) as u32;
            self.host.positions[2 * t..2 * t + 2].copy_from_slice(&[index, position as u32]);
        }
        let n = b.positions.len();
        unsafe {
            device.copy_in(Stream::Compute, self.host.positions.as_ptr().cast(), n * 8, workspace.positions, 0);
        }
        for (number, (frequencies, scale)) in self.weights.rotations.iter().enumerate() {
            let (dim, first) = (2 * frequencies.len(), number * self.angles_of_rotation);
            let angles = &mut angles[first..first + n * dim];
            for (pairs, token) in angles.chunks_exact_mut(dim).zip(&b.positions) {
                for (pair, &f) in pairs.chunks_exact_mut(2).zip(frequencies) {
                    let (cos, sin) = math::angle(token.position, f, *scale);
                    pair.copy_from_slice(&[cos, sin]);
                }
            }
            let (from, at) = (angles.as_ptr().cast(), 4 * first as u64);
            unsafe { device.copy_in(Stream::Compute, from, n * dim * 4, workspace.angles, at) };
        }
    }

    /// Norms the residual for the FFN, unless attention has the same norm and so has done it already.
    pub(super) fn norm_ffn_input(&mut self, c: &ModelConfig, l: usize) {
        let (n, input, residual) = (self.rows.n, self.input(c), self.residual(c));
        if c.layer(l).norms != Norms::ParallelShared {
            self.norm_into(c, l, self.weights.layers[l].ffn_norm, n, residual, input);
        }
        if c.layer(l).norms.after() {
            let sum = self.sum(c);
            self.launch(Call::Norm(norm(c.norm, self.weights.zeros, c.hidden, n, residual, sum)));
        }
    }

    /// What a layer's attention or FFN reads: the norm of `n` columns, or the columns themselves in layers that do not norm them.
    pub(super) fn norm_into(&mut self, c: &ModelConfig, l: usize, weights: [Buffer; 2], n: usize, x: View, out: View) {
        if c.layer(l).norms.before() {
            return self.launch(Call::Norm(norm(c.norm, weights, c.hidden, n, x, out)));
        }
        self.launch(Call::Norm(norm(c.norm, self.weights.zeros, c.hidden, n, x, out)));
        self.launch(Call::Add(Add { count: n * c.hidden, from: x, to: out, scale: 1.0 }));
    }

    /// Norms what attention or the FFN have made of the current part, where the layer does so, and adds it to the residual, which is then
    /// multiplied by a number: the other outputs are there already.
    pub(super) fn add_sum(&mut self, c: &ModelConfig, weights: Option<([Buffer; 2], f32)>) {
        let Some((weights, scale)) = weights else { return };
        let (n, sum, residual) = (self.rows.n, self.sum(c), self.residual(c));
        self.launch(Call::Norm(norm(c.norm, weights, c.hidden, n, sum, sum)));
        self.launch(Call::Add(Add { count: n * c.hidden, from: sum, to: residual, scale }));
    }

    /// The norm of a layer's FFN's output, where it has one, and what the residual behind the layer is multiplied by.
    pub(super) fn ffn_post_norm(&self, l: usize) -> Option<([Buffer; 2], f32)> {
        let LayerWeights { post_norms, output_scale, .. } = &self.weights.layers[l];
        post_norms.map(|[_, ffn]| (ffn, *output_scale))
    }

    /// Puts on the stream what the device can do of an FFN before the host has seen the residual: the norm, the scores if it has the
    /// predictor, the copy out of what the host needs, and its part if it knows which neurons are wanted.
    fn begin_ffn(&mut self, pass: &mut Pass<'_, '_>, l: usize, wanted: Wanted) {
        let (c, layer, n) = (&pass.model.config, &pass.model.layers[l], pass.n());
        let layout = ExchangeLayout::new(n, c);
        self.note(Note::Compute(Some(Stage::Exchange)));
        self.commit(pass, l);
        self.begin_section(l, GraphSection::Exchange);
        self.norm_ffn_input(c, l);
        let own = wanted == Wanted::Selected && self.choose(c, l, n, pass.sparsity.min_scores(l));
        let scored = Scored { own, ahead: self.score_ahead(c, l, n) };
        if wanted == Wanted::All {
            self.host.all_masks.fill(u32::MAX >> (MAX_COLUMNS - n));
            self.all.masks.copy_from_slice(&self.host.all_masks);
            self.send_masks(layout, true);
        }
        let device_ffn = scored.own || wanted == Wanted::All;
        let whole = device_ffn && self.cache.layers[l].table.residents() == c.width(l);
        let observed = pass.probe.observer.is_some() || self.migrator.is_some();
        let ahead = self.send_ahead(c, l, n);
        let host_predicts = pass.sparsity.looks_ahead(l) && !scored.ahead;
        let alone = whole && layer.down_bias.is_empty() && !observed && !host_predicts;
        self.begun = Begun { scored, ahead, device_ffn, alone };
        self.chose_alone[l] = alone && scored.own;
        if self.chose_alone[l] {
            self.fetch_chosen(l, layout);
        }
        if !self.begun.alone {
            let looks_on = observed || pass.sparsity.looks_ahead(l);
            let numbers = match (scored.own && self.wants_scores(), device_ffn && !looks_on) {
                (true, _) => layout.scores() + n * c.width(l),
                (false, true) => layout.residual(),
                (false, false) => layout.scores(),
            };
            let to = self.host.received.as_mut_ptr().cast();
            unsafe { self.device.copy_out(Stream::Compute, self.workspace.exchange, 0, to, numbers * 4) };
        }
        self.device.end_sequence();
        self.device.record(Stream::Compute, self.marks[l].exchanged);
        if c.layer(l).norms.parallel() && self.attends_at(c, l) {
            self.note(Note::Compute(Some(Stage::Attention)));
            self.add_attention(c, l);
        }
        if device_ffn {
            self.launch_ffn(pass, l, wanted);
        }
    }

    /// Takes over what the host needs of a layer, which has come: residual and normalised input.
    pub(super) fn receive(&mut self, pass: &mut Pass<'_, '_>) {
        pass.probe.lap(Stage::Attention);
        let (n, h, b) = (pass.n(), pass.model.config.hidden, &mut *pass.buffers);
        let residual = ExchangeLayout::new(n, &pass.model.config).residual();
        b.x.copy_from_slice(bytemuck::cast_slice(&self.host.received[residual..][..n * h]));
        b.normed.copy_from_slice(bytemuck::cast_slice(&self.host.received[..n * h]));
    }

    /// Sends the device the masks of the wanted neurons, which the host has found, and has it compute its part.
    fn launch_selected(&mut self, pass: &mut Pass<'_, '_>, l: usize, wanted: Wanted) {
        let Pass { model, pool, kernels, sparsity, buffers: b, cached, .. } = pass;
        let (c, layer, n) = (&model.config, &model.layers[l], b.positions.len());
        let selection = &mut b.predicted.selections[l];
        if wanted == Wanted::Gates {
            b.gates.resize(n * c.width(l), 0.0);
            match cached {
                Some(cached) => {
                    let compute = Compute { pool, kernels, config: c, tiles: &mut [] };
                    cached.gates(CachedTools { compute, layer: (l, layer), x: &b.columns }, &mut b.gates);
                }
                None => gates(pool, kernels, c, layer, &b.columns, &mut b.gates),
            }
            selection.fired(c, &b.gates, (n, c.width(l)), sparsity.activation_threshold(l));
            self.note(Note::Host(Stage::Predictor));
        }
        self.host.masks.fill(0);
        for (&neuron, &mask) in selection.neurons.iter().zip(&selection.masks) {
            self.host.masks[neuron.index()] = mask;
        }
        self.send_masks(ExchangeLayout::new(n, c), false);
        self.launch_ffn(pass, l, wanted);
    }

    /// Finds the wanted neurons that are in no slot, which the CPU computes.
    fn divide(&mut self, pass: &Pass<'_, '_>, l: usize, wanted: Wanted) {
        let Split { device, cache, host_selection, all, .. } = self;
        let selections = &pass.buffers.predicted.selections;
        // What the device has chosen alone is counted when the pass is over.
        let all = if wanted == Wanted::All || self.begun.alone { &*all } else { &selections[l] };
        host_selection.neurons.clear();
        host_selection.masks.clear();
        let table = &cache.layers[l].table;
        if !self.begun.alone {
            for (&neuron, &mask) in all.neurons.iter().zip(&all.masks).filter(|(n, _)| !table.location(**n).is_device())
            {
                host_selection.neurons.push(neuron);
                host_selection.masks.push(mask);
            }
            device.note(Note::Host(Stage::Drive));
        }
        self.wanted[l] = all.neurons.len() - host_selection.neurons.len();
        self.current[l].neurons[Tier::Host] = host_selection.neurons.len() as u64;
        self.current[l].ffn_ns[Tier::Host] = 0;
    }

    /// Begins the moves that the scheduler has decided, behind what the device has of the layer's attention, and outside of the recorded section: their
    /// copies, and the calls that start them, run beside attention.
    fn begin_moves(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let Some(migrator) = self.migrator.as_mut().filter(|_| !pass.is_chunk()) else { return };
        pass.probe.lap(Stage::Attention);
        migrator.apply(l, true, &mut *self.device, &mut self.cache, frames(&mut pass.cached), pass.sparsity);
        pass.probe.lap(Stage::Scheduler);
    }

    /// Computes the neurons that are in no slot, and the bias of down, for the device to add.
    fn host_ffn(&mut self, pass: &mut Pass<'_, '_>, l: usize, wanted: Wanted) -> Counts {
        let activation_threshold = threshold_for(pass.sparsity.activation_threshold(l), pass.wanted);
        self.host_share(pass, l, Beside::Scheduling(wanted), |pool, host| {
            let HostShare { model, kernels, columns, selection, ffn: buffers, partial, cached, .. } = host;
            let (c, layer, work) = (&model.config, &model.layers[l], Work::Selected(selection));
            let compute = Compute { pool, kernels, config: c, tiles: &mut [] };
            let read = match cached {
                Some(cached) => {
                    let tools = CachedTools { compute, layer: (l, layer), x: columns };
                    cached.ffn(tools, work, activation_threshold, buffers, partial)
                }
                None => ffn::ffn(compute, layer, columns, work, activation_threshold, buffers, partial),
            };
            ([read.bytes(&layer.ffn), 0], read)
        })
    }

    pub(super) fn send_masks(&mut self, layout: ExchangeLayout, all: bool) {
        let masks = if all { &self.host.all_masks } else { &self.host.masks };
        let (from, bytes, to) = (masks.as_ptr().cast(), size_of_val(&masks[..]), self.at(layout.masks()));
        unsafe { self.device.copy_in(Stream::Compute, from, bytes, to.buffer, to.at) };
    }

    /// The device's part of the FFN of a layer with so many slots.
    pub(super) fn ffn_call(
        &self,
        c: &ModelConfig,
        l: usize,
        n: usize,
        layer: &Layer,
        activation_threshold: f32,
        slots: usize,
    ) -> SparseFfn {
        let at = &self.cache.layers[l];
        SparseFfn {
            layout: *layer.block(),
            kind: c.ffn_kind,
            activation: c.activation,
            activation_threshold,
            hidden: c.hidden,
            ffn: c.width(l),
            mixture: None,
            slots,
            n,
            blocks: at.blocks[0].into(),
            bucket: at.bucket,
            up_bias: at.up_bias,
            input: self.workspace.exchange,
            output: self.workspace.output,
        }
    }

    /// Puts the device's part of a layer's FFN on its stream.
    fn launch_ffn(&mut self, pass: &Pass<'_, '_>, l: usize, wanted: Wanted) {
        let (c, layer, n) = (&pass.model.config, &pass.model.layers[l], pass.n());
        let slots = self.cache.layers[l].table.slots().len();
        if slots == 0 {
            return;
        }
        let activation_threshold = threshold_for(pass.sparsity.activation_threshold(l), wanted);
        let call = self.ffn_call(c, l, n, layer, activation_threshold, slots);
        self.launch_ffn_call(l, Call::SparseFfn(call));
    }

    /// Puts a layer's FFN on the device's stream, between its marks.
    pub(super) fn launch_ffn_call(&mut self, l: usize, call: Call) {
        self.note(Note::Compute(Some(Stage::Ffn)));
        self.device.record(Stream::Compute, self.marks[l].ffn[0]);
        self.begin_section(l, GraphSection::Ffn);
        self.launch(call);
        self.note(Note::Compute(None));
        self.device.end_sequence();
        self.device.record(Stream::Compute, self.marks[l].ffn[1]);
        self.cache.used(&mut *self.device, l);
    }

    /// Adds the parts of the FFN's output to the residual; `both` says whether the host has one.
    pub(super) fn merge(&mut self, c: &ModelConfig, l: usize, n: usize, both: bool) {
        self.note(Note::Compute(Some(Stage::Merge)));
        self.device.record(Stream::Compute, self.marks[l].merge[0]);
        self.begin_section(l, GraphSection::Merge);
        if both {
            self.add_partial(c);
        }
        if !self.cache.layers[l].table.slots().is_empty() {
            self.add_output(c, n);
        }
        self.end_sum(c, l);
        self.device.end_sequence();
        self.device.record(Stream::Compute, self.marks[l].merge[1]);
        // Of whole experts it is known.
        if self.wanted[l] > 0 && !c.has_whole_experts() {
            self.note(Note::Compute(None));
            self.fetch_fired(l, n, c.hidden);
        }
    }

    /// Adds the host's part of an FFN to the sum of its parts.
    pub(super) fn add_partial(&mut self, c: &ModelConfig) {
        let (count, partial) = (self.rows.n * c.hidden, self.rows_of(self.workspace.partial, c.hidden));
        let from = self.host.partial[self.rows.first * c.hidden..].as_ptr().cast();
        unsafe { self.device.copy_in(Stream::Compute, from, count * 4, partial.buffer, partial.at) };
        self.launch(Call::Add(Add { count, from: partial, to: self.sum(c), scale: 1.0 }));
    }

    /// Adds what the device's last FFN call has made to the sum of its parts.
    pub(super) fn add_output(&mut self, c: &ModelConfig, n: usize) {
        let (count, to) = (n * c.hidden, self.sum(c));
        self.launch(Call::Add(Add { count, from: self.workspace.output.into(), to, scale: 1.0 }));
    }

    /// Computes the logits of the tokens that are asked for.
    fn head(&mut self, pass: &mut Pass<'_, '_>) {
        let (c, b) = (&pass.model.config, &mut *pass.buffers);
        let (n, h) = (b.positions.len(), c.hidden);
        let residual = ExchangeLayout::new(n, c).residual();
        b.logits.resize(b.logit_rows.len() * c.vocab, 0.0);
        self.note(Note::Compute(Some(Stage::Head)));
        for (rows, logits) in b.logit_rows.chunks(MAX_COLUMNS).zip(b.logits.chunks_mut(MAX_COLUMNS * c.vocab)) {
            for (i, &row) in rows.iter().enumerate() {
                let (x, out) = (self.at(residual + row * h), self.at(i * h));
                self.launch(Call::Norm(norm(c.norm, self.weights.out_norm, h, 1, x, out)));
            }
            let out = self.workspace.logits;
            self.launch(Call::Linear(self.weights.head.call(rows.len(), self.at(0), out.into(), Then::Store)));
            let (to, bytes) = (logits.as_mut_ptr().cast(), size_of_val(logits));
            unsafe { self.device.copy_out(Stream::Compute, out, 0, to, bytes) };
        }
    }
}

/// |act(gate)| above which a neuron is active; a dense layer computes everything, whatever the magnitude.
fn threshold_for(set: f32, wanted: Wanted) -> f32 {
    if wanted == Wanted::All { -1.0 } else { set }
}
