//! The thread pool: fork and join many times per token, cheaply, and without waiting long for a core that is busy.
//!
//! A parallel call is one call of [`ThreadPool::run`], split into tasks. Every thread takes the next free task until none is left, so a
//! thread whose core is slow or taken away holds back one task, not its share. Threads wait for work by spinning for `SPIN` and then sleep;
//! the caller waits for the last task in the same way. Spinning longer would win nothing on an idle machine (parallel calls follow each
//! other within microseconds) and would burn the time slice that a busy machine gives us.

use crate::clock::{self, Duration};
use parking_lot::{Condvar, Mutex};
use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// Longest spin before sleeping. Covers the serial work between two parallel calls (norms, RoPE: a few microseconds).
const SPIN: Duration = Duration::from_micros(60);
/// Spins between two looks at the clock, which costs as much as some tens of spins.
const SPINS_PER_LOOK: u32 = 64;

/// Keeps what one thread writes often off the lines that others read.
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

struct Shared {
    /// Number of the parallel call that is running; a change is the start signal.
    call_number: Padded<AtomicU64>,
    /// Next task to take.
    next: Padded<AtomicUsize>,
    /// Workers that have not finished the parallel call.
    busy: Padded<AtomicUsize>,
    tasks: AtomicUsize,
    /// The parallel call's closure, type erased; valid from the start signal until `busy` is zero.
    call: AtomicPtr<()>,
    closure: AtomicPtr<()>,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    caller_sleeps: AtomicBool,
    lock: Mutex<()>,
    wake_workers: Condvar,
    wake_caller: Condvar,
}

/// A fixed set of threads, the caller being one of them. One pool per process: two would spin against each other.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<std::thread::JoinHandle<()>>,
}

type Call = unsafe fn(*const (), usize, usize);

impl ThreadPool {
    /// A pool of `threads` in all; at least one, the caller.
    pub fn new(threads: usize) -> ThreadPool {
        let shared = Arc::new(Shared {
            call_number: Padded::default(),
            next: Padded::default(),
            busy: Padded::default(),
            tasks: AtomicUsize::new(0),
            call: AtomicPtr::default(),
            closure: AtomicPtr::default(),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake_workers: Condvar::new(),
            wake_caller: Condvar::new(),
        });
        let workers = (1..threads.max(1))
            .map(|thread| {
                let shared = shared.clone();
                std::thread::Builder::new().name(format!("pool-{thread}")).spawn(move || work(&shared, thread))
            })
            // Where the system gives no more threads, those that there are do the work: it is the same, and slower.
            .map_while(std::io::Result::ok)
            .collect();
        ThreadPool { shared, workers }
    }

    /// Threads of the pool, the caller among them: fewer than were asked for where the system gave no more.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `f(thread, task)` for each task in `0..tasks`, each once, and returns when all are done. `thread` is
    /// below [`ThreadPool::threads`] and no two calls run at once with the same one. `&mut self`: one parallel call at a time.
    pub fn run<F: Fn(usize, usize) + Sync>(&mut self, tasks: usize, f: F) {
        if self.workers.is_empty() || tasks <= 1 {
            (0..tasks).for_each(|task| f(0, task));
            return;
        }
        unsafe fn call<F: Fn(usize, usize)>(closure: *const (), thread: usize, task: usize) {
            // SAFETY: `closure` is the `&f` that `run` keeps alive until every worker has left the parallel call.
            unsafe { (*closure.cast::<F>())(thread, task) }
        }
        let s = &*self.shared;
        s.closure.store((&raw const f).cast_mut().cast(), Ordering::Relaxed);
        s.call.store(call::<F> as Call as *mut (), Ordering::Relaxed);
        s.tasks.store(tasks, Ordering::Relaxed);
        s.next.0.store(0, Ordering::Relaxed);
        s.busy.0.store(self.workers.len(), Ordering::Relaxed);
        // SeqCst with the sleepers' count: either a worker sees the new parallel call or we see that it sleeps.
        s.call_number.0.fetch_add(1, Ordering::SeqCst);
        if s.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = s.lock.lock();
            s.wake_workers.notify_all();
        }
        // Joins on the way out even when `f` panics: workers still hold a pointer to it.
        let _join = Join(s);
        take_tasks(s, 0);
    }
}

