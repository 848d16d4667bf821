//! New keys and values.

use super::attend::Heads;
use super::host::{HostMemory, numbers, put};
use super::launch::{Addresses, Launch, Launches, WARP};
use super::{DeviceKernel, Function, KernelWork, Operand, View};
use crate::cpu::Kernels;
use crate::device::Buffer;
use half::f16;

pub(super) const FUNCTIONS: &[&[&str]] = &[&["append"]];
const APPEND: Function = Function::named("append");

/// Norms and rotates queries and keys, and norms values, in place, in layers that do so, and puts keys and values into the cache.
#[derive(Clone, Copy, Debug)]
pub struct Append {
    /// The shape of attention, and the memory that keys and values go to.
    pub heads: Heads,
    /// Columns.
    pub n: usize,
    /// `[n, qkv_dim]`: q, k, v.
    pub qkv: View,
    /// `[n, head_dim / 2, 2]` cosine and sine of the pair (i, i + head_dim / 2) of every head, or in a buffer of no bytes: nothing is
    /// rotated.
    pub angles: View,
    /// `[n, 2]` u32: sequence and position of each column.
    pub positions: View,
    /// `[head_dim]` each, the weights by which the heads of q and of k are normed before they are rotated (RMS); or buffers of no bytes.
    pub norms: [Buffer; 2],
    /// Added to the mean square in these norms.
    pub epsilon: f32,
    /// Values of each head are normed, without weights.
    pub value_norm: bool,
}

impl DeviceKernel for Append {
    /// `[n, qkv_dim]` rotated, then `[n, 2]` u32, the positions.
    type Scratch = Vec<f32>;

    fn operands(&self, see: &mut dyn FnMut(Operand)) {
        let &Append { heads, n, qkv, angles, positions, norms, .. } = self;
        see(Operand::written(heads.cache, heads.sequence() * 2));
        see(Operand::written(qkv, n * heads.qkv_dim() * 4));
        see(Operand::optional(angles, n * heads.head_dim * 4));
        see(Operand::read(positions, n * 8));
        norms.iter().for_each(|&norm| see(Operand::optional(norm, heads.head_dim * 4)));
    }

    fn run(&self, at: &dyn HostMemory, _: &Kernels, out: &mut Vec<f32>) -> KernelWork {
        let (h, half) = (&self.heads, self.heads.head_dim / 2);
        out.clear();
        out.extend(numbers(at, self.qkv, self.n * h.qkv_dim()));
        for qkv in out.chunks_exact_mut(h.qkv_dim()) {
            let (q, kv) = qkv.split_at_mut(h.q_dim());
            let (k, v) = kv.split_at_mut(h.kv_heads * h.head_dim);
            if self.value_norm {
                v.chunks_exact_mut(h.head_dim).for_each(|head| self.norm(None, head));
            }
            for (heads, norm) in [q, k].into_iter().zip(self.norms) {
                let weights = at.of(norm);
                if !weights.is_empty() {
                    heads.chunks_exact_mut(h.head_dim).for_each(|head| self.norm(Some(weights), head));
                }
            }
        }
        if self.angles.buffer.bytes > 0 {
            let angles = numbers(at, self.angles, self.n * h.head_dim);
            for (qkv, angles) in out.chunks_exact_mut(h.qkv_dim()).zip(angles.chunks_exact(h.head_dim)) {
                // All heads but those of v.
                for head in qkv[..(h.heads + h.kv_heads) * h.head_dim].chunks_exact_mut(h.head_dim) {
                    let (low, high) = head.split_at_mut(half);
                    for ((a, b), angle) in low.iter_mut().zip(high).zip(angles.chunks_exact(2)) {
                        (*a, *b) = (*a * angle[0] - *b * angle[1], *b * angle[0] + *a * angle[1]);
                    }
                }
            }
        }
        out.extend(numbers(at, self.positions, self.n * 2));
        KernelWork::default()
    }

    fn store(&self, scratch: &Vec<f32>, at: &mut dyn HostMemory) {
        let h = &self.heads;
        let (qkv, positions) = scratch.split_at(self.n * h.qkv_dim());
        put(at, self.qkv, qkv);
        let cache = h.in_cache_mut(at);
        for (qkv, place) in qkv.chunks_exact(h.qkv_dim()).zip(positions.chunks_exact(2)) {
            let [sequence, position] = [place[0], place[1]].map(|p| p.to_bits() as usize);
            for (i, new) in qkv[h.q_dim()..].chunks_exact(h.head_dim).enumerate() {
                let to = &mut cache[h.start(sequence, i) + position * h.head_dim..][..h.head_dim];
                to.iter_mut().zip(new).for_each(|(to, &v)| *to = f16::from_f32(v));
            }
        }
    }

    fn launch(&self, at: &Addresses<'_>, _: u64, out: &mut Launches) {
        let h = &self.heads;
        let warps = (h.head_dim / 2).div_ceil(WARP).clamp(1, 8);
        let grid = [h.heads + 2 * h.kv_heads, self.n, 1];
        let operands = [at.view(self.qkv), at.optional(self.angles), at.view(self.positions), at.view(h.cache)];
        let launch =
            Launch::new(APPEND, grid, warps, warps * 4).words(operands).words(self.norms.map(|n| at.optional(n)));
        let launch = launch.ints([h.heads, h.kv_heads, h.head_dim, h.context]).float(self.epsilon);
        out.push(launch.int(usize::from(self.value_norm)));
    }
}

impl Append {
    /// Norms one head, by weights or without.
    fn norm(&self, weights: Option<&[f32]>, head: &mut [f32]) {
        let square = head.iter().map(|&v| f64::from(v * v)).sum::<f64>() / head.len() as f64;
        let scale = 1.0 / (square as f32 + self.epsilon).sqrt();
        match weights {
            Some(weights) => head.iter_mut().zip(weights).for_each(|(v, w)| *v = *v * scale * w),
            None => head.iter_mut().for_each(|v| *v *= scale),
        }
    }
}
