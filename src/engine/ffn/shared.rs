//! The shared expert of a mixture: an FFN of whole matrices that every token passes through, beside the experts that the router chooses.

use super::buffers::WholeBuffers;
use super::compute::Compute;
use super::whole;
use crate::cpu::Columns;
use crate::model::SharedExpert;
use crate::ops::math;

/// What a shared expert works with.
#[derive(Default)]
pub struct SharedBuffers {
    /// What gate and up read.
    input: Columns,
    whole: WholeBuffers,
}

/// hidden += the shared expert's output for each token, times its weight. `x` is the normalised input, `[n, hidden]`, and `hidden` the
/// residual, `[n, hidden]`.
pub fn shared_expert(
    compute: Compute<'_>,
    shared: &SharedExpert,
    x: &[f32],
    buffers: &mut SharedBuffers,
    hidden: &mut [f32],
) {
    let (config, SharedBuffers { input, whole }) = (compute.config, buffers);
    input.set_many(compute.pool, compute.kernels, x, x.len() / config.hidden, shared.ffn.input_quants());
    whole::outputs(compute, &shared.ffn, &[], input, |_| None, whole);
    let tokens = x.chunks_exact(config.hidden).zip(whole.out.chunks_exact(config.hidden));
    for ((x, out), hidden) in tokens.zip(hidden.chunks_exact_mut(config.hidden)) {
        let weight = shared_weight(shared, x);
        hidden.iter_mut().zip(out).for_each(|(hidden, out)| *hidden += weight * out);
    }
}

/// What the shared expert's output is multiplied by for a token with the normalised input `x`, `[hidden]`.
pub fn shared_weight(shared: &SharedExpert, x: &[f32]) -> f32 {
    if shared.router.is_empty() {
        return 1.0;
    }
    let product = math::sum(shared.router.iter().zip(x).map(|(weight, x)| weight * x));
    1.0 / (1.0 + (-product).exp())
}
