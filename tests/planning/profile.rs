//! Activation profiles: what is counted, that it adds up however it was counted, and that no other model's or damaged
//! profile is believed.

use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::{Engine, Logits, Observer, Seen, SeenExperts, Session};
use dynamicinfer::error::Error;
use dynamicinfer::formats::profile_file::{self, AHEADS, BINS, TextInfo};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::formats::rows::decode;
use dynamicinfer::ids::Permutation;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{Activation, Ffn, KvType, Model};
use dynamicinfer::open::artifacts::profile_at;
use dynamicinfer::pack::{PackOptions, Types, pack};
use dynamicinfer::prng::Prng;
use dynamicinfer::profile::Profile;
use dynamicinfer::training::profile::{Input, Request, profile, unfinished};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value as Json, json};
use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use xxhash_rust::xxh3::xxh3_64;

const WINDOW: usize = 50;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures/models").join(name)
}

/// Packs in f32: what is compared with plain arithmetic is not to differ by rounding.
fn packed(source: &Path, to: &Path, orders: Option<Vec<Vec<u32>>>) -> Model {
    let source = Source::open(source, None).unwrap();
    let orders = orders.map(|orders| orders.iter().map(|order| Permutation::new(order).unwrap()).collect());
    pack(&source, to, &PackOptions { types: Quant::F32.into(), orders }, &|_, _| Ok(())).unwrap();
    Model::open(to).unwrap()
}

fn engine(name: &str, dir: &Path) -> Engine {
    Engine::new(packed(&fixture(name), &dir.join(format!("{name}.neurons")), None), 1, Kernels::best())
}

/// A text of `n` random tokens; its name is its seed.
fn text(seed: u64, n: usize, vocab: usize) -> Input {
    let mut random = Prng::new(seed);
    let tokens = (0..n).map(|_| random.below(vocab as u64) as u32).collect();
    let (name, checksum) = (seed.to_string(), format!("{seed:016x}"));
    Input { info: TextInfo { name, checksum, tokens: 0, wanted: n, window: WINDOW }, tokens }
}

fn request(texts: Vec<Input>, activation_thresholds: Option<Vec<f32>>) -> Request {
    Request { texts, window: WINDOW, kv: KvType::F32, sparsity: 0.5, activation_thresholds }
}

fn nowhere() -> &'static Path {
    Path::new("nowhere/partial")
}

fn counted(engine: &mut Engine, request: &Request) -> Profile {
    profile(engine, request, None, nowhere(), |_, _| Ok(())).unwrap()
}

fn assert_same(a: &Profile, b: &Profile) {
    assert_eq!(a.header.activation_thresholds, b.header.activation_thresholds);
    assert_eq!(a.texts.len(), b.texts.len());
    for (a, b) in a.texts.iter().zip(&b.texts) {
        assert_eq!(a, b);
    }
}

#[test]
fn a_profile_of_two_texts_is_that_of_one_merged_with_that_of_the_other() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["relullama", "llama"] {
        let mut engine = engine(name, dir.path());
        let both = counted(&mut engine, &request(vec![text(1, 130, 320), text(2, 75, 320)], None));
        // Cuts are found on all texts that are there at first; who adds to a profile keeps its cuts.
        let activation_thresholds = Some(both.header.activation_thresholds.clone()).filter(|c| c[0] > 0.0);
        assert_eq!(activation_thresholds.is_some(), name == "llama");
        let mut one = counted(&mut engine, &request(vec![text(1, 130, 320)], activation_thresholds.clone()));
        let other = counted(&mut engine, &request(vec![text(2, 75, 320)], activation_thresholds));
        one.merge(other.clone()).unwrap();
        assert_same(&one, &both);
        // Once more changes nothing, on disk neither.
        one.merge(other).unwrap();
        let path = dir.path().join("x.profile");
        one.write(&path).unwrap();
        assert_same(&Profile::read(&profile_file::open(&path).unwrap()).unwrap(), &both);
        let mut stranger = both.clone();
        stranger.header.fingerprint = "0".into();
        assert!(one.merge(stranger).unwrap_err().contains("the other of"));
        let mut differing = both.clone();
        differing.header.activation_thresholds[0] += 0.5;
        assert!(one.merge(differing).unwrap_err().contains("other activation thresholds"));
    }
}

