//! Decoding allocates nothing once it is warm: with every kind of predictor, with a device and without, while neurons move.
//!
//! Every allocation of the process is counted, also those of the pool's threads, but for the test harness's own, which says after a minute that a
//! test is still running; so this binary has one test. Locks are not counted
//! here: `tests/tidy.rs` looks for them in the source.

mod support;

use dynamicinfer::background::{Background, BackgroundOptions};
use dynamicinfer::cache::{Frames, Migration, NeuronCache, Tier};
use dynamicinfer::clock::{self, Duration};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::{Device, Rates, VirtualDevice};
use dynamicinfer::disk;
use dynamicinfer::engine::session::CHUNK;
use dynamicinfer::engine::{BatchToken, Choice, Engine, Foresight, Logits, Migrator, Sparsity};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::host_cache::{HostCache, HostCacheOptions, least_bytes};
use dynamicinfer::ids::{LayerId, SlotId, StoreId};
use dynamicinfer::lab::synth::{Shape, write_store};
use dynamicinfer::model::config::Activation;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::open::layer_blocks;
use dynamicinfer::predictor::mlp::{self, Measured, Network};
use dynamicinfer::predictor::{self, Calibration, Exact, Predictor, Router, Sign};
use dynamicinfer::prng::Prng;
use dynamicinfer::scheduler::thresholds::LossWeight;
use dynamicinfer::scheduler::{Policy, Rules};

use rustix::process::getpid;
use rustix::thread::gettid;
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use support::{RATES, numbers, on_device, on_device_streaming, opened, packed, predictor_header};

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// The thread of the test.
static TESTED: AtomicI32 = AtomicI32::new(0);

/// Counts an allocation of this thread, if it is not the harness's.
fn note() {
    let here = gettid();
    if here != getpid() || here.as_raw_pid() == TESTED.load(Ordering::Relaxed) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call is the system allocator's own; the counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        note();
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, bytes) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

const FFN: usize = 1024;
const LAYERS: usize = 2;
/// Tokens before and while allocations are counted.
const WARM: usize = 4;
const COUNTED: usize = 60;

/// Moves a few of so many neurons or experts before every layer.
struct Restless(Prng, usize);

impl Migrator for Restless {
    fn apply(
        &mut self,
        _layer: usize,
        _begins: bool,
        device: &mut dyn Device,
        cache: &mut NeuronCache,
        _: Option<&mut dyn Frames>,
        _sparsity: &mut Sparsity,
    ) {
        let layer = self.0.below(cache.layers.len() as u64) as usize;
        let slots = cache.layers[layer].table.slots().len() as u64;
        if slots == 0 {
            return;
        }
        for _ in 0..self.0.below(20) {
            let (slot, neuron) = (self.0.below(slots) as u32, self.0.below(self.1 as u64) as u32);
            let (layer, slot, neuron) = (LayerId::new(layer), SlotId(slot), StoreId(neuron));
            // A refusal is an answer.
            let _ = cache.migrate(device, Migration { layer, slot, neuron });
        }
    }
}

/// A network per layer, random: it need not be right.
fn networks(model: &Model) -> Vec<Network> {
    let mut rng = Prng::new(2);
    let (h, neurons, rank) = (model.config.hidden, model.config.neurons(), 32);
    let mut network = |layer| Network {
        layer,
        ahead: 0,
        inner: numbers(&mut rng, rank * h, 0.2),
        inner_bias: numbers(&mut rng, rank, 0.1),
        outer: numbers(&mut rng, neurons * rank, 1.0),
        outer_bias: numbers(&mut rng, neurons, 0.1),
        calibration: Calibration::new(vec![-1.0, 1.0], vec![0.1, 0.9]),
        measured: Measured::default(),
    };
    (0..model.config.layers().len()).map(&mut network).collect()
}

/// Waits for longer than the pool spins, so that every thread has slept once: what that needs is allocated the first time.
fn let_the_team_sleep() {
    let lock = parking_lot::Mutex::new(());
    parking_lot::Condvar::new().wait_for(&mut lock.lock(), Duration::from_millis(1));
    let start = clock::now();
    while start.elapsed() < Duration::from_millis(2) {
        std::thread::yield_now();
    }
}

