//! A device that keeps a [`Timeline`] of what another device does, by that device's own events.
//!
//! It puts a mark of its own around each span of the compute stream and before each group of moves; the mark after a group is the
//! group's own event. So tracing costs the streams these marks, and the host the time to put them there. Times on the device's clock
//! are converted to the host's by what must hold: nothing begins before it was put on its stream, and nothing ends after the host saw
//! that it was done. All marks of a pass narrow the difference of the clocks down to some microseconds, and the middle is taken.
//!
//! Sequences are not handed on: each kernel is put on the stream by itself, so that marks can stand between kernels.

use super::timeline::{Note, Read, Span, Stage, Timeline, Track};
use super::{Block, Buffer, Call, Device, Event, Fault, HostWork, Memory, MoveMethod, OutOfMemory, Stream, Totals};

/// Most spans of the compute stream in a pass, and most groups of moves on their way, that are timed: a layer has five such spans, and
/// no model has more than 200 layers.
const STRETCHES: usize = 1024;
const GROUPS: usize = 256;

/// Work on the compute stream, between two marks.
struct Stretch {
    part: Stage,
    layer: Option<u32>,
    marks: [Event; 2],
    put_ns: u64,
    /// When the host saw that it was over; the end of the pass, if it was not asked before.
    seen_ns: u64,
}

/// A group of moves, which has one event.
struct Group {
    begin: Event,
    /// The event that the neuron cache has recorded after the moves.
    end: Event,
    layer: u32,
    neurons: u32,
    bytes: u64,
    late: bool,
    /// How long it took, once that is known.
    ns: Option<u64>,
}

/// What is being put on a stream.
struct Open<T> {
    mark: Event,
    put_ns: u64,
    what: T,
}

/// A device that hands everything on to another one and keeps a [`Timeline`] of it.
pub struct Traced {
    inner: Box<dyn Device>,
    timeline: Timeline,
    /// The event from which the device's times in this pass are counted, and when it was put on the stream.
    zero: Event,
    zero_ns: u64,
    /// Events that are not in use.
    free: Vec<Event>,
    /// The part that work on the compute stream belongs to now.
    part: Option<Stage>,
    layer: Option<u32>,
    open: Option<Open<Stage>>,
    stretches: Vec<Stretch>,
    /// By event: how many spans lie before its mark on the compute stream.
    before: Vec<u32>,
    /// Layer and neurons of the moves that come next.
    announced: (u32, u32),
    opening: Option<Open<u64>>,
    groups: Vec<Group>,
    host_bytes: u64,
    /// Whether the first pass has begun: what is loaded before is not kept.
    begun: bool,
}

impl Traced {
    /// Wraps `inner`, whose trace begins empty.
    pub fn new(mut inner: Box<dyn Device>, mut timeline: Timeline) -> Traced {
        let zero = inner.timed_event();
        let free = (0..2 * STRETCHES + GROUPS).map(|_| inner.timed_event()).collect();
        (timeline.device, timeline.is_virtual) = (Some(inner.name()), !inner.is_real());
        Traced {
            inner,
            timeline,
            zero,
            zero_ns: 0,
            free,
            part: None,
            layer: None,
            open: None,
            stretches: Vec::with_capacity(STRETCHES),
            before: Vec::new(),
            announced: (0, 0),
            opening: None,
            groups: Vec::with_capacity(GROUPS),
            host_bytes: 0,
            begun: false,
        }
    }

    /// The time on the host's clock, ns.
    fn now(&self) -> u64 {
        if self.timeline.is_virtual { self.inner.totals().clock_ns } else { self.timeline.now() }
    }

    fn tell(&mut self, note: Note) {
        let now = self.now();
        let totals = self.inner.totals();
        let read = Read {
            host: self.host_bytes,
            device: totals.device_bytes,
            link: totals.link_bytes[0],
            computing_ns: totals.busy_ns[Stream::Compute as usize],
            working_ns: totals.host_ns,
        };
        self.timeline.note(note, now, read);
    }

