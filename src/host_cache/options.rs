//! How a cache works and what it has counted, and the fewest bytes that it works with.

use super::blocks::LayerBlocks;
use super::reads::ReadCounts;
use crate::disk::DiskCosts;
use crate::scheduler::Policy;

/// Bytes of a half of the landing beyond which a larger one gains nothing: several hundred reads.
pub(super) const HALF: usize = 8 << 20;
/// The landing's share of the memory where there is little of it: one part in so many for each half.
pub(super) const HALF_SHARE: usize = 16;
/// Frames and halves begin at multiples of this.
pub(super) const PAGE: usize = 4096;

/// How a cache works.
#[derive(Clone, Copy, Debug)]
pub struct HostCacheOptions {
    /// Memory for frames and landing together, bytes.
    pub bytes: u64,
    /// Chooses the neurons that stay in the frames.
    pub policy: Policy,
    /// Whether neighbours are read together where [`HostCacheOptions::costs`] say that it pays.
    pub together: bool,
    /// Whether what is there is computed while the rest is read.
    pub overlap: bool,
    /// For how many layers ahead neurons may be asked for, up to [`super::MAX_AHEAD`]; 0: none are.
    pub ahead: usize,
    /// What reads cost.
    pub costs: DiskCosts,
    /// Of policies that draw.
    pub seed: u64,
}

impl HostCacheOptions {
    /// With so many bytes, and defaults for everything else.
    pub fn new(bytes: u64) -> HostCacheOptions {
        HostCacheOptions {
            bytes,
            policy: Policy::TwoQueues,
            together: true,
            overlap: true,
            ahead: 0,
            costs: DiskCosts::USUAL,
            seed: 1,
        }
    }

    /// The longest run of unwanted bytes that is read along: the disk says what is worth it, and the memory how much room there is, so that a
    /// disturbed measurement of the disk leaves the frames theirs.
    pub(super) fn gap(&self, layers: &[LayerBlocks], neurons: usize, align: usize) -> usize {
        let half = usize::try_from(self.bytes).unwrap_or(usize::MAX) / HALF_SHARE;
        let room = layers.iter().map(|layer| layer.longest_gap(neurons, align, half)).min().unwrap_or(0);
        if self.together { self.costs.gap().min(room) } else { 0 }
    }
}

/// What happened since the cache was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostCacheCounts {
    /// Neurons that were needed and in a frame.
    pub hits: u64,
    /// Neurons that were needed and had to be read.
    pub misses: u64,
    /// Neurons that were needed and had been asked for before their layer's turn.
    pub early: u64,
    /// Neurons that got a frame.
    pub kept: u64,
    /// Neurons that were streamed, all of a layer's.
    pub streamed: u64,
    /// Reads from disk.
    pub reads: ReadCounts,
    /// Nanoseconds that threads have waited for reads, all together.
    pub waited_ns: u64,
}

impl HostCacheCounts {
    /// What happened between `before` and now.
    pub fn since(&self, before: &HostCacheCounts) -> HostCacheCounts {
        HostCacheCounts {
            hits: self.hits - before.hits,
            misses: self.misses - before.misses,
            early: self.early - before.early,
            kept: self.kept - before.kept,
            streamed: self.streamed - before.streamed,
            reads: ReadCounts {
                reads: self.reads.reads - before.reads.reads,
                bytes: self.reads.bytes - before.reads.bytes,
                again: self.reads.again - before.reads.again,
                verified: self.reads.verified - before.reads.verified,
                verified_bytes: self.reads.verified_bytes - before.reads.verified_bytes,
            },
            waited_ns: self.waited_ns - before.waited_ns,
        }
    }
}

impl std::ops::AddAssign for HostCacheCounts {
    fn add_assign(&mut self, more: HostCacheCounts) {
        self.hits += more.hits;
        self.misses += more.misses;
        self.early += more.early;
        self.kept += more.kept;
        self.streamed += more.streamed;
        self.reads.reads += more.reads.reads;
        self.reads.bytes += more.reads.bytes;
        self.reads.again += more.reads.again;
        self.reads.verified += more.reads.verified;
        self.reads.verified_bytes += more.reads.verified_bytes;
        self.waited_ns += more.waited_ns;
    }
}

/// Bytes of a half of the landing for layers of `neurons` neurons, at least: the largest unit and the shortest strip.
pub(super) fn least_half(layers: &[LayerBlocks], neurons: usize, align: usize, gap: usize) -> usize {
    let of = |layer: &LayerBlocks| layer.least_half(neurons, align, gap);
    layers.iter().map(of).max().unwrap_or(0).next_multiple_of(PAGE)
}

/// The fewest bytes that a cache for these layers works with, without a frame.
pub fn least_bytes(layers: &[LayerBlocks], neurons: usize, align: usize) -> u64 {
    2 * least_half(layers, neurons, align, 0) as u64
}
