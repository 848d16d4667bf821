//! Neurons that move on `CudaDevice` and the stand-in for the driver: by the real scheduler, and where there is no room to move them
//! without waiting.

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use common::{Machine, StandIn, device, on, options};
use dynamicinfer::background::{Background, BackgroundOptions};
use dynamicinfer::cache::{Frames, NeuronCache, Tier};
use dynamicinfer::clock::{self, Duration};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::cuda::{Card, CudaDevice, Options};
use dynamicinfer::device::{Device, Stream};
use dynamicinfer::disk;
use dynamicinfer::engine::session::CHUNK;
use dynamicinfer::engine::{Choice, Engine, Logits, Migrator, Sparsity, Split};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::host_cache::{HostCache, HostCacheOptions, least_bytes};
use dynamicinfer::ids::{SlotId, StoreId};
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::open::layer_blocks;
use dynamicinfer::predictor::Exact;
use dynamicinfer::scheduler::thresholds::LossWeight;
use dynamicinfer::scheduler::{Policy, Rules};
use std::path::Path;
use std::sync::Arc;
use support::{ON_DEVICE, device_bytes, error, on_device, packed};

const TOKENS: usize = 16;
/// Bytes of the memory through which copies of unpinned memory go.
const RING: usize = 32 << 20;

fn model(dir: &Path) -> Model {
    Model::open(&packed(dir, "relullama", Quant::F32)).unwrap()
}

/// Logits of every token, decoded one by one; `before` is called before each.
fn decode(engine: &mut Engine, mut before: impl FnMut(&Engine)) -> Vec<f32> {
    let mut kv = KvCache::new(&engine.model.config, TOKENS, KvType::F32).unwrap();
    let mut out = Vec::new();
    for i in 0..TOKENS as u32 {
        before(engine);
        out.extend_from_slice(engine.forward(&mut kv, &[5 + i * 37 % 90], Logits::All));
        engine.check().unwrap();
    }
    out
}

/// Of the dense model on the CPU.
fn expected(dir: &Path) -> Vec<f32> {
    decode(&mut Engine::new(model(dir), 1, Kernels::best()), |_| ())
}

/// An engine whose device has the first half of each layer's neurons in its slots, and room for no more.
fn half_on(device: CudaDevice, model: Model) -> Engine {
    let (layers, ffn) = (model.config.layers().len(), model.config.widest_ffn());
    // SAFETY: the engine drops its device's part before its model.
    let mut split = unsafe { on_device(&model, Box::new(device), &vec![ffn / 2; layers]) }.unwrap();
    let neurons: Vec<StoreId> = (0..ffn / 2).map(StoreId::new).collect();
    (0..layers).for_each(|l| split.cache.load(&mut *split.device, l, &neurons).unwrap());
    split.cache.settle(&mut *split.device);
    split.cache.counters = Default::default();
    let mut engine = Engine::new(model, 1, Kernels::best());
    engine.split = Some(split);
    engine.set_sparsity(Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap());
    engine
}

fn split(engine: &mut Engine) -> &mut Split {
    engine.split.as_mut().unwrap()
}

/// Asks for the last neurons of each layer, again and again, wherever they are.
struct Persistent;

impl Persistent {
    const WANTS: u32 = 4;
}

impl Migrator for Persistent {
    fn apply(
        &mut self,
        _: usize,
        _: bool,
        device: &mut dyn Device,
        cache: &mut NeuronCache,
        _: Option<&mut dyn Frames>,
        _: &mut Sparsity,
    ) {
        for l in 0..cache.layers.len() {
            let last = cache.layers[l].table.slots().len() as u32 * 2 - 1;
            cache.migrate_all(device, l, None, (0..Persistent::WANTS).map(|i| (SlotId(i), StoreId(last - i))));
        }
    }
}

