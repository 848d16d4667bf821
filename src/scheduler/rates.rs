//! How fast device, CPU and link are, as measured while tokens are made. What was not measured yet is said to be unknown.

use super::costs::{Lane, StageCosts};
use crate::cache::{PerTier, Tier};
use crate::device::{Stream, Totals};

/// Weight of a new measurement in a rate: a rate is about the mean of the last twenty.
const FOLLOW: f64 = 0.05;

/// What computing one layer took in one pass of few tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerTimes {
    /// Time of each memory's part of the FFN, ns.
    pub ffn_ns: PerTier<u64>,
    /// What of it any part takes, however small, ns: measured once, by parts with next to nothing to compute.
    pub fixed_ns: PerTier<u64>,
    /// Neurons that this time was spent on: their first row was read, whether they were active or not.
    pub neurons: PerTier<u64>,
    /// Time of adding the parts together, ns.
    pub merge_ns: u64,
    /// Moves that have begun since the layer before.
    pub moves: u64,
    /// Time for which beginning them kept the CPU from its part, ns.
    pub moves_ns: u64,
}

/// The rates as measured so far.
#[derive(Clone, Debug)]
pub struct Rates {
    /// The link's rate until it has been measured, GB/s.
    assumed_link_gb_s: f64,
    totals: Totals,
    cpu_share: f64,
    /// When the last token ended by the device's clock, ns; 0 if other work has come since.
    token_ended_ns: u64,
    layers: Vec<LayerRates>,
    /// Time of the CPU for a neuron, and to begin a move, of late, ns.
    computing_ns: Option<f64>,
    moving_ns: Option<f64>,
    copies: CopyFit,
}

/// What one layer takes.
#[derive(Clone, Copy, Debug, Default)]
struct LayerRates {
    neuron_ns: PerTier<Option<f64>>,
    fixed_ns: PerTier<u64>,
    merge_ns: Option<f64>,
}

/// What was measured of the time since the last observation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Time of the layer, ns.
    pub layer_ns: f64,
    /// The link's rate, GB/s, with the time to start copies in it.
    pub link_gb_s: f64,
}

/// The mean with a new measurement in it.
pub(super) fn follow(old: Option<f64>, new: f64) -> Option<f64> {
    Some(old.map_or(new, |old| old + FOLLOW * (new - old)))
}

impl Rates {
    /// Nothing measured of a model with so many layers. `link_gb_s` holds until the link has been measured.
    pub fn new(link_gb_s: f64, layers: usize) -> Rates {
        Rates {
            assumed_link_gb_s: link_gb_s,
            totals: Totals::default(),
            cpu_share: 0.0,
            token_ended_ns: 0,
            layers: vec![LayerRates::default(); layers],
            computing_ns: None,
            moving_ns: None,
            copies: CopyFit::default(),
        }
    }

    /// What the FFN of this layer takes; `None` until a neuron in each memory and merging were measured. Merging is there because the host has a
    /// part, and so is part of what that takes.
    pub fn costs(&self, layer: usize) -> Option<StageCosts> {
        let LayerRates { neuron_ns, fixed_ns, merge_ns } = self.layers[layer];
        let [host, device] = [neuron_ns[Tier::Host]?, neuron_ns[Tier::Device]?];
        let move_ns = self.move_cost() * host;
        let host = Lane { fixed_ns: fixed_ns[Tier::Host] as f64 + merge_ns?, neuron_ns: host };
        let device = Lane { fixed_ns: fixed_ns[Tier::Device] as f64, neuron_ns: device };
        Some(StageCosts { always_ns: 0.0, lanes: PerTier::all(host).with(Tier::Device, device), move_ns })
    }

    /// Time to start a copy on the link, ns (t_0); `None` until copies of different sizes have shown it.
    pub fn copy_start_ns(&self) -> Option<f64> {
        self.copies.start_ns()
    }

    /// What a move takes from the CPU, in neurons that it could compute meanwhile: memory that it reads while a block is copied from there, and
    /// the engine's thread, which begins the copy.
    pub fn move_cost(&self) -> f64 {
        let begun =
            self.moving_ns.zip(self.computing_ns).map_or(0.0, |(moving, computing)| moving / computing.max(1.0));
        self.cpu_share + begun
    }

    /// The time since the last measurement says nothing of decoding (a prompt ran): the next call of [`Rates::measure`] only starts again.
    pub fn begin_anew(&mut self) {
        self.totals.clock_ns = 0;
        self.token_ended_ns = 0;
    }

    /// A token has come to its last layer. Returns the time since the token before it did, ns; `None` for the first and where other work came
    /// between.
    pub fn token(&mut self, clock_ns: u64) -> Option<f64> {
        let before = std::mem::replace(&mut self.token_ended_ns, clock_ns);
        (before > 0 && clock_ns > before).then(|| (clock_ns - before) as f64)
    }

    /// Takes what a layer took in a pass. A part that computed no neuron says nothing.
    pub fn layer(&mut self, layer: usize, now: LayerTimes) {
        let LayerRates { neuron_ns, fixed_ns, merge_ns } = &mut self.layers[layer];
        for tier in Tier::ALL.into_iter().filter(|&tier| now.neurons[tier] > 0) {
            fixed_ns[tier] = now.fixed_ns[tier];
            let ns = now.ffn_ns[tier].saturating_sub(now.fixed_ns[tier]);
            let each = ns as f64 / now.neurons[tier] as f64;
            neuron_ns[tier] = follow(neuron_ns[tier], each);
            if tier == Tier::Host {
                self.computing_ns = follow(self.computing_ns, each);
            }
        }
        if now.moves > 0 {
            self.moving_ns = follow(self.moving_ns, now.moves_ns as f64 / now.moves as f64);
        }
        if Tier::ALL.iter().all(|&tier| now.neurons[tier] > 0) {
            *merge_ns = follow(*merge_ns, now.merge_ns as f64);
        }
    }

