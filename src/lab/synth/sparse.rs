//! How often and when a synthetic model's neurons are active.
//!
//! Neuron of rank x (0..1, hottest first) is active for a share p(x) = min(top, c x^-alpha) of tokens: a power law with
//! the wished mean. Tokens and gates share a small latent space, the columns of V, beside a constant direction d:
//!
//! ```text
//! embedding of token t   sqrt(hidden) * (cos * d + sin * V z_t + rest * noise)     |z_t| = 1
//! gate row of neuron i   V u_i - b_i d + noise                                     |u_i| = 1
//! ```
//!
//! So a gate's value is u_i . z_t, which varies from token to token, less a threshold b_i that follows from p(x), plus noise that
//! no low-rank network can predict. All noise is orthogonal to V and d. The constant direction stands in for a gate bias, which
//! llama does not have; without a threshold half of all neurons would be active. Attention and FFN do add to the residual, but so
//! little that the embedding dominates it in all layers; a positive factor, such as the norm's, changes no sign.

use super::noise::{Noise, Stream, dot};
use crate::error::{Error, Result};
use crate::formats::rows::GROUP;
use crate::model::config::{Activation, ModelConfig};

/// Dimensions of the latent space. With the constant direction they are 32, the smallest inner layer that a predictor in
/// rows of q8_0 can have; a latent as wide as this makes thresholds nearly those of the normal distribution.
pub(super) const LATENT: usize = GROUP - 1;
/// Shares of an embedding's squared length: constant direction, latent part, noise. The noise is as large as the other parts, to be
/// realistic; the latent part still decides every gate, because gates are long in its few directions.
const CONSTANT: f64 = 0.3;
const VARYING: f64 = 0.4;
const REST: f64 = 0.3;
/// Exponent of the power law and the share of tokens for which the hottest neurons are active. With a mean of 0.10 they
/// give both statistics of DynamicInfer (section 3): the top 40 % of neurons make 83 % of the activations (about 80 there)
/// and the active sets of two tokens are 0.735 apart in Jaccard distance (0.70 to 0.75 there). One follows from the
/// other: for independent tokens the distance is 1 - q / (2 - q) with q = sum p^2 / sum p.
pub(super) const ALPHA: f64 = 1.06;
const TOP_SHARE: f64 = 0.97;
/// Deviation of the part of a gate's value that a predictor cannot see, as a share of that of the part it can. With it a perfect low-rank
/// network finds 96.5 % of the active neurons by computing 1.05 times as many as there are.
const UNSEEN: f64 = 0.12;
/// How far all layers together move the residual within the latent space, as a share of its length there, and how much they add to it in
/// all, as a share of the embedding's length. The first is small, so that activity in the last layer is still as described.
const DRIFT: f64 = 0.1;
const GROWTH: f64 = 0.5;

/// What makes a model's activations sparse.
pub(super) struct Sparse {
    /// V's columns and then d, orthonormal, `[LATENT + 1, hidden]`.
    basis: Vec<f32>,
    /// Threshold b of each rank, hottest neuron first, `[ffn]`.
    thresholds: Vec<f32>,
    /// Rank of each neuron among those of its FFN or expert, `[layers][experts * ffn]`: hot neurons are spread at random.
    ranks: Vec<Vec<u32>>,
    /// Length of a gate row's noise, where |u_i| = 1.
    gate_noise: f32,
    /// Deviation of the numbers of the output matrix and of `down`.
    pub(super) o_deviation: f32,
    pub(super) down_deviation: f32,
}

impl Sparse {
    /// Refuses a shape that cannot have this share of active neurons.
    pub(super) fn check(c: &ModelConfig, active: f64) -> Result<()> {
        let usage = |why: String| Err(Error::Usage(why));
        if !(0.01..=0.5).contains(&active) {
            return usage(format!("--active {active}: take a share from 0.01 to 0.5"));
        }
        if power(c.activation).is_none() {
            return usage(format!("--active needs --activation relu or relu2, not {}", c.activation));
        }
        if c.hidden < 2 * GROUP || !c.hidden.is_multiple_of(GROUP) {
            let why = format!("--active needs a --hidden of at least {}, a multiple of {GROUP}", 2 * GROUP);
            return usage(format!("{why}; it is {}", c.hidden));
        }
        Ok(())
    }

