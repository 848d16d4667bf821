//! Routing that is planted in the weights of a synthetic mixture: how uneven its experts are used, and how soon they are used again.
//!
//! Every token's embedding is numbers of its own and a direction that all tokens share. Of that direction an expert's router has as much as
//! its rank says, so that its product begins with a bias that falls with the logarithm of the rank; what decides beside it is noise that
//! belongs to the token. That is the skew. The first layer's attention looks at the last few tokens, by positions alone: queries and keys
//! are the shared direction, turned by RoPE. What it brings of these tokens' own numbers changes slowly from token to token, and routers
//! read it as they read the token itself. That is the reuse. How strong both must be is found by trials that draw numbers as routers see
//! them ([`Law::find`]); what a model really does also depends on the text, whose tokens come back, and `record` measures it.
//!
//! Nothing but routers, embedding, head, values and the first layer's attention is made in another way than in other models, and every
//! matrix but routers and the first queries and keys is blind to the shared direction: it says nothing but which experts are frequent.

use super::experts::{Reuse, shuffled, slope};
use super::noise::{Noise, Stream, dot};
use crate::error::{Error, Result};
use crate::model::config::ModelConfig;
use crate::prng::Prng;
use serde::Serialize;

/// Standard deviation of a mixture's embedding. What layers add to it is most of a residual that begins small, and much the same for all
/// tokens of a text: they would share their experts. Like this each token has its own.
pub(super) const EMBEDDING: f32 = 8.0;
/// The frequencies of RoPE, in radians a token, by which the first layer looks back, and the largest product of query and key: tokens up to
/// about five before are seen, and those from about ten on are not.
const BAND: [f32; 2] = [1.0 / 32.0, 1.0 / 4.0];
const PEAK: f64 = 8.0;
/// Tokens that are looked back at in a trial: farther ones are seen no more than by chance.
const BACK: usize = 256;
/// Layers and tokens of a trial, and halvings of a range.
const TRIAL: (usize, usize) = (3, 400);
const HALVINGS: usize = 9;
/// The steepest bias that is tried: a steeper one leaves few experts that are used at all, and these alike. And the strongest past: beside it
/// a token's own numbers hardly count.
const STEEPEST: f64 = 1.0;
const STRONGEST: f64 = 8.0;
/// How far from what was asked a trial may end.
const NEAR: f64 = 0.1;

/// What is asked of a mixture's routing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Routing {
    /// How uneven experts are used: minus the slope of log frequency over log rank; 0 is flat.
    pub skew: f64,
    /// Tokens within which half of the uses come back; `None` leaves it as it comes.
    pub reuse: Option<f64>,
}

/// What is planted, and what a trial with it measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Law {
    /// A router's product with a token begins with minus this times the logarithm of the expert's rank, where the token's noise has
    /// deviation 1.
    pub bias: f64,
    /// Deviation of what is common to the last tokens, where the token's own has 1.
    pub past: f64,
    /// Of the trial's experts: minus the slope of log frequency over log rank.
    pub skew: f64,
    /// Of the trial: tokens within which half of the uses come back.
    pub reuse: f64,
    /// The same without a past.
    pub reuse_by_chance: f64,
}

impl Law {
    /// What has to be planted in a mixture of `count` experts, `used` of them for a token.
    ///
    /// # Errors
    /// [`Error::Usage`] for what cannot be planted.
    pub fn find(c: &ModelConfig, (count, used): (usize, usize), asked: Routing, seed: u64) -> Result<Law> {
        let bad = |why: String| Err(Error::Usage(why));
        let Routing { skew, reuse } = asked;
        if !(0.0..=1.5).contains(&skew) {
            return bad(format!("--skew {skew}: take 0 to 1.5"));
        }
        let seen = weights_back(c);
        if seen.is_empty() {
            return bad(format!("--skew and --reuse need heads of 32 numbers or more; they have {}", head_dim(c)));
        }
        let trial = |bias, past| trial((count, used), (bias, past), &seen, seed);
        let bias = match skew > 0.0 {
            true => halved(STEEPEST, |bias| trial(bias, 0.0).0 < skew),
            false => 0.0,
        };
        let (_, reuse_by_chance) = trial(bias, 0.0);
        let past = match reuse {
            None => 0.0,
            Some(reuse) if reuse > reuse_by_chance * (1.0 + NEAR) => {
                return bad(format!(
                    "--reuse {reuse}: with this --skew half of the uses come back within {reuse_by_chance:.1} tokens by chance; take fewer"
                ));
            }
            Some(reuse) => halved(STRONGEST, |past| trial(bias, past).1 > reuse),
        };
        let (found, back) = trial(bias, past);
        if skew > 0.0 && (found - skew).abs() > NEAR.max(NEAR * skew) {
            return bad(format!("--skew {skew}: of {used} of {count} experts at most about {found:.2} can be planted"));
        }
        if let Some(reuse) = reuse.filter(|reuse| back > reuse * (1.0 + NEAR)) {
            return bad(format!("--reuse {reuse}: at least about {back:.1} tokens can be planted"));
        }
        Ok(Law { bias, past, skew: found, reuse: back, reuse_by_chance })
    }
}

