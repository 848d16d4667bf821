//! Q3_K: 256 numbers as `third bits u8[32] | q u8[64] | scales u8[12] | d f16`; each group of 16 has a scale of 6 bits, where v means
//! v - 32. A number is its two bits, less 4 where its third bit is clear.

use super::fit::Weighted;
use super::groups::Signed;
use super::levels::Whole;
use super::{Block, BlockType, f16_at, put_f16};

const ENDS: [f32; 13] = [-4.0, -4.3, -4.6, -5.0, -5.5, -3.7, -3.4, -3.0, 3.0, 3.3, 3.6, 4.0, 4.5];

/// The type.
#[allow(non_camel_case_types)]
pub struct Q3_K;

impl Block for Q3_K {
    const TYPE: BlockType = BlockType::Q3_K;
    const GGML: u32 = 11;
    const NAME: &'static str = "q3_k";
    const NUMBERS: usize = 256;
    const BYTES: usize = 110;
    const SCALES: &'static [usize] = &[108];

    fn decode(src: &[u8], out: &mut [f32]) {
        let (d, scales) = (f16_at(src, 108), scales(&src[96..108]));
        for (group, (out, scale)) in out.chunks_exact_mut(16).zip(scales).enumerate() {
            let scale = d * f32::from(scale);
            // Four runs of 32 numbers share 32 bytes of q, two bits each, and all eight runs the 32 bytes of third bits, one bit each.
            let (run, half) = (group / 2, group % 2 * 16);
            let (at, shift) = (32 + run / 4 * 32 + half, run % 4 * 2);
            for ((x, q), third) in out.iter_mut().zip(&src[at..at + 16]).zip(&src[half..half + 16]) {
                let below = if third >> run & 1 == 0 { 4 } else { 0 };
                *x = scale * f32::from((q >> shift & 3) as i8 - below);
            }
        }
    }

    fn encode(numbers: Weighted, block: &mut [u8]) {
        let fitted = Signed::<16>::fit::<Whole<-4, 3>, Whole<-32, 31>>(numbers, &ENDS, -32.0);
        block.fill(0);
        for (run, codes) in fitted.codes.chunks_exact(32).enumerate() {
            for (i, code) in codes.iter().enumerate() {
                block[i] |= code >> 2 << run;
                block[32 + run / 4 * 32 + i] |= (code & 3) << (run % 4 * 2);
            }
        }
        for (i, scale) in fitted.scales.iter().enumerate() {
            block[96 + i % 8] |= (scale & 15) << (i / 8 * 4);
            block[104 + i % 4] |= scale >> 4 << (i / 4 * 2);
        }
        put_f16(block, 108, fitted.d);
    }
}

/// The scales of the 16 groups: the low four bits of groups i and 8 + i stand in byte i, the high two of groups i, 4 + i, 8 + i and
/// 12 + i in byte 8 + i.
fn scales(packed: &[u8]) -> [i8; 16] {
    std::array::from_fn(|i| {
        let low = packed[i % 8] >> (i / 8 * 4) & 15;
        let high = packed[8 + i % 4] >> (i / 4 * 2) & 3;
        (low | high << 4) as i8 - 32
    })
}
