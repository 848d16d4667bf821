//! What every route has in common: reading a request's body, whether its sender may change something, and answers.

use super::connection::Peer;
use super::daemon::Daemon;
use super::limits::Body as Held;
use super::loader::Offered;
use crate::api::{ApiError, ErrorForm};
use crate::clock::Duration;
use crate::settings::Settings;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use serde_json::Value;
use std::sync::Arc;

/// The daemon as handlers get it.
pub type Shared = State<Arc<Daemon>>;

/// The id of a request, as its answer has it in x-request-id.
#[derive(Clone)]
pub struct RequestId(pub String);

/// A refusal as a response.
pub struct Refusal(pub ApiError);

/// What a response refuses with; refusals carry it.
#[derive(Clone)]
pub struct Refused(pub ApiError);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = written(&self.0, ErrorForm::OpenAi);
        response.extensions_mut().insert(Refused(self.0));
        response
    }
}

/// A refusal in the form of an API.
pub fn written(error: &ApiError, form: ErrorForm) -> Response {
    let (status, body) = error.written(form);
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_response(&body);
    *response.status_mut() = status;
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if status == StatusCode::UNSUPPORTED_MEDIA_TYPE {
        // The header for this refusal (RFC 9110, 15.5.16).
        response.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    }
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// A document as a response.
pub fn json_response(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

/// A document, or a refusal, as a response.
pub fn answer(result: Result<Value, ApiError>) -> Response {
    match result {
        Ok(value) => json_response(&value),
        Err(error) => Refusal(error).into_response(),
    }
}

/// Whose turns the request takes ([`Peer::client`]).
pub fn client(request: &Request) -> u64 {
    let real_ip = request.headers().get("x-real-ip").map(HeaderValue::as_bytes);
    request.extensions().get::<Peer>().map_or(0, |peer| peer.client(real_ip))
}

/// Whether requests from there may change something.
pub fn is_steered_by(daemon: &Daemon, peer: Option<&Peer>) -> bool {
    may_steer(daemon, peer).is_ok()
}

/// The same, with the reason why not.
///
/// # Errors
/// 403 where the settings let others steer.
pub fn may_steer(daemon: &Daemon, peer: Option<&Peer>) -> Result<(), ApiError> {
    let settings = daemon.settings();
    match (settings.text("serve.steering"), peer) {
        (Some("all"), _) | (Some("unix"), Some(Peer::Unix { .. })) => Ok(()),
        (whose, _) => {
            let message =
                format!("this client may not change the daemon: serve.steering is {}", whose.unwrap_or_default());
            Err(ApiError::new(403, message).code("no_steering"))
        }
    }
}

/// All models that requests may name. Folders are read on a thread that may wait.
///
/// # Errors
/// 500 if that thread has failed.
pub async fn offered(daemon: &Arc<Daemon>) -> Result<Vec<Offered>, ApiError> {
    let daemon = daemon.clone();
    let listing = tokio::task::spawn_blocking(move || daemon.offered());
    listing.await.map_err(|_| ApiError::new(500, "the models could not be listed"))
}

/// Reads the body, within the limits on its length and time.
pub async fn body(daemon: &Daemon, request: Request) -> Result<Held, ApiError> {
    let settings = daemon.settings();
    let whole = Duration::from_secs(settings.whole("serve.body_seconds"));
    let late =
        |_| ApiError::new(408, format!("the body did not arrive within {whole:?}; serve.body_seconds sets the limit"));
    tokio::time::timeout(whole, read_body(daemon, &settings, request)).await.map_err(late)?
}

/// Checks that a body is not compressed or otherwise encoded: what it would be as JSON is not what was sent.
fn as_it_is(headers: &HeaderMap) -> Result<(), ApiError> {
    let codings =
        headers.get_all(header::CONTENT_ENCODING).iter().flat_map(|list| list.as_bytes().split(|&b| b == b','));
    let mut codings = codings.map(<[u8]>::trim_ascii).filter(|coding| !coding.is_empty());
    let Some(coding) = codings.find(|coding| !coding.eq_ignore_ascii_case(b"identity")) else { return Ok(()) };
    let coding = crate::error::excerpt(String::from_utf8_lossy(coding));
    let message =
        format!("the body is encoded as '{coding}', which is not supported; send it without Content-Encoding");
    Err(ApiError::new(415, message).code("content_encoding"))
}

async fn read_body(daemon: &Daemon, settings: &Settings, request: Request) -> Result<Held, ApiError> {
    as_it_is(request.headers())?;
    let limit = daemon.limits.bodies_bytes().min(settings.whole("serve.body_bytes") as usize);
    let patience = Duration::from_secs(settings.whole("serve.stall_seconds"));
    let too_large =
        || ApiError::new(413, format!("the body has more than {limit} bytes; serve.body_bytes sets the limit"));
    let told = request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    if told.is_some_and(|told| told > limit) {
        return Err(too_large());
    }
    let mut body = request.into_body();
    let mut held = Held::default();
    loop {
        let frame = tokio::time::timeout(patience, body.frame());
        let frame =
            frame.await.map_err(|_| ApiError::new(408, format!("no data of the body arrived for {patience:?}")))?;
        let Some(frame) = frame else { return Ok(held) };
        let frame = frame.map_err(|e| ApiError::new(400, format!("the body broke off: {e}")))?;
        if let Some(data) = frame.data_ref() {
            if held.len() + data.len() > limit {
                return Err(too_large());
            }
            daemon.limits.add(&mut held, data)?;
        }
    }
}
