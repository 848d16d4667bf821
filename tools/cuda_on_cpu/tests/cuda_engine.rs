//! THE LAW of two memories on `CudaDevice` and the stand-in for the driver, through the real engine and the real kernels: logits are the
//! dense ones whatever lies where and whatever moves; and copies of neurons run while kernels do.

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use common::{Machine, StandIn, device, on, with_graphs};
use dynamicinfer::cache::{Frames, Migration, NeuronCache, NotBegun, Refused, Slot, Tier};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::{Device, MoveMethod, MoveRate, VirtualDevice};
use dynamicinfer::engine::session::CHUNK;
use dynamicinfer::engine::{Choice, Engine, Logits, Migrator, Sparsity, Split};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::{LayerId, SlotId, StoreId};
use dynamicinfer::lab::synth::{Shape, write_store};
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::prng::Prng;
use std::sync::atomic::{AtomicU64, Ordering};
use support::law::mixed_stores;
use support::{device_bytes, error, on_device, on_device_by, on_device_streaming, packed, streaming, synth};

const FAMILIES: [&str; 7] = ["relullama", "prosparse", "bamboo", "opt", "llama-relu2", "falcon", "relufalcon"];

static BEGUN: AtomicU64 = AtomicU64::new(0);
/// Neurons times tokens that the card computed. One seed alone may have none: its slots may be empty when they are used.
static HITS: AtomicU64 = AtomicU64::new(0);

/// Neurons times tokens of prompts that were copied to the card for them.
static STREAMED: AtomicU64 = AtomicU64::new(0);

/// Moves neurons at random, before any layer of any token.
struct Restless(Prng);

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
        let layers = cache.layers.len() as u64;
        if self.0.below(3) == 0 {
            // A group: some are neighbours, some are refused.
            let layer = self.0.below(layers) as usize;
            let (slot, neuron, n) = (self.0.below(48) as u32, self.0.below(48) as u32, self.0.below(20) as u32);
            let at = |i: u32| (SlotId(slot + i), StoreId((neuron + i * (1 + i % 2)) % 96));
            let group: Vec<(SlotId, StoreId)> = (0..n).map(at).collect();
            let begun = cache.migrate_all(device, layer, None, group.into_iter()).begun;
            BEGUN.fetch_add(begun as u64, Ordering::Relaxed);
        }
        for _ in 0..self.0.below(12) {
            let layer = self.0.below(layers) as usize;
            let table = &mut cache.layers[layer].table;
            let slots = table.slots().len() as u64;
            if slots == 0 {
                continue;
            }
            let (slot, neuron) = (self.0.below(slots) as u32, self.0.below(96) as u32);
            if self.0.below(10) == 0 {
                let filling = matches!(table.slots()[slot as usize], Slot::Filling(_));
                assert_eq!(table.clear(SlotId(slot)).is_err(), filling);
                continue;
            }
            match cache
                .migrate(device, Migration { layer: LayerId::new(layer), slot: SlotId(slot), neuron: StoreId(neuron) })
            {
                Ok(()) => _ = BEGUN.fetch_add(1, Ordering::Relaxed),
                Err(NotBegun::Refused(Refused::OutOfRange)) => panic!("slot {slot}, neuron {neuron}"),
                Err(NotBegun::Refused(Refused::Busy | Refused::AlreadyThere) | NotBegun::Full) => {}
            }
        }
    }
}

/// Logits of every token, in passes of `sizes`; `between` is called after each.
fn logits(engine: &mut Engine, kind: KvType, sizes: &[usize], mut between: impl FnMut(&mut Engine, usize)) -> Vec<f32> {
    let ids: Vec<u32> = (0..sizes.iter().sum::<usize>() as u32).map(|i| 5 + i * 37 % 90).collect();
    let mut kv = KvCache::new(&engine.model.config, ids.len(), kind).unwrap();
    let (mut out, mut rest) = (Vec::new(), &ids[..]);
    for (i, &n) in sizes.iter().enumerate() {
        let (now, after) = rest.split_at(n);
        out.extend_from_slice(engine.forward(&mut kv, now, Logits::All));
        rest = after;
        between(engine, i);
    }
    out
}

