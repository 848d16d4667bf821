use super::machine_arg;
use super::model_arg::KvArg;
use super::plan_ram;
use super::plan_subject::{Prediction, Subject, SubjectArgs, prediction, subject};
use super::size;
use crate::cache::Tier;
use crate::cpu::MAX_COLUMNS;
use crate::error::{Error, Result, printable};
use crate::formats::machine_profile::MachineProfile;
use crate::formats::placement_file::{LayerPlacement, PlacementFile, PlacementPolicy, VERSION};
use crate::ids::PublishedId;
use crate::model::layer::FfnParts;
use crate::model::{KvType, Model, ModelConfig};
use crate::open::{check_device_can, pinnable};
use crate::placement::estimate::{Bound, Estimate, Reads, estimate};
use crate::placement::memory_plan::{Footprint, KvPlace, PartName, Plan, Request, plan};
use crate::placement::policy;
use crate::placement::shapes::footprint;
use crate::scheduler::Policy;
use bytemuck::allocation::TransparentWrapperAlloc;
use comfy_table::{CellAlignment, Table};
use std::path::{Path, PathBuf};

/// Plan how a model divides over VRAM, memory and disk
///
/// --vram covers everything on the device, to the byte. Attention, head, predictors and buffers come first, then the neurons that are
/// active most (PowerInfer 6), then keys, values and embeddings. Attention without room stays in host memory and is copied for every token
/// and every part of a prompt. Without an activation profile every neuron counts the same.
///
/// Without --vram, --ram limits the memory of a packed model or a mixture, and other neurons or experts are read from disk: the plan shows
/// how fast it decodes with this memory, and with less. --min-speed finds the least memory that is fast enough.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    what: SubjectArgs,
    /// Memory budget on the device for everything: 8GiB, 8GB, 8192MiB or bytes
    #[arg(long, value_name = "SIZE", value_parser = size::parse, allow_hyphen_values = true)]
    vram: Option<u64>,
    /// Host memory limit. With --vram the plan fails if it needs more; without --vram neurons that exceed it stay on disk
    #[arg(long, value_name = "SIZE", value_parser = size::parse, allow_hyphen_values = true)]
    ram: Option<u64>,
    /// Find the least memory for this many tokens/s, with the other neurons on disk
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true, conflicts_with_all = ["vram", "ffn_share", "shape"])]
    min_speed: Option<f64>,
    /// Most threads to compute with; without --vram [default: one per core]
    #[arg(short, long, conflicts_with_all = ["vram", "ffn_share"])]
    threads: Option<usize>,
    /// Largest share of the neurons on the device, above 0 to 1; without --vram it sets the budget
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    ffn_share: Option<f64>,
    /// Context: tokens of prompt and answer together [default: the model's, at most 4096]
    #[arg(short, long = "ctx-size")]
    context: Option<usize>,
    /// Sequences that are decoded at once, each with keys and values, as `serve --parallel`
    #[arg(long, value_name = "N", default_value_t = 1)]
    parallel: usize,
    /// Type of the key/value cache
    #[arg(long, value_enum, ignore_case = true, default_value_t = KvArg::F16)]
    kv: KvArg,
    /// Place of keys and values: auto uses the device if that makes a token faster
    #[arg(long, value_enum, ignore_case = true, default_value_t = KvPlaceArg::Auto)]
    kv_place: KvPlaceArg,
    /// Machine to plan for: a profile from `measure --save`, or a .toml file [default: `default`, else measured now]
    #[arg(long, value_name = "NAME")]
    machine: Option<PathBuf>,
    /// Neurons on the device at the start: the plan's, random ones, or none
    #[arg(long, value_enum, ignore_case = true, default_value_t = PolicyArg::Static)]
    policy: PolicyArg,
    /// Plan for `run --policy static`: keep layers on the device whole where that saves a token more time than hot neurons in all layers
    #[arg(long)]
    whole_layers: bool,
    /// Seed of --policy random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the placement to this file
    #[arg(short, long, value_name = "FILE", conflicts_with = "shape")]
    output: Option<PathBuf>,
    /// Replace an existing file
    #[arg(short, long)]
    force: bool,
    /// Instead of planning, check that this placement fits the model and the budget
    #[arg(long, value_name = "FILE", conflicts_with_all = ["shape", "output"])]
    check: Option<PathBuf>,
    /// Also solve an integer program, for at most this many seconds, and compare
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    ilp: Option<f64>,
    /// Without --vram: use the tokens of this trace from `dynamicinfer-lab record` instead of tokens drawn by the profile
    #[arg(long, value_name = "FILE", conflicts_with_all = ["vram", "ffn_share", "shape"])]
    trace: Option<PathBuf>,
    /// Policy that selects the neurons to keep in memory if not all fit, as in `bench`
    #[arg(long, hide_short_help = true, value_name = "POLICY")]
    ram_policy: Option<Policy>,
    /// Machine-readable
    #[arg(long)]
    json: bool,
}

