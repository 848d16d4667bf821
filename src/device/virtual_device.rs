//! A device that is not there: a second memory with a hard budget, two streams, events and a link, on a virtual clock.
//!
//! Its results are real, by the CPU's kernels. Its times come from [`Rates`] and are never a measurement.
//!
//! Nothing runs when it is put on a stream. Work is done in the order of virtual time, once the host's clock has come to it
//! or waits for it; a copy writes its first half when it begins and the rest when it ends, and a kernel looks at its operands when
//! it begins and again when it ends, if they were written to meanwhile. So whoever reads too early, frees too early or writes
//! below a kernel gets the wrong bytes here, as on a device that really runs beside the host.

use super::host_kernels::{self, Room};
use super::{Block, Buffer, Call, Device, Event, Fault, Memory, MoveMethod, OutOfMemory, Stream, Totals, run};
use crate::cpu::Kernels;
use crate::prng::Prng;
use memmap2::{MmapMut, UncheckedAdvice};
use std::collections::VecDeque;

/// Places in the compute and in the copy stream; when one is full, the host waits until its oldest work is done. The first is
/// some layers' work, the second more than the neuron cache lets be on its way, three operations for each move.
pub const QUEUES: [usize; 2] = [256, 3 * 4096 + 64];
/// What a call costs the host, ns: of the order of a driver's. It is what lets virtual time pass between two waits.
pub const HOST_CALL_NS: u64 = 200;
/// Copies that other copies have overtaken, at most; with more, they stay in order.
const MAX_ASTRAY: usize = 64;
/// A late copy takes up to this many times as long.
const LATEST: u64 = 64;

/// What the virtual device pretends to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Its memory, read by a kernel, and the link to it in each direction, GB/s.
    pub device_gb_s: f64,
    pub link_gb_s: f64,
    /// The host's memory, read by all its cores, GB/s.
    pub host_gb_s: f64,
    /// Before a kernel and before a copy, and what a wait of the host takes, us.
    pub call_us: f64,
    pub copy_us: f64,
    pub sync_us: f64,
}

impl Rates {
    fn check(self) -> Rates {
        assert!(
            self.device_gb_s > 0.0 && self.link_gb_s > 0.0 && self.host_gb_s > 0.0,
            "rates are above zero: {self:?}"
        );
        self
    }

    /// GB/s are bytes per nanosecond.
    fn ns(before_us: f64, bytes: u64, gb_s: f64) -> u64 {
        (before_us * 1e3 + bytes as f64 / gb_s) as u64
    }
}

/// What goes wrong with copies on the copy stream.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Share of copies that take up to 64 times as long.
    pub late: f64,
    /// Share of copies that never arrive, or only their first half; the event behind them is never done.
    pub lost: f64,
    /// Copies are overtaken by those behind them.
    pub reorder: bool,
    pub seed: u64,
}

#[derive(Clone, Copy)]
enum Work {
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
    Launch(Call),
    Record {
        event: Event,
        mark: u64,
    },
    Wait {
        event: Event,
        mark: u64,
    },
}

// SAFETY: the pointers are used by whoever has the device, by the promise of whoever put the copies on a stream.
unsafe impl Send for Work {}

struct Op {
    work: Work,
    /// When the host put it there.
    put_ns: u64,
}

/// The first operation of a stream, if it has begun.
struct Begun {
    ends_ns: u64,
    lost: bool,
    /// Writes to a kernel's operands when it began.
    writes: u64,
}

struct Queue {
    ops: VecDeque<Op>,
    capacity: usize,
    begun: Option<Begun>,
    /// When the operation before the first one was done.
    free_ns: u64,
    /// Copies between two marks belong together; the number of these, and whether one of them was lost.
    group: u64,
    lost: bool,
}

/// A copy that others have overtaken.
struct Astray {
    work: Work,
    ends_ns: u64,
    group: u64,
    /// The mark behind it.
    event: Option<(Event, u64)>,
}

#[derive(Default)]
struct EventState {
    /// The last mark, and the last that a stream has come to.
    recorded: u64,
    done: u64,
    done_ns: u64,
}

struct Bytes {
    /// Empty if only reserved.
    data: Region,
    reserved: bool,
    writes: u64,
}