/// What its thread needs for so many sequences is allocated the first time, too.
fn let_the_scheduler_catch_up(engine: &Engine) {
    let Some(migrator) = engine.split.as_ref().and_then(|split| split.migrator.as_ref()) else { return };
    let start = clock::now();
    let behind = || {
        let c = migrator.counts();
        c.handled + c.lost < c.observed
    };
    while behind() && start.elapsed() < Duration::from_secs(60) {
        std::thread::yield_now();
    }
}

#[test]
fn a_warm_engine_decodes_without_allocating() {
    TESTED.store(gettid().as_raw_pid(), Ordering::Relaxed);
    let dir = tempfile::tempdir().unwrap();
    let shape = Shape {
        hidden: 256,
        layers: LAYERS,
        ffn: FFN,
        heads: 4,
        kv_heads: 2,
        vocab: 512,
        context: 128,
        activation: Activation::Relu,
        active: None,
        seed: 4,
        outliers: 0,
        experts: None,
    };
    for quant in [Quant::F32, Quant::Q4] {
        let path = dir.path().join(format!("{}.neurons", quant.name()));
        write_store(&shape, quant, &path, &|_, _| Ok(())).unwrap();
        let model = Model::open(&path).unwrap();
        let mlp_path = dir.path().join(format!("{}.predictor", quant.name()));
        mlp::write(&mlp_path, predictor_header(&model), &networks(&model)).unwrap();
        let predicted = |predictor: &Arc<dyn Predictor>, threshold| Choice::Predicted {
            predictor: predictor.clone(),
            threshold,
            activation_threshold: 0.0,
        };
        let sign: Arc<dyn Predictor> = Arc::new(Sign::uncalibrated(&model));
        let mlp = predictor::open(&mlp_path, &model).unwrap();
        // While it gets warm, fewer neurons are computed than later: the rooms are made for all of them at once.
        let choices = [
            ("dense", [Choice::Dense, Choice::Dense]),
            ("exact", [Choice::Exact { activation_threshold: 1.5 }, Choice::Exact { activation_threshold: 0.0 }]),
            ("sign", [predicted(&sign, 0.5), predicted(&sign, 0.5)]),
            ("mlp", [predicted(&mlp, 0.8), predicted(&mlp, 0.2)]),
        ];
        let mut failed = Vec::new();
        for (name, choice) in choices {
            for threads in [1, 2] {
                for device in [None, Some(Moving::AtRandom), Some(Moving::Scheduled), Some(Moving::FromDisk)] {
                    // Nothing is scheduled where everything is computed.
                    if name == "dense" && device == Some(Moving::Scheduled) {
                        continue;
                    }
                    for sequences in [1, 3] {
                        let allocations = count(&path, &choice, threads, device, sequences);
                        if allocations == 0 {
                            continue;
                        }
                        let what =
                            format!("{} {name}, {threads} threads, {device:?}, {sequences} sequences", quant.name());
                        failed.push(format!("{what}: {allocations} allocations in {COUNTED} tokens"));
                    }
                }
            }
        }
        assert!(failed.is_empty(), "\n{}\n", failed.join("\n"));
    }
    let names = [
        "qwen3-moe",
        "qwen2-moe",
        "glm4-moe",
        "deepseek-v2",
        "deepseek-v3.gguf",
        "qwen35-moe",
        "nemotron-h-moe",
        "lfm2-moe",
        "gemma4-moe",
        "gemma4-e2b",
        "smallthinker",
        "smallthinker by neuron",
        "smallthinker predicted by neuron",
    ];
    let cases = names.into_iter().flat_map(|name| [(name, 1), (name, 2)]);
    let ways = [(false, false), (true, false), (false, true)];
    for ((name, threads), (divided, disk)) in cases.flat_map(|case| ways.map(|way| (case, way))) {
        let model = match name.strip_suffix(" by neuron") {
            Some(name) => Model::open(&packed(dir.path(), name.split(' ').next().unwrap(), Quant::F32)).unwrap(),
            None => opened(dir.path(), name, Quant::F32),
        };
        if !model.config.is_mixture() && (divided || disk) {
            continue;
        }
        let mut engine = Engine::new(model, threads, Kernels::best());
        engine.ask_for_experts();
        if name.contains("predicted") {
            let path = dir.path().join("inside.predictor");
            mlp::write(&path, predictor_header(&engine.model), &networks(&engine.model)).unwrap();
            let predictor = predictor::open(&path, &engine.model).unwrap();
            let choice = Choice::Predicted { predictor, threshold: 0.4, activation_threshold: 0.0 };
            engine.set_sparsity(Sparsity::new(vec![choice; engine.model.config.layers().len()], 0).unwrap());
        }
        if divided {
            let (device, movable) = (Box::new(VirtualDevice::new(u64::MAX, SLOW)), engine.model.config.movable());
            // SAFETY: the engine has both.
            let layers = engine.model.config.layers().len();
            // With two threads attention has no room there, either.
            let streamed = if threads == 2 { layers } else { 0 };
            let slots = vec![movable / 2; layers];
            let split = unsafe { on_device_streaming(&engine.model, device, &slots, (CHUNK, streamed)) };
            engine.split = Some(split.unwrap());
        } else if disk {
            let looks = Arc::new(Router::of(&engine.model).unwrap());
            engine.set_host_cache(experts_from_disk(&engine.model), Some(Foresight::new(looks, 1)));
        }
        let mut kv = KvCache::new(&engine.model.config, 128, KvType::F16).unwrap();
        let mut decode = |engine: &mut Engine, tokens| {
            (0..tokens).for_each(|i| _ = engine.forward(&mut kv, &[5 + i * 37 % 90], Logits::Last));
        };
        decode(&mut engine, WARM as u32);
        let_the_team_sleep();
        decode(&mut engine, 1);
        if let Some(split) = &mut engine.split {
            let slots = split.cache.layers.iter().map(|layer| layer.table.slots().len()).max().unwrap_or(0);
            split.migrator = Some(Box::new(Restless(Prng::new(1), slots * 2)));
        }
        // The first experts that the device computes.
        decode(&mut engine, 4 * WARM as u32);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        decode(&mut engine, COUNTED as u32);
        let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
        let what = format!("{name}, {threads} threads, a device: {divided}, from disk: {disk}");
        assert_eq!(allocations, 0, "{what}: allocations in {COUNTED} tokens");
        let read = engine.cached.as_mut().map(|cached| cached.cache.counts().reads.bytes);
        assert!(read.is_none_or(|read| read > 0), "{what}");
        let hits = engine.split.as_ref().map(|split| split.cache.counters.computed[Tier::Device]);
        assert!(hits.is_none_or(|hits| hits > 50), "{hits:?} experts on the device");
    }
}

