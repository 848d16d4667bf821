//! Keys and values on the device.

use super::allocator::DeviceAllocator;
use crate::device::{Buffer, Device, Heads, OutOfMemory, Stream, View};
use crate::engine::positions::TokenPosition;
use crate::model::config::ModelConfig;
use crate::model::layer::{Attention, Mixer};
use crate::model::{KvCache, KvType};

/// Keys and values on the device: a copy of the host's caches, for the sequences that were used last.
pub struct DeviceKv {
    /// The shape of each layer's attention, and the memory of its keys and values.
    pub layers: Vec<Heads>,
    cache: Buffer,
    context: usize,
    held: Vec<Held>,
    /// Passes so far.
    passes: u64,
}

/// Which sequence's keys and values are at an index on the device.
#[derive(Clone, Copy, Default)]
struct Held {
    /// [`KvCache::id`] of its text; 0 for none.
    id: u64,
    /// Positions that are there.
    len: usize,
    used: u64,
}

impl DeviceKv {
    /// Sequences for which there is room.
    pub fn sequences(&self) -> usize {
        self.held.len()
    }

    /// Frees its memory; returns the bytes.
    pub fn release(self, device: &mut dyn Device) -> u64 {
        device.free(self.cache);
        self.cache.bytes
    }

    /// Allocates room for `sequences` sequences of `context` positions, in f16.
    ///
    /// # Errors
    /// The device has no room.
    pub fn new(
        allocator: &mut DeviceAllocator<'_>,
        c: &ModelConfig,
        context: usize,
        sequences: usize,
    ) -> Result<DeviceKv, OutOfMemory> {
        let bytes = KvCache::whole_bytes_for(c, context, KvType::F16) as usize * sequences;
        let cache = allocator.alloc(bytes)?;
        let mut at = 0;
        let layer = |mixer: Mixer| {
            // A layer whose attention is not computed here has no heads.
            let of = |attention: Attention| (attention.heads, attention.kv_heads, attention.head_dim);
            let (heads, kv_heads, head_dim) = mixer.on_device().map_or((0, 0, 0), of);
            let heads = Heads { heads, kv_heads, head_dim, context, cache: View { buffer: cache, at } };
            at += (sequences * heads.sequence() * size_of::<u16>()) as u64;
            heads
        };
        let layers = c.mixers().map(layer).collect();
        Ok(DeviceKv { layers, cache, context, held: vec![Held::default(); sequences], passes: 0 })
    }

    /// Whether there is room for all sequences of a pass.
    pub fn takes(&self, positions: &[TokenPosition], caches: &[KvCache]) -> bool {
        let sequences = (0..caches.len()).filter(|&i| positions.iter().any(|p| p.sequence == i)).count();
        let fits = |p: &TokenPosition| caches[p.sequence].kind.on_device() && p.position < self.context;
        sequences <= self.held.len() && positions.iter().all(fits)
    }

    /// The index of a cache that the current pass has loaded.
    pub fn index_of(&self, kv: &KvCache) -> usize {
        self.held.iter().position(|held| held.id == kv.id()).expect("loaded at the beginning of the pass")
    }

    /// Gives each sequence of a pass an index, and copies what the host has added since.
    pub fn upload(&mut self, device: &mut dyn Device, positions: &[TokenPosition], caches: &[KvCache]) {
        self.passes += 1;
        for TokenPosition { sequence, .. } in positions {
            let kv = &caches[*sequence];
            if self.held.iter().any(|held| held.id == kv.id() && held.used == self.passes) {
                continue;
            }
            let known = self.held.iter().position(|held| held.id == kv.id());
            // A text that no cache holds any more goes first.
            let needed = |held: &Held| caches.iter().any(|kv| kv.id() == held.id);
            let oldest = || (0..self.held.len()).min_by_key(|&i| (needed(&self.held[i]), self.held[i].used));
            let oldest = || oldest().expect("there are sequences");
            let index = known.unwrap_or_else(oldest);
            let old = known.map_or(0, |index| self.held[index].len);
            let from = old.min(kv.untouched()).min(kv.len);
            self.held[index] = Held { id: kv.id(), len: kv.len, used: self.passes };
            if from == kv.len {
                continue;
            }
            for (layer, heads) in self.layers.iter().enumerate() {
                for head in 0..2 * heads.kv_heads {
                    let of_head = (head / heads.kv_heads, head % heads.kv_heads);
                    let (from, numbers) = kv.halves(layer, of_head, from);
                    let to = heads.cache.at + 2 * (heads.start(index, head) + from * heads.head_dim) as u64;
                    // SAFETY: done before anything else can happen to the cache.
                    unsafe {
                        let (from, bytes) = (numbers.as_ptr().cast(), size_of_val(numbers));
                        device.copy_in(Stream::Compute, from, bytes, self.cache, to);
                    }
                }
            }
            device.synchronize(Stream::Compute);
        }
    }

    /// Notes that the host's caches have what the device's kernels wrote in a pass.
    pub fn mark_synced(&mut self, positions: &[TokenPosition], caches: &mut [KvCache]) {
        for &TokenPosition { sequence, position } in positions {
            let index = self.index_of(&caches[sequence]);
            self.held[index].len = self.held[index].len.max(position + 1);
            caches[sequence].mark_synced();
        }
    }
}
