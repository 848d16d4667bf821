//! Laws of the checksums of blocks: what is read from disk by itself is compared when it is first read. What is wrong is read again; what stays
//! wrong is an error that says where, and never a number. Nothing is compared twice, and nothing that nobody uses.

use crate::support;
use crate::support::chance::Chance;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::disk::{Disk, DiskCosts, Faults, VirtualDisk};
use dynamicinfer::engine::{Choice, Engine, Failure, Logits, Sparsity};
use dynamicinfer::error::Error;
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::host_cache::{HostCache, HostCacheOptions, least_bytes};
use dynamicinfer::ids::StoreId;
use dynamicinfer::lab::synth::{Mixture, Shape, write_gguf, write_store};
use dynamicinfer::model::config::Activation;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::open::{EngineOptions, Quiet, RamOptions, layer_blocks, open};
use dynamicinfer::pack::{PackOptions, Types, pack};
use dynamicinfer::prng::Prng;
use serde_json::Value as Json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

fn by_chance(engine: &mut Engine, never: fn(usize) -> bool) {
    let predictor = Arc::new(Chance { never, ..Chance::new(0.43) });
    let choice = Choice::Predicted { predictor, threshold: 0.5, activation_threshold: 0.0 };
    engine.set_sparsity(Sparsity::new(vec![choice; engine.model.config.layers().len()], 0).unwrap());
}

fn shape(ffn: usize, activation: Activation, experts: Option<Mixture>) -> Shape {
    Shape {
        hidden: 256,
        layers: 3,
        ffn,
        heads: 4,
        kv_heads: 2,
        vocab: 300,
        context: 128,
        activation,
        active: None,
        seed: 4,
        experts,
        outliers: 0,
    }
}

/// A store of neurons.
fn neurons(dir: &Path, quant: Quant) -> PathBuf {
    let store = dir.join(format!("{}.neurons", quant.name()));
    write_store(&shape(700, Activation::Relu, None), quant, &store, &|_, _| Ok(())).unwrap();
    store
}

/// A store that is packed from a file: of a dense model clusters, of a mixture its experts by neuron.
fn from_gguf(dir: &Path, name: &str, shape: &Shape) -> PathBuf {
    let (gguf, store) = (dir.join("m.gguf"), dir.join(name));
    write_gguf(shape, Quant::Block(BlockType::Q4_K), &gguf, &|_, _| Ok(())).unwrap();
    let source = Source::open(&gguf, None).unwrap();
    let types = if shape.experts.is_some() { Types::natural(&source).unwrap() } else { Types::Clusters };
    pack(&source, &store, &PackOptions { types, orders: None }, &|_, _| Ok(())).unwrap();
    store
}

/// Stores of every kind that has blocks.
fn stores(dir: &Path) -> Vec<PathBuf> {
    vec![
        neurons(dir, Quant::F16),
        neurons(dir, Quant::Q4),
        support::packed(dir, "opt", Quant::F32),
        from_gguf(dir, "clusters.neurons", &shape(1024, Activation::Silu, None)),
        from_gguf(dir, "experts.neurons", &shape(256, Activation::Relu, Some(Mixture::flat(8, 3)))),
    ]
}

/// An engine as the verbs open it, with a part of its blocks in memory, or all of the file mapped.
fn opened(store: &Path, share: Option<f64>) -> Result<Engine, Error> {
    let neurons = RamOptions { share, ..RamOptions::default() };
    let options = EngineOptions { context: Some(100), neurons, threads: Some(2), ..EngineOptions::new(store) };
    let mut engine = open(&options, &Quiet)?.engine;
    if engine.model.has_neurons() {
        by_chance(&mut engine, |_| false);
    }
    Ok(engine)
}

/// Single tokens, few, and a prompt's chunk, which is streamed.
const PASSES: [usize; 8] = [1, 1, 3, 1, 1, 40, 1, 1];

/// The logits of each pass, up to the first that failed, and what was wrong with that.
fn passes(engine: &mut Engine, sizes: &[usize]) -> (Vec<Vec<f32>>, Option<String>) {
    let mut kv = KvCache::new(&engine.model.config, 100, KvType::F32).unwrap();
    let (mut all, mut token) = (Vec::new(), 5);
    for &n in sizes {
        let ids: Vec<u32> = (token..token + n as u32).map(|id| id * 37 % 90).collect();
        token += n as u32;
        let out = engine.forward(&mut kv, &ids, Logits::All).to_vec();
        if let Err(error) = engine.check() {
            assert!(out.iter().all(|x| x.is_nan()), "a number of a pass that failed");
            assert!(matches!(engine.failure(), Some(Failure::Pass(why)) if why == error.without_folder()));
            return (all, Some(error.to_string()));
        }
        all.push(out);
    }
    (all, None)
}

