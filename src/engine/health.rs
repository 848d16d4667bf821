//! Whether an engine's results can be used: the files that it reads are unchanged, and its device works.

use super::state::Engine;
use crate::error::{Error, printable};
use crate::formats::{FileState, MappedFile};
use crate::host_cache::{ReadFault, Unread};
use crate::model::Model;
use std::fmt;

/// Why an engine cannot go on, or its last pass is worth nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A file of its model has changed; another model can be loaded.
    File(String),
    /// Its device is lost to this process.
    Device(String),
    /// Its thread panicked.
    Panic,
    /// Of the last pass alone: neurons that it needed could not be read from disk, or its numbers are not finite. The next one may need others.
    Pass(String),
}

impl Failure {
    /// Whether only a new process can go on.
    pub fn is_fatal(&self) -> bool {
        !matches!(self, Failure::File(_) | Failure::Pass(_))
    }

    /// The failure of mapped files: that one of them has changed. `None` if none has. Clients read it: it names the file without its folder.
    pub fn of_files(files: &[MappedFile]) -> Option<Failure> {
        files.iter().find_map(|file| match file.state() {
            FileState::Changed(what) => Some(Failure::File(format!(
                "{}: {what}, while it was served; its answers would be wrong, so there are none. Write the model to another name, \
                 rename it into place and load it again: dynamicinfer load MODEL",
                printable(&file.path.file_name().unwrap_or_default().to_string_lossy())
            ))),
            FileState::Same | FileState::Replaced | FileState::Removed => None,
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::File(why) | Failure::Pass(why) => write!(f, "{why}"),
            Failure::Device(why) => write!(f, "the device has failed: {why}; only another process can use it again"),
            Failure::Panic => write!(f, "the engine's thread has failed; the log says where"),
        }
    }
}

/// What is wrong where neurons or experts of a model could not be read from disk.
pub fn unread(model: &Model, fault: &ReadFault) -> Error {
    let (file, offset) = fault.place();
    let field = match fault.why {
        Unread::Damaged { layer, cluster } | Unread::NotFinite { layer, cluster } => {
            let what = model.config.parts().noun();
            format!("layer {layer}, {what} {cluster}")
        }
        Unread::System(_) | Unread::Cut => String::new(),
    };
    Error::bad_at(&model.files()[file].path, field, offset, fault.to_string())
}

impl Engine {
    /// What the last pass could not read from disk; `None` if nothing was missing.
    pub(super) fn unread(&self) -> Option<Error> {
        let fault = self.cached.as_ref()?.cache.fault()?;
        Some(unread(&self.model, fault))
    }

    /// That the last pass ended with numbers that are not finite; `None` if they are. Packing and opening look at what is read of a model as
    /// far as that costs little, so this is the last that keeps such numbers from being taken for an answer.
    pub(super) fn not_finite(&self) -> Option<Error> {
        let why = "the result of a pass holds numbers that are not finite, so there is no answer: the model's weights are damaged, or too large \
                   to compute with; `dynamicinfer show --verify` reads all of a packed model; download it or pack it again";
        (!self.is_finite).then(|| Error::bad(self.model.path(), "", why))
    }

    /// The files that the engine reads while it runs.
    pub fn files(&self) -> Vec<MappedFile> {
        let mut files = self.model.files().to_vec();
        for file in self.sparsity().files() {
            if !files.iter().any(|known| known.path == file.path) {
                files.push(file.clone());
            }
        }
        files
    }

    /// Why the last pass cannot be used; `None` if it can. Called after each pass, so it only looks at what is at hand.
    pub fn failure(&self) -> Option<Failure> {
        if let Some(fault) = self.fault() {
            return Some(Failure::Device(fault.0.clone()));
        }
        if let Some(error) = self.unread().or_else(|| self.not_finite()) {
            return Some(Failure::of_files(&self.files()).unwrap_or_else(|| Failure::Pass(error.without_folder())));
        }
        let whole = self.model.files().iter().chain(self.sparsity().files()).all(MappedFile::is_whole);
        if whole { None } else { Failure::of_files(&self.files()) }
    }
}