/// What moves neurons.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Moving {
    AtRandom,
    Scheduled,
    /// No device: neurons come from disk.
    FromDisk,
}

/// Slow enough that the scheduler's decisions land while tokens are decoded, and the link carries many a layer.
const SLOW: Rates = Rates { device_gb_s: 2.0, link_gb_s: 2.0, host_gb_s: 0.3, ..RATES };

/// A scheduler with everything that it can do. Its thread is counted, too.
fn background(engine: &Engine) -> Background {
    let model = engine.model.clone();
    let block_bytes = model.layers[0].block().bytes();
    let own = |l| Some((engine.sparsity().threshold(l)?, engine.sparsity().calibration(l)?.clone()));
    let setting = BackgroundOptions {
        policy: Policy::Full,
        tune: Arc::new(|rules| Rules { gain: false, ..rules }),
        weight: LossWeight::Probability,
        ahead: 1,
        sequences: 3,
        predictor: Some(Arc::new(Exact::new(&model, &[0.0; LAYERS]))),
        thresholds: (0..LAYERS).map(own).collect(),
        history: vec![vec![0.1; FFN]; LAYERS],
        placed: vec![Vec::new(); LAYERS],
        kernels: engine.kernels,
        threads: 1,
        link_gb_s: SLOW.link_gb_s,
        latency: None,
    };
    Background::start(model, block_bytes, setting).unwrap()
}

/// A cache with frames for some of the neurons, over the disk that the store lies on.
fn from_disk(model: &Model) -> HostCache {
    let blocks = layer_blocks(model).unwrap();
    let disk = disk::open(&[model.store().unwrap().file().file()]).unwrap().disk;
    let options = HostCacheOptions { ahead: 1, ..HostCacheOptions::new(0) };
    let bytes = least_bytes(&blocks, FFN, disk.align()) + (LAYERS * FFN / 3 * blocks[0].block_bytes()) as u64;
    HostCache::new(disk, &blocks, FFN, HostCacheOptions { bytes, ..options }).unwrap()
}

