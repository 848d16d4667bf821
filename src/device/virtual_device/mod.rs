//! The virtual device: a second memory with a hard budget, two streams, events and a link, simulated on a virtual clock.
//!
//! Its results are real, by the CPU's kernels. Its times come from [`Rates`] and are never a measurement.
//!
//! Nothing runs at the moment when it is put on a stream. Work is done in the order of virtual time, once the host's clock has come to
//! it or the host waits for it. A copy writes its first half when it begins and the rest when it ends. A kernel reads its operands when
//! it begins, and again when it ends if they were written to meanwhile. So a host that reads too early, frees too early or overwrites the
//! operands of a running kernel gets wrong bytes here, as on a device that really runs beside it.

mod memory;
mod streams;

use super::kernel::HostScratch;
use super::{
    Block, Buffer, Call, Device, Event, Fault, HostWork, KernelWork, Memory, MoveMethod, OutOfMemory, Stage, Stream,
    Totals, run,
};
use crate::cpu::Kernels;
use crate::prng::Prng;
use memory::{Bytes, Region};
use streams::{Astray, EventState, MAX_ASTRAY, Queue, Work};

/// Operations that the compute and the copy stream can hold; when one is full, the host waits until its oldest operation is done. The
/// first is the work of some layers, the second more than the neuron cache lets be on its way, at three operations for each move.
pub const QUEUES: [usize; 2] = [256, 3 * 4096 + 64];
/// What a call of the device costs the host, ns: about as much as one of a driver. It lets virtual time pass between two waits.
pub const HOST_CALL_NS: u64 = 200;
/// The rates that a virtual device computes its times from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// How fast a kernel reads the device's memory, GB/s.
    pub device_gb_s: f64,
    /// How fast kernels multiply and add, GFLOP/s, each counted.
    pub device_gflops: f64,
    /// How fast the link is in each direction, GB/s.
    pub link_gb_s: f64,
    /// How fast all cores of the host read its memory, GB/s.
    pub host_gb_s: f64,
    /// How fast all cores of the host do a prompt's products, GFLOP/s: multiplications and additions, each counted.
    pub host_gflops: f64,
    /// Time before each kernel, us.
    pub call_us: f64,
    /// Time before each copy, us.
    pub copy_us: f64,
    /// The least time that a wait of the host takes, us.
    pub sync_us: f64,
}

impl Rates {
    fn check(self) -> Rates {
        let rates = [self.device_gb_s, self.device_gflops, self.link_gb_s, self.host_gb_s, self.host_gflops];
        assert!(rates.iter().all(|&rate| rate > 0.0), "rates are above zero: {self:?}");
        self
    }

    /// How long a kernel takes: what is longer of reading and of arithmetic.
    fn kernel_ns(self, work: KernelWork) -> u64 {
        let reading = Rates::ns(self.call_us, work.bytes, self.device_gb_s);
        reading.max(Rates::ns(self.call_us, work.operations, self.device_gflops))
    }

    /// GB/s are bytes per nanosecond, and GFLOP/s operations.
    fn ns(before_us: f64, bytes: u64, gb_s: f64) -> u64 {
        (before_us * 1e3 + bytes as f64 / gb_s) as u64
    }
}

/// What goes wrong with copies on the copy stream, for tests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Share of copies that take up to 64 times as long.
    pub late: f64,
    /// Share of copies that never arrive, or only their first half; the event behind them is never done.
    pub lost: f64,
    /// Whether copies may be overtaken by later ones.
    pub reorder: bool,
    /// Seed of the chances above.
    pub seed: u64,
}

/// A device of host memory on a virtual clock.
pub struct VirtualDevice {
    rates: Rates,
    faults: Faults,
    prng: Prng,
    kernels: Kernels,
    memory: Memory,
    /// The buffers by their id, which is never given twice; `None` once freed.
    buffers: Vec<Option<Bytes>>,
    events: Vec<EventState>,
    queues: [Queue; 2],
    astray: Vec<Astray>,
    /// Of each stream's kernels.
    scratch: [HostScratch; 2],
    /// Bytes of scratch memory that a card would have taken for calls so far.
    prepared: u64,
    /// When the link is free again, in each direction.
    link_free_ns: [u64; 2],
    host_ns: u64,
    /// Time that the host's part of an FFN takes beside reading its neurons, us.
    share_us: f64,
    totals: Totals,
    /// The launch that fails for good, counted from one, and the fault that it has caused.
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
            scratch: Default::default(),
            prepared: 0,
            link_free_ns: [0; 2],
            host_ns: 0,
            share_us: 0.0,
            totals: Totals::default(),
            fails_at: None,
            fault: None,
        }
    }

    /// The same device with faulty copies.
    pub fn with_faults(mut self, faults: Faults) -> VirtualDevice {
        self.faults = faults;
        self.prng = Prng::new(faults.seed);
        self
    }

    /// The same device, but its launch of this number, counted from one, fails and ends all work, as a sticky error of a driver does.
    pub fn failing_at(mut self, launch: u64) -> VirtualDevice {
        self.fails_at = Some(launch);
        self
    }

    /// The same device beside a host whose part of an FFN takes `share_us` more, however few neurons it has.
    pub fn with_host_share(mut self, share_us: f64) -> VirtualDevice {
        self.share_us = share_us;
        self
    }

    /// The same device with other lengths of the compute and the copy stream than [`QUEUES`].
    pub fn with_queues(mut self, capacities: [usize; 2]) -> VirtualDevice {
        assert!(capacities.iter().all(|&c| c > 0));
        self.queues = capacities.map(Queue::new);
        self
    }

    /// Sets the rates from now on; work that has begun keeps its times.
    pub fn set_rates(&mut self, rates: Rates) {
        self.rates = rates.check();
    }

    /// The host's virtual time, ns.
    pub fn clock_ns(&self) -> u64 {
        self.host_ns
    }

    /// Lets virtual time pass, in which the host was busy with something else.
    pub fn advance(&mut self, ns: u64) {
        self.host_ns += ns;
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

    fn prepare(&mut self, call: &Call) -> Result<(), OutOfMemory> {
        self.prepared = self.prepared.max(call.scratch_bytes());
        Ok(())
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
        assert!(bytes <= region.most(), "buffer {} was not made for {bytes} bytes", buffer.id);
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

    /// A gather is one call whose blocks arrive one by one: each can be torn, late and overtaken as a copy can.
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
        call.operands(&mut |operand| self.check(operand.view.buffer, operand.view.at, operand.bytes));
        self.totals.unprepared += u64::from(call.scratch_bytes() > self.prepared);
        self.prepared = self.prepared.max(call.scratch_bytes());
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

    fn worked(&mut self, work: HostWork) {
        let reading = Rates::ns(0.0, work.bytes, self.rates.host_gb_s);
        let host = reading.max(Rates::ns(0.0, work.operations, self.rates.host_gflops));
        let fixed = if work.stage == Stage::Ffn { Rates::ns(self.share_us, 0, 1.0) } else { 0 };
        self.totals.host_ns += host + fixed;
        self.host_ns += host + fixed;
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
