//! Small operations on one token's vector. Free functions on slices; each is far below a microsecond per layer.

use crate::model::config::Norm;
use crate::model::weights::NormWeights;

/// out = norm(x) * weight (+ bias); `[hidden]` each. Without weights, as a layer has them that does not norm, out = x.
pub fn norm(kind: Norm, weights: &NormWeights, x: &[f32], out: &mut [f32]) {
    if weights.weight.is_empty() {
        return out.copy_from_slice(x);
    }
    match kind {
        Norm::Rms(epsilon) => {
            let scale = 1.0 / (sum(x.iter().map(|v| v * v)) / x.len() as f32 + epsilon).sqrt();
            for ((o, v), w) in out.iter_mut().zip(x).zip(&weights.weight) {
                *o = v * scale * w;
            }
        }
        Norm::Layer(epsilon) => {
            let mean = sum(x.iter().copied()) / x.len() as f32;
            let variance = sum(x.iter().map(|v| (v - mean) * (v - mean))) / x.len() as f32;
            let scale = 1.0 / (variance + epsilon).sqrt();
            for (((o, v), w), b) in out.iter_mut().zip(x).zip(&weights.weight).zip(&weights.bias) {
                *o = (v - mean) * scale * w + b;
            }
        }
    }
}

/// x = norm(x) * weight, as [`norm`] does it for RMS norms; `[weights]`.
///
/// # Panics
/// For other norms, which no family has inside attention.
pub fn norm_in_place(kind: Norm, weights: &NormWeights, x: &mut [f32]) {
    let Norm::Rms(epsilon) = kind else { panic!("only RMS norms stand inside attention") };
    let scale = 1.0 / (sum(x.iter().map(|v| v * v)) / x.len() as f32 + epsilon).sqrt();
    x.iter_mut().zip(&weights.weight).for_each(|(v, w)| *v = *v * scale * w);
}

/// The same without weights.
///
/// # Panics
/// As [`norm_in_place`].
pub fn unit_norm(kind: Norm, x: &mut [f32]) {
    let Norm::Rms(epsilon) = kind else { panic!("only RMS norms stand inside attention") };
    let scale = 1.0 / (sum(x.iter().map(|v| v * v)) / x.len() as f32 + epsilon).sqrt();
    x.iter_mut().for_each(|v| *v *= scale);
}

/// x *= y, element by element; both have the same length.
pub fn scale_by(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x *= y);
}

/// Sum in 16 lanes: vectorises, and loses less to rounding than one running sum.
pub fn sum(values: impl ExactSizeIterator<Item = f32>) -> f32 {
    let mut lanes = [0f32; 16];
    for (i, v) in values.enumerate() {
        lanes[i % 16] += v;
    }
    lanes.iter().sum()
}

/// Applies RoPE: rotates the pairs (i, i + head_dim / 2) of every head of `x`, `[heads, head_dim]`, by the angles in `cos_sin`,
/// `[head_dim / 2]`, as [`angles`] makes them.
pub fn rope(x: &mut [f32], head_dim: usize, cos_sin: &[(f32, f32)]) {
    let half = head_dim / 2;
    for head in x.chunks_exact_mut(head_dim) {
        let (low, high) = head.split_at_mut(half);
        for ((a, b), &(cos, sin)) in low.iter_mut().zip(high).zip(cos_sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// The same for the pairs (2i, 2i + 1) of `x`; what has no angles stays as it is.
pub fn rope_neighbours(x: &mut [f32], cos_sin: &[(f32, f32)]) {
    for (pair, &(cos, sin)) in x.as_chunks_mut::<2>().0.iter_mut().zip(cos_sin) {
        *pair = [pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin];
    }
}

/// Cosine and sine of position times frequency, both times `scale`; of a pair without a frequency, which is not rotated and stays as it is,
/// those of no angle.
#[inline]
pub fn angle(position: usize, frequency: f32, scale: f32) -> (f32, f32) {
    if frequency == 0.0 {
        return (1.0, 0.0);
    }
    let (sin, cos) = (position as f32 * frequency).sin_cos();
    (cos * scale, sin * scale)
}

/// Replaces `out` by each pair's [`angle`].
pub fn angles(position: usize, frequencies: &[f32], scale: f32, out: &mut Vec<(f32, f32)>) {
    out.clear();
    out.extend(frequencies.iter().map(|&f| angle(position, f, scale)));
}

/// x += y, element by element; both have the same length.
pub fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
