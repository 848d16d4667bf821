//! Nobody changes what another is answered, and nobody keeps others waiting.

use crate::daemon::{Answer, Daemon, PATIENCE, command, read_answer, request, said};
use dynamicinfer::scheduler::Policy;
use rustix::process::Signal;
use serde_json::{Value as Json, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const PROMPTS: [&str; 4] = ["Once upon a time", "The king said", "In the morning", "There was a house"];

/// The demo model with these settings, listening at a TCP port as well: its address, and its token.
fn with_port(dir: &Path, settings: &[(&str, &str)]) -> (Daemon, String, String) {
    let mut daemon = Daemon::spawn(dir, &["serve", "demo", "--listen", "127.0.0.1:0"], settings);
    let (address, token) = daemon.port();
    daemon.wait_for("is ready");
    (daemon, address, token)
}

fn tcp(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// The status of an answer whose connection stays.
fn status(stream: &mut TcpStream, request: &str) -> u16 {
    stream.write_all(request.as_bytes()).unwrap();
    let mut bytes = [0; 4096];
    let n = stream.read(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes[..n]).split(' ').nth(1).unwrap().parse().unwrap()
}

/// The whole of an answer: its text and how likely each token was.
fn answer(daemon: &Daemon, prompt: &str, tokens: u32) -> Json {
    let ask = json!({
        "prompt": prompt, "max_tokens": tokens, "temperature": 1.5, "seed": 2, "ignore_eos": true, "logprobs": 2});
    daemon.post("/v1/completions", &ask).json()["choices"][0].clone()
}

fn go_by(daemon: &Daemon, policy: &str) {
    let answer = daemon.call("PUT", "/v1/x/policy", &json!({"policy": policy}).to_string());
    assert_eq!(answer.status, 200, "{policy}: {}", answer.text());
}

/// What is used is what was set, by CPU and device alike.
fn assert_used_as_set(daemon: &Daemon) {
    let told = daemon.get("/v1/x/thresholds");
    for (set, used) in told["thresholds"].as_array().unwrap().iter().zip(told["used"].as_array().unwrap()) {
        assert!(used == &json!({"cpu": set, "device": set}), "{told}");
    }
}

/// A change of the policy rounded every threshold to a 255th: 0.00027 became 0, 47.2 % of the neurons were computed instead of 22.3 %,
/// other texts came out, 392 of 9,173, and going back changed nothing. Besides, neurons moved as others' questions had it, and sums of CPU
/// and device are rounded by who adds up what: log probabilities differed by 0.0002 from one time to the next.
#[test]
fn no_pair_of_policies_there_and_back_changes_a_deterministic_answer() {
    let daemon = &Daemon::start(&["--device", "virtual", "--ffn-share", "0.3", "--deterministic", "--no-history"]);
    let before = daemon.get("/v1/x/thresholds");
    let rounds = |t: &Json| t.as_f64().is_some_and(|t| (t * 255.0).round() != t * 255.0);
    assert!(before["thresholds"].as_array().unwrap().iter().any(rounds), "no rounding would be seen: {before}");
    let alone = PROMPTS.map(|prompt| answer(daemon, prompt, 12));
    let differ = |i: usize| usize::from(answer(daemon, PROMPTS[i % 4], 12) != alone[i % 4]);
    let done = &AtomicBool::new(false);
    let names = Policy::ALL.map(Policy::name);
    let pairs = names.into_iter().flat_map(|there| names.map(|back| (there, back)));
    let pairs = pairs.filter(|(there, back)| there != back);
    let (answers, differed) = std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let (mut answers, mut differed) = (0, 0);
            while !done.load(Ordering::SeqCst) {
                differed += differ(answers);
                answers += 1;
            }
            (answers, differed)
        });
        let (mut answers, mut differed) = (0, 0);
        for (there, back) in pairs {
            for policy in [back, there, back] {
                go_by(daemon, policy);
                differed += differ(answers) + differ(answers + 1);
                answers += 2;
            }
        }
        done.store(true, Ordering::SeqCst);
        let others = others.join().unwrap();
        (answers + others.0, differed + others.1)
    });
    assert!(answers >= 180 && differed == 0, "{differed} of {answers} answers differ from what was said before");
    assert_eq!(daemon.get("/v1/x/thresholds")["thresholds"], before["thresholds"]);
    assert_used_as_set(daemon);
}

