//! The daemon's Unix socket: which users may open it, whether another daemon has it, and what earlier daemons left behind.
//!
//! A lock file next to it, held as long as the process lives, decides between two daemons that start at once; a socket whose lock is free
//! is a leftover. Other users may be able to write to the directory, so nothing found there is trusted: the lock is opened only if it is
//! this user's own file, and the kernel tells which process listens.

use crate::error::{Error, Result};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::UCred;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Bytes of a path that fit the kernel's address of a socket.
const MAX_PATH: usize = 107;
/// Bytes of a lock file, at most: a process number and a newline, with room to spare. A longer file is not a lock.
const MAX_LOCK: u64 = 16;

/// Where the daemon listens by default: in the user's runtime directory, else in a private directory below /tmp. Whatever else the
/// environment defines for temporary files, all verbs of a user find the same socket.
pub fn default_path() -> PathBuf {
    match crate::config::runtime_dir() {
        Ok(dir) => dir.join("dynamicinfer.sock"),
        Err(_) => {
            let uid = rustix::process::getuid().as_raw();
            PathBuf::from(format!("/tmp/dynamicinfer-{uid}/dynamicinfer.sock"))
        }
    }
}

/// Why `path` is the default one below /tmp; `None` if it is another.
pub fn why_not_in_runtime_dir(path: &Path) -> Option<&'static str> {
    crate::config::runtime_dir().err().filter(|_| path == default_path())
}

/// A socket that listens. Dropping it removes its file.
pub struct Bound {
    /// Accepts connections.
    pub listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket's file.
    file: (u64, u64),
    /// Held for as long as the socket is.
    _lock: File,
}

impl Drop for Bound {
    fn drop(&mut self) {
        // If our file was removed, another daemon may have created its own. The inode is not reused as long as the listener is open.
        // The lock file stays: without it, two daemons could hold locks on different files of one name.
        if identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Device and inode of the file at `path`; a symbolic link is a file of its own.
fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

/// Listens at `path`, for this user alone.
///
/// # Errors
/// [`Error::Running`] with the process that listens there; [`Error::Io`]; [`Error::Usage`] for a path that cannot be a socket.
pub fn bind(path: &Path) -> Result<Bound> {
    let length = path.as_os_str().len();
    if length > MAX_PATH {
        return Err(Error::Usage(format!(
            "--socket {}: the path has {length} bytes, and a socket's path at most {MAX_PATH}; give a shorter one",
            path.display()
        )));
    }
    make_private_dir(path)?;
    let lock = lock(path)?;
    match std::fs::symlink_metadata(path) {
        // The lock is free, so no daemon listens; another program may.
        Ok(there) if there.file_type().is_socket() => {
            if UnixStream::connect(path).is_ok() {
                return Err(Error::Running(format!(
                    "another program listens at {}; give another --socket",
                    path.display()
                )));
            }
            std::fs::remove_file(path).map_err(Error::io("remove the leftover", path))?;
        }
        Ok(_) => {
            return Err(Error::Usage(format!("{} exists and is not a socket; give another --socket", path.display())));
        }
        Err(_) => {}
    }
    // Set before binding: if the mode were changed afterwards, others could connect in between.
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener.map_err(Error::io("listen at", path))?;
    let file = identity(path).map_err(Error::io("look at", path))?;
    Ok(Bound { listener, path: path.to_owned(), file, _lock: lock })
}

/// Creates the socket's directory. The default one below /tmp must belong to this user.
fn make_private_dir(path: &Path) -> Result<()> {
    let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) else { return Ok(()) };
    if !dir.exists() {
        std::fs::DirBuilder::new().mode(0o700).recursive(true).create(dir).map_err(Error::io("create", dir))?;
    }
    check_default_dir(path)
}

/// Checks that no other user can listen at `path` if it is the default one. Another user may have made its directory below /tmp first, and
/// would then read this user's requests. A path given by the user, and a missing directory, are not checked.
///
/// # Errors
/// [`Error::Usage`] with what is wrong with the directory; [`Error::Io`].
pub fn check_default_dir(path: &Path) -> Result<()> {
    let Some(dir) = path.parent().filter(|_| path == default_path()) else { return Ok(()) };
    // In a runtime directory the system has made what is above it.
    let below_tmp = why_not_in_runtime_dir(path).is_some();
    match std::fs::symlink_metadata(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io("look at", dir)(error)),
        Ok(_) => others_can(dir, below_tmp).map_or(Ok(()), |what| {
            Err(Error::Usage(format!(
                "{} {what}; set XDG_RUNTIME_DIR, or give --socket in a directory of your own",
                dir.display()
            )))
        }),
    }
}

