//! Mixes of types, and importance: which tensor gets which type, whose errors become smaller, and that no other model's importance is used.

use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::{Engine, Logits, Observer, Seen, SeenAttention, Session};
use dynamicinfer::error::Error;
use dynamicinfer::formats::profile_file::{self, TextInfo};
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::lab::synth::{Shape, write_gguf};
use dynamicinfer::model::config::{Activation, Norm};
use dynamicinfer::model::source::{Role, Source};
use dynamicinfer::model::weights::Matrix;
use dynamicinfer::model::{Description, KvType, Model, ModelConfig};
use dynamicinfer::pack::mix::Mix;
use dynamicinfer::pack::{PackOptions, Types, pack_weighted};
use dynamicinfer::prng::Prng;
use dynamicinfer::profile::{Importance, Profile};
use dynamicinfer::training::profile::{Input, Request, profile};
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use xxhash_rust::xxh3::xxh3_64;

const WINDOW: usize = 50;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn source(name: &str) -> Source {
    Source::open(&root().join(name), None).unwrap()
}

fn fixture(name: &str) -> Source {
    source(&format!("tests/fixtures/models/{name}"))
}

fn types(name: &str) -> Types {
    name.parse().unwrap()
}

fn packed(source: &Source, types: Types, weights: Option<&Importance>, path: &Path) -> Model {
    let (options, from) = (PackOptions { types, orders: None }, Path::new("x.profile"));
    pack_weighted(source, path, &options, weights.map(|weights| (from, weights)), &|_, _| Ok(())).unwrap();
    Model::open(path).unwrap()
}

/// A profile of random tokens, counted by a store in f32.
fn counted(source: &Source, tokens: usize, dir: &Path) -> Profile {
    let path = dir.join("f32.neurons");
    let mut engine = Engine::new(packed(source, Quant::F32.into(), None, &path), 2, Kernels::best());
    let tokens = random_tokens(tokens, source.config.vocab);
    let info =
        TextInfo { name: "random".into(), checksum: "1".into(), tokens: 0, wanted: tokens.len(), window: WINDOW };
    let texts = vec![Input { info, tokens }];
    let request = Request { texts, window: WINDOW, kv: KvType::F32, sparsity: 0.5, activation_thresholds: None };
    profile(&mut engine, &request, None, Path::new("nowhere/partial"), |_, _| Ok(())).unwrap()
}

fn random_tokens(n: usize, vocab: usize) -> Vec<u32> {
    let mut random = Prng::new(7);
    (0..n).map(|_| random.below(vocab as u64) as u32).collect()
}

/// Sixteen layers, so that every rule about layers says something.
fn deep() -> Shape {
    Shape {
        hidden: 256,
        layers: 16,
        ffn: 32,
        heads: 4,
        kv_heads: 1,
        vocab: 259,
        context: 64,
        activation: Activation::Relu,
        active: None,
        seed: 1,
        outliers: 0,
        experts: None,
    }
}

/// The layers in which a role has each type, in the order of the layers that have it first: `q6_k 0 1, q4_k 2 3`.
fn by_type(layers: usize, of: impl Fn(usize) -> Quant) -> String {
    let mut found: Vec<(Quant, Vec<String>)> = Vec::new();
    for layer in 0..layers {
        let quant = of(layer);
        match found.iter_mut().find(|(known, _)| *known == quant) {
            Some((_, layers)) => layers.push(layer.to_string()),
            None => found.push((quant, vec![layer.to_string()])),
        }
    }
    let text = |(quant, layers): &(Quant, Vec<String>)| match found.len() {
        1 => quant.name().to_owned(),
        _ => format!("{} {}", quant.name(), layers.join(" ")),
    };
    found.iter().map(text).collect::<Vec<_>>().join(", ")
}

const COSTLY: &str = "0 1 4 7 10 13 14 15";
const OTHERS: &str = "2 3 5 6 8 9 11 12";
const BUT_TWO: &str = "2 3 4 5 6 7 8 9 10 11 12 13 14 15";

