//! The verbs of `dynamicinfer` and the options before them.

#[cfg(feature = "cuda")]
use super::gpu_check;
#[cfg(feature = "pull")]
use super::pull;
#[cfg(feature = "tui")]
use super::top;
use super::{
    bench, calibrate, chat, completions, config, daemon_verbs, doctor, eval, help, ls, measure, pack, plan, profile,
    rm, run, serve, show, train_predictor,
};
use clap::{Command, CommandFactory, Parser, Subcommand};

/// Runs language models that do not fit in VRAM, neuron by neuron.
///
/// MODEL is a Hugging Face directory, a GGUF file, a packed .neurons file, the name of a model that `pull` fetched, or `demo`, the small
/// built-in model. A model that has to be packed is packed once, into the user's cache directory.
#[derive(Parser)]
#[command(name = "dynamicinfer", version, max_term_width = 110, arg_required_else_help = true)]
pub(super) struct Args {
    /// The daemon's Unix socket; verbs that talk to the daemon have it too, and it may precede or follow them
    #[arg(long, global = true, hide = true, value_name = "PATH")]
    pub(super) socket: Option<std::path::PathBuf>,
    #[command(subcommand)]
    pub(super) verb: Verb,
}

pub(super) const EXAMPLES: &str = "\
Examples:
  dynamicinfer run demo \"Once upon a time\"     a story from the built-in model
  dynamicinfer serve demo                      OpenAI's API and others on a Unix socket
  dynamicinfer chat demo                       talk to a model
  echo \"Summarise: ...\" | dynamicinfer run M   the prompt from a pipe
  dynamicinfer bench demo -p 128 -n 64         tokens per second
  dynamicinfer plan demo --vram 8GiB           what fits into VRAM, and how fast it runs
  dynamicinfer pack model.gguf --quant q8_0    write the packed file yourself

Exit status: 0 done, 1 failed, 2 wrong usage, 3 no daemon, 4 a daemon runs already,
5 bad model file, 6 not enough memory, 70 the engine failed, 130 Ctrl-C.";

#[derive(Subcommand)]
pub(super) enum Verb {
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

/// The product's whole command line.
pub fn command() -> Command {
    help::product(Args::command(), EXAMPLES)
}

impl Verb {
    /// Whether it computes; those that do not are to be there at once.
    pub(super) fn computes(&self) -> bool {
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
