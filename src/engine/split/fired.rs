//! Which neurons were active in a layer, found by the CPU and read from the device.

use crate::cache::NeuronCache;
use crate::cpu::MAX_COLUMNS;
use crate::device::{NONE, SparseFfn};
use crate::engine::ffn::Selection;
use crate::ids::StoreId;

/// The neurons of a layer that were active in one pass of few tokens.
#[derive(Default)]
pub struct Fired {
    /// The layer, from 0; `None` before the first pass.
    pub layer: Option<usize>,
    /// The active neurons, in no order, and for each, bit b: for token b.
    pub neurons: Selection,
    /// The keys and values that each token went to ([`crate::model::KvCache::id`]), `[n]`.
    pub sequences: Vec<u64>,
    /// Whether the neurons in slots are among them.
    pub(super) complete: bool,
    /// They are kept for the layer's next pass.
    pub(super) kept: bool,
}

impl Fired {
    /// Memory for a layer of `ffn` neurons.
    pub(super) fn new(ffn: usize) -> Fired {
        let neurons = Selection { neurons: Vec::with_capacity(ffn), masks: Vec::with_capacity(ffn) };
        Fired { layer: None, neurons, sequences: Vec::with_capacity(MAX_COLUMNS), complete: false, kept: false }
    }
}

impl Fired {
    /// Nothing is known of this layer yet; its neurons in slots come later.
    pub(super) fn begin(&mut self, layer: usize, sequences: &[u64]) {
        (self.layer, self.complete, self.kept) = (Some(layer), false, false);
        self.sequences.clear();
        self.sequences.extend_from_slice(sequences);
        self.neurons.neurons.clear();
        self.neurons.masks.clear();
    }

    /// These neurons of a layer were active, and no others.
    pub(super) fn set(&mut self, layer: usize, neurons: &Selection, sequences: &[u64]) {
        (self.layer, self.complete) = (Some(layer), true);
        self.neurons.neurons.clone_from(&neurons.neurons);
        self.neurons.masks.clone_from(&neurons.masks);
        self.sequences.clear();
        self.sequences.extend_from_slice(sequences);
    }
}

/// Where a layer's words of active neurons are copied to, among `words` of all layers.
pub(super) fn fired_range(words: usize, cache: &NeuronCache, l: usize, n: usize) -> std::ops::Range<usize> {
    let start = l * (words / cache.layers.len());
    start..start + n * SparseFfn::fired_words(cache.layers[l].table.slots().len())
}

/// Adds the neurons in slots that were active in the same layer as those of `fired`. Their `words` have arrived: the host has waited for
/// something that stands behind them on the stream. `wanted` counts the neurons in slots that some token wanted, by layer.
pub(super) fn device_fired(
    fired: &mut Fired,
    fired_before: &mut [Selection],
    cache: &NeuronCache,
    words: &[u32],
    wanted: &[usize],
) {
    let Some(l) = fired.layer.filter(|_| !fired.complete) else { return };
    fired.complete = true;
    if wanted[l] > 0 {
        // The slots as they were when the device used the layer: moves may have been begun since.
        let (slots, n) = (cache.layers[l].bucket_entries(), fired.sequences.len());
        let bits = &words[fired_range(words.len(), cache, l, n)];
        let words = SparseFfn::fired_words(slots.len());
        for (chunk, slots) in slots.chunks(32).enumerate() {
            let mut any = (0..n).fold(0, |any, b| any | bits[b * words + chunk]);
            while any != 0 {
                let k = any.trailing_zeros();
                any &= any - 1;
                if let Some(&neuron) = slots.get(k as usize).filter(|neuron| **neuron != NONE) {
                    let mask = (0..n).fold(0, |mask, b| mask | (bits[b * words + chunk] >> k & 1) << b);
                    fired.neurons.neurons.push(StoreId(neuron));
                    fired.neurons.masks.push(mask);
                }
            }
        }
    }
    if let Some(before) = fired_before.get_mut(l).filter(|_| fired.kept) {
        before.neurons.clone_from(&fired.neurons.neurons);
        before.masks.clone_from(&fired.neurons.masks);
    }
}
