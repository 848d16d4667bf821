//! The one path of every policy: what was active, what will be, and which moves follow.

use super::gain::Gain;
use super::greedy::{self, Move};
use super::importance::{Frequencies, importance};
use super::policy::{Order, Rules};
use super::window::Window;
use crate::device::NONE;
use crate::prng::Prng;

/// Probability (of 255) from which on LRU and random take a neuron for needed.
const NEEDED: u8 = 128;
/// What a sequence adds to the history that the next begins with.
const HISTORY_SHARE: f32 = 0.2;

/// One layer's residents.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub layer: usize,
    /// Per slot a neuron, [`NONE`] or [`greedy::FILLING`].
    pub slots: &'a [u32],
}

/// What it did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Active neurons times tokens, those that were resident, and those that the static placement would have had.
    pub active: u64,
    pub hits: u64,
    pub static_hits: u64,
    pub moves: u64,
}

struct Layer {
    f: Frequencies,
    /// Whether the static placement has the neuron.
    is_static: Vec<bool>,
    /// Token at which the neuron was active last; 0 for never.
    last: Vec<u32>,
}

/// Decides for all layers. Knows no thread, device or clock.
pub struct Scheduler {
    rules: Rules,
    pub window: Window,
    block_bytes: u64,
    layers: Vec<Layer>,
    gain: Gain,
    prng: Prng,
    token: u32,
    pub totals: Totals,
    v: Vec<f32>,
    room: greedy::Room,
    moves: Vec<Move>,
}

impl Scheduler {
    /// `history[l]` are the frequencies that the first sequence begins with, `placed[l]` the neurons of the static placement.
    pub fn new(
        rules: Rules,
        window: Window,
        block_bytes: usize,
        history: Vec<Vec<f32>>,
        placed: &[Vec<u32>],
        seed: u64,
    ) -> Scheduler {
        let layer = |(history, placed): (Vec<f32>, &Vec<u32>)| {
            let ffn = history.len();
            let mut is_static = vec![false; ffn];
            placed.iter().for_each(|&n| is_static[n as usize] = true);
            Layer { f: Frequencies::new(history), is_static, last: vec![0; ffn] }
        };
        let ffn = history.first().map_or(0, Vec::len);
        Scheduler {
            rules,
            window,
            block_bytes: block_bytes as u64,
            layers: history.into_iter().zip(placed).map(layer).collect(),
            gain: Gain::default(),
            prng: Prng::new(seed),
            token: 1,
            totals: Totals::default(),
            v: Vec::with_capacity(ffn),
            room: greedy::Room::new(ffn),
            moves: Vec::with_capacity(ffn),
        }
    }

    pub fn rules(&self) -> Rules {
        self.rules
    }

    pub fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Whether neurons are on the move, or the static placement is kept because moving does not pay.
    pub fn moving(&self) -> bool {
        self.rules.moves && (!self.rules.gain || self.gain.moving())
    }

    /// Frequencies of a layer now.
    pub fn frequencies(&self, layer: usize) -> &Frequencies {
        &self.layers[layer].f
    }

    /// Another text begins.
    pub fn begin_sequence(&mut self) {
        self.layers.iter_mut().for_each(|l| l.f.end_sequence(HISTORY_SHARE));
        self.window.begin_sequence();
    }

    /// Of a prompt that ran densely: for how many of its tokens each neuron was active.
    pub fn prompt(&mut self, layer: usize, counts: &[u32], tokens: usize) {
        self.layers[layer].f.prompt(counts, tokens, self.rules.decay);
    }

    /// The neurons of a layer that were active for this token.
    pub fn active(&mut self, view: View<'_>, active: &[u32]) {
        let layer = &mut self.layers[view.layer];
        layer.f.token(active, self.rules.decay);
        active.iter().for_each(|&n| layer.last[n as usize] = self.token);
        let of_static = active.iter().filter(|&&n| layer.is_static[n as usize]).count() as u64;
        // Active and resident, by marking: `v` is free now.
        self.v.clear();
        self.v.resize(layer.is_static.len(), 0.0);
        view.slots.iter().filter(|&&n| n < greedy::FILLING).for_each(|&n| self.v[n as usize] = 1.0);
        let hits = active.iter().filter(|&&n| self.v[n as usize] > 0.0).count() as u64;
        self.gain.layer(hits, of_static);
        let t = &mut self.totals;
        (t.active, t.hits) = (t.active + active.len() as u64, t.hits + hits);
        t.static_hits += of_static;
    }

    /// A token is over; `cost` is what a move costs in hits ([`Gain::token`]).
    pub fn token(&mut self, cost: f64) {
        self.gain.token(cost);
        self.window.token();
        self.token = self.token.wrapping_add(1);
    }

    /// Moves for a layer that is used later. `probabilities` (times 255) are those of its coming use, where they were predicted;
    /// `under_way` are the bytes on the link.
    pub fn plan(&mut self, view: View<'_>, probabilities: Option<&[u8]>, under_way: u64) -> &[Move] {
        self.moves.clear();
        if !self.rules.moves {
            return &self.moves;
        }
        let most = (self.window.room(under_way) / self.block_bytes) as usize;
        let (moving, rules) = (self.moving(), self.rules);
        let Scheduler { layers, v, room, moves, prng, token, .. } = self;
        let layer = &layers[view.layer];
        let f = layer.f.now();
        // Capped below the number of slots: where nearly all would stay, nothing could come.
        let frequent = |n: u32| n < greedy::FILLING && f[n as usize] >= rules.pinned;
        let crowded = view.slots.iter().filter(|&&n| frequent(n)).count() * 4 > view.slots.len() * 3;
        let pinned = |n: u32| !crowded && frequent(n);
        let needed = |n: u32| match probabilities {
            Some(p) => p[n as usize] >= NEEDED,
            None => layer.last[n as usize] == *token,
        };
        if !moving {
            // Back to the static placement.
            v.clear();
            v.extend(layer.is_static.iter().map(|&placed| f32::from(u8::from(placed))));
            greedy::choose(view.slots, v, most, 0.0, |_| false, |_| false, room, moves);
        } else if rules.order == Order::Importance {
            importance(probabilities, f, rules.lambda, v);
            greedy::choose(view.slots, v, most, rules.margin, pinned, |_| false, room, moves);
        } else {
            // Newcomers are what is needed; only whom they replace differs.
            v.clear();
            match rules.order {
                Order::Recency => v.extend(layer.last.iter().map(|&t| t as f32 / (*token as f32 + 1.0))),
                _ => v.extend((0..f.len()).map(|_| prng.next_f64() as f32)),
            }
            (0..v.len()).filter(|&n| needed(n as u32)).for_each(|n| v[n] = 2.0);
            greedy::choose(view.slots, v, most, 0.0, |_| false, |n| !needed(n), room, moves);
        }
        self.gain.moved(if moving { moves.len() } else { 0 });
        self.totals.moves += moves.len() as u64;
        &self.moves
    }
}

/// As the scheduler sees a slot table.
pub fn snapshot(slots: &[crate::cache::Slot], out: &mut Vec<u32>) {
    use crate::cache::Slot;
    out.clear();
    out.extend(slots.iter().map(|slot| match slot {
        Slot::Free => NONE,
        Slot::Filling(_) => greedy::FILLING,
        Slot::Resident(neuron) => *neuron,
    }));
}
