//! MXFP4: 32 numbers as `e u8 | q u8[16]`, number j in the low and 16 + j in the high half of byte j; code v means 2^(e - 127) times a
//! float of 4 bits (OCP Microscaling Formats, sections 5.3.3 and 5.4.1).

use super::{Block, BlockType};

/// Twice what a code means: whole numbers, as ggml has them, with half the scale.
pub const LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// The largest exponent whose largest number, 12 times [`half_scale`], an f32 can hold. The format's own NaN, 255, lies above.
const MAX_EXPONENT: u8 = 252;

/// The type.
#[allow(non_camel_case_types)]
pub struct MXFP4;

impl Block for MXFP4 {
    const TYPE: BlockType = BlockType::MXFP4;
    const GGML: u32 = 39;
    const NAME: &'static str = "mxfp4";
    const NUMBERS: usize = 32;
    const BYTES: usize = 17;
    const SCALES: &'static [usize] = &[];

    fn decode(src: &[u8], out: &mut [f32]) {
        let d = half_scale(src[0]);
        let (low, high) = out.split_at_mut(16);
        for ((low, high), &q) in low.iter_mut().zip(high).zip(&src[1..]) {
            *low = d * f32::from(LEVELS[usize::from(q & 15)]);
            *high = d * f32::from(LEVELS[usize::from(q >> 4)]);
        }
    }

    fn fault(block: &[u8]) -> Option<f32> {
        match block[0] {
            ..=MAX_EXPONENT => None,
            u8::MAX => Some(f32::NAN),
            _ => Some(f32::INFINITY),
        }
    }
}

/// 2^(e - 128), of which the first two are subnormal. For 255 as ggml has it, which knows no NaN here.
pub(super) fn half_scale(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 })
}
