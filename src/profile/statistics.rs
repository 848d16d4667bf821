//! The figures that describe a profile; `docs/predictors.md` defines each.

use super::accumulate::jaccard_distance;
use super::counts::Profile;
use crate::formats::profile_file::AHEADS;
use serde::Serialize;

/// PowerInfer calls hot the neurons that make this share of the activations.
pub const HOT_ACTIVATIONS: f64 = 0.8;
/// DynamicInfer calls hot this share of the neurons, the most active ones.
pub const HOT_NEURONS: f64 = 0.4;
/// Points of a CDF for plots: finer than a line of a plot is wide.
const CDF_POINTS: usize = 101;

/// Figures that describe a profile.
#[derive(Clone, Debug, Serialize)]
pub struct Statistics {
    /// Number of texts.
    pub texts: usize,
    /// Tokens counted over all texts.
    pub tokens: u64,
    /// Neurons per layer.
    pub neurons: usize,
    /// The figures of each layer, `[layers]`.
    pub layers: Vec<LayerStatistics>,
    /// Spread of the activations over the neurons of all layers together.
    pub model_spread: Spread,
    /// The neurons inside a mixture's experts; absent where they were not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inside: Option<Inside>,
}

/// How active the neurons inside experts are, over all layers.
#[derive(Clone, Debug, Serialize)]
pub struct Inside {
    /// Share of the neurons of a token's experts that are active, mean over tokens.
    pub active: f64,
    /// Spread of the activations over the neurons of all experts.
    #[serde(flatten)]
    pub spread: Spread,
}

/// Figures that describe one layer.
#[derive(Clone, Debug, Serialize)]
pub struct LayerStatistics {
    /// Number of the layer, from 0.
    pub layer: usize,
    /// Activation threshold: |act(gate)| above which a neuron counts as active; 0 for ReLU models.
    pub activation_threshold: f32,
    /// Spread of the activations over the layer's neurons.
    #[serde(flatten)]
    pub spread: Spread,
    /// Mean Jaccard distance between the active sets of neighbouring tokens, over pairs that are not both empty; `None` without such pairs.
    pub neighbours: Option<f64>,
    /// Jaccard distance between a token's active set and the most active 40 % of neurons of all texts, of all tokens together
    /// ([`distance_to_hot`]); `None` where nothing was active.
    pub to_hot: Option<f64>,
    /// Jaccard distances between the most active 40 % of neurons of every two texts; `None` with fewer than two texts.
    pub texts: Option<Range>,
    /// Mean cosine between the residual after attention here and 1, 2 and 4 layers further; `None` where there is no such layer.
    pub cosines: [Option<f64>; AHEADS.len()],
}

/// How activations are spread over neurons.
#[derive(Clone, Debug, Serialize)]
pub struct Spread {
    /// Share of the neurons that are inactive for a token, mean over tokens.
    pub sparsity: f64,
    /// Smallest share of neurons that makes 80 % of the activations.
    pub neurons_for_80: f64,
    /// Share of the activations that the most active 40 % of neurons make.
    pub by_top_40: f64,
    /// Gini coefficient of the counts: 0 where all neurons fire alike, towards 1 where few make all activations.
    pub gini: f64,
    /// Number of neurons that were never active.
    pub never: usize,
    /// Share of the activations that the most active 0, 1, ... 100 % of neurons make, `[101]`.
    pub cdf: Vec<f64>,
}

/// Mean and range of distances.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Range {
    /// Mean over all pairs.
    pub mean: f64,
    /// Smallest of all pairs.
    pub least: f64,
    /// Largest of all pairs.
    pub most: f64,
}

