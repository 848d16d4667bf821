//! Operands of kernels on a device, and their results.

use crate::device::{Buffer, Call, Device, OutOfMemory, Stream};
use crate::error::{Error, Result};
use crate::formats::rows::{self, Quant};
use crate::prng::Prng;

/// Copies operands to a device and results back, and frees them at the end.
pub(super) struct Bench<'a> {
    pub(super) device: &'a mut dyn Device,
    pub(super) buffers: Vec<Buffer>,
    /// Whether each kernel is launched as a sequence; a recorded one is then launched again with other kernels in it.
    pub(super) sequences: bool,
}

impl Bench<'_> {
    pub fn alloc(&mut self, bytes: usize) -> Result<Buffer> {
        let full = |e: OutOfMemory| {
            Error::Memory(format!("the device has {} bytes left and this check needs {} more", e.left, e.asked))
        };
        let buffer = self.device.alloc(bytes as u64).map_err(full)?;
        self.buffers.push(buffer);
        Ok(buffer)
    }

    pub fn put(&mut self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.alloc(bytes.len())?;
        if !bytes.is_empty() {
            // SAFETY: waited for before anything else happens to `bytes`.
            unsafe { self.device.copy_in(Stream::Compute, bytes.as_ptr(), bytes.len(), buffer, 0) };
            self.device.synchronize(Stream::Compute);
        }
        Ok(buffer)
    }

    pub fn numbers(&mut self, values: &[f32]) -> Result<Buffer> {
        self.put(bytemuck::cast_slice(values))
    }

    pub fn words(&mut self, values: &[u32]) -> Result<Buffer> {
        self.put(bytemuck::cast_slice(values))
    }

    pub fn get(&mut self, buffer: Buffer) -> Result<Vec<u32>> {
        let mut out = vec![0u32; buffer.bytes as usize / 4];
        // SAFETY: waited for before `out` is looked at.
        unsafe { self.device.copy_out(Stream::Compute, buffer, 0, out.as_mut_ptr().cast(), out.len() * 4) };
        self.device.synchronize(Stream::Compute);
        match self.device.fault() {
            Some(fault) => Err(Error::Fatal(fault.0.clone())),
            None => Ok(out),
        }
    }

    pub fn launch(&mut self, call: &Call) -> Result<()> {
        self.device.prepare(call).map_err(|e| Error::Memory(format!("{} bytes of scratch are refused", e.asked)))?;
        if self.sequences {
            self.device.begin_sequence(0);
        }
        self.device.launch(Stream::Compute, call);
        self.device.end_sequence();
        Ok(())
    }
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        self.buffers.drain(..).for_each(|buffer| self.device.free(buffer));
    }
}

pub(super) fn random(prng: &mut Prng, count: usize) -> Vec<f32> {
    (0..count).map(|_| prng.next_f64() as f32 * 2.0 - 1.0).collect()
}

pub(super) fn matrix(prng: &mut Prng, quant: Quant, rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes = vec![0; rows * quant.row_bytes(cols)];
    bytes.chunks_exact_mut(quant.row_bytes(cols)).for_each(|row| rows::encode(quant, &random(prng, cols), row));
    bytes
}
