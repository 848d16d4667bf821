//! Models of the Hugging Face hub: what they are called, which of their files are the model, and where the hub's tools keep files on
//! this machine. Nothing here opens a connection but [`fetch`], which only the verb `pull` uses.

#[cfg(feature = "pull")]
pub mod fetch;

mod cache;
mod choice;
mod name;

pub use cache::{Cache, Fetched};
pub use choice::{Choice, choose, is_beside};
pub use name::Name;

use crate::formats::gguf::PartName;
use std::path::Path;

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
