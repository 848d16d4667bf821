//! The weights of one layer.

use super::block::BlockLayout;
use super::ffn_weights::{FfnWeights, NeuronBlocks};
use super::latent::LatentWeights;
use super::matrix::Matrix;
use super::norm_weights::NormWeights;
use super::per_layer::LayerInput;
use super::recurrence::Recurrence;
use super::stacked::Stacked;
use crate::ids::Permutation;

/// The weights of one layer.
pub struct Layer {
    /// The norm of attention's input; without weights where that is the residual itself.
    pub attn_norm: NormWeights,
    /// The matrices of the mixer's input, `[rows, hidden]`, as [`super::layer::Mixer::inputs`] lists them.
    pub qkv: Stacked,
    /// `[q_dim + 2 kv_dim]`; empty where the family has none.
    pub qkv_bias: Vec<f32>,
    /// Norms of each head's queries and keys, `[head_dim]` each; `None` where they are not normed.
    pub qk_norm: Option<[NormWeights; 2]>,
    /// The mixer's output projection, `[hidden, cols]`.
    pub o: Matrix,
    /// `[hidden]`; empty where the family has none.
    pub o_bias: Vec<f32>,
    /// What a mixer that is no attention has beside its matrices; empty of attention.
    pub recurrence: Recurrence,
    /// What stands between latents and heads; `None` where keys and values are made by head.
    pub latent: Option<LatentWeights>,
    /// A score of each query head that takes part in its softmax, `[heads]`; empty where there are none.
    pub sinks: Vec<f32>,
    /// The norm of the FFN's input; a copy of `attn_norm` where the layer has one norm for both, without weights where the input is the
    /// residual itself.
    pub ffn_norm: NormWeights,
    /// The norms of attention's and of the FFN's output; `None` where outputs are added as they are.
    pub post_norms: Option<[NormWeights; 2]>,
    /// The residual behind the layer is multiplied by this.
    pub output_scale: f32,
    /// Neurons of its FFN, or of each of its experts; 0 where it has neither.
    pub width: usize,
    /// The weights of the FFN.
    pub ffn: FfnWeights,
    /// What adds its own numbers of a token to the residual; `None` where it has none.
    pub per_layer: Option<LayerInput>,
    /// `[ffn]`; empty where the family has none.
    pub up_bias: Vec<f32>,
    /// `[hidden]`; empty where the family has none.
    pub down_bias: Vec<f32>,
    /// The order of its neurons.
    pub order: Permutation,
}

impl Layer {
    /// The neuron blocks.
    ///
    /// # Panics
    /// If the FFN is whole matrices: what needs neurons opens models with them.
    #[inline]
    pub fn neurons(&self) -> &NeuronBlocks {
        match &self.ffn {
            FfnWeights::Neurons(blocks) => blocks,
            FfnWeights::Matrices(_) | FfnWeights::Experts(_) => {
                panic!("the model runs in place and has no neuron blocks")
            }
        }
    }

    /// The matrices of its mixer.
    pub fn mixer_matrices(&self) -> impl Iterator<Item = &Matrix> {
        let of_latents = self.latent.iter().flat_map(LatentWeights::matrices);
        self.qkv.parts().iter().chain([&self.o]).chain(of_latents)
    }

    /// What a neuron block holds, and where.
    #[inline]
    pub fn block(&self) -> &BlockLayout {
        &self.neurons().layout
    }
}
