//! Reads on their way: which are under way, which have ended, and who waits for them.
//!
//! The engine's thread lists reads and lets a part of them begin. During a parallel call any thread may wait for one. Whoever waits looks
//! after the disk meanwhile, one thread at a time: it takes the ends of reads, begins those that are next, and asks again for what came
//! short or failed. Nobody waits for that turn: who does not get it looks for its own read only.

use crate::clock;
use crate::disk::{DEPTH, Disk, Outcome, Read};
use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// How often a read that fails is asked for once more.
const TRIES: u8 = 3;
/// Looks at a read before the thread that looks after the disk goes to sleep until one ends, and others give up their core: about as long
/// as waking takes.
const LOOKS: u32 = 2000;

const COMING: u32 = 0;
const HERE: u32 = 1;
const LOST: u32 = 2;

/// What to read: the bytes from `offset` on, to `into`. Of `bytes` the first `needed` must come; a file may end behind them.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// From the beginning of the file.
    pub offset: u64,
    /// Bytes that are asked for.
    pub bytes: usize,
    /// Bytes that must come.
    pub needed: usize,
    /// Where they go.
    pub into: *mut u8,
}

/// A read that failed for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadFault {
    /// Where in the file.
    pub offset: u64,
    /// The system's error number; `None` where the file ended too early.
    pub errno: Option<i32>,
}

/// What was read so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadCounts {
    /// Reads that have ended.
    pub reads: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Reads that were asked for once more.
    pub again: u64,
}

/// Reads, in the order in which they begin.
pub struct Reads {
    turn: AtomicBool,
    /// Of whoever has the turn, or of the owner while no parallel call runs.
    disk: UnsafeCell<UnderWay>,
    /// For each listed read, what has become of it.
    states: Box<[AtomicU32]>,
    /// Nanoseconds that threads have waited, all together.
    waited_ns: AtomicU64,
}

// SAFETY: `disk` is touched by whoever has the turn only.
unsafe impl Sync for Reads {}
// SAFETY: the pointers in it are of memory that goes where it goes.
unsafe impl Send for Reads {}

struct UnderWay {
    disk: Box<dyn Disk>,
    /// What is listed: what is left of it, and how often it failed.
    jobs: Vec<(Job, u8)>,
    /// The first that has not begun, and the end of those that may.
    next: usize,
    allowed: usize,
    in_flight: usize,
    again: Vec<u32>,
    batch: Vec<Read>,
    fault: Option<ReadFault>,
    counts: ReadCounts,
}

impl Reads {
    /// None yet; room for `most` at a time.
    pub fn new(disk: Box<dyn Disk>, most: usize) -> Reads {
        let under_way = UnderWay {
            disk,
            jobs: Vec::with_capacity(most),
            next: 0,
            allowed: 0,
            in_flight: 0,
            again: Vec::with_capacity(DEPTH),
            batch: Vec::with_capacity(DEPTH),
            fault: None,
            counts: ReadCounts::default(),
        };
        Reads {
            turn: AtomicBool::new(false),
            disk: UnsafeCell::new(under_way),
            states: (0..most).map(|_| AtomicU32::new(COMING)).collect(),
            waited_ns: AtomicU64::new(0),
        }
    }

    /// Forgets all reads; none is under way.
    pub fn clear(&mut self) {
        let way = self.disk.get_mut();
        assert_eq!(way.in_flight, 0, "reads are under way");
        way.jobs.clear();
        (way.next, way.allowed) = (0, 0);
    }

    /// Lists a read and returns its number.
    ///
    /// # Panics
    /// If more are listed than there is room for.
    pub fn list(&mut self, job: Job) -> u32 {
        let way = self.disk.get_mut();
        let number = way.jobs.len();
        *self.states[number].get_mut() = COMING;
        way.jobs.push((job, 0));
        number as u32
    }

    /// How many are listed.
    pub fn listed(&mut self) -> usize {
        self.disk.get_mut().jobs.len()
    }

    /// Takes back the listed reads from number `count` on, which have not begun.
    pub fn forget(&mut self, count: usize) {
        let way = self.disk.get_mut();
        assert!(way.allowed <= count, "what may have begun cannot be taken back");
        way.jobs.truncate(count);
    }

    /// The first `count` reads may begin, and as many do as the disk takes.
    ///
    /// # Safety
    /// Until each has ended, its memory is there and nobody else uses it.
    pub unsafe fn allow(&mut self, count: usize) {
        let Reads { disk, states, .. } = self;
        let way = disk.get_mut();
        way.allowed = way.allowed.max(count);
        way.look_after(states, false);
    }

