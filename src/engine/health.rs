//! Whether what an engine computes can be used: the files that it reads are whole, and its device works.

use super::Engine;
use crate::formats::{FileState, MappedFile};
use std::fmt;

/// Why an engine cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A file of its model is not what it was; another model can be loaded.
    File(String),
    /// Its device is lost to this process.
    Device(String),
    /// Its thread has ended in the midst of its work.
    Panic,
}

impl Failure {
    /// Whether only another process can go on.
    pub fn is_fatal(&self) -> bool {
        !matches!(self, Failure::File(_))
    }

    /// Of files that are mapped, if one of them is not what it was any more.
    pub fn of_files(files: &[MappedFile]) -> Option<Failure> {
        files.iter().find_map(|file| match file.state() {
            FileState::Changed(what) => Some(Failure::File(format!(
                "{}: {what}, while it was served; its answers would be wrong, so there are none. Write the model to another name, \
                 rename it into place and load it again: dynamicinfer load MODEL",
                file.path.display()
            ))),
            FileState::Same | FileState::Replaced | FileState::Removed => None,
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::File(why) => write!(f, "{why}"),
            Failure::Device(why) => write!(f, "the device has failed: {why}; only another process can use it again"),
            Failure::Panic => write!(f, "the engine's thread has failed; the log says where"),
        }
    }
}

impl Engine {
    /// The files that it reads while it runs.
    pub fn files(&self) -> Vec<MappedFile> {
        let mut files = vec![self.model.store().file().clone()];
        for file in self.sparsity().files() {
            if !files.iter().any(|known| known.path == file.path) {
                files.push(file.clone());
            }
        }
        files
    }

    /// Whether the last pass can be used; asked after each, so it only looks at what is at hand.
    pub fn failure(&self) -> Option<Failure> {
        if let Some(fault) = self.fault() {
            return Some(Failure::Device(fault.0.clone()));
        }
        let whole = self.model.store().file().is_whole() && self.sparsity().files().all(MappedFile::is_whole);
        if whole { None } else { Failure::of_files(&self.files()) }
    }
}
