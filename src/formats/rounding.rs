//! Numbers as whole steps: the one way in which inputs of kernels, and keys and values, become small codes.

use super::rows::GROUP;

/// The largest magnitude.
pub fn top(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |m, v| m.max(v.abs()))
}

/// The codes of a group, of its numbers in steps as `within` leaves them, rounded to nearest; of a step of 0 they are 0. Of a step so small
/// that its inverse is infinite only the low byte of the difference below is a code: 0, as a device has it.
pub fn codes(group: &[f32], step: f32, within: impl Fn(f32) -> f32) -> [i8; GROUP] {
    let inverse = if step.abs() > 0.0 { 1.0 / step } else { 0.0 };
    let mut rounded = [0i8; GROUP];
    for (code, v) in rounded.iter_mut().zip(group) {
        // Round to nearest by the addition that pushes the fraction out of an f32: it vectorises.
        const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23
        *code = ((within(v * inverse) + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32) as i8;
    }
    rounded
}
