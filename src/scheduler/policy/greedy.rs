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
    /// Whether each neuron is resident or on its way, `[ffn]`.
    here: Vec<bool>,
    /// Those that may come, as [`key`] of the negative of their importance, and their number.
    coming: Vec<u64>,
    /// Slots of those that may be replaced, as [`key`] of their neuron's importance, and the slot's number.
    going: Vec<u64>,
}

impl Lists {
    /// For layers of `ffn` neurons: nothing is allocated later.
    pub fn new(ffn: usize) -> Lists {
        Lists { here: Vec::with_capacity(ffn), coming: Vec::with_capacity(ffn), going: Vec::with_capacity(ffn) }
    }
}

/// A number that is ordered as `v` is and, where these are equal, as `number` is. Numbers are compared in one step, and a layer has thousands.
#[inline]
fn key(v: f32, number: usize) -> u64 {
    let bits = v.to_bits();
    // Of negative numbers all bits are turned around, of others the sign.
    let ordered = bits ^ (((bits.cast_signed() >> 31).cast_unsigned()) | 1 << 31);
    u64::from(ordered) << 32 | number as u64
}

/// The number in a key.
fn number(key: u64) -> u32 {
    key as u32
}

/// Writes at most `most` moves to `moves`, the best first. `slots` is what each slot holds; `v` is the importance of each neuron, `[ffn]`.
/// A resident with `stays(neuron)` is never replaced. A newcomer must exceed the resident's importance by more than `margin`, or 0 if the
/// slot is free, and must not be `left_out(neuron)`. Neurons in flight are not candidates, and their slots are not evicted.
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
    let (mut weakest, mut is_free) = (f32::INFINITY, false);
    for &held in slots {
        match held {
            Slot::Filling(neuron) => here[neuron.index()] = true,
            Slot::Free => is_free = true,
            Slot::Resident(neuron) => {
                here[neuron.index()] = true;
                if v[neuron.index()] < weakest && !stays(neuron) {
                    weakest = v[neuron.index()];
                }
            }
        }
    }
    // A neuron that cannot replace even the weakest resident is no candidate, and a resident whom not even the strongest of them can replace is
    // safe: of thousands this leaves tens.
    let least = if is_free { 0.0 } else { weakest + margin };
    let mut strongest = f32::NEG_INFINITY;
    for (n, &worth) in v.iter().enumerate() {
        if !left_out(StoreId::new(n)) && !here[n] && worth > least {
            coming.push(key(-worth, n));
            strongest = strongest.max(worth);
        }
    }
    for (slot, &held) in slots.iter().enumerate() {
        match held {
            Slot::Filling(_) => {}
            Slot::Free => going.push(key(f32::NEG_INFINITY, slot)),
            Slot::Resident(neuron) => {
                let worth = v[neuron.index()];
                if worth + margin < strongest && !stays(neuron) {
                    going.push(key(worth, slot));
                }
            }
        }
    }
    let most = most.min(coming.len()).min(going.len());
    // Ties are broken by number, so that the result depends on nothing else.
    take_first(coming, most);
    take_first(going, most);
    for (&new, &old) in coming.iter().zip(going.iter()) {
        let (neuron, slot) = (StoreId(number(new)), SlotId(number(old)));
        let held = slots[slot.index()].resident();
        if held.is_some_and(|held| v[neuron.index()] <= v[held.index()] + margin) {
            break;
        }
        moves.push(Move::new(slot, neuron));
    }
}

/// Keeps the least `n`, sorted, and drops the rest.
fn take_first(all: &mut Vec<u64>, n: usize) {
    if 0 < n && n < all.len() {
        all.select_nth_unstable(n - 1);
    }
    all.truncate(n);
    all.sort_unstable();
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
        // Residents 0, 2, 4; 4 is pinned although none is less important.
        assert_eq!(run(&[0, 2, 4], &v, 9, 0.0, &[4]), [to(0, 1), to(1, 3)]);
        assert_eq!(run(&[0, 2, 4], &v, 1, 0.0, &[]), [to(2, 1)]);
        assert_eq!(run(&[0, 2, 4], &v, 9, 0.65, &[]), [to(2, 1), to(0, 3)]);
    }

    #[test]
    fn free_slots_go_first_and_slots_being_filled_are_left_alone() {
        let v = [0.1, 0.9, 0.5, 0.0];
        assert_eq!(run(&[0, FREE, FILLING], &v, 1, 0.0, &[]), [to(1, 1)]);
        // Neurons of importance 0 get no slot.
        assert_eq!(run(&[FREE, FREE], &[0.0, 0.0], 2, 0.0, &[]), []);
    }

    /// The rule in plain words: newcomers by importance and number, places by their neuron's importance and number, one by one while it pays.
    fn plainly(slots: &[Slot], v: &[f32], most: usize, margin: f32, stays: &[bool], left_out: &[bool]) -> Vec<Move> {
        let is_there = |held: &Slot, n: usize| match *held {
            Slot::Free => false,
            Slot::Filling(neuron) | Slot::Resident(neuron) => neuron.index() == n,
        };
        let there = |n: usize| slots.iter().any(|held| is_there(held, n));
        let of = |slot: usize| slots[slot].resident().map_or(f32::NEG_INFINITY, |n| v[n.index()]);
        let mut coming: Vec<usize> = (0..v.len()).filter(|&n| !there(n) && !left_out[n] && v[n] > 0.0).collect();
        coming.sort_by(|&a, &b| v[b].total_cmp(&v[a]).then(a.cmp(&b)));
        let may_go = |&slot: &usize| match slots[slot] {
            Slot::Filling(_) => false,
            Slot::Free => true,
            Slot::Resident(n) => !stays[n.index()],
        };
        let mut going: Vec<usize> = (0..slots.len()).filter(may_go).collect();
        going.sort_by(|&a, &b| of(a).total_cmp(&of(b)).then(a.cmp(&b)));
        let pairs = coming.into_iter().zip(going).take(most);
        let paying = pairs.take_while(|&(n, slot)| v[n] > of(slot) + margin);
        paying.map(|(n, slot)| Move::new(SlotId::new(slot), StoreId::new(n))).collect()
    }

    proptest! {
        #[test]
        fn it_is_the_rule_in_plain_words(seed in any::<u64>(), ffn in 1usize..40, most in 0usize..12, margin in 0u32..3) {
            let mut prng = crate::prng::Prng::new(seed);
            // Few values, so that many are equal; none is negative, as no importance is.
            let v: Vec<f32> = (0..ffn).map(|_| prng.below(8) as f32 / 4.0).collect();
            let of_four = |prng: &mut crate::prng::Prng| prng.below(4) == 0;
            let [stays, left_out] = [0; 2].map(|_| (0..ffn).map(|_| of_four(&mut prng)).collect::<Vec<bool>>());
            let held: Vec<u32> = (0..ffn as u32)
                .filter_map(|n| match prng.below(6) {
                    0 => Some(FREE),
                    1 => Some(FILLING),
                    2 | 3 => Some(n),
                    _ => None,
                })
                .filter(|&n| n != FREE || seed % 2 == 0)
                .collect();
            let (slots, margin) = (slots(&held), margin as f32 / 8.0);
            let mut moves = Vec::new();
            let says = |list: &[bool], n: StoreId| list[n.index()];
            let lists = &mut Lists::default();
            choose(&slots, &v, most, margin, |n| says(&stays, n), |n| says(&left_out, n), lists, &mut moves);
            prop_assert_eq!(moves, plainly(&slots, &v, most, margin, &stays, &left_out));
        }

        /// Whatever lies where: as many residents as before, none twice, and with no margin the sum of importance is the largest
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
