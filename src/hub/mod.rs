//! Models of the Hugging Face hub: what they are called, which of their files are the model, and where the hub's tools keep files on
//! this machine. Nothing here opens a connection but [`fetch`], which only the verb `pull` uses.

#[cfg(feature = "pull")]
pub mod fetch;

use crate::error::{Error, Result, printable};
use std::path::{Path, PathBuf};

/// A model as people name it: `OWNER/MODEL`, or `OWNER/MODEL:FILE` for one GGUF file of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// `OWNER/MODEL`, as the hub knows it.
    pub repository: String,
    /// Which file: its name, or a part of it that no other file's name has, such as `Q4_0`.
    pub file: Option<String>,
}

impl Name {
    /// The name in `text`; `None` where it is none: the hub's names are two words of letters, digits, `-`, `_` and `.`.
    pub fn parse(text: &str) -> Option<Name> {
        let (repository, file) = text.split_once(':').map_or((text, None), |(name, file)| (name, Some(file)));
        let (owner, model) = repository.split_once('/')?;
        let word = |text: &str, more: &str| {
            !text.is_empty()
                && !text.starts_with(['.', '-'])
                && text.len() <= 200
                && text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
        };
        let good = word(owner, "-_.") && word(model, "-_.") && file.is_none_or(|file| word(file, "-_."));
        good.then(|| Name { repository: repository.to_owned(), file: file.map(str::to_owned) })
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Name { repository, file } = self;
        match file {
            Some(file) => write!(f, "{repository}:{file}"),
            None => f.write_str(repository),
        }
    }
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

    /// The file or directory of a model that was fetched; `None` where it was not.
    ///
    /// # Errors
    /// [`Error::Usage`] where the name fits several of its files.
    pub fn find(&self, name: &Name) -> Result<Option<PathBuf>> {
        let folder = self.folder(name);
        let Ok(commit) = std::fs::read_to_string(folder.join("refs/main")) else { return Ok(None) };
        if commit.is_empty() || !commit.chars().all(|c| c.is_ascii_alphanumeric()) {
            return Ok(None);
        }
        let snapshot = folder.join("snapshots").join(commit);
        let Ok(entries) = std::fs::read_dir(&snapshot) else { return Ok(None) };
        let mut files: Vec<String> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        files.sort();
        Ok(match choose(name, &files) {
            Ok(Choice::Directory(_)) => Some(snapshot),
            Ok(Choice::File(file)) => Some(snapshot.join(file)),
            Err(None) => None,
            Err(Some(why)) => return Err(Error::Usage(why)),
        })
    }
}

/// What of a repository's files is the model.
#[derive(Debug, PartialEq, Eq)]
pub enum Choice {
    /// All of these, as a Hugging Face directory.
    Directory(Vec<String>),
    /// This GGUF file.
    File(String),
}

/// Chooses among the files of a repository those that `name` means: the GGUF file that it names, else safetensors with what belongs to
/// them, else the only GGUF file.
///
/// # Errors
/// Why there is no choice, as a sentence for people; `None` where no file is a model's.
pub fn choose(name: &Name, files: &[String]) -> Result<Choice, Option<String>> {
    let ggufs: Vec<&String> = files.iter().filter(|file| file.ends_with(".gguf") && !file.contains('/')).collect();
    if let Some(part) = &name.file {
        let found = named(&ggufs, part);
        return match found[..] {
            [one] => Ok(Choice::File(one.clone())),
            [] if ggufs.is_empty() => Err(None),
            [] => Err(Some(format!("none of {}'s files is called '{part}': {}", name.repository, list(&ggufs)))),
            _ => Err(Some(format!("'{part}' fits several of {}'s files: {}", name.repository, list(&found)))),
        };
    }
    let directory: Vec<String> = files.iter().filter(|file| belongs(file)).cloned().collect();
    if files.iter().any(|file| file == "config.json") && directory.iter().any(|file| file.ends_with(".safetensors")) {
        return Ok(Choice::Directory(directory));
    }
    match ggufs[..] {
        [one] => Ok(Choice::File(one.clone())),
        [] => Err(None),
        [first, ..] => Err(Some(format!(
            "{} has several GGUF files; name one, {}:{first}, or a part of its name that no other has: {}",
            name.repository,
            name.repository,
            list(&ggufs)
        ))),
    }
}

