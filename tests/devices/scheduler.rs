//! The scheduler beside the engine: whatever it decides and however late, logits are the dense model's and the budget holds.

use crate::support::watched::{Step, Watched};
use crate::support::{RATES, assumed_machine, device_bytes, error, half_of_the_neurons, on_device, packed};
use dynamicinfer::background::{Background, BackgroundOptions, Latency};
use dynamicinfer::cache::{Frames, NeuronCache, Tier};
use dynamicinfer::clock::{self, Duration};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::{Device, Faults, Rates, Stage, Totals, VirtualDevice};
use dynamicinfer::engine::{Choice, DividedLayer, Engine, Logits, Migrator, Observer, Seen, Sparsity, Split};
use dynamicinfer::formats::machine_profile::MachineProfile;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::{SlotId, StoreId};
use dynamicinfer::lab::synth::{Shape, write_store};
use dynamicinfer::model::{Activation, KvCache, KvType, Model};
use dynamicinfer::open::VramBudget;
use dynamicinfer::placement::memory_plan::Footprint;
use dynamicinfer::predictor::{Calibration, Exact, Kind, Predictor, Tools};
use dynamicinfer::prng::Prng;
use dynamicinfer::scheduler::thresholds::LossWeight;
use dynamicinfer::scheduler::{Comparison, Policy, Rules, Verdict};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const TOKENS: usize = 48;

/// Slow enough that a layer's time carries some neurons.
const SLOW: Rates = Rates { device_gb_s: 2.0, link_gb_s: 0.2, host_gb_s: 0.3, ..RATES };

fn tokens() -> Vec<u32> {
    (0..TOKENS as u32).map(|i| 5 + i * 37 % 90).collect()
}

/// Logits of every token, decoded one by one; `before(token)` is called with the engine before each.
fn decode(engine: &mut Engine, mut before: impl FnMut(&mut Engine, usize)) -> Vec<f32> {
    let mut kv = KvCache::new(&engine.model.config, TOKENS, KvType::F32).unwrap();
    let mut out = Vec::new();
    for (i, &token) in tokens().iter().enumerate() {
        before(engine, i);
        out.extend_from_slice(engine.forward(&mut kv, &[token], Logits::All));
    }
    out
}

/// The true gates, for as long as it is let.
struct Gated {
    exact: Exact,
    open: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
}

impl Predictor for Gated {
    fn kind(&self) -> Kind {
        Kind::Exact
    }

    fn threshold(&self, layer: usize, ahead: usize) -> f32 {
        self.exact.threshold(layer, ahead)
    }

    fn calibration(&self, layer: usize, ahead: usize) -> Option<&Calibration> {
        self.exact.calibration(layer, ahead)
    }

    fn score(&self, tools: &mut Tools<'_>, layer: usize, ahead: usize, residual: &[f32], n: usize, scores: &mut [f32]) {
        self.asked.fetch_add(1, Ordering::SeqCst);
        while !self.open.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        self.exact.score(tools, layer, ahead, residual, n, scores);
    }

    fn weight_bytes(&self, layer: usize, ahead: usize) -> u64 {
        self.exact.weight_bytes(layer, ahead)
    }
}

struct Bench {
    engine: Engine,
    open: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
    others: u64,
}

/// An engine with a device and a scheduler, half of each layer's neurons in slots.
fn bench(dir: &std::path::Path, family: &str, policy: Policy, faults: Faults, open: bool) -> Bench {
    bench_at(dir, family, policy, faults, open, None)
}

/// The same with a scheduler that takes so long on the device's clock; `None` for a thread.
fn bench_at(
    dir: &std::path::Path,
    family: &str,
    policy: Policy,
    faults: Faults,
    open: bool,
    latency: Option<Latency>,
) -> Bench {
    // Whether moving pays is not the question here.
    bench_of(dir, family, (policy, |rules| Rules { gain: false, ..rules }), SLOW, faults, open, latency)
}

