//! How a budget is shared out between the landing and the layers' frames.

use super::blocks::LayerBlocks;
use super::options::{HALF, HALF_SHARE, HostCacheOptions, PAGE, least_bytes, least_half};

/// What each gets of so many bytes.
#[derive(Debug)]
pub(super) struct Shares {
    /// Bytes of a half of the landing.
    pub half: usize,
    /// Bytes of a region for what is asked for ahead, and how many there are.
    pub region: usize,
    pub regions: usize,
    /// Bytes for the frames of each layer.
    pub layer: usize,
}

impl Shares {
    /// Of the options' bytes.
    ///
    /// # Panics
    /// If the bytes are fewer than [`super::least_bytes`].
    pub fn of(layers: &[LayerBlocks], neurons: usize, align: usize, options: &HostCacheOptions) -> Shares {
        let all = usize::try_from(options.bytes).unwrap_or(usize::MAX);
        assert!(least_bytes(layers, neurons, align) <= all as u64, "a cache of {all} bytes cannot hold a unit");
        let least = least_half(layers, neurons, align, options.gap(layers, neurons, align));
        let half = (all / HALF_SHARE).clamp(least, HALF.max(least)) / PAGE * PAGE;
        let regions = options.ahead + 1;
        // Reads ahead take a small part of what frames would have.
        let region = (half / 2).min((all - 2 * half) / 8 / regions) / PAGE * PAGE;
        let region = if options.ahead > 0 { region } else { 0 };
        // Every layer of which something is asked for gets the same share of the bytes.
        let used = layers.iter().filter(|layer| !layer.is_idle()).count();
        let layer = (all - 2 * half - regions * region) / used.max(1);
        Shares { half, region, regions, layer }
    }

    /// Bytes of the landing with all its parts.
    pub fn landing(&self) -> usize {
        2 * self.half + self.regions * self.region
    }

    /// The frames of a layer of `neurons`, of so many bytes each.
    pub fn slots(&self, blocks: &LayerBlocks, frame_bytes: usize, neurons: usize) -> usize {
        if blocks.is_idle() {
            return 0;
        }
        (self.layer.saturating_sub(PAGE) / frame_bytes).min(neurons)
    }
}

/// Whole pages for so many frames.
pub(super) fn frames_bytes(frame_bytes: usize, slots: usize) -> usize {
    (frame_bytes * slots).next_multiple_of(PAGE)
}

/// Where what is asked for ahead is kept in memory: a part of the landing for each layer that is looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regions {
    pub first: *mut u8,
    /// Bytes of each; 0 where nothing is asked for ahead.
    pub bytes: usize,
    pub count: usize,
}