#[derive(clap::ValueEnum, Clone, Copy)]
enum KvPlaceArg {
    Auto,
    Host,
    Device,
}

impl KvPlaceArg {
    /// The place of keys and values of a type, as `run` has it.
    fn place(self, kv: KvType) -> Result<KvPlace> {
        match (self, kv.on_device()) {
            (KvPlaceArg::Auto, true) => Ok(KvPlace::Auto),
            (KvPlaceArg::Device, true) => Ok(KvPlace::Device),
            (KvPlaceArg::Device, false) => Err(Error::Usage(format!(
                "a device reads keys and values in f16, not in {}: take --kv f16 or --kv-place host",
                kv.name()
            ))),
            (KvPlaceArg::Auto | KvPlaceArg::Host, _) => Ok(KvPlace::Host),
        }
    }
}

#[derive(clap::ValueEnum, Clone, Copy)]
enum PolicyArg {
    Static,
    Random,
    None,
}

pub fn run(args: Args) -> Result<()> {
    if args.vram.is_none() && args.ffn_share.is_none() && args.ram.is_none() && args.min_speed.is_none() {
        return Err(Error::Usage(
            "the plan needs a target: --vram 8GiB (memory of a GPU), --ram 16GiB (host memory without a GPU, the \
             rest on disk) or --min-speed 10 (the least host memory for this many tokens/s)"
                .into(),
        ));
    }
    if let Some(share) = args.ffn_share.filter(|s| !(*s > 0.0 && *s <= 1.0)) {
        return Err(Error::Usage(format!("--ffn-share {share}: give a share above 0 and at most 1")));
    }
    if let Some(seconds) = args.ilp.filter(|s| !(*s > 0.0 && *s <= 86400.0)) {
        return Err(Error::Usage(format!("--ilp {seconds}: give seconds above 0 and at most 86400")));
    }
    if let Some(path) = args.output.as_ref().filter(|path| path.exists() && !args.force) {
        return Err(Error::Usage(format!("{} already exists; add --force to replace it", path.display())));
    }
    let on_device = args.vram.is_some() || args.ffn_share.is_some();
    let subject = subject(&args.what, on_device)?;
    let context = args.context.unwrap_or(subject.config.context.min(4096));
    if context == 0 || context > 1 << 24 {
        return Err(Error::Usage(format!("-c {context}: give 1 to {}", 1 << 24)));
    }
    if !(1..=MAX_COLUMNS).contains(&args.parallel) {
        return Err(Error::Usage(format!("--parallel {}: give 1 to {MAX_COLUMNS}", args.parallel)));
    }
    let kv = args.kv.kv();
    let footprint = match (&subject.model, &args.what.shape) {
        (Some(model), _) => Footprint::of_model(model, context, kv),
        (None, name) => footprint(name.as_deref().unwrap_or_default(), args.what.quant_of_shape()?, context, kv)?.0,
    };
    let prediction = prediction(&subject, args.what.predictor, on_device)?;
    if !on_device {
        return without_device(&args, &subject, &prediction, context, kv);
    }
    if let Some(model) = &subject.model {
        check_device_can(model, "plan its source file, or leave out --vram")?;
    }
    let machine = machine_arg::find(args.machine.as_deref())?;
    let skips_host = skips_host(&subject, &prediction);
    let request = Request {
        vram: args.vram,
        ram: args.ram,
        ffn_share: args.ffn_share,
        kv: args.kv_place.place(kv)?,
        sequences: args.parallel,
        predictor_bytes: prediction.bytes,
        computed_share: prediction.computed_share,
        ilp_seconds: args.ilp,
        chunk: None,
        host: args.ram.map(|ram| footprint.host_room(ram, args.parallel)),
        // Attention is not copied from a model that is partly on disk.
        streamed_layers: args.ram.is_some_and(|ram| ram < footprint.whole_bytes(args.parallel)).then_some(0),
        // Where nothing is known of the neurons, whole layers would be any layers.
        skips_host: skips_host && args.whole_layers && (subject.model.is_none() || subject.tokens > 0),
    };
    let plan = plan(&footprint, &subject.counts, &machine, &request)?;
    if let Some(path) = &args.check {
        return check(path, &subject, &plan, footprint.saved_by_streaming(plan.streamed_layers));
    }
    if let (Some(path), Some(model)) = (&args.output, &subject.model) {
        placement(&args, model, &subject.counts, &plan).write(path)?;
        eprintln!("written to {}", path.display());
    }
    let c = &subject.config;
    // Whole experts, and neurons without a predictor, are read with all their rows.
    let whole = c.has_whole_experts() || prediction.name == "none";
    let reads = Reads {
        predictor_bytes: prediction.bytes,
        computed_share: prediction.computed_share,
        active_share: subject.active_share,
        rows: if whole { 1 } else { c.ffn_kind.rows() },
        placed_by_rows: prediction.name == "gates",
        skips_host,
    };
    let expected = estimate(&footprint, &plan, &machine, reads);
    if !args.json {
        let text = shown(&args, &plan, &subject, &machine, prediction.name);
        let last = conclusion(&args, &plan, &subject, &expected);
        return super::print(&(text + &speed(&expected, &prediction, &machine) + &last));
    }
    let mut json = serde_json::to_value(&plan).expect("plain data");
    json["details"]["predictor"] = prediction.name.into();
    json["details"]["expected"] = serde_json::to_value(expected).expect("plain data");
    json["details"]["impacts_from"] = subject.counted.into();
    json["details"]["machine"] = serde_json::to_value(&machine).expect("plain data");
    super::print_json(&json)
}