/// A graph of a sequence that is not what is wanted now would show: slots move and are given back, and tokens come one by one, several
/// at once and many.
const SIZES: [&[usize]; 4] = [
    &[7, 1, 32, 1, 2, 1],
    &[1; 10],
    &[70, 1, 36, 2],
    // Past 128 positions attention is launched otherwise.
    &[1, 1, 7, 1, 1, 32, 1, 80, 1, 1, 2, 2, 1, 1, 1],
];

/// As wide as the fixtures.
fn five_layers(dir: &std::path::Path, quant: Quant) -> std::path::PathBuf {
    let path = dir.join("five-layers.neurons");
    let shape = Shape { heads: 4, ..synth(5, [64, 96], 256, 5) };
    write_store(&shape, quant, &path, &|_, _| Ok(())).unwrap();
    path
}

/// One model with random slots, residents, moves and budgets: logits on the card and without it, and what they may be off. With a barrier
/// there is no chance in what lies where.
fn run(seed: u64, sizes: &[usize], barrier: bool, graphs: bool) -> (Vec<f32>, Vec<f32>, f32) {
    let mut prng = Prng::new(seed);
    let dir = tempfile::tempdir().unwrap();
    let quant = [Quant::F32, Quant::F16, Quant::Q8, Quant::Q4][prng.below(4) as usize];
    let family = FAMILIES[prng.below(FAMILIES.len() as u64) as usize];
    let mixed = MIXED.contains(&seed);
    let path = match mixed {
        true => mixed_stores(dir.path()).swap_remove(seed as usize % 6).1,
        // Of more than two layers, so that attention's matrices take turns.
        false if seed % 5 == 2 => five_layers(dir.path(), quant),
        false => packed(dir.path(), family, quant),
    };
    let model = Model::open(&path).unwrap();
    let (layers, ffn) = (model.config.layers().len(), model.config.widest_ffn());
    // Keys and values in f32 stay on the host, with attention over them; in f16 they lie on the card.
    let kind = [KvType::F32, KvType::F16][prng.below(2) as usize];
    let slots = |prng: &mut Prng| -> Vec<usize> {
        let one = |prng: &mut Prng| [0, ffn, prng.below(ffn as u64 + 1) as usize][prng.below(3) as usize];
        (0..layers).map(|_| one(prng)).collect()
    };
    let (first, later) = (slots(&mut prng), slots(&mut prng));
    let budget = device_bytes(&model, &vec![ffn; layers]) + (1 << 20);
    // Attention's matrices of none, some or all layers are copied for every pass.
    let streamed = if layers > 3 { layers } else { seed as usize / 2 % (layers + 1) };
    let device = if graphs { with_graphs(budget) } else { device(budget) };
    // SAFETY: the engine drops its device's part before its model.
    let mut split = unsafe { on_device_streaming(&model, Box::new(device), &first, (CHUNK, streamed)) }.unwrap();
    for (l, &slots) in first.iter().enumerate() {
        let neurons: Vec<u32> = (0..slots as u32).map(|i| (i * 5 + 3) % ffn as u32).collect();
        split.cache.load(&mut *split.device, l, bytemuck::cast_slice(&neurons)).unwrap();
    }
    split.cache.settle(&mut *split.device);
    let method = MoveMethod::ALL[seed as usize % 3];
    split.cache.set_moves(&mut *split.device, &[MoveRate { method, group_us: 1.0, piece_us: 1.0, gb_s: 1.0 }]);
    split.cache.barrier = barrier;
    // Of a prompt's missing neurons some are copied for it, some are the CPU's.
    streaming(&mut split, &model, 12, [0.0, 0.4][prng.below(2) as usize]);
    split.migrator = Some(Box::new(Restless(Prng::new(seed ^ 0xab))));
    let mut engine = Engine::new(model, 1, Kernels::best());
    let expected = logits(&mut engine, kind, sizes, |_, _| ());
    engine.split = Some(split);
    engine.set_sparsity(Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap());
    let mut resized = 0;
    let found = logits(&mut engine, kind, sizes, |engine, i| {
        engine.check().unwrap();
        // Another budget between two tokens: less, then more.
        if i % 3 == 1 {
            let Split { device, cache, .. } = engine.split.as_mut().unwrap();
            cache.resize(&mut **device, if i % 2 == 1 { &later } else { &first }).unwrap();
            resized += 1;
        }
    });
    assert!(resized > 0);
    // Inputs of grouped types are rounded to int8, keys and values to f16: a sum in another order, as attention's and the head's are here,
    // can round to the next code.
    let most = match (mixed || quant.is_grouped(), kind) {
        (true, _) => 4e-2,
        (false, KvType::F32) => 1e-5,
        (false, _) => 1e-3,
    };
    let chunks = engine.split.as_ref().unwrap().chunks;
    STREAMED.fetch_add(chunks.streamed, Ordering::Relaxed);
    HITS.fetch_add(engine.split.as_ref().unwrap().cache.counters.computed[Tier::Device], Ordering::Relaxed);
    (found, expected, most)
}