#[test]
fn a_profile_interrupted_anywhere_and_continued_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let partial = dir.path().join("x.partial");
    for name in ["relullama", "llama"] {
        let mut engine = engine(name, dir.path());
        // Windows of two chunks, so that some interruptions fall into one.
        let request = || Request {
            window: 150,
            ..request([(1, 310), (2, 75), (3, 150)].map(|(seed, n)| text(seed, n, 320)).into(), None)
        };
        let whole = counted(&mut engine, &request());
        let mut begun = None;
        let mut runs = 0;
        let done = loop {
            runs += 1;
            let mut steps = 0;
            // The first run ends before anything is counted (while cuts are looked for, where there are any).
            let step = |done, _| {
                steps += usize::from(done > 0 || runs == 1);
                if steps >= 2 + runs % 3 { Err(Error::Interrupted) } else { Ok(()) }
            };
            match profile(&mut engine, &request(), begun, &partial, step) {
                Ok(done) => break done,
                Err(Error::Interrupted) => {}
                Err(other) => panic!("{other}"),
            }
            begun = partial.exists().then(|| unfinished(&partial, &request(), &engine.model).unwrap());
        };
        assert!(runs > 3, "{runs}");
        assert_same(&done, &whole);
        // Another request does not go on with it, and it is no profile yet.
        let others = [
            Request { window: 149, ..request() },
            Request { kv: KvType::F16, ..request() },
            Request { texts: vec![text(1, 310, 320)], ..request() },
            Request { texts: vec![text(4, 310, 320), text(2, 75, 320)], ..request() },
        ];
        for other in others {
            let Err(error) = unfinished(&partial, &other, &engine.model) else { panic!("was continued") };
            assert!(error.to_string().ends_with("x.partial is of another model, other texts or options"), "{error}");
        }
        let error = profile_file::open(&partial).unwrap_err().to_string();
        assert!(error.contains("not finished") || error.contains("request: an interrupted run left this"), "{error}");
        std::fs::remove_file(&partial).unwrap();
    }
}

#[test]
fn a_store_in_another_order_gives_the_same_profile() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["relullama", "opt"] {
        let mut plain = engine(name, dir.path());
        let orders: Vec<Vec<u32>> = (0..2u32).map(|l| (0..96u32).map(|i| (i * 35 + l * 11) % 96).collect()).collect();
        let mut turned =
            Engine::new(packed(&fixture(name), &dir.path().join("turned.neurons"), Some(orders)), 1, Kernels::best());
        let request = request(vec![text(1, 130, 320)], None);
        let (a, b) = (counted(&mut plain, &request), counted(&mut turned, &request));
        assert_eq!(a.header.fingerprint, b.header.fingerprint);
        assert_eq!(a.texts[0].layer_counts(0), b.texts[0].layer_counts(0), "{name}");
        assert_eq!(a.texts[0].sums[0].jaccard, b.texts[0].sums[0].jaccard);
        // Behind the first FFN the order of additions shows in last digits, and a neuron near zero may flip.
        let flips: u32 = a.texts[0].counts.iter().zip(&b.texts[0].counts).map(|(a, b)| a.abs_diff(*b)).sum();
        assert!(flips <= 2, "{name}: {flips}");
        assert!(a.texts[0].layer_counts(1).windows(2).any(|w| w[0] != w[1]), "counts tell neurons apart");
    }
}

/// Counts by plain loops over the model's rows.
struct Naive<'a> {
    model: &'a Model,
    activation_thresholds: &'a [f32],
    /// Least and most: neurons too near to the border to be told by rounding are in the second only. `[layers, ffn]`
    counts: [Vec<u32>; 2],
    /// Of `Seen::activations` and `gates`: the sets of tokens, `[layers][tokens]`, and the residuals of the chunk.
    sets: Vec<Vec<HashSet<usize>>>,
    residuals: Vec<Vec<f32>>,
    cosines: Vec<[f64; AHEADS.len()]>,
    magnitudes: Vec<Vec<f32>>,
}

