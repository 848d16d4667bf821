//! The scheduler beside the engine (DynamicInfer 4.2.2, C.3): a thread that predicts layers ahead and calls [`Scheduler::step`] while the
//! engine computes.
//!
//! Engine and thread exchange observations and decisions over two rings on which neither waits ([`crate::cache::exchange`]); what does not
//! fit is dropped and counted. Before a layer's FFN the engine sends what it knows of the layer. It applies new decisions there and when
//! the next layer begins, so that a copy for that layer can arrive during its attention; only there does a slot change. The thread sees no
//! device and no slot table, only copies of the latter, so a late or stalled thread costs hits and never changes a result.

use crate::cache::exchange::{Receiver, Sender, exchange_of};
use crate::cache::{NeuronCache, PerTier, Slot};
use crate::cpu::{Kernels, ThreadPool};
use crate::device::{Device, Totals};
use crate::engine::{DividedLayer, Migrator, MigratorCounts, Sparsity};
use crate::ids::{LayerId, StoreId};
use crate::model::Model;
use crate::predictor::{Bytes, Calibration, Predictor, Scratch, Tools};
use crate::scheduler::thresholds::LossWeight;
use crate::scheduler::{
    Decision, DeviceState, LayerObservation, Move, Policy, Prompt, Rules, Scheduler, SchedulerOptions,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use tracing::trace;

/// Observations that may wait for the thread: one token's layers of a large model.
const OBSERVATIONS: usize = 64;
/// Decisions that may wait for the engine.
const DECISIONS: usize = 64;

/// What the thread works with.
pub struct BackgroundOptions {
    /// The policy to begin with.
    pub policy: Policy,
    /// Changes the rules of that policy, and of any that is set later.
    pub tune: fn(Rules) -> Rules,
    /// What leaving out a neuron is taken to lose, for balancing thresholds.
    pub weight: LossWeight,
    /// Layers to look ahead, 1 or more.
    pub ahead: usize,
    /// Sequences that may be in one pass; memory for them is taken at the start.
    pub sequences: usize,
    /// Predicts what later layers will need; `None`: only frequencies count.
    pub predictor: Option<Arc<dyn Predictor>>,
    /// By layer: its single threshold and calibration table, if it is predicted from its own residual; such layers' thresholds are
    /// balanced.
    pub thresholds: Vec<Option<(f32, Calibration)>>,
    /// How often each neuron was active before, 0 to 1, `[layers][ffn]`, neurons in the store's order.
    pub history: Vec<Vec<f32>>,
    /// By layer, the neurons of the static placement, in the store's order.
    pub placed: Vec<Vec<StoreId>>,
    /// CPU kernels for the predictor.
    pub kernels: Kernels,
    /// The link's rate in GB/s, until it has been measured.
    pub link_gb_s: f64,
    /// Nanoseconds that merging the CPU's and the device's half of an FFN takes.
    pub sync_ns: f64,
}

/// A [`LayerObservation`] on its way to the thread, before anything was predicted from it.
#[derive(Default)]
struct SentObservation {
    layer: LayerId,
    begins: bool,
    /// Tokens of a chunk of a prompt; `None` while decoding.
    prompt: Option<usize>,
    /// The residual after attention: of the last token, `[hidden]`, or of all tokens of a batch, `[n, hidden]`. Empty for a long prompt.
    residual: Vec<f32>,
    computed: Vec<StoreId>,
    counts: Vec<u32>,
    /// The score of each neuron of this layer, where its thresholds are balanced.
    scores: Vec<f32>,
    /// The layer's own threshold, to go with `scores`.
    own: f32,
    slots: Vec<Slot>,
    ahead_slots: Vec<Slot>,
    in_flight: u64,
    totals: Totals,
    counted: PerTier<u64>,
}

/// A [`Decision`] on its way to the engine.
#[derive(Default)]
struct SentDecision {
    layer: LayerId,
    moves: Vec<Move>,
    thresholds: Option<PerTier<f32>>,
}

/// What both threads read and write.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    moving: AtomicBool,
    /// Index into [`Policy::ALL`] of the policy in force.
    policy: AtomicUsize,
    /// Layers handled.
    decided: AtomicU64,
    /// Decisions that found no room in the ring.
    dropped: AtomicU64,
}

