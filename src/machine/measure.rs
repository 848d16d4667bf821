//! The rates of this machine: how fast it reads memory, with which every decoding speed is compared, and what else a machine profile holds.

use crate::clock;
use crate::cpu::aligned::Aligned;
use crate::cpu::{Columns, Isa, Kernels, ThreadPool, peak};
use crate::device::{
    Block, Buffer, Call, Device, Linear, MoveMethod, MoveRate, OutOfMemory, PinnedBuffer, Stream, Then, View,
    fastest_ns,
};
use crate::engine::session::CHUNK;
use crate::error::{Error, Result};
use crate::formats::machine_profile::{MachineProfile, Rate, assumed_device_gflops};
use crate::formats::rows::{self, Quant};
use crate::model::Matrix;
use crate::ops::linear::linear;
use memmap2::{Advice, MmapMut};
use serde::Serialize;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Times that a figure is measured for a profile that is kept: the median of five is right if two of them were disturbed.
const ROUNDS: usize = 5;
/// How many times as fast the fastest round of a rate may be as the slowest: on a machine that does nothing else they differ by a tenth.
const STEADY: f64 = 1.5;
/// Time of a call, us, beyond which threads wait for cores that something else uses; and the most by which rounds differ without that.
const SLOW_CALL_US: f64 = 50.0;
const STEADY_CALL_US: f64 = 10.0;

/// A figure that was measured several times, smallest first.
#[derive(Clone, Debug, Serialize)]
pub struct Repeated(pub Vec<f64>);

impl Repeated {
    /// Measures a figure five times.
    ///
    /// # Errors
    /// Those of `measure`.
    pub fn of(mut measure: impl FnMut() -> Result<f64>) -> Result<Repeated> {
        let mut rounds = (0..ROUNDS).map(|_| measure()).collect::<Result<Vec<f64>>>()?;
        rounds.sort_by(f64::total_cmp);
        Ok(Repeated(rounds))
    }

    /// The middle figure.
    pub fn median(&self) -> f64 {
        self.0[self.0.len() / 2]
    }

    /// The smallest and the largest figure.
    pub fn range(&self) -> [f64; 2] {
        [self.0[0], self.0[self.0.len() - 1]]
    }

    /// Checks that nothing disturbed the measurement of `rate`: rounds that are near each other, and a call that takes as long as calls do.
    /// The error says what is odd.
    pub fn check(&self, rate: Rate) -> Result<(), String> {
        let ([least, most], median) = (self.range(), self.median());
        let odd = match rate {
            Rate::CallUs => median > SLOW_CALL_US || most - least > STEADY_CALL_US.max(median),
            _ => most > STEADY * least,
        };
        let name = rate.name();
        if odd {
            Err(format!("{name} {median:.2}, from {least:.2} to {most:.2} in {} rounds", self.0.len()))
        } else {
            Ok(())
        }
    }
}

/// Bytes read per pass, far more than any cache holds.
pub const READ_BYTES: usize = 2 << 30;
/// Bytes read per pass when the measurement must take less than two seconds: still more than the caches of most machines.
pub const QUICK_BYTES: usize = 512 << 20;
/// Passes of a measurement; the best counts, since other load on the machine can only slow one down.
pub(super) const PASSES: usize = 4;
/// Bytes that a thread takes at a time.
const TASK_BYTES: usize = 1 << 20;

/// How fast memory is read sequentially.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ReadBandwidth {
    /// Threads that read.
    pub threads: usize,
    /// Rate of the fastest pass, GB/s.
    pub gb_per_s: f64,
    /// Rate of the slowest pass, GB/s: close to the fastest if the machine was otherwise idle.
    pub worst_gb_per_s: f64,
}

/// Memory to measure in, of zeros, in huge pages where the system gives them.
///
/// # Errors
/// [`Error::Memory`] where the system refuses.
pub(super) fn huge_pages(bytes: usize) -> Result<MmapMut> {
    let map = MmapMut::map_anon(bytes).map_err(|e| {
        Error::Memory(format!("measuring how fast memory is read needs free memory: {} MiB: {e}", bytes >> 20))
    })?;
    // Advice only: small pages give a slightly lower figure, not a wrong one.
    let _ = map.advise(Advice::HugePage);
    Ok(map)
}

/// Filled memory to measure reads on, in huge pages where the system gives them.
pub struct ReadBuffer(MmapMut);

/// Smallest buffer for a measurement, bytes: less would fit into a cache.
const MIN_BYTES: u64 = 64 << 20;

