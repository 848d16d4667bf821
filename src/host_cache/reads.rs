//! Reads in flight: which are under way, which have ended, and which threads wait for them.
//!
//! The engine's thread lists reads and lets a part of them begin. During a parallel call any thread may wait for one. A waiting
//! thread serves the disk meanwhile, one thread at a time: it takes completions, starts the next reads, verifies the data against its
//! checksums, and repeats reads that were short, failed or wrong. No thread waits for that turn: the others poll their own read only.
//!
//! There is a list for the layer at hand and one for each layer that is looked ahead to. Reads of a later list begin when none of an earlier
//! one is left to begin.

use super::checksums::{Check, Checksums};
use super::fault::{ReadFault, TRIES, Unread};
use crate::clock;
use crate::disk::{DEPTH, Disk, Outcome, Read};
use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

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

/// What was read so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadCounts {
    /// Reads that have ended.
    pub reads: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Reads that were asked for once more.
    pub again: u64,
    /// Neurons, of experts their matrices, that were compared with their checksums and right, and their bytes: each once.
    pub verified: u64,
    /// See above.
    pub verified_bytes: u64,
}

/// Layers that are looked ahead to, at most.
pub const MAX_AHEAD: usize = 3;
/// The layer at hand, and those.
const LISTS: usize = MAX_AHEAD + 1;

/// Reads, list by list in the order in which they begin.
pub struct Reads {
    turn: AtomicBool,
    /// Used by the thread that has the turn, or by the owner while no parallel call runs.
    disk: UnsafeCell<UnderWay>,
    /// For each listed read, what has become of it: number n of list l at `l * most + n`.
    states: Box<[AtomicU32]>,
    /// Reads that a list has room for.
    most: usize,
    /// The list of the layer at hand; that of the layer `ahead` of it is so many behind it, in a ring.
    first: usize,
    /// Nanoseconds that threads have waited, all together.
    waited_ns: AtomicU64,
}

// SAFETY: only the thread that has the turn uses `disk`.
unsafe impl Sync for Reads {}
// SAFETY: the pointers in it are of memory that goes where it goes.
unsafe impl Send for Reads {}

struct UnderWay {
    disk: Box<dyn Disk>,
    lists: [List; LISTS],
    in_flight: usize,
    again: Vec<u32>,
    /// Reads that have ended and are to be compared.
    arrived: Vec<u32>,
    checksums: Checksums,
    batch: Vec<Read>,
    /// Listed reads that have failed for good, by their numbers.
    faults: Vec<(u32, ReadFault)>,
    counts: ReadCounts,
}

/// The reads of one layer.
#[derive(Default)]
struct List {
    jobs: Vec<Listed>,
    /// What is compared of each, one after the other.
    checks: Vec<Check>,
    /// The first that has not begun, and the end of those that may.
    next: usize,
    allowed: usize,
    /// How many have ended.
    ended: usize,
}

/// A read and what is known of it.
struct Listed {
    job: Job,
    /// What of it has not come yet.
    left: Job,
    /// How often it failed or was wrong.
    failed: u8,
    /// Which of the list's checks are its.
    checks: Range<usize>,
}

impl Reads {
    /// None yet; room for `most` of a layer at a time. What they bring is compared with these checksums.
    pub fn new(disk: Box<dyn Disk>, most: usize, checksums: Checksums) -> Reads {
        let list = |_| List {
            jobs: Vec::with_capacity(most),
            checks: Vec::with_capacity(checksums.most()),
            ..List::default()
        };
        let under_way = UnderWay {
            disk,
            lists: std::array::from_fn(list),
            in_flight: 0,
            again: Vec::with_capacity(DEPTH),
            arrived: Vec::with_capacity(DEPTH),
            checksums,
            batch: Vec::with_capacity(DEPTH),
            faults: Vec::new(),
            counts: ReadCounts::default(),
        };
        Reads {
            turn: AtomicBool::new(false),
            disk: UnsafeCell::new(under_way),
            states: (0..LISTS * most).map(|_| AtomicU32::new(COMING)).collect(),
            most,
            first: 0,
            waited_ns: AtomicU64::new(0),
        }
    }

