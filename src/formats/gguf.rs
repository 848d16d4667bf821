//! Tensors and metadata of a GGUF file, versions 2 and 3, PowerInfer's variant (magic `PWRI`) too.
//!
//! ```text
//! magic "GGUF" | version u32 | tensor count u64 | key count u64
//! key count    x  key string | type u32 | value
//! tensor count x  name string | dimension count u32 | dimensions u64, fastest first | type u32 | offset u64
//! padding to general.alignment, then the tensors' data, each padded to it
//! ```
//!
//! A string is a u64 length and its bytes. Everything is little endian. The layout is ggml/docs/gguf.md of llama.cpp.

use super::{DType, TensorInfo, other_file};
use crate::error::{Error, Result};
use bytemuck::Pod;
use std::fmt::Display;
use std::path::{Path, PathBuf};

// Numbers are copied out of the file as they lie there.
const _: () = assert!(cfg!(target_endian = "little"), "GGUF files are little endian, and so must the machine be");

/// Bytes of metadata and tensor table. The largest vocabularies of today (262,000 tokens with their merges) take about
/// 20 MB; what is read is at most seven times larger in memory, so this limit is what bounds a hostile file's cost.
const LONGEST_HEADER: usize = 128 << 20;
/// The specification's limit for a key.
const LONGEST_KEY: u64 = 65_535;
/// ggml's own limit (`GGML_MAX_NAME` is 64 with its NUL): no other program could load a longer one either.
const LONGEST_NAME: u64 = 63;
/// ggml's tensors have four dimensions.
const MOST_DIMS: u32 = 4;
/// Without `general.alignment`, by the specification.
const DEFAULT_ALIGNMENT: u32 = 32;
/// Multiples of 8 by the specification; above 64 KiB, the largest page of any machine, there is no use for it.
const ALIGNMENTS: std::ops::RangeInclusive<u32> = 8..=65_536;
/// The shortest key: length, one character, type, a value of one byte.
const LEAST_KEY_BYTES: u64 = 8 + 1 + 4 + 1;
/// The shortest tensor entry: length, one character, dimension count, one dimension, type, offset.
const LEAST_TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;
/// The shortest string: its length.
const LEAST_STRING_BYTES: u64 = 8;

