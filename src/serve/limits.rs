//! Limits on what requests take together, of whichever client: bytes of bodies in memory, and bodies being processed.

use crate::api::ApiError;
use crate::api::places::Places;
use crate::generation::Refused;
use crate::settings::Settings;
use std::ops::Deref;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

/// Bodies that are processed at once: parsed, tokenised and put through the chat template, each in a process of its own. That takes a core,
/// and memory that is a multiple of the body. At least two, so that one client's slow ones do not stop the others': the last free place is
/// kept for another client. On many cores at most four, because the engine needs most of them. Schemas are tried and compiled outside, one
/// at a time ([`crate::api::schema`]).
const PLACES: std::ops::RangeInclusive<usize> = 2..=4;

/// Counts bodies and places that are taken.
pub struct Limits {
    /// One permit for each byte.
    bodies: Arc<Semaphore>,
    bodies_bytes: usize,
    /// At most `queue` requests wait for one.
    places: Places,
    /// One permit for the request for embeddings that runs, and one for each that may wait.
    embeddings: Semaphore,
    queue: usize,
}

/// A request's body; its bytes count until it is dropped.
#[derive(Default)]
pub struct Body {
    bytes: Vec<u8>,
    held: Option<OwnedSemaphorePermit>,
}

impl Deref for Body {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Limits {
    /// Limits as in `settings`.
    pub fn new(settings: &Settings) -> Limits {
        let (bodies_bytes, queue) =
            (settings.whole("serve.bodies_bytes") as usize, settings.whole("serve.queue") as usize);
        let places = crate::config::default_threads().clamp(*PLACES.start(), *PLACES.end());
        Limits {
            bodies: Arc::new(Semaphore::new(bodies_bytes)),
            bodies_bytes,
            places: Places::new(places, queue),
            embeddings: Semaphore::new(queue + 1),
            queue,
        }
    }

    /// Bytes of bodies in memory, at most.
    pub fn bodies_bytes(&self) -> usize {
        self.bodies_bytes
    }

    /// Bytes of bodies in memory now.
    pub fn held_bytes(&self) -> usize {
        self.bodies_bytes - self.bodies.available_permits()
    }

    /// Requests that wait for a place now.
    pub fn waiting(&self) -> usize {
        self.places.waiting()
    }

    /// Requests for embeddings that run or wait now.
    pub fn embedding_now(&self) -> usize {
        self.queue + 1 - self.embeddings.available_permits()
    }

    /// Counts a request for embeddings until the return value is dropped.
    ///
    /// # Errors
    /// 429 if one runs and `serve.queue` wait already.
    pub fn embedding(&self) -> Result<SemaphorePermit<'_>, ApiError> {
        self.embeddings.try_acquire().map_err(|_| Refused::QueueFull(self.queue).into())
    }

    /// Adds bytes of a body that have arrived. A body counts only as it arrives, so announcing a large one takes nothing.
    ///
    /// # Errors
    /// 503 if all bodies together exceed the limit, or memory is too small.
    pub fn add(&self, body: &mut Body, data: &[u8]) -> Result<(), ApiError> {
        let busy = |why: String| ApiError::new(503, why).code("bodies_full").retry_after(1);
        let all = self.bodies_bytes;
        let more = u32::try_from(data.len()).ok().and_then(|n| self.bodies.clone().try_acquire_many_owned(n).ok());
        let more = more.ok_or_else(|| {
            busy(format!("the bodies of running requests have {all} bytes; retry later, or raise serve.bodies_bytes"))
        })?;
        match &mut body.held {
            Some(held) => held.merge(more),
            None => body.held = Some(more),
        }
        let full = |_| busy("no memory for this body; send a shorter one, or retry later".to_owned());
        body.bytes.try_reserve(data.len()).map_err(full)?;
        body.bytes.extend_from_slice(data);
        Ok(())
    }

    /// Runs `work` on a thread that may take long, once there is a place; clients take turns. A client that disconnects while it waits leaves
    /// the queue; work that has begun keeps its place ([`Place::run`](crate::api::places::Place::run)).
    ///
    /// # Errors
    /// 429 if `serve.queue` requests wait for a place already; those of `work`.
    pub async fn in_a_place<T: Send + 'static>(
        &self,
        client: u64,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.places.take(client).await.map_err(Refused::QueueFull)?.run(work).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_requests_for_embeddings_wait_as_the_queue_has_places_and_the_next_is_told_to_come_back() {
        let mut settings = Settings::read(&[], None, |_| None).unwrap();
        settings.flag("serve.queue", "x", Some(2)).unwrap();
        let limits = Limits::new(&settings);
        let mut held: Vec<_> = (0..3).map(|_| limits.embedding().unwrap()).collect();
        let refused = limits.embedding().unwrap_err();
        assert_eq!((refused.status, refused.retry_after), (429, Some(1)));
        held.pop();
        assert!(limits.embedding().is_ok());
    }
}
