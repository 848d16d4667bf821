//! Files that a verb writes without a check that they exist.

use crate::error::{Error, Result};
use std::io::Read;
use std::path::Path;

/// Bytes of a file that say what it is.
const HEAD: u64 = 64;

/// Refuses to replace a file whose first bytes are not, by `is_ours`, those of the kind that is written: a name typed wrong must not cost a
/// model. An earlier result of the same kind is replaced; special files, such as /dev/null, are not checked.
///
/// # Errors
/// [`Error::Usage`] for a file of another kind, [`Error::Failed`] for one in a missing folder, [`Error::Io`] for one that cannot be read.
pub fn check(option: &str, path: &Path, is_ours: impl Fn(&[u8]) -> bool) -> Result<()> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        let (path, folder) = (path.display(), folder.display());
        return Err(Error::Failed(format!("{option} {path}: the folder {folder} does not exist; create it first")));
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
        "{option} {}: the file has other contents and would be overwritten; remove it, or give another name",
        path.display()
    )))
}
