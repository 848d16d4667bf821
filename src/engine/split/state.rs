//! The device's part of the engine: its fields, how they are made, and how much memory they take.

use super::allocator::DeviceAllocator;
use super::attention_streaming::{AttentionStreaming, Source};
use super::fired::Fired;
use super::kv::DeviceKv;
use super::migrator::Migrator;
use super::parts::{Parts, Rows};
use super::scorers::{Lookahead, Scorers};
use super::scratch::{ChunkCounts, ExpertStreaming, InsideStreaming, Streaming};
use super::weights::{LayerWeights, Weights};
use super::workspace::{DeviceWorkspace, ExpertSplit, PinnedBuffers, most_rows};
use crate::cache::{Frames, HostBlocks, NeuronCache, PerTier};
use crate::cpu::MAX_COLUMNS;
use crate::device::{Attend, Buffer, Call, Device, Event, Note, OutOfMemory, Stream, Then, View};
use crate::engine::ffn::{CachedFfn, Selection};
use crate::engine::forward::Pass;
use crate::engine::sparsity::{Scored, Sparsity};
use crate::ids::StoreId;
use crate::model::config::ModelConfig;
use crate::model::weights::Layer;
use crate::model::{ExpertWeights, FfnMatrices, FfnWeights, Matrix, Model};
use crate::scheduler::LayerTimes;

/// Bytes of host memory through which host and device exchange what they have made in passes of up to `chunk` tokens; `attends` says whether keys
/// and values of some sequence lie on the device. [`Split::pinned_bytes`] is the same of what has been allocated.
pub fn pinned_bytes(c: &ModelConfig, chunk: usize, attends: bool) -> u64 {
    PinnedBuffers::bytes_for(c, chunk, attends)
        + ExpertSplit::bytes_for(c, chunk)
        + ExpertStreaming::bytes_for(c, chunk)
}

/// A device's part in the engine.
pub struct Split {
    /// The device. Dropped first: fields are dropped in their order, and it has pinned memory that the cache and `host` own.
    pub device: Box<dyn Device>,
    /// Which neurons lie in the device's slots.
    pub cache: NeuronCache,
    /// Decides which neurons move; `None`: none do.
    pub migrator: Option<Box<dyn Migrator>>,
    /// What the device predicts for the migrator, beside what the engine predicts to choose neurons; `None`: nothing.
    pub lookahead: Option<Lookahead>,
    /// Device memory that the plan sets aside, beside the cache and [`Split::bytes`].
    pub reserved: Buffer,
    /// Where the neurons of prompts' chunks were computed.
    pub chunks: ChunkCounts,
    /// [`Split::chunk`]
    pub(super) chunk: usize,
    pub(super) weights: Weights,
    /// Numbers of the workspace's and the host's angles that each rotation has.
    pub(super) angles_of_rotation: usize,
    /// Copies attention's matrices that have no room on the device; `None`: all have.
    pub(super) attention_streaming: Option<AttentionStreaming>,
    pub(super) scorers: Scorers,
    pub(super) workspace: DeviceWorkspace,
    pub(super) kv: Option<DeviceKv>,
    /// Copies blocks to the device for a chunk; `None`: the CPU computes them.
    pub(super) streaming: Option<Streaming>,
    /// Bytes of weights, workspace, keys and values, and blocks that are copied for a chunk.
    pub(super) bytes: u64,
    pub(super) host: PinnedBuffers,
    pub(super) experts: ExpertSplit,
    /// Copies experts to the device for a chunk.
    pub(super) expert_streaming: ExpertStreaming,
    /// The same of a mixture that is packed by neuron; `None`: the CPU computes them.
    pub(super) inside_streaming: Option<InsideStreaming>,
    /// By layer: neurons on the device that some token wanted.
    pub(super) wanted: Vec<usize>,
    /// By layer: neurons on the device times tokens for which they were active.
    pub(super) active: Vec<u64>,
    /// By layer: times of the last pass of few tokens, and what is known of the current one.
    pub(super) times: Vec<LayerTimes>,
    pub(super) current: Vec<LayerTimes>,
    /// What any part of an FFN takes in each memory, ns; `None` until it was measured.
    pub(super) fixed_ns: Option<PerTier<u64>>,
    /// Which neurons were active in the last layer that was computed.
    pub(super) fired: Fired,
    /// By layer of a mixture that is packed by neuron, which neurons were active in the pass before; else nothing.
    pub(super) fired_before: Vec<Selection>,
    /// The keys and values that each token of the pass goes to.
    pub(super) sequences: Vec<u64>,
    /// Neurons of few tokens that are in no slot: the CPU computes them.
    pub(super) host_selection: Selection,
    /// In how many of a part's tokens the CPU's neurons were active.
    pub(super) part_counts: Vec<u32>,
    /// The parts of a chunk, and the tokens of the current one.
    pub(super) parts: Parts,
    pub(super) rows: Rows,
    /// Every neuron, for dense layers.
    pub(super) all: Selection,
    /// By layer: marks on the compute stream.
    pub(super) marks: Vec<Marks>,
    /// Whether the device computes attention in the current pass.
    pub(super) attends: bool,
    /// Whether the current pass is like those before and after it, so that sections of the stream are recorded: not of a prompt's chunk.
    pub(super) records: bool,
    /// Whether the host computes the current layer's attention only when it has the FFN's input, too: where both read the same residual,
    /// one wait is enough for both.
    pub(super) attends_late: bool,
    /// What the device has begun of the current layer.
    pub(super) begun: Begun,
    /// By layer: the device has chosen its neurons and computes all of them, and the host has not seen which.
    pub(super) chose_alone: Vec<bool>,
    /// When the pass began by the device's clock, ns.
    pub(super) pass_began_ns: u64,
}

