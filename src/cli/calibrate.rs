use super::model_arg::{EngineArgs, ModelArgs};
use super::progress::{Progress, Unit};
use super::train_predictor::{Reading, TextArgs, permille, table, with_samples};
use crate::error::{Error, Result};
use crate::lab::train;
use crate::open::artifacts::Kind;

/// Tokens to look at when nobody says: a layer's table has some fifty numbers, and each token a thousand neurons or more.
const TOKENS: usize = 32_768;

/// Calibrate the sign predictor on texts
///
/// The sign predictor needs no training, and without this it runs with the alphas of its paper. Here it learns how likely a
/// neuron is active at each score, per layer and look-ahead, and the alpha of each layer at which the wanted share of the
/// active neurons is found with the fewest computed.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    texts: TextArgs,
    /// Use at most this many tokens, spread over the texts [default: 32768]
    #[arg(long)]
    tokens: Option<usize>,
    #[command(flatten)]
    engine: EngineArgs,
}

const EXAMPLES: &str = "\
Examples:
  dynamicinfer calibrate demo --text books/*.txt
  dynamicinfer calibrate M --text chat.txt --recall 0.98 -o m.sign.predictor
  dynamicinfer eval M --text held-out.txt --predictor sign";

pub fn run(args: Args) -> Result<()> {
    let model = args.model.open_neurons("calibrate")?;
    if !model.config.activation.is_sparse() {
        return Err(Error::Usage(format!(
            "the sign predictor predicts the sign of the gate, and {} lets negative ones through; train one instead: \
             dynamicinfer train-predictor MODEL --text FILE",
            model.config.activation
        )));
    }
    // Nothing is random here.
    let (kind, limit) = (Kind::SignPredictor, args.tokens);
    let asked = args.texts.read(&model, Reading { kind, limit, default: TOKENS, sparsity: None, seed: 0 })?;
    let summary = with_samples(&asked, model, &args.engine, |job, _| {
        let progress = Progress::new("calibrating", Unit::Percent);
        let step = |done: f64, all: usize| permille(&progress, done, all);
        let made = train::calibrate_sign(job, &step);
        progress.finish();
        made
    })?;
    eprintln!("{} written", asked.output.display());
    if args.texts.json {
        return super::print_json(&summary);
    }
    let alpha = |r: &train::Row| vec![r.alpha.map_or(String::new(), |a| format!("{a:.3}"))];
    super::print(&table(&summary, &["alpha"], alpha))
}
