//! Laws of the virtual device, those of every device among them (`support/device.rs`): its budget holds to the byte, its streams run in order and beside each other, nothing runs before
//! its time, and its kernel computes what the CPU's FFN computes.

use crate::support::device::{self as laws, MIB, content, get, put};
use crate::support::{Alone, RATES, alone, error, numbers};
use dynamicinfer::cpu::{Columns, Kernels, MAX_COLUMNS, ThreadPool};
use dynamicinfer::device::{
    Buffer, Call, Device, Event, Faults, HOST_CALL_NS, HostWork, NONE, Rates, SparseFfn, Stage, Stream, VirtualDevice,
};
use dynamicinfer::engine::ffn::{Compute, FfnBuffers, activations, ffn};
use dynamicinfer::engine::{Selection, Work};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::StoreId;
use dynamicinfer::model::config::{Activation, Ffn};
use dynamicinfer::prng::Prng;

fn device() -> VirtualDevice {
    VirtualDevice::new(64 * MIB, RATES)
}

#[test]
fn the_budget_holds_to_the_byte_and_the_peak_is_kept() {
    laws::the_budget_holds_to_the_byte_and_the_peak_is_kept(&mut VirtualDevice::new(10_007, RATES), 3000);
}

#[test]
fn new_memory_is_zero() {
    laws::new_memory_is_zero(&mut device());
}

#[test]
fn nothing_runs_when_it_is_put_on_a_stream() {
    laws::nothing_runs_when_it_is_put_on_a_stream(&mut device());
}

#[test]
fn an_event_orders_streams_and_means_the_mark_that_was_recorded_last() {
    laws::an_event_orders_streams_and_means_the_mark_that_was_recorded_last(&mut device());
}

#[test]
fn a_buffer_that_is_resized_keeps_its_content() {
    laws::a_buffer_that_is_resized_keeps_its_content(&mut device(), |_, _| ());
}

#[test]
fn what_is_not_there_cannot_be_used() {
    laws::what_is_not_there_cannot_be_used(&mut device());
}

#[test]
fn freeing_waits_for_what_uses_it() {
    laws::freeing_waits_for_what_uses_it(&mut device());
}

#[test]
fn a_copy_lands_when_the_clock_has_come_to_its_end_and_not_before() {
    let mut device = device();
    let buffer = device.alloc(MIB).unwrap();
    let (from, event) = (vec![7u32; MIB as usize / 4], device.event());
    assert!(device.is_done(event), "an event is done until it is recorded");
    let begins = device.clock_ns() + HOST_CALL_NS;
    put(&mut device, Stream::Copy, &from, buffer, 0);
    device.record(Stream::Copy, event);
    let takes = (RATES.copy_us * 1e3 + MIB as f64 / RATES.link_gb_s) as u64;
    device.advance(begins + takes - 2 * HOST_CALL_NS - device.clock_ns());
    assert!(!device.is_done(event));
    // Halfway: a copy is not done at once.
    assert_eq!(content(&mut device, buffer)[0], 7);
    device.advance(takes);
    assert!(device.is_done(event));
    assert_eq!(content(&mut device, buffer), from);
    let totals = device.totals();
    assert_eq!((totals.link_bytes[0], totals.busy_ns[Stream::Copy as usize]), (MIB, takes));
}

#[test]
fn a_link_of_half_the_rate_takes_twice_the_time() {
    let time = |rates: Rates| {
        let mut device = device();
        device.set_rates(rates);
        let buffer = device.alloc(8 * MIB).unwrap();
        let from = vec![1u32; 2 * MIB as usize];
        let before = device.clock_ns();
        put(&mut device, Stream::Copy, &from, buffer, 0);
        device.synchronize(Stream::Copy);
        device.clock_ns() - before
    };
    let whole = Rates { copy_us: 0.0, sync_us: 0.0, ..RATES };
    let half = Rates { link_gb_s: RATES.link_gb_s / 2.0, ..whole };
    let (one, two) = (time(whole) - HOST_CALL_NS, time(half) - HOST_CALL_NS);
    assert!(two.abs_diff(2 * one) <= 2, "{one} ns and {two} ns");
    assert_eq!(time(Rates { sync_us: 3.0, copy_us: 2.0, ..whole }), one + HOST_CALL_NS + 5000);
}

