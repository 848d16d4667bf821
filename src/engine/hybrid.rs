//! THE HOT PATH of a machine with a device: attention, head and predictors run there, and of the FFNs what lies in slots; the
//! CPU computes the other neurons at the same time (PowerInfer 5.3). One copy out and one copy in per layer.

use super::attention;
use super::decode::{Buffers, Place};
use super::ffn::{self, Counts, Selection, Work};
use super::observer::{Observer, Seen};
use super::on_device::{DeviceKv, Front, HostRooms, Rooms, Scorer, Scorers, Taker, Weights, norm};
use super::prefill::{ChunkCounts, Streaming};
use super::report::Report;
use super::sparsity::{Mode, Sparsity};
use super::streaming::Run;
use crate::cache::NeuronCache;
use crate::clock;
use crate::cpu::{Kernels, MAX_COLUMNS, Team};
use crate::device::{
    Add, Append, Attend, Buffer, Call, Event, Note, OutOfMemory, Part, Select, SignScores, SparseFfn, Stream, Then,
    View,
};
use crate::model::config::{ModelConfig, Norm as NormKind, Positions};
use crate::model::weights::Layer;
use crate::model::{KvCache, Model};
use crate::ops::gates::gates;
use crate::predictor::Tools;
use crate::scheduler::Policy;

/// What the engine knows of a layer before its FFN.
pub struct Between<'a> {
    pub layer: usize,
    /// Position of the first token in its sequence, and how many there are.
    pub first: usize,
    pub n: usize,
    /// They are the next tokens of several sequences, and not a piece of one.
    pub batch: bool,
    /// Residual after attention, `[n, hidden]`.
    pub residual: &'a [f32],
    /// What will be computed; `None` for all.
    pub selection: Option<&'a Selection>,
    /// The threshold that was set for this layer and its own predictor's scores, `[n, ffn]`, where it has one.
    pub own: Option<(f32, &'a [f32])>,
}

/// Decides, between layers, what moves and what is computed.
pub trait Migrator: Send {
    /// Puts on the link what was decided since. Called from the engine's thread when a layer begins, so that what is for it can arrive
    /// beside its attention, and again when it has been divided, before its FFN; must not wait.
    fn apply(&mut self, cache: &mut NeuronCache, sparsity: &mut Sparsity);

    /// Hears of a layer that has been divided, before its FFN; must not wait.
    fn tell(&mut self, _at: &Between<'_>, _cache: &NeuronCache) {}

    /// A layer of a prompt of `tokens` tokens, from position `first` on, was computed whole: for how many of them each neuron was
    /// active, `[ffn]`.
    fn prompt(&mut self, _layer: usize, _first: usize, _tokens: usize, _counts: &[u32]) {}

    /// What it goes by, if that has a name.
    fn policy(&self) -> Option<Policy> {
        None
    }

    /// Goes by another policy from the next layer on, and takes back what thresholds were made of by one that the other does not have;
    /// `false` if it cannot.
    fn set_policy(&mut self, _policy: Policy, _sparsity: &mut Sparsity) -> bool {
        false
    }

    /// What it did so far.
    fn counts(&self) -> MigratorCounts {
        MigratorCounts::default()
    }

    /// Ends it. Returns how often each neuron was active, `[layers][ffn]`, if it has learnt that.
    fn finish(self: Box<Self>) -> Option<Vec<Vec<f32>>> {
        None
    }
}

/// What a migrator did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MigratorCounts {
    /// Layers that it was told of, and those that it had no time for.
    pub told: u64,
    pub untold: u64,
    /// Layers that it has decided on, and decisions that the engine had no time for.
    pub decided: u64,
    pub dropped: u64,
    /// Moves that the cache refused: slot or neuron had changed meanwhile.
    pub refused: u64,
    /// Whether neurons move now, or the static placement is kept because moving does not pay.
    pub moving: bool,
}

