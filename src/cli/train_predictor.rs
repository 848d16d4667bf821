use super::eval::read_texts;
use super::model_arg::{EngineArgs, ModelArgs, Terminal, check_context};
use super::progress::{Progress, Unit, stoppable};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::formats::predictor_file::Header;
use crate::formats::sections;
use crate::model::Model;
use crate::open::artifacts::{self, Kind};
use crate::open::calibration::{keep_profile, profile_counter};
use crate::open::model::free_bytes;
use crate::tokenizer::Tokenizer;
use crate::training::profile::JoinedTexts;
use crate::training::samples::{Extent, Plan, Samples, WINDOW, collect_and_count};
use crate::training::train::{self, Job, Options, Summary};
use comfy_table::Table;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

/// Default number of tokens: minutes for a small model, and about a megabyte of text.
const TOKENS: usize = 262_144;
/// As the default of --ahead.
const AHEAD: [usize; 3] = [1, 2, 4];
/// Default number of samples on disk: a 7B model's 60 000 tokens.
const SAMPLE_BYTES: u64 = 16 << 30;
/// Share of the active neurons to find. Signs say less, so the last ones cost more: on the demo 90 % already take half of the
/// neurons (docs/predictors.md).
const RECALL: f64 = 0.95;
const RECALL_OF_SIGNS: f64 = 0.9;
/// Default share of the neurons of a silu or gelu model that counts as inactive (CATS, Lee et al. 2024).
const SPARSITY: f64 = 0.5;
/// Share of the model's bytes that all networks together may have, in percent.
const BUDGET_PERCENT: u64 = 10;

/// Train the networks that predict which neurons a token needs
///
/// Runs MODEL densely over the texts, records the active neurons, and trains a small network per layer, and another one for each --ahead,
/// which predicts that many layers ahead. Their sizes are searched: sparse and uneven layers need less. Together they stay below a tenth of
/// the model. `run --predictor mlp` finds the file. After Ctrl-C the same command resumes. In a mixture of experts with ReLU they predict
/// the neurons inside the experts, and are used once the model is packed (`pack`).
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    texts: TextArgs,
    /// Use at most this many tokens, spread over the texts [default: 262144, or what 16 GiB of samples hold]
    #[arg(long)]
    tokens: Option<usize>,
    /// silu and gelu models: the share of neurons that counts as inactive, those with the smallest |act(gate)|
    /// [default: 0.5]
    #[arg(long)]
    sparsity: Option<f64>,
    /// Seed of all random numbers; the same seed makes the same file
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    engine: EngineArgs,
}

/// What training and calibrating have in common.
#[derive(clap::Args)]
pub struct TextArgs {
    /// Text files to learn from; best are texts like those that the model will be used for
    #[arg(long, required = true, num_args = 1.., value_name = "FILE")]
    pub text: Vec<PathBuf>,
    /// Layers to predict ahead, besides predicting each layer from its own residual; 0: none
    #[arg(long, value_delimiter = ',', default_value = "1,2,4")]
    pub ahead: Vec<usize>,
    /// Share of the active neurons to find [default: train-predictor 0.95, calibrate 0.9]
    #[arg(long)]
    pub recall: Option<f64>,
    /// File to write [default: in the user's data directory, where the model finds it]
    #[arg(short, long)]
    pub output: Option<PathBuf>,
    /// Machine-readable
    #[arg(long)]
    pub json: bool,
}

