//! A daemon of its own for a test, and the plainest HTTP that can talk to it: what a test sends is what goes over the wire.

use crate::ended::ended;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value as Json, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Longer than any step of a test on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(180);

pub struct Daemon {
    pub child: Child,
    pub socket: PathBuf,
    said: Mutex<Receiver<String>>,
    _dir: Option<tempfile::TempDir>,
}

pub struct Answer {
    pub status: u16,
    pub headers: String,
    pub body: Vec<u8>,
    /// Whether the body ended as HTTP says it does.
    pub whole: bool,
}

impl Answer {
    pub fn json(&self) -> Json {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    /// The data of a stream's events; comments are left out.
    pub fn events(&self) -> Vec<String> {
        self.text().split("\n\n").filter_map(|event| event.strip_prefix("data: ").map(str::to_owned)).collect()
    }

    /// The text of choice 0 and its finish_reason, of a stream of a chat.
    pub fn streamed(&self) -> (String, Option<String>) {
        let (mut text, mut reason) = (String::new(), None);
        for event in self.events().iter().filter(|event| *event != "[DONE]") {
            let event: Json = serde_json::from_str(event).unwrap();
            let choice = &event["choices"][0];
            if choice["index"] == 0 {
                text += choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
                reason = choice["finish_reason"].as_str().map(str::to_owned).or(reason);
            }
        }
        (text, reason)
    }
}

pub fn command(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(super::programs::program(args));
    // Packed once for all tests; the rest is the test's own.
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("serve-cache");
    command.args(args).current_dir(dir).stdin(Stdio::null());
    command.env_clear().env("PATH", "/usr/bin:/bin").env("XDG_CACHE_HOME", cache).env("HOME", dir);
    command.env("XDG_RUNTIME_DIR", dir).env("RUST_BACKTRACE", "0");
    command
}

/// Parameters of a function that tells the weather.
pub fn forecast() -> Json {
    json!({
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["place", "days"],
        "additionalProperties": false,
    })
}

/// A copy of the demo model with one of its files changed.
pub fn changed_demo(dir: &Path, file: &str, change: impl FnOnce(&mut Json)) -> PathBuf {
    let (demo, copy) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo"), dir.join("model"));
    std::fs::create_dir(&copy).unwrap();
    for file in
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    {
        std::fs::copy(demo.join(file), copy.join(file)).unwrap();
    }
    let mut json = serde_json::from_slice(&std::fs::read(demo.join(file)).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(copy.join(file), json.to_string()).unwrap();
    copy
}

impl Daemon {
    /// The demo model, with these arguments beside.
    pub fn start(args: &[&str]) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let mut daemon = Daemon::start_in(dir.path(), args);
        daemon._dir = Some(dir);
        daemon
    }

    pub fn start_in(dir: &Path, args: &[&str]) -> Daemon {
        let mut daemon = Daemon::spawn(dir, &[&["serve", "demo"], args].concat(), &[]);
        daemon.wait_for("is ready");
        daemon
    }

    pub fn spawn(dir: &Path, args: &[&str], environment: &[(&str, &str)]) -> Daemon {
        let mut command = command(dir, args);
        command.envs(environment.iter().copied());
        Daemon::listening_to(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap(), dir)
    }

    /// One that was started otherwise, with a pipe for what it says.
    pub fn listening_to(mut child: Child, dir: &Path) -> Daemon {
        let socket = dir.join("dynamicinfer.sock");
        let (send, said) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || stderr.lines().map_while(Result::ok).for_each(|line| drop(send.send(line))));
        Daemon { child, socket, said: Mutex::new(said), _dir: None }
    }

    /// One that was started otherwise and says nothing.
    pub fn of(child: Child, dir: &Path) -> Daemon {
        let (_, said) = channel();
        Daemon { child, socket: dir.join("dynamicinfer.sock"), said: Mutex::new(said), _dir: None }
    }

    /// The first line from now on that has `what` in it.
    pub fn wait_for(&mut self, what: &str) -> String {
        let mut all = Vec::new();
        loop {
            match self.said.get_mut().unwrap().recv_timeout(PATIENCE) {
                Ok(line) if line.contains(what) => return line,
                Ok(line) => all.push(line),
                Err(error) => panic!("the daemon did not say '{what}' ({error}) but {all:?}"),
            }
        }
    }

