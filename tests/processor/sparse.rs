//! Laws of leaving neurons out: with the true gates the answers are the dense model's, whatever the family and the number
//! of threads and tokens; every layer is predicted once, from where it was asked to be; an audit counts what is true.

use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::{Choice, Engine, Logits, Observer, Seen, Sparsity};
use dynamicinfer::evaluation::audit::Audit;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::pack::{PackOptions, pack};
use dynamicinfer::predictor::{Calibration, Kind, Predictor, Sign, Tools};
use std::path::Path;
use std::sync::{Arc, Mutex};

const SPARSE_FAMILIES: [&str; 9] =
    ["relullama", "prosparse", "bamboo", "opt", "llama-relu2", "relufalcon", "minicpm", "arcee", "nemotron"];

fn model(name: &str) -> Model {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name);
    let source = Source::open(&fixture, None).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("m.neurons");
    pack(&source, &store, &PackOptions { types: Quant::F32.into(), orders: None }, &|_, _| Ok(())).unwrap();
    Model::open(&store).unwrap()
}

fn engine(name: &str, threads: usize) -> Engine {
    Engine::new(model(name), threads, Kernels::best())
}

/// Token ids that any fixture knows.
fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 5 + i * 37 % 90).collect()
}

/// Logits of every token, run in passes of `sizes`.
fn logits(engine: &mut Engine, sizes: &[usize]) -> Vec<f32> {
    let ids = tokens(sizes.iter().sum());
    let mut kv = KvCache::new(&engine.model.config, ids.len(), KvType::F32).unwrap();
    let (mut out, mut rest) = (Vec::new(), &ids[..]);
    for &n in sizes {
        let (now, after) = rest.split_at(n);
        out.extend_from_slice(engine.forward(&mut kv, now, Logits::All));
        rest = after;
    }
    out
}

fn error(a: &[f32], b: &[f32]) -> f32 {
    let top = b.iter().fold(0f32, |m, v| m.max(v.abs()));
    a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / top
}

fn exact(layers: usize) -> Sparsity {
    Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap()
}

const PASSES: [usize; 8] = [7, 1, 1, 1, 17, 1, 1, 1];

#[test]
fn exact_equals_dense_in_every_relu_family_and_does_not_depend_on_threads() {
    for name in SPARSE_FAMILIES {
        let dense = logits(&mut engine(name, 1), &PASSES);
        let mut first: Option<Vec<f32>> = None;
        for threads in [1, 2, 3] {
            let mut engine = engine(name, threads);
            let layers = engine.model.config.layers().len();
            engine.set_sparsity(exact(layers));
            let sparse = logits(&mut engine, &PASSES);
            assert!(error(&sparse, &dense) < 1e-5, "{name}: {}", error(&sparse, &dense));
            assert_eq!(first.get_or_insert_with(|| sparse.clone()), &sparse, "{name} on {threads} threads");
            let share = engine.report.computed_share(&engine.model.config);
            assert!(share > 0.0 && share < 0.9, "{name} computes {share} of its neurons");
        }
    }
}

/// An assertion about the number of scores ended the program.
#[test]
fn a_layer_without_an_ffn_among_predicted_ones_has_nothing_to_compute() {
    for name in ["nemotron-h", "relullama"] {
        let mut engine = engine(name, 2);
        let config = engine.model.config.clone();
        let absent = (0..config.layers().len()).filter(|l| !config.has_ffn(*l)).count();
        assert_eq!(absent > 0, name == "nemotron-h");
        let predictor: Arc<dyn Predictor> = Arc::new(Sign::uncalibrated(&engine.model));
        let choice = Choice::Predicted { predictor, threshold: 0.5, activation_threshold: 0.0 };
        engine.set_sparsity(Sparsity::new(vec![choice; config.layers().len()], 0).unwrap());
        let sparse = logits(&mut engine, &PASSES);
        let share = engine.report.computed_share(&engine.model.config);
        assert!(sparse.iter().all(|x| x.is_finite()) && share > 0.0 && share < 0.9, "{name}: {share}");
    }
}

#[test]
fn more_tokens_than_the_row_kernels_take_run_dense() {
    let mut engine = engine("relullama", 2);
    let dense = logits(&mut engine, &[40]);
    let layers = engine.model.config.layers().len();
    engine.set_sparsity(exact(layers));
    engine.report = Default::default();
    assert_eq!(logits(&mut engine, &[40]), dense);
    assert_eq!(engine.report.computed_share(&engine.model.config), 1.0);
}