    /// To be called before work is put on a stream: puts the mark there with which its span begins, unless one has begun.
    fn opens(&mut self, stream: Stream, bytes: u64) {
        match (stream, self.part) {
            (Stream::Compute, Some(part)) if self.open.is_none() && self.timeline.pass_began().is_some() => {
                self.open = self.mark(stream, part);
            }
            (Stream::Copy, _) if self.begun => {
                if self.opening.is_none() {
                    self.opening = self.mark(stream, 0);
                }
                if let Some(open) = &mut self.opening {
                    open.what += bytes;
                }
            }
            _ => {}
        }
    }

    fn mark<T>(&mut self, stream: Stream, what: T) -> Option<Open<T>> {
        let kept = match stream {
            Stream::Compute => self.stretches.len() < STRETCHES,
            Stream::Copy => self.groups.len() < GROUPS,
        };
        let mark = if kept { self.free.pop() } else { None };
        let Some(mark) = mark else {
            self.timeline.unknown += 1;
            return None;
        };
        self.inner.record(stream, mark);
        Some(Open { mark, put_ns: self.now(), what })
    }

    /// Ends the span that is open on the compute stream.
    fn closes(&mut self) {
        let Some(Open { mark, put_ns, what: part }) = self.open.take() else { return };
        let Some(end) = self.free.pop() else {
            self.free.push(mark);
            self.timeline.unknown += 1;
            return;
        };
        self.inner.record(Stream::Compute, end);
        let layer = self.layer;
        self.stretches.push(Stretch { part, layer, marks: [mark, end], put_ns, seen_ns: u64::MAX });
    }

    /// Notes that the host has seen the end of the first `count` spans.
    fn saw(&mut self, count: usize) {
        let now = self.now();
        for stretch in self.stretches[..count].iter_mut().rev().take_while(|s| s.seen_ns == u64::MAX) {
            stretch.seen_ns = now;
            if let (Stage::Exchange, Some(layer)) = (stretch.part, stretch.layer) {
                self.timeline.seen(layer, now);
            }
        }
    }

    /// Calls `wait`, and records its time as the host's waiting.
    fn waits(&mut self, wait: impl FnOnce(&mut dyn Device)) {
        self.closes();
        self.tell(Note::Host(Stage::Drive));
        wait(&mut *self.inner);
        self.tell(Note::Host(Stage::Wait));
    }

