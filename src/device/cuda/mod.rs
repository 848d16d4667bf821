//! An NVIDIA card behind the same trait, through the driver's own interface, loaded at run time.
//!
//! Every operation goes on one of two streams and returns at once. What the driver refuses is kept as the device's [`Fault`]:
//! from then on nothing runs, no wait blocks, and whoever asks learns why. Events are our own, one for each thing that is waited
//! for, so that copies and kernels wait for each other where they are told to and nowhere else.

mod card;
mod driver;
mod graphs;
mod kernels;
mod memory;
mod moves;
mod nvrtc;
mod pins;
mod spans;

pub use card::{Card, OLDEST_CARD, OLDEST_DRIVER, Unusable};
pub use kernels::{Delivery, SOURCES, Source};
pub use nvrtc::SHOWN;

use super::launch;
use super::{Block, Buffer, Call, Device, Event, Fault, Memory, MoveMethod, OutOfMemory, Stream, Totals, run};
use crate::clock::{self, Duration, Instant};
use driver::{Address, CUevent, CUstream, Code, NOT_READY, OUT_OF_MEMORY, Refusal, SUCCESS, remedy};
use graphs::{Graphs, Maker, Op};
use kernels::{Kernels, words};
use memory::Place;
use moves::{Batch, Lists, MOVES};
use pins::{Pins, Staging};
use spans::Spans;

/// How long the host waits for a card that says nothing. Whole layers of a large model load in seconds, a kernel ends in
/// milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Asked so often without a pause, a wait ends within a microsecond of the work; behind that other threads may have the core.
const SPINS: u32 = 20_000;

/// What a device is opened with.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes that its buffers may take together.
    pub budget: u64,
    pub delivery: Delivery,
    /// Host memory that may be pinned, bytes.
    pub pinnable: u64,
    /// [`PATIENCE`]
    pub patience: Duration,
    /// Whether a sequence ([`Device::begin_sequence`]) is started by one call of the driver. It takes memory of the card for each.
    pub graphs: bool,
}

struct Bytes {
    place: Place,
    bytes: u64,
    /// What it may grow to.
    most: u64,
    /// Only counted: [`Device::reserve`].
    reserved: bool,
}

pub struct CudaDevice {
    /// By id, which is never given twice; `None` once freed.
    buffers: Vec<Option<Bytes>>,
    events: Vec<CUevent>,
    /// As in [`Stream::ALL`].
    streams: [CUstream; 2],
    spans: [Spans; 2],
    kernels: Option<Kernels>,
    graphs: Graphs,
    /// For what a call keeps between its kernels.
    scratch: Place,
    pins: Pins,
    staging: Option<Staging>,
    /// For `gather`, once somebody has asked for it.
    lists: Option<Lists>,
    batch: Batch,
    memory: Memory,
    totals: Totals,
    fault: Option<Fault>,
    patience: Duration,
    opened: Instant,
    /// Last: everything above is given back to it first.
    card: Card,
}

// SAFETY: streams, events and memory are the card's, whose context is made current on the thread that uses them.
unsafe impl Send for CudaDevice {}

impl CudaDevice {
    /// # Errors
    /// A budget beyond what is free, kernels that cannot be had, and whatever the driver refuses.
    pub fn new(card: Card, options: &Options) -> Result<CudaDevice, Unusable> {
        card.enter()?;
        let (free, _) = card.driver.memory()?;
        if options.budget > free {
            return Err(Unusable::Full { asked: options.budget, left: free });
        }
        let spans = [Spans::new(&card.driver)?, Spans::none()];
        let mut device = CudaDevice {
            buffers: Vec::new(),
            events: Vec::new(),
            streams: [std::ptr::null_mut(); 2],
            spans,
            kernels: None,
            graphs: Graphs::new(options.graphs),
            scratch: Place::Nowhere,
            pins: Pins::new(options.pinnable),
            staging: None,
            lists: None,
            batch: Batch::new(BATCH),
            memory: Memory { budget: options.budget, ..Memory::default() },
            totals: Totals::default(),
            fault: None,
            patience: options.patience,
            opened: clock::now(),
            card,
        };
        // What was made so far is given back by `Drop`, if anything fails.
        device.spans[1] = Spans::new(&device.card.driver)?;
        let driver = &device.card.driver;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: it writes two numbers.
        driver.check("tell its priorities", unsafe { (driver.f.priorities)(&mut least, &mut greatest) })?;
        // A kernel that moves blocks must not hold back one that computes.
        for (stream, priority) in device.streams.iter_mut().zip([greatest, least]) {
            const NON_BLOCKING: u32 = 1;
            // SAFETY: it writes a handle.
            let code = unsafe { (driver.f.stream_create)(stream, NON_BLOCKING, priority) };
            driver.check("make a stream", code)?;
        }
        let (arch, version) = (device.card.arch, device.card.driver_version);
        device.kernels = Some(Kernels::load(driver, &options.delivery, arch, version)?);
        if device.card.driver.graphs.is_none() {
            device.graphs.give_up(&"this driver has none");
        }
        Ok(device)
    }

