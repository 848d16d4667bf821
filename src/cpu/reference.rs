//! The scalar truth that kernels are tested against: one obvious loop per operation, in f64.

use super::recurrence::{Gates, LANES};
use crate::formats::rows::{self, Quant};

/// The numbers of an encoded row, `[cols]`.
pub fn numbers(quant: Quant, row: &[u8], cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; cols];
    rows::decode(quant, row, &mut out);
    out
}

/// row · x
pub fn dot(row: &[f32], x: &[f32]) -> f64 {
    row.iter().zip(x).map(|(&w, &x)| w as f64 * x as f64).sum()
}

/// out += a * row
pub fn axpy(a: f32, row: &[f32], out: &mut [f64]) {
    for (o, &w) in out.iter_mut().zip(row) {
        *o += a as f64 * w as f64;
    }
}

/// Sum of `|row[i] * x[i]|`, to which the rounding error of a dot product is proportional.
pub fn dot_scale(row: &[f32], x: &[f32]) -> f64 {
    row.iter().zip(x).map(|(&w, &x)| (w as f64 * x as f64).abs()).sum()
}

/// A rule of linear attention ([`super::recurrence::Recur`]), the delta rule or the other, for number `i` of a head's values: what the state,
/// `[keys, LANES]`, becomes by a token's query, key and value, and the product of the new state and the query.
pub fn state_rule(
    is_delta: bool,
    state: &mut [[f64; LANES]],
    i: usize,
    (query, key, value): (&[f32], &[f32], f32),
    gates: &Gates,
) -> f64 {
    state.iter_mut().for_each(|row| row[i] *= f64::from(gates.decay));
    let had: f64 = state.iter().zip(key).map(|(row, &k)| row[i] * f64::from(k)).sum();
    let added = f64::from(gates.beta) * (f64::from(value) - if is_delta { had } else { 0.0 });
    state.iter_mut().zip(key).for_each(|(row, &k)| row[i] += added * f64::from(k));
    state.iter().zip(query).map(|(row, &q)| row[i] * f64::from(q)).sum()
}
