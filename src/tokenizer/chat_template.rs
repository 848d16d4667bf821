//! Chat templates: Jinja source that came with a model, run so that it can harm nothing.
//!
//! A template is a program by a stranger. minijinja keeps it from files and the network, and its fuel ends loops, but
//! measured (version 2.24): a doubling string takes gigabytes within the fuel, and deep nesting overflows the stack, which
//! ends the process. So a template is rendered in a child process that may use 512 MiB and 2 seconds, on a thread with
//! a large stack; what kills the child is an error here.
//!
//! The dialect is that of transformers' `apply_chat_template`: trim_blocks and lstrip_blocks, Python's methods on strings
//! and maps, `raise_exception`, `strftime_now`, and `tojson` as Python's json.dumps writes.

use super::Tokenizer;
use crate::error::{Error, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, ErrorKind, Value};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The program's first argument that makes it the child; see [`child_main`].
pub const CHILD_ARGUMENT: &str = "__render-template";

/// In bytes. The longest in use (Cohere's) has 18 KB; 28 KiB of `not not` already overflow a 2 MiB stack.
pub const LONGEST_SOURCE: usize = 64 << 10;
/// In bytes, of the rendered prompt: more than any context holds.
const LONGEST_OUTPUT: usize = 16 << 20;
/// In bytes, of the messages as JSON.
const LONGEST_REQUEST: usize = 64 << 20;
/// Of address space beyond the program itself.
const MEMORY: u64 = 512 << 20;
/// 64 KiB of source need 28 MiB at the measured 430 bytes of stack for every byte of `not not`.
const STACK: usize = 32 << 20;
const WALL: Duration = Duration::from_secs(2);
/// The child's exit status where the system gives it no thread: EX_TEMPFAIL of sysexits.h.
const NO_THREAD: u8 = 75;
/// Instructions: 10,000 messages of 500 each, and half a second.
const FUEL: u64 = 5_000_000;
/// Of macros and loops within each other.
const RECURSION: usize = 128;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// "system", "user", "assistant", or what else the model's template knows.
    pub role: String,
    pub content: String,
}

impl Message {
    pub fn new(role: &str, content: &str) -> Message {
        Message { role: role.to_owned(), content: content.to_owned() }
    }
}

/// All that a template sees.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Input {
    /// Jinja source.
    pub template: String,
    pub messages: Vec<Message>,
    /// Whether the prompt ends with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// As text; empty if the model has none.
    pub bos_token: String,
    pub eos_token: String,
    /// Seconds since 1970, UTC: what `strftime_now` tells.
    pub now: i64,
    /// Other variables (`tools`, `enable_thinking`); they do not replace those above.
    pub extras: serde_json::Map<String, serde_json::Value>,
}

/// What became of a template.
#[derive(Debug, Serialize, Deserialize)]
enum Outcome {
    Text(String),
    /// `raise_exception`: the template does not take these messages.
    Refused(String),
    /// The template itself is wrong.
    Broken(String),
}

/// This program: the file that runs, even if another has taken its name since.
pub fn this_program() -> PathBuf {
    PathBuf::from("/proc/self/exe")
}

/// The prompt that asks the assistant to answer `messages`, now: [`render_by`] with the tokenizer's own names for BOS and
/// EOS. Special tokens in the result are real ones; what users wrote goes through [`Tokenizer::defuse`] first. The
/// template writes BOS itself if it wants one.
///
/// # Errors
/// As [`render_by`].
pub fn render(template: &str, messages: &[Message], tokenizer: &Tokenizer) -> Result<String> {
    render_by(&this_program(), &Input::of(template, messages, tokenizer), tokenizer.path())
}

impl Input {
    /// What the template of `tokenizer` is given to see for `messages`, now.
    pub fn of(template: &str, messages: &[Message], tokenizer: &Tokenizer) -> Input {
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default().to_owned();
        Input {
            template: template.to_owned(),
            messages: messages.to_vec(),
            add_generation_prompt: true,
            bos_token: text(tokenizer.bos()),
            eos_token: text(tokenizer.eos()),
            now: crate::clock::unix_seconds() as i64,
            extras: serde_json::Map::new(),
        }
    }