impl Observer for Naive<'_> {
    fn layer(&mut self, seen: &Seen<'_>) {
        let (c, layer) = (&self.model.config, &self.model.layers[seen.layer]);
        let (h, ffn, rows) = (c.hidden, c.widest_ffn(), c.ffn_kind.rows());
        let cut = self.activation_thresholds[seen.layer] as f64;
        let mut row = vec![0f32; h];
        for neuron in 0..ffn {
            for (t, input) in seen.input.chunks_exact(h).enumerate() {
                let mut product = |r: usize| {
                    let part = layer.block().parts()[r];
                    decode(part.quant, layer.neurons().part(part, neuron), &mut row);
                    row.iter().zip(input).map(|(w, x)| *w as f64 * *x as f64).sum::<f64>()
                };
                let act = |x: f64| c.activation.apply(x as f32) as f64;
                let up = product(rows - 2) + layer.up_bias.get(neuron).copied().unwrap_or(0.0) as f64;
                let (active, border) = match c.ffn_kind {
                    _ if cut > 0.0 => (act(product(0)).abs() > cut, (act(product(0)).abs() - cut).abs()),
                    Ffn::Gated => (act(product(0)) * up != 0.0, product(0).abs().min(up.abs())),
                    Ffn::GatedBoth => (act(product(0)) * act(up) != 0.0, product(0).abs().min(up.abs())),
                    Ffn::Plain => (act(up) != 0.0, up.abs()),
                    Ffn::GatedClamped => unreachable!("of experts that are no neurons"),
                };
                let at = seen.layer * ffn + neuron;
                let near = border < 1e-5;
                self.counts[0][at] += u32::from(active && !near);
                self.counts[1][at] += u32::from(active || near);
                self.magnitudes[seen.layer].push(c.activation.apply(seen.gates[t * ffn + neuron]).abs());
            }
        }
        for (gates, activations) in seen.gates.chunks_exact(ffn).zip(seen.activations.chunks_exact(ffn)) {
            let active = |n: &usize| match cut > 0.0 {
                true => c.activation.apply(gates[*n]).abs() > cut as f32,
                false => activations[*n] != 0.0,
            };
            self.sets[seen.layer].push((0..ffn).filter(active).collect());
        }
        self.residuals.truncate(seen.layer);
        self.residuals.push(seen.residual.to_vec());
        for (i, ahead) in AHEADS.into_iter().enumerate().filter(|(_, ahead)| *ahead <= seen.layer) {
            let before = &self.residuals[seen.layer - ahead];
            for (a, b) in before.chunks_exact(h).zip(seen.residual.chunks_exact(h)) {
                let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| *a as f64 * *b as f64).sum::<f64>();
                self.cosines[seen.layer - ahead][i] += dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
            }
        }
    }
}

fn agrees_with_plain_loops(model: Model, tokens: usize) {
    let (c, name) = (model.config.clone(), model.config.name.clone());
    let path = model.path().to_owned();
    let mut engine = Engine::new(model, 2, Kernels::best());
    let request = request(vec![text(7, tokens, c.vocab)], None);
    let made = counted(&mut engine, &request);
    let model = Model::open(&path).unwrap();
    let mut naive = Naive {
        model: &model,
        activation_thresholds: &made.header.activation_thresholds,
        counts: [vec![0; c.layers().len() * c.widest_ffn()], vec![0; c.layers().len() * c.widest_ffn()]],
        sets: vec![Vec::new(); c.layers().len()],
        residuals: Vec::new(),
        cosines: vec![[0.0; 3]; c.layers().len()],
        magnitudes: vec![Vec::new(); c.layers().len()],
    };
    let mut session = Session::new(&engine, WINDOW, KvType::F32).unwrap();
    for window in request.texts[0].tokens.chunks(WINDOW) {
        session.rewind(0);
        engine.forward_observed(&mut session.kv, window, Logits::None, &mut naive);
    }
    let text = &made.texts[0];
    assert_eq!(text.info.tokens, tokens);
    for (at, &count) in text.counts.iter().enumerate() {
        let (least, most) = (naive.counts[0][at], naive.counts[1][at]);
        assert!((least..=most).contains(&count), "{name}, {at}: {count}, not {least} to {most}");
    }
    let sure = naive.counts[0].iter().sum::<u32>() as f64 / naive.counts[1].iter().sum::<u32>() as f64;
    assert!(sure > 0.99, "{name}: the bounds say something: {sure}");
    for layer in 0..c.layers().len() {
        let (sums, sets) = (&text.sums[layer], &naive.sets[layer]);
        let distances: Vec<f64> = (1..tokens)
            .filter(|t| t % WINDOW != 0)
            .map(|t| (&sets[t - 1], &sets[t]))
            .filter(|(a, b)| !(a.is_empty() && b.is_empty()))
            .map(|(a, b)| 1.0 - a.intersection(b).count() as f64 / a.union(b).count() as f64)
            .collect();
        assert_eq!(sums.pairs as usize, distances.len(), "{name}, layer {layer}");
        assert!((sums.jaccard - distances.iter().sum::<f64>()).abs() < 1e-9, "{name}, layer {layer}");
        for (a, b) in sums.cosines.iter().zip(naive.cosines[layer]) {
            assert!((a - b).abs() < 1e-9 * tokens as f64, "{name}, layer {layer}: {a} {b}");
        }
        for sparsity in [0.1, 0.5, 0.9] {
            let Some(cut) = made.threshold_for_sparsity(layer, sparsity) else {
                assert!(c.activation.is_sparse());
                continue;
            };
            let all = &naive.magnitudes[layer];
            let below = all.iter().filter(|m| **m <= cut).count() as f64 / all.len() as f64;
            assert!((below - sparsity).abs() < 0.01, "{name}, layer {layer}: {below} below {cut}, not {sparsity}");
        }
    }
}

