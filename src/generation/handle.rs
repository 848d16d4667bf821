//! The worker as its clients see it: how they hand in jobs, ask questions and end it.

use super::embedding::Text;
use super::job::{Counted, Job, Refused};
use super::metrics::Metrics;
use super::outbox::{Events, to_client};
use super::sequence::Waiting;
use super::speculation::Speculation;
use crate::clock::{self, Duration, Instant};
use crate::engine::{Engine, Failure};
use crate::error::Result;
use crate::model::KvType;
use crossbeam_channel::Sender;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use tokio::sync::{oneshot, watch};
use tracing::Span;

/// Limits of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Jobs that may wait, 1 or more; further ones are refused.
    pub queue: usize,
    /// Answers at once, 1 or more.
    pub slots: usize,
    /// Positions of each sequence, 2 or more.
    pub context: usize,
    /// How keys and values are stored.
    pub kv: KvType,
    /// Each answer is exactly what it would be alone: one sequence in a pass, and no keys and values of earlier answers.
    pub deterministic: bool,
    /// How long an answer whose client does not read keeps its slot while others wait.
    pub rest: Duration,
    /// How many times as long an answer's token may take because prompts go along, 1 or more.
    pub slowdown: f64,
    /// Bytes that texts which lost their slot may take, so that a prompt that begins as one of them need not run again; 0 keeps none.
    pub prompt_cache_bytes: u64,
    /// Tokens of a prompt after each of which states are kept, 1 or more, where layers have some; they are also kept at the ends of messages.
    pub prompt_cache_every: usize,
    /// When an answer's next tokens are guessed from its own text; not where answers are `deterministic`, because passes of several tokens
    /// round in another order.
    pub speculation: Speculation,
}

/// Hands the answer to a question to its asker.
pub(super) type Answer = Box<dyn FnOnce()>;

/// What runs on the worker's thread between two passes.
pub(super) struct Question {
    pub client: u64,
    pub asked_at: Instant,
    /// What is dropped when its asker goes; `None`: it runs all the same.
    asker: Option<Weak<()>>,
    pub run: Box<dyn FnOnce(&mut Engine) -> Answer + Send>,
}

impl Question {
    /// Whether its asker has gone, so that it need not run.
    pub fn is_gone(&self) -> bool {
        self.asker.as_ref().is_some_and(|asker| asker.strong_count() == 0)
    }
}

pub(super) enum Command {
    /// Waits for the turn of its client.
    Ask(Question),
    /// Waits for the turn of its client.
    Embed(Text),
    /// Shows that the worker works; answered at once.
    Beat(oneshot::Sender<()>),
    /// Keys and values computed so far are not used for later prompts.
    Forget,
    Stop,
    Fail(Failure),
}

/// The worker as its clients see it; clones are handles of the same worker.
#[derive(Clone)]
pub struct Handle {
    pub(super) commands: Sender<Command>,
    pub(super) submitted: Sender<Waiting>,
    /// Wakes the worker when a client has read an event or has gone.
    pub(super) read: Sender<()>,
    pub(super) waiting: Arc<AtomicUsize>,
    /// Jobs that wait or run.
    pub(super) jobs: Arc<watch::Sender<usize>>,
    /// Closed once the worker has ended.
    pub(super) alive: watch::Receiver<()>,
    pub(super) failure: Arc<OnceLock<Failure>>,
    /// Updated by the worker after each turn.
    pub metrics: Arc<Metrics>,
    /// As given to [`start`](super::start).
    pub limits: Limits,
    /// Numbers of an embedding: the model's hidden size.
    pub dimensions: usize,
}

impl Handle {
    /// Hands in a job, which is logged in the span that is entered here. Dropping the events cancels it.
    ///
    /// # Errors
    /// The queue is full, or the worker has ended.
    pub fn submit(&self, job: Job) -> Result<Events, Refused> {
        let limit = self.limits.queue;
        let more = |n: usize| (n < limit).then_some(n + 1);
        if self.waiting.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_err() {
            self.metrics.refused_full.add(1);
            return Err(Refused::QueueFull(limit));
        }
        let (out, events) = to_client(self.read.clone());
        let (asked_at, span) = (clock::now(), Span::current());
        let counted = Counted::one_more(&self.jobs);
        let waiting = Waiting { job: Box::new(job), out, asked_at, span, fetching: None, counted };
        self.submitted.send(waiting).map_err(|_| Refused::Gone)?;
        Ok(events)
    }