/// What llama-quantize of 2026 gives sixteen layers: values, attention's output, down; and all other matrices of layers.
fn expected() -> [(&'static str, [String; 3], &'static str); 7] {
    let one = |quant: &str| quant.to_owned();
    let costly = |others: &str| format!("q6_k {COSTLY}, {others} {OTHERS}");
    [
        ("q3_k_s", [one("q3_k"), one("q3_k"), one("q3_k")], "q3_k"),
        ("q3_k_m", [format!("q5_k 0 1, q4_k {BUT_TWO}"), one("q4_k"), format!("q5_k 0, q4_k 1 {BUT_TWO}")], "q3_k"),
        ("q3_k_l", [one("q5_k"), one("q5_k"), one("q5_k")], "q3_k"),
        (
            "q4_k_s",
            [
                "q5_k 0 1 2 3, q4_k 4 5 6 7 8 9 10 11 12 13 14 15".to_owned(),
                one("q4_k"),
                format!("q5_k 0 1, q4_k {BUT_TWO}"),
            ],
            "q4_k",
        ),
        ("q4_k_m", [costly("q4_k"), one("q4_k"), costly("q4_k")], "q4_k"),
        ("q5_k_s", [one("q5_k"), one("q5_k"), one("q5_k")], "q5_k"),
        ("q5_k_m", [costly("q5_k"), one("q5_k"), costly("q5_k")], "q5_k"),
    ]
}

#[test]
fn a_mix_gives_each_tensor_its_type() {
    let config = deep().config().unwrap();
    for (name, [values, output, down], main) in expected() {
        let Types::Mix(mix) = types(name) else { panic!("{name} is no mix") };
        let of = |role| by_type(16, |layer| mix.of(&config, role, layer).name().parse().unwrap());
        assert_eq!(mix.name(), name);
        assert_eq!([of(Role::V), of(Role::O), of(Role::Down)], [values, output, down], "{name}");
        for role in [Role::Q, Role::K, Role::Gate, Role::Up, Role::Embed] {
            assert_eq!(of(role), main, "{name}, {role:?}");
        }
        assert_eq!(of(Role::Head), "q6_k", "{name}");
        let mut tied = config.clone();
        tied.tied = true;
        assert_eq!(mix.of(&tied, Role::Embed, 0).name(), "q6_k", "{name}: the embedding is the head");
    }
    assert_eq!(Mix::all().count(), expected().len());
}

#[test]
fn families_and_sizes_that_are_mixed_otherwise() {
    let described = deep().described().unwrap();
    let falcon = Description { family: "falcon".into(), tied: true, ..described.clone() }.resolve().unwrap();
    let of = |mix: &str, role| {
        let Types::Mix(mix) = types(mix) else { panic!("no mix") };
        by_type(16, |layer| mix.of(&falcon, role, layer))
    };
    for role in [Role::Q, Role::K, Role::V] {
        assert_eq!(of("q4_k_m", role), format!("q6_k {COSTLY}, q4_k {OTHERS}"), "published as one matrix");
    }
    assert_eq!(of("q4_k_m", Role::Embed), "q8_0");
    assert_eq!(of("q4_k_m", Role::Down), format!("q6_k 0, q5_k 1 4 7 10 13 14 15, q4_k {OTHERS}"));
    assert_eq!(of("q3_k_m", Role::Down), format!("q5_k 0, q4_k 1 4 7 10 13 14 15, q3_k {OTHERS}"));
    assert_eq!([of("q3_k_m", Role::O), of("q3_k_l", Role::O)], ["q3_k", "q4_k"]);
    assert_eq!([of("q3_k_l", Role::Down), of("q4_k_s", Role::Down)], ["q4_k", "q4_k"]);
    let large = Description { layers: 80, ..described };
    let no_groups = Description { kv_heads: large.heads, ..large.clone() }.resolve().unwrap();
    let large = large.resolve().unwrap();
    let values = |c: &ModelConfig| by_type(80, |layer| Mix::Q4KM.of(c, Role::V, layer));
    assert!(values(&large).contains("q5_k") && !values(&large).contains("q4_k"), "{}", values(&large));
    assert!(values(&no_groups).contains("q4_k") && !values(&no_groups).contains("q5_k"), "{}", values(&no_groups));
}

