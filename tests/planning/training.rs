//! Laws of training predictors: what can be learned is learned, the same seed gives the same file however many threads and
//! interruptions there were, and easy layers get small networks.

use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::Engine;
use dynamicinfer::error::Error;
use dynamicinfer::formats::predictor_file;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::Permutation;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::pack::{PackOptions, pack};
use dynamicinfer::predictor;
use dynamicinfer::prng::Prng;
use dynamicinfer::training::network::{Training, log_odds};
use dynamicinfer::training::samples::{Pairs, Plan, Samples, collect};
use dynamicinfer::training::train::{self, Job, Options, Summary, calibrate_sign, entropy, networks, search};
use half::f16;
use std::cell::Cell;
use std::path::Path;

const HIDDEN: usize = 64;
const FFN: usize = 96;

/// Tokens whose active neurons follow from few directions of their residuals: neuron i is active where its direction, one of
/// `kinds`, is above a limit.
struct Problem {
    residuals: Vec<f16>,
    labels: Vec<u64>,
    /// One, that every token has.
    experts: Vec<u32>,
    tokens: usize,
}

impl Problem {
    fn new(kinds: usize, tokens: usize) -> Problem {
        let mut rng = Prng::new(11);
        let mut normal = |n: usize| -> Vec<f32> {
            (0..n).map(|_| (0..6).map(|_| rng.next_f64() as f32 - 0.5).sum::<f32>()).collect()
        };
        let directions = normal(kinds * HIDDEN);
        let values = normal(tokens * HIDDEN);
        let words = FFN.div_ceil(64);
        let mut labels = vec![0u64; tokens * words];
        for (x, labels) in values.chunks_exact(HIDDEN).zip(labels.chunks_exact_mut(words)) {
            for neuron in 0..FFN {
                let direction = &directions[neuron % kinds * HIDDEN..][..HIDDEN];
                let dot: f32 = direction.iter().zip(x).map(|(a, b)| a * b).sum();
                labels[neuron / 64] |= u64::from(dot > 4.0) << (neuron % 64);
            }
        }
        let residuals = values.iter().map(|&v| f16::from_f32(v)).collect();
        Problem { residuals, labels, experts: vec![0; tokens], tokens }
    }

    fn pairs(&self) -> Pairs<'_> {
        let (residuals, labels, experts) = (&self.residuals, &self.labels, &self.experts);
        Pairs { residuals, labels, experts, used: 1, hidden: HIDDEN, ffn: FFN }
    }

    /// Share computed to find 95 % of the active neurons among the last eighth of the tokens.
    fn share_at(&self, rank: usize, steps: usize) -> f64 {
        self.trained(rank, steps).histogram(&self.pairs(), self.tokens / 8 * 7..self.tokens).share_at(0.95)
    }

    fn trained(&self, rank: usize, steps: usize) -> Training {
        let train = 0..self.tokens / 8 * 7;
        let odds = log_odds(&self.pairs().counts(1, train.clone()).1, train.len());
        let mut training = Training::new(HIDDEN, rank, &odds, 1, 5);
        training.run(&self.pairs(), train, steps, 5, || Ok(())).unwrap();
        training
    }
}

#[test]
fn a_separable_problem_is_learned() {
    let problem = Problem::new(4, 8192);
    let pairs = problem.pairs();
    let held_back = problem.tokens / 8 * 7..problem.tokens;
    let active: u64 = pairs.counts(1, held_back.clone()).1.iter().sum();
    let active = active as f64 / (held_back.len() * FFN) as f64;
    assert!((0.03..0.3).contains(&active), "{active} are active: the problem is not one");
    // With few more neurons than are active, 95 % are found; knowing the rates alone it takes most of them. Residuals of other
    // lengths have other limits once they are normalised, so that it cannot be perfect.
    let (blind, seeing) = (problem.share_at(0, 0), problem.share_at(32, 1000));
    assert!(seeing < 1.2 * active && blind > 2.0 * active, "{seeing} with a network, {blind} without, {active} active");
}

#[test]
fn a_seed_gives_the_same_weights_on_any_number_of_threads() {
    let problem = Problem::new(4, 2048);
    let weights = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| problem.trained(32, 20).weights())
    };
    let (one, three) = (weights(1), weights(3));
    assert!(one.inner == three.inner && one.outer == three.outer && one.outer_bias == three.outer_bias);
}