/// The engine's side of the scheduler's thread; dropping it ends the thread.
pub struct Background {
    to: Sender<SentObservation>,
    from: Receiver<SentDecision>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Scheduler>>,
    ahead: usize,
    tune: fn(Rules) -> Rules,
    counts: MigratorCounts,
}

impl Background {
    /// Starts the thread. `model` is the engine's; `block_bytes` is the size of one neuron's block.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(model: Arc<Model>, block_bytes: usize, setting: BackgroundOptions) -> std::io::Result<Background> {
        let (hidden, ffn) = (model.config.hidden, model.config.ffn);
        let sequences = setting.sequences.max(1);
        let observation = || SentObservation {
            residual: Vec::with_capacity(hidden * sequences),
            computed: Vec::with_capacity(ffn),
            counts: Vec::with_capacity(ffn),
            scores: Vec::with_capacity(ffn),
            slots: Vec::with_capacity(ffn),
            ahead_slots: Vec::with_capacity(ffn),
            ..SentObservation::default()
        };
        let (to, inbox) = exchange_of(OBSERVATIONS, observation);
        let decision = || SentDecision { moves: Vec::with_capacity(ffn), ..SentDecision::default() };
        let (outbox, from) = exchange_of(DECISIONS, decision);
        let shared = Shared { policy: AtomicUsize::new(setting.policy as usize), ..Shared::default() };
        let shared = Arc::new(shared);
        let (ahead, tune) = (setting.ahead.max(1), setting.tune);
        let outbox = Outbox { to: outbox, shared: shared.clone() };
        let worker = Worker::new(model, block_bytes, setting, outbox);
        let thread = std::thread::Builder::new().name("scheduler".into()).spawn(move || worker.run(inbox))?;
        let counts = MigratorCounts::default();
        Ok(Background { to, from, shared, thread: Some(thread), ahead, tune, counts })
    }

    fn holding(&self) -> Policy {
        Policy::ALL[self.shared.policy.load(Ordering::Relaxed)]
    }

    fn balances(&self) -> bool {
        (self.tune)(self.holding().rules()).thresholds
    }

    /// Counts an observation and wakes the thread.
    fn sent(&mut self, sent: bool) {
        self.counts.told += 1;
        self.counts.untold += u64::from(!sent);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    fn join(&mut self) -> Option<Scheduler> {
        let thread = self.thread.take()?;
        self.shared.stop.store(true, Ordering::Release);
        thread.thread().unpark();
        thread.join().ok()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.join();
    }
}

impl Migrator for Background {
    fn apply(&mut self, device: &mut dyn Device, cache: &mut NeuronCache, sparsity: &mut Sparsity) {
        // Decisions made under a policy that balances thresholds may arrive after a change to one that does not.
        let balances = self.balances();
        // A bounded number, because the thread goes on deciding meanwhile.
        for _ in 0..DECISIONS {
            let refused = self.from.try_take(|decided| {
                if let Some(probabilities) = decided.thresholds.take().filter(|_| balances) {
                    sparsity.set_thresholds(decided.layer.index(), probabilities);
                }
                let n = decided.moves.len();
                let moves = decided.moves.iter().map(|m| (m.slot(), m.neuron()));
                let refused = n - cache.migrate_all(device, decided.layer.index(), moves);
                if n > 0 {
                    trace!(layer = decided.layer.index(), moves = n, refused, "moves begin");
                }
                refused
            });
            match refused {
                Some(refused) => self.counts.refused += refused as u64,
                None => break,
            }
        }
    }

