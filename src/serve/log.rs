//! One log line for each request: the request, its answer and its cost. A stream's line is written at its end.

use crate::api::stream::Usage;
use crate::clock::{self, Instant};
use crate::error::{excerpt, printable};
use crate::generation::Done;
use axum::body::Body;
use axum::http::{Method, StatusCode};
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use parking_lot::Mutex;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tracing::{debug, info, warn};

/// What becomes known of a request while it is answered; the request carries it.
#[derive(Clone, Default)]
pub struct Noted(Arc<Mutex<Facts>>);

#[derive(Default)]
struct Facts {
    model: Option<String>,
    usage: Usage,
    unenforced: Option<String>,
    reason: Option<String>,
}

impl Noted {
    /// The model that answers.
    pub fn model(&self, name: &str) {
        self.0.lock().model = Some(name.to_owned());
    }

    /// An answer that is complete: number `index`, of `per_prompt` for each prompt.
    pub fn answer(&self, done: &Done, index: usize, per_prompt: usize) {
        self.0.lock().usage.add(done, index, per_prompt);
    }

    /// Tokens of a text that is not answered.
    pub fn prompt(&self, tokens: usize) {
        self.0.lock().usage.prompt += tokens;
    }

    /// JSON pointers of the parts of its schemas that its answer is not kept to.
    pub fn unenforced(&self, places: &[String]) {
        self.0.lock().unenforced = (!places.is_empty()).then(|| excerpt(places.join(", ")));
    }

    /// Why it was refused or could not be answered.
    pub fn reason(&self, why: &str) {
        self.0.lock().reason = Some(printable(why));
    }
}

/// A request from its first line to the last byte of its answer. Dropping it writes its line.
pub struct LogEntry {
    /// What becomes known meanwhile.
    pub noted: Noted,
    /// `None` until there is a response.
    pub status: Option<StatusCode>,
    id: String,
    method: Method,
    path: String,
    began: Instant,
    /// Whether the client was there to the end.
    whole: bool,
}

impl LogEntry {
    /// A request that has just arrived.
    pub fn new(id: String, method: Method, path: &str) -> LogEntry {
        let (noted, path) = (Noted::default(), excerpt(path));
        LogEntry { noted, status: None, id, method, path, began: clock::now(), whole: false }
    }

    /// Notes the response, and gives it a body that holds this entry until it is sent.
    pub fn hold(mut self, status: StatusCode, body: Body) -> Body {
        self.status = Some(status);
        // One whose length is known is complete already.
        self.whole = body.size_hint().exact().is_some();
        Body::new(LoggedBody { body, entry: self })
    }
}

impl Drop for LogEntry {
    fn drop(&mut self) {
        let facts = std::mem::take(&mut *self.noted.0.lock());
        let Facts { model, usage, unenforced, reason } = facts;
        let reason = reason.or_else(|| (!self.whole).then(|| "its client has gone".into()));
        let status = self.status.map_or(0, |status| status.as_u16());
        let (id, path, ms) = (&self.id, &self.path, self.began.elapsed().as_millis() as u64);
        // Of an answer that was not completed they are not known.
        let of = |tokens: usize| Some(tokens).filter(|_| usage.prompt > 0);
        let (prompt, cached, generated) = (of(usage.prompt), of(usage.cached), of(usage.generated));
        macro_rules! line {
            ($level:ident) => {
                $level!(id, model, prompt, cached, generated, ms, unenforced, reason, "{} {path} {status}", self.method)
            };
        }
        match status {
            500.. => line!(warn),
            // Looking changes nothing, and programs look every second.
            200..400 if self.method.is_safe() => line!(debug),
            _ => line!(info),
        }
    }
}

struct LoggedBody {
    body: Body,
    entry: LogEntry,
}

impl HttpBody for LoggedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        self.entry.whole |= matches!(frame, Poll::Ready(None));
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
