//! One layer's slots: which neuron each holds, and where each neuron is (DynamicInfer C.2: `gpu_bucket` and its inverse).
//!
//! Plain data that only the engine's thread uses, and only between two uses of the layer. A slot is free, being filled or resident.
//! While it is being filled, its old neuron already is a miss and its new one still is: a neuron is found only when all its bytes are
//! there.

use super::tier::Location;
use crate::device::NONE;
use crate::ids::{SlotId, StoreId};

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// No neuron, and none on its way.
    Free,
    /// A copy of this neuron is on its way.
    Filling(StoreId),
    /// This neuron, all of whose bytes are there.
    Resident(StoreId),
}

impl Slot {
    /// The neuron that can be read there, if there is one.
    #[inline]
    pub fn resident(self) -> Option<StoreId> {
        match self {
            Slot::Resident(neuron) => Some(neuron),
            Slot::Free | Slot::Filling(_) => None,
        }
    }
}

/// The slots of one layer, and where each of its neurons is.
#[derive(Clone, Debug)]
pub struct SlotTable {
    slots: Vec<Slot>,
    /// Per neuron: the slot where it is resident, [`COMING`] or [`NONE`].
    slot_of: Vec<u32>,
    /// By reader, the slots that have changed since it was told last, each once.
    changed: [Vec<SlotId>; READERS],
    /// Per slot: a bit for each reader that has it in its list.
    is_listed: Vec<u8>,
    residents: usize,
}

/// Place of a neuron whose copy is on its way.
const COMING: u32 = NONE - 1;

/// Readers of changes: the device, whose `gpu_bucket` they are written to, and the scheduler.
const READERS: usize = 2;

/// A reader of changes.
#[derive(Clone, Copy)]
enum Reader {
    Device,
    Scheduler,
}

/// Why a neuron cannot be brought into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is no such slot or neuron.
    OutOfRange,
    /// The slot is being filled.
    Busy,
    /// The neuron is resident or on its way.
    AlreadyThere,
}

impl SlotTable {
    /// A table of `slots` free slots for a layer of `neurons` neurons.
    pub fn new(slots: usize, neurons: usize) -> SlotTable {
        SlotTable {
            slots: vec![Slot::Free; slots],
            slot_of: vec![NONE; neurons],
            // All entries have to be told once: the device's bucket begins as zeros.
            changed: std::array::from_fn(|_| (0..slots).map(SlotId::new).collect()),
            is_listed: vec![(1 << READERS) - 1; slots],
            residents: 0,
        }
    }

    /// Neurons of the layer; 0 where it has nothing that moves.
    pub fn neurons(&self) -> usize {
        self.slot_of.len()
    }

    /// What each slot holds, `[slots]`.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Where a neuron is computed; one that the layer does not have is in no slot.
    #[inline]
    pub fn location(&self, neuron: StoreId) -> Location {
        match self.slot_of.get(neuron.index()) {
            None | Some(&(NONE | COMING)) => Location::Host,
            Some(&slot) => Location::Device(SlotId(slot)),
        }
    }

    /// Whether a copy of it is on its way.
    pub fn is_coming(&self, neuron: StoreId) -> bool {
        self.slot_of[neuron.index()] == COMING
    }

    /// The entry of the device's `gpu_bucket` for a slot: its resident neuron, or [`NONE`].
    pub fn bucket(&self, slot: SlotId) -> u32 {
        self.slots[slot.index()].resident().map_or(NONE, |neuron| neuron.0)
    }

    /// Begins to fill a slot with a neuron. The neuron that was resident there is returned and is a miss from now on.
    pub fn fill(&mut self, slot: SlotId, neuron: StoreId) -> Result<Option<StoreId>, Refused> {
        let (Some(&state), Some(&held)) = (self.slots.get(slot.index()), self.slot_of.get(neuron.index())) else {
            return Err(Refused::OutOfRange);
        };
        if held != NONE {
            return Err(Refused::AlreadyThere);
        }
        let evicted = match state {
            Slot::Free => None,
            Slot::Filling(_) => return Err(Refused::Busy),
            Slot::Resident(old) => {
                self.slot_of[old.index()] = NONE;
                self.residents -= 1;
                Some(old)
            }
        };
        self.slots[slot.index()] = Slot::Filling(neuron);
        self.slot_of[neuron.index()] = COMING;
        self.mark(slot);
        Ok(evicted)
    }

    /// The copy into a slot is done: its neuron is a hit from now on.
    ///
    /// # Panics
    /// If the slot is not being filled.
    pub fn landed(&mut self, slot: SlotId) {
        let Slot::Filling(neuron) = self.slots[slot.index()] else { panic!("slot {} is not being filled", slot.0) };
        self.slots[slot.index()] = Slot::Resident(neuron);
        self.slot_of[neuron.index()] = slot.0;
        self.residents += 1;
        self.mark(slot);
    }

