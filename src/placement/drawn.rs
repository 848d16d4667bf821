//! Tokens drawn from what is known of a model's neurons, where there is no recorded text to run through a cache.

use crate::ids::StoreId;
use crate::prng::Prng;

/// Draws the neurons that tokens have computed: each by itself, as often as it was counted. Real texts stay with their neurons for some
/// tokens, so that a cache finds more than here; and they are other texts than those that were counted, so that it finds fewer.
pub struct Drawn {
    /// How likely each is, `[layers][ffn]`, 0 to 1.
    chances: Vec<Vec<f64>>,
    prng: Prng,
}

impl Drawn {
    /// From how often each neuron was active in so many `tokens`, `[layers][ffn]`, where predictors have a `share` of them computed of which
    /// `precision` are active. The others are computed in vain, and are any that are not active. With no tokens all neurons come alike.
    pub fn new(counts: &[Vec<u64>], tokens: u64, (share, precision): (f64, f64), seed: u64) -> Drawn {
        // Half a token more for each: in a short text some are not seen that another text has.
        let p = |count: u64| ((count as f64 + 0.5) / (tokens as f64 + 1.0)).min(1.0);
        let all = counts.iter().map(Vec::len).sum::<usize>().max(1) as f64;
        let active = counts.iter().flatten().map(|&c| p(c)).sum::<f64>() / all;
        let found = (share * precision).min(active);
        let (of_active, of_others) = (found / active, ((share - found) / (1.0 - active)).clamp(0.0, 1.0));
        let chance = |&count: &u64| match tokens {
            0 => share,
            _ => p(count) * of_active + (1.0 - p(count)) * of_others,
        };
        let chances = counts.iter().map(|counts| counts.iter().map(chance).collect()).collect();
        Drawn { chances, prng: Prng::new(seed) }
    }

    /// The neurons of a layer that the next token has computed, ascending.
    pub fn next(&mut self, layer: usize, list: &mut Vec<StoreId>) {
        let Drawn { chances, prng } = self;
        list.clear();
        list.extend((0..chances[layer].len()).filter(|&n| prng.next_f64() < chances[layer][n]).map(StoreId::new));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neurons_are_drawn_as_often_as_they_were_active_or_as_predictors_have_them_computed() {
        let counts = vec![vec![900, 500, 100, 0], vec![0, 100, 500, 900]];
        for (share, precision) in [(0.1, 1.0), (0.37, 1.0), (0.4, 0.8), (1.0, 0.375)] {
            let mut drawn = Drawn::new(&counts, 1000, (share, precision), 1);
            let chances = drawn.chances.clone();
            let mean = chances.iter().flatten().sum::<f64>() / 8.0;
            assert!((mean - share).abs() < 1e-3, "{mean}");
            assert!(chances[0].windows(2).all(|pair| pair[0] >= pair[1] - 1e-3) && chances[0][0] <= 1.0);
            // Of the rarest only what is computed in vain.
            let in_vain = share * (1.0 - precision) / (1.0 - 3000.0 / 8000.0);
            assert!((chances[0][3] - in_vain).abs() < 2e-3, "{chances:?}");
            let (mut list, mut found) = (Vec::new(), [0.0; 4]);
            for _ in 0..4000 {
                drawn.next(0, &mut list);
                list.iter().for_each(|n| found[n.index()] += 1.0 / 4000.0);
            }
            let even = Drawn::new(&[vec![0; 4]], 0, (share, precision), 1).chances;
            assert!(even[0].iter().all(|chance| (chance - share).abs() < 1e-9), "{even:?}");
            assert!((0..4).all(|n| (found[n] - chances[0][n]).abs() < 0.03), "{found:?} {chances:?}");
        }
    }
}