/// GET told the thresholds that had been set, whatever the scheduler had made of them, and one that was set was balanced from the one
/// before it.
#[test]
fn thresholds_that_are_balanced_are_told_and_taken_back_whole() {
    let machine = ["--machine", "demo-pc"];
    let daemon =
        Daemon::start(&[&["--device", "virtual", "--ffn-share", "0.3", "--no-history"], &machine[..]].concat());
    assert_eq!(daemon.call("PUT", "/v1/x/thresholds", r#"{"threshold": 0.3}"#).status, 200);
    let apart = |told: &Json| told["used"].as_array().unwrap().iter().any(|used| used["cpu"] != used["device"]);
    let balanced = (0..20).find_map(|i| {
        answer(&daemon, PROMPTS[i % 4], 60);
        Some(daemon.get("/v1/x/thresholds")).filter(apart)
    });
    let balanced = balanced.expect("nothing was balanced: a card that is faster than the CPU takes more");
    for used in balanced["used"].as_array().unwrap() {
        let [cpu, device] = ["cpu", "device"].map(|half| used[half].as_f64().unwrap());
        assert!(device < 0.301 && cpu > 0.299, "{balanced}");
    }
    go_by(&daemon, "macro");
    assert_used_as_set(&daemon);
    answer(&daemon, PROMPTS[0], 60);
    assert_used_as_set(&daemon);
}

/// 4,096 connections to the port that said nothing kept the owner of the Unix socket waiting for 8 to 30 s.
#[test]
fn a_full_port_does_not_keep_the_sockets_owner_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let (daemon, address, _) = with_port(
        dir.path(),
        &[
            ("DYNAMICINFER_SERVE_CONNECTIONS", "8"),
            ("DYNAMICINFER_SERVE_TCP_CONNECTIONS", "8"),
            ("DYNAMICINFER_SERVE_STALL_SECONDS", "3600"),
            ("DYNAMICINFER_SERVE_TOKEN_SECONDS", "3600"),
        ],
    );
    let _idle: Vec<TcpStream> = (0..100).map(|_| tcp(&address)).collect();
    for _ in 0..20 {
        assert_eq!(daemon.get("/health")["status"], "ok");
    }
}

/// A connection without a token was held for as long as a header may take.
#[test]
fn who_shows_no_token_is_cut_soon_and_who_has_shown_it_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (_daemon, address, token) = with_port(
        dir.path(),
        &[("DYNAMICINFER_SERVE_STALL_SECONDS", "3600"), ("DYNAMICINFER_SERVE_TOKEN_SECONDS", "1")],
    );
    let ask =
        |token: &str| format!("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n");
    let mut known = tcp(&address);
    assert_eq!(status(&mut known, &ask(&token)), 200);
    // One says nothing, one begins a header, one has a wrong token, one asks what everybody may.
    let mut strangers = [tcp(&address), tcp(&address), tcp(&address), tcp(&address)];
    strangers[1].write_all(b"GET /health HTT").unwrap();
    assert_eq!(status(&mut strangers[2], &ask("0123456789abcdef")), 401);
    assert_eq!(status(&mut strangers[3], "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"), 200);
    for stranger in &mut strangers {
        assert!(stranger.read(&mut [0; 512]).is_ok_and(|n| n == 0), "it is still there");
    }
    // That took longer than the other had to show its token.
    assert_eq!(status(&mut known, &ask(&token)), 200);
}

/// Eight clients that did not read kept a ninth waiting for 24 to 40 s.
#[test]
fn who_does_not_read_gives_way_to_who_waits_and_who_reads_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let settings = [("DYNAMICINFER_SERVE_STALL_SECONDS", "3600"), ("DYNAMICINFER_SERVE_REST_SECONDS", "1")];
    let args = ["serve", "demo", "--parallel", "2", "--ctx-size", "4096"];
    let mut daemon = Daemon::spawn(dir.path(), &args, &settings);
    daemon.wait_for("is ready");
    let ask = |tokens: u64, logprobs: Json| {
        let ask =
            json!({"prompt": "Once", "max_tokens": tokens, "ignore_eos": true, "stream": true, "logprobs": logprobs});
        let mut stream = daemon.connect();
        stream.write_all(&request("POST", "/v1/completions", &ask.to_string())).unwrap();
        stream
    };
    // More than the kernel and the daemon hold for a reader.
    let mut still = ask(4000, json!(20));
    daemon.until("dynamicinfer_num_requests_running", 1.0);
    let mut read = ask(3000, Json::Null);
    let reader = std::thread::spawn(move || read_answer(&mut read));
    daemon.until("dynamicinfer_num_requests_running", 2.0);
    // Two wait for one place.
    let waiting = [(); 2].map(|()| ask(8, Json::Null));
    for mut stream in waiting {
        assert_eq!(read_answer(&mut stream).streamed().1.as_deref(), Some("length"));
        assert!(!reader.is_finished(), "it waited for who reads, while another did not");
    }
    let (_, reason) = reader.join().unwrap().streamed();
    assert_eq!(reason.as_deref(), Some("length"), "who reads was cut");
    let cut = read_answer(&mut still);
    let last = cut.events().last().unwrap().clone();
    assert!(!cut.whole && last.contains("this answer was not read") && last.contains("serve.rest_seconds"), "{last}");
    assert!(cut.events().len() > 1000, "{} events: what was made is not lost", cut.events().len());
}

