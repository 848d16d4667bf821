//! One loop decides for the engine's thread, for replay and for the simulator: on the same observations they decide the same.

use crate::support::{RATES, assumed_machine, on_device};
use dynamicinfer::background::{Background, BackgroundOptions};
use dynamicinfer::cache::{Frames, NeuronCache, Slot};
use dynamicinfer::clock::{self, Duration};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::{Device, Rates, VirtualDevice};
use dynamicinfer::engine::{Choice, DividedLayer, Engine, Logits, Lookahead, Migrator, Sparsity};
use dynamicinfer::formats::machine_profile::MachineProfile;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::formats::trace_file::TraceFile;
use dynamicinfer::ids::PublishedId;
use dynamicinfer::lab::record::{Request, record};
use dynamicinfer::lab::replay::{self, replay_with};
use dynamicinfer::lab::simulate::{self, Calls, simulate_with};
use dynamicinfer::lab::synth::{Shape, write_store};
use dynamicinfer::lab::trace_run::OwnedDecision;
use dynamicinfer::model::{Activation, KvCache, KvType, Model};
use dynamicinfer::placement::memory_plan::Footprint;
use dynamicinfer::predictor::{Calibration, Exact, Form, Kind, Predictor, Sign, Tools};
use dynamicinfer::scheduler::thresholds::LossWeight;
use dynamicinfer::scheduler::{Policy, Rules};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

const TOKENS: usize = 40;

const SHAPE: Shape = Shape {
    hidden: 64,
    layers: 4,
    ffn: 128,
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

/// A model of this shape with random weights.
fn synth(dir: &Path) -> PathBuf {
    let store = dir.join("synth.neurons");
    write_store(&SHAPE, Quant::F32, &store, &|_, _| Ok(())).unwrap();
    store
}

/// Every decision arrives before its layer is divided, whoever counts the time.
const FAST: Rates = Rates { device_gb_s: 1.0, link_gb_s: 1e6, host_gb_s: 1.0, copy_us: 0.0, ..RATES };

/// A move: layer, slot, neuron.
type Moved = (usize, u32, u32);

fn tokens() -> Vec<u32> {
    (0..TOKENS as u32).map(|i| 5 + i * 37 % 90).collect()
}

/// Whether moving pays, what a move costs and thresholds are questions of time, of which each has its own.
fn timeless(rules: Rules) -> Rules {
    Rules { gain: false, thresholds: false, move_cost: Some(0.0), ..rules }
}

/// The scheduler's thread, waited for after every observation; says which moves the cache began since the observation before.
struct Followed {
    background: Background,
    moved: Vec<Moved>,
    told: Sender<Vec<Moved>>,
}

impl Followed {
    fn filling(cache: &NeuronCache) -> BTreeSet<Moved> {
        let of = |(l, layer): (usize, &dynamicinfer::cache::LayerCache)| {
            let slots = layer.table.slots().iter().enumerate();
            let filling = slots.filter_map(move |(slot, s)| match s {
                Slot::Filling(neuron) => Some((l, slot as u32, neuron.0)),
                Slot::Free | Slot::Resident(_) => None,
            });
            filling.collect::<Vec<_>>()
        };
        cache.layers.iter().enumerate().flat_map(of).collect()
    }
}

impl Migrator for Followed {
    fn apply(
        &mut self,
        layer: usize,
        begins: bool,
        device: &mut dyn Device,
        cache: &mut NeuronCache,
        frames: Option<&mut dyn Frames>,
        sparsity: &mut Sparsity,
    ) {
        let before = Followed::filling(cache);
        self.background.apply(layer, begins, device, cache, frames, sparsity);
        self.moved.extend(Followed::filling(cache).difference(&before));
    }

    fn lookahead(&self) -> Option<&Lookahead> {
        self.background.lookahead()
    }

    fn observe(&mut self, at: &DividedLayer<'_>, device: &dyn Device, cache: &mut NeuronCache) {
        self.told.send(std::mem::take(&mut self.moved)).unwrap();
        self.background.observe(at, device, cache);
        let start = clock::now();
        while self.background.counts().handled < self.background.counts().observed {
            assert!(start.elapsed() < Duration::from_secs(60), "the scheduler hangs: {:?}", self.background.counts());
            std::thread::yield_now();
        }
    }
}

/// The signs, counting how often they are asked for scores.
struct Asked {
    sign: Sign,
    times: AtomicU64,
}

impl Predictor for Asked {
    fn kind(&self) -> Kind {
        self.sign.kind()
    }
    fn threshold(&self, layer: usize, ahead: usize) -> f32 {
        self.sign.threshold(layer, ahead)
    }
    fn calibration(&self, layer: usize, ahead: usize) -> Option<&Calibration> {
        self.sign.calibration(layer, ahead)
    }
    fn score(&self, tools: &mut Tools<'_>, layer: usize, ahead: usize, residual: &[f32], n: usize, scores: &mut [f32]) {
        self.times.fetch_add(1, Ordering::SeqCst);
        self.sign.score(tools, layer, ahead, residual, n, scores);
    }
    fn form(&self, layer: usize, ahead: usize) -> Option<Form<'_>> {
        self.sign.form(layer, ahead)
    }
    fn weight_bytes(&self, layer: usize, ahead: usize) -> u64 {
        self.sign.weight_bytes(layer, ahead)
    }
}

