//! dReLU, relu(gate) * relu(up), whatever the architecture is called: from what a file says, from the command line, and
//! never silently as something else.

use crate::gguf_file::{File, fixture, text};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::{Engine, Logits};
use dynamicinfer::formats::gguf::Value;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{Ffn, KvCache, KvType, Model};
use dynamicinfer::pack::{PackOptions, pack};
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Of a few tokens, `[n, vocab]`.
fn logits(store: &Path) -> Vec<f32> {
    let model = Model::open(store).unwrap();
    assert_eq!(model.config.ffn_kind, Ffn::GatedBoth, "{}", model.config.family);
    let mut kv = KvCache::new(&model.config, 16, KvType::F32).unwrap();
    let tokens: Vec<u32> = (0..16).map(|i| 3 + i * 17).collect();
    Engine::new(model, 1, Kernels::best()).forward(&mut kv, &tokens, Logits::All).to_vec()
}

fn packed(from: &Path, dir: &Path) -> PathBuf {
    let store = dir.join("packed.neurons");
    let source = Source::open(from, None).unwrap_or_else(|why| panic!("{why}"));
    pack(&source, &store, &PackOptions { types: Quant::F32.into(), orders: None }, &|_, _| Ok(())).unwrap();
    store
}

fn bamboo(name: &str) -> Vec<f32> {
    let dir = tempfile::tempdir().unwrap();
    logits(&packed(&fixture(name), dir.path()))
}