#[test]
fn what_the_host_computes_takes_the_longer_of_reading_and_arithmetic() {
    let time = |bytes: u64, operations: u64| {
        let mut device = device();
        device.worked(HostWork { stage: Stage::Ffn, bytes, operations, ns: 12_345 });
        assert_eq!(device.totals().host_ns, device.clock_ns());
        device.clock_ns()
    };
    // Of a byte for each GB/s and an operation for each GFLOP/s, one nanosecond.
    let (bytes, operations) = (RATES.host_gb_s as u64, RATES.host_gflops as u64);
    assert_eq!(time(1000 * bytes, 0), 1000);
    assert_eq!(time(0, 1000 * operations), 1000);
    assert_eq!(time(700 * bytes, 1000 * operations), 1000);
    assert_eq!(time(1000 * bytes, 700 * operations), 1000);
}

#[test]
fn a_stream_keeps_its_order_and_does_not_wait_for_the_other() {
    let mut device = device();
    let buffer = device.alloc(8).unwrap();
    let big = device.alloc(32 * MIB).unwrap();
    let load = vec![5u32; 8 * MIB as usize];
    put(&mut device, Stream::Copy, &load, big, 0);
    let landed = device.event();
    device.record(Stream::Copy, landed);
    let values: Vec<[u32; 2]> = (0..50).map(|i| [i, i]).collect();
    let mut seen = vec![[0u32; 2]; 50];
    for (value, seen) in values.iter().zip(&mut seen) {
        put(&mut device, Stream::Compute, value, buffer, 0);
        get(&mut device, Stream::Compute, buffer, 0, seen);
    }
    // The link is one queue: the first of them waits for the big copy to be over, but nothing is computed behind it.
    device.synchronize(Stream::Compute);
    assert_eq!(seen, values);
    assert!(device.is_done(landed), "the link carried both at once");
}

#[test]
fn a_full_queue_forces_the_oldest_and_loses_nothing() {
    let mut device = device().with_queues([3, 2]);
    let buffer = device.alloc(400).unwrap();
    let values: Vec<u32> = (1..=100).collect();
    for (i, value) in values.iter().enumerate() {
        put(&mut device, Stream::Copy, std::slice::from_ref(value), buffer, i as u64 * 4);
    }
    // 98 copies were waited for.
    assert!(device.clock_ns() > 98 * (RATES.copy_us * 1e3) as u64);
    device.synchronize(Stream::Copy);
    assert_eq!(content(&mut device, buffer), values);
}

#[test]
fn advancing_alone_runs_nothing_and_asking_does() {
    let mut device = device();
    let (buffer, event) = (device.alloc(4).unwrap(), device.event());
    let mut from = vec![1u32];
    put(&mut device, Stream::Copy, &from, buffer, 0);
    device.record(Stream::Copy, event);
    device.advance(MIB);
    from[0] = 2;
    assert!(device.is_done(event));
    // Until the host has learnt that a copy is done it may not touch what is copied.
    assert_eq!(content(&mut device, buffer), [2]);
}

/// Copies on the copy stream, one number each, with their events: what is done after a while, in which order, and what arrived.
fn with_faults(faults: Faults, copies: usize) -> (Vec<bool>, Vec<Vec<usize>>, Vec<u32>) {
    let mut device = device().with_faults(faults);
    let buffer = device.alloc(copies as u64 * 8).unwrap();
    let values: Vec<[u32; 2]> = (1..=copies as u32).map(|v| [v, v]).collect();
    let events: Vec<Event> = values.iter().map(|_| device.event()).collect();
    for (i, (value, &event)) in values.iter().zip(&events).enumerate() {
        put(&mut device, Stream::Copy, value, buffer, i as u64 * 8);
        device.record(Stream::Copy, event);
    }
    let mut landed: Vec<Vec<usize>> = Vec::new();
    let mut done = vec![false; copies];
    for _ in 0..100_000 {
        let now: Vec<usize> = (0..copies).filter(|&i| !done[i] && device.is_done(events[i])).collect();
        now.iter().for_each(|&i| done[i] = true);
        if !now.is_empty() {
            landed.push(now);
        }
        if device.clock_ns() > 100_000_000 {
            break;
        }
        device.advance(100);
    }
    device.synchronize(Stream::Copy);
    (done, landed, content(&mut device, buffer))
}

