//! Laws of the predictors: they compute what their definitions say, on every instruction set, in any batch and any order of
//! neurons; and a predictor file that is not right is refused with what to do about it.

use crate::support::law::all_exact;
use crate::support::{RATES, on_device};
use dynamicinfer::cpu::sign::{self, BitLine};
use dynamicinfer::cpu::{Isa, Kernels, ThreadPool};
use dynamicinfer::device::VirtualDevice;
use dynamicinfer::engine::{Choice, Engine, Sparsity};
use dynamicinfer::formats::predictor_file::Header;
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::ids::Permutation;
use dynamicinfer::model::Model;
use dynamicinfer::model::source::Source;
use dynamicinfer::ops::math;
use dynamicinfer::pack::{PackOptions, pack};
use dynamicinfer::predictor::mlp::{self, Measured, Network};
use dynamicinfer::predictor::{self, Calibration, Exact, Mlp, Predictor, Scratch, Sign, Tools};
use dynamicinfer::prng::Prng;
use proptest::prelude::*;
use serde_json::{Value as Json, json};
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

fn normal(rng: &mut Prng, n: usize) -> Vec<f32> {
    (0..n).map(|_| (0..4).map(|_| rng.next_f64() as f32 * 2.0 - 1.0).sum::<f32>()).collect()
}

fn supported() -> Vec<Kernels> {
    Isa::ALL.into_iter().filter_map(Kernels::of).collect()
}

/// A tiny model of the fixtures: hidden 64, two layers of 96 neurons.
fn model(dir: &Path, name: &str, quant: Quant, orders: Option<Vec<Permutation>>) -> Model {
    let path = dir.join(format!("{name}-{}-{}.neurons", quant.name(), orders.is_some()));
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name);
    pack(&Source::open(&from, None).unwrap(), &path, &PackOptions { types: quant.into(), orders }, &|_, _| Ok(()))
        .unwrap();
    Model::open(&path).unwrap()
}

fn orders(model: &Model) -> Vec<Permutation> {
    let (layers, ffn) = (model.config.layers().len(), model.config.widest_ffn() as u32);
    let numbers = |l| (0..ffn).map(|n| (n * 5 + l) % ffn).collect::<Vec<_>>();
    (0..layers as u32).map(|l| Permutation::new(&numbers(l)).unwrap()).collect()
}

/// Scores of `n` columns.
fn scores(
    p: &dyn Predictor,
    model: &Model,
    kernels: &Kernels,
    threads: usize,
    at: (usize, usize),
    residual: &[f32],
) -> Vec<f32> {
    let n = residual.len() / model.config.hidden;
    let mut out = vec![f32::NAN; n * model.config.widest_ffn()];
    let (mut pool, mut room) = (ThreadPool::new(threads), Scratch::default());
    p.score(&mut Tools { model, pool: &mut pool, kernels, scratch: &mut room }, at.0, at.1, residual, n, &mut out);
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn sign_scores_are_the_share_of_matching_minus_that_of_differing_signs(
        seed in any::<u64>(), cols in 1usize..1400, count in 1usize..9, n in 1usize..=32
    ) {
        let mut rng = Prng::new(seed);
        // Zeros of both signs are positive.
        let mut numbers = |n| -> Vec<f32> {
            normal(&mut rng, n).into_iter().enumerate().map(|(i, v)| match i % 11 { 3 => 0.0, 7 => -0.0, _ => v }).collect()
        };
        let (rows, columns) = (numbers(count * cols), numbers(n * cols));
        let lines = sign::lines(cols);
        let pack = |values: &[f32]| {
            let mut bits = vec![BitLine::default(); values.len() / cols * lines];
            for (values, bits) in values.chunks_exact(cols).zip(bits.chunks_exact_mut(lines)) {
                sign::pack(values, bits);
            }
            bits
        };
        let (row_bits, column_bits) = (pack(&rows), pack(&columns));
        for isa in Isa::ALL.into_iter().filter(|i| i.is_supported()) {
            let mut out = vec![f32::NAN; n * (count + 1)];
            sign::scores(isa, &row_bits, &column_bits, cols, &mut out, count + 1);
            for b in 0..n {
                for r in 0..count {
                    let pairs = rows[r * cols..][..cols].iter().zip(&columns[b * cols..][..cols]);
                    let sum: i32 = pairs.map(|(w, x)| if (*w < 0.0) == (*x < 0.0) { 1 } else { -1 }).sum();
                    let wanted = sum as f32 * (1.0 / cols as f32);
                    prop_assert_eq!(out[b * (count + 1) + r], wanted, "{} row {} column {}", isa.name(), r, b);
                }
            }
        }
    }
}

