//! The host's executor: the whole model without a device, and passes that a device does not take.

use super::attention::rotate_and_put;
use super::batch::Buffers;
use super::embed::embed;
use super::ffn::{self, CachedTools, Chosen, Compute, Neurons, Scorer, Selection, Work};
use super::forward::{Executor, Pass, Phase, Step};
use super::inputs::Input;
use super::mixer::{Room, mix};
use super::mixture::{foresee_experts, look_inside, route};
use super::norms::each;
use super::observer::SeenAttention;
use super::per_layer::add_layer_input;
use super::probe::WillCompute;
use super::report::Report;
use super::sparsity::{Scored, Wanted};
use super::split::Split;
use crate::cpu::{MAX_COLUMNS, ThreadPool};
use crate::device::timeline::{Note, Read, Stage, Timeline};
use crate::model::config::ModelConfig;
use crate::model::layer::{Norms, RouterInput};
use crate::model::weights::{Layer, NormWeights};
use crate::model::{ExpertWeights, FfnWeights};
use crate::ops::gates::gates;
use crate::ops::linear::{linear, linear_stacked};
use crate::ops::math;

/// The CPU by itself.
pub(super) struct Host<'a> {
    /// A device that takes no part in this pass: it keeps the trace, and its scheduler gets prompts.
    pub split: Option<&'a mut Split>,
    /// The trace, without a device.
    pub timeline: Option<&'a mut Timeline>,
    /// Whether hidden states are what is wanted: every neuron is computed, and the scheduler is not told what is active, because no text
    /// goes on from there.
    pub embeds: bool,
}

impl Host<'_> {
    /// Adds a note to the trace, if one is kept.
    pub fn note(&mut self, report: &Report, note: Note) {
        match (&mut self.split, &mut self.timeline) {
            (Some(split), _) => split.note(note),
            (None, Some(timeline)) => {
                let now = timeline.now();
                timeline.note(note, now, Read { host: report.ffn_bytes, ..Read::default() });
            }
            (None, None) => {}
        }
    }

    /// Adds what the FFN makes of the residual to `buffers.x`.
    fn add_ffn(&mut self, pass: &mut Pass<'_, '_>, l: usize, wanted: Wanted) {
        if let FfnWeights::Experts(weights) = &pass.model.layers[l].ffn {
            let c = &pass.model.config;
            pass.probe.show_experts(c, pass.buffers, l, c.experts(l).expect("a mixture"));
            begin_output(pass.buffers, &pass.model.layers[l]);
            return add_experts(pass, l, weights);
        }
        let will_compute = ffn_input(pass, l, wanted);
        pass.show(l, will_compute);
        begin_output(pass.buffers, &pass.model.layers[l]);
        let n = pass.n();
        if will_compute == WillCompute::Active {
            return add_active(pass, l);
        }
        let Pass { model, pool, kernels, buffers: b, sparsity, cached, probe, .. } = pass;
        let (c, layer, activation_threshold) = (&model.config, &model.layers[l], sparsity.activation_threshold(l));
        if c.layer(l).norms.parallel() {
            add_attention(pool, b, c, layer);
        }
        let Buffers { tiles, ffn: scratch, x, columns, gates, predicted, .. } = &mut **b;
        let work = match wanted {
            Wanted::All => Work::All,
            Wanted::Gates => Work::Gates(gates),
            Wanted::Selected => Work::Selected(&predicted.selections[l]),
            Wanted::Experts => unreachable!("experts are computed above"),
        };
        let compute = Compute { pool, kernels, config: c, tiles };
        let read = match cached {
            Some(cached) => {
                let tools = CachedTools { compute, layer: (l, layer), x: columns };
                cached.ffn(tools, work, activation_threshold, scratch, x)
            }
            None => ffn::ffn(compute, layer, columns, work, activation_threshold, scratch, x),
        };
        let selection = (will_compute == WillCompute::Selection).then(|| &predicted.selections[l]);
        probe.report.add_layer((l, layer), c, n, wanted, selection, read);
        if n > MAX_COLUMNS
            && !self.embeds
            && let Some(migrator) = self.split.as_mut().and_then(|split| split.migrator.as_mut())
        {
            b.ffn.counts(c, Neurons::All(c.width(l)), n, activation_threshold, &mut b.counts);
            let first = b.positions[0];
            migrator.prompt(l, first.position, n, pass.caches[first.sequence].id(), &b.counts);
        }
    }
}