    fn new_event(&mut self, flags: u32) -> Event {
        let mut event = std::ptr::null_mut();
        if self.ready() {
            // SAFETY: it writes a handle.
            let code = unsafe { (self.card.driver.f.event_create)(&mut event, flags) };
            self.went("make an event", code);
        }
        self.events.push(event);
        Event((self.events.len() - 1) as u32)
    }

    pub fn card(&self) -> &Card {
        &self.card
    }

    /// Copies one buffer into another of as many bytes, a multiple of 16, with all of the card, on the compute stream: what its memory
    /// can do.
    pub fn copy_within(&mut self, from: Buffer, to: Buffer) {
        assert_eq!(from.bytes, to.bytes);
        let launch = launch::copy(self.address(from, 0, from.bytes), self.address(to, 0, to.bytes), from.bytes);
        if let Some(queue) = self.begin(Stream::Compute) {
            self.totals.launches += 1;
            self.start(queue, &launch);
        }
    }

    /// How its kernels came to be.
    pub fn kernels(&self) -> &str {
        self.kernels.as_ref().map_or("none", |kernels| &kernels.origin)
    }

    /// Lets go of all host memory that was pinned, when nothing is copied from or to it any more.
    pub fn unpin(&mut self) {
        Stream::ALL.into_iter().for_each(|s| self.synchronize(s));
        if self.ready() {
            self.pins.release(&self.card.driver);
        }
    }

    /// Bytes of host memory that are pinned, that could not be, and that copies go through instead.
    pub fn pinned(&self) -> Pinned {
        let staging = self.staging.as_ref().map_or(0, Staging::bytes);
        Pinned { pinned: self.pins.bytes(), refused: self.pins.refused, staging }
    }

    /// Bytes that it takes from the card's memory for its buffers: whole chunks.
    pub fn taken(&self) -> u64 {
        self.buffers.iter().flatten().map(|b| b.place.taken() as u64).sum::<u64>() + self.scratch.taken() as u64
    }

    /// Remembers what the driver refused; the first is what matters.
    fn fail(&mut self, refusal: Refusal) {
        if self.fault.is_none() {
            let fault = Fault(format!("{}: {refusal}; {}", self.card.name, remedy(refusal.code)));
            tracing::error!("{}", fault.0);
            self.fault = Some(fault);
        }
    }

    /// Whether `code` is success; if not, the device has failed.
    fn went(&mut self, doing: &'static str, code: Code) -> bool {
        if code != SUCCESS {
            self.fail(self.card.driver.refusal(doing, code));
        }
        code == SUCCESS
    }

    /// Whether there is a device to work with, on this thread. What of a sequence has come by then goes onto its stream first: whatever
    /// asks is no part of it, and comes behind it.
    fn ready(&mut self) -> bool {
        if let Some((_, ops)) = self.graphs.take() {
            if !ops.is_empty() {
                self.one_by_one(&ops);
            }
            self.graphs.reuse(ops);
        }
        if self.fault.is_some() {
            return false;
        }
        if let Err(refusal) = self.card.enter() {
            self.fail(refusal);
        }
        self.fault.is_none()
    }

