use super::settings_arg::{SocketArgs, read};
use crate::cpu::{Isa, Kernels, ThreadPool};
use crate::error::{Result, printable};
use crate::formats::rows::Quant;
use crate::machine::kernel_choice::Trial;
use crate::serve::socket;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Look at this machine: what would run here, and why
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArgs,
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Finding {
    what: &'static str,
    /// ok, note or problem
    verdict: &'static str,
    found: String,
}

pub fn run(args: Args) -> Result<()> {
    let findings = findings(&args)?;
    if args.json {
        return super::print_json(&findings);
    }
    let lines: Vec<String> = findings.iter().map(|f| format!("{:8} {:10} {}\n", f.verdict, f.what, f.found)).collect();
    super::print(&lines.concat())
}

fn findings(args: &Args) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mut add = |what, verdict, found: String| findings.push(Finding { what, verdict, found });
    let threads = crate::config::default_threads();
    match Kernels::best().isa {
        Isa::Portable => add(
            "processor",
            "note",
            format!("{threads} threads, portable code: AVX2 with FMA and F16C is missing, so this is slow"),
        ),
        isa => {
            let others = Isa::ALL.into_iter().filter(|other| *other != isa && other.is_supported()).map(Isa::name);
            let others = others.collect::<Vec<_>>().join(", ");
            add("processor", "ok", format!("{threads} threads, kernels for {}; it has {others}, too", isa.name()))
        }
    }
    let (verdict, found) = kernels(threads).unwrap_or_else(|error| ("problem", error.to_string()));
    add("kernels", verdict, found);
    match crate::config::available_memory() {
        Some(bytes) => add(
            "memory",
            "ok",
            format!(
                "{} are free: a model and its keys may take that much; a card would pin up to {} of it, which then cannot be swapped",
                super::human_bytes(bytes),
                super::human_bytes(crate::open::pinnable(bytes))
            ),
        ),
        None => add("memory", "note", "the system does not say how much is free".into()),
    }
    #[cfg(feature = "cuda")]
    let (verdict, found) = super::cuda::look();
    #[cfg(not(feature = "cuda"))]
    let (verdict, found) = ("note", format!("everything runs on the processor: {}", crate::open::cuda::Unusable));
    add("GPU", verdict, found);
    let demo =
        crate::config::asset_dirs().into_iter().map(|dir| dir.join("demo/config.json")).find(|file| file.exists());
    match demo {
        Some(_) => add("demo model", "ok", "is there: dynamicinfer run demo \"Once upon a time\"".into()),
        None if crate::open::embedded::has_model("demo") => {
            add("demo model", "ok", "is in the program: dynamicinfer run demo \"Once upon a time\"".into());
        }
        None => add("demo model", "note", "was not found; run from a checkout, or set DYNAMICINFER_ASSETS".into()),
    }
    for (what, dir) in [("cache", crate::config::cache_dir()), ("data", crate::config::data_dir())] {
        match dir {
            None => add(what, "problem", "there is no such directory: set HOME".into()),
            Some(dir) => {
                let free = dir.ancestors().find(|dir| dir.is_dir()).and_then(crate::open::model::free_bytes);
                let free = free.map_or(String::new(), |free| format!(", {} free", super::human_bytes(free)));
                add(what, "ok", format!("{}{free}", dir.display()));
            }
        }
    }
    let settings = match read(None) {
        Ok(settings) => settings,
        Err(error) => {
            add("settings", "problem", error.to_string());
            return Ok(findings);
        }
    };
    let changed = settings.all().filter(|(_, _, origin)| **origin != crate::settings::Origin::Default).count();
    add("settings", "ok", format!("{changed} differ from their defaults (dynamicinfer config show --origin)"));
    let path = args.socket.path(&settings);
    let (verdict, found) = daemon(&path, args)?;
    add("daemon", verdict, found);
    Ok(findings)
}

/// Numbers of a row: as many as a 7B model has, and whole blocks of every type.
const COLS: usize = 4096;
/// Where weights are read from, and how [`Trial::choose`] is asked for that.
const USES: [(&str, [u64; 2]); 2] = [("of matrices", [1, 0]), ("of neuron blocks that are all read", [0, 1])];

/// Which kernels read weights of each type, how fast, and why those: what an engine takes that is opened now.
fn kernels(threads: usize) -> Result<(&'static str, String)> {
    let isa = Kernels::best().isa;
    let kinds = Kernels::kinds(isa);
    let mut pool = ThreadPool::new(threads);
    let mut trial = Trial::new(&mut pool, COLS)?;
    let mut found = format!("{}; {threads} threads read rows of {COLS} numbers, in GB/s", isa.name());
    for (what, bytes) in USES {
        let (mut rates, mut others) = (Vec::new(), BTreeMap::<String, Vec<String>>::new());
        for quant in Quant::all() {
            let choice = trial.choose(&kinds, quant, bytes);
            let (pair, first) = (choice.pairs[choice.taken], choice.pairs[0].gb_s);
            rates.push(format!("{} {:.1}", quant.name(), pair.gb_s));
            if choice.taken > 0 {
                let words = match (kinds[pair.dots].0, kinds[pair.axpys].0) {
                    (dots, axpys) if bytes[1] == 0 || dots == axpys => dots.to_owned(),
                    (dots, axpys) => format!("{dots} (down rows {axpys})"),
                };
                others.entry(words).or_default().push(format!("{} ({first:.1})", quant.name()));
            }
        }
        found += &format!("; {what}: {}", rates.join(", "));
        if let [(maker, _), _, ..] = kinds[..] {
            found += &format!("; by kernels of the kind {maker}, this processor's maker's");
            for (words, types) in others {
                found += &format!("; by {words}, clearly faster here than {maker} (its rate), {}", types.join(", "));
            }
        }
    }
    let faster = faster_with_avx2(&mut trial, &kinds[0]);
    if faster.is_empty() {
        return Ok(("ok", found));
    }
    Ok(("note", format!("{found}; DYNAMICINFER_ISA=avx2 is faster for {}", faster.join(", "))))
}

/// Types whose matrices AVX2 reads clearly faster than these kernels of AVX-512. (Kernels of two instruction sets do not add to one sum.)
fn faster_with_avx2(trial: &mut Trial<'_>, kernels: &(&'static str, Kernels)) -> Vec<String> {
    let (Isa::Avx512, Some(avx2)) = (kernels.1.isa, Kernels::of(Isa::Avx2)) else { return Vec::new() };
    let both = [(Isa::Avx512.name(), kernels.1), (Isa::Avx2.name(), avx2)];
    let choices = Quant::all().map(|quant| trial.choose(&both, quant, [1, 0]));
    let faster = choices.filter(|choice| choice.taken > 0);
    faster.map(|choice| format!("{}: {}", choice.quant.name(), choice.describe(&both))).collect()
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
        (true, Err(error)) => ("problem", format!("a daemon has the lock of {at} and does not answer: {error}")),
        (false, Ok(_)) => ("problem", format!("something that is no daemon of ours listens at {at}")),
        (false, Err(_)) => ("note", format!("none at {at}; start one: dynamicinfer serve MODEL")),
    })
}
