//! A device's prompts go through in chunks as long as its working memory was planned for: the logits stay those of the CPU alone, and what
//! lies elsewhere is copied less often.

use crate::support;
use crate::support::watched::{Step, Watched};
use crate::support::{RATES, error, expert_costs, on_device_by, streaming, streaming_experts_bytes};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::VirtualDevice;
use dynamicinfer::engine::session::CHUNKS;
use dynamicinfer::engine::{Engine, Session, Split, pinned_bytes};
use dynamicinfer::error::Error;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::StoreId;
use dynamicinfer::lab::synth::{Mixture, Shape, write_gguf};
use dynamicinfer::model::config::Activation;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvType, Model};
use dynamicinfer::open::{DeviceKind, DeviceOptions, EngineOptions, Opened, Quiet, check, open};
use dynamicinfer::pack::{PackOptions, Types, pack};
use dynamicinfer::scheduler::Policy;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CONTEXT: usize = 1100;

/// A model of two narrow layers, whose FFNs are nearly all of it: neurons, or experts of which a token has two. Random weights.
fn made(dir: &Path, ffn: usize, experts: Option<Mixture>, quant: Quant) -> PathBuf {
    let path = dir.join(format!("{ffn}.{}.gguf", quant.name()));
    write_gguf(&shape(ffn, experts), quant, &path, &|_, _| Ok(())).unwrap();
    path
}

fn shape(ffn: usize, experts: Option<Mixture>) -> Shape {
    Shape {
        hidden: 32,
        layers: 2,
        ffn,
        heads: 1,
        kv_heads: 1,
        vocab: 300,
        context: CONTEXT,
        activation: Activation::Relu,
        active: None,
        seed: 7,
        outliers: 0,
        experts,
    }
}

/// The same packed by neuron.
fn packed(gguf: &Path) -> PathBuf {
    let (source, store) = (Source::open(gguf, None).unwrap(), gguf.with_extension("neurons"));
    let types = Types::natural(&source).unwrap();
    pack(&source, &store, &PackOptions { types, orders: None }, &|_, _| Ok(())).unwrap();
    store
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 5 + i * 37 % 290).collect()
}

/// Logits after a prompt, and the passes that it took.
fn after(engine: &mut Engine, n: usize, kind: KvType) -> (Vec<f32>, u64) {
    let (mut session, before) = (Session::new(engine, CONTEXT, kind).unwrap(), engine.report.passes);
    let logits = session.append(engine, &tokens(n), |_| Ok(())).unwrap().to_vec();
    (logits, engine.report.passes - before)
}

/// Models whose FFNs are divided otherwise: neurons, experts, and neurons inside experts.
struct Models {
    neurons: PathBuf,
    experts: PathBuf,
    inside: PathBuf,
}

impl Models {
    fn made(dir: &Path, quant: Quant) -> Models {
        let neurons = packed(&made(dir, 96, None, quant));
        let experts = made(dir, 64, Some(Mixture::flat(6, 2)), quant);
        Models { neurons, inside: packed(&experts), experts }
    }

    fn open(&self, which: usize) -> Model {
        match which {
            0 => Model::open(&self.neurons).unwrap(),
            1 => Model::in_place(Source::open(&self.experts, None).unwrap()).unwrap(),
            _ => Model::open(&self.inside).unwrap(),
        }
    }

    /// With a device that has the first `resident` neurons or experts; of the others a part is copied there for a chunk, and the CPU has the
    /// rest.
    fn divided(&self, which: usize, chunk: usize, resident: usize) -> Engine {
        let model = self.open(which);
        let (c, device) = (&model.config, Box::new(VirtualDevice::new(u64::MAX, RATES)));
        // SAFETY: the engine has both.
        let mut split = unsafe { on_device_by(&model, device, &vec![c.movable(); c.layers().len()], chunk) }.unwrap();
        let there: Vec<StoreId> = (0..resident).map(StoreId::new).collect();
        (0..c.layers().len()).for_each(|l| split.cache.load(&mut *split.device, l, &there).unwrap());
        split.cache.settle(&mut *split.device);
        match which {
            0 => streaming(&mut split, &model, 16, 0.4),
            1 => {
                let bytes = streaming_experts_bytes(&model, 1);
                split.stream_experts(&model, expert_costs(300.0), bytes).unwrap();
            }
            _ => {
                let bytes = 2 * 64 * model.layers[0].ffn.movable_bytes();
                split.stream_inside(&model, expert_costs(300.0), bytes).unwrap();
            }
        }
        let mut engine = Engine::new(model, 1, Kernels::best());
        engine.split = Some(split);
        engine.set_chunk(chunk);
        engine
    }
}

