//! The command line: one file per verb. Data goes to stdout, messages to stderr.

/// As the standard one, for the modules below: the text may hold a path, a name or an answer that is not ours ([`say`]).
macro_rules! eprintln {
    ($($text:tt)*) => { $crate::cli::say(format_args!($($text)*)) };
}

pub(crate) mod bench;
mod calibrate;
pub(crate) mod chart;
mod chat;
mod chat_backend;
mod chat_commands;
mod chat_session;
pub(crate) mod completions;
mod config;
#[cfg(feature = "cuda")]
mod cuda;
mod daemon_verbs;
pub(crate) mod device_arg;
mod doctor;
pub(crate) mod eval;
#[cfg(feature = "cuda")]
mod gpu_check;
pub(crate) mod habits;
pub(crate) mod help;
pub(crate) mod lab_arg;
mod loader_arg;
mod log_line;
mod log_writer;
mod ls;
pub(crate) mod machine_arg;
mod measure;
pub(crate) mod model_arg;
pub(crate) mod output;
mod pack;
mod plan;
mod plan_ram;
mod plan_subject;
pub(crate) mod policy_arg;
mod profile;
mod profile_plots;
pub(crate) mod progress;
#[cfg(feature = "pull")]
mod pull;
mod rm;
pub(crate) mod run;
mod sampling_arg;
pub(crate) mod serve;
mod settings_arg;
mod show;
pub(crate) mod size;
pub(crate) mod sparsity_arg;
#[cfg(feature = "tui")]
mod top;
mod trace_arg;
mod train_predictor;
mod wrap;

pub use crate::open::embedded::{File, carry};

use crate::error::{Error, Result, human_bytes, is_unprintable, safe_text};
use clap::{Command, FromArgMatches, Parser, Subcommand};
use progress::stoppable;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::OnceLock;

/// Runs language models that do not fit in VRAM, neuron by neuron.
///
/// MODEL is a Hugging Face directory, a GGUF file, a packed .neurons file, the name of a model that `pull` fetched, or `demo`, the small
/// built-in model. A model that has to be packed is packed once, into the user's cache directory.
#[derive(Parser)]
#[command(name = "dynamicinfer", version, max_term_width = 110, arg_required_else_help = true)]
struct Args {
    /// The daemon's Unix socket; verbs that talk to the daemon have it too, and it may precede or follow them
    #[arg(long, global = true, hide = true, value_name = "PATH")]
    socket: Option<std::path::PathBuf>,
    #[command(subcommand)]
    verb: Verb,
}

const EXAMPLES: &str = "\
Examples:
  dynamicinfer run demo \"Once upon a time\"     a story from the built-in model
  dynamicinfer serve demo                      OpenAI's API on a Unix socket
  dynamicinfer chat demo                       talk to a model
  echo \"Summarise: ...\" | dynamicinfer run M   the prompt from a pipe
  dynamicinfer bench demo -p 128 -n 64         tokens per second
  dynamicinfer plan demo --vram 8GiB           what fits into VRAM, and how fast it runs
  dynamicinfer pack model.gguf --quant q8_0    write the packed file yourself

Exit status: 0 done, 1 failed, 2 wrong usage, 3 no daemon, 4 a daemon runs already,
5 bad model file, 6 not enough memory, 70 the engine failed, 130 Ctrl-C.";

#[derive(Subcommand)]
enum Verb {
    Run(run::Args),
    Chat(chat::Args),
    Serve(serve::Args),
    Ps(daemon_verbs::Ps),
    #[cfg(feature = "tui")]
    Top(top::Args),
    Load(daemon_verbs::LoadArgs),
    Stop(daemon_verbs::StopArgs),
    Budget(daemon_verbs::BudgetArgs),
    #[command(visible_alias = "list")]
    Ls(ls::Args),
    Rm(rm::Args),
    Doctor(doctor::Args),
    #[cfg(feature = "cuda")]
    GpuCheck(gpu_check::Args),
    Config(config::Args),
    Show(show::Args),
    #[cfg(feature = "pull")]
    Pull(pull::Args),
    Pack(pack::Args),
    Bench(bench::Args),
    Eval(eval::Args),
    Profile(profile::Args),
    Measure(measure::Args),
    Plan(plan::Args),
    TrainPredictor(train_predictor::Args),
    Calibrate(calibrate::Args),
    Completions(completions::Args),
}

/// One of the programs of this package, as it was called.
pub(crate) trait Program: FromArgMatches {
    /// As it is typed.
    const NAME: &'static str;

