//! The FFN of a prompt's chunk with a device, computed dense (PowerInfer 8.2). Neurons in slots are computed on the device; the others are
//! copied there for the chunk, or computed by the CPU at the same time ([`super::streaming`]). The host is a layer behind: it takes over a
//! layer's keys and values when the next layer is on the device's stream.

use super::Split;
use super::streaming::{ChunkCosts, runs};
use super::workspace::{ExchangeLayout, SLOTS_AT_ONCE};
use crate::clock;
use crate::device::{Add, Buffer, Call, DenseFfn, Event, HostWork, NONE, OutOfMemory, Stage, Stream, View};
use crate::engine::ffn::{self, Counts, Neurons, Work};
use crate::engine::forward::Pass;
use crate::engine::sparsity::Wanted;
use crate::ids::StoreId;
use crate::model::config::ModelConfig;
use crate::model::weights::Layer;
use crate::model::{FfnWeights, Model};

/// Device memory for blocks that are copied for a chunk, two buffers in one: one half is filled while the other is computed.
pub struct Streaming {
    costs: ChunkCosts,
    scratch: Buffer,
    /// Blocks of a half, a multiple of four, so that each half's names begin at a multiple of 16 bytes.
    half: usize,
    /// By half: its blocks have arrived.
    arrived: [Event; 2],
    /// By half: its blocks are not needed any more.
    done: [Event; 2],
    /// Halves filled so far.
    turn: usize,
}

