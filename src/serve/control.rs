//! Endpoints beyond OpenAI's API: which model is loaded, what the neuron cache holds, and settings that can be changed while it runs. All
//! of it is asked of the engine's thread between two passes.

use super::daemon::{Daemon, Loaded, ModelState};
use crate::api::{ApiError, parse};
use crate::cache::{PerTier, Slot, Tier};
use crate::engine::{Engine, Sparsity};
use crate::formats::FileState;
use crate::scheduler::Policy;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// GET /v1/x/ps: the loaded model and how it is run.
pub fn ps(daemon: &Daemon) -> Value {
    let (state, loaded, error) = match daemon.state() {
        ModelState::None => ("empty", None, None),
        ModelState::Loading(name, _) => return json!({"state": "loading", "loading": name, "models": []}),
        ModelState::Freed(offered) => return json!({"state": "freed", "freed": offered.name, "models": []}),
        ModelState::Ready(loaded) => ("ready", Some(loaded), None),
        ModelState::Failed(why) => ("failed", None, Some(why)),
    };
    let models: Vec<Value> = loaded.iter().map(|loaded| model(loaded)).collect();
    json!({"state": state, "error": error, "models": models, "uptime_seconds": daemon.started.elapsed().as_secs()})
}

fn model(loaded: &Loaded) -> Value {
    let m = &loaded.handle.metrics;
    json!({
        "name": loaded.model.name,
        "source": loaded.offered.source,
        "fingerprint": loaded.model.fingerprint,
        "model_bytes": loaded.file_bytes,
        "kv_bytes": loaded.kv_bytes,
        "context": loaded.model.context,
        "on_demand": loaded.on_demand,
        "parallel": loaded.handle.limits.slots,
        "deterministic": loaded.handle.limits.deterministic,
        "threads": loaded.threads,
        "predictor": loaded.predictor,
        "device": loaded.device,
        "file": match loaded.file_state() {
            FileState::Same | FileState::Changed(_) => "unchanged",
            FileState::Replaced => "replaced",
            FileState::Removed => "removed",
        },
        "prompt_cache": {
            "bytes": m.prompts.bytes.get(),
            "budget_bytes": m.prompts.budget.get(),
            "texts": m.prompts.texts.get(),
            "states": m.prompts.states.get(),
            "disk_bytes": m.prompts.disk_bytes.get(),
        },
        "running": m.running.get(),
        "waiting": m.waiting.get(),
        "loaded_at": loaded.model.created,
    })
}

/// GET /v1/x/cache: what each layer computes, and how much of it is on the device.
///
/// # Errors
/// 503 without a model.
pub async fn cache(daemon: &Daemon, client: u64) -> Result<Value, ApiError> {
    Ok(daemon.ready()?.handle.ask(client, |engine| cache_state(engine)).await?)
}

fn cache_state(engine: &Engine) -> Value {
    let (config, sparsity) = (&engine.model.config, engine.sparsity());
    let layer = |l: usize| {
        let table = engine.split.as_ref().map(|split| split.cache.layers[l].table.slots());
        let count =
            |wanted: fn(&Slot) -> bool| table.map_or(0, |slots| slots.iter().filter(|slot| wanted(slot)).count());
        json!({
            "layer": l,
            "neurons": config.movable(),
            "predictor": sparsity.kind(l).name(),
            "threshold": sparsity.threshold(l),
            "used": used(sparsity, l),
            "hits": engine.split.as_ref().map(|split| split.cache.layers[l].computed[Tier::Device]),
            "misses": engine.split.as_ref().map(|split| split.cache.layers[l].computed[Tier::Host]),
            "slots": table.map_or(0, <[Slot]>::len),
            "resident": count(|slot| matches!(slot, Slot::Resident(_))),
            "filling": count(|slot| matches!(slot, Slot::Filling(_))),
        })
    };
    json!({
        "device": device(engine),
        "audit": engine.audit.as_ref().map(|audit| json!({"tokens": audit.counts.tokens, "recall": audit.counts.recall()})),
        "layers": (0..config.layers().len()).map(layer).collect::<Vec<_>>(),
    })
}

/// The device's memory and counters; null without one.
fn device(engine: &Engine) -> Value {
    let Some(split) = &engine.split else { return Value::Null };
    let (memory, counters) = (split.device.memory(), split.cache.counters);
    json!({
        "name": split.device.name(),
        "budget_bytes": memory.budget,
        "used_bytes": memory.used,
        "hits": counters.computed[Tier::Device],
        "misses": counters.computed[Tier::Host],
        "migrations": counters.migrations,
        "landed": counters.landed,
        "put_off": counters.put_off,
    })
}

