//! A needed neuron that is missing replaces the one computed longest ago.

use super::greedy::Move;
use super::{ChooseMoves, Entry, LayerState, Rules, Scratch, replace_least};

pub(super) const ENTRY: Entry = Entry {
    name: "lru",
    about: "what is needed replaces what was computed longest ago",
    rules: Rules::REPLACING,
    start: |_, _, _| Box::new(Lru),
};

struct Lru;

impl ChooseMoves for Lru {
    fn choose(&mut self, at: &LayerState<'_>, most: usize, scratch: &mut Scratch, moves: &mut Vec<Move>) {
        let recency = at.last.iter().map(|&t| t as f32 / (at.token as f32 + 1.0));
        replace_least(at, most, recency, &mut scratch.worth, &mut scratch.lists, moves);
    }
}

#[cfg(test)]
mod tests {
    use crate::scheduler::Policy;
    use crate::scheduler::policy::testing::Story;

    #[test]
    fn the_newcomer_takes_the_place_of_whoever_was_computed_longest_ago() {
        let mut story = Story::new(Policy::Lru, 8, &[0, 1, 2]);
        story.token(&[0, 1, 2]);
        story.token(&[1, 2]);
        story.token(&[0, 1]);
        assert_eq!(story.needs(&[5]), [0, 1, 5]);
        story.token(&[1, 5]);
        assert_eq!(story.needs(&[6]), [6, 1, 5]);
    }
}
