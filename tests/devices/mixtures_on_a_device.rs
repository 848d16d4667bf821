//! THE LAW of two memories for experts: whatever lies where, whatever moves when and whatever goes wrong on the way, a mixture's logits
//! are those of the CPU alone. And what can be asked of a mixture with a device: policies, a live budget, the same text again.

use crate::gguf_file::{File, fixture};
use crate::support::law::{Restless, logits, slots, with_seeds};
use crate::support::{by_token, device_bytes, expert_costs, often_faulty, on_device, streaming_experts_bytes};
use dynamicinfer::cache::Tier;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::{Rates, VirtualDevice};
use dynamicinfer::engine::sampler::argmax;
use dynamicinfer::engine::{ChunkCounts, Engine, ExpertCosts, Session};
use dynamicinfer::error::Error;
use dynamicinfer::formats::machine_profile::MachineProfile;
use dynamicinfer::ids::StoreId;
use dynamicinfer::model::layer::FeedForward;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::weights::Layer;
use dynamicinfer::model::{ExpertWeights, FfnWeights, KvType, Model};
use dynamicinfer::open::{DeviceKind, DeviceOptions, EngineOptions, Opened, Quiet, open};
use dynamicinfer::placement::memory_plan::{Footprint, KvPlace};
use dynamicinfer::prng::Prng;
use dynamicinfer::scheduler::Policy;
use dynamicinfer::tokenizer::Special;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex};
use tempfile::TempDir;

/// Of every family, as published and as GGUF; normed queries, routers that read another input, shared experts, layers without rotation, and
/// rows in GGUF's blocks, biases, sinks, experts without gates and layers without experts among them.
const MODELS: [&str; 23] = [
    "mixtral",
    "mixtral.gguf",
    "qwen3-moe",
    "qwen3-moe.gguf",
    "smallthinker",
    "smallthinker.gguf",
    "turbosparse-mixtral",
    "qwen2-moe",
    "qwen2-moe.gguf",
    "glm4-moe.gguf",
    "deepseek-v2.gguf",
    "deepseek-v3",
    "glm4-moe-lite.gguf",
    "qwen35-moe",
    "qwen35-moe.gguf",
    "qwen3-next.gguf",
    "nemotron-h-moe",
    "nemotron-h-moe.gguf",
    "lfm2-moe",
    "gemma4-moe",
    "gemma4-moe.gguf",
    "k256-moe.q4_k_m.gguf",
    GPT_OSS,
];

/// Its fixture with all matrices in f32: choices of experts that hang on rounded inputs are no matter of this law.
const GPT_OSS: &str = "gpt-oss.f32.gguf";

fn path_of(model: &str) -> PathBuf {
    static WRITTEN: LazyLock<TempDir> = LazyLock::new(|| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(GPT_OSS), File::read("gpt-oss.mxfp4.gguf").in_f32().bytes()).unwrap();
        dir
    });
    if model == GPT_OSS { WRITTEN.path().join(model) } else { fixture(model) }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The model at a path, for the CPU alone.
fn at(path: &Path) -> Model {
    Model::in_place(Source::open(path, None).unwrap()).unwrap()
}

fn experts(layer: &mut Layer) -> &mut ExpertWeights {
    let FfnWeights::Experts(experts) = &mut layer.ffn else { panic!("a mixture") };
    experts
}