/// What the device has begun of a layer's FFN before the host has seen the residual.
#[derive(Clone, Copy, Default)]
pub(super) struct Begun {
    /// What it has scored itself.
    pub scored: Scored,
    /// The layer whose scores come with the exchange for the migrator.
    pub ahead: Option<usize>,
    /// It knows which neurons are wanted, and computes its part.
    pub(super) device_ffn: bool,
    /// It has every neuron, knows which are wanted, and there is no bias of down, observer or scheduler: the host has nothing to do.
    pub(super) alone: bool,
}

/// The marks around a layer's work on the compute stream.
pub(super) struct Marks {
    /// What the host asked for has arrived.
    pub exchanged: Event,
    /// The device begins with its neurons, and is done with them.
    pub ffn: [Event; 2],
    /// The device begins to add the parts of both memories, and has added them.
    pub merge: [Event; 2],
}

impl Marks {
    /// Marks of `layers` layers. Not on the token path.
    pub fn new(device: &mut dyn Device, layers: usize) -> Vec<Marks> {
        let mut event = || device.timed_event();
        (0..layers).map(|_| Marks { exchanged: event(), ffn: [event(), event()], merge: [event(), event()] }).collect()
    }
}

impl Split {
    /// Gives layer `l` of the model `slots[l]` slots on `device`, all empty, and uploads attention and head; attention's matrices of `streamed`
    /// layers stay in host memory and are copied for every pass. The keys and values of up to
    /// `sequences` sequences of `context` positions are kept there, too; with 0, the CPU computes attention. Passes have `chunk` tokens at
    /// most. `pins` says whether the model's weights are to be pinned where they lie in host memory: not where some of them may be
    /// on disk.
    ///
    /// # Errors
    /// The device has no room.
    ///
    /// # Safety
    /// The model's store stays mapped until this is dropped, and the cache is not taken out to be dropped before the device.
    pub unsafe fn new(
        device: Box<dyn Device>,
        slots: &[usize],
        model: &Model,
        (context, sequences): (usize, usize),
        (chunk, streamed): (usize, usize),
        pins: bool,
    ) -> Result<Split, OutOfMemory> {
        let c = &model.config;
        let (sources, cache, attention_streaming, host, experts, expert_streaming);
        // As a later variable it is dropped before what it has pinned, too, if one of the next steps fails.
        let mut device = device;
        // Pinned first, since every token needs them.
        // SAFETY: the device is dropped before the pinned memory, and the matrices lie in the store, by the caller's promise.
        sources = unsafe { Source::of_layers(&mut *device, model, streamed, pins) };
        // SAFETY: the blocks lie in the store, by the caller's promise; the device is dropped before the cache.
        cache = unsafe { neuron_cache(&mut *device, slots, model, pins)? };
        // SAFETY: the device is dropped before the pinned memory.
        host = unsafe { PinnedBuffers::new(&mut *device, c, chunk) };
        // SAFETY: as above.
        experts = unsafe { ExpertSplit::new(&mut *device, c, chunk) };
        // SAFETY: as above.
        expert_streaming = unsafe { ExpertStreaming::new(&mut *device, c, chunk) };
        let reserved = device.reserve(0)?;
        let mut allocator = DeviceAllocator { device: &mut *device, bytes: 0 };
        let mut weights = Weights::new(&mut allocator, model, streamed)?;
        attention_streaming = AttentionStreaming::new(&mut allocator, model, &mut weights, sources)?;
        let workspace = DeviceWorkspace::new(&mut allocator, c, chunk)?;
        let bytes = allocator.bytes;
        if c.neurons_inside() {
            let names: Vec<u32> = (0..c.neurons() as u32).collect();
            // SAFETY: the copy is done before anything else can happen to `names`.
            unsafe { device.copy_in(Stream::Compute, names.as_ptr().cast(), names.len() * 4, workspace.names, 0) };
            device.synchronize(Stream::Compute);
        }
        let (marks, parts) = (Marks::new(&mut *device, c.layers().len()), Parts::new(&mut *device));
        let mut split = Split {
            device,
            cache,
            migrator: None,
            lookahead: None,
            reserved,
            chunks: ChunkCounts::default(),
            chunk,
            weights,
            angles_of_rotation: chunk * c.most_of_attention(|a| a.head_dim),
            attention_streaming,
            scorers: Scorers::default(),
            workspace,
            kv: None,
            streaming: None,
            bytes,
            host,
            experts,
            expert_streaming,
            inside_streaming: None,
            wanted: vec![0; c.layers().len()],
            active: vec![0; c.layers().len()],
            times: vec![LayerTimes::default(); c.layers().len()],
            current: vec![LayerTimes::default(); c.layers().len()],
            fixed_ns: None,
            fired: Fired::new(c.movable()),
            fired_before: (0..if c.neurons_inside() { c.layers().len() } else { 0 })
                .map(|_| Selection { neurons: Vec::with_capacity(c.neurons()), masks: Vec::with_capacity(c.neurons()) })
                .collect(),
            sequences: Vec::with_capacity(MAX_COLUMNS),
            part_counts: Vec::new(),
            parts,
            rows: Rows::default(),
            host_selection: Selection {
                neurons: Vec::with_capacity(c.widest_ffn()),
                masks: Vec::with_capacity(c.widest_ffn()),
            },
            all: Selection {
                neurons: (0..c.widest_ffn() as u32).map(StoreId).collect(),
                masks: vec![0; c.widest_ffn()],
            },
            marks,
            attends: false,
            records: false,
            attends_late: false,
            begun: Begun::default(),
            chose_alone: vec![false; c.layers().len()],
            pass_began_ns: 0,
        };
        split.prepare(model)?;
        split.set_sequences(model, context, sequences)?;
        Ok(split)
    }

