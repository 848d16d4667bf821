//! THE LAW of three memories: neurons or experts on the device, in frames of host memory, and on disk alone. Whatever lies where, whatever
//! moves up, and however reads end, the logits are those of the CPU alone; and what moves to the device comes from a frame, which is not
//! used for anything else until the copy has arrived.

use crate::support::law::{logits, slots, with_seeds};
use crate::support::watched::{Step, Watched};
use crate::support::{RATES, by_token, device_bytes, expert_costs, on_device, opened, streaming_experts_bytes};
use dynamicinfer::cache::{Frames, NeuronCache, Tier};
use dynamicinfer::cpu::{Kernels, MAX_COLUMNS};
use dynamicinfer::device::{self, Device, VirtualDevice};
use dynamicinfer::disk::{self, Disk, VirtualDisk};
use dynamicinfer::engine::sampler::argmax;
use dynamicinfer::engine::{Choice, Engine, Foresight, Logits, Migrator, Sparsity};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::host_cache::{HostCache, HostCacheOptions, LayerBlocks, least_bytes};
use dynamicinfer::ids::{SlotId, StoreId};
use dynamicinfer::lab::synth::{Mixture, Shape, write_gguf};
use dynamicinfer::model::config::Activation;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::open::{DeviceKind, DeviceOptions, EngineOptions, Opened, Quiet, layer_blocks, open};
use dynamicinfer::predictor::Router;
use dynamicinfer::prng::Prng;
use dynamicinfer::scheduler::Policy;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Mixtures that are read in place, with routers before and after attention, and stores of neurons.
const MODELS: [(&str, Quant); 12] = [
    ("mixtral", Quant::F32),
    ("qwen3-moe", Quant::F32),
    ("smallthinker", Quant::F32),
    ("qwen2-moe", Quant::F32),
    ("glm4-moe", Quant::F32),
    ("deepseek-v3", Quant::F32),
    ("lfm2-moe", Quant::F32),
    ("gemma4-moe", Quant::F32),
    ("qwen35-moe", Quant::F32),
    ("nemotron-h-moe", Quant::F32),
    ("relullama", Quant::F32),
    ("opt", Quant::F32),
];

/// Moves neurons at random from frames, any layer's, before any layer of any token.
struct FromFrames {
    prng: Prng,
    clusters: u64,
    begun: Arc<Mutex<[u64; 2]>>,
}

impl Migrator for FromFrames {
    fn apply(
        &mut self,
        _: usize,
        _: bool,
        device: &mut dyn Device,
        cache: &mut NeuronCache,
        frames: Option<&mut dyn Frames>,
        _: &mut Sparsity,
    ) {
        let frames = frames.expect("not all is in memory");
        let layer = self.prng.below(cache.layers.len() as u64) as usize;
        let slots = cache.layers[layer].table.slots().len() as u64;
        if slots == 0 {
            return;
        }
        let mut group: Vec<(SlotId, StoreId)> = Vec::new();
        for _ in 0..self.prng.below(1 + self.clusters / 2) {
            let slot = SlotId(self.prng.below(slots) as u32);
            group.push((slot, StoreId(self.prng.below(self.clusters) as u32)));
        }
        let put_off = cache.counters.put_off;
        let outcome = cache.migrate_all(device, layer, Some(frames), group.into_iter());
        let mut begun = self.begun.lock().unwrap();
        begun[0] += outcome.begun as u64;
        begun[1] += cache.counters.put_off - put_off;
    }
}

/// A cache with `share` of the neurons or experts beside the least size.
fn host_cache(model: &Model, disk: Box<dyn Disk>, share: f64, options: HostCacheOptions) -> HostCache {
    let (blocks, clusters) = (layer_blocks(model).unwrap(), model.config.clusters());
    let frame = |b: &LayerBlocks| b.block_bytes() + 2 * disk.align() * b.runs().len();
    let all: usize = blocks.iter().map(|b| frame(b) * clusters + 8192).sum();
    let bytes = (least_bytes(&blocks, clusters, disk.align()) as f64 * 1.3 + share * all as f64) as u64;
    HostCache::new(disk, &blocks, clusters, HostCacheOptions { bytes, ..options }).unwrap()
}

