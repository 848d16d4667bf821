//! The model's weights on the device beside the neurons: attention, shared experts and head.

use super::allocator::DeviceAllocator;
use crate::device::{Buffer, Linear, Norm, OutOfMemory, Then, View};
use crate::formats::rows::Quant;
use crate::model::config::Norm as NormKind;
use crate::model::ffn_weights::SharedNorms;
use crate::model::weights::{Matrix, NormWeights};
use crate::model::{FfnMatrices, Model, Stacked};

impl DeviceAllocator<'_> {
    /// Uploads a matrix and its bias.
    pub(super) fn linear(&mut self, matrix: &Matrix, bias: &[f32]) -> Result<DeviceMatrix, OutOfMemory> {
        self.in_order(matrix, bias, |row| row)
    }

    /// Uploads a matrix and its bias; row `r` on the device is row `of(r)` of the matrix.
    fn in_order(
        &mut self,
        matrix: &Matrix,
        bias: &[f32],
        of: impl Fn(usize) -> usize,
    ) -> Result<DeviceMatrix, OutOfMemory> {
        let weights = if DeviceMatrix::is_as_on_device(matrix, &of) {
            self.upload(matrix.all())?
        } else {
            // As a file has them: without padding, and perhaps in another order.
            let (padded, row_bytes) = (matrix.quant.row_bytes(matrix.cols), matrix.row_bytes);
            self.upload_rows(matrix.rows, padded, |row, to| to[..row_bytes].copy_from_slice(matrix.row(of(row))))?
        };
        self.beside(matrix, weights, bias)
    }

    /// Uploads the bias of a matrix that lies at `weights`.
    fn beside(&mut self, matrix: &Matrix, weights: Buffer, bias: &[f32]) -> Result<DeviceMatrix, OutOfMemory> {
        let &Matrix { quant, rows, cols, .. } = matrix;
        let bias = self.numbers(bias)?;
        Ok(DeviceMatrix { quant, rows, cols, weights, bias, first: 0, stride: rows })
    }

    /// Uploads matrices of one input, and their biases one after the other; without the matrices themselves if they are `elsewhere`.
    fn stacked(
        &mut self,
        matrices: &Stacked,
        bias: &[f32],
        elsewhere: Option<Buffer>,
    ) -> Result<Vec<DeviceMatrix>, OutOfMemory> {
        let stride = matrices.parts().iter().map(|part| part.rows).sum();
        let mut first = 0;
        let part = |part: &Matrix| {
            let here = first..first + part.rows;
            first = here.end;
            // Rows change places within their part only.
            let of = |row: usize| matrices.place(here.start + row) - here.start;
            let bias = bias.get(here.clone()).unwrap_or_default();
            let matrix = match elsewhere {
                Some(at) => self.beside(part, at, bias)?,
                None => self.in_order(part, bias, of)?,
            };
            Ok(DeviceMatrix { first: here.start, stride, ..matrix })
        };
        matrices.parts().iter().map(part).collect()
    }

    /// Uploads gate, up and down of an expert, or up and down.
    fn expert(&mut self, expert: &FfnMatrices) -> Result<[Buffer; 3], OutOfMemory> {
        let parts = expert.parts().map(|part| self.upload(part.all())).collect::<Result<Vec<_>, _>>()?;
        Ok(expert_parts(&parts))
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
    /// Whether the bytes of a matrix, row `r` of which on the device is row `of(r)`, are in host memory as they are on the device.
    pub fn is_as_on_device(matrix: &Matrix, of: impl Fn(usize) -> usize) -> bool {
        matrix.quant.row_bytes(matrix.cols) == matrix.row_bytes && (0..matrix.rows).all(|row| of(row) == row)
    }

    /// The call that multiplies `n` columns of `x` by the matrix and writes to `out` as `then` says.
    pub fn call(&self, n: usize, x: View, out: View, then: Then) -> Linear {
        let DeviceMatrix { quant, rows, cols, weights, bias, first, stride } = *self;
        let out = View { at: out.at + 4 * first as u64, ..out };
        Linear { quant, rows, cols, n, weights, bias, x, out, stride, then }
    }
}

