//! How it lives and ends: one instance, leftovers, signals, clients that go away, a full queue, TCP, systemd.

use crate::daemon::{Daemon, PATIENCE, command, read_all, read_answer, request};
use rustix::process::Signal;
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::Stdio;

/// An answer that goes on until it is stopped: nothing ends it before the context is full.
fn endless(stream: bool) -> String {
    json!({"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true, "stream": stream}).to_string()
}

/// A stream that has begun: its first event was read.
fn begun(daemon: &Daemon) -> UnixStream {
    let mut stream = daemon.connect();
    stream.write_all(&request("POST", "/v1/completions", &endless(true))).unwrap();
    let mut seen = Vec::new();
    let mut piece = [0; 512];
    while !String::from_utf8_lossy(&seen).contains("data: ") {
        let n = stream.read(&mut piece).unwrap();
        assert!(n > 0, "{}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&piece[..n]);
    }
    stream
}

#[test]
fn only_its_user_may_open_the_socket_and_only_one_daemon_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(dir.path(), &[]);
    let mode = std::fs::metadata(&daemon.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let second = command(dir.path(), &["serve", "demo"]).stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(4), "{said}");
    assert!(said.contains(&format!("(process {})", daemon.child.id())), "{said}");
    assert_eq!(daemon.get("/health")["status"], "ok");
}

#[test]
fn a_killed_daemon_leaves_nothing_that_stops_the_next() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        let mut daemon = Daemon::start_in(dir.path(), &[]);
        let _stream = begun(&daemon);
        daemon.signal(Signal::KILL);
        daemon.wait();
        assert!(daemon.socket.exists());
    }
    let daemon = Daemon::start_in(dir.path(), &[]);
    assert_eq!(daemon.get("/v1/models")["data"][0]["id"], "demo");
}

#[test]
fn what_is_no_socket_is_never_taken_away() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("dynamicinfer.sock"), "somebody's").unwrap();
    let done = command(dir.path(), &["serve"]).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(done.status.code(), Some(2));
    assert_eq!(std::fs::read_to_string(dir.path().join("dynamicinfer.sock")).unwrap(), "somebody's");
    let long = format!("/tmp/{}", "x".repeat(120));
    let done = command(dir.path(), &["serve", "--socket", &long]).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(done.status.code(), Some(2));
    assert!(String::from_utf8(done.stderr).unwrap().contains("at most 107"));
}

#[test]
fn a_client_that_goes_away_frees_its_slot() {
    const ROUNDS: usize = 40;
    let daemon = Daemon::start(&["--parallel", "2"]);
    daemon.post("/v1/completions", &json!({"prompt": "warm", "max_tokens": 2}));
    let descriptors = daemon.metric("process_open_fds");
    // Two of eight run, six wait.
    let eight = |stream: bool| {
        json!({"prompt": "Once", "max_tokens": 400, "ignore_eos": true, "stream": stream, "n": 8}).to_string()
    };
    for round in 0..ROUNDS {
        let mut gone = daemon.connect();
        gone.write_all(&request("POST", "/v1/completions", &eight(round % 2 == 0))).unwrap();
        if round % 4 < 2 {
            daemon.until("dynamicinfer_num_requests_running", 2.0);
        }
        drop(gone);
        daemon.until("dynamicinfer_num_requests_running", 0.0);
        daemon.until("dynamicinfer_num_requests_waiting", 0.0);
    }
    while daemon.metric("process_open_fds") > descriptors {}
    assert!(daemon.metric("dynamicinfer_client_disconnects_total") >= ROUNDS as f64);
    let made = daemon.metric("dynamicinfer_generation_tokens_total");
    assert!(made < 0.5 * (ROUNDS * 8 * 400) as f64, "{made} tokens were made for nobody");
}

#[test]
fn a_full_queue_says_so_at_once_and_when_to_come_again() {
    let daemon = Daemon::start(&["--parallel", "1", "--queue", "1"]);
    let running = begun(&daemon);
    let mut waiting = daemon.connect();
    waiting.write_all(&request("POST", "/v1/completions", &endless(false))).unwrap();
    daemon.until("dynamicinfer_num_requests_waiting", 1.0);
    let refused = daemon.call("POST", "/v1/completions", &endless(false));
    assert_eq!(refused.status, 429, "{}", refused.text());
    assert!(refused.headers.contains("retry-after: 1"), "{}", refused.headers);
    assert_eq!(refused.json()["error"]["code"], "queue_full");
    assert_eq!(daemon.metric("dynamicinfer_requests_rejected_total{reason=\"queue_full\"}"), 1.0);
    drop(running);
    // The one that waited has its turn and its end.
    let answer = read_answer(&mut waiting);
    assert_eq!((answer.status, answer.json()["usage"]["completion_tokens"].as_u64()), (200, Some(400)));
}

