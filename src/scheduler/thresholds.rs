//! Separate thresholds for device and CPU (DynamicInfer E.4): more neurons are computed where computing is cheap and fewer where it is
//! expensive, without losing more than with one threshold for both.

use super::costs::StageCosts;
use crate::cache::{PerTier, Tier};
use crate::ids::StoreId;

/// Bins of a histogram of probabilities: probabilities are counted in steps of 1 / 255.
pub const BINS: usize = 256;
/// Mean probability of neurons in bin 0, whose probabilities are below half a step.
const RARE: f64 = 0.25 / (BINS - 1) as f64;
/// Tokens between two updates of a layer's thresholds.
pub const BALANCE_EVERY: u32 = 8;

/// How many neurons of a layer have each predicted probability; a decaying mean over tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Histograms {
    /// By memory, how many neurons in it have each probability, `[BINS]`.
    pub neurons: PerTier<Vec<f32>>,
}

impl Default for Histograms {
    fn default() -> Histograms {
        Histograms { neurons: PerTier::from_fn(|_| vec![0.0; BINS]) }
    }
}

/// What leaving out a neuron of probability p is taken to lose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LossWeight {
    /// p: the neuron is lost if it would have been active.
    #[default]
    Probability,
    /// 1 - p, as the paper prints it: leaving out a neuron that is certainly active then costs nothing.
    Complement,
}

impl LossWeight {
    fn of(self, bin: usize) -> f64 {
        // With nothing to lose in the first bin, a threshold that lies in it would be raised to the next.
        let p = (bin as f64 / (BINS - 1) as f64).max(RARE);
        match self {
            LossWeight::Probability => p,
            LossWeight::Complement => 1.0 - p,
        }
    }
}

/// A neuron is computed if its probability, times 255, reaches the threshold of where it lies.
pub type Thresholds = PerTier<u8>;

/// The bin of a probability.
pub fn to_bin(probability: f32) -> u8 {
    (probability * (BINS - 1) as f32).round() as u8
}

/// Thresholds as probabilities. One that is equal to the layer's own is given as `own` itself: most neurons are less likely than a step,
/// and a threshold rounded to 0 would have all of them computed.
pub fn probabilities(thresholds: Thresholds, own: f32) -> PerTier<f32> {
    thresholds.map(|t| if t == to_bin(own) { own } else { f32::from(t) / (BINS - 1) as f32 })
}

impl Histograms {
    /// How many neurons are computed, by where they lie.
    pub fn computed(&self, thresholds: Thresholds) -> PerTier<f64> {
        let above = |tier: Tier| &self.neurons[tier][thresholds[tier] as usize..];
        PerTier::from_fn(|tier| above(tier).iter().map(|&n| f64::from(n)).sum())
    }

    /// What is lost: the sum of the weights of all neurons left out.
    pub fn lost(&self, thresholds: Thresholds, weight: LossWeight) -> f64 {
        let below = |tier: Tier| &self.neurons[tier][..thresholds[tier] as usize];
        let lost = |tier| below(tier).iter().enumerate().map(|(bin, &n)| weight.of(bin) * f64::from(n)).sum::<f64>();
        PerTier::from_fn(lost).total()
    }
}

/// Neurons that thresholds may have computed beyond those of the single threshold, as a share of the layer's.
///
/// Chosen by the time of a layer on an H200 under the error bound (runs/2026-11-27-real-traces/cap.csv, made-up traces, 30 and 50 % of the
/// neurons on the device): with 0.004 no pair is ever found; 0.02 saves 1.4 to 1.6 % of the time for a quarter more neurons on the device; 0.1
/// saves less than 0.1 % more; no limit 0.1 % more again, for three to four times the neurons.
pub const MAX_MORE: f64 = 0.02;

/// The thresholds with which the slower part takes the least time, and which lose no more than threshold `base` for both (E.4.2) and have
/// at most `max_more` of the layer's neurons more computed. Starting from `base`, the device's threshold goes down step by step, and the CPU's
/// goes up as far as that pays for.
pub fn balance(histograms: &Histograms, base: u8, costs: &StageCosts, weight: LossWeight, max_more: f64) -> Thresholds {
    use Tier::{Device, Host};
    let mut now = Thresholds::all(base);
    let allowed = histograms.lost(now, weight) * (1.0 + 1e-9);
    let time = |thresholds| costs.for_mean(histograms.computed(thresholds));
    let computed = |thresholds| histograms.computed(thresholds).total();
    let most = computed(now) + max_more * computed(Thresholds::all(0));
    let (mut best, mut best_time) = (now, time(now));
    loop {
        while now[Host] < u8::MAX && histograms.lost(now.with(Host, now[Host] + 1), weight) <= allowed {
            now[Host] += 1;
        }
        let t = time(now);
        if t < best_time && computed(now) <= most {
            (best, best_time) = (now, t);
        }
        let lanes = costs.lanes_ns(histograms.computed(now));
        // Once the device is the slower one, more on it helps no further. Each step has more neurons computed than the one before.
        if now[Device] == 0 || lanes[Device] >= lanes[Host] || computed(now) > most {
            return best;
        }
        now[Device] -= 1;
    }
}

