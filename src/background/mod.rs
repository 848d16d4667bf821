//! The scheduler beside the engine (DynamicInfer 4.2.2, C.3): it predicts layers ahead and calls
//! [`Scheduler::step`](crate::scheduler::Scheduler::step) while the engine computes.
//!
//! On a thread of its own, it exchanges observations and decisions with the engine over two rings on which neither waits
//! ([`crate::cache::exchange`]); what does not fit is dropped and counted. On a virtual clock ([`Latency`]) the same observations and
//! decisions take a stated time instead, so that a run can be repeated to the bit, whatever else the machine does.
//!
//! Before a layer's FFN the engine sends what it knows of the layer. It applies new decisions there and when the next layer begins, so that
//! a copy for that layer can arrive during its attention; only there does a slot change. A decision that comes after the use that it is for
//! is dropped: the link carries nothing for a layer that has passed. The scheduler sees no device and no slot table, only copies of the
//! latter, so a late or stalled one costs hits and never changes a result.

mod engine_side;
mod learnt;
mod message;
mod options;
mod shared;
mod ticker;
mod worker;

pub use engine_side::Background;
pub use learnt::{Keep, Learner, Learnt};
pub use options::{BackgroundOptions, Latency, Tune};
