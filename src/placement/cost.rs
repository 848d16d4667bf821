//! Time that a neuron costs on the CPU, on the device and on the link, derived from a machine's rates and the size of a neuron block.

use crate::cache::{PerTier, Tier};
use crate::formats::machine_profile::MachineProfile;
use crate::scheduler::costs::{Lane, StageCosts};
use serde::Serialize;

/// Times in microseconds: t_cpu, t_gpu, t_trans (per neuron) and t_sync (per layer) of dynamicinfer E.3.3. The first two follow
/// powerinfer's equation 5: a neuron's time is that of reading its weights once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Costs {
    /// Reading a neuron block from host memory.
    pub t_cpu_us: f64,
    /// Reading a neuron block from device memory.
    pub t_gpu_us: f64,
    /// Copying a neuron block over the link in a run of copies, without the cost of starting one.
    pub t_trans_us: f64,
    /// T_sync, what splitting a layer costs for each token: copying its input out and the CPU's part of the output in, and one wait.
    pub t_sync_us: f64,
    /// What a layer's FFN takes wherever its neurons are.
    pub always_us: f64,
    /// What it takes more where the CPU has a part, beside that part's neurons: T_sync and a call of the thread pool, or what the machine's decoding
    /// rows have shown.
    pub split_us: f64,
}

impl Costs {
    /// The times on `machine` for neuron blocks of `block_bytes`; `hidden` numbers of 4 bytes cross the link each way.
    pub fn of(machine: &MachineProfile, block_bytes: u64, hidden: usize) -> Costs {
        let us = |bytes: u64, gb_s: f64| bytes as f64 / (gb_s * 1e3);
        let crossing = us(hidden as u64 * 4, machine.link_gb_s);
        let t_sync_us = 2.0 * (machine.copy_us + crossing) + machine.sync_us;
        Costs {
            t_cpu_us: us(block_bytes, machine.dram_gb_s),
            t_gpu_us: us(block_bytes, machine.device_gb_s),
            t_trans_us: us(block_bytes, machine.link_gb_s),
            t_sync_us,
            always_us: machine.stage.map_or(0.0, |stage| stage.always_us),
            split_us: machine.stage.map_or(t_sync_us + machine.call_us, |stage| stage.split_us),
        }
    }

    /// The same in the cost model's terms. Where `skips` is not set, the host has a part in every layer: then that part's fixed time is paid always.
    pub fn stage(&self, skips: bool) -> StageCosts {
        let (always_us, fixed_us) = if skips { (0.0, self.split_us) } else { (self.split_us, 0.0) };
        let lane = |fixed_us: f64, neuron_us: f64| Lane { fixed_ns: fixed_us * 1e3, neuron_ns: neuron_us * 1e3 };
        let lanes = PerTier::all(lane(fixed_us, self.t_cpu_us)).with(Tier::Device, lane(0.0, self.t_gpu_us));
        StageCosts { always_ns: (self.always_us + always_us) * 1e3, lanes, move_ns: 0.0 }
    }
}

/// C_l, the fewest neurons that a split layer may have on the device: the least C with C t_gpu + T_sync <= C t_cpu
/// (powerinfer 6.3.1, inequality 4). A layer that lies on the device whole is not split, so C_l is `neurons` at most, and
/// exactly that where the device is no faster.
pub fn min_neurons(costs: &Costs, neurons: usize) -> usize {
    let gain = costs.t_cpu_us - costs.t_gpu_us;
    if gain <= 0.0 {
        return neurons;
    }
    // Beyond the range of usize it saturates, and `neurons` is smaller.
    ((costs.t_sync_us / gain).ceil() as usize).clamp(1, neurons.max(1))
}