#[test]
fn logits_are_the_cpus_whatever_lies_on_device_in_frames_and_on_disk() {
    let (begun, seen) = (Arc::new(Mutex::new([0; 2])), Mutex::new([0u64; 4]));
    let test = "logits_are_the_cpus_whatever_lies_on_device_in_frames_and_on_disk";
    with_seeds(test, 150, |seed| {
        let dir = tempfile::tempdir().unwrap();
        let mut prng = Prng::new(seed);
        let (name, quant) = MODELS[prng.below(MODELS.len() as u64) as usize];
        let model = opened(dir.path(), name, quant);
        let (layers, clusters) = (model.config.layers().len(), model.config.clusters());
        let is_mixture = model.config.is_mixture();
        let sizes = match prng.below(3) {
            0 => vec![40, 1, 1, 3, 1, 1, 1, 1],
            1 => vec![1; 14],
            _ => vec![7, 1, 32, 1, 1, 2, 1, 1],
        };
        let slots: Vec<usize> = (0..layers).map(|l| slots(&mut prng, model.config.movable_of(l))).collect();
        let streamed =
            if is_mixture { streaming_experts_bytes(&model, prng.below(clusters as u64 + 1) as usize) } else { 0 };
        let (late, reorder) = ([0.0, 0.5, 0.95][prng.below(3) as usize], prng.below(2) == 0);
        let faults = device::Faults { late, lost: 0.0, reorder, seed };
        let device = VirtualDevice::new(device_bytes(&model, &slots) + streamed, RATES).with_faults(faults);
        // SAFETY: the engine drops its device's part before its model: it has both.
        let mut split = unsafe { on_device(&model, Box::new(device), &slots) }.expect("the budget is what it takes");
        if is_mixture {
            let link_us = [0.0, 8.0, 1e9][prng.below(3) as usize];
            split.stream_experts(&model, expert_costs(link_us), streamed).expect("the budget is what it takes");
        }
        for (l, &slots) in slots.iter().enumerate() {
            if prng.below(2) == 0 {
                let first: Vec<StoreId> = (0..slots).map(|i| StoreId::new((i + l) % clusters)).collect();
                split.cache.load(&mut *split.device, l, &first).expect("they fit and none is named twice");
                split.cache.settle(&mut *split.device);
            }
        }
        split.migrator = Some(Box::new(FromFrames {
            prng: Prng::new(seed ^ 0xab),
            clusters: clusters as u64,
            begun: begun.clone(),
        }));
        let kind = [KvType::F32, KvType::F16][prng.below(2) as usize];
        let mut engine = Engine::new(model, 1 + prng.below(2) as usize, Kernels::best());
        if !is_mixture && prng.below(2) == 0 {
            engine.set_sparsity(Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap());
        }
        let expected = logits(&mut engine, kind, &sizes, None);
        let ahead = if is_mixture { prng.below(3) as usize } else { 0 }.min(layers - 1);
        let policy = Policy::ALL[prng.below(Policy::ALL.len() as u64) as usize];
        let options = HostCacheOptions { policy, ahead, seed, ..HostCacheOptions::new(0) };
        let late = prng.below(4);
        let reads = disk::Faults { fail: 0.03, short: 0.1, late, ..disk::Faults::default() };
        let files = engine.model.files();
        let disk: Box<dyn Disk> = match files {
            [file] if prng.below(2) == 0 => {
                let align = [64, 512, 4096][prng.below(3) as usize];
                Box::new(VirtualDisk::new(file.file().try_clone().unwrap(), align, seed, reads))
            }
            _ => disk::open(&files.iter().map(|file| file.file()).collect::<Vec<_>>()).unwrap().disk,
        };
        let share = [0.05, 0.3, 0.7][prng.below(3) as usize];
        let cache = host_cache(&engine.model, disk, share, options);
        let foresight = (ahead > 0).then(|| Foresight::new(Arc::new(Router::of(&engine.model).unwrap()), ahead));
        engine.split = Some(split);
        engine.set_host_cache(cache, foresight);
        if sizes[0] > MAX_COLUMNS {
            // Somebody leaves in the middle of a prompt, between two layers.
            let (mut kv, mut layers) = (KvCache::new(&engine.model.config, 64, kind).unwrap(), 0);
            let stop = prng.below(layers_of(&engine)) as usize;
            let mut go_on = || {
                layers += 1;
                layers <= stop
            };
            assert!(!engine.forward_while(&mut kv, &[7; 50], Logits::None, &mut go_on));
            assert_eq!((layers, kv.len), (stop + 1, 0));
        }
        let found = logits(&mut engine, kind, &sizes, None);
        engine.check().unwrap();
        let off = by_token(&found, &expected, engine.model.config.vocab);
        assert!(off.iter().all(|&off| off < 2e-3), "{name} {kind:?} {sizes:?} {slots:?}, frames for {share}: {off:?}");
        let computed = engine.split.as_ref().unwrap().cache.counters.computed;
        let counts = engine.cached.as_mut().unwrap().cache.counts();
        let now = [computed[Tier::Device], computed[Tier::Host], counts.hits, counts.misses];
        seen.lock().unwrap().iter_mut().zip(now).for_each(|(sum, now)| *sum += now);
    });
    let (begun, seen) = (*begun.lock().unwrap(), *seen.lock().unwrap());
    eprintln!(
        "{begun:?} moves from frames, and put off; computed by device and CPU, found in frames and read: {seen:?}"
    );
    if std::env::var_os("HYBRID_SEED").is_none() {
        assert!(begun.iter().chain(&seen).all(|&n| n > 1000), "{begun:?} {seen:?}: nothing was tried");
    }
}

