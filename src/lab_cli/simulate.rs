mod beside;
mod chunks;
mod prompts;
mod table;

use crate::cli::chart::{self, Axis, Line, Plot};
use crate::cli::machine_arg;
use crate::cli::model_arg::ModelArgs;
use crate::cli::policy_arg;
use crate::cli::progress::{Progress, Unit};
use crate::cli::size;
use crate::error::{Error, Result, printable};
use crate::formats::machine_profile::MachineProfile;
use crate::formats::rows::Quant;
use crate::formats::trace_file::{EXTENSION, TraceFile};
use crate::lab::simulate::Calls;
use crate::lab::simulate::assumption::{Assumption, Held, Switched, given_up_for, held};
use crate::lab::simulate::calibration::{Statistics, calibrate};
use crate::lab::simulate::case::{Case, POSITION, PREDICTOR_SHARE};
use crate::lab::simulate::papers::{Published, SET_UPS, SetUp};
use crate::lab::synth::trace::{TraceShape, write_trace};
use crate::model::KvType;
use crate::placement::PlacementPolicy as Placement;
use crate::placement::memory_plan::Footprint;
use crate::placement::shapes::{footprint, shape};
use crate::scheduler::Policy;
use serde::Serialize;
use std::path::{Path, PathBuf};
use table::{Row, empty};

/// What DynamicInfer adds step by step to PowerInfer in figure 10, from `static` to `full`.
const STEPS: [Policy; 4] = [Policy::Static, Policy::Micro, Policy::Macro, Policy::Full];

/// Positions that room is planned for, unless the user says otherwise: those of ReluLLaMA.
const CONTEXT: usize = 2048;

/// Simulate decoding on a machine that is not here
///
/// The real scheduler, policies, thresholds and planner on a discrete-event clock, fed by a machine profile and by a trace of activations:
/// recorded (`record`), or synthetic, with the statistics of the paper's models. Nothing is measured: every figure follows from the profile
/// and the trace. A trace is smaller than a large model: each of its layers and neurons stands for several. Prompts are left
/// out, but for mixtures with --prefill. --papers
/// does so for the set-ups of DynamicInfer 5 and prints what was published beside it.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("what").required(true))]
pub struct Args {
    /// Model whose sizes are taken: a Hugging Face directory, a .gguf, a packed .neurons file, or `demo`
    #[arg(group = "what")]
    pub model: Option<PathBuf>,
    /// Model that is not here: llama-7b, or a mixture (with --trace) such as qwen3-30b-a3b; a wrong name lists them
    #[arg(long, value_name = "NAME", group = "what")]
    pub shape: Option<String>,
    /// The set-ups of DynamicInfer 5, beside what it published
    #[arg(long, group = "what", conflicts_with_all = ["trace", "vram", "machine", "active"])]
    pub papers: bool,
    /// A prompt's chunks over an integer and a float unit, in order and out of order (mllm-NPU 3.4)
    #[arg(long, group = "what", conflicts_with_all = ["trace", "vram", "machine", "active"])]
    pub chunks: bool,
    /// Type of the weights: f32, f16, q8_0 or q4_0 [default: nearest to the model's; of a shape f16, a mixture's own 4 bits]
    #[arg(long)]
    pub quant: Option<Quant>,
    /// Machine profile: its name, or a .toml file [default: `default`, else measured now]
    #[arg(long, value_name = "NAME")]
    pub machine: Option<PathBuf>,
    /// Room on the device for everything; several make a sweep; without it the CPU computes alone
    #[arg(long, num_args = 1.., value_name = "SIZE", value_parser = size::parse)]
    pub vram: Vec<u64>,
    /// Policies [default: all]
    #[arg(long, num_args = 1.., value_name = "POLICY", ignore_case = true, value_parser = policy_arg::names())]
    pub policy: Vec<Policy>,
    /// A file of `dynamicinfer-lab record` with two or more texts, instead of a synthetic trace
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Of the synthetic trace: share of neurons that are active for a token
    #[arg(long, default_value_t = 0.10, value_name = "SHARE")]
    pub active: f64,
    /// Of the synthetic trace: layers that predictions look ahead
    #[arg(long, default_value_t = 2, value_name = "LAYERS")]
    pub lookahead: usize,
    /// Of the synthetic trace, and of --policy random
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Probability from which on a neuron is computed; 0 computes all [default: as the trace was recorded, else 0.5]
    #[arg(long)]
    pub threshold: Option<f32>,
    /// Predictors, as a share of the model's bytes [default: 0.06 (powerinfer 5.1); 0 where --threshold is 0]
    #[arg(long, value_name = "SHARE")]
    pub predictor_share: Option<f64>,
    /// Neurons that begin on the device: static (those that were active most), random (as many, any), or none; --papers takes both
    #[arg(long, value_parser = parse_placement)]
    pub placement: Option<Placement>,
    /// Of the static policy: layers get their slots by the activations that these hold (powerinfer 6), and not by the time that they save
    #[arg(long)]
    pub by_impact: bool,
    /// Copies take no memory bandwidth from the CPU, as the paper assumes
    #[arg(long)]
    pub no_contention: bool,
    /// Starting a copy is paid for each neuron, not for each decision about a layer
    #[arg(long)]
    pub copy_each: bool,
    /// Mean position of the tokens, whose keys and values are read from host memory
    #[arg(long, default_value_t = POSITION, value_name = "TOKENS")]
    pub position: usize,
    /// What a neuron block that does not lie behind the last one costs the CPU besides its bytes, ns
    #[arg(long, default_value_t = 0.0)]
    pub gap_ns: f64,
    /// Of a mixture: the first N tokens of each text are a prompt, simulated as the engine computes one, and the others are decoded
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub prefill: usize,
    /// Of --prefill, tokens that go through together: 256, 512 or 1024 [default: what the plan chooses]
    #[arg(long, value_name = "TOKENS", requires = "prefill")]
    pub prompt_chunk: Option<usize>,
    /// Write a plot of speed by budget into this folder
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
    /// Machine-readable
    #[arg(long)]
    pub json: bool,
}

