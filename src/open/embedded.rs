//! What the program carries in itself: the demo model with its profile and predictors, written to the cache directory when they are first
//! asked for, and profiles of machines. So an installed program needs no checkout. The program passes the model in, because a library for
//! embedding should not be twelve megabytes larger.

use crate::error::{Error, Result};
use crate::formats::machine_profile::MachineProfile;
use crate::formats::temporary;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A file in the program: its path below a checkout, `assets/demo/config.json`, and its bytes.
pub type File = (&'static str, &'static [u8]);

static FILES: OnceLock<&'static [File]> = OnceLock::new();

macro_rules! machines {
    ($($name:literal)*) => {
        [$(($name, include_str!(concat!("../../profiles/machines/", $name, ".toml")))),*]
    };
}

/// The machines' profiles of `profiles/machines`, by name.
const MACHINES: [(&str, &str); 8] = machines!(
    "demo-pc" "dynamicinfer-pc-high" "dynamicinfer-pc-low" "powerinfer-pc-high" "powerinfer-pc-low" "rtx-2080ti" "rtx-3060-12gb"
    "rtx-4090"
);

/// Says what the program carries; the first call counts.
pub fn carry(files: &'static [File]) {
    let _ = FILES.set(files);
}

/// Whether the program carries this model.
pub fn has_model(name: &str) -> bool {
    let config = format!("assets/{name}/config.json");
    FILES.get().is_some_and(|files| files.iter().any(|(path, _)| *path == config))
}

/// The directory `assets` of what the program carries, if it was written to the cache directory before.
pub fn written() -> Option<PathBuf> {
    let (files, dir) = (FILES.get()?, dir()?);
    files.iter().all(|file| is_whole(file, &dir)).then(|| dir.join("assets"))
}

/// The directory `assets` of what the program carries, of which what is missing or cut is written to the cache directory; `None` for a program
/// that carries nothing.
///
/// # Errors
/// [`Error::Io`] where it cannot be written.
pub fn assets() -> Result<Option<PathBuf>> {
    let (Some(files), Some(dir)) = (FILES.get(), dir()) else { return Ok(None) };
    write(files, &dir)?;
    Ok(Some(dir.join("assets")))
}

/// Where the files are written: a directory of their own for other bytes.
fn dir() -> Option<PathBuf> {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for (path, bytes) in *FILES.get()? {
        hash.update(path.as_bytes());
        hash.update(bytes);
    }
    Some(crate::config::cache_dir()?.join("program").join(format!("{:016x}", hash.digest())))
}

/// Whether the file below `dir` is there with its length: one of an interrupted or full disk is shorter.
fn is_whole((path, bytes): &File, dir: &Path) -> bool {
    dir.join(path).metadata().is_ok_and(|meta| meta.is_file() && meta.len() == bytes.len() as u64)
}

/// Writes the files that are not whole below `dir`; each appears when all of it is on the disk.
fn write(files: &[File], dir: &Path) -> Result<()> {
    for file in files.iter().filter(|file| !is_whole(file, dir)) {
        let path = dir.join(file.0);
        let parent = path.parent().expect("it is below a directory");
        std::fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        temporary::write_whole(&path, file.1)?;
    }
    Ok(())
}

/// The machine's profile of this name that comes with the program.
pub fn machine(name: &str) -> Option<MachineProfile> {
    let (name, text) = MACHINES.iter().find(|(known, _)| *known == name)?;
    Some(MachineProfile::parse(text, name.as_ref()).expect("tests read all of them"))
}

/// Names of the machines whose profiles come with the program.
pub fn machines() -> impl Iterator<Item = &'static str> {
    MACHINES.iter().map(|(name, _)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the cache had under the right name was believed for ever.
    #[test]
    fn a_file_in_the_cache_that_was_cut_or_removed_is_written_anew_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let files: &[File] = &[("assets/demo/config.json", b"{\"a\": 1}"), ("assets/demo/weights", b"0123456789")];
        let weights = dir.path().join(files[1].0);
        let whole = || files.iter().all(|file| is_whole(file, dir.path()));
        for damage in [
            |_: &Path| (),
            |path: &Path| std::fs::write(path, "0123").unwrap(),
            |path: &Path| {
                std::fs::remove_file(path).unwrap();
            },
        ] {
            if weights.exists() {
                damage(&weights);
            }
            write(files, dir.path()).unwrap();
            assert!(whole() && std::fs::read(&weights).unwrap() == files[1].1);
        }
        assert_eq!(std::fs::read_dir(weights.parent().unwrap()).unwrap().count(), files.len());
        std::fs::write(&weights, "").unwrap();
        assert!(!whole());
    }

    #[test]
    fn every_machines_profile_of_the_checkout_is_in_the_program() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/machines");
        let mut files: Vec<String> = std::fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
            .collect();
        files.sort();
        assert!(machines().eq(files.iter().map(String::as_str)), "{files:?}");
        for name in machines() {
            assert_eq!(machine(name).unwrap().name, name);
        }
    }
}
