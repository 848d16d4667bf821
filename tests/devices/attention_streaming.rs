//! Attention's matrices that have no room on a device are copied for every pass: no result depends on it, nothing is copied twice or for
//! nothing, and a prompt of a model of which no layer lies there is bound by the link or by arithmetic, whichever takes longer.

use crate::support;
use crate::support::{RATES, opened, packed, rates, request, slower, streaming, synth, tokens};
use dynamicinfer::cache::Tier;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::{Rates, VirtualDevice};
use dynamicinfer::engine::split::parts::PartsSetting;
use dynamicinfer::engine::{ChunkCosts, Engine, Logits, Session, Split};
use dynamicinfer::error::Error;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::StoreId;
use dynamicinfer::lab::synth::{Mixture, Shape, write_gguf, write_store};
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvType, Model};
use dynamicinfer::open::{DeviceKind, DeviceOptions, EngineOptions, Opened, Quiet, open};
use dynamicinfer::placement::memory_plan::{Footprint, KvPlace, PartName, Plan, Request, plan};
use dynamicinfer::placement::problem::power_law;
use dynamicinfer::placement::shapes::shape as published;
use dynamicinfer::scheduler::Policy;
use std::path::{Path, PathBuf};

const CONTEXT: usize = 700;
/// A link over which a layer of these small models comes later than it is wanted.
const SLOW: Rates = Rates { link_gb_s: 0.2, ..RATES };

fn made(dir: &Path, layers: usize, widths: [usize; 2]) -> PathBuf {
    let path = dir.join(format!("{layers}-{}.neurons", widths[0]));
    write_store(&synth(layers, widths, CONTEXT, 3), Quant::F16, &path, &|_, _| Ok(())).unwrap();
    path
}

/// An engine with a device that has every third neuron or expert, and copies attention's matrices of `streamed` layers.
fn engine(model: Model, rates: Rates, streamed: usize, kept: usize) -> Engine {
    let (c, device) = (&model.config, Box::new(VirtualDevice::new(u64::MAX, rates)));
    let slots = vec![c.movable(); c.layers().len()];
    // SAFETY: the engine has both.
    let mut split = unsafe { Split::new(device, &slots, &model, (CONTEXT, kept), (CONTEXT, streamed), true) }.unwrap();
    let there: Vec<StoreId> = (0..c.movable()).filter(|i| i % 3 == 2).map(StoreId::new).collect();
    (0..c.layers().len()).for_each(|l| split.cache.load(&mut *split.device, l, &there).unwrap());
    split.cache.settle(&mut *split.device);
    if model.has_neurons() {
        // All that is missing: who computes a neuron must not depend on what else the link brings.
        streaming(&mut split, &model, 8, 0.0);
    }
    assert_eq!(split.streamed_layers(), streamed);
    let mut engine = Engine::new(model, 1, Kernels::best());
    engine.split = Some(split);
    engine.set_chunk(CONTEXT);
    engine
}

/// The bits of the logits after a prompt and after each of some more tokens.
fn bits(engine: &mut Engine, n: usize) -> Vec<u32> {
    let mut session = Session::new(engine, n + 3, KvType::F16).unwrap();
    let mut logits = session.append(engine, &tokens(n), |_| Ok(())).unwrap().to_vec();
    (0..3).for_each(|i| logits.extend_from_slice(engine.forward(&mut session.kv, &[7 + i], Logits::Last)));
    engine.check().unwrap();
    logits.into_iter().map(f32::to_bits).collect()
}

