//! `plan` without a device: how much of a model stays in memory, and how fast it is with the rest on disk.

use super::human_bytes;
use super::plan_subject::{Prediction, Subject};
use crate::error::{Error, Result, printable};
use crate::formats::trace_file::TraceFile;
use crate::machine::measure::decode_gb_s;
use crate::model::{KvType, Model};
use crate::open::{RamAnswer, RamQuestion, ram_plan, too_little};
use crate::placement::disk_plan::{Bound, DiskLimits, DiskMachine, DiskPlan, DiskPoint};
use crate::scheduler::Policy;
use comfy_table::{CellAlignment, Table};
use std::path::Path;

/// Shares of the way from the least memory to all of it that are shown next to the plan.
const SHOWN: [f64; 7] = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0];
/// Bytes to which a plan's memory is rounded up, for people.
const ROUND: f64 = (1 << 20) as f64;

/// The options of the plan.
pub(super) struct Asked<'a> {
    /// MODEL.
    pub name: &'a Path,
    /// Bytes of memory, at most.
    pub ram: Option<u64>,
    /// Tokens a second, at least.
    pub min_speed: Option<f64>,
    /// Threads, at most.
    pub threads: Option<usize>,
    /// Positions of keys and values, and whether the user set them.
    pub context: (usize, bool),
    /// Type of keys and values.
    pub kv: KvType,
    /// Sequences that are decoded at once.
    pub parallel: usize,
    /// Machine-readable.
    pub json: bool,
    /// Which neurons stay in memory; `None` is the default of `run`.
    pub policy: Option<Policy>,
    /// Tokens that were recorded, in place of drawn ones.
    pub trace: Option<&'a Path>,
}

/// A trace of this model.
fn recorded(model: &Model, path: &Path) -> Result<TraceFile> {
    let trace = TraceFile::open(path)?;
    let (of, layers, ffn) = (trace.header(), model.config.layers().len(), model.config.clusters());
    if of.fingerprint == model.fingerprint() && (of.layers, of.ffn) == (layers, ffn) {
        return Ok(trace);
    }
    Err(Error::Usage(format!(
        "--trace {}: the trace belongs to another model ({}); record this one: dynamicinfer-lab record MODEL --text \
         FILE -o FILE.trace",
        printable(&path.to_string_lossy()),
        printable(&of.model)
    )))
}

/// Plans for the given memory and speed, and prints the plan.
///
/// # Errors
/// [`Error::Usage`] for values that mean nothing, and where there is nothing to plan; [`Error::Memory`] where nothing within the limits is
/// enough.
pub(super) fn run(asked: &Asked<'_>, subject: &Subject, prediction: &Prediction) -> Result<()> {
    let Some(model) = &subject.model else {
        return Err(Error::Usage(
            "--shape: a plan of memory and disk needs a model's files; give a MODEL, or --vram SIZE".into(),
        ));
    };
    if let Some(speed) = asked.min_speed.filter(|s| !(*s > 0.0 && s.is_finite())) {
        return Err(Error::Usage(format!("--min-speed {speed}: give tokens/s above 0")));
    }
    let threads = asked.threads.unwrap_or_else(crate::config::default_threads);
    if !(1..=1024).contains(&threads) {
        return Err(Error::Usage(format!("--threads {threads}: give 1 to 1024")));
    }
    let trace = asked.trace.map(|path| recorded(model, path)).transpose()?;
    let rate = |threads| Ok(decode_gb_s(model.quant, threads)? * 1e9);
    let bytes_s = (1..=threads).map(rate).collect::<Result<_>>()?;
    let answer = ram_plan(RamQuestion {
        model,
        counts: subject.counts.clone(),
        tokens: subject.tokens,
        computed_share: prediction.computed_share,
        precision: prediction.precision,
        predictor_bytes: prediction.bytes,
        predictor_file_bytes: prediction.file_bytes,
        ahead: prediction.ahead,
        context: asked.context.0,
        kv: asked.kv,
        sequences: asked.parallel,
        bytes_s,
        policy: asked.policy,
        trace: trace.as_ref(),
    })?;
    let RamAnswer { machine, model: reads, .. } = &answer;
    let bytes = asked.ram.map_or(f64::INFINITY, |ram| ram as f64);
    let limits = DiskLimits { threads, bytes, speed: asked.min_speed.unwrap_or(0.0) };
    let best = match asked.min_speed {
        Some(_) => machine.smallest(reads, &limits),
        None => machine.fastest(reads, &limits),
    };
    let best = best.ok_or_else(|| nothing_within(&answer, &limits))?;
    let at = |share: f64| {
        let bytes = answer.least_bytes as f64 + share * (answer.all_bytes - answer.least_bytes) as f64;
        machine.plan(reads, best.threads, bytes)
    };
    let all: Vec<DiskPlan> = SHOWN.iter().map(|share| at(*share)).collect();
    if asked.json {
        let row = |plan: &DiskPlan| {
            let mut json = serde_json::to_value(plan).expect("plain data");
            let DiskPoint { miss, reads, read_bytes, .. } = reads.at(plan.bytes);
            json["miss"] = miss.into();
            json["reads"] = reads.into();
            json["read_bytes"] = read_bytes.into();
            json
        };
        return super::print_json(&serde_json::json!({
            "plan": row(&best),
            "others": all.iter().map(row).collect::<Vec<_>>(),
            "least_bytes": answer.least_bytes,
            "all_bytes": answer.all_bytes,
            "weights_bytes_s": machine.bytes_s,
            "disk": { "name": answer.disk, "bytes_s": machine.disk_bytes_s, "read_us": machine.read_s * 1e6, "ask_us": machine.ask_s * 1e6 },
            "computed_share": prediction.computed_share,
            "ahead": prediction.ahead,
            "counted": subject.counted,
        }));
    }
    if prediction.computed_share == 1.0 && subject.config.activation.is_sparse() {
        eprintln!(
            "without a predictor every neuron is read from disk; make one: dynamicinfer train-predictor MODEL \
             --text FILE"
        );
    }
    super::print(&shown(asked, subject, prediction, &answer, &best, &all))
}

