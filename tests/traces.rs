//! Activation traces: what is recorded is what the model did, nothing damaged is believed, and what a replay says of policies
//! holds on the demo model and on traces with the statistics of the paper's.

use dynamicinfer::cli::companions;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::{Engine, Logits, Observer, Seen};
use dynamicinfer::error::Error;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::formats::trace_file::{Part, TraceFile};
use dynamicinfer::lab::pack::{PackOptions, pack};
use dynamicinfer::lab::record::{Request, record};
use dynamicinfer::lab::replay::{self, Outcome, Setting, active, bound, frequencies};
use dynamicinfer::lab::synth::trace::{TraceShape, write_trace};
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::placement::policy::{self, Policy as Placement};
use dynamicinfer::predictor::{self, Exact, Predictor};
use dynamicinfer::prng::Prng;
use dynamicinfer::profile::Profile;
use dynamicinfer::scheduler::Policy;
use dynamicinfer::tokenizer::{Special, Tokenizer};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn fixture(name: &str, dir: &Path, orders: Option<Vec<Vec<u32>>>) -> Engine {
    let source = Source::open(&root().join("tests/fixtures/models").join(name), None).unwrap();
    let store = dir.join(format!("{name}-{}.neurons", orders.is_some()));
    pack(&source, &store, &PackOptions { quant: Quant::F32, orders }, &|_, _| Ok(())).unwrap();
    Engine::new(Model::open(&store).unwrap(), 1, Kernels::best())
}

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 5 + i * 37 % 90).collect()
}

fn request(engine: &Engine, texts: Vec<(String, Vec<u32>)>) -> Request {
    let cuts = vec![0.0; engine.model.config.layers];
    let predictor: Arc<dyn Predictor> = Arc::new(Exact::new(&engine.model, &cuts));
    Request { texts, window: 50, kv: KvType::F32, predictor, cuts, ahead: 1, made: serde_json::Value::Null }
}

fn two_texts() -> Vec<(String, Vec<u32>)> {
    vec![("a".into(), ids(70)), ("b".into(), ids(9))]
}

/// Keeps which neurons fired, `[layers][tokens]`.
struct Fired(Vec<Vec<Vec<u32>>>);

impl Observer for Fired {
    fn layer(&mut self, seen: &Seen<'_>) {
        let ffn = seen.activations.len() / seen.n;
        let fired = |row: &[f32]| (0..ffn as u32).filter(|&n| row[n as usize] != 0.0).collect();
        self.0[seen.layer].extend(seen.activations.chunks_exact(ffn).map(fired));
    }
}

#[test]
fn a_trace_holds_what_the_model_did_whatever_the_order_of_its_store() {
    let dir = tempfile::tempdir().unwrap();
    let mut plain = fixture("relullama", dir.path(), None);
    let (layers, ffn) = (plain.model.config.layers, plain.model.config.ffn);
    let mut prng = Prng::new(3);
    let shuffled = (0..layers).map(|_| {
        let mut order: Vec<u32> = (0..ffn as u32).collect();
        (1..ffn).rev().for_each(|i| order.swap(i, prng.below(i as u64 + 1) as usize));
        order
    });
    let mut permuted = fixture("relullama", dir.path(), Some(shuffled.collect()));
    let open = |engine: &mut Engine, name: &str| {
        let path = dir.path().join(name);
        let request = request(engine, two_texts());
        record(engine, &request, &path, |_, _| Ok(())).unwrap();
        TraceFile::open(&path).unwrap()
    };
    let (a, b) = (open(&mut plain, "a.trace"), open(&mut permuted, "b.trace"));
    // The truth, seen once more: the first window of the first text.
    let mut truth = Fired(vec![Vec::new(); layers]);
    let mut kv = KvCache::new(&plain.model.config, 50, KvType::F32).unwrap();
    plain.forward_observed(&mut kv, &ids(50), Logits::None, &mut truth);
    let (mut now, mut other) = (Vec::new(), Vec::new());
    for layer in 0..layers {
        for token in 0..79 {
            active(a.row(Part::Active, layer, token), &mut now);
            active(b.row(Part::Active, layer, token), &mut other);
            assert_eq!(now, other, "layer {layer}, token {token}");
            if token < 50 {
                assert_eq!(now, truth.0[layer][token], "layer {layer}, token {token}");
            }
            // From its own residual the true gate is never wrong: it says yes wherever something fired.
            let own = a.row(Part::Own, layer, token);
            assert!(now.iter().all(|&n| own[n as usize] == 255), "layer {layer}, token {token}");
        }
    }
}

