//! The routes, and the order in which a request is checked.

use super::common::{
    Refusal, Refused, RequestId, Shared, answer, body, client, json_response, may_steer, offered, written,
};
use super::connection::{Entered, Peer};
use super::daemon::{Daemon, ModelState};
use super::generate::{count, detokenize, embed, generated, tokenize};
use super::loader::Offered;
use super::log::LogEntry;
use super::owner::{API_KEY, api_key, bearer, owner, same};
use super::{control, metrics, ollama, responses, tcp, ui};
use crate::api::anthropic::MessagesRequest;
use crate::api::chat::ChatRequest;
use crate::api::completions::CompletionRequest;
use crate::api::infill::InfillRequest;
use crate::api::ollama::{OllamaChatRequest, OllamaGenerateRequest};
use crate::api::responses::ResponsesRequest;
use crate::api::{ApiError, ErrorForm, parse};
use crate::error::Error;
use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

/// Every route with its methods, as the OpenAPI document has them.
pub const ROUTES: [(&str, &[&str]); 32] = [
    ("/health", &["get"]),
    ("/ready", &["get"]),
    ("/metrics", &["get"]),
    ("/openapi.json", &["get"]),
    ("/v1/models", &["get"]),
    ("/v1/models/{model}", &["get"]),
    ("/v1/chat/completions", &["post"]),
    ("/v1/completions", &["post"]),
    ("/v1/responses", &["post"]),
    ("/v1/responses/{id}", &["get", "delete"]),
    ("/v1/messages", &["post"]),
    ("/v1/messages/count_tokens", &["post"]),
    ("/v1/embeddings", &["post"]),
    ("/api/chat", &["post"]),
    ("/api/generate", &["post"]),
    ("/api/embed", &["post"]),
    ("/api/embeddings", &["post"]),
    ("/api/tags", &["get"]),
    ("/api/show", &["post"]),
    ("/api/ps", &["get"]),
    ("/api/version", &["get"]),
    ("/infill", &["post"]),
    ("/tokenize", &["post"]),
    ("/detokenize", &["post"]),
    ("/v1/x/ps", &["get"]),
    ("/v1/x/cache", &["get"]),
    ("/v1/x/budget", &["get", "put"]),
    ("/v1/x/policy", &["get", "put"]),
    ("/v1/x/thresholds", &["get", "put"]),
    ("/v1/x/models/load", &["post"]),
    ("/v1/x/models/unload", &["post"]),
    ("/v1/x/config", &["get"]),
];

const OPENAPI: &str = include_str!("openapi.json");
/// Bytes of a request's address, at most: no address here is as long.
const MAX_URI: usize = 8 << 10;
/// Bytes of a request's headers, at most: checked again, because hyper reads a little more than its limit.
const MAX_HEADER_BYTES: usize = 64 << 10;
const MAX_REQUEST_ID: usize = 128;

/// Answers all routes.
pub fn router(daemon: Arc<Daemon>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(|State(d): Shared| async move { metrics::page(&d) }))
        .route("/openapi.json", get(|| async { ([(header::CONTENT_TYPE, "application/json")], OPENAPI) }))
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model))
        .route("/v1/chat/completions", post(generated::<ChatRequest>))
        .route("/v1/completions", post(generated::<CompletionRequest>))
        .route("/v1/responses", post(generated::<ResponsesRequest>))
        .route("/v1/responses/{id}", get(responses::stored).delete(responses::forget))
        .route("/v1/messages", post(generated::<MessagesRequest>))
        .route("/v1/messages/count_tokens", post(count))
        .route("/v1/embeddings", post(embed))
        .route("/api/chat", post(generated::<OllamaChatRequest>))
        .route("/api/generate", post(generated::<OllamaGenerateRequest>))
        .route("/api/embed", post(ollama::embed))
        .route("/api/embeddings", post(ollama::embeddings))
        .route("/api/tags", get(ollama::tags))
        .route("/api/show", post(ollama::show))
        .route("/api/ps", get(ollama::ps))
        .route("/api/version", get(ollama::version))
        .route("/infill", post(generated::<InfillRequest>))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/v1/x/ps", get(|State(d): Shared| async move { json_response(&control::ps(&d)) }))
        .route("/v1/x/cache", get(cache))
        .route("/v1/x/budget", get(budget).put(set_budget))
        .route("/v1/x/policy", get(policy).put(set_policy))
        .route("/v1/x/thresholds", get(thresholds).put(set_thresholds))
        .route("/v1/x/models/load", post(load))
        .route("/v1/x/models/unload", post(unload))
        .route("/v1/x/config", get(config))
        .route("/", get(ui::page))
        .route("/ui", get(ui::moved))
        .route("/ui/{part}", get(ui::part))
        .fallback(|| async { Refusal(ApiError::new(404, "unknown route; GET /openapi.json lists all routes")) })
        .method_not_allowed_fallback(|method: Method| async move {
            Refusal(ApiError::new(
                405,
                format!(
                    "this route does not allow {method}; the header Allow lists its \
                 methods"
                ),
            ))
        })
        .layer(axum::middleware::from_fn_with_state(daemon.clone(), door))
        .with_state(daemon)
}