/// What a GGUF file says about itself; the weights stay in the file.
#[derive(Clone, Debug)]
pub struct Gguf {
    pub version: u32,
    /// Made by PowerInfer's converters (magic `PWRI`): the model comes with activation predictors.
    pub powerinfer: bool,
    pub metadata: Metadata,
    /// In file order.
    pub tensors: Vec<TensorInfo>,
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of one type; arrays of arrays are in no model and refused.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    Str(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// The keys of a file. A getter answers `None` for a key that is not there and fails for one of another type.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    path: PathBuf,
    entries: Vec<Entry>,
    /// Indices of `entries`, by key.
    by_key: Vec<u32>,
}

#[derive(Clone, Debug)]
struct Entry {
    key: String,
    /// Where the key begins in the file.
    offset: u64,
    value: Value,
}

/// Reads a file's header and checks that every tensor's data is in the file. `path` is for messages only.
pub fn parse(bytes: &[u8], path: &Path) -> Result<Gguf> {
    let (version, powerinfer) = magic_and_version(bytes, path)?;
    let header = &bytes[..bytes.len().min(LONGEST_HEADER)];
    let mut r = Reader { bytes: header, at: 8, cut: header.len() < bytes.len(), path };
    let tensor_count = r.count(&"tensor count", LEAST_TENSOR_BYTES)?;
    let key_count = r.count(&"key count", LEAST_KEY_BYTES)?;
    let metadata = metadata(&mut r, key_count)?;
    let alignment = alignment(&metadata)?;
    let records = tensor_records(&mut r, tensor_count, powerinfer)?;
    let tensors = place(records, r.at as u64, alignment, bytes.len() as u64, path)?;
    Ok(Gguf { version, powerinfer, metadata, tensors })
}

fn magic_and_version(bytes: &[u8], path: &Path) -> Result<(u32, bool)> {
    let not_a_model = |why: String| Err(Error::bad_at(path, "magic", 0, why));
    let powerinfer = match bytes.get(..4) {
        Some(b"GGUF") => false,
        Some(b"PWRI") => true,
        _ => {
            return not_a_model(match other_file(bytes) {
                Some(other) => format!("not a model file: {other}"),
                None if bytes.is_empty() => "not a model file: it is empty".into(),
                None if bytes.len() < 4 => format!("not a model file: it has only {} bytes", bytes.len()),
                None if bytes.get(8) == Some(&b'{') => {
                    "not a GGUF file, but a safetensors one: give its directory".into()
                }
                None => format!("not a model file: it begins with \"{}\", not with GGUF", bytes[..4].escape_ascii()),
            });
        }
    };
    let Some(version) = bytes.get(4..8) else {
        return Err(Error::bad_at(path, "version", 4, cut_short(4, bytes.len() as u64 - 4)));
    };
    let version: [u8; 4] = version.try_into().unwrap();
    match u32::from_le_bytes(version) {
        known @ (2 | 3) => Ok((known, powerinfer)),
        1 => Err(Error::bad_at(
            path,
            "version",
            4,
            "GGUF version 1 (August 2023) is not supported, only 2 and 3: convert the original model again",
        )),
        _ if (1..=0xffff).contains(&u32::from_be_bytes(version)) => Err(Error::bad_at(
            path,
            "version",
            4,
            "a big-endian GGUF file, only little-endian ones are supported: download or convert the little-endian one",
        )),
        other => Err(Error::bad_at(
            path,
            "version",
            4,
            format!("unknown GGUF version {other}, only 2 and 3 are supported: the file is corrupt or too new"),
        )),
    }
}

fn cut_short(needed: u64, left: u64) -> String {
    format!("needs {needed} bytes, but the file has only {left} more: it is cut short or corrupt, download it again")
}

/// A position in the header. Every method checks against the bytes that are left before it takes or allocates.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// `bytes` ends at [`LONGEST_HEADER`], not at the file's end.
    cut: bool,
    path: &'a Path,
}

impl<'a> Reader<'a> {
    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn bad(&self, field: &dyn Display, at: usize, reason: impl Into<String>) -> Error {
        Error::bad_at(self.path, field.to_string(), at as u64, reason)
    }

    fn too_short(&self, field: &dyn Display, needed: u64) -> Error {
        let reason = match self.cut {
            true => format!("needs {needed} bytes, which ends past {} MiB, the longest header", LONGEST_HEADER >> 20),
            false => cut_short(needed, self.left()),
        };
        self.bad(field, self.at, reason)
    }

