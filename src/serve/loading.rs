//! Loads models for the user or for a request that names one, frees them, and watches the loaded one.

use super::daemon::{Daemon, Loaded, ModelState};
use super::loader::{Offered, Opened};
use crate::api::ServedModel;
use crate::clock::{self, Duration};
use crate::engine::Failure;
use crate::error::{Error, Result};
use crate::formats::{FileState, MappedFile};
use crate::generation::{Limits, PromptDir, Speculation, start_with};
use crate::settings::{Origin, Settings};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::watch;

/// Models that the user had loaded and that are remembered, at most.
const MAX_KNOWN: usize = 64;

/// How often a model's files are checked: no answer is computed from changed files for longer than half a second.
const LOOK: Duration = Duration::from_millis(500);

/// What becomes of a model whose place another is to take.
#[derive(Clone, Copy, PartialEq)]
enum Leave {
    /// It is ended, and what it still answers is cut.
    Cut,
    /// It stays.
    Stay,
}

/// A model to load.
struct ToLoad<'a> {
    source: &'a str,
    /// What clients are told of it meanwhile.
    shown: &'a str,
    settings: Settings,
    /// The model that a request named; `None`: the user had it loaded.
    asked: Option<&'a Offered>,
}

impl Daemon {
    /// Ends the model's worker after the current pass, and frees its memory.
    pub async fn unload(&self) {
        let _one = self.steering().await;
        let before = std::mem::replace(&mut *self.state.write(), ModelState::None);
        if let ModelState::Freed(offered) = &before {
            self.forget(&offered.origin);
        }
        if let ModelState::Ready(loaded) = before {
            self.forget(&loaded.offered.origin);
            loaded.end().await;
        }
    }

    /// Frees a model that was unused for as long as it is kept; false if it is used again, or another is loaded.
    async fn free(&self, loaded: &Arc<Loaded>) -> bool {
        let Ok(_one) = self.loading.try_lock() else { return false };
        {
            let mut state = self.state.write();
            if !matches!(&*state, ModelState::Ready(now) if Arc::ptr_eq(now, loaded)) || loaded.is_busy() {
                return false;
            }
            *state = ModelState::Freed(loaded.offered.clone());
        }
        tracing::info!(model = loaded.model.name, "freed");
        loaded.end().await;
        true
    }

    fn remember(&self, loaded: &Loaded) {
        let mut known = self.known.lock();
        known.retain(|(one, _)| one.origin != loaded.offered.origin);
        known.push((loaded.offered.clone(), loaded.settings.clone()));
        if known.len() > MAX_KNOWN {
            known.remove(0);
        }
    }

    fn forget(&self, origin: &str) {
        self.known.lock().retain(|(one, _)| one.origin != origin);
    }

    /// All models that requests may name, the loaded one first, then those that the user had loaded. Reads folders.
    pub fn offered(&self) -> Vec<Offered> {
        let settings = self.settings();
        let mut all: Vec<Offered> = self.state().at_work().iter().map(|loaded| loaded.offered.clone()).collect();
        all.extend(self.known.lock().iter().map(|(one, _)| one.clone()));
        if settings.switch("serve.on_demand") {
            all.extend(self.load.offered(&settings));
        }
        let mut seen = BTreeSet::new();
        all.retain(|one| seen.insert(one.origin.clone()));
        all
    }

    /// The model that a request names, with the settings that it is loaded with; `None` if there is none of that name. Reads folders.
    ///
    /// # Errors
    /// [`Error::Usage`] where several models have the name.
    pub fn named(&self, name: &str) -> Result<Option<(Offered, Settings)>> {
        let name = name.strip_suffix(":latest").unwrap_or(name);
        if let Some(known) = self.known.lock().iter().find(|(one, _)| one.name == name) {
            return Ok(Some(known.clone()));
        }
        let mut settings = self.settings();
        let Some(offered) = self.load.named(name, &settings)? else { return Ok(None) };
        let known = self.known.lock().iter().find(|(one, _)| one.origin == offered.origin).cloned();
        settings.set("serve.name", &offered.name, Origin::Load)?;
        Ok(Some(known.unwrap_or((offered, settings))))
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
        let _one = self.steering().await;
        let patience = Duration::from_secs(self.settings().whole("serve.drain_seconds"));
        // Answers not finished by then are told that the server is stopping them.
        let leave = async {
            tokio::time::sleep(patience).await;
            Leave::Cut
        };
        let ask = ToLoad { source, shown: source, settings, asked: None };
        let loaded = self.replace(ask, leave).await?.expect("a load that cuts answers is not given up");
        self.remember(&loaded);
        Ok(loaded)
    }

