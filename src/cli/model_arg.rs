//! From the word MODEL to an open model: finds it, and packs it first if it must be.

use super::progress::{Progress, Unit};
use crate::cpu::Kernels;
use crate::engine::Engine;
use crate::error::{Error, Result, printable};
use crate::formats::neuron_store::{EXTENSION, NeuronStore};
use crate::formats::rows::Quant;
use crate::lab::fit::{self, Doubt};
use crate::lab::pack::{PackOptions, natural_quant, pack, packed_bytes};
use crate::model::families::says_drelu;
use crate::model::source::{Source, source_files};
use crate::model::{Ffn, KvCache, KvType, Model, NamedActivation};
use clap::Args;
use std::path::{Path, PathBuf};

/// What every verb that runs a model takes.
#[derive(Args, Clone)]
pub struct ModelArgs {
    /// A Hugging Face directory, a .gguf, a packed .neurons file, or `demo`
    pub model: PathBuf,
    /// Type of the weights when the model has to be packed first: f32, f16, q8_0 or q4_0 [default: nearest to the model's]
    #[arg(long)]
    pub quant: Option<Quant>,
    /// Activation function of a model that does not say it, or says it wrong: relu, fatrelu(0.01), relu2, drelu (TurboSparse,
    /// Bamboo: relu of gate and up), silu, gelu
    #[arg(long, value_parser = parse_activation)]
    pub activation: Option<NamedActivation>,
}

#[derive(Args, Clone)]
pub struct EngineArgs {
    /// Threads to compute with [default: one per core]
    #[arg(short, long)]
    pub threads: Option<usize>,
    /// How keys and values are stored
    #[arg(long, value_enum, default_value_t = KvArg::F16)]
    pub kv: KvArg,
    /// Instruction set: avx512, avx2 or portable [default: the best there is]
    #[arg(long, hide_short_help = true, value_parser = parse_isa)]
    pub isa: Option<crate::cpu::Isa>,
}

#[derive(clap::ValueEnum, Clone, Copy)]
pub enum KvArg {
    F16,
    F32,
}

impl KvArg {
    pub fn kv(self) -> KvType {
        match self {
            KvArg::F16 => KvType::F16,
            KvArg::F32 => KvType::F32,
        }
    }
}

impl EngineArgs {
    pub fn kv(&self) -> KvType {
        self.kv.kv()
    }

    /// The engine, with its weights brought into memory where they fit.
    pub fn engine(&self, model: Model) -> Result<Engine> {
        let engine = self.unread(model)?;
        // A model larger than memory would push itself out again while it is read in.
        let store = engine.model.store();
        if crate::config::available_memory().is_none_or(|free| store.file_bytes() < free) {
            store.load();
        }
        Ok(engine)
    }

    /// The engine, of whose weights nothing was read yet.
    pub fn unread(&self, model: Model) -> Result<Engine> {
        let threads = self.threads.unwrap_or_else(crate::config::default_threads);
        if threads == 0 || threads > 1024 {
            return Err(Error::Usage(format!("--threads {threads}: take 1 to 1024")));
        }
        let kernels = match self.isa {
            None => Kernels::best(),
            Some(isa) => Kernels::of(isa)
                .ok_or_else(|| Error::Usage(format!("--isa {}: this CPU does not have it", isa.name())))?,
        };
        Ok(Engine::new(model, threads, kernels))
    }
}

pub fn parse_activation(text: &str) -> Result<NamedActivation, String> {
    NamedActivation::by_name(text, None)
}

fn parse_isa(text: &str) -> Result<crate::cpu::Isa, String> {
    let all = crate::cpu::Isa::ALL;
    all.into_iter().find(|i| i.name() == text).ok_or_else(|| "take avx512, avx2 or portable".into())
}

/// The file or directory that MODEL means.
pub fn find(model: &Path) -> Result<PathBuf> {
    if model.exists() {
        return Ok(model.to_owned());
    }
    let name = model.to_string_lossy();
    if matches!(&*name, "demo" | "demo-silu") {
        let places = crate::config::asset_dirs();
        if let Some(found) = places.iter().map(|dir| dir.join(&*name)).find(|dir| dir.join("config.json").exists()) {
            return Ok(found);
        }
        return Err(Error::Usage(format!(
            "the model '{name}' was not found: run from a checkout of the project, or set DYNAMICINFER_ASSETS to its assets directory"
        )));
    }
    Err(Error::Usage(format!(
        "there is no model at '{}': MODEL is a Hugging Face directory, a .gguf, a .neurons file, or `demo`",
        printable(&name)
    )))
}

impl ModelArgs {
    /// Opens the model, packing it into the cache directory first if that was not done yet.
    pub fn open(&self) -> Result<Model> {
        let path = find(&self.model)?;
        if !path.is_dir() && NeuronStore::is_one(&path) {
            let model = Model::open(&path)?;
            if let Some(quant) = self.quant.filter(|&q| q != model.quant) {
                let why = format!("{} is packed as {}", path.display(), model.quant.name());
                return Err(Error::Usage(format!("{why}, not {}; pack the original again", quant.name())));
            }
            return Ok(model);
        }
        // The store of the type that `run M` takes by itself has no type in its key; it serves those who name that type.
        let own = self.cached(&path, None)?;
        if let Some(quant) = self.quant
            && let Ok(opened) = NeuronStore::open(&own)
            && opened.header.quant == quant
            && opened.header.sources == source_files(&path)?
        {
            let model = Model::from_store(opened)?;
            if self.still_means(&path, &model)? {
                return Ok(model);
            }
        }
        let store = self.cached(&path, self.quant)?;
        if let Some(model) = up_to_date(&store, &path)?
            && self.still_means(&path, &model)?
        {
            return Ok(model);
        }
        let source = Source::open(&path, self.activation)?;
        let quant = match self.quant {
            Some(quant) => quant,
            None => natural_quant(&source)?,
        };
        let store = if quant == natural_quant(&source)? { own } else { store };
        let dir = store.parent().expect("the cache path has a directory");
        std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
        check_room(dir, packed_bytes(&source, quant))?;
        let progress =
            Progress::new(format!("packing {} as {}", printable(&source.config.name), quant.name()), Unit::Bytes);
        pack(&source, &store, &PackOptions { quant, orders: None }, &|done, total| progress.step(done, total))?;
        progress.finish();
        check_activation(&store)?;
        Model::open(&store)
    }

