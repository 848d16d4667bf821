//! THE HOT PATH: what a layer is, in phases. An [`Executor`] carries them out: the host alone ([`super::host`]), or host and device
//! together ([`super::split`]). The parts are phases and not operators, so that a device needs one copy in and one copy out per layer, and
//! can begin what does not wait for the host.
//!
//! A pass may go in parts, some neighbouring tokens each, that take turns between host and device. The executor says in which order the steps
//! come. Any order is right in which every step comes after those that it needs: the phase before it, for attention also the projections of
//! all parts before, whose keys and values it reads, for a selection the ends of all parts' layer before, and for what is copied once for all
//! parts their selections. A pass of one part goes layer after layer.

use super::batch::Buffers;
use super::ffn::{CachedFfn, Compute};
use super::probe::{Probe, WillCompute};
use super::sparsity::{Sparsity, Wanted};
use crate::cpu::{Kernels, MAX_COLUMNS, ThreadPool};
use crate::model::{KvCache, Model};
use tracing::{Level, trace_span};

/// A part of a forward pass. All but the first and the last are done once per layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The tokens' rows of the embedding become the residual. A device gets it, and the keys and values that it lacks.
    Begin,
    /// Begins the moves of neurons that were decided meanwhile.
    BeginLayer,
    /// Norm; queries, keys and values.
    Project,
    /// Rotation; keys and values into the cache; scores and weighted sum; output matrix; addition to the residual. If attention and FFN are
    /// parallel ([`crate::model::layer::Norms::parallel`]), its output is added in `Ffn` instead:
    /// `Select` and `Ffn` read the residual without it.
    Attention,
    /// Chooses which neurons the FFN computes. A device that knows them begins.
    Select,
    /// What is copied to a device for the pass is computed there: for all parts, or for each.
    Copied,
    /// Norm, gate, up, activation, down, addition to the residual: for the chosen neurons, each where it is stored.
    Ffn,
    /// The host takes over what the device made of a layer, if it does so layer by layer.
    EndLayer,
    /// Norm and head for the tokens whose logits are wanted.
    Logits,
}

/// A phase of one layer, for one part of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// Number of the part; 0 if there is only one.
    pub part: usize,
    /// Number of the layer.
    pub layer: usize,
    /// The phase.
    pub phase: Phase,
}

/// Carries out the phases of a pass, layer `l` by layer `l`.
pub(super) trait Executor {
    /// Fills `pass.steps`, if it goes in parts.
    fn order(&mut self, _pass: &mut Pass<'_, '_>) {}
    /// The next steps are those of a part.
    fn turn_to(&mut self, _pass: &mut Pass<'_, '_>, _part: usize) {}
    fn begin(&mut self, pass: &mut Pass<'_, '_>);
    fn begin_layer(&mut self, _pass: &mut Pass<'_, '_>, _l: usize) {}
    fn project(&mut self, pass: &mut Pass<'_, '_>, l: usize);
    fn attention(&mut self, pass: &mut Pass<'_, '_>, l: usize);
    fn select(&mut self, pass: &mut Pass<'_, '_>, l: usize) -> Wanted;
    fn copied(&mut self, _pass: &mut Pass<'_, '_>, _l: usize) {}
    fn ffn(&mut self, pass: &mut Pass<'_, '_>, l: usize, wanted: Wanted);
    fn end_layer(&mut self, _pass: &mut Pass<'_, '_>, _l: usize) {}
    fn logits(&mut self, pass: &mut Pass<'_, '_>);
    /// The pass ends before a layer: nothing of it is under way any more when this returns.
    fn leave(&mut self) {}
    /// Notes the end of a phase: its time, and its span in the trace.
    fn done(&mut self, pass: &mut Pass<'_, '_>, step: Step);
}

/// What a pass works with.
pub(super) struct Pass<'a, 'o> {
    /// The model.
    pub model: &'a Model,
    /// The threads that compute.
    pub pool: &'a mut ThreadPool,
    /// The CPU kernels that are used.
    pub kernels: &'a Kernels,
    /// Which neurons each layer computes.
    pub sparsity: &'a mut Sparsity,
    /// The tokens, their positions, and the activations computed for them.
    pub buffers: &'a mut Buffers,
    /// Keys and values of each sequence.
    pub caches: &'a mut [KvCache],
    /// Where the FFNs' neurons come from, if the store is larger than memory; `None`: all lie in the mapped store.
    pub cached: Option<&'a mut CachedFfn>,
    /// The clock, and an observer if there is one.
    pub probe: Probe<'a, 'o>,
    /// Which neurons the current layer computes.
    pub wanted: Wanted,
    /// The steps of a pass in parts, in their order; empty: layer after layer.
    pub steps: &'a mut Vec<Step>,
}

impl Pass<'_, '_> {
    /// Tokens of the pass.
    pub fn n(&self) -> usize {
        self.buffers.positions.len()
    }

    /// Shows the true activations of layer `l` to the observer ([`Probe::show`]).
    pub fn show(&mut self, l: usize, will_compute: WillCompute) {
        let Pass { model, pool, kernels, cached, buffers, probe, .. } = self;
        let compute = Compute { pool, kernels, config: &model.config, tiles: &mut [] };
        probe.show(compute, (l, &model.layers[l]), cached.as_deref_mut(), buffers, will_compute);
    }

    /// Whether this is a chunk of a prompt: more tokens than sparse kernels take, so every weight of an FFN is read.
    pub fn is_chunk(&self) -> bool {
        self.n() > MAX_COLUMNS
    }
}