    fn take(&mut self, n: u64, field: &dyn Display) -> Result<&'a [u8]> {
        if n > self.left() {
            return Err(self.too_short(field, n));
        }
        let taken = &self.bytes[self.at..self.at + n as usize];
        self.at += n as usize;
        Ok(taken)
    }

    fn number<T: Pod>(&mut self, field: &dyn Display) -> Result<T> {
        Ok(bytemuck::pod_read_unaligned(self.take(size_of::<T>() as u64, field)?))
    }

    /// A count of things that take at least `least` bytes each, refused where that many cannot follow: a vector of
    /// this length may be allocated.
    fn count(&mut self, field: &dyn Display, least: u64) -> Result<u64> {
        let at = self.at;
        let n: u64 = self.number(field)?;
        self.fits(n, field, least, at)?;
        Ok(n)
    }

    fn fits(&self, n: u64, field: &dyn Display, least: u64, at: usize) -> Result<()> {
        let most = self.left() / least;
        if n <= most {
            return Ok(());
        }
        let room = match self.cut {
            true => format!("a header of {} MiB, the longest,", LONGEST_HEADER >> 20),
            false => format!("the {} bytes that follow", self.left()),
        };
        Err(self.bad(
            field,
            at,
            format!("says {n}, but {room} can hold at most {most}: the file is cut short or corrupt"),
        ))
    }

    fn string(&mut self, field: &dyn Display) -> Result<&'a str> {
        let n = self.number(field)?;
        let at = self.at;
        let bytes = self.take(n, field)?;
        std::str::from_utf8(bytes)
            .map_err(|e| self.bad(field, at + e.valid_up_to(), "is not UTF-8: the file is corrupt"))
    }

    /// A key's or tensor's name.
    fn name(&mut self, field: &dyn Display, longest: u64) -> Result<&'a str> {
        let at = self.at;
        let n: u64 = self.number(field)?;
        if n == 0 || n > longest {
            return Err(self.bad(field, at, format!("has a name of {n} bytes, allowed are 1 to {longest}")));
        }
        self.at = at;
        let name = self.string(field)?;
        match name.bytes().position(|b| b.is_ascii_control()) {
            None => Ok(name),
            Some(i) => Err(self.bad(field, at + 8 + i, format!("has a control character in its name {name:?}"))),
        }
    }

    fn boolean(&mut self, field: &dyn Display) -> Result<bool> {
        match self.number::<u8>(field)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.bad(field, self.at - 1, format!("is a bool with value {other}, allowed are 0 and 1"))),
        }
    }

    fn numbers<T: Pod>(&mut self, n: u64, field: &dyn Display) -> Result<Vec<T>> {
        self.fits(n, field, size_of::<T>() as u64, self.at - 8)?;
        let bytes = self.take(n * size_of::<T>() as u64, field)?;
        let mut out = vec![T::zeroed(); n as usize];
        bytemuck::cast_slice_mut(&mut out).copy_from_slice(bytes);
        Ok(out)
    }

    fn array(&mut self, field: &dyn Display) -> Result<Array> {
        let at = self.at;
        let kind: u32 = self.number(field)?;
        let n: u64 = self.number(field)?;
        Ok(match kind {
            0 => Array::U8(self.numbers(n, field)?),
            1 => Array::I8(self.numbers(n, field)?),
            2 => Array::U16(self.numbers(n, field)?),
            3 => Array::I16(self.numbers(n, field)?),
            4 => Array::U32(self.numbers(n, field)?),
            5 => Array::I32(self.numbers(n, field)?),
            6 => Array::F32(self.numbers(n, field)?),
            7 => {
                self.fits(n, field, 1, self.at - 8)?;
                Array::Bool((0..n).map(|_| self.boolean(field)).collect::<Result<_>>()?)
            }
            8 => {
                self.fits(n, field, LEAST_STRING_BYTES, self.at - 8)?;
                let mut strings = Vec::with_capacity(n as usize);
                for i in 0..n {
                    strings.push(self.string(&format_args!("{field}[{i}]"))?.to_owned());
                }
                Array::Str(strings)
            }
            9 => return Err(self.bad(field, at, "is an array of arrays, which no model has: the file is corrupt")),
            10 => Array::U64(self.numbers(n, field)?),
            11 => Array::I64(self.numbers(n, field)?),
            12 => Array::F64(self.numbers(n, field)?),
            other => {
                return Err(self.bad(field, at, format!("is an array of the unknown type {other}, known are 0 to 12")));
            }
        })
    }

    fn value(&mut self, field: &dyn Display) -> Result<Value> {
        let at = self.at;
        Ok(match self.number::<u32>(field)? {
            0 => Value::U8(self.number(field)?),
            1 => Value::I8(self.number(field)?),
            2 => Value::U16(self.number(field)?),
            3 => Value::I16(self.number(field)?),
            4 => Value::U32(self.number(field)?),
            5 => Value::I32(self.number(field)?),
            6 => Value::F32(self.number(field)?),
            7 => Value::Bool(self.boolean(field)?),
            8 => Value::Str(self.string(field)?.to_owned()),
            9 => Value::Array(self.array(field)?),
            10 => Value::U64(self.number(field)?),
            11 => Value::I64(self.number(field)?),
            12 => Value::F64(self.number(field)?),
            other => return Err(self.bad(field, at, format!("has the unknown type {other}, known are 0 to 12"))),
        })
    }
}

