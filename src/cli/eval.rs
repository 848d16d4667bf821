use super::device_arg::DeviceArgs;
use super::model_arg::{EngineArgs, ModelArgs, Terminal};
use super::progress::{Progress, Unit};
use super::sparsity_arg::SparsityArgs;
use crate::engine::Engine;
use crate::error::{Error, Result, printable};
use crate::evaluation::audit::Shares;
use crate::evaluation::evaluate::{Likelihood, LogitsFile, Windows, choices, likelihood, read_questions};
use crate::model::Model;
use crate::model::source::read_json;
use crate::open::report::{DeviceReport, report};
use crate::open::{EngineOptions, Opened, open};
use crate::tokenizer::{Special, Tokenizer};
use comfy_table::Table;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Texts above this are surely not meant: a day of evaluation.
const MAX_TEXT: u64 = 1 << 30;

/// Measure how well a model predicts text or answers questions
///
/// --text and --token-ids: mean negative log-likelihood over windows of the context that do not overlap; the first token
/// of each window is not scored. --choices: lines of {"context": "...", "choices": ["...", "..."], "answer": 0}.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("input").required(true))]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text file to score
    #[arg(long, group = "input")]
    text: Option<PathBuf>,
    /// JSON array of token ids to score as they are
    #[arg(long, group = "input")]
    token_ids: Option<PathBuf>,
    /// JSON lines with multiple-choice questions
    #[arg(long, group = "input")]
    choices: Option<PathBuf>,
    /// Context: tokens per window [default: the model's, at most 4096]
    #[arg(short, long = "ctx-size")]
    context: Option<usize>,
    /// Tokens at the beginning of each window that are read as a prompt and not scored
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "choices")]
    prompt: usize,
    /// Machine-readable
    #[arg(long)]
    json: bool,
    /// Write the logits of every token, [tokens, vocabulary] f32, to this safetensors file
    #[arg(long, conflicts_with_all = ["choices", "prompt"])]
    logits: Option<PathBuf>,
    #[command(flatten)]
    sparsity: SparsityArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

pub fn run(args: Args) -> Result<()> {
    if let Some(context) = args.context.filter(|&context| context < 2) {
        return Err(Error::Usage(format!("-c {context}: a window needs at least 2 tokens")));
    }
    let options = EngineOptions {
        context: args.context,
        sparsity: args.sparsity.options_or_dense(),
        device: args.device.options_to_measure()?,
        ..args.engine.options(&args.model)
    };
    let named = [&args.choices, &args.text, &args.token_ids];
    read_texts(named.into_iter().flatten())?;
    let Opened { mut engine, context, .. } = open(&options, &Terminal)?;
    let (spec, store) = (engine.model.tokenizer(), engine.model.path().to_owned());
    if let Some(file) = &args.choices {
        let tokenizer = Tokenizer::new(spec?, &store)?;
        let questions = read_questions(&read_text(file)?, file)?;
        let progress = Progress::new("answering", Unit::Questions);
        // Ctrl-C ends the evaluation itself; the bar only shows.
        let step = |done, total| drop(progress.step(done as u64, total as u64));
        let result = choices(&mut engine, &tokenizer, &questions, context, args.engine.kv(), step)?;
        progress.finish();
        if args.json {
            return super::print_json(&result);
        }
        return super::print(&format!(
            "accuracy {:.1} % ({:.1} % by likelihood per byte) of {} questions; guessing reaches {:.1} %\n",
            100.0 * result.accuracy,
            100.0 * result.accuracy_per_byte,
            result.questions,
            100.0 * result.chance
        ));
    }
    let tokenizer = match (spec, &args.text) {
        (Ok(spec), _) => Some(Tokenizer::new(spec, &store)?),
        (Err(error), Some(_)) => return Err(error),
        // Ids need no tokeniser; without one there are no bits per byte.
        (Err(_), None) => None,
    };
    let tokens = match (&args.text, &tokenizer) {
        (Some(file), Some(tokenizer)) => tokenizer.encode_prompt(&read_text(file)?, Special::AsText)?,
        _ => read_ids(args.token_ids.as_deref().expect("one input is required"))?,
    };
    score(&args, &mut engine, &tokens, tokenizer.as_ref(), context)
}

