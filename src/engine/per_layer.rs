//! Embeddings for each layer, on the host ([`crate::model::per_layer`]).

use super::batch::{Buffers, LayerInputRoom};
use super::forward::Pass;
use super::norms::each;
use crate::ops::linear::{linear, read_row};
use crate::ops::math;

/// Makes all layers' own numbers of the tokens, whose embeddings are in `buffers.x`, in a model that has them.
pub(super) fn make_layer_inputs(pass: &mut Pass<'_, '_>) {
    let Pass { model, pool, kernels, buffers: b, .. } = pass;
    let Some(of) = &model.per_layer else { return };
    let (c, n, all) = (&model.config, b.positions.len(), of.projection.rows);
    let Buffers { layer_inputs: LayerInputRoom { inputs, row, gates }, x, columns, tokens, .. } = &mut **b;
    inputs.resize(n * all, 0.0);
    row.resize(all, 0.0);
    gates.resize(n * c.per_layer, 0.0);
    linear(pool, kernels, &of.projection, x, n, columns, inputs);
    each(pool, n, inputs, |_, inputs| {
        for of_layer in inputs.chunks_exact_mut(c.per_layer) {
            of_layer.iter_mut().for_each(|number| *number *= of.projection_scale);
            math::norm_in_place(c.norm, &of.norm, of_layer);
        }
    });
    for (&token, inputs) in tokens.iter().zip(inputs.chunks_exact_mut(all)) {
        read_row(&of.table, token as usize, row);
        inputs.iter_mut().zip(&*row).for_each(|(number, &of_token)| *number += of.row_scale * of_token);
    }
}

/// Adds what layer `l` makes of its own numbers to the residual behind its FFN, where it has any.
pub(super) fn add_layer_input(pass: &mut Pass<'_, '_>, l: usize) {
    let Pass { model, pool, kernels, buffers: b, .. } = pass;
    let Some(of) = &model.layers[l].per_layer else { return };
    let (c, n, h, count) = (&model.config, b.positions.len(), model.config.hidden, model.config.per_layer);
    let Buffers { layer_inputs: LayerInputRoom { inputs, gates, .. }, x, columns, projected, normed, .. } = &mut **b;
    linear(pool, kernels, &of.gate, x, n, columns, gates);
    let own = |t: usize| &inputs[(t * c.layers().len() + l) * count..][..count];
    each(pool, n, gates, |t, gates| {
        gates.iter_mut().zip(own(t)).for_each(|(gate, own)| *gate = c.activation.apply(*gate) * own);
    });
    linear(pool, kernels, &of.out, gates, n, columns, projected);
    each(pool, n, normed, |t, out| math::norm(c.norm, &of.norm, &projected[t * h..(t + 1) * h], out));
    math::add(x, normed);
}