    /// Waits until every read that may begin has ended.
    pub fn finish(&mut self) {
        let Reads { disk, states, .. } = self;
        let way = disk.get_mut();
        while way.in_flight > 0 || way.next < way.allowed || !way.again.is_empty() {
            way.look_after(states, true);
        }
    }

    /// Whether a read is there; `false` also if it never will be.
    #[inline]
    pub fn is_here(&self, number: u32) -> bool {
        self.states[number as usize].load(Ordering::Acquire) == HERE
    }

    /// Waits for a read. Returns whether its bytes are there; `false` once it has failed for good.
    pub fn wait(&self, number: u32) -> bool {
        let state = &self.states[number as usize];
        let ended = || match state.load(Ordering::Acquire) {
            COMING => None,
            state => Some(state == HERE),
        };
        if let Some(here) = ended() {
            return here;
        }
        let begin = clock::now();
        let mut looks = 0;
        let here = loop {
            if let Some(here) = ended() {
                break here;
            }
            looks += 1;
            if !self.turn.load(Ordering::Relaxed) && !self.turn.swap(true, Ordering::Acquire) {
                // SAFETY: this thread has the turn.
                let way = unsafe { &mut *self.disk.get() };
                way.look_after(&self.states, looks > LOOKS && ended().is_none());
                self.turn.store(false, Ordering::Release);
            } else if looks > LOOKS {
                std::thread::yield_now();
            }
            spin_loop();
        };
        self.waited_ns.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        here
    }

    /// Waits for reads, whatever becomes of them.
    pub fn wait_for(&self, numbers: Range<u32>) {
        for number in numbers {
            self.wait(number);
        }
    }

    /// The first read that failed for good since this was last asked.
    pub fn take_fault(&mut self) -> Option<ReadFault> {
        self.disk.get_mut().fault.take()
    }

    /// What was read so far, and nanoseconds that threads have waited for it, all together.
    pub fn counts(&mut self) -> (ReadCounts, u64) {
        (self.disk.get_mut().counts, *self.waited_ns.get_mut())
    }

    /// The disk, while nothing is under way.
    pub fn disk(&mut self) -> &mut dyn Disk {
        let way = self.disk.get_mut();
        assert_eq!(way.in_flight, 0, "reads are under way");
        &mut *way.disk
    }
}

impl UnderWay {
    /// Takes the ends of reads, waiting for one if `wait`, and begins what is next.
    fn look_after(&mut self, states: &[AtomicU32], wait: bool) {
        let UnderWay { disk, jobs, next, allowed, in_flight, again, batch, fault, counts } = self;
        if *in_flight > 0 {
            let align = disk.align();
            disk.ended(wait, &mut |number, outcome| {
                *in_flight -= 1;
                let state = &states[number as usize];
                match after(&mut jobs[number as usize], outcome, align, counts) {
                    After::Here => state.store(HERE, Ordering::Release),
                    After::Again => again.push(number),
                    After::Lost(why) => {
                        fault.get_or_insert(why);
                        state.store(LOST, Ordering::Release);
                    }
                }
            });
        }
        batch.clear();
        while *in_flight + batch.len() < DEPTH {
            let number = match again.pop() {
                Some(number) => number as usize,
                None if next < allowed => {
                    *next += 1;
                    *next - 1
                }
                None => break,
            };
            let Job { offset, bytes, into, .. } = jobs[number].0;
            batch.push(Read { number: number as u32, offset, bytes, into });
        }
        if !batch.is_empty() {
            *in_flight += batch.len();
            // SAFETY: `allow` has its caller's promise.
            unsafe { disk.begin(batch) };
        }
    }
}

enum After {
    Here,
    Again,
    Lost(ReadFault),
}

