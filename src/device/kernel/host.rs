//! A device's memory as the host sees it: what kernels run on where the host stands in for the device.

use super::View;
use crate::device::Buffer;

/// Buffers begin at multiples of 64 bytes and are whole numbers of 4 bytes.
pub trait HostMemory {
    /// The bytes of a buffer as numbers.
    fn of(&self, buffer: Buffer) -> &[f32];

    /// As [`HostMemory::of`], to write to.
    fn of_mut(&mut self, buffer: Buffer) -> &mut [f32];
}

/// `count` numbers from a view on.
pub(super) fn numbers(at: &dyn HostMemory, view: impl Into<View>, count: usize) -> &[f32] {
    let view = view.into();
    &at.of(view.buffer)[view.at as usize / 4..][..count]
}

/// The same as u32.
pub(super) fn words(at: &dyn HostMemory, view: impl Into<View>, count: usize) -> &[u32] {
    bytemuck::cast_slice(numbers(at, view, count))
}

/// The same as bytes.
pub(super) fn bytes(at: &dyn HostMemory, view: impl Into<View>, count: usize) -> &[u8] {
    bytemuck::cast_slice(numbers(at, view, count / 4))
}

/// Writes numbers to a view.
pub(super) fn put(at: &mut dyn HostMemory, view: impl Into<View>, values: &[f32]) {
    let view = view.into();
    at.of_mut(view.buffer)[view.at as usize / 4..][..values.len()].copy_from_slice(values);
}

/// to += from, element by element, as far as there is something to add.
pub(super) fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}