/// The same with rules and rates that are given.
fn bench_of(
    dir: &std::path::Path,
    family: &str,
    (policy, tune): (Policy, fn(Rules) -> Rules),
    rates: Rates,
    faults: Faults,
    open: bool,
    latency: Option<Latency>,
) -> Bench {
    let model = Model::open(&packed(dir, family, Quant::F32)).unwrap();
    let (layers, ffn) = (model.config.layers().len(), model.config.widest_ffn());
    let slots = vec![ffn / 2; layers];
    let budget = device_bytes(&model, &slots);
    let device = VirtualDevice::new(budget, rates).with_faults(faults);
    // SAFETY: the engine drops its device's part before its model: it has both.
    let mut split = unsafe { on_device(&model, Box::new(device), &slots) }.unwrap();
    let placed: Vec<Vec<StoreId>> = vec![(0..ffn / 2).map(StoreId::new).collect(); layers];
    (0..layers).for_each(|l| split.cache.load(&mut *split.device, l, &placed[l]).unwrap());
    split.cache.settle(&mut *split.device);
    let block_bytes = model.layers[0].block().bytes();
    let mut engine = Engine::new(model, 2, Kernels::best());
    let (open, asked) = (Arc::new(AtomicBool::new(open)), Arc::default());
    let exact = Exact::new(&engine.model, &vec![0.0; layers]);
    let predictor = Arc::new(Gated { exact, open: open.clone(), asked: Arc::clone(&asked) });
    let setting = BackgroundOptions {
        policy,
        tune: Arc::new(tune),
        weight: LossWeight::Probability,
        ahead: 1,
        sequences: 3,
        predictor: Some(predictor),
        thresholds: vec![None; layers],
        history: vec![vec![0.1; ffn]; layers],
        placed,
        kernels: engine.kernels,
        threads: 1,
        link_gb_s: rates.link_gb_s,
        latency,
    };
    split.migrator = Some(Box::new(Background::start(engine.model.clone(), block_bytes, setting).unwrap()));
    engine.split = Some(split);
    engine.set_sparsity(Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap());
    let others = engine.split.as_ref().unwrap().bytes();
    Bench { engine, open, asked, others }
}

fn split(engine: &mut Engine) -> &mut Split {
    engine.split.as_mut().unwrap()
}

/// Waits until the thread has handled everything it was told.
fn catch_up(engine: &Engine) {
    let start = clock::now();
    loop {
        let c = engine.split.as_ref().unwrap().migrator.as_ref().unwrap().counts();
        if c.handled + c.lost >= c.observed {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "the scheduler hangs: {c:?}");
        std::thread::yield_now();
    }
}

#[test]
fn logits_are_the_dense_ones_with_every_policy_and_a_budget_that_changes_in_the_middle() {
    let dir = tempfile::tempdir().unwrap();
    for family in ["relullama", "prosparse", "bamboo", "opt"] {
        let mut dense = Engine::new(Model::open(&packed(dir.path(), family, Quant::F32)).unwrap(), 2, Kernels::best());
        let expected = decode(&mut dense, |_, _| ());
        let mut moved = 0;
        for (seed, policy) in Policy::ALL.into_iter().enumerate() {
            let faults = Faults { late: 0.2, lost: 0.01, reorder: true, seed: seed as u64 };
            let mut b = bench(dir.path(), family, policy, faults, true);
            let (mut prng, others) = (Prng::new(seed as u64), b.others);
            let (ffn, layers) = (b.engine.model.config.widest_ffn(), b.engine.model.config.layers().len());
            let found = decode(&mut b.engine, |engine, token| {
                catch_up(engine);
                if token == TOKENS / 2 {
                    // Another policy in the middle of the text.
                    let other = Policy::ALL[(seed + 3) % Policy::ALL.len()];
                    assert!(engine.set_policy(other));
                    assert_eq!(engine.split.as_ref().unwrap().migrator.as_ref().unwrap().policy(), Some(other));
                }
                if token % 7 != 6 {
                    return;
                }
                let slots: Vec<usize> = (0..layers).map(|_| prng.below(ffn as u64 + 1) as usize).collect();
                let model = engine.model.clone();
                let budget = device_bytes(&model, &slots);
                assert!(budget >= others);
                let Split { device, cache, .. } = split(engine);
                let least: Vec<usize> = cache.slots().iter().zip(&slots).map(|(a, b)| *a.min(b)).collect();
                cache.resize(&mut **device, &least).unwrap();
                device.set_budget(budget).unwrap();
                cache.resize(&mut **device, &slots).unwrap();
            });
            let off = error(&found, &expected);
            assert!(off < 1e-5, "{family} {policy:?}: off by {off}");
            let memory = split(&mut b.engine).device.memory();
            assert!(memory.peak <= memory.budget, "{memory:?}");
            if policy != Policy::Static {
                moved += split(&mut b.engine).cache.counters.landed;
            }
        }
        assert!(moved > 100, "{family}: {moved} neurons moved: nothing was tried");
    }
}

