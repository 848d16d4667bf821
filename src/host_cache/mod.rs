//! The neuron cache in host memory (PowerInfer-2 4.2): neurons of a store that is larger than memory, in frames of fixed places, read from
//! disk when they are needed. Experts of a mixture are kept in the same way: what is said of neurons here is true of them.
//!
//! Each layer has as many frames as the memory allows, and a policy of the scheduler chooses the neurons that stay in them. A needed neuron
//! without a frame is read: into the frame that it gets, or, where several are read at once or no frame is free, into the **landing**, from
//! where the thread that computes it copies it into its frame. A neuron that gets no frame is computed in the landing and forgotten.
//!
//! A layer's use: [`HostCache::begin`] with the neurons that are needed, in units that are each computed by one thread; for each
//! [`HostCache::next_round`] a parallel call that finds them by [`Arriving`]; [`HostCache::end`]. One round has what one half of the landing
//! takes, and the reads of the next round are under way meanwhile. Where all neurons are needed, [`HostCache::begin_strips`] streams them
//! through the landing, in order and in large reads (4.1.1).
//!
//! For layers whose turn has not come, [`HostCache::prefetch`] asks for what they will probably need.
//!
//! Where the file has a checksum of each block, a block is compared with it when it is first read (`checksums`).
//!
//! Only the engine's thread changes anything here, between parallel calls; within one, threads look and wait (`reads`).

mod ahead;
mod blocks;
mod budget;
mod checksums;
mod fault;
mod layer;
mod memory;
mod options;
mod plan;
mod reads;
mod rehearsal;
mod shares;
mod state;
mod strips;

pub use blocks::{LayerBlocks, MAX_UNITS, Run, STRIP, STRIP_READ, units_of};
pub use fault::{ReadFault, Unread};
pub use options::{HostCacheCounts, HostCacheOptions, least_bytes};
pub use plan::{Arriving, Round, Strip};
pub use reads::{MAX_AHEAD, ReadCounts};
pub use rehearsal::{BEFORE, COUNTED, Rehearsal, Rehearsed};
pub use state::HostCache;
