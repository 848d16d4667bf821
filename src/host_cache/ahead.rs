//! Reads for layers whose turn has not come (PowerInfer-2 4.4): what such a layer will probably need is asked for while the layers before it
//! are computed. When its turn comes, what was rightly foreseen is there or on its way; the rest is read as without it.

use super::plan::{Ahead, Listing, Room};
use super::reads::MAX_AHEAD;
use super::state::HostCache;
use crate::device::NONE;
use crate::ids::StoreId;

impl HostCache {
    /// Asks for neurons that layer `layer` will probably need, ascending, before its turn: as many as there is room for. Neurons that are
    /// not needed after all cost their reads and nothing else. To be called between [`HostCache::begin`] and [`HostCache::end`] of an
    /// earlier layer; nothing happens where the layer is further ahead than the cache was made for, or was asked for before.
    pub fn prefetch(&mut self, layer: usize, neurons: &[StoreId]) {
        let ahead = layer.saturating_sub(self.layer);
        let place = layer % self.aheads.len();
        if self.regions.bytes == 0 || ahead == 0 || ahead > self.options.ahead || self.aheads[place].layer.is_some() {
            return;
        }
        self.mark(neurons, 255);
        self.choose(layer, neurons);
        self.mark(neurons, 0);
        let HostCache { layers, aheads, reads, slot_for, moves, regions, align, gap, options, .. } = self;
        let Ahead { layer: of, early, filling } = &mut aheads[place];
        let region = regions.first.wrapping_add(layer % regions.count * regions.bytes);
        let (at, together) = (&layers[layer], options.together);
        let room = Room { ahead, together, ..Room::new(at, *align, *gap, region, regions.bytes) };
        early.make(&room, neurons, slot_for, &mut Listing { reads, filling });
        *of = Some(layer);
        filling.iter().for_each(|f| slot_for[f.neuron.index()] = NONE);
        // Those that there was no room for do not come.
        for m in moves.iter() {
            let comes_to = &mut slot_for[m.neuron().index()];
            if *comes_to == m.slot().0 {
                layers[layer].table.abandon(m.slot());
                *comes_to = NONE;
            }
        }
        let listed = reads.listed(ahead);
        // SAFETY: frames that are filled and this layer's region are not used by others until its turn has ended.
        unsafe { reads.allow(ahead, listed) };
    }

    /// Comes to a layer: what was asked for of those that are passed over is given up, as it is at the beginning of a token.
    pub(super) fn come_to(&mut self, layer: usize) {
        self.reads.finish(0);
        let on = (layer >= self.layer).then(|| layer - self.layer);
        for place in 0..self.aheads.len() {
            if self.aheads[place].layer.is_some_and(|of| on.is_none() || of < layer) {
                self.give_up(place);
            }
        }
        match on {
            Some(0) => self.reads.clear(0),
            Some(on) => self.reads.advance(on),
            None => self.reads.advance(MAX_AHEAD + 1),
        }
        self.layer = layer;
    }

    /// Gives up all that was asked for ahead. Nothing is under way then, and nothing is listed.
    pub(super) fn rest(&mut self) {
        self.reads.finish(0);
        (0..self.aheads.len()).for_each(|place| self.give_up(place));
        self.reads.advance(MAX_AHEAD + 1);
    }

    /// Gives up what was asked for ahead: what came straight to its frame stays there.
    pub(super) fn give_up(&mut self, place: usize) {
        let Some(layer) = self.aheads[place].layer else { return };
        self.reads.finish(layer - self.layer);
        let (table, ahead) = (&mut self.layers[layer].table, &mut self.aheads[place]);
        for filling in ahead.filling.drain(..) {
            match filling.straight && self.reads.are_here(filling.reads) {
                true => table.landed(filling.slot),
                false => table.abandon(filling.slot),
            }
        }
        ahead.early.clear();
        ahead.layer = None;
    }

    /// Takes what was asked for ahead into the layer's turn: slots of neurons that are not needed after all, and that will not be
    /// copied to their frames, are freed.
    pub(super) fn take_over(&mut self, place: usize) {
        let HostCache { layers, aheads, needed, filling, layer, .. } = self;
        for f in aheads[place].filling.drain(..) {
            match f.straight || needed[f.neuron.index()] != 0 {
                true => filling.push(f),
                false => layers[*layer].table.abandon(f.slot),
            }
        }
        aheads[place].early.clear();
        aheads[place].layer = None;
    }
}