/// Keeps the histograms and thresholds of one layer.
#[derive(Clone, Debug)]
pub struct Balancer {
    histograms: Histograms,
    base: u8,
    now: Thresholds,
    /// The token whose probabilities were counted last.
    counted: u32,
    /// The token after which the thresholds were looked at last.
    updated: u32,
}

/// Weight of a new token in the histograms: they are about the mean of the last thirty tokens.
const FOLLOW: f32 = 0.03;
/// New thresholds must be faster by this share, or the old ones stay: small errors of measured times then change nothing.
const WORTH: f64 = 0.03;

impl Balancer {
    /// `base` is the layer's single threshold, times 255.
    pub fn new(base: u8) -> Balancer {
        Balancer { histograms: Histograms::default(), base, now: Thresholds::all(base), counted: 0, updated: 0 }
    }

    /// The thresholds now.
    pub fn thresholds(&self) -> Thresholds {
        self.now
    }

    /// Sets both thresholds to the single one again.
    pub fn reset(&mut self) {
        self.rebase(self.base);
    }

    /// Sets another single threshold, for both; the histograms stay.
    pub fn rebase(&mut self, base: u8) {
        (self.base, self.now) = (base, Thresholds::all(base));
    }

    /// Counts the probabilities, times 255, `[ffn]`, of token number `token`, which stand for those of the tokens since the last call, too;
    /// `resident` says which neurons are on the device.
    pub fn token(&mut self, token: u32, probabilities: &[u8], resident: impl Fn(StoreId) -> bool) {
        let tokens = token.wrapping_sub(self.counted).clamp(1, BALANCE_EVERY);
        self.counted = token;
        let left = (1.0 - FOLLOW).powi(tokens as i32);
        let neurons = &mut self.histograms.neurons;
        Tier::ALL.into_iter().for_each(|tier| neurons[tier].iter_mut().for_each(|n| *n *= left));
        for (neuron, &p) in probabilities.iter().enumerate() {
            let tier = if resident(StoreId(neuron as u32)) { Tier::Device } else { Tier::Host };
            neurons[tier][p as usize] += 1.0 - left;
        }
    }

    /// Sets a pair that is not to be balanced. Returns whether it differs from the pair before.
    pub fn set(&mut self, pair: Thresholds) -> bool {
        std::mem::replace(&mut self.now, pair) != pair
    }

    /// Whether enough tokens have passed since the thresholds were looked at last.
    pub fn is_due(&self, token: u32) -> bool {
        token.wrapping_sub(self.updated) >= BALANCE_EVERY
    }

