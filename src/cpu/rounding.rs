//! How activations become int8.

use crate::formats::rows::GROUP;

/// How many bits the codes of an input have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bits {
    /// -127 to 127.
    #[default]
    Eight,
    /// -63 to 63: raised by 64 two of them, times any two weights of eight bits, are at most 2 * 127 * 128, which a signed sum of 16 bits holds.
    Seven,
}

impl Bits {
    /// Both.
    pub const ALL: [Bits; 2] = [Bits::Eight, Bits::Seven];

    /// The largest code.
    pub const fn most(self) -> f32 {
        match self {
            Bits::Eight => 127.0,
            Bits::Seven => 63.0,
        }
    }

    /// What is added to codes in [`super::Panels`] so that they have no sign.
    pub const fn raised(self) -> u8 {
        match self {
            Bits::Eight => 128,
            Bits::Seven => 64,
        }
    }
}

/// A group of 32 numbers as codes of -127 to 127 and their step.
pub fn round(group: &[f32]) -> (f32, [i8; GROUP]) {
    round_to(group, Bits::Eight)
}

/// The same as codes of so many bits.
pub fn round_to(group: &[f32], bits: Bits) -> (f32, [i8; GROUP]) {
    let step = top(group) / bits.most();
    (step, codes(group, step, |v| v))
}

/// The largest magnitude.
pub fn top(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |m, v| m.max(v.abs()))
}

/// A group of 32 numbers as codes of so many bits; those beyond the largest code times `step` become that.
pub fn round_by(group: &[f32], step: f32, bits: Bits) -> [i8; GROUP] {
    codes(group, step, |v| v.clamp(-bits.most(), bits.most()))
}

/// The codes of a group, of its numbers in steps as `within` leaves them. Of a step so small that its inverse is infinite only the low byte
/// of the difference below is a code: 0, as a device has it.
fn codes(group: &[f32], step: f32, within: impl Fn(f32) -> f32) -> [i8; GROUP] {
    let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
    let mut rounded = [0i8; GROUP];
    for (code, v) in rounded.iter_mut().zip(group) {
        // Round to nearest by the addition that pushes the fraction out of an f32: it vectorises.
        const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23
        *code = ((within(v * inverse) + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32) as i8;
    }
    rounded
}

/// The sum of some codes.
pub fn sum(codes: &[i8]) -> f32 {
    codes.iter().map(|&code| i32::from(code)).sum::<i32>() as f32
}
