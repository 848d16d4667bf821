//! Expected answers of tiny models (tests/fixtures/models/README.md), and a model beside one.
#![allow(dead_code)]

use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::{Engine, Logits, Session};
use dynamicinfer::formats::{MappedFile, blocks, safetensors};
use dynamicinfer::model::{KvType, Model};
use std::path::{Path, PathBuf};

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models")
}

pub struct Expected {
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
    pub prompt_logits: Vec<f32>,
    pub last_logits: Vec<f32>,
}

/// What the reference says of `stem`: in a directory of that name, or beside a GGUF with its own answer.
pub fn expected(stem: &str) -> Expected {
    let (json, tensors) = ["/", "."]
        .iter()
        .map(|sep| {
            (
                fixtures().join(format!("{stem}{sep}expected.json")),
                fixtures().join(format!("{stem}{sep}expected.safetensors")),
            )
        })
        .find(|(json, _)| json.exists())
        .unwrap_or_else(|| panic!("{stem} has an expected.json"));
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let ids = |key: &str| json[key].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect();
    let file = MappedFile::open(&tensors).unwrap();
    let infos = safetensors::parse(file.bytes(), &tensors).unwrap();
    let read = |name: &str| {
        let info = infos.iter().find(|i| i.name == name).unwrap();
        let mut out = vec![0.0; info.shape.iter().product()];
        let at = info.offset as usize;
        blocks::dequantize(info.dtype, &file.bytes()[at..at + info.bytes as usize], &mut out);
        out
    };
    Expected {
        prompt: ids("prompt"),
        greedy: ids("greedy"),
        prompt_logits: read("prompt_logits"),
        last_logits: read("last_logits"),
    }
}

/// The largest difference, by the largest number of `b`.
pub fn relative_error(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let top = b.iter().fold(0f32, |m, v| m.max(v.abs()));
    a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / top
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
}

/// Largest relative error over prompt and last token; panics where a greedy token differs.
pub fn check(model: Model, expected: &Expected, kernels: Kernels, threads: usize) -> f32 {
    let path = model.path().to_owned();
    let mut engine = Engine::new(model, threads, kernels);
    let mut session = Session::new(&engine, 256, KvType::F32).unwrap();
    let logits = engine.forward(&mut session.kv, &expected.prompt, Logits::All);
    let mut worst = relative_error(logits, &expected.prompt_logits);
    let vocab = expected.last_logits.len();
    let mut token = argmax(&logits[logits.len() - vocab..]);
    let mut made = vec![token];
    for i in 1..expected.greedy.len() {
        let logits = engine.forward(&mut session.kv, &[token], Logits::Last);
        if i == expected.greedy.len() - 1 {
            worst = worst.max(relative_error(logits, &expected.last_logits));
        }
        token = argmax(logits);
        made.push(token);
    }
    assert_eq!(made, expected.greedy, "{} on {}: greedy tokens", path.display(), kernels.isa.name());
    worst
}