/// What becomes of a read that has ended like this; what is left of it is asked for again.
fn after((job, failed): &mut (Job, u8), outcome: Outcome, align: usize, counts: &mut ReadCounts) -> After {
    counts.reads += 1;
    let lost = |errno, job: &Job| After::Lost(ReadFault { offset: job.offset, errno });
    match outcome {
        Ok(bytes) => {
            counts.bytes += bytes as u64;
            if bytes >= job.needed {
                return After::Here;
            }
            // Direct reads go on at multiples of the alignment.
            let whole = bytes / align * align;
            if whole == 0 {
                *failed += 1;
                if *failed > TRIES || bytes == 0 {
                    return lost(None, job);
                }
            }
            job.offset += whole as u64;
            job.bytes -= whole;
            job.needed -= whole;
            job.into = job.into.wrapping_add(whole);
        }
        Err(libc::EINTR | libc::EAGAIN) => {}
        Err(errno) => {
            *failed += 1;
            if *failed > TRIES {
                return lost(Some(errno), job);
            }
        }
    }
    counts.again += 1;
    After::Again
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Faults, VirtualDisk};
    use crate::host_cache::memory::Memory;
    use std::io::Write;

    const PIECE: usize = 4096;

    fn file(pieces: usize) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..pieces * PIECE).map(|i| (i / PIECE * 31 + i % 13) as u8).collect();
        file.write_all(&bytes).unwrap();
        file
    }

    /// Lists all pieces of a file of `pieces`, of which it has `there`.
    fn all(there: usize, pieces: usize, faults: Faults, seed: u64) -> (Reads, Memory) {
        let disk = VirtualDisk::new(file(there).reopen().unwrap(), 512, seed, faults);
        let (mut reads, mut memory) = (Reads::new(Box::new(disk), pieces), Memory::new(pieces * PIECE).unwrap());
        for piece in 0..pieces {
            let into = memory.start().wrapping_add(piece * PIECE);
            reads.list(Job { offset: (piece * PIECE) as u64, bytes: PIECE, needed: PIECE, into });
        }
        (reads, memory)
    }

    #[test]
    fn failed_and_short_reads_are_asked_for_again_until_all_is_there() {
        for seed in 0..20 {
            let faults = Faults { fail: 0.2, short: 0.4, late: 3, ..Faults::default() };
            let (mut reads, mut memory) = all(100, 100, faults, seed);
            // SAFETY: the memory outlives them.
            unsafe { reads.allow(100) };
            let here: Vec<bool> = (0..100).map(|n| reads.wait(n)).collect();
            reads.finish();
            assert_eq!(reads.counts().0.bytes >= 100 * PIECE as u64, !here.contains(&false));
            // By chance one of a hundred may fail four times in a row.
            let fault = reads.take_fault();
            assert_eq!(here.contains(&false), fault.is_some());
            for piece in (0..100).filter(|&p| here[p]) {
                // SAFETY: nothing is under way.
                let got = unsafe { std::slice::from_raw_parts(memory.start().wrapping_add(piece * PIECE), PIECE) };
                assert!(got.iter().enumerate().all(|(i, &b)| b == (piece * 31 + (piece * PIECE + i) % 13) as u8));
            }
            assert!(reads.counts().0.again > 0);
        }
    }

    #[test]
    fn what_fails_for_good_is_named_and_the_others_come() {
        let bad = 7 * PIECE as u64 + 100;
        let (mut reads, _memory) = all(20, 20, Faults { bad_byte: Some(bad), ..Faults::default() }, 1);
        // SAFETY: the memory outlives them.
        unsafe { reads.allow(20) };
        assert!((0..20).all(|n| reads.wait(n) == (n != 7)));
        let expected = ReadFault { offset: 7 * PIECE as u64, errno: Some(libc::EIO) };
        assert_eq!((reads.take_fault(), reads.take_fault()), (Some(expected), None));
    }

    #[test]
    fn a_file_that_was_cut_is_a_fault_without_an_error_of_the_system() {
        let (mut reads, _memory) = all(5, 7, Faults::default(), 1);
        // SAFETY: the memory outlives them.
        unsafe { reads.allow(7) };
        assert!((0..7).all(|n| reads.wait(n) == (n < 5)));
        let fault = reads.take_fault().unwrap();
        assert!(fault.errno.is_none() && [5, 6].contains(&(fault.offset / PIECE as u64)), "{fault:?}");
    }

    /// Many threads wait for reads in different orders; each read begins once.
    #[test]
    fn threads_that_wait_together_all_get_theirs() {
        for seed in 0..10 {
            let (mut reads, _memory) = all(300, 300, Faults { late: 2, ..Faults::default() }, seed);
            // SAFETY: the memory outlives them.
            unsafe { reads.allow(150) };
            let shared = &reads;
            std::thread::scope(|scope| {
                for thread in 0..4u32 {
                    scope.spawn(move || (0..150).for_each(|i| assert!(shared.wait((i * 7 + thread * 31) % 150))));
                }
            });
            assert!(!reads.is_here(150), "it was not allowed to begin");
            assert_eq!(reads.counts().0.reads, 150);
            // SAFETY: as above.
            unsafe { reads.allow(300) };
            reads.finish();
            assert!((0..300).all(|n| reads.is_here(n)) && reads.counts().0.reads == 300);
        }
    }
}
