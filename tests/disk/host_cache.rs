//! Laws of the neuron cache in host memory: whatever lies in its frames, in whatever order reads end, late, in pieces or asked for again, the
//! logits are bit for bit those of the mapped store; what cannot be read is an error and no answer.

use crate::support;
use crate::support::chance::Chance;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::disk::{self, Disk, DiskCosts, Faults, Speed, VirtualDisk};
use dynamicinfer::engine::{Choice, Engine, Failure, Foresight, Logits, Sparsity};
use dynamicinfer::evaluation::audit::Audit;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::host_cache::{HostCache, HostCacheOptions, least_bytes};
use dynamicinfer::lab::synth::{Shape, write_predictor, write_store};
use dynamicinfer::model::config::Activation;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::open::{self, EngineOptions, layer_blocks};
use dynamicinfer::predictor::{Kind, Predictor};
use dynamicinfer::prng::Prng;
use dynamicinfer::scheduler::Policy;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn chance(share: f64) -> Arc<dyn Predictor> {
    Arc::new(Chance::new(share))
}

fn sparsity(layers: usize, share: f64, activation_threshold: f32) -> Sparsity {
    let choice = Choice::Predicted { predictor: chance(share), threshold: 0.5, activation_threshold };
    Sparsity::new(vec![choice; layers], 0).unwrap()
}

/// What looks `ahead` and foresees other neurons than are needed, `share` of them: from another residual it draws others.
fn foresight(share: f64, ahead: usize) -> Option<Foresight> {
    (ahead > 0).then(|| Foresight::new(chance(share), ahead))
}

/// A cache of the least size and `share` of the neurons beside it.
fn cache(model: &Model, disk: Box<dyn Disk>, share: f64, options: HostCacheOptions) -> HostCache {
    let (blocks, ffn) = (layer_blocks(model).unwrap(), model.config.widest_ffn());
    let all: u64 = blocks.iter().map(|b| ((b.block_bytes() + 2 * disk.align()) * ffn + 8192) as u64).sum();
    let bytes = (least_bytes(&blocks, ffn, disk.align()) as f64 * 1.2 + share * all as f64) as u64;
    HostCache::new(disk, &blocks, ffn, HostCacheOptions { bytes, ..options }).unwrap()
}

fn tokens(n: usize, seed: u64, vocab: usize) -> Vec<u32> {
    let mut prng = Prng::new(seed);
    (0..n).map(|_| prng.below(vocab as u64) as u32).collect()
}

/// Logits of every token in passes of these sizes; every fourth pass is looked at.
fn logits(engine: &mut Engine, sizes: &[usize], seed: u64) -> Vec<f32> {
    logits_with(engine, sizes, seed, |_| ())
}

/// As [`logits`], with something that happens before each pass.
fn logits_with(engine: &mut Engine, sizes: &[usize], seed: u64, mut before: impl FnMut(&mut Engine)) -> Vec<f32> {
    let c = engine.model.config.clone();
    let ids = tokens(sizes.iter().sum(), seed, c.vocab.min(90));
    let mut kv = KvCache::new(&c, ids.len(), KvType::F32).unwrap();
    let (mut out, mut rest) = (Vec::new(), &ids[..]);
    for (i, &n) in sizes.iter().enumerate() {
        let (now, after) = rest.split_at(n);
        before(engine);
        let mut audit = Audit::new(&c, vec![0.0; c.layers().len()]);
        out.extend_from_slice(match i % 4 {
            3 => engine.forward_observed(&mut kv, now, Logits::All, &mut audit),
            _ => engine.forward(&mut kv, now, Logits::All),
        });
        if i % 4 == 3 {
            out.push(audit.shares().0.active_share as f32);
        }
        engine.check().unwrap();
        rest = after;
    }
    out
}

const PASSES: [usize; 14] = [5, 1, 1, 1, 1, 52, 1, 1, 3, 1, 17, 1, 1, 1];

fn shape(activation: Activation, hidden: usize, ffn: usize) -> Shape {
    Shape {
        hidden,
        layers: 3,
        ffn,
        heads: 4,
        kv_heads: 2,
        vocab: 300,
        context: 128,
        activation,
        active: None,
        seed: 4,
        experts: None,
        outliers: 0,
    }
}