    /// Tokens that a pass can have at most: what there is working memory for.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// Layers whose attention's matrices are copied for every pass.
    pub fn streamed_layers(&self) -> usize {
        self.attention_streaming.as_ref().map_or(0, AttentionStreaming::layers)
    }

    /// Sequences whose keys and values can be on the device.
    pub fn sequences(&self) -> usize {
        self.kv.as_ref().map_or(0, DeviceKv::sequences)
    }

    /// Makes room for the keys and values of `sequences` sequences of `context` positions; with 0, the CPU computes attention. What was
    /// there is uploaded again when it is needed. Not to be called while tokens are made.
    ///
    /// # Errors
    /// The device has no room: it then has room for none.
    pub fn set_sequences(&mut self, model: &Model, context: usize, sequences: usize) -> Result<(), OutOfMemory> {
        let c = &model.config;
        if self.sequences() == sequences {
            return Ok(());
        }
        let device = &mut *self.device;
        if let Some(kv) = self.kv.take() {
            self.bytes -= kv.release(device);
        }
        if sequences == 0 {
            return Ok(());
        }
        // SAFETY: the device is dropped before the pinned memory, by the order of the fields.
        unsafe { self.host.attend(device, c, self.chunk) };
        let mut allocator = DeviceAllocator { device, bytes: 0 };
        let kv = DeviceKv::new(&mut allocator, c, context, sequences)?;
        self.bytes += allocator.bytes;
        self.kv = Some(kv);
        self.prepare(model)
    }

