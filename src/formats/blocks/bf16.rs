//! BF16: the upper half of an f32, one number a block.

use super::fit::Weighted;
use super::{Block, BlockType};
use half::bf16;

/// The type.
#[allow(non_camel_case_types)]
pub struct BF16;

impl Block for BF16 {
    const TYPE: BlockType = BlockType::BF16;
    const GGML: u32 = 30;
    const NAME: &'static str = "bf16";
    const NUMBERS: usize = 1;
    const BYTES: usize = 2;
    const SCALES: &'static [usize] = &[];

    fn decode(src: &[u8], out: &mut [f32]) {
        out[0] = f32::from_bits(u32::from(u16::from_le_bytes([src[0], src[1]])) << 16);
    }

    fn encode(numbers: Weighted, block: &mut [u8]) {
        // Numbers that would round to infinity take the largest finite one.
        let number = numbers.values[0].clamp(bf16::MIN.to_f32_const(), bf16::MAX.to_f32_const());
        block.copy_from_slice(&bf16::from_f32(number).to_le_bytes());
    }

    fn fault(block: &[u8]) -> Option<f32> {
        let mut number = [0.0];
        Self::decode(block, &mut number);
        (!number[0].is_finite()).then_some(number[0])
    }
}
