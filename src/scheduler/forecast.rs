//! How often each cluster of a layer (an expert of a mixture) will be used in the coming tokens, from how often it was used of late.
//!
//! No single memory is right for experts. Where half of the uses come back within two tokens, the last few tokens say most; where a token
//! draws its experts by itself, only a long mean says anything, and a short one is noise; and which of the two a model is, is not known
//! beforehand (`docs/internals.md`). So each cluster has means of several lengths, and their weights are fitted while tokens are made:
//! every few tokens what the means said is compared with what was used since, by least squares over all clusters of all layers.

/// Means of a cluster's uses: three of its own, and the frequency in the sequences that are decoded.
const MEANS: usize = 4;
/// What is left of the first three a token later. The last of them starts from the frequency that is known at the beginning.
const DECAY: [f32; 3] = [0.6, 0.9, 0.996];
/// Tokens over which what was used is compared with what was said.
pub const HORIZON: u32 = 8;
/// What is left of old comparisons when each layer has been compared once more.
const KEEP: f64 = 0.97;
/// Weight of the weights that hold at the beginning, beside what was compared: a share of the means' variance.
const TRUST: f64 = 0.02;
/// The weights at the beginning: the long mean alone, which is what a static placement goes by.
const FIRST: [f64; MEANS] = [0.0, 0.0, 1.0, 0.0];

/// The means of all clusters, and how much each is worth.
#[derive(Clone, Debug)]
pub struct Forecast {
    layers: Vec<Layer>,
    fit: Fit,
}

#[derive(Clone, Debug)]
struct Layer {
    /// The means, `[clusters]`.
    means: Vec<[f32; MEANS]>,
    /// What they were when the comparison began, and how often each cluster was used since.
    said: Vec<([f32; MEANS], u32)>,
    /// Tokens since then.
    tokens: u32,
    begun: bool,
}

impl Forecast {
    /// Nothing seen of `layers` layers of `clusters` clusters.
    pub fn new(layers: usize, clusters: usize) -> Forecast {
        let layer = Layer {
            means: vec![[0.0; MEANS]; clusters],
            said: vec![([0.0; MEANS], 0); clusters],
            tokens: 0,
            begun: false,
        };
        Forecast { layers: vec![layer; layers], fit: Fit::new(layers) }
    }

    /// A token has used these clusters of a layer.
    pub fn used(&mut self, layer: usize, clusters: impl Iterator<Item = usize>) {
        let layer = &mut self.layers[layer];
        for mean in &mut layer.means {
            mean.iter_mut().zip(DECAY).for_each(|(mean, decay)| *mean *= decay);
        }
        for cluster in clusters {
            layer.means[cluster].iter_mut().zip(DECAY).for_each(|(mean, decay)| *mean += 1.0 - decay);
            layer.said[cluster].1 += 1;
        }
        layer.tokens += 1;
    }

    /// Writes to `out` how often each cluster of a layer will be used, a token, 0 to 1. `frequencies` are those of the sequences that are
    /// decoded.
    pub fn of(&mut self, layer: usize, frequencies: &[f32], out: &mut Vec<f32>) {
        let Forecast { layers, fit } = self;
        let layer = &mut layers[layer];
        for (mean, &f) in layer.means.iter_mut().zip(frequencies) {
            if !layer.begun {
                *mean = [f; MEANS];
            }
            mean[MEANS - 1] = f;
        }
        layer.begun = true;
        if layer.tokens >= HORIZON {
            fit.compare(&layer.said, layer.tokens);
            layer.tokens = 0;
        }
        if layer.tokens == 0 {
            layer.said.iter_mut().zip(&layer.means).for_each(|(said, mean)| *said = (*mean, 0));
        }
        let centre = centre(layer.means.iter());
        out.clear();
        out.extend(layer.means.iter().map(|mean| {
            let parts = mean.iter().zip(centre).zip(fit.weights);
            let above: f64 = parts.map(|((&mean, centre), weight)| weight * (f64::from(mean) - centre)).sum();
            (centre[MEANS - 2] + above).clamp(0.0, 1.0) as f32
        }));
    }
}

/// The mean of each of the means.
fn centre<'a>(means: impl ExactSizeIterator<Item = &'a [f32; MEANS]>) -> [f64; MEANS] {
    let n = means.len().max(1) as f64;
    let mut sum = [0.0; MEANS];
    means.for_each(|mean| sum.iter_mut().zip(mean).for_each(|(sum, &mean)| *sum += f64::from(mean)));
    sum.map(|sum| sum / n)
}

