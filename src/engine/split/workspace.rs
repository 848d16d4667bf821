//! Memory for a pass: on the device, and what host and device hand each other.

use super::allocator::DeviceAllocator;
use crate::cpu::MAX_COLUMNS;
use crate::device::{Buffer, DenseFfn, Device, ExpertFfn, Mixture, OutOfMemory, PinnedBuffer, SparseFfn};
use crate::engine::routing::Routes;
use crate::model::config::ModelConfig;
use crate::model::layer::RouterInput;

/// Slots whose products are computed at a time for a chunk's FFN: enough tiles for a large GPU, and a few megabytes.
pub const SLOTS_AT_ONCE: usize = 4096;

/// Device memory for a pass of up to so many tokens as a prompt's chunk has.
pub struct DeviceWorkspace {
    /// What host and device exchange, in one copy: see [`ExchangeLayout`].
    pub exchange: Buffer,
    /// `[n, qkv_dim]`
    pub qkv: Buffer,
    /// The largest `qkv_dim` of a layer.
    pub widest_qkv: usize,
    /// `[n, q_dim]`
    pub attended: Buffer,
    /// What [`SparseFfn`] gives for up to [`MAX_COLUMNS`] tokens, or [`ExpertFfn`] for a chunk.
    pub output: Buffer,
    /// The host's part of an FFN's output, `[n, hidden]`; before that, a predictor's input.
    pub partial: Buffer,
    /// `[n, vocab]`, for up to [`MAX_COLUMNS`] tokens.
    pub logits: Buffer,
    /// For a chunk: products, `[n, SLOTS_AT_ONCE]`.
    pub products: Buffer,
    /// For a chunk: in how many tokens each neuron is active, `[parts, neurons]` ([`DenseFfn::parts`]).
    pub counts: Buffer,
    /// For a chunk: the neurons whose blocks are copied for it, `[ffn]`; of a mixture that is packed by neuron all, in their order.
    pub names: Buffer,
    /// For a mixture's chunk: slots and weights of the experts that are copied for it ([`ExpertFfn::chosen`]), `[2, n, used, 2]`; two halves
    /// of them take turns.
    pub copied: Buffer,
    /// Of each token, the index of its sequence on the device and its position, `[n, 2]` u32.
    pub positions: Buffer,
    /// By rotation ([`ModelConfig::rotations`]) that of each token, cosines and sines, `[rotations, n, head_dim]`; no bytes without any.
    pub angles: Buffer,
    /// The output of a layer's attention or FFN that is normed before it is added to the residual, `[n, hidden]`; no bytes where none is.
    pub output_sum: Buffer,
    /// What a shared expert with norms of its own reads, then what it makes, `[n, hidden]`; no bytes without one.
    pub beside: Buffer,
}

impl DeviceWorkspace {
    /// Bytes of each, in their order, for chunks of up to `chunk` tokens.
    fn sizes(c: &ModelConfig, chunk: usize) -> [usize; 14] {
        // Of a mixture's chunk all tokens' experts add to the same output.
        let whole = c.has_whole_experts();
        let of_chunks = if whole { 0 } else { c.neurons() };
        let experts_output = if whole { chunk * c.hidden * 4 } else { 0 };
        [
            ExchangeLayout::new(MAX_COLUMNS, c).bytes().max(ExchangeLayout::new(chunk, c).scores() * 4),
            chunk * c.most_of_mixers(|m| m.rows()) * 4,
            chunk * c.most_of_mixers(|m| m.cols()) * 4,
            SparseFfn::output_bytes(MAX_COLUMNS, c.hidden, c.movable()).max(experts_output),
            chunk * c.hidden * 4,
            MAX_COLUMNS * c.vocab * 4,
            chunk * of_chunks.min(c.widest_ffn()).min(SLOTS_AT_ONCE) * 4,
            DenseFfn::most_parts(chunk) * of_chunks * 4,
            of_chunks * 4,
            if whole { 2 * ExpertFfn::chosen_words(chunk, c.most_used_experts()) * 4 } else { 0 },
            chunk * 8,
            chunk * angles(c) * 4,
            if c.norms_outputs() { chunk * c.hidden * 4 } else { 0 },
            if c.has_normed_shared() { chunk * c.hidden * 4 } else { 0 },
        ]
    }

