//! What clients made for OpenAI want to know: a port and a token.

use crate::daemon::{Daemon, PATIENCE, command, read_all, said};
use rustix::process::Signal;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;

fn get(address: &str, path: &str, token: Option<&str>) -> u16 {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let token = token.map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{token}\r\n").unwrap();
    read_all(&mut stream).status
}

/// Each start had another token, which every client had to be given anew.
#[test]
fn the_token_stays_from_one_start_to_the_next_and_is_its_users_alone() {
    let dir = tempfile::tempdir().unwrap();
    let start = |listen: &str| {
        let mut daemon = Daemon::spawn(dir.path(), &["serve", "--listen", listen], &[]);
        let (address, token) = daemon.port();
        (daemon, address, token)
    };
    let (mut daemon, address, token) = start("localhost:0");
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    assert_eq!((get(&address, "/v1/models", Some(&token)), get(&address, "/v1/models", None)), (200, 401));
    // A supervisor asks without.
    assert_eq!((get(&address, "/health", None), get(&address, "/metrics", None)), (200, 401));
    let file = dir.path().join(".local/state/dynamicinfer/token");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    daemon.signal(Signal::TERM);
    daemon.wait();
    let (mut daemon, address, again) = start("0");
    assert_eq!((again == token, get(&address, "/v1/models", Some(&token))), (true, 200));
    daemon.signal(Signal::TERM);
    daemon.wait();
    // Who could read it once may know it.
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let done = said(&mut command(dir.path(), &["serve", "--listen", "0"])).expect("it ends");
    let why = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.code() == Some(2) && why.contains("others can read this token; remove the file"), "{why}");
}

/// The name of the default socket was made of two variables, of which each verb may have had others.
#[test]
fn without_a_runtime_directory_every_verb_looks_at_the_same_place_and_says_which() {
    let dir = tempfile::tempdir().unwrap();
    let socket = format!("/tmp/dynamicinfer-{}/dynamicinfer.sock", rustix::process::getuid().as_raw());
    for verb in [&["ps"][..], &["stop"], &["top", "--json"], &["budget"], &["load", "demo"]] {
        for runtime in [None, Some("relative"), Some("/nowhere/at/all")] {
            let mut command = command(dir.path(), verb);
            command.env_remove("XDG_RUNTIME_DIR").env("TMPDIR", dir.path());
            runtime.into_iter().for_each(|dir| _ = command.env("XDG_RUNTIME_DIR", dir));
            let done = said(&mut command).expect("it ends");
            let err = String::from_utf8(done.stderr).unwrap();
            assert!(done.status.code() == Some(3) && err.contains(&socket), "{verb:?} {runtime:?}: {err}");
        }
    }
}