fn synth(dir: &Path, activation: Activation, quant: Quant, hidden: usize, ffn: usize) -> PathBuf {
    let store = dir.join(format!("{}-{hidden}-{ffn}.neurons", quant.name()));
    write_store(&shape(activation, hidden, ffn), quant, &store, &|_, _| Ok(())).unwrap();
    store
}

fn virtual_disk(path: &Path, align: usize, seed: u64, faults: Faults) -> Box<dyn Disk> {
    Box::new(VirtualDisk::new(File::open(path).unwrap(), align, seed, faults))
}

#[test]
fn the_text_is_that_of_the_mapped_store_whatever_lies_in_memory_and_however_reads_end() {
    let dir = tempfile::tempdir().unwrap();
    let (mut hits, mut misses, mut early, mut again) = (0, 0, 0, 0);
    let mut stores: Vec<(PathBuf, f32)> = ["relullama", "prosparse", "bamboo", "opt", "relufalcon"]
        .iter()
        .map(|name| (support::packed(dir.path(), name, Quant::F32), 0.0))
        .collect();
    for quant in [Quant::F16, Quant::Q4, Quant::Q8] {
        stores.push((synth(dir.path(), Activation::Relu, quant, 256, 700), 0.0));
    }
    stores.push((synth(dir.path(), Activation::Silu, Quant::F16, 128, 1000), 0.02));
    for (round, (store, activation_threshold)) in stores.iter().enumerate() {
        for seed in 0..6u64 {
            let mut prng = Prng::new(seed * 100 + round as u64);
            let mut of = |values: &[f64]| values[prng.below(values.len() as u64) as usize];
            let (share, chosen) = (of(&[0.0, 0.1, 0.5, 1.0]), of(&[0.1, 0.3, 0.8]));
            let (threads, align) = (of(&[1.0, 2.0, 3.0]) as usize, of(&[64.0, 512.0, 4096.0]) as usize);
            let fail = of(&[0.0, 0.02]);
            let (short, late) = (of(&[0.0, 0.3]), of(&[0.0, 3.0]) as u64);
            let wrong = if fail == 0.0 { 0.05 } else { 0.0 };
            let faults = Faults { fail, short, late, wrong, ..Faults::default() };
            let costs = DiskCosts { read_us: of(&[0.0, 1.0, 12.0]), gb_s: 1.8 };
            let policy = Policy::ALL[of(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]) as usize];
            let (together, overlap) = (of(&[0.0, 1.0]) > 0.0, of(&[0.0, 1.0]) > 0.0);
            let (ahead, foreseen) = (of(&[0.0, 1.0, 2.0]) as usize, of(&[0.1, 0.6, 1.0]));
            let options =
                HostCacheOptions { policy, together, overlap, ahead, costs, seed, ..HostCacheOptions::new(0) };
            for kind in 0..3 {
                let engine = || {
                    let mut engine = Engine::new(Model::open(store).unwrap(), threads, Kernels::best());
                    engine.kernels.rounds_floats = seed % 2 == 0;
                    let layers = engine.model.config.layers().len();
                    let exact = || vec![Choice::Exact { activation_threshold: *activation_threshold }; layers];
                    match kind {
                        0 => drop(engine.set_sparsity(sparsity(layers, chosen, *activation_threshold))),
                        1 => drop(engine.set_sparsity(Sparsity::new(exact(), 0).unwrap())),
                        _ => {}
                    }
                    engine
                };
                let expected = logits(&mut engine(), &PASSES, seed);
                let mut cached = engine();
                let cache = cache(&cached.model, virtual_disk(store, align, seed, faults.clone()), share, options);
                cached.set_host_cache(cache, foresight(foreseen, ahead));
                let what = format!(
                    "{store:?} seed {seed} kind {kind} {} of {share}, ahead {ahead}, {faults:?}",
                    policy.name()
                );
                assert!(logits(&mut cached, &PASSES, seed) == expected, "{what}");
                let counts = cached.cached.as_mut().unwrap().cache.counts();
                assert!(counts.streamed > 0, "chunks are streamed");
                (hits, misses, again) = (hits + counts.hits, misses + counts.misses, again + counts.reads.again);
                early += counts.early;
                // What is in a frame is what the table says: everything needed twice in a row is found the second time.
                if share == 1.0 && kind == 0 {
                    assert!(counts.kept > 0 && counts.hits > 0, "{what}: {counts:?}");
                }
            }
        }
    }
    assert!(
        hits.min(misses).min(early) > 1000 && again > 100,
        "{hits} {misses} {early} {again}: the test tries too little"
    );
}

