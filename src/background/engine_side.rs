//! The engine's side of the scheduler: it sends observations, and applies decisions between layers.

use super::learnt::Learner;
use super::message::{Position, SentDecision, SentObservation};
use super::options::{BackgroundOptions, Tune};
use super::shared::{DECISIONS, OBSERVATIONS, Shared, VERDICTS};
use super::ticker::Ticker;
use super::worker::{Worker, write};
use crate::cache::exchange::{Receiver, Sender, exchange_of};
use crate::cache::{Frames, NeuronCache};
use crate::clock;
use crate::device::Device;
use crate::engine::{DividedLayer, Lookahead, Migrator, MigratorCounts, Sparsity};
use crate::ids::{LayerId, StoreId};
use crate::model::Model;
use crate::scheduler::sequences::Known;
use crate::scheduler::{Comparison, LayerTimes, Policy};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tracing::trace;

/// Passes from one whose scores the scheduler gets to the next: copies of scores take time on the link.
const SCORES_EVERY: u64 = 4;

/// How long the scheduler's thread stays awake after an observation, giving way to whatever else runs on its core: to wake it takes some microseconds
/// of the engine's thread. Longer than a layer of most models.
const AWAKE: Duration = Duration::from_millis(5);

/// Where the scheduler runs.
enum Beside {
    Thread {
        to: Sender<SentObservation>,
        from: Receiver<SentDecision>,
        thread: Option<JoinHandle<Worker>>,
    },
    /// `None` once it has ended.
    Clock(Option<Box<Ticker>>),
}

/// The engine's side of the scheduler; dropping it ends its thread.
pub struct Background {
    beside: Beside,
    shared: Arc<Shared>,
    layers: usize,
    ahead: usize,
    /// What predicts `ahead` layers ahead; `None`: only frequencies count.
    lookahead: Option<Lookahead>,
    tune: Tune,
    /// Passes of few tokens that have begun.
    pass: u64,
    now: Position,
    counts: MigratorCounts,
    /// By layer, whether the scheduler was told of its slots.
    told: Vec<bool>,
    /// The frequencies of each sequence, which the scheduler adds to.
    known: Known,
    threads: usize,
    begun: Begun,
}

/// Moves that have begun since the scheduler was shown a layer.
#[derive(Clone, Copy, Default)]
struct Begun {
    moves: u64,
    /// Time for which beginning them kept the CPU from its part, ns, without what a virtual device did for them: that of one thread of several
    /// beside the part, of all behind it, and none while the device's attention runs. 0 on a virtual clock.
    ns: u64,
}

impl Background {
    /// Starts it. `model` is the engine's; `block_bytes` is the size of one neuron's block.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(model: Arc<Model>, block_bytes: usize, options: BackgroundOptions) -> std::io::Result<Background> {
        Background::start_learning(model, block_bytes, options, None)
    }

    /// As [`Background::start`]; `learner` counts what is active.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start_learning(
        model: Arc<Model>,
        block_bytes: usize,
        options: BackgroundOptions,
        learner: Option<Learner>,
    ) -> std::io::Result<Background> {
        let (hidden, ffn, layers) = (model.config.hidden, model.config.movable(), model.config.layers().len());
        let sequences = options.sequences.max(1);
        let shared = Shared { policy: AtomicUsize::new(options.policy as usize), ..Shared::default() };
        let shared = Arc::new(shared);
        let (ahead, tune, latency) = (options.ahead.max(1), Arc::clone(&options.tune), options.latency);
        let threads = options.threads.max(1);
        let lookahead = options.predictor.clone().map(|predictor| (predictor, ahead));
        let mut worker = Worker::new(model, block_bytes, options);
        worker.learner = learner;
        let known = worker.scheduler.known();
        let observation = || SentObservation::new(hidden, ffn, sequences);
        let decision = || SentDecision { moves: Vec::with_capacity(ffn), ..SentDecision::default() };
        let beside = if let Some(latency) = latency {
            Beside::Clock(Some(Box::new(Ticker::new(worker, latency, observation, decision))))
        } else {
            let (to, inbox) = exchange_of(OBSERVATIONS, observation);
            let (outbox, from) = exchange_of(DECISIONS, decision);
            let shared = shared.clone();
            let run = move || run(worker, inbox, outbox, &shared);
            Beside::Thread { to, from, thread: Some(std::thread::Builder::new().name("scheduler".into()).spawn(run)?) }
        };
        let counts = MigratorCounts::default();
        let (pass, now, told, begun) = (0, Position::default(), vec![false; layers], Begun::default());
        Ok(Background {
            beside,
            shared,
            layers,
            ahead,
            lookahead,
            tune,
            pass,
            now,
            counts,
            told,
            known,
            threads,
            begun,
        })
    }

    fn holding(&self) -> Policy {
        Policy::ALL[self.shared.policy.load(Ordering::Relaxed)]
    }

    fn balances(&self) -> bool {
        (self.tune)(self.holding().rules()).thresholds
    }

    /// Sends an observation that `fill` writes over an earlier one. Counts it, and wakes the thread.
    fn send(&mut self, now_ns: u64, fill: impl FnOnce(&mut SentObservation)) {
        let sent = match &mut self.beside {
            Beside::Thread { to, .. } => to.try_send(fill),
            Beside::Clock(ticker) => ticker.as_mut().is_some_and(|ticker| ticker.send(now_ns, &self.shared, fill)),
        };
        self.counts.observed += 1;
        self.counts.lost += u64::from(!sent);
        if let Beside::Thread { thread: Some(thread), .. } = &self.beside {
            thread.thread().unpark();
        }
    }

    fn end(&mut self) -> Option<Worker> {
        let Beside::Thread { thread, .. } = &mut self.beside else { return None };
        let thread = thread.take()?;
        self.shared.stop.store(true, Ordering::Release);
        thread.thread().unpark();
        thread.join().ok()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.end();
    }
}