/// A scheduler that stands still from the first token on, or wakes up late, costs hits only. Nobody waits for it.
#[test]
fn a_stalled_scheduler_costs_no_result_and_no_wait() {
    let dir = tempfile::tempdir().unwrap();
    let mut dense = Engine::new(Model::open(&packed(dir.path(), "relullama", Quant::F32)).unwrap(), 2, Kernels::best());
    let expected = decode(&mut dense, |_, _| ());
    let mut b = bench(dir.path(), "relullama", Policy::Full, Faults::default(), false);
    let open = b.open.clone();
    // It stands still for the first half; what finds no room is counted and dropped.
    let found = decode(&mut b.engine, |_, token| {
        if token == TOKENS / 2 {
            open.store(true, Ordering::SeqCst);
        }
    });
    assert!(error(&found, &expected) < 1e-5);
    catch_up(&b.engine);
    let counts = b.engine.split.as_ref().unwrap().migrator.as_ref().unwrap().counts();
    assert_eq!(counts.observed, (TOKENS * b.engine.model.config.layers().len()) as u64);
    // What it came to while it was useful it has predicted; the rest was too late.
    assert!(b.asked.load(Ordering::SeqCst) + counts.late > 0, "{counts:?}");
}

/// What will be needed is brought before it is needed: with a link that is fast enough the scheduler hits more than the placement.
#[test]
fn it_brings_what_the_next_layer_needs() {
    let dir = tempfile::tempdir().unwrap();
    let share = |policy| {
        // On the device's clock: a thread may be kept from its core until a layer has passed.
        let latency = Latency { observation_ns: 100.0, gb_s: 1e6 };
        let mut b = bench_at(dir.path(), "relullama", policy, Faults::default(), true, Some(latency));
        decode(&mut b.engine, |_, _| ());
        let c = split(&mut b.engine).cache.counters;
        c.computed[Tier::Device] as f64 / c.computed.total() as f64
    };
    let (fixed, full) = (share(Policy::Static), share(Policy::Full));
    // Half of these models' neurons fire at any token, so there is little to choose.
    assert!(full > fixed + 0.02, "{full} with the scheduler, {fixed} without");
}

/// Brings the first half of the neurons of each layer, when the layer begins or after it was divided.
struct Brings {
    calls: usize,
    late: bool,
}

impl Migrator for Brings {
    fn apply(
        &mut self,
        _layer: usize,
        _begins: bool,
        device: &mut dyn Device,
        cache: &mut NeuronCache,
        _: Option<&mut dyn Frames>,
        _sparsity: &mut Sparsity,
    ) {
        let (layer, again) = (self.calls / 2, self.calls % 2 == 1);
        self.calls += 1;
        if again == self.late && layer < cache.layers.len() {
            let slots = cache.layers[layer].table.slots().len();
            let moves = (0..slots).map(|n| (SlotId::new(n), StoreId::new(n)));
            assert_eq!(cache.migrate_all(device, layer, None, moves).begun, slots);
        }
    }
}

