//! SIEVE (Zhang et al., NSDI 2024): residents are queued in the order in which they came. A neuron that is computed is marked as visited
//! and keeps its position. To evict one, a hand moves from the oldest towards the newest, removes the marks that it finds, and stops at the
//! first neuron without one, which is evicted. The hand stays there for the next time, so that a neuron that was computed is looked at
//! again only after all newer ones.
//!
//! Two things are particular to this cache: a neuron joins the queue when its copy has arrived, because it cannot be evicted before; and
//! the hand passes over neurons that the coming use needs.

use super::greedy::Move;
use super::{ChooseMoves, Entry, LayerState, Rules, Scratch};
use crate::cache::Slot;
use crate::device::NONE;
use crate::ids::{SlotId, StoreId};

pub(super) const ENTRY: Entry = Entry {
    name: "sieve",
    about: "what is needed replaces the oldest that was not computed since a hand passed it",
    rules: Rules::REPLACING,
    start: |layers, ffn, _| Box::new(Sieve { layers: (0..layers).map(|_| Queue::new(ffn)).collect() }),
};

struct Sieve {
    layers: Vec<Queue>,
}

/// The slots of one layer in the order in which their neurons came: a doubly linked list by slot.
struct Queue {
    /// By slot: its neuron while it is in the queue, else [`NONE`].
    neurons: Vec<u32>,
    /// By slot: the one that came before it.
    older: Vec<u32>,
    /// By slot: the one that came after it.
    newer: Vec<u32>,
    oldest: u32,
    newest: u32,
    /// Where the search goes on; [`NONE`] for the oldest.
    hand: u32,
    /// By neuron: whether it was computed since the hand passed it, `[ffn]`.
    visited: Vec<bool>,
    /// By neuron: whether it is in the queue, `[ffn]`.
    here: Vec<bool>,
}

impl Queue {
    /// For at most `ffn` slots: nothing is allocated later.
    fn new(ffn: usize) -> Queue {
        let slots = || Vec::with_capacity(ffn);
        Queue {
            neurons: slots(),
            older: slots(),
            newer: slots(),
            oldest: NONE,
            newest: NONE,
            hand: NONE,
            visited: vec![false; ffn],
            here: vec![false; ffn],
        }
    }

    /// Follows the slots: neurons that left are removed, those that arrived become the newest.
    fn follow(&mut self, slots: &[Slot]) {
        let held = |slot: &Slot| slot.resident().map_or(NONE, |neuron| neuron.0);
        let before = self.neurons.len();
        for slot in 0..before {
            let now = slots.get(slot).map_or(NONE, held);
            if self.neurons[slot] != NONE && self.neurons[slot] != now {
                self.leave(slot as u32);
            }
        }
        for list in [&mut self.neurons, &mut self.older, &mut self.newer] {
            list.resize(slots.len(), NONE);
        }
        for (slot, now) in slots.iter().map(held).enumerate() {
            if now != NONE && self.neurons[slot] == NONE {
                self.come(slot as u32, now);
            }
        }
    }

    fn come(&mut self, slot: u32, neuron: u32) {
        let at = slot as usize;
        (self.neurons[at], self.older[at], self.newer[at]) = (neuron, self.newest, NONE);
        (self.here[neuron as usize], self.visited[neuron as usize]) = (true, false);
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.newer[newest as usize] = slot,
        }
        self.newest = slot;
    }

    fn leave(&mut self, slot: u32) {
        let at = slot as usize;
        let (older, newer) = (self.older[at], self.newer[at]);
        match older {
            NONE => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        if self.hand == slot {
            self.hand = newer;
        }
        self.here[self.neurons[at] as usize] = false;
        self.neurons[at] = NONE;
    }

    /// Removes a neuron from the queue and returns its slot; `None` if all are needed.
    fn evict(&mut self, needs: impl Fn(StoreId) -> bool) -> Option<SlotId> {
        // The first round may only remove marks; the second then finds a neuron without one, unless all are needed.
        for _ in 0..2 * self.neurons.len() {
            let slot = if self.hand == NONE { self.oldest } else { self.hand };
            if slot == NONE {
                return None;
            }
            let neuron = self.neurons[slot as usize];
            self.hand = self.newer[slot as usize];
            if needs(StoreId(neuron)) {
                continue;
            }
            if !std::mem::take(&mut self.visited[neuron as usize]) {
                self.leave(slot);
                return Some(SlotId(slot));
            }
        }
        None
    }
}

impl ChooseMoves for Sieve {
    fn computed(&mut self, at: &LayerState<'_>, neurons: &[StoreId]) {
        let queue = &mut self.layers[at.layer];
        queue.follow(at.slots);
        for neuron in neurons {
            queue.visited[neuron.index()] = queue.here[neuron.index()];
        }
    }

