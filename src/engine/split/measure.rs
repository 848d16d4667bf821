//! What a pass shows of each layer, for the scheduler: how long each memory's part of the FFN took, and which neurons were active.

use super::Split;
use super::workspace::ExchangeLayout;
use crate::cache::{NeuronCache, PerTier, Tier};
use crate::clock;
use crate::cpu::MAX_COLUMNS;
use crate::device::{Call, Device, Event, HostWork, NONE, SparseFfn, Stage, Stream, fastest_ns};
use crate::engine::ffn::{Selection, Work, ffn};
use crate::engine::forward::Pass;
use crate::ids::StoreId;
use crate::model::FfnWeights;
use crate::model::config::ModelConfig;
use crate::scheduler::LayerTimes;

/// Runs of each lane when its fixed time is measured.
const TRIALS: usize = 9;

/// The marks around a layer's work on the compute stream.
pub(super) struct Marks {
    /// What the host asked for has arrived.
    pub exchanged: Event,
    /// The device begins with its neurons, and is done with them.
    pub ffn: [Event; 2],
    /// The device begins to add the parts of both memories, and has added them.
    pub merge: [Event; 2],
}

impl Marks {
    /// Marks of `layers` layers. Not on the token path.
    pub fn new(device: &mut dyn Device, layers: usize) -> Vec<Marks> {
        let mut event = || device.timed_event();
        (0..layers).map(|_| Marks { exchanged: event(), ffn: [event(), event()], merge: [event(), event()] }).collect()
    }
}

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
    complete: bool,
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
fn fired_range(words: usize, cache: &NeuronCache, l: usize, n: usize) -> std::ops::Range<usize> {
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
            let any = (0..n).fold(0, |any, b| any | bits[b * words + chunk]);
            for (k, &neuron) in slots.iter().enumerate().filter(|(k, neuron)| any >> k & 1 == 1 && **neuron != NONE) {
                let mask = (0..n).fold(0, |mask, b| mask | (bits[b * words + chunk] >> k & 1) << b);
                fired.neurons.neurons.push(StoreId(neuron));
                fired.neurons.masks.push(mask);
            }
        }
    }
    if let Some(before) = fired_before.get_mut(l).filter(|_| fired.kept) {
        before.neurons.clone_from(&fired.neurons.neurons);
        before.masks.clone_from(&fired.neurons.masks);
    }
}

impl Split {
    /// Keeps which neurons the CPU has found active; `active` has a mask for each of its selection. Those of the device come later.
    pub(super) fn host_fired(&mut self, l: usize, active: &[u32]) {
        let Split { fired, host_selection, sequences, .. } = self;
        fired.begin(l, sequences);
        for (&neuron, &mask) in host_selection.neurons.iter().zip(active).filter(|(_, mask)| **mask != 0) {
            fired.neurons.neurons.push(neuron);
            fired.neurons.masks.push(mask);
        }
    }

    /// Adds the neurons in slots that were active in the layer that [`Split::host_fired`] was called for last.
    pub(super) fn device_fired(&mut self) {
        device_fired(&mut self.fired, &mut self.fired_before, &self.cache, &self.host.fired, &self.wanted);
    }

    /// What fired before says nothing of another text.
    pub(super) fn forget_before(&mut self) {
        self.fired_before.iter_mut().for_each(|before| before.clear(0));
    }

    /// Puts the copy of which neurons were active on the compute stream.
    pub(super) fn fetch_fired(&mut self, l: usize, n: usize, hidden: usize) {
        let range = fired_range(self.host.fired.len(), &self.cache, l, n);
        let to = &mut self.host.fired[range];
        let (at, bytes, from) = ((n * hidden * 4) as u64, size_of_val(to), self.workspace.output);
        // SAFETY: the words are looked at after an event behind the copy, or after the stream was synchronised.
        unsafe { self.device.copy_out(Stream::Compute, from, at, to.as_mut_ptr().cast(), bytes) };
    }

    /// Puts the copy of the masks of a layer whose neurons the device has chosen and computes alone on the compute stream.
    pub(super) fn fetch_chosen(&mut self, l: usize, layout: ExchangeLayout) {
        let to = &mut self.host.chosen[l * layout.clusters..(l + 1) * layout.clusters];
        let (at, bytes, from) = ((layout.masks() * 4) as u64, size_of_val(to), self.workspace.exchange);
        // SAFETY: the masks are looked at after the stream was synchronised, and lie in memory that lives as long as the device.
        unsafe { self.device.copy_out(Stream::Compute, from, at, to.as_mut_ptr().cast(), bytes) };
    }

    /// Counts the neurons of the layers that the device has chosen and computed alone in a pass that is over there.
    fn count_chosen(&mut self, pass: &mut Pass<'_, '_>) {
        let c = &pass.model.config;
        let computed = &mut pass.probe.report.computed;
        computed.resize(c.layers, 0);
        for (l, _) in self.chose_alone.iter().enumerate().filter(|(_, alone)| **alone) {
            let masks = &self.host.chosen[l * c.ffn..(l + 1) * c.ffn];
            self.wanted[l] = masks.iter().filter(|mask| **mask != 0).count();
            computed[l] += masks.iter().map(|mask| u64::from(mask.count_ones())).sum::<u64>();
        }
    }

