//! The virtual card's state, and the threads that are its streams.

use super::{Card, HANG, append};
use crate::{Kernel, Order};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};

pub type Code = u32;

/// Work of a stream.
#[derive(Clone)]
pub enum Op {
    Copy {
        from: u64,
        to: u64,
        bytes: usize,
        link: bool,
    },
    Fill {
        at: u64,
        bytes: usize,
        value: u8,
    },
    Launch {
        kernel: Kernel,
        name: String,
        grid: [u32; 3],
        block: [u32; 3],
        shared: usize,
        words: Vec<u64>,
    },
    Record {
        event: u64,
        mark: u64,
    },
    Wait {
        event: u64,
        mark: u64,
    },
    /// What an operation becomes that is to fail when it runs.
    Fail(Code),
}

impl Op {
    fn name(&self) -> &str {
        match self {
            Op::Copy { link: true, .. } => "copy",
            Op::Copy { .. } => "move",
            Op::Fill { .. } => "fill",
            Op::Launch { name, .. } => name,
            Op::Record { .. } | Op::Wait { .. } | Op::Fail(_) => "mark",
        }
    }
}

#[derive(Default)]
pub struct Stream {
    ops: VecDeque<Op>,
    /// Operations that were put there, that are done, and, on a lazy card, that somebody has asked for.
    put: u64,
    done: u64,
    wanted: u64,
    closing: bool,
    /// Of the least priority.
    background: bool,
}

pub struct Event {
    pub times: bool,
    /// The last mark, counted from one, and the last that a stream has come to.
    pub recorded: u64,
    pub done: u64,
    /// Of each mark, its stream and its place there.
    places: Vec<(u64, u64)>,
    pub when: Option<Instant>,
}

impl Event {
    pub fn new(times: bool) -> Event {
        Event { times, recorded: 0, done: 0, places: Vec::new(), when: None }
    }
}

/// Memory of a reservation of addresses.
pub struct Reservation {
    pub bytes: u64,
    /// Mapped ranges, by their first address: bytes and whether they may be used.
    pub mapped: BTreeMap<u64, (u64, bool)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Kernel,
    /// Copies to the card, and from it.
    In,
    Out,
}

/// A node of a graph, which runs after those that it names.
#[derive(Clone)]
pub struct Node {
    pub id: u64,
    pub kind: Kind,
    pub op: Op,
    pub after: Vec<u64>,
}

/// Nodes in the order in which they were made.
pub struct Graph {
    pub nodes: Vec<Node>,
}

/// What was made of a graph, and changed since.
pub struct Exec {
    pub graph: u64,
    pub nodes: Vec<Node>,
}

/// An image that is loaded.
pub struct Module {
    pub text: String,
    /// PTX, and not the machine code of the stand-in's own compiler.
    pub ptx: bool,
}

pub struct World {
    pub card: Card,
    /// Plain allocations, by address.
    pub memory: BTreeMap<u64, u64>,
    pub reservations: BTreeMap<u64, Reservation>,
    /// Chunks: bytes, whether the handle is held, and how often they are mapped.
    pub chunks: HashMap<u64, (u64, bool, u32)>,
    /// The chunk that lies at an address.
    pub mapped_by: HashMap<u64, u64>,
    pub used: u64,
    /// Pinned host memory, by address: bytes, and whether it is ours.
    pub pinned: BTreeMap<u64, (u64, bool)>,
    pub streams: HashMap<u64, Stream>,
    pub events: HashMap<u64, Event>,
    pub modules: HashMap<u64, Module>,
    pub functions: Vec<(Kernel, String)>,
    pub graphs: HashMap<u64, Graph>,
    pub execs: HashMap<u64, Exec>,
    pub contexts: u32,
    /// Copies of background streams begin, and do not end.
    pub held: bool,
    /// The error that nothing recovers from.
    pub sticky: Code,
    /// Copies that waited because their host memory was not pinned.
    pub pageable: u64,
    calls: HashMap<&'static str, u64>,
    handles: u64,
    began: Instant,
}

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(|| {
    Mutex::new(World {
        card: Card::from_environment(),
        memory: BTreeMap::new(),
        reservations: BTreeMap::new(),
        chunks: HashMap::new(),
        mapped_by: HashMap::new(),
        used: 0,
        pinned: BTreeMap::new(),
        streams: HashMap::new(),
        events: HashMap::new(),
        modules: HashMap::new(),
        functions: Vec::new(),
        graphs: HashMap::new(),
        execs: HashMap::new(),
        contexts: 0,
        held: false,
        sticky: 0,
        pageable: 0,
        calls: HashMap::new(),
        handles: 0x1000,
        began: Instant::now(),
    })
});
static CHANGED: Condvar = Condvar::new();

