//! GGUF files, built field by field, with one thing wrong.

use crate::{allowed, assert_in_file, measured, message};
use dynamicinfer::error::Error;
use dynamicinfer::formats::gguf::{self, Array, Gguf, Value};
use dynamicinfer::formats::{DType, TensorInfo};
use std::path::Path;
use std::time::{Duration, Instant};

#[derive(Clone)]
pub struct Tensor {
    name: Vec<u8>,
    ne: Vec<u64>,
    dims: Option<u32>,
    kind: u32,
    offset: u64,
}

#[derive(Clone)]
pub struct Build {
    magic: [u8; 4],
    version: u32,
    tensor_count: Option<u64>,
    key_count: Option<u64>,
    keys: Vec<Vec<u8>>,
    pub tensors: Vec<Tensor>,
    alignment: usize,
    pub data: usize,
}

fn string(s: impl AsRef<[u8]>) -> Vec<u8> {
    let s = s.as_ref();
    [&(s.len() as u64).to_le_bytes()[..], s].concat()
}

fn key(name: impl AsRef<[u8]>, kind: u32, value: impl AsRef<[u8]>) -> Vec<u8> {
    [&string(name)[..], &kind.to_le_bytes(), value.as_ref()].concat()
}

fn array(kind: u32, n: u64, values: impl AsRef<[u8]>) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &n.to_le_bytes(), values.as_ref()].concat()
}

pub fn tensor(name: &str, ne: &[u64], kind: u32, offset: u64) -> Tensor {
    Tensor { name: name.into(), ne: ne.into(), dims: None, kind, offset }
}

pub fn good() -> Build {
    Build {
        magic: *b"GGUF",
        version: 3,
        tensor_count: None,
        key_count: None,
        keys: vec![
            key("general.architecture", 8, string("llama")),
            key("llama.block_count", 4, 2u32.to_le_bytes()),
            key("llama.rope.freq_base", 6, 10_000f32.to_le_bytes()),
            key("tokenizer.ggml.tokens", 9, array(8, 2, [string("<s>"), string("é")].concat())),
            key("tokenizer.ggml.scores", 9, array(6, 2, [0f32.to_le_bytes(), (-1f32).to_le_bytes()].concat())),
        ],
        // 768, 68 (padded to 96) and 10 bytes of data.
        tensors: vec![
            tensor("a.weight", &[64, 3], 0, 0),
            tensor("b.weight", &[32, 2], 8, 768),
            tensor("c", &[5], 1, 864),
        ],
        alignment: 32,
        data: 874,
    }
}

impl Build {
    pub fn header(&self) -> Vec<u8> {
        let mut out = [&self.magic[..], &self.version.to_le_bytes()].concat();
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        self.keys.iter().for_each(|key| out.extend(key));
        for t in &self.tensors {
            out.extend(string(&t.name));
            out.extend(t.dims.unwrap_or(t.ne.len() as u32).to_le_bytes());
            t.ne.iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(t.kind.to_le_bytes());
            out.extend(t.offset.to_le_bytes());
        }
        out
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        out.resize(out.len().next_multiple_of(self.alignment) + self.data, 0x11);
        out
    }
}

/// `good` with one thing changed.
fn with(change: impl FnOnce(&mut Build)) -> Vec<u8> {
    let mut build = good();
    change(&mut build);
    build.bytes()
}

fn with_key(name: impl AsRef<[u8]>, kind: u32, value: impl AsRef<[u8]>) -> Vec<u8> {
    with(|b| b.keys.push(key(name, kind, value)))
}

/// `good` with tensor b changed.
fn with_tensor(change: impl FnOnce(&mut Tensor)) -> Vec<u8> {
    with(|b| change(&mut b.tensors[1]))
}

fn parse_gguf(bytes: &[u8]) -> Result<Gguf, Error> {
    gguf::parse(bytes, Path::new("model.gguf"))
}