#[test]
fn looking_on_changes_nothing() {
    for name in SPARSE_FAMILIES {
        for sparse in [false, true] {
            let mut engine = engine(name, 2);
            let layers = engine.model.config.layers().len();
            if sparse {
                engine.set_sparsity(exact(layers));
            }
            let expected = logits(&mut engine, &[9]);
            let mut audit = Audit::new(&engine.model.config, vec![0.0; layers]);
            let mut kv = KvCache::new(&engine.model.config, 9, KvType::F32).unwrap();
            assert_eq!(engine.forward_observed(&mut kv, &tokens(9), Logits::All, &mut audit), &expected[..], "{name}");
        }
    }
}

/// Scores neurons by a hash of layer and place, so that some half of them are chosen, and notes what it is asked.
struct Noted {
    tables: Vec<Calibration>,
    asked: Mutex<Vec<(usize, usize, usize)>>,
}

fn chosen(layer: usize, neuron: usize) -> bool {
    (layer * 7919 + neuron * 104_729) % 13 < 6
}

impl Predictor for Noted {
    fn kind(&self) -> Kind {
        Kind::Sign
    }

    fn threshold(&self, _layer: usize, _ahead: usize) -> f32 {
        0.5
    }

    fn calibration(&self, layer: usize, ahead: usize) -> Option<&Calibration> {
        (ahead <= 1).then(|| &self.tables[layer])
    }

    fn score(&self, tools: &mut Tools<'_>, layer: usize, ahead: usize, residual: &[f32], n: usize, scores: &mut [f32]) {
        assert_eq!(residual.len(), n * tools.model.config.hidden);
        self.asked.lock().unwrap().push((layer, ahead, n));
        let ffn = tools.model.config.widest_ffn();
        scores.iter_mut().enumerate().for_each(|(at, s)| *s = if chosen(layer, at % ffn) { 0.75 } else { 0.25 });
    }

    fn weight_bytes(&self, _: usize, _: usize) -> u64 {
        0
    }
}

fn noted(engine: &mut Engine, ahead: usize) -> Arc<Noted> {
    let layers = engine.model.config.layers().len();
    let tables = vec![Calibration::new(vec![0.0, 1.0], vec![0.0, 1.0]); layers];
    let predictor = Arc::new(Noted { tables, asked: Mutex::default() });
    let choice = Choice::Predicted { predictor: predictor.clone(), threshold: 0.5, activation_threshold: 0.0 };
    engine.set_sparsity(Sparsity::new(vec![choice; layers], ahead).unwrap());
    predictor
}

/// What the residual and the input were, and which neurons fired but were not chosen.
#[derive(Default)]
struct Seeing {
    computed: u64,
    active: u64,
    hit: u64,
}

impl Observer for Seeing {
    fn layer(&mut self, seen: &Seen<'_>) {
        let ffn = seen.activations.len() / seen.n;
        for (at, &a) in seen.activations.iter().enumerate() {
            let (active, computed) = (a != 0.0, chosen(seen.layer, at % ffn));
            self.active += u64::from(active);
            self.computed += u64::from(computed);
            self.hit += u64::from(active && computed);
        }
    }
}

#[test]
fn every_layer_is_predicted_once_per_pass_from_where_it_was_asked_to_be() {
    for ahead in [0, 1] {
        let mut engine = engine("relullama", 2);
        let layers = engine.model.config.layers().len();
        let predictor = noted(&mut engine, ahead);
        logits(&mut engine, &[3, 1]);
        let expected: Vec<_> = [3, 1].iter().flat_map(|&n| (0..layers).map(move |l| (l, ahead.min(l), n))).collect();
        let mut asked = predictor.asked.lock().unwrap().clone();
        asked.sort_by_key(|&(l, _, n)| (std::cmp::Reverse(n), l));
        assert_eq!(asked, expected);
    }
}

#[test]
fn a_look_ahead_without_a_table_is_refused_by_layer() {
    let engine = engine("relullama", 1);
    let layers = engine.model.config.layers().len();
    let predictor = Arc::new(Noted { tables: vec![Calibration::step(0.5); layers], asked: Mutex::default() });
    let choice = Choice::Predicted { predictor, threshold: 0.5, activation_threshold: 0.0 };
    // Layer 0 has nothing before it; a later one is asked for two layers before.
    let many = vec![choice; 3];
    let error = Sparsity::new(many, 2).err().unwrap();
    assert_eq!(error, "the sign predictor has no table for layer 2 from 2 layers before it");
}