    /// Runs `question` on the worker's thread between two passes and returns its result: after the current pass, unless others wait for
    /// their turn. Clients take turns, and between two tokens of an answer one question is answered at most. A job that the same client
    /// hands in afterwards begins after it. `client` is as in [`Job::client`]; 0 is this program itself, whose questions run even where the
    /// future is dropped. Any other question is taken back with its future, if it has not begun.
    ///
    /// # Errors
    /// The worker has ended.
    pub async fn ask<T: Send + 'static>(
        &self,
        client: u64,
        question: impl FnOnce(&mut Engine) -> T + Send + 'static,
    ) -> Result<T, Refused> {
        let (send, receive) = oneshot::channel();
        // The asker may have gone.
        let run = Box::new(move |engine: &mut Engine| -> Answer {
            let answer = question(engine);
            Box::new(move || drop(send.send(answer)))
        });
        let here = Arc::new(());
        let asker = (client != 0).then(|| Arc::downgrade(&here));
        let question = Question { client, asked_at: clock::now(), asker, run };
        self.commands.send(Command::Ask(question)).map_err(|_| Refused::Gone)?;
        let answer = receive.await.map_err(|_| Refused::Gone);
        drop(here);
        answer
    }

    /// The embedding of a text of 1 token or more: the mean of its hidden states, scaled to length 1, `[dimensions]`. It runs in steps
    /// between the passes of answers, which get as much of the time as they get beside a prompt; clients take turns with their texts.
    /// Dropping the future ends it.
    ///
    /// # Errors
    /// The worker has ended. The inner one: [`Error::Memory`] if there is no room for the text's keys and values, and [`Error::Failed`] if
    /// the engine failed.
    ///
    /// [`Error::Memory`]: crate::error::Error::Memory
    /// [`Error::Failed`]: crate::error::Error::Failed
    pub async fn embed(&self, client: u64, tokens: Vec<u32>) -> Result<Result<Vec<f32>>, Refused> {
        let (out, receive) = oneshot::channel();
        self.commands.send(Command::Embed(Text { client, tokens, out })).map_err(|_| Refused::Gone)?;
        receive.await.map_err(|_| Refused::Gone)
    }

    /// Returns after the current pass, whatever else waits: the worker works.
    ///
    /// # Errors
    /// The worker has ended.
    pub async fn beat(&self) -> Result<(), Refused> {
        let (send, receive) = oneshot::channel();
        self.commands.send(Command::Beat(send)).map_err(|_| Refused::Gone)?;
        receive.await.map_err(|_| Refused::Gone)
    }

    /// Drops keys and values of earlier answers, after a change to what the engine computes.
    pub fn forget(&self) {
        // If the worker has ended, there is nothing to forget.
        let _ = self.commands.send(Command::Forget);
    }

    /// Waits until no job waits or runs, or the worker has ended.
    pub async fn idle(&self) {
        // A worker that ends drops its jobs. The sender lives as long as `self`.
        let _ = self.jobs.subscribe().wait_for(|&jobs| jobs == 0).await;
    }

    /// Waits until the worker has ended.
    pub async fn ended(&self) {
        let mut alive = self.alive.clone();
        while alive.changed().await.is_ok() {}
    }

    /// Jobs that wait or run now.
    pub fn jobs(&self) -> usize {
        *self.jobs.borrow()
    }

    /// Whether the worker's thread is running.
    pub fn is_alive(&self) -> bool {
        self.alive.has_changed().is_ok()
    }

    /// Why the worker ended; `None` if it runs or was stopped.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Ends the worker after the current pass, because its results cannot be used. Unfinished jobs are told `why`.
    pub fn fail(&self, why: Failure) {
        // It may have ended already.
        let _ = self.commands.send(Command::Fail(why));
    }

    /// Ends the worker after the current pass; unfinished jobs fail.
    pub fn stop(&self) {
        // It may have ended already.
        let _ = self.commands.send(Command::Stop);
    }
}