impl ReadBuffer {
    /// Allocates and fills `most` bytes, or half of the `free` ones if that is less, because what is measured next needs memory, too.
    /// `None` for `free` means that there is enough.
    ///
    /// # Errors
    /// [`Error::Memory`] where that is below `MIN_BYTES`, or the system refuses.
    pub fn new(most: usize, free: Option<u64>) -> Result<ReadBuffer> {
        let refused =
            |why: String| Error::Memory(format!("measuring how fast memory is read needs free memory: {why}"));
        let bytes =
            free.map_or(most as u64, |free| (free / 2).min(most as u64)) / TASK_BYTES as u64 * TASK_BYTES as u64;
        if bytes < MIN_BYTES {
            let least = (2 * MIN_BYTES) >> 20;
            return Err(refused(format!(
                "{} MiB are free and {least} would do; close something",
                free.unwrap_or(0) >> 20
            )));
        }
        let mut map = huge_pages(bytes as usize)?;
        for (i, page) in map.chunks_mut(4096).enumerate() {
            page[0] = i as u8;
        }
        Ok(ReadBuffer(map))
    }

    /// Measures [`read_bandwidth`] on the whole buffer.
    pub fn measure(&self, threads: usize) -> ReadBandwidth {
        read_bandwidth(&self.0, threads)
    }
}

/// How fast `threads` threads read `bytes`, which lie in memory and begin at a page boundary: a few sequential passes.
pub fn read_bandwidth(bytes: &[u8], threads: usize) -> ReadBandwidth {
    let mut pool = ThreadPool::new(threads);
    let total = std::sync::atomic::AtomicU64::new(0);
    let mut rates: Vec<f64> = (0..PASSES)
        .map(|_| {
            let start = clock::now();
            pool.run(bytes.len().div_ceil(TASK_BYTES), |_, task| {
                let sum = sum_words(&bytes[task * TASK_BYTES..bytes.len().min((task + 1) * TASK_BYTES)]);
                total.fetch_add(sum, std::sync::atomic::Ordering::Relaxed);
            });
            bytes.len() as f64 / start.elapsed().as_secs_f64() / 1e9
        })
        .collect();
    std::hint::black_box(total);
    rates.sort_by(f64::total_cmp);
    ReadBandwidth { threads, gb_per_s: rates[PASSES - 1], worst_gb_per_s: rates[0] }
}

/// Rows and columns of the matrix that arithmetic is measured with, about those of a 7B model.
const GEMM: [usize; 2] = [1024, 4096];

/// Arithmetic speed of `threads` threads, 10^9 multiplications and additions per second, each counted, for an f16 matrix and as many tokens
/// as a prompt's chunk has: the best of a few passes of about ten milliseconds.
pub fn gflops(threads: usize) -> f64 {
    let (quant, [rows, cols], n) = (Quant::F16, GEMM, CHUNK);
    let mut bytes: Aligned = Aligned::default();
    bytes.resize(rows * quant.row_bytes(cols) / 4);
    let ones = vec![1.0; cols];
    let encoded: &mut [u8] = bytemuck::cast_slice_mut(&mut bytes);
    encoded.chunks_exact_mut(quant.row_bytes(cols)).for_each(|row| rows::encode(quant, &ones, row));
    // SAFETY: the bytes outlive the matrix and stay where they are.
    let matrix = unsafe { Matrix::over(bytemuck::cast_slice(&bytes), quant, rows, cols) };
    let (mut pool, kernels, mut columns) = (ThreadPool::new(threads), Kernels::best(), Columns::default());
    let (input, mut out) = (vec![1.0; n * cols], vec![0.0; n * rows]);
    let mut pass = || {
        let start = clock::now();
        linear(&mut pool, &kernels, &matrix, &input, n, &mut columns, &mut out);
        start.elapsed().as_secs_f64()
    };
    let best = (0..=PASSES).map(|_| pass()).fold(f64::INFINITY, f64::min);
    (2 * rows * cols * n) as f64 / best / 1e9
}

/// Passes of which the middle one counts.
const DECODE_PASSES: usize = 15;
/// Bytes of the matrices that decoding is measured with, more than the caches of most machines, and of each of them, about as a layer's are.
const DECODE_BYTES: [usize; 2] = [192 << 20, 8 << 20];

