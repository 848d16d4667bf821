//! What a KV cache holds of a text, in a memory as small as that: the cache can serve another text, and take this one up again later.

use super::kv_cache::{KvCache, State};
use super::kv_type::KvType;
use super::positions::SavedPositions;
use super::recurrent::{Recurrent, SAVED};

/// What one layer remembered of a text.
pub(super) enum SavedLayer {
    Positions(SavedPositions),
    /// The states behind [`Saved::lens`].
    Recurrent(Vec<Vec<f32>>),
    /// Nothing: its keys and values are another layer's.
    Elsewhere,
}

impl SavedLayer {
    fn positions(&self) -> Option<&SavedPositions> {
        if let SavedLayer::Positions(positions) = self { Some(positions) } else { None }
    }
}

/// What a cache remembered of a text.
pub struct Saved {
    pub(super) kind: KvType,
    /// Lengths, ascending, behind which the text can go on where some layer has a state; the last is that of the text.
    pub(super) lens: Vec<usize>,
    pub(super) recurs: bool,
    pub(super) layers: Vec<SavedLayer>,
}

impl Saved {
    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        let layers = self.layers.iter().map(|layer| match layer {
            SavedLayer::Positions(positions) => positions.bytes(),
            SavedLayer::Recurrent(states) => states.iter().map(|state| size_of_val(&state[..]) as u64).sum(),
            SavedLayer::Elsewhere => 0,
        });
        size_of::<Saved>() as u64 + layers.map(|bytes| bytes + size_of::<SavedLayer>() as u64).sum::<u64>()
    }

    /// Positions of the text.
    pub fn len(&self) -> usize {
        self.lens.last().copied().unwrap_or(0)
    }

    /// Whether there is no position; [`KvCache::save`] saves no such text.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// As [`KvCache::reach_with`].
    pub fn reach_with(&self, snapshot: &Snapshot) -> bool {
        let mut keys = self.layers.iter().filter_map(SavedLayer::positions);
        snapshot.len <= self.len() && keys.all(|layer| layer.reaches(snapshot.len))
    }

    /// As [`KvCache::reach`]: behind how many of the first `len` positions the text can go on.
    pub fn reach(&self, len: usize) -> usize {
        let len = match self.recurs {
            true => self.lens.iter().rev().copied().find(|&kept| kept <= len).unwrap_or(0),
            false => len.min(self.len()),
        };
        if self.layers.iter().filter_map(SavedLayer::positions).all(|layer| layer.reaches(len)) { len } else { 0 }
    }
}

/// The states of all layers that have one, behind the first positions of a text.
pub struct Snapshot {
    /// How many positions.
    pub len: usize,
    states: Vec<Vec<f32>>,
}

impl Snapshot {
    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        let states = self.states.iter().map(|state| (size_of::<Vec<f32>>() + size_of_val(&state[..])) as u64);
        size_of::<Snapshot>() as u64 + states.sum::<u64>()
    }
}

impl KvCache {
    fn states_here(&self) -> impl Iterator<Item = &Recurrent> {
        self.layers.iter().filter_map(|layer| if let State::Recurrent(state) = layer { Some(state) } else { None })
    }

    /// Bytes of a [`Snapshot`] of this model.
    pub fn snapshot_bytes(&self) -> u64 {
        let states = self.states_here().map(|state| size_of::<Vec<f32>>() + state.numbers() * size_of::<f32>());
        (size_of::<Snapshot>() + states.sum::<usize>()) as u64
    }

    /// A copy of the states that are kept behind `len` positions; `None` where none are, and if there is no memory for it.
    pub fn snapshot(&self, len: usize) -> Option<Snapshot> {
        let number = self.kept_at(len)?;
        let states = self.states_here().map(|state| state.copy(Some(number)));
        Some(Snapshot { len, states: states.collect::<Option<_>>()? })
    }

    /// Whether the text can go on behind the positions of `snapshot`, which is of the same tokens, with its states: every layer of keys still has
    /// what the next token sees.
    pub fn reach_with(&self, snapshot: &Snapshot) -> bool {
        let mut keys = self.layers.iter().filter_map(State::positions);
        let sizes = self.states_here().map(Recurrent::numbers);
        snapshot.len <= self.len
            && sizes.eq(snapshot.states.iter().map(Vec::len))
            && keys.all(|layer| layer.reaches(snapshot.len))
    }

    /// Forgets the positions behind those of `snapshot`, which it [`KvCache::reach_with`], and takes over its states.
    pub fn rewind_to(&mut self, snapshot: &Snapshot) {
        assert!(self.reach_with(snapshot));
        self.saved.retain(|&saved| saved < snapshot.len);
        let (kept, mut states) = (self.saved.len(), snapshot.states.iter());
        for layer in &mut self.layers {
            if let State::Recurrent(state) = layer {
                state.go_to(states.next().expect("a state for each layer that has one"), kept);
            }
        }
        self.len = snapshot.len;
    }