#[test]
fn logits_are_the_cpus_for_every_budget_residency_and_interleaving() {
    let (worst, moves) = (Mutex::new([0f32; MODELS.len()]), Arc::new(Mutex::new(0u64)));
    let (computed, of_chunks) = (Mutex::new([0u64; 2]), Mutex::new([0u64; 3]));
    type Expected = HashMap<(usize, bool, Vec<usize>), Vec<f32>>;
    let expected = Mutex::new(Expected::new());
    with_seeds("logits_are_the_cpus_for_every_budget_residency_and_interleaving", 400, |seed| {
        let mut prng = Prng::new(seed);
        let which = prng.below(MODELS.len() as u64) as usize;
        let model = at(&path_of(MODELS[which]));
        let (layers, clusters) = (model.config.layers().len(), model.config.clusters());
        let sizes = match prng.below(4) {
            // Chunks of a prompt: more than the row kernels take.
            0 => vec![40, 1, 1, 3, 1, 1, 1, 1],
            3 => vec![130, 1, 70, 1],
            1 => vec![1; 16],
            _ => vec![7, 1, 32, 1, 1, 2, 1, 1],
        };
        let slots: Vec<usize> = (0..layers).map(|l| slots(&mut prng, model.config.movable_of(l))).collect();
        // Room for copied experts of a chunk; without room for one in each half there is none.
        let streamed = streaming_experts_bytes(&model, prng.below(clusters as u64 + 1) as usize);
        let budget = device_bytes(&model, &slots) + streamed;
        // A chunk waits for what is copied for it, so none of that may be lost.
        let device = often_faulty(&mut prng, budget, streamed == 0, seed);
        // SAFETY: the engine drops its device's part before its model: it has both.
        let mut split = unsafe { on_device(&model, Box::new(device), &slots) }.expect("the budget is what it takes");
        // All of the missing experts are copied, some, or none.
        let link_us = [0.0, 8.0, 1e9][prng.below(3) as usize];
        split.stream_experts(&model, expert_costs(link_us), streamed).expect("the budget is what it takes");
        assert_eq!((split.device.memory().used, split.streamed_bytes()), (budget, streamed));
        let own = Prng::new(seed ^ 0xab);
        let restless = Restless { prng: own, clusters: clusters as u64, most: 7, begun: moves.clone() };
        restless.unsettle(&mut split, &mut prng, &slots, |_, layer| layer);
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
        // Where inputs are rounded to int8, the last bit of a sum may decide between two experts that are as good as each other: such a
        // token gets another one, and is seldom.
        let rounds = MODELS[which].contains("k256");
        let mut off = by_token(&found, &of_cpu, engine.model.config.vocab);
        let limit = if rounds { 2e-2 } else { 2e-3 };
        let others = off.iter().filter(|off| **off >= limit).count();
        assert!(
            others * 20 <= if rounds { off.len() } else { 0 },
            "{} {kind:?} {sizes:?} {slots:?}: {off:?}",
            MODELS[which]
        );
        off.sort_by(f32::total_cmp);
        let off = off[off.len() - 1 - others];
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
        let (used, all) = (engine.model.config.mixtures().next().unwrap().used, sizes.iter().sum::<usize>());
        let (total, chunks) = (split.cache.counters.computed, split.chunks);
        let layers = engine.model.config.movable_layers();
        assert_eq!(total[Tier::Host] + total[Tier::Device], (few * used * layers) as u64);
        assert_eq!(chunks.resident + chunks.streamed + chunks.on_cpu, ((all - few) * used * layers) as u64);
        assert!(chunks.streamed == 0 || streamed > 0 && link_us < 1e9);
        assert!(
            chunks.on_cpu == 0 || streamed == 0 || link_us > 0.0,
            "{chunks:?}: a copy that costs nothing was not made"
        );
        for (sum, pairs) in of_chunks.lock().unwrap().iter_mut().zip([chunks.resident, chunks.streamed, chunks.on_cpu])
        {
            *sum += pairs;
        }
    });
    let (moves, worst, computed) = (*moves.lock().unwrap(), *worst.lock().unwrap(), *computed.lock().unwrap());
    let of_chunks = *of_chunks.lock().unwrap();
    eprintln!(
        "{moves} moves begun; worst {worst:?}; computed by CPU and device {computed:?}; of chunks in slots, copied, by the CPU {of_chunks:?}"
    );
    if std::env::var_os("HYBRID_SEED").is_none() {
        let tried = moves > 1500 && computed.iter().chain(&of_chunks).all(|&n| n > 8000);
        assert!(tried, "{moves} moves, {computed:?}, {of_chunks:?}: nothing was tried");
    }
}

/// A shared expert lies beside attention, whatever else does: the plan has as many bytes for it as the device then takes.
#[test]
fn the_plan_of_a_shared_expert_is_what_the_device_takes() {
    for name in ["qwen2-moe", "qwen2-moe.gguf"] {
        let [with, without] = [true, false].map(|shared| {
            let mut model = at(&root().join("tests/fixtures/models").join(name));
            if !shared {
                model.config.change_layers(|_, layer| {
                    if let FeedForward::Experts { experts, .. } = &mut layer.ffn {
                        experts.shared = None;
                    }
                });
                model.layers.iter_mut().for_each(|layer| experts(layer).shared = None);
            }
            let (slots, footprint) =
                (vec![2; model.config.layers().len()], Footprint::of_model(&model, 128, KvType::F16));
            (device_bytes(&model, &slots), footprint.least_bytes(), footprint.attention_bytes)
        });
        // Two layers of gate, up and down, 96 neurons of 64 numbers, in 16 bits.
        assert_eq!(with.2 - without.2, 2 * 3 * 96 * 64 * 2, "{name}");
        assert_eq!(with.0 - without.0, with.1 - without.1, "{name}");
    }
}

