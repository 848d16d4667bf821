//! THE LAW of forms: made-up models whose layers differ from each other in every way that the data can say. Host, device and disk agree for every
//! residency, and a pass that is stopped leaves no trace.

use crate::drawn::{VOCAB, drawn, one};
use crate::support::law::{all_exact, logits, slots, with_seeds};
use crate::support::{RATES, by_token, device_bytes, on_device};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::VirtualDevice;
use dynamicinfer::disk;
use dynamicinfer::engine::{Engine, Logits};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::host_cache::{HostCache, HostCacheOptions, LayerBlocks, least_bytes};
use dynamicinfer::ids::StoreId;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::open::layer_blocks;
use dynamicinfer::prng::Prng;
use std::path::Path;

fn cache(model: &Model, share: f64, seed: u64) -> HostCache {
    let files: Vec<_> = model.files().iter().map(|file| file.file()).collect();
    let disk = disk::open(&files).unwrap().disk;
    let (blocks, clusters) = (layer_blocks(model).unwrap(), model.config.clusters());
    let frame = |b: &LayerBlocks| b.block_bytes() + 2 * disk.align() * b.runs().len();
    let all: usize = blocks.iter().map(|b| frame(b) * clusters + 8192).sum();
    let bytes = (least_bytes(&blocks, clusters, disk.align()) as f64 * 1.3 + share * all as f64) as u64;
    HostCache::new(disk, &blocks, clusters, HostCacheOptions { bytes, seed, ..HostCacheOptions::new(0) }).unwrap()
}

#[test]
fn host_device_and_disk_agree_on_every_form() {
    with_seeds("host_device_and_disk_agree_on_every_form", 300, |seed| {
        let dir = tempfile::tempdir().unwrap();
        let (mut prng, model) = drawn(seed, dir.path());
        let config = model.config.clone();
        let layers = config.layers().len();
        let sizes: &[usize] = one(&mut prng, &[&[40, 1, 1, 3, 1], &[1, 1, 1, 1, 1, 1], &[7, 1, 32, 1, 2]]);
        let kind = one(&mut prng, &[KvType::F32, KvType::F16]);
        let slots: Vec<usize> = (0..layers).map(|l| slots(&mut prng, config.movable_of(l))).collect();
        let exact = model.has_neurons() && config.activation.is_sparse() && prng.below(2) == 0;
        let on_disk = (config.is_mixture() || prng.below(2) == 0).then(|| cache(&model, 0.4, seed));
        // A model of neurons some of whose layers have none is computed by the host.
        let divides = config.is_mixture() || config.movable_layers() == layers;
        let split = divides.then(|| {
            let device = Box::new(VirtualDevice::new(device_bytes(&model, &slots), RATES));
            // SAFETY: the engine drops its device's part before its model: it has both.
            let mut split = unsafe { on_device(&model, device, &slots) }.expect("the budget is what it takes");
            for (l, &slots) in slots.iter().enumerate().filter(|_| prng.below(3) > 0) {
                let first: Vec<StoreId> = (0..slots).map(|i| StoreId::new((i + l) % config.movable())).collect();
                split.cache.load(&mut *split.device, l, &first).unwrap();
            }
            split.cache.settle(&mut *split.device);
            split
        });
        assert_eq!(divides, model.not_on_device().is_none(), "{:?}", model.not_on_device());
        let mut engine = Engine::new(model, 1 + prng.below(2) as usize, Kernels::best());
        if exact {
            engine.set_sparsity(all_exact(layers));
        }
        let expected = logits(&mut engine, kind, sizes, None);
        assert!(expected.iter().all(|x| x.is_finite()), "{config:?}");
        let agrees = |found: &[f32], where_: &str| {
            let off = by_token(found, &expected, VOCAB.max(config.vocab));
            assert!(
                off.iter().all(|off| *off < 2e-3),
                "{where_}, slots {slots:?}, passes {sizes:?}: {off:?}\n{config:?}"
            );
        };
        if split.is_some() {
            engine.split = split;
            agrees(&logits(&mut engine, kind, sizes, None), "on a device");
            engine.check().unwrap();
            engine.split = None;
        }
        if let Some(cache) = on_disk {
            engine.set_host_cache(cache, None);
            agrees(&logits(&mut engine, kind, sizes, None), "from disk");
            engine.check().unwrap();
        }
    });
}

