//! A GGUF in several files, as most models that are larger than a graphics card's memory are published. It is the same model as the whole
//! file, bit for bit, wherever its weights lie; what is missing or wrong is refused by the part's name.

use crate::gguf_file::{File, fixture, text};
use dynamicinfer::engine::Logits;
use dynamicinfer::error::Error;
use dynamicinfer::formats::gguf::Value;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::lab::synth::{Shape, write_gguf};
use dynamicinfer::model::config::Activation;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType};
use dynamicinfer::open::model::{find, real};
use dynamicinfer::open::{DeviceKind, DeviceOptions, EngineOptions, Opened, Quiet, RamOptions, open};
use dynamicinfer::pack::{PackOptions, Types, pack};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Dense and mixtures, floats and blocks, an expert's tensors apart and together, an architecture with biases of experts.
const MODELS: [&str; 5] = ["llama.gguf", "llama.q4_0.gguf", "mixtral.gguf", "mixtral.split.gguf", "gpt-oss.mxfp4.gguf"];

/// Tensors of all parts but the last: in two parts; in three; in three of which the first has none.
fn cuts(file: &File) -> [Vec<usize>; 3] {
    let all = file.tensors.len();
    [vec![all / 2], vec![1, all / 3], vec![0, all - 3]]
}

fn split(name: &str, cut: &[usize], dir: &Path) -> Vec<PathBuf> {
    File::write_parts(&File::read(name).parts(cut), dir, "m")
}

/// Logits of a prompt and some tokens.
fn logits(options: &EngineOptions) -> Vec<f32> {
    let Opened { mut engine, device, .. } = open(options, &Quiet).unwrap();
    assert_eq!(device.is_some(), options.device.is_some());
    assert_eq!(engine.cached.is_some(), options.neurons.share.is_some());
    let mut kv = KvCache::new(&engine.model.config, 64, KvType::F32).unwrap();
    let mut out = Vec::new();
    for n in [40, 1, 1, 3, 1] {
        let tokens: Vec<u32> = (0..n).map(|i| 5 + (kv.len as u32 + i) * 37 % 90).collect();
        out.extend_from_slice(engine.forward(&mut kv, &tokens, Logits::All));
        engine.check().unwrap();
    }
    out
}

fn options(path: &Path) -> EngineOptions {
    EngineOptions { threads: Some(2), context: Some(64), kv: KvType::F32, ..EngineOptions::new(path) }
}

/// On the virtual device, and with a part of the experts left on disk.
fn elsewhere(path: &Path) -> [EngineOptions; 2] {
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/machines/demo-pc.toml");
    let device = DeviceOptions {
        ffn_share: Some(0.5),
        machine: Some(machine),
        history: false,
        deterministic: true,
        ..DeviceOptions::new(DeviceKind::Virtual)
    };
    let ram = RamOptions { share: Some(0.3), ..RamOptions::default() };
    [EngineOptions { device: Some(device), ..options(path) }, EngineOptions { neurons: ram, ..options(path) }]
}

#[test]
fn a_model_in_parts_is_the_model_of_the_whole_file() {
    for name in MODELS {
        let whole = Source::open(&fixture(name), None).unwrap();
        let expected = logits(&options(&fixture(name)));
        for cut in cuts(&File::read(name)) {
            let dir = tempfile::tempdir().unwrap();
            let paths = split(name, &cut, dir.path());
            let source = Source::open(&paths[0], None).unwrap();
            assert_eq!((&source.config, &source.tokenizer), (&whole.config, &whole.tokenizer), "{name} {cut:?}");
            assert_eq!(source.fingerprint(), whole.fingerprint(), "{name} {cut:?}");
            assert_eq!((source.mapped().len(), source.files().len()), (paths.len(), paths.len()));
            assert!(logits(&options(&paths[0])) == expected, "{name} {cut:?}");
        }
    }
}

