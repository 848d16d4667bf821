//! Choice of the method by which neuron blocks are moved to the device: the fastest by what was measured on the machine.
//! (DynamicInfer E.2.1 moves contiguous blocks together.)

pub use crate::formats::machine_profile::{MoveMethod, MoveRate};

/// A neuron block in host memory and the slot that it is to be copied to.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// The block's first byte.
    pub from: *const u8,
    /// Number of the slot, in blocks from the beginning of the buffer.
    pub slot: u32,
}

// SAFETY: only the owner of the device uses the pointer, by the promise of the caller that asked for the move.
unsafe impl Send for Block {}

/// How many blocks at the front of `blocks`, of `bytes` bytes each, follow each other both in host memory and in slots, so that one copy
/// takes them all.
pub fn run(blocks: &[Block], bytes: usize) -> usize {
    let follows = |two: &[Block]| {
        two[1].slot == two[0].slot.wrapping_add(1) && two[1].from as usize == two[0].from as usize + bytes
    };
    blocks.windows(2).take_while(|two| follows(two)).count() + usize::from(!blocks.is_empty())
}

/// The method that is fastest by `rates` for `blocks` blocks in `runs` runs of neighbours, `bytes` together;
/// [`MoveMethod::Batched`] where there are no rates.
pub fn fastest(rates: &[MoveRate], blocks: usize, runs: usize, bytes: u64) -> MoveMethod {
    let us = |rate: &MoveRate| match rate.method {
        MoveMethod::Batched => rate.us(runs, bytes),
        MoveMethod::Single | MoveMethod::Gather => rate.us(blocks, bytes),
    };
    let best = rates.iter().min_by(|a, b| us(a).total_cmp(&us(b)));
    best.map_or(MoveMethod::Batched, |rate| rate.method)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn rate(method: MoveMethod, group_us: f64, piece_us: f64, gb_s: f64) -> MoveRate {
        MoveRate { method, group_us, piece_us, gb_s }
    }

    #[test]
    fn runs_are_neighbours_on_both_sides() {
        let host = [0u8; 64];
        let block = |at: usize, slot: u32| Block { from: host[at * 8..].as_ptr(), slot };
        assert_eq!(run(&[], 8), 0);
        assert_eq!(run(&[block(0, 5)], 8), 1);
        assert_eq!(run(&[block(0, 5), block(1, 6), block(2, 7), block(4, 8)], 8), 3);
        assert_eq!(run(&[block(0, 5), block(1, 7)], 8), 1);
        assert_eq!(run(&[block(1, 5), block(0, 6)], 8), 1);
    }

    #[test]
    fn the_number_of_blocks_decides() {
        let rates = [
            rate(MoveMethod::Single, 0.0, 2.0, 25.0),
            rate(MoveMethod::Batched, 3.0, 1.0, 25.0),
            rate(MoveMethod::Gather, 12.0, 0.1, 20.0),
        ];
        let by = |blocks: usize, runs: usize| fastest(&rates, blocks, runs, blocks as u64 * 10_000);
        assert_eq!((by(1, 1), by(8, 8), by(200, 200)), (MoveMethod::Single, MoveMethod::Batched, MoveMethod::Gather));
        // Neighbours are one copy.
        assert_eq!(by(200, 1), MoveMethod::Batched);
        assert_eq!(fastest(&[], 1, 1, 1), MoveMethod::Batched);
    }
}
