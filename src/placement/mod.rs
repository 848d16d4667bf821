//! Which neurons lie on the device when decoding begins: the problem of powerinfer 6, its exact solution, an upper bound that
//! shows how good a solution is, and the placements that follow from it; and the plan of everything on the device, to the byte.
//!
//! As in the paper, sizes are counted in batches of neurons with similar impact; `docs/internals.md` states the problem.

pub mod cost;
pub mod details;
pub mod disk_plan;
pub mod drawn;
pub mod estimate;
pub mod footprint;
pub mod ilp;
pub mod memory_plan;
pub mod policy;
pub mod problem;
pub mod prompt_chunk;
pub mod shapes;
pub mod solve;

pub use cost::{Costs, min_neurons};
pub use policy::PlacementPolicy;
pub use problem::{Problem, ranking};
pub use solve::{Solution, solve, upper_bound};