#[test]
fn counts_distances_and_cosines_are_those_of_plain_loops() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["relullama", "opt", "bamboo", "llama", "llama-gelu"] {
        agrees_with_plain_loops(packed(&fixture(name), &dir.path().join("x.neurons"), None), 130);
    }
    // Five layers, so that each look-ahead has some.
    agrees_with_plain_loops(packed(&root().join("assets/demo"), &dir.path().join("x.neurons"), None), 60);
}

/// Neurons of experts that are active, counted one by one.
struct Inside(Vec<u32>, Activation);

impl Observer for Inside {
    fn layer(&mut self, _: &Seen<'_>) {}

    fn looks_inside(&self) -> bool {
        true
    }

    fn inside(&mut self, seen: &SeenExperts<'_>) {
        for (group, _, products) in seen.each() {
            let (gates, ups) = products.split_at(products.len() / 2);
            for (neuron, (&gate, &up)) in gates.iter().zip(ups).enumerate() {
                let at = (seen.layer * EXPERTS + group.expert) * gates.len() + neuron;
                let up = if seen.kind == Ffn::Plain { 1.0 } else { up };
                self.0[at] += u32::from(self.1.apply(gate) * up != 0.0);
            }
        }
    }
}

const EXPERTS: usize = 8;

/// Of a mixture's neurons those are counted that fire inside the chosen experts, in place and packed by neuron alike.
#[test]
fn neurons_inside_experts_are_counted_as_by_plain_loops() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("x.neurons");
    // Without gates, and with layers that have no experts.
    let (first, _) = inside_agrees(&fixture("nemotron-h-moe"), dir.path());
    assert!(first.statistics().inside.is_some());
    let (mut bad, _) = inside_agrees(&root().join("assets/demo-moe"), dir.path());
    // One more than tokens have the expert is a damaged file.
    bad.texts[0].inside.as_mut().unwrap()[3] = 1000;
    bad.write(&store).unwrap();
    let why = profile_file::open(&store).unwrap_err().to_string();
    assert!(why.contains("text.0.inside") && why.contains("neuron 3"), "{why}");
}

/// The profiles of a mixture in place and packed by neuron.
fn inside_agrees(model: &Path, dir: &Path) -> (Profile, Profile) {
    let store = dir.join("x.neurons");
    let source = Source::open(model, None).unwrap();
    pack(&source, &store, &PackOptions { types: Types::natural(&source).unwrap(), orders: None }, &|_, _| Ok(()))
        .unwrap();
    let made = [Model::in_place(source).unwrap(), Model::open(&store).unwrap()].map(|model| {
        let c = model.config.clone();
        let mut engine = Engine::new(model, 2, Kernels::best());
        let request = request(vec![text(7, 90, c.vocab.min(3000)), text(8, 40, c.vocab.min(3000))], None);
        let profile = counted(&mut engine, &request);
        let mut naive = Inside(vec![0; c.layers().len() * c.neurons()], c.activation);
        for text in &request.texts {
            for window in text.tokens.chunks(WINDOW) {
                let mut session = Session::new(&engine, WINDOW, KvType::F32).unwrap();
                engine.forward_observed(&mut session.kv, window, Logits::None, &mut naive);
            }
        }
        let inside: Vec<u64> = (0..c.layers().len()).flat_map(|layer| profile.inside(layer).unwrap()).collect();
        assert_eq!(inside, naive.0.iter().map(|&n| u64::from(n)).collect::<Vec<_>>());
        let path = dir.join("x.profile");
        profile.write(&path).unwrap();
        assert_same(&Profile::read(&profile_file::open(&path).unwrap()).unwrap(), &profile);
        let statistics = profile.statistics().inside.unwrap();
        assert!((0.05..0.6).contains(&statistics.active), "{}", statistics.active);
        (profile, statistics.active)
    });
    assert!((made[0].1 - made[1].1).abs() < 0.01, "{} and {}", made[0].1, made[1].1);
    let [(in_place, _), (by_neuron, _)] = made;
    (in_place, by_neuron)
}

