//! The KV cache: keys and values of the positions that a sequence has so far.

use super::config::ModelConfig;
use crate::error::{Error, Result};
use crate::formats::rows::Quant;
use bytemuck::allocation::try_zeroed_vec;
use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvType {
    /// 2 bytes a number (IEEE 754 half precision).
    F16,
    /// 4 bytes a number.
    F32,
}

impl KvType {
    /// Bytes of a number.
    pub const fn bytes(self) -> usize {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }

    /// The type of keys and values as rows that kernels read.
    pub const fn quant(self) -> Quant {
        match self {
            KvType::F16 => Quant::F16,
            KvType::F32 => Quant::F32,
        }
    }
}

/// One sequence's cache. Per layer and kv head, `[context, head_dim]` keys and as many values, each contiguous: a head's
/// attention reads one run. Memory is reserved for the whole context and taken from the system as positions fill.
pub struct KvCache {
    /// Positions that there is room for.
    pub context: usize,
    /// How its numbers are stored.
    pub kind: KvType,
    heads: usize,
    head_dim: usize,
    /// `[layers, 2 (keys, values), heads, context, head_dim]`
    f16s: Vec<u16>,
    f32s: Vec<f32>,
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
    /// Bytes of the keys and values of `context` positions in all layers; `u64::MAX` where it would be more.
    pub fn bytes_for(config: &ModelConfig, context: usize, kind: KvType) -> u64 {
        // A user's context may be any number; the rest is bounded by `ModelConfig::check`.
        ((config.layers * 2 * config.kv_dim() * kind.bytes()) as u64).saturating_mul(context as u64)
    }

    /// An empty cache with room for `context` positions.
    ///
    /// # Errors
    /// [`Error::Memory`] if the system does not give that much address space. Whether so much memory is free the caller must ask
    /// itself: it is taken later, position by position.
    pub fn new(config: &ModelConfig, context: usize, kind: KvType) -> Result<KvCache> {
        let no_room = |()| Error::Memory(format!("there is no memory for the keys and values of {context} positions"));
        let numbers = (config.layers * 2 * config.kv_dim()).checked_mul(context).ok_or(()).map_err(no_room)?;
        // Zeroed allocations are mapped lazily by the allocator: untouched positions cost no memory.
        let (f16s, f32s) = match kind {
            KvType::F16 => (try_zeroed_vec(numbers).map_err(no_room)?, Vec::new()),
            KvType::F32 => (Vec::new(), try_zeroed_vec(numbers).map_err(no_room)?),
        };
        Ok(KvCache {
            context,
            kind,
            heads: config.kv_heads,
            head_dim: config.head_dim,
            f16s,
            f32s,
            len: 0,
            id: fresh_id(),
            untouched: 0,
        })
    }

    fn start(&self, layer: usize, part: usize, head: usize) -> usize {
        (((layer * 2 + part) * self.heads) + head) * self.context * self.head_dim
    }

    /// Writes keys (part 0) or values (part 1) of all heads of a layer, `[heads * head_dim]`, at `position`.
    pub fn put(&mut self, layer: usize, part: usize, position: usize, values: &[f32]) {
        assert!(position < self.context);
        self.untouched = self.untouched.min(position);
        for (head, values) in values.chunks_exact(self.head_dim).enumerate() {
            let at = self.start(layer, part, head) + position * self.head_dim;
            match self.kind {
                KvType::F16 => {
                    self.f16s[at..at + self.head_dim].reinterpret_cast_mut::<f16>().convert_from_f32_slice(values)
                }
                KvType::F32 => self.f32s[at..at + self.head_dim].copy_from_slice(values),
            }
        }
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

    /// Keys or values of one head from position `from` to the last one filled, as f16 bits. `run` is (layer * 2 + part) * heads + head,
    /// part 0 being keys.
    pub fn run(&self, run: usize, from: usize) -> &[u16] {
        let start = run * self.context * self.head_dim;
        &self.f16s[start + from * self.head_dim..start + self.len * self.head_dim]
    }

    /// Keys and values of one head at positions `range`, `[positions, head_dim]` numbers of [`KvType::quant`] each.
    pub fn head(&self, layer: usize, head: usize, range: Range<usize>) -> [&[u8]; 2] {
        assert!(range.end <= self.context);
        let part = |part: usize| {
            let start = self.start(layer, part, head);
            let range = start + range.start * self.head_dim..start + range.end * self.head_dim;
            match self.kind {
                KvType::F16 => bytemuck::cast_slice(&self.f16s[range]),
                KvType::F32 => bytemuck::cast_slice(&self.f32s[range]),
            }
        };
        [part(0), part(1)]
    }

    /// Copies the first `len` positions of another cache of the same shape; what was here is forgotten.
    pub fn copy_from(&mut self, other: &KvCache, len: usize) {
        assert!(len <= other.len && len <= self.context);
        assert_eq!((self.kind, self.heads, self.head_dim), (other.kind, other.heads, other.head_dim));
        // Per layer, part and head: one run each.
        let (from_run, to_run) = (other.context * self.head_dim, self.context * self.head_dim);
        let numbers = len * self.head_dim;
        for (to, from) in self.f16s.chunks_exact_mut(to_run).zip(other.f16s.chunks_exact(from_run)) {
            to[..numbers].copy_from_slice(&from[..numbers]);
        }
        for (to, from) in self.f32s.chunks_exact_mut(to_run).zip(other.f32s.chunks_exact(from_run)) {
            to[..numbers].copy_from_slice(&from[..numbers]);
        }
        (self.len, self.untouched) = (len, 0);
    }

    /// Forgets positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}
