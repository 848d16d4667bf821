//! Q8_0: 32 numbers as `d f16 | q i8[32]`, number i is d q[i].

use super::fit::Weighted;
use super::levels::Whole;
use super::{Block, BlockType, f16_at, finite_half, put_f16};
use crate::formats::rounding::{codes, top};

/// What the codes mean. -128 is not used, as by others: some kernels negate codes.
type Codes = Whole<-127, 127>;
const ENDS: [f32; 5] = [127.0, 125.0, 126.0, 128.0, 129.0];

/// The type.
#[allow(non_camel_case_types)]
pub struct Q8_0;

impl Q8_0 {
    /// Encodes whole blocks without a search for their scales: the largest magnitude has code 127 or -127. For what is written for every token.
    pub fn put_nearest(values: &[f32], blocks: &mut [u8]) {
        let (values, _) = values.as_chunks::<{ Q8_0::NUMBERS }>();
        for (values, block) in values.iter().zip(blocks.chunks_exact_mut(Q8_0::BYTES)) {
            let d = finite_half(top(values) / 127.0);
            put_f16(block, 0, d);
            // A small scale may be rounded down by more than half a step of the largest code.
            let codes = codes(values, d.to_f32(), |steps| steps.clamp(-127.0, 127.0));
            block[2..].copy_from_slice(&codes.map(|code| code as u8));
        }
    }
}

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

    fn encode(numbers: Weighted, block: &mut [u8]) {
        let d = finite_half(numbers.scale::<Codes>(&ENDS));
        put_f16(block, 0, d);
        numbers.put_codes::<Codes>(d.to_f32(), 0.0, &mut block[2..]);
        // Counted from 0 they become signed bytes.
        block[2..].iter_mut().for_each(|code| *code = code.wrapping_sub(127));
    }
}
