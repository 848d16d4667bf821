//! What a layer costs in a replay: fixed numbers, so that rows of one policy can be compared with rows of another, and with rows made later.
//!
//! Constants of the one cost model ([`crate::scheduler::costs`]). [`h200`] is fitted on the eight-layer rows of
//! runs/2026-11-26-h200/raw.csv, whose neurons have 24,576 bytes (hidden 4096, f16): static computes 522 neurons a layer on the CPU in
//! 0.175 ms, full 244 in 0.156 ms, and with all neurons on the card the stage takes 0.031 ms. Moves are inside these two points, so they cost
//! nothing beside them. [`pc`] is not measured: the same fixed parts, and neurons of the same bytes at the memory rate of
//! profiles/machines/rtx-4090.toml, 89.6 GB/s; a move reads the same memory as computing the neuron, beside the CPU for the FFN's share of the time.

use crate::cache::{PerTier, Tier};
use crate::scheduler::costs::{Lane, StageCosts};

/// Times of one layer of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerCosts {
    /// Attention, on the device, ns.
    pub attention_ns: f64,
    /// The FFN's stage. The device's share takes no time beside the host's.
    pub stage: StageCosts,
    /// A neuron that is moved, ns.
    pub move_ns: f64,
}

/// Fitted on a card with a capped budget.
pub fn h200() -> LayerCosts {
    layer(67.0, 0.0)
}

/// A desktop: its memory decides. Assumed.
pub fn pc() -> LayerCosts {
    layer(274.0, 183.0)
}

/// [`h200`] with a lane of the device's own, for what computes many more neurons there: a neuron takes what its bytes take at the card's
/// measured rate, 3,667.6 GB/s. The fit's rows have some 1,060 computed neurons a layer, whose time there leaves what every stage takes.
pub fn h200_lanes() -> LayerCosts {
    let (neuron_ns, of_fit) = (24_576.0 / 3667.6, 1060.0);
    let LayerCosts { stage: StageCosts { always_ns, lanes }, .. } = h200();
    let host = lanes[Tier::Host];
    let host = Lane { fixed_ns: host.fixed_ns + of_fit * neuron_ns, ..host };
    let device = Lane { fixed_ns: 0.0, neuron_ns };
    let lanes = PerTier::all(host).with(Tier::Device, device);
    LayerCosts { stage: StageCosts { always_ns: always_ns - of_fit * neuron_ns, lanes }, ..h200() }
}

fn layer(neuron_ns: f64, move_ns: f64) -> LayerCosts {
    let host = Lane { fixed_ns: 109e3, neuron_ns };
    let stage = StageCosts { always_ns: 31e3, lanes: PerTier::all(Lane::default()).with(Tier::Host, host) };
    LayerCosts { attention_ns: 110e3, stage, move_ns }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows that the numbers were fitted on.
    #[test]
    fn the_stage_takes_what_the_card_took() {
        let stage_ns = |neurons| h200().stage.for_count(PerTier::all(0).with(Tier::Host, neurons));
        for (host_neurons, ms) in [(522, 0.175), (244, 0.156), (0, 0.031)] {
            assert!((stage_ns(host_neurons) / 1e6 - ms).abs() < 0.001, "{host_neurons}");
        }
        let lanes = h200_lanes().stage;
        for (on_host, on_device) in [(522, 538), (244, 816), (0, 1060)] {
            let neurons = PerTier::all(on_host).with(Tier::Device, on_device);
            assert!((lanes.for_count(neurons) - stage_ns(on_host)).abs() < 1.0, "{on_host}");
        }
        // Layers without a part of the CPU's save the fixed costs as well.
        assert!(stage_ns(1) - stage_ns(0) > 100e3);
    }
}