#[test]
fn a_packed_mix_has_the_types_that_its_table_says_and_runs() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = dir.path().join("deep.gguf");
    write_gguf(&deep(), Quant::F32, &gguf, &|_, _| Ok(())).unwrap();
    let source = Source::open(&gguf, None).unwrap();
    let tokens = random_tokens(20, source.config.vocab);
    let logits = |model: Model| {
        let mut engine = Engine::new(model, 2, Kernels::best());
        let mut session = Session::new(&engine, 64, KvType::F32).unwrap();
        engine.forward(&mut session.kv, &tokens, Logits::All).to_vec()
    };
    let truth = logits(packed(&source, Quant::F32.into(), None, &dir.path().join("f32.neurons")));
    let mut off = Vec::new();
    for (name, [values, output, down], main) in expected() {
        if !["q3_k_m", "q4_k_m"].contains(&name) {
            continue;
        }
        let model = packed(&source, types(name), None, &dir.path().join("x.neurons"));
        let part = |l: usize, i: usize| {
            let layer = &model.layers[l];
            match i {
                0..3 if layer.qkv.parts().len() == 1 => layer.qkv.parts()[0].quant,
                0..3 => layer.qkv.parts()[i].quant,
                3 => layer.o.quant,
                _ => layer.block().parts()[i - 4].quant,
            }
        };
        let of = |i| by_type(16, |layer| part(layer, i));
        let wanted = [main, main, &values, &output, main, main, &down];
        for (i, wanted) in wanted.into_iter().enumerate() {
            assert_eq!(of(i), wanted, "{name}, matrix {i} of q, k, v, o, gate, up, down");
        }
        assert_eq!([model.embed.quant.name(), model.head.quant.name(), model.quant.name()], [main, "q6_k", main]);
        let found = logits(model);
        let square = |pairs: &mut dyn Iterator<Item = f32>| pairs.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let error = square(&mut found.iter().zip(&truth).map(|(a, b)| a - b)) / square(&mut truth.iter().copied());
        off.push(error.sqrt());
    }
    assert!(off[1] < off[0] && off[0] < 0.5, "logits are off by {off:?} of q3_k_m and q4_k_m");
}

#[test]
fn rows_of_other_lengths_are_packed_with_smaller_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.neurons");
    let wanted = [
        ("llama", "q4_k_m", ["q5_0", "q8_0", "q8_0"]),
        ("llama", "q5_k_s", ["q5_1", "q5_1", "q8_0"]),
        ("llama-tied", "q3_k_s", ["q4_0", "q4_0", "q8_0"]),
        ("opt", "q4_k_m", ["q5_0", "q8_0", "q8_0"]),
        // Of two layers the last is a costly one, in which Falcon's down has q5_k.
        ("falcon", "q4_k_m", ["q5_0", "q5_1", "q8_0"]),
    ];
    for (name, mix, wanted) in wanted {
        let model = packed(&fixture(name), types(mix), None, &path);
        let last = model.layers.last().unwrap();
        let found = [last.block().up(), last.block().down()].map(|part| part.quant.name());
        assert_eq!([found[0], found[1], model.head.quant.name()], wanted, "{name} {mix}");
    }
}

#[test]
fn names_are_read_in_any_case_and_others_are_refused_with_all_that_there_are() {
    assert_eq!([types("Q4_K_M"), types("q4_k_m"), types("Q4_k_M")], [Types::Mix(Mix::Q4KM); 3]);
    assert_eq!(types("Q4_K").one().unwrap().name(), "q4_k");
    let error = "q4_k_x".parse::<Types>().unwrap_err();
    assert!(error.starts_with("'q4_k_x' is not a store type; take one of f32, f16, q8_0"), "{error}");
    assert!(
        error.ends_with(", a mix of them: q3_k_s, q3_k_m, q3_k_l, q4_k_s, q4_k_m, q5_k_s, q5_k_m, or clusters"),
        "{error}"
    );
}

