//! The experts of a prompt's chunk on host and device, where they are packed by neuron. Experts are copied to the device for the chunk, those
//! with the most tokens first, and computed there for all of its tokens, each token's share times the weight that the router gave it; the CPU
//! computes the others at the same time. Neurons in slots are of no use here: an expert is computed as a whole by one of both.

use super::scheduling::Beside;
use super::scratch::InsideStreaming;
use super::state::Split;
use super::streaming::{ExpertCosts, Missing};
use super::workspace::{ExchangeLayout, SLOTS_AT_ONCE};
use crate::device::{Call, ColumnWeights, DenseFfn, NONE, OutOfMemory, SlotBlocks, Stream, View};
use crate::engine::ffn::ExpertsRead;
use crate::engine::forward::Pass;
use crate::engine::mixture::mixture;
use crate::model::config::ModelConfig;
use crate::model::{ExpertWeights, Model};

impl Split {
    /// Takes up to `bytes` of device memory for experts that are copied for a chunk; without it the CPU computes them all. Of a mixture that is
    /// packed by neuron.
    ///
    /// # Errors
    /// The device has no room.
    pub fn stream_inside(&mut self, model: &Model, costs: ExpertCosts, bytes: u64) -> Result<(), OutOfMemory> {
        let c = &model.config;
        let block = model.layers.iter().map(|layer| layer.ffn.movable_bytes()).max().expect("a model has layers");
        let half = ((bytes / 2 / block) as usize).min(c.widest_ffn()).min(SLOTS_AT_ONCE) / 4 * 4;
        if half == 0 || !c.widest_ffn().is_multiple_of(4) {
            return Ok(());
        }
        // Every piece is a copy for each part, of which the costs have those of one; every column is multiplied, whether its token has the expert or not.
        let (more, columns) = ((c.widest_ffn().div_ceil(half) - 1) as f64, crate::cpu::MAX_COLUMNS as f64);
        let (link_us, device_us) = (
            costs.link_us + more * c.ffn_kind.rows() as f64 * costs.copy_us,
            costs.device_us.max(columns * costs.device_token_us),
        );
        let costs = ExpertCosts { link_us, device_us, device_token_us: 0.0, ..costs };
        let device = &mut self.device;
        let scratch = device.alloc(2 * half as u64 * block)?;
        let mut two = || [device.event(), device.event()];
        let (arrived, done) = (two(), two());
        self.bytes += scratch.bytes;
        let experts = Vec::new();
        self.inside_streaming =
            Some(InsideStreaming { costs, scratch, half, arrived, done, turn: 0, experts, copied: 0 });
        Ok(())
    }

    /// The chosen experts of a chunk's layer.
    pub(super) fn inside_chunk(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let (n, c) = (pass.n(), &pass.model.config);
        let (_, weights) = mixture(pass, l);
        let streamed = self.divide_inside_chunk(pass, l);
        if streamed > 0 {
            self.send_weights(pass, c, n);
            self.stream_experts_inside(c, l, n, weights);
        }
        let on_cpu = self.experts.on_host.tokens.len() as u64;
        let needed = on_cpu > 0 || weights.shared.is_some();
        let read = if needed { self.host_experts(pass, l, weights, Beside::Nothing) } else { 0 };
        if needed {
            self.add_partial(c);
        }
        self.end_sum(c, l);
        if self.migrator.is_some() && !weights.experts.is_empty() {
            self.count_inside(pass, l, n, weights);
        }
        self.device.record(Stream::Compute, self.parts.marks().done[l % 2]);
        self.chunks.streamed += streamed;
        self.chunks.on_cpu += on_cpu;
        let read = ExpertsRead { bytes: read + weights.router_bytes(), ..ExpertsRead::default() };
        pass.probe.report.add_experts(l, c, pass.buffers.routes.tokens.len(), read);
    }

    /// Divides the chosen experts between link and CPU: `experts` become all of them, of which the first are copied, and `on_host` what is left
    /// for the CPU. Returns the pairs of expert and token of those that are copied.
    fn divide_inside_chunk(&mut self, pass: &Pass<'_, '_>, l: usize) -> u64 {
        let (c, n, routes) = (&pass.model.config, pass.n(), &pass.buffers.routes);
        let Some(InsideStreaming { costs, half, experts, copied, .. }) = &mut self.inside_streaming else {
            self.experts.on_host.take(routes, |_| true);
            return 0;
        };
        experts.clear();
        // All columns are multiplied by an expert that is copied.
        let groups = n.div_ceil(crate::cpu::MAX_COLUMNS) as u32;
        let of = |group: &crate::engine::routing::Group| Missing {
            expert: group.expert,
            tokens: group.tokens as u32,
            groups,
        };
        experts.extend(routes.groups.iter().map(of));
        *copied = costs.divide(experts, n, (0, 0), (*half / c.width(l)).max(1)).copied;
        let copied = &experts[..*copied];
        self.experts.on_host.take(routes, |expert| copied.iter().all(|of| of.expert != expert));
        copied.iter().map(|of| u64::from(of.tokens)).sum()
    }

