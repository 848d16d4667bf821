//! Networks that say which neurons inside a mixture's experts may fire: what they let through is computed as without them, what they leave
//! out adds nothing, and what is counted of them is what they did.

use crate::support::law::logits;
use crate::support::{error, numbers, predictor_header};
use dynamicinfer::cpu::{Isa, Kernels};
use dynamicinfer::disk;
use dynamicinfer::engine::{BatchToken, Choice, Engine, LiveAudit, Logits, Observer, Seen, SeenExperts, Sparsity};
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::host_cache::{HostCache, HostCacheOptions, least_bytes};
use dynamicinfer::lab::synth::{Mixture, Shape, write_gguf, write_predictor};
use dynamicinfer::model::config::Activation;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::open::layer_blocks;
use dynamicinfer::pack::{PackOptions, Types, pack};
use dynamicinfer::predictor::mlp::{self, Measured, Network};
use dynamicinfer::predictor::{self, Calibration, Predictor, Scratch, Tools};
use dynamicinfer::prng::Prng;
use dynamicinfer::training::samples::{Plan, collect};
use dynamicinfer::training::train::{Job, Options, train};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const RANK: usize = 32;
/// Single and few tokens, and a prompt's chunk, which goes by the gates.
const PASSES: [usize; 7] = [1, 1, 40, 3, 1, 20, 1];

fn shape(active: Option<f64>) -> Shape {
    Shape {
        hidden: 128,
        layers: 3,
        ffn: 416,
        heads: 4,
        kv_heads: 2,
        vocab: 300,
        context: 256,
        activation: Activation::Relu,
        active,
        seed: 11,
        experts: Some(Mixture::flat(8, 3)),
        outliers: 0,
    }
}

/// A mixture packed by neuron, and the file that it was packed from.
fn packed(dir: &Path, active: Option<f64>, quant: Quant) -> (PathBuf, PathBuf) {
    let (gguf, store) = (dir.join("m.gguf"), dir.join("m.neurons"));
    write_gguf(&shape(active), quant, &gguf, &|_, _| Ok(())).unwrap();
    let source = Source::open(&gguf, None).unwrap();
    let options = PackOptions { types: Types::natural(&source).unwrap(), orders: None };
    pack(&source, &store, &options, &|_, _| Ok(())).unwrap();
    (gguf, store)
}

/// Writes networks of random numbers whose scores are `bias(layer, neuron)` more than chance, of rank 0 or [`RANK`].
fn networks(model: &Model, path: &Path, rank: usize, mut bias: impl FnMut(usize, usize) -> f32) -> Arc<dyn Predictor> {
    let (c, mut rng) = (&model.config, Prng::new(2));
    let neurons = c.neurons();
    let mut network = |layer| Network {
        layer,
        ahead: 0,
        inner: numbers(&mut rng, rank * c.hidden, 0.2),
        inner_bias: numbers(&mut rng, rank, 0.1),
        outer: numbers(&mut rng, neurons * rank, 1.0),
        outer_bias: (0..neurons).map(|neuron| bias(layer, neuron)).collect(),
        calibration: Calibration::new(vec![-1.0, 1.0], vec![0.0, 1.0]),
        measured: Measured::default(),
    };
    let networks: Vec<Network> = (0..c.layers().len()).map(&mut network).collect();
    mlp::write(path, predictor_header(model), &networks).unwrap();
    predictor::open(path, model).unwrap()
}

/// An engine whose neurons are computed from a probability of a half on.
fn engine(store: &Path, threads: usize, kernels: Kernels, predictor: Option<&Arc<dyn Predictor>>) -> Engine {
    let mut engine = Engine::new(Model::open(store).unwrap(), threads, kernels);
    if let Some(predictor) = predictor {
        let choice = Choice::Predicted { predictor: predictor.clone(), threshold: 0.5, activation_threshold: 0.0 };
        engine.set_sparsity(Sparsity::new(vec![choice; engine.model.config.layers().len()], 0).unwrap());
    }
    engine
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn where_everything_may_fire_no_bit_is_another() {
    let dir = tempfile::tempdir().unwrap();
    for quant in [Quant::F32, Quant::Q4, Quant::Block(BlockType::Q8_0)] {
        let (_, store) = packed(dir.path(), Some(0.3), quant);
        let model = Model::open(&store).unwrap();
        for rank in [0, RANK] {
            let all = networks(&model, &dir.path().join("p.predictor"), rank, |_, _| 1e4);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
                let of = |threads, predictor| {
                    let mut engine = engine(&store, threads, Kernels::of(isa).unwrap(), predictor);
                    (bits(&logits(&mut engine, KvType::F32, &PASSES, None)), engine.report.inside)
                };
                let (expected, none) = of(2, None);
                let (found, inside) = of(3, Some(&all));
                assert!(found == expected, "{} rank {rank} with {}", quant.name(), isa.name());
                // Of 27 tokens, those of the chunk left out, in three layers; without a network those count that fire.
                let all = 27 * 3 * 3 * 416;
                assert_eq!((none.1, inside), (all, (all, all)));
                assert!((0.2..0.4).contains(&(none.0 as f64 / all as f64)), "{none:?}");
            }
        }
    }
}