    fn choose(&mut self, at: &LayerState<'_>, most: usize, _scratch: &mut Scratch, moves: &mut Vec<Move>) {
        let queue = &mut self.layers[at.layer];
        queue.follow(at.slots);
        let mut free = (0..at.slots.len()).filter(|&slot| at.slots[slot] == Slot::Free);
        for neuron in (0..at.last.len() as u32).map(StoreId) {
            if moves.len() == most {
                return;
            }
            if queue.here[neuron.index()] || !at.needs(neuron) {
                continue;
            }
            let slot = free.next().map(SlotId::new).or_else(|| queue.evict(|n| at.needs(n)));
            let Some(slot) = slot else { return };
            moves.push(Move::new(slot, neuron));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::Policy;
    use crate::scheduler::policy::testing::{FILLING, FREE, Story, slots};

    /// From the oldest to the newest, a star behind those that are marked, the hand before whom it looks at next.
    fn shown(queue: &Queue) -> String {
        let (mut text, mut slot) = (String::new(), queue.oldest);
        while slot != NONE {
            let neuron = queue.neurons[slot as usize];
            let hand = if slot == queue.hand { ">" } else { "" };
            let mark = if queue.visited[neuron as usize] { "*" } else { "" };
            text += &format!("{hand}{neuron}{mark} ");
            slot = queue.newer[slot as usize];
        }
        text.trim_end().to_owned()
    }

    /// The example of the paper's figure: A to G are 0 to 6.
    #[test]
    fn the_hand_passes_who_was_visited_and_stays_where_it_evicted() {
        let mut queue = Queue::new(12);
        queue.follow(&slots(&[0, 1, 2, 3, 4, 5, 6]));
        for visited in [0, 1, 6] {
            queue.visited[visited] = true;
        }
        assert_eq!(shown(&queue), "0* 1* 2 3 4 5 6*");
        // For 7: 0 and 1 lose their marks, 2 goes.
        assert_eq!(queue.evict(|_| false), Some(SlotId(2)));
        assert_eq!(shown(&queue), "0 1 >3 4 5 6*");
        queue.follow(&slots(&[0, 1, 7, 3, 4, 5, 6]));
        assert_eq!(shown(&queue), "0 1 >3 4 5 6* 7");
        // 0 is computed again and the hand does not pass it; for 8 the hand goes on from where it was.
        queue.visited[0] = true;
        assert_eq!(queue.evict(|_| false), Some(SlotId(3)));
        queue.follow(&slots(&[0, 1, 7, 8, 4, 5, 6]));
        assert_eq!(shown(&queue), "0* 1 >4 5 6* 7 8");
        assert_eq!(
            (queue.evict(|_| false), queue.evict(|_| false), queue.evict(|_| false)),
            (Some(SlotId(4)), Some(SlotId(5)), Some(SlotId(2)))
        );
        assert_eq!(shown(&queue), "0* 1 6 >8");
        // Round the end to the oldest.
        assert_eq!((queue.evict(|_| false), queue.evict(|_| false)), (Some(SlotId(3)), Some(SlotId(1))));
        assert_eq!(shown(&queue), "0 >6");
    }

    #[test]
    fn who_is_needed_stays_with_its_mark_and_where_all_are_needed_nobody_goes() {
        let mut queue = Queue::new(4);
        queue.follow(&slots(&[0, 1, 2]));
        queue.visited[0] = true;
        assert_eq!(queue.evict(|n| n.0 < 2), Some(SlotId(2)));
        assert_eq!(shown(&queue), "0* 1");
        assert_eq!(queue.evict(|_| true), None);
        assert_eq!(shown(&queue), "0* 1");
    }

    /// The budget shrinks and grows, a copy is lost, the plan's placement is restored: the queue holds what the slots hold.
    #[test]
    fn the_queue_follows_the_slots_whatever_becomes_of_them() {
        let mut queue = Queue::new(10);
        queue.follow(&slots(&[0, 1, 2, 3]));
        queue.follow(&slots(&[0, FILLING]));
        assert_eq!(shown(&queue), "0");
        queue.follow(&slots(&[0, FREE, 7, 8, 1]));
        assert_eq!(shown(&queue), "0 7 8 1");
        queue.follow(&slots(&[5, 6, 7, 8, 1]));
        assert_eq!(shown(&queue), "7 8 1 5 6");
        queue.follow(&slots(&[]));
        assert_eq!((shown(&queue).as_str(), queue.evict(|_| false)), ("", None));
    }

    #[test]
    fn newcomers_take_free_slots_first_and_then_those_of_old_ones_that_were_not_computed() {
        let mut story = Story::new(Policy::Sieve, 10, &[0, 1, 2, FREE]);
        story.token(&[0]);
        assert_eq!(story.needs(&[5]), [0, 1, 2, 5]);
        // 0 was computed and keeps its position; 1 was not.
        assert_eq!(story.needs(&[6]), [0, 6, 2, 5]);
        story.token(&[5, 6]);
        assert_eq!(story.needs(&[7]), [0, 6, 7, 5]);
        // The hand stands behind 2, at 5 and 6, which lose their marks; 7 is the newest and goes: a newcomer has to prove itself.
        assert_eq!(story.needs(&[8]), [0, 6, 8, 5]);
    }
}
