//! Selection of the neurons to compute, by their scores.

use super::host::{HostMemory, numbers, put, words};
use super::launch::{Addresses, Launch, Launches, WARP};
use super::{DeviceKernel, Function, KernelWork, NONE, Operand, View};
use crate::cpu::Kernels;
use crate::device::Buffer;

pub(super) const FUNCTIONS: &[&[&str]] = &[&["select_all"], &["select_resident"]];
const ALL: Function = Function::named("select_all");
const RESIDENT: Function = Function::named("select_resident");

/// Bit b of `masks[i]` is set where `scores[b][i]` is at least the minimum score, which depends on whether neuron i is in a slot.
#[derive(Clone, Copy, Debug)]
pub struct Select {
    /// Neurons.
    pub ffn: usize,
    /// Columns, 1 to 32.
    pub n: usize,
    /// Slots of the layer.
    pub slots: usize,
    /// Minimum score of a neuron elsewhere, and of one in a slot.
    pub min_scores: [f32; 2],
    /// `gpu_bucket`, `[slots]` u32: the neuron in each slot, or [`NONE`].
    pub bucket: Buffer,
    /// `[n, ffn]`
    pub scores: View,
    /// `[ffn]` u32
    pub masks: View,
}

impl DeviceKernel for Select {
    /// `[ffn]`, the bits of masks.
    type Scratch = Vec<f32>;

    fn operands(&self, see: &mut dyn FnMut(Operand)) {
        see(Operand::read(self.bucket, self.slots * 4));
        see(Operand::read(self.scores, self.n * self.ffn * 4));
        see(Operand::written(self.masks, self.ffn * 4));
    }

    fn run(&self, at: &dyn HostMemory, _: &Kernels, out: &mut Vec<f32>) -> KernelWork {
        let scores = numbers(at, self.scores, self.n * self.ffn);
        let mask = |i: usize, min_score: f32| {
            let wanted = |b: usize| u32::from(scores[b * self.ffn + i] >= min_score);
            f32::from_bits((0..self.n).fold(0u32, |mask, b| mask | wanted(b) << b))
        };
        out.clear();
        out.extend((0..self.ffn).map(|i| mask(i, self.min_scores[0])));
        for &neuron in words(at, self.bucket, self.slots).iter().filter(|&&neuron| neuron != NONE) {
            out[neuron as usize] = mask(neuron as usize, self.min_scores[1]);
        }
        KernelWork::default()
    }

    fn store(&self, masks: &Vec<f32>, at: &mut dyn HostMemory) {
        put(at, self.masks, masks);
    }

    fn launch(&self, at: &Addresses<'_>, _: u64, out: &mut Launches) {
        const WARPS: usize = 8;
        let &Select { ffn, n, slots, min_scores, .. } = self;
        let (scores, masks) = (at.view(self.scores), at.view(self.masks));
        let over = |function, count: usize| Launch::new(function, [count.div_ceil(WARPS * WARP), 1, 1], WARPS, 0);
        out.push(over(ALL, ffn).words([scores, masks]).ints([ffn, n]).float(min_scores[0]));
        let resident = over(RESIDENT, slots).words([scores, at.buffer(self.bucket), masks]);
        out.push(resident.ints([ffn, slots, n]).float(min_scores[1]));
    }
}
