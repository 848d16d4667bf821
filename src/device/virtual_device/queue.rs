//! What stands on the streams of a virtual device.

use super::rates::QUEUES;
use crate::device::{Buffer, Call, Event};
use std::collections::VecDeque;

/// Most copies that are overtaken at a time; further ones stay in order.
pub(super) const MAX_ASTRAY: usize = 64;
/// Launches that a stream has memory for from the beginning: as many as the compute stream holds.
const MAX_CALLS: usize = QUEUES[0];

/// An operation on a stream: of a launch, its call is the first of the stream's ([`Queue::calls`]), which is several times as large.
#[derive(Clone, Copy)]
pub(super) enum Work {
    /// `before_us` are added to what its bytes take.
    CopyIn {
        from: *const u8,
        to: Buffer,
        at: usize,
        bytes: usize,
        before_us: f64,
    },
    CopyOut {
        from: Buffer,
        at: usize,
        to: *mut u8,
        bytes: usize,
    },
    Launch,
    Record {
        event: Event,
        mark: u64,
    },
    Wait {
        event: Event,
        mark: u64,
    },
}

// SAFETY: only the owner of the device uses the pointers, by the promise of the caller that put the copies on a stream.
unsafe impl Send for Work {}

pub(super) struct Op {
    pub(super) work: Work,
    /// When the host put it there.
    pub(super) put_ns: u64,
}

/// The first operation of a stream, if it has begun.
pub(super) struct Begun {
    pub(super) ends_ns: u64,
    pub(super) lost: bool,
    /// Writes to a kernel's operands when it began.
    pub(super) writes: u64,
}

/// A stream.
pub(super) struct Queue {
    pub(super) ops: VecDeque<Op>,
    /// Of the launches among them.
    pub(super) calls: VecDeque<Call>,
    pub(super) capacity: usize,
    pub(super) begun: Option<Begun>,
    /// When the operation before the first one was done.
    pub free_ns: u64,
    /// Copies between two marks belong together; the number of these, and whether one of them was lost.
    pub(super) group: u64,
    pub(super) lost: bool,
}

/// A copy that others have overtaken.
pub(super) struct Astray {
    pub(super) work: Work,
    pub(super) ends_ns: u64,
    pub(super) group: u64,
    /// The mark behind it.
    pub(super) event: Option<(Event, u64)>,
}

/// An event's marks.
#[derive(Default)]
pub(super) struct EventState {
    /// Number of the last mark that was recorded; `done` is that of the last mark that a stream has come to.
    pub recorded: u64,
    pub done: u64,
    pub done_ns: u64,
}

impl Queue {
    pub fn new(capacity: usize) -> Queue {
        let ops = VecDeque::with_capacity(capacity);
        let calls = VecDeque::with_capacity(MAX_CALLS.min(capacity));
        Queue { ops, calls, capacity, begun: None, free_ns: 0, group: 0, lost: false }
    }
}
