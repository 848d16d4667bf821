//! The folder in which the hub's tools keep the models of this machine: which there are, and what removes one.

use super::choice::{Choice, choose, is_beside};
use super::name::Name;
use crate::error::{Error, Result, printable};
use crate::formats::open_regular;
use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Most bytes of a file in `refs/`: a commit has 40.
const MAX_REF_BYTES: u64 = 256;

/// Most files of a snapshot that are looked at, and folders below each other.
const MAX_FILES: usize = 10_000;
const MAX_DEPTH: usize = 4;

/// A model that was fetched.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// Its shortest name: with a file only where its repository has several models.
    pub name: Name,
    /// Its directory or GGUF file, of one in parts the first part.
    pub path: PathBuf,
    /// Bytes of its files.
    pub bytes: u64,
    files: Vec<PathBuf>,
    /// Whether its repository has no other.
    alone: bool,
}

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

    /// All models that were fetched whole, sorted by name. A repository with several GGUF files has as many.
    pub fn all(&self) -> Vec<Fetched> {
        let repository = |folder: String| {
            let (owner, model) = folder.strip_prefix("models--")?.split_once("--")?;
            Name::parse(&format!("{owner}/{model}"))
        };
        let folders = std::fs::read_dir(&self.0).into_iter().flatten().flatten().take(MAX_FILES);
        let names = folders.filter_map(|entry| repository(entry.file_name().to_string_lossy().into_owned()));
        let mut all: Vec<Fetched> = names.flat_map(|name| self.of_repository(&name)).collect();
        all.sort_by_key(|one| one.name.to_string());
        all
    }

    /// The models of one repository.
    fn of_repository(&self, repository: &Name) -> Vec<Fetched> {
        let Some(snapshot) = self.snapshot(repository) else { return Vec::new() };
        let mut files = Vec::new();
        add_files(&snapshot, "", 0, &mut files);
        files.sort();
        let ggufs = files.iter().filter(|file| file.ends_with(".gguf") && !is_beside(file));
        let called = ggufs.map(|file| Name { file: Some(file.clone()), ..repository.clone() });
        let mut found: Vec<(Name, Choice)> = Vec::new();
        for name in std::iter::once(repository.clone()).chain(called) {
            // What is not whole, or is one of several, is no choice.
            let Ok(choice) = choose(&name, &files) else { continue };
            if name.file.is_none() && matches!(choice, Choice::Gguf(_)) || found.iter().any(|(_, is)| *is == choice) {
                continue;
            }
            found.push((name, choice));
        }
        let alone = found.len() == 1;
        let fetched = |(name, choice): (Name, Choice)| {
            let (path, names) = match choice {
                Choice::Directory(names) => (snapshot.clone(), names),
                Choice::Gguf(parts) => (snapshot.join(&parts[0]), parts),
            };
            let files: Vec<PathBuf> = names.iter().map(|name| snapshot.join(name)).collect();
            let bytes = files.iter().filter_map(|file| std::fs::metadata(file).ok()).map(|meta| meta.len()).sum();
            Fetched { name: if alone { repository.clone() } else { name }, path, bytes, files, alone }
        };
        found.into_iter().map(fetched).collect()
    }

    /// Removes a fetched model's files; with the only model of a repository what was fetched beside it, and the repository's folder where
    /// nothing else is in it: no other commit, and nothing that is being fetched.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses.
    pub fn remove(&self, fetched: &Fetched) -> Result<()> {
        let folder = self.folder(&fetched.name);
        let (snapshots, blobs) = (folder.join("snapshots"), folder.join("blobs"));
        let below = |dir: &Path| {
            let mut files = Vec::new();
            // A commit's folder is one more.
            add_files(dir, "", 0, &mut files);
            files.into_iter().map(|file| dir.join(file)).collect::<Vec<_>>()
        };
        let beside = || self.snapshot(&fetched.name).map(|snapshot| below(&snapshot)).unwrap_or_default();
        let files = if fetched.alone { beside() } else { fetched.files.clone() };
        let real: Vec<PathBuf> = files.iter().filter_map(|file| file.canonicalize().ok()).collect();
        files.iter().try_for_each(|file| std::fs::remove_file(file).map_err(Error::io("remove", file)))?;
        // Commits share what did not change between them; and a file may be in the folder itself, or a link lead elsewhere.
        let kept: BTreeSet<PathBuf> = below(&snapshots).iter().filter_map(|file| file.canonicalize().ok()).collect();
        let of_it = blobs.canonicalize().ok();
        let unused = |blob: &&PathBuf| of_it.as_ref().is_some_and(|of| blob.starts_with(of)) && !kept.contains(*blob);
        for blob in real.iter().filter(unused).filter(|blob| blob.exists()) {
            std::fs::remove_file(blob).map_err(Error::io("remove", blob))?;
        }
        let is_left = !kept.is_empty() || !below(&snapshots).is_empty() || !below(&blobs).is_empty();
        if is_left { Ok(()) } else { std::fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder)) }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache with a repository of these files, as the hub's tools leave it.
    fn cache(repositories: &[(&str, &[&str])]) -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache(dir.path().to_owned());
        for (name, files) in repositories {
            let folder = cache.folder(&Name::parse(name).unwrap());
            let (snapshot, blobs) = (folder.join("snapshots/abc"), folder.join("blobs"));
            for dir in [&snapshot, &blobs, &folder.join("refs")] {
                std::fs::create_dir_all(dir).unwrap();
            }
            std::fs::write(folder.join("refs/main"), "abc").unwrap();
            for file in *files {
                std::fs::write(blobs.join(file), file).unwrap();
                std::os::unix::fs::symlink(format!("../../blobs/{file}"), snapshot.join(file)).unwrap();
            }
        }
        (dir, cache)
    }

    fn names(cache: &Cache) -> Vec<String> {
        cache.all().iter().map(|one| one.name.to_string()).collect()
    }

    #[test]
    fn a_model_is_listed_by_its_shortest_name_and_found_by_it() {
        let (_dir, cache) = cache(&[
            ("a/whole", &["config.json", "model.safetensors", "tokenizer.json"]),
            ("b/one", &["m.Q4_0.gguf", "mmproj-m.gguf"]),
            ("c/two", &["m.Q4_0.gguf", "m.Q8_0.gguf"]),
            ("d/parts", &["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
            ("e/half", &["m-00001-of-00002.gguf"]),
            ("f/none", &["README.md"]),
        ]);
        assert_eq!(names(&cache), ["a/whole", "b/one", "c/two:m.Q4_0.gguf", "c/two:m.Q8_0.gguf", "d/parts"]);
        for one in cache.all() {
            assert_eq!(cache.find(&one.name).unwrap(), Some(one.path));
        }
        assert_eq!(cache.all()[0].bytes, "config.jsonmodel.safetensorstokenizer.json".len() as u64);
    }

    #[test]
    fn removing_a_model_leaves_its_neighbours() {
        let (dir, cache) = cache(&[("b/one", &["m.Q4_0.gguf"]), ("c/two", &["m.Q4_0.gguf", "m.Q8_0.gguf"])]);
        let all = cache.all();
        cache.remove(&all[1]).unwrap();
        assert_eq!(names(&cache), ["b/one", "c/two"]);
        assert!(!dir.path().join("models--c--two/blobs/m.Q4_0.gguf").exists());
        // What is being fetched stays, and so does another commit with what it shares.
        let (one, other) = (dir.path().join("models--b--one"), "../../blobs/m.Q4_0.gguf");
        std::fs::write(one.join("blobs/next.part"), "a half").unwrap();
        std::fs::create_dir(one.join("snapshots/old")).unwrap();
        std::os::unix::fs::symlink(other, one.join("snapshots/old/m.Q4_0.gguf")).unwrap();
        cache.remove(&all[0]).unwrap();
        assert_eq!(names(&cache), ["c/two"]);
        assert!(one.join("blobs/next.part").exists());
        assert_eq!(std::fs::read_to_string(one.join("snapshots/old/m.Q4_0.gguf")).unwrap(), "m.Q4_0.gguf");
        // Known from before its neighbour went.
        cache.remove(&all[2]).unwrap();
        assert!(!dir.path().join("models--c--two").exists());
    }
}
