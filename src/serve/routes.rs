//! The routes, and the order in which a request is checked.

use super::body::EventStream;
use super::common::{Refusal, answer, body, client, json_response, may_steer};
use super::connection::{Entered, Peer};
use super::daemon::{Daemon, Loaded, ModelState, UnderWay};
use super::log::{LogEntry, Noted, RefusalReason};
use super::unknown::unknown_fields;
use super::{control, embeddings, metrics, ui};
use crate::api::chat::ChatRequest;
use crate::api::completions::CompletionRequest;
use crate::api::embeddings::{EMBEDDING_FIELDS, EmbeddingRequest};
use crate::api::responses::ResponsesRequest;
use crate::api::{ApiError, Asker, Collector, Generates, Prepared, parse, parse_with};
use crate::child::Wanted;
use crate::clock::Duration;
use crate::error::percent_encoded;
use crate::generation::Event;
use crate::tokenizer::Special;
use axum::Router;
use axum::body::Body;
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
pub const ROUTES: [(&str, &[&str]); 20] = [
    ("/health", &["get"]),
    ("/ready", &["get"]),
    ("/metrics", &["get"]),
    ("/openapi.json", &["get"]),
    ("/v1/models", &["get"]),
    ("/v1/models/{model}", &["get"]),
    ("/v1/chat/completions", &["post"]),
    ("/v1/completions", &["post"]),
    ("/v1/responses", &["post"]),
    ("/v1/embeddings", &["post"]),
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

/// The header of an answer that is not kept to all of the request's schemas: JSON pointers of the parts that it is not kept to.
const UNENFORCED: HeaderName = HeaderName::from_static("x-dynamicinfer-unenforced");
/// Parts in it, at most.
const MAX_LISTED: usize = 16;

/// The id of a request, as its answer has it in x-request-id.
#[derive(Clone)]
struct RequestId(String);

type Shared = State<Arc<Daemon>>;

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
        .route("/v1/embeddings", post(embed))
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
        .route("/ui", get(ui::page))
        .route("/ui/{part}", get(ui::part).put(ui::set))
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
    let is_ui = ui::is_ui(request.uri().path());
    let mut response = match admit(&daemon, &request) {
        // A browser asks whether it may send the request; that question carries no token.
        Ok(()) if origin.is_some() && is_preflight(&request) => preflight(request.headers()),
        Ok(()) => {
            if let Some(entered) = request.extensions().get::<Entered>().filter(|_| !needs_no_token(&request)) {
                entered.note();
            }
            next.run(request).await
        }
        Err(error) => Refusal(error).into_response(),
    };
    if let Some(origin) = origin {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static("x-request-id, retry-after, x-dynamicinfer-unenforced"),
        );
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    if is_ui && response.status() == StatusCode::UNAUTHORIZED {
        // What a browser asks its user about.
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"the token\""));
    }
    if response.status().as_u16() >= 400 {
        daemon.counters.refused.add(1);
    }
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert("x-request-id", id);
    }
    if let Some(RefusalReason(why)) = response.extensions().get() {
        entry.noted.reason(why);
    }
    let status = response.status();
    response.map(|body| entry.hold(status, body))
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
        (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, PUT".to_owned()),
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
    // Anyone may ask which models there are and how they compute.
    let is_ui = ui::is_ui(request.uri().path());
    if is_ui {
        ui::admit(daemon, request)?;
    }
    let steers = !request.method().is_safe() && (is_ui || request.uri().path().starts_with("/v1/x/"));
    if steers { may_steer(daemon, peer) } else { Ok(()) }
}

