//! The engine: a model with the threads and the memory that run it, and its passes.

use super::batch::{BatchToken, Buffers, CHUNK, Logits, MAX_CHUNK};
use super::ffn::CachedFfn;
use super::forward::{Pass, Step, forward};
use super::host::Host;
use super::inputs::OfLayer;
use super::observer::{LiveAudit, Observer};
use super::positions::TokenPosition;
use super::probe::Probe;
use super::report::Report;
use super::sparsity::{Foresight, Sparsity, Wanted};
use super::split::Split;
use crate::clock::{self, Duration};
use crate::cpu::shadow::{Magnitudes, Scale};
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Kernels, MAX_COLUMNS, ThreadPool};
use crate::device::timeline::{Note, Timeline};
use crate::device::{Fault, OutOfMemory};
use crate::error::{Error, Result};
use crate::formats::blocks::first_non_finite;
use crate::host_cache::HostCache;
use crate::model::{KvCache, Model};
use crate::ops::math;
use crate::predictor::Tools;
use crate::scheduler::Policy;
use std::sync::Arc;
use tracing::debug_span;

/// A model, the threads that run it, and their working memory.
pub struct Engine {
    /// The device's part in passes of up to [`Split::chunk`] tokens; `None` without a device. Dropped before the model, because its copies read
    /// the store.
    pub split: Option<Split>,
    /// The model; the scheduler's thread predicts with it, too.
    pub model: Arc<Model>,
    /// The CPU kernels that are used.
    pub kernels: Kernels,
    /// What was done since it was last cleared.
    pub report: Report,
    /// Compares predictions with true activations now and then, while tokens are decoded; `None`: never.
    pub audit: Option<LiveAudit>,
    /// Where neurons come from, if the store is larger than memory; `None`: from the mapped store.
    pub cached: Option<Box<CachedFfn>>,
    /// What is done and when, if a trace is kept; with a device, the device keeps it.
    timeline: Option<Box<Timeline>>,
    pool: ThreadPool,
    sparsity: Sparsity,
    buffers: Buffers,
    /// The steps of a pass in parts.
    steps: Vec<Step>,
    /// Passes so far, for the log.
    passes: u64,
    /// Whether the numbers that the last pass ended with are finite.
    pub(super) is_finite: bool,
    /// [`Engine::chunk`]
    chunk: usize,
}

impl Engine {
    /// An engine without a device that computes every neuron, with `threads` threads.
    pub fn new(model: Model, threads: usize, kernels: Kernels) -> Engine {
        let pool = ThreadPool::new(threads);
        let buffers = Buffers::new(pool.threads());
        let sparsity = Sparsity::dense(model.config.layers().len());
        let chunk = if model.config.is_routed() { MAX_CHUNK } else { CHUNK };
        let (model, report) = (Arc::new(model), Report::default());
        Engine {
            model,
            kernels,
            report,
            split: None,
            audit: None,
            cached: None,
            timeline: None,
            pool,
            sparsity,
            buffers,
            steps: Vec::new(),
            passes: 0,
            is_finite: true,
            chunk,
        }
    }

    /// Sets which neurons the FFNs of passes of up to [`MAX_COLUMNS`] tokens compute; longer prompts compute all. Returns what was set
    /// before.
    pub fn set_sparsity(&mut self, sparsity: Sparsity) -> Sparsity {
        if let Some(split) = &mut self.split {
            // If the reservation is lost, the device holds no more than before.
            let _ = split.upload_predictors(&sparsity, &self.model.config);
        }
        std::mem::replace(&mut self.sparsity, sparsity)
    }

    /// Tokens of a prompt that are to go through together: [`CHUNK`] of models whose weights each meet all tokens; up to [`MAX_CHUNK`] of a
    /// mixture, of which each chunk reads nearly all experts for a few tokens each. With a device what its plan says, to which a part may have
    /// to be copied for each chunk, and no more than it has memory for.
    pub fn chunk(&self) -> usize {
        self.split.as_ref().map_or(self.chunk, |split| self.chunk.min(split.chunk()))
    }

