//! Fingerprints of large models that are read in place, remembered between runs: to compute one is to read all of it.

use super::described::Description;
use super::source::Source;
use crate::formats::{read_text, temporary};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Bytes from which on they are remembered: what is smaller is read in a tenth of a second, and no file of this size is written anew within a
/// tick of a file system's clock.
const MIN_BYTES: u64 = 256 << 20;

/// The fingerprint of a model that is read in place, computed when it is first asked for.
#[derive(Debug, Default)]
pub(super) struct Fingerprint {
    known: OnceLock<String>,
    /// Where those of large models are kept.
    pub kept_in: Option<PathBuf>,
}

impl Fingerprint {
    /// As [`Source::fingerprint`], computed once for large files that do not change.
    pub fn of(&self, source: &Source) -> &str {
        let dir = self.kept_in.as_ref().filter(|_| source.tensor_bytes() >= MIN_BYTES);
        self.known.get_or_init(|| dir.map_or_else(|| source.fingerprint(), |dir| remembered(dir, source)))
    }
}

/// From a file of `dir` or kept there: named by everything that tells these files, and what they are read as, from others.
fn remembered(dir: &Path, source: &Source) -> String {
    let shape = Description { name: String::new(), ..source.described.clone() };
    let files: Vec<String> = source.mapped().iter().map(|file| file.identity()).collect();
    let all = format!("1 {files:?} {}", serde_json::to_string(&shape).expect("plain data"));
    let path = dir.join(format!("{:032x}", xxhash_rust::xxh3::xxh3_128(all.as_bytes())));
    if let Ok(known) = read_text(&path)
        && known.len() == 32
        && known.bytes().all(|b| b.is_ascii_hexdigit())
    {
        return known;
    }
    let fingerprint = source.fingerprint();
    // Whether it can be kept decides nothing but the next start's time.
    if let Err(why) = fs::create_dir_all(dir)
        .map_err(crate::error::Error::io("create", dir))
        .and_then(|()| temporary::write_whole(&path, fingerprint.as_bytes()))
    {
        tracing::debug!("the fingerprint is not kept: {why}");
    }
    fingerprint
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_computed_once_and_again_when_the_file_changes() {
        let dir = tempfile::tempdir().unwrap();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/mixtral.gguf");
        let path = dir.path().join("m.gguf");
        let mut bytes = fs::read(fixture).unwrap();
        fs::write(&path, &bytes).unwrap();
        let kept = dir.path().join("kept");
        let ask = || remembered(&kept, &Source::open(&path, None).unwrap());
        let first = ask();
        assert_eq!(first, Source::open(&path, None).unwrap().fingerprint());
        // What is kept is believed.
        let file = fs::read_dir(&kept).unwrap().next().unwrap().unwrap().path();
        fs::write(&file, "0".repeat(32)).unwrap();
        assert_eq!(ask(), "0".repeat(32));
        fs::write(&file, "no fingerprint").unwrap();
        assert_eq!(ask(), first);
        // Another file, whose time and length may be the same.
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        let path = dir.path().join("n.gguf");
        fs::write(&path, &bytes).unwrap();
        let second = remembered(&kept, &Source::open(&path, None).unwrap());
        assert!(second != first && second != "0".repeat(32));
        assert_eq!(second, Source::open(&path, None).unwrap().fingerprint());
    }
}