/// Every request passes here: its admission is checked, and the answer gets the common headers.
async fn door(State(daemon): Shared, mut request: Request, next: Next) -> Response {
    daemon.counters.requests.add(1);
    let id = request.headers().get("x-request-id").and_then(|id| safe_id(id.as_bytes()));
    let id = id.unwrap_or_else(|| format!("{:016x}", daemon.fresh()));
    request.extensions_mut().insert(RequestId(id.clone()));
    let entry = LogEntry::new(id.clone(), request.method().clone(), request.uri().path());
    request.extensions_mut().insert(entry.noted.clone());
    let origin = allowed_origin(&daemon, request.headers());
    let form = error_form(request.uri().path());
    let mut response = match admit(&daemon, &request) {
        // A browser asks whether it may send the request; that question carries no token.
        Ok(()) if origin.is_some() && is_preflight(&request) => preflight(request.headers()),
        Ok(()) => {
            let owner = owner(&daemon, &request);
            request.extensions_mut().insert(owner);
            if let Some(entered) = request.extensions().get::<Entered>().filter(|_| !needs_no_token(&request)) {
                entered.note();
            }
            next.run(request).await
        }
        Err(error) => Refusal(error).into_response(),
    };
    if let Some(Refused(error)) = response.extensions().get() {
        entry.noted.reason(&error.message);
        if form != ErrorForm::OpenAi {
            let allowed = response.headers().get(header::ALLOW).cloned();
            response = written(error, form);
            allowed.into_iter().for_each(|allowed| _ = response.headers_mut().insert(header::ALLOW, allowed));
        }
    }
    if let Some(origin) = origin {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static("x-request-id, request-id, retry-after, x-dynamicinfer-unenforced"),
        );
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    if response.status().as_u16() >= 400 {
        daemon.counters.refused.add(1);
    }
    if let Ok(id) = HeaderValue::from_str(&id) {
        if form == ErrorForm::Anthropic {
            // The name that Anthropic's clients look for.
            response.headers_mut().insert("request-id", id.clone());
        }
        response.headers_mut().insert("x-request-id", id);
    }
    let status = response.status();
    response.map(|body| entry.hold(status, body))
}

/// The form of errors at an address: that of the API that it belongs to.
fn error_form(path: &str) -> ErrorForm {
    let below = |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    if below("/v1/messages") {
        ErrorForm::Anthropic
    } else if below("/api") {
        ErrorForm::Ollama
    } else {
        ErrorForm::OpenAi
    }
}

/// The answer to a preflight: a page of the allowed origin may send any header, such as the `x-stainless-...` of OpenAI's client. All that it
/// asks about are named, because `*` would not allow Authorization.
fn preflight(asked: &HeaderMap) -> Response {
    let mut allowed: Vec<HeaderName> =
        vec![header::AUTHORIZATION, header::CONTENT_TYPE, "x-request-id".parse().expect("a name")];
    for list in asked.get_all(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        for name in
            list.as_bytes().split(|&b| b == b',').filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        {
            if !allowed.contains(&name) {
                allowed.push(name);
            }
        }
    }
    let allowed: Vec<&str> = allowed.iter().map(HeaderName::as_str).collect();
    let headers = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, PUT, DELETE".to_owned()),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, allowed.join(", ")),
        (header::ACCESS_CONTROL_MAX_AGE, "600".to_owned()),
        (header::VARY, "access-control-request-headers".to_owned()),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}