/// How fast `threads` threads read weights of a type when decoding, GB/s: products of one column with matrices that no cache holds, one parallel
/// call for each, the middle of some passes: what else the machine does slows a model down as well. Where a type's arithmetic takes longer
/// than its bytes, that is less than [`read_bandwidth`].
///
/// # Errors
/// [`Error::Memory`] where there is no room for the matrices.
pub fn decode_gb_s(quant: Quant, threads: usize) -> Result<f64> {
    let ([all, of_one], cols) = (DECODE_BYTES, GEMM[1]);
    let row_bytes = quant.row_bytes(cols);
    let rows = of_one / row_bytes;
    let ReadBuffer(mut memory) = ReadBuffer::new(all, None)?;
    let mut row = vec![0; row_bytes];
    rows::encode(quant, &(0..cols).map(|i| (i * i % 97) as f32 / 48.0 - 1.0).collect::<Vec<_>>(), &mut row);
    memory.chunks_exact_mut(row_bytes).for_each(|to| to.copy_from_slice(&row));
    let of = |bytes: &[u8]| {
        // SAFETY: the bytes outlive the matrices and stay where they are.
        unsafe { Matrix::over(bytes, quant, rows, cols) }
    };
    let matrices: Vec<Matrix> = memory.chunks_exact(rows * row_bytes).map(of).collect();
    let (mut pool, kernels, mut columns) = (ThreadPool::new(threads), Kernels::best(), Columns::default());
    let (input, mut out) = (vec![1.0; cols], vec![0.0; rows]);
    let mut pass = || {
        let start = clock::now();
        for matrix in &matrices {
            linear(&mut pool, &kernels, matrix, &input, 1, &mut columns, &mut out);
        }
        start.elapsed().as_secs_f64()
    };
    pass();
    let mut took = [(); DECODE_PASSES].map(|()| pass());
    took.sort_by(f64::total_cmp);
    Ok((matrices.len() * rows * row_bytes) as f64 / took[DECODE_PASSES / 2] / 1e9)
}

/// What the multiplying units of `threads` threads reach together with nothing to load, as [`peak::gops`]: the best of a few passes.
pub fn peak_gops(threads: usize, isa: Isa, unit: peak::Unit) -> Option<f64> {
    let mut pool = ThreadPool::new(threads);
    let mut pass = || {
        let rates: Vec<AtomicU64> = (0..threads).map(|_| AtomicU64::new(0)).collect();
        pool.run(threads, |_, task| {
            let rate = peak::gops(isa, unit).unwrap_or(0.0);
            rates[task].store(rate.to_bits(), Ordering::Relaxed);
        });
        rates.into_iter().map(|rate| f64::from_bits(rate.into_inner())).sum::<f64>()
    };
    Some((0..PASSES).map(|_| pass()).fold(0.0, f64::max)).filter(|&rate| rate > 0.0)
}

/// Calls that are timed; a few milliseconds together.
const CALLS: usize = 2000;

/// Time of one fork and join of `threads` threads that do nothing, us: the median of `CALLS` calls, one after the other.
pub fn call_us(threads: usize) -> f64 {
    let mut pool = ThreadPool::new(threads);
    let (threads, mut mark) = (pool.threads(), clock::now());
    let mut times: Vec<u64> = (0..CALLS)
        .map(|_| {
            // Each thread has a task, and keeps it until all have one.
            let taken = AtomicUsize::new(0);
            pool.run(threads, |_, _| {
                taken.fetch_add(1, Ordering::Relaxed);
                while taken.load(Ordering::Relaxed) < threads {
                    spin_loop();
                }
            });
            clock::lap(&mut mark)
        })
        .collect();
    times.sort_unstable();
    // A coarse clock may report zero, but no call takes no time.
    times[CALLS / 2].max(1) as f64 / 1e3
}

/// Measured rates of a card.
#[derive(Clone, Debug, Serialize)]
pub struct CardRates {
    /// Bytes that a kernel reads and writes in the card's memory, together, GB/s.
    pub device_gb_s: f64,
    /// 10^9 multiplications and additions a second of a prompt's products of weights in f16.
    pub device_gflops: f64,
    /// From pinned host memory to the card, GB/s.
    pub link_gb_s: f64,
    /// From the card to pinned host memory, GB/s.
    pub back_gb_s: f64,
    /// Time that each small copy takes on its stream besides its bytes, us.
    pub copy_us: f64,
    /// Time of one small copy that is put on a stream and waited for, us.
    pub sync_us: f64,
    /// How fast neuron blocks come to the card by each method that it has.
    pub moves: Vec<MoveRate>,
}

