mod arm;
mod figures;
mod index;
mod page;
mod record;

use crate::cli::chart;
use crate::cli::machine_arg;
use crate::cli::progress::{Progress, Unit};
use crate::cli::safe_json;
use crate::clock;
use crate::error::{Error, Result, printable};
use crate::interrupt;
use crate::lab::experiment::rows::{Metrics, Row, RowsFile};
use crate::lab::experiment::{Arm, Method, Spec, arm_name, summary};
use crate::machine::measure::{self, Assumed};
use record::{Record, Session, write};
use std::path::{Path, PathBuf};

/// Run a declared experiment: rows in turns, with a report
///
/// FILE names the question, what is varied, what must hold for a row to count and what was expected (docs/predictors.md). Rows are added
/// to DIR/rows.jsonl one by one; after Ctrl-C or a kill the same command goes on where it stopped. At the end, and after Ctrl-C,
/// DIR has rows.csv, summary.json, summary.md, summary.html with its plots, and run.json: machine, rates, commit and seed.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// An experiment, as in configs/experiments
    #[arg(required_unless_present = "all")]
    file: Option<PathBuf>,
    /// Folder for its results [default: experiment-NAME]
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Only say which rows there would be
    #[arg(long)]
    list: bool,
    /// Make the pages of all experiments below DIR anew from their rows, with index.html over them [default: runs]
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "runs", conflicts_with_all = ["file", "out", "list"])]
    all: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  dynamicinfer-lab experiment configs/experiments/vram_sweep.toml
  dynamicinfer-lab experiment configs/experiments/ablation.toml --out runs/ablation
  dynamicinfer-lab experiment configs/experiments/thresholds.toml --list       which rows it would make
  dynamicinfer-lab experiment --all runs                                       pages of what was recorded, and an index";

pub fn run(args: Args) -> Result<()> {
    if let Some(root) = &args.all {
        eprintln!("{} is the index", index::write(root)?.display());
        return Ok(());
    }
    let file = args.file.as_deref().expect("clap asks for it");
    let (mut spec, text) = Spec::read(file)?;
    arm::check(&spec)?;
    arm::check(&spec.clone().on_no_card())?;
    let (arms, order) = (spec.arms(), spec.order());
    if args.list {
        let line = |&(arm, repeat): &(usize, usize)| format!("{} repeat={repeat}\n", arm_name(&arms[arm]));
        return crate::cli::print(&order.iter().map(line).collect::<String>());
    }
    if !spec.without_card.is_empty() && !crate::open::cuda::is_there()? {
        eprintln!("there is no NVIDIA card; instead: {}", arm_name(&spec.without_card()));
        spec = spec.on_no_card();
    }
    let dir = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("experiment-{}", spec.name)));
    std::fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
    let mut rows = RowsFile::open(&dir.join("rows.jsonl"))?;
    let mut record = read_record(&dir, &spec, &text)?;
    let missing: Vec<(usize, usize)> = order.iter().copied().filter(|&(arm, repeat)| !rows.has(arm, repeat)).collect();
    if missing.len() < order.len() {
        eprintln!("{} of {} rows are there already", order.len() - missing.len(), order.len());
    }
    let mut result = Ok(());
    if !missing.is_empty() {
        one_machine(&dir, &mut spec)?;
        let wanted: Vec<&Arm> =
            arms.iter().enumerate().filter(|(i, _)| missing.iter().any(|m| m.0 == *i)).map(|(_, a)| a).collect();
        for (arm, why) in arm::without_room(&spec, &wanted)? {
            eprintln!("{} will be refused: {why}", arm_name(&arm));
        }
        let session = Session { command: command(file, &dir), ..session(&spec)? };
        let commit = session.commit.clone();
        record.sessions.push(session);
        write(&dir.join("run.json"), &safe_json(&record))?;
        result = make(&spec, &missing, &commit, &mut rows);
    }
    // Also of what there is until Ctrl-C or an error.
    report(&dir, &spec, &record, &rows.rows)?;
    if let Err(Error::Interrupted) = result {
        eprintln!("{} rows are kept in {}; the same command goes on with the others", rows.rows.len(), dir.display());
    }
    result
}

fn make(spec: &Spec, missing: &[(usize, usize)], commit: &str, rows: &mut RowsFile) -> Result<()> {
    let arms = spec.arms();
    for _ in 0..spec.warm_up {
        interrupt::check()?;
        let arm = &arms[missing[0].0];
        arm::row(spec, arm, 0).map_err(|error| match error {
            Error::Usage(why) => Error::Usage(format!("{}: {why}", arm_name(arm))),
            other => other,
        })?;
    }
    let progress = Progress::new(spec.name.clone(), Unit::Rows);
    for (done, &(arm, repeat)) in missing.iter().enumerate() {
        progress.step(done as u64, missing.len() as u64)?;
        let begin = clock::now();
        let (metrics, refused) = match arm::row(spec, &arms[arm], repeat) {
            Ok(metrics) => {
                let refused = spec.refusal(&metrics);
                (metrics, refused)
            }
            // A budget that is too small for this arm is a result; the other arms go on.
            Err(Error::Memory(why)) => (Metrics::new(), Some(why)),
            Err(Error::Usage(why)) => return Err(Error::Usage(format!("{}: {why}", arm_name(&arms[arm])))),
            Err(error) => return Err(error),
        };
        rows.add(Row {
            arm,
            settings: arms[arm].clone(),
            repeat,
            metrics,
            refused,
            unix: clock::unix_seconds(),
            seconds: begin.elapsed().as_secs_f64(),
            commit: commit.to_owned(),
        })?;
    }
    progress.finish();
    Ok(())
}

