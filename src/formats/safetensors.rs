//! Tensors of safetensors files, and of a directory of them as Hugging Face lays it out.
//!
//! ```text
//! header length u64 | header, JSON | data
//! {"__metadata__": {string: string}, name: {"dtype": .., "shape": [..], "data_offsets": [begin, end]}, ..}
//! ```
//!
//! The offsets count from the data's first byte. Stricter than the reference reader, and as strict as its own
//! documentation: a key may not be there twice, and the data has no holes, no overlap and nothing behind it.

use super::{DType, MappedFile, TensorInfo, Tensors, other_file};
use crate::error::{Error, Result};
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

/// The reference implementation's limit; files of 300,000 tensors need 30 MB.
const MAX_HEADER: u64 = 100_000_000;
/// Weights have at most four dimensions; the rest is room for tensors that are skipped.
const MAX_DIMS: usize = 8;
/// A shard is an open map each, of the 65,530 that Linux gives a process; the largest models have about 200.
const MAX_SHARDS: usize = 4096;
/// Names longer than this are in no model.
const MAX_NAME: usize = 1024;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// How an entry's numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stored {
    Weights(DType),
    /// Integers and booleans, of so many bytes: position ids, counters and masks, never weights of a model.
    Skipped {
        name: &'static str,
        bytes: u64,
    },
}

/// One entry of the header, as it stands there.
struct Entry {
    name: String,
    stored: Stored,
    shape: Vec<u64>,
    begin: u64,
    end: u64,
}

/// The floating-point tensors of a file, in the order of their data. Integer tensors are checked and left out. `path`
/// is for messages only.
pub fn parse(bytes: &[u8], path: &Path) -> Result<Vec<TensorInfo>> {
    let (entries, data) = entries(bytes, path)?;
    Ok(weights(entries, data))
}

/// The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.
pub fn open_dir(dir: &Path) -> Result<Tensors> {
    let single = dir.join(SINGLE);
    if is_there(&single) {
        let file = MappedFile::open(&single)?;
        let infos = parse(file.bytes(), &single)?;
        let mut tensors = Tensors::default();
        tensors.add(file, infos)?;
        return Ok(tensors);
    }
    let index = dir.join(INDEX);
    if is_there(&index) {
        return open_shards(dir, &index);
    }
    Err(no_model(dir))
}

/// Whether something has this name. A link that leads nowhere counts: opening it then says why it cannot be read.
fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// The error for a directory without safetensors: it names what is there instead.
fn no_model(dir: &Path) -> Error {
    let listing = match std::fs::read_dir(dir) {
        Ok(listing) => listing,
        Err(e) => return Error::io("read the directory", dir)(e),
    };
    let mut names: Vec<String> = listing.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let first = |found: fn(&str) -> bool| names.iter().find(|n| found(n));
    let reason = if let Some(name) = first(|n| n.starts_with("pytorch_model") && n.contains(".bin")) {
        format!(
            "has only PyTorch's {name}, which is a program as much as a file and is not read: convert it to safetensors \
             (in Python: model.save_pretrained(DIR, safe_serialization=True))"
        )
    } else if let Some(name) = first(|n| n.ends_with(".gguf")) {
        format!("has no {SINGLE}; for its GGUF file, give {name} instead of the directory")
    } else if let Some(name) = first(|n| n.ends_with(".safetensors")) {
        format!("has {name}, but neither {SINGLE} nor {INDEX}: download the missing one")
    } else {
        format!("has neither {SINGLE} nor {INDEX}: give a directory that holds a model, or a .gguf file")
    };
    Error::bad(dir, "", reason)
}