/// Bytes of a small copy: about a neuron block of a small model in q4_0.
pub(super) const SMALL_BYTES: usize = 4 << 10;
/// Blocks in the largest group of small blocks that is timed and in the group of large ones, and bytes of a large block.
const GROUP_BLOCKS: usize = 256;
const LARGE_BLOCKS: usize = 16;
const LARGE_BYTES: usize = 1 << 20;

/// Times each method of moving neuron blocks from pinned host memory, by the device's clock: one small block, many small ones, some large
/// ones, with gaps between all blocks. `to` has as many bytes as `host`, at least twice `GROUP_BLOCKS` small blocks.
///
/// # Errors
/// [`Error::Failed`] if the bytes that arrive are not those of the host; [`Error::Fatal`] if the device fails.
pub fn moves(device: &mut dyn Device, host: &PinnedBuffer, to: Buffer) -> Result<Vec<MoveRate>> {
    let bytes = size_of_val(&host[..]);
    let large = LARGE_BYTES.min(bytes / (2 * LARGE_BLOCKS) / 4096 * 4096);
    let [begin, end] = [device.timed_event(), device.timed_event()];
    let mut rates = Vec::new();
    for method in MoveMethod::ALL {
        if !device.can_move(method) {
            continue;
        }
        let mut time = |count: usize, block: usize| -> Result<f64> {
            // Every second slot, in falling order, so that no two blocks are neighbours.
            let slot = |i: usize| 2 * (count - 1 - i);
            let from = |i: usize| host[2 * i * block / 4..].as_ptr().cast::<u8>();
            let blocks: Vec<Block> = (0..count).map(|i| Block { from: from(i), slot: slot(i) as u32 }).collect();
            let mut best = u64::MAX;
            for _ in 0..=PASSES {
                device.record(Stream::Copy, begin);
                // SAFETY: waited for below.
                unsafe { device.move_blocks(method, &blocks, block, to) };
                device.record(Stream::Copy, end);
                device.synchronize(Stream::Copy);
                if let Some(fault) = device.fault() {
                    return Err(Error::Fatal(fault.0.clone()));
                }
                best = best.min(device.elapsed_ns(begin, end));
            }
            let mut back = vec![0u32; block / 4];
            for (i, moved) in blocks.iter().enumerate() {
                let at = (slot(i) * block) as u64;
                // SAFETY: waited for.
                unsafe { device.copy_out(Stream::Copy, to, at, back.as_mut_ptr().cast(), block) };
                device.synchronize(Stream::Copy);
                let right = &host[(moved.from as usize - host.as_ptr() as usize) / 4..][..block / 4];
                if back != right {
                    let name = method.name();
                    return Err(Error::Failed(format!(
                        "{name} moves bring wrong bytes to the device; please report it"
                    )));
                }
            }
            Ok(best as f64 / 1e3)
        };
        let small = SMALL_BYTES;
        let (one, many, some) = (time(1, small)?, time(GROUP_BLOCKS, small)?, time(LARGE_BLOCKS, large)?);
        let each = ((many - one) / (GROUP_BLOCKS - 1) as f64).max(0.0);
        // Time beyond that of as many small blocks is due to the bytes. Where the clock is too coarse for that, half of the time is.
        let beyond = (some - one - each * (LARGE_BLOCKS - 1) as f64).max(some / 2.0).max(1e-3);
        let gb_s = (LARGE_BLOCKS * (large - small)) as f64 / beyond / 1e3;
        let piece_us = (each - small as f64 / gb_s / 1e3).max(0.0);
        let group_us = (one - piece_us - small as f64 / gb_s / 1e3).max(0.0);
        rates.push(MoveRate { method, group_us, piece_us, gb_s });
    }
    Ok(rates)
}

/// Columns of the products that are timed: a prompt's chunk.
const PRODUCT_COLUMNS: usize = 256;

