//! GGUF files for tests: a good one taken apart, changed and put together again.
#![allow(dead_code)]

use dynamicinfer::formats::DType;
use dynamicinfer::formats::blocks::{self, BlockType};
use dynamicinfer::formats::gguf::{self, Array, Value};
use std::path::{Path, PathBuf};

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name)
}

/// The types in the fixtures that are read here, and GGUF's numbers of them.
pub const KINDS: [(DType, u32); 6] = [
    (DType::F32, 0),
    (DType::F16, 1),
    (DType::BF16, 30),
    (DType::Q4_0, 2),
    (DType::Q8_0, 8),
    (DType::Block(BlockType::MXFP4), 39),
];

pub struct Tensor {
    pub name: String,
    pub kind: u32,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

pub struct File {
    pub keys: Vec<(String, Value)>,
    pub tensors: Vec<Tensor>,
}

impl File {
    pub fn read(name: &str) -> File {
        let bytes = std::fs::read(fixture(name)).unwrap();
        let read = gguf::parse(&bytes, Path::new(name)).unwrap();
        let tensor = |t: &dynamicinfer::formats::TensorInfo| Tensor {
            name: t.name.clone(),
            kind: KINDS.iter().find(|kind| kind.0 == t.dtype).unwrap_or_else(|| panic!("{}", t.dtype.name())).1,
            shape: t.shape.clone(),
            data: bytes[t.offset as usize..(t.offset + t.bytes) as usize].to_vec(),
        };
        File {
            keys: read.metadata.iter().map(|(key, value)| (key.to_owned(), value.clone())).collect(),
            tensors: read.tensors.iter().map(tensor).collect(),
        }
    }

    /// The same with all tensors in f32, so that nothing is rounded but by f32.
    pub fn in_f32(mut self) -> File {
        for tensor in &mut self.tensors {
            let dtype = KINDS.iter().find(|kind| kind.1 == tensor.kind).expect("it was read").0;
            let mut numbers = vec![0f32; tensor.shape.iter().product()];
            blocks::dequantize(dtype, &tensor.data, &mut numbers);
            (tensor.kind, tensor.data) = (0, numbers.iter().flat_map(|number| number.to_le_bytes()).collect());
        }
        self
    }

    pub fn set(&mut self, key: &str, value: Value) {
        self.remove(key);
        self.keys.push((key.into(), value));
    }

    pub fn remove(&mut self, key: &str) {
        self.keys.retain(|(k, _)| k != key);
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("the fixture has {name}"))
    }

    pub fn drop_tensor(&mut self, name: &str) {
        self.tensor(name);
        self.tensors.retain(|t| t.name != name);
    }

    /// A SentencePiece vocabulary of `tokens` tokens.
    pub fn vocabulary(&mut self, tokens: usize) {
        let texts =
            ["<unk>".into(), "<s>".into(), "</s>".into()].into_iter().chain((3..tokens).map(|i| format!("t{i}")));
        self.set("tokenizer.ggml.model", text("llama"));
        self.set("tokenizer.ggml.tokens", Value::Array(Array::Str(texts.take(tokens).collect())));
        self.set("tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0; tokens])));
        self.set("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![1; tokens])));
        self.set("tokenizer.ggml.bos_token_id", Value::U32(1));
        self.set("tokenizer.ggml.eos_token_id", Value::U32(2));
        self.set("tokenizer.ggml.unknown_token_id", Value::U32(0));
    }

    /// The files of the same model in parts with so many tensors each, as llama.cpp's `gguf-split` writes them: the first has the metadata. The
    /// last part has the rest of the tensors.
    pub fn parts(self, tensors: &[usize]) -> Vec<File> {
        let (count, all) = (tensors.len() + 1, self.tensors.len());
        let mut rest = self.tensors.into_iter();
        let sizes = tensors.iter().copied().chain([all - tensors.iter().sum::<usize>()]);
        let mut parts: Vec<File> =
            sizes.map(|size| File { keys: Vec::new(), tensors: rest.by_ref().take(size).collect() }).collect();
        parts[0].keys = self.keys;
        for (number, part) in parts.iter_mut().enumerate() {
            part.set("split.no", Value::U16(number as u16));
            part.set("split.count", Value::U16(count as u16));
            part.set("split.tensors.count", Value::I32(all as i32));
        }
        parts
    }

    /// Writes parts under the names that they have, and returns where.
    pub fn write_parts(parts: &[File], dir: &Path, stem: &str) -> Vec<PathBuf> {
        let path = |number: usize| dir.join(format!("{stem}-{:05}-of-{:05}.gguf", number + 1, parts.len()));
        let write = |(number, part): (usize, &File)| {
            std::fs::write(path(number), part.bytes()).unwrap();
            path(number)
        };
        parts.iter().enumerate().map(write).collect()
    }

    pub fn bytes(&self) -> Vec<u8> {
        fn string(out: &mut Vec<u8>, text: &str) {
            out.extend((text.len() as u64).to_le_bytes());
            out.extend(text.as_bytes());
        }
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            string(&mut out, key);
            let mut number = |kind: u32, bytes: &[u8]| {
                out.extend(kind.to_le_bytes());
                out.extend(bytes);
            };
            match value {
                Value::U16(v) => number(2, &v.to_le_bytes()),
                Value::U32(v) => number(4, &v.to_le_bytes()),
                Value::I32(v) => number(5, &v.to_le_bytes()),
                Value::F32(v) => number(6, &v.to_le_bytes()),
                Value::U64(v) => number(10, &v.to_le_bytes()),
                Value::Bool(v) => number(7, &[u8::from(*v)]),
                Value::Str(v) => {
                    number(8, &[]);
                    string(&mut out, v);
                }
                Value::Array(array) => {
                    let (kind, len) = match array {
                        Array::F32(v) => (6u32, v.len()),
                        Array::I32(v) => (5, v.len()),
                        Array::Bool(v) => (7, v.len()),
                        Array::Str(v) => (8, v.len()),
                        other => panic!("{other:?} is not written here"),
                    };
                    number(9, &kind.to_le_bytes());
                    out.extend((len as u64).to_le_bytes());
                    match array {
                        Array::F32(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
                        Array::I32(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
                        Array::Bool(v) => out.extend(v.iter().map(|&x| u8::from(x))),
                        Array::Str(v) => v.iter().for_each(|s| string(&mut out, s)),
                        _ => unreachable!(),
                    }
                }
                other => panic!("{other:?} is not written here"),
            }
        }
        let mut offset = 0u64;
        for t in &self.tensors {
            string(&mut out, &t.name);
            out.extend((t.shape.len() as u32).to_le_bytes());
            t.shape.iter().rev().for_each(|&d| out.extend((d as u64).to_le_bytes()));
            out.extend(t.kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset = (offset + t.data.len() as u64).next_multiple_of(32);
        }
        for t in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&t.data);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out
    }
}

pub fn text(value: &str) -> Value {
    Value::Str(value.into())
}