#[test]
fn a_bit_that_is_wrong_on_disk_ends_the_answer_that_needs_it_and_says_where() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for store in stores(dir.path()) {
        let (bytes, model) = (std::fs::read(&store).unwrap(), Model::open(&store).unwrap());
        let (blocks, clusters) = (layer_blocks(&model).unwrap(), model.config.clusters());
        let expected = passes(&mut opened(&store, None).unwrap(), &PASSES).0;
        assert_eq!(expected.len(), PASSES.len());
        let damaged = dir.path().join("damaged.neurons");
        let (mut failed, mut right) = (0, 0);
        for seed in 0..12 {
            let mut prng = Prng::new(seed);
            let mut of = |count: usize| prng.below(count as u64) as usize;
            let (layer, cluster) = (of(blocks.len()), of(clusters));
            let run = &blocks[layer].runs()[of(blocks[layer].runs().len())];
            let begin = run.at(cluster);
            let (byte, bit) = (begin as usize + of(run.bytes()), of(8));
            let mut wrong = bytes.clone();
            wrong[byte] ^= 1 << bit;
            std::fs::write(&damaged, wrong).unwrap();
            let case = format!("{store:?} seed {seed}: bit {bit} of byte {byte}, layer {layer}, {cluster}");
            let mut engine = opened(&damaged, Some([0.0, 0.3, 1.0][of(3)])).unwrap();
            let (found, why) = passes(&mut engine, &PASSES);
            assert!(found == expected[..found.len()], "{case}");
            right += found.len();
            // A chunk needs all neurons, and any token all clusters; of experts some are never chosen.
            assert!(why.is_some() || model.config.is_routed(), "{case}");
            let Some(why) = why else { continue };
            let noun = match &model.config {
                config if config.is_routed() => "expert",
                config if config.is_mixture() => "cluster",
                _ => "neuron",
            };
            let expected = format!(
                "{}: layer {layer}, {noun} {cluster}: its checksum is not the one it was packed with, read 4 times: the file or the disk \
                 is damaged; `dynamicinfer show --verify` reads all of it; pack the model again (at byte {begin})",
                damaged.display()
            );
            assert_eq!(why, expected, "{case}");
            assert!(engine.cached.as_mut().unwrap().cache.counts().reads.again >= 3, "{case}");
            failed += 1;
            // What needs it fails again, and the engine lives.
            assert!(passes(&mut engine, &PASSES).1.is_some(), "{case}");
        }
        assert!(failed >= 6 && (right > 0 || clusters == 4), "{store:?}: {failed} failed, {right} passes did not");
    }
}

fn virtual_disk(path: &Path, seed: u64, faults: Faults) -> Box<dyn Disk> {
    Box::new(VirtualDisk::new(File::open(path).unwrap(), 512, seed, faults))
}

/// An engine with a cache of the least size and `share` of its blocks beside it.
fn cached(store: &Path, disk: Box<dyn Disk>, share: f64, options: HostCacheOptions) -> Engine {
    let mut engine = Engine::new(Model::open(store).unwrap(), 2, Kernels::best());
    let (blocks, clusters) = (layer_blocks(&engine.model).unwrap(), engine.model.config.clusters());
    let frames: usize = blocks.iter().map(|b| (b.block_bytes() + 2 * disk.align() * b.runs().len()) * clusters).sum();
    let least = least_bytes(&blocks, clusters, disk.align());
    let bytes = (least as f64 * 1.2 + share * frames as f64) as u64 + 3 * 8192;
    let cache = HostCache::new(disk, &blocks, clusters, HostCacheOptions { bytes, ..options }).unwrap();
    engine.set_host_cache(cache, None);
    if engine.model.has_neurons() {
        by_chance(&mut engine, |_| false);
    }
    engine
}

/// Bits that the disk or its way here got wrong once: what is read again is right, and so is the text.
#[test]
fn what_was_wrong_once_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    for store in stores(dir.path()) {
        let mut mapped = Engine::new(Model::open(&store).unwrap(), 2, Kernels::best());
        if mapped.model.has_neurons() {
            by_chance(&mut mapped, |_| false);
        }
        let expected = passes(&mut mapped, &PASSES);
        let mut again = 0;
        for seed in 0..8 {
            let faults =
                Faults { wrong: 0.3, short: if seed % 2 == 0 { 0.3 } else { 0.0 }, late: 2, ..Faults::default() };
            let options = HostCacheOptions { together: seed % 3 > 0, ..HostCacheOptions::new(0) };
            let mut engine = cached(&store, virtual_disk(&store, seed, faults), 0.4, options);
            assert!(passes(&mut engine, &PASSES) == expected, "{store:?} seed {seed}");
            let counts = engine.cached.as_mut().unwrap().cache.counts();
            again += counts.reads.again * u64::from(seed % 2 == 1);
        }
        assert!(again > 4, "{store:?}: the disk was right");
    }
}

