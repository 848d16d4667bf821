//! The interface between the engine and a device.

use super::kernel::Call;
use super::moves::{Block, MoveMethod, run};
use super::timeline::{Note, Stage, Timeline};
use super::types::{Buffer, Event, Fault, Memory, OutOfMemory, Stream, Totals};

/// What the host has computed while the device computed its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostWork {
    /// What it was for.
    pub stage: Stage,
    /// Bytes of weights, or of keys and values, that it read.
    pub bytes: u64,
    /// Multiplications and additions, each counted, of a prompt's products and attention; 0 for few tokens, where reading takes longer in any
    /// case.
    pub operations: u64,
    /// The time that it took, ns.
    pub ns: u64,
}

/// What the engine needs of a device. All work on streams is asynchronous. "Not on the token path" means that a function may wait or
/// take system calls, so that it is not to be called while tokens are made.
pub trait Device: Send {
    /// The device's name for messages.
    fn name(&self) -> String;

    /// Its budget, and how much of it is in use.
    fn memory(&self) -> Memory;

    /// What it has done so far.
    fn totals(&self) -> Totals;

    /// Whether its times are measured; a virtual device's are computed from given rates.
    fn is_real(&self) -> bool {
        true
    }

    /// Why the device has failed; `None` while it works. Once it has failed nothing runs on it, no further event gets done and no wait
    /// blocks: ask for the fault before using results.
    fn fault(&self) -> Option<&Fault> {
        None
    }

    /// Announces host memory that copies will come from or, if `written`, go to: a device may pin it, so that copies run while the host
    /// goes on. Memory that cannot be pinned is copied all the same. Not on the token path.
    ///
    /// # Safety
    /// The bytes stay where they are until the device is dropped.
    unsafe fn pin(&mut self, _from: *const u8, _bytes: usize, _written: bool) {}

    /// Blocks of up to so many bytes will be moved from memory that is not pinned. Not on the token path.
    fn stage(&mut self, _block_bytes: usize) {}

    /// Allocates the scratch memory that launching such a call needs beside its operands; calls share it. Not on the token path.
    fn prepare(&mut self, _call: &Call) -> Result<(), OutOfMemory> {
        Ok(())
    }

    /// A new buffer of `bytes` zeros that can grow to `most`, which is at least `bytes`. If it is `reserved`, its bytes are counted but
    /// not allocated. Not on the token path.
    fn take(&mut self, bytes: u64, most: u64, reserved: bool) -> Result<Buffer, OutOfMemory>;

    /// A new buffer of `bytes` zeros.
    fn alloc(&mut self, bytes: u64) -> Result<Buffer, OutOfMemory> {
        self.take(bytes, bytes, false)
    }

    /// Counts `bytes` as used without allocating them, for something that this device reads where it lies.
    fn reserve(&mut self, bytes: u64) -> Result<Buffer, OutOfMemory> {
        self.take(bytes, bytes, true)
    }

    /// As [`Device::alloc`], for a buffer that [`Device::resize`] can let grow to `most` bytes.
    fn alloc_growable(&mut self, bytes: u64, most: u64) -> Result<Buffer, OutOfMemory> {
        self.take(bytes, most.max(bytes), false)
    }

    /// Gives a growable buffer another length, at most what it was made for. Waits for the work that uses it. What stays keeps its
    /// content, new bytes are zero, and memory behind the end is given back. Not on the token path.
    fn resize(&mut self, buffer: Buffer, bytes: u64) -> Result<Buffer, OutOfMemory>;

    /// Waits for the work that uses the buffer, and frees it.
    fn free(&mut self, buffer: Buffer);

    /// Sets the budget, and [`Memory::peak`] to what is used now.
    ///
    /// # Errors
    /// If more than `bytes` is in use, or the device does not have so much memory left.
    fn set_budget(&mut self, bytes: u64) -> Result<(), OutOfMemory>;

    /// A new event. It counts as done until it is recorded. Not on the token path.
    fn event(&mut self) -> Event;

    /// Copies host bytes to the buffer `to` from its byte `at` on, when the stream comes to it.
    ///
    /// # Safety
    /// `from` is readable for `bytes` until the copy is done.
    unsafe fn copy_in(&mut self, stream: Stream, from: *const u8, bytes: usize, to: Buffer, at: u64);

