//! Prompts that go on from texts which lost their slot, and whose texts those may be.

use crate::daemon::{Answer, Daemon, PATIENCE, command, read_all};
use rustix::process::Signal;
use serde_json::{Value as Json, json};
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const TEXT: &str = "/v1/completions";

/// Tokens that every vocabulary here has; texts of other seeds begin otherwise.
fn text(n: u32, seed: u32) -> Vec<u32> {
    (0..n).map(|i| 10 + (seed * 37 + i * 13 + i * i % 7) % 80).collect()
}

fn ask(prompt: &[u32]) -> Json {
    json!({"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": true})
}

/// Tokens of the prompt that did not run.
fn cached(answer: &Answer) -> u64 {
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

/// A daemon with one slot.
fn start(dir: &Path, model: &str, args: &[&str], environment: &[(&str, &str)]) -> Daemon {
    let args = [&["serve", model, "--parallel", "1"], args].concat();
    let mut daemon = Daemon::spawn(dir, &args, environment);
    daemon.wait_for("is ready");
    daemon
}

/// Tokens that the second turn of a talk need not run, whose slot another talk has had in between.
fn second_turn(daemon: &Daemon) -> u64 {
    let (mut a, b) = (text(100, 1), text(90, 2));
    assert_eq!(cached(&daemon.post(TEXT, &ask(&a))), 0);
    assert_eq!(cached(&daemon.post(TEXT, &ask(&b))), 0);
    a.extend(text(20, 3));
    cached(&daemon.post(TEXT, &ask(&a)))
}

/// With one slot and two talks that take turns, each turn ran its whole prompt.
#[test]
fn a_talk_that_lost_its_slot_runs_only_what_is_new() {
    let hybrid = format!("{}/tests/fixtures/models/qwen35", env!("CARGO_MANIFEST_DIR"));
    for model in ["demo", &hybrid] {
        let dir = tempfile::tempdir().unwrap();
        let daemon = start(dir.path(), model, &[], &[]);
        let found = second_turn(&daemon);
        assert!(found >= 100, "{model}: {found}");
        // One number everywhere.
        let state = &daemon.get("/v1/x/ps")["models"][0]["prompt_cache"];
        for (name, metric) in [
            ("bytes", "prompt_cache_bytes"),
            ("budget_bytes", "prompt_cache_budget_bytes"),
            ("texts", "prompt_cache_texts"),
            ("states", "prompt_cache_states"),
        ] {
            let metric = daemon.metric(&format!("dynamicinfer_{metric}"));
            assert_eq!(state[name].as_f64(), Some(metric), "{name}: {state}");
        }
        assert_eq!(state["texts"], 2);
        // An eighth of a small machine's free memory is less.
        let (bytes, budget) = (state["bytes"].as_u64().unwrap(), state["budget_bytes"].as_u64().unwrap());
        assert!(0 < bytes && bytes < budget && budget <= 1 << 28, "{state}");
        let restored = daemon.metric("dynamicinfer_prompt_cache_restored_tokens_total");
        assert_eq!(restored as u64, found);
        assert_eq!(daemon.metric("dynamicinfer_cached_tokens_total") as u64, found);
        let table = command(dir.path(), &["ps"]).output().unwrap();
        assert!(String::from_utf8(table.stdout).unwrap().contains("PROMPTS"));
    }
}

#[test]
fn without_a_cache_or_with_deterministic_answers_nothing_is_found_again() {
    for (args, environment) in
        [(&[][..], &[("DYNAMICINFER_SERVE_PROMPT_CACHE_BYTES", "0")][..]), (&["--deterministic"], &[])]
    {
        let dir = tempfile::tempdir().unwrap();
        let daemon = start(dir.path(), "demo", args, environment);
        assert_eq!(second_turn(&daemon), 0);
        for name in ["bytes", "budget_bytes", "saved_total", "restored_tokens_total"] {
            assert_eq!(daemon.metric(&format!("dynamicinfer_prompt_cache_{name}")), 0.0, "{name}");
        }
    }
}

/// A limit of memory leaves most of it to the weights.
#[test]
fn a_memory_limit_bounds_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path(), "demo", &["--ram", "512MiB"], &[]);
    assert_eq!(daemon.metric("dynamicinfer_prompt_cache_budget_bytes"), f64::from(64 << 20));
}

