//! Pinned host memory, which the card may read while the host goes on, and a small pinned ring through which unpinned memory is copied.

use super::driver::{Address, CUevent, Driver, Refusal, SUCCESS};
use std::ffi::c_void;

/// Pages are pinned in pieces of so many bytes, so that a refusal concerns one piece and not the rest.
const PIECE: usize = 256 << 20;
const PAGE: usize = 4096;

struct Range {
    first: usize,
    end: usize,
    /// The address at which the card sees its beginning; `None` if it does not see it.
    seen: Option<Address>,
}

/// Ranges of pinned pages.
pub struct Pins {
    /// Sorted, none overlaps another.
    ranges: Vec<Range>,
    /// Bytes that may still be pinned.
    left: u64,
    /// Bytes that could not be pinned.
    pub refused: u64,
}

impl Pins {
    /// No pinned pages yet; at most `most` bytes will be pinned.
    pub fn new(most: u64) -> Pins {
        Pins { ranges: Vec::new(), left: most, refused: 0 }
    }

    /// Bytes that are pinned.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| (range.end - range.first) as u64).sum()
    }

    /// Pins those pages of a range that are not pinned yet.
    ///
    /// # Errors
    /// The first reason why a page was not pinned; the others are.
    pub fn add(&mut self, driver: &Driver, from: *const u8, bytes: usize, read_only: bool) -> Result<(), String> {
        let (mut at, end) = (from as usize / PAGE * PAGE, (from as usize + bytes).next_multiple_of(PAGE));
        let mut answer = Ok(());
        while at < end {
            let (length, pinned) = self.piece(at, (end - at).min(PIECE));
            if !pinned && let Err(why) = self.pin(driver, at, length, read_only) {
                self.refused += length as u64;
                answer = answer.and(Err(why));
            }
            at += length;
        }
        answer
    }

    fn pin(&mut self, driver: &Driver, at: usize, bytes: usize, read_only: bool) -> Result<(), String> {
        if bytes as u64 > self.left {
            return Err("there is too little free memory to lock it".into());
        }
        const READ_ONLY: u32 = 8;
        let flags = if read_only { READ_ONLY } else { 0 };
        // SAFETY: pages that are mapped, by the promise of `Device::pin`'s caller; the driver writes to none that is read-only.
        let code = unsafe { (driver.f.host_register)(at as *mut c_void, bytes, flags) };
        driver.check("pin host memory", code).map_err(|refusal| refusal.to_string())?;
        self.left -= bytes as u64;
        let place = self.ranges.partition_point(|range| range.first < at);
        let seen = address_of(driver, at as *mut c_void);
        self.ranges.insert(place, Range { first: at, end: at + bytes, seen });
        Ok(())
    }

    /// How many of the bytes at `at` lie together in one pinned range, or in none.
    pub fn piece(&self, at: usize, bytes: usize) -> (usize, bool) {
        let next = self.ranges.partition_point(|range| range.end <= at);
        match self.ranges.get(next) {
            Some(range) if range.first <= at => (bytes.min(range.end - at), true),
            Some(range) => (bytes.min(range.first - at), false),
            None => (bytes, false),
        }
    }

    /// Whether all of these bytes are pinned, in one range or in several.
    pub fn covers(&self, at: usize, bytes: usize) -> bool {
        let mut done = 0;
        while done < bytes {
            let (length, pinned) = self.piece(at + done, bytes - done);
            if !pinned {
                return false;
            }
            done += length;
        }
        true
    }

    /// Where the card sees these bytes, if they lie in one range that it sees.
    pub fn seen(&self, at: usize, bytes: usize) -> Option<Address> {
        let range = self.ranges.get(self.ranges.partition_point(|range| range.end <= at))?;
        let within = range.first <= at && at + bytes <= range.end;
        range.seen.filter(|_| within).map(|seen| seen + (at - range.first) as u64)
    }

    pub fn release(&mut self, driver: &Driver) {
        for range in self.ranges.drain(..) {
            // SAFETY: registered here, and no copy reads it any more.
            unsafe { (driver.f.host_unregister)(range.first as *mut c_void) };
        }
    }
}

/// The address at which the card sees pinned host memory; `None` where it does not see it.
pub fn address_of(driver: &Driver, host: *mut c_void) -> Option<Address> {
    let mut address = 0;
    // SAFETY: it writes an address. The flags must be 0.
    let code = unsafe { (driver.f.host_address)(&mut address, host, 0) };
    (code == SUCCESS).then_some(address)
}