    /// Whether the device can move blocks of host memory by this method; allocates what the method needs. Not on the token path.
    fn can_move(&mut self, by: MoveMethod) -> bool {
        by != MoveMethod::Gather
    }

    /// Copies blocks of `bytes` bytes to slots of the same size in `to`, when the copy stream comes to them: by the method `by` if the
    /// device can, else by another.
    ///
    /// # Safety
    /// The blocks are readable until the copy stream has come to the next mark.
    unsafe fn move_blocks(&mut self, by: MoveMethod, blocks: &[Block], bytes: usize, to: Buffer) {
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            let n = if by == MoveMethod::Single { 1 } else { run(rest, bytes) };
            // SAFETY: the caller's promise; neighbours are one run of memory.
            unsafe { self.copy_in(Stream::Copy, first.from, n * bytes, to, u64::from(first.slot) * bytes as u64) };
            rest = &rest[n..];
        }
    }

    /// How many blocks of `block_bytes` bytes out of the host memory from `from` on, `bytes` long, [`Device::move_blocks`] can take now
    /// without waiting on the caller's thread. It takes more than that, too, but then the call may wait until older copies are done.
    fn room_for_moves(&mut self, _from: *const u8, _bytes: usize, _block_bytes: usize) -> usize {
        usize::MAX
    }

    /// Copies bytes of the buffer `from`, from its byte `at` on, to the host, when the stream comes to it.
    ///
    /// # Safety
    /// `to` is writable for `bytes`, and nothing reads it, until the copy is done.
    unsafe fn copy_out(&mut self, stream: Stream, from: Buffer, at: u64, to: *mut u8, bytes: usize);

    /// Runs the kernel of `call`, when the stream comes to it.
    fn launch(&mut self, stream: Stream, call: &Call);

    /// Begins a sequence: the kernels and copies that are put on the compute stream until [`Device::end_sequence`] will come again and
    /// again, each time under this number and nearly the same. A device may keep it prepared and start it as a whole at its end.
    fn begin_sequence(&mut self, _number: usize) {}

    /// Ends the sequence, if one has begun.
    fn end_sequence(&mut self) {}

    /// Records the event: it marks the point after all that was put on the stream so far.
    fn record(&mut self, stream: Stream, event: Event);

    /// Lets what is put on the stream from now on wait for the event as it was recorded last.
    fn wait(&mut self, stream: Stream, event: Event);

    /// Tells the device that the host has computed. A virtual device lets as much time pass on its clock as its rates say.
    fn worked(&mut self, work: HostWork);

    /// Adds bytes of weights that kernels have read to the totals: those of [`super::SparseFfn`], which are known from its results only. A
    /// device that counts them itself ignores it.
    fn has_read(&mut self, _bytes: u64) {}

    /// Whether the stream has come to the point where the event was last recorded. Never blocks.
    fn is_done(&mut self, event: Event) -> bool;

    /// An event that [`Device::elapsed_ns`] may be asked about. Not on the token path.
    fn timed_event(&mut self) -> Event {
        self.event()
    }

    /// The time in ns, by the device's clock, between two timed events as they were last recorded. Both are done.
    fn elapsed_ns(&mut self, from: Event, to: Event) -> u64;

    /// Waits until the stream has done all it was given.
    fn synchronize(&mut self, stream: Stream);

    /// Waits until the event is done, or until nothing is left to do if it never will be.
    fn synchronize_event(&mut self, event: Event);

    /// Tells what the engine is doing, for a device that keeps a trace ([`super::Traced`]).
    fn note(&mut self, _note: Note) {}

    /// The trace, for a device that keeps one.
    fn timeline(&mut self) -> Option<&mut Timeline> {
        None
    }
}

/// The least time that a kernel takes, ns by the device's clock, of `passes` passes and one for warming. Of a device that
/// fails meanwhile ([`Device::fault`]) it means nothing.
pub fn fastest_ns(device: &mut dyn Device, call: &Call, passes: usize) -> u64 {
    let [from, to] = [device.timed_event(), device.timed_event()];
    let mut best = u64::MAX;
    for _ in 0..=passes {
        device.record(Stream::Compute, from);
        device.launch(Stream::Compute, call);
        device.record(Stream::Compute, to);
        device.synchronize(Stream::Compute);
        best = best.min(device.elapsed_ns(from, to));
    }
    best
}
