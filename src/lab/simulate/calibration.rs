//! Synthetic traces as far apart as DynamicInfer measured its models' activations to be (section 3), and the figures that say so.
//!
//! Only what the paper says of activations is aimed at, and no speed.

use crate::error::Result;
use crate::formats::trace_file::{TraceFile, TraceSection};
use crate::lab::replay::{active, frequencies, likeness};
use crate::lab::synth::trace::TraceShape;
use serde::Serialize;

/// Share of the neurons that are called hot, in the paper and here.
const HOT: f64 = 0.4;
/// Share of all activations that the hot neurons make, about, in the paper's figure 2a ("in specific layers").
pub const SKEW: f64 = 0.80;
/// Jaccard distance between the active neurons of tokens of a text (figure 2c), from and to.
pub const TOKENS: (f64, f64) = (0.70, 0.75);
/// Jaccard distance between the hot neurons of two texts (figure 2b), from and to.
pub const TEXTS: (f64, f64) = (0.53, 0.57);
/// Jaccard distance between a token's active neurons and the hot ones of all texts (section 3), from and to. Not aimed at.
pub const TOKEN_TO_HOT: (f64, f64) = (0.64, 0.76);

/// How far inside the published ranges the calibration aims, at their lower ends: tokens and texts that are further apart have a lower
/// skew, which is below the published one where the distances are met.
const INSIDE: f64 = 0.01;
/// How near the aim is near enough.
const NEAR: f64 = 0.005;
/// Traces made at most. From [`TraceShape::paper`] three to five are enough.
const TRIALS: usize = 20;
/// About how much the distance of tokens, and that of texts, change with each knob, at 18 to 30 % active. Steps need not be exact:
/// what is left is measured and stepped again.
const BY_EXPONENT: (f64, f64) = (-0.25, -0.30);
const BY_LOCALITY: (f64, f64) = (-0.27, 0.60);

/// What the activations of a trace look like: means over layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Statistics {
    /// Share of the neurons that are active for a token, 0 to 1.
    pub active: f64,
    /// Share of all activations that the 40 % most active neurons make, over all texts.
    pub skew: f64,
    /// The same within each text, by the neurons that are most active in it.
    pub skew_in_text: f64,
    /// Jaccard distance between the active neurons of neighbouring tokens of a text.
    pub token_distance: f64,
    /// Jaccard distance between the 40 % most active neurons of two texts; `None` for a single text.
    pub text_distance: Option<f64>,
    /// Jaccard distance between a token's active neurons and the 40 % most active ones over all texts.
    pub token_to_hot: f64,
}

impl Statistics {
    /// Measures a trace, recorded or made.
    pub fn of(trace: &TraceFile) -> Statistics {
        let h = trace.header();
        let mean = |of: &dyn Fn(usize) -> f64, n: usize| (0..n).map(of).sum::<f64>() / n.max(1) as f64;
        let all = frequencies(trace, |_| true);
        let hot: Vec<Vec<bool>> = all.iter().map(|f| hottest(f)).collect();
        let skew = |f: &[Vec<f32>]| mean(&|layer| share_of_hottest(&f[layer]), h.layers);
        let (token_distance, text_distance) = likeness(trace);
        Statistics {
            active: mean(&|layer| all[layer].iter().map(|&f| f64::from(f)).sum::<f64>() / h.ffn as f64, h.layers),
            skew: skew(&all),
            skew_in_text: mean(&|text| skew(&frequencies(trace, |i| i == text)), h.texts.len()),
            token_distance,
            text_distance,
            token_to_hot: mean(&|layer| distance_to(trace, layer, &hot[layer]), h.layers),
        }
    }
}

/// Whether each neuron is among the 40 % with the highest frequency, `[ffn]`.
fn hottest(frequencies: &[f32]) -> Vec<bool> {
    let mut order: Vec<usize> = (0..frequencies.len()).collect();
    order.sort_by(|&a, &b| frequencies[b].total_cmp(&frequencies[a]));
    let mut hot = vec![false; frequencies.len()];
    order[..(HOT * frequencies.len() as f64) as usize].iter().for_each(|&n| hot[n] = true);
    hot
}

fn share_of_hottest(frequencies: &[f32]) -> f64 {
    let hot = hottest(frequencies);
    let all: f32 = frequencies.iter().sum();
    let top: f32 = frequencies.iter().zip(hot).filter(|(_, hot)| *hot).map(|(f, _)| f).sum();
    f64::from(top / all.max(f32::MIN_POSITIVE))
}

/// Mean Jaccard distance between a layer's active neurons and `hot`.
fn distance_to(trace: &TraceFile, layer: usize, hot: &[bool]) -> f64 {
    let (tokens, size) = (trace.header().tokens(), hot.iter().filter(|&&h| h).count());
    let mut now = Vec::new();
    let mut distance = |token| {
        active(trace.row(TraceSection::Active, layer, token), &mut now);
        let both = now.iter().filter(|&&n| hot[n as usize]).count();
        1.0 - both as f64 / (size + now.len() - both).max(1) as f64
    };
    (0..tokens).map(&mut distance).sum::<f64>() / tokens.max(1) as f64
}

/// How far apart two independent tokens are at most, if `active` of the neurons are active and the hot ones make [`SKEW`] of it: where
/// the hot ones are all alike, and so are the others. With q = sum p^2 / sum p the distance is 1 - q / (2 - q).
pub fn furthest(active: f64) -> f64 {
    let (hot, cold) = (SKEW / HOT * active, (1.0 - SKEW) / (1.0 - HOT) * active);
    let q = (HOT * hot * hot + (1.0 - HOT) * cold * cold) / active;
    1.0 - q / (2.0 - q)
}

/// Changes locality and exponent of `start` until tokens and texts are as far apart as the paper says. Everything else stays, the skew
/// follows. `measure` makes the trace of a shape and says what it looks like. Returns the last shape that was measured, whose distances
/// are those wished for unless twenty traces were not enough.
///
/// # Errors
/// Those of `measure`.
pub fn calibrate(start: &TraceShape, mut measure: impl FnMut(&TraceShape) -> Result<Statistics>) -> Result<TraceShape> {
    let mut shape = start.clone();
    for trial in 1..=TRIALS {
        let reached = measure(&shape)?;
        let tokens = reached.token_distance - (TOKENS.0 + INSIDE);
        let texts = reached.text_distance.map_or(0.0, |d| d - (TEXTS.0 + INSIDE));
        if trial == TRIALS || (tokens.abs() < NEAR && texts.abs() < NEAR) {
            break;
        }
        // The step after which, were the slopes exact, nothing would be left of either: Cramer's rule.
        let determinant = BY_EXPONENT.0 * BY_LOCALITY.1 - BY_LOCALITY.0 * BY_EXPONENT.1;
        let exponent = (tokens * BY_LOCALITY.1 - texts * BY_LOCALITY.0) / determinant;
        let locality = (texts * BY_EXPONENT.0 - tokens * BY_EXPONENT.1) / determinant;
        shape.exponent = (shape.exponent - exponent).clamp(0.0, 3.0);
        shape.locality = (shape.locality - locality).clamp(0.0, 0.9);
    }
    Ok(shape)
}
