//! The FFN of a mixture of experts: tokens grouped by expert, each expert's matrices read once for all of its tokens.
//!
//! Four parallel calls: each expert's tokens as the kernels read them (for one token it is no call); gate and up of all experts that
//! some token has; their activations; down, by rows of the output, so that each number of it is one thread's, which adds the experts
//! in their order. Where `down` is stored by neuron, what follows the gates is [`super::firing_experts`].

use super::chosen::{Chosen, Scorer, tokens_of};
use super::compute::Compute;
use super::firing_experts::{Firing, FiringBuffers};
use super::predicted_experts::OnDevice;
use super::shared::SharedBuffers;
use super::work::activate_gated;
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, Kernels, MAX_COLUMNS, ManyForm, ThreadPool};
use crate::engine::routing::Group;
use crate::formats::will_need;
use crate::model::Matrix;
use crate::model::config::ModelConfig;
use crate::ops::linear::{DOT_ROWS, GEMM_ROWS, PIECE_BYTES};
use crate::ops::math;

/// What the experts of a layer work with.
#[derive(Default)]
pub struct ExpertBuffers {
    /// What each group's expert reads; only the first where there is one token.
    inputs: Vec<Columns>,
    /// What each group's `down` reads.
    columns: Vec<Columns>,
    /// Products of gate and up, `[tokens of all groups, 2 ffn]`; without gates those of up stand in the gates' places.
    products: Vec<f32>,
    /// `[tokens of all groups, ffn]`
    activations: Vec<f32>,
    tasks: Vec<Task>,
    /// Of experts whose `down` is stored by neuron.
    firing: FiringBuffers,
    /// Of the layer's shared expert.
    pub shared: SharedBuffers,
    /// Hidden values of a layer's network, `[n, rank]`.
    pub values: Vec<f32>,
    /// Computes every gate and up, for an observer.
    pub shows: bool,
    /// Then: products of gate and up of the chosen experts' neurons, `[tokens of all groups, 2 ffn]`.
    pub true_products: Vec<f32>,
    /// And whether each of these neurons was computed, `[tokens of all groups, ffn]`.
    pub computed: Vec<bool>,
    /// The system is asked to read the experts of a layer from the disk, all at once, before they are computed.
    pub asks: bool,
}

/// What was read for experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertsRead {
    /// Bytes of their weights.
    pub bytes: u64,
    /// Pairs of neuron and token that were computed in experts that are packed by neuron, prompts' chunks left out: those that a network has
    /// let through, or that fire.
    pub neurons: u64,
    /// All pairs of these experts.
    pub of: u64,
}

impl std::ops::AddAssign for ExpertsRead {
    fn add_assign(&mut self, other: ExpertsRead) {
        self.bytes += other.bytes;
        self.neurons += other.neurons;
        self.of += other.of;
    }
}

/// Rows of a part (0: gate, 1: up) of a group's expert.
#[derive(Clone, Copy)]
struct Task {
    group: usize,
    part: usize,
    first: usize,
    rows: usize,
}

