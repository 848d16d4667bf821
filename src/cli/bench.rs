mod form;

use super::device_arg::DeviceArgs;
use super::eval::{read_text, tokens_of};
use super::model_arg::{EngineArgs, ModelArgs, Terminal};
use super::progress::{Progress, Unit, stoppable};
use super::sparsity_arg::SparsityArgs;
use super::trace_arg::TraceArgs;
use crate::cpu::MAX_COLUMNS;
use crate::error::{Error, Result};
use crate::evaluation::bench::{BenchOptions, Watch, bench};
use crate::open::report::report;
use crate::open::{EngineOptions, Opened, open};
use form::Row;
use parking_lot::Mutex;
use std::path::PathBuf;
use std::sync::Arc;

/// Measure prefill and decode speed, and compare with the memory's rate
///
/// As llama-bench: each repeat runs the whole prompt, or generates all tokens from an empty context (or one of --n-depth tokens), after one
/// warm-up; tokenising and sampling are excluded. GB/s is the weight bytes that a token must read, without keys and values, divided by the
/// median time between tokens. Its share refers to the best read of 2 GiB (or of the model, if less is free) with the same threads just
/// before and after. Decode computes the same neurons as `run` with the same --predictor; computed share and recall refer to random tokens,
/// or with --text to those of the text. Ctrl-C ends it at once and prints the rows measured so far.
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
    /// Sequences that generate together, with a row for each number: 1,2,4,8; at most 32
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1")]
    sequences: Vec<usize>,
    /// Tokens in the context at the start, with a row for each number: 0,1024,4096
    #[arg(short = 'd', long, value_name = "N,...", value_delimiter = ',', default_value = "0")]
    n_depth: Vec<usize>,
    /// Repeats
    #[arg(short, long, default_value_t = 5)]
    repetitions: usize,
    /// Use the tokens of this text instead of random ones
    ///
    /// The needed neurons or experts, and the hits in memory, are then those of your texts.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Format of the result
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
    /// All figures of each row
    Json,
    /// As in llama-bench
    Csv,
    /// As in llama-bench, for a page
    Md,
    /// For sqlite and similar databases
    Sql,
}

pub fn run(args: Args) -> Result<()> {
    if args.n_prompt == 0 && args.n_gen == 0 {
        return Err(Error::Usage("nothing to measure: -p and -n are both 0".into()));
    }
    if args.repetitions == 0 {
        return Err(Error::Usage("-r 0: give at least one repeat".into()));
    }
    if let Some(n) = args.sequences.iter().find(|n| !(1..=MAX_COLUMNS).contains(*n)) {
        return Err(Error::Usage(format!("--sequences {n}: give 1 to {MAX_COLUMNS}")));
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
        eprintln!("the times of the {} are simulated, and so are the speeds above", device.device);
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

/// Prints the rows measured before Ctrl-C.
fn print_so_far(rows: &[Row], output: Output) {
    if !rows.is_empty() {
        // A failure to write cannot be reported anywhere any more.
        let _ = print(rows, output);
        let s = if rows.len() == 1 { "" } else { "s" };
        eprintln!("stopped after {} measured row{s}", rows.len());
    }
}