/// The largest number up to `most` for which `below` holds, where it holds up to a number.
fn halved(most: f64, below: impl Fn(f64) -> bool) -> f64 {
    let (mut low, mut high) = (0.0, most);
    for _ in 0..HALVINGS {
        let middle = (low + high) / 2.0;
        *(if below(middle) { &mut low } else { &mut high }) = middle;
    }
    (low + high) / 2.0
}

/// Radians per position of each pair of a head of the first layer.
fn frequencies(c: &ModelConfig) -> &[f32] {
    c.attention(0).map_or(&[], |attention| c.rotary(&attention))
}

fn head_dim(c: &ModelConfig) -> usize {
    c.most_of_attention(|attention| attention.head_dim)
}

/// Frequencies of RoPE in the band, as pairs of a head.
fn band(c: &ModelConfig) -> Vec<usize> {
    let frequencies = frequencies(c);
    (0..frequencies.len()).filter(|&i| (BAND[0]..=BAND[1]).contains(&frequencies[i])).collect()
}

/// With which weights the first layer sees the token itself and those before it; empty where a head has no such frequencies.
fn weights_back(c: &ModelConfig) -> Vec<f64> {
    let (band, frequencies) = (band(c), frequencies(c));
    if band.len() < 2 {
        return Vec::new();
    }
    let score = |back: usize| {
        let sum: f64 = band.iter().map(|&i| (back as f64 * f64::from(frequencies[i])).cos()).sum();
        PEAK * sum / band.len() as f64
    };
    let raw: Vec<f64> = (0..BACK).map(|back| (score(back) - PEAK).exp()).collect();
    let sum: f64 = raw.iter().sum();
    raw.iter().map(|w| w / sum).collect()
}

/// Length of the weights as a vector: how large the mean of independent numbers is that they make.
fn length(weights: &[f64]) -> f64 {
    weights.iter().map(|w| w * w).sum::<f64>().sqrt()
}