/// Families differ: matrices of several types, rows in another order, norms beside each other, biases, experts, neurons inside experts.
#[test]
fn attention_that_is_copied_gives_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path(), 7, [64, 96]);
    // In a file as llama.cpp has it the rows of queries and keys are in another order.
    let mixture = dir.path().join("mixture.gguf");
    write_gguf(
        &Shape { experts: Some(Mixture::flat(6, 2)), ..synth(5, [64, 96], CONTEXT, 3) },
        Quant::F16,
        &mixture,
        &|_, _| Ok(()),
    )
    .unwrap();
    let in_place = |name: &str| {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name);
        Model::in_place(Source::open(&from, None).unwrap()).unwrap()
    };
    let names = [
        "synth",
        "synth mixture",
        "falcon",
        "relufalcon",
        "falcon-40b",
        "opt",
        "qwen2",
        "qwen3",
        "mixtral.gguf",
        "k256-moe.q4_k_m.gguf",
        "qwen2-moe",
        "gpt-oss.mxfp4.gguf",
        "gemma3",
        "gemma4",
        "gemma4-moe.gguf",
        "deepseek-v3.gguf",
        "glm4-moe.gguf",
        "qwen35",
        "qwen35-moe.gguf",
        "lfm2",
        "lfm2-moe.gguf",
        "smallthinker by neuron",
    ];
    for name in names {
        let model = || match name {
            "synth" => Model::open(&path).unwrap(),
            "synth mixture" => Model::in_place(Source::open(&mixture, None).unwrap()).unwrap(),
            name if name.ends_with(".gguf") => in_place(name),
            name => match name.strip_suffix(" by neuron") {
                Some(name) => Model::open(&packed(dir.path(), name, Quant::F16)).unwrap(),
                None => opened(dir.path(), name, Quant::F16),
            },
        };
        let layers = model().config.layers().len();
        for kept in [1, 0] {
            let mut there = engine(model(), RATES, 0, kept);
            let lengths = [1, 20, 40, if name == "synth" { 300 } else { 100 }];
            let expected = lengths.map(|n| bits(&mut there, n));
            for streamed in [1, 2, 3, 6, 7].into_iter().filter(|&streamed| streamed <= layers) {
                let mut copied = engine(model(), SLOW, streamed, kept);
                // The second time what the first has left behind is used.
                for (n, expected) in lengths.into_iter().chain(lengths).zip(expected.iter().cycle()) {
                    let what = format!("{name}, {streamed} of {layers}, keys on the device: {kept}, {n} tokens");
                    assert!(bits(&mut copied, n) == *expected, "{what}");
                }
            }
        }
    }
}

/// Parts may be a layer apart from each other.
#[test]
fn a_prompt_in_parts_reads_each_layer_while_it_is_there_and_may_stop_anywhere() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path(), 7, [64, 96]);
    for (kept, streamed, parts, shared) in
        [(1, 7, 2, true), (1, 7, 4, false), (0, 7, 3, true), (0, 6, 4, false), (1, 3, 4, true), (0, 5, 2, false)]
    {
        let setting = PartsSetting { parts: Some(parts), shared: Some(shared), order: None };
        let engine = |streamed| {
            let mut engine = engine(Model::open(&path).unwrap(), SLOW, streamed, kept);
            engine.split.as_mut().unwrap().set_parts(setting);
            engine
        };
        let expected = bits(&mut engine(0), 650);
        let mut copied = engine(streamed);
        assert!(bits(&mut copied, 650) == expected, "{streamed} copied, {parts} parts, {shared}");
        for asked in 0..7 * parts {
            let mut session = Session::new(&copied, CONTEXT, KvType::F16).unwrap();
            let mut left = asked as i32;
            let ended = copied.forward_while(&mut session.kv, &tokens(650), Logits::Last, &mut || {
                left -= 1;
                left >= 0
            });
            assert!(!ended, "{asked}");
            if asked % 5 == 0 {
                assert!(bits(&mut copied, 650) == expected, "{streamed} copied, {parts} parts, stopped at {asked}");
            }
        }
    }
}

/// Bytes to the device, and its time in ms, of a prompt of `n` tokens and of one more.
fn cost(engine: &mut Engine, n: usize) -> [(u64, f64); 2] {
    let mut session = Session::new(engine, CONTEXT, KvType::F16).unwrap();
    let totals = |engine: &Engine| engine.split.as_ref().unwrap().device.totals();
    let mut before = totals(engine);
    let mut lap = |engine: &Engine| {
        let now = totals(engine);
        let cost = (now.link_bytes[0] - before.link_bytes[0], (now.clock_ns - before.clock_ns) as f64 / 1e6);
        before = now;
        cost
    };
    session.append(engine, &tokens(n), |_| Ok(())).unwrap();
    let prompt = lap(engine);
    engine.forward(&mut session.kv, &[7], Logits::Last);
    [prompt, lap(engine)]
}