const EXAMPLES: &str = "\
Examples:
  dynamicinfer-lab simulate --papers                                            the paper's set-ups, beside its figures
  dynamicinfer-lab simulate --shape llama-13b --machine rtx-4090 --vram 12GiB 16GiB 20GiB 24GiB --active 0.22
  dynamicinfer-lab simulate --shape llama-70b --quant q4_0 --machine rtx-4090 --vram 23GiB --policy static full --lookahead 3
  dynamicinfer-lab simulate demo --trace demo.trace --machine demo-pc --vram 3MiB
  dynamicinfer-lab simulate --shape qwen3-30b-a3b --trace moe.trace --machine rtx-3060-12gb --vram 11GiB --prefill 512
  dynamicinfer-lab simulate --shape llama-7b --machine rtx-4090 --threshold 0   the CPU alone, every neuron";

pub fn parse_placement(text: &str) -> std::result::Result<Placement, String> {
    match text {
        "static" => Ok(Placement::Static),
        "random" => Ok(Placement::Random),
        "none" => Ok(Placement::None),
        _ => Err("take static, random or none".into()),
    }
}

#[derive(Serialize)]
pub struct Report {
    simulated: bool,
    model: String,
    machine: String,
    /// Real layers and neurons that one of the trace stands for.
    layers_each: f64,
    neurons_each: f64,
    trace: Statistics,
    placement: Placement,
    contention: bool,
    calls: Calls,
    #[serde(skip_serializing_if = "Option::is_none")]
    published: Option<Published>,
    /// Where `full` is faster beside layer offload than was published: what of the assumptions would have to be given up for that.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    assumptions: Vec<Switched>,
    /// With as much device memory for neurons as gives `static` the published share of neurons on the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    held: Option<Held>,
    pub rows: Vec<Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    prompts: Vec<prompts::Row>,
}

pub fn run(args: Args) -> Result<()> {
    if args.chunks {
        return chunks::print(args.json);
    }
    let reports = reports(&args)?;
    if let Some(dir) = &args.plot {
        std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
        for report in reports.iter().filter(|r| r.rows.iter().any(|row| row.vram_bytes.is_some())) {
            let path = dir.join(format!("{}.svg", file_name(&report.model)));
            chart::write(&path, &plot(report))?;
            eprintln!("{} written", path.display());
        }
    }
    if args.json {
        return crate::cli::print_json(&reports);
    }
    reports.iter().try_for_each(|r| crate::cli::print(&shown(r)))
}

