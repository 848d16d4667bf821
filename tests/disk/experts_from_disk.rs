//! Laws of a mixture whose experts do not all fit into memory: whatever lies there, and however reads end, the logits are bit for bit those of
//! the mapped file; what cannot be read is an error with its file, and no answer; reads begin when the experts are known.

use crate::gguf_file::fixture;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::disk::{self, Disk, Faults, Outcome, Read, VirtualDisk, file_of};
use dynamicinfer::engine::{Engine, Foresight, Logits, Observer, Seen, SeenAttention};
use dynamicinfer::formats::neuron_store::NeuronStore;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::host_cache::{HostCache, HostCacheOptions, LayerBlocks, least_bytes};
use dynamicinfer::lab::synth::{Mixture, Shape, write_gguf};
use dynamicinfer::model::config::Activation;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::open::layer_blocks;
use dynamicinfer::pack::{PackOptions, Types, pack};
use dynamicinfer::predictor::Router;
use dynamicinfer::prng::Prng;
use dynamicinfer::scheduler::Policy;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Of one file each: a tensor for each expert and one for all of a layer, routers before and after attention, ReLU and SiLU, with a shared
/// expert beside them, with biases, with a layer that has none, in floats and in 4 bits; and two whose experts are packed by neuron.
fn models(dir: &Path) -> Vec<PathBuf> {
    let of = [
        "qwen3-moe",
        "mixtral.gguf",
        "mixtral.split.gguf",
        "turbosparse-mixtral",
        "smallthinker.gguf",
        "qwen2-moe",
        "qwen2-moe.gguf",
        "gpt-oss.mxfp4.gguf",
        "glm4-moe.gguf",
        "deepseek-v3.gguf",
        "gemma4-moe.gguf",
    ];
    let of = of.map(fixture);
    let shape = Shape {
        hidden: 128,
        layers: 3,
        ffn: 96,
        heads: 4,
        kv_heads: 2,
        vocab: 300,
        context: 128,
        activation: Activation::Silu,
        active: None,
        seed: 4,
        experts: Some(Mixture::flat(16, 3)),
        outliers: 0,
    };
    let quantised = dir.join("quantised.gguf");
    write_gguf(&shape, Quant::Q4, &quantised, &|_, _| Ok(())).unwrap();
    let by_neuron = ["turbosparse-mixtral", "smallthinker.gguf"].map(|name| {
        let store = dir.join(format!("{name}.neurons"));
        let source = Source::open(&fixture(name), None).unwrap();
        let options = PackOptions { types: Types::natural(&source).unwrap(), orders: None };
        pack(&source, &store, &options, &|_, _| Ok(())).unwrap();
        store
    });
    of.into_iter().chain([quantised]).chain(by_neuron).collect()
}

fn engine(path: &Path, threads: usize) -> Engine {
    let model = match NeuronStore::is_one(path) {
        true => Model::open(path).unwrap(),
        false => Model::in_place(Source::open(path, None).unwrap()).unwrap(),
    };
    Engine::new(model, threads, Kernels::best())
}

fn files(model: &Model) -> Vec<&File> {
    model.files().iter().map(|file| file.file()).collect()
}

fn virtual_disk(model: &Model, align: usize, seed: u64, faults: Faults) -> Box<dyn Disk> {
    let [file] = files(model)[..] else { panic!("one file") };
    Box::new(VirtualDisk::new(file.try_clone().unwrap(), align, seed, faults))
}

/// A cache with `share` of the experts beside the least size.
fn cache(model: &Model, disk: Box<dyn Disk>, share: f64, options: HostCacheOptions) -> HostCache {
    let (blocks, experts) = (layer_blocks(model).unwrap(), model.config.clusters());
    let frame = |b: &LayerBlocks| b.block_bytes() + 2 * disk.align() * b.runs().len();
    let all: usize = blocks.iter().map(|b| frame(b) * experts + 8192).sum();
    let bytes = (least_bytes(&blocks, experts, disk.align()) as f64 * 1.3 + share * all as f64) as u64;
    HostCache::new(disk, &blocks, experts, HostCacheOptions { bytes, ..options }).unwrap()
}

fn look_ahead(model: &Model, ahead: usize) -> Option<Foresight> {
    (ahead > 0).then(|| Foresight::new(Arc::new(Router::of(model).unwrap()), ahead))
}

