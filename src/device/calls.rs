//! The kernels that a device has, as plain data: shapes and where the operands lie.
//!
//! Weights are rows of `formats::rows`, one after the other; everything else is f32 or u32 without gaps. `n` is columns: 1 to
//! [`MAX_COLUMNS`](crate::cpu::MAX_COLUMNS) where there are masks of columns ([`Select`], [`SparseFfn`]) or sums that are split
//! ([`Attend`], [`SignScores`]), else as many as a chunk of a prompt has. No two operands of a call overlap unless it says so.

use super::Buffer;
use crate::formats::rows::Quant;
use crate::model::config::{Activation, Ffn, Norm as NormKind};

/// No neuron: an entry of `gpu_bucket` whose slot is free or being filled, or of a neuron's place where it has none.
pub const NONE: u32 = u32::MAX;

/// A place in a buffer, `at` bytes behind its beginning, a multiple of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    pub buffer: Buffer,
    pub at: u64,
}

impl From<Buffer> for View {
    fn from(buffer: Buffer) -> View {
        View { buffer, at: 0 }
    }
}

/// out = norm(x) of each column: RMS or layer norm, with weights.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    pub kind: NormKind,
    pub hidden: usize,
    pub n: usize,
    /// `[hidden]`, or a buffer of no bytes for ones.
    pub weight: Buffer,
    /// `[hidden]`, or a buffer of no bytes: RMS norms have none.
    pub bias: Buffer,
    /// `[n, hidden]`
    pub x: View,
    /// `[n, hidden]`
    pub out: View,
}

/// out = x weights^T + bias, or out += that.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    pub quant: Quant,
    pub rows: usize,
    pub cols: usize,
    pub n: usize,
    /// `[rows]` rows of `cols` numbers.
    pub weights: Buffer,
    /// `[rows]`, or a buffer of no bytes.
    pub bias: Buffer,
    /// `[n, cols]`
    pub x: View,
    /// `[n, rows]`
    pub out: View,
    pub then: Then,
}

/// What [`Linear`] does with its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    Store,
    /// Negative sums become zero: the hidden layer of a predictor.
    Relu,
    /// They are added to what `out` has.
    Add,
}

/// Shape of attention, and where keys and values lie.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub heads: usize,
    /// Divides `heads`.
    pub kv_heads: usize,
    pub head_dim: usize,
    pub layers: usize,
    /// Positions of a timeline that there is room for.
    pub context: usize,
    /// f16 `[timelines, layers, 2 (keys, values), kv_heads, context, head_dim]`
    pub cache: Buffer,
}

impl Heads {
    pub const fn q_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    pub const fn qkv_dim(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Numbers of a timeline in the cache.
    pub const fn timeline(&self) -> usize {
        self.layers * 2 * self.kv_heads * self.context * self.head_dim
    }

    /// Where the keys of kv head `head` begin, or the values of `head - kv_heads`: numbers from the beginning of the cache.
    pub const fn start(&self, timeline: usize, layer: usize, head: usize) -> usize {
        timeline * self.timeline() + (layer * 2 * self.kv_heads + head) * self.context * self.head_dim
    }
}

/// Rotates queries and keys in place and puts keys and values into the cache.
#[derive(Clone, Copy, Debug)]
pub struct Append {
    pub heads: Heads,
    pub layer: usize,
    pub n: usize,
    /// `[n, qkv_dim]`: q, k, v.
    pub qkv: View,
    /// `[n, head_dim / 2, 2]` cosine and sine of the pair (i, i + head_dim / 2) of every head, or a buffer of no bytes: nothing is
    /// rotated.
    pub angles: Buffer,
    /// `[n, 2]` u32: timeline and position of each column.
    pub places: View,
}

/// out = attention of each column's queries over its own timeline, itself included.
#[derive(Clone, Copy, Debug)]
pub struct Attend {
    pub heads: Heads,
    pub layer: usize,
    pub n: usize,
    /// Positions back that are seen, if there is such a limit.
    pub window: Option<usize>,
    /// Positions that some column sees at most: what a launch is sized by.
    pub most: usize,
    /// `[n, qkv_dim]`, q first, rotated.
    pub qkv: View,
    /// As in [`Append`].
    pub places: View,
    /// `[n, q_dim]`
    pub out: View,
}

/// scores = (matching - differing signs) / hidden of each neuron's bits and each column (SparseInfer IV).
#[derive(Clone, Copy, Debug)]
pub struct SignScores {
    pub hidden: usize,
    pub ffn: usize,
    pub n: usize,
    /// `[ffn, cpu::sign::lines(hidden)]` lines of 64 bytes: bit i is 1 where number i of the row is negative.
    pub bits: Buffer,
    /// `[n, hidden]`, normalised. Zero counts as positive, whatever its sign bit.
    pub x: View,
    /// `[n, ffn]`
    pub scores: View,
}

/// masks[i] = bit b where scores[b][i] >= the least score for a neuron that lies where i lies.
#[derive(Clone, Copy, Debug)]
pub struct Select {
    pub ffn: usize,
    pub n: usize,
    pub slots: usize,
    /// Of a neuron elsewhere, and of one in a slot.
    pub least: [f32; 2],
    /// `gpu_bucket`, `[slots]` u32.
    pub bucket: Buffer,
    /// `[n, ffn]`
    pub scores: View,
    /// `[ffn]` u32
    pub masks: View,
}

/// The resident half of one layer's FFN for n tokens (DynamicInfer C.2): for every slot whose neuron some token wants, gate,
/// then up and down where the gate lets it through.
#[derive(Clone, Copy, Debug)]
pub struct SparseFfn {
    pub quant: Quant,
    pub kind: Ffn,
    pub activation: Activation,
    /// A neuron is active when |act(gate)| is above this (plain FFNs: |act(up)|).
    pub cut: f32,
    pub hidden: usize,
    pub ffn: usize,
    pub slots: usize,
    /// Columns, 1 to 32.
    pub n: usize,
    /// `[slots]` neuron blocks: the rows of each (`formats::rows`), one after the other.
    pub blocks: Buffer,
    /// `gpu_bucket`, `[slots]` u32: the neuron in each slot, or [`NONE`].
    pub bucket: Buffer,
    /// `[ffn]` f32, the bias of up; a buffer of no bytes where there is none.
    pub up_bias: Buffer,
    /// Normalised input, `[n, hidden]` f32, then `[ffn]` u32 masks: bit b says that column b wants the neuron.
    pub input: Buffer,
    /// Its share of the FFN's output, `[n, hidden]` f32, then one u32: neurons times columns that were active.
    pub output: Buffer,
}

impl SparseFfn {
    pub const fn block_bytes(&self) -> usize {
        self.quant.row_bytes(self.hidden) * if matches!(self.kind, Ffn::Plain) { 2 } else { 3 }
    }