/// A device's part in the engine.
pub struct Hybrid {
    pub cache: NeuronCache,
    pub migrator: Option<Box<dyn Migrator>>,
    /// What of the plan lies on the device beside the cache and what [`Hybrid::bytes`] counts.
    pub reserved: Buffer,
    /// What prompts' chunks were made of.
    pub chunks: ChunkCounts,
    pub(super) weights: Weights,
    scorers: Scorers,
    pub(super) rooms: Rooms,
    pub(super) kv: Option<DeviceKv>,
    /// Blocks that are copied for a chunk.
    pub(super) streaming: Option<Streaming>,
    /// Bytes of weights, rooms, keys and values, and blocks that are copied for a chunk.
    pub(super) bytes: u64,
    pub(super) host: HostRooms,
    /// By layer: neurons of the device's half that some column wanted.
    wanted: Vec<usize>,
    /// What is in no slot: of few columns the CPU's.
    pub(super) rest: Selection,
    /// Of a chunk: what is copied for it, and in how many columns the CPU's neurons were active, for two layers in turns.
    pub(super) runs: Vec<Run>,
    pub(super) cpu_counts: [Vec<u32>; 2],
    /// Every neuron, for dense layers.
    all: Selection,
    /// By layer: its front is there; its halves are added.
    pub(super) front: Vec<Event>,
    pub(super) merged: Vec<Event>,
}

/// What comes onto the device's stream in every layer of every pass nearly as it did in the last ([`crate::device::Device::begin_sequence`]).
#[derive(Clone, Copy)]
enum Again {
    Attention,
    Front,
    Half,
    Merge,
}

/// What a pass works with.
pub(super) struct Pass<'a, 'o> {
    pub team: &'a mut Team,
    pub kernels: &'a Kernels,
    pub model: &'a Model,
    pub report: &'a mut Report,
    pub sparsity: &'a mut Sparsity,
    pub buffers: &'a mut Buffers,
    pub caches: &'a mut [KvCache],
    pub observer: Option<&'a mut (dyn Observer + 'o)>,
}

impl Hybrid {
    /// Brings attention and head to the cache's device. Keys and values of `timelines` timelines of `context` positions lie there, too;
    /// of none, attention over them is the CPU's.
    pub fn new(mut cache: NeuronCache, model: &Model, context: usize, timelines: usize) -> Result<Hybrid, OutOfMemory> {
        let c = &model.config;
        let reserved = cache.device.reserve(0)?;
        let mut taker = Taker { device: &mut *cache.device, bytes: 0 };
        let (weights, rooms) = (Weights::new(&mut taker, model)?, Rooms::new(&mut taker, c)?);
        let bytes = taker.bytes;
        // SAFETY: the device is the cache's, which is dropped before the rooms.
        let host = unsafe { HostRooms::new(&mut *cache.device, c) };
        let mut events = || (0..c.layers).map(|_| cache.device.timed_event()).collect();
        let (front, merged) = (events(), events());
        let mut hybrid = Hybrid {
            cache,
            migrator: None,
            reserved,
            chunks: ChunkCounts::default(),
            weights,
            scorers: Scorers::default(),
            rooms,
            kv: None,
            streaming: None,
            bytes,
            host,
            wanted: vec![0; c.layers],
            runs: Vec::with_capacity(c.ffn),
            cpu_counts: Default::default(),
            rest: Selection { neurons: Vec::with_capacity(c.ffn), masks: Vec::with_capacity(c.ffn) },
            all: Selection { neurons: (0..c.ffn as u32).collect(), masks: vec![0; c.ffn] },
            front,
            merged,
        };
        hybrid.prepare(model)?;
        hybrid.set_timelines(model, context, timelines)?;
        Ok(hybrid)
    }

    /// Timelines whose keys and values lie on the device.
    pub fn timelines(&self) -> usize {
        self.kv.as_ref().map_or(0, DeviceKv::timelines)
    }

