//! A model's file that is replaced, cut or written to while it is served; and a disk that takes nothing.

use crate::daemon::{Daemon, command, read_answer, request, said};
use dynamicinfer::formats::{FileState, MappedFile};
use rustix::process::Signal;
use serde_json::json;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// The demo model as a file of the test's own.
fn packed(dir: &Path) -> PathBuf {
    let store = dir.join("m.neurons");
    let done = command(dir, &["pack", "demo", "-o", store.to_str().unwrap()]).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    store
}

fn serve(dir: &Path, store: &Path) -> Daemon {
    let mut daemon = Daemon::spawn(dir, &["serve", store.to_str().unwrap(), "--deterministic"], &[]);
    daemon.wait_for("is ready");
    daemon
}

fn ask() -> serde_json::Value {
    json!({"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0})
}

pub fn text(daemon: &Daemon) -> String {
    daemon.post("/v1/completions", &ask()).json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// 503 to requests and to health, in words; the daemon lives, and answers as before once the file is good again.
pub fn fails_closed_and_comes_back(daemon: &Daemon, store: &Path, good: &[u8], before: &str, word: &str) {
    let start = std::time::Instant::now();
    while daemon.call("GET", "/health", "").status != 503 {
        assert!(start.elapsed() < crate::daemon::PATIENCE, "nobody noticed");
    }
    let refused = daemon.post("/v1/completions", &ask());
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &json!("model_failed")));
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains(word) && message.contains("dynamicinfer load"), "{message}");
    assert!(!message.contains(store.parent().unwrap().to_str().unwrap()), "a folder is told: {message}");
    assert!(daemon.get("/v1/x/ps")["error"].as_str().unwrap().contains(word));
    let new = store.with_extension("new");
    std::fs::write(&new, good).unwrap();
    std::fs::rename(&new, store).unwrap();
    let load = daemon.post("/v1/x/models/load", &json!({"model": store.to_str().unwrap()}));
    assert_eq!(load.status, 200, "{}", load.text());
    assert_eq!(text(daemon), before);
}

#[test]
fn a_model_file_that_is_replaced_goes_on_as_it_was_and_ps_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let daemon = serve(dir.path(), &store);
    assert_eq!(daemon.get("/v1/x/ps")["models"][0]["file"], "unchanged");
    let before = text(&daemon);
    let other = dir.path().join("other");
    std::fs::write(&other, "another model").unwrap();
    std::fs::rename(&other, &store).unwrap();
    while daemon.get("/v1/x/ps")["models"][0]["file"] != "replaced" {}
    let shown = command(dir.path(), &["ps"]).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains("its file was replaced after loading"));
    assert_eq!(text(&daemon), before);
    std::fs::remove_file(&store).unwrap();
    while daemon.get("/v1/x/ps")["models"][0]["file"] != "removed" {}
    assert_eq!(text(&daemon), before);
}

/// Without a handler the process would end by SIGBUS at the first weight behind the cut.
#[test]
fn a_model_file_that_is_cut_fails_closed_and_the_daemon_lives() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let good = std::fs::read(&store).unwrap();
    let daemon = serve(dir.path(), &store);
    let before = text(&daemon);
    let endless = json!({"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "stream": true, "n": 8});
    let mut stream = daemon.connect();
    stream.write_all(&request("POST", "/v1/completions", &endless.to_string())).unwrap();
    daemon.until("dynamicinfer_num_requests_running", 8.0);
    File::options().write(true).open(&store).unwrap().set_len(4096).unwrap();
    let cut = read_answer(&mut stream);
    assert!(!cut.whole, "an answer of zeros came to its end");
    let last = cut.events().last().unwrap().clone();
    assert!(last.contains("error") && last.contains("cut short"), "{last}");
    fails_closed_and_comes_back(&daemon, &store, &good, &before, "cut short");
}

#[test]
fn a_model_file_that_is_written_to_fails_closed_and_the_daemon_lives() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let good = std::fs::read(&store).unwrap();
    let daemon = serve(dir.path(), &store);
    let before = text(&daemon);
    File::options().write(true).open(&store).unwrap().write_all_at(&[0x3c; 4096], 1 << 16).unwrap();
    fails_closed_and_comes_back(&daemon, &store, &good, &before, "was written to");
    // As `cp` over it does: cut to nothing, then written anew.
    File::options().write(true).open(&store).unwrap().set_len(0).unwrap();
    fails_closed_and_comes_back(&daemon, &store, &good, &before, "it ");
}

/// Its time, its size and its name were the same as before, so it went unnoticed, and answers were made of the new bytes. Names that
/// come and go and other rights are nothing that was written.
#[test]
fn a_model_file_that_is_written_to_with_its_time_set_back_fails_closed() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let file = MappedFile::open(&store).unwrap();
    let other = dir.path().join("other name");
    std::fs::hard_link(&store, &other).unwrap();
    assert_eq!(file.state(), FileState::Same);
    std::fs::remove_file(&other).unwrap();
    assert_eq!(file.state(), FileState::Same);
    std::fs::set_permissions(&store, std::fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(file.state(), FileState::Same);
    let good = std::fs::read(&store).unwrap();
    let daemon = serve(dir.path(), &store);
    let before = text(&daemon);
    let file = File::options().write(true).open(&store).unwrap();
    let time = file.metadata().unwrap().modified().unwrap();
    file.write_all_at(&[0x3c; 4096], 1 << 16).unwrap();
    file.set_modified(time).unwrap();
    fails_closed_and_comes_back(&daemon, &store, &good, &before, "its time was set back");
}

