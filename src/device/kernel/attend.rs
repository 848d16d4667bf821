//! Attention over the keys and values that lie on the device.

use super::host::{HostMemory, numbers, put, words};
use super::launch::{Addresses, Launch, Launches, WARP};
use super::{DeviceKernel, Function, KernelWork, Operand, View};
use crate::cpu::Kernels;
use crate::cpu::attend::{AttendScratch, Head};
use crate::device::Buffer;
use crate::formats::rows::Quant;
use half::f16;

pub(super) const FUNCTIONS: &[&[&str]] =
    &[&["attend_1_8", "attend_4_8", "attend_8_8", "attend_1_2", "attend_4_2", "attend_8_2"], &["attend_merge"]];
/// The functions for one, four and eight query heads at once, for heads whose dimension is a multiple of eight, and of two.
const BY_EIGHT: Function = Function::named("attend_1_8");
const BY_TWO: Function = Function::named("attend_1_2");
const MERGE: Function = Function::named("attend_merge");

/// Positions of a split, and warps of its blocks.
const SPLIT_POSITIONS: usize = 128;
const WARPS: usize = 4;
/// Shared memory that every card gives a block without being asked.
const SHARED_BYTES: usize = 48 << 10;

/// The shape of a layer's attention, and the memory of its keys and values.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key heads, and as many value heads; divides `heads`.
    pub kv_heads: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// Positions of a sequence that there is memory for.
    pub context: usize,
    /// f16 `[sequences, 2 (keys, values), kv_heads, context, head_dim]`
    pub cache: View,
}

impl Heads {
    /// Numbers of a column's queries.
    pub const fn q_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Numbers of a column's queries, keys and values.
    pub const fn qkv_dim(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Numbers of a sequence in the cache.
    pub const fn sequence(&self) -> usize {
        2 * self.kv_heads * self.context * self.head_dim
    }

    /// Where the keys of kv head `head` begin, or the values of `head - kv_heads`: numbers from the beginning of the cache.
    pub const fn start(&self, sequence: usize, head: usize) -> usize {
        sequence * self.sequence() + head * self.context * self.head_dim
    }

    /// The layer's keys and values in host memory.
    fn in_cache<'a>(&self, at: &'a dyn HostMemory) -> &'a [f16] {
        &bytemuck::cast_slice(at.of(self.cache.buffer))[self.cache.at as usize / 2..]
    }

    /// The same, to be written.
    pub(super) fn in_cache_mut<'a>(&self, at: &'a mut dyn HostMemory) -> &'a mut [f16] {
        &mut bytemuck::cast_slice_mut(at.of_mut(self.cache.buffer))[self.cache.at as usize / 2..]
    }
}

/// out = attention of each column's queries over its own sequence, itself included.
#[derive(Clone, Copy, Debug)]
pub struct Attend {
    /// Shape, and keys and values.
    pub heads: Heads,
    /// Columns.
    pub n: usize,
    /// How many positions back a column sees, its own among them; `None` for all.
    pub window: Option<usize>,
    /// The most positions that any column sees, by which a launch is sized.
    pub most: usize,
    /// `[n, qkv_dim]`, q first, rotated.
    pub qkv: View,
    /// `[n, 2]` u32: sequence and position of each column.
    pub positions: View,
    /// A score of each query head that takes part in its softmax and brings no value, `[heads]` f32; no bytes where there are none.
    pub sinks: Buffer,
    /// `[n, q_dim]`
    pub out: View,
}

/// Buffers of a run on the host.
#[derive(Default)]
pub struct Scratch {
    attend: AttendScratch,
    /// `[n, q_dim]`
    out: Vec<f32>,
}

impl Attend {
    /// Splits of the positions that some column sees; one more where a window may begin inside of one.
    fn splits(&self) -> usize {
        self.most.div_ceil(SPLIT_POSITIONS) + usize::from(self.window.is_some())
    }

    /// The function, query heads that share their keys in it, and its shared memory: fewer heads at once where they are very wide.
    fn member(&self) -> (Function, usize, usize) {
        let Heads { heads, kv_heads, head_dim: dim, .. } = self.heads;
        // Pairs are rotated, and loaded.
        assert!(dim.is_multiple_of(2), "heads of {dim} numbers");
        let (first, numbers) = if dim.is_multiple_of(8) { (BY_EIGHT, 8) } else { (BY_TWO, 2) };
        let shared_bytes = |at_once: usize| at_once * (dim + SPLIT_POSITIONS + WARPS * numbers * WARP) * 4;
        let fits =
            |at_once: usize| at_once == 1 || 2 * (heads / kv_heads) > at_once && shared_bytes(at_once) <= SHARED_BYTES;
        let members = [(2, 8), (1, 4), (0, 1)];
        let (member, at_once) = members.into_iter().find(|&(_, at_once)| fits(at_once)).expect("the last one fits");
        (first.next(member), at_once, shared_bytes(at_once))
    }
}