/// One report for each set-up that is asked for.
pub fn reports(args: &Args) -> Result<Vec<Report>> {
    for (name, value, top) in [
        ("--active", args.active, 0.5),
        ("--threshold", f64::from(args.threshold.unwrap_or(0.0)), 1.0),
        ("--predictor-share", args.predictor_share.unwrap_or(0.0), 1.0),
        ("--gap-ns", args.gap_ns, 1e6),
    ] {
        if !(0.0..=top).contains(&value) {
            return Err(Error::Usage(format!("{name} {value}: take 0 to {top}")));
        }
    }
    Ok(match args.papers {
        true => {
            let both = args.placement.map_or(vec![Placement::Static, Placement::Random], |one| vec![one]);
            let pairs = SET_UPS.iter().flat_map(|s| both.iter().map(move |&p| (s, p)));
            pairs.map(|(s, placement)| paper(args, s, placement)).collect::<Result<Vec<_>>>()?
        }
        false => vec![given(args)?],
    })
}

fn file_name(model: &str) -> String {
    model.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' }).collect()
}

fn paper(args: &Args, s: &SetUp, placement: Placement) -> Result<Report> {
    let trace = as_published(s.active, args.lookahead, args.seed)?;
    let machine = machine_arg::find(Some(Path::new(s.machine)))?;
    let real = Footprint::of_shape(&shape(s.shape)?, s.quant, CONTEXT, KvType::F16);
    let vram = (s.vram_gib * (1u64 << 30) as f64) as u64;
    let case = Case { placement, ..case(args, &trace, &machine, &real) };
    let rows = rows(args, &case, &[Some(vram)])?;
    let case = Case { vram: Some(vram), ..case };
    let assumptions = assumptions(&case, &rows, &s.published)?;
    // From another placement than the plan's the published systems do not begin.
    let held = match s.published.gpu_share {
        Some((fixed, _)) if placement == Placement::Static => held(&case, &STEPS, fixed / 100.0)?,
        _ => None,
    };
    Ok(Report { published: Some(s.published), assumptions, held, ..report(s.name.into(), &case, rows) })
}

/// Where `full` is further above dense layer offload than was published: which assumption does it.
fn assumptions(case: &Case<'_>, rows: &[Row], published: &Published) -> Result<Vec<Switched>> {
    let speed = |policy| rows.iter().find(|row| row.policy == policy).map(|row| row.tokens_per_s);
    let (Some((_, most)), Some(dense), Some(full)) =
        (published.full_over_llama_cpp, speed(None), speed(Some(Policy::Full)))
    else {
        return Ok(Vec::new());
    };
    let most = (1.0 + most / 100.0) * dense;
    if full <= most || case.placement != Placement::Static {
        return Ok(Vec::new());
    }
    Assumption::ALL.iter().map(|&a| given_up_for(a, case, most)).collect()
}

fn given(args: &Args) -> Result<Report> {
    let (name, real) = match (&args.shape, &args.model) {
        (Some(name), _) => {
            let (real, quant) = footprint(name, args.quant, CONTEXT, KvType::F16)?;
            (format!("{name} {quant}"), real)
        }
        (None, Some(model)) => {
            let model = ModelArgs { model: model.clone(), quant: args.quant.map(Into::into), activation: None }
                .open_neurons_for_device()?;
            let real = Footprint::of_model(&model, CONTEXT, KvType::F16);
            (format!("{} {}", printable(&model.config.name), model.quant.name()), real)
        }
        (None, None) => unreachable!("clap asks for one"),
    };
    let trace = match &args.trace {
        Some(path) => TraceFile::open(path)?,
        None if real.experts_used.is_some() => {
            let why = "--trace: a mixture needs one; `record --synth --experts` makes it";
            return Err(Error::Usage(why.into()));
        }
        None => synthetic_trace(args.active, args.lookahead, args.seed)?,
    };
    let machine = machine_arg::find(args.machine.as_deref())?;
    let budgets: Vec<Option<u64>> =
        if args.vram.is_empty() { vec![None] } else { args.vram.iter().copied().map(Some).collect() };
    let case = case(args, &trace, &machine, &real);
    let rows = rows(args, &case, &budgets)?;
    let prompts = prompts::rows(&case, &rows)?;
    Ok(Report { prompts, ..report(name, &case, rows) })
}

