//! A GGUF's header: what it says about itself, and where its tensors are.

use super::metadata::{Entry, Metadata, Value};
use super::reader::{Reader, cut_short};
use super::tensors::{MIN_TENSOR_BYTES, Record, tensor_records};
use crate::error::{Error, Result};
use crate::formats::{TensorInfo, other_file};
use std::path::Path;

// Numbers are copied out of the file as they lie there.
const _: () = assert!(cfg!(target_endian = "little"), "GGUF files are little endian, and so must the machine be");

/// The specification's limit for a key.
const MAX_KEY_BYTES: u64 = 65_535;
/// Without `general.alignment`, by the specification.
const DEFAULT_ALIGNMENT: u32 = 32;
/// Multiples of 8 by the specification; above 64 KiB, the largest page of any machine, there is no use for it.
const ALIGNMENTS: std::ops::RangeInclusive<u32> = 8..=65_536;
/// Most zeros behind the last tensor: more than any disk's block, and read in some milliseconds.
const MAX_FILLING: usize = 16 << 20;
/// The shortest key: length, one character, type, a value of one byte.
const MIN_KEY_BYTES: u64 = 8 + 1 + 4 + 1;

/// What a GGUF file says about itself; the weights stay in the file.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// The file's version, 2 or 3.
    pub version: u32,
    /// Made by PowerInfer's converters (magic `PWRI`): the model comes with activation predictors.
    pub powerinfer: bool,
    /// Its keys and values.
    pub metadata: Metadata,
    /// Its tensors, in file order.
    pub tensors: Vec<TensorInfo>,
}

/// Reads a file's header and checks that every tensor's data is in the file. `path` is for messages only.
pub fn parse(bytes: &[u8], path: &Path) -> Result<Gguf> {
    let (version, powerinfer) = magic_and_version(bytes, path)?;
    let mut r = Reader::new(bytes, path);
    let tensor_count = r.count(&"tensor count", MIN_TENSOR_BYTES)?;
    let key_count = r.count(&"key count", MIN_KEY_BYTES)?;
    let metadata = metadata(&mut r, key_count)?;
    let alignment = alignment(&metadata)?;
    let records = tensor_records(&mut r, tensor_count, powerinfer)?;
    let tensors = place(records, r.at as u64, alignment, bytes, path)?;
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

fn metadata(r: &mut Reader, count: u64) -> Result<Metadata> {
    let mut entries = Vec::with_capacity(count as usize);
    for i in 0..count {
        let offset = r.at as u64;
        let key = r.name(&format_args!("metadata key {} of {count}", i + 1), MAX_KEY_BYTES)?.to_owned();
        let value = r.value(&key)?;
        entries.push(Entry { key, offset, value });
    }
    Metadata::new(entries, r.path)
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

/// Makes offsets count from the start of the file. The tensors must follow one another in file order, each padded to the alignment, as
/// llama.cpp requires too: then none overlaps another and no byte is unaccounted for.
fn place(records: Vec<Record>, header: u64, alignment: u32, bytes: &[u8], path: &Path) -> Result<Vec<TensorInfo>> {
    let (alignment, file) = (alignment as u64, bytes.len() as u64);
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
    check_end(bytes, next, path)?;
    Ok(tensors)
}

/// Checks what stands behind the last tensor, from byte `end` on: nothing, or zeros that fill a block of some disk. An interrupted download
/// that was appended to leaves a whole file's worth of plausible weights and a wrong length; the length is the only sign of it.
fn check_end(bytes: &[u8], end: u64, path: &Path) -> Result<()> {
    let rest = bytes.get(end as usize..).unwrap_or_default();
    if rest.len() <= MAX_FILLING && rest.iter().all(|&byte| byte == 0) {
        return Ok(());
    }
    let (what, most) = (rest.len(), MAX_FILLING >> 20);
    let reason = format!(
        "{what} bytes follow the last tensor, and are not zeros that fill up to {most} MiB: the file was damaged, download or copy it again"
    );
    Err(Error::bad_at(path, "end of file", end, reason))
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
                crate::formats::blocks::dequantize(dtype, data, &mut out);
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
