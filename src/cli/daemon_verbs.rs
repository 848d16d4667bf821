//! The short verbs that ask the daemon: ps, load, stop, budget.

use super::model_arg::parse_activation;
use super::settings_arg::{SocketArgs, read};
use super::size;
use crate::client::Client;
use crate::error::{Error, Result, printable};
use crate::open::PredictorChoice;
use crate::open::model::real;
use crate::pack::Types;
use crate::scheduler::Policy;
use crate::serve::socket;
use comfy_table::Table;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::str::FromStr;

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
    table.set_header(["NAME", "STATE", "SIZE", "KEYS", "PROMPTS", "PROCESSOR", "CONTEXT", "RUNNING", "WAITING"]);
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
            bytes(&m["prompt_cache"]["bytes"]),
            processor,
            m["context"].to_string(),
            format!("{} of {}", m["running"], m["parallel"]),
            m["waiting"].to_string(),
        ]);
    }
    let file = match state["models"][0]["file"].as_str() {
        Some(what @ ("replaced" | "removed")) => {
            format!("its file was {what} after loading: the old weights remain in use until the next load\n")
        }
        _ => String::new(),
    };
    match (state["state"].as_str(), state["error"].as_str()) {
        (Some("ready"), _) => super::print(&format!("{table}\n{file}")),
        (Some("freed"), _) => {
            super::print(&format!("{} was freed; the next request loads it again\n", text(&state["freed"])))
        }
        (Some("loading"), _) => super::print(&format!("loading {}\n", text(&state["loading"]))),
        (_, Some(error)) => super::print(&format!("no model answers: {}\n", printable(error))),
        _ => super::print("no model is loaded; load one: dynamicinfer load MODEL\n"),
    }
}

/// Load a model into the daemon, replacing its current one
#[derive(clap::Args)]
pub struct LoadArgs {
    /// Hugging Face directory, .gguf, .neurons file, name from `ls`, or `demo`
    model: String,
    /// Tokens of a prompt and its answer together [default: the model's, at most 4096]
    #[arg(short, long = "ctx-size", value_name = "N")]
    context: Option<u64>,
    /// Type of the weights if the model must be packed: f16, q8_0, q4_k_m ... [default: the model's own]
    ///
    /// f32, f16, q8_0, q4_0, q4_k, q6_k, GGUF's other types, a mix such as q4_k_m, or clusters.
    #[arg(long, value_name = "TYPE", value_parser = checked::<Types>)]
    quant: Option<String>,
    /// Activation function of a model that names none or a wrong one: relu, fatrelu(0.01), drelu, silu and others
    #[arg(long, value_name = "NAME", value_parser = |text: &str| parse_activation(text).map(|_| text.to_owned()))]
    activation: Option<String>,
    /// Threads to compute with [default: one per core]
    ///
    /// With a GPU, one less if the processor has no hyperthread for the scheduler.
    #[arg(short, long, value_name = "N")]
    threads: Option<u64>,
    /// Type of the key/value cache [default: f16]
    #[arg(long, value_name = "TYPE", ignore_case = true, value_parser = ["f16", "f32", "q8_0", "q4_0"])]
    kv: Option<String>,
    /// Precision of prompts of more than 32 tokens on the processor [default: int8]
    #[arg(long, value_name = "PRECISION", ignore_case = true, value_parser = ["exact", "int8", "int8-per-tensor"])]
    prefill: Option<String>,
    /// Host memory limit, such as 32GiB; neurons that exceed it are read from disk
    ///
    /// It covers weights, keys and values. In a mixture of experts whole experts stay on disk until they are needed.
    #[arg(long, value_name = "SIZE", value_parser = checked_size)]
    ram: Option<String>,
    /// Predictor that selects the neurons of each token: dense (all), exact, sign, mlp or auto
    ///
    /// By layer: `mlp,dense@0,exact@3-5`.
    #[arg(long, value_name = "KIND", value_parser = checked::<PredictorChoice>)]
    predictor: Option<String>,
    /// Device that computes besides the processor: cpu (none), cuda, auto or virtual [default: cpu]
    #[arg(long, ignore_case = true, value_parser = ["cpu", "cuda", "auto", "virtual"])]
    device: Option<String>,
    /// Memory budget on the device, such as 8GiB [default for cuda: most of the free memory]
    #[arg(long, value_name = "SIZE", value_parser = checked_size)]
    vram: Option<String>,
    /// Migration policy during decoding: static, micro, macro, full, lru ... [default: full]
    #[arg(long, value_name = "POLICY", value_parser = checked::<Policy>)]
    policy: Option<String>,
    /// Temperature of requests that set none
    #[arg(long, value_name = "T")]
    temp: Option<f32>,
    #[command(flatten)]
    socket: SocketArgs,
}

