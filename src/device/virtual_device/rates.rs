//! What a virtual device computes its times from, and what goes wrong on it.

use crate::device::KernelWork;

/// Operations that the compute and the copy stream can hold; when one is full, the host waits until its oldest operation is done. The
/// first is the work of some layers, the second more than the neuron cache lets be on its way, at three operations for each move.
pub const QUEUES: [usize; 2] = [256, 3 * 4096 + 64];
/// What a call of the device costs the host, ns: about as much as one of a driver. It lets virtual time pass between two waits.
pub const HOST_CALL_NS: u64 = 200;
/// The rates that a virtual device computes its times from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// How fast a kernel reads the device's memory, GB/s.
    pub device_gb_s: f64,
    /// How fast kernels multiply and add, GFLOP/s, each counted.
    pub device_gflops: f64,
    /// How fast the link is in each direction, GB/s.
    pub link_gb_s: f64,
    /// How fast all cores of the host read its memory, GB/s.
    pub host_gb_s: f64,
    /// How fast all cores of the host do a prompt's products, GFLOP/s: multiplications and additions, each counted.
    pub host_gflops: f64,
    /// Time before each kernel, us.
    pub call_us: f64,
    /// Time before each copy, us.
    pub copy_us: f64,
    /// The least time that a wait of the host takes, us.
    pub sync_us: f64,
}

impl Rates {
    pub(super) fn check(self) -> Rates {
        let rates = [self.device_gb_s, self.device_gflops, self.link_gb_s, self.host_gb_s, self.host_gflops];
        assert!(rates.iter().all(|&rate| rate > 0.0), "rates are above zero: {self:?}");
        self
    }

    /// How long a kernel takes: what is longer of reading and of arithmetic.
    pub(super) fn kernel_ns(self, work: KernelWork) -> u64 {
        let reading = Rates::ns(self.call_us, work.bytes, self.device_gb_s);
        reading.max(Rates::ns(self.call_us, work.operations, self.device_gflops))
    }

    /// GB/s are bytes per nanosecond, and GFLOP/s operations.
    pub(super) fn ns(before_us: f64, bytes: u64, gb_s: f64) -> u64 {
        (before_us * 1e3 + bytes as f64 / gb_s) as u64
    }
}

/// What goes wrong with copies on the copy stream, for tests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Share of copies that take up to 64 times as long.
    pub late: f64,
    /// Share of copies that never arrive, or only their first half; the event behind them is never done.
    pub lost: f64,
    /// Whether copies may be overtaken by later ones.
    pub reorder: bool,
    /// Seed of the chances above.
    pub seed: u64,
}