impl Executor for Host<'_> {
    fn begin(&mut self, pass: &mut Pass<'_, '_>) {
        embed(pass);
    }

    fn begin_layer(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        self.note(pass.probe.report, Note::Layer(l));
        if let Some(experts) = pass.model.config.experts(l)
            && experts.reads == RouterInput::Layer
        {
            route(pass, l, experts);
            begin_experts(pass, l);
        }
    }

    fn project(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let Pass { model, pool, kernels, buffers: b, .. } = pass;
        let (c, layer, n) = (&model.config, &model.layers[l], b.positions.len());
        let h = c.hidden;
        each(pool, n, &mut b.normed, |t, out| math::norm(c.norm, &layer.attn_norm, &b.x[t * h..(t + 1) * h], out));
        let Buffers { columns, unordered, qkv, normed, ffn, .. } = &mut **b;
        let qkv = &mut qkv[..n * c.mixer(l).rows()];
        ffn.inputs.layer = l;
        columns.scale = ffn.inputs.take(Input::Qkv, normed);
        linear_stacked(pool, kernels, &layer.qkv, normed, columns, unordered, qkv);
        if !layer.qkv_bias.is_empty() {
            qkv.chunks_exact_mut(layer.qkv_bias.len()).for_each(|qkv| math::add(qkv, &layer.qkv_bias));
        }
    }

    fn attention(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let Pass { model, pool, kernels, buffers: b, caches, probe, .. } = pass;
        let (c, layer, n) = (&model.config, &model.layers[l], b.positions.len());
        let Buffers {
            qkv,
            attended,
            positions,
            cos_sin,
            attend,
            linear_room,
            latent_room,
            normed,
            columns,
            ffn,
            projected,
            ..
        } = &mut **b;
        let (qkv, attended) = (&mut qkv[..n * c.mixer(l).rows()], &mut attended[..n * c.mixer(l).cols()]);
        if let Some(a) = c.attention(l) {
            rotate_and_put((c, a), layer, caches, l, positions, qkv, cos_sin);
        }
        let room = Room { attend, linear: linear_room, latent: latent_room };
        mix((pool, kernels), (c, layer, l), caches, positions, qkv, room, attended);
        if let Some(observer) = &mut probe.observer {
            observer.attention(&SeenAttention { layer: l, input: normed, attended });
        }
        columns.scale = ffn.inputs.take(Input::Output, attended);
        linear(pool, kernels, &layer.o, attended, n, columns, projected);
        if !c.layer(l).norms.parallel() {
            add_attention(pool, b, c, layer);
        }
    }

    fn select(&mut self, pass: &mut Pass<'_, '_>, l: usize) -> Wanted {
        if let Some(experts) = pass.model.config.experts(l) {
            norm_ffn_input(pass, l);
            if experts.reads != RouterInput::Layer {
                route(pass, l, experts);
                begin_experts(pass, l);
            }
            foresee_experts(pass, l);
            look_inside(pass, l);
            return Wanted::Experts;
        }
        // An embedding is not to depend on how many of its tokens go together.
        if self.embeds {
            return Wanted::All;
        }
        if pass.is_chunk() {
            let gated = pass.sparsity.gates_chunks() && pass.cached.is_none();
            return if gated { pass.sparsity.wanted(l) } else { Wanted::All };
        }
        let n = pass.n();
        let Pass { model, pool, kernels, buffers: b, sparsity, cached, .. } = pass;
        let mut tools = crate::predictor::Tools { model, pool, kernels, scratch: &mut b.scratch };
        sparsity.predict(&mut tools, l, &b.x, None, Scored::default(), &mut b.predicted);
        if let Some(foresight) = cached.as_mut().and_then(|cached| cached.foresight.as_mut()) {
            foresight.look(&mut tools, sparsity, l, (&b.x, n), &b.predicted);
        }
        sparsity.wanted(l)
    }

    fn ffn(&mut self, pass: &mut Pass<'_, '_>, l: usize, wanted: Wanted) {
        self.add_ffn(pass, l, wanted);
        end_output(pass, l);
    }

    fn logits(&mut self, pass: &mut Pass<'_, '_>) {
        self.note(pass.probe.report, Note::Compute(Some(Stage::Head)));
        let Pass { model, pool, kernels, buffers: b, .. } = pass;
        let (c, rows, h) = (&model.config, &b.logit_rows, model.config.hidden);
        b.logits.resize(rows.len() * c.vocab, 0.0);
        if rows.is_empty() {
            return;
        }
        let (x, normed) = (&b.x, &mut b.normed[..rows.len() * h]);
        let row = |i: usize| &x[rows[i] * h..(rows[i] + 1) * h];
        each(pool, rows.len(), normed, |i, out| math::norm(c.norm, &model.out_norm, row(i), out));
        linear(pool, kernels, &model.head, normed, rows.len(), &mut b.columns, &mut b.logits);
    }

    fn done(&mut self, pass: &mut Pass<'_, '_>, step: Step) {
        let part = match step.phase {
            // The embedding and projections count as attention.
            Phase::Begin | Phase::BeginLayer | Phase::Project | Phase::Copied | Phase::EndLayer => return,
            Phase::Attention => Stage::Attention,
            Phase::Select => Stage::Predictor,
            Phase::Ffn => Stage::Ffn,
            Phase::Logits => Stage::Head,
        };
        pass.probe.lap(part);
        self.note(pass.probe.report, Note::Host(part));
    }
}

