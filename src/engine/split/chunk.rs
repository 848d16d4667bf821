//! The FFN of a prompt's chunk with a device, computed dense (PowerInfer 8.2). Neurons in slots are computed on the device; the others are
//! copied there for the chunk, or computed by the CPU at the same time ([`super::streaming`]). The host is a layer behind: it takes over a
//! layer's keys and values when the next layer is on the device's stream.

use super::scratch::Streaming;
use super::state::Split;
use super::streaming::{ChunkCosts, runs};
use super::workspace::SLOTS_AT_ONCE;
use crate::clock;
use crate::device::{Call, DenseFfn, HostWork, NONE, OutOfMemory, SlotBlocks, Stage, Stream, View};
use crate::engine::ffn::{self, Compute, Counts, Neurons, Work};
use crate::engine::forward::Pass;
use crate::engine::sparsity::Wanted;
use crate::ids::StoreId;
use crate::model::config::ModelConfig;
use crate::model::weights::Layer;
use crate::model::{FfnWeights, Model};
use std::ops::Range;

/// The blocks in the device's memory that a launch computes.
struct Blocks {
    slots: usize,
    blocks: View,
    bucket: View,
}

impl Split {
    /// Takes up to `bytes` of device memory for blocks that are copied for a chunk; without them the CPU computes what is in no slot.
    ///
    /// # Errors
    /// The device has no room.
    pub fn stream(&mut self, model: &Model, costs: ChunkCosts, bytes: u64) -> Result<(), OutOfMemory> {
        self.parts.costs = Some(costs);
        let c = &model.config;
        let block = model.layers.iter().map(|layer| layer.block().bytes()).max().expect("a model has layers");
        let half = (bytes as usize / 2 / block).min(c.widest_ffn()).min(SLOTS_AT_ONCE) / 4 * 4;
        if half == 0 {
            return Ok(());
        }
        let device = &mut self.device;
        let scratch = device.alloc((2 * half * block) as u64)?;
        let mut two = || [device.event(), device.event()];
        let (arrived, done) = (two(), two());
        self.bytes += scratch.bytes;
        self.streaming = Some(Streaming { scratch, half, arrived, done, turn: 0 });
        Ok(())
    }

    /// Begins the FFN of a part of a chunk: the norm, the copy of its output for the CPU, and the neurons in slots.
    pub(super) fn begin_chunk_ffn(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let (c, layer) = (&pass.model.config, &pass.model.layers[l]);
        let activation_threshold = pass.sparsity.activation_threshold(l);
        if self.parts.divided[l % 2].layer != Some(l) {
            self.commit(pass, l);
            self.divide_chunk(l, pass.n(), c.width(l));
        }
        self.norm_ffn_input(c, l);
        if self.needs_cpu(l, layer) {
            let (input, numbers) = (self.input(c), self.rows.n * c.hidden);
            let to = self.host.received[self.rows.first * c.hidden..][..numbers].as_mut_ptr().cast();
            // SAFETY: as in `Split::upload`: it lives as long as the pass and is looked at behind the event.
            unsafe { self.device.copy_out(Stream::Compute, input.buffer, input.at, to, numbers * 4) };
            self.device.record(Stream::Compute, self.parts.marks().exchanged);
        }
        if c.layer(l).norms.parallel() {
            self.add_attention(c, l);
        }
        self.resident(c, l, layer, activation_threshold);
    }

    /// Whether the CPU has a part in a layer's FFN: some neurons, or the bias of down.
    fn needs_cpu(&self, l: usize, layer: &Layer) -> bool {
        self.parts.divided[l % 2].on_cpu > 0 || !layer.down_bias.is_empty()
    }

