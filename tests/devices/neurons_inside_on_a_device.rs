//! THE LAW of two memories for the neurons inside experts: whatever lies where, whatever moves when and whatever goes wrong on the way, the
//! logits of a mixture that is packed by neuron are those of the CPU alone, and each neuron is computed once. And what a user does with
//! such a mixture and a device.

use crate::support::law::{Restless, logits, slots, with_seeds};
use crate::support::{RATES, by_token, device_bytes, expert_costs, numbers, often_faulty, on_device, predictor_header};
use dynamicinfer::cache::{Frames, NeuronCache, PerTier, Tier};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::{Device, Rates, VirtualDevice};
use dynamicinfer::engine::sampler::argmax;
use dynamicinfer::engine::{
    Choice, DividedLayer, Engine, ExpertCosts, LiveAudit, Logits, Migrator, Observer, Seen, SeenExperts, Session,
    Sparsity,
};
use dynamicinfer::error::Error;
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::machine_profile::MachineProfile;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::StoreId;
use dynamicinfer::lab::synth::{Mixture, Shape, write_gguf};
use dynamicinfer::model::config::Activation;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvType, Model};
use dynamicinfer::open::{DeviceKind, DeviceOptions, EngineOptions, Opened, Quiet, open};
use dynamicinfer::pack::{PackOptions, Types, pack};
use dynamicinfer::predictor::mlp::{self, Measured, Network};
use dynamicinfer::predictor::{self, Calibration, Predictor};
use dynamicinfer::prng::Prng;
use dynamicinfer::scheduler::Policy;
use dynamicinfer::tokenizer::Special;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const QUANTS: [Quant; 4] = [Quant::F32, Quant::F16, Quant::Q4, Quant::Block(BlockType::Q4_K)];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A mixture of 6 experts of 96 neurons, 2 of them for a token, about 30 % active; packed as it is.
fn packed(dir: &Path, quant: Quant) -> PathBuf {
    let shape = Shape {
        hidden: 256,
        layers: 3,
        ffn: 96,
        heads: 4,
        kv_heads: 2,
        vocab: 300,
        context: 256,
        activation: Activation::Relu,
        active: Some(0.3),
        seed: 5,
        experts: Some(Mixture::flat(6, 2)),
        outliers: 0,
    };
    let name = quant.name();
    let (gguf, store) = (dir.join(format!("{name}.gguf")), dir.join(format!("{name}.neurons")));
    let of_file = if matches!(quant, Quant::Block(_)) { Quant::F32 } else { quant };
    write_gguf(&shape, of_file, &gguf, &|_, _| Ok(())).unwrap();
    let source = Source::open(&gguf, None).unwrap();
    let types = if of_file == quant { Types::natural(&source).unwrap() } else { Types::One(quant) };
    pack(&source, &store, &PackOptions { types, orders: None }, &|_, _| Ok(())).unwrap();
    store
}

/// Networks of random numbers that let about half of the neurons through.
fn networks(model: &Model, path: &Path) -> Arc<dyn Predictor> {
    const RANK: usize = 32;
    let (c, mut rng) = (&model.config, Prng::new(2));
    let mut network = |layer| Network {
        layer,
        ahead: 0,
        inner: numbers(&mut rng, RANK * c.hidden, 0.2),
        inner_bias: numbers(&mut rng, RANK, 0.1),
        outer: numbers(&mut rng, c.neurons() * RANK, 1.0),
        outer_bias: numbers(&mut rng, c.neurons(), 0.1),
        calibration: Calibration::new(vec![-1.0, 1.0], vec![0.0, 1.0]),
        measured: Measured::default(),
    };
    let networks: Vec<Network> = (0..c.layers().len()).map(&mut network).collect();
    mlp::write(path, predictor_header(model), &networks).unwrap();
    predictor::open(path, model).unwrap()
}

/// What the CPU alone has made of passes of some tokens.
struct OfCpu {
    logits: Vec<f32>,
    /// Pairs of neuron and token that were computed, and all.
    inside: (u64, u64),
}