/// Of the host's memory; where pages are larger, giving back is refused and bytes are zeroed instead.
const PAGE: usize = 4096;

/// Zeroed memory of its own pages, which go back to the system when it shrinks.
struct Region {
    map: MmapMut,
    /// Of f32.
    len: usize,
}

impl Region {
    /// Addresses for `most` bytes; pages come when they are touched.
    fn new(bytes: u64, most: u64) -> Region {
        let map = MmapMut::map_anon((most as usize).max(1)).expect("addresses for the device's memory");
        Region { map, len: bytes.div_ceil(4) as usize }
    }

    fn resize(&mut self, bytes: u64) {
        let len = bytes.div_ceil(4) as usize;
        if len < self.len {
            // What lies behind the end on its last page is zeroed, whole pages are given back, and read as zeros again.
            let from = (len * 4).next_multiple_of(PAGE).min(self.len * 4);
            self.map[len * 4..from].fill(0);
            if from < self.len * 4 {
                // SAFETY: private anonymous pages that nobody else has.
                let dropped =
                    unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, from, self.len * 4 - from) };
                if dropped.is_err() {
                    self.map[from..self.len * 4].fill(0);
                }
            }
        }
        self.len = len;
    }
}

impl std::ops::Deref for Region {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.map[..self.map.len() / 4 * 4])[..self.len]
    }
}

impl std::ops::DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [f32] {
        let whole = self.map.len() / 4 * 4;
        &mut bytemuck::cast_slice_mut(&mut self.map[..whole])[..self.len]
    }
}

enum Who {
    Stream(usize),
    Astray(usize),
}

pub struct VirtualDevice {
    rates: Rates,
    faults: Faults,
    prng: Prng,
    kernels: Kernels,
    memory: Memory,
    /// By id, which is never given twice; `None` once freed.
    buffers: Vec<Option<Bytes>>,
    events: Vec<EventState>,
    queues: [Queue; 2],
    astray: Vec<Astray>,
    rooms: [Room; 2],
    /// When the link is free, in and out.
    link_free_ns: [u64; 2],
    host_ns: u64,
    totals: Totals,
    /// The launch that fails for good, counted from one, and what came of it.
    fails_at: Option<u64>,
    fault: Option<Fault>,
}

impl VirtualDevice {
    /// A device with `budget` bytes.
    pub fn new(budget: u64, rates: Rates) -> VirtualDevice {
        VirtualDevice {
            rates: rates.check(),
            faults: Faults::default(),
            prng: Prng::new(0),
            kernels: Kernels::best(),
            memory: Memory { budget, ..Memory::default() },
            buffers: Vec::new(),
            events: Vec::new(),
            queues: QUEUES.map(Queue::new),
            astray: Vec::with_capacity(MAX_ASTRAY),
            rooms: Default::default(),
            link_free_ns: [0; 2],
            host_ns: 0,
            totals: Totals::default(),
            fails_at: None,
            fault: None,
        }
    }

    pub fn with_faults(mut self, faults: Faults) -> VirtualDevice {
        self.faults = faults;
        self.prng = Prng::new(faults.seed);
        self
    }

    /// Its launch of this number, counted from one, ends all its work, as a driver's sticky error does.
    pub fn failing_at(mut self, launch: u64) -> VirtualDevice {
        self.fails_at = Some(launch);
        self
    }

    /// Other lengths of the compute and the copy stream than [`QUEUES`].
    pub fn with_queues(mut self, capacities: [usize; 2]) -> VirtualDevice {
        assert!(capacities.iter().all(|&c| c > 0));
        self.queues = capacities.map(Queue::new);
        self
    }

    /// From now on; what has begun keeps its time.
    pub fn set_rates(&mut self, rates: Rates) {
        self.rates = rates.check();
    }

    /// The host's virtual time.
    pub fn clock_ns(&self) -> u64 {
        self.host_ns
    }

    /// Lets virtual time pass: the host was busy with something else.
    pub fn advance(&mut self, ns: u64) {
        self.host_ns += ns;
    }

