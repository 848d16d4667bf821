//! Q3_K: 256 numbers as `third bits u8[32] | q u8[64] | scales u8[12] | d f16`; each group of 16 has a scale of 6 bits, where v means
//! v - 32. A number is its two bits, less 4 where its third bit is clear.

use super::{Block, BlockType, f16_at};

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
