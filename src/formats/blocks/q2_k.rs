//! Q2_K: 256 numbers as `scales u8[16] | q u8[64] | d f16 | dmin f16`; each group of 16 has a scale (low half of its byte) and a
//! minimum (high half) of 4 bits.

use super::{Block, BlockType, f16_at};

/// The type.
#[allow(non_camel_case_types)]
pub struct Q2_K;

impl Block for Q2_K {
    const TYPE: BlockType = BlockType::Q2_K;
    const GGML: u32 = 10;
    const NAME: &'static str = "q2_k";
    const NUMBERS: usize = 256;
    const BYTES: usize = 84;
    const SCALES: &'static [usize] = &[80, 82];

    fn decode(src: &[u8], out: &mut [f32]) {
        let (d, dmin) = (f16_at(src, 80), f16_at(src, 82));
        for (group, (out, packed)) in out.chunks_exact_mut(16).zip(&src[..16]).enumerate() {
            let (scale, min) = (d * f32::from(packed & 15), dmin * f32::from(packed >> 4));
            // Four runs of 32 numbers share 32 bytes, two bits each; a group is half a run.
            let (at, shift) = (16 + group / 8 * 32 + group % 2 * 16, group % 8 / 2 * 2);
            for (x, q) in out.iter_mut().zip(&src[at..at + 16]) {
                *x = scale * f32::from(q >> shift & 3) - min;
            }
        }
    }
}
