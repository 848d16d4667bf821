//! What the program carries in itself: the demo model with its profile and predictors, written to the cache directory when they are first
//! asked for, and profiles of machines. So a program that was installed somewhere needs no checkout. The model is handed in by the
//! program, because a library that somebody embeds should not be twelve megabytes larger.

use crate::error::{Error, Result};
use crate::formats::machine_profile::MachineProfile;
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
    Some(dir()?.join("assets")).filter(|assets| assets.is_dir())
}

/// The directory `assets` of what the program carries, which is written to the cache directory if it is not there; `None` for a program
/// that carries nothing.
///
/// # Errors
/// [`Error::Io`] where it cannot be written.
pub fn assets() -> Result<Option<PathBuf>> {
    let (Some(files), Some(dir)) = (FILES.get(), dir()) else { return Ok(None) };
    if !dir.is_dir() {
        write(files, &dir)?;
    }
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

/// Writes the files below `dir`, which appears when all of them are there.
fn write(files: &[File], dir: &Path) -> Result<()> {
    let unfinished = dir.with_extension(format!("{}.tmp", std::process::id()));
    for (path, bytes) in files {
        let path = unfinished.join(path);
        let parent = path.parent().expect("it is below a directory");
        std::fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        std::fs::write(&path, bytes).map_err(Error::io("write", &path))?;
    }
    match std::fs::rename(&unfinished, dir) {
        // Another process was faster.
        Err(_) if dir.is_dir() => {
            let _ = std::fs::remove_dir_all(&unfinished);
            Ok(())
        }
        done => done.map_err(Error::io("write", dir)),
    }
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
