//! Chat templates: Jinja source that came with a model, run so that it cannot do harm.
//!
//! A template is a program by a stranger. minijinja keeps it from files and the network, and its fuel ends loops. But measured (version
//! 2.24): a string that is doubled again and again takes gigabytes within the fuel, and deep nesting overflows the stack, which ends the
//! process. So a template is rendered in a child process that may use 512 MiB and 2 seconds, on a thread with a large stack; if the child
//! is killed, that is an error here.
//!
//! The dialect is that of transformers' `apply_chat_template`: trim_blocks and lstrip_blocks, Python's methods on strings and maps,
//! `raise_exception`, `strftime_now`, and `tojson` that writes as Python's json.dumps.

use super::Tokenizer;
use crate::child::{Children, End, Wanted, Work};
use crate::error::{Error, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, ErrorKind, Value};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The program's first argument that makes it the child; see [`child_main`].
pub const CHILD_ARGUMENT: &str = "__render-template";

/// Bytes of a template, at most. The longest in use (Cohere's) has 18 KB; 28 KiB of `not not` already overflow a 2 MiB stack.
pub const MAX_SOURCE: usize = 64 << 10;
/// Bytes of the rendered prompt, at most: more than any context holds.
const MAX_OUTPUT: usize = 16 << 20;
/// Bytes of the messages as JSON, at most.
const MAX_REQUEST: usize = 64 << 20;
static RENDERING: Work = Work {
    argument: CHILD_ARGUMENT,
    doing: "rendering",
    longest_request: MAX_REQUEST,
    // JSON may write a character as six.
    longest_answer: 8 * MAX_OUTPUT,
    memory: 512 << 20,
    // 64 KiB of source need 28 MiB at the measured 430 bytes of stack for every byte of `not not`.
    stack: 32 << 20,
    computed: Duration::from_secs(2),
    wall: Duration::from_secs(2),
};
/// Template instructions, at most: 10,000 messages of 500 instructions each, which take half a second.
const FUEL: u64 = 5_000_000;
/// Macros and loops nested within each other, at most.
const RECURSION: usize = 128;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// "system", "user", "assistant", or another role that the model's template knows.
    pub role: String,
    /// The message's text.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: &str, content: &str) -> Message {
        Message { role: role.to_owned(), content: content.to_owned() }
    }
}

/// The variables that a template sees.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Input {
    /// The template itself, as Jinja source.
    pub template: String,
    /// The conversation, oldest first.
    pub messages: Vec<Message>,
    /// Whether the prompt ends with the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// BOS as text; empty if the model has none.
    pub bos_token: String,
    /// EOS as text; empty if the model has none.
    pub eos_token: String,
    /// Seconds since 1970, UTC: the time that `strftime_now` formats.
    pub now: i64,
    /// Other variables (`tools`, `enable_thinking`); they cannot replace those above.
    pub extras: serde_json::Map<String, serde_json::Value>,
}

/// The result of rendering.
#[derive(Debug, Serialize, Deserialize)]
enum Outcome {
    Text(String),
    /// `raise_exception`: the template does not accept these messages.
    Refused(String),
    /// The template itself is wrong.
    Broken(String),
}

/// Renders the prompt that asks the assistant to answer `messages`: [`render_by`] this program, with the current time and the tokenizer's
/// BOS and EOS. Special tokens in the result are real ones, so text from users goes through [`Tokenizer::defuse`] first. The template
/// writes BOS itself if it wants one.
///
/// # Errors
/// As [`render_by`].
pub fn render(template: &str, messages: &[Message], tokenizer: &Tokenizer) -> Result<String> {
    render_by(&crate::child::this_program(), &Input::of(template, messages, tokenizer), tokenizer.path())
}

impl Input {
    /// What a template of `tokenizer` sees of `messages`, with the current time.
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

    /// The JSON that the child reads.
    fn request(&self, path: &Path) -> Result<Vec<u8>> {
        check_source(&self.template, path)?;
        let request =
            serde_json::to_vec(self).map_err(|e| Error::Failed(format!("cannot pass on the messages: {e}")))?;
        if request.len() > MAX_REQUEST {
            let n = request.len();
            return Err(Error::Usage(format!("the messages have {n} bytes; at most {MAX_REQUEST} are taken")));
        }
        Ok(request)
    }
}

/// Renders the prompt that a template makes of messages, in a child process of `program`. `path` is the file that the template came from,
/// for messages.
///
/// # Errors
/// [`Error::Usage`] if the template refuses the messages; [`Error::BadFile`] if it is broken or takes too much memory or time;
/// [`Error::Memory`] or [`Error::Io`] if the child cannot be started.
pub fn render_by(program: &Path, input: &Input, path: &Path) -> Result<String> {
    let request = input.request(path)?;
    said(RENDERING.ask(program, &request)?, path)
}

/// Renders many prompts, each in a child process that was started beforehand.
#[derive(Clone)]
pub struct Renderer(Arc<Children>);

impl Renderer {
    /// Child processes are started from `program`, called with [`CHILD_ARGUMENT`].
    pub fn new(program: PathBuf) -> Renderer {
        Renderer(Children::new(&RENDERING, program))
    }

    /// Starts a child process for the next prompt, in the background.
    pub fn prepare(&self) {
        self.0.prepare();
    }

    /// As [`render_by`].
    ///
    /// # Errors
    /// As [`render_by`].
    pub fn render(&self, input: &Input, path: &Path) -> Result<String> {
        said(self.0.ask(&input.request(path)?, &Wanted::always())?, path)
    }
}

/// The text in the child's answer, or the error that its answer or end means.
fn said(end: End, path: &Path) -> Result<String> {
    let broken = |reason: String| Err(Error::bad(path, "chat template", reason));
    match end {
        End::Said(line) => match serde_json::from_slice(&line) {
            Ok(Outcome::Text(text)) => Ok(text),
            Ok(Outcome::Refused(reason)) => Err(refused(&reason)),
            Ok(Outcome::Broken(reason)) => broken(reason),
            Err(_) => broken("the rendering process said nothing that can be read".into()),
        },
        End::Died(status) => broken(RENDERING.cause_of_death(status)),
        End::Late | End::Unwanted => broken(format!("rendering takes more than {:?}", RENDERING.wall)),
    }
}

/// As [`render_by`], but without the protection of a child process: for known templates, in tests.
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
    if len <= MAX_SOURCE {
        return Ok(());
    }
    Err(Error::bad(path, "chat template", format!("{len} bytes of source; at most {MAX_SOURCE} are taken")))
}

fn refused(reason: &str) -> Error {
    let reason = crate::error::printable(reason);
    Error::Usage(format!("the model's chat template does not take these messages: {reason}"))
}

/// The whole life of the child: reads an [`Input`] as JSON from standard input and writes the result to standard output. `main` calls it
/// when the first argument is [`CHILD_ARGUMENT`].
pub fn child_main() -> ExitCode {
    RENDERING.run(|request| {
        let input: Input = serde_json::from_slice(&request).ok()?;
        drop(request);
        check_source(&input.template, Path::new("")).ok()?;
        serde_json::to_vec(&run(&input)).ok()
    })
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
            Outcome::Broken(format!("the rendered text has more than {MAX_OUTPUT} bytes"))
        }
        (Some(error), None) => Outcome::Broken(error.to_string()),
    }
}

/// Output that fails beyond [`MAX_OUTPUT`] bytes.
struct Capped(Vec<u8>);

impl Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
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
