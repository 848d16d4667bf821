//! Finds a model by its name or path, packs it if it is not packed yet, and opens it.

use super::embedded;
use super::listener::{Listener, Packing};
use super::stores::{self, Origin};
use crate::cpu::Kernels;
use crate::error::{Error, Result, human_bytes, printable};
use crate::evaluation::fit::{self, Doubt};
use crate::formats::gguf;
use crate::formats::neuron_store::{EXTENSION, NeuronStore, SourceFile};
use crate::hub;
use crate::model::families::says_drelu;
use crate::model::in_place::not_in_place;
use crate::model::source::{Source, entry, only_in_place, source_files};
use crate::model::{Ffn, KvCache, KvType, Model, NamedActivation};
use crate::pack::{PackOptions, Types, can_be_cut_for_device, pack, packed_bytes};
use std::path::{Path, PathBuf};

/// Bytes that are read without a word: about what a second brings from a disk.
const LONG_READ: u64 = 1 << 30;

/// Which model to open, and how to pack it if it is not packed yet.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// A Hugging Face directory, a GGUF file, a packed `.neurons` file, or the name of a demo model that comes with the program.
    pub path: PathBuf,
    /// Types of the packed weights; `None` takes those nearest to the model's.
    pub quant: Option<Types>,
    /// A device is to compute with it. A mix that a device cannot compute with is packed as q8_0 then.
    pub for_device: bool,
    /// Activation function of a model whose files do not name it, or name a wrong one; `None` takes the files'.
    pub activation: Option<NamedActivation>,
}

/// The file or directory that MODEL means: a path, the name of a demo model, that of a packed model in the cache, or the name on the hub of
/// one that was fetched.
///
/// # Errors
/// [`Error::Usage`] where there is no such model, or where several packed models or files of a fetched one have that name.
pub fn find(model: &Path) -> Result<PathBuf> {
    if model.exists() {
        return entry(model);
    }
    let name = model.to_string_lossy();
    let is_demo = matches!(&*name, "demo" | "demo-silu" | "demo-moe");
    if is_demo {
        let places = crate::config::asset_dirs();
        if let Some(found) = places.iter().map(|dir| dir.join(&*name)).find(|dir| dir.join("config.json").exists()) {
            return Ok(found);
        }
        if embedded::has_model(&name)
            && let Some(assets) = embedded::assets()?
        {
            return Ok(assets.join(&*name));
        }
    }
    if let Some(stored) = stores::named(&name)? {
        return Ok(stored.path);
    }
    if is_demo {
        return Err(Error::Usage(format!(
            "the model '{name}' was not found: run from a checkout of the project, or set DYNAMICINFER_ASSETS to its assets directory"
        )));
    }
    let fetched = hub::Name::parse(&name);
    if let Some(cache) = crate::config::hub().cache.map(hub::Cache) {
        let meant = if fetched.is_none() { cache.by_short_name(&name)? } else { fetched.clone() };
        if let Some(found) = meant.map(|name| cache.find(&name)).transpose()?.flatten() {
            return Ok(found);
        }
    }
    let fetch =
        fetched.map_or(String::new(), |name| format!("; if the Hugging Face hub has it: dynamicinfer pull {name}"));
    Err(Error::Usage(format!(
        "there is no model at '{}': MODEL is a Hugging Face directory, a .gguf, a .neurons file, a name that `dynamicinfer ls` lists, a \
         model's name on the hub after `pull`, or `demo`{fetch}",
        printable(&name)
    )))
}

/// The path by which another process finds the same model: absolute, with no links. The part of a GGUF keeps its name, which tells those of
/// the others: in the cache of the hub's tools a link has that name, and leads to a file that has not.
///
/// # Errors
/// Those of the system.
pub fn real(path: &Path) -> std::io::Result<PathBuf> {
    let name = path.file_name().filter(|name| gguf::parts_of(&name.to_string_lossy()).is_some());
    match (name, path.parent()) {
        (Some(name), Some(parent)) if path.exists() => {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            Ok(parent.canonicalize()?.join(name))
        }
        _ => path.canonicalize(),
    }
}

/// Keeps the fingerprint of a large model that is read in place in the user's cache directory.
pub fn keep_fingerprint(model: &mut Model) {
    if let Some(cache) = crate::config::cache_dir() {
        model.keep_fingerprint(cache.join("fingerprints"));
    }
}

