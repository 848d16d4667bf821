//! An allocator with a limit, of a test program or a fuzz target that names this file as a module.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator within a limit.
pub struct Limited;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// Bytes that are allocated, and the most that may be.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

impl Limited {
    /// Limits what is allocated from now on; `usize::MAX` ends the limit.
    pub fn from_here(bytes: usize) {
        let live = LIVE.load(Ordering::Relaxed);
        LIMIT.store(live.saturating_add(bytes), Ordering::Relaxed);
    }
}

// SAFETY: every call is the system allocator's own, or answers that there is no memory.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed).saturating_add(layout.size());
        if live <= LIMIT.load(Ordering::Relaxed) {
            // SAFETY: the caller's contract is passed on.
            return unsafe { System.alloc(layout) };
        }
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        std::ptr::null_mut()
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}
