//! The interface of predictors: their kinds, what they compute with, and their weights for a device.

use super::calibration::Calibration;
use crate::cpu::sign::BitLine;
use crate::cpu::{Columns, Kernels, ThreadPool};
use crate::formats::MappedFile;
use crate::model::{Matrix, Model};
use crate::ops::linear::products;
use crate::ops::math;

/// Added to the mean square of the residual, so that a residual of zeros stays zeros.
pub(super) const EPSILON: f32 = 1e-6;

/// The kinds of predictors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// None: every neuron is computed.
    Dense,
    /// The true gates first, then only the neurons that fired.
    Exact,
    /// Sign bits of gate rows and input (SparseInfer): nothing to train.
    Sign,
    /// A trained two-layer network of low rank (PowerInfer, Deja Vu).
    Mlp,
    /// The routers of a mixture of experts: nothing to train, and nothing to choose.
    Router,
}

impl Kind {
    /// Every kind that can be asked for, from the simplest on.
    pub const ALL: [Kind; 4] = [Kind::Dense, Kind::Exact, Kind::Sign, Kind::Mlp];

    /// The kind as users type it and files contain it.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Dense => "dense",
            Kind::Exact => "exact",
            Kind::Sign => "sign",
            Kind::Mlp => "mlp",
            Kind::Router => "router",
        }
    }
}

impl std::str::FromStr for Kind {
    type Err = String;
    fn from_str(text: &str) -> Result<Kind, String> {
        let found = Kind::ALL.into_iter().find(|k| k.name().eq_ignore_ascii_case(text));
        found.ok_or_else(|| format!("'{text}' is not a predictor; take dense, exact, sign or mlp"))
    }
}

/// What a predictor computes with; kept between calls, so that nothing is allocated once it is warm.
pub struct Tools<'a> {
    /// The model that is predicted.
    pub model: &'a Model,
    /// The threads that compute.
    pub pool: &'a mut ThreadPool,
    /// The CPU kernels that are used.
    pub kernels: &'a Kernels,
    /// Memory for intermediate values.
    pub scratch: &'a mut Scratch,
}

/// Memory for the intermediate values of predictors.
#[derive(Default)]
pub struct Scratch {
    /// The input of a matrix product, as kernels read it.
    pub columns: Columns,
    /// Normalised residual, `[n, hidden]`.
    pub normed: Vec<f32>,
    /// Hidden layer of a network, `[n, rank]`.
    pub inner: Vec<f32>,
    /// Packed signs of the input, `[n, cpu::sign::lines(hidden)]`.
    pub bits: Vec<BitLine>,
    /// Experts of a token and their weights, `[used]`.
    pub experts: Vec<(usize, f32)>,
}

/// A predictor of one layer as plain weights, for a device.
#[derive(Clone, Copy)]
pub enum Form<'a> {
    /// The sign predictor.
    Sign {
        /// Packed signs of the gate rows, `[ffn, cpu::sign::lines(hidden)]`.
        bits: &'a [BitLine],
    },
    /// A network with one hidden layer, after a norm without weights.
    Mlp {
        /// The matrix `[rank, hidden]` and bias `[rank]` of the hidden layer.
        inner: (&'a Matrix, &'a [f32]),
        /// The matrix `[ffn, rank]` and bias `[ffn]` of the scores.
        outer: (&'a Matrix, &'a [f32]),
        /// Added to the mean square of the residual in the norm.
        epsilon: f32,
    },
}

impl Form<'_> {
    /// Bytes of all its weights.
    pub fn bytes(&self) -> u64 {
        match self {
            Form::Sign { bits } => size_of_val(*bits) as u64,
            Form::Mlp { inner, outer, .. } => {
                inner.0.bytes() + outer.0.bytes() + (size_of_val(inner.1) + size_of_val(outer.1)) as u64
            }
        }
    }

    /// Numbers in the hidden layer; 0 if there is none.
    pub fn rank(&self) -> usize {
        match self {
            Form::Sign { .. } => 0,
            Form::Mlp { inner, .. } => inner.0.rows,
        }
    }
}