/// A log on a full disk cannot be written, and neither can what is said to the user: eprintln would panic.
#[test]
fn a_log_that_cannot_be_written_stops_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let full = || Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    let mut serve = command(dir.path(), &["serve", "demo"]);
    serve.env("DYNAMICINFER_LOG", "debug").env("NOTIFY_SOCKET", dir.path().join("nobody"));
    let child = serve.stdout(full()).stderr(full()).spawn().unwrap();
    let mut daemon = Daemon::of(child, dir.path());
    while UnixStream::connect(&daemon.socket).is_err() {}
    while daemon.call("GET", "/ready", "").status != 200 {}
    assert!(!text(&daemon).is_empty());
    daemon.signal(Signal::HUP);
    assert_eq!(daemon.post("/v1/x/models/load", &json!({"model": "/nowhere"})).status, 400);
    assert_eq!(daemon.post("/v1/x/models/load", &json!({"model": "demo"})).status, 200);
    assert!(!text(&daemon).is_empty());
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
}

/// A pipe for the log that nobody reads is full after some 64 KiB: whoever logged waited for its reader, and with it every answer.
#[test]
fn a_log_that_nobody_reads_stops_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut serve = command(dir.path(), &["serve", "demo"]);
    serve.env("DYNAMICINFER_LOG", "debug");
    let child = serve.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut daemon = Daemon::of(child, dir.path());
    while UnixStream::connect(&daemon.socket).is_err() {}
    while daemon.call("GET", "/ready", "").status != 200 {}
    for _ in 0..1000 {
        assert_eq!(daemon.post("/tokenize", &json!({"content": "a king"})).status, 200);
    }
    assert!(!text(&daemon).is_empty());
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
}

/// What a model without a profile has taught is kept when it goes, and the next load begins with it. A disk that takes nothing costs a warning,
/// not the file that is there, and not the daemon.
#[test]
fn what_was_learnt_is_kept_when_the_model_goes_and_a_full_disk_keeps_the_old() {
    let dir = tempfile::tempdir().unwrap();
    let model = format!("{}/tests/fixtures/models/relullama", env!("CARGO_MANIFEST_DIR"));
    let load = json!({ "model": model });
    let device = ["--device", "virtual", "--machine", "demo-pc", "--ffn-share", "0.25", "--predictor", "sign"];
    let mut daemon = Daemon::spawn(dir.path(), &[&["serve", &model], &device[..]].concat(), &[]);
    daemon.wait_for("this run learns for the next start");
    daemon.wait_for("is ready");
    let history = || {
        let models = dir.path().join(".local/share/dynamicinfer/models");
        let kept = std::fs::read_dir(models).into_iter().flatten().flatten().map(|model| model.path());
        kept.map(|model| model.join("activation.history")).find(|file| file.exists())
    };
    text(&daemon);
    assert!(history().is_none());
    assert_eq!(daemon.post("/v1/x/models/unload", &json!({})).status, 200);
    let kept = history().expect("a history was written");
    let first = std::fs::read(&kept).unwrap();
    // A file in place of the directory: whatever is written there fails, for root as well.
    let (models, away) = (kept.parent().unwrap(), dir.path().join("away"));
    assert_eq!(daemon.post("/v1/x/models/load", &load).status, 200);
    text(&daemon);
    std::fs::rename(models, &away).unwrap();
    std::fs::write(models, "in the way").unwrap();
    assert_eq!(daemon.post("/v1/x/models/unload", &json!({})).status, 200);
    let said = daemon.wait_for("is not kept");
    assert!(said.contains("activation.history") || said.contains("models"), "{said}");
    std::fs::remove_file(models).unwrap();
    std::fs::rename(&away, models).unwrap();
    assert!(std::fs::read(&kept).unwrap() == first);
    // And at the end of the daemon.
    assert_eq!(daemon.post("/v1/x/models/load", &load).status, 200);
    text(&daemon);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
    let last = std::fs::read(&kept).unwrap();
    assert!(last != first, "the daemon ended and kept nothing");
    // One that is damaged costs a warning.
    std::fs::write(&kept, &last[..last.len() / 2]).unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &[&["serve", &model], &device[..]].concat(), &[]);
    daemon.wait_for("it was set aside as");
    daemon.wait_for("is ready");
    text(&daemon);
}

/// A pipe that nobody writes to was waited for, for ever, and SIGTERM was not heard meanwhile.
#[test]
fn a_pipe_in_the_place_of_a_file_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = |name: &str| {
        let path = dir.path().join(name);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        path
    };
    let fifo = pipe("fifo");
    let name = fifo.to_str().unwrap();
    let refused: [(&[&str], i32); 3] = [
        (&["serve", "demo", "--config", name], 2),
        (&["config", "show", "--config", name], 2),
        (&["serve", "demo", "--listen", "127.0.0.1:0"], 5),
    ];
    for (verb, status) in refused {
        let ended = said(command(dir.path(), verb).env("DYNAMICINFER_SERVE_TOKEN_FILE", name));
        let ended = ended.unwrap_or_else(|| panic!("{verb:?} waits for ever"));
        let words = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.code() == Some(status) && words.contains("it is a pipe"), "{verb:?}: {words}");
    }
    // What looks like the rest of a pack that was killed, by a process that cannot be.
    let left = pipe("o.neurons.4294967295.tmp");
    let packed = said(&mut command(dir.path(), &["pack", "demo", "-o", "o.neurons"])).expect("pack waits for ever");
    assert!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
    assert!(left.exists(), "it is not ours");
    // Who holds a socket is asked of the lock beside it.
    pipe("other.sock.lock");
    let stop =
        said(&mut command(dir.path(), &["stop", "--daemon", "--socket", "other.sock"])).expect("stop waits for ever");
    assert_eq!(stop.status.code(), Some(3), "{}", String::from_utf8_lossy(&stop.stderr));
}
