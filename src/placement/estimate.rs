//! How fast a plan can decode: the bytes that a token reads, by the rates of the machine. Memory is counted at its full rate and the context
//! as short, so a run is slower: this is a limit, and says what sets it.

use super::memory_plan::{Footprint, Plan};
use crate::formats::machine_profile::MachineProfile;
use serde::Serialize;

/// Forks and joins of the thread pool that a layer takes on the processor alone: q k v, attention, its output, and the FFN.
const CALLS_A_LAYER: f64 = 4.0;

/// What takes the most of a token's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Reading weights from the device's memory.
    DeviceMemory,
    /// Reading neurons from host memory.
    HostMemory,
    /// Copying attention's matrices that have no room on the device.
    Link,
    /// Starting copies, waiting for them, and setting threads to work.
    Waits,
}

/// The time of a token when it is decoded, at least.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Estimate {
    /// Tokens a second, at most.
    pub tokens_per_s: f64,
    /// Time that the device reads its memory for a token, ms.
    pub device_ms: f64,
    /// Time that the processor reads host memory for a token, ms; the device reads its neurons meanwhile.
    pub host_ms: f64,
    /// Time that the link takes for attention's matrices that are copied for a token, ms; host and device compute meanwhile.
    pub link_ms: f64,
    /// Time for copies, waits and calls, ms.
    pub wait_ms: f64,
    /// What takes the most of it.
    pub bound: Bound,
    /// Tokens a second of the same model on the processor alone, at most.
    pub cpu_tokens_per_s: f64,
    /// Share of the neurons that is computed for a token, as it was given.
    pub computed_share: f64,
}

/// What decides which neurons a token reads.
#[derive(Clone, Copy, Debug)]
pub struct Reads {
    /// Bytes of the predictors.
    pub predictor_bytes: u64,
    /// Share of the neurons that they have computed; 1 is all of them.
    pub computed_share: f64,
    /// Share of the neurons that are active for a token.
    pub active_share: f64,
    /// Rows of a neuron: of one that is computed the first is read, of one that is active the others, too. 1 where all are read at once.
    pub rows: usize,
    /// The plan's counts are rows that are read, and not active neurons.
    pub placed_by_rows: bool,
}

/// Estimates decoding with `plan` on `machine`.
pub fn estimate(f: &Footprint, plan: &Plan, machine: &MachineProfile, reads: Reads) -> Estimate {
    let ms = |bytes: f64, gb_s: f64| bytes / (gb_s * 1e6);
    let layers = f.layers as f64;
    let Reads { predictor_bytes, computed_share, active_share, rows, placed_by_rows } = reads;
    // Active neurons lie there as often as the plan says; those that are computed besides may be any.
    let of_active = plan.objective as f64 / plan.details.total_impact.max(1) as f64;
    let of_any = plan.slots().iter().sum::<usize>() as f64 / (f.ffn * f.layers) as f64;
    let active = (active_share / computed_share).min(1.0);
    let on_device = if placed_by_rows { of_active } else { active * of_active + (1.0 - active) * of_any };
    let always = (f.always_bytes() + predictor_bytes) as f64;
    let row = f.ffn_bytes() as f64 / rows as f64;
    let (first, others) = (row * computed_share, row * (rows - 1) as f64 * computed_share * active);
    let there = first * on_device + others * of_active;
    let neurons = first + others;
    let device_ffn_ms = ms(there, machine.device_gb_s);
    let host_ms = ms(neurons - there, machine.dram_gb_s);
    let always_ms = ms(always, machine.device_gb_s);
    // Without neurons or keys and values on the host no layer is split, and a token waits once.
    let splits = if host_ms > 0.0 { layers } else { 0.0 };
    let attention = if plan.sequences == 0 { f.attention_waits as f64 } else { 0.0 };
    let wait_ms = ((splits + attention) * (plan.details.t_sync_us + machine.call_us) + machine.sync_us) / 1e3;
    let link_ms = ms(plan.streamed_layers as f64 * f.attention_layer_bytes[0] as f64, machine.link_gb_s);
    let others_ms = always_ms + device_ffn_ms.max(host_ms) + wait_ms;
    let token_ms = others_ms.max(link_ms);
    let device_ms = always_ms + device_ffn_ms;
    let bound = [
        (device_ms, Bound::DeviceMemory),
        (host_ms, Bound::HostMemory),
        (wait_ms, Bound::Waits),
        (if link_ms > others_ms { link_ms } else { 0.0 }, Bound::Link),
    ];
    let bound = bound.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).expect("there are four").1;
    let cpu_ms = ms(always + neurons, machine.dram_gb_s) + layers * CALLS_A_LAYER * machine.call_us / 1e3;
    Estimate {
        tokens_per_s: 1e3 / token_ms,
        device_ms,
        host_ms,
        link_ms,
        wait_ms,
        bound,
        cpu_tokens_per_s: 1e3 / cpu_ms,
        computed_share,
    }
}