#[test]
fn real_reads_give_the_same_text() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = synth(dir.path(), Activation::Relu, Quant::F16, 256, 900);
    let engine = || {
        let mut engine = Engine::new(Model::open(&store).unwrap(), 2, Kernels::best());
        engine.set_sparsity(sparsity(3, 0.3, 0.0));
        engine
    };
    let expected = logits(&mut engine(), &PASSES, 1);
    for policy in Policy::ALL {
        let opened = disk::open(&[&File::open(&store).unwrap()]).unwrap();
        let mut cached = engine();
        let cache = cache(&cached.model, opened.disk, 0.4, HostCacheOptions { policy, ..HostCacheOptions::new(0) });
        cached.set_host_cache(cache, None);
        assert!(logits(&mut cached, &PASSES, 1) == expected, "{}", policy.name());
        let counts = cached.cached.as_mut().unwrap().cache.counts();
        assert!(counts.hits > 0 && counts.misses > 0 && counts.reads.bytes > 0, "{counts:?}");
    }
}

/// With room for all neurons each is read once, and after that nothing is.
#[test]
fn what_fits_is_read_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = synth(dir.path(), Activation::Relu, Quant::Q8, 256, 700);
    for policy in Policy::ALL {
        let mut engine = Engine::new(Model::open(&store).unwrap(), 2, Kernels::best());
        engine.set_sparsity(sparsity(3, 0.3, 0.0));
        let disk = virtual_disk(&store, 512, 1, Faults::default());
        let options = HostCacheOptions { policy, ..HostCacheOptions::new(0) };
        let cache = cache(&engine.model, disk, 1.0, options);
        engine.set_host_cache(cache, None);
        logits(&mut engine, &[1; 60], 3);
        let before = engine.cached.as_mut().unwrap().cache.counts();
        assert!(before.misses <= 3 * 700, "{}: {before:?}", policy.name());
        logits(&mut engine, &[1; 60], 3);
        let after = engine.cached.as_mut().unwrap().cache.counts();
        assert!(after.misses <= 3 * 700 && after.hits > before.hits, "{}: {after:?}", policy.name());
    }
}

/// A byte of a neuron.
fn a_byte_of(model: &Model, layer: usize, neuron: u64) -> u64 {
    let blocks = &layer_blocks(model).unwrap()[layer];
    blocks.offset() + neuron * blocks.block_bytes() as u64 + 9
}

/// What was foreseen and is not needed may fail: it decides nothing.
#[test]
fn a_read_that_nobody_needed_ends_no_answer() {
    let dir = tempfile::tempdir().unwrap();
    let store = synth(dir.path(), Activation::Relu, Quant::F16, 256, 700);
    for (ahead, seed) in [(1, 1), (2, 2)] {
        let engine = || {
            let mut engine = Engine::new(Model::open(&store).unwrap(), 2, Kernels::best());
            let predictor = Arc::new(Chance { never: |neuron| neuron == 7, ..Chance::new(0.3) });
            let choice = Choice::Predicted { predictor, threshold: 0.5, activation_threshold: 0.0 };
            engine.set_sparsity(Sparsity::new(vec![choice; 3], 0).unwrap());
            engine
        };
        // Nothing looks at all neurons here, as an observer would.
        let run = |engine: &mut Engine| {
            let mut kv = KvCache::new(&engine.model.config, 40, KvType::F32).unwrap();
            let tokens = tokens(40, seed, 90);
            let one = |id: &u32| engine.forward(&mut kv, &[*id], Logits::Last).to_vec();
            tokens.iter().map(one).collect::<Vec<_>>().concat()
        };
        let expected = run(&mut engine());
        let mut cached = engine();
        let faults = Faults { bad_byte: Some(a_byte_of(&cached.model, ahead, 7)), ..Faults::default() };
        let options = HostCacheOptions { ahead, together: false, ..HostCacheOptions::new(0) };
        let cache = cache(&cached.model, virtual_disk(&store, 64, seed, faults), 0.3, options);
        cached.set_host_cache(cache, foresight(1.0, ahead));
        assert!(run(&mut cached) == expected);
        cached.check().unwrap();
        let counts = cached.cached.as_mut().unwrap().cache.counts();
        assert!(counts.reads.again > 3, "the read that fails was asked for: {counts:?}");
    }
}