/// GFLOP/s of the device's products of a matrix in f16 with a chunk's columns, by its clock: the best of a few passes. `from` and `to` are memory
/// for weights and input and for the results, a megabyte or more; what they hold is multiplied as it is.
///
/// # Errors
/// [`Error::Memory`] without room for what the product works in, [`Error::Fatal`] if the device fails.
pub fn device_gflops(device: &mut dyn Device, from: Buffer, to: Buffer) -> Result<f64> {
    // A square matrix of a thirty-second of the memory, so that both halves have room.
    let side = (from.bytes.min(to.bytes) / 64).isqrt() as usize / 32 * 32;
    let full = |e: OutOfMemory| {
        Error::Memory(format!(
            "the device has {} bytes left and its products need {}; close what else uses it",
            e.left, e.asked
        ))
    };
    let bias = device.alloc(0).map_err(full)?;
    let call = Linear {
        quant: Quant::F16,
        rows: side,
        cols: side,
        n: PRODUCT_COLUMNS,
        weights: from,
        bias,
        x: View { buffer: from, at: from.bytes / 2 / 16 * 16 },
        out: to.into(),
        stride: side,
        then: Then::Store,
    };
    let call = Call::Linear(call);
    device.prepare(&call).map_err(full)?;
    let best = fastest_ns(device, &call, PASSES);
    device.free(bias);
    if let Some(fault) = device.fault() {
        return Err(Error::Fatal(fault.0.clone()));
    }
    // A coarse clock may report no time at all.
    Ok((2 * side * side * PRODUCT_COLUMNS) as f64 / best.max(1) as f64)
}

/// Rates that the user gives instead of measured ones. `None` takes the card's, and without a card [`ASSUMED`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Assumed {
    /// Rate at which the device reads its own memory, GB/s.
    pub device_gb_s: Option<f64>,
    /// Rate of the device's products, GFLOP/s.
    pub device_gflops: Option<f64>,
    /// Rate from host to device memory, GB/s.
    pub link_gb_s: Option<f64>,
    /// Time to start one copy over the link, us.
    pub copy_us: Option<f64>,
    /// Time to wait once for the device, us.
    pub sync_us: Option<f64>,
}

/// Rates of device and link that are assumed without a card: 360 GB/s is the specification of an NVIDIA RTX 3060 with 12 GB, a small and
/// common card; 31.5 GB/s that of PCIe 4.0 with 16 lanes in one direction. No specification says what a copy and a wait cost; 10 us each is
/// a rough guess.
pub const ASSUMED: [(Rate, f64); 5] = [
    (Rate::DeviceGbS, 360.0),
    (Rate::DeviceGflops, assumed_device_gflops()),
    (Rate::LinkGbS, 31.5),
    (Rate::CopyUs, 10.0),
    (Rate::SyncUs, 10.0),
];

/// Measures a profile of this machine: host memory, arithmetic and calls with `threads` threads; device and link are those of the card, if
/// there is one, and assumed otherwise. Takes about two seconds, most of them to fill memory, of which `free` bytes are available (`None`:
/// enough).
///
/// # Errors
/// [`Error::Usage`] for an assumed figure that is out of range, [`Error::Memory`] without room for the measurement.
pub fn machine(
    name: &str,
    threads: usize,
    free: Option<u64>,
    card: Option<CardRates>,
    assumed: Assumed,
) -> Result<MachineProfile> {
    let dram_gb_s = ReadBuffer::new(QUICK_BYTES, free)?.measure(threads).gb_per_s;
    profile(name, threads, HostRates { dram_gb_s, gflops: gflops(threads), call_us: call_us(threads) }, card, assumed)
}

/// Measured rates of the processor.
#[derive(Clone, Copy, Debug)]
pub struct HostRates {
    /// 10^9 bytes a second that it reads from memory.
    pub dram_gb_s: f64,
    /// 10^9 multiplications and additions a second.
    pub gflops: f64,
    /// Time of a fork and join of its threads, us.
    pub call_us: f64,
}