#[test]
fn prompts_of_every_length_give_what_the_cpu_alone_gives_in_chunks_of_every_length() {
    let dir = tempfile::tempdir().unwrap();
    let models = Models::made(dir.path(), Quant::F32);
    let lengths = [1, 33, 256, 257, 600, 1025];
    for which in 0..3 {
        for (kind, limit) in [(KvType::F32, 2e-5), (KvType::F16, 2e-3)] {
            let mut alone = Engine::new(models.open(which), 1, Kernels::best());
            let expected = lengths.map(|n| after(&mut alone, n, kind).0);
            for chunk in [512, 1024] {
                let all = alone.model.config.movable();
                for resident in [0, all / 2, all] {
                    let mut engine = models.divided(which, chunk, resident);
                    for (&n, expected) in lengths.iter().zip(&expected) {
                        let (found, passes) = after(&mut engine, n, kind);
                        let off = error(&found, expected);
                        assert!(off < limit, "model {which}, {n} tokens by {chunk}, {resident} there, {kind:?}: {off}");
                        assert_eq!(passes as usize, n.div_ceil(chunk));
                    }
                    let counts = engine.split.as_ref().unwrap().chunks;
                    // Inside experts slots are of no use to a chunk.
                    let whole = which < 2 && resident == all;
                    assert_eq!((counts.streamed > 0, counts.on_cpu > 0), (!whole, !whole), "model {which}: {counts:?}");
                    assert_eq!(counts.resident > 0, which < 2 && resident > 0, "model {which}: {counts:?}");
                }
            }
        }
    }
}

/// A chunk with a device went on to its end, ten seconds and more, whoever had pressed Ctrl-C or left.
#[test]
fn a_chunk_with_a_device_stops_between_layers_and_what_comes_next_is_as_if_it_had_never_begun() {
    let dir = tempfile::tempdir().unwrap();
    let models = Models::made(dir.path(), Quant::F32);
    for which in 0..3 {
        let half = models.open(which).config.movable() / 2;
        // With keys and values on the device, and on the host.
        for kind in [KvType::F16, KvType::F32] {
            // A text whose second chunk is stopped, and that goes on; and another one after it.
            let texts = |stop: Option<usize>| {
                let mut engine = models.divided(which, 512, half);
                let mut session = Session::new(&engine, CONTEXT, kind).unwrap();
                let ids = tokens(1000);
                if let Some(layers) = stop {
                    let mut left = layers;
                    let step = |done: usize| match done == 512 && session_is_left(&mut left) {
                        true => Err(Error::Interrupted),
                        false => Ok(()),
                    };
                    let stopped = session.append(&mut engine, &ids, step).map(drop);
                    assert!(matches!(stopped, Err(Error::Interrupted)), "model {which}: {stopped:?}");
                    assert_eq!((session.kv.len, session.tokens.len()), (512, 512), "model {which}, {layers} layers");
                }
                let rest = ids[session.kv.len..].to_vec();
                let first = session.append(&mut engine, &rest, |_| Ok(())).unwrap().to_vec();
                (first, after(&mut engine, 300, kind).0)
            };
            let expected = texts(None);
            // The first look is after the first chunk; then come those before each of the two layers.
            for layers in [1, 2] {
                assert!(
                    texts(Some(layers)) == expected,
                    "model {which}, {kind:?}: stopped before layer {}",
                    layers - 1
                );
            }
        }
    }
}

/// Counts down the looks at whether a text is still wanted.
fn session_is_left(looks: &mut usize) -> bool {
    *looks = looks.wrapping_sub(1);
    *looks == usize::MAX
}

/// The products of a chunk go through memory of the device that grows with its tokens: the first long chunk took it in the middle of a pass.
#[test]
fn no_pass_takes_memory_of_the_device() {
    let dir = tempfile::tempdir().unwrap();
    for quant in [Quant::F32, Quant::F16, Quant::Q8] {
        let models = Models::made(dir.path(), quant);
        for which in 0..3 {
            for chunk in CHUNKS {
                let half = models.open(which).config.movable() / 2;
                let mut engine = models.divided(which, chunk, half);
                let used = |engine: &Engine| engine.split.as_ref().unwrap().device.memory().used;
                let before = used(&engine);
                for n in [1, 32, 1025] {
                    after(&mut engine, n, KvType::F16);
                }
                let unprepared = engine.split.as_ref().unwrap().device.totals().unprepared;
                assert_eq!((unprepared, used(&engine)), (0, before), "{} model {which} by {chunk}", quant.name());
            }
        }
    }
}