    /// Allocates all of it, for chunks of up to `chunk` tokens.
    ///
    /// # Errors
    /// The device has no room.
    pub fn new(
        allocator: &mut DeviceAllocator<'_>,
        c: &ModelConfig,
        chunk: usize,
    ) -> Result<DeviceWorkspace, OutOfMemory> {
        let mut sizes = DeviceWorkspace::sizes(c, chunk).into_iter();
        let mut next = || allocator.alloc(sizes.next().expect("one for each"));
        Ok(DeviceWorkspace {
            exchange: next()?,
            qkv: next()?,
            widest_qkv: c.most_of_mixers(|m| m.rows()),
            attended: next()?,
            output: next()?,
            partial: next()?,
            logits: next()?,
            products: next()?,
            counts: next()?,
            names: next()?,
            copied: next()?,
            positions: next()?,
            angles: next()?,
            output_sum: next()?,
            beside: next()?,
        })
    }
}

/// Cosines and sines of a token, of all rotations.
fn angles(c: &ModelConfig) -> usize {
    c.rotations().len() * c.most_of_attention(|a| a.head_dim)
}

/// Experts of a mixture that n tokens can have.
pub fn most_rows(c: &ModelConfig, n: usize) -> usize {
    if c.is_mixture() { c.clusters().min(n * c.most_used_experts()) } else { 0 }
}

/// Bytes that a device's part of an engine takes for its passes with chunks of up to `chunk` tokens, without anything of the model.
pub fn workspace_bytes(c: &ModelConfig, chunk: usize) -> u64 {
    DeviceWorkspace::sizes(c, chunk).iter().sum::<usize>() as u64
}

/// What host and device exchange in a pass, on the host's side, in pages that the device may pin.
pub struct PinnedBuffers {
    /// What came out of the device: see [`ExchangeLayout`].
    pub received: PinnedBuffer,
    /// Scores of later layers that came out of the device, `[MAX_COLUMNS, ffn]`.
    pub ahead: PinnedBuffer,
    /// Masks of the wanted neurons, `[ffn]`, that go in.
    pub masks: PinnedBuffer,
    /// Masks of every neuron, `[ffn]`, for dense layers.
    pub all_masks: PinnedBuffer,
    /// The host's part of an FFN's output, `[n, hidden]`.
    pub partial: PinnedBuffer,
    /// By layer, which slots' neurons were active for each token ([`SparseFfn::output`]): `[layers, MAX_COLUMNS, fired_words(movable)]`.
    pub fired: PinnedBuffer,
    /// Queries, keys and values that the device made, `[layers, n, qkv_dim]`; for a chunk two layers take turns. Keys and values go to the
    /// host's caches.
    pub qkv_read_back: PinnedBuffer,
    /// Input of attention, `[n, qkv_dim]`, if the CPU computes it.
    pub qkv: PinnedBuffer,
    /// Output of attention, `[n, q_dim]`, if the CPU computes it.
    pub attended: PinnedBuffer,
    /// The tokens' sequences and positions, as the device reads them.
    pub positions: PinnedBuffer,
    /// Rotations of the tokens, as the device reads them.
    pub angles: PinnedBuffer,
    /// For a chunk: in how many tokens each neuron is active, `[2, parts, neurons]`; two layers take turns.
    pub counts: PinnedBuffer,
    /// For a chunk: the neurons that are copied for it, `[layers, ffn]`.
    pub names: PinnedBuffer,
    /// By layer, masks of the wanted neurons that the device has found, `[layers, ffn]`; of a mixture nothing.
    pub chosen: PinnedBuffer,
}

/// Memory of so many words that the device has pinned; `written` says that it writes there.
///
/// # Safety
/// The device is dropped before it.
pub unsafe fn pinned(device: &mut dyn Device, words: usize, written: bool) -> PinnedBuffer {
    let room = PinnedBuffer::new(words);
    // SAFETY: its memory does not move, and the caller's promise.
    unsafe { device.pin(room.as_ptr().cast(), words * 4, written) };
    room
}