/// Least squares of uses over means, both as their difference from the layer's mean; older comparisons count less and less.
#[derive(Clone, Debug)]
struct Fit {
    products: [[f64; MEANS]; MEANS],
    with_uses: [f64; MEANS],
    weights: [f64; MEANS],
    keep: f64,
}

impl Fit {
    fn new(layers: usize) -> Fit {
        let keep = KEEP.powf(1.0 / layers.max(1) as f64);
        Fit { products: [[0.0; MEANS]; MEANS], with_uses: [0.0; MEANS], weights: FIRST, keep }
    }

    /// What a layer's means said, and how often its clusters were used in the `tokens` tokens since.
    fn compare(&mut self, said: &[([f32; MEANS], u32)], tokens: u32) {
        let centre = centre(said.iter().map(|(mean, _)| mean).collect::<Vec<_>>().into_iter());
        let used = |uses: u32| f64::from(uses) / f64::from(tokens);
        let mean_use = said.iter().map(|&(_, uses)| used(uses)).sum::<f64>() / said.len().max(1) as f64;
        self.products.iter_mut().flatten().chain(&mut self.with_uses).for_each(|sum| *sum *= self.keep);
        for (mean, uses) in said {
            let x: [f64; MEANS] = std::array::from_fn(|i| f64::from(mean[i]) - centre[i]);
            for (i, row) in self.products.iter_mut().enumerate() {
                row.iter_mut().zip(x).for_each(|(sum, other)| *sum += x[i] * other);
                self.with_uses[i] += x[i] * (used(*uses) - mean_use);
            }
        }
        self.solve();
    }

    /// The weights that fit best, held near the first ones.
    fn solve(&mut self) {
        let trust = TRUST * (0..MEANS).map(|i| self.products[i][i]).sum::<f64>() / MEANS as f64;
        if !(trust.is_finite() && trust > 0.0) {
            return;
        }
        let (mut a, mut b) = (self.products, self.with_uses);
        for i in 0..MEANS {
            a[i][i] += trust;
            b[i] += trust * FIRST[i];
        }
        // The matrix is symmetric and positive, so no row has to be exchanged.
        for i in 0..MEANS {
            for j in i + 1..MEANS {
                let factor = a[j][i] / a[i][i];
                let row = a[i];
                a[j].iter_mut().zip(row).for_each(|(to, from)| *to -= factor * from);
                b[j] -= factor * b[i];
            }
        }
        for i in (0..MEANS).rev() {
            let known: f64 = (i + 1..MEANS).map(|j| a[i][j] * b[j]).sum();
            b[i] = (b[i] - known) / a[i][i];
        }
        self.weights = b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    /// How well what is said of 20 clusters fits how often each is used: the correlation over the last of many tokens. `chance(token)` is
    /// that of each cluster.
    fn fits(chance: impl Fn(usize) -> Vec<f64>) -> (f64, [f64; MEANS]) {
        let (mut forecast, mut prng, mut said) = (Forecast::new(1, 20), Prng::new(5), Vec::new());
        let (mut xy, mut xx, mut yy) = (0.0, 0.0, 0.0);
        for token in 0..4000 {
            let chance = chance(token);
            let mean = chance.iter().sum::<f64>() / 20.0;
            forecast.of(0, &[0.25; 20], &mut said);
            if token > 1000 {
                for (&said, chance) in said.iter().zip(&chance) {
                    let (x, y) = (f64::from(said) - mean, chance - mean);
                    (xy, xx, yy) = (xy + x * y, xx + x * x, yy + y * y);
                }
            }
            let used: Vec<usize> = (0..20).filter(|&c| prng.next_f64() < chance[c]).collect();
            forecast.used(0, used.into_iter());
        }
        (xy / (xx * yy).sqrt(), forecast.fit.weights)
    }

    #[test]
    fn the_long_mean_counts_where_nothing_changes_and_short_ones_where_it_does() {
        let still = |_| (0..20).map(|c| 0.02 * c as f64).collect();
        let (fit, weights) = fits(still);
        assert!(fit > 0.97 && weights[2] > 0.7, "{fit} {weights:?}");
        // Every 40 tokens another quarter of them is needed.
        let restless = |token: usize| (0..20).map(|c| if c / 5 == token / 40 % 4 { 0.7 } else { 0.05 }).collect();
        let (fit, weights) = fits(restless);
        assert!(fit > 0.75 && weights[0] + weights[1] > 0.4, "{fit} {weights:?}");
    }

    #[test]
    fn before_anything_was_seen_it_says_what_is_known() {
        let (mut forecast, mut said) = (Forecast::new(2, 3), Vec::new());
        forecast.of(1, &[0.5, 0.25, 0.0], &mut said);
        assert_eq!(said, [0.5, 0.25, 0.0]);
    }
}
