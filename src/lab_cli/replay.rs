use crate::cli::chart::{self, Axis, Line, Plot};
use crate::cli::lab_arg::{parse_theta, thetas};
use crate::cli::policy_arg;
use crate::cli::progress::{Progress, Unit};
use crate::error::{Error, Result};
use crate::formats::profile_file;
use crate::formats::trace_file::TraceFile;
use crate::ids::PublishedId;
use crate::lab::bound::{Uses, bound_of};
use crate::lab::clusters::computed_share;
use crate::lab::replay::{self, Outcome, ReplayOptions, frequencies, likeness};
use crate::lab::simulate::calibration::Statistics;
use crate::lab::synth::experts::Routing;
use crate::placement::policy::{self, PlacementPolicy as Placement};
use crate::profile::Profile;
use crate::scheduler::costs::{Lane, StageCosts};
use crate::scheduler::h200;
use crate::scheduler::{Policy, Rules};
use comfy_table::{CellAlignment, Table};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Run a recorded trace under policies, budgets and link rates
///
/// For each share of the neurons that fits into VRAM and each link rate it says which share of the active neurons would have been
/// computed on the device (GPU share): under every policy, and at most, had the future been known (bound). What is frequent beforehand
/// is learnt from a profile, or from the first half of the texts, which then do not count.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A file of `dynamicinfer-lab record`
    trace: PathBuf,
    /// Policies [default: all]
    #[arg(long, num_args = 1.., value_name = "POLICY", ignore_case = true, value_parser = policy_arg::names())]
    policy: Vec<Policy>,
    /// Shares of the FFN neurons that the device has room for
    #[arg(long, num_args = 1.., value_name = "SHARE", default_values_t = [0.3, 0.5, 0.7])]
    ffn_share: Vec<f64>,
    /// Link rates: percent of a layer's neurons that are carried while one layer is computed
    #[arg(long, num_args = 1.., value_name = "PERCENT", default_values_t = [2.0, 5.0, 10.0, 15.0])]
    link: Vec<f64>,
    /// Activation profile of the model that says which neurons are frequent, instead of the first texts
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Texts at the beginning of the trace that teach what is frequent and are not counted, where there is no --profile [default: half]
    #[arg(long, value_name = "N", conflicts_with = "profile")]
    known: Option<usize>,
    /// Neurons that begin on the device: static (those most frequent beforehand), own (those most frequent in the very texts that are counted:
    /// the bound of what stays), first (the first of each layer: nothing is known) or random
    #[arg(long, value_enum, default_value_t = Start::Static)]
    placement: Start,
    /// Probability from which on a neuron is computed; frequencies count those [default: as the trace was recorded, else 0.5]
    #[arg(long)]
    threshold: Option<f32>,
    /// What a move costs, in computed neurons
    #[arg(long, value_name = "NEURONS", default_value_t = 0.0)]
    cost: f64,
    /// Look-ahead is never wrong: what its errors cost is the difference
    #[arg(long, hide_short_help = true)]
    foreseen: bool,
    #[command(flatten)]
    constants: Constants,
    /// Balance thresholds, under policies that do, by what an H200 takes for a layer's neurons; JSON's balanced_us is a layer's time then
    #[arg(long, hide_short_help = true)]
    balance: bool,
    /// Also say what is computed if neurons are read in clusters of so many neighbours, the most frequent ones together
    #[arg(long, num_args = 1.., value_name = "NEURONS")]
    clusters: Vec<usize>,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Leave out the bound, which takes as long as a policy
    #[arg(long)]
    no_bound: bool,
    /// With --json, also how active the neurons are and how far apart tokens, texts and hot sets
    #[arg(long, requires = "json")]
    statistics: bool,
    /// Machine-readable
    #[arg(long)]
    json: bool,
    /// Write plots into this directory: gpu_share_0.3.svg and the like
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
}