    /// Whether it is the daemon, which has a log and ways with signals of its own.
    fn is_daemon(&self) -> bool;

    /// Whether it computes; verbs that do not are to be there at once.
    fn computes(&self) -> bool;

    /// # Errors
    /// Whatever its verb could not do.
    fn run(self) -> Result<()>;
}

impl Program for Args {
    const NAME: &'static str = "dynamicinfer";

    fn is_daemon(&self) -> bool {
        matches!(self.verb, Verb::Serve(_))
    }

    fn computes(&self) -> bool {
        self.verb.computes()
    }

    fn run(self) -> Result<()> {
        dispatch(self.verb)
    }
}

/// The program. Returns its exit status.
pub fn main() -> ExitCode {
    start::<Args>(&help::command())
}

/// A program with this command line. Returns its exit status.
pub(crate) fn start<P: Program>(command: &Command) -> ExitCode {
    let first = std::env::args_os().nth(1);
    if let Some(done) = crate::api::child(first.as_deref().and_then(std::ffi::OsStr::to_str)) {
        return done;
    }
    // Set once, here: a process is one program.
    let _ = NAME.set(P::NAME);
    let parsed = command
        .clone()
        .try_get_matches_from(help::typed(std::env::args_os()))
        .and_then(|found| P::from_arg_matches(&found));
    let program = match parsed {
        Ok(program) => program,
        Err(error) => return refused(command, &error),
    };
    log(program.is_daemon());
    warn_of_variables();
    // The daemon has its own ways with signals.
    if !program.is_daemon() {
        crate::interrupt::install();
    }
    let done = match crate::cpu::Isa::asked_for() {
        Ok(_) if program.computes() => start_pool().and_then(|()| program.run()),
        Ok(_) => program.run(),
        Err(why) => Err(Error::Usage(why)),
    };
    let code = match done {
        Ok(()) => ExitCode::SUCCESS,
        // The reader has closed the pipe: that is no failure.
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            // Where stderr is closed, the exit status remains.
            eprintln!("{}: {error}", name());
            ExitCode::from(error.exit_code())
        }
    };
    log_writer::finish();
    code
}

static NAME: OnceLock<&'static str> = OnceLock::new();

/// Name of the program that runs, with which errors begin.
fn name() -> &'static str {
    NAME.get().copied().unwrap_or(Args::NAME)
}

/// Says what is wrong with a command line, or shows the help that was asked for.
fn refused(command: &Command, error: &clap::Error) -> ExitCode {
    let typed: Vec<String> = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect();
    let answer = || habits::elsewhere(command, &typed).or_else(|| habits::answer(command, &typed));
    if let Some(answer) = error.use_stderr().then(answer).flatten() {
        eprintln!("{}: {answer}", name());
        return ExitCode::from(2);
    }
    // Help and version are data, everything else is a complaint; both may go into a closed pipe.
    // It repeats what was typed, or what a shell made of a file's name.
    if error.use_stderr() && std::env::args_os().any(|arg| arg.to_string_lossy().contains(is_unprintable)) {
        eprintln!("{}", error.render().to_string().trim_end());
    } else {
        let _ = error.print();
    }
    ExitCode::from(if error.use_stderr() { 2 } else { 0 })
}

/// Warns of environment variables that are meant for this program and have no effect.
fn warn_of_variables() {
    for why in crate::settings::unknown_variables(&crate::config::own_variables(), &crate::config::VARIABLES) {
        eprintln!("warning: {why}");
    }
    if let Some(dir) = crate::config::missing_assets() {
        eprintln!(
            "warning: $DYNAMICINFER_ASSETS is {}, which is not a folder; the program's assets are not searched \
             elsewhere",
            dir.display()
        );
    }
}