/// What is known when a layer begins is on the link during its attention, and can be there for its FFN.
#[test]
fn what_is_decided_before_a_layer_begins_is_there_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let hits = |late| {
        let model = Model::open(&packed(dir.path(), "relullama", Quant::F32)).unwrap();
        let slots = vec![model.config.widest_ffn() / 2; model.config.layers().len()];
        let device = VirtualDevice::new(u64::MAX, Rates { link_gb_s: 1e6, copy_us: 0.0, ..RATES });
        // SAFETY: the engine drops its device's part before its model: it has both.
        let mut split = unsafe { on_device(&model, Box::new(device), &slots) }.unwrap();
        split.migrator = Some(Box::new(Brings { calls: 0, late }));
        let mut engine = Engine::new(model, 1, Kernels::best());
        engine.split = Some(split);
        let mut kv = KvCache::new(&engine.model.config, 2, KvType::F32).unwrap();
        engine.forward(&mut kv, &tokens()[..1], Logits::Last);
        let first: Vec<u64> =
            engine.split.as_ref().unwrap().cache.layers.iter().map(|layer| layer.computed[Tier::Device]).collect();
        engine.forward(&mut kv, &tokens()[1..2], Logits::Last);
        let second: Vec<u64> = engine
            .split
            .as_ref()
            .unwrap()
            .cache
            .layers
            .iter()
            .zip(&first)
            .map(|(now, first)| now.computed[Tier::Device] - first)
            .collect();
        (first, second)
    };
    let (first, second) = hits(false);
    assert!(first.iter().chain(&second).all(|&hits| hits > 0), "{first:?}, then {second:?}");
    // And the question is not answered by itself: what comes after a layer was divided is there at the next token.
    let (first, second) = hits(true);
    assert!(first.iter().all(|&hits| hits == 0) && second.iter().all(|&hits| hits > 0), "{first:?}, then {second:?}");
}

/// What it has learnt of a text is the history that the next one begins with.
#[test]
fn it_learns_how_often_neurons_are_active() {
    let dir = tempfile::tempdir().unwrap();
    let mut b = bench(dir.path(), "relullama", Policy::Full, Faults::default(), true);
    decode(&mut b.engine, |engine, _| catch_up(engine));
    catch_up(&b.engine);
    let migrator: Box<dyn Migrator> = b.engine.split.as_mut().unwrap().migrator.take().unwrap();
    let history = migrator.finish().unwrap();
    let (layers, ffn) = (b.engine.model.config.layers().len(), b.engine.model.config.widest_ffn());
    assert_eq!((history.len(), history[0].len()), (layers, ffn));
    let all: Vec<f32> = history.concat();
    assert!(all.iter().all(|f| (0.0..=1.0).contains(f)));
    // It began with 0.1 everywhere; some neurons fire at half of the tokens.
    let (low, high) = all.iter().fold((1f32, 0f32), |(low, high), &f| (low.min(f), high.max(f)));
    assert!(high > 0.15 && low < high - 0.05, "{low} to {high}");
}

/// A long prompt runs densely, and what was active in it is where the text's frequencies begin (E.3.3).
#[test]
fn a_prompt_teaches_what_its_tokens_made_active() {
    let dir = tempfile::tempdir().unwrap();
    let mut b = bench(dir.path(), "relullama", Policy::Full, Faults::default(), true);
    let prompt: Vec<u32> = (0..40).map(|i| 5 + i * 37 % 90).collect();
    let mut truth = Active(vec![vec![0u32; b.engine.model.config.widest_ffn()]; b.engine.model.config.layers().len()]);
    let mut kv = KvCache::new(&b.engine.model.config, 40, KvType::F32).unwrap();
    b.engine.forward_observed(&mut kv, &prompt, Logits::Last, &mut truth);
    catch_up(&b.engine);
    let migrator = b.engine.split.as_mut().unwrap().migrator.take().unwrap();
    let history = migrator.finish().unwrap();
    // More often active, more often remembered.
    for (counts, history) in truth.0.iter().zip(&history) {
        let mut neurons: Vec<usize> = (0..counts.len()).collect();
        neurons.sort_by_key(|&n| counts[n]);
        assert!(neurons.is_sorted_by(|&a, &b| history[a] <= history[b] + 1e-6));
        assert!(history[neurons[counts.len() - 1]] > history[neurons[0]] + 0.05);
    }
}

struct Active(Vec<Vec<u32>>);

impl Observer for Active {
    fn layer(&mut self, seen: &Seen<'_>) {
        let counts = &mut self.0[seen.layer];
        for row in seen.activations.chunks_exact(counts.len()) {
            counts.iter_mut().zip(row).for_each(|(count, &a)| *count += u32::from(a != 0.0));
        }
    }
}

