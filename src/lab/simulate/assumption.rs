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
const MIN_SHARE: f64 = 0.03;

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
    /// The prompt is free. The paper divides decoded tokens by the time of the whole response (5.1), and the code that it is built on has
    /// nothing that makes prompts fast (D.1): without this assumption each token of a prompt takes as long as a decoded one.
    Prompt,
}

/// Tokens of a prompt for each decoded one in DynamicInfer 5.1: 64 and 128.
pub const PROMPT: f64 = 64.0 / 128.0;

impl Assumption {
    /// All of them.
    pub const ALL: [Assumption; 4] =
        [Assumption::HostRate, Assumption::DeviceRate, Assumption::NeuronMemory, Assumption::Prompt];

    /// The assumption as a sentence for reports.
    pub fn says(self) -> &'static str {
        match self {
            Assumption::HostRate => "the CPU reads scattered neurons at the rate of whole matrices",
            Assumption::DeviceRate => "the sparse side's device reads at its memory's rate, launches are free",
            Assumption::NeuronMemory => "all VRAM beside attention, head, predictors and buffers holds neurons",
            Assumption::Prompt => {
                "the sparse side's prompt is free (else each of its tokens takes a decoded one's time)"
            }
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
            Assumption::Prompt => (),
        }
        let mut outcome = Case { machine: &machine, vram, ..*case }.run(policy)?;
        if self == Assumption::Prompt {
            outcome.tokens_per_s /= 1.0 + PROMPT * (1.0 - share);
        }
        Ok(outcome)
    }
}

/// A budget of which `share` of the bytes that neurons had is left to them.
fn with_neurons(case: &Case<'_>, vram: u64, share: f64) -> u64 {
    let real = case.real;
    let fixed = real.least_bytes() + case.predictor_bytes;
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
    let run = |policy, share| assumption.run(case, policy, share);
    let share = largest(|share| Ok(run(Policy::Full, share)?.tokens_per_s <= most))?;
    let (fixed, full) =
        (run(Policy::Static, share.unwrap_or(MIN_SHARE))?, run(Policy::Full, share.unwrap_or(MIN_SHARE))?);
    Ok(Switched { assumption, share, tokens_per_s: full.tokens_per_s, gpu_share: (fixed.gpu_share, full.gpu_share) })
}

/// The largest share up to which `holds`, to a thousandth; `None` if it does not even with [`MIN_SHARE`].
fn largest(mut holds: impl FnMut(f64) -> Result<bool>) -> Result<Option<f64>> {
    let (mut low, mut high) = (MIN_SHARE, 1.0);
    if !holds(low)? {
        return Ok(None);
    }
    for _ in 0..HALVINGS {
        let middle = (low + high) / 2.0;
        if holds(middle)? { low = middle } else { high = middle }
    }
    Ok(Some(low))
}

/// Results where less device memory holds neurons.
#[derive(Clone, Debug, Serialize)]
pub struct Held {
    /// Share of the memory that neurons could have, 0 to 1.
    pub share: f64,
    /// What each policy reaches with it.
    pub outcomes: Vec<(Policy, Outcome)>,
}

/// What `policies` reach where the device holds no more than `gpu_share` (0 to 1) of the computed neurons under `static`; `None` if it
/// cannot hold so few.
///
/// # Errors
/// Those of [`Case::run`].
pub fn held(case: &Case<'_>, policies: &[Policy], gpu_share: f64) -> Result<Option<Held>> {
    let run = |policy, share| Assumption::NeuronMemory.run(case, policy, share);
    let Some(share) = largest(|share| Ok(run(Policy::Static, share)?.gpu_share <= gpu_share))? else {
        return Ok(None);
    };
    let outcomes = policies.iter().map(|&policy| Ok((policy, run(policy, share)?))).collect::<Result<_>>()?;
    Ok(Some(Held { share, outcomes }))
}
