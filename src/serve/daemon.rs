//! What all connections share: the loaded model, the settings and the counters.

use super::limits::Limits as RequestLimits;
use super::unknown::IgnoredFields;
use crate::api::{ApiError, ServedModel};
use crate::clock::{self, Duration, Instant};
use crate::engine::sampler::SamplingParams;
use crate::engine::{Engine, Failure};
use crate::error::{Error, Result};
use crate::formats::{FileState, MappedFile};
use crate::generation::{Handle, Limits, metrics::Number, start};
use crate::model::KvType;
use crate::settings::Settings;
use crate::tokenizer::Tokenizer;
use parking_lot::{Mutex, RwLock};
use std::ops::Deref;
use std::sync::Arc;
use tokio::sync::{Notify, watch};

/// A model as a loader opened it.
pub struct Opened {
    /// The engine, with the model in it.
    pub engine: Engine,
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// Its name in requests.
    pub name: String,
    /// How keys and values are stored.
    pub kv: KvType,
    /// Positions of each sequence.
    pub context: usize,
    /// How tokens are drawn for requests that do not say it.
    pub sampling: SamplingParams,
    /// Changes the device's memory budget; `None` without a device.
    pub set_budget: Option<SetBudget>,
    /// Changes the host memory limit of the model; `None` if the whole model is in memory.
    pub set_ram: Option<SetBudget>,
    /// The rates in the machine's profile; `None` if it was never measured.
    pub limits: Option<PathLimits>,
    /// To be done before the engine is dropped; `None` for nothing.
    pub at_end: Option<AtEnd>,
}

/// How fast neurons can be read on each path, as the machine's profile has it, GB/s.
#[derive(Clone, Copy, Debug)]
pub struct PathLimits {
    /// Host memory, read by the CPU.
    pub cpu_gb_s: f64,
    /// Device memory, read by the device.
    pub device_gb_s: f64,
    /// The link, from host to device memory.
    pub link_gb_s: f64,
}

/// Saves what an engine has learnt.
pub type AtEnd = Box<dyn FnOnce(&mut Engine) + Send>;

/// Gives a running engine another budget of one of its memories, in bytes.
pub type SetBudget = Box<dyn Fn(&mut Engine, u64) -> Result<()> + Send + Sync>;

/// Opens the model that a user named; called on a thread that may wait.
pub trait Load: Send + Sync {
    /// Checks whether `model` can be opened, as far as its files and the plan of its placement tell. Called while another model answers,
    /// whose memory it must leave alone.
    ///
    /// # Errors
    /// As [`Load::open`].
    fn check(&self, model: &str, settings: &Settings) -> Result<()>;

    /// Opens `model`: a name or path.
    ///
    /// # Errors
    /// What is wrong with its files or the settings, or that memory is too small.
    fn open(&self, model: &str, settings: &Settings) -> Result<Opened>;
}

/// How often a model's files are checked: no answer is computed from changed files for longer than half a second.
const LOOK: Duration = Duration::from_millis(500);

/// A model that answers requests.
pub struct Loaded {
    /// The model as requests see it.
    pub model: Arc<ServedModel>,
    /// The thread that runs it.
    pub handle: Handle,
    /// What the user named to load it.
    pub source: String,
    /// What it was loaded with.
    settings: Settings,
    /// Bytes of its file.
    pub file_bytes: u64,
    /// Bytes of the keys and values of all sequence slots.
    pub kv_bytes: u64,
    /// Threads that compute.
    pub threads: usize,
    /// Its predictors by layer, as [`crate::engine::Sparsity::name`] writes them.
    pub predictor: String,
    /// Name of the device; `None` without one.
    pub device: Option<String>,
    /// As in [`Opened`].
    pub set_budget: Option<SetBudget>,
    /// As in [`Opened`].
    pub set_ram: Option<SetBudget>,
    /// As in [`Opened`].
    pub limits: Option<PathLimits>,
    at_end: Mutex<Option<AtEnd>>,
    /// Requests under way whose work is not a job of the worker's, or not yet.
    under_way: watch::Sender<usize>,
    files: Vec<MappedFile>,
    /// The state of the model's own file when it was last checked.
    file_state: Mutex<FileState>,
}