impl Profile {
    /// Computes the figures that describe this profile.
    pub fn statistics(&self) -> Statistics {
        let (h, tokens) = (&self.header, self.tokens());
        let (mut all, mut counted) = (Vec::new(), Vec::new());
        let layers = (0..h.layers)
            .map(|layer| {
                let counts = self.counts(layer);
                let sums = self.sums(layer);
                let spread = spread(&counts, tokens);
                let to_hot = distance_to_hot(&counts, tokens);
                // A layer in which nothing is ever active has nothing that could be.
                if counts.iter().any(|&count| count > 0) {
                    all.extend(counts);
                    counted.push(layer);
                }
                let has = |ahead: usize| layer + ahead < h.layers && tokens > 0;
                LayerStatistics {
                    layer,
                    activation_threshold: h.activation_thresholds[layer],
                    spread,
                    neighbours: (sums.pairs > 0).then(|| sums.jaccard / sums.pairs as f64),
                    to_hot,
                    texts: self.between_texts(layer),
                    cosines: std::array::from_fn(|i| has(AHEADS[i]).then(|| sums.cosines[i] / tokens as f64)),
                }
            })
            .collect();
        if all.is_empty() {
            all.resize(h.ffn, 0);
        }
        let chosen: u64 = all.iter().sum();
        let inside: Option<Vec<Vec<u64>>> = counted.iter().map(|&layer| self.inside(layer)).collect();
        let inside = inside.map(|counts| counts.concat()).filter(|counts| !counts.is_empty()).map(|counts| Inside {
            active: counts.iter().sum::<u64>() as f64 / (chosen * (counts.len() / all.len()) as u64).max(1) as f64,
            spread: spread(&counts, tokens),
        });
        let model_spread = spread(&all, tokens);
        Statistics { texts: self.texts.len(), tokens, neurons: h.ffn, layers, model_spread, inside }
    }

    /// Over all pairs of texts; `None` with fewer than two, or where nothing was active.
    fn between_texts(&self, layer: usize) -> Option<Range> {
        let sets: Vec<_> = self.texts.iter().map(|t| top_set(t.layer_counts(layer), HOT_NEURONS)).collect();
        let pairs = sets.iter().enumerate().flat_map(|(i, a)| sets[i + 1..].iter().map(move |b| (a, b)));
        let distances: Vec<f64> = pairs.filter_map(|(a, b)| jaccard_distance(a, b)).collect();
        (!distances.is_empty()).then(|| Range {
            mean: distances.iter().sum::<f64>() / distances.len() as f64,
            least: distances.iter().copied().fold(f64::INFINITY, f64::min),
            most: distances.iter().copied().fold(0.0, f64::max),
        })
    }
}

/// The most active `share` of neurons as bits, `[ffn / 64]` words; of equal counts the lower number comes first. A neuron that never fired
/// is left out even if the set then is smaller: otherwise two texts would have such neurons in common.
pub fn top_set(counts: &[u32], share: f64) -> Vec<u64> {
    let mut order: Vec<usize> = (0..counts.len()).filter(|&n| counts[n] > 0).collect();
    order.sort_by_key(|&n| (std::cmp::Reverse(counts[n]), n));
    let mut bits = vec![0; counts.len().div_ceil(64)];
    for &n in order.iter().take(part(counts.len(), share)) {
        bits[n / 64] |= 1 << (n % 64);
    }
    bits
}

/// `share` of n, rounded up, with a tolerance for rounding errors of the product.
fn part(n: usize, share: f64) -> usize {
    (n as f64 * share - 1e-9).ceil() as usize
}

/// Jaccard distance between the active set of a token and the most active 40 % of neurons: common neurons and those of either set are each
/// summed up over all tokens, so that it follows from the counts alone. `counts` are those of each neuron over `tokens` tokens; `None` where
/// nothing was active.
pub fn distance_to_hot(counts: &[u64], tokens: u64) -> Option<f64> {
    let mut sorted = counts.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let all: u64 = sorted.iter().sum();
    let hot = sorted.iter().take(part(counts.len(), HOT_NEURONS)).filter(|&&count| count > 0);
    let (size, common) = hot.fold((0, 0), |(size, common), count| (size + 1, common + count));
    (all > 0).then(|| 1.0 - common as f64 / (all + tokens * size - common) as f64)
}

