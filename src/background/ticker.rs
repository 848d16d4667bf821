//! The scheduler on a virtual clock: what it sees takes a stated time, and nothing depends on how fast or busy the machine is.

use super::message::{Position, SentDecision, SentObservation};
use super::options::Latency;
use super::shared::{DECISIONS, OBSERVATIONS, Shared};
use super::worker::{Worker, write};
use std::collections::VecDeque;

/// Observations and decisions on their way, each with its time on the device's clock, ns.
pub(super) struct Ticker {
    worker: Worker,
    latency: Latency,
    waiting: VecDeque<(u64, SentObservation)>,
    decided: VecDeque<(u64, SentDecision)>,
    /// Memory of those that were taken.
    observations: Vec<SentObservation>,
    decisions: Vec<SentDecision>,
    /// When the scheduler is done with what it has taken.
    free_ns: u64,
    /// Where the engine stood from which time on.
    stood: VecDeque<(u64, Position)>,
    now_ns: u64,
}

impl Ticker {
    pub fn new(
        mut worker: Worker,
        latency: Latency,
        observation: impl Fn() -> SentObservation,
        decision: impl Fn() -> SentDecision,
    ) -> Ticker {
        worker.warm();
        Ticker {
            worker,
            latency,
            waiting: VecDeque::with_capacity(OBSERVATIONS),
            decided: VecDeque::with_capacity(DECISIONS),
            observations: (0..OBSERVATIONS).map(|_| observation()).collect(),
            decisions: (0..DECISIONS).map(|_| decision()).collect(),
            free_ns: 0,
            stood: VecDeque::with_capacity(4 * OBSERVATIONS),
            now_ns: 0,
        }
    }

    /// Takes an observation at this time; `false` if too many wait.
    pub fn send(&mut self, now_ns: u64, shared: &Shared, fill: impl FnOnce(&mut SentObservation)) -> bool {
        // A long prompt sends more than fits before the engine comes to a layer again.
        if self.observations.is_empty() {
            self.work(u64::MAX, shared);
        }
        let Some(mut observation) = self.observations.pop() else { return false };
        fill(&mut observation);
        // A prompt's chunk has no time of its own: it comes right after what was sent before.
        self.now_ns = self.now_ns.max(now_ns);
        self.waiting.push_back((self.now_ns, observation));
        true
    }

    /// Lets the time become `now_ns`, at which the engine comes to `position`.
    pub fn advance(&mut self, now_ns: u64, position: Position, shared: &Shared) {
        self.now_ns = self.now_ns.max(now_ns);
        self.work(self.now_ns, shared);
        self.stood.push_back((self.now_ns, position));
    }

    /// Handles what is done by this time.
    fn work(&mut self, until_ns: u64, shared: &Shared) {
        while let Some((sent_ns, seen)) = self.waiting.front() {
            let begins_ns = self.free_ns.max(*sent_ns);
            while self.stood.get(1).is_some_and(|(since, _)| *since <= begins_ns) {
                self.stood.pop_front();
            }
            let stood = self.stood.front().map_or(Position::default(), |(_, position)| *position);
            let late = self.worker.is_late(seen, stood);
            let read = if late { 0 } else { self.worker.predictor_bytes(seen) };
            let done_ns = begins_ns + (self.latency.observation_ns + read as f64 / self.latency.gb_s) as u64;
            if done_ns > until_ns {
                return;
            }
            let (_, mut seen) = self.waiting.pop_front().expect("looked at above");
            let Ticker { worker, decided, decisions, .. } = self;
            shared.handle(worker, &mut seen, stood, |until, decision| {
                let Some(mut to) = decisions.pop() else { return false };
                write(&mut to, until, decision);
                decided.push_back((done_ns, to));
                true
            });
            self.free_ns = done_ns;
            self.observations.push(seen);
        }
    }

    /// Calls `apply` with each decision that was made by now.
    pub fn decided(&mut self, mut apply: impl FnMut(&mut SentDecision)) {
        while self.decided.front().is_some_and(|(done_ns, _)| *done_ns <= self.now_ns) {
            let (_, mut decision) = self.decided.pop_front().expect("looked at above");
            apply(&mut decision);
            self.decisions.push(decision);
        }
    }

    /// Handles all that waits, however long it takes.
    pub fn finish(mut self, shared: &Shared) -> Worker {
        self.work(u64::MAX, shared);
        self.worker
    }
}
