//! The disk's curve: how fast reads of some lengths are with so many under way, and what reading a neuron in two parts would take.

use super::cost::{aligned, place_of};
use super::{DEPTH, Disk, Read};
use crate::clock;
use serde::Serialize;

/// Lengths that are measured, bytes: a page, neurons of some models, and what streams a layer.
const LENGTHS: [usize; 5] = [4 << 10, 12 << 10, 24 << 10, 64 << 10, 512 << 10];
/// Reads under way at once.
const AT_ONCE: [usize; 4] = [1, 8, 32, 128];
/// Bytes under way at once, at most.
const BYTES_AT_ONCE: usize = 32 << 20;
/// Reads of a point: at least so many, and so many times those that are under way.
const READS: usize = 128;
const TIMES: usize = 8;

/// A point of the curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DiskRate {
    /// Length of each read.
    pub bytes: usize,
    /// Reads under way.
    pub at_once: usize,
    /// Bytes a second of all together, GB/s.
    pub gb_s: f64,
}

/// What reading neurons whole and in two parts takes, the second part only of those whose gate fires (PowerInfer-2, section 4.3).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TwoParts {
    /// Share of the neurons whose second part is needed.
    pub fires: f64,
    /// Microseconds a neuron, read at once.
    pub whole_us: f64,
    /// Microseconds a neuron, read in two parts.
    pub parts_us: f64,
}

/// The rates of a disk at all lengths, at places of its file that are spread over `span` bytes from `first` on. Takes about a second.
///
/// `None` where the span is too short, or reads fail.
pub fn curve(disk: &mut dyn Disk, first: u64, span: u64) -> Option<Vec<DiskRate>> {
    let all = LENGTHS.iter().flat_map(|&bytes| AT_ONCE.map(|at_once| (bytes, at_once)));
    let points = all.filter(|(bytes, at_once)| bytes * at_once <= BYTES_AT_ONCE);
    points
        .map(|(bytes, at_once)| {
            let count = READS.max(TIMES * at_once);
            let us = Reader::new(disk, (first, span), bytes, at_once)?.read(count, (bytes, 0), &|_| false)?;
            Some(DiskRate { bytes, at_once, gb_s: bytes as f64 / (us * 1e3) })
        })
        .collect()
}

/// Reads `count` neurons of two parts of so many bytes, whole and in parts, in turns, three times each; the fastest of each counts.
///
/// `None` where the span is too short, or reads fail.
pub fn two_parts(
    disk: &mut dyn Disk,
    (first, span): (u64, u64),
    (gate, rest): (usize, usize),
    fires: f64,
    count: usize,
) -> Option<TwoParts> {
    let (mut whole_us, mut parts_us) = (f64::INFINITY, f64::INFINITY);
    // Evenly spread, as many of each hundred as the share says.
    let fired = |neuron: usize| (neuron as f64 * fires).floor() < ((neuron + 1) as f64 * fires).floor();
    for _ in 0..3 {
        let mut reader = Reader::new(disk, (first, span), gate + rest, DEPTH / 2)?;
        whole_us = whole_us.min(reader.read(count, (gate + rest, 0), &|_| false)?);
        parts_us = parts_us.min(reader.read(count, (gate, rest), &fired)?);
    }
    Some(TwoParts { fires, whole_us, parts_us })
}

/// Keeps reads under way.
struct Reader<'a> {
    disk: &'a mut dyn Disk,
    place: (u64, u64),
    /// A part for each read under way.
    memory: Vec<u8>,
    start: *mut u8,
    bytes: usize,
    at_once: usize,
    /// Neurons that were asked for so far, by all calls: each lies at another place.
    asked: usize,
}

