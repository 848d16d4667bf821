//! Memory of the card: buffers that grow and shrink where they lie, and the scratch between a call's launches.

use super::device::CudaDevice;
use super::driver::{Address, OUT_OF_MEMORY, Refusal};
use super::memory::{Allocation, Bytes};
use crate::device::{Buffer, Device, OutOfMemory, Stream};

/// Growable buffers of at most so many chunks are taken whole.
const SMALL: usize = 2;

impl CudaDevice {
    /// [`Device::take`]
    pub(super) fn take_buffer(&mut self, bytes: u64, most: u64, reserved: bool) -> Result<Buffer, OutOfMemory> {
        let left = self.memory.budget.saturating_sub(self.memory.used);
        if bytes > left {
            return Err(OutOfMemory { asked: bytes, left });
        }
        // Nothing runs on a card that has failed, so its buffers need no memory; the fault is asked for before results are used.
        let nowhere = reserved || !self.ready();
        let (bytes, most) = (bytes as usize, most as usize);
        let driver = &self.card.driver;
        let allocation = match &self.card.chunks {
            _ if nowhere => Ok(Allocation::Nowhere),
            Some(chunks) if most > bytes && most > SMALL * chunks.granule => {
                Allocation::addresses(driver, chunks, most).and_then(|mut allocation| {
                    match allocation.fit(driver, chunks, bytes) {
                        Ok(()) => Ok(allocation),
                        Err(refusal) => {
                            allocation.release(driver, Some(chunks));
                            Err(refusal)
                        }
                    }
                })
            }
            // A small buffer gets all that it may need at once: it would take a whole chunk in any case.
            Some(_) => Allocation::whole(driver, most),
            None => Allocation::whole(driver, bytes),
        };
        let allocation = match allocation {
            Ok(allocation) => allocation,
            Err(refusal) if refusal.code == OUT_OF_MEMORY => return Err(self.refused(bytes as u64, refusal)),
            Err(refusal) => {
                self.fail(refusal);
                Allocation::Nowhere
            }
        };
        let address = allocation.address();
        let (bytes, most) = (bytes as u64, most as u64);
        self.buffers.push(Some(Bytes { allocation, bytes, most, reserved }));
        if !reserved && self.ready() {
            self.zero(address, bytes);
        }
        self.memory.used += bytes;
        self.memory.peak = self.memory.peak.max(self.memory.used);
        Ok(Buffer { id: (self.buffers.len() - 1) as u32, bytes })
    }

    /// [`Device::resize`]
    pub(super) fn resize_buffer(&mut self, buffer: Buffer, bytes: u64) -> Result<Buffer, OutOfMemory> {
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
        let fitted = match (&mut there.allocation, &self.card.chunks) {
            (allocation @ Allocation::Chunked { .. }, Some(chunks)) => allocation.fit(driver, chunks, bytes as usize),
            (Allocation::Whole { bytes: taken, .. }, Some(_)) if bytes as usize <= *taken => Ok(()),
            (allocation, _) => {
                let stream = self.streams[Stream::Compute as usize];
                allocation.move_to(driver, bytes as usize, before.min(bytes) as usize, stream)
            }
        };
        if let Err(refusal) = fitted {
            return Err(self.refused(bytes.saturating_sub(before), refusal));
        }
        there.bytes = bytes;
        let address = there.allocation.address();
        self.memory.used = self.memory.used - before + bytes;
        self.memory.peak = self.memory.peak.max(self.memory.used);
        self.zero(address + before, bytes.saturating_sub(before));
        Ok(Buffer { bytes, ..buffer })
    }

    /// [`Device::free`]
    pub(super) fn free_buffer(&mut self, buffer: Buffer) {
        Stream::ALL.into_iter().for_each(|s| self.synchronize(s));
        let there = self.buffers.get_mut(buffer.id as usize).and_then(Option::take);
        let there = there.unwrap_or_else(|| panic!("buffer {} was freed before, or never was", buffer.id));
        self.memory.used -= there.bytes;
        // Of a card that has failed, the process's end gives everything back.
        if self.ready() {
            there.allocation.release(&self.card.driver, self.card.chunks.as_ref());
        }
    }

    /// Takes what launching this call will need beside its operands.
    pub(super) fn fit_scratch(&mut self, bytes: u64) -> Result<(), OutOfMemory> {
        if bytes as usize <= self.scratch.taken() {
            return Ok(());
        }
        self.synchronize(Stream::Compute);
        if !self.ready() {
            return Ok(());
        }
        std::mem::replace(&mut self.scratch, Allocation::Nowhere).release(&self.card.driver, None);
        self.scratch =
            Allocation::whole(&self.card.driver, bytes as usize).map_err(|refusal| self.refused(bytes, refusal))?;
        Ok(())
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
    pub(super) fn address(&self, buffer: Buffer, at: u64, bytes: u64) -> Address {
        let there = self.buffers.get(buffer.id as usize).and_then(Option::as_ref);
        let there = there.unwrap_or_else(|| panic!("buffer {} was freed, or never was", buffer.id));
        assert!(!there.reserved, "buffer {} is reserved: it is not the device's to copy", buffer.id);
        let end = at.checked_add(bytes).filter(|&end| end <= there.bytes);
        assert!(end.is_some(), "{bytes} bytes at {at} are not in buffer {} of {}", buffer.id, there.bytes);
        there.allocation.address() + at
    }
}