    /// The latent space, thresholds and ranks for a shape that was checked.
    pub(super) fn new(c: &ModelConfig, noise: Noise, active: f64) -> Sparse {
        let power = power(c.activation).expect("the activation was checked");
        let (hidden, layers) = (c.hidden as f64, c.layers().len() as f64);
        let latent = LATENT as f64;
        let shares = shares(c.widest_ffn(), active, ALPHA);
        let sphere = Sphere::new();
        // The deviation of a gate's value over tokens is that of its latent part times this.
        let spread = (1.0 + UNSEEN * UNSEEN).sqrt();
        let limits: Vec<f64> = shares.iter().map(|&p| spread * sphere.exceeded_by(p)).collect();
        // cos * b = sin * limit / sqrt(LATENT)
        let thresholds = limits.iter().map(|t| (t * (VARYING / CONSTANT / latent).sqrt()) as f32).collect();
        let ranks = (0..c.layers().len())
            .map(|l| {
                let of_expert = |expert| {
                    let mut rng = noise.rng(Stream::Ranks, l, expert, 0);
                    let mut ranks: Vec<u32> = (0..c.widest_ffn() as u32).collect();
                    (1..ranks.len()).rev().for_each(|i| ranks.swap(i, rng.below(i as u64 + 1) as usize));
                    ranks
                };
                (0..c.experts(l).map_or(1, |experts| experts.count)).flat_map(of_expert).collect()
            })
            .collect();
        // A random direction has a share of LATENT / hidden of its squared length in the latent space.
        let growth = GROWTH.min(DRIFT * (VARYING * hidden / latent).sqrt());
        let added = growth / (2.0 * layers).sqrt();
        // Deviation of a gate's latent part where the residual's numbers have deviation 1, and length of its noise.
        let gate = (hidden * VARYING / latent).sqrt();
        let gate_noise = UNSEEN * gate / (REST + growth * growth / 2.0).sqrt();
        let gate = gate / (1.0 + gate_noise * gate_noise).sqrt();
        let activations = c.widest_ffn() as f64 * gate.powi(power) * sphere.moment(&limits, power);
        Sparse {
            basis: basis(c.hidden, noise),
            thresholds,
            ranks,
            gate_noise: gate_noise as f32,
            o_deviation: (added / (c.mixer(0).cols() as f64).sqrt()) as f32,
            down_deviation: (added / activations.sqrt()) as f32,
        }
    }

    /// V's columns and then d, `[LATENT + 1, hidden]`, orthonormal.
    pub(super) fn basis(&self) -> std::slice::ChunksExact<'_, f32> {
        self.basis.chunks_exact(self.basis.len() / (LATENT + 1))
    }

    fn constant(&self) -> &[f32] {
        self.basis().last().expect("it is not empty")
    }

    pub(super) fn embedding(&self, noise: Noise, token: usize, out: &mut [f32]) {
        let length = (out.len() as f64).sqrt();
        noise.fill(Stream::Embed, 0, token, 0, REST.sqrt() as f32, out);
        self.remove_basis(out);
        let latent = latent(noise, Stream::TokenLatent, 0, token);
        self.add((length * VARYING.sqrt()) as f32, &latent, (length * CONSTANT.sqrt()) as f32, out);
    }

    pub(super) fn gate(&self, noise: Noise, layer: usize, neuron: usize, out: &mut [f32]) {
        // As long as a row of the other matrices: about 1.
        let length = 1.0 / (1.0 + self.gate_noise * self.gate_noise).sqrt();
        let deviation = length * self.gate_noise / (out.len() as f32).sqrt();
        noise.fill(Stream::Gate, layer, neuron, 0, deviation, out);
        self.remove_basis(out);
        let latent = latent(noise, Stream::NeuronLatent, layer, neuron);
        let threshold = self.thresholds[self.ranks[layer][neuron] as usize];
        self.add(length, &latent, -length * threshold, out);
    }

    /// A row of a router, which sees what gates do not: which experts a token has says nothing about their neurons, and all experts are as
    /// frequent as any.
    pub(super) fn router(&self, noise: Noise, layer: usize, expert: usize, out: &mut [f32]) {
        noise.fill(Stream::Router, layer, expert, 0, 1.0 / (out.len() as f32).sqrt(), out);
        self.remove_basis(out);
    }

    /// A row of the head, without the constant direction, which would make the same token likeliest everywhere.
    pub(super) fn head(&self, noise: Noise, token: usize, out: &mut [f32]) {
        noise.fill(Stream::Head, 0, token, 0, 1.0 / (out.len() as f32).sqrt(), out);
        remove(self.constant(), out);
    }

    /// out += scale * V latent + constant * d
    fn add(&self, scale: f32, latent: &[f32; LATENT], constant: f32, out: &mut [f32]) {
        let factors = latent.iter().map(|z| z * scale).chain([constant]);
        for (factor, direction) in factors.zip(self.basis()) {
            out.iter_mut().zip(direction).for_each(|(o, d)| *o += factor * d);
        }
    }

    fn remove_basis(&self, out: &mut [f32]) {
        self.basis().for_each(|direction| remove(direction, out));
    }
}

/// Exponent of a positive input in the squared activation, which its mean square needs. `None` for functions that are not zero below zero
/// or do not begin at zero.
fn power(activation: Activation) -> Option<i32> {
    match activation {
        Activation::Relu => Some(2),
        Activation::Relu2 => Some(4),
        _ => None,
    }
}

/// out -= (out . direction) direction
fn remove(direction: &[f32], out: &mut [f32]) {
    let along = dot(direction, out);
    out.iter_mut().zip(direction).for_each(|(o, d)| *o -= along * d);
}

