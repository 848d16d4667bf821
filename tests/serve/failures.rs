//! An engine that stands still, a device that fails, and what systemd hands over.

use crate::daemon::{Daemon, PATIENCE, command, read_answer, request};
use rustix::process::Signal;
use serde_json::json;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The daemon's thread of this name.
fn thread(daemon: &Daemon, name: &str) -> libc::pid_t {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.child.id())).unwrap().flatten();
    let named = |task: &std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap().trim() == name;
    tasks.filter(named).map(|task| task.file_name().to_str().unwrap().parse().unwrap()).next().unwrap()
}

/// Stops one thread of another process, as a debugger does, while its other threads go on.
struct Frozen(libc::pid_t);

impl Frozen {
    fn new(thread: libc::pid_t) -> Frozen {
        // SAFETY: plain system calls on a process of ours.
        unsafe {
            let none = std::ptr::null_mut::<libc::c_void>();
            assert_eq!(libc::ptrace(libc::PTRACE_SEIZE, thread, none, none), 0, "{}", std::io::Error::last_os_error());
            assert_eq!(libc::ptrace(libc::PTRACE_INTERRUPT, thread, none, none), 0);
            let mut status = 0;
            assert_eq!(libc::waitpid(thread, &raw mut status, libc::__WALL), thread);
            assert!(libc::WIFSTOPPED(status));
        }
        Frozen(thread)
    }

    fn thaw(self) {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: as above.
        assert_eq!(unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, none, none) }, 0);
    }
}

/// A timer beside the engine would feed the watchdog for ever.
#[test]
fn the_watchdog_hears_nothing_while_the_engine_stands_still() {
    const INTERVAL: Duration = Duration::from_millis(500);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let environment = [("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "500000")];
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo"], &environment);
    daemon.wait_for("is ready");
    let fed_within = |patience: Duration| {
        let end = Instant::now() + patience;
        let mut bytes = [0; 512];
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            socket.set_read_timeout(Some(left)).unwrap();
            if socket.recv(&mut bytes).is_ok_and(|n| &bytes[..n] == b"WATCHDOG=1") {
                return true;
            }
        }
        false
    };
    assert!(fed_within(PATIENCE));
    let frozen = Frozen::new(thread(&daemon, "engine"));
    // The daemon's other threads answer all the while.
    assert_eq!(daemon.call("GET", "/health", "").status, 200);
    let end = Instant::now() + 2 * INTERVAL;
    while Instant::now() < end {
        fed_within(end.saturating_duration_since(Instant::now()));
    }
    assert!(!fed_within(3 * INTERVAL), "the watchdog was fed for an engine that stands still");
    frozen.thaw();
    assert!(fed_within(PATIENCE));
}

/// As after an illegal address on a GPU: nothing of that pass is sent, everybody is told, the process ends with 70.
#[test]
fn a_device_that_fails_is_told_to_every_stream_and_ends_the_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let device = ["--device", "virtual", "--ffn-share", "0.5", "--policy", "static", "--predictor", "exact"];
    let alone = {
        let daemon = Daemon::start_in(dir.path(), &[&device[..], &["--deterministic"]].concat());
        let ask = json!({"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "temperature": 0});
        daemon.post("/v1/completions", &ask).json()["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let failing = [&device[..], &["--fail-after", "900", "--deterministic"]].concat();
    let mut daemon = Daemon::start_in(dir.path(), &failing);
    let ask = json!({"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "temperature": 0, "stream": true});
    let mut streams: Vec<_> = (0..3).map(|_| daemon.connect()).collect();
    // Asked beforehand, so that the end of the listening socket does not answer for it.
    let mut health = daemon.connect();
    for stream in &mut streams {
        stream.write_all(&request("POST", "/v1/completions", &ask.to_string())).unwrap();
    }
    for stream in &mut streams {
        let answer = read_answer(stream);
        let events = answer.events();
        let last = events.last().unwrap();
        assert!(!answer.whole && last.contains("the device has failed: virtual device: launch 901"), "{last}");
        let said: String = events[..events.len() - 1]
            .iter()
            .map(|e| serde_json::from_str::<serde_json::Value>(e).unwrap()["choices"][0]["text"].clone())
            .map(|text| text.as_str().unwrap().to_owned())
            .collect();
        assert!(alone.starts_with(&said), "what was sent is not what a whole device computes: {said:?}");
    }
    health.write_all(&request("GET", "/health", "")).unwrap();
    let health = read_answer(&mut health);
    assert_eq!((health.status, &health.json()["error"]["code"]), (503, &json!("engine_failed")));
    assert_eq!(daemon.wait().code(), Some(70));
    assert!(!daemon.socket.exists());
    // Whoever watches it starts it again.
    let daemon = Daemon::start_in(dir.path(), &device);
    assert_eq!(daemon.get("/health")["status"], "ok");
}

/// An engine that fails while answers are let end: the status says so.
#[test]
fn a_failure_while_ending_is_no_success() {
    let dir = tempfile::tempdir().unwrap();
    let device = ["--device", "virtual", "--ffn-share", "0.5", "--policy", "static", "--predictor", "exact"];
    let mut daemon = Daemon::start_in(dir.path(), &[&device[..], &["--fail-after", "600"]].concat());
    let ask = json!({"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "n": 8, "logprobs": 20, "stream": true});
    let mut stream = daemon.connect();
    stream.write_all(&request("POST", "/v1/completions", &ask.to_string())).unwrap();
    daemon.until("dynamicinfer_num_requests_running", 8.0);
    daemon.signal(Signal::TERM);
    daemon.wait_for("ending: 8 answers");
    assert!(!read_answer(&mut stream).whole);
    assert_eq!(daemon.wait().code(), Some(70));
}

/// systemd listens, and starts the daemon when somebody comes: who came before it was there is answered, and the socket stays.
#[test]
fn a_socket_that_systemd_hands_over_is_served_and_left_where_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dynamicinfer.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut early = std::os::unix::net::UnixStream::connect(&path).unwrap();
    early.set_read_timeout(Some(PATIENCE)).unwrap();
    early.write_all(&request("GET", "/health", "")).unwrap();
    // The process id is known to the process alone, so a shell becomes it. The socket comes as its standard input.
    let serve = command(dir.path(), &["serve", "demo"]);
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", r#"LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" "$@" 3<&0 </dev/null"#]);
    shell.arg(serve.get_program()).args(serve.get_args()).current_dir(dir.path()).env_clear();
    shell.envs(serve.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell.stdin(OwnedFd::from(listener)).stdout(Stdio::null()).stderr(Stdio::null());
    let mut daemon = Daemon::of(shell.spawn().unwrap(), dir.path());
    assert_eq!(read_answer(&mut early).status, 200);
    let start = Instant::now();
    while daemon.call("GET", "/ready", "").status != 200 {
        assert!(start.elapsed() < PATIENCE, "it does not become ready");
    }
    assert_eq!(daemon.post("/v1/completions", &json!({"prompt": "Once", "max_tokens": 2})).status, 200);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(path.exists(), "the socket is systemd's");
}