#[test]
fn the_sign_predictor_compares_signs_of_gate_rows_and_the_normed_residual() {
    let dir = tempfile::tempdir().unwrap();
    for (name, quant) in
        [("relullama", Quant::F16), ("bamboo", Quant::Q8), ("opt", Quant::F32), ("relullama", Quant::Q4)]
    {
        let model = model(dir.path(), name, quant, None);
        let c = &model.config;
        let residual = normal(&mut Prng::new(5), 3 * c.hidden);
        let predictor = Sign::uncalibrated(&model);
        // From a layer before, the target layer's norm and rows are applied.
        for (layer, ahead) in [(0, 0), (1, 0), (1, 1)] {
            let found = scores(&predictor, &model, &Kernels::best(), 2, (layer, ahead), &residual);
            let layer = &model.layers[layer];
            let mut row = vec![0.0; c.hidden];
            let mut normed = vec![0.0; c.hidden];
            for (b, x) in residual.chunks_exact(c.hidden).enumerate() {
                math::norm(c.norm, &layer.ffn_norm, x, &mut normed);
                for neuron in 0..c.widest_ffn() {
                    rows::decode(quant, layer.neurons().part(layer.block().gate_or_up(), neuron), &mut row);
                    let same = row.iter().zip(&normed).filter(|(w, x)| (**w < 0.0) == (**x < 0.0)).count() as f32;
                    let score = (2.0 * same - c.hidden as f32) / c.hidden as f32;
                    assert_eq!(found[b * c.widest_ffn() + neuron], score, "{name} neuron {neuron}");
                }
            }
        }
    }
}

#[test]
fn without_a_calibration_threshold_one_half_means_the_papers_alphas() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), "relullama", Quant::F16, None);
    let predictor = Sign::uncalibrated(&model);
    assert_eq!(predictor.threshold(1, 0), 0.5);
    for (layer, alpha) in [(0, 1.03f64), (1, 1.0)] {
        let activation_threshold = predictor.calibration(layer, 0).unwrap().score_at(0.5);
        // Of 4096 signs these match: SparseInfer computes a neuron unless alpha * matching < differing.
        for matching in 0..=4096 {
            let differing = 4096 - matching;
            let score = (matching - differing) as f32 / 4096.0;
            let computed = alpha * matching as f64 >= differing as f64;
            assert_eq!(score >= activation_threshold, computed, "layer {layer}: {matching} of 4096");
        }
    }
    assert!((predictor::sign::alpha_of_score(predictor::sign::score_of_alpha(1.02)) - 1.02).abs() < 1e-6);
}

fn network(rng: &mut Prng, model: &Model, layer: usize, ahead: usize, rank: usize) -> Network {
    let (h, ffn) = (model.config.hidden, model.config.widest_ffn());
    Network {
        layer,
        ahead,
        inner: normal(rng, rank * h),
        inner_bias: normal(rng, rank),
        outer: normal(rng, ffn * rank),
        outer_bias: normal(rng, ffn),
        calibration: Calibration::new(vec![-1.0, 0.5], vec![0.1, 0.75]),
        measured: Measured { recall: 0.9, precision: 0.5, computed_share: 0.25 },
    }
}

fn header(model: &Model) -> Header {
    Header {
        fingerprint: model.fingerprint().to_owned(),
        model: model.config.name.clone(),
        kind: String::new(),
        layers: model.config.layers().len(),
        hidden: model.config.hidden,
        ffn: model.config.widest_ffn(),
        experts: 1,
        threshold: 0.25,
        activation_thresholds: vec![0.0; model.config.layers().len()],
        tables: Vec::new(),
        made: json!({}),
        sections: Vec::new(),
    }
}

/// Own layers at ranks 32 and 0, one look-ahead at 96.
fn write_mlp(path: &Path, model: &Model, seed: u64) -> Vec<Network> {
    let mut rng = Prng::new(seed);
    let networks: Vec<Network> =
        [(0, 0, 32), (1, 0, 0), (1, 1, 96)].map(|(l, a, r)| network(&mut rng, model, l, a, r)).into();
    mlp::write(path, header(model), &networks).unwrap();
    networks
}

