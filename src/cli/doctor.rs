use super::settings_arg::{SocketArgs, read};
use crate::cpu::{Isa, Kernels, ThreadPool};
use crate::error::{Result, printable};
use crate::formats::rows::Quant;
use crate::machine::kernel_choice::Trial;
use crate::machine::measure::{QUICK_BYTES, ReadBuffer};
use crate::serve::socket;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Check this machine: what would run here, and how fast
///
/// One line a topic, with the conclusion. --verbose adds the figures behind it.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArgs,
    /// Add the figures behind each line
    #[arg(short, long)]
    verbose: bool,
    /// Machine-readable
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Finding {
    what: &'static str,
    /// ok, note or problem
    verdict: &'static str,
    /// The conclusion, in one line.
    found: String,
    /// The figures behind it, a line each.
    details: Vec<String>,
}

impl Finding {
    fn new(what: &'static str, verdict: &'static str, found: impl Into<String>) -> Finding {
        Finding { what, verdict, found: found.into(), details: Vec::new() }
    }
}

pub fn run(args: Args) -> Result<()> {
    let findings = findings(&args)?;
    if args.json {
        return super::print_json(&findings);
    }
    let mut text = String::new();
    for Finding { what, verdict, found, details } in &findings {
        text += &format!("{verdict:8} {what:10} {found}\n");
        let details = details.iter().filter(|_| args.verbose);
        text.extend(details.map(|line| format!("{:20}{line}\n", "")));
    }
    super::print(&text)
}

fn findings(args: &Args) -> Result<Vec<Finding>> {
    let threads = crate::config::default_threads();
    let mut findings = vec![
        processor(threads),
        kernels(threads).unwrap_or_else(|error| Finding::new("kernels", "problem", error.to_string())),
        memory(threads),
        gpu(),
        demo_model(),
    ];
    for (what, dir) in [("cache", crate::config::cache_dir()), ("data", crate::config::data_dir())] {
        findings.push(match dir {
            None => Finding::new(what, "problem", "no directory: set HOME"),
            Some(dir) => {
                let free = dir.ancestors().find(|dir| dir.is_dir()).and_then(crate::open::model::free_bytes);
                let free = free.map_or(String::new(), |free| format!(", {} free", super::human_bytes(free)));
                Finding::new(what, "ok", format!("{}{free}", dir.display()))
            }
        });
    }
    let settings = match read(None) {
        Ok(settings) => settings,
        Err(error) => {
            findings.push(Finding::new("settings", "problem", error.to_string()));
            return Ok(findings);
        }
    };
    let changed = settings.all().filter(|(_, _, origin)| **origin != crate::settings::Origin::Default).count();
    let found = format!("{changed} differ from their defaults (dynamicinfer config show --origin)");
    findings.push(Finding::new("settings", "ok", found));
    let (verdict, found) = daemon(&args.socket.path(&settings), args)?;
    findings.push(Finding::new("daemon", verdict, found));
    Ok(findings)
}

fn processor(threads: usize) -> Finding {
    let isa = Kernels::best().isa;
    if isa == Isa::Portable {
        let found = format!("{threads} threads, slow: the processor lacks AVX2, FMA or F16C, so portable code runs");
        return Finding::new("processor", "note", found);
    }
    let others = Isa::ALL.into_iter().filter(|other| *other != isa && other.is_supported()).map(Isa::name);
    let details = vec![format!("also supported: {}", others.collect::<Vec<_>>().join(", "))];
    Finding { details, ..Finding::new("processor", "ok", format!("{threads} threads, {}", isa.name())) }
}

/// The rate that limits decoding, and the memory that a model may take.
fn memory(threads: usize) -> Finding {
    let free = crate::config::available_memory();
    let room = free.map_or(String::new(), |bytes| format!("; {} free", super::human_bytes(bytes)));
    let (verdict, rate, mut details) = match ReadBuffer::new(QUICK_BYTES, free) {
        Ok(buffer) => {
            let read = buffer.measure(threads);
            let rate = format!(
                "{:.1} GB/s on {}: at most {:.0} tokens/s for a dense {MODEL_GB} GB model",
                read.gb_per_s,
                if threads == 1 { "1 thread".into() } else { format!("{threads} threads") },
                read.gb_per_s / MODEL_GB
            );
            let range = format!("sequential reads: {:.1} GB/s, worst pass {:.1}", read.gb_per_s, read.worst_gb_per_s);
            ("ok", rate, vec![range, "dynamicinfer measure has more".into()])
        }
        Err(error) => ("note", error.to_string(), Vec::new()),
    };
    match free {
        Some(bytes) => details.push(format!(
            "a model and its keys and values may take the free memory; a GPU can pin {} of it, which then cannot be swapped",
            super::human_bytes(crate::open::pinnable(bytes))
        )),
        None => details.push("the system does not report how much is free".into()),
    }
    Finding { details, ..Finding::new("memory", verdict, rate + &room) }
}

fn gpu() -> Finding {
    #[cfg(feature = "cuda")]
    let (verdict, found, details) = super::cuda::look();
    #[cfg(not(feature = "cuda"))]
    let (verdict, found, details) =
        ("note", format!("none, everything runs on the processor: {}", crate::open::cuda::Unusable), Vec::new());
    Finding { details, ..Finding::new("GPU", verdict, found) }
}