    fn tell(&mut self, at: &DividedLayer<'_>, device: &dyn Device, cache: &NeuronCache) {
        let Some(selection) = at.selection else { return };
        let (balances, decodes) = (self.balances(), at.n == 1 || at.batch);
        let sent = self.to.try_send(|seen| {
            let first = if at.batch { 0 } else { at.residual.len() / at.n * (at.n - 1) };
            (seen.layer, seen.begins) = (LayerId::new(at.layer), at.first == 0 && at.layer == 0);
            seen.prompt = (!decodes).then_some(at.n);
            seen.residual.clear();
            seen.residual.extend_from_slice(&at.residual[first..]);
            seen.computed.clear();
            seen.computed.extend_from_slice(bytemuck::cast_slice(&selection.neurons));
            seen.counts.clear();
            if !decodes {
                seen.counts.extend(selection.masks.iter().map(|m| m.count_ones()));
            }
            seen.scores.clear();
            if let Some((own, scores)) = at.own.filter(|_| at.n == 1 && balances) {
                seen.own = own;
                seen.scores.extend_from_slice(scores);
            }
            seen.slots.clear();
            seen.slots.extend_from_slice(cache.layers[at.layer].table.slots());
            seen.ahead_slots.clear();
            if let Some(target) = cache.layers.get(at.layer + self.ahead) {
                seen.ahead_slots.extend_from_slice(target.table.slots());
            }
            seen.in_flight = cache.in_flight() as u64;
            (seen.totals, seen.counted) = (device.totals(), cache.counters.computed);
        });
        self.sent(sent);
    }

    fn prompt(&mut self, layer: usize, first: usize, tokens: usize, counts: &[u32]) {
        let sent = self.to.try_send(|seen| {
            (seen.layer, seen.begins, seen.prompt) = (LayerId::new(layer), first == 0 && layer == 0, Some(tokens));
            seen.residual.clear();
            seen.scores.clear();
            seen.computed.clear();
            seen.counts.clear();
            for (neuron, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                seen.computed.push(StoreId(neuron as u32));
                seen.counts.push(count);
            }
        });
        self.sent(sent);
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
        let Shared { moving, decided, dropped, .. } = &*self.shared;
        MigratorCounts {
            decided: decided.load(Ordering::Relaxed),
            dropped: dropped.load(Ordering::Relaxed),
            moving: moving.load(Ordering::Relaxed),
            ..self.counts
        }
    }

    fn finish(mut self: Box<Self>) -> Option<Vec<Vec<f32>>> {
        self.join().map(Scheduler::finish)
    }
}

/// The thread's side.
struct Worker {
    model: Arc<Model>,
    scheduler: Scheduler,
    policy: Policy,
    tune: fn(Rules) -> Rules,
    ahead: usize,
    predictor: Option<Arc<dyn Predictor>>,
    kernels: Kernels,
    /// By layer, the calibration of scores from its own residual, where its thresholds are balanced.
    own_tables: Vec<Option<Bytes>>,
    /// By layer, the calibration of scores from the residual `ahead` layers before.
    tables: Vec<Option<Bytes>>,
    outbox: Outbox,
    pool: ThreadPool,
    room: Scratch,
    scores: Vec<f32>,
    /// Probabilities of the observed layer's neurons, times 255, `[ffn]`.
    own: Vec<u8>,
    /// The same of the layer `ahead` of it.
    probabilities: Vec<u8>,
}

/// Sends decisions to the engine.
struct Outbox {
    to: Sender<SentDecision>,
    shared: Arc<Shared>,
}