/// One function says what is planned for, what is checked before a model is opened, and what is allocated.
#[test]
fn what_host_and_device_exchange_takes_the_host_memory_that_was_planned_for() {
    let dir = tempfile::tempdir().unwrap();
    let models = Models::made(dir.path(), Quant::F32);
    let fixtures = ["smallthinker", "qwen2-moe", "opt"].map(|name| support::opened(dir.path(), name, Quant::F32));
    let models: Vec<Model> = (0..3).map(|which| models.open(which)).chain(fixtures).collect();
    for (model, chunk) in models.iter().flat_map(|model| CHUNKS.map(|chunk| (model, chunk))) {
        let (c, seen) = (&model.config, Arc::default());
        let device = Watched { device: VirtualDevice::new(u64::MAX, RATES), seen: Arc::clone(&seen) };
        // SAFETY: dropped before the model.
        let mut split =
            unsafe { Split::new(Box::new(device), &vec![1; c.layers().len()], model, (0, 0), (chunk, 0), false) }
                .unwrap();
        let pinned = || {
            let seen = seen.lock().unwrap();
            let bytes = |step: &Step| if let Step::Pinned(bytes) = step { *bytes as u64 } else { 0 };
            // Beside them the names of what is in slots.
            seen.iter().map(bytes).sum::<u64>() - 4 * (c.layers().len() * c.movable()) as u64
        };
        for attends in [false, true] {
            split.set_sequences(model, 64, usize::from(attends)).unwrap();
            let planned = pinned_bytes(c, chunk, attends);
            assert_eq!((pinned(), split.pinned_bytes()), (planned, planned), "{} by {chunk}", c.name);
        }
    }
}

/// A mixture of 100 MB, most of which stays on disk with so much host memory, and half of it on a device.
fn tight(model: &Path, machine: &Path, ram: u64, chunk: Option<usize>, vram: Option<u64>) -> EngineOptions {
    EngineOptions {
        context: Some(CONTEXT),
        threads: Some(1),
        ram: Some(ram),
        device: Some(DeviceOptions {
            ffn_share: Some(0.5).filter(|_| vram.is_none()),
            vram,
            machine: Some(machine.into()),
            history: false,
            policy: Policy::Static,
            chunk,
            parts: Some(1),
            ..DeviceOptions::new(DeviceKind::Virtual)
        }),
        ..EngineOptions::new(model)
    }
}