#[test]
fn ctrl_c_keeps_what_was_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = fixture("relullama", dir.path(), None);
    let path = dir.path().join("part.trace");
    let request = request(&engine, two_texts());
    let step = |done, _| if done >= 50 { Err(Error::Interrupted) } else { Ok(()) };
    assert!(matches!(record(&mut engine, &request, &path, step), Err(Error::Interrupted)));
    let trace = TraceFile::open(&path).unwrap();
    assert_eq!(trace.header().texts.iter().map(|t| t.tokens).collect::<Vec<_>>(), [50]);
}

#[test]
fn no_damaged_trace_is_believed() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = fixture("relullama", dir.path(), None);
    let path = dir.path().join("good.trace");
    let request = request(&engine, two_texts());
    record(&mut engine, &request, &path, |_, _| Ok(())).unwrap();
    let good = std::fs::read(&path).unwrap();
    let bad = dir.path().join("bad.trace");
    let mut prng = Prng::new(11);
    // Padding between sections belongs to nobody; everything else is checked.
    let mut refused = 0;
    for _ in 0..300 {
        let mut bytes = good.clone();
        match prng.below(2) {
            0 => bytes.truncate(prng.below(good.len() as u64) as usize),
            _ => bytes[prng.below(good.len() as u64) as usize] ^= 1 << prng.below(8),
        }
        std::fs::write(&bad, &bytes).unwrap();
        match TraceFile::open(&bad) {
            Err(Error::BadFile { .. }) => refused += 1,
            Err(other) => panic!("{other}"),
            Ok(trace) => {
                let good = TraceFile::open(&path).unwrap();
                for layer in 0..trace.header().layers {
                    assert_eq!(trace.row(Part::Active, layer, 5), good.row(Part::Active, layer, 5));
                }
            }
        }
    }
    assert!(refused > 200, "{refused} of 300 were refused");
}

/// A trace of the demo model on its held-out text, and what its profile says is frequent.
fn demo(dir: &Path, tokens: usize) -> (TraceFile, Vec<Vec<f32>>) {
    let store = dir.join("demo.neurons");
    let source = Source::open(&root().join("assets/demo"), None).unwrap();
    pack(&source, &store, &PackOptions { quant: Quant::F16, orders: None }, &|_, _| Ok(())).unwrap();
    let mut engine = Engine::new(Model::open(&store).unwrap(), 2, Kernels::best());
    let model = engine.model.clone();
    let files = root().join("profiles/models/demo");
    let tokenizer = Tokenizer::new(model.tokenizer().unwrap(), &store).unwrap();
    let text = std::fs::read_to_string(root().join("assets/demo/heldout.txt")).unwrap();
    let mut ids = tokenizer.encode_prompt(&text, Special::AsText).unwrap();
    ids.truncate(tokens);
    let request = Request {
        texts: vec![("held out".into(), ids)],
        window: 512,
        kv: KvType::F16,
        predictor: predictor::open(&files.join("mlp.predictor"), &model).unwrap(),
        cuts: vec![0.0; model.config.layers],
        ahead: 1,
        made: serde_json::Value::Null,
    };
    let path: PathBuf = dir.join("demo.trace");
    record(&mut engine, &request, &path, |_, _| Ok(())).unwrap();
    let profile: Profile = companions::profile_at(&model, &files.join("activation.profile")).unwrap();
    let all = profile.texts.iter().map(|t| t.info.tokens).sum::<usize>() as f32;
    let history =
        (0..model.config.layers).map(|l| profile.counts(l).iter().map(|&n| n as f32 / all).collect()).collect();
    (TraceFile::open(&path).unwrap(), history)
}

struct Case<'a> {
    trace: &'a TraceFile,
    history: &'a [Vec<f32>],
    skip: usize,
}

