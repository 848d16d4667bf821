//! What is logged of decisions: what changed, and the numbers that led to it. Nothing is computed unless it is logged.

use super::costs::StageCosts;
use super::policy::LayerState;
use super::policy::greedy::Move;
use super::rates::{Measured, follow};
use crate::cache::{PerTier, Tier};
use tracing::{Level, debug, enabled};

/// A rate is logged again when it has changed by more than this share.
const CHANGED: f64 = 0.1;

/// The lowest and the highest, as text; `-` if there are none.
fn range(of: impl Iterator<Item = f32>) -> String {
    let (least, most) = of.fold((f32::INFINITY, f32::NEG_INFINITY), |(least, most), v| (least.min(v), most.max(v)));
    if least > most { "-".into() } else { format!("{least:.3}..{most:.3}") }
}

/// Neurons that are to come to a layer's slots, by what each is `worth`, `[ffn]`; empty for policies with measures of their own. `room` is how
/// many the link can take; `moving` is false while the static placement is restored.
pub(super) fn moves(at: &LayerState<'_>, worth: &[f32], moving: bool, room: usize, moves: &[Move]) {
    if moves.is_empty() || !enabled!(Level::DEBUG) {
        return;
    }
    let came = range(moves.iter().filter_map(|m| worth.get(m.neuron().index()).copied()));
    let replaced = || moves.iter().filter_map(|m| at.slots[m.slot().index()].resident());
    let left = range(replaced().filter_map(|neuron| worth.get(neuron.index()).copied()));
    let (neurons, free) = (moves.len(), moves.len() - replaced().count());
    let predicted = at.probabilities.is_some();
    debug!(token = at.token, layer = at.layer, neurons, room, free, %came, %left, predicted, moving, "moves");
}

/// A layer's neurons are computed from other probabilities on.
pub(super) fn thresholds(token: u32, layer: usize, before: PerTier<f32>, after: PerTier<f32>, costs: &StageCosts) {
    let ns = costs.lanes.map(|lane| lane.neuron_ns);
    debug!(
        token,
        layer,
        cpu_before = %format_args!("{:.4}", before[Tier::Host]),
        cpu_after = %format_args!("{:.4}", after[Tier::Host]),
        device_before = %format_args!("{:.4}", before[Tier::Device]),
        device_after = %format_args!("{:.4}", after[Tier::Device]),
        cpu_ns = %format_args!("{:.1}", ns[Tier::Host]),
        device_ns = %format_args!("{:.1}", ns[Tier::Device]),
        "thresholds"
    );
}

/// The rates that were logged last, and the mean time of a layer.
#[derive(Default)]
pub(super) struct RatesLog {
    /// Mean time of a layer over about the last twenty, ns; `None` until one was measured.
    layer_ns: Option<f64>,
    /// Link in GB/s, layer in ns, and a neuron of the first layer on the CPU and on the device in ns, as they were logged last.
    told: [f64; 4],
}

impl RatesLog {
    /// A layer was measured; `costs` are those of the first layer by now, `window` the bytes that the link carries during a layer.
    pub fn measured(
        &mut self,
        token: u32,
        now: Measured,
        costs: Option<StageCosts>,
        start_ns: Option<f64>,
        window: f64,
    ) {
        if !enabled!(Level::DEBUG) {
            return;
        }
        self.layer_ns = follow(self.layer_ns, now.layer_ns);
        let [cpu_ns, device_ns] =
            costs.map_or([0.0; 2], |costs| [Tier::Host, Tier::Device].map(|tier| costs.lanes[tier].neuron_ns));
        let rates = [now.link_gb_s, self.layer_ns.unwrap_or(0.0), cpu_ns, device_ns];
        let changed = |(now, told): (&f64, &f64)| (now - told).abs() > CHANGED * told;
        if !rates.iter().zip(&self.told).any(changed) {
            return;
        }
        let from_to = |i: usize, unit: f64| format!("{:.2}->{:.2}", self.told[i] / unit, rates[i] / unit);
        debug!(
            token,
            link_gb_s = %from_to(0, 1.0),
            layer_us = %from_to(1, 1e3),
            cpu_ns = %from_to(2, 1.0),
            device_ns = %from_to(3, 1.0),
            copy_start_us = %start_ns.map_or("unknown".into(), |ns| format!("{:.2}", ns / 1e3)),
            window_bytes = window as u64,
            "rates"
        );
        self.told = rates;
    }
}
