//! Fill and evict (DynamicInfer E.3.4): the neurons worth most that are not on the device take the slots of the residents worth least, as
//! many as the link allows.

use crate::cache::Slot;
use crate::ids::{SlotId, StoreId};

/// Brings a neuron into a slot of its layer. Only policies make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    slot: SlotId,
    neuron: StoreId,
}

impl Move {
    pub(super) fn new(slot: SlotId, neuron: StoreId) -> Move {
        Move { slot, neuron }
    }

    /// The slot in its layer.
    pub fn slot(self) -> SlotId {
        self.slot
    }

    /// The neuron. Where a trace is replayed, the store is in the published order.
    pub fn neuron(self) -> StoreId {
        self.neuron
    }
}

/// Memory for [`choose`], kept between calls.
#[derive(Clone, Debug, Default)]
pub struct Lists {
    /// Whether each neuron is resident, `[ffn]`.
    here: Vec<bool>,
    /// Importance and neuron of those that may come.
    coming: Vec<(f32, StoreId)>,
    /// Importance of its neuron, and slot, of those that may be replaced.
    going: Vec<(f32, SlotId)>,
}

impl Lists {
    /// For layers of `ffn` neurons: nothing is allocated later.
    pub fn new(ffn: usize) -> Lists {
        Lists { here: Vec::with_capacity(ffn), coming: Vec::with_capacity(ffn), going: Vec::with_capacity(ffn) }
    }
}

/// Writes at most `most` moves to `moves`, the best first. `slots` is what each slot holds; `v` is the importance of each neuron, `[ffn]`.
/// A resident with `stays(neuron)` is never replaced. A newcomer must exceed the resident's importance by more than `margin`, or 0 if the
/// slot is free, and must not be `left_out(neuron)`.
#[allow(clippy::too_many_arguments)]
pub fn choose(
    slots: &[Slot],
    v: &[f32],
    most: usize,
    margin: f32,
    stays: impl Fn(StoreId) -> bool,
    left_out: impl Fn(StoreId) -> bool,
    lists: &mut Lists,
    moves: &mut Vec<Move>,
) {
    moves.clear();
    let Lists { here, coming, going } = lists;
    here.clear();
    here.resize(v.len(), false);
    going.clear();
    coming.clear();
    if most == 0 {
        return;
    }
    let mut weakest = f32::INFINITY;
    for (slot, &held) in slots.iter().enumerate() {
        let slot = SlotId(slot as u32);
        match held {
            Slot::Filling(_) => {}
            Slot::Free => {
                going.push((f32::NEG_INFINITY, slot));
                weakest = f32::NEG_INFINITY;
            }
            Slot::Resident(neuron) => {
                here[neuron.index()] = true;
                if !stays(neuron) {
                    going.push((v[neuron.index()], slot));
                    weakest = weakest.min(v[neuron.index()]);
                }
            }
        }
    }
    // A neuron that cannot replace even the weakest resident is no candidate: of thousands of neurons this leaves tens.
    let least = if weakest == f32::NEG_INFINITY { 0.0 } else { weakest + margin };
    let outside = v.iter().enumerate().filter(|&(n, &v)| v > least && !here[n] && !left_out(StoreId(n as u32)));
    coming.extend(outside.map(|(n, &v)| (v, StoreId(n as u32))));
    let most = most.min(coming.len()).min(going.len());
    if most == 0 {
        return;
    }
    // Ties are broken by number, so that the result depends on nothing else.
    let best = |a: &(f32, StoreId), b: &(f32, StoreId)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
    let worst = |a: &(f32, SlotId), b: &(f32, SlotId)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
    take_first(coming, most, best);
    take_first(going, most, worst);
    let pairs = coming.iter().zip(going.iter());
    let pays = |(new, old): &(&(f32, StoreId), &(f32, SlotId))| old.0 == f32::NEG_INFINITY || new.0 > old.0 + margin;
    moves.extend(pairs.take_while(pays).map(|(new, old)| Move::new(old.1, new.1)));
}

/// Keeps the first `n` in this order, sorted, and drops the rest.
fn take_first<T>(all: &mut Vec<T>, n: usize, order: impl Fn(&T, &T) -> std::cmp::Ordering + Copy) {
    if n < all.len() {
        all.select_nth_unstable_by(n - 1, order);
        all.truncate(n);
    }
    all.sort_unstable_by(order);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::policy::testing::{FILLING, FREE, slots};
    use proptest::prelude::*;

    fn run(held: &[u32], v: &[f32], most: usize, margin: f32, pinned: &[u32]) -> Vec<Move> {
        let mut moves = Vec::new();
        let stays = |n: StoreId| pinned.contains(&n.0);
        choose(&slots(held), v, most, margin, stays, |_| false, &mut Lists::default(), &mut moves);
        moves
    }

    fn to(slot: u32, neuron: u32) -> Move {
        Move::new(SlotId(slot), StoreId(neuron))
    }

    #[test]
    fn the_best_newcomer_takes_the_worst_place_and_pinned_ones_stay() {
        let v = [0.1, 0.9, 0.5, 0.8, 0.0, 0.7];
        // Residents 0, 2, 4; 4 is pinned although nobody is less important.
        assert_eq!(run(&[0, 2, 4], &v, 9, 0.0, &[4]), [to(0, 1), to(1, 3)]);
        assert_eq!(run(&[0, 2, 4], &v, 1, 0.0, &[]), [to(2, 1)]);
        assert_eq!(run(&[0, 2, 4], &v, 9, 0.65, &[]), [to(2, 1), to(0, 3)]);
    }

    #[test]
    fn free_slots_go_first_and_slots_being_filled_are_left_alone() {
        let v = [0.1, 0.9, 0.5, 0.0];
        assert_eq!(run(&[0, FREE, FILLING], &v, 1, 0.0, &[]), [to(1, 1)]);
        // Nobody comes who is worth nothing.
        assert_eq!(run(&[FREE, FREE], &[0.0, 0.0], 2, 0.0, &[]), []);
    }

    proptest! {
        /// Whatever lies where: as many residents as before, nobody twice, and with no margin the sum of importance is the largest
        /// that so many moves can reach.
        #[test]
        fn no_other_moves_are_worth_more(seed in any::<u64>(), ffn in 2usize..9, most in 0usize..5) {
            let mut prng = crate::prng::Prng::new(seed);
            let v: Vec<f32> = (0..ffn).map(|_| prng.below(6) as f32 / 5.0).collect();
            let slots: Vec<u32> = (0..ffn as u32).filter(|_| prng.below(2) == 0).collect();
            let moves = run(&slots, &v, most, 0.0, &[]);
            prop_assert!(moves.len() <= most);
            let mut after = slots.clone();
            moves.iter().for_each(|m| after[m.slot.index()] = m.neuron.0);
            let mut unique = after.clone();
            unique.sort_unstable();
            unique.dedup();
            prop_assert_eq!(unique.len(), slots.len());
            let worth = |set: &[u32]| set.iter().map(|&n| v[n as usize]).sum::<f32>();
            // Every set of the same size that differs in at most `most` places.
            for other in 0u32..1 << ffn {
                let set: Vec<u32> = (0..ffn as u32).filter(|n| other >> n & 1 == 1).collect();
                let new = set.iter().filter(|n| !slots.contains(n)).count();
                if set.len() == slots.len() && new <= most {
                    prop_assert!(worth(&set) <= worth(&after) + 1e-5);
                }
            }
        }
    }
}
