//! What a sparse synthetic model promises: the statistics of activation that it was asked for, a predictor that finds its
//! active neurons, one model whatever form it is written in, and the same one for the same seed.

use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::{Choice, Engine, Logits, Observer, Seen, Sparsity};
use dynamicinfer::evaluation::audit::{Audit, Shares};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::Permutation;
use dynamicinfer::lab::synth::{
    Shape, Statistics, pack_draft, write_gguf, write_predictor, write_predictor_of_rank, write_store,
};
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{Activation, KvCache, KvType, Model};
use dynamicinfer::pack::{PackOptions, pack};
use dynamicinfer::predictor;
use dynamicinfer::prng::Prng;
use std::path::Path;

const ACTIVE: f64 = 0.10;

fn shape(seed: u64) -> Shape {
    Shape {
        hidden: 256,
        layers: 5,
        ffn: 1024,
        heads: 4,
        kv_heads: 2,
        vocab: 1000,
        context: 512,
        activation: Activation::Relu,
        active: Some(ACTIVE),
        seed,
        outliers: 0,
        experts: None,
    }
}

fn store(dir: &Path, shape: &Shape, quant: Quant) -> std::path::PathBuf {
    let path = dir.join(format!("m{}.{}.neurons", shape.seed, quant.name()));
    write_store(shape, quant, &path, &|_, _| Ok(())).unwrap();
    path
}

fn with_predictor(shape: &Shape, store: &Path) -> (std::path::PathBuf, Statistics) {
    let path = store.with_extension("mlp.predictor");
    let statistics = write_predictor(shape, store, &path, 2, &|_, _| Ok(())).unwrap();
    (path, statistics)
}

fn engine(store: &Path) -> Engine {
    Engine::new(Model::open(store).unwrap(), 2, Kernels::best())
}

/// Runs sequences of random tokens, some at a time, as decoding does. Not those that calibrated the predictor: longer, and
/// from another seed.
fn run(engine: &mut Engine, observer: &mut dyn Observer) {
    let vocab = engine.model.config.vocab as u64;
    let mut rng = Prng::new(77);
    for _ in 0..2 {
        let tokens: Vec<u32> = (0..200).map(|_| rng.below(vocab) as u32).collect();
        let mut kv = KvCache::new(&engine.model.config, tokens.len(), KvType::F16).unwrap();
        for some in tokens.chunks(20) {
            engine.forward_observed(&mut kv, some, Logits::None, observer);
        }
    }
}

/// Which neurons fire, counted without the library's help.
struct Firing {
    ffn: usize,
    /// `[layers][ffn]`
    counts: Vec<Vec<f64>>,
    tokens: Vec<f64>,
    /// Sum and number of the distances between neighbouring tokens.
    jaccard: Vec<(f64, f64)>,
    audit: Audit,
}

impl Observer for Firing {
    fn layer(&mut self, seen: &Seen<'_>) {
        self.audit.layer(seen);
        let l = seen.layer;
        let tokens: Vec<Vec<bool>> =
            seen.activations.chunks(self.ffn).map(|token| token.iter().map(|&a| a != 0.0).collect()).collect();
        for token in &tokens {
            self.counts[l].iter_mut().zip(token).for_each(|(count, &fires)| *count += f64::from(u8::from(fires)));
            self.tokens[l] += 1.0;
        }
        for pair in tokens.windows(2) {
            let count = |f: fn(bool, bool) -> bool| pair[0].iter().zip(&pair[1]).filter(|&(&a, &b)| f(a, b)).count();
            let (both, either) = (count(|a, b| a && b), count(|a, b| a || b));
            self.jaccard[l].0 += 1.0 - both as f64 / either as f64;
            self.jaccard[l].1 += 1.0;
        }
    }
}

impl Firing {
    fn of(engine: &mut Engine) -> Firing {
        let c = &engine.model.config;
        let mut firing = Firing {
            ffn: c.widest_ffn(),
            counts: vec![vec![0.0; c.widest_ffn()]; c.layers().len()],
            tokens: vec![0.0; c.layers().len()],
            jaccard: vec![(0.0, 0.0); c.layers().len()],
            audit: Audit::new(c, vec![0.0; c.layers().len()]),
        };
        run(engine, &mut firing);
        firing
    }

    fn active_share(&self, layer: usize) -> f64 {
        self.counts[layer].iter().sum::<f64>() / self.tokens[layer] / self.ffn as f64
    }

    fn top_share(&self, layer: usize) -> f64 {
        let mut sorted = self.counts[layer].clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        sorted[..self.ffn * 2 / 5].iter().sum::<f64>() / sorted.iter().sum::<f64>()
    }

    fn neighbour_jaccard(&self, layer: usize) -> f64 {
        self.jaccard[layer].0 / self.jaccard[layer].1
    }
}

