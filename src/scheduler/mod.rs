//! Decides which neurons to bring to the device while text is generated (DynamicInfer 4.3, 4.4, E.3, E.4).
//!
//! [`Scheduler::step`] takes an observation of a layer and gives decisions. It is the one loop of the thread beside the engine, of a
//! replayed trace and of the simulator. What it decides by is pure or owns only its own history: [`policy`] chooses, one file per policy,
//! [`importance`] scores, [`forecast`] says how often experts will be used, [`sequences`] counts what fires, [`window`] limits what is on the link, [`gain`] notices when moving does not
//! pay, [`rates`] measures, [`costs`] says what that makes of a layer ([`h200`] on a card), and [`thresholds`] balances the parts of device and CPU by it. `docs/papers.md` has the paper's equation for each.

pub mod chunks;
pub mod costs;
pub mod forecast;
pub mod gain;
pub mod h200;
pub mod importance;
mod log;
pub mod policy;
pub mod rates;
pub mod sequences;
mod step;
pub mod thresholds;
pub mod window;

pub use gain::{Comparison, Verdict};
pub use policy::greedy::Move;
pub use policy::{Policy, Rules};
pub use rates::LayerTimes;
pub use sequences::Fired;
pub use step::{Decision, DeviceState, LayerObservation, Prompt, Scheduler, SchedulerOptions};
