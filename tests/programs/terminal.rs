//! `chat` and `top` as their users meet them: on a terminal.

use crate::ended::ended;
use crate::gguf_file as gguf;
use crate::programs;
use dynamicinfer::formats::gguf::Value;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(180);

fn command(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(programs::program(args));
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("serve-cache");
    command.args(args).current_dir(dir).env_clear().env("PATH", "/usr/bin:/bin").env("TERM", "xterm");
    command.env("XDG_CACHE_HOME", cache).env("HOME", dir).env("XDG_RUNTIME_DIR", dir);
    command
}

/// A program on a terminal of its own.
struct Terminal {
    child: Child,
    keys: File,
    screen: Receiver<Vec<u8>>,
    seen: String,
    /// Reads until this is closed.
    closer: Option<UnixStream>,
    reader: Option<JoinHandle<()>>,
}

impl Terminal {
    fn start(dir: &Path, args: &[&str]) -> Terminal {
        Terminal::of(command(dir, args), true)
    }

    /// `talk`: stderr is on the terminal, too.
    fn of(command: Command, talk: bool) -> Terminal {
        Terminal::sized(command, talk, 120)
    }

    fn sized(mut command: Command, talk: bool, columns: u16) -> Terminal {
        let pty = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&pty).unwrap();
        unlockpt(&pty).unwrap();
        tcsetwinsize(&pty, Winsize { ws_row: 40, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let name = ptsname(&pty, Vec::new()).unwrap();
        let open = || File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let stderr = if talk { open().into() } else { Stdio::null() };
        let child = command.stdin(open()).stdout(open()).stderr(stderr).spawn().unwrap();
        // Its handles of the terminal's other end: the last that is closed ends the reading here.
        drop(command);
        let keys = File::from(pty);
        let mut output = keys.try_clone().unwrap();
        let (send, screen) = channel();
        let (closer, closing) = UnixStream::pair().unwrap();
        let reader = std::thread::spawn(move || {
            let mut piece = [0; 4096];
            loop {
                let mut watched = [PollFd::new(&output, PollFlags::IN), PollFd::new(&closing, PollFlags::IN)];
                poll(&mut watched, None).unwrap();
                if !watched[1].revents().is_empty() {
                    break;
                }
                // The terminal's end is an error.
                let Ok(n) = output.read(&mut piece) else { break };
                if n == 0 || send.send(piece[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        Terminal { child, keys, screen, seen: String::new(), closer: Some(closer), reader: Some(reader) }
    }

    fn type_in(&mut self, text: &str) {
        self.keys.write_all(text.as_bytes()).unwrap();
    }

    /// Waits until `what` is shown, and forgets what was before it.
    fn wait_for(&mut self, what: &str) -> String {
        loop {
            if let Some(at) = self.seen.find(what) {
                let before = self.seen[..at].to_owned();
                self.seen.drain(..at + what.len());
                return before;
            }
            match self.screen.recv_timeout(PATIENCE) {
                Ok(piece) => self.seen.push_str(&String::from_utf8_lossy(&piece)),
                Err(error) => panic!("'{what}' was not shown ({error}) but {:?}", self.seen),
            }
        }
    }

    /// All that is shown until the program has ended.
    fn rest(&mut self) -> String {
        loop {
            match self.screen.recv_timeout(PATIENCE) {
                Ok(piece) => self.seen.push_str(&String::from_utf8_lossy(&piece)),
                Err(RecvTimeoutError::Disconnected) => return std::mem::take(&mut self.seen),
                Err(error) => panic!("it does not end ({error}): {:?}", self.seen),
            }
        }
    }

    /// Closes the window: no handle of the terminal's other end is left.
    fn close(&mut self) {
        self.closer = None;
        self.reader.take().expect("it is closed once").join().unwrap();
        self.keys = File::open("/dev/null").unwrap();
    }

    /// Its status once it ends, which nothing more tells it to.
    fn ends(&mut self) -> Option<i32> {
        let status = ended(&mut self.child, PATIENCE);
        status.unwrap_or_else(|| panic!("it goes on: {:?}", self.seen)).code()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A daemon that ends with the test.
struct Daemon(Child);

impl Daemon {
    fn start(dir: &Path) -> Daemon {
        let mut child = command(dir, &["serve", "demo"]).stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.contains("is ready")));
        // Nobody reads on: what it says later goes nowhere.
        Daemon(child)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns a word of the answer to "Once upon a time".
fn a_talk(terminal: &mut Terminal) -> String {
    terminal.wait_for(">>> ");
    terminal.type_in("/set max_tokens 20\r");
    terminal.wait_for(">>> ");
    terminal.type_in("/set temperature 0\r");
    terminal.wait_for(">>> ");
    terminal.type_in("Once upon a time\r");
    let answer = terminal.wait_for(">>> ");
    assert!(answer.contains("was") || answer.contains("there"), "{answer:?}");
    terminal.type_in("/stats\r");
    assert!(terminal.wait_for(">>> ").contains("answer 20 tokens"));
    terminal.type_in("/save talk.json\r");
    terminal.wait_for(">>> ");
    terminal.type_in("/clear\r");
    terminal.wait_for(">>> ");
    terminal.type_in("/show\r");
    assert!(terminal.wait_for(">>> ").contains("turns    0"));
    terminal.type_in("\\load talk.json\r");
    assert!(terminal.wait_for(">>> ").contains("1 turns"));
    terminal.type_in("/regne\r");
    assert!(terminal.wait_for(">>> ").contains("did you mean /regen?"));
    terminal.type_in("/set temprature 1\r");
    assert!(terminal.wait_for(">>> ").contains("did you mean temperature?"));
    terminal.type_in("/budget\r");
    assert!(terminal.wait_for(">>> ").contains("no device"));
    terminal.type_in("\"\"\"one\r");
    terminal.wait_for("... ");
    terminal.type_in("two\"\"\"\r");
    terminal.wait_for(">>> ");
    // Ctrl-C while it answers ends the answer and not the talk.
    terminal.type_in("/set max_tokens 400\r");
    terminal.wait_for(">>> ");
    terminal.type_in("/set ignore_eos true\r");
    terminal.wait_for(">>> ");
    terminal.type_in("/clear\r");
    terminal.wait_for(">>> ");
    let mut words = answer.rsplit("Once upon a time").next().unwrap().split_whitespace();
    let word = words.rfind(|w| w.len() >= 3 && w.chars().all(char::is_alphabetic));
    word.unwrap_or_else(|| panic!("{answer:?}")).to_owned()
}

#[test]
fn a_talk_with_the_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let _daemon = Daemon::start(dir.path());
    let mut terminal = Terminal::start(dir.path(), &["chat"]);
    a_talk(&mut terminal);
    terminal.type_in("/exit\r");
    assert_eq!(terminal.ends(), Some(0));
    let history = dir.path().join(".local/state/dynamicinfer/chat_history");
    assert!(std::fs::read_to_string(&history).unwrap().contains("Once upon a time"));
    assert_eq!(std::fs::metadata(&history).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_talk_without_a_daemon_and_an_answer_that_is_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::start(dir.path(), &["chat", "demo"]);
    terminal.wait_for("runs in this process");
    let word = a_talk(&mut terminal);
    terminal.type_in("Once upon a time\r");
    terminal.wait_for(&word);
    kill_process(Pid::from_child(&terminal.child), Signal::INT).unwrap();
    terminal.wait_for("(stopped)");
    terminal.wait_for(">>> ");
    terminal.type_in("/set max_tokens 5\r");
    terminal.wait_for(">>> ");
    terminal.type_in("Once upon a time\r");
    terminal.wait_for(">>> ");
    terminal.type_in("\u{4}");
    assert_eq!(terminal.ends(), Some(0));
}

#[test]
fn run_without_a_prompt_opens_the_chat_with_the_options_that_were_given() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["run", "demo", "-n", "7", "--temp", "0", "--device", "virtual", "--vram", "64M", "--no-history"];
    let mut terminal = Terminal::start(dir.path(), &args);
    terminal.wait_for("runs in this process");
    terminal.wait_for(">>> ");
    terminal.type_in("Once upon a time\r");
    terminal.wait_for(">>> ");
    terminal.type_in("/stats\r");
    assert!(terminal.wait_for(">>> ").contains("answer 7 tokens"));
    terminal.type_in("/show\r");
    assert!(terminal.wait_for(">>> ").contains("temperature 0"));
    // The device is there, and its budget changes in the words of the verb.
    for (words, of) in
        [("/budget", "of 64.00 MiB"), ("/budget set 32MiB", "of 32.00 MiB"), ("/budget get", "of 32.00 MiB")]
    {
        terminal.type_in(&format!("{words}\r"));
        let said = terminal.wait_for(">>> ");
        assert!(said.contains("virtual") && said.contains(of), "{words}: {said:?}");
    }
    terminal.type_in("\u{4}");
    assert_eq!(terminal.ends(), Some(0));
    // What only a single answer has is not for a talk.
    let mut terminal = Terminal::start(dir.path(), &["run", "demo", "--json"]);
    terminal.wait_for("the prompt is missing");
    assert_eq!(terminal.ends(), Some(2));
}

/// The demo model finds no end: its first answer filled the context of 512 tokens, and every message after it was refused.
#[test]
fn a_talk_goes_on_when_it_is_longer_than_the_context() {
    let dir = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::start(dir.path(), &["chat", "demo"]);
    terminal.wait_for(">>> ");
    terminal.type_in("/set ignore_eos true\r");
    terminal.wait_for(">>> ");
    terminal.type_in("Once upon a time\r");
    assert!(terminal.wait_for(">>> ").contains("/set max_tokens N allows more"));
    let mut left_out = String::new();
    for turn in 0..10 {
        terminal.type_in(&format!("And what came to pass in year {turn}\r"));
        let answer = terminal.wait_for(">>> ");
        assert!(!answer.contains("the context of"), "{answer:?}");
        left_out += answer.split_once("(the first ").map_or("", |(_, notice)| notice);
        terminal.type_in("/stats\r");
        let stats = terminal.wait_for(">>> ");
        let tokens = stats.split("answer ").nth(1).unwrap().split(' ').next().unwrap().parse::<u32>().unwrap();
        assert!((100..=256).contains(&tokens), "a quarter of the context, about, is left for an answer: {stats:?}");
    }
    let notice = left_out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(notice.contains("turns are dropped") && notice.contains("/clear starts a new one"), "{notice}");
    // A message that is longer than the context by itself is refused, and the talk goes on.
    terminal.type_in("/set max_tokens 8\r");
    terminal.wait_for(">>> ");
    terminal.type_in(&format!("{}\r", "word ".repeat(600)));
    terminal.wait_for("the context of 512 tokens");
    terminal.wait_for("/clear");
    terminal.wait_for(">>> ");
    terminal.type_in("Once more\r");
    assert!(!terminal.wait_for(">>> ").contains("the context of"));
    terminal.type_in("\u{4}");
    assert_eq!(terminal.ends(), Some(0));
}

#[test]
fn every_command_says_what_it_did_and_a_value_is_checked_when_it_is_set() {
    let dir = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::start(dir.path(), &["chat", "demo"]);
    terminal.wait_for(">>> ");
    for (line, said) in [
        ("/set temperature warm", "temperature: invalid type"),
        ("/set temperature -1", "temperature is -1; it must be 0 or more"),
        ("/set top_p 2", "0 to 1"),
        ("/set max_tokens 0", "max_tokens is 0; it must be 1 or more"),
        ("/set tools []", "'tools' cannot be set"),
        ("/set temperature 0.5", "temperature is 0.5"),
        ("/set stop THE END", "stop is \"THE END\""),
        ("/set temperature -", "temperature is the default again"),
        ("/system Be brief.", "the system message is set"),
        ("/system -", "the system message is removed"),
        ("/save talk.json", "0 turns are in talk.json"),
        ("/load talk.json", "0 turns"),
        ("/clear", "0 turns are discarded"),
        ("/show", "stop \"THE END\""),
    ] {
        terminal.type_in(&format!("{line}\r"));
        let shown = terminal.wait_for(">>> ");
        // Behind the line itself.
        let shown = shown.rsplit(line).next().unwrap();
        assert!(shown.contains(said), "{line}: {shown:?}");
    }
    terminal.type_in("\u{4}");
    assert_eq!(terminal.ends(), Some(0));
}

#[test]
fn ctrl_c_leaves_what_has_been_typed_and_the_second_one_keeps_it_for_the_next_talk() {
    let dir = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::start(dir.path(), &["chat", "demo"]);
    terminal.wait_for(">>> ");
    terminal.type_in("/sho");
    terminal.wait_for("/sho");
    terminal.type_in("\u{3}");
    terminal.wait_for("Ctrl-C again ends");
    terminal.wait_for("/sho");
    terminal.type_in("w\r");
    terminal.wait_for("turns    0");
    terminal.wait_for(">>> ");
    terminal.type_in("kept for later");
    terminal.wait_for("kept for later");
    terminal.type_in("\u{3}");
    terminal.wait_for("Ctrl-C again ends");
    terminal.wait_for("kept for later");
    terminal.type_in("\u{3}");
    assert_eq!(terminal.ends(), Some(0));
    let history = std::fs::read_to_string(dir.path().join(".local/state/dynamicinfer/chat_history")).unwrap();
    assert!(history.contains("kept for later"), "{history}");
}

#[test]
fn lines_of_an_answer_end_between_words() {
    let dir = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::sized(command(dir.path(), &["chat", "demo"]), true, 40);
    terminal.wait_for(">>> ");
    // The prompt is drawn anew with each key: the one that comes after the line's end is the next.
    let mut ask = |line: &str| {
        terminal.type_in(&format!("{line}\r"));
        terminal.wait_for("\n");
        terminal.wait_for(">>> ")
    };
    for line in ["/set ignore_eos true", "/set max_tokens 100", "/set temperature 0"] {
        ask(line);
    }
    let shown = ask("Once upon a time").replace("\r\n", "\n");
    terminal.type_in("/save talk.json\r");
    // Ctrl-D before the next prompt is lost: what is typed then goes to the terminal's own line, which the prompt takes over.
    terminal.wait_for("turns are in");
    terminal.wait_for(">>> ");
    let talk: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("talk.json")).unwrap()).unwrap();
    let answer = talk["turns"][0][1].as_str().unwrap();
    let lines: Vec<&str> = shown.lines().filter(|line| !line.contains('\u{1b}')).collect();
    assert!(lines.len() > 4 && lines.iter().all(|line| line.chars().count() <= 40), "{lines:?}");
    let words: Vec<&str> = shown.split_whitespace().collect();
    let expected: Vec<&str> = answer.split_whitespace().collect();
    assert!(words.windows(expected.len()).any(|words| words == expected), "{words:?} and {expected:?}");
    terminal.type_in("\u{4}");
    assert_eq!(terminal.ends(), Some(0));
}

/// It swallowed the first signal, and went on waiting for a line.
#[test]
fn a_talk_ends_at_its_prompt_by_the_first_signal_and_leaves_the_terminal_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    for signal in [Signal::TERM, Signal::HUP] {
        for inside in [false, true] {
            let mut terminal = Terminal::start(dir.path(), &["chat", "demo"]);
            let modes = |keys: &File| tcgetattr(keys).unwrap().local_modes;
            let before = modes(&terminal.keys);
            terminal.wait_for(">>> ");
            if inside {
                terminal.type_in("\"\"\"one\r");
                terminal.wait_for("... ");
            }
            assert_ne!(modes(&terminal.keys), before, "a prompt takes keys as they come");
            kill_process(Pid::from_child(&terminal.child), signal).unwrap();
            assert_eq!(terminal.ends(), Some(130));
            assert_eq!(modes(&terminal.keys), before);
        }
    }
}

/// It read keys of a terminal whose window was closed, for ever, at half a core.
#[test]
fn top_ends_when_its_terminal_goes() {
    let dir = tempfile::tempdir().unwrap();
    let _daemon = Daemon::start(dir.path());
    // It draws nothing more that could fail.
    let mut terminal = Terminal::start(dir.path(), &["top", "--delay", "3600"]);
    terminal.wait_for("tokens/s");
    terminal.close();
    terminal.ends();
}

#[test]
fn top_draws_what_the_daemon_does() {
    let dir = tempfile::tempdir().unwrap();
    let _daemon = Daemon::start(dir.path());
    let mut terminal = Terminal::start(dir.path(), &["top", "--delay", "0.1"]);
    terminal.wait_for("tokens/s");
    // Blanks are not drawn, so what is looked for are words.
    terminal.wait_for("running,");
    terminal.wait_for("CPU");
    terminal.wait_for("GB/s");
    terminal.wait_for("resident");
    terminal.wait_for("threshold");
    terminal.wait_for("ends");
    terminal.type_in("q");
    assert_eq!(terminal.ends(), Some(0));
    let done = command(dir.path(), &["top", "--json"]).output().unwrap();
    let look: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(look["ps"]["models"][0]["name"], "demo");
    assert_eq!(look["cache"]["layers"].as_array().unwrap().len(), 5);
}

/// It ended with the daemon, and so was gone when one looked for what had happened.
#[test]
fn top_waits_for_a_daemon_that_has_ended_and_goes_on_with_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(dir.path());
    let mut terminal = Terminal::start(dir.path(), &["top", "--delay", "0.1"]);
    terminal.wait_for("threshold");
    daemon.0.kill().unwrap();
    daemon.0.wait().unwrap();
    // What is drawn once stays as long as it waits.
    terminal.wait_for("below");
    terminal.wait_for("threshold");
    let _next = Daemon::start(dir.path());
    terminal.wait_for("threshold");
    terminal.type_in("q");
    assert_eq!(terminal.ends(), Some(0));
}

/// What a terminal acts on; line breaks and tabs are text.
fn acts(c: char) -> bool {
    c.is_control() && !matches!(c, '\r' | '\n' | '\t') || ('\u{202a}'..='\u{202e}').contains(&c)
}

/// A model's text went to the terminal as it was, escape sequences too; into a pipe or a file it goes to the byte.
#[test]
fn a_models_text_is_text_on_a_terminal_and_every_byte_in_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    // Random weights at a temperature that makes every byte as likely as any other.
    let shape = ["--hidden", "64", "--layers", "1", "--ffn", "64", "--heads", "2", "--kv-heads", "2", "--vocab", "320"];
    let made = command(dir.path(), &[&["synth", "-o", "m.neurons"][..], &shape].concat()).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let wild =
        ["--temp", "100", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--ignore-eos", "-n", "2000", "--seed", "7"];
    let run = || command(dir.path(), &[&["run", "m.neurons", "x"][..], &wild].concat());
    let piped = String::from_utf8(run().output().unwrap().stdout).unwrap();
    assert!(piped.contains('\u{1b}') && piped.contains('\u{7}'), "the model says no escape sequence: {piped:?}");
    let shown = Terminal::of(run(), false).rest();
    assert!(!shown.contains(acts), "{shown:?}");
    // The terminal's own doing: a carriage return before each newline. Tabs stay.
    let expected = piped.replace(|c| acts(c) || c == '\r', "\u{fffd}").replace('\n', "\r\n");
    assert_eq!(shown, expected);
}

/// Something that listens in the daemon's place and answers these pages, whatever else is asked.
fn hostile(dir: &Path, pages: [(&'static str, String); 3]) {
    let listener = UnixListener::bind(dir.join("dynamicinfer.sock")).unwrap();
    // Ends with the test program: it waits for who may still come.
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut asked = Vec::new();
            let mut byte = [0];
            while !asked.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|n| n == 1) {
                asked.extend(byte);
            }
            let asked = String::from_utf8_lossy(&asked).into_owned();
            let page = pages.iter().find(|(path, _)| asked.contains(path)).map_or("{}", |(_, page)| page.as_str());
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", page.len());
            let _ = stream.write_all((head + page).as_bytes());
        }
    });
}

/// `top` drew a share of what is no number, which ends ratatui by a panic, and counts beyond 64 bits; names of a server went to the
/// terminal with what turns their direction.
#[test]
fn top_draws_what_a_hostile_server_says_as_text_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let name = "\u{1b}]0;owned\u{7}\u{9b}2J\u{202e}name";
    let layer = serde_json::json!({"layer": 0, "predictor": name, "hits": u64::MAX, "misses": u64::MAX, "slots": -1});
    let model = serde_json::json!({"name": name, "predictor": name, "device": name, "threads": name, "file": name});
    let numbers = "dynamicinfer_vram_used_bytes NaN\ndynamicinfer_vram_budget_bytes inf\ndynamicinfer_uptime_seconds -1\n\
                   dynamicinfer_vram_used_bytes nan\ndynamicinfer_vram_budget_bytes 1\n";
    let pages = [
        ("/metrics", numbers.to_owned()),
        ("/v1/x/ps", serde_json::json!({"state": "ready", "models": [model], "error": name}).to_string()),
        ("/v1/x/cache", serde_json::json!({"layers": [layer]}).to_string()),
    ];
    hostile(dir.path(), pages);
    let mut terminal = Terminal::start(dir.path(), &["top", "--delay", "0.1"]);
    let drawn = terminal.wait_for("GB/s") + &terminal.wait_for("threshold");
    assert!(drawn.contains("owned"), "{drawn:?}");
    terminal.type_in("q");
    let drawn = drawn + &terminal.rest();
    assert!(!drawn.contains("]0;owned\u{7}") && !drawn.contains(['\u{9b}', '\u{202e}']), "{drawn:?}");
    assert_eq!(terminal.ends(), Some(0));
    for args in [&["ps"][..], &["doctor"], &["budget"], &["load", "x"]] {
        let done = command(dir.path(), args).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8(done.stdout).unwrap() + &String::from_utf8(done.stderr).unwrap();
        assert!(!said.contains(acts), "{args:?}: {said:?}");
    }
}