    /// Neurons on the device, over all layers.
    pub fn residents(&self) -> usize {
        self.cache.layers.iter().map(|layer| layer.table.residents()).sum()
    }

    /// Has the device take, once, the memory that the calls of passes need beside their operands.
    fn prepare(&mut self, model: &Model) -> Result<(), OutOfMemory> {
        let calls = self.calls(model);
        let mut allocator = DeviceAllocator { device: &mut *self.device, bytes: 0 };
        calls.iter().try_for_each(|call| allocator.prepare(call))?;
        self.bytes += allocator.bytes;
        Ok(())
    }

    /// The largest call of each kind, for every number of tokens.
    fn calls(&self, model: &Model) -> Vec<Call> {
        let (c, weights, workspace) = (&model.config, &self.weights, &self.workspace);
        let (x, qkv, attended) = (workspace.exchange.into(), workspace.qkv.into(), workspace.attended.into());
        // The types of the matrices may differ from layer to layer.
        let projections = |n: usize| {
            let layer = move |at: &LayerWeights| {
                let calls = at.qkv.iter().map(|part| part.call(n, x, qkv, Then::Store));
                let then = if at.post_norms.is_some() { Then::Store } else { Then::Add };
                calls.chain([at.o.call(n, attended, x, then)]).map(Call::Linear).collect::<Vec<_>>()
            };
            weights.layers.iter().flat_map(layer)
        };
        let mut calls = Vec::new();
        for n in 1..=MAX_COLUMNS {
            calls.extend(projections(n));
            calls.push(Call::Linear(weights.head.call(n, x, workspace.logits.into(), Then::Store)));
            for (l, &heads) in self.kv.iter().flat_map(|kv| kv.layers.iter().enumerate()) {
                let Some(a) = c.attention(l) else { continue };
                let (window, most, positions) = (a.window, heads.context, workspace.positions.into());
                let (sinks, out) = (weights.layers[l].sinks, attended);
                calls.push(Call::Attend(Attend { heads, n, window, most, qkv, positions, sinks, out }));
            }
        }
        calls.extend(projections(self.chunk));
        let layers = model.layers.iter().enumerate();
        let ffns = (1..=MAX_COLUMNS).flat_map(|n| layers.clone().map(move |(l, layer)| (n, l, layer)));
        calls.extend(ffns.filter_map(|(n, l, layer)| match &layer.ffn {
            FfnWeights::Experts(weights) if weights.experts.is_empty() => None,
            FfnWeights::Experts(weights) if c.neurons_inside() => {
                let rows = most_rows(c, n);
                Some(Call::SparseFfn(self.inside_call(c, l, n, (weights, rows), c.neurons())))
            }
            FfnWeights::Experts(weights) => {
                Some(Call::ExpertFfn(self.expert_call(c, l, n, weights, weights.experts.len())))
            }
            _ => Some(Call::SparseFfn(self.ffn_call(c, l, n, layer, 0.0, c.width(l)))),
        }));
        let shared = (1..=MAX_COLUMNS).flat_map(|n| layers.clone().map(move |(l, layer)| (n, l, layer)));
        let shared = shared.filter_map(|(n, l, layer)| self.shared_call(c, l, n, layer.ffn.experts()?));
        calls.extend(shared.map(Call::ExpertFfn));
        calls.extend(model.layers.iter().enumerate().filter_map(|(l, layer)| self.chunk_call(c, l, layer)));
        calls
    }

