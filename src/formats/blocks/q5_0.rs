//! Q5_0: 32 numbers as `d f16 | fifth bits u32 | q u8[16]`; as Q4_0 with a bit more, code v means d (v - 16).

use super::{Block, BlockType, f16_at, fifth_bits};

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
}
