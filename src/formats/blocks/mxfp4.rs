//! MXFP4: 32 numbers as `e u8 | q u8[16]`, number j in the low and 16 + j in the high half of byte j; code v means 2^(e - 127) times a
//! float of 4 bits (OCP Microscaling Formats, sections 5.3.3 and 5.4.1).

use super::fit::Weighted;
use super::levels::{Levels, Table, as_floats};
use super::{Block, BlockType, halves};

/// Twice what a code means: whole numbers, as ggml has them, with half the scale.
pub const LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// The largest exponent whose largest number, 12 times [`half_scale`], an f32 can hold. The format's own NaN, 255, lies above.
const MAX_EXPONENT: u8 = 252;
/// The least exponent that the encoder takes: of those below it [`half_scale`] is subnormal.
const MIN_EXPONENT: u8 = 2;
/// Codes by the order of their levels, with one of the two that mean 0 in the place of both.
const CODES: [u8; 16] = [15, 14, 13, 12, 11, 10, 9, 0, 0, 1, 2, 3, 4, 5, 6, 7];

/// [`LEVELS`] for the encoder, in rising order.
struct Codes;

impl Table for Codes {
    const LEVELS: [f32; 16] = as_floats([-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12]);
}

/// The type.
#[allow(non_camel_case_types)]
pub struct MXFP4;

impl Block for MXFP4 {
    const TYPE: BlockType = BlockType::MXFP4;
    const GGML: u32 = 39;
    const NAME: &'static str = "mxfp4";
    const NUMBERS: usize = 32;
    const BYTES: usize = 17;
    const SCALES: &'static [usize] = &[];

    fn decode(src: &[u8], out: &mut [f32]) {
        let d = half_scale(src[0]);
        let (low, high) = out.split_at_mut(16);
        for ((low, high), &q) in low.iter_mut().zip(high).zip(&src[1..]) {
            *low = d * f32::from(LEVELS[usize::from(q & 15)]);
            *high = d * f32::from(LEVELS[usize::from(q >> 4)]);
        }
    }

    fn encode(numbers: Weighted, block: &mut [u8]) {
        let top = numbers.values.iter().fold(0f32, |top, x| top.max(x.abs()));
        // With the exponent of the largest number less two the largest level is 1.5 times a power of two that is no larger than it.
        let exponent = (top.to_bits() >> 23) as u8;
        let first = exponent.saturating_sub(2).clamp(MIN_EXPONENT, MAX_EXPONENT);
        let mut best = (f32::INFINITY, first);
        for e in [first, (first - 1).max(MIN_EXPONENT), (first + 1).min(MAX_EXPONENT)] {
            // In units of the step, as squares of the largest numbers would be too large.
            let inverse = 1.0 / half_scale(e);
            let [error] = numbers.sums(|x, w| {
                let off = x * inverse - Codes::nearest(x * inverse);
                [w * off * off]
            });
            let unit = half_scale(e) / half_scale(first);
            let error = error * unit * unit;
            if error < best.0 {
                best = (error, e);
            }
        }
        let mut codes = [0; 32];
        numbers.put_codes::<Codes>(half_scale(best.1), 0.0, &mut codes);
        block[0] = best.1;
        halves::put(&codes.map(|place| CODES[usize::from(place)]), &mut block[1..]);
    }

    fn fault(block: &[u8]) -> Option<f32> {
        match block[0] {
            ..=MAX_EXPONENT => None,
            u8::MAX => Some(f32::NAN),
            _ => Some(f32::INFINITY),
        }
    }
}

/// 2^(e - 128), of which the first two are subnormal. For 255 as ggml has it, which knows no NaN here.
pub(super) fn half_scale(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 })
}