/// Scores the neurons of layers.
pub trait Predictor: Send + Sync {
    /// Which kind it is.
    fn kind(&self) -> Kind;

    /// The probability from which on a neuron is computed, unless the user sets another.
    fn threshold(&self, layer: usize, ahead: usize) -> f32;

    /// Turns its scores of `layer`, from the residual `ahead` layers before, into probabilities; `None` if it cannot predict that.
    fn calibration(&self, layer: usize, ahead: usize) -> Option<&Calibration>;

    /// Writes the score of every neuron of `layer` to `scores`, `[n, neurons]` in the store's order (of a mixture those of all experts, one
    /// expert after the other); higher is likelier. `neurons` are those of the layer that has most: a layer without an FFN gets scores that
    /// reach no threshold. `residual`, `[n, hidden]`, is the residual after the attention of layer `layer - ahead`, before its ffn_norm. Must
    /// only be called if there is a `calibration(layer, ahead)`.
    fn score(&self, tools: &mut Tools<'_>, layer: usize, ahead: usize, residual: &[f32], n: usize, scores: &mut [f32]);

    /// The network that makes the scores, for callers that need the scores of some neurons only: the second half of a mixture is computed
    /// for the experts that a token has. `None` for other kinds.
    fn network(&self, _layer: usize, _ahead: usize) -> Option<NetworkWeights<'_>> {
        None
    }

    /// What a device needs to compute the same scores; `None` if it cannot or need not.
    fn form(&self, _layer: usize, _ahead: usize) -> Option<Form<'_>> {
        None
    }

    /// Bytes of weights that one call of [`Predictor::score`] reads.
    fn weight_bytes(&self, layer: usize, ahead: usize) -> u64;

    /// The file that it reads while it predicts; `None` if it reads none.
    fn file(&self) -> Option<&MappedFile> {
        None
    }
}

/// The weights of a network, ready to run.
#[derive(Clone, Copy)]
pub struct NetworkWeights<'a> {
    /// `inner`, `[rank, hidden]`, and `outer`, `[neurons, rank]`; `None` for rank 0.
    pub(super) matrices: Option<(&'a Matrix, &'a Matrix)>,
    /// `[rank]`
    pub(super) inner_bias: &'a [f32],
    /// What is added to the scores, `[neurons]`.
    pub bias: &'a [f32],
}

impl<'a> NetworkWeights<'a> {
    /// The matrix whose products with a token's hidden values are its scores without the bias, `[neurons, rank]`; `None` if the bias is all
    /// there is.
    pub fn outer(&self) -> Option<&'a Matrix> {
        self.matrices.map(|(_, outer)| outer)
    }

    /// The hidden values of n tokens from their `residual`, `[n, hidden]`: `values` becomes `[n, rank]`. By rows, however many tokens there
    /// are: the choice of neurons does not depend on the other tokens of the pass.
    pub fn hidden_values(&self, tools: &mut Tools<'_>, residual: &[f32], n: usize, values: &mut Vec<f32>) {
        let Tools { model, pool, kernels, scratch } = tools;
        let h = model.config.hidden;
        let Some((inner, _)) = self.matrices else { return values.clear() };
        let Scratch { normed, columns, .. } = &mut **scratch;
        normed.resize(n * h, 0.0);
        for (x, out) in residual.chunks_exact(h).zip(normed.chunks_exact_mut(h)) {
            normalise(x, out);
        }
        values.resize(n * inner.rows, 0.0);
        columns.set_for(normed, n, [inner.quant]);
        products(pool, kernels, std::slice::from_ref(inner), columns, values);
        for values in values.chunks_exact_mut(inner.rows) {
            values.iter_mut().zip(self.inner_bias).for_each(|(v, b)| *v = (*v + b).max(0.0));
        }
    }
}

/// out = x / rms(x).
pub fn normalise(x: &[f32], out: &mut [f32]) {
    let scale = 1.0 / (math::sum(x.iter().map(|v| v * v)) / x.len() as f32 + EPSILON).sqrt();
    out.iter_mut().zip(x).for_each(|(o, v)| *o = v * scale);
}
