//! Embeddings for each layer, as in Gemma 4's E models: beside the residual each layer gets a few numbers of a token, half of them by a row of a
//! table and half by a projection of the token's embedding. The table is larger than all layers; a pass reads a row of it for each token.

use super::matrix::Matrix;
use super::norm_weights::NormWeights;

/// What makes the layers' own numbers of a token, p: with row r of the table and projection v of the scaled embedding, those of a layer are
/// (norm(v / sqrt(hidden)) + sqrt(count) r) / sqrt(2).
pub struct LayerInputs {
    /// A row for each token, `[vocab, layers * count]`.
    pub table: Matrix,
    /// What makes v, `[layers * count, hidden]`.
    pub projection: Matrix,
    /// The norm of v of a layer, `[count]`, divided by the root of 2.
    pub norm: NormWeights,
    /// What rows are multiplied by.
    pub row_scale: f32,
    /// What v is multiplied by.
    pub projection_scale: f32,
}

impl LayerInputs {
    /// By these matrices and the norm as it was published.
    pub(super) fn new(table: Matrix, projection: Matrix, norm: NormWeights) -> LayerInputs {
        let count = norm.weight.len() as f32;
        LayerInputs {
            norm: norm.scaled(std::f32::consts::FRAC_1_SQRT_2),
            row_scale: count.sqrt() * std::f32::consts::FRAC_1_SQRT_2,
            projection_scale: 1.0 / (projection.cols as f32).sqrt(),
            table,
            projection,
        }
    }
}

/// What adds a layer's own numbers p of a token to the residual x behind its FFN: x += norm(out (act(gate x) * p)).
pub struct LayerInput {
    /// `[count, hidden]`
    pub gate: Matrix,
    /// `[hidden, count]`
    pub out: Matrix,
    /// `[hidden]`
    pub norm: NormWeights,
}
