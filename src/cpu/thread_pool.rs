//! The thread pool: fork and join many times per token, cheaply, and without waiting long for a core that is busy.
//!
//! A parallel call is one call of [`ThreadPool::run`], split into tasks. Every thread takes the next free task until none is left, so a
//! thread whose core is slow or taken away holds back one task, not its share; and one that still sleeps holds back nothing: the call is over
//! when its tasks are. Threads wait for work by spinning and then sleep; the caller waits for the last task in the same way. Spinning longer
//! would win nothing where parallel calls follow each other within microseconds, and would burn the time slice that a busy machine gives
//! us. Where the caller waits for a device between two calls, threads that are to be there for the next one have to spin as long
//! ([`ThreadPool::spin`]): waking one takes some tens of microseconds.

use crate::clock::{self, Duration};
use parking_lot::{Condvar, Mutex};
use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// How long a thread spins before it sleeps, at first. Covers the serial work between two parallel calls (norms, RoPE: a few microseconds).
const SPIN: Duration = Duration::from_micros(60);
/// Spins between two looks at the clock, which costs as much as some tens of spins.
const SPINS_PER_LOOK: u32 = 64;
/// Sleeping threads that a thread wakes before it takes a task; each of them wakes as many if there are tasks left.
const WAKES: usize = 2;

/// Keeps what one thread writes often off the lines that others read.
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

struct Shared {
    /// Number of the call's tasks, times 2^32, plus the next to take. A thread that adds one and finds that a task was left has it, whatever
    /// the call was when it looked before.
    tickets: Padded<AtomicU64>,
    /// Tasks of the call that are done; before the first call, workers that are ready.
    done: Padded<AtomicUsize>,
    /// The call's closure, type erased; valid while there is a task that was taken and is not done.
    call: AtomicPtr<()>,
    closure: AtomicPtr<()>,
    /// How long threads spin, ns.
    spin: AtomicU64,
    stop: AtomicBool,
    /// Number of workers that sleep; only as much as the lock says.
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
    /// What the caller runs beside the next parallel call ([`ThreadPool::beside`]).
    beside: Option<Beside>,
}

/// A closure that [`ThreadPool::beside`] keeps alive.
struct Beside(*mut dyn FnMut());

// SAFETY: it is set and called within one call of `beside`, on its thread.
unsafe impl Send for Beside {}

type Call = unsafe fn(*const (), usize, usize);

