use super::chat_backend::Backend;
use super::chat_commands::{self, Next};
use super::chat_session::ChatSession;
use super::loader_arg::LoaderArgs;
use super::sampling_arg::SamplingArgs;
use super::serve::ModelLoader;
use super::settings_arg::{SocketArgs, read};
use crate::client::Client;
use crate::clock::{self, Seldom};
use crate::error::{Error, Result, printable};
use crate::interrupt;
use crate::open::model::real;
use crate::settings::Settings;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{Config, Editor, Helper};
use serde_json::json;
use std::cell::RefCell;
use std::io::{IsTerminal, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Talk to a model
///
/// A running daemon answers, and loads MODEL, with your consent in place of another one. Without a daemon the model runs in this process.
/// Ctrl-C ends an answer, Ctrl-D the chat; a message that begins with """ ends with the next """. /help lists the commands.
#[derive(clap::Args)]
pub struct Args {
    /// Hugging Face directory, .gguf, .neurons file, name from `ls`, or `demo` [default: the daemon's model]
    pub model: Option<String>,
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Most tokens of an answer [default: a quarter of the context]
    #[arg(short, long, value_name = "N")]
    pub n_predict: Option<u64>,
    /// Run the model in this process, not in the daemon; so does every option of model, sparsity and device
    #[arg(long)]
    pub here: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub engine: LoaderArgs,
    #[command(flatten)]
    pub socket: SocketArgs,
}

pub fn run(args: Args) -> Result<()> {
    let mut settings = read(None)?;
    for (key, flag, value) in args.engine.flags() {
        settings.flag(key, flag, Some(value))?;
    }
    let mut set = args.sampling.fields()?;
    set.extend(args.n_predict.map(|n| ("max_tokens".to_owned(), json!(n))));
    let backend = backend(&args, &settings)?;
    let card = backend.card()?;
    let model = card["id"].as_str().unwrap_or_default().to_owned();
    let name = printable(&model);
    let system = args.system.clone().or_else(|| settings.text("chat.system").map(str::to_owned));
    if card["chat_template"] == false {
        eprintln!("note: {name} has no chat template, so it continues your text");
    }
    let context = card["context_length"].as_u64().unwrap_or(4096);
    let mut talk =
        ChatSession { backend, model, name, system, turns: Vec::new(), left_out: 0, context, set, last: None };
    let history = history(&settings);
    let result = talk_on(&mut talk, settings.whole("chat.history") as usize, history.as_deref());
    match result {
        Err(Error::Interrupted) => Ok(()),
        other => other,
    }
}

/// The daemon if one runs, with the model given; else an engine in this process.
fn backend(args: &Args, settings: &Settings) -> Result<Backend> {
    // A daemon has its model open already, in its own way.
    let here = args.here || args.engine != LoaderArgs::default();
    let daemon = if here { None } else { asked(args.socket.connect_as(settings)) };
    let Some(client) = daemon else {
        let model =
            args.model.clone().or_else(|| settings.text("serve.model").map(str::to_owned)).ok_or_else(|| {
                let why = if here {
                    "--here and options of the model need a MODEL"
                } else {
                    "no daemon runs; give a MODEL to run it in this process"
                };
                Error::Usage(format!("{why}: dynamicinfer chat demo"))
            })?;
        eprintln!("{}the model runs in this process", if here { "" } else { "no daemon: " });
        let loader = ModelLoader { args: args.engine.clone(), named: Some(model.clone()), ..ModelLoader::default() };
        return Backend::here(&model, settings, &loader);
    };
    have_loaded(&client, args.model.as_deref())?;
    Ok(Backend::Daemon(client))
}

/// Has the daemon load `model`, where it has another one or none; `None`: the one that it has freed, if it has.
///
/// # Errors
/// [`Error::Usage`] where the daemon has another model, which other clients may use, and the user does not agree to its replacement.
fn have_loaded(client: &Client, model: Option<&str>) -> Result<()> {
    let state = client.get("/v1/x/ps")?;
    let Some(model) = model.or(state["freed"].as_str()) else { return Ok(()) };
    let source = real(Path::new(model)).map_or_else(|_| model.to_owned(), |path| path.to_string_lossy().into_owned());
    let there = &state["models"][0];
    if [&source, model].iter().any(|name| there["source"] == **name || there["name"] == **name) {
        return Ok(());
    }
    let (shown, asked) = (printable(model), json!({"model": model, "stream": false}));
    if state["freed"] == model {
        eprintln!("loading {shown}");
        return client.long("POST", "/api/generate", Some(&asked)).map(drop);
    }
    if let Some(other) = there["name"].as_str().or(state["loading"].as_str()) {
        may_replace(&printable(other), &shown)?;
    }
    eprintln!("loading {shown}");
    client.long("POST", "/v1/x/models/load", Some(&json!({"model": source}))).map(drop)
}

/// Asks the user whether the daemon's model, which other clients may use, is to be replaced.
fn may_replace(other: &str, model: &str) -> Result<()> {
    if std::io::stdin().is_terminal() && std::io::stderr().is_terminal() {
        eprint!("The daemon runs {other}, which others may use. Load {model} in its place? [y/N] ");
        let mut answer = String::new();
        let read = interrupt::at_prompt(|| (), || std::io::stdin().read_line(&mut answer))?;
        if read.is_ok_and(|bytes| bytes > 0) && answer.trim().to_lowercase().starts_with('y') {
            return Ok(());
        }
    }
    Err(Error::Usage(format!(
        "the daemon runs {other}, which others may use; `dynamicinfer load {model}` replaces it, `dynamicinfer chat {model} --here` runs the \
         model in this process, and `dynamicinfer chat` talks to {other}"
    )))
}

/// The daemon if one answers; a note says why it is not used, unless none runs.
fn asked(daemon: Result<Client>) -> Option<Client> {
    if let Err(error) = &daemon
        && !matches!(error, Error::NoDaemon(_))
    {
        eprintln!("note: the daemon is not used: {error}");
    }
    daemon.ok()
}

/// The file of remembered lines, this user's alone; made here, for an editor would make it for everybody.
fn history(settings: &Settings) -> Option<PathBuf> {
    if settings.whole("chat.history") == 0 {
        return None;
    }
    let path = crate::config::state_dir()?.join("chat_history");
    let make = || -> std::io::Result<()> {
        std::fs::create_dir_all(path.parent().expect("it has a directory"))?;
        std::fs::File::options().create(true).append(true).mode(0o600).open(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))
    };
    match make() {
        Ok(()) => Some(path),
        Err(error) => {
            eprintln!("note: the history of lines is not kept: {}: {error}", path.display());
            None
        }
    }
}