/// Constants in place of a policy's own.
#[derive(clap::Args)]
struct Constants {
    /// Weight of a neuron's frequency beside its predicted activation, instead of the policy's own
    #[arg(long, hide_short_help = true)]
    lambda: Option<f32>,
    /// How many times lambda a hit that a move costs adds to it, instead of the policy's own
    #[arg(long, hide_short_help = true)]
    dearer: Option<f32>,
    /// Where so many times what the link brings is missing, it is as scarce as can be, instead of the policy's own; 1 for always
    #[arg(long, hide_short_help = true)]
    scarce: Option<f32>,
    /// Do not bring all that is foreseen where the link can: a layer is worth what its neurons are
    #[arg(long, hide_short_help = true)]
    no_complete: bool,
    /// What is left of a frequency a token later, instead of the policy's own
    #[arg(long, hide_short_help = true)]
    decay: Option<f32>,
    /// How much more important a newcomer must be, instead of the policy's own
    #[arg(long, hide_short_help = true)]
    margin: Option<f32>,
    /// Frequency from which on a resident stays, instead of the policy's own; above 1 for none
    #[arg(long, hide_short_help = true)]
    phi: Option<f32>,
    /// Length of the link's queue, in times what it carries during the layers of look-ahead
    #[arg(long, hide_short_help = true)]
    window: Option<f32>,
    /// With --balance, neurons that a pair of thresholds may add, as a share of a layer's [default: the policy's own; inf for no limit]
    #[arg(long, hide_short_help = true)]
    max_more: Option<f64>,
    /// With --balance, the device's threshold in place of a balanced one
    #[arg(long, hide_short_help = true, value_name = "PROBABILITY", requires_all = ["theta_cpu", "balance"], value_parser = parse_theta, allow_hyphen_values = true)]
    theta_gpu: Option<f32>,
    /// The same of the CPU
    #[arg(long, hide_short_help = true, value_name = "PROBABILITY", requires = "theta_gpu", value_parser = parse_theta, allow_hyphen_values = true)]
    theta_cpu: Option<f32>,
}

