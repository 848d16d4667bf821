//! The same problem as the integer linear programme that powerinfer 6.3 prints, solved by a general solver: a check of
//! [`super::solve()`] that shares no code with it.

use super::problem::{LayerProblem, Problem};
use good_lp::{
    Expression, ProblemVariables, ResolutionError, Solution as _, SolverModel, Variable, WithTimeLimit, microlp,
    solvers::SolutionStatus, variable,
};

/// A placement that the integer linear programme solver found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IlpSolution {
    /// Batches of each layer on the device, `[layers]`.
    pub batches: Vec<usize>,
    /// Value of all neurons on the device: their impact (powerinfer 6.3, equation 2), or the time that they save.
    pub value: u64,
    /// Whether the solver proved that there is no better one; if not, it ran out of time.
    pub optimal: bool,
}

/// Maximises the value of the batches on the device (powerinfer 6.3, equation 2) so that each batch is there or not (3), all fit into the
/// budget (6), and a layer has none (8) or at least C_l of them (7). A batch is only there with all better ones of its layer: what it is worth may
/// depend on them.
///
/// Branch and bound takes minutes on some problems of real size, so it ends after `seconds` with the best placement found.
///
/// # Errors
/// The reason in words, if the solver finds nothing in that time, or fails.
pub fn solve(problem: &Problem, budget_bytes: u64, seconds: f64) -> Result<IlpSolution, String> {
    let mut variables = ProblemVariables::new();
    let on_device: Vec<Vec<Variable>> = problem
        .layers
        .iter()
        .map(|layer| layer.impacts.iter().map(|_| variables.add(variable().binary())).collect())
        .collect();
    let used: Vec<Variable> = problem.layers.iter().map(|_| variables.add(variable().binary())).collect();
    // The solver's tolerances suit numbers near 1.
    let rises = |layer: &LayerProblem| layer.values.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<u64>>();
    let top = problem.layers.iter().flat_map(rises).max().unwrap_or(0).max(1) as f64;
    let value: Expression = problem
        .layers
        .iter()
        .zip(&on_device)
        .flat_map(|(layer, vars)| rises(layer).into_iter().zip(vars))
        .map(|(v, &var)| v as f64 / top * var)
        .sum();
    let mut model = variables.maximise(value).using(microlp).with_time_limit(seconds);
    let all: Expression = on_device.iter().flatten().copied().sum();
    model.add_constraint(all.leq(problem.capacity(budget_bytes) as f64));
    for ((layer, vars), &used) in problem.layers.iter().zip(&on_device).zip(&used) {
        let count: Expression = vars.iter().copied().sum();
        model.add_constraint(count.geq(layer.min_neurons as f64 * used));
        // Inequality 8 for each batch by itself: with K = 1 it is as tight as possible.
        for &var in vars {
            model.add_constraint((var - used).leq(0.0));
        }
        for pair in vars.windows(2) {
            model.add_constraint((pair[1] - pair[0]).leq(0.0));
        }
    }
    let solved = model.solve().map_err(|e: ResolutionError| e.to_string())?;
    let there = |vars: &Vec<Variable>| vars.iter().map(|&v| solved.value(v) > 0.5).collect::<Vec<bool>>();
    let count = |vars: &Vec<Variable>| there(vars).into_iter().filter(|there| *there).count();
    let batches: Vec<usize> = on_device.iter().map(count).collect();
    Ok(IlpSolution {
        value: problem.value(&batches),
        batches,
        optimal: matches!(solved.status(), SolutionStatus::Optimal),
    })
}
