use super::eval::read_texts;
use super::model_arg::{EngineArgs, ModelArgs, check_context};
use super::output;
use super::profile_plots::plot;
use super::progress::{Progress, Unit};
use crate::error::{Error, Result, printable};
use crate::formats::profile_file::{AHEADS, Header, TextInfo};
use crate::formats::sections;
use crate::model::Model;
use crate::model::layer::FfnParts;
use crate::open::artifacts::{self, Kind};
use crate::profile::statistics::Spread;
use crate::profile::{LayerStatistics, Profile, Statistics};
use crate::tokenizer::Tokenizer;
use crate::training::profile::{self, Input, Request, checksum};
use comfy_table::{CellAlignment, Table};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The default limit of tokens per window: Ctrl-C discards the work of one window.
const MAX_WINDOW: usize = 1024;
/// The default share that the activation thresholds of silu and gelu models leave inactive (CATS, Lee et al. 2024).
const SPARSITY: f32 = 0.5;

/// Count which neurons are active on texts
///
/// Runs MODEL densely over the texts and records, per layer and neuron, how often it was active, and how alike
/// neighbouring tokens, texts and layers are. The model keeps the profile, and further texts are added to it; texts that
/// it has are skipped. Without --text the profile is shown. After Ctrl-C the same command resumes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text files to count on; differences between texts need at least two
    #[arg(long, num_args = 1.., value_name = "FILE")]
    text: Vec<PathBuf>,
    /// Count the first N tokens of each text only
    #[arg(long, value_name = "N", requires = "text")]
    max_tokens: Option<usize>,
    /// Silu and gelu models: the share of neurons to count as inactive, those with the smallest |act(gate)|
    /// [default: 0.5]
    #[arg(long, requires = "text")]
    sparsity: Option<f32>,
    /// Start a new profile instead of adding to the existing one
    #[arg(long, requires = "text")]
    fresh: bool,
    /// Tokens per window; windows are independent [default: the model's context, at most 1024]
    #[arg(short, long = "ctx-size", requires = "text")]
    context: Option<usize>,
    /// File to write and add to, or without --text to show [default: next to a .neurons file if one exists there, else in
    /// the user's data directory]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Machine-readable
    #[arg(long)]
    json: bool,
    /// Write plots into this directory: cdf.svg, sparsity.svg, similarity.svg, distance.svg
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
}

const EXAMPLES: &str = "Examples:
  dynamicinfer profile demo                                  the profile that \
     comes with the demo model
  dynamicinfer profile M --text a.txt b.txt --max-tokens 50000
  dynamicinfer \
     profile M --text c.txt                        adds c.txt to it
  dynamicinfer profile M --plot \
     plots                        draws the profile";

pub fn run(args: Args) -> Result<()> {
    read_texts(&args.text)?;
    let has_one = |outline: &Model| match args.text.is_empty() && args.output.is_none() {
        true => artifacts::profile(outline)?.map(|_| ()).ok_or_else(|| has_none(&args.model.model)),
        false => Ok(()),
    };
    let model = args.model.open_to_observe(&has_one)?;
    let parts = model.config.parts();
    if args.text.is_empty() {
        let found = match &args.output {
            Some(path) => Some((path.clone(), artifacts::profile_at(&model, path)?)),
            None => artifacts::profile(&model)?,
        };
        let Some((path, profile)) = found else {
            return Err(has_none(&args.model.model));
        };
        return show(&args, &path, &profile, parts);
    }
    let target = match &args.output {
        Some(path) => {
            output::check("-o", path, |head| head.starts_with(&<Header as sections::Header>::MAGIC))?;
            path.clone()
        }
        None => artifacts::update_path(&model, Kind::Profile)?,
    };
    let old = match (&args.output, args.fresh) {
        (_, true) => None,
        (Some(path), _) if path.exists() => Some(artifacts::profile_at(&model, path)?),
        (Some(_), _) => None,
        (None, _) => artifacts::profile(&model)?.map(|(_, profile)| profile),
    };
    let made = count(&args, model, &target, old.as_ref())?;
    let profile = match (old, made) {
        (old, None) => old.expect("with nothing to count there is a profile that has it"),
        (None, Some(made)) => made,
        (Some(mut old), Some(made)) => {
            old.merge(made).map_err(Error::Failed)?;
            old
        }
    };
    profile.write(&target)?;
    let _ = std::fs::remove_file(partial(&target));
    eprintln!("{} written", target.display());
    show(&args, &target, &profile, parts)
}