/// The store with zeros for up of some neurons: they add nothing.
fn without(store: &Path, leaves_out: impl Fn(usize, usize) -> bool) -> PathBuf {
    let to = store.with_file_name("less.neurons");
    let model = Model::open(store).unwrap();
    let mut bytes = std::fs::read(store).unwrap();
    let start = model.store().unwrap().file().bytes().as_ptr().addr();
    let c = &model.config;
    for (l, layer) in model.layers.iter().enumerate() {
        for (e, expert) in layer.ffn.experts().unwrap().experts.iter().enumerate() {
            let up = &expert.input.parts()[1];
            for neuron in (0..c.widest_ffn()).filter(|neuron| leaves_out(l, e * c.widest_ffn() + neuron)) {
                let at = up.row(neuron).as_ptr().addr() - start;
                bytes[at..at + up.row_bytes].fill(0);
            }
        }
    }
    std::fs::write(&to, bytes).unwrap();
    to
}

#[test]
fn what_is_left_out_adds_nothing_and_all_else_is_added() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = packed(dir.path(), None, Quant::F32);
    let model = Model::open(&store).unwrap();
    let leaves_out = |layer: usize, neuron: usize| (neuron * 7 + layer).is_multiple_of(3);
    let bias = |layer, neuron| if leaves_out(layer, neuron) { -9.0 } else { 9.0 };
    let some = networks(&model, &dir.path().join("p.predictor"), 0, bias);
    let less = without(&store, leaves_out);
    let few = [1, 1, 3, 20, 1];
    let of =
        |store: &Path, predictor| logits(&mut engine(store, 2, Kernels::best(), predictor), KvType::F32, &few, None);
    let (all, expected, found) = (of(&store, None), of(&less, None), of(&store, Some(&some)));
    let (off, far) = (error(&found, &expected), error(&all, &expected));
    assert!(off < 1e-5 && far > 1e-2, "off by {off}; what is left out makes {far}");
}

#[test]
fn an_answer_depends_on_nobody_else_in_the_pass() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = packed(dir.path(), Some(0.3), Quant::F32);
    let model = Model::open(&store).unwrap();
    let some = networks(&model, &dir.path().join("p.predictor"), RANK, |_, _| -0.2);
    let mut one = engine(&store, 2, Kernels::best(), Some(&some));
    let mut all = engine(&store, 2, Kernels::best(), Some(&some));
    let new = || KvCache::new(&model.config, 16, KvType::F32).unwrap();
    let (mut alone, mut together): (Vec<_>, Vec<_>) =
        ((0..5).map(|_| new()).collect(), (0..5).map(|_| new()).collect());
    for step in 0..8 {
        let token = |sequence: usize| (5 + step * 37 + sequence as u32 * 61) % 300;
        let batch: Vec<BatchToken> = (0..5).map(|sequence| BatchToken { sequence, token: token(sequence) }).collect();
        let found = all.forward_batch(&mut together, &batch, Logits::Last).to_vec();
        for (sequence, kv) in alone.iter_mut().enumerate() {
            let expected = one.forward(kv, &[token(sequence)], Logits::Last);
            let off = error(&found[sequence * 300..(sequence + 1) * 300], expected);
            assert!(off < 1e-5, "sequence {sequence} of step {step} is off by {off}");
        }
    }
    assert_eq!(one.report.inside, all.report.inside);
    let share = one.report.inside.0 as f64 / one.report.inside.1 as f64;
    assert!((0.1..0.9).contains(&share), "{share} were computed: the test tries too little");
}

/// Counts by itself, from the predictor's own scores of all neurons, what an engine should compute and find.
struct Counts<'a> {
    model: &'a Model,
    predictor: Arc<dyn Predictor>,
    scores: Vec<f32>,
    computed: u64,
    active: u64,
    found: u64,
}