    /// Makes room for the keys and values of so many timelines of `context` positions; of none, attention over them is the CPU's. What
    /// was there is brought again when it is needed. Not on the token path.
    ///
    /// # Errors
    /// If the device has no room: it has none of them then.
    pub fn set_timelines(&mut self, model: &Model, context: usize, timelines: usize) -> Result<(), OutOfMemory> {
        let c = &model.config;
        if self.timelines() == timelines {
            return Ok(());
        }
        let device = &mut *self.cache.device;
        if let Some(kv) = self.kv.take() {
            self.bytes -= kv.release(device);
        }
        if timelines == 0 {
            return Ok(());
        }
        // SAFETY: the device is the cache's, which is dropped before the rooms.
        unsafe { self.host.attend(device, c) };
        let mut taker = Taker { device, bytes: 0 };
        let kv = DeviceKv::new(&mut taker, c, context, timelines)?;
        self.bytes += taker.bytes;
        self.kv = Some(kv);
        self.prepare(model)
    }

    /// Neurons on the device.
    pub fn residents(&self) -> usize {
        self.cache.layers.iter().map(|layer| layer.table.residents()).sum()
    }

    /// Lets the device take, once and for all, what it needs beside the operands of every pass.
    fn prepare(&mut self, model: &Model) -> Result<(), OutOfMemory> {
        let c = &model.config;
        let layers = model.layers.iter().enumerate();
        let ffns = (1..=MAX_COLUMNS).flat_map(|n| layers.clone().map(move |(l, layer)| (n, l, layer)));
        let ffns: Vec<Call> =
            ffns.map(|(n, l, layer)| Call::SparseFfn(self.ffn_call(c, l, n, layer, 0.0, c.ffn))).collect();
        let mut taker = Taker { device: &mut *self.cache.device, bytes: 0 };
        taker.prepare_all(c, &self.weights, &self.rooms, self.kv.as_ref(), &ffns)?;
        self.bytes += taker.bytes;
        Ok(())
    }

    /// Bytes on the device beside the cache's and those that are only reserved.
    pub fn bytes(&self) -> u64 {
        self.bytes + self.scorers.bytes
    }

    /// Brings the predictors of `sparsity` to the device, in the place of what was reserved for them. What the device refuses stays
    /// the host's to compute.
    ///
    /// # Errors
    /// If what is left of the reservation cannot be had again.
    pub fn bring_predictors(&mut self, sparsity: &Sparsity, c: &ModelConfig) -> Result<(), OutOfMemory> {
        let Hybrid { cache, scorers, reserved, .. } = self;
        let nothing = cache.device.reserve(0)?;
        let before = std::mem::replace(reserved, nothing);
        let planned = before.bytes + scorers.bytes;
        cache.device.free(before);
        scorers.bring(&mut *cache.device, sparsity, c);
        let rest = cache.device.reserve(planned.saturating_sub(scorers.bytes))?;
        cache.device.free(std::mem::replace(reserved, rest));
        Ok(())
    }

    /// Runs the embedded columns, `buffers.x`, through all layers and the head: logits of `buffers.heads` are in `buffers.logits`.
    pub(super) fn pass(&mut self, pass: &mut Pass<'_, '_>) {
        if pass.buffers.places.len() > MAX_COLUMNS {
            return self.prefill(pass);
        }
        let mut lap = clock::now();
        let attends = self.begin(pass);
        for l in 0..pass.model.layers.len() {
            self.note(Note::Layer(l));
            // What was decided meanwhile is on its way while attention runs.
            self.apply(pass, &mut lap);
            // 1 attention: norm, qkv, rope, KV append, scores and mix, output, residual
            if attends {
                self.again(l, Again::Attention);
            }
            self.attention(pass, l, attends);
            self.cache.device.end_sequence();
            // 2 predict and 3 FFN
            self.ffn(pass, l, &mut lap);
        }
        // 4 head
        self.head(pass, attends);
        pass.report.head_ns += clock::lap(&mut lap);
    }

    fn apply(&mut self, pass: &mut Pass<'_, '_>, lap: &mut clock::Instant) {
        let Some(migrator) = &mut self.migrator else { return };
        pass.report.attention_ns += clock::lap(lap);
        migrator.apply(&mut self.cache, pass.sparsity);
        pass.report.scheduler_ns += clock::lap(lap);
    }

    pub(super) fn launch(&mut self, call: Call) {
        self.cache.device.launch(Stream::Compute, &call);
    }

