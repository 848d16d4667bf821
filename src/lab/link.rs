//! A simulated host-to-device link and the host memory bandwidth that it shares with the CPU.

use crate::ids::SlotId;
use std::collections::VecDeque;

/// Share of the host's memory bandwidth that a busy link takes at most: the memory controller serves CPU and link.
const MAX_MEMORY_SHARE: f64 = 0.5;

/// A group of copies that arrives as a whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Copy {
    /// Layer whose neurons it carries.
    pub layer: usize,
    /// Slots of that layer that it fills.
    pub slots: Vec<SlotId>,
    /// Bytes that it carries.
    pub bytes: f64,
    /// Time that it takes on the link once it has begun, ns.
    pub ns: f64,
}

/// A queue of copies, carried out one after the other in the order in which they were put. Time is in nanoseconds and only moves forward.
#[derive(Clone, Debug, Default)]
pub struct Link {
    queue: VecDeque<Copy>,
    /// Time that the first copy still needs, ns.
    left: f64,
    /// Bytes of all copies that wait or are under way.
    pub bytes: f64,
    /// Time until all of them have arrived, ns.
    pub busy_ns: f64,
}

impl Link {
    /// Adds a copy at the end of the queue.
    pub fn put(&mut self, copy: Copy) {
        if self.queue.is_empty() {
            self.left = copy.ns;
        }
        self.bytes += copy.bytes;
        self.busy_ns += copy.ns;
        self.queue.push_back(copy);
    }

    /// Lets `ns` nanoseconds pass; copies that arrive meanwhile are given to `landed`. Returns for how much of that time the link was busy,
    /// ns.
    pub fn advance(&mut self, ns: f64, mut landed: impl FnMut(Copy)) -> f64 {
        let mut rest = ns;
        while let Some(first) = self.queue.front() {
            if self.left > rest {
                self.left -= rest;
                self.busy_ns -= rest;
                return ns;
            }
            rest -= self.left;
            self.busy_ns -= self.left;
            self.bytes -= first.bytes;
            let first = self.queue.pop_front().expect("it is not empty");
            landed(first);
            self.left = self.queue.front().map_or(0.0, |next| next.ns);
        }
        (self.bytes, self.busy_ns) = (0.0, 0.0);
        ns - rest
    }
}

/// Time that the CPU takes to read `bytes`, ns, at `dram` GB/s, while the link reads the same memory at `link` GB/s for another `busy_ns`.
pub fn cpu_ns(bytes: f64, dram: f64, link: f64, busy_ns: f64) -> f64 {
    let beside = dram - link.min(dram * MAX_MEMORY_SHARE);
    if bytes <= beside * busy_ns {
        return bytes / beside;
    }
    busy_ns + (bytes - beside * busy_ns) / dram
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(layer: usize, ns: f64) -> Copy {
        Copy { layer, slots: Vec::new(), bytes: 10.0 * ns, ns }
    }

    #[test]
    fn copies_arrive_one_after_the_other_and_an_idle_link_saves_nothing_up() {
        let mut link = Link::default();
        let mut landed = Vec::new();
        link.put(copy(0, 100.0));
        link.put(copy(1, 50.0));
        assert_eq!(link.advance(99.0, |c| landed.push(c.layer)), 99.0);
        assert!(landed.is_empty());
        assert_eq!(link.advance(1.0, |c| landed.push(c.layer)), 1.0);
        assert_eq!((landed.len(), link.bytes, link.busy_ns), (1, 500.0, 50.0));
        assert_eq!(link.advance(500.0, |c| landed.push(c.layer)), 50.0);
        link.put(copy(2, 10.0));
        assert_eq!(link.advance(9.0, |c| landed.push(c.layer)), 9.0);
        assert_eq!(landed, [0, 1]);
    }

    #[test]
    fn a_copy_slows_the_cpu_for_as_long_as_it_lasts() {
        assert_eq!(cpu_ns(1000.0, 50.0, 25.0, 0.0), 20.0);
        // Half the bandwidth for 10 ns, all of it for 15.
        assert_eq!(cpu_ns(1000.0, 50.0, 25.0, 10.0), 25.0);
        assert_eq!(cpu_ns(1000.0, 50.0, 25.0, 1e9), 40.0);
        // A link faster than memory leaves it half.
        assert_eq!(cpu_ns(1000.0, 50.0, 100.0, 1e9), 40.0);
    }
}