/// That a model has no profile, and what makes one.
fn has_none(model: &Path) -> Error {
    let name = model.display().to_string();
    let why = format!("{0} has no profile yet; make one: dynamicinfer profile {0} --text FILE", printable(&name));
    Error::Usage(why)
}

/// Counts the texts that `old` does not have; `None` if it has them all.
fn count(args: &Args, model: Model, target: &Path, old: Option<&Profile>) -> Result<Option<Profile>> {
    let sparse = model.config.has_zeros();
    if let Some(share) = args.sparsity
        && (sparse || !(share > 0.0 && share < 1.0))
    {
        let why = if sparse {
            "this model's activation has zeros, which decide; leave it out"
        } else {
            "give a \
             share between 0 and 1"
        };
        return Err(Error::Usage(format!("--sparsity {share}: {why}")));
    }
    if let (Some(old), Some(share)) = (old.and_then(|old| old.header.sparsity), args.sparsity)
        && old != share
    {
        let why = format!("--sparsity {share}: the profile has activation thresholds for {old}");
        return Err(Error::Usage(format!("{why}; use those, or start a new one with --fresh")));
    }
    let window = args.context.unwrap_or(model.config.context.min(MAX_WINDOW));
    if window == 0 || args.max_tokens == Some(0) {
        return Err(Error::Usage("-c and --max-tokens: give at least 1 token".into()));
    }
    check_context(&model, window, args.engine.kv())?;
    let tokenizer = Tokenizer::new(model.tokenizer()?, model.path())?;
    let mut texts: Vec<Input> = Vec::new();
    for path in &args.text {
        let text = super::eval::read_text(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let sum = checksum(&text);
        if texts.iter().any(|t| t.info.checksum == sum) {
            eprintln!("{}: the same text is given twice; it counts once", printable(&name));
            continue;
        }
        let input = Input::new(&name, &text, &tokenizer, args.max_tokens.unwrap_or(usize::MAX), window)?;
        match old.and_then(|old| old.texts.iter().find(|t| t.info.checksum == sum)) {
            Some(t) if profile::lacks(t, profile::extras(&model)) => {
                let what = if model.config.is_mixture() { "neurons inside experts" } else { "the inputs of matrices" };
                eprintln!("{}: is in the profile without {what}; counted anew", printable(&name));
            }
            Some(t) if (t.info.wanted, t.info.window) == (input.info.wanted, window) => {
                eprintln!("{}: is in the profile already", printable(&name));
                continue;
            }
            Some(t) => eprintln!(
                "{}: is in the profile with {} tokens in windows of {}; counted anew",
                printable(&name),
                t.info.tokens,
                t.info.window
            ),
            None => {}
        }
        texts.push(input);
    }
    if texts.is_empty() {
        return Ok(None);
    }
    let activation_thresholds = old.filter(|_| !sparse).map(|old| old.header.activation_thresholds.clone());
    let sparsity = old.and_then(|old| old.header.sparsity).or(args.sparsity).unwrap_or(SPARSITY);
    let request = Request { texts, window, kv: args.engine.kv(), sparsity, activation_thresholds };
    let partial = partial(target);
    let begun = match partial.exists().then(|| profile::unfinished(&partial, &request, &model)) {
        None => None,
        Some(Ok(begun)) => {
            let done: usize = begun.texts.iter().map(|t| t.info.tokens).sum();
            eprintln!("resuming after {done} tokens of an interrupted run");
            Some(begun)
        }
        Some(Err(error)) => {
            eprintln!("{error}; starting anew");
            None
        }
    };
    let mut engine = args.engine.engine(model)?;
    let progress = Progress::new("profiling", Unit::Tokens);
    let step = |done, total| progress.step(done as u64, total as u64);
    let made = profile::profile(&mut engine, &request, begun, &partial, step);
    progress.finish();
    if let Err(Error::Interrupted) = made
        && partial.exists()
    {
        eprintln!("the counts are kept in {}; the same command resumes", partial.display());
    }
    made.map(Some)
}

fn partial(target: &Path) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

#[derive(Serialize)]
struct Shown<'a> {
    /// As text; bytes that are none are replaced.
    path: String,
    model: &'a str,
    fingerprint: &'a str,
    /// What the activation thresholds were made for; absent for ReLU models.
    sparsity: Option<f32>,
    profiled: &'a [TextInfo],
    #[serde(flatten)]
    statistics: &'a Statistics,
}