#[test]
fn a_pass_that_is_stopped_before_any_layer_leaves_no_trace() {
    with_seeds("a_pass_that_is_stopped_before_any_layer_leaves_no_trace", 50, |seed| {
        let dir = tempfile::tempdir().unwrap();
        let (_, model) = drawn(seed, dir.path());
        let mut engine = Engine::new(model, 2, Kernels::best());
        let config = engine.model.config.clone();
        let tokens = |n: u32| (0..n).map(|i| 5 + i * 37 % 90).collect::<Vec<u32>>();
        let new = || KvCache::new(&config, 128, KvType::F32).unwrap();
        let (mut kv, mut clean) = (new(), new());
        engine.forward(&mut kv, &tokens(20), Logits::None);
        engine.forward(&mut clean, &tokens(20), Logits::None);
        let want = engine.forward(&mut clean, &tokens(3), Logits::Last).to_vec();
        for stop in 0..config.layers().len() {
            let mut left = stop;
            let whole = engine.forward_while(&mut kv, &tokens(40), Logits::Last, &mut || {
                left = left.wrapping_sub(1);
                left != usize::MAX
            });
            assert!(!whole && kv.len == 20, "before layer {stop}");
        }
        assert_eq!(engine.forward(&mut kv, &tokens(3), Logits::Last), &want[..], "{config:?}");
    });
}

/// Texts grow, are cut back as far as they can be, copied and given up, and their caches used for others. Each goes on as if it had been read anew.
#[test]
fn texts_that_are_cut_and_copied_go_on_as_if_read_anew() {
    let (mut kept, mut lost) = (0, 0);
    for name in ["lfm2", "lfm2-moe.gguf", "gemma3", "qwen35", "nemotron-h", "gemma4-e2b", "deepseek-v3"] {
        let dir = tempfile::tempdir().unwrap();
        let model = match name.ends_with(".gguf") {
            true => {
                let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name);
                Model::in_place(Source::open(&path, None).unwrap()).unwrap()
            }
            false => crate::support::opened(dir.path(), name, Quant::F32),
        };
        let mut engine = Engine::new(model, 2, Kernels::best());
        let config = engine.model.config.clone();
        let mut prng = Prng::new(7);
        let mut texts: Vec<(KvCache, Vec<u32>)> =
            (0..3).map(|_| (KvCache::new(&config, 200, KvType::F32).unwrap(), Vec::new())).collect();
        for step in 0..250 {
            let which = prng.below(3) as usize;
            match prng.below(8) {
                0 | 1 => {
                    let (kv, text) = &mut texts[which];
                    let to = prng.below(text.len() as u64 + 1) as usize;
                    let left = kv.rewind(to);
                    assert!(left <= to && kv.reach(left) == left);
                    text.truncate(left);
                    *(if left == to { &mut kept } else { &mut lost }) += 1;
                }
                2 => {
                    let from = (which + 1) % 3;
                    let [(to, copy), (other, text)] = texts.get_disjoint_mut([which, from]).unwrap();
                    let len = other.reach(prng.below(text.len() as u64 + 1) as usize);
                    to.copy_from(other, len);
                    *copy = text[..len].to_vec();
                }
                3 => {
                    let (kv, text) = &mut texts[which];
                    kv.rewind(0);
                    kv.renew();
                    text.clear();
                }
                _ => {
                    let (kv, text) = &mut texts[which];
                    let count = one(&mut prng, &[1, 1, 2, 9, 40]);
                    if text.len() + count + 1 > 200 {
                        continue;
                    }
                    let more: Vec<u32> = (0..count).map(|_| 5 + prng.below(80) as u32).collect();
                    engine.forward(kv, &more, Logits::None);
                    if count > 1 {
                        kv.checkpoint();
                    }
                    text.extend(&more);
                }
            }
            let (kv, text) = &mut texts[which];
            if text.len() + 1 > 200 {
                continue;
            }
            let next = 5 + prng.below(80) as u32;
            let found = engine.forward(kv, &[next], Logits::Last).to_vec();
            text.push(next);
            let mut anew = KvCache::new(&config, 200, KvType::F32).unwrap();
            let wanted = engine.forward(&mut anew, text, Logits::Last).to_vec();
            let off = by_token(&found, &wanted, config.vocab);
            assert!(off[0] < 1e-3, "{name}, step {step}, {} tokens: {off:?}", text.len());
        }
    }
    assert!(kept > 50 && lost > 50, "{kept} and {lost}");
}