#[test]
fn each_layer_is_copied_once_for_each_pass_and_not_where_it_still_lies_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path(), 7, [64, 96]);
    let open = || Model::open(&path).unwrap();
    let c = open().config.clone();
    let each = ((c.mixer(0).rows() + c.mixer(0).cols()) * Quant::F16.row_bytes(c.hidden)) as u64;
    for parts in [1, 4] {
        let costs = |streamed| {
            let mut engine = engine(open(), RATES, streamed, 1);
            let setting = PartsSetting { parts: Some(parts), shared: Some(true), order: None };
            engine.split.as_mut().unwrap().set_parts(setting);
            cost(&mut engine, 600);
            cost(&mut engine, 600).map(|cost| cost.0)
        };
        let there = costs(0);
        for streamed in [1, 2, 3, 4, 7] {
            let copied = costs(streamed);
            let expected = if streamed > 2 { streamed as u64 * each } else { 0 };
            for (copied, there) in copied.into_iter().zip(there) {
                assert_eq!(copied - there, expected, "{streamed} copied, {parts} parts");
            }
        }
    }
}

/// What it is for: of a model of which nothing but keys and values lies on the device, a prompt takes as long as the link or the arithmetic, and no
/// longer than the processor alone; a token waits for nothing while the processor reads its neurons.
#[test]
fn a_prompt_is_bound_by_the_link_or_by_arithmetic_and_a_token_by_the_processor() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path(), 6, [512, 1792]);
    for name in ["rtx-3060-12gb", "rtx-4090", "powerinfer-pc-low"] {
        let model = Model::open(&path).unwrap();
        let c = model.config.clone();
        // A layer takes as long as one of 70 B's widths.
        let m = slower(name, (8192 * 28672) as f64 / (c.hidden * c.widest_ffn()) as f64);
        let block = model.layers[0].block().bytes();
        let on = |streamed: usize| {
            let (model, device) = (Model::open(&path).unwrap(), Box::new(VirtualDevice::new(u64::MAX, rates(&m))));
            let none = vec![0; c.layers().len()];
            // SAFETY: the engine has both.
            let split = unsafe { Split::new(device, &none, &model, (CONTEXT, 1), (CONTEXT, streamed), true) };
            let mut split = split.unwrap();
            split.stream(&model, ChunkCosts::of(&m, &c, block), 1 << 20).unwrap();
            let mut engine = Engine::new(model, 1, Kernels::best());
            engine.split = Some(split);
            engine.set_chunk(CONTEXT);
            cost(&mut engine, 200);
            cost(&mut engine, 200)
        };
        let (there, copied) = (on(0), on(c.layers().len()));
        let [prompt, token] = copied.map(|cost| cost.1);
        let weights = c.layers().len() * c.hidden * (c.mixer(0).rows() + c.mixer(0).cols() + 3 * c.widest_ffn());
        let alone = 2.0 * 200.0 * weights as f64 / m.host_gflops / 1e6;
        let link = copied[0].0 as f64 / m.link_gb_s / 1e6;
        let attention = (c.layers().len() * (c.mixer(0).rows() + c.mixer(0).cols()) * c.hidden) as f64;
        let arithmetic = 2.0 * 200.0 * attention / m.device_gflops / 1e6 + there[0].1;
        println!(
            "{name}: a prompt of 200 tokens {prompt:.1} ms, the link alone {link:.1}, attention there {:.1}, the processor alone {alone:.1}; \
             a token {token:.2}, attention there {:.2}",
            there[0].1, there[1].1
        );
        assert!(prompt < 1.15 * link.max(arithmetic), "{name}: {prompt} ms");
        assert!(prompt < alone, "{name}: {prompt} ms, and {alone} without a device");
        let link_of_token = copied[1].0 as f64 / m.link_gb_s / 1e6;
        assert!(token < 1.1 * there[1].1.max(link_of_token), "{name}: {token} ms, {} with attention there", there[1].1);
    }
}

