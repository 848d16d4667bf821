//! The FFN of a store that is larger than memory: its neuron blocks come from the cache in host memory, or from disk.
//!
//! What is there is computed while the rest is read, and no matrix waits for another (PowerInfer-2 4.4): a thread first takes the dots of
//! those of a unit's neurons that are there, unit by unit, and then, for each unit in order, the dots of those that have come meanwhile and
//! all its down rows. A dot is the same whenever it is taken, and down rows are added in the order of the list: the sums are bit for bit
//! those of the mapped store.

use super::buffers::FfnBuffers;
use super::chosen::{Arrival, Chosen, Scorer};
use super::compute::Compute;
use super::experts::{ExpertBuffers, ExpertsRead, experts};
use super::many::{down, products};
use super::neurons::{Downs, Sparse, run_blocks};
use super::units::{add_units, unit_buffers};
use super::work::{Counts, Neurons, Selection, SharedCounts, Work, add_down_bias, rows_of};
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, MAX_COLUMNS, ManyForm, Prefill};
use crate::engine::routing::Routes;
use crate::engine::sparsity::Foresight;
use crate::host_cache::{Arriving, HostCache, HostCacheOptions, MAX_UNITS, STRIP, units_of};
use crate::ids::{Permutation, StoreId};
use crate::model::block::BlockPart;
use crate::model::config::Ffn;
use crate::model::ffn_weights::FfnWeights;
use crate::model::recurrence::Recurrence;
use crate::model::weights::{Layer, NormWeights};
use crate::ops::gates::gates_of;
use std::hint::spin_loop;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// The neurons of all layers where a part of them is in memory.
pub struct CachedFfn {
    /// The neurons in memory, and the reads of others.
    pub cache: HostCache,
    /// What later layers will need, if anyone looks ahead.
    pub foresight: Option<Foresight>,
    /// Host memory that the model takes beside the cache, bytes, where there is a limit for both together.
    pub beside: u64,
    /// For each layer, what kernels of all neurons need of it; its blocks are those of the strip at hand.
    strips: Vec<Layer>,
    /// Every neuron of a layer, ascending.
    all: Vec<StoreId>,
    /// The experts that a layer needs, and what a later layer will need.
    chosen: Vec<StoreId>,
    later: Vec<StoreId>,
    /// Activations of listed neurons, `[neurons, n]`.
    activations: Vec<f32>,
    /// Whether a listed neuron's are known.
    known: Vec<bool>,
    /// A strip's, `[n, neurons of the strip]`.
    strip_gates: Vec<f32>,
    strip_activations: Vec<f32>,
}

/// Host memory that a model takes of which a part lies on disk, bytes, all its parts together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostBudget {
    /// What it may take.
    pub budget: u64,
    /// What it does take, with the frames that neurons lie in.
    pub used: u64,
}

/// A stand-in for a layer: biases and types, and a place for blocks. The down bias is added once, behind the last strip.
fn stand_in(layer: &Layer) -> Layer {
    Layer {
        attn_norm: NormWeights::NONE,
        qkv: layer.qkv.clone(),
        qkv_bias: Vec::new(),
        latent: None,
        qk_norm: None,
        o: layer.o,
        o_bias: Vec::new(),
        sinks: Vec::new(),
        recurrence: Recurrence::default(),
        ffn_norm: NormWeights::NONE,
        post_norms: None,
        output_scale: 1.0,
        per_layer: None,
        width: layer.width,
        ffn: layer.ffn.clone(),
        up_bias: layer.up_bias.clone(),
        down_bias: Vec::new(),
        order: Permutation::identity(),
    }
}

/// What the FFN of one layer is computed with.
pub(in crate::engine) struct Tools<'a> {
    pub compute: Compute<'a>,
    /// Number of the layer, and the layer.
    pub layer: (usize, &'a Layer),
    /// The normalised input.
    pub x: &'a Columns,
}