const PASSES: [usize; 12] = [5, 1, 1, 1, 40, 1, 1, 3, 1, 17, 1, 1];

/// Logits of every token in passes of these sizes.
fn logits(engine: &mut Engine, sizes: &[usize], mut before: impl FnMut(&mut Engine)) -> Vec<f32> {
    let c = engine.model.config.clone();
    let count = sizes.iter().sum();
    let ids: Vec<u32> = (0..count as u32).map(|i| 5 + i * 37 % 90).collect();
    let mut kv = KvCache::new(&c, count, KvType::F32).unwrap();
    let (mut out, mut rest) = (Vec::new(), &ids[..]);
    for &n in sizes {
        let (now, after) = rest.split_at(n);
        before(engine);
        out.extend_from_slice(engine.forward(&mut kv, now, Logits::All));
        engine.check().unwrap();
        rest = after;
    }
    out
}

#[test]
fn the_text_is_that_of_the_mapped_file_whatever_lies_in_memory_and_however_reads_end() {
    let (mut hits, mut misses, mut early, mut again) = (0, 0, 0, 0);
    let dir = tempfile::tempdir().unwrap();
    for (number, path) in models(dir.path()).iter().enumerate() {
        let expected = logits(&mut engine(path, 2), &PASSES, |_| ());
        for seed in 0..12u64 {
            let mut prng = Prng::new(seed * 100 + number as u64);
            let mut of = |values: &[f64]| values[prng.below(values.len() as u64) as usize];
            let (share, threads) = (of(&[0.0, 0.3, 0.6, 1.0]), of(&[1.0, 2.0, 3.0]) as usize);
            let align = of(&[64.0, 512.0, 4096.0]) as usize;
            let faults = Faults {
                fail: of(&[0.0, 0.05]),
                short: of(&[0.0, 0.3]),
                late: of(&[0.0, 3.0]) as u64,
                ..Faults::default()
            };
            let policy = Policy::ALL[of(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]) as usize];
            let (overlap, ahead) = (of(&[0.0, 1.0]) > 0.0, of(&[0.0, 1.0, 2.0]) as usize);
            let mut cached = engine(path, threads);
            let ahead = ahead.min(cached.model.config.layers().len() - 1);
            let options = HostCacheOptions { policy, overlap, ahead, seed, ..HostCacheOptions::new(0) };
            let disk = virtual_disk(&cached.model, align, seed, faults.clone());
            let cache = cache(&cached.model, disk, share, options);
            let foresight = look_ahead(&cached.model, ahead);
            cached.set_host_cache(cache, foresight);
            let found = logits(&mut cached, &PASSES, |_| ());
            assert!(found == expected, "{path:?} seed {seed} {} of {share}, ahead {ahead}, {faults:?}", policy.name());
            let counts = cached.cached.as_mut().unwrap().cache.counts();
            (hits, misses, again) = (hits + counts.hits, misses + counts.misses, again + counts.reads.again);
            early += counts.early;
        }
    }
    assert!(
        hits.min(misses) > 1000 && early.min(again) > 100,
        "{hits} {misses} {early} {again}: the test tries too little"
    );
}

#[test]
fn real_reads_give_the_same_text_and_what_fits_is_read_once() {
    let dir = tempfile::tempdir().unwrap();
    for path in &models(dir.path()) {
        let expected = logits(&mut engine(path, 2), &PASSES, |_| ());
        for share in [0.3, 1.5] {
            let mut cached = engine(path, 2);
            let disk = disk::open(&files(&cached.model)).unwrap().disk;
            let cache = cache(&cached.model, disk, share, HostCacheOptions::new(0));
            cached.set_host_cache(cache, None);
            assert!(logits(&mut cached, &PASSES, |_| ()) == expected, "{path:?}");
            let counts = cached.cached.as_mut().unwrap().cache.counts();
            let all = cached.model.config.clusters() * cached.model.config.movable_layers();
            assert!(counts.misses > 0 && counts.reads.bytes > 0, "{counts:?}");
            assert!(share < 1.5 || counts.misses <= all as u64, "{path:?}: {counts:?}");
        }
    }
}

