//! What all connections share: the model, the settings, the counters.

use crate::api::{ApiError, ServedModel};
use crate::clock::{self, Instant};
use crate::engine::Engine;
use crate::error::Result;
use crate::generation::{Handle, Limits, metrics::Number, start};
use crate::model::KvType;
use crate::settings::Settings;
use crate::tokenizer::Tokenizer;
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use tokio::sync::Notify;

/// A model, opened.
pub struct Opened {
    pub engine: Engine,
    pub tokenizer: Tokenizer,
    /// What requests call it.
    pub name: String,
    pub kv: KvType,
    pub context: usize,
    /// `None` without a device.
    pub set_budget: Option<SetBudget>,
}

/// Gives a running engine's device another budget, in bytes.
pub type SetBudget = Box<dyn Fn(&mut Engine, u64) -> Result<()> + Send + Sync>;

/// Opens the MODEL that somebody names; called on a thread of its own.
pub type Load = Arc<dyn Fn(&str, &Settings) -> Result<Opened> + Send + Sync>;

/// A model that answers.
pub struct Loaded {
    pub model: Arc<ServedModel>,
    pub handle: Handle,
    /// What was named to load it, and its size as stored.
    pub source: String,
    pub file_bytes: u64,
    pub kv_bytes: u64,
    pub threads: usize,
    pub predictor: String,
    pub device: Option<String>,
    pub set_budget: Option<SetBudget>,
}

#[derive(Clone)]
pub enum ModelState {
    None,
    Loading(String),
    Ready(Arc<Loaded>),
    /// Why the last attempt failed.
    Failed(String),
}

/// Counters of the daemon itself; the engine's are the worker's.
#[derive(Default)]
pub struct Counters {
    pub connections: Number,
    pub requests: Number,
    pub refused: Number,
}

pub struct Daemon {
    state: RwLock<ModelState>,
    settings: RwLock<Settings>,
    /// One load or unload at a time.
    loading: tokio::sync::Mutex<()>,
    load: Load,
    pub counters: Counters,
    pub started: Instant,
    /// What TCP asks for.
    pub token: Mutex<Option<String>>,
    /// Set once the daemon has been told to end: nothing new is taken.
    pub draining: std::sync::atomic::AtomicBool,
    /// The engine's thread has failed: the process is to end, so that whoever watches it starts it again.
    pub fatal: Notify,
    seed: u64,
    ids: Number,
}

impl Daemon {
    pub fn new(settings: Settings, load: Load) -> Daemon {
        Daemon {
            state: RwLock::new(ModelState::None),
            settings: RwLock::new(settings),
            loading: tokio::sync::Mutex::new(()),
            load,
            counters: Counters::default(),
            started: clock::now(),
            token: Mutex::new(None),
            draining: false.into(),
            fatal: Notify::new(),
            seed: crate::config::fresh_seed(),
            ids: Number::default(),
        }
    }

    pub fn state(&self) -> ModelState {
        self.state.read().clone()
    }

    pub fn settings(&self) -> Settings {
        self.settings.read().clone()
    }

    /// Takes over what may change; what may not is named.
    pub fn reload(&self, new: &Settings) -> Vec<&'static str> {
        self.settings.write().reload(new)
    }

    /// A number that no other request has: for its id and, where it names none, its seed.
    pub fn fresh(&self) -> u64 {
        self.ids.add(1);
        xxhash_rust::xxh3::xxh3_64_with_seed(&self.ids.get().to_le_bytes(), self.seed)
    }

    /// The model that answers.
    ///
    /// # Errors
    /// 503 while there is none.
    pub fn ready(&self) -> Result<Arc<Loaded>, ApiError> {
        if self.draining.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(ApiError::new(503, "the server is stopping").code("stopping").retry_after(5));
        }
        match self.state() {
            ModelState::Ready(loaded) if loaded.handle.is_alive() => Ok(loaded),
            ModelState::Ready(_) => {
                Err(ApiError::new(503, "the engine has failed; the server is ending").code("engine_failed"))
            }
            ModelState::Loading(name) => {
                Err(ApiError::new(503, format!("'{name}' is being loaded")).code("model_loading").retry_after(1))
            }
            ModelState::None => {
                Err(ApiError::new(503, "no model is loaded; load one: dynamicinfer load MODEL").code("no_model"))
            }
            ModelState::Failed(why) => {
                Err(ApiError::new(503, format!("the model could not be loaded: {why}")).code("model_failed"))
            }
        }
    }

    /// Ends the model's worker, after what it is doing, and gives its memory back.
    pub async fn unload(&self) {
        let _one = self.loading.lock().await;
        self.drop_model().await;
    }

    async fn drop_model(&self) {
        let before = std::mem::replace(&mut *self.state.write(), ModelState::None);
        if let ModelState::Ready(loaded) = before {
            loaded.handle.stop();
            loaded.handle.ended().await;
        }
    }

    /// Loads `source` in the place of what is loaded.
    ///
    /// # Errors
    /// What the loader says; the daemon then has no model.
    pub async fn load(self: &Arc<Daemon>, source: &str) -> Result<Arc<Loaded>> {
        let _one = self.loading.lock().await;
        self.drop_model().await;
        *self.state.write() = ModelState::Loading(source.to_owned());
        let (daemon, name) = (self.clone(), source.to_owned());
        let opening = tokio::task::spawn_blocking(move || daemon.open(&name));
        let loaded = opening.await.unwrap_or_else(|e| Err(crate::Error::Failed(format!("loading has failed: {e}"))));
        *self.state.write() = match &loaded {
            Ok(loaded) => ModelState::Ready(loaded.clone()),
            Err(error) => ModelState::Failed(error.to_string()),
        };
        if let Ok(loaded) = &loaded {
            let (daemon, loaded) = (self.clone(), loaded.clone());
            tokio::spawn(async move {
                loaded.handle.ended().await;
                // Told to stop, it is not in the state any more.
                if matches!(daemon.state(), ModelState::Ready(now) if Arc::ptr_eq(&now, &loaded)) {
                    daemon.fatal.notify_one();
                }
            });
        }
        loaded
    }

    fn open(&self, source: &str) -> Result<Arc<Loaded>> {
        let settings = self.settings();
        let Opened { engine, tokenizer, name, kv, context, set_budget } = (self.load)(source, &settings)?;
        let tokenizer = Arc::new(tokenizer);
        let limits = Limits {
            queue: settings.whole("serve.queue") as usize,
            slots: settings.whole("serve.parallel") as usize,
            context,
            kv,
            deterministic: settings.switch("serve.deterministic"),
        };
        let config = &engine.model.config;
        let kv_bytes = crate::model::KvCache::bytes_for(config, context, kv).saturating_mul(limits.slots as u64);
        let fingerprint = engine.model.store().header.fingerprint.clone();
        let model = ServedModel::new(name, tokenizer.clone(), config.vocab, context, fingerprint);
        let loaded = Loaded {
            model: Arc::new(model),
            source: source.to_owned(),
            file_bytes: engine.model.store().file_bytes(),
            kv_bytes,
            threads: engine.threads(),
            predictor: engine.sparsity().name(),
            device: engine.hybrid.as_ref().map(|hybrid| hybrid.cache.device.name()),
            set_budget,
            handle: start(engine, tokenizer, limits)?,
        };
        Ok(Arc::new(loaded))
    }
}