    /// Sets [`Engine::chunk`], [`CHUNK`] or more.
    pub fn set_chunk(&mut self, tokens: usize) {
        assert!(tokens >= CHUNK, "chunks of {tokens} tokens");
        if tokens < self.chunk {
            // What longer ones took is given back.
            let Buffers { experts, ffn, .. } = std::mem::replace(&mut self.buffers, Buffers::new(self.pool.threads()));
            self.buffers.experts.asks = experts.asks;
            self.buffers.ffn.inputs = ffn.inputs;
        }
        self.chunk = tokens;
    }

    /// Uploads the predictors that the device is to have, in place of what was reserved for them.
    ///
    /// # Errors
    /// The rest of the reservation cannot be allocated again.
    pub fn upload_predictors(&mut self) -> Result<(), OutOfMemory> {
        let Engine { split, sparsity, model, .. } = self;
        split.as_mut().map_or(Ok(()), |split| split.upload_predictors(sparsity, &model.config))
    }

    /// From now on the bytes of experts are asked for when they are chosen, all of a layer's at once: for a mixture that does not fit into
    /// memory, whose experts come from a disk.
    pub fn ask_for_experts(&mut self) {
        self.buffers.experts.asks = true;
    }

    /// Gives the inputs of each layer's products fixed steps, for prompts with one step for an input; empty: each chunk has its own.
    pub fn set_scales(&mut self, scales: Vec<OfLayer<Scale>>) {
        self.buffers.ffn.inputs.scales = scales;
    }

    /// Looks at the inputs of products from now on.
    pub fn look_at_inputs(&mut self) {
        let layers = self.model.config.layers().len();
        self.buffers.ffn.inputs.seen = (0..layers).map(|_| OfLayer::default()).collect();
    }

    /// What was seen of each layer's inputs, which are not looked at from now on.
    pub fn inputs_seen(&mut self) -> Vec<OfLayer<Magnitudes>> {
        std::mem::take(&mut self.buffers.ffn.inputs.seen)
    }

    /// Numbers that lay beyond fixed steps and were computed beside them, and all numbers of such inputs, since it was last asked.
    pub fn extracted(&mut self) -> [u64; 2] {
        let Buffers { columns, ffn, .. } = &mut self.buffers;
        let counts = [columns].into_iter().chain(ffn.columns()).map(|of| std::mem::take(&mut of.shadow.counted));
        counts.fold([0, 0], |sum, counted| [sum[0] + counted[0], sum[1] + counted[1]])
    }

    /// From now on the host's neurons come by way of this cache, which was made for this model's layers and for looking as far ahead as
    /// `foresight`. With a device, neurons move to it from the cache's frames.
    pub fn set_host_cache(&mut self, cache: HostCache, foresight: Option<Foresight>) {
        if let Some(split) = &mut self.split {
            // Nothing is copied from frames that go away.
            split.cache.settle(&mut *split.device);
        }
        self.cached =
            Some(Box::new(CachedFfn::new(cache, foresight, &self.model.layers, self.model.config.clusters())));
    }

    /// Which neurons each layer computes.
    pub fn sparsity(&self) -> &Sparsity {
        &self.sparsity
    }

    /// Whether a device computes a layer without the host where all of its neurons are there: not where the host routes, reads gates or adds a bias.
    pub fn skips_host(&self) -> bool {
        let of_host = |l: usize| match self.sparsity.predictor(l) {
            Some((predictor, ahead)) => predictor.form(l, ahead).is_none(),
            None => self.sparsity.wanted(l) != Wanted::All,
        };
        let layers = &self.model.layers;
        !self.model.config.is_mixture() && (0..layers.len()).all(|l| layers[l].down_bias.is_empty() && !of_host(l))
    }

    /// The same, to change thresholds while it runs.
    pub fn sparsity_mut(&mut self) -> &mut Sparsity {
        &mut self.sparsity
    }

