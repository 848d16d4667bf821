//! The packed models in the cache directory: which there are, what they are called, and what each was packed from.
//!
//! What a copy was packed from stands beside the copies, in `sources/STEM.json`: a store itself holds no path, so that it can be moved and
//! given away.

use crate::error::{Error, Result, printable};
use crate::formats::neuron_store::{EXTENSION, NeuronStore, SourceFile};
use crate::formats::rows::Quant;
use crate::formats::{read_text, temporary};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A packed model in the cache directory.
#[derive(Clone, Debug)]
pub struct Stored {
    /// What MODEL may be to mean it, and nothing else in the cache: its name, `NAME:TYPE` where two have that name, and the file's stem where
    /// two of them have one type.
    pub label: String,
    /// The model's own name; empty for a file that cannot be used.
    pub name: String,
    /// Type of its weights; `None` for a file that cannot be used.
    pub quant: Option<Quant>,
    /// Bytes of the file.
    pub bytes: u64,
    /// The file.
    pub path: PathBuf,
    /// The directory or file that it was packed from; `None` where that was not written down.
    pub source: Option<PathBuf>,
    /// Why it cannot be used; `None` if it can.
    pub error: Option<String>,
    /// Whether what is in the file is the reason; if not, the system has refused, and the file may be good.
    pub is_damaged: bool,
}

impl Stored {
    fn read(path: PathBuf) -> Stored {
        let bytes = std::fs::metadata(&path).map_or(0, |meta| meta.len());
        let source = Origin::read(&path).map(|origin| origin.source);
        let (label, name, quant) = (stem(&path), String::new(), None);
        let stored = Stored { label, name, quant, bytes, path, source, error: None, is_damaged: false };
        match NeuronStore::open(&stored.path) {
            Ok(store) => {
                let name = store.header.config["name"].as_str().unwrap_or_default().to_owned();
                Stored { name, quant: Some(store.header.quant), ..stored }
            }
            Err(error) => {
                let is_damaged = matches!(error, Error::BadFile(_));
                Stored { error: Some(error.to_string()), is_damaged, ..stored }
            }
        }
    }

    fn tagged(&self) -> String {
        self.quant.map_or(self.name.clone(), |quant| format!("{}:{}", self.name, quant.name()))
    }

    /// Whether the file or directory that it was packed from is gone. Where the directory around it is not there either, or the system
    /// does not say, it may be on a disk that is not mounted now.
    pub fn is_orphan(&self) -> bool {
        let gone = |source: &PathBuf| {
            source.try_exists().is_ok_and(|there| !there) && source.parent().is_some_and(Path::is_dir)
        };
        self.source.as_ref().is_some_and(gone)
    }

    /// Whether nothing is lost by removing it: it is damaged, or what it was packed from is gone.
    pub fn is_unused(&self) -> bool {
        self.is_damaged || self.is_orphan()
    }

    /// Removes the file and what is known of its origin.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses.
    pub fn remove(&self) -> Result<()> {
        std::fs::remove_file(&self.path).map_err(Error::io("remove", &self.path))?;
        if let Some(origin) = Origin::path(&self.path) {
            // It may have none.
            let _ = std::fs::remove_file(origin);
        }
        Ok(())
    }
}

/// All packed models in the cache directory, sorted by path; none without such a directory.
pub fn all() -> Vec<Stored> {
    let dir = crate::config::cache_dir().map(|dir| dir.join("models"));
    let files = dir.iter().flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten().flatten()).map(|e| e.path());
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|e| e == EXTENSION)).collect();
    files.sort();
    let mut stored: Vec<Stored> = files.into_iter().map(Stored::read).collect();
    let labels: Vec<Option<String>> = stored.iter().map(|one| label(one, &stored)).collect();
    for (one, label) in stored.iter_mut().zip(labels) {
        one.label = label.unwrap_or_else(|| stem(&one.path));
    }
    stored
}

/// The shortest name that no other copy has; `None` where only the file's stem is one.
fn label(one: &Stored, all: &[Stored]) -> Option<String> {
    let alone = |same: &dyn Fn(&Stored) -> bool| all.iter().filter(|other| same(other)).count() == 1;
    if one.error.is_some() || one.name.is_empty() {
        None
    } else if alone(&|other| other.name == one.name) {
        Some(one.name.clone())
    } else {
        alone(&|other| other.tagged() == one.tagged()).then(|| one.tagged())
    }
}

/// The packed model that `text` names: its label, its name, `NAME:TYPE`, or the stem of its file; `None` if none is called that.
///
/// # Errors
/// [`Error::Usage`] with the labels where several are called that.
pub fn named(text: &str) -> Result<Option<Stored>> {
    let mut stored = all();
    if let Some(at) = stored.iter().position(|one| one.label == text || stem(&one.path) == text) {
        return Ok(Some(stored.swap_remove(at)));
    }
    stored.retain(|one| one.error.is_none() && (one.name == text || one.tagged().eq_ignore_ascii_case(text)));
    match stored.len() {
        0 => Ok(None),
        1 => Ok(stored.pop()),
        several => {
            let labels: Vec<String> = stored.iter().map(|one| printable(&one.label)).collect();
            Err(Error::Usage(format!(
                "{several} packed models are called '{}'; name one: {}",
                printable(text),
                labels.join(", ")
            )))
        }
    }
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// What a packed copy was made from.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Origin {
    /// Absolute path of the directory or GGUF.
    source: PathBuf,
    /// Its files as they were when they were last found to hold what is packed.
    pub files: Vec<SourceFile>,
}

impl Origin {
    /// Where the origin of the copy at `store` stands; `None` for a path without a parent of its own.
    fn path(store: &Path) -> Option<PathBuf> {
        Some(store.parent()?.parent()?.join("sources").join(stem(store) + ".json"))
    }

    /// `None` where nothing is known of it.
    pub fn read(store: &Path) -> Option<Origin> {
        let path = Origin::path(store).filter(|path| path.exists())?;
        serde_json::from_str(&read_text(&path).ok()?).ok()
    }

    /// Writes down that `store` holds what `files` of `source` do. A failure only means that it will be looked at again.
    pub fn write(store: &Path, source: &Path, files: Vec<SourceFile>) {
        let written = || -> Option<()> {
            // A path that is no text cannot be written down, and a wrong one would look deleted.
            let source = source.canonicalize().ok().filter(|source| source.to_str().is_some())?;
            let path = Origin::path(store)?;
            std::fs::create_dir_all(path.parent()?).ok()?;
            temporary::write_whole(&path, &serde_json::to_vec(&Origin { source, files }).ok()?).ok()
        };
        if written().is_none() {
            tracing::debug!("what {} was packed from could not be written down", store.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_unused_where_it_is_damaged_or_its_source_gone_and_not_where_a_disk_or_the_system_is_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let damaged = dir.path().join("copy.neurons");
        std::fs::write(&damaged, "no store").unwrap();
        assert!(Stored::read(damaged).is_unused());
        // The system opens no link that leads to itself.
        let closed = dir.path().join("closed.neurons");
        std::os::unix::fs::symlink(&closed, &closed).unwrap();
        let closed = Stored::read(closed);
        assert!(closed.error.is_some() && !closed.is_unused());
        let from = |source: PathBuf| Stored { source: Some(source), ..closed.clone() };
        assert!(from(dir.path().join("gone")).is_unused());
        assert!(!from(dir.path().join("not mounted/model")).is_unused());
        assert!(!from(dir.path().join("closed.neurons")).is_unused(), "the system does not say whether it is there");
        assert!(!from(dir.path().to_owned()).is_unused());
    }
}