    /// What follows, up to the sequence's end, comes again in the next pass. The host has no part in it.
    fn again(&mut self, l: usize, what: Again) {
        self.cache.device.begin_sequence(4 * l + what as usize);
    }

    /// For a timeline, if one is kept.
    pub(super) fn note(&mut self, note: Note) {
        self.cache.device.note(note);
    }

    /// A part of the front that begins at number `at`.
    pub(super) fn at(&self, at: usize) -> View {
        View { buffer: self.rooms.front, at: at as u64 * 4 }
    }

    /// Sends the columns. Says whether attention is the device's in this pass.
    pub(super) fn begin(&mut self, pass: &Pass<'_, '_>) -> bool {
        let (c, b) = (&pass.model.config, &pass.buffers);
        let front = Front::new(b.places.len(), c);
        let (to, device) = (self.at(front.residual()), &mut self.cache.device);
        // SAFETY: here and below, what is copied in or out lives as long as the pass, and is touched again only after the compute
        // stream was synchronised, or an event that was recorded behind the copy.
        unsafe { device.copy_in(Stream::Compute, b.x.as_ptr().cast(), size_of_val(&b.x[..]), to.buffer, to.at) };
        let Some(kv) = self.kv.as_mut().filter(|kv| kv.takes(&b.places, pass.caches)) else { return false };
        kv.bring(&mut **device, &b.places, pass.caches);
        let rooms = &self.rooms;
        let angles: &mut [f32] = bytemuck::cast_slice_mut(&mut self.host.angles);
        for (t, &Place { cache, position }) in b.places.iter().enumerate() {
            self.host.places[2 * t..2 * t + 2]
                .copy_from_slice(&[kv.place_of(&pass.caches[cache]) as u32, position as u32]);
            if let Positions::Rope { frequencies } = &c.positions {
                let pairs = angles[t * c.head_dim..(t + 1) * c.head_dim].chunks_exact_mut(2);
                for (pair, f) in pairs.zip(frequencies) {
                    let (sin, cos) = (position as f32 * f).sin_cos();
                    pair.copy_from_slice(&[cos, sin]);
                }
            }
        }
        unsafe {
            device.copy_in(Stream::Compute, self.host.places.as_ptr().cast(), b.places.len() * 8, rooms.places, 0);
            if rooms.angles.bytes > 0 {
                let bytes = b.places.len() * c.head_dim * 4;
                device.copy_in(Stream::Compute, self.host.angles.as_ptr().cast(), bytes, rooms.angles, 0);
            }
        }
        true
    }