/// Why `dir` is not this user's alone; `None` if it is. With `above`, whether others can put another in its place counts, too.
fn others_can(dir: &Path, above: bool) -> Option<&'static str> {
    let Ok(meta) = std::fs::symlink_metadata(dir) else { return Some("cannot be looked at") };
    let replaced = |parent: std::fs::Metadata| parent.mode() & 0o022 != 0 && parent.mode() & 0o1000 == 0;
    if !meta.is_dir() {
        Some("is not a directory, or is a symbolic link")
    } else if meta.uid() != rustix::process::getuid().as_raw() {
        Some("belongs to another user")
    } else if meta.mode() & 0o022 != 0 {
        Some("can be written to by others")
    } else if above && dir.parent().is_none_or(|parent| parent.metadata().map_or(true, replaced)) {
        Some("can be replaced by others")
    } else {
        None
    }
}

fn lock(path: &Path) -> Result<File> {
    let lock_path = lock_path(path);
    let mut file = open_lock(&lock_path, OFlags::RDWR | OFlags::CREATE)?;
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        // Without its number the message is poorer, and still right.
        let process = listener(path).map_or(String::new(), |peer| format!(" (process {})", peer.pid.as_raw_nonzero()));
        return Err(Error::Running(format!(
            "a daemon is already running at {}{process}; use it, stop it with `dynamicinfer stop --daemon`, or \
             give another --socket",
            path.display()
        )));
    }
    let mut before = Vec::new();
    let read = (&mut file).take(MAX_LOCK + 1).read_to_end(&mut before);
    read.map_err(Error::io("read", &lock_path))?;
    if before.len() as u64 > MAX_LOCK || !before.iter().all(|b| b.is_ascii_digit() || *b == b'\n') {
        return Err(not_ours(&lock_path, "does not hold the number of a process"));
    }
    let write = |file: &mut File| {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    };
    write(&mut file).map_err(Error::io("write", &lock_path))?;
    Ok(file)
}

/// Opens a lock file if it is this user's own: a link could lead to another user's file, and other users can change files that they own.
fn open_lock(path: &Path, how: OFlags) -> Result<File> {
    // NONBLOCK: opening a pipe does not wait.
    let flags = how | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)) {
        Ok(file) => File::from(file),
        Err(rustix::io::Errno::LOOP) => return Err(not_ours(path, "is a symbolic link")),
        Err(error) => return Err(Error::io("open", path)(error.into())),
    };
    let meta = file.metadata().map_err(Error::io("look at", path))?;
    let why = if !meta.is_file() {
        "is no regular file"
    } else if meta.uid() != rustix::process::geteuid().as_raw() {
        "belongs to another user"
    } else if meta.nlink() != 1 {
        "has other names, too (hard links)"
    } else {
        return Ok(file);
    };
    Err(not_ours(path, why))
}

fn not_ours(path: &Path, why: &str) -> Error {
    let path = path.display();
    Error::Usage(format!("the lock file {path} {why}, and is not used; remove it, or give another --socket"))
}

fn lock_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// Whether a daemon of this user has the lock of `path`.
///
/// # Errors
/// [`Error::Usage`] for a lock file that is not this user's own; [`Error::Io`].
pub fn is_held(path: &Path) -> Result<bool> {
    match open_lock(&lock_path(path), OFlags::RDONLY) {
        Ok(file) => Ok(rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err()),
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// The process that listens at `path`, as the kernel reports it; `None` if none does.
pub fn listener(path: &Path) -> Option<UCred> {
    rustix::net::sockopt::socket_peercred(UnixStream::connect(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_sockets_directory_is_trusted_only_where_nobody_else_can_listen_in_it() {
        let above = tempfile::tempdir().unwrap();
        let dir = above.path().join("dir");
        std::fs::create_dir(&dir).unwrap();
        let mode = |dir: &Path, mode: u32| set_permissions(dir, Permissions::from_mode(mode)).unwrap();
        mode(&dir, 0o700);
        assert_eq!(others_can(&dir, true), None);
        mode(above.path(), 0o777);
        assert_eq!((others_can(&dir, true), others_can(&dir, false)), (Some("can be replaced by others"), None));
        mode(above.path(), 0o1777);
        assert_eq!(others_can(&dir, true), None);
        mode(&dir, 0o770);
        assert_eq!(others_can(&dir, true), Some("can be written to by others"));
        mode(&dir, 0o700);
        let link = above.path().join("link");
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        assert_eq!(others_can(&link, true), Some("is not a directory, or is a symbolic link"));
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&dir, Some(54_321), None).unwrap();
            assert_eq!(others_can(&dir, true), Some("belongs to another user"));
        }
    }
}
