//! Q8_0: 32 numbers as `d f16 | q i8[32]`, number i is d q[i].

use super::{Block, BlockType, f16_at};

/// The type.
#[allow(non_camel_case_types)]
pub struct Q8_0;

impl Block for Q8_0 {
    const TYPE: BlockType = BlockType::Q8_0;
    const GGML: u32 = 8;
    const NAME: &'static str = "gguf_q8_0";
    const NUMBERS: usize = 32;
    const BYTES: usize = 34;
    const SCALES: &'static [usize] = &[0];

    fn decode(src: &[u8], out: &mut [f32]) {
        let d = f16_at(src, 0);
        for (x, &q) in out.iter_mut().zip(&src[2..]) {
            *x = f32::from(q as i8) * d;
        }
    }
}