    /// Changes the scheduler's policy from the next layer on; `false` if nothing can move.
    pub fn set_policy(&mut self, policy: Policy) -> bool {
        let Some(migrator) = self.split.as_mut().and_then(|split| split.migrator.as_mut()) else { return false };
        let before = migrator.policy().map_or("none", Policy::name);
        let set = migrator.set_policy(policy, &mut self.sparsity);
        tracing::debug!(before, after = policy.name(), set, "policy");
        set
    }

    /// Threads that compute, the caller's included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Computes with so many threads from now on, at most as many as it has.
    pub fn use_threads(&mut self, threads: usize) {
        if threads < self.pool.threads() {
            self.pool = ThreadPool::new(threads);
        }
    }

    /// From now on threads that wait for work spin for so long before they sleep.
    pub fn spin(&mut self, time: Duration) {
        self.pool.spin(time);
    }

    /// What predictors compute with, between two passes.
    pub fn tools(&mut self) -> Tools<'_> {
        let Engine { model, kernels, pool, buffers, .. } = self;
        Tools { model, pool, kernels, scratch: &mut buffers.scratch }
    }

    /// Runs `tokens` at the positions after those in `kv` and adds them to it. Returns the logits, `[0, 1 or n, vocab]`. The tokens must be
    /// below the vocabulary size and fit the cache, which [`super::Session::check`] checks, and [`KvCache::MAX_TOKENS`] at most.
    pub fn forward(&mut self, kv: &mut KvCache, tokens: &[u32], want: Logits) -> &mut [f32] {
        self.set_tokens(kv.len, tokens, want);
        self.run_audited(std::slice::from_mut(kv), tokens.len() == 1)
    }

    /// As [`Engine::forward`], for a prompt's chunk, and asks between layers whether to go on. `false`: it was stopped, and there is nothing new
    /// in `kv`.
    pub fn forward_while(
        &mut self,
        kv: &mut KvCache,
        tokens: &[u32],
        want: Logits,
        go_on: &mut dyn FnMut() -> bool,
    ) -> bool {
        self.set_tokens(kv.len, tokens, want);
        self.run(std::slice::from_mut(kv), None, true, go_on)
    }

    /// As [`Engine::forward`], for several sequences at once: each token continues the sequence of its own KV cache, after those of its
    /// tokens that come before it in the batch. Weights are read once for all tokens. Passes of up to [`MAX_COLUMNS`] tokens compute the
    /// neurons that the sparsity selects. Logits are in the order of their tokens, `[0, sequences or n, vocab]`.
    pub fn forward_batch(&mut self, caches: &mut [KvCache], batch: &[BatchToken], want: Logits) -> &mut [f32] {
        let earlier = |t: usize, sequence: usize| batch[..t].iter().filter(|b| b.sequence == sequence).count();
        let token_of = |(t, &BatchToken { sequence, token }): (usize, &BatchToken)| {
            (token, TokenPosition { sequence, position: caches[sequence].len + earlier(t, sequence) })
        };
        self.buffers.set_tokens(batch.iter().enumerate().map(token_of), want);
        self.run_audited(caches, batch.len() <= MAX_COLUMNS)
    }

    /// As [`Engine::forward`], and shows the true activations of every layer to `observer`, which costs their computation.
    pub fn forward_observed(
        &mut self,
        kv: &mut KvCache,
        tokens: &[u32],
        want: Logits,
        observer: &mut dyn Observer,
    ) -> &mut [f32] {
        self.set_tokens(kv.len, tokens, want);
        self.run(std::slice::from_mut(kv), Some(observer), true, &mut || true);
        &mut self.buffers.logits
    }

    /// Runs `tokens` as [`Engine::forward`] does, by the CPU alone and with every neuron however few they are, and returns their hidden
    /// states instead of logits: the residual behind the last layer, normalised as the head reads it, `[n, hidden]`.
    pub fn hidden_states(&mut self, kv: &mut KvCache, tokens: &[u32]) -> Vec<f32> {
        self.set_tokens(kv.len, tokens, Logits::None);
        self.run(std::slice::from_mut(kv), None, false, &mut || true);
        let (c, x) = (&self.model.config, &self.buffers.x);
        let mut hidden = vec![0.0; tokens.len() * c.hidden];
        for (x, out) in x.chunks_exact(c.hidden).zip(hidden.chunks_exact_mut(c.hidden)) {
            math::norm(c.norm, &self.model.out_norm, x, out);
        }
        self.is_finite = first_non_finite(&hidden).is_none();
        hidden
    }

    /// Logits of the last pass, as it returned them.
    pub fn logits(&mut self) -> &mut [f32] {
        &mut self.buffers.logits
    }

    /// Checks that the results of the passes so far can be used.
    ///
    /// # Errors
    /// [`Error::Fatal`] once the device has failed: its neurons are missing in everything since, and the logits are NaN.
    /// [`Error::BadFile`] if neurons that the last pass needed could not be read, or if it ended with numbers that are not finite.
    pub fn check(&self) -> Result<()> {
        match self.fault() {
            None => self.unread().or_else(|| self.not_finite()).map_or(Ok(()), Err),
            Some(fault) => Err(Error::Fatal(format!("the device has failed: {}", fault.0))),
        }
    }

    /// The device's failure, if it has failed.
    pub(super) fn fault(&self) -> Option<&Fault> {
        self.split.as_ref()?.device.fault()
    }

    /// The last pass's logits, once more.
    ///
    /// # Errors
    /// As [`Engine::check`].
    pub fn answer(&mut self) -> Result<&mut [f32]> {
        self.check()?;
        Ok(&mut self.buffers.logits)
    }

    /// Keeps a trace from now on. With a device it is the device that keeps it: [`crate::device::Traced`].
    pub fn keep_timeline(&mut self) {
        self.timeline = Some(Box::new(Timeline::new(self.model.config.layers().len(), MAX_COLUMNS)));
    }

    /// The trace kept since [`Engine::keep_timeline`]; `None` if none is kept.
    pub fn timeline(&mut self) -> Option<&mut Timeline> {
        match &mut self.split {
            Some(split) => split.device.timeline(),
            None => self.timeline.as_deref_mut(),
        }
    }

    /// Takes the tokens of one sequence for the next pass, the first at position `first`.
    fn set_tokens(&mut self, first: usize, tokens: &[u32], want: Logits) {
        let token_of = |(t, &token): (usize, &u32)| (token, TokenPosition { sequence: 0, position: first + t });
        self.buffers.set_tokens(tokens.iter().enumerate().map(token_of), want);
    }

    /// Runs the pass, with the live audit as observer if it is due; `decodes` says whether the pass is of the kind that is audited.
    fn run_audited(&mut self, caches: &mut [KvCache], decodes: bool) -> &mut [f32] {
        let (mut audit, n) = (self.audit.take(), self.buffers.positions.len() as u64);
        let due = audit.as_mut().filter(|_| decodes).is_some_and(|audit| audit.is_due(n));
        let observer = audit.as_mut().filter(|_| due).map(|audit| audit as &mut dyn Observer);
        self.run(caches, observer, true, &mut || true);
        self.audit = audit;
        &mut self.buffers.logits
    }

    /// Runs the tokens that were placed; where `divided` is false, a device has no part in it.
    /// `go_on` is asked between the layers of a chunk, and of any pass that the host computes alone; returns whether the pass came to its end.
    fn run(
        &mut self,
        caches: &mut [KvCache],
        observer: Option<&mut dyn Observer>,
        divided: bool,
        go_on: &mut dyn FnMut() -> bool,
    ) -> bool {
        self.passes += 1;
        let (number, tokens) = (self.passes, self.buffers.positions.len());
        let _pass = debug_span!("pass", number, tokens, sequences = self.buffers.sequences()).entered();
        let Engine { model, kernels, report, split, cached, pool, sparsity, buffers, timeline, steps, .. } = self;
        // What an earlier pass could not read may be there now.
        let before = cached.as_mut().map(|cached| {
            cached.cache.take_fault();
            cached.cache.counts()
        });
        let (n, neurons) = (buffers.positions.len(), model.config.movable() * model.config.movable_layers());
        assert!(n > 0 && buffers.positions.iter().all(|p| p.position < caches[p.sequence].context));
        let first = buffers.positions[0].position;
        // With an observer, a prompt's chunk is computed by the CPU.
        let (on_device, from_host) = match &mut *split {
            Some(split) if divided && (n <= MAX_COLUMNS || n <= split.chunk() && observer.is_none()) => {
                (Some(split), None)
            }
            idle => (None, idle.as_mut()),
        };
        let mut host = Host { split: from_host, timeline: timeline.as_deref_mut(), embeds: !divided };
        // A timeline is about speed, and an observer has the CPU compute what the pass does not need.
        let begins = observer.is_none().then_some(Note::Pass { tokens: n, first });
        let probe = Probe { lap: clock::now(), report, observer };
        let mut pass = Pass {
            model,
            pool,
            kernels,
            sparsity,
            buffers,
            caches,
            cached: cached.as_deref_mut(),
            probe,
            wanted: Wanted::All,
            steps,
        };
        let whole = match on_device {
            Some(split) => {
                begins.into_iter().for_each(|note| split.note(note));
                // Of few tokens the device keeps what the next pass begins with.
                let leaves = pass.is_chunk();
                forward(split, &mut pass, &mut || !leaves || go_on())
            }
            None => {
                begins.into_iter().for_each(|note| host.note(pass.probe.report, note));
                // Copies of what a device is to have may be under way, and for a few tokens reads for later layers.
                let leaves = host.split.is_none() && (pass.cached.is_none() || pass.is_chunk());
                forward(&mut host, &mut pass, &mut || !leaves || go_on())
            }
        };
        if whole {
            let last =
                |i: usize| buffers.positions[i + 1..].iter().all(|p| p.sequence != buffers.positions[i].sequence);
            for i in (0..buffers.positions.len()).filter(|&i| last(i)) {
                let TokenPosition { sequence, position } = buffers.positions[i];
                caches[sequence].commit(position + 1);
            }
        }
        if let (Some(cached), Some(before)) = (cached, before) {
            report.host_cache += cached.cache.counts().since(&before);
        }
        report.tokens += n as u64;
        report.passes += 1;
        let residents = split.as_ref().map_or(0, Split::residents);
        Host { split: split.as_mut(), timeline: timeline.as_deref_mut(), embeds: true }
            .note(report, Note::End { residents, neurons });
        let logits = if self.buffers.logit_rows.is_empty() || !whole { &[][..] } else { &self.buffers.logits[..] };
        // Before a cap makes numbers of what is infinite.
        self.is_finite = first_non_finite(logits).is_none();
        if whole {
            cap(&mut self.pool, self.model.config.logit_cap, &mut self.buffers.logits);
        }
        if !self.is_finite || self.fault().is_some() || self.unread().is_some() {
            // No result in which a failed device, neurons that could not be read or damaged weights had a part may pass for an answer.
            self.buffers.logits.fill(f32::NAN);
        }
        whole
    }
}

/// Logits x become cap * tanh(x / cap); without a cap they stay as they are.
fn cap(pool: &mut ThreadPool, cap: f32, logits: &mut [f32]) {
    /// Logits that a thread computes at a time.
    const PIECE: usize = 1 << 13;
    if cap == 0.0 {
        return;
    }
    let (count, parts) = (logits.len(), Parts::new(logits));
    pool.run(count.div_ceil(PIECE), |_, task| {
        // SAFETY: each task has its own logits.
        let logits = unsafe { parts.part(task * PIECE..count.min((task + 1) * PIECE)) };
        logits.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
    });
}