    /// As the child reads it.
    fn request(&self, path: &Path) -> Result<Vec<u8>> {
        check_source(&self.template, path)?;
        let request =
            serde_json::to_vec(self).map_err(|e| Error::Failed(format!("cannot pass on the messages: {e}")))?;
        if request.len() > LONGEST_REQUEST {
            let n = request.len();
            return Err(Error::Usage(format!("the messages have {n} bytes; at most {LONGEST_REQUEST} are taken")));
        }
        Ok(request)
    }
}

/// The prompt that a template makes of messages, rendered by `program` as a child process. `path` is the file that the
/// template came from, for messages.
///
/// # Errors
/// [`Error::Usage`] if the template refuses the messages; [`Error::BadFile`] if it is broken or takes too much memory or
/// time; [`Error::Memory`] or [`Error::Io`] if the child cannot be started.
pub fn render_by(program: &Path, input: &Input, path: &Path) -> Result<String> {
    let request = input.request(path)?;
    Child::start(program)?.render(&request, program)?.said(path)
}

/// Renders many, each by a process of its own that was started beforehand: starting one takes longer than its work. None sees
/// two requests.
pub struct Renderer {
    program: PathBuf,
    spare: Mutex<Option<Child>>,
}

impl Renderer {
    pub fn new(program: PathBuf) -> Arc<Renderer> {
        Arc::new(Renderer { program, spare: Mutex::new(None) })
    }

    /// Has a process wait for the next request, beside what this thread does.
    pub fn prepare(self: &Arc<Self>) {
        self.replace(None);
    }

    /// The same, once one that has done its work has ended.
    fn replace(self: &Arc<Self>, done: Option<Child>) {
        let renderer = self.clone();
        let start = move || {
            drop(done);
            let mut spare = renderer.spare.lock().unwrap_or_else(|e| e.into_inner());
            // One is enough where several have ended together. What cannot be started now is started when it is needed, and
            // complained of then.
            if spare.is_none() {
                *spare = Child::start(&renderer.program).ok();
            }
        };
        drop(std::thread::Builder::new().name("template".into()).spawn(start));
    }

    /// As [`render_by`].
    ///
    /// # Errors
    /// As [`render_by`].
    pub fn render(self: &Arc<Self>, input: &Input, path: &Path) -> Result<String> {
        let request = input.request(path)?;
        let spare = self.spare.lock().unwrap_or_else(|e| e.into_inner()).take();
        let mut reply = match spare {
            Some(spare) => spare.render(&request, &self.program),
            None => Child::start(&self.program)?.render(&request, &self.program),
        }?;
        // One that was ended while it waited has taken nothing in: that is not the template's doing.
        if !reply.taken {
            reply = Child::start(&self.program)?.render(&request, &self.program)?;
        }
        let (said, Reply { child, .. }) = (reply.said(path), reply);
        self.replace(Some(child));
        said
    }

    /// The process that waits, if one does.
    pub fn waiting(&self) -> Option<u32> {
        self.spare.lock().unwrap_or_else(|e| e.into_inner()).as_ref().map(|child| child.0.id())
    }
}

/// A process that renders one request, or waits for it. Dropped, it is ended.
struct Child(std::process::Child);

/// What came of it.
struct Reply {
    child: Child,
    /// Whether it has read the request.
    taken: bool,
    /// One line, if it came to its end; `None` after [`WALL`].
    answer: Option<Vec<u8>>,
}

impl Child {
    fn start(program: &Path) -> Result<Child> {
        let mut command = Command::new(program);
        command.arg(CHILD_ARGUMENT).env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // Ctrl-C is this process's to handle.
        let started = command.process_group(0).spawn();
        started.map(Child).map_err(|error| no_room(error, program))
    }

    fn render(mut self, request: &[u8], program: &Path) -> Result<Reply> {
        let (mut stdin, stdout) = (self.0.stdin.take(), self.0.stdout.take());
        let (taken, answer) = std::thread::scope(|scope| {
            let (send, receive) = mpsc::channel();
            // A child that died early does not read; its end says why.
            let thread = std::thread::Builder::new;
            let write = move || stdin.take().is_some_and(|mut stdin| stdin.write_all(request).is_ok());
            let writing = thread().spawn_scoped(scope, write)?;
            let read = move || {
                let mut answer = Vec::new();
                if let Some(stdout) = stdout {
                    // JSON may write a character as six. Its end is not waited for: that takes as long as the work.
                    let _ = BufReader::new(stdout.take(8 * LONGEST_OUTPUT as u64)).read_until(b'\n', &mut answer);
                }
                let _ = send.send(answer);
            };
            // Without its reader the child would be waited for by the one who writes.
            if let Err(error) = thread().spawn_scoped(scope, read) {
                let _ = self.0.kill();
                return Err(error);
            }
            let answer = receive.recv_timeout(WALL).ok();
            if answer.is_none() {
                // Fails only if it has just ended by itself.
                let _ = self.0.kill();
            }
            Ok((writing.join().unwrap_or(false), answer))
        })
        .map_err(|error| no_room(error, program))?;
        Ok(Reply { child: self, taken, answer })
    }
}

