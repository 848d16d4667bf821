//! The short verbs that ask the daemon: ps, load, stop, budget.

use super::settings_arg::{SocketArgs, read};
use super::size;
use crate::error::{Error, Result, printable};
use crate::serve::socket;
use clap::Subcommand;
use comfy_table::Table;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};
use std::path::Path;

/// List what the daemon runs
#[derive(clap::Args)]
pub struct Ps {
    #[command(flatten)]
    socket: SocketArgs,
    #[arg(long)]
    json: bool,
}

pub fn ps(args: Ps) -> Result<()> {
    let state = args.socket.connect()?.get("/v1/x/ps")?;
    if args.json {
        return super::print_json(&state);
    }
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["NAME", "STATE", "SIZE", "KEYS", "PROCESSOR", "CONTEXT", "RUNNING", "WAITING"]);
    let text = |value: &Value| printable(value.as_str().unwrap_or_default());
    let bytes = |value: &Value| super::human_bytes(value.as_u64().unwrap_or_default());
    for m in state["models"].as_array().into_iter().flatten() {
        let processor = match m["device"].as_str() {
            Some(device) => format!("cpu + {}", printable(device)),
            None => format!("cpu, {} threads", m["threads"]),
        };
        table.add_row([
            text(&m["name"]),
            text(&state["state"]),
            bytes(&m["model_bytes"]),
            bytes(&m["kv_bytes"]),
            processor,
            m["context"].to_string(),
            format!("{} of {}", m["running"], m["parallel"]),
            m["waiting"].to_string(),
        ]);
    }
    let file = match state["models"][0]["file"].as_str() {
        Some(what @ ("replaced" | "removed")) => {
            format!("its file was {what} since it was loaded: the old weights go on until it is loaded again\n")
        }
        _ => String::new(),
    };
    match (state["state"].as_str(), state["error"].as_str()) {
        (Some("ready"), _) => super::print(&format!("{table}\n{file}")),
        (Some("loading"), _) => super::print(&format!("loading {}\n", text(&state["loading"]))),
        (_, Some(error)) => super::print(&format!("no model answers: {}\n", printable(error))),
        _ => super::print("no model is loaded; load one: dynamicinfer load MODEL\n"),
    }
}

/// Load a model into the daemon, in the place of what it has
#[derive(clap::Args)]
pub struct LoadArgs {
    /// A Hugging Face directory, a .gguf, a packed .neurons file, or `demo`
    model: String,
    #[command(flatten)]
    socket: SocketArgs,
}

pub fn load(args: LoadArgs) -> Result<()> {
    let client = args.socket.connect()?;
    // The daemon runs elsewhere: a path means what it means here.
    let named = Path::new(&args.model);
    let model = if named.exists() { named.canonicalize().map_err(Error::io("resolve", named))? } else { named.into() };
    let card = client.long("POST", "/v1/x/models/load", Some(&json!({"model": model.to_string_lossy()})))?;
    let name = printable(card["id"].as_str().unwrap_or_default());
    eprintln!("{name} is ready, {} tokens of context", card["context_length"]);
    Ok(())
}

/// Unload the daemon's model, or end the daemon
#[derive(clap::Args)]
pub struct StopArgs {
    /// End the daemon itself; running answers may end first
    #[arg(long)]
    daemon: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

pub fn stop(args: StopArgs) -> Result<()> {
    if !args.daemon {
        args.socket.connect()?.long("POST", "/v1/x/models/unload", None)?;
        eprintln!("the model is unloaded; the daemon goes on");
        return Ok(());
    }
    let path = args.socket.path(&read(None)?);
    let pid = end(&path)?.as_raw_nonzero();
    eprintln!("process {pid} was asked to end");
    Ok(())
}

/// Asks the daemon at `path` to end: whoever listens there, as the kernel says. A file could name any process.
fn end(path: &Path) -> Result<Pid> {
    let Some(peer) = socket::listener(path) else {
        return Err(Error::NoDaemon(format!("no daemon runs at {}", path.display())));
    };
    let (pid, at) = (peer.pid.as_raw_nonzero(), path.display());
    if !socket::is_held(path)? {
        // Of a socket that systemd has handed over, the kernel names systemd.
        return Err(Error::NoDaemon(format!(
            "what listens at {at} (process {pid}) has no lock there and is left alone; end it with who started it: systemctl stop"
        )));
    }
    if peer.uid != rustix::process::geteuid() {
        let user = peer.uid.as_raw();
        return Err(Error::Failed(format!("process {pid} at {at} is user {user}'s; only that user ends it")));
    }
    // A process of another namespace has the number 0 here, which would be this process's own group: that has no descriptor.
    let process = pidfd_open(peer.pid, PidfdFlags::empty());
    let asked = process.and_then(|process| pidfd_send_signal(process, Signal::TERM));
    asked.map_err(|e| Error::Failed(format!("cannot end process {pid}: {e}")))?;
    Ok(peer.pid)
}

/// Show or set how much memory the daemon's device may use
#[derive(clap::Args)]
pub struct BudgetArgs {
    #[command(subcommand)]
    what: Option<Budget>,
    #[command(flatten)]
    socket: SocketArgs,
}

#[derive(Subcommand)]
enum Budget {
    /// What may be used and what is
    Get {
        #[arg(long)]
        json: bool,
    },
    /// Set it: 6GiB, 6GB, 6144MiB or bytes
    Set {
        #[arg(value_parser = size::parse)]
        size: u64,
    },
}

pub fn budget(args: BudgetArgs) -> Result<()> {
    let client = args.socket.connect()?;
    let budget = match args.what {
        Some(Budget::Set { size }) => client.json("PUT", "/v1/x/budget", Some(&json!({"vram_budget_bytes": size})))?,
        Some(Budget::Get { .. }) | None => client.get("/v1/x/budget")?,
    };
    if matches!(args.what, Some(Budget::Get { json: true })) {
        return super::print_json(&budget);
    }
    super::print(&(budget_line(&budget) + "\n"))
}

/// One line about memory, for `budget` and `chat`.
pub fn budget_line(budget: &Value) -> String {
    let bytes = |name: &str| super::human_bytes(budget[name].as_u64().unwrap_or_default());
    let memory = format!("memory: weights {}, keys and values up to {}", bytes("model_bytes"), bytes("kv_bytes"));
    match budget["device"].as_str() {
        Some(device) => {
            let device = printable(device);
            format!("{device}: {} of {}; {memory}", bytes("vram_used_bytes"), bytes("vram_budget_bytes"))
        }
        None => format!("no device; {memory}"),
    }
}