/// Time of prompts of these lengths by the device's clock, ms, of demo-moe with so many slots a layer and room for two halves of `half`
/// copied experts, on the machine demo-pc; their logits; and by whom their experts were computed.
fn prompts(slots: usize, half: usize, sizes: &[usize]) -> (f64, Vec<f32>, ChunkCounts) {
    let model = at(&root().join("assets/demo-moe"));
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
    let (c, bytes) = (&model.config, streaming_experts_bytes(&model, half));
    let expert_bytes = model.layers[0].ffn.cluster_bytes() as usize;
    let costs = ExpertCosts::of(&machine, c.hidden, expert_bytes, c.ffn_kind.rows() * c.hidden * c.widest_ffn());
    let device = Box::new(VirtualDevice::new(u64::MAX, rates));
    // SAFETY: the engine has both.
    let mut split = unsafe { on_device(&model, device, &vec![slots; c.layers().len()]) }.unwrap();
    let experts: Vec<StoreId> = (0..slots).map(StoreId::new).collect();
    (0..c.layers().len()).for_each(|l| split.cache.load(&mut *split.device, l, &experts).unwrap());
    split.cache.settle(&mut *split.device);
    split.stream_experts(&model, costs, bytes).unwrap();
    let mut engine = Engine::new(model, 1, Kernels::best());
    let before = split.device.totals().clock_ns;
    engine.split = Some(split);
    let found = logits(&mut engine, KvType::F16, sizes, None);
    let split = engine.split.unwrap();
    ((split.device.totals().clock_ns - before) as f64 / 1e6, found, split.chunks)
}

/// What copying is for: device and CPU share the missing experts, so that a prompt takes less than if either had them all.
#[test]
fn a_prompt_is_faster_where_missing_experts_are_copied_and_the_same_again() {
    for slots in [0, 2, 4, 6] {
        let (alone, expected, nothing) = prompts(slots, 0, &[256, 100]);
        let (copying, found, chunks) = prompts(slots, 4, &[256, 100]);
        let (again, bits, _) = prompts(slots, 4, &[256, 100]);
        let gain = alone / copying;
        eprintln!(
            "{slots} of 8 experts in slots: {alone:.2} ms, with copies {copying:.2} ms, {gain:.2} times as fast: {chunks:?}"
        );
        assert_eq!((nothing.streamed, chunks.resident), (0, nothing.resident));
        assert!(chunks.streamed > 0 && gain > 1.1, "{slots} slots: {alone} and {copying} ms, {chunks:?}");
        // The same to the bit, at the same moments.
        assert!(copying == again && bytemuck::cast_slice::<f32, u8>(&found) == bytemuck::cast_slice::<f32, u8>(&bits));
        let off = by_token(&found, &expected, found.len() / 356);
        assert!(off.iter().all(|&off| off < 2e-3), "{off:?}");
    }
}

/// demo-moe on the virtual device with a share of its experts there, by the profile of the demo's stories.
fn demo(share: f64, policy: Policy) -> Opened {
    let mut options = EngineOptions { context: Some(512), ..EngineOptions::new(root().join("assets/demo-moe")) };
    options.device = Some(DeviceOptions {
        ffn_share: Some(share),
        machine: Some(root().join("profiles/machines/demo-pc.toml")),
        history: false,
        policy,
        ..DeviceOptions::new(DeviceKind::Virtual)
    });
    open(&options, &Quiet).unwrap()
}

/// The demo's held-out story, and sums, which nobody has made a profile of.
fn texts(opened: &Opened) -> [Vec<u32>; 2] {
    let story = std::fs::read_to_string(root().join("assets/demo/heldout.txt")).unwrap();
    let sums: String = (0..200).map(|i| format!("{i} + {} = {}; ", 2 * i + 1, 3 * i + 1)).collect();
    let tokenizer = opened.tokenizer().unwrap();
    [&story, &sums].map(|text| tokenizer.encode_prompt(text, Special::AsText).unwrap()[..400].to_vec())
}

/// The device's share of the experts that were computed, in percent, and how many were moved.
fn share(engine: &Engine) -> (f64, u64) {
    let counters = engine.split.as_ref().unwrap().cache.counters;
    let [host, device] = [Tier::Host, Tier::Device].map(|tier| counters.computed[tier] as f64);
    (100.0 * device / (host + device), counters.migrations)
}

