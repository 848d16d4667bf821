//! A needed neuron that is missing replaces a random one: the baseline that a policy has to beat.

use super::greedy::Move;
use super::{ChooseMoves, Entry, LayerState, Rules, Scratch, replace_least};

pub(super) const ENTRY: Entry = Entry {
    name: "random",
    about: "what is needed replaces anything",
    rules: Rules::REPLACING,
    start: |_, _, _| Box::new(Random),
};

struct Random;

impl ChooseMoves for Random {
    fn choose(&mut self, at: &LayerState<'_>, most: usize, scratch: &mut Scratch, moves: &mut Vec<Move>) {
        let Scratch { worth, lists, prng } = scratch;
        let chance = (0..at.last.len()).map(|_| prng.next_f64() as f32);
        replace_least(at, most, chance, worth, lists, moves);
    }
}
