//! Models whose FFNs are stored in clusters: the source's bytes, none of them changed, and the source's answers, wherever the clusters lie.

use crate::support::law::{logits, slots, with_seeds};
use crate::support::{RATES, device_bytes, error, on_device};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::VirtualDevice;
use dynamicinfer::engine::{Engine, Session};
use dynamicinfer::error::Error;
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::{Permutation, StoreId};
use dynamicinfer::lab::synth::{Shape, write_gguf};
use dynamicinfer::model::config::Activation;
use dynamicinfer::model::source::{Role, Source};
use dynamicinfer::model::{KvType, Matrix, Model};
use dynamicinfer::open::{EngineOptions, Quiet, RamOptions, open};
use dynamicinfer::pack::{PackOptions, Types, can_be_cut, pack};
use dynamicinfer::prng::Prng;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> Source {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models");
    Source::open(&folder.join(name), None).unwrap()
}

/// A GGUF of three layers of so many neurons.
fn made_up(dir: &Path, quant: Quant, ffn: usize) -> PathBuf {
    let shape = Shape {
        hidden: 256,
        layers: 3,
        ffn,
        heads: 4,
        kv_heads: 2,
        vocab: 300,
        context: 256,
        activation: Activation::Silu,
        active: None,
        seed: 9,
        experts: None,
        outliers: 0,
    };
    let path = dir.join(format!("{}.gguf", quant.name()));
    write_gguf(&shape, quant, &path, &|_, _| Ok(())).unwrap();
    path
}

fn cut(source: &Source, path: &Path) -> dynamicinfer::error::Result<Model> {
    pack(source, path, &PackOptions { types: Types::Clusters, orders: None }, &|_, _| Ok(()))?;
    Model::open(path)
}

const TYPES: [Quant; 5] =
    [Quant::F32, Quant::F16, Quant::Q8, Quant::Block(BlockType::Q4_K), Quant::Block(BlockType::Q6_K)];

/// The clusters' matrices one after the other, put together as the source has them.
fn put_together(parts: &[&Matrix], by_column: bool) -> Vec<u8> {
    if !by_column {
        return parts.iter().flat_map(|part| part.all()).copied().collect();
    }
    (0..parts[0].rows).flat_map(|row| parts.iter().flat_map(move |part| part.row(row))).copied().collect()
}

#[test]
fn a_store_of_clusters_has_the_files_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let made_up = TYPES.map(|quant| Source::open(&made_up(dir.path(), quant, 1024), None).unwrap());
    let mixes = ["k256.q4_k_m.gguf", "k256.q6_k.gguf"].map(fixture);
    for source in made_up.iter().chain(&mixes) {
        let model = cut(source, &dir.path().join("x.neurons")).unwrap();
        assert_eq!(model.fingerprint(), source.fingerprint());
        for (l, layer) in model.layers.iter().enumerate() {
            let clusters = &layer.ffn.experts().unwrap().experts;
            assert_eq!(clusters.len(), source.config.widest_ffn() / 256);
            for (m, role) in [Role::Gate, Role::Up, Role::Down].into_iter().enumerate() {
                let view = source.weight(role, l).unwrap();
                let parts: Vec<&Matrix> = clusters.iter().map(|cluster| cluster.parts().nth(m).unwrap()).collect();
                assert!(parts.iter().all(|part| part.quant == Quant::of_source(view.info.dtype)));
                assert!(put_together(&parts, role == Role::Down) == view.data, "{role:?} of layer {l}");
            }
            for (matrix, role) in layer.qkv.parts().iter().zip([Role::Q, Role::K, Role::V]).chain([(&layer.o, Role::O)])
            {
                let rows = source.rows(role, l).unwrap();
                if matrix.quant != Quant::of_source(rows.view.info.dtype) || layer.qkv.parts().len() < 3 {
                    continue;
                }
                let bytes = matrix.quant.number_bytes(matrix.cols);
                for row in 0..matrix.rows {
                    let from = &rows.view.data[rows.file_row(row) * bytes..][..bytes];
                    assert_eq!(&matrix.row(row)[..bytes], from, "{role:?} {row}");
                }
            }
        }
    }
}

const PASSES: [usize; 6] = [40, 1, 1, 3, 130, 1];