    /// Sends the device what each expert counts for each token, `[experts, n]`.
    fn send_weights(&mut self, pass: &Pass<'_, '_>, c: &ModelConfig, n: usize) {
        let routes = &pass.buffers.routes;
        let by_token = &mut self.experts.chosen[..c.clusters() * n];
        by_token.fill(0);
        for group in &routes.groups {
            for routed in &routes.tokens[group.first..group.first + group.tokens] {
                by_token[group.expert * n + routed.token] = routed.weight.to_bits();
            }
        }
        let (from, bytes, to) = (by_token.as_ptr().cast(), size_of_val(by_token), self.of_columns(c, n));
        // SAFETY: the words change again only in the next layer, after its input was waited for, which comes behind this.
        unsafe { self.device.copy_in(Stream::Compute, from, bytes, to.buffer, to.at) };
    }

    fn of_columns(&self, c: &ModelConfig, n: usize) -> View {
        self.at(ExchangeLayout::new(n, c).masks())
    }

    /// Copies experts to the device, a piece of one in each half of the scratch memory, and has each half computed while the next is filled.
    fn stream_experts_inside(&mut self, c: &ModelConfig, l: usize, n: usize, weights: &ExpertWeights) {
        let layout = weights.neuron_layout();
        let pieces = |s: &InsideStreaming| s.copied * c.width(l).div_ceil(s.half);
        let count = self.inside_streaming.as_ref().map_or(0, pieces);
        for piece in 0..count {
            let Some(s) = &mut self.inside_streaming else { return };
            let each = c.width(l).div_ceil(s.half);
            let (expert, first) = (s.experts[piece / each].expert, piece % each * s.half);
            let (slots, which, device) = (s.half.min(c.width(l) - first), s.turn % 2, &mut self.device);
            s.turn += 1;
            device.wait(Stream::Copy, s.done[which]);
            // By the memory and not by this layer's rows: a layer whose rows are larger may still be computed from the other half.
            let mut at = which as u64 * (s.scratch.bytes / 2);
            let mut rows = [View { buffer: s.scratch, at }; 3];
            for ((matrix, part), view) in weights.experts[expert].parts().zip(layout.parts()).zip(&mut rows) {
                let bytes = slots * part.bytes;
                *view = View { buffer: s.scratch, at };
                // SAFETY: a matrix of the model's file, which outlives the device.
                unsafe { device.copy_in(Stream::Copy, matrix.row_ptr(first), bytes, s.scratch, at) };
                at += bytes as u64;
            }
            device.record(Stream::Copy, s.arrived[which]);
            device.wait(Stream::Compute, s.arrived[which]);
            let (done, name) = (s.done[which], expert * c.width(l) + first);
            let call = self.inside_chunk_call(c, l, n, weights, (slots, rows, name));
            self.launch(Call::DenseFfn(call));
            self.device.record(Stream::Compute, done);
        }
    }

    /// The device's part of a chunk for `slots` neurons of one expert, whose rows lie there, from neuron `first` of all on.
    pub(super) fn inside_chunk_call(
        &self,
        c: &ModelConfig,
        l: usize,
        n: usize,
        weights: &ExpertWeights,
        (slots, rows, first): (usize, [View; 3], usize),
    ) -> DenseFfn {
        DenseFfn {
            layout: weights.neuron_layout(),
            kind: c.ffn_kind,
            activation: c.activation,
            activation_threshold: 0.0,
            hidden: c.hidden,
            ffn: c.neurons(),
            slots,
            n,
            blocks: SlotBlocks::Apart(rows),
            weights: Some(ColumnWeights { at: self.of_columns(c, n), experts: weights.experts.len() }),
            bucket: View { buffer: self.workspace.names, at: first as u64 * 4 },
            up_bias: self.weights.layers[l].up_bias,
            x: self.at(0),
            products: self.workspace.products,
            counts: self.workspace.counts.into(),
            out: self.sum(c),
        }
    }

    /// Counts in how many tokens each neuron was active: of the CPU's experts now, of those that are copied once the device is done
    /// ([`Split::read_back`]).
    fn count_inside(&mut self, pass: &mut Pass<'_, '_>, l: usize, n: usize, weights: &ExpertWeights) {
        let c = &pass.model.config;
        let counts = &mut self.parts.divided[l % 2].counts;
        pass.buffers.experts.counts((pass.pool, c), c.width(l), &self.experts.on_host.groups, counts);
        let copied = self.inside_streaming.as_ref().map_or(&[][..], |s| &s.experts[..s.copied]);
        copied.iter().for_each(|of| counts[of.expert * c.width(l)..(of.expert + 1) * c.width(l)].fill(NONE));
        if copied.is_empty() {
            return;
        }
        let bytes = DenseFfn::parts(&weights.neuron_layout(), n) * c.neurons() * 4;
        let at = self.host.counts_at(l);
        let to = self.host.counts[at..].as_mut_ptr().cast();
        // SAFETY: looked at after an event behind the copy.
        unsafe { self.device.copy_out(Stream::Compute, self.workspace.counts, 0, to, bytes) };
    }
}