#[test]
fn logits_are_the_cpus_for_every_budget_residency_and_interleaving() {
    let dir = tempfile::tempdir().unwrap();
    let stores = QUANTS.map(|quant| packed(dir.path(), quant));
    let networks = Mutex::new(
        [0, 1, 2, 3]
            .map(|i: usize| networks(&Model::open(&stores[i]).unwrap(), &dir.path().join(format!("{i}.predictor")))),
    );
    let (worst, moves) = (Mutex::new([0f32; QUANTS.len()]), Arc::new(Mutex::new(0u64)));
    let (computed, of_chunks) = (Mutex::new([0u64; 2]), Mutex::new([0u64; 2]));
    let expected = Mutex::new(HashMap::<(usize, bool, bool, Vec<usize>), OfCpu>::new());
    with_seeds("logits_are_the_cpus_for_every_budget_residency_and_interleaving", 300, |seed| {
        let mut prng = Prng::new(seed);
        let (which, predicted) = (prng.below(QUANTS.len() as u64) as usize, prng.below(2) == 1);
        let model = Model::open(&stores[which]).unwrap();
        let (layers, neurons) = (model.config.layers().len(), model.config.movable());
        assert_eq!(neurons, 6 * 96);
        let sizes = match prng.below(3) {
            // Chunks of a prompt, whose experts are copied or computed by the CPU.
            0 => vec![40, 1, 1, 3, 1, 70, 100, 1],
            1 => vec![1; 12],
            _ => vec![7, 1, 32, 1, 2, 1],
        };
        let slots: Vec<usize> = (0..layers).map(|_| slots(&mut prng, neurons)).collect();
        // Room for copied experts of a chunk: for none, for a piece of one in each half, or for a whole one.
        let block = model.layers[0].ffn.movable_bytes();
        let streamed = [0, 2 * 24 * block, 2 * 96 * block][prng.below(3) as usize];
        let budget = device_bytes(&model, &slots) + streamed;
        // A chunk waits for what is copied for it, so none of that may be lost.
        let device = often_faulty(&mut prng, budget, streamed == 0, seed);
        // SAFETY: the engine drops its device's part before its model: it has both.
        let mut split = unsafe { on_device(&model, Box::new(device), &slots) }.expect("the budget is what it takes");
        // All experts are copied, some, or none.
        let link_us = [0.0, 8.0, 1e9][prng.below(3) as usize];
        split.stream_inside(&model, expert_costs(link_us), streamed).expect("the budget is what it takes");
        assert_eq!(split.device.memory().used, budget);
        let own = Prng::new(seed ^ 0xab);
        let restless = Restless { prng: own, clusters: neurons as u64, most: 20, begun: moves.clone() };
        restless.unsettle(&mut split, &mut prng, &slots, |prng, _| prng.below(neurons as u64) as usize);
        let mut engine = Engine::new(model, 1 + prng.below(2) as usize, Kernels::best());
        if predicted {
            let predictor = networks.lock().unwrap()[which].clone();
            let choice = Choice::Predicted { predictor, threshold: 0.5, activation_threshold: 0.0 };
            engine.set_sparsity(Sparsity::new(vec![choice; layers], 0).unwrap());
        }
        // Keys and values in f32 stay on the host; in f16 they lie on the device.
        let kind = [KvType::F32, KvType::F16][prng.below(2) as usize];
        let mut all = expected.lock().unwrap();
        let of_cpu = all.entry((which, predicted, kind == KvType::F16, sizes.clone())).or_insert_with(|| {
            let logits = logits(&mut engine, kind, &sizes, None);
            OfCpu { logits, inside: engine.report.inside }
        });
        engine.report.clear();
        engine.split = Some(split);
        let found = logits(&mut engine, kind, &sizes, None);
        // Where inputs are rounded to int8, a last bit may decide between two experts, or whether a neuron fires: seldom.
        let rounds = !matches!(QUANTS[which], Quant::F32 | Quant::F16);
        let mut off = by_token(&found, &of_cpu.logits, engine.model.config.vocab);
        // Of a chunk the CPU rounds what `down` reads once more.
        let limit = if rounds { 3e-2 } else { 2e-3 };
        let others = off.iter().filter(|off| **off >= limit).count();
        let what = format!("{} {kind:?} predicted {predicted} {sizes:?} {slots:?}", QUANTS[which].name());
        assert!(others * 20 <= if rounds { off.len() } else { 0 }, "{what}: {off:?}");
        off.sort_by(f32::total_cmp);
        let off = off[off.len() - 1 - others];
        let worst = &mut worst.lock().unwrap()[which];
        *worst = worst.max(off);
        // Every neuron was computed once, by one of them.
        let (inside, of) = engine.report.inside;
        assert_eq!(of, of_cpu.inside.1, "{what}");
        let apart = inside.abs_diff(of_cpu.inside.0);
        assert!(apart as f64 <= if rounds { 0.02 } else { 1e-3 } * of as f64, "{what}: {inside} {:?}", of_cpu.inside);
        let split = engine.split.as_ref().unwrap();
        assert_eq!(split.device.memory().peak, budget, "it took more than its budget");
        let (total, chunks) = (split.cache.counters.computed, split.chunks);
        let in_chunks = sizes.iter().filter(|n| **n > 32).sum::<usize>() * 2 * layers;
        assert_eq!((chunks.resident, chunks.streamed + chunks.on_cpu), (0, in_chunks as u64));
        assert!(chunks.streamed == 0 || streamed > 0 && link_us < 1e9);
        assert!(chunks.on_cpu == 0 || streamed == 0 || link_us > 0.0, "{chunks:?}: a copy that costs nothing");
        let mut of_chunks = of_chunks.lock().unwrap();
        *of_chunks = [of_chunks[0] + chunks.streamed, of_chunks[1] + chunks.on_cpu];
        if !predicted {
            assert_eq!(total[Tier::Host] + total[Tier::Device], inside, "{what}");
        }
        let mut sums = computed.lock().unwrap();
        Tier::ALL.into_iter().for_each(|tier| sums[tier as usize] += total[tier]);
    });
    let (moves, worst, computed) = (*moves.lock().unwrap(), *worst.lock().unwrap(), *computed.lock().unwrap());
    let of_chunks = *of_chunks.lock().unwrap();
    eprintln!(
        "{moves} moves begun; worst {worst:?}; computed by CPU and device {computed:?}; experts of chunks copied, by the CPU {of_chunks:?}"
    );
    if std::env::var_os("HYBRID_SEED").is_none() {
        let tried = moves > 5000 && computed.iter().all(|&n| n > 100_000) && of_chunks.iter().all(|&n| n > 20_000);
        assert!(tried, "{moves} moves, {computed:?}, {of_chunks:?}: nothing was tried");
    }
}

