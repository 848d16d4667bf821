//! The laws of every device (`tests/support/device.rs`), kept by `CudaDevice` on the stand-in for the driver, and a card's own.
//! Each test is a process of its own, with a card as its environment says.

mod common;
#[path = "../../../tests/support/device.rs"]
mod laws;

use common::{Machine, StandIn, device, on, options, room};
use dynamicinfer::device::cuda::{Card, CudaDevice, Options, Unusable};
use dynamicinfer::device::{Block, Device, Memory, MoveMethod, OutOfMemory, PinnedBuffer, Stream, Tiles};
use laws::{MIB, content, get, put};
use std::time::Duration;

/// After everything: nothing of the card is held.
fn nothing_is_left(device: CudaDevice) {
    assert_eq!(device.fault(), None);
    drop(device);
    assert_eq!(StandIn::new().left(), "");
}

#[test]
fn the_budget_holds_to_the_byte_and_everything_is_given_back() {
    on(&Machine::new(), "the_budget_holds_to_the_byte_and_everything_is_given_back", &[], || {
        let mut device = device(10_007);
        laws::the_budget_holds_to_the_byte_and_the_peak_is_kept(&mut device, 600);
        nothing_is_left(device);
    });
}

/// Which way is faster here says nothing of a card; that the faster one is taken, and that nobody's memory is counted, is ours.
#[test]
fn tensor_cores_are_tried_and_the_faster_way_is_taken() {
    on(&Machine::new(), "tensor_cores_are_tried_and_the_faster_way_is_taken", &[], || {
        let (mut device, stand_in) = (device(1 << 10), StandIn::new());
        let (memory, launches) = (device.memory(), device.totals().launches);
        let trial = device.try_tensor_cores().expect("room for it");
        assert!(trial.same, "{trial:?}");
        let faster = if trial.ns[1] < trial.ns[0] { Tiles::Exact } else { Tiles::Lanes };
        assert_eq!((device.tiles(), device.memory(), device.totals().launches), (faster, memory, launches));
        // Without room there is nothing to try, and that is no fault.
        stand_in.fail("cuMemAlloc_v2:1=2");
        device.use_tiles(Tiles::Exact);
        assert!(device.try_tensor_cores().is_none());
        assert_eq!(device.tiles(), Tiles::Lanes);
        stand_in.fail("");
        nothing_is_left(device);
    });
}

#[test]
fn new_memory_is_zero() {
    on(&Machine::new(), "new_memory_is_zero", &[], || {
        let mut device = device(64 * MIB);
        laws::new_memory_is_zero(&mut device);
        nothing_is_left(device);
    });
}

/// With a card that runs what is asked for and nothing more, pinned memory is read when the copy's turn comes, and not before.
#[test]
fn nothing_runs_when_it_is_put_on_a_stream() {
    on(&Machine::new(), "nothing_runs_when_it_is_put_on_a_stream", &[("CUDA_ON_CPU_LAZY", "1")], || {
        let mut device = device(64 * MIB);
        laws::nothing_runs_when_it_is_put_on_a_stream(&mut device);
        nothing_is_left(device);
    });
}

#[test]
fn an_event_orders_streams_and_means_the_mark_that_was_recorded_last() {
    let name = "an_event_orders_streams_and_means_the_mark_that_was_recorded_last";
    on(&Machine::new(), name, &[("CUDA_ON_CPU_LAZY", "1")], || {
        let mut device = device(64 * MIB);
        laws::an_event_orders_streams_and_means_the_mark_that_was_recorded_last(&mut device);
        nothing_is_left(device);
    });
}

#[test]
fn freeing_waits_for_what_uses_it() {
    on(&Machine::new(), "freeing_waits_for_what_uses_it", &[("CUDA_ON_CPU_LAZY", "1")], || {
        let mut device = device(64 * MIB);
        laws::freeing_waits_for_what_uses_it(&mut device);
        nothing_is_left(device);
    });
}