/// 5,000 changes of the budget while texts are being generated, as the plan has them; none is exceeded, ever.
#[test]
fn the_acknowledged_budget_is_never_exceeded() {
    let dir = tempfile::tempdir().unwrap();
    let mut b = bench(dir.path(), "relullama", Policy::Full, Faults::default(), true);
    let model = b.engine.model.clone();
    let (layers, ffn) = (model.config.layers().len(), model.config.widest_ffn());
    let budgeter = VramBudget {
        footprint: Footprint::of_model(&model, TOKENS, KvType::F32),
        counts: vec![(1..=ffn as u64).collect(); layers],
        machine: machine(),
        request: half_of_the_neurons(),
    };
    let least = budgeter.plan(u64::MAX / 2).unwrap().without_neurons_bytes;
    let most = least + (layers * ffn) as u64 * budgeter.footprint.block_bytes;
    let mut prng = Prng::new(9);
    let (mut changes, mut refused) = (0, 0);
    for _ in 0..200 {
        decode(&mut b.engine, |engine, token| {
            if token % 2 == 1 {
                return;
            }
            let vram = least - 500 + prng.below(most - least + 1000);
            match budgeter.set(engine, vram) {
                Ok(plan) => assert!(plan.total_bytes <= plan.budget_bytes && plan.budget_bytes <= vram),
                Err(error) => {
                    assert!(vram < least, "{vram} of {least}: {error}");
                    refused += 1;
                }
            }
            changes += 1;
            let memory = split(engine).device.memory();
            assert!(memory.used <= memory.budget && memory.peak <= memory.budget, "{memory:?}");
        });
        if changes >= 5000 {
            break;
        }
    }
    assert!(changes >= 4800 && refused > 10 && refused < changes / 4, "{changes} changes, {refused} refused");
    assert!(split(&mut b.engine).cache.counters.landed > 1000);
}

fn machine() -> MachineProfile {
    MachineProfile {
        dram_gb_s: SLOW.host_gb_s,
        device_gb_s: SLOW.device_gb_s,
        device_gflops: RATES.device_gflops,
        link_gb_s: SLOW.link_gb_s,
        call_us: 0.1,
        copy_us: 0.1,
        sync_us: 0.1,
        ..assumed_machine()
    }
}

/// On a virtual clock nothing depends on how fast the machine is, or on what else it does.
#[test]
fn the_same_run_decides_the_same_whatever_else_the_machine_does() {
    let dir = tempfile::tempdir().unwrap();
    let run = |policy, latency| {
        let mut b = bench_at(dir.path(), "relullama", policy, Faults::default(), true, Some(latency));
        let mut all = Vec::new();
        let logits = decode(&mut b.engine, |engine, _| {
            let split = split(engine);
            let slots: Vec<_> = split.cache.layers.iter().map(|layer| layer.table.slots().to_vec()).collect();
            all.push((split.cache.counters, split.migrator.as_ref().unwrap().counts(), slots));
        });
        (all, logits)
    };
    for policy in [Policy::Full, Policy::Macro, Policy::Random] {
        for observation_ns in [1e3, 1e5] {
            let latency = Latency { observation_ns, gb_s: 10.0 };
            let alone = run(policy, latency);
            let stop = AtomicBool::new(false);
            let beside = std::thread::scope(|scope| {
                for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
                    scope.spawn(|| {
                        while !stop.load(Ordering::Relaxed) {
                            std::hint::spin_loop();
                        }
                    });
                }
                let beside = run(policy, latency);
                stop.store(true, Ordering::Relaxed);
                beside
            });
            assert!(alone == beside, "{policy:?}, {observation_ns} ns an observation");
            let (counters, counts, _) = alone.0.last().unwrap();
            assert!(counters.landed > 0 && counts.handled > 0, "{policy:?}: nothing moved: {counters:?} {counts:?}");
        }
    }
}

/// A scheduler that is slower than the engine works on nothing that has passed, and the link carries nothing for it.
#[test]
fn what_comes_too_late_is_skipped_and_only_teaches() {
    let dir = tempfile::tempdir().unwrap();
    let at = |observation_ns| {
        let latency = Latency { observation_ns, gb_s: 1e6 };
        let mut b = bench_at(dir.path(), "relullama", Policy::Micro, Faults::default(), true, Some(latency));
        decode(&mut b.engine, |_, _| ());
        let split = split(&mut b.engine);
        (split.migrator.as_ref().unwrap().counts(), split.cache.counters, b.asked.load(Ordering::SeqCst))
    };
    let (fast, moved, asked) = at(10.0);
    assert_eq!((fast.late, fast.lost, fast.stale), (0, 0, 0), "{fast:?}");
    assert!(moved.migrations > 0 && asked > 0);
    let (slow, _, asked_late) = at(3e6);
    // The last layer has none after it to be late for.
    assert!(slow.late > slow.handled / 3, "{slow:?}");
    assert!(asked_late < asked / 2, "it predicted {asked_late} times for layers that had passed, of {asked}");
}