/// A body of which a byte came every 1.5 s was waited for as long as the client liked.
#[test]
fn a_body_that_comes_byte_by_byte_is_answered_in_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let settings = [("DYNAMICINFER_SERVE_STALL_SECONDS", "3600"), ("DYNAMICINFER_SERVE_BODY_SECONDS", "1")];
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo"], &settings);
    daemon.wait_for("is ready");
    let mut slow = daemon.connect();
    // The wait for an answer that does not come is the pause between two bytes.
    slow.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    write!(slow, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n").unwrap();
    let mut bytes = [0; 4096];
    let answer = (0..400).find_map(|_| {
        slow.write_all(b" ").unwrap();
        slow.read(&mut bytes).ok()
    });
    let answer = String::from_utf8_lossy(&bytes[..answer.expect("400 bytes in 20 s are still read")]).into_owned();
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("serve.body_seconds"), "{answer}");
}

/// Every verb waited for ever for a daemon that had been stopped, as a debugger or a full machine does it.
#[test]
fn a_daemon_that_stands_still_ends_every_verb_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(dir.path(), &[]);
    // Nothing takes so long that it is cut while the daemon lives.
    let load = said(&mut command(dir.path(), &["load", "demo", "--timeout", "1"])).expect("load waits for ever");
    assert!(load.status.success(), "{}", String::from_utf8_lossy(&load.stderr));
    daemon.signal(Signal::STOP);
    std::thread::scope(|scope| {
        let verbs = ["ps", "budget", "budget set 1GiB", "load demo", "stop", "top --json", "chat"];
        for verb in verbs {
            let dir = dir.path();
            scope.spawn(move || {
                let mut words: Vec<&str> = verb.split(' ').collect();
                words.splice(1..1, ["--timeout", "1"]);
                let ended = said(&mut command(dir, &words));
                let ended = ended.unwrap_or_else(|| panic!("{verb} waits for ever"));
                let words = String::from_utf8_lossy(&ended.stderr);
                assert_eq!(ended.status.code(), Some(1), "{verb}: {words}");
                assert!(words.contains("has not answered for 1 s"), "{verb}: {words}");
            });
        }
        scope.spawn(|| {
            let doctor = said(&mut command(dir.path(), &["doctor", "--timeout", "1"])).expect("doctor waits for ever");
            assert!(String::from_utf8_lossy(&doctor.stdout).contains("has not answered"));
        });
    });
    // It does what it was asked meanwhile, and more is not to be said of its model.
    daemon.signal(Signal::CONT);
    assert_eq!(daemon.get("/health")["status"], "ok");
}