/// What the matrices of layer 0 read, by plain arithmetic, and the sums of all that was seen.
struct Reads<'a> {
    model: &'a Model,
    tokens: &'a [u32],
    attended: Vec<f32>,
    squares: Vec<f64>,
}

/// The product of a matrix and a vector, in f64.
fn times(matrix: &Matrix, x: &[f32]) -> Vec<f64> {
    let mut row = vec![0.0; matrix.cols];
    let product = |r| {
        rows::decode(matrix.quant, matrix.row(r), &mut row);
        row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()
    };
    (0..matrix.rows).map(product).collect()
}

impl Observer for Reads<'_> {
    fn attention(&mut self, seen: &SeenAttention<'_>) {
        let (c, layers) = (&self.model.config, self.model.config.layers().len());
        let width = self.squares.len() / layers;
        let here = &mut self.squares[seen.layer * width..][..width];
        seen.input.iter().enumerate().for_each(|(i, x)| here[i % c.hidden] += f64::from(*x).powi(2));
        seen.attended
            .iter()
            .enumerate()
            .for_each(|(i, x)| here[c.hidden + i % c.mixer(0).cols()] += f64::from(*x).powi(2));
        self.attended = seen.attended.to_vec();
        if seen.layer > 0 {
            return;
        }
        let Norm::Rms(epsilon) = c.norm else { panic!("another norm") };
        let mut embedded = vec![0.0; c.hidden];
        for (token, input) in self.tokens.iter().zip(seen.input.chunks_exact(c.hidden)) {
            rows::decode(self.model.embed.quant, self.model.embed.row(*token as usize), &mut embedded);
            let square = embedded.iter().map(|x| x * x).sum::<f32>() / c.hidden as f32;
            for ((input, x), weight) in input.iter().zip(&embedded).zip(&self.model.layers[0].attn_norm.weight) {
                let wanted = x / (square + epsilon).sqrt() * weight;
                assert!((input - wanted).abs() < 1e-4, "{input}, not {wanted}");
            }
        }
    }

    fn layer(&mut self, seen: &Seen<'_>) {
        let c = &self.model.config;
        let width = self.squares.len() / c.layers().len();
        let here = &mut self.squares[seen.layer * width..][c.hidden + c.mixer(0).cols()..width];
        seen.input.iter().enumerate().for_each(|(i, x)| here[i % c.hidden] += f64::from(*x).powi(2));
        if seen.layer > 0 {
            return;
        }
        let (layer, mut embedded) = (&self.model.layers[0], vec![0.0; c.hidden]);
        for (t, token) in self.tokens.iter().enumerate() {
            rows::decode(self.model.embed.quant, self.model.embed.row(*token as usize), &mut embedded);
            let added = times(&layer.o, &self.attended[t * c.mixer(0).cols()..][..c.mixer(0).cols()]);
            for (i, added) in added.iter().enumerate() {
                let (residual, wanted) = (seen.residual[t * c.hidden + i], embedded[i] + *added as f32);
                assert!((residual - wanted).abs() < 1e-3 * (1.0 + wanted.abs()), "{residual}, not {wanted}");
            }
        }
    }
}