    /// The right to load or unload, for the user: a swap for a request that waits for answers under way is given up for it.
    async fn steering(&self) -> tokio::sync::MutexGuard<'_, ()> {
        struct Waits<'a>(&'a watch::Sender<usize>);
        impl Drop for Waits<'_> {
            fn drop(&mut self) {
                self.0.send_modify(|waiting| *waiting -= 1);
            }
        }
        self.steered.send_modify(|waiting| *waiting += 1);
        let _waits = Waits(&self.steered);
        self.loading.lock().await
    }

    /// Returns once the user waits to load or unload a model, or the daemon ends.
    pub async fn is_steered(&self) {
        // The sender lives as long as `self`.
        let _ = self.steered.subscribe().wait_for(|&waiting| waiting > 0).await;
    }

    /// Loads `offered` once no request of the current model is under way. Requests that come meanwhile wait for it. `None`: `given_up` came
    /// first, and the current model stays.
    ///
    /// # Errors
    /// As [`Daemon::load`].
    pub async fn load_on_demand(
        self: &Arc<Daemon>,
        offered: &Offered,
        settings: Settings,
        given_up: impl Future<Output = ()>,
    ) -> Result<Option<Arc<Loaded>>> {
        let _one = self.loading.lock().await;
        match self.state() {
            ModelState::Ready(loaded) if loaded.offered.origin == offered.origin && loaded.handle.is_alive() => {
                return Ok(Some(loaded));
            }
            _ => {}
        }
        let leave = async {
            given_up.await;
            Leave::Stay
        };
        let ask = ToLoad { source: &offered.source, shown: &offered.name, settings, asked: Some(offered) };
        self.replace(ask, leave).await
    }

    /// Loads a model in place of the current one, which has until `leave` to finish what it was asked. `None`: it stays.
    async fn replace(
        self: &Arc<Daemon>,
        ask: ToLoad<'_>,
        leave: impl Future<Output = Leave>,
    ) -> Result<Option<Arc<Loaded>>> {
        let last = self.state();
        let before = match &last {
            ModelState::Ready(before) if before.handle.is_alive() => Some(before.clone()),
            _ => None,
        };
        let (on_demand, origin) = (ask.asked.is_some(), ask.asked.map(|asked| asked.origin.clone()));
        if before.is_some() || on_demand {
            let settings = ask.settings.clone();
            self.on_a_thread(ask.source, move |daemon, source| daemon.load.check(source, &settings, !on_demand))
                .await?;
        }
        *self.state.write() = ModelState::Loading(ask.shown.to_owned(), before.clone());
        if let Some(before) = &before {
            let left = tokio::select! {
                () = before.idle() => Leave::Cut,
                left = leave => left,
            };
            let stays = left == Leave::Stay || on_demand && self.draining.load(Ordering::SeqCst);
            if stays && before.handle.is_alive() {
                *self.state.write() = ModelState::Ready(before.clone());
                return Ok(None);
            }
            *self.state.write() = ModelState::Loading(ask.shown.to_owned(), None);
            before.end().await;
        }
        let again = before.map(|b| (b.offered.clone(), b.settings.clone(), b.on_demand));
        let loaded = self.open_on_a_thread(ask.source, ask.settings, origin, on_demand).await;
        if let (Err(_), Some(asked)) = (&loaded, ask.asked) {
            // Another model had to go for it in vain: it is not tried again at once.
            self.residency.lock().note(&asked.origin, clock::now());
        }
        let now = match (&loaded, again) {
            (Err(_), Some((Offered { source, origin, .. }, settings, on_demand))) => {
                self.open_on_a_thread(&source, settings, Some(origin), on_demand).await.ok()
            }
            (loaded, _) => loaded.as_ref().ok().cloned(),
        };
        *self.state.write() = match (&now, &loaded) {
            (Some(now), _) => ModelState::Ready(now.clone()),
            // A request for a model that cannot be loaded changes nothing for the others.
            (None, Err(_)) if on_demand && !matches!(last, ModelState::Ready(_)) => last,
            (None, Err(error)) => {
                ModelState::Failed(format!("the model could not be loaded: {}", error.without_folder()))
            }
            (None, Ok(_)) => unreachable!("what was loaded is what there is now"),
        };
        if let Some(now) = now {
            let daemon = self.clone();
            tokio::spawn(async move { daemon.look_after(&now).await });
        }
        loaded.map(Some)
    }

    async fn open_on_a_thread(
        self: &Arc<Daemon>,
        source: &str,
        settings: Settings,
        origin: Option<String>,
        on_demand: bool,
    ) -> Result<Arc<Loaded>> {
        let began = clock::now();
        let open = move |daemon: &Daemon, source: &str| daemon.open(source, &settings, origin, on_demand);
        let loaded = self.on_a_thread(source, open).await;
        let ms = began.elapsed().as_millis() as u64;
        match &loaded {
            Ok(loaded) => {
                self.counters.loads.add(1);
                self.residency.lock().note(&loaded.offered.origin, clock::now());
                tracing::info!(model = loaded.model.name, ms, "loaded");
            }
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

    /// Checks, until the worker has ended, whether the model's files are still as they were opened, and whether it is still used.
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
            if loaded.is_over(&self.settings()) && self.free(loaded).await {
                return;
            }
        };
        let Some(failure) = failure else { return };
        {
            let mut state = self.state.write();
            // Another model may have taken its place meanwhile, or may be about to.
            match &*state {
                ModelState::Ready(now) if Arc::ptr_eq(now, loaded) => {
                    if !failure.is_fatal() {
                        *state = ModelState::Failed(failure.to_string());
                    }
                }
                ModelState::Loading(_, Some(now)) if Arc::ptr_eq(now, loaded) => {}
                _ => return,
            }
        }
        tracing::error!("{failure}");
        if failure.is_fatal() {
            self.fatal.notify_one();
        }
        loaded.handle.fail(failure);
    }

    /// `origin` is what it was offered as; `None`: what it is opened as.
    fn open(&self, source: &str, settings: &Settings, origin: Option<String>, on_demand: bool) -> Result<Arc<Loaded>> {
        let opened = self.load.open(source, settings)?;
        let Opened { engine, tokenizer, name, kv, context, prompt_bytes, sampling, system, .. } = opened;
        let origin = origin.unwrap_or(opened.origin);
        let (set_budget, set_ram, path_limits, at_end) =
            (opened.set_budget, opened.set_ram, opened.limits, opened.at_end);
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
            prompt_cache_bytes: prompt_bytes,
            prompt_cache_every: settings.whole("serve.prompt_cache_every") as usize,
            speculation: settings.text("serve.speculation").and_then(Speculation::named).unwrap_or_default(),
        };
        let prompts = settings
            .text("serve.prompt_cache")
            .map(|path| PromptDir { path: path.into(), bytes: settings.whole("serve.prompt_cache_disk_bytes") });
        let config = &engine.model.config;
        let kv_bytes = crate::model::KvCache::bytes_for(config, context, kv).saturating_mul(limits.slots as u64);
        let fingerprint = engine.model.fingerprint().to_owned();
        let model = ServedModel::new(name, tokenizer.clone(), config.vocab, context, fingerprint);
        let model = model.with_defaults(sampling, system);
        let (name, source, modified) = (model.name.clone(), source.to_owned(), model.created);
        let loaded = Loaded {
            model: Arc::new(model),
            offered: Offered { name, origin, source, bytes: engine.model.file_bytes(), modified },
            on_demand,
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
            kept: Mutex::new((clock::now(), None)),
            files,
            file_state: Mutex::new(FileState::Same),
            handle: start_with(engine, tokenizer, limits, prompts)?,
        };
        Ok(Arc::new(loaded))
    }
}
