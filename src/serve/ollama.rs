//! What ollama's API tells of models, and its vectors. Answers are made as those of other APIs ([`super::generate`]).

use super::common::{Shared, answer, body, client, json_response, offered};
use super::control::budgets;
use super::daemon::{Daemon, Loaded, ModelState};
use super::generate::vectors;
use super::loader::Offered;
use super::unknown::unknown_fields;
use crate::api::ollama::{
    OLLAMA_EMBED_FIELDS, OLLAMA_EMBEDDINGS_FIELDS, OLLAMA_SHOW_FIELDS, OllamaEmbedRequest, OllamaEmbeddingsRequest,
    OllamaShowRequest, capabilities,
};
use crate::api::{ApiError, Unknown, parse_with};
use crate::clock::{self, rfc3339};
use crate::model::ModelConfig;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;

/// GET /api/version.
pub async fn version() -> Response {
    json_response(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// GET /api/tags: the models that requests may name.
pub async fn tags(State(daemon): Shared, request: Request) -> Response {
    let now = loaded_card(&daemon, client(&request), false).await;
    let listed = async {
        let now = now?;
        let offered = offered(&daemon).await?;
        let card = |one: Offered| match &now {
            Some((origin, card)) if *origin == one.origin => card.clone(),
            _ => json!({
                "name": one.name,
                "model": one.name,
                "digest": "",
                "size": one.bytes,
                "details": {},
                "modified_at": rfc3339(one.modified),
            }),
        };
        Ok(json!({"models": offered.into_iter().map(card).collect::<Vec<_>>()}))
    };
    answer(listed.await)
}

/// GET /api/ps: the loaded model with the memory that it uses; none without one.
pub async fn ps(State(daemon): Shared, request: Request) -> Response {
    let now = loaded_card(&daemon, client(&request), true).await;
    answer(now.map(|now| json!({"models": now.into_iter().map(|(_, card)| card).collect::<Vec<_>>()})))
}

/// The loaded model's origin and card.
async fn loaded_card(daemon: &Daemon, client: u64, running: bool) -> Result<Option<(String, Value)>, ApiError> {
    let ModelState::Ready(loaded) = daemon.state() else { return Ok(None) };
    Ok(Some((loaded.offered.origin.clone(), card(&loaded, client, running).await?)))
}

/// What is told of a model in a list; `running`: with the memory that it uses.
async fn card(loaded: &Arc<Loaded>, client: u64, running: bool) -> Result<Value, ApiError> {
    let (config, budgets) = loaded.handle.ask(client, |engine| (engine.model.config.clone(), budgets(engine))).await?;
    let model = &loaded.model;
    let mut card = json!({
        "name": model.name,
        "model": model.name,
        "digest": model.fingerprint,
        "size": loaded.file_bytes,
        "details": details(&config),
    });
    if running {
        card["size"] = (loaded.file_bytes + loaded.kv_bytes).into();
        card["size_vram"] = budgets["vram_used_bytes"].as_u64().unwrap_or(0).into();
        card["context_length"] = model.context.into();
    } else {
        card["modified_at"] = rfc3339(model.created).into();
    }
    Ok(card)
}

/// A model's family and size.
fn details(config: &ModelConfig) -> Value {
    json!({"family": config.family, "families": [config.family], "parameter_size": short(config.parameters())})
}

/// A number of parameters as people write it: `7.6B`, `494M`.
fn short(parameters: u64) -> String {
    match parameters as f64 {
        n if n >= 1e9 => format!("{:.1}B", n / 1e9),
        n if n >= 1e6 => format!("{:.1}M", n / 1e6),
        n => format!("{:.1}K", n / 1e3),
    }
}

/// POST /api/show. A model that is not loaded is not loaded for that: its files say what it is.
pub async fn show(State(daemon): Shared, request: Request) -> Response {
    let client = client(&request);
    let shown = async {
        let unknown = unknown_fields(&daemon.settings());
        let ask: OllamaShowRequest = parse_with(&body(&daemon, request).await?, OLLAMA_SHOW_FIELDS, &unknown)?;
        daemon.ignored.note(client, unknown);
        let name = ask.model.or(ask.name).unwrap_or_default();
        match daemon.begin(|loaded| loaded.model.check_name(Some(&name))) {
            Ok(loaded) => show_loaded(&daemon, client, &loaded).await,
            Err(refused) => show_files(&daemon, client, name).await?.ok_or(refused),
        }
    };
    answer(shown.await)
}

async fn show_loaded(daemon: &Daemon, client: u64, loaded: &Loaded) -> Result<Value, ApiError> {
    let (model, config) =
        (loaded.model.clone(), loaded.handle.ask(client, |engine| engine.model.config.clone()).await?);
    // Its template may have to be rendered for it.
    let at = model.clone();
    let capabilities = daemon.limits.in_a_place(client, move || capabilities(&at)).await?;
    let sampling = &model.sampling;
    let parameters = [
        ("temperature", sampling.temperature.to_string()),
        ("top_k", sampling.top_k.to_string()),
        ("top_p", sampling.top_p.to_string()),
        ("min_p", sampling.min_p.to_string()),
        ("num_ctx", model.context.to_string()),
    ];
    let parameters: Vec<String> = parameters.iter().map(|(name, value)| format!("{name:<30} {value}")).collect();
    let mut shown = about(&config, model.context, model.tokenizer.chat_template().unwrap_or_default(), model.created);
    shown["parameters"] = parameters.join("\n").into();
    shown["capabilities"] = capabilities.into();
    Ok(shown)
}

/// The same of a model that is not loaded; `None` if requests may not name it.
async fn show_files(daemon: &Arc<Daemon>, client: u64, name: String) -> Result<Option<Value>, ApiError> {
    if !daemon.settings().switch("serve.on_demand") {
        return Ok(None);
    }
    let at = daemon.clone();
    let shown = daemon.limits.in_a_place(client, move || {
        let Some((offered, settings)) = at.named(&name).ok().flatten() else { return Ok(None) };
        let (config, template) = at.load.outline(&offered.source, &settings)?;
        let mut shown = about(&config, config.context, &template, offered.modified);
        shown["capabilities"] = json!(["completion", "tools"]);
        Ok(Some(shown))
    });
    shown.await
}

fn about(config: &ModelConfig, context: usize, template: &str, modified: u64) -> Value {
    let family = &config.family;
    let mut info = json!({
        "general.architecture": family,
        "general.basename": config.name,
        "general.parameter_count": config.parameters(),
    });
    for (name, value) in [
        ("context_length", context),
        ("embedding_length", config.hidden),
        ("block_count", config.layers().len()),
        ("attention.head_count", config.most_of_attention(|a| a.heads)),
        ("attention.head_count_kv", config.most_of_attention(|a| a.kv_heads)),
    ] {
        info[format!("{family}.{name}")] = value.into();
    }
    json!({
        "parameters": "",
        "template": template,
        "details": details(config),
        "model_info": info,
        "modified_at": rfc3339(modified),
    })
}

/// The texts of a request for vectors.
fn texts(loaded: &Loaded, request: OllamaEmbedRequest) -> Result<crate::api::embeddings::Texts, ApiError> {
    request.embedding().prepare(&loaded.model)
}

/// POST /api/embed.
pub async fn embed(State(daemon): Shared, request: Request) -> Response {
    let began = clock::now();
    let read = |loaded: &Loaded, body: &[u8], unknown: &Unknown| {
        texts(loaded, parse_with(body, OLLAMA_EMBED_FIELDS, unknown)?)
    };
    let embedded = vectors(&daemon, request, read).await.map(|(loaded, texts, vectors)| {
        let took = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        json!({
            "model": loaded.model.name,
            "embeddings": vectors,
            "total_duration": took,
            "prompt_eval_count": texts.count(),
        })
    });
    answer(embedded)
}

/// POST /api/embeddings, its older form.
pub async fn embeddings(State(daemon): Shared, request: Request) -> Response {
    let read = |loaded: &Loaded, body: &[u8], unknown: &Unknown| {
        let request: OllamaEmbeddingsRequest = parse_with(body, OLLAMA_EMBEDDINGS_FIELDS, unknown)?;
        texts(loaded, request.newer()).map_err(|e| match e.param.as_deref() {
            Some("input") => ApiError { param: Some("prompt".into()), ..e },
            _ => e,
        })
    };
    let embedded = vectors(&daemon, request, read).await;
    answer(embedded.map(|(_, _, vectors)| json!({"embedding": vectors.first()})))
}
