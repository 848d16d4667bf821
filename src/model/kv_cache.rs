//! The KV cache: what a model remembers of the positions that a sequence has so far.

use super::config::ModelConfig;
use super::kv_type::KvType;
use super::layer::Attention;
use super::positions::{self, Positions};
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a model remembers of one sequence: the keys and values of each layer, all of them or those that its window still needs.
pub struct KvCache {
    /// Positions that there is room for.
    pub context: usize,
    /// How its numbers are stored.
    pub kind: KvType,
    layers: Vec<Positions>,
    /// Positions filled.
    pub len: usize,
    id: u64,
    /// Positions before this one have not been written since another memory took them over ([`KvCache::mark_synced`]).
    untouched: usize,
}

/// A number that no other text of this process has; never 0.
fn fresh_id() -> u64 {
    static IDS: AtomicU64 = AtomicU64::new(1);
    IDS.fetch_add(1, Ordering::Relaxed)
}

impl KvCache {
    /// Tokens of a text that a pass has at most.
    pub const MAX_TOKENS: usize = positions::BEYOND_WINDOW;

    /// Bytes of the keys and values of `context` positions in all layers; `u64::MAX` where it would be more.
    pub fn bytes_for(config: &ModelConfig, context: usize, kind: KvType) -> u64 {
        let layers = config.attentions().map(|layer| positions::bytes_for(&layer, context, kind));
        layers.fold(0, u64::saturating_add)
    }

    /// The same where every layer keeps all positions, as on a device.
    pub fn whole_bytes_for(config: &ModelConfig, context: usize, kind: KvType) -> u64 {
        let layers = config.attentions().map(|layer| Attention { window: None, ..layer });
        layers.map(|layer| positions::bytes_for(&layer, context, kind)).fold(0, u64::saturating_add)
    }

    /// An empty cache with room for `context` positions.
    ///
    /// # Errors
    /// [`Error::Memory`] if the system does not give that much address space. Whether so much memory is free the caller must ask
    /// itself: it is taken later, position by position. [`Error::Usage`] if the model's heads cannot be stored as `kind`.
    pub fn new(config: &ModelConfig, context: usize, kind: KvType) -> Result<KvCache> {
        config.attentions().try_for_each(|layer| kind.check(layer.head_dim))?;
        let layers = config.attentions().map(|layer| Positions::new(&layer, context, kind)).collect();
        let no_room = || Error::Memory(format!("there is no memory for the keys and values of {context} positions"));
        Ok(KvCache {
            context,
            kind,
            layers: Option::ok_or_else(layers, no_room)?,
            len: 0,
            id: fresh_id(),
            untouched: 0,
        })
    }

    /// Writes keys (part 0) or values (part 1) of all heads of a layer, `[heads * head_dim]`, at `position`, in a pass whose tokens of this
    /// text begin at [`KvCache::len`]. A layer with a window may give up what that token does not see. A pass has at most [`KvCache::MAX_TOKENS`].
    pub fn put(&mut self, layer: usize, part: usize, position: usize, values: &[f32]) {
        assert!(position < self.context);
        self.untouched = self.untouched.min(position);
        self.layers[layer].put(part, (self.len, position), values);
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

    /// Keys (part 0) or values (part 1) of one head of a layer as f16 bits, from position `from`, or from the first one that is kept behind it,
    /// to the last one filled, and the position of the first.
    pub fn halves(&self, layer: usize, (part, head): (usize, usize), from: usize) -> (usize, &[u16]) {
        assert_eq!(self.kind, KvType::F16);
        let from = from.max(self.layers[layer].first()).min(self.len);
        (from, bytemuck::cast_slice(self.layers[layer].head(part, head, from..self.len)))
    }

    /// Keys and values of one head at positions `range`, `[positions]` rows of [`KvType::quant`] each.
    pub fn head(&self, layer: usize, head: usize, range: Range<usize>) -> [&[u8]; 2] {
        [0, 1].map(|part| self.layers[layer].head(part, head, range.clone()))
    }

    /// Behind how many of the first `len` positions a text may go on: all of them, or none where a layer has given up what the next token
    /// sees.
    pub fn reach(&self, len: usize) -> usize {
        let len = len.min(self.len);
        if self.layers.iter().all(|layer| layer.reaches(len)) { len } else { 0 }
    }

    /// Becomes the first `len` positions of another cache of the same model and type, which [`KvCache::reach`] them; what was here is
    /// forgotten.
    pub fn copy_from(&mut self, other: &KvCache, len: usize) {
        assert!(other.reach(len) == len && len <= self.context);
        match len {
            // A layer may have given up its first positions, which none need.
            0 => self.layers.iter_mut().for_each(Positions::clear),
            _ => self.layers.iter_mut().zip(&other.layers).for_each(|(to, from)| to.copy_from(from, len)),
        }
        (self.len, self.untouched) = (len, 0);
    }

    /// Forgets positions from `len` on, or all where the text cannot go on there ([`KvCache::reach`]). Returns how many are left.
    pub fn rewind(&mut self, len: usize) -> usize {
        self.len = self.reach(len);
        if self.len == 0 {
            self.layers.iter_mut().for_each(Positions::clear);
        }
        self.len
    }
}