    /// Bytes of host memory through which host and device exchange what they have made.
    pub fn pinned_bytes(&self) -> u64 {
        self.host.bytes() + self.experts.bytes() + self.expert_streaming.bytes()
    }

    /// Bytes on the device beside the neuron cache and what is only reserved.
    pub fn bytes(&self) -> u64 {
        self.bytes + self.scorers.bytes
    }

    /// Uploads the predictors of `sparsity` and [`Split::lookahead`] in place of what was reserved for them. Those for which there is no room run on the host.
    ///
    /// # Errors
    /// The rest of the reservation cannot be allocated again.
    pub fn upload_predictors(&mut self, sparsity: &Sparsity, c: &ModelConfig) -> Result<(), OutOfMemory> {
        let Split { device, scorers, reserved, lookahead, .. } = self;
        let nothing = device.reserve(0)?;
        let before = std::mem::replace(reserved, nothing);
        let planned = before.bytes + scorers.bytes;
        device.free(before);
        scorers.upload(&mut **device, sparsity, lookahead.as_ref(), c);
        let rest = device.reserve(planned.saturating_sub(scorers.bytes))?;
        device.free(std::mem::replace(reserved, rest));
        Ok(())
    }

    /// Neurons of the layer whose copies have arrived are found from now on; the frames that they were copied from may be used again.
    pub(super) fn commit(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        self.cache.commit(&mut *self.device, l);
        let table = &self.cache.layers[l].table;
        if let Some(frames) = frames(&mut pass.cached) {
            frames.release(l, table);
        }
    }

    pub(super) fn launch(&mut self, call: Call) {
        self.device.launch(Stream::Compute, &call);
    }

    /// Adds a note to the trace, if one is kept.
    pub fn note(&mut self, note: Note) {
        self.device.note(note);
    }

    /// The part of the exchanged bytes that begins at number `at`.
    pub(super) fn at(&self, at: usize) -> View {
        View { buffer: self.workspace.exchange, at: at as u64 * 4 }
    }
}

/// The host's frames, where not all neurons are in memory.
pub(super) fn frames<'a>(cached: &'a mut Option<&mut CachedFfn>) -> Option<&'a mut dyn Frames> {
    cached.as_mut().map(|cached| &mut cached.cache as &mut dyn Frames)
}

/// Where the experts of a layer lie: gate, up and down of each, or a row of each for every neuron.
fn expert_blocks(c: &ModelConfig, weights: &ExpertWeights) -> HostBlocks {
    let Some(first) = weights.experts.first() else { return HostBlocks::none(c.ffn_kind.rows()) };
    let each = if first.down_by_neuron { first.down.rows } else { 1 };
    let part = |(i, part): (usize, &Matrix)| {
        let start = |expert: &FfnMatrices| expert.parts().nth(i).expect("all have the same parts").row_ptr(0);
        (part.bytes() as usize / each, weights.experts.iter().map(start).collect())
    };
    HostBlocks::of_parts(first.parts().enumerate().map(part), each)
}

/// A neuron cache whose blocks are those of the model's store.
///
/// # Safety
/// As [`NeuronCache::new`].
unsafe fn neuron_cache(
    device: &mut dyn Device,
    slots: &[usize],
    model: &Model,
    pins: bool,
) -> Result<NeuronCache, OutOfMemory> {
    let c = &model.config;
    let blocks = |layer: &Layer| match &layer.ffn {
        FfnWeights::Experts(weights) => expert_blocks(c, weights),
        _ => HostBlocks::new(layer.neurons().ptr(0), layer.block().bytes(), layer.width),
    };
    let host: Vec<HostBlocks> = model.layers.iter().map(blocks).collect();
    let bias: Vec<&[f32]> = model.layers.iter().map(|layer| &layer.up_bias[..]).collect();
    // SAFETY: the caller's promise.
    unsafe { NeuronCache::new(device, slots, &host, &bias, pins) }
}
