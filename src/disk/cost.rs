//! What reads cost, and so which neighbours are read together.

use super::{Disk, Read};
use crate::clock;

/// Reads under way while costs are measured, at most: more are no faster.
const AT_ONCE: usize = 64;
/// Bytes of them together, at most.
const BYTES_AT_ONCE: usize = 16 << 20;
/// The longest read that is measured: longer ones have the same rate.
const MAX_READ: usize = 1 << 20;

/// A disk's costs with many reads under way: a read of b bytes takes `read_us + b / gb_s`. Two measured points give both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskCosts {
    /// What a read takes however short it is, microseconds of the whole disk.
    pub read_us: f64,
    /// Rate of the bytes themselves, GB/s.
    pub gb_s: f64,
}

impl DiskCosts {
    /// An NVMe disk of 2020 behind a hypervisor; used until the disk at hand was measured.
    pub const USUAL: DiskCosts = DiskCosts { read_us: 12.0, gb_s: 1.8 };

    /// The costs by two points: microseconds that reads of so many bytes take.
    pub fn from_points((small, small_us): (usize, f64), (large, large_us): (usize, f64)) -> DiskCosts {
        let us_per_byte = ((large_us - small_us) / (large - small) as f64).max(1e-6);
        DiskCosts { read_us: (small_us - small as f64 * us_per_byte).max(0.0), gb_s: 1e-3 / us_per_byte }
    }

    /// Unwanted bytes between two wanted runs, up to which reading all at once takes less time than two reads.
    pub fn gap(&self) -> usize {
        /// Beyond this the threads, not the disk, were slow when it was measured: a busy machine said 2.6 MB, and room for that was asked for.
        const MAX_BYTES: usize = 32 << 10;
        ((self.read_us * self.gb_s * 1e3) as usize).min(MAX_BYTES)
    }

    /// Microseconds that a read of so many bytes takes among others.
    pub fn us(&self, bytes: usize) -> f64 {
        self.read_us + bytes as f64 / (self.gb_s * 1e3)
    }

    /// The longer of the two reads that are measured for neurons, which are small: bytes.
    pub const OF_NEURONS: usize = 64 << 10;

    /// Measures a disk with up to 64 reads under way, at places of its file that are spread over `span` bytes: with short ones, and with
    /// such as bring `bytes`. Takes some 50 ms with [`DiskCosts::OF_NEURONS`] and 150 with large experts, and reads past the system's cache
    /// where the disk does.
    ///
    /// `None` where the span is too short to say anything, or reads fail.
    pub fn measure(disk: &mut dyn Disk, first: u64, span: u64, bytes: usize) -> Option<DiskCosts> {
        let (small, large) =
            (disk.align().max(4096), bytes.clamp(DiskCosts::OF_NEURONS, MAX_READ).next_multiple_of(disk.align()));
        if span < (16 * large) as u64 {
            return None;
        }
        let (_memory, start) = memory(disk, large);
        timed(disk, start, (first, span), large)?;
        let mut least = |bytes: usize| Some(least(disk, start, (first, span), bytes)?.0);
        Some(DiskCosts::from_points((small, least(small)?), (large, least(large)?)))
    }

    /// Microseconds of a thread's time that asking for a small read and taking its end cost, measured as [`DiskCosts::measure`].
    pub fn measure_asking(disk: &mut dyn Disk, first: u64, span: u64) -> Option<f64> {
        let small = disk.align().max(4096);
        if span < (16 * small) as u64 {
            return None;
        }
        let (_memory, start) = memory(disk, small);
        Some(least(disk, start, (first, span), small)?.1)
    }
}

/// Reads of so many bytes that are under way at once.
fn at_once(bytes: usize) -> usize {
    (BYTES_AT_ONCE / bytes).clamp(1, AT_ONCE)
}

/// Memory for reads of up to so many bytes, and where in it they may begin.
fn memory(disk: &dyn Disk, bytes: usize) -> (Vec<u8>, *mut u8) {
    aligned(disk, (AT_ONCE * bytes).min(BYTES_AT_ONCE))
}

/// Memory that holds so many bytes from an address on at which the disk's reads may begin; that address.
pub(super) fn aligned(disk: &dyn Disk, bytes: usize) -> (Vec<u8>, *mut u8) {
    let mut memory = vec![0u8; bytes + disk.align()];
    let start = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(disk.align()));
    (memory, start)
}

/// Where read number `number` of so many bytes lies: spread by the golden ratio, so that neighbours in time lie apart.
pub(super) fn place_of((first, span): (u64, u64), bytes: usize, align: usize, number: usize) -> u64 {
    let offset = first + (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) % (span - bytes as u64);
    offset / align as u64 * align as u64
}

/// The least of some measurements, as what else runs on the machine only makes reads slower.
fn least(disk: &mut dyn Disk, memory: *mut u8, place: (u64, u64), bytes: usize) -> Option<(f64, f64)> {
    let mut least = (f64::INFINITY, f64::INFINITY);
    for _ in 0..3 {
        let (us, of_thread) = timed(disk, memory, place, bytes)?;
        least = (least.0.min(us), least.1.min(of_thread));
    }
    Some(least)
}

/// Microseconds that each of some reads of so many bytes took, and those that this thread computed for it.
fn timed(disk: &mut dyn Disk, memory: *mut u8, place: (u64, u64), bytes: usize) -> Option<(f64, f64)> {
    let at_once = at_once(bytes);
    let reads = 4 * at_once;
    let (begin, computed) = (clock::now(), clock::computed());
    let (mut asked, mut ended, mut failed) = (0, 0, false);
    while ended < reads {
        // Each place in flight is that of a number modulo their count: the reads of a batch have all ended when the next begins.
        let count = at_once.min(reads - asked);
        let read = |i: usize| {
            let (number, into) = (asked + i, memory.wrapping_add(i * bytes));
            Read { number: number as u32, offset: place_of(place, bytes, disk.align(), number), bytes, into }
        };
        let batch: Vec<Read> = (0..count).map(read).collect();
        // SAFETY: each has its own part of the memory, which is there until all have ended.
        unsafe { disk.begin(&batch) };
        asked += count;
        while ended < asked {
            disk.ended(true, &mut |_, outcome| {
                ended += 1;
                failed |= outcome.is_err();
            });
        }
    }
    let a_read = |time: clock::Duration| time.as_secs_f64() * 1e6 / reads as f64;
    (!failed).then(|| (a_read(begin.elapsed()), a_read(clock::computed() - computed)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The disk that the first measurements were made on: 4 KiB at 0.27 GB/s, 24 KiB at 0.9.
    #[test]
    fn two_points_say_what_a_read_costs_and_which_gaps_are_worth_reading() {
        let us = |bytes: usize, gb_s: f64| bytes as f64 / (gb_s * 1e3);
        let costs = DiskCosts::from_points((4096, us(4096, 0.27)), (24576, us(24576, 0.9)));
        assert!((costs.read_us - 12.7).abs() < 0.5 && (costs.gb_s - 1.69).abs() < 0.1, "{costs:?}");
        // One unwanted neuron of 12 KiB may be read along, two may not.
        assert!((12_288..24_576).contains(&costs.gap()), "{}", costs.gap());
        let two_reads = 2.0 * costs.us(12_288);
        assert!(costs.us(3 * 12_288) < two_reads && costs.us(4 * 12_288) > two_reads);
        // Without latency nothing is worth reading along.
        assert_eq!(DiskCosts { read_us: 0.0, gb_s: 2.0 }.gap(), 0);
    }
}