/// Those that `part` names: the file that is called so, else those with this word in their names, else those with these letters.
fn named<'a>(files: &[&'a String], part: &str) -> Vec<&'a String> {
    let part = part.to_lowercase();
    let those = |fits: &dyn Fn(&str) -> bool| -> Vec<&'a String> {
        files.iter().copied().filter(|file| fits(&file.to_lowercase())).collect()
    };
    let whole = those(&|file| file == part);
    let word = those(&|file| file.split(['.', '-']).any(|word| word == part));
    match (whole.is_empty(), word.is_empty()) {
        (false, _) => whole,
        (true, false) => word,
        (true, true) => those(&|file| file.contains(&part)),
    }
}

/// Whether a file is part of a Hugging Face directory as this program reads it.
fn belongs(file: &str) -> bool {
    let weights = file == "model.safetensors" || file.starts_with("model-") && file.ends_with(".safetensors");
    let beside = file.ends_with(".json") || file.ends_with(".jinja") || file == "tokenizer.model";
    !file.contains('/') && (weights || beside)
}

fn list(files: &[&String]) -> String {
    const MOST: usize = 12;
    let mut shown: Vec<String> = files.iter().take(MOST).map(|file| printable(file)).collect();
    if files.len() > MOST {
        shown.push(format!("and {} more", files.len() - MOST));
    }
    shown.join(", ")
}

/// What a model is called by its path: the name of its file or directory without the extension. In the cache of the hub's tools a
/// directory's name and the file that a link leads to are checksums; there it is the model's, or the link's.
pub fn file_stem(path: &Path) -> String {
    let stem = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
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

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap_or_else(|| panic!("{text} is a name"))
    }

    #[test]
    fn a_name_is_two_words_and_leads_out_of_no_folder() {
        assert_eq!(name("a-b/C_d.1"), Name { repository: "a-b/C_d.1".into(), file: None });
        assert_eq!(name("a/b:Q4_0").to_string(), "a/b:Q4_0");
        for text in ["demo", "a/b/c", "../b", "a/..", "/b", "a/", "a/b:", "a/b:../x", "a b/c", "./model", "a/-b", "é/b"]
        {
            assert_eq!(Name::parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_files_of_a_model_are_chosen_and_nothing_else() {
        let files = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let all = files(&[
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "onnx/config.json",
            "tokenizer.model",
            "training_args.bin",
        ]);
        let Ok(Choice::Directory(chosen)) = choose(&name("a/b"), &all) else { panic!("a directory") };
        let left_out = ["README.md", "consolidated.safetensors", "onnx/config.json", "training_args.bin"];
        assert_eq!(chosen.len(), all.len() - left_out.len());
        assert!(chosen.iter().all(|file| !left_out.contains(&&**file)), "{chosen:?}");

        let ggufs = files(&["README.md", "m.Q4_0.gguf", "m.Q4_K.gguf", "m.Q4_K_M.gguf", "m.gguf"]);
        let file = |text: &str| choose(&name(text), &ggufs);
        assert_eq!(file("a/b:q4_0"), Ok(Choice::File("m.Q4_0.gguf".into())));
        assert_eq!(file("a/b:Q4_K"), Ok(Choice::File("m.Q4_K.gguf".into())), "a whole word goes before a part of one");
        assert_eq!(file("a/b:m.gguf"), Ok(Choice::File("m.gguf".into())));
        assert!(file("a/b").unwrap_err().unwrap().contains("has several GGUF files; name one, a/b:m.Q4_0.gguf, or"));
        assert!(file("a/b:Q4").unwrap_err().unwrap().starts_with("'Q4' fits several of a/b's files: m.Q4_0.gguf, "));
        assert!(file("a/b:f16").unwrap_err().unwrap().starts_with("none of a/b's files is called 'f16': "));
        assert_eq!(choose(&name("a/b"), &files(&["only.gguf"])), Ok(Choice::File("only.gguf".into())));
        assert_eq!(choose(&name("a/b"), &files(&["config.json", "pytorch_model.bin"])), Err(None));
    }

    #[test]
    fn a_model_of_the_hub_is_not_called_after_a_checksum() {
        let dir = "/h/hub/models--Owner--Some-Model/snapshots/0123abcd";
        assert_eq!(file_stem(Path::new(dir)), "Some-Model");
        assert_eq!(file_stem(&Path::new(dir).join("some.Q4_0.gguf")), "some.Q4_0");
        assert_eq!(file_stem(Path::new("/nowhere/m.gguf")), "m");
    }
}