/// Bytes of a section and where they lie.
fn place(bytes: &[u8], section: &str) -> (usize, usize) {
    let header: Json = serde_json::from_slice(&bytes[header_at(bytes)..]).unwrap();
    let found = header["sections"].as_array().unwrap().iter().find(|s| s["name"] == section).unwrap();
    (found["offset"].as_u64().unwrap() as usize, found["bytes"].as_u64().unwrap() as usize)
}

fn header_at(bytes: &[u8]) -> usize {
    u64::from_le_bytes(bytes[16..24].try_into().unwrap()) as usize
}

/// The file with its header changed, its length and checksum right.
fn edited(bytes: &[u8], change: impl FnOnce(&mut Json)) -> Vec<u8> {
    let mut header: Json = serde_json::from_slice(&bytes[header_at(bytes)..]).unwrap();
    change(&mut header);
    let text = header.to_string();
    let mut out = bytes[..header_at(bytes)].to_vec();
    out.extend(text.as_bytes());
    let len = out.len() as u64;
    out[24..32].copy_from_slice(&(text.len() as u64).to_le_bytes());
    out[32..40].copy_from_slice(&xxh3_64(text.as_bytes()).to_le_bytes());
    out[40..48].copy_from_slice(&len.to_le_bytes());
    out
}

/// The file with other bytes at `at` of a section, whose checksum is right.
fn with_section(bytes: &[u8], section: &str, at: usize, new: &[u8]) -> Vec<u8> {
    let (offset, len) = place(bytes, section);
    let mut out = bytes.to_vec();
    out[offset + at..offset + at + new.len()].copy_from_slice(new);
    let sum = format!("{:016x}", xxh3_64(&out[offset..offset + len]));
    edited(&out, |h| {
        let sections = h["sections"].as_array_mut().unwrap();
        sections.iter_mut().find(|s| s["name"] == section).unwrap()["checksum"] = json!(sum);
    })
}

#[test]
fn bad_profiles_are_refused_with_the_field_and_the_command_that_makes_a_good_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut silu = engine("llama", dir.path());
    let path = dir.path().join("x.profile");
    counted(&mut silu, &request(vec![text(1, 60, 320), text(2, 60, 320)], None)).write(&path).unwrap();
    let good = std::fs::read(&path).unwrap();
    profile_at(&silu.model, &path).unwrap();
    let head = |change: fn(&mut Json)| edited(&good, change);
    let nan = f64::NAN.to_le_bytes();
    let counts = place(&good, "text.1.counts").0;
    let mut flipped = good.clone();
    flipped[counts] ^= 1;
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"GGUF".to_vec(), "not a profile (it does not begin with PROFILE)"),
        (good[..good.len() - 1].to_vec(), "file length: says "),
        (good[..good.len() / 2].to_vec(), "it was cut or not finished"),
        (flipped, "text.1.counts: checksum "),
        (head(|h| h["fingerprint"] = json!("0123")), "fingerprint: is 0123, the model's is "),
        (head(|h| h["layers"] = json!(0)), "layers: is 0; it must be 1 to 4096"),
        (head(|h| h["layers"] = json!(3)), "cuts: are not one magnitude for each of 3 layers"),
        (head(|h| h["ffn"] = json!(95)), "text.0.counts: is Numbers of 768 bytes, not Numbers of 760"),
        (head(|h| h["ffn"] = json!(1u64 << 40)), "ffn: is 1099511627776"),
        (head(|h| h["hidden"] = json!(65)), "layers: layers, hidden size and neurons are [2, 65, 96]"),
        (head(|h| h["cuts"][1] = json!(-0.5)), "cuts: are not one magnitude"),
        (head(|h| h["cuts"][1] = json!(null)), "header: not understood"),
        (head(|h| h["cuts"][1] = json!(1e300)), "cuts: are not one magnitude"),
        (head(|h| h["sparsity"] = json!(1.0)), "sparsity: is 1, not a share"),
        (head(|h| h["sparsity"] = json!(null)), "cuts: are there without a sparsity"),
        (head(|h| h["next"] = json!(1)), "header: not understood: unknown field `next`"),
        (head(|h| h["texts"] = json!([])), "texts: are 0; it must be 1 to 4096"),
        (head(|h| h["texts"][1]["checksum"] = h["texts"][0]["checksum"].clone()), "text 2: is there twice"),
        (head(|h| h["texts"][1]["tokens"] = json!(61)), "text 2: says 61 of 60 tokens"),
        (head(|h| h["texts"][1]["tokens"] = json!(0)), "text.1.counts: layer 0, neuron "),
        (head(|h| h["texts"][1]["window"] = json!(0)), "text 2: says 60 of 60 tokens in windows of 0"),
        (head(|h| h["texts"][1]["wanted"] = json!(61)), "text 2: holds 60 of 61 tokens: the profile is not finished"),
        (head(|h| h["sections"][1]["name"] = json!("x")), "text.0.sums: the section is missing"),
        (
            with_section(&good, "text.1.counts", 4 * 97, &61u32.to_le_bytes()),
            "text.1.counts: layer 1, neuron 1: 61 of 60 tokens",
        ),
        (with_section(&good, "text.0.sums", 8, &nan), "text.0.sums: layer 0: 58 pairs have Jaccard distances of NaN"),
        (with_section(&good, "text.0.sums", 16, &nan), "text.0.sums: layer 0: the cosines of 60 tokens are NaN"),
        (
            with_section(&good, "text.0.sums", 40, &61u64.to_le_bytes()),
            "text.0.sums: layer 1: 61 pairs of neighbours in 60 tokens",
        ),
        (
            with_section(&good, "text.1.magnitudes", 8 * BINS, &u64::MAX.to_le_bytes()),
            "text.1.magnitudes: layer 1: the bins do not hold 5760 magnitudes",
        ),
    ];
    for (bytes, want) in cases {
        std::fs::write(&path, bytes).unwrap();
        let Err(error) = profile_at(&silu.model, &path) else { panic!("{want}: was accepted") };
        let says = error.to_string();
        assert!(matches!(error, Error::BadFile(_)) && says.starts_with(path.to_str().unwrap()), "{says}");
        assert!(says.contains(want), "no {want:?} in: {says}");
        assert!(says.contains("make it again with `dynamicinfer profile MODEL --fresh --text FILE`"), "{says}");
    }
}