/// One `load` of a model that is none took the model in service away, and every answer that was under way.
#[test]
fn thirty_bad_loads_at_once_cut_no_answer_and_leave_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = &Daemon::start_in(dir.path(), &["--deterministic"]);
    let damaged = dir.path().join("damaged.gguf");
    std::fs::write(&damaged, b"GGUF is what it says, and nothing behind it").unwrap();
    // Counts of layers that ended the daemon, or took gigabytes before they were refused.
    let deep = dir.path().join("deep");
    std::fs::create_dir(&deep).unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models");
    let mut config: Json = serde_json::from_slice(&std::fs::read(fixtures.join("llama/config.json")).unwrap()).unwrap();
    config["num_hidden_layers"] = 1_000_000_000_000u64.into();
    std::fs::write(deep.join("config.json"), config.to_string()).unwrap();
    std::fs::copy(fixtures.join("llama/model.safetensors"), deep.join("model.safetensors")).unwrap();
    let deep_gguf = dir.path().join("deep.gguf");
    let mut bytes = std::fs::read(fixtures.join("llama.gguf")).unwrap();
    let key = b"llama.block_count";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len();
    // Behind the key its type, an unsigned integer of four bytes.
    assert_eq!(bytes[at..at + 4], 4u32.to_le_bytes());
    bytes[at + 4..at + 8].fill(0xff);
    std::fs::write(&deep_gguf, bytes).unwrap();
    let folders = [&damaged, &deep, &deep_gguf].map(|path| path.to_str().unwrap());
    let bad = ["/nowhere", folders[0], "demo\u{0}", "", dir.path().to_str().unwrap(), folders[1], folders[2]];
    let ask = |seed: usize| json!({"prompt": "Once", "max_tokens": 150, "ignore_eos": true, "seed": seed});
    let said = |answer: Answer| {
        assert_eq!(answer.status, 200, "{}", answer.text());
        let choice = &answer.json()["choices"][0];
        assert_eq!(choice["finish_reason"], "length", "the answer was cut");
        choice["text"].clone()
    };
    let alone: Vec<Json> = (0..4).map(|seed| said(daemon.post("/v1/completions", &ask(seed)))).collect();
    std::thread::scope(|scope| {
        let running: Vec<_> =
            (0..4).map(|seed| scope.spawn(move || daemon.post("/v1/completions", &ask(seed)))).collect();
        daemon.until("dynamicinfer_num_requests_running", 4.0);
        let load = |model: &str| daemon.post("/v1/x/models/load", &json!({"model": model}));
        let loads: Vec<_> = (0..30).map(|i| scope.spawn(move || load(bad[i % bad.len()]))).collect();
        for refused in loads {
            let refused = refused.join().unwrap();
            assert!((400..500).contains(&refused.status), "{}: {}", refused.status, refused.text());
            assert_eq!(daemon.get("/ready")["model"], "demo");
        }
        for (running, alone) in running.into_iter().zip(&alone) {
            assert_eq!(&said(running.join().unwrap()), alone);
        }
    });
    assert_eq!(said(daemon.post("/v1/completions", &ask(0))), alone[0]);
}

/// Embeddings of one client made another's answer 35 times as slow. Every endpoint is asked by two clients at once for as long as an answer is
/// being made; only what ends it (`load` of a model that there is, `unload`) is left out.
#[test]
fn no_endpoint_does_two_things_between_two_tokens_of_an_answer() {
    let daemon = &Daemon::start(&["--device", "virtual", "--ffn-share", "0.25", "--no-history", "--ctx-size", "2048"]);
    let long = "The king went into the wood. ".repeat(30);
    let half = daemon.get("/v1/x/budget")["vram_budget_bytes"].as_u64().unwrap();
    let chat = json!({"messages": [{"role": "user", "content": long}], "max_tokens": 2});
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]});
    let mut held = json!({"messages": [{"role": "user", "content": "Say b."}], "max_tokens": 9});
    let mut calling = held.clone();
    held["response_format"] = json!({"type": "json_schema", "json_schema": {"name": "b", "schema": schema}});
    calling["tools"] = json!([{"type": "function", "function": {"name": "say", "parameters": schema}}]);
    let asked: Vec<(&str, &str, Json)> = vec![
        ("GET", "/health", json!({})),
        ("GET", "/ready", json!({})),
        ("GET", "/metrics", json!({})),
        ("GET", "/openapi.json", json!({})),
        ("GET", "/v1/models", json!({})),
        ("GET", "/v1/models/demo", json!({})),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/completions", json!({"prompt": long, "max_tokens": 2})),
        ("POST", "/v1/responses", json!({"input": long, "max_output_tokens": 2})),
        ("GET", "/v1/responses/none", json!({})),
        ("DELETE", "/v1/responses/none", json!({})),
        ("POST", "/v1/messages", json!({"messages": [{"role": "user", "content": "Once"}], "max_tokens": 2})),
        ("POST", "/v1/messages/count_tokens", json!({"messages": [{"role": "user", "content": "Once"}]})),
        ("POST", "/v1/embeddings", json!({"input": [long, long]})),
        (
            "POST",
            "/api/chat",
            json!({"messages": [{"role": "user", "content": "Once"}], "options": {"num_predict": 2}}),
        ),
        ("POST", "/api/generate", json!({"prompt": "Once", "options": {"num_predict": 2}})),
        ("POST", "/api/embed", json!({"input": ["Once", "Once"]})),
        ("POST", "/api/embeddings", json!({"prompt": "Once"})),
        ("GET", "/api/tags", json!({})),
        ("POST", "/api/show", json!({})),
        ("GET", "/api/ps", json!({})),
        ("GET", "/api/version", json!({})),
        ("POST", "/infill", json!({"input_prefix": long, "input_suffix": "."})),
        ("POST", "/tokenize", json!({"content": long})),
        ("POST", "/detokenize", json!({"tokens": [5, 6, 7]})),
        ("GET", "/v1/x/ps", json!({})),
        ("GET", "/v1/x/cache", json!({})),
        ("GET", "/v1/x/budget", json!({})),
        ("PUT", "/v1/x/budget", json!({"vram_budget_bytes": half})),
        ("GET", "/v1/x/policy", json!({})),
        ("PUT", "/v1/x/policy", json!({"policy": "static"})),
        ("GET", "/v1/x/thresholds", json!({})),
        ("PUT", "/v1/x/thresholds", json!({"threshold": 0.3})),
        ("POST", "/v1/x/models/load", json!({"model": "/nowhere"})),
        ("GET", "/v1/x/config", json!({})),
        ("POST", "/v1/chat/completions", held),
        ("POST", "/v1/chat/completions", calling),
    ];
    for (route, methods) in daemon.get("/openapi.json")["paths"].as_object().unwrap() {
        let route = route.replace("{model}", "demo").replace("{id}", "none");
        for method in methods.as_object().unwrap().keys().filter(|_| route != "/v1/x/models/unload") {
            let is_asked = asked.iter().any(|(how, path, _)| *path == route && how.eq_ignore_ascii_case(method));
            assert!(is_asked, "{method} {route} is not asked beside the answer; add it above");
        }
    }
    let done = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking: Vec<_> = asked.iter().flat_map(|ask| [ask; 2]).collect();
        let asking: Vec<_> = asking
            .into_iter()
            .map(|(method, path, body)| {
                let body = body.to_string();
                scope.spawn(move || {
                    let mut answers = 0;
                    while !done.load(Ordering::SeqCst) || answers == 0 {
                        let answer = daemon.call(method, path, if *method == "GET" { "" } else { &body });
                        let wanted = match *path {
                            // There is none, and the demo has no tokens for filling in.
                            "/v1/x/models/load" | "/infill" => 400,
                            "/v1/responses/none" => 404,
                            _ => 200,
                        };
                        assert!([wanted, 429].contains(&answer.status), "{path}: {} {}", answer.status, answer.text());
                        answers += usize::from(answer.status == wanted);
                    }
                })
            })
            .collect();
        let story = json!({"prompt": "Once", "max_tokens": 60, "ignore_eos": true});
        let answer = daemon.post("/v1/completions", &story);
        done.store(true, Ordering::SeqCst);
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["choices"][0]["finish_reason"], "length", "{}", answer.text());
        asking.into_iter().for_each(|asking| asking.join().unwrap());
    });
    // It counts what was done since each token of each answer.
    assert_eq!(daemon.metric("dynamicinfer_steps_between_tokens_max"), 1.0);
    for (done, least) in [("embedding_passes", 4.0), ("engine_questions", 16.0), ("prompts_along", 1.0)] {
        assert!(daemon.metric(&format!("dynamicinfer_{done}_total")) >= least, "{done}");
    }
}