/// What is given to all three.
struct Case {
    policy: Policy,
    ahead: usize,
    slots: Vec<usize>,
    placed: Vec<Vec<u32>>,
    history: Vec<Vec<f32>>,
}

impl Case {
    /// Half of the neurons of each layer are in slots at the beginning, and all are as frequent.
    fn new(policy: Policy, ahead: usize) -> Case {
        let Shape { layers, ffn, .. } = SHAPE;
        let (slots, placed) = (vec![ffn / 2; layers], vec![(0..ffn as u32 / 2).collect(); layers]);
        Case { policy, ahead, slots, placed, history: vec![vec![0.1; ffn]; layers] }
    }

    /// `placed` as the published model counts: the store is in its order.
    fn placed(&self) -> Vec<Vec<PublishedId>> {
        self.placed.iter().map(|placed| placed.iter().map(|&n| PublishedId(n)).collect()).collect()
    }
}

/// Moves that each observation led to, in rising order, as the engine began them.
fn by_engine(store: &Path, case: &Case) -> Vec<Vec<Moved>> {
    let exact =
        |model: &Model| Arc::new(Exact::new(model, &vec![0.0; model.config.layers().len()])) as Arc<dyn Predictor>;
    let gates = vec![Choice::Exact { activation_threshold: 0.0 }; case.slots.len()];
    by_engine_with(store, case, exact, |_| (Sparsity::new(gates.clone(), 0).unwrap(), false))
}

/// As [`by_engine`], looking ahead by this predictor; `chosen` says what the engine computes by it, and whether the device looks ahead.
fn by_engine_with(
    store: &Path,
    case: &Case,
    predictor: impl Fn(&Model) -> Arc<dyn Predictor>,
    chosen: impl Fn(&Arc<dyn Predictor>) -> (Sparsity, bool),
) -> Vec<Vec<Moved>> {
    let model = Model::open(store).unwrap();
    let layers = model.config.layers().len();
    let device = Box::new(VirtualDevice::new(u64::MAX, FAST));
    // SAFETY: the engine drops its device's part before its model: it has both.
    let mut split = unsafe { on_device(&model, device, &case.slots) }.unwrap();
    (0..layers).for_each(|l| split.cache.load(&mut *split.device, l, bytemuck::cast_slice(&case.placed[l])).unwrap());
    split.cache.settle(&mut *split.device);
    let block_bytes = model.layers[0].block().bytes();
    let mut engine = Engine::new(model, 1, Kernels::best());
    let predictor = predictor(&engine.model);
    let (sparsity, predicts_on_device) = chosen(&predictor);
    let setting = BackgroundOptions {
        policy: case.policy,
        tune: Arc::new(timeless),
        weight: LossWeight::Probability,
        ahead: case.ahead,
        sequences: 1,
        predictor: Some(predictor.clone()),
        thresholds: vec![None; layers],
        history: case.history.clone(),
        placed: case.placed.iter().map(|placed| bytemuck::cast_slice(placed).to_vec()).collect(),
        kernels: engine.kernels,
        threads: 1,
        link_gb_s: FAST.link_gb_s,
        latency: None,
    };
    let background = Background::start(engine.model.clone(), block_bytes, setting).unwrap();
    let (told, moved): (_, Receiver<Vec<Moved>>) = channel();
    split.migrator = Some(Box::new(Followed { background, moved: Vec::new(), told }));
    split.lookahead = predicts_on_device.then_some((predictor, case.ahead));
    engine.split = Some(split);
    engine.set_sparsity(sparsity);
    let mut kv = KvCache::new(&engine.model.config, TOKENS, KvType::F32).unwrap();
    for token in tokens() {
        engine.forward(&mut kv, &[token], Logits::Last);
    }
    // With an observation comes what was begun since the one before.
    moved.try_iter().skip(1).collect()
}