#[test]
fn a_reader_that_stands_still_slows_nobody_and_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("c.toml");
    std::fs::write(&config, "[serve]\nstall_seconds = 1\n").unwrap();
    let daemon = Daemon::start_in(dir.path(), &["--parallel", "2", "--config", config.to_str().unwrap()]);
    // More text than the kernel holds: log probabilities are long.
    let wordy =
        json!({"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": true, "stream": true, "logprobs": 20});
    let mut still = daemon.connect();
    still.write_all(&request("POST", "/v1/completions", &wordy.to_string())).unwrap();
    let other = daemon.call("POST", "/v1/completions", &endless(false));
    assert_eq!(other.json()["usage"]["completion_tokens"], 400);
    daemon.until("dynamicinfer_num_requests_running", 0.0);
    // What it has not read when it is cut never comes.
    daemon.wait_until_closed(&still);
    let answer = read_answer(&mut still);
    assert!(!answer.whole, "the whole answer came although nobody read");
}

#[test]
fn the_first_signal_lets_answers_end_and_the_second_does_not() {
    let mut daemon = Daemon::start(&[]);
    let mut stream = begun(&daemon);
    daemon.signal(Signal::TERM);
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(rest.ends_with(b"data: [DONE]\n\n\r\n0\r\n\r\n"), "{}", String::from_utf8_lossy(&rest));
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(!daemon.socket.exists());

    let mut daemon = Daemon::start(&[]);
    let mut busy = daemon.connect();
    let long = json!({"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "stream": true, "n": 8, "logprobs": 20});
    busy.write_all(&request("POST", "/v1/completions", &long.to_string())).unwrap();
    daemon.until("dynamicinfer_num_requests_running", 8.0);
    daemon.signal(Signal::TERM);
    daemon.wait_for("ending: 8 answers");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
    let cut = read_answer(&mut busy);
    assert!(!cut.whole && cut.events().last().unwrap().contains("the server is stopping"));
}

#[test]
fn settings_are_read_again_and_a_bad_file_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("c.toml");
    let write = |text: &str| std::fs::write(&config, text).unwrap();
    write("[serve]\nbody_bytes = 2000\n");
    let mut daemon = Daemon::start_in(dir.path(), &["--config", config.to_str().unwrap()]);
    let long = json!({"prompt": "x ".repeat(1000), "max_tokens": 1});
    assert_eq!(daemon.post("/v1/completions", &long).status, 413);
    write("[serve]\nbody_bits = 9000\n");
    daemon.signal(Signal::HUP);
    assert!(daemon.wait_for("settings are unchanged").contains("did you mean 'serve.body_bytes'?"));
    assert_eq!(daemon.post("/v1/completions", &long).status, 413);
    write("[serve]\nbody_bytes = 9000\nqueue = 3\n");
    daemon.signal(Signal::HUP);
    assert!(daemon.wait_for("settings reloaded").ends_with("only a restart changes serve.queue"));
    // Too many tokens for the demo model now, and no longer too many bytes.
    assert_eq!(daemon.post("/v1/completions", &long).json()["error"]["code"], "context_length_exceeded");
}

#[test]
fn models_come_and_go() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve"], &[]);
    daemon.wait_for("listening");
    assert_eq!(daemon.call("GET", "/ready", "").status, 503);
    assert_eq!(daemon.call("GET", "/health", "").status, 200);
    assert_eq!(daemon.post("/v1/completions", &json!({"prompt": "x"})).json()["error"]["code"], "no_model");
    let verb = |args: &[&str]| {
        let done = command(dir.path(), args).stderr(Stdio::piped()).stdout(Stdio::piped()).output().unwrap();
        (done.status.code().unwrap(), String::from_utf8(done.stdout).unwrap(), String::from_utf8(done.stderr).unwrap())
    };
    assert_eq!(verb(&["load", "demo"]).0, 0);
    assert_eq!(daemon.get("/ready")["model"], "demo");
    assert!(verb(&["ps"]).1.contains("demo"));
    assert!(verb(&["budget"]).1.contains("no device"));
    let (code, _, error) = verb(&["budget", "set", "1GiB"]);
    assert!(code == 1 && error.contains("CPU alone"), "{error}");
    let (code, doctor, _) = verb(&["doctor"]);
    assert!(code == 0 && doctor.contains(&format!("process {}", daemon.child.id())), "{doctor}");
    assert_eq!(verb(&["load", "demo"]).0, 0);
    assert_eq!(verb(&["stop"]).0, 0);
    assert_eq!(daemon.get("/v1/x/ps")["state"], "empty");
    assert_eq!(verb(&["stop", "--daemon"]).0, 0);
    assert_eq!(daemon.wait().code(), Some(0));
    let (code, _, error) = verb(&["ps"]);
    assert!(code == 3 && error.contains("dynamicinfer serve MODEL"), "{error}");
}