fn metadata(r: &mut Reader, count: u64) -> Result<Metadata> {
    let mut entries = Vec::with_capacity(count as usize);
    for i in 0..count {
        let offset = r.at as u64;
        let key = r.name(&format_args!("metadata key {} of {count}", i + 1), LONGEST_KEY)?.to_owned();
        let value = r.value(&key)?;
        entries.push(Entry { key, offset, value });
    }
    // The header's limit holds the count far below 2^32.
    let mut by_key: Vec<u32> = (0..entries.len() as u32).collect();
    // Stable: of two equal keys, the second in the file comes second.
    by_key.sort_by(|&a, &b| entries[a as usize].key.cmp(&entries[b as usize].key));
    for pair in by_key.windows(2) {
        let [first, second] = [&entries[pair[0] as usize], &entries[pair[1] as usize]];
        if first.key == second.key {
            let reason = format!("the key is there twice, first at byte {}: the file is corrupt", first.offset);
            return Err(Error::bad_at(r.path, &second.key, second.offset, reason));
        }
    }
    Ok(Metadata { path: r.path.to_owned(), entries, by_key })
}

fn alignment(metadata: &Metadata) -> Result<u32> {
    let Some(entry) = metadata.entry("general.alignment") else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match entry.value {
        Value::U32(n) if n.is_power_of_two() && ALIGNMENTS.contains(&n) => Ok(n),
        _ => {
            let expected = format!("a u32 that is a power of two from {} to {}", ALIGNMENTS.start(), ALIGNMENTS.end());
            Err(metadata.wrong(entry, &expected))
        }
    }
}

/// A tensor as its entry says it: `info.offset` counts from the start of the data.
struct Record {
    info: TensorInfo,
    /// Where the entry begins in the file.
    at: u64,
}

fn tensor_records(r: &mut Reader, count: u64, powerinfer: bool) -> Result<Vec<Record>> {
    // Again, now that the metadata has been read: fewer bytes are left.
    r.fits(count, &"tensor count", LEAST_TENSOR_BYTES, 8)?;
    let mut records: Vec<Record> = Vec::with_capacity(count as usize);
    for i in 0..count {
        let at = r.at;
        let name = r.name(&format_args!("tensor {} of {count}", i + 1), LONGEST_NAME)?;
        records.push(Record { info: tensor_record(r, name, powerinfer)?, at: at as u64 });
    }
    let mut by_name: Vec<&Record> = records.iter().collect();
    by_name.sort_by(|a, b| a.info.name.cmp(&b.info.name));
    for pair in by_name.windows(2) {
        if pair[0].info.name == pair[1].info.name {
            let reason = format!("the tensor is there twice, first at byte {}: the file is corrupt", pair[0].at);
            return Err(Error::bad_at(r.path, &pair[1].info.name, pair[1].at, reason));
        }
    }
    Ok(records)
}

fn tensor_record(r: &mut Reader, name: &str, powerinfer: bool) -> Result<TensorInfo> {
    let at = r.at;
    let dims: u32 = r.number(&name)?;
    if dims == 0 || dims > MOST_DIMS {
        return Err(r.bad(&name, at, format!("has {dims} dimensions, allowed are 1 to {MOST_DIMS}")));
    }
    let shape_at = r.at;
    let mut ne = [1u64; MOST_DIMS as usize];
    for dim in &mut ne[..dims as usize] {
        *dim = r.number(&name)?;
    }
    let ne = &ne[..dims as usize];
    let type_at = r.at;
    let id: u32 = r.number(&name)?;
    let dtype = dtype(id, powerinfer).map_err(|reason| r.bad(&name, type_at, reason))?;
    let bytes = tensor_bytes(ne, dtype).map_err(|reason| r.bad(&name, shape_at, reason))?;
    let offset = r.number(&name)?;
    let shape = ne.iter().rev().map(|&n| n as usize).collect();
    Ok(TensorInfo { name: name.to_owned(), dtype, shape, offset, bytes })
}