impl CachedFfn {
    /// For layers whose neurons come by way of `cache`, which looks as far ahead as `foresight`.
    pub fn new(cache: HostCache, foresight: Option<Foresight>, layers: &[Layer], neurons: usize) -> CachedFfn {
        CachedFfn {
            cache,
            foresight,
            beside: 0,
            strips: layers.iter().map(stand_in).collect(),
            all: (0..neurons).map(StoreId::new).collect(),
            chosen: Vec::with_capacity(neurons),
            later: Vec::with_capacity(neurons),
            activations: Vec::new(),
            known: Vec::new(),
            strip_gates: Vec::new(),
            strip_activations: Vec::new(),
        }
    }

    /// Host memory that the model takes.
    pub fn memory(&self) -> HostBudget {
        let HostCacheOptions { bytes, .. } = *self.cache.options();
        HostBudget { budget: self.beside + bytes, used: self.beside + self.cache.used_bytes() }
    }

    /// Memory that the cache could give to others.
    pub fn spare(&self) -> u64 {
        self.cache.options().bytes.saturating_sub(self.cache.least_bytes())
    }

    /// Sets [`CachedFfn::beside`] between two passes: the cache has the rest of what both have together.
    ///
    /// # Errors
    /// As [`HostCache::set_budget`]; nothing has changed then.
    ///
    /// # Panics
    /// If that leaves the cache fewer bytes than it works with: what is more comes out of [`CachedFfn::spare`].
    pub fn set_beside(&mut self, beside: u64) -> io::Result<()> {
        self.cache.set_budget(self.memory().budget - beside)?;
        self.beside = beside;
        Ok(())
    }

    /// As [`super::ffn`].
    pub(in crate::engine) fn ffn(
        &mut self,
        mut tools: Tools<'_>,
        work: Work,
        activation_threshold: f32,
        buffers: &mut FfnBuffers,
        hidden: &mut [f32],
    ) -> Counts {
        let n = tools.x.n;
        match work {
            Work::All if n > MAX_COLUMNS => self.chunk(&mut tools, &mut buffers.columns, hidden),
            Work::All => self.dense(&mut tools, buffers, hidden),
            Work::Some(_) => unreachable!("a part of a chunk is a device's"),
            Work::Selected(list) => self.listed(&mut tools, list, None, activation_threshold, buffers, hidden),
            Work::Gates(known) => {
                let mut fired = std::mem::take(&mut buffers.fired);
                fired.fired(tools.compute.config, known, (n, tools.layer.1.width), activation_threshold);
                let counts = self.listed(&mut tools, &fired, Some(known), activation_threshold, buffers, hidden);
                buffers.fired = fired;
                counts
            }
        }
    }

    /// Begins a use of layer `l` of a mixture, whose tokens have these experts: reads of those that are not there begin. To be called as
    /// soon as they are known.
    pub(in crate::engine) fn begin_experts(&mut self, l: usize, routes: &Routes) {
        self.chosen.clear();
        self.chosen.extend(routes.groups.iter().map(|group| StoreId::new(group.expert)));
        self.cache.begin(l, &self.chosen, self.chosen.len());
    }

    /// Begins to read what a later layer will need, as it was foreseen, but for what `elsewhere(layer, neuron)` says is computed elsewhere.
    /// Between the beginning and the end of this layer's use.
    pub(in crate::engine) fn prefetch(&mut self, elsewhere: impl Fn(usize, StoreId) -> bool) {
        let Some((layer, foreseen)) = self.foresight.as_mut().and_then(Foresight::take) else { return };
        self.later.clear();
        self.later.extend(foreseen.iter().copied().filter(|&neuron| !elsewhere(layer, neuron)));
        self.cache.prefetch(layer, &self.later);
    }

