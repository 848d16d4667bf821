//! THE HOT PATH: tokens in, logits out.

use super::attention::{attention, queries, rotate_and_put};
use super::ffn::{self, FfnBuffers, Neurons, Selection, Tile, Work};
use super::hybrid::{Hybrid, Pass};
use super::observer::{LiveAudit, Observer, Seen};
use super::report::Report;
use super::session::CHUNK;
use super::sparsity::{Mode, Predicted, Sparsity};
use crate::clock;
use crate::cpu::attend::AttendRoom;
use crate::cpu::team::Parts;
use crate::cpu::{Columns, Kernels, MAX_COLUMNS, Team};
use crate::device::Fault;
use crate::device::timeline::{Note, Part, Read, Timeline};
use crate::error::{Error, Result};
use crate::model::config::Positions;
use crate::model::{KvCache, Model};
use crate::ops::gates::gates;
use crate::ops::linear::{linear, read_row};
use crate::ops::math;
use crate::predictor::{Room, Tools};
use crate::scheduler::Policy;
use std::sync::Arc;

/// Which logits a forward pass makes: the head is as large as several layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: more of the prompt follows.
    None,
    /// Of the last token of each timeline.
    Last,
    /// Of every token.
    All,
}

/// One column of a batch: a token, and the cache of the timeline that it continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    pub cache: usize,
    pub token: u32,
}

/// Where a column stands.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub cache: usize,
    pub position: usize,
}

/// A model, the threads that run it and the room they need.
pub struct Engine {
    /// A device's part in passes of up to [`CHUNK`] tokens. Dropped before the model: its copies read the store.
    pub hybrid: Option<Hybrid>,
    /// Shared with the scheduler's thread, which predicts with it.
    pub model: Arc<Model>,
    pub kernels: Kernels,
    /// What it did since somebody last set it back.
    pub report: Report,
    /// Looks at the predictor now and then while tokens are decoded.
    pub audit: Option<LiveAudit>,
    /// What it does and when, if that is kept; with a device, the device keeps it.
    timeline: Option<Box<Timeline>>,
    team: Team,
    sparsity: Sparsity,
    buffers: Buffers,
}

/// Activations of the tokens in flight; grows to the largest batch seen.
#[derive(Default)]
pub(super) struct Buffers {
    /// Residual stream, `[n, hidden]`.
    pub x: Vec<f32>,
    /// `[n, hidden]`
    pub normed: Vec<f32>,
    /// `[n, qkv_dim]`
    pub qkv: Vec<f32>,
    /// `[n, q_dim]`
    pub mixed: Vec<f32>,
    /// `[n, hidden]`
    pub projected: Vec<f32>,
    /// Where each column stands, `[n]`, and the columns that logits are made of.
    pub places: Vec<Place>,
    pub heads: Vec<usize>,
    /// `[heads, vocab]`
    pub logits: Vec<f32>,
    pub columns: Columns,
    pub ffn: FfnBuffers,
    pub predicted: Predicted,
    pub room: Room,
    /// Gate products of all neurons, `[n, ffn]`, in exact mode.
    pub gates: Vec<f32>,
    /// The same and the activations, for an observer.
    pub true_gates: Vec<f32>,
    pub activations: Vec<f32>,
    /// Of each neuron, in how many tokens of a prompt it was active.
    pub counts: Vec<u32>,
    /// One per thread.
    pub tiles: Vec<Tile>,
    pub attend: Vec<AttendRoom>,
    pub cos_sin: Vec<(f32, f32)>,
}

impl Engine {
    pub fn new(model: Model, threads: usize, kernels: Kernels) -> Engine {
        let team = Team::new(threads);
        let threads = team.threads();
        let buffers = Buffers {
            tiles: (0..threads).map(|_| Tile::new()).collect(),
            attend: (0..threads).map(|_| AttendRoom::default()).collect(),
            ..Buffers::default()
        };
        let sparsity = Sparsity::dense(model.config.layers);
        let model = Arc::new(model);
        let report = Report::default();
        Engine { model, kernels, report, hybrid: None, audit: None, timeline: None, team, sparsity, buffers }
    }

    /// From now on the FFNs of up to [`MAX_COLUMNS`] tokens compute what `sparsity` says; longer prompts run dense.
    /// Returns what was set before.
    pub fn set_sparsity(&mut self, sparsity: Sparsity) -> Sparsity {
        if let Some(hybrid) = &mut self.hybrid {
            // Without its reservation the device holds no more than it did.
            let _ = hybrid.bring_predictors(&sparsity, &self.model.config);
        }
        std::mem::replace(&mut self.sparsity, sparsity)
    }

    pub fn sparsity(&self) -> &Sparsity {
        &self.sparsity
    }