impl Constants {
    /// The policy's rules with these constants.
    fn of(&self, rules: Rules) -> Rules {
        Rules {
            lambda: self.lambda.filter(|_| rules.lambda > 0.0).unwrap_or(rules.lambda),
            dearer: self.dearer.unwrap_or(rules.dearer),
            scarce: self.scarce.unwrap_or(rules.scarce),
            completes: rules.completes && !self.no_complete,
            decay: self.decay.unwrap_or(rules.decay),
            margin: self.margin.unwrap_or(rules.margin),
            pinned: self.phi.filter(|_| rules.pinned.is_finite()).unwrap_or(rules.pinned),
            window: self.window.unwrap_or(rules.window),
            max_more: self.max_more.unwrap_or(rules.max_more),
            pair: thetas(self.theta_gpu, self.theta_cpu).or(rules.pair),
            ..rules
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  dynamicinfer-lab record demo --text a.txt b.txt -o demo.trace
  dynamicinfer-lab replay demo.trace
  dynamicinfer-lab replay demo.trace --policy static full --ffn-share 0.2 --link 1 2 4 8 --plot plots
  dynamicinfer-lab replay demo.trace --profile demo.activation.profile --placement random";

/// What is on the device at the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Start {
    Static,
    Own,
    First,
    Random,
}

impl Start {
    /// The slots of each layer for a share of all neurons, and what they hold. `history` and `own` are frequencies, `[layers][ffn]`.
    fn place(
        self,
        history: &[Vec<f32>],
        own: &[Vec<f32>],
        share: f64,
        seed: u64,
    ) -> (Vec<usize>, Vec<Vec<PublishedId>>) {
        let count = |f: &f32| (f64::from(*f) * 1e9) as u64;
        let counts = |of: &[Vec<f32>]| of.iter().map(|f| f.iter().map(count).collect()).collect::<Vec<Vec<u64>>>();
        let (counts, policy) = match self {
            Start::Static => (counts(history), Placement::Static),
            Start::Own => (counts(own), Placement::Static),
            Start::Random => (counts(history), Placement::Random),
            Start::First => {
                let slots = (share * history[0].len() as f64).round() as usize;
                let first = (0..slots).map(PublishedId::new).collect();
                return (vec![slots; history.len()], vec![first; history.len()]);
            }
        };
        let slots = replay::slots(&counts, share);
        let placed = policy::neurons(policy, &counts, &slots, seed);
        (slots, placed)
    }
}

#[derive(Serialize)]
struct Row {
    ffn_share: f64,
    /// Share of the uses on the device with whole layers of experts there.
    whole_layers: f64,
    link_percent: f64,
    /// None for the bound.
    policy: Option<Policy>,
    gpu_share: f64,
    #[serde(flatten)]
    outcome: Outcome,
    /// With --balance, the mean time of a layer by the costs that thresholds were balanced by, us.
    #[serde(skip_serializing_if = "Option::is_none")]
    balanced_us: Option<f64>,
    /// Mean times of a layer by each set of fixed costs.
    times: Vec<Times>,
}

/// Mean times of a layer, us; of the bound, what no policy is faster than.
#[derive(Serialize)]
struct Times {
    costs: &'static str,
    ffn_us: f64,
    layer_us: f64,
    /// Of a layer of 7B, of which the same shares are the CPU's and move.
    layer_7b_us: f64,
}

/// Neurons of a layer of 7B.
const NEURONS_7B: f64 = 11008.0;

impl Row {
    /// `stage_ns` says what all stages take by costs; `neurons` are a layer's.
    fn new(
        (ffn_share, whole_layers, link_percent): (f64, f64, f64),
        policy: Option<Policy>,
        outcome: Outcome,
        stage_ns: impl Fn(&StageCosts) -> f64,
        neurons: usize,
    ) -> Row {
        let layers = outcome.layers.max(1) as f64;
        let times = |(costs, by): (&'static str, StageCosts)| {
            let seven = scaled(by, NEURONS_7B / neurons as f64);
            let [ffn_us, ffn_7b_us] = [by, seven].map(|by| stage_ns(&by) / layers / 1e3);
            let attention_us = h200::ATTENTION_NS / 1e3;
            Times { costs, ffn_us, layer_us: attention_us + ffn_us, layer_7b_us: attention_us + ffn_7b_us }
        };
        let balanced_us = (outcome.stage_ns > 0.0).then_some((h200::ATTENTION_NS + outcome.stage_ns / layers) / 1e3);
        Row {
            ffn_share,
            whole_layers,
            link_percent,
            policy,
            gpu_share: outcome.gpu_share(),
            outcome,
            balanced_us,
            times: [("h200", h200::stage()), ("pc", replay::desktop())].map(times).into(),
        }
    }
}

/// The same costs where a layer has `times` as many neurons.
fn scaled(costs: StageCosts, times: f64) -> StageCosts {
    let lanes = costs.lanes.map(|lane| Lane { neuron_ns: lane.neuron_ns * times, ..lane });
    StageCosts { lanes, move_ns: costs.move_ns * times, ..costs }
}

#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    layers: usize,
    neurons: usize,
    ahead: usize,
    predictor: &'a str,
    /// Texts that were counted, and their tokens.
    texts: usize,
    tokens: usize,
    /// Mean Jaccard distances: of the active sets of neighbouring tokens, of the 40 % most active neurons of two texts.
    token_distance: f64,
    text_distance: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    statistics: Option<Statistics>,
    placement: Start,
    cost: f64,
    /// Sizes of clusters, and the share of the neurons that lie in one with an active neuron.
    clusters: Vec<(usize, f64)>,
    /// Of a mixture: how many experts a token uses, and how they are used.
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<(usize, Routing)>,
    rows: Vec<Row>,
}

/// That the numbers typed make sense.
fn check(args: &Args) -> Result<()> {
    for (name, values, top) in [("--ffn-share", &args.ffn_share, 1.0), ("--link", &args.link, 100.0)] {
        if let Some(bad) = values.iter().find(|v| !(**v > 0.0 && **v <= top)) {
            return Err(Error::Usage(format!("{name} {bad}: take numbers above 0 to {top}")));
        }
    }
    if args.clusters.contains(&0) {
        return Err(Error::Usage("--clusters 0: take 1 neuron or more".into()));
    }
    let threshold = f64::from(args.threshold.unwrap_or(0.0));
    for (name, value, top) in [("--cost", args.cost, 100.0), ("--threshold", threshold, 1.0)] {
        if !(0.0..=top).contains(&value) {
            return Err(Error::Usage(format!("{name} {value}: take 0 to {top}")));
        }
    }
    Ok(())
}

pub fn run(args: Args) -> Result<()> {
    check(&args)?;
    let trace = TraceFile::open(&args.trace)?;
    let h = trace.header();
    let skip = if args.profile.is_some() { 0 } else { args.known.unwrap_or(h.texts.len().div_ceil(2)) };
    if skip >= h.texts.len() || (skip == 0 && args.profile.is_none()) {
        return Err(Error::Usage(format!(
            "the trace has {} texts, and {skip} of them are to teach what is frequent; give --profile, or record more",
            h.texts.len()
        )));
    }
    let history = match &args.profile {
        None => frequencies(&trace, |text| text < skip),
        Some(path) => known(path, &trace)?,
    };
    let own = if args.placement == Start::Own { frequencies(&trace, |text| text >= skip) } else { Vec::new() };
    let policies = if args.policy.is_empty() { Policy::ALL.to_vec() } else { args.policy.clone() };
    // A row for each policy, and one for the bound, which is of one threshold for device and CPU.
    let has_bound = !args.no_bound && !args.balance;
    let each = policies.len() + usize::from(has_bound);
    let all = (args.ffn_share.len() * args.link.len() * each) as u64;
    let progress = Progress::new("replaying", Unit::Percent);
    let mut rows = Vec::new();
    for &share in &args.ffn_share {
        let (slots, placed) = args.placement.place(&history, &own, share, args.seed);
        let whole_layers = replay::whole_layers(h, &slots);
        let uses = has_bound.then(|| Uses::of(&trace, skip, &placed, &h.thresholds(args.threshold)));
        for &percent in &args.link {
            let link = percent / 100.0 * h.ffn as f64;
            for &policy in &policies {
                let setting = ReplayOptions {
                    policy,
                    rules: args.constants.of(replay::rules(policy, h)),
                    thresholds: h.thresholds(args.threshold),
                    slots: slots.clone(),
                    link,
                    placed: placed.clone(),
                    history: history.clone(),
                    cost: args.cost,
                    foreseen: args.foreseen,
                    stage: args.balance.then(h200::with_device),
                    seed: args.seed,
                    skip,
                };
                let outcome = replay::replay(&trace, &setting);
                let by = |costs: &StageCosts| outcome.stage_ns_by(costs);
                rows.push(Row::new((share, whole_layers, percent), Some(policy), outcome, by, h.ffn));
                progress.step(rows.len() as u64, all)?;
            }
            if let Some(uses) = &uses {
                let (hits, active) = bound_of(&trace, skip, &slots, &placed, link);
                let outcome = Outcome { active, hits, layers: uses.stages(), ..Outcome::default() };
                let by = |costs: &StageCosts| uses.least_ns(&slots, link, costs);
                rows.push(Row::new((share, whole_layers, percent), None, outcome, by, h.ffn));
            }
            progress.step(rows.len() as u64, all)?;
        }
    }
    progress.finish();
    let (token_distance, text_distance) = likeness(&trace);
    let report = Report {
        model: &h.model,
        layers: h.layers,
        neurons: h.ffn,
        ahead: h.ahead,
        predictor: &h.predictor,
        texts: h.texts.len() - skip,
        tokens: h.texts[skip..].iter().map(|t| t.tokens).sum(),
        token_distance,
        text_distance,
        statistics: args.statistics.then(|| Statistics::of(&trace)),
        placement: args.placement,
        cost: args.cost,
        clusters: args.clusters.iter().map(|&size| (size, computed_share(&trace, &history, skip, size))).collect(),
        experts: h.experts_used.map(|used| (used, Routing::of(&trace))),
        rows,
    };
    if let Some(dir) = &args.plot {
        std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
        for &share in &args.ffn_share {
            let path = dir.join(format!("gpu_share_{share}.svg"));
            chart::write(&path, &plot(&report, &policies, share))?;
            eprintln!("{} written", path.display());
        }
    }
    if args.json { crate::cli::print_json(&report) } else { crate::cli::print(&table(&report, &policies)) }
}

/// Frequencies of a profile.
fn known(path: &Path, trace: &TraceFile) -> Result<Vec<Vec<f32>>> {
    let file = profile_file::open(path)?;
    let (h, t) = (&file.header, trace.header());
    if h.fingerprint != t.fingerprint || (h.layers, h.ffn) != (t.layers, t.ffn) {
        let why = format!("the profile belongs to {}, the trace to {}; take that model's profile", h.model, t.model);
        return Err(Error::bad(path, "fingerprint", why));
    }
    let profile = Profile::read(&file)?;
    let tokens = profile.texts.iter().map(|t| t.info.tokens).sum::<usize>() as f32;
    let of = |layer| profile.counts(layer).iter().map(|&n| n as f32 / tokens).collect();
    Ok((0..h.layers).map(of).collect())
}

fn table(report: &Report<'_>, policies: &[Policy]) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    let head = ["in VRAM", "link"].into_iter().map(String::from);
    let names = policies.iter().map(|p| p.name().to_owned());
    let layers = report.experts.map(|_| "layers".to_owned());
    let has_bound = report.rows.iter().any(|row| row.policy.is_none());
    let ends = if has_bound { vec!["bound".to_owned(), "gap closed".to_owned()] } else { Vec::new() };
    table.set_header(head.chain(layers).chain(names).chain(ends));
    let experts = report.experts.is_some();
    for rows in report.rows.chunks_exact(policies.len() + usize::from(has_bound)) {
        let of = |policy: Option<Policy>| rows.iter().find(|r| r.policy == policy).map(|r| r.gpu_share);
        let closed = match (of(Some(Policy::Static)), of(Some(Policy::Full)), of(None)) {
            (Some(s), Some(f), Some(b)) if b > s => format!("{:.0} %", 100.0 * (f - s) / (b - s)),
            _ => "-".into(),
        };
        let percent = |share: f64| format!("{:.1}", 100.0 * share);
        let mut cells = vec![format!("{:.0} %", 100.0 * rows[0].ffn_share), format!("{} %", rows[0].link_percent)];
        cells.extend(experts.then(|| percent(rows[0].whole_layers)));
        cells.extend(rows.iter().map(|r| percent(r.gpu_share)));
        cells.extend(has_bound.then_some(closed));
        table.add_row(cells);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let clusters: Vec<String> =
        report.clusters.iter().map(|&(size, share)| format!("of {size}: {}", percent(share))).collect();
    let clusters = match clusters.is_empty() {
        true => String::new(),
        false => format!("In clusters with an active neuron, {}\n", clusters.join(", ")),
    };
    format!(
        "{}: {} tokens of {} texts, {} layers of {} {}; {} looks {} ahead. Neighbouring tokens are {:.3} apart{}.\n{}Active \
         neurons computed on the device, %; gap closed: by full, between static and the bound\n{table}\n{clusters}",
        report.model,
        report.tokens,
        report.texts,
        report.layers,
        report.neurons,
        if experts { "experts" } else { "neurons" },
        report.predictor,
        report.ahead,
        report.token_distance,
        report.text_distance.map_or(String::new(), |d| format!(", texts {d:.3}")),
        report.experts.map_or(String::new(), |(used, routing)| routed(used, &routing)),
    )
}

/// How experts are used.
fn routed(used: usize, r: &Routing) -> String {
    format!(
        "A token uses {used} of a layer's experts: half of the uses come back within {:.1} tokens; skew {:.2}, in a text {:.2}; {:.0} % of \
         them are foreseen. An expert counts as a neuron here; layers: whole layers of experts in VRAM.\n",
        r.reuse,
        r.skew,
        r.skew_in_text,
        100.0 * r.recall
    )
}

fn plot(report: &Report<'_>, policies: &[Policy], share: f64) -> Plot {
    let line = |policy: Option<Policy>| {
        let rows = report.rows.iter().filter(|r| r.policy == policy && r.ffn_share == share);
        Line::new(policy.map_or("bound", Policy::name), rows.map(|r| (r.link_percent, 100.0 * r.gpu_share)))
    };
    let lines: Vec<Line> = policies.iter().map(|&p| Some(p)).chain([None]).map(line).collect();
    let all = || lines.iter().flat_map(|l| &l.points);
    let right = all().map(|p| p.x).fold(1.0, f64::max);
    let what = if report.experts.is_some() { "experts" } else { "neurons" };
    let of =
        format!("{}; {} tokens of {} texts; {} predicts", report.model, report.tokens, report.texts, report.predictor);
    Plot {
        title: format!("{:.0} % of the {what} in VRAM", 100.0 * share),
        of,
        x: Axis::new(format!("link: {what} of a layer that are carried while one is computed, %"), 0.0, 1.03 * right),
        y: Axis::around(&format!("active {what} on the device, %"), all().map(|p| p.y)),
        lines,
        dots: true,
        names: Vec::new(),
    }
}
