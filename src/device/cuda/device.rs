//! The device itself: what it holds, how it waits, and what it does for an engine.

use super::card::{Card, Unusable};
use super::driver::{CUevent, CUstream, Code, NOT_READY, Refusal, SUCCESS, remedy};
use super::graphs::Graphs;
use super::kernels::{Delivery, Kernels};
use super::memory::{Allocation, Bytes};
use super::moves::{Batch, Lists};
use super::pins::{Pins, Staging};
use super::spans::Spans;
use crate::clock::{self, Duration, Instant};
use crate::device::{
    Block, Buffer, Call, Device, Event, Fault, HostWork, Memory, MoveMethod, OutOfMemory, Stream, Tiles, Totals, kernel,
};

/// How long the host waits for a card that does not answer before the device counts as failed. Whole layers of a large model load in
/// seconds, a kernel ends in milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// A wait first polls so often without a pause, so that it ends within a microsecond of the work; after that it lets other threads have
/// the core between polls.
const SPINS: u32 = 20_000;

/// What a CUDA device is opened with.
#[derive(Clone, Debug)]
pub struct Options {
    /// Most bytes that its buffers may take together.
    pub budget: u64,
    /// Where its kernels come from.
    pub delivery: Delivery,
    /// Most bytes of host memory that may be pinned.
    pub pinnable: u64,
    /// How long the host waits for a card that does not answer; [`PATIENCE`] by default.
    pub patience: Duration,
    /// Whether a sequence ([`Device::begin_sequence`]) is started by one call of the driver. It takes memory of the card for each.
    pub graphs: bool,
    /// By what it multiplies prompts.
    pub tiles: Tiles,
}

/// A card in use as a [`Device`].
pub struct CudaDevice {
    /// The buffers by their id, which is never given twice; `None` once freed.
    pub(super) buffers: Vec<Option<Bytes>>,
    pub(super) events: Vec<CUevent>,
    /// As in [`Stream::ALL`].
    pub(super) streams: [CUstream; 2],
    pub(super) spans: [Spans; 2],
    pub(super) kernels: Option<Kernels>,
    pub(super) graphs: Graphs,
    pub(super) tiles: Tiles,
    /// Memory that the launches of a call hand to each other in.
    pub(super) scratch: Allocation,
    pub(super) pins: Pins,
    pub(super) staging: Option<Staging>,
    /// The lists of `gather`, once it was asked whether the device can gather.
    pub(super) lists: Option<Lists>,
    pub(super) batch: Batch,
    pub(super) memory: Memory,
    pub(super) totals: Totals,
    pub(super) fault: Option<Fault>,
    pub(super) patience: Duration,
    pub(super) opened: Instant,
    /// The card; last, because everything above is given back to it first.
    pub(super) card: Card,
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
            tiles: options.tiles,
            scratch: Allocation::Nowhere,
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

    /// The card.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// Copies one buffer into another of as many bytes, a multiple of 16, by a kernel that uses the whole card, on the compute stream. It
    /// shows how fast the card's memory is.
    pub fn copy_within(&mut self, from: Buffer, to: Buffer) {
        assert_eq!(from.bytes, to.bytes);
        let launch = kernel::copy(self.address(from, 0, from.bytes), self.address(to, 0, to.bytes), from.bytes);
        if let Some(queue) = self.begin(Stream::Compute) {
            self.totals.launches += 1;
            self.start(queue, &launch);
        }
    }

    /// How its kernels came to be, for people: "compiled by NVRTC 12.4 for sm_86".
    pub fn kernels(&self) -> &str {
        self.kernels.as_ref().map_or("none", |kernels| &kernels.origin)
    }

    /// Multiplies prompts by these tiles from the next call on.
    pub fn use_tiles(&mut self, tiles: Tiles) {
        self.tiles = tiles;
    }

    /// By what it multiplies prompts.
    pub fn tiles(&self) -> Tiles {
        self.tiles
    }

    /// Waits until nothing is copied any more and unpins all host memory that was pinned.
    pub fn unpin(&mut self) {
        Stream::ALL.into_iter().for_each(|s| self.synchronize(s));
        if self.ready() {
            self.pins.release(&self.card.driver);
        }
    }

    /// How much host memory was pinned, and how much was not.
    pub fn pinned(&self) -> Pinned {
        let staging = self.staging.as_ref().map_or(0, Staging::bytes);
        Pinned { pinned: self.pins.bytes(), refused: self.pins.refused, staging }
    }

    /// Bytes of the card's memory that its buffers take, in whole chunks.
    pub fn taken(&self) -> u64 {
        self.buffers.iter().flatten().map(|b| b.allocation.taken() as u64).sum::<u64>() + self.scratch.taken() as u64
    }

    /// Makes what the driver has refused the device's fault, unless there is one: the first is what matters.
    pub(super) fn fail(&mut self, refusal: Refusal) {
        if self.fault.is_none() {
            let fault = Fault(format!("{}: {refusal}; {}", self.card.name, remedy(refusal.code)));
            tracing::error!("{}", fault.0);
            self.fault = Some(fault);
        }
    }

