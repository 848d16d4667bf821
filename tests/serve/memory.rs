//! What requests can take together: memory, and processes that render chat templates.

use crate::daemon::{Daemon, PATIENCE, command, read_answer, request};
use serde_json::json;
use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
/// The largest body that is taken by default.
const BODY: usize = 8 << 20;

/// A daemon whose address space is limited to so many KiB.
fn limited(dir: &Path, kib: u64) -> Daemon {
    let serve = command(dir, &["serve", "demo"]);
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", &format!(r#"ulimit -v {kib}; exec "$0" "$@""#)]);
    shell.arg(serve.get_program()).args(serve.get_args()).current_dir(dir).env_clear();
    shell.envs(serve.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let child = shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let daemon = Daemon::of(child, dir);
    let start = Instant::now();
    while UnixStream::connect(&daemon.socket).is_err() || daemon.call("GET", "/ready", "").status != 200 {
        assert!(start.elapsed() < PATIENCE, "it does not become ready");
    }
    daemon
}

/// The most memory that the daemon ever had, in MiB.
fn peak_mib(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap_or_default();
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    peak.expect("the daemon has ended") >> 10
}

/// Three texts of 32 MiB for /tokenize took 4.8 GiB each, also when their clients had gone, and ended a daemon that had 8 GiB; lists
/// and objects that nobody reads were kept as trees of fifty times their size.
#[test]
fn no_body_takes_many_times_its_bytes_whatever_it_holds() {
    const MAX_MIB: u64 = 1024;
    let dir = tempfile::tempdir().unwrap();
    let daemon = limited(dir.path(), 3 << 20);
    let fill = |bytes: usize, head: &str, unit: &str, tail: &str| {
        format!("{head}{}{tail}", unit.repeat((bytes - head.len() - tail.len()) / unit.len()))
    };
    let chat = r#"{"messages":[{"role":"user","content":"x"}],"#;
    let bodies = [
        ("/tokenize", fill(BODY, r#"{"content":""#, "a ", r#""}"#), 400),
        ("/tokenize", fill(1 << 20, r#"{"content":""#, "a ", r#""}"#), 200),
        ("/detokenize", fill(BODY, r#"{"tokens":[5"#, ",5", "]}"), 400),
        (CHAT, fill(BODY, &format!("{chat}\"tools\":[0"), r#",{"":0}"#, "]}"), 400),
        (CHAT, fill(BODY, &format!("{chat}\"tool_choice\":[0"), ",[]", "]}"), 400),
        (CHAT, fill(BODY, &format!("{chat}\"logit_bias\":{{\"5\":0"), r#","5":{}"#, "}}"), 400),
        (CHAT, fill(BODY, r#"{"messages":[{"role":"user","content":["#, "0,", "0]}]}"), 400),
        (CHAT, fill(BODY, r#"{"messages":[{"role":"user"}"#, r#",{"role":""}"#, "]}"), 400),
        (CHAT, fill(BODY, r#"{"messages":[{"role":"user","content":"","tool_calls":["#, "[],", "0]}]}"), 400),
        (
            TEXT,
            fill(BODY, r#"{"response_format":{"type":"json_schema","json_schema":{"schema":["#, r#"{"":0},"#, "0]}}}"),
            400,
        ),
        (TEXT, fill(BODY, r#"{"prompt":[5"#, ",5", "]}"), 400),
        (TEXT, fill(BODY, r#"{"prompt":["""#, r#","""#, "]}"), 400),
        (TEXT, fill(BODY, r#"{"prompt":[{}"#, ",{}", "]}"), 400),
        (TEXT, fill(BODY, r#"{"prompt":"x","stop":["""#, r#","""#, "]}"), 400),
    ];
    for (path, body, status) in bodies {
        let shown = &body[..body.len().min(70)];
        let bytes = request("POST", path, &body);
        let asked = |_| {
            let mut stream = daemon.connect();
            let _ = stream.write_all(&bytes);
            stream
        };
        // Three do not wait for their answers.
        (0..3).map(asked).for_each(drop);
        let answers: Vec<_> = (0..3).map(asked).collect::<Vec<_>>().iter_mut().map(read_answer).collect();
        let peak = peak_mib(&daemon);
        println!("{peak} MiB after {path} {shown}");
        assert!(peak < MAX_MIB, "{peak} MiB after {path} {shown}");
        answers.iter().for_each(|answer| assert_eq!(answer.status, status, "{path} {shown}"));
    }
    daemon.until("dynamicinfer_body_bytes", 0.0);
    assert_eq!(daemon.post(TEXT, &json!({"prompt": "x", "max_tokens": 1})).status, 200);
}

/// Each body had a limit, and 4,096 connections together had none.
#[test]
fn bodies_together_have_a_limit_and_who_comes_then_is_told_when_to_come_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("c.toml");
    // Those that have not come to their end are not cut before the test has.
    std::fs::write(&config, "[serve]\nstall_seconds = 600\n").unwrap();
    let daemon = Daemon::start_in(dir.path(), &["--config", config.to_str().unwrap()]);
    let text = json!({"content": "x".repeat(BODY - 100)}).to_string();
    let whole = request("POST", "/tokenize", &text);
    let all_but_one = |_| {
        let mut stream = daemon.connect();
        stream.write_all(&whole[..whole.len() - 1]).unwrap();
        stream
    };
    let unfinished: Vec<_> = (0..8).map(all_but_one).collect();
    daemon.until("dynamicinfer_body_bytes", 8.0 * (text.len() - 1) as f64);
    let refused = daemon.raw(&whole);
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(refused.headers.contains("retry-after: 1"), "{}", refused.headers);
    let error = &refused.json()["error"];
    assert_eq!(error["code"], "bodies_full");
    assert!(error["message"].as_str().unwrap().contains("serve.bodies_bytes"), "{error}");
    // What has no body is answered all the while.
    assert_eq!(daemon.get("/health")["status"], "ok");
    drop(unfinished);
    daemon.until("dynamicinfer_body_bytes", 0.0);
    assert_eq!(daemon.raw(&whole).json()["error"]["code"], "context_length_exceeded");
}

/// A tiny model whose chat template takes a tenth of a second.
fn serve_slow_template(dir: &Path) -> Daemon {
    let model = dir.join("slow");
    std::fs::create_dir(&model).unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/qwen2");
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture.join(file), model.join(file)).unwrap();
    }
    let loops = "{% for i in range(300) %}{% for j in range(200) %}{% endfor %}{% endfor %}{{ messages[0].content }}";
    std::fs::write(model.join("chat_template.jinja"), loops).unwrap();
    let mut daemon = Daemon::spawn(dir, &["serve", model.to_str().unwrap()], &[]);
    daemon.wait_for("is ready");
    daemon
}

/// The daemon's processes that render templates, or wait to.
fn renderers(daemon: &Daemon) -> BTreeSet<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let is_renderer = |pid: &u32| {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        // Behind the name, which may have anything in it: state and parent. One that has ended is no more.
        let stat = read("stat");
        let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        let (state, parent) = (fields.next(), fields.next());
        state != Some("Z") && parent == Some(&daemon.child.id().to_string()) && read("cmdline").contains("__render")
    };
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_renderer).collect()
}

fn chat() -> String {
    json!({"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}).to_string()
}

/// One process for each place, of which there are as many as cores, 2 to 4; as many that have done their work and are not gone yet;
/// and one that waits for the next request.
fn most_renderers() -> usize {
    2 * std::thread::available_parallelism().unwrap().get().clamp(2, 4) + 1
}

/// 64 chats at once started 64 processes, of 33 MiB each for the shortest template and up to 512 for another.
#[test]
fn many_chats_at_once_start_few_processes() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve_slow_template(dir.path());
    let mut most = 0;
    std::thread::scope(|scope| {
        let ask = |_| scope.spawn(|| daemon.call("POST", CHAT, &chat()));
        let asked: Vec<_> = (0..64).map(ask).collect();
        while !asked.iter().all(|one| one.is_finished()) {
            most = most.max(renderers(&daemon).len());
        }
        println!("64 chats, at most {most} processes at once");
        assert!((1..=most_renderers()).contains(&most), "{most} processes at once");
        for answer in asked.into_iter().map(|one| one.join().unwrap()) {
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    });
}

/// Templates were rendered for clients that had long gone, before those that had not.
#[test]
fn a_client_that_goes_gives_up_its_place_before_its_template_runs() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve_slow_template(dir.path());
    let gone = |_| daemon.connect().write_all(&request("POST", CHAT, &chat())).unwrap();
    (0..60).for_each(gone);
    let mut seen = BTreeSet::new();
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| daemon.call("POST", CHAT, &chat()));
        while !asked.is_finished() {
            seen.append(&mut renderers(&daemon));
        }
        assert_eq!(asked.join().unwrap().status, 200);
    });
    println!("60 clients that went and one that did not: {} processes", seen.len());
    assert!(seen.len() <= 2 * most_renderers(), "{} processes", seen.len());
    daemon.until("dynamicinfer_num_requests_unread", 0.0);
}