/// A part of the store cannot be read: an error that says where, no number that could pass for an answer, and the next text that does not
/// need it is right.
#[test]
fn what_cannot_be_read_is_an_error_with_its_place_and_the_engine_lives() {
    let dir = tempfile::tempdir().unwrap();
    let store = synth(dir.path(), Activation::Relu, Quant::F16, 256, 700);
    for chunk in [false, true] {
        let mut engine = Engine::new(Model::open(&store).unwrap(), 2, Kernels::best());
        engine.set_sparsity(sparsity(3, 0.3, 0.0));
        let bad = a_byte_of(&engine.model, 1, 300);
        let disk = virtual_disk(&store, 512, 1, Faults { bad_byte: Some(bad), ..Faults::default() });
        let cache = cache(&engine.model, disk, 0.3, HostCacheOptions::new(0));
        engine.set_host_cache(cache, None);
        let mut kv = KvCache::new(&engine.model.config, 64, KvType::F32).unwrap();
        let (mut failed, mut right) = (0, 0);
        for token in 0..if chunk { 1 } else { 30 } {
            let ids: Vec<u32> = if chunk { (0..40).collect() } else { vec![token] };
            let out = engine.forward(&mut kv, &ids, Logits::Last).to_vec();
            match engine.check() {
                Ok(()) => {
                    assert!(out.iter().all(|x| x.is_finite()) && engine.failure().is_none());
                    right += 1;
                }
                Err(error) => {
                    let text = error.to_string();
                    assert!(out.iter().all(|x| x.is_nan()));
                    assert!(text.contains(&*store.to_string_lossy()) && text.contains("(at byte "), "{text}");
                    let Some(Failure::Pass(why)) = engine.failure() else { panic!("no failure") };
                    assert!(why.contains("cannot be read"), "{why}");
                    failed += 1;
                }
            }
        }
        assert!(failed > 0 && (chunk || right > 0), "{failed} passes failed, {right} did not");
    }
}

/// The disk is pulled while a text is made: each pass that needs it fails, none gives a number. Put back, it serves the next text as before.
#[test]
fn a_disk_that_is_pulled_ends_answers_and_serves_again_when_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = synth(dir.path(), Activation::Relu, Quant::F16, 256, 700);
    let sized = |gone| {
        let mut engine = Engine::new(Model::open(&store).unwrap(), 2, Kernels::best());
        engine.set_sparsity(sparsity(3, 0.3, 0.0));
        let disk = virtual_disk(&store, 512, 1, Faults { gone, ..Faults::default() });
        let cache = cache(&engine.model, disk, 0.1, HostCacheOptions::new(0));
        engine.set_host_cache(cache, None);
        engine
    };
    // Up to 40 tokens of a text, and its first failure.
    let text = |engine: &mut Engine| {
        let mut kv = KvCache::new(&engine.model.config, 40, KvType::F32).unwrap();
        let (mut out, mut failure) = (Vec::new(), None);
        for token in 0..40 {
            let numbers = engine.forward(&mut kv, &[token], Logits::Last).to_vec();
            if let Err(error) = engine.check() {
                assert!(numbers.iter().all(|x| x.is_nan()));
                failure.get_or_insert(error.to_string());
            }
            out.extend(numbers);
        }
        (out, failure)
    };
    let (expected, none) = text(&mut sized(0..0));
    assert_eq!(none, None);
    // Each read that fails is asked for again, so a text without the disk needs some thousand reads.
    let mut engine = sized(500..2000);
    let (_, failure) = text(&mut engine);
    let failure = failure.expect("the disk was away");
    assert!(failure.contains("No such device") && failure.contains(&*store.to_string_lossy()), "{failure}");
    let mut texts = 0;
    while text(&mut engine).1.is_some() {
        texts += 1;
        assert!(texts < 100, "it does not come back");
    }
    assert!(text(&mut engine) == (expected, None));
}