fn layers_of(engine: &Engine) -> u64 {
    engine.model.config.layers().len() as u64
}

/// What a frame has was read from disk a second time, by way of the system's cache, to be copied to the device for a chunk. Here the file's
/// bytes of what frames have are gone, so whoever reads them there finds another model.
#[test]
fn what_is_copied_for_a_chunk_comes_from_the_frame_that_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let shape = Shape {
        hidden: 32,
        layers: 2,
        ffn: 64,
        heads: 1,
        kv_heads: 1,
        vocab: 300,
        context: 128,
        activation: Activation::Silu,
        active: None,
        seed: 3,
        outliers: 0,
        experts: Some(Mixture::flat(16, 3)),
    };
    let (mut held, mut chunks, mut copies) = (0, [0; 2], [0; 2]);
    // All are copied, or the processor has some; frames for a part or for all.
    for (case, (link_us, share)) in [(0.0, 0.5), (12.0, 0.5), (12.0, 2.0), (25.0, 0.3)].into_iter().enumerate() {
        let path = dir.path().join(format!("{case}.gguf"));
        write_gguf(&shape, Quant::F32, &path, &|_, _| Ok(())).unwrap();
        let model = Model::in_place(Source::open(&path, None).unwrap()).unwrap();
        let slots = vec![2; model.config.layers().len()];
        let seen = Arc::default();
        let device = Watched { device: VirtualDevice::new(u64::MAX, RATES), seen: Arc::clone(&seen) };
        // SAFETY: the engine has both.
        let mut split = unsafe { on_device(&model, Box::new(device), &slots) }.unwrap();
        split.stream_experts(&model, expert_costs(link_us), streaming_experts_bytes(&model, 2)).unwrap();
        let mut engine = Engine::new(model, 1, Kernels::best());
        let files: Vec<&std::fs::File> = engine.model.files().iter().map(|file| file.file()).collect();
        let options = HostCacheOptions { policy: Policy::Lru, ..HostCacheOptions::new(0) };
        let cache = host_cache(&engine.model, disk::open(&files).unwrap().disk, share, options);
        engine.split = Some(split);
        engine.set_host_cache(cache, None);
        // A few tokens fill the frames, and a chunk moves what is in them.
        logits(&mut engine, KvType::F32, &[20], None);
        let expected = logits(&mut engine, KvType::F32, &[90], None);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        for (l, blocks) in layer_blocks(&engine.model).unwrap().iter().enumerate() {
            let table = engine.cached.as_ref().unwrap().cache.table(l);
            for expert in (0..16).filter(|&expert| table.location(StoreId::new(expert)).is_device()) {
                held += 1;
                for run in blocks.runs() {
                    file.write_all_at(&vec![0; run.bytes()], run.at(expert)).unwrap();
                }
            }
        }
        let before = engine.split.as_ref().unwrap().chunks;
        seen.lock().unwrap().clear();
        let found = logits(&mut engine, KvType::F32, &[90], None);
        engine.check().unwrap();
        assert!(found == expected, "copies at {link_us} us, frames for {share}");
        let now = engine.split.as_ref().unwrap().chunks;
        chunks[0] += now.streamed - before.streamed;
        chunks[1] += now.on_cpu - before.on_cpu;
        // What the system's cache has to bring is copied when the processor has done its part of the layer, not before.
        let mapped = engine.model.files()[0].bytes().as_ptr_range();
        let blocks = layer_blocks(&engine.model).unwrap();
        let mut worked = 0;
        for step in seen.lock().unwrap().iter() {
            match step {
                Step::Worked => worked += 1,
                Step::Copy(from) if (mapped.start.addr()..mapped.end.addr()).contains(from) => {
                    let at = (from - mapped.start.addr()) as u64;
                    let is_of = |blocks: &LayerBlocks| blocks.runs().iter().any(|r| (0..16).any(|e| r.at(e) == at));
                    let layer = blocks.iter().position(is_of).unwrap();
                    assert_eq!(worked, layer + 1, "of layer {layer}");
                    copies[1] += 1;
                }
                Step::Copy(_) => copies[0] += usize::from(worked < 2),
                Step::Pinned(_) | Step::Host(_) | Step::Added | Step::Scheduled => {}
            }
        }
    }
    let tried = held > 30 && chunks.iter().all(|&pairs| pairs > 50) && copies.iter().all(|&copies| copies > 20);
    assert!(
        tried,
        "{held} held; {chunks:?} copied and on the processor; {copies:?} copies from frames and from the file"
    );
}