#[test]
fn an_audit_counts_what_is_true() {
    let mut engine = engine("bamboo", 2);
    noted(&mut engine, 0);
    let layers = engine.model.config.layers().len();
    let mut kv = KvCache::new(&engine.model.config, 20, KvType::F32).unwrap();
    let mut seeing = Seeing::default();
    engine.forward_observed(&mut kv, &tokens(20), Logits::None, &mut seeing);
    kv.rewind(0);
    let mut audit = Audit::new(&engine.model.config, vec![0.0; layers]);
    engine.report = Default::default();
    engine.forward_observed(&mut kv, &tokens(20), Logits::None, &mut audit);
    let (shares, by_layer) = audit.shares();
    let all = (20 * layers * engine.model.config.widest_ffn()) as f64;
    assert_eq!(shares.computed_share, seeing.computed as f64 / all);
    assert_eq!(shares.active_share, seeing.active as f64 / all);
    assert_eq!(shares.recall, seeing.hit as f64 / seeing.active as f64);
    assert_eq!(shares.precision, seeing.hit as f64 / seeing.computed as f64);
    assert_eq!(shares.computed_share, engine.report.computed_share(&engine.model.config));
    assert_eq!(by_layer.len(), layers);
}

#[test]
fn a_mixed_choice_names_its_layers() {
    let mut engine = engine("relullama", 1);
    let layers = engine.model.config.layers().len();
    assert!(layers >= 2);
    let mut choices = vec![Choice::Exact { activation_threshold: 0.0 }; layers];
    choices[0] = Choice::Dense;
    let sparsity = Sparsity::new(choices, 0).unwrap();
    assert!(sparsity.name().starts_with("dense@0,exact@1"), "{}", sparsity.name());
    let dense = logits(&mut engine, &PASSES);
    engine.set_sparsity(sparsity);
    assert!(error(&logits(&mut engine, &PASSES), &dense) < 1e-5);
}

/// Keeps |act(gate)| of one layer.
struct Magnitudes {
    layer: usize,
    activation: dynamicinfer::model::Activation,
    all: Vec<f32>,
}

impl Observer for Magnitudes {
    fn layer(&mut self, seen: &Seen<'_>) {
        if seen.layer == self.layer {
            self.all.extend(seen.gates.iter().map(|&gate| self.activation.apply(gate).abs()));
        }
    }
}

/// Thresholds that leave out about half of each layer, in the middle of the widest gaps there: no rounding decides.
fn halves(engine: &mut Engine, tokens: &[u32]) -> Vec<f32> {
    let c = engine.model.config.clone();
    let mut thresholds = vec![0.0; c.layers().len()];
    for layer in 0..c.layers().len() {
        let choices = thresholds.iter().map(|&activation_threshold| Choice::Exact { activation_threshold }).collect();
        engine.set_sparsity(Sparsity::new(choices, 0).unwrap());
        let mut seen = Magnitudes { layer, activation: c.activation, all: Vec::new() };
        let mut kv = KvCache::new(&c, tokens.len(), KvType::F32).unwrap();
        for token in tokens {
            engine.forward_observed(&mut kv, &[*token], Logits::Last, &mut seen);
        }
        seen.all.sort_by(f32::total_cmp);
        let middle = &seen.all[seen.all.len() * 2 / 5..seen.all.len() * 3 / 5];
        let widest = middle.windows(2).max_by(|a, b| (a[1] - a[0]).total_cmp(&(b[1] - b[0]))).unwrap();
        thresholds[layer] = (widest[0] + widest[1]) / 2.0;
    }
    thresholds
}

/// Only where it is asked for: prompts stay dense. What is computed and counted is the same whether somebody looks on or not.
#[test]
fn gates_leave_out_the_same_of_a_chunk_as_of_a_token() {
    let ids = tokens(40);
    for name in ["llama", "mistral", "qwen3"] {
        let mut engine = engine(name, 2);
        let thresholds = halves(&mut engine, &ids);
        let choices =
            || thresholds.iter().map(|&activation_threshold| Choice::Exact { activation_threshold }).collect();
        engine.set_sparsity(Sparsity::new(choices(), 0).unwrap());
        let one_by_one = logits(&mut engine, &[1; 40]);
        let dense = logits(&mut engine, &[40]);
        let mut sparsity = Sparsity::new(choices(), 0).unwrap();
        assert!(sparsity.set_gates_chunks(true));
        engine.set_sparsity(sparsity);
        let chunk = logits(&mut engine, &[40]);
        assert!(error(&chunk, &one_by_one) < 1e-4, "{name}: {}", error(&chunk, &one_by_one));
        assert!(error(&chunk, &dense) > 1e-3, "{name} left nothing out");
        let mut audit = Audit::of(&engine);
        let mut kv = KvCache::new(&engine.model.config, ids.len(), KvType::F32).unwrap();
        let observed = engine.forward_observed(&mut kv, &ids, Logits::All, &mut audit).to_vec();
        assert_eq!(observed, chunk, "{name}");
        let (all, _) = audit.shares();
        assert_eq!((all.computed_share, all.recall), (all.active_share, 1.0), "{name}");
        assert!((0.35..0.65).contains(&all.active_share), "{name}: {}", all.active_share);
    }
    assert!(!Sparsity::dense(2).set_gates_chunks(true));
}