fn open_shards(dir: &Path, index_path: &Path) -> Result<Tensors> {
    let index_file = MappedFile::open(index_path)?;
    let places = index(index_file.bytes(), index_path)?;
    let mut shards: Vec<&str> = places.values().map(String::as_str).collect();
    shards.sort_unstable();
    shards.dedup();
    if shards.len() > MAX_SHARDS {
        let reason = format!("names {} files, at most {MAX_SHARDS} are opened", shards.len());
        return Err(Error::bad(index_path, "weight_map", reason));
    }
    // All of them before the first is read: a missing one is the usual trouble, an unfinished download.
    if let Some(missing) = shards.iter().find(|shard| !is_there(&dir.join(shard))) {
        let reason = format!("names {missing}, which is not in the directory: download it");
        return Err(Error::bad(index_path, "weight_map", reason));
    }
    let mut missing: HashMap<&str, &str> = places.iter().map(|(name, shard)| (name.as_str(), shard.as_str())).collect();
    missing.retain(|name, _| is_parameter(name));
    let mut tensors = Tensors::default();
    for shard in shards {
        let path = dir.join(shard);
        let file = MappedFile::open(&path)?;
        let (entries, data) = entries(file.bytes(), &path)?;
        for entry in &entries {
            match places.get(&entry.name) {
                Some(place) if place != shard => {
                    let reason = format!("{INDEX} places this tensor in {place}: the files are not of one model");
                    return Err(Error::bad(&path, &entry.name, reason));
                }
                // transformers takes every tensor of a shard, listed or not.
                None if is_parameter(&entry.name) => {
                    let reason = format!("{INDEX} does not list this tensor; it is taken from here");
                    tracing::warn!("{}", Error::bad(&path, &entry.name, reason));
                }
                _ => {}
            }
        }
        for entry in &entries {
            missing.remove(entry.name.as_str());
        }
        tensors.add(file, weights(entries, data))?;
    }
    match missing.into_iter().min() {
        None => Ok(tensors),
        Some((name, shard)) => {
            let reason = format!("is said to be in {shard}, but is not: the files are not of one model");
            Err(Error::bad(index_path, name, reason))
        }
    }
}

/// Whether a tensor is a weight, and not a buffer like `rotary_emb.inv_freq`, which older exports list and do not store, or store and do
/// not list.
fn is_parameter(name: &str) -> bool {
    name.ends_with("weight") || name.ends_with("bias")
}

/// Which file holds which tensor.
fn index(bytes: &[u8], path: &Path) -> Result<HashMap<String, String>> {
    if bytes.len() as u64 > MAX_HEADER {
        return Err(Error::bad(
            path,
            "",
            format!("has {} bytes, the longest index allowed has {MAX_HEADER}", bytes.len()),
        ));
    }
    let at = At::default();
    let places = from_json(bytes, 0, path, &at, IndexSeed { at: &at })?;
    for (name, shard) in &places {
        let plain = !shard.is_empty() && !shard.starts_with('.') && !shard.contains(['/', '\\', '\0']);
        if !plain {
            return Err(Error::bad(path, name, format!("is said to be in {shard:?}, which is not a plain file name")));
        }
    }
    Ok(places)
}

fn weights(entries: Vec<Entry>, data: u64) -> Vec<TensorInfo> {
    let weight = |e: Entry| match e.stored {
        Stored::Skipped { .. } => None,
        Stored::Weights(dtype) => Some(TensorInfo {
            name: e.name,
            dtype,
            shape: e.shape.iter().map(|&n| n as usize).collect(),
            offset: data + e.begin,
            bytes: e.end - e.begin,
        }),
    };
    entries.into_iter().filter_map(weight).collect()
}

/// All entries, checked, in the order of their data, and where the data begins in the file.
fn entries(bytes: &[u8], path: &Path) -> Result<(Vec<Entry>, u64)> {
    let header = header(bytes, path)?;
    let at = At::default();
    let mut entries = from_json(header, 8, path, &at, HeaderSeed { at: &at })?;
    entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = entries.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(Error::bad(path, &pair[0].name, "the tensor is there twice: the file is corrupt"));
    }
    // No two valid entries begin at the same byte: tensors of no bytes are refused in `check_entry`.
    entries.sort_unstable_by_key(|e| e.begin);
    let data = 8 + header.len() as u64;
    let length = bytes.len() as u64 - data;
    let mut expected = 0;
    for entry in &entries {
        check_entry(entry).map_err(|reason| Error::bad(path, &entry.name, reason))?;
        if entry.begin != expected {
            let what = if entry.begin < expected { "overlaps another tensor's" } else { "leaves a hole before it" };
            let reason =
                format!("its data begins at {} and {what}, expected is {expected}: the file is corrupt", entry.begin);
            return Err(Error::bad_at(path, &entry.name, data + expected, reason));
        }
        if entry.end > length {
            let reason = format!(
                "its data ends at byte {}, but the file ends at {}: it is cut short, download or copy it again",
                data.saturating_add(entry.end),
                bytes.len()
            );
            return Err(Error::bad_at(path, &entry.name, data + entry.begin, reason));
        }
        expected = entry.end;
    }
    if length > expected {
        let reason = format!(
            "{} bytes follow the last tensor: the file was damaged, download or copy it again",
            length - expected
        );
        return Err(Error::bad_at(path, "end of file", data + expected, reason));
    }
    Ok((entries, data))
}