    /// What an allocation that the driver refused is for the caller.
    fn refused(&mut self, asked: u64, refusal: Refusal) -> OutOfMemory {
        let left = self.memory.budget.saturating_sub(self.memory.used);
        if refusal.code == OUT_OF_MEMORY {
            let free = self.card.driver.memory().map_or(0, |(free, _)| free);
            return OutOfMemory { asked, left: left.min(free) };
        }
        self.fail(refusal);
        OutOfMemory { asked, left: 0 }
    }

    /// Sets bytes to zero and waits for it.
    fn zero(&mut self, address: Address, bytes: u64) {
        if bytes > 0 {
            let stream = self.streams[Stream::Compute as usize];
            // SAFETY: the bytes were taken, and nothing uses them yet.
            let code = unsafe { (self.card.driver.f.set_bytes)(address, 0, bytes as usize, stream) };
            self.went("clear memory", code);
            self.synchronize(Stream::Compute);
        }
    }

    /// # Panics
    /// If there is no such buffer, or the range is not in it.
    fn address(&self, buffer: Buffer, at: u64, bytes: u64) -> Address {
        let there = self.buffers.get(buffer.id as usize).and_then(Option::as_ref);
        let there = there.unwrap_or_else(|| panic!("buffer {} was freed, or never was", buffer.id));
        assert!(!there.reserved, "buffer {} is reserved: it is not the device's to copy", buffer.id);
        let end = at.checked_add(bytes).filter(|&end| end <= there.bytes);
        assert!(end.is_some(), "{bytes} bytes at {at} are not in buffer {} of {}", buffer.id, there.bytes);
        there.place.address() + at
    }

    /// Polls until `ask` is no longer "not ready", or patience is over.
    fn wait_for(&mut self, ask: impl Fn(&Self) -> Code) {
        if !self.ready() {
            return;
        }
        let began = clock::now();
        let mut asked = 0u32;
        loop {
            match ask(self) {
                NOT_READY => {}
                code => {
                    self.went("finish its work", code);
                    break;
                }
            }
            asked = asked.saturating_add(1);
            if asked < SPINS {
                std::hint::spin_loop();
                continue;
            }
            std::thread::yield_now();
            if asked.is_multiple_of(1024) && began.elapsed() > self.patience {
                let seconds = self.patience.as_secs_f64();
                let silent = format!(
                    "{}: no answer for {seconds} s; the card hangs: look at nvidia-smi and the kernel's log \
                     (dmesg, Xid), and run again",
                    self.card.name
                );
                tracing::error!("{silent}");
                self.fault = Some(Fault(silent));
                break;
            }
        }
        self.totals.waited_ns += began.elapsed().as_nanos() as u64;
    }

    /// Before an operation: whether it can run, with the stream's clock started.
    fn begin(&mut self, stream: Stream) -> Option<CUstream> {
        if !self.ready() {
            return None;
        }
        let at = self.streams[stream as usize];
        let code = self.spans[stream as usize].begin(&self.card.driver, at);
        self.went("record an event", code).then_some(at)
    }

    /// Bytes from pinned memory, or from any at the price of the call waiting for them.
    fn send(&mut self, at: CUstream, from: *const u8, bytes: usize, to: Address) -> bool {
        // SAFETY: readable until the copy is done, by the promise of `copy_in`'s caller; the target was checked.
        let code = unsafe { (self.card.driver.f.copy_in)(to, from.cast(), bytes, at) };
        self.went("copy to the card", code)
    }

    fn fetch(&mut self, at: CUstream, from: Address, to: *mut u8, bytes: usize) -> bool {
        // SAFETY: writable until the copy is done, by the promise of `copy_out`'s caller; the source was checked.
        let code = unsafe { (self.card.driver.f.copy_out)(to.cast(), from, bytes, at) };
        self.went("copy from the card", code)
    }
}

/// Copies of one call, at first: a layer's decision is smaller.
const BATCH: usize = 4096;
/// Growable buffers of at most so many chunks are taken whole.
const SMALL: usize = 2;