impl Migrator for Background {
    fn apply(
        &mut self,
        layer: usize,
        begins: bool,
        device: &mut dyn Device,
        cache: &mut NeuronCache,
        mut frames: Option<&mut dyn Frames>,
        sparsity: &mut Sparsity,
    ) {
        self.pass += u64::from(begins && layer == 0);
        let at = Position::new(self.pass, layer, self.layers);
        self.now = if begins { at } else { at.divided() };
        self.shared.now.store(self.now.0, Ordering::Relaxed);
        let now_ns = device.totals().clock_ns;
        // Decisions made under a policy that balances thresholds may arrive after a change to one that does not.
        let (balances, now) = (self.balances(), self.now);
        let (counts, all) = (&mut self.counts, &mut self.begun);
        let is_timed = matches!(self.beside, Beside::Thread { .. }) && !begins;
        let share = if frames.is_some() { 1 } else { self.threads as u64 };
        let mut apply = |decision: &mut SentDecision| {
            let layer = decision.layer.index();
            if let Some(probabilities) = decision.thresholds.take().filter(|_| balances) {
                sparsity.set_thresholds(layer, probabilities);
            }
            if decision.moves.is_empty() {
                return;
            }
            if now > decision.until {
                trace!(layer, moves = decision.moves.len(), "moves come too late");
                counts.stale += decision.moves.len() as u64;
                return;
            }
            let moves = decision.moves.iter().map(|m| (m.slot(), m.neuron()));
            let frames = frames.as_mut().map(|frames| &mut **frames as &mut dyn Frames);
            let start = is_timed.then(|| (clock::now(), device.totals().pretended_ns));
            let outcome = cache.migrate_all(device, layer, frames, moves);
            counts.refused += outcome.refused as u64;
            all.moves += outcome.begun as u64;
            if let Some((mut lap, pretended)) = start {
                all.ns += clock::lap(&mut lap).saturating_sub(device.totals().pretended_ns - pretended) / share;
            }
            let (begun, refused) = (outcome.begun, outcome.refused);
            trace!(layer, moves = decision.moves.len(), begun, refused, "moves begin");
        };
        match &mut self.beside {
            // A bounded number, because the thread goes on deciding meanwhile.
            Beside::Thread { from, .. } => _ = (0..DECISIONS).find(|_| from.try_take(&mut apply).is_none()),
            Beside::Clock(None) => {}
            Beside::Clock(Some(ticker)) => {
                ticker.advance(now_ns, now, &self.shared);
                ticker.decided(&mut apply);
            }
        }
    }

    fn wants_scores(&self) -> bool {
        self.balances() && self.pass.is_multiple_of(SCORES_EVERY)
    }

    fn lookahead(&self) -> Option<&Lookahead> {
        self.lookahead.as_ref().filter(|_| (self.tune)(self.holding().rules()).moves)
    }