/// Bytes of a tensor with dimensions `ne`, fastest first.
fn tensor_bytes(ne: &[u64], dtype: DType) -> Result<u64, String> {
    if ne.contains(&0) {
        return Err(format!("has the shape {ne:?} with no numbers in it"));
    }
    let block = dtype.block_len() as u64;
    if !ne[0].is_multiple_of(block) {
        return Err(format!("has rows of {} numbers, but {} stores blocks of {block}", ne[0], dtype.name()));
    }
    // Signed 64-bit sizes are what every other reader counts with.
    let sizes = ne[1..].iter().try_fold(ne[0] / block, |product, &n| product.checked_mul(n));
    let bytes = sizes.and_then(|blocks| blocks.checked_mul(dtype.block_bytes() as u64));
    bytes
        .filter(|&n| n <= i64::MAX as u64)
        .ok_or_else(|| format!("has the impossible shape {ne:?}: the file is corrupt"))
}

/// The types that this program reads, by ggml's number.
fn dtype(id: u32, powerinfer: bool) -> Result<DType, String> {
    match id {
        0 => return Ok(DType::F32),
        1 => return Ok(DType::F16),
        2 => return Ok(DType::Q4_0),
        8 => return Ok(DType::Q8_0),
        12 => return Ok(DType::Q4_K),
        13 => return Ok(DType::Q5_K),
        14 => return Ok(DType::Q6_K),
        30 => return Ok(DType::BF16),
        _ => {}
    }
    Err(match other_type(id, powerinfer) {
        Some(name @ ("I8" | "I16" | "I32" | "I64")) => {
            format!(
                "holds {name} numbers, which no weights are: give the model file, not a PowerInfer index made from it"
            )
        }
        Some(name) => {
            format!(
                "is stored as {name}, which is not supported: convert the model to F16, Q8_0, Q4_0 or a K quant (Q4_K to Q6_K)"
            )
        }
        None => format!("has the unknown type {id}: the file is corrupt or too new"),
    })
}

/// Names of ggml's other types (ggml.h, 2026-08), for messages.
fn other_type(id: u32, powerinfer: bool) -> Option<&'static str> {
    Some(match id {
        // PowerInfer left llama.cpp in October 2023, before the IQ types took these numbers.
        16 if powerinfer => "I8",
        17 if powerinfer => "I16",
        18 if powerinfer => "I32",
        3 => "Q4_1",
        4 => "Q4_2 (removed from ggml in 2023)",
        5 => "Q4_3 (removed from ggml in 2023)",
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        31..=33 => "Q4_0 in a repacked form (removed from ggml in 2024)",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36..=38 => "IQ4_NL in a repacked form (removed from ggml in 2024)",
        39 => "MXFP4",
        40 => "NVFP4",
        41 => "Q1_0",
        42 => "Q2_0",
        _ => return None,
    })
}

/// Makes offsets absolute. The tensors must follow one another in file order, each padded to the alignment, as
/// llama.cpp requires too: then none overlaps another and no byte is unaccounted for.
fn place(records: Vec<Record>, header: u64, alignment: u32, file: u64, path: &Path) -> Result<Vec<TensorInfo>> {
    let alignment = alignment as u64;
    let data = header.next_multiple_of(alignment);
    let mut next = data;
    let mut tensors = Vec::with_capacity(records.len());
    for Record { mut info, at } in records {
        let bad = |reason: String| Err(Error::bad_at(path, &info.name, at, reason));
        // `next` is within a file that was measured, plus padding: no sum of it with `bytes` (below 2^63) wraps.
        let expected = next - data;
        if info.offset != expected {
            let what = if info.offset < expected { "overlaps the tensor before it" } else { "leaves a gap before it" };
            return bad(format!(
                "its data is at {} of the data section and {what}, which ends at {expected}",
                info.offset
            ));
        }
        let end = next + info.bytes;
        if end > file {
            return bad(format!(
                "its data ends at byte {end}, but the file ends at {file}: it is cut short, download or copy it again"
            ));
        }
        info.offset = next;
        next = end.next_multiple_of(alignment);
        tensors.push(info);
    }
    // An interrupted download that was appended to leaves a whole file's worth of plausible weights and a wrong length;
    // the length is the only sign of it.
    if file > next {
        let reason =
            format!("{} bytes follow the last tensor: the file was damaged, download or copy it again", file - next);
        return Err(Error::bad_at(path, "end of file", next, reason));
    }
    Ok(tensors)
}

