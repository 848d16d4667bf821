//! Launches of kernels on the card's streams, one by one or as a whole sequence.

use super::device::CudaDevice;
use super::driver::{CUstream, OUT_OF_MEMORY};
use super::graphs::{Maker, Op};
use super::kernels::words;
use crate::device::kernel::Launch;
use crate::device::{Call, Stream};

impl CudaDevice {
    /// Puts the launches of a call on a stream, or into the sequence that is being collected.
    ///
    /// # Panics
    /// If an operand is not in its buffer.
    pub(super) fn run(&mut self, stream: Stream, call: &Call) {
        call.operands(&mut |o| _ = self.address(o.view.buffer, o.view.at, o.bytes));
        let scratch = call.scratch_bytes();
        assert!(scratch == 0 || stream == Stream::Compute, "there is one scratch, the compute stream's");
        // Takes memory, and waits, only if this call was not prepared.
        self.totals.unprepared += u64::from(scratch as usize > self.scratch.taken());
        if self.fit_scratch(scratch).is_err() {
            let code = OUT_OF_MEMORY;
            self.went("take memory for a kernel", code);
        }
        let collected = stream == Stream::Compute && self.graphs.collects();
        let queue = if collected { None } else { self.begin(stream) };
        if queue.is_none() && !collected {
            return;
        }
        self.totals.device_bytes += call.weight_bytes();
        let launches = call.launches(|b| self.address(b, 0, 0), self.scratch.address(), self.tiles);
        self.totals.launches += 1;
        for launch in launches.iter() {
            match queue {
                None => self.graphs.push(Op::Launch(*launch)),
                Some(queue) if self.start(queue, launch) => {}
                Some(_) => return,
            }
        }
    }

    /// Starts the operations of a sequence that were collected, as a graph if possible.
    pub(super) fn start_sequence(&mut self) {
        let Some((number, ops)) = self.graphs.take() else { return };
        if !ops.is_empty()
            && let Some(queue) = self.begin(Stream::Compute)
        {
            let kernels = self.kernels.as_ref().expect("there since the device is");
            let by = Maker { driver: &self.card.driver, kernels, context: self.card.context() };
            match self.graphs.start(number, &ops, &by, queue) {
                Some(code) => _ = self.went("launch a graph", code),
                None => self.one_by_one(&ops),
            }
        }
        self.graphs.reuse(ops);
    }

    /// Puts collected operations on the compute stream one by one.
    pub(super) fn one_by_one(&mut self, ops: &[Op]) {
        let Some(queue) = self.begin(Stream::Compute) else { return };
        for op in ops {
            let went = match *op {
                Op::Launch(launch) => self.start(queue, &launch),
                Op::In { from, to, bytes } => self.send(queue, from as *const u8, bytes, to),
                Op::Out { from, to, bytes } => self.fetch(queue, from, to as *mut u8, bytes),
            };
            if !went {
                return;
            }
        }
    }

    /// Hands a launch to the driver; `false` if it refused. Operands lie in buffers, which are not given back before the stream is idle.
    pub(super) fn start(&mut self, queue: CUstream, launch: &Launch) -> bool {
        let mut words = words(launch);
        let function = self.kernels.as_ref().expect("there since the device is").function(launch.function);
        let [x, y, z] = launch.grid;
        // SAFETY: the kernel's arguments are as its declaration says (`launch`), and where they point to is memory of buffers, by
        // the callers.
        let code = unsafe {
            let (words, none) = (words.as_mut_ptr(), std::ptr::null_mut());
            (self.card.driver.f.launch)(function, x, y, z, launch.block, 1, 1, launch.shared_bytes, queue, words, none)
        };
        self.went("launch a kernel", code)
    }
}