/// Adds attention's output to the residual, normed where the layer norms it.
fn add_attention(pool: &mut ThreadPool, b: &mut Buffers, c: &ModelConfig, layer: &Layer) {
    if let Some([norm, _]) = &layer.post_norms {
        if !layer.o_bias.is_empty() {
            b.projected.chunks_exact_mut(layer.o_bias.len()).for_each(|out| math::add(out, &layer.o_bias));
        }
        let (h, projected) = (c.hidden, &b.projected);
        each(pool, b.positions.len(), &mut b.normed, |t, out| {
            math::norm(c.norm, norm, &projected[t * h..(t + 1) * h], out);
        });
        return math::add(&mut b.x, &b.normed);
    }
    math::add(&mut b.x, &b.projected);
    if !layer.o_bias.is_empty() {
        b.x.chunks_exact_mut(layer.o_bias.len()).for_each(|x| math::add(x, &layer.o_bias));
    }
}

/// Puts the residual aside where the layer norms the FFN's output: what is added to `buffers.x` from here on is that output.
fn begin_output(b: &mut Buffers, layer: &Layer) {
    if layer.post_norms.is_some() {
        b.residual.resize(b.x.len(), 0.0);
        std::mem::swap(&mut b.x, &mut b.residual);
        b.x.fill(0.0);
    }
}

/// Ends a layer whose FFN's output has been made: adds it where [`begin_output`] has put the residual aside, then what else the layer adds.
fn end_output(pass: &mut Pass<'_, '_>, l: usize) {
    add_normed_output(pass, l);
    add_layer_input(pass, l);
    let scale = pass.model.layers[l].output_scale;
    if scale != 1.0 {
        let (n, x) = (pass.n(), &mut pass.buffers.x);
        each(pass.pool, n, x, |_, x| x.iter_mut().for_each(|x| *x *= scale));
    }
}

/// Adds the normed output of the FFN to the residual, where [`begin_output`] has put that aside.
fn add_normed_output(pass: &mut Pass<'_, '_>, l: usize) {
    let Pass { model, pool, buffers: b, .. } = pass;
    let (c, h) = (&model.config, model.config.hidden);
    let Some([_, norm]) = &model.layers[l].post_norms else { return };
    std::mem::swap(&mut b.x, &mut b.residual);
    let (n, output) = (b.positions.len(), &b.residual);
    each(pool, n, &mut b.normed, |t, out| math::norm(c.norm, norm, &output[t * h..(t + 1) * h], out));
    math::add(&mut b.x, &b.normed);
}

/// out = norm(x) of each token.
fn norm_each(pool: &mut ThreadPool, c: &ModelConfig, weights: &NormWeights, x: &[f32], out: &mut [f32]) {
    let h = c.hidden;
    each(pool, x.len() / h, out, |t, out| math::norm(c.norm, weights, &x[t * h..(t + 1) * h], out));
}

/// Normalises the residual into `buffers.normed`.
fn norm_ffn_input(pass: &mut Pass<'_, '_>, l: usize) {
    let Pass { model, pool, buffers: b, .. } = pass;
    let (c, layer, n, h) = (&model.config, &model.layers[l], b.positions.len(), model.config.hidden);
    each(pool, n, &mut b.normed, |t, out| math::norm(c.norm, &layer.ffn_norm, &b.x[t * h..(t + 1) * h], out));
}

/// Begins to read the experts that the layer needs, where they come from disk: of a router that reads the layer's input while attention is
/// computed.
fn begin_experts(pass: &mut Pass<'_, '_>, l: usize) {
    if let Some(cached) = &mut pass.cached {
        cached.begin_experts(l, &pass.buffers.routes);
    }
}

