//! How a plan came about: each layer's slots, and the figures behind the choice.

use super::problem::{LayerProblem, Prices};
use super::solve::gap;
use super::{Costs, Problem, Solution, ilp, solve, upper_bound};
use crate::clock;
use crate::error::{Error, Result};
use serde::Serialize;

/// One layer's share of the slots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerSlots {
    /// Neuron blocks of the layer that the device has room for.
    pub slots: usize,
    /// Impact of the neurons in them.
    pub impact: u64,
    /// Impact of all neurons of the layer.
    pub total_impact: u64,
    /// All neurons of the layer are on the device: the host has no part of it.
    pub whole: bool,
}

/// How the plan came about.
#[derive(Clone, Debug, Serialize)]
pub struct Details {
    /// Sum of the impacts of all neurons.
    pub total_impact: u64,
    /// Value of the placement: its impact, or with [`skips_host`](super::memory_plan::Request::skips_host) the picoseconds that it saves a
    /// token.
    pub value: u64,
    /// Upper bound of what any placement within the budget is worth.
    pub bound: u64,
    /// Layers whose neurons are all on the device.
    pub whole_layers: usize,
    /// Time of all layers' FFNs for a token by the cost model, us.
    pub ffn_us: f64,
    /// The same of the placement with the most impact.
    pub ffn_us_by_impact: f64,
    /// Host memory that it uses, bytes: the sum over the parts.
    pub host_bytes: u64,
    /// Host memory that a card reads in place, bytes, and that the system is asked not to swap: every neuron block, and attention's
    /// matrices that are copied for every pass.
    pub pinned_bytes: u64,
    /// Bytes of one neuron block.
    pub block_bytes: u64,
    /// Neurons that are placed together, as one batch.
    pub batch: usize,
    /// C_l: fewest neurons of a layer that pay on the device, if any are there.
    pub min_neurons: usize,
    /// Times that the placement is found by, us.
    #[serde(flatten)]
    pub costs: Costs,
    /// Time that finding the placement took, ms.
    pub solve_ms: f64,
    /// The same problem by a general solver; `None` where that was not asked for.
    pub ilp: Option<IlpCheck>,
}

/// Result of a general solver on the same placement problem.
#[derive(Clone, Debug, Serialize)]
pub struct IlpCheck {
    /// What the placement that it found is worth.
    pub value: u64,
    /// Whether it proved that there is no better one; if not, it ran out of time.
    pub optimal: bool,
    /// (its value - the plan's) / its value; negative where the plan is better.
    pub gap: f64,
    /// Time that it took, ms.
    pub solve_ms: f64,
}

/// Each layer's slots, for so many batches of each.
pub(super) fn slots_of(problem: &Problem, batches: &[usize]) -> Vec<LayerSlots> {
    let of = |(layer, &n): (&LayerProblem, &usize)| LayerSlots {
        slots: n * problem.batch,
        impact: layer.impacts[..n].iter().sum(),
        total_impact: layer.impacts.iter().sum(),
        whole: n == layer.impacts.len(),
    };
    problem.layers.iter().zip(batches).map(of).collect()
}

fn ilp_check(problem: &Problem, budget_bytes: u64, ours: u64, seconds: f64) -> Result<IlpCheck> {
    let start = clock::now();
    let solved = ilp::solve(problem, budget_bytes, seconds)
        .map_err(|why| Error::Failed(format!("the integer programme was not solved: {why}; give it more seconds")))?;
    let solve_ms = start.elapsed().as_secs_f64() * 1e3;
    Ok(IlpCheck { value: solved.value, optimal: solved.optimal, gap: gap(solved.value, ours), solve_ms })
}

impl Details {
    /// Of the placement `solution` within `ffn_budget` bytes, which took `solve_ms` to find. `by_impact` is the problem without times.
    ///
    /// # Errors
    /// [`Error::Failed`] where the general solver, asked for so many seconds, finds nothing.
    pub(super) fn new(
        (problem, by_impact, prices): (&Problem, &Problem, &Prices),
        (solution, ffn_budget, solve_ms): (&Solution, u64, f64),
        (costs, block_bytes, min_neurons): (&Costs, u64, usize),
        ilp_seconds: Option<f64>,
    ) -> Result<Details> {
        let token_us = |batches: &[usize]| prices.token_ns(problem, batches) / 1e3;
        let ffn_us = token_us(&solution.batches);
        let is_by_time = !std::ptr::eq(problem, by_impact);
        let check = |seconds| ilp_check(problem, ffn_budget, solution.value, seconds);
        Ok(Details {
            total_impact: problem.total_impact(),
            value: solution.value,
            bound: upper_bound(problem, ffn_budget),
            whole_layers: slots_of(problem, &solution.batches).iter().filter(|layer| layer.whole).count(),
            ffn_us,
            ffn_us_by_impact: if is_by_time { token_us(&solve(by_impact, ffn_budget).batches) } else { ffn_us },
            host_bytes: 0,
            pinned_bytes: 0,
            block_bytes,
            batch: problem.batch,
            min_neurons,
            costs: *costs,
            solve_ms,
            ilp: ilp_seconds.map(check).transpose()?,
        })
    }
}