/// While a copy is held on its way, the other stream works and the host is asked for nothing.
#[test]
fn a_copy_from_pinned_memory_runs_beside_everything_else() {
    on(&Machine::new(), "a_copy_from_pinned_memory_runs_beside_everything_else", &[], || {
        let mut device = device(64 * MIB);
        let (large, small, landed) = (device.alloc(8 * MIB).unwrap(), device.alloc(4).unwrap(), device.event());
        let (load, mut one) = (room(&mut device, 2 * MIB as usize), room(&mut device, 1));
        let stand_in = StandIn::new();
        stand_in.hold(true);
        put(&mut device, Stream::Copy, &load, large, 0);
        device.record(Stream::Copy, landed);
        // If the compute stream waited for the copy, the first of these would wait for ever, and fail as a hung card does.
        for i in 0..50 {
            one[0] = i;
            put(&mut device, Stream::Compute, &one, small, 0);
            device.synchronize(Stream::Compute);
        }
        assert!(!device.is_done(landed));
        stand_in.hold(false);
        device.synchronize(Stream::Copy);
        assert!(device.is_done(landed));
        nothing_is_left(device);
    });
}

/// What the thresholds and the planner are fed: the time of a copy over a link of a known rate, and that the host waited for it.
#[test]
fn the_time_of_a_copy_is_that_of_the_link() {
    on(&Machine::new(), "the_time_of_a_copy_is_that_of_the_link", &[("CUDA_ON_CPU_LINK_MB_S", "40")], || {
        let mut device = device(64 * MIB);
        let large = device.alloc(8 * MIB).unwrap();
        let load = room(&mut device, 2 * MIB as usize);
        let before = device.totals();
        put(&mut device, Stream::Copy, &load, large, 0);
        device.synchronize(Stream::Copy);
        let after = device.totals();
        let rate = (after.migrated_bytes - before.migrated_bytes) as f64 / after.busy_ns[Stream::Copy as usize] as f64;
        assert!((0.02..0.041).contains(&rate), "{rate} GB/s over a link of 0.04");
        assert!(after.waited_ns > before.waited_ns);
        nothing_is_left(device);
    });
}

#[test]
fn pinned_pieces_and_what_lies_between_them_are_copied_whole() {
    on(&Machine::new(), "pinned_pieces_and_what_lies_between_them_are_copied_whole", &[], || {
        let mut device = device(64 * MIB);
        let mut host = PinnedBuffer::new(5 * 1024);
        host.iter_mut().enumerate().for_each(|(i, word)| *word = i as u32);
        let page = |i: usize| &host[i * 1024..(i + 1) * 1024];
        // The first two overlap by a page; the fourth is not pinned.
        for range in [0..2, 1..3, 4..5] {
            let pages = &host[range.start * 1024..range.end * 1024];
            // SAFETY: the host's memory outlives the device.
            unsafe { device.pin(pages.as_ptr().cast(), size_of_val(pages), false) };
        }
        assert_eq!((device.pinned().pinned, device.pinned().refused), (4 * 4096, 0));
        assert_eq!(page(3).len(), 1024);
        let buffer = device.alloc(5 * 4096).unwrap();
        for (first, words) in [(0, 5 * 1024), (1000, 3000), (2047, 2), (3071, 1026), (4095, 1)] {
            let fresh = vec![0u32; 5 * 1024];
            put(&mut device, Stream::Copy, &fresh, buffer, 0);
            put(&mut device, Stream::Copy, &host[first..first + words], buffer, first as u64 * 4);
            device.synchronize(Stream::Copy);
            let seen = content(&mut device, buffer);
            let right = |i: usize| if (first..first + words).contains(&i) { i as u32 } else { 0 };
            assert!((0..5 * 1024).all(|i| seen[i] == right(i)), "{words} words from {first}");
        }
        nothing_is_left(device);
    });
}

