//! The KV cache: keys and values of the positions that a sequence has so far.

use super::config::ModelConfig;
use crate::error::{Error, Result};
use crate::formats::blocks::{BlockType, Q4_0, Q8_0};
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
    /// A byte a number, and an f16 scale for each 32 of a head: GGUF's blocks.
    Q8_0,
    /// Half a byte a number, and an f16 scale for each 32 of a head: GGUF's blocks.
    Q4_0,
}

impl KvType {
    /// All of them, the most exact first.
    pub const ALL: [KvType; 4] = [KvType::F32, KvType::F16, KvType::Q8_0, KvType::Q4_0];

    /// The name that options, settings and files have for it.
    pub const fn name(self) -> &'static str {
        match self {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
            KvType::Q8_0 => "q8_0",
            KvType::Q4_0 => "q4_0",
        }
    }

    /// The type of keys and values as rows that kernels read, each of a head at a position.
    pub const fn quant(self) -> Quant {
        match self {
            KvType::F16 => Quant::F16,
            KvType::F32 => Quant::F32,
            KvType::Q8_0 => Quant::Block(BlockType::Q8_0),
            KvType::Q4_0 => Quant::Block(BlockType::Q4_0),
        }
    }

    /// Whether a device's kernels read it; of other types attention is the host's.
    pub const fn on_device(self) -> bool {
        matches!(self, KvType::F16)
    }

    /// Bytes of the keys, or of the values, of a head at a position.
    pub const fn head_bytes(self, head_dim: usize) -> usize {
        self.quant().number_bytes(head_dim)
    }

    /// Whether heads of `head_dim` numbers can be stored so.
    ///
    /// # Errors
    /// [`Error::Usage`] with the types that can.
    pub fn check(self, head_dim: usize) -> Result<()> {
        let unit = self.quant().unit();
        if head_dim.is_multiple_of(unit) {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "keys and values in {} need heads of a multiple of {unit} numbers; this model's have {head_dim}: take f16 or f32",
            self.name()
        )))
    }

    /// Stores the numbers of a head, rounded to the nearest that the type has.
    fn put(self, values: &[f32], to: &mut [u8]) {
        match self {
            KvType::F16 => {
                let halves: &mut [u16] = bytemuck::cast_slice_mut(to);
                halves.reinterpret_cast_mut::<f16>().convert_from_f32_slice(values);
            }
            KvType::F32 => to.copy_from_slice(bytemuck::cast_slice(values)),
            KvType::Q8_0 => Q8_0::put_nearest(values, to),
            KvType::Q4_0 => Q4_0::put_nearest(values, to),
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
    /// Bytes of a head's keys, or values, at a position.
    head_bytes: usize,
    /// `[layers, 2 (keys, values), heads, context, head_bytes]` bytes, in words so that floats are aligned.
    words: Vec<u64>,
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
        ((config.layers * 2 * config.kv_heads * kind.head_bytes(config.head_dim)) as u64).saturating_mul(context as u64)
    }

    /// An empty cache with room for `context` positions.
    ///
    /// # Errors
    /// [`Error::Memory`] if the system does not give that much address space. Whether so much memory is free the caller must ask
    /// itself: it is taken later, position by position. [`Error::Usage`] if the model's heads cannot be stored as `kind`.
    pub fn new(config: &ModelConfig, context: usize, kind: KvType) -> Result<KvCache> {
        kind.check(config.head_dim)?;
        let no_room = |()| Error::Memory(format!("there is no memory for the keys and values of {context} positions"));
        let bytes = usize::try_from(KvCache::bytes_for(config, context, kind)).map_err(|_| no_room(()))?;
        Ok(KvCache {
            context,
            kind,
            heads: config.kv_heads,
            head_bytes: kind.head_bytes(config.head_dim),
            // Zeroed allocations are mapped lazily by the allocator: untouched positions cost no memory.
            words: try_zeroed_vec(bytes.div_ceil(8)).map_err(no_room)?,
            len: 0,
            id: fresh_id(),
            untouched: 0,
        })
    }

    /// Bytes of the run of one head's keys (part 0) or values (part 1) in a layer.
    fn start(&self, layer: usize, part: usize, head: usize) -> usize {
        (((layer * 2 + part) * self.heads) + head) * self.context * self.head_bytes
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// Writes keys (part 0) or values (part 1) of all heads of a layer, `[heads * head_dim]`, at `position`.
    pub fn put(&mut self, layer: usize, part: usize, position: usize, values: &[f32]) {
        assert!(position < self.context);
        self.untouched = self.untouched.min(position);
        let (run, first) = (self.context * self.head_bytes, self.start(layer, part, 0) + position * self.head_bytes);
        let (kind, head_bytes) = (self.kind, self.head_bytes);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        for (head, values) in values.chunks_exact(values.len() / self.heads).enumerate() {
            let at = first + head * run;
            kind.put(values, &mut bytes[at..at + head_bytes]);
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
        assert_eq!(self.kind, KvType::F16);
        let start = run * self.context * self.head_bytes;
        bytemuck::cast_slice(&self.bytes()[start + from * self.head_bytes..start + self.len * self.head_bytes])
    }

    /// Keys and values of one head at positions `range`, `[positions]` rows of [`KvType::quant`] each.
    pub fn head(&self, layer: usize, head: usize, range: Range<usize>) -> [&[u8]; 2] {
        assert!(range.end <= self.context);
        [0, 1].map(|part| {
            let start = self.start(layer, part, head);
            &self.bytes()[start + range.start * self.head_bytes..start + range.end * self.head_bytes]
        })
    }

    /// Copies the first `len` positions of another cache of the same shape; what was here is forgotten.
    pub fn copy_from(&mut self, other: &KvCache, len: usize) {
        assert!(len <= other.len && len <= self.context);
        assert_eq!((self.kind, self.heads, self.head_bytes), (other.kind, other.heads, other.head_bytes));
        // Per layer, part and head: one run each.
        let (from_run, to_run) = (other.context * self.head_bytes, self.context * self.head_bytes);
        let bytes = len * self.head_bytes;
        let to: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        for (to, from) in to.chunks_exact_mut(to_run).zip(other.bytes().chunks_exact(from_run)) {
            to[..bytes].copy_from_slice(&from[..bytes]);
        }
        (self.len, self.untouched) = (len, 0);
    }

    /// Forgets positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}