/// Buffers of an expert's gate, up and down; without a gate up has its place as well: up, up and down.
pub fn expert_parts(parts: &[Buffer]) -> [Buffer; 3] {
    match *parts {
        [up, down] => [up, up, down],
        [gate, up, down] => [gate, up, down],
        _ => unreachable!("an expert has two or three matrices"),
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
    /// The norms of the heads of q and of k, or no bytes.
    pub qk_norm: [Buffer; 2],
    /// Attention's output matrix.
    pub o: DeviceMatrix,
    /// Weight and bias of the norm before the FFN.
    pub ffn_norm: [Buffer; 2],
    /// Weight and bias of the norms of attention's and of the FFN's output, where the layer norms them.
    pub post_norms: Option<[[Buffer; 2]; 2]>,
    /// The residual behind the layer is multiplied by this.
    pub output_scale: f32,
    /// Which of [`Weights::rotations`] it has, if any.
    pub rotation: Option<usize>,
    /// `[ffn]`, or no bytes.
    pub up_bias: Buffer,
    /// Sinks of attention, `[heads]`, or no bytes.
    pub sinks: Buffer,
    /// Biases of all experts' gate and up and of their down, as [`crate::device::ExpertFfn`] has them, or no bytes.
    pub expert_biases: [Buffer; 2],
    /// Gate, up and down of a mixture's shared expert, as a slot has those of another.
    pub shared: Option<[Buffer; 3]>,
    /// Where it has norms of its own: of what it reads, of what it makes, and of what the others make.
    pub shared_norms: Option<[[Buffer; 2]; 3]>,
}

impl LayerWeights {
    /// Attention's matrices lie here from now on, the output's last.
    pub fn place(&mut self, at: &[Buffer]) {
        self.qkv.iter_mut().chain([&mut self.o]).zip(at).for_each(|(matrix, at)| matrix.weights = *at);
    }
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
    /// Weights of a norm that makes zeros of what it reads, `[hidden]`; no bytes where no layer needs it.
    pub zeros: [Buffer; 2],
    /// The rotations that layers have ([`crate::model::ModelConfig::rotations`]).
    pub rotations: Vec<(Vec<f32>, f32)>,
}

impl Weights {
    /// Uploads them, without attention's matrices of `streamed` layers.
    ///
    /// # Errors
    /// The device has no room.
    pub fn new(allocator: &mut DeviceAllocator<'_>, model: &Model, streamed: usize) -> Result<Weights, OutOfMemory> {
        let (c, none, layers) = (&model.config, allocator.alloc(0)?, model.layers.len());
        let rotations = c.rotations();
        let layer = |(l, layer): (usize, &crate::model::weights::Layer)| {
            let elsewhere = is_streamed(l, layers, streamed).then_some(none);
            Ok(LayerWeights {
                attn_norm: allocator.norm(&layer.attn_norm)?,
                qkv: allocator.stacked(&layer.qkv, &layer.qkv_bias, elsewhere)?,
                qk_norm: match &layer.qk_norm {
                    Some([q, k]) => [allocator.numbers(&q.weight)?, allocator.numbers(&k.weight)?],
                    None => [none; 2],
                },
                o: match elsewhere {
                    Some(at) => allocator.beside(&layer.o, at, &layer.o_bias)?,
                    None => allocator.linear(&layer.o, &layer.o_bias)?,
                },
                ffn_norm: allocator.norm(&layer.ffn_norm)?,
                post_norms: match &layer.post_norms {
                    Some([attention, ffn]) => Some([allocator.norm(attention)?, allocator.norm(ffn)?]),
                    None => None,
                },
                output_scale: layer.output_scale,
                rotation: rotations
                    .iter()
                    .position(|of| c.attention(l).is_some_and(|a| (c.rotary(&a), a.rotary_scale) == *of)),
                up_bias: allocator.numbers(&layer.up_bias)?,
                sinks: allocator.numbers(&layer.sinks)?,
                expert_biases: match layer.ffn.experts().and_then(|experts| experts.biases.as_ref()) {
                    Some(biases) => [allocator.numbers(&biases.input)?, allocator.numbers(&biases.down)?],
                    None => [none; 2],
                },
                // Beside experts by neuron the host computes it.
                shared: layer
                    .ffn
                    .shared()
                    .filter(|_| !c.neurons_inside())
                    .map(|shared| allocator.expert(&shared.ffn))
                    .transpose()?,
                shared_norms: match layer.ffn.shared().and_then(|shared| shared.norms.as_deref()) {
                    Some(SharedNorms { input, output, experts }) => {
                        Some([allocator.norm(input)?, allocator.norm(output)?, allocator.norm(experts)?])
                    }
                    None => None,
                },
            })
        };
        let layers = model.layers.iter().enumerate().map(layer).collect::<Result<_, _>>()?;
        let (out_norm, head) = (allocator.norm(&model.out_norm)?, allocator.linear(&model.head, &[])?);
        let zeros = match c.norms_outputs() {
            true => [allocator.numbers(&vec![0.0; c.hidden])?, none],
            false => [none; 2],
        };
        let rotations = rotations.into_iter().map(|(frequencies, scale)| (frequencies.to_vec(), scale)).collect();
        Ok(Weights { layers, out_norm, head, plain: [none; 2], zeros, rotations })
    }
}

/// Whether the matrices of layer `l` of `layers` are copied, if those of `streamed` layers are: evenly spread, so that each copy has as much time as
/// the others.
pub fn is_streamed(l: usize, layers: usize, streamed: usize) -> bool {
    (l + 1) * streamed / layers > l * streamed / layers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_layers_are_copied_as_was_asked_and_they_are_evenly_spread() {
        for layers in 1..90 {
            for streamed in 0..=layers {
                let found: Vec<usize> = (0..layers).filter(|&l| is_streamed(l, layers, streamed)).collect();
                assert_eq!(found.len(), streamed);
                let apart = found.windows(2).map(|two| two[1] - two[0]);
                let (least, most) = (apart.clone().min().unwrap_or(1), apart.max().unwrap_or(1));
                assert!(most - least <= 1, "{streamed} of {layers}: {found:?}");
            }
        }
    }
}