/// Copies that do not end fill all memory through which unpinned blocks go. The engine used to wait for one of them before it could begin
/// a move, in the middle of a token: with a link that stands still, for ever.
#[test]
fn a_move_that_finds_no_staging_memory_is_put_off_and_comes_later() {
    let name = "a_move_that_finds_no_staging_memory_is_put_off_and_comes_later";
    on(&Machine::new(), name, &[("CUDA_ON_CPU_PINS", "0")], || {
        let (dir, stand_in) = (tempfile::tempdir().unwrap(), StandIn::new());
        let (expected, model) = (expected(dir.path()), model(dir.path()));
        let slots = vec![model.config.widest_ffn() / 2; model.config.layers().len()];
        let budget = device_bytes(&model, &slots) + RING as u64;
        // Who waits for a link that stands still is to fail soon.
        let device = Options { patience: Duration::from_secs(10), ..options(budget) };
        let mut engine = half_on(CudaDevice::new(Card::open().unwrap(), &device).unwrap(), model);
        let Split { device, cache, migrator, .. } = split(&mut engine);
        let (filler, buffer) = (vec![1u8; RING], device.alloc(RING as u64).unwrap());
        stand_in.hold(true);
        let room = |device: &mut dyn Device| device.room_for_moves(filler.as_ptr(), RING, 1);
        let bytes = room(&mut **device);
        assert!((RING / 2..=RING).contains(&bytes), "room for {bytes} bytes");
        // SAFETY: waited for below.
        unsafe { device.copy_in(Stream::Copy, filler.as_ptr(), bytes, buffer, 0) };
        assert_eq!(room(&mut **device), 0);
        *migrator = Some(Box::new(Persistent));
        let residents = cache.layers[0].table.residents();

        assert!(error(&decode(&mut engine, |_| ()), &expected) < 1e-5);
        let Split { device, cache, .. } = split(&mut engine);
        let c = cache.counters;
        assert_eq!((c.migrations, c.landed, c.dropped, cache.layers[0].table.residents()), (0, 0, 0, residents));
        // When a layer begins, and again before its FFN, for all layers.
        let layers = cache.layers.len();
        assert_eq!(c.put_off, (TOKENS * layers * 2 * layers) as u64 * u64::from(Persistent::WANTS));

        stand_in.hold(false);
        device.synchronize(Stream::Copy);
        assert!(error(&decode(&mut engine, |_| ()), &expected) < 1e-5);
        let Split { device, cache, .. } = split(&mut engine);
        cache.settle(&mut **device);
        let now = cache.counters;
        assert_eq!((now.put_off, now.lost), (c.put_off, 0));
        assert_eq!((now.landed, now.migrations), (layers as u64 * u64::from(Persistent::WANTS), now.landed));
        let there = |l: usize, i: u32| cache.layers[l].table.location(StoreId(2 * slots[l] as u32 - 1 - i)).is_device();
        assert!((0..layers).all(|l| (0..Persistent::WANTS).all(|i| there(l, i))));
        drop(engine);
        assert_eq!(stand_in.left(), "");
    });
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

/// The scheduler of the program, which predicts each layer from the one before.
fn scheduler(engine: &Engine, policy: Policy) -> Background {
    let (layers, ffn) = (engine.model.config.layers().len(), engine.model.config.widest_ffn());
    let setting = BackgroundOptions {
        policy,
        // Whether moving pays is not the question here.
        tune: Arc::new(|rules| Rules { gain: false, ..rules }),
        weight: LossWeight::Probability,
        ahead: 1,
        sequences: 1,
        predictor: Some(Arc::new(Exact::new(&engine.model, &vec![0.0; layers]))),
        thresholds: vec![None; layers],
        history: vec![vec![0.1; ffn]; layers],
        placed: vec![(0..ffn / 2).map(StoreId::new).collect(); layers],
        kernels: engine.kernels,
        threads: 1,
        link_gb_s: 1.0,
        latency: None,
    };
    let block_bytes = engine.model.layers[0].block().bytes();
    Background::start(engine.model.clone(), block_bytes, setting).unwrap()
}

/// Logits stay the dense ones while the scheduler moves what it decides; and it does move something.
fn the_scheduler_moves() {
    let dir = tempfile::tempdir().unwrap();
    let expected = expected(dir.path());
    for policy in [Policy::Full, Policy::Micro] {
        let model = model(dir.path());
        let budget = device_bytes(&model, &vec![model.config.widest_ffn() / 2; model.config.layers().len()]);
        let mut engine = half_on(device(budget), model);
        let scheduler = scheduler(&engine, policy);
        split(&mut engine).migrator = Some(Box::new(scheduler));
        let off = error(&decode(&mut engine, catch_up), &expected);
        assert!(off < 1e-5, "{policy:?}: off by {off}");
        let (counts, c) = (split(&mut engine).migrator.as_ref().unwrap().counts(), split(&mut engine).cache.counters);
        assert_eq!(counts.observed, (TOKENS * engine.model.config.layers().len()) as u64);
        assert!(c.landed > 0 && c.landed <= c.migrations, "{policy:?}: {c:?}, {counts:?}");
        assert!(c.computed[Tier::Device] > 0 && c.put_off == 0, "{policy:?}: {c:?}");
    }
    assert_eq!(StandIn::new().left(), "");
}

#[test]
fn the_scheduler_moves_neurons_on_a_card() {
    on(&Machine::new(), "the_scheduler_moves_neurons_on_a_card", &[], the_scheduler_moves);
}

#[test]
fn the_scheduler_moves_neurons_on_a_card_that_pins_nothing() {
    let card = [("CUDA_ON_CPU_PINS", "0")];
    on(&Machine::new(), "the_scheduler_moves_neurons_on_a_card_that_pins_nothing", &card, the_scheduler_moves);
}

/// With a part of the model on disk nothing of it is pinned, and what moves comes from frames through the ring of pinned memory.
#[test]
fn neurons_climb_from_frames_to_a_card() {
    on(&Machine::new(), "neurons_climb_from_frames_to_a_card", &[], || {
        let dir = tempfile::tempdir().unwrap();
        let (expected, model) = (expected(dir.path()), model(dir.path()));
        let (layers, ffn) = (model.config.layers().len(), model.config.widest_ffn());
        let slots = vec![ffn / 2; layers];
        let card = Box::new(device(device_bytes(&model, &slots)));
        // SAFETY: the engine drops its device's part before its model.
        let on_card = unsafe { Split::new(card, &slots, &model, (ON_DEVICE, 1), (CHUNK, 0), false) }.unwrap();
        let mut engine = Engine::new(model, 1, Kernels::best());
        engine.split = Some(on_card);
        engine.set_sparsity(Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap());
        let files: Vec<_> = engine.model.files().iter().map(|file| file.file()).collect();
        let (disk, blocks) = (disk::open(&files).unwrap().disk, layer_blocks(&engine.model).unwrap());
        let half: u64 = blocks.iter().map(|b| (b.frame_bytes(ffn, disk.align()) * ffn / 2) as u64).sum();
        let options = HostCacheOptions::new(2 * least_bytes(&blocks, ffn, disk.align()) + half);
        let cache = HostCache::new(disk, &blocks, ffn, options).unwrap();
        engine.set_host_cache(cache, None);
        let scheduler = scheduler(&engine, Policy::Micro);
        split(&mut engine).migrator = Some(Box::new(scheduler));
        let off = error(&decode(&mut engine, catch_up), &expected);
        assert!(off < 1e-5, "off by {off}");
        let c = split(&mut engine).cache.counters;
        assert!(c.landed > 0 && c.computed[Tier::Device] > 0, "nothing has climbed: {c:?}");
        drop(engine);
        assert_eq!(StandIn::new().left(), "");
    });
}
