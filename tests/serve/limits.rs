//! Limits on what the system gives: threads, descriptors, bytes of a file. They are told in words.

use crate::daemon::{Daemon, PATIENCE, command, read_answer, request};
use rustix::process::{Resource, Rlimit, Signal, setrlimit};
use serde_json::json;
use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Starts it with so much of something and no way to get more.
fn limit(command: &mut Command, what: Resource, most: u64) {
    let limit = move || Ok(setrlimit(what, Rlimit { current: Some(most), maximum: Some(most) })?);
    // SAFETY: one system call, between fork and exec.
    unsafe { command.pre_exec(limit) };
}

/// The tokenizers crate starts as many threads as this variable says, once it is first used: 8,900 before the system refused one.
#[test]
fn a_variable_starts_no_thousands_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo"], &[("RAYON_NUM_THREADS", "999999")]);
    daemon.wait_for("is ready");
    let text = "word ".repeat(20_000);
    assert_eq!(daemon.post("/tokenize", &json!({"content": text})).status, 200);
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
    let threads = status.lines().find_map(|line| line.strip_prefix("Threads:")?.trim().parse::<usize>().ok()).unwrap();
    let most = 100 + 2 * std::thread::available_parallelism().unwrap().get();
    assert!(threads < most, "{threads} threads");
}

/// `serve demo` as a user with no other processes: a limit on those does not hold for root, who is somebody else here and brings along
/// what that user may not reach.
fn as_a_user(dir: &Path) -> Command {
    if !rustix::process::geteuid().is_root() {
        return command(dir, &["serve", "demo"]);
    }
    let (program, assets) = (dir.join("program"), dir.join("assets"));
    let user = 40_000 + std::process::id() % 20_000;
    if !program.exists() {
        std::fs::copy(env!("CARGO_BIN_EXE_dynamicinfer"), &program).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::create_dir_all(assets.join("demo")).unwrap();
        for file in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo")).unwrap().flatten() {
            std::fs::copy(file.path(), assets.join("demo").join(file.file_name())).unwrap();
        }
        chown(dir, Some(user), Some(user)).unwrap();
    }
    let mut limited = Command::new(program);
    limited.args(["serve", "demo"]).current_dir(dir).stdin(Stdio::null()).uid(user).gid(user);
    limited.env_clear().env("HOME", dir).env("XDG_RUNTIME_DIR", dir).env("DYNAMICINFER_ASSETS", assets);
    limited
}

/// The runtime, rayon and the engine's pool panicked where a thread could not be started.
#[test]
fn where_there_are_too_few_threads_it_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let mut refused = 0;
    for most in 1..=12 {
        let mut program = as_a_user(dir.path());
        limit(&mut program, Resource::Nproc, most);
        let child = program.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut daemon = Daemon::listening_to(child, dir.path());
        let mut said = String::new();
        while !said.contains("is ready") {
            let Some(line) = daemon.next_line() else { break };
            said += &(line + "\n");
        }
        assert!(!said.contains("panicked"), "{most} threads: {said}");
        if said.contains("is ready") {
            assert_eq!(daemon.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 3})).status, 200);
            daemon.signal(Signal::KILL);
            daemon.wait();
        } else {
            refused += 1;
            let code = daemon.wait().code();
            assert!(matches!(code, Some(1 | 6)) && said.contains("thread"), "{most} threads: {code:?}, {said}");
        }
    }
    assert!(refused > 0, "no limit was too low");
}

/// A message through a template was refused as a bad one, with 400, when there was no descriptor for the process that renders it.
#[test]
fn a_template_without_a_process_to_run_in_is_503_and_not_the_messages_fault() {
    let dir = tempfile::tempdir().unwrap();
    let model = format!("{}/tests/fixtures/models/qwen2", env!("CARGO_MANIFEST_DIR"));
    let mut program = command(dir.path(), &["serve", &model]);
    limit(&mut program, Resource::Nofile, 40);
    let mut daemon = Daemon::listening_to(program.stderr(Stdio::piped()).spawn().unwrap(), dir.path());
    daemon.wait_for("is ready");
    let message = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).to_string();
    // So many that each one's end makes room for the next. The process that is there already, and those that take its descriptors when
    // it has ended, still answer; sooner or later a connection takes them first.
    let mut open: VecDeque<UnixStream> = (0..70).map(|_| daemon.connect()).collect();
    let refused = (0..1000).find(|_| {
        let mut stream = open.pop_front().expect("there are always 70");
        stream.write_all(&request("POST", "/v1/chat/completions", &message)).unwrap();
        let answer = read_answer(&mut stream);
        open.push_back(daemon.connect());
        assert!([200, 503].contains(&answer.status), "{}: {}", answer.status, answer.text());
        if answer.status == 503 {
            assert!(answer.text().contains("descriptors"), "{}", answer.text());
            assert!(answer.headers.contains("\nretry-after: "), "{}", answer.headers);
        }
        answer.status == 503
    });
    assert!(refused.is_some(), "there was always a descriptor for a process");
    drop(open);
    let start = Instant::now();
    while daemon.call("POST", "/v1/chat/completions", &message).status != 200 {
        assert!(start.elapsed() < PATIENCE, "it is refused for ever");
    }
}

/// A limit on the size of files ended it by a signal, at the first line of a log that was full.
#[test]
fn a_limit_on_the_size_of_files_is_told_and_ends_nothing() {
    // The model is packed, which takes a file.
    drop(Daemon::start(&[]));
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let start_with = |bytes: u64| {
        let mut program = command(dir.path(), &["serve", "demo"]);
        limit(&mut program, Resource::Fsize, bytes);
        program.env("DYNAMICINFER_LOG", "debug").stderr(File::create(&log).unwrap());
        Daemon::of(program.spawn().unwrap(), dir.path())
    };
    let mut daemon = start_with(300);
    let start = Instant::now();
    while UnixStream::connect(&daemon.socket).is_err() || daemon.call("GET", "/ready", "").status != 200 {
        assert!(daemon.child.try_wait().unwrap().is_none(), "it has ended");
        assert!(start.elapsed() < PATIENCE);
    }
    for _ in 0..20 {
        assert_eq!(daemon.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2})).status, 200);
        assert_eq!(daemon.post("/v1/x/models/load", &json!({"model": "/nowhere"})).status, 400);
        daemon.signal(Signal::HUP);
    }
    assert_eq!(std::fs::metadata(&log).unwrap().len(), 300, "the log is full");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
    // Not even a lock can be written: an end in order, with nothing left behind.
    let mut daemon = start_with(0);
    assert_eq!(daemon.wait().code(), Some(1));
    assert!(!daemon.socket.exists());
}
