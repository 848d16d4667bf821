//! PowerInfer-2's cache (section 4.2): two queues, active and inactive, both in the order in which their neurons were computed last. A neuron
//! joins the inactive queue when it has come, and the active one when it is computed again. Where the active queue has more than 90 % of
//! the slots, its oldest go back to the inactive queue. The oldest of the inactive queue is evicted.
//!
//! Particular to this cache: neurons that the coming use needs are passed over, and where the inactive queue has no other, the oldest of the
//! active one is evicted.

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

/// The two queues, and being in neither.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Queue {
    None,
    Inactive,
    Active,
}

/// A neuron's place in its queue.
#[derive(Clone, Copy)]
struct Link {
    queue: Queue,
    /// The neurons that were computed just after and just before it, in a ring with the queue's end.
    newer: u32,
    older: u32,
    /// The number of its last use since it came, 0 before the first.
    used: u64,
    /// Its slot, as of look number `seen`.
    slot: u32,
    seen: u32,
}

/// One layer's.
struct Queues {
    /// By neuron, and behind them the ends of both queues, `[ffn + 2]`.
    links: Vec<Link>,
    active: usize,
    uses: u64,
    looks: u32,
}

impl Queues {
    /// For layers of `ffn` neurons: nothing is allocated later.
    fn new(ffn: usize) -> Queues {
        let link =
            |at: usize| Link { queue: Queue::None, newer: at as u32, older: at as u32, used: 0, slot: 0, seen: 0 };
        Queues { links: (0..ffn + 2).map(link).collect(), active: 0, uses: 0, looks: 0 }
    }

    /// The end of a queue: its newest is the older neighbour of that, and its oldest the newer one.
    fn end(&self, queue: Queue) -> usize {
        self.links.len() - if queue == Queue::Active { 1 } else { 2 }
    }

    /// From the oldest of a queue to its newest.
    fn oldest_first(&self, queue: Queue) -> impl Iterator<Item = usize> {
        let end = self.end(queue);
        let next = move |at: usize| Some(self.links[at].newer as usize).filter(|&at| at != end);
        std::iter::successors(next(end), move |&at| next(at))
    }

    fn leave(&mut self, neuron: usize) {
        let Link { queue, newer, older, .. } = self.links[neuron];
        if queue != Queue::None {
            self.links[newer as usize].older = older;
            self.links[older as usize].newer = newer;
            self.active -= usize::from(queue == Queue::Active);
            self.links[neuron].queue = Queue::None;
        }
    }

    /// Puts a neuron that is in no queue into one, behind `older`.
    fn join(&mut self, neuron: usize, queue: Queue, older: usize) {
        let newer = self.links[older].newer;
        let link = &mut self.links[neuron];
        (link.queue, link.newer, link.older) = (queue, newer, older as u32);
        self.links[older].newer = neuron as u32;
        self.links[newer as usize].older = neuron as u32;
        self.active += usize::from(queue == Queue::Active);
    }

    /// Follows the slots: evicted neurons leave their queue, and new ones join the inactive one, before all that were used.
    fn follow(&mut self, slots: &[Slot]) {
        self.looks = self.looks.wrapping_add(1);
        // Of those that come together the one in the first slot is the oldest.
        for (slot, held) in slots.iter().enumerate().rev() {
            let Some(neuron) = held.resident() else { continue };
            let link = &mut self.links[neuron.index()];
            (link.slot, link.seen) = (slot as u32, self.looks);
            if link.queue == Queue::None {
                link.used = 0;
                self.join(neuron.index(), Queue::Inactive, self.end(Queue::Inactive));
            }
        }
        for neuron in 0..self.links.len() - 2 {
            if self.links[neuron].seen != self.looks {
                self.leave(neuron);
            }
        }
    }
}

impl ChooseMoves for TwoQueues {
    fn computed(&mut self, at: &LayerState<'_>, neurons: &[StoreId]) {
        let queues = &mut self.layers[at.layer];
        queues.follow(at.slots);
        for neuron in neurons.iter().map(|n| n.index()) {
            let Link { queue, used, .. } = queues.links[neuron];
            if queue == Queue::None {
                continue;
            }
            let queue = if used > 0 { Queue::Active } else { Queue::Inactive };
            queues.uses += 1;
            queues.leave(neuron);
            queues.links[neuron].used = queues.uses;
            queues.join(neuron, queue, queues.links[queues.end(queue)].older as usize);
        }
        let most = at.slots.len() * ACTIVE_OF_TEN / 10;
        while queues.active > most {
            let oldest = queues.links[queues.end(Queue::Active)].newer as usize;
            let used = queues.links[oldest].used;
            // The order of the inactive queue is that of the last use, too. Few of it were used before the oldest of the active one.
            let before = queues.oldest_first(Queue::Inactive).take_while(|&n| queues.links[n].used < used).last();
            queues.leave(oldest);
            queues.join(oldest, Queue::Inactive, before.unwrap_or(queues.end(Queue::Inactive)));
        }
    }

    fn choose(&mut self, at: &LayerState<'_>, most: usize, _scratch: &mut Scratch, moves: &mut Vec<Move>) {
        let queues = &mut self.layers[at.layer];
        queues.follow(at.slots);
        let here = |neuron: StoreId| queues.links[neuron.index()].queue != Queue::None;
        let wanted = (0..at.last.len() as u32).map(StoreId).filter(|&n| at.needs(n) && !here(n)).take(most);
        let free = (0..at.slots.len()).filter(|&slot| at.slots[slot] == Slot::Free).map(SlotId::new);
        let oldest = queues.oldest_first(Queue::Inactive).chain(queues.oldest_first(Queue::Active));
        let goes = oldest.filter(|&n| !at.needs(StoreId::new(n))).map(|n| SlotId(queues.links[n].slot));
        moves.extend(wanted.zip(free.chain(goes)).map(|(neuron, slot)| Move::new(slot, neuron)));
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
        // All in the inactive queue are needed: the oldest of the active one is evicted.
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
