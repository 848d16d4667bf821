//! Memory through which weights are copied to the device for a prompt's chunk: of neurons, of whole experts, and of experts that are packed by
//! neuron. Each has two halves, one of which is filled while the other is computed.

use super::streaming::{ExpertCosts, Missing};
use super::workspace::pinned;
use crate::device::{Buffer, Device, Event, ExpertFfn, PinnedBuffer};
use crate::model::config::ModelConfig;

/// Device memory for blocks that are copied for a chunk, two buffers in one: one half is filled while the other is computed.
pub struct Streaming {
    pub(super) scratch: Buffer,
    /// Blocks of a half, a multiple of four, so that each half's names begin at a multiple of 16 bytes.
    pub(super) half: usize,
    /// By half: its blocks have arrived.
    pub(super) arrived: [Event; 2],
    /// By half: its blocks are not needed any more.
    pub(super) done: [Event; 2],
    /// Halves filled so far.
    pub(super) turn: usize,
}

/// Neurons times tokens of prompts' chunks, or of a mixture the experts of each token, by where they were computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ChunkCounts {
    /// On the device, from slots.
    pub resident: u64,
    /// On the device, from blocks that were copied for the chunk.
    pub streamed: u64,
    /// On the CPU.
    pub on_cpu: u64,
}

/// What experts are copied with for a chunk.
pub(super) struct ExpertStreaming {
    /// Slot in the scratch and weight of each copied expert ([`ExpertFfn::chosen`]), as the device reads them; each time that a half is
    /// filled has its own: `[times, n, used, 2]`.
    pub(super) chosen: PinnedBuffer,
    /// By half: its experts have arrived, and they are not needed any more.
    pub(super) arrived: [Event; 2],
    pub(super) done: [Event; 2],
    /// Where the experts are copied to; `None`: the CPU computes what is in no slot.
    pub(super) scratch: Option<Scratch>,
    /// The layer's experts that are in no slot; the first ones are copied.
    pub(super) missing: Vec<Missing>,
    pub(super) copied: usize,
    /// Whether each of the layer's experts is copied, `[experts]`.
    pub(super) is_copied: Vec<bool>,
}

/// Device memory for experts that are copied for a chunk.
pub(super) struct Scratch {
    pub(super) costs: ExpertCosts,
    /// Experts of a half.
    pub(super) half: usize,
    /// By half: gate, up and down of its experts ([`super::weights::expert_parts`]).
    pub(super) blocks: [[Buffer; 3]; 2],
}

impl Scratch {
    /// All its buffers, each once.
    pub fn buffers(&self) -> impl Iterator<Item = Buffer> {
        self.blocks.iter().flat_map(distinct)
    }
}

/// The buffers of an expert's matrices, each once.
pub(super) fn distinct(parts: &[Buffer; 3]) -> impl Iterator<Item = Buffer> {
    parts.iter().skip(usize::from(parts[0] == parts[1])).copied()
}

impl ExpertStreaming {
    /// For chunks of up to `chunk` tokens.
    ///
    /// # Safety
    /// The device is dropped before it.
    pub unsafe fn new(device: &mut dyn Device, c: &ModelConfig, chunk: usize) -> ExpertStreaming {
        let mut two = || [device.event(), device.event()];
        let (arrived, done) = (two(), two());
        // SAFETY: the caller's promise.
        let chosen = unsafe { pinned(device, ExpertStreaming::words(c, chunk), false) };
        let (missing, is_copied) = (Vec::new(), Vec::new());
        ExpertStreaming { chosen, arrived, done, scratch: None, missing, copied: 0, is_copied }
    }

    /// Words of `chosen`.
    fn words(c: &ModelConfig, chunk: usize) -> usize {
        // A half that has room for one expert is filled once for each.
        if !c.has_whole_experts() {
            return 0;
        }
        c.most_of_experts(|experts| experts.count * ExpertFfn::chosen_words(chunk, experts.used))
    }

    /// Bytes of pinned memory for chunks of up to `chunk` tokens.
    pub fn bytes_for(c: &ModelConfig, chunk: usize) -> u64 {
        4 * ExpertStreaming::words(c, chunk) as u64
    }

    /// Bytes of pinned memory.
    pub fn bytes(&self) -> u64 {
        size_of_val(&self.chosen[..]) as u64
    }
}

/// Device memory for experts that are copied for a chunk, two buffers in one: one half is filled while the other is computed.
pub(super) struct InsideStreaming {
    pub(super) costs: ExpertCosts,
    pub(super) scratch: Buffer,
    /// Neurons of a half, a multiple of four, so that each piece's names begin at a multiple of 16 bytes.
    pub(super) half: usize,
    /// By half: its neurons have arrived, and are not needed any more.
    pub(super) arrived: [Event; 2],
    pub(super) done: [Event; 2],
    /// Halves filled so far.
    pub(super) turn: usize,
    /// The layer's experts; the first ones are copied.
    pub(super) experts: Vec<Missing>,
    pub(super) copied: usize,
}
