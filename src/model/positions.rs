//! What an attention layer remembers of a sequence: keys and values of its positions, of all or of those that its window still needs.

use super::kv_type::KvType;
use super::layer::Attention;
use bytemuck::allocation::try_zeroed_vec;
use std::ops::Range;

/// Positions that a layer with a window keeps beyond it: the tokens of one pass, at most so many, and those by which a text may be cut back.
pub(super) const BEYOND_WINDOW: usize = 4096;
/// Positions that are given up at a time, so that as many passes move what is kept once; by the others a text may be cut back.
const GIVEN_UP: usize = 2048;

/// Keys and values of one layer and sequence. Per kv head `[capacity, head_dim]` keys and as many values, each contiguous, so that a head's
/// attention reads one run. Latents are both. Memory is reserved for the whole capacity and taken from the system as positions fill.
pub(super) struct Positions {
    kind: KvType,
    heads: usize,
    /// Keys and values, or what is both.
    parts: usize,
    /// Bytes of a head's keys, or values, at a position.
    head_bytes: usize,
    /// How many positions back attention sees, its own among them.
    window: Option<usize>,
    /// Positions that there is room for.
    capacity: usize,
    /// The first position that is kept; those before it have left the window.
    first: usize,
    /// `[parts, heads, capacity, head_bytes]` bytes, in words so that floats are aligned.
    words: Vec<u64>,
}

/// Positions of a layer that are kept for a text of `context`.
fn capacity(layer: &Attention, context: usize) -> usize {
    layer.window.map_or(context, |window| context.min(window.saturating_add(BEYOND_WINDOW)))
}

/// How many vectors of a head are kept of a position: a key and a value, or a latent.
fn parts(layer: &Attention) -> usize {
    if layer.latent.is_some() { 1 } else { 2 }
}

/// Bytes of a layer's keys and values for `context` positions; `u64::MAX` where it would be more.
pub(super) fn bytes_for(layer: &Attention, context: usize, kind: KvType) -> u64 {
    // A user's context may be any number; the rest is bounded by `Description::check`.
    let each = parts(layer) * layer.kv_heads * kind.head_bytes(layer.head_dim);
    (each as u64).saturating_mul(capacity(layer, context) as u64)
}

impl Positions {
    /// Without any positions, and with room for those of a text of `context`; `None` if the system does not give that much address space.
    pub fn new(layer: &Attention, context: usize, kind: KvType) -> Option<Positions> {
        let bytes = usize::try_from(bytes_for(layer, context, kind)).ok()?;
        Some(Positions {
            kind,
            heads: layer.kv_heads,
            parts: parts(layer),
            head_bytes: kind.head_bytes(layer.head_dim),
            window: layer.window,
            capacity: capacity(layer, context),
            first: 0,
            // Zeroed allocations are mapped lazily by the allocator: untouched positions cost no memory.
            words: try_zeroed_vec(bytes.div_ceil(8)).ok()?,
        })
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// The first position that a token at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        first_seen(self.window, position)
    }

    /// Whether a text may go on behind its first `len` positions: all that the next token sees are here.
    pub fn reaches(&self, len: usize) -> bool {
        self.first_seen(len) >= self.first
    }

    /// The first position that is kept.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Forgets all positions.
    pub fn clear(&mut self) {
        self.first = 0;
    }

    /// Writes keys (part 0) or values (part 1) of all heads, `[heads * head_dim]`, at `position`, in a pass whose first token of this text is at
    /// `begins`. Where there is no room, what that token does not see is given up.
    pub fn put(&mut self, part: usize, (begins, position): (usize, usize), values: &[f32]) {
        if position - self.first >= self.capacity {
            self.drop_before(self.first_seen(begins).min(self.first + GIVEN_UP), position);
        }
        assert!(position >= self.first && position - self.first < self.capacity, "no room for position {position}");
        let (kind, heads, head_bytes, run) = (self.kind, self.heads, self.head_bytes, self.capacity * self.head_bytes);
        let first = part * heads * run + (position - self.first) * head_bytes;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        for (head, values) in values.chunks_exact(values.len() / heads).enumerate() {
            let at = first + head * run;
            kind.put(values, &mut bytes[at..at + head_bytes]);
        }
    }

    /// Keeps positions `first..end` and gives up those before.
    fn drop_before(&mut self, first: usize, end: usize) {
        let (run, kept) = (
            self.capacity * self.head_bytes,
            (first - self.first) * self.head_bytes..(end - self.first) * self.head_bytes,
        );
        let kept = kept.start..kept.end.min(run);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        bytes.chunks_exact_mut(run).for_each(|run| run.copy_within(kept.clone(), 0));
        self.first = first;
    }