#[test]
fn lost_copies_are_never_done_and_what_is_done_is_whole() {
    let faults = Faults { lost: 0.3, late: 0.3, reorder: true, seed: 5 };
    let (done, _, content) = with_faults(faults, 300);
    let lost = done.iter().filter(|done| !**done).count();
    assert!((50..150).contains(&lost), "{lost} of 300");
    let mut torn = 0;
    for (i, (got, done)) in content.chunks_exact(2).zip(&done).enumerate() {
        let v = i as u32 + 1;
        match done {
            true => assert_eq!(got, [v, v]),
            false => {
                assert!(got == [v, 0] || got == [0, 0], "{got:?}");
                torn += u32::from(got == [v, 0]);
            }
        }
    }
    assert!(torn > 10, "{torn} arrived half");
    assert_eq!(with_faults(faults, 300).0, done, "the seed decides");
    assert_ne!(with_faults(Faults { seed: 6, ..faults }, 300).0, done);
}

#[test]
fn copies_are_overtaken_only_if_asked_for() {
    let order = |faults| with_faults(faults, 200).1.concat();
    let sorted: Vec<usize> = (0..200).collect();
    assert_eq!(order(Faults::default()), sorted);
    assert_eq!(order(Faults { late: 0.5, seed: 1, ..Faults::default() }), sorted, "late ones hold back the others");
    let mut mixed = order(Faults { reorder: true, seed: 1, ..Faults::default() });
    assert_ne!(mixed, sorted);
    mixed.sort();
    assert_eq!(mixed, sorted, "all of them land");
}

#[test]
fn the_compute_stream_has_no_faults() {
    let mut device = device().with_faults(Faults { late: 1.0, lost: 1.0, reorder: true, seed: 1 });
    let buffer = device.alloc(4).unwrap();
    let before = device.clock_ns();
    put(&mut device, Stream::Compute, &[6], buffer, 0);
    assert_eq!(content(&mut device, buffer), [6]);
    assert!(device.clock_ns() - before < 2 * (RATES.copy_us * 1e3) as u64 + 10_000);
}

#[test]
#[should_panic(expected = "the streams hang")]
fn waiting_for_a_lost_copy_is_a_hang_that_says_so() {
    let mut device = device().with_faults(Faults { lost: 1.0, ..Faults::default() });
    let (buffer, event) = (device.alloc(4).unwrap(), device.event());
    put(&mut device, Stream::Copy, &[1], buffer, 0);
    device.record(Stream::Copy, event);
    device.wait(Stream::Compute, event);
    device.synchronize(Stream::Compute);
}

/// A call with its buffers: neurons in slots in random order, some slots empty, some neurons not there.
struct Rig {
    call: SparseFfn,
    /// The slots.
    at: Buffer,
    input: Vec<u32>,
    blocks: Vec<u32>,
    bucket: Vec<u32>,
    output: Vec<u32>,
    /// What it has to compute.
    selection: Selection,
}

impl Rig {
    fn new(device: &mut VirtualDevice, alone: &Alone, n: usize, activation_threshold: f32, rng: &mut Prng) -> Rig {
        let Alone { config, layer, .. } = alone;
        let (hidden, ffn) = (config.hidden, config.widest_ffn());
        let mut order: Vec<u32> = (0..ffn as u32).collect();
        (1..ffn).for_each(|i| order.swap(i, rng.below(i as u64 + 1) as usize));
        let slots = rng.below(ffn as u64 + 1) as usize;
        let bucket: Vec<u32> =
            order[..slots].iter().map(|&neuron| if rng.below(4) == 0 { NONE } else { neuron }).collect();
        let words = layer.block().bytes() / 4;
        // Empty slots hold something too, which nobody may compute with.
        let mut blocks: Vec<u32> = vec![f32::NAN.to_bits(); slots * words];
        for (block, &neuron) in blocks.chunks_exact_mut(words).zip(&bucket).filter(|(_, neuron)| **neuron != NONE) {
            let from = &layer.neurons().all()[neuron as usize * 4 * words..][..4 * words];
            bytemuck::cast_slice_mut::<u32, u8>(block).copy_from_slice(from);
        }
        let masks: Vec<u32> = (0..ffn)
            .map(|_| if rng.below(3) == 0 { 0 } else { rng.next_u64() as u32 & (u32::MAX >> (MAX_COLUMNS - n)) })
            .collect();
        let mut residents: Vec<StoreId> =
            bucket.iter().copied().filter(|&neuron| neuron != NONE).map(StoreId).collect();
        residents.sort();
        let selection = Selection { masks: residents.iter().map(|&i| masks[i.index()]).collect(), neurons: residents };
        let mut input: Vec<u32> = numbers(rng, n * hidden, 1.5).into_iter().map(f32::to_bits).collect();
        input.extend(&masks);
        let output = vec![u32::MAX; SparseFfn::output_bytes(n, hidden, slots) / 4];
        let mut room = |bytes: usize| device.alloc(bytes as u64).unwrap();
        let at = room(blocks.len() * 4);
        let call = SparseFfn {
            layout: *layer.block(),
            kind: config.ffn_kind,
            activation: config.activation,
            activation_threshold,
            hidden,
            ffn,
            mixture: None,
            slots,
            n,
            blocks: at.into(),
            bucket: room(bucket.len() * 4),
            up_bias: room(layer.up_bias.len() * 4),
            input: room(input.len() * 4),
            output: room(output.len() * 4),
        };
        assert_eq!(call.layout.bytes(), words * 4);
        put(device, Stream::Compute, &blocks, at, 0);
        put(device, Stream::Compute, &bucket, call.bucket, 0);
        put(device, Stream::Compute, bytemuck::cast_slice(&layer.up_bias), call.up_bias, 0);
        device.synchronize(Stream::Compute);
        Rig { call, at, input, blocks, bucket, output, selection }
    }