fn opened_with(model: &Path, vram: u64) -> Result<Opened, Error> {
    let options = EngineOptions {
        context: Some(128),
        threads: Some(1),
        device: Some(DeviceOptions {
            vram: Some(vram),
            machine: Some("rtx-4090".into()),
            history: false,
            policy: Policy::Static,
            ..DeviceOptions::new(DeviceKind::Virtual)
        }),
        ..EngineOptions::new(model)
    };
    open(&options, &Quiet)
}

/// A budget that is too small for attention is refused no more, and is kept to the byte, also while it changes.
#[test]
fn a_model_opens_in_a_budget_without_room_for_attention_and_stays_in_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path(), 20, [256, 128]);
    let whole = opened_with(&path, 1 << 30).unwrap();
    let footprint = whole.device.as_ref().unwrap().budget.footprint;
    let planned = whole.device.as_ref().unwrap().budget.plan(1 << 30).unwrap();
    assert_eq!(planned.streamed_layers, 0);
    let least = planned.without_neurons_bytes - footprint.saved_by_streaming(20);
    let Err(refused) = opened_with(&path, least - 1) else { panic!("it was opened") };
    assert!(refused.to_string().contains(&format!("--vram {least} or more")), "{refused}");
    let mut streamed = Vec::new();
    for share in [0.0, 0.2, 0.5, 0.9, 1.0] {
        let vram = least + ((planned.without_neurons_bytes - least) as f64 * share) as u64;
        let Opened { mut engine, device, .. } = opened_with(&path, vram).unwrap();
        let (budget, split) = (device.unwrap().budget, engine.split.as_ref().unwrap());
        let memory = split.device.memory();
        assert!(memory.budget == vram && memory.used <= vram, "{memory:?}");
        let plan = budget.plan(vram).unwrap();
        assert_eq!(plan.streamed_layers, split.streamed_layers());
        assert_eq!(plan.sequences, split.sequences());
        streamed.push(plan.streamed_layers);
        let mut session = Session::new(&engine, 128, KvType::F16).unwrap();
        let said = session.append(&mut engine, &tokens(100), |_| Ok(())).unwrap().to_vec();
        // How many layers are copied stays what it is.
        for vram in [vram + (1 << 20), plan.without_neurons_bytes, vram] {
            let now = budget.set(&mut engine, vram).unwrap();
            let memory = engine.split.as_ref().unwrap().device.memory();
            assert!(memory.used <= vram && now.streamed_layers == plan.streamed_layers, "{memory:?}");
            let mut session = Session::new(&engine, 128, KvType::F16).unwrap();
            let again = session.append(&mut engine, &tokens(100), |_| Ok(())).unwrap();
            let off = support::error(again, &said);
            assert!(off < 2e-3, "{vram}: {off}");
        }
        assert!(matches!(budget.set(&mut engine, plan.without_neurons_bytes - 1), Err(Error::Memory(_))));
    }
    assert!(streamed.is_sorted_by(|a, b| a >= b) && streamed[0] == 20 && streamed[4] == 0, "{streamed:?}");
}

/// What holds for every plan.
fn check_plan(plan: &Plan, f: &Footprint) {
    let [device, host] = [Tier::Device, Tier::Host].map(|tier| plan.parts.iter().map(|p| p.bytes[tier]).sum::<u64>());
    assert_eq!((plan.total_bytes, plan.details.host_bytes), (device, host));
    assert!(plan.without_neurons_bytes <= device && device <= plan.budget_bytes.min(plan.full_bytes));
    let attention = &plan.part(PartName::Attention).bytes;
    let copied = plan.streamed_layers as u64 * f.attention_layer_bytes[0];
    let room = if copied > 0 { 2 * f.attention_layer_bytes[1] } else { 0 };
    assert_eq!((attention[Tier::Device] + copied, attention[Tier::Host]), (f.attention_bytes + room, copied));
}

