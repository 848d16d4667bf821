//! The KV cache: what a model remembers of the positions that a sequence has so far, layer by layer: keys and values, or a state.

use super::config::ModelConfig;
use super::kv_type::KvType;
use super::layer::{Attention, Mixer};
use super::positions::{self, Positions};
use super::recurrent::{Recurrent, SAVED, Turn, to_drop};
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// What one layer remembers of a sequence.
pub(super) enum State {
    /// Keys and values.
    Positions(Positions),
    /// What is replaced with every token.
    Recurrent(Recurrent),
    /// Nothing: its keys and values are another layer's.
    Elsewhere,
}

impl State {
    pub fn positions(&self) -> Option<&Positions> {
        if let State::Positions(positions) = self { Some(positions) } else { None }
    }
}

/// What a model remembers of one sequence: the keys and values of each layer, all of them or those that its window still needs, or its state.
pub struct KvCache {
    /// Positions that there is room for.
    pub context: usize,
    /// How its numbers are stored.
    pub kind: KvType,
    pub(super) layers: Vec<State>,
    /// Positions filled.
    pub len: usize,
    /// Lengths, ascending, whose states are kept, where some layer has a state.
    pub(super) saved: Vec<usize>,
    /// Whether some layer has a state.
    recurs: bool,
    id: u64,
    /// Positions before this one have not been written since another memory took them over ([`KvCache::mark_synced`]).
    pub(super) untouched: usize,
}

/// A number that no other text of this process has; never 0.
fn fresh_id() -> u64 {
    static IDS: AtomicU64 = AtomicU64::new(1);
    IDS.fetch_add(1, Ordering::Relaxed)
}

impl KvCache {
    /// Tokens of a text that a pass has at most.
    pub const MAX_TOKENS: usize = positions::BEYOND_WINDOW;

    /// Bytes of the keys and values of `context` positions in all layers, and of states; `u64::MAX` where it would be more.
    pub fn bytes_for(config: &ModelConfig, context: usize, kind: KvType) -> u64 {
        let layers = config.mixers().map(|mixer| match mixer {
            Mixer::Attention(layer) if layer.keys_of.is_some() => 0,
            Mixer::Attention(layer) => positions::bytes_for(&layer, context, kind),
            mixer => Recurrent::bytes_for(mixer.kept()),
        });
        layers.fold(0, u64::saturating_add)
    }

    /// Bytes of keys and values alone where every layer keeps all positions, as on a device.
    pub fn whole_bytes_for(config: &ModelConfig, context: usize, kind: KvType) -> u64 {
        let layers = config.mixers().filter_map(Mixer::on_device).map(|layer| Attention { window: None, ..layer });
        layers.map(|layer| positions::bytes_for(&layer, context, kind)).fold(0, u64::saturating_add)
    }

    /// Bytes of the keys and values of one position in all layers, which a token reads of each that it sees.
    pub fn position_bytes(config: &ModelConfig, kind: KvType) -> u64 {
        config.attentions().map(|layer| positions::bytes_for(&layer, 1, kind)).sum()
    }

    /// Positions whose keys and values so many bytes of a device hold, in f16; none where no layer's attention is computed there.
    pub fn positions_in(config: &ModelConfig, bytes: u64) -> usize {
        bytes.checked_div(KvCache::whole_bytes_for(config, 1, KvType::F16)).unwrap_or(0) as usize
    }

    /// An empty cache with room for `context` positions.
    ///
    /// # Errors
    /// [`Error::Memory`] if the system does not give that much address space. Whether so much memory is free the caller must ask
    /// itself: it is taken later, position by position. [`Error::Usage`] if the model's heads cannot be stored as `kind`.
    pub fn new(config: &ModelConfig, context: usize, kind: KvType) -> Result<KvCache> {
        config.attentions().try_for_each(|layer| kind.check(layer.head_dim))?;
        let layers = config.mixers().map(|mixer| match mixer {
            Mixer::Attention(layer) if layer.keys_of.is_some() => Some(State::Elsewhere),
            Mixer::Attention(layer) => Positions::new(&layer, context, kind).map(State::Positions),
            mixer => Recurrent::new(mixer.kept()).map(State::Recurrent),
        });
        let layers = layers.collect();
        let no_room = || Error::Memory(format!("there is no memory for the keys and values of {context} positions"));
        Ok(KvCache {
            context,
            kind,
            layers: Option::ok_or_else(layers, no_room)?,
            len: 0,
            saved: Vec::with_capacity(SAVED),
            recurs: config.recurs(),
            id: fresh_id(),
            untouched: 0,
        })
    }

    /// Writes keys (part 0) or values (part 1) of all heads of a layer, `[heads * head_dim]`, at `position`, in a pass whose tokens of this
    /// text begin at [`KvCache::len`]. A layer with a window may give up what that token does not see. A pass has at most [`KvCache::MAX_TOKENS`].
    pub fn put(&mut self, layer: usize, part: usize, position: usize, values: &[f32]) {
        assert!(position < self.context);
        self.untouched = self.untouched.min(position);
        let State::Positions(positions) = &mut self.layers[layer] else { panic!("layer {layer} has no keys") };
        positions.put(part, (self.len, position), values);
    }