impl Observer for Counts<'_> {
    fn layer(&mut self, seen: &Seen<'_>) {
        let (mut pool, mut scratch) = (dynamicinfer::cpu::ThreadPool::new(1), Scratch::default());
        let (model, kernels) = (self.model, &Kernels::best());
        self.scores.resize(seen.n * model.config.neurons(), 0.0);
        let mut tools = Tools { model, pool: &mut pool, kernels, scratch: &mut scratch };
        self.predictor.score(&mut tools, seen.layer, 0, seen.residual, seen.n, &mut self.scores);
    }

    fn looks_inside(&self) -> bool {
        true
    }

    fn inside(&mut self, seen: &SeenExperts<'_>) {
        let c = &self.model.config;
        let least = self.predictor.calibration(seen.layer, 0).unwrap().score_at(0.5);
        assert!(seen.predicted && seen.groups.iter().map(|group| group.tokens).sum::<usize>() == 3 * seen.n);
        for ((group, routed, products), computed) in seen.each().zip(seen.computed.chunks_exact(c.widest_ffn())) {
            let scores = &self.scores[routed.token * c.neurons() + group.expert * c.widest_ffn()..][..c.widest_ffn()];
            for (neuron, (&score, &computed)) in scores.iter().zip(computed).enumerate() {
                assert_eq!(score >= least, computed, "layer {} expert {} neuron {neuron}", seen.layer, group.expert);
                let active = products[neuron] > 0.0 && products[c.widest_ffn() + neuron] != 0.0;
                self.computed += u64::from(computed);
                self.active += u64::from(active);
                self.found += u64::from(active && computed);
            }
        }
    }
}

#[test]
fn what_is_counted_is_what_was_done_and_looking_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = packed(dir.path(), Some(0.3), Quant::F32);
    let model = Model::open(&store).unwrap();
    let predictor = networks(&model, &dir.path().join("p.predictor"), RANK, |_, _| -0.2);
    let few = [1, 1, 3, 20, 1];
    let mut counts =
        Counts { model: &model, predictor: predictor.clone(), scores: Vec::new(), computed: 0, active: 0, found: 0 };
    let mut seen = engine(&store, 2, Kernels::best(), Some(&predictor));
    let looked_at = logits(&mut seen, KvType::F32, &few, Some(&mut counts));
    let mut plain = engine(&store, 2, Kernels::best(), Some(&predictor));
    assert!(bits(&looked_at) == bits(&logits(&mut plain, KvType::F32, &few, None)));
    for engine in [&seen, &plain] {
        assert_eq!(engine.report.inside, (counts.computed, 26 * 3 * 3 * 416));
    }
    // The live audit, of every pass of one token, and of as many tokens one by one.
    let mut audited = engine(&store, 2, Kernels::best(), Some(&predictor));
    audited.audit = Some(LiveAudit::new(1, Activation::Relu, vec![0.0; 3]));
    let ones = [1; 26];
    counts = Counts { computed: 0, active: 0, found: 0, ..counts };
    logits(&mut seen, KvType::F32, &ones, Some(&mut counts));
    logits(&mut audited, KvType::F32, &ones, None);
    let found = audited.audit.unwrap().counts;
    assert_eq!((found.active, found.found), (counts.active, counts.found));
    assert!(counts.found > 1000 && counts.found < counts.active, "{found:?}");
}

/// Gates are read of what may fire, and up and down of what does: the bytes are those of these rows.
#[test]
fn a_gate_is_read_only_where_it_may_fire() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = packed(dir.path(), Some(0.1), Quant::F32);
    let model = Model::open(&store).unwrap();
    let tenth =
        networks(
            &model,
            &dir.path().join("p.predictor"),
            0,
            |_, neuron| if neuron.is_multiple_of(10) { 9.0 } else { -9.0 },
        );
    let mut engine = engine(&store, 2, Kernels::best(), Some(&tenth));
    logits(&mut engine, KvType::F32, &[1; 60], None);
    let (c, experts) = (&model.config, model.layers[0].ffn.experts().unwrap());
    let (router, row) = (experts.router_bytes() as f64, experts.experts[0].down.row_bytes as f64);
    let of_layer = engine.report.ffn_bytes as f64 / (60 * c.layers().len()) as f64 - router;
    let rows = of_layer / row / (3 * c.widest_ffn()) as f64;
    // A tenth of the gates, and of these a tenth again, twice.
    assert!((0.1..0.14).contains(&rows), "{rows} rows for each neuron");
}

