//! Q4_K: 256 numbers as `d f16 | dmin f16 | scales u8[12] | q u8[128]`; each group of 32 has a scale and a minimum of 6 bits.

use super::fit::Weighted;
use super::groups::WithMins;
use super::k_scales::{put_scales_and_mins, scales_and_mins};
use super::{Block, BlockType, f16_at, put_f16};

const ENDS: [f32; 9] = [13.0, 13.5, 14.0, 14.5, 15.0, 15.5, 16.0, 17.0, 18.5];

/// The type.
#[allow(non_camel_case_types)]
pub struct Q4_K;

impl Block for Q4_K {
    const TYPE: BlockType = BlockType::Q4_K;
    const GGML: u32 = 12;
    const NAME: &'static str = "q4_k";
    const NUMBERS: usize = 256;
    const BYTES: usize = 144;
    const SCALES: &'static [usize] = &[0, 2];

    fn decode(src: &[u8], out: &mut [f32]) {
        let (d, dmin) = (f16_at(src, 0), f16_at(src, 2));
        let scales = scales_and_mins(&src[4..16]);
        // 64 numbers share 32 bytes: one group in the low halves, the next in the high ones.
        for (pair, (out, q)) in out.chunks_exact_mut(64).zip(src[16..].chunks_exact(32)).enumerate() {
            let (low, high) = out.split_at_mut(32);
            let ((low_scale, low_min), (high_scale, high_min)) = (scales[2 * pair], scales[2 * pair + 1]);
            let (low_d, low_m) = (d * low_scale, dmin * low_min);
            let (high_d, high_m) = (d * high_scale, dmin * high_min);
            for ((low, high), &q) in low.iter_mut().zip(high).zip(q) {
                *low = low_d * f32::from(q & 15) - low_m;
                *high = high_d * f32::from(q >> 4) - high_m;
            }
        }
    }

    fn encode(numbers: Weighted, block: &mut [u8]) {
        let fitted = WithMins::<8>::fit::<15, 63>(numbers, &ENDS);
        put_f16(block, 0, fitted.d);
        put_f16(block, 2, fitted.dmin);
        put_scales_and_mins(fitted.scales, fitted.mins, &mut block[4..16]);
        for (out, codes) in block[16..].chunks_exact_mut(32).zip(fitted.codes.chunks_exact(64)) {
            let (low, high) = codes.split_at(32);
            for ((byte, low), high) in out.iter_mut().zip(low).zip(high) {
                *byte = low | high << 4;
            }
        }
    }
}