/// A disk that takes a second for a read: the text is the same, and what is asked for together is waited for together.
#[test]
fn a_slow_disk_gives_the_same_text_and_its_reads_wait_together() {
    let dir = tempfile::tempdir().unwrap();
    let store = synth(dir.path(), Activation::Relu, Quant::F16, 256, 700);
    let engine = || {
        let mut engine = Engine::new(Model::open(&store).unwrap(), 2, Kernels::best());
        engine.set_sparsity(sparsity(3, 0.3, 0.0));
        engine
    };
    let run = |engine: &mut Engine| {
        let mut kv = KvCache::new(&engine.model.config, 20, KvType::F32).unwrap();
        let out: Vec<f32> = (0..20).flat_map(|id| engine.forward(&mut kv, &[id], Logits::Last).to_vec()).collect();
        engine.check().unwrap();
        out
    };
    let expected = run(&mut engine());
    let second = 1_000_000_000;
    let mut cached = engine();
    let disk = VirtualDisk::new(File::open(&store).unwrap(), 512, 1, Faults::default());
    let (disk, clock) = disk.with_speed(Speed { latency_ns: second, bytes_ns: 1.0 });
    let cache =
        cache(&cached.model, Box::new(disk), 0.1, HostCacheOptions { together: false, ..HostCacheOptions::new(0) });
    cached.set_host_cache(cache, None);
    assert!(run(&mut cached) == expected);
    let reads = cached.cached.as_mut().unwrap().cache.counts().reads;
    let (waited, alone) = (clock.load(std::sync::atomic::Ordering::Relaxed), reads.reads * second);
    // 60 layers of 20 tokens were waited for, most of them once; one read after the other would be more than a hundred times as long.
    assert!(waited >= reads.bytes && waited > 20 * second && waited < 200 * second, "{waited} ns");
    assert!(waited * 20 < alone, "{waited} ns of {alone} one by one");
}

/// A file that was cut while it was used is named as such.
#[test]
fn a_file_that_was_cut_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let store = synth(dir.path(), Activation::Relu, Quant::F16, 256, 700);
    let mut engine = Engine::new(Model::open(&store).unwrap(), 1, Kernels::best());
    engine.set_sparsity(sparsity(3, 0.3, 0.0));
    let opened = disk::open(&[&File::open(&store).unwrap()]).unwrap();
    let cache = cache(&engine.model, opened.disk, 0.3, HostCacheOptions::new(0));
    engine.set_host_cache(cache, None);
    let mut kv = KvCache::new(&engine.model.config, 64, KvType::F32).unwrap();
    engine.forward(&mut kv, &[1], Logits::Last);
    engine.check().unwrap();
    // Only the neurons of the last layer are cut off: what is mapped of the rest stays readable.
    let cut = layer_blocks(&engine.model).unwrap()[2].offset();
    let sections = &engine.model.store().unwrap().header.sections;
    if sections.iter().any(|s| s.offset > cut) {
        // The head lies behind: a page that is mapped and gone would end the process, so survive it as the daemon does.
        assert!(dynamicinfer::formats::survive());
    }
    File::options().write(true).open(&store).unwrap().set_len(cut).unwrap();
    engine.forward(&mut kv, &[2], Logits::Last);
    assert!(engine.check().is_err());
    let Some(Failure::File(why)) = engine.failure() else { panic!("no failure") };
    assert!(why.contains("bytes and had") || why.contains("no longer be read"), "{why}");
}

/// What is set aside for a predictor is its file's length once, however many layers use it: the rest is for neurons.
#[test]
fn a_predictors_file_takes_its_bytes_once() {
    let dir = tempfile::tempdir().unwrap();
    let shape = Shape { active: Some(0.1), ..shape(Activation::Relu, 256, 1024) };
    let store = dir.path().join("m.neurons");
    write_store(&shape, Quant::F16, &store, &|_, _| Ok(())).unwrap();
    let file = store.with_extension("mlp.predictor");
    write_predictor(&shape, &store, &file, 2, &|_, _| Ok(())).unwrap();
    let least = |kind: Kind| {
        let mut options = EngineOptions { ram: Some(1 << 20), context: Some(16), ..EngineOptions::new(&store) };
        options.sparsity.predictor = kind.into();
        (options.neurons.prefetch, options.neurons.together) = (false, false);
        let refused = open::open(&options, &open::Quiet).err().expect("a megabyte is not enough").to_string();
        // Of a small model beside what all of it takes, which is less.
        let (_, least) = refused.split_once("FFNs on disk it would take ").expect("the least is named");
        let (mebibytes, _) = least.split_once(" MiB").expect("it is in MiB");
        (mebibytes.parse::<f64>().unwrap() * f64::from(1 << 20)) as u64
    };
    let bytes = std::fs::metadata(&file).unwrap().len();
    let taken = least(Kind::Mlp) - least(Kind::Dense);
    assert!(
        bytes > 200_000 && taken.abs_diff(bytes) < bytes / 4 + 20_000,
        "the file has {bytes} bytes, {taken} were set aside"
    );
}

