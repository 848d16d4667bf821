//! The frames of one layer, and the neurons in them.

use super::blocks::{LayerBlocks, Pieces};
use super::memory::Memory;
use crate::cache::SlotTable;
use crate::ids::{SlotId, StoreId};
use std::cmp::Reverse;

/// A layer's frames, and what is known of its neurons.
pub(super) struct Layer {
    pub(super) number: usize,
    pub(super) blocks: LayerBlocks,
    pub(super) table: SlotTable,
    /// Its frames, and how each is laid out.
    pub(super) frames: Memory,
    pub(super) pieces: Pieces,
    /// Bytes of the frames that the disk is told of at most.
    pub(super) told: usize,
    /// Token at which each neuron was computed last, `[neurons]`.
    pub(super) last: Vec<u32>,
    /// How often each was computed lately, 0 to 1, `[neurons]`.
    pub(super) frequencies: Vec<f32>,
    /// Neurons that a device is copying from their frames.
    pub(super) held: Vec<StoreId>,
}

impl Layer {
    /// The frame of a slot.
    pub fn frame(&self, slot: SlotId) -> *mut u8 {
        self.frames.start().wrapping_add(slot.index() * self.pieces.frame_bytes)
    }

    /// Where a piece of a slot's block goes.
    pub fn frame_of(&self, slot: SlotId, piece: usize) -> *mut u8 {
        self.frame(slot).wrapping_add(self.pieces.starts[piece])
    }

    /// Empties all frames behind the first `slots`. The neurons computed most often lately stay (of equals, the latest); where their own frame
    /// is removed, they move to the frame of a neuron that does not stay.
    pub fn leave(&mut self, slots: usize) {
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