impl LoadArgs {
    /// What was typed, as settings for this model alone.
    fn settings(&self) -> Map<String, Value> {
        let number = |n: Option<u64>| n.map(|n| n.to_string());
        let values = [
            ("serve.context", number(self.context)),
            ("engine.quant", self.quant.clone()),
            ("engine.activation", self.activation.clone()),
            ("engine.threads", number(self.threads)),
            ("engine.kv", self.kv.clone()),
            ("engine.prefill", self.prefill.clone()),
            ("engine.ram", self.ram.clone()),
            ("engine.predictor", self.predictor.clone()),
            ("engine.device", self.device.clone()),
            ("engine.vram", self.vram.clone()),
            ("engine.policy", self.policy.clone()),
            ("sampling.temperature", self.temp.map(|temp| temp.to_string())),
        ];
        values.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.into()))).collect()
    }
}

/// The text itself, if it can be read as a `T`: the daemon reads it again.
fn checked<T: FromStr<Err = String>>(text: &str) -> std::result::Result<String, String> {
    text.parse::<T>().map(|_| text.to_owned())
}

fn checked_size(text: &str) -> std::result::Result<String, String> {
    size::parse(text).map(|_| text.to_owned())
}

pub fn load(args: LoadArgs) -> Result<()> {
    let client = args.socket.connect()?;
    // The daemon runs elsewhere: a path means what it means here.
    let named = Path::new(&args.model);
    let model = if named.exists() { real(named).map_err(Error::io("resolve", named))? } else { named.into() };
    let body = json!({"model": model.to_string_lossy(), "settings": args.settings()});
    let card = client.long("POST", "/v1/x/models/load", Some(&body))?;
    let name = printable(card["id"].as_str().unwrap_or_default());
    eprintln!("{name} is ready, {} tokens of context", card["context_length"]);
    Ok(())
}

