//! How fast this machine reads memory: what every decoding speed is compared with.

use crate::clock;
use crate::cpu::Team;
use crate::error::{Error, Result};
use memmap2::{Advice, MmapMut};
use serde::Serialize;

/// Bytes read per pass. Far beyond any cache.
pub const READ_BYTES: usize = 2 << 30;
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

/// A buffer of [`READ_BYTES`], filled, in huge pages where the system gives them.
pub struct ReadBuffer(MmapMut);

impl ReadBuffer {
    pub fn new() -> Result<ReadBuffer> {
        let no_room =
            |e| Error::Memory(format!("the bandwidth measurement needs {} GiB of free memory: {e}", READ_BYTES >> 30));
        let mut map = MmapMut::map_anon(READ_BYTES).map_err(no_room)?;
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
                team.run(READ_BYTES / PIECE, |_, piece| {
                    let sum = sum_words(&self.0[piece * PIECE..(piece + 1) * PIECE]);
                    total.fetch_add(sum, std::sync::atomic::Ordering::Relaxed);
                });
                READ_BYTES as f64 / start.elapsed().as_secs_f64() / 1e9
            })
            .collect();
        std::hint::black_box(total);
        rates.sort_by(f64::total_cmp);
        ReadBandwidth { threads, gb_per_s: rates[PASSES - 1], worst_gb_per_s: rates[0] }
    }
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