fn header<'a>(bytes: &'a [u8], path: &Path) -> Result<&'a [u8]> {
    let bad = |reason: String| {
        // Only once the header is known to be bad: one of 640 bytes begins as a Python pickle does.
        let reason = match other_file(bytes) {
            Some(other) => format!("not a safetensors file: {other}"),
            None if bytes.starts_with(b"GGUF") => "not a safetensors file, but a GGUF one: name it .gguf".into(),
            None => reason,
        };
        Err(Error::bad_at(path, "header length", 0, reason))
    };
    let Some(length) = bytes.first_chunk().map(|b| u64::from_le_bytes(*b)) else {
        return bad(format!("not a model file: it has only {} bytes", bytes.len()));
    };
    if length > MAX_HEADER {
        return bad(format!("is {length}, allowed are {MAX_HEADER}: not a safetensors file, or a corrupt one"));
    }
    match bytes[8..].get(..length as usize) {
        None => bad(format!(
            "is {length}, but the file has only {} more bytes: it is cut short or corrupt",
            bytes.len() - 8
        )),
        // The format's documentation: no white space before the brace.
        Some(header) if header.first() != Some(&b'{') => {
            bad("no { follows it, with which a header begins: not a safetensors file, or a corrupt one".into())
        }
        Some(header) => Ok(header),
    }
}

fn check_entry(entry: &Entry) -> Result<(), String> {
    let &Entry { stored, ref shape, begin, end, .. } = entry;
    if shape.contains(&0) {
        return Err(format!("has the shape {shape:?} with no numbers in it"));
    }
    let size = match stored {
        Stored::Weights(dtype) => dtype.block_bytes() as u64,
        Stored::Skipped { name, .. } if entry.name.ends_with("weight") => {
            return Err(format!(
                "is stored as {name}: the model is quantised by GPTQ, AWQ, bitsandbytes or the like, which is not supported; \
                 take the unquantised model, or a GGUF in Q8_0, Q4_0 or a K quant"
            ));
        }
        Stored::Skipped { bytes, .. } => bytes,
    };
    let Some(bytes) = shape.iter().try_fold(size, |product, &n| product.checked_mul(n)) else {
        return Err(format!("has the impossible shape {shape:?}: the file is corrupt"));
    };
    match end.checked_sub(begin) {
        None => Err(format!("has the data offsets [{begin}, {end}], the end before the begin: the file is corrupt")),
        Some(length) if length != bytes => {
            Err(format!("has {length} bytes of data, but its shape {shape:?} needs {bytes}: the file is corrupt"))
        }
        Some(_) => Ok(()),
    }
}

fn stored(dtype: &str) -> Result<Stored, String> {
    let skipped = |name, bytes| Ok(Stored::Skipped { name, bytes });
    match dtype {
        "F32" => Ok(Stored::Weights(DType::F32)),
        "F16" => Ok(Stored::Weights(DType::F16)),
        "BF16" => Ok(Stored::Weights(DType::BF16)),
        "BOOL" => skipped("BOOL", 1),
        "U8" => skipped("U8", 1),
        "I8" => skipped("I8", 1),
        "U16" => skipped("U16", 2),
        "I16" => skipped("I16", 2),
        "U32" => skipped("U32", 4),
        "I32" => skipped("I32", 4),
        "U64" => skipped("U64", 8),
        "I64" => skipped("I64", 8),
        "F64" | "C64" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" | "F6_E2M3" | "F6_E3M2"
        | "F4" => Err(format!("is stored as {dtype}, which is not supported: convert the model to F16, BF16 or F32")),
        _ => Err(format!("has the unknown dtype {dtype:?}: the file is corrupt or too new")),
    }
}

/// The name of the tensor or key that is being read, for messages.
type At = RefCell<String>;

/// Reads JSON that begins at byte `offset` of its file.
fn from_json<'a, S: DeserializeSeed<'a>>(
    json: &'a [u8],
    offset: u64,
    path: &Path,
    at: &At,
    seed: S,
) -> Result<S::Value> {
    let mut reader = serde_json::Deserializer::from_slice(json);
    let value = seed.deserialize(&mut reader).and_then(|value| reader.end().map(|()| value));
    value.map_err(|e| {
        let before = json.split_inclusive(|&b| b == b'\n').take(e.line().saturating_sub(1));
        let byte = before.map(<[u8]>::len).sum::<usize>() + e.column();
        let text = e.to_string();
        let reason = text.rsplit_once(" at line ").map_or(&*text, |(reason, _)| reason);
        Error::bad_at(path, at.take(), offset + byte as u64, format!("{reason}: the file is corrupt or cut short"))
    })
}

