//! Streams, events, memory and failures of devices.

/// A queue of work of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Kernels and the copies between them.
    Compute,
    /// Neuron blocks on their way to slots, beside the kernels.
    Copy,
}

impl Stream {
    /// Both streams, in the order of arrays by stream.
    pub const ALL: [Stream; 2] = [Stream::Compute, Stream::Copy];
}

/// The number of an event of one device: a mark in a stream, which can be recorded again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub u32);

/// A run of bytes in a device's memory. Freed by [`super::Device::free`], not by being dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer {
    /// The device's number for it, never given twice.
    pub id: u32,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Device memory, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Most that buffers may take together.
    pub budget: u64,
    /// What buffers take now.
    pub used: u64,
    /// The most that they have taken since the budget was set.
    pub peak: u64,
}

/// What a device did since it was opened, and when, by its own clock: a virtual device's times are never a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// The device's clock as the host sees it, ns.
    pub clock_ns: u64,
    /// Per stream (as in [`Stream::ALL`]): time in which it was copying or computing, ns.
    pub busy_ns: [u64; 2],
    /// Time in which the host waited for a stream, ns.
    pub waited_ns: u64,
    /// Bytes of copies to the device and from it that have begun.
    pub link_bytes: [u64; 2],
    /// Those of the bytes to the device that went on the copy stream.
    pub migrated_bytes: u64,
    /// Copies that these bytes came in.
    pub migrations: u64,
    /// Time in which the host computed, ns ([`super::Device::worked`]).
    pub host_ns: u64,
    /// Time, by the machine's clock, that a virtual device took for its copies and kernels on its caller's thread, ns: a card would have done them
    /// beside it. 0 for a card.
    pub pretended_ns: u64,
    /// Bytes of weights that kernels read from the device's memory.
    pub device_bytes: u64,
    /// Copies in both directions.
    pub copies: u64,
    /// Calls that were run.
    pub launches: u64,
    /// Calls for which the device was not prepared ([`super::Device::prepare`]): launching them allocated memory, and waited.
    pub unprepared: u64,
}

/// A buffer was refused because the device's memory or budget has no room for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Bytes that were asked for.
    pub asked: u64,
    /// Bytes that could have been had.
    pub left: u64,
}

/// Why a device works no longer, in a sentence with what to do about it. Results since [`super::Device::fault`] was last `None` cannot be
/// trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(pub String);
