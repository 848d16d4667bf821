//! A synthetic activation trace with the statistics that DynamicInfer reports (section 3): the Jaccard distance is 0.70 to 0.75
//! between tokens' active sets and 0.53 to 0.57 between the hot sets of texts.
//!
//! As in `super::sparse` a neuron fires when u . z exceeds a threshold that follows from a power law, where z is a point of a small
//! latent space. Here z is drawn towards a point that belongs to its text or to the text's topic, and there is no model: probabilities are
//! those of a network that knows z up to some noise, and, from layers before, does not know how z moves until the predicted layer.

use super::sparse::{ALPHA, Sphere, shares};
use crate::error::{Error, Result};
use crate::formats::trace_file::{Header, TextInfo, TraceSection, TraceWriter};
use crate::prng::Prng;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Dimensions of the latent space.
const LATENT: usize = 31;
/// Deviation of the part of a gate that no predictor sees, where u . z has deviation 1.
const UNSEEN: f64 = 0.12;
/// How what a look-ahead does not know grows with its layers: with this power. Fitted, with a drift of 0.9, on which share of the active neurons
/// the true gates of SmolLM2-135M and Qwen2.5-Coder-0.5B find from 1, 2, 3 and 4 layers before among as many of the highest as are active
/// (runs/2026-11-27-real-traces: means 0.78, 0.71, 0.67, 0.65), in a trace of configs/traces/real.toml.
const DRIFT_POWER: f64 = 0.59;

/// What trace to make. A file of these settings is a recipe; what it leaves out is as in [`TraceShape::paper`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TraceShape {
    /// Layers of the trace.
    pub layers: usize,
    /// Neurons per layer.
    pub ffn: usize,
    /// Number of texts.
    pub texts: usize,
    /// Number of topics, points in the latent space that texts have in turn; 0 where each text has a point of its own.
    pub topics: usize,
    /// Tokens of each text.
    pub tokens_per_text: usize,
    /// Mean share of neurons that are active for a token, 0 to 1.
    pub active: f64,
    /// How much of a token's z is common to its text: 0 nothing, 1 everything.
    pub locality: f64,
    /// Tokens after which half of what a token's z has of its own is still there; 0 where every token has it anew.
    pub reuse: f64,
    /// Exponent of the power law by which neurons differ in how often they are active: 0 all alike, 1.06 the synthetic models'.
    pub exponent: f64,
    /// Number of layers between an early prediction and its layer.
    pub ahead: usize,
    /// Deviation of what a prediction one layer before its layer takes for u . z and is not; further ahead it is larger.
    pub drift: f64,
    /// Seed of all random numbers.
    pub seed: u64,
}

impl TraceShape {
    /// A small trace with the statistics of the paper's models.
    pub fn paper() -> TraceShape {
        TraceShape {
            layers: 8,
            ffn: 2048,
            texts: 12,
            topics: 0,
            tokens_per_text: 200,
            active: 0.10,
            locality: 0.17,
            reuse: 0.0,
            exponent: ALPHA,
            ahead: 1,
            drift: 0.25,
            seed: 1,
        }
    }
}

impl Default for TraceShape {
    fn default() -> TraceShape {
        TraceShape::paper()
    }
}

impl TraceShape {
    /// That there can be such a trace.
    ///
    /// # Errors
    /// [`Error::Usage`] naming what cannot be.
    pub fn check(&self) -> Result<()> {
        let ranges = [
            ("active", self.active, 0.01, 0.9),
            ("locality", self.locality, 0.0, 1.0),
            ("reuse", self.reuse, 0.0, 1e6),
            ("drift", self.drift, 0.0, 100.0),
            ("exponent", self.exponent, 0.0, 3.0),
        ];
        match ranges.into_iter().find(|(_, value, least, most)| !(*least..=*most).contains(value)) {
            Some((name, value, least, most)) => Err(Error::Usage(format!("{name} {value}: take {least} to {most}"))),
            None if self.ahead == 0 || self.ahead >= self.layers => Err(Error::Usage(format!(
                "{} layers, {} ahead: take 1 ahead or more, and fewer than there are layers",
                self.layers, self.ahead
            ))),
            None => Ok(()),
        }
    }

    /// Deviation of what an early prediction does not know.
    fn unseen_ahead(&self) -> f64 {
        self.drift * (self.ahead as f64).powf(DRIFT_POWER)
    }

    /// Bytes of the trace's file, but for its header.
    pub fn bytes(&self) -> u64 {
        self.header().token_bytes() * (self.texts * self.tokens_per_text) as u64
    }

    fn header(&self) -> Header {
        let text = |i| TextInfo { name: format!("made-up {i}"), tokens: self.tokens_per_text };
        Header {
            fingerprint: String::new(),
            model: "made up".into(),
            layers: self.layers,
            ffn: self.ffn,
            // The block size of a 7B model in f16.
            block_bytes: 3 * 4096 * 2,
            experts_used: None,
            ahead: self.ahead,
            predictor: "made up".into(),
            own_bits: 8,
            ahead_bits: 8,
            thresholds: Vec::new(),
            texts: (0..self.texts).map(text).collect(),
            made: serde_json::to_value(self).expect("plain data"),
            sections: Vec::new(),
        }
    }
}