/// Where up passes through the activation, too, a neuron is active where both are open, whoever computes it: otherwise it would count as more
/// frequent on one side than on the other.
#[test]
fn who_computes_a_neuron_does_not_change_whether_it_is_active() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("drelu.neurons");
    let source = Source::open(&root().join("tests/fixtures/models/turbosparse-mixtral"), None).unwrap();
    pack(&source, &store, &PackOptions { types: Types::One(Quant::F32), orders: None }, &|_, _| Ok(())).unwrap();
    let of = |share: usize| {
        let model = Model::open(&store).unwrap();
        let (layers, neurons) = (model.config.layers().len(), model.config.movable());
        let device = Box::new(VirtualDevice::new(u64::MAX, RATES));
        // SAFETY: the engine has both.
        let mut split = unsafe { on_device(&model, device, &vec![neurons * share / 2; layers]) }.unwrap();
        let some: Vec<StoreId> = (0..neurons * share / 2).map(StoreId::new).collect();
        (0..layers).for_each(|l| split.cache.load(&mut *split.device, l, &some).unwrap());
        split.cache.settle(&mut *split.device);
        let mut engine = Engine::new(model, 2, Kernels::best());
        engine.split = Some(split);
        logits(&mut engine, KvType::F32, &[1, 5, 1, 1, 20], None);
        engine.split.unwrap().cache.counters.computed
    };
    let [none, half, all] = [0, 1, 2].map(of);
    let sum = |of: PerTier<u64>| of[Tier::Host] + of[Tier::Device];
    assert!(none[Tier::Device] == 0 && all[Tier::Host] == 0 && half[Tier::Device] > 0, "{none:?} {half:?} {all:?}");
    assert!(sum(none) > 200, "{none:?}");
    let near = |a: u64, b: u64| a.abs_diff(b) * 500 <= a;
    assert!(near(sum(none), sum(half)) && near(sum(none), sum(all)), "{none:?} {half:?} {all:?}");
}

/// Counts the neurons that an audit has found to be left out.
struct Missed(Arc<Mutex<u64>>);