/// The request's origin, if it is the one whose pages may read the answers.
fn allowed_origin(daemon: &Daemon, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let settings = daemon.settings();
    let allowed = settings.text("serve.allow_origin")?;
    (origin.as_bytes() == allowed.as_bytes()).then(|| origin.clone())
}

/// Whether a browser asks before a request that a page wants to make (CORS).
fn is_preflight(request: &Request) -> bool {
    request.method() == Method::OPTIONS && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// The request id that a client chose, if it can go into a log as it is.
fn safe_id(id: &[u8]) -> Option<String> {
    let safe = |b: &u8| b.is_ascii_alphanumeric() || b"-_.:".contains(b);
    let good = !id.is_empty() && id.len() <= MAX_REQUEST_ID && id.iter().all(safe);
    good.then(|| String::from_utf8_lossy(id).into_owned())
}

fn admit(daemon: &Daemon, request: &Request) -> Result<(), ApiError> {
    if request.uri().to_string().len() > MAX_URI {
        return Err(ApiError::new(414, format!("the address has more than {MAX_URI} bytes")));
    }
    let headers: usize = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if headers > MAX_HEADER_BYTES {
        return Err(ApiError::new(431, format!("the headers have more than {MAX_HEADER_BYTES} bytes")));
    }
    says_once(request)?;
    let peer = request.extensions().get::<Peer>();
    match peer {
        // A client that may open the socket may use it: the file's mode decides.
        Some(Peer::Unix { .. }) => Ok(()),
        Some(Peer::Tcp(_)) => admit_tcp(daemon, request),
        None => Err(ApiError::new(500, "a connection without a peer")),
    }?;
    if ui::is_ui(request.uri().path()) {
        ui::admit(daemon)?;
    }
    // Anyone may ask which models there are and how they compute.
    let steers = !request.method().is_safe() && request.uri().path().starts_with("/v1/x/");
    if steers { may_steer(daemon, peer) } else { Ok(()) }
}

/// Checks that headers that decide on access are sent once, and that an address that names a host names that of the Host header: a proxy in
/// front may have looked at the other one.
fn says_once(request: &Request) -> Result<(), ApiError> {
    for name in [header::HOST, header::ORIGIN, header::AUTHORIZATION, API_KEY] {
        let times = request.headers().get_all(&name).iter().count();
        if times > 1 {
            let message = format!("the request has the header {name} {times} times; send it once");
            return Err(ApiError::new(400, message));
        }
    }
    let Some(authority) = request.uri().authority() else { return Ok(()) };
    let host = request.headers().get(header::HOST).map_or(&b""[..], HeaderValue::as_bytes);
    if authority.as_str().as_bytes().eq_ignore_ascii_case(host) {
        return Ok(());
    }
    let (of, host) = (crate::error::excerpt(authority), crate::error::excerpt(String::from_utf8_lossy(host)));
    let message =
        format!("the address is one of the host '{of}', and the header Host names '{host}'; send the path alone");
    Err(ApiError::new(400, message))
}

/// Whether the answer tells nothing that is worth a secret: a supervisor or a load balancer asks without one, and a browser for the page's files.
/// Such a question does not show that its connection may stay.
fn needs_no_token(request: &Request) -> bool {
    let (method, path) = (request.method(), request.uri().path());
    method.is_safe() && path == "/health" || ui::is_file(method, path)
}

/// Checks a request over TCP, which every program of this machine can reach, and every web page in its browsers.
fn admit_tcp(daemon: &Daemon, request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST).unwrap_or_default();
    if !is_this_machine(host, daemon.settings().switch("serve.lan")) {
        let message = format!(
            "the host '{}' is not a name of this machine; use localhost, or with serve.lan its address or name",
            crate::error::excerpt(host)
        );
        return Err(ApiError::new(403, message));
    }
    if headers.contains_key(header::ORIGIN) {
        if allowed_origin(daemon, headers).is_none() && !ui::is_own_page(daemon, headers) {
            return Err(ApiError::new(403, "this origin may not use the server; set serve.allow_origin to it"));
        }
        // A preflight has no token, and its answer only names what may be sent.
        if is_preflight(request) {
            return Ok(());
        }
    }
    if needs_no_token(request) {
        return Ok(());
    }
    let tokens = daemon.tokens.lock().clone();
    // All are compared, so that the time says nothing of which is near.
    let is_right =
        |given: &str| tokens.iter().fold(false, |known, token| known | same(given.as_bytes(), token.as_bytes()));
    if [bearer(headers), api_key(headers)].into_iter().flatten().any(is_right) {
        return Ok(());
    }
    Err(ApiError::new(
        401,
        "the bearer token is missing or wrong; send the header Authorization: Bearer TOKEN, or x-api-key: TOKEN; `dynamicinfer serve` \
         prints the token's file at its start",
    ))
}