fn demo_model() -> Finding {
    let mut dirs = crate::config::asset_dirs().into_iter().map(|dir| dir.join("demo/config.json"));
    if dirs.any(|file| file.exists()) || crate::open::embedded::has_model("demo") {
        return Finding::new("demo model", "ok", "dynamicinfer run demo \"Once upon a time\"");
    }
    Finding::new("demo model", "note", "not found; run from a checkout, or set DYNAMICINFER_ASSETS")
}

/// Size of the model that the memory's rate is translated for, GB.
const MODEL_GB: f64 = 0.5;
/// Numbers of a row: as many as a 7B model has, and whole blocks of every type.
const COLS: usize = 4096;
/// The two layouts of weights, and the argument of [`Trial::choose`] for each.
const USES: [(&str, [u64; 2]); 2] = [("matrices", [1, 0]), ("neuron blocks that are read whole", [0, 1])];

/// The kernels that an engine opened now would use: the rate of each type, and why those.
fn kernels(threads: usize) -> Result<Finding> {
    let isa = Kernels::best().isa;
    let kinds = Kernels::kinds(isa);
    let mut pool = ThreadPool::new(threads);
    let mut trial = Trial::new(&mut pool, COLS)?;
    let mut details = vec![format!("GB/s of rows of {COLS} numbers, {threads} threads:")];
    let (mut slowest, mut fastest) = (f64::INFINITY, 0.0f64);
    for (what, bytes) in USES {
        let (mut rates, mut others) = (Vec::new(), BTreeMap::<String, Vec<String>>::new());
        for quant in Quant::all() {
            let choice = trial.choose(&kinds, quant, bytes);
            let (pair, first) = (choice.pairs[choice.taken], choice.pairs[0].gb_s);
            rates.push(format!("{} {:.1}", quant.name(), pair.gb_s));
            (slowest, fastest) = (slowest.min(pair.gb_s), fastest.max(pair.gb_s));
            if choice.taken > 0 {
                let words = match (kinds[pair.dots].0, kinds[pair.axpys].0) {
                    (dots, axpys) if bytes[1] == 0 || dots == axpys => dots.to_owned(),
                    (dots, axpys) => format!("{dots} (down rows {axpys})"),
                };
                others.entry(words).or_default().push(format!("{} ({first:.1})", quant.name()));
            }
        }
        details.push(format!("{what}: {}", rates.join(", ")));
        if let [(maker, _), _, ..] = kinds[..] {
            details.push(format!("prefetch variant `{maker}`, the default for this processor's maker"));
            details.extend(others.into_iter().map(|(words, types)| {
                format!("prefetch variant `{words}`, faster than `{maker}` (its rate) for {}", types.join(", "))
            }));
        }
    }
    let found = format!("{}, {slowest:.1} to {fastest:.1} GB/s by weight type", isa.name());
    let faster = faster_with_avx2(&mut trial, &kinds[0]);
    if faster.is_empty() {
        return Ok(Finding { details, ..Finding::new("kernels", "ok", found) });
    }
    let names: Vec<&str> = faster.iter().map(|(quant, _)| quant.name()).collect();
    let found = format!("{found}; DYNAMICINFER_ISA=avx2 is faster for {}", names.join(", "));
    details.extend(faster.iter().map(|(quant, why)| format!("{}: {why}", quant.name())));
    Ok(Finding { details, ..Finding::new("kernels", "note", found) })
}

/// Types whose matrices AVX2 reads clearly faster than these kernels of AVX-512. (Kernels of two instruction sets do not add to one sum.)
fn faster_with_avx2(trial: &mut Trial<'_>, kernels: &(&'static str, Kernels)) -> Vec<(Quant, String)> {
    let (Isa::Avx512, Some(avx2)) = (kernels.1.isa, Kernels::of(Isa::Avx2)) else { return Vec::new() };
    let both = [(Isa::Avx512.name(), kernels.1), (Isa::Avx2.name(), avx2)];
    let choices = Quant::all().map(|quant| trial.choose(&both, quant, [1, 0]));
    choices.filter(|choice| choice.taken > 0).map(|choice| (choice.quant, choice.describe(&both))).collect()
}

/// Which process has the socket, and whether it answers.
fn daemon(path: &Path, args: &Args) -> Result<(&'static str, String)> {
    let at = path.display();
    let held = match socket::check_default_dir(path).and_then(|()| socket::is_held(path)) {
        Ok(held) => held,
        Err(error) => return Ok(("problem", error.to_string())),
    };
    let process =
        socket::listener(path).map_or("a process".into(), |peer| format!("process {}", peer.pid.as_raw_nonzero()));
    Ok(match (held, args.socket.connect()) {
        (true, Ok(client)) => {
            let model = |state: Value| state["models"][0]["name"].as_str().map_or("no model".into(), printable);
            match client.get("/v1/x/ps").map(model) {
                Ok(model) => ("ok", format!("{process} at {at}, {model}")),
                Err(error) => ("problem", format!("{process}: {error}")),
            }
        }
        (true, Err(error)) => ("problem", format!("the daemon at {at} holds its lock and does not answer: {error}")),
        (false, Ok(_)) => ("problem", format!("another program listens at {at}")),
        (false, Err(_)) => ("note", format!("none at {at}; start one: dynamicinfer serve MODEL")),
    })
}