impl Migrator for Missed {
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

    fn observe(&mut self, at: &DividedLayer<'_>, _: &dyn Device, _: &mut NeuronCache) {
        let missed = at.missed.expect("every pass is audited");
        assert!(missed.is_sorted(), "{missed:?}");
        *self.0.lock().unwrap() += missed.len() as u64;
    }
}

/// An audit sees the same truth with a device, and that all that is active was computed where the gates choose.
#[test]
fn an_audit_finds_the_same_with_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path(), Quant::F32);
    let predictor = networks(&Model::open(&store).unwrap(), &dir.path().join("p.predictor"));
    let found = [false, true].map(|with_device| {
        let model = Model::open(&store).unwrap();
        let layers = model.config.layers().len();
        let device = Box::new(VirtualDevice::new(u64::MAX, RATES));
        // SAFETY: the engine has both.
        let mut split = unsafe { on_device(&model, device, &vec![200; layers]) }.unwrap();
        let some: Vec<StoreId> = (0..200).map(|i| StoreId::new(2 * i)).collect();
        (0..layers).for_each(|l| split.cache.load(&mut *split.device, l, &some).unwrap());
        split.cache.settle(&mut *split.device);
        let mut engine = Engine::new(model, 2, Kernels::best());
        let choice = Choice::Predicted { predictor: predictor.clone(), threshold: 0.5, activation_threshold: 0.0 };
        engine.set_sparsity(Sparsity::new(vec![choice; layers], 0).unwrap());
        if with_device {
            engine.split = Some(split);
        }
        engine.audit = Some(LiveAudit::new(1, Activation::Relu, vec![0.0; layers]));
        let missed = Arc::new(Mutex::new(0));
        if let Some(split) = &mut engine.split {
            split.migrator = Some(Box::new(Missed(missed.clone())));
        }
        let mut session = Session::new(&engine, 64, KvType::F32).unwrap();
        for token in 0..20u32 {
            session.append(&mut engine, &[5 + token], |_| Ok(())).unwrap();
        }
        let counts = engine.audit.unwrap().counts;
        // The scheduler is told which they are.
        let missed = *missed.lock().unwrap();
        assert_eq!(missed, if with_device { counts.active - counts.found } else { 0 });
        counts
    });
    assert_eq!(found[0], found[1]);
    assert!(found[0].found > 1000 && found[0].found < found[0].active, "{found:?}");
}

/// What copying is for: device and CPU share a chunk's experts, so that a prompt takes less than if the CPU had them all, and the same again.
#[test]
fn a_prompt_is_faster_where_experts_are_copied() {
    let dir = tempfile::tempdir().unwrap();
    drop(demo(dir.path(), 0.2, Policy::Static));
    let machine = MachineProfile::read(&root().join("profiles/machines/demo-pc.toml")).unwrap();
    let rates = Rates {
        device_gb_s: machine.device_gb_s,
        device_gflops: machine.device_gflops,
        link_gb_s: machine.link_gb_s,
        host_gb_s: machine.dram_gb_s,
        host_gflops: machine.host_gflops,
        call_us: machine.call_us,
        copy_us: machine.copy_us,
        sync_us: machine.sync_us,
    };
    let prompt = |neurons: usize| {
        let model = Model::open(&dir.path().join("demo-moe.neurons")).unwrap();
        let (c, block) = (model.config.clone(), model.layers[0].ffn.movable_bytes());
        let device = Box::new(VirtualDevice::new(u64::MAX, rates));
        // SAFETY: the engine has both.
        let mut split = unsafe { on_device(&model, device, &vec![0; c.layers().len()]) }.unwrap();
        let weights = c.ffn_kind.rows() * c.hidden * c.widest_ffn();
        let costs = ExpertCosts::of(&machine, c.hidden, block as usize * c.widest_ffn(), weights);
        split.stream_inside(&model, costs, 2 * neurons as u64 * block).unwrap();
        let mut engine = Engine::new(model, 1, Kernels::best());
        let before = split.device.totals().clock_ns;
        engine.split = Some(split);
        let found = logits(&mut engine, KvType::F16, &[256, 100], None);
        let split = engine.split.unwrap();
        ((split.device.totals().clock_ns - before) as f64 / 1e6, found, split.chunks)
    };
    let (alone, expected, none) = prompt(0);
    assert_eq!(none.streamed, 0);
    for neurons in [128, 44] {
        let (copying, found, chunks) = prompt(neurons);
        let (again, bits, _) = prompt(neurons);
        eprintln!("{neurons} neurons at once: {alone:.2} ms, with copies {copying:.2} ms: {chunks:?}");
        assert!(chunks.streamed > 0 && copying < 0.8 * alone, "{alone} and {copying} ms, {chunks:?}");
        assert!(copying == again && bytemuck::cast_slice::<f32, u8>(&found) == bytemuck::cast_slice::<f32, u8>(&bits));
        let off = by_token(&found, &expected, found.len() / 356);
        assert!(off.iter().all(|&off| off < 3e-2), "{off:?}");
    }
}