    /// As [`KvCache::copy_from`], up to the positions of `snapshot` and with its states.
    pub fn copy_with(&mut self, other: &KvCache, snapshot: &Snapshot) {
        assert!(other.reach_with(snapshot) && snapshot.len <= self.context);
        for (to, from) in self.layers.iter_mut().zip(&other.layers) {
            if let (State::Positions(to), State::Positions(from)) = (to, from) {
                to.copy_from(from, snapshot.len);
            }
        }
        self.saved.clear();
        (self.len, self.untouched) = (snapshot.len, 0);
        self.rewind_to(snapshot);
    }

    /// As [`KvCache::restore`], up to the positions of `snapshot` and with its states.
    pub fn restore_with(&mut self, saved: &Saved, snapshot: &Snapshot) {
        assert!(saved.reach_with(snapshot) && self.fits(saved, snapshot.len));
        for (to, from) in self.layers.iter_mut().zip(&saved.layers) {
            if let (State::Positions(to), SavedLayer::Positions(from)) = (to, from) {
                to.restore(from, snapshot.len);
            }
        }
        self.saved.clear();
        (self.len, self.untouched) = (snapshot.len, 0);
        self.rewind_to(snapshot);
    }

    /// Lengths behind which [`KvCache::save`] lets the text go on: all of them count as one where no layer has a state.
    fn lens(&self) -> Vec<usize> {
        let last = (self.saved.last() != Some(&self.len)).then_some(self.len);
        self.saved.iter().copied().chain(last).collect()
    }

    /// States of each layer that has one which [`KvCache::save`] can keep: 1 or more.
    pub fn states(&self) -> usize {
        self.lens().len()
    }

    /// Bytes that its text takes if it is saved with the last `states` of its states.
    pub fn saved_bytes(&self, states: usize) -> u64 {
        let layers = self.layers.iter().map(|layer| match layer {
            State::Positions(positions) => positions.saved_bytes(self.len),
            State::Recurrent(state) => (states.min(self.states()) * state.numbers() * size_of::<f32>()) as u64,
            State::Elsewhere => 0,
        });
        size_of::<Saved>() as u64 + layers.map(|bytes| bytes + size_of::<SavedLayer>() as u64).sum::<u64>()
    }

    /// A copy of its text with the last `states` of its states, 1 or more; `None` for no text, and if there is no memory for the copy.
    pub fn save(&self, states: usize) -> Option<Saved> {
        let mut lens = self.lens();
        lens.drain(..lens.len().saturating_sub(states.max(1)));
        if self.len == 0 {
            return None;
        }
        let layer = |layer: &State| match layer {
            State::Positions(positions) => positions.save(self.len).map(SavedLayer::Positions),
            State::Recurrent(state) => {
                let states = lens.iter().map(|&len| state.copy(self.kept_at(len)));
                states.collect::<Option<_>>().map(SavedLayer::Recurrent)
            }
            State::Elsewhere => Some(SavedLayer::Elsewhere),
        };
        let layers: Vec<SavedLayer> = self.layers.iter().map(layer).collect::<Option<_>>()?;
        let recurs = layers.iter().any(|layer| matches!(layer, SavedLayer::Recurrent(_)));
        Some(Saved { kind: self.kind, lens, recurs, layers })
    }

    /// Whether [`KvCache::restore`] can take over the first `len` positions: they are of the same model, and there is room for them.
    pub fn fits(&self, saved: &Saved, len: usize) -> bool {
        let same = |(here, saved): (&State, &SavedLayer)| match (here, saved) {
            (State::Positions(here), SavedLayer::Positions(saved)) => here.fits(saved, len),
            (State::Recurrent(here), SavedLayer::Recurrent(states)) => {
                states.iter().all(|state| state.len() == here.numbers())
            }
            (State::Elsewhere, SavedLayer::Elsewhere) => true,
            _ => false,
        };
        let known = self.kind == saved.kind && self.layers.len() == saved.layers.len() && len <= self.context;
        known && self.layers.iter().zip(&saved.layers).all(same)
    }

    /// Becomes the first `len` positions of a saved text, 1 or more, which it [`Saved::reach`]es and which [`KvCache::fits`] here; what was here
    /// is forgotten.
    pub fn restore(&mut self, saved: &Saved, len: usize) {
        assert!(len > 0 && saved.reach(len) == len && self.fits(saved, len));
        let number = saved.lens.iter().rposition(|&kept| kept <= len).unwrap_or(0);
        let kept = if saved.recurs { SAVED.min(number + 1) } else { 0 };
        for (to, from) in self.layers.iter_mut().zip(&saved.layers) {
            match (to, from) {
                (State::Positions(to), SavedLayer::Positions(from)) => to.restore(from, len),
                (State::Recurrent(to), SavedLayer::Recurrent(states)) => {
                    to.set(&states[number], states[..kept].iter().map(Vec::as_slice));
                }
                _ => {}
            }
        }
        self.saved.clear();
        self.saved.extend_from_slice(&saved.lens[..kept]);
        (self.len, self.untouched) = (len, 0);
    }
}