/// Blocks that are scattered, some neighbours among them, by each way; what a card or its driver lacks is done in another.
fn blocks_come_by(ways: [(MoveMethod, bool, [u64; 3]); 3]) {
    const BLOCK: usize = 4096 + 16;
    let mut device = device(64 * MIB);
    let mut host = room(&mut device, 64 * BLOCK / 4);
    host.iter_mut().zip(1..).for_each(|(word, i)| *word = i);
    let (to, stand_in) = (device.alloc(64 * BLOCK as u64).unwrap(), StandIn::new());
    let place = |i: usize| if i < 4 { (10 + i, 20 + i) } else { (63 - 2 * i, 3 * i % 20) };
    let blocks: Vec<Block> = (0..12)
        .map(|i| Block { from: host[place(i).0 * BLOCK / 4..].as_ptr().cast(), slot: place(i).1 as u32 })
        .collect();
    for (by, can, calls) in ways {
        assert_eq!(device.can_move(by), can, "{by:?}");
        let zeros = vec![0u32; 64 * BLOCK / 4];
        put(&mut device, Stream::Compute, &zeros, to, 0);
        device.synchronize(Stream::Compute);
        let functions = ["cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync", "cuLaunchKernel"];
        stand_in.fail("");
        let before = device.totals().migrated_bytes;
        // SAFETY: waited for below.
        unsafe { device.move_blocks(by, &blocks, BLOCK, to) };
        assert_eq!(functions.map(|f| stand_in.calls(f)), calls, "{by:?}");
        device.synchronize(Stream::Copy);
        assert_eq!(device.totals().migrated_bytes - before, 12 * BLOCK as u64);
        let seen = content(&mut device, to);
        let mut right = zeros;
        for i in 0..12 {
            let (from, slot) = place(i);
            right[slot * BLOCK / 4..][..BLOCK / 4].copy_from_slice(&host[from * BLOCK / 4..][..BLOCK / 4]);
        }
        assert!(seen == right, "{by:?}");
    }
    nothing_is_left(device);
}

#[test]
fn blocks_come_by_copies_by_one_call_or_by_a_kernel() {
    on(&Machine::new(), "blocks_come_by_copies_by_one_call_or_by_a_kernel", &[], || {
        let [single, batched, gather] = MoveMethod::ALL;
        blocks_come_by([(single, true, [12, 0, 0]), (batched, true, [0, 1, 0]), (gather, true, [0, 0, 1])]);
    });
}

#[test]
fn a_card_that_does_not_see_host_memory_gets_copies() {
    let card = [("CUDA_ON_CPU_SEES_HOST", "0")];
    on(&Machine::new(), "a_card_that_does_not_see_host_memory_gets_copies", &card, || {
        let [single, batched, gather] = MoveMethod::ALL;
        // Runs of neighbours: the first four are one.
        blocks_come_by([(single, true, [12, 0, 0]), (batched, true, [0, 1, 0]), (gather, false, [9, 0, 0])]);
    });
}

/// The engine must not wait for a copy, whatever the system thinks of pinning the model's file.
#[test]
fn what_cannot_be_pinned_goes_through_a_ring_of_pinned_memory() {
    let name = "what_cannot_be_pinned_goes_through_a_ring_of_pinned_memory";
    on(&Machine::new(), name, &[("CUDA_ON_CPU_PINS", "0"), ("CUDA_ON_CPU_LINK_MB_S", "400")], || {
        let mut device = device(64 * MIB);
        let words = 15 * MIB as usize / 4 + 1;
        let from: Vec<u32> = (0..words as u32).collect();
        // SAFETY: the host's memory outlives the device.
        unsafe { device.pin(from.as_ptr().cast(), words * 4, false) };
        assert!(device.pinned().refused >= words as u64 * 4 && device.pinned().staging == 32 * MIB);
        let (buffer, landed) = (device.alloc(words as u64 * 4).unwrap(), device.event());
        put(&mut device, Stream::Copy, &from, buffer, 0);
        device.record(Stream::Copy, landed);
        assert!(!device.is_done(landed), "the call waited for the copy");
        // Four times around the ring.
        (0..6).for_each(|_| put(&mut device, Stream::Copy, &from, buffer, 0));
        device.synchronize(Stream::Copy);
        assert_eq!(content(&mut device, buffer), from);
        nothing_is_left(device);
    });
}

fn shrinks_and_grows(gives_back: bool) {
    let card = Card::open().unwrap();
    assert_eq!(card.gives_back_in_part(), gives_back);
    let mut device = CudaDevice::new(card, &options(64 * MIB)).unwrap();
    let kernels = device.taken();
    laws::a_buffer_that_is_resized_keeps_its_content(&mut device, |device, buffer| {
        // Whole chunks of 2 MiB, where there are chunks.
        let chunk = if gives_back { 2 * MIB } else { 1 };
        assert_eq!(device.taken() - kernels, buffer.bytes.next_multiple_of(chunk));
    });
    nothing_is_left(device);
}

#[test]
fn a_buffer_that_shrinks_gives_its_chunks_back() {
    on(&Machine::new(), "a_buffer_that_shrinks_gives_its_chunks_back", &[], || shrinks_and_grows(true));
}

