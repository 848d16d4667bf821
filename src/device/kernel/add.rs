//! Sums of two vectors.

use super::host::{HostMemory, numbers, put};
use super::launch::{Addresses, Launch, Launches};
use super::{DeviceKernel, Function, KernelWork, Operand, View};
use crate::cpu::Kernels;

pub(super) const FUNCTIONS: &[&[&str]] = &[&["add"]];
const ADD: Function = Function::named("add");

/// to = (to + from) * scale, `[count]` each.
#[derive(Clone, Copy, Debug)]
pub struct Add {
    /// Numbers of each.
    pub count: usize,
    /// `[count]`
    pub from: View,
    /// `[count]`
    pub to: View,
    /// What the sums are multiplied by; 1 where they stay as they are.
    pub scale: f32,
}

impl DeviceKernel for Add {
    /// `[count]`
    type Scratch = Vec<f32>;

    fn operands(&self, see: &mut dyn FnMut(Operand)) {
        see(Operand::read(self.from, self.count * 4));
        see(Operand::written(self.to, self.count * 4));
    }

    fn run(&self, at: &dyn HostMemory, _: &Kernels, out: &mut Vec<f32>) -> KernelWork {
        let (from, to) = (numbers(at, self.from, self.count), numbers(at, self.to, self.count));
        out.clear();
        out.extend(from.iter().zip(to).map(|(a, b)| (a + b) * self.scale));
        KernelWork::default()
    }

    fn store(&self, out: &Vec<f32>, at: &mut dyn HostMemory) {
        put(at, self.to, out);
    }

    fn launch(&self, at: &Addresses<'_>, _: u64, out: &mut Launches) {
        let blocks = self.count.div_ceil(4 * 256).clamp(1, 1024);
        let launch = Launch::new(ADD, [blocks, 1, 1], 8, 0).words([at.view(self.from), at.view(self.to)]);
        out.push(launch.int(self.count).float(self.scale));
    }
}
