//! Predicts which neurons of a layer will be active, before its FFN runs (PowerInfer 5.1, SparseInfer IV, DynamicInfer 4.2.1).
//!
//! A predictor gives every neuron of a layer a *score*, from the residual after the attention (before it where attention and FFN stand side
//! by side) of that layer or of one `ahead` layers before it. A [`Calibration`] per layer and look-ahead turns scores into probabilities,
//! so that one threshold means the same for every kind of predictor; the hot path turns the threshold into a score once and compares
//! scores.

mod calibration;
pub mod exact;
mod load;
pub mod mlp;
pub mod router;
pub mod sign;

pub use calibration::{Bytes, Calibration};
pub use exact::Exact;
pub use load::open;
pub use mlp::{Mlp, NetworkWeights};
pub use router::Router;
pub use sign::Sign;

use crate::cpu::sign::BitLine;
use crate::cpu::{Columns, Kernels, ThreadPool};
use crate::formats::MappedFile;
use crate::model::{Matrix, Model};

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
    /// expert after the other); higher is likelier. `residual`, `[n,
    /// hidden]`, is the residual after the attention of layer `layer - ahead`, before its ffn_norm. Must only be called if there is a
    /// `calibration(layer, ahead)`.
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