/// The definition, in f64.
fn mlp_truth(n: &Network, x: &[f32]) -> Vec<f64> {
    let rms = (x.iter().map(|&v| v as f64 * v as f64).sum::<f64>() / x.len() as f64 + 1e-6).sqrt();
    let x: Vec<f64> = x.iter().map(|&v| v as f64 / rms).collect();
    let dot = |w: &[f32], x: &[f64]| w.iter().zip(x).map(|(&w, x)| w as f64 * x).sum::<f64>();
    let inner: Vec<f64> = (0..n.rank())
        .map(|r| (dot(&n.inner[r * x.len()..][..x.len()], &x) + n.inner_bias[r] as f64).max(0.0))
        .collect();
    n.outer_bias
        .iter()
        .enumerate()
        .map(|(i, &bias)| dot(&n.outer[i * n.rank()..][..n.rank()], &inner) + bias as f64)
        .collect()
}

#[test]
fn a_written_mlp_opens_and_scores_as_the_definition_says() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), "relullama", Quant::F16, None);
    let path = dir.path().join("m.predictor");
    let networks = write_mlp(&path, &model, 3);
    let opened = predictor::open(&path, &model).unwrap();
    assert_eq!((opened.kind().name(), opened.threshold(0, 0)), ("mlp", 0.25));
    assert!(opened.calibration(0, 1).is_none() && opened.calibration(1, 2).is_none());
    let residual = normal(&mut Prng::new(9), 4 * model.config.hidden);
    for n in &networks {
        let at = (n.layer, n.ahead);
        assert_eq!(opened.calibration(n.layer, n.ahead), Some(&n.calibration));
        let bytes = opened.weight_bytes(n.layer, n.ahead);
        assert!(bytes > 0 && bytes <= mlp::file_bytes(model.config.hidden, model.config.widest_ffn(), n.rank()));
        for kernels in supported() {
            let found = scores(&*opened, &model, &kernels, 2, at, &residual);
            for (b, x) in residual.chunks_exact(model.config.hidden).enumerate() {
                let truth = mlp_truth(n, x);
                // int8 weights and inputs round twice; logits here are tens.
                let scale = truth.iter().fold(1.0, |m: f64, v| m.max(v.abs()));
                for (i, t) in truth.iter().enumerate() {
                    let f = found[b * model.config.widest_ffn() + i] as f64;
                    assert!((f - t).abs() <= 0.02 * scale, "{at:?} {} neuron {i}: {f}, truth {t}", kernels.isa.name());
                }
            }
        }
    }
}

fn exact(model: &Model) -> Exact {
    Exact::new(model, &vec![0.0; model.config.layers().len()])
}

#[test]
fn exact_looking_ahead_is_the_target_layers_gate() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["relullama", "opt"] {
        let model = model(dir.path(), name, Quant::F32, None);
        let c = &model.config;
        let residual = normal(&mut Prng::new(5), 3 * c.hidden);
        let found = scores(&exact(&model), &model, &Kernels::best(), 2, (1, 1), &residual);
        let layer = &model.layers[1];
        let (mut row, mut normed) = (vec![0.0; c.hidden], vec![0.0; c.hidden]);
        for (b, x) in residual.chunks_exact(c.hidden).enumerate() {
            math::norm(c.norm, &layer.ffn_norm, x, &mut normed);
            for neuron in 0..c.widest_ffn() {
                rows::decode(Quant::F32, layer.neurons().part(layer.block().gate_or_up(), neuron), &mut row);
                let bias = if name == "opt" { layer.up_bias[neuron] } else { 0.0 };
                let gate = dynamicinfer::cpu::reference::dot(&row, &normed) as f32 + bias;
                let score = found[b * c.widest_ffn() + neuron];
                assert!((score - gate.max(0.0)).abs() < 1e-4, "{name} neuron {neuron}: {score}, gate {gate}");
            }
        }
    }
}