/// Whether a Host header means this machine: `localhost` or one of its own addresses, with a port or without. Another name may be that of a
/// web page whose address was made to be this machine's. With `lan` also its name in the network, and any address: no page can be made to
/// have one that is not its own.
fn is_this_machine(host: &str, lan: bool) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, port)| if port.ends_with(']') { host } else { name });
    let address: Option<IpAddr> = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(v6) => v6.parse::<Ipv6Addr>().ok().map(IpAddr::from),
        None => name.parse::<Ipv4Addr>().ok().map(IpAddr::from),
    };
    let own = || tcp::host_name().is_some_and(|own| is_host_name(name, &own));
    name.eq_ignore_ascii_case("localhost")
        || address.is_some_and(|address| lan || address.is_loopback())
        || lan && own()
}

/// Whether `name` is `own`, with the network's domain or without.
fn is_host_name(name: &str, own: &str) -> bool {
    let short = own.split('.').next().unwrap_or(own);
    [own, short, &format!("{short}.local")].iter().any(|own| !own.is_empty() && name.eq_ignore_ascii_case(own))
}

/// 200 while the process can do its work or has no model; 503 once it cannot work.
async fn health(State(daemon): Shared, request: Request) -> Response {
    let local = matches!(request.extensions().get(), Some(Peer::Unix { .. }));
    match daemon.state() {
        ModelState::Ready(loaded) if !loaded.handle.is_alive() => {
            Refusal(ApiError::new(503, "the engine has failed").code("engine_failed")).into_response()
        }
        ModelState::Failed(why) => {
            // Over TCP no token was checked, and the reason contains paths; /ready gives it to clients with a token.
            let why = if local { why } else { "the model cannot be used".into() };
            Refusal(ApiError::new(503, why).code("model_failed")).into_response()
        }
        _ => json_response(&json!({"status": "ok", "version": env!("CARGO_PKG_VERSION")})),
    }
}

async fn ready(State(daemon): Shared) -> Response {
    let ready = |name: &str| json!({"status": "ready", "model": name});
    answer(match daemon.state() {
        // The next request has it loaded again.
        ModelState::Freed(offered) => Ok(ready(&offered.name)),
        _ => daemon.ready().map(|loaded| ready(&loaded.model.name)),
    })
}

async fn models(State(daemon): Shared) -> Response {
    let listed = offered(&daemon).await;
    answer(listed.map(
        |all| json!({"object": "list", "data": all.iter().map(|one| model_card(&daemon, one)).collect::<Vec<_>>()}),
    ))
}

/// A model's entry in a list: more is known of the loaded one.
fn model_card(daemon: &Daemon, one: &Offered) -> Value {
    match daemon.state() {
        ModelState::Ready(loaded) if loaded.offered.origin == one.origin => loaded.model.card(),
        _ => {
            json!({"id": one.name, "object": "model", "created": one.modified, "owned_by": "dynamicinfer", "loaded": false})
        }
    }
}