/// A prompt's experts were cut into units by how many of them were there, and those that are computed whole were added before the others.
#[test]
fn a_prompt_is_the_same_however_many_experts_are_there_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let shape = |ffn, seed| Shape {
        hidden: 512,
        layers: 2,
        ffn,
        heads: 4,
        kv_heads: 2,
        vocab: 300,
        context: 128,
        activation: Activation::Relu,
        active: Some(0.1),
        seed,
        experts: Some(Mixture::flat(12, 3)),
        outliers: 0,
    };
    for (ffn, quant) in [(768, Quant::F16), (256, Quant::Q8)] {
        let (gguf, store) = (dir.path().join("m.gguf"), dir.path().join("m.neurons"));
        write_gguf(&shape(ffn, 5), quant, &gguf, &|_, _| Ok(())).unwrap();
        let source = Source::open(&gguf, None).unwrap();
        let options = PackOptions { types: Types::natural(&source).unwrap(), orders: None };
        pack(&source, &store, &options, &|_, _| Ok(())).unwrap();
        let expected = logits(&mut engine(&store, 2), &[70, 1, 40], |_| ());
        for share in [0.0, 0.2, 0.5] {
            let mut cached = engine(&store, 2);
            let disk = virtual_disk(&cached.model, 512, 3, Faults::default());
            let cache = cache(&cached.model, disk, share, HostCacheOptions::new(0));
            cached.set_host_cache(cache, None);
            let found = logits(&mut cached, &[70, 1, 40], |_| ());
            assert!(found == expected, "{} with {share} of the experts in memory", quant.name());
        }
    }
}

#[test]
fn the_text_is_the_same_whatever_the_budget_becomes_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    for path in &models(dir.path()) {
        let expected = logits(&mut engine(path, 2), &PASSES, |_| ());
        let mut cached = engine(path, 2);
        let disk = virtual_disk(&cached.model, 512, 3, Faults { late: 2, ..Faults::default() });
        let cache = cache(&cached.model, disk, 1.0, HostCacheOptions { ahead: 1, ..HostCacheOptions::new(0) });
        let (least, most) = (cache.least_bytes(), cache.options().bytes);
        let foresight = look_ahead(&cached.model, 1);
        cached.set_host_cache(cache, foresight);
        let (mut prng, mut frames) = (Prng::new(7), Vec::new());
        let found = logits(&mut cached, &PASSES, |engine| {
            let cache = &mut engine.cached.as_mut().unwrap().cache;
            cache.set_budget(least + prng.below(most - least)).unwrap();
            frames.push(cache.frames().0);
        });
        assert!(found == expected, "{path:?}");
        frames.dedup();
        assert!(frames.len() > 5, "{frames:?}: the test tries too little");
    }
}

#[test]
fn what_cannot_be_read_is_an_error_with_its_file_and_the_engine_lives() {
    let (name, path) = ("mixtral.gguf", &fixture("mixtral.gguf"));
    let mut cached = engine(path, 2);
    let model = &cached.model;
    let (last, experts) = (layer_blocks(model).unwrap().pop().unwrap(), model.config.clusters());
    // The second matrix of the last layer's first expert.
    let (file, byte) = file_of(last.runs()[1].at(0) + 5);
    assert_eq!(file, 0);
    let disk = virtual_disk(model, 64, 1, Faults { bad_byte: Some(byte), ..Faults::default() });
    let cache = cache(model, disk, 0.0, HostCacheOptions::new(0));
    cached.set_host_cache(cache, None);
    let (mut failed, mut kv) = (0, KvCache::new(&cached.model.config, 200, KvType::F32).unwrap());
    let mut whole = engine(path, 2);
    let mut expected_kv = KvCache::new(&whole.model.config, 200, KvType::F32).unwrap();
    for i in 0..40 {
        let id = [5 + i * 37 % 90];
        let expected = whole.forward(&mut expected_kv, &id, Logits::All).to_vec();
        let found = cached.forward(&mut kv, &id, Logits::All).to_vec();
        match cached.check() {
            Ok(()) => assert_eq!(found, expected, "token {i}"),
            Err(error) => {
                failed += 1;
                let why = error.to_string();
                assert!(why.contains(name) && why.contains("cannot be read"), "{why}");
                assert!(found.iter().all(|logit| logit.is_nan()), "an answer by what could not be read");
            }
        }
    }
    assert!((1..40).contains(&failed), "{failed} of 40 tokens need one of {experts} experts");
}

/// A disk that says how many reads it was asked for.
struct Counted {
    disk: Box<dyn Disk>,
    begun: Arc<AtomicUsize>,
}

impl Disk for Counted {
    fn name(&self) -> String {
        self.disk.name()
    }