impl DeviceKernel for Attend {
    type Scratch = Scratch;

    fn operands(&self, see: &mut dyn FnMut(Operand)) {
        let &Attend { heads, n, qkv, positions, sinks, out, .. } = self;
        see(Operand::read(heads.cache, heads.sequence() * 2));
        see(Operand::read(qkv, n * heads.qkv_dim() * 4));
        see(Operand::read(positions, n * 8));
        see(Operand::read(sinks, sinks.bytes as usize));
        see(Operand::written(out, n * heads.q_dim() * 4));
    }

    fn run(&self, at: &dyn HostMemory, kernels: &Kernels, Scratch { attend, out }: &mut Scratch) -> KernelWork {
        let (h, dim, n) = (&self.heads, self.heads.head_dim, self.n);
        let (qkv, positions) = (numbers(at, self.qkv, n * h.qkv_dim()), words(at, self.positions, n * 2));
        let cache = h.in_cache(at);
        let (sinks, shared) = (numbers(at, self.sinks, self.sinks.bytes as usize / 4), h.heads / h.kv_heads);
        let group = h.heads / h.kv_heads * dim;
        let mut work = KernelWork::default();
        out.clear();
        out.resize(n * h.q_dim(), 0.0);
        // Nothing is allocated later.
        attend.reserve(h.heads / h.kv_heads, h.context, dim);
        for (b, place) in positions.chunks_exact(2).enumerate() {
            let [sequence, position] = [place[0] as usize, place[1] as usize];
            assert!(position < self.most && self.most <= h.context, "position {position} of {}", self.most);
            let start = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
            let seen = position + 1 - start;
            for kv_head in 0..h.kv_heads {
                let part = |head: usize| {
                    let from = h.start(sequence, head) + start * dim;
                    bytemuck::cast_slice(&cache[from..from + seen * dim])
                };
                let sinks = sinks.get(kv_head * shared..(kv_head + 1) * shared).unwrap_or_default();
                let head = Head {
                    quant: Quant::F16,
                    keys: part(kv_head),
                    values: part(h.kv_heads + kv_head),
                    mixed: dim,
                    sinks,
                };
                attend.queries(group).copy_from_slice(&qkv[b * h.qkv_dim() + kv_head * group..][..group]);
                out[b * h.q_dim() + kv_head * group..][..group].copy_from_slice(attend.attend(
                    kernels,
                    head,
                    dim,
                    |_| 0..seen,
                ));
            }
            // Each query head meets every key and every value that its token sees.
            let operations = 2 * 2 * (h.heads * seen * dim) as u64;
            work += KernelWork { bytes: (2 * h.kv_heads * seen * dim * 2) as u64, operations };
        }
        work
    }

    fn store(&self, scratch: &Scratch, at: &mut dyn HostMemory) {
        put(at, self.out, &scratch.out);
    }

    fn launch(&self, at: &Addresses<'_>, scratch: u64, out: &mut Launches) {
        let (h, dim, splits) = (&self.heads, self.heads.head_dim, self.splits());
        let (function, at_once, shared_bytes) = self.member();
        let (mix, peaks) = (scratch, scratch + (self.n * h.heads * splits * dim * 4) as u64);
        let grid = [h.kv_heads * (h.heads / h.kv_heads).div_ceil(at_once), splits, self.n];
        let operands = [at.view(self.qkv), at.view(h.cache), at.view(self.positions), mix, peaks];
        let launch = Launch::new(function, grid, WARPS, shared_bytes).words(operands);
        // A window of all positions is none.
        let window = self.window.unwrap_or(0);
        out.push(launch.ints([h.heads, h.kv_heads, dim, h.context, window]));
        let warps = dim.div_ceil(WARP).clamp(1, 4);
        let merge = Launch::new(MERGE, [h.heads, self.n, 1], warps, 0).words([mix, peaks, at.view(self.out)]);
        out.push(merge.words([at.buffer(self.sinks)]).ints([h.heads, dim, splits, usize::from(self.sinks.bytes > 0)]));
    }

    /// A mix of values, its peak and its sum for each head and split.
    fn scratch_bytes(&self) -> u64 {
        (self.n * self.heads.heads * self.splits() * (self.heads.head_dim + 2) * 4) as u64
    }
}