/// Over all layers, when the engine computes what the file's predictor says.
fn predicted(store: &Path, predictor: &Path, ahead: usize) -> Shares {
    let mut engine = engine(store);
    let predictor = predictor::open(predictor, &engine.model).unwrap();
    let threshold = predictor.threshold(0, 0);
    let choices =
        vec![Choice::Predicted { predictor, threshold, activation_threshold: 0.0 }; engine.model.config.layers().len()];
    engine.set_sparsity(Sparsity::new(choices, ahead).unwrap());
    let (all, by_layer) = Firing::of(&mut engine).audit.shares();
    for (layer, shares) in by_layer.iter().enumerate() {
        assert!(shares.recall > 0.93, "ahead {ahead}, layer {layer}: {shares:?}");
    }
    all
}

#[test]
fn activity_is_as_asked_for_and_as_in_the_paper_and_the_predictor_finds_it() {
    let dir = tempfile::tempdir().unwrap();
    // Four bits move the gates: their limits are wider.
    for (quant, limits) in
        [(Quant::F16, (0.2, 0.75..0.90, 0.65..0.80, 1.3)), (Quant::Q4, (0.3, 0.7..0.92, 0.6..0.85, 1.4))]
    {
        let (share, top, jaccard, computed) = limits;
        let shape = shape(1);
        let store = store(dir.path(), &shape, quant);
        let firing = Firing::of(&mut engine(&store));
        for layer in 0..shape.layers {
            let case = format!("{}, layer {layer}", quant.name());
            let active = firing.active_share(layer);
            assert!((active / ACTIVE - 1.0).abs() < share, "{case}: {active} of the neurons are active");
            let (t, j) = (firing.top_share(layer), firing.neighbour_jaccard(layer));
            assert!(top.contains(&t), "{case}: the top 40 % of neurons make {t} of the activations");
            assert!(jaccard.contains(&j), "{case}: neighbouring tokens are {j} apart");
            // A power law and no two classes: the middle tenth lies between both ends.
            let mut rates = firing.counts[layer].clone();
            rates.sort_by(|a, b| b.total_cmp(a));
            let mean = |tenth: usize| rates[tenth * 102..][..102].iter().sum::<f64>();
            assert!(mean(0) > 3.0 * mean(3) && mean(3) > 1.5 * mean(9) && mean(9) > 0.0, "{case}");
        }
        let (predictor, told) = with_predictor(&shape, &store);
        for ahead in [0, 1, 4] {
            let shares = predicted(&store, &predictor, ahead);
            let case = format!("{}, from {ahead} before: {shares:?}", quant.name());
            assert!(shares.recall >= 0.95, "{case}");
            assert!(shares.computed_share <= computed * shares.active_share, "{case}");
            // What is told holds on other tokens and in longer texts.
            let told = told.predictor.iter().find(|d| d.ahead == ahead).unwrap();
            assert!((told.recall - shares.recall).abs() < 0.01, "{case}, told {told:?}");
            assert!((told.computed_share - shares.computed_share).abs() < 0.01, "{case}, told {told:?}");
        }
        assert!((told.active_share / ACTIVE - 1.0).abs() < share, "told {told:?}");
    }
}

/// Of a few tokens, `[n, vocab]`.
/// A predictor of a larger rank stands in for a trained one's bytes: the same neurons, at the same scores, for more reading.
#[test]
fn a_predictor_of_a_larger_rank_reads_more_and_predicts_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (shape, wide) = (shape(3), dir.path().join("wide.predictor"));
    let store = store(dir.path(), &shape, Quant::F16);
    let (_, small) = with_predictor(&shape, &store);
    let widened = write_predictor_of_rank(&shape, &store, &wide, (2, 128), &|_, _| Ok(())).unwrap();
    assert!(widened.predictor_bytes_per_token > 3 * small.predictor_bytes_per_token);
    let all_else = |s: &Statistics| {
        let mut s = serde_json::to_value(s).unwrap();
        s["predictor_bytes_per_token"] = 0.into();
        s
    };
    assert_eq!(all_else(&widened), all_else(&small));
    for rank in [0, 31, 33] {
        let refused = write_predictor_of_rank(&shape, &store, &wide, (2, rank), &|_, _| Ok(())).unwrap_err();
        assert!(refused.to_string().contains("take a multiple of 32"), "{refused}");
    }
}

fn logits(store: &Path) -> Vec<f32> {
    let mut engine = engine(store);
    let mut kv = KvCache::new(&engine.model.config, 16, KvType::F32).unwrap();
    let tokens: Vec<u32> = (0..16).map(|i| 300 + i * 31).collect();
    engine.forward(&mut kv, &tokens, Logits::All).to_vec()
}

