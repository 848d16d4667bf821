//! Q5_1: 32 numbers as `d f16 | m f16 | fifth bits u32 | q u8[16]`; as Q4_1 with a bit more, code v means d v + m.

use super::fit::Weighted;
use super::levels::Whole;
use super::{Block, BlockType, f16_at, fifth_bits, finite_half, put_f16};

/// What the codes mean.
type Codes = Whole<0, 31>;
const ENDS: [f32; 7] = [28.0, 29.0, 30.0, 31.0, 32.0, 33.0, 35.0];

/// The type.
#[allow(non_camel_case_types)]
pub struct Q5_1;

impl Block for Q5_1 {
    const TYPE: BlockType = BlockType::Q5_1;
    const GGML: u32 = 7;
    const NAME: &'static str = "q5_1";
    const NUMBERS: usize = 32;
    const BYTES: usize = 24;
    const SCALES: &'static [usize] = &[0, 2];

    fn decode(src: &[u8], out: &mut [f32]) {
        let (d, m) = (f16_at(src, 0), f16_at(src, 2));
        for (x, q) in out.iter_mut().zip(fifth_bits::codes(&src[4..])) {
            *x = f32::from(q) * d + m;
        }
    }

    fn encode(numbers: Weighted, block: &mut [u8]) {
        let (scale, min) = numbers.scale_and_min::<31>(&ENDS, f32::INFINITY);
        let (d, m) = (finite_half(scale), finite_half(min));
        let mut codes = [0; 32];
        numbers.put_codes::<Codes>(d.to_f32(), m.to_f32(), &mut codes);
        put_f16(block, 0, d);
        put_f16(block, 2, m);
        fifth_bits::put(&codes, &mut block[4..]);
    }
}