fn case<'a>(args: &Args, trace: &'a TraceFile, machine: &'a MachineProfile, real: &'a Footprint) -> Case<'a> {
    // A mixture's router is its predictor.
    let dense = args.threshold == Some(0.0) || real.experts_used.is_some();
    let share = args.predictor_share.unwrap_or(if dense { 0.0 } else { PREDICTOR_SHARE });
    let all = real.attention_bytes + real.ffn_bytes() + real.head_bytes;
    Case {
        trace,
        machine,
        real,
        position: args.position,
        vram: None,
        placement: args.placement.unwrap_or(Placement::Static),
        // What is compared with papers is placed as there.
        by_impact: args.by_impact || args.papers,
        predictor_bytes: (share * all as f64) as u64,
        threshold: args.threshold,
        contention: !args.no_contention,
        calls: if args.copy_each { Calls::PerNeuron } else { Calls::PerDecision },
        gap_ns: args.gap_ns,
        seed: args.seed,
        prompt: args.prefill,
        chunk: args.prompt_chunk,
    }
}

fn rows(args: &Args, case: &Case<'_>, budgets: &[Option<u64>]) -> Result<Vec<Row>> {
    let policies = if args.policy.is_empty() { Policy::ALL.to_vec() } else { args.policy.clone() };
    let progress = Progress::new("simulating", Unit::Percent);
    let mut rows = Vec::new();
    let all = budgets.len() * policies.len();
    for &vram in budgets {
        let case = Case { vram, ..*case };
        let (ms, layers) = case.layer_offload();
        let tokens_per_s = 1e3 / ms;
        rows.push(Row { vram_bytes: vram, policy: None, tokens_per_s, outcome: None, layers_on_device: Some(layers) });
        // Without a device nothing moves, and all policies are one.
        let policies = if vram.is_some() { &policies[..] } else { &[Policy::Static] };
        for &policy in policies {
            progress.step(rows.len() as u64, all as u64)?;
            let outcome = case.run(policy)?;
            let tokens_per_s = outcome.tokens_per_s;
            let (policy, outcome) = (Some(policy), Some(outcome));
            rows.push(Row { vram_bytes: vram, policy, tokens_per_s, outcome, layers_on_device: None });
        }
    }
    progress.finish();
    Ok(rows)
}

fn report(model: String, case: &Case<'_>, rows: Vec<Row>) -> Report {
    let h = case.trace.header();
    Report {
        simulated: true,
        model,
        machine: case.machine.name.clone(),
        layers_each: case.real.layers as f64 / h.layers as f64,
        neurons_each: case.real.ffn as f64 / h.ffn as f64,
        trace: Statistics::of(case.trace),
        placement: case.placement,
        contention: case.contention,
        calls: case.calls,
        published: None,
        assumptions: Vec::new(),
        held: None,
        rows,
        prompts: Vec::new(),
    }
}

/// A synthetic trace, kept in the cache directory: the same settings are the same file.
pub fn synthetic_trace(active: f64, ahead: usize, seed: u64) -> Result<TraceFile> {
    let shape = small(active, ahead, seed)?;
    let path = kept(&format!("made-up-16x512x800-{active}-{ahead}-{seed}"))?;
    // One that is damaged or of another version is made again.
    if let Ok(trace) = TraceFile::open(&path) {
        return Ok(trace);
    }
    let progress =
        Progress::new(format!("making up a trace, {}", crate::error::human_bytes(shape.bytes())), Unit::Tokens);
    write_trace(&shape, &path, |done, all| progress.step(done, all))?;
    progress.finish();
    TraceFile::open(&path)
}

/// As [`synthetic_trace`], with locality and skew such that tokens and texts are as far apart as DynamicInfer measured them.
fn as_published(active: f64, ahead: usize, seed: u64) -> Result<TraceFile> {
    let shape = small(active, ahead, seed)?;
    let path = kept(&format!("as-published-16x512x800-{active}-{ahead}-{seed}"))?;
    if let Ok(trace) = TraceFile::open(&path) {
        return Ok(trace);
    }
    // The trial of another process is not measured.
    let trial = kept(&format!("trial-{}", std::process::id()))?;
    let progress =
        Progress::new(format!("calibrating a trace, {}", crate::error::human_bytes(shape.bytes())), Unit::Tokens);
    let shape = calibrate(&shape, |shape| {
        write_trace(shape, &trial, |done, all| progress.step(done, all))?;
        Ok(Statistics::of(&TraceFile::open(&trial)?))
    });
    let _ = std::fs::remove_file(&trial);
    write_trace(&shape?, &path, |done, all| progress.step(done, all))?;
    progress.finish();
    TraceFile::open(&path)
}