    /// The output, `[n, hidden]`, and the pairs that are active.
    fn run(&mut self, device: &mut VirtualDevice) -> (Vec<f32>, u32) {
        put(device, Stream::Compute, &self.input, self.call.input, 0);
        device.launch(Stream::Compute, &Call::SparseFfn(self.call));
        get(device, Stream::Compute, self.call.output, 0, &mut self.output);
        device.synchronize(Stream::Compute);
        let (values, active) = self.output.split_at(self.call.n * self.call.hidden);
        (bytemuck::cast_slice(values).to_vec(), active.iter().map(|bits| bits.count_ones()).sum())
    }

    fn columns(&self) -> Columns {
        let mut x = Columns::default();
        x.set(
            bytemuck::cast_slice(&self.input[..self.call.n * self.call.hidden]),
            self.call.n,
            self.call.layout.gate_or_up().quant,
        );
        x
    }

    /// The same by the CPU's FFN, and the pairs that are active.
    fn truth(&self, alone: &Alone) -> (Vec<f32>, u32) {
        let Alone { config, layer, .. } = alone;
        let SparseFfn { n, activation_threshold, hidden, .. } = self.call;
        let (mut pool, kernels, x) = (ThreadPool::new(1), Kernels::best(), self.columns());
        let mut out = vec![0.0; n * hidden];
        let (work, buffers) = (Work::Selected(&self.selection), &mut FfnBuffers::default());
        let mut compute = Compute { pool: &mut pool, kernels: &kernels, config, tiles: &mut [] };
        ffn(compute.again(), layer, &x, work, activation_threshold, buffers, &mut out);
        let (mut gates, mut acts) = (vec![0.0; n * config.widest_ffn()], vec![0.0; n * config.widest_ffn()]);
        activations(compute, layer, &x, &mut gates, &mut acts);
        let active = |(&neuron, &mask): (&StoreId, &u32)| {
            let at = |b: usize| b * config.widest_ffn() + neuron.index();
            let fires =
                |b: usize| mask >> b & 1 == 1 && config.activation.apply(gates[at(b)]).abs() > activation_threshold;
            (0..n).filter(|&b| fires(b) && acts[at(b)] != 0.0).count() as u32
        };
        (out, self.selection.neurons.iter().zip(&self.selection.masks).map(active).sum())
    }
}

const ACTIVATIONS: [Activation; 5] =
    [Activation::Relu, Activation::Fatrelu(0.1), Activation::Relu2, Activation::Silu, Activation::Gelu];

