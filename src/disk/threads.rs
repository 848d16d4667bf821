//! Reads by threads that each wait for one at a time: where io_uring is not allowed.

use super::{DEPTH, Disk, Outcome, Read, file_of};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

/// Threads: they sleep in the system most of the time, and a disk's rate needs about so many small reads at once.
const THREADS: usize = 32;

const FREE: u32 = 0;
const ASKED: u32 = 1;
const ENDED: u32 = 2;

/// A place for one read: written by the owner while it is free, by its thread while it is asked, read by the owner when it has ended.
struct Place {
    state: AtomicU32,
    read: std::cell::UnsafeCell<(Read, Outcome)>,
}

// SAFETY: `state` says whose turn it is.
unsafe impl Sync for Place {}
unsafe impl Send for Place {}

struct Shared {
    files: Vec<File>,
    places: Vec<Place>,
    stop: AtomicBool,
}

/// Threads that read some files. Place p is served by thread p modulo their number.
pub struct ReadThreads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    align: usize,
    how: &'static str,
    under_way: usize,
}

impl ReadThreads {
    /// Threads for reads of `files` whose offsets, lengths and addresses are multiples of `align`.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn new(files: Vec<File>, align: usize, how: &'static str) -> io::Result<ReadThreads> {
        let nothing = Read { number: 0, offset: 0, bytes: 0, into: std::ptr::null_mut() };
        let place = |_| Place { state: AtomicU32::new(FREE), read: (nothing, Ok(0)).into() };
        let shared = Arc::new(Shared { files, places: (0..DEPTH).map(place).collect(), stop: AtomicBool::new(false) });
        let start = |thread: usize| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name(format!("disk-{thread}")).spawn(move || work(&shared, thread))
        };
        let threads = (0..THREADS).map(start).collect::<io::Result<Vec<_>>>()?;
        Ok(ReadThreads { shared, threads, align, how, under_way: 0 })
    }
}

fn work(shared: &Shared, thread: usize) {
    while !shared.stop.load(Ordering::Acquire) {
        for place in shared.places.iter().skip(thread).step_by(THREADS) {
            if place.state.load(Ordering::Acquire) != ASKED {
                continue;
            }
            // SAFETY: it is asked, so it is this thread's; the read's memory is there by the promise of `begin`.
            unsafe {
                let (read, outcome) = &mut *place.read.get();
                let into = std::slice::from_raw_parts_mut(read.into, read.bytes);
                let (file, offset) = file_of(read.offset);
                let got = shared.files[file].read_at(into, offset);
                *outcome = got.map_err(|e| e.raw_os_error().unwrap_or(libc::EIO));
            }
            place.state.store(ENDED, Ordering::Release);
        }
        let asked = |place: &Place| place.state.load(Ordering::Acquire) == ASKED;
        if !shared.places.iter().skip(thread).step_by(THREADS).any(asked) {
            std::thread::park();
        }
    }
}

impl Disk for ReadThreads {
    fn name(&self) -> String {
        format!("{THREADS} threads, {}", self.how)
    }

    fn align(&self) -> usize {
        self.align
    }

    unsafe fn begin(&mut self, reads: &[Read]) {
        let mut places = self.shared.places.iter().enumerate();
        for read in reads {
            let free = places.find(|(_, place)| place.state.load(Ordering::Acquire) == FREE);
            let (at, place) = free.expect("more reads than there are places");
            // SAFETY: it is free, so it is the owner's.
            unsafe { (*place.read.get()).0 = *read };
            place.state.store(ASKED, Ordering::Release);
            self.threads[at % THREADS].thread().unpark();
            self.under_way += 1;
        }
    }

    fn ended(&mut self, wait: bool, done: &mut dyn FnMut(u32, Outcome)) {
        loop {
            let mut told = 0;
            for place in self.shared.places.iter().filter(|place| place.state.load(Ordering::Acquire) == ENDED) {
                // SAFETY: it has ended, so it is the owner's again.
                let (read, outcome) = unsafe { *place.read.get() };
                place.state.store(FREE, Ordering::Release);
                done(read.number, outcome);
                told += 1;
            }
            self.under_way -= told;
            if told > 0 || !wait || self.under_way == 0 {
                return;
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for ReadThreads {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // One that panicked has printed why.
            let _ = thread.join();
        }
    }
}
