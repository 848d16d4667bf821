//! Measures an NVIDIA card: its memory, its link, its copies.

use super::measure::{CardRates, PASSES, SMALL_BYTES, device_gflops, moves};
use crate::clock;
use crate::device::cuda::CudaDevice;
use crate::device::{Device, OutOfMemory, PinnedBuffer, Stream};
use crate::error::{Error, Result};

/// Bytes of a large copy: more than any card's caches hold.
pub const COPY_BYTES: usize = 256 << 20;
/// Small copies that are timed one after the other.
const SMALL_COPIES: usize = 256;

/// Measures a card, the best of a few passes. `bytes` is the size of a large copy, a multiple of 4096; `None` is [`COPY_BYTES`]. The card's
/// budget must be at least twice that.
///
/// # Errors
/// [`Error::Memory`] where the card has too little memory, [`Error::Fatal`] if it fails.
pub fn card(device: &mut CudaDevice, bytes: Option<usize>) -> Result<CardRates> {
    let bytes = bytes.unwrap_or(COPY_BYTES);
    let full = |e: OutOfMemory| {
        Error::Memory(format!(
            "the card has {} bytes left and measuring it needs {}; close what else uses it",
            e.left, e.asked
        ))
    };
    let [from, to] = [device.alloc(bytes as u64).map_err(full)?, device.alloc(bytes as u64).map_err(full)?];
    let mut host = PinnedBuffer::new(bytes / 4);
    // SAFETY: `host` outlives every copy below, each of which is waited for; `release` below ends the pin before `host` goes.
    unsafe { device.pin(host.as_ptr().cast(), bytes, true) };
    host.fill(1);
    let best = |device: &mut CudaDevice, work: &mut dyn FnMut(&mut CudaDevice)| {
        let pass = |_| {
            let start = clock::now();
            work(device);
            device.synchronize(Stream::Compute);
            start.elapsed().as_secs_f64()
        };
        (0..=PASSES).map(pass).fold(f64::INFINITY, f64::min)
    };
    let at = host.as_mut_ptr().cast::<u8>();
    // SAFETY: inside `host`, and waited for.
    let link = best(device, &mut |device| unsafe { device.copy_in(Stream::Compute, at, bytes, from, 0) });
    // SAFETY: as above.
    let back = best(device, &mut |device| unsafe { device.copy_out(Stream::Compute, from, 0, at, bytes) });
    let within = best(device, &mut |device| device.copy_within(from, to));
    let small = SMALL_BYTES.min(bytes);
    // SAFETY: as above.
    let one = best(device, &mut |device| unsafe { device.copy_in(Stream::Compute, at, small, from, 0) });
    let many = best(device, &mut |device| {
        // SAFETY: as above.
        (0..SMALL_COPIES).for_each(|_| unsafe { device.copy_in(Stream::Compute, at, small, from, 0) });
    });
    host.iter_mut().zip(0..).for_each(|(word, i)| *word = i);
    let moves = moves(device, &host, from)?;
    let device_gflops = device_gflops(device, from, to)?;
    device.unpin();
    device.free(from);
    device.free(to);
    if let Some(fault) = device.fault() {
        return Err(Error::Fatal(fault.0.clone()));
    }
    let rate = |bytes: usize, seconds: f64| bytes as f64 / seconds / 1e9;
    let each_us = (many - one) / (SMALL_COPIES - 1) as f64 * 1e6;
    Ok(CardRates {
        device_gb_s: rate(2 * bytes, within),
        device_gflops,
        link_gb_s: rate(bytes, link),
        back_gb_s: rate(bytes, back),
        // The time of the bytes themselves belongs to the link. A coarse clock may report no time at all.
        copy_us: (each_us - small as f64 / rate(bytes, link) / 1e3).max(1e-3),
        sync_us: one * 1e6,
        moves,
    })
}