#[test]
fn inputs_are_what_the_matrices_read() {
    let dir = tempfile::tempdir().unwrap();
    let source = source("assets/demo");
    let made = counted(&source, 3 * WINDOW, dir.path());
    let model = Model::open(&dir.path().join("f32.neurons")).unwrap();
    let mut engine = Engine::new(Model::open(&dir.path().join("f32.neurons")).unwrap(), 2, Kernels::best());
    let inputs = made.texts[0].inputs.as_ref().unwrap();
    let tokens = random_tokens(3 * WINDOW, source.config.vocab);
    let mut reads =
        Reads { model: &model, tokens: &[], attended: Vec::new(), squares: vec![0.0; inputs.squares.len()] };
    let mut session = Session::new(&engine, WINDOW, KvType::F32).unwrap();
    for window in tokens.chunks(WINDOW) {
        session.rewind(0);
        reads.tokens = window;
        engine.forward_observed(&mut session.kv, window, Logits::None, &mut reads);
    }
    let importance = Importance::of(&made).unwrap();
    assert_eq!((importance.shape, importance.tokens), ([5, 256, 256], 150));
    let mean = |sum: &f64| (sum / 150.0) as f32;
    for (layer, sums) in reads.squares.chunks_exact(3 * 256).enumerate() {
        let parts = [importance.qkv(layer), importance.output(layer), importance.ffn(layer)];
        for (part, sums) in parts.into_iter().zip(sums.chunks_exact(256)) {
            assert!(part.iter().zip(sums).all(|(a, b)| (a - mean(b)).abs() <= 1e-6 * mean(b)), "layer {layer}");
            assert!(part.iter().any(|x| *x > 0.0));
        }
    }
}

/// Sum of the squared errors of a store's matrix, each times the importance of its column, by layer and role.
fn errors(source: &Source, model: &Model, importance: &Importance) -> Vec<(String, f64)> {
    let c = &source.config;
    let mut found = Vec::new();
    let mut add = |name: String, quant: Quant, rows: &mut dyn Iterator<Item = (&[u8], Vec<f32>)>, weights: &[f32]| {
        let mut back = vec![0.0; weights.len()];
        let mut sum = 0.0;
        for (row, truth) in rows {
            rows::decode(quant, row, &mut back);
            let off = back.iter().zip(&truth).zip(weights);
            sum += off.map(|((a, b), w)| f64::from(*w) * f64::from(a - b).powi(2)).sum::<f64>();
        }
        found.push((name, sum));
    };
    let truth = |role, layer, row: usize, cols: usize| {
        let rows = source.rows(role, layer).unwrap();
        let (dtype, mut values) = (rows.view.info.dtype, vec![0.0; cols]);
        let bytes = dtype.row_bytes(cols);
        let at = rows.file_row(row) * bytes;
        dynamicinfer::formats::blocks::dequantize(dtype, &rows.view.data[at..at + bytes], &mut values);
        values
    };
    for (l, layer) in model.layers.iter().enumerate() {
        let roles = [
            (Role::Q, c.mixer(0).cols()),
            (Role::K, c.attention(0).unwrap().kv_dim()),
            (Role::V, c.attention(0).unwrap().kv_dim()),
        ];
        let parts = layer.qkv.parts();
        let mut first = 0;
        for (i, (role, rows)) in roles.into_iter().enumerate() {
            let (matrix, begin) = if parts.len() == 1 { (&parts[0], first) } else { (&parts[i], 0) };
            let mut pairs = (0..rows).map(|r| (matrix.row(begin + r), truth(role, l, r, c.hidden)));
            add(format!("{l} {role:?}"), matrix.quant, &mut pairs, importance.qkv(l));
            first += rows;
        }
        let mut pairs = (0..layer.o.rows).map(|r| (layer.o.row(r), truth(Role::O, l, r, c.mixer(0).cols())));
        add(format!("{l} O"), layer.o.quant, &mut pairs, importance.output(l));
        let blocks = layer.neurons();
        for (role, part) in [(Role::Gate, layer.block().gate_or_up()), (Role::Up, layer.block().up())] {
            let mut pairs = (0..c.widest_ffn()).map(|r| (blocks.part(part, r), truth(role, l, r, c.hidden)));
            add(format!("{l} {role:?}"), part.quant, &mut pairs, importance.ffn(l));
        }
    }
    found
}

