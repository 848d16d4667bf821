//! Requests whose answer is text, vectors or tokens: read in a place, and answered by the engine.

use super::body::EventStream;
use super::common::{Refusal, RequestId, Shared, answer, body, client, is_steered_by, json_response};
use super::connection::Peer;
use super::daemon::{Daemon, Loaded, UnderWay};
use super::embeddings;
use super::log::Noted;
use super::owner::{Owner, keeper};
use super::unknown::unknown_fields;
use super::usher;
use crate::api::anthropic::MessagesRequest;
use crate::api::embeddings::{EMBEDDING_FIELDS, EmbeddingRequest, Texts};
use crate::api::keep_alive::Keep;
use crate::api::{ApiError, Asker, Collector, Generates, Prepared, Unknown, parse, parse_with};
use crate::child::Wanted;
use crate::clock::Duration;
use crate::error::percent_encoded;
use crate::generation::{Event, Job};
use crate::tokenizer::Special;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::Arc;

/// The header of an answer that is not kept to all of the request's schemas: JSON pointers of the parts that it is not kept to.
const UNENFORCED: HeaderName = HeaderName::from_static("x-dynamicinfer-unenforced");
/// Parts in it, at most.
const MAX_LISTED: usize = 16;

/// Answers a request for text.
pub async fn generated<R: Generates>(State(daemon): Shared, request: Request) -> Response {
    generate::<R>(daemon, request).await.unwrap_or_else(|error| Refusal(error).into_response())
}

/// Answers a request for vectors.
pub async fn embed(State(daemon): Shared, request: Request) -> Response {
    let read = |loaded: &Loaded, body: &[u8], unknown: &Unknown| {
        parse_with::<EmbeddingRequest>(body, EMBEDDING_FIELDS, unknown)?.prepare(&loaded.model)
    };
    answer(vectors(&daemon, request, read).await.map(|(loaded, texts, vectors)| texts.answer(&loaded.model, &vectors)))
}

/// The model, the texts that `read` finds in a request's body, and a vector for each.
///
/// # Errors
/// As [`embeddings::vectors`]; those of `read`.
pub async fn vectors(
    daemon: &Arc<Daemon>,
    request: Request,
    read_texts: impl FnOnce(&Loaded, &[u8], &Unknown) -> Result<Texts, ApiError> + Send + 'static,
) -> Result<(UnderWay, Texts, Vec<Vec<f32>>), ApiError> {
    let unknown = unknown_fields(&daemon.settings());
    let work = move |loaded: &Loaded, body: &[u8]| Ok((read_texts(loaded, body, &unknown)?, unknown));
    let (noted, client) = (noted(&request), client(&request));
    let (loaded, (texts, unknown)) = read(daemon, request, work).await?;
    daemon.ignored.note(client, unknown);
    noted.model(&loaded.model.name);
    noted.prompt(texts.count());
    let vectors = embeddings::vectors(daemon, &loaded, client, &texts).await?;
    Ok((loaded, texts, vectors))
}

/// Counts the tokens of a prompt as an answer to the same request would.
pub async fn count(State(daemon): Shared, request: Request) -> Response {
    let (client, noted, fresh) = (client(&request), noted(&request), daemon.fresh());
    let here = Arc::new(());
    let asker = asker(&daemon, client, fresh, &here);
    let work = move |loaded: &Loaded, body: &[u8]| {
        let request: MessagesRequest = parse_with(body, MessagesRequest::FIELDS, &asker.unknown)?;
        let counted = request.count(&loaded.model, &asker).map_err(MessagesRequest::renamed)?;
        Ok((counted, asker.unknown))
    };
    let counted = read(&daemon, request, work).await.map(|(loaded, (counted, unknown))| {
        daemon.ignored.note(client, unknown);
        noted.model(&loaded.model.name);
        counted
    });
    drop(here);
    answer(counted)
}

/// The client of a request. `here` is dropped when it disconnects; a child process that works for it is then ended.
fn asker(daemon: &Daemon, client: u64, fresh: u64, here: &Arc<()>) -> Asker {
    let (wanted, unknown) = (Wanted::by(here), unknown_fields(&daemon.settings()));
    let (id, stored) = (format!("{fresh:016x}"), daemon.stored.clone());
    Asker { client, keeper: 0, id, fresh_seed: fresh >> 32, wanted, unknown, stored }
}

/// What a body says of the model that answers it. The request itself is read for that model.
#[derive(Default, Deserialize)]
struct Named<'a> {
    #[serde(borrow)]
    model: Option<Cow<'a, str>>,
    /// The same in ollama's older requests.
    #[serde(borrow)]
    name: Option<Cow<'a, str>>,
    keep_alive: Option<Value>,
    #[serde(borrow)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow)]
    suffix: Option<&'a RawValue>,
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
}

