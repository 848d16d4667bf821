//! How fast device, CPU and link are, from what the device has counted since the last layer.

use super::thresholds::Times;
use crate::cache::{PerTier, Tier};
use crate::device::{Stream, Totals};

/// Weight of a new measurement in a rate: a rate is about the mean of the last twenty layers.
const FOLLOW: f64 = 0.05;

/// The rates as measured so far.
#[derive(Clone, Debug)]
pub struct Rates {
    /// The link's rate until it has been measured, GB/s.
    link_gb_s: f64,
    /// What merging the halves of an FFN takes, ns.
    sync_ns: f64,
    totals: Totals,
    computed: PerTier<u64>,
    times: Option<Times>,
    cpu_share: f64,
}

/// What was measured of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Time of the layer, ns.
    pub layer_ns: f64,
    /// The link's rate, GB/s.
    pub link_gb_s: f64,
}

/// The mean with a new measurement in it; 0 stands for none so far.
pub(super) fn follow(old: f64, new: f64) -> f64 {
    if old == 0.0 { new } else { old + FOLLOW * (new - old) }
}

impl Rates {
    /// `link_gb_s` holds until the link has been measured; `sync_ns` is what merging the halves of an FFN takes, and is not measured.
    pub fn new(link_gb_s: f64, sync_ns: f64) -> Rates {
        Rates {
            link_gb_s,
            sync_ns,
            totals: Totals::default(),
            computed: PerTier::default(),
            times: None,
            cpu_share: 0.0,
        }
    }

    /// What one neuron takes in each memory; `None` until something was measured.
    pub fn times(&self) -> Option<Times> {
        self.times
    }

    /// Share of the time, 0 to 1, in which the CPU's half reads memory.
    pub fn cpu_share(&self) -> f64 {
        self.cpu_share
    }

    /// The time since the last measurement says nothing of decoding (a prompt ran): the next call of [`Rates::measure`] only starts again.
    pub fn begin_anew(&mut self) {
        self.totals.clock_ns = 0;
    }

    /// Takes what the device has counted so far, and the active neurons times tokens that were computed so far, by where. `None` at the
    /// first call and after [`Rates::begin_anew`].
    pub fn measure(&mut self, now: Totals, computed: PerTier<u64>) -> Option<Measured> {
        let before = std::mem::replace(&mut self.totals, now);
        let known = std::mem::replace(&mut self.computed, computed);
        if before.clock_ns == 0 || now.clock_ns <= before.clock_ns {
            return None;
        }
        let passed = (now.clock_ns - before.clock_ns) as f64;
        // GB/s: bytes per nanosecond of copying, from the beginning, for single copies are few.
        let link_gb_s = match now.busy_ns[Stream::Copy as usize] {
            0 => self.link_gb_s,
            copying => now.migrated_bytes as f64 / copying as f64,
        };
        let cpu = (now.host_ns - before.host_ns) as f64;
        self.cpu_share = follow(self.cpu_share, (cpu / passed).min(1.0));
        let device = (now.busy_ns[Stream::Compute as usize] - before.busy_ns[Stream::Compute as usize]) as f64;
        let old = self.times.unwrap_or(Times { neuron_ns: PerTier::all(0.0), sync_ns: self.sync_ns });
        let neuron_ns = |tier: Tier| {
            let busy_ns = match tier {
                Tier::Host => cpu,
                Tier::Device => device,
            };
            match computed[tier].saturating_sub(known[tier]) {
                0 => old.neuron_ns[tier],
                n => follow(old.neuron_ns[tier], busy_ns / n as f64),
            }
        };
        self.times = Some(Times { neuron_ns: PerTier::from_fn(neuron_ns), ..old });
        Some(Measured { layer_ns: passed, link_gb_s })
    }
}
