//! What every device promises, whatever it is: the virtual one and a card on the stand-in for the driver keep the same laws.

use dynamicinfer::device::{Buffer, Device, Memory, OutOfMemory, PinnedBuffer, Stream};
use dynamicinfer::prng::Prng;

pub const MIB: u64 = 1 << 20;

pub fn put(device: &mut dyn Device, stream: Stream, from: &[u32], to: Buffer, at: u64) {
    // SAFETY: every test keeps what it copies until it has synchronised.
    unsafe { device.copy_in(stream, from.as_ptr().cast(), size_of_val(from), to, at) };
}

pub fn get(device: &mut dyn Device, stream: Stream, from: Buffer, at: u64, to: &mut [u32]) {
    // SAFETY: as above.
    unsafe { device.copy_out(stream, from, at, to.as_mut_ptr().cast(), size_of_val(to)) };
}

/// What a buffer holds.
pub fn content(device: &mut dyn Device, buffer: Buffer) -> Vec<u32> {
    let mut out = vec![0; buffer.bytes as usize / 4];
    get(device, Stream::Compute, buffer, 0, &mut out);
    device.synchronize(Stream::Compute);
    out
}

/// Words that the device may copy from and to in place; they stay for ever, since a device may be dropped later than they would be.
pub fn room(device: &mut dyn Device, words: usize) -> &'static mut PinnedBuffer {
    let room = Box::leak(Box::new(PinnedBuffer::new(words)));
    // SAFETY: it stays.
    unsafe { device.pin(room.as_ptr().cast(), words * 4, true) };
    room
}

/// Of any budget of some kilobytes.
pub fn the_budget_holds_to_the_byte_and_the_peak_is_kept(device: &mut dyn Device, steps: usize) {
    let mut rng = Prng::new(1);
    let budget = device.memory().budget;
    let (mut held, mut used, mut peak): (Vec<Buffer>, u64, u64) = (Vec::new(), 0, 0);
    for _ in 0..steps {
        if rng.below(3) == 0 && !held.is_empty() {
            let buffer = held.swap_remove(rng.below(held.len() as u64) as usize);
            used -= buffer.bytes;
            device.free(buffer);
        } else {
            // Often exactly what is left, or a byte more.
            let left = budget - used;
            let bytes = [rng.below(3000), left, left + 1][rng.below(3) as usize];
            let got = if rng.below(2) == 0 { device.alloc(bytes) } else { device.reserve(bytes) };
            match got {
                Ok(buffer) => {
                    assert!(bytes <= left && buffer.bytes == bytes);
                    held.push(buffer);
                    (used, peak) = (used + bytes, peak.max(used + bytes));
                }
                Err(error) => assert_eq!((error, bytes > left), (OutOfMemory { asked: bytes, left }, true)),
            }
        }
        assert_eq!(device.memory(), Memory { budget, used, peak });
    }
    assert_eq!(peak, budget);
}

pub fn new_memory_is_zero(device: &mut dyn Device) {
    for bytes in [4, 100, 64, 5 * MIB] {
        let buffer = device.alloc(bytes).unwrap();
        assert!(content(device, buffer).iter().all(|&v| v == 0));
        let growable = device.alloc_growable(bytes, 7 * MIB).unwrap();
        assert!(content(device, growable).iter().all(|&v| v == 0));
    }
}

/// The bug that this keeps from hiding: host memory that is given up when the call returns, not when the copy is done. Of a device that
/// does nothing before somebody asks for it.
pub fn nothing_runs_when_it_is_put_on_a_stream(device: &mut dyn Device) {
    for stream in Stream::ALL {
        let buffer = device.alloc(16).unwrap();
        let (from, back) = (room(device, 4), room(device, 4));
        from.fill(1);
        put(device, stream, from, buffer, 0);
        get(device, stream, buffer, 0, back);
        from.fill(2);
        assert_eq!(&back[..], [0; 4]);
        device.synchronize(stream);
        assert_eq!(&back[..], [2; 4], "the copy read the host's memory before it was its turn");
    }
}