/// Writes the trace to `path`. `step(done, all)` counts tokens.
///
/// # Errors
/// [`Error::Usage`] for a trace that cannot be; those of `step`; [`Error::Io`] where the file cannot be written.
pub fn write_trace(s: &TraceShape, path: &Path, mut step: impl FnMut(u64, u64) -> Result<()>) -> Result<()> {
    s.check()?;
    let header = s.header();
    let texts = header.texts.clone();
    let all = header.tokens() as u64;
    let writer = TraceWriter::create(path, header)?;
    let sphere = Sphere::new();
    let spread = (1.0 + UNSEEN * UNSEEN).sqrt();
    let thresholds: Vec<f64> =
        shares(s.ffn, s.active, s.exponent).iter().map(|&p| spread * sphere.exceeded_by(p)).collect();
    // Of what an early prediction sees, the share that is u . z: the mean of u . z where so much is seen, and what is left of its deviation.
    let unseen = s.unseen_ahead();
    let known = 1.0 / (1.0 + unseen * unseen);
    let mut prng = Prng::new(s.seed);
    // Directions and thresholds of each layer's neurons, with the hot ones spread at random.
    let neurons: Vec<Vec<([f32; LATENT], f32)>> = (0..s.layers)
        .map(|_| {
            let mut ranks: Vec<usize> = (0..s.ffn).collect();
            (1..s.ffn).rev().for_each(|i| ranks.swap(i, prng.below(i as u64 + 1) as usize));
            ranks.iter().map(|&rank| (point(&mut prng), thresholds[rank] as f32)).collect()
        })
        .collect();
    let words = s.ffn.div_ceil(32);
    let (mut bits, mut own, mut early) = (vec![0u32; words], vec![0u8; s.ffn], vec![0u8; s.ffn]);
    let topics: Vec<[f32; LATENT]> = (0..s.topics).map(|_| point(&mut prng)).collect();
    let stays = if s.reuse > 0.0 { 0.5f64.powf(1.0 / s.reuse) } else { 0.0 };
    let mut token = 0;
    for text in 0..s.texts {
        let home = if topics.is_empty() { point(&mut prng) } else { topics[text % topics.len()] };
        let mut before = None;
        for _ in 0..s.tokens_per_text {
            let new = point(&mut prng);
            let away = before.filter(|_| stays > 0.0).map_or(new, |before| leaning(&before, &new, stays));
            before = Some(away);
            let z = leaning(&home, &away, s.locality);
            for (layer, neurons) in neurons.iter().enumerate() {
                bits.fill(0);
                // What the layers before take for a part of z and is not.
                let moved = point(&mut prng);
                for (n, (u, threshold)) in neurons.iter().enumerate() {
                    let along = |z: &[f32; LATENT]| u.iter().zip(z).map(|(u, z)| u * z).sum::<f32>() as f64;
                    // A point's coordinates have deviation 1 / sqrt(LATENT).
                    let scale = (LATENT as f64).sqrt();
                    let (seen, blurred) = (scale * along(&z), scale * along(&moved) * unseen);
                    let threshold = f64::from(*threshold);
                    let gate = seen + UNSEEN * normal(&mut prng) - threshold;
                    bits[n / 32] |= u32::from(gate > 0.0) << (n % 32);
                    own[n] = likely((seen - threshold) / UNSEEN);
                    early[n] = likely(((seen + blurred) * known - threshold) / UNSEEN.hypot(unseen * known.sqrt()));
                }
                writer.write(TraceSection::Active, layer, token, bytemuck::cast_slice(&bits))?;
                writer.write(TraceSection::Own, layer, token, &own)?;
                if layer >= s.ahead {
                    writer.write(TraceSection::Ahead, layer, token, &early)?;
                }
            }
            token += 1;
            step(token as u64, all)?;
        }
    }
    writer.finish(texts)
}

/// A random direction.
fn point(prng: &mut Prng) -> [f32; LATENT] {
    let raw: [f64; LATENT] = std::array::from_fn(|_| normal(prng));
    let length = raw.iter().map(|v| v * v).sum::<f64>().sqrt();
    raw.map(|v| (v / length) as f32)
}

/// A nearly normal random number of deviation 1, the same on every machine.
fn normal(prng: &mut Prng) -> f64 {
    (0..12).map(|_| prng.next_f64()).sum::<f64>() - 6.0
}

/// A point of length 1 with the share `locality` of its squared length towards `home`.
fn leaning(home: &[f32; LATENT], away: &[f32; LATENT], locality: f64) -> [f32; LATENT] {
    let (a, b) = (locality.sqrt() as f32, (1.0 - locality).sqrt() as f32);
    let raw: [f32; LATENT] = std::array::from_fn(|i| a * home[i] + b * away[i]);
    let length = raw.iter().map(|v| v * v).sum::<f32>().sqrt();
    raw.map(|v| v / length)
}

/// The normal distribution function of x, times 255, approximated to 0.01 by a logistic curve.
fn likely(x: f64) -> u8 {
    (255.0 / (1.0 + (-1.702 * x).exp())).round() as u8
}