/// A process or a thread that the system does not give: for a lack of them, of descriptors or of memory, which may end.
fn no_room(error: std::io::Error, program: &Path) -> Error {
    use rustix::io::Errno;
    match Errno::from_io_error(&error) {
        Some(Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Error::Memory(format!(
            "the process that renders the chat template cannot be started: {error}; ask again later, or raise the limits on processes \
             (ulimit -u) and descriptors (ulimit -n)"
        )),
        _ => Error::io("start", program)(error),
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Fails if it has ended, and then there is nothing to do.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Reply {
    /// What the child has said, or what its end means.
    fn said(&mut self, path: &Path) -> Result<String> {
        let broken = |reason: String| Err(Error::bad(path, "chat template", reason));
        match self.answer.take().map(|a| serde_json::from_slice(&a)) {
            Some(Ok(Outcome::Text(text))) => Ok(text),
            Some(Ok(Outcome::Refused(reason))) => Err(refused(&reason)),
            Some(Ok(Outcome::Broken(reason))) => broken(reason),
            Some(Err(_)) => match self.child.0.wait() {
                Ok(status) if status.code() == Some(NO_THREAD.into()) => {
                    Err(no_room(rustix::io::Errno::AGAIN.into(), &this_program()))
                }
                Ok(status) => broken(cause_of_death(status)),
                Err(error) => broken(format!("the rendering process cannot be waited for: {error}")),
            },
            None => broken(format!("rendering takes more than {WALL:?}")),
        }
    }
}

/// As [`render_by`] without the protection of a child process: for templates that are known, in tests.
///
/// # Errors
/// As [`render_by`].
pub fn render_in_process(input: &Input, path: &Path) -> Result<String> {
    check_source(&input.template, path)?;
    match run(input) {
        Outcome::Text(text) => Ok(text),
        Outcome::Refused(reason) => Err(refused(&reason)),
        Outcome::Broken(reason) => Err(Error::bad(path, "chat template", reason)),
    }
}

fn check_source(template: &str, path: &Path) -> Result<()> {
    let len = template.len();
    if len <= LONGEST_SOURCE {
        return Ok(());
    }
    Err(Error::bad(path, "chat template", format!("{len} bytes of source; at most {LONGEST_SOURCE} are taken")))
}

fn refused(reason: &str) -> Error {
    let reason = crate::error::printable(reason);
    Error::Usage(format!("the model's chat template does not take these messages: {reason}"))
}

fn cause_of_death(status: ExitStatus) -> String {
    match status.signal() {
        // A failed allocation and an overflowed stack both abort.
        Some(6 | 11) => format!("rendering takes more than {} MiB of memory, or nests too deeply", MEMORY >> 20),
        Some(24 | 9) => format!("rendering takes more than {WALL:?}"),
        Some(signal) => format!("rendering was ended by signal {signal}"),
        None => format!("the rendering process failed with {status}"),
    }
}

/// The child's whole life: reads an [`Input`] as JSON from standard input and writes what became of it to standard
/// output. `main` calls it when the first argument is [`CHILD_ARGUMENT`].
pub fn child_main() -> ExitCode {
    if limit_this_process().is_err() {
        return ExitCode::FAILURE;
    }
    let worker = std::thread::Builder::new().stack_size(STACK).spawn(|| {
        let mut request = Vec::new();
        std::io::stdin().take(LONGEST_REQUEST as u64 + 1).read_to_end(&mut request).ok()?;
        let input: Input = serde_json::from_slice(&request).ok()?;
        drop(request);
        check_source(&input.template, Path::new("")).ok()?;
        let outcome = run(&input);
        let mut stdout = std::io::stdout().lock();
        serde_json::to_writer(&mut stdout, &outcome).ok()?;
        stdout.write_all(b"\n").ok()?;
        stdout.flush().ok()
    });
    match worker.map(|w| w.join()) {
        Ok(Ok(Some(()))) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(_) => NO_THREAD.into(),
    }
}

/// Memory, processor time, no files, no core dump. It ends with the parent: what it reads from then ends, or its processor time
/// does. (A signal at the parent's death is one of the parent's thread, and threads of the daemon come and go.)
fn limit_this_process() -> std::io::Result<()> {
    // The program's own mappings are not the template's doing.
    let status = std::fs::read_to_string("/proc/self/status")?;
    let own = status.lines().find_map(|l| l.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let own = own.ok_or_else(|| std::io::Error::other("no VmSize"))? << 10;
    let set = |resource, limit| setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) });
    set(Resource::Core, 0)?;
    set(Resource::Fsize, 0)?;
    set(Resource::Cpu, WALL.as_secs())?;
    Ok(set(Resource::As, own + MEMORY)?)
}

fn run(input: &Input) -> Outcome {
    let raised = Arc::new(Mutex::new(None));
    let env = environment(input.now, Arc::clone(&raised));
    let source = without_generation_tags(&input.template);
    let template = match env.template_from_named_str("chat template", &source) {
        Ok(template) => template,
        Err(error) => return Outcome::Broken(error.to_string()),
    };
    let mut context = input.extras.clone();
    context.insert("messages".into(), serde_json::json!(input.messages));
    context.insert("add_generation_prompt".into(), input.add_generation_prompt.into());
    context.insert("bos_token".into(), input.bos_token.as_str().into());
    context.insert("eos_token".into(), input.eos_token.as_str().into());
    let mut out = Capped(Vec::new());
    let error = template.render_captured_to(minijinja::value::Serde(&context), &mut out).err();
    let reason = raised.lock().unwrap_or_else(|e| e.into_inner()).take();
    match (error, reason) {
        (None, _) => match String::from_utf8(out.0) {
            Ok(text) => Outcome::Text(text),
            Err(_) => Outcome::Broken("the rendered text is not UTF-8".into()),
        },
        (Some(_), Some(reason)) => Outcome::Refused(reason),
        (Some(error), None) if error.kind() == ErrorKind::WriteFailure => {
            Outcome::Broken(format!("the rendered text has more than {LONGEST_OUTPUT} bytes"))
        }
        (Some(error), None) => Outcome::Broken(error.to_string()),
    }
}

/// What is written, up to [`LONGEST_OUTPUT`].
struct Capped(Vec<u8>);

impl Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > LONGEST_OUTPUT {
            return Err(std::io::Error::other("too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn environment(now: i64, raised: Arc<Mutex<Option<String>>>) -> Environment<'static> {
    let mut env = Environment::new();
    // Fails only for delimiters, which stay as they are.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        env.set_syntax(syntax);
    }
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(RECURSION);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_formatter(|out, state, value| {
        // Python's names.
        match value.kind() {
            minijinja::value::ValueKind::None => out.write_str("None").map_err(minijinja::Error::from),
            minijinja::value::ValueKind::Bool => {
                out.write_str(if value.is_true() { "True" } else { "False" }).map_err(minijinja::Error::from)
            }
            _ => minijinja::escape_formatter(out, state, value),
        }
    });
    env.add_filter("tojson", to_json);
    env.add_function("raise_exception", move |reason: String| -> Result<Value, minijinja::Error> {
        *raised.lock().unwrap_or_else(|e| e.into_inner()) = Some(reason.clone());
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason))
    });
    env.add_function("strftime_now", move |format: String| strftime(now, &format));
    env
}