#[test]
fn a_gguf_and_a_store_of_one_shape_are_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    for active in [Some(ACTIVE), None] {
        let shape = Shape { active, ..shape(3) };
        for quant in Quant::OWN {
            let direct = store(dir.path(), &shape, quant);
            let gguf = dir.path().join("m.gguf");
            write_gguf(&shape, quant, &gguf, &|_, _| Ok(())).unwrap();
            let packed = dir.path().join("packed.neurons");
            let options = PackOptions { types: quant.into(), orders: None };
            pack(&Source::open(&gguf, None).unwrap(), &packed, &options, &|_, _| Ok(())).unwrap();
            let (a, b) = (logits(&direct), logits(&packed));
            if quant.is_grouped() {
                if active.is_none() {
                    // Every layer of plain random weights turns the residual, so that rounding grows from one to the next.
                    continue;
                }
                // GGUF groups `down` along the neurons, a store along the outputs: its numbers are rounded otherwise.
                let top = a.iter().fold(0f32, |m, v| m.max(v.abs()));
                let error = a.iter().zip(&b).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / top;
                let limit = if quant == Quant::Q8 { 0.02 } else { 0.3 };
                assert!(error < limit, "{} {active:?}: {error}", quant.name());
            } else {
                assert!(a == b, "{} {active:?}", quant.name());
            }
        }
    }
}

#[test]
fn the_predictor_of_a_gguf_belongs_to_every_store_that_is_packed_from_it() {
    let dir = tempfile::tempdir().unwrap();
    let shape = Shape { layers: 2, ..shape(4) };
    let gguf = dir.path().join("m.gguf");
    write_gguf(&shape, Quant::Q8, &gguf, &|_, _| Ok(())).unwrap();
    let draft = pack_draft(&gguf, &|_, _| Ok(())).unwrap();
    let (written, _) = with_predictor(&shape, draft.path());
    let gone = draft.path().to_owned();
    drop(draft);
    assert!(!gone.exists(), "{}", gone.display());

    let source = Source::open(&gguf, None).unwrap();
    let reversed = Permutation::new(&(0..shape.ffn as u32).rev().collect::<Vec<_>>()).unwrap();
    let reversed = vec![reversed; shape.layers];
    for (quant, orders) in [(Quant::Q8, None), (Quant::F16, Some(reversed))] {
        let packed = dir.path().join("packed.neurons");
        pack(&source, &packed, &PackOptions { types: quant.into(), orders }, &|_, _| Ok(())).unwrap();
        let shares = predicted(&packed, &written, 0);
        assert!(shares.recall >= 0.95 && shares.computed_share <= 1.3 * shares.active_share, "{shares:?}");
    }
    let other = Model::open(&store(dir.path(), &shape, Quant::Q8)).unwrap();
    let refused = predictor::open(&written, &other).err().expect("a store that was written directly is another model");
    assert!(refused.to_string().contains("fingerprint"), "{refused}");
}

#[test]
fn the_seed_says_every_bit_whatever_the_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let made = |seed: u64, threads: usize, name: &str| -> [Vec<u8>; 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let shape = Shape { layers: 2, ..shape(seed) };
            let (store, gguf) = (dir.path().join(name).with_extension("neurons"), dir.path().join("m.gguf"));
            write_store(&shape, Quant::F16, &store, &|_, _| Ok(())).unwrap();
            write_gguf(&shape, Quant::Q4, &gguf, &|_, _| Ok(())).unwrap();
            let (predictor, _) = with_predictor(&shape, &store);
            [store, gguf, predictor].map(|path| std::fs::read(path).unwrap())
        })
    };
    let (one, three, other) = (made(5, 1, "a"), made(5, 3, "b"), made(6, 1, "c"));
    for (i, what) in ["store", "GGUF", "predictor"].into_iter().enumerate() {
        assert!(one[i] == three[i], "the {what} depends on the number of threads");
        assert!(one[i] != other[i], "the {what} does not depend on the seed");
    }
}

#[test]
fn what_cannot_be_sparse_is_refused_with_the_reason() {
    let refused = |shape: Shape| {
        let dir = tempfile::tempdir().unwrap();
        let error = write_store(&shape, Quant::F16, &dir.path().join("m.neurons"), &|_, _| Ok(())).unwrap_err();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        error.to_string()
    };
    assert!(refused(Shape { active: Some(0.6), ..shape(1) }).contains("--active 0.6: take a share from 0.01 to 0.5"));
    assert!(refused(Shape { active: Some(f64::NAN), ..shape(1) }).contains("take a share"));
    assert!(refused(Shape { activation: Activation::Silu, ..shape(1) }).contains("relu or relu2, not silu"));
    assert!(refused(Shape { hidden: 48, heads: 3, kv_heads: 3, ..shape(1) }).contains("at least 64"));
}
