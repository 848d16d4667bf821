//! Looking on while a model runs: what profilers, trainers and audits need of each layer.

use super::ffn::Selection;

/// Is called after each layer's activations are known, before its FFN adds to the residual.
pub trait Observer {
    fn layer(&mut self, seen: &Seen<'_>);
}

/// One layer, for n tokens. Neurons are in the store's order (`Layer::order` names them).
pub struct Seen<'a> {
    pub layer: usize,
    /// Position of the first token in its sequence.
    pub first: usize,
    pub n: usize,
    /// Residual after attention, before ffn_norm, `[n, hidden]`: what `mlp` predictors read.
    pub residual: &'a [f32],
    /// ffn_norm's output, `[n, hidden]`: what `sign` and `exact` read.
    pub input: &'a [f32],
    /// True gate products of every neuron, before the activation function, `[n, ffn]`; where there is no gate, up products
    /// with their bias.
    pub gates: &'a [f32],
    /// True activations act(gate) * up of every neuron, `[n, ffn]`.
    pub activations: &'a [f32],
    /// Which neurons are computed; `None` for all.
    pub selection: Option<&'a Selection>,
}