#[test]
fn without_chunks_a_buffer_moves_when_it_is_resized() {
    let card = [("CUDA_ON_CPU_CHUNKS", "0")];
    on(&Machine::new(), "without_chunks_a_buffer_moves_when_it_is_resized", &card, || shrinks_and_grows(false));
}

/// Half of the card is in use and there is no room for both sizes at once: shrinking must go all the same.
#[test]
fn without_chunks_a_full_card_can_still_be_given_back() {
    let card = [("CUDA_ON_CPU_CHUNKS", "0"), ("CUDA_ON_CPU_MEMORY", "20000000")];
    on(&Machine::new(), "without_chunks_a_full_card_can_still_be_given_back", &card, || {
        let mut device = device(18 * MIB);
        let buffer = device.alloc_growable(14 * MIB, 16 * MIB).unwrap();
        let from: Vec<u32> = (1..=14 * MIB as u32 / 4).collect();
        put(&mut device, Stream::Copy, &from, buffer, 0);
        let less = device.resize(buffer, 10 * MIB).unwrap();
        assert_eq!(content(&mut device, less), from[..10 * MIB as usize / 4]);
        // Growing would need both.
        assert!(device.resize(less, 12 * MIB).is_err());
        assert_eq!(content(&mut device, less), from[..10 * MIB as usize / 4], "it stays as it was");
        nothing_is_left(device);
    });
}

#[test]
fn what_is_not_there_cannot_be_used() {
    on(&Machine::new(), "what_is_not_there_cannot_be_used", &[], || {
        let mut device = device(MIB);
        laws::what_is_not_there_cannot_be_used(&mut device);
        nothing_is_left(device);
    });
}

/// Each call that may be refused is, once: what was taken before is given back, and the reason is the driver's.
#[test]
fn out_of_memory_at_any_call_gives_everything_back() {
    on(&Machine::new(), "out_of_memory_at_any_call_gives_everything_back", &[], || {
        let stand_in = StandIn::new();
        let build = || -> Result<(), String> {
            let card = Card::open().map_err(|why| why.to_string())?;
            let mut device = CudaDevice::new(card, &options(64 * MIB)).map_err(|why| why.to_string())?;
            let host = PinnedBuffer::new(4096);
            // SAFETY: dropped after the device's end below.
            unsafe { device.pin(host.as_ptr().cast(), 4096 * 4, false) };
            let mut built = || -> Result<(), OutOfMemory> {
                let plain = device.alloc(100)?;
                let growable = device.alloc_growable(9 * MIB, 30 * MIB)?;
                let growable = device.resize(growable, 17 * MIB)?;
                device.free(plain);
                device.resize(growable, MIB).map(|_| ())
            };
            let answer = built().map_err(|e| format!("{e:?}"));
            let fault = device.fault().cloned();
            drop(device);
            drop(host);
            answer.and(fault.map_or(Ok(()), |fault| Err(fault.0)))
        };
        build().unwrap();
        let functions = [
            "cuDevicePrimaryCtxRetain",
            "cuStreamCreateWithPriority",
            "cuEventCreate",
            "cuModuleLoadData",
            "cuMemAlloc_v2",
            "cuMemAddressReserve",
            "cuMemCreate",
            "cuMemMap",
            "cuMemSetAccess",
        ];
        let mut failed = 0;
        for function in functions {
            stand_in.fail("");
            build().unwrap();
            let calls = stand_in.calls(function);
            assert!(calls > 0, "{function} is not called");
            for call in 1..=calls {
                stand_in.fail(&format!("{function}:{call}=2"));
                let said = build().expect_err(function);
                assert!(said.contains("out of memory") || said.contains("OutOfMemory"), "{function} {call}: {said}");
                assert_eq!(stand_in.left(), "", "{function} {call}: {said}");
                failed += 1;
            }
        }
        assert!(failed > 150, "only {failed} calls");
        // Memory that cannot be pinned is no failure.
        stand_in.fail("cuMemHostRegister_v2:1=2");
        build().unwrap();
    });
}

