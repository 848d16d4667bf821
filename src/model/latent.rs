//! The weights of attention over latents, beside the matrices of a layer's input and output.

use super::layer::Latent;
use super::matrix::Matrix;
use super::norm_weights::NormWeights;

/// What makes queries of their latent, and what stands between the latent of keys and values and the heads ([`Latent`]).
pub struct LatentWeights {
    /// The norm of the latent of queries, `[queries]`, and what makes the queries of it, `[heads * query, queries]`; `None` where they are made
    /// of the layer's input.
    pub queries: Option<(NormWeights, Matrix)>,
    /// The norm of the latent of keys and values, `[rank]`.
    pub norm: NormWeights,
    /// Keys and values of each head.
    pub heads: LatentHeads,
}

/// What makes keys and values of a latent, as files have it. Neither is turned when it is read: a quantised matrix would be rounded once more.
#[derive(Clone, Copy)]
pub enum LatentHeads {
    /// One matrix: of each head the rows of keys, `[plain, rank]`, then those of values, `[values, rank]`. Queries are summed over rows.
    Joined(Matrix),
    /// Keys turned, `[heads * rank, plain]`, and values, `[heads * values, rank]`.
    Apart([Matrix; 2]),
}

impl LatentHeads {
    /// The matrix of values, and the first row of head number `head` in it.
    pub fn values(&self, form: Latent, head: usize) -> (&Matrix, usize) {
        match self {
            LatentHeads::Joined(both) => (both, head * (form.plain + form.values) + form.plain),
            LatentHeads::Apart([_, values]) => (values, head * form.values),
        }
    }

    /// Their matrices.
    pub fn matrices(&self) -> &[Matrix] {
        match self {
            LatentHeads::Joined(both) => std::slice::from_ref(both),
            LatentHeads::Apart(apart) => apart,
        }
    }
}

impl LatentWeights {
    /// Its matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.queries.iter().map(|(_, matrix)| matrix).chain(self.heads.matrices())
    }
}