impl ModelOptions {
    /// The model at `path`, packed as its files say.
    pub fn new(path: impl Into<PathBuf>) -> ModelOptions {
        ModelOptions { path: path.into(), quant: None, for_device: false, activation: None }
    }

    /// Opens the model; packs it into the cache directory first if that was not done yet.
    ///
    /// # Errors
    /// [`Error::Usage`] where there is no such model, [`Error::BadFile`] for files that are not a model, and the errors of packing.
    pub fn open(&self, told: &dyn Listener) -> Result<Model> {
        self.open_after(&|_| Ok(()), told)
    }

    /// As [`ModelOptions::open`], in the form in which a device computes all of it: a dense GGUF whose activation has no zeros is packed in
    /// clusters, with its own types, where it can be; anything else by neuron.
    ///
    /// # Errors
    /// As [`ModelOptions::open`].
    pub fn open_for_device(&self, told: &dyn Listener) -> Result<Model> {
        let clusters = self.in_place()?.is_some_and(|source| can_be_cut_for_device(&source));
        let quant = if clusters { Some(Types::Clusters) } else { self.quant };
        ModelOptions { quant, for_device: true, ..self.clone() }.open(told)
    }

    /// As [`ModelOptions::open`]; a model that is to be packed is packed only if `check` has nothing against its outline
    /// ([`Model::outline`]).
    ///
    /// # Errors
    /// As [`ModelOptions::open`], and those of `check`.
    pub fn open_after(&self, check: &dyn Fn(&Model) -> Result<()>, told: &dyn Listener) -> Result<Model> {
        let path = find(&self.path)?;
        if !path.is_dir() && NeuronStore::is_one(&path) {
            let model = Model::open(&path)?;
            if let Some(types) = self.quant.filter(|types| !types.are_of(&model)) {
                let why = format!("{} is packed as {}", path.display(), model.types());
                return Err(Error::Usage(format!("{why}, not {types}; pack the original again")));
            }
            let packed_with = (model.config.activation, model.config.ffn_kind == Ffn::GatedBoth);
            if let Some(asked) = self.activation.filter(|asked| (asked.function, asked.both) != packed_with) {
                let why = format!(
                    "{} is packed with {}",
                    path.display(),
                    NamedActivation { function: packed_with.0, both: packed_with.1 }
                );
                return Err(Error::Usage(format!("--activation {asked}: {why}; pack the original again with it")));
            }
            return Ok(model);
        }
        if let Some(model) =
            self.packed(&path, told)?.filter(|model| !self.for_device || model.not_on_device().is_none())
        {
            return Ok(model.from_source(&path));
        }
        let source = Source::open(&path, self.activation)?;
        if let Some(what) = source.config.only_in_place() {
            self.check_in_place(what)?;
            return Model::in_place(source);
        }
        let mut outline = Model::outline(source)?;
        keep_fingerprint(&mut outline);
        check(&outline)?;
        let source = outline.into_source().expect("it is the outline of one");
        self.pack(&path, source, told)
    }

    /// Packs the model at `path` into the cache directory.
    fn pack(&self, path: &Path, source: Source, told: &dyn Listener) -> Result<Model> {
        let natural = Types::natural(&source)?;
        let types = match self.quant {
            Some(types) => types,
            None if self.for_device => Types::for_device(&source)?,
            None => natural,
        };
        let store = self.cached(path, Some(types).filter(|&types| types != natural))?;
        let dir = store.parent().expect("the cache path has a directory");
        std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
        let bytes = packed_bytes(&source, types)?;
        check_room(dir, bytes)?;
        let what = format!("packing {} as {}", printable(&source.config.name), types.name(&source)?);
        told.may_pack(&Packing { what: &what, store: &store, bytes })?;
        let mut loss = None;
        told.packing(&what, &mut |step| {
            loss = pack(&source, &store, &PackOptions { types, orders: None }, step)?.text(types);
            Ok(())
        })?;
        if let Some(loss) = loss {
            told.note(&loss);
        }
        Origin::write(&store, path, source.files().to_vec());
        check_activation(&store, told)?;
        Ok(Model::open(&store)?.from_source(path))
    }

    /// The published model, if it can be read in place and nothing is gained by packing it: a GGUF of a dense model, of which no other
    /// type was asked for.
    ///
    /// # Errors
    /// As [`ModelOptions::open`].
    pub fn in_place(&self) -> Result<Option<Source>> {
        let path = find(&self.path)?;
        if NeuronStore::is_one(&path) {
            return Ok(None);
        }
        if self.quant.is_some() || path.is_dir() {
            let Some(what) = self.only_in_place()? else { return Ok(None) };
            self.check_in_place(what)?;
        }
        let source = Source::open(&path, self.activation)?;
        if source.config.only_in_place().is_some() {
            return Ok(Some(source));
        }
        let dense = !source.config.activation.is_sparse() && not_in_place(&source).is_none();
        Ok(dense.then_some(source))
    }

