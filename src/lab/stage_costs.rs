//! What a layer costs in a replay: fixed numbers, so that rows of one policy can be compared with rows of another, and with rows made later.
//!
//! A pure function of how many neurons the CPU computes and how many are moved. [`H200`] is fitted on the eight-layer rows of
//! runs/2026-11-26-h200/raw.csv, whose neurons have 24,576 bytes (hidden 4096, f16): static computes 522 neurons a layer on the CPU in
//! 0.175 ms, full 244 in 0.156 ms, and with all neurons on the card the stage takes 0.031 ms. Moves are inside these two points, so they cost
//! nothing beside them. [`PC`] is not measured: the same fixed parts, and neurons of the same bytes at the memory rate of
//! profiles/machines/rtx-4090.toml, 89.6 GB/s; a move reads the same memory as computing the neuron, beside the CPU for the FFN's share of the time.

use serde::Serialize;

/// Times of one layer of one token, ns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StageCosts {
    /// Attention, on the device.
    pub attention_ns: f64,
    /// The FFN where the CPU computes a part: launch, exchange, fork and join, partial sums.
    pub shared_ns: f64,
    /// The FFN where the device computes all of it.
    pub device_ns: f64,
    /// A neuron that the CPU computes.
    pub host_neuron_ns: f64,
    /// A neuron that is moved.
    pub move_ns: f64,
}

/// Fitted on a card with a capped budget.
pub const H200: StageCosts =
    StageCosts { attention_ns: 110e3, shared_ns: 140e3, device_ns: 31e3, host_neuron_ns: 67.0, move_ns: 0.0 };

/// A desktop: its memory decides. Assumed.
pub const PC: StageCosts =
    StageCosts { attention_ns: 110e3, shared_ns: 140e3, device_ns: 31e3, host_neuron_ns: 274.0, move_ns: 183.0 };

impl StageCosts {
    /// Time of the FFN's stage of one layer in which the CPU computes `host_neurons`, ns.
    pub fn stage_ns(&self, host_neurons: u64) -> f64 {
        match host_neurons {
            0 => self.device_ns,
            n => self.shared_ns + self.host_neuron_ns * n as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows that the numbers were fitted on.
    #[test]
    fn the_stage_takes_what_the_card_took() {
        for (host_neurons, ms) in [(522, 0.175), (244, 0.156), (0, 0.031)] {
            assert!((H200.stage_ns(host_neurons) / 1e6 - ms).abs() < 0.001, "{host_neurons}");
        }
        // Layers without a part of the CPU's save the fixed costs as well.
        assert!(H200.stage_ns(1) - H200.stage_ns(0) > 100e3);
    }
}