/// What became of host memory that was to be pinned, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pinned {
    pub pinned: u64,
    /// Its copies go through `staging`, at the price of the CPU copying them once more.
    pub refused: u64,
    pub staging: u64,
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        self.card.name.clone()
    }

    fn memory(&self) -> Memory {
        self.memory
    }

    fn totals(&self) -> Totals {
        let busy_ns = [self.spans[0].busy_ns, self.spans[1].busy_ns];
        Totals { clock_ns: self.opened.elapsed().as_nanos() as u64, busy_ns, ..self.totals }
    }

    fn fault(&self) -> Option<&Fault> {
        self.fault.as_ref()
    }

    unsafe fn pin(&mut self, from: *const u8, bytes: usize, written: bool) {
        if !self.ready() || bytes == 0 {
            return;
        }
        let read_only = !written && self.card.pins_read_only;
        let refused = self.pins.add(&self.card.driver, from, bytes, read_only);
        if let Err(why) = refused {
            tracing::debug!("host memory could not be pinned: {why}");
            if self.staging.is_none() {
                // Without it the driver copies by itself, and the call waits for that.
                self.staging = Staging::new(&self.card.driver).ok();
                tracing::warn!(
                    "the model cannot be pinned ({why}): its blocks go to the card through {} MiB of pinned memory, which costs \
                     the CPU a copy of each",
                    self.staging.as_ref().map_or(0, Staging::bytes) >> 20
                );
            }
        }
    }

    fn take(&mut self, bytes: u64, most: u64, reserved: bool) -> Result<Buffer, OutOfMemory> {
        let left = self.memory.budget.saturating_sub(self.memory.used);
        if bytes > left {
            return Err(OutOfMemory { asked: bytes, left });
        }
        // Nothing runs on a card that has failed, so nothing needs to be there; whoever uses results asks for the fault.
        let nowhere = reserved || !self.ready();
        let (bytes, most) = (bytes as usize, most as usize);
        let driver = &self.card.driver;
        let place = match &self.card.chunks {
            _ if nowhere => Ok(Place::Nowhere),
            Some(chunks) if most > bytes && most > SMALL * chunks.granule => Place::addresses(driver, chunks, most)
                .and_then(|mut place| match place.fit(driver, chunks, bytes) {
                    Ok(()) => Ok(place),
                    Err(refusal) => {
                        place.release(driver, Some(chunks));
                        Err(refusal)
                    }
                }),
            // What is small takes all that it may need: it would take a chunk in any case.
            Some(_) => Place::whole(driver, most),
            None => Place::whole(driver, bytes),
        };
        let place = match place {
            Ok(place) => place,
            Err(refusal) if refusal.code == OUT_OF_MEMORY => return Err(self.refused(bytes as u64, refusal)),
            Err(refusal) => {
                self.fail(refusal);
                Place::Nowhere
            }
        };
        let address = place.address();
        let (bytes, most) = (bytes as u64, most as u64);
        self.buffers.push(Some(Bytes { place, bytes, most, reserved }));
        if !reserved && self.ready() {
            self.zero(address, bytes);
        }
        self.memory.used += bytes;
        self.memory.peak = self.memory.peak.max(self.memory.used);
        Ok(Buffer { id: (self.buffers.len() - 1) as u32, bytes })
    }

    fn resize(&mut self, buffer: Buffer, bytes: u64) -> Result<Buffer, OutOfMemory> {
        let left = self.memory.budget.saturating_sub(self.memory.used);
        if bytes > buffer.bytes && bytes - buffer.bytes > left {
            return Err(OutOfMemory { asked: bytes - buffer.bytes, left });
        }
        Stream::ALL.into_iter().for_each(|s| self.synchronize(s));
        let ready = self.ready();
        self.address(buffer, 0, buffer.bytes);
        let there = self.buffers[buffer.id as usize].as_mut().expect("checked above");
        assert!(bytes <= there.most, "buffer {} was not made for {bytes} bytes", buffer.id);
        let (driver, before) = (&self.card.driver, there.bytes);
        if !ready {
            there.bytes = bytes;
            self.memory.used = self.memory.used - before + bytes;
            return Ok(Buffer { bytes, ..buffer });
        }
        let fitted = match (&mut there.place, &self.card.chunks) {
            (place @ Place::Chunked { .. }, Some(chunks)) => place.fit(driver, chunks, bytes as usize),
            (Place::Whole { bytes: taken, .. }, Some(_)) if bytes as usize <= *taken => Ok(()),
            (place, _) => {
                let stream = self.streams[Stream::Compute as usize];
                place.move_to(driver, bytes as usize, before.min(bytes) as usize, stream)
            }
        };
        if let Err(refusal) = fitted {
            return Err(self.refused(bytes.saturating_sub(before), refusal));
        }
        there.bytes = bytes;
        let address = there.place.address();
        self.memory.used = self.memory.used - before + bytes;
        self.memory.peak = self.memory.peak.max(self.memory.used);
        self.zero(address + before, bytes.saturating_sub(before));
        Ok(Buffer { bytes, ..buffer })
    }

    fn free(&mut self, buffer: Buffer) {
        Stream::ALL.into_iter().for_each(|s| self.synchronize(s));
        let there = self.buffers.get_mut(buffer.id as usize).and_then(Option::take);
        let there = there.unwrap_or_else(|| panic!("buffer {} was freed before, or never was", buffer.id));
        self.memory.used -= there.bytes;
        // Of a card that has failed, the process's end gives everything back.
        if self.ready() {
            there.place.release(&self.card.driver, self.card.chunks.as_ref());
        }
    }

    fn set_budget(&mut self, bytes: u64) -> Result<(), OutOfMemory> {
        if self.memory.used > bytes {
            return Err(OutOfMemory { asked: self.memory.used, left: bytes });
        }
        let more = bytes - self.memory.used;
        if self.ready()
            && let Ok((free, _)) = self.card.driver.memory()
            && more > free
        {
            return Err(OutOfMemory { asked: more, left: free });
        }
        self.memory = Memory { budget: bytes, peak: self.memory.used, ..self.memory };
        Ok(())
    }

    fn event(&mut self) -> Event {
        const NO_TIMES: u32 = 2;
        self.new_event(NO_TIMES)
    }

    fn timed_event(&mut self) -> Event {
        self.new_event(0)
    }

    fn elapsed_ns(&mut self, from: Event, to: Event) -> u64 {
        let mut ms = 0f32;
        if self.ready() {
            let [from, to] = [from, to].map(|event| self.events[event.0 as usize]);
            // SAFETY: both were recorded and reached; it writes one number.
            let code = unsafe { (self.card.driver.f.event_elapsed)(&mut ms, from, to) };
            self.went("read its clock", code);
        }
        (f64::from(ms) * 1e6) as u64
    }

    unsafe fn copy_in(&mut self, stream: Stream, from: *const u8, bytes: usize, to: Buffer, at: u64) {
        let to = self.address(to, at, bytes as u64);
        if bytes == 0 || self.collects(stream, from, bytes, Op::In { from: from as usize, to, bytes }) {
            return;
        }
        let Some(queue) = self.begin(stream) else { return };
        self.totals.copies += 1;
        self.totals.link_bytes[0] += bytes as u64;
        if stream == Stream::Copy {
            self.totals.migrated_bytes += bytes as u64;
        }
        // One copy may cross from one pinned piece into the next, which the driver does not take as one.
        let mut done = 0;
        while done < bytes && self.fault.is_none() {
            // SAFETY: within the caller's bytes.
            let next = unsafe { from.add(done) };
            let (piece, pinned) = self.pins.piece(next as usize, bytes - done);
            match &mut self.staging {
                Some(staging) if !pinned && stream == Stream::Copy => {
                    let (slot, length) = staging.next(piece);
                    self.wait_for(|device| {
                        let staging = device.staging.as_ref().expect("looked at above");
                        // SAFETY: an event of ours.
                        unsafe { (device.card.driver.f.event_query)(staging.event(slot)) }
                    });
                    let staging = self.staging.as_ref().expect("looked at above");
                    // SAFETY: nothing copies from this slot any more, and the caller's bytes are readable.
                    let staged = unsafe { staging.fill(slot, next, length) };
                    let event = staging.event(slot);
                    self.send(queue, staged, length, to + done as u64);
                    // SAFETY: event and stream are there.
                    let code = unsafe { (self.card.driver.f.event_record)(event, queue) };
                    self.went("record an event", code);
                    done += length;
                }
                _ => {
                    self.send(queue, next, piece, to + done as u64);
                    done += piece;
                }
            }
        }
    }

    fn can_move(&mut self, by: MoveMethod) -> bool {
        if by == MoveMethod::Gather && self.lists.is_none() && self.ready() {
            // Without room for its lists there are the other ways.
            self.lists = Lists::new(&self.card.driver).ok().flatten();
        }
        by != MoveMethod::Gather || self.lists.is_some()
    }

    unsafe fn move_blocks(&mut self, by: MoveMethod, blocks: &[Block], bytes: usize, to: Buffer) {
        let done = match by {
            MoveMethod::Single => false,
            MoveMethod::Batched => self.move_batch(blocks, bytes, to),
            MoveMethod::Gather => blocks.chunks(MOVES).all(|blocks| self.gather(blocks, bytes, to)),
        };
        if done {
            return;
        }
        // What was gathered already comes twice: the same bytes.
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            let n = if by == MoveMethod::Single { 1 } else { run(rest, bytes) };
            // SAFETY: the caller's promise; neighbours are one stretch of memory.
            unsafe { self.copy_in(Stream::Copy, first.from, n * bytes, to, u64::from(first.slot) * bytes as u64) };
            rest = &rest[n..];
        }
    }

    unsafe fn copy_out(&mut self, stream: Stream, from: Buffer, at: u64, to: *mut u8, bytes: usize) {
        let from = self.address(from, at, bytes as u64);
        if bytes == 0 || self.collects(stream, to, bytes, Op::Out { from, to: to as usize, bytes }) {
            return;
        }
        let Some(queue) = self.begin(stream) else { return };
        self.totals.copies += 1;
        self.totals.link_bytes[1] += bytes as u64;
        let mut done = 0;
        while done < bytes && self.fault.is_none() {
            // SAFETY: within the caller's bytes.
            let next = unsafe { to.add(done) };
            let (piece, _) = self.pins.piece(next as usize, bytes - done);
            self.fetch(queue, from + done as u64, next, piece);
            done += piece;
        }
    }

    fn prepare(&mut self, call: &Call) -> Result<(), OutOfMemory> {
        self.fit_scratch(launch::scratch_bytes(call))
    }

    fn launch(&mut self, stream: Stream, call: &Call) {
        self.run(stream, call);
    }

    fn begin_sequence(&mut self, number: usize) {
        if self.ready() {
            self.graphs.begin(number);
        }
    }

    fn end_sequence(&mut self) {
        let Some((number, ops)) = self.graphs.take() else { return };
        if !ops.is_empty()
            && let Some(queue) = self.begin(Stream::Compute)
        {
            let kernels = self.kernels.as_ref().expect("there since the device is");
            let by = Maker { driver: &self.card.driver, kernels, context: self.card.context() };
            match self.graphs.start(number, &ops, &by, queue) {
                Some(code) => _ = self.went("launch a graph", code),
                None => self.one_by_one(&ops),
            }
        }
        self.graphs.reuse(ops);
    }

    fn record(&mut self, stream: Stream, event: Event) {
        if !self.ready() {
            return;
        }
        let queue = self.streams[stream as usize];
        let code = self.spans[stream as usize].end(&self.card.driver, queue);
        self.went("record an event", code);
        // SAFETY: event and stream are there.
        let code = unsafe { (self.card.driver.f.event_record)(self.events[event.0 as usize], queue) };
        self.went("record an event", code);
    }

    fn wait(&mut self, stream: Stream, event: Event) {
        if !self.ready() {
            return;
        }
        let queue = self.streams[stream as usize];
        // SAFETY: event and stream are there; the flags must be 0.
        let code = unsafe { (self.card.driver.f.stream_wait)(queue, self.events[event.0 as usize], 0) };
        self.went("order its streams", code);
    }

    fn worked(&mut self, _host_bytes: u64, host_ns: u64, _device_bytes: u64) {
        self.totals.host_ns += host_ns;
    }

    fn has_read(&mut self, bytes: u64) {
        self.totals.device_bytes += bytes;
    }

    fn is_done(&mut self, event: Event) -> bool {
        if !self.ready() {
            return false;
        }
        // SAFETY: the event is there.
        match unsafe { (self.card.driver.f.event_query)(self.events[event.0 as usize]) } {
            NOT_READY => false,
            code => {
                self.spans[Stream::Copy as usize].look(&self.card.driver);
                self.went("finish its work", code)
            }
        }
    }

    fn synchronize(&mut self, stream: Stream) {
        let s = stream as usize;
        // It has none yet where opening it has failed half way.
        if self.streams[s].is_null() || !self.ready() {
            return;
        }
        let code = self.spans[s].end(&self.card.driver, self.streams[s]);
        self.went("record an event", code);
        // SAFETY: the stream is there.
        self.wait_for(|device| unsafe { (device.card.driver.f.stream_query)(device.streams[s]) });
        self.spans[s].look(&self.card.driver);
    }

    fn synchronize_event(&mut self, event: Event) {
        // SAFETY: the event is there.
        self.wait_for(|device| unsafe { (device.card.driver.f.event_query)(device.events[event.0 as usize]) });
    }
}