    /// The list of the layer `ahead` of that at hand.
    fn at(&self, ahead: usize) -> usize {
        assert!(ahead < LISTS, "beyond the largest prefetch distance");
        (self.first + ahead) % LISTS
    }

    /// The layer `ahead` of that at hand is at hand from now on. The reads of those before it have ended, and are forgotten.
    pub fn advance(&mut self, ahead: usize) {
        for passed in 0..ahead.min(LISTS) {
            self.clear(passed);
        }
        self.first = (self.first + ahead) % LISTS;
    }

    /// Forgets the reads of a list; none is under way.
    pub fn clear(&mut self, ahead: usize) {
        let (at, most) = (self.at(ahead), self.most);
        let way = self.disk.get_mut();
        way.faults.retain(|(number, _)| *number as usize / most != at);
        let list = &mut way.lists[at];
        assert_eq!(list.ended, list.allowed, "reads are under way");
        list.jobs.clear();
        list.checks.clear();
        (list.next, list.allowed, list.ended) = (0, 0, 0);
    }

    /// Adds a read to a list and returns its number.
    ///
    /// # Panics
    /// If more are listed than there is room for.
    pub fn list(&mut self, ahead: usize, job: Job) -> u32 {
        let at = self.at(ahead);
        let list = &mut self.disk.get_mut().lists[at];
        assert!(list.jobs.len() < self.most, "more reads than there is room for");
        let number = at * self.most + list.jobs.len();
        *self.states[number].get_mut() = COMING;
        let checks = list.checks.len()..list.checks.len();
        list.jobs.push(Listed { job, left: job, failed: 0, checks });
        number as u32
    }

    /// Lets the read that was listed last be compared, unless that was done before.
    #[inline]
    pub fn check(&mut self, ahead: usize, check: Check) {
        let at = self.at(ahead);
        let UnderWay { lists, checksums, .. } = self.disk.get_mut();
        let List { jobs, checks, .. } = &mut lists[at];
        if let (true, Some(last)) = (checksums.is_open(check.layer, check.piece), jobs.last_mut()) {
            checks.push(check);
            last.checks.end = checks.len();
        }
    }

    /// How many are listed.
    pub fn listed(&mut self, ahead: usize) -> usize {
        let at = self.at(ahead);
        self.disk.get_mut().lists[at].jobs.len()
    }

    /// Takes back the reads of a list behind the first `count`, which have not begun.
    pub fn forget(&mut self, ahead: usize, count: usize) {
        let at = self.at(ahead);
        let list = &mut self.disk.get_mut().lists[at];
        assert!(list.allowed <= count, "what may have begun cannot be taken back");
        list.jobs.truncate(count);
        list.checks.truncate(list.jobs.last().map_or(0, |last| last.checks.end));
    }

    /// Compares pieces that several reads may have brought, all of which have ended, and asks again for those that brought a wrong one until all
    /// are right or one has failed for good. The first of the reads goes to `start`, each other `stride` bytes behind that before it.
    pub fn verify(
        &mut self,
        numbers: Range<u32>,
        (start, stride): (*const u8, usize),
        checks: impl Iterator<Item = Check> + Clone,
    ) {
        while numbers.clone().all(|number| self.is_here(number)) {
            let UnderWay { checksums, lists, .. } = self.disk.get_mut();
            let is_open = |check: &Check| checksums.is_open(check.layer, check.piece);
            // SAFETY: they have ended, and nothing else writes there.
            let is_wrong = |check: &Check| !unsafe { checksums.is_right(*check, start) };
            let Some(wrong) = checks.clone().filter(is_open).find(is_wrong) else {
                checks.for_each(|check| checksums.close(check));
                return;
            };
            let first = &lists[numbers.start as usize / self.most].jobs[numbers.start as usize % self.most];
            let fault = checksums.fault(wrong, first.job.offset);
            let of = |byte: usize| numbers.start + (byte / stride) as u32;
            let again = of(wrong.at)..of(wrong.at + wrong.bytes - 1) + 1;
            again.clone().for_each(|number| self.ask_again(number, fault));
            self.wait_for(again);
        }
    }