/// Neurons times tokens of prompts' chunks, or of a mixture the experts of each token, by where they were computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ChunkCounts {
    /// On the device, from slots.
    pub resident: u64,
    /// On the device, from blocks that were copied for the chunk.
    pub streamed: u64,
    /// On the CPU.
    pub on_cpu: u64,
}

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
        let c = &model.config;
        let block = model.layers.iter().map(|layer| layer.block().bytes()).max().expect("a model has layers");
        let half = (bytes as usize / 2 / block).min(c.ffn).min(SLOTS_AT_ONCE) / 4 * 4;
        if half == 0 {
            return Ok(());
        }
        let device = &mut self.device;
        let scratch = device.alloc((2 * half * block) as u64)?;
        let mut two = || [device.event(), device.event()];
        let (arrived, done) = (two(), two());
        self.bytes += scratch.bytes;
        self.streaming = Some(Streaming { costs, scratch, half, arrived, done, turn: 0 });
        Ok(())
    }

    /// The FFN of a layer: from slots, from copies, and on the CPU.
    pub(super) fn chunk_ffn(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let (model, n) = (pass.model, pass.n());
        let (c, layer) = (&model.config, &model.layers[l]);
        let (h, activation_threshold) = (c.hidden, pass.sparsity.activation_threshold(l));
        self.commit(pass, l);
        self.norm_ffn_input(c, l, n);
        let (on_cpu, carried) = self.divide_chunk(l, n, c.ffn);
        let needed = on_cpu > 0 || !layer.down_bias.is_empty();
        if needed {
            let (input, to, bytes) = (self.at(0), self.host.received.as_mut_ptr().cast(), n * h * 4);
            // SAFETY: as in `Split::upload`: it lives as long as the pass and is looked at behind the event.
            unsafe { self.device.copy_out(Stream::Compute, input.buffer, input.at, to, bytes) };
            self.device.record(Stream::Compute, self.marks[l].exchanged);
        }
        if c.layer(l).norms.parallel() {
            self.add_attention(c, l, n);
        }
        self.resident(c, l, n, layer, activation_threshold);
        if carried > 0 {
            self.streamed(c, l, n, layer, activation_threshold);
        }
        let mut read = Counts::default();
        if needed {
            self.device.synchronize_event(self.marks[l].exchanged);
            pass.probe.lap(Stage::Attention);
            read = self.on_cpu(pass, l, n, on_cpu);
        }
        if self.migrator.is_some() {
            let missing = &self.host_selection.neurons[self.host_selection.neurons.len() - on_cpu..];
            pass.buffers.ffn.counts(c, Neurons::Some(missing), n, activation_threshold, &mut self.cpu_counts[l % 2]);
            let bytes = DenseFfn::parts(layer.block(), n) * c.ffn * 4;
            let at = self.host.counts_at(l);
            let to = self.host.counts[at..].as_mut_ptr().cast();
            // SAFETY: as above.
            unsafe { self.device.copy_out(Stream::Compute, self.workspace.counts, 0, to, bytes) };
        }
        self.device.record(Stream::Compute, self.marks[l].merge[1]);
        let missing = self.host_selection.neurons.len();
        let [resident, streamed, on_cpu] = [c.ffn - missing, missing - on_cpu, on_cpu].map(|m| (m * n) as u64);
        self.chunks.resident += resident;
        self.chunks.streamed += streamed;
        self.chunks.on_cpu += on_cpu;
        pass.probe.report.add_layer((l, layer), c, n, Wanted::All, None, read);
    }

    /// Finds the neurons that are in no slot, `host_selection.neurons`, of which the CPU computes the last ones. Returns how many those
    /// are, and how many blocks are copied for the others in `runs`, gaps included.
    fn divide_chunk(&mut self, l: usize, n: usize, ffn: usize) -> (usize, usize) {
        let table = &self.cache.layers[l].table;
        self.host_selection.neurons.clear();
        self.host_selection
            .neurons
            .extend((0..ffn as u32).map(StoreId).filter(|&neuron| !table.location(neuron).is_device()));
        let missing = self.host_selection.neurons.len();
        let Some(Streaming { costs, .. }) = &self.streaming else { return (missing, 0) };
        let carried = runs(&self.host_selection.neurons, costs.bridge(), &mut self.runs);
        let on_cpu = costs.on_cpu((missing, ffn - missing), (self.runs.len(), carried), n);
        let others = &self.host_selection.neurons[..missing - on_cpu];
        (on_cpu, runs(others, costs.bridge(), &mut self.runs))
    }

    /// Has the device compute the neurons in slots.
    fn resident(&mut self, c: &ModelConfig, l: usize, n: usize, layer: &Layer, activation_threshold: f32) {
        let (at, block) = (&self.cache.layers[l], layer.block().bytes());
        let (slots, blocks, bucket) = (at.table.slots().len(), at.blocks[0], at.bucket);
        for first in (0..slots).step_by(SLOTS_AT_ONCE) {
            let blocks = View { buffer: blocks, at: (first * block) as u64 };
            let bucket = View { buffer: bucket, at: first as u64 * 4 };
            self.compute(
                c,
                l,
                n,
                layer,
                activation_threshold,
                Blocks { slots: SLOTS_AT_ONCE.min(slots - first), blocks, bucket },
            );
        }
        self.cache.used(&mut *self.device, l);
    }

    /// Copies `runs` to the device, one half of the scratch memory after the other, and has each half computed while the next is filled.
    fn streamed(&mut self, c: &ModelConfig, l: usize, n: usize, layer: &Layer, activation_threshold: f32) {
        let (block, names) = (layer.block().bytes(), &mut self.host.names[l * c.ffn..][..c.ffn]);
        let mut wanted = self.host_selection.neurons.iter().copied().peekable();
        let mut count = 0;
        for neuron in self.runs.iter().flat_map(|run| run.first..run.first + run.len) {
            // What lies between is in a slot.
            names[count] = wanted.next_if_eq(&StoreId(neuron as u32)).map_or(NONE, |neuron| neuron.0);
            count += 1;
        }
        // SAFETY: every layer has names of its own, which live as long as the pass.
        unsafe { self.device.copy_in(Stream::Compute, names.as_ptr().cast(), count * 4, self.workspace.names, 0) };
        // The run that is next, and how many of its blocks are on their way.
        let (mut run, mut sent, mut first) = (0, 0, 0);
        while first < count {
            let Some(s) = &mut self.streaming else { return };
            let (half, here, device) = (s.turn % 2, s.half.min(count - first), &mut self.device);
            s.turn += 1;
            device.wait(Stream::Copy, s.done[half]);
            // By the memory and not by this layer's blocks: a layer whose blocks are larger may still be computed from the other half.
            let (start, mut filled) = (half as u64 * (s.scratch.bytes / 2), 0);
            while filled < here {
                let now = (self.runs[run].len - sent).min(here - filled);
                let from = layer.neurons().ptr(self.runs[run].first + sent);
                // SAFETY: neuron blocks of the store, which outlives the device.
                unsafe {
                    device.copy_in(Stream::Copy, from, now * block, s.scratch, start + (filled * block) as u64);
                }
                (filled, sent) = (filled + now, sent + now);
                if sent == self.runs[run].len {
                    (run, sent) = (run + 1, 0);
                }
            }
            device.record(Stream::Copy, s.arrived[half]);
            device.wait(Stream::Compute, s.arrived[half]);
            let (blocks, done) = (View { buffer: s.scratch, at: start }, s.done[half]);
            let bucket = View { buffer: self.workspace.names, at: first as u64 * 4 };
            self.compute(c, l, n, layer, activation_threshold, Blocks { slots: here, blocks, bucket });
            self.device.record(Stream::Compute, done);
            first += here;
        }
    }

    fn compute(&mut self, c: &ModelConfig, l: usize, n: usize, layer: &Layer, activation_threshold: f32, at: Blocks) {
        let call = self.dense_call(c, l, n, layer, activation_threshold, at);
        self.launch(Call::DenseFfn(call));
    }

    fn dense_call(
        &self,
        c: &ModelConfig,
        l: usize,
        n: usize,
        layer: &Layer,
        activation_threshold: f32,
        at: Blocks,
    ) -> DenseFfn {
        let Blocks { slots, blocks, bucket } = at;
        // Without a slot the layer has no bias there; the blocks that are copied for it need one.
        DenseFfn {
            layout: *layer.block(),
            kind: c.ffn_kind,
            activation: c.activation,
            activation_threshold,
            hidden: c.hidden,
            ffn: c.ffn,
            slots,
            n,
            blocks: blocks.into(),
            weights: None,
            bucket,
            up_bias: self.weights.layers[l].up_bias,
            x: self.at(0),
            products: self.workspace.products,
            counts: self.workspace.counts,
            out: self.at(ExchangeLayout::new(n, c).residual()),
        }
    }

    /// The largest call for the FFN of a chunk's layer; `None` of whole experts, which go by few columns at a time.
    pub(super) fn chunk_call(&self, c: &ModelConfig, l: usize, layer: &Layer) -> Option<Call> {
        let (at, slots, n) = (&self.cache.layers[l], c.ffn.min(SLOTS_AT_ONCE), self.chunk);
        Some(Call::DenseFfn(match &layer.ffn {
            FfnWeights::Experts(weights) if c.neurons_inside() => {
                let rows = [at.blocks[0], at.blocks[1], at.blocks[2]].map(View::from);
                self.inside_chunk_call(c, l, n, weights, (slots, rows, 0))
            }
            FfnWeights::Experts(_) => return None,
            _ => {
                let blocks = Blocks { slots, blocks: at.blocks[0].into(), bucket: at.bucket.into() };
                self.dense_call(c, l, n, layer, 0.0, blocks)
            }
        }))
    }

    /// Computes the last `count` missing neurons on the CPU, and adds them and the bias of down to the device's sum.
    fn on_cpu(&mut self, pass: &mut Pass<'_, '_>, l: usize, n: usize, count: usize) -> Counts {
        let Pass { pool, kernels, model, buffers: b, .. } = pass;
        let (c, layer) = (&model.config, &model.layers[l]);
        let (numbers, to) = (n * c.hidden, self.at(ExchangeLayout::new(n, c).residual()));
        b.normed.copy_from_slice(bytemuck::cast_slice(&self.host.received[..numbers]));
        b.columns.set_many(pool, kernels, &b.normed, n, layer.ffn.input_quants());
        let partial: &mut [f32] = bytemuck::cast_slice_mut(&mut self.host.partial[..numbers]);
        partial.fill(0.0);
        let mut lap = clock::now();
        let work = Work::Some(&self.host_selection.neurons[self.host_selection.neurons.len() - count..]);
        let read = ffn::ffn(pool, kernels, c, layer, &b.columns, work, 0.0, &mut b.tiles, &mut b.ffn, partial);
        let operations = (2 * c.ffn_kind.rows() * c.hidden * count * n) as u64;
        self.device.worked(HostWork { bytes: read.bytes(&layer.ffn), operations, ns: clock::lap(&mut lap) });
        let (from, room) = (self.host.partial.as_ptr().cast(), self.workspace.partial);
        // SAFETY: as above; it is written to again only behind the next layer's event.
        unsafe { self.device.copy_in(Stream::Compute, from, numbers * 4, room, 0) };
        self.launch(Call::Add(Add { count: numbers, from: room.into(), to }));
        read
    }

    /// Takes over what the device made of a layer: keys and values, and the counts for the scheduler.
    pub(super) fn read_back(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let (n, neurons) = (pass.n(), pass.model.config.neurons());
        self.device.synchronize_event(self.marks[l].merge[1]);
        pass.probe.lap(Stage::Ffn);
        if self.attends {
            self.read_back_kv(pass, l);
            pass.probe.lap(Stage::Attention);
        }
        // Of whole experts it is told where they are routed.
        let layout = match &pass.model.layers[l].ffn {
            FfnWeights::Neurons(blocks) => Some(blocks.layout),
            FfnWeights::Experts(weights) => {
                Some(weights.neuron_layout()).filter(|_| pass.model.config.neurons_inside())
            }
            FfnWeights::Matrices(_) => None,
        };
        if let (Some(migrator), Some(layout)) = (self.migrator.as_mut(), layout) {
            let parts = &self.host.counts[self.host.counts_at(l)..][..DenseFfn::parts(&layout, n) * neurons];
            let counts = &mut self.cpu_counts[l % 2];
            for (i, count) in counts.iter_mut().enumerate().filter(|(_, count)| **count == NONE) {
                *count = parts.iter().skip(i).step_by(neurons).sum();
            }
            let first = pass.buffers.positions[0];
            migrator.prompt(l, first.position, n, pass.caches[first.sequence].id(), counts);
            pass.probe.lap(Stage::Scheduler);
        }
    }
}