/// GET /v1/x/budget
///
/// # Errors
/// 503 without a model.
pub async fn budget(daemon: &Daemon, client: u64) -> Result<Value, ApiError> {
    let loaded = daemon.ready()?;
    let budgets = loaded.handle.ask(client, |engine| budgets(engine)).await?;
    Ok(with_sizes(budgets, loaded.file_bytes, loaded.kv_bytes))
}

/// The budgets of an engine's memories and what is used of them; null without a device, and for host memory that holds the
/// whole model.
pub fn budgets(engine: &Engine) -> Value {
    let (device, ram) = (device(engine), engine.cached.as_ref().map(|cached| cached.memory()));
    json!({
        "device": device["name"],
        "vram_budget_bytes": device["budget_bytes"],
        "vram_used_bytes": device["used_bytes"],
        "ram_budget_bytes": ram.map(|ram| ram.budget),
        "ram_used_bytes": ram.map(|ram| ram.used),
    })
}

/// Budgets, with the bytes of the model's file and of its keys and values.
pub fn with_sizes(mut budgets: Value, model: u64, kv: u64) -> Value {
    budgets["model_bytes"] = model.into();
    budgets["kv_bytes"] = kv.into();
    budgets
}

#[derive(Deserialize)]
struct BudgetChange {
    vram_budget_bytes: Option<u64>,
    ram_budget_bytes: Option<u64>,
}

/// PUT /v1/x/budget: from the next pass on. Answers with what is applied then. A model has one of the two budgets at most.
///
/// # Errors
/// 400 for what is no budget or is too small, 409 without a device, or without a limit of host memory.
pub async fn set_budget(daemon: &Daemon, client: u64, body: &[u8]) -> Result<Value, ApiError> {
    let change: BudgetChange = parse(body, &["vram_budget_bytes", "ram_budget_bytes"])?;
    let loaded = daemon.ready()?;
    let (field, bytes, code, why) = match (change.vram_budget_bytes, change.ram_budget_bytes) {
        (Some(vram), None) => ("vram_budget_bytes", vram, "no_device", NO_DEVICE),
        (None, Some(ram)) => ("ram_budget_bytes", ram, "no_ram_limit", NO_RAM_LIMIT),
        _ => {
            let message = "give vram_budget_bytes, for a device, or ram_budget_bytes, for host memory";
            return Err(ApiError::field("vram_budget_bytes", message));
        }
    };
    let at = loaded.clone();
    let set = move |engine: &mut Engine| {
        let set = if field == "ram_budget_bytes" { &at.set_ram } else { &at.set_budget };
        set.as_ref().map(|set| set(engine, bytes))
    };
    match loaded.handle.ask(client, set).await? {
        None => Err(ApiError::new(409, why).code(code)),
        Some(Err(error)) => {
            let ApiError { message, code, .. } = error.into();
            Err(ApiError { code, ..ApiError::field(field, message) })
        }
        Some(Ok(())) => budget(daemon, client).await,
    }
}

const NO_DEVICE: &str = "this model runs on the CPU alone, without a device budget; load it with a device (engine.device, or --device cuda)";
const NO_RAM_LIMIT: &str = "this whole model is in host memory, without a limit to change; load it with a limit \
     below its size (engine.ram, or --ram)";

/// GET /v1/x/policy: the migration policy; `none` without a device or a predictor.
///
/// # Errors
/// 503 without a model.
pub async fn policy(daemon: &Daemon, client: u64) -> Result<Value, ApiError> {
    Ok(daemon.ready()?.handle.ask(client, |engine| policy_of(engine)).await?)
}

fn policy_of(engine: &Engine) -> Value {
    let migrator = engine.split.as_ref().and_then(|split| split.migrator.as_ref());
    let counts = migrator.map(|m| m.counts());
    json!({
        "policy": migrator.and_then(|m| m.policy()).map_or("none", Policy::name),
        "scheduler": counts,
    })
}

