//! The host's work for a mixture's layers, with and without a device: it chooses the experts of each token, and prepares what a later layer
//! and the inside of the experts need.

use super::batch::Buffers;
use super::forward::Pass;
use super::norms::each;
use crate::model::layer::{Experts, RouterInput};
use crate::model::{ExpertWeights, FfnWeights};
use crate::ops::math;
use crate::predictor::Tools;

/// The mixture that layer `l` is.
pub(super) fn mixture<'a>(pass: &Pass<'a, '_>, l: usize) -> (Experts, &'a ExpertWeights) {
    match (pass.model.config.experts(l), &pass.model.layers[l].ffn) {
        (Some(experts), FfnWeights::Experts(weights)) => (experts, weights),
        _ => unreachable!("every layer of a mixture is one, of no experts perhaps"),
    }
}

/// Chooses the experts of layer `l`, by what its router reads.
pub(super) fn route(pass: &mut Pass<'_, '_>, l: usize, experts: Experts) {
    let n = pass.n();
    let Pass { model, pool, kernels, buffers: b, .. } = pass;
    let FfnWeights::Experts(weights) = &model.layers[l].ffn else {
        unreachable!("every layer of a mixture is one, of no experts perhaps")
    };
    let Buffers { x, normed, projected, columns, routes, .. } = &mut **b;
    let input = match experts.reads {
        RouterInput::Layer => &**x,
        RouterInput::FfnNorm => &**normed,
        RouterInput::Own => {
            let (c, h) = (&model.config, model.config.hidden);
            let row = |t: usize| &x[t * h..(t + 1) * h];
            each(pool, n, projected, |t, out| math::norm(c.norm, &weights.router_norm, row(t), out));
            &**projected
        }
    };
    match &weights.router {
        Some(router) => {
            columns.set_many(pool, kernels, input, n, [router.quant]);
            let biases = [weights.router_bias(), &weights.selection_bias, &weights.scales];
            routes.route(pool, kernels, experts, router, biases, columns);
        }
        None if weights.experts.is_empty() => routes.take_none(),
        None => routes.take_all(experts, n),
    }
}

/// Looks at what experts a later layer of few tokens will need, where they come from disk.
pub(super) fn foresee_experts(pass: &mut Pass<'_, '_>, l: usize) {
    let n = pass.n();
    let Pass { model, pool, kernels, buffers: b, cached, .. } = pass;
    if let Some(foresight) = cached.as_mut().and_then(|cached| cached.foresight.as_mut()) {
        let mut tools = Tools { model, pool, kernels, scratch: &mut b.scratch };
        foresight.look_at_experts(&mut tools, l, (&b.x, n));
    }
}

/// Computes the hidden values of the network that says which neurons of the chosen experts may fire, if the layer has one. A prompt's chunk
/// goes by the gates.
pub(super) fn look_inside(pass: &mut Pass<'_, '_>, l: usize) {
    let (n, is_chunk) = (pass.n(), pass.is_chunk());
    let Pass { model, pool, kernels, buffers: b, sparsity, .. } = pass;
    if let Some((network, _)) = sparsity.inside(l).filter(|_| !is_chunk) {
        let mut tools = Tools { model, pool, kernels, scratch: &mut b.scratch };
        network.hidden_values(&mut tools, &b.x, n, &mut b.experts.values);
    }
}
