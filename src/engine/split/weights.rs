//! The model's weights on the device beside the neurons: attention and head.

use super::allocator::DeviceAllocator;
use crate::device::{Buffer, Linear, Norm, OutOfMemory, Then, View};
use crate::formats::rows::Quant;
use crate::model::config::Norm as NormKind;
use crate::model::weights::{Matrix, NormWeights};
use crate::model::{Model, Stacked};

impl DeviceAllocator<'_> {
    /// Uploads a matrix and its bias.
    pub(super) fn linear(&mut self, matrix: &Matrix, bias: &[f32]) -> Result<DeviceMatrix, OutOfMemory> {
        let (weights, bias) = (self.upload(matrix.all())?, self.numbers(bias)?);
        let &Matrix { quant, rows, cols, .. } = matrix;
        Ok(DeviceMatrix { quant, rows, cols, weights, bias, first: 0, stride: rows })
    }

    /// Uploads matrices of one input, and their biases one after the other.
    fn stacked(&mut self, matrices: &Stacked, bias: &[f32]) -> Result<Vec<DeviceMatrix>, OutOfMemory> {
        let stride = matrices.parts().iter().map(|part| part.rows).sum();
        let mut first = 0;
        let part = |part: &Matrix| {
            let here = first..first + part.rows;
            first = here.end;
            let matrix = self.linear(part, bias.get(here.clone()).unwrap_or_default())?;
            Ok(DeviceMatrix { first: here.start, stride, ..matrix })
        };
        matrices.parts().iter().map(part).collect()
    }

    /// Uploads the weights and the bias of a norm.
    pub(super) fn norm(&mut self, weights: &NormWeights) -> Result<[Buffer; 2], OutOfMemory> {
        Ok([self.numbers(&weights.weight)?, self.numbers(&weights.bias)?])
    }
}

/// A matrix on the device, with its bias.
#[derive(Clone, Copy)]
pub struct DeviceMatrix {
    /// The type of its numbers.
    pub quant: Quant,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// `[rows, cols]`
    pub weights: Buffer,
    /// `[rows]`, or no bytes.
    pub bias: Buffer,
    /// Where its first row stands in the output, of which other matrices may make other parts.
    first: usize,
    /// Numbers of the whole output.
    stride: usize,
}

impl DeviceMatrix {
    /// The call that multiplies `n` columns of `x` by the matrix and writes to `out` as `then` says.
    pub fn call(&self, n: usize, x: View, out: View, then: Then) -> Linear {
        let DeviceMatrix { quant, rows, cols, weights, bias, first, stride } = *self;
        let out = View { at: out.at + 4 * first as u64, ..out };
        Linear { quant, rows, cols, n, weights, bias, x, out, stride, then }
    }
}

/// The call that norms `n` columns of `x` into `out`.
pub fn norm(kind: NormKind, [weight, bias]: [Buffer; 2], hidden: usize, n: usize, x: View, out: View) -> Norm {
    Norm { kind, hidden, n, weight, bias, x, out }
}

/// The weights of one layer, without its neurons.
pub struct LayerWeights {
    /// Weight and bias of the norm before attention.
    pub attn_norm: [Buffer; 2],
    /// Make queries, keys and values: one matrix, or three where their types differ.
    pub qkv: Vec<DeviceMatrix>,
    /// Attention's output matrix.
    pub o: DeviceMatrix,
    /// Weight and bias of the norm before the FFN.
    pub ffn_norm: [Buffer; 2],
    /// `[ffn]`, or no bytes.
    pub up_bias: Buffer,
}

/// The weights of all layers, without neurons, and of the head.
pub struct Weights {
    /// `[layers]`
    pub layers: Vec<LayerWeights>,
    /// Weight and bias of the last norm.
    pub out_norm: [Buffer; 2],
    /// Makes the logits.
    pub head: DeviceMatrix,
    /// For a norm without weights.
    pub plain: [Buffer; 2],
}

impl Weights {
    /// Uploads them.
    ///
    /// # Errors
    /// The device has no room.
    pub fn new(allocator: &mut DeviceAllocator<'_>, model: &Model) -> Result<Weights, OutOfMemory> {
        let layer = |layer: &crate::model::weights::Layer| {
            Ok(LayerWeights {
                attn_norm: allocator.norm(&layer.attn_norm)?,
                qkv: allocator.stacked(&layer.qkv, &layer.qkv_bias)?,
                o: allocator.linear(&layer.o, &layer.o_bias)?,
                ffn_norm: allocator.norm(&layer.ffn_norm)?,
                up_bias: allocator.numbers(&layer.up_bias)?,
            })
        };
        let layers = model.layers.iter().map(layer).collect::<Result<_, _>>()?;
        let none = allocator.alloc(0)?;
        let (out_norm, head) = (allocator.norm(&model.out_norm)?, allocator.linear(&model.head, &[])?);
        Ok(Weights { layers, out_norm, head, plain: [none; 2] })
    }
}
