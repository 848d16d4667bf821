//! Counts are checked where they are read. A layer count of 10^12 in a config.json of 1 kB was read into a list of as many layers, which
//! ended the process; one of 2^32 - 1 in a GGUF took 4 GiB before it was refused.
//!
//! Every number of every family's files, and those that a file may have besides, becomes each of some absurd values: the file is refused or
//! opened within 64 MiB of memory and 50 ms of the processor's time. It is tried in a child, whose allocator refuses more: what takes too
//! much ends the child, not the tests.

#[path = "support/gguf.rs"]
mod gguf_file;
#[path = "support/limited.rs"]
mod limited;

use dynamicinfer::clock;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::{Engine, Logits, Session};
use dynamicinfer::error::{Error, Result};
use dynamicinfer::formats::gguf::{Array, Value};
use dynamicinfer::model::in_place::not_in_place;
use dynamicinfer::model::source::{Source, read_json};
use dynamicinfer::model::{KvType, Model};
use gguf_file::{File, fixture, text};
use limited::Limited;
use serde_json::{Value as Json, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;

/// What a refusal may take, and how long.
const MAX_BYTES: usize = 64 << 20;
const MAX_TIME: clock::Duration = clock::Duration::from_millis(50);

/// The directories that are gone through: one of each family, and of each form that a family has.
const DIRECTORIES: [&str; 42] = [
    "bamboo",
    "deepseek-v2",
    "deepseek-v3",
    "glm4-moe-lite",
    "falcon",
    "ernie4.5-moe",
    "falcon-40b",
    "gemma3",
    "gemma4",
    "gemma4-moe",
    "gemma4-e2b",
    "glm4-moe",
    "lfm2",
    "lfm2-moe",
    "llama",
    "llama-linear-rope",
    "llama-tied",
    "minicpm",
    "mistral",
    "mixtral",
    "opt",
    "prosparse",
    "qwen2",
    "qwen2-moe",
    "qwen35",
    "qwen35-moe",
    "qwen3-next",
    "nemotron-h",
    "nemotron-h-moe",
    "qwen3",
    "qwen3-moe",
    "smallthinker",
    "smollm3",
    "turbosparse-mixtral",
    "arcee",
    "nemotron",
    "granite",
    "phi4",
    "phi4-mini",
    "starcoder2",
    "olmo2",
    "glm4",
];

const GGUFS: [&str; 44] = [
    "bamboo.gguf",
    "deepseek-v2.gguf",
    "deepseek-v3.gguf",
    "glm4-moe-lite.gguf",
    "dots1.gguf",
    "ernie4.5-moe.gguf",
    "falcon.gguf",
    "falcon-40b.gguf",
    "gemma3.gguf",
    "gemma4.gguf",
    "gemma4-moe.gguf",
    "gemma4-e2b.gguf",
    "glm4-moe.gguf",
    "lfm2.gguf",
    "lfm2-moe.gguf",
    "gpt-oss.mxfp4.gguf",
    "llama.gguf",
    "llama-tied.gguf",
    "llama-linear-rope.q8_0.gguf",
    "minicpm.gguf",
    "mistral.gguf",
    "mixtral.gguf",
    "opt.gguf",
    "qwen2.gguf",
    "qwen35.gguf",
    "qwen35-moe.gguf",
    "qwen3-next.gguf",
    "nemotron-h.gguf",
    "nemotron-h-moe.gguf",
    "qwen2-moe.gguf",
    "qwen3.gguf",
    "qwen3-moe.gguf",
    "relufalcon.powerinfer.gguf",
    "smallthinker.gguf",
    "smollm3.gguf",
    "turbosparse-mixtral.gguf",
    "arcee.gguf",
    "nemotron.gguf",
    "granite.gguf",
    "phi4.gguf",
    "phi4-mini.gguf",
    "starcoder2.gguf",
    "olmo2.gguf",
    "glm4.gguf",
];

fn absurd_json() -> Vec<Json> {
    vec![
        json!(0),
        json!(1),
        json!(4096),
        json!(4097),
        json!(1u64 << 24),
        json!(1u64 << 31),
        json!(u32::MAX),
        json!(1u64 << 32),
        json!(1_000_000_000_000u64),
        json!(1u64 << 63),
        json!(u64::MAX),
        json!(-1),
        json!(1.5),
        json!(1e300),
        json!("8"),
        json!([]),
        json!([1_000_000_000_000u64]),
    ]
}

fn absurd_value() -> Vec<Value> {
    vec![
        Value::U32(0),
        Value::U32(1),
        Value::U32(4096),
        Value::U32(4097),
        Value::U32(1 << 24),
        Value::U32(1 << 31),
        Value::U32(u32::MAX),
        Value::U64(1_000_000_000_000),
        Value::U64(1 << 63),
        Value::I32(-1),
        Value::F32(1.5),
        Value::F32(f32::NAN),
        Value::F32(3e38),
        text("8"),
        Value::Array(Array::I32(vec![i32::MAX])),
    ]
}

/// Lists in the place of a list of numbers; `None` for any other value.
fn absurd_lists(value: &Value) -> Option<Vec<Value>> {
    let length = match value {
        Value::Array(Array::U32(list)) => list.len(),
        Value::Array(Array::I32(list)) => list.len(),
        Value::Array(Array::F32(list)) => list.len(),
        Value::Array(Array::Bool(list)) => list.len(),
        _ => return None,
    };
    let lists = [(i32::MAX, length), (-1, length), (0, length), (1, length + 1), (1, 0), (1, 100_000)];
    Some(lists.map(|(number, length)| Value::Array(Array::I32(vec![number; length]))).to_vec())
}

/// Opens the model as everything here does, and if it is accepted computes with it. A refusal is that of a bad file, but for one that a
/// session has no memory for.
fn open(path: &Path) -> Result<()> {
    let source = Source::open(path, None)?;
    if not_in_place(&source).is_some() {
        return Ok(());
    }
    let model = Model::in_place(source)?;
    let mut engine = Engine::new(model, 1, Kernels::best());
    let context = engine.model.config.context.min(64);
    let mut session = Session::new(&engine, context, KvType::F16)?;
    if session.check(&engine, &[0]).is_ok() {
        engine.forward(&mut session.kv, &[0], Logits::All);
    }
    Ok(())
}

/// What is wrong with how the case ended, if anything is.
fn fault_of(path: &Path) -> Option<String> {
    Limited::from_here(MAX_BYTES);
    let begun = clock::computed();
    let opened = catch_unwind(AssertUnwindSafe(|| open(path)));
    let took = clock::computed() - begun;
    match opened {
        Err(_) => Some("it panicked".into()),
        // Computing takes its time, and only a refusal has a limit.
        Ok(Ok(())) => None,
        Ok(Err(Error::BadFile(_))) if took > MAX_TIME => Some(format!("it was refused after {took:?}")),
        Ok(Err(Error::BadFile(_))) => None,
        Ok(Err(other)) => Some(format!("{other:?}")),
    }
}

/// Where a JSON value has numbers: paths of keys; of a list, the places of its first and its last.
fn numbers_in(value: &Json, at: &str) -> Vec<String> {
    match value {
        Json::Number(_) => vec![at.to_owned()],
        Json::Object(map) => map.iter().flat_map(|(key, inside)| numbers_in(inside, &format!("{at}/{key}"))).collect(),
        Json::Array(list) => {
            let mut ends = vec![0, list.len().saturating_sub(1)];
            ends.dedup();
            let inside = ends.into_iter().filter_map(|i| Some((i, list.get(i)?)));
            inside.flat_map(|(i, inside)| numbers_in(inside, &format!("{at}/{i}"))).collect()
        }
        _ => Vec::new(),
    }
}

/// The cases of a directory. What it may have besides is there in a second round, which has windows and no lists.
fn directory(name: &str, said: &mut impl FnMut(&str), faults: &mut Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    // The weights, in one file or in shards with their index.
    for file in std::fs::read_dir(fixture(name)).unwrap().map(|entry| entry.unwrap()) {
        let called = file.file_name().into_string().unwrap();
        let weights = called.starts_with("model") && called.ends_with(".safetensors");
        if weights || called.ends_with(".safetensors.index.json") {
            std::os::unix::fs::symlink(file.path(), dir.path().join(called)).unwrap();
        }
    }
    let published: Json = read_json(&fixture(name).join("config.json"), 1 << 20).unwrap();
    let mut more = published.clone();
    let fields = more.as_object_mut().unwrap();
    fields.retain(|key, value| key == "architectures" || !value.is_array());
    for (key, value) in [
        ("use_sliding_window", json!(true)),
        ("sliding_window", json!(16)),
        ("max_window_layers", json!(1)),
        ("head_dim", json!(16)),
        ("num_kv_heads", json!(1)),
        ("num_ln_in_parallel_attn", json!(2)),
    ] {
        fields
            .entry(key)
            .and_modify(|old| {
                if old.is_null() || old.is_boolean() {
                    *old = value.clone()
                }
            })
            .or_insert(value);
    }
    for (round, config) in [published, more].iter().enumerate() {
        for place in numbers_in(config, "") {
            for value in absurd_json() {
                let mut changed = config.clone();
                *changed.pointer_mut(&place).unwrap() = value.clone();
                std::fs::write(dir.path().join("config.json"), changed.to_string()).unwrap();
                let case = format!("{name}, round {round}, {place} = {value}");
                said(&case);
                faults.extend(fault_of(dir.path()).map(|fault| format!("{case}: {fault}")));
            }
        }
    }
}

/// The cases of a GGUF: every number that it has, and those that others have.
fn gguf(name: &str, said: &mut impl FnMut(&str), faults: &mut Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let mut file = File::read(name);
    let is_number = |value: &Value| !matches!(value, Value::Str(_) | Value::Bool(_) | Value::Array(_));
    let mut keys: Vec<String> =
        file.keys.iter().filter(|(_, value)| is_number(value)).map(|(key, _)| key.clone()).collect();
    let arch = match file.keys.iter().find(|(key, _)| key == "general.architecture") {
        Some((_, Value::Str(arch))) => arch.clone(),
        other => panic!("{other:?}"),
    };
    let more = [
        "vocab_size",
        "context_length",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "expert_shared_count",
        "leading_dense_block_count",
        "expert_gating_func",
    ];
    keys.extend(more.iter().map(|key| format!("{arch}.{key}")));
    keys.extend(["general.alignment", "split.count", "split.no", "split.tensors.count"].map(str::to_owned));
    keys.sort();
    keys.dedup();
    let lists = file.keys.clone().into_iter().filter_map(|(key, value)| Some((key, absurd_lists(&value)?)));
    let lists: Vec<(String, Vec<Value>)> = lists.filter(|(key, _)| !key.starts_with("tokenizer.")).collect();
    for (key, values) in keys.into_iter().map(|key| (key, absurd_value())).chain(lists) {
        let before = file.keys.clone();
        for value in values {
            file.set(&key, value.clone());
            std::fs::write(&path, file.bytes()).unwrap();
            let case = format!("{name}, {key} = {value:?}");
            said(&case);
            faults.extend(fault_of(&path).map(|fault| format!("{case}: {fault}")));
        }
        file.keys = before;
    }
}

#[test]
fn absurd_counts_are_refused_before_anything_is_made_of_them() {
    let program = std::env::current_exe().unwrap();
    let mut child = Command::new(program);
    // A backtrace takes more memory than a case may, and waits for it without end.
    child.args(["--exact", "the_child", "--ignored", "--nocapture"]).env("RUST_BACKTRACE", "0");
    let child = child.output().unwrap();
    let (said, errors) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    let last = said.lines().rev().find(|line| !line.is_empty()).unwrap_or_default();
    assert!(child.status.success(), "{}, the last case: {last}\n{errors}", child.status);
}

#[test]
#[ignore = "the test above runs it as a process of its own"]
fn the_child() {
    use std::io::Write;
    // The first lines of the process: each case is said before it is tried, so that the last one is known.
    let mut out = std::io::stdout();
    let mut said = |case: &str| {
        Limited::from_here(usize::MAX);
        writeln!(out, "{case}").unwrap();
        out.flush().unwrap();
    };
    let mut faults = Vec::new();
    for name in DIRECTORIES {
        directory(name, &mut said, &mut faults);
    }
    for name in GGUFS {
        gguf(name, &mut said, &mut faults);
    }
    Limited::from_here(usize::MAX);
    assert!(faults.is_empty(), "{} cases:\n{}", faults.len(), faults.join("\n"));
}
