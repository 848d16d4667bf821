//! How fast this machine reads memory, what every decoding speed is compared with, and its other rates.

use crate::clock;
use crate::cpu::Team;
use crate::error::{Error, Result};
use crate::formats::machine_profile::{MachineProfile, Rate};
use memmap2::{Advice, MmapMut};
use serde::Serialize;

/// Bytes read per pass. Far beyond any cache.
pub const READ_BYTES: usize = 2 << 30;
/// The same when the measurement must be over within two seconds: still beyond the caches of most machines.
pub const QUICK_BYTES: usize = 512 << 20;
/// Passes; the best counts, since anything else on the machine can only slow one down.
const PASSES: usize = 4;
/// Bytes that a thread takes at a time.
const PIECE: usize = 1 << 20;

#[derive(Clone, Copy, Debug, Serialize)]
pub struct ReadBandwidth {
    pub threads: usize,
    /// 10^9 bytes per second, best pass.
    pub gb_per_s: f64,
    /// Slowest pass, to show how quiet the machine was.
    pub worst_gb_per_s: f64,
}

/// Memory to read, filled, in huge pages where the system gives them.
pub struct ReadBuffer(MmapMut);

impl ReadBuffer {
    pub fn new() -> Result<ReadBuffer> {
        ReadBuffer::of(READ_BYTES)
    }

    /// `bytes` is a multiple of 1 MiB.
    pub fn of(bytes: usize) -> Result<ReadBuffer> {
        let no_room =
            |e| Error::Memory(format!("the bandwidth measurement needs {} MiB of free memory: {e}", bytes >> 20));
        let mut map = MmapMut::map_anon(bytes).map_err(no_room)?;
        // Advice only: small pages give a slightly lower figure, not a wrong one.
        let _ = map.advise(Advice::HugePage);
        for (i, page) in map.chunks_mut(4096).enumerate() {
            page[0] = i as u8;
        }
        Ok(ReadBuffer(map))
    }

    /// The best of a few sequential reads of the whole buffer by `threads` threads.
    pub fn measure(&self, threads: usize) -> ReadBandwidth {
        let mut team = Team::new(threads);
        let total = std::sync::atomic::AtomicU64::new(0);
        let mut rates: Vec<f64> = (0..PASSES)
            .map(|_| {
                let start = clock::now();
                team.run(self.0.len() / PIECE, |_, piece| {
                    let sum = sum_words(&self.0[piece * PIECE..(piece + 1) * PIECE]);
                    total.fetch_add(sum, std::sync::atomic::Ordering::Relaxed);
                });
                self.0.len() as f64 / start.elapsed().as_secs_f64() / 1e9
            })
            .collect();
        std::hint::black_box(total);
        rates.sort_by(f64::total_cmp);
        ReadBandwidth { threads, gb_per_s: rates[PASSES - 1], worst_gb_per_s: rates[0] }
    }
}

/// Calls of a measurement; some milliseconds together.
const CALLS: usize = 2000;

/// Microseconds of one fork and join of `threads` threads that do nothing: the median of [`CALLS`], one after the other.
pub fn call_us(threads: usize) -> f64 {
    let mut team = Team::new(threads);
    let mut mark = clock::now();
    let mut times: Vec<u64> = (0..CALLS)
        .map(|_| {
            // One piece runs on the caller alone and would wake nobody.
            team.run(threads.max(2), |_, _| ());
            clock::lap(&mut mark)
        })
        .collect();
    times.sort_unstable();
    // A clock may not tell one nanosecond; no call takes none.
    times[CALLS / 2].max(1) as f64 / 1e3
}

/// What is not measured: nothing here speaks to a device yet. `None` takes [`ASSUMED`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Assumed {
    pub device_gb_s: Option<f64>,
    pub link_gb_s: Option<f64>,
    pub copy_us: Option<f64>,
    pub sync_us: Option<f64>,
}

/// Device and link where nobody says: 360 GB/s is the specification of an NVIDIA RTX 3060 with 12 GB, a small card that
/// many have; 31.5 GB/s that of PCIe 4.0 with 16 lanes in one direction. Nobody specifies what a copy and a wait cost;
/// 10 us each is a round guess.
pub const ASSUMED: [(Rate, f64); 4] =
    [(Rate::DeviceGbS, 360.0), (Rate::LinkGbS, 31.5), (Rate::CopyUs, 10.0), (Rate::SyncUs, 10.0)];

/// A profile of this machine: host memory and calls measured with `threads` threads, device and link assumed. Takes about
/// two seconds, most of them to fill memory.
///
/// # Errors
/// [`Error::Usage`] for an assumed figure that cannot be, [`Error::Memory`] without room for the measurement.
pub fn machine(name: &str, threads: usize, assumed: Assumed) -> Result<MachineProfile> {
    let dram_gb_s = ReadBuffer::of(QUICK_BYTES)?.measure(threads).gb_per_s;
    profile(name, threads, dram_gb_s, assumed)
}

/// The same with a read rate that was measured already.
pub fn profile(name: &str, threads: usize, dram_gb_s: f64, assumed: Assumed) -> Result<MachineProfile> {
    let given = [assumed.device_gb_s, assumed.link_gb_s, assumed.copy_us, assumed.sync_us];
    let [device_gb_s, link_gb_s, copy_us, sync_us] = std::array::from_fn(|i| given[i].unwrap_or(ASSUMED[i].1));
    let profile = MachineProfile {
        name: name.to_owned(),
        note: format!("host memory and calls measured with {threads} threads, device and link not"),
        measured_unix: Some(clock::unix_seconds()),
        measured: vec![Rate::DramGbS, Rate::CallUs],
        assumed: ASSUMED.map(|(rate, _)| rate).to_vec(),
        dram_gb_s,
        device_gb_s,
        link_gb_s,
        call_us: call_us(threads),
        copy_us,
        sync_us,
    };
    let usage = |(field, why): (&str, String)| {
        Error::Usage(format!("--{}: {why}", if field == "name" { "save".into() } else { field.replace('_', "-") }))
    };
    profile.check().map_err(usage)?;
    Ok(profile)
}

/// Reads every word once, in several chains so that additions do not wait for each other.
fn sum_words(bytes: &[u8]) -> u64 {
    let words: &[u64] = bytemuck::cast_slice(bytes);
    let mut sums = [0u64; 16];
    for chunk in words.chunks_exact(16) {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}