    /// Asks once more for a read that is there, for this reason.
    fn ask_again(&mut self, number: u32, fault: ReadFault) {
        let UnderWay { lists, again, faults, counts, .. } = self.disk.get_mut();
        let list = &mut lists[number as usize / self.most];
        let state = match list.jobs[number as usize % self.most].again(counts) {
            true => {
                again.push(number);
                list.ended -= 1;
                COMING
            }
            false => {
                faults.push((number, fault));
                LOST
            }
        };
        *self.states[number as usize].get_mut() = state;
    }

    /// The first `count` reads of a list may begin, and as many do as the disk takes.
    ///
    /// # Safety
    /// Until each has ended, its memory stays valid and nothing else uses it.
    pub unsafe fn allow(&mut self, ahead: usize, count: usize) {
        let at = self.at(ahead);
        let list = &mut self.disk.get_mut().lists[at];
        list.allowed = list.allowed.max(count);
        self.look_after(false);
    }

    /// Takes the ends of reads and begins those that are next, without waiting.
    pub fn look_after(&mut self, wait: bool) {
        let Reads { disk, states, most, first, .. } = self;
        disk.get_mut().look_after(states, *most, *first, wait);
    }

    /// Waits until every read of a list that may begin has ended.
    pub fn finish(&mut self, ahead: usize) {
        let at = self.at(ahead);
        while {
            let list = &self.disk.get_mut().lists[at];
            list.ended < list.allowed
        } {
            self.look_after(true);
        }
    }

    /// Whether a read is there; `false` also if it never will be.
    #[inline]
    pub fn is_here(&self, number: u32) -> bool {
        self.states[number as usize].load(Ordering::Acquire) == HERE
    }

    /// Whether all of these are there.
    pub fn are_here(&self, (first, count): (u32, u32)) -> bool {
        (first..first + count).all(|number| self.is_here(number))
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
                way.look_after(&self.states, self.most, self.first, looks > LOOKS && ended().is_none());
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

    /// The first read of the layer at hand that failed for good and whose number is `needed`.
    pub fn fault(&mut self, needed: impl Fn(u32) -> bool) -> Option<ReadFault> {
        let (at, most) = (self.at(0), self.most);
        let faults = self.disk.get_mut().faults.iter();
        let of_this = faults.filter(|(number, _)| *number as usize / most == at);
        of_this.filter(|(number, _)| needed(*number)).map(|(_, fault)| *fault).next()
    }

    /// What was read so far, and nanoseconds that threads have waited for it, all together.
    pub fn counts(&mut self) -> (ReadCounts, u64) {
        let UnderWay { counts, checksums: Checksums { verified, verified_bytes, .. }, .. } = self.disk.get_mut();
        (ReadCounts { verified: *verified, verified_bytes: *verified_bytes, ..*counts }, *self.waited_ns.get_mut())
    }

    /// The disk, while nothing is under way.
    pub fn disk(&mut self) -> &mut dyn Disk {
        let way = self.disk.get_mut();
        assert_eq!(way.in_flight, 0, "reads are under way");
        &mut *way.disk
    }
}

impl UnderWay {
    /// Takes the ends of reads, waiting for one if `wait`, begins what is next, list by list from `first` on, and compares what has come.
    fn look_after(&mut self, states: &[AtomicU32], most: usize, first: usize, wait: bool) {
        let UnderWay { disk, lists, in_flight, again, arrived, faults, counts, .. } = self;
        if *in_flight > 0 {
            let align = disk.align();
            disk.ended(wait, &mut |number, outcome| {
                *in_flight -= 1;
                let list = &mut lists[number as usize / most];
                let listed = &mut list.jobs[number as usize % most];
                let state = match after(listed, outcome, align, counts) {
                    After::Here if !listed.checks.is_empty() => return arrived.push(number),
                    After::Here => HERE,
                    After::Again => return again.push(number),
                    After::Lost(why) => {
                        faults.push((number, why));
                        LOST
                    }
                };
                list.ended += 1;
                states[number as usize].store(state, Ordering::Release);
            });
        }
        self.batch.clear();
        while self.in_flight + self.batch.len() < DEPTH {
            let Some(read) = self.next(most, first) else { break };
            self.batch.push(read);
        }
        let UnderWay { disk, in_flight, batch, .. } = self;
        if !batch.is_empty() {
            *in_flight += batch.len();
            // SAFETY: `allow` has its caller's promise.
            unsafe { disk.begin(batch) };
        }
        // The disk works meanwhile.
        self.compare(states, most);
    }

