//! The channel from the worker to the client of a job. Neither end waits for the other: a full channel keeps its events here until its
//! client has read some.

use super::job::Event;
use crossbeam_channel::Sender as Signal;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc::{Receiver, Sender, channel, error::TrySendError};

/// Events that may wait for a client before its answer pauses: some 100 bytes each, so a client that stops reading costs a few hundred KiB
/// at most.
pub const EVENTS: usize = 1024;

/// Both ends. `read` wakes the worker when the client has read an event or has gone.
pub fn to_client(read: Signal<()>) -> (Outbox, Events) {
    let (send, receive) = channel(EVENTS);
    (Outbox { events: send, backlog: VecDeque::new() }, Events { events: receive, read })
}

/// Both ends, without a worker to wake.
#[cfg(test)]
pub fn without_worker() -> (Outbox, Events) {
    to_client(crossbeam_channel::bounded(1).0)
}

/// The client's end: the events of its job. Dropping it cancels the job.
pub struct Events {
    events: Receiver<Event>,
    read: Signal<()>,
}

impl Events {
    /// The next event; `None` after the last, or if the worker has ended without one.
    pub async fn recv(&mut self) -> Option<Event> {
        poll_fn(|context| self.poll_recv(context)).await
    }

    /// As [`Events::recv`], for a future that is written by hand.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let event = ready!(self.events.poll_recv(context));
        self.wake();
        Poll::Ready(event)
    }

    /// As [`Events::recv`], on a thread that may wait.
    pub fn blocking_recv(&mut self) -> Option<Event> {
        let event = self.events.blocking_recv();
        self.wake();
        event
    }

    fn wake(&self) {
        // A signal that waits already says the same.
        let _ = self.read.try_send(());
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.events.close();
        self.wake();
    }
}

/// The worker's end. If the client reads slowly and the channel is full, events wait here and the sequence pauses.
pub struct Outbox {
    events: Sender<Event>,
    backlog: VecDeque<Event>,
}

impl Outbox {
    /// Sends an event, or keeps it while the channel is full.
    pub fn send(&mut self, event: Event) {
        self.backlog.push_back(event);
        self.flush();
    }

    /// Moves waiting events into the channel. Returns whether none are left; if the client has gone, they are dropped.
    pub fn flush(&mut self) -> bool {
        while let Some(event) = self.backlog.pop_front() {
            match self.events.try_send(event) {
                Ok(()) => {}
                Err(TrySendError::Full(event)) => {
                    self.backlog.push_front(event);
                    return false;
                }
                Err(TrySendError::Closed(_)) => self.backlog.clear(),
            }
        }
        true
    }

    /// Whether the client has gone.
    pub fn is_closed(&self) -> bool {
        self.events.is_closed()
    }
}
