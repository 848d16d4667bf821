//! IQ4_NL: 32 numbers as `d f16 | q u8[16]`, number j in the low and 16 + j in the high half of byte j; code v means d [`LEVELS`]`[v]`.

use super::fit::Weighted;
use super::levels::{Table, as_floats};
use super::{Block, BlockType, f16_at, halves};

/// What the codes of IQ4_NL and IQ4_XS mean: levels that lie closer together near 0, where most weights are.
pub const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// [`LEVELS`] for the encoders.
pub(super) struct Codes;

impl Table for Codes {
    const LEVELS: [f32; 16] = as_floats(LEVELS);
}

/// Where the number of largest magnitude may stand: at either end, or the ends cut it off.
pub(super) const ENDS: [f32; 13] =
    [-127.0, -121.0, -115.0, -109.0, -133.0, -140.0, -150.0, 113.0, 107.0, 119.0, 125.0, 101.0, 135.0];

/// The type.
#[allow(non_camel_case_types)]
pub struct IQ4_NL;

impl Block for IQ4_NL {
    const TYPE: BlockType = BlockType::IQ4_NL;
    const GGML: u32 = 20;
    const NAME: &'static str = "iq4_nl";
    const NUMBERS: usize = 32;
    const BYTES: usize = 18;
    const SCALES: &'static [usize] = &[0];

    fn decode(src: &[u8], out: &mut [f32]) {
        let d = f16_at(src, 0);
        let (low, high) = out.split_at_mut(16);
        for ((low, high), &q) in low.iter_mut().zip(high).zip(&src[2..]) {
            *low = d * f32::from(LEVELS[usize::from(q & 15)]);
            *high = d * f32::from(LEVELS[usize::from(q >> 4)]);
        }
    }

    fn encode(numbers: Weighted, block: &mut [u8]) {
        halves::encode::<Codes>(numbers, &ENDS, block);
    }
}