fn law(seed: u64) {
    let (found, expected, most) = run(seed, SIZES[seed as usize % 3], seed.is_multiple_of(4), seed % 2 == 1);
    let off = error(&found, &expected);
    assert!(off < most, "seed {seed}: off by {off}");
}

fn holds(machine: &Machine, name: &str, environment: &[(&str, &str)], seeds: std::ops::Range<u64>) {
    on(machine, name, environment, || {
        seeds.clone().for_each(law);
        let (begun, hits) = (BEGUN.load(Ordering::Relaxed), HITS.load(Ordering::Relaxed));
        assert!(begun > 100 && hits > 1000, "{begun} moves and {hits} neurons on the card");
        assert!(STREAMED.load(Ordering::Relaxed) > 0, "nothing was copied for a prompt");
        assert_eq!(StandIn::new().left(), "");
    });
}

#[test]
fn logits_are_the_dense_ones_on_a_card() {
    holds(&Machine::new(), "logits_are_the_dense_ones_on_a_card", &[], 0..12);
}

/// Every kernel that takes a whole chunk takes more than 256 tokens, too, and counts in which of them neurons were active.
#[test]
fn logits_are_the_dense_ones_in_a_chunk_of_more_than_256_tokens() {
    on(&Machine::new(), "logits_are_the_dense_ones_in_a_chunk_of_more_than_256_tokens", &[], || {
        for quant in [Quant::F32, Quant::Q8] {
            let dir = tempfile::tempdir().unwrap();
            let model = Model::open(&packed(dir.path(), "relullama", quant)).unwrap();
            let (layers, ffn) = (model.config.layers().len(), model.config.widest_ffn());
            // SAFETY: the engine drops its device's part before its model.
            let mut split =
                unsafe { on_device_by(&model, Box::new(device(1 << 30)), &vec![ffn / 2; layers], 512) }.unwrap();
            let there: Vec<StoreId> = (0..ffn / 2).map(StoreId::new).collect();
            (0..layers).for_each(|l| split.cache.load(&mut *split.device, l, &there).unwrap());
            split.cache.settle(&mut *split.device);
            streaming(&mut split, &model, 12, 0.4);
            split.migrator = Some(Box::new(Restless(Prng::new(3))));
            let mut engine = Engine::new(model, 1, Kernels::best());
            let expected = logits(&mut engine, KvType::F16, &[300], |_, _| ());
            engine.split = Some(split);
            let off = error(&logits(&mut engine, KvType::F16, &[300], |_, _| ()), &expected);
            engine.check().unwrap();
            assert!(off < if quant == Quant::F32 { 1e-3 } else { 4e-2 }, "{}: off by {off}", quant.name());
            let chunks = engine.split.as_ref().unwrap().chunks;
            assert!(chunks.resident > 0 && chunks.streamed > 0 && chunks.on_cpu > 0, "{chunks:?}");
        }
        assert_eq!(StandIn::new().left(), "");
    });
}

#[test]
fn logits_are_the_dense_ones_when_work_is_done_as_late_as_can_be_and_backward() {
    let card = [("CUDA_ON_CPU_LAZY", "1"), ("CUDA_ON_CPU_ORDER", "backward")];
    let name = "logits_are_the_dense_ones_when_work_is_done_as_late_as_can_be_and_backward";
    holds(&Machine::new(), name, &card, 20..28);
}