/// hidden += the weighted sum of each token's experts. `x` is the normalised input, `[n, hidden]`, and `hidden` the residual,
/// `[n, hidden]`.
pub fn experts(
    mut compute: Compute<'_>,
    chosen: &Chosen<'_>,
    x: &[f32],
    buffers: &mut ExpertBuffers,
    hidden: &mut [f32],
) -> ExpertsRead {
    if chosen.groups.is_empty() {
        return ExpertsRead::default();
    }
    if buffers.shows {
        show(compute.again(), chosen, x, buffers);
    }
    let (kernels, config, groups) = (compute.kernels, compute.config, chosen.groups);
    let ExpertBuffers { inputs, columns, products, activations, tasks, firing, asks, .. } = buffers;
    if *asks {
        groups.iter().flat_map(|group| chosen.expert(group).parts()).for_each(|part| will_need(part.all()));
    }
    inputs.resize_with(inputs.len().max(groups.len()), Columns::default);
    columns.resize_with(columns.len().max(groups.len()), Columns::default);
    products.resize(chosen.tokens.len() * 2 * chosen.width(), 0.0);
    activations.resize(chosen.tokens.len() * chosen.width(), 0.0);
    // One token's experts read the same.
    let distinct = if x.len() == config.hidden { 1 } else { groups.len() };
    let is_chunk = x.len() > MAX_COLUMNS * config.hidden;
    let lists = |group: &Group| chosen.by_neuron() && group.tokens <= MAX_COLUMNS;
    let rows_alone = |number: usize| Some(lists(&groups[number]) && !is_chunk);
    take(compute.again(), chosen, x, &mut inputs[..distinct], rows_alone);
    let input = |group: usize| &inputs[group.min(distinct - 1)];
    if let Some(scorer) = &chosen.scorer {
        assert!(chosen.by_neuron() && !is_chunk);
        let neurons = firing.list_scored(compute.again(), chosen, &input, products);
        let mut known = Firing { kernels, config, chosen, is_chunk, products, activations };
        let bytes = known.add(compute, &input, firing, hidden);
        if buffers.shows {
            mark(&mut buffers.computed, chosen, scorer, &buffers.products, chosen.width());
        }
        return ExpertsRead { bytes, neurons, of: all_pairs(groups, chosen.width()) };
    }
    let all = |number: usize, part: usize| part == 0 || !lists(&groups[number]);
    gate_and_up(compute.again(), chosen, input, tasks, products, all);
    if chosen.by_neuron() {
        firing.list(compute.again(), chosen, products, is_chunk);
        if is_chunk {
            let ups = |number: usize, part: usize| part == 1 && lists(&groups[number]) && firing.is_scaled(number);
            gate_and_up(compute.again(), chosen, input, tasks, products, ups);
            // The others' rows are taken one by one, for which few columns are there already.
            let rows_alone = |number: usize| {
                let group = &groups[number];
                let up = chosen.expert(group).input.parts().get(1)?;
                let has_rows = kernels.form(up.quant, group.tokens) == ManyForm::Rows;
                (lists(group) && !firing.is_scaled(number) && !has_rows).then_some(true)
            };
            take(compute.again(), chosen, x, &mut inputs[..distinct], rows_alone);
        }
        let input = |group: usize| &inputs[group.min(distinct - 1)];
        let neurons = if is_chunk { 0 } else { firing.pairs(groups.len(), chosen.width()) };
        let mut known = Firing { kernels, config, chosen, is_chunk, products, activations };
        let bytes = known.add(compute, &input, firing, hidden);
        if is_chunk {
            return ExpertsRead { bytes, ..ExpertsRead::default() };
        }
        if buffers.shows {
            mark_fired(&mut buffers.computed, config, chosen, &buffers.products);
        }
        return ExpertsRead { bytes, neurons, of: all_pairs(groups, chosen.width()) };
    }
    activate(compute.again(), chosen, products, activations, columns);
    down(compute, chosen, columns, hidden);
    let bytes = groups.iter().map(|group| chosen.expert(group).bytes()).sum();
    ExpertsRead { bytes, ..ExpertsRead::default() }
}

/// Finds which neurons of the chosen experts, packed by neuron, few tokens want: those that the network lets through, or all. Those that a
/// device has are left to it, and [`experts_left`] computes the others. Returns the pairs of neuron and token that are wanted.
pub fn experts_wanted(
    mut compute: Compute<'_>,
    chosen: &Chosen<'_>,
    x: &[f32],
    buffers: &mut ExpertBuffers,
    on_device: OnDevice<'_>,
) -> u64 {
    if buffers.shows {
        show(compute.again(), chosen, x, buffers);
    }
    let (config, groups) = (compute.config, chosen.groups.len());
    let ExpertBuffers { inputs, products, activations, firing, .. } = buffers;
    inputs.resize_with(inputs.len().max(groups), Columns::default);
    products.resize(chosen.tokens.len() * 2 * chosen.width(), 0.0);
    activations.resize(chosen.tokens.len() * chosen.width(), 0.0);
    take(compute.again(), chosen, x, &mut inputs[..groups], |_| Some(true));
    let wanted = firing.list_wanted(compute, chosen, on_device, products);
    match &chosen.scorer {
        Some(scorer) if buffers.shows => mark(&mut buffers.computed, chosen, scorer, &buffers.products, chosen.width()),
        None if buffers.shows => mark_fired(&mut buffers.computed, config, chosen, &buffers.true_products),
        _ => {}
    }
    wanted
}