/// Many layers rather than many neurons: the first `ahead` layers have no prediction, which in a model of 80 is next to nothing.
fn small(active: f64, ahead: usize, seed: u64) -> Result<TraceShape> {
    let shape =
        TraceShape { layers: 16, ffn: 512, texts: 8, tokens_per_text: 100, active, ahead, seed, ..TraceShape::paper() };
    if ahead == 0 || ahead >= shape.layers {
        return Err(Error::Usage(format!("--lookahead {ahead}: take 1 to {}", shape.layers - 1)));
    }
    if active < 0.01 {
        return Err(Error::Usage(format!("--active {active}: take 0.01 to 0.5")));
    }
    Ok(shape)
}

/// Where a trace of this name is kept.
fn kept(name: &str) -> Result<PathBuf> {
    let dir = crate::config::cache_dir()
        .ok_or_else(|| {
            Error::Usage("there is no cache directory for a made-up trace: set HOME or XDG_CACHE_HOME".into())
        })?
        .join("traces");
    std::fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
    Ok(dir.join(format!("{name}.{EXTENSION}")))
}

fn shown(r: &Report) -> String {
    format!(
        "SIMULATED: {} on {}, {} placement.\nA layer of the trace stands for {:.1}, a neuron for {:.1}; neighbouring tokens are {:.3} \
         apart{}.\nCopies {} memory bandwidth.\n{}{}\n{}\n",
        r.model,
        printable(&r.machine),
        match r.placement {
            Placement::Static => "the plan's",
            Placement::Random => "a random",
            Placement::None => "no",
        },
        r.layers_each,
        r.neurons_each,
        r.trace.token_distance,
        r.trace.text_distance.map_or(String::new(), |d| format!(", texts {d:.3}")),
        if r.contention { "take their share of" } else { "take no" },
        tables(r),
        prompts::shown(&r.prompts),
        r.published.as_ref().map_or(String::new(), |p| compared(r, p)),
    )
}

/// Three tables of at most 80 columns: speeds, what was computed and moved, where the time went.
fn tables(r: &Report) -> String {
    let mut speeds = empty(&["VRAM, policy", "tokens/s", "vs static", "on GPU", "computed", "recall"]);
    let mut times = empty(&["VRAM, policy", "ms: attention", "predictor", "FFN", "head"]);
    let mut moves = empty(&["VRAM, policy", "ms: FFN on GPU", "on CPU", "MB moved a token", "moving"]);
    for row in &r.rows {
        let vram = row.vram_bytes.map_or("-".into(), crate::error::human_bytes);
        // So that no line of it is taken for a measurement.
        let speed = format!("{:.2} sim.", row.tokens_per_s);
        let Some(o) = &row.outcome else {
            let name = format!("{vram}, {} layers", row.layers_on_device.unwrap_or(0));
            speeds.add_row([name, speed, over(r, row)]);
            continue;
        };
        let name = format!("{vram}, {}", row.policy.map_or("", Policy::name));
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let shares = [o.gpu_share, o.computed_share, o.recall].map(percent);
        speeds.add_row([name.clone(), speed, over(r, row)].into_iter().chain(shares));
        let p = &o.parts_ms;
        let ms = |ms: f64| format!("{ms:.2}");
        times.add_row([name.clone()].into_iter().chain([p.attention, p.predictor, p.ffn, p.head].map(ms)));
        let moved = format!("{:.1}", o.moved_bytes_per_token / 1e6);
        moves.add_row([name, ms(p.ffn_device), ms(p.ffn_cpu), moved, percent(o.moving)]);
    }
    let tables = [speeds, times, moves].map(|table| format!("{table}\n")).join("\n");
    format!(
        "{tables}N layers: dense, N whole layers (of a mixture: their experts) on the GPU and the others on the CPU, as llama.cpp.\n"
    )
}