/// What long chunks take of host memory was only counted when the plan had chosen their length: `--ram` was refused where chunks of 256 would
/// have had room, a check beforehand said nothing, and copies of keys and values came on top with a larger budget of the device.
#[test]
fn chunks_are_as_long_as_the_budgets_of_both_memories_allow_and_all_that_they_take_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let (machine, path) = (machine(dir.path()), dir.path().join("m.gguf"));
    let experts = Some(Mixture::flat(32, 2));
    let shape = Shape { layers: 4, ..shape(2048, experts) };
    write_gguf(&shape, Quant::F32, &path, &|_, _| Ok(())).unwrap();
    let opens = |ram, chunk, vram| {
        let options = tight(&path, &machine, ram, chunk, vram);
        let (checked, opened) = (check(&options, &Quiet), open(&options, &Quiet));
        // What is refused is refused before another model is unloaded for it.
        assert_eq!(checked.err().map(|e| e.to_string()), opened.as_ref().err().map(|e| e.to_string()));
        opened
    };
    // The least with chunks of a length, by trying.
    let c = Model::in_place(Source::open(&path, None).unwrap()).unwrap().config;
    let least = |chunk: usize| {
        let (mut low, mut high) = (64 << 20, 96 << 20);
        while high - low > 1 << 10 {
            let middle = (low + high) / 2;
            let options = tight(&path, &machine, middle, Some(chunk), None);
            *if check(&options, &Quiet).is_ok() { &mut high } else { &mut low } = middle;
        }
        high
    };
    let [short, long] = [256, 1024].map(least);
    let attends = opens(short, Some(256), None).unwrap().engine.split.unwrap().sequences() > 0;
    let more = pinned_bytes(&c, 1024, attends) - pinned_bytes(&c, 256, attends);
    assert!((long - short).abs_diff(more) < 2 << 10 && more > 1 << 20, "{short} and {long}: {more}");
    let refused = opens(short, Some(1024), None).err().unwrap().to_string();
    assert!(refused.contains("or a shorter --prompt-chunk than 1024"), "{refused}");
    assert!(!opens(short - (4 << 10), None, None).err().unwrap().to_string().contains("--prompt-chunk"));
    for (ram, chunks) in [(short, 256..=256), (long - (4 << 10), 256..=512), (95 << 20, 1024..=1024)] {
        let Opened { engine, .. } = opens(ram, None, None).unwrap();
        assert!(chunks.contains(&engine.chunk()), "{ram} bytes: {}", engine.chunk());
        assert_eq!(engine.split.as_ref().unwrap().chunk(), engine.chunk());
    }
    // Keys and values come to the device while it runs.
    for (ram, comes) in [(short + (4 << 20), true), (short, false)] {
        let least = opens(ram, Some(256), None).unwrap().device.unwrap().budget.footprint.least_bytes();
        let Opened { mut engine, device, .. } = opens(ram, Some(256), Some(least)).unwrap();
        let state = |engine: &Engine| {
            let (split, cached) = (engine.split.as_ref().unwrap(), engine.cached.as_ref().unwrap());
            (split.sequences(), cached.beside - split.pinned_bytes(), cached.memory().budget)
        };
        let before = state(&engine);
        assert_eq!((before.0, before.2), (0, ram));
        let (exchanged, budget) = (engine.split.as_ref().unwrap().pinned_bytes(), device.unwrap().budget);
        budget.set(&mut engine, 3 * least).unwrap();
        assert_eq!(state(&engine), (usize::from(comes), before.1, before.2));
        let now = engine.split.as_ref().unwrap().pinned_bytes();
        assert_eq!(now > exchanged, comes);
        after(&mut engine, 40, KvType::F16);
        engine.check().unwrap();
    }
}

/// A slow link and a slow processor: nearly all that is missing is copied.
fn machine(dir: &Path) -> PathBuf {
    let path = dir.join("slow-link.toml");
    let text = "name = \"slow-link\"\nnote = \"\"\nmeasured = []\n\
                assumed = [\"dram_gb_s\", \"host_gflops\", \"device_gb_s\", \"link_gb_s\", \"call_us\", \"copy_us\", \"sync_us\"]\n\
                dram_gb_s = 10.0\nhost_gflops = 0.3\n\
                device_gb_s = 100.0\nlink_gb_s = 0.5\ncall_us = 0.1\ncopy_us = 0.1\nsync_us = 0.1\n";
    std::fs::write(&path, text).unwrap();
    path
}

fn opened(model: &Path, machine: &Path, share: f64, chunk: Option<usize>) -> Opened {
    let options = EngineOptions {
        context: Some(CONTEXT),
        threads: Some(1),
        device: Some(DeviceOptions {
            ffn_share: Some(share),
            machine: Some(machine.into()),
            history: false,
            policy: Policy::Static,
            chunk,
            ..DeviceOptions::new(DeviceKind::Virtual)
        }),
        ..EngineOptions::new(model)
    };
    open(&options, &Quiet).unwrap()
}

/// What longer chunks are for. What lies elsewhere is copied once for a chunk, however many tokens it has.
#[test]
fn a_prompt_in_chunks_four_times_as_long_has_a_quarter_of_the_copies_and_takes_less_time() {
    let dir = tempfile::tempdir().unwrap();
    let machine = machine(dir.path());
    let neurons = packed(&made(dir.path(), 4096, None, Quant::F16));
    let experts = made(dir.path(), 768, Some(Mixture::flat(32, 2)), Quant::F16);
    for (name, model) in [("neurons", &neurons), ("experts", &experts)] {
        // Bytes to the device, and time by its clock, ms.
        let prompt = |share: f64, chunk: usize| {
            let mut opened = opened(model, &machine, share, Some(chunk));
            assert_eq!(opened.engine.chunk(), chunk);
            let mut session = opened.session().unwrap();
            let totals = |opened: &Opened| opened.engine.split.as_ref().unwrap().device.totals();
            let before = totals(&opened);
            let logits = session.append(&mut opened.engine, &tokens(1024), |_| Ok(())).unwrap().to_vec();
            let now = totals(&opened);
            ((now.link_bytes[0] - before.link_bytes[0]) as f64, (now.clock_ns - before.clock_ns) as f64 / 1e6, logits)
        };
        // Activations cross the link, too, whatever lies where.
        let [(all_short, all_short_ms, _), (all_long, all_long_ms, _)] = [256, 1024].map(|chunk| prompt(1.0, chunk));
        let [(short, short_ms, expected), (long, long_ms, found)] = [256, 1024].map(|chunk| prompt(0.5, chunk));
        let copied = (long - all_long) / (short - all_short);
        // Attention on this slow processor takes the same time whatever lies where.
        let times = (long_ms - all_long_ms) / (short_ms - all_short_ms);
        eprintln!("{name}: {copied:.3} times the bytes, {times:.3} times the time ({short_ms:.2} and {long_ms:.2} ms)");
        assert!((0.2..=0.3).contains(&copied), "{name}: {copied} times the bytes");
        assert!(times < 0.6, "{name}: {long_ms} instead of {short_ms} ms");
        let off = error(&found, &expected);
        assert!(off < 2e-3, "{name}: {off}");
    }
}