/// hidden += what those neurons add that [`experts_wanted`] has left here. Returns the bytes that were read.
pub fn experts_left(
    mut compute: Compute<'_>,
    chosen: &Chosen<'_>,
    buffers: &mut ExpertBuffers,
    hidden: &mut [f32],
) -> u64 {
    let ExpertBuffers { inputs, products, activations, firing, .. } = buffers;
    let input = |group: usize| &inputs[group];
    let (kernels, config) = (compute.kernels, compute.config);
    firing.list_firing(compute.again(), chosen, &input, products);
    Firing { kernels, config, chosen, is_chunk: false, products, activations }.add(compute, &input, firing, hidden)
}

impl ExpertBuffers {
    /// After [`experts_wanted`]: the wanted neurons of group `number`, ascending, and a bit for each of its tokens; `on_device` are the masks of
    /// those that a device has, `[ffn]`.
    pub fn wanted<'a>(
        &'a self,
        number: usize,
        ffn: usize,
        on_device: &'a [u32],
    ) -> impl Iterator<Item = (u32, u32)> + 'a {
        self.firing.wanted(number, ffn, on_device)
    }

    /// After [`experts_wanted`]: how many of the wanted neurons are left here.
    pub fn listed(&self) -> usize {
        self.firing.listed()
    }

    /// After [`experts`] of a prompt's chunk: for how many of its tokens each neuron of the layer, whose experts
    /// have `ffn` each, adds something; `out` becomes `[neurons]`.
    pub fn counts(
        &self,
        (pool, config): (&mut ThreadPool, &ModelConfig),
        ffn: usize,
        groups: &[Group],
        out: &mut Vec<u32>,
    ) {
        out.clear();
        out.resize(config.neurons(), 0);
        let out = Parts::new(out);
        pool.run(groups.len(), |_, number| {
            let group = &groups[number];
            // SAFETY: each task has its own expert.
            let counts = unsafe { out.part(group.expert * ffn..(group.expert + 1) * ffn) };
            if self.firing.is_listed(number, group) {
                self.firing.fired(number, ffn).for_each(|(neuron, mask)| counts[neuron as usize] = mask.count_ones());
                return;
            }
            for token in tokens_of(group) {
                let (gates, ups) = self.products[2 * token * ffn..2 * (token + 1) * ffn].split_at(ffn);
                for ((count, &gate), &up) in counts.iter_mut().zip(gates).zip(ups) {
                    *count += u32::from(config.ffn_kind.of_expert(config.activation, gate, up) != 0.0);
                }
            }
        });
    }

    /// After [`experts_left`]: the neurons of group `number` that were computed here, ascending, and a bit for each of its tokens to which they have
    /// added something.
    pub fn fired(&self, number: usize, ffn: usize) -> impl Iterator<Item = (u32, u32)> {
        self.firing.fired(number, ffn)
    }
}

/// Computes what all neurons of the chosen experts do, for an observer; all of them count as computed.
fn show(mut compute: Compute<'_>, chosen: &Chosen<'_>, x: &[f32], buffers: &mut ExpertBuffers) {
    let (ffn, pairs) = (chosen.width(), chosen.tokens.len());
    let ExpertBuffers { inputs, tasks, true_products, computed, .. } = buffers;
    inputs.resize_with(inputs.len().max(chosen.groups.len()), Columns::default);
    true_products.resize(pairs * 2 * ffn, 0.0);
    computed.resize(pairs * ffn, false);
    chosen.groups.iter().for_each(|group| computed[group.first * ffn..tokens_of(group).end * ffn].fill(true));
    take(compute.again(), chosen, x, &mut inputs[..chosen.groups.len()], |_| Some(false));
    let input = |group: usize| &inputs[group];
    gate_and_up(compute, chosen, input, tasks, true_products, |_, _| true);
}

/// All pairs of neuron and token of these groups.
fn all_pairs(groups: &[Group], ffn: usize) -> u64 {
    groups.iter().map(|group| (group.tokens * ffn) as u64).sum()
}

/// Notes which neurons of the chosen experts were computed where their gates choose.
fn mark_fired(computed: &mut [bool], config: &ModelConfig, chosen: &Chosen<'_>, products: &[f32]) {
    let ffn = chosen.width();
    for token in chosen.groups.iter().flat_map(tokens_of) {
        let gates = &products[2 * token * ffn..(2 * token + 1) * ffn];
        let computed = &mut computed[token * ffn..(token + 1) * ffn];
        computed.iter_mut().zip(gates).for_each(|(computed, gate)| *computed = config.activation.apply(*gate) != 0.0);
    }
}

