//! Survival of pages that can no longer be read: a mapped file was cut short, or its disk has failed.
//!
//! Reading such a page raises SIGBUS, which ends a process. A program that must live on calls [`survive`] once: from then on zeros
//! take the range of what cannot be read, and it is noted which file that was. Code that computes with a mapped file must then ask
//! [`super::MappedFile::is_whole`] before using the result. A program that does not call [`survive`] ends as it would without this.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Most maps that are watched over; a bad page of any further one ends the process. An open model is a store and a few predictors; a
/// model that is being packed has as many files as it was published in.
const RANGES: usize = 1024;

/// A map's addresses, for a signal handler to read at any moment.
struct GuardedRange {
    taken: AtomicBool,
    /// Odd while the addresses change.
    version: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

static TABLE: [GuardedRange; RANGES] = [const {
    GuardedRange {
        taken: AtomicBool::new(false),
        version: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; RANGES];

impl GuardedRange {
    fn set(&self, start: usize, end: usize) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.end.store(end, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// The map's end, if `address` lies in it.
    fn end_of(&self, address: usize) -> Option<usize> {
        let version = self.version.load(Ordering::SeqCst);
        let (start, end) = (self.start.load(Ordering::SeqCst), self.end.load(Ordering::SeqCst));
        let whole = version.is_multiple_of(2) && self.version.load(Ordering::SeqCst) == version;
        (whole && (start..end).contains(&address)).then_some(end)
    }
}

/// A map that is watched over for as long as this lives; that is no longer than the map.
#[derive(Debug)]
pub(super) struct Guarded(usize);

impl Guarded {
    /// `None` where all places are taken.
    pub fn new(map: &[u8]) -> Option<Guarded> {
        let take = |range: &GuardedRange| !range.taken.swap(true, Ordering::SeqCst);
        let at = TABLE.iter().position(take)?;
        TABLE[at].lost.store(false, Ordering::SeqCst);
        TABLE[at].set(map.as_ptr().addr(), map.as_ptr().addr() + map.len());
        Some(Guarded(at))
    }

    /// Whether no page of the map has been replaced by zeros.
    pub fn is_whole(&self) -> bool {
        !TABLE[self.0].lost.load(Ordering::Acquire)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        TABLE[self.0].set(0, 0);
        TABLE[self.0].taken.store(false, Ordering::SeqCst);
    }
}

/// The handler that was there before: the standard library's, which reports overflowing stacks.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
static PAGE: AtomicUsize = AtomicUsize::new(0);

/// From now on a page of a mapped file that cannot be read is zeros. To be called once per process; `false` if the system refuses.
pub fn survive() -> bool {
    PAGE.store(rustix::param::page_size(), Ordering::SeqCst);
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a plain struct whose zeros mean no flags and an empty mask.
    let mut ours: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    ours.sa_sigaction = on_bus_error as extern "C" fn(_, _, _) as usize;
    // On the stack that the standard library gives each thread for signals.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: both are valid for the call; the handler does only what a handler may.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, before.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: the call has filled it.
    let _ = BEFORE.set(unsafe { before.assume_init() });
    true
}

/// May interrupt the program at any range, so it uses atomics and system calls only.
extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: SA_SIGINFO: the kernel gives a valid one, and SIGBUS has an address in it.
    let address = unsafe { (*info).si_addr() }.addr();
    for range in &TABLE {
        let Some(end) = range.end_of(address) else { continue };
        let from = address & !(PAGE.load(Ordering::Relaxed) - 1);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // Noted before the zeros are mapped: a thread that reads them finds the note, too.
        range.lost.store(true, Ordering::Release);
        // Zeros to the end of the map at once: a file that was cut has lost everything from here on.
        // SAFETY: the addresses are those of a read-only map that is there as long as its range in the table; it reads zeros now.
        if unsafe { mmap_anonymous(from as *mut _, end - from, ProtFlags::READ, flags) }.is_ok() {
            return;
        }
    }
    // Not one of our maps: with the former handler back, the instruction is tried again and the process ends as it would have.
    if let Some(before) = BEFORE.get() {
        // SAFETY: what `sigaction` has given.
        unsafe { libc::sigaction(libc::SIGBUS, before, std::ptr::null_mut()) };
    } else {
        // SAFETY: takes no memory and never returns.
        unsafe { libc::abort() };
    }
}