/// How activations are spread: `counts` are those of each neuron, each over `tokens` tokens.
pub fn spread(counts: &[u64], tokens: u64) -> Spread {
    let n = counts.len();
    let mut sorted = counts.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let all: u64 = sorted.iter().sum();
    // Activations of the k most active neurons, k from 0.
    let sums: Vec<u64> = std::iter::once(0)
        .chain(sorted.iter().scan(0, |sum, &c| {
            *sum += c;
            Some(*sum)
        }))
        .collect();
    let made_by = |k: usize| if all == 0 { 0.0 } else { sums[k] as f64 / all as f64 };
    let enough = sums.partition_point(|&sum| (sum as f64) < HOT_ACTIVATIONS * all as f64);
    // For counts in falling order the Gini coefficient is the sum of (n + 1 - 2 i) count / (n sum), i from 1.
    let weighted: f64 = sorted.iter().enumerate().map(|(i, &c)| (n as f64 - 1.0 - 2.0 * i as f64) * c as f64).sum();
    Spread {
        sparsity: 1.0 - all as f64 / (n as f64 * tokens as f64).max(1.0),
        neurons_for_80: enough as f64 / n as f64,
        by_top_40: made_by(part(n, HOT_NEURONS)),
        gini: if all == 0 { 0.0 } else { weighted / (n as f64 * all as f64) },
        never: counts.iter().filter(|&&c| c == 0).count(),
        cdf: (0..CDF_POINTS).map(|p| made_by(part(n, p as f64 / (CDF_POINTS - 1) as f64))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_of_counts_that_can_be_done_in_the_head() {
        let even = spread(&[5; 10], 10);
        assert_eq!((even.sparsity, even.neurons_for_80, even.by_top_40, even.never), (0.5, 0.8, 0.4, 0));
        assert!(even.gini.abs() < 1e-12);
        let one = spread(&[0, 0, 0, 40, 0, 0, 0, 0, 0, 0], 100);
        assert_eq!((one.neurons_for_80, one.by_top_40, one.never), (0.1, 1.0, 9));
        assert!((one.gini - 0.9).abs() < 1e-12 && (one.sparsity - 0.96).abs() < 1e-12);
        let none = spread(&[0; 4], 7);
        assert_eq!(
            (none.sparsity, none.neurons_for_80, none.by_top_40, none.gini, none.never),
            (1.0, 0.0, 0.0, 0.0, 4)
        );
        let mixed = spread(&[1, 4, 3, 2], 4);
        assert_eq!((mixed.neurons_for_80, mixed.cdf[25], mixed.cdf[50], mixed.cdf[100]), (0.75, 0.4, 0.7, 1.0));
        assert!((mixed.gini - 0.25).abs() < 1e-12, "{}", mixed.gini);
    }

    #[test]
    fn a_token_is_as_far_from_the_hot_set_as_its_neurons_say() {
        // Four of ten are hot. A token with these four alone is at no distance, one with the six others shares nothing with them.
        assert_eq!(distance_to_hot(&[3, 3, 3, 3, 0, 0, 0, 0, 0, 0], 3), Some(0.0));
        // Three tokens have all four and one other neuron: four common ones of five.
        assert!((distance_to_hot(&[3, 3, 3, 3, 1, 2, 0, 0, 0, 0], 3).unwrap() - 0.2).abs() < 1e-12);
        // Each of four tokens has one of the four.
        assert!((distance_to_hot(&[1, 1, 1, 1, 0, 0, 0, 0, 0, 0], 4).unwrap() - 0.75).abs() < 1e-12);
        assert_eq!(distance_to_hot(&[0; 10], 3), None);
    }

    #[test]
    fn the_top_set_has_its_size_and_nobody_who_never_fired() {
        assert_eq!(top_set(&[1, 9, 5, 5, 0], 0.4), [0b110]);
        assert_eq!(top_set(&[0, 0, 3, 0, 0], 0.4), [0b100]);
        let many: Vec<u32> = (0..100).collect();
        let bits = top_set(&many, 0.4);
        assert_eq!(bits.iter().map(|w| w.count_ones()).sum::<u32>(), 40);
        assert!(bits[1] >> 35 & 1 == 1 && bits[0] >> 59 & 1 == 0 && bits[0] >> 60 & 1 == 1);
    }
}