    pub(super) fn attention(&mut self, pass: &mut Pass<'_, '_>, l: usize, attends: bool) {
        let (c, b) = (&pass.model.config, &mut *pass.buffers);
        let n = b.places.len();
        let (input, residual) = (self.at(0), self.at(Front::new(n, c).residual()));
        let (qkv, mixed): (View, View) = (self.rooms.qkv.into(), self.rooms.mixed.into());
        self.note(Note::Compute(Some(Part::Attention)));
        let at = &self.weights.layers[l];
        let (project, output) = (at.qkv.call(n, input, qkv, Then::Store), at.o.call(n, mixed, residual, Then::Add));
        self.launch(Call::Norm(norm(c.norm, self.weights.layers[l].attn_norm, c.hidden, n, residual, input)));
        self.launch(Call::Linear(project));
        match self.kv.as_ref().filter(|_| attends) {
            Some(kv) => {
                let (heads, angles, places) = (kv.heads, self.rooms.angles, self.rooms.places);
                self.launch(Call::Append(Append { heads, layer: l, n, qkv, angles, places: places.into() }));
                for (i, group) in b.places.chunks(MAX_COLUMNS).enumerate() {
                    let most = group.iter().map(|p| p.position + 1).max().unwrap_or(1);
                    let part = |buffer, each: usize| View { buffer, at: (i * MAX_COLUMNS * each * 4) as u64 };
                    self.launch(Call::Attend(Attend {
                        heads,
                        layer: l,
                        n: group.len(),
                        window: c.window,
                        most,
                        qkv: part(qkv.buffer, c.qkv_dim()),
                        places: part(places, 2),
                        out: part(mixed.buffer, c.q_dim()),
                    }));
                }
                // The host's caches get the same, once the device has made it.
                let made = self.made(c, l, n);
                let made = &mut self.host.made[made];
                let (to, bytes) = (made.as_mut_ptr().cast(), size_of_val(made));
                unsafe { self.cache.device.copy_out(Stream::Compute, qkv.buffer, 0, to, bytes) };
            }
            None => {
                let Hybrid { cache, host, rooms, .. } = self;
                let (device, host_qkv) = (&mut cache.device, &mut host.qkv[..n * c.qkv_dim()]);
                let bytes = size_of_val(host_qkv);
                unsafe { device.copy_out(Stream::Compute, qkv.buffer, 0, host_qkv.as_mut_ptr().cast(), bytes) };
                device.synchronize(Stream::Compute);
                let Pass { team, kernels, caches, .. } = pass;
                let Buffers { places, cos_sin, attend, .. } = b;
                let host_qkv: &mut [f32] = bytemuck::cast_slice_mut(host_qkv);
                let mixed: &mut [f32] = bytemuck::cast_slice_mut(&mut host.mixed[..n * c.q_dim()]);
                attention::rotate_and_put(c, caches, l, places, host_qkv, cos_sin);
                attention::attention(team, kernels, c, caches, l, places, host_qkv, attend, mixed);
                device.note(Note::Host(Part::Attention));
                let bytes = size_of_val(mixed);
                unsafe { device.copy_in(Stream::Compute, mixed.as_ptr().cast(), bytes, rooms.mixed, 0) };
            }
        }
        self.launch(Call::Linear(output));
    }