impl CudaDevice {
    /// Whether a kernel brings these blocks.
    fn gather(&mut self, blocks: &[Block], bytes: usize, to: Buffer) -> bool {
        blocks.iter().for_each(|block| _ = self.address(to, u64::from(block.slot) * bytes as u64, bytes as u64));
        let slots = self.address(to, 0, 0);
        let Some(lists) = self.lists.as_mut().filter(|_| bytes.is_multiple_of(16)) else { return false };
        let Some((list, event)) = lists.write(&self.card.driver, &self.pins, blocks, bytes) else { return false };
        let Some(queue) = self.begin(Stream::Copy) else { return true };
        self.totals.launches += 1;
        self.count_moved(blocks.len() * bytes);
        if self.start(queue, &launch::gather(list, blocks.len(), slots, bytes as u64)) {
            // SAFETY: event and stream are there.
            let code = unsafe { (self.card.driver.f.event_record)(event, queue) };
            self.went("record an event", code);
        }
        true
    }

    /// Whether one call of the driver brings these blocks.
    fn move_batch(&mut self, blocks: &[Block], bytes: usize, to: Buffer) -> bool {
        let Some(copy) = self.card.driver.copy_batch.filter(|_| blocks.len() > 1) else { return false };
        let mut batch = std::mem::replace(&mut self.batch, Batch::new(0));
        batch.clear();
        let (mut rest, mut all_pinned) = (blocks, true);
        while let Some(first) = rest.first() {
            let length = run(rest, bytes) * bytes;
            rest = &rest[length / bytes..];
            let target = self.address(to, u64::from(first.slot) * bytes as u64, length as u64);
            let mut done = 0;
            while done < length {
                let from = first.from as usize + done;
                let (piece, pinned) = self.pins.piece(from, length - done);
                all_pinned &= pinned;
                batch.push(from, target + done as u64, piece);
                done += piece;
            }
        }
        let copied = all_pinned && batch.len() > 1;
        if copied && let Some(queue) = self.begin(Stream::Copy) {
            self.totals.copies += batch.len() as u64;
            self.count_moved(blocks.len() * bytes);
            // SAFETY: pinned, looked at above; readable until it is done, by the promise of `move_blocks`'s caller.
            let code = unsafe { batch.send(copy, queue) };
            self.went("copy to the card", code);
        }
        self.batch = batch;
        copied
    }