/// Percent faster than static with the same budget.
fn over(r: &Report, row: &Row) -> String {
    let same = |other: &&Row| other.vram_bytes == row.vram_bytes && other.policy == Some(Policy::Static);
    r.rows
        .iter()
        .find(same)
        .map_or("-".into(), |s| format!("{:+.1} %", 100.0 * (row.tokens_per_s / s.tokens_per_s - 1.0)))
}

/// Everything that is printed beside what was published.
fn compared(r: &Report, p: &Published) -> String {
    let dense = r.rows.iter().find(|row| row.policy.is_none()).map_or(0.0, |row| row.tokens_per_s);
    let mut parts = vec![beside::alike(&r.trace), speeds(r, p)];
    if let Some((_, most)) = p.full_over_llama_cpp {
        parts.push(beside::switched(&r.assumptions, most, dense));
    }
    if let (Some(held), Some(published)) = (&r.held, p.gpu_share) {
        parts.push(beside::with_published_share(held, published, dense));
    }
    parts.join("\n")
}

/// Published and simulated, percent faster.
fn speeds(r: &Report, p: &Published) -> String {
    let speed = |policy: Option<Policy>| r.rows.iter().find(|row| row.policy == policy).map(|row| row.tokens_per_s);
    let more = |policy, than| match (speed(policy), speed(than)) {
        (Some(a), Some(b)) => format!("{:+.1} %", 100.0 * (a / b - 1.0)),
        _ => "-".into(),
    };
    let mut table = empty(&["faster by", "published", "simulated"]);
    let mut line = |what: &str, published: String, simulated: String| {
        table.add_row([what, &published, &simulated]);
    };
    let range = |(from, to): (f64, f64)| format!("+{from:.0} to +{to:.0} %");
    if let Some(full) = p.full_over_static {
        line("full over static (PowerInfer)", range(full), more(Some(Policy::Full), Some(Policy::Static)));
    }
    if let Some(full) = p.full_over_llama_cpp {
        line("full over dense layer offload (llama.cpp)", range(full), more(Some(Policy::Full), None));
    }
    if let Some(ablation) = p.ablation {
        for (policy, published) in [Policy::Micro, Policy::Macro, Policy::Full].into_iter().zip(ablation) {
            let what = format!("{} over static (figure 10)", policy.name());
            line(&what, format!("+{published:.1} %"), more(Some(policy), Some(Policy::Static)));
        }
    }
    if let (Some(published), Some(dense)) = (p.llama_cpp, speed(None)) {
        let what = "tokens/s of dense layer offload (llama.cpp, table 4)";
        line(what, published.to_string(), format!("{dense:.1} sim."));
    }
    let shares = [Policy::Static, Policy::Full].map(|policy| {
        let row = r.rows.iter().find(|row| row.policy == Some(policy));
        row.and_then(|row| row.outcome.as_ref()).map_or("-".into(), |o| format!("{:.1} %", 100.0 * o.gpu_share))
    });
    if let Some((fixed, full)) = p.gpu_share {
        let what = "on GPU: static, full (5.3, mean of PC-High)";
        line(what, format!("{fixed:.0} %, {full:.0} %"), shares.join(", "));
    }
    format!("{table}\n")
}

fn plot(r: &Report) -> Plot {
    let mut policies: Vec<Option<Policy>> = Vec::new();
    r.rows.iter().for_each(|row| {
        if !policies.contains(&row.policy) {
            policies.push(row.policy)
        }
    });
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let line = |&policy: &Option<Policy>| {
        let rows = r.rows.iter().filter(|row| row.policy == policy);
        let points = rows.filter_map(|row| Some((gib(row.vram_bytes?), row.tokens_per_s)));
        Line::new(policy.map_or("dense layers", Policy::name), points)
    };
    let lines: Vec<Line> = policies.iter().map(line).collect();
    let all = || lines.iter().flat_map(|l| &l.points);
    let right = all().map(|p| p.x).fold(0.0, f64::max);
    Plot {
        title: format!("{} on {}, simulated", r.model, r.machine),
        of: String::new(),
        x: Axis::new("VRAM, GiB", 0.0, (right * 1.03).max(1e-3)),
        y: Axis::around("simulated decoding, tokens/s", all().map(|p| p.y).chain([0.0])),
        lines,
        dots: true,
        names: Vec::new(),
    }
}
