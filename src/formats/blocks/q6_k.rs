//! Q6_K: 256 numbers as `low 4 bits u8[128] | high 2 bits u8[64] | scales i8[16] | d f16`; each group of 16 has a scale of 8 bits.

use super::fit::Weighted;
use super::groups::Signed;
use super::levels::Whole;
use super::{Block, BlockType, f16_at, put_f16};

const ENDS: [f32; 10] = [-32.0, -33.0, -34.0, -31.0, -30.0, 31.0, 32.0, 33.0, 30.0, 29.0];

/// The type.
#[allow(non_camel_case_types)]
pub struct Q6_K;

impl Block for Q6_K {
    const TYPE: BlockType = BlockType::Q6_K;
    const GGML: u32 = 14;
    const NAME: &'static str = "q6_k";
    const NUMBERS: usize = 256;
    const BYTES: usize = 210;
    const SCALES: &'static [usize] = &[208];

    fn decode(src: &[u8], out: &mut [f32]) {
        let d = f16_at(src, 208);
        let scale = |i: usize| d * f32::from(src[192 + i] as i8);
        for (part, out) in out.chunks_exact_mut(128).enumerate() {
            let low = &src[64 * part..64 * part + 64];
            let top = &src[128 + 32 * part..128 + 32 * part + 32];
            // Four runs of 32 numbers share the 32 bytes of `top`, two bits each; every 16 numbers have a scale.
            for (run, out) in out.chunks_exact_mut(32).enumerate() {
                let low = &low[32 * (run % 2)..32 * (run % 2) + 32];
                let (low_shift, top_shift) = (4 * (run / 2), 2 * run);
                for (half, out) in out.chunks_exact_mut(16).enumerate() {
                    let scale = scale(8 * part + 2 * run + half);
                    let (low, top) = (&low[16 * half..16 * half + 16], &top[16 * half..16 * half + 16]);
                    for ((x, &low), &top) in out.iter_mut().zip(low).zip(top) {
                        let q = low >> low_shift & 15 | (top >> top_shift & 3) << 4;
                        *x = scale * f32::from(q as i8 - 32);
                    }
                }
            }
        }
    }

    fn encode(numbers: Weighted, block: &mut [u8]) {
        let fitted = Signed::<16>::fit::<Whole<-32, 31>, Whole<-128, 127>>(numbers, &ENDS, -128.0);
        block[..192].fill(0);
        for (part, codes) in fitted.codes.chunks_exact(128).enumerate() {
            for (run, codes) in codes.chunks_exact(32).enumerate() {
                let (low, top) = (64 * part + 32 * (run % 2), 128 + 32 * part);
                for (i, code) in codes.iter().enumerate() {
                    block[low + i] |= (code & 15) << (4 * (run / 2));
                    block[top + i] |= code >> 4 << (2 * run);
                }
            }
        }
        // Counted from 0 they become signed bytes.
        block[192..208].iter_mut().zip(fitted.scales).for_each(|(byte, scale)| *byte = scale.wrapping_sub(128));
        put_f16(block, 208, fitted.d);
    }
}
