//! CUDA graphs for work that comes again and again: one call of the driver starts a whole sequence.
//!
//! No graph is trusted to do what is wanted now. Whenever its sequence comes, each operation is compared with what the graph would
//! do, and what differs is changed in the graph before it is started. So buffers that move, contexts that grow and thresholds that
//! change need no report, and none of these can be forgotten.

use super::driver::{
    Address, CUcontext, CUgraph, CUgraphExec, CUgraphNode, CUstream, Code, Driver, GraphFunctions, KernelNode,
    MemcpyNode, MemoryType, Refusal,
};
use super::kernels::{Kernels, words};
use crate::device::kernel::Launch;
use std::ffi::c_void;

/// An operation of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    Launch(Launch),
    /// From pinned host memory to the card, and back.
    In {
        from: usize,
        to: Address,
        bytes: usize,
    },
    Out {
        from: Address,
        to: usize,
        bytes: usize,
    },
}

struct Graph {
    /// The nodes of the graph that `exec` was made from, in order: a node's handle says what is to be changed in `exec`.
    template: CUgraph,
    nodes: Vec<CUgraphNode>,
    exec: CUgraphExec,
    /// What each node of `exec` does.
    ops: Vec<Op>,
}

/// The graphs of a device, and the operations of the sequence that is being collected.
pub struct Graphs {
    /// Whether sequences become graphs: not once the driver has refused one.
    on: bool,
    /// The graphs by the number of their sequence.
    graphs: Vec<Option<Graph>>,
    /// The sequence that is being collected; its operations so far are in `ops`.
    coming: Option<usize>,
    ops: Vec<Op>,
}

/// What graphs are made with.
pub struct Maker<'a> {
    pub driver: &'a Driver,
    pub kernels: &'a Kernels,
    pub context: CUcontext,
}

impl Graphs {
    /// No graphs yet; none are ever made unless `on`.
    pub fn new(on: bool) -> Graphs {
        Graphs { on, graphs: Vec::new(), coming: None, ops: Vec::new() }
    }

    /// From now on operations are collected, if sequences become graphs.
    pub fn begin(&mut self, sequence: usize) {
        self.coming = self.on.then_some(sequence);
    }

    /// Whether operations are collected now.
    pub const fn collects(&self) -> bool {
        self.coming.is_some()
    }

    /// Adds an operation to the sequence that is being collected.
    pub fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// Ends collecting: the sequence that was being collected and its operations so far; `None` if there was none.
    pub fn take(&mut self) -> Option<(usize, Vec<Op>)> {
        let sequence = self.coming.take()?;
        Some((sequence, std::mem::take(&mut self.ops)))
    }

    /// Takes back the list that [`Graphs::take`] has returned, so that the next sequence allocates nothing.
    pub fn reuse(&mut self, mut ops: Vec<Op>) {
        ops.clear();
        self.ops = ops;
    }

    /// Uses no graphs from now on: operations are put on the stream one by one.
    pub fn give_up(&mut self, why: &dyn std::fmt::Display) {
        if std::mem::take(&mut self.on) {
            tracing::warn!("CUDA graphs are not used, kernels are started one by one: {why}");
        }
    }

    /// Starts `ops` by the graph of this sequence and returns the driver's code; `None` if there is no graph and nothing was started.
    pub fn start(&mut self, sequence: usize, ops: &[Op], by: &Maker<'_>, stream: CUstream) -> Option<Code> {
        // For a single operation a graph saves nothing.
        let f = by.driver.graphs.as_ref().filter(|_| self.on && ops.len() > 1)?;
        match self.fitting(sequence, ops, by, f) {
            // SAFETY: exec and stream are there; what the operations need is as for those that are started one by one.
            Ok(exec) => Some(unsafe { (f.launch)(exec, stream) }),
            Err(refusal) => {
                self.give_up(&refusal);
                None
            }
        }
    }

    /// The graph of a sequence, made or changed so that it does `ops`.
    fn fitting(
        &mut self,
        sequence: usize,
        ops: &[Op],
        by: &Maker<'_>,
        f: &GraphFunctions,
    ) -> Result<CUgraphExec, Refusal> {
        if self.graphs.len() <= sequence {
            self.graphs.resize_with(sequence + 1, || None);
        }
        let place = &mut self.graphs[sequence];
        if let Some(graph) = place
            && graph.change(ops, by, f)
        {
            return Ok(graph.exec);
        }
        if let Some(old) = place.take() {
            old.destroy(f);
        }
        Ok(place.insert(Graph::new(ops, by, f)?).exec)
    }

    /// Gives all graphs back to the driver.
    pub fn release(&mut self, driver: &Driver) {
        if let Some(f) = &driver.graphs {
            self.graphs.drain(..).flatten().for_each(|graph| graph.destroy(f));
        }
    }
}

