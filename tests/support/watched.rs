//! A device that tells what it was asked for.

use dynamicinfer::device::{
    Buffer, Call, Device, Event, HostWork, Memory, Note, OutOfMemory, Stage, Stream, Totals, VirtualDevice,
};
use std::sync::{Arc, Mutex};

/// A virtual device, and what it is asked for, in its order.
pub struct Watched {
    pub device: VirtualDevice,
    pub seen: Arc<Mutex<Vec<Step>>>,
}

#[derive(Clone, Copy)]
pub enum Step {
    /// From this address, on the stream of copies.
    Copy(usize),
    /// The processor has done its part of a layer.
    Worked,
    /// So many bytes of host memory were announced for copies.
    Pinned(usize),
    /// The host has spent the time until now on this.
    Host(Stage),
    /// A kernel that adds something to the residual.
    Added,
    /// The scheduler's side of the engine ran: it was shown a divided layer.
    Scheduled,
}

impl Device for Watched {
    fn name(&self) -> String {
        self.device.name()
    }

    fn memory(&self) -> Memory {
        self.device.memory()
    }

    fn totals(&self) -> Totals {
        self.device.totals()
    }

    fn elapsed_ns(&mut self, from: Event, to: Event) -> u64 {
        self.device.elapsed_ns(from, to)
    }

    fn take(&mut self, bytes: u64, most: u64, reserved: bool) -> Result<Buffer, OutOfMemory> {
        self.device.take(bytes, most, reserved)
    }

    fn resize(&mut self, buffer: Buffer, bytes: u64) -> Result<Buffer, OutOfMemory> {
        self.device.resize(buffer, bytes)
    }

    fn set_budget(&mut self, bytes: u64) -> Result<(), OutOfMemory> {
        self.device.set_budget(bytes)
    }

    fn synchronize_event(&mut self, event: Event) {
        self.device.synchronize_event(event)
    }

    fn free(&mut self, buffer: Buffer) {
        self.device.free(buffer)
    }

    fn event(&mut self) -> Event {
        self.device.event()
    }

    unsafe fn pin(&mut self, _: *const u8, bytes: usize, _: bool) {
        self.seen.lock().unwrap().push(Step::Pinned(bytes));
    }

    unsafe fn copy_in(&mut self, stream: Stream, from: *const u8, bytes: usize, to: Buffer, at: u64) {
        if stream == Stream::Copy {
            self.seen.lock().unwrap().push(Step::Copy(from.addr()));
        }
        // SAFETY: the caller's promise.
        unsafe { self.device.copy_in(stream, from, bytes, to, at) }
    }

    unsafe fn copy_out(&mut self, stream: Stream, from: Buffer, at: u64, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.device.copy_out(stream, from, at, to, bytes) }
    }

    fn launch(&mut self, stream: Stream, call: &Call) {
        if let Call::Add(_) = call {
            self.seen.lock().unwrap().push(Step::Added);
        }
        self.device.launch(stream, call)
    }

    fn record(&mut self, stream: Stream, event: Event) {
        self.device.record(stream, event)
    }

    fn wait(&mut self, stream: Stream, event: Event) {
        self.device.wait(stream, event)
    }

    fn worked(&mut self, work: HostWork) {
        if work.stage == Stage::Ffn {
            self.seen.lock().unwrap().push(Step::Worked);
        }
        self.device.worked(work)
    }

    fn note(&mut self, note: Note) {
        if let Note::Host(stage) = note {
            self.seen.lock().unwrap().push(Step::Host(stage));
        }
    }

    fn is_done(&mut self, event: Event) -> bool {
        self.device.is_done(event)
    }

    fn synchronize(&mut self, stream: Stream) {
        self.device.synchronize(stream)
    }
}