/// Mean time of a token by the device's clock, ns, over the last half of so many texts, the share of them in which neurons moved, and what the
/// guard has found last.
fn guarded(dir: &std::path::Path, policy: Policy, rates: Rates, texts: usize) -> (f64, f64, Comparison) {
    let latency = Latency { observation_ns: 100.0, gb_s: 1e6 };
    let mut b = bench_of(dir, "relullama", (policy, |rules| rules), rates, Faults::default(), true, Some(latency));
    let (mut ns, mut moving) = (0, 0);
    for text in 0..texts {
        let before = split(&mut b.engine).device.totals().clock_ns;
        decode(&mut b.engine, |engine, _| {
            let counts = split(engine).migrator.as_ref().unwrap().counts();
            moving += u64::from(counts.moving && text >= texts / 2);
        });
        ns += if text < texts / 2 { 0 } else { split(&mut b.engine).device.totals().clock_ns - before };
    }
    let tokens = ((texts - texts / 2) * TOKENS) as f64;
    let last = split(&mut b.engine).migrator.as_ref().unwrap().counts().gain;
    (ns as f64 / tokens, moving as f64 / tokens, last)
}

/// Rates of a device beside a host that computes so many GB/s, over a link of so many.
fn beside(host_gb_s: f64, link_gb_s: f64) -> Rates {
    Rates { host_gb_s, link_gb_s, ..SLOW }
}

/// Beside a fast host a hit gives no time, while copies stand in the way of the host's part of each layer's sum: hits are won and tokens are
/// slower. The guard ends it.
#[test]
fn where_moves_cost_more_than_they_bring_tokens_end_within_2_percent_of_the_static_ones() {
    let dir = tempfile::tempdir().unwrap();
    for policy in [Policy::Macro, Policy::Full] {
        let (fixed, ..) = guarded(dir.path(), Policy::Static, beside(10.0, 0.2), 4);
        let (ns, moving, gain) = guarded(dir.path(), policy, beside(10.0, 0.2), 100);
        assert!(ns < 1.02 * fixed && moving < 0.2, "{policy:?}: {ns} of {fixed} ns, moving in {moving}: {gain:?}");
        assert_eq!(gain.verdict, Verdict::Loses);
        assert!(gain.moving_ns as f64 > 1.02 * fixed, "without the guard it would be as fast: {gain:?}");
    }
}

#[test]
fn where_moves_pay_neurons_keep_moving() {
    let dir = tempfile::tempdir().unwrap();
    for policy in [Policy::Macro, Policy::Full] {
        let (fixed, ..) = guarded(dir.path(), Policy::Static, beside(0.05, 0.2), 4);
        let (ns, moving, gain) = guarded(dir.path(), policy, beside(0.05, 0.2), 100);
        assert!(ns < 0.95 * fixed && moving > 0.95, "{policy:?}: {ns} of {fixed} ns, moving in {moving}: {gain:?}");
        assert_ne!(gain.verdict, Verdict::Loses);
    }
}

/// Writes down, among what the device was asked for, when it is shown a layer or its moves are begun.
struct Told(Arc<std::sync::Mutex<Vec<Step>>>);

impl Migrator for Told {
    fn apply(
        &mut self,
        _: usize,
        begins: bool,
        _: &mut dyn Device,
        _: &mut NeuronCache,
        _: Option<&mut dyn Frames>,
        _: &mut Sparsity,
    ) {
        if !begins {
            self.0.lock().unwrap().push(Step::Scheduled);
        }
    }

    fn observe(&mut self, _: &DividedLayer<'_>, _: &dyn Device, _: &mut NeuronCache) {
        self.0.lock().unwrap().push(Step::Scheduled);
    }
}