/// What the model did on the same tokens.
fn recorded(store: &Path, path: &Path, ahead: usize) -> TraceFile {
    let mut engine = Engine::new(Model::open(store).unwrap(), 1, Kernels::best());
    let activation_thresholds = vec![0.0; engine.model.config.layers().len()];
    let predictor: Arc<dyn Predictor> = Arc::new(Exact::new(&engine.model, &activation_thresholds));
    let texts = vec![("text".into(), tokens())];
    let made = serde_json::Value::Null;
    let request = Request {
        texts,
        window: TOKENS,
        kv: KvType::F32,
        predictor: Some(predictor),
        activation_thresholds,
        ahead,
        lookaheads: Vec::new(),
        made,
    };
    record(&mut engine, &request, path, |_, _| Ok(())).unwrap();
    TraceFile::open(path).unwrap()
}

/// Keeps the moves of each observation, in rising order.
fn keep(all: &mut Vec<Vec<Moved>>, decisions: &[OwnedDecision]) {
    let of = |d: &OwnedDecision| d.moves.iter().map(|m| (d.layer, m.slot().0, m.neuron().0)).collect::<Vec<_>>();
    let mut moves: Vec<Moved> = decisions.iter().flat_map(of).collect();
    moves.sort_unstable();
    all.push(moves);
}

fn by_replay(trace: &TraceFile, case: &Case) -> Vec<Vec<Moved>> {
    let setting = replay::ReplayOptions {
        policy: case.policy,
        rules: timeless(case.policy.rules()),
        slots: case.slots.clone(),
        link: 1e6,
        placed: case.placed(),
        history: case.history.clone(),
        thresholds: trace.header().thresholds(None),
        cost: 0.0,
        stage: None,
        foreseen: false,
        seed: 1,
        skip: 0,
    };
    let mut all = Vec::new();
    replay_with(trace, &setting, |_, _, decided| keep(&mut all, decided));
    all
}

fn by_simulator(trace: &TraceFile, case: &Case, real: &Footprint) -> Vec<Vec<Moved>> {
    let machine = MachineProfile {
        dram_gb_s: FAST.host_gb_s,
        device_gb_s: FAST.device_gb_s,
        device_gflops: RATES.device_gflops,
        link_gb_s: FAST.link_gb_s,
        call_us: 0.1,
        copy_us: FAST.copy_us,
        sync_us: 0.1,
        ..assumed_machine()
    };
    let setting = simulate::SimulateOptions {
        machine: &machine,
        real,
        policy: case.policy,
        rules: timeless(case.policy.rules()),
        slots: case.slots.clone(),
        placed: case.placed(),
        history: case.history.clone(),
        device: true,
        predictor_bytes: 0,
        kv_bytes: 0,
        thresholds: trace.header().thresholds(None),
        contention: false,
        calls: Calls::PerDecision,
        gap_ns: 0.0,
        seed: 1,
        skip: 0,
        prompt: 0,
        chunk: 256,
        half: 0,
    };
    let mut all = Vec::new();
    simulate_with(trace, &setting, |_, _, decided| keep(&mut all, decided)).unwrap();
    all
}

/// Decision by decision. There were three loops: they counted other neurons as used, applied decisions at other times, and the
/// simulator had slots of its own.
#[test]
fn engine_replay_and_simulator_decide_the_same_on_the_same_observations() {
    let dir = tempfile::tempdir().unwrap();
    let store = synth(dir.path());
    let (model, layers) = (Model::open(&store).unwrap(), SHAPE.layers);
    let real = Footprint::of_model(&model, TOKENS, KvType::F32);
    for ahead in [1, 2] {
        let trace = recorded(&store, &dir.path().join(format!("{ahead}.trace")), ahead);
        for policy in Policy::ALL {
            let case = Case::new(policy, ahead);
            let engine = by_engine(&store, &case);
            let (replay, simulator) = (by_replay(&trace, &case), by_simulator(&trace, &case, &real));
            // What follows from the last observation is never begun.
            assert_eq!(engine.len() + 1, TOKENS * layers);
            for (i, moved) in engine.iter().enumerate() {
                let at = format!("{policy:?}, {ahead} ahead, token {}, layer {}", i / layers, i % layers);
                assert_eq!(moved, &replay[i], "{at}: the engine and the replay");
                assert_eq!(moved, &simulator[i], "{at}: the engine and the simulator");
            }
            let moves: usize = engine.iter().map(Vec::len).sum();
            assert_eq!(moves > TOKENS, policy != Policy::Static, "{policy:?}, {ahead} ahead: {moves} moves");
        }
    }
}