    /// Refuses what a model cannot be opened with that is always read in place, such as a mixture of experts.
    fn check_in_place(&self, what: &str) -> Result<()> {
        match self.quant {
            Some(_) => {
                Err(Error::Usage(format!("--quant: {what} is read where it lies, in its own types; leave it out")))
            }
            None => Ok(()),
        }
    }

    /// Why the model is always read in place, if it is. What is wrong with its files is said where they are opened.
    fn only_in_place(&self) -> Result<Option<&'static str>> {
        let path = find(&self.path)?;
        let is_source = path.is_dir() || !NeuronStore::is_one(&path);
        Ok(if is_source { only_in_place(&path, self.activation) } else { None })
    }

    /// The packed copy of `path` in the cache, if there is one that holds what the files now do.
    ///
    /// # Errors
    /// [`Error::Io`] where the files cannot be looked at, [`Error::Usage`] without a cache directory.
    pub fn packed(&self, path: &Path, told: &dyn Listener) -> Result<Option<Model>> {
        // The store of the default type has no type in its key; it also serves requests for that type by name.
        let own = self.cached(path, None)?;
        let serves = |types: Types| {
            let quant = NeuronStore::open(&own).map(|store| store.header.quant);
            quant.is_ok_and(|quant| types.one() == Some(quant))
        };
        let store = match self.quant {
            Some(types) if !serves(types) => self.cached(path, self.quant)?,
            _ => own,
        };
        match self.up_to_date(&store, path, told)? {
            Some(model) if self.still_means(path, &model)? => Ok(Some(model)),
            _ => Ok(None),
        }
    }

    /// The packed model, if it exists, is complete, of this version, and made from the files as they are now.
    fn up_to_date(&self, store: &Path, source: &Path, told: &dyn Listener) -> Result<Option<Model>> {
        if !store.exists() {
            return Ok(None);
        }
        let Some(opened) = usable(NeuronStore::open(store), told) else { return Ok(None) };
        let (now, origin) = (source_files(source)?, Origin::read(store));
        if origin.as_ref().is_some_and(|origin| origin.files == now) {
            return Ok(usable(Model::from_store(opened), told));
        }
        let same = opened.header.sources == now;
        let Some(model) = usable(Model::from_store(opened), told) else { return Ok(None) };
        if same || self.holds_what_is_packed(source, &now, &model, told) {
            Origin::write(store, source, now);
            return Ok(Some(model));
        }
        told.note(&format!("{} has changed since it was packed; packing it again", source.display()));
        Ok(None)
    }

    /// Whether files that were written to since they were packed, and are as long as they were then, still hold what is packed: copying
    /// or touching a file gives it another time. Reads all of them.
    fn holds_what_is_packed(&self, path: &Path, now: &[SourceFile], packed: &Model, told: &dyn Listener) -> bool {
        let Some(header) = packed.store().map(|store| &store.header) else { return false };
        let shape = |files: &[SourceFile]| files.iter().map(|f| (f.name.clone(), f.bytes)).collect::<Vec<_>>();
        if shape(now) != shape(&header.sources) {
            return false;
        }
        let bytes: u64 = now.iter().map(|file| file.bytes).sum();
        if bytes > LONG_READ {
            let (path, bytes) = (path.display(), human_bytes(bytes));
            told.note(&format!("{path} has a new date; reading its {bytes} to see whether it has changed"));
        }
        // What is wrong with the files is said where they are packed.
        let Ok(source) = Source::open(path, self.activation) else { return false };
        source.tokenizer == packed.tokenizer().ok() && source.fingerprint() == header.fingerprint
    }

    /// False for a store of an older version that packed a model named after a dReLU model with another activation, without a warning.
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

    /// Path of the packed form of `path` in the cache directory. The model's name in it is for people; the hash distinguishes models.
    fn cached(&self, path: &Path, types: Option<Types>) -> Result<PathBuf> {
        let real = path.canonicalize().map_err(Error::io("resolve", path))?;
        let cache = crate::config::cache_dir().ok_or_else(|| {
            Error::Usage(
                "there is no cache directory to pack into: set HOME or XDG_CACHE_HOME, or run `dynamicinfer pack`"
                    .into(),
            )
        })?;
        // As it was before there were mixes, so that what is packed is found.
        let types = match types {
            Some(Types::Mix(mix)) => format!("{mix:?}"),
            Some(Types::Clusters) => "Clusters".into(),
            types => format!("{:?}", types.and_then(Types::one)),
        };
        let key = format!("{}|{types}|{:?}", real.display(), self.activation);
        let name = hub::file_stem(path);
        let hash = xxhash_rust::xxh3::xxh3_64(key.as_bytes());
        Ok(cache.join("models").join(format!("{name}-{hash:016x}.{EXTENSION}")))
    }
}