#[test]
fn its_experts_are_the_same_on_a_device_and_on_disk() {
    for name in ["mixtral.gguf", "mixtral.split.gguf"] {
        let expected = elsewhere(&fixture(name)).map(|options| logits(&options));
        for cut in cuts(&File::read(name)) {
            let dir = tempfile::tempdir().unwrap();
            let path = split(name, &cut, dir.path()).swap_remove(0);
            for (options, expected) in elsewhere(&path).iter().zip(&expected) {
                assert!(logits(options) == *expected, "{name} {cut:?}, on a device: {}", options.device.is_some());
            }
        }
    }
}

/// The store that a model is packed into.
fn packed(path: &Path, to: PathBuf, types: impl Fn(&Source) -> Types) -> PathBuf {
    let source = Source::open(path, None).unwrap();
    pack(&source, &to, &PackOptions { types: types(&source), orders: None }, &|_, _| Ok(())).unwrap();
    to
}

/// Three layers of eight clusters.
fn made_up_dense(quant: Quant, path: &Path) {
    let shape = Shape {
        hidden: 256,
        layers: 3,
        ffn: 2048,
        heads: 4,
        kv_heads: 2,
        vocab: 300,
        context: 256,
        activation: Activation::Silu,
        active: None,
        seed: 52,
        experts: None,
        outliers: 0,
    };
    write_gguf(&shape, quant, path, &|_, _| Ok(())).unwrap();
}

/// A dense model is packed in clusters, in the file's own types, when a device computes a part of it or not all of it fits into memory.
#[test]
fn a_dense_model_is_the_same_on_a_device_and_in_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole.gguf");
    for quant in [Quant::F16, Quant::Q8] {
        made_up_dense(quant, &whole);
        let store = |path: &Path, name: &str| packed(path, dir.path().join(name), |_| Types::Clusters);
        let all = store(&whole, "whole.neurons");
        let expected = elsewhere(&all).map(|options| logits(&options));
        assert!(expected[1] == logits(&options(&all)), "{quant:?}");
        for cut in cuts(&File::read(whole.to_str().unwrap())) {
            let path = split(whole.to_str().unwrap(), &cut, dir.path()).swap_remove(0);
            let store = store(&path, "parts.neurons");
            for (options, expected) in elsewhere(&store).iter().zip(&expected) {
                assert!(logits(options) == *expected, "{quant:?} {cut:?}, on a device: {}", options.device.is_some());
            }
        }
    }
}

/// The program packs it on the way.
#[test]
fn a_dense_model_runs_on_a_device_by_its_first_part() {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole.gguf");
    made_up_dense(Quant::Q8, &whole);
    let run = |model: &Path| {
        let home = tempfile::tempdir().unwrap();
        let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/machines/demo-pc.toml");
        let mut run = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
        run.env_clear().env("HOME", home.path()).arg("run").arg(model).args(["Once", "--json", "--temp", "0"]);
        run.args(["-n", "8", "-c", "64", "--device", "virtual", "--vram", "10MiB", "--deterministic", "--machine"]);
        let done = run.arg(machine).output().unwrap();
        let said: serde_json::Value = serde_json::from_slice(&done.stdout)
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&done.stderr)));
        ["text", "generated_tokens", "gpu_share"].map(|key| said[key].clone())
    };
    let path = split(whole.to_str().unwrap(), &[1, 9], dir.path()).swap_remove(0);
    let expected = run(&whole);
    assert!(expected[1] == 8 && expected[2].as_f64().unwrap() > 0.0, "{expected:?}");
    assert_eq!(run(&path), expected);
}

