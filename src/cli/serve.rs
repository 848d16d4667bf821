use super::loader_arg::LoaderArgs;
use super::machine_arg;
use super::model_arg::Terminal;
use super::sampling_arg;
use super::settings_arg;
use super::trace_arg::TraceArgs;
use crate::error::{Error, Result};
use crate::formats::gguf::PartName;
use crate::formats::machine_profile::MachineProfile;
use crate::model::ModelConfig;
use crate::open::model::{find, real};
use crate::open::offered;
use crate::open::{self, EngineOptions, Listener, Packing};
use crate::serve::{self, AtEnd, Load, Offered, Opened, PathLimits, SetBudget};
use crate::settings::Settings;
use crate::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Run the daemon: the APIs of OpenAI, Anthropic and ollama
///
/// Any OpenAI client can use it: curl --unix-socket $XDG_RUNTIME_DIR/dynamicinfer.sock http://localhost/v1/models. SIGTERM lets
/// running answers end, a second one does not; SIGHUP reads the settings again. docs/serve.md is the guide.
#[derive(clap::Args)]
pub struct Args {
    /// Model to load at the start; `load` and `stop` change it [default: serve.model]
    model: Option<String>,
    /// Unix socket to listen at; only you can open it [default: $XDG_RUNTIME_DIR/dynamicinfer.sock,
    /// or /tmp/dynamicinfer-UID/dynamicinfer.sock without that directory]
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Settings file to read besides the user's and the system's
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Also listen at a TCP port of this machine: 8093, localhost:8093 (with serve.lan any address); clients need a bearer token
    #[arg(long, value_name = "[ADDRESS:]PORT")]
    listen: Option<String>,
    /// Serve no page at / (with --listen a browser finds a chat there, and what the daemon does)
    #[arg(long)]
    no_ui: bool,
    /// The model's name in requests [default: its file's name]
    #[arg(long)]
    name: Option<String>,
    /// Most requests that wait; further ones are answered 429
    #[arg(long, value_name = "N")]
    queue: Option<u64>,
    /// Most answers that run at once, 1 to 32
    #[arg(long, value_name = "N")]
    parallel: Option<u64>,
    /// Keep keys and values of prompts in this directory, so that a restarted daemon goes on from them; it must be yours alone
    #[arg(long, value_name = "DIR")]
    prompt_cache: Option<PathBuf>,
    #[command(flatten)]
    engine: LoaderArgs,
    #[command(flatten)]
    trace: TraceArgs,
}

pub fn run(args: Args) -> Result<()> {
    bound_arenas();
    let flags = Flags::of(&args);
    let config = args.config.clone();
    let settings = flags.settings(config.as_deref())?;
    let loader = ModelLoader { args: args.engine, trace: args.trace, named: args.model };
    // A closed stderr or a full disk behind it is no reason to stop.
    let say = |text: &str| eprintln!("{text}");
    serve::run(settings, Arc::new(loader), move || flags.settings(config.as_deref()), say)
}

/// Large buffers are mapped by themselves, bytes: they go back to the system as they are freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_BYTES: i32 = 128 << 10;

/// Has the C library serve all threads' allocations from two arenas. By default each thread gets an arena of its own, up to eight per
/// core, and keeps what its largest request took: the daemon's memory grows with every thread that a burst of requests reaches. A
/// token allocates nothing, so no thread waits for the arenas' locks. Large buffers stay out of them: by default the size from which
/// on they do grows with the largest that was freed, up to 32 MiB, and memory above a freed one keeps its pages.
fn bound_arenas() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the calls set numbers in the C library, which takes its own lock; no memory of ours is involved.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, MAPPED_BYTES);
    }
}

/// What was typed, so that a reload has it again.
struct Flags {
    values: Vec<(&'static str, &'static str, String)>,
}

impl Flags {
    fn of(args: &Args) -> Flags {
        let mut values = Vec::new();
        let mut add = |key, flag, value: Option<String>| values.extend(value.map(|value| (key, flag, value)));
        let path = |path: &Option<PathBuf>| path.as_ref().map(|p| p.to_string_lossy().into_owned());
        let number = |n: Option<u64>| n.map(|n| n.to_string());
        add("serve.model", "MODEL", args.model.clone());
        add("serve.socket", "--socket", path(&args.socket));
        add("serve.listen", "--listen", args.listen.clone());
        add("serve.ui", "--no-ui", args.no_ui.then(|| "false".into()));
        add("serve.name", "--name", args.name.clone());
        add("serve.queue", "--queue", number(args.queue));
        add("serve.parallel", "--parallel", number(args.parallel));
        add("serve.prompt_cache", "--prompt-cache", path(&args.prompt_cache));
        values.extend(args.engine.flags());
        Flags { values }
    }

