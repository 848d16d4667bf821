//! Packed models with numbers that are wrong and checksums that are right.

use dynamicinfer::formats::neuron_store::NeuronStore;
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// A packed model with numbers of a section replaced, by their places, and with checksums that are right.
pub fn store_with(dir: &Path, store: &Path, section: &str, numbers: &[(usize, f32)]) -> PathBuf {
    let (mut bytes, opened) = (std::fs::read(store).unwrap(), NeuronStore::open(store).unwrap());
    let found = opened.section(section).unwrap_or_else(|| panic!("{section}"));
    let range = found.offset as usize..(found.offset + found.bytes) as usize;
    for (at, number) in numbers {
        bytes[range.start + 4 * at..][..4].copy_from_slice(&number.to_le_bytes());
    }
    let sum = format!("{:016x}", xxh3_64(&bytes[range]));
    let header_at = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) as usize;
    let mut header: Json = serde_json::from_slice(&bytes[header_at..]).unwrap();
    let mut sections = header["sections"].as_array_mut().unwrap().iter_mut();
    sections.find(|s| s["name"] == section).unwrap()["checksum"] = json!(sum);
    let header = header.to_string().into_bytes();
    bytes.truncate(header_at);
    bytes.extend(&header);
    let length = bytes.len() as u64;
    for (place, number) in [(24, header.len() as u64), (32, xxh3_64(&header)), (40, length)] {
        bytes[place..place + 8].copy_from_slice(&number.to_le_bytes());
    }
    let path = dir.join("changed.neurons");
    std::fs::write(&path, bytes).unwrap();
    path
}
