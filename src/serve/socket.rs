//! The Unix socket: who may have it, whether somebody has it, and what is left of those who had it.
//!
//! A lock file beside it, held as long as the process lives, decides between two that start at once; a socket without a
//! holder of the lock is a leftover. The lock file says the holder's process id.

use crate::error::{Error, Result};
use rustix::fs::{FlockOperation, Mode};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// What the kernel's address of a socket holds.
const LONGEST_PATH: usize = 107;

/// Where the daemon listens when nobody says: the user's runtime directory, else a private directory below /tmp.
pub fn default_path() -> PathBuf {
    match crate::config::runtime_dir() {
        Some(dir) => dir.join("dynamicinfer.sock"),
        None => {
            let uid = rustix::process::getuid().as_raw();
            std::env::temp_dir().join(format!("dynamicinfer-{uid}")).join("dynamicinfer.sock")
        }
    }
}

/// A bound socket. Dropping it takes the file away.
pub struct Bound {
    pub listener: UnixListener,
    path: PathBuf,
    /// Held for as long as the socket is.
    _lock: File,
}

impl Drop for Bound {
    fn drop(&mut self) {
        // The lock file stays: taking it away would let two hold locks on different files of one name.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Binds `path` for this user alone.
///
/// # Errors
/// [`Error::Running`] with the process that has it; [`Error::Io`]; [`Error::Usage`] for a path that cannot be a socket.
pub fn bind(path: &Path) -> Result<Bound> {
    let length = path.as_os_str().len();
    if length > LONGEST_PATH {
        return Err(Error::Usage(format!(
            "--socket {}: {length} bytes, and the path of a socket has at most {LONGEST_PATH}; take a shorter one",
            path.display()
        )));
    }
    make_private_dir(path)?;
    let lock = lock(path)?;
    match std::fs::symlink_metadata(path) {
        // Nobody holds the lock, so nobody who keeps the rules listens; somebody who does not keep them may.
        Ok(there) if there.file_type().is_socket() => {
            if UnixStream::connect(path).is_ok() {
                return Err(Error::Running(format!(
                    "something else listens at {}; take another --socket",
                    path.display()
                )));
            }
            std::fs::remove_file(path).map_err(Error::io("remove the leftover", path))?;
        }
        Ok(_) => {
            return Err(Error::Usage(format!("{} is there and is no socket; take another --socket", path.display())));
        }
        Err(_) => {}
    }
    // The mode is that of the moment of binding: changed afterwards, there would be a time when others could connect.
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener.map_err(Error::io("listen at", path))?;
    Ok(Bound { listener, path: path.to_owned(), _lock: lock })
}

/// The directory of the default place below /tmp is made by us, and belongs to us or is refused.
fn make_private_dir(path: &Path) -> Result<()> {
    let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) else { return Ok(()) };
    if !dir.exists() {
        std::fs::DirBuilder::new().mode(0o700).recursive(true).create(dir).map_err(Error::io("create", dir))?;
    }
    if path == default_path() {
        let meta = std::fs::symlink_metadata(dir).map_err(Error::io("look at", dir))?;
        if !meta.is_dir() || meta.uid() != rustix::process::getuid().as_raw() || meta.mode() & 0o022 != 0 {
            return Err(Error::Usage(format!(
                "{} can be written to by others; set XDG_RUNTIME_DIR, or give --socket in a directory of your own",
                dir.display()
            )));
        }
    }
    Ok(())
}

fn lock(path: &Path) -> Result<File> {
    let lock_path = lock_path(path);
    let open = File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(&lock_path);
    let mut file = open.map_err(Error::io("open", &lock_path))?;
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut pid = String::new();
        // Without its number the message is poorer, and still right.
        let _ = file.read_to_string(&mut pid);
        return Err(Error::Running(format!(
            "a daemon is already running at {} (process {}); use it, stop it with `dynamicinfer stop --daemon`, or take \
             another --socket",
            path.display(),
            pid.trim()
        )));
    }
    let write = |file: &mut File| {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    };
    write(&mut file).map_err(Error::io("write", &lock_path))?;
    Ok(file)
}

fn lock_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// The process that listens at `path`, if a daemon does.
pub fn holder(path: &Path) -> Option<u32> {
    let file = File::open(lock_path(path)).ok()?;
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
        return None;
    }
    std::fs::read_to_string(lock_path(path)).ok()?.trim().parse().ok()
}