#[test]
fn batches_and_threads_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), "relullama", Quant::F16, None);
    let path = dir.path().join("m.predictor");
    write_mlp(&path, &model, 3);
    let sign = Sign::uncalibrated(&model);
    let exact = exact(&model);
    let mlp = predictor::open(&path, &model).unwrap();
    let h = model.config.hidden;
    let residual = normal(&mut Prng::new(9), 32 * h);
    for p in [&sign as &dyn Predictor, &exact, &*mlp] {
        for kernels in supported() {
            let together = scores(p, &model, &kernels, 1, (1, 1), &residual);
            assert_eq!(together, scores(p, &model, &kernels, 3, (1, 1), &residual), "{:?} threads", p.kind());
            for (x, together) in residual.chunks_exact(h).zip(together.chunks_exact(model.config.widest_ffn())) {
                let alone = scores(p, &model, &kernels, 1, (1, 1), x);
                // Tiles of many columns add in another order than single ones.
                let close = alone.iter().zip(together).all(|(a, t)| (a - t).abs() <= 1e-4 * (1.0 + t.abs()));
                assert!(close, "{:?} {}", p.kind(), kernels.isa.name());
            }
        }
    }
}

#[test]
fn a_permuted_store_gives_each_neuron_the_same_score() {
    let dir = tempfile::tempdir().unwrap();
    let plain = model(dir.path(), "relullama", Quant::F16, None);
    let permuted = model(dir.path(), "relullama", Quant::F16, Some(orders(&plain)));
    assert_eq!(plain.fingerprint(), permuted.fingerprint());
    let path = dir.path().join("m.predictor");
    write_mlp(&path, &plain, 3);
    let residual = normal(&mut Prng::new(9), 2 * plain.config.hidden);
    let every = |model: &Model, at: (usize, usize)| -> [Vec<f32>; 3] {
        let (sign, exact, mlp) = (Sign::uncalibrated(model), exact(model), predictor::open(&path, model).unwrap());
        [&sign as &dyn Predictor, &exact, &*mlp].map(|p| scores(p, model, &Kernels::best(), 2, at, &residual))
    };
    for (layer, ahead) in [(0, 0), (1, 0), (1, 1)] {
        let order = permuted.layers[layer].order.table().unwrap();
        for (before, after) in every(&plain, (layer, ahead)).iter().zip(&every(&permuted, (layer, ahead))) {
            for (before, after) in before.chunks_exact(96).zip(after.chunks_exact(96)) {
                assert!(order.iter().zip(after).all(|(neuron, score)| *score == before[neuron.index()]));
            }
        }
    }
}

fn refusal(path: &Path, model: &Model) -> String {
    predictor::open(path, model).err().expect("it is refused").to_string()
}

