//! How good a sparse run is, compared with the true activations of every layer and with the dense model's logits.

use crate::engine::{Engine, Observer, Seen, SeenExperts};
use crate::model::ModelConfig;
use serde::Serialize;

/// Counts of (neuron, token) pairs.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    all: u64,
    active: u64,
    computed: u64,
    /// Active and computed.
    hit: u64,
}

/// Observer that counts which active neurons a run computes. A neuron is active when its activation is not zero or, where the layer has an
/// activation threshold, when |act(gate)| is above it.
pub struct Audit {
    config: ModelConfig,
    activation_thresholds: Vec<f32>,
    layers: Vec<Tally>,
    inside: bool,
}

/// Shares of (neuron, token) pairs, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Shares {
    /// Computed / all.
    pub computed_share: f64,
    /// Truly active / all.
    pub active_share: f64,
    /// Active and computed / active; 1 where nothing is active.
    pub recall: f64,
    /// Active and computed / computed; 1 where nothing is computed.
    pub precision: f64,
}

impl Audit {
    /// Nothing counted yet. `activation_thresholds` are the layers' activation thresholds, `[layers]`: 0 for ReLU models.
    pub fn new(config: &ModelConfig, activation_thresholds: Vec<f32>) -> Audit {
        assert_eq!(activation_thresholds.len(), config.layers().len());
        let layers = vec![Tally::default(); config.layers().len()];
        Audit { layers, config: config.clone(), activation_thresholds, inside: false }
    }

    /// Nothing counted yet of what this engine computes. Of a mixture that is packed by neuron it counts the neurons of the experts that a
    /// token has; of others experts.
    pub fn of(engine: &Engine) -> Audit {
        let inside = engine.model.config.neurons_inside();
        Audit { inside, ..Audit::new(&engine.model.config, engine.sparsity().activation_thresholds().to_vec()) }
    }

    /// The shares over all layers together, and those of each layer, `[layers]`.
    pub fn shares(&self) -> (Shares, Vec<Shares>) {
        let sum = self.layers.iter().fold(Tally::default(), |a, b| Tally {
            all: a.all + b.all,
            active: a.active + b.active,
            computed: a.computed + b.computed,
            hit: a.hit + b.hit,
        });
        (sum.shares(), self.layers.iter().map(|t| t.shares()).collect())
    }
}

impl Tally {
    fn shares(&self) -> Shares {
        let share = |part: u64, of: u64, none: f64| if of == 0 { none } else { part as f64 / of as f64 };
        Shares {
            computed_share: share(self.computed, self.all, 0.0),
            active_share: share(self.active, self.all, 0.0),
            recall: share(self.hit, self.active, 1.0),
            precision: share(self.hit, self.computed, 1.0),
        }
    }
}

impl Observer for Audit {
    fn layer(&mut self, seen: &Seen<'_>) {
        if self.inside {
            return;
        }
        let (ffn, activation_threshold, act) =
            (self.config.clusters(), self.activation_thresholds[seen.layer], self.config.activation);
        let active = |at: usize| match activation_threshold > 0.0 {
            true => act.apply(seen.gates[at]).abs() > activation_threshold,
            false => seen.activations[at] != 0.0,
        };
        let tally = &mut self.layers[seen.layer];
        let all = seen.n * ffn;
        let actives = (0..all).filter(|&at| active(at)).count() as u64;
        tally.all += all as u64;
        tally.active += actives;
        match seen.selection {
            None => {
                // Of a mixture only those experts are computed that the router has chosen.
                let some = seen.only_active || self.config.is_mixture();
                tally.computed += if some { actives } else { all as u64 };
                tally.hit += actives;
            }
            Some(selection) => {
                tally.computed += selection.pairs();
                for (&neuron, &mask) in selection.neurons.iter().zip(&selection.masks) {
                    let wanted = (0..seen.n).filter(|b| mask >> b & 1 == 1);
                    tally.hit += wanted.filter(|b| active(b * ffn + neuron.index())).count() as u64;
                }
            }
        }
    }

    fn looks_inside(&self) -> bool {
        self.inside
    }

    fn inside(&mut self, seen: &SeenExperts<'_>) {
        let tally = &mut self.layers[seen.layer];
        tally.all += seen.computed.len() as u64;
        for (active, computed) in seen.pairs(self.config.activation) {
            tally.active += u64::from(active);
            tally.computed += u64::from(computed);
            tally.hit += u64::from(active && computed);
        }
    }
}

/// How close the logits of a run are to the dense model's, summed over tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Agreement {
    tokens: u64,
    same_top: u64,
    kl: f64,
}

impl Agreement {
    /// Adds one token's logits of both models, `[vocab]` each.
    pub fn add(&mut self, dense: &[f32], sparse: &[f32]) {
        self.tokens += 1;
        self.same_top += u64::from(top(dense) == top(sparse));
        self.kl += kl(dense, sparse);
    }

    /// Share of tokens whose likeliest next token is the same.
    pub fn top1(&self) -> f64 {
        self.same_top as f64 / self.tokens.max(1) as f64
    }

    /// Mean KL(dense || sparse), nats.
    pub fn kl(&self) -> f64 {
        self.kl / self.tokens.max(1) as f64
    }
}

fn top(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

fn kl(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |logits: &[f32]| {
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        top + logits.iter().map(|&l| (l as f64 - top).exp()).sum::<f64>().ln()
    };
    let (zp, zq) = (log_sum(p), log_sum(q));
    let terms = p.iter().zip(q).map(|(&p, &q)| {
        let (p, q) = (p as f64 - zp, q as f64 - zq);
        p.exp() * (p - q)
    });
    terms.sum::<f64>().max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_zero_for_shifted_logits_and_what_the_formula_says_otherwise() {
        let p = [1.0, 2.0, 3.0];
        assert!(kl(&p, &[11.0, 12.0, 13.0]) < 1e-12);
        let (half, quarter) = (0.5f32.ln(), 0.25f32.ln());
        let expected = 0.5 * (0.5f64 / 0.25).ln() + 0.25 * (0.25f64 / 0.5).ln();
        assert!((kl(&[half, quarter, quarter], &[quarter, half, quarter]) - expected).abs() < 1e-6);
    }
}
