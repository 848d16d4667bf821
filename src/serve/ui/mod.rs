//! `/ui`: a page on which a person watches the daemon and changes the device's budget. Off unless `serve.ui` is set; it needs nothing from
//! elsewhere. Over TCP a browser asks its user for a name and a password: the password is the token, the name is ignored.

use super::common::{answer, body, client, is_steered_by};
use super::connection::Peer;
use super::control;
use super::daemon::{Daemon, ModelState};
use crate::api::ApiError;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

const PAGE: &str = include_str!("page.html");
const SCRIPT: &str = include_str!("script.js");
const STYLE: &str = include_str!("style.css");

/// Only this daemon's own files, and no other page around this one.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";
/// What a request that changes something carries. A page of another origin cannot send it without asking first, and is refused then.
const MARK: &str = "x-dynamicinfer-ui";

/// Whether a request is for the page or what belongs to it.
pub fn is_ui(path: &str) -> bool {
    path == "/ui" || path.starts_with("/ui/")
}

/// Whether a request for the page is allowed, after its sender was checked.
///
/// # Errors
/// 404 where the page is off; 403 for a change that another page may have asked a browser for.
pub fn admit(daemon: &Daemon, request: &Request) -> Result<(), ApiError> {
    if !daemon.settings().switch("serve.ui") {
        return Err(ApiError::new(404, "the page is off; turn it on with serve.ui, or `dynamicinfer serve --ui`"));
    }
    if !request.method().is_safe() && !request.headers().contains_key(MARK) {
        return Err(ApiError::new(403, format!("a change from the page carries the header {MARK}")));
    }
    Ok(())
}

/// Whether the page that sends a request is this daemon's: a browser names the sender of every change.
pub fn is_own_origin(headers: &HeaderMap) -> bool {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let origin = text(header::ORIGIN).and_then(|origin| origin.strip_prefix("http://"));
    origin.is_some() && origin == text(header::HOST)
}

/// The password that a browser was given for this page.
pub fn password(headers: &HeaderMap) -> Option<String> {
    let given = headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Basic ")?;
    let text = String::from_utf8(from_base64(given.trim())?).ok()?;
    Some(text.split_once(':')?.1.to_owned())
}

/// The bytes of a base64 text (RFC 4648); `None` for any other text.
fn from_base64(text: &str) -> Option<Vec<u8>> {
    let text = text.as_bytes();
    let digits = text.iter().rposition(|&b| b != b'=').map_or(0, |at| at + 1);
    if !text.len().is_multiple_of(4) || text.len() - digits > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for &b in &text[..digits] {
        let digit = match b {
            b'A'..=b'Z' => b - b'A',
            b'a'..=b'z' => b - b'a' + 26,
            b'0'..=b'9' => b - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        (bits, count) = (bits << 6 | u32::from(digit), count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
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

/// GET /ui
pub async fn page() -> Response {
    file("text/html; charset=utf-8", PAGE)
}

/// GET /ui/FILE
pub async fn part(
    State(daemon): State<Arc<Daemon>>,
    name: Result<Path<String>, PathRejection>,
    request: Request,
) -> Response {
    // A name that is no text is none of these.
    match name.as_ref().map_or("", |Path(name)| name) {
        "script.js" => file("text/javascript; charset=utf-8", SCRIPT),
        "style.css" => file("text/css; charset=utf-8", STYLE),
        "state" => answer(Ok(state(&daemon, request.extensions().get::<Peer>()))),
        _ => answer(Err(ApiError::new(404, "the page has no such part"))),
    }
}

/// PUT /ui/state: another budget, as `PUT /v1/x/budget` takes it.
pub async fn set(State(daemon): State<Arc<Daemon>>, request: Request) -> Response {
    let client = client(&request);
    answer(async { control::set_budget(&daemon, client, &body(&daemon, request).await?).await }.await)
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
        ModelState::Loading(_) => return common("loading"),
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
    fn a_password_is_what_stands_behind_the_first_colon() {
        let of = |value| password(&headers(&[(header::AUTHORIZATION, value)]));
        assert_eq!(of("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==").as_deref(), Some("open sesame"), "RFC 7617's own");
        assert_eq!(of("Basic OmE6Yg==").as_deref(), Some("a:b"));
        for bad in ["Bearer QWxhZGRpbjpv", "Basic", "Basic ", "Basic QWxh", "Basic Q===", "Basic Q!==", "Basic OmE6Y"] {
            assert_eq!(of(bad), None, "{bad}");
        }
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
        for text in [PAGE, SCRIPT, STYLE] {
            assert!(!text.replace("http://www.w3.org/2000/svg", "").contains("http"), "{text}");
        }
        for markup in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("] {
            assert!(!SCRIPT.contains(markup), "{markup}");
        }
        assert!(!PAGE.contains("onclick") && !PAGE.contains("<style") && !PAGE.contains("<script>"));
    }
}