/// demo-moe with a part on the virtual device, and of the rest `share` in memory; `None`: all of it.
fn demo_moe(share: Option<f64>, policy: Policy) -> Opened {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut options = EngineOptions { context: Some(512), ..EngineOptions::new(root.join("assets/demo-moe")) };
    options.neurons.share = share;
    options.device = Some(DeviceOptions {
        ffn_share: Some(0.3),
        machine: Some(root.join("profiles/machines/demo-pc.toml")),
        history: false,
        policy,
        deterministic: true,
        ..DeviceOptions::new(DeviceKind::Virtual)
    });
    open(&options, &Quiet).unwrap()
}

/// A text of so many tokens, always the likeliest one.
fn text(opened: &mut Opened, tokens: usize) -> Vec<u32> {
    let mut session = opened.session().unwrap();
    let mut next = vec![1, 30, 70, 41, 9];
    (0..tokens)
        .map(|_| {
            let logits = session.append(&mut opened.engine, &next, |_| Ok(())).unwrap();
            next = vec![argmax(logits).unwrap()];
            next[0]
        })
        .collect()
}

#[test]
fn a_mixture_runs_on_three_tiers_and_experts_climb_from_disk_to_the_device() {
    let expected = text(&mut demo_moe(None, Policy::Static), 60);
    for policy in [Policy::Static, Policy::Full, Policy::Lru] {
        let mut opened = demo_moe(Some(0.4), policy);
        assert_eq!(text(&mut opened, 60), expected, "{}", policy.name());
        let split = opened.engine.split.as_ref().unwrap();
        let (landed, computed) = (split.cache.counters.landed, split.cache.counters.computed);
        let counts = opened.engine.cached.as_mut().unwrap().cache.counts();
        assert!(
            computed[Tier::Device] > 0 && counts.hits > 0 && counts.misses + counts.early > 0,
            "{computed:?} {counts:?}"
        );
        assert!(landed > 0 || policy != Policy::Lru, "nothing has climbed");
    }
}