    /// Has what is copied for a layer computed, for all parts or for the current one. Then the device has counted its active neurons.
    pub(super) fn copied_neurons(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let (c, layer) = (&pass.model.config, &pass.model.layers[l]);
        let activation_threshold = pass.sparsity.activation_threshold(l);
        let part = self.parts.number;
        let parts = if self.parts.shared { 0..self.parts.count } else { part..part + 1 };
        if self.parts.divided[l % 2].carried > 0 {
            self.streamed(c, l, layer, activation_threshold, parts.clone());
        }
        let told = self.migrator.is_some();
        for part in parts.filter(|_| told) {
            self.set_part(part);
            let [first, count] =
                [self.rows.first, self.rows.n].map(|tokens| DenseFfn::parts(layer.block(), tokens) * c.widest_ffn());
            let at = self.host.counts_at(l) + first;
            let to = self.host.counts[at..at + count].as_mut_ptr().cast();
            // SAFETY: as above.
            unsafe { self.device.copy_out(Stream::Compute, self.workspace.counts, first as u64 * 4, to, count * 4) };
        }
        self.set_part(part);
    }

    /// Ends the FFN of a part: what the CPU has of it is computed and added.
    pub(super) fn chunk_ffn(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let (model, n) = (pass.model, self.rows.n);
        let (c, layer) = (&model.config, &model.layers[l]);
        let mut read = Counts::default();
        if self.needs_cpu(l, layer) {
            self.device.synchronize_event(self.parts.marks().exchanged);
            pass.probe.lap(Stage::Attention);
            read = self.on_cpu(pass, l);
        }
        if self.migrator.is_some() {
            self.count_on_cpu(pass, l);
        }
        self.end_sum(c, l);
        self.device.record(Stream::Compute, self.parts.marks().done[l % 2]);
        let divided = &self.parts.divided[l % 2];
        let (missing, on_cpu) = (divided.missing.len(), divided.on_cpu);
        let [resident, streamed, on_cpu] = [c.width(l) - missing, missing - on_cpu, on_cpu].map(|m| (m * n) as u64);
        self.chunks.resident += resident;
        self.chunks.streamed += streamed;
        self.chunks.on_cpu += on_cpu;
        pass.probe.report.add_layer((l, layer), c, n, Wanted::All, None, read);
    }

    /// Counts in how many of a part's tokens the CPU's neurons were active.
    fn count_on_cpu(&mut self, pass: &Pass<'_, '_>, l: usize) {
        let (c, activation_threshold) = (&pass.model.config, pass.sparsity.activation_threshold(l));
        let divided = &mut self.parts.divided[l % 2];
        let to = if divided.counted == 0 { &mut divided.counts } else { &mut self.part_counts };
        let missing = &divided.missing[divided.missing.len() - divided.on_cpu..];
        pass.buffers.ffn.counts(c, Neurons::Some(missing), self.rows.n, activation_threshold, to);
        if divided.counted > 0 {
            let both = divided.counts.iter_mut().zip(&self.part_counts);
            both.filter(|(_, part)| **part != NONE).for_each(|(count, part)| *count += part);
        }
        divided.counted += 1;
    }

    /// Finds the neurons of a layer that are in no slot, and divides them for all `n` tokens of the chunk: how many the CPU computes, the last
    /// ones, and how many blocks are copied for the others in `runs`, gaps included.
    fn divide_chunk(&mut self, l: usize, n: usize, ffn: usize) {
        let Split { cache, parts, streaming, .. } = self;
        let (table, divided) = (&cache.layers[l].table, &mut parts.divided[l % 2]);
        (divided.layer, divided.counted, divided.named) = (Some(l), 0, false);
        let found = &mut divided.runs;
        divided.missing.clear();
        divided.missing.extend((0..ffn as u32).map(StoreId).filter(|&neuron| !table.location(neuron).is_device()));
        let missing = divided.missing.len();
        (divided.on_cpu, divided.carried) = (missing, 0);
        let (Some(_), Some(costs)) = (streaming, parts.costs) else { return };
        let carried = runs(&divided.missing, costs.bridge(), found);
        divided.on_cpu = costs.on_cpu((missing, ffn - missing), (found.len(), carried), n, parts.beside);
        divided.carried = runs(&divided.missing[..missing - divided.on_cpu], costs.bridge(), found);
    }

    /// Has the device compute the neurons in slots.
    fn resident(&mut self, c: &ModelConfig, l: usize, layer: &Layer, activation_threshold: f32) {
        let (at, block) = (&self.cache.layers[l], layer.block().bytes());
        let (slots, blocks, bucket) = (at.table.slots().len(), at.blocks[0], at.bucket);
        for first in (0..slots).step_by(SLOTS_AT_ONCE) {
            let blocks = View { buffer: blocks, at: (first * block) as u64 };
            let bucket = View { buffer: bucket, at: first as u64 * 4 };
            let blocks = Blocks { slots: SLOTS_AT_ONCE.min(slots - first), blocks, bucket };
            self.compute(c, l, layer, activation_threshold, blocks);
        }
        self.cache.used(&mut *self.device, l);
    }

