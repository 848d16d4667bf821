//! Q2_K: 256 numbers as `scales u8[16] | q u8[64] | d f16 | dmin f16`; each group of 16 has a scale (low half of its byte) and a
//! minimum (high half) of 4 bits.

use super::fit::Weighted;
use super::groups::WithMins;
use super::{Block, BlockType, f16_at, put_f16};

const ENDS: [f32; 7] = [2.3, 2.6, 3.0, 3.3, 3.6, 4.0, 4.5];

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

    fn encode(numbers: Weighted, block: &mut [u8]) {
        let fitted = WithMins::<16>::fit::<3, 15>(numbers, &ENDS);
        block.fill(0);
        for ((byte, scale), min) in block.iter_mut().zip(fitted.scales).zip(fitted.mins) {
            *byte = scale | min << 4;
        }
        for (run, codes) in fitted.codes.chunks_exact(32).enumerate() {
            for (i, code) in codes.iter().enumerate() {
                block[16 + run / 4 * 32 + i] |= code << (run % 4 * 2);
            }
        }
        put_f16(block, 80, fitted.d);
        put_f16(block, 82, fitted.dmin);
    }
}