#[test]
fn importance_lowers_the_weighted_error_of_every_tensor_and_touches_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let source = source("assets/demo");
    let importance = Importance::of(&counted(&source, 6 * WINDOW, dir.path())).unwrap();
    for name in ["q3_k_m", "q4_k_m", "q4_0"] {
        let [plain, weighed] = [None, Some(&importance)].map(|weights| {
            let path = dir.path().join(format!("{name}-{}.neurons", weights.is_some()));
            packed(&source, types(name), weights, &path)
        });
        let [without, with] = [&plain, &weighed].map(|model| errors(&source, model, &importance));
        for ((tensor, without), (_, with)) in without.iter().zip(&with) {
            assert!(with < without, "{name}: layer and matrix {tensor}: {with} with importance, {without} without");
        }
        let [without, with] = [without, with].map(|all| all.iter().map(|(_, e)| e).sum::<f64>());
        assert!(with < 0.97 * without, "{name}: {with} with importance, {without} without");
        assert_eq!(plain.fingerprint(), weighed.fingerprint());
        for (a, b) in plain.layers.iter().zip(&weighed.layers) {
            let down =
                |neuron| (a.neurons().part(a.block().down(), neuron), b.neurons().part(b.block().down(), neuron));
            assert!((0..source.config.widest_ffn()).map(down).all(|(a, b)| a == b), "{name}: down is the same");
        }
        assert!((0..source.config.vocab).all(|r| plain.embed.row(r) == weighed.embed.row(r)), "{name}");
    }
}

#[test]
fn a_store_in_another_order_and_importance_have_the_same_neurons() {
    let dir = tempfile::tempdir().unwrap();
    let source = fixture("relullama");
    let importance = Importance::of(&counted(&source, 100, dir.path())).unwrap();
    let order: Vec<u32> = (0..source.config.widest_ffn() as u32).rev().collect();
    let orders = vec![dynamicinfer::ids::Permutation::new(&order).unwrap(); source.config.layers().len()];
    let (plain, turned) = (dir.path().join("plain.neurons"), dir.path().join("turned.neurons"));
    let plain = packed(&source, types("q4_0"), Some(&importance), &plain);
    let options = PackOptions { types: types("q4_0"), orders: Some(orders) };
    let weights = (Path::new("x.profile"), &importance);
    pack_weighted(&source, &turned, &options, Some(weights), &|_, _| Ok(())).unwrap();
    let turned = Model::open(&turned).unwrap();
    let (ffn, layer) = (source.config.widest_ffn(), |model: &Model| model.layers[1].neurons().all().to_vec());
    let (a, b, block) = (layer(&plain), layer(&turned), plain.layers[1].block().bytes());
    for neuron in 0..ffn {
        let (here, there) = (&a[neuron * block..][..block], &b[(ffn - 1 - neuron) * block..][..block]);
        assert_eq!(here, there, "neuron {neuron}");
    }
}

#[test]
fn importance_of_another_model_is_refused_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let importance = Importance::of(&counted(&fixture("relullama"), 60, dir.path())).unwrap();
    let refused = |source: &Source, importance: &Importance| {
        let store = dir.path().join("refused.neurons");
        let options = PackOptions { types: types("q4_0"), orders: None };
        let weights = Some((Path::new("a.profile"), importance));
        let error = pack_weighted(source, &store, &options, weights, &|_, _| Ok(())).unwrap_err();
        assert!(matches!(error, Error::BadFile(_)) && !store.exists(), "{error}");
        error.to_string()
    };
    let says = refused(&fixture("llama"), &importance);
    assert!(says.starts_with("a.profile") && says.contains("this profile belongs to another model ("), "{says}");
    assert!(says.contains("make one with `dynamicinfer profile MODEL --text FILE -o NEW`"), "{says}");
    let mut other = importance;
    other.shape = [2, 64, 32];
    let says = refused(&fixture("relullama"), &other);
    assert!(says.contains("heads' numbers are [2, 64, 32], the model's [2, 64, 64]"), "{says}");
}

/// The file without some of its sections, as older versions wrote it; what is said of the others changes by `change`.
fn rewritten(bytes: &[u8], change: impl FnOnce(&mut Vec<Json>)) -> Vec<u8> {
    let at = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) as usize;
    let mut header: Json = serde_json::from_slice(&bytes[at..]).unwrap();
    change(header["sections"].as_array_mut().unwrap());
    let text = header.to_string();
    let mut out = [&bytes[..at], text.as_bytes()].concat();
    let len = out.len() as u64;
    out[24..32].copy_from_slice(&(text.len() as u64).to_le_bytes());
    out[32..40].copy_from_slice(&xxh3_64(text.as_bytes()).to_le_bytes());
    out[40..48].copy_from_slice(&len.to_le_bytes());
    out
}