/// Adds what the chosen experts make of the normed residual to the residual.
fn add_experts(pass: &mut Pass<'_, '_>, l: usize, weights: &ExpertWeights) {
    let is_chunk = pass.is_chunk();
    let Pass { model, pool, kernels, buffers: b, sparsity, cached, probe, .. } = pass;
    let c = &model.config;
    let n = b.positions.len();
    let Buffers { tiles, experts: scratch, x, normed, routes, residual, projected, .. } = &mut **b;
    // Lent to the scorer, beside the rest.
    let values = std::mem::take(&mut scratch.values);
    let scorer = |(network, least)| Scorer { network, values: &values, least };
    let scorer = sparsity.inside(l).filter(|_| !is_chunk).map(scorer);
    let mut compute = Compute { pool, kernels, config: c, tiles };
    // While the others may still be on their way.
    if let Some(shared) = &weights.shared {
        match &shared.norms {
            None => ffn::shared_expert(compute.again(), shared, normed, &mut scratch.shared, x),
            Some(norms) => {
                // The residual stands aside, and what others add comes to `x` behind this.
                norm_each(compute.pool, c, &norms.input, residual, projected);
                ffn::shared_expert(compute.again(), shared, projected, &mut scratch.shared, x);
                norm_each(compute.pool, c, &norms.output, x, projected);
                x.fill(0.0);
            }
        }
    }
    let mut read = match cached {
        Some(cached) => cached.experts(compute, l, (routes, scorer), normed, scratch, x),
        None => ffn::experts(compute, &Chosen::all(weights, routes, scorer), normed, scratch, x),
    };
    if let Some(norms) = weights.shared.as_ref().and_then(|shared| shared.norms.as_deref()) {
        each(pool, n, x, |_, x| math::norm_in_place(c.norm, &norms.experts, x));
        math::add(x, projected);
    }
    let predicted = scorer.is_some();
    scratch.values = values;
    read.bytes += weights.router_bytes() + weights.shared_bytes();
    probe.report.add_experts(l, c, routes.tokens.len(), read);
    probe.show_inside(b, l, c.ffn_kind, predicted);
}

/// Adds what the active neurons of layer `l` make of a chunk: activations of all neurons, those that are not above the activation threshold
/// as zeros, then `down`.
fn add_active(pass: &mut Pass<'_, '_>, l: usize) {
    let n = pass.n();
    let Pass { model, pool, kernels, buffers: b, sparsity, probe, .. } = pass;
    let (c, layer) = (&model.config, &model.layers[l]);
    if c.layer(l).norms.parallel() {
        add_attention(pool, b, c, layer);
    }
    let Buffers { tiles, ffn: scratch, x, columns, true_gates, activations, .. } = &mut **b;
    let mut compute = Compute { pool, kernels, config: c, tiles };
    // An observer has had them computed.
    if probe.observer.is_none() {
        true_gates.resize(n * c.width(l), 0.0);
        activations.resize(n * c.width(l), 0.0);
        ffn::activations(compute.again(), layer, columns, true_gates, activations);
    }
    let least = sparsity.activation_threshold(l);
    let read = ffn::active(compute, layer, true_gates, least, activations, scratch, x);
    probe.report.add_layer((l, layer), c, n, Wanted::Gates, None, read);
}

/// Normalises the residual into `buffers.normed` and `columns`, and computes all gates if the layer asks for them. Returns what will be
/// computed; the layer's selection lists it for gates only with an observer, because the FFN makes its own list.
fn ffn_input(pass: &mut Pass<'_, '_>, l: usize, wanted: Wanted) -> WillCompute {
    let Pass { model, pool, kernels, buffers: b, sparsity, cached, probe, .. } = pass;
    let (c, layer, n) = (&model.config, &model.layers[l], b.positions.len());
    let h = c.hidden;
    // Attention has normed the same residual with the same norm, if it is the FFN's, too.
    if c.layer(l).norms != Norms::ParallelShared {
        each(pool, n, &mut b.normed, |t, out| math::norm(c.norm, &layer.ffn_norm, &b.x[t * h..(t + 1) * h], out));
    }
    b.columns.scale = b.ffn.inputs.take(Input::Ffn, &b.normed);
    let quants = layer.ffn.input_quants();
    if n <= MAX_COLUMNS && matches!(layer.ffn, FfnWeights::Neurons(_)) {
        b.columns.set_for(&b.normed, n, quants);
    } else {
        b.columns.set_many(pool, kernels, &b.normed, n, quants);
    }
    match wanted {
        Wanted::Gates if n > MAX_COLUMNS => return WillCompute::Active,
        Wanted::Gates => {}
        Wanted::Selected => return WillCompute::Selection,
        Wanted::All | Wanted::Experts => return WillCompute::All,
    }
    b.gates.resize(n * c.width(l), 0.0);
    match cached {
        Some(cached) => {
            let compute = Compute { pool, kernels, config: c, tiles: &mut [] };
            cached.gates(CachedTools { compute, layer: (l, layer), x: &b.columns }, &mut b.gates);
        }
        None => gates(pool, kernels, c, layer, &b.columns, &mut b.gates),
    }
    if probe.observer.is_none() {
        return WillCompute::All;
    }
    b.predicted.selections.resize_with(c.layers().len(), Selection::default);
    b.predicted.selections[l].fired(c, &b.gates, (n, c.width(l)), sparsity.activation_threshold(l));
    WillCompute::Selection
}