    fn put(&mut self, stream: Stream, work: Work) {
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

    fn expect_step(&self, step: Option<u64>) -> u64 {
        step.expect("the streams hang: they wait for the event of a copy that was lost")
    }

    /// Does all that is due.
    fn catch_up(&mut self) {
        while self.step(self.host_ns).is_some() {}
    }

    fn idle(&self, s: usize) -> bool {
        self.fault.is_some() || self.queues[s].ops.is_empty() && (s != Stream::Copy as usize || self.astray.is_empty())
    }

    /// Does what comes first in virtual time, if it is due by `until`; returns when that was.
    fn step(&mut self, until: u64) -> Option<u64> {
        if self.fault.is_some() {
            return None;
        }
        let streams = (0..2).filter_map(|s| Some((self.due(s)?, Who::Stream(s))));
        let astray = self.astray.iter().enumerate().map(|(i, a)| (a.ends_ns, Who::Astray(i)));
        let (now, who) = streams.chain(astray).min_by_key(|(at, _)| *at).filter(|(at, _)| *at <= until)?;
        match who {
            Who::Stream(s) if self.queues[s].begun.is_some() => self.finish(s, now),
            Who::Stream(s) => self.begin(s, now),
            Who::Astray(i) => {
                let astray = self.astray.swap_remove(i);
                self.copy(&astray.work, true);
                if let Some((event, mark)) = astray.event {
                    self.reach(event, mark, now);
                }
            }
        }
        Some(now)
    }

    /// When the first operation of a stream begins or, if it has begun, ends; never while it waits for what is not done.
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
            Work::Launch(_) | Work::Record { .. } => Some(ready),
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
            Work::Launch(call) => {
                let writes = self.writes(&call);
                let bytes = self.run(s, &call);
                if self.fails_at == Some(self.totals.launches + 1) {
                    self.fail();
                    return;
                }
                let ns = Rates::ns(self.rates.call_us, bytes, self.rates.device_gb_s);
                self.totals.launches += 1;
                self.totals.device_bytes += bytes;
                self.totals.busy_ns[s] += ns;
                self.queues[s].begun = Some(Begun { ends_ns: now + ns, lost: false, writes });
            }
            Work::CopyIn { bytes, before_us, .. } => self.begin_copy(s, now, work, 0, bytes, before_us),
            Work::CopyOut { bytes, .. } => self.begin_copy(s, now, work, 1, bytes, self.rates.copy_us),
        }
    }

    /// Nothing that was put on a stream happens any more.
    fn fail(&mut self) {
        let launch = self.totals.launches + 1;
        self.fault = Some(Fault(format!("virtual device: launch {launch} failed, as it was told to; run again")));
        self.queues.iter_mut().for_each(|queue| (queue.begun, queue.ops) = (None, VecDeque::new()));
        self.astray.clear();
    }

    fn begin_copy(&mut self, s: usize, now: u64, work: Work, way: usize, bytes: usize, before_us: f64) {
        let ns = Rates::ns(before_us, bytes as u64, self.rates.link_gb_s);
        self.totals.copies += 1;
        self.totals.link_bytes[way] += bytes as u64;
        if s == Stream::Copy as usize && way == 0 {
            self.totals.migrated_bytes += bytes as u64;
        }
        self.totals.busy_ns[s] += ns;
        self.link_free_ns[way] = now + ns;
        let Faults { late, lost, reorder, .. } = self.faults;
        let faulty = s == Stream::Copy as usize;
        let mut chance = |share: f64| faulty && share > 0.0 && self.prng.next_f64() < share;
        let (lost, late) = (chance(lost), chance(late));
        let overtaken = chance(if reorder { 0.5 } else { 0.0 }) && self.astray.len() < MAX_ASTRAY;
        // What is lost has not even begun, half of the time.
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
            Work::Launch(call) => {
                if self.writes(&call) != begun.writes {
                    self.run(s, &call);
                }
                let VirtualDevice { rooms, buffers, .. } = self;
                host_kernels::store(&call, &rooms[s], buffers);
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

    /// The first or the second half of a copy.
    fn copy(&mut self, work: &Work, second: bool) {
        // No link tears a word.
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
            Work::Launch(_) | Work::Record { .. } | Work::Wait { .. } => unreachable!("no copies"),
        }
    }

    /// Writes to a kernel's operands so far.
    fn writes(&self, call: &Call) -> u64 {
        let mut sum = 0;
        call.operands(&mut |view, _, _| {
            sum += self.buffers[view.buffer.id as usize].as_ref().expect("checked when it was put").writes;
        });
        sum
    }

    /// The kernel, on what the memory holds now; bytes read.
    fn run(&mut self, s: usize, call: &Call) -> u64 {
        let VirtualDevice { rooms, buffers, kernels, .. } = self;
        host_kernels::run(call, buffers, kernels, &mut rooms[s])
    }

    /// # Panics
    /// If there is no such buffer, or the range is not in it.
    fn check(&self, buffer: Buffer, at: u64, bytes: u64) {
        let there = self.buffers.get(buffer.id as usize).and_then(Option::as_ref);
        let there = there.unwrap_or_else(|| panic!("buffer {} was freed, or never was", buffer.id));
        assert!(!there.reserved, "buffer {} is reserved: it is not the device's to copy", buffer.id);
        let end = at.checked_add(bytes).filter(|&end| end <= buffer.bytes);
        assert!(end.is_some(), "{bytes} bytes at {at} are not in buffer {} of {}", buffer.id, buffer.bytes);
    }
}