const EXAMPLES: &str = "\
Examples:
  dynamicinfer train-predictor demo --text books/*.txt
  dynamicinfer train-predictor M --text chat.txt code.rs --recall 0.98     misses less, computes more
  dynamicinfer train-predictor M --text a.txt --ahead 0 --tokens 20000     no look-ahead, quickly
  dynamicinfer eval M --text held-out.txt --predictor mlp                  what it costs and saves";

/// How a verb reads texts.
pub struct Reading {
    pub kind: Kind,
    /// The most tokens: by the user, and by default.
    pub limit: Option<usize>,
    pub default: usize,
    pub sparsity: Option<f64>,
    pub seed: u64,
}

/// The checked options, and the texts as tokens of the model.
pub struct Asked {
    pub options: Options,
    pub texts: JoinedTexts,
    pub output: PathBuf,
    pub limit: usize,
}

impl TextArgs {
    pub fn read(&self, model: &Model, reading: Reading) -> Result<Asked> {
        let Reading { kind, limit, default, sparsity, seed } = reading;
        let recall = self.recall.unwrap_or(if kind == Kind::MlpPredictor { RECALL } else { RECALL_OF_SIGNS });
        if !(recall > 0.0 && recall < 1.0) {
            return Err(Error::Usage(format!("--recall {recall}: give a share between 0 and 1")));
        }
        let mixture = model.config.is_mixture();
        if mixture && self.ahead != AHEAD && self.ahead != [0] {
            let why = "--ahead: neurons of experts are predicted from their own layer's residual; leave it out";
            return Err(Error::Usage(why.into()));
        }
        // Defaults need no note.
        let far = self.ahead.iter().find(|&&k| !mixture && k >= model.config.layers().len() && !AHEAD.contains(&k));
        if let Some(far) = far {
            eprintln!("note: the model has {} layers, so none is {far} layers ahead", model.config.layers().len());
        }
        let tokenizer = Tokenizer::new(model.tokenizer()?, model.path())?;
        let mut texts = JoinedTexts::default();
        for path in &self.text {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            texts.add(&name, &super::eval::read_text(path)?, &tokenizer)?;
        }
        let on_disk = (SAMPLE_BYTES / Extent::token_bytes(model)) as usize;
        let limit = limit.unwrap_or(default.min(on_disk)).min(texts.tokens.len());
        let output = match &self.output {
            Some(path) => {
                super::output::check("-o", path, |head| head.starts_with(&<Header as sections::Header>::MAGIC))?;
                path.clone()
            }
            None => artifacts::write_path(model, kind)?,
        };
        let names: Vec<_> = texts.names().collect();
        let options = Options {
            ahead: if mixture { Vec::new() } else { self.ahead.clone() },
            recall,
            budget: train::model_bytes(model) * BUDGET_PERCENT / 100,
            seed,
            activation_thresholds: activation_thresholds(model, sparsity)?,
            made: serde_json::json!({ "texts": names, "tokens": limit }),
        };
        Ok(Asked { options, texts, output, limit })
    }
}

/// |act(gate)| per layer above which a neuron is active: zeros for ReLU, else what leaves out the share `sparsity` of the
/// activations that the model's profile saw.
fn activation_thresholds(model: &Model, sparsity: Option<f64>) -> Result<Vec<f32>> {
    let layers = model.config.layers().len();
    if model.config.activation.is_sparse() {
        return match sparsity {
            None => Ok(vec![0.0; layers]),
            Some(share) => Err(Error::Usage(format!(
                "--sparsity {share}: this model's activation has zeros, which \
                 decide; leave it out"
            ))),
        };
    }
    let share = sparsity.unwrap_or(SPARSITY);
    if !(share > 0.0 && share < 1.0) {
        return Err(Error::Usage(format!("--sparsity {share}: give a share between 0 and 1")));
    }
    let missing = || {
        Error::Usage(format!(
            "a {} model has no zeros: its profile decides which neurons count as inactive; make one first: \
             dynamicinfer profile MODEL --text FILE",
            model.config.activation
        ))
    };
    let (_, profile) = artifacts::profile(model)?.ok_or_else(missing)?;
    (0..layers).map(|layer| profile.threshold_for_sparsity(layer, share).ok_or_else(missing)).collect()
}

/// The folder of samples and finished parts until the file is written, and the lock that keeps other processes from it.
fn work_dir(key: u64) -> Result<(PathBuf, File)> {
    let cache = crate::config::cache_dir()
        .ok_or_else(|| Error::Usage("no cache directory for the samples: set HOME or XDG_CACHE_HOME".into()))?;
    let dir = cache.join("training").join(format!("{key:016x}"));
    std::fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
    let lock = dir.with_extension("lock");
    let file = File::create(&lock).map_err(Error::io("create", &lock))?;
    // A file system without locks keeps no other process out.
    if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
        let why = "another command makes the same file now; wait for it, or change an option (--seed, --tokens)";
        return Err(Error::Failed(why.into()));
    }
    Ok((dir, file))
}

/// The samples of an earlier run of the same command, or new ones.
pub fn samples(engine: &mut Engine, asked: &Asked, dir: &Path) -> Result<Samples> {
    let plan = Plan::new(&engine.model, asked.texts.tokens.len(), asked.limit)?;
    let path = dir.join("samples");
    if let Some(samples) = Samples::open(&path, plan.extent) {
        return Ok(samples);
    }
    let needed = plan.extent.file_bytes();
    if let Some(free) = free_bytes(dir).filter(|&free| free < needed) {
        return Err(Error::Failed(format!(
            "{} has {} free and samples of {} tokens need {}; free some space, set XDG_CACHE_HOME to a larger \
             disk, or lower --tokens",
            dir.display(),
            super::human_bytes(free),
            plan.extent.tokens(),
            super::human_bytes(needed)
        )));
    }
    let progress = Progress::new("running the model", Unit::Tokens);
    let step = |done, total| progress.step(done, total);
    let mut profile = profile_counter(&engine.model, &asked.texts);
    let (tokens, thresholds) = (&asked.texts.tokens, &asked.options.activation_thresholds);
    let samples = collect_and_count(engine, tokens, (&plan, profile.as_mut()), thresholds, &path, step)?;
    progress.finish();
    keep_profile(&engine.model, profile, &Terminal);
    Ok(samples)
}

/// Samples and parts of a command, removed when its file is written.
pub fn with_samples(
    asked: &Asked,
    model: Model,
    engine: &EngineArgs,
    make: impl FnOnce(Job<'_>, &Path) -> Result<Summary>,
) -> Result<Summary> {
    let key = train::key(&model, &asked.options, &asked.texts.tokens, asked.limit);
    let (dir, _lock) = work_dir(key)?;
    check_context(&model, WINDOW.min(model.config.context), engine.kv())?;
    let mut engine = engine.engine(model)?;
    let parts = dir.clone();
    let kept = move || {
        let is_file = |entry: std::io::Result<std::fs::DirEntry>| entry.is_ok_and(|entry| entry.path().is_file());
        match std::fs::read_dir(&parts).is_ok_and(|mut entries| entries.any(is_file)) {
            true => eprintln!("finished parts are kept; the same command resumes"),
            // Nothing is in it.
            false => drop(std::fs::remove_dir_all(&parts)),
        }
    };
    let made = stoppable(kept.clone(), || {
        let samples = samples(&mut engine, asked, &dir)?;
        let (threads, kernels) = (engine.threads(), &engine.kernels);
        let (options, output) = (&asked.options, &*asked.output);
        make(Job { model: &engine.model, kernels, threads, samples: &samples, options, output }, &dir)
    });
    match made {
        Err(Error::Interrupted) => {
            kept();
            Err(Error::Interrupted)
        }
        Err(error) => Err(error),
        Ok(summary) => {
            let _ = std::fs::remove_file(dir.with_extension("lock"));
            // Left behind, it costs disk space and nothing else.
            if let Err(error) = std::fs::remove_dir_all(&dir) {
                tracing::warn!("cannot remove {}: {error}", dir.display());
            }
            Ok(summary)
        }
    }
}

/// Shows a step count as the bar wants it.
pub fn permille(progress: &Progress, done: f64, all: usize) -> Result<()> {
    progress.step((done * 1000.0) as u64, all as u64 * 1000)
}

pub fn run(args: Args) -> Result<()> {
    read_texts(&args.texts.text)?;
    let has_thresholds = |outline: &Model| activation_thresholds(outline, args.sparsity).map(|_| ());
    let model = args.model.open_active("train-predictor", &has_thresholds)?;
    let reading = Reading {
        kind: Kind::MlpPredictor,
        limit: args.tokens,
        default: TOKENS,
        sparsity: args.sparsity,
        seed: args.seed,
    };
    let asked = args.texts.read(&model, reading)?;
    let summary = with_samples(&asked, model, &args.engine, |job, parts| {
        let progress = Progress::new("training", Unit::Percent);
        let step = |done: f64, all: usize| permille(&progress, done, all);
        let made = train::train(job, parts, &step);
        progress.finish();
        made
    })?;
    let bytes: u64 = summary.rows.iter().map(|r| r.bytes).sum();
    eprintln!("{} written, {}", asked.output.display(), super::human_bytes(bytes));
    if args.texts.json {
        return super::print_json(&summary);
    }
    let column = |r: &train::Row| vec![r.rank.to_string(), super::human_bytes(r.bytes)];
    super::print(&table(&summary, &["rank", "bytes"], column))
}

/// The report: a row per layer and look-ahead, with `extra` columns.
pub fn table(summary: &Summary, extra: &[&str], column: impl Fn(&train::Row) -> Vec<String>) -> String {
    let percent = |share: f32| format!("{:.1} %", 100.0 * share);
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    let head =
        ["layer", "ahead"].iter().chain(extra).chain(&["active", "threshold", "recall", "precision", "computed"]);
    table.set_header(head.copied());
    for r in &summary.rows {
        let mut cells = vec![r.layer.to_string(), r.ahead.to_string()];
        cells.extend(column(r));
        cells.extend([percent(r.active_share), format!("{:.4}", r.threshold)]);
        cells.extend([r.recall, r.precision, r.computed_share].map(percent));
        table.add_row(cells);
    }
    format!(
        "{table}\nlayers' own together: recall {}, precision {}, computed {}\n",
        percent(summary.recall),
        percent(summary.precision),
        percent(summary.computed_share)
    )
}