#[test]
fn it_packs_to_the_same_store_and_changes_with_any_of_its_parts() {
    let dir = tempfile::tempdir().unwrap();
    let paths = split("llama.gguf", &[3, 5], dir.path());
    let natural = |source: &Source| Types::natural(source).unwrap();
    let [whole, parts] = [(&fixture("llama.gguf"), "whole.neurons"), (&paths[0], "parts.neurons")]
        .map(|(path, name)| logits(&options(&packed(path, dir.path().join(name), natural))));
    assert!(whole == parts);
    let before = Source::open(&paths[0], None).unwrap();
    let before = (before.fingerprint(), before.files().to_vec());
    let mut last = File::read("llama.gguf").parts(&[3, 5]).pop().unwrap();
    last.tensors[0].data[0] ^= 1;
    std::fs::write(&paths[2], last.bytes()).unwrap();
    let after = Source::open(&paths[0], None).unwrap();
    assert!(after.fingerprint() != before.0 && after.files() != before.1);
}

#[test]
fn every_part_its_directory_and_links_to_them_name_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let blobs = dir.path().join("blobs");
    let snapshot = dir.path().join("models--a--b/snapshots/0123");
    [&blobs, &snapshot].iter().for_each(|dir| std::fs::create_dir_all(dir).unwrap());
    let paths = split("mixtral.gguf", &[0, 4], &blobs);
    // As the hub's tools lay out their cache: names lead to files that are called by their checksums.
    let linked: Vec<PathBuf> = paths.iter().map(|path| snapshot.join(path.file_name().unwrap())).collect();
    for (number, (path, link)) in paths.iter().zip(&linked).enumerate() {
        let blob = blobs.join(format!("{number:064x}"));
        std::fs::rename(path, &blob).unwrap();
        symlink(&blob, link).unwrap();
    }
    let expected = Source::open(&fixture("mixtral.gguf"), None).unwrap().fingerprint();
    for named in linked.iter().chain([&snapshot]) {
        assert_eq!(find(named).unwrap(), linked[0]);
        let source = Source::open(named, None).unwrap();
        assert_eq!((source.fingerprint(), &source.path), (expected.clone(), &linked[0]));
        // A daemon gets a path that is as good.
        assert_eq!(Source::open(&real(named).unwrap(), None).unwrap().fingerprint(), expected);
    }
    // What accompanies a model is none.
    std::fs::write(snapshot.join("mmproj-m.gguf"), "no model").unwrap();
    assert_eq!(find(&snapshot).unwrap(), linked[0]);
    std::fs::copy(fixture("llama.gguf"), snapshot.join("another.gguf")).unwrap();
    let refused = find(&snapshot).unwrap_err().to_string();
    assert!(
        refused.contains("holds 2 models and no config.json; name one of them: another.gguf, m-00001-of-00003.gguf"),
        "{refused}"
    );
}

/// The refusal of the model at `path`; it names this file.
fn refused(path: &Path, named: &Path) -> String {
    let Err(error) = Source::open(path, None) else { panic!("{} was opened", path.display()) };
    assert!(matches!(error, Error::BadFile(_)), "{error:?}");
    let message = error.to_string();
    assert!(message.starts_with(&format!("{}: ", named.display())), "{message}");
    message[named.display().to_string().len() + 2..].to_owned()
}

#[test]
fn parts_that_are_missing_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let paths = split("llama.gguf", &[0, 4], dir.path());
    std::fs::remove_file(&paths[1]).unwrap();
    let why = refused(&paths[0], &paths[0]);
    assert!(
        why.contains("in 3 parts") && why.contains("the part m-00002-of-00003.gguf cannot be found: download it"),
        "{why}"
    );
    std::fs::remove_file(&paths[0]).unwrap();
    for named in [&paths[2], &dir.path().to_owned()] {
        let why = refused(named, &paths[2]);
        assert!(
            why.contains("parts m-00001-of-00003.gguf, m-00002-of-00003.gguf cannot be found: download them"),
            "{why}"
        );
    }
    // A link that leads nowhere, as an interrupted download may leave it.
    let paths = split("llama.gguf", &[4], dir.path());
    std::fs::remove_file(&paths[1]).unwrap();
    symlink("nowhere", &paths[1]).unwrap();
    assert!(refused(&paths[0], &paths[0]).contains("the part m-00002-of-00002.gguf cannot be found"));
}