    /// As [`super::experts`]: the chosen experts that are there first, the others as they come, after [`CachedFfn::begin_experts`].
    pub(in crate::engine) fn experts(
        &mut self,
        mut compute: Compute<'_>,
        l: usize,
        (routes, scorer): (&Routes, Option<Scorer<'_>>),
        x: &[f32],
        buffers: &mut ExpertBuffers,
        hidden: &mut [f32],
    ) -> ExpertsRead {
        self.prefetch(|_, _| false);
        let CachedFfn { cache, strips, chosen, .. } = self;
        let FfnWeights::Experts(weights) = &mut strips[l].ffn else {
            unreachable!("every layer of a mixture is one, of no experts perhaps")
        };
        let mut read = ExpertsRead::default();
        while let Some(round) = cache.next_round() {
            let groups = &routes.groups[round.units.clone()];
            if groups.is_empty() {
                continue;
            }
            let mut arriving = ArrivingExperts { arriving: cache.arriving(), first: 0, matrices: 0 };
            for (number, group) in round.units.clone().zip(groups) {
                let expert = &mut weights.experts[group.expert];
                arriving.matrices = expert.parts().count();
                for (m, matrix) in expert.parts_mut().enumerate() {
                    let at = arriving.arriving.address(number * arriving.matrices + m);
                    // SAFETY: it lies there until the round has been computed, and nothing is read of it before it is there.
                    *matrix = unsafe { matrix.placed(at) };
                }
            }
            arriving.first = round.units.start;
            let now = Chosen { weights, groups, tokens: &routes.tokens, arrival: &arriving, scorer };
            read += experts(compute.again(), &now, x, buffers, hidden);
            let pieces = round.units.start * arriving.matrices..round.units.end * arriving.matrices;
            pieces.for_each(|piece| arriving.arriving.keep(piece));
        }
        cache.end(chosen);
        read
    }

    /// Listed neurons, for up to [`MAX_COLUMNS`] columns.
    fn listed(
        &mut self,
        tools: &mut Tools<'_>,
        list: &Selection,
        known: Option<&[f32]>,
        activation_threshold: f32,
        buffers: &mut FfnBuffers,
        hidden: &mut [f32],
    ) -> Counts {
        let Tools { ref mut compute, layer: (l, layer), x } = *tools;
        let Compute { pool, kernels, config, .. } = compute.again();
        let (n, neurons) = (x.n, list.neurons.len());
        let units = units_of(neurons, layer.block().bytes());
        self.cache.begin(l, &list.neurons, units);
        self.prefetch(|_, _| false);
        let FfnBuffers { partial, active, .. } = buffers;
        let (size, partial) = unit_buffers(partial, config, layer, n, units);
        // Taken for all neurons, so that a longer list later allocates nothing.
        active.clear();
        active.reserve(layer.width);
        active.resize(neurons, 0);
        self.known.clear();
        self.known.resize(layer.width, false);
        self.activations.resize(self.activations.len().max(layer.width * n), 0.0);
        let counts = SharedCounts::default();
        let results = Results {
            active: Parts::new(active),
            known: Parts::new(&mut self.known),
            a: Parts::new(&mut self.activations),
        };
        let outs = Parts::new(partial);
        let early: [AtomicBool; MAX_UNITS] = [const { AtomicBool::new(false) }; MAX_UNITS];
        let range = |unit: usize| unit * neurons / units..(unit + 1) * neurons / units;
        while let Some(round) = self.cache.next_round() {
            let sparse = Sparse { kernels, config, layer, x, list, known, activation_threshold };
            let unit = Arrived { sparse, arriving: self.cache.arriving() };
            let (all_here, first, len) = (round.is_here(), round.units.start, round.units.len());
            // Where nothing is read there is nothing to be early for.
            let early_tasks = if all_here { 0 } else { len };
            pool.run(early_tasks + len, |_, task| {
                if task < early_tasks {
                    counts.add(unit.early(range(first + task), &results));
                    early[first + task].store(true, Ordering::Release);
                    return;
                }
                let number = first + task - early_tasks;
                // Its first part was taken before, by a thread that waits for no other.
                while !all_here && !early[number].load(Ordering::Acquire) {
                    spin_loop();
                }
                // SAFETY: each unit has its own part.
                let out = unsafe { outs.part(number * size..(number + 1) * size) };
                out.fill(0.0);
                counts.add(unit.rest(range(number), &results, &mut out[..n * config.hidden]));
            });
        }
        self.cache.end(&list.neurons);
        add_units(pool, partial, size, config, layer, hidden);
        counts.sum()
    }

    /// All neurons, for up to [`MAX_COLUMNS`] columns.
    fn dense(&mut self, tools: &mut Tools<'_>, buffers: &mut FfnBuffers, hidden: &mut [f32]) -> Counts {
        let Tools { ref mut compute, layer: (l, layer), x } = *tools;
        let Compute { pool, kernels, config, .. } = compute.again();
        let units = units_of(layer.width, layer.block().bytes());
        buffers.active.clear();
        let (size, partial) = unit_buffers(&mut buffers.partial, config, layer, x.n, units);
        let outs = Parts::new(partial);
        let end = |unit: usize| (unit + 1) * layer.width / units;
        self.cache.begin_strips(l, units, end);
        while let Some((parts, strip)) = next_strip(&mut self.cache, &mut self.strips[l], layer) {
            let layer = &self.strips[l];
            debug_assert_eq!(strip.end, end(parts.end - 1));
            pool.run(parts.len(), |_, task| {
                let unit = parts.start + task;
                // SAFETY: each unit has its own part.
                let out = unsafe { outs.part(unit * size..(unit + 1) * size) };
                out.fill(0.0);
                let range = unit * layer.width / units..end(unit);
                run_blocks(kernels, config, layer, x, range, &mut out[..x.n * config.hidden]);
            });
        }
        add_units(pool, partial, size, config, layer, hidden);
        rows_of(config, layer.width)
    }

    /// All neurons, for a prompt's chunk. A strip is as many neurons as a sum over them takes at a time: the sums are the mapped store's.
    fn chunk(&mut self, tools: &mut Tools<'_>, columns: &mut Columns, hidden: &mut [f32]) -> Counts {
        let n = tools.x.n;
        // A strip takes the form that all neurons together would.
        let down_type = tools.layer.1.block().down().quant;
        let Compute { kernels, config, .. } = tools.compute;
        let kernels = match kernels.form_across(down_type, tools.layer.1.width) {
            ManyForm::Floats => kernels.with(Prefill::Exact),
            _ => *kernels,
        };
        self.begin_products(tools);
        while let Some(strip) = self.next_products(tools) {
            let Tools { ref mut compute, layer: (l, _), .. } = *tools;
            let (neurons, acts) = (Neurons::Some(&self.all[strip.clone()]), &self.strip_activations[..n * strip.len()]);
            let compute = Compute { kernels: &kernels, ..compute.again() };
            down(compute, &self.strips[l], neurons, acts, n, columns, hidden);
        }
        add_down_bias(tools.layer.1, hidden);
        rows_of(config, tools.layer.1.width)
    }

    /// As [`super::activations`].
    pub(in crate::engine) fn activations(&mut self, mut tools: Tools<'_>, gates: &mut [f32], activations: &mut [f32]) {
        self.begin_products(&tools);
        while let Some(strip) = self.next_products(&mut tools) {
            let (ffn, len) = (tools.layer.1.width, strip.len());
            for (from, to) in [(&self.strip_gates, &mut *gates), (&self.strip_activations, &mut *activations)] {
                for (from, to) in from.chunks_exact(len).zip(to.chunks_exact_mut(ffn)).take(tools.x.n) {
                    to[strip.clone()].copy_from_slice(from);
                }
            }
        }
    }

    /// As [`crate::ops::gates::gates`].
    pub(in crate::engine) fn gates(&mut self, mut tools: Tools<'_>, gates: &mut [f32]) {
        self.begin_products(&tools);
        let Tools { ref mut compute, layer: (l, layer), x } = tools;
        let Compute { pool, kernels, config, .. } = compute.again();
        while let Some((_, strip)) = next_strip(&mut self.cache, &mut self.strips[l], layer) {
            gates_of(pool, kernels, config, &self.strips[l], x, strip, gates);
        }
    }

    /// Begins to stream a layer for [`CachedFfn::next_products`].
    fn begin_products(&mut self, tools: &Tools<'_>) {
        let (l, ffn) = (tools.layer.0, tools.layer.1.width);
        self.cache.begin_strips(l, ffn.div_ceil(STRIP), |part| ffn.min((part + 1) * STRIP));
    }

    /// Gates and activations of the next strip, in `strip_gates` and `strip_activations`; its neurons.
    fn next_products(&mut self, tools: &mut Tools<'_>) -> Option<Range<usize>> {
        let Tools { ref mut compute, layer: (l, layer), x } = *tools;
        let (_, strip) = next_strip(&mut self.cache, &mut self.strips[l], layer)?;
        let count = x.n * strip.len();
        let (gates, activations) = (&mut self.strip_gates, &mut self.strip_activations);
        [&mut *gates, &mut *activations].into_iter().for_each(|b| b.resize(b.len().max(count), 0.0));
        let neurons = Neurons::Some(&self.all[strip.clone()]);
        let (gates, activations) = (&mut gates[..count], &mut activations[..count]);
        products(compute.again(), &self.strips[l], x, neurons, gates, activations);
        Some(strip)
    }
}

/// Waits for the next strip and makes `stand_in` the layer with its blocks. Returns its parts and its neurons.
fn next_strip(cache: &mut HostCache, stand_in: &mut Layer, layer: &Layer) -> Option<(Range<usize>, Range<usize>)> {
    let strip = cache.next_strip()?;
    // SAFETY: the strip lies there until the next one is asked for, and only its neurons are read.
    stand_in.ffn = FfnWeights::Neurons(unsafe { layer.neurons().placed(strip.neurons.start, strip.first) });
    Some((strip.parts, strip.neurons))
}

/// The experts of a round, matrix by matrix.
struct ArrivingExperts<'a> {
    arriving: Arriving<'a>,
    /// The number of the round's first in the layer's list.
    first: usize,
    /// Matrices of each.
    matrices: usize,
}