#[test]
fn a_network_grows_while_that_pays_and_shrinks_where_it_does_not() {
    // Share computed by rank, as if trained; a rank of 100 costs a hundredth of the neurons.
    let cost = |limit: usize| move |rank: usize| if rank <= limit { rank as f64 / 1e4 } else { f64::INFINITY };
    let searched = |first: usize, limit: usize, share: fn(usize) -> f64| {
        search(first, cost(limit), |rank| Ok(share(rank))).unwrap()
    };
    // Nothing is won: the bias alone.
    assert_eq!(searched(96, 4096, |_| 0.3).0, 0);
    // A rank of 32 is enough.
    assert_eq!(searched(224, 4096, |rank| if rank == 0 { 0.5 } else { 0.2 }).0, 32);
    // Each doubling wins a fifth up to 224.
    let (rank, trials) = searched(32, 4096, |rank| 0.5 * 0.8f64.powf((rank.clamp(32, 224) as f64 / 32.0).log2()));
    assert_eq!(rank, 224);
    assert!(trials.windows(2).all(|t| t[0].rank < t[1].rank), "{trials:?}");
    // A limit on bytes holds, and is used.
    assert_eq!(searched(512, 128, |rank| 1.0 / (1.0 + rank as f64 / 32.0)).0, 128);
    assert_eq!(searched(0, 128, |rank| 1.0 / (1.0 + rank as f64 / 32.0)).0, 96);
    // An easy layer needs a small network in truth, too.
    let problem = Problem::new(4, 8192);
    let (rank, trials) = search(96, |rank| rank as f64 / 1e3, |rank| Ok(problem.share_at(rank, 600))).unwrap();
    assert_eq!(rank, 32, "{trials:?}");
}

#[test]
fn entropy_falls_with_sparsity_and_with_skew() {
    let bits = |counts: &[u64]| entropy(counts, 1000);
    assert!((bits(&[500; 8]) - 1.0).abs() < 1e-12);
    assert!(bits(&[50; 8]) < 0.3);
    // The same activity in one neuron alone says nothing about which.
    assert_eq!(bits(&[1000, 0, 0, 0]), 0.0);
}

fn model(dir: &Path) -> Model {
    let path = dir.join("m.neurons");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/relullama");
    let order = |l| Permutation::new(&(0..96u32).map(|n| (n * 5 + l) % 96).collect::<Vec<_>>()).unwrap();
    let options = PackOptions { types: Quant::F32.into(), orders: Some((0..2).map(order).collect()) };
    pack(&Source::open(&from, None).unwrap(), &path, &options, &|_, _| Ok(())).unwrap();
    Model::open(&path).unwrap()
}

fn options(model: &Model) -> Options {
    Options {
        ahead: vec![1, 2],
        recall: 0.9,
        // This model is so small that biases alone are more than a tenth of it.
        budget: 1 << 20,
        seed: 7,
        activation_thresholds: vec![0.0; model.config.layers().len()],
        made: serde_json::json!({}),
    }
}

/// An engine of the tiny model, and samples of its activity on noise.
fn sampled(dir: &Path) -> (Engine, Samples, Vec<u32>, Plan) {
    let model = model(dir);
    let mut rng = Prng::new(3);
    let vocab = model.config.vocab as u64;
    let tokens: Vec<u32> = (0..2500).map(|_| rng.below(vocab) as u32).collect();
    let plan = Plan::new(&model, tokens.len(), 2048).unwrap();
    let mut engine = Engine::new(model, 2, Kernels::best());
    let samples = collect(&mut engine, &tokens, &plan, &[0.0; 2], &dir.join("samples"), |_, _| Ok(())).unwrap();
    (engine, samples, tokens, plan)
}

