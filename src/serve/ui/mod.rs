//! The page at `/`: a chat, and what the daemon does, with the budgets of its memories. It needs nothing from elsewhere. Over TCP it asks for the
//! token, which it takes from the address's fragment or from its user; its own files tell nothing and need none.

use super::common::{answer, is_steered_by};
use super::connection::Peer;
use super::daemon::{Daemon, ModelState};
use crate::api::ApiError;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::response::{IntoResponse, Redirect, Response};
use serde_json::{Value, json};
use std::sync::Arc;

const PAGE: &str = include_str!("page.html");
/// The page's other files: name, type and text.
const FILES: [(&str, &str, &str); 6] = [
    ("chat.js", SCRIPT, include_str!("chat.js")),
    ("daemon.js", SCRIPT, include_str!("daemon.js")),
    ("markdown.js", SCRIPT, include_str!("markdown.js")),
    ("memory.js", SCRIPT, include_str!("memory.js")),
    ("style.css", "text/css; charset=utf-8", include_str!("style.css")),
    ("icon.svg", "image/svg+xml", include_str!("icon.svg")),
];
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Only this daemon's own files, no markup made from text, and no other page around this one.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// Whether a path is the page's, or of what belongs to it.
pub fn is_ui(path: &str) -> bool {
    path == "/" || path == "/ui" || path.starts_with("/ui/")
}

/// Whether a request is for one of the page's own files, which tell nothing that is worth a secret.
pub fn is_file(method: &Method, path: &str) -> bool {
    let file = path.strip_prefix("/ui/");
    method.is_safe() && (path == "/" || path == "/ui" || FILES.iter().any(|(name, ..)| Some(*name) == file))
}

/// Whether a request for the page is allowed, after its sender was checked.
///
/// # Errors
/// 404 where the page is off.
pub fn admit(daemon: &Daemon) -> Result<(), ApiError> {
    match is_on(daemon) {
        true => Ok(()),
        false => Err(ApiError::new(404, "the page is off; turn it on with serve.ui, or start without --no-ui")),
    }
}

fn is_on(daemon: &Daemon) -> bool {
    daemon.settings().switch("serve.ui")
}

/// Whether the page that sends a request is this daemon's own: a browser names the sender of every change.
pub fn is_own_page(daemon: &Daemon, headers: &HeaderMap) -> bool {
    is_on(daemon) && is_own_origin(headers)
}

fn is_own_origin(headers: &HeaderMap) -> bool {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let origin = text(header::ORIGIN).and_then(|origin| origin.strip_prefix("http://"));
    origin.is_some() && origin == text(header::HOST)
}

/// A file of the page, with what keeps others' content out of it.
fn file(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    (headers, text).into_response()
}

/// GET /
pub async fn page() -> Response {
    file("text/html; charset=utf-8", PAGE)
}

/// GET /ui, where the page was once.
pub async fn moved() -> Redirect {
    Redirect::permanent("/")
}

/// GET /ui/FILE
pub async fn part(
    State(daemon): State<Arc<Daemon>>,
    name: Result<Path<String>, PathRejection>,
    request: Request,
) -> Response {
    // A name that is no text is none of these.
    let name = name.as_ref().map_or("", |Path(name)| name);
    if let Some((_, kind, text)) = FILES.iter().find(|(file, ..)| *file == name) {
        return file(kind, text);
    }
    match name {
        "state" => answer(Ok(state(&daemon, request.extensions().get::<Peer>()))),
        _ => answer(Err(ApiError::new(404, "the page has no such part"))),
    }
}

/// The figures of the page: counters and gauges, which need no answer of the engine's thread.
fn state(daemon: &Daemon, peer: Option<&Peer>) -> Value {
    let common = |state: &str| {
        json!({
            "state": state,
            "uptime_seconds": daemon.started.elapsed().as_secs(),
            "may_steer": is_steered_by(daemon, peer),
        })
    };
    let loaded = match daemon.state() {
        ModelState::Ready(loaded) => loaded,
        ModelState::None => return common("no model"),
        ModelState::Loading(name, _) => {
            let mut state = common("loading");
            state["loading"] = name.into();
            return state;
        }
        ModelState::Freed(_) => return common("freed"),
        ModelState::Failed(_) => return common("failed"),
    };
    let m = &loaded.handle.metrics;
    let mut state = common("ready");
    let more = json!({
        "model": loaded.model.name,
        "device": loaded.device,
        "predictor": loaded.predictor,
        "model_bytes": loaded.file_bytes,
        "running": m.running.get(),
        "waiting": m.waiting.get(),
        "slots": m.slots.get(),
        "generated_tokens": m.generated_tokens.get(),
        "prompt_tokens": m.prompt_tokens.get(),
        "neurons_computed": m.neurons_computed.get(),
        "neurons_all": m.neurons_all.get(),
        "hits": m.hits.get(),
        "misses": m.misses.get(),
        "migrations": m.migrations.get(),
        "budget_bytes": m.device_budget_bytes.get(),
        "used_bytes": m.device_used_bytes.get(),
        "ram_budget_bytes": m.ram_budget_bytes.get(),
        "ram_used_bytes": m.ram_used_bytes.get(),
    });
    if let (Value::Object(state), Value::Object(more)) = (&mut state, more) {
        state.extend(more);
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(HeaderName, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn another_origin_is_not_this_daemons() {
        let of = |origin, host| is_own_origin(&headers(&[(header::ORIGIN, origin), (header::HOST, host)]));
        assert!(of("http://127.0.0.1:8093", "127.0.0.1:8093"));
        for (origin, host) in [
            ("http://evil.example", "127.0.0.1:8093"),
            ("http://127.0.0.1:8094", "127.0.0.1:8093"),
            ("https://127.0.0.1:8093", "127.0.0.1:8093"),
            ("null", "127.0.0.1:8093"),
        ] {
            assert!(!of(origin, host), "{origin}");
        }
        assert!(!is_own_origin(&headers(&[])), "none at all");
    }

    #[test]
    fn the_page_names_nothing_from_elsewhere_and_builds_no_markup_from_text() {
        let all = FILES.iter().map(|(_, _, text)| *text).chain([PAGE]);
        for text in all {
            let text = text.replace("http://www.w3.org/2000/svg", "").replace("https?:", "");
            assert!(!text.contains("http:") && !text.contains("https:"), "{text}");
            for markup in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"]
            {
                assert!(!text.contains(markup), "{markup}");
            }
        }
        for own in [" onclick", " onload", "<style", "<script>", " style="] {
            assert!(!PAGE.contains(own), "{own}");
        }
    }
}