/// Each block once, whatever comes after: of single tokens those that they need, of a prompt all.
#[test]
fn a_block_is_compared_once() {
    let dir = tempfile::tempdir().unwrap();
    for store in stores(dir.path()) {
        // Everything leaves its frame again and is read anew.
        let disk = virtual_disk(&store, 1, Faults::default());
        let mut engine = cached(&store, disk, 0.0, HostCacheOptions::new(0));
        let mut verified = |sizes: &[usize]| {
            let (_, why) = passes(&mut engine, sizes);
            assert_eq!(why, None);
            let counts = engine.cached.as_mut().unwrap().cache.counts();
            (counts.reads.verified, counts.reads.verified_bytes, counts.reads.bytes)
        };
        let (first, bytes, read) = verified(&[1, 1, 3]);
        let (same, same_bytes, read_again) = verified(&[1, 1, 3]);
        assert!(first > 0 && (same, same_bytes) == (first, bytes) && read_again > read, "{store:?}");
        let (all, all_bytes, _) = verified(&PASSES);
        assert_eq!(verified(&PASSES).0, all);
        let model = Model::open(&store).unwrap();
        let of_layer = |layer: &dynamicinfer::host_cache::LayerBlocks| {
            let clusters = model.config.clusters();
            ((layer.runs().len() * clusters) as u64, (layer.block_bytes() * clusters) as u64)
        };
        let pieces: Vec<(u64, u64)> = layer_blocks(&model).unwrap().iter().map(of_layer).collect();
        let (count, bytes) = pieces.iter().fold((0, 0), |(n, b), layer| (n + layer.0, b + layer.1));
        match model.config.is_routed() {
            false => assert_eq!((all, all_bytes), (count, bytes), "{store:?}"),
            true => assert!(all <= count && all_bytes <= bytes, "{store:?}"),
        }
    }
}

/// Every fifth neuron is damaged, none of them is chosen, and all of them are read along.
#[test]
fn a_neighbour_that_nobody_uses_may_be_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let store = neurons(dir.path(), Quant::F16);
    let good = std::fs::read(&store).unwrap();
    let never = |neuron: usize| neuron.is_multiple_of(5);
    let run = |mut engine: Engine| {
        by_chance(&mut engine, never);
        let found = passes(&mut engine, &[1; 20]);
        (found, engine.cached.map(|mut cached| cached.cache.counts().reads))
    };
    let expected = run(Engine::new(Model::open(&store).unwrap(), 2, Kernels::best())).0;
    let mut bytes = good.clone();
    for layer in layer_blocks(&Model::open(&store).unwrap()).unwrap() {
        let never = (0..700).filter(|neuron| never(*neuron));
        never.for_each(|neuron| bytes[layer.runs()[0].at(neuron) as usize + 70] ^= 4);
    }
    let damaged = dir.path().join("damaged.neurons");
    std::fs::write(&damaged, bytes).unwrap();
    // A read takes so long that neighbours far apart come together.
    let costs = DiskCosts { read_us: 100.0, gb_s: 1.0 };
    let disk = virtual_disk(&damaged, 1, Faults::default());
    let (found, reads) = run(cached(&damaged, disk, 0.3, HostCacheOptions { costs, ..HostCacheOptions::new(0) }));
    assert!(found == expected);
    let reads = reads.unwrap();
    assert!(reads.again == 0 && reads.verified > 300 && reads.bytes > 2 * reads.verified_bytes, "{reads:?}");
}

/// Frames that begin with the most frequent neurons leave out one that is damaged: answers that do not need it are right.
#[test]
fn a_damaged_neuron_does_not_keep_others_from_their_frames() {
    let dir = tempfile::tempdir().unwrap();
    let store = neurons(dir.path(), Quant::F16);
    let never = |neuron: usize| neuron == 3;
    let run = |mut engine: Engine, never: fn(usize) -> bool| {
        by_chance(&mut engine, never);
        passes(&mut engine, &[1; 20])
    };
    let expected = run(Engine::new(Model::open(&store).unwrap(), 2, Kernels::best()), never);
    let mut bytes = std::fs::read(&store).unwrap();
    bytes[layer_blocks(&Model::open(&store).unwrap()).unwrap()[1].runs()[0].at(3) as usize + 70] ^= 4;
    let damaged = dir.path().join("damaged.neurons");
    std::fs::write(&damaged, bytes).unwrap();
    let placed = || {
        let mut engine = cached(&damaged, virtual_disk(&damaged, 1, Faults::default()), 0.4, HostCacheOptions::new(0));
        let cache = &mut engine.cached.as_mut().unwrap().cache;
        (0..3).for_each(|layer| cache.place(layer, &[5; 700], 10).unwrap());
        assert!(cache.table(1).residents() > 200 && !cache.table(1).location(StoreId::new(3)).is_device());
        engine
    };
    assert!(run(placed(), never) == expected);
    let why = run(placed(), |_| false).1.unwrap();
    assert!(why.contains("layer 1, neuron 3: its checksum is not the one"), "{why}");
}