#[test]
fn the_kernel_computes_what_the_cpu_computes() {
    let mut rng = Prng::new(17);
    let mut computed = 0;
    for quant in Quant::OWN {
        for kind in [Ffn::Gated, Ffn::GatedBoth, Ffn::Plain] {
            for round in 0..12 {
                let hidden = [32, 64, 544, 1056][rng.below(4) as usize];
                let activation = ACTIVATIONS[round % 5];
                let activation_threshold = [0.0, 0.15, -1.0][round % 3];
                let size = 1 + rng.below(80) as usize;
                let alone = alone(kind, activation, quant, hidden, size, &mut rng);
                let n = 1 + rng.below(MAX_COLUMNS as u64) as usize;
                let mut device = device();
                let mut rig = Rig::new(&mut device, &alone, n, activation_threshold, &mut rng);
                let (found, truth) = (rig.run(&mut device), rig.truth(&alone));
                let what = format!(
                    "{} {kind:?} {activation:?} activation_threshold {activation_threshold}, {n} x {hidden} x {size}",
                    quant.name()
                );
                assert!(error(&found.0, &truth.0) < 1e-5, "{what}: off by {}", error(&found.0, &truth.0));
                assert_eq!(found.1, truth.1, "{what}");
                computed += found.1;
                // The rows it is charged for are rows of neurons that are there and wanted.
                let wanted = rig.selection.masks.iter().filter(|&&mask| mask != 0).count() as u64;
                assert!(device.totals().device_bytes <= wanted * rig.call.layout.bytes() as u64, "{what}");
            }
        }
    }
    assert!(computed > 5_000, "only {computed} neurons were active");
}

/// A block that is overwritten while the kernel runs: the kernel is not over when it begins.
#[test]
fn a_kernel_sees_what_is_written_below_it_while_it_runs() {
    let mut rng = Prng::new(3);
    let alone = alone(Ffn::Gated, Activation::Relu, Quant::F32, 64, 40, &mut rng);
    let mut device = device();
    let mut rig = Rig::new(&mut device, &alone, 2, -1.0, &mut rng);
    assert!(rig.bucket.iter().any(|&neuron| neuron != NONE));
    let clean = rig.run(&mut device);
    assert_eq!(rig.run(&mut device), clean);
    // Lands while the kernel runs: a call takes 5 us, a copy 1.5 us.
    let garbage = vec![1e6f32.to_bits(); rig.blocks.len()];
    put(&mut device, Stream::Compute, &rig.input, rig.call.input, 0);
    let (before, output) = (device.event(), rig.call.output);
    device.record(Stream::Compute, before);
    device.wait(Stream::Copy, before);
    device.launch(Stream::Compute, &Call::SparseFfn(rig.call));
    put(&mut device, Stream::Copy, &garbage, rig.at, 0);
    let mut seen = vec![0; rig.output.len()];
    get(&mut device, Stream::Compute, output, 0, &mut seen);
    device.synchronize(Stream::Compute);
    let (seen, clean) = (bytemuck::cast_slice(&seen[..clean.0.len()]), &clean.0);
    assert!(error(seen, clean) > 0.5, "the kernel did not notice");
}

/// Memory behind the end goes back to the system, and comes back as zeros.
#[test]
fn a_buffer_that_shrinks_gives_its_memory_back() {
    const BYTES: usize = 256 << 20;
    let resident = || -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let mut device = VirtualDevice::new(BYTES as u64, RATES);
    let host = vec![7u8; BYTES / 64];
    let buffer = device.alloc_growable(BYTES as u64, BYTES as u64).unwrap();
    for part in 0..64 {
        // SAFETY: the host bytes live until the stream has been synchronised.
        unsafe { device.copy_in(Stream::Copy, host.as_ptr(), host.len(), buffer, (part * host.len()) as u64) };
    }
    device.synchronize(Stream::Copy);
    let before = resident();
    let small = device.resize(buffer, 1 << 20).unwrap();
    assert_eq!(device.memory().used, 1 << 20);
    // Other tests of this process take and give a few MB meanwhile.
    let after = resident();
    assert!(before - after > BYTES * 3 / 4, "{before} bytes before, {after} after");
    let large = device.resize(small, BYTES as u64).unwrap();
    let mut seen = vec![1u8; BYTES / 64];
    for (part, expected) in [(0, 7u8), (1, 0), (63, 0)] {
        let at = (part * seen.len()) as u64;
        // SAFETY: as above.
        unsafe { device.copy_out(Stream::Copy, large, at, seen.as_mut_ptr(), seen.len()) };
        device.synchronize(Stream::Copy);
        let right = if part == 0 { &seen[..1 << 20] } else { &seen[..] };
        assert!(right.iter().all(|&b| b == expected), "part {part}");
    }
}
