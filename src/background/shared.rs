//! State that the engine's side and the scheduler's share.

use super::message::{Position, SentObservation};
use super::worker::Worker;
use crate::scheduler::{Comparison, Decision, Policy, Verdict};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Observations that may wait for the scheduler: one token's layers of a large model.
pub(super) const OBSERVATIONS: usize = 64;
/// Decisions that may wait for the engine.
pub(super) const DECISIONS: usize = 64;

/// The verdicts in the order of their numbers.
pub(super) const VERDICTS: [Verdict; 4] = [Verdict::Unknown, Verdict::Pays, Verdict::Even, Verdict::Loses];

/// What both threads read and write.
#[derive(Default)]
pub(super) struct Shared {
    pub stop: AtomicBool,
    pub moving: AtomicBool,
    /// The last comparison of moving with the static placement: its verdict's place in [`VERDICTS`], and the times of both.
    pub gain: [AtomicU64; 3],
    /// Index into [`Policy::ALL`] of the policy in force.
    pub policy: AtomicUsize,
    /// Where the engine stands: a [`Position`].
    pub now: AtomicU64,
    /// Observations handled.
    pub handled: AtomicU64,
    /// Of these, those that came too late for moves.
    pub late: AtomicU64,
    /// Decisions that were lost because the ring was full.
    pub dropped: AtomicU64,
}

impl Shared {
    /// Has the worker handle an observation while the engine stands at `now`, and counts it. `send` says whether a decision was taken.
    pub fn handle(
        &self,
        worker: &mut Worker,
        seen: &mut SentObservation,
        now: Position,
        mut send: impl FnMut(Position, &Decision<'_>) -> bool,
    ) {
        worker.follow(Policy::ALL[self.policy.load(Ordering::Relaxed)]);
        let late = worker.handle(seen, now, |until, decision| {
            let empty = decision.thresholds.is_none() && decision.moves.is_empty();
            if !empty && !send(until, &decision) {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
        });
        self.moving.store(worker.scheduler.moving(), Ordering::Relaxed);
        let Comparison { verdict, moving_ns, resting_ns } = worker.scheduler.gain();
        let all = [verdict as u64, moving_ns, resting_ns];
        self.gain.iter().zip(all).for_each(|(to, part)| to.store(part, Ordering::Relaxed));
        self.late.fetch_add(u64::from(late), Ordering::Relaxed);
        self.handled.fetch_add(1, Ordering::Release);
    }
}