/// Damage that the checksums agree with never leads outside the file.
#[test]
fn a_profile_with_any_bit_of_its_header_changed_is_refused_or_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine("llama", dir.path());
    let path = dir.path().join("x.profile");
    counted(&mut engine, &request(vec![text(1, 60, 320)], None)).write(&path).unwrap();
    let good = std::fs::read(&path).unwrap();
    let at = header_at(&good);
    let mut random = Prng::new(5);
    let mut read = 0;
    for i in 0..1500 {
        let mut bytes = good.clone();
        let bit = random.below(8 * (good.len() - at) as u64) as usize;
        bytes[at + bit / 8] ^= 1 << (bit % 8);
        let sum = xxh3_64(&bytes[at..]);
        bytes[32..40].copy_from_slice(&sum.to_le_bytes());
        // Under a new name each: a file system that writes a file again waits for the disk.
        let path = dir.path().join(i.to_string());
        std::fs::write(&path, &bytes).unwrap();
        match profile_file::open(&path).and_then(|file| Profile::read(&file)) {
            Ok(profile) => {
                profile.statistics();
                read += 1;
            }
            Err(error) => assert!(matches!(error, Error::BadFile(_)), "{error:?}"),
        }
    }
    assert!(read > 100, "{read}");
}

/// A place of its own: working directory, cache and data directories.
struct Place(tempfile::TempDir);

impl Place {
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
        let dir = self.0.path();
        command.args(args).current_dir(dir).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("XDG_CACHE_HOME", dir.join("cache")).env("XDG_DATA_HOME", dir.join("data"));
        for variable in ["DYNAMICINFER_LOG", "DYNAMICINFER_ASSETS"] {
            command.env_remove(variable);
        }
        command
    }

    /// Status, data, talk.
    fn run(&self, args: &[&str]) -> (i32, String, String) {
        let done = self.command(args).output().unwrap();
        let err = String::from_utf8(done.stderr).unwrap();
        assert!(!err.contains("panicked"), "{args:?}: {err}");
        (done.status.code().unwrap(), String::from_utf8(done.stdout).unwrap(), err)
    }

    fn json(&self, args: &[&str]) -> Json {
        let (code, out, err) = self.run(args);
        assert_eq!(code, 0, "{args:?}: {err}");
        serde_json::from_str(&out).unwrap()
    }

    fn refused(&self, args: &[&str], code: i32, want: &str) {
        let (status, out, err) = self.run(args);
        assert_eq!((status, out.as_str()), (code, ""), "{args:?}: {err}");
        assert!(err.contains(want), "{args:?}: no {want:?} in: {err}");
    }

    fn file(&self, name: &str, content: &str) {
        std::fs::write(self.0.path().join(name), content).unwrap();
    }
}