    /// Keys (part 0) or values (part 1) of one head at positions `range`, all of which are kept.
    pub fn head(&self, part: usize, head: usize, range: Range<usize>) -> &[u8] {
        assert!(self.first <= range.start && range.end - self.first <= self.capacity);
        let run = (part.min(self.parts - 1) * self.heads + head) * self.capacity;
        let at = |position: usize| (run + position - self.first) * self.head_bytes;
        &self.bytes()[at(range.start)..at(range.end)]
    }

    /// Becomes the first `len` positions of another layer of the same form; what was here is forgotten.
    pub fn copy_from(&mut self, other: &Positions, len: usize) {
        assert_eq!(self.form(), other.form());
        assert!(other.reaches(len));
        self.first = other.first;
        assert!(len - self.first <= self.capacity, "a cache keeps its whole context, or as much as the other does");
        let (from_run, to_run) = (other.capacity * self.head_bytes, self.capacity * self.head_bytes);
        let bytes = (len - self.first) * self.head_bytes;
        let to: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        for (to, from) in to.chunks_exact_mut(to_run).zip(other.bytes().chunks_exact(from_run)) {
            to[..bytes].copy_from_slice(&from[..bytes]);
        }
    }

    /// Bytes of what is kept of the first `len` positions.
    pub fn saved_bytes(&self, len: usize) -> u64 {
        (self.parts * self.heads * (len - self.first) * self.head_bytes) as u64
    }

    /// What is kept of the first `len` positions, without room for more; `None` if there is no memory for it.
    pub fn save(&self, len: usize) -> Option<SavedPositions> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(self.saved_bytes(len) as usize).ok()?;
        let (run, kept) = (self.capacity * self.head_bytes, (len - self.first) * self.head_bytes);
        self.bytes()
            .chunks_exact(run)
            .take(self.parts * self.heads)
            .for_each(|run| bytes.extend_from_slice(&run[..kept]));
        Some(SavedPositions { form: self.form(), first: self.first, bytes })
    }

    /// Whether there is room for the first `len` positions of what was saved of a layer of the same form.
    pub fn fits(&self, saved: &SavedPositions, len: usize) -> bool {
        self.form() == saved.form && saved.reaches(len) && len.saturating_sub(saved.first) <= self.capacity
    }

    /// Becomes the first `len` positions of what was saved, for which there is room; what was here is forgotten.
    pub fn restore(&mut self, saved: &SavedPositions, len: usize) {
        assert!(self.fits(saved, len));
        self.first = saved.first;
        let (from_run, to_run) = (saved.run(), self.capacity * self.head_bytes);
        let bytes = (len - self.first) * self.head_bytes;
        let to: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        for (to, from) in to.chunks_exact_mut(to_run).zip(saved.bytes.chunks_exact(from_run)) {
            to[..bytes].copy_from_slice(&from[..bytes]);
        }
    }

    fn form(&self) -> Form {
        let Positions { kind, parts, heads, head_bytes, window, .. } = *self;
        Form { kind, parts, heads, head_bytes, window }
    }
}

/// How a layer's positions lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// Their type.
    pub kind: KvType,
    /// Vectors of a head at a position: keys and values, or what is both.
    pub parts: usize,
    /// Heads.
    pub heads: usize,
    /// Bytes of such a vector.
    pub head_bytes: usize,
    /// How many positions back attention sees.
    pub window: Option<usize>,
}

/// What a layer kept of the positions of a text, in a memory as large as that.
pub(super) struct SavedPositions {
    form: Form,
    /// The first position that was kept.
    first: usize,
    /// `[parts, heads, positions, head_bytes]`
    bytes: Vec<u8>,
}

impl SavedPositions {
    /// With a copy of these bytes, whose first position is `first`; `None` if there is no memory for it.
    pub fn new(form: Form, first: usize, content: &[u8]) -> Option<SavedPositions> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(content.len()).ok()?;
        bytes.extend_from_slice(content);
        Some(SavedPositions { form, first, bytes })
    }

    /// How they lie, and the first position.
    pub fn shape(&self) -> (Form, usize) {
        (self.form, self.first)
    }

    /// Its bytes.
    pub fn content(&self) -> &[u8] {
        &self.bytes
    }

    /// Bytes of the keys, or values, of a head.
    fn run(&self) -> usize {
        self.bytes.len() / (self.form.parts * self.form.heads)
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// As [`Positions::reaches`].
    pub fn reaches(&self, len: usize) -> bool {
        first_seen(self.form.window, len) >= self.first
    }
}

/// The first position that a token at `position` sees through a window.
pub(super) fn first_seen(window: Option<usize>, position: usize) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}
