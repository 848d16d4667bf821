//! A disk for tests: the right bytes, in any order, late, in pieces, wrong at first, or not at all, all by a seed; its time is virtual.

use super::{DEPTH, Disk, Outcome, Read};
use crate::prng::Prng;
use std::collections::HashSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What goes wrong, by chance.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Share of reads that fail once, 0 to 1; asked for again they are whole.
    pub fail: f64,
    /// Share of reads that end with a part of their bytes, 0 to 1.
    pub short: f64,
    /// Share of the reads of what was never read that bring a wrong bit of it, 0 to 1; asked for again it is right.
    pub wrong: f64,
    /// Reads that touch this byte of the file always fail.
    pub bad_byte: Option<u64>,
    /// How often its owner asks for ends in vain, at most, before one is told: its latency.
    pub late: u64,
    /// Reads, counted from the first, that find no disk: it was pulled, and put back where the range ends.
    pub gone: Range<u64>,
}

/// What reads take in virtual time: `DEPTH` at most are under way together, and their bytes come one behind the other.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    /// From when a read begins until its bytes come.
    pub latency_ns: u64,
    /// Bytes that come in a nanosecond, which are GB/s.
    pub bytes_ns: f64,
}

/// Reads a file at once, and tells of it later.
pub struct VirtualDisk {
    file: File,
    align: usize,
    prng: Prng,
    faults: Faults,
    /// Reads that have begun.
    begun: u64,
    /// Of what was read, the offsets of its parts of `align` bytes, where bits may be wrong.
    seen: HashSet<u64>,
    speed: Speed,
    /// Until when the bytes of earlier reads come, ns.
    busy_until: u64,
    /// Nanoseconds that have gone by in waiting.
    clock: Arc<AtomicU64>,
    under_way: Vec<UnderWay>,
    /// How often it is asked in vain until it tells of the next.
    waits: u64,
}

struct UnderWay {
    number: u32,
    outcome: Outcome,
    ends_ns: u64,
}

impl VirtualDisk {
    /// A disk that holds `file`, for reads that are multiples of `align`. They take no time.
    pub fn new(file: File, align: usize, seed: u64, faults: Faults) -> VirtualDisk {
        VirtualDisk {
            file,
            align,
            prng: Prng::new(seed),
            faults,
            begun: 0,
            seen: HashSet::new(),
            speed: Speed { latency_ns: 0, bytes_ns: f64::INFINITY },
            busy_until: 0,
            clock: Arc::default(),
            under_way: Vec::with_capacity(DEPTH),
            waits: 0,
        }
    }

    /// The same with reads that take time, and its clock: the nanoseconds that have gone by in waiting.
    pub fn with_speed(mut self, speed: Speed) -> (VirtualDisk, Arc<AtomicU64>) {
        self.speed = speed;
        let clock = self.clock.clone();
        (self, clock)
    }

    fn outcome(&mut self, read: &Read) -> Outcome {
        self.begun += 1;
        if self.faults.gone.contains(&(self.begun - 1)) {
            return Err(libc::ENODEV);
        }
        let bad = self.faults.bad_byte.is_some_and(|bad| (read.offset..read.offset + read.bytes as u64).contains(&bad));
        if bad || self.prng.next_f64() < self.faults.fail {
            return Err(libc::EIO);
        }
        let bytes = match self.prng.next_f64() < self.faults.short {
            true => self.prng.below((read.bytes / self.align) as u64) as usize * self.align,
            false => read.bytes,
        };
        // A read without a byte is the end of the file: short ones have some.
        let bytes = bytes.max(self.align);
        // SAFETY: the promise of `begin`.
        let into = unsafe { std::slice::from_raw_parts_mut(read.into, bytes) };
        let got = self.file.read_at(into, read.offset).map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?;
        if self.faults.wrong > 0.0 {
            self.turn_a_bit(&mut into[..got], read.offset);
        }
        Ok(got)
    }

    /// Turns a bit round in a part that was never read, by chance. What was read before may be known to be right.
    fn turn_a_bit(&mut self, bytes: &mut [u8], offset: u64) {
        let new = (0..bytes.len()).step_by(self.align).filter(|&at| self.seen.insert(offset + at as u64));
        let new: Vec<usize> = new.collect();
        if !new.is_empty() && self.prng.next_f64() < self.faults.wrong {
            let part = new[self.prng.below(new.len() as u64) as usize];
            let bit = self.prng.below(8 * self.align.min(bytes.len() - part) as u64) as usize;
            bytes[part + bit / 8] ^= 1 << (bit % 8);
        }
    }
}

impl Disk for VirtualDisk {
    fn name(&self) -> String {
        "virtual disk".into()
    }

    fn align(&self) -> usize {
        self.align
    }

    unsafe fn begin(&mut self, reads: &[Read]) {
        assert!(self.under_way.len() + reads.len() <= DEPTH, "more reads than a disk takes");
        for read in reads {
            assert!(read.offset.is_multiple_of(self.align as u64) && read.bytes.is_multiple_of(self.align));
            assert!(read.into.addr().is_multiple_of(self.align));
            let outcome = self.outcome(read);
            let begins = self.busy_until.max(self.clock.load(Ordering::Relaxed) + self.speed.latency_ns);
            self.busy_until = begins + (read.bytes as f64 / self.speed.bytes_ns) as u64;
            self.under_way.push(UnderWay { number: read.number, outcome, ends_ns: self.busy_until });
        }
    }

    fn ended(&mut self, wait: bool, done: &mut dyn FnMut(u32, Outcome)) {
        if self.under_way.is_empty() || (self.waits > 0 && !wait) {
            self.waits = self.waits.saturating_sub(1);
            return;
        }
        self.waits = self.prng.below(self.faults.late + 1);
        let at = self.prng.below(self.under_way.len() as u64) as usize;
        let UnderWay { number, outcome, ends_ns } = self.under_way.swap_remove(at);
        self.clock.fetch_max(ends_ns, Ordering::Relaxed);
        done(number, outcome);
    }
}
