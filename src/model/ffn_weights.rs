//! The weights of a layer's FFN: neuron by neuron, as the three matrices that were published, or a mixture of experts with three
//! matrices each.

use super::block::{self, BlockLayout, BlockPart};
use super::matrix::Matrix;
use super::norm_weights::NormWeights;
use super::stacked::Stacked;
use crate::formats::rows::{Input, Quant, Rows};
use std::sync::Arc;

/// The weights of an FFN.
#[derive(Clone, Debug)]
pub enum FfnWeights {
    /// Neuron blocks: each neuron can be computed, moved or left out by itself.
    Neurons(NeuronBlocks),
    /// Whole matrices, as a GGUF has them: all of it is computed for every token.
    Matrices(FfnMatrices),
    /// A mixture of experts: those that the router chooses are computed for a token.
    Experts(ExpertWeights),
}

/// The weights of a mixture of experts.
#[derive(Clone, Debug, Default)]
pub struct ExpertWeights {
    /// Its products with a token's input choose the token's experts, `[experts, hidden]`; `None` where all are computed.
    pub router: Option<Matrix>,
    /// The norm of what the router reads, where that is a norm of its own; else without weights.
    pub router_norm: NormWeights,
    /// The experts' weights are multiplied by these, `[experts]`; empty where they are not.
    pub scales: Vec<f32>,
    /// Numbers that are added to the scores for choosing only, `[experts]`; empty where there are none.
    pub selection_bias: Vec<f32>,
    /// Each expert's matrices.
    pub experts: Vec<FfnMatrices>,
    /// The router's biases and theirs; `None` where there are none.
    pub biases: Option<Arc<ExpertBiases>>,
    /// The FFN beside them that every token passes through; `None` where there is none.
    pub shared: Option<SharedExpert>,
}

/// The biases of a mixture.
#[derive(Debug)]
pub struct ExpertBiases {
    /// Of the router's products, `[experts]`.
    pub router: Vec<f32>,
    /// Of gate and up, `[experts, 2 ffn]`: an expert's gates, then its ups.
    pub input: Vec<f32>,
    /// Of down, `[experts, hidden]`.
    pub down: Vec<f32>,
}

impl ExpertBiases {
    /// Bytes of all of them.
    pub fn bytes(&self) -> u64 {
        [&self.router, &self.input, &self.down].map(|of| size_of_val(&of[..]) as u64).iter().sum()
    }

    /// Those of an expert's gates and ups, `[2 ffn]`.
    pub fn input(&self, expert: usize) -> &[f32] {
        let each = self.input.len() / self.router.len();
        &self.input[expert * each..(expert + 1) * each]
    }

    /// Those of an expert's output, `[hidden]`.
    pub fn down(&self, expert: usize) -> &[f32] {
        let each = self.down.len() / self.router.len();
        &self.down[expert * each..(expert + 1) * each]
    }
}

/// The weights of a mixture's shared expert.
#[derive(Clone, Debug)]
pub struct SharedExpert {
    /// Its matrices.
    pub ffn: FfnMatrices,
    /// Its output is multiplied by sigmoid(this . a token's input), `[hidden]`; empty where it is not.
    pub router: Vec<f32>,
    /// Its norms and that of the others' output, where it has its own.
    pub norms: Option<Box<SharedNorms>>,
}

/// The norms of a shared expert that has its own.
#[derive(Clone, Debug)]
pub struct SharedNorms {
    /// Of what it reads, the residual.
    pub input: NormWeights,
    /// Of what it makes.
    pub output: NormWeights,
    /// Of the sum of what the other experts make.
    pub experts: NormWeights,
}

/// The matrices of an FFN.
#[derive(Clone, Debug)]
pub struct FfnMatrices {
    /// Gate and up, `[2 ffn, hidden]`, or up alone.
    pub input: Stacked,
    /// `[hidden, ffn]`, or `[ffn, hidden]` where it is stored by neuron.
    pub down: Matrix,
    /// Whether `down` is stored by neuron: a row is what one neuron adds, and is not read where the neuron does not fire.
    pub down_by_neuron: bool,
}

/// The neuron blocks of a layer, one after the other in memory that they do not own.
#[derive(Clone, Copy, Debug)]
pub struct NeuronBlocks {
    /// What each of them holds, and where.
    pub layout: BlockLayout,
    /// How many there are.
    pub count: usize,
    /// Numbers of a row.
    pub cols: usize,
    start: *const u8,
}

// SAFETY: as for `Matrix`: it points at bytes that are never written and that outlive it.
unsafe impl Send for NeuronBlocks {}
unsafe impl Sync for NeuronBlocks {}

/// So many bytes ahead, or as many as whole blocks make of it, rows are prefetched that are read without the rest of their blocks.
const APART_AHEAD: usize = 8192;