    pub fn sparsity_mut(&mut self) -> &mut Sparsity {
        &mut self.sparsity
    }

    /// Goes by another policy from the next layer on; `false` where nothing can move.
    pub fn set_policy(&mut self, policy: Policy) -> bool {
        let migrator = self.hybrid.as_mut().and_then(|hybrid| hybrid.migrator.as_mut());
        migrator.is_some_and(|migrator| migrator.set_policy(policy, &mut self.sparsity))
    }

    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// What predictors compute with, between two passes.
    pub fn tools(&mut self) -> Tools<'_> {
        let Engine { model, kernels, team, buffers, .. } = self;
        Tools { model, team, kernels, room: &mut buffers.room }
    }

    /// Runs `tokens` at the positions after those in `kv` and adds them to it. Returns logits, `[0, 1 or n, vocab]`.
    /// The tokens are below the vocabulary size and fit the cache: [`super::Session::check`] sees to both.
    pub fn forward(&mut self, kv: &mut KvCache, tokens: &[u32], want: Logits) -> &mut [f32] {
        let mut audit = self.audit.take();
        let due = audit.as_mut().filter(|_| tokens.len() == 1).is_some_and(|audit| audit.is_due(1));
        let observer = audit.as_mut().filter(|_| due).map(|audit| audit as &mut dyn Observer);
        let first = kv.len;
        self.place(tokens.iter().enumerate().map(|(t, _)| Place { cache: 0, position: first + t }), want);
        self.run(std::slice::from_mut(kv), &|t| tokens[t], observer);
        self.audit = audit;
        &mut self.buffers.logits
    }

    /// As [`Engine::forward`], for several timelines at once: each column is a token that continues the timeline of its own
    /// cache, after those of its columns that stand before it. Weights are read once for all columns. Up to [`MAX_COLUMNS`]
    /// columns compute what the sparsity says. Logits are in the order of their columns, `[0, timelines or n, vocab]`.
    pub fn forward_batch(&mut self, caches: &mut [KvCache], columns: &[Column], want: Logits) -> &mut [f32] {
        let earlier = |t: usize, cache: usize| columns[..t].iter().filter(|c| c.cache == cache).count();
        let place =
            |(t, c): (usize, &Column)| Place { cache: c.cache, position: caches[c.cache].len + earlier(t, c.cache) };
        self.place(columns.iter().enumerate().map(place), want);
        let (mut audit, n) = (self.audit.take(), columns.len());
        let due = audit.as_mut().filter(|_| n <= MAX_COLUMNS).is_some_and(|audit| audit.is_due(n as u64));
        let observer = audit.as_mut().filter(|_| due).map(|audit| audit as &mut dyn Observer);
        self.run(caches, &|t| columns[t].token, observer);
        self.audit = audit;
        &mut self.buffers.logits
    }

    /// Logits of the last pass, as it returned them.
    pub fn logits(&mut self) -> &mut [f32] {
        &mut self.buffers.logits
    }

    /// As [`Engine::forward`], with the true activations of every layer shown to `observer`, which costs their computation.
    pub fn forward_observed(
        &mut self,
        kv: &mut KvCache,
        tokens: &[u32],
        want: Logits,
        observer: &mut dyn Observer,
    ) -> &mut [f32] {
        let first = kv.len;
        self.place(tokens.iter().enumerate().map(|(t, _)| Place { cache: 0, position: first + t }), want);
        self.run(std::slice::from_mut(kv), &|t| tokens[t], Some(observer))
    }

    /// Whether what the passes so far have made is to be trusted.
    ///
    /// # Errors
    /// [`Error::Fatal`] once the device has failed: its neurons are missing in everything since, and logits are no numbers.
    pub fn check(&self) -> Result<()> {
        match self.fault() {
            None => Ok(()),
            Some(fault) => Err(Error::Fatal(format!("the device has failed: {}", fault.0))),
        }
    }

    /// What its device has failed with.
    pub(super) fn fault(&self) -> Option<&Fault> {
        self.hybrid.as_ref()?.cache.device.fault()
    }

    /// The last pass's logits, once more.
    ///
    /// # Errors
    /// As [`Engine::check`].
    pub fn answer(&mut self) -> Result<&mut [f32]> {
        self.check()?;
        Ok(&mut self.buffers.logits)
    }

    /// Notes where the columns of the next pass stand, and of which there will be logits.
    fn place(&mut self, places: impl Iterator<Item = Place>, want: Logits) {
        let Buffers { places: all, heads, .. } = &mut self.buffers;
        all.clear();
        all.extend(places);
        heads.clear();
        let last = |t: usize| !all[t + 1..].iter().any(|later| later.cache == all[t].cache);
        match want {
            Logits::None => {}
            Logits::Last if all.iter().all(|p| p.cache == 0) => heads.extend(all.len().checked_sub(1)),
            Logits::Last => heads.extend((0..all.len()).filter(|&t| last(t))),
            Logits::All => heads.extend(0..all.len()),
        }
    }

    fn run(
        &mut self,
        caches: &mut [KvCache],
        token: &dyn Fn(usize) -> u32,
        mut observer: Option<&mut dyn Observer>,
    ) -> &mut [f32] {
        let Engine { model, kernels, report, hybrid, team, sparsity, buffers, timeline, .. } = self;
        let (c, b) = (&model.config, buffers);
        let (n, h) = (b.places.len(), c.hidden);
        let first = b.places.first().map_or(0, |place| place.position);
        note(hybrid, timeline, report, Note::Pass { tokens: n, first });
        assert!(n > 0 && b.places.iter().all(|p| p.position < caches[p.cache].context));
        b.x.resize(n * h, 0.0);
        b.normed.resize(n * h, 0.0);
        b.qkv.resize(n * c.qkv_dim(), 0.0);
        b.mixed.resize(n * c.q_dim(), 0.0);
        b.projected.resize(n * h, 0.0);
        // Attention's room grows with the position: the whole context at once, for nothing is allocated later.
        let context = caches.iter().map(|kv| kv.context).max().unwrap_or(0);
        b.attend.iter_mut().for_each(|room| room.reserve(queries(c), context, c.head_dim));
        let mut lap = clock::now();

        // 0 embed
        for (t, (place, x)) in b.places.iter().zip(b.x.chunks_exact_mut(h)).enumerate() {
            read_row(&model.embed, token(t) as usize, x);
            if let (Some(table), Positions::Learned { offset }) = (&model.positions, &c.positions) {
                read_row(table, place.position + offset, &mut b.projected[..h]);
                math::add(x, &b.projected[..h]);
            }
        }
        if let Some(hybrid) = hybrid
            && (n <= MAX_COLUMNS || n <= CHUNK && observer.is_none())
        {
            report.attention_ns += clock::lap(&mut lap);
            hybrid.pass(&mut Pass { team, kernels, model, report, sparsity, buffers: b, caches, observer });
            b.places.iter().for_each(|p| caches[p.cache].len = caches[p.cache].len.max(p.position + 1));
            let (residents, neurons) = (hybrid.residents(), c.ffn * c.layers);
            hybrid.note(Note::End { residents, neurons });
            if hybrid.cache.device.fault().is_some() {
                // Nobody may take for an answer what a failed device had a part in.
                b.logits.fill(f32::NAN);
            }
            report.tokens += n as u64;
            report.passes += 1;
            return &mut b.logits;
        }
        for (l, layer) in model.layers.iter().enumerate() {
            note(hybrid, timeline, report, Note::Layer(l));
            // 1 attention: norm, qkv, rope, KV append, scores and mix, output, residual
            each(team, n, &mut b.normed, |t, out| math::norm(c.norm, &layer.attn_norm, &b.x[t * h..(t + 1) * h], out));
            linear(team, kernels, &layer.qkv, &b.normed, n, &mut b.columns, &mut b.qkv);
            if !layer.qkv_bias.is_empty() {
                b.qkv.chunks_exact_mut(c.qkv_dim()).for_each(|qkv| math::add(qkv, &layer.qkv_bias));
            }
            rotate_and_put(c, caches, l, &b.places, &mut b.qkv, &mut b.cos_sin);
            attention(team, kernels, c, caches, l, &b.places, &b.qkv, &mut b.attend, &mut b.mixed);
            linear(team, kernels, &layer.o, &b.mixed, n, &mut b.columns, &mut b.projected);
            math::add(&mut b.x, &b.projected);
            if !layer.o_bias.is_empty() {
                b.x.chunks_exact_mut(h).for_each(|x| math::add(x, &layer.o_bias));
            }
            report.attention_ns += clock::lap(&mut lap);
            note(hybrid, timeline, report, Note::Host(Part::Attention));
            // 2 predict: which neurons to compute, here or further ahead
            let mode = if n <= MAX_COLUMNS { sparsity.mode(l) } else { Mode::Dense };
            if n <= MAX_COLUMNS {
                let mut tools = Tools { model, team, kernels, room: &mut b.room };
                sparsity.predict(&mut tools, l, &b.x, n, None, false, &mut b.predicted);
            }
            report.predictor_ns += clock::lap(&mut lap);
            note(hybrid, timeline, report, Note::Host(Part::Predictor));
            // 3 FFN: norm, gate, up, activation, down, residual
            each(team, n, &mut b.normed, |t, out| math::norm(c.norm, &layer.ffn_norm, &b.x[t * h..(t + 1) * h], out));
            b.columns.set(&b.normed, n, layer.ffn.quant);
            if mode == Mode::Exact {
                b.gates.resize(n * c.ffn, 0.0);
                gates(team, kernels, c, layer, &b.columns, &mut b.gates);
            }
            // Without somebody who looks on, the FFN lists for itself what fired.
            let listed = mode == Mode::Exact && observer.is_some();
            if listed {
                b.predicted.selections.resize_with(c.layers, Selection::default);
                b.predicted.selections[l].fired(c, &b.gates, n, sparsity.cut(l));
            }
            let selection = match mode {
                Mode::Predicted => b.predicted.selections.get(l),
                Mode::Exact if listed => b.predicted.selections.get(l),
                Mode::Exact | Mode::Dense => None,
            };
            let work = match (mode, selection) {
                (Mode::Exact, _) => Work::Gates(&b.gates),
                (_, Some(selection)) => Work::Selected(selection),
                _ => Work::All,
            };
            let cut = sparsity.cut(l);
            if let Some(observer) = &mut observer {
                b.true_gates.resize(n * c.ffn, 0.0);
                b.activations.resize(n * c.ffn, 0.0);
                let (gates, activations) = (&mut b.true_gates, &mut b.activations);
                ffn::activations(team, kernels, c, layer, &b.columns, gates, activations);
                let (residual, input) = (&b.x, &b.normed);
                observer.layer(&Seen { layer: l, first, n, residual, input, gates, activations, selection });
            }
            let (tiles, rooms, x) = (&mut b.tiles, &mut b.ffn, &mut b.x);
            let read = ffn::ffn(team, kernels, c, layer, &b.columns, work, cut, tiles, rooms, x);
            if n > MAX_COLUMNS
                && let Some(migrator) = hybrid.as_mut().and_then(|h| h.migrator.as_mut())
            {
                b.ffn.counts(c, Neurons::All(c.ffn), n, cut, &mut b.counts);
                migrator.prompt(l, first, n, &b.counts);
            }
            report.ffn_ns += clock::lap(&mut lap);
            report.add_layer((l, layer), c, n, mode, selection, read);
            note(hybrid, timeline, report, Note::Host(Part::Ffn));
        }
        b.places.iter().for_each(|p| caches[p.cache].len = caches[p.cache].len.max(p.position + 1));
        // 4 head
        note(hybrid, timeline, report, Note::Compute(Some(Part::Head)));
        let heads = &b.heads;
        b.logits.resize(heads.len() * c.vocab, 0.0);
        if !heads.is_empty() {
            let (x, normed) = (&b.x, &mut b.normed[..heads.len() * h]);
            let row = |i: usize| &x[heads[i] * h..(heads[i] + 1) * h];
            each(team, heads.len(), normed, |i, out| math::norm(c.norm, &model.out_norm, row(i), out));
            linear(team, kernels, &model.head, normed, heads.len(), &mut b.columns, &mut b.logits);
        }
        report.head_ns += clock::lap(&mut lap);
        report.tokens += n as u64;
        report.passes += 1;
        let (residents, neurons) = (hybrid.as_ref().map_or(0, Hybrid::residents), c.ffn * c.layers);
        note(hybrid, timeline, report, Note::Host(Part::Head));
        note(hybrid, timeline, report, Note::End { residents, neurons });
        &mut b.logits
    }

    /// Keeps what happens from now on. With a device it is the device that does: [`crate::device::Traced`].
    pub fn keep_timeline(&mut self) {
        self.timeline = Some(Box::new(Timeline::new(self.model.config.layers, MAX_COLUMNS)));
    }

    pub fn timeline(&mut self) -> Option<&mut Timeline> {
        match &mut self.hybrid {
            Some(hybrid) => hybrid.cache.device.timeline(),
            None => self.timeline.as_deref_mut(),
        }
    }
}

/// For a timeline, if one is kept.
fn note(hybrid: &mut Option<Hybrid>, timeline: &mut Option<Box<Timeline>>, report: &Report, note: Note) {
    match (hybrid, timeline) {
        (Some(hybrid), _) => hybrid.note(note),
        (None, Some(timeline)) => {
            let now = timeline.now();
            timeline.note(note, now, Read { host: report.ffn_bytes, ..Read::default() });
        }
        (None, None) => {}
    }
}

/// Calls `f(token, its part of out)` for each of n tokens, over the team if there are many.
fn each(team: &mut Team, n: usize, out: &mut [f32], f: impl Fn(usize, &mut [f32]) + Sync) {
    let size = out.len() / n;
    if n < 8 {
        out.chunks_exact_mut(size).enumerate().for_each(|(t, out)| f(t, out));
        return;
    }
    let parts = Parts::new(out);
    // SAFETY: each piece has its own part.
    team.run(n, |_, t| f(t, unsafe { parts.part(t * size..(t + 1) * size) }));
}
