//! A program from its command line to its exit status.

#[cfg(feature = "cuda")]
use super::gpu_check;
use super::printing::{name, set_name};
use super::progress::stoppable;
#[cfg(feature = "pull")]
use super::pull;
#[cfg(feature = "tui")]
use super::top;
use super::verbs::{Args, EXAMPLES, Verb, command};
use super::{
    bench, calibrate, chat, completions, config, daemon_verbs, doctor, eval, habits, help, log_line, log_writer, ls,
    measure, pack, plan, profile, rm, run, serve, show, train_predictor,
};
use crate::error::{Error, Result, is_unprintable};
use clap::{Command, FromArgMatches};
use std::io::IsTerminal;
use std::process::ExitCode;

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
    start::<Args>(&command())
}

/// A program with this command line. Returns its exit status.
pub(crate) fn start<P: Program>(command: &Command) -> ExitCode {
    let first = std::env::args_os().nth(1);
    if let Some(done) = crate::api::child(first.as_deref().and_then(std::ffi::OsStr::to_str)) {
        return done;
    }
    set_name(P::NAME);
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
        Verb::Completions(args) => completions::run(args, command(), EXAMPLES),
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
