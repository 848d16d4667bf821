//! A buffer that begins at a cache line: a 64-byte load or store across two lines costs double.

use bytemuck::Pod;
use std::marker::PhantomData;

/// A cache line of numbers.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, bytemuck::Zeroable, bytemuck::Pod)]
struct Line([f32; LINE]);

/// f32 numbers in a cache line of 64 bytes.
pub const LINE: usize = 16;

/// A growable buffer of plain numbers whose first one begins a cache line.
#[derive(Debug)]
pub struct Aligned<T = f32> {
    lines: Vec<Line>,
    len: usize,
    of: PhantomData<T>,
}

impl<T> Default for Aligned<T> {
    fn default() -> Aligned<T> {
        Aligned { lines: Vec::new(), len: 0, of: PhantomData }
    }
}

impl<T: Pod> Aligned<T> {
    /// Makes it `len` long. New numbers are zero, old ones stay where they were.
    pub fn resize(&mut self, len: usize) {
        self.lines.resize((len * size_of::<T>()).div_ceil(size_of::<Line>()), Line([0.0; LINE]));
        self.len = len;
    }

    /// Makes it as many zeros.
    pub fn zeros(&mut self, len: usize) {
        self.lines.clear();
        self.resize(len);
    }
}

impl<T: Pod> std::ops::Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl<T: Pod> std::ops::DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeros_from_a_cache_line_on() {
        let mut grown = Aligned::<i8>::default();
        for len in [3, 1000, 70] {
            grown.zeros(len);
            assert!(grown.as_ptr().addr().is_multiple_of(64) && grown.len() == len && grown.iter().all(|x| *x == 0));
            grown.fill(1);
        }
    }
}