#[test]
fn logits_are_the_dense_ones_without_pins_and_without_chunks() {
    let card = [("CUDA_ON_CPU_PINS", "0"), ("CUDA_ON_CPU_CHUNKS", "0")];
    holds(&Machine::new(), "logits_are_the_dense_ones_without_pins_and_without_chunks", &card, 40..48);
}

/// Seeds of models whose tensors have the types of a Q4_K_M or Q6_K file.
const MIXED: std::ops::Range<u64> = 80..92;

#[test]
fn logits_are_the_dense_ones_where_types_are_mixed() {
    holds(&Machine::new(), "logits_are_the_dense_ones_where_types_are_mixed", &[], MIXED);
}

#[test]
fn logits_are_the_dense_ones_over_a_slow_link() {
    let card = [("CUDA_ON_CPU_LINK_MB_S", "100")];
    holds(&Machine::new(), "logits_are_the_dense_ones_over_a_slow_link", &card, 60..66);
}

/// Bit for bit, while neurons move, budgets change and contexts grow; and what is started is graphs.
fn graphs_change_nothing(seeds: std::ops::Range<u64>) {
    let stand_in = StandIn::new();
    for seed in seeds {
        let sizes = SIZES[if seed % 2 == 0 { 3 } else { 0 }];
        stand_in.fail("");
        let plain = run(seed, sizes, true, false).0;
        let functions = ["cuLaunchKernel", "cuGraphLaunch", "cuGraphInstantiateWithFlags"];
        let [one_by_one, none, _] = functions.map(|f| stand_in.calls(f));
        stand_in.fail("");
        let graphed = run(seed, sizes, true, true).0;
        let bits = |logits: &[f32]| logits.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert!(bits(&plain) == bits(&graphed), "seed {seed}");
        let [alone, graphs, made] = functions.map(|f| stand_in.calls(f));
        assert!(none == 0 && graphs > 2 * made && made > 0, "{graphs} started, {made} made");
        assert!(alone < one_by_one, "{alone} kernels by themselves, and without graphs {one_by_one}");
    }
    assert_eq!(stand_in.left(), "");
}

#[test]
fn a_token_that_is_started_as_graphs_has_the_same_bits() {
    on(&Machine::new(), "a_token_that_is_started_as_graphs_has_the_same_bits", &[], || graphs_change_nothing(100..104));
}

/// Where buffers are somewhere else after each change of the budget, and what was there is gone.
#[test]
fn no_graph_reaches_memory_that_was_given_back() {
    let card = [("CUDA_ON_CPU_CHUNKS", "0"), ("CUDA_ON_CPU_LAZY", "1")];
    on(&Machine::new(), "no_graph_reaches_memory_that_was_given_back", &card, || graphs_change_nothing(104..108));
}

/// As a device knows it that looks at the operands: to the byte, but for bamboo's kind, where the activation of up closes what the gate has
/// let through, and up's row was read all the same.
#[test]
fn bytes_that_a_card_reads_are_those_that_the_virtual_device_counts() {
    on(&Machine::new(), "bytes_that_a_card_reads_are_those_that_the_virtual_device_counts", &[], || {
        let dir = tempfile::tempdir().unwrap();
        for (family, quant) in [("relullama", Quant::F16), ("opt", Quant::F32), ("bamboo", Quant::Q4)] {
            let store = packed(dir.path(), family, quant);
            let read = |device: Box<dyn Device>| {
                let model = Model::open(&store).unwrap();
                let (layers, ffn) = (model.config.layers().len(), model.config.widest_ffn());
                // SAFETY: the engine drops its device's part before its model.
                let mut split = unsafe { on_device(&model, device, &vec![ffn / 2; layers]) }.unwrap();
                let neurons: Vec<u32> = (0..ffn as u32 / 2).map(|i| 2 * i).collect();
                (0..layers)
                    .for_each(|l| split.cache.load(&mut *split.device, l, bytemuck::cast_slice(&neurons)).unwrap());
                split.cache.settle(&mut *split.device);
                let mut engine = Engine::new(model, 1, Kernels::best());
                engine.split = Some(split);
                engine
                    .set_sparsity(Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap());
                // Attention over f32 is the host's: keys and values are no weights.
                logits(&mut engine, KvType::F32, &[1; 12], |_, _| ());
                engine.split.as_ref().unwrap().device.totals().device_bytes
            };
            let card = read(Box::new(device(64 << 20)));
            let expected = read(Box::new(VirtualDevice::new(u64::MAX, support::RATES)));
            let least = if family == "bamboo" { expected / 20 * 19 } else { expected };
            assert!(card > 0 && (least..=expected).contains(&card), "{family}: {card} bytes and {expected}");
        }
    });
}

