//! How fast a plan can decode: the bytes that a token reads, by the rates of the machine, and each layer's FFN by the cost model
//! ([`crate::scheduler::costs`]), with its fixed parts. Memory is counted at its full rate and the context as short, so a run is slower: this is a limit, and says what sets it.

use super::Costs;
use super::memory_plan::{Footprint, Plan};
use crate::cache::{PerTier, Tier};
use crate::formats::machine_profile::MachineProfile;
use crate::scheduler::costs::{Lane, StageCosts};
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
    /// The host has no part in a layer whose neurons are all on the device.
    pub skips_host: bool,
}

/// Neurons of a layer that a token computes, and those of them that are active.
#[derive(Clone, Copy, PartialEq)]
struct PerLayer {
    computed: f64,
    active: f64,
}

/// Of each layer what a token needs, and what of it is on the device.
fn reads_of(
    f: &Footprint,
    plan: &Plan,
    computed_share: f64,
    active: f64,
    placed_by_rows: bool,
) -> impl Iterator<Item = (PerLayer, PerLayer)> {
    let mean = plan.details.total_impact as f64 / f.layers as f64;
    let ffn = f.ffn as f64;
    plan.layers.iter().map(move |layer| {
        // A layer that fires more is computed more; where all are computed, it is not.
        let weight = if mean > 0.0 && computed_share < 1.0 { layer.total_impact as f64 / mean } else { 1.0 };
        let computed = (ffn * computed_share * weight).min(ffn);
        // Active neurons lie there as often as the plan says; those that are computed besides may be any.
        let of_any = layer.slots as f64 / ffn;
        let of_active = match layer.total_impact {
            0 => of_any,
            total => layer.impact as f64 / total as f64,
        };
        let on_device = if placed_by_rows { of_active } else { active * of_active + (1.0 - active) * of_any };
        let all = PerLayer { computed, active: computed * active };
        (all, PerLayer { computed: computed * on_device, active: all.active * of_active })
    })
}

/// Estimates decoding with `plan` on `machine`.
pub fn estimate(f: &Footprint, plan: &Plan, machine: &MachineProfile, reads: Reads) -> Estimate {
    let ms = |bytes: f64, gb_s: f64| bytes / (gb_s * 1e6);
    let layers = f.layers as f64;
    let Reads { predictor_bytes, computed_share, active_share, rows, placed_by_rows, skips_host } = reads;
    let active = (active_share / computed_share).min(1.0);
    let always = (f.always_bytes() + predictor_bytes) as f64;
    let row = f.block_bytes as f64 / rows as f64;
    let bytes_of = |n: PerLayer| row * (n.computed + (rows - 1) as f64 * n.active);
    let stage = Costs::of(machine, f.block_bytes, f.hidden).stage(skips_host);
    let (mut stages_ns, mut neurons, mut there, mut waits_us) = (0.0, 0.0, 0.0, 0.0);
    for (layer, (all, here)) in plan.layers.iter().zip(reads_of(f, plan, computed_share, active, placed_by_rows)) {
        let left = PerLayer { computed: all.computed - here.computed, active: all.active - here.active };
        let shares = PerTier::all((left, machine.dram_gb_s)).with(Tier::Device, (here, machine.device_gb_s));
        // A neuron's time is that of the rows that are read of it in the mean.
        let lane = |tier: Tier| {
            let (n, gb_s) = shares[tier];
            Lane::reading(stage.lanes[tier].fixed_ns, bytes_of(n) / n.computed.max(f64::MIN_POSITIVE), gb_s)
        };
        let costs = StageCosts { lanes: PerTier::from_fn(lane), ..stage };
        let neurons_of = PerTier::from_fn(|tier| shares[tier].0.computed);
        stages_ns += if layer.whole { costs.for_mean(neurons_of) } else { costs.for_split(neurons_of) };
        let fixed_ns = if layer.whole { 0.0 } else { costs.lanes[Tier::Host].fixed_ns };
        waits_us += (costs.always_ns + fixed_ns) / 1e3;
        neurons += bytes_of(all);
        there += bytes_of(here);
    }
    let device_ffn_ms = ms(there, machine.device_gb_s);
    let states_ms = ms(2.0 * f.state_bytes as f64, machine.dram_gb_s);
    let host_ms = ms(neurons - there, machine.dram_gb_s) + states_ms;
    let always_ms = ms(always, machine.device_gb_s);
    // Without keys and values on the host a token waits once beside its layers.
    let attention = if plan.sequences == 0 { f.attention_waits as f64 } else { 0.0 };
    let others_us = attention * (plan.details.costs.t_sync_us + machine.call_us) + machine.sync_us;
    let wait_ms = (waits_us + others_us) / 1e3;
    let link_ms = ms(plan.streamed_layers as f64 * f.attention_layer_bytes[0] as f64, machine.link_gb_s);
    let others_ms = always_ms + stages_ns / 1e6 + others_us / 1e3 + states_ms;
    let token_ms = others_ms.max(link_ms);
    let device_ms = always_ms + device_ffn_ms;
    let bound = [
        (device_ms, Bound::DeviceMemory),
        (host_ms, Bound::HostMemory),
        (wait_ms, Bound::Waits),
        (if link_ms > others_ms { link_ms } else { 0.0 }, Bound::Link),
    ];
    let bound = bound.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).expect("there are four").1;
    let cpu_ms = ms(always + neurons, machine.dram_gb_s) + states_ms + layers * CALLS_A_LAYER * machine.call_us / 1e3;
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
