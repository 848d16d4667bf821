//! Q5_0: 32 numbers as `d f16 | fifth bits u32 | q u8[16]`; as Q4_0 with a bit more, code v means d (v - 16).

use super::fit::Weighted;
use super::levels::Whole;
use super::{Block, BlockType, f16_at, fifth_bits, finite_half, put_f16};

/// What the codes mean.
type Codes = Whole<-16, 15>;
const ENDS: [f32; 8] = [-16.0, -17.0, -15.0, 15.0, 14.0, 16.0, -18.0, 17.0];

/// The type.
#[allow(non_camel_case_types)]
pub struct Q5_0;

impl Block for Q5_0 {
    const TYPE: BlockType = BlockType::Q5_0;
    const GGML: u32 = 6;
    const NAME: &'static str = "q5_0";
    const NUMBERS: usize = 32;
    const BYTES: usize = 22;
    const SCALES: &'static [usize] = &[0];

    fn decode(src: &[u8], out: &mut [f32]) {
        let d = f16_at(src, 0);
        for (x, q) in out.iter_mut().zip(fifth_bits::codes(&src[2..])) {
            *x = f32::from(q as i8 - 16) * d;
        }
    }

    fn encode(numbers: Weighted, block: &mut [u8]) {
        let d = finite_half(numbers.scale::<Codes>(&ENDS));
        let mut codes = [0; 32];
        numbers.put_codes::<Codes>(d.to_f32(), 0.0, &mut codes);
        put_f16(block, 0, d);
        fifth_bits::put(&codes, &mut block[2..]);
    }
}
