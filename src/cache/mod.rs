//! The neuron cache: which neurons lie in a device's memory.

pub mod slot_table;

pub use slot_table::{Slot, SlotTable};