/// Rewrites a file's header; what it says about itself is right again, but for what `change` did.
fn change_header(path: &Path, change: impl FnOnce(&mut Json)) {
    let mut bytes = std::fs::read(path).unwrap();
    let at = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) as usize;
    let mut header: Json = serde_json::from_slice(&bytes[at..]).unwrap();
    change(&mut header);
    let text = serde_json::to_vec(&header).unwrap();
    bytes.truncate(at);
    bytes.extend(&text);
    let end = bytes.len() as u64;
    bytes[24..32].copy_from_slice(&(text.len() as u64).to_le_bytes());
    bytes[32..40].copy_from_slice(&xxh3_64(&text).to_le_bytes());
    bytes[40..48].copy_from_slice(&end.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn bad_predictor_files_are_refused_with_file_field_and_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), "relullama", Quant::F16, None);
    let path = dir.path().join("m.predictor");
    type Damage = Box<dyn FnOnce()>;
    let json = |change: fn(&mut Json)| -> Damage {
        let path = path.clone();
        Box::new(move || change_header(&path, change))
    };
    let bytes = |change: fn(&mut Vec<u8>)| -> Damage {
        let path = path.clone();
        Box::new(move || {
            let mut bytes = std::fs::read(&path).unwrap();
            change(&mut bytes);
            std::fs::write(&path, bytes).unwrap();
        })
    };
    let cases: Vec<(&str, Damage)> = vec![
        ("it does not begin with PREDICT", bytes(|b| b.clear())),
        ("file length: says", bytes(|b| b.truncate(b.len() - 9))),
        ("layer.0.ahead.0.outer_bias: checksum", bytes(|b| b[4096 + 5] ^= 1)),
        ("version: is 9", bytes(|b| b[8] = 9)),
        ("fingerprint: is another model's", json(|h| h["fingerprint"] = json!("0123"))),
        ("ffn: is 95, the model has 96", json(|h| h["ffn"] = json!(95))),
        ("kind: 'oracle' is neither mlp nor sign", json(|h| h["kind"] = json!("oracle"))),
        ("kind: 'exact' is neither mlp nor sign", json(|h| h["kind"] = json!("exact"))),
        ("threshold: is 1.5, not a probability", json(|h| h["threshold"] = json!(1.5))),
        ("layer.0.ahead.0.inner: rank 33 is not a multiple", json(|h| h["tables"][0]["rank"] = json!(33))),
        ("layer.0.ahead.0.inner: rank 9007199254740992", json(|h| h["tables"][0]["rank"] = json!(1u64 << 53))),
        ("layer.0.ahead.0.inner_bias: is Rows", json(|h| h["tables"][0]["rank"] = json!(64))),
        ("layer.1.ahead.0.inner_bias: the section is missing", json(|h| h["tables"][1]["rank"] = json!(32))),
        (
            "layer 1 from 0 before: scores and probabilities are not rising",
            json(|h| h["tables"][1]["scores"] = json!([1.0, -1.0])),
        ),
        ("layer 7 from 0 before: there is no such layer", json(|h| h["tables"][1]["layer"] = json!(7))),
        ("header: not understood", json(|h| h["surprise"] = json!(1))),
    ];
    for (wanted, damage) in cases {
        write_mlp(&path, &model, 3);
        predictor::open(&path, &model).unwrap();
        damage();
        let message = refusal(&path, &model);
        let named = message.contains("m.predictor") && message.contains(wanted);
        assert!(named && message.contains("train-predictor MODEL"), "'{wanted}' expected in: {message}");
    }

    // Numbers that are none, with right checksums.
    for (wanted, damage) in [
        ("layer.0.ahead.0.outer_bias: number 2 is NaN", (|n| n.outer_bias[2] = f32::NAN) as fn(&mut Network)),
        ("layer.0.ahead.0.inner_bias: number 1 is inf", |n| n.inner_bias[1] = f32::INFINITY),
        ("layer.0.ahead.0.outer: a scale of row 1 is not a number", |n| n.outer[32] = f32::INFINITY),
    ] {
        let mut n = network(&mut Prng::new(1), &model, 0, 0, 32);
        damage(&mut n);
        mlp::write(&path, header(&model), &[n]).unwrap();
        let message = refusal(&path, &model);
        assert!(message.contains(wanted) && message.contains("train-predictor MODEL"), "'{wanted}' in: {message}");
    }

    // A sign file is made by another command.
    write_mlp(&path, &model, 3);
    change_header(&path, |h| (h["kind"], h["fingerprint"]) = (json!("sign"), json!("0")));
    assert!(refusal(&path, &model).contains("`dynamicinfer calibrate MODEL`"));
}

#[test]
fn predictors_are_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Sign>();
    shared::<Mlp>();
    shared::<Exact>();
}

/// What predicts for the scheduler used the upload of the signs by which the engine chooses; after a while with another predictor, the signs
/// were there twice.
#[test]
fn predictors_take_the_same_device_memory_after_others_had_their_place() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), "relullama", Quant::Q8, None);
    let layers = model.config.layers().len();
    let sign: Arc<dyn Predictor> = Arc::new(Sign::uncalibrated(&model));
    let signs = |ahead| {
        let choice = Choice::Predicted { predictor: sign.clone(), threshold: 0.5, activation_threshold: 0.0 };
        Sparsity::new(vec![choice; layers], ahead).unwrap()
    };
    let device = Box::new(VirtualDevice::new(u64::MAX, RATES));
    // SAFETY: the engine drops its device's part before its model: it has both.
    let mut split = unsafe { on_device(&model, device, &vec![8; layers]) }.unwrap();
    split.lookahead = Some((sign.clone(), 1));
    let mut engine = Engine::new(model, 1, Kernels::best());
    engine.split = Some(split);
    let taken = |engine: &Engine| {
        let split = engine.split.as_ref().unwrap();
        (split.bytes(), split.device.memory().used)
    };
    let empty = taken(&engine).0;
    engine.set_sparsity(signs(0));
    let first = taken(&engine);
    assert!(first.0 > empty, "the signs are on the device");
    for (name, other) in [("exact", all_exact(layers)), ("dense", Sparsity::dense(layers)), ("one ahead", signs(1))] {
        engine.set_sparsity(other);
        engine.set_sparsity(signs(0));
        assert_eq!(taken(&engine), first, "after {name}");
    }
    // And as much whichever of the two came first.
    engine.split.as_mut().unwrap().lookahead = None;
    engine.set_sparsity(signs(0));
    engine.split.as_mut().unwrap().lookahead = Some((sign.clone(), 1));
    engine.set_sparsity(signs(0));
    assert_eq!(taken(&engine), first);
}
