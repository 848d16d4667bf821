//! How a neuron block lies in memory.

use super::config::Ffn;
use crate::formats::rows::{Input, Quant};

/// One row of a neuron block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPart {
    /// How its numbers are stored.
    pub quant: Quant,
    /// Bytes from the beginning of the block to that of the row.
    pub offset: usize,
    /// Bytes of the row, padding included.
    pub bytes: usize,
}

impl BlockPart {
    /// The part's bytes in those of a block.
    pub fn of(self, block: &[u8]) -> &[u8] {
        &block[self.offset..self.offset + self.bytes]
    }

    /// The same, to be written to.
    pub fn of_mut(self, block: &mut [u8]) -> &mut [u8] {
        &mut block[self.offset..self.offset + self.bytes]
    }
}

/// Why a device cannot compute neurons of these layouts, one for each layer, with rows of `hidden` numbers; `None` if it can.
pub fn not_on_device(layouts: impl IntoIterator<Item = BlockLayout>, hidden: usize) -> Option<&'static str> {
    layouts.into_iter().find_map(|layout| not_in_a_slot(&layout, hidden))
}

/// Why a device cannot compute neurons of one layer's layout.
fn not_in_a_slot(layout: &BlockLayout, hidden: usize) -> Option<&'static str> {
    let [gate, up] = [layout.gate_or_up(), layout.up()].map(|part| part.quant.input() == Input::Floats);
    let mixed = layout.parts().iter().any(|part| part.quant != layout.parts[0].quant);
    if gate != up {
        Some("its gates take inputs as floats and its ups as int8, or the other way round")
    } else if mixed && !hidden.is_multiple_of(8) {
        Some("the rows of its neurons differ in type and are no multiple of 8 numbers long")
    } else {
        None
    }
}

/// The parts of a layer's neuron blocks, all of which are alike: gate, up and down of a neuron, or up and down where the FFN has no gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    parts: [BlockPart; 3],
    count: usize,
    bytes: usize,
}

impl BlockLayout {
    /// The layout of blocks whose rows have `cols` numbers, all of one type.
    pub fn new(kind: Ffn, quant: Quant, cols: usize) -> BlockLayout {
        BlockLayout::mixed(&[quant; 3][..kind.rows()], cols)
    }

    /// The layout of blocks whose rows have `cols` numbers of these types: gate, up, down, or up and down.
    pub fn mixed(quants: &[Quant], cols: usize) -> BlockLayout {
        let mut offset = 0;
        let parts = std::array::from_fn(|i| {
            let quant = quants[i.min(quants.len() - 1)];
            let part = BlockPart { quant, offset, bytes: quant.row_bytes(cols) };
            offset += if i < quants.len() { part.bytes } else { 0 };
            part
        });
        BlockLayout { parts, count: quants.len(), bytes: offset }
    }

    /// The parts in the order in which they lie, without gaps.
    pub fn parts(&self) -> &[BlockPart] {
        &self.parts[..self.count]
    }

    /// Bytes of a block: from one neuron's to the next one's.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The row whose product the activation function is applied to: gate, or up where there is no gate.
    #[inline]
    pub fn gate_or_up(&self) -> BlockPart {
        self.parts[0]
    }

    /// The row of up.
    #[inline]
    pub fn up(&self) -> BlockPart {
        self.parts[self.count - 2]
    }

    /// The row of down: a column of the published matrix.
    #[inline]
    pub fn down(&self) -> BlockPart {
        self.parts[self.count - 1]
    }
}