impl<'a> Reader<'a> {
    /// For reads of up to `bytes` bytes, `at_once` of them.
    fn new(disk: &'a mut dyn Disk, place: (u64, u64), bytes: usize, at_once: usize) -> Option<Reader<'a>> {
        let bytes = bytes.next_multiple_of(disk.align());
        if place.1 < 16 * bytes as u64 {
            return None;
        }
        let (memory, start) = aligned(disk, at_once * bytes);
        Some(Reader { disk, place, memory, start, bytes, at_once, asked: 0 })
    }

    /// Microseconds that each of `count` neurons takes: one read of `first` bytes, and behind it one of `second` where `again` says so.
    fn read(&mut self, count: usize, (first, second): (usize, usize), again: &dyn Fn(usize) -> bool) -> Option<f64> {
        debug_assert!(self.memory.len() >= self.at_once * self.bytes);
        let align = self.disk.align();
        // Of each part of the memory: the neuron that it is read for, and whether this is its second read.
        let mut reading = vec![(0, false); self.at_once];
        let mut free: Vec<usize> = (0..self.at_once).collect();
        let (begin, mut begun, mut ended, mut failed) = (clock::now(), 0, 0, false);
        let (mut batch, mut freed) = (Vec::with_capacity(self.at_once), Vec::with_capacity(self.at_once));
        while ended < count {
            while begun < count
                && let Some(part) = free.pop()
            {
                reading[part] = (begun, false);
                batch.push((part, 0, first));
                begun += 1;
            }
            let reads: Vec<Read> = batch
                .drain(..)
                .map(|(part, skip, bytes): (usize, usize, usize)| Read {
                    number: part as u32,
                    offset: place_of(self.place, self.bytes, align, self.asked + reading[part].0) + skip as u64,
                    bytes: bytes.next_multiple_of(align),
                    into: self.start.wrapping_add(part * self.bytes),
                })
                .collect();
            // SAFETY: each part of the memory has one read at a time, and is there until all have ended.
            unsafe { self.disk.begin(&reads) };
            self.disk.ended(true, &mut |part, outcome| {
                freed.push(part as usize);
                failed |= outcome.is_err();
            });
            for part in freed.drain(..) {
                let (neuron, is_second) = reading[part];
                if second > 0 && !is_second && again(neuron) {
                    reading[part] = (neuron, true);
                    batch.push((part, first.next_multiple_of(align), second));
                } else {
                    ended += 1;
                    free.push(part);
                }
            }
        }
        self.asked += count;
        (!failed).then(|| begin.elapsed().as_secs_f64() * 1e6 / count as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Outcome;

    /// A disk that counts what it is asked for.
    #[derive(Default)]
    struct Counting {
        under_way: Vec<(u32, usize)>,
        reads: usize,
        bytes: usize,
        most: usize,
    }

    impl Disk for Counting {
        fn name(&self) -> String {
            "counting".into()
        }

        fn align(&self) -> usize {
            512
        }

        unsafe fn begin(&mut self, reads: &[Read]) {
            for read in reads {
                assert!(read.offset % 512 == 0 && read.bytes % 512 == 0 && read.into.addr() % 512 == 0);
                assert!(self.under_way.iter().all(|(number, _)| *number != read.number), "its memory is in use");
                self.under_way.push((read.number, read.bytes));
                (self.reads, self.bytes) = (self.reads + 1, self.bytes + read.bytes);
            }
            self.most = self.most.max(self.under_way.len());
        }

        fn ended(&mut self, _wait: bool, done: &mut dyn FnMut(u32, Outcome)) {
            // One at a time, the newest first.
            let (number, bytes) = self.under_way.pop().unwrap();
            done(number, Ok(bytes));
        }
    }

    #[test]
    fn in_two_parts_the_second_is_read_of_those_that_fire_and_nothing_twice() {
        for (fires, second) in [(0.0, 0), (0.1, 100), (0.5, 500), (0.9, 900), (1.0, 1000)] {
            let mut disk = Counting::default();
            let mut reader = Reader::new(&mut disk, (4096, 1 << 20), 4096 + 2048, 20).unwrap();
            let fired = |neuron: usize| (neuron as f64 * fires).floor() < ((neuron + 1) as f64 * fires).floor();
            reader.read(1000, (4096, 2048), &fired).unwrap();
            assert_eq!((disk.reads, disk.bytes), (1000 + second, 1000 * 4096 + second * 2048), "{fires}");
            assert_eq!((disk.most, disk.under_way.len()), (20, 0));
        }
    }
}