#[test]
fn from_disk_the_text_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = packed(dir.path(), Some(0.3), Quant::Q4);
    let model = Model::open(&store).unwrap();
    let predictor = networks(&model, &dir.path().join("p.predictor"), RANK, |_, _| -0.2);
    let mut mapped = engine(&store, 2, Kernels::best(), Some(&predictor));
    let expected = logits(&mut mapped, KvType::F32, &PASSES, None);
    let mut cached = engine(&store, 2, Kernels::best(), Some(&predictor));
    let blocks = layer_blocks(&cached.model).unwrap();
    let files: Vec<&std::fs::File> = cached.model.files().iter().map(|file| file.file()).collect();
    let disk = disk::open(&files).unwrap().disk;
    let frames = blocks.iter().map(|b| 3 * (b.block_bytes() + 3 * 2 * disk.align())).sum::<usize>() as u64;
    let bytes = least_bytes(&blocks, 8, disk.align()) + frames;
    let cache = HostCache::new(disk, &blocks, 8, HostCacheOptions { bytes, ..HostCacheOptions::new(0) }).unwrap();
    cached.set_host_cache(cache, None);
    cached.audit = Some(LiveAudit::new(1, Activation::Relu, vec![0.0; 3]));
    assert!(bits(&logits(&mut cached, KvType::F32, &PASSES, None)) == bits(&expected));
    assert_eq!(cached.report.inside, mapped.report.inside);
    let counts = cached.cached.as_mut().unwrap().cache.counts();
    assert!(counts.hits.min(counts.misses) > 20, "{counts:?}");
}

#[test]
fn what_is_planted_in_experts_is_found_and_can_be_learned() {
    let dir = tempfile::tempdir().unwrap();
    let (gguf, store) = packed(dir.path(), Some(0.1), Quant::F16);
    let path = dir.path().join("m.mlp.predictor");
    let planted = write_predictor(&shape(Some(0.1)), &gguf, &path, 2, &|_, _| Ok(())).unwrap();
    let [own] = &planted.predictor[..] else { panic!("{planted:?}") };
    assert!(own.recall > 0.95 && own.computed_share < 0.2, "{own:?}");
    assert!((0.07..0.13).contains(&planted.active_share), "{planted:?}");
    // The planted one belongs to the packed store, too.
    let model = Model::open(&store).unwrap();
    let predictor = predictor::open(&path, &model).unwrap();
    let mut counts =
        Counts { model: &model, predictor: predictor.clone(), scores: Vec::new(), computed: 0, active: 0, found: 0 };
    let mut run = Engine::new(Model::open(&store).unwrap(), 2, Kernels::best());
    let choice = Choice::Predicted { predictor, threshold: 0.5, activation_threshold: 0.0 };
    run.set_sparsity(Sparsity::new(vec![choice; 3], 0).unwrap());
    logits(&mut run, KvType::F32, &[20; 5], Some(&mut counts));
    assert!(counts.found as f64 > 0.9 * counts.active as f64, "{} of {}", counts.found, counts.active);
    // As much is learned from what the model does.
    let mut rng = Prng::new(3);
    let tokens: Vec<u32> = (0..6000).map(|_| rng.below(300) as u32).collect();
    let plan = Plan::new(&model, tokens.len(), 6000).unwrap();
    assert_eq!((plan.extent.experts, plan.extent.used, plan.extent.ffn), (8, 3, 416));
    let mut dense = Engine::new(Model::open(&store).unwrap(), 2, Kernels::best());
    let samples = dir.path().join("samples");
    let samples = collect(&mut dense, &tokens, &plan, &[0.0; 3], &samples, |_, _| Ok(())).unwrap();
    let (uses, counts) = samples.pairs(0, 0).counts(8, 0..plan.extent.tokens());
    let share = counts.iter().sum::<u64>() as f64 / (uses.iter().sum::<usize>() * 416) as f64;
    assert_eq!(uses.iter().sum::<usize>(), 3 * plan.extent.tokens());
    assert!((share - planted.active_share).abs() < 0.02, "{share} of the samples' neurons are active");
    let options = Options {
        ahead: Vec::new(),
        recall: 0.95,
        budget: u64::MAX,
        seed: 1,
        activation_thresholds: vec![0.0; 3],
        made: serde_json::json!({}),
    };
    let output = dir.path().join("learned.predictor");
    let job = Job {
        model: &model,
        kernels: &dense.kernels,
        threads: 2,
        samples: &samples,
        options: &options,
        output: &output,
    };
    let learned = train(job, &dir.path().join("parts"), &|_, _| Ok(())).unwrap();
    println!("planted {own:?}\nlearned {learned:?}");
    assert!(learned.recall >= 0.95 && learned.computed_share < 0.5, "{learned:?}");
    predictor::open(&output, &model).unwrap();
}
