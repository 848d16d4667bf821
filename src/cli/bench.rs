use super::device_arg::DeviceArgs;
use super::model_arg::{EngineArgs, ModelArgs, Terminal};
use super::sparsity_arg::SparsityArgs;
use super::trace_arg::TraceArgs;
use crate::cpu::MAX_COLUMNS;
use crate::error::{Error, Result};
use crate::lab::bench::{BenchOptions, BenchRow, bench};
use crate::open::report::{DeviceReport, report};
use crate::open::{EngineOptions, Opened, open};
use comfy_table::{CellAlignment, Table};
use serde::Serialize;

/// Measure prefill and decode speed beside what memory allows
///
/// As llama-bench: each repeat runs the whole prompt or generates all tokens from an empty context (or one of --n-depth tokens), after one
/// warm-up; tokenising and sampling are left out. GB/s are the weight bytes that a token must read, without keys and values, over the
/// median time between tokens; the share is of the best read of 2 GiB (where so much is not free: of the model) with the same threads just
/// before and after. Decode runs what --predictor says; computed share and recall are of random tokens, as the timed ones were.
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
    Table,
    Json,
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
    let options = BenchOptions {
        prompt: args.n_prompt,
        generate: args.n_gen,
        sequences: args.sequences,
        depths: args.n_depth,
        repeats: args.repetitions,
        kv: args.engine.kv(),
    };
    let engine = EngineOptions {
        context: Some(options.context()),
        sequences: options.sequences.iter().copied().max().unwrap_or(1),
        sparsity: args.sparsity.options_or_dense(),
        traced: args.trace.is_on(),
        device: args.device.options()?,
        ..args.engine.options(&args.model)
    };
    let Opened { mut engine, .. } = open(&engine, &Terminal)?;
    args.trace.begin(&mut engine)?;
    let rows = bench(&mut engine, &options, crate::config::available_memory());
    let rows = args.trace.write_after(&mut engine, rows)?;
    match args.output {
        Output::Json => {
            let device = report(&engine);
            super::print_json(&rows.into_iter().map(|row| Row { row, device: device.clone() }).collect::<Vec<_>>())
        }
        Output::Table => {
            super::print(&(table(&rows) + "\n"))?;
            if let Some(device) = report(&engine).filter(|device| !device.measured) {
                eprintln!("{}: its times are not real, and neither are the speeds above", device.device);
            }
            Ok(())
        }
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

fn table(rows: &[BenchRow]) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header([
        "model",
        "size",
        "threads",
        "test",
        "tokens/s",
        "ms/token p50 / p95 / p99",
        "GB/s",
        "of machine",
        "predictor",
        "computed / recall",
        "ms attention + predictor + ffn + head",
    ]);
    for row in rows {
        let percent = |share: Option<f64>| share.map_or("-".into(), |share| format!("{:.0} %", 100.0 * share));
        let ms = |v: Option<f64>| v.map_or("-".into(), |v| format!("{v:.2}"));
        table.add_row([
            row.model_type.clone(),
            super::human_bytes(row.model_size),
            row.n_threads.to_string(),
            row.test.clone(),
            format!("{:.2} ± {:.2}", row.avg_ts, row.stddev_ts),
            format!("{} / {} / {}", ms(row.token_ms_p50), ms(row.token_ms_p95), ms(row.token_ms_p99)),
            row.read_gb_s.map_or("-".into(), |rate| format!("{rate:.1} of {:.1}", row.machine_gb_s)),
            percent(row.share_of_machine),
            row.predictor.clone(),
            format!("{} / {}", percent(row.computed_share), percent(row.recall)),
            row.parts_ms.map_or("-".into(), |p| {
                format!("{:.2} + {:.2} + {:.2} + {:.2}", p.attention, p.predictor, p.ffn, p.head)
            }),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}