/// Where a prediction is made changes no decision: by the scheduler, by the device beside its other work, or by the engine, which chooses
/// by it, too. It is made once.
#[test]
fn layers_ahead_are_predicted_alike_by_scheduler_device_and_engine() {
    let dir = tempfile::tempdir().unwrap();
    let store = synth(dir.path());
    let layers = SHAPE.layers;
    for ahead in [1, 2] {
        let case = Case::new(Policy::Micro, ahead);
        let by = |chosen_ahead: usize, on_device: bool| {
            let chosen = |predictor: &Arc<dyn Predictor>| {
                let predictor = predictor.clone();
                let choice = Choice::Predicted { predictor, threshold: 0.5, activation_threshold: 0.0 };
                (Sparsity::new(vec![choice; layers], chosen_ahead).unwrap(), on_device)
            };
            let sign = OnceLock::new();
            let predictor = |model: &Model| {
                let asked = Asked { sign: Sign::uncalibrated(model), times: AtomicU64::new(0) };
                sign.get_or_init(|| Arc::new(asked)).clone() as Arc<dyn Predictor>
            };
            let moves = by_engine_with(&store, &case, predictor, chosen);
            (moves, sign.get().unwrap().times.load(Ordering::SeqCst))
        };
        let ((scheduler, asked), (device, asked_device)) = (by(0, false), by(0, true));
        assert!(scheduler.iter().any(|moves| !moves.is_empty()), "nothing moved");
        assert_eq!(scheduler, device, "{ahead} ahead");
        // Once at the start, to take memory. The device chooses each layer's neurons by its own scores in any case.
        assert_eq!((asked, asked_device), (1 + (TOKENS * (layers - ahead)) as u64, 1), "{ahead} ahead");
        // Further ahead than the scheduler looks, the device keeps the scores by which it chooses.
        assert_eq!(by(ahead + 1, false).0, by(ahead + 1, true).0, "{ahead} ahead, chosen {} ahead", ahead + 1);
        // The engine computes other neurons if it chooses by an earlier residual.
        let ((_, asked), (_, asked_device)) = (by(ahead, false), by(ahead, true));
        assert_eq!((asked, asked_device), (1, 1), "{ahead} ahead for both");
    }
}

/// A policy is a file and a line in the list; what cannot take it from the list is held to it here.
#[test]
fn every_policy_is_named_wherever_all_of_them_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let names = Policy::ALL.map(Policy::name);
    let api: serde_json::Value = serde_json::from_str(&read("src/serve/openapi.json")).unwrap();
    let put = &api["paths"]["/v1/x/policy"]["put"]["requestBody"]["content"]["application/json"]["schema"];
    assert_eq!(put["properties"]["policy"]["enum"], serde_json::json!(names));
    let line = format!("policy = {}", serde_json::json!(names).to_string().replace(',', ", "));
    for experiment in ["ablation", "ablation_simulated", "bound"] {
        let path = format!("configs/experiments/{experiment}.toml");
        assert!(read(&path).contains(&line), "{path} lacks the line {line}");
    }
    let docs = read("docs/memory.md");
    for policy in Policy::ALL {
        assert!(docs.contains(&format!("`{}`", policy.name())), "docs/memory.md does not say what {policy:?} is");
        let file = format!("src/scheduler/policy/{}.rs", policy.name().replace('-', "_"));
        assert!(root.join(&file).is_file(), "{policy:?} has no file {file}");
        assert_eq!(policy.name().parse(), Ok(policy));
        assert_eq!(serde_json::to_value(policy).unwrap(), policy.name());
    }
    assert_eq!(
        "best".parse::<Policy>().unwrap_err(),
        "'best' is not a policy; take static, micro, macro, full, lru, random, lfu, sieve or two-queues"
    );
}