    /// Not of a store from the days when a model called after a dReLU model was packed as another, without a word.
    fn still_means(&self, path: &Path, packed: &Model) -> Result<bool> {
        let c = &packed.config;
        if self.activation.is_some()
            || c.ffn_kind != Ffn::Gated
            || !says_drelu(&format!("{} {}", path.display(), c.name))
        {
            return Ok(true);
        }
        let now = Source::open(path, None)?.config;
        Ok((now.activation, now.ffn_kind) == (c.activation, c.ffn_kind))
    }

    /// Where the packed form of `path` belongs. The name tells people what it is, the hash keeps models apart.
    fn cached(&self, path: &Path, quant: Option<Quant>) -> Result<PathBuf> {
        let real = path.canonicalize().map_err(Error::io("resolve", path))?;
        let cache = crate::config::cache_dir().ok_or_else(|| {
            Error::Usage(
                "there is no cache directory to pack into: set HOME or XDG_CACHE_HOME, or run `dynamicinfer pack`"
                    .into(),
            )
        })?;
        let key = format!("{}|{:?}|{:?}", real.display(), quant, self.activation);
        let name = real.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let hash = xxhash_rust::xxh3::xxh3_64(key.as_bytes());
        Ok(cache.join("models").join(format!("{name}-{hash:016x}.{EXTENSION}")))
    }
}

/// Warns if a freshly packed model looks like another activation than the one it was packed with.
pub fn check_activation(store: &Path) -> Result<()> {
    let bytes = std::fs::metadata(store).map_err(Error::io("stat", store))?.len();
    if let Some(free) = crate::config::available_memory().filter(|&free| free < bytes) {
        let (bytes, free) = (super::human_bytes(bytes), super::human_bytes(free));
        eprintln!(
            "note: not checked whether the activation fits: the packed model takes {bytes} of memory and {free} are free"
        );
        return Ok(());
    }
    let fit = match fit::measure(store, crate::config::default_threads(), Kernels::best()) {
        Ok(fit) => fit,
        Err(Error::Interrupted) => return Err(Error::Interrupted),
        Err(why) => {
            eprintln!("note: not checked whether the activation fits: {why}");
            return Ok(());
        }
    };
    if let Some((fit, Doubt { rather, why })) = fit.and_then(|fit| fit.doubt().map(|doubt| (fit, doubt))) {
        eprintln!(
            "warning: packed with {}, and it looks like a model with {rather}: {why}. If it is one, its answers are wrong: pack it \
             again with --activation {rather}",
            fit.packed_as
        );
    }
    Ok(())
}

/// The packed model, if it is there, whole, of this version, and made from the files as they are now.
fn up_to_date(store: &Path, source: &Path) -> Result<Option<Model>> {
    if !store.exists() {
        return Ok(None);
    }
    match NeuronStore::open(store) {
        Ok(opened) if opened.header.sources == source_files(source)? => Ok(Some(Model::from_store(opened)?)),
        Ok(_) => {
            eprintln!("{} has changed since it was packed; packing it again", source.display());
            Ok(None)
        }
        Err(error) => {
            eprintln!("{error}; packing it again");
            Ok(None)
        }
    }
}

/// That the model has these many positions and the machine the memory for them.
pub fn check_context(model: &Model, context: usize, kv: KvType) -> Result<()> {
    let trained = model.config.context;
    if context > trained && model.positions.is_some() {
        return Err(Error::Usage(format!("a context of {context}: this model has {trained} positions and no more")));
    }
    if context > trained {
        eprintln!("note: a context of {context} is beyond the {trained} positions this model was trained for");
    }
    let needed = KvCache::bytes_for(&model.config, context, kv);
    if let Some(available) = crate::config::available_memory().filter(|&a| a < needed) {
        return Err(Error::Memory(format!(
            "a context of {context} needs {} of memory and {} are free; take a smaller one",
            super::human_bytes(needed),
            super::human_bytes(available)
        )));
    }
    Ok(())
}

/// Bytes that may still be written to the file system of `dir`, where it says so.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(dir).ok()?;
    Some(stat.f_bavail * stat.f_frsize)
}

/// Refuses before gigabytes are written, not after.
pub fn check_room(dir: &Path, needed: u64) -> Result<()> {
    let Some(free) = free_bytes(dir).filter(|&free| free < needed) else { return Ok(()) };
    Err(Error::Failed(format!(
        "{} has {} free and the packed model needs {}; free some, or pack elsewhere: dynamicinfer pack MODEL -o FILE",
        dir.display(),
        super::human_bytes(free),
        super::human_bytes(needed)
    )))
}