impl Loaded {
    /// The state of the model's own file when it was last checked.
    pub fn file_state(&self) -> FileState {
        self.file_state.lock().clone()
    }

    /// Waits until no request is under way and no answer waits or runs, or the worker has ended.
    pub async fn idle(&self) {
        let mut under_way = self.under_way.subscribe();
        let none = async {
            // What a request hands in before it is through is waited for as a job. The sender lives as long as `self`.
            let _ = under_way.wait_for(|&requests| requests == 0).await;
            self.handle.idle().await;
        };
        tokio::select! {
            () = none => {}
            () = self.handle.ended() => {}
        }
    }

    /// Ends the worker after the current pass, and saves what it has learnt.
    pub async fn end(&self) {
        let at_end = self.at_end.lock().take();
        if let Some(at_end) = at_end {
            // A failed worker has nothing to save.
            let _ = self.handle.ask(0, at_end).await;
        }
        self.handle.stop();
        self.handle.ended().await;
    }
}

/// A request's hold on the model that answers it: until it is dropped, another model that is loaded waits, for as long as it waits for
/// answers.
pub struct UnderWay(Arc<Loaded>);

impl Deref for UnderWay {
    type Target = Arc<Loaded>;

    fn deref(&self) -> &Arc<Loaded> {
        &self.0
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.send_modify(|requests| *requests -= 1);
    }
}

/// Whether there is a model.
#[derive(Clone)]
pub enum ModelState {
    /// None was loaded, or it was unloaded.
    None,
    /// This one is being loaded.
    Loading(String),
    /// This one answers.
    Ready(Arc<Loaded>),
    /// There is none because the last load failed, or because the loaded model can no longer be used; the reason.
    Failed(String),
}

/// Counters of the daemon itself; the engine's are in [`crate::generation::Metrics`].
#[derive(Default)]
pub struct Counters {
    /// Connections that were accepted.
    pub connections: Number,
    /// Requests that were answered.
    pub requests: Number,
    /// Of these, requests answered with a status of 400 or more.
    pub refused: Number,
}

/// The state that all connections share.
pub struct Daemon {
    state: RwLock<ModelState>,
    settings: RwLock<Settings>,
    /// Held while a model is loaded or unloaded: one at a time.
    loading: tokio::sync::Mutex<()>,
    load: Arc<dyn Load>,
    /// What the daemon counts.
    pub counters: Counters,
    /// Fields of requests that were ignored, by client.
    pub ignored: IgnoredFields,
    /// Limits on what requests take together.
    pub limits: RequestLimits,
    /// When the daemon started.
    pub started: Instant,
    /// The token that requests over TCP must carry; `None` if nothing listens on TCP.
    pub token: Mutex<Option<String>>,
    /// True once the daemon has been told to end: it accepts no new requests.
    pub draining: std::sync::atomic::AtomicBool,
    /// Notified when the engine's thread has failed: the process then ends, so that its supervisor starts it again.
    pub fatal: Notify,
    seed: u64,
    ids: Number,
}

impl Daemon {
    /// A daemon without a model; `load` opens models.
    pub fn new(settings: Settings, load: Arc<dyn Load>) -> Daemon {
        Daemon {
            state: RwLock::new(ModelState::None),
            limits: RequestLimits::new(&settings),
            settings: RwLock::new(settings),
            loading: tokio::sync::Mutex::new(()),
            load,
            counters: Counters::default(),
            ignored: IgnoredFields::default(),
            started: clock::now(),
            token: Mutex::new(None),
            draining: false.into(),
            fatal: Notify::new(),
            seed: crate::config::fresh_seed(),
            ids: Number::default(),
        }
    }

    /// Whether there is a model, now.
    pub fn state(&self) -> ModelState {
        self.state.read().clone()
    }

    /// The settings, now.
    pub fn settings(&self) -> Settings {
        self.settings.read().clone()
    }