    fn observe(&mut self, at: &DividedLayer<'_>, device: &dyn Device, cache: &mut NeuronCache) {
        let Some(selection) = at.selection else { return };
        let (wants_scores, decodes) = (self.wants_scores(), at.n == 1 || at.batch);
        let (position, ahead, looks_ahead) = (self.now, self.ahead, self.lookahead.is_some());
        let totals = device.totals();
        let Begun { moves, ns } = std::mem::take(&mut self.begun);
        let times = LayerTimes { moves, moves_ns: ns, ..at.times };
        // Taken out and put back: an observation that is lost has told nothing.
        let mut told = std::mem::take(&mut self.told);
        self.send(totals.clock_ns, |seen| {
            let first = if at.batch { 0 } else { at.residual.len() / at.n * (at.n - 1) };
            (seen.layer, seen.position) = (LayerId::new(at.layer), position);
            seen.begins = at.first == 0 && at.layer == 0;
            seen.prompt = (!decodes).then_some(at.n);
            seen.sequences.clear();
            seen.sequences.extend_from_slice(at.sequences);
            seen.residual.clear();
            seen.residual.extend_from_slice(&at.residual[first..]);
            seen.computed.clear();
            seen.computed.extend_from_slice(&selection.neurons);
            seen.counts.clear();
            seen.fired_layer = at.fired.layer;
            seen.fired.neurons.clone_from(&at.fired.neurons.neurons);
            seen.fired.masks.clone_from(&at.fired.neurons.masks);
            seen.fired_sequences.clone_from(&at.fired.sequences);
            seen.audited = at.missed.is_some();
            seen.missed.clear();
            seen.missed.extend(at.missed.into_iter().flatten());
            seen.scores.clear();
            if let Some((own, scores)) = at.own.filter(|_| decodes && wants_scores) {
                seen.own = own;
                extend_with_highest(&mut seen.scores, scores, at.n);
            }
            seen.ahead_scores.clear();
            if let Some(scores) = at.ahead {
                let of_last = if at.batch { 0 } else { scores.len() / at.n * (at.n - 1) };
                extend_with_highest(&mut seen.ahead_scores, &scores[of_last..], if at.batch { at.n } else { 1 });
            }
            seen.slots.fill(&mut cache.layers[at.layer].table, &mut told[at.layer]);
            seen.ahead_slots.clear();
            if let Some(target) = cache.layers.get_mut(at.layer + ahead).filter(|_| looks_ahead) {
                seen.ahead_slots.fill(&mut target.table, &mut told[at.layer + ahead]);
            }
            (seen.in_flight, seen.totals, seen.times) = (cache.in_flight() as u64, totals, times);
        });
        self.told = told;
    }

    fn prompt(&mut self, layer: usize, first: usize, tokens: usize, sequence: u64, counts: &[u32]) {
        let position = self.now;
        self.send(0, |seen| {
            (seen.layer, seen.position) = (LayerId::new(layer), position);
            (seen.begins, seen.prompt) = (first == 0 && layer == 0, Some(tokens));
            seen.sequences.clear();
            seen.sequences.push(sequence);
            (seen.fired_layer, seen.audited) = (None, false);
            seen.residual.clear();
            seen.slots.clear();
            seen.ahead_slots.clear();
            seen.scores.clear();
            seen.ahead_scores.clear();
            seen.computed.clear();
            seen.counts.clear();
            for (neuron, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                seen.computed.push(StoreId::new(neuron));
                seen.counts.push(count);
            }
        });
    }

    fn policy(&self) -> Option<Policy> {
        Some(self.holding())
    }

    fn set_policy(&mut self, policy: Policy, sparsity: &mut Sparsity) -> bool {
        self.shared.policy.store(policy as usize, Ordering::Relaxed);
        if !self.balances() {
            sparsity.one_threshold();
        }
        true
    }

    fn counts(&self) -> MigratorCounts {
        let Shared { moving, gain, handled, late, dropped, .. } = &*self.shared;
        let [verdict, moving_ns, resting_ns] = gain.each_ref().map(|part| part.load(Ordering::Relaxed));
        MigratorCounts {
            handled: handled.load(Ordering::Relaxed),
            late: late.load(Ordering::Relaxed),
            dropped: dropped.load(Ordering::Relaxed),
            moving: moving.load(Ordering::Relaxed),
            gain: Comparison { verdict: VERDICTS[verdict as usize], moving_ns, resting_ns },
            sequences: self.known.len() as u64,
            ..self.counts
        }
    }

    fn finish(mut self: Box<Self>) -> Option<Vec<Vec<f32>>> {
        let ended = self.end();
        let mut worker = match &mut self.beside {
            Beside::Clock(ticker) => ticker.take().map(|ticker| ticker.finish(&self.shared)),
            Beside::Thread { .. } => ended,
        }?;
        worker.keep_learnt(true);
        Some(worker.scheduler.finish())
    }
}

/// Adds, for each neuron, the highest of its `n` scores; `scores` is `[n, ffn]`.
fn extend_with_highest(to: &mut Vec<f32>, scores: &[f32], n: usize) {
    let ffn = scores.len() / n;
    to.extend_from_slice(&scores[..ffn]);
    for other in scores[ffn..].chunks_exact(ffn) {
        to.iter_mut().zip(other).for_each(|(most, other)| *most = most.max(*other));
    }
}

/// The thread: takes observations until it is to stop.
fn run(
    mut worker: Worker,
    mut inbox: Receiver<SentObservation>,
    mut outbox: Sender<SentDecision>,
    shared: &Shared,
) -> Worker {
    worker.warm();
    let mut handled = clock::now();
    loop {
        let mut handle = |seen: &mut SentObservation| {
            shared.handle(&mut worker, seen, Position(shared.now.load(Ordering::Relaxed)), |until, decision| {
                outbox.try_send(|to| write(to, until, decision))
            });
        };
        if inbox.try_take(&mut handle).is_some() {
            while inbox.try_take(&mut handle).is_some() {}
            worker.keep_learnt(false);
            handled = clock::now();
        }
        if shared.stop.load(Ordering::Acquire) {
            return worker;
        }
        if handled.elapsed() < AWAKE {
            std::thread::yield_now();
        } else {
            // The engine unparks after each item; one that came in between makes this return at once.
            std::thread::park();
        }
    }
}