    /// Converts the times of the pass to the host's clock and records them. The compute stream has nothing left to do.
    fn collect(&mut self) {
        self.closes();
        let (end_ns, began) = (self.now(), self.timeline.pass_began());
        if let Some(began) = began.filter(|_| self.inner.fault().is_none()) {
            let zero = self.zero;
            // A pass that used only the host has waited for nothing.
            if !self.inner.is_done(zero) {
                self.inner.synchronize_event(zero);
            }
            let mut since = |event: Event| {
                // `elapsed_ns` counts forwards only, so events before `zero` are asked the other way round.
                let after = self.inner.elapsed_ns(zero, event) as i64;
                if after > 0 { after } else { -(self.inner.elapsed_ns(event, zero) as i64) }
            };
            let times: Vec<[i64; 2]> = self.stretches.iter().map(|s| s.marks.map(&mut since)).collect();
            let landed: Vec<Option<i64>> = self.groups.iter().map(|g| g.ns.map(|_| since(g.begin))).collect();
            let (mut least, mut most) = (self.zero_ns as i64, end_ns as i64);
            for (stretch, [begin, end]) in self.stretches.iter().zip(&times) {
                least = least.max(stretch.put_ns as i64 - begin);
                most = most.min(stretch.seen_ns.min(end_ns) as i64 - end);
            }
            // A virtual clock is the same on both sides.
            let zero_ns = if self.timeline.is_virtual { self.zero_ns as i64 } else { least + (most - least) / 2 };
            if !self.timeline.is_virtual {
                self.timeline.uncertain_ns = self.timeline.uncertain_ns.max((most - least).unsigned_abs() / 2);
            }
            let at = |since: i64| u64::try_from(zero_ns + since).unwrap_or(0);
            for (stretch, &[begin, end]) in self.stretches.iter().zip(&times) {
                // The stream was idle before the pass and is idle now, whatever rounding says.
                let [begin, end] = [begin, end].map(|ns| at(ns).clamp(began, end_ns));
                self.timeline.compute(stretch.part, stretch.layer, [begin, end]);
            }
            for (group, begin) in self.groups.iter().zip(landed) {
                let (Some(ns), Some(begin)) = (group.ns, begin) else { continue };
                let begin_ns = at(begin);
                self.timeline.moved(Span {
                    track: Track::Copy,
                    part: Stage::Move,
                    begin_ns,
                    end_ns: begin_ns + ns,
                    layer: Some(group.layer),
                    count: group.neurons,
                    value: group.bytes,
                    late: group.late,
                });
            }
        } else {
            self.timeline.unknown += self.stretches.len() as u64;
        }
        self.free.extend(self.stretches.drain(..).flat_map(|stretch| stretch.marks));
        let free = &mut self.free;
        self.groups.retain(|group| {
            let over = group.ns.is_some();
            if over {
                free.push(group.begin);
            }
            !over
        });
    }
}

impl Device for Traced {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn memory(&self) -> Memory {
        self.inner.memory()
    }

    fn totals(&self) -> Totals {
        self.inner.totals()
    }

    fn is_real(&self) -> bool {
        self.inner.is_real()
    }

    fn fault(&self) -> Option<&Fault> {
        self.inner.fault()
    }

    fn stage(&mut self, block_bytes: usize) {
        self.inner.stage(block_bytes);
    }