pub fn world() -> MutexGuard<'static, World> {
    WORLD.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

pub fn changed() {
    CHANGED.notify_all();
}

/// Waits until something has changed.
pub fn wait(world: MutexGuard<'static, World>) -> MutexGuard<'static, World> {
    CHANGED.wait(world).unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl World {
    pub fn handle(&mut self) -> u64 {
        self.handles += 16;
        self.handles
    }

    /// From now on these calls fail, counted anew, and nothing has failed: after a fault, as in another process.
    pub fn set_failures(&mut self, failures: Vec<super::Failure>) {
        if self.sticky != 0 {
            self.pinned.retain(|_, (_, ours)| *ours);
            for queue in self.streams.values_mut() {
                queue.put -= queue.ops.len() as u64;
                queue.ops.clear();
            }
        }
        self.card.failures = failures;
        self.calls.clear();
        self.sticky = 0;
    }

    pub fn calls(&self, function: &str) -> u64 {
        self.calls.get(function).copied().unwrap_or_default()
    }

    /// Counts a call; what it is to fail with, if it is.
    pub fn called(&mut self, function: &'static str) -> Option<Code> {
        let calls = self.calls.entry(function).or_default();
        *calls += 1;
        let now = *calls;
        self.card.failures.iter().find(|f| f.function == function && f.call == now).map(|f| f.code)
    }

    /// Whether these bytes are the card's and may be used.
    pub fn is_device(&self, at: u64, bytes: u64) -> bool {
        let within = |(first, length): (u64, u64)| at >= first && at + bytes <= first + length;
        if self.memory.range(..=at).next_back().is_some_and(|(&first, &length)| within((first, length))) {
            return true;
        }
        let Some((_, reservation)) = self.reservations.range(..=at).next_back() else { return false };
        let mut at = at;
        let end = at + bytes;
        while at < end {
            match reservation.mapped.range(..=at).next_back() {
                Some((&first, &(length, true))) if at < first + length => at = first + length,
                _ => return false,
            }
        }
        true
    }

    /// Of host memory: whether it lies in one pinned range, in none, or across an edge, which no driver takes.
    pub fn is_pinned(&self, at: u64, bytes: u64) -> Result<bool, Code> {
        let touched = |(first, (length, _)): (&u64, &(u64, bool))| *first < at + bytes && at < first + length;
        match self.pinned.iter().find(|range| touched(*range)) {
            None => Ok(false),
            Some((first, (length, _))) if at >= *first && at + bytes <= first + length => Ok(true),
            Some(_) => Err(1),
        }
    }

    pub fn put(&mut self, stream: u64, op: Op) -> Result<(), Code> {
        let queue = self.streams.get_mut(&stream).ok_or(400u32)?;
        queue.ops.push_back(op);
        queue.put += 1;
        changed();
        Ok(())
    }

    pub fn record(&mut self, event: u64, stream: u64) -> Result<(), Code> {
        let position = self.streams.get(&stream).ok_or(400u32)?.put + 1;
        let state = self.events.get_mut(&event).ok_or(400u32)?;
        state.recorded += 1;
        state.places.push((stream, position));
        let mark = state.recorded;
        self.put(stream, Op::Record { event, mark })
    }

    /// Asks a lazy card for all that is on a stream, or before an event's mark.
    pub fn want(&mut self, stream: u64) {
        if let Some(queue) = self.streams.get_mut(&stream) {
            queue.wanted = queue.put;
            changed();
        }
    }

    pub fn want_event(&mut self, event: u64) {
        if let Some(state) = self.events.get(&event) {
            self.want_mark(event, state.recorded);
        }
    }

    fn want_mark(&mut self, event: u64, mark: u64) {
        let place = self.events.get(&event).and_then(|state| state.places.get((mark as usize).checked_sub(1)?));
        let Some(&(stream, position)) = place else { return };
        if let Some(queue) = self.streams.get_mut(&stream) {
            queue.wanted = queue.wanted.max(position);
            changed();
        }
    }

    pub fn is_idle(&self, stream: u64) -> Option<bool> {
        self.streams.get(&stream).map(|queue| queue.done == queue.put)
    }

    /// Whether the first operation of a stream may begin.
    fn is_due(&mut self, id: u64) -> bool {
        let sticky = self.sticky != 0;
        let Some(queue) = self.streams.get(&id) else { return false };
        if self.card.lazy && queue.done >= queue.wanted && !queue.closing {
            return false;
        }
        match queue.ops.front() {
            None => false,
            Some(&Op::Wait { event, mark }) if !sticky => {
                let there = self.events.get(&event).is_none_or(|state| state.done >= mark);
                if !there {
                    self.want_mark(event, mark);
                }
                there
            }
            Some(_) => true,
        }
    }

    pub fn close(&mut self, stream: u64) {
        if let Some(queue) = self.streams.get_mut(&stream) {
            queue.closing = true;
            changed();
        }
    }

    pub fn open_stream(&mut self, background: bool) -> u64 {
        let id = self.handle();
        self.streams.insert(id, Stream { background, ..Stream::default() });
        std::thread::Builder::new().name(format!("stream {id}")).spawn(move || run(id)).expect("a thread");
        id
    }

    fn line(&self, stream: u64, name: &str, begin: Instant) {
        if let Some(path) = &self.card.timeline {
            let ns = |at: Instant| at.duration_since(self.began).as_nanos();
            append(path, &format!("{stream} {name} {} {}", ns(begin), ns(Instant::now())));
        }
    }
}

/// A stream's thread.
fn run(id: u64) {
    let mut world = world();
    loop {
        if world.is_due(id) {
            let queue = world.streams.get_mut(&id).expect("it is due");
            let op = queue.ops.pop_front().expect("it is due");
            let background = queue.background;
            let (sticky, backward, link) = (world.sticky, world.card.backward, world.card.link_mb_s);
            let begin = Instant::now();
            while world.held && background && matches!(op, Op::Copy { .. }) {
                world = wait(world);
            }
            drop(world);
            // After a fault nothing runs; marks are passed, and whoever asks for them gets the fault.
            let failed = if sticky == 0 { perform(&op, backward, link) } else { 0 };
            world = self::world();
            if failed != 0 && world.sticky == 0 {
                world.sticky = failed;
            }
            if let Op::Record { event, mark } = op
                && let Some(state) = world.events.get_mut(&event)
            {
                state.done = state.done.max(mark);
                state.when = Some(Instant::now());
            }
            world.line(id, op.name(), begin);
            if let Some(queue) = world.streams.get_mut(&id) {
                queue.done += 1;
            }
            changed();
            continue;
        }
        match world.streams.get(&id) {
            Some(queue) if !(queue.closing && queue.ops.is_empty()) => world = wait(world),
            _ => {
                world.streams.remove(&id);
                changed();
                return;
            }
        }
    }
}

/// What an operation does; the error that it ends with.
fn perform(op: &Op, backward: bool, link_mb_s: u64) -> Code {
    match op {
        Op::Copy { from, to, bytes, link } => {
            let begin = Instant::now();
            // SAFETY: both were looked at when the copy was put there; a range that has gone meanwhile is the caller's bug, and
            // ends the process, as its pages are gone.
            unsafe { (*from as *const u8).copy_to(*to as *mut u8, *bytes) };
            if *link && link_mb_s > 0 {
                // Bytes by 10^6 bytes per second are microseconds.
                pass(begin, Duration::from_micros(*bytes as u64 / link_mb_s));
            }
            0
        }
        Op::Fill { at, bytes, value } => {
            // SAFETY: as above.
            unsafe { (*at as *mut u8).write_bytes(*value, *bytes) };
            0
        }
        Op::Launch { kernel, grid, block, shared, words, .. } => {
            let order = if backward { Order::Backward } else { Order::Forward };
            // SAFETY: as a launch on a GPU: what the words point to is the caller's to know.
            match unsafe { kernel.launch(*grid, *block, *shared, words, 1, order) } {
                Ok(()) => 0,
                Err(why) => {
                    eprintln!("cuda_on_cpu: {why}");
                    719
                }
            }
        }
        Op::Fail(HANG) => {
            let mut world = world();
            loop {
                world = wait(world);
            }
        }
        Op::Fail(code) => *code,
        Op::Record { .. } | Op::Wait { .. } => 0,
    }
}

/// Lets the rest of `time` pass.
fn pass(begin: Instant, time: Duration) {
    static NEVER: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    let mut guard = NEVER.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    while let Some(left) = time.checked_sub(begin.elapsed()).filter(|left| !left.is_zero()) {
        guard = NEVER.1.wait_timeout(guard, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
    }
}
