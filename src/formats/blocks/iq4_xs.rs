//! IQ4_XS: 256 numbers as `d f16 | high scale bits u16 | low scale bits u8[4] | q u8[128]`; each group of 32 has a scale of 6 bits,
//! where v means v - 32, and codes as in IQ4_NL.

use super::fit::Weighted;
use super::groups::Signed;
use super::iq4_nl::{Codes, ENDS, LEVELS};
use super::levels::Whole;
use super::{Block, BlockType, f16_at, halves, put_f16};

/// The type.
#[allow(non_camel_case_types)]
pub struct IQ4_XS;

impl Block for IQ4_XS {
    const TYPE: BlockType = BlockType::IQ4_XS;
    const GGML: u32 = 23;
    const NAME: &'static str = "iq4_xs";
    const NUMBERS: usize = 256;
    const BYTES: usize = 136;
    const SCALES: &'static [usize] = &[0];

    fn decode(src: &[u8], out: &mut [f32]) {
        let d = f16_at(src, 0);
        let high = u16::from_le_bytes([src[2], src[3]]);
        for (group, (out, q)) in out.chunks_exact_mut(32).zip(src[8..].chunks_exact(16)).enumerate() {
            let low = src[4 + group / 2] >> (group % 2 * 4) & 15;
            let scale = d * f32::from((low | ((high >> (2 * group) & 3) << 4) as u8) as i8 - 32);
            let (low, high) = out.split_at_mut(16);
            for ((low, high), &q) in low.iter_mut().zip(high).zip(q) {
                *low = scale * f32::from(LEVELS[usize::from(q & 15)]);
                *high = scale * f32::from(LEVELS[usize::from(q >> 4)]);
            }
        }
    }

    fn encode(numbers: Weighted, block: &mut [u8]) {
        let fitted = Signed::<8>::fit::<Codes, Whole<-32, 31>>(numbers, &ENDS, -32.0);
        put_f16(block, 0, fitted.d);
        let high = fitted.scales.iter().rev().fold(0u16, |bits, scale| bits << 2 | u16::from(scale >> 4));
        block[2..4].copy_from_slice(&high.to_le_bytes());
        for (byte, pair) in block[4..8].iter_mut().zip(fitted.scales.as_chunks::<2>().0) {
            *byte = pair[0] & 15 | pair[1] << 4;
        }
        for (out, codes) in block[8..].chunks_exact_mut(16).zip(fitted.codes.as_chunks().0) {
            halves::put(codes, out);
        }
    }
}