/// Whether a layer whose neurons are all on the device is computed without the host.
fn skips_host(subject: &Subject, prediction: &Prediction) -> bool {
    let biases = |model: &Model| model.layers.iter().any(|layer| !layer.down_bias.is_empty());
    let of_host = prediction.name == "router" || prediction.name == "gates" || subject.config.is_mixture();
    !of_host && !subject.model.as_ref().is_some_and(biases)
}

/// Plans which neurons stay in memory and which on disk.
fn without_device(args: &Args, subject: &Subject, prediction: &Prediction, context: usize, kv: KvType) -> Result<()> {
    let of_device = [
        ("--machine", args.machine.is_some()),
        ("--output", args.output.is_some()),
        ("--check", args.check.is_some()),
        ("--ilp", args.ilp.is_some()),
    ];
    if let Some((option, _)) = of_device.iter().find(|(_, given)| *given) {
        return Err(Error::Usage(format!("{option} needs a plan for a device; give --vram SIZE, too")));
    }
    let asked = plan_ram::Asked {
        name: args.what.model.as_deref().unwrap_or(Path::new("")),
        ram: args.ram,
        min_speed: args.min_speed,
        threads: args.threads,
        context: (context, args.context.is_some()),
        kv,
        parallel: args.parallel,
        json: args.json,
        policy: args.ram_policy,
        trace: args.trace.as_deref(),
    };
    plan_ram::run(&asked, subject, prediction)
}