impl host_kernels::Memory for Vec<Option<Bytes>> {
    fn of(&self, buffer: Buffer) -> &[f32] {
        &self[buffer.id as usize].as_ref().expect("checked when it was put").data
    }

    fn of_mut(&mut self, buffer: Buffer) -> &mut [f32] {
        let bytes = self[buffer.id as usize].as_mut().expect("checked when it was put");
        bytes.writes += 1;
        &mut bytes.data
    }
}

impl Queue {
    fn new(capacity: usize) -> Queue {
        let ops = VecDeque::with_capacity(capacity);
        Queue { ops, capacity, begun: None, free_ns: 0, group: 0, lost: false }
    }
}

impl Device for VirtualDevice {
    fn name(&self) -> String {
        "virtual device".into()
    }

    fn memory(&self) -> Memory {
        self.memory
    }

    fn totals(&self) -> Totals {
        Totals { clock_ns: self.host_ns, ..self.totals }
    }

    fn is_real(&self) -> bool {
        false
    }

    fn fault(&self) -> Option<&Fault> {
        self.fault.as_ref()
    }

    fn take(&mut self, bytes: u64, most: u64, reserved: bool) -> Result<Buffer, OutOfMemory> {
        self.host_ns += HOST_CALL_NS;
        let left = self.memory.budget.saturating_sub(self.memory.used);
        if bytes > left {
            return Err(OutOfMemory { asked: bytes, left });
        }
        self.memory.used += bytes;
        self.memory.peak = self.memory.peak.max(self.memory.used);
        let [here, most] = if reserved { [0, 0] } else { [bytes, most.next_multiple_of(4)] };
        let data = Region::new(here, most);
        self.buffers.push(Some(Bytes { data, reserved, writes: 0 }));
        Ok(Buffer { id: (self.buffers.len() - 1) as u32, bytes })
    }

    fn resize(&mut self, buffer: Buffer, bytes: u64) -> Result<Buffer, OutOfMemory> {
        let left = self.memory.budget.saturating_sub(self.memory.used);
        if bytes > buffer.bytes && bytes - buffer.bytes > left {
            return Err(OutOfMemory { asked: bytes - buffer.bytes, left });
        }
        Stream::ALL.into_iter().for_each(|s| self.synchronize(s));
        self.check(buffer, 0, buffer.bytes);
        let region = &mut self.buffers[buffer.id as usize].as_mut().expect("checked above").data;
        assert!(bytes <= region.map.len() as u64, "buffer {} was not made for {bytes} bytes", buffer.id);
        region.resize(bytes);
        self.memory.used = self.memory.used - buffer.bytes + bytes;
        self.memory.peak = self.memory.peak.max(self.memory.used);
        Ok(Buffer { bytes, ..buffer })
    }

    fn set_budget(&mut self, bytes: u64) -> Result<(), OutOfMemory> {
        if self.memory.used > bytes {
            return Err(OutOfMemory { asked: self.memory.used, left: bytes });
        }
        self.memory = Memory { budget: bytes, peak: self.memory.used, ..self.memory };
        Ok(())
    }