    /// Copies a layer's `runs` to the device, one half of the scratch memory after the other, and has each half computed for these parts while
    /// the next is filled.
    fn streamed(&mut self, c: &ModelConfig, l: usize, layer: &Layer, activation_threshold: f32, parts: Range<usize>) {
        let (block, names) = (layer.block().bytes(), &mut self.host.names[l * c.widest_ffn()..][..c.width(l)]);
        let divided = &mut self.parts.divided[l % 2];
        let count = divided.carried;
        if !std::mem::replace(&mut divided.named, true) {
            let mut wanted = divided.missing.iter().copied().peekable();
            let blocks = divided.runs.iter().flat_map(|run| run.first..run.first + run.len);
            for (neuron, name) in blocks.zip(names.iter_mut()) {
                // What lies between is in a slot.
                *name = wanted.next_if_eq(&StoreId(neuron as u32)).map_or(NONE, |neuron| neuron.0);
            }
        }
        // SAFETY: every layer has names of its own, which live as long as the pass.
        unsafe { self.device.copy_in(Stream::Compute, names.as_ptr().cast(), count * 4, self.workspace.names, 0) };
        // The run that is next, and how many of its blocks are on their way.
        let (mut run, mut sent, mut first) = (0, 0, 0);
        while first < count {
            let (Some(s), runs) = (&mut self.streaming, &self.parts.divided[l % 2].runs) else { return };
            let (half, here, device) = (s.turn % 2, s.half.min(count - first), &mut self.device);
            s.turn += 1;
            device.wait(Stream::Copy, s.done[half]);
            // By the memory and not by this layer's blocks: a layer whose blocks are larger may still be computed from the other half.
            let (start, mut filled) = (half as u64 * (s.scratch.bytes / 2), 0);
            while filled < here {
                let now = (runs[run].len - sent).min(here - filled);
                let from = layer.neurons().ptr(runs[run].first + sent);
                // SAFETY: neuron blocks of the store, which outlives the device.
                unsafe {
                    device.copy_in(Stream::Copy, from, now * block, s.scratch, start + (filled * block) as u64);
                }
                (filled, sent) = (filled + now, sent + now);
                if sent == runs[run].len {
                    (run, sent) = (run + 1, 0);
                }
            }
            device.record(Stream::Copy, s.arrived[half]);
            device.wait(Stream::Compute, s.arrived[half]);
            let (blocks, done) = (View { buffer: s.scratch, at: start }, s.done[half]);
            let bucket = View { buffer: self.workspace.names, at: first as u64 * 4 };
            for part in parts.clone() {
                self.set_part(part);
                self.compute(c, l, layer, activation_threshold, Blocks { slots: here, blocks, bucket });
            }
            self.device.record(Stream::Compute, done);
            first += here;
        }
    }

    fn compute(&mut self, c: &ModelConfig, l: usize, layer: &Layer, activation_threshold: f32, at: Blocks) {
        let call = self.dense_call(c, l, layer, activation_threshold, at);
        self.launch(Call::DenseFfn(call));
    }

    /// The call for the current part.
    fn dense_call(&self, c: &ModelConfig, l: usize, layer: &Layer, activation_threshold: f32, at: Blocks) -> DenseFfn {
        let (rows, layout) = (self.rows, *layer.block());
        let counts = DenseFfn::parts(&layout, rows.first) * c.widest_ffn() * 4;
        let Blocks { slots, blocks, bucket } = at;
        // Without a slot the layer has no bias there; the blocks that are copied for it need one.
        DenseFfn {
            layout,
            kind: c.ffn_kind,
            activation: c.activation,
            activation_threshold,
            hidden: c.hidden,
            ffn: c.widest_ffn(),
            slots,
            n: rows.n,
            blocks: blocks.into(),
            weights: None,
            bucket,
            up_bias: self.weights.layers[l].up_bias,
            x: self.input(c),
            products: self.workspace.products,
            counts: View { buffer: self.workspace.counts, at: counts as u64 },
            out: self.sum(c),
        }
    }