/// Refused quickly, cheaply, with all of `wants` in the message.
fn refused_gguf(case: &str, bytes: &[u8], wants: &[&str]) {
    let start = Instant::now();
    let (parsed, peak) = measured(|| parse_gguf(bytes));
    let message = message(parsed, case);
    assert!(start.elapsed() < Duration::from_secs(1), "{case}: took {:?}", start.elapsed());
    assert!(peak <= allowed(bytes.len()), "{case}: {peak} bytes of memory for a file of {}", bytes.len());
    for want in [&["model.gguf: ", "(at byte "], wants].concat() {
        assert!(message.contains(want), "{case}: no {want:?} in: {message}");
    }
}

#[test]
fn the_good_file_is_read() {
    let bytes = good().bytes();
    let read = parse_gguf(&bytes).unwrap();
    let data = bytes.len() as u64 - 874;
    let info = |name: &str, dtype, shape: &[usize], offset, bytes| TensorInfo {
        name: name.into(),
        dtype,
        shape: shape.into(),
        offset: data + offset,
        bytes,
    };
    let expected = [
        info("a.weight", DType::F32, &[3, 64], 0, 768),
        info("b.weight", DType::Q8_0, &[2, 32], 768, 68),
        info("c", DType::F16, &[5], 864, 10),
    ];
    assert_eq!(read.tensors, expected);
    assert_eq!((read.version, read.powerinfer), (3, false));
    assert_in_file(&read.tensors, bytes.len());
    // Padding behind the last tensor may be there or not.
    assert!(parse_gguf(&[&bytes[..], &[0; 22]].concat()).is_ok());
    let sparse = parse_gguf(&with(|b| b.magic = *b"PWRI")).unwrap();
    assert!(sparse.powerinfer);
    assert_eq!(parse_gguf(&with(|b| b.version = 2)).unwrap().version, 2);
    assert!(parse_gguf(&with(|b| (b.tensors, b.data) = (vec![], 0))).unwrap().tensors.is_empty());
}