/// PUT /v1/x/policy: from the next layer on.
///
/// # Errors
/// 400 for what is no policy, 409 where nothing can move.
pub async fn set_policy(daemon: &Daemon, client: u64, body: &[u8]) -> Result<Value, ApiError> {
    #[derive(Deserialize)]
    struct Change {
        policy: String,
    }
    let change: Change = parse(body, &["policy"])?;
    let wanted: Policy = crate::error::excerpt(&change.policy).parse().map_err(|why| ApiError::field("policy", why))?;
    let set = move |engine: &mut Engine| engine.set_policy(wanted).then(|| policy_of(engine));
    daemon.ready()?.handle.ask(client, set).await?.ok_or_else(|| {
        let message = "no neuron can move: the model runs without a device, or computes every neuron";
        ApiError::new(409, message).code("no_scheduler")
    })
}

/// GET /v1/x/thresholds: the probability from which on a neuron is to be computed, by layer, and those that are used now by the CPU and
/// by the device; null without a predictor.
///
/// # Errors
/// 503 without a model.
pub async fn thresholds(daemon: &Daemon, client: u64) -> Result<Value, ApiError> {
    let loaded = daemon.ready()?;
    Ok(loaded.handle.ask(client, |engine| thresholds_of(engine)).await?)
}

fn thresholds_of(engine: &Engine) -> Value {
    let layers = engine.model.config.layers().len();
    json!({
        "thresholds": (0..layers).map(|l| engine.sparsity().threshold(l)).collect::<Vec<_>>(),
        "used": (0..layers).map(|l| used(engine.sparsity(), l)).collect::<Vec<_>>(),
    })
}

/// The probabilities from which on a layer's neurons are computed now, on the CPU and on the device.
fn used(sparsity: &Sparsity, layer: usize) -> Value {
    let of = |used: PerTier<f32>| json!({"cpu": used[Tier::Host], "device": used[Tier::Device]});
    sparsity.used(layer).map_or(Value::Null, of)
}

#[derive(Deserialize)]
struct ThresholdChange {
    /// Of every predicted layer.
    threshold: Option<f32>,
    /// Of single layers, by their number.
    layers: Option<Map<String, Value>>,
}

/// PUT /v1/x/thresholds: from the next pass on. Answers with what is set then.
///
/// # Errors
/// 400 for an invalid probability or a layer without a predictor; nothing is changed then.
pub async fn set_thresholds(daemon: &Daemon, client: u64, body: &[u8]) -> Result<Value, ApiError> {
    let change: ThresholdChange = parse(body, &["threshold", "layers"])?;
    let probability = |param: &str, p: f64| match (0.0..=1.0).contains(&p) {
        true => Ok(p as f32),
        false => Err(ApiError::field(param, format!("{param} is {p}; it must be a probability, 0 to 1"))),
    };
    let all = change.threshold.map(|p| probability("threshold", f64::from(p))).transpose()?;
    let mut single: Vec<(usize, f32)> = Vec::new();
    for (layer, p) in change.layers.unwrap_or_default() {
        let param = format!("layers.{}", crate::error::excerpt(&layer));
        let number = layer.parse().map_err(|_| ApiError::field(&param, format!("'{param}' does not name a layer")))?;
        let p = p.as_f64().ok_or_else(|| ApiError::field(&param, format!("{param} is no number")))?;
        single.push((number, probability(&param, p)?));
    }
    if all.is_none() && single.is_empty() {
        return Err(ApiError::field("threshold", "the request sets nothing: give threshold, or layers"));
    }
    let loaded: Arc<Loaded> = daemon.ready()?;
    let set = move |engine: &mut Engine| {
        let layers = engine.model.config.layers().len();
        let predicted = |l: usize| l < layers && engine.sparsity().threshold(l).is_some();
        if let Some((layer, _)) = single.iter().find(|(layer, _)| !predicted(*layer)) {
            let message =
                format!("layer {layer} has no threshold: it has no predictor (the model has {layers} layers)");
            return Err(ApiError::field("layers", message));
        }
        if single.is_empty() && !(0..layers).any(predicted) {
            return Err(ApiError::field(
                "threshold",
                "no layer of this model has a predictor, and so none has a threshold",
            ));
        }
        let sparsity = engine.sparsity_mut();
        if let Some(p) = all {
            (0..layers).for_each(|l| _ = sparsity.set_threshold(l, p));
        }
        single.iter().for_each(|&(l, p)| _ = sparsity.set_threshold(l, p));
        Ok(thresholds_of(engine))
    };
    let answer = loaded.handle.ask(client, set).await??;
    loaded.handle.forget();
    Ok(answer)
}
