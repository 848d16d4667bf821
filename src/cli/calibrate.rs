use super::eval::read_texts;
use super::model_arg::{EngineArgs, ModelArgs, Terminal};
use super::progress::{Progress, Unit};
use super::train_predictor::{Reading, TextArgs, permille, table, with_samples};
use crate::error::{Error, Result};
use crate::evaluation::outliers::{Comparison, Options, compare};
use crate::model::Model;
use crate::open::artifacts::Kind;
use crate::open::{Opened, SparsityOptions, open};
use crate::predictor;
use crate::tokenizer::{Special, Tokenizer};
use crate::training::train;
use comfy_table::Table;

/// Default number of tokens: a layer's table has about fifty numbers, and each token a thousand neurons or more.
const TOKENS: usize = 32_768;

/// Calibrate the sign predictor on texts
///
/// The sign predictor needs no training; uncalibrated, it uses the alphas of its paper. Calibration learns how likely a neuron is active at
/// each score, per layer and prefetch distance, and the alpha of each layer that finds the wanted share of the active neurons with the
/// fewest computed.
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
    /// Instead of a predictor, measure the loss of prompts with one int8 scale per input, with and without separate outliers
    #[arg(long)]
    outliers: bool,
    /// With --outliers: share of an input's numbers that are outliers
    #[arg(long, value_name = "SHARE", default_value_t = 0.003, requires = "outliers", value_parser = share)]
    beyond: f64,
    /// With --outliers: share of the layers whose outliers are left out, the least important ones
    #[arg(long, value_name = "SHARE", default_value_t = 0.85, requires = "outliers", value_parser = share)]
    pruned: f64,
    /// With --outliers: prompts of 256 tokens to choose steps by, and as many to measure on
    #[arg(long, value_name = "N", default_value_t = 8, requires = "outliers", value_parser = clap::value_parser!(u16).range(1..))]
    prompts: u16,
    #[command(flatten)]
    engine: EngineArgs,
}

const EXAMPLES: &str = "\
Examples:
  dynamicinfer calibrate demo --text books/*.txt
  dynamicinfer calibrate M --text chat.txt --recall 0.98 -o m.sign.predictor
  dynamicinfer calibrate M --text chat.txt --outliers
  dynamicinfer eval M --text held-out.txt --predictor sign";

fn share(text: &str) -> std::result::Result<f64, String> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| "give a share from 0 to 1".into())
}

pub fn run(args: Args) -> Result<()> {
    read_texts(&args.texts.text)?;
    if args.outliers {
        return outliers(&args);
    }
    let model = args.model.open_neurons("calibrate", &|outline| has_signs(outline))?;
    has_signs(&model)?;
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

/// Refuses a model of which signs say nothing.
fn has_signs(model: &Model) -> Result<()> {
    let activation = model.config.activation;
    if activation.is_sparse() {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "the sign predictor needs an activation that is zero for negative gates, and {activation} is not; train a \
         predictor instead: dynamicinfer train-predictor MODEL --text FILE"
    )))
}

/// Compares the ways to compute a prompt.
fn outliers(args: &Args) -> Result<()> {
    let sparsity = SparsityOptions { predictor: predictor::Kind::Dense.into(), ..SparsityOptions::default() };
    let options = crate::open::EngineOptions { sparsity, ..args.engine.options(&args.model) };
    let Opened { mut engine, .. } = open(&options, &Terminal)?;
    let tokenizer = Tokenizer::new(engine.model.tokenizer()?, engine.model.path())?;
    let mut tokens = Vec::new();
    for path in &args.texts.text {
        tokens.extend(tokenizer.encode_prompt(&super::eval::read_text(path)?, Special::AsText)?);
    }
    let options = Options { beyond: args.beyond, pruned: args.pruned, prompts: args.prompts.into() };
    let progress = Progress::new("measuring", Unit::Percent);
    let result = compare(&mut engine, &tokens, options, |done, all| drop(permille(&progress, done as f64, all)))?;
    progress.finish();
    if args.texts.json {
        return super::print_json(&result);
    }
    let Comparison { rows, importance } = result;
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["prompts", "logits off", "perplexity", "more", "ms", "extracted"]);
    for row in rows {
        let extracted = row.extracted_share.map_or("-".into(), |share| format!("{:.3} %", 100.0 * share));
        let (off, perplexity) = (format!("{:.4}", row.error), format!("{:.3}", row.perplexity));
        let more = format!("{:+.2} %", row.worse_percent);
        table.add_row([row.name.into(), off, perplexity, more, format!("{:.0}", row.ms), extracted]);
    }
    let importance: Vec<String> = importance.iter().map(|i| format!("{i:.1}")).collect();
    super::print(&format!("{table}\nlargest number by what a step holds, by layer: {}\n", importance.join(" ")))
}