/// Of a device that does nothing before somebody asks for it.
pub fn an_event_orders_streams_and_means_the_mark_that_was_recorded_last(device: &mut dyn Device) {
    let (buffer, event) = (device.alloc(4 * MIB).unwrap(), device.event());
    assert!(device.is_done(event), "an event is done until it is recorded");
    let words = MIB as usize;
    let (from, seen) = (room(device, words), room(device, words));
    from.fill(9);
    put(device, Stream::Copy, from, buffer, 0);
    device.record(Stream::Copy, event);
    device.wait(Stream::Compute, event);
    // Recorded again behind the wait: the wait does not mean this one.
    (0..3).for_each(|_| put(device, Stream::Copy, from, buffer, 0));
    device.record(Stream::Copy, event);
    get(device, Stream::Compute, buffer, 0, seen);
    device.synchronize(Stream::Compute);
    assert_eq!(seen[..], from[..]);
    // The first copy was waited for; the other three and the mark behind them nobody has asked for.
    assert!(!device.is_done(event), "the second mark is not done");
    device.synchronize_event(event);
    assert!(device.is_done(event));
    let totals = device.totals();
    assert_eq!((totals.copies, totals.migrated_bytes, totals.link_bytes), (5, 16 * MIB, [16 * MIB, 4 * MIB]));
    assert!(totals.busy_ns.iter().all(|&ns| ns > 0), "{totals:?}");
}

pub fn freeing_waits_for_what_uses_it(device: &mut dyn Device) {
    let buffer = device.alloc(8).unwrap();
    let (from, back) = (room(device, 2), room(device, 2));
    from.copy_from_slice(&[3, 4]);
    put(device, Stream::Copy, from, buffer, 0);
    get(device, Stream::Copy, buffer, 0, back);
    device.free(buffer);
    assert_eq!(back[..], [3, 4]);
}

/// Of a budget of 64 MiB; `at` sees the device with a buffer of each length that it gets.
pub fn a_buffer_that_is_resized_keeps_its_content<D: Device>(device: &mut D, mut at: impl FnMut(&D, Buffer)) {
    let buffer = device.alloc_growable(24 * MIB, 48 * MIB).unwrap();
    let from = room(device, 6 * MIB as usize);
    from.iter_mut().zip(1..).for_each(|(word, i)| *word = i);
    put(device, Stream::Copy, from, buffer, 0);
    let small = device.resize(buffer, 5 * MIB).unwrap();
    assert_eq!((device.memory().used, small.bytes), (5 * MIB, 5 * MIB));
    at(device, small);
    let large = device.resize(small, 48 * MIB).unwrap();
    at(device, large);
    let seen = content(device, large);
    let kept = 5 * MIB as usize / 4;
    assert_eq!(seen[..kept], from[..kept], "what stays keeps its content");
    assert!(seen[kept..].iter().all(|&v| v == 0), "new bytes are zero");
    assert_eq!(device.resize(large, 64 * MIB + 1), Err(OutOfMemory { asked: 16 * MIB + 1, left: 16 * MIB }));
    let none = device.resize(large, 0).unwrap();
    at(device, none);
    device.free(none);
    assert_eq!(device.memory().used, 0);
}

/// Of a new device.
pub fn what_is_not_there_cannot_be_used(device: &mut dyn Device) {
    let (buffer, gone, counted) = (device.alloc(16).unwrap(), device.alloc(4).unwrap(), device.reserve(4).unwrap());
    device.free(gone);
    let mut said = |to: Buffer, at: u64| {
        let run = std::panic::AssertUnwindSafe(|| put(device, Stream::Compute, &[1, 2], to, at));
        *std::panic::catch_unwind(run).expect_err("it was done").downcast::<String>().unwrap()
    };
    assert_eq!(said(gone, 0), "buffer 1 was freed, or never was");
    assert_eq!(said(buffer, 12), "8 bytes at 12 are not in buffer 0 of 16");
    assert_eq!(said(buffer, u64::MAX), format!("8 bytes at {} are not in buffer 0 of 16", u64::MAX));
    assert_eq!(said(counted, 0), "buffer 2 is reserved: it is not the device's to copy");
}