/// The demo mixture, packed by neuron, on a virtual device with this share of the neurons.
fn demo(dir: &Path, share: f64, policy: Policy) -> Opened {
    let store = dir.join("demo-moe.neurons");
    if !store.exists() {
        let source = Source::open(&root().join("assets/demo-moe"), None).unwrap();
        let options = PackOptions { types: Types::natural(&source).unwrap(), orders: None };
        pack(&source, &store, &options, &|_, _| Ok(())).unwrap();
    }
    let mut options = EngineOptions::new(store);
    options.threads = Some(2);
    options.context = Some(512);
    options.device = Some(DeviceOptions {
        ffn_share: Some(share),
        machine: Some(root().join("profiles/machines/demo-pc.toml")),
        history: false,
        policy,
        ..DeviceOptions::new(DeviceKind::Virtual)
    });
    open(&options, &Quiet).unwrap()
}

/// What the slots are for. Where a text is as the model's profile says, moving loses next to nothing, and where it is not, the neurons come
/// that it uses. Of the active ones a fixed placement has far more on the device than of neurons: a few make most activations.
#[test]
fn a_scheduler_brings_the_neurons_that_a_text_uses() {
    let dir = tempfile::tempdir().unwrap();
    let of = |policy: Policy, story: bool| {
        let opened = demo(dir.path(), 0.2, policy);
        let text = match story {
            true => std::fs::read_to_string(root().join("assets/demo/heldout.txt")).unwrap(),
            false => (0..200).map(|i| format!("{i} + {} = {}; ", 2 * i + 1, 3 * i + 1)).collect(),
        };
        let text = opened.tokenizer().unwrap().encode_prompt(&text, Special::AsText).unwrap()[..400].to_vec();
        let mut session = opened.session().unwrap();
        let Opened { mut engine, device, .. } = opened;
        for token in &text {
            session.append(&mut engine, std::slice::from_ref(token), |_| Ok(())).unwrap();
        }
        let counters = engine.split.as_ref().unwrap().cache.counters;
        assert_eq!(counters.migrations > 0, policy != Policy::Static, "{policy:?}: {counters:?}");
        device.unwrap().finish(&mut engine);
        let [host, device] = [Tier::Host, Tier::Device].map(|tier| counters.computed[tier] as f64);
        100.0 * device / (host + device)
    };
    let [[fixed_story, fixed_sums], [full_story, full_sums], [_, random_sums]] =
        [Policy::Static, Policy::Full, Policy::Random].map(|policy| [of(policy, true), of(policy, false)]);
    eprintln!(
        "of the active neurons on the device: story {fixed_story:.1} and {full_story:.1} %, sums {fixed_sums:.1}, {full_sums:.1} and {random_sums:.1} %"
    );
    assert!(fixed_story > 45.0 && full_story > fixed_story - 1.0, "{fixed_story} and {full_story} %");
    assert!(full_sums > fixed_sums + 3.0 && full_sums > random_sums, "{fixed_sums}, {full_sums}, {random_sums} %");
}

/// How often each neuron inside experts fires in the tokens that it sees, `[layers][neurons]`.
struct Fires(Vec<Vec<f32>>);