/// The store with another header, whose length and checksum are right.
fn with_header(bytes: &[u8], change: impl FnOnce(&mut Vec<Json>)) -> Vec<u8> {
    let at = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) as usize;
    let mut header: Json = serde_json::from_slice(&bytes[at..]).unwrap();
    change(header["sections"].as_array_mut().unwrap());
    let text = header.to_string();
    let mut out = [&bytes[..at], text.as_bytes()].concat();
    let length = out.len() as u64;
    for (at, number) in [(24, text.len() as u64), (32, xxh3_64(text.as_bytes())), (40, length)] {
        out[at..at + 8].copy_from_slice(&number.to_le_bytes());
    }
    out
}

/// A store that was packed before there were checksums of blocks.
fn without_checksums(bytes: &[u8]) -> Vec<u8> {
    with_header(bytes, |sections| {
        let before = sections.len();
        sections.retain(|section| !section["name"].as_str().unwrap().ends_with("_checksums"));
        assert!(sections.len() < before);
    })
}

#[test]
fn a_store_without_checksums_of_blocks_runs_and_nothing_is_compared() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for store in stores(dir.path()) {
        let old = dir.path().join("old.neurons");
        std::fs::write(&old, without_checksums(&std::fs::read(&store).unwrap())).unwrap();
        let has = |path: &Path| Model::open(path).unwrap().store().unwrap().has_block_checksums();
        assert!(has(&store) && !has(&old));
        let expected = passes(&mut opened(&store, None).unwrap(), &PASSES);
        for share in [0.0, 0.5] {
            let mut engine = opened(&old, Some(share)).unwrap();
            assert!(passes(&mut engine, &PASSES) == expected, "{store:?}");
            let reads = engine.cached.unwrap().cache.counts().reads;
            assert!(reads.bytes > 0 && (reads.verified, reads.verified_bytes) == (0, 0), "{reads:?}");
        }
    }
}

#[test]
fn damaged_checksums_are_an_error_where_they_are_needed() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for store in stores(dir.path()) {
        let bytes = std::fs::read(&store).unwrap();
        let model = Model::open(&store).unwrap();
        let mut prng = Prng::new(1);
        let damaged = dir.path().join("damaged.neurons");
        let refused = |bytes: &[u8], name: &str, word: &str| {
            std::fs::write(&damaged, bytes).unwrap();
            let Err(error) = opened(&damaged, Some(0.5)) else { panic!("{name}: was accepted") };
            let text = error.to_string();
            let names = text.starts_with(&format!("{}: {name}: ", damaged.display()));
            assert!(matches!(error, Error::BadFile(_)) && names && text.contains(word), "{text}");
            assert!(text.contains("pack the model again"), "{text}");
            // What is mapped does not need them.
            assert!(passes(&mut opened(&damaged, None).unwrap(), &[1]).1.is_none());
        };
        for layer in 0..model.config.layers().len() {
            let name = format!("layer.{layer}.ffn_checksums");
            let section = model.store().unwrap().section(&name).unwrap();
            let at = (section.offset + prng.below(section.bytes)) as usize;
            let mut wrong = bytes.clone();
            wrong[at] ^= 1 << prng.below(8);
            refused(&wrong, &name, "the file is damaged");
            let named = |sections: &mut Vec<Json>| sections.iter().position(|s| s["name"] == name.as_str()).unwrap();
            let shorter = with_header(&bytes, |sections| {
                let at = named(sections);
                sections[at]["bytes"] = (section.bytes - 4).into();
            });
            refused(&shorter, &name, "checksums");
            let text = with_header(&bytes, |sections| {
                let at = named(sections);
                sections[at]["content"] = "bytes".into();
            });
            refused(&text, &name, "checksums");
        }
    }
}

/// What the table takes: four bytes for each block, and for each matrix of larger ones.
#[test]
fn the_table_is_small() {
    let dir = tempfile::tempdir().unwrap();
    for store in stores(dir.path()) {
        let model = Model::open(&store).unwrap();
        let sections = &model.store().unwrap().header.sections;
        let bytes = |end: &str| sections.iter().filter(|s| s.name.ends_with(end)).map(|s| s.bytes).sum::<u64>();
        let piece = layer_blocks(&model).unwrap()[0].runs().iter().map(|run| run.bytes()).min().unwrap() as u64;
        assert!(bytes("_checksums") > 0 && bytes("_checksums") * piece <= 4 * bytes(".ffn"), "{store:?}");
    }
}
