//! Graphs: nodes that are added one by one, and what was made of them, which can be changed node by node.
//!
//! Nodes that no edge orders run as late as they were made early, so that an edge that is missing shows.

use super::entries::{
    CONTEXT, FAILS, INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY, enter_context, functions, give, launch_op, put,
};
use super::world::Code;
use super::world::{Exec, Graph, Kind, Node, Op, World};
use std::ffi::{c_uint, c_ulonglong, c_void};

/// What an exec takes of the card's memory: a driver takes some, and does not say how much.
const EXEC_BYTES: u64 = 64 << 10;

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
pub struct KernelNode {
    function: u64,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    arguments: *const *const c_void,
    extra: *const c_void,
    kernel: u64,
    context: u64,
}

/// One side of `CUDA_MEMCPY3D_v2`.
#[repr(C)]
pub struct Side {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: c_uint,
    host: u64,
    card: u64,
    array: u64,
    reserved: u64,
    pitch: usize,
    height: usize,
}

#[repr(C)]
pub struct MemcpyNode {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
    depth: usize,
}

impl Side {
    /// Address, and whether it is the host's; of memory that has one dimension.
    fn place(&self) -> Result<(u64, bool), Code> {
        let flat = [self.y, self.z, self.level].iter().all(|&v| v == 0) && self.array == 0 && self.reserved == 0;
        match self.kind {
            1 if flat => Ok((self.host + self.x as u64, true)),
            2 if flat => Ok((self.card + self.x as u64, false)),
            _ => Err(INVALID_VALUE),
        }
    }
}

fn kernel_op(world: &World, node: &KernelNode) -> Result<(Kind, Op), Code> {
    if node.kernel != 0 || !node.extra.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller gives a pointer for each argument, as the driver API asks.
    let op = unsafe { launch_op(world, node.function, node.grid, node.block, node.shared, node.arguments)? };
    Ok((Kind::Kernel, op))
}

/// Between the card and host memory, as they are now: what becomes of either later is the caller's to know.
fn copy_op(world: &World, node: &MemcpyNode) -> Result<(Kind, Op), Code> {
    let ((from, from_host), (to, to_host)) = (node.from.place()?, node.to.place()?);
    let bytes = node.width;
    if bytes == 0 || node.height != 1 || node.depth != 1 || from_host == to_host {
        return Err(INVALID_VALUE);
    }
    for side in [&node.from, &node.to] {
        if side.pitch < side.x + bytes || side.height == 0 {
            return Err(INVALID_VALUE);
        }
    }
    let (host, card) = if from_host { (from, to) } else { (to, from) };
    world.is_pinned(host, bytes as u64)?;
    if !world.is_device(card, bytes as u64) {
        return Err(INVALID_VALUE);
    }
    let kind = if from_host { Kind::In } else { Kind::Out };
    Ok((kind, Op::Copy { from, to, bytes, link: true }))
}

/// # Safety
/// `first` are `count` nodes.
unsafe fn add(
    world: &mut World,
    graph: u64,
    first: *const u64,
    count: usize,
    (kind, op): (Kind, Op),
) -> Result<u64, Code> {
    // SAFETY: the caller's promise; of none the pointer is not read.
    let after: Vec<u64> = (0..count).map(|i| unsafe { *first.add(i) }).collect();
    let id = world.handle();
    let Graph { nodes } = world.graphs.get_mut(&graph).ok_or(INVALID_HANDLE)?;
    if after.iter().any(|node| !nodes.iter().any(|there| there.id == *node)) {
        return Err(INVALID_VALUE);
    }
    nodes.push(Node { id, kind, op, after });
    Ok(id)
}

/// Changes a node of an exec into another of its kind; it is still in the graph that the exec was made of.
fn set(world: &mut World, exec: u64, node: u64, (kind, op): (Kind, Op)) -> Result<(), Code> {
    let graph = world.execs.get(&exec).ok_or(INVALID_HANDLE)?.graph;
    if !world.graphs.get(&graph).is_some_and(|graph| graph.nodes.iter().any(|n| n.id == node)) {
        return Err(INVALID_VALUE);
    }
    let nodes = &mut world.execs.get_mut(&exec).expect("looked at above").nodes;
    let there = nodes.iter_mut().find(|n| n.id == node && n.kind == kind).ok_or(INVALID_VALUE)?;
    there.op = op;
    Ok(())
}

functions! {
    enter_context cuGraphCreate(graph: *mut u64, flags: c_uint) |world| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let id = world.handle();
        world.graphs.insert(id, Graph { nodes: Vec::new() });
        give!(graph, id);
        Ok(())
    }
    enter_context cuGraphDestroy(graph: u64) |world| {
        world.graphs.remove(&graph).map(|_| ()).ok_or(INVALID_HANDLE)
    }
    enter_context cuGraphAddKernelNode_v2(
        node: *mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        params: *const KernelNode
    ) |world| {
        // SAFETY: the caller gives one, and as many nodes as it says.
        let id = unsafe {
            let op = kernel_op(&world, &*params)?;
            add(&mut world, graph, after, count, op)?
        };
        give!(node, id);
        Ok(())
    }
    enter_context cuGraphAddMemcpyNode(
        node: *mut u64,
        graph: u64,
        after: *const u64,
        count: usize,
        params: *const MemcpyNode,
        context: u64
    ) |world| {
        if context != CONTEXT {
            return Err(INVALID_VALUE);
        }
        // SAFETY: as above.
        let id = unsafe {
            let op = copy_op(&world, &*params)?;
            add(&mut world, graph, after, count, op)?
        };
        give!(node, id);
        Ok(())
    }
    enter_context cuGraphInstantiateWithFlags(exec: *mut u64, graph: u64, flags: c_ulonglong) |world| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let nodes = world.graphs.get(&graph).ok_or(INVALID_HANDLE)?.nodes.clone();
        if world.used + EXEC_BYTES > world.card.memory {
            return Err(OUT_OF_MEMORY);
        }
        world.used += EXEC_BYTES;
        let id = world.handle();
        world.execs.insert(id, Exec { graph, nodes });
        give!(exec, id);
        Ok(())
    }
    enter_context cuGraphExecDestroy(exec: u64) |world| {
        world.execs.remove(&exec).ok_or(INVALID_HANDLE)?;
        world.used -= EXEC_BYTES;
        Ok(())
    }
    enter_context cuGraphExecKernelNodeSetParams_v2(exec: u64, node: u64, params: *const KernelNode) |world| {
        // SAFETY: the caller gives one.
        let op = kernel_op(&world, unsafe { &*params })?;
        set(&mut world, exec, node, op)
    }
    enter_context cuGraphExecMemcpyNodeSetParams(
        exec: u64,
        node: u64,
        params: *const MemcpyNode,
        context: u64
    ) |world| {
        if context != CONTEXT {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller gives one.
        let op = copy_op(&world, unsafe { &*params })?;
        set(&mut world, exec, node, op)
    }
    enter_context cuGraphLaunch(exec: u64, stream: u64) |world| {
        let mut left = world.execs.get(&exec).ok_or(INVALID_HANDLE)?.nodes.clone();
        // To fail when it runs: `put` makes a failure of whatever comes.
        if FAILS.get() != 0 {
            left.truncate(1);
        }
        // What is on the stream is done as the exec is now, whatever becomes of it.
        while let Some(next) = left.iter().rposition(|n| n.after.iter().all(|id| !left.iter().any(|m| m.id == *id))) {
            let op = left.remove(next).op;
            put(&mut world, stream, op)?;
        }
        Ok(())
    }
}
