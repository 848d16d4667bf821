//! Q5_K: 256 numbers as `d f16 | dmin f16 | scales u8[12] | fifth bits u8[32] | q u8[128]`; as Q4_K with a bit more.

use super::fit::Weighted;
use super::groups::WithMins;
use super::k_scales::{put_scales_and_mins, scales_and_mins};
use super::{Block, BlockType, f16_at, put_f16};

const ENDS: [f32; 7] = [28.0, 29.0, 30.0, 31.0, 32.0, 33.0, 35.0];

/// The type.
#[allow(non_camel_case_types)]
pub struct Q5_K;

impl Block for Q5_K {
    const TYPE: BlockType = BlockType::Q5_K;
    const GGML: u32 = 13;
    const NAME: &'static str = "q5_k";
    const NUMBERS: usize = 256;
    const BYTES: usize = 176;
    const SCALES: &'static [usize] = &[0, 2];

    fn decode(src: &[u8], out: &mut [f32]) {
        let (d, dmin) = (f16_at(src, 0), f16_at(src, 2));
        let scales = scales_and_mins(&src[4..16]);
        let fifth = &src[16..48];
        // As Q4_K; bit g of fifth[i] belongs to number i of group g.
        for (pair, (out, q)) in out.chunks_exact_mut(64).zip(src[48..].chunks_exact(32)).enumerate() {
            let (low, high) = out.split_at_mut(32);
            let ((low_scale, low_min), (high_scale, high_min)) = (scales[2 * pair], scales[2 * pair + 1]);
            let (low_d, low_m) = (d * low_scale, dmin * low_min);
            let (high_d, high_m) = (d * high_scale, dmin * high_min);
            for (((low, high), &q), &fifth) in low.iter_mut().zip(high).zip(q).zip(fifth) {
                let fifth = fifth >> (2 * pair);
                *low = low_d * f32::from(q & 15 | (fifth & 1) << 4) - low_m;
                *high = high_d * f32::from(q >> 4 | (fifth >> 1 & 1) << 4) - high_m;
            }
        }
    }

    fn encode(numbers: Weighted, block: &mut [u8]) {
        let fitted = WithMins::<8>::fit::<31, 63>(numbers, &ENDS);
        put_f16(block, 0, fitted.d);
        put_f16(block, 2, fitted.dmin);
        put_scales_and_mins(fitted.scales, fitted.mins, &mut block[4..16]);
        let (fifth, q) = block[16..].split_at_mut(32);
        fifth.fill(0);
        for (pair, (out, codes)) in q.chunks_exact_mut(32).zip(fitted.codes.chunks_exact(64)).enumerate() {
            let (low, high) = codes.split_at(32);
            for (((byte, fifth), low), high) in out.iter_mut().zip(&mut *fifth).zip(low).zip(high) {
                *byte = low & 15 | high << 4;
                *fifth |= (low >> 4 | high >> 4 << 1) << (2 * pair);
            }
        }
    }
}