impl NeuronBlocks {
    /// `count` blocks whose first byte is that of `bytes`.
    ///
    /// # Safety
    /// `bytes` begins at a multiple of [`crate::formats::rows::ROW_ALIGN`] and outlives the blocks.
    pub unsafe fn over(bytes: &[u8], layout: BlockLayout, count: usize, cols: usize) -> NeuronBlocks {
        assert!(bytes.len() >= count * layout.bytes());
        NeuronBlocks { layout, count, cols, start: bytes.as_ptr() }
    }

    /// The same blocks in another memory: some from number `first` on lie at `at`, one after the other. Nothing may be read of the others.
    ///
    /// # Safety
    /// The bytes at `at` outlive what is read of these blocks.
    pub unsafe fn placed(self, first: usize, at: *const u8) -> NeuronBlocks {
        NeuronBlocks { start: at.wrapping_sub(first * self.layout.bytes()), ..self }
    }

    /// The same without a single block.
    pub fn without_any(self) -> NeuronBlocks {
        NeuronBlocks { count: 0, ..self }
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        (self.count * self.layout.bytes()) as u64
    }

    /// All bytes of the blocks.
    pub fn all(&self) -> &[u8] {
        // SAFETY: `over` has checked the length.
        unsafe { std::slice::from_raw_parts(self.start, self.count * self.layout.bytes()) }
    }

    /// The first byte of a neuron's block.
    #[inline]
    pub fn ptr(&self, neuron: usize) -> *const u8 {
        debug_assert!(neuron < self.count);
        self.start.wrapping_add(neuron * self.layout.bytes())
    }

    /// One part of the blocks from `neuron` on, a row for each neuron.
    #[inline]
    pub fn part_rows(&self, part: BlockPart, neuron: usize) -> Rows {
        let first = self.ptr(neuron).wrapping_add(part.offset);
        Rows { first, stride: self.layout.bytes(), ahead: part.quant.ahead(part.bytes) }
    }

    /// As [`NeuronBlocks::part_rows`], for reading nothing but them: what is prefetched is a later row, and not what lies between.
    #[inline]
    pub fn rows_apart(&self, part: BlockPart, neuron: usize) -> Rows {
        let stride = self.layout.bytes();
        Rows { ahead: stride * APART_AHEAD.div_ceil(stride), ..self.part_rows(part, neuron) }
    }

    /// What of a neuron's block is multiplied with the input, gate and up or up alone, where both have the same type.
    #[inline]
    pub fn input_rows(&self, neuron: usize) -> Rows {
        let (first, up) = (self.layout.gate_or_up(), self.layout.up());
        debug_assert_eq!((first.quant, first.bytes), (up.quant, up.bytes), "a kernel reads rows of one type");
        Rows { stride: first.bytes, ..self.part_rows(first, neuron) }
    }

    /// One part of a neuron's block, padding included.
    ///
    /// # Panics
    /// If there is no such neuron.
    #[inline]
    pub fn part(&self, part: BlockPart, neuron: usize) -> &[u8] {
        assert!(neuron < self.count);
        // SAFETY: `over` has checked the length; of blocks that were placed the caller reads those that are there.
        unsafe { std::slice::from_raw_parts(self.ptr(neuron).wrapping_add(part.offset), part.bytes) }
    }
}

impl ExpertWeights {
    /// Bytes of the router.
    pub fn router_bytes(&self) -> u64 {
        self.router.as_ref().map_or(0, Matrix::bytes)
    }

    /// What is added to the router's products, `[experts]`; empty where there is nothing.
    pub fn router_bias(&self) -> &[f32] {
        self.biases.as_ref().map_or(&[], |biases| &biases.router)
    }

    /// Bytes of the shared expert's matrices.
    pub fn shared_bytes(&self) -> u64 {
        self.shared.as_ref().map_or(0, |shared| shared.ffn.bytes())
    }

    /// Whether its experts are packed by neuron.
    pub fn by_neuron(&self) -> bool {
        self.experts.first().is_some_and(|expert| expert.down_by_neuron)
    }

    /// An expert like the others, or the shared one where there are no others.
    pub fn any(&self) -> Option<&FfnMatrices> {
        self.experts.first().or(self.shared.as_ref().map(|shared| &shared.ffn))
    }

    /// Neurons of an expert that a router chooses; 0 where there are none.
    pub fn width(&self) -> usize {
        self.experts.first().map_or(0, FfnMatrices::width)
    }

    /// The rows of a neuron of experts that are packed by neuron, as if they lay one after the other: their types and bytes.
    pub fn neuron_layout(&self) -> BlockLayout {
        let first = &self.experts[0];
        let ([gate_or_up, up], down) = (first.input_quants(), first.down.quant);
        match first.input.parts().len() {
            1 => BlockLayout::mixed(&[up, down], first.down.cols),
            _ => BlockLayout::mixed(&[gate_or_up, up, down], first.down.cols),
        }
    }

