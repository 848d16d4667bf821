//! How activations become int8.

use crate::formats::rounding::codes;
pub use crate::formats::rounding::top;
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

/// A group of 32 numbers as codes of so many bits; those beyond the largest code times `step` become that.
pub fn round_by(group: &[f32], step: f32, bits: Bits) -> [i8; GROUP] {
    codes(group, step, |v| v.clamp(-bits.most(), bits.most()))
}

/// The sum of some codes.
pub fn sum(codes: &[i8]) -> f32 {
    codes.iter().map(|&code| i32::from(code)).sum::<i32>() as f32
}
