//! What is packed, and when: nothing before it is known that what it would be packed for is there, and a dense GGUF keeps its own types.

use dynamicinfer::Error;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvType, Model};
use dynamicinfer::open::{self, DeviceKind, DeviceOptions, EngineOptions, Opened, Quiet};
use dynamicinfer::predictor::Kind;
use dynamicinfer::tokenizer::Tokenizer;
use dynamicinfer::training::profile::{Input, Request, profile};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A cache and a data directory of these tests alone, and no card, whatever the machine has.
fn cache() -> &'static Path {
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    DIR.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        // SAFETY: every test comes here first, and nothing else of this program reads the environment before.
        unsafe {
            std::env::set_var("XDG_CACHE_HOME", dir.path().join("cache"));
            std::env::set_var("XDG_DATA_HOME", dir.path().join("data"));
            std::env::set_var("CUDA_VISIBLE_DEVICES", "-1");
        }
        dir
    })
    .path()
}

/// A copy of a fixture, of a name that no other test has.
fn copy(dir: &Path, fixture: &str, name: &str) -> PathBuf {
    cache();
    let to = dir.join(name);
    std::fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(fixture), &to).unwrap();
    to
}

/// The packed copies of a model of this name.
fn packed(name: &str) -> Vec<PathBuf> {
    let stem = format!("{}-", Path::new(name).file_stem().unwrap().to_str().unwrap());
    let entries = std::fs::read_dir(cache().join("cache/dynamicinfer/models")).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_str().unwrap().starts_with(&stem)).map(|entry| entry.path()).collect()
}

fn options(model: &Path) -> EngineOptions {
    EngineOptions { context: Some(64), threads: Some(2), ..EngineOptions::new(model) }
}

fn device(kind: DeviceKind, share: Option<f64>) -> Option<DeviceOptions> {
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/machines/demo-pc.toml");
    Some(DeviceOptions { ffn_share: share, machine: Some(machine), history: false, ..DeviceOptions::new(kind) })
}

/// The logits after a prompt of some tokens, and of two more.
fn logits(opened: Opened) -> Vec<f32> {
    let mut session = opened.session().unwrap();
    let mut engine = opened.engine;
    let mut all = Vec::new();
    for tokens in [&[1u32, 7, 9, 30, 31][..], &[12], &[40]] {
        all.extend_from_slice(session.append(&mut engine, tokens, |_| Ok(())).unwrap());
    }
    all
}

fn refused(options: &EngineOptions) -> String {
    match open::open(options, &Quiet) {
        Err(Error::Usage(why)) => why,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("was opened"),
    }
}

#[test]
fn without_a_card_nothing_is_packed_for_one() {
    let dir = tempfile::tempdir().unwrap();
    for (number, fixture) in ["llama.gguf", "k256.q4_k_m.gguf", "relullama.gguf"].into_iter().enumerate() {
        let name = format!("card-{number}.gguf");
        let path = copy(dir.path(), fixture, &name);
        let named = EngineOptions { device: device(DeviceKind::Cuda, None), ..options(&path) };
        let why = refused(&named);
        assert!(why.contains("NVIDIA driver") || why.contains("CUDA"), "{why}");
        assert!(matches!(open::check(&named, &Quiet), Err(Error::Usage(_))));
        let no_budget = EngineOptions { device: device(DeviceKind::Virtual, None), ..options(&path) };
        assert!(refused(&no_budget).contains("needs a budget"));
        let both = EngineOptions { device: device(DeviceKind::Virtual, Some(2.0)), ..options(&path) };
        assert!(refused(&both).contains("above 0 and at most 1"));
        assert_eq!(packed(&name), [] as [PathBuf; 0], "{fixture}");

        let auto = EngineOptions { device: device(DeviceKind::Auto, None), ..options(&path) };
        let (auto, alone) = (open::open(&auto, &Quiet).unwrap(), open::open(&options(&path), &Quiet).unwrap());
        assert!(auto.device.is_none());
        assert_eq!(auto.engine.model.path(), alone.engine.model.path(), "{fixture}");
        assert_eq!(auto.engine.kernels.rounds_floats, alone.engine.kernels.rounds_floats);
        let bits = |opened| logits(opened).into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(auto), bits(alone), "{fixture}");
        // Only what has zeros to leave out is packed, and as it is without a device.
        assert_eq!(packed(&name).is_empty(), fixture != "relullama.gguf", "{fixture}");
    }
}