/// Whoever had the token for questions could unload the model that others were asking.
#[test]
fn the_port_answers_and_does_not_steer_unless_it_may() {
    let dir = tempfile::tempdir().unwrap();
    for (steering, at_socket, at_port) in [(None, true, false), (Some("all"), true, true), (Some("off"), false, false)]
    {
        let setting = steering.map(|value| ("DYNAMICINFER_SERVE_STEERING", value));
        let (daemon, address, token) = with_port(dir.path(), setting.as_slice());
        let lines = format!("Host: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n");
        let at_port_of = |method: &str, path: &str, body: &str| {
            let ask = format!("{method} {path} HTTP/1.1\r\n{lines}Content-Length: {}\r\n\r\n{body}", body.len());
            status(&mut tcp(&address), &ask)
        };
        assert_eq!(at_port_of("POST", "/v1/completions", r#"{"prompt": "x", "max_tokens": 1}"#), 200);
        for looked_at in ["ps", "cache", "budget", "policy", "thresholds", "config"] {
            assert_eq!(at_port_of("GET", &format!("/v1/x/{looked_at}"), ""), 200, "{looked_at}");
        }
        let steers = [
            ("PUT", "budget"),
            ("PUT", "policy"),
            ("PUT", "thresholds"),
            ("POST", "models/load"),
            ("POST", "models/unload"),
        ];
        for (method, what) in steers {
            let path = format!("/v1/x/{what}");
            // Refused for what it says, and not for who says it.
            assert_eq!(at_port_of(method, &path, "{}") != 403, at_port, "{steering:?} {path}");
            assert_eq!(daemon.call(method, &path, "{}").status != 403, at_socket, "{steering:?} {path}");
        }
    }
    let wrong = command(dir.path(), &["config", "show"]).env("DYNAMICINFER_SERVE_STEERING", "tcp").output().unwrap();
    let words = String::from_utf8_lossy(&wrong.stderr);
    assert!(wrong.status.code() == Some(2) && words.contains("unix or all or off"), "{words}");
}