impl Case<'_> {
    /// A replay, and the bound of it.
    fn run(&self, policy: Policy, placement: Placement, share: f64, link_percent: f64) -> (Outcome, f64) {
        let counts: Vec<Vec<u64>> =
            self.history.iter().map(|f| f.iter().map(|&f| (f64::from(f) * 1e9) as u64).collect()).collect();
        let slots = replay::slots(&counts, share);
        let placed = policy::neurons(placement, &counts, &slots, 1);
        let link = link_percent / 100.0 * self.trace.header().ffn as f64;
        let most = bound(self.trace, self.skip, &slots, &placed, link);
        let setting = Setting {
            rules: policy.rules(),
            slots,
            link,
            placed,
            history: self.history.to_vec(),
            cost: 0.0,
            seed: 1,
            skip: self.skip,
        };
        let outcome = replay::replay(self.trace, &setting);
        assert!(outcome.hits <= most, "{policy:?}, share {share}, link {link_percent} %: more than is possible");
        (outcome, most as f64 / outcome.active as f64)
    }
}

#[test]
fn the_plan_beats_chance_on_the_demo_model_at_every_budget() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, history) = demo(dir.path(), 1024);
    let case = Case { trace: &trace, history: &history, skip: 0 };
    for share in [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9] {
        let of = |placement| case.run(Policy::Static, placement, share, 2.0).0.gpu_share();
        let (planned, random) = (of(Placement::Static), of(Placement::Random));
        assert!(planned > random, "at {share}: {planned} planned, {random} at random");
    }
}

#[test]
fn full_closes_half_of_the_gap_and_no_policy_exceeds_the_bound() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("paper.trace");
    let shape = TraceShape { layers: 4, ffn: 1024, texts: 8, tokens_per_text: 120, ..TraceShape::paper() };
    write_trace(&shape, &path, |_, _| Ok(())).unwrap();
    let trace = TraceFile::open(&path).unwrap();
    let (tokens, texts) = replay::likeness(&trace);
    assert!((0.70..=0.75).contains(&tokens), "tokens are {tokens} apart");
    assert!((0.53..=0.60).contains(&texts.unwrap()), "texts are {texts:?} apart");
    let history = frequencies(&trace, |text| text < 4);
    let case = Case { trace: &trace, history: &history, skip: 4 };
    for share in [0.3, 0.5, 0.7] {
        for link in [2.0, 5.0, 15.0] {
            let of = |policy| case.run(policy, Placement::Static, share, link);
            let ((fixed, most), (full, _)) = (of(Policy::Static), of(Policy::Full));
            let (fixed, full) = (fixed.gpu_share(), full.gpu_share());
            assert!(
                full - fixed >= 0.5 * (most - fixed),
                "{share}, {link} %: {fixed} static, {full} full, {most} bound"
            );
            for policy in [Policy::Micro, Policy::Macro, Policy::Lru, Policy::Random] {
                of(policy);
            }
        }
    }
}

/// Where every token needs other neurons and none is foreseen, moving wins nothing; it notices and rests.
#[test]
fn where_moving_does_not_pay_the_static_placement_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("restless.trace");
    let shape = TraceShape {
        layers: 4,
        ffn: 512,
        texts: 4,
        tokens_per_text: 400,
        locality: 0.0,
        ahead: 3,
        ..TraceShape::paper()
    };
    write_trace(&shape, &path, |_, _| Ok(())).unwrap();
    let trace = TraceFile::open(&path).unwrap();
    let history = frequencies(&trace, |text| text < 2);
    let case = Case { trace: &trace, history: &history, skip: 2 };
    let counts: Vec<Vec<u64>> =
        history.iter().map(|f| f.iter().map(|&f| (f64::from(f) * 1e9) as u64).collect()).collect();
    let slots = replay::slots(&counts, 0.7);
    let placed = policy::neurons(Placement::Static, &counts, &slots, 1);
    let setting = |cost| Setting {
        rules: Policy::Full.rules(),
        slots: slots.clone(),
        link: 50.0,
        placed: placed.clone(),
        history: history.clone(),
        cost,
        seed: 1,
        skip: 2,
    };
    let fixed = case.run(Policy::Static, Placement::Static, 0.7, 10.0).0.gpu_share();
    let dear = replay::replay(&trace, &setting(1.0));
    assert!(dear.moving < 0.5, "moved in {} of the tokens", dear.moving);
    assert!(dear.gpu_share() >= fixed - 0.01, "{} beside {fixed}", dear.gpu_share());
}