    fn ffn(&mut self, pass: &mut Pass<'_, '_>, l: usize, lap: &mut clock::Instant) {
        let Pass { team, kernels, model, report, sparsity, buffers: b, observer, .. } = pass;
        let (c, layer, mode) = (&model.config, &model.layers[l], sparsity.mode(l));
        let (n, h) = (b.places.len(), c.hidden);
        let front = Front::new(n, c);
        // A dense layer computes everything, whatever the magnitude.
        let cut = if mode == Mode::Dense { -1.0 } else { sparsity.cut(l) };
        // What the device can do before the host has seen the residual.
        self.note(Note::Compute(Some(Part::Front)));
        self.cache.commit(l);
        self.again(l, Again::Front);
        let (input, residual) = (self.at(0), self.at(front.residual()));
        self.launch(Call::Norm(norm(c.norm, self.weights.layers[l].ffn_norm, h, n, residual, input)));
        let scored = mode == Mode::Predicted && self.score(c, l, n, sparsity.least(l));
        if mode == Mode::Dense {
            self.host.all_masks.fill(u32::MAX >> (MAX_COLUMNS - n));
            self.all.masks.copy_from_slice(&self.host.all_masks);
            self.send_masks(front, true);
        }
        let known = scored || mode == Mode::Dense;
        let table = &self.cache.layers[l].table;
        let whole = mode == Mode::Dense && table.residents() == c.ffn && layer.down_bias.is_empty();
        let alone = whole && observer.is_none() && self.migrator.is_none();
        if !alone {
            let looks_on = self.migrator.is_some() || observer.is_some() || sparsity.looks_ahead(l);
            let numbers = match (scored && self.migrator.is_some(), known && !looks_on) {
                (true, _) => front.scores() + n * c.ffn,
                (false, true) => front.residual(),
                (false, false) => front.scores(),
            };
            let to = self.host.received.as_mut_ptr().cast();
            unsafe { self.cache.device.copy_out(Stream::Compute, self.rooms.front, 0, to, numbers * 4) };
        }
        self.cache.device.end_sequence();
        self.cache.device.record(Stream::Compute, self.front[l]);
        self.host.active[l] = 0;
        if known {
            self.launch_ffn(c, l, n, layer, cut);
        }
        if alone {
            self.wanted[l] = c.ffn;
            self.merge(l, n, h, false);
            report.attention_ns += clock::lap(lap);
            report.add_layer((l, layer), c, n, mode, None, Counts::default());
            return;
        }
        self.cache.device.synchronize_event(self.front[l]);
        report.attention_ns += clock::lap(lap);
        // What is computed, as the host sees it.
        b.x.copy_from_slice(bytemuck::cast_slice(&self.host.received[front.residual()..][..n * h]));
        let residual = &b.x[..];
        b.normed.copy_from_slice(bytemuck::cast_slice(&self.host.received[..n * h]));
        let mut tools = Tools { model, team, kernels, room: &mut b.room };
        sparsity.predict(&mut tools, l, residual, n, Some(&self.cache), scored, &mut b.predicted);
        report.predictor_ns += clock::lap(lap);
        self.cache.device.note(Note::Host(Part::Predictor));
        b.columns.set(&b.normed, n, layer.ffn.quant);
        b.predicted.selections.resize_with(c.layers, Selection::default);
        let chosen = &mut b.predicted.selections[l];
        if scored {
            chosen.wanted(&self.host.received[front.masks()..][..c.ffn]);
            let scores = &self.host.received[front.scores()..][..n * c.ffn];
            b.predicted.scores.resize(n * c.ffn, 0.0);
            if self.migrator.is_some() {
                b.predicted.scores.copy_from_slice(bytemuck::cast_slice(scores));
            }
        } else if mode == Mode::Exact {
            b.gates.resize(n * c.ffn, 0.0);
            gates(team, kernels, c, layer, &b.columns, &mut b.gates);
            chosen.fired(c, &b.gates, n, cut);
            self.cache.device.note(Note::Host(Part::Predictor));
        }
        let selection = (mode != Mode::Dense).then_some(&b.predicted.selections[l]);
        if !known {
            let chosen = selection.expect("not dense");
            self.host.masks.fill(0);
            chosen
                .neurons
                .iter()
                .zip(&chosen.masks)
                .for_each(|(&neuron, &mask)| self.host.masks[neuron as usize] = mask);
            self.send_masks(front, false);
            self.launch_ffn(c, l, n, layer, cut);
        }
        if let Some(observer) = observer {
            b.true_gates.resize(n * c.ffn, 0.0);
            b.activations.resize(n * c.ffn, 0.0);
            let (gates, activations) = (&mut b.true_gates, &mut b.activations);
            ffn::activations(team, kernels, c, layer, &b.columns, gates, activations);
            let (first, input) = (b.places[0].position, &b.normed);
            observer.layer(&Seen { layer: l, first, n, residual, input, gates, activations, selection });
        }
        // Split: what is in no slot is the CPU's.
        let all = selection.unwrap_or(&self.all);
        self.rest.neurons.clear();
        self.rest.masks.clear();
        let table = &self.cache.layers[l].table;
        for (&neuron, &mask) in all.neurons.iter().zip(&all.masks).filter(|(n, _)| table.place(**n).is_none()) {
            self.rest.neurons.push(neuron);
            self.rest.masks.push(mask);
        }
        self.wanted[l] = all.neurons.len() - self.rest.neurons.len();
        self.cache.device.note(Note::Host(Part::Drive));
        if let Some(mut migrator) = self.migrator.take() {
            report.ffn_ns += clock::lap(lap);
            let own = sparsity.own_threshold(l).map(|(threshold, _)| (threshold, &b.predicted.scores[..]));
            let batch = b.places.windows(2).any(|two| two[0].cache != two[1].cache);
            let at = Between { layer: l, first: b.places[0].position, n, batch, residual, selection, own };
            migrator.apply(&mut self.cache, sparsity);
            migrator.tell(&at, &self.cache);
            self.migrator = Some(migrator);
            report.scheduler_ns += clock::lap(lap);
            self.cache.device.note(Note::Host(Part::Scheduler));
        }
        // Together: the device computes its half while the CPU computes its own.
        let mut read = Counts::default();
        let needed = !self.rest.neurons.is_empty() || !layer.down_bias.is_empty();
        if needed {
            let mut lap = clock::now();
            let half: &mut [f32] = bytemuck::cast_slice_mut(&mut self.host.half[..n * h]);
            half.fill(0.0);
            let work = Work::Selected(&self.rest);
            read = ffn::ffn(team, kernels, c, layer, &b.columns, work, cut, &mut [], &mut b.ffn, half);
            self.cache.device.worked(read.rows() * layer.ffn.row_bytes as u64, clock::lap(&mut lap), 0);
        }
        self.cache.counters.misses += read.active;
        self.cache.layers[l].misses += read.active;
        self.merge(l, n, h, needed);
        report.ffn_ns += clock::lap(lap);
        report.add_layer((l, layer), c, n, mode, selection, read);
    }