impl PinnedBuffers {
    /// Words of each but `qkv_read_back`, in their order, for passes of up to `chunk` tokens, and whether the device writes there.
    fn words(c: &ModelConfig, chunk: usize) -> [(usize, bool); 13] {
        let clusters = c.clusters();
        let whole = c.has_whole_experts();
        let of_chunks = if whole { 0 } else { c.neurons() };
        [
            ((ExchangeLayout::new(MAX_COLUMNS, c).bytes() / 4).max(chunk * c.hidden), true),
            (MAX_COLUMNS * clusters, true),
            (clusters, false),
            (clusters, false),
            (chunk * c.hidden, false),
            (c.layers().len() * MAX_COLUMNS * SparseFfn::fired_words(c.movable()), true),
            (chunk * c.most_of_mixers(|m| m.rows()), true),
            (chunk * c.most_of_mixers(|m| m.cols()), false),
            (chunk * 2, false),
            (chunk * angles(c), false),
            (2 * DenseFfn::most_parts(chunk) * of_chunks, true),
            (if c.is_mixture() { 0 } else { c.layers().len() * c.widest_ffn() }, false),
            (if c.is_mixture() { 0 } else { c.layers().len() * c.widest_ffn() }, true),
        ]
    }

    /// Words of `qkv_read_back`, where keys and values lie on the device.
    fn read_back_words(c: &ModelConfig, chunk: usize) -> usize {
        (c.layers().len() * MAX_COLUMNS).max(2 * chunk) * c.most_of_mixers(|m| m.rows())
    }

    /// Bytes of all of them for passes of up to `chunk` tokens; `attends` says whether keys and values lie on the device.
    pub fn bytes_for(c: &ModelConfig, chunk: usize, attends: bool) -> u64 {
        let words = PinnedBuffers::words(c, chunk).into_iter().map(|(words, _)| words).sum::<usize>();
        4 * (words + if attends { PinnedBuffers::read_back_words(c, chunk) } else { 0 }) as u64
    }

    /// For passes of up to `chunk` tokens.
    ///
    /// # Safety
    /// The device is dropped before they are.
    pub unsafe fn new(device: &mut dyn Device, c: &ModelConfig, chunk: usize) -> PinnedBuffers {
        let mut words = PinnedBuffers::words(c, chunk).into_iter();
        let mut room = || {
            let (words, written) = words.next().expect("one for each");
            // SAFETY: the caller's promise.
            unsafe { pinned(device, words, written) }
        };
        PinnedBuffers {
            received: room(),
            ahead: room(),
            masks: room(),
            all_masks: room(),
            partial: room(),
            fired: room(),
            qkv_read_back: PinnedBuffer::new(0),
            qkv: room(),
            attended: room(),
            positions: room(),
            angles: room(),
            counts: room(),
            names: room(),
            chosen: room(),
        }
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> u64 {
        let by_few = [&self.received, &self.ahead, &self.masks, &self.all_masks, &self.fired, &self.chosen];
        let by_all = [&self.partial, &self.qkv_read_back, &self.qkv, &self.attended, &self.positions, &self.angles];
        let of_chunks = [&self.counts, &self.names];
        let all = by_few.into_iter().chain(by_all).chain(of_chunks);
        all.map(|buffer| size_of_val(&buffer[..]) as u64).sum()
    }

    /// Where the counts of layer `l` begin: two layers take turns.
    pub fn counts_at(&self, l: usize) -> usize {
        l % 2 * (self.counts.len() / 2)
    }

    /// Allocates memory for the keys and values that the device makes of up to `chunk` tokens, if there is none.
    ///
    /// # Safety
    /// The device is dropped before they are.
    pub unsafe fn attend(&mut self, device: &mut dyn Device, c: &ModelConfig, chunk: usize) {
        if self.qkv_read_back.is_empty() {
            // SAFETY: the caller's promise.
            self.qkv_read_back = unsafe { pinned(device, PinnedBuffers::read_back_words(c, chunk), true) };
        }
    }
}

/// What a mixture's layers work with.
pub struct ExpertSplit {
    /// The chosen experts that the CPU computes, and their tokens.
    pub on_host: Routes,
    /// Slot and weight of each chosen expert ([`ExpertFfn::chosen`]), as the device reads them, and behind them the same of the shared one; where
    /// they are packed by neuron, the choice of [`crate::device::SparseFfn::input`].
    pub chosen: PinnedBuffer,
    /// The residual that routers read, `[n, hidden]`; nothing where they read what the experts read.
    pub layer_input: PinnedBuffer,
    /// How many tokens of a prompt have each expert, `[experts]`.
    pub counts: Vec<u32>,
}

impl ExpertSplit {
    /// For chunks of up to `chunk` tokens.
    ///
    /// # Safety
    /// The device is dropped before it.
    pub unsafe fn new(device: &mut dyn Device, c: &ModelConfig, chunk: usize) -> ExpertSplit {
        let [chosen, input] = ExpertSplit::words(c, chunk);
        // SAFETY: the caller's promise.
        let (chosen, layer_input) = unsafe { (pinned(device, chosen, false), pinned(device, input, true)) };
        ExpertSplit { on_host: Routes::default(), chosen, layer_input, counts: Vec::new() }
    }