/// The scheduler is fed as it has to be: where the text is as its profile says, moving loses next to nothing, and where it is not, the
/// experts that it uses come.
#[test]
fn a_scheduler_brings_the_experts_that_a_text_uses() {
    let of = |policy: Policy, which: usize| {
        let opened = demo(0.4, policy);
        let text = &texts(&opened)[which];
        let mut session = opened.session().unwrap();
        let Opened { mut engine, device, .. } = opened;
        for token in text {
            session.append(&mut engine, std::slice::from_ref(token), |_| Ok(())).unwrap();
        }
        let (share, moved) = share(&engine);
        assert_eq!(moved > 0, policy != Policy::Static, "{policy:?}: {moved} moves");
        device.unwrap().finish(&mut engine);
        share
    };
    let [[static_story, static_sums], [full_story, full_sums], [_, random_sums]] =
        [Policy::Static, Policy::Full, Policy::Random].map(|policy| [of(policy, 0), of(policy, 1)]);
    eprintln!(
        "story {static_story:.1} and {full_story:.1} %, sums {static_sums:.1}, {full_sums:.1} and {random_sums:.1} %"
    );
    assert!(full_story > static_story - 1.0, "{full_story} and {static_story} %");
    assert!(full_sums > static_sums + 3.0 && full_sums > random_sums, "{full_sums}, {static_sums}, {random_sums} %");
}

#[test]
fn the_budget_changes_while_a_mixture_is_decoded_and_the_text_stays() {
    let opened = demo(0.6, Policy::Full);
    let text = &texts(&opened)[0];
    let mut alone = Engine::new(at(&root().join("assets/demo-moe")), 1, Kernels::best());
    let prompt = &text[..20];
    let continued = |engine: &mut Engine, between: &mut dyn FnMut(&mut Engine, usize)| {
        let mut session = Session::new(engine, 512, KvType::F16).unwrap();
        let mut next = prompt.to_vec();
        let mut out = Vec::new();
        for i in 0..80 {
            let logits = session.append(engine, &next, |_| Ok(())).unwrap();
            next = vec![argmax(logits).unwrap()];
            out.push(next[0]);
            between(engine, i);
        }
        out
    };
    let expected = continued(&mut alone, &mut |_, _| ());
    let Opened { mut engine, device, .. } = opened;
    let device = device.unwrap();
    let most = engine.split.as_ref().unwrap().device.memory().budget;
    let least = match device.budget.set(&mut engine, 1).unwrap_err() {
        Error::Memory(why) => why,
        other => panic!("{other}"),
    };
    assert!(least.contains("vram"), "{least}");
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
    assert!(
        residents[0] < residents[1] && residents[2] < residents[3],
        "slots of smaller and larger budgets: {residents:?}"
    );
    device.finish(&mut engine);
}

/// A plan's room for copied experts comes and goes with the budget, within it, while prompts are computed.
#[test]
fn a_budget_holds_with_copied_experts_and_they_come_and_go_with_it() {
    let opened = demo(0.6, Policy::Static);
    // Of all kinds, so that every expert is needed.
    let text: Vec<u32> = (0..200).map(|i| 5 + i * 97 % 3000).collect();
    let mut alone = Engine::new(at(&root().join("assets/demo-moe")), 1, Kernels::best());
    let prompt = |engine: &mut Engine| {
        let mut session = Session::new(engine, 512, KvType::F16).unwrap();
        session.append(engine, &text, |_| Ok(())).unwrap().to_vec()
    };
    let expected = prompt(&mut alone);
    let Opened { mut engine, device, .. } = opened;
    let mut device = device.unwrap();
    // Keys and values displace experts where that pays, which is another matter.
    device.budget.request.kv = KvPlace::Host;
    let least = device.budget.plan(1 << 30).unwrap().without_neurons_bytes;
    let expert = device.budget.footprint.block_bytes;
    // Of 40 experts all, as many as leave room for one in each half, and too few for that.
    for (experts, streamed) in [(40, 0), (39, 2), (33, 2), (31, 1), (39, 2), (10, 0), (35, 2), (40, 0)] {
        let vram = least + experts * expert;
        let plan = device.budget.set(&mut engine, vram).unwrap();
        assert_eq!(plan.streamed_bytes, streamed * expert, "{experts}");
        let before = engine.split.as_ref().unwrap().chunks;
        let found = prompt(&mut engine);
        let off = by_token(&found, &expected, found.len());
        assert!(off.iter().all(|&off| off < 2e-3), "{experts}: {off:?}");
        let split = engine.split.as_ref().unwrap();
        assert_eq!(split.streamed_bytes(), streamed / 2 * 2 * expert);
        assert_eq!(split.chunks.streamed > before.streamed, streamed > 1, "{experts}: {:?}", split.chunks);
        let memory = split.device.memory();
        assert!(memory.budget <= vram && memory.peak <= memory.budget, "{memory:?}");
    }
    device.finish(&mut engine);
}