fn score(
    args: &Args,
    engine: &mut Engine,
    tokens: &[u32],
    tokenizer: Option<&Tokenizer>,
    context: usize,
) -> Result<()> {
    if let Some(path) = &args.logits {
        let is_ours = |head: &[u8]| head.get(8..).is_some_and(|header| header.starts_with(b"{\"logits\":"));
        super::output::check("--logits", path, is_ours)?;
    }
    let mut file = match &args.logits {
        Some(path) => Some(LogitsFile::create(path, tokens.len(), engine.model.config.vocab)?),
        None => None,
    };
    if args.prompt >= context {
        return Err(Error::Usage(format!(
            "--prompt {}: it fills the window of {context} tokens; lower it, or raise -c",
            args.prompt
        )));
    }
    let windows = Windows { context, prompt: args.prompt, kv: args.engine.kv() };
    let progress = Progress::new("scoring", Unit::Tokens);
    let step = |done, total| drop(progress.step(done as u64, total as u64));
    let result = likelihood(engine, tokens, tokenizer, windows, file.as_mut(), step)?;
    progress.finish();
    if let Some(file) = file {
        file.finish()?;
    }
    let device = report(engine);
    if args.json {
        return super::print_json(&Scored { result, device });
    }
    super::print(&format!(
        "nll {:.4} nats/token, perplexity {:.3}{}, {} tokens in {} windows of {}\n",
        result.nll,
        result.perplexity,
        result.bits_per_byte.map_or(String::new(), |b| format!(", {b:.4} bits/byte")),
        result.tokens,
        result.windows,
        result.context
    ))?;
    if let Some(d) = &device {
        super::print(&format!(
            "{}: {:.1} % of the active neurons that were computed, {} of {} bytes at most\n",
            d.device,
            100.0 * d.gpu_share,
            d.peak_device_bytes,
            d.budget_bytes
        ))?;
    }
    let Some(sparse) = &result.sparse else { return Ok(()) };
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["layer", "computed", "active", "recall", "precision"]);
    let mut row = |name: String, s: &Shares| {
        table.add_row([
            name,
            percent(s.computed_share),
            percent(s.active_share),
            percent(s.recall),
            percent(s.precision),
        ]);
    };
    sparse.layers.iter().enumerate().for_each(|(l, shares)| row(l.to_string(), shares));
    row("all".into(), &sparse.shares);
    super::print(&format!(
        "{}: perplexity {:+.2} % against {:.3} dense, same likeliest token {}, KL {:.5} nats/token\n{table}\n",
        sparse.predictor,
        100.0 * (result.perplexity / sparse.dense_perplexity - 1.0),
        sparse.dense_perplexity,
        percent(sparse.top1_agreement),
        sparse.kl,
    ))
}

/// The result with what the device did.
#[derive(Serialize)]
struct Scored {
    #[serde(flatten)]
    result: Likelihood,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    device: Option<DeviceReport>,
}

/// The tokens of a text that the user named, one at least.
pub fn tokens_of(model: &Model, file: &Path) -> Result<Vec<u32>> {
    let tokenizer = Tokenizer::new(model.tokenizer()?, model.path())?;
    let tokens = tokenizer.encode_prompt(&read_text(file)?, Special::AsText)?;
    if tokens.is_empty() {
        return Err(Error::Usage(format!("--text {}: the file is empty", printable(&file.to_string_lossy()))));
    }
    Ok(tokens)
}

/// Reads texts that the user named, before a model is packed for them.
pub fn read_texts<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Result<()> {
    paths.into_iter().try_for_each(|path| read_text(path).map(|_| ()))
}

/// A text that the user named.
pub fn read_text(path: &Path) -> Result<String> {
    let file = crate::formats::MappedFile::open(path)?;
    if file.bytes().len() as u64 > MAX_TEXT {
        return Err(Error::Usage(format!("{} is larger than {} bytes", path.display(), MAX_TEXT)));
    }
    let text = std::str::from_utf8(file.bytes())
        .map_err(|e| Error::Usage(format!("{} is not UTF-8 text: {e}", path.display())))?;
    Ok(text.to_owned())
}

fn read_ids(path: &Path) -> Result<Vec<u32>> {
    serde_json::from_value(read_json(path, MAX_TEXT)?)
        .map_err(|e| Error::Usage(format!("{}: it is not a JSON array of token ids: {e}", path.display())))
}