/// Random directions, each made orthogonal to those before it (modified Gram-Schmidt), `[LATENT + 1, hidden]`.
fn basis(hidden: usize, noise: Noise) -> Vec<f32> {
    let mut basis = vec![0.0; (LATENT + 1) * hidden];
    for k in 0..=LATENT {
        let (before, rest) = basis.split_at_mut(k * hidden);
        let own = &mut rest[..hidden];
        noise.fill(Stream::Basis, 0, k, 0, 1.0, own);
        before.chunks_exact(hidden).for_each(|direction| remove(direction, own));
        let length = dot(own, own).sqrt();
        own.iter_mut().for_each(|v| *v /= length);
    }
    basis
}

/// A random direction of the latent space, of length 1. Its numbers are sums of twelve uniform ones: as good as normal
/// ones here, and the same on every machine, which logarithms are not.
fn latent(noise: Noise, stream: Stream, layer: usize, r: usize) -> [f32; LATENT] {
    let mut rng = noise.rng(stream, layer, r, 0);
    let raw: [f64; LATENT] = std::array::from_fn(|_| (0..12).map(|_| rng.next_f64()).sum::<f64>() - 6.0);
    let length = raw.iter().map(|v| v * v).sum::<f64>().sqrt();
    raw.map(|v| (v / length) as f32)
}

/// For which share of tokens the neuron of each rank is active; the mean is `active`.
pub(super) fn shares(ffn: usize, active: f64, exponent: f64) -> Vec<f64> {
    let law = |c: f64| (0..ffn).map(move |i| (c * ((i as f64 + 0.5) / ffn as f64).powf(-exponent)).min(TOP_SHARE));
    let (mut low, mut high) = (0.0, 1.0);
    // The mean rises with c; sixty halvings exhaust an f64.
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        let mean = law(middle).sum::<f64>() / ffn as f64;
        if mean < active { low = middle } else { high = middle }
    }
    law(high).collect()
}

/// One coordinate of a random point on the sphere of the latent space, times sqrt(LATENT): deviation 1 and nearly normal.
pub(super) struct Sphere {
    /// Values and their probabilities, in rising order of the values.
    points: Vec<(f64, f64)>,
}

impl Sphere {
    /// Some thousand points keep a share of 0.01 true to a fraction of a percent.
    const POINTS: usize = 4096;

    pub(super) fn new() -> Sphere {
        let place = |i: usize| (i as f64 + 0.5) / Sphere::POINTS as f64 * 2.0 - 1.0;
        let density = |x: f64| (1.0 - x * x).powf((LATENT as f64 - 3.0) / 2.0);
        let all: f64 = (0..Sphere::POINTS).map(|i| density(place(i))).sum();
        let scale = (LATENT as f64).sqrt();
        Sphere { points: (0..Sphere::POINTS).map(|i| (place(i) * scale, density(place(i)) / all)).collect() }
    }

    /// The value that a share `p` of the points exceeds.
    pub(super) fn exceeded_by(&self, p: f64) -> f64 {
        let mut above = 0.0;
        let point = self.points.iter().rev().find(|(_, weight)| {
            above += weight;
            above >= p
        });
        point.map_or(f64::NEG_INFINITY, |(place, _)| *place)
    }

    /// Mean over `limits` of the mean of (point - limit)^power over the points, where that is positive.
    fn moment(&self, limits: &[f64], power: i32) -> f64 {
        let mean = |limit: f64| -> f64 {
            let above = self.points.iter().rev().take_while(|(place, _)| *place > limit);
            above.map(|(place, weight)| weight * (place - limit).powi(power)).sum()
        };
        // Neighbours in rank are alike: some hundred of them will do.
        let some = limits.iter().step_by(limits.len().div_ceil(256));
        some.clone().map(|&limit| mean(limit)).sum::<f64>() / some.count() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_law_has_its_mean_and_the_statistics_of_the_paper() {
        let p = shares(5504, 0.10, ALPHA);
        let sum: f64 = p.iter().sum();
        assert!((sum / 5504.0 - 0.10).abs() < 1e-6);
        let top = p[..5504 * 2 / 5].iter().sum::<f64>() / sum;
        assert!((0.78..0.84).contains(&top), "the top 40 % make {top}");
        let q = p.iter().map(|p| p * p).sum::<f64>() / sum;
        let jaccard = 1.0 - q / (2.0 - q);
        assert!((0.70..0.75).contains(&jaccard), "the Jaccard distance is {jaccard}");
        for active in [0.01, 0.3, 0.5] {
            assert!((shares(1000, active, ALPHA).iter().sum::<f64>() / 1000.0 - active).abs() < 1e-6);
        }
    }

    #[test]
    fn the_sphere_is_nearly_normal() {
        let sphere = Sphere::new();
        // The normal distribution's own, for comparison: 0, 1.2816, 2.0537, and 0.5 for the second moment above 0.
        for (p, near) in [(0.5, 0.0), (0.1, 1.2816), (0.02, 2.0537)] {
            assert!((sphere.exceeded_by(p) - near).abs() < 0.05, "{p}: {}", sphere.exceeded_by(p));
        }
        assert!((sphere.moment(&[0.0], 2) - 0.5).abs() < 1e-3);
    }
}
