//! Models of the Hugging Face hub: what they are called, which of their files are the model, and where the hub's tools keep files on
//! this machine. Nothing here opens a connection but [`fetch`], which only the verb `pull` uses.

#[cfg(feature = "pull")]
pub mod fetch;

mod choice;
mod name;

pub use choice::{Choice, choose, is_beside};
pub use name::Name;

use crate::error::{Error, Result, printable};
use crate::formats::gguf::PartName;
use crate::formats::open_regular;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Most bytes of a file in `refs/`: a commit has 40.
const MAX_REF_BYTES: u64 = 256;

/// Most files of a snapshot that are looked at, and folders below each other.
const MAX_FILES: usize = 10_000;
const MAX_DEPTH: usize = 4;

/// The folder in which the hub's tools keep the files of all models. A model has `refs/main` (the commit that was fetched last),
/// `snapshots/COMMIT/` (its files by name, as links) and `blobs/` (their bytes, named by checksum), as huggingface_hub has them.
#[derive(Clone, Debug)]
pub struct Cache(pub PathBuf);

impl Cache {
    /// The folder of one model; it need not be there.
    pub fn folder(&self, name: &Name) -> PathBuf {
        self.0.join(format!("models--{}", name.repository.replace('/', "--")))
    }

    /// The file or directory of a model that was fetched, of a model in parts the first part; `None` where it was not.
    ///
    /// # Errors
    /// [`Error::Usage`] where the name fits several of its files, or where parts are missing.
    pub fn find(&self, name: &Name) -> Result<Option<PathBuf>> {
        let Some(snapshot) = self.snapshot(name) else { return Ok(None) };
        let mut files = Vec::new();
        add_files(&snapshot, "", 0, &mut files);
        files.sort();
        Ok(match choose(name, &files) {
            Ok(Choice::Directory(_)) => Some(snapshot),
            Ok(Choice::Gguf(parts)) => Some(snapshot.join(&parts[0])),
            Err(None) => None,
            Err(Some(why)) => return Err(Error::Usage(why)),
        })
    }

    /// The folder of the commit that was fetched last.
    fn snapshot(&self, name: &Name) -> Option<PathBuf> {
        let folder = self.folder(name);
        let mut commit = String::new();
        let main = folder.join("refs/main");
        // The cache is written by other programs, too: a pipe in place of this file would be waited for.
        open_regular(&main).ok()?.0.take(MAX_REF_BYTES).read_to_string(&mut commit).ok()?;
        let commit = commit.trim_end();
        let good = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_alphanumeric());
        good.then(|| folder.join("snapshots").join(commit))
    }

    /// The whole name of a model that was fetched, from a name without its owner: `MODEL` or `MODEL:FILE`. `None` where no model is called
    /// so.
    ///
    /// # Errors
    /// [`Error::Usage`] where models of several owners are.
    pub fn by_short_name(&self, text: &str) -> Result<Option<Name>> {
        let model = text.split_once(':').map_or(text, |(model, _)| model);
        let Ok(entries) = std::fs::read_dir(&self.0) else { return Ok(None) };
        let folders = entries.flatten().take(MAX_FILES).map(|entry| entry.file_name().to_string_lossy().into_owned());
        let owner = |folder: String| {
            let (owner, name) = folder.strip_prefix("models--")?.split_once("--")?;
            (name == model).then(|| owner.to_owned())
        };
        let names = folders.filter_map(owner).filter_map(|owner| Name::parse(&format!("{owner}/{text}")));
        let mut found: Vec<Name> = names.filter(|name| self.snapshot(name).is_some()).collect();
        found.sort_by_key(Name::to_string);
        if found.len() > 1 {
            let names: Vec<String> = found.iter().map(Name::to_string).collect();
            return Err(Error::Usage(format!(
                "models of several owners are called '{}': {}",
                printable(text),
                names.join(", ")
            )));
        }
        Ok(found.pop())
    }
}

/// Adds the names of the files of a snapshot's folder and of those below it. Files are links into `blobs/`; a folder is none.
fn add_files(dir: &Path, before: &str, depth: usize, files: &mut Vec<String>) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten().take(MAX_FILES) {
        if files.len() == MAX_FILES {
            return;
        }
        let name = format!("{before}{}", entry.file_name().to_string_lossy());
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            files.push(name);
        } else if depth < MAX_DEPTH {
            add_files(&entry.path(), &format!("{name}/"), depth + 1, files);
        }
    }
}

/// What a model is called by its path: the name of its file or directory without the extension. In the cache of the hub's tools a
/// directory's name and the file that a link leads to are checksums; there it is the model's, or the link's.
pub fn file_stem(path: &Path) -> String {
    let stem = |path: &Path| {
        let part = path.file_name().and_then(|name| PartName::parse(&name.to_string_lossy()));
        part.map_or_else(|| path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), |part| part.stem)
    };
    let folder = path.ancestors().filter_map(|dir| dir.file_name()?.to_str()).find(|name| name.starts_with("models--"));
    match folder.and_then(|folder| folder.rsplit("--").next()) {
        Some(model) if path.extension().is_none_or(|e| e != "gguf") => model.to_owned(),
        Some(_) => stem(path),
        None => stem(&path.canonicalize().unwrap_or_else(|_| path.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_of_the_hub_is_not_called_after_a_checksum() {
        let dir = "/h/hub/models--Owner--Some-Model/snapshots/0123abcd";
        assert_eq!(file_stem(Path::new(dir)), "Some-Model");
        assert_eq!(file_stem(&Path::new(dir).join("some.Q4_0.gguf")), "some.Q4_0");
        assert_eq!(file_stem(Path::new("/nowhere/m.gguf")), "m");
    }
}
