//! Weights that are NaN or infinite. A daemon answered from them: embeddings of nulls, texts of "!!!!". Norms, biases and routers are looked at
//! when a model is opened, experts that stay on disk when they are first read, and a pass whose result is not finite is an error, not an answer.

use crate::damaged::store_with;
use crate::gguf_file::File;
use crate::support::packed;
use dynamicinfer::engine::{Engine, Failure, Logits, Session};
use dynamicinfer::error::{Error, Result};
use dynamicinfer::formats::neuron_store::NeuronStore;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::open::{DeviceKind, DeviceOptions, EngineOptions, Opened, Quiet, RamOptions, open};
use std::path::Path;
use std::process::Command;

const BAD: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

/// As the verbs open it, with a share of the experts in memory or all of it mapped.
fn opened(path: &Path, share: Option<f64>) -> Result<Engine> {
    let neurons = RamOptions { share, ..RamOptions::default() };
    let options = EngineOptions { context: Some(64), neurons, threads: Some(2), ..EngineOptions::new(path) };
    open(&options, &Quiet).map(|Opened { engine, .. }| engine)
}

/// Runs a prompt and some tokens: the first error. Each pass is finite or an error, and then has no number.
fn first_error(engine: &mut Engine) -> Option<String> {
    let mut kv = KvCache::new(&engine.model.config, 64, KvType::F32).unwrap();
    for n in [40u32, 1, 3, 1] {
        let ids: Vec<u32> = (0..n).map(|i| 5 + i * 37 % 90).collect();
        let logits = engine.forward(&mut kv, &ids, Logits::All).to_vec();
        match engine.check() {
            Ok(()) => assert!(logits.iter().all(|x| x.is_finite()) && engine.failure().is_none()),
            Err(error) => {
                assert!(logits.iter().all(|x| x.is_nan()), "a number of a pass that failed");
                assert!(matches!(error, Error::BadFile(_)) && error.exit_code() == 5, "{error:?}");
                assert!(matches!(engine.failure(), Some(Failure::Pass(why)) if why == error.without_folder()));
                assert!(engine.answer().is_err());
                return Some(error.to_string());
            }
        }
    }
    None
}

#[test]
fn small_parts_of_a_packed_model_are_looked_at_when_it_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path(), "opt", Quant::F32);
    assert_eq!(first_error(&mut opened(&store, None).unwrap()), None);
    let sections = [
        "out_norm",
        "out_norm_bias",
        "layer.0.attn_norm",
        "layer.1.ffn_norm_bias",
        "layer.0.qkv_bias",
        "layer.1.up_bias",
    ];
    for section in sections {
        for number in BAD {
            let path = store_with(dir.path(), &store, section, &[(3, number)]);
            let Err(error) = Model::open(&path) else { panic!("{section} of {number} was opened") };
            let message = error.to_string();
            assert!(message.contains(&format!("{section}: holds {number} ")), "{message}");
        }
        // A bit that has changed since it was packed.
        let mut bytes = std::fs::read(&store).unwrap();
        let at = NeuronStore::open(&store).unwrap().section(section).unwrap().offset as usize;
        bytes[at] ^= 1;
        let path = dir.path().join("bit.neurons");
        std::fs::write(&path, bytes).unwrap();
        let Err(error) = Model::open(&path) else { panic!("{section} was opened") };
        assert!(error.to_string().contains(&format!("{section}: checksum ")), "{error}");
    }
}

#[test]
fn a_pass_that_is_not_finite_is_an_error_and_no_answer() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path(), "llama", Quant::F32);
    // Every weight of the section, so that those that the passes read are among them.
    let count = |section: &str| NeuronStore::open(&store).unwrap().section(section).unwrap().bytes as usize / 4;
    for section in ["embed", "head", "layer.0.qkv", "layer.1.o", "layer.0.ffn", "layer.1.ffn"] {
        for number in BAD {
            let places: Vec<(usize, f32)> = (0..count(section)).map(|at| (at, number)).collect();
            let path = store_with(dir.path(), &store, section, &places);
            let mut engine = opened(&path, None).unwrap();
            let error = first_error(&mut engine).unwrap_or_else(|| panic!("{section} of {number} was answered from"));
            assert!(error.contains("numbers that are not finite") && error.contains("changed.neurons"), "{error}");
            if section != "head" {
                let mut kv = KvCache::new(&engine.model.config, 64, KvType::F32).unwrap();
                engine.hidden_states(&mut kv, &[5, 6, 7]);
                assert!(engine.check().is_err() && engine.failure().is_some(), "{section}: an embedding of {number}");
            }
            let mut session = Session::new(&engine, 64, KvType::F16).unwrap();
            assert!(session.append(&mut engine, &[5, 6, 7], |_| Ok(())).is_err());
        }
    }
    // One row: the others are answered from, before and after.
    let hidden = Model::open(&store).unwrap().config.hidden;
    let path = store_with(dir.path(), &store, "embed", &[(9 * hidden + 1, f32::NAN)]);
    let mut engine = opened(&path, None).unwrap();
    let mut answers = |token: u32| {
        let mut session = Session::new(&engine, 64, KvType::F16).unwrap();
        session.append(&mut engine, &[token], |_| Ok(())).map(|logits| logits.to_vec())
    };
    assert!(answers(8).is_ok() && answers(9).is_err() && answers(8).is_ok());
    // Numbers that are finite, and too large to compute with.
    let places: Vec<(usize, f32)> = (0..hidden).map(|at| (at, f32::MAX)).collect();
    let path = store_with(dir.path(), &store, "out_norm", &places);
    assert!(first_error(&mut opened(&path, None).unwrap()).is_some());
}