#[test]
fn profiles_without_inputs_are_read_and_damaged_inputs_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.profile");
    let made = counted(&fixture("llama"), 60, dir.path());
    made.write(&path).unwrap();
    let good = std::fs::read(&path).unwrap();
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        profile_file::open(&path).and_then(|file| Profile::read(&file))
    };
    assert_eq!(read(&good).unwrap().texts, made.texts);
    let old = read(&rewritten(&good, |sections| sections.retain(|s| s["name"] != "text.0.inputs"))).unwrap();
    assert_eq!((Importance::of(&old), &old.texts[0].counts), (None, &made.texts[0].counts));
    let inputs = |sections: &mut Vec<Json>, key: &str, value: Json| {
        sections.iter_mut().find(|s| s["name"] == "text.0.inputs").unwrap()[key] = value;
    };
    // The sums of two layers are of 64 + 64 + 64 numbers.
    let place = {
        let at = u64::from_le_bytes(good[16..24].try_into().unwrap()) as usize;
        let header: Json = serde_json::from_slice(&good[at..]).unwrap();
        let sections = header["sections"].as_array().unwrap();
        sections.iter().find(|s| s["name"] == "text.0.inputs").unwrap()["offset"].as_u64().unwrap() as usize
    };
    let with = |at: usize, number: f64| {
        let mut bytes = good.clone();
        bytes[place + 8 * at..][..8].copy_from_slice(&number.to_le_bytes());
        let sum = format!("{:016x}", xxh3_64(&bytes[place..place + 8 * 2 * 192]));
        rewritten(&bytes, |sections| inputs(sections, "checksum", json!(sum)))
    };
    let shorter = |bytes: usize| {
        let sum = format!("{:016x}", xxh3_64(&good[place..place + bytes]));
        rewritten(&good, |sections| {
            inputs(sections, "checksum", json!(sum));
            inputs(sections, "bytes", json!(bytes));
        })
    };
    let cases = [
        (with(3, f64::NAN), "text.0.inputs: layer 0: a sum of squares is NaN"),
        (with(200, -1.0), "text.0.inputs: layer 1: a sum of squares is -1"),
        (with(0, f64::INFINITY), "text.0.inputs: layer 0: a sum of squares is inf"),
        (shorter(8 * 2 * 128), "text.0.inputs: is Bytes of 2048 bytes, not 2 times more than 128 sums"),
        (shorter(8 * 2 * 192 - 8), "text.0.inputs: is Bytes of 3064 bytes, not 2 times more than 128 sums"),
    ];
    for (bytes, wanted) in cases {
        let error = read(&bytes).unwrap_err();
        let says = error.to_string();
        assert!(matches!(error, Error::BadFile(_)) && says.contains(wanted), "no {wanted:?} in {says}");
        assert!(says.contains("make it again with `dynamicinfer profile MODEL --fresh --text FILE`"), "{says}");
    }
}

struct Place(tempfile::TempDir);

impl Place {
    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
        command.args(args).current_dir(self.0.path()).env("XDG_CACHE_HOME", self.0.path().join("cache"));
        command.env("XDG_DATA_HOME", self.0.path().join("data")).output().unwrap()
    }

    fn done(&self, args: &[&str]) -> (String, String) {
        let out = self.run(args);
        let [text, talk] = [out.stdout, out.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        assert_eq!(out.status.code(), Some(0), "{args:?}: {talk}");
        (text, talk)
    }

    fn refused(&self, args: &[&str], status: i32, why: &str) {
        let out = self.run(args);
        let says = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.code() == Some(status) && says.contains(why), "{args:?}: {:?}: {says}", out.status);
    }
}

