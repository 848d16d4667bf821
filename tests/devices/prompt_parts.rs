//! A chunk of a prompt in parts that take turns between host and device: no result depends on the order of their steps, what is learnt of the
//! prompt neither, and by the virtual device's clock it takes less time where the two would wait for each other, as was planned.

use crate::support::{RATES, assumed_machine, error, on_device_by, opened, rates, slower, streaming, synth, tokens};
use dynamicinfer::cache::{Frames, NeuronCache};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::{Device, Rates, VirtualDevice};
use dynamicinfer::engine::split::parts::{PartOrder, PartsSetting};
use dynamicinfer::engine::{ChunkCosts, Engine, Logits, Migrator, Session, Sparsity};
use dynamicinfer::formats::machine_profile::MachineProfile;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::StoreId;
use dynamicinfer::lab::synth::write_store;
use dynamicinfer::model::{KvType, Model};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const CONTEXT: usize = 1100;
const CHUNK: usize = 1024;

fn made(dir: &Path, layers: usize, [hidden, ffn]: [usize; 2]) -> PathBuf {
    let path = dir.join(format!("{layers}-{hidden}.neurons"));
    let shape = synth(layers, [hidden, ffn], CONTEXT, 7);
    write_store(&shape, Quant::F16, &path, &|_, _| Ok(())).unwrap();
    path
}

/// An engine with a device that has every `apart`-th neuron; `streamed` blocks at once are copied for a chunk.
fn engine(model: Model, rates: Rates, apart: usize, streamed: usize) -> Engine {
    let (c, device) = (&model.config, Box::new(VirtualDevice::new(u64::MAX, rates)));
    // SAFETY: the engine has both.
    let mut split = unsafe { on_device_by(&model, device, &vec![c.movable(); c.layers().len()], CHUNK) }.unwrap();
    let there: Vec<StoreId> = (0..c.widest_ffn()).filter(|i| i % apart == apart - 1).map(StoreId::new).collect();
    (0..c.layers().len()).for_each(|l| split.cache.load(&mut *split.device, l, &there).unwrap());
    split.cache.settle(&mut *split.device);
    if streamed > 0 {
        streaming(&mut split, &model, streamed, 0.4);
    }
    let mut engine = Engine::new(model, 1, Kernels::best());
    engine.split = Some(split);
    engine.set_chunk(CHUNK);
    engine
}

fn set(engine: &mut Engine, parts: usize, shared: bool, order: PartOrder) {
    let setting = PartsSetting { parts: Some(parts), shared: Some(shared), order: Some(order) };
    engine.split.as_mut().unwrap().set_parts(setting);
}

/// The bits of the logits after a prompt, and of those after one more token, which reads all keys and values.
fn bits(engine: &mut Engine, n: usize, kind: KvType) -> Vec<u32> {
    let mut session = Session::new(engine, n + 1, kind).unwrap();
    let mut logits = session.append(engine, &tokens(n), |_| Ok(())).unwrap().to_vec();
    logits.extend_from_slice(engine.forward(&mut session.kv, &[7], Logits::Last));
    engine.check().unwrap();
    logits.into_iter().map(f32::to_bits).collect()
}

/// Families differ: norms beside each other, biases, rotation, positions as weights, windows.
#[test]
fn every_order_of_parts_gives_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path(), 3, [64, 96]);
    let models = [("synth", 700), ("falcon", 250), ("opt", 130), ("mistral", 250), ("qwen2", 250)];
    for (name, n) in models {
        let open = || match name {
            "synth" => Model::open(&path).unwrap(),
            name => opened(dir.path(), name, Quant::F16),
        };
        // Keys in f32 are the host's.
        for (kind, apart, streamed) in
            [(KvType::F16, 2, 8), (KvType::F32, 2, 8), (KvType::F32, 3, 0), (KvType::F16, 3, 0), (KvType::F16, 1, 8)]
        {
            let limit = if kind == KvType::F16 { 3e-3 } else { 2e-3 };
            let mut alone = Engine::new(open(), 1, Kernels::best());
            let expected: Vec<f32> = bits(&mut alone, n, kind).into_iter().map(f32::from_bits).collect();
            let mut engine = engine(open(), RATES, apart, streamed);
            for parts in 2..=4.min(n / 64) {
                set(&mut engine, parts, true, PartOrder::EarliestPart);
                let first = bits(&mut engine, n, kind);
                let found: Vec<f32> = first.iter().map(|&bits| f32::from_bits(bits)).collect();
                let off = error(&found, &expected);
                assert!(off < limit, "{name}, {kind:?}, one neuron in {apart} there, {parts} parts: {off}");
                let by_chance = (0..3).map(PartOrder::AtRandom);
                let orders: Vec<PartOrder> = by_chance.chain([PartOrder::LargestContribution]).collect();
                for shared in [true, false] {
                    set(&mut engine, parts, shared, PartOrder::EarliestPart);
                    let same_division = bits(&mut engine, n, kind);
                    assert!(!shared || same_division == first, "{name}, {kind:?}: once more is something else");
                    for &order in &orders {
                        set(&mut engine, parts, shared, order);
                        let what = format!("{name}, {kind:?}, one in {apart}, {parts} parts, {shared}, {order:?}");
                        assert!(bits(&mut engine, n, kind) == same_division, "{what}");
                    }
                }
            }
        }
    }
}

