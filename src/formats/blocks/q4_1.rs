//! Q4_1: 32 numbers as `d f16 | m f16 | q u8[16]`, number j in the low and 16 + j in the high half of byte j; code v means d v + m.

use super::fit::Weighted;
use super::levels::Whole;
use super::{Block, BlockType, f16_at, finite_half, halves, put_f16};

/// What the codes mean.
type Codes = Whole<0, 15>;
const ENDS: [f32; 9] = [13.0, 13.5, 14.0, 14.5, 15.0, 15.5, 16.0, 17.0, 18.5];

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

    fn encode(numbers: Weighted, block: &mut [u8]) {
        let (scale, min) = numbers.scale_and_min::<15>(&ENDS, f32::INFINITY);
        let (d, m) = (finite_half(scale), finite_half(min));
        let mut codes = [0; 32];
        numbers.put_codes::<Codes>(d.to_f32(), m.to_f32(), &mut codes);
        put_f16(block, 0, d);
        put_f16(block, 2, m);
        halves::put(&codes, &mut block[4..]);
    }
}