    /// Takes what the device has counted so far. `None` at the first call and after [`Rates::begin_anew`].
    pub fn measure(&mut self, now: Totals) -> Option<Measured> {
        let before = std::mem::replace(&mut self.totals, now);
        if before.clock_ns == 0 || now.clock_ns <= before.clock_ns {
            return None;
        }
        let passed = (now.clock_ns - before.clock_ns) as f64;
        let since = |of: fn(&Totals) -> u64| of(&now).saturating_sub(of(&before)) as f64;
        let copying = since(|t| t.busy_ns[Stream::Copy as usize]);
        self.copies.add(since(|t| t.migrations), since(|t| t.migrated_bytes), copying);
        // GB/s: bytes per nanosecond of copying, from the beginning, for single copies are few.
        let link_gb_s = match now.busy_ns[Stream::Copy as usize] {
            0 => self.assumed_link_gb_s,
            copying => now.migrated_bytes as f64 / copying as f64,
        };
        self.cpu_share += FOLLOW * ((since(|t| t.host_ns) / passed).min(1.0) - self.cpu_share);
        Some(Measured { layer_ns: passed, link_gb_s })
    }
}

/// The time of copies as a start for each and a time for each byte: least squares over what was copied of late.
#[derive(Clone, Debug, Default)]
struct CopyFit {
    /// Sums over layers: copies squared, copies times bytes, bytes squared, copies times ns, bytes times ns.
    sums: [f64; 5],
}

/// What is left of a sum when another measurement comes.
const KEEP: f64 = 0.999;
/// The time to start copies and the time of their bytes can be told apart where the number of copies leaves more than this share of the
/// bytes' variation unexplained.
const APART: f64 = 1e-3;

impl CopyFit {
    fn add(&mut self, copies: f64, bytes: f64, ns: f64) {
        if copies > 0.0 {
            let new = [copies * copies, copies * bytes, bytes * bytes, copies * ns, bytes * ns];
            self.sums.iter_mut().zip(new).for_each(|(sum, new)| *sum = *sum * KEEP + new);
        }
    }

    fn start_ns(&self) -> Option<f64> {
        let [cc, cb, bb, ct, bt] = self.sums;
        let apart = cc * bb - cb * cb;
        (apart > APART * cc * bb).then(|| ((ct * bb - bt * cb) / apart).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    #[test]
    fn a_layers_times_are_those_of_its_own_neurons_and_unknown_until_all_are_measured() {
        let mut rates = Rates::new(16.0, 2);
        let at = |host: u64, device: u64| PerTier::all(host).with(Tier::Device, device);
        let fixed_ns = at(120, 40);
        let times = |host, ffn_ns| LayerTimes {
            ffn_ns,
            fixed_ns,
            neurons: at(host, 10),
            merge_ns: 70,
            ..LayerTimes::default()
        };
        rates.layer(0, times(0, at(0, 540)));
        assert_eq!(rates.costs(0), None);
        rates.layer(0, times(3, at(1020, 540)));
        let lanes = rates.costs(0).unwrap().lanes;
        assert_eq!(lanes[Tier::Host], Lane { fixed_ns: 190.0, neuron_ns: 300.0 });
        assert_eq!(lanes[Tier::Device], Lane { fixed_ns: 40.0, neuron_ns: 50.0 });
        assert_eq!(rates.costs(1), None);
    }

    /// The engine's thread takes 600 ns to begin a move, while the CPU's part takes 200 ns a neuron: a move costs three neurons, beside the
    /// memory that it takes from the CPU.
    #[test]
    fn a_move_costs_what_the_cpu_could_compute_while_it_is_begun() {
        let mut rates = Rates::new(16.0, 1);
        let took = |moves: u64| LayerTimes {
            ffn_ns: PerTier::all(800),
            neurons: PerTier::all(4),
            moves,
            moves_ns: 600 * moves,
            ..LayerTimes::default()
        };
        rates.layer(0, LayerTimes { moves: 0, ..took(0) });
        assert_eq!(rates.move_cost(), 0.0);
        rates.layer(0, took(5));
        rates.layer(0, took(0));
        assert_eq!(rates.move_cost(), 3.0);
        // One that takes longer is followed.
        (0..500).for_each(|_| rates.layer(0, LayerTimes { moves_ns: 12_000, ..took(10) }));
        assert!((rates.move_cost() - 6.0).abs() < 0.01, "{}", rates.move_cost());
    }

    #[test]
    fn the_start_of_a_copy_is_found_from_copies_of_different_sizes_only() {
        let (mut fit, mut prng) = (CopyFit::default(), Prng::new(3));
        for _ in 0..50 {
            fit.add(2.0, 2e4, 2.0 * 5e3 + 2e4 / 16.0);
        }
        assert_eq!(fit.start_ns(), None);
        for _ in 0..200 {
            let (copies, bytes) = (1.0 + prng.below(8) as f64, 1e3 * (1.0 + prng.below(400) as f64));
            fit.add(copies, bytes, (copies * 5e3 + bytes / 16.0) * (0.95 + 0.1 * prng.next_f64()));
        }
        let found = fit.start_ns().unwrap();
        assert!((found / 5e3 - 1.0).abs() < 0.05, "{found}");
    }
}