    fn count_moved(&mut self, bytes: usize) {
        self.totals.link_bytes[0] += bytes as u64;
        self.totals.migrated_bytes += bytes as u64;
    }

    /// Takes what launching this call will need beside its operands.
    fn fit_scratch(&mut self, bytes: u64) -> Result<(), OutOfMemory> {
        if bytes as usize <= self.scratch.taken() {
            return Ok(());
        }
        self.synchronize(Stream::Compute);
        if !self.ready() {
            return Ok(());
        }
        std::mem::replace(&mut self.scratch, Place::Nowhere).release(&self.card.driver, None);
        self.scratch =
            Place::whole(&self.card.driver, bytes as usize).map_err(|refusal| self.refused(bytes, refusal))?;
        Ok(())
    }

    /// # Panics
    /// If an operand is not in its buffer.
    fn run(&mut self, stream: Stream, call: &Call) {
        call.operands(&mut |view, bytes, _| _ = self.address(view.buffer, view.at, bytes));
        let scratch = launch::scratch_bytes(call);
        assert!(scratch == 0 || stream == Stream::Compute, "there is one scratch, the compute stream's");
        // Only where nobody has prepared this call: it waits.
        if self.fit_scratch(scratch).is_err() {
            let code = OUT_OF_MEMORY;
            self.went("take memory for a kernel", code);
        }
        let collected = stream == Stream::Compute && self.graphs.collects();
        let queue = if collected { None } else { self.begin(stream) };
        if queue.is_none() && !collected {
            return;
        }
        self.totals.device_bytes += launch::weight_bytes(call);
        let launches = launch::launches(call, |b| self.address(b, 0, 0), self.scratch.address());
        self.totals.launches += 1;
        for launch in launches.iter() {
            match queue {
                None => self.graphs.push(Op::Launch(*launch)),
                Some(queue) if self.start(queue, launch) => {}
                Some(_) => return,
            }
        }
    }

