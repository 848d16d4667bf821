//! What accompanies a pass: the clock, the sums of times, and an observer.

use super::batch::Buffers;
use super::ffn::{self, CachedFfn, CachedTools, Compute};
use super::observer::{Observer, Seen, SeenExperts};
use super::report::Report;
use crate::clock;
use crate::device::timeline::Stage;
use crate::model::config::{Ffn, ModelConfig};
use crate::model::layer::Experts;
use crate::model::weights::Layer;

/// Measures and shows the phases of one pass.
pub(super) struct Probe<'a, 'o> {
    /// When the current stage began.
    pub lap: clock::Instant,
    /// Sums of times and of what was computed.
    pub report: &'a mut Report,
    /// Sees each layer's true activations; `None` if nothing does.
    pub observer: Option<&'a mut (dyn Observer + 'o)>,
}

/// What of a layer is computed after it was shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WillCompute {
    /// All neurons.
    All,
    /// Those of the layer's selection.
    Selection,
    /// For each token of a chunk those that are active.
    Active,
}

impl Probe<'_, '_> {
    /// Adds the time since the last lap to `stage`.
    pub fn lap(&mut self, stage: Stage) {
        self.report.add_ns(stage, clock::lap(&mut self.lap));
    }

    /// Computes the true activations of layer `l` for the observer, from its residual and FFN input in `b`, and says what `will_compute`.
    pub fn show(
        &mut self,
        compute: Compute<'_>,
        (l, layer): (usize, &Layer),
        cached: Option<&mut CachedFfn>,
        b: &mut Buffers,
        will_compute: WillCompute,
    ) {
        let Some(observer) = &mut self.observer else { return };
        let (c, n) = (compute.config, b.positions.len());
        let width = c.width(l);
        b.true_gates.resize(n * width, 0.0);
        b.activations.resize(n * width, 0.0);
        let (gates, activations) = (&mut b.true_gates, &mut b.activations);
        match cached {
            Some(cached) => {
                let tools = CachedTools { compute, layer: (l, layer), x: &b.columns };
                cached.activations(tools, gates, activations);
            }
            None => ffn::activations(compute, layer, &b.columns, gates, activations),
        }
        for numbers in [&mut b.true_gates, &mut b.activations] {
            widen(numbers, (n, width), c.widest_ffn());
        }
        let (gates, activations) = (&b.true_gates, &b.activations);
        let selection = (will_compute == WillCompute::Selection).then(|| &b.predicted.selections[l]);
        let only_active = will_compute == WillCompute::Active;
        let (first, residual, input) = (b.positions[0].position, &b.x, &b.normed);
        observer.layer(&Seen { layer: l, first, n, residual, input, gates, activations, selection, only_active });
    }

    /// Shows the observer which experts were chosen in layer `l`: a cluster of a mixture is an expert, its gate the router's product and
    /// its activation the expert's weight.
    pub fn show_experts(&mut self, c: &ModelConfig, b: &mut Buffers, l: usize, experts: Experts) {
        let Some(observer) = &mut self.observer else { return };
        let (first, n) = (b.positions[0].position, b.positions.len());
        b.routes.weights(experts, &mut b.activations);
        for numbers in [&mut b.routes.products, &mut b.activations] {
            widen(numbers, (n, experts.count), c.clusters());
        }
        let (residual, input, gates, activations) =
            (&b.x[..], &b.normed[..], &b.routes.products[..], &b.activations[..]);
        observer.layer(&Seen {
            layer: l,
            first,
            n,
            residual,
            input,
            gates,
            activations,
            selection: None,
            only_active: false,
        });
        b.experts.shows = observer.looks_inside() && !b.routes.tokens.is_empty();
    }

    /// Shows the observer what was computed inside the experts of layer `l`, if it looks there.
    pub fn show_inside(&mut self, b: &mut Buffers, l: usize, kind: Ffn, predicted: bool) {
        if let Some(observer) = self.observer.as_mut().filter(|_| std::mem::take(&mut b.experts.shows)) {
            let (groups, tokens) = (&b.routes.groups[..], &b.routes.tokens[..]);
            let (products, computed) = (&b.experts.true_products[..], &b.experts.computed[..]);
            let n = b.positions.len();
            observer.inside(&SeenExperts { layer: l, n, groups, tokens, products, kind, computed, predicted });
        }
    }
}

/// Fills up n rows of `width` numbers with zeros to rows of `to`.
fn widen(numbers: &mut Vec<f32>, (n, width): (usize, usize), to: usize) {
    if width == to {
        return;
    }
    numbers.resize(n * to, 0.0);
    for t in (0..n).rev() {
        numbers.copy_within(t * width..(t + 1) * width, t * to);
        numbers[t * to + width..(t + 1) * to].fill(0.0);
    }
}