#[test]
fn nothing_is_packed_for_a_predictor_that_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let name = "predictor.gguf";
    let path = copy(dir.path(), "k256.q4_k_m.gguf", name);
    let by = |kind: Kind| {
        let mut options = options(&path);
        options.sparsity.predictor = kind.into();
        options
    };
    assert!(refused(&by(Kind::Exact)).contains("a profile says below which"));
    assert!(refused(&by(Kind::Mlp)).contains("there is none for this model yet"));
    assert!(refused(&by(Kind::Sign)).contains("lets negative ones through"));
    let mut odd = options(&path);
    odd.sparsity.sparsity = Some(0.5);
    assert!(refused(&odd).contains("add --predictor exact"));
    odd.sparsity.sparsity = Some(1.5);
    assert!(refused(&odd).contains("take a share"));
    let relu = copy(dir.path(), "relullama.gguf", "predictor-relu.gguf");
    let mut mlp = options(&relu);
    mlp.sparsity.predictor = Kind::Mlp.into();
    assert!(refused(&mlp).contains("there is none for this model yet"));
    assert!(packed(name).is_empty() && packed("predictor-relu.gguf").is_empty());

    // With a profile, which needs no packed model either, there is something to pack for. Without the option the model is computed whole as
    // before, since leaving out small gates was slower.
    let whole =
        || logits(open::open(&options(&path), &Quiet).unwrap()).into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let before = whole();
    write_profile(&path);
    assert_eq!(whole(), before);
    assert!(packed(name).is_empty());
    assert!(open::open(&by(Kind::Exact), &Quiet).unwrap().engine.model.has_neurons());
    assert_eq!(packed(name).len(), 1);
}

/// Counts what neurons do in the published file, and writes it beside the file.
fn write_profile(path: &Path) {
    let model = Model::in_place(Source::open(path, None).unwrap()).unwrap();
    let tokenizer = Tokenizer::new(model.tokenizer().unwrap(), path).unwrap();
    let text = Input::new("text", "the neurons of this model are counted once", &tokenizer, 40, 32).unwrap();
    let request =
        Request { texts: vec![text], window: 32, kv: KvType::F16, sparsity: 0.5, activation_thresholds: None };
    let mut engine = open::processor(model, Some(2), None).unwrap();
    let made = profile(&mut engine, &request, None, &path.with_extension("partial"), |_, _| Ok(())).unwrap();
    made.write(&path.with_extension("activation.profile")).unwrap();
}

#[test]
fn a_dense_gguf_keeps_its_types_with_a_device() {
    let dir = tempfile::tempdir().unwrap();
    for (number, fixture) in ["k256.q4_k_m.gguf", "k256.q6_k.gguf"].into_iter().enumerate() {
        let name = format!("types-{number}.gguf");
        let path = copy(dir.path(), fixture, &name);
        let alone = open::open(&options(&path), &Quiet).unwrap();
        let own: Vec<_> = alone.engine.model.layers.iter().map(|layer| layer.ffn.bytes_by_type()).collect();
        let with = EngineOptions { device: device(DeviceKind::Virtual, Some(1.0)), ..options(&path) };
        let shared = open::open(&with, &Quiet).unwrap();
        assert!(shared.device.is_some());
        for (layer, own) in shared.engine.model.layers.iter().zip(&own) {
            let mut clusters = std::collections::HashMap::new();
            layer
                .ffn
                .bytes_by_type()
                .into_iter()
                .for_each(|(quant, bytes)| *clusters.entry(quant).or_insert(0) += bytes);
            let mut whole = std::collections::HashMap::new();
            own.iter().for_each(|(quant, bytes)| *whole.entry(*quant).or_insert(0) += bytes);
            assert_eq!(clusters, whole, "{fixture}");
        }
        let (ours, theirs) = (logits(shared), logits(alone));
        let top = theirs.iter().fold(0f32, |most, x| most.max(x.abs()));
        let off = ours.iter().zip(&theirs).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / top;
        assert!(off < 0.04, "{fixture} is off by {off}");
        // A profile of its neurons says nothing of clusters, and is in no one's way.
        write_profile(&path);
        assert!(open::open(&with, &Quiet).is_ok());
        assert_eq!(packed(&name).len(), 1);
    }
}