    /// Empties a slot, because the budget shrinks, and returns the neuron that was in it.
    ///
    /// # Errors
    /// If there is no such slot, or it is being filled: its copy cannot be called back and would overwrite what came there next.
    pub fn clear(&mut self, slot: SlotId) -> Result<Option<StoreId>, Refused> {
        match self.slots.get(slot.index()) {
            None => Err(Refused::OutOfRange),
            Some(Slot::Filling(_)) => Err(Refused::Busy),
            Some(Slot::Free) => Ok(None),
            Some(&Slot::Resident(neuron)) => {
                self.slot_of[neuron.index()] = NONE;
                self.slots[slot.index()] = Slot::Free;
                self.residents -= 1;
                self.mark(slot);
                Ok(Some(neuron))
            }
        }
    }

    /// Frees a slot whose copy will never arrive.
    ///
    /// # Panics
    /// If the slot is not being filled.
    pub fn abandon(&mut self, slot: SlotId) {
        let Slot::Filling(neuron) = self.slots[slot.index()] else { panic!("slot {} is not being filled", slot.0) };
        self.slots[slot.index()] = Slot::Free;
        self.slot_of[neuron.index()] = NONE;
        self.mark(slot);
    }

    /// Changes the number of slots; neurons in slots that go away become misses.
    ///
    /// # Panics
    /// If a slot that goes away is being filled.
    pub fn resize(&mut self, slots: usize) {
        for slot in slots..self.slots.len() {
            self.clear(SlotId::new(slot)).expect("no slot that goes away is being filled");
        }
        let before = self.slots.len().min(slots);
        self.slots.resize(slots, Slot::Free);
        self.is_listed.resize(slots, 0);
        self.changed.iter_mut().for_each(|changed| changed.retain(|&slot| slot.index() < slots));
        (before..slots).for_each(|slot| self.mark(SlotId::new(slot)));
    }

    fn mark(&mut self, slot: SlotId) {
        let listed = std::mem::replace(&mut self.is_listed[slot.index()], (1 << READERS) - 1);
        let untold = self.changed.iter_mut().enumerate().filter(|(reader, _)| listed >> reader & 1 == 0);
        untold.for_each(|(_, changed)| changed.push(slot));
    }

    /// Calls `tell` with each slot whose entry of `gpu_bucket` the device does not have yet, and the entry. It counts as having them then.
    pub fn take_stale(&mut self, mut tell: impl FnMut(SlotId, u32)) {
        self.take_changed(Reader::Device, |table, slot| tell(slot, table.bucket(slot)));
    }

    /// Calls `tell` with each slot whose content the scheduler does not know yet, and the content. It counts as knowing it then.
    pub fn take_untold(&mut self, mut tell: impl FnMut(SlotId, Slot)) {
        self.take_changed(Reader::Scheduler, |table, slot| tell(slot, table.slots[slot.index()]));
    }

    fn take_changed(&mut self, reader: Reader, mut tell: impl FnMut(&SlotTable, SlotId)) {
        // Taken out and put back: nothing is allocated.
        let mut changed = std::mem::take(&mut self.changed[reader as usize]);
        for slot in changed.drain(..) {
            self.is_listed[slot.index()] &= !(1 << reader as u8);
            tell(self, slot);
        }
        self.changed[reader as usize] = changed;
    }

    /// How many neurons are resident.
    pub fn residents(&self) -> usize {
        self.residents
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader that applies what it is told has what the table holds, whenever it was told last.
    #[test]
    fn changes_that_are_told_add_up_to_the_table() {
        let changes: [fn(&mut SlotTable); 8] = [
            |table| _ = table.fill(SlotId::new(0), StoreId::new(3)).unwrap(),
            |table| table.landed(SlotId::new(0)),
            |table| _ = table.fill(SlotId::new(1), StoreId::new(2)).unwrap(),
            |table| table.abandon(SlotId::new(1)),
            |table| _ = table.clear(SlotId::new(0)).unwrap(),
            |table| table.resize(3),
            // A free slot goes away, and comes again.
            |table| table.resize(1),
            |table| table.resize(4),
        ];
        // Told after each change that has a bit.
        for told in 0..1 << changes.len() {
            let mut table = SlotTable::new(2, 4);
            let (mut slots, mut bucket) = (vec![Slot::Filling(StoreId::new(0)); 2], vec![7; 2]);
            for (i, change) in changes.iter().enumerate() {
                change(&mut table);
                if told >> i & 1 == 1 {
                    slots.resize(table.slots().len(), Slot::Free);
                    table.take_untold(|slot, held| slots[slot.index()] = held);
                    assert_eq!(slots, table.slots());
                } else {
                    bucket.resize(table.slots().len(), 7);
                    table.take_stale(|slot, entry| bucket[slot.index()] = entry);
                    assert!((0..bucket.len()).all(|slot| bucket[slot] == table.bucket(SlotId::new(slot))));
                }
            }
        }
    }
}
