//! THE HOT PATH: what a layer is, in phases. An [`Executor`] carries them out: the host alone ([`super::host`]), or host and device
//! together ([`super::split`]). The parts are phases and not operators, so that a device needs one copy in and one copy out per layer, and
//! can begin what does not wait for the host.
//!
//! The driver decides which step comes next. [`forward`] is the plain driver: layer after layer. Another order is right if every step comes
//! after those that it needs: the phase before it, and for attention also the same layer's attention over the chunk before, whose keys and
//! values it reads. For now a pass is one chunk: [`Pass::wanted`] and an executor's memory are one chunk's.

use super::batch::Buffers;
use super::ffn::CachedFfn;
use super::probe::Probe;
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
    /// Norm; queries, keys and values; rotation; keys and values into the cache; scores and weighted sum; output matrix; addition to the
    /// residual. If attention and FFN are parallel ([`crate::model::layer::Norms::parallel`]), its output is added in `Ffn` instead:
    /// `Select` and `Ffn` read the residual without it.
    Attention,
    /// Chooses which neurons the FFN computes. A device that knows them begins.
    Select,
    /// Norm, gate, up, activation, down, addition to the residual: for the chosen neurons, each where it is stored.
    Ffn,
    /// The host takes over what the device made of a layer, if it does so layer by layer.
    EndLayer,
    /// Norm and head for the tokens whose logits are wanted.
    Logits,
}

/// A phase of one layer, for one chunk of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// Number of the chunk; 0 if there is only one.
    pub chunk: usize,
    /// Number of the layer.
    pub layer: usize,
    /// The phase.
    pub phase: Phase,
}

/// Carries out the phases of a pass, layer `l` by layer `l`.
pub(super) trait Executor {
    fn begin(&mut self, pass: &mut Pass<'_, '_>);
    fn begin_layer(&mut self, _pass: &mut Pass<'_, '_>, _l: usize) {}
    fn attention(&mut self, pass: &mut Pass<'_, '_>, l: usize);
    fn select(&mut self, pass: &mut Pass<'_, '_>, l: usize) -> Wanted;
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
}

impl Pass<'_, '_> {
    /// Tokens of the pass.
    pub fn n(&self) -> usize {
        self.buffers.positions.len()
    }

    /// Shows the true activations of layer `l` to the observer ([`Probe::show`]).
    pub fn show(&mut self, l: usize, listed: bool) {
        let cached = self.cached.as_deref_mut();
        self.probe.show(self.model, self.pool, self.kernels, cached, self.buffers, l, listed);
    }

    /// Whether this is a chunk of a prompt: more tokens than sparse kernels take, so every FFN is dense.
    pub fn is_chunk(&self) -> bool {
        self.n() > MAX_COLUMNS
    }
}

/// Runs a pass, step by step; afterwards the logits of `buffers.logit_rows` are in `buffers.logits`. Between layers it asks whether to go on,
/// and returns whether the pass came to its end.
pub(super) fn forward(executor: &mut dyn Executor, pass: &mut Pass<'_, '_>, go_on: &mut dyn FnMut() -> bool) -> bool {
    // Looked up once: where layers are not logged, they cost a comparison.
    let traced = tracing::enabled!(Level::TRACE);
    let mut _layer = None;
    for step in in_order(pass.model.layers.len()) {
        if step.phase == Phase::BeginLayer && !go_on() {
            executor.leave();
            return false;
        }
        if traced && step.phase == Phase::BeginLayer {
            _layer = Some(trace_span!("layer", number = step.layer).entered());
        }
        perform(executor, pass, step);
        if step.phase == Phase::EndLayer {
            _layer = None;
        }
    }
    true
}

/// The steps of one chunk, layer after layer.
fn in_order(layers: usize) -> impl Iterator<Item = Step> {
    let step = |layer, phase| Step { chunk: 0, layer, phase };
    let layer = move |l| Phase::OF_A_LAYER.into_iter().map(move |phase| step(l, phase));
    let last = layers.saturating_sub(1);
    std::iter::once(step(0, Phase::Begin)).chain((0..layers).flat_map(layer)).chain([step(last, Phase::Logits)])
}

/// Does one step.
fn perform(executor: &mut dyn Executor, pass: &mut Pass<'_, '_>, step: Step) {
    let l = step.layer;
    match step.phase {
        Phase::Begin => executor.begin(pass),
        Phase::BeginLayer => executor.begin_layer(pass, l),
        Phase::Attention => executor.attention(pass, l),
        Phase::Select => pass.wanted = executor.select(pass, l),
        Phase::Ffn => executor.ffn(pass, l, pass.wanted),
        Phase::EndLayer => executor.end_layer(pass, l),
        Phase::Logits => executor.logits(pass),
    }
    executor.done(pass, step);
}

impl Phase {
    /// The phases of a layer, in the order in which each needs the one before.
    const OF_A_LAYER: [Phase; 5] = [Phase::BeginLayer, Phase::Attention, Phase::Select, Phase::Ffn, Phase::EndLayer];
}

#[cfg(test)]
impl Step {
    /// The steps that have to be done before this one can be.
    fn needs(self) -> Vec<Step> {
        let Step { chunk, layer, phase } = self;
        let in_layer = Phase::OF_A_LAYER.iter().position(|of| *of == phase);
        let before = match (in_layer, layer) {
            (None, _) if phase == Phase::Begin => None,
            (None, _) => Some(Step { phase: Phase::EndLayer, ..self }),
            (Some(0), 0) => Some(Step { phase: Phase::Begin, ..self }),
            (Some(0), _) => Some(Step { layer: layer - 1, phase: Phase::EndLayer, ..self }),
            (Some(i), _) => Some(Step { phase: Phase::OF_A_LAYER[i - 1], ..self }),
        };
        let reads = (phase == Phase::Attention && chunk > 0).then(|| Step { chunk: chunk - 1, ..self });
        before.into_iter().chain(reads).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The order that the plain driver takes, for a prompt of several chunks.
    fn plain(chunks: usize, layers: usize) -> Vec<Step> {
        (0..chunks).flat_map(|chunk| in_order(layers).map(move |step| Step { chunk, ..step })).collect()
    }

    #[test]
    fn the_plain_driver_does_every_step_once_and_after_those_that_it_needs() {
        let steps = plain(3, 4);
        assert_eq!(steps.len(), 3 * (2 + 4 * Phase::OF_A_LAYER.len()));
        for (i, step) in steps.iter().enumerate() {
            assert!(!steps[..i].contains(step), "{step:?} twice");
            for needed in step.needs() {
                assert!(steps[..i].contains(&needed), "{step:?} before {needed:?}");
            }
        }
    }
}