    fn settings(&self, config: Option<&Path>) -> Result<Settings> {
        let mut settings = settings_arg::read(config)?;
        for (key, flag, value) in &self.values {
            settings.flag(key, flag, Some(value))?;
        }
        Ok(settings)
    }
}

/// Opens models as the settings and the flags say; `chat` without a daemon does the same.
#[derive(Default)]
pub struct ModelLoader {
    pub args: LoaderArgs,
    pub trace: TraceArgs,
    /// The model that was given with the flags; some flags refer to its files.
    pub named: Option<String>,
}

impl Load for ModelLoader {
    fn offered(&self, settings: &Settings) -> Vec<Offered> {
        let mut all: Vec<Offered> = settings.presets().map(|name| preset(name, settings)).collect();
        all.extend(folder(settings).map(offered::in_folder).into_iter().flatten().map(by_path));
        all.extend(offered::fetched().into_iter().map(by_path));
        all
    }

    fn named(&self, name: &str, settings: &Settings) -> Result<Option<Offered>> {
        if settings.preset(name).is_some() {
            return Ok(Some(preset(name, settings)));
        }
        Ok(offered::named(name, folder(settings))?.map(by_path))
    }

    fn outline(&self, model: &str, settings: &Settings) -> Result<(ModelConfig, String)> {
        offered::outline(Path::new(&resolved(model, settings)?.0))
    }

    fn check(&self, model: &str, settings: &Settings, may_pack: bool) -> Result<()> {
        let (path, settings) = resolved(model, settings)?;
        let told = if may_pack { self.told(model) } else { &Asked };
        open::check(&self.options(model, &path, &settings)?, told)
    }

    fn open(&self, model: &str, settings: &Settings) -> Result<Opened> {
        ModelLoader::open(self, model, settings)
    }
}

/// The folder whose models requests may name.
fn folder(settings: &Settings) -> Option<&Path> {
    settings.text("serve.models").map(Path::new)
}

/// A preset as requests may name it.
fn preset(name: &str, settings: &Settings) -> Offered {
    let path = settings.preset(name).map(|preset| preset.path.clone()).unwrap_or_default();
    let bytes = resolved_path(&path, settings).and_then(|path| find(Path::new(&path))).ok().map(offered::bytes_of);
    Offered {
        name: name.into(),
        origin: format!("[model.{name}]"),
        source: name.into(),
        bytes: bytes.unwrap_or(0),
        modified: 0,
    }
}

fn by_path(one: offered::Offered) -> Offered {
    let (modified, source) = (one.modified(), one.path.to_string_lossy().into_owned());
    Offered { name: one.name, origin: origin(&one.path), source, bytes: one.bytes, modified }
}

/// The path by which a model is the same, however it was named.
fn origin(path: &Path) -> String {
    real(path).unwrap_or_else(|_| path.to_owned()).to_string_lossy().into_owned()
}

/// The path or name that MODEL means, and what it is opened with: that of a preset, or of a model of `serve.models`.
fn resolved(model: &str, settings: &Settings) -> Result<(String, Settings)> {
    Ok(match settings.preset(model) {
        Some(preset) => (resolved_path(&preset.path, settings)?, settings.with_preset(preset)),
        None => (resolved_path(model, settings)?, settings.clone()),
    })
}

fn resolved_path(model: &str, settings: &Settings) -> Result<String> {
    let Some(folder) = folder(settings).filter(|_| !Path::new(model).exists()) else { return Ok(model.to_owned()) };
    let found = offered::in_folder(folder).into_iter().find(|one| one.name == model);
    Ok(found.map_or_else(|| model.to_owned(), |one| one.path.to_string_lossy().into_owned()))
}

/// Gets notes of a model that was not named with the flags.
struct Unasked;

impl Listener for Unasked {
    fn note(&self, text: &str) {
        Terminal.note(text);
    }
}