impl Observer for Fires {
    fn layer(&mut self, _: &Seen<'_>) {}

    fn looks_inside(&self) -> bool {
        true
    }

    fn inside(&mut self, seen: &SeenExperts<'_>) {
        for (group, _, products) in seen.each() {
            let gates = &products[..products.len() / 2];
            let counts = &mut self.0[seen.layer][group.expert * gates.len()..];
            counts.iter_mut().zip(gates).for_each(|(count, gate)| *count += f32::from(u8::from(*gate > 0.0)));
        }
    }
}

/// Of a prompt's chunks the scheduler is told which neurons fired, in experts that are copied and in the CPU's: what it has learnt from it is what
/// the last chunk did, of which 0.96^144 forgets all before.
#[test]
fn a_prompt_teaches_the_scheduler_which_neurons_its_text_uses() {
    let dir = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..400).map(|i| 5 + i * i % 900).collect();
    let learnt = |prompt: &[u32]| {
        let Opened { mut engine, .. } = demo(dir.path(), 0.2, Policy::Full);
        let mut session = Session::new(&engine, 512, KvType::F16).unwrap();
        if !prompt.is_empty() {
            session.append(&mut engine, prompt, |_| Ok(())).unwrap();
            let chunks = engine.split.as_ref().unwrap().chunks;
            assert!(chunks.streamed > 0 && chunks.on_cpu > 0, "{chunks:?}");
        }
        engine.split.as_mut().unwrap().migrator.take().unwrap().finish().unwrap()
    };
    let (before, after) = (learnt(&[]), learnt(&prompt));
    let mut alone = Engine::new(Model::open(&dir.path().join("demo-moe.neurons")).unwrap(), 2, Kernels::best());
    let c = alone.model.config.clone();
    let mut session = Session::new(&alone, 512, KvType::F16).unwrap();
    session.append(&mut alone, &prompt[..256], |_| Ok(())).unwrap();
    let mut fires = Fires(vec![vec![0.0; c.neurons()]; c.layers().len()]);
    alone.forward_observed(&mut session.kv, &prompt[256..], Logits::None, &mut fires);
    // A share of the way from what was known to what the text has shown goes into the history.
    let all = |of: &[Vec<f32>]| of.concat();
    let (before, after, shown) = (all(&before), all(&after), all(&fires.0));
    let ways = before.iter().zip(&after).zip(&shown).map(|((b, a), n)| (n / 144.0 - b, a - b));
    let share =
        ways.clone().map(|(whole, way)| whole * way).sum::<f32>() / ways.clone().map(|(w, _)| w * w).sum::<f32>();
    assert!((0.01..0.5).contains(&share), "{share}");
    let off = ways.map(|(whole, way)| (way - share * whole).abs()).fold(0.0, f32::max);
    assert!(off < 0.02 * share, "{off} with a share of {share}");
}

#[test]
fn the_budget_changes_while_it_decodes_and_the_text_stays() {
    let dir = tempfile::tempdir().unwrap();
    let Opened { mut engine, device, .. } = demo(dir.path(), 0.5, Policy::Full);
    let mut alone = Engine::new(Model::open(&dir.path().join("demo-moe.neurons")).unwrap(), 1, Kernels::best());
    let prompt: Vec<u32> = (0..60).map(|i| 5 + i * 97 % 3000).collect();
    let continued = |engine: &mut Engine, between: &mut dyn FnMut(&mut Engine, usize)| {
        let mut session = Session::new(engine, 512, KvType::F16).unwrap();
        let (mut next, mut out) = (prompt.clone(), Vec::new());
        for i in 0..80 {
            next = vec![argmax(session.append(engine, &next, |_| Ok(())).unwrap()).unwrap()];
            out.push(next[0]);
            between(engine, i);
        }
        out
    };
    let expected = continued(&mut alone, &mut |_, _| ());
    let device = device.unwrap();
    let most = engine.split.as_ref().unwrap().device.memory().budget;
    assert!(matches!(device.budget.set(&mut engine, 1), Err(Error::Memory(_))));
    let mut residents = Vec::new();
    let found = continued(&mut engine, &mut |engine, i| {
        if i % 20 == 10 {
            let vram = if i % 40 == 10 { most - (1 << 20) } else { most };
            device.budget.set(engine, vram).unwrap();
            let memory = engine.split.as_ref().unwrap().device.memory();
            assert!(memory.budget <= vram && memory.used <= memory.budget, "{memory:?}");
            residents.push(engine.split.as_ref().unwrap().cache.slots().iter().sum::<usize>());
        }
    });
    assert_eq!(found, expected);
    assert!(residents[0] < residents[1] && residents[2] < residents[3], "{residents:?}");
    device.finish(&mut engine);
}