/// Working memory for chunks is a part of the plan, stays as it is when the budget changes, and is counted in the least that works.
#[test]
fn a_chunk_is_planned_for_and_stays_what_it_is_while_the_budget_changes() {
    let dir = tempfile::tempdir().unwrap();
    let machine = machine(dir.path());
    let model = made(dir.path(), 64, Some(Mixture::flat(6, 2)), Quant::F16);
    // Of so small a model longer chunks would take more than they may.
    assert_eq!(opened(&model, &machine, 0.5, None).engine.chunk(), 256);
    let mut least = Vec::new();
    for chunk in CHUNKS {
        let Opened { mut engine, device, .. } = opened(&model, &machine, 0.5, Some(chunk));
        let (device, memory) = (device.unwrap(), engine.split.as_ref().unwrap().device.memory());
        assert_eq!((engine.chunk(), memory.used), (chunk, memory.budget));
        let planned = device.budget.plan(memory.budget).unwrap();
        assert_eq!((planned.chunk, planned.budget_bytes), (chunk, memory.budget));
        let footprint = &device.budget.footprint;
        assert_eq!(planned.without_neurons_bytes, footprint.least_bytes() + footprint.for_chunks(chunk));
        let (expected, passes) = after(&mut engine, 1000, KvType::F32);
        assert_eq!(passes as usize, 1000usize.div_ceil(chunk));
        for vram in [planned.without_neurons_bytes, planned.full_bytes, memory.budget] {
            let plan = device.budget.set(&mut engine, vram).unwrap();
            let now = engine.split.as_ref().unwrap().device.memory();
            assert!(plan.chunk == chunk && now.used <= now.budget && now.budget == vram, "{now:?}");
            let (found, passes) = after(&mut engine, 1000, KvType::F32);
            assert!(passes as usize == 1000usize.div_ceil(chunk) && error(&found, &expected) < 2e-3);
        }
        assert!(matches!(device.budget.set(&mut engine, planned.without_neurons_bytes - 1), Err(Error::Memory(_))));
        assert_eq!(engine.chunk(), chunk);
        least.push(planned.without_neurons_bytes);
    }
    assert!(least.windows(2).all(|two| two[0] < two[1]), "{least:?}");
    // A number that nothing is planned for is refused, and where texts are to be the same it is always the shortest.
    let with = |chunk, deterministic, live| {
        let device = DeviceOptions {
            chunk,
            deterministic,
            live,
            ffn_share: Some(0.5),
            machine: Some(machine.clone()),
            ..DeviceOptions::new(DeviceKind::Virtual)
        };
        let options = EngineOptions { device: Some(device), ..EngineOptions::new(&model) };
        let (checked, opened) = (check(&options, &Quiet), open(&options, &Quiet));
        assert_eq!(checked.is_ok(), opened.is_ok(), "{chunk:?}");
        opened.map(|opened| opened.engine.chunk())
    };
    let refused = with(Some(300), false, false).unwrap_err().to_string();
    assert!(refused.contains("--prompt-chunk 300: take one of [256, 512, 1024]"), "{refused}");
    assert_eq!(with(None, true, false).unwrap(), 256);
    // A daemon took memory for 1024 tokens and ran 256, without a word.
    let refused = with(Some(1024), true, true).unwrap_err().to_string();
    assert!(refused.contains("--prompt-chunk 1024 and --deterministic"), "{refused}");
    assert_eq!(
        [with(Some(256), true, true), with(Some(1024), true, false), with(Some(1024), false, true)].map(Result::unwrap),
        [256, 1024, 1024]
    );
}