impl ThreadPool {
    /// A pool of `threads` in all; at least one, the caller.
    pub fn new(threads: usize) -> ThreadPool {
        let shared = Arc::new(Shared {
            tickets: Padded::default(),
            done: Padded::default(),
            call: AtomicPtr::default(),
            closure: AtomicPtr::default(),
            spin: AtomicU64::new(SPIN.as_nanos() as u64),
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
            .collect::<Vec<_>>();
        // Each thread has waited once before the first parallel call: a first wait allocates.
        let mut guard = shared.lock.lock();
        shared.wake_caller.wait_for(&mut guard, Duration::ZERO);
        while shared.done.0.load(Ordering::Relaxed) < workers.len() {
            shared.wake_caller.wait(&mut guard);
        }
        drop(guard);
        ThreadPool { shared, workers, beside: None }
    }

    /// Threads of the pool, the caller among them: fewer than were asked for where the system gave no more.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// From now on threads that wait spin for so long before they sleep.
    pub fn spin(&mut self, time: Duration) {
        self.shared.spin.store(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Runs `f(thread, task)` for each task in `0..tasks`, each once, and returns when all are done. `thread` is
    /// below [`ThreadPool::threads`] and no two calls run at once with the same one. `&mut self`: one parallel call at a time.
    ///
    /// # Panics
    /// If there are 2^31 tasks or more.
    pub fn run<F: Fn(usize, usize) + Sync>(&mut self, tasks: usize, f: F) {
        if self.workers.is_empty() || tasks <= 1 {
            (0..tasks).for_each(|task| f(0, task));
            self.run_beside();
            return;
        }
        let beside = self.beside.take();
        unsafe fn call<F: Fn(usize, usize)>(closure: *const (), thread: usize, task: usize) {
            // SAFETY: `closure` is the `&f` that `run` keeps alive until every task is done.
            unsafe { (*closure.cast::<F>())(thread, task) }
        }
        assert!(tasks < 1 << 31);
        let s = &*self.shared;
        // No task of the last call is left to take, so no thread reads these.
        s.closure.store((&raw const f).cast_mut().cast(), Ordering::Relaxed);
        s.call.store(call::<F> as Call as *mut (), Ordering::Relaxed);
        s.done.0.store(0, Ordering::Relaxed);
        // SeqCst with the sleepers' count: either a worker sees the tasks or we see that it sleeps.
        s.tickets.0.store((tasks as u64) << 32, Ordering::SeqCst);
        // On the way out even when `f` panics: workers still hold a pointer to it.
        let mut join = Join { shared: s, tasks, mine: 0 };
        wake(s);
        if let Some(Beside(work)) = beside {
            // SAFETY: as in `run_beside`.
            unsafe { (*work)() };
        }
        take_tasks(s, 0, &mut join.mine);
    }

    /// Runs `work`. In its first parallel call the caller runs `beside` while the other threads have begun with the tasks; a pool of one thread
    /// runs `beside` after the tasks. Without a parallel call it is run at the end.
    pub fn beside<R>(&mut self, beside: &mut dyn FnMut(), work: impl FnOnce(&mut ThreadPool) -> R) -> R {
        struct Reset<'a>(&'a mut ThreadPool);
        impl Drop for Reset<'_> {
            fn drop(&mut self) {
                self.0.beside = None;
            }
        }
        // SAFETY: only the lifetime changes, and the pointer is gone when this returns or unwinds.
        let beside = unsafe { std::mem::transmute::<&mut dyn FnMut(), &'static mut dyn FnMut()>(beside) };
        self.beside = Some(Beside(beside));
        let pool = Reset(self);
        let result = work(&mut *pool.0);
        pool.0.run_beside();
        result
    }

    fn run_beside(&mut self) {
        if let Some(Beside(work)) = self.beside.take() {
            // SAFETY: `beside` holds the closure, which nothing else calls.
            unsafe { (*work)() };
        }
    }
}

struct Join<'a> {
    shared: &'a Shared,
    tasks: usize,
    /// Tasks that the caller has taken.
    mine: usize,
}

impl Drop for Join<'_> {
    fn drop(&mut self) {
        let s = self.shared;
        // Where a task of the caller's has panicked, some may be left that no thread has taken: they count as done.
        let mut others = self.tasks - self.mine;
        while std::thread::panicking() && left(s.tickets.0.load(Ordering::Relaxed)) > 0 {
            if left(s.tickets.0.fetch_add(1, Ordering::Relaxed)) > 0 {
                others -= 1;
            }
        }
        if spin_until(s, || s.done.0.load(Ordering::Acquire) == others) {
            return;
        }
        let mut guard = s.lock.lock();
        s.caller_sleeps.store(true, Ordering::SeqCst);
        while s.done.0.load(Ordering::SeqCst) != others {
            s.wake_caller.wait(&mut guard);
        }
        s.caller_sleeps.store(false, Ordering::Relaxed);
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        let s = &*self.shared;
        s.stop.store(true, Ordering::SeqCst);
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

/// Tasks that no thread has taken, by the tickets.
const fn left(tickets: u64) -> u64 {
    (tickets >> 32).saturating_sub(tickets & 0xffff_ffff)
}

/// Wakes some of the workers that sleep.
fn wake(s: &Shared) {
    if s.sleepers.load(Ordering::SeqCst) > 0 {
        // A thread that has counted itself and does not wait yet has the lock.
        drop(s.lock.lock());
        (0..WAKES).for_each(|_| _ = s.wake_workers.notify_one());
    }
}

fn work(s: &Shared, thread: usize) {
    {
        let mut guard = s.lock.lock();
        s.wake_workers.wait_for(&mut guard, Duration::ZERO);
        s.done.0.fetch_add(1, Ordering::Relaxed);
        s.wake_caller.notify_one();
    }
    loop {
        let called = || left(s.tickets.0.load(Ordering::SeqCst)) > 0 || s.stop.load(Ordering::SeqCst);
        if !spin_until(s, called) {
            let mut guard = s.lock.lock();
            s.sleepers.fetch_add(1, Ordering::SeqCst);
            while !called() {
                s.wake_workers.wait(&mut guard);
            }
            s.sleepers.fetch_sub(1, Ordering::Relaxed);
            drop(guard);
            if left(s.tickets.0.load(Ordering::Relaxed)) > 1 {
                wake(s);
            }
        }
        if s.stop.load(Ordering::Relaxed) {
            return;
        }
        // A panic in a task would leave the caller waiting for ever: end the process, the message is printed.
        let mut mine = 0;
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| take_tasks(s, thread, &mut mine))).is_err() {
            std::process::abort();
        }
        if mine > 0 {
            s.done.0.fetch_add(mine, Ordering::SeqCst);
            if s.caller_sleeps.load(Ordering::SeqCst) {
                let _guard = s.lock.lock();
                s.wake_caller.notify_one();
            }
        }
    }
}

/// Takes tasks until none is left, and counts them in `mine`.
fn take_tasks(s: &Shared, thread: usize, mine: &mut usize) {
    // Looks first: a needless add takes the cache line from threads that have a task to take.
    while left(s.tickets.0.load(Ordering::Relaxed)) > 0 {
        let tickets = s.tickets.0.fetch_add(1, Ordering::Acquire);
        if left(tickets) == 0 {
            return;
        }
        *mine += 1;
        // SAFETY: `run` stored a `Call` before the tickets, and stores no other before this task is done.
        let call: Call = unsafe { std::mem::transmute::<*mut (), Call>(s.call.load(Ordering::Relaxed)) };
        // SAFETY: the closure lives until all tasks are done.
        unsafe { call(s.closure.load(Ordering::Relaxed), thread, (tickets & 0xffff_ffff) as usize) };
    }
}

/// Spins until `done`, or for as long as threads spin; says whether it is done.
fn spin_until(s: &Shared, done: impl Fn() -> bool) -> bool {
    let mut start = None;
    loop {
        for _ in 0..SPINS_PER_LOOK {
            if done() {
                return true;
            }
            spin_loop();
        }
        let most = Duration::from_nanos(s.spin.load(Ordering::Relaxed));
        if start.get_or_insert_with(clock::now).elapsed() > most {
            return done();
        }
    }
}

/// A mutable slice that the tasks of a parallel call share, each its own part.
pub struct Parts<T>(*mut T, usize);

// SAFETY: it only hands out parts; that they do not overlap is the promise of `Parts::part`'s caller.
unsafe impl<T: Send> Sync for Parts<T> {}

impl<T> Parts<T> {
    /// Shares `slice`, without borrowing it: the caller of [`Parts::part`] promises that it is still valid.
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
        for (threads, spin) in [(1, 60), (2, 60), (4, 60), (4, 0)] {
            let mut pool = ThreadPool::new(threads);
            pool.spin(Duration::from_micros(spin));
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

    /// The caller's other work waits for a task that another thread has begun; alone it comes after the tasks.
    #[test]
    fn tasks_begin_before_what_the_caller_does_beside_them() {
        for (threads, tasks) in [(1, 5), (2, 1), (2, 5), (4, 100)] {
            let mut pool = ThreadPool::new(threads);
            let (begun, ran) = (AtomicU32::new(0), AtomicU32::new(0));
            let mut seen = Vec::new();
            let start = clock::now();
            let mut beside = || {
                while begun.load(Ordering::SeqCst) == 0 {
                    assert!(start.elapsed() < Duration::from_secs(60), "no task begins beside the caller");
                    std::thread::yield_now();
                }
                seen.push(begun.load(Ordering::SeqCst));
            };
            let result = pool.beside(&mut beside, |pool| {
                for _ in 0..3 {
                    pool.run(tasks, |_, _| {
                        begun.fetch_add(1, Ordering::SeqCst);
                        ran.fetch_add(1, Ordering::SeqCst);
                    });
                }
                7
            });
            assert_eq!((result, seen.len(), ran.load(Ordering::SeqCst)), (7, 1, 3 * tasks as u32));
        }
        let (mut pool, mut calls) = (ThreadPool::new(2), 0);
        pool.beside(&mut || calls += 1, |_| ());
        assert_eq!(calls, 1, "there was no parallel call");
        pool.run(4, |_, _| ());
        assert_eq!(calls, 1);
    }

    #[test]
    fn calls_that_follow_each_other_at_once_never_take_each_others_tasks() {
        let mut pool = ThreadPool::new(4);
        for call in 0..20_000u32 {
            let sum = AtomicU32::new(0);
            let tasks = 2 + call as usize % 3;
            pool.run(tasks, |_, task| _ = sum.fetch_add(call + task as u32, Ordering::Relaxed));
            let expected = call * tasks as u32 + (tasks * (tasks - 1) / 2) as u32;
            assert_eq!(sum.load(Ordering::Relaxed), expected);
        }
    }

    #[test]
    fn a_call_that_panics_is_over_before_its_closure_is_gone() {
        let mut pool = ThreadPool::new(3);
        for _ in 0..100 {
            let ran = AtomicU32::new(0);
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                // Only the caller's thread may panic: workers end the process.
                pool.run(50, |thread, _| match thread {
                    0 => std::panic::resume_unwind(Box::new("meant")),
                    _ => _ = ran.fetch_add(1, Ordering::Relaxed),
                });
            }));
            assert!(caught.is_err() || ran.load(Ordering::Relaxed) == 50);
            let before = ran.load(Ordering::Relaxed);
            pool.run(8, |_, _| {});
            assert_eq!(ran.load(Ordering::Relaxed), before);
        }
    }
}
