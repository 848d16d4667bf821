//! Counts which neurons are active while a model runs, for the next start of the program to begin with.

use super::message::SentObservation;

/// Tokens after which all counts are halved: older texts count less and less.
const MAX_TOKENS: u64 = 1 << 16;

/// In how many tokens each neuron was active. Neurons are in the store's order.
#[derive(Clone, Debug)]
pub struct Learnt {
    /// `[layers][movable]`
    counts: Vec<Vec<u32>>,
    /// Tokens that were counted, `[layers]`; an observation that was lost is missing in its layer only.
    tokens: Vec<u64>,
    /// Of these, tokens since the start, however long ago.
    new: Vec<u64>,
}

impl Learnt {
    /// Goes on from these frequencies, 0 to 1, `[layers][movable]`, which were counted in `tokens` tokens.
    pub fn new(frequencies: &[Vec<f32>], tokens: u64) -> Learnt {
        let tokens = tokens.min(MAX_TOKENS / 2);
        let count = |f: &f32| (f64::from(*f) * tokens as f64).round() as u32;
        let counts: Vec<Vec<u32>> = frequencies.iter().map(|layer| layer.iter().map(count).collect()).collect();
        Learnt { tokens: vec![tokens; counts.len()], new: vec![0; counts.len()], counts }
    }

    /// Counts what an observation says of the layer before it, or of a prompt's chunk.
    pub(super) fn observe(&mut self, seen: &SentObservation) {
        if let Some(layer) = seen.fired_layer {
            let masks = seen.fired.masks.iter().map(|mask| mask.count_ones());
            self.count(layer, seen.fired.neurons.iter().map(|n| n.index()).zip(masks), seen.fired_sequences.len());
        }
        // Of a chunk of few tokens the neurons that fired come by themselves.
        if let Some(tokens) = seen.prompt.filter(|_| seen.residual.is_empty()) {
            let counts = seen.counts.iter().copied();
            self.count(seen.layer.index(), seen.computed.iter().map(|n| n.index()).zip(counts), tokens);
        }
    }

    /// Adds neurons of a layer, each with how many of `tokens` tokens it was active for.
    fn count(&mut self, layer: usize, active: impl Iterator<Item = (usize, u32)>, tokens: usize) {
        let counts = &mut self.counts[layer];
        active.for_each(|(neuron, tokens)| counts[neuron] += tokens);
        self.tokens[layer] += tokens as u64;
        self.new[layer] += tokens as u64;
        if self.tokens[layer] > MAX_TOKENS {
            counts.iter_mut().for_each(|count| *count /= 2);
            self.tokens[layer] /= 2;
        }
    }

    /// In how many tokens the neurons were counted, in the layer of which the most is known.
    pub fn tokens(&self) -> u64 {
        self.tokens.iter().copied().max().unwrap_or(0)
    }

    /// The same of the tokens since the start.
    pub fn new_tokens(&self) -> u64 {
        self.new.iter().copied().max().unwrap_or(0)
    }

    /// How often each neuron was active, 0 to 1, `[layers][movable]`.
    pub fn frequencies(&self) -> Vec<Vec<f32>> {
        let layers = self.counts.iter().zip(&self.tokens);
        let of = |(counts, tokens): (&Vec<u32>, &u64)| {
            counts.iter().map(|&n| (n as f32 / (*tokens).max(1) as f32).min(1.0)).collect()
        };
        layers.map(of).collect()
    }
}

/// What is done with the counts: on the scheduler's thread after each observation, and on the engine's at the end, with `true`.
pub type Keep = Box<dyn FnMut(&Learnt, bool) + Send>;

/// Counts, and has the counts kept.
pub struct Learner {
    /// The counts so far.
    pub learnt: Learnt,
    /// Keeps them.
    pub keep: Keep,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Selection;
    use crate::ids::{LayerId, StoreId};

    /// A token of one layer in which these neurons were active.
    fn token(neurons: &[u32]) -> SentObservation {
        let fired =
            Selection { neurons: neurons.iter().copied().map(StoreId).collect(), masks: vec![1; neurons.len()] };
        let residual = vec![0.0; 4];
        SentObservation {
            fired_layer: Some(0),
            fired,
            fired_sequences: vec![7],
            residual,
            ..SentObservation::default()
        }
    }

    #[test]
    fn frequencies_are_shares_of_all_tokens_those_before_the_start_included() {
        let mut learnt = Learnt::new(&[vec![0.5, 0.0, 0.25]], 100);
        assert_eq!((learnt.tokens(), learnt.new_tokens()), (100, 0));
        (0..100).for_each(|t| learnt.observe(&token(if t % 2 == 0 { &[1, 2] } else { &[1] })));
        assert_eq!((learnt.tokens(), learnt.new_tokens()), (200, 100));
        assert_eq!(learnt.frequencies(), [[0.25, 0.5, 0.375]]);
        // A prompt's chunk comes as counts, of its own layer.
        let (computed, counts) = (vec![StoreId(0)], vec![40]);
        let chunk =
            SentObservation { layer: LayerId::new(0), prompt: Some(200), computed, counts, ..Default::default() };
        learnt.observe(&chunk);
        assert_eq!(learnt.frequencies(), [[90.0 / 400.0, 0.25, 75.0 / 400.0]]);
    }

    #[test]
    fn what_was_long_ago_counts_less_and_nothing_overflows() {
        let mut learnt = Learnt::new(&[vec![1.0, 0.0]], u64::MAX);
        assert_eq!(learnt.tokens(), MAX_TOKENS / 2);
        (0..4 * MAX_TOKENS).for_each(|_| learnt.observe(&token(&[1])));
        let f = &learnt.frequencies()[0];
        assert!(f[0] < 0.05 && f[1] > 0.95 && f[1] <= 1.0, "{f:?}");
        assert!(learnt.tokens() <= MAX_TOKENS);
        assert_eq!(learnt.new_tokens(), 4 * MAX_TOKENS);
    }
}