struct HeaderSeed<'a> {
    at: &'a At,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Vec<Entry>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Vec<Entry>, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Vec<Entry>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<Entry>, A::Error> {
        let mut entries = Vec::new();
        let mut metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            self.at.replace(name.clone());
            if name == "__metadata__" {
                if std::mem::replace(&mut metadata, true) {
                    return Err(A::Error::custom("the key is there twice"));
                }
                map.next_value_seed(MetadataSeed)?;
                continue;
            }
            if name.is_empty() || name.len() > MAX_NAME {
                let reason = format!("a tensor has a name of {} bytes, allowed are 1 to {MAX_NAME}", name.len());
                return Err(A::Error::custom(reason));
            }
            entries.push(map.next_value_seed(EntrySeed { name })?);
        }
        self.at.take();
        Ok(entries)
    }
}

/// `__metadata__`: checked, not kept; it says nothing that a model needs.
struct MetadataSeed;

impl<'de> DeserializeSeed<'de> for MetadataSeed {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut keys = HashSet::new();
        while let Some((key, _)) = map.next_entry::<String, String>()? {
            if let Some(key) = keys.replace(key) {
                return Err(A::Error::custom(format!("the key {key:?} is there twice")));
            }
        }
        Ok(())
    }
}

struct EntrySeed {
    name: String,
}

impl<'de> DeserializeSeed<'de> for EntrySeed {
    type Value = Entry;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Entry, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entry, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key::<String>()? {
            let again = match field.as_str() {
                "dtype" => dtype.replace(stored(&map.next_value::<String>()?).map_err(A::Error::custom)?).is_some(),
                "shape" => shape.replace(map.next_value_seed(ShapeSeed)?).is_some(),
                "data_offsets" => offsets.replace(map.next_value::<[u64; 2]>()?).is_some(),
                _ => return Err(A::Error::custom(format!("has the unknown field {field:?}"))),
            };
            if again {
                return Err(A::Error::custom(format!("has the field {field:?} twice")));
            }
        }
        let missing = |field| A::Error::custom(format!("has no {field}"));
        let [begin, end] = offsets.ok_or_else(|| missing("data_offsets"))?;
        Ok(Entry {
            name: self.name,
            stored: dtype.ok_or_else(|| missing("dtype"))?,
            shape: shape.ok_or_else(|| missing("shape"))?,
            begin,
            end,
        })
    }
}

struct ShapeSeed;

impl<'de> DeserializeSeed<'de> for ShapeSeed {
    type Value = Vec<u64>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Vec<u64>, D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ShapeSeed {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a shape")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let mut shape = Vec::new();
        while let Some(n) = seq.next_element()? {
            if shape.len() == MAX_DIMS {
                return Err(A::Error::custom(format!("has more than {MAX_DIMS} dimensions")));
            }
            shape.push(n);
        }
        Ok(shape)
    }
}

struct IndexSeed<'a> {
    at: &'a At,
}

impl<'de> DeserializeSeed<'de> for IndexSeed<'_> {
    type Value = HashMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for IndexSeed<'_> {
    type Value = HashMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object with a weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut places = None;
        while let Some(key) = map.next_key::<String>()? {
            self.at.replace(key.clone());
            if key != "weight_map" {
                // total_size and what else tools put there.
                map.next_value::<IgnoredAny>()?;
            } else if places.replace(map.next_value_seed(PlacesSeed { at: self.at })?).is_some() {
                return Err(A::Error::custom("the key is there twice"));
            }
        }
        places.ok_or_else(|| A::Error::custom("has no weight_map"))
    }
}

struct PlacesSeed<'a> {
    at: &'a At,
}

impl<'de> DeserializeSeed<'de> for PlacesSeed<'_> {
    type Value = HashMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for PlacesSeed<'_> {
    type Value = HashMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensor names and file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut places = HashMap::new();
        while let Some(name) = map.next_key::<String>()? {
            self.at.replace(name.clone());
            if places.insert(name, map.next_value::<String>()?).is_some() {
                return Err(A::Error::custom("the tensor is there twice"));
            }
        }
        Ok(places)
    }
}