struct Join<'a>(&'a Shared);

impl Drop for Join<'_> {
    fn drop(&mut self) {
        let s = self.0;
        if spin_until(|| s.busy.0.load(Ordering::Acquire) == 0) {
            return;
        }
        let mut guard = s.lock.lock();
        s.caller_sleeps.store(true, Ordering::SeqCst);
        while s.busy.0.load(Ordering::SeqCst) != 0 {
            s.wake_caller.wait(&mut guard);
        }
        s.caller_sleeps.store(false, Ordering::Relaxed);
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        let s = &*self.shared;
        s.stop.store(true, Ordering::Relaxed);
        s.call_number.0.fetch_add(1, Ordering::SeqCst);
        {
            let _guard = s.lock.lock();
            s.wake_workers.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker that panicked has printed why; the caller saw it as an abort.
            let _ = worker.join();
        }
    }
}

fn work(s: &Shared, thread: usize) {
    let mut seen = 0;
    loop {
        if !spin_until(|| s.call_number.0.load(Ordering::Acquire) != seen) {
            let mut guard = s.lock.lock();
            s.sleepers.fetch_add(1, Ordering::SeqCst);
            while s.call_number.0.load(Ordering::SeqCst) == seen {
                s.wake_workers.wait(&mut guard);
            }
            s.sleepers.fetch_sub(1, Ordering::Relaxed);
        }
        seen = s.call_number.0.load(Ordering::Acquire);
        if s.stop.load(Ordering::Relaxed) {
            return;
        }
        // A panic in a task would leave the caller waiting for ever: end the process, the message is printed.
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| take_tasks(s, thread))).is_err() {
            std::process::abort();
        }
        if s.busy.0.fetch_sub(1, Ordering::SeqCst) == 1 && s.caller_sleeps.load(Ordering::SeqCst) {
            let _guard = s.lock.lock();
            s.wake_caller.notify_one();
        }
    }
}

fn take_tasks(s: &Shared, thread: usize) {
    let tasks = s.tasks.load(Ordering::Relaxed);
    let closure = s.closure.load(Ordering::Relaxed);
    // SAFETY: `run` stored a `Call` before the start signal.
    let call: Call = unsafe { std::mem::transmute::<*mut (), Call>(s.call.load(Ordering::Relaxed)) };
    loop {
        let task = s.next.0.fetch_add(1, Ordering::Relaxed);
        if task >= tasks {
            return;
        }
        // SAFETY: the closure lives until all workers have left the parallel call.
        unsafe { call(closure, thread, task) };
    }
}

/// Spins until `done` or for [`SPIN`]; says whether it is done.
fn spin_until(done: impl Fn() -> bool) -> bool {
    let mut start = None;
    loop {
        for _ in 0..SPINS_PER_LOOK {
            if done() {
                return true;
            }
            spin_loop();
        }
        if start.get_or_insert_with(clock::now).elapsed() > SPIN {
            return done();
        }
    }
}

/// A mutable slice that the tasks of a parallel call share, each its own part.
pub struct Parts<T>(*mut T, usize);

// SAFETY: it only hands out parts; that they do not overlap is the promise of `Parts::part`'s caller.
unsafe impl<T: Send> Sync for Parts<T> {}

impl<T> Parts<T> {
    /// Shares `slice`, without borrowing it: whoever calls [`Parts::part`] promises that it is still there.
    pub fn new(slice: &mut [T]) -> Parts<T> {
        Parts(slice.as_mut_ptr(), slice.len())
    }

    /// The slice's first element, for kernels that write with a stride. What threads write through it must not overlap either.
    pub fn start(&self) -> *mut T {
        self.0
    }

    /// The elements `range` of the slice.
    ///
    /// # Safety
    /// The slice is still there, and no two parts that are alive at the same time overlap.
    ///
    /// # Panics
    /// If `range` is not within the slice.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, range: std::ops::Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.1);
        // SAFETY: in bounds; disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_piece_of_every_region_runs_once() {
        for threads in [1, 2, 4] {
            let mut pool = ThreadPool::new(threads);
            for tasks in [0, 1, 2, 7, 100] {
                for _ in 0..200 {
                    let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                    pool.run(tasks, |thread, task| {
                        assert!(thread < threads);
                        counts[task].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }
}