/// The bamboo fixture as a directory `name` whose config.json has `changes`; null takes a key out.
fn directory(dir: &Path, name: &str, changes: &Json) -> PathBuf {
    let model = dir.join(name);
    std::fs::create_dir(&model).unwrap();
    for file in ["model.safetensors", "tokenizer.json", "tokenizer.model"] {
        std::fs::copy(fixture("bamboo").join(file), model.join(file)).unwrap();
    }
    let mut config: Json =
        serde_json::from_slice(&std::fs::read(fixture("bamboo").join("config.json")).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    std::fs::write(model.join("config.json"), config.to_string()).unwrap();
    model
}

/// What a conversion to another architecture leaves of the directory: nothing says Bamboo any more.
fn renamed(family: &str, hidden_act: &str) -> Json {
    json!({"model_type": family, "hidden_act": hidden_act, "architectures": null, "auto_map": null})
}

/// bamboo.gguf as a file of the llama architecture, called `name` within and without.
fn llama_gguf(dir: &Path, name: &str, hidden_act: Option<&str>) -> PathBuf {
    let mut file = File::read("bamboo.gguf");
    for (key, _) in &mut file.keys {
        *key = key.replace("bamboo.", "llama.");
    }
    file.set("general.architecture", text("llama"));
    file.set("general.name", text(name));
    if let Some(hidden_act) = hidden_act {
        file.set("llama.hidden_act", Value::Str(hidden_act.into()));
    }
    let path = dir.join(format!("{name}.gguf"));
    std::fs::write(&path, file.bytes()).unwrap();
    path
}

fn program(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
    command.args(args).current_dir(dir).env("XDG_CACHE_HOME", dir.join("cache")).env("XDG_DATA_HOME", dir.join("data"));
    command.output().unwrap()
}

/// Packs by the command line with `--activation`; the store.
fn packed_as(model: &Path, activation: &str, dir: &Path) -> PathBuf {
    let store = dir.join(format!("{activation}.neurons"));
    let args = ["pack", model.to_str().unwrap(), "--quant", "f32", "--activation", activation, "-f", "-o"];
    let done = program(dir, &[&args[..], &[store.to_str().unwrap()]].concat());
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    store
}

fn refusal(from: &Path) -> String {
    match Source::open(from, None) {
        Ok(source) => panic!("accepted as {} {:?}", source.config.activation, source.config.ffn_kind),
        Err(why) => why.to_string(),
    }
}

/// TurboSparse-Mistral under `model_type: mistral` was computed as ReGLU, relu(gate) * up, without a word: only the family
/// `bamboo` chose dReLU.
#[test]
fn a_directory_that_says_drelu_computes_what_bamboo_does() {
    let (dir, expected) = (tempfile::tempdir().unwrap(), bamboo("bamboo"));
    let cases = [
        renamed("mistral", "drelu"),
        renamed("llama", "dReLU"),
        // Bamboo's own file calls its function relu; what says dReLU is the class it is for.
        json!({"model_type": "mistral", "auto_map": null}),
        json!({"model_type": "llama", "architectures": null}),
    ];
    for (i, changes) in cases.iter().enumerate() {
        let model = directory(dir.path(), &format!("m{i}"), changes);
        assert!(logits(&packed(&model, dir.path())) == expected, "{changes}");
    }
}

#[test]
fn a_gguf_whose_metadata_say_drelu_computes_what_bamboo_does() {
    let (dir, expected) = (tempfile::tempdir().unwrap(), bamboo("bamboo.gguf"));
    for name in ["model", "TurboSparse-Mistral-Instruct"] {
        let model = llama_gguf(dir.path(), name, Some("dReLU"));
        assert!(logits(&packed(&model, dir.path())) == expected, "{name}");
    }
}

#[test]
fn activation_drelu_on_the_command_line_computes_what_bamboo_does() {
    let dir = tempfile::tempdir().unwrap();
    let expected = bamboo("bamboo");
    for (i, family) in ["mistral", "llama"].into_iter().enumerate() {
        let model = directory(dir.path(), &format!("m{i}"), &renamed(family, "relu"));
        assert!(logits(&packed_as(&model, "drelu", dir.path())) == expected, "{family}");
    }
    let named = llama_gguf(dir.path(), "TurboSparse-Mistral", None);
    assert!(logits(&packed_as(&named, "dReLU", dir.path())) == bamboo("bamboo.gguf"));
    // Whoever names relu gets it, as the last word.
    let model = Model::open(&packed_as(&named, "relu", dir.path())).unwrap();
    assert_eq!(model.config.ffn_kind, Ffn::Gated);
}

/// The advice for a GGUF called TurboSparse was `--activation relu`, which computes another model; one called Bamboo ran with
/// SiLU, and a directory called TurboSparse with ReGLU.
#[test]
fn a_name_that_says_drelu_in_a_file_that_does_not_wants_it_named() {
    let dir = tempfile::tempdir().unwrap();
    let whole = "the name says TurboSparse or Bamboo, which are dReLU models, and nothing in the file says that up passes \
                 through the ReLU as well as the gate; name it: --activation drelu; relu is ReGLU, relu(gate) * up, as in \
                 ReluLLaMA and ProSparse; drelu is dReLU, relu(gate) * relu(up), as in TurboSparse and Bamboo";
    let ggufs = [
        llama_gguf(dir.path(), "TurboSparse-Mistral-Instruct", None),
        llama_gguf(dir.path(), "turbo_sparse-7b", None),
        llama_gguf(dir.path(), "Bamboo-base-v0.1.Q4_0", None),
        llama_gguf(dir.path(), "TurboSparse", Some("relu")),
    ];
    for gguf in ggufs {
        assert_eq!(refusal(&gguf), format!("{}: llama.hidden_act: {whole}", gguf.display()));
    }
    let by_directory = directory(dir.path(), "TurboSparse-Mistral-Instruct", &renamed("mistral", "relu"));
    let mut changes = renamed("llama", "relu");
    changes["_name_or_path"] = "PowerInfer/TurboSparse-Mistral-Instruct".into();
    for model in [by_directory, directory(dir.path(), "m", &changes)] {
        assert_eq!(refusal(&model), format!("{}: hidden_act: {whole}", model.join("config.json").display()));
    }
}

#[test]
fn an_ffn_without_a_gate_has_no_drelu() {
    let dir = tempfile::tempdir().unwrap();
    for model in ["opt", "opt.gguf"] {
        let done = program(dir.path(), &["pack", fixture(model).to_str().unwrap(), "--activation", "drelu"]);
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(5), "{said}");
        assert!(said.contains("drelu is relu(gate) * relu(up), and OPT has no gate"), "{said}");
    }
}