/// As [`machine`], with rates of the processor that were measured already, with `threads` threads.
///
/// # Errors
/// [`Error::Usage`] for a name or an assumed figure that is out of range.
pub fn profile(
    name: &str,
    threads: usize,
    host: HostRates,
    card: Option<CardRates>,
    assumed: Assumed,
) -> Result<MachineProfile> {
    let Assumed { device_gb_s, device_gflops, link_gb_s, copy_us, sync_us } = assumed;
    let given = [device_gb_s, device_gflops, link_gb_s, copy_us, sync_us];
    let found = card.as_ref().map(|c| [c.device_gb_s, c.device_gflops, c.link_gb_s, c.copy_us, c.sync_us]);
    let value = |i: usize| given[i].or(found.map(|found| found[i])).unwrap_or(ASSUMED[i].1);
    let [device_gb_s, device_gflops, link_gb_s, copy_us, sync_us] = std::array::from_fn(value);
    // A rate that the user gave counts as assumed, even with a card.
    let (mut measured, mut not) = (vec![Rate::DramGbS, Rate::HostGflops, Rate::CallUs], Vec::new());
    for (i, (rate, _)) in ASSUMED.iter().enumerate() {
        if card.is_some() && given[i].is_none() { measured.push(*rate) } else { not.push(*rate) }
    }
    let note = match &card {
        Some(_) => {
            format!("host memory, arithmetic and calls measured with {threads} threads, device and link with its card")
        }
        None => format!("host memory, arithmetic and calls measured with {threads} threads, device and link not"),
    };
    let profile = MachineProfile {
        name: name.to_owned(),
        note,
        measured_unix: Some(clock::unix_seconds()),
        measured,
        assumed: not,
        dram_gb_s: host.dram_gb_s,
        host_gflops: host.gflops,
        device_gb_s,
        device_gflops,
        link_gb_s,
        call_us: host.call_us,
        copy_us,
        sync_us,
        moves: card.map(|card| card.moves).unwrap_or_default(),
        stage: None,
    };
    let usage = |(field, why): (&str, String)| {
        Error::Usage(format!("--{}: {why}", if field == "name" { "save".into() } else { field.replace('_', "-") }))
    };
    profile.check().map_err(usage)?;
    Ok(profile)
}

/// Adds up all words in several independent sums, so that additions do not wait for each other.
fn sum_words(bytes: &[u8]) -> u64 {
    let words: &[u64] = bytemuck::cast_slice(&bytes[..bytes.len() / 8 * 8]);
    let mut sums = [0u64; 16];
    for chunk in words.chunks_exact(16) {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Rates, VirtualDevice};

    /// A profile was saved beside other work, with calls of 130 us instead of 0.1.
    #[test]
    fn a_figure_that_something_else_disturbed_is_told_from_one_that_is_steady() {
        let check = |rate, rounds: [f64; 5]| {
            let mut rounds = rounds.into_iter();
            Repeated::of(|| Ok(rounds.next().unwrap())).unwrap().check(rate)
        };
        assert_eq!(check(Rate::DramGbS, [30.0, 34.0, 35.0, 36.0, 35.5]), Ok(()));
        let why = check(Rate::DramGbS, [35.0, 12.0, 34.0, 36.0, 35.0]).unwrap_err();
        assert_eq!(why, "dram_gb_s 35.00, from 12.00 to 36.00 in 5 rounds");
        assert_eq!(check(Rate::CallUs, [0.1, 0.3, 0.1, 2.0, 0.1]), Ok(()), "microseconds change no plan");
        assert_eq!(check(Rate::CallUs, [20.0, 21.0, 19.0, 25.0, 30.0]), Ok(()), "a machine with slow calls");
        assert!(check(Rate::CallUs, [130.0, 131.0, 129.0, 130.0, 130.0]).is_err(), "disturbed all the time");
        assert!(check(Rate::CallUs, [0.1, 0.1, 0.1, 0.2, 90.0]).is_err());
    }

    #[test]
    fn ways_of_a_device_with_known_rates_are_found() {
        let rates = Rates {
            device_gb_s: 100.0,
            device_gflops: 60.0,
            link_gb_s: 8.0,
            host_gb_s: 50.0,
            host_gflops: 400.0,
            call_us: 20.0,
            copy_us: 6.0,
            sync_us: 9.0,
        };
        let mut device = VirtualDevice::new(u64::MAX, rates);
        let mut host = PinnedBuffer::new(8 << 20);
        host.iter_mut().zip(0..).for_each(|(word, i)| *word = i);
        let to = device.alloc(32 << 20).unwrap();
        let from = device.alloc(32 << 20).unwrap();
        let found = device_gflops(&mut device, from, to).unwrap();
        // With the start of the kernel.
        assert!((0.9..=1.0).contains(&(found / rates.device_gflops)), "{found} GFLOP/s");
        let found = moves(&mut device, &host, to).unwrap();
        let expected =
            [(MoveMethod::Single, 0.0, 6.0), (MoveMethod::Batched, 0.0, 6.0), (MoveMethod::Gather, 20.0, 0.0)];
        assert_eq!(found.len(), 3);
        for (rate, (method, group_us, piece_us)) in found.iter().zip(expected) {
            let near = |a: f64, b: f64| (a - b).abs() < 0.5;
            let right = near(rate.group_us, group_us) && near(rate.piece_us, piece_us) && near(rate.gb_s, 8.0);
            assert!(rate.method == method && right, "{rate:?}");
        }
    }
}
