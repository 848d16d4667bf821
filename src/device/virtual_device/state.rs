//! The virtual device itself: its memory, its streams and its clock.

use super::memory::Bytes;
use super::queue::{Astray, EventState, MAX_ASTRAY, Queue};
use super::rates::{Faults, QUEUES, Rates};
use crate::cpu::Kernels;
use crate::device::kernel::HostScratch;
use crate::device::{Buffer, Fault, Memory, Totals};
use crate::prng::Prng;

/// A device of host memory on a virtual clock.
pub struct VirtualDevice {
    pub(super) rates: Rates,
    pub(super) faults: Faults,
    pub(super) prng: Prng,
    pub(super) kernels: Kernels,
    pub(super) memory: Memory,
    /// The buffers by their id, which is never given twice; `None` once freed.
    pub(super) buffers: Vec<Option<Bytes>>,
    pub(super) events: Vec<EventState>,
    pub(super) queues: [Queue; 2],
    pub(super) astray: Vec<Astray>,
    /// Of each stream's kernels.
    pub(super) scratch: [HostScratch; 2],
    /// Bytes of scratch memory that a card would have taken for calls so far.
    pub(super) prepared: u64,
    /// When the link is free again, in each direction.
    pub(super) link_free_ns: [u64; 2],
    pub(super) host_ns: u64,
    /// Time that the host's part of an FFN takes beside reading its neurons, us.
    pub(super) share_us: f64,
    pub(super) totals: Totals,
    /// The launch that fails for good, counted from one, and the fault that it has caused.
    pub(super) fails_at: Option<u64>,
    pub(super) fault: Option<Fault>,
}

impl VirtualDevice {
    /// A device with `budget` bytes.
    pub fn new(budget: u64, rates: Rates) -> VirtualDevice {
        VirtualDevice {
            rates: rates.check(),
            faults: Faults::default(),
            prng: Prng::new(0),
            kernels: Kernels::best(),
            memory: Memory { budget, ..Memory::default() },
            buffers: Vec::new(),
            events: Vec::new(),
            queues: QUEUES.map(Queue::new),
            astray: Vec::with_capacity(MAX_ASTRAY),
            scratch: Default::default(),
            prepared: 0,
            link_free_ns: [0; 2],
            host_ns: 0,
            share_us: 0.0,
            totals: Totals::default(),
            fails_at: None,
            fault: None,
        }
    }

    /// The same device with faulty copies.
    pub fn with_faults(mut self, faults: Faults) -> VirtualDevice {
        self.faults = faults;
        self.prng = Prng::new(faults.seed);
        self
    }

    /// The same device, but its launch of this number, counted from one, fails and ends all work, as a sticky error of a driver does.
    pub fn failing_at(mut self, launch: u64) -> VirtualDevice {
        self.fails_at = Some(launch);
        self
    }

    /// The same device beside a host whose part of an FFN takes `share_us` more, however few neurons it has.
    pub fn with_host_share(mut self, share_us: f64) -> VirtualDevice {
        self.share_us = share_us;
        self
    }

    /// The same device with other lengths of the compute and the copy stream than [`QUEUES`].
    pub fn with_queues(mut self, capacities: [usize; 2]) -> VirtualDevice {
        assert!(capacities.iter().all(|&c| c > 0));
        self.queues = capacities.map(Queue::new);
        self
    }

    /// Sets the rates from now on; work that has begun keeps its times.
    pub fn set_rates(&mut self, rates: Rates) {
        self.rates = rates.check();
    }

    /// The host's virtual time, ns.
    pub fn clock_ns(&self) -> u64 {
        self.host_ns
    }

    /// Lets virtual time pass, in which the host was busy with something else.
    pub fn advance(&mut self, ns: u64) {
        self.host_ns += ns;
    }

    /// Checks a range of a buffer.
    ///
    /// # Panics
    /// If there is no such buffer, or the range is not in it.
    pub(super) fn check(&self, buffer: Buffer, at: u64, bytes: u64) {
        let there = self.buffers.get(buffer.id as usize).and_then(Option::as_ref);
        let there = there.unwrap_or_else(|| panic!("buffer {} was freed, or never was", buffer.id));
        assert!(!there.reserved, "buffer {} is reserved: it is not the device's to copy", buffer.id);
        let end = at.checked_add(bytes).filter(|&end| end <= buffer.bytes);
        assert!(end.is_some(), "{bytes} bytes at {at} are not in buffer {} of {}", buffer.id, buffer.bytes);
    }
}
