//! How a budget is shared out between the landing and the layers' frames, and how it changes between two tokens.

use super::ahead::Regions;
use super::{HALF, HALF_SHARE, HostCache, HostCacheOptions, Layer, LayerBlocks, PAGE, least_half};
use crate::ids::{SlotId, StoreId};
use std::cmp::Reverse;
use std::io;

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
        assert!(super::least_bytes(layers, neurons, align) <= all as u64, "a cache of {all} bytes cannot hold a unit");
        let least = least_half(layers, neurons, align, options.gap(layers, neurons, align));
        let half = (all / HALF_SHARE).clamp(least, HALF.max(least)) / PAGE * PAGE;
        let regions = options.ahead + 1;
        // Reads ahead take a small part of what frames would have.
        let region = (half / 2).min((all - 2 * half) / 8 / regions) / PAGE * PAGE;
        let region = if options.ahead > 0 { region } else { 0 };
        // Every layer gets the same share of the bytes.
        let layer = (all - 2 * half - regions * region) / layers.len().max(1);
        Shares { half, region, regions, layer }
    }

    /// Bytes of the landing with all its parts.
    pub fn landing(&self) -> usize {
        2 * self.half + self.regions * self.region
    }

    /// The frames of a layer of `neurons`, of so many bytes each.
    pub fn slots(&self, frame_bytes: usize, neurons: usize) -> usize {
        (self.layer.saturating_sub(PAGE) / frame_bytes).min(neurons)
    }
}

/// Whole pages for so many frames.
pub(super) fn frames_bytes(frame_bytes: usize, slots: usize) -> usize {
    (frame_bytes * slots).next_multiple_of(PAGE)
}

impl HostCache {
    /// The fewest bytes that it works with, without a frame.
    pub fn least_bytes(&self) -> u64 {
        let blocks: Vec<LayerBlocks> = self.layers.iter().map(|layer| layer.blocks.clone()).collect();
        super::least_bytes(&blocks, self.neurons, self.align)
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
        let slots: Vec<usize> = self.layers.iter().map(|l| shares.slots(l.pieces.frame_bytes, self.neurons)).collect();
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

impl Layer {
    /// Empties all frames behind the first `slots`. The neurons computed most often lately stay (of equals, the latest); where their own frame
    /// is removed, they move to the frame of a neuron that does not stay.
    fn leave(&mut self, slots: usize) {
        let held = self.table.slots().iter().enumerate();
        let mut stay: Vec<(usize, StoreId)> = held.filter_map(|(slot, held)| Some((slot, held.resident()?))).collect();
        let often = |n: StoreId| (self.frequencies[n.index()], self.last[n.index()]);
        stay.sort_by(|(_, a), (_, b)| {
            let ((a_often, a_last), (b_often, b_last)) = (often(*a), often(*b));
            b_often.total_cmp(&a_often).then((Reverse(a_last), a).cmp(&(Reverse(b_last), b)))
        });
        stay.truncate(slots);
        let mut taken = vec![false; slots];
        stay.iter().filter(|(slot, _)| *slot < slots).for_each(|(slot, _)| taken[*slot] = true);
        let mut free = (0..slots).filter(|&slot| !taken[slot]).map(SlotId::new);
        for &(slot, neuron) in stay.iter().filter(|(slot, _)| *slot >= slots) {
            let (from, to) = (SlotId::new(slot), free.next().expect("no more stay than there are frames"));
            // SAFETY: two frames of its own, which nothing else reads or writes.
            unsafe { std::ptr::copy_nonoverlapping(self.frame(from), self.frame(to), self.pieces.frame_bytes) };
            self.table.clear(from).expect("nothing is under way");
            self.table.fill(to, neuron).expect("nothing is under way");
            self.table.landed(to);
        }
        self.table.resize(slots);
    }
}