/// The expected tokens/s, their bound, and the time of a token.
fn speed(e: &Estimate, prediction: &Prediction, machine: &MachineProfile) -> String {
    let rates = match (machine.measured.is_empty(), machine.assumed.is_empty()) {
        (true, _) => "assumed rates",
        (false, true) => "measured rates",
        (false, false) => "partly measured rates",
    };
    let bound = match e.bound {
        Bound::DeviceMemory => "the device's memory rate",
        Bound::HostMemory => "the processor's memory rate",
        Bound::Link => "the link, for copies of attention",
        Bound::Waits => "copies and waits between host and device",
    };
    format!(
        "expected, by {rates}: at most {:.1} tokens/s, bound by {bound}; on the processor alone at most {:.1}\n\
         a token: {:.2} ms of device memory, {:.2} of host memory at the same time, {:.2} of waits; {:.0} % of the {}s computed \
         ({}), context short\n",
        e.tokens_per_s,
        e.cpu_tokens_per_s,
        e.device_ms,
        e.host_ms,
        e.wait_ms,
        100.0 * e.computed_share,
        if prediction.name == "router" { "expert" } else { "neuron" },
        prediction.counted
    )
}

/// The last lines: the plan in one sentence, and the command that runs it.
fn conclusion(args: &Args, plan: &Plan, subject: &Subject, expected: &Estimate) -> String {
    let c = &subject.config;
    let slots: usize = plan.layers.iter().map(|l| l.slots).sum();
    let units = format!("{}s", if c.neurons_inside() { "neuron" } else { c.parts().noun() });
    let sentence = format!(
        "\nplan: {} on the device hold {:.0} % of the {units}, for at most {:.1} tokens/s\n",
        super::human_bytes(plan.budget_bytes),
        100.0 * slots as f64 / (c.movable_layers() * c.movable()).max(1) as f64,
        expected.tokens_per_s
    );
    let Some(model) = args.what.model.as_ref() else { return sentence };
    let mut command = format!("run it: dynamicinfer run {} --device cuda", printable(&model.to_string_lossy()));
    command += &args.vram.map_or(String::new(), |vram| format!(" --vram {}", size::written(vram)));
    command += &args.ffn_share.map_or(String::new(), |share| format!(" --ffn-share {share}"));
    command += &args.ram.map_or(String::new(), |ram| format!(" --ram {}", size::written(ram)));
    command += &args.context.map_or(String::new(), |context| format!(" -c {context}"));
    if let Some(path) = &args.output {
        command += &format!(" --placement {}", printable(&path.to_string_lossy()));
    }
    format!("{sentence}{command}\n")
}

fn placement(args: &Args, model: &Model, counts: &[Vec<u64>], plan: &Plan) -> PlacementFile {
    let policy = match args.policy {
        PolicyArg::Static => PlacementPolicy::Static,
        PolicyArg::Random => PlacementPolicy::Random,
        PolicyArg::None => PlacementPolicy::None,
    };
    let slots: Vec<usize> = plan.layers.iter().map(|l| l.slots).collect();
    let neurons = policy::neurons(policy, counts, &slots, args.seed);
    PlacementFile {
        version: VERSION,
        fingerprint: model.fingerprint().to_owned(),
        model: model.config.name.clone(),
        ffn: model.config.movable(),
        policy,
        seed: (policy == PlacementPolicy::Random).then_some(args.seed),
        layers: slots
            .into_iter()
            .zip(neurons)
            .map(|(slots, neurons)| LayerPlacement { slots, neurons: PublishedId::peel_vec(neurons) })
            .collect(),
    }
}

/// That a placement is this model's and its slots fit where the plan's do, which saves so many bytes of attention's.
fn check(path: &std::path::Path, subject: &Subject, plan: &Plan, saved_bytes: u64) -> Result<()> {
    let placement = PlacementFile::read(path)?;
    let (config, model) = (&subject.config, subject.model.as_ref().expect("--check takes a model"));
    placement.check_owner(path, model.fingerprint(), config.layers().len(), config.movable())?;
    let slots: u64 = placement.layers.iter().map(|l| l.slots as u64).sum();
    let needed = plan.without_neurons_bytes + slots * plan.details.block_bytes;
    if needed > plan.budget_bytes {
        return Err(Error::Memory(format!(
            "{}: its {slots} slots make {needed} bytes on the device and the budget is {}; give --vram {} or more, or \
             plan again",
            printable(&path.to_string_lossy()),
            plan.budget_bytes,
            // With more, all of attention is on the device.
            needed + saved_bytes
        )));
    }
    eprintln!("{} is this model's; its {slots} slots make {needed} bytes on the device", path.display());
    Ok(())
}