/// The same for a mixture's experts.
fn experts_from_disk(model: &Model) -> HostCache {
    let (blocks, experts) = (layer_blocks(model).unwrap(), model.config.clusters());
    let files: Vec<&std::fs::File> = model.files().iter().map(|file| file.file()).collect();
    let disk = disk::open(&files).unwrap().disk;
    let options = HostCacheOptions { ahead: 1, ..HostCacheOptions::new(0) };
    let third = blocks.iter().map(|b| experts / 3 * (b.block_bytes() + 3 * 2 * disk.align())).sum::<usize>();
    let bytes = least_bytes(&blocks, experts, disk.align()) + third as u64;
    HostCache::new(disk, &blocks, experts, HostCacheOptions { bytes, ..options }).unwrap()
}

/// Allocations of [`COUNTED`] tokens that run as `choice[1]` says, after some that ran as `choice[0]` does.
fn count(path: &Path, choice: &[Choice; 2], threads: usize, moving: Option<Moving>, sequences: usize) -> u64 {
    let mut engine = Engine::new(Model::open(path).unwrap(), threads, Kernels::best());
    let sparsity = |choice: &Choice| Sparsity::new(vec![choice.clone(); LAYERS], 0).unwrap();
    engine.set_sparsity(sparsity(&choice[0]));
    if moving == Some(Moving::FromDisk) {
        let looks = Exact::new(&Model::open(path).unwrap(), &[0.0; LAYERS]);
        engine.set_host_cache(from_disk(&engine.model), Some(Foresight::new(Arc::new(looks), 1)));
    } else if let Some(moving) = moving {
        let device = Box::new(VirtualDevice::new(u64::MAX, SLOW));
        // SAFETY: the engine has both.
        let mut split = unsafe { on_device(&engine.model, device, &[FFN / 3; LAYERS]) }.unwrap();
        split.upload_predictors(engine.sparsity(), &engine.model.config).unwrap();
        split.migrator = Some(match moving {
            Moving::AtRandom => Box::new(Restless(Prng::new(1), FFN)),
            Moving::Scheduled => Box::new(background(&engine)),
            Moving::FromDisk => unreachable!("without a device"),
        });
        engine.split = Some(split);
    }
    let new = |_| KvCache::new(&engine.model.config, WARM + COUNTED, KvType::F16).unwrap();
    let mut caches: Vec<KvCache> = (0..sequences).map(new).collect();
    let mut columns: Vec<BatchToken> = (0..sequences).map(|sequence| BatchToken { sequence, token: 0 }).collect();
    let mut step = |engine: &mut Engine, token: u32| {
        columns.iter_mut().zip(0..).for_each(|(column, i)| column.token = (token * 5 + i * 31) % 500);
        match &mut caches[..] {
            [kv] => engine.forward(kv, &[columns[0].token], Logits::Last),
            caches => engine.forward_batch(caches, &columns, Logits::Last),
        };
    };
    for token in 0..WARM as u32 {
        step(&mut engine, token);
        let_the_team_sleep();
        let_the_scheduler_catch_up(&engine);
    }
    let share = |engine: &Engine| engine.report.computed_share(&engine.model.config);
    let (warm, tokens) = (share(&engine), engine.report.tokens);
    engine.set_sparsity(sparsity(&choice[1]));
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for token in 0..COUNTED as u32 {
        step(&mut engine, token + 9);
    }
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
    let all = (share(&engine) * engine.report.tokens as f64 - warm * tokens as f64) / (COUNTED * sequences) as f64;
    println!("{warm:.2} of the neurons computed while warming, {all:.2} later");
    if let Some(cached) = &mut engine.cached {
        let counts = cached.cache.counts();
        assert!(counts.reads.bytes > 0, "{counts:?}");
    }
    if let Some(split) = &engine.split {
        let counters = split.cache.counters;
        assert!(counters.landed > 100 && counters.computed[Tier::Device] > 0, "{counters:?}");
    }
    allocations
}