    /// Measures, once, before the first pass that the scheduler is shown: what any part of an FFN takes in each memory, the device's with no
    /// neuron, the host's with one. By the device's clock, as all times of a layer.
    pub(super) fn measure_fixed(&mut self, pass: &mut Pass<'_, '_>) {
        let (c, n) = (&pass.model.config, pass.n());
        let is_known = self.fixed_ns.is_some() || self.migrator.is_none();
        let Some(l) = self.cache.layers.iter().position(|layer| !layer.table.slots().is_empty()) else { return };
        if is_known || pass.is_chunk() || pass.cached.is_some() || c.form.experts.is_some() {
            return;
        }
        let layer = &pass.model.layers[l];
        let threshold = pass.sparsity.activation_threshold(l);
        self.host.masks.fill(0);
        self.send_masks(ExchangeLayout::new(n, c), false);
        let call = self.ffn_call(c, l, n, layer, threshold, self.cache.layers[l].table.slots().len());
        let device_ns = fastest_ns(&mut *self.device, &Call::SparseFfn(call), TRIALS);
        let Pass { model, pool, kernels, buffers: b, .. } = pass;
        let partial: &mut [f32] = bytemuck::cast_slice_mut(&mut self.host.partial[..n * c.hidden]);
        let selection = Selection { neurons: vec![StoreId(0)], masks: vec![u32::MAX >> (MAX_COLUMNS - n)] };
        b.columns.set_for(&b.x, n, layer.ffn.input_quants());
        let mut host_ns = [0; TRIALS];
        for trial in &mut host_ns {
            let (mut lap, before) = (clock::now(), self.device.totals().host_ns);
            partial.fill(0.0);
            let work = Work::Selected(&selection);
            let read =
                ffn(pool, kernels, &model.config, layer, &b.columns, work, threshold, &mut [], &mut b.ffn, partial);
            let (bytes, ns) = (read.bytes(&layer.ffn), clock::lap(&mut lap));
            self.device.worked(HostWork { stage: Stage::Ffn, bytes, operations: 0, ns });
            *trial = self.device.totals().host_ns - before;
        }
        host_ns.sort_unstable();
        self.fixed_ns = Some(PerTier::all(host_ns[TRIALS / 2]).with(Tier::Device, device_ns));
    }

    /// Reads the times of a pass of few tokens that is over on the device, and how many pairs of a neuron and a token were active in slots.
    fn measure(&mut self, c: &ModelConfig, n: usize) {
        for l in 0..self.marks.len() {
            let Split { device, cache, marks, current, wanted, .. } = self;
            let Marks { exchanged, ffn, merge } = &marks[l];
            cache.counters.ffn_ns += device.elapsed_ns(*exchanged, merge[1]);
            let t = &mut current[l];
            t.neurons[Tier::Device] = wanted[l] as u64;
            t.ffn_ns[Tier::Device] = if wanted[l] == 0 { 0 } else { device.elapsed_ns(ffn[0], ffn[1]) };
            t.merge_ns = device.elapsed_ns(merge[0], merge[1]);
            t.fixed_ns = self.fixed_ns.unwrap_or_default();
            if c.form.experts.is_some() && !c.neurons_inside() {
                // All experts that were chosen are active.
                continue;
            }
            let range = fired_range(self.host.fired.len(), &self.cache, l, n);
            let active: u64 = self.host.fired[range].iter().map(|bits| u64::from(bits.count_ones())).sum();
            self.active[l] = if self.wanted[l] == 0 { 0 } else { active };
        }
        // What a few tokens of a prompt take says nothing of a token alone.
        if n > 1 && self.sequences.windows(2).all(|two| two[0] == two[1]) {
            self.current.fill(LayerTimes::default());
        }
        std::mem::swap(&mut self.current, &mut self.times);
    }

    /// Counts what the device did in a pass that is over there.
    pub(super) fn count(&mut self, pass: &mut Pass<'_, '_>) {
        let model = pass.model;
        self.count_chosen(pass);
        self.measure(&model.config, pass.n());
        let Split { device, cache, .. } = self;
        cache.counters.tokens += pass.n() as u64;
        let mut bytes = 0;
        for (l, (&active, &wanted)) in self.active.iter().zip(&self.wanted).enumerate() {
            cache.layers[l].computed[Tier::Device] += active;
            cache.counters.computed[Tier::Device] += active;
            let ffn = &model.layers[l].ffn;
            // Of a neuron the first row, the others if it is active for some token; of an expert all.
            let layout = match ffn {
                FfnWeights::Neurons(blocks) => Some(blocks.layout),
                FfnWeights::Experts(weights) if model.config.neurons_inside() => Some(weights.neuron_layout()),
                _ => None,
            };
            let first = layout.map_or(0, |layout| layout.gate_or_up().bytes as u64);
            let all = ffn.movable_bytes();
            bytes += wanted as u64 * first + active.min(wanted as u64) * (all - first);
            if model.config.neurons_inside() && pass.sparsity.inside(l).is_none() {
                pass.probe.report.inside.0 += active;
            }
        }
        device.has_read(bytes);
    }
}
