//! What the simulator takes for granted and a published system need not reach; switched one at a time, to see which of it makes a
//! simulated ratio larger than the published one.

use super::Outcome;
use super::case::Case;
use crate::error::Result;
use crate::formats::machine_profile::MachineProfile;
use crate::scheduler::Policy;
use serde::Serialize;

/// Halvings of the range in which a share is looked for: to a thousandth.
const HALVINGS: usize = 10;
/// The smallest share that is tried: a thirtieth of a rate is no longer that rate's fault.
const LEAST: f64 = 0.03;

/// An assumption about the sparse side. Dense layer offload, beside which it is put, keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Assumption {
    /// The CPU reads neurons that lie apart as fast as whole matrices.
    HostRate,
    /// The device reads its weights and neurons at its memory's rate, and launches cost nothing.
    DeviceRate,
    /// All device memory beside attention, head, predictors and buffers holds neurons.
    NeuronMemory,
}

impl Assumption {
    /// All of them.
    pub const ALL: [Assumption; 3] = [Assumption::HostRate, Assumption::DeviceRate, Assumption::NeuronMemory];

    /// The assumption as a sentence for reports.
    pub fn says(self) -> &'static str {
        match self {
            Assumption::HostRate => "the CPU reads scattered neurons at the rate of whole matrices",
            Assumption::DeviceRate => "the sparse side's device reads at its memory's rate, launches are free",
            Assumption::NeuronMemory => "all VRAM beside attention, head, predictors and buffers holds neurons",
        }
    }

    /// Decodes under a policy if the assumption holds for a share (0 to 1) of what it says.
    ///
    /// # Errors
    /// Those of [`Case::run`].
    pub fn run(self, case: &Case<'_>, policy: Policy, share: f64) -> Result<Outcome> {
        let mut machine: MachineProfile = case.machine.clone();
        let mut vram = case.vram;
        match self {
            Assumption::HostRate => machine.dram_gb_s *= share,
            Assumption::DeviceRate => machine.device_gb_s *= share,
            Assumption::NeuronMemory => vram = vram.map(|bytes| with_neurons(case, bytes, share)),
        }
        Case { machine: &machine, vram, ..*case }.run(policy)
    }
}

/// A budget of which `share` of the bytes that neurons had is left to them.
fn with_neurons(case: &Case<'_>, vram: u64, share: f64) -> u64 {
    let real = case.real;
    let fixed = real.attention_bytes + real.head_bytes + real.buffers_bytes + case.predictor_bytes;
    // A byte more for each layer: budgets are divided among the trace's layers and rounded down.
    fixed + real.layers as u64 + (vram.saturating_sub(fixed) as f64 * share) as u64
}

/// What becomes of a ratio where an assumption is switched.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Switched {
    /// The one that was switched, alone.
    pub assumption: Assumption,
    /// The largest share of it, to a thousandth, with which `full` is no faster than asked for; `None` if 3 % of it is still too fast.
    pub share: Option<f64>,
    /// Speed of `full` with that share, or with 3 %, tokens per second.
    pub tokens_per_s: f64,
    /// Neurons computed on the device / all computed ones: under `static` and under `full`.
    pub gpu_share: (f64, f64),
}

/// How far the assumption must be given up for `full` to be no faster than `most` tokens per second.
///
/// # Errors
/// Those of [`Case::run`].
pub fn given_up_for(assumption: Assumption, case: &Case<'_>, most: f64) -> Result<Switched> {
    let speed = |share| Ok(assumption.run(case, Policy::Full, share)?.tokens_per_s);
    let (mut low, mut high) = (LEAST, 1.0);
    let enough = speed(LEAST)? <= most;
    // More of what is assumed is faster.
    for _ in 0..if enough { HALVINGS } else { 0 } {
        let middle = (low + high) / 2.0;
        if speed(middle)? <= most { low = middle } else { high = middle }
    }
    let of = |policy| assumption.run(case, policy, low);
    let (fixed, full) = (of(Policy::Static)?, of(Policy::Full)?);
    Ok(Switched {
        assumption,
        share: enough.then_some(low),
        tokens_per_s: full.tokens_per_s,
        gpu_share: (fixed.gpu_share, full.gpu_share),
    })
}
