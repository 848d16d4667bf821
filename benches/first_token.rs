//! What HTTP adds to the first token: the same prompts to an engine in this process and to a daemon, in turns, each until its
//! first text is in the asker's hands. And what a chat template adds, rendered by a process of its own.
//!
//! Run: cargo bench --bench first_token [-- ROUNDS]

use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::Engine;
use dynamicinfer::engine::sampler::SamplingParams;
use dynamicinfer::generation::{Event, Handle, Job, Limits, Speculation, start};
use dynamicinfer::model::{KvType, Model};
use dynamicinfer::tokenizer::{Special, Tokenizer};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_dynamicinfer");
/// The daemon's own defaults for the demo model.
const SLOTS: usize = 8;

struct Daemon {
    child: Child,
    socket: PathBuf,
}

impl Daemon {
    fn start(dir: &Path, name: &str, model: &Path) -> Daemon {
        let socket = dir.join(name);
        let mut command = Command::new(PROGRAM);
        command.arg("serve").arg(model).args(["--predictor", "dense", "--socket"]).arg(&socket);
        let mut child = command.env("XDG_CACHE_HOME", dir).stderr(Stdio::piped()).spawn().expect("the daemon starts");
        let mut said = BufReader::new(child.stderr.take().expect("piped")).lines().map_while(Result::ok);
        assert!(said.any(|line| line.contains("is ready")), "the daemon does not become ready");
        std::thread::spawn(move || said.for_each(drop));
        Daemon { child, socket }
    }

    /// Milliseconds until the first text is here; then the rest is read.
    fn first_token(&self, path: &str, body: &str) -> f64 {
        let begin = Instant::now();
        let mut stream = UnixStream::connect(&self.socket).expect("the daemon listens");
        let length = body.len();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .expect("the daemon reads");
        let (mut seen, mut piece, mut first) = (Vec::new(), [0; 4096], None);
        loop {
            let n = stream.read(&mut piece).expect("the daemon answers");
            if n == 0 {
                return first.unwrap_or_else(|| panic!("no text: {}", String::from_utf8_lossy(&seen)));
            }
            if first.is_none() {
                seen.extend_from_slice(&piece[..n]);
                let text = String::from_utf8_lossy(&seen);
                let here = text.contains("\"text\":\"") || text.contains("\"delta\":{\"content\":\"");
                first = here.then(|| 1e3 * begin.elapsed().as_secs_f64());
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The same without a daemon.
fn first_token(handle: &Handle, tokens: Vec<u32>, max_tokens: usize) -> f64 {
    let begin = Instant::now();
    let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let job = Job { client: 1, params, ignore_eos: true, ..Job::plain(tokens, max_tokens) };
    let mut events = handle.submit(job).expect("there is room");
    let mut first = None;
    while let Some(event) = events.blocking_recv() {
        if let (Event::Delta(_), None) = (&event, first) {
            first = Some(1e3 * begin.elapsed().as_secs_f64());
        }
    }
    first.expect("there is text")
}

fn report(what: &str, mut ms: Vec<f64>) -> (f64, f64) {
    ms.sort_by(f64::total_cmp);
    let at = |share: f64| ms[((ms.len() - 1) as f64 * share) as usize];
    println!("{what:34} median {:6.2} ms, p99 {:6.2}, worst of {} {:6.2}", at(0.5), at(0.99), ms.len(), at(1.0));
    (at(0.5), at(0.99))
}

fn main() {
    let rounds = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(1000);
    let dir = tempfile::tempdir().expect("a temporary directory");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let store = dir.path().join("demo.neurons");
    let pack = |from: &Path, to: &Path| {
        let done = Command::new(PROGRAM).arg("pack").arg(from).arg("-o").arg(to).stderr(Stdio::null()).status();
        assert!(done.expect("pack runs").success());
    };
    pack(&root.join("assets/demo"), &store);
    let model = Model::open(&store).expect("it was just packed");
    let tokenizer = Arc::new(Tokenizer::new(model.tokenizer().expect("a tokenizer"), &store).expect("a good one"));
    let context = model.config.context;
    let engine = Engine::new(model, dynamicinfer::config::default_threads(), Kernels::best());
    let limits = Limits {
        queue: 64,
        slots: SLOTS,
        context,
        kv: KvType::F16,
        deterministic: false,
        rest: Duration::MAX,
        slowdown: 2.0,
        prompt_cache_bytes: 1 << 28,
        prompt_cache_every: 8192,
        speculation: Speculation::Auto,
    };
    let handle = start(engine, tokenizer.clone(), limits).expect("the worker starts");
    let daemon = Daemon::start(dir.path(), "d.sock", &store);

    // Answers that go on, so that the engine computes while the first text is on its way; and some that end with it.
    for max_tokens in [24, 1] {
        let (mut alone, mut http) = (Vec::new(), Vec::new());
        for round in 0..rounds + 20 {
            let prompt = format!("Once upon a time there were {}", round % 7);
            let tokens = tokenizer.encode_prompt(&prompt, Special::Parse).expect("plain text");
            let here = first_token(&handle, tokens, max_tokens);
            let body = format!(
                r#"{{"prompt": "{prompt}", "temperature": 0, "ignore_eos": true, "stream": true, "max_tokens": {max_tokens}}}"#
            );
            let there = daemon.first_token("/v1/completions", &body);
            if round >= 20 {
                alone.push(here);
                http.push(there);
            }
        }
        println!("answers of {max_tokens} tokens");
        let (alone, http) = (report("in process", alone), report("through the daemon", http));
        println!("{:34} median {:6.2} ms, p99 {:6.2}", "HTTP adds", http.0 - alone.0, http.1 - alone.1);
    }
    drop(daemon);

    let store = dir.path().join("templated.neurons");
    pack(&root.join("tests/fixtures/models/qwen2"), &store);
    let daemon = Daemon::start(dir.path(), "t.sock", &store);
    let (mut text, mut chat) = (Vec::new(), Vec::new());
    let rest = r#""temperature": 0, "ignore_eos": true, "stream": true, "max_tokens": 4"#;
    for _ in 0..rounds.min(300) {
        let prompt = r#"{"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "#;
        text.push(daemon.first_token("/v1/completions", &format!("{prompt}{rest}}}")));
        let messages = r#"{"messages": [{"role": "user", "content": "hi"}], "#;
        chat.push(daemon.first_token("/v1/chat/completions", &format!("{messages}{rest}}}")));
    }
    println!("a model with a chat template");
    let (text, chat) = (report("a prompt as it is", text), report("a message, through the template", chat));
    println!("{:34} median {:6.2} ms, p99 {:6.2}", "the template adds", chat.0 - text.0, chat.1 - text.1);
}