    /// Applies the settings in `new` that may change while the daemon runs. Returns the names of changed settings that may not.
    pub fn reload(&self, new: &Settings) -> Vec<&'static str> {
        self.settings.write().reload(new)
    }

    /// A number that no other request has: for its id and, if it names none, its seed.
    pub fn fresh(&self) -> u64 {
        self.ids.add(1);
        xxhash_rust::xxh3::xxh3_64_with_seed(&self.ids.get().to_le_bytes(), self.seed)
    }

    /// The model that answers.
    ///
    /// # Errors
    /// 503 if there is none, with the reason.
    pub fn ready(&self) -> Result<Arc<Loaded>, ApiError> {
        self.answering(&self.state.read())
    }

    /// The model that answers, for a request that begins.
    ///
    /// # Errors
    /// As [`Daemon::ready`].
    pub fn begin(&self) -> Result<UnderWay, ApiError> {
        // Under the lock: a model that is loaded afterwards sees this request.
        let state = self.state.read();
        let loaded = self.answering(&state)?;
        loaded.under_way.send_modify(|requests| *requests += 1);
        Ok(UnderWay(loaded))
    }

    fn answering(&self, state: &ModelState) -> Result<Arc<Loaded>, ApiError> {
        if self.draining.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(ApiError::new(503, "the server is stopping").code("stopping").retry_after(5));
        }
        match state {
            ModelState::Ready(loaded) if loaded.handle.is_alive() => Ok(loaded.clone()),
            ModelState::Ready(_) => {
                Err(ApiError::new(503, "the engine has failed; the server ends").code("engine_failed"))
            }
            ModelState::Loading(name) => {
                Err(ApiError::new(503, format!("'{name}' is being loaded")).code("model_loading").retry_after(1))
            }
            ModelState::None => {
                Err(ApiError::new(503, "no model is loaded; load one: dynamicinfer load MODEL").code("no_model"))
            }
            ModelState::Failed(why) => Err(ApiError::new(503, why.clone()).code("model_failed")),
        }
    }

    /// Ends the model's worker after the current pass, and frees its memory.
    pub async fn unload(&self) {
        let _one = self.loading.lock().await;
        self.drop_model().await;
    }

    async fn drop_model(&self) {
        let before = std::mem::replace(&mut *self.state.write(), ModelState::None);
        if let ModelState::Ready(loaded) = before {
            loaded.end().await;
        }
    }

    /// Loads `source` in place of the current model. That one answers until the files of the new one have been checked; then it has
    /// `serve.drain_seconds` to finish what it was asked, and new requests are refused as "is being loaded".
    ///
    /// # Errors
    /// What the loader reports. If its check fails, the current model stays; otherwise it is loaded again.
    pub async fn load(self: &Arc<Daemon>, source: &str) -> Result<Arc<Loaded>> {
        self.load_as(source, self.settings()).await
    }

    /// As [`Daemon::load`], with settings that hold for this model alone.
    ///
    /// # Errors
    /// As [`Daemon::load`].
    pub async fn load_as(self: &Arc<Daemon>, source: &str, settings: Settings) -> Result<Arc<Loaded>> {
        let _one = self.loading.lock().await;
        let before = match self.state() {
            ModelState::Ready(before) if before.handle.is_alive() => {
                let settings = settings.clone();
                self.on_a_thread(source, move |daemon, source| daemon.load.check(source, &settings)).await?;
                Some(before)
            }
            _ => None,
        };
        *self.state.write() = ModelState::Loading(source.to_owned());
        let again = before.as_ref().map(|before| (before.source.clone(), before.settings.clone()));
        if let Some(before) = before {
            let patience = Duration::from_secs(self.settings().whole("serve.drain_seconds"));
            // Answers not finished by then are told that the server is stopping them.
            let _ = tokio::time::timeout(patience, before.idle()).await;
            before.end().await;
        }
        let loaded = self.open_on_a_thread(source, settings).await;
        let now = match (&loaded, again) {
            (Err(_), Some((source, settings))) => self.open_on_a_thread(&source, settings).await.ok(),
            (loaded, _) => loaded.as_ref().ok().cloned(),
        };
        *self.state.write() = match (&now, &loaded) {
            (Some(now), _) => ModelState::Ready(now.clone()),
            (None, Err(error)) => ModelState::Failed(format!("the model could not be loaded: {error}")),
            (None, Ok(_)) => unreachable!("what was loaded is what there is now"),
        };
        if let Some(now) = now {
            let daemon = self.clone();
            tokio::spawn(async move { daemon.look_after(&now).await });
        }
        loaded
    }

    async fn open_on_a_thread(self: &Arc<Daemon>, source: &str, settings: Settings) -> Result<Arc<Loaded>> {
        let began = clock::now();
        let loaded = self.on_a_thread(source, move |daemon, source| daemon.open(source, &settings)).await;
        let ms = began.elapsed().as_millis() as u64;
        match &loaded {
            Ok(loaded) => tracing::info!(model = loaded.model.name, ms, "loaded"),
            Err(error) => tracing::warn!(source = crate::error::printable(source), ms, reason = %error, "not loaded"),
        }
        loaded
    }

    /// Runs `work` on a thread that may wait.
    async fn on_a_thread<T: Send + 'static>(
        self: &Arc<Daemon>,
        source: &str,
        work: impl FnOnce(&Daemon, &str) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (daemon, source) = (self.clone(), source.to_owned());
        let working = tokio::task::spawn_blocking(move || work(&daemon, &source));
        working.await.unwrap_or_else(|e| Err(Error::Failed(format!("loading has failed: {e}"))))
    }

    /// Checks, until the worker has ended, whether the model's files are still as they were opened.
    async fn look_after(&self, loaded: &Arc<Loaded>) {
        let failure = loop {
            tokio::select! {
                () = loaded.handle.ended() => break loaded.handle.failure().cloned(),
                () = tokio::time::sleep(LOOK) => {}
            }
            let files = loaded.files.clone();
            // File systems may block.
            let looked = tokio::task::spawn_blocking(move || (Failure::of_files(&files), files[0].state())).await;
            let Ok((failure, state)) = looked else { continue };
            if failure.is_some() {
                break failure;
            }
            *loaded.file_state.lock() = state;
        };
        let Some(failure) = failure else { return };
        {
            let mut state = self.state.write();
            // Another model may have taken its place meanwhile.
            if !matches!(&*state, ModelState::Ready(now) if Arc::ptr_eq(now, loaded)) {
                return;
            }
            if !failure.is_fatal() {
                *state = ModelState::Failed(failure.to_string());
            }
        }
        tracing::error!("{failure}");
        if failure.is_fatal() {
            self.fatal.notify_one();
        }
        loaded.handle.fail(failure);
    }

    fn open(&self, source: &str, settings: &Settings) -> Result<Arc<Loaded>> {
        let Opened { engine, tokenizer, name, kv, context, sampling, set_budget, set_ram, limits: path_limits, at_end } =
            self.load.open(source, settings)?;
        let files = engine.files();
        // Parts that could not be read while loading are zeros.
        files.iter().try_for_each(MappedFile::check_same)?;
        let tokenizer = Arc::new(tokenizer);
        let limits = Limits {
            queue: settings.whole("serve.queue") as usize,
            slots: settings.whole("serve.parallel") as usize,
            context,
            kv,
            deterministic: settings.switch("serve.deterministic"),
            rest: Duration::from_secs(settings.whole("serve.rest_seconds")),
            slowdown: settings.number("serve.slowdown"),
        };
        let config = &engine.model.config;
        let kv_bytes = crate::model::KvCache::bytes_for(config, context, kv).saturating_mul(limits.slots as u64);
        let fingerprint = engine.model.fingerprint().to_owned();
        let model =
            ServedModel::new(name, tokenizer.clone(), config.vocab, context, fingerprint).with_sampling(sampling);
        let loaded = Loaded {
            model: Arc::new(model),
            source: source.to_owned(),
            settings: settings.clone(),
            file_bytes: engine.model.file_bytes(),
            kv_bytes,
            threads: engine.threads(),
            predictor: engine.sparsity().name(),
            device: engine.split.as_ref().map(|split| split.device.name()),
            set_budget,
            set_ram,
            limits: path_limits,
            at_end: Mutex::new(at_end),
            under_way: watch::channel(0).0,
            files,
            file_state: Mutex::new(FileState::Same),
            handle: start(engine, tokenizer, limits)?,
        };
        Ok(Arc::new(loaded))
    }
}