    /// Words of `chosen` and `layer_input`.
    fn words(c: &ModelConfig, chunk: usize) -> [usize; 2] {
        if !c.is_mixture() {
            return [0, 0];
        }
        let residual = c.mixtures().any(|experts| experts.reads != RouterInput::FfnNorm);
        let choice = ExchangeLayout::new(MAX_COLUMNS, c).choice.max(ExchangeLayout::new(chunk, c).choice);
        [choice, if residual { chunk * c.hidden } else { 0 }]
    }

    /// Bytes of pinned memory for chunks of up to `chunk` tokens.
    pub fn bytes_for(c: &ModelConfig, chunk: usize) -> u64 {
        4 * ExpertSplit::words(c, chunk).into_iter().sum::<usize>() as u64
    }

    /// Bytes of pinned memory.
    pub fn bytes(&self) -> u64 {
        (size_of_val(&self.chosen[..]) + size_of_val(&self.layer_input[..])) as u64
    }
}

/// The layout of what host and device exchange for n tokens: normalised input `[n, hidden]`, masks `[ffn]`, residual `[n, hidden]`, scores
/// `[n, ffn]`. The first two are what [`SparseFfn`] reads; of a mixture, slots and weights of the chosen experts stand for the masks
/// ([`ExpertFfn::chosen`]) and of the shared one, or weights and masks of their neurons ([`SparseFfn::input`]).
#[derive(Clone, Copy)]
pub struct ExchangeLayout {
    /// Tokens.
    pub n: usize,
    /// Width of the residual.
    pub hidden: usize,
    /// Clusters of a layer.
    pub clusters: usize,
    /// Words that say which of them are computed.
    pub choice: usize,
}

impl ExchangeLayout {
    /// For n tokens of a model.
    pub fn new(n: usize, c: &ModelConfig) -> ExchangeLayout {
        let choice = match c.neurons_inside() {
            // Of a chunk the weights alone.
            true if n > MAX_COLUMNS => c.clusters() * n,
            true => Mixture { experts: c.clusters(), rows: most_rows(c, n) }.choice_words(n, c.neurons()),
            // Of each token the experts that it has, and behind them the shared one.
            false if c.is_mixture() => {
                let shared = usize::from(c.has_shared());
                ExpertFfn::chosen_words(n, c.most_used_experts()) + ExpertFfn::chosen_words(n, shared)
            }
            false => c.widest_ffn(),
        };
        ExchangeLayout { n, hidden: c.hidden, clusters: c.clusters(), choice }
    }

    /// Where the masks begin, in numbers of 4 bytes: a multiple of four.
    pub const fn masks(&self) -> usize {
        self.n * self.hidden
    }

    /// Where the residual begins, as [`ExchangeLayout::masks`].
    pub const fn residual(&self) -> usize {
        (self.masks() + self.choice).next_multiple_of(4)
    }

    /// Where the scores begin, as [`ExchangeLayout::masks`].
    pub const fn scores(&self) -> usize {
        (self.residual() + self.n * self.hidden).next_multiple_of(4)
    }

    /// Bytes of all parts.
    pub const fn bytes(&self) -> usize {
        (self.scores() + self.n * self.clusters) * 4
    }
}