/// Between the end of prediction and the begin of the host's part no code of the scheduler runs. Where the host has no part, the device has
/// everything of the layer first. That a call's tasks begin before what the caller does beside them is the pool's law
/// (`tasks_begin_before_what_the_caller_does_beside_them`).
#[test]
fn between_prediction_and_the_hosts_part_no_code_of_the_scheduler_runs() {
    let dir = tempfile::tempdir().unwrap();
    for (threads, eighths) in [(1, 4), (3, 4), (2, 8), (2, 0)] {
        let model = Model::open(&packed(dir.path(), "relullama", Quant::F32)).unwrap();
        let (layers, ffn) = (model.config.layers().len(), model.config.widest_ffn());
        let slots = vec![ffn * eighths / 8; layers];
        let seen: Arc<std::sync::Mutex<Vec<Step>>> = Arc::default();
        let device = Watched { device: VirtualDevice::new(u64::MAX, RATES), seen: Arc::clone(&seen) };
        // SAFETY: the engine drops its device's part before its model: it has both.
        let mut split = unsafe { on_device(&model, Box::new(device), &slots) }.unwrap();
        let placed: Vec<StoreId> = (0..slots[0]).map(StoreId::new).collect();
        (0..layers).for_each(|l| split.cache.load(&mut *split.device, l, &placed).unwrap());
        split.cache.settle(&mut *split.device);
        split.migrator = Some(Box::new(Told(Arc::clone(&seen))));
        let mut engine = Engine::new(model, threads, Kernels::best());
        engine.split = Some(split);
        engine.set_sparsity(Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap());
        let mut kv = KvCache::new(&engine.model.config, 8, KvType::F32).unwrap();
        engine.forward(&mut kv, &tokens()[..1], Logits::Last);
        seen.lock().unwrap().clear();
        engine.forward(&mut kv, &tokens()[1..2], Logits::Last);
        let seen = seen.lock().unwrap();
        let predicted = |step: &Step| matches!(step, Step::Host(Stage::Predictor));
        let passes: Vec<&[Step]> = seen.split(predicted).skip(1).filter(|steps| !steps.is_empty()).collect();
        assert_eq!(passes.len(), layers, "one prediction a layer");
        for steps in passes {
            let at = |wanted: fn(&Step) -> bool| steps.iter().position(wanted);
            let shown = at(|step| matches!(step, Step::Scheduled)).expect("each layer is shown");
            let begun =
                at(|step| matches!(step, Step::Host(Stage::Ffn))).expect("the part has begun, or there is none");
            assert!(begun < shown, "{threads} threads, {eighths} of 8 in slots: shown before the host's part");
            match at(|step| matches!(step, Step::Worked)) {
                Some(worked) => assert!(shown < worked, "{threads} threads: after the host's part, and not beside it"),
                None => assert!(at(|step| matches!(step, Step::Added)).is_some_and(|added| added < shown)),
            }
        }
    }
}

/// Compares each layer's times with what the device makes of the bytes that were read.
struct Watches {
    row_bytes: u64,
    hidden: usize,
    /// By layer: neurons wanted and fired, on the host and on the device, of the pass before.
    expected: Vec<[[u64; 2]; 2]>,
    /// What was fired in a layer whose device's part is not known yet.
    before: Totals,
    worst: Arc<std::sync::Mutex<[f64; 3]>>,
    /// What the device would take for a neuron if its busy time were divided by all that it has computed.
    by_totals: Arc<std::sync::Mutex<Vec<f64>>>,
    computed: u64,
}

impl Watches {
    fn off(found: u64, expected: f64) -> f64 {
        (found as f64 / expected - 1.0).abs()
    }
}

impl Migrator for Watches {
    fn apply(
        &mut self,
        _: usize,
        _: bool,
        _: &mut dyn Device,
        _: &mut NeuronCache,
        _: Option<&mut dyn Frames>,
        _: &mut Sparsity,
    ) {
    }

