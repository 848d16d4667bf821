//! The command line: one file per verb. Data goes to stdout, messages to stderr.

/// As the standard one, for the modules below: the text may hold a path, a name or an answer that is not ours ([`say`]).
macro_rules! eprintln {
    ($($text:tt)*) => { $crate::cli::say(format_args!($($text)*)) };
}

mod bench;
mod calibrate;
mod chart;
mod chat;
mod chat_backend;
mod chat_commands;
mod chat_session;
mod completions;
mod config;
#[cfg(feature = "cuda")]
mod cuda;
mod daemon_verbs;
mod device_arg;
mod doctor;
mod eval;
mod experiment;
#[cfg(feature = "cuda")]
mod gpu_check;
mod habits;
mod help;
mod loader_arg;
mod log_line;
mod log_writer;
mod logits_hash;
mod ls;
mod machine_arg;
mod man;
mod measure;
mod model_arg;
mod output;
mod pack;
mod plan;
mod plan_ram;
mod plan_subject;
mod policy_arg;
mod profile;
mod profile_plots;
mod progress;
#[cfg(feature = "pull")]
mod pull;
mod record;
mod replay;
mod rm;
mod run;
mod sampling_arg;
mod serve;
mod settings_arg;
mod show;
mod simulate;
mod size;
mod sparsity_arg;
mod synth;
#[cfg(feature = "tui")]
mod top;
mod trace_arg;
mod train_predictor;
mod wrap;

pub use crate::open::embedded::{File, carry};

use crate::error::{Error, Result, human_bytes, is_unprintable, safe_text};
use clap::{FromArgMatches, Parser, Subcommand};
use progress::stoppable;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

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
    LogitsHash(logits_hash::Args),
    Profile(profile::Args),
    Measure(measure::Args),
    Plan(plan::Args),
    Synth(synth::Args),
    TrainPredictor(train_predictor::Args),
    Calibrate(calibrate::Args),
    Record(record::Args),
    Replay(replay::Args),
    Simulate(simulate::Args),
    Experiment(experiment::Args),
    Completions(completions::Args),
    Man(man::Args),
}

/// The program. Returns its exit status.
pub fn main() -> ExitCode {
    let first = std::env::args_os().nth(1);
    if let Some(done) = crate::api::child(first.as_deref().and_then(std::ffi::OsStr::to_str)) {
        return done;
    }
    let command = help::command();
    let parsed = command
        .clone()
        .try_get_matches_from(help::typed(std::env::args_os()))
        .and_then(|found| Args::from_arg_matches(&found));
    let args = match parsed {
        Ok(args) => args,
        Err(error) => {
            let typed: Vec<String> =
                std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect();
            if let Some(answer) = habits::answer(&command, &typed).filter(|_| error.use_stderr()) {
                eprintln!("dynamicinfer: {answer}");
                return ExitCode::from(2);
            }
            // Help and version are data, everything else is a complaint; both may go into a closed pipe.
            // It repeats what was typed, or what a shell made of a file's name.
            if error.use_stderr() && std::env::args_os().any(|arg| arg.to_string_lossy().contains(is_unprintable)) {
                eprintln!("{}", error.render().to_string().trim_end());
            } else {
                let _ = error.print();
            }
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    log(matches!(args.verb, Verb::Serve(_)));
    warn_of_variables();
    // The daemon has its own ways with signals.
    if !matches!(args.verb, Verb::Serve(_)) {
        crate::interrupt::install();
    }
    let done = match crate::cpu::Isa::asked_for() {
        Ok(_) => start_pool(&args.verb).and_then(|()| dispatch(args.verb)),
        Err(why) => Err(Error::Usage(why)),
    };
    let code = match done {
        Ok(()) => ExitCode::SUCCESS,
        // The reader has closed the pipe: that is no failure.
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            // Where stderr is closed, the exit status remains.
            eprintln!("dynamicinfer: {error}");
            ExitCode::from(error.exit_code())
        }
    };
    log_writer::finish();
    code
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
        Verb::LogitsHash(args) => logits_hash::run(args),
        Verb::Profile(args) => profile::run(args),
        Verb::Measure(args) => measure::run(args),
        Verb::Plan(args) => stoppable(|| (), || plan::run(args)),
        Verb::Synth(args) => stoppable(|| (), || synth::run(args)),
        Verb::TrainPredictor(args) => train_predictor::run(args),
        Verb::Calibrate(args) => calibrate::run(args),
        Verb::Record(args) => record::run(args),
        Verb::Replay(args) => stoppable(|| (), || replay::run(args)),
        Verb::Simulate(args) => stoppable(|| (), || simulate::run(args)),
        Verb::Experiment(args) => experiment::run(args),
        Verb::Completions(args) => completions::run(args),
        Verb::Man(args) => man::run(args),
    }
}

/// Starts rayon's shared threads, in a limited number: by default it starts as many as a variable says, and aborts where it cannot.
fn start_pool(verb: &Verb) -> Result<()> {
    use Verb::{Budget, Completions, Config, Doctor, Load, Ls, Man, Ps, Rm, Stop};
    // Verbs that compute nothing start at once.
    let computes = match verb {
        Budget(_) | Completions(_) | Config(_) | Doctor(_) | Load(_) | Ls(_) | Man(_) | Ps(_) | Rm(_) | Stop(_) => {
            false
        }
        #[cfg(feature = "tui")]
        Verb::Top(_) => false,
        #[cfg(feature = "pull")]
        Verb::Pull(_) => false,
        _ => true,
    };
    if !computes {
        return Ok(());
    }
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
fn print(text: &str) -> Result<()> {
    print_as_it_is(&safe_text(text))
}

/// Prints bytes as they are: the text of a model that goes into a file or another program.
fn print_as_it_is(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::io("write to", "stdout".as_ref()))
}

/// Writes a message to stderr, as safe as [`print`]. A closed stderr is no failure.
fn say(text: std::fmt::Arguments) {
    let mut line = safe_text(&text.to_string()).into_owned();
    line.push('\n');
    log_writer::write_line(&line);
}

/// Prints a document, as [`safe_json`] writes it.
fn print_json(value: &impl serde::Serialize) -> Result<()> {
    print(&safe_json(value))
}

/// A document with a line feed at its end. Characters that JSON allows and a terminal acts on are escaped, which is the same JSON.
fn safe_json(value: &impl serde::Serialize) -> String {
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
