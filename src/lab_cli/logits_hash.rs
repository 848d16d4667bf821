use crate::cli::device_arg::DeviceArgs;
use crate::cli::model_arg::{EngineArgs, ModelArgs, Terminal};
use crate::cli::sparsity_arg::SparsityArgs;
use crate::cpu::MAX_COLUMNS;
use crate::error::{Error, Result};
use crate::lab::logits_hash::{context, logits_hashes};
use crate::open::{EngineOptions, open_model};

/// Print hashes of the logits, to compare builds and settings
///
/// Random tokens of a fixed seed are decoded alone and in batches, and run as prompts. Equal hashes mean equal logits, to the last bit.
/// The number of threads changes none; another instruction set (DYNAMICINFER_ISA) or another placement may, by rounding. With a device,
/// take --policy static, for what moves while it runs hangs on time.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Sequences that are decoded together, a line for each number; at most 32
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8")]
    sequences: Vec<usize>,
    /// Prompt tokens, a line for each number; those beyond the model's table of positions are left out
    #[arg(short = 'p', long, value_name = "N,...", value_delimiter = ',', default_value = "40,300")]
    n_prompt: Vec<usize>,
    /// The result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sparsity: SparsityArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

pub fn run(mut args: Args) -> Result<()> {
    if let Some(n) = args.sequences.iter().find(|n| !(1..=MAX_COLUMNS).contains(*n)) {
        return Err(Error::Usage(format!("--sequences {n}: take 1 to {MAX_COLUMNS} at once")));
    }
    let kv = args.engine.kv();
    let mut options = EngineOptions {
        context: Some(context(&args.n_prompt)),
        sequences: args.sequences.iter().copied().max().unwrap_or(1),
        sparsity: args.sparsity.options_or_dense(),
        device: args.device.options_to_measure()?,
        ..args.engine.options(&args.model)
    };
    let model = options.open_model(&Terminal)?;
    let limit = if model.positions.is_some() { model.config.context } else { usize::MAX };
    args.n_prompt.retain(|n| (1..=limit).contains(n));
    options.context = Some(context(&args.n_prompt));
    let mut engine = open_model(model, &options, &Terminal)?.engine;
    let hashes = logits_hashes(&mut engine, &args.sequences, &args.n_prompt, kv)?;
    if args.json {
        return crate::cli::print_json(&hashes);
    }
    let lines = hashes.iter().map(|line| format!("{}  {}\n", line.hash, line.pass));
    crate::cli::print(&lines.collect::<String>())
}