    /// The address of its TCP port, and its token, as it says them for clients made for OpenAI.
    pub fn port(&mut self) -> (String, String) {
        let mut said = |name: &str| self.wait_for(name).split_once('=').unwrap().1.to_owned();
        let url = said("export OPENAI_BASE_URL=");
        let address = url.strip_prefix("http://").and_then(|url| url.strip_suffix("/v1")).expect("a whole address");
        let key = said("export OPENAI_API_KEY=");
        // What it says goes to a pipe, so it says where the token is.
        let file = key.strip_prefix("$(cat '").and_then(|rest| rest.strip_suffix("')")).expect("a token's file");
        (address.to_owned(), std::fs::read_to_string(file).unwrap().trim().to_owned())
    }

    /// What it says next; `None` when it will say nothing more.
    pub fn next_line(&mut self) -> Option<String> {
        match self.said.get_mut().unwrap().recv_timeout(PATIENCE) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("the daemon neither says anything nor ends"),
        }
    }

    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends these bytes on a new connection and reads the answer.
    pub fn raw(&self, request: &[u8]) -> Answer {
        let mut stream = self.connect();
        // A daemon that refuses early does not read the rest.
        let _ = stream.write_all(request);
        read_answer(&mut stream)
    }

    pub fn call(&self, method: &str, path: &str, body: &str) -> Answer {
        self.raw(&request(method, path, body))
    }

    pub fn get(&self, path: &str) -> Json {
        let answer = self.call("GET", path, "");
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()
    }

    pub fn post(&self, path: &str, body: &Json) -> Answer {
        self.call("POST", path, &body.to_string())
    }

    /// One number of /metrics.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.call("GET", "/metrics", "").text();
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned));
        line.unwrap_or_else(|| panic!("{name} is not in\n{page}")).parse().unwrap()
    }

    /// Until the daemon has closed its end of a connection that nobody reads.
    pub fn wait_until_closed(&self, stream: &UnixStream) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let patience = Timespec::try_from(PATIENCE).unwrap();
        let start = std::time::Instant::now();
        loop {
            let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
            poll(&mut fds, Some(&patience)).unwrap();
            if fds[0].revents().intersects(PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "the connection stays open");
        }
    }

    /// Asks again and again, with another question to the daemon in between, until a metric is what it must become.
    pub fn until(&self, name: &str, wanted: f64) {
        let start = std::time::Instant::now();
        while self.metric(name) != wanted {
            assert!(start.elapsed() < PATIENCE, "{name} is {} and not {wanted}", self.metric(name));
        }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Kills a process that the daemon has started and that has computed for `ticks` hundredths of a second; whether there was one.
    pub fn kill_busy_child(&self, ticks: u64) -> bool {
        let busy = |stat: &str| {
            // Behind the program's name: the state, the parent; utime and stime are fields 14 and 15 of proc(5).
            let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
            let time = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
            let child = fields[1] == self.child.id().to_string() && time >= ticks;
            child.then(|| Pid::from_raw(stat.split_once(' ')?.0.parse().ok()?)).flatten()
        };
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let busy = processes.filter_map(|p| busy(&std::fs::read_to_string(p.path().join("stat")).ok()?)).next();
        busy.is_some_and(|child| kill_process(child, Signal::KILL).is_ok())
    }

    pub fn wait(&mut self) -> ExitStatus {
        ended(&mut self.child, PATIENCE).expect("the daemon goes on")
    }
}

/// What a program says; nothing if it does not end in time, and it is killed then.
pub fn said(command: &mut Command) -> Option<Output> {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = Pid::from_child(&child);
    let (send, ended) = channel();
    let waiting = std::thread::spawn(move || send.send(child.wait_with_output().unwrap()));
    let output = ended.recv_timeout(PATIENCE).ok();
    if output.is_none() {
        let _ = kill_process(pid, Signal::KILL);
    }
    let _ = waiting.join().unwrap();
    output
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
    format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Reads to the end of the connection.
pub fn read_answer(stream: &mut UnixStream) -> Answer {
    read_all(stream)
}

/// The same of any connection.
pub fn read_all(stream: &mut impl Read) -> Answer {
    let mut bytes = Vec::new();
    // A connection that was reset has said what it said.
    let _ = stream.read_to_end(&mut bytes);
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Answer {
    let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
        return Answer { status: 0, headers: String::new(), body: bytes.to_vec(), whole: false };
    };
    let headers = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    let status = headers.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    let mut rest = &bytes[end + 4..];
    if !headers.contains("transfer-encoding: chunked") {
        return Answer { status, headers, body: rest.to_vec(), whole: true };
    }
    let mut body = Vec::new();
    while let Some(line) = rest.windows(2).position(|two| two == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
        if size == 0 {
            return Answer { status, headers, body, whole: true };
        }
        let Some(chunk) = rest.get(line + 2..line + 2 + size) else { break };
        body.extend_from_slice(chunk);
        rest = rest.get(line + 4 + size..).unwrap_or_default();
    }
    Answer { status, headers, body, whole: false }
}