/// transformers marks the assistant's words with `{% generation %}`, for training; here the tag does nothing.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let Some(end) = rest.find("%}") else { break };
        let tag = &rest[2..end];
        let (open, inner) = match tag.strip_prefix(['-', '+']) {
            Some(inner) => (&tag[..1], inner),
            None => ("", tag),
        };
        let (close, inner) = match inner.strip_suffix(['-', '+']) {
            Some(shorter) => (&inner[shorter.len()..], shorter),
            None => ("", inner),
        };
        match inner.trim() {
            "generation" => out.extend(["{%", open, " if true ", close, "%}"]),
            "endgeneration" => out.extend(["{%", open, " endif ", close, "%}"]),
            _ => out.push_str(&rest[..end + 2]),
        }
        rest = &rest[end + 2..];
    }
    out.push_str(rest);
    out
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=...)`, which has spaces where serde_json has none.
fn to_json(value: Value, indent: Option<usize>, kwargs: Kwargs) -> Result<Value, minijinja::Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get::<Option<usize>>("indent")?,
    };
    // Deeper than any real template indents; `indent=4000000000` is an attack.
    if indent.is_some_and(|n| n > 16) {
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, "tojson takes an indent of at most 16"));
    }
    let sort: Option<bool> = kwargs.get("sort_keys")?;
    let _: (Option<Value>, Option<Value>) = (kwargs.get("ensure_ascii")?, kwargs.get("separators")?);
    kwargs.assert_all_used()?;
    let json = serde_json::to_value(&value)
        .map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, format!("tojson: {e}")))?;
    let mut out = String::new();
    dump(&json, indent, sort == Some(true), 0, &mut out);
    Ok(Value::from_safe_string(out))
}

fn dump(json: &serde_json::Value, indent: Option<usize>, sort: bool, depth: usize, out: &mut String) {
    let line = |depth: usize, out: &mut String| {
        if let Some(indent) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    let separator = if indent.is_some() { "," } else { ", " };
    match json {
        serde_json::Value::Array(items) if !items.is_empty() => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { separator } else { "" });
                line(depth + 1, out);
                dump(item, indent, sort, depth + 1, out);
            }
            line(depth, out);
            out.push(']');
        }
        serde_json::Value::Object(map) if !map.is_empty() => {
            let mut entries: Vec<_> = map.iter().collect();
            if sort {
                entries.sort_by_key(|(key, _)| *key);
            }
            out.push('{');
            for (i, (key, item)) in entries.into_iter().enumerate() {
                out.push_str(if i > 0 { separator } else { "" });
                line(depth + 1, out);
                out.push_str(&serde_json::Value::from(key.as_str()).to_string());
                out.push_str(": ");
                dump(item, indent, sort, depth + 1, out);
            }
            line(depth, out);
            out.push('}');
        }
        scalar => out.push_str(&scalar.to_string()),
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Python's `datetime.now().strftime(format)`, in UTC, for the directives that templates use; others stay as they are.
fn strftime(now: i64, format: &str) -> String {
    let (days, seconds) = (now.div_euclid(86_400), now.rem_euclid(86_400));
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let (year, month, day) = civil(days);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[(days + 4).rem_euclid(7) as usize];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let (mut directive, mut padded) = (chars.next(), true);
        if directive == Some('-') {
            (directive, padded) = (chars.next(), false);
        }
        let two = |n: i64| if padded { format!("{n:02}") } else { n.to_string() };
        out += &match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year.rem_euclid(100)),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('j') => format!("{:03}", days - days_of(year, 1, 1) + 1),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{other}"),
            None => "%".to_owned(),
        };
    }
    out
}

/// Year, month and day of a day since 1970 (Hinnant's `civil_from_days`: years begin in March, 400 of them are an era).
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// The inverse of [`civil`].
fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_dates_are_inverse() {
        for days in (-1_000_000..1_000_000).step_by(7) {
            let (year, month, day) = civil(days);
            assert_eq!(days_of(year, month, day), days);
        }
    }

    #[test]
    fn dates_are_those_of_python() {
        // 2026-11-20 13:05:09 UTC, a Friday.
        let now = 1_795_179_909;
        assert_eq!(strftime(now, "%d %b %Y"), "20 Nov 2026");
        assert_eq!(
            strftime(now, "%A, %B %-d, %I:%M:%S %p %j %y %% %F %T %Q %"),
            "Friday, November 20, 01:05:09 PM 324 26 % 2026-11-20 13:05:09 %Q %"
        );
        assert_eq!(strftime(951_782_400, "%F %a"), "2000-02-29 Tue");
    }

    #[test]
    fn generation_tags_do_nothing() {
        let source = "a{%- generation %}b{% endgeneration -%}c{% if x %}d{% endif %}{% raw";
        assert_eq!(without_generation_tags(source), "a{%- if true %}b{% endif -%}c{% if x %}d{% endif %}{% raw");
    }
}