#[test]
fn a_budget_beyond_what_is_free_is_refused_with_the_figure() {
    let card = [("CUDA_ON_CPU_MEMORY", "1000000")];
    on(&Machine::new(), "a_budget_beyond_what_is_free_is_refused_with_the_figure", &card, || {
        let refused = CudaDevice::new(Card::open().unwrap(), &options(1_000_001)).err().unwrap();
        assert_eq!(refused, Unusable::Full { asked: 1_000_001, left: 1_000_000 });
        assert_eq!(
            refused.to_string(),
            "the card has 1000000 bytes free and 1000001 more are needed; close what else uses it, or give a smaller --vram"
        );
        let mut device = device(900_000);
        let buffer = device.alloc(600_000).unwrap();
        assert_eq!(device.set_budget(1_100_000), Err(OutOfMemory { asked: 500_000, left: 400_000 }));
        assert_eq!(device.set_budget(500_000), Err(OutOfMemory { asked: 600_000, left: 500_000 }));
        device.set_budget(700_000).unwrap();
        assert_eq!(device.memory(), Memory { budget: 700_000, used: 600_000, peak: 600_000 });
        device.free(buffer);
        nothing_is_left(device);
    });
}

/// An error that the card keeps for good: nothing waits, nothing is done, the first reason stays.
#[test]
fn after_a_fault_nothing_runs_and_nothing_waits() {
    on(&Machine::new(), "after_a_fault_nothing_runs_and_nothing_waits", &[], || {
        let stand_in = StandIn::new();
        for function in ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuStreamQuery"] {
            stand_in.fail("");
            let mut device = device(64 * MIB);
            let (buffer, event) = (device.alloc(64).unwrap(), device.event());
            let (from, mut back) = (room(&mut device, 16), room(&mut device, 16));
            stand_in.fail(&format!("{function}:2=700"));
            for _ in 0..3 {
                put(&mut device, Stream::Copy, &from, buffer, 0);
                get(&mut device, Stream::Copy, buffer, 0, &mut back);
                device.record(Stream::Copy, event);
                device.synchronize(Stream::Copy);
            }
            // Whatever is asked next learns of it: a copy, a mark or a wait.
            let said = &device.fault().expect(function).0;
            let (first, rest) = said.split_once(": an illegal").expect(said);
            assert!(first.starts_with("CUDA on the CPU: the driver could not "), "{said}");
            assert_eq!(
                rest,
                " memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS, 700); this is a bug of a kernel or a failing card: run \
                 again, and report it with `dynamicinfer doctor`'s answer"
            );
            let copies = stand_in.calls("cuMemcpyHtoDAsync_v2");
            put(&mut device, Stream::Copy, &from, buffer, 0);
            device.wait(Stream::Compute, event);
            device.record(Stream::Compute, event);
            assert!(!device.is_done(event));
            device.synchronize_event(event);
            Stream::ALL.into_iter().for_each(|stream| device.synchronize(stream));
            // Memory on a card that has failed is none, and nobody is told that there is too little: the fault is what they ask for.
            let asked = stand_in.calls("cuMemAlloc_v2");
            let (more, buffer) = (device.alloc(4).unwrap(), device.resize(buffer, 32).unwrap());
            put(&mut device, Stream::Compute, &from[..1], more, 0);
            assert_eq!(stand_in.calls("cuMemAlloc_v2"), asked, "memory was asked of a card that has failed");
            [more, buffer].into_iter().for_each(|buffer| device.free(buffer));
            assert_eq!(stand_in.calls("cuMemcpyHtoDAsync_v2"), copies, "something was asked of a card that has failed");
            drop(device);
        }
    });
}

#[test]
fn a_card_that_hangs_is_given_up_after_a_while() {
    on(&Machine::new(), "a_card_that_hangs_is_given_up_after_a_while", &[], || {
        let patience = Duration::from_millis(300);
        let card = Card::open().unwrap();
        let mut device = CudaDevice::new(card, &Options { patience, ..options(MIB) }).unwrap();
        let buffer = device.alloc(64).unwrap();
        let from = room(&mut device, 16);
        StandIn::new().fail(&format!("cuMemcpyHtoDAsync_v2:1={}", u32::MAX));
        put(&mut device, Stream::Copy, &from, buffer, 0);
        device.synchronize(Stream::Copy);
        assert_eq!(
            device.fault().unwrap().0,
            "CUDA on the CPU: no answer for 0.3 s; the card hangs: look at nvidia-smi and the kernel's log (dmesg, Xid), and run again"
        );
        // A stream that hangs cannot be destroyed: nobody tries.
        drop(device);
        assert_ne!(StandIn::new().left(), "");
    });
}