/// Notes which neurons of the chosen experts were computed, by their scores, which stand in the place of ups.
fn mark(computed: &mut [bool], chosen: &Chosen<'_>, scorer: &Scorer<'_>, products: &[f32], ffn: usize) {
    for group in chosen.groups {
        let bias = &scorer.network.bias[group.expert * ffn..][..ffn];
        for token in tokens_of(group) {
            let scores = &products[(2 * token + 1) * ffn..2 * (token + 1) * ffn];
            let computed = &mut computed[token * ffn..(token + 1) * ffn];
            for ((computed, score), bias) in computed.iter_mut().zip(scores).zip(bias) {
                *computed = score + bias >= scorer.least;
            }
        }
    }
}

/// Takes the tokens of each group as the kernels read them: by `rows_alone` for single rows (`true`) or in the form that is fastest for whole
/// matrices; `None` leaves a group's as they are.
fn take(
    Compute { pool, kernels, tiles, .. }: Compute<'_>,
    chosen: &Chosen<'_>,
    x: &[f32],
    inputs: &mut [Columns],
    rows_alone: impl Fn(usize) -> Option<bool> + Sync,
) {
    let hidden = chosen.weights.experts[0].input.parts()[0].cols;
    // Any thread may take any group: which ones it took so far must not decide when its tile grows.
    let most = chosen.groups.iter().map(|group| group.tokens).max().unwrap_or(0) * hidden;
    for tile in tiles.iter_mut() {
        tile.numbers.clear();
        tile.numbers.reserve(most);
    }
    let (count, parts, tiles) = (inputs.len(), Parts::new(inputs), Parts::new(tiles));
    pool.run(count, |thread, number| {
        let Some(rows_alone) = rows_alone(number) else { return };
        // SAFETY: each task has its own group, each thread its own tile.
        let (to, tile) =
            unsafe { (&mut parts.part(number..number + 1)[0], &mut tiles.part(thread..thread + 1)[0].numbers) };
        let group = &chosen.groups[number];
        tile.clear();
        for routed in chosen.tokens_of(group) {
            tile.extend_from_slice(&x[routed.token * hidden..(routed.token + 1) * hidden]);
        }
        let quants = chosen.expert(group).input_quants();
        match rows_alone {
            true => to.set_for(tile, group.tokens, quants),
            false => to.set_here(kernels, tile, group.tokens, quants),
        }
    });
}

/// Products of each group's tokens with those parts of its expert (0: gate, 1: up) that are `wanted`, `[tokens of all groups, 2 ffn]`.
fn gate_and_up<'a>(
    Compute { pool, kernels, .. }: Compute<'_>,
    chosen: &Chosen<'_>,
    input: impl Fn(usize) -> &'a Columns + Sync,
    tasks: &mut Vec<Task>,
    products: &mut [f32],
    wanted: impl Fn(usize, usize) -> bool,
) {
    let ffn = chosen.width();
    let matrices = |group: &Group| chosen.expert(group).input.parts();
    tasks.clear();
    for (group, of) in chosen.groups.iter().enumerate() {
        for (part, matrix) in matrices(of).iter().enumerate().filter(|(part, _)| wanted(group, *part)) {
            let each = rows_at_once(kernels, matrix, 1, of.tokens);
            let pieces = (0..matrix.rows).step_by(each);
            tasks.extend(pieces.map(|first| Task { group, part, first, rows: each.min(matrix.rows - first) }));
        }
    }
    // What is there comes first, and the rest in the order in which it is read.
    tasks.sort_unstable_by_key(|task| {
        (!chosen.arrival.is_here(task.group, task.part), task.group, task.part, task.first)
    });
    let out = Parts::new(products);
    let tasks = &*tasks;
    pool.run(tasks.len(), |_, task| {
        let Task { group, part, first, rows } = tasks[task];
        chosen.arrival.wait(group, part);
        let of = &chosen.groups[group];
        let matrix = &matrices(of)[part];
        let start = of.first * 2 * ffn + part * ffn + first;
        // SAFETY: the rows are inside the matrix; `kernels` are for this machine; each task writes its own rows of its group's
        // products, whose last index is (tokens - 1) * 2 ffn + 2 ffn - 1.
        unsafe {
            let to = out.start().add(start);
            kernels.products(matrix.quant, matrix.rows_from(first), rows, input(group), to, 2 * ffn);
        }
    });
}