impl Named<'_> {
    /// How long the model is kept, where the request is one of ollama's.
    ///
    /// # Errors
    /// 400 for what is no duration.
    fn keep(&self, path: &str) -> Result<Option<Keep>, ApiError> {
        let keep = self.keep_alive.as_ref().filter(|keep| path.starts_with("/api/") && !keep.is_null());
        keep.map(Keep::read).transpose()
    }

    /// Whether it asks for nothing, as `ollama stop` does.
    fn asks_nothing(&self) -> bool {
        let is_empty = |value: Option<&RawValue>| value.is_none_or(|v| ["null", "\"\"", "[]"].contains(&v.get()));
        [self.prompt, self.suffix, self.messages].into_iter().all(is_empty)
    }
}

/// Runs `work` on a request's body, and returns its result with the hold on the model that it names, for which it was done. Tokenising a long
/// text and running a template take long, so they run alongside the other connections; how many run at once limits their memory.
pub async fn read<T: Send + 'static>(
    daemon: &Arc<Daemon>,
    request: Request,
    work: impl FnOnce(&Loaded, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<(UnderWay, T), ApiError> {
    let (client, path) = (client(&request), request.uri().path().to_owned());
    let steers = is_steered_by(daemon, request.extensions().get::<Peer>());
    let body = body(daemon, request).await?;
    // A body that is no such object is refused when it is read whole.
    let named: Named<'_> = serde_json::from_slice(&body).unwrap_or_default();
    let keep = named.keep(&path)?;
    let name = named.model.as_deref().or(named.name.as_deref());
    let is_over = keep.is_some_and(|keep| keep.is_over(Duration::ZERO)) && named.asks_nothing();
    let loaded = match is_over {
        // No model is loaded to be freed.
        true => daemon.begin(|loaded| loaded.model.check_name(name))?,
        false => usher::begin(daemon, client, name).await?,
    };
    let at = Arc::clone(&loaded);
    let made = daemon.limits.in_a_place(client, move || work(&at, &body)).await?;
    // A model that the user had loaded is kept for as long as the user says.
    if let Some(keep) = keep.filter(|_| steers || loaded.on_demand) {
        loaded.keep(keep);
    }
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
    // This future, and `here` with it, is dropped when the client disconnects.
    let here = Arc::new(());
    let Owner(owner) = request.extensions().get().copied().unwrap_or_default();
    let asker = Asker { keeper: keeper(&daemon, &request), ..asker(&daemon, client, daemon.fresh(), &here) };
    let prepare = move |loaded: &Loaded, body: &[u8]| {
        let prepared = parse_with::<R>(body, R::FIELDS, &asker.unknown)?.prepare(&loaded.model, &asker);
        Ok((prepared.map_err(R::renamed)?, asker.unknown))
    };
    let (loaded, (prepared, unknown)) = read(&daemon, request, prepare).await?;
    daemon.ignored.note(client, unknown);
    let prepared = prepared.formed(client, &Wanted::by(&here)).await.map_err(R::renamed)?;
    let Prepared { jobs, answer, stream, per_prompt, unenforced, .. } = prepared;
    drop(here);
    noted.model(&loaded.model.name);
    noted.unenforced(&unenforced);
    let told = listed(&unenforced);
    let span = tracing::debug_span!("request", id, client, model = loaded.model.name);
    // If one job is refused, the events of the others are dropped, which cancels them.
    let submit = |job| loaded.handle.submit(Job { owner, ..job });
    let submit = || jobs.into_iter().map(submit).collect::<Result<Vec<_>, _>>();
    let events = span.in_scope(submit)?;
    let mut response = if stream {
        let ping = Duration::from_secs(daemon.settings().whole("serve.ping_seconds"));
        let lines = answer.wire.is_lines();
        let body = EventStream::new(answer, events, per_prompt, ping, noted, R::renamed);
        let kind = if lines { "application/x-ndjson" } else { "text/event-stream" };
        let headers = [(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "no-cache")];
        (headers, Body::new(body)).into_response()
    } else {
        let mut collector = Collector::new(answer, events.len(), per_prompt);
        for (index, mut events) in events.into_iter().enumerate() {
            while let Some(event) = events.recv().await {
                if let Event::Done(done) = &event {
                    noted.answer(done, index, per_prompt);
                }
                collector.take(index, event).map_err(R::renamed)?;
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

/// Answers with a text's tokens.
pub async fn tokenize(State(daemon): Shared, request: Request) -> Response {
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

/// Answers with the text of tokens.
pub async fn detokenize(State(daemon): Shared, request: Request) -> Response {
    let work = |loaded: &Loaded, body: &[u8]| {
        let ask: Detokenize = parse(body, &["tokens"])?;
        Ok(json!({"content": loaded.model.detokenize(&ask.tokens)?}))
    };
    answer(read(&daemon, request, work).await.map(|(_, text)| text))
}