#[test]
fn samples_are_what_the_model_does() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, samples, tokens, _) = sampled(dir.path());
    let extent = samples.extent;
    assert_eq!((extent.layers, extent.hidden, extent.ffn), (2, 64, 96));
    assert!(extent.train > 4 * extent.held_back && extent.held_back > 0 && extent.tokens() <= 2048 + 512, "{extent:?}");

    // The first window's first tokens, run again: neurons that the samples call active are those that fire.
    struct Look<'a>(&'a Samples, Vec<Permutation>);
    impl dynamicinfer::engine::Observer for Look<'_> {
        fn layer(&mut self, seen: &dynamicinfer::engine::Seen<'_>) {
            let Look(samples, orders) = self;
            for t in 0..seen.n {
                for (place, neuron) in orders[seen.layer].table().unwrap().iter().enumerate() {
                    let word = samples.labels(seen.layer)[t * 2 + neuron.index() / 64];
                    let active = seen.activations[t * 96 + place] != 0.0;
                    assert_eq!(
                        word >> (neuron.index() % 64) & 1 == 1,
                        active,
                        "layer {} token {t} place {place}",
                        seen.layer
                    );
                }
                let residual = &samples.residuals(seen.layer)[t * 64..][..64];
                let same = residual.iter().zip(&seen.residual[t * 64..]).all(|(a, b)| *a == f16::from_f32(*b));
                assert!(same, "layer {} token {t}", seen.layer);
            }
        }
    }
    let orders = engine.model.layers.iter().map(|l| l.order.clone()).collect();
    let mut kv = KvCache::new(&engine.model.config, 128, KvType::F16).unwrap();
    engine.forward_observed(&mut kv, &tokens[..128], dynamicinfer::engine::Logits::None, &mut Look(&samples, orders));
    assert!(Samples::open(&dir.path().join("samples"), extent).is_some());
    assert!(
        Samples::open(&dir.path().join("samples"), dynamicinfer::training::samples::Extent { train: 1, ..extent })
            .is_none()
    );
}

#[test]
fn an_interrupted_training_goes_on_to_the_same_file_and_reaches_its_recall() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, samples, ..) = sampled(dir.path());
    let options = options(&engine.model);
    let run = |name: &str, step: &dyn Fn(f64, usize) -> Result<(), Error>| -> Result<Summary, Error> {
        let output = dir.path().join(format!("{name}.predictor"));
        let (model, kernels, threads) = (&engine.model, &engine.kernels, engine.threads());
        let job = Job { model, kernels, threads, samples: &samples, options: &options, output: &output };
        train::train(job, &dir.path().join(format!("{name}.parts")), step)
    };
    let whole = run("whole", &|_, _| Ok(())).unwrap();
    // Stopped within the second of three networks.
    let stopped = run("cut", &|done, _| if done > 1.2 { Err(Error::Interrupted) } else { Ok(()) });
    assert!(matches!(stopped, Err(Error::Interrupted)));
    assert!(!dir.path().join("cut.predictor").exists());
    let least = Cell::new(f64::INFINITY);
    run("cut", &|done, _| {
        least.set(least.get().min(done));
        Ok(())
    })
    .unwrap();
    assert!(least.get() >= 1.0, "the first network was trained again");
    let bytes = |name: &str| std::fs::read(dir.path().join(format!("{name}.predictor"))).unwrap();
    assert!(bytes("whole") == bytes("cut"), "the files differ");

    assert_eq!(networks(2, &[1, 2]), [(0, 0), (1, 0), (1, 1)]);
    assert_eq!(whole.rows.iter().map(|r| (r.layer, r.ahead)).collect::<Vec<_>>(), [(0, 0), (1, 0), (1, 1)]);
    for row in &whole.rows {
        assert!(row.recall >= 0.9 && row.computed_share <= 1.0, "{row:?}");
    }
    let path = dir.path().join("whole.predictor");
    let file = predictor_file::open(&path).unwrap();
    let opened = predictor::open(&path, &engine.model).unwrap();
    for (table, row) in file.header.tables.iter().zip(&whole.rows) {
        assert_eq!((table.rank, table.recall), (row.rank, row.recall));
        assert_eq!(opened.threshold(row.layer, row.ahead), row.threshold);
    }
}

#[test]
fn a_calibrated_sign_predictor_has_an_alpha_per_layer_that_reaches_the_recall() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, samples, ..) = sampled(dir.path());
    let (options, output) = (options(&engine.model), dir.path().join("s.predictor"));
    let (model, kernels) = (&engine.model, &engine.kernels);
    let job = Job { model, kernels, threads: 2, samples: &samples, options: &options, output: &output };
    let summary = calibrate_sign(job, &|_, _| Ok(())).unwrap();
    for row in &summary.rows {
        assert!((0.9..0.98).contains(&row.recall), "{row:?}");
    }
    let opened = predictor::open(&output, model).unwrap();
    assert_eq!(opened.kind(), predictor::Kind::Sign);
    let table = opened.calibration(1, 1).unwrap();
    let alpha = predictor::sign::alpha_of_score(table.score_at(opened.threshold(1, 1)));
    assert_eq!(Some(alpha), summary.rows[2].alpha);
}
