//! Allocates device memory and counts it.

use crate::device::{Buffer, Call, Device, OutOfMemory, Stream};

/// Allocates memory of a device and counts its bytes.
pub struct DeviceAllocator<'a> {
    /// The device.
    pub device: &'a mut dyn Device,
    /// Bytes allocated so far.
    pub bytes: u64,
}

impl DeviceAllocator<'_> {
    pub(super) fn alloc(&mut self, bytes: usize) -> Result<Buffer, OutOfMemory> {
        let buffer = self.device.alloc(bytes as u64)?;
        self.bytes += bytes as u64;
        Ok(buffer)
    }

    /// Allocates memory for `bytes` and copies them there; returns once they have arrived.
    pub(super) fn upload(&mut self, bytes: &[u8]) -> Result<Buffer, OutOfMemory> {
        let buffer = self.alloc(bytes.len())?;
        if !bytes.is_empty() {
            // SAFETY: the copy is done before anything else can happen to `bytes`.
            unsafe { self.device.copy_in(Stream::Compute, bytes.as_ptr(), bytes.len(), buffer, 0) };
            self.device.synchronize(Stream::Compute);
        }
        Ok(buffer)
    }

    /// Allocates memory for `rows` rows of `bytes` bytes and copies them there, each as `put` writes it over zeros; returns once they have
    /// arrived.
    pub(super) fn upload_rows(
        &mut self,
        rows: usize,
        bytes: usize,
        put: impl Fn(usize, &mut [u8]),
    ) -> Result<Buffer, OutOfMemory> {
        const PIECE_BYTES: usize = 4 << 20;
        let (buffer, at_once) = (self.alloc(rows * bytes)?, (PIECE_BYTES / bytes).max(1));
        let mut piece = vec![0; at_once * bytes];
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            piece.fill(0);
            piece.chunks_exact_mut(bytes).take(count).enumerate().for_each(|(i, row)| put(first + i, row));
            // SAFETY: the copy is done before anything else can happen to `piece`.
            unsafe {
                let at = (first * bytes) as u64;
                self.device.copy_in(Stream::Compute, piece.as_ptr(), count * bytes, buffer, at);
            }
            self.device.synchronize(Stream::Compute);
        }
        Ok(buffer)
    }

    /// Has the device allocate what a call needs beside its operands.
    pub fn prepare(&mut self, call: &Call) -> Result<(), OutOfMemory> {
        let before = self.device.memory().used;
        self.device.prepare(call)?;
        self.bytes += self.device.memory().used - before;
        Ok(())
    }

    pub(super) fn numbers(&mut self, numbers: &[f32]) -> Result<Buffer, OutOfMemory> {
        self.upload(bytemuck::cast_slice(numbers))
    }
}