fn talk_on(talk: &mut ChatSession, remembered: usize, history: Option<&Path>) -> Result<()> {
    let terminal = std::io::stdin().is_terminal();
    let config = Config::builder().max_history_size(remembered).map(|b| b.auto_add_history(false).build());
    let broken = |e: ReadlineError| Error::Failed(format!("cannot read lines: {e}"));
    let mut editor = LineEditor::with_config(config.map_err(broken)?).map_err(broken)?;
    editor.set_helper(Some(Typed::default()));
    if let Some(path) = history {
        // A damaged history is no reason not to talk.
        let _ = editor.load_history(path);
    }
    if terminal {
        eprintln!("{}; /help lists the commands, Ctrl-D ends", talk.name);
    }
    let (mut again, mut half, forgotten) = (false, String::new(), Seldom::new());
    loop {
        let prompt = if terminal { ">>> " } else { "" };
        let line = match type_in(&mut editor, prompt, &half)? {
            Ok(line) => line,
            Err(ReadlineError::Eof) => return Ok(()),
            Err(ReadlineError::Interrupted) => {
                let typed = typed(&editor);
                if again && typed == half {
                    remember(&mut editor, history, &half, &forgotten);
                    return Ok(());
                }
                (again, half) = (true, typed);
                eprintln!("Ctrl-D, /exit or Ctrl-C again ends");
                continue;
            }
            Err(error) if is_no_text(&error) => {
                eprintln!("the line is not UTF-8 text and is ignored");
                continue;
            }
            Err(error) => return Err(broken(error)),
        };
        again = false;
        half.clear();
        let (said, sent) = match whole(&mut editor, line, terminal)? {
            TypedMessage::Sent(said) => (said, true),
            TypedMessage::Dropped(said) => (said, false),
            TypedMessage::End => return Ok(()),
        };
        remember(&mut editor, history, &said, &forgotten);
        if !sent || said.trim().is_empty() {
            continue;
        }
        // A leading backslash is what some other programs take.
        let command = said.strip_prefix(['/', '\\']).filter(|_| !said.contains('\n'));
        match command {
            None => {
                talk.ask(&said)?;
                // A Ctrl-C just after the end of the answer was meant for it.
                interrupt::take();
            }
            Some(command) => match chat_commands::run(talk, command) {
                Ok(Next::Go) => {}
                Ok(Next::Exit) => return Ok(()),
                Err(Error::Interrupted) => {
                    interrupt::take();
                }
                Err(error) => eprintln!("{error}"),
            },
        }
        std::io::stdout().flush().map_err(Error::io("write to", "stdout".as_ref()))?;
    }
}