/// What was read of a packed copy in the cache; `None` with a note if it cannot be used: it can be made again.
fn usable<T>(read: Result<T>, told: &dyn Listener) -> Option<T> {
    read.inspect_err(|error| told.note(&format!("{error}; packing it again"))).ok()
}

/// Warns `told` if a freshly packed model looks like one with another activation than it was packed with.
///
/// # Errors
/// [`Error::Io`] where the store cannot be read, [`Error::Interrupted`] after Ctrl-C. A check that fails otherwise is only noted.
pub fn check_activation(store: &Path, told: &dyn Listener) -> Result<()> {
    // What is counted is gates of neurons by themselves.
    if !Model::open(store)?.has_neurons() {
        return Ok(());
    }
    let bytes = std::fs::metadata(store).map_err(Error::io("stat", store))?.len();
    if let Some(free) = crate::config::available_memory().filter(|&free| free < bytes) {
        let (bytes, free) = (human_bytes(bytes), human_bytes(free));
        told.note(&format!(
            "note: not checked whether the activation fits: the packed model takes {bytes} of memory and {free} are free"
        ));
        return Ok(());
    }
    let fit = match fit::measure(store, crate::config::default_threads(), Kernels::best()) {
        Ok(fit) => fit,
        Err(Error::Interrupted) => return Err(Error::Interrupted),
        Err(why) => {
            told.note(&format!("note: not checked whether the activation fits: {why}"));
            return Ok(());
        }
    };
    if let Some((fit, Doubt { rather, why })) = fit.and_then(|fit| fit.doubt().map(|doubt| (fit, doubt))) {
        told.note(&format!(
            "warning: packed with {}, and it looks like a model with {rather}: {why}. If it is one, its answers are wrong: pack it \
             again with --activation {rather}",
            fit.packed_as
        ));
    }
    Ok(())
}

/// Checks that the model has `context` positions and the machine the memory for their keys and values. A context beyond the trained one is
/// noted, if the model can run it at all.
///
/// # Errors
/// [`Error::Usage`] for more positions than the model has and for a type that its heads do not fit, [`Error::Memory`] where keys and values do not fit.
pub fn check_context(model: &Model, context: usize, kv: KvType, told: &dyn Listener) -> Result<()> {
    let trained = model.config.context;
    if context > trained && model.positions.is_some() {
        return Err(Error::Usage(format!("a context of {context}: this model has {trained} positions and no more")));
    }
    if context > trained {
        told.note(&format!(
            "note: a context of {context} is beyond the {trained} positions this model was trained for"
        ));
    }
    model.config.attentions().try_for_each(|attention| kv.check(attention.head_dim))?;
    let needed = KvCache::bytes_for(&model.config, context, kv);
    if let Some(available) = crate::config::available_memory().filter(|&a| a < needed) {
        return Err(Error::Memory(format!(
            "a context of {context} needs {} of memory and {} are free; take a smaller one, or --kv q8_0",
            human_bytes(needed),
            human_bytes(available)
        )));
    }
    Ok(())
}

/// Bytes that may still be written to the file system of `dir`; `None` where it does not say.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(dir).ok()?;
    Some(stat.f_bavail * stat.f_frsize)
}

/// Checks before packing that `needed` bytes can be written below `dir`.
///
/// # Errors
/// [`Error::Failed`] where too little is free.
pub fn check_room(dir: &Path, needed: u64) -> Result<()> {
    let Some(free) = free_bytes(dir).filter(|&free| free < needed) else { return Ok(()) };
    Err(Error::Failed(format!(
        "{} has {} free and the packed model needs {}; free some, or pack elsewhere: dynamicinfer pack MODEL -o FILE",
        dir.display(),
        human_bytes(free),
        human_bytes(needed)
    )))
}