#[test]
fn clusters_answer_as_the_file_does_on_the_cpu_and_with_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let cases = TYPES.map(|quant| {
        let file = made_up(dir.path(), quant, 1024);
        let source = Source::open(&file, None).unwrap();
        let store = dir.path().join(format!("{}.neurons", quant.name()));
        cut(&source, &store).unwrap();
        let mut in_place = Engine::new(Model::in_place(source).unwrap(), 2, Kernels::best());
        (quant, store, logits(&mut in_place, KvType::F32, &PASSES, None))
    });
    for (quant, store, expected) in &cases {
        let mut engine = Engine::new(Model::open(store).unwrap(), 2, Kernels::best());
        let off = error(&logits(&mut engine, KvType::F32, &PASSES, None), expected);
        // Both round inputs to int8 in the same groups, and add in another order.
        let most = if matches!(quant, Quant::F32 | Quant::F16) { 1e-5 } else { 2e-2 };
        assert!(off < most, "{quant:?} is off by {off}");
    }
    with_seeds("clusters_answer_as_the_file_does_on_the_cpu_and_with_a_device", 24, |seed| {
        let mut prng = Prng::new(seed);
        let (quant, store, expected) = &cases[prng.below(cases.len() as u64) as usize];
        let model = Model::open(store).unwrap();
        let clusters = model.config.clusters();
        let slots: Vec<usize> = (0..model.config.layers().len()).map(|_| slots(&mut prng, clusters)).collect();
        let device = VirtualDevice::new(device_bytes(&model, &slots), RATES);
        // SAFETY: the engine drops its device's part before its model: it has both.
        let mut split = unsafe { on_device(&model, Box::new(device), &slots) }.expect("the budget is what it takes");
        for (l, &slots) in slots.iter().enumerate() {
            let there: Vec<StoreId> = (0..slots).map(|i| StoreId::new((i + l) % clusters)).collect();
            split.cache.load(&mut *split.device, l, &there).expect("they fit and none is named twice");
            split.cache.settle(&mut *split.device);
        }
        let mut engine = Engine::new(model, 1 + prng.below(2) as usize, Kernels::best());
        engine.split = Some(split);
        let off = error(&logits(&mut engine, KvType::F32, &PASSES, None), expected);
        let most = if matches!(quant, Quant::F32 | Quant::F16) { 2e-3 } else { 4e-2 };
        assert!(off < most, "{quant:?} with {slots:?} is off by {off}");
    });
}

/// A dense GGUF with room for half of its clusters is packed by itself, says the same, and reads only what is missing.
#[test]
fn a_dense_gguf_that_does_not_fit_is_cut_and_only_what_is_missing_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = made_up(dir.path(), Quant::Block(BlockType::Q4_K), 8192);
    let store = dir.path().join("m.neurons");
    cut(&Source::open(&path, None).unwrap(), &store).unwrap();
    let ids: Vec<u32> = (0..24).map(|i| 5 + i * 37 % 90).collect();
    let run = |share: Option<f64>| {
        let neurons = RamOptions { share, ..RamOptions::default() };
        let options = EngineOptions { context: Some(64), neurons, threads: Some(2), ..EngineOptions::new(&store) };
        let mut engine = open(&options, &Quiet).unwrap().engine;
        let mut session = Session::new(&engine, 64, KvType::F16).unwrap();
        let mut bits = Vec::new();
        for id in &ids {
            let logits = session.append(&mut engine, &[*id], |_| Ok(())).unwrap();
            bits.extend(logits.iter().map(|logit| logit.to_bits()));
        }
        let counts = engine.cached.as_mut().map(|cached| cached.cache.counts());
        (bits, counts)
    };
    let ((whole, none), (half, counts)) = (run(None), run(Some(0.5)));
    assert!(none.is_none() && half == whole);
    let counts = counts.unwrap();
    let share = counts.hits as f64 / (counts.hits + counts.misses) as f64;
    // The first token finds nothing there; from then on what stays is found every time.
    assert!((0.40..0.55).contains(&share), "{share} of the clusters were in memory: {counts:?}");
}

#[test]
fn what_cannot_be_cut_is_refused_with_another_way() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("x.neurons");
    for name in ["opt", "relullama.powerinfer.gguf", "mixtral.gguf"] {
        assert!(!can_be_cut(&fixture(name)));
        let why = cut(&fixture(name), &store).err().unwrap();
        assert!(matches!(why, Error::Usage(_)) && !store.exists(), "{name}: {why}");
    }
    let source = fixture("k256.q4_k_m.gguf");
    let order: Vec<u32> = (0..source.config.widest_ffn() as u32).collect();
    let orders = Some(vec![Permutation::new(&order).unwrap(); source.config.layers().len()]);
    let why = pack(&source, &store, &PackOptions { types: Types::Clusters, orders }, &|_, _| Ok(())).unwrap_err();
    assert!(why.to_string().contains("--order"), "{why}");
}