/// Checks that headers that decide on access are sent once, and that an address that names a host names that of the Host header: a proxy in
/// front may have looked at the other one.
fn says_once(request: &Request) -> Result<(), ApiError> {
    for name in [header::HOST, header::ORIGIN, header::AUTHORIZATION] {
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

/// Whether the answer tells nothing that is worth a secret: a supervisor or a load balancer asks without one. Such a question does not show
/// that its connection may stay.
fn needs_no_token(request: &Request) -> bool {
    request.method().is_safe() && request.uri().path() == "/health"
}

/// Checks a request over TCP, which every program of this machine can reach, and every web page in its browsers.
fn admit_tcp(daemon: &Daemon, request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST).unwrap_or_default();
    if !is_loopback(host) {
        let message =
            format!("the host '{}' is not a name of this machine; use localhost", crate::error::excerpt(host));
        return Err(ApiError::new(403, message));
    }
    let is_ui = ui::is_ui(request.uri().path());
    if headers.contains_key(header::ORIGIN) {
        if allowed_origin(daemon, headers).is_none() && !(is_ui && ui::is_own_origin(headers)) {
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
    let bearer = text(header::AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer ")).map(str::to_owned);
    // A browser sends a password by itself with all that any page asks of this address, so it opens nothing but the page.
    let given = bearer.or_else(|| is_ui.then(|| ui::password(headers))?).unwrap_or_default();
    let token = daemon.token.lock().clone();
    match token {
        Some(token) if same(given.as_bytes(), token.as_bytes()) => Ok(()),
        _ => Err(ApiError::new(
            401,
            "the bearer token is missing or wrong; send the header Authorization: Bearer TOKEN; `dynamicinfer \
             serve` prints the token's file at its start",
        )),
    }
}

/// Whether a Host header means this machine: `localhost` or one of its own addresses, with a port or without. Another name may be that of a
/// web page whose address was made to be this machine's.
fn is_loopback(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, port)| if port.ends_with(']') { host } else { name });
    let address: Option<IpAddr> = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(v6) => v6.parse::<Ipv6Addr>().ok().map(IpAddr::from),
        None => name.parse::<Ipv4Addr>().ok().map(IpAddr::from),
    };
    name.eq_ignore_ascii_case("localhost") || address.is_some_and(|address| address.is_loopback())
}

/// Compares in the same time wherever the two differ, so that a token cannot be guessed byte by byte.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0u8, |differ, (a, b)| differ | (a ^ b)) == 0
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
    answer(daemon.ready().map(|loaded| json!({"status": "ready", "model": loaded.model.name})))
}

async fn models(State(daemon): Shared) -> Response {
    let cards: Vec<Value> = match daemon.state() {
        ModelState::Ready(loaded) => vec![loaded.model.card()],
        _ => Vec::new(),
    };
    json_response(&json!({"object": "list", "data": cards}))
}

async fn model(State(daemon): Shared, name: Result<Path<String>, PathRejection>) -> Response {
    let Ok(Path(name)) = name else {
        return Refusal(ApiError::new(400, "the model's name in the address is not UTF-8 text")).into_response();
    };
    let card = daemon.ready().and_then(|loaded| loaded.model.check_name(Some(&name)).map(|()| loaded.model.card()));
    answer(card)
}

/// Answers a request for text.
async fn generated<R: Generates>(State(daemon): Shared, request: Request) -> Response {
    generate::<R>(daemon, request).await.unwrap_or_else(|error| Refusal(error).into_response())
}

async fn embed(State(daemon): Shared, request: Request) -> Response {
    let unknown = unknown_fields(&daemon.settings());
    let work = move |loaded: &Loaded, body: &[u8]| {
        let request: EmbeddingRequest = parse_with(body, EMBEDDING_FIELDS, &unknown)?;
        Ok((request.prepare(&loaded.model)?, unknown))
    };
    let (noted, client) = (noted(&request), client(&request));
    let embedded = async {
        let (loaded, (texts, unknown)) = read(&daemon, request, work).await?;
        daemon.ignored.note(client, unknown);
        noted.model(&loaded.model.name);
        noted.prompt(texts.count());
        embeddings::answer(&daemon, &loaded, client, texts).await
    };
    answer(embedded.await)
}

