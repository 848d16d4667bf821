//! Blocks are compared with the checksums that they were packed with when they are first read. Once one was right it is right on disk, and
//! is not compared again.

use super::fault::{ReadFault, Unread};
use crate::formats::block_checksums::block_checksum;
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
    /// A bit for each: it was right.
    right: Vec<u64>,
    /// Pieces of each neuron or expert.
    pieces: usize,
}

impl Checksums {
    /// Of layers with these checksums of all their pieces, or none, and so many pieces of each neuron or expert.
    pub fn new(layers: impl Iterator<Item = (Arc<[u32]>, usize)>) -> Checksums {
        let of = |(expected, pieces): (Arc<[u32]>, usize)| OfLayer {
            right: vec![0; expected.len().div_ceil(64)],
            expected,
            pieces,
        };
        Checksums { layers: layers.map(of).collect(), ..Checksums::default() }
    }

    /// The most pieces of a layer that are compared.
    pub fn most(&self) -> usize {
        self.layers.iter().map(|layer| layer.expected.len()).max().unwrap_or(0)
    }

    /// Whether a piece has a checksum that it was not compared with yet.
    #[inline]
    pub fn is_open(&self, layer: usize, piece: usize) -> bool {
        let Some(OfLayer { expected, right, .. }) = self.layers.get(layer) else { return false };
        piece < expected.len() && right[piece / 64] >> (piece % 64) & 1 == 0
    }

    /// Whether what was read has the piece's checksum.
    ///
    /// # Safety
    /// What was read begins at `start`, and nobody writes to it.
    pub unsafe fn is_right(&self, check: Check, start: *const u8) -> bool {
        // SAFETY: the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(start.wrapping_add(check.at), check.bytes) };
        block_checksum(bytes) == self.layers[check.layer].expected[check.piece]
    }

    /// A piece was right: it is not compared again.
    pub fn close(&mut self, check: Check) {
        if self.is_open(check.layer, check.piece) {
            self.layers[check.layer].right[check.piece / 64] |= 1 << (check.piece % 64);
            self.verified += 1;
            self.verified_bytes += check.bytes as u64;
        }
    }

    /// That a piece is wrong for good, of a read from this place in the files on.
    pub fn fault(&self, Check { layer, piece, at, .. }: Check, offset: u64) -> ReadFault {
        let cluster = piece / self.layers[layer].pieces;
        ReadFault { offset: offset + at as u64, why: Unread::Damaged { layer, cluster } }
    }
}