fn show(args: &Args, path: &Path, profile: &Profile, parts: FfnParts) -> Result<()> {
    let statistics = profile.statistics();
    if let Some(dir) = &args.plot {
        std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
        let of = format!("{}; {} tokens of {} texts", profile.header.model, statistics.tokens, statistics.texts);
        for file in plot(dir, &statistics, &of)? {
            eprintln!("{} written", file.display());
        }
    }
    let h = &profile.header;
    if args.json {
        return super::print_json(&Shown {
            path: path.to_string_lossy().into_owned(),
            model: &h.model,
            fingerprint: &h.fingerprint,
            sparsity: h.sparsity,
            profiled: &h.texts,
            statistics: &statistics,
        });
    }
    let what = match h.sparsity {
        Some(share) => format!(
            "neurons with |act(gate)| above an activation threshold, made for a sparsity of {:.0} %",
            percent(share)
        ),
        None if parts == FfnParts::Experts => "experts that the router has chosen".into(),
        None => "neurons with act(gate) * up not zero".into(),
    };
    let inside = statistics.inside.as_ref().map_or(String::new(), |inside| {
        format!(
            "inside experts: {:.1} % of the neurons of a token's experts are active; 80 % of that is made by {:.1} % of all neurons, {:.1} % by the \
             most active 40 %, and {} were never active\n",
            100.0 * inside.active,
            100.0 * inside.spread.neurons_for_80,
            100.0 * inside.spread.by_top_40,
            inside.spread.never
        )
    });
    super::print(&format!(
        "{}: {} tokens of {}, {} layers of {} {}s; active are {what}\n{}\n{inside}",
        printable(&h.model),
        statistics.tokens,
        counted(statistics.texts, "text"),
        h.layers,
        h.ffn,
        parts.noun(),
        table(&statistics, h.sparsity.is_some())
    ))
}

fn counted(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

fn percent(share: f32) -> f64 {
    100.0 * share as f64
}

fn table(s: &Statistics, activation_thresholds: bool) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    let mut header = vec!["layer".to_owned(), "inactive %".into(), "80 % made by %".into(), "top 40 % make %".into()];
    header.extend(["never".into(), "gini".into(), "next token".into(), "to hot".into(), "texts".into()]);
    header.extend(AHEADS.map(|ahead| format!("cos +{ahead}")));
    header.extend(activation_thresholds.then(|| "cut".into()));
    let columns = header.len();
    table.set_header(header);
    for layer in &s.layers {
        // As in layers without an FFN or a router.
        if layer.spread.never == s.neurons {
            let nothing = ["nothing is ever active".to_owned()];
            table.add_row([layer.layer.to_string()].into_iter().chain(nothing).chain(vec![String::new(); columns - 2]));
            continue;
        }
        let mut row = spread_cells(layer.layer.to_string(), &layer.spread);
        row.extend(other_cells(layer));
        row.extend(activation_thresholds.then(|| format!("{:.4}", layer.activation_threshold)));
        table.add_row(row);
    }
    let mut all = spread_cells("all".into(), &s.model_spread);
    all.resize(columns, String::new());
    table.add_row(all);
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn spread_cells(name: String, s: &Spread) -> Vec<String> {
    let of_100 = |share: f64| format!("{:.2}", 100.0 * share);
    let shares = [s.sparsity, s.neurons_for_80, s.by_top_40].map(of_100);
    [name].into_iter().chain(shares).chain([s.never.to_string(), format!("{:.2}", s.gini)]).collect()
}

fn other_cells(layer: &LayerStatistics) -> impl Iterator<Item = String> {
    let value = |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{x:.3}"));
    [layer.neighbours, layer.to_hot, layer.texts.map(|t| t.mean)].into_iter().chain(layer.cosines).map(value)
}