    /// Has the device score a layer's neurons and choose among them, if it has the predictor.
    fn score(&mut self, c: &ModelConfig, l: usize, n: usize, least: [f32; 2]) -> bool {
        let front = Front::new(n, c);
        let (input, residual, scores) = (self.at(0), self.at(front.residual()), self.at(front.scores()));
        match self.scorers.get(l) {
            None => return false,
            Some(&Scorer::Sign { bits }) => {
                self.launch(Call::SignScores(SignScores { hidden: c.hidden, ffn: c.ffn, n, bits, x: input, scores }));
            }
            Some(&Scorer::Mlp { inner, outer, epsilon }) => {
                let room = self.scorers.inner.expect("made with the first network").into();
                let x = self.rooms.half.into();
                self.launch(Call::Norm(norm(NormKind::Rms(epsilon), self.weights.plain, c.hidden, n, residual, x)));
                self.launch(Call::Linear(inner.call(n, x, room, Then::Relu)));
                self.launch(Call::Linear(outer.call(n, room, scores, Then::Store)));
            }
        }
        let (masks, at) = (self.at(front.masks()), &self.cache.layers[l]);
        let (bucket, slots) = (at.bucket, at.table.slots().len());
        self.launch(Call::Select(Select { ffn: c.ffn, n, slots, least, bucket, scores, masks }));
        true
    }

    fn send_masks(&mut self, front: Front, all: bool) {
        let masks = if all { &self.host.all_masks } else { &self.host.masks };
        let (from, bytes, to) = (masks.as_ptr().cast(), size_of_val(&masks[..]), self.at(front.masks()));
        unsafe { self.cache.device.copy_in(Stream::Compute, from, bytes, to.buffer, to.at) };
    }

    /// The device's half of a layer with so many slots.
    fn ffn_call(&self, c: &ModelConfig, l: usize, n: usize, layer: &Layer, cut: f32, slots: usize) -> SparseFfn {
        let at = &self.cache.layers[l];
        SparseFfn {
            quant: layer.ffn.quant,
            kind: c.ffn_kind,
            activation: c.activation,
            cut,
            hidden: c.hidden,
            ffn: c.ffn,
            slots,
            n,
            blocks: at.blocks,
            bucket: at.bucket,
            up_bias: at.up_bias,
            input: self.rooms.front,
            output: self.rooms.output,
        }
    }

    /// Puts the device's half of a layer on its stream, and what says how many were active.
    fn launch_ffn(&mut self, c: &ModelConfig, l: usize, n: usize, layer: &Layer, cut: f32) {
        let slots = self.cache.layers[l].table.slots().len();
        if slots == 0 {
            return;
        }
        self.note(Note::Compute(Some(Part::Ffn)));
        self.again(l, Again::Half);
        self.launch(Call::SparseFfn(self.ffn_call(c, l, n, layer, cut, slots)));
        self.note(Note::Compute(None));
        let (to, at) = (self.host.active[l..].as_mut_ptr().cast(), (n * c.hidden * 4) as u64);
        unsafe { self.cache.device.copy_out(Stream::Compute, self.rooms.output, at, to, 4) };
        self.cache.device.end_sequence();
        self.cache.used(l);
    }

