//! Blocks are compared with the checksums that they were packed with when they are first read. Experts that are read in place have none: their
//! numbers, of quantised blocks the scales, have to be finite. Once one was right it is right on disk, and is not looked at again.

use super::blocks::LayerBlocks;
use super::fault::{ReadFault, Unread};
use crate::formats::block_checksums::block_checksum;
use crate::formats::{DType, blocks};
use std::sync::Arc;

/// A block, or a piece of one, that a read brings and that was not compared yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Check {
    /// Its layer.
    pub layer: usize,
    /// Number of the neuron or expert, times the pieces of each, plus which piece.
    pub piece: usize,
    /// Where it begins in what is read, and its bytes.
    pub at: usize,
    /// See above.
    pub bytes: usize,
}

/// The checksums of all layers, and what was compared.
#[derive(Default)]
pub(super) struct Checksums {
    layers: Vec<OfLayer>,
    /// Pieces that were compared and right, and their bytes.
    pub verified: u64,
    pub verified_bytes: u64,
}

struct OfLayer {
    /// Piece by piece; none where the file has none.
    expected: Arc<[u32]>,
    /// Of each piece of an expert, where there is no checksum.
    types: Arc<[DType]>,
    /// Pieces of the layer that are looked at.
    count: usize,
    /// A bit for each: it was right.
    right: Vec<u64>,
    /// Pieces of each neuron or expert.
    pieces: usize,
}

impl Checksums {
    /// Of these layers of `neurons` neurons or experts each.
    pub fn new(layers: &[LayerBlocks], neurons: usize) -> Checksums {
        let of = |layer: &LayerBlocks| {
            let (expected, types, pieces) = (layer.checksums(), layer.types(), layer.runs().len());
            let count = if types.is_empty() { expected.len() } else { neurons * pieces };
            OfLayer { right: vec![0; count.div_ceil(64)], expected, types, count, pieces }
        };
        Checksums { layers: layers.iter().map(of).collect(), ..Checksums::default() }
    }

    /// The most pieces of a layer that are compared.
    pub fn most(&self) -> usize {
        self.layers.iter().map(|layer| layer.count).max().unwrap_or(0)
    }

    /// Whether a piece has to be looked at and was not yet.
    #[inline]
    pub fn is_open(&self, layer: usize, piece: usize) -> bool {
        let Some(OfLayer { count, right, .. }) = self.layers.get(layer) else { return false };
        piece < *count && right[piece / 64] >> (piece % 64) & 1 == 0
    }

    /// Whether what was read has the piece's checksum, or numbers that are finite.
    ///
    /// # Safety
    /// The data read begins at `start`, and nothing writes to it.
    pub unsafe fn is_right(&self, check: Check, start: *const u8) -> bool {
        // SAFETY: the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(start.wrapping_add(check.at), check.bytes) };
        let OfLayer { expected, types, pieces, .. } = &self.layers[check.layer];
        match expected.get(check.piece) {
            Some(expected) => block_checksum(bytes) == *expected,
            None => blocks::first_fault(types[check.piece % pieces], bytes).is_none(),
        }
    }

    /// A piece was right: it is not compared again.
    pub fn close(&mut self, check: Check) {
        if self.is_open(check.layer, check.piece) {
            let layer = &mut self.layers[check.layer];
            layer.right[check.piece / 64] |= 1 << (check.piece % 64);
            if !layer.expected.is_empty() {
                self.verified += 1;
                self.verified_bytes += check.bytes as u64;
            }
        }
    }

    /// That a piece is wrong for good, of a read from this place in the files on.
    pub fn fault(&self, Check { layer, piece, at, .. }: Check, offset: u64) -> ReadFault {
        let OfLayer { expected, pieces, .. } = &self.layers[layer];
        let cluster = piece / pieces;
        let why = match expected.is_empty() {
            false => Unread::Damaged { layer, cluster },
            true => Unread::NotFinite { layer, cluster },
        };
        ReadFault { offset: offset + at as u64, why }
    }
}