type LineEditor = Editor<Typed, FileHistory>;

/// The line typed so far: an editor passes it only to its hinter, and forgets it on Ctrl-C.
#[derive(Default)]
struct Typed(RefCell<String>);

impl Hinter for Typed {
    type Hint = String;

    fn hint(&self, line: &str, _: usize, _: &rustyline::Context<'_>) -> Option<String> {
        line.clone_into(&mut self.0.borrow_mut());
        None
    }
}

impl Completer for Typed {
    type Candidate = String;
}

impl Highlighter for Typed {}
impl Validator for Typed {}
impl Helper for Typed {}

/// The line that Ctrl-C interrupted.
fn typed(editor: &LineEditor) -> String {
    editor.helper().map_or(String::new(), |typed| typed.0.borrow().clone())
}

/// Adds a message to those that the arrow keys bring back.
fn remember(editor: &mut LineEditor, history: Option<&Path>, said: &str, forgotten: &Seldom) {
    if said.trim().is_empty() {
        return;
    }
    let _ = editor.add_history_entry(said);
    if let Some(path) = history
        && let Err(error) = editor.append_history(path)
        && forgotten.is_due(clock::unix_seconds())
    {
        tracing::warn!("the line is not remembered: {error}");
    }
}

/// Input that is not text; the input after it can still be read.
fn is_no_text(error: &ReadlineError) -> bool {
    matches!(error, ReadlineError::Io(error) if error.kind() == std::io::ErrorKind::InvalidData)
}

/// A line, of which `half` has been typed already; SIGTERM and SIGHUP end the program meanwhile, with the terminal as it was found and no
/// longer told to mark what is pasted.
fn type_in(editor: &mut LineEditor, prompt: &str, half: &str) -> Result<rustyline::Result<String>> {
    if let Some(typed) = editor.helper() {
        half.clone_into(&mut typed.0.borrow_mut());
    }
    let before = rustix::termios::tcgetattr(std::io::stdin()).ok();
    let restore = move || {
        // A terminal that is closed needs no restoring.
        let Some(before) = before else { return };
        let _ = rustix::termios::tcsetattr(std::io::stdin(), rustix::termios::OptionalActions::Now, &before);
        let _ = writeln!(std::io::stderr(), "\x1b[?2004l");
    };
    interrupt::at_prompt(restore, || editor.readline_with_initial(prompt, (half, "")))
}

enum TypedMessage {
    Sent(String),
    /// Ctrl-C interrupted it; its part so far.
    Dropped(String),
    /// Input ended inside.
    End,
}

/// A message in `"""` may have several lines.
fn whole(editor: &mut LineEditor, first: String, terminal: bool) -> Result<TypedMessage> {
    let Some(rest) = first.trim_start().strip_prefix("\"\"\"") else { return Ok(TypedMessage::Sent(first)) };
    let mut text = rest.to_owned();
    loop {
        if let Some(done) = text.trim_end().strip_suffix("\"\"\"") {
            return Ok(TypedMessage::Sent(done.trim_matches('\n').to_owned()));
        }
        match type_in(editor, if terminal { "... " } else { "" }, "")? {
            Ok(line) => {
                text.push('\n');
                text.push_str(&line);
            }
            Err(ReadlineError::Eof) => return Ok(TypedMessage::End),
            Err(ReadlineError::Interrupted) => {
                eprintln!("(the message is not sent; the arrow up brings it back)");
                return Ok(TypedMessage::Dropped(format!("{text}\n{}", typed(editor))));
            }
            Err(error) if is_no_text(&error) => eprintln!("the line is not UTF-8 text and is ignored"),
            Err(error) => return Err(Error::Failed(format!("cannot read lines: {error}"))),
        }
    }
}
