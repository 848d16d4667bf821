//! Compares a device's kernels with the CPU's and times them: what `gpu-check` shows.

mod agreement;
mod speed;

pub use agreement::{Agreement, agreements};
pub use speed::{Launching, Speed, launching, speeds};

use crate::device::{Buffer, Call, Device, OutOfMemory, Stream};
use crate::error::{Error, Result};
use crate::formats::rows::{self, Quant};
use crate::prng::Prng;

/// Copies operands to a device and results back, and frees them at the end.
struct Bench<'a> {
    device: &'a mut dyn Device,
    buffers: Vec<Buffer>,
    /// Whether each kernel is launched as a sequence; a recorded one is then launched again with other kernels in it.
    sequences: bool,
}

impl Bench<'_> {
    fn alloc(&mut self, bytes: usize) -> Result<Buffer> {
        let full = |e: OutOfMemory| {
            Error::Memory(format!("the device has {} bytes left and this check needs {} more", e.left, e.asked))
        };
        let buffer = self.device.alloc(bytes as u64).map_err(full)?;
        self.buffers.push(buffer);
        Ok(buffer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.alloc(bytes.len())?;
        if !bytes.is_empty() {
            // SAFETY: waited for before anything else happens to `bytes`.
            unsafe { self.device.copy_in(Stream::Compute, bytes.as_ptr(), bytes.len(), buffer, 0) };
            self.device.synchronize(Stream::Compute);
        }
        Ok(buffer)
    }

    fn numbers(&mut self, values: &[f32]) -> Result<Buffer> {
        self.put(bytemuck::cast_slice(values))
    }

    fn words(&mut self, values: &[u32]) -> Result<Buffer> {
        self.put(bytemuck::cast_slice(values))
    }

    fn get(&mut self, buffer: Buffer) -> Result<Vec<u32>> {
        let mut out = vec![0u32; buffer.bytes as usize / 4];
        // SAFETY: waited for before `out` is looked at.
        unsafe { self.device.copy_out(Stream::Compute, buffer, 0, out.as_mut_ptr().cast(), out.len() * 4) };
        self.device.synchronize(Stream::Compute);
        match self.device.fault() {
            Some(fault) => Err(Error::Fatal(fault.0.clone())),
            None => Ok(out),
        }
    }

    fn launch(&mut self, call: &Call) -> Result<()> {
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

fn random(prng: &mut Prng, count: usize) -> Vec<f32> {
    (0..count).map(|_| prng.next_f64() as f32 * 2.0 - 1.0).collect()
}

fn matrix(prng: &mut Prng, quant: Quant, rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes = vec![0; rows * quant.row_bytes(cols)];
    bytes.chunks_exact_mut(quant.row_bytes(cols)).for_each(|row| rows::encode(quant, &random(prng, cols), row));
    bytes
}

#[cfg(test)]
mod tests {
    use super::agreement::CHECKS;
    use super::*;
    use crate::device::{Rates, Tiles, VirtualDevice};

    fn device() -> VirtualDevice {
        let rates = Rates {
            device_gb_s: 100.0,
            // Arithmetic takes less time than reading.
            device_gflops: 1e6,
            link_gb_s: 1.0,
            host_gb_s: 1.0,
            host_gflops: 1.0,
            call_us: 0.0,
            copy_us: 0.0,
            sync_us: 0.0,
        };
        VirtualDevice::new(u64::MAX, rates)
    }

    #[test]
    fn a_device_agrees_with_itself_and_gives_its_memory_back() {
        let mut device = device();
        for (tiles, count) in [(Tiles::Lanes, 76), (Tiles::TensorCores, 9)] {
            let rows = agreements(&mut device, tiles).unwrap();
            assert!(rows.len() == count && rows.iter().all(|row| row.off == 0.0), "{rows:?}");
        }
        assert_eq!(device.memory().used, 0);
    }

    #[test]
    fn every_kernel_is_checked() {
        let checked: Vec<&str> = CHECKS.iter().map(|check| check.kernel).collect();
        assert_eq!(checked, Call::NAMES);
    }

    #[test]
    fn a_device_with_a_known_rate_is_timed_at_that_rate() {
        let mut device = device();
        let mut timed = Vec::new();
        for (tiles, count) in [(Tiles::Lanes, 24), (Tiles::TensorCores, 6)] {
            let speeds = speeds(&mut device, tiles, 1 << 16, 32).unwrap();
            assert_eq!(speeds.len(), count);
            timed.extend(speeds);
        }
        for s in timed {
            // Launching takes some time, too.
            assert!(s.gb_s <= 100.0 && s.gb_s > 85.0, "{s:?}");
        }
        assert_eq!(device.memory().used, 0);
    }
}