/// Gets notes of a model that a request named: none is packed for that.
struct Asked;

impl Listener for Asked {
    fn note(&self, text: &str) {
        Terminal.note(text);
    }

    fn may_pack(&self, packing: &Packing<'_>) -> Result<()> {
        let what = packing.what;
        Err(Error::Usage(format!(
            "no request has a model packed ({what}); once: dynamicinfer load MODEL, or pack MODEL"
        )))
    }
}

impl ModelLoader {
    /// Only the model that was named with the flags is asked about.
    fn told(&self, model: &str) -> &'static dyn Listener {
        if self.named.as_deref() == Some(model) { &Terminal } else { &Unasked }
    }

    /// What was typed; of another model than the one that was named, what is not about that one's files.
    fn options(&self, model: &str, path: &str, settings: &Settings) -> Result<EngineOptions> {
        let traced = self.trace.is_on();
        match self.other_than(model) {
            None => self.args.options(path, settings, traced),
            Some(_) => self.args.for_another_model().0.options(path, settings, traced),
        }
    }

    /// The model that was named, if this is another one.
    fn other_than(&self, model: &str) -> Option<&str> {
        let at = |name: &str| real(Path::new(name)).ok();
        let same = |named: &str| named == model || at(named).is_some_and(|path| Some(path) == at(model));
        self.named.as_deref().filter(|named| !same(named))
    }

    pub fn open(&self, model: &str, settings: &Settings) -> Result<Opened> {
        if let Some(named) = self.other_than(model) {
            let left = self.args.for_another_model().1;
            if !left.is_empty() {
                let named = crate::error::printable(named);
                Terminal.note(&format!(
                    "{} of the command line applies to {named} and is ignored for another model",
                    left.join(", ")
                ));
            }
        }
        let (path, settings) = &resolved(model, settings)?;
        let told = self.told(model);
        let options = self.options(model, path, settings)?;
        let weights = options.open_model(told)?;
        // Before the weights are read: a model without one cannot be served.
        let tokenizer = Tokenizer::new(weights.tokenizer()?, weights.path())?;
        let open::Opened { mut engine, context, kv, device } = open::open_model(weights, &options, told)?;
        let device = device.map(Arc::new);
        self.trace.begin(&mut engine)?;
        let limit = |m: &MachineProfile| PathLimits {
            cpu_gb_s: m.dram_gb_s,
            device_gb_s: m.device_gb_s,
            link_gb_s: m.link_gb_s,
        };
        let limits = match &device {
            Some(device) => Some(limit(&device.budget.machine)),
            None => machine_arg::saved(&Terminal).as_ref().map(limit),
        };
        let set_budget = device
            .clone()
            .map(|device| -> SetBudget { Box::new(move |engine, vram| device.budget.set(engine, vram).map(drop)) });
        let set_ram = engine.cached.is_some().then(|| -> SetBudget { Box::new(open::set_ram) });
        let trace = self.trace.clone();
        let at_end = (device.is_some() || trace.is_on()).then(|| -> AtEnd {
            Box::new(move |engine| {
                if let Some(device) = device {
                    device.finish(engine);
                }
                if let Err(error) = trace.write(engine) {
                    tracing::warn!("{error}");
                }
            })
        });
        let name = settings.text("serve.name").map_or_else(|| model_name(model), str::to_owned);
        let origin = match settings.preset(model) {
            Some(_) => format!("[model.{model}]"),
            None => origin(&find(Path::new(path))?),
        };
        let sampling = sampling_arg::defaults(settings)?;
        let system = settings.text("serve.system").map(str::to_owned);
        let prompt_bytes = options.prompt_bytes;
        Ok(Opened {
            engine,
            tokenizer,
            name,
            origin,
            kv,
            context,
            prompt_bytes,
            sampling,
            system,
            set_budget,
            set_ram,
            limits,
            at_end,
        })
    }
}

/// The last part of a path, without its format.
fn model_name(model: &str) -> String {
    let path = Path::new(model.trim_end_matches('/'));
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let short = name.strip_suffix(".gguf").or_else(|| name.strip_suffix(".neurons")).unwrap_or(&name);
    crate::error::printable(&PartName::parse(&name).map_or(short.to_owned(), |part| part.stem))
}
