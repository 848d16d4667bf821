//! What all connections share: the loaded model, the settings and the counters.

use super::limits::Limits as RequestLimits;
use super::loader::{AtEnd, Load, Offered, PathLimits, SetBudget};
use super::residency::Residency;
use super::unknown::IgnoredFields;
use super::wants::Wants;
use crate::api::keep_alive::Keep;
use crate::api::stored::StoredResponses;
use crate::api::{ApiError, ServedModel};
use crate::clock::{self, Duration, Instant};
use crate::config::Unguessable;
use crate::formats::{FileState, MappedFile};
use crate::generation::{Handle, metrics::Number};
use crate::settings::Settings;
use parking_lot::{Mutex, RwLock};
use std::ops::Deref;
use std::sync::Arc;
use tokio::sync::{Notify, watch};

/// Codes of refusals that loading a model may help.
pub const LOADING: &str = "model_loading";
/// As [`LOADING`].
pub const NO_MODEL: &str = "no_model";
/// As [`LOADING`].
pub const FREED: &str = "model_freed";
/// As [`LOADING`].
pub const FAILED: &str = "model_failed";

/// A model that answers requests.
pub struct Loaded {
    /// The model as requests see it.
    pub model: Arc<ServedModel>,
    /// The thread that runs it.
    pub handle: Handle,
    /// How it can be loaded again.
    pub offered: Offered,
    /// Whether a request's name is why it was loaded.
    pub on_demand: bool,
    /// What it was loaded with.
    pub(super) settings: Settings,
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
    pub(super) at_end: Mutex<Option<AtEnd>>,
    /// Requests under way whose work is not a job of the worker's, or not yet.
    pub(super) under_way: watch::Sender<usize>,
    /// When it was used last, and how long it is kept then; `None`: as the settings say.
    pub(super) kept: Mutex<(Instant, Option<Keep>)>,
    pub(super) files: Vec<MappedFile>,
    /// The state of the model's own file when it was last checked.
    pub(super) file_state: Mutex<FileState>,
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

    /// Has it kept for so long after its last use.
    pub fn keep(&self, keep: Keep) {
        self.kept.lock().1 = Some(keep);
    }

    pub(super) fn is_busy(&self) -> bool {
        *self.under_way.borrow() > 0 || self.handle.jobs() > 0
    }

    /// Whether it has been unused for as long as it is kept.
    pub(super) fn is_over(&self, settings: &Settings) -> bool {
        let mut kept = self.kept.lock();
        if self.is_busy() {
            kept.0 = clock::now();
            return false;
        }
        kept.1.unwrap_or_else(|| Keep::of_setting(settings.whole("serve.keep_alive"))).is_over(kept.0.elapsed())
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
        self.0.kept.lock().0 = clock::now();
        self.0.under_way.send_modify(|requests| *requests -= 1);
    }
}

/// Whether there is a model.
#[derive(Clone)]
pub enum ModelState {
    /// None was loaded, or it was unloaded.
    None,
    /// The first is being loaded; the second still has requests under way, which it answers before it goes.
    Loading(String, Option<Arc<Loaded>>),
    /// This one answers.
    Ready(Arc<Loaded>),
    /// This one was freed because it was unused; the next request loads it again.
    Freed(Offered),
    /// There is none because the last load failed, or because the loaded model can no longer be used; the reason.
    Failed(String),
}

impl ModelState {
    /// The model that answers, or that goes once it has answered.
    pub fn at_work(&self) -> Option<&Arc<Loaded>> {
        match self {
            ModelState::Ready(loaded) | ModelState::Loading(_, Some(loaded)) => Some(loaded),
            _ => None,
        }
    }
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
    /// Models that were loaded.
    pub loads: Number,
}