/// Two clients with tokens of their own: neither can tell by a prompt's time whether the other has asked the same.
#[test]
fn a_token_finds_nothing_of_another_token() {
    let tokens = ["token-of-the-first-one", "token-of-the-second-one"];
    for (isolate, apart, socket_apart) in [("auto", true, true), ("off", false, false), ("on", true, true)] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tokens");
        std::fs::write(&file, tokens.join("\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let environment =
            [("DYNAMICINFER_SERVE_ISOLATE", isolate), ("DYNAMICINFER_SERVE_TOKEN_FILE", file.to_str().unwrap())];
        let args = ["serve", "demo", "--parallel", "2", "--listen", "127.0.0.1:0"];
        let mut daemon = Daemon::spawn(dir.path(), &args, &environment);
        let url = daemon.wait_for("export OPENAI_BASE_URL=");
        let address = url.split_once("http://").unwrap().1.strip_suffix("/v1").unwrap().to_owned();
        assert!(daemon.wait_for("export OPENAI_API_KEY=").contains("$(head -n 1 '"));
        daemon.wait_for("is ready");
        let body = ask(&text(60, 1)).to_string();
        let with = |token: &str| format!("{token}\r\nContent-Length: {}\r\n\r\n", body.len());
        let lines = |token: &str| with(&format!("Authorization: Bearer {token}"));
        let head = format!("POST {TEXT} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
        let over_tcp = |token: &str| {
            let mut stream = TcpStream::connect(&address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            write!(stream, "{head}{}{body}", lines(token)).unwrap();
            read_all(&mut stream)
        };
        assert_eq!(over_tcp("token-of-nobody-at-all").status, 401);
        assert_eq!(cached(&over_tcp(tokens[0])), 0);
        assert!(cached(&over_tcp(tokens[0])) > 50);
        assert_eq!(cached(&over_tcp(tokens[1])) == 0, apart, "{isolate}");
        assert_eq!(
            cached(&daemon.raw(format!("{head}{}{body}", lines("")).as_bytes())) == 0,
            socket_apart,
            "{isolate}"
        );
        // By the header of Anthropic's clients it is the same token, and one that is shown beside it and is none opens nothing.
        let by_key = |shown: &str| {
            let mut stream = TcpStream::connect(&address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            write!(stream, "{head}{}{body}", with(shown)).unwrap();
            read_all(&mut stream)
        };
        tokens.iter().for_each(|token| assert!(cached(&by_key(&format!("x-api-key: {token}"))) > 50, "{isolate}"));
        let beside = format!("Authorization: Bearer token-of-nobody-at-all\r\nx-api-key: {}", tokens[0]);
        assert!(cached(&by_key(&beside)) > 50, "{isolate}");
        // Each has its own, whatever slots they have had.
        tokens.iter().for_each(|token| assert!(cached(&over_tcp(token)) > 50));
        // A gateway behind the socket sends its clients' tokens on.
        let behind = daemon.raw(format!("{head}{}{body}", lines("token-of-a-third-one")).as_bytes());
        assert_eq!(cached(&behind) == 0, isolate == "on", "{isolate}");
    }
}

/// With `serve.isolate` off any client could read and end the conversation of any other whose answer's id it knew.
#[test]
fn a_kept_answer_is_its_tokens_alone() {
    let tokens = ["token-of-the-first-one", "token-of-the-second-one"];
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    std::fs::write(&file, tokens.join("\n")).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let environment =
        [("DYNAMICINFER_SERVE_ISOLATE", "off"), ("DYNAMICINFER_SERVE_TOKEN_FILE", file.to_str().unwrap())];
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo", "--listen", "127.0.0.1:0"], &environment);
    let url = daemon.wait_for("export OPENAI_BASE_URL=");
    let address = url.split_once("http://").unwrap().1.strip_suffix("/v1").unwrap().to_owned();
    daemon.wait_for("is ready");
    let call = |how: &str, path: &str, token: &str, body: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = format!("{how} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
        let lines = format!("Authorization: Bearer {token}\r\nContent-Length: {}\r\n\r\n", body.len());
        write!(stream, "{head}{lines}{body}").unwrap();
        read_all(&mut stream)
    };
    let first = call("POST", "/v1/responses", tokens[0], r#"{"input": "Once", "max_output_tokens": 2}"#);
    assert_eq!(first.status, 200, "{}", first.text());
    let id = first.json()["id"].as_str().unwrap().to_owned();
    let (at, on) =
        (format!("/v1/responses/{id}"), json!({"input": "x", "max_output_tokens": 2, "previous_response_id": id}));
    let asked = |token: &str| {
        let going_on = call("POST", "/v1/responses", token, &on.to_string()).status;
        [call("GET", &at, token, "").status, going_on, call("DELETE", &at, token, "").status]
    };
    assert_eq!(asked(tokens[1]), [404; 3]);
    assert_eq!(daemon.call("GET", &at, "").status, 404, "the socket's clients show no token");
    assert_eq!(asked(tokens[0]), [200; 3]);
    assert_eq!(asked(tokens[0]), [404; 3]);
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

/// What is in a directory of prompts.
fn files(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Ends a daemon as its supervisor does.
fn stop(mut daemon: Daemon) {
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
}

/// A talk is not read anew after a restart, whether it had lost its slot before or not; what is no whole file costs a line.
#[test]
fn a_restarted_daemon_goes_on_from_its_directory() {
    let hybrid = format!("{}/tests/fixtures/models/qwen35", env!("CARGO_MANIFEST_DIR"));
    for model in ["demo", &hybrid] {
        let dir = tempfile::tempdir().unwrap();
        let kept = dir.path().join("kept");
        let args = ["--prompt-cache", kept.to_str().unwrap()];
        let daemon = start(dir.path(), model, &args, &[]);
        let talks = [1, 2].map(|seed| text(100, seed));
        talks.iter().for_each(|talk| assert_eq!(cached(&daemon.post(TEXT, &ask(talk))), 0));
        stop(daemon);
        assert_eq!((mode(&kept), files(&kept).len()), (0o700, 2), "{model}");
        assert!(files(&kept).iter().all(|file| mode(file) == 0o600));
        let next = |talk: &[u32]| [talk, &text(20, 3)].concat();

        let daemon = start(dir.path(), model, &args, &[]);
        assert!(daemon.metric("dynamicinfer_prompt_cache_disk_bytes") > 0.0);
        for talk in &talks {
            let found = cached(&daemon.post(TEXT, &ask(&next(talk))));
            assert!(found >= 100, "{model}: {found}");
        }
        stop(daemon);

        // One file is damaged in its middle, one is cut, one is none.
        let all = files(&kept);
        assert!(all.len() >= 2, "{model}: {all:?}");
        let mut bytes = std::fs::read(&all[0]).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle..middle + 64].iter_mut().for_each(|byte| *byte ^= 0x55);
        std::fs::write(&all[0], &bytes).unwrap();
        std::fs::write(&all[1], &bytes[..middle]).unwrap();
        std::fs::write(kept.join("none.prompt"), "nothing").unwrap();
        let daemon = start(dir.path(), model, &args, &[]);
        assert_eq!(daemon.metric("dynamicinfer_prompt_cache_files_ignored_total"), 2.0);
        talks.iter().for_each(|talk| assert_eq!(daemon.post(TEXT, &ask(&next(talk))).status, 200));
        stop(daemon);
        // Texts of another way of computing are not found.
        let daemon = start(dir.path(), model, &[&args[..], &["--kv", "f32"]].concat(), &[]);
        talks.iter().for_each(|talk| assert_eq!(cached(&daemon.post(TEXT, &ask(&next(talk)))), 0));
    }
}

#[test]
fn a_directory_that_others_can_read_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let open = dir.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (path, why) in [(&open, "chmod 700"), (&PathBuf::from("/dev/null"), "no directory")] {
        let refused =
            command(dir.path(), &["serve", "demo", "--prompt-cache", path.to_str().unwrap()]).output().unwrap();
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.status.code() == Some(2) && said.contains(why), "{:?}: {said}", refused.status);
    }
}
