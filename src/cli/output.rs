//! Files that a verb writes without being asked whether they are there already.

use crate::error::{Error, Result};
use std::io::Read;
use std::path::Path;

/// Bytes of a file that say what it is.
const HEAD: u64 = 64;

/// Refuses to replace a file whose first bytes are not, by `is_ours`, those of the kind that is written: a name typed wrong must not cost a
/// model. An earlier result of the same kind is replaced, and what is no file, such as /dev/null, is not looked at.
///
/// # Errors
/// [`Error::Usage`] for a file of another kind, [`Error::Failed`] for one in a folder that is not there, [`Error::Io`] for one that cannot be read.
pub fn check(option: &str, path: &Path, is_ours: impl Fn(&[u8]) -> bool) -> Result<()> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        let (path, folder) = (path.display(), folder.display());
        return Err(Error::Failed(format!("{option} {path}: there is no folder {folder}; make it first")));
    }
    if !path.is_file() {
        return Ok(());
    }
    let mut found = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(HEAD).read_to_end(&mut found));
    read.map_err(Error::io("read", path))?;
    if found.is_empty() || is_ours(&found) {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "{option} {}: something else is in this file, and would be lost; remove it first or take another name",
        path.display()
    )))
}