fn dispatch(verb: Verb) -> Result<()> {
    match verb {
        Verb::Run(args) => run::run(args),
        Verb::Chat(args) => chat::run(args),
        Verb::Serve(args) => serve::run(args),
        Verb::Ps(args) => daemon_verbs::ps(args),
        #[cfg(feature = "tui")]
        Verb::Top(args) => top::run(args),
        Verb::Load(args) => daemon_verbs::load(args),
        Verb::Stop(args) => daemon_verbs::stop(args),
        Verb::Budget(args) => daemon_verbs::budget(args),
        Verb::Ls(args) => ls::run(args),
        Verb::Rm(args) => rm::run(args),
        Verb::Doctor(args) => stoppable(|| (), || doctor::run(args)),
        #[cfg(feature = "cuda")]
        Verb::GpuCheck(args) => gpu_check::run(args),
        Verb::Config(args) => config::run(args),
        Verb::Show(args) => show::run(args),
        #[cfg(feature = "pull")]
        Verb::Pull(args) => pull::run(args),
        Verb::Pack(args) => stoppable(|| (), || pack::run(args)),
        Verb::Bench(args) => bench::run(args),
        Verb::Eval(args) => eval::run(args),
        Verb::Profile(args) => profile::run(args),
        Verb::Measure(args) => measure::run(args),
        Verb::Plan(args) => stoppable(|| (), || plan::run(args)),
        Verb::TrainPredictor(args) => train_predictor::run(args),
        Verb::Calibrate(args) => calibrate::run(args),
        Verb::Completions(args) => completions::run(args, help::command(), EXAMPLES),
    }
}

impl Verb {
    /// Whether it computes; those that do not are to be there at once.
    fn computes(&self) -> bool {
        use Verb::{Budget, Completions, Config, Doctor, Load, Ls, Ps, Rm, Stop};
        match self {
            Budget(_) | Completions(_) | Config(_) | Doctor(_) | Load(_) | Ls(_) | Ps(_) | Rm(_) | Stop(_) => false,
            #[cfg(feature = "tui")]
            Verb::Top(_) => false,
            #[cfg(feature = "pull")]
            Verb::Pull(_) => false,
            _ => true,
        }
    }
}

/// Starts rayon's shared threads, in a limited number: by default it starts as many as a variable says, and aborts where it cannot.
fn start_pool() -> Result<()> {
    let threads = crate::config::pool_threads();
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().map_err(|e| {
        Error::Memory(format!(
            "cannot start {threads} threads: {e}; raise the limit on processes (ulimit -u, TasksMax) or on memory (ulimit -v)"
        ))
    })
}

/// Logs to stderr, filtered by `DYNAMICINFER_LOG`; by default warnings, and a daemon's requests.
fn log(daemon: bool) {
    use tracing_subscriber::{EnvFilter, fmt::writer::BoxMakeWriter};
    let given = crate::config::log_filter().and_then(|filter| EnvFilter::try_new(filter).ok());
    let filter = if daemon { "warn,dynamicinfer::serve=info" } else { "warn" };
    let filter = given.unwrap_or_else(|| EnvFilter::new(filter));
    // Set once, here, before any other subscriber. Internal errors are not logged: writing them would fail, too, and panic.
    // Without a thread for it, the thread that logs writes the line.
    let writer = match daemon.then(log_writer::LogWriter::start) {
        Some(Ok(writer)) => BoxMakeWriter::new(move || writer.clone()),
        None | Some(Err(_)) => BoxMakeWriter::new(std::io::stderr),
    };
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    let subscriber = subscriber.log_internal_errors(false);
    // Colours are for a terminal; in a file they are rubbish between the words.
    let subscriber = if std::io::stderr().is_terminal() { subscriber } else { subscriber.with_ansi(false) };
    let _ = subscriber.event_format(log_line::LogLine).try_init();
}

/// Prints a text of any origin to stdout, without characters that a terminal acts on. A closed pipe is an error that ends the program
/// quietly.
pub(crate) fn print(text: &str) -> Result<()> {
    print_as_it_is(&safe_text(text))
}

/// Prints bytes as they are: the text of a model that goes into a file or another program.
fn print_as_it_is(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::io("write to", "stdout".as_ref()))
}

/// Writes a message to stderr, as safe as [`print`]. A closed stderr is no failure.
pub(crate) fn say(text: std::fmt::Arguments) {
    let mut line = safe_text(&text.to_string()).into_owned();
    line.push('\n');
    log_writer::write_line(&line);
}

/// Prints a document, as [`safe_json`] writes it.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<()> {
    print(&safe_json(value))
}

/// A document with a line feed at its end. Characters that JSON allows and a terminal acts on are escaped, which is the same JSON.
pub(crate) fn safe_json(value: &impl serde::Serialize) -> String {
    let text = serde_json::to_string_pretty(value).expect("plain data");
    let mut safe = String::with_capacity(text.len() + 1);
    for c in text.chars() {
        if is_unprintable(c) && c != '\n' {
            write!(safe, "\\u{:04x}", u32::from(c)).expect("a string takes all");
        } else {
            safe.push(c);
        }
    }
    safe + "\n"
}
