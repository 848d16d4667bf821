//! Devices: a GPU as the engine sees it, a second memory that computes. The virtual device stands in for one.
//!
//! Work is put on streams. A stream does its work in order, streams run in parallel, and nothing waits unless it is asked to. Events
//! order the streams and let the host ask what is done. The host blocks in functions whose name or text says so, and nowhere else.
//!
//! A device belongs to the engine's thread. Its memory has a hard budget: [`Device::alloc`] refuses what is beyond.

#[cfg(feature = "cuda")]
pub mod cuda;
mod interface;
pub mod kernel;
mod moves;
mod pinned_buffer;
pub mod timeline;
mod traced;
mod types;
mod virtual_device;

pub use interface::{Device, HostWork, fastest_ns};
pub use kernel::{
    Add, Append, Attend, Call, ColumnWeights, DenseFfn, ExpertFfn, Heads, KernelWork, Linear, Mixture, NONE, Norm,
    Select, SignScores, SlotBlocks, SparseFfn, Then, Tiles, View,
};
pub use moves::{Block, MoveMethod, MoveRate, fastest, run};
pub use pinned_buffer::PinnedBuffer;
pub use timeline::{Note, Stage, Timeline};
pub use traced::Traced;
pub use types::{Buffer, Event, Fault, Memory, OutOfMemory, Stream, Totals};
pub use virtual_device::{Faults, HOST_CALL_NS, QUEUES, Rates, VirtualDevice};