/// Skew and reuse of routers that see noise of the token, as often as `past` says of the tokens before, and a bias by rank.
fn trial((count, used): (usize, usize), (bias, past): (f64, f64), seen: &[f64], seed: u64) -> (f64, f64) {
    let mut prng = Prng::new(seed ^ 0x0070_6c61_6e74_6564);
    let (layers, tokens) = TRIAL;
    let (unit, all) = (length(seen), (1.0 + past * past).sqrt());
    // What is hardly seen changes nothing.
    let seen = &seen[..seen.iter().rposition(|&w| w > 1e-2 * seen[0]).map_or(0, |last| last + 1)];
    let (mut reuse, mut skew) = (Reuse::new(count), 0.0);
    let (mut products, mut counts) = (vec![(0.0, 0u32); count], vec![0u64; count]);
    for _ in 0..layers {
        let mut noise = |n: usize| -> Vec<f64> { (0..n).map(|_| normal(&mut prng)).collect() };
        let (own, other) = (noise(count * tokens), noise(count * tokens));
        counts.fill(0);
        reuse.begin();
        for token in 0..tokens {
            for (expert, product) in products.iter_mut().enumerate() {
                let before = seen.iter().zip((0..=token).rev());
                let slow: f64 = before.map(|(w, at)| w * other[at * count + expert]).sum::<f64>() / unit;
                let noise = (own[token * count + expert] + past * slow) / all;
                *product = (noise - bias * ((expert + 1) as f64).ln(), expert as u32);
            }
            products.select_nth_unstable_by(used - 1, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            let mut now: Vec<u32> = products[..used].iter().map(|&(_, expert)| expert).collect();
            now.sort_unstable();
            now.iter().for_each(|&e| counts[e as usize] += 1);
            reuse.token(&now);
        }
        skew += slope(&counts) / layers as f64;
    }
    (skew, reuse.median())
}

/// A nearly normal random number of deviation 1, the same on every machine.
fn normal(prng: &mut Prng) -> f64 {
    (0..12).map(|_| prng.next_f64()).sum::<f64>() - 6.0
}

/// A law as weights.
pub(super) struct Planted {
    pub(super) law: Law,
    noise: Noise,
    /// The direction that all tokens share: 1 or -1 by channel.
    common: Vec<f32>,
    /// Rank of each expert, `[layers][experts]`.
    ranks: Vec<Vec<usize>>,
    band: Vec<usize>,
    head_dim: usize,
    /// Deviation of the first layer's attention output matrix.
    o_deviation: f32,
}

impl Planted {
    pub(super) fn new(c: &ModelConfig, noise: Noise, law: Law) -> Planted {
        let mut common = vec![0.0; c.hidden];
        noise.fill(Stream::Common, 0, 0, 0, 1.0, &mut common);
        common.iter_mut().for_each(|v| *v = if *v < 0.0 { -1.0 } else { 1.0 });
        let experts = c.clusters();
        let ranks =
            (0..c.layers().len()).map(|l| shuffled(experts, &mut noise.rng(Stream::Common, l + 1, 0, 0))).collect();
        // A value is a product with the token's own half of a normalised input, and the mean of many is as long as their weights are.
        let value = length(&weights_back(c)) / 2f64.sqrt();
        let o_deviation = law.past * f64::from(EMBEDDING) / (value * (c.mixer(0).cols() as f64).sqrt());
        Planted { law, noise, common, ranks, band: band(c), head_dim: head_dim(c), o_deviation: o_deviation as f32 }
    }

    /// Fills a row that is made in another way here; `deviation` is that of other models. Returns whether it was.
    pub(super) fn row(&self, stream: Stream, layer: usize, r: usize, deviation: f32, out: &mut [f32]) -> bool {
        match stream {
            Stream::Embed => {
                self.noise.fill(stream, layer, r, 0, EMBEDDING, out);
                out.iter_mut().zip(&self.common).for_each(|(out, common)| *out += EMBEDDING * common);
            }
            Stream::Q | Stream::K if layer == 0 && self.law.past > 0.0 => self.looks_back(r, out),
            Stream::O if layer == 0 && self.law.past > 0.0 => {
                self.noise.fill(stream, layer, r, 0, self.o_deviation, out);
            }
            Stream::Router => self.router(layer, r, out),
            Stream::Head | Stream::V | Stream::Gate | Stream::Up => {
                self.noise.fill(stream, layer, r, 0, deviation, out);
                self.blind(out);
            }
            _ => return false,
        }
        true
    }

    /// Takes the shared direction out of a row.
    fn blind(&self, out: &mut [f32]) {
        let along = dot(out, &self.common) / out.len() as f32;
        out.iter_mut().zip(&self.common).for_each(|(out, common)| *out -= along * common);
    }

    /// Deviation of a residual's channels behind the first attention, where that of the token's own numbers is 1.
    fn residual(&self) -> f32 {
        (2.0 + self.law.past * self.law.past).sqrt() as f32
    }

    /// An expert's router: noise whose product with what is not shared has deviation 1, and its bias.
    fn router(&self, layer: usize, expert: usize, out: &mut [f32]) {
        let (numbers, all) = (out.len() as f32, self.residual());
        let unit = all / (1.0 + self.law.past * self.law.past).sqrt() as f32;
        self.noise.fill(Stream::Router, layer, expert, 0, unit / numbers.sqrt(), out);
        self.blind(out);
        let bias = -(self.law.bias * ((self.ranks[layer][expert] + 1) as f64).ln()) as f32;
        out.iter_mut().zip(&self.common).for_each(|(out, common)| *out += bias * all / numbers * common);
    }

    /// A row of the first layer's queries or keys: in pairs of the band the shared direction, so that their product says how far two
    /// positions are apart, and [`PEAK`] where they are the same.
    fn looks_back(&self, r: usize, out: &mut [f32]) {
        out.fill(0.0);
        if self.band.contains(&(r % self.head_dim)) {
            let each = (PEAK * (self.head_dim as f64).sqrt() / self.band.len() as f64).sqrt();
            // A normalised input has the shared direction as 1 / sqrt(2) in every channel.
            let scale = (each * 2f64.sqrt()) as f32 / out.len() as f32;
            out.iter_mut().zip(&self.common).for_each(|(out, common)| *out = scale * common);
        }
    }
}