impl Outbox {
    fn send(&mut self, decision: Decision<'_>) {
        if decision.thresholds.is_none() && decision.moves.is_empty() {
            return;
        }
        let sent = self.to.try_send(|to| {
            (to.layer, to.thresholds) = (decision.layer, decision.thresholds);
            to.moves.clear();
            to.moves.extend_from_slice(decision.moves);
        });
        if !sent {
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Worker {
    fn new(model: Arc<Model>, block_bytes: usize, setting: BackgroundOptions, outbox: Outbox) -> Worker {
        let (ffn, sequences, ahead) = (model.config.ffn, setting.sequences.max(1), setting.ahead.max(1));
        let own_tables = setting.thresholds.iter().map(|own| own.as_ref().map(|(_, table)| table.bytes())).collect();
        let table = |layer| setting.predictor.as_ref()?.calibration(layer, ahead).map(Calibration::bytes);
        let tables = (0..model.config.layers).map(table).collect();
        let scheduler = Scheduler::new(SchedulerOptions {
            policy: setting.policy,
            rules: (setting.tune)(setting.policy.rules()),
            loss: setting.weight,
            ahead,
            predicts: setting.predictor.is_some(),
            block_bytes,
            history: setting.history,
            placed: setting.placed,
            thresholds: setting.thresholds.iter().map(|own| own.as_ref().map(|(own, _)| *own)).collect(),
            link_gb_s: setting.link_gb_s,
            sync_ns: setting.sync_ns,
            move_cost: None,
            seed: 1,
        });
        Worker {
            model,
            scheduler,
            policy: setting.policy,
            tune: setting.tune,
            ahead,
            predictor: setting.predictor,
            kernels: setting.kernels,
            own_tables,
            tables,
            outbox,
            pool: ThreadPool::new(1),
            room: Scratch::default(),
            scores: vec![0.0; ffn * sequences],
            own: Vec::with_capacity(ffn),
            probabilities: Vec::with_capacity(ffn),
        }
    }

    fn run(mut self, mut inbox: Receiver<SentObservation>) -> Scheduler {
        loop {
            while inbox.try_take(|seen| self.handle(seen)).is_some() {
                self.outbox.shared.decided.fetch_add(1, Ordering::Relaxed);
            }
            if self.outbox.shared.stop.load(Ordering::Acquire) {
                return self.scheduler;
            }
            // The engine unparks after each item; one that came in between makes this return at once.
            std::thread::park();
        }
    }

    /// Predicts what the scheduler needs to know, and lets it decide.
    fn handle(&mut self, seen: &mut SentObservation) {
        self.follow_policy();
        let layer = seen.layer.index();
        let target = layer + self.ahead;
        let predicted = !seen.residual.is_empty() && target < self.tables.len() && self.predict(target, &seen.residual);
        let own_table = self.own_tables[layer].as_ref().filter(|_| !seen.scores.is_empty());
        if let Some(table) = own_table {
            table.of(&seen.scores, &mut self.own);
        }
        let device = DeviceState {
            slots: &seen.slots,
            ahead_slots: &seen.ahead_slots,
            in_flight: seen.in_flight,
            totals: seen.totals,
            computed: seen.counted,
        };
        let observation = LayerObservation {
            layer: seen.layer,
            begins: seen.begins,
            computed: &seen.computed,
            prompt: seen.prompt.map(|tokens| Prompt { tokens, counts: &seen.counts }),
            device: (!seen.residual.is_empty()).then_some(device),
            own: own_table.map(|_| (seen.own, &self.own[..])),
            ahead: predicted.then_some(&self.probabilities[..]),
        };
        let outbox = &mut self.outbox;
        self.scheduler.step(&observation, |decision| outbox.send(decision));
        if layer + 1 == self.tables.len() {
            outbox.shared.moving.store(self.scheduler.moving(), Ordering::Relaxed);
        }
    }

    /// Changes to the policy that is now in force, if it is another.
    fn follow_policy(&mut self) {
        let policy = Policy::ALL[self.outbox.shared.policy.load(Ordering::Relaxed)];
        if policy != self.policy {
            self.policy = policy;
            self.scheduler.set_policy(policy, (self.tune)(policy.rules()));
        }
    }

    /// Predicts layer `target` from the residual of the layer `ahead` before it; for a batch, each neuron gets the highest of its scores.
    /// Returns whether there is a predictor for it.
    fn predict(&mut self, target: usize, residual: &[f32]) -> bool {
        let Worker { model, predictor, kernels, tables, ahead, pool, room, scores, probabilities, .. } = self;
        let (Some(predictor), Some(table)) = (predictor, &tables[target]) else { return false };
        let mut tools = Tools { model, pool, kernels, room };
        let (n, ffn) = (residual.len() / model.config.hidden, model.config.ffn);
        scores.resize(n * ffn, 0.0);
        predictor.score(&mut tools, target, *ahead, residual, n, scores);
        let (most, others) = scores.split_at_mut(ffn);
        for other in others.chunks_exact(ffn) {
            most.iter_mut().zip(other).for_each(|(most, other)| *most = most.max(*other));
        }
        table.of(most, probabilities);
        true
    }
}
