use super::settings_arg::{SocketArgs, read};
use crate::cpu::{Isa, Kernels};
use crate::error::{Result, printable};
use crate::lab::kernel_choice;
use crate::serve::socket;
use serde::Serialize;
use serde_json::Value;
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
    let (verdict, found) = kernels();
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

/// Which kernels read weights, how fast, and whether others would be faster here.
fn kernels() -> (&'static str, String) {
    let (candidates, chosen) = Kernels::candidates();
    let choices = kernel_choice::measure(chosen, &candidates);
    let rates: Vec<String> = choices.iter().map(|c| format!("{} {:.1}", c.quant.name(), c.gb_s)).collect();
    let faster = choices.iter().filter_map(|c| c.faster.map(|(name, gb_s)| (c, name, gb_s)));
    let faster: Vec<String> = faster.map(|(c, name, gb_s)| format!("{} {gb_s:.1} by {name}", c.quant.name())).collect();
    let found = format!("{}; one thread reads, in GB/s: {}", candidates[chosen].0, rates.join(", "));
    match faster.is_empty() {
        true => ("ok", found),
        false => ("note", format!("{found}; faster in a short measurement: {}", faster.join(", "))),
    }
}

/// Who has the socket, and whether it answers.
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
