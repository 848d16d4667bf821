//! Copies between the host's memory and the card's.

use super::device::CudaDevice;
use super::driver::{Address, CUstream, SUCCESS};
use super::graphs::Op;
use super::moves::{Batch, MOVES};
use crate::device::{Block, Buffer, MoveMethod, Stream, kernel, run};

impl CudaDevice {
    /// [`Device::copy_in`](crate::device::Device::copy_in) to an address that was checked.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn copy_to_card(&mut self, stream: Stream, from: *const u8, bytes: usize, to: Address) {
        if bytes == 0 || self.collects(stream, from, bytes, Op::In { from: from as usize, to, bytes }) {
            return;
        }
        let Some(queue) = self.begin(stream) else { return };
        self.totals.copies += 1;
        self.totals.link_bytes[0] += bytes as u64;
        if stream == Stream::Copy {
            self.totals.migrated_bytes += bytes as u64;
            self.totals.migrations += 1;
        }
        // The driver refuses one copy over two pinned pieces, so it is split at their border.
        let mut done = 0;
        while done < bytes && self.fault.is_none() {
            // SAFETY: within the caller's bytes.
            let next = unsafe { from.add(done) };
            let (piece, pinned) = self.pins.piece(next as usize, bytes - done);
            // SAFETY: as above.
            done += match !pinned && stream == Stream::Copy && self.staging.is_some() {
                true => unsafe { self.send_staged(queue, next, piece, to + done as u64) },
                false => {
                    self.send(queue, next, piece, to + done as u64);
                    piece
                }
            };
        }
    }

    /// Copies the first of these unpinned bytes through the ring of pinned memory, and returns how many. If the ring is full it waits for
    /// the oldest copy; a caller that must not wait asks [`CudaDevice::room`] first.
    ///
    /// # Safety
    /// The bytes are readable, and there is a ring.
    unsafe fn send_staged(&mut self, queue: CUstream, from: *const u8, bytes: usize, to: Address) -> usize {
        let staging = self.staging.as_mut().expect("the caller has looked");
        let staged = staging.take(bytes);
        let (before, event) = (staging.before(staged), staging.event(staged));
        if let Some(before) = before {
            // SAFETY: an event of ours.
            self.wait_for(|device| unsafe { (device.card.driver.f.event_query)(before) });
        }
        let staging = self.staging.as_ref().expect("as above");
        // SAFETY: nothing copies from these bytes of the ring any more, and the caller's are readable.
        let at = unsafe { staging.fill(staged, from) };
        self.send(queue, at, staged.bytes, to);
        // SAFETY: event and stream are there.
        let code = unsafe { (self.card.driver.f.event_record)(event, queue) };
        self.went("record an event", code);
        staged.bytes
    }

    /// [`Device::room_for_moves`](crate::device::Device::room_for_moves)
    pub(super) fn room(&mut self, from: *const u8, bytes: usize, block_bytes: usize) -> usize {
        if self.pins.covers(from as usize, bytes) || !self.ready() {
            return usize::MAX;
        }
        // Without a ring the driver copies unpinned memory by itself, and its call waits.
        let Some(staging) = &self.staging else { return 0 };
        // SAFETY: events of ours.
        let bytes = staging.room(|event| unsafe { (self.card.driver.f.event_query)(event) } == SUCCESS);
        bytes / block_bytes
    }

    /// [`Device::copy_out`](crate::device::Device::copy_out) from an address that was checked.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn copy_to_host(&mut self, stream: Stream, from: Address, to: *mut u8, bytes: usize) {
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

    /// [`Device::move_blocks`](crate::device::Device::move_blocks)
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn bring(&mut self, by: MoveMethod, blocks: &[Block], bytes: usize, to: Buffer) {
        let done = match by {
            MoveMethod::Single => false,
            MoveMethod::Batched => self.move_batch(blocks, bytes, to),
            MoveMethod::Gather => blocks.chunks(MOVES).all(|blocks| self.gather(blocks, bytes, to)),
        };
        if done {
            return;
        }
        // Blocks that were gathered already are copied once more: the same bytes.
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            let n = if by == MoveMethod::Single { 1 } else { run(rest, bytes) };
            let slot = self.address(to, u64::from(first.slot) * bytes as u64, (n * bytes) as u64);
            // SAFETY: the caller's promise; neighbours are one run of memory.
            unsafe { self.copy_to_card(Stream::Copy, first.from, n * bytes, slot) };
            rest = &rest[n..];
        }
    }

    /// Has a kernel copy these blocks; `false` if it cannot.
    fn gather(&mut self, blocks: &[Block], bytes: usize, to: Buffer) -> bool {
        blocks.iter().for_each(|block| _ = self.address(to, u64::from(block.slot) * bytes as u64, bytes as u64));
        let slots = self.address(to, 0, 0);
        let Some(lists) = self.lists.as_mut().filter(|_| bytes.is_multiple_of(16)) else { return false };
        let Some((list, event)) = lists.write(&self.card.driver, &self.pins, blocks, bytes) else { return false };
        let Some(queue) = self.begin(Stream::Copy) else { return true };
        self.totals.launches += 1;
        self.count_moved(1, blocks.len() * bytes);
        if self.start(queue, &kernel::gather(list, blocks.len(), slots, bytes as u64)) {
            // SAFETY: event and stream are there.
            let code = unsafe { (self.card.driver.f.event_record)(event, queue) };
            self.went("record an event", code);
        }
        true
    }

    /// Has one call of the driver copy these blocks; `false` if it cannot.
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
            self.count_moved(batch.len(), blocks.len() * bytes);
            // SAFETY: pinned, looked at above; readable until it is done, by the promise of `move_blocks`'s caller.
            let code = unsafe { batch.send(copy, queue) };
            self.went("copy to the card", code);
        }
        self.batch = batch;
        copied
    }

    fn count_moved(&mut self, copies: usize, bytes: usize) {
        self.totals.migrations += copies as u64;
        self.totals.link_bytes[0] += bytes as u64;
        self.totals.migrated_bytes += bytes as u64;
    }

    /// Adds a copy to the sequence that is being collected and counts it; `false` if none is, or the copy's host pages are not pinned.
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

    /// Copies bytes to the card. The host memory should be pinned: the driver waits for copies of other memory.
    pub(super) fn send(&mut self, at: CUstream, from: *const u8, bytes: usize, to: Address) -> bool {
        // SAFETY: readable until the copy is done, by the promise of `copy_in`'s caller; the target was checked.
        let code = unsafe { (self.card.driver.f.copy_in)(to, from.cast(), bytes, at) };
        self.went("copy to the card", code)
    }

    pub(super) fn fetch(&mut self, at: CUstream, from: Address, to: *mut u8, bytes: usize) -> bool {
        // SAFETY: writable until the copy is done, by the promise of `copy_out`'s caller; the source was checked.
        let code = unsafe { (self.card.driver.f.copy_out)(to.cast(), from, bytes, at) };
        self.went("copy from the card", code)
    }
}
