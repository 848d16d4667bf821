//! The virtual device: a second memory with a hard budget, two streams, events and a link, simulated on a virtual clock.
//!
//! Its results are real, by the CPU's kernels. Its times come from [`Rates`] and are never a measurement.
//!
//! Nothing runs at the moment when it is put on a stream. Work is done in the order of virtual time, once the host's clock has come to
//! it or the host waits for it. A copy writes its first half when it begins and the rest when it ends. A kernel reads its operands when
//! it begins, and again when it ends if they were written to meanwhile. So a host that reads too early, frees too early or overwrites the
//! operands of a running kernel gets wrong bytes here, as on a device that really runs beside it.

mod device;
mod memory;
mod queue;
mod rates;
mod state;
mod streams;

pub use rates::{Faults, HOST_CALL_NS, QUEUES, Rates};
pub use state::VirtualDevice;