/// Slots of the ring, and bytes of each at least: a slot holds many blocks, and the ring more than the link carries while a layer is computed.
const SLOTS: usize = 16;
const SLOT: usize = 2 << 20;
/// Blocks that the ring has room for at least: one is copied from it while another is copied to it.
const BLOCKS: usize = 2;

/// A ring of pinned memory that the CPU copies into. Copies fill a slot one behind the other; it is filled anew once all of them are done.
pub struct Staging {
    memory: *mut u8,
    /// For each slot the event after the last copy from it.
    events: Vec<CUevent>,
    /// Bytes of a slot.
    slot_bytes: usize,
    /// The slot that is being filled, and how many of its bytes are taken.
    slot: usize,
    used: usize,
}

/// Bytes of the ring that one copy uses.
#[derive(Clone, Copy)]
pub struct Staged {
    slot: usize,
    /// First byte in the slot.
    at: usize,
    /// Number of bytes.
    pub bytes: usize,
}

impl Staging {
    /// For blocks of up to so many bytes.
    pub fn new(driver: &Driver, block_bytes: usize) -> Result<Staging, Refusal> {
        let slot_bytes = SLOT.max((BLOCKS * block_bytes).div_ceil(SLOTS - 1).next_multiple_of(1 << 12));
        let mut memory = std::ptr::null_mut();
        // SAFETY: it writes an address. Flags of 0: memory that the CPU may read, too.
        let code = unsafe { (driver.f.host_alloc)(&mut memory, SLOTS * slot_bytes, 0) };
        driver.check("take pinned host memory", code)?;
        let mut staging =
            Staging { memory: memory.cast(), events: Vec::with_capacity(SLOTS), slot_bytes, slot: 0, used: 0 };
        for _ in 0..SLOTS {
            const NO_TIMES: u32 = 2;
            let mut event = std::ptr::null_mut();
            // SAFETY: it writes a handle.
            let code = unsafe { (driver.f.event_create)(&mut event, NO_TIMES) };
            if let Err(refusal) = driver.check("make an event", code) {
                staging.release(driver);
                return Err(refusal);
            }
            staging.events.push(event);
        }
        Ok(staging)
    }

    /// Bytes of the whole ring.
    pub const fn bytes(&self) -> u64 {
        (SLOTS * self.slot_bytes) as u64
    }

    /// Takes the next bytes of the ring for a copy of at most `bytes`: those that the current slot has left, or the next slot.
    pub fn take(&mut self, bytes: usize) -> Staged {
        if self.used == self.slot_bytes {
            (self.slot, self.used) = ((self.slot + 1) % SLOTS, 0);
        }
        let staged = Staged { slot: self.slot, at: self.used, bytes: bytes.min(self.slot_bytes - self.used) };
        self.used += staged.bytes;
        staged
    }

    /// How many bytes can be taken without waiting; `is_done` says whether an event is.
    pub fn room(&self, is_done: impl Fn(CUevent) -> bool) -> usize {
        let others = (1..SLOTS).map(|i| self.events[(self.slot + i) % SLOTS]);
        self.slot_bytes - self.used + others.take_while(|&event| is_done(event)).count() * self.slot_bytes
    }

    /// The event after the last copy from the slot of these bytes.
    pub fn event(&self, staged: Staged) -> CUevent {
        self.events[staged.slot]
    }

    /// The event that must be done before these bytes are written: only the first ones of a slot can still be read by an older copy.
    pub fn before(&self, staged: Staged) -> Option<CUevent> {
        (staged.at == 0).then(|| self.event(staged))
    }

    /// Copies host bytes into their slot of the ring and returns its address.
    ///
    /// # Safety
    /// The event [`Staging::before`] is done, and `from` is readable for as many bytes as were taken.
    pub unsafe fn fill(&self, staged: Staged, from: *const u8) -> *const u8 {
        // SAFETY: the slot is in the ring, which nothing else writes to; the rest is the caller's promise.
        unsafe {
            let at = self.memory.add(staged.slot * self.slot_bytes + staged.at);
            at.copy_from_nonoverlapping(from, staged.bytes);
            at
        }
    }

    pub fn release(self, driver: &Driver) {
        for event in self.events {
            // SAFETY: made here, and nothing waits for it any more.
            unsafe { (driver.f.event_destroy)(event) };
        }
        // SAFETY: taken here, and no copy reads it any more.
        unsafe { (driver.f.host_free)(self.memory.cast()) };
    }
}
