//! THE LAW of two memories for experts: whatever lies where, whatever moves when and whatever goes wrong on the way, a mixture's logits
//! are those of the CPU alone. And what can be asked of a mixture with a device: policies, a live budget, the same text again.

mod support;

use dynamicinfer::cache::{Migration, NeuronCache, NotBegun, Refused, Tier};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::{Device, Faults, VirtualDevice};
use dynamicinfer::engine::{Engine, Migrator, Sparsity};
use dynamicinfer::ids::{LayerId, SlotId, StoreId};
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvType, Model};
use dynamicinfer::prng::Prng;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use support::law::{logits, slots, with_seeds};
use support::{RATES, device_bytes, error, on_device};

/// Of every family, as published and as GGUF; normed queries, routers that read another input, layers without rotation, and rows in
/// GGUF's blocks among them.
const MODELS: [&str; 8] = [
    "mixtral",
    "mixtral.gguf",
    "qwen3-moe",
    "qwen3-moe.gguf",
    "smallthinker",
    "smallthinker.gguf",
    "turbosparse-mixtral",
    "k256-moe.q4_k_m.gguf",
];

fn open(name: &str) -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name);
    Model::in_place(Source::open(&path, None).unwrap()).unwrap()
}

/// Moves experts at random: any layer, any slot, before any layer of any token.
struct Restless {
    prng: Prng,
    experts: u64,
    begun: Arc<Mutex<u64>>,
}

impl Migrator for Restless {
    fn apply(&mut self, _: usize, _: bool, device: &mut dyn Device, cache: &mut NeuronCache, _: &mut Sparsity) {
        let layers = cache.layers.len() as u64;
        for _ in 0..self.prng.below(7) {
            let layer = self.prng.below(layers) as usize;
            let slots = cache.layers[layer].table.slots().len() as u64;
            if slots == 0 {
                continue;
            }
            let slot = SlotId(self.prng.below(slots) as u32);
            let neuron = StoreId(self.prng.below(self.experts) as u32);
            match cache.migrate(device, Migration { layer: LayerId::new(layer), slot, neuron }) {
                Ok(()) => *self.begun.lock().unwrap() += 1,
                Err(NotBegun::Refused(Refused::OutOfRange)) => panic!("slot {slot:?}, expert {neuron:?}"),
                Err(NotBegun::Refused(Refused::Busy | Refused::AlreadyThere) | NotBegun::Full) => {}
            }
        }
    }
}

#[test]
fn logits_are_the_cpus_for_every_budget_residency_and_interleaving() {
    let (worst, moves) = (Mutex::new([0f32; MODELS.len()]), Arc::new(Mutex::new(0u64)));
    let computed = Mutex::new([0u64; 2]);
    type Expected = HashMap<(usize, bool, Vec<usize>), Vec<f32>>;
    let expected = Mutex::new(Expected::new());
    with_seeds("logits_are_the_cpus_for_every_budget_residency_and_interleaving", 400, |seed| {
        let mut prng = Prng::new(seed);
        let which = prng.below(MODELS.len() as u64) as usize;
        let model = open(MODELS[which]);
        let (layers, clusters) = (model.config.layers, model.config.clusters());
        let sizes = match prng.below(3) {
            // More than the row kernels take: the CPU's.
            0 => vec![40, 1, 1, 3, 1, 1, 1, 1],
            1 => vec![1; 16],
            _ => vec![7, 1, 32, 1, 1, 2, 1, 1],
        };
        let slots: Vec<usize> = (0..layers).map(|_| slots(&mut prng, clusters)).collect();
        let budget = device_bytes(&model, &slots);
        let mut device = VirtualDevice::new(budget, RATES);
        if prng.below(2) == 0 {
            let share = |prng: &mut Prng| [0.0, 0.2, 0.9][prng.below(3) as usize];
            let (late, lost) = (share(&mut prng), share(&mut prng) / 4.0);
            device = device.with_faults(Faults { late, lost, reorder: prng.below(2) == 0, seed });
        }
        // SAFETY: the engine drops its device's part before its model: it has both.
        let mut split = unsafe { on_device(&model, Box::new(device), &slots) }.expect("the budget is what it takes");
        for (l, &slots) in slots.iter().enumerate() {
            if prng.below(2) == 0 {
                let experts: Vec<StoreId> = (0..slots).map(|i| StoreId::new((i + l) % clusters)).collect();
                split.cache.load(&mut *split.device, l, &experts).expect("they fit and none is named twice");
                split.cache.settle(&mut *split.device);
            }
        }
        split.cache.barrier = prng.below(3) == 0;
        if prng.below(4) != 0 {
            let (prng, experts) = (Prng::new(seed ^ 0xab), clusters as u64);
            split.migrator = Some(Box::new(Restless { prng, experts, begun: moves.clone() }));
        }
        let mut engine = Engine::new(model, 1 + prng.below(2) as usize, Kernels::best());
        // Keys and values in f32 stay on the host; in f16 they lie on the device.
        let kind = [KvType::F32, KvType::F16][prng.below(2) as usize];
        let of_cpu = expected
            .lock()
            .unwrap()
            .entry((which, kind == KvType::F16, sizes.clone()))
            .or_insert_with(|| logits(&mut engine, kind, &sizes, None))
            .clone();
        engine.split = Some(split);
        let found = logits(&mut engine, kind, &sizes, None);
        let off = error(&found, &of_cpu);
        let limit = if MODELS[which].contains("k256") { 2e-2 } else { 2e-3 };
        assert!(off < limit, "{} {kind:?} {sizes:?} {slots:?}: {off}", MODELS[which]);
        let worst = &mut worst.lock().unwrap()[which];
        *worst = worst.max(off);
        let split = engine.split.as_ref().unwrap();
        assert_eq!(split.device.memory().peak, budget, "it took more than its budget");
        let mut sums = computed.lock().unwrap();
        for tier in Tier::ALL {
            sums[tier as usize] += split.cache.counters.computed[tier];
        }
        // Every expert of every token was computed once, by one of them.
        let few: usize = sizes.iter().filter(|n| **n <= 32).sum();
        let used = engine.model.config.form.experts.unwrap().used;
        let total = split.cache.counters.computed;
        assert_eq!(total[Tier::Host] + total[Tier::Device], (few * used * layers) as u64);
    });
    let (moves, worst, computed) = (*moves.lock().unwrap(), *worst.lock().unwrap(), *computed.lock().unwrap());
    eprintln!("{moves} moves begun; worst {worst:?}; computed by CPU and device {computed:?}");
    if std::env::var_os("HYBRID_SEED").is_none() {
        assert!(moves > 1500 && computed.iter().all(|&n| n > 10_000), "{moves} moves, {computed:?}: nothing was tried");
    }
}