    fn observe(&mut self, at: &DividedLayer<'_>, device: &dyn Device, cache: &mut NeuronCache) {
        let on_device = |l: usize, n: &StoreId| usize::from(cache.layers[l].bucket_entries().contains(&n.0));
        if let Some(l) = at.fired.layer {
            let fired = &mut self.expected[l][1];
            *fired = [0; 2];
            at.fired.neurons.neurons.iter().for_each(|n| fired[on_device(l, n)] += 1);
        }
        let l = at.layer;
        let [wanted, fired] = self.expected[l];
        if at.times.neurons.total() > 0 {
            assert_eq!(wanted, [at.times.neurons[Tier::Host], at.times.neurons[Tier::Device]], "layer {l}");
            let bytes = |tier: usize| (self.row_bytes * (wanted[tier] + 2 * fired[tier])) as f64;
            let device_ns = SLOW.call_us * 1e3 + bytes(1) / SLOW.device_gb_s;
            let merge_bytes = (self.hidden * 4) as f64;
            let merge_ns = SLOW.copy_us * 1e3 + merge_bytes / SLOW.link_gb_s + 2.0 * SLOW.call_us * 1e3;
            let mut worst = self.worst.lock().unwrap();
            let off = [
                Watches::off(at.times.ffn_ns[Tier::Host], bytes(0) / SLOW.host_gb_s),
                Watches::off(at.times.ffn_ns[Tier::Device], device_ns),
                Watches::off(at.times.merge_ns, merge_ns),
            ];
            worst.iter_mut().zip(off).for_each(|(worst, off)| *worst = worst.max(off));
            let now = device.totals();
            let busy = (now.busy_ns[0] - self.before.busy_ns[0]) as f64;
            let computed = cache.counters.computed[Tier::Device];
            if computed > self.computed {
                let each = busy / (computed - self.computed) as f64;
                self.by_totals.lock().unwrap().push(each / (device_ns / wanted[1] as f64));
            }
            (self.before, self.computed) = (now, computed);
        }
        self.expected[l][0] = [0; 2];
        for n in &at.selection.unwrap().neurons {
            self.expected[l][0][on_device(l, n)] += 1;
        }
    }
}

/// Each layer's parts are timed by themselves, to within a twentieth of what the virtual device computes its clock from.
#[test]
fn the_times_of_each_layer_are_those_of_its_own_neurons() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("deep.neurons");
    let shape = Shape {
        hidden: 64,
        layers: 24,
        ffn: 256,
        heads: 4,
        kv_heads: 2,
        vocab: 512,
        context: 128,
        activation: Activation::Relu,
        active: None,
        seed: 9,
        outliers: 0,
        experts: None,
    };
    write_store(&shape, Quant::F32, &store, &|_, _| Ok(())).unwrap();
    for path in [store, packed(dir.path(), "relullama", Quant::F32)] {
        let model = Model::open(&path).unwrap();
        let (layers, ffn, hidden) = (model.config.layers().len(), model.config.widest_ffn(), model.config.hidden);
        let slots = vec![ffn / 2; layers];
        let device = Box::new(VirtualDevice::new(u64::MAX, SLOW));
        // SAFETY: the engine drops its device's part before its model: it has both.
        let mut split = unsafe { on_device(&model, device, &slots) }.unwrap();
        let placed: Vec<StoreId> = (0..ffn / 2).map(StoreId::new).collect();
        (0..layers).for_each(|l| split.cache.load(&mut *split.device, l, &placed).unwrap());
        split.cache.settle(&mut *split.device);
        let (worst, by_totals) = (Arc::default(), Arc::default());
        split.migrator = Some(Box::new(Watches {
            row_bytes: model.layers[0].block().up().bytes as u64,
            hidden,
            expected: vec![[[0; 2]; 2]; layers],
            before: Totals::default(),
            worst: Arc::clone(&worst),
            by_totals: Arc::clone(&by_totals),
            computed: 0,
        }));
        let mut engine = Engine::new(model, 1, Kernels::best());
        engine.split = Some(split);
        let choices = vec![Choice::Exact { activation_threshold: 0.0 }; layers];
        engine.set_sparsity(Sparsity::new(choices, 0).unwrap());
        decode(&mut engine, |_, _| ());
        let worst: [f64; 3] = *worst.lock().unwrap();
        assert!(worst.iter().all(|off| *off < 0.05), "CPU, device and merging are off by {worst:?}");
        // A layer's time divided by all layers' neurons, with attention and head in it, is none of these.
        let by_totals = by_totals.lock().unwrap();
        let near = by_totals.iter().filter(|ratio| (0.95..1.05).contains(*ratio)).count();
        assert!(by_totals.len() > TOKENS / 2 && near * 10 < by_totals.len(), "{near} of {}", by_totals.len());
    }
}