#[test]
fn every_value_type_is_read_and_only_as_what_it_is() {
    let values: Vec<(&str, u32, Vec<u8>, Value)> = vec![
        ("u8", 0, vec![200], Value::U8(200)),
        ("i8", 1, vec![0x80], Value::I8(-128)),
        ("u16", 2, 65535u16.to_le_bytes().into(), Value::U16(65535)),
        ("i16", 3, (-2i16).to_le_bytes().into(), Value::I16(-2)),
        ("u32", 4, u32::MAX.to_le_bytes().into(), Value::U32(u32::MAX)),
        ("i32", 5, 7i32.to_le_bytes().into(), Value::I32(7)),
        ("f32", 6, 1.5f32.to_le_bytes().into(), Value::F32(1.5)),
        ("bool", 7, vec![1], Value::Bool(true)),
        ("str", 8, string("hé\0"), Value::Str("hé\0".into())),
        ("u64", 10, (1u64 << 32).to_le_bytes().into(), Value::U64(1 << 32)),
        ("i64", 11, (-1i64).to_le_bytes().into(), Value::I64(-1)),
        ("f64", 12, 0.25f64.to_le_bytes().into(), Value::F64(0.25)),
        ("u8s", 9, array(0, 2, [1, 2]), Value::Array(Array::U8(vec![1, 2]))),
        ("i8s", 9, array(1, 1, [255]), Value::Array(Array::I8(vec![-1]))),
        ("u16s", 9, array(2, 1, [1, 1]), Value::Array(Array::U16(vec![257]))),
        ("i16s", 9, array(3, 1, [255, 255]), Value::Array(Array::I16(vec![-1]))),
        ("u32s", 9, array(4, 1, 9u32.to_le_bytes()), Value::Array(Array::U32(vec![9]))),
        ("big u32s", 9, array(4, 1, u32::MAX.to_le_bytes()), Value::Array(Array::U32(vec![u32::MAX]))),
        ("i32s", 9, array(5, 1, (-9i32).to_le_bytes()), Value::Array(Array::I32(vec![-9]))),
        ("f32s", 9, array(6, 1, 2f32.to_le_bytes()), Value::Array(Array::F32(vec![2.0]))),
        ("bools", 9, array(7, 2, [0, 1]), Value::Array(Array::Bool(vec![false, true]))),
        ("strs", 9, array(8, 1, string("x")), Value::Array(Array::Str(vec!["x".into()]))),
        ("u64s", 9, array(10, 1, u64::MAX.to_le_bytes()), Value::Array(Array::U64(vec![u64::MAX]))),
        ("i64s", 9, array(11, 1, 5i64.to_le_bytes()), Value::Array(Array::I64(vec![5]))),
        ("f64s", 9, array(12, 1, 5f64.to_le_bytes()), Value::Array(Array::F64(vec![5.0]))),
        ("none", 9, array(8, 0, []), Value::Array(Array::Str(vec![]))),
    ];
    let bytes = with(|b| b.keys = values.iter().map(|(name, kind, value, _)| key(name, *kind, value)).collect());
    let read = parse_gguf(&bytes).unwrap();
    let m = &read.metadata;
    let in_order: Vec<(&str, &Value)> = values.iter().map(|(name, _, _, value)| (*name, value)).collect();
    assert_eq!(m.iter().collect::<Vec<_>>(), in_order);
    for (name, _, _, value) in &values {
        assert_eq!(m.get(name), Some(value));
        let offset = m.offset(name).unwrap() as usize;
        assert_eq!(&bytes[offset + 8..][..name.len()], name.as_bytes());
        let readable = |getter: &str, answer: Result<bool, Error>, by: &[&str]| match answer {
            Ok(there) => assert!(there && by.contains(name), "{getter}({name}) gave something"),
            Err(e) => {
                assert!(!by.contains(name), "{getter}({name}): {e}");
                let message = e.to_string();
                assert!(message.starts_with(&format!("model.gguf: {name}: is ")), "{message}");
                assert!(message.ends_with(&format!("(at byte {offset})")), "{message}");
            }
        };
        readable("str", m.str(name).map(|v| v.is_some()), &["str"]);
        readable("u32", m.u32(name).map(|v| v.is_some()), &["u8", "u16", "u32", "i32"]);
        readable("f32", m.f32(name).map(|v| v.is_some()), &["f32", "f64"]);
        readable("bool", m.bool(name).map(|v| v.is_some()), &["bool"]);
        readable("strings", m.strings(name).map(|v| v.is_some()), &["strs", "none"]);
        readable("f32s", m.f32s(name).map(|v| v.is_some()), &["f32s"]);
        readable("i32s", m.i32s(name).map(|v| v.is_some()), &["i32s", "u32s"]);
    }
    assert_eq!(m.i32s("u32s").unwrap(), Some(&[9][..]));
    assert_eq!(m.f32("f64").unwrap(), Some(0.25));
    assert_eq!(m.str("absent").unwrap(), None);
    assert_eq!(m.i32s("absent").unwrap(), None);
}