#[test]
fn a_profile_is_made_added_to_shown_and_found_again() {
    let place = Place(tempfile::tempdir().unwrap());
    let (model, opt, silu) = (fixture("relullama"), fixture("opt"), fixture("llama"));
    let [model, opt, silu] = [&model, &opt, &silu].map(|p| p.to_str().unwrap());
    place.file("a.txt", &"Once upon a time there was a fox. ".repeat(20));
    place.file("b.txt", &"The king had three daughters, and all were clever. ".repeat(20));
    place.file("empty.txt", "");
    place.refused(&["profile", model], 2, "has no profile yet; make one: dynamicinfer profile ");
    place.refused(&["profile", model, "--fresh"], 2, "--text");
    place.refused(&["profile", model, "--text", "c.txt"], 1, "cannot open c.txt");
    place.refused(
        &["profile", model, "--text", "a.txt", "--sparsity", "0.5"],
        2,
        "this model's activation has zeros, which decide; leave it out",
    );
    place.refused(&["profile", silu, "--text", "a.txt", "--sparsity", "1"], 2, "give a share between 0 and 1");
    place.refused(&["profile", model, "--text", "a.txt", "--max-tokens", "0"], 2, "give at least 1 token");

    // One text, then another; the first is not counted again.
    let one = place.json(&["profile", model, "--text", "a.txt", "--json", "--max-tokens", "300"]);
    assert_eq!((one["texts"].as_u64(), one["tokens"].as_u64()), (Some(1), Some(300)));
    assert_eq!(one["layers"].as_array().unwrap().len(), 2);
    assert_eq!((&one["layers"][0]["texts"], &one["layers"][1]["cosines"][0]), (&json!(null), &json!(null)));
    let args = ["profile", model, "--text", "a.txt", "b.txt", "a.txt", "--json", "--max-tokens", "300"];
    let (code, out, err) = place.run(&args);
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("a.txt: is in the profile already\n"), "{err}");
    let two: Json = serde_json::from_str(&out).unwrap();
    assert_eq!((two["texts"].as_u64(), two["tokens"].as_u64()), (Some(2), Some(600)));
    assert!(two["layers"][0]["texts"]["mean"].as_f64().unwrap() > 0.0);
    assert!(two["path"].as_str().unwrap().contains("/data/dynamicinfer/models/"));
    let (_, table, err) = place.run(&["profile", model, "--plot", "plots"]);
    assert!(table.contains(": 600 tokens of 2 texts, 2 layers of 96 neurons; "), "{table}");
    assert!(table.contains("| layer | inactive % |") && table.contains("\n|   all |"), "{table}");
    for plot in ["cdf.svg", "sparsity.svg", "similarity.svg", "distance.svg"] {
        let svg = std::fs::read_to_string(place.0.path().join("plots").join(plot)).unwrap();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && err.contains(plot), "{plot}: {err}");
        assert!(!svg.contains("NaN"), "{plot}");
    }

    // Of the same text another part counts anew; a fresh profile has nothing of the old one.
    let (_, out, err) = place.run(&["profile", model, "--text", "a.txt", "--json"]);
    assert!(err.contains("a.txt: is in the profile with 300 tokens in windows of 256; counted anew"), "{err}");
    let again: Json = serde_json::from_str(&out).unwrap();
    assert!(again["texts"] == 2 && again["tokens"].as_u64().unwrap() > 600);
    assert_eq!(place.json(&["profile", model, "--text", "a.txt", "--fresh", "--json"])["texts"], 1);
    place.refused(&["profile", model, "--text", "empty.txt"], 2, "empty.txt holds no tokens to count");

    // Models without zeros keep the cuts of their first texts.
    let cut = place.json(&["profile", silu, "--text", "a.txt", "--sparsity", "0.7", "--json"]);
    assert!((cut["layers"][0]["sparsity"].as_f64().unwrap() - 0.7).abs() < 0.01, "{cut}");
    place.refused(
        &["profile", silu, "--text", "b.txt", "--sparsity", "0.5"],
        2,
        "the profile has activation thresholds for 0.7; use those, or start a new one with --fresh",
    );
    let more = place.json(&["profile", silu, "--text", "b.txt", "--json"]);
    assert_eq!((&more["layers"][1]["cut"], &more["texts"]), (&cut["layers"][1]["cut"], &json!(2)));

    // Beside a packed model; another model's is refused there, and --fresh mends a damaged one.
    assert_eq!(place.run(&["pack", model, "-o", "m.neurons", "--quant", "q8_0"]).0, 0);
    let by_fingerprint = place.json(&["profile", "m.neurons", "--json"]);
    assert!(by_fingerprint["path"].as_str().unwrap().contains("/data/"), "packed otherwise, it is the same model");
    assert_eq!(place.run(&["profile", opt, "--text", "a.txt", "-o", "m.activation.profile"]).0, 0);
    place.refused(&["profile", "m.neurons"], 5, "m.activation.profile: fingerprint: is ");
    place.refused(&["profile", "m.neurons", "--text", "b.txt"], 5, "belongs to another model");
    assert_eq!(place.run(&["profile", "m.neurons", "--text", "b.txt", "--fresh"]).0, 0);
    let beside = place.json(&["profile", "m.neurons", "--json"]);
    assert!(beside["path"] == "m.activation.profile" && beside["texts"] == 1, "{beside}");
    let bytes = std::fs::read(place.0.path().join("m.activation.profile")).unwrap();
    std::fs::write(place.0.path().join("m.activation.profile"), &bytes[..5000]).unwrap();
    place.refused(&["profile", "m.neurons"], 5, "make it again with `dynamicinfer profile MODEL --fresh --text FILE`");
}

