//! How much memory a cache has, and how that changes between two tokens.

use super::blocks::LayerBlocks;
use super::options::{HostCacheOptions, least_bytes};
use super::shares::{Regions, Shares, frames_bytes};
use super::state::HostCache;
use std::io;

impl HostCache {
    /// The fewest bytes that it works with, without a frame.
    pub fn least_bytes(&self) -> u64 {
        let blocks: Vec<LayerBlocks> = self.layers.iter().map(|layer| layer.blocks.clone()).collect();
        least_bytes(&blocks, self.neurons, self.align)
    }

    /// Bytes that it has for frames and landing; never more than its budget.
    pub fn bytes(&self) -> u64 {
        let frames = self.layers.iter().map(|layer| layer.frames.bytes());
        (self.landing.bytes() + frames.sum::<usize>()) as u64
    }

    /// Of [`HostCache::bytes`], those that neurons lie in, and the landing.
    pub fn used_bytes(&self) -> u64 {
        let used = self.layers.iter().map(|layer| layer.table.residents() * layer.pieces.frame_bytes);
        (self.landing.bytes() + used.sum::<usize>()) as u64
    }

    /// Changes the memory for frames and landing between two tokens; it is shared out as if the cache had been made with so much. A smaller
    /// budget is reached, and the memory given back, before this returns: of a layer's neurons those stay that were computed most often
    /// lately. In a larger one there are more frames, which fill as neurons are needed.
    ///
    /// # Errors
    /// The system does not give the memory; the budget is what it was.
    ///
    /// # Panics
    /// If the bytes are fewer than [`HostCache::least_bytes`].
    pub fn set_budget(&mut self, bytes: u64) -> io::Result<()> {
        let options = HostCacheOptions { bytes, ..self.options };
        let blocks: Vec<LayerBlocks> = self.layers.iter().map(|layer| layer.blocks.clone()).collect();
        let shares = Shares::of(&blocks, self.neurons, self.align, &options);
        let slots: Vec<usize> =
            self.layers.iter().map(|l| shares.slots(&l.blocks, l.pieces.frame_bytes, self.neurons)).collect();
        self.rest();
        // What the disk has pinned would not go back to the system.
        // SAFETY: nothing is told.
        unsafe { self.reads.disk().will_fill(&[]) };
        for (layer, &slots) in self.layers.iter_mut().zip(&slots) {
            if slots < layer.table.slots().len() {
                layer.leave(slots);
            }
        }
        let given = self.resize(shares.landing(), &slots);
        if given.is_ok() {
            self.layers.iter_mut().zip(&slots).for_each(|(layer, &slots)| layer.table.resize(slots));
            (self.half, self.options) = (shares.half, options);
            self.gap = options.gap(&blocks, self.neurons, self.align);
            let first = self.landing.start().wrapping_add(2 * shares.half);
            self.regions = Regions { first, bytes: shares.region, count: shares.regions };
        } else {
            // What has become larger becomes as it was, which needs no memory.
            let slots: Vec<usize> = self.layers.iter().map(|layer| layer.table.slots().len()).collect();
            self.resize(2 * self.half + self.regions.count * self.regions.bytes, &slots)?;
        }
        // The disk pins what it is told of, and has the system find memory for all of it at once. So it is told of what was there from the
        // start and still is: frames that are added get memory when they are filled.
        let told = self.layers.iter_mut().map(|layer| {
            layer.told = layer.told.min(layer.frames.bytes());
            (layer.frames.start(), layer.told)
        });
        let parts: Vec<_> = told.chain([(self.landing.start(), self.landing.bytes())]).collect();
        // SAFETY: it is the cache's until the disk is told again or dropped, and nothing of it is under way before that.
        unsafe { self.reads.disk().will_fill(&parts) };
        given
    }

    /// Gives the landing so many bytes, and each layer memory for so many frames. Nothing is under way, and the frames that are removed are empty.
    fn resize(&mut self, landing: usize, slots: &[usize]) -> io::Result<()> {
        // SAFETY: as the comment above says.
        unsafe {
            self.landing.resize(landing)?;
            for (layer, &slots) in self.layers.iter_mut().zip(slots) {
                layer.frames.resize(frames_bytes(layer.pieces.frame_bytes, slots))?;
            }
        }
        Ok(())
    }
}