#[test]
fn a_mixture_that_is_read_in_place_is_refused_and_its_experts_where_they_are_first_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    for (name, tensor, experts) in [
        ("mixtral.gguf", "blk.0.attn_norm.weight", false),
        ("mixtral.gguf", "blk.1.attn_q.weight", false),
        ("mixtral.gguf", "blk.1.ffn_gate_inp.weight", false),
        ("mixtral.gguf", "output.weight", false),
        ("mixtral.gguf", "blk.0.ffn_up_exps.weight", true),
        ("mixtral.gguf", "blk.1.ffn_down_exps.weight", true),
        ("gpt-oss.mxfp4.gguf", "blk.1.ffn_gate_exps.weight", true),
        ("gpt-oss.mxfp4.gguf", "blk.0.ffn_up_exps.bias", false),
    ] {
        let mut file = File::read(name);
        let tensor_of = file.tensor(tensor);
        let kind = tensor_of.kind;
        // A number, of blocks a scale: NaN in f32, f16 and the byte of mxfp4.
        let (bytes, nan): (usize, &[u8]) = match kind {
            0 => (4, &[0, 0, 0xc0, 0x7f]),
            1 => (2, &[0, 0x7e]),
            39 => (17, &[0xff]),
            other => panic!("{tensor} has type {other}"),
        };
        // In every expert, so that one is among those that the passes need.
        for data in tensor_of.data.chunks_mut(bytes * 64) {
            data[..nan.len()].copy_from_slice(nan);
        }
        std::fs::write(&path, file.bytes()).unwrap();
        for share in [None, Some(0.3), Some(0.0)] {
            let case = format!("{name} {tensor}, {share:?}");
            let error = match opened(&path, share) {
                Err(error) => error.to_string(),
                Ok(mut engine) => {
                    assert!(experts && share.is_some(), "{case}: was opened");
                    first_error(&mut engine).unwrap_or_else(|| panic!("{case}: was answered from"))
                }
            };
            let says = if experts && share.is_some() { ", expert " } else { tensor };
            assert!(error.contains(says) && error.contains("the model is damaged"), "{case}: {error}");
        }
    }
}

/// Neurons that lie on a device, and those that are read from disk, are no less looked at than those in the map.
#[test]
fn a_pass_that_is_not_finite_is_an_error_on_a_device_and_from_disk() {
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/machines/demo-pc.toml");
    let dir = tempfile::tempdir().unwrap();
    for name in ["relullama", "llama"] {
        let store = packed(dir.path(), name, Quant::F32);
        let count = NeuronStore::open(&store).unwrap().section("layer.1.ffn").unwrap().bytes as usize / 4;
        // The ups: a neuron of a ReLU model whose gate is NaN is off, as one whose gate is negative.
        let hidden = Model::open(&store).unwrap().config.hidden;
        let places = (0..count).filter(|at| at / hidden % 3 == 1).map(|at| (at, f32::NAN));
        let places: Vec<(usize, f32)> = places.collect();
        let damaged = store_with(dir.path(), &store, "layer.1.ffn", &places);
        for (memory, device, ram) in
            [("device", Some(0.5), None), ("device", Some(1.0), None), ("disk", None, Some(0.3))]
        {
            let device = device.map(|share| DeviceOptions {
                ffn_share: Some(share),
                machine: Some(machine.clone()),
                history: false,
                ..DeviceOptions::new(DeviceKind::Virtual)
            });
            let neurons = RamOptions { share: ram, ..RamOptions::default() };
            let of = |path: &Path| {
                let options = EngineOptions::new(path);
                let options =
                    EngineOptions { context: Some(64), neurons, device: device.clone(), threads: Some(2), ..options };
                open(&options, &Quiet).map(|Opened { engine, .. }| engine)
            };
            assert_eq!(first_error(&mut of(&store).unwrap()), None, "{name}, {memory}");
            let error = first_error(&mut of(&damaged).unwrap()).unwrap_or_else(|| panic!("{name}, {memory}: answered"));
            assert!(error.contains("changed.neurons"), "{name}, {memory}: {error}");
        }
    }
}

/// What ends a verb, and its exit status.
fn ended(dir: &Path, args: &[&str]) -> (String, String, Option<i32>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
    command.args(args).current_dir(dir).env_clear().env("HOME", dir).env("XDG_RUNTIME_DIR", dir);
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr), output.status.code())
}

#[test]
fn run_and_eval_say_so_and_write_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path(), "llama", Quant::F32);
    let count = NeuronStore::open(&store).unwrap().section("head").unwrap().bytes as usize / 4;
    let places: Vec<(usize, f32)> = (0..count).map(|at| (at, f32::NAN)).collect();
    let path = store_with(dir.path(), &store, "head", &places);
    let path = path.to_str().unwrap();
    std::fs::write(dir.path().join("text"), "Once upon a time there was a model.").unwrap();
    for args in [&["run", path, "Once upon", "-n", "5"][..], &["eval", path, "--text", "text"]] {
        let (out, err, code) = ended(dir.path(), args);
        assert!(code == Some(5) && err.contains("not finite"), "{args:?}: {code:?} {out} {err}");
        assert!(!out.contains("perplexity"), "{out}");
    }
}