/// A name that a terminal takes for a command, in a talk on one.
#[test]
fn a_talk_with_a_hostile_name_sets_no_title() {
    let dir = tempfile::tempdir().unwrap();
    let talk = serde_json::json!({"system": "\u{1b}]0;owned\u{7}", "set": {}, "turns": []});
    std::fs::write(dir.path().join("talk.json"), talk.to_string()).unwrap();
    let mut terminal = Terminal::start(dir.path(), &["chat", "demo"]);
    terminal.wait_for(">>> ");
    for line in ["/load talk.json\r", "/system\r", "/show\r"] {
        terminal.type_in(line);
        let shown = terminal.wait_for(">>> ");
        assert!(!shown.contains("\u{1b}]0;"), "{shown:?}");
    }
    terminal.type_in("\u{4}");
    assert_eq!(terminal.ends(), Some(0));
}

#[test]
fn what_needs_a_daemon_says_how_to_start_one() {
    let dir = tempfile::tempdir().unwrap();
    for args in [&["ps"][..], &["top"], &["load", "demo"], &["stop"], &["stop", "--daemon"], &["budget"]] {
        let done = command(dir.path(), args).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(3), "{args:?}: {said}");
        assert!(said.contains("daemon"), "{said}");
    }
    let done =
        command(dir.path(), &["config", "show", "--origin"]).env("DYNAMICINFER_SERVE_QUEUE", "9").output().unwrap();
    let shown = String::from_utf8(done.stdout).unwrap();
    assert!(
        shown
            .lines()
            .any(|l| l.contains("serve.queue") && l.contains(" 9 ") && l.contains("$DYNAMICINFER_SERVE_QUEUE"))
    );
    let done = command(dir.path(), &["completions", "man", "pages"]).output().unwrap();
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    let page = std::fs::read_to_string(dir.path().join("pages/dynamicinfer-serve.1")).unwrap();
    assert!(page.contains("\\-\\-socket"));
}

