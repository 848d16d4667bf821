//! Q4_0: 32 numbers as `d f16 | q u8[16]`, number j in the low and 16 + j in the high half of byte j; code v means d (v - 8).

use super::fit::Weighted;
use super::levels::Whole;
use super::{Block, BlockType, f16_at, finite_half, halves, put_f16};
use crate::formats::rounding::codes;

/// What the codes mean.
type Codes = Whole<-8, 7>;
const ENDS: [f32; 10] = [-8.0, -8.5, -9.0, -10.0, -11.0, -7.5, 7.0, 7.5, 8.0, 9.0];

/// The type.
#[allow(non_camel_case_types)]
pub struct Q4_0;

impl Q4_0 {
    /// Encodes whole blocks without a search for their scales: the number of the largest magnitude has code 0, which means -8. For what is
    /// written for every token.
    pub fn put_nearest(values: &[f32], blocks: &mut [u8]) {
        let (values, _) = values.as_chunks::<{ Q4_0::NUMBERS }>();
        for (values, block) in values.iter().zip(blocks.chunks_exact_mut(Q4_0::BYTES)) {
            let top = values.iter().fold(0f32, |top, &v| if v.abs() > top.abs() { v } else { top });
            let d = finite_half(top / -8.0);
            put_f16(block, 0, d);
            let codes = codes(values, d.to_f32(), |steps| steps.clamp(-8.0, 7.0)).map(|code| (code + 8) as u8);
            for (i, byte) in block[2..].iter_mut().enumerate() {
                *byte = codes[i] | codes[16 + i] << 4;
            }
        }
    }
}

impl Block for Q4_0 {
    const TYPE: BlockType = BlockType::Q4_0;
    const GGML: u32 = 2;
    const NAME: &'static str = "gguf_q4_0";
    const NUMBERS: usize = 32;
    const BYTES: usize = 18;
    const SCALES: &'static [usize] = &[0];

    fn decode(src: &[u8], out: &mut [f32]) {
        let d = f16_at(src, 0);
        let (low, high) = out.split_at_mut(16);
        for ((low, high), &q) in low.iter_mut().zip(high).zip(&src[2..]) {
            *low = f32::from((q & 15) as i8 - 8) * d;
            *high = f32::from((q >> 4) as i8 - 8) * d;
        }
    }

    fn encode(numbers: Weighted, block: &mut [u8]) {
        halves::encode::<Codes>(numbers, &ENDS, block);
    }
}