/// `load` of a path that had a typing error took the model in service away, and every answer that was under way.
#[test]
fn a_load_that_cannot_be_leaves_the_model_that_answers() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(dir.path(), &[]);
    let damaged = dir.path().join("damaged.gguf");
    std::fs::write(&damaged, b"GGUF is what it says, and nothing behind it").unwrap();
    let long = json!({"prompt": "Once", "max_tokens": 400, "ignore_eos": true, "temperature": 0, "stream": true});
    let mut busy = daemon.connect();
    busy.write_all(&request("POST", "/v1/completions", &long.to_string())).unwrap();
    daemon.until("dynamicinfer_num_requests_running", 1.0);
    for model in ["/nowhere", damaged.to_str().unwrap(), "demo\u{0}"] {
        let refused = daemon.post("/v1/x/models/load", &json!({"model": model}));
        assert!((400..500).contains(&refused.status), "{model}: {}", refused.text());
        assert_eq!(daemon.get("/ready")["model"], "demo", "after {model}");
    }
    let (_, reason) = read_answer(&mut busy).streamed();
    assert_eq!(reason.as_deref(), Some("length"), "the answer that was under way was not cut");
    // What is found to be wrong only when the new model is opened: the old one is loaded again.
    let short = json!({"model": "demo-moe", "settings": {"serve.context": "1"}});
    let refused = daemon.post("/v1/x/models/load", &short);
    assert!(refused.status >= 400 && refused.text().contains("a context of 1"), "{}", refused.text());
    assert_eq!(daemon.get("/ready")["model"], "demo");
    assert_eq!(daemon.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1})).status, 200);
}

/// Another model's `load` cut every answer in the middle.
#[test]
fn answers_under_way_end_before_another_model_takes_their_place() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(dir.path(), &["--name", "first"]);
    let long = json!({"prompt": "Once", "max_tokens": 300, "ignore_eos": true, "temperature": 0, "stream": true});
    let mut busy = daemon.connect();
    busy.write_all(&request("POST", "/v1/completions", &long.to_string())).unwrap();
    daemon.until("dynamicinfer_num_requests_running", 1.0);
    let loaded = daemon.post("/v1/x/models/load", &json!({"model": "demo"}));
    assert_eq!(loaded.status, 200, "{}", loaded.text());
    let (_, reason) = read_answer(&mut busy).streamed();
    assert_eq!(reason.as_deref(), Some("length"));
    assert_eq!(daemon.get("/v1/x/ps")["state"], "ready");
}

#[test]
fn tcp_wants_its_token_and_no_stranger_as_origin() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "--listen", "127.0.0.1:0"], &[]);
    let (address, token) = daemon.port();
    let ask = |headers: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "GET /v1/models HTTP/1.1\r\nConnection: close\r\n{headers}\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    let host = "Host: localhost\r\n";
    assert_eq!(ask(&format!("{host}Authorization: Bearer {token}\r\n")), 200);
    assert_eq!(ask(host), 401);
    assert_eq!(ask(&format!("{host}Authorization: Bearer {}0\r\n", &token[1..])), 401);
    assert_eq!(ask(&format!("{host}Origin: http://evil.example\r\nAuthorization: Bearer {token}\r\n")), 403);
    assert_eq!(ask(&format!("Host: 127.0.0.2:80\r\nAuthorization: Bearer {token}\r\n")), 200);
    assert_eq!(ask(&format!("Host: evil.example\r\nAuthorization: Bearer {token}\r\n")), 403);
    for wide in ["0.0.0.0:0", "192.0.2.1:80", "here"] {
        let done = command(dir.path(), &["serve", "--socket", "other.sock", "--listen", wide]).output().unwrap();
        assert_eq!(done.status.code(), Some(2), "{wide}");
    }
}

/// Whoever can reach the port read the paths of this user's models.
#[test]
fn health_says_why_a_model_cannot_be_used_at_the_socket_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "--listen", "0"], &[]);
    let (address, _) = daemon.port();
    let path = dir.path().join("no-such-model.gguf");
    assert_ne!(daemon.post("/v1/x/models/load", &json!({"model": path})).status, 200);
    assert!(daemon.call("GET", "/health", "").text().contains("no-such-model"));
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&request("GET", "/health", "")).unwrap();
    let told = read_all(&mut stream);
    assert_eq!(told.status, 503);
    let error = &told.json()["error"];
    assert_eq!((&error["message"], &error["code"]), (&json!("the model cannot be used"), &json!("model_failed")));
}

#[test]
fn systemd_hears_that_it_is_ready_alive_and_ending() {
    let dir = tempfile::tempdir().unwrap();
    let socket = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let path = dir.path().join("notify");
    let environment = [("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "300000")];
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo"], &environment);
    let hear = || {
        let mut bytes = [0; 512];
        let n = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..n]).into_owned()
    };
    assert!(hear().starts_with("READY=1"));
    daemon.wait_for("is ready");
    while hear() != "WATCHDOG=1" {}
    daemon.signal(Signal::TERM);
    while hear() != "STOPPING=1" {}
    assert_eq!(daemon.wait().code(), Some(0));
}