    unsafe fn pin(&mut self, from: *const u8, bytes: usize, written: bool) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.pin(from, bytes, written) }
    }

    fn prepare(&mut self, call: &Call) -> Result<(), OutOfMemory> {
        self.inner.prepare(call)
    }

    fn take(&mut self, bytes: u64, most: u64, reserved: bool) -> Result<Buffer, OutOfMemory> {
        self.inner.take(bytes, most, reserved)
    }

    fn resize(&mut self, buffer: Buffer, bytes: u64) -> Result<Buffer, OutOfMemory> {
        self.inner.resize(buffer, bytes)
    }

    fn free(&mut self, buffer: Buffer) {
        self.inner.free(buffer);
    }

    fn set_budget(&mut self, bytes: u64) -> Result<(), OutOfMemory> {
        self.inner.set_budget(bytes)
    }

    /// Times are asked of all: those of moves end their groups.
    fn event(&mut self) -> Event {
        self.inner.timed_event()
    }

    fn timed_event(&mut self) -> Event {
        self.inner.timed_event()
    }

    unsafe fn copy_in(&mut self, stream: Stream, from: *const u8, bytes: usize, to: Buffer, at: u64) {
        self.opens(stream, bytes as u64);
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy_in(stream, from, bytes, to, at) }
    }

    fn room_for_moves(&mut self, from: *const u8, bytes: usize, block_bytes: usize) -> usize {
        self.inner.room_for_moves(from, bytes, block_bytes)
    }

    unsafe fn copy_out(&mut self, stream: Stream, from: Buffer, at: u64, to: *mut u8, bytes: usize) {
        self.opens(stream, 0);
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy_out(stream, from, at, to, bytes) }
    }

    fn can_move(&mut self, by: MoveMethod) -> bool {
        self.inner.can_move(by)
    }

    unsafe fn move_blocks(&mut self, by: MoveMethod, blocks: &[Block], bytes: usize, to: Buffer) {
        self.opens(Stream::Copy, (blocks.len() * bytes) as u64);
        // SAFETY: the caller's promise.
        unsafe { self.inner.move_blocks(by, blocks, bytes, to) }
    }

    fn launch(&mut self, stream: Stream, call: &Call) {
        self.opens(stream, 0);
        self.inner.launch(stream, call);
    }

    fn record(&mut self, stream: Stream, event: Event) {
        if stream == Stream::Compute {
            // The span ends before the mark, so that a wait for the event proves that the span is over.
            self.closes();
            let at = event.0 as usize;
            if self.before.len() <= at {
                self.before.resize(at + 1, 0);
            }
            self.before[at] = self.stretches.len() as u32;
        }
        self.inner.record(stream, event);
        if stream == Stream::Copy
            && let Some(Open { mark, what, .. }) = self.opening.take()
        {
            // Recorded again, an event says nothing of what was lost before.
            if let Some(lost) = self.groups.iter().position(|g| g.end == event && g.ns.is_none()) {
                self.free.push(self.groups.swap_remove(lost).begin);
            }
            let (layer, neurons) = std::mem::take(&mut self.announced);
            self.groups.push(Group { begin: mark, end: event, layer, neurons, bytes: what, late: false, ns: None });
        }
    }

    fn wait(&mut self, stream: Stream, event: Event) {
        self.inner.wait(stream, event);
    }

    fn worked(&mut self, work: HostWork) {
        self.inner.worked(work);
        if work.stage == Stage::Ffn {
            self.host_bytes += work.bytes;
        }
        self.tell(Note::Host(work.stage));
    }

    fn has_read(&mut self, bytes: u64) {
        self.inner.has_read(bytes);
    }

    fn is_done(&mut self, event: Event) -> bool {
        let done = self.inner.is_done(event);
        if done && let Some(group) = self.groups.iter_mut().find(|g| g.end == event && g.ns.is_none()) {
            // Now, because the cache may record the event again.
            group.ns = Some(self.inner.elapsed_ns(group.begin, event));
        }
        done
    }

    fn elapsed_ns(&mut self, from: Event, to: Event) -> u64 {
        self.inner.elapsed_ns(from, to)
    }

    fn synchronize(&mut self, stream: Stream) {
        self.waits(|inner| inner.synchronize(stream));
        if stream == Stream::Compute {
            self.saw(self.stretches.len());
        }
    }

    fn synchronize_event(&mut self, event: Event) {
        self.waits(|inner| inner.synchronize_event(event));
        let before = self.before.get(event.0 as usize).copied().unwrap_or(0) as usize;
        self.saw(before.min(self.stretches.len()));
    }

    fn note(&mut self, note: Note) {
        match note {
            Note::Pass { .. } => {
                self.begun = true;
                self.tell(note);
                self.inner.record(Stream::Compute, self.zero);
                (self.zero_ns, self.layer, self.part) = (self.now(), None, None);
                self.before.fill(0);
            }
            Note::Layer(layer) => {
                self.closes();
                self.layer = Some(layer as u32);
                self.tell(note);
            }
            Note::Compute(part) => {
                if self.part != part {
                    self.closes();
                    self.part = part;
                }
                if part == Some(Stage::Head) {
                    self.layer = None;
                    self.tell(note);
                }
            }
            Note::Moves { .. } if !self.begun => {}
            Note::Moves { layer, neurons } => {
                self.announced = (layer as u32, neurons as u32);
                self.tell(note);
            }
            Note::Late(event) => {
                self.groups.iter_mut().filter(|g| g.end == event && g.ns.is_none()).for_each(|g| g.late = true);
            }
            Note::Host(_) => self.tell(note),
            Note::End { .. } => {
                self.collect();
                self.tell(note);
            }
        }
    }

    fn timeline(&mut self) -> Option<&mut Timeline> {
        Some(&mut self.timeline)
    }
}