/// From a text to a store, as a user goes.
#[test]
fn a_profile_is_made_and_a_mix_packed_by_it_and_shown() {
    let place = Place(tempfile::tempdir().unwrap());
    let text = "Once upon a time there was a little dog who lived in a red house. ".repeat(20);
    std::fs::write(place.0.path().join("a.txt"), text).unwrap();
    let old: PathBuf = root().join("profiles/models/demo/activation.profile");
    let old = old.to_str().unwrap();
    let why = "the profile has no statistics of the matrices' inputs; make it with `dynamicinfer profile MODEL --text FILE -o PROFILE`";
    place.refused(&["pack", "demo", "--quant", "q4_k_m", "--importance", old], 2, why);
    place.done(&["profile", "demo", "--text", "a.txt", "--fresh", "-o", "a.profile"]);
    let pack = ["pack", "demo", "--quant", "Q4_K_M", "--importance", "a.profile"];
    let (_, talk) = place.done(&pack);
    assert!(talk.contains("importance from ") && talk.contains(" tokens of "), "{talk}");
    let store =
        std::fs::read_dir(place.0.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let stores: Vec<String> = store.filter(|name| name.ends_with(".neurons")).collect();
    assert!(stores.len() == 1 && stores[0].ends_with(".q4_k_m.neurons"), "{stores:?}");
    let (shown, _) = place.done(&["show", &stores[0]]);
    for part in ["bits a weight", "embed", "ffn-down of 2 layers", "ffn of 3 layers", "v of 2 layers"] {
        assert!(shown.contains(part), "no {part:?} in {shown}");
    }
    let shown: Json = serde_json::from_str(&place.done(&["show", &stores[0], "--json"]).0).unwrap();
    let bits = shown["bits_per_weight"].as_f64().unwrap();
    // Rows of so few numbers are a third longer by what fills their last cache line: q4_k takes 6 bits, q6_k 8.
    assert!((6.0..8.0).contains(&bits), "{bits}");
    let why = "f16 stores every number by itself and has nothing to weigh; leave it out";
    place.refused(&["pack", "demo", "--quant", "f16", "--importance", "a.profile", "-o", "x"], 2, why);
    place.refused(&["pack", "demo", "--importance", "a.profile"], 2, "--quant");
    let llama = root().join("tests/fixtures/models/llama");
    let args = ["pack", llama.to_str().unwrap(), "--quant", "q4_0", "--importance", "a.profile"];
    place.refused(&args, 5, "a.profile: fingerprint: is ");
    // A text that was counted without inputs is counted anew.
    std::fs::copy(place.0.path().join("a.profile"), place.0.path().join("b.profile")).unwrap();
    let bytes = std::fs::read(place.0.path().join("b.profile")).unwrap();
    let without = rewritten(&bytes, |sections| sections.retain(|s| s["name"] != "text.0.inputs"));
    std::fs::write(place.0.path().join("b.profile"), without).unwrap();
    let again = ["profile", "demo", "--text", "a.txt", "-o", "b.profile"];
    let (_, talk) = place.done(&again);
    assert!(talk.contains("a.txt: is in the profile without the inputs of matrices; counted anew"), "{talk}");
    let read = |name: &str| Profile::read(&profile_file::open(&place.0.path().join(name)).unwrap()).unwrap().texts;
    assert_eq!(read("a.profile"), read("b.profile"));
    assert!(place.done(&again).1.contains("a.txt: is in the profile already"));
}

/// A mixture of experts has no importance.
#[test]
fn profiles_of_mixtures_of_experts_have_no_inputs() {
    let source = source("assets/demo-moe");
    let mut engine = Engine::new(Model::in_place(source).unwrap(), 2, Kernels::best());
    let info = TextInfo { name: "x".into(), checksum: "1".into(), tokens: 0, wanted: 20, window: WINDOW };
    let texts = vec![Input { info, tokens: random_tokens(20, 300) }];
    let request = Request { texts, window: WINDOW, kv: KvType::F32, sparsity: 0.5, activation_thresholds: None };
    let made = profile(&mut engine, &request, None, Path::new("nowhere/partial"), |_, _| Ok(())).unwrap();
    assert!(made.texts[0].inputs.is_none() && Importance::of(&made).is_none());
}