impl Metadata {
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entry(key).map(|e| &e.value)
    }

    /// In file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|e| (e.key.as_str(), &e.value))
    }

    /// Where a key begins in the file, for messages about what its value means.
    pub fn offset(&self, key: &str) -> Option<u64> {
        self.entry(key).map(|e| e.offset)
    }

    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", |v| match v {
            Value::Str(s) => Some(s.as_str()),
            _ => None,
        })
    }

    /// Any integer type whose value fits.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "a whole number from 0 to 4294967295", |v| match *v {
            Value::U8(n) => Some(n.into()),
            Value::I8(n) => n.try_into().ok(),
            Value::U16(n) => Some(n.into()),
            Value::I16(n) => n.try_into().ok(),
            Value::U32(n) => Some(n),
            Value::I32(n) => n.try_into().ok(),
            Value::U64(n) => n.try_into().ok(),
            Value::I64(n) => n.try_into().ok(),
            Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::Str(_) | Value::Array(_) => None,
        })
    }

    /// An f32 or f64; NaN and infinities are the caller's to judge.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        self.typed(key, "a floating point number", |v| match *v {
            Value::F32(x) => Some(x),
            Value::F64(x) => Some(x as f32),
            _ => None,
        })
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a bool", |v| match *v {
            Value::Bool(b) => Some(b),
            _ => None,
        })
    }

    pub fn strings(&self, key: &str) -> Result<Option<&[String]>> {
        self.typed(key, "an array of strings", |v| match v {
            Value::Array(Array::Str(s)) => Some(s.as_slice()),
            _ => None,
        })
    }

    pub fn f32s(&self, key: &str) -> Result<Option<&[f32]>> {
        self.typed(key, "an array of f32", |v| match v {
            Value::Array(Array::F32(x)) => Some(x.as_slice()),
            _ => None,
        })
    }

    /// An array of i32, or of u32 below 2^31: token types are written as either.
    pub fn i32s(&self, key: &str) -> Result<Option<&[i32]>> {
        self.typed(key, "an array of i32", |v| match v {
            Value::Array(Array::I32(x)) => Some(x.as_slice()),
            Value::Array(Array::U32(x)) if x.iter().all(|&n| n <= i32::MAX as u32) => Some(bytemuck::cast_slice(x)),
            _ => None,
        })
    }

    fn entry(&self, key: &str) -> Option<&Entry> {
        let found = self.by_key.binary_search_by(|&i| self.entries[i as usize].key.as_str().cmp(key));
        found.ok().map(|i| &self.entries[self.by_key[i] as usize])
    }

    fn typed<'a, T>(&'a self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(entry) = self.entry(key) else { return Ok(None) };
        read(&entry.value).map(Some).ok_or_else(|| self.wrong(entry, expected))
    }

    fn wrong(&self, entry: &Entry, expected: &str) -> Error {
        let reason = format!("is {}, expected {expected}: convert the model again", describe(&entry.value));
        Error::bad_at(&self.path, &entry.key, entry.offset, reason)
    }
}

