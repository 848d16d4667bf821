//! Chat templates: Jinja source that came with a model, run so that it cannot do harm.
//!
//! A template is a program by a stranger. minijinja keeps it from files and the network, and its fuel ends loops. But measured (version
//! 2.24): a string that is doubled again and again takes gigabytes within the fuel, and deep nesting overflows the stack, which ends the
//! process. So a template is rendered in a child process that may use 512 MiB and 2 seconds of processor time, on a thread with a large
//! stack; if the child is killed, that is an error here.
//!
//! The dialect and the variables are those of transformers' `apply_chat_template` (`jinja`).

use super::{Tokenizer, jinja};
use crate::child::{Children, End, Wanted, Work};
use crate::error::{Error, Result};
use minijinja::ErrorKind;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
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
    // 64 KiB of source need 28 MiB at the measured 430 bytes of stack for every byte of `not not`, and a value of 100,000 levels may take 600 bytes
    // for each, by how the compiler inlines.
    stack: 64 << 20,
    computed: Duration::from_secs(2),
    wall: Duration::from_secs(10),
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
    /// What an assistant thought before it said that; templates that know it decide whether it is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same, by the name that some templates know instead (gpt-oss, LFM2.5).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<String>,
    /// The calls of functions that an assistant's message has, in OpenAI's form.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<serde_json::Value>,
    /// The id of the call that a tool's message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The function that a tool's message answers for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: &str, content: &str) -> Message {
        Message {
            role: role.to_owned(),
            content: content.to_owned(),
            reasoning_content: None,
            thinking: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }
}

/// The variables that a template sees.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Input {
    /// The template itself, as Jinja source.
    pub template: String,
    /// The conversation, oldest first: objects with `role` and `content`, and what else a template may know of (`tool_calls`).
    pub messages: Vec<serde_json::Value>,
    /// Whether the prompt ends with the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// BOS as text; empty if the model has none.
    pub bos_token: String,
    /// EOS as text; empty if the model has none.
    pub eos_token: String,
    /// The texts of other special tokens by their names in templates (`pad_token`); what is missing is undefined.
    #[serde(default)]
    pub other_tokens: BTreeMap<String, String>,
    /// Seconds since 1970, UTC: the time that `strftime_now` formats.
    pub now: i64,
    /// Other variables (`enable_thinking`); of those above they replace `other_tokens` only. `tools` and `documents` are None where they are
    /// not given, as transformers has them.
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
            messages: messages.iter().map(|m| serde_json::json!(m)).collect(),
            add_generation_prompt: true,
            bos_token: text(tokenizer.bos()),
            eos_token: text(tokenizer.eos()),
            other_tokens: tokenizer.other_tokens(),
            now: crate::clock::unix_seconds() as i64,
            extras: serde_json::Map::new(),
        }
    }

    /// Every variable that the template sees.
    fn variables(&self) -> serde_json::Map<String, serde_json::Value> {
        let mut all = serde_json::Map::new();
        for absent in ["tools", "documents"] {
            all.insert(absent.into(), serde_json::Value::Null);
        }
        all.extend(self.other_tokens.iter().map(|(name, text)| (name.clone(), text.as_str().into())));
        all.extend(self.extras.clone());
        all.insert("messages".into(), self.messages.clone().into());
        all.insert("add_generation_prompt".into(), self.add_generation_prompt.into());
        all.insert("bos_token".into(), self.bos_token.as_str().into());
        all.insert("eos_token".into(), self.eos_token.as_str().into());
        all
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
/// [`Error::Memory`] or [`Error::Io`] if the child cannot be started, something else killed it, or other processes had the cores.
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

    /// As [`render_by`]; the child process is ended once the text is no longer wanted.
    ///
    /// # Errors
    /// As [`render_by`].
    pub fn render(&self, input: &Input, path: &Path, wanted: &Wanted) -> Result<String> {
        said(self.0.ask(&input.request(path)?, wanted)?, path)
    }
}

/// The text in the child's answer, or the error that its answer or end means.
fn said(end: End, path: &Path) -> Result<String> {
    let broken = |reason: String| Err(Error::bad(path, "chat template", reason));
    match RENDERING.answer(end)?.map(|line| serde_json::from_slice(&line)) {
        Ok(Ok(Outcome::Text(text))) => Ok(text),
        Ok(Ok(Outcome::Refused(reason))) => Err(refused(&reason)),
        Ok(Ok(Outcome::Broken(reason))) | Err(reason) => broken(reason),
        Ok(Err(_)) => broken("the rendering process said nothing that can be read".into()),
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
    let mut env = jinja::environment(input.now, Arc::clone(&raised));
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(RECURSION);
    let source = jinja::rewritten(&input.template);
    let template = match env.template_from_named_str("chat template", &source) {
        Ok(template) => template,
        Err(error) => return Outcome::Broken(error.to_string()),
    };
    let context = input.variables();
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