    pub const fn input_bytes(n: usize, hidden: usize, ffn: usize) -> usize {
        (n * hidden + ffn) * 4
    }

    pub const fn output_bytes(n: usize, hidden: usize) -> usize {
        (n * hidden + 1) * 4
    }
}

/// The share of some neuron blocks in one layer's FFN for a chunk of a prompt: whatever lies there is computed for every column
/// (PowerInfer 8.2: long prompts run dense), and in how many columns each neuron was active is counted.
#[derive(Clone, Copy, Debug)]
pub struct DenseFfn {
    pub quant: Quant,
    pub kind: Ffn,
    pub activation: Activation,
    /// Above zero a neuron is active when |act(gate)| is above it (plain FFNs: |act(up)|); else when its product is not zero.
    pub cut: f32,
    pub hidden: usize,
    pub ffn: usize,
    pub slots: usize,
    pub n: usize,
    /// `[slots]` neuron blocks.
    pub blocks: View,
    /// `[slots]` u32: the neuron in each, or [`NONE`].
    pub bucket: View,
    /// `[ffn]` f32, the bias of up; a buffer of no bytes where there is none.
    pub up_bias: Buffer,
    /// Normalised input, `[n, hidden]`.
    pub x: View,
    /// Room for products, `[n, slots]` f32.
    pub products: Buffer,
    /// `[parts, ffn]` u32; of the neurons that are here: in how many columns each was active, as a sum over parts.
    pub counts: Buffer,
    /// `[n, hidden]`, to which the share is added.
    pub out: View,
}

impl DenseFfn {
    pub const fn block_bytes(&self) -> usize {
        self.quant.row_bytes(self.hidden) * if matches!(self.kind, Ffn::Plain) { 2 } else { 3 }
    }

    /// Columns that a part counts: those of a tile of its kernel.
    pub const fn part(quant: Quant) -> usize {
        if quant.is_grouped() { 32 } else { 64 }
    }

    pub const fn parts(quant: Quant, n: usize) -> usize {
        n.div_ceil(DenseFfn::part(quant))
    }
}

/// to += from, `[count]` each.
#[derive(Clone, Copy, Debug)]
pub struct Add {
    pub count: usize,
    pub from: View,
    pub to: View,
}

/// A kernel and its operands.
#[derive(Clone, Copy, Debug)]
pub enum Call {
    Norm(Norm),
    Linear(Linear),
    Append(Append),
    Attend(Attend),
    SignScores(SignScores),
    Select(Select),
    SparseFfn(SparseFfn),
    DenseFfn(DenseFfn),
    Add(Add),
}