/// Activations of each group from its products, to which biases are added first where there are any; and the same as `down` reads them.
fn activate(
    Compute { pool, kernels, config, .. }: Compute<'_>,
    chosen: &Chosen<'_>,
    products: &mut [f32],
    activations: &mut [f32],
    columns: &mut [Columns],
) {
    let ffn = chosen.width();
    let (products, activations, columns) = (Parts::new(products), Parts::new(activations), Parts::new(columns));
    pool.run(chosen.groups.len(), |_, number| {
        let group = &chosen.groups[number];
        let tokens = tokens_of(group);
        // SAFETY: each task has its own group.
        let (products, out, columns) = unsafe {
            (
                products.part(tokens.start * 2 * ffn..tokens.end * 2 * ffn),
                activations.part(tokens.start * ffn..tokens.end * ffn),
                &mut columns.part(number..number + 1)[0],
            )
        };
        if let Some(biases) = &chosen.weights.biases {
            products.chunks_exact_mut(2 * ffn).for_each(|products| math::add(products, biases.input(group.expert)));
        }
        for (out, products) in out.chunks_exact_mut(ffn).zip(products.chunks_exact(2 * ffn)) {
            let (gates, ups) = products.split_at(ffn);
            activate_gated(config.ffn_kind, config.activation, gates, ups, out);
        }
        columns.set_here(kernels, out, group.tokens, [chosen.expert(group).down.quant]);
    });
}

/// hidden += each token's experts' outputs, each times its weight.
fn down(
    Compute { pool, kernels, config, tiles }: Compute<'_>,
    chosen: &Chosen<'_>,
    columns: &[Columns],
    hidden: &mut [f32],
) {
    let groups = chosen.groups;
    let cols = config.hidden;
    let most = groups.iter().map(|group| group.tokens).max().unwrap_or(0);
    let matrix = &chosen.weights.experts[0].down;
    let each = rows_at_once(kernels, matrix, groups.len(), most).min(cols.div_ceil(pool.threads()));
    // Of every thread, whether or not it gets a task this time: nothing is allocated later.
    tiles.iter_mut().for_each(|tile| tile.numbers.resize(tile.numbers.len().max(most * each), 0.0));
    let (tiles, out) = (Parts::new(tiles), Parts::new(hidden));
    pool.run(cols.div_ceil(each), |thread, task| {
        let rows = task * each..cols.min((task + 1) * each);
        // SAFETY: one tile per thread.
        let tile = &mut unsafe { tiles.part(thread..thread + 1) }[0].numbers;
        for (number, (group, columns)) in groups.iter().zip(columns).enumerate() {
            let matrix = &chosen.expert(group).down;
            chosen.arrival.wait(number, chosen.expert(group).input.parts().len());
            let first = matrix.rows_from(rows.start);
            // SAFETY: the rows are inside the matrix; `kernels` are for this machine; the tile has room for `tokens` times `rows`.
            unsafe { kernels.products(matrix.quant, first, rows.len(), columns, tile.as_mut_ptr(), rows.len()) };
            for (routed, products) in chosen.tokens_of(group).iter().zip(tile.chunks_exact(rows.len())) {
                let start = routed.token * cols;
                // SAFETY: each task has its own rows of every token.
                let out = unsafe { out.part(start + rows.start..start + rows.end) };
                match &chosen.weights.biases {
                    None => out.iter_mut().zip(products).for_each(|(out, product)| *out += routed.weight * product),
                    Some(biases) => {
                        let with_bias = products.iter().zip(&biases.down(group.expert)[rows.clone()]);
                        let with_bias = with_bias.map(|(product, bias)| product + bias);
                        out.iter_mut().zip(with_bias).for_each(|(out, product)| *out += routed.weight * product);
                    }
                }
            }
        }
    });
}

/// Rows of a matrix that a task takes for as many as `tokens`, where it reads the same rows of `matrices` of its kind: tiles of what the
/// kernels take at a time.
fn rows_at_once(kernels: &Kernels, matrix: &Matrix, matrices: usize, tokens: usize) -> usize {
    let tile = if kernels.form(matrix.quant, tokens) == ManyForm::Rows { DOT_ROWS } else { GEMM_ROWS };
    (PIECE_BYTES / (matrix.row_bytes * matrices.max(1))).clamp(1, matrix.rows).next_multiple_of(tile)
}
