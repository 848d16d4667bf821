//! A lock file and a socket in a directory that others can write to: they do no harm.

use crate::daemon::{Daemon, command};
use rustix::fs::{CWD, Mode, mkfifoat};
use rustix::process::Signal;
use std::path::Path;
use std::process::{Command, Stdio};

fn lock_of(dir: &Path) -> std::path::PathBuf {
    dir.join("dynamicinfer.sock.lock")
}

/// The lock file was opened through symbolic and hard links, and a process number took the place of what was there: whoever could write
/// to the socket's directory could have any file of the user's destroyed. So did a socket whose lock has the name of another file.
#[test]
fn a_lock_file_that_is_not_a_daemons_own_is_refused_and_stays_as_it_is() {
    let refused = |made: &dyn Fn(&Path, &Path)| {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "what somebody wrote").unwrap();
        made(&victim, &lock_of(dir.path()));
        let mut daemon = Daemon::spawn(dir.path(), &["serve"], &[]);
        let said = daemon.wait_for("");
        assert!(said.contains("is not used"), "{said}");
        assert_eq!(daemon.wait().code(), Some(2), "{said}");
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "what somebody wrote");
        assert!(!daemon.socket.exists());
        let stop = command(dir.path(), &["stop", "--daemon"]).stderr(Stdio::null()).status().unwrap();
        assert!([2, 3].contains(&stop.code().unwrap()));
        lock_of(dir.path())
    };
    refused(&|victim, lock| std::os::unix::fs::symlink(victim, lock).unwrap());
    let dangling = refused(&|victim, lock| std::os::unix::fs::symlink(victim.with_extension("new"), lock).unwrap());
    assert!(!dangling.with_file_name("victim.new").exists(), "a file was made behind a link");
    refused(&|victim, lock| std::fs::hard_link(victim, lock).unwrap());
    refused(&|_, lock| mkfifoat(CWD, lock, Mode::from_raw_mode(0o600)).unwrap());
    for text in ["[[package]]\nname = \"mine\"\n", "123456789012345678901234567890\n"] {
        refused(&|_, lock| std::fs::write(lock, text).unwrap());
    }
    if rustix::process::geteuid().is_root() {
        refused(&|_, lock| {
            std::fs::write(lock, "1\n").unwrap();
            std::os::unix::fs::chown(lock, Some(54_321), None).unwrap();
        });
    }
}

/// It signalled whatever process the lock file named.
#[test]
fn stop_ends_who_listens_and_not_whom_the_lock_file_names() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve"], &[]);
    daemon.wait_for("listening");
    let mut bystander = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    std::fs::write(lock_of(dir.path()), format!("{}\n", bystander.id())).unwrap();
    let done = command(dir.path(), &["stop", "--daemon"]).stderr(Stdio::piped()).output().unwrap();
    drop(bystander.stdin.take());
    assert!(bystander.wait().unwrap().success(), "a process that is no daemon was ended");
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.success() && said.contains(&format!("process {} ", daemon.child.id())), "{said}");
    assert_eq!(daemon.wait().code(), Some(0));
}

/// Of a socket that was handed over, the kernel names who opened it: systemd, not the daemon.
#[test]
fn stop_leaves_alone_who_listens_without_a_lock() {
    let dir = tempfile::tempdir().unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(dir.path().join("dynamicinfer.sock")).unwrap();
    let done = command(dir.path(), &["stop", "--daemon"]).stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(3), "{said}");
    assert!(said.contains("holds no lock there"), "{said}");
}

/// After something had cleared the directory and a second daemon had begun there, the first one's end took the second's socket away.
#[test]
fn a_daemon_that_ends_leaves_the_socket_of_another_that_took_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Daemon::spawn(dir.path(), &["serve"], &[]);
    first.wait_for("listening");
    std::fs::remove_file(&first.socket).unwrap();
    std::fs::remove_file(lock_of(dir.path())).unwrap();
    let mut second = Daemon::spawn(dir.path(), &["serve"], &[]);
    second.wait_for("listening");
    first.signal(Signal::TERM);
    assert_eq!(first.wait().code(), Some(0));
    assert!(second.socket.exists(), "the second daemon's socket was taken away");
    assert_eq!(second.get("/health")["status"], "ok");
}
