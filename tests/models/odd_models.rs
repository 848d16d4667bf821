//! Files that are not quite as they should be and that other programs take: so does this one, and says what it leaves out or does instead.

use crate::gguf_file::{File, fixture, text};
use dynamicinfer::formats::gguf::Value;
use dynamicinfer::formats::safetensors;
use dynamicinfer::model::source::{Role, Source};
use serde_json::Value as Json;
use std::path::Path;
use std::process::{Command, Stdio};

/// What `run` says on stderr while it answers with this model; it must answer.
fn said_by_run(model: &Path) -> String {
    let home = tempfile::tempdir().unwrap();
    let mut run = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
    run.args(["run", model.to_str().unwrap(), "the king", "-n", "2"]).env_clear().stdin(Stdio::null());
    run.env("HOME", home.path()).env("XDG_CACHE_HOME", home.path().join("cache"));
    let done = run.output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.success() && !done.stdout.is_empty(), "{}: {said}", done.status);
    said
}

/// Both were refused, though neither can change an answer: no token beyond the vocabulary is ever produced.
#[test]
fn special_tokens_beyond_the_vocabulary_are_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let mut file = File::read("llama.gguf");
    file.vocabulary(320);
    file.set("tokenizer.ggml.bos_token_id", Value::U32(u32::MAX));
    file.set("tokenizer.ggml.eos_token_id", Value::U32(320));
    file.set("tokenizer.ggml.eot_token_id", Value::U32(1000));
    std::fs::write(&path, file.bytes()).unwrap();
    let said = said_by_run(&path);
    for part in [
        "bos_token_id: token 4294967295 is not in the vocabulary of 320 tokens; token 1 is taken instead",
        "eos_token_id: token 320 is not in the vocabulary of 320 tokens; token 2 is taken instead",
        "eot_token_id: token 1000 is not in the vocabulary of 320 tokens; it is left out",
    ] {
        assert!(said.contains("WARN") && said.contains(part), "no {part:?} in: {said}");
    }
    let spec = Source::open(&path, None).unwrap().tokenizer.unwrap();
    assert_eq!((spec.bos, spec.eos, spec.add_bos), (Some(1), vec![2], true));
    // The same in a directory.
    copy_of("qwen2", dir.path(), |name| name.to_owned());
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [999999]}"#).unwrap();
    let said = said_by_run(dir.path());
    assert!(said.contains("eos_token: token 999999 is not in the vocabulary of"), "{said}");
}

#[test]
fn a_file_that_says_it_has_no_vocabulary_is_a_model_of_token_ids() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    for none in ["no_vocab", "none"] {
        let mut file = File::read("llama.gguf");
        file.set("tokenizer.ggml.model", text(none));
        file.set("llama.vocab_size", Value::U32(320));
        std::fs::write(&path, file.bytes()).unwrap();
        assert!(Source::open(&path, None).unwrap().tokenizer.is_none(), "{none}");
    }
}

/// transformers takes every tensor of a shard, and downloads are often made with an index of another revision.
#[test]
fn a_tensor_that_the_index_does_not_list_is_a_warning() {
    const INDEX: &str = "model.safetensors.index.json";
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture("mistral")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let whole = Source::open(dir.path(), None).unwrap().fingerprint();
    let path = dir.path().join(INDEX);
    let mut index: Json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    index["weight_map"].as_object_mut().unwrap().remove("model.layers.0.mlp.up_proj.weight").unwrap();
    std::fs::write(&path, index.to_string()).unwrap();
    assert_eq!(Source::open(dir.path(), None).unwrap().fingerprint(), whole);
    let said = said_by_run(dir.path());
    let wanted = "model-00001-of-00002.safetensors: model.layers.0.mlp.up_proj.weight: model.safetensors.index.json does not list \
                  this tensor; it is taken from here";
    assert!(said.contains("WARN") && said.contains(wanted), "{said}");
}

/// Copies a fixture's directory with other names for its tensors.
fn copy_of(fixture_name: &str, to: &Path, name_of: impl Fn(&str) -> String) {
    for entry in std::fs::read_dir(fixture(fixture_name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let path = to.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: serde_json::Map<String, Json> = serde_json::from_slice(header).unwrap();
    let renamed = |(name, value): (String, Json)| match name.as_str() {
        "__metadata__" => (name, value),
        _ => (name_of(&name), value),
    };
    let header = serde_json::to_vec(&Json::Object(header.into_iter().map(renamed).collect())).unwrap();
    let out = [&(header.len() as u64).to_le_bytes()[..], &header, data].concat();
    std::fs::write(&path, out).unwrap();
    assert!(safetensors::open_dir(to).is_ok());
}

/// A model that was saved without its head has no prefix, and one that was part of a larger model has that one's.
#[test]
fn names_of_tensors_with_the_prefixes_that_transformers_takes_are_the_same_model() {
    let roles = [Role::Embed, Role::OutNorm, Role::AttnNorm, Role::Q, Role::V, Role::O];
    for (model, usual) in [("qwen2", "model."), ("opt", "model."), ("falcon", "transformer."), ("mixtral", "model.")] {
        let first = Source::open(&fixture(model), None).unwrap();
        let prefixes = ["", "language_model.", "language_model.model.", "model.language_model."];
        for prefix in prefixes.into_iter().chain((usual == "transformer.").then_some("language_model.transformer.")) {
            let dir = tempfile::tempdir().unwrap();
            copy_of(model, dir.path(), |name| match name.strip_prefix(usual) {
                Some(inside) => format!("{prefix}{inside}"),
                None if prefix.starts_with("language_model.") => format!("language_model.{name}"),
                None => name.to_owned(),
            });
            let again = Source::open(dir.path(), None).unwrap_or_else(|error| panic!("{model}, {prefix:?}: {error}"));
            assert_eq!(again.described.form, first.described.form, "{model}, {prefix:?}");
            let head = (!first.config.tied).then_some(Role::Head);
            for layer in 0..first.config.layers().len() {
                for role in roles.into_iter().chain(head) {
                    let [a, b] = [&first, &again].map(|source| source.weight(role, layer).unwrap().data);
                    assert!(a == b, "{model}, {prefix:?}: {role:?} of layer {layer}");
                }
            }
        }
    }
}