    /// The state of a layer that has one, behind the positions before `position`, the first of the tokens that go on from it, and the place of
    /// the state behind them. A pass that is not committed leaves no trace.
    pub fn state(&mut self, layer: usize, position: usize) -> Turn<'_> {
        let first = position == self.len;
        let State::Recurrent(state) = &mut self.layers[layer] else { panic!("layer {layer} has no state") };
        state.next(first)
    }

    /// A pass has come to its end, and has filled the positions before `len`.
    pub fn commit(&mut self, len: usize) {
        let new = len.saturating_sub(self.len);
        self.len = self.len.max(len);
        if !self.recurs || new == 0 {
            return;
        }
        for layer in &mut self.layers {
            if let State::Recurrent(state) = layer {
                state.commit();
            }
        }
    }

    /// Keeps the states behind all positions, where some layer has one: the text can be cut back to here. Where as many are kept as may be,
    /// those of [`KvCache::overflow`] are dropped.
    pub fn checkpoint(&mut self) {
        if !self.recurs || self.len == 0 || self.saved.last() == Some(&self.len) {
            return;
        }
        let dropped = self.overflow().and_then(|len| self.kept_at(len));
        for layer in &mut self.layers {
            if let State::Recurrent(state) = layer {
                state.save(dropped);
            }
        }
        dropped.map(|dropped| self.saved.remove(dropped));
        self.saved.push(self.len);
    }

    /// The length whose states the next [`KvCache::checkpoint`] drops; `None` if it drops none.
    pub fn overflow(&self) -> Option<usize> {
        if self.saved.len() < SAVED || self.saved.last() == Some(&self.len) {
            return None;
        }
        let mut lens = [self.len; SAVED + 1];
        lens[..SAVED].copy_from_slice(&self.saved);
        Some(lens[to_drop(&lens)])
    }

    /// Number of the states that are kept behind so many positions.
    pub(super) fn kept_at(&self, len: usize) -> Option<usize> {
        self.saved.iter().position(|&saved| saved == len)
    }

    /// The number of the text whose keys and values it holds: no other cache of this process has it, nor another text in this cache that
    /// [`KvCache::renew`] was called for; never 0.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Takes a new number, because another text begins here. What others keep under the old one, such as how often each neuron fires and
    /// copies of keys and values, is not found any more.
    pub fn renew(&mut self) {
        self.id = fresh_id();
    }

    /// Positions before this one have not been written since [`KvCache::mark_synced`].
    pub fn untouched(&self) -> usize {
        self.untouched
    }

    /// Notes that another memory has the same keys and values now.
    pub fn mark_synced(&mut self) {
        self.untouched = usize::MAX;
    }

    fn positions(&self, layer: usize) -> &Positions {
        self.layers[layer].positions().unwrap_or_else(|| panic!("layer {layer} has no keys"))
    }

    /// Keys (part 0) or values (part 1) of one head of a layer as f16 bits, from position `from`, or from the first one that is kept behind it,
    /// to the last one filled, and the position of the first.
    pub fn halves(&self, layer: usize, (part, head): (usize, usize), from: usize) -> (usize, &[u16]) {
        assert_eq!(self.kind, KvType::F16);
        let positions = self.positions(layer);
        let from = from.max(positions.first()).min(self.len);
        (from, bytemuck::cast_slice(positions.head(part, head, from..self.len)))
    }

    /// Keys and values of one head at positions `range`, `[positions]` rows of [`KvType::quant`] each.
    pub fn head(&self, layer: usize, head: usize, range: Range<usize>) -> [&[u8]; 2] {
        [0, 1].map(|part| self.positions(layer).head(part, head, range.clone()))
    }

    /// Behind how many of the first `len` positions a text may go on: all of them, as many as a kept state stands behind, or none where a layer
    /// has given up what the next token sees.
    pub fn reach(&self, len: usize) -> usize {
        let len = len.min(self.len);
        let len = match self.recurs && len < self.len {
            true => self.saved.iter().rev().copied().find(|&saved| saved <= len).unwrap_or(0),
            false => len,
        };
        if self.layers.iter().filter_map(State::positions).all(|layer| layer.reaches(len)) { len } else { 0 }
    }

    /// Which of the kept states stands behind `len` positions; `None` where it is the current one.
    fn kept(&self, len: usize) -> Option<usize> {
        if len == self.len { None } else { self.kept_at(len) }
    }

    /// Becomes the first `len` positions of another cache of the same model and type, which [`KvCache::reach`] them; what was here is
    /// forgotten.
    pub fn copy_from(&mut self, other: &KvCache, len: usize) {
        assert!(other.reach(len) == len && len <= self.context);
        let number = other.kept(len);
        for (to, from) in self.layers.iter_mut().zip(&other.layers) {
            match (to, from) {
                // A layer may have given up its first positions, which none need.
                (State::Positions(to), _) if len == 0 => to.clear(),
                (State::Recurrent(to), _) if len == 0 => to.clear(),
                (State::Positions(to), State::Positions(from)) => to.copy_from(from, len),
                (State::Recurrent(to), State::Recurrent(from)) => to.copy_from(from, number),
                (State::Elsewhere, State::Elsewhere) => {}
                _ => panic!("the caches are of different models"),
            }
        }
        self.saved.clear();
        (self.len, self.untouched) = (len, 0);
    }

    /// Forgets positions from `len` on, or more where the text cannot go on there ([`KvCache::reach`]). Returns how many are left.
    pub fn rewind(&mut self, len: usize) -> usize {
        let len = self.reach(len);
        let number = self.kept(len);
        for layer in &mut self.layers {
            match (layer, number) {
                (State::Positions(positions), _) if len == 0 => positions.clear(),
                (State::Recurrent(state), _) if len == 0 => state.clear(),
                (State::Recurrent(state), Some(number)) => state.restore(number),
                _ => {}
            }
        }
        self.saved.retain(|&saved| saved <= len && len > 0);
        self.len = len;
        len
    }
}