    /// The largest call for the FFN of a chunk's layer; `None` of whole experts, which go by few columns at a time.
    pub(super) fn chunk_call(&self, c: &ModelConfig, l: usize, layer: &Layer) -> Option<Call> {
        let (at, slots, n) = (&self.cache.layers[l], c.width(l).min(SLOTS_AT_ONCE), self.chunk);
        Some(Call::DenseFfn(match &layer.ffn {
            FfnWeights::Experts(weights) if weights.by_neuron() => {
                let rows = SlotBlocks::three(&at.blocks);
                self.inside_chunk_call(c, l, n, weights, (slots, rows, 0))
            }
            FfnWeights::Experts(_) => return None,
            _ => {
                let blocks = Blocks { slots, blocks: at.blocks[0].into(), bucket: at.bucket.into() };
                DenseFfn { n, ..self.dense_call(c, l, layer, 0.0, blocks) }
            }
        }))
    }

    /// Computes the CPU's neurons of a layer for the current part, and adds them and the bias of down to the device's sum.
    fn on_cpu(&mut self, pass: &mut Pass<'_, '_>, l: usize) -> Counts {
        let Pass { pool, kernels, model, buffers: b, .. } = pass;
        let (c, layer, rows) = (&model.config, &model.layers[l], self.rows);
        let numbers = rows.first * c.hidden..rows.range().end * c.hidden;
        let input: &[f32] = bytemuck::cast_slice(&self.host.received[numbers.clone()]);
        b.columns.set_many(pool, kernels, input, rows.n, layer.ffn.input_quants());
        let partial: &mut [f32] = bytemuck::cast_slice_mut(&mut self.host.partial[numbers]);
        partial.fill(0.0);
        let (mut lap, neurons) = (clock::now(), self.parts.divided[l % 2].on_cpu());
        let work = Work::Some(neurons);
        let compute = Compute { pool, kernels, config: c, tiles: &mut b.tiles };
        let read = ffn::ffn(compute, layer, &b.columns, work, 0.0, &mut b.ffn, partial);
        let operations = (2 * c.ffn_kind.rows() * c.hidden * neurons.len() * rows.n) as u64;
        self.device.worked(HostWork {
            stage: Stage::Ffn,
            bytes: read.bytes(&layer.ffn),
            operations,
            ns: clock::lap(&mut lap),
        });
        // It is written to again only behind the next layer's event.
        self.add_partial(c);
        read
    }

    /// Takes over what the device made of a layer for the current part: keys and values, and after the last part the counts for the scheduler.
    pub(super) fn read_back(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let (n, neurons) = (pass.n(), pass.model.config.neurons());
        self.device.synchronize_event(self.parts.marks().done[l % 2]);
        pass.probe.lap(Stage::Ffn);
        if self.attends {
            self.read_back_kv(pass, l);
            pass.probe.lap(Stage::Attention);
        }
        self.parts.taken_over = (self.parts.taken_over + 1) % self.parts.count;
        if self.parts.taken_over > 0 {
            return;
        }
        // Of whole experts it is told where they are routed.
        let layout = match &pass.model.layers[l].ffn {
            FfnWeights::Neurons(blocks) => Some(blocks.layout),
            FfnWeights::Experts(weights) => weights.by_neuron().then(|| weights.neuron_layout()),
            FfnWeights::Matrices(_) => None,
        };
        if let (Some(migrator), Some(layout)) = (self.migrator.as_mut(), layout) {
            let parts = &self.host.counts[self.host.counts_at(l)..][..DenseFfn::parts(&layout, n) * neurons];
            let counts = &mut self.parts.divided[l % 2].counts;
            for (i, count) in counts.iter_mut().enumerate().filter(|(_, count)| **count == NONE) {
                *count = parts.iter().skip(i).step_by(neurons).sum();
            }
            let first = pass.buffers.positions[0];
            migrator.prompt(l, first.position, n, pass.caches[first.sequence].id(), counts);
            pass.probe.lap(Stage::Scheduler);
        }
    }
}