    fn align(&self) -> usize {
        self.disk.align()
    }

    unsafe fn begin(&mut self, reads: &[Read]) {
        self.begun.fetch_add(reads.len(), Ordering::Relaxed);
        unsafe { self.disk.begin(reads) };
    }

    fn ended(&mut self, wait: bool, done: &mut dyn FnMut(u32, Outcome)) {
        self.disk.ended(wait, done);
    }
}

/// How many reads were begun before the end of each attention, and from there until the turn of the layer's experts.
struct Moments {
    begun: Arc<AtomicUsize>,
    before: usize,
    attentions: Vec<usize>,
    layers: Vec<usize>,
}

impl Moments {
    fn since(&mut self) -> usize {
        let begun = self.begun.load(Ordering::Relaxed);
        begun - std::mem::replace(&mut self.before, begun)
    }
}

impl Observer for Moments {
    fn attention(&mut self, _: &SeenAttention<'_>) {
        let reads = self.since();
        self.attentions.push(reads);
    }

    fn layer(&mut self, _: &Seen<'_>) {
        let reads = self.since();
        self.layers.push(reads);
    }
}

#[test]
fn a_router_that_reads_the_layers_input_has_its_experts_read_while_attention_is_computed() {
    for (name, earlier) in [("smallthinker.gguf", true), ("mixtral.gguf", false)] {
        let mut cached = engine(&fixture(name), 2);
        let begun = Arc::new(AtomicUsize::new(0));
        let disk = virtual_disk(&cached.model, 512, 1, Faults::default());
        let disk = Box::new(Counted { disk, begun: begun.clone() });
        let cache = cache(&cached.model, disk, 0.0, HostCacheOptions::new(0));
        cached.set_host_cache(cache, None);
        let mut kv = KvCache::new(&cached.model.config, 40, KvType::F32).unwrap();
        let mut seen = Moments { begun, before: 0, attentions: Vec::new(), layers: Vec::new() };
        for i in 0..20 {
            cached.forward_observed(&mut kv, &[5 + i * 37 % 90], Logits::None, &mut seen);
            cached.check().unwrap();
        }
        let sums = [&seen.attentions, &seen.layers].map(|reads| reads.iter().sum::<usize>());
        // A layer is seen when its experts' turn comes. Later rounds of a layer's reads begin in its turn, so before the next attention, too.
        let expected = sums[0] > 50 && if earlier { sums[1] == 0 } else { sums[1] > 50 };
        assert!(expected, "{name}: {sums:?} reads until attention ended, and from then to the experts' turn");
    }
}

/// A prompt that is stopped between layers, with experts on disk and reads for later layers from the tokens before: what is read on is right.
#[test]
fn a_prompt_that_is_stopped_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    for path in &models(dir.path()) {
        let tokens: Vec<u32> = (0..45).map(|i| i * 7 % 50).collect();
        let expected = {
            let mut engine = engine(path, 2);
            let mut kv = KvCache::new(&engine.model.config, 64, KvType::F32).unwrap();
            tokens[..3].iter().for_each(|&token| _ = engine.forward(&mut kv, &[token], Logits::Last));
            engine.forward(&mut kv, &tokens[3..], Logits::Last).to_vec()
        };
        let mut cached = engine(path, 2);
        let layers = cached.model.config.layers().len();
        let disk = virtual_disk(&cached.model, 512, 3, Faults { late: 2, ..Faults::default() });
        let cache = cache(&cached.model, disk, 0.3, HostCacheOptions { ahead: 1, ..HostCacheOptions::new(0) });
        let foresight = look_ahead(&cached.model, 1);
        cached.set_host_cache(cache, foresight);
        let mut kv = KvCache::new(&cached.model.config, 64, KvType::F32).unwrap();
        tokens[..3].iter().for_each(|&token| _ = cached.forward(&mut kv, &[token], Logits::Last));
        for stops in 0..layers {
            let mut asked = 0;
            let whole = cached.forward_while(&mut kv, &tokens[3..], Logits::Last, &mut || {
                asked += 1;
                asked <= stops
            });
            assert_eq!((whole, kv.len, asked), (false, 3, stops + 1), "{path:?}");
        }
        assert!(cached.forward_while(&mut kv, &tokens[3..], Logits::Last, &mut || true));
        cached.check().unwrap();
        assert!(*cached.logits() == expected[..], "{path:?}");
    }
}
