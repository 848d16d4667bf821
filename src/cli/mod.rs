//! The command line: one file per verb. Data goes to stdout, talk to stderr.

mod bench;
mod calibrate;
mod chart;
pub mod companions;
mod completions;
mod device_arg;
mod eval;
mod machine_arg;
mod measure;
mod model_arg;
mod pack;
mod plan;
mod profile;
mod profile_plots;
mod progress;
mod record;
mod replay;
mod run;
mod show;
mod size;
mod sparsity_arg;
mod synth;
mod train_predictor;

use crate::error::{Error, Result};
use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Runs language models that do not fit in VRAM, neuron by neuron.
///
/// MODEL is a Hugging Face directory, a GGUF file, a packed .neurons file, or `demo` for the small model that comes with
/// the program. A model that is not packed is packed once into the user's cache directory.
#[derive(Parser)]
#[command(name = "dynamicinfer", version, max_term_width = 110, after_help = EXAMPLES, arg_required_else_help = true)]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

const EXAMPLES: &str = "\
Examples:
  dynamicinfer run demo \"Once upon a time\"         a story from the model that comes with the program
  echo \"Summarise: ...\" | dynamicinfer run M       the prompt from a pipe
  dynamicinfer show demo                           what a model is made of
  dynamicinfer bench demo -p 128 -n 64             tokens per second, and how near to the memory's limit
  dynamicinfer plan demo --vram 8GiB               what lies in VRAM and what in memory
  dynamicinfer pack model.gguf --quant q8_0        make the packed file yourself
  dynamicinfer train-predictor M --text a.txt      teach it which neurons a token needs

Exit status: 0 done, 1 failed, 2 wrong usage, 5 bad model file, 6 not enough memory, 130 Ctrl-C.";

#[derive(Subcommand)]
enum Verb {
    Run(run::Args),
    Show(show::Args),
    Pack(pack::Args),
    Bench(bench::Args),
    Eval(eval::Args),
    Profile(profile::Args),
    Measure(measure::Args),
    Plan(plan::Args),
    Synth(synth::Args),
    TrainPredictor(train_predictor::Args),
    Calibrate(calibrate::Args),
    Record(record::Args),
    Replay(replay::Args),
    Completions(completions::Args),
}

/// The program. Returns its exit status.
pub fn main() -> ExitCode {
    // Chat templates render in a process of their own: this one, called again.
    if std::env::args_os().nth(1).is_some_and(|first| first == crate::tokenizer::chat_template::CHILD_ARGUMENT) {
        return crate::tokenizer::chat_template::child_main();
    }
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // Help and version are data, everything else is a complaint; both may go into a closed pipe.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    log();
    crate::interrupt::install();
    match dispatch(args.verb) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of our output has gone; it has what it wanted.
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dynamicinfer: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn dispatch(verb: Verb) -> Result<()> {
    match verb {
        Verb::Run(args) => run::run(args),
        Verb::Show(args) => show::run(args),
        Verb::Pack(args) => pack::run(args),
        Verb::Bench(args) => bench::run(args),
        Verb::Eval(args) => eval::run(args),
        Verb::Profile(args) => profile::run(args),
        Verb::Measure(args) => measure::run(args),
        Verb::Plan(args) => plan::run(args),
        Verb::Synth(args) => synth::run(args),
        Verb::TrainPredictor(args) => train_predictor::run(args),
        Verb::Calibrate(args) => calibrate::run(args),
        Verb::Record(args) => record::run(args),
        Verb::Replay(args) => replay::run(args),
        Verb::Completions(args) => completions::run(args),
    }
}

fn log() {
    use tracing_subscriber::EnvFilter;
    let given = crate::config::log_filter().and_then(|filter| EnvFilter::try_new(filter).ok());
    let filter = given.unwrap_or_else(|| EnvFilter::new("warn"));
    // Set once, here; a second subscriber cannot be there yet.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init();
}

/// Prints to stdout; a closed pipe is an error that ends the program quietly.
fn print(text: &str) -> Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::io("write to", "stdout".as_ref()))
}

fn print_json(value: &impl serde::Serialize) -> Result<()> {
    print(&(serde_json::to_string_pretty(value).expect("plain data") + "\n"))
}

/// 1.2 GiB and the like.
fn human_bytes(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}