#[test]
fn files_that_are_no_gguf_are_named_for_what_they_are() {
    let cases: &[(&[u8], &str)] = &[
        (b"", "it is empty"),
        (b"GGU", "it has only 3 bytes"),
        (b"GGUF", "needs 4 bytes, but the file has only 0 more"),
        (b"GGUF\x03\0\0\0", "tensor count: needs 8 bytes"),
        (b"JUNKJUNKJUNK", "begins with \"JUNK\", not with GGUF"),
        (b"\n <!DOCTYPE html><html>", "it is a web page"),
        (b"<html><body>404", "it is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "run: git lfs pull"),
        (b"PK\x03\x04pytorch", "PyTorch checkpoint"),
        (b"tjggabcd", "GGML formats before GGUF"),
        (b"\x40\0\0\0\0\0\0\0{\"__metadata__\"", "a safetensors one"),
    ];
    for (bytes, want) in cases {
        refused_gguf(want, bytes, &[want]);
    }
    for (version, want) in [
        (0u32, "unknown GGUF version 0"),
        (1, "GGUF version 1 (August 2023) is not supported"),
        (4, "unknown GGUF version 4"),
        (3 << 24, "big-endian"),
        (2 << 24, "big-endian"),
        (u32::MAX, "unknown GGUF version 4294967295"),
    ] {
        refused_gguf(want, &with(|b| b.version = version), &["version: ", want, "(at byte 4)"]);
    }
}

#[test]
fn counts_are_refused_before_memory_is_taken_for_them() {
    for n in [u64::MAX, 1 << 63, 2_000_000_000, 500_000_000] {
        let bare =
            |tensors: u64, keys: u64| [&b"GGUF\x03\0\0\0"[..], &tensors.to_le_bytes(), &keys.to_le_bytes()].concat();
        refused_gguf("tensors", &bare(n, 0), &["tensor count: says ", "can hold at most 0", "(at byte 8)"]);
        refused_gguf("keys", &bare(0, n), &["key count: says ", "can hold at most 0", "(at byte 16)"]);
        refused_gguf("tensors", &with(|b| b.tensor_count = Some(n)), &["tensor count: says "]);
        refused_gguf("keys", &with(|b| b.key_count = Some(n)), &["key count: says "]);
    }
    let one_more = |n: usize| Some(n as u64 + 1);
    refused_gguf("one key more", &with(|b| b.key_count = one_more(b.keys.len())), &["byte"]);
    refused_gguf("one key less", &with(|b| b.key_count = Some(b.keys.len() as u64 - 1)), &["byte"]);
    refused_gguf("one tensor more", &with(|b| b.tensor_count = one_more(b.tensors.len())), &["tensor 4 of 4"]);
    refused_gguf("one tensor less", &with(|b| b.tensor_count = Some(2)), &["end of file"]);

    // One more than the bytes to the file's end can hold.
    let mut last = good();
    last.tensors.clear();
    last.keys.push(key("k", 9, array(10, 3, [0; 23])));
    refused_gguf("exactly", &last.header(), &["k: says 3, but the 23 bytes that follow can hold at most 2"]);

    // A large file pays for a large count, but an array's count is its own.
    for (kind, n) in
        [(0, u64::MAX), (10, u64::MAX / 8 + 2), (8, 1_000_000_000), (6, 1 << 62), (7, 1 << 40), (8, u64::MAX)]
    {
        refused_gguf("array", &with_key("big", 9, array(kind, n, [])), &["big: says ", "at most"]);
    }
}

#[test]
fn bad_keys_are_refused() {
    let raw_length = |n: u64| with(|b| b.keys.insert(0, [&n.to_le_bytes()[..], b"xxxxxxxxxxxxxxxx"].concat()));
    for n in [u64::MAX, 1 << 63, 1 << 32, 65_536, 0] {
        refused_gguf(
            "key length",
            &raw_length(n),
            &["metadata key 1 of 6: has a name of", "allowed are 1 to 65535", "byte 24"],
        );
    }
    refused_gguf("cut key", &raw_length(60_000), &["metadata key 1 of 6: needs 60000 bytes", "download it again"]);
    refused_gguf("not UTF-8", &with_key(b"ab\xff", 0, [1]), &["metadata key 6 of 6: is not UTF-8"]);
    refused_gguf("NUL", &with_key(b"ab\0", 0, [1]), &["control character"]);
    refused_gguf("escape", &with_key(b"\x1b[31mred", 0, [1]), &["control character", "\\u{1b}"]);
    refused_gguf(
        "twice",
        &with_key("llama.block_count", 8, string("x")),
        &["llama.block_count: the key is there twice, first at"],
    );
    for kind in [13, u32::MAX] {
        refused_gguf("type", &with_key("k", kind, [0; 8]), &[&format!("k: has the unknown type {kind}")]);
        refused_gguf(
            "type",
            &with_key("k", 9, array(kind, 1, [0; 8])),
            &[&format!("k: is an array of the unknown type {kind}")],
        );
    }
    refused_gguf("bool", &with_key("k", 7, [2]), &["k: is a bool with value 2"]);
    refused_gguf("bools", &with_key("k", 9, array(7, 2, [1, 2])), &["k: is a bool with value 2"]);
    for n in [u64::MAX, u64::MAX - 7, 1 << 63, 10_000] {
        refused_gguf("string", &with_key("k", 8, n.to_le_bytes()), &[&format!("k: needs {n} bytes")]);
        refused_gguf("string", &with_key("k", 9, array(8, 1, n.to_le_bytes())), &[&format!("k[0]: needs {n} bytes")]);
    }
    refused_gguf("string", &with_key("k", 8, string(b"\xed\xa0\x80")), &["k: is not UTF-8"]);
    // Nesting, which recursion would follow down the stack.
    let deep = (0..10_000).fold(array(0, 1, [1]), |inner, _| array(9, 1, inner));
    refused_gguf("arrays of arrays", &with_key("k", 9, deep), &["k: is an array of arrays"]);
    for (kind, value) in [(4, 0u64), (4, 3), (4, 4), (4, 48), (4, 1 << 17), (4, 1 << 31), (5, 32), (10, 32)] {
        let width = if kind == 10 { 8 } else { 4 };
        let bytes = with_key("general.alignment", kind, &value.to_le_bytes()[..width]);
        refused_gguf(
            "alignment",
            &bytes,
            &["general.alignment: is the ", "expected a u32 that is a power of two from 8 to 65536"],
        );
    }
    refused_gguf("alignment", &with_key("general.alignment", 8, string("32")), &["general.alignment: is a string"]);
}

#[test]
fn bad_tensors_are_refused() {
    for dims in [0, 5, u32::MAX] {
        let bytes = with_tensor(|t| t.dims = Some(dims));
        refused_gguf("dims", &bytes, &[&format!("b.weight: has {dims} dimensions, allowed are 1 to 4")]);
    }
    let shape = |ne: &[u64], kind| with_tensor(|t| (t.ne, t.kind) = (ne.into(), kind));
    refused_gguf("dim 0", &shape(&[32, 0], 8), &["b.weight: has the shape [32, 0] with no numbers"]);
    refused_gguf("dim 0", &shape(&[0, 32], 0), &["b.weight: has the shape [0, 32] with no numbers"]);
    for ne in [
        &[u64::MAX][..],
        &[1 << 63],
        &[1 << 32, 1 << 32],
        &[i64::MAX as u64, 2],
        &[1 << 16, 1 << 16, 1 << 16, 1 << 16],
        &[1 << 62, 1],
        &[i64::MAX as u64 / 4 + 1],
    ] {
        refused_gguf("wraps", &shape(ne, 0), &["b.weight: has the impossible shape"]);
    }
    refused_gguf("wraps in blocks", &shape(&[1 << 63, 1 << 4], 8), &["b.weight: has the impossible shape"]);
    // Just fits in 63 bits; no sum with offset or padding may wrap.
    refused_gguf("largest", &shape(&[i64::MAX as u64 / 4], 0), &["b.weight: its data ends at byte 92233720368547"]);
    refused_gguf(
        "part of a block",
        &shape(&[33, 2], 8),
        &["b.weight: has rows of 33 numbers, but Q8_0 stores blocks of 32"],
    );
    refused_gguf("part of a block", &shape(&[128, 2], 12), &["has rows of 128 numbers, but Q4_K stores blocks of 256"]);
    for (kind, want) in [
        (4, "is stored as Q4_2 (removed"),
        (9, "is stored as Q8_1, which is not supported: convert the model to F16"),
        (16, "is stored as IQ2_XXS"),
        (21, "is stored as IQ3_S"),
        (29, "is stored as IQ1_M"),
        (35, "is stored as TQ2_0"),
        (28, "is stored as F64"),
        (26, "holds I32 numbers"),
        (999, "has the unknown type 999"),
        (u32::MAX, "has the unknown type 4294967295"),
    ] {
        refused_gguf(want, &with_tensor(|t| t.kind = kind), &["b.weight: ", want]);
    }
    // PowerInfer's numbers for the integers, of a time before the IQ types.
    for (kind, name) in [(16, "I8"), (17, "I16"), (18, "I32")] {
        let index = with(|b| (b.magic, b.tensors[1].kind) = (*b"PWRI", kind));
        refused_gguf(name, &index, &[&format!("b.weight: holds {name} numbers"), "not a PowerInfer index"]);
    }
    for name in [&b""[..], &[b'x'; 64], b"a\0b", b"\x1b[2J"] {
        refused_gguf("name", &with_tensor(|t| t.name = name.into()), &["tensor 2 of 3: has a "]);
    }
    refused_gguf("name", &with_tensor(|t| t.name = b"\xc0".into()), &["tensor 2 of 3: is not UTF-8"]);
    refused_gguf("twice", &with_tensor(|t| t.name = b"a.weight".into()), &["a.weight: the tensor is there twice"]);
    // A name is a key and never a path.
    assert!(parse_gguf(&with_tensor(|t| t.name = b"../../etc/passwd".into())).is_ok());
    assert!(parse_gguf(&with_tensor(|t| t.name = vec![b'x'; 63])).is_ok());
}

#[test]
fn data_that_is_not_where_it_must_be_is_refused() {
    let at = |offset| with_tensor(|t| t.offset = offset);
    refused_gguf(
        "unaligned",
        &at(769),
        &["b.weight: its data is at 769 of the data section and leaves a gap before it"],
    );
    refused_gguf("gap", &at(800), &["b.weight: ", "leaves a gap before it, which ends at 768"]);
    refused_gguf("overlap", &at(736), &["b.weight: ", "overlaps the tensor before it"]);
    refused_gguf("same place", &at(0), &["b.weight: ", "overlaps the tensor before it"]);
    refused_gguf("past the end", &at(1 << 40), &["b.weight: ", "leaves a gap"]);
    refused_gguf("wraps", &at(u64::MAX - 31), &["b.weight: ", "leaves a gap"]);
    let order = with(|b| b.tensors.swap(0, 1));
    refused_gguf("other order", &order, &["b.weight: its data is at 768", "which ends at 0"]);
    let bytes = good().bytes();
    refused_gguf("one byte short", &bytes[..bytes.len() - 1], &["c: its data ends at byte", "it is cut short"]);
    refused_gguf("no data", &good().header(), &["a.weight: its data ends at byte"]);
    refused_gguf(
        "two files in one",
        &[&bytes[..], &bytes[..]].concat(),
        &["end of file: ", "bytes follow the last tensor"],
    );
    refused_gguf(
        "a byte more",
        &[&bytes[..], &[0; 22], &[7]].concat(),
        &["end of file: 1 bytes follow the last tensor"],
    );
    refused_gguf("zeros and a byte", &[&bytes[..], &[0; 4096], &[7]].concat(), &["bytes follow the last tensor"]);
    // Some tools fill the last block of a disk with zeros; so many are none of these.
    for zeros in [22, 23, 4096, 1 << 20] {
        let filled = [&bytes[..], &vec![0; zeros]].concat();
        assert_eq!(parse_gguf(&filled).unwrap().tensors, parse_gguf(&bytes).unwrap().tensors, "{zeros} zeros");
    }
    refused_gguf("17 MiB of zeros", &[&bytes[..], &vec![0; 17 << 20]].concat(), &["bytes follow the last tensor"]);
    // Alignment moves all of it.
    let aligned = |alignment: u32, offsets: [u64; 2], data| {
        with(|b| {
            b.keys.push(key("general.alignment", 4, alignment.to_le_bytes()));
            (b.tensors[1].offset, b.tensors[2].offset) = (offsets[0], offsets[1]);
            (b.alignment, b.data) = (alignment as usize, data);
        })
    };
    for (alignment, offsets, data) in
        [(8, [768, 840], 850), (4096, [4096, 8192], 8202), (65_536, [65_536, 131_072], 131_082)]
    {
        let bytes = aligned(alignment, offsets, data);
        let read = parse_gguf(&bytes).unwrap();
        assert!(read.tensors.iter().all(|t| t.offset % u64::from(alignment) == 0));
        assert_in_file(&read.tensors, bytes.len());
    }
    refused_gguf(
        "offsets of another alignment",
        &aligned(64, [768, 864], 900),
        &["c: its data is at 864", "overlaps the tensor before it, which ends at 896"],
    );
}

#[test]
fn important_messages_in_full() {
    let bytes = good().bytes();
    let data = bytes.len() - 874;
    let cases: Vec<(Vec<u8>, String)> = vec![
        (vec![], "model.gguf: magic: not a model file: it is empty (at byte 0)".into()),
        (
            b"version https://git-lfs.github.com/spec/v1\n".into(),
            "model.gguf: magic: not a model file: it is a git-LFS pointer to one, run: git lfs pull (at byte 0)".into(),
        ),
        (
            bytes[..bytes.len() - 1].into(),
            format!(
                "model.gguf: c: its data ends at byte {}, but the file ends at {}: it is cut short, download or copy it \
                 again (at byte {})",
                data + 874,
                data + 873,
                // Its entry: name, one dimension, type and offset.
                good().header().len() - (9 + 4 + 8 + 4 + 8)
            ),
        ),
        (
            with_tensor(|t| t.kind = 17),
            format!(
                "model.gguf: b.weight: is stored as IQ2_XS, which is not supported: convert the model to F16, BF16, Q8_0, a 4- or \
                 5-bit type (Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, IQ4_XS, MXFP4) or a K quant (Q2_K to Q6_K) (at byte {})",
                good().header().len() - (9 + 4 + 8 + 4 + 8) - (4 + 8)
            ),
        ),
        (
            [&b"GGUF\x03\0\0\0"[..], &u64::MAX.to_le_bytes(), &[0; 8]].concat(),
            "model.gguf: tensor count: says 18446744073709551615, but the 8 bytes that follow can hold at most 0: the file is \
             cut short or corrupt (at byte 8)"
                .into(),
        ),
    ];
    for (bytes, expected) in cases {
        assert_eq!(message(parse_gguf(&bytes), &expected), expected);
    }
    let metadata = parse_gguf(&with_key("llama.rope.dimension_count", 5, (-1i32).to_le_bytes())).unwrap().metadata;
    let at = metadata.offset("llama.rope.dimension_count").unwrap();
    assert_eq!(
        metadata.u32("llama.rope.dimension_count").unwrap_err().to_string(),
        format!(
            "model.gguf: llama.rope.dimension_count: is the i32 -1, expected a whole number from 0 to 4294967295: convert the \
             model again (at byte {at})"
        )
    );
}

#[test]
fn many_small_entries_take_linear_time() {
    let keys = with(|b| b.keys = (0..200_000).map(|i| key(format!("k{i}"), 0, [1])).collect());
    let tensors = with(|b| {
        b.tensors = (0..100_000).map(|i| tensor(&format!("t{i}"), &[1], 0, 32 * i)).collect();
        b.data = 32 * 100_000;
    });
    for (bytes, what) in [(keys, "keys"), (tensors, "tensors")] {
        let start = Instant::now();
        let (read, peak) = measured(|| parse_gguf(&bytes).unwrap());
        assert!(start.elapsed() < Duration::from_secs(1), "{what}: {:?}", start.elapsed());
        assert!(peak <= allowed(bytes.len()), "{what}: {peak} bytes of memory for a file of {}", bytes.len());
        assert_eq!(
            read.metadata.iter().count().max(read.tensors.len()),
            if what == "keys" { 200_000 } else { 100_000 }
        );
    }
}

/// A header longer than the limit is refused although the file is long enough for it.
#[test]
fn a_header_without_end_is_refused_at_its_limit() {
    let head =
        [&b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0"[..], &key("k", 8, (200u64 << 20).to_le_bytes())].concat();
    let mut bytes = vec![b' '; head.len() + (200 << 20)];
    bytes[..head.len()].copy_from_slice(&head);
    let (parsed, peak) = measured(|| parse_gguf(&bytes));
    let message = message(parsed, "200 MiB of string");
    assert!(message.contains("k: needs 209715200 bytes, which ends past 128 MiB, the longest header"), "{message}");
    assert!(peak < 64 << 10, "{peak} bytes");
}