/// The state that all connections share.
pub struct Daemon {
    pub(super) state: RwLock<ModelState>,
    settings: RwLock<Settings>,
    /// Held while a model is loaded or unloaded: one at a time.
    pub(super) loading: tokio::sync::Mutex<()>,
    /// How often the user waits to load or unload a model, or has ended the daemon.
    pub(super) steered: watch::Sender<usize>,
    pub(super) load: Arc<dyn Load>,
    /// Models that the user had loaded, the last one last, with their settings: requests may name them, too.
    pub(super) known: Mutex<Vec<(Offered, Settings)>>,
    /// When models were loaded.
    pub residency: Mutex<Residency>,
    /// Requests that wait for another model.
    pub wants: Wants,
    /// What the daemon counts.
    pub counters: Counters,
    /// Fields of requests that were ignored, by client.
    pub ignored: IgnoredFields,
    /// Answers of `/v1/responses` that requests may go on from.
    pub stored: Arc<StoredResponses>,
    /// Limits on what requests take together.
    pub limits: RequestLimits,
    /// When the daemon started.
    pub started: Instant,
    /// The tokens one of which requests over TCP must carry; none if nothing listens on TCP.
    pub tokens: Mutex<Vec<String>>,
    /// True once the daemon has been told to end: it accepts no new requests.
    pub draining: std::sync::atomic::AtomicBool,
    /// Notified when the engine's thread has failed: the process then ends, so that its supervisor starts it again.
    pub fatal: Notify,
    numbers: Unguessable,
    ids: Number,
}

impl Daemon {
    /// A daemon without a model; `load` opens models.
    pub fn new(settings: Settings, load: Arc<dyn Load>) -> Daemon {
        let keep = Duration::from_secs(settings.whole("serve.responses_seconds"));
        Daemon {
            state: RwLock::new(ModelState::None),
            stored: Arc::new(StoredResponses::new(settings.whole("serve.responses_bytes"), keep)),
            limits: RequestLimits::new(&settings),
            settings: RwLock::new(settings),
            loading: tokio::sync::Mutex::new(()),
            steered: watch::channel(0).0,
            load,
            known: Mutex::default(),
            residency: Mutex::default(),
            wants: Wants::default(),
            counters: Counters::default(),
            ignored: IgnoredFields::default(),
            started: clock::now(),
            tokens: Mutex::new(Vec::new()),
            draining: false.into(),
            fatal: Notify::new(),
            numbers: Unguessable::new(),
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

    /// A number that no other request has and no client can guess: for its id, by which a kept answer is found, and, if it names none, its seed.
    pub fn fresh(&self) -> u64 {
        self.ids.add(1);
        self.numbers.number(self.ids.get())
    }

    /// The model that answers.
    ///
    /// # Errors
    /// 503 if there is none, with the reason.
    pub fn ready(&self) -> Result<Arc<Loaded>, ApiError> {
        self.answering(&self.state.read())
    }

    /// The model that answers, for a request that begins and that `is_it` accepts it for.
    ///
    /// # Errors
    /// As [`Daemon::ready`]; those of `is_it`.
    pub fn begin(&self, is_it: impl FnOnce(&Loaded) -> Result<(), ApiError>) -> Result<UnderWay, ApiError> {
        // Under the lock: a model that is loaded afterwards sees this request.
        let state = self.state.read();
        let loaded = self.answering(&state)?;
        is_it(&loaded)?;
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
            ModelState::Loading(name, _) => {
                Err(ApiError::new(503, format!("'{name}' is being loaded")).code(LOADING).retry_after(1))
            }
            ModelState::None => {
                Err(ApiError::new(503, "no model is loaded; load one: dynamicinfer load MODEL").code(NO_MODEL))
            }
            ModelState::Freed(offered) => {
                let message = format!("'{}' was freed; a request for an answer loads it again", offered.name);
                Err(ApiError::new(503, message).code(FREED).retry_after(1))
            }
            ModelState::Failed(why) => Err(ApiError::new(503, why.clone()).code(FAILED)),
        }
    }
}