impl Graph {
    fn new(ops: &[Op], by: &Maker<'_>, f: &GraphFunctions) -> Result<Graph, Refusal> {
        let mut graph = Graph {
            template: std::ptr::null_mut(),
            nodes: Vec::with_capacity(ops.len()),
            exec: std::ptr::null_mut(),
            ops: ops.to_vec(),
        };
        match graph.make(by, f) {
            Ok(()) => Ok(graph),
            Err(refusal) => {
                graph.destroy(f);
                Err(refusal)
            }
        }
    }

    fn make(&mut self, by: &Maker<'_>, f: &GraphFunctions) -> Result<(), Refusal> {
        // SAFETY: it writes a handle; the flags must be 0.
        let code = unsafe { (f.create)(&mut self.template, 0) };
        by.driver.check("make a graph", code)?;
        for op in &self.ops {
            // Each behind the one before, as on a stream.
            let after: &[CUgraphNode] = self.nodes.last().map_or(&[], std::slice::from_ref);
            let (mut node, template) = (std::ptr::null_mut(), self.template);
            let (first, count) = (after.as_ptr(), after.len());
            let code = match op {
                // SAFETY: graph and node are there; it copies what it is given, and writes a handle.
                Op::Launch(launch) => {
                    by.kernel(launch, |params| unsafe { (f.add_kernel)(&mut node, template, first, count, params) })
                }
                Op::In { .. } | Op::Out { .. } => {
                    let copy = copy(op);
                    // SAFETY: as above.
                    unsafe { (f.add_copy)(&mut node, template, first, count, &copy, by.context) }
                }
            };
            by.driver.check("make a graph", code)?;
            self.nodes.push(node);
        }
        // SAFETY: the graph is there; it writes a handle.
        let code = unsafe { (f.instantiate)(&mut self.exec, self.template, 0) };
        by.driver.check("make a graph ready", code)
    }

    /// Changes the graph so that it does `ops`; `false` if it cannot. It can if there are as many operations as before, copies and kernels
    /// in the same order.
    fn change(&mut self, ops: &[Op], by: &Maker<'_>, f: &GraphFunctions) -> bool {
        let alike = |(a, b): (&Op, &Op)| std::mem::discriminant(a) == std::mem::discriminant(b);
        if self.ops.len() != ops.len() || !self.ops.iter().zip(ops).all(alike) {
            return false;
        }
        for ((old, new), &node) in self.ops.iter_mut().zip(ops).zip(&self.nodes).filter(|((old, new), _)| old != new) {
            let exec = self.exec;
            let code = match new {
                // SAFETY: the node is of the graph that `exec` was made of; what is on its way already stays as it was.
                Op::Launch(launch) => by.kernel(launch, |params| unsafe { (f.set_kernel)(exec, node, params) }),
                Op::In { .. } | Op::Out { .. } => {
                    let copy = copy(new);
                    // SAFETY: as above.
                    unsafe { (f.set_copy)(exec, node, &copy, by.context) }
                }
            };
            // A graph that cannot be changed is made anew.
            if by.driver.check("change a graph", code).is_err() {
                return false;
            }
            *old = *new;
        }
        true
    }

    fn destroy(self, f: &GraphFunctions) {
        // SAFETY: made here; a graph that is on its way is freed when it is done.
        unsafe {
            if !self.exec.is_null() {
                (f.exec_destroy)(self.exec);
            }
            if !self.template.is_null() {
                (f.destroy)(self.template);
            }
        }
    }
}

impl Maker<'_> {
    /// Hands on a launch as a node is told it.
    fn kernel(&self, launch: &Launch, give: impl FnOnce(&KernelNode) -> Code) -> Code {
        let mut words = words(launch);
        let [x, y, z] = launch.grid;
        give(&KernelNode {
            func: self.kernels.function(launch.function),
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            kernelParams: words.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        })
    }
}

/// A copy as a node is told it: one row of bytes.
fn copy(op: &Op) -> MemcpyNode {
    use MemoryType::{CU_MEMORYTYPE_DEVICE as CARD, CU_MEMORYTYPE_HOST as HOST};
    // On either side the address of the other kind is not read.
    let (bytes, [source, target], host_from, card_from, host_to, card_to) = match *op {
        Op::In { from, to, bytes } => (bytes, [HOST, CARD], from, 0, 0, to),
        Op::Out { from, to, bytes } => (bytes, [CARD, HOST], 0, from, to, 0),
        Op::Launch(_) => unreachable!("a launch is no copy"),
    };
    MemcpyNode {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: source,
        srcHost: host_from as *const c_void,
        srcDevice: card_from,
        srcArray: std::ptr::null_mut(),
        reserved0: std::ptr::null_mut(),
        srcPitch: bytes,
        srcHeight: 1,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: target,
        dstHost: host_to as *mut c_void,
        dstDevice: card_to,
        dstArray: std::ptr::null_mut(),
        reserved1: std::ptr::null_mut(),
        dstPitch: bytes,
        dstHeight: 1,
        WidthInBytes: bytes,
        Height: 1,
        Depth: 1,
    }
}
