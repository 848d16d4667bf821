//! One layer's slots: which neuron each holds, and where each neuron is (DynamicInfer C.2: `gpu_bucket` and its inverse).
//!
//! Plain data that only the engine's thread uses, and only between two uses of the layer. A slot is free, being filled or resident.
//! While it is being filled, its old neuron already is a miss and its new one still is: a neuron is found only when all its bytes are
//! there.

use super::tier::Location;
use crate::device::NONE;
use crate::ids::{SlotId, StoreId};
use std::sync::atomic::{AtomicU64, Ordering};

/// Changes of all tables so far.
static CHANGES: AtomicU64 = AtomicU64::new(0);

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
    /// Per neuron: the slot where it is resident, or [`NONE`].
    slot_of: Vec<u32>,
    /// Per neuron: whether a copy of it is on its way.
    coming: Vec<bool>,
    /// Slots whose entry of `gpu_bucket` has changed since the device got the entries last, each once.
    stale: Vec<SlotId>,
    is_stale: Vec<bool>,
    residents: usize,
    version: u64,
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

fn next_version() -> u64 {
    CHANGES.fetch_add(1, Ordering::Relaxed) + 1
}

impl SlotTable {
    /// A table of `slots` free slots for a layer of `neurons` neurons.
    pub fn new(slots: usize, neurons: usize) -> SlotTable {
        SlotTable {
            slots: vec![Slot::Free; slots],
            slot_of: vec![NONE; neurons],
            coming: vec![false; neurons],
            // The device's bucket begins as zeros; all entries have to be sent once.
            stale: (0..slots).map(SlotId::new).collect(),
            is_stale: vec![true; slots],
            residents: 0,
            version: next_version(),
        }
    }

    /// Another number whenever a slot holds something else, and never that of another table with other slots; above 0.
    pub fn version(&self) -> u64 {
        self.version
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
            None | Some(&NONE) => Location::Host,
            Some(&slot) => Location::Device(SlotId(slot)),
        }
    }

    /// Whether a copy of it is on its way.
    pub fn is_coming(&self, neuron: StoreId) -> bool {
        self.coming[neuron.index()]
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
        if held != NONE || self.coming[neuron.index()] {
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
        self.coming[neuron.index()] = true;
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
        self.coming[neuron.index()] = false;
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
        self.coming[neuron.index()] = false;
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
        self.is_stale.resize(slots, false);
        self.stale.retain(|&slot| slot.index() < slots);
        (before..slots).for_each(|slot| self.mark(SlotId::new(slot)));
        self.version = next_version();
    }

    fn mark(&mut self, slot: SlotId) {
        self.version = next_version();
        if !std::mem::replace(&mut self.is_stale[slot.index()], true) {
            self.stale.push(slot);
        }
    }

    /// Calls `tell` with each slot whose entry of `gpu_bucket` the device does not have yet, and the entry. It counts as having them then.
    pub fn take_stale(&mut self, mut tell: impl FnMut(SlotId, u32)) {
        // Taken out and put back: nothing is allocated.
        let mut stale = std::mem::take(&mut self.stale);
        for slot in stale.drain(..) {
            self.is_stale[slot.index()] = false;
            tell(slot, self.bucket(slot));
        }
        self.stale = stale;
    }

    /// How many neurons are resident.
    pub fn residents(&self) -> usize {
        self.residents
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_of_one_content() {
        let neuron = StoreId::new;
        let mut table = SlotTable::new(2, 4);
        let mut known = vec![(table.version(), table.slots().to_vec())];
        let changes: [fn(&mut SlotTable); 7] = [
            |table| _ = table.fill(SlotId::new(0), StoreId::new(3)).unwrap(),
            |table| table.landed(SlotId::new(0)),
            |table| _ = table.fill(SlotId::new(1), StoreId::new(2)).unwrap(),
            |table| table.abandon(SlotId::new(1)),
            |table| _ = table.clear(SlotId::new(0)).unwrap(),
            |table| table.resize(3),
            // A free slot goes away.
            |table| table.resize(1),
        ];
        for change in changes {
            change(&mut table);
            assert!(known.iter().all(|(version, _)| *version != table.version()));
            known.push((table.version(), table.slots().to_vec()));
        }
        // What changes nothing, and what is refused, may keep the version; another table never has it.
        let before = table.slots().to_vec();
        assert!(table.fill(SlotId::new(9), neuron(0)).is_err());
        table.take_stale(|_, _| ());
        assert_eq!(table.slots(), before);
        assert!(known.iter().all(|(version, _)| *version != SlotTable::new(2, 4).version()));
    }
}