#[test]
fn the_demo_models_come_with_profiles() {
    let place = Place(tempfile::tempdir().unwrap());
    for (model, sparsity) in [("demo", 0.888), ("demo-silu", 0.503)] {
        let shown = place.json(&["profile", model, "--json"]);
        let path = shown["path"].as_str().unwrap();
        assert!(path.ends_with(&format!("profiles/models/{model}/activation.profile")), "{path}");
        assert!((shown["model"].as_str(), shown["tokens"].as_u64() >= Some(60_000)) == (Some(model), true), "{shown}");
        assert!((shown["model_spread"]["sparsity"].as_f64().unwrap() - sparsity).abs() < 0.01);
        // The held-out book stays unseen.
        assert!(!shown["profiled"].to_string().contains("jacobs"));
    }
}

#[test]
fn ctrl_c_keeps_what_was_counted_and_the_same_command_goes_on() {
    let place = Place(tempfile::tempdir().unwrap());
    let model = fixture("relullama");
    let mut random = Prng::new(6);
    let words: Vec<String> = (0..8000).map(|_| format!("{} ", random.below(1000))).collect();
    place.file("a.txt", &words.concat());
    place.file("b.txt", "x");
    // So that the model is packed.
    assert_eq!(place.run(&["profile", model.to_str().unwrap(), "--text", "b.txt", "-o", "b.profile"]).0, 0);
    let call = ["profile", model.to_str().unwrap(), "--text", "a.txt", "a.txt", "-t", "1", "-c", "100", "-o"];
    let mut child = place.command(&[&call[..], &["x.profile"]].concat()).spawn().unwrap();
    let mut err = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    // It speaks just before it begins.
    err.read_line(&mut line).unwrap();
    assert_eq!(line, "a.txt: the same text is given twice; it counts once\n");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let mut rest = String::new();
    err.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest}");
    assert!(rest.contains("the counts are kept in x.profile.partial; the same command resumes"), "{rest}");
    assert!(rest.ends_with("dynamicinfer: interrupted\n"), "{rest}");
    assert!(!place.0.path().join("x.profile").exists());
    // Another request starts anew and says so; the same one goes on.
    let first = place.0.path().join("x.profile.partial");
    std::fs::copy(&first, place.0.path().join("y.profile.partial")).unwrap();
    let (code, _, err) = place.run(&[&call[..], &["y.profile", "--max-tokens", "200"]].concat());
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("is of another model, other texts or options; starting anew"), "{err}");
    let (code, table, err) = place.run(&[&call[..], &["x.profile"]].concat());
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("resuming after ") && !first.exists(), "{err}");
    let (_, whole, _) = place.run(&[&call[..], &["z.profile"]].concat());
    assert_eq!(table, whole);
    let bytes = |name: &str| std::fs::read(place.0.path().join(name)).unwrap();
    assert!(bytes("x.profile") == bytes("z.profile"), "the file is the same to the byte");
}