/// Where attention has no room, the matrices of as few layers as possible stay on the host, and the budget is kept to the byte all the same.
#[test]
fn attention_that_has_no_room_is_copied_and_every_budget_down_to_two_layers_is_kept() {
    let machine = slower("rtx-4090", 1.0);
    for (name, share, context) in [("llama-7b", 1.0, 4096), ("llama-7b", 0.1, 4096), ("llama-70b", 1.0, 4096)] {
        let f = Footprint::of_shape(&published(name).unwrap(), Quant::F16, context, KvType::F16);
        let counts = power_law(f.layers, f.ffn);
        let of = |kv, vram| {
            let request = Request { kv, computed_share: share, streamed_layers: None, ..request(vram) };
            plan(&f, &counts, &machine, &request)
        };
        let min = of(KvPlace::Auto, 1 << 40).unwrap().without_neurons_bytes;
        let least = min - f.saved_by_streaming(f.layers);
        assert!(least < min / 2, "{name}: {least} of {min}");
        // Whatever the budget, a plan names the least that is taken: it is, and a byte less is not.
        assert_eq!(of(KvPlace::Auto, 1 << 40).unwrap().min_bytes, least, "{name}");
        assert_eq!(of(KvPlace::Auto, least).unwrap().min_bytes, least, "{name}");
        let refused = of(KvPlace::Auto, least - 1).unwrap_err().to_string();
        assert!(refused.contains(&format!("give --vram {least} or more")), "{refused}");
        let mut last = f.layers;
        for step in 0..=60 {
            let vram = least + (min - least) * step / 60;
            let host = of(KvPlace::Host, vram).unwrap();
            check_plan(&host, &f);
            assert!(host.without_neurons_bytes <= vram && host.streamed_layers <= last, "{name}, {vram}");
            // One layer less would not fit.
            let fewer = host.streamed_layers.saturating_sub(1);
            let needed = least + f.saved_by_streaming(f.layers) - f.saved_by_streaming(fewer);
            assert!(host.chunk > 256 || host.streamed_layers == 0 || needed > vram, "{name}, {vram}");
            last = host.streamed_layers;
            let plan = of(KvPlace::Auto, vram).unwrap();
            check_plan(&plan, &f);
            let copied_us =
                (plan.streamed_layers as u64 * f.attention_layer_bytes[0]) as f64 / (machine.link_gb_s * 1e3);
            let host_us = share * f.ffn_bytes() as f64 / (machine.dram_gb_s * 1e3);
            // More than the fewest are copied only while the processor reads its neurons.
            assert!(copied_us <= host_us || plan.streamed_layers <= host.streamed_layers, "{name}, {vram}");
        }
        assert_eq!(last, 0, "{name}");
        let whole = of(KvPlace::Auto, min).unwrap();
        assert_eq!((whole.streamed_layers, whole.without_neurons_bytes), (0, min));
        // A share of the neurons that does not fit beside names a budget that does.
        let shared = |vram| {
            let request = Request { ffn_share: Some(0.25), streamed_layers: None, ..request(vram) };
            plan(&f, &counts, &machine, &request)
        };
        let refused = shared(least + (1 << 20)).unwrap_err().to_string();
        let named = refused.split("give --vram ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
        check_plan(&shared(named.parse().unwrap()).unwrap(), &f);
        // Where a budget is to change no bits, no keys and values change sides for it.
        let spare = of(KvPlace::Spare, min - (1 << 20)).unwrap();
        assert_eq!(spare.sequences, 0, "{name}");
        // What the link has time for: keys and values lie on the device, and chunks are long.
        let dense = of(KvPlace::Auto, min - (1 << 20)).unwrap();
        assert!(share < 1.0 || dense.sequences == 1 && dense.chunk > 256, "{name}: {dense:?}");
    }
}