/// Runs a pass, step by step; afterwards the logits of `buffers.logit_rows` are in `buffers.logits`. Between layers it asks whether to go on,
/// and returns whether the pass came to its end.
pub(super) fn forward(executor: &mut dyn Executor, pass: &mut Pass<'_, '_>, go_on: &mut dyn FnMut() -> bool) -> bool {
    // Looked up once: where layers are not logged, they cost a comparison.
    let traced = tracing::enabled!(Level::TRACE);
    let (mut _layer, layers) = (None, pass.model.layers.len());
    pass.steps.clear();
    executor.order(pass);
    let in_parts = !pass.steps.is_empty();
    for i in 0..if in_parts { pass.steps.len() } else { 2 + layers * Phase::OF_A_LAYER.len() } {
        let step = if in_parts { pass.steps[i] } else { in_order(layers, i) };
        if step.phase == Phase::BeginLayer && !go_on() {
            executor.leave();
            return false;
        }
        if traced && step.phase == Phase::BeginLayer {
            _layer = Some(trace_span!("layer", number = step.layer).entered());
        }
        if in_parts {
            executor.turn_to(pass, step.part);
        }
        perform(executor, pass, step);
        if step.phase == Phase::EndLayer {
            _layer = None;
        }
    }
    true
}

/// Step `i` of a pass of one part, layer after layer.
fn in_order(layers: usize, i: usize) -> Step {
    let step = |layer, phase| Step { part: 0, layer, phase };
    let each = Phase::OF_A_LAYER.len();
    match i {
        0 => step(0, Phase::Begin),
        i if i <= layers * each => step((i - 1) / each, Phase::OF_A_LAYER[(i - 1) % each]),
        _ => step(layers.saturating_sub(1), Phase::Logits),
    }
}

/// Does one step.
fn perform(executor: &mut dyn Executor, pass: &mut Pass<'_, '_>, step: Step) {
    let l = step.layer;
    let c = &pass.model.config;
    match step.phase {
        // A model of neurons has layers without any, which a selection may look ahead from.
        Phase::Copied | Phase::Ffn if c.experts(l).is_none() && !c.has_ffn(l) => {}
        Phase::Begin => executor.begin(pass),
        Phase::BeginLayer => executor.begin_layer(pass, l),
        Phase::Project => executor.project(pass, l),
        Phase::Attention => executor.attention(pass, l),
        Phase::Select => pass.wanted = executor.select(pass, l),
        Phase::Copied => executor.copied(pass, l),
        Phase::Ffn => executor.ffn(pass, l, pass.wanted),
        Phase::EndLayer => executor.end_layer(pass, l),
        Phase::Logits => executor.logits(pass),
    }
    executor.done(pass, step);
}

impl Phase {
    /// The phases of a layer, in the order in which each needs the one before.
    pub(super) const OF_A_LAYER: [Phase; 7] = [
        Phase::BeginLayer,
        Phase::Project,
        Phase::Attention,
        Phase::Select,
        Phase::Copied,
        Phase::Ffn,
        Phase::EndLayer,
    ];
}

#[cfg(test)]
impl Step {
    /// The steps that have to be done before this one can be, in a pass of so many parts. Begin and logits are one step for all parts; where
    /// copies are shared, that of what is copied is, too.
    pub(super) fn needs(self, parts: usize, layers: usize, shared: bool) -> Vec<Step> {
        let Step { part, layer, phase } = self;
        let in_layer = Phase::OF_A_LAYER.iter().position(|of| *of == phase);
        let all = |step: Step| (0..parts).map(move |part| Step { part, ..step });
        match (in_layer, layer) {
            (None, _) if phase == Phase::Begin => Vec::new(),
            (None, _) => all(Step { part, layer: layers - 1, phase: Phase::EndLayer }).collect(),
            (Some(0), 0) => vec![Step { part: 0, layer, phase: Phase::Begin }],
            (Some(0), _) => vec![Step { layer: layer - 1, phase: Phase::EndLayer, ..self }],
            (Some(i), _) => {
                let before = Step { phase: Phase::OF_A_LAYER[i - 1], ..self };
                match phase {
                    Phase::Attention => all(before).take(part + 1).collect(),
                    Phase::Copied if shared => all(before).collect(),
                    // What a layer is divided by has room for two layers.
                    Phase::Select if layer > 0 => {
                        let ends = all(Step { part, layer: layer - 1, phase: Phase::EndLayer });
                        ends.chain([before]).collect()
                    }
                    _ => vec![before],
                }
            }
        }
    }

    /// Checks that these steps are all those of a pass, each once and after those that it needs.
    pub(super) fn check(steps: &[Step], parts: usize, layers: usize, shared: bool) {
        let one = |step: &Step| shared && step.phase == Phase::Copied;
        let same = |a: &Step, b: &Step| a == b || one(a) && (a.layer, a.phase) == (b.layer, b.phase);
        let copied = if shared { 1 } else { parts };
        assert_eq!(steps.len(), 2 + layers * (parts * (Phase::OF_A_LAYER.len() - 1) + copied));
        for (i, step) in steps.iter().enumerate() {
            assert!(!steps[..i].iter().any(|other| same(other, step)), "{step:?} twice");
            for needed in step.needs(parts, layers, shared) {
                assert!(steps[..i].iter().any(|other| same(other, &needed)), "{step:?} before {needed:?}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plain_order_does_every_step_once_and_after_those_that_it_needs() {
        let layers = 4;
        let steps: Vec<Step> = (0..2 + layers * Phase::OF_A_LAYER.len()).map(|i| in_order(layers, i)).collect();
        Step::check(&steps, 1, layers, false);
    }
}