#[test]
fn logits_are_the_dense_ones_where_kernels_do_not_see_host_memory() {
    let card = [("CUDA_ON_CPU_SEES_HOST", "0")];
    holds(&Machine::new(), "logits_are_the_dense_ones_where_kernels_do_not_see_host_memory", &card, 80..88);
}

/// Neurons are on their way from before the first of these tokens until after the last: no kernel waits for them, and they land.
#[test]
fn neurons_move_while_kernels_run() {
    const TOKENS: usize = 16;
    let machine = Machine::new();
    let timeline = machine.dir.path().join("timeline");
    let card = [("CUDA_ON_CPU_TIMELINE", timeline.to_str().unwrap())];
    on(&machine, "neurons_move_while_kernels_run", &card, || {
        let (dir, stand_in) = (tempfile::tempdir().unwrap(), StandIn::new());
        let model = Model::open(&packed(dir.path(), "relullama", Quant::F32)).unwrap();
        let (layers, ffn) = (model.config.layers().len(), model.config.widest_ffn());
        let slots = vec![ffn / 2; layers];
        let device = device(device_bytes(&model, &slots));
        // SAFETY: the engine drops its device's part before its model.
        let mut split = unsafe { on_device(&model, Box::new(device), &slots) }.unwrap();
        let neurons: Vec<u32> = (0..slots[0] as u32 - 16).collect();
        (0..layers).for_each(|l| split.cache.load(&mut *split.device, l, bytemuck::cast_slice(&neurons)).unwrap());
        split.cache.settle(&mut *split.device);
        let before = split.residents();
        stand_in.hold(true);
        // The last neurons are in nobody's slot.
        for (l, i) in (0..layers).flat_map(|l| (0..4).map(move |i| (l, i))) {
            let (slot, neuron) = (ffn as u32 / 2 - 1 - i, ffn as u32 - 1 - i);
            split
                .cache
                .migrate(
                    &mut *split.device,
                    Migration { layer: LayerId::new(l), slot: SlotId(slot), neuron: StoreId(neuron) },
                )
                .unwrap();
        }
        let mut engine = Engine::new(model, 1, Kernels::best());
        engine.set_sparsity(Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap());
        engine.split = Some(split);
        logits(&mut engine, KvType::F16, &[1; TOKENS], |_, _| ());
        engine.check().unwrap();
        let split = engine.split.as_mut().unwrap();
        assert_eq!((split.cache.in_flight(), split.residents()), (4 * layers, before));
        stand_in.hold(false);
        split.cache.settle(&mut *split.device);
        assert_eq!((split.cache.in_flight(), split.residents()), (0, before + 4 * layers));
    });
    // In both processes; the child's own reading is of a file that is not whole yet.
    let Ok(text) = std::fs::read_to_string(&timeline) else { return };
    let lines: Vec<(u64, &str, u64, u64)> = text
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            (words[0].parse().unwrap(), words[1], words[2].parse().unwrap(), words[3].parse().unwrap())
        })
        .collect();
    let halves: Vec<_> = lines.iter().filter(|line| line.1.starts_with("ffn_neurons")).collect();
    let copies = lines.iter().filter(|line| line.0 != halves[0].0 && line.1 == "copy");
    let longest = copies.max_by_key(|copy| copy.3 - copy.2).expect("neurons came");
    let beside = halves.iter().filter(|half| longest.2 < half.2 && half.3 < longest.3).count();
    let layers = halves.len() / TOKENS;
    assert!(layers > 1 && beside >= (TOKENS - 1) * layers, "{beside} of {} ran beside a copy:\n{text}", halves.len());
}
