//! What the targets of this program's own files share. Their readers take paths, so every run writes a file: with TMPDIR in
//! memory that is some ten microseconds.
#![allow(dead_code)]

use dynamicinfer::error::{BadFile, Error};
use serde_json::Value as Json;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use xxhash_rust::xxh3::xxh3_64;

/// A directory of this process. Left behind in the temporary directory.
pub static DIR: LazyLock<PathBuf> = LazyLock::new(|| tempfile::tempdir().unwrap().keep());

/// The folder of the seeds, also where the targets are compiled with the tests.
pub fn seeds() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if root.ends_with("fuzz") { root.join("seeds") } else { root.join("fuzz/seeds") }
}

/// A file of these bytes, until the next call.
pub fn file(bytes: &[u8]) -> PathBuf {
    let path = DIR.join("fuzz");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// What was accepted. A refusal is that of a bad file, which it names, and says what to do.
pub fn accepted<T>(read: Result<T, Error>, remedy: &str) -> Option<T> {
    let error = match read {
        Ok(read) => return Some(read),
        Err(error) => error,
    };
    let message = error.to_string();
    let Error::BadFile(bad) = error else { panic!("{message}") };
    let BadFile { path, .. } = *bad;
    assert!(
        message.starts_with(&format!("{}: ", path.display())) && !message.contains(char::is_control),
        "{message:?}"
    );
    assert!(message.contains(remedy), "{message}");
    None
}

/// What a file of ours would be if its lengths and checksums were right: a fuzzer cannot guess them. `change` may set fields of the
/// header, where that is JSON.
pub fn put_right(bytes: &[u8], magic: &[u8; 8], change: impl FnOnce(&mut Json)) -> Option<Vec<u8>> {
    let stated = u64::from_le_bytes(bytes.get(16..24)?.try_into().ok()?);
    let at = stated.clamp(64, bytes.len().max(64) as u64) as usize;
    let (data, header) = bytes.split_at_checked(at)?;
    let (mut right, mut header) = (data.to_vec(), header.to_vec());
    if let Ok(mut json) = serde_json::from_slice::<Json>(&header) {
        for section in json.get_mut("sections").and_then(Json::as_array_mut).into_iter().flatten() {
            sum_up(data, section);
        }
        if json.is_object() {
            change(&mut json);
        }
        header = json.to_string().into_bytes();
    }
    right.extend(&header);
    let len = right.len() as u64;
    right[..8].copy_from_slice(magic);
    right[8..12].copy_from_slice(&1u32.to_le_bytes());
    for (place, number) in [(16, at as u64), (24, header.len() as u64), (32, xxh3_64(&header)), (40, len)] {
        right[place..place + 8].copy_from_slice(&number.to_le_bytes());
    }
    Some(right)
}

/// Gives a section the checksum of its bytes, if they are there.
fn sum_up(data: &[u8], section: &mut Json) {
    let number = |field: &str| section[field].as_u64().and_then(|n| usize::try_from(n).ok());
    if let (Some(offset), Some(bytes)) = (number("offset"), number("bytes"))
        && let Some(found) = data.get(offset..).and_then(|data| data.get(..bytes))
    {
        section["checksum"] = format!("{:016x}", xxh3_64(found)).into();
    }
}

/// Both as the bytes are and put right.
pub fn both(bytes: &[u8], magic: &[u8; 8], change: impl FnOnce(&mut Json), check: impl Fn(&Path)) {
    check(&file(bytes));
    if let Some(right) = put_right(bytes, magic, change) {
        check(&file(&right));
    }
}