/// A value's type and, where it is short, the value.
fn describe(value: &Value) -> String {
    match value {
        Value::U8(n) => format!("the u8 {n}"),
        Value::I8(n) => format!("the i8 {n}"),
        Value::U16(n) => format!("the u16 {n}"),
        Value::I16(n) => format!("the i16 {n}"),
        Value::U32(n) => format!("the u32 {n}"),
        Value::I32(n) => format!("the i32 {n}"),
        Value::F32(x) => format!("the f32 {x}"),
        Value::Bool(b) => format!("the bool {b}"),
        Value::Str(_) => "a string".into(),
        Value::U64(n) => format!("the u64 {n}"),
        Value::I64(n) => format!("the i64 {n}"),
        Value::F64(x) => format!("the f64 {x}"),
        Value::Array(array) => {
            let (n, of) = match array {
                Array::U8(v) => (v.len(), "u8"),
                Array::I8(v) => (v.len(), "i8"),
                Array::U16(v) => (v.len(), "u16"),
                Array::I16(v) => (v.len(), "i16"),
                Array::U32(v) => (v.len(), "u32"),
                Array::I32(v) => (v.len(), "i32"),
                Array::F32(v) => (v.len(), "f32"),
                Array::Bool(v) => (v.len(), "bool"),
                Array::Str(v) => (v.len(), "strings"),
                Array::U64(v) => (v.len(), "u64"),
                Array::I64(v) => (v.len(), "i64"),
                Array::F64(v) => (v.len(), "f64"),
            };
            format!("an array of {n} {of}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::MappedFile;

    fn fixture(name: &str) -> (MappedFile, Gguf) {
        let file = MappedFile::open(&Path::new("tests/fixtures/models").join(name)).unwrap();
        let gguf = parse(file.bytes(), &file.path).unwrap();
        (file, gguf)
    }

    #[test]
    fn a_converted_model_has_the_shapes_and_bytes_of_the_original() {
        let (file, gguf) = fixture("llama.gguf");
        assert!(!gguf.powerinfer);
        assert_eq!(gguf.version, 3);
        let original = crate::formats::safetensors::open_dir(Path::new("tests/fixtures/models/llama")).unwrap();
        let mut compared = 0;
        for (ours, theirs) in [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight"),
            ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        ] {
            let ours = gguf.tensors.iter().find(|t| t.name == ours).unwrap();
            let theirs = original.get(theirs).unwrap();
            assert_eq!(ours.shape, theirs.info.shape, "{}", ours.name);
            let data = &file.bytes()[ours.offset as usize..][..ours.bytes as usize];
            let numbers = |dtype, data, n| {
                let mut out = vec![0.0; n];
                crate::formats::quant::dequantize(dtype, data, &mut out);
                out
            };
            let n = ours.shape.iter().product();
            assert_eq!(numbers(ours.dtype, data, n), numbers(theirs.info.dtype, theirs.data, n), "{}", ours.name);
            compared += n;
        }
        assert!(compared > 1000);
    }

    #[test]
    fn powerinfer_files_say_so_by_their_magic() {
        let (_, gguf) = fixture("relullama.powerinfer.gguf");
        assert!(gguf.powerinfer);
        assert!(gguf.tensors.iter().any(|t| t.name == "blk.0.fc1.weight"));
        assert!(gguf.tensors.iter().any(|t| t.name == "blk.0.ffn_down_t.weight"));
    }

    #[test]
    fn keys_are_read_by_type() {
        let (file, gguf) = fixture("llama.gguf");
        let m = &gguf.metadata;
        assert_eq!(m.str("general.architecture").unwrap(), Some("llama"));
        assert!(m.u32("llama.block_count").unwrap().is_some_and(|n| n > 0));
        assert!(m.f32("llama.attention.layer_norm_rms_epsilon").unwrap().is_some_and(|x| x > 0.0 && x < 1e-3));
        assert_eq!(m.u32("no.such.key").unwrap(), None);
        let offset = m.offset("general.architecture").unwrap() as usize;
        assert_eq!(&file.bytes()[offset + 8..offset + 28], b"general.architecture");
        let message = m.u32("general.architecture").unwrap_err().to_string();
        assert!(
            message.contains("llama.gguf: general.architecture: is a string, expected a whole number"),
            "{message}"
        );
    }
}
