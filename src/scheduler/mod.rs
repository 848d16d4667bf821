//! Which neurons to bring to the device while a text is being generated (DynamicInfer 4.3, 4.4, E.3, E.4).
//!
//! Everything that decides is a pure function of plain numbers or owns nothing but its own history: [`importance`] scores,
//! [`greedy`] chooses, [`window`] bounds, [`gain`] notices where it does not pay, [`thresholds`] balances the two halves.
//! [`Scheduler`] is their one path, the same in a replay of a trace and beside a running engine. `docs/papers.md` has the paper's
//! equation of each.

mod decide;
pub mod gain;
pub mod greedy;
pub mod importance;
pub mod policy;
pub mod thresholds;
pub mod window;

pub use decide::{Scheduler, Totals, View, snapshot};
pub use policy::{Policy, Rules};