/// By layer, what a prompt's chunks told of it.
type Told = Arc<Mutex<Vec<(usize, usize, usize, Vec<u32>)>>>;

struct Listening(Told);

impl Migrator for Listening {
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

    fn prompt(&mut self, layer: usize, first: usize, tokens: usize, _: u64, counts: &[u32]) {
        self.0.lock().unwrap().push((layer, first, tokens, counts.to_vec()));
    }
}

#[test]
fn the_scheduler_is_told_the_same_of_a_prompt_in_any_parts() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path(), 3, [64, 96]);
    let mut engine = engine(Model::open(&path).unwrap(), RATES, 2, 8);
    let told = Told::default();
    engine.split.as_mut().unwrap().migrator = Some(Box::new(Listening(told.clone())));
    let mut of = |parts, shared, seed| {
        set(&mut engine, parts, shared, PartOrder::AtRandom(seed));
        bits(&mut engine, 650, KvType::F16);
        std::mem::take(&mut *told.lock().unwrap())
    };
    let whole = of(1, true, 0);
    assert_eq!(whole.iter().map(|of| (of.0, of.1, of.2)).collect::<Vec<_>>(), [0, 1, 2].map(|l| (l, 0, 650)));
    assert!(whole.iter().all(|of| of.3.iter().sum::<u32>() > 1000));
    for (parts, shared) in [(2, true), (2, false), (3, true), (3, false), (4, true), (4, false)] {
        let found = of(parts, shared, 0);
        // The order of a cut's steps changes nothing.
        assert!((1..4).all(|seed| of(parts, shared, seed) == found), "{parts} parts, {shared}");
        assert_eq!(found.len(), whole.len());
        for (found, whole) in found.iter().zip(&whole) {
            assert_eq!((found.0, found.1, found.2), (whole.0, whole.1, whole.2));
            // With the cut it differs which neurons the CPU has, whose kernels may round a sum near zero to its other side.
            let apart: u32 = found.3.iter().zip(&whole.3).map(|(a, b)| a.abs_diff(*b)).sum();
            assert!(1000 * apart <= whole.3.iter().sum::<u32>(), "{parts} parts: {apart} apart");
        }
    }
}

#[test]
fn a_prompt_in_parts_can_be_stopped_between_layers_and_goes_on_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path(), 3, [64, 96]);
    let mut engine = engine(Model::open(&path).unwrap(), RATES, 2, 8);
    set(&mut engine, 3, false, PartOrder::EarliestPart);
    let (mut session, whole) =
        (Session::new(&engine, CONTEXT, KvType::F16).unwrap(), bits(&mut engine, 700, KvType::F16));
    // Each part asks before each of its layers.
    for asked in 0..9 {
        let mut left = asked;
        let stopped = !engine.forward_while(&mut session.kv, &tokens(700), Logits::Last, &mut || {
            left -= 1;
            left >= 0
        });
        assert!(stopped && session.kv.len == 0, "{asked}");
    }
    let mut logits = session.append(&mut engine, &tokens(700), |_| Ok(())).unwrap().to_vec();
    logits.extend_from_slice(engine.forward(&mut session.kv, &[7], Logits::Last));
    assert!(logits.into_iter().map(f32::to_bits).collect::<Vec<_>>() == whole);
}