impl ArrivingExperts<'_> {
    fn piece(&self, group: usize, matrix: usize) -> usize {
        (self.first + group) * self.matrices + matrix
    }
}

impl Arrival for ArrivingExperts<'_> {
    fn is_here(&self, group: usize, matrix: usize) -> bool {
        self.arriving.is_here(self.piece(group, matrix))
    }

    fn wait(&self, group: usize, matrix: usize) {
        // What cannot be read has a fault, which says that the sum is worth nothing.
        let _ = self.arriving.piece(self.piece(group, matrix));
    }
}

/// What is known of listed neurons, each of which belongs to one unit.
struct Results {
    /// Bit b: it is active for column b.
    active: Parts<u32>,
    /// Whether its dots were taken.
    known: Parts<bool>,
    /// `[neurons, n]`
    a: Parts<f32>,
}

/// A list of neurons, some of which are on their way.
struct Arrived<'a> {
    sparse: Sparse<'a>,
    arriving: Arriving<'a>,
}

impl Arrived<'_> {
    /// The dots of those neurons of a unit that are there.
    fn early(&self, range: Range<usize>, results: &Results) -> Counts {
        let (mut counts, n) = (Counts::default(), self.sparse.x.n);
        for i in range.clone().filter(|i| self.arriving.is_here(*i)) {
            // SAFETY: each unit has its own neurons.
            let (active, known, a) = unsafe {
                (results.active.part(i..i + 1), results.known.part(i..i + 1), results.a.part(i * n..(i + 1) * n))
            };
            active[0] = self.inputs(i, self.arriving.address(i), range.end, a, &mut counts);
            known[0] = true;
        }
        counts
    }

    /// The dots of the others as they come, and all down rows, added to `out`, `[n, hidden]`.
    fn rest(&self, range: Range<usize>, results: &Results, out: &mut [f32]) -> Counts {
        let Sparse { kernels, layer, x, .. } = self.sparse;
        let (mut counts, n, part) = (Counts::default(), x.n, layer.block().down());
        let mut downs = Downs::of(kernels, layer, n);
        for i in range.clone() {
            // SAFETY: each unit has its own neurons, and what took its first part has ended.
            let (active, known, a) = unsafe {
                (results.active.part(i..i + 1), results.known.part(i..i + 1), results.a.part(i * n..(i + 1) * n))
            };
            // What cannot be read is left out; its fault says that the sum is worth nothing.
            let Some(block) = self.arriving.piece(i) else { continue };
            if !known[0] {
                active[0] = self.inputs(i, block, range.end, a, &mut counts);
            }
            if active[0] != 0 {
                counts.active += u64::from(active[0].count_ones());
                counts.downs += 1;
                downs.add(block, self.ahead(i, range.end, part), a, out);
            }
            self.arriving.keep(i);
        }
        downs.flush(out);
        counts
    }

    /// What to prefetch while this part of number `i` is read, in bytes: the same part of the next block, where what is read of it lies
    /// apart from this one and behind it.
    fn ahead(&self, i: usize, end: usize, part: BlockPart) -> usize {
        let Sparse { layer, known, .. } = self.sparse;
        let usual = part.quant.ahead(part.bytes);
        if i + 1 >= end {
            return usual;
        }
        let first = if known.is_some() { layer.block().up().offset } else { 0 };
        let next = self.arriving.address(i + 1).addr().checked_sub(self.arriving.address(i).addr());
        next.filter(|next| next + first > layer.block().bytes()).unwrap_or(usual)
    }

    /// Gate and up of number `i`: its activations for each column, zero where it is not active. Returns bit b for column b where it is.
    fn inputs(&self, i: usize, block: *const u8, end: usize, a: &mut [f32], counts: &mut Counts) -> u32 {
        let Sparse { config, layer, x, list, known, activation_threshold, .. } = self.sparse;
        let (n, plain, layout) = (x.n, config.ffn_kind == Ffn::Plain, layer.block());
        let (neuron, wanted) = (list.neurons[i].index(), list.masks[i]);
        let (mut gate, mut up) = ([0f32; MAX_COLUMNS], [0f32; MAX_COLUMNS]);
        let bias = layer.up_bias.get(neuron).copied().unwrap_or(0.0);
        match known {
            Some(known) => (0..n).for_each(|b| gate[b] = known[b * layer.width + neuron]),
            None => {
                self.sparse.dot(layout.gate_or_up(), block, self.ahead(i, end, layout.gate_or_up()), &mut gate);
                *if plain { &mut counts.ups } else { &mut counts.gates } += 1;
                if plain {
                    gate[..n].iter_mut().for_each(|gate| *gate += bias);
                }
            }
        }
        let fires = |b: usize| wanted >> b & 1 == 1 && config.activation.apply(gate[b]).abs() > activation_threshold;
        let mask = (0..n).fold(0u32, |mask, b| mask | (fires(b) as u32) << b);
        if mask == 0 {
            return 0;
        }
        if plain {
            up = gate;
        } else {
            self.sparse.dot(layout.up(), block, self.ahead(i, end, layout.up()), &mut up);
            counts.ups += 1;
            up[..n].iter_mut().for_each(|up| *up += bias);
        }
        for (b, a) in a.iter_mut().enumerate() {
            let fires = mask >> b & 1 == 1;
            *a = if fires { config.ffn_kind.activation(config.activation, gate[b], up[b]) } else { 0.0 };
        }
        a.iter().enumerate().fold(0, |bits, (b, &a)| bits | u32::from(a != 0.0) << b)
    }
}