    /// Why a device cannot compute these experts, of a model of so many numbers a token; `None` if it can.
    pub fn not_on_device(&self, hidden: usize) -> Option<&'static str> {
        let shared = || self.shared.as_ref().and_then(|shared| shared.ffn.not_on_device());
        let Some(first) = self.experts.first() else { return shared() };
        if first.down_by_neuron {
            return block::not_on_device([self.neuron_layout()], hidden);
        }
        let rows = |expert: &FfnMatrices| expert.parts().map(|part| (part.quant, part.row_bytes)).collect::<Vec<_>>();
        if self.experts.iter().any(|expert| rows(expert) != rows(first)) {
            return Some("the types of its experts differ within a layer");
        }
        first.not_on_device().or_else(shared)
    }
}

impl FfnWeights {
    /// The experts, where it is a mixture.
    pub fn experts(&self) -> Option<&ExpertWeights> {
        if let FfnWeights::Experts(experts) = self { Some(experts) } else { None }
    }

    /// The shared expert, where it is a mixture with one.
    pub fn shared(&self) -> Option<&SharedExpert> {
        self.experts()?.shared.as_ref()
    }

    /// Bytes of all weights.
    pub fn bytes(&self) -> u64 {
        match self {
            FfnWeights::Neurons(blocks) => blocks.bytes(),
            FfnWeights::Matrices(matrices) => matrices.bytes(),
            FfnWeights::Experts(weights) => {
                let routed = weights.experts.iter().map(FfnMatrices::bytes).sum::<u64>();
                routed + weights.router_bytes() + weights.shared_bytes()
            }
        }
    }

    /// Bytes of what can be left out by itself: a neuron block, or an expert; of whole matrices all.
    pub fn cluster_bytes(&self) -> u64 {
        match self {
            FfnWeights::Neurons(blocks) => blocks.layout.bytes() as u64,
            FfnWeights::Matrices(matrices) => matrices.bytes(),
            FfnWeights::Experts(ExpertWeights { experts, .. }) => experts.first().map_or(0, FfnMatrices::bytes),
        }
    }

    /// Bytes of what can lie on a device by itself: a neuron, also of experts that are packed by neuron, or another mixture's expert.
    pub fn movable_bytes(&self) -> u64 {
        match self {
            FfnWeights::Experts(weights) if weights.by_neuron() => weights.neuron_layout().bytes() as u64,
            _ => self.cluster_bytes(),
        }
    }

    /// The types of what the FFN's input is multiplied with: gate and up, or up twice.
    pub fn input_quants(&self) -> [Quant; 2] {
        match self {
            FfnWeights::Neurons(NeuronBlocks { layout, .. }) => [layout.gate_or_up().quant, layout.up().quant],
            FfnWeights::Matrices(matrices) => matrices.input_quants(),
            FfnWeights::Experts(weights) => weights.any().map_or([Quant::F32; 2], FfnMatrices::input_quants),
        }
    }

    /// Type and bytes of each part: gate, up, down, or up and down, of each expert, the shared one among them; and the router.
    pub fn bytes_by_type(&self) -> Vec<(Quant, u64)> {
        let of = |matrix: &Matrix| (matrix.quant, matrix.bytes());
        match self {
            FfnWeights::Neurons(NeuronBlocks { layout, count, .. }) => {
                layout.parts().iter().map(|part| (part.quant, (count * part.bytes) as u64)).collect()
            }
            FfnWeights::Matrices(matrices) => matrices.parts().map(of).collect(),
            FfnWeights::Experts(ExpertWeights { router, experts, shared, .. }) => {
                let shared = shared.iter().map(|shared| &shared.ffn);
                experts.iter().chain(shared).flat_map(FfnMatrices::parts).chain(router).map(of).collect()
            }
        }
    }
}

impl FfnMatrices {
    /// Bytes of all of them.
    pub fn bytes(&self) -> u64 {
        self.input.bytes() + self.down.bytes()
    }

    /// All of them: gate, up and down, or up and down.
    pub fn parts(&self) -> impl Iterator<Item = &Matrix> {
        self.input.parts().iter().chain([&self.down])
    }

    /// The same, to be changed for the same ones in another memory.
    pub fn parts_mut(&mut self) -> impl Iterator<Item = &mut Matrix> {
        self.input.parts_mut().iter_mut().chain([&mut self.down])
    }

    /// Why a device cannot compute an expert with these matrices; `None` if it can.
    fn not_on_device(&self) -> Option<&'static str> {
        let unpadded = |part: &Matrix| part.row_bytes == part.quant.number_bytes(part.cols);
        let [gate, up] = self.input_quants().map(|quant| quant.input() == Input::Floats);
        if gate != up {
            Some("its gates take inputs as floats and its ups as int8, or the other way round")
        } else if !self.parts().all(|part| part.cols.is_multiple_of(8) && unpadded(part)) {
            Some("the rows of its experts are no multiple of 8 numbers long")
        } else {
            None
        }
    }

    /// Its neurons.
    pub fn width(&self) -> usize {
        self.input.parts()[0].rows
    }

    /// The types of gate and up, or that of up twice.
    pub fn input_quants(&self) -> [Quant; 2] {
        let parts = self.input.parts();
        [parts[0].quant, parts[parts.len() - 1].quant]
    }
}
