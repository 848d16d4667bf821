//! The neuron cache: which neurons are in a device's memory, and how others get there.

pub mod exchange;
mod neuron_cache;
pub mod slot_table;
mod sync;
pub mod tier;

pub use neuron_cache::{
    CacheCounters, Frames, GroupOutcome, HostBlocks, LayerCache, MAX_IN_FLIGHT, Migration, NeuronCache, NotBegun,
};
pub use slot_table::{Refused, Slot, SlotTable};
pub use tier::{Location, PerTier, Tier};