    /// Adds the halves to the residual.
    fn merge(&mut self, l: usize, n: usize, h: usize, both: bool) {
        let (count, to) = (n * h, self.at(Front { n, hidden: h, ffn: self.host.masks.len() }.residual()));
        self.note(Note::Compute(Some(Part::Merge)));
        self.again(l, Again::Merge);
        if both {
            let (from, half) = (self.host.half.as_ptr().cast(), self.rooms.half);
            unsafe { self.cache.device.copy_in(Stream::Compute, from, count * 4, half, 0) };
            self.launch(Call::Add(Add { count, from: half.into(), to }));
        }
        if !self.cache.layers[l].table.slots().is_empty() {
            self.launch(Call::Add(Add { count, from: self.rooms.output.into(), to }));
        }
        self.cache.device.end_sequence();
        self.cache.device.record(Stream::Compute, self.merged[l]);
    }

    /// Where what the device makes of a layer's queries, keys and values comes to: of a chunk there is room for two layers.
    pub(super) fn made(&self, c: &ModelConfig, l: usize, n: usize) -> std::ops::Range<usize> {
        let (turn, numbers) = (if n > MAX_COLUMNS { l % 2 } else { l }, n * c.qkv_dim());
        turn * numbers..(turn + 1) * numbers
    }

    /// The columns that are asked for, through the head.
    pub(super) fn logits(&mut self, pass: &mut Pass<'_, '_>) {
        let (c, b) = (&pass.model.config, &mut *pass.buffers);
        let (n, h) = (b.places.len(), c.hidden);
        let residual = Front::new(n, c).residual();
        b.logits.resize(b.heads.len() * c.vocab, 0.0);
        self.note(Note::Compute(Some(Part::Head)));
        for (heads, logits) in b.heads.chunks(MAX_COLUMNS).zip(b.logits.chunks_mut(MAX_COLUMNS * c.vocab)) {
            for (i, &row) in heads.iter().enumerate() {
                let (x, out) = (self.at(residual + row * h), self.at(i * h));
                self.launch(Call::Norm(norm(c.norm, self.weights.out_norm, h, 1, x, out)));
            }
            let out = self.rooms.logits;
            self.launch(Call::Linear(self.weights.head.call(heads.len(), self.at(0), out.into(), Then::Store)));
            let (to, bytes) = (logits.as_mut_ptr().cast(), size_of_val(logits));
            unsafe { self.cache.device.copy_out(Stream::Compute, out, 0, to, bytes) };
        }
    }

    fn head(&mut self, pass: &mut Pass<'_, '_>, attends: bool) {
        self.logits(pass);
        let (c, b) = (&pass.model.config, &*pass.buffers);
        let n = b.places.len();
        let Hybrid { cache, kv, host, .. } = self;
        cache.device.synchronize(Stream::Compute);
        for (front, merged) in self.front.iter().zip(&self.merged) {
            cache.counters.ffn_ns += cache.device.elapsed_ns(*front, *merged);
        }
        cache.counters.tokens += n as u64;
        let mut rows = 0;
        for ((layer, &active), &wanted) in cache.layers.iter_mut().zip(host.active.iter()).zip(&self.wanted) {
            layer.hits += u64::from(active);
            cache.counters.hits += u64::from(active);
            // The first row of what was wanted, the others of what is active in some column.
            rows += wanted + wanted.min(active as usize) * (c.ffn_kind.rows() - 1);
        }
        cache.device.has_read((rows * pass.model.layers[0].ffn.row_bytes) as u64);
        if let Some(kv) = kv.as_mut().filter(|_| attends) {
            let made: &[f32] = bytemuck::cast_slice(&host.made);
            for (l, made) in made.chunks_exact(n * c.qkv_dim()).take(c.layers).enumerate() {
                for (&Place { cache, position }, qkv) in b.places.iter().zip(made.chunks_exact(c.qkv_dim())) {
                    let (k, v) = qkv[c.q_dim()..].split_at(c.kv_dim());
                    pass.caches[cache].put(l, 0, position, k);
                    pass.caches[cache].put(l, 1, position, v);
                }
            }
            kv.agree(&b.places, pass.caches);
        }
    }
}
