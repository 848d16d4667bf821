//! An FFN as whole matrices, of a model that is read in place, or the shared expert of a mixture: gate and up, activation, down.

use super::buffers::{FfnBuffers, WholeBuffers};
use super::compute::Compute;
use super::work::{Counts, activate_gated, add_down_bias, rows_of};
use crate::cpu::shadow::Scale;
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, ThreadPool};
use crate::engine::inputs::Input;
use crate::model::FfnMatrices;
use crate::model::config::{Ffn, ModelConfig};
use crate::model::weights::Layer;
use crate::ops::linear;
use crate::ops::math;

/// Neurons whose activations a thread computes at a time.
const ACTIVATIONS: usize = 1024;

/// hidden += FFN(x), of every neuron for every column.
pub(super) fn ffn(
    compute: Compute<'_>,
    layer: &Layer,
    weights: &FfnMatrices,
    x: &Columns,
    buffers: &mut FfnBuffers,
    hidden: &mut [f32],
) -> Counts {
    let config = compute.config;
    let FfnBuffers { whole, inputs, .. } = buffers;
    let scale = |activations: &[f32]| inputs.take(Input::Down, activations);
    outputs(compute, weights, &layer.up_bias, x, scale, whole);
    math::add(hidden, &whole.out);
    add_down_bias(layer, hidden);
    rows_of(config, weights.down.cols)
}

/// The outputs of matrices of any width, without a bias of down: `buffers.out` becomes `[n, hidden]`. `scale` looks at what down reads, and
/// gives its fixed step if there is one.
pub(super) fn outputs(
    Compute { pool, kernels, config, .. }: Compute<'_>,
    weights: &FfnMatrices,
    up_bias: &[f32],
    x: &Columns,
    scale: impl FnOnce(&[f32]) -> Option<Scale>,
    buffers: &mut WholeBuffers,
) {
    let WholeBuffers { products, activations, columns, out } = buffers;
    activations.resize(x.n * weights.down.cols, 0.0);
    products.resize(x.n * weights.input.rows(), 0.0);
    linear::products(pool, kernels, weights.input.parts(), x, products);
    activate(pool, config, weights.down.cols, up_bias, products, activations, None);
    columns.scale = scale(activations);
    columns.set_many(pool, kernels, activations, x.n, [weights.down.quant]);
    out.resize(x.n * config.hidden, 0.0);
    linear::products(pool, kernels, std::slice::from_ref(&weights.down), columns, out);
}

/// Gate pre-activations, biases of up where there is no gate included, and activations of all neurons, `[n, ffn]` each.
pub(super) fn activations(
    Compute { pool, kernels, config, .. }: Compute<'_>,
    layer: &Layer,
    weights: &FfnMatrices,
    x: &Columns,
    gates: &mut [f32],
    activations: &mut [f32],
) {
    let mut products = vec![0.0; x.n * weights.input.rows()];
    linear::products(pool, kernels, weights.input.parts(), x, &mut products);
    activate(pool, config, weights.down.cols, &layer.up_bias, &products, activations, Some(gates));
}

/// Activations from products, `[n, ffn]`; `gates` gets what the activation function was applied to.
fn activate(
    pool: &mut ThreadPool,
    config: &ModelConfig,
    ffn: usize,
    up_bias: &[f32],
    products: &[f32],
    activations: &mut [f32],
    gates: Option<&mut [f32]>,
) {
    let gated = config.ffn_kind != Ffn::Plain;
    let rows = if gated { 2 * ffn } else { ffn };
    let (n, pieces) = (products.len() / rows, ffn.div_ceil(ACTIVATIONS));
    let (out, gates) = (Parts::new(activations), gates.map(Parts::new));
    pool.run(n * pieces, |_, task| {
        let (b, first) = (task / pieces, task % pieces * ACTIVATIONS);
        let range = first..ffn.min(first + ACTIVATIONS);
        let of = b * ffn + range.start..b * ffn + range.end;
        // SAFETY: each task has its own neurons of its own column.
        let (out, mut gates) = unsafe { (out.part(of.clone()), gates.as_ref().map(|gates| gates.part(of))) };
        if gated && gates.is_none() && up_bias.is_empty() {
            let [of_gates, of_ups] = [0, ffn].map(|from| &products[b * rows + from..][range.clone()]);
            return activate_gated(config.ffn_kind, config.activation, of_gates, of_ups, out);
        }
        for (i, neuron) in range.enumerate() {
            let (gate, up) = (products[b * rows + neuron], products[b * rows + rows - ffn + neuron]);
            let up = up + up_bias.get(neuron).copied().unwrap_or(0.0);
            let gate = if gated { gate } else { up };
            if let Some(gates) = &mut gates {
                gates[i] = gate;
            }
            out[i] = config.ffn_kind.activation(config.activation, gate, up);
        }
    });
}