/// The host memory that a GPU needs pinned, which it reads directly.
fn pinned(bytes: u64, free: Option<u64>) -> String {
    let all = format!(
        "pinned for the GPU: {} of host memory (all movable weights), which cannot be swapped",
        super::human_bytes(bytes)
    );
    match free.map(|free| (free, pinnable(free))) {
        Some((free, most)) if bytes > most => format!(
            "{all}; of the {} free on this machine {} can be pinned, and the processor copies the rest through 32 \
             MiB\n",
            super::human_bytes(free),
            super::human_bytes(most)
        ),
        _ => all + "\n",
    }
}

/// What placements of experts reach that do not change: whole layers, and the most frequent ones. An expert counts as a neuron elsewhere.
fn fixed_split(slots: usize, c: &ModelConfig) -> String {
    let (layers, share) = (slots / c.clusters(), slots as f64 / (c.movable_layers() * c.clusters()) as f64);
    // A power law by which 40 % make 80 %.
    let skewed = share.powf(0.8f64.ln() / 0.4f64.ln());
    format!(
        "a fixed split computes on the device: of whole layers ({layers} of {}) {:.1} % of the uses; of the most frequent experts {:.1} % if \
         all are used alike, {:.1} % if 40 % of them make 80 %\n",
        c.movable_layers(),
        100.0 * layers as f64 / c.movable_layers() as f64,
        100.0 * share,
        100.0 * skewed
    )
}

/// Which layers the device computes alone, and what that saves.
fn whole_layers(plan: &Plan) -> String {
    let d = &plan.details;
    let whole: Vec<usize> = (0..plan.layers.len()).filter(|&l| plan.layers[l].whole).collect();
    if whole.is_empty() || whole.len() == plan.layers.len() {
        return String::new();
    }
    let named = |run: &[usize]| match run {
        [one] => one.to_string(),
        run => format!("{} to {}", run[0], run[run.len() - 1]),
    };
    let runs: Vec<String> = whole.chunk_by(|a, b| a + 1 == *b).map(named).collect();
    format!(
        "whole layers: {} ({} of {}) need no processor, which saves {:.1} us each; the FFNs of a token {:.2} ms, with the most activations on the \
         device {:.2} ms\n",
        runs.join(", "),
        whole.len(),
        plan.layers.len(),
        d.costs.split_us,
        d.ffn_us / 1e3,
        d.ffn_us_by_impact / 1e3
    )
}

/// What is placed by itself, with its article; and behind the article, what takes so many bytes.
fn unit(c: &ModelConfig) -> (&'static str, &'static str) {
    match c.parts() {
        FfnParts::Experts if c.neurons_inside() => ("a neuron", " neuron inside"),
        FfnParts::Experts => ("an expert", "n expert"),
        FfnParts::Clusters => ("a cluster", " cluster"),
        FfnParts::Neurons => ("a neuron", " neuron block"),
    }
}