/// What takes long and fills the disk is not done without a word: how much, how long, where, and a question.
#[test]
fn a_large_model_is_packed_only_after_a_question() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = gguf::File::read("relullama.gguf");
    let mut bytes = 0;
    for tensor in file.tensors.iter_mut().filter(|tensor| tensor.name.contains(".ffn_") && tensor.shape.len() == 2) {
        let rows_are_neurons = !tensor.name.contains("down");
        let hidden = tensor.shape[usize::from(rows_are_neurons)];
        tensor.shape[usize::from(!rows_are_neurons)] = WIDE;
        tensor.data = vec![0; 2 * WIDE * hidden];
        bytes += tensor.data.len();
    }
    file.set("llama.feed_forward_length", Value::U32(WIDE as u32));
    assert!(bytes > 256 << 20, "{bytes}");
    std::fs::write(dir.path().join("wide.gguf"), file.bytes()).unwrap();

    let cache = dir.path().join("cache");
    let mut command = command(dir.path(), &["bench", "wide.gguf", "-p", "0", "-n", "1"]);
    command.env("XDG_CACHE_HOME", &cache);
    let mut terminal = Terminal::of(command, true);
    let said = terminal.wait_for("Continue? [Y/n] ");
    let place = cache.canonicalize().unwrap_or(cache.clone()).display().to_string();
    assert!(said.contains("MiB to ") && said.contains(&place) && said.contains(" s, once"), "{said}");
    terminal.type_in("n\r");
    let said = terminal.rest();
    assert!(said.contains("the model was not packed; to pack it elsewhere: dynamicinfer pack MODEL -o FILE"), "{said}");
    assert_eq!(terminal.ends(), Some(2));
    let stores = walk(&cache).into_iter().filter(|path| path.extension().is_some_and(|e| e == "neurons")).count();
    assert_eq!(stores, 0);
}

/// Neurons of a layer that make a model of two layers with 64 numbers more than 256 MiB.
const WIDE: usize = 384 << 10;

fn walk(dir: &Path) -> Vec<std::path::PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries.flat_map(|entry| [vec![entry.as_ref().unwrap().path()], walk(&entry.unwrap().path())].concat()).collect()
}
