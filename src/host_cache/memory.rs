//! Memory for frames and for what is on its way: addresses are reserved once, and stay; how much of them may be written to changes.

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use std::ffi::c_void;
use std::io;
use std::ptr::null_mut;

/// Pages as large as the system gives begin at multiples of this.
const LARGE_PAGE: usize = 2 << 20;

/// Memory of the process's own, zero until it is written to.
pub struct Memory {
    /// What was reserved.
    reserved: *mut c_void,
    reserved_bytes: usize,
    /// Its first byte that is used, and how many bytes may be.
    start: *mut u8,
    room: usize,
    /// How many may be written to.
    bytes: usize,
}

// SAFETY: it alone owns its memory.
unsafe impl Send for Memory {}

impl Memory {
    /// No bytes yet, with addresses for `room` of them; where the system has not so many, for `least`.
    ///
    /// # Errors
    /// It has not even those.
    pub fn new(room: usize, least: usize) -> io::Result<Memory> {
        Memory::reserve(room).or_else(|_| Memory::reserve(least))
    }

    fn reserve(room: usize) -> io::Result<Memory> {
        let reserved_bytes = room + LARGE_PAGE;
        // SAFETY: new addresses, which are not accessible yet.
        let reserved = unsafe { mmap_anonymous(null_mut(), reserved_bytes, ProtFlags::empty(), MapFlags::PRIVATE) }?;
        let start = reserved.cast::<u8>().wrapping_add(reserved.align_offset(LARGE_PAGE));
        Ok(Memory { reserved, reserved_bytes, start, room, bytes: 0 })
    }

    /// Its first byte; it never moves. The caller must be the only user of the bytes that it writes through it.
    #[inline]
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// From now on it has so many bytes, whole pages: what lies behind them goes back to the system, what is added is zero.
    ///
    /// # Errors
    /// The system does not give them, or they are more than there are addresses for; then it has what it had.
    ///
    /// # Safety
    /// The memory that is given back is not in use.
    pub unsafe fn resize(&mut self, bytes: usize) -> io::Result<()> {
        if bytes > self.room {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let page = rustix::param::page_size();
        let kept = self.bytes.min(bytes).next_multiple_of(page);
        let changed = self.bytes.max(bytes).next_multiple_of(page) - kept;
        let at = self.start.wrapping_add(kept).cast::<c_void>();
        if changed == 0 {
            // The last page has room for it.
        } else if bytes > self.bytes {
            // SAFETY: these addresses are its own.
            unsafe { mprotect(at, changed, MprotectFlags::READ | MprotectFlags::WRITE) }?;
            // A layer's frames lie all over it: with small pages most reads would miss the translation cache. Advice only.
            // SAFETY: as above.
            let _ = unsafe { madvise(self.start.cast(), bytes, Advice::LinuxHugepage) };
        } else {
            // Replaces the pages by new, inaccessible ones: unlike advice, it also ends the system's promise to have memory for them.
            // SAFETY: as above, and the caller's promise.
            unsafe { mmap_anonymous(at, changed, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::FIXED) }?;
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: its users have ended. What cannot be given back stays reserved.
        let _ = unsafe { munmap(self.reserved, self.reserved_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_away_is_zero_when_it_comes_again_and_the_rest_stays() {
        let mut memory = Memory::new(8 << 20, 0).unwrap();
        let start = memory.start();
        // SAFETY: only what it has is touched.
        unsafe {
            memory.resize(6 << 20).unwrap();
            start.write_bytes(7, 6 << 20);
            memory.resize(4096).unwrap();
            memory.resize(8 << 20).unwrap();
            let bytes = std::slice::from_raw_parts(start, 8 << 20);
            assert!(bytes[..4096].iter().all(|&b| b == 7) && bytes[4096..].iter().all(|&b| b == 0));
            assert_eq!(memory.resize((8 << 20) + 4096).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        }
        assert_eq!((memory.start(), memory.bytes()), (start, 8 << 20));
    }
}
