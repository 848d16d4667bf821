//! When the operations on the streams of a virtual device happen.

use super::queue::{Astray, Begun, MAX_ASTRAY, Op, Work};
use super::rates::{Faults, HOST_CALL_NS, Rates};
use super::state::VirtualDevice;
use crate::clock;
use crate::device::{Call, Event, Fault, KernelWork, Stream};

/// A late copy takes up to this many times as long.
const LATEST: u64 = 64;

/// What is done next in virtual time.
enum Next {
    Stream(usize),
    Astray(usize),
}

impl VirtualDevice {
    pub(super) fn put(&mut self, stream: Stream, work: Work) {
        self.host_ns += HOST_CALL_NS;
        let s = stream as usize;
        while self.queues[s].ops.len() == self.queues[s].capacity {
            let done = self.step(u64::MAX);
            self.host_ns = self.host_ns.max(self.expect_step(done));
        }
        if self.fault.is_some() {
            return;
        }
        self.queues[s].ops.push_back(Op { work, put_ns: self.host_ns });
    }

    /// Puts a launch on a stream.
    pub(super) fn put_call(&mut self, stream: Stream, call: &Call) {
        self.put(stream, Work::Launch);
        if self.fault.is_none() {
            self.queues[stream as usize].calls.push_back(*call);
        }
    }

    pub(super) fn expect_step(&self, step: Option<u64>) -> u64 {
        step.expect("the streams hang: they wait for the event of a copy that was lost")
    }

    /// Does all work that is due by the host's clock.
    pub(super) fn catch_up(&mut self) {
        while self.step(self.host_ns).is_some() {}
    }

    pub(super) fn idle(&self, s: usize) -> bool {
        self.fault.is_some() || self.queues[s].ops.is_empty() && (s != Stream::Copy as usize || self.astray.is_empty())
    }

    /// Does the operation that comes first in virtual time, if it is due by `until`, and returns its time.
    pub(super) fn step(&mut self, until: u64) -> Option<u64> {
        if self.fault.is_some() {
            return None;
        }
        let streams = (0..2).filter_map(|s| Some((self.due(s)?, Next::Stream(s))));
        let astray = self.astray.iter().enumerate().map(|(i, a)| (a.ends_ns, Next::Astray(i)));
        let (now, next) = streams.chain(astray).min_by_key(|(at, _)| *at).filter(|(at, _)| *at <= until)?;
        match next {
            Next::Stream(s) if self.queues[s].begun.is_some() => self.finish(s, now),
            Next::Stream(s) => self.begin(s, now),
            Next::Astray(i) => {
                let astray = self.astray.swap_remove(i);
                self.copy(&astray.work, true);
                if let Some((event, mark)) = astray.event {
                    self.reach(event, mark, now);
                }
            }
        }
        Some(now)
    }

    /// When the first operation of a stream begins or, if it has begun, ends; `None` while it waits for an event that is not done.
    fn due(&self, s: usize) -> Option<u64> {
        let queue = &self.queues[s];
        if let Some(begun) = &queue.begun {
            return Some(begun.ends_ns);
        }
        let op = queue.ops.front()?;
        let ready = queue.free_ns.max(op.put_ns);
        match &op.work {
            Work::Wait { event, mark } => {
                let event = &self.events[event.0 as usize];
                (event.done >= *mark).then_some(ready.max(event.done_ns))
            }
            Work::CopyIn { .. } => Some(ready.max(self.link_free_ns[0])),
            Work::CopyOut { .. } => Some(ready.max(self.link_free_ns[1])),
            Work::Launch | Work::Record { .. } => Some(ready),
        }
    }

    fn begin(&mut self, s: usize, now: u64) {
        let work = self.queues[s].ops.front().expect("it is due").work;
        match work {
            Work::Wait { .. } => self.pop(s, now),
            Work::Record { event, mark } => {
                self.pop(s, now);
                let queue = &mut self.queues[s];
                let group = queue.group;
                queue.group += 1;
                if std::mem::take(&mut queue.lost) {
                    return;
                }
                let last = self.astray.iter_mut().filter(|a| s == Stream::Copy as usize && a.group == group);
                match last.max_by_key(|a| a.ends_ns) {
                    Some(last) => last.event = Some((event, mark)),
                    None => self.reach(event, mark, now),
                }
            }
            Work::Launch => {
                let call = self.queues[s].calls[0];
                let writes = self.writes(&call);
                let work = self.run(s, &call);
                if self.fails_at == Some(self.totals.launches + 1) {
                    self.fail();
                    return;
                }
                let ns = self.rates.kernel_ns(work);
                self.totals.launches += 1;
                self.totals.device_bytes += work.bytes;
                self.totals.busy_ns[s] += ns;
                self.queues[s].begun = Some(Begun { ends_ns: now + ns, lost: false, writes });
            }
            Work::CopyIn { bytes, before_us, .. } => self.begin_copy(s, now, work, 0, bytes, before_us),
            Work::CopyOut { bytes, .. } => self.begin_copy(s, now, work, 1, bytes, self.rates.copy_us),
        }
    }

