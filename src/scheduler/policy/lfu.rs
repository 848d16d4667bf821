//! Least frequently used, with ageing: a needed neuron that is missing replaces the one computed least often. Counts are halved every so
//! many tokens, so that neurons that an earlier part of the text needed do not stay for ever (the reset of TinyLFU, Einziger et al. 2017).

use super::greedy::Move;
use super::{ChooseMoves, Entry, LayerState, Rules, Scratch, replace_least};
use crate::ids::StoreId;

pub(super) const ENTRY: Entry = Entry {
    name: "lfu",
    about: "what is needed replaces what was computed least often of late",
    rules: Rules::REPLACING,
    start: |layers, ffn, _| Box::new(Lfu { layers: vec![Counts { of: vec![0; ffn], tokens: 0 }; layers] }),
};

/// Tokens after which counts are halved: about the memory of the frequencies (0.96 a token), so that the two can be compared.
const AGE: u32 = 32;
/// A bound that no count reaches: a count is at most half of what it was before, plus [`AGE`].
const MAX_COUNT: f32 = 2.0 * AGE as f32;

#[derive(Clone)]
struct Counts {
    /// For how many of the last tokens each neuron was computed, older ones halved, `[ffn]`.
    of: Vec<u32>,
    /// Tokens since the counts were halved.
    tokens: u32,
}

struct Lfu {
    layers: Vec<Counts>,
}

impl ChooseMoves for Lfu {
    fn computed(&mut self, at: &LayerState<'_>, neurons: &[StoreId]) {
        let counts = &mut self.layers[at.layer];
        if counts.tokens == AGE {
            counts.tokens = 0;
            counts.of.iter_mut().for_each(|count| *count /= 2);
        }
        counts.tokens += 1;
        neurons.iter().for_each(|&n| counts.of[n.index()] += 1);
    }

    fn choose(&mut self, at: &LayerState<'_>, most: usize, scratch: &mut Scratch, moves: &mut Vec<Move>) {
        let counts = self.layers[at.layer].of.iter().map(|&count| count as f32 / MAX_COUNT);
        replace_least(at, most, counts, &mut scratch.worth, &mut scratch.lists, moves);
    }
}

#[cfg(test)]
mod tests {
    use super::AGE;
    use crate::scheduler::Policy;
    use crate::scheduler::policy::testing::Story;

    #[test]
    fn the_newcomer_takes_the_place_of_whoever_was_computed_least_often() {
        let mut story = Story::new(Policy::Lfu, 8, &[0, 1, 2]);
        story.token(&[0, 1]);
        story.token(&[0, 2]);
        story.token(&[0, 2]);
        // 0 three times, 2 twice, 1 once.
        assert_eq!(story.needs(&[5]), [0, 5, 2]);
        // What has come has been computed once, on the CPU or here, and goes before what was computed twice.
        story.token(&[5]);
        assert_eq!(story.needs(&[6]), [0, 6, 2]);
        // A needed neuron stays, however seldom it was needed.
        assert_eq!(story.needs(&[6, 7]), [0, 6, 7]);
    }

    /// Without ageing the neurons of a first chapter would hold their slots through all of the second.
    #[test]
    fn what_was_frequent_long_ago_goes_before_what_is_frequent_now() {
        let mut story = Story::new(Policy::Lfu, 8, &[0, 1]);
        (0..3 * AGE).for_each(|_| story.token(&[0]));
        (0..2 * AGE).for_each(|_| story.token(&[1]));
        assert_eq!(story.needs(&[5]), [5, 1]);
    }
}