    /// Whether `code` is success; if not, the device has failed.
    pub(super) fn went(&mut self, doing: &'static str, code: Code) -> bool {
        if code != SUCCESS {
            self.fail(self.card.driver.refusal(doing, code));
        }
        code == SUCCESS
    }

    /// Makes the device ready for work from this thread; `false` if it has failed. Operations of a sequence that were collected so far
    /// are put on their stream first, one by one: what the caller is about to do is not part of the sequence and must come after them.
    pub(super) fn ready(&mut self) -> bool {
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

    /// Polls until `ask` is no longer "not ready", or patience is over.
    pub(super) fn wait_for(&mut self, ask: impl Fn(&Self) -> Code) {
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
    pub(super) fn begin(&mut self, stream: Stream) -> Option<CUstream> {
        if !self.ready() {
            return None;
        }
        let at = self.streams[stream as usize];
        let code = self.spans[stream as usize].begin(&self.card.driver, at);
        self.went("record an event", code).then_some(at)
    }
}

/// Copies that the list for one call of the driver first has room for: a layer's decision has fewer.
const BATCH: usize = 4096;

/// What has become of the host memory that was to be pinned, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pinned {
    /// Memory that is pinned.
    pub pinned: u64,
    /// Memory that could not be pinned: its copies go through `staging`, so that the CPU copies them once more.
    pub refused: u64,
    /// Pinned memory through which copies of unpinned memory go.
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

    fn stage(&mut self, block_bytes: usize) {
        if self.ready() && self.staging.is_none() {
            self.staging = Staging::new(&self.card.driver, block_bytes).ok();
            if self.staging.is_none() {
                tracing::warn!(
                    "there is no pinned memory to copy blocks of {block_bytes} bytes through: they do not move to the card while a text is \
                     generated; free some memory, or raise the limit of locked memory (ulimit -l)"
                );
            }
        }
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
                self.staging = Staging::new(&self.card.driver, 0).ok();
                match &self.staging {
                    Some(staging) => tracing::warn!(
                        "the model cannot be pinned ({why}): its blocks go to the card through {} MiB of pinned memory, which \
                         costs the CPU a copy of each",
                        staging.bytes() >> 20
                    ),
                    None => tracing::warn!(
                        "the model cannot be pinned ({why}), nor any memory to copy its blocks through: they do not move to the \
                         card while a text is generated; free some memory, or raise the limit of locked memory (ulimit -l)"
                    ),
                }
            }
        }
    }

    fn take(&mut self, bytes: u64, most: u64, reserved: bool) -> Result<Buffer, OutOfMemory> {
        self.take_buffer(bytes, most, reserved)
    }

    fn resize(&mut self, buffer: Buffer, bytes: u64) -> Result<Buffer, OutOfMemory> {
        self.resize_buffer(buffer, bytes)
    }

    fn free(&mut self, buffer: Buffer) {
        self.free_buffer(buffer);
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
        // SAFETY: the caller's promise.
        unsafe { self.copy_to_card(stream, from, bytes, to) };
    }

    fn can_move(&mut self, by: MoveMethod) -> bool {
        if by == MoveMethod::Gather && self.lists.is_none() && self.ready() {
            // Without room for its lists there are the other ways.
            self.lists = Lists::new(&self.card.driver).ok().flatten();
        }
        by != MoveMethod::Gather || self.lists.is_some()
    }

    unsafe fn move_blocks(&mut self, by: MoveMethod, blocks: &[Block], bytes: usize, to: Buffer) {
        // SAFETY: the caller's promise.
        unsafe { self.bring(by, blocks, bytes, to) };
    }

    fn room_for_moves(&mut self, from: *const u8, bytes: usize, block_bytes: usize) -> usize {
        self.room(from, bytes, block_bytes)
    }

    unsafe fn copy_out(&mut self, stream: Stream, from: Buffer, at: u64, to: *mut u8, bytes: usize) {
        let from = self.address(from, at, bytes as u64);
        // SAFETY: the caller's promise.
        unsafe { self.copy_to_host(stream, from, to, bytes) };
    }

    fn prepare(&mut self, call: &Call) -> Result<(), OutOfMemory> {
        self.fit_scratch(call.scratch_bytes())
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
        self.start_sequence();
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

    fn worked(&mut self, work: HostWork) {
        self.totals.host_ns += work.ns;
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

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Nothing is started of a sequence that a panic has broken off.
        self.graphs.take();
        // Nothing may run in memory that is given back.
        Stream::ALL.into_iter().for_each(|s| self.synchronize(s));
        if !self.ready() {
            // A card that has failed may answer nothing any more, and a caller that gave memory back would wait for ever: the memory
            // is freed when the process ends.
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
            bytes.allocation.release(driver, self.card.chunks.as_ref());
        }
        std::mem::replace(&mut self.scratch, Allocation::Nowhere).release(driver, None);
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
