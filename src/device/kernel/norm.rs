//! Norms of columns.

use super::host::{HostMemory, numbers, put};
use super::launch::{Addresses, Launch, Launches, WARP};
use super::{DeviceKernel, Function, KernelWork, Operand, View};
use crate::cpu::Kernels;
use crate::device::Buffer;
use crate::model::config::Norm as NormKind;

pub(super) const FUNCTIONS: &[&[&str]] = &[&["normalise"]];
const NORMALISE: Function = Function::named("normalise");

/// out = norm(x) of each column: RMS or layer norm, with weights.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// RMS or layer norm, with its epsilon.
    pub kind: NormKind,
    /// Numbers of a column.
    pub hidden: usize,
    /// Columns.
    pub n: usize,
    /// `[hidden]`, or a buffer of no bytes for ones.
    pub weight: Buffer,
    /// `[hidden]`, or a buffer of no bytes: RMS norms have none.
    pub bias: Buffer,
    /// `[n, hidden]`
    pub x: View,
    /// `[n, hidden]`; may be `x`.
    pub out: View,
}

impl DeviceKernel for Norm {
    /// `[n, hidden]`
    type Scratch = Vec<f32>;

    fn operands(&self, see: &mut dyn FnMut(Operand)) {
        let &Norm { hidden, n, weight, bias, x, out, .. } = self;
        see(Operand::optional(weight, hidden * 4));
        see(Operand::optional(bias, hidden * 4));
        see(Operand::read(x, n * hidden * 4));
        see(Operand::written(out, n * hidden * 4));
    }

    fn run(&self, at: &dyn HostMemory, _: &Kernels, out: &mut Vec<f32>) -> KernelWork {
        let (weight, bias) = (at.of(self.weight), at.of(self.bias));
        out.clear();
        for x in numbers(at, self.x, self.n * self.hidden).chunks_exact(self.hidden) {
            let mean = |values: &mut dyn Iterator<Item = f32>| values.map(f64::from).sum::<f64>() / self.hidden as f64;
            let (centre, epsilon) = match self.kind {
                NormKind::Rms(epsilon) => (0.0, epsilon),
                NormKind::Layer(epsilon) => (mean(&mut x.iter().copied()) as f32, epsilon),
            };
            let square = mean(&mut x.iter().map(|v| (v - centre) * (v - centre))) as f32;
            let scale = 1.0 / (square + epsilon).sqrt();
            let of = |from: &[f32], i: usize, none: f32| from.get(i).copied().unwrap_or(none);
            let value = |(i, v): (usize, &f32)| (v - centre) * scale * of(weight, i, 1.0) + of(bias, i, 0.0);
            out.extend(x.iter().enumerate().map(value));
        }
        KernelWork::default()
    }

    fn store(&self, out: &Vec<f32>, at: &mut dyn HostMemory) {
        put(at, self.out, out);
    }

    fn launch(&self, at: &Addresses<'_>, _: u64, out: &mut Launches) {
        let (epsilon, centred) = match self.kind {
            NormKind::Rms(epsilon) => (epsilon, 0),
            NormKind::Layer(epsilon) => (epsilon, 1),
        };
        // Few columns, one block each: as many threads as there are numbers for.
        let warps = self.hidden.div_ceil(WARP * 4).clamp(1, 32);
        let operands = [at.view(self.x), at.optional(self.weight), at.optional(self.bias), at.view(self.out)];
        let launch = Launch::new(NORMALISE, [self.n, 1, 1], warps, warps * 4).words(operands);
        out.push(launch.int(self.hidden).float(epsilon).int(centred));
    }
}
