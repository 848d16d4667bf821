//! Leads each request to the model that it names, which is loaded first if requests may name it.

use super::daemon::{Daemon, FAILED, FREED, LOADING, ModelState, NO_MODEL, UnderWay};
use super::loader::Offered;
use super::wants::{Next, Want};
use crate::api::{ApiError, NOT_FOUND};
use crate::clock::{self, Duration};
use crate::error::{Error, excerpt};
use crate::settings::Settings;
use std::sync::Arc;

/// Seconds after which it is worth asking again for a model that cannot be loaded now.
const RETRY_SECONDS: u32 = 30;

/// The model that a request names, with a hold on it; `None` and the empty name mean the one that is there.
///
/// # Errors
/// 404 for a name that means no model, 503 where it cannot be loaded now, 429 where too many requests wait for other models.
pub async fn begin(daemon: &Arc<Daemon>, client: u64, name: Option<&str>) -> Result<UnderWay, ApiError> {
    let name = name.filter(|name| !name.is_empty());
    let patience = patience(daemon);
    let refused = match daemon.begin(|loaded| loaded.model.check_name(name)) {
        Ok(begun) => return Ok(begun),
        Err(refused) => refused,
    };
    if name.is_none() && refused.code == Some(LOADING) && daemon.wants.any() {
        // Whichever model is there once this one is loaded or given up.
        let _ = tokio::time::timeout(patience, daemon.loading.lock()).await;
        return daemon.begin(|_| Ok(()));
    }
    if ![NOT_FOUND, LOADING, NO_MODEL, FREED, FAILED].map(Some).contains(&refused.code) {
        return Err(refused);
    }
    let Some(wanted) = may_load(daemon, name) else {
        // Where a model was freed, another name means none.
        return Err(name.filter(|_| refused.code == Some(FREED)).map_or(refused, unknown));
    };
    let Some((offered, settings)) = meant(daemon, client, wanted).await? else {
        // The refusal names the loaded model.
        return Err(name.filter(|_| refused.code != Some(NOT_FOUND)).map_or(refused, unknown));
    };
    match tokio::time::timeout(patience, loaded(daemon, &offered, &settings)).await {
        Ok(begun) => begun,
        Err(_) => {
            let why = format!(
                "the model '{}' could not be loaded within {} s (serve.swap_seconds): another one is in use, this one was loaded less than \
                 serve.min_residency seconds ago, or loading takes longer; retry later",
                offered.name,
                patience.as_secs()
            );
            Err(ApiError::new(503, why).code("model_busy").retry_after(RETRY_SECONDS))
        }
    }
}

/// How long a request waits for a model.
fn patience(daemon: &Daemon) -> Duration {
    Duration::from_secs(daemon.settings().whole("serve.swap_seconds"))
}

/// The error for a name that means no model.
fn unknown(name: &str) -> ApiError {
    let message = format!("there is no model '{}'; GET /v1/models lists those that there are", excerpt(name));
    ApiError { param: Some("model".into()), ..ApiError::new(404, message) }.code(NOT_FOUND)
}

/// The name of the model that may be loaded for a request that names this one or none.
fn may_load(daemon: &Daemon, name: Option<&str>) -> Option<String> {
    let freed = match daemon.state() {
        ModelState::Freed(offered) => Some(offered.name),
        _ => None,
    };
    match name {
        Some(name) if daemon.settings().switch("serve.on_demand") => Some(name.to_owned()),
        // One that was freed is still the daemon's model.
        name => freed.filter(|freed| name.is_none_or(|name| name.strip_suffix(":latest").unwrap_or(name) == freed)),
    }
}

/// The model that requests may name so, and the settings that it is loaded with.
async fn meant(daemon: &Arc<Daemon>, client: u64, name: String) -> Result<Option<(Offered, Settings)>, ApiError> {
    let at = daemon.clone();
    let found = daemon.limits.in_a_place(client, move || Ok(at.named(&name))).await?;
    let refused = |error: Error| ApiError { param: Some("model".into()), ..ApiError::new(404, error.without_folder()) };
    found.map_err(|error| refused(error).code(NOT_FOUND))
}

/// The model once it is there, for a request that begins.
async fn loaded(daemon: &Arc<Daemon>, offered: &Offered, settings: &Settings) -> Result<UnderWay, ApiError> {
    let is_it = |origin: &str| match origin == offered.origin {
        true => Ok(()),
        false => Err(ApiError::new(503, "another model is loaded").code(LOADING)),
    };
    loop {
        // It may be there under another name.
        match daemon.begin(|loaded| is_it(&loaded.offered.origin)) {
            Ok(begun) => return Ok(begun),
            Err(refused) if ![LOADING, NO_MODEL, FREED, FAILED].map(Some).contains(&refused.code) => {
                return Err(refused);
            }
            Err(_) => {}
        }
        let limit = daemon.settings().whole("serve.queue") as usize;
        let (waiter, begins) = daemon.wants.join(offered.clone(), settings.clone(), limit)?;
        if begins {
            tokio::spawn(usher(daemon.clone()));
        }
        waiter.outcome().await?;
        // Begun before the waiter is dropped, which lets the next model come.
        if let Ok(begun) = daemon.begin(|loaded| is_it(&loaded.offered.origin)) {
            return Ok(begun);
        }
    }
}

/// Loads the models that requests wait for, one after the other, until none waits.
async fn usher(daemon: Arc<Daemon>) {
    loop {
        let mut changes = daemon.wants.changes();
        let min = Duration::from_secs(daemon.settings().whole("serve.min_residency"));
        let wait = |offered: &Offered| match daemon.state().at_work() {
            Some(at_work) if at_work.offered.origin != offered.origin => {
                daemon.residency.lock().wait(&offered.origin, clock::now(), min)
            }
            _ => Duration::ZERO,
        };
        match daemon.wants.next(wait) {
            Next::Nothing => return,
            Next::Wait(time) => {
                tokio::select! {
                    () = tokio::time::sleep(time) => {}
                    _ = changes.changed() => {}
                }
            }
            Next::Load(want) => {
                let outcome = load(&daemon, &want).await;
                daemon.wants.done(&want, outcome);
                // All that waited have it before another may take its place.
                want.is_alone().await;
            }
        }
    }
}

async fn load(daemon: &Arc<Daemon>, want: &Want) -> Result<(), ApiError> {
    // Answers under way may take for ever: others get the model that is there from time to time.
    let given_up = async {
        tokio::select! {
            () = want.is_alone() => {}
            () = daemon.is_steered() => {}
            () = tokio::time::sleep(patience(daemon)) => {}
        }
    };
    let loaded = daemon.load_on_demand(&want.offered, want.settings.clone(), given_up).await;
    loaded.map(drop).map_err(|error| not_loaded(&want.offered.name, &error))
}

fn not_loaded(name: &str, error: &Error) -> ApiError {
    let message = format!("the model '{}' cannot be loaded now: {}", excerpt(name), error.without_folder());
    ApiError { param: Some("model".into()), ..ApiError::new(503, message) }
        .code("model_not_loaded")
        .retry_after(RETRY_SECONDS)
}