/// Runs `work` on a request's body, and returns its result with the hold on the model that it was done for. Tokenising a long text and
/// running a template take long, so they run alongside the other connections; how many run at once limits their memory.
async fn read<T: Send + 'static>(
    daemon: &Daemon,
    request: Request,
    work: impl FnOnce(&Loaded, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<(UnderWay, T), ApiError> {
    let client = client(&request);
    let body = body(daemon, request).await?;
    let loaded = daemon.begin()?;
    let at = Arc::clone(&loaded);
    let made = daemon.limits.in_a_place(client, move || work(&at, &body)).await?;
    Ok((loaded, made))
}

/// What the log is to know of a request.
fn noted(request: &Request) -> Noted {
    request.extensions().get::<Noted>().cloned().unwrap_or_default()
}

async fn generate<R: Generates>(daemon: Arc<Daemon>, request: Request) -> Result<Response, ApiError> {
    let client = client(&request);
    let id = request.extensions().get::<RequestId>().map(|id| id.0.clone()).unwrap_or_default();
    let noted = noted(&request);
    let fresh = daemon.fresh();
    // This future, and `here` with it, is dropped when the client disconnects; a child process that works for it is then ended.
    let here = Arc::new(());
    let wanted = Wanted::by(&here);
    let unknown = unknown_fields(&daemon.settings());
    let asker = Asker { client, id: format!("{fresh:016x}"), fresh_seed: fresh >> 32, wanted, unknown };
    let prepare = move |loaded: &Loaded, body: &[u8]| {
        let prepared = parse_with::<R>(body, R::FIELDS, &asker.unknown)?.prepare(&loaded.model, &asker)?;
        Ok((prepared, asker.unknown))
    };
    let (loaded, (prepared, unknown)) = read(&daemon, request, prepare).await?;
    daemon.ignored.note(client, unknown);
    let prepared = prepared.formed(client, &Wanted::by(&here)).await?;
    let Prepared { jobs, answer, stream, per_prompt, unenforced, .. } = prepared;
    drop(here);
    noted.model(&loaded.model.name);
    noted.unenforced(&unenforced);
    let told = listed(&unenforced);
    let span = tracing::debug_span!("request", id, client, model = loaded.model.name);
    // If one job is refused, the events of the others are dropped, which cancels them.
    let submit = || jobs.into_iter().map(|job| loaded.handle.submit(job)).collect::<Result<Vec<_>, _>>();
    let events = span.in_scope(submit)?;
    let mut response = if stream {
        let ping = Duration::from_secs(daemon.settings().whole("serve.ping_seconds"));
        let body = EventStream::new(answer, events, per_prompt, ping, noted);
        let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
        (headers, Body::new(body)).into_response()
    } else {
        let mut collector = Collector::new(answer, events.len(), per_prompt);
        for (index, mut events) in events.into_iter().enumerate() {
            while let Some(event) = events.recv().await {
                if let Event::Done(done) = &event {
                    noted.answer(done, index, per_prompt);
                }
                collector.take(index, event)?;
            }
        }
        json_response(&collector.finish()?)
    };
    if let Some(told) = told {
        response.headers_mut().insert(UNENFORCED, told);
    }
    Ok(response)
}

/// JSON pointers as the value of a header; `None` if there are none.
fn listed(places: &[String]) -> Option<HeaderValue> {
    let plain = |byte: u8| byte.is_ascii_graphic() && !b",%".contains(&byte);
    let mut list: Vec<String> = places.iter().take(MAX_LISTED).map(|place| percent_encoded(place, plain)).collect();
    let more = places.len() - list.len();
    list.extend((more > 0).then(|| format!("and {more} more")));
    if list.is_empty() { None } else { HeaderValue::from_str(&list.join(", ")).ok() }
}

#[derive(Deserialize)]
struct Tokenize {
    content: String,
    /// Whether BOS is prepended, if the model wants it.
    #[serde(default)]
    add_special: bool,
    /// Whether text that looks like a control token becomes one.
    #[serde(default)]
    parse_special: bool,
}

async fn tokenize(State(daemon): Shared, request: Request) -> Response {
    let work = |loaded: &Loaded, body: &[u8]| {
        let ask: Tokenize = parse(body, &["content", "add_special", "parse_special"])?;
        let special = if ask.parse_special { Special::Parse } else { Special::AsText };
        let tokens = loaded.model.tokenize(&ask.content, special, ask.add_special)?;
        Ok(json!({"count": tokens.len(), "tokens": tokens}))
    };
    answer(read(&daemon, request, work).await.map(|(_, tokens)| tokens))
}

#[derive(Deserialize)]
struct Detokenize {
    tokens: Vec<u32>,
}

async fn detokenize(State(daemon): Shared, request: Request) -> Response {
    let work = |loaded: &Loaded, body: &[u8]| {
        let ask: Detokenize = parse(body, &["tokens"])?;
        Ok(json!({"content": loaded.model.detokenize(&ask.tokens)?}))
    };
    answer(read(&daemon, request, work).await.map(|(_, text)| text))
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
        Ok(loaded.map_err(|e| ApiError { param: Some("model".into()), ..ApiError::from(e) })?.model.card())
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
            assert!(is_loopback(host), "{host}");
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
            assert!(!is_loopback(host), "{host}");
        }
    }
}