/// Unload the daemon's model, or end the daemon
#[derive(clap::Args)]
pub struct StopArgs {
    /// End the daemon itself, after its running answers
    #[arg(long)]
    daemon: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

pub fn stop(args: StopArgs) -> Result<()> {
    if !args.daemon {
        args.socket.connect()?.long("POST", "/v1/x/models/unload", None)?;
        eprintln!("the model is unloaded; the daemon still runs");
        return Ok(());
    }
    let path = args.socket.path(&read(None)?);
    let pid = end(&path)?.as_raw_nonzero();
    eprintln!("process {pid} was asked to end");
    Ok(())
}

/// Asks the daemon at `path` to end: the process that the kernel reports as listening there. A file could name any process.
fn end(path: &Path) -> Result<Pid> {
    let Some(peer) = socket::listener(path) else {
        return Err(Error::NoDaemon(format!("no daemon runs at {}", path.display())));
    };
    let (pid, at) = (peer.pid.as_raw_nonzero(), path.display());
    if !socket::is_held(path)? {
        // Of a socket that systemd has handed over, the kernel names systemd.
        return Err(Error::NoDaemon(format!(
            "process {pid} listens at {at}, but holds no lock there; stop it with the program that started it, such as systemctl stop"
        )));
    }
    if peer.uid != rustix::process::geteuid() {
        let user = peer.uid.as_raw();
        return Err(Error::Failed(format!("process {pid} at {at} belongs to user {user}; only that user can end it")));
    }
    // A process of another namespace has the number 0 here, which would be this process's own group: that has no descriptor.
    let process = pidfd_open(peer.pid, PidfdFlags::empty());
    let asked = process.and_then(|process| pidfd_send_signal(process, Signal::TERM));
    asked.map_err(|e| Error::Failed(format!("cannot end process {pid}: {e}")))?;
    Ok(peer.pid)
}

/// Show or set the daemon's memory budgets, device or host
///
/// budget, budget get, budget 6GiB and budget set 6GiB concern the device; budget --ram 2GiB and budget set --ram 2GiB concern the host memory
/// of a model that was loaded with --ram. In a chat, /budget takes the same words.
#[derive(clap::Args)]
pub struct BudgetArgs {
    /// get, or set SIZE, or SIZE alone: 6GiB, 6G, 6GB, 6144MiB or bytes
    #[arg(value_name = "WORDS", num_args = 0..=3)]
    words: Vec<String>,
    /// Host memory limit of the model, as --ram of `serve`: 2GiB, 2G or bytes
    #[arg(long, value_name = "SIZE", value_parser = checked_size, allow_hyphen_values = true)]
    ram: Option<String>,
    /// Machine-readable
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

/// What `budget` and /budget are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// To show what is set.
    Show,
    /// To give the device so many bytes.
    Vram(u64),
    /// To give the model so many bytes of host memory.
    Ram(u64),
}

/// The request in the words of `budget` and /budget.
pub fn budget_words(words: &str) -> std::result::Result<Asked, String> {
    let words = words.replace("--ram=", "--ram ");
    let words: Vec<&str> = words.split_whitespace().collect();
    match words[..] {
        [] | ["get"] => Ok(Asked::Show),
        ["set"] => Err("set needs a size: set 6GiB, or set --ram 2GiB".into()),
        ["--ram"] | ["set", "--ram"] => Err("--ram needs a size: set --ram 2GiB".into()),
        ["set", "--ram", ref size @ ..] | ["--ram", ref size @ ..] => size::parse(&size.join(" ")).map(Asked::Ram),
        [.., "--ram", _] => {
            Err("only one budget can be set at a time: the device's, or with --ram the host memory's".into())
        }
        ["set", ref size @ ..] => size::parse(&size.join(" ")).map(Asked::Vram),
        ref size => size::parse(&size.join(" ")).map(Asked::Vram),
    }
}

/// The daemon's budgets, after setting one if requested.
///
/// # Errors
/// Where there is no such memory with a budget, [`Error::Failed`] with how to get one; the client's.
pub fn budget_of(client: &Client, asked: Asked) -> Result<Value> {
    let now = client.get("/v1/x/budget")?;
    let source = || Ok(client.get("/v1/x/ps")?["models"][0]["source"].as_str().map_or("MODEL".into(), printable));
    let change = match asked {
        Asked::Show => return Ok(now),
        Asked::Vram(vram) if now["device"].is_null() => {
            let source = source()?;
            return Err(Error::Failed(format!(
                "{NO_DEVICE}; load it with one: dynamicinfer load {source} --device cuda --vram {vram} (an NVIDIA \
                 GPU; `doctor` checks it, `plan {source} --vram {vram}` shows what fits)"
            )));
        }
        Asked::Ram(ram) if now["ram_budget_bytes"].is_null() => {
            let all = now["model_bytes"].as_u64().unwrap_or(0) + now["kv_bytes"].as_u64().unwrap_or(0);
            let limit = if ram < all { ram.to_string() } else { "SIZE".into() };
            return Err(Error::Failed(format!(
                "{NO_RAM_LIMIT} ({} with keys and values); load it with a limit: dynamicinfer load {} --ram \
                 {limit} (or start serve with --ram)",
                super::human_bytes(all),
                source()?
            )));
        }
        Asked::Vram(vram) => json!({"vram_budget_bytes": vram}),
        Asked::Ram(ram) => json!({"ram_budget_bytes": ram}),
    };
    client.json("PUT", "/v1/x/budget", Some(&change))
}

/// Why there is no budget to set.
pub const NO_DEVICE: &str = "the model runs on the CPU alone, without a device budget";
const NO_RAM_LIMIT: &str = "the whole model is in host memory, without a limit to change";

pub fn budget(args: BudgetArgs) -> Result<()> {
    let ram = args.ram.iter().flat_map(|ram| ["--ram", ram]);
    let words: Vec<&str> = args.words.iter().map(String::as_str).chain(ram).collect();
    let asked = budget_words(&words.join(" ")).map_err(|why| Error::Usage(format!("budget: {why}")))?;
    let budget = budget_of(&args.socket.connect()?, asked)?;
    if args.json {
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
        None if budget["ram_budget_bytes"].is_u64() => {
            format!("no device; host memory: {} of {}; {memory}", bytes("ram_used_bytes"), bytes("ram_budget_bytes"))
        }
        None => format!("no device; {memory}"),
    }
}
