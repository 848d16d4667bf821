//! Models that have a name without a path: those below a folder, and those that were fetched from the hub.

use super::model::find;
use crate::error::Result;
use crate::formats::gguf::PartName;
use crate::formats::neuron_store::{EXTENSION, NeuronStore};
use crate::hub::{self, Cache};
use crate::model::source::Source;
use crate::model::{Model, ModelConfig};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Entries of a folder that are looked at, and folders below each other.
const MAX_ENTRIES: usize = 10_000;
const MAX_DEPTH: usize = 3;

/// A model with a name.
#[derive(Clone, Debug)]
pub struct Offered {
    /// Its name: on the hub, or its path below the folder without the ending.
    pub name: String,
    /// Its directory or file, of a GGUF in parts the first part.
    pub path: PathBuf,
    /// Bytes of its files.
    pub bytes: u64,
}

impl Offered {
    /// When its directory or file was changed last, in seconds since 1970; 0 where that is not known.
    pub fn modified(&self) -> u64 {
        let modified = std::fs::metadata(&self.path).and_then(|meta| meta.modified()).ok();
        modified.and_then(|at| at.duration_since(UNIX_EPOCH).ok()).map_or(0, |since| since.as_secs())
    }
}

/// The models below a folder, sorted by name: GGUF files, packed models, and directories with a config.json.
pub fn in_folder(folder: &Path) -> Vec<Offered> {
    let mut found = Vec::new();
    add_models(folder, "", 0, &mut found);
    found.sort_by(|a: &Offered, b| a.name.cmp(&b.name));
    found
}

fn add_models(folder: &Path, before: &str, depth: usize, found: &mut Vec<Offered>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten().take(MAX_ENTRIES) {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        // A link counts as what it leads to.
        let Ok(meta) = std::fs::metadata(&path) else { continue };
        if name.starts_with('.') || found.len() >= MAX_ENTRIES {
            continue;
        }
        if !meta.is_dir() {
            found.extend(model_file(path, before, &name));
        } else if path.join("config.json").exists() {
            let bytes = files_bytes(&path);
            found.push(Offered { name: format!("{before}{name}"), path, bytes });
        } else if depth < MAX_DEPTH {
            add_models(&path, &format!("{before}{name}/"), depth + 1, found);
        }
    }
}

/// A file that is a model or the first part of one.
fn model_file(path: PathBuf, before: &str, name: &str) -> Option<Offered> {
    let extension = path.extension()?.to_str()?;
    if hub::is_beside(name) || !["gguf", EXTENSION].contains(&extension) {
        return None;
    }
    let part = PartName::parse(name);
    if part.as_ref().is_some_and(|part| part.of(1) != name) {
        return None;
    }
    let bytes = |file: &Path| std::fs::metadata(file).map_or(0, |meta| meta.len());
    let bytes = match &part {
        Some(part) => part.all().iter().map(|file| bytes(&path.with_file_name(file))).sum(),
        None => bytes(&path),
    };
    let stem = part.map_or_else(|| path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), |p| p.stem);
    Some(Offered { name: format!("{before}{stem}"), path, bytes })
}

/// Bytes of the model at `path`, a directory or a file.
pub fn bytes_of(path: PathBuf) -> u64 {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if path.is_dir() { files_bytes(&path) } else { model_file(path, "", &name).map_or(0, |one| one.bytes) }
}

/// Bytes of the files of one directory.
fn files_bytes(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().take(MAX_ENTRIES);
    entries.filter_map(|entry| std::fs::metadata(entry.path()).ok()).filter(|m| m.is_file()).map(|m| m.len()).sum()
}

/// The models that were fetched from the hub, sorted by name.
pub fn fetched() -> Vec<Offered> {
    let cache = crate::config::hub().cache.map(Cache);
    let all = cache.iter().flat_map(Cache::all);
    all.map(|one| Offered { name: one.name.to_string(), path: one.path, bytes: one.bytes }).collect()
}

/// The model that `name` means: one below `folder`, else a fetched one, as the hub's names are read. A path means none.
///
/// # Errors
/// [`crate::Error::Usage`] where the name fits several fetched models or files.
pub fn named(name: &str, folder: Option<&Path>) -> Result<Option<Offered>> {
    if let Some(found) = folder.map(in_folder).and_then(|all| all.into_iter().find(|one| one.name == name)) {
        return Ok(Some(found));
    }
    let Some(cache) = crate::config::hub().cache.map(Cache) else { return Ok(None) };
    let meant = match hub::Name::parse(name) {
        Some(name) => Some(name),
        None => cache.by_short_name(name)?,
    };
    let Some(path) = meant.as_ref().map(|name| cache.find(name)).transpose()?.flatten() else { return Ok(None) };
    // Where the list has it under another name, that one is its name.
    Ok(fetched().into_iter().find(|one| one.path == path))
}

/// The shape of the model at `path` and its chat template, as its files say. Weights are not read.
///
/// # Errors
/// As [`ModelOptions::open`](super::ModelOptions::open).
pub fn outline(path: &Path) -> Result<(ModelConfig, String)> {
    let path = find(path)?;
    let (config, tokenizer) = match !path.is_dir() && NeuronStore::is_one(&path) {
        true => {
            let model = Model::open(&path)?;
            (model.config.clone(), model.tokenizer().ok())
        }
        false => {
            let source = Source::open(&path, None)?;
            (source.config, source.tokenizer)
        }
    };
    Ok((config, tokenizer.and_then(|spec| spec.chat_template).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_offers_files_directories_and_the_first_parts() {
        let dir = tempfile::tempdir().unwrap();
        for file in [
            "one.gguf",
            "packed.neurons",
            "deep/er/m-00001-of-00002.gguf",
            "deep/er/m-00002-of-00002.gguf",
            "whole/config.json",
            "whole/model.safetensors",
            "mmproj-one.gguf",
            "notes.txt",
            ".hidden.gguf",
            "a/b/c/d/too-deep.gguf",
        ] {
            let path = dir.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "four").unwrap();
        }
        let found = in_folder(dir.path());
        let listed: Vec<(&str, u64)> = found.iter().map(|one| (one.name.as_str(), one.bytes)).collect();
        assert_eq!(listed, [("deep/er/m", 8), ("one", 4), ("packed", 4), ("whole", 8)]);
        assert_eq!(found[0].path, dir.path().join("deep/er/m-00001-of-00002.gguf"));
        assert!(found[1].modified() > 0);
        // No name leads out of the folder.
        for name in ["../one", "one.gguf", "/etc/passwd", ""] {
            assert!(named(name, Some(dir.path())).unwrap().is_none(), "{name}");
        }
    }
}
