//! Temporary files: a file is written beside its final name, as `NAME.PID.tmp`, until it is complete.

use super::faults::step;
use crate::error::{Error, Result};
use parking_lot::Mutex;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

/// The last temporary files of this process: those that are not renamed yet are among them.
static CREATED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
/// Held from a file's creation to its lock: between the two another thread would take it for abandoned.
static CREATING: Mutex<()> = Mutex::new(());
/// No program writes so many files at once.
const MAX_CREATED: usize = 64;

/// Removes the temporary files that this process has begun and not finished, before it ends without unwinding.
#[cfg(feature = "cli")]
pub fn remove_unfinished() {
    for path in CREATED.lock().drain(..) {
        let _ = std::fs::remove_file(path);
    }
}

/// Creates the temporary file of `path`, locked while it is open, and removes those that killed processes have left. Where `path` is a
/// link, it is what the link points to that is written beside, and in the end replaced.
///
/// Two containers that share a folder may have processes with the same number. So a process that finds its name taken adds a number,
/// `NAME.PID-1.tmp`, and a file counts as abandoned only if its lock is free.
///
/// # Errors
/// [`Error::Io`] if the system refuses; [`Error::Usage`] if at `path` is what is no file, such as a device, which the new file would take away.
pub fn create(path: &Path) -> Result<(File, PathBuf)> {
    step().map_err(Error::io("create", path))?;
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(Error::Usage(format!(
            "{} is no regular file, and would be replaced by one; name another file",
            path.display()
        )));
    }
    let path = &behind_links(path);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let _creating = CREATING.lock();
    remove_abandoned(path, &name);
    let pid = std::process::id();
    let mut count = 0;
    loop {
        let number = if count == 0 { pid.to_string() } else { format!("{pid}-{count}") };
        let temporary = path.with_file_name(format!("{name}.{number}.tmp"));
        match File::options().read(true).write(true).create_new(true).open(&temporary) {
            // On a file system without locks, the process number alone protects it.
            Ok(file) => match file.try_lock() {
                // Another process is about to remove it as abandoned.
                Err(TryLockError::WouldBlock) => count += 1,
                _ => {
                    remember(&temporary);
                    return Ok((file, temporary));
                }
            },
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && count < 1000 => count += 1,
            Err(e) => return Err(Error::io("create", &temporary)(e)),
        }
    }
}

/// The file that `path` names, through links; also one that is not there yet.
fn behind_links(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    // As many as the system follows.
    for _ in 0..40 {
        let Ok(target) = std::fs::read_link(&path) else { break };
        path = path.with_file_name("").join(target);
    }
    path
}

/// Gives a temporary file of [`create`] the name that it was made for.
///
/// # Errors
/// Those of the system.
pub fn rename(temporary: &Path, path: &Path) -> std::io::Result<()> {
    std::fs::rename(temporary, behind_links(path))
}

fn remember(temporary: &Path) {
    let mut created = CREATED.lock();
    if created.len() == MAX_CREATED {
        created.remove(0);
    }
    created.push(std::path::absolute(temporary).unwrap_or_else(|_| temporary.to_owned()));
}

/// Writes `bytes` to `path`, whole or not at all.
///
/// # Errors
/// [`Error::Io`] if the system refuses; what was at `path` is then still there.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::io::Write;
    let (mut file, temporary) = create(path)?;
    let written = step().and_then(|()| file.write_all(bytes));
    let synced = written.and_then(|()| step()).and_then(|()| file.sync_all());
    synced.and_then(|()| step()).and_then(|()| rename(&temporary, path)).map_err(|e| {
        let _ = std::fs::remove_file(&temporary);
        Error::io("write", path)(e)
    })
}

/// Removes temporary files for the same name whose process has ended: a `pack` that was killed leaves one as large as the model.
fn remove_abandoned(path: &Path, name: &str) {
    let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(".".as_ref());
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let file = entry.file_name();
        let file = file.to_string_lossy();
        let number = file.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')?.strip_suffix(".tmp"));
        let pid = number.and_then(|n| n.split('-').next()?.parse::<u32>().ok());
        let Some(pid) = pid else { continue };
        let gone = pid == std::process::id() || !Path::new(&format!("/proc/{pid}")).exists();
        if gone && super::open_regular(&entry.path()).is_ok_and(|(file, _)| file.try_lock().is_ok()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_written_keeps_its_name_and_one_that_was_left_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let (first, one) = create(&path).unwrap();
        let (_second, two) = create(&path).unwrap();
        assert_ne!(one, two);
        assert!(one.exists() && two.exists());
        drop(first);
        let (_third, three) = create(&path).unwrap();
        assert_eq!(three, one);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    /// As root a `pack -o /dev/null --force` took the device away.
    #[test]
    fn what_is_no_file_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let refused = write_whole(&path, b"y").unwrap_err();
        assert!(matches!(refused, Error::Usage(_)), "{refused}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_stays_and_what_it_points_to_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("far")).unwrap();
        std::os::unix::fs::symlink("second", at("first")).unwrap();
        std::os::unix::fs::symlink("far/file", at("second")).unwrap();
        for text in ["one", "two"] {
            write_whole(&at("first"), text.as_bytes()).unwrap();
            assert_eq!(std::fs::read_to_string(at("far/file")).unwrap(), text);
            assert!(at("first").is_symlink() && at("second").is_symlink());
        }
        assert_eq!(std::fs::read_dir(at("far")).unwrap().count(), 1);
    }

    #[test]
    fn threads_that_write_the_same_file_at_once_keep_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let path = &path;
                scope.spawn(move || (0..200).for_each(|_| write_whole(path, &[thread; 9]).unwrap()));
            }
        });
        assert_eq!(std::fs::read(&path).unwrap().len(), 9);
    }
}