/// Each part's bytes on both sides, and the budgets of the plan.
fn parts_table(args: &Args, plan: &Plan, c: &ModelConfig, predictor: &str) -> Table {
    let bytes = |b: u64| if b == 0 { "-".into() } else { super::human_bytes(b) };
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["", "device", "host", "bytes on the device"]);
    for part in &plan.parts {
        let name = match part.name {
            PartName::Predictors => format!("predictors ({predictor})"),
            PartName::FfnSlots => "FFN slots".into(),
            PartName::Kv if args.parallel > 1 => {
                format!("keys and values ({} of {} on the device)", plan.sequences, args.parallel)
            }
            PartName::Kv => "keys and values".into(),
            PartName::Attention if c.has_shared() => "attention and shared experts".into(),
            PartName::Attention if plan.streamed_layers > 0 => {
                format!("attention ({} of {} layers copied for each pass)", plan.streamed_layers, c.layers().len())
            }
            PartName::Attention => "attention".into(),
            PartName::Embeddings => "embeddings".into(),
            PartName::Head => "head".into(),
            PartName::Buffers => format!("buffers (prompts by {} tokens)", plan.chunk),
        };
        let [device, host] = [Tier::Device, Tier::Host].map(|tier| part.bytes[tier]);
        table.add_row([name, bytes(device), bytes(host), device.to_string()]);
    }
    table.add_row([
        "total".into(),
        bytes(plan.total_bytes),
        bytes(plan.details.host_bytes),
        plan.total_bytes.to_string(),
    ]);
    for (name, size) in [
        ("budget", plan.budget_bytes),
        ("smallest budget", plan.min_bytes),
        ("without neurons", plan.without_neurons_bytes),
        ("everything", plan.full_bytes),
    ] {
        table.add_row([name.into(), bytes(size), String::new(), size.to_string()]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// A line about layers whose attention, or what stands in its place, no device computes; nothing where there are none.
fn on_processor(c: &ModelConfig) -> String {
    match c.mixers().filter(|mixer| mixer.on_device().is_none()).count() {
        0 => String::new(),
        some => {
            format!(
                "the processor computes attention, or what stands in its place, in {some} of {} layers\n",
                c.layers().len()
            )
        }
    }
}

fn shown(args: &Args, plan: &Plan, subject: &Subject, machine: &MachineProfile, predictor: &str) -> String {
    let (c, d) = (&subject.config, &plan.details);
    let table = parts_table(args, plan, c, predictor);
    let mut slots: Vec<usize> = plan.layers.iter().map(|l| l.slots).collect();
    slots.sort_unstable();
    let all: usize = slots.iter().sum();
    let share = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
    let ilp = d.ilp.as_ref().map_or(String::new(), |ilp| {
        format!(
            "integer programme: value {}{}, ours is {:.6} % below it, {:.0} ms\n",
            ilp.value,
            if ilp.optimal { ", proven the best" } else { " at its time limit" },
            100.0 * ilp.gap,
            ilp.solve_ms
        )
    });
    format!(
        "{} in {}: {} layers of {}, {} a{}\n\n{table}\n\n\
         slots a layer: {} to {}, median {}; {all} of {} ({:.1} %) in {} layers\n\
         {}{}\
         share of activations on the device: {:.1} % ({})\n\
         {}{}: CPU {:.3} us, GPU {:.3} us, transfer {:.3} us; splitting a layer: {:.1} us, pays from {} on\n\
         {}\
         solved in {:.1} ms in batches of {}; gap to the upper bound {:.6} %\n{ilp}machine {}\n",
        printable(&c.name),
        subject.quant,
        c.layers().len(),
        match c.parts() {
            FfnParts::Experts => format!("{} experts, {} of them for a token", c.clusters(), c.most_used_experts()),
            FfnParts::Clusters => format!("{} clusters of {} neurons", c.clusters(), c.widest_ffn()),
            FfnParts::Neurons => format!("{} neurons", c.widest_ffn()),
        },
        super::human_bytes(d.block_bytes),
        unit(c).1,
        slots[0],
        slots[slots.len() - 1],
        slots[slots.len() / 2],
        c.movable_layers() * c.movable(),
        share(all as u64, (c.movable_layers() * c.movable()) as u64),
        slots.iter().filter(|&&s| s > 0).count(),
        on_processor(c),
        if c.has_whole_experts() { fixed_split(all, c) } else { String::new() },
        share(plan.objective, d.total_impact),
        printable(&subject.counted),
        whole_layers(plan),
        unit(c).0,
        d.costs.t_cpu_us,
        d.costs.t_gpu_us,
        d.costs.t_trans_us,
        d.costs.t_sync_us,
        d.min_neurons,
        pinned(d.pinned_bytes, crate::config::available_memory()),
        d.solve_ms,
        d.batch,
        100.0 * plan.gap,
        machine_arg::describe(machine),
    )
}