    /// Fails for good: drops all operations that are on the streams.
    fn fail(&mut self) {
        let launch = self.totals.launches + 1;
        self.fault = Some(Fault(format!("virtual device: launch {launch} failed, as it was told to; run again")));
        self.queues.iter_mut().for_each(|queue| {
            queue.begun = None;
            queue.ops.clear();
            queue.calls.clear();
        });
        self.astray.clear();
    }

    fn begin_copy(&mut self, s: usize, now: u64, work: Work, way: usize, bytes: usize, before_us: f64) {
        let ns = Rates::ns(before_us, bytes as u64, self.rates.link_gb_s);
        self.totals.copies += 1;
        self.totals.link_bytes[way] += bytes as u64;
        if s == Stream::Copy as usize && way == 0 {
            self.totals.migrated_bytes += bytes as u64;
            self.totals.migrations += 1;
        }
        self.totals.busy_ns[s] += ns;
        self.link_free_ns[way] = now + ns;
        let Faults { late, lost, reorder, .. } = self.faults;
        let faulty = s == Stream::Copy as usize;
        let mut chance = |share: f64| faulty && share > 0.0 && self.prng.next_f64() < share;
        let (lost, late) = (chance(lost), chance(late));
        let overtaken = chance(if reorder { 0.5 } else { 0.0 }) && self.astray.len() < MAX_ASTRAY;
        // Half of the lost copies write nothing, the others their first half.
        let never = lost && chance(0.5);
        let delay = if late || overtaken { self.prng.below(if late { LATEST * ns } else { 8 * ns }) } else { 0 };
        if !never {
            self.copy(&work, false);
        }
        if overtaken && !lost {
            let group = self.queues[s].group;
            self.astray.push(Astray { work, ends_ns: now + ns + delay, group, event: None });
            self.pop(s, now + ns);
        } else {
            self.queues[s].begun = Some(Begun { ends_ns: now + ns + delay, lost, writes: 0 });
        }
    }

    fn finish(&mut self, s: usize, now: u64) {
        let begun = self.queues[s].begun.take().expect("it has begun");
        let work = self.queues[s].ops.front().expect("it has begun").work;
        self.pop(s, now);
        match work {
            Work::Launch => {
                let call = self.queues[s].calls.pop_front().expect("it has begun");
                if self.writes(&call) != begun.writes {
                    self.run(s, &call);
                }
                let start = clock::now();
                let VirtualDevice { scratch, buffers, .. } = self;
                call.store(&scratch[s], buffers);
                self.totals.pretended_ns += start.elapsed().as_nanos() as u64;
            }
            Work::CopyIn { .. } | Work::CopyOut { .. } if begun.lost => self.queues[s].lost = true,
            Work::CopyIn { .. } | Work::CopyOut { .. } => self.copy(&work, true),
            Work::Record { .. } | Work::Wait { .. } => unreachable!("they take no time"),
        }
    }

    fn pop(&mut self, s: usize, now: u64) {
        self.queues[s].ops.pop_front();
        self.queues[s].free_ns = now;
    }

    fn reach(&mut self, event: Event, mark: u64, now: u64) {
        let event = &mut self.events[event.0 as usize];
        event.done = event.done.max(mark);
        event.done_ns = now;
    }

    /// Does the first or the second half of a copy.
    fn copy(&mut self, work: &Work, second: bool) {
        let start = clock::now();
        // The halves are whole words: no link tears one.
        let middle = |bytes: usize| bytes / 2 / 4 * 4;
        let half = |bytes: usize| if second { middle(bytes)..bytes } else { 0..middle(bytes) };
        match *work {
            Work::CopyIn { from, to, at, bytes, .. } => {
                let part = half(bytes);
                let to = self.buffers[to.id as usize].as_mut().expect("freed only when all is done");
                to.writes += 1;
                let to = &mut bytemuck::cast_slice_mut::<f32, u8>(&mut to.data)[at..at + bytes][part.clone()];
                // SAFETY: readable for `bytes` until the copy is done, by the promise of `copy_in`'s caller.
                unsafe { from.add(part.start).copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
            }
            Work::CopyOut { from, at, to, bytes } => {
                let part = half(bytes);
                let from = self.buffers[from.id as usize].as_ref().expect("freed only when all is done");
                let from = &bytemuck::cast_slice::<f32, u8>(&from.data)[at..at + bytes][part.clone()];
                // SAFETY: writable for `bytes` until the copy is done, by the promise of `copy_out`'s caller.
                unsafe { to.add(part.start).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
            }
            Work::Launch | Work::Record { .. } | Work::Wait { .. } => unreachable!("no copies"),
        }
        self.totals.pretended_ns += start.elapsed().as_nanos() as u64;
    }

    /// How often a kernel's operands were written to so far.
    fn writes(&self, call: &Call) -> u64 {
        let mut sum = 0;
        call.operands(&mut |operand| {
            sum += self.buffers[operand.view.buffer.id as usize].as_ref().expect("checked when it was put").writes;
        });
        sum
    }

    /// Runs the kernel on what the memory holds now.
    fn run(&mut self, s: usize, call: &Call) -> KernelWork {
        let start = clock::now();
        let VirtualDevice { scratch, buffers, kernels, .. } = self;
        let work = call.run(buffers, kernels, &mut scratch[s]);
        self.totals.pretended_ns += start.elapsed().as_nanos() as u64;
        work
    }
}
