//! Q4_1: 32 numbers as `d f16 | m f16 | q u8[16]`, number j in the low and 16 + j in the high half of byte j; code v means d v + m.

use super::{Block, BlockType, f16_at};

/// The type.
#[allow(non_camel_case_types)]
pub struct Q4_1;

impl Block for Q4_1 {
    const TYPE: BlockType = BlockType::Q4_1;
    const GGML: u32 = 3;
    const NAME: &'static str = "q4_1";
    const NUMBERS: usize = 32;
    const BYTES: usize = 20;
    const SCALES: &'static [usize] = &[0, 2];

    fn decode(src: &[u8], out: &mut [f32]) {
        let (d, m) = (f16_at(src, 0), f16_at(src, 2));
        let (low, high) = out.split_at_mut(16);
        for ((low, high), &q) in low.iter_mut().zip(high).zip(&src[4..]) {
            *low = f32::from(q & 15) * d + m;
            *high = f32::from(q >> 4) * d + m;
        }
    }
}