async fn model(State(daemon): Shared, name: Result<Path<String>, PathRejection>) -> Response {
    let Ok(Path(name)) = name else {
        return Refusal(ApiError::new(400, "the model's name in the address is not UTF-8 text")).into_response();
    };
    let refused = match daemon.ready() {
        Ok(loaded) => match loaded.model.check_name(Some(&name)) {
            Ok(()) => return json_response(&loaded.model.card()),
            Err(refused) => refused,
        },
        Err(refused) => refused,
    };
    let one = offered(&daemon).await.map(|all| all.into_iter().find(|one| one.name == name));
    answer(one.and_then(|one| one.map(|one| model_card(&daemon, &one)).ok_or(refused)))
}

async fn cache(State(daemon): Shared, request: Request) -> Response {
    answer(control::cache(&daemon, client(&request)).await)
}

async fn budget(State(daemon): Shared, request: Request) -> Response {
    answer(control::budget(&daemon, client(&request)).await)
}

async fn set_budget(State(daemon): Shared, request: Request) -> Response {
    let client = client(&request);
    answer(async { control::set_budget(&daemon, client, &body(&daemon, request).await?).await }.await)
}

async fn policy(State(daemon): Shared, request: Request) -> Response {
    answer(control::policy(&daemon, client(&request)).await)
}

async fn set_policy(State(daemon): Shared, request: Request) -> Response {
    let client = client(&request);
    answer(async { control::set_policy(&daemon, client, &body(&daemon, request).await?).await }.await)
}

async fn thresholds(State(daemon): Shared, request: Request) -> Response {
    answer(control::thresholds(&daemon, client(&request)).await)
}

async fn set_thresholds(State(daemon): Shared, request: Request) -> Response {
    let client = client(&request);
    answer(async { control::set_thresholds(&daemon, client, &body(&daemon, request).await?).await }.await)
}

#[derive(Deserialize)]
struct LoadRequest {
    model: String,
    /// Settings for this model alone, as texts: those of the engine and the sampler, and `serve.context`.
    #[serde(default)]
    settings: BTreeMap<String, String>,
}

/// Answers when the model is loaded, or when it is known why it cannot be.
async fn load(State(daemon): Shared, request: Request) -> Response {
    let work = async {
        let ask: LoadRequest = parse(&body(&daemon, request).await?, &["model", "settings"])?;
        let settings = daemon.settings().for_load(&ask.settings)?;
        // Continues if the client disconnects: a load must not stop half-way.
        let loading = tokio::spawn({
            let daemon = daemon.clone();
            async move { daemon.load_as(&ask.model, settings).await }
        });
        let loaded = loading.await.map_err(|_| ApiError::new(500, "loading failed"))?;
        // Its client named the file, or may know where it lies.
        let why = |e: Error| ApiError { param: Some("model".into()), message: e.to_string(), ..ApiError::from(e) };
        Ok(loaded.map_err(why)?.model.card())
    };
    answer(work.await)
}

async fn unload(State(daemon): Shared) -> Response {
    daemon.unload().await;
    json_response(&control::ps(&daemon))
}

async fn config(State(daemon): Shared) -> Response {
    let settings = daemon.settings();
    let row = |(key, value, origin): (&crate::settings::Key, String, &crate::settings::Origin)| json!({"key": key.name, "value": value, "origin": origin.to_string()});
    json_response(&settings.all().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_of_this_machine_is_a_host_and_no_other_name_is() {
        for host in
            ["localhost", "LocalHost:80", "127.0.0.1:8093", "127.0.0.2:8093", "127.1.2.3", "[::1]", "[::1]:8093"]
        {
            assert!(is_this_machine(host, false), "{host}");
        }
        for host in [
            "",
            ":80",
            "example.org",
            "localhost.example.org:80",
            "127.0.0.1.example.org",
            "10.0.0.1:80",
            "[::2]:80",
            "[127.0.0.1]",
        ] {
            assert!(!is_this_machine(host, false), "{host}");
        }
        for (host, is) in
            [("10.0.0.1:80", true), ("[::2]:80", true), ("localhost:1", true), ("evil.example", false), ("", false)]
        {
            assert_eq!(is_this_machine(host, true), is, "{host}");
        }
        for (name, is) in
            [("box", true), ("BOX.local", true), ("box.lan", true), ("box.evil.example", false), ("", false)]
        {
            assert_eq!(is_host_name(name, "box.lan"), is, "{name}");
        }
    }
}