    /// Compares what has arrived with its checksums: only what is right is there. A read is right as a whole or asked for again as a whole.
    fn compare(&mut self, states: &[AtomicU32], most: usize) {
        let UnderWay { lists, again, arrived, checksums, faults, counts, .. } = self;
        for number in arrived.drain(..) {
            let list = &mut lists[number as usize / most];
            let listed = &mut list.jobs[number as usize % most];
            let checks = &list.checks[listed.checks.clone()];
            // SAFETY: the read has ended, and its memory is not used before it is verified.
            let wrong = checks.iter().find(|check| !unsafe { checksums.is_right(**check, listed.job.into) });
            let state = match wrong {
                None => {
                    checks.iter().for_each(|check| checksums.close(*check));
                    HERE
                }
                Some(_) if listed.again(counts) => {
                    again.push(number);
                    continue;
                }
                Some(wrong) => {
                    faults.push((number, checksums.fault(*wrong, listed.job.offset)));
                    LOST
                }
            };
            list.ended += 1;
            states[number as usize].store(state, Ordering::Release);
        }
    }

    /// The read that begins next.
    fn next(&mut self, most: usize, first: usize) -> Option<Read> {
        let UnderWay { lists, again, .. } = self;
        let number = again.pop().or_else(|| {
            let may_begin = |&at: &usize| lists[at].next < lists[at].allowed;
            let at = (0..LISTS).map(|ahead| (first + ahead) % LISTS).find(may_begin)?;
            lists[at].next += 1;
            Some((at * most + lists[at].next - 1) as u32)
        })?;
        let Job { offset, bytes, into, .. } = lists[number as usize / most].jobs[number as usize % most].left;
        Some(Read { number, offset, bytes, into })
    }
}

enum After {
    Here,
    Again,
    Lost(ReadFault),
}

impl Listed {
    /// It brought what is wrong: whether all of it is asked for once more.
    fn again(&mut self, counts: &mut ReadCounts) -> bool {
        self.failed += 1;
        self.left = self.job;
        let again = self.failed <= TRIES;
        counts.again += u64::from(again);
        again
    }
}

/// What becomes of a read that has ended like this; what is left of it is asked for again.
fn after(
    Listed { left: job, failed, .. }: &mut Listed,
    outcome: Outcome,
    align: usize,
    counts: &mut ReadCounts,
) -> After {
    counts.reads += 1;
    let lost = |why, job: &Job| After::Lost(ReadFault { offset: job.offset, why });
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
                    return lost(Unread::Cut, job);
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
                return lost(Unread::System(errno), job);
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

    fn memory(bytes: usize) -> Memory {
        let mut memory = Memory::new(bytes, bytes).unwrap();
        // SAFETY: nothing goes away.
        unsafe { memory.resize(bytes) }.unwrap();
        memory
    }

    /// Lists all pieces of a file of `pieces`, of which it has `there`.
    fn all(there: usize, pieces: usize, faults: Faults, seed: u64) -> (Reads, Memory) {
        let disk = VirtualDisk::new(file(there).reopen().unwrap(), 512, seed, faults);
        let (mut reads, memory) = (Reads::new(Box::new(disk), pieces, Checksums::default()), memory(pieces * PIECE));
        for piece in 0..pieces {
            let into = memory.start().wrapping_add(piece * PIECE);
            reads.list(0, Job { offset: (piece * PIECE) as u64, bytes: PIECE, needed: PIECE, into });
        }
        (reads, memory)
    }

    #[test]
    fn failed_and_short_reads_are_asked_for_again_until_all_is_there() {
        for seed in 0..20 {
            let faults = Faults { fail: 0.2, short: 0.4, late: 3, ..Faults::default() };
            let (mut reads, memory) = all(100, 100, faults, seed);
            // SAFETY: the memory outlives them.
            unsafe { reads.allow(0, 100) };
            let here: Vec<bool> = (0..100).map(|n| reads.wait(n)).collect();
            reads.finish(0);
            assert_eq!(reads.counts().0.bytes >= 100 * PIECE as u64, !here.contains(&false));
            // By chance one of a hundred may fail four times in a row.
            let fault = reads.fault(|_| true);
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
        unsafe { reads.allow(0, 20) };
        assert!((0..20).all(|n| reads.wait(n) == (n != 7)));
        let expected = ReadFault { offset: 7 * PIECE as u64, why: Unread::System(libc::EIO) };
        assert_eq!((reads.fault(|_| true), reads.fault(|number| number != 7)), (Some(expected), None));
        reads.clear(0);
        assert_eq!(reads.fault(|_| true), None);
    }

    #[test]
    fn a_file_that_was_cut_is_a_fault_without_an_error_of_the_system() {
        let (mut reads, _memory) = all(5, 7, Faults::default(), 1);
        // SAFETY: the memory outlives them.
        unsafe { reads.allow(0, 7) };
        assert!((0..7).all(|n| reads.wait(n) == (n < 5)));
        let fault = reads.fault(|_| true).unwrap();
        assert!(fault.why == Unread::Cut && [5, 6].contains(&(fault.offset / PIECE as u64)), "{fault:?}");
    }

    /// Many threads wait for reads in different orders; each read begins once.
    #[test]
    fn threads_that_wait_together_all_get_theirs() {
        for seed in 0..10 {
            let (mut reads, _memory) = all(300, 300, Faults { late: 2, ..Faults::default() }, seed);
            // SAFETY: the memory outlives them.
            unsafe { reads.allow(0, 150) };
            let shared = &reads;
            std::thread::scope(|scope| {
                for thread in 0..4u32 {
                    scope.spawn(move || (0..150).for_each(|i| assert!(shared.wait((i * 7 + thread * 31) % 150))));
                }
            });
            assert!(!reads.is_here(150), "it was not allowed to begin");
            assert_eq!(reads.counts().0.reads, 150);
            // SAFETY: as above.
            unsafe { reads.allow(0, 300) };
            reads.finish(0);
            assert!((0..300).all(|n| reads.is_here(n)) && reads.counts().0.reads == 300);
        }
    }

    /// What a later layer needs is read when nothing of the layer at hand is left to begin, and is there when its turn comes.
    #[test]
    fn a_later_list_is_read_behind_the_first() {
        let many = 3 * DEPTH;
        let (mut reads, _memory) = all(many, many, Faults::default(), 1);
        let apart = memory(2 * PIECE);
        let job = |n: usize, start: *mut u8| Job {
            offset: 0,
            bytes: PIECE,
            needed: PIECE,
            into: start.wrapping_add(n * PIECE),
        };
        let later = [0, 1].map(|n| job(n, apart.start()));
        let numbers = later.map(|job| reads.list(2, job));
        // SAFETY: the memory outlives them.
        unsafe {
            reads.allow(0, many);
            reads.allow(2, 2);
        }
        let begun = |reads: &mut Reads| [0, 2].map(|list| reads.disk.get_mut().lists[list].next);
        while begun(&mut reads)[0] < many {
            assert_eq!(begun(&mut reads)[1], 0);
            reads.look_after(true);
        }
        reads.finish(0);
        reads.advance(2);
        reads.finish(0);
        assert!(numbers.iter().all(|&n| reads.is_here(n)));
        assert_eq!((reads.listed(0), reads.listed(2)), (2, 0), "the list of the layer before is empty again");
    }
}