    /// Whether a copy became part of the sequence that is coming, and is counted. One from or to pages that are not pinned cannot.
    fn collects(&mut self, stream: Stream, host: *const u8, bytes: usize, op: Op) -> bool {
        if stream != Stream::Compute || !self.graphs.collects() {
            return false;
        }
        if self.pins.piece(host as usize, bytes) != (bytes, true) {
            self.graphs.give_up(&"host memory could not be pinned");
            return false;
        }
        self.totals.copies += 1;
        self.totals.link_bytes[usize::from(matches!(op, Op::Out { .. }))] += bytes as u64;
        self.graphs.push(op);
        true
    }

    /// Puts what was collected on the compute stream as if it had not been.
    fn one_by_one(&mut self, ops: &[Op]) {
        let Some(queue) = self.begin(Stream::Compute) else { return };
        for op in ops {
            let went = match *op {
                Op::Launch(launch) => self.start(queue, &launch),
                Op::In { from, to, bytes } => self.send(queue, from as *const u8, bytes, to),
                Op::Out { from, to, bytes } => self.fetch(queue, from, to as *mut u8, bytes),
            };
            if !went {
                return;
            }
        }
    }

    /// Whether the driver took it. Its operands lie in buffers, which are not given back before the stream is idle.
    fn start(&mut self, queue: CUstream, launch: &launch::Launch) -> bool {
        let mut words = words(launch);
        let function = self.kernels.as_ref().expect("there since the device is").function(launch.kernel);
        let [x, y, z] = launch.grid;
        // SAFETY: the kernel's arguments are as its declaration says (`launch`), and where they point to is memory of buffers, by
        // the callers.
        let code = unsafe {
            let (words, none) = (words.as_mut_ptr(), std::ptr::null_mut());
            (self.card.driver.f.launch)(function, x, y, z, launch.block, 1, 1, launch.shared_bytes, queue, words, none)
        };
        self.went("launch a kernel", code)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Of a sequence that was broken off by a panic nothing is started.
        self.graphs.take();
        // Nothing may run in memory that is given back.
        Stream::ALL.into_iter().for_each(|s| self.synchronize(s));
        if !self.ready() {
            // A card that has failed may answer nothing any more, and whoever asked it to give back would wait for ever: the process
            // ends, and with it what it held.
            self.card.abandon();
            return;
        }
        let driver = &self.card.driver;
        self.pins.release(driver);
        if let Some(staging) = self.staging.take() {
            staging.release(driver);
        }
        if let Some(lists) = self.lists.take() {
            lists.release(driver);
        }
        for bytes in self.buffers.drain(..).flatten() {
            bytes.place.release(driver, self.card.chunks.as_ref());
        }
        std::mem::replace(&mut self.scratch, Place::Nowhere).release(driver, None);
        self.graphs.release(driver);
        if let Some(kernels) = self.kernels.take() {
            kernels.unload(driver);
        }
        self.spans.iter_mut().for_each(|spans| spans.destroy(driver));
        for event in self.events.drain(..).filter(|event| !event.is_null()) {
            // SAFETY: made here, and nothing waits for it any more.
            unsafe { (driver.f.event_destroy)(event) };
        }
        for stream in self.streams.iter().filter(|stream| !stream.is_null()) {
            // SAFETY: made here, and idle.
            unsafe { (driver.f.stream_destroy)(*stream) };
        }
    }
}