/// Why no plan is within the limits, and what is nearest.
fn nothing_within(answer: &RamAnswer, limits: &DiskLimits) -> Error {
    let RamAnswer { machine, model, least_bytes, .. } = answer;
    if limits.bytes < *least_bytes as f64 {
        return too_little(&format!("--ram {} is", human_bytes(limits.bytes as u64)), *least_bytes);
    }
    let fastest = machine.fastest(model, &DiskLimits { speed: 0.0, ..*limits }).map_or(0.0, |plan| plan.speed);
    Error::Memory(format!(
        "{:.1} tokens/s are out of reach: with {} at most {fastest:.1}; lower --min-speed, raise --ram, or pack \
         the model in a smaller type",
        limits.speed,
        if limits.bytes.is_finite() { human_bytes(limits.bytes as u64) } else { "all of it in memory".into() }
    ))
}

fn bound(bound: Bound) -> &'static str {
    match bound {
        Bound::Compute => "memory and arithmetic",
        Bound::Disk => "disk",
    }
}

fn shown(
    asked: &Asked<'_>,
    subject: &Subject,
    prediction: &Prediction,
    answer: &RamAnswer,
    best: &DiskPlan,
    all: &[DiskPlan],
) -> String {
    let RamAnswer { machine, model, .. } = answer;
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["memory", "missing", "reads a token", "from disk", "tokens/s up to", "bound by"]);
    for plan in all {
        let point = model.at(plan.bytes);
        table.add_row([
            human_bytes(plan.bytes as u64),
            format!("{:.0} %", 100.0 * point.miss),
            format!("{:.0}", point.reads),
            human_bytes(point.read_bytes as u64),
            format!("{:.1}", plan.speed),
            bound(plan.bound).into(),
        ]);
    }
    for column in table.column_iter_mut().take(5) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let (c, ram) = (&subject.config, (best.bytes / ROUND).ceil() as u64);
    format!(
        "{} in {}: {} layers of {} {}s; {:.0} % of them computed for a token ({}){}\n\
         at least {} of memory; all of it in memory takes {}\n\n{table}\n\n\
         weights are read at {} with {}; disk: {}, {:.1} GB/s and {:.0} us a read, {:.1} us of a thread\n\
         which neurons: {}\n\
         plan: {} of memory and {}: at most {:.1} tokens/s, bound by {}\n\
         run it: dynamicinfer run {} --ram {ram}MiB -t {}{}\n",
        printable(&c.name),
        subject.quant,
        c.layers().len(),
        c.clusters(),
        c.parts().noun(),
        100.0 * prediction.computed_share,
        prediction.counted,
        if prediction.ahead { ", prefetched one layer ahead" } else { "" },
        human_bytes(answer.least_bytes),
        human_bytes(answer.all_bytes),
        rates(machine),
        if machine.bytes_s.len() > 1 { "1 thread and more" } else { "1 thread" },
        answer.disk,
        machine.disk_bytes_s / 1e9,
        machine.read_s * 1e6,
        machine.ask_s * 1e6,
        match asked.trace {
            Some(path) => format!(
                "those recorded in {}; at first {}",
                printable(&path.to_string_lossy()),
                printable(&subject.counted)
            ),
            None => printable(&subject.counted),
        },
        human_bytes(ram << 20),
        if best.threads == 1 { "1 thread".into() } else { format!("{} threads", best.threads) },
        best.speed,
        bound(best.bound),
        printable(&asked.name.to_string_lossy()),
        best.threads,
        if asked.context.1 { format!(" -c {}", asked.context.0) } else { String::new() }
    )
}

fn rates(machine: &DiskMachine) -> String {
    let rates: Vec<String> = machine.bytes_s.iter().map(|rate| format!("{:.1}", rate / 1e9)).collect();
    format!("{} GB/s", rates.join(", "))
}
