mod form;

use super::device_arg::DeviceArgs;
use super::eval::{read_text, tokens_of};
use super::model_arg::{EngineArgs, ModelArgs, Terminal};
use super::progress::{Progress, Unit, stoppable};
use super::sparsity_arg::SparsityArgs;
use super::trace_arg::TraceArgs;
use crate::cpu::MAX_COLUMNS;
use crate::error::{Error, Result};
use crate::evaluation::bench::{BenchOptions, BenchRow, Watch, bench};
use crate::open::report::{DeviceReport, report};
use crate::open::{EngineOptions, Opened, open};
use parking_lot::Mutex;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;

/// Measure prefill and decode speed beside what memory allows
///
/// As llama-bench: each repeat runs the whole prompt or generates all tokens from an empty context (or one of --n-depth tokens), after one
/// warm-up; tokenising and sampling are left out. GB/s are the weight bytes that a token must read, without keys and values, over the
/// median time between tokens; the share is of the best read of 2 GiB (where so much is not free: of the model) with the same threads just
/// before and after. Decode computes the neurons that `run` would, with the same --predictor; computed share and recall are of random
/// tokens, as the timed ones were, or with --text of a text's. Ctrl-C ends it at once; the rows that are measured by then are printed.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt tokens; 0 skips prefill
    #[arg(short = 'p', long, default_value_t = 512)]
    n_prompt: usize,
    /// Tokens to generate; 0 skips decode
    #[arg(short, long, default_value_t = 128)]
    n_gen: usize,
    /// Sequences that generate together, a row for each number: 1,2,4,8; at most 32
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1")]
    sequences: Vec<usize>,
    /// Tokens that are in the context when the clock starts, rows for each number: 0,1024,4096
    #[arg(short = 'd', long, value_name = "N,...", value_delimiter = ',', default_value = "0")]
    n_depth: Vec<usize>,
    /// Repeats
    #[arg(short, long, default_value_t = 5)]
    repetitions: usize,
    /// Take the tokens of this text, one after the other, instead of random ones: which neurons or experts are needed, and so what is
    /// found in memory, is then as on your texts
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Form of the result
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    sparsity: SparsityArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq)]
enum Output {
    /// Tables for people, at most 80 columns wide
    Table,
    /// Everything that is known of each row
    Json,
    /// As llama-bench's
    Csv,
    /// As llama-bench's, for a page
    Md,
    /// For sqlite and its like
    Sql,
}

pub fn run(args: Args) -> Result<()> {
    if args.n_prompt == 0 && args.n_gen == 0 {
        return Err(Error::Usage("nothing to measure: -p and -n are both 0".into()));
    }
    if args.repetitions == 0 {
        return Err(Error::Usage("-r 0: take at least one repeat".into()));
    }
    if let Some(n) = args.sequences.iter().find(|n| !(1..=MAX_COLUMNS).contains(*n)) {
        return Err(Error::Usage(format!("--sequences {n}: take 1 to {MAX_COLUMNS} at once")));
    }
    let mut options = BenchOptions {
        prompt: args.n_prompt,
        generate: args.n_gen,
        sequences: args.sequences,
        depths: args.n_depth,
        repeats: args.repetitions,
        kv: args.engine.kv(),
        text: None,
    };
    let engine = EngineOptions {
        context: Some(options.context()),
        sequences: options.sequences.iter().copied().max().unwrap_or(1),
        sparsity: args.sparsity.options(),
        traced: args.trace.is_on(),
        device: args.device.options_to_measure()?,
        ..args.engine.options(&args.model)
    };
    args.text.as_deref().map(read_text).transpose()?;
    let Opened { mut engine, .. } = open(&engine, &Terminal)?;
    options.text = args.text.as_deref().map(|file| tokens_of(&engine.model, file)).transpose()?;
    args.trace.begin(&mut engine)?;
    let progress = Progress::new("measuring", Unit::Tokens);
    let measured = Arc::new(Mutex::new(Vec::new()));
    let (so_far, output) = (Arc::clone(&measured), args.output);
    let watch = Watch {
        step: &|done, all| progress.step(done, all),
        row: &|row| measured.lock().push(Row { row: row.clone(), device: None }),
    };
    let rows = stoppable(
        move || print_so_far(&so_far.lock(), output),
        || bench(&mut engine, &options, crate::config::available_memory(), &watch),
    );
    progress.finish();
    if matches!(rows, Err(Error::Interrupted)) {
        print_so_far(&measured.lock(), args.output);
    }
    let rows = args.trace.write_after(&mut engine, rows)?;
    let device = report(&engine);
    let rows: Vec<Row> = rows.into_iter().map(|row| Row { row, device: device.clone() }).collect();
    print(&rows, args.output)?;
    if let Some(device) = device.filter(|device| !device.measured && args.output == Output::Table) {
        eprintln!("{}: its times are not real, and neither are the speeds above", device.device);
    }
    Ok(())
}

fn print(rows: &[Row], output: Output) -> Result<()> {
    match output {
        Output::Json => super::print_json(&rows),
        Output::Table => super::print(&form::tables(rows)),
        Output::Csv => super::print(&form::csv(rows)),
        Output::Md => super::print(&form::markdown(rows)),
        Output::Sql => super::print(&form::sql(rows)),
    }
}

/// What was measured before Ctrl-C came.
fn print_so_far(rows: &[Row], output: Output) {
    if !rows.is_empty() {
        // A failure to write cannot be reported anywhere any more.
        let _ = print(rows, output);
        eprintln!("{} rows were measured before it was stopped", rows.len());
    }
}

/// A row with what the device did in all of them.
#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    row: BenchRow,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    device: Option<DeviceReport>,
}