/// A machine on which a layer of [`timed`]'s model takes milliseconds, so that calls and waits count for little.
fn machine(host_gflops: f64) -> MachineProfile {
    MachineProfile {
        host_gflops,
        device_gb_s: 400.0,
        device_gflops: 20.0,
        link_gb_s: 1.0,
        copy_us: 2.0,
        sync_us: 5.0,
        ..assumed_machine()
    }
}

/// Milliseconds of a prompt of `n` tokens by the device's clock, with every `apart`-th neuron there.
fn timed(path: &Path, m: &MachineProfile, kind: KvType, parts: Option<usize>, apart: usize, n: usize) -> f64 {
    let mut engine = engine(Model::open(path).unwrap(), rates(m), apart, 0);
    let (model, split) = (engine.model.clone(), engine.split.as_mut().unwrap());
    let block = model.layers[0].block().bytes();
    split.stream(&model, ChunkCosts::of(m, &model.config, block), 1 << 20).unwrap();
    split.set_parts(PartsSetting { parts, ..PartsSetting::default() });
    let mut session = Session::new(&engine, CONTEXT, kind).unwrap();
    let clock = |engine: &Engine| engine.split.as_ref().unwrap().device.totals().clock_ns;
    let before = clock(&engine);
    session.append(&mut engine, &tokens(n), |_| Ok(())).unwrap();
    (clock(&engine) - before) as f64 / 1e6
}

#[test]
fn host_and_device_wait_less_for_each_other_and_never_more() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path(), 4, [256, 512]);
    // Attention on the host takes about as long as all products on the device.
    let machine_for_both = machine(10.0);
    let [whole, by_two, planned] =
        [Some(1), Some(2), None].map(|parts| timed(&path, &machine_for_both, KvType::F32, parts, 2, CHUNK));
    println!("attention on the host: {whole:.2} ms, in two parts {by_two:.2}, as planned {planned:.2}");
    assert!(by_two < 0.9 * whole && planned < 0.85 * whole, "{whole}, {by_two}, {planned} ms");
    for (gflops, kind) in
        [(1.0, KvType::F32), (100.0, KvType::F32), (1.0, KvType::F16), (10.0, KvType::F16), (100.0, KvType::F16)]
    {
        let machine = machine(gflops);
        let [whole, planned] = [Some(1), None].map(|parts| timed(&path, &machine, kind, parts, 2, CHUNK));
        println!("{gflops} GFLOP/s, keys in {kind:?}: {whole:.2} ms, as planned {planned:.2}");
        assert!(planned <= 1.01 * whole, "{gflops} GFLOP/s, {kind:?}: {planned} and {whole} ms");
    }
}

/// Profiles of PCs, their rates divided so that a layer of `path`'s model takes as long as one of 7B there, while calls, copies and waits take what
/// they do.
fn machines(path: &Path) -> Vec<MachineProfile> {
    let c = &Model::open(path).unwrap().config;
    let smaller = (3 * 4096 * 11008) as f64 / (3 * c.hidden * c.widest_ffn()) as f64;
    ["rtx-2080ti", "rtx-3060-12gb", "rtx-4090", "powerinfer-pc-low", "powerinfer-pc-high", "dynamicinfer-pc-low"]
        .map(|name| slower(name, smaller))
        .to_vec()
}

/// Milliseconds that the processor alone takes for a prompt's products and attention, by its arithmetic: less than it takes in truth.
fn alone_ms(path: &Path, m: &MachineProfile, n: usize) -> f64 {
    let c = &Model::open(path).unwrap().config;
    let weights = (c.mixer(0).rows() + c.mixer(0).cols() + 3 * c.widest_ffn()) * c.hidden;
    let of_layer = 2 * n * weights + 2 * n * (n + 1) * c.mixer(0).cols();
    (c.layers().len() * of_layer) as f64 / m.host_gflops / 1e6
}

#[test]
fn a_prompt_with_a_device_is_never_slower_than_without_on_any_pc() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path(), 2, [256, 512]);
    for m in machines(&path) {
        for (kind, apart) in
            [(KvType::F16, 1), (KvType::F16, 3), (KvType::F16, 1000), (KvType::F32, 2), (KvType::F32, 1000)]
        {
            for n in [33, 64, 200, 700] {
                let (with, without) = (timed(&path, &m, kind, None, apart, n), alone_ms(&path, &m, n));
                let what = format!("{}, {n} tokens, keys in {kind:?}, one neuron in {apart} there", m.name);
                assert!(with <= without, "{what}: {with} ms, and {without} without a device");
            }
        }
    }
}
