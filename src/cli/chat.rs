use super::chat_backend::{Backend, Taken};
use super::chat_commands::{self, Next};
use super::settings_arg::{SocketArgs, read};
use crate::clock::{self, Seldom};
use crate::error::{Error, Result, printable};
use crate::interrupt;
use crate::settings::Settings;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config, Editor};
use serde_json::{Map, Value, json};
use std::io::{IsTerminal, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Talk to a model
///
/// With a daemon running, it answers; MODEL is loaded there if it is another. Without one the model runs in this process. Ctrl-C
/// ends an answer, Ctrl-D the talk; a message that begins with """ goes on to the next """. /help lists the commands.
#[derive(clap::Args)]
pub struct Args {
    /// A Hugging Face directory, a .gguf, a packed .neurons file, or `demo` [default: what the daemon has]
    model: Option<String>,
    /// System message
    #[arg(long)]
    system: Option<String>,
    /// Run the model in this process even if there is a daemon
    #[arg(long)]
    here: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

/// The talk so far.
pub struct Talk {
    pub backend: Backend,
    pub name: String,
    pub system: Option<String>,
    /// (user, assistant)
    pub turns: Vec<(String, String)>,
    /// So many of the first turns are no longer sent: with them the talk is longer than the context.
    pub left_out: usize,
    /// Tokens of the model's context.
    pub context: u64,
    /// Fields of the request that /set has set.
    pub set: Map<String, Value>,
    pub last: Option<(Taken, f64)>,
}

impl Talk {
    pub fn messages(&self, question: &str) -> Vec<Value> {
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let mut messages: Vec<Value> = self.system.iter().map(|system| message("system", system)).collect();
        for (user, assistant) in &self.turns[self.left_out..] {
            messages.extend([message("user", user), message("assistant", assistant)]);
        }
        messages.push(message("user", question));
        messages
    }

    /// Asks, and prints the answer as it comes. An answer that was cut by Ctrl-C is kept as far as it came.
    pub fn ask(&mut self, question: &str) -> Result<()> {
        let start = clock::now();
        let before = self.left_out;
        self.make_room(question);
        let (mut answer, result) = self.answer_to(question);
        let mut result = result;
        while matches!(result, Err(Error::TooLong(_))) && self.left_out < self.turns.len() {
            self.left_out += 1;
            (answer, result) = self.answer_to(question);
        }
        let seconds = start.elapsed().as_secs_f64();
        super::print("\n")?;
        if self.left_out > before {
            eprintln!(
                "(the first {} of {} turns are left out from here on: the talk is longer than the model's context of {} tokens)",
                self.left_out,
                self.turns.len(),
                self.context
            );
        }
        match result {
            Ok(taken) => {
                if taken.cut && !self.set.contains_key(MAX_TOKENS) {
                    eprintln!("(cut after {} tokens; /set max_tokens N allows more)", taken.generated_tokens);
                }
                self.last = Some((taken, seconds));
            }
            Err(Error::Interrupted) => {
                interrupt::take();
                eprintln!("(stopped)");
            }
            Err(error) => {
                eprintln!("{error}");
                return Ok(());
            }
        }
        self.turns.push((question.to_owned(), answer));
        Ok(())
    }

    /// The answer as far as it came, printed meanwhile, and how it ended. Where nobody says how long it may be, it takes half of the
    /// context: a model that finds no end would leave no room for a second question.
    fn answer_to(&mut self, question: &str) -> (String, Result<Taken>) {
        let mut request = json!({"messages": self.messages(question), (MAX_TOKENS): (self.context / 2).max(1)});
        for (field, value) in &self.set {
            request[field] = value.clone();
        }
        let mut answer = String::new();
        let result = self.backend.answer(&request, |piece| {
            answer.push_str(piece);
            super::print(piece)
        });
        (answer, result)
    }

    /// Leaves out the first turns where, by the tokens that the last answer took a byte, the talk and a quarter of the context for the
    /// answer would not fit: else answers would get shorter and shorter.
    fn make_room(&mut self, question: &str) {
        let Some((taken, _)) = self.last else { return };
        let bytes = |turns: &[(String, String)]| turns.iter().map(|(q, a)| q.len() + a.len()).sum::<usize>() as f64;
        let sent = bytes(&self.turns[self.left_out..]) + self.system.as_ref().map_or(0, String::len) as f64;
        let tokens_a_byte = (taken.prompt_tokens + taken.generated_tokens) as f64 / sent.max(1.0);
        let room = self.context as f64 * 0.75;
        while self.left_out < self.turns.len()
            && (bytes(&self.turns[self.left_out..]) + question.len() as f64) * tokens_a_byte > room
        {
            self.left_out += 1;
        }
    }

    /// Begins anew with these turns.
    pub fn restart(&mut self, turns: Vec<(String, String)>) {
        (self.turns, self.left_out, self.last) = (turns, 0, None);
    }

    /// Takes the last question back.
    pub fn take_back(&mut self) -> Option<String> {
        let (question, _) = self.turns.pop()?;
        self.left_out = self.left_out.min(self.turns.len());
        Some(question)
    }
}

const MAX_TOKENS: &str = "max_tokens";

pub fn run(args: Args) -> Result<()> {
    let settings = read(None)?;
    let backend = backend(&args, &settings)?;
    let card = backend.card()?;
    let name = printable(card["id"].as_str().unwrap_or_default());
    let system = args.system.clone().or_else(|| settings.text("chat.system").map(str::to_owned));
    if card["chat_template"] == false {
        eprintln!("note: {name} has no chat template: it continues the text of what is said");
    }
    let context = card["context_length"].as_u64().unwrap_or(4096);
    let (turns, set) = (Vec::new(), Map::new());
    let mut talk = Talk { backend, name, system, turns, left_out: 0, context, set, last: None };
    let history = history(&settings);
    let result = talk_on(&mut talk, settings.whole("chat.history") as usize, history.as_deref());
    match result {
        Err(Error::Interrupted) => Ok(()),
        other => other,
    }
}

/// The daemon if there is one, with the model that was named; else an engine here.
fn backend(args: &Args, settings: &Settings) -> Result<Backend> {
    let daemon = if args.here { None } else { args.socket.connect_as(settings).ok() };
    let Some(client) = daemon else {
        let model =
            args.model.clone().or_else(|| settings.text("serve.model").map(str::to_owned)).ok_or_else(|| {
                Error::Usage(
                    "no daemon runs here; name a MODEL to run it in this process: dynamicinfer chat demo".into(),
                )
            })?;
        eprintln!("no daemon: the model runs in this process");
        return Backend::here(&model, settings);
    };
    if let Some(model) = &args.model {
        let state = client.get("/v1/x/ps")?;
        let path = Path::new(model);
        let source = path.canonicalize().map_or_else(|_| model.clone(), |path| path.to_string_lossy().into_owned());
        let there = &state["models"][0];
        if there["source"] != source.as_str() && there["source"] != model.as_str() && there["name"] != model.as_str() {
            eprintln!("loading {model}");
            client.long("POST", "/v1/x/models/load", Some(&json!({"model": source})))?;
        }
    }
    Ok(Backend::Daemon(client))
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
            eprintln!("note: lines are not remembered: {}: {error}", path.display());
            None
        }
    }
}