#[test]
fn parts_that_are_others_than_their_names_say_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let parts = || File::read("llama.gguf").parts(&[2, 4]);
    let write = |parts: &[File]| File::write_parts(parts, dir.path(), "m");
    // One part twice.
    let paths = write(&parts());
    std::fs::copy(&paths[2], &paths[1]).unwrap();
    let why = refused(&paths[0], &paths[1]);
    assert!(why.starts_with("split.no: this is part 3, and its name says part 2: download it again"), "{why}");
    // Its tensors twice.
    let mut twice = parts();
    let mut again = parts().pop().unwrap().tensors;
    std::mem::swap(&mut twice[1].tensors, &mut again);
    let paths = write(&twice);
    let why = refused(&paths[0], &paths[2]);
    assert!(why.contains("the tensor is there twice, first in") && why.contains("m-00002-of-00003.gguf"), "{why}");
    // A part of another model: in as many parts, of another number of parts, of another architecture.
    let mut foreign = parts();
    foreign[1] = File::read("mixtral.gguf").parts(&[2, 4]).remove(1);
    let paths = write(&foreign);
    let why = refused(&paths[0], &paths[1]);
    assert!(
        why.starts_with("split.count: this is of 3 parts of ") && why.contains("they belong to different models"),
        "{why}"
    );
    let mut other = parts();
    other[1].set("split.count", Value::U16(4));
    let paths = write(&other);
    assert!(refused(&paths[0], &paths[1]).starts_with("split.count: this is of 4 parts"));
    let mut other = parts();
    other[2].set("general.architecture", text("qwen2"));
    let paths = write(&other);
    assert!(refused(&paths[0], &paths[2]).starts_with("general.architecture: is qwen2, the first part's is llama"));
    // A whole model, a part that was cut, one with a tensor less.
    let paths = write(&parts());
    std::fs::copy(fixture("llama.gguf"), &paths[1]).unwrap();
    assert!(refused(&paths[0], &paths[1]).contains("this is a whole model, and not part 2 of 3"));
    let paths = write(&parts());
    let bytes = std::fs::read(&paths[2]).unwrap();
    std::fs::write(&paths[2], &bytes[..bytes.len() / 2]).unwrap();
    assert!(refused(&paths[0], &paths[2]).contains("it is cut short"));
    let mut fewer = parts();
    let number = fewer.iter().map(|part| part.tensors.len()).sum::<usize>();
    fewer[1].tensors.pop();
    let paths = write(&fewer);
    let why = refused(&paths[0], &paths[0]);
    assert!(
        why.starts_with(&format!("split.tensors.count: is {number}, and the 3 parts have {} tensors", number - 1)),
        "{why}"
    );
}

#[test]
fn a_part_whose_name_does_not_tell_the_others_says_what_to_call_it() {
    let dir = tempfile::tempdir().unwrap();
    let paths = split("llama.gguf", &[4], dir.path());
    let renamed = dir.path().join("model.gguf");
    std::fs::rename(&paths[0], &renamed).unwrap();
    let why = refused(&renamed, &renamed);
    assert!(why.contains("this is part 1 of 2") && why.contains("call it NAME-00001-of-00002.gguf"), "{why}");
    let renamed = dir.path().join("m-00001-of-00004.gguf");
    std::fs::copy(&paths[1], &renamed).unwrap();
    let why = refused(&renamed, &renamed);
    assert!(
        why.contains("says part 2 of 2, and the name part 1 of 4: the file was renamed, or is another one"),
        "{why}"
    );
    // A whole model may be called so.
    let whole = dir.path().join("w-00002-of-00003.gguf");
    std::fs::copy(fixture("llama.gguf"), &whole).unwrap();
    std::fs::copy(&paths[1], dir.path().join("w-00001-of-00003.gguf")).unwrap();
    assert_eq!(Source::open(&whole, None).unwrap().path, whole);
}
