//! What a pass shows of each layer, for the scheduler: how long each memory's part of the FFN took, and which neurons were active.

use super::fired::{device_fired, fired_range};
use super::state::{Marks, Split};
use super::workspace::ExchangeLayout;
use crate::cache::{PerTier, Tier};
use crate::clock;
use crate::cpu::MAX_COLUMNS;
use crate::device::{Call, HostWork, Stage, Stream, fastest_ns};
use crate::engine::ffn::{Compute, Selection, Work, ffn};
use crate::engine::forward::Pass;
use crate::ids::StoreId;
use crate::model::FfnWeights;
use crate::model::config::ModelConfig;
use crate::scheduler::LayerTimes;

/// Runs of each lane when its fixed time is measured.
const TRIALS: usize = 9;

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
        computed.resize(c.layers().len(), 0);
        for (l, _) in self.chose_alone.iter().enumerate().filter(|(_, alone)| **alone) {
            let masks = &self.host.chosen[l * c.widest_ffn()..][..c.width(l)];
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
        if is_known || pass.is_chunk() || pass.cached.is_some() || c.is_mixture() {
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
            let compute = Compute { pool, kernels, config: &model.config, tiles: &mut [] };
            let read = ffn(compute, layer, &b.columns, work, threshold, &mut b.ffn, partial);
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
            if c.has_whole_experts() {
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
                FfnWeights::Experts(weights) if weights.by_neuron() => Some(weights.neuron_layout()),
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