fn talk_on(talk: &mut Talk, remembered: usize, history: Option<&Path>) -> Result<()> {
    let terminal = std::io::stdin().is_terminal();
    let config = Config::builder().max_history_size(remembered).map(|b| b.auto_add_history(false).build());
    let broken = |e: ReadlineError| Error::Failed(format!("cannot read lines: {e}"));
    let mut editor: Editor<(), FileHistory> = Editor::with_config(config.map_err(broken)?).map_err(broken)?;
    if let Some(path) = history {
        // A damaged history is no reason not to talk.
        let _ = editor.load_history(path);
    }
    if terminal {
        eprintln!("{}; /help lists the commands, Ctrl-D ends", talk.name);
    }
    let (mut again, forgotten) = (false, Seldom::new());
    loop {
        let prompt = if terminal { ">>> " } else { "" };
        let line = match type_in(&mut editor, prompt)? {
            Ok(line) => line,
            Err(ReadlineError::Eof) => return Ok(()),
            Err(ReadlineError::Interrupted) if again => return Ok(()),
            Err(ReadlineError::Interrupted) => {
                again = true;
                eprintln!("Ctrl-D, /exit or Ctrl-C again ends");
                continue;
            }
            Err(error) if is_no_text(&error) => {
                eprintln!("that line is not UTF-8 text; it is left out");
                continue;
            }
            Err(error) => return Err(broken(error)),
        };
        again = false;
        let Some(said) = whole(&mut editor, line, terminal)? else { return Ok(()) };
        if said.trim().is_empty() {
            continue;
        }
        let _ = editor.add_history_entry(said.as_str());
        if let Some(path) = history
            && let Err(error) = editor.append_history(path)
            && forgotten.is_due(clock::unix_seconds())
        {
            tracing::warn!("the line is not remembered: {error}");
        }
        // A leading backslash is what some other programs take.
        let command = said.strip_prefix(['/', '\\']).filter(|_| !said.contains('\n'));
        match command {
            None => {
                talk.ask(&said)?;
                // One that came when the answer was just complete was meant for it.
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

/// Bytes that came in and are no text; those behind them can still be read.
fn is_no_text(error: &ReadlineError) -> bool {
    matches!(error, ReadlineError::Io(error) if error.kind() == std::io::ErrorKind::InvalidData)
}

/// A line; SIGTERM and SIGHUP end the program meanwhile, with the terminal as it was found and no longer told to mark what is pasted.
fn type_in(editor: &mut Editor<(), FileHistory>, prompt: &str) -> Result<rustyline::Result<String>> {
    let before = rustix::termios::tcgetattr(std::io::stdin()).ok();
    let restore = move || {
        // Where the terminal has gone there is nothing to restore.
        let Some(before) = before else { return };
        let _ = rustix::termios::tcsetattr(std::io::stdin(), rustix::termios::OptionalActions::Now, &before);
        let _ = writeln!(std::io::stderr(), "\x1b[?2004l");
    };
    interrupt::at_prompt(restore, || editor.readline(prompt))
}

/// A message in `"""` goes on over lines. `None` where input ends inside.
fn whole(editor: &mut Editor<(), FileHistory>, first: String, terminal: bool) -> Result<Option<String>> {
    let Some(rest) = first.trim_start().strip_prefix("\"\"\"") else { return Ok(Some(first)) };
    let mut text = rest.to_owned();
    loop {
        if let Some(done) = text.trim_end().strip_suffix("\"\"\"") {
            return Ok(Some(done.trim_matches('\n').to_owned()));
        }
        match type_in(editor, if terminal { "... " } else { "" })? {
            Ok(line) => {
                text.push('\n');
                text.push_str(&line);
            }
            Err(ReadlineError::Eof) => return Ok(None),
            Err(ReadlineError::Interrupted) => return Ok(Some(String::new())),
            Err(error) if is_no_text(&error) => eprintln!("that line is not UTF-8 text; it is left out"),
            Err(error) => return Err(Error::Failed(format!("cannot read lines: {error}"))),
        }
    }
}
