//! PowerInfer-2's cache (section 4.2): two queues, active and inactive, both in the order in which their neurons were computed last. A neuron
//! joins the inactive queue when it has come, and the active one when it is computed again. Where the active queue has more than 90 % of
//! the slots, its oldest go back to the inactive queue. Who is evicted is the oldest of the inactive queue.
//!
//! The order is that of the last use, so that the numbers of uses stand for both queues. Particular to this cache: who the coming use needs
//! is passed over, and where the inactive queue has no other the oldest of the active one goes.

use super::greedy::Move;
use super::{ChooseMoves, Entry, LayerState, Rules, Scratch};
use crate::cache::Slot;
use crate::ids::{SlotId, StoreId};

pub(super) const ENTRY: Entry = Entry {
    name: "two-queues",
    about: "what is needed replaces the oldest of those that were computed only once since they came",
    rules: Rules::REPLACING,
    start: |layers, ffn, _| Box::new(TwoQueues { layers: (0..layers).map(|_| Queues::new(ffn)).collect() }),
};

/// Of ten slots, those that the active queue may have (4.2).
const ACTIVE_OF_TEN: usize = 9;

struct TwoQueues {
    layers: Vec<Queues>,
}

/// One layer's.
struct Queues {
    /// By neuron: the number of its last use since it came, 0 before the first, `[ffn]`.
    used: Vec<u64>,
    /// By neuron: whether it is in the active queue, `[ffn]`.
    active: Vec<bool>,
    /// By neuron: whether it is resident, `[ffn]`.
    here: Vec<bool>,
    uses: u64,
    /// Residents in the order in which they would go: queue, last use, slot.
    order: Vec<(bool, u64, u32)>,
}

impl Queues {
    /// For at most `ffn` slots: nothing is allocated later.
    fn new(ffn: usize) -> Queues {
        let none = || vec![false; ffn];
        Queues { used: vec![0; ffn], active: none(), here: none(), uses: 0, order: Vec::with_capacity(ffn) }
    }

    /// Follows the slots: who has left is in no queue.
    fn follow(&mut self, slots: &[Slot]) {
        self.here.fill(false);
        slots.iter().filter_map(|slot| slot.resident()).for_each(|neuron| self.here[neuron.index()] = true);
        for (at, here) in self.here.iter().enumerate() {
            self.used[at] *= u64::from(*here);
            self.active[at] &= here;
        }
    }

    /// Sorts the first `most` of the residents that may go.
    fn sort(&mut self, slots: &[Slot], most: usize, may_go: impl Fn(StoreId, bool) -> bool) {
        let Queues { used, active, order, .. } = self;
        let entry = |(slot, held): (usize, &Slot)| {
            let neuron = held.resident()?;
            let active = active[neuron.index()];
            may_go(neuron, active).then(|| (active, used[neuron.index()], slot as u32))
        };
        order.clear();
        order.extend(slots.iter().enumerate().filter_map(entry));
        if most < order.len() {
            order.select_nth_unstable(most);
            order.truncate(most);
        }
        order.sort_unstable();
    }
}

impl ChooseMoves for TwoQueues {
    fn computed(&mut self, at: &LayerState<'_>, neurons: &[StoreId]) {
        let queues = &mut self.layers[at.layer];
        queues.follow(at.slots);
        for neuron in neurons.iter().map(|n| n.index()).filter(|n| queues.here[*n]) {
            queues.uses += 1;
            queues.active[neuron] |= queues.used[neuron] != 0;
            queues.used[neuron] = queues.uses;
        }
        let count = queues.active.iter().filter(|active| **active).count();
        let most = at.slots.len() * ACTIVE_OF_TEN / 10;
        if count > most {
            queues.sort(at.slots, count - most, |_, active| active);
            for &(_, _, slot) in &queues.order {
                let neuron = at.slots[slot as usize].resident().expect("only residents are sorted");
                queues.active[neuron.index()] = false;
            }
        }
    }

    fn choose(&mut self, at: &LayerState<'_>, most: usize, _scratch: &mut Scratch, moves: &mut Vec<Move>) {
        let queues = &mut self.layers[at.layer];
        queues.follow(at.slots);
        let needed = |neuron: &StoreId| at.needs(*neuron) && !queues.here[neuron.index()];
        let wanted = (0..at.last.len() as u32).map(StoreId).filter(needed).count().min(most);
        if wanted == 0 {
            return;
        }
        queues.sort(at.slots, wanted, |neuron, _| !at.needs(neuron));
        let free = (0..at.slots.len()).filter(|&slot| at.slots[slot] == Slot::Free).map(SlotId::new);
        let slots = free.chain(queues.order.iter().map(|&(_, _, slot)| SlotId(slot)));
        let neurons = (0..at.last.len() as u32).map(StoreId).filter(|n| at.needs(*n) && !queues.here[n.index()]);
        moves.extend(slots.zip(neurons).take(most).map(|(slot, neuron)| Move::new(slot, neuron)));
    }
}

#[cfg(test)]
mod tests {
    use crate::scheduler::Policy;
    use crate::scheduler::policy::testing::{FREE, Story};

    #[test]
    fn who_was_computed_twice_stays_before_who_was_computed_once_later() {
        let mut story = Story::new(Policy::TwoQueues, 12, &[0, 1, 2, 3]);
        story.token(&[0, 1]);
        story.token(&[0, 1]);
        // 2 and 3 come to their first use later than the last one of 0 and 1, which are in the active queue.
        story.token(&[2, 3]);
        assert_eq!(story.needs(&[5]), [0, 1, 5, 3]);
        assert_eq!(story.needs(&[6, 5]), [0, 1, 5, 6]);
        // Nobody is left in the inactive queue who is not needed: the oldest of the active one goes.
        assert_eq!(story.needs(&[5, 6, 7]), [7, 1, 5, 6]);
    }

    /// A scan passes through the inactive queue and leaves what is used again alone, as lru would not.
    #[test]
    fn what_is_used_once_does_not_displace_what_is_used_again() {
        let mut story = Story::new(Policy::TwoQueues, 40, &[0, 1, 2, FREE, FREE, FREE]);
        story.token(&[0, 1, 2]);
        story.token(&[0, 1, 2]);
        for n in 10..30 {
            story.needs(&[n]);
            story.token(&[n]);
        }
        let held = story.needs(&[]);
        assert!(held[..3] == [0, 1, 2] && held.contains(&29), "{held:?}");
    }

    /// 90 % of ten slots are nine: the oldest of ten that were used twice is the first to go.
    #[test]
    fn the_active_queue_has_nine_of_ten_slots() {
        let all: Vec<u32> = (0..10).collect();
        let mut story = Story::new(Policy::TwoQueues, 40, &all);
        story.token(&all);
        story.token(&all);
        let mut expected = all.clone();
        expected[0] = 20;
        assert_eq!(story.needs(&[20]), expected);
    }
}