    /// Looks for better thresholds. The old ones stay unless they are clearly slower, or lose too much by now. Returns the thresholds now.
    pub fn update(&mut self, token: u32, costs: &StageCosts, weight: LossWeight, max_more: f64) -> Thresholds {
        self.updated = token;
        let found = balance(&self.histograms, self.base, costs, weight, max_more);
        let time = |thresholds| costs.for_mean(self.histograms.computed(thresholds));
        let base = Thresholds::all(self.base);
        let loses = self.histograms.lost(self.now, weight) > self.histograms.lost(base, weight) * (1.0 + 1e-9);
        if loses || time(found) < time(self.now) * (1.0 - WORTH) {
            self.now = found;
        }
        self.now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;
    use crate::scheduler::costs::Lane;

    /// A layer like a trained predictor's: most neurons unlikely, some likely; half of each on the device.
    fn layer(seed: u64) -> Vec<u8> {
        let mut prng = Prng::new(seed);
        (0..4096).map(|_| (255.0 * prng.next_f64().powi(6)) as u8).collect()
    }

    fn histograms(p: &[u8]) -> Histograms {
        let mut h = Histograms::default();
        for (n, &p) in p.iter().enumerate() {
            h.neurons[if n % 2 == 0 { Tier::Device } else { Tier::Host }][p as usize] += 1.0;
        }
        h
    }

    fn costs(host_ns: f64, device_ns: f64, host_fixed_ns: f64) -> StageCosts {
        let host = Lane { fixed_ns: host_fixed_ns, neuron_ns: host_ns };
        let device = Lane { fixed_ns: 0.0, neuron_ns: device_ns };
        StageCosts { lanes: PerTier::all(host).with(Tier::Device, device), ..StageCosts::default() }
    }

    fn pc() -> StageCosts {
        costs(280.0, 25.0, 10_000.0)
    }

    #[test]
    fn the_pair_is_faster_and_loses_no_more_than_one_threshold() {
        for seed in 0..20 {
            let h = histograms(&layer(seed));
            for base in [10, 40, 100, 200] {
                let one = Thresholds::all(base);
                let two = balance(&h, base, &pc(), LossWeight::Probability, MAX_MORE);
                assert!(h.lost(two, LossWeight::Probability) <= h.lost(one, LossWeight::Probability) * 1.000001);
                let time = |thresholds| pc().for_mean(h.computed(thresholds));
                assert!(time(two) <= time(one));
                if base >= 40 {
                    assert!(time(two) < time(one), "base {base}: {} of {}", time(two), time(one));
                }
                let more = h.computed(two).total() - h.computed(one).total();
                assert!(more <= MAX_MORE * 4096.0 * 1.000001, "base {base}: {more} more neurons");
            }
        }
    }

    /// Few neurons that are left on the CPU are left out where their fixed part is more than the device's time for what pays for them.
    #[test]
    fn a_layer_without_a_host_share_is_worth_its_fixed_part() {
        let mut h = Histograms::default();
        h.neurons[Tier::Device][..60].fill(1.0);
        // Those that are never active are most of a layer.
        h.neurons[Tier::Device][0] = 1000.0;
        h.neurons[Tier::Host][50] = 0.5;
        let base = 45;
        let of = |fixed_ns| balance(&h, base, &costs(30.0, 25.0, fixed_ns), LossWeight::Probability, MAX_MORE);
        assert_eq!(of(0.0), Thresholds::all(base), "half a neuron is not worth one on the device");
        let found = of(2000.0);
        assert_eq!(h.computed(found)[Tier::Host], 0.0, "{found:?}");
        assert!(h.lost(found, LossWeight::Probability) <= h.lost(Thresholds::all(base), LossWeight::Probability));
    }

    /// The printed weight lets every CPU neuron be left out, also those that are certainly active.
    #[test]
    fn the_printed_weight_would_leave_out_all_that_the_cpu_has() {
        let h = histograms(&layer(1));
        let printed = balance(&h, 40, &pc(), LossWeight::Complement, MAX_MORE);
        let ours = balance(&h, 40, &pc(), LossWeight::Probability, MAX_MORE);
        let expected_loss = |t| h.lost(t, LossWeight::Probability);
        assert!(printed[Tier::Host] > 200, "{printed:?}");
        assert!(expected_loss(printed) > 3.0 * expected_loss(ours), "{printed:?} {ours:?}");
    }

    /// A threshold of 0.00027 went out as 0 / 255, and 47 % of the neurons were computed instead of 22.
    #[test]
    fn a_threshold_that_was_not_moved_is_itself_and_one_below_a_step_is_not_moved() {
        for own in [0.00027f32, 0.1234567, 0.9999] {
            let one = Thresholds::all(to_bin(own));
            assert_eq!(probabilities(one, own), PerTier::all(own));
            let two = Thresholds::all(to_bin(own).saturating_add(1)).with(Tier::Device, to_bin(own).saturating_sub(1));
            let [cpu, device] = probabilities(two, own).into_array();
            assert!(device <= own && own <= cpu, "{device} {own} {cpu}");
        }
        let h = histograms(&layer(1));
        assert_eq!(balance(&h, to_bin(0.00027), &pc(), LossWeight::Probability, MAX_MORE), Thresholds::all(0));
    }

    /// Measured times are noisy by a fifth, and tokens differ: once settled, thresholds stay where they are.
    #[test]
    fn thresholds_do_not_oscillate() {
        let mut balancer = Balancer::new(40);
        let mut prng = Prng::new(5);
        let (mut changes, mut before) = (0, balancer.thresholds());
        for token in 0..2000 {
            let p = layer(1000 + token % 97);
            balancer.token(token as u32, &p, |n| n.0 % 2 == 0);
            let mut noisy = |t: f64| t * (0.8 + 0.4 * prng.next_f64());
            let costs = costs(noisy(280.0), noisy(25.0), noisy(10_000.0));
            let now = balancer.update(token as u32, &costs, LossWeight::Probability, MAX_MORE);
            if token > 200 {
                changes += usize::from(now != before);
            }
            before = now;
        }
        assert!(changes < 30, "{changes} changes in 1800 tokens");
    }
}