    fn free(&mut self, buffer: Buffer) {
        Stream::ALL.into_iter().for_each(|s| self.synchronize(s));
        let there = self.buffers.get_mut(buffer.id as usize).and_then(Option::take);
        assert!(there.is_some(), "buffer {} was freed before, or never was", buffer.id);
        self.memory.used -= buffer.bytes;
    }

    fn event(&mut self) -> Event {
        self.events.push(EventState::default());
        Event((self.events.len() - 1) as u32)
    }

    unsafe fn copy_in(&mut self, stream: Stream, from: *const u8, bytes: usize, to: Buffer, at: u64) {
        self.check(to, at, bytes as u64);
        let before_us = self.rates.copy_us;
        self.put(stream, Work::CopyIn { from, to, at: at as usize, bytes, before_us });
    }

    fn can_move(&mut self, _by: MoveMethod) -> bool {
        true
    }

    /// A gather is one call whose blocks come in one by one: each can be torn, late and overtaken as a copy can.
    unsafe fn move_blocks(&mut self, by: MoveMethod, blocks: &[Block], bytes: usize, to: Buffer) {
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            let n = if by == MoveMethod::Batched { run(rest, bytes) } else { 1 };
            let at = u64::from(first.slot) * bytes as u64;
            self.check(to, at, (n * bytes) as u64);
            let before_us = match by {
                MoveMethod::Gather if rest.len() == blocks.len() => self.rates.call_us,
                MoveMethod::Gather => 0.0,
                MoveMethod::Single | MoveMethod::Batched => self.rates.copy_us,
            };
            let copy = Work::CopyIn { from: first.from, to, at: at as usize, bytes: n * bytes, before_us };
            self.put(Stream::Copy, copy);
            rest = &rest[n..];
        }
    }

    unsafe fn copy_out(&mut self, stream: Stream, from: Buffer, at: u64, to: *mut u8, bytes: usize) {
        self.check(from, at, bytes as u64);
        self.put(stream, Work::CopyOut { from, at: at as usize, to, bytes });
    }

    fn launch(&mut self, stream: Stream, call: &Call) {
        call.operands(&mut |view, bytes, _| self.check(view.buffer, view.at, bytes));
        self.put(stream, Work::Launch(*call));
    }

    fn record(&mut self, stream: Stream, event: Event) {
        let state = &mut self.events[event.0 as usize];
        state.recorded += 1;
        let mark = state.recorded;
        self.put(stream, Work::Record { event, mark });
    }

    fn wait(&mut self, stream: Stream, event: Event) {
        let mark = self.events[event.0 as usize].recorded;
        self.put(stream, Work::Wait { event, mark });
    }

    fn worked(&mut self, host_bytes: u64, _host_ns: u64, device_bytes: u64) {
        let host = Rates::ns(0.0, host_bytes, self.rates.host_gb_s);
        self.totals.host_ns += host;
        self.host_ns += host + Rates::ns(0.0, device_bytes, self.rates.device_gb_s);
    }

    fn is_done(&mut self, event: Event) -> bool {
        self.host_ns += HOST_CALL_NS;
        self.catch_up();
        let event = &self.events[event.0 as usize];
        event.done == event.recorded
    }

    fn elapsed_ns(&mut self, from: Event, to: Event) -> u64 {
        self.events[to.0 as usize].done_ns.saturating_sub(self.events[from.0 as usize].done_ns)
    }

    fn synchronize_event(&mut self, event: Event) {
        let began = self.host_ns;
        self.catch_up();
        while self.events[event.0 as usize].done < self.events[event.0 as usize].recorded
            && let Some(at) = self.step(u64::MAX)
        {
            self.host_ns = self.host_ns.max(at);
        }
        self.host_ns += Rates::ns(self.rates.sync_us, 0, 1.0);
        self.totals.waited_ns += self.host_ns - began;
    }

    fn synchronize(&mut self, stream: Stream) {
        let (s, began) = (stream as usize, self.host_ns);
        while !self.idle(s) {
            let done = self.step(u64::MAX);
            self.host_ns = self.host_ns.max(self.expect_step(done));
        }
        // Work may have ended behind the host's back.
        self.host_ns = self.host_ns.max(self.queues[s].free_ns) + Rates::ns(self.rates.sync_us, 0, 1.0);
        self.totals.waited_ns += self.host_ns - began;
    }
}