/// Rows with a device are planned for one machine: measured by each row for itself, it would be another one every time. The folder
/// keeps it for the rows that are made later.
fn one_machine(dir: &Path, spec: &mut Spec) -> Result<()> {
    let plans = spec.methods.iter().any(|m| matches!(m, Method::Bench | Method::Evaluate | Method::Choices));
    let said = |name: &str| spec.fixed.contains_key(name) || spec.axes.contains_key(name);
    if !plans || !said("device") || said("machine") {
        return Ok(());
    }
    let path = dir.join("machine.toml");
    if !path.exists() {
        machine_arg::find(None)?.write(&path)?;
    }
    // A name without a slash would be looked for among the profiles.
    spec.fixed.insert("machine".into(), path.display().to_string().into());
    Ok(())
}

/// What the folder holds already, if it is of this very experiment.
fn read_record(dir: &Path, spec: &Spec, text: &str) -> Result<Record> {
    let path = dir.join("run.json");
    let fixed = arm_name(&spec.fixed());
    if !path.exists() {
        let (name, spec_text) = (spec.name.clone(), text.to_owned());
        return Ok(Record { name, spec: spec_text, seed: spec.seed, fixed, sessions: Vec::new() });
    }
    let record = Record::read(&path)?;
    if record.spec != text {
        return Err(Error::Usage(format!(
            "{} holds rows of '{}' as it was before its file changed; take another --out, so that rows of two experiments do not mix",
            dir.display(),
            printable(&record.name)
        )));
    }
    if !record.fixed.is_empty() && record.fixed != fixed {
        return Err(Error::Usage(format!(
            "{} holds rows with {}, and here it would be {}; take another --out, so that rows of two machines do not mix",
            dir.display(),
            printable(&record.fixed),
            printable(&fixed)
        )));
    }
    Ok(record)
}

/// What makes the same rows again.
fn command(file: &Path, dir: &Path) -> String {
    format!("dynamicinfer-lab experiment {} --out {}", file.display(), dir.display())
}

fn session(spec: &Spec) -> Result<Session> {
    let threads = crate::config::default_threads();
    let measured = spec.methods.contains(&Method::Bench);
    let free = crate::config::available_memory();
    let machine = measured.then(|| measure::machine("this", threads, free, None, Assumed::default())).transpose()?;
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu =
        info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':')).map_or("unknown", |(_, name)| name);
    Ok(Session {
        unix: clock::unix_seconds(),
        program: concat!("dynamicinfer ", env!("CARGO_PKG_VERSION")).into(),
        commit: commit(),
        cpu: cpu.trim().to_owned(),
        threads,
        command: String::new(),
        machine,
    })
}

/// Of the checkout that the program runs in, `+` with changes; `unknown` outside of one or without git.
fn commit() -> String {
    let git = |dir: &Path, arguments: &[&str]| {
        let done = std::process::Command::new("git").arg("-C").arg(dir).args(arguments).output().ok()?;
        done.status.success().then(|| String::from_utf8_lossy(&done.stdout).trim().to_owned())
    };
    let of = |assets: PathBuf| {
        let dir = assets.parent()?.to_owned();
        let head = git(&dir, &["rev-parse", "--short=12", "HEAD"])?;
        let changed = git(&dir, &["status", "--porcelain", "--untracked-files=no"])?;
        Some(if changed.is_empty() { head } else { head + "+" })
    };
    crate::config::asset_dirs().into_iter().find_map(of).unwrap_or_else(|| "unknown".into())
}

fn report(dir: &Path, spec: &Spec, record: &Record, rows: &[Row]) -> Result<()> {
    let summary = summary::summary(spec, rows);
    let figures = figures::figures(spec, &summary);
    write(&dir.join("rows.csv"), &summary::csv(spec, rows))?;
    write(&dir.join("summary.json"), &safe_json(&page::data(spec, &summary)))?;
    for (i, figure) in figures.iter().enumerate() {
        write(&dir.join(format!("plot-{}.svg", i + 1)), &chart::svg(&figure.plot, chart::Room::Wide))?;
    }
    write(&dir.join("summary.md"), &page::markdown(spec, record, &summary, rows, &figures))?;
    write(&dir.join("summary.html"), &page::html(spec, record, &summary, rows, &figures))?;
    crate::cli::print(&summary.markdown())?;
    eprintln!("{} is the report", dir.join("summary.html").display());
    Ok(())
}