/// Whatever the budget becomes between two passes, from the least to more than all neurons take, the logits are those of the mapped store,
/// and the cache never has more than it was given.
#[test]
fn the_text_is_the_same_whatever_the_budget_becomes_meanwhile() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = synth(dir.path(), Activation::Relu, Quant::F16, 256, 700);
    let (mut hits, mut frames) = (0, std::collections::BTreeSet::new());
    for seed in 0..2 * Policy::ALL.len() as u64 {
        let mut prng = Prng::new(seed);
        let policy = Policy::ALL[seed as usize % Policy::ALL.len()];
        let ahead = seed as usize % 3;
        let options = HostCacheOptions { policy, ahead, seed, ..HostCacheOptions::new(0) };
        let engine = || {
            let mut engine = Engine::new(Model::open(&store).unwrap(), 2, Kernels::best());
            engine.set_sparsity(sparsity(3, 0.3, 0.0));
            engine
        };
        let expected = logits(&mut engine(), &PASSES, seed);
        let mut cached = engine();
        let disk = match seed % 2 {
            0 => disk::open(&[&File::open(&store).unwrap()]).unwrap().disk,
            _ => virtual_disk(&store, 512, seed, Faults { short: 0.2, late: 2, ..Faults::default() }),
        };
        let cache = cache(&cached.model, disk, 0.5, options);
        let (least, neurons) = (cache.least_bytes(), cache.frames().1);
        // A frame has whole pages around its block at most.
        let all = ffn_bytes(&cached.model) + neurons as u64 * 8192;
        let more_than_all = least + 2 * all + (64 << 20);
        cached.set_host_cache(cache, foresight(0.5, ahead));
        let found = logits_with(&mut cached, &PASSES, seed, |engine| {
            let cache = &mut engine.cached.as_mut().unwrap().cache;
            let budget = match prng.below(4) {
                0 => least,
                1 => more_than_all,
                _ => least + prng.below(all),
            };
            cache.set_budget(budget).unwrap();
            assert!(cache.used_bytes() <= cache.bytes() && cache.bytes() <= budget, "of {budget}");
            assert_eq!(cache.options().bytes, budget);
            let now = cache.frames().0;
            assert!(budget < more_than_all || now == neurons, "{now} frames in {budget} bytes");
            assert!(budget > least || now == 0, "{now} frames in {budget} bytes");
            frames.insert(now);
        });
        assert!(found == expected, "seed {seed} {} ahead {ahead}", policy.name());
        hits += cached.cached.as_mut().unwrap().cache.counts().hits;
    }
    assert!(hits > 1000 && frames.len() > 15, "{hits} hits, {} sizes: the test tries too little", frames.len());
}

fn ffn_bytes(model: &Model) -> u64 {
    layer_blocks(model).unwrap().iter().map(|blocks| (blocks.block_bytes() * model.config.widest_ffn()) as u64).sum()
}

/// Who leaves a cache that becomes smaller are those that were needed least often; a budget that the landing's parts alone take leaves nobody.
#[test]
fn the_most_frequent_neurons_stay_when_the_budget_shrinks() {
    let dir = tempfile::tempdir().unwrap();
    let store = synth(dir.path(), Activation::Relu, Quant::Q8, 256, 700);
    let model = Model::open(&store).unwrap();
    let mut cache = cache(&model, virtual_disk(&store, 512, 1, Faults::default()), 1.0, HostCacheOptions::new(0));
    let counts: Vec<u64> = (0..700).map(|neuron| neuron * 269 % 700 + 1).collect();
    (0..3).for_each(|layer| cache.place(layer, &counts, 700).unwrap());
    let (least, mut before) = (cache.least_bytes(), 700);
    for share in [9, 6, 2, 0] {
        cache.set_budget(least + share * ffn_bytes(&model) / 10).unwrap();
        for layer in 0..3 {
            let table = cache.table(layer);
            let slots = table.slots().len();
            assert!(slots < before && (slots > 0 || share == 0), "{slots} after {before}");
            let mut stayed: Vec<u64> =
                table.slots().iter().map(|slot| counts[slot.resident().expect("all are taken").index()]).collect();
            stayed.sort();
            assert!(stayed.iter().copied().eq(701 - slots as u64..=700), "layer {layer}: {stayed:?}");
        }
        before = cache.table(0).slots().len();
    }
}
